"""Memory of everything: exact, and as large as the video is long."""

from __future__ import annotations

import dataclasses

import torch

from vidgen.memory.kv_memory import KeyValues, KVMemory, KVMemoryConfig, MemoryConfigError


@dataclasses.dataclass(frozen=True)
class FullMemoryConfig(KVMemoryConfig):
    """Settings of [`FullMemory`].

    Attributes:
        max_frames: latent frames of the whole video, the size the memory will reach.
    """

    max_frames: int = 241

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_frames < 1:
            raise MemoryConfigError(f"max_frames={self.max_frames}; it must be at least 1.")


class FullMemory(KVMemory):
    """Keeps every latent frame; cached generation then equals one forward over the whole sequence."""

    name = "full"
    config: FullMemoryConfig

    def __init__(self, config: FullMemoryConfig | None = None, num_frames_per_block: int = 3) -> None:
        super().__init__(config or FullMemoryConfig(), num_frames_per_block)

    @property
    def capacity(self) -> int:
        return self.config.max_frames

    def _select(
        self, num_slots: int, num_new: int, key_values: KeyValues, promote: torch.Tensor | None
    ) -> torch.Tensor | None:
        if num_slots + num_new > self.config.max_frames:
            raise MemoryConfigError(
                f"The full memory was made for max_frames={self.config.max_frames} latent frames and is asked to hold "
                f"{num_slots + num_new}. Raise max_frames, or use 'slow_fast', whose size does not grow."
            )
        return None
