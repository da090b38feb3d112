"""NanoSpec: drafts choose among the few tokens that the context makes likely, instead of the whole vocabulary.

"NanoSpec: Accelerating Speculative Decoding using Minimalist In-Context Vocabularies" (arXiv 2605.26444). With a large
vocabulary the head costs more than all else in a small draft. Here a draft's head has rows only of an active set:
the tokens of the context, and what the target lately held for most probable. The target verifies with its whole
vocabulary, so its output stays its own; with sampling too, as a draft's distribution is simply zero outside the set.

Beside it stands the fixed set of the most frequent tokens of some text, "FR-Spec: Accelerating Large-Vocabulary
Language Models via Frequency-Ranked Speculative Sampling" (arXiv 2502.14856).

Both are plug-ins of drafters that use a whole head: early exit, static skip, CLaSp, KnapSpec and a smaller model. It
pays where the head is a large part of a draft; `vidgen lm head-profile` shows how large. The rows of a batch share
one set (their union): one small head serves them all, and they draw from the same capacity.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from vidgen.language.decoding.base import DecodingState, Draft, Drafter, Outcome, register_plugin
from vidgen.language.decoding.stats import VocabularyStats
from vidgen.runtime.checkpoint import load_safetensors
from vidgen.runtime.checks import check_whole
from vidgen.runtime.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Columns of logits whose maximum stands for them all in the search for the largest.
_CHUNK = 512
# Positions of a prompt that meet the whole head at once: their logits must not fill the memory.
_POSITIONS = 32


class ActiveVocabulary:
    """A set of tokens, each in a slot of a fixed number, with both directions as tensors.

    New tokens are appended. When all slots are taken, they replace the tokens that came first (`fifo`) or that weren't
    added again for the longest time (`lru`). The number of new tokens is the only thing that is read back from the
    device.

    Args:
        vocab_size: tokens there are.
        capacity: most active tokens; no more than there are tokens.
        pinned_ids: tokens that are always active.
        eviction: `"fifo"` or `"lru"`.
        device: of the tables.

    Attributes:
        slot_of_token: int32 `(vocab_size,)`, -1 for a token that isn't active.
        token_of_slot: int64 `(capacity,)`; beyond the active ones it means nothing.

    Raises:
        ConfigError: more tokens are pinned than there is room for, one doesn't exist, or the eviction is unknown.
    """

    def __init__(
        self,
        vocab_size: int,
        capacity: int = 3072,
        pinned_ids: Collection[int] = (),
        eviction: Literal["fifo", "lru"] = "fifo",
        device: torch.device | str = "cpu",
    ) -> None:
        check_whole(1, vocab_size=vocab_size, capacity=capacity)
        _check_eviction(eviction)
        self.vocab_size, self.capacity, self.eviction = vocab_size, min(capacity, vocab_size), eviction
        self.slot_of_token = torch.empty(vocab_size, dtype=torch.int32, device=device)
        self.token_of_slot = torch.empty(self.capacity, dtype=torch.int64, device=device)
        # When a slot's token came, or with lru was last added; the smallest goes first.
        self._used = torch.empty(self.capacity, dtype=torch.int64, device=device)
        self.reset(pinned_ids)

    def reset(self, pinned_ids: Collection[int] = ()) -> torch.Tensor:
        """Empties the set but for pinned tokens; their slots `(pinned,)`."""
        pinned = list(dict.fromkeys(pinned_ids))
        if len(pinned) > self.capacity:
            raise ConfigError(f"{len(pinned)} pinned tokens don't fit a capacity of {self.capacity}; raise it")
        wrong = [token for token in pinned if not 0 <= token < self.vocab_size]
        if wrong:
            raise ConfigError(f"pinned token {wrong[0]}; allowed: 0 to {self.vocab_size - 1}")
        self._pinned, self._count, self._written, self._clock = len(pinned), 0, 0, 0
        self.slot_of_token.fill_(-1)
        # Free slots are older than anything, the first one the oldest.
        self._used.copy_(torch.arange(-self.capacity, 0))
        self._used[: len(pinned)] = torch.iinfo(torch.int64).max
        return self._put(torch.tensor(pinned, dtype=torch.int64), torch.arange(len(pinned)))

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> torch.Tensor:
        """Active tokens by slot, `(len,)`."""
        return self.token_of_slot[: self._count]

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        """Which tokens are active; bool in the shape of `ids`."""
        return self.slot_of_token[ids.to(self.slot_of_token.device)] >= 0

    def coverage(self, tokens: torch.Tensor) -> float:
        """Share of tokens, of any shape, that are active."""
        return float(self.contains(tokens).float().mean())

    def add(self, ids: torch.Tensor) -> torch.Tensor:
        """Makes tokens active.

        Args:
            ids: of any shape, in the order of arrival. If they don't all fit, the last ones stay.

        Returns:
            Slots `(new,)` that have another token now.
        """
        ids = ids.flatten().to(self.slot_of_token.device)
        slots = self.slot_of_token[ids]
        if self.eviction == "lru":
            self._used[slots[slots >= self._pinned].long()] = self._clock
        new = _first_occurrences(ids[slots < 0])
        room = self.capacity - self._pinned
        new = new[max(0, len(new) - room) :]
        if not len(new):
            return new
        if self.eviction == "lru":
            chosen = self._used.topk(len(new), largest=False).indices
        else:
            chosen = self._pinned + (self._written + torch.arange(len(new), device=new.device)) % room
        if self._written + len(new) > room:
            replaced = chosen[chosen < self._count]
            self.slot_of_token[self.token_of_slot[replaced]] = -1
        self._written += len(new)
        if self.eviction == "lru":
            self._used[chosen] = self._clock + 1 + torch.arange(len(new), device=new.device)
            self._clock += len(new) + 1
        return self._put(new, chosen)

    def _put(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ids, slots = ids.to(self.token_of_slot.device), slots.to(self.token_of_slot.device)
        self.token_of_slot[slots] = ids
        self.slot_of_token[ids] = slots.int()
        self._count = min(self.capacity, self._pinned + self._written)
        return slots


class StaticVocabulary(ActiveVocabulary):
    """The same tokens throughout: the baseline of FR-Spec (arXiv 2502.14856).

    Args:
        vocab_size: tokens there are.
        ids: the tokens, the most frequent first.
        device: of the tables.
    """

    def __init__(self, vocab_size: int, ids: Collection[int], device: torch.device | str = "cpu") -> None:
        super().__init__(vocab_size, len(ids), ids, device=device)

    @classmethod
    def from_counts(
        cls, counts: torch.Tensor | str | os.PathLike, size: int, device: torch.device | str = "cpu"
    ) -> StaticVocabulary:
        """The most frequent tokens.

        Args:
            counts: how often each token stands in some text, `(vocab_size,)`; or a safetensors file with such a tensor
                named `counts`.
            size: tokens to take.
            device: of the tables.

        Raises:
            ConfigError: there are no such counts, or fewer tokens than asked for.
        """
        if not isinstance(counts, torch.Tensor):
            tensors, _ = load_safetensors(counts)
            if "counts" not in tensors:
                raise ConfigError(f"{counts} has no tensor 'counts' of (vocabulary,), only {', '.join(tensors)}")
            counts = tensors["counts"]
        if counts.ndim != 1:
            raise ConfigError(f"counts of shape {tuple(counts.shape)}; they must be (vocabulary,)")
        check_whole(1, len(counts), size=size)
        return cls(len(counts), counts.argsort(descending=True, stable=True)[:size].tolist(), device)


class GatheredLMHead:
    """A head with the rows of the active tokens alone, in a buffer that only ever gets the rows of new ones.

    On CUDA the rows are copied on a stream of their own while the layers of the draft run; the first use of the head
    waits for them. As a context manager it stands in for the head it was made of, so that the model's own scaling and
    soft-cap of logits apply to it.

    Args:
        lm_head: of a model; its weight may be tied to the embeddings.
        active: its tokens.
        async_gather: copy on another stream; by default on CUDA.

    Raises:
        ConfigError: the head isn't a plain linear layer whose rows can be copied, or of another vocabulary.
    """

    def __init__(self, lm_head: nn.Module, active: ActiveVocabulary, async_gather: bool | None = None) -> None:
        _check_head(lm_head)
        if lm_head.out_features != active.vocab_size:
            raise ConfigError(f"the head has {lm_head.out_features} rows, the vocabulary {active.vocab_size} tokens")
        on_cuda = lm_head.weight.device.type == "cuda"
        if async_gather and not on_cuda:
            raise ConfigError(f"async_gather needs a CUDA device; the head is on {lm_head.weight.device}")
        self.lm_head, self.active = lm_head, active
        self.stats = VocabularyStats()
        use_stream = on_cuda if async_gather is None else async_gather
        self._stream = torch.cuda.Stream(lm_head.weight.device) if use_stream else None
        self._gathered: torch.cuda.Event | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._version: tuple[Any, ...] = ()
        self._refresh()

    @property
    def share(self) -> float:
        """Rows of this head per row of the whole one."""
        return len(self.active) / self.active.vocab_size

    def add(self, ids: torch.Tensor) -> None:
        """Makes tokens active and gathers their rows."""
        self.gather(self.active.add(ids))

    def gather(self, slots: torch.Tensor) -> None:
        """Copies the rows of the tokens in some slots `(n,)`."""
        if self._refresh() or not len(slots):
            return
        began = time.perf_counter()
        if self._stream is None:
            self._copy(slots)
        else:
            # Tokens and slots are written, and the old rows read, by work that was queued before.
            self._stream.wait_stream(torch.cuda.current_stream(slots.device))
            with torch.cuda.stream(self._stream):
                self._copy(slots)
                slots.record_stream(self._stream)
                self._gathered = self._stream.record_event()
        self.stats.gather_seconds += time.perf_counter() - began

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits `(..., active tokens)` of hidden states `(..., width)`; `to_token_ids` tells whose."""
        self._refresh()
        self._wait()
        began = time.perf_counter()
        count = len(self.active)
        logits = F.linear(hidden_states, self.rows[:count], None if self.bias is None else self.bias[:count])
        self.stats.head_seconds += time.perf_counter() - began
        return logits

    def to_token_ids(self, index: torch.Tensor) -> torch.Tensor:
        """Tokens of indices into the last dimension of the logits, in any shape."""
        return self.active.token_of_slot[index.to(self.active.token_of_slot.device)].to(index.device)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `(batch, active tokens)` over the whole vocabulary, `(batch, vocabulary)`: -inf for all others."""
        whole = logits.new_full((len(logits), self.active.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.active.ids.to(logits.device), logits)

    def __enter__(self) -> GatheredLMHead:
        # Hooks of accelerate live in the same place and have to be there again afterwards.
        self._own_forward = vars(self.lm_head).get("forward")
        self.lm_head.forward = self.forward
        return self

    def __exit__(self, *_: object) -> None:
        if self._own_forward is None:
            del self.lm_head.forward  # the class's own shows again
        else:
            self.lm_head.forward = self._own_forward

    def read_waits(self) -> None:
        """Adds to the statistics how long the device has waited for rows, once that work is known to be done."""
        for before, after in self._waits:
            self.stats.wait_seconds += before.elapsed_time(after) / 1000
        self._waits.clear()

    def _wait(self) -> None:
        if self._gathered is None:
            return
        stream = torch.cuda.current_stream(self.lm_head.weight.device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(self._gathered)
        after.record(stream)
        self._waits.append((before, after))
        self._gathered = None

    @torch.no_grad()
    def _copy(self, slots: torch.Tensor) -> None:
        ids = self.active.token_of_slot[slots]
        self.rows.index_copy_(0, slots, self.lm_head.weight.index_select(0, ids))
        if self.bias is not None:
            self.bias.index_copy_(0, slots, self.lm_head.bias.index_select(0, ids))

    def _refresh(self) -> bool:
        """Gathers everything again if the head has changed since; torch counts changes in place."""
        parameters = [parameter for parameter in (self.lm_head.weight, self.lm_head.bias) if parameter is not None]
        version = tuple((parameter.data_ptr(), parameter._version, parameter.dtype) for parameter in parameters)
        if version == self._version:
            return False
        self._wait()  # what is still being copied goes into the old buffer
        weight = self.lm_head.weight
        self.rows = weight.new_empty(self.active.capacity, weight.shape[1])
        self.bias = None if self.lm_head.bias is None else self.lm_head.bias.new_empty(self.active.capacity)
        self._version = version
        self._copy(torch.arange(len(self.active), device=weight.device))
        return True


def top_tokens(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens `(positions, count)` of the largest logits `(positions, vocabulary)`, as `topk` gives them.

    Maxima of chunks are taken first: the largest few logits are in the chunks with the largest few maxima.
    """
    size = logits.shape[-1]
    whole = size // _CHUNK * _CHUNK
    if whole < 2 * count * _CHUNK:
        return logits.topk(count).indices
    maxima = logits[:, :whole].unflatten(-1, (-1, _CHUNK)).amax(-1)
    if whole < size:
        maxima = torch.cat([maxima, logits[:, whole:].amax(-1, keepdim=True)], dim=-1)
    chunks = maxima.topk(count).indices
    places = (chunks[..., None] * _CHUNK + torch.arange(_CHUNK, device=logits.device)).flatten(1)
    values = logits.gather(1, places.clamp(max=size - 1)).masked_fill(places >= size, -torch.inf)
    return places.gather(1, values.topk(count).indices)


@dataclass(frozen=True)
class NanoSpecConfig:
    """What makes a token active.

    Attributes:
        capacity: most active tokens.
        include_prompt: the prompt's tokens. What is emitted becomes active in any case.
        prefill_topk: so many of the target's most probable tokens after a position of the prompt.
        prefill_positions: of the prompt's last positions, for which this is done; None is all, as in the paper. Each
            costs a pass through the whole head.
        verify_topk: so many of the target's most probable tokens after each emitted one.
        eviction: see `ActiveVocabulary`.
    """

    capacity: int = 3072
    include_prompt: bool = True
    prefill_topk: int = 3
    prefill_positions: int | None = 64
    verify_topk: int = 3
    eviction: Literal["fifo", "lru"] = "fifo"

    def __post_init__(self) -> None:
        check_whole(1, capacity=self.capacity)
        check_whole(0, prefill_topk=self.prefill_topk, verify_topk=self.verify_topk)
        if self.prefill_positions is not None:
            check_whole(1, prefill_positions=self.prefill_positions)
        _check_eviction(self.eviction)


class NarrowDrafter(Drafter):
    """A drafter that chooses among the tokens of a vocabulary. It takes the drafter over: use that one no longer.

    Args:
        drafter: one that uses a model's head.
        vocabulary: for a number of tokens and a device, the active ones.
        name: of the plug-in.

    Raises:
        ConfigError: the drafter has no head, or one that can't be narrowed.
    """

    def __init__(
        self, drafter: Drafter, vocabulary: Callable[[int, torch.device], ActiveVocabulary], name: str
    ) -> None:
        super().__init__(drafter.model)
        if drafter.drafting_model is None:
            raise ConfigError(f"{drafter.name} drafts without an LM head, so there is none to narrow with {name}")
        if drafter.head is not None:
            raise ConfigError(f"{drafter.name}: its head is narrowed already")
        head, size = drafter.drafting_model.get_output_embeddings(), drafter.model.config.get_text_config().vocab_size
        _check_head(head)
        if head.out_features < size:
            raise ConfigError(
                f"the draft's head is already pruned to {head.out_features} of {size} tokens; {name} needs a head of "
                "the full vocabulary"
            )
        self.inner, self.name = drafter, f"{drafter.name}+{name}"
        self.head = drafter.head = GatheredLMHead(head, vocabulary(head.out_features, head.weight.device))
        self.active = self.head.active

    @property
    def drafting_model(self) -> PreTrainedModel | None:
        return self.inner.drafting_model

    def reset(self) -> None:
        self.stats.vocabulary = self.head.stats = VocabularyStats()
        self.inner.reset()

    def watch(self, state: DecodingState | None) -> contextlib.AbstractContextManager[None]:
        return self.inner.watch(state)

    def prefill(self, state: DecodingState) -> None:
        self.inner.prefill(state)

    def get_candidates(self, state: DecodingState, limit: int) -> Draft | None:
        draft = self.inner.get_candidates(state, limit)
        if draft is not None:
            self.head.stats.count_draft(len(self.active))
        return draft

    def update(self, state: DecodingState, outcome: Outcome) -> None:
        emitted = torch.cat([tokens for _, tokens in _emitted(state, outcome)])
        self.head.stats.emitted += len(emitted)
        self.head.stats.covered += int(self.active.contains(emitted).sum())
        self.head.read_waits()
        self.inner.update(state, outcome)


class NanoSpecDrafter(NarrowDrafter):
    """Chooses among the tokens of the context and those that the target lately held for most probable.

    Args:
        drafter: see `NarrowDrafter`.
        config: what makes a token active.
    """

    def __init__(self, drafter: Drafter, config: NanoSpecConfig | None = None) -> None:
        self.config = config = config or NanoSpecConfig()

        def vocabulary(size: int, device: torch.device) -> ActiveVocabulary:
            return ActiveVocabulary(size, config.capacity, eviction=config.eviction, device=device)

        super().__init__(drafter, vocabulary, "nanospec")
        self._seen: list[torch.Tensor] = []

    def reset(self) -> None:
        super().reset()
        self._seen.clear()
        self.active.reset()

    def watch(self, state: DecodingState | None) -> contextlib.AbstractContextManager[None]:
        stack = contextlib.ExitStack()
        stack.enter_context(super().watch(state))
        # The prompt's hidden states, of which the model itself asks the head about the last only; then logits. Scaling
        # and soft-caps, which the model may apply later, don't change which are the largest.
        if state is None and self.config.prefill_topk:
            stack.enter_context(_recorded(self.model.get_decoder(), self._seen))
        elif state is not None and self.config.verify_topk:
            stack.enter_context(_recorded(self.model.get_output_embeddings(), self._seen))
        return stack

    def prefill(self, state: DecodingState) -> None:
        super().prefill(state)
        began = time.perf_counter()
        arrived = []
        if self.config.include_prompt:
            for row, start in enumerate(state.starts):
                ids = state.ids[row, start:]
                arrived.append(ids if state.mask is None else ids[state.mask[row, start:].bool()])
        if self._seen:
            arrived.append(self._probable_in_prompt(state, self._seen.pop()))
        # The last to arrive is what is drafted from.
        arrived.append(state.ids[:, -1])
        # So that a draft can end; a stop token that the head doesn't know can't come.
        stops = [token for token in sorted(state.stop_tokens) if 0 <= token < self.active.vocab_size]
        self.head.gather(self.active.reset(stops))
        self.head.add(_joined(arrived))
        self.head.stats.update_seconds += time.perf_counter() - began

    def _probable_in_prompt(self, state: DecodingState, hidden_states: torch.Tensor) -> torch.Tensor:
        """Tokens `(n,)` after the prompt's last positions; `hidden_states` `(batch, length, width)` of the target."""
        limit = self.config.prefill_positions
        length = hidden_states.shape[1] if limit is None else min(limit, hidden_states.shape[1])
        hidden_states = hidden_states[:, -length:]
        if state.mask is None:
            hidden_states = hidden_states.flatten(0, 1)
        else:
            # Rows have grown by one token since.
            hidden_states = hidden_states[state.mask[:, -length - 1 : -1].bool()]
        head = self.model.get_output_embeddings()
        chunks = hidden_states.split(_POSITIONS)
        return _joined([top_tokens(head(chunk), self.config.prefill_topk) for chunk in chunks])

    def update(self, state: DecodingState, outcome: Outcome) -> None:
        super().update(state, outcome)
        began = time.perf_counter()
        arrived = []
        logits = self._seen.pop() if self._seen else None
        for row, tokens in _emitted(state, outcome):
            if logits is not None:
                # The target's answer to each confirmed draft, and to the one that it replaced. What was drafted is
                # active already.
                arrived.append(top_tokens(logits[row, : len(tokens)], self.config.verify_topk))
            arrived.append(tokens)
        self.head.add(_joined(arrived))
        self.head.stats.update_seconds += time.perf_counter() - began


def with_nanospec(drafter: Drafter, config: NanoSpecConfig | None = None) -> NanoSpecDrafter:
    """The drafter, choosing among the tokens that the context makes likely; see `NanoSpecDrafter`."""
    return NanoSpecDrafter(drafter, config)


def with_static_vocabulary(drafter: Drafter, vocabulary: StaticVocabulary) -> NarrowDrafter:
    """The drafter, choosing among the same tokens throughout; see `NarrowDrafter`.

    Args:
        drafter: see `NarrowDrafter`.
        vocabulary: the tokens, on the device of the drafter's head.
    """
    return NarrowDrafter(drafter, lambda size, device: vocabulary, "static_vocab")


@register_plugin("nanospec")
def _nanospec_by_name(drafter: Drafter, argument: str | None) -> NanoSpecDrafter:
    if argument is None:
        return with_nanospec(drafter)
    return with_nanospec(drafter, NanoSpecConfig(capacity=parse_size("nanospec", argument)))


@register_plugin("static_vocab")
def _static_by_name(drafter: Drafter, argument: str | None) -> NarrowDrafter:
    size, _, path = (argument or "").partition(":")
    if not path:
        raise ConfigError(
            "static_vocab takes the most frequent tokens of some text: static_vocab:3072:FILE, a safetensors file "
            "with 'counts' (vocabulary,)"
        )
    device = drafter.model.get_output_embeddings().weight.device
    return with_static_vocabulary(
        drafter, StaticVocabulary.from_counts(path, parse_size("static_vocab", size), device)
    )


def parse_size(name: str, text: str) -> int:
    """The number of tokens behind a plug-in's name."""
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}:{text}: give a number of tokens, such as {name}:3072")
    return int(text)


def _check_eviction(eviction: str) -> None:
    if eviction not in ("fifo", "lru"):
        raise ConfigError(f"eviction={eviction!r}; allowed: fifo, lru")


def _check_head(head: nn.Module | None) -> None:
    """Refuses what isn't rows of numbers: quantized, sharded, adapted and offloaded heads."""
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"the LM head is a {type(head).__name__}; its rows can't be gathered: keep the head out of quantization "
            "and adapters, as an unmodified torch.nn.Linear"
        )
    weight = head.weight
    if type(weight.data) is not torch.Tensor or not weight.is_floating_point() or weight.device.type == "meta":
        raise ConfigError(
            f"the LM head's weight is a {type(weight.data).__name__} of {weight.dtype} on {weight.device}; its rows "
            "can't be gathered: load the head unquantized, unsharded and without offloading"
        )


def _first_occurrences(ids: torch.Tensor) -> torch.Tensor:
    """`(n,)` without repetitions, in order."""
    ordered, places = ids.sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ids[places[first].sort().values]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten().to(parts[0].device) for part in parts])


def _emitted(state: DecodingState, outcome: Outcome) -> list[tuple[int, torch.Tensor]]:
    """Rows that have grown, with their new tokens."""
    rows = [(row, count) for row, count in enumerate(outcome.advanced) if count]
    return [(row, state.sequences.get(row, state.ids[row])[-count:]) for row, count in rows]


@contextlib.contextmanager
def _recorded(module: nn.Module, store: list[torch.Tensor]) -> Iterator[None]:
    """Within it, the last output of a module is in `store`."""

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        store[:] = [output if isinstance(output, torch.Tensor) else output[0]]

    handle = module.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()
