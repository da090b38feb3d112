"""How far colors wander while a video is being continued: the usual decay of autoregressive generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vidgen.metrics.checks import check_tensor
from vidgen.runtime.checks import check_whole


@dataclass(frozen=True)
class ChannelDrift:
    """Mean and standard deviation per channel at both ends of a video, in the units of its values."""

    first_mean: tuple[float, ...]
    first_std: tuple[float, ...]
    last_mean: tuple[float, ...]
    last_std: tuple[float, ...]

    @property
    def mean_shift(self) -> float:
        """Change of the mean in standard deviations of the start, averaged over channels; 0 is no drift."""
        shifts = [
            abs(last - first) / max(std, 1e-8)
            for first, last, std in zip(self.first_mean, self.last_mean, self.first_std, strict=True)
        ]
        return sum(shifts) / len(shifts)

    @property
    def std_ratio(self) -> float:
        """Standard deviation at the end divided by that at the start, averaged over channels; 1 is no drift.

        Below 1 the video loses contrast, above it burns in.
        """
        ratios = [last / max(first, 1e-8) for first, last in zip(self.first_std, self.last_std, strict=True)]
        return sum(ratios) / len(ratios)


def channel_drift(video: torch.Tensor, num_frames: int) -> ChannelDrift:
    """Compare the first `num_frames` frames of a video with its last ones.

    Args:
        video: `(frames, channels, height, width)`, pixels or latents.
        num_frames: frames at either end, at most half of the video.

    Raises:
        VidgenError: when the two ends would overlap, or a value isn't finite.
    """
    check_tensor("video", video, "(frames, channels, height, width)")
    check_whole(1, len(video) // 2, num_frames=num_frames)

    def statistics(frames: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
        values = frames.double().transpose(0, 1).flatten(1)
        return tuple(values.mean(1).tolist()), tuple(values.std(1, unbiased=False).tolist())

    return ChannelDrift(*statistics(video[:num_frames]), *statistics(video[-num_frames:]))
