"""A recording must be what the world shows, continue as if it had never stopped, and never mix two recordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vidgen.controls import ActionColumn, ActionSpec, ButtonControls
from vidgen.data import DatasetError, EpisodeDataset, make_world, record
from vidgen.data.episodes import EPISODES_PATH, data_path, video_path
from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.worlds.panorama import PanoramaWorld
from vidgen.worlds.room import RoomWorld

SIZE, FRAMES = 16, 12
PER_FILE = 3
COUNT = PER_FILE + 2


@pytest.fixture(scope="module", autouse=True)
def small_files():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vidgen.data.episode_writer.EPISODES_PER_FILE", PER_FILE)
        yield


@pytest.fixture(scope="module")
def world() -> RoomWorld:
    return RoomWorld(SIZE)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, world: RoomWorld) -> Path:
    root = tmp_path_factory.mktemp("episodes") / "room"
    record(world, root, COUNT, FRAMES, num_scenes=2, seed=5)
    record(world, root, 2, FRAMES, split="validation", num_scenes=2, seed=5)
    return root


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_recording_is_what_the_world_shows(recorded: Path, world: RoomWorld, split: str):
    episodes = EpisodeDataset(recorded, split, window=8)
    assert len(episodes.episodes) == (COUNT if split == "train" else 2)
    for index, item in enumerate(episodes.episodes):
        assert item.scene_seed == index % 2
        scene = world.scene(item.scene_seed)
        poses = world.explore(scene, FRAMES, item.seed)
        assert np.array_equal(episodes.poses(index), poses)
        assert np.array_equal(episodes.frames(index), world.render(scene, poses))
        assert np.array_equal(episodes.actions(index), world.deltas(poses).numpy())


def test_no_walk_is_in_two_splits_or_twice(recorded: Path):
    seeds = [item.seed for split in ("train", "validation") for item in EpisodeDataset(recorded, split, 1).episodes]
    assert len(set(seeds)) == len(seeds) == COUNT + 2


@pytest.mark.parametrize("failing", [2, COUNT])
def test_an_interrupted_recording_ends_with_the_same_files(
    tmp_path: Path, world: RoomWorld, recorded: Path, monkeypatch: pytest.MonkeyPatch, failing: int
):
    root, calls = tmp_path / "room", 0
    render = world.render

    def fail(scene, poses):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise KeyboardInterrupt
        return render(scene, poses)

    monkeypatch.setattr(world, "render", fail)
    with pytest.raises(KeyboardInterrupt):
        record(world, root, COUNT, FRAMES, num_scenes=2, seed=5)
    whole = PER_FILE if failing > PER_FILE else 0
    assert len(EpisodeDataset(root, window=4).episodes) == whole  # readable at any moment
    monkeypatch.setattr(world, "render", render)
    assert record(world, root, COUNT, FRAMES, num_scenes=2, seed=5) == COUNT - whole
    assert record(world, root, 2, FRAMES, split="validation", num_scenes=2, seed=5) == 2
    for path in [EPISODES_PATH, *(kind(file) for kind in (data_path, video_path) for file in (0, 1, 2))]:
        assert (root / path).read_bytes() == (recorded / path).read_bytes(), path
    assert record(world, root, COUNT, FRAMES, num_scenes=2, seed=5) == 0


def test_other_settings_do_not_continue_a_recording(recorded: Path, world: RoomWorld):
    before = (recorded / EPISODES_PATH).read_bytes()
    for changed in ({"seed": 6}, {"num_scenes": 3}, {"first_scene": 1}):
        settings = {"num_scenes": 2, "seed": 5, **changed}
        with pytest.raises(DatasetError, match="use the frames, seed and scenes of the first"):
            record(world, recorded, COUNT + 1, FRAMES, **settings)
    with pytest.raises(DatasetError, match=f"episode 0 .* has {FRAMES} frames, .* give 8,"):
        record(world, recorded, COUNT + 1, 8, num_scenes=2, seed=5)
    with pytest.raises(DatasetError, match="other size"):
        record(RoomWorld(32), recorded, COUNT + 1, FRAMES, num_scenes=2, seed=5)
    with pytest.raises(DatasetError, match="other fps"):
        record(world, recorded, COUNT + 1, FRAMES, num_scenes=2, seed=5, fps=10.0)
    assert (recorded / EPISODES_PATH).read_bytes() == before


def test_windows_of_a_sliding_picture_hold_its_recorded_motion(tmp_path: Path):
    world = PanoramaWorld(SIZE)
    record(world, tmp_path / "set", 2, 20)
    episodes = EpisodeDataset(tmp_path / "set", window=20)
    for index in range(2):
        assert np.array_equal(episodes[index]["controls"].numpy(), episodes.actions(index))
    poses = episodes.poses(0)
    skipping = EpisodeDataset(tmp_path / "set", window=5, skip=3)[2]["controls"].numpy()
    expected = [[0, 0], *(poses[2 + 3 * k] - poses[2 + 3 * (k - 1)] for k in range(1, 5))]
    assert np.array_equal(skipping, expected)
    with pytest.raises(ConfigError, match="no cameras; allowed: controls='actions'"):
        EpisodeDataset(tmp_path / "set", window=5, controls="cameras")


class ButtonWorld:
    """A game without poses: a button brightens the picture."""

    name, version, size = "buttons", 1, SIZE
    button_controls = ButtonControls(
        ActionSpec((ActionColumn("brighter", "pressed", 0.0, 1.0), ActionColumn("darker", "pressed", 0.0, 1.0))),
        {"brighter": "darker", "darker": "brighter"},
    )

    def play(self, num_frames: int, seed: int):
        actions = np.zeros((num_frames, 2))
        actions[np.arange(1, num_frames), np.random.default_rng(seed).integers(0, 2, num_frames - 1)] = 1
        level = 128 + 3 * np.cumsum(actions[:, 0] - actions[:, 1])
        frames = np.broadcast_to(level[:, None, None, None], (num_frames, SIZE, SIZE, 3)).astype(np.uint8)
        return frames, actions, level, level > 130


def test_games_are_recorded_with_buttons_rewards_and_ends(tmp_path: Path):
    world = ButtonWorld()
    assert record(world, tmp_path / "game", 3, 10, num_scenes=4) == 3
    episodes = EpisodeDataset(tmp_path / "game", window=4)
    assert episodes.info.inverse_map == world.button_controls.inverse_map
    for index, item in enumerate(episodes.episodes):
        frames, actions, rewards, dones = world.play(10, item.seed)
        assert np.array_equal(episodes.frames(index), frames)
        window = episodes[7 * index + 3]  # frames 3 to 6
        assert torch.equal(window["controls"], torch.from_numpy(actions[3:7]))
        assert window["rewards"].tolist() == rewards[3:7].tolist()
        assert window["dones"].tolist() == dones[3:7].tolist()
    with pytest.raises(ConfigError, match="no poses; allowed: skip=1"):
        EpisodeDataset(tmp_path / "game", window=2, skip=2)


def test_worlds_by_name():
    assert make_world("panorama", 16).size == 16
    with pytest.raises(ConfigError, match="did you mean 'room'"):
        make_world("rom")


def test_atari_games_by_name(tmp_path: Path):
    pytest.importorskip("ale_py", reason="needs ale-py (extra: worlds)")
    pytest.importorskip("vidgen.worlds.atari_world")
    world = make_world("atari:pong", 32)
    record(world, tmp_path / "pong", 1, 6)
    episodes = EpisodeDataset(tmp_path / "pong", window=6)
    frames, actions, _, _ = world.play(6, episodes.episodes[0].seed)
    assert np.array_equal(episodes.frames(0), frames)
    assert np.array_equal(episodes.actions(0), actions)
    with pytest.raises(VidgenError, match="pong"):
        make_world("atari:pongg", 32)


@pytest.mark.parametrize("name", ["num_episodes", "num_frames", "num_scenes"])
def test_nothing_to_record(tmp_path: Path, world: RoomWorld, name: str):
    with pytest.raises(ConfigError, match=f"{name}=0"):
        record(world, tmp_path, **{"num_episodes": 1, "num_frames": 1, "num_scenes": 1, name: 0})
