"""Speculative decoding: a drafter proposes, the target verifies several tokens in one forward pass.

What is emitted is what the target alone would emit: with greedy decoding the same tokens (but for ties within the
rounding of batched and single forward passes), with sampling the same distribution. Drafts are accepted by modified
rejection: "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192, algorithm 1) and
"Accelerating Large Language Model Decoding with Speculative Sampling" (arXiv 2302.01318, theorem 1).

Rows of a batch advance by different lengths. Their tokens and keys are aligned at the right again after each round,
as if the shorter rows had been padded on the left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from vidgen.language.decoding.base import DecodingState, Draft, Drafter, Outcome
from vidgen.language.decoding.cache import RollbackCache
from vidgen.language.decoding.stats import SpecStats
from vidgen.runtime.errors import ConfigError

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        LogitsProcessorList,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        StoppingCriteriaList,
    )
    from transformers.generation import BaseStreamer
    from transformers.generation.utils import GenerateDecoderOnlyOutput

# Both look at a whole batch, or run the model themselves at the newest token: they can't judge a draft row by row.
_REFUSED_PROCESSORS = ("PrefixConstrainedLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")
_REFUSED_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    drafter: Drafter,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | list[str] | None = None,
    **options: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """`model.generate` with a drafter.

    Two options of `generate` get lost on transformers' way to a `custom_generate` function and are handed over here:
    `streamer` and `stop_strings` (with its `tokenizer`).

    Args:
        model: the target.
        input_ids: `(batch, length)`, padded on the left.
        drafter: proposes tokens.
        streamer: gets the prompt and then the tokens of each round, when `drafter.stats` has counted it; one row only.
        tokenizer: needed for `stop_strings`.
        stop_strings: texts that end a row.
        options: everything else that `model.generate` takes, and `generator`.

    Returns:
        What `model.generate` does. `drafter.stats` holds the `SpecStats`; so does `spec_stats` of the output with
        `return_dict_in_generate=True`.
    """
    if stop_strings is not None:
        from transformers import StoppingCriteriaList, StopStringCriteria

        if tokenizer is None:
            raise ConfigError("stop_strings are found in text: give the model's tokenizer too")
        criteria = options.pop("stopping_criteria", None) or ()
        options["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stop_strings)])
    if streamer is not None:
        streamer.put(input_ids.cpu())
    engine = partial(speculative_generate, streamer=streamer)
    return model.generate(input_ids, custom_generate=engine, drafter=drafter, **options)


@torch.no_grad()
def speculative_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | None = None,
    generator: torch.Generator | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """For `model.generate(..., custom_generate=speculative_generate, drafter=...)`, which prepares the arguments.

    transformers does not pass `streamer` and the tokenizer of `stop_strings` on to such a function; `generate` of this
    module does.

    Args:
        model: the target.
        input_ids: `(batch, length)`, padded on the left.
        logits_processor: of the target; drafts are drawn through the same.
        stopping_criteria: asked after every single token, as in plain generation.
        generation_config: `do_sample`, `max_length`, stop tokens.
        drafter: proposes tokens.
        generator: of all draws; None is torch's own.
        streamer: gets the tokens of each round.
        model_kwargs: `attention_mask`, `position_ids` and `cache`, as transformers prepares them.

    Returns:
        `(batch, length)` tokens, shorter rows padded on the right; with `return_dict_in_generate` an output that has
        them as `sequences`, and `spec_stats`.

    Raises:
        ConfigError: beams, outputs per token or a drafter of another model were asked for.
        LanguageModelError: the model's cache can't be taken back.
    """
    began = time.perf_counter()
    _check_request(model, generation_config, logits_processor, drafter, streamer, input_ids, model_kwargs)
    stats = SpecStats(drafter.name, batch_size=input_ids.shape[0])
    drafter.stats = stats
    drafter.reset()

    # The prompt, and its first token
    cache, mask = RollbackCache(model_kwargs["cache"]), model_kwargs.get("attention_mask")
    known = cache.length
    if known >= input_ids.shape[1]:
        raise ConfigError(f"the cache already holds {known} tokens and input_ids only {input_ids.shape[1]}; give all")
    # Without padding a column is its position.
    columns = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    position_ids = columns if mask is None else (mask.long().cumsum(-1) - 1).clamp(min=0)
    with drafter.watch(None):
        logits = model(
            input_ids=input_ids[:, known:],
            position_ids=position_ids[:, known:],
            attention_mask=mask,
            cache=cache.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
    cache.check()
    stop_tokens = generation_config._eos_token_tensor
    state = DecodingState(
        model=model,
        cache=cache,
        ids=input_ids,
        starts=[0] * input_ids.shape[0],
        last_position=position_ids[:, -1],
        mask=mask,
        processors=logits_processor,
        do_sample=generation_config.do_sample,
        generator=generator,
        stop_tokens=frozenset() if stop_tokens is None else frozenset(stop_tokens.flatten().tolist()),
        stats=stats,
        finished=[False] * input_ids.shape[0],
    )
    pad = 0 if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor)
    chosen = choose_tokens(state, logits, None)
    _advance(state, chosen, stopping_criteria, pad, streamer)
    stats.first_token_seconds = time.perf_counter() - began
    drafter.prefill(state)
    stats.prefill_seconds = time.perf_counter() - began - stats.plan_seconds

    while not all(state.finished):
        started, planned = time.perf_counter(), stats.plan_seconds
        # One token of a round is always the target's own.
        limit = generation_config.max_length - state.columns - 1
        draft = drafter.get_candidates(state, limit) if limit > 0 else None
        if draft is not None and not any(draft.lengths):
            draft = None
        made = time.perf_counter()
        stats.draft_seconds += made - started - (stats.plan_seconds - planned)

        tokens = state.ids[:, -1:] if draft is None else torch.cat([state.ids[:, -1:], draft.tokens], dim=1)
        with drafter.watch(state):
            logits = state.forward(tokens, state.columns - 1, model, cache)
        chosen = choose_tokens(state, logits, draft)
        stats.verify_seconds += time.perf_counter() - made
        _count(stats, state, chosen, draft)
        drafter.update(state, _advance(state, chosen, stopping_criteria, pad, streamer, draft))

    if streamer is not None:
        streamer.end()
    stats.total_seconds = time.perf_counter() - began
    sequences = _right_padded(state, pad)
    if not generation_config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    output = GenerateDecoderOnlyOutput(sequences=sequences, cache=cache.cache)
    output.spec_stats = stats
    return output


def choose_tokens(state: DecodingState, logits: torch.Tensor, draft: Draft | None) -> list[list[int]]:
    """New tokens of every row: confirmed drafts, and one of the target's own.

    Args:
        state: before the round.
        logits: `(batch, 1 + k, vocabulary)` of the target after the last token and after each draft.
        draft: k tokens, or None.

    Returns:
        Token ids of each row; none where the row has ended.
    """
    device = state.ids.device
    logits = logits.to(device=device, dtype=torch.float32)
    k = logits.shape[1] - 1
    if state.processors:
        none = state.ids[:, :0]
        drafted = none if draft is None else draft.tokens
        logits = torch.stack(
            [
                torch.stack([state.process(row, drafted[row, :depth], logits[row, depth]) for depth in range(k + 1)])
                for row in range(state.batch_size)
            ]
        )
    lengths = [0] * state.batch_size if draft is None else draft.lengths
    proposed = [[]] * state.batch_size if draft is None else draft.tokens.tolist()
    if not state.do_sample:
        best = logits.argmax(-1).tolist()
        chosen = []
        for row, length in enumerate(lengths):
            matches = 0
            while matches < length and proposed[row][matches] == best[row][matches]:
                matches += 1
            chosen.append(best[row][: matches + 1])
    else:
        chosen = _sample(state, logits.softmax(-1), draft, lengths, proposed)
    return [[] if state.finished[row] else tokens for row, tokens in enumerate(chosen)]


def _sample(
    state: DecodingState,
    target: torch.Tensor,
    draft: Draft | None,
    lengths: Sequence[int],
    proposed: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Modified rejection: x ~ q is kept with probability min(1, p(x) / q(x)), else drawn from norm(max(p - q, 0))."""
    if draft is None:
        matches = [0] * len(lengths)
        finals = target[:, 0]
    else:
        drafted = draft.tokens[..., None]
        p = target[:, :-1].gather(-1, drafted)[..., 0]  # (batch, k)
        if draft.logits is None:
            q_all = torch.zeros_like(target[:, :-1]).scatter_(-1, drafted, 1.0)
        else:
            q_all = draft.logits.softmax(-1)
        q = q_all.gather(-1, drafted)[..., 0]
        length = torch.tensor(lengths, device=p.device)
        kept = torch.rand(p.shape, generator=state.generator, device=p.device) * q < p
        kept &= torch.arange(p.shape[1], device=p.device) < length[:, None]
        count = kept.long().cumprod(dim=1).sum(dim=1)  # (batch,)
        rows = torch.arange(len(lengths), device=p.device)
        finals = target[rows, count]
        residual = (finals - q_all[rows, count.clamp(max=p.shape[1] - 1)]).clamp(min=0)
        # Rejection has probability 0 where p = q; after rounding nothing may be left to draw from.
        rejected = (count < length) & (residual.sum(-1) > 0)
        finals = torch.where(rejected[:, None], residual, finals)
        matches = count.tolist()
    own = torch.multinomial(finals, 1, generator=state.generator)[:, 0].tolist()
    return [[*proposed[row][:count], own[row]] for row, count in enumerate(matches)]


def _count(stats: SpecStats, state: DecodingState, chosen: Sequence[Sequence[int]], draft: Draft | None) -> None:
    stats.rounds += 1
    if draft is None:
        return
    stats.drafting_rounds += 1
    for row, tokens in enumerate(chosen):
        if not state.finished[row] and draft.lengths[row]:
            stats.drafted += draft.lengths[row]
            stats.accepted += len(tokens) - 1
            stats.accept_lengths[len(tokens) - 1] += 1


def _advance(
    state: DecodingState,
    chosen: Sequence[Sequence[int]],
    stopping_criteria: StoppingCriteriaList,
    pad: int,
    streamer: BaseStreamer | None,
    draft: Draft | None = None,
) -> Outcome:
    """Appends tokens to their rows, up to the first at which a row ends, and aligns ids, mask and cache again.

    A row that has ended keeps its place in the batch, but no columns: what stands there is read by nobody.
    """
    device, old_columns = state.ids.device, state.columns
    rows, advanced = [], []
    for row, tokens in enumerate(chosen):
        before = old_columns - state.starts[row]
        new = torch.tensor(tokens, dtype=state.ids.dtype, device=device)
        whole = torch.cat([state.ids[row, state.starts[row] :], new])
        for count in range(before + 1, before + len(tokens) + 1):
            if bool(stopping_criteria(whole[None, :count], None)[0]):
                whole = whole[:count]
                state.finished[row], state.sequences[row] = True, whole
                break
        rows.append(whole)
        advanced.append(0 if not tokens else len(whole) - before)
    state.stats.new_tokens += sum(advanced)
    if streamer is not None:
        streamer.put(rows[0][None, -advanced[0] :].cpu())

    running = [row for row, finished in enumerate(state.finished) if not finished]
    # Nothing follows when all have ended; then the longest rows count, for the cache that is returned.
    columns = max(len(rows[row]) for row in running or range(len(rows)))
    shifts = [0] * len(rows)
    ids = state.ids.new_full((len(rows), columns), pad)
    mask = torch.zeros_like(ids) if state.mask is not None or len({len(row) for row in rows}) > 1 else None
    for row, tokens in enumerate(rows):
        kept = tokens[-columns:]
        start = columns - len(kept)
        shifts[row] = columns - len(tokens) - state.starts[row]
        ids[row, start:] = kept
        if mask is not None:
            old = torch.ones_like(ids[row, :old_columns]) if state.mask is None else state.mask[row]
            whole_mask = F.pad(old[state.starts[row] :], (0, advanced[row]), value=1)
            mask[row, start:] = whole_mask[-columns:]
        state.starts[row] = start
    state.ids, state.mask = ids, mask
    state.last_position = state.last_position + torch.tensor(advanced, device=device)
    state.cache.realign(shifts, columns - 1)
    return Outcome(draft, advanced, shifts, old_columns)


def _right_padded(state: DecodingState, pad: int) -> torch.Tensor:
    """`(batch, longest row)` tokens as plain generation returns them."""
    longest = max(len(tokens) for tokens in state.sequences.values())
    rows = [state.sequences[row] for row in range(state.batch_size)]
    return torch.stack([F.pad(row, (0, longest - len(row)), value=pad) for row in rows])


def _check_request(
    model: PreTrainedModel,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    drafter: Drafter | None,
    streamer: BaseStreamer | None,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
) -> None:
    if drafter is None:
        raise ConfigError("speculative_generate needs a drafter: generate(..., drafter=make_drafter(NAME, model))")
    if drafter.model is not model:
        raise ConfigError(f"the drafter {drafter.name} was made for another model than the one that generates")
    if config.num_beams != 1:
        raise ConfigError(f"num_beams={config.num_beams}: drafts are verified for one beam; use num_beams=1")
    if not config.use_cache or model_kwargs.get("cache") is None:
        raise ConfigError("speculative decoding verifies against a cache: leave use_cache on")
    for name in _REFUSED_OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name):
            raise ConfigError(f"{name} is of one forward pass per token, which speculative decoding doesn't make")
    for name in ("inputs_embeds", "encoder_outputs"):
        if model_kwargs.get(name) is not None:
            raise ConfigError(f"{name}: speculative decoding continues token ids of a decoder-only model")
    for processor in processors:
        if type(processor).__name__ in _REFUSED_PROCESSORS:
            raise ConfigError(f"{type(processor).__name__} can't judge drafts; generate without a drafter")
    if streamer is not None and input_ids.shape[0] > 1:
        raise ConfigError(f"a streamer shows one row, and the batch has {input_ids.shape[0]}")
