"""Generation with masked diffusion language models: blocks of masks that are filled in, most certain tokens first.

The loop over blocks, cached keys and values, and the rules of remasking are those of SDAR (arXiv 2510.06303) and LLaDA
(arXiv 2502.09992); prefix and dual caches are Fast-dLLM's (arXiv 2505.22618), the entropy bound is EB-Sampler's (arXiv
2505.24857). With residual context (see `rcd`) the uncommitted predictions of a step enter the next one.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput, cached_file

from vidgen.language.dllm.rcd import ResidualContextConfig, inject_residual, residual_context
from vidgen.runtime.checks import check_not_negative, check_whole
from vidgen.runtime.errors import ConfigError, suggestion

REMASKING = ("low_confidence_static", "low_confidence_dynamic", "sequential", "entropy_bound")
CACHES = ("none", "prefix", "dual", "block")

KeyValues = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class DLLMGenerationConfig(GenerationConfig):
    """How a diffusion language model generates; saved as the model's `generation_config.json`.

    Args:
        max_new_tokens: masks appended to the prompt; 0 fills in the masks that `input_ids` holds, and nothing else.
        block_length: tokens that are denoised together. Default: a block model's own, else all.
        denoising_steps: forwards a block takes at most. Default: one per mask.
        remasking: which predictions are kept. `"low_confidence_static"` the most probable, equally many at each step;
            `"low_confidence_dynamic"` all above `confidence_threshold`, but at least so many; `"sequential"` the
            leftmost ones; `"entropy_bound"` the most certain ones as long as the entropies of all but the least
            certain of them add up to at most `entropy_bound` nats.
        confidence_threshold: probability above which a token is kept.
        entropy_bound: see `remasking`.
        temperature: of the draw of tokens; 0 takes the most probable one. Confidence is always untempered.
        top_k: tokens that may be drawn; None = all.
        top_p: probability mass that may be drawn; None = all.
        use_cache: `"block"` keeps keys and values of finished blocks of a block model: the same result in less time.
            `"prefix"` keeps what is before the current block of a bidirectional model, `"dual"` also what is after it,
            both as they were at the block's first step: an approximation. `"none"` keeps nothing. Default: `"block"`
            for block models, else `"none"`.
        rcd: fields of `ResidualContextConfig`; None = no residual context.
        eos_token_id: ends a row; what follows is padding.
        pad_token_id: stands after the end. Default: the end token itself.
    """

    def __init__(self, **kwargs: Any) -> None:
        # Without super().__init__(): its sixty options of autoregressive decoding mean nothing here.
        self.max_new_tokens: int = kwargs.pop("max_new_tokens", 128)
        self.block_length: int | None = kwargs.pop("block_length", None)
        self.denoising_steps: int | None = kwargs.pop("denoising_steps", None)
        self.remasking: str = kwargs.pop("remasking", "low_confidence_dynamic")
        self.confidence_threshold: float = kwargs.pop("confidence_threshold", 0.85)
        self.entropy_bound: float = kwargs.pop("entropy_bound", 0.1)
        self.temperature: float = kwargs.pop("temperature", 0.0)
        self.top_k: int | None = kwargs.pop("top_k", None)
        self.top_p: float | None = kwargs.pop("top_p", None)
        self.use_cache: str | None = kwargs.pop("use_cache", None)
        rcd = kwargs.pop("rcd", None)
        self.rcd: dict[str, Any] | None = dataclasses.asdict(rcd) if isinstance(rcd, ResidualContextConfig) else rcd
        self.bos_token_id: int | None = kwargs.pop("bos_token_id", None)
        self.eos_token_id: int | list[int] | None = kwargs.pop("eos_token_id", None)
        self.pad_token_id: int | None = kwargs.pop("pad_token_id", None)
        self._commit_hash = kwargs.pop("_commit_hash", None)
        self._from_model_config = kwargs.pop("_from_model_config", False)
        self.transformers_version = kwargs.pop("transformers_version", None)
        self._original_object_hash = None
        if kwargs:
            name = next(iter(kwargs))
            raise ConfigError(f"unknown generation option {name!r}: {suggestion(name, self.option_names())}")
        self.validate()

    def option_names(self) -> list[str]:
        """The options a user can give."""
        return [name for name in vars(self) if not name.startswith("_") and name != "transformers_version"]

    def validate(self, **_: Any) -> None:
        """Refuses values that can't be meant.

        Raises:
            ConfigError: one of them.
        """
        for name, allowed in (("remasking", REMASKING), ("use_cache", CACHES)):
            value = getattr(self, name)
            if value not in allowed and not (name == "use_cache" and value is None):
                raise ConfigError(f"{name}={value!r}: {suggestion(str(value), allowed)}")
        check_whole(0, max_new_tokens=self.max_new_tokens)
        for name in ("block_length", "denoising_steps", "top_k"):
            if getattr(self, name) is not None:
                check_whole(1, **{name: getattr(self, name)})
        for name in ("confidence_threshold", "entropy_bound", "temperature"):
            check_not_negative(**{name: getattr(self, name)})
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}; allowed: above 0, up to 1")
        self.residual_config()

    def residual_config(self) -> ResidualContextConfig | None:
        """`rcd` as an object."""
        if self.rcd is None:
            return None
        names = [known.name for known in dataclasses.fields(ResidualContextConfig)]
        for name in self.rcd:
            if name not in names:
                raise ConfigError(f"unknown key rcd.{name}: {suggestion(name, names)}")
        return ResidualContextConfig(**self.rcd)

    def get_generation_mode(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("diffusion language models have one mode of generation")

    @classmethod
    def from_model_config(cls, model_config: Any) -> DLLMGenerationConfig:
        """Default options, with the special tokens of a model."""
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return cls(**{name: getattr(model_config, name, None) for name in names})


@dataclass
class DLLMStats:
    """Forwards of a call of `generate`, each of the whole batch.

    Attributes:
        denoising: forwards that tokens were committed from, or that started a residual.
        reference: of the reference model.
        cache: that computed keys and values of prompts and finished blocks.
    """

    denoising: int = 0
    reference: int = 0
    cache: int = 0


@dataclass
class DLLMBlockStats:
    """One block, per row of the batch.

    Attributes:
        start: position of its first token in the longest prompt's row.
        length: of the block.
        forwards: denoising forwards and those of the reference model.
        tokens: masks that were filled in and belong to the result.
    """

    start: int
    length: int
    forwards: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass
class DLLMGenerateOutput(ModelOutput):
    """What `generate` gives.

    Args:
        sequences: `(batch, length + max_new_tokens)`, laid out as `input_ids` was.
        tokens_per_forward: float `(batch,)`: tokens filled in, up to the end of the row, divided by `denoising_steps`.
        denoising_steps: int `(batch,)`: forwards while the row was not finished, the reference model's counted too.
        block_stats: `DLLMBlockStats` of every block.
        stats: forwards of the whole call.
    """

    sequences: torch.Tensor | None = None
    tokens_per_forward: torch.Tensor | None = None
    denoising_steps: torch.Tensor | None = None
    block_stats: list[DLLMBlockStats] | None = None
    stats: DLLMStats | None = None


@dataclass
class _Canvas:
    """Rows of one batch with their blocks in the same columns.

    Attributes:
        ids: `(batch, columns)`.
        pads: `(batch,)` columns before a row's first token.
        ends: `(batch,)` first column that is not part of a row's result.
        firsts: `(batch,)` column of a row's first mask.
        lengths: `(batch,)` tokens of the prompts.
        start: column of the first block.
    """

    ids: torch.Tensor
    pads: torch.Tensor
    ends: torch.Tensor
    firsts: torch.Tensor
    lengths: torch.Tensor
    start: int

    @property
    def columns(self) -> torch.Tensor:
        return torch.arange(self.ids.shape[1], device=self.ids.device)

    @property
    def positions(self) -> torch.Tensor:
        """Position of every column within its row, `(batch, columns)`."""
        return (self.columns - self.pads[:, None]).clamp(min=0)

    @property
    def valid(self) -> torch.Tensor:
        """Columns that hold a token, bool `(batch, columns)`."""
        return self.columns >= self.pads[:, None]


class DLLMGenerationMixin:
    """`generate` for models with the forward of `MaskedDiffusionLM`."""

    def adjust_generation_fn(
        self, generation_config: Any, from_auto_class: bool, from_pipeline: Any, source: Any, *_: Any, **kwargs: Any
    ) -> None:
        """Called by `from_pretrained`: takes the folder's generation config."""
        if generation_config is not None:
            self.generation_config = DLLMGenerationConfig.from_dict(generation_config.to_dict())
            return
        if source is None:
            return
        where = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
        file = cached_file(
            source,
            "generation_config.json",
            _raise_exceptions_for_missing_entries=False,
            **{name: kwargs[name] for name in where if name in kwargs},
        )
        if file is None:
            return
        values = json.loads(Path(file).read_text(encoding="utf-8"))
        names = self.generation_config.option_names()
        if "remasking" not in values:  # another library's file, whose other options mean something else
            names = [name for name in names if name.endswith("_token_id")]
        self.generation_config = DLLMGenerationConfig(**{key: values[key] for key in names if key in values})

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        generation_config: DLLMGenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        streamer: BaseStreamer | None = None,
        generator: torch.Generator | None = None,
        reference_model: PreTrainedModel | None = None,
        **options: Any,
    ) -> DLLMGenerateOutput:
        """Fills in the masks of `input_ids` and `max_new_tokens` more after it, block by block.

        Args:
            input_ids: `(batch, length)`, prompts padded on the left; masks in them are filled in too.
            attention_mask: `(batch, length)`, 0 where padding stands.
            generation_config: default the model's own.
            logits_processor: called with the whole rows and the block's logits `(batch, block, vocab)`; what it does
                counts for the choice of tokens, not for confidence and residuals.
            stopping_criteria: called after every block with the rows so far and None.
            streamer: of one row. It gets what is before the first mask, then block by block what follows it, up to
                the end; one with `put_draft` also gets what a block would become, after every step.
            generator: source of all draws.
            reference_model: for residual contexts that start with one (`rcd["init"] == "reference"`).
            options: changes to the generation config.

        Raises:
            ConfigError: options that don't fit the model.
        """
        config = self._generation_options(generation_config, options)
        residual = config.residual_config()
        self._check_reference(residual, reference_model)
        if streamer is not None and len(input_ids) > 1:
            raise ConfigError(f"a streamer shows one row, not {len(input_ids)}")
        block_length, cache_kind = self._block_length(config, input_ids), self._cache_kind(config)
        canvas = self._lay_out(input_ids, attention_mask, config.max_new_tokens, block_length)
        run = _Run(self, canvas, config, residual, block_length, cache_kind, logits_processor, generator)
        run.reference, run.streamer = reference_model, streamer
        if streamer is not None:
            streamer.put(canvas.ids[:, int(canvas.pads[0]) : int(canvas.firsts[0])].cpu())

        ends = config.eos_token_id
        ends = torch.tensor([] if ends is None else [ends] if isinstance(ends, int) else ends, device=input_ids.device)
        blank = canvas.ids == self.config.mask_token_id  # before anything is filled in
        stopped = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for start in range(canvas.start, canvas.ids.shape[1], block_length):
            stop = min(start + block_length, canvas.ids.shape[1])
            run.denoise(start, stop, ~stopped & (canvas.ends > start))
            is_end = torch.isin(canvas.ids[:, start:stop], ends) & blank[:, start:stop]
            stopped |= is_end.any(1)
            if streamer is not None:
                until_end = (is_end.long().cumsum(1) - is_end.long() == 0)[0]
                streamer.put(run.visible_part(canvas.ids[:, start:stop], start, until_end))
            if stopping_criteria is not None:
                stopped |= stopping_criteria(canvas.ids[:, :stop], None)
            if (stopped | (canvas.ends <= stop)).all():
                break
        if streamer is not None:
            streamer.end()
        return run.output(input_ids, blank, ends)

    def _generation_options(
        self, generation_config: DLLMGenerationConfig | None, options: dict[str, Any]
    ) -> DLLMGenerationConfig:
        config = generation_config or self.generation_config
        if not isinstance(config, DLLMGenerationConfig):
            raise ConfigError(f"generation_config is a {type(config).__name__}; give a DLLMGenerationConfig")
        names = config.option_names()
        return DLLMGenerationConfig(**{**{name: getattr(config, name) for name in names}, **options})

    def _check_reference(self, residual: ResidualContextConfig | None, reference: PreTrainedModel | None) -> None:
        wanted = residual is not None and residual.init == "reference"
        if wanted and reference is None:
            raise ConfigError("rcd.init='reference' needs reference_model=...; allowed without: cold, self, dirichlet")
        if reference is not None:
            check_same_vocabulary(self, reference)

    def _block_length(self, config: DLLMGenerationConfig, input_ids: torch.Tensor) -> int:
        if self.config.mask_token_id is None:
            raise ConfigError(f"{type(self).__name__} has no mask token: set config.mask_token_id")
        trained = self.config.block_size
        length = config.block_length or trained or max(1, input_ids.shape[1] + config.max_new_tokens)
        if trained is not None and length != trained:
            warnings.warn(f"block_length={length}, but the model was trained with {trained}", stacklevel=3)
        return length

    def _cache_kind(self, config: DLLMGenerationConfig) -> str:
        blocks = self.config.block_size is not None
        kind = config.use_cache or ("block" if blocks else "none")
        if kind != "none" and blocks != (kind == "block"):
            raise ConfigError(
                f"use_cache={kind!r} does not fit a {'block' if blocks else 'bidirectional'} model; "
                f"allowed: {'block, none' if blocks else 'prefix, dual, none'}"
            )
        return kind

    def _lay_out(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, new: int, block_length: int
    ) -> _Canvas:
        batch, length = input_ids.shape
        device, mask_id = input_ids.device, self.config.mask_token_id
        lengths = torch.full((batch,), length, device=device)
        if attention_mask is not None:
            lengths = attention_mask.long().sum(1)
            padded_left = torch.arange(length, device=device) >= (length - lengths)[:, None]
            if not torch.equal(attention_mask.bool(), padded_left):
                raise ConfigError("attention_mask has padding after or within a prompt; pad on the left")
        if (lengths == 0).any() and new == 0:
            raise ConfigError("a row has no tokens and max_new_tokens=0; there is nothing to generate")
        # Index within the row of its first mask, the prompt's end where it has none.
        tokens = torch.arange(length, device=device) - (length - lengths)[:, None]
        is_mask = (input_ids == mask_id) & (tokens >= 0)
        first = torch.where(is_mask, tokens, lengths[:, None]).amin(1)
        if self.config.block_size is None:
            pads, columns = length - lengths, length + new
            start = int((pads + first).amin())
        else:
            # A block model counts blocks from a row's first token, so rows are moved by whole blocks.
            whole = first // block_length
            pads = (whole.amax() - whole) * block_length
            start = int(whole.amax()) * block_length
            columns = int((pads + lengths + new).amax())
            columns = -(-columns // block_length) * block_length
        limit = self.config.max_position_embeddings
        if columns - int(pads.amin()) > limit:
            raise ConfigError(f"{columns - int(pads.amin())} tokens; the model has positions for {limit}")
        ids = torch.full((batch, columns), mask_id, dtype=torch.long, device=device)
        for row in range(batch):
            begin, count = int(pads[row]), int(lengths[row])
            ids[row, begin : begin + count] = input_ids[row, length - count :]
        return _Canvas(ids, pads, pads + lengths + new, pads + first, lengths, start)


class _Run:
    """State of one call of `generate`."""

    def __init__(
        self,
        model: Any,
        canvas: _Canvas,
        config: DLLMGenerationConfig,
        residual: ResidualContextConfig | None,
        block_length: int,
        cache_kind: str,
        processors: LogitsProcessorList | None,
        generator: torch.Generator | None,
    ) -> None:
        self.model, self.canvas, self.config, self.residual = model, canvas, config, residual
        self.block_length, self.cache_kind, self.processors = block_length, cache_kind, processors
        self.generator = generator
        self.reference: PreTrainedModel | None = None
        self.streamer: BaseStreamer | None = None
        self.mask_id, self.shift = model.config.mask_token_id, model.config.logits_shift
        self.table = model.get_input_embeddings()
        self.is_block_model = model.config.block_size is not None
        self.positions, self.valid = canvas.positions, canvas.valid
        self.all_valid = bool(self.valid.all())
        self.stats, self.blocks = DLLMStats(), []
        self.past: KeyValues | None = None  # of committed blocks, with cache_kind "block"
        if cache_kind == "block" and canvas.start > 0:
            self.past = self._encode(0, canvas.start)

    def denoise(self, start: int, stop: int, active: torch.Tensor) -> None:
        """Fills in the masks of columns [start, stop) in the active rows."""
        canvas, config = self.canvas, self.config
        block = canvas.ids[:, start:stop]  # a view
        masked = (block == self.mask_id) & self.valid[:, start:stop] & active[:, None]
        counts = masked.sum(1)
        steps = config.denoising_steps or stop - start
        stats = DLLMBlockStats(start, stop - start)
        inside = torch.arange(start, stop, device=block.device) < canvas.ends[:, None]
        stats.tokens = (masked & inside).sum(1).tolist()
        forwards = torch.zeros_like(counts)
        window = None  # keys and values around the block, with cache_kind "prefix" or "dual"

        context = None
        if (masked & inside).any():
            context = self._first_residual(start, stop)
            if self.residual is not None and self.residual.init in ("self", "reference"):
                forwards += (masked & inside).any(1)
        for step in range(steps):
            # Masks after a row's end only complete its last block.
            masked = masked & (masked & inside).any(1, keepdim=True)
            if not masked.any():
                break
            forwards += masked.any(1)
            logits, window = self._logits(start, stop, masked, context, window)
            p = _without(logits, self.mask_id).softmax(-1)  # (batch, block, vocab)
            tokens = self._choose(start, stop, logits)
            # The same number at every step, the remainder at the first ones.
            quota = counts // steps + (step < counts % steps)
            accepted = _accept(p, tokens, masked, quota, config)
            canvas.ids[:, start:stop] = torch.where(accepted, tokens, block)
            block = canvas.ids[:, start:stop]
            masked = masked & ~accepted
            if self.residual is not None:
                context = residual_context(logits, self.table.weight, self.mask_id, self.residual)
            if self.streamer is not None and hasattr(self.streamer, "put_draft"):
                draft = torch.where(masked, tokens, block)
                self.streamer.put_draft(self.visible_part(draft, start, torch.ones_like(draft[0], dtype=torch.bool)))
        stats.forwards = forwards.tolist()
        self.blocks.append(stats)
        if self.cache_kind == "block" and stop < canvas.ids.shape[1]:
            new = self._encode(start, stop)
            self.past = new if self.past is None else _join(self.past, new)

    def visible_part(self, block: torch.Tensor, start: int, wanted: torch.Tensor) -> torch.Tensor:
        """What a streamer gets of a block: no prompt again, nothing after the result."""
        columns = torch.arange(start, start + block.shape[1], device=block.device)
        return block[:, wanted & (columns >= self.canvas.firsts[0]) & (columns < self.canvas.ends[0])].cpu()

    def output(self, input_ids: torch.Tensor, blank: torch.Tensor, ends: torch.Tensor) -> DLLMGenerateOutput:
        """The rows as they came, with what was filled in."""
        length, new = input_ids.shape[1], self.config.max_new_tokens
        pad = self.config.pad_token_id
        if pad is None:
            pad = int(ends[0]) if len(ends) else self.mask_id
        sequences = torch.cat([input_ids, input_ids.new_full((len(input_ids), new), pad)], dim=1)
        made = torch.zeros(len(input_ids), device=input_ids.device)
        for row in range(len(input_ids)):
            begin, end = int(self.canvas.pads[row]), int(self.canvas.ends[row])
            tokens, filled = self.canvas.ids[row, begin:end].clone(), blank[row, begin:end]
            is_end = (torch.isin(tokens, ends) & filled).long()
            over = filled & (is_end.cumsum(0) - is_end > 0)
            over |= filled & (tokens == self.mask_id)  # blocks that were not reached
            tokens[over] = pad
            made[row] = (filled & ~over).sum()
            sequences[row, length - int(self.canvas.lengths[row]) :] = tokens
        forwards = [block.forwards for block in self.blocks]
        steps = torch.tensor(forwards, dtype=torch.long, device=input_ids.device).reshape(-1, len(input_ids)).sum(0)
        return DLLMGenerateOutput(sequences, made / steps.clamp(min=1), steps, self.blocks, self.stats)

    # --- forwards -----------------------------------------------------------------------------------------------

    def _logits(
        self,
        start: int,
        stop: int,
        masked: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor] | None,
        window: KeyValues | None,
    ) -> tuple[torch.Tensor, KeyValues | None]:
        """Logits `(batch, stop - start, vocab)` of a block, and what a prefix or dual cache keeps of this step."""
        self.stats.denoising += 1
        end = self.canvas.ids.shape[1]
        # Where logits stand one position early, the first token's come from the one before the block.
        before = max(0, start - self.shift)
        if self.cache_kind == "block":
            first, last, past = start, stop, self.past
        elif window is not None:
            first, last, past = before, stop if self.cache_kind == "dual" else end, window
        else:
            first, last, past = 0, stop if self.is_block_model else end, None
        embeds = self.table(self.canvas.ids[:, first:last])
        if context is not None:
            inside = slice(start - first, stop - first)
            mixed = inject_residual(embeds[:, inside], masked, *context)
            embeds = torch.cat([embeds[:, : inside.start], mixed, embeds[:, inside.stop :]], dim=1)
        output = self.model(
            inputs_embeds=embeds,
            attention_mask=self._visible(first, last, start, stop, past),
            position_ids=self.positions[:, first:last],
            past_key_values=past,
            logits_positions=slice(start - first, stop - first),
        )
        if window is None and self.cache_kind in ("prefix", "dual"):
            window = _columns(output.key_values, slice(0, before))
            if self.cache_kind == "dual":
                window = _join(window, _columns(output.key_values, slice(stop, end)))
        return output.logits, window

    def _visible(self, first: int, last: int, start: int, stop: int, past: KeyValues | None) -> torch.Tensor | None:
        """The attention mask of columns [first, last) behind the given past, in the order of the keys."""
        if self.is_block_model:
            query = self.positions[:, first:last] // self.block_length
            begin = 0 if past is not None else first
            key = self.positions[:, begin:last] // self.block_length
            seen = (query[:, :, None] >= key[:, None, :]) & self.valid[:, None, begin:last]
            # Padding, which nobody sees, sees something: some kernels make NaN of a query without keys.
            return seen | ~self.valid[:, first:last, None]
        if self.all_valid:
            return None
        if past is None:
            return self.valid[:, first:last]
        after = self.valid[:, stop:] if self.cache_kind == "dual" else self.valid[:, :0]
        return torch.cat([self.valid[:, :first], after, self.valid[:, first:last]], dim=1)

    def _encode(self, start: int, stop: int) -> KeyValues:
        """Keys and values of finished columns, from plain embeddings."""
        self.stats.cache += 1
        return self.model(
            inputs_embeds=self.table(self.canvas.ids[:, start:stop]),
            attention_mask=self._visible(start, stop, start, stop, self.past),
            position_ids=self.positions[:, start:stop],
            past_key_values=self.past,
            logits_positions=slice(0, 1),
        ).key_values

    # --- tokens and residuals -----------------------------------------------------------------------------------

    def _choose(self, start: int, stop: int, logits: torch.Tensor) -> torch.Tensor:
        """Tokens `(batch, block)`."""
        logits = _without(logits, self.mask_id)
        if self.processors is not None:
            logits = self.processors(self.canvas.ids, logits)
        if self.config.temperature == 0:
            return logits.argmax(-1)
        logits = logits / self.config.temperature
        if self.config.top_k is not None:
            least = logits.topk(min(self.config.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.config.top_p is not None:
            ordered, order = logits.sort(dim=-1, descending=True)
            p = ordered.softmax(-1)
            beyond = p.cumsum(-1) - p >= self.config.top_p
            outside = torch.zeros_like(beyond).scatter(-1, order, beyond)
            logits = logits.masked_fill(outside, -torch.inf)
        p = logits.softmax(-1)
        return torch.multinomial(p.flatten(0, 1), 1, generator=self.generator).view(p.shape[:-1])

    def _first_residual(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Residuals before the first step of a block; blocks don't inherit any."""
        if self.residual is None or self.residual.init == "cold":
            return None
        vocabulary = self.table.weight.shape[0]
        if self.residual.init == "dirichlet":
            shape = (len(self.canvas.ids), stop - start, vocabulary)
            # Normalized exponentials are a draw from Dirichlet(1, ..., 1); their logarithms are its logits.
            draws = torch.empty(shape, device=self.canvas.ids.device).exponential_(generator=self.generator)
            return residual_context(draws.log(), self.table.weight, self.mask_id, self.residual)
        if self.residual.init == "self":
            nothing = torch.zeros_like(self.canvas.ids[:, start:stop], dtype=torch.bool)
            logits, _ = self._logits(start, stop, nothing, None, None)
        else:
            self.stats.reference += 1
            last = stop if self.is_block_model else self.canvas.ids.shape[1]
            logits = self.reference(
                self.canvas.ids[:, :last],
                attention_mask=self._visible(0, last, start, stop, None),
                position_ids=self.positions[:, :last],
                logits_positions=slice(start, stop),
            ).logits
        return residual_context(logits, self.table.weight, self.mask_id, self.residual)


def _accept(
    p: torch.Tensor, tokens: torch.Tensor, masked: torch.Tensor, quota: torch.Tensor, config: DLLMGenerationConfig
) -> torch.Tensor:
    """Which of the masked positions keep their token, bool `(batch, block)`; at least `quota` per row."""
    if config.remasking == "sequential":
        return masked & (masked.long().cumsum(1) <= quota[:, None])
    if config.remasking == "entropy_bound":
        entropy = torch.special.entr(p).sum(-1).masked_fill(~masked, torch.inf)
        ordered, order = entropy.sort(dim=1, stable=True)
        # All but the least certain, which is the last of a sorted row.
        within = ordered.cumsum(1) - ordered <= config.entropy_bound
        within |= torch.arange(within.shape[1], device=p.device) < quota[:, None]
        return torch.zeros_like(masked).scatter(1, order, within) & masked
    confidence = p.gather(-1, tokens[..., None])[..., 0].masked_fill(~masked, -torch.inf)
    rank = confidence.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    accepted = masked & (rank < quota[:, None])
    if config.remasking == "low_confidence_dynamic":
        accepted |= masked & (confidence > config.confidence_threshold)
    return accepted


def _without(logits: torch.Tensor, token: int) -> torch.Tensor:
    """Float32 logits with no probability for a token."""
    return logits.float().index_fill(-1, torch.tensor([token], device=logits.device), -torch.inf)


def _columns(key_values: KeyValues, columns: slice) -> KeyValues:
    return tuple((key[:, columns], value[:, columns]) for key, value in key_values)


def _join(left: KeyValues, right: KeyValues) -> KeyValues:
    return tuple(
        (torch.cat([a[0], b[0]], dim=1), torch.cat([a[1], b[1]], dim=1)) for a, b in zip(left, right, strict=True)
    )


def check_same_vocabulary(target: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Refuses a reference model that speaks of other tokens.

    Raises:
        ConfigError: the sizes of the vocabularies or the mask tokens differ.
    """
    for name in ("vocab_size", "mask_token_id"):
        own, other = getattr(target.config, name), getattr(reference.config, name, None)
        if own != other:
            raise ConfigError(
                f"{name} is {own} in the target and {other} in the reference; they must share a tokenizer"
            )


def check_same_tokenizer(target: Any, reference: Any) -> None:
    """Refuses two tokenizers that differ.

    Raises:
        ConfigError: it names the sizes of both vocabularies and the first token that differs.
    """
    vocabularies = [
        sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]) for tokenizer in (target, reference)
    ]
    if vocabularies[0] == vocabularies[1]:
        return
    pairs = [(a, b) for a, b in zip(*vocabularies, strict=False) if a != b]
    first = f"{pairs[0][0][0]!r} and {pairs[0][1][0]!r} at id {pairs[0][0][1]}" if pairs else "tokens of one alone"
    sizes = " and ".join(str(len(vocabulary)) for vocabulary in vocabularies)
    raise ConfigError(f"tokenizers of target and reference differ: {sizes} tokens, first difference {first}")
