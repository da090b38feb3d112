"""What a drafter is, and what it gets to see of the generation that it drafts for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
import torch.nn.functional as F

from vidgen.language.decoding.cache import RollbackCache
from vidgen.language.decoding.stats import SpecStats
from vidgen.runtime.checks import check_whole
from vidgen.runtime.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedModel

    from vidgen.language.decoding.nanospec import GatheredLMHead

DRAFTERS: dict[str, type[Drafter]] = {}
# What can be added to a drafter by name, as in `early_exit:1+nanospec`.
PLUGINS: dict[str, Callable[[Drafter, str | None], Drafter]] = {}
_DrafterType = TypeVar("_DrafterType", bound="type[Drafter]")
_PluginType = TypeVar("_PluginType", bound="Callable[[Drafter, str | None], Drafter]")


@dataclass
class Draft:
    """Proposed continuation of every row.

    Args:
        tokens: `(batch, k)`; columns after a row's length are padding.
        lengths: proposed tokens of each row.
        logits: `(batch, k, vocabulary)`, processed as the target's are, that the tokens were drawn from; None when
            they are certain given the context, so that their distribution is a point.
    """

    tokens: torch.Tensor
    lengths: list[int]
    logits: torch.Tensor | None = None


@dataclass
class DecodingState:
    """A running generation, as drafters see it. The last token of each row is not in the target's cache yet.

    Args:
        model: the target.
        cache: its keys and values of all columns but the last.
        ids: `(batch, columns)` tokens, aligned at the right.
        starts: column at which each row begins; what a plain generation would call its padding belongs to the row.
        last_position: `(batch,)` position of the last token.
        mask: `(batch, columns)`, 0 where a column is padding; None where nothing is.
        processors: what the target's logits pass through.
        do_sample: whether tokens are drawn.
        generator: of the draws; None is torch's own.
        stop_tokens: tokens that end a row.
        stats: of this generation.
        finished: which rows have ended; their columns mean nothing any more.
        sequences: tokens of the rows that have ended.
    """

    model: PreTrainedModel
    cache: RollbackCache
    ids: torch.Tensor
    starts: list[int]
    last_position: torch.Tensor
    mask: torch.Tensor | None
    processors: LogitsProcessorList
    do_sample: bool
    generator: torch.Generator | None
    stop_tokens: frozenset[int]
    stats: SpecStats
    finished: list[bool]
    sequences: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        return self.ids.shape[0]

    @property
    def columns(self) -> int:
        return self.ids.shape[1]

    def forward(
        self, tokens: torch.Tensor, first: int, model: PreTrainedModel, cache: RollbackCache, logits_to_keep: int = 0
    ) -> torch.Tensor:
        """Logits of a model that reads tokens into columns `first` and following of its cache.

        Args:
            tokens: `(batch, m)`.
            first: columns the cache holds.
            model: the target, or another one with the same tokenizer.
            cache: of that model.
            logits_to_keep: last positions with logits; 0 is all.

        Returns:
            `(batch, m or logits_to_keep, vocabulary)`
        """
        last = first + tokens.shape[1]
        position = torch.arange(first, last, device=tokens.device) - (self.columns - 1) + self.last_position[:, None]
        mask = self.mask
        if mask is not None:
            mask = F.pad(mask, (0, last - self.columns), value=1) if last > self.columns else mask[:, :last]
        return model(
            input_ids=tokens,
            position_ids=position.clamp(min=0),
            attention_mask=mask,
            cache=cache.cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        ).logits

    def process(self, row: int, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Logits `(vocabulary,)` of a row as plain generation would see them, after drafted tokens `(i,)`."""
        if not self.processors:
            return logits
        ids = torch.cat([self.ids[row, self.starts[row] :], drafted])
        return self.processors(ids[None], logits[None])[0]


@dataclass(frozen=True)
class Outcome:
    """What a round has come to.

    Args:
        draft: what was verified; None in a plain step.
        advanced: tokens by which each row has grown, the target's own included; 0 where it had ended before.
        shifts: columns by which each row has moved to the right; negative when a longer row has ended.
        columns_before: of the state before the round.
    """

    draft: Draft | None
    advanced: list[int]
    shifts: list[int]
    columns_before: int

    @property
    def confirmed(self) -> list[int]:
        """Drafts of each row that are now part of it."""
        return [max(0, count - 1) for count in self.advanced]


class Drafter:
    """Proposes tokens; the engine lets the target decide about them, so that what is emitted is the target's own.

    A drafter may serve many generations, one after the other.

    Args:
        model: the target.
    """

    name: ClassVar[str] = "custom"
    # A narrow head that drafts use instead of the model's; see `vidgen.language.decoding.nanospec`.
    head: GatheredLMHead | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @property
    def drafting_model(self) -> PreTrainedModel | None:
        """The model whose LM head chooses the drafts; None where no head does."""
        return None

    @classmethod
    def from_argument(cls, model: PreTrainedModel, argument: str | None) -> Drafter:
        """Made by name, from what stands behind the colon (`early_exit:8`).

        Raises:
            ConfigError: the argument is missing, wrong or one too many.
        """
        if argument is not None:
            raise ConfigError(f"{cls.name}:{argument}: {cls.name} takes no argument")
        return cls(model)

    def reset(self) -> None:
        """Forgets the generation before; called when one begins."""

    def watch(self, state: DecodingState | None) -> contextlib.AbstractContextManager[None]:
        """Is open while the target reads; for drafters that look at its hidden states. No state: it is the prefill."""
        return contextlib.nullcontext()

    def prefill(self, state: DecodingState) -> None:
        """Called once, after the target has read the prompt and the first token is chosen."""

    def get_candidates(self, state: DecodingState, limit: int) -> Draft | None:
        """Up to `limit` tokens of each row, or None for a plain step."""
        raise NotImplementedError

    def update(self, state: DecodingState, outcome: Outcome) -> None:
        """Called after each verification, with the state that has the new tokens."""


def register_drafter(name: str) -> Callable[[_DrafterType], _DrafterType]:
    """Makes a drafter known by a name."""

    def register(kind: _DrafterType) -> _DrafterType:
        kind.name = name
        DRAFTERS[name] = kind
        return kind

    return register


def register_plugin(name: str) -> Callable[[_PluginType], _PluginType]:
    """Makes what changes a drafter known by a name."""

    def register(plugin: _PluginType) -> _PluginType:
        PLUGINS[name] = plugin
        return plugin

    return register


def split_method(method: str) -> tuple[str, str | None]:
    """A drafter's name and its plug-in's, each with its argument: `early_exit:1` and `nanospec`.

    Raises:
        ConfigError: the drafter or the plug-in is unknown.
    """
    drafter, plugin = method, None
    before, plus, after = method.rpartition("+")
    # A folder's name may have a plus in it.
    if plus and (after.partition(":")[0] in PLUGINS or ":" not in before):
        drafter, plugin = before, after
        if plugin.partition(":")[0] not in PLUGINS:
            raise ConfigError(f"unknown plug-in {plugin!r} of {drafter}: {suggestion(plugin, PLUGINS)}")
    name = drafter.partition(":")[0]
    if name not in DRAFTERS:
        raise ConfigError(f"unknown drafter {name!r}: {suggestion(name, DRAFTERS)}")
    return drafter, plugin


def make_drafter(method: str, model: PreTrainedModel) -> Drafter:
    """A drafter by name, such as `prompt_lookup`, `early_exit:8`, `assisted:FOLDER` or `early_exit:1+nanospec`.

    Raises:
        ConfigError: a name is unknown or its argument wrong.
    """
    method, plugin = split_method(method)
    name, _, argument = method.partition(":")
    drafter = DRAFTERS[name].from_argument(model, argument or None)
    if plugin is None:
        return drafter
    name, _, argument = plugin.partition(":")
    return PLUGINS[name](drafter, argument or None)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How far ahead a model drafts.

    Attributes:
        max_draft_tokens: of one round.
        draft_confidence: a draft ends after a token that the drafting model gave less than this probability. It is
            where the threshold begins; from there it rises while too few drafts are confirmed and falls while nearly
            all are. None: drafts have full length.
    """

    max_draft_tokens: int = 5
    draft_confidence: float | None = 0.7

    def __post_init__(self) -> None:
        check_whole(1, max_draft_tokens=self.max_draft_tokens)
        if self.draft_confidence is not None and not 0 <= self.draft_confidence <= 1:
            raise ConfigError(f"draft_confidence={self.draft_confidence}; it must be between 0 and 1, or None")


class ConfidenceStop:
    """Threshold of confidence that follows the share of confirmed drafts.

    The update is the one of "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
    Decoding" (arXiv 2309.08168, section 3.3): a smoothed acceptance below its target raises the threshold by a small
    step, one above lowers it, and the threshold itself is smoothed.

    Args:
        threshold: at the beginning; None never stops a draft.
    """

    TARGET, STEP, MEMORY_OF_ACCEPTANCE, MEMORY_OF_THRESHOLD = 0.9, 0.01, 0.5, 0.9

    def __init__(self, threshold: float | None) -> None:
        self.threshold = threshold
        self._acceptance = self.TARGET

    def update(self, drafted: int, accepted: int) -> None:
        """Learns how many drafts of a round were confirmed."""
        if self.threshold is None or not drafted:
            return
        kept = self.MEMORY_OF_ACCEPTANCE
        self._acceptance = kept * self._acceptance + (1 - kept) * accepted / drafted
        step = self.STEP if self._acceptance <= self.TARGET else -self.STEP
        moved = self.MEMORY_OF_THRESHOLD * self.threshold + (1 - self.MEMORY_OF_THRESHOLD) * (self.threshold + step)
        self.threshold = min(1.0, max(0.0, moved))


def draw_draft(
    state: DecodingState,
    step: Callable[[torch.Tensor, int], torch.Tensor],
    limit: int,
    threshold: float | None,
    head: GatheredLMHead | None = None,
) -> Draft:
    """Drafts token by token with a model.

    When tokens are drawn, the end of a draft depends on the distribution that a token was drawn from, or on a token
    that is in the draft, never on one that was left out: the target's distribution stays exact.

    Args:
        state: of the generation.
        step: `(last tokens (batch, 1), tokens drafted so far) -> logits (batch, vocabulary)`.
        limit: longest draft.
        threshold: see `SpeculativeConfig.draft_confidence`.
        head: stands in for the model's in each step; its logits are `(batch, active tokens)`.
    """
    rows = range(state.batch_size)
    last = state.ids[:, -1:]
    drafted = last[:, :0]
    lengths, running = [0] * state.batch_size, [not finished for finished in state.finished]
    distributions = []
    for depth in range(limit):
        with head or contextlib.nullcontext():
            logits = step(last, depth).float()
        # Processors know a token by its number, and what it is drawn from is compared with the target's distribution.
        whole = head is None or bool(state.processors) or state.do_sample
        if head is not None and whole:
            logits = head.spread(logits)
        if state.processors:
            logits = torch.stack([state.process(row, drafted[row], logits[row]) for row in rows])
        if head is not None and state.processors:
            # Every active token may be forbidden here; then there is nothing to draft.
            stuck = logits.isneginf().all(-1)
            logits = logits.masked_fill(stuck[:, None], 0.0)
            running = [alive and not ends for alive, ends in zip(running, stuck.tolist(), strict=True)]
            if not any(running):
                break
        if state.do_sample:
            probabilities = logits.softmax(-1)
            last = torch.multinomial(probabilities, 1, generator=state.generator)
            distributions.append(logits)
            confidence = probabilities.amax(-1)
        else:
            highest, last = logits.max(-1, keepdim=True)
            if not whole:
                last = head.to_token_ids(last)
            # The largest probability without a whole softmax.
            confidence = None if threshold is None else (highest - logits.logsumexp(-1, keepdim=True)).exp()[:, 0]
        drafted = torch.cat([drafted, last], dim=1)
        sure = None if threshold is None else confidence.tolist()
        for row, token in enumerate(last[:, 0].tolist()):
            if running[row]:
                lengths[row] += 1
                unsure = sure is not None and sure[row] < threshold
                running[row] = not unsure and token not in state.stop_tokens
        if not any(running):
            break
    return Draft(drafted, lengths, torch.stack(distributions, dim=1) if distributions else None)
