"""KnapSpec: the target drafts without some of its attention and MLP items, chosen by latency and hidden states.

"KnapSpec: Self-Speculative Decoding via Adaptive Layer Selection as a Knapsack Problem" (arXiv 2602.20217). Beyond
the paper, because small models and short answers need it:

* times of head, forward pass and verification of several tokens are in the objective, from `LatencyProfile`;
* a plan is made only if the tokens that are still to come can pay for it, and the first one already after the prefill,
  from the prompt's last tokens;
* what a plan promises is a Beta estimate, which the rounds that follow correct; the draft length is chosen anew before
  each, and 0 (plain decoding) is one of the choices;
* the first layers alone (an early exit) are candidates too: their hidden states are known without any computation.

All decisions follow from the tokens and the profile, never from a clock, so a saved profile makes runs repeatable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from vidgen.language.decoding.base import DecodingState, Draft, Outcome, SpeculativeConfig, register_drafter
from vidgen.language.decoding.clasp import layer_plans
from vidgen.language.decoding.items import ItemRunner
from vidgen.language.decoding.knapsack import (
    SkipPlan,
    best_draft_length,
    branch_counts,
    knapsack_weights,
    solve_knapsack,
)
from vidgen.language.decoding.latency import LatencyProfile
from vidgen.language.decoding.planning import PlanningDrafter
from vidgen.language.decoding.skip import draft_logits
from vidgen.runtime.checks import check_whole
from vidgen.runtime.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Drafting has to promise this much over plain decoding: profiles are no more exact.
_LEAST_GAIN = 1.03
# Acceptance that is hoped for when no plan is known yet, to judge whether one can pay.
_HOPED_ACCEPTANCE = 0.9
# Older rounds count less and less, by this much per round.
_FORGETTING = 0.98
# A plan is stale when the context has grown by a quarter, or when the acceptance falls to less than 0.8 of what was
# promised; so many tokens have to be judged before that is believed.
_GROWTH, _DISAPPOINTMENT, _TRIALS = 1.25, 0.8, 20


@dataclass(frozen=True)
class KnapSpecConfig:
    """Settings of KnapSpec.

    Attributes:
        tau: candidates whose hidden states have a smaller mean cosine are given up.
        draft_confidence: see `SpeculativeConfig`.
        max_draft_tokens: longest draft.
        calibration_tokens: positions that a plan looks at.
        replan_interval: rounds after which a plan is due again.
        weight_cap: largest weight of an item.
        max_skip_fraction: of the model's weight, most that a plan may skip.
        weights: `"latency"`, or `"unit"` where every item weighs the same.
        unit: what is skipped: `"sublayer"` (attention and MLP apart) or whole `"layer"`s.
    """

    tau: float = 0.5
    draft_confidence: float | None = 0.7
    max_draft_tokens: int = 10
    calibration_tokens: int = 16
    replan_interval: int = 64
    weight_cap: int = 5
    max_skip_fraction: float = 0.5
    weights: Literal["latency", "unit"] = "latency"
    unit: Literal["sublayer", "layer"] = "sublayer"

    def __post_init__(self) -> None:
        check_whole(
            1,
            max_draft_tokens=self.max_draft_tokens,
            calibration_tokens=self.calibration_tokens,
            replan_interval=self.replan_interval,
            weight_cap=self.weight_cap,
        )
        if not -1 <= self.tau <= 1:
            raise ConfigError(f"tau={self.tau}; a cosine is between -1 and 1")
        if not 0 < self.max_skip_fraction < 1:
            raise ConfigError(f"max_skip_fraction={self.max_skip_fraction}; it must be between 0 and 1")
        for name, allowed in (("weights", ("latency", "unit")), ("unit", ("sublayer", "layer"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}; allowed: {', '.join(allowed)}")


@dataclass
class Acceptance:
    """Probability that a draft token is confirmed: a Beta estimate with a flat prior.

    Args:
        confirmed: tokens.
        judged: tokens: confirmed ones and, in each round, the first one that wasn't.
    """

    confirmed: float = 0.0
    judged: float = 0.0

    @property
    def estimate(self) -> float:
        return (self.confirmed + 1) / (self.judged + 2)

    def update(self, drafted: int, confirmed: int) -> None:
        """Adds a round."""
        self.confirmed = _FORGETTING * self.confirmed + confirmed
        self.judged = _FORGETTING * self.judged + confirmed + (confirmed < drafted)


@dataclass
class _Promise:
    """What the present plan was chosen for."""

    context: int
    acceptance: float
    observed: Acceptance = field(default_factory=Acceptance)


@register_drafter("knapspec")
class KnapSpecDrafter(PlanningDrafter):
    """Plans, drafts while that pays, and decodes plainly while it doesn't.

    A plan outlives the generation in which it was made.

    Args:
        model: see `vidgen.language.decoding.skip.sublayers`.
        config: settings.
        profile: of this model on this machine; measured if it isn't given.
    """

    def __init__(
        self, model: PreTrainedModel, config: KnapSpecConfig | None = None, profile: LatencyProfile | None = None
    ) -> None:
        self.settings = config or KnapSpecConfig()
        drafts = SpeculativeConfig(self.settings.max_draft_tokens, self.settings.draft_confidence)
        super().__init__(model, drafts, self.settings.calibration_tokens, self.settings.replan_interval)
        if profile is not None:
            profile.check(model)
        self.profile = profile or LatencyProfile.measure(model)
        self.acceptance = Acceptance()
        self._promise: _Promise | None = None

    # --- what it costs, by the profile ---------------------------------------------------------------------------

    def plain_speed(self, context: int) -> float:
        """Tokens per second without drafts."""
        return 1 / self.profile.pass_seconds(context)

    def best_length(self, context: int, skip: frozenset[int], acceptance: float, longest: int) -> tuple[int, float]:
        """Draft length, 0 where plain decoding is as good, and tokens per second."""
        draft = self.profile.pass_seconds(context, skip=skip)
        if self.head is not None:
            draft -= (1 - self.head.share) * self.profile.head_seconds()
        length, speed = best_draft_length(
            acceptance,
            draft,
            lambda tokens: self.profile.pass_seconds(context, tokens),
            range(1, longest + 1),
        )
        plain = self.plain_speed(context)
        return (length, speed) if speed >= _LEAST_GAIN * plain else (0, plain)

    def weights(self, context: int) -> list[int]:
        """Weight of each item."""
        attention = mlp = 1
        if self.settings.weights == "latency":
            attention, mlp = knapsack_weights(
                self.profile.attention_seconds(context), self.profile.mlp_seconds(), self.settings.weight_cap
            )
        return [attention, mlp] * self.profile.layers

    def budget(self, weights: list[int]) -> int:
        """Largest skipped weight."""
        return int(self.settings.max_skip_fraction * sum(weights))

    def plan_seconds(self, context: int, tokens: int) -> float:
        """What a plan costs."""
        weights, profile = self.weights(context), self.profile
        if self.settings.unit == "layer":
            counts = branch_counts([1] * profile.layers, int(self.settings.max_skip_fraction * profile.layers), edge=1)
            counts = [count for count in counts for _ in range(2)]
        else:
            counts = branch_counts(weights, self.budget(weights))
        return self.profile.plan_seconds(context, counts, tokens)

    def _hoped_speed(self, context: int) -> float:
        """Tokens per second if a plan were to skip all that it may and still be confirmed."""
        weights = self.weights(context)
        left, skip = self.budget(weights), set()
        # The heavier kind first
        for item in sorted(range(2, len(weights) - 2), key=lambda item: -weights[item]):
            if weights[item] <= left:
                left -= weights[item]
                skip.add(item)
        return self.best_length(context, frozenset(skip), _HOPED_ACCEPTANCE, self.config.max_draft_tokens)[1]

    # --- choosing ------------------------------------------------------------------------------------------------

    def is_due(self, state: DecodingState) -> bool:
        return super().is_due(state) or (self._promise is not None and self._is_stale(state.columns))

    def _is_stale(self, context: int) -> bool:
        promise = self._promise
        seen = promise.observed
        disappointing = seen.judged >= _TRIALS and seen.estimate < _DISAPPOINTMENT * promise.acceptance
        return disappointing or not promise.context / _GROWTH <= context <= promise.context * _GROWTH

    def plan(self, state: DecodingState, states: torch.Tensor, runner: ItemRunner, limit: int) -> None:
        context = state.columns
        if self._promise is not None and self.rounds_since_plan == 0 and not self._is_stale(context):
            return  # a new generation goes on with the plan of the last one
        now = self.plain_speed(context)
        if self.skip:
            now = self.best_length(context, self.skip, self.acceptance.estimate, self.config.max_draft_tokens)[1]
        gain = limit / now - limit / self._hoped_speed(context)
        cost = self.plan_seconds(context, states.shape[1])
        notes = state.stats.notes
        if gain <= cost:
            notes["plans_declined"] = notes.get("plans_declined", 0) + 1
            if self._promise is not None:  # don't ask again at once
                self._promise = _Promise(context, self.acceptance.estimate)
            return
        notes["plans"] = notes.get("plans", 0) + 1
        self.choose(context, states, runner)
        notes["skipped"] = sorted(self.skip)

    def choose(self, context: int, states: torch.Tensor, runner: ItemRunner) -> None:
        """Takes the candidate with the most tokens per second, or none if plain decoding is as good."""
        tokens, best = states.shape[1], self.plain_speed(context)
        chosen, acceptance = frozenset(), Acceptance()
        target = draft_logits(self.model, states[-1]).argmax(-1)
        for skip, hidden_states in self.candidates(context, states, runner):
            own = draft_logits(self.model, hidden_states).argmax(-1)
            measured = Acceptance(int((own == target).sum()), tokens)
            length, speed = self.best_length(context, skip, measured.estimate, self.config.max_draft_tokens)
            if length and speed > best:
                chosen, acceptance, best = skip, measured, speed
        self.set_skip(chosen)
        self.acceptance = acceptance
        self._promise = _Promise(context, acceptance.estimate) if chosen else None

    def candidates(
        self, context: int, states: torch.Tensor, runner: ItemRunner
    ) -> list[tuple[frozenset[int], torch.Tensor]]:
        """Sets of items to skip, with the hidden states that are left; one per skipped weight, and the early exits."""
        count = len(states) - 1
        plans = self.solve(self.weights(context), states, runner)
        exits = [(frozenset(range(item, count)), states[item]) for item in range(2, count, 2)]
        return [(plan.skip, plan.hidden_states) for plan in plans] + exits

    def solve(self, weights: list[int], states: torch.Tensor, runner: ItemRunner) -> list[SkipPlan]:
        """The knapsack's plans, by rising weight."""
        if self.settings.unit == "layer":
            return layer_plans(states, runner, int(self.settings.max_skip_fraction * self.profile.layers))
        return solve_knapsack(states, runner, weights, self.budget(weights), self.settings.tau)

    # --- drafting ------------------------------------------------------------------------------------------------

    def propose(self, state: DecodingState, limit: int) -> Draft | None:
        longest = min(limit, self.config.max_draft_tokens)
        length, _ = self.best_length(state.columns, self.skip, self.acceptance.estimate, longest)
        return self.draft(state, length) if length else None

    def update(self, state: DecodingState, outcome: Outcome) -> None:
        super().update(state, outcome)
        if outcome.draft is None:
            return
        rows = zip(outcome.draft.lengths, outcome.confirmed, outcome.advanced, strict=True)
        for drafted, confirmed, advanced in rows:
            if advanced and drafted:
                self.acceptance.update(drafted, confirmed)
                self._promise.observed.update(drafted, confirmed)
