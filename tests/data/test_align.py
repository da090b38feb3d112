"""Actions stored a row too early or too late must be found, and nothing claimed where the data cannot tell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vidgen.data import EpisodeAlignmentError, EpisodeDataset, EpisodeWriter, align_check, alignment
from vidgen.data.recording import episodes_info
from vidgen.worlds.panorama import PanoramaWorld
from vidgen.worlds.room import RoomWorld

LAGS = (-2, -1, 0, 1, 2)


def walks(world, count: int, num_frames: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    episodes = []
    for seed in range(count):
        scene = world.scene(seed)
        poses = world.explore(scene, num_frames, seed)
        episodes.append((world.render(scene, poses), world.deltas(poses).numpy(), poses))
    return episodes


def write(root: Path, world, episodes, rows_late: int) -> EpisodeDataset:
    """Episodes whose action of frame k is in row k + rows_late."""
    with EpisodeWriter(root, episodes_info(world, 12.0)) as writer:
        for frames, actions, poses in episodes:
            shifted = np.roll(actions, rows_late, axis=0)
            shifted[0] = 0
            writer.append(frames, shifted, poses)
    return EpisodeDataset(root, window=1)


@pytest.mark.parametrize("world", [RoomWorld(16), PanoramaWorld(16)], ids=lambda world: world.name)
def test_shifted_actions_are_found_and_good_ones_pass(tmp_path: Path, world):
    episodes = walks(world, 4, 60)
    for rows_late in (-2, -1, 1, 2):
        direction = "late" if rows_late > 0 else "early"
        message = rf"too {direction}: .* frames \{-rows_late:+d} rows away"
        with pytest.raises(EpisodeAlignmentError, match=message):
            align_check(write(tmp_path / f"{rows_late}", world, episodes, rows_late))
    assert align_check(write(tmp_path / "good", world, episodes, 0)).lag == 0


def test_short_episodes_are_judged_together():
    episodes = walks(PanoramaWorld(16), 16, 12)
    assert alignment((frames, actions) for frames, actions, _ in episodes).lag == 0
    assert alignment((frames[:7], actions[:7]) for frames, actions, _ in episodes).lag is None


def test_it_is_the_correlation_of_differences():
    random = np.random.default_rng(0)
    actions = random.integers(0, 2, (200, 1)).astype(float)
    noise = random.integers(0, 60, 200)
    brightness = np.cumsum(np.where(actions[:, 0] > 0, 40 + noise, noise)) % 200
    frames = np.broadcast_to(brightness[:, None, None, None], (200, 2, 2, 3)).astype(np.uint8)
    found = alignment([(frames, actions)])
    change = np.array([abs(brightness[k] - brightness[k - 1]) for k in range(1, 200)], float)
    steps, changes = actions[2:, 0] - actions[1:-1, 0], change[1:] - change[:-1]
    for lag in LAGS:
        pairs = [(steps[k], changes[k + lag]) for k in range(2, len(steps) - 2)]
        assert found.correlations[lag] == pytest.approx(np.corrcoef(np.array(pairs).T)[0, 1], abs=1e-6)


def test_nothing_is_claimed_where_actions_do_nothing_or_are_none(tmp_path: Path):
    world = RoomWorld(16)
    frames, actions, poses = walks(world, 1, 60)[0]
    unrelated = np.random.default_rng(0).permutation(actions)
    unrelated[0] = 0
    assert align_check(write(tmp_path / "unrelated", world, [(frames, unrelated, poses)], 0)).lag is None
    assert align_check(write(tmp_path / "still", world, [(frames, 0 * actions, poses)], 0)).lag is None
    assert alignment([]).lag is None
