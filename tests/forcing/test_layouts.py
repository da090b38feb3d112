"""Layouts must look like what a slow-fast memory shows the model."""

from __future__ import annotations

import pytest
import torch

from vidgen.forcing.layouts import sample_layout
from vidgen.memory import SlowFastMemoryConfig

CONFIG = SlowFastMemoryConfig()


def test_early_layout_is_the_beginning_of_the_video():
    layout = sample_layout(CONFIG, 75, 3, steady=False, generator=torch.Generator().manual_seed(0))
    assert layout.frame_ids.tolist() == list(range(21))
    assert layout.frame_blocks.tolist() == [frame // 3 for frame in range(21)]
    assert not layout.is_slow.any()


@pytest.mark.parametrize("seed", range(20))
def test_steady_layout_has_sink_sorted_slow_and_adjacent_fast_and_target(seed):
    layout = sample_layout(CONFIG, 75, 3, steady=True, generator=torch.Generator().manual_seed(seed))
    ids, blocks = layout.frame_ids, layout.frame_blocks
    target = int(ids[-1])
    assert ids[:3].tolist() == [0, 1, 2]
    assert ids[15:].tolist() == list(range(target - 5, target + 1))
    assert bool((ids[3:15].diff() > 0).all()) and int(ids[14]) < target
    assert 7 * 3 <= target < 75 and target % 3 == 2
    # sink one block, every slow frame its own, fast one, target one
    assert blocks.tolist() == [0] * 3 + list(range(1, 13)) + [13] * 3 + [14] * 3
    assert layout.is_slow.tolist() == [False] * 3 + [True] * 12 + [False] * 6


def test_layouts_vary_with_the_generator_and_repeat_with_its_seed():
    def draw(seed):
        return sample_layout(CONFIG, 75, 3, steady=True, generator=torch.Generator().manual_seed(seed)).frame_ids

    assert torch.equal(draw(1), draw(1))
    assert len({tuple(draw(seed).tolist()) for seed in range(10)}) > 5


def test_too_short_a_video_is_refused_with_the_length_it_needs():
    with pytest.raises(ValueError, match="at least 24"):
        sample_layout(CONFIG, 21, 3, steady=True, generator=torch.Generator())
