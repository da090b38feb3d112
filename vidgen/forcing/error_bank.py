"""Residuals of a model's own predictions, kept to be injected into the context it is trained on.

Error recycling of "Stable Video Infinity: Infinite-Length Video Generation with Error Recycling" (arXiv 2510.09212),
as "Context Forcing" (arXiv 2602.06028) uses it for its teacher: a model that has seen its own kind of errors in the
context learns to continue with clean video.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vidgen.runtime.checks import check_finite_fields
from vidgen.runtime.errors import ConfigError


@dataclass(frozen=True)
class ErrorBankConfig:
    """Settings of [`ErrorBank`].

    Attributes:
        buckets: intervals of the noise level, each with entries of its own.
        capacity: entries per bucket.
        jitter: an injected error is scaled by a number from [1 - jitter, 1 + jitter].
    """

    buckets: int = 50
    capacity: int = 500
    jitter: float = 0.3

    def __post_init__(self) -> None:
        check_finite_fields(self)
        if self.buckets < 1 or self.capacity < 1:
            raise ConfigError(f"buckets={self.buckets}, capacity={self.capacity}; both must be at least 1.")
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter={self.jitter}; it must be in [0, 1).")


class ErrorBank:
    """Fixed number of residuals `(channels, frames, height, width)` per noise bucket, on the CPU.

    A full bucket replaces a random entry.
    """

    def __init__(self, config: ErrorBankConfig) -> None:
        self.config = config
        self.counts = torch.zeros(config.buckets, dtype=torch.int64)
        self.entries: torch.Tensor | None = None

    def __len__(self) -> int:
        return int(self.counts.sum())

    def add(self, residuals: torch.Tensor, sigmas: torch.Tensor, generator: torch.Generator) -> None:
        """Store residuals.

        Args:
            residuals: `(n, channels, frames, height, width)`, predicted minus true clean latents.
            sigmas: `(n,)` noise levels in [0, 1] they were predicted at.
            generator: a CPU generator, which picks the entries to replace.
        """
        residuals = residuals.detach().cpu()
        if self.entries is None:
            shape = (self.config.buckets, self.config.capacity, *residuals.shape[1:])
            self.entries = torch.zeros(shape, dtype=residuals.dtype)
        last = self.config.buckets - 1
        for residual, sigma in zip(residuals, sigmas.tolist(), strict=True):
            bucket = min(last, int(sigma * self.config.buckets))
            place = int(self.counts[bucket])
            if place == self.config.capacity:
                place = int(torch.randint(self.config.capacity, (), generator=generator))
            else:
                self.counts[bucket] += 1
            self.entries[bucket, place] = residual

    def sample(self, number: int, generator: torch.Generator) -> torch.Tensor:
        """`(number, channels, frames, height, width)` stored residuals from all buckets, each entry equally likely."""
        if self.entries is None:
            raise ValueError("The error bank is empty; add residuals before sampling.")
        ends = self.counts.cumsum(0)
        drawn = torch.randint(int(ends[-1]), (number,), generator=generator)
        bucket = torch.searchsorted(ends, drawn, right=True)
        place = drawn - (ends[bucket] - self.counts[bucket])
        scale = 1 + self.config.jitter * (2 * torch.rand(number, 1, 1, 1, 1, generator=generator) - 1)
        return self.entries[bucket, place] * scale

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {"counts": self.counts}
        return state if self.entries is None else state | {"entries": self.entries}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.counts = state["counts"].clone()
        self.entries = state["entries"].clone() if "entries" in state else None
