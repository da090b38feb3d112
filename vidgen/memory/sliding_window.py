"""Memory of the newest frames, with an optional attention sink (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

import dataclasses

import torch

from vidgen.memory.kv_memory import KeyValues, KVMemory, KVMemoryConfig, MemoryConfigError


@dataclasses.dataclass(frozen=True)
class SlidingWindowMemoryConfig(KVMemoryConfig):
    """Settings of [`SlidingWindowMemory`].

    Attributes:
        window: newest latent frames in view, the chunk being denoised included.
        sink: first latent frames of the video that are never dropped, in addition to the window.
    """

    window: int = 21
    sink: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or self.sink < 0:
            raise MemoryConfigError(f"window={self.window}, sink={self.sink}; window must be >= 1 and sink >= 0.")


class SlidingWindowMemory(KVMemory):
    """Keeps the sink and the newest frames."""

    name = "sliding_window"
    config: SlidingWindowMemoryConfig

    def __init__(self, config: SlidingWindowMemoryConfig | None = None, num_frames_per_block: int = 3) -> None:
        config = config or SlidingWindowMemoryConfig()
        super().__init__(config, num_frames_per_block)
        if config.window < 2 * num_frames_per_block:
            raise MemoryConfigError(
                f"window={config.window} leaves no room beside the chunk of {num_frames_per_block} latent frames "
                f"being denoised; use at least {2 * num_frames_per_block}."
            )

    @property
    def capacity(self) -> int:
        return self.config.sink + self.config.window - self.num_frames_per_block

    def _select(
        self, num_slots: int, num_new: int, key_values: KeyValues, promote: torch.Tensor | None
    ) -> torch.Tensor | None:
        surplus = num_slots + num_new - self.capacity
        if surplus <= 0:
            return None
        candidates = torch.arange(num_slots + num_new)
        kept = torch.cat([candidates[: self.config.sink], candidates[self.config.sink + surplus :]])
        return kept.expand(1, key_values[0][0].shape[0], -1)
