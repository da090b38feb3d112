"""The Geometric Reasoner: at the start of each chunk, several short continuations are tried and the best one is kept.

After "The Geometric Reasoner: Manifold-Informed Latent Foresight Search for Long-Context Reasoning" (arXiv
2601.18832): candidates are perturbations of a latent anchor in its tangent space, scored by a look-ahead, a
smoothness and a diversity term, and keys and values are reset per chunk. The skeleton is the paper's; its equations
were not available, so every formula here is this module's own and its controls (`space="token"`, `tangent="random"`)
decide what may be claimed. The reset follows "The Markovian Thinker" (arXiv 2510.06557).

The output distribution is changed on purpose, and samples of one prompt depend on each other.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from vidgen.language.decoding.engine import _REFUSED_OUTPUTS, _REFUSED_PROCESSORS
from vidgen.language.decoding.geometry import (
    ResidualTap,
    anchor_of,
    crowding,
    perturbed,
    random_basis,
    tangent_basis,
    turning,
)
from vidgen.language.models import LanguageModelError, decoder_layers
from vidgen.runtime.checks import check_finite_fields, check_not_negative, check_whole
from vidgen.runtime.device import generator_for
from vidgen.runtime.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from transformers import (
        DynamicCache,
        GenerationConfig,
        LogitsProcessorList,
        PreTrainedModel,
        StoppingCriteriaList,
    )
    from transformers.generation import BaseStreamer

BASIS_STATES = 128  # newest states that span the tangent space
OWN_WEIGHT = 0.5  # of a sample's own earlier anchors beside those of the other samples
REPEATED_NGRAM, REPEATS_MANY = 4, 0.5  # outputs that repeat more than this share of their 4-grams are looping


@dataclass(frozen=True)
class TGRConfig:
    """What is tried at the start of a chunk, and how it is judged.

    Attributes:
        chunk_length: generated tokens from one reset of the cache to the next, C.
        carry_over: newest generated tokens that the next chunk still sees behind the prompt; None is C / 2.
        num_candidates: continuations that are tried, J, the unperturbed one included; 1 only decodes in chunks.
        lookahead: tokens of each, H; those of the best are kept.
        anchor_layer: depth whose residual stream anchors are read from and perturbed at, as a share of all layers.
        anchor_window: newest states that an anchor is the mean of.
        tangent_rank: directions that are perturbed.
        sigma: size of a perturbation on the unit sphere.
        inject_strength: of what is added to the residual stream, in units of its norm.
        inject_tokens: forward passes after the start of a chunk that get it.
        inject_decay: factor from one of them to the next.
        lambda_smooth: weight of the turning angle.
        lambda_diverse: weight of the closeness to other anchors.
        value: `"logprob"`, `"entropy"` (negative) of the look-ahead, both by the model without perturbation, or a
            function `LookAhead -> (rows, candidates)`, larger is better.
        entropy_floor: nats per token; look-aheads of less come after all others, because a model is surest of itself
            when it repeats itself.
        space: `"latent"`, or `"token"`, whose candidates are independent draws without perturbation.
        tangent: `"local"`, the directions in which the newest states differ, or `"random"` ones.
        bank_mode: `"lockstep"` decodes the samples of a prompt together, each choosing after those before it;
            `"sequential"` one after the other.
        kv_reset: False keeps the whole context.
        seed: sample i of a request draws tokens as a plain generation of one row does after
            `torch.manual_seed(seed + i)`.
    """

    chunk_length: int = 256
    carry_over: int | None = None
    num_candidates: int = 4
    lookahead: int = 16
    anchor_layer: float = 0.67
    anchor_window: int = 32
    tangent_rank: int = 8
    sigma: float = 0.3
    inject_strength: float = 0.5
    inject_tokens: int = 8
    inject_decay: float = 0.8
    lambda_smooth: float = 0.3
    lambda_diverse: float = 0.5
    value: str | Callable[[LookAhead], torch.Tensor] = "logprob"
    entropy_floor: float = 0.0
    space: str = "latent"
    tangent: str = "local"
    bank_mode: str = "lockstep"
    kv_reset: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_finite_fields(self)
        check_whole(1, chunk_length=self.chunk_length, num_candidates=self.num_candidates)
        check_whole(1, lookahead=self.lookahead)
        if self.num_candidates > 1 and self.lookahead >= self.chunk_length:
            raise ConfigError(f"lookahead={self.lookahead}; it must be shorter than chunk_length={self.chunk_length}")
        check_whole(1, anchor_window=self.anchor_window, tangent_rank=self.tangent_rank)
        check_whole(0, inject_tokens=self.inject_tokens, seed=self.seed)
        check_not_negative(
            sigma=self.sigma,
            inject_strength=self.inject_strength,
            inject_decay=self.inject_decay,
            lambda_smooth=self.lambda_smooth,
            lambda_diverse=self.lambda_diverse,
            entropy_floor=self.entropy_floor,
        )
        if not 0 < self.anchor_layer <= 1:
            raise ConfigError(f"anchor_layer={self.anchor_layer}; it must be above 0 and at most 1")
        if self.carry_over is not None:
            check_whole(0, carry_over=self.carry_over)
        choices = {
            "space": ("latent", "token"),
            "tangent": ("local", "random"),
            "bank_mode": ("lockstep", "sequential"),
        }
        if not callable(self.value):
            choices["value"] = ("logprob", "entropy")
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {suggestion(str(getattr(self, name)), allowed)}")

    @property
    def carried(self) -> int:
        """Generated tokens that a reset keeps."""
        return self.chunk_length // 2 if self.carry_over is None else self.carry_over


@dataclass
class LookAhead:
    """Continuations of every row, for a function that values them.

    Args:
        context: `(rows, columns)` tokens before them, prompt and padding included.
        tokens: `(rows, candidates, lookahead)`; columns after an end are padding.
        valid: `(rows, candidates, lookahead)`, False after an end.
        logprobs: `(rows, candidates, lookahead)` of the tokens, by the model without perturbation, at temperature 1.
        hidden: `(rows, candidates, lookahead, width)` states of the tokens at the anchor's layer.
    """

    context: torch.Tensor
    tokens: torch.Tensor
    valid: torch.Tensor
    logprobs: torch.Tensor
    hidden: torch.Tensor


@dataclass
class ChunkRecord:
    """What was tried at the start of one chunk.

    Args:
        rows: sequences `(rows,)` that were still running.
        anchors: `(rows, width)` unit vectors.
        candidates: `(rows, candidates, width)` unit vectors; all equal to the anchor in token space.
        ends: `(rows, candidates, width)` anchors at the end of the look-aheads.
        scores: `value`, `smooth`, `diverse` `(rows, candidates)` before they are standardized.
        chosen: `(rows,)` candidate that was kept.
        curvature: `(rows,)` turning angle 1 - cos of the kept one; a diagnostic.
        positions: token positions, over all rows, that the model read from here to the next chunk.
    """

    rows: torch.Tensor
    anchors: torch.Tensor
    candidates: torch.Tensor
    ends: torch.Tensor
    scores: dict[str, torch.Tensor]
    chosen: torch.Tensor
    curvature: torch.Tensor
    positions: int = 0


@dataclass
class TGRStats:
    """What a search cost.

    Attributes:
        emitted_tokens: of all sequences.
        decoded_tokens: those and the look-aheads that were dropped.
        read_positions: token positions that went through the model: prompts, resets and scoring included.
        peak_kv_tokens: most positions that were cached of one row.
        peak_kv_cells: most positions that were cached of all rows, candidates counted as rows.
        repeat_rate: share of 4-grams that a sequence had before.
        seconds: of the call.
    """

    emitted_tokens: int = 0
    decoded_tokens: int = 0
    read_positions: int = 0
    peak_kv_tokens: int = 0
    peak_kv_cells: int = 0
    repeat_rate: float = 0.0
    seconds: float = 0.0

    @property
    def extra_tokens(self) -> int:
        return self.decoded_tokens - self.emitted_tokens

    @property
    def overhead(self) -> float:
        """Decoded tokens per emitted token."""
        return self.decoded_tokens / self.emitted_tokens if self.emitted_tokens else 1.0


@dataclass
class TGROutput:
    """With `return_dict_in_generate`.

    Args:
        sequences: `(batch * samples, length)`, shorter rows padded on the right.
        trajectories: the chunks in order; in `sequential` mode those of sample 0, then of sample 1, …
        stats: what it cost.
        bank_mode: of the config.
        independent: whether the samples of a prompt are. Where they aren't, unbiased pass@k estimates a coupled set.
    """

    sequences: torch.Tensor
    trajectories: list[ChunkRecord]
    stats: TGRStats
    bank_mode: str
    independent: bool


# --- search ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def tgr_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    tgr_config: TGRConfig | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | TGROutput:
    """For `model.generate(..., custom_generate=tgr_generate, tgr_config=...)`, which prepares the arguments.

    transformers does not pass a streamer on to such a function: give `partial(tgr_generate, streamer=streamer)`.

    Args:
        model: a decoder with full attention in every layer.
        input_ids: `(batch * samples, length)`, padded on the left; `num_return_sequences` samples of each prompt in a
            row, as transformers repeats them.
        logits_processor: of the model; look-aheads are drawn through the same.
        stopping_criteria: asked after every single token, of look-aheads too.
        generation_config: `do_sample`, `max_length`, `num_return_sequences`.
        tgr_config: the search.
        streamer: gets the prompt and then tokens that are kept; one row only.
        model_kwargs: `attention_mask` and `cache`, as transformers prepares them.

    Returns:
        `(batch * samples, length)` tokens, shorter rows padded on the right, or with `return_dict_in_generate` a
        `TGROutput`.

    Raises:
        ConfigError: the sizes don't fit each other or the model, or something is asked for that a search hasn't.
        LanguageModelError: the decoder's layers can't be found, or its cache can't be taken back.
    """
    began = time.perf_counter()
    config = tgr_config or TGRConfig()
    mask = model_kwargs.get("attention_mask")
    _check_request(model, config, generation_config, logits_processor, input_ids, streamer, model_kwargs)
    search = _Search(model, config, generation_config, logits_processor, stopping_criteria, input_ids, mask, streamer)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    every = torch.arange(input_ids.shape[0], device=input_ids.device)
    samples = generation_config.num_return_sequences
    with search.tap:
        for group in [every] if config.bank_mode == "lockstep" else every.view(-1, samples).T:
            search.run(group)
    if streamer is not None:
        streamer.end()
    sequences = search.padded()
    stats = search.stats
    stats.repeat_rate = _repeat_rate(search.sequences, input_ids.shape[1])
    stats.seconds = time.perf_counter() - began
    if config.kv_reset and stats.repeat_rate > REPEATS_MANY:
        warnings.warn(
            f"{stats.repeat_rate:.0%} of all {REPEATED_NGRAM}-grams are repetitions; models that never saw a reset "
            "context may loop: try kv_reset=False or a longer carry_over",
            stacklevel=2,
        )
    if not generation_config.return_dict_in_generate:
        return sequences
    independent = samples == 1 or config.lambda_diverse == 0 or config.num_candidates == 1
    return TGROutput(sequences, search.records, stats, config.bank_mode, independent)


class _Search:
    """All rows of a request; `run` decodes some of them to their end."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TGRConfig,
        generation: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        prompts: torch.Tensor,
        mask: torch.Tensor | None,
        streamer: BaseStreamer | None,
    ) -> None:
        layers = decoder_layers(model)
        self.model, self.config, self.processors, self.criteria = model, config, processors, criteria
        self.prompts, self.mask, self.streamer = prompts, mask, streamer
        self.sample, self.max_length = generation.do_sample, generation.max_length
        self.samples = generation.num_return_sequences
        self.pad = 0 if generation._pad_token_tensor is None else int(generation._pad_token_tensor)
        self.tap = ResidualTap(layers[max(1, round(config.anchor_layer * len(layers))) - 1])
        self.stats, self.records = TGRStats(), []
        self.sequences: dict[int, torch.Tensor] = {}
        # By chunk: kept anchors (prompts, samples, width), and which of them there are.
        self.bank: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, rows: torch.Tensor) -> None:
        """Decodes rows `(rows,)` of the request in lock-step."""
        config, device, prompt_length = self.config, self.prompts.device, self.prompts.shape[1]
        ids = self.prompts[rows]
        mask = None if self.mask is None else self.mask[rows]
        generators = [torch.Generator(device).manual_seed(config.seed + row) for row in rows.tolist()]
        searching, newest = config.num_candidates > 1, max(BASIS_STATES, config.anchor_window)
        cache, before, chunk = self._new_cache(), None, 0
        while True:
            # The context, in a fresh cache or on top of what is cached
            read_before = self.stats.read_positions
            columns = ids.shape[1]
            if chunk and not config.kv_reset:
                visible = ids
            else:
                cache = self._new_cache()
                visible = torch.cat(
                    [ids[:, :prompt_length], ids[:, max(prompt_length, columns - config.carried) :]], 1
                )
            visible_mask = None if mask is None else F.pad(mask, (0, visible.shape[1] - prompt_length), value=1)
            logits = self._forward(visible[:, cache.get_seq_length() :], cache, visible_mask, 1)[:, -1]
            # Look-ahead
            finished = torch.zeros(len(rows), dtype=torch.bool, device=device)
            lengths = torch.full((len(rows),), columns, device=device)
            direction = None
            if searching:
                if chunk == 0:
                    history = self._states()
                    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
                    mean = (history * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
                else:
                    history = torch.cat([history, self._states()[:, -1:]], 1)[:, -newest:]
                    valid = F.pad(valid, (0, 1), value=True)[:, -newest:]
                anchor = anchor_of(history, valid, mean, config.anchor_window)
                candidates = self._candidates(rows, chunk, history, valid, mean, anchor)
                directions = candidates - anchor[:, None]
                found, wide, wide_logits, ended = self._look_ahead(
                    rows, chunk, ids, cache, visible_mask, directions, generators
                )
                chosen = self._choose(
                    rows, chunk, found, wide_logits, history, valid, mean, anchor, before, candidates
                )
                every = torch.arange(len(rows), device=device)
                picked = every * config.num_candidates + chosen
                cache.batch_select_indices(picked)
                ids, logits, finished = wide[picked], wide_logits[picked, -1], ended[picked]
                lengths = columns + found.valid[every, chosen].sum(-1)
                states = [history, found.hidden[every, chosen]]
                valid = torch.cat([valid, found.valid[every, chosen]], 1)
                direction = directions[every, chosen] if config.space == "latent" else None
                before = anchor
                self._stream(ids[0, columns : int(lengths[0])])

            # The rest of the chunk
            step = ids.shape[1] - columns
            while step < config.chunk_length and not bool(finished.all()):
                tokens = self._draw(ids, logits, generators)
                tokens = tokens.masked_fill(finished, self.pad)
                ids = torch.cat([ids, tokens[:, None]], 1)
                self.stats.decoded_tokens += int((~finished).sum())
                lengths = lengths + (~finished).long()
                self._stream(tokens)
                finished = finished | self.criteria(ids, None)
                step += 1
                if step < config.chunk_length and not bool(finished.all()):
                    strength = config.inject_strength * config.inject_decay**step
                    self.tap.add(direction if step < config.inject_tokens else None, strength)
                    known = cache.get_seq_length()
                    seen = None if visible_mask is None else F.pad(mask, (0, known + 1 - prompt_length), value=1)
                    logits = self._forward(tokens[:, None], cache, seen, 1)[:, -1]
                    self.tap.add(None)
                    if searching:
                        states.append(self._states())
            if searching:
                self.records[-1].positions = self.stats.read_positions - read_before
                history = torch.cat(states, 1)
                valid = F.pad(valid, (0, history.shape[1] - valid.shape[1]), value=True)

            # Rows that have ended make room
            for index in finished.nonzero()[:, 0].tolist():
                self.sequences[int(rows[index])] = ids[index, : lengths[index]]
                self.stats.emitted_tokens += int(lengths[index]) - prompt_length
            if bool(finished.all()):
                return
            if bool(finished.any()):
                going = (~finished).nonzero()[:, 0]
                rows, ids = rows[going], ids[going]
                if searching:
                    history, valid, mean, before = (part[going] for part in (history, valid, mean, before))
                mask = None if mask is None else mask[going]
                generators = [generators[index] for index in going.tolist()]
                cache.batch_select_indices(going)
            chunk += 1

    def padded(self) -> torch.Tensor:
        """All sequences, `(rows, longest)`."""
        found = [self.sequences[row] for row in range(len(self.prompts))]
        longest = max(map(len, found))
        return torch.stack([F.pad(row, (0, longest - len(row)), value=self.pad) for row in found])

    def _new_cache(self) -> DynamicCache:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _forward(
        self, tokens: torch.Tensor, cache: DynamicCache, mask: torch.Tensor | None, logits_to_keep: int
    ) -> torch.Tensor:
        """Logits of tokens `(rows, m)` behind what is cached; `mask` `(rows, cached + m)`, None without padding."""
        known = cache.get_seq_length()
        if mask is None:
            position = torch.arange(known, known + tokens.shape[1], device=tokens.device).expand_as(tokens)
        else:
            position = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, known:]
        logits = self.model(
            input_ids=tokens,
            position_ids=position,
            attention_mask=mask,
            cache=cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        ).logits
        held = cache.get_seq_length()
        self.stats.read_positions += tokens.numel()
        self.stats.peak_kv_tokens = max(self.stats.peak_kv_tokens, held)
        self.stats.peak_kv_cells = max(self.stats.peak_kv_cells, held * len(tokens))
        return logits

    def _states(self) -> torch.Tensor:
        """Of the last forward pass, `(rows, positions, width)`; a model spread over devices has them elsewhere."""
        return self.tap.states.to(self.prompts.device)

    def _draw(
        self,
        ids: torch.Tensor,
        logits: torch.Tensor,
        generators: list[torch.Generator],
        others: list[torch.Generator] | None = None,
    ) -> torch.Tensor:
        """Next token of each row, `(rows,)`, or of each candidate of each row.

        The candidates of a row share its noise, so that they differ by their distributions alone; with `others`, one
        per row, those after the first have noise of their own.
        """
        scores = self.processors(ids, logits.float())
        if not self.sample:
            return scores.argmax(-1)
        # Drawn as torch.multinomial draws one sample of one row.
        probabilities = scores.softmax(-1)
        count = len(ids) // len(generators)
        noise = torch.empty(len(generators), count, scores.shape[-1], device=scores.device)
        for row, generator in enumerate(generators):
            noise[row, 0].exponential_(generator=generator)
            if others is not None:
                noise[row, 1:].exponential_(generator=others[row])
        if others is None and count > 1:
            noise[:, 1:] = noise[:, :1]
        return (probabilities / noise.flatten(0, 1)).argmax(-1)

    def _candidates(
        self,
        rows: torch.Tensor,
        chunk: int,
        history: torch.Tensor,
        valid: torch.Tensor,
        mean: torch.Tensor,
        anchor: torch.Tensor,
    ) -> torch.Tensor:
        """`(rows, candidates, width)` unit vectors."""
        config = self.config
        if config.space == "token":
            return anchor[:, None].expand(-1, config.num_candidates, -1)
        found = []
        for index, row in enumerate(rows.tolist()):
            generator = generator_for(config.seed + row, 1, chunk)
            if config.tangent == "random":
                basis = random_basis(anchor[index], config.tangent_rank, generator)
            else:
                states = history[index][valid[index]][-BASIS_STATES:] - mean[index]
                basis = tangent_basis(states, anchor[index], config.tangent_rank)
            noise = torch.randn(config.num_candidates - 1, basis.shape[1], generator=generator).to(basis)
            found.append(perturbed(anchor[index], basis, noise, config.sigma))
        return torch.stack(found)

    def _look_ahead(
        self,
        rows: torch.Tensor,
        chunk: int,
        ids: torch.Tensor,
        cache: DynamicCache,
        mask: torch.Tensor | None,
        directions: torch.Tensor,
        generators: list[torch.Generator],
    ) -> tuple[LookAhead, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Continues every candidate, then reads what came out without perturbation.

        The cache ends with every candidate's tokens read so: a perturbation steers which tokens are drawn, and what
        is attended to later is the model's own.

        Returns:
            the continuations, their whole rows `(rows * candidates, columns)`, logits `(rows * candidates,
            lookahead + 1, vocabulary)` and which have ended.
        """
        config, count, columns = self.config, self.config.num_candidates, ids.shape[1]
        latent = config.space == "latent"
        others = None
        if not latent:
            others = [generator_for(config.seed + row, 2, chunk, device=ids.device) for row in rows.tolist()]
        _take_back(cache, 1)  # the last token of the context is read by each candidate
        cache.batch_repeat_interleave(count)
        known = cache.get_seq_length()
        wide = ids.repeat_interleave(count, 0)
        wide_mask = None if mask is None else mask.repeat_interleave(count, 0)
        ended = torch.zeros(len(wide), dtype=torch.bool, device=ids.device)
        valid = []
        for step in range(min(config.lookahead, self.max_length - columns)):
            steered = latent and step < config.inject_tokens
            strength = config.inject_strength * config.inject_decay**step
            self.tap.add(directions.flatten(0, 1) if steered else None, strength)
            seen = None if wide_mask is None else F.pad(wide_mask, (0, step), value=1)
            logits = self._forward(wide[:, -1:], cache, seen, 1)[:, -1]
            self.tap.add(None)
            tokens = self._draw(wide, logits, generators, others).masked_fill(ended, self.pad)
            wide = torch.cat([wide, tokens[:, None]], 1)
            valid.append(~ended)
            self.stats.decoded_tokens += int((~ended).sum())
            ended = ended | self.criteria(wide, None)
            if bool(ended.all()):
                break
        made = len(valid)
        _take_back(cache, cache.get_seq_length() - known)
        seen = None if wide_mask is None else F.pad(wide_mask, (0, made), value=1)
        logits = self._forward(wide[:, columns - 1 :], cache, seen, 0)
        shape = (len(ids), count, made)
        tokens, valid = wide[:, columns:], torch.stack(valid, 1)
        logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        found = LookAhead(
            context=ids,
            tokens=tokens.view(shape),
            valid=valid.view(shape),
            logprobs=logprobs.masked_fill(~valid, 0).view(shape),
            hidden=self._states()[:, 1:].unflatten(0, shape[:2]),
        )
        return found, wide, logits, ended

    def _choose(
        self,
        rows: torch.Tensor,
        chunk: int,
        found: LookAhead,
        logits: torch.Tensor,
        history: torch.Tensor,
        valid: torch.Tensor,
        mean: torch.Tensor,
        anchor: torch.Tensor,
        before: torch.Tensor | None,
        candidates: torch.Tensor,
    ) -> torch.Tensor:
        """Candidate of each row, `(rows,)`; puts its end into the bank."""
        config, count = self.config, self.config.num_candidates
        ends = anchor_of(
            torch.cat([history[:, None].expand(-1, count, -1, -1), found.hidden], 2),
            torch.cat([valid[:, None].expand(-1, count, -1), found.valid], 2),
            mean[:, None].expand(-1, count, -1),
            config.anchor_window,
        )
        value, smooth = look_ahead_value(config, found, logits[:, :-1]), turning(ends, anchor, before)
        if chunk == len(self.bank):
            shape = (len(self.prompts) // self.samples, self.samples)
            self.bank.append((ends.new_zeros(*shape, ends.shape[-1]), torch.zeros(shape, dtype=torch.bool)))
        anchors, present = self.bank[chunk]
        prompt, sample = (part.cpu() for part in (rows // self.samples, rows % self.samples))
        diverse, chosen = torch.zeros_like(value), torch.zeros_like(rows)
        for turn in sample.unique().tolist():
            at = (sample == turn).nonzero()[:, 0]
            where = prompt[at]
            own = [(kept[where, turn], there[where, turn]) for kept, there in self.bank[:chunk]]
            bank = torch.cat([anchors[where], *(kept[:, None] for kept, _ in own)], 1)
            weights = torch.cat(
                [present[where].float(), *(OWN_WEIGHT * there[:, None].float() for _, there in own)], 1
            )
            diverse[at] = crowding(ends[at], bank, weights.to(bank))
            chosen[at] = combined(value[at], smooth[at], diverse[at], config).argmax(-1)
            anchors[where, turn], present[where, turn] = ends[at, chosen[at]], True
        picked = torch.arange(len(rows), device=rows.device)
        self.records.append(
            ChunkRecord(
                rows=rows,
                anchors=anchor,
                candidates=candidates,
                ends=ends,
                scores={"value": value, "smooth": smooth, "diverse": diverse},
                chosen=chosen,
                curvature=smooth[picked, chosen],
            )
        )
        return chosen

    def _stream(self, tokens: torch.Tensor) -> None:
        if self.streamer is not None and len(tokens):
            self.streamer.put(tokens[None].cpu())


def _take_back(cache: DynamicCache, count: int) -> None:
    if cache.get_seq_length() == count:
        cache.reset()  # a layer of no positions can't grow to another number of rows
    else:
        cache.crop(-count)


def combined(value: torch.Tensor, smooth: torch.Tensor, diverse: torch.Tensor, config: TGRConfig) -> torch.Tensor:
    """Scores `(rows, candidates)`: each part is standardized over the candidates, and 0 where they agree."""
    return _standard(value) - config.lambda_smooth * _standard(smooth) - config.lambda_diverse * _standard(diverse)


def _standard(values: torch.Tensor) -> torch.Tensor:
    centered = values - values.mean(-1, keepdim=True)
    deviation = centered.square().mean(-1, keepdim=True).sqrt()
    agree = deviation <= 1e-6 * values.abs().amax(-1, keepdim=True).clamp(min=1)
    return torch.where(agree, torch.zeros_like(values), centered / deviation.clamp(min=1e-12))


def look_ahead_value(config: TGRConfig, found: LookAhead, logits: torch.Tensor) -> torch.Tensor:
    """Value of each continuation, `(rows, candidates)`; means are over its real tokens alone.

    Args:
        config: `value` and `entropy_floor`.
        found: the continuations.
        logits: `(rows * candidates, lookahead, vocabulary)` that their tokens were drawn from, without perturbation.

    Raises:
        ConfigError: the config's function returns something else.
    """
    length = found.valid.sum(-1)
    needs_entropy = config.value == "entropy" or config.entropy_floor > 0
    if needs_entropy:
        logarithms = logits.float().log_softmax(-1)
        by_token = -(logarithms.exp() * logarithms).nansum(-1).view(found.valid.shape)
        entropy = (by_token * found.valid).sum(-1) / length
    if callable(config.value):
        value = config.value(found)
        if not isinstance(value, torch.Tensor) or value.shape != length.shape or not bool(value.isfinite().all()):
            given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(f"value returned {given}; it must be finite numbers {tuple(length.shape)}")
        value = value.float()
    else:
        value = -entropy if config.value == "entropy" else found.logprobs.sum(-1) / length
    if config.entropy_floor > 0:
        below = value.amin(-1, keepdim=True) - (config.entropy_floor - entropy)
        value = torch.where(entropy < config.entropy_floor, below, value)
    return value


def _repeat_rate(sequences: dict[int, torch.Tensor], prompt_length: int) -> float:
    """Share of the generated 4-grams that their sequence had before; 0 where none is long enough."""
    repeated, total = 0, 0
    for sequence in sequences.values():
        made = sequence[prompt_length:]
        if len(made) >= REPEATED_NGRAM:
            grams = made.unfold(0, REPEATED_NGRAM, 1)
            total += len(grams)
            repeated += len(grams) - len(grams.unique(dim=0))
    return repeated / total if total else 0.0


def _check_request(
    model: PreTrainedModel,
    config: TGRConfig,
    generation: GenerationConfig,
    processors: LogitsProcessorList,
    input_ids: torch.Tensor,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> None:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if generation.num_beams != 1:
        raise ConfigError(f"num_beams={generation.num_beams}: a search keeps one continuation; use num_beams=1")
    for name in _REFUSED_OUTPUTS:
        if generation.return_dict_in_generate and getattr(generation, name):
            raise ConfigError(f"{name} is of one forward pass per token; a search returns `trajectories` instead")
    for name in ("inputs_embeds", "encoder_outputs"):
        if model_kwargs.get(name) is not None:
            raise ConfigError(f"{name}: a search continues token ids of a decoder-only model")
    for processor in processors:
        if type(processor).__name__ in _REFUSED_PROCESSORS:
            raise ConfigError(f"{type(processor).__name__} can't follow rows and candidates of a search; leave it out")
    cache = model_kwargs.get("cache")
    if not generation.use_cache or cache is None:
        raise ConfigError("a search continues candidates from a shared cache: leave use_cache on")
    if not isinstance(cache, DynamicCache):
        raise ConfigError(
            f"the cache is a {type(cache).__name__}; candidates repeat rows of the cache, which needs a DynamicCache: "
            "leave cache_implementation unset and don't compile the model's decoding"
        )
    if cache.get_seq_length():
        raise ConfigError("the cache already holds tokens; a search reads its own context: pass none")
    for index, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) is not DynamicLayer:
            raise LanguageModelError(
                f"layer {index} of the cache is a {type(layer).__name__}, which can't take tokens back; a search "
                "needs full attention in every layer"
            )
    prompt, carried, chunk = input_ids.shape[1], config.carried, config.chunk_length
    if config.kv_reset and carried >= chunk:
        raise ConfigError(
            f"carry_over={carried}, chunk_length={chunk}, prompt of {prompt} tokens: a chunk must be longer than what "
            "it carries over"
        )
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    needed = prompt + carried + chunk if config.kv_reset else generation.max_length
    if window is not None and min(needed, generation.max_length) > window:
        raise ConfigError(
            f"prompt of {prompt} tokens, carry_over={carried}, chunk_length={chunk}: up to "
            f"{min(needed, generation.max_length)} positions, and the model has {window}; shorten one of the three"
        )
    if streamer is not None and input_ids.shape[0] > 1:
        raise ConfigError(f"a streamer shows one row, and the batch has {input_ids.shape[0]}")
    if not generation.do_sample and config.space == "token" and config.num_candidates > 1:
        raise ConfigError("space='token' draws its candidates: set do_sample=True")
