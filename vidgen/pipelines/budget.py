"""How much memory a generation will need, said before it starts."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING

import torch

from vidgen.memory import FullMemory, KVMemory, SlowFastMemory, make_memory
from vidgen.models.streaming_vae import StreamingVAEDecoder

if TYPE_CHECKING:
    from vidgen.pipelines.context_forcing import ContextForcingPipeline
    from vidgen.pipelines.session_state import GenerationSettings

# The decoder's state is proportional to the latent cells; measuring one takes a second, so once per VAE.
_DECODER_ELEMENTS_PER_CELL: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class GenerationBudget:
    """Estimated bytes of a generation; activations of a single forward are not included.

    Attributes:
        weights: models on the device.
        key_values: the full memory, its rotated copy, and the further copies that a commit and `undo` need.
        decoder: feature maps of the streaming VAE decoder.
    """

    weights: int
    key_values: int
    decoder: int

    @property
    def state(self) -> int:
        """Bytes beside the weights."""
        return self.key_values + self.decoder


def _key_value_bytes(
    pipe: ContextForcingPipeline,
    memory: KVMemory,
    settings: GenerationSettings,
    batch_size: int,
    dtype: torch.dtype | None = None,
) -> int:
    rows = batch_size * (2 if settings.guidance_scale > 1 else 1)
    stride = pipe.vae_scale_factor_spatial
    tokens_per_frame = pipe.transformer.tokens_per_frame(settings.height // stride, settings.width // stride)
    full = memory.estimate_nbytes(pipe.transformer.config, tokens_per_frame, rows, dtype or pipe.transformer.dtype)
    # `full` counts keys, values and rotated keys as thirds. While a commit builds new keys and values, the old ones
    # with their rotated copy and those of every undo step still exist.
    return full * (5 + 2 * settings.undo_depth) // 3


def estimate_budget(
    pipe: ContextForcingPipeline, memory: KVMemory, settings: GenerationSettings, batch_size: int
) -> GenerationBudget:
    """Estimate the bytes of a generation from configurations alone."""
    sizes = [
        sum(tensor.nbytes for tensor in [*component.parameters(), *component.buffers()])
        for component in (pipe.text_encoder, pipe.transformer, pipe.vae)
    ]
    offloaded = bool(getattr(pipe, "_all_hooks", []))  # models then visit the device one at a time
    decoder = 0
    if settings.decode:
        stride = pipe.vae_scale_factor_spatial
        cells = batch_size * (settings.height // stride) * (settings.width // stride)
        if pipe.vae not in _DECODER_ELEMENTS_PER_CELL:
            nbytes = StreamingVAEDecoder(pipe.vae).estimate_nbytes(1, 1, 1)
            _DECODER_ELEMENTS_PER_CELL[pipe.vae] = nbytes // pipe.vae.dtype.itemsize
        decoder = cells * _DECODER_ELEMENTS_PER_CELL[pipe.vae] * pipe.vae.dtype.itemsize
    return GenerationBudget(
        weights=max(sizes) if offloaded else sum(sizes),
        key_values=_key_value_bytes(pipe, memory, settings, batch_size),
        decoder=decoder,
    )


def describe_remedies(
    pipe: ContextForcingPipeline, memory: KVMemory, settings: GenerationSettings, batch_size: int, limit: int
) -> str:
    """The three cheapest ways to bring keys and values down to `limit` bytes, with the bytes they would then take.

    Empty when no single change is enough.
    """
    remedies: list[tuple[str, int]] = []

    def add(
        advice: str, memory: KVMemory = memory, settings=settings, batch_size: int = batch_size, dtype=None
    ) -> None:
        remedies.append((advice, _key_value_bytes(pipe, memory, settings, batch_size, dtype)))

    if settings.undo_depth > 0:
        add("undo_depth=0", settings=dataclasses.replace(settings, undo_depth=0))
    if batch_size > 1:
        add("generate the samples one by one", batch_size=1)
    bounded = make_memory("slow_fast", memory.num_frames_per_block)
    if isinstance(memory, FullMemory):
        add("memory slow_fast", memory=bounded)
    if memory.config.kv_dtype is None and pipe.transformer.dtype == torch.float32:
        add("dtype bfloat16", dtype=torch.bfloat16)
    elif memory.config.kv_dtype is None:
        config = dataclasses.replace(memory.config, kv_dtype="float8_e4m3fn")
        add("kv_dtype float8_e4m3fn", memory=make_memory(config, memory.num_frames_per_block))
    if settings.guidance_scale > 1:
        add("guidance 1", settings=dataclasses.replace(settings, guidance_scale=1.0))
    if isinstance(memory, SlowFastMemory) and memory.config.slow > 0:
        config = dataclasses.replace(memory.config, slow=memory.config.slow // 2)
        add(f"slow={config.slow} in the memory", memory=make_memory(config, memory.num_frames_per_block))
    unit = pipe.size_multiple
    height, width = (max(unit, size // 2 // unit * unit) for size in (settings.height, settings.width))
    add(f"frames of {height}x{width}", settings=dataclasses.replace(settings, height=height, width=width))
    if isinstance(memory, FullMemory):
        config = dataclasses.replace(memory.config, max_frames=max(1, memory.config.max_frames // 2))
        add("half the length", memory=make_memory(config, memory.num_frames_per_block))
    enough = [f"{advice} ({format_bytes(nbytes)})" for advice, nbytes in remedies if nbytes <= limit]
    return "; ".join(enough[:3])


def format_bytes(nbytes: int) -> str:
    """`1234567` as `1.23 MB`."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
