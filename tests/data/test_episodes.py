"""Episodes on disk: nothing is lost, windows hold what was recorded, and misfits are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vidgen.controls import planar_deltas, walking_cameras
from vidgen.data import EpisodeAlignmentError, EpisodeDataset, EpisodeWriter, VideoDecodeError, align_check, record
from vidgen.data.episode_writer import EPISODES_PER_FILE
from vidgen.data.episodes import alignment, data_path, video_path
from vidgen.data.latent_dataset import DatasetError
from vidgen.data.recording import episodes_info, make_world
from vidgen.runtime.errors import ConfigError
from vidgen.worlds.room import RoomWorld

SIZE, FRAMES = 16, 24


@pytest.fixture(scope="module")
def world() -> RoomWorld:
    return RoomWorld(SIZE)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, world: RoomWorld) -> Path:
    root = tmp_path_factory.mktemp("episodes") / "room"
    record(world, root, EPISODES_PER_FILE + 2, FRAMES, num_scenes=2, seed=5)
    record(world, root, 2, FRAMES, split="validation", num_scenes=2, seed=5)
    return root


def noise_episode(seed: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    frames = random.integers(0, 256, (length, SIZE, SIZE, 3), np.uint8)
    return frames, random.normal(size=(length, 3)), random.normal(size=(length, 3))


def test_small_frames_and_numbers_come_back_exactly(tmp_path: Path, world: RoomWorld):
    episodes = [noise_episode(seed, length) for seed, length in enumerate((7, 12, 5))]
    with EpisodeWriter(tmp_path / "set", episodes_info(world, 12.0)) as writer:
        for seed, (frames, actions, poses) in enumerate(episodes):
            writer.append(frames, actions, poses, rewards=np.arange(len(frames)), seed=seed)
    for in_memory in (True, False):
        read = EpisodeDataset(tmp_path / "set", window=5, in_memory=in_memory)
        for index, (frames, actions, poses) in enumerate(episodes):
            assert np.array_equal(read.frames(index), frames)
            assert np.array_equal(read.actions(index), actions)
            assert np.array_equal(read.poses(index), poses)
        assert len(read) == 3 + 8 + 1
        item = read[3 + 2]  # the third window of the second episode
        assert (item["episode"], item["start"]) == (1, 2)
        assert np.array_equal(item["frames"].numpy(), episodes[1][0][2:7])
        assert item["rewards"].tolist() == [2, 3, 4, 5, 6]


def test_a_recording_is_what_the_world_shows(recorded: Path, world: RoomWorld):
    episodes = EpisodeDataset(recorded, "validation", window=8)
    assert len(episodes.episodes) == 2
    for index in range(2):
        poses = episodes.poses(index)
        assert np.array_equal(episodes.frames(index), world.render(world.scene(index), poses))
        assert np.array_equal(episodes.actions(index), world.deltas(poses).numpy())


def test_an_interrupted_recording_ends_with_the_same_files(
    tmp_path: Path, world: RoomWorld, recorded: Path, monkeypatch: pytest.MonkeyPatch
):
    root, calls = tmp_path / "room", 0
    render = world.render

    def fail_late(scene, poses):
        nonlocal calls
        calls += 1
        if calls == EPISODES_PER_FILE + 2:
            raise KeyboardInterrupt
        return render(scene, poses)

    monkeypatch.setattr(world, "render", fail_late)
    with pytest.raises(KeyboardInterrupt):
        record(world, root, EPISODES_PER_FILE + 2, FRAMES, num_scenes=2, seed=5)
    assert len(EpisodeDataset(root, window=4).episodes) == EPISODES_PER_FILE  # whole at any moment
    monkeypatch.setattr(world, "render", render)
    assert record(world, root, EPISODES_PER_FILE + 2, FRAMES, num_scenes=2, seed=5) == 2
    for file in (0, 1):
        for path in (data_path(file), video_path(file)):
            assert (root / path).read_bytes() == (recorded / path).read_bytes()


def test_controls_lead_from_each_frame_of_the_window_to_the_next(recorded: Path, world: RoomWorld):
    windows = EpisodeDataset(recorded, window=6, skip=2, num_sparse=2, seed=3)
    episode, frame_ids = windows.window_frames(4)
    assert (np.diff(frame_ids[2:]) == 2).all() and (np.diff(frame_ids[:2]) > 0).all() and frame_ids[1] < frame_ids[2]
    poses = torch.from_numpy(windows.poses(episode))[frame_ids]
    item = windows[4]
    assert torch.equal(item["controls"], planar_deltas(poses))
    assert np.array_equal(item["frames"].numpy(), windows.frames(episode)[frame_ids])
    cameras = EpisodeDataset(recorded, window=6, controls="cameras")[4]["controls"]
    episode, frame_ids = EpisodeDataset(recorded, window=6).window_frames(4)
    poses = torch.from_numpy(windows.poses(episode))[frame_ids]
    assert torch.equal(cameras, walking_cameras(poses, world.focal, world.eye_height))


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_actions_are_found(tmp_path: Path, world: RoomWorld, shift: int):
    with EpisodeWriter(tmp_path / "shifted", episodes_info(world, 12.0)) as writer:
        for seed in range(6):
            poses = world.explore(world.scene(0), 80, seed)
            actions = np.roll(world.deltas(poses).numpy(), shift, axis=0)
            writer.append(world.render(world.scene(0), poses), actions, poses)
    with pytest.raises(EpisodeAlignmentError, match=rf"\{-shift:+d} rows away"):
        align_check(EpisodeDataset(tmp_path / "shifted", window=1))


def test_well_recorded_actions_pass(recorded: Path):
    correlations = align_check(EpisodeDataset(recorded, window=1))
    assert max(correlations, key=correlations.__getitem__) == 0


def test_alignment_is_the_correlation_of_what_is_done_with_what_changes():
    random = np.random.default_rng(0)
    actions = random.integers(0, 2, (200, 1)).astype(float)
    brightness = np.cumsum(actions[:, 0]) % 200
    frames = np.broadcast_to(brightness[:, None, None, None], (200, 2, 2, 3)).astype(np.uint8)
    correlations = alignment(frames, actions)
    assert correlations[0] > 0.99
    assert all(abs(value) < 0.3 for lag, value in correlations.items() if lag)


class TestErrors:
    def test_windows_longer_than_an_episode(self, recorded: Path):
        with pytest.raises(ConfigError, match=f"episode 0 .* has {FRAMES} frames; a window of 32"):
            EpisodeDataset(recorded, window=32)

    def test_missing_and_foreign_folders(self, tmp_path: Path, recorded: Path):
        with pytest.raises(DatasetError, match="is not a folder"):
            EpisodeDataset(tmp_path / "nowhere")
        with pytest.raises(DatasetError, match="no data set of episodes"):
            EpisodeDataset(tmp_path)
        with pytest.raises(ConfigError, match="did you mean 'train'"):
            EpisodeDataset(recorded, "trian")

    def test_another_format_version(self, tmp_path: Path, world: RoomWorld):
        with EpisodeWriter(tmp_path / "set", episodes_info(world, 12.0)) as writer:
            writer.append(*noise_episode(0, 4))
        info = tmp_path / "set/meta/info.json"
        info.write_text(json.dumps({**json.loads(info.read_text()), "version": 9}))
        with pytest.raises(DatasetError, match="format version 9"):
            EpisodeDataset(tmp_path / "set", window=2)

    def test_a_truncated_video(self, tmp_path: Path, world: RoomWorld):
        with EpisodeWriter(tmp_path / "set", episodes_info(world, 12.0)) as writer:
            writer.append(*noise_episode(0, 12))
        video = tmp_path / "set" / video_path(0)
        video.write_bytes(video.read_bytes()[:2000])
        with pytest.raises(VideoDecodeError, match=video.name):
            EpisodeDataset(tmp_path / "set", window=2)

    def test_another_world_in_the_same_folder(self, recorded: Path):
        with pytest.raises(DatasetError, match="other size"):
            EpisodeWriter(recorded, episodes_info(RoomWorld(32), 12.0))

    def test_wrong_shapes_and_numbers(self, tmp_path: Path, world: RoomWorld):
        frames, actions, poses = noise_episode(0, 6)
        with EpisodeWriter(tmp_path / "set", episodes_info(world, 12.0)) as writer:
            with pytest.raises(DatasetError, match=r"actions have shape \(5, 3\)"):
                writer.append(frames, actions[1:], poses)
            with pytest.raises(DatasetError, match="frames have shape"):
                writer.append(frames[:, :8], actions, poses)
            poses[4, 1] = np.nan
            with pytest.raises(DatasetError, match="poses of frame 4 are not finite"):
                writer.append(frames, actions, poses)

    def test_unknown_world(self):
        with pytest.raises(ConfigError, match="did you mean 'room'"):
            make_world("rom")
