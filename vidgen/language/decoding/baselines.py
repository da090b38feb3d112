"""Drafters to compare with: none at all, a look into the context, a second model, and fixed parts of the target."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from vidgen.language.decoding.base import (
    ConfidenceStop,
    DecodingState,
    Draft,
    Drafter,
    Outcome,
    SpeculativeConfig,
    draw_draft,
    register_drafter,
)
from vidgen.language.decoding.cache import RollbackCache
from vidgen.language.decoding.skip import SublayerSkip, sublayers
from vidgen.runtime.checks import check_whole
from vidgen.runtime.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register_drafter("plain")
class PlainDrafter(Drafter):
    """Never drafts: plain decoding on the engine, which shows what the engine itself costs."""

    def get_candidates(self, state: DecodingState, limit: int) -> None:
        return None


@register_drafter("prompt_lookup")
class PromptLookupDrafter(Drafter):
    """Continues as the context did after the last place with the same few tokens.

    "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding). The draft is certain given the context.

    Args:
        model: the target.
        max_draft_tokens: of one round.
        max_ngram: longest match that is looked for; shorter ones are tried after it.
    """

    def __init__(self, model: PreTrainedModel, max_draft_tokens: int = 10, max_ngram: int = 3) -> None:
        check_whole(1, max_draft_tokens=max_draft_tokens, max_ngram=max_ngram)
        super().__init__(model)
        self.max_draft_tokens, self.max_ngram = max_draft_tokens, max_ngram

    def get_candidates(self, state: DecodingState, limit: int) -> Draft | None:
        limit = min(limit, self.max_draft_tokens)
        found = []
        for row in range(state.batch_size):
            ids = state.ids[row] if state.mask is None else state.ids[row][state.mask[row].bool()]
            found.append(ids[:0] if state.finished[row] else self._continuation(ids, limit))
        lengths = [len(tokens) for tokens in found]
        if not max(lengths):
            return None
        tokens = state.ids.new_zeros(state.batch_size, max(lengths))
        for row, drafted in enumerate(found):
            tokens[row, : len(drafted)] = drafted
        return Draft(tokens, lengths)

    def _continuation(self, ids: torch.Tensor, limit: int) -> torch.Tensor:
        for size in range(min(self.max_ngram, len(ids) - 1), 0, -1):
            windows = ids[:-1].unfold(0, size, 1)  # the last one would only find itself
            places = (windows == ids[-size:]).all(dim=1).nonzero()[:, 0]
            if len(places):
                begin = int(places[-1]) + size
                return ids[begin : begin + limit]
        return ids[:0]


@register_drafter("assisted")
class AssistedDrafter(Drafter):
    """A smaller model with the same tokenizer drafts.

    Args:
        model: the target.
        assistant: the smaller model, on any device that the target's tokens can be moved to.
        config: length of drafts.

    Raises:
        ConfigError: the vocabularies differ.
    """

    def __init__(
        self, model: PreTrainedModel, assistant: PreTrainedModel, config: SpeculativeConfig | None = None
    ) -> None:
        super().__init__(model)
        sizes = [side.config.get_text_config().vocab_size for side in (model, assistant)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"the assistant has a vocabulary of {sizes[1]} and the target one of {sizes[0]}; they need the same "
                "tokenizer (transformers' universal assisted decoding translates between two)."
            )
        self.assistant, self.config = assistant, config or SpeculativeConfig()
        self._stop = ConfidenceStop(self.config.draft_confidence)

    @classmethod
    def from_argument(cls, model: PreTrainedModel, argument: str | None) -> AssistedDrafter:
        from vidgen.language.models import load_language_model

        if argument is None:
            raise ConfigError("assisted needs the smaller model: assisted:FOLDER")
        return cls(model, load_language_model(argument, model.device, model.dtype).model)

    @property
    def drafting_model(self) -> PreTrainedModel:
        return self.assistant

    def reset(self) -> None:
        from transformers import DynamicCache

        self._cache = RollbackCache(DynamicCache(config=self.assistant.config))

    def get_candidates(self, state: DecodingState, limit: int) -> Draft:
        def step(last: torch.Tensor, depth: int) -> torch.Tensor:
            # Before the first draft it reads what was emitted since its last one.
            first = self._cache.length
            tokens = last if depth else state.ids[:, first:]
            logits = state.forward(tokens, first, self.assistant, self._cache, logits_to_keep=1)
            return logits[:, -1].to(state.ids.device)

        return draw_draft(state, step, min(limit, self.config.max_draft_tokens), self._stop.threshold, self.head)

    def update(self, state: DecodingState, outcome: Outcome) -> None:
        # Rows that part company share only what was there before the round; the rest is read again.
        shared = outcome.columns_before - 1 + min(outcome.shifts) if any(outcome.shifts) else state.columns - 1
        self._cache.realign(outcome.shifts, max(0, min(shared, self._cache.length, state.columns - 1)))
        if outcome.draft is not None:
            self._stop.update(sum(outcome.draft.lengths), sum(outcome.confirmed))


class SkipDrafter(Drafter):
    """The target drafts for itself without some of its items, on its own cache.

    Args:
        model: the target.
        skip: items that are left out; see `vidgen.language.decoding.skip`.
        config: length of drafts.
    """

    name = "skip"

    def __init__(self, model: PreTrainedModel, skip: Collection[int], config: SpeculativeConfig | None = None) -> None:
        super().__init__(model)
        self.config = config or SpeculativeConfig()
        self._stop = ConfidenceStop(self.config.draft_confidence)
        self.set_skip(skip)

    def set_skip(self, skip: Collection[int]) -> None:
        """Drafts without these items from now on."""
        self._skipping = SublayerSkip(self.model, skip)

    @property
    def skip(self) -> frozenset[int]:
        """Items that drafts do without."""
        return self._skipping.skip

    @property
    def drafting_model(self) -> PreTrainedModel:
        return self.model

    def get_candidates(self, state: DecodingState, limit: int) -> Draft | None:
        return self.draft(state, min(limit, self.config.max_draft_tokens))

    def draft(self, state: DecodingState, limit: int) -> Draft:
        """Drafts up to `limit` tokens; the cache is as before."""

        def step(last: torch.Tensor, depth: int) -> torch.Tensor:
            return state.forward(last, state.columns - 1 + depth, self.model, state.cache)[:, -1]

        try:
            with self._skipping:
                return draw_draft(state, step, limit, self._stop.threshold, self.head)
        finally:
            state.cache.rollback(state.columns - 1)

    def update(self, state: DecodingState, outcome: Outcome) -> None:
        if outcome.draft is not None:
            self._stop.update(sum(outcome.draft.lengths), sum(outcome.confirmed))


@register_drafter("early_exit")
class EarlyExitDrafter(SkipDrafter):
    """The first layers and the head draft.

    As in "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding" (arXiv 2404.16710), whose models are
    trained for it; others draft badly this way.

    Args:
        model: the target.
        layers: how many layers draft.
        config: length of drafts.
    """

    def __init__(self, model: PreTrainedModel, layers: int, config: SpeculativeConfig | None = None) -> None:
        total = len(sublayers(model))
        check_whole(1, total - 1, layers=layers)
        super().__init__(model, range(2 * layers, 2 * total), config)

    @classmethod
    def from_argument(cls, model: PreTrainedModel, argument: str | None) -> EarlyExitDrafter:
        return cls(model, whole_argument(cls.name, argument, default=max(1, len(sublayers(model)) // 3)))


@register_drafter("static_skip")
class StaticSkipDrafter(SkipDrafter):
    """The target without a block of layers in its middle, where neighbors are most alike.

    The fixed choice that "Draft & Verify" (arXiv 2309.08168) searches for once per model; here it needs no search.

    Args:
        model: the target.
        layers: how many layers are left out.
        config: length of drafts.
    """

    def __init__(self, model: PreTrainedModel, layers: int, config: SpeculativeConfig | None = None) -> None:
        total = len(sublayers(model))
        check_whole(1, total - 2, layers=layers)
        super().__init__(model, middle_block(total, layers), config)

    @classmethod
    def from_argument(cls, model: PreTrainedModel, argument: str | None) -> StaticSkipDrafter:
        return cls(model, whole_argument(cls.name, argument, default=max(1, len(sublayers(model)) // 2)))


def middle_block(total: int, layers: int) -> range:
    """Items of so many whole layers in the middle."""
    first = (total - layers + 1) // 2
    return range(2 * first, 2 * (first + layers))


def whole_argument(name: str, argument: str | None, default: int) -> int:
    if argument is None:
        return default
    if not (argument.isascii() and argument.isdigit()):
        raise ConfigError(f"{name}:{argument}: give a number of layers, such as {name}:{default}")
    return int(argument)
