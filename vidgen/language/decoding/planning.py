"""Drafters that choose from time to time what they leave out, by the target's hidden states of the newest tokens."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import torch

from vidgen.language.decoding.base import DecodingState, Draft, Outcome, SpeculativeConfig
from vidgen.language.decoding.baselines import SkipDrafter
from vidgen.language.decoding.items import ItemRunner
from vidgen.language.decoding.skip import recorded_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A prompt with fewer tokens is no calibration yet: a choice by so few is one by chance.
MIN_CALIBRATION = 8


class PlanningDrafter(SkipDrafter):
    """Gathers hidden states, and asks `plan` when there are enough of them and a choice is due.

    The prompt's last tokens are the first calibration. Later ones are gathered in the verifications of the rounds
    after a choice has become due. States come from the first row of a batch, and its choice is the choice for all.

    Args:
        model: the target.
        config: length of drafts.
        calibration_tokens: positions that a choice looks at.
        replan_interval: rounds after which a choice is due again.
    """

    def __init__(
        self, model: PreTrainedModel, config: SpeculativeConfig, calibration_tokens: int, replan_interval: int
    ) -> None:
        super().__init__(model, (), config)
        self.calibration_tokens, self.replan_interval = calibration_tokens, replan_interval
        self.reset()

    def plan(self, state: DecodingState, states: torch.Tensor, runner: ItemRunner, limit: int) -> None:
        """Chooses what to leave out.

        Args:
            state: of the generation.
            states: `(2 * layers + 1, tokens, width)` of the target.
            runner: runs items on branches of these tokens.
            limit: tokens that may still be drafted in this generation.
        """
        raise NotImplementedError

    def is_due(self, state: DecodingState) -> bool:
        """Whether to choose again."""
        return self.rounds_since_plan >= self.replan_interval

    def reset(self) -> None:
        self._gathered: torch.Tensor | None = None
        self._passes: list[torch.Tensor] = []
        self._gathering = False
        self.rounds_since_plan = 0

    def watch(self, state: DecodingState | None) -> contextlib.AbstractContextManager[None]:
        if state is None:
            return recorded_states(self.model, self.calibration_tokens, self._passes)
        self._gathering = not state.finished[0] and (self._gathering or self.is_due(state))
        return recorded_states(self.model, None, self._passes) if self._gathering else contextlib.nullcontext()

    def prefill(self, state: DecodingState) -> None:
        self._gather(self._passes.pop())

    def update(self, state: DecodingState, outcome: Outcome) -> None:
        super().update(state, outcome)
        self.rounds_since_plan += 1
        if self._passes:
            self._gather(self._passes.pop()[:, : outcome.advanced[0]])

    def _gather(self, states: torch.Tensor) -> None:
        known = states if self._gathered is None else torch.cat([self._gathered, states], dim=1)
        self._gathered = known[:, -self.calibration_tokens :]

    def get_candidates(self, state: DecodingState, limit: int) -> Draft | None:
        if self._gathered is not None and not state.finished[0]:
            begin = state.columns - 1 - int(state.last_position[0])  # the row's first token, after its padding
            last = state.columns - 1
            # One token at least is the past that branches share.
            count = min(self._gathered.shape[1], last - begin - 1)
            enough = self.calibration_tokens if self._gathering else min(MIN_CALIBRATION, self.calibration_tokens)
            if count >= enough:
                began = time.perf_counter()
                states, first = self._gathered[:, -count:], last - count
                runner = ItemRunner.from_cache(self.model, state.cache, 0, begin, first, last)
                self.plan(state, states, runner, limit)
                state.stats.plan_seconds += time.perf_counter() - began
                self._gathered, self._gathering, self.rounds_since_plan = None, False, 0
            else:
                self._gathering = True
        return self.propose(state, limit) if self.skip else None

    def propose(self, state: DecodingState, limit: int) -> Draft | None:
        """Drafts with the present choice."""
        return self.draft(state, min(limit, self.config.max_draft_tokens))
