"""What would be wrong: drift reported where there is none, or a fading video that looks stable."""

from __future__ import annotations

import pytest
import torch

from vidgen.metrics import channel_drift
from vidgen.runtime.errors import VidgenError


def video(num_frames: int = 40, channels: int = 3) -> torch.Tensor:
    return torch.randn(num_frames, channels, 8, 12, generator=torch.Generator().manual_seed(0))


def test_a_repeated_clip_does_not_drift():
    drift = channel_drift(torch.cat([video(10)] * 3), 10)
    assert drift.first_mean == drift.last_mean and drift.first_std == drift.last_std
    assert drift.mean_shift == 0 and drift.std_ratio == 1


def test_shift_is_counted_in_standard_deviations_of_the_start():
    clip = 5 * video(10)
    moved = clip + 5 * clip.std(dim=(0, 2, 3), unbiased=False, keepdim=True)
    assert channel_drift(torch.cat([clip, moved]), 10).mean_shift == pytest.approx(5, rel=1e-4)


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_lost_or_gained_contrast_is_its_factor(factor):
    clip = video(10)
    mean = clip.mean(dim=(0, 2, 3), keepdim=True)
    drift = channel_drift(torch.cat([clip, mean + factor * (clip - mean)]), 10)
    assert drift.std_ratio == pytest.approx(factor, rel=1e-4)
    assert drift.mean_shift == pytest.approx(0, abs=1e-4)


def test_channels_are_kept_apart_and_integers_are_taken():
    frames = torch.zeros(4, 2, 3, 3, dtype=torch.uint8)
    frames[2:, 1] = 200
    drift = channel_drift(frames, 2)
    assert drift.first_mean == (0, 0) and drift.last_mean == (0, 200)


@pytest.mark.parametrize("num_frames", [0, 21])
def test_ends_that_are_empty_or_overlap_are_refused(num_frames):
    with pytest.raises(VidgenError, match="allowed: 1 to 20"):
        channel_drift(video(), num_frames)
