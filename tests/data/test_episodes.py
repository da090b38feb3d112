"""Episodes on disk: nothing is lost, windows hold what was recorded, and misfits are named."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet
import pytest
import torch

from vidgen.controls import CAMERA_SPEC, ControlError, planar_deltas, walking_cameras
from vidgen.data import DatasetError, EpisodeDataset, EpisodesInfo, EpisodeWriter, VideoDecodeError, record
from vidgen.data import episode_writer as episode_writer_module
from vidgen.data import episodes as episodes_module
from vidgen.data.episodes import EPISODES_PATH, INFO_PATH, data_path, video_path
from vidgen.data.recording import episodes_info
from vidgen.runtime.errors import ConfigError
from vidgen.worlds.room import RoomWorld

SIZE, FRAMES = 16, 24


@pytest.fixture(scope="module")
def world() -> RoomWorld:
    return RoomWorld(SIZE)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, world: RoomWorld) -> Path:
    root = tmp_path_factory.mktemp("episodes") / "room"
    record(world, root, 5, FRAMES)
    return root


@pytest.fixture
def damaged(recorded: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(recorded, tmp_path / "copy")
    return tmp_path / "copy"


def noise_episode(seed: int, length: int, size: int = SIZE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    frames = random.integers(0, 256, (length, size, size, 3), np.uint8)
    actions = random.uniform(-1, 1, (length, 3))
    actions[0] = 0
    return frames, actions, random.normal(size=(length, 3))


def test_small_frames_and_numbers_come_back_exactly(tmp_path: Path, world: RoomWorld):
    episodes = [noise_episode(seed, length) for seed, length in enumerate((7, 12, 5))]
    with EpisodeWriter(tmp_path / "set", episodes_info(world, 12.0)) as writer:
        for seed, (frames, actions, poses) in enumerate(episodes):
            rewards, dones = np.arange(len(frames)), np.arange(len(frames)) == 3
            writer.append(frames, actions, poses, rewards, dones, seed=seed)
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
        assert np.array_equal(item["poses"].numpy(), episodes[1][2][2:7])
        assert item["rewards"].tolist() == [2, 3, 4, 5, 6]
        assert item["dones"].tolist() == [False, True, False, False, False]
        assert np.array_equal(read.episode(2)["frames"].numpy(), episodes[2][0])


def test_large_frames_are_compressed_with_short_groups_and_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world, size = RoomWorld(128), 128
    scene = world.scene(0)
    poses = [world.explore(scene, 20, seed) for seed in range(3)]
    frames = [world.render(scene, walk) for walk in poses]
    monkeypatch.setattr(episode_writer_module, "BYTES_PER_FILE", 2 * frames[0].nbytes)
    with EpisodeWriter(tmp_path / "set", episodes_info(world, 12.0)) as writer:
        for walk, pictures in zip(poses, frames):
            writer.append(pictures, world.deltas(walk).numpy(), walk)
    assert [item.file for item in writer.records] == [0, 0, 1]
    read = EpisodeDataset(tmp_path / "set", window=4, in_memory=False)
    for index, pictures in enumerate(frames):
        error = np.abs(read.frames(index, np.arange(5, 9)).astype(int) - pictures[5:9])
        assert 0 < error.mean() < 6
    with av.open(str(tmp_path / "set" / video_path(0))) as container:
        stream = container.streams.video[0]
        keys = [index for index, packet in enumerate(container.demux(stream)) if packet.is_keyframe]
        assert (stream.codec_context.pix_fmt, max(np.diff(keys))) == ("yuv420p", 8)
    with pytest.raises(ConfigError, match="even above 96"):
        EpisodeWriter(tmp_path / "odd", EpisodesInfo("x", 1, (size, size + 1), 10.0, read.info.action_spec))


def test_few_files_stay_open_and_workers_open_their_own(
    recorded: Path, damaged: Path, monkeypatch: pytest.MonkeyPatch
):
    record(RoomWorld(SIZE), damaged, 6, FRAMES)  # a second file
    monkeypatch.setattr(episodes_module, "MAX_OPEN_FILES", 1)
    in_memory = EpisodeDataset(damaged, window=4)
    from_files = EpisodeDataset(damaged, window=4, in_memory=False)
    for index in (0, len(from_files) - 1, 3):
        assert torch.equal(from_files[index]["frames"], in_memory[index]["frames"])
        assert len(from_files._readers) == 1
    copy = pickle.loads(pickle.dumps(from_files))
    assert torch.equal(copy[2]["frames"], in_memory[2]["frames"])


def test_an_array_that_is_used_again_for_the_next_episode_loses_nothing(tmp_path: Path, world: RoomWorld):
    episodes = [noise_episode(seed, 6) for seed in range(3)]
    buffer = np.empty_like(episodes[0][0])
    with EpisodeWriter(tmp_path / "set", episodes_info(world, 12.0)) as writer:
        for frames, actions, poses in episodes:
            buffer[:] = frames
            writer.append(buffer, actions, poses)
    read = EpisodeDataset(tmp_path / "set", window=2)
    assert all(np.array_equal(read.frames(index), frames) for index, (frames, _, _) in enumerate(episodes))


@pytest.mark.parametrize("in_memory", [True, False])
def test_frames_of_the_next_episode_are_not_given_for_those_of_this_one(recorded: Path, in_memory: bool):
    read = EpisodeDataset(recorded, window=2, in_memory=in_memory)
    assert len(read.frames(1, [0, FRAMES - 1])) == 2
    for ask in (read.frames, read.poses, read.actions, read.controls, read.episode):
        for frame_ids in ([0, FRAMES], [-1, 2]):
            with pytest.raises(ConfigError, match=f"of episode 1; allowed: 0 to {FRAMES - 1}"):
                ask(1, frame_ids)


def test_episodes_that_lost_their_description_are_not_written_over(damaged: Path, world: RoomWorld):
    (damaged / INFO_PATH).unlink()
    with pytest.raises(DatasetError, match=r"holds 5 episodes and no meta/info\.json"):
        EpisodeWriter(damaged, episodes_info(world, 12.0))
    assert len(episodes_module.read_records(damaged)) == 5


@pytest.mark.parametrize("fps", [0, 1e-4, 1e6, float("nan"), float("inf")])
def test_a_rate_that_no_video_has_is_refused_before_anything_is_recorded(tmp_path: Path, world: RoomWorld, fps: float):
    with pytest.raises(ConfigError, match="fps=.*allowed: 0.001 to 1000"):
        record(world, tmp_path / "set", 1, 4, fps=fps)
    assert not list(tmp_path.iterdir())


def test_controls_lead_from_each_frame_of_the_window_to_the_next(recorded: Path, world: RoomWorld):
    windows = EpisodeDataset(recorded, window=6, skip=2, num_sparse=2, seed=3)
    for index in range(0, len(windows), 3):
        episode, frame_ids = windows.window_frames(index)
        assert (np.diff(frame_ids[2:]) == 2).all()
        assert 0 <= frame_ids[0] < frame_ids[1] < frame_ids[2] and frame_ids[-1] < FRAMES
        item = windows[index]
        assert torch.equal(item["controls"], planar_deltas(torch.from_numpy(windows.poses(episode)[frame_ids])))
        assert np.array_equal(item["frames"].numpy(), windows.frames(episode)[frame_ids])
    # The last window ends with the last frame, and every sparse frame is used somewhere.
    assert frame_ids[-1] in (FRAMES - 1, FRAMES - 2, FRAMES - 3)
    sparse = {int(frame) for index in range(len(windows)) for frame in windows.window_frames(index)[1][:2]}
    assert len(sparse) > 10
    assert np.array_equal(windows.window_frames(4)[1], windows.window_frames(4)[1])

    # Whole episodes: what was recorded.
    whole = EpisodeDataset(recorded, window=FRAMES)
    assert np.allclose(whole[1]["controls"].numpy(), whole.actions(1), rtol=0, atol=1e-12)
    poses = torch.from_numpy(EpisodeDataset(recorded).poses(0)[4:10])
    cameras = EpisodeDataset(recorded, window=6, controls="cameras")[4]["controls"]
    assert torch.equal(cameras, walking_cameras(poses, world.focal, world.eye_height))


def test_info_describes_the_files_to_other_readers(recorded: Path):
    info = json.loads((recorded / INFO_PATH).read_text())
    assert info["features"]["action"]["names"] == ["forward", "left", "turn left"]
    assert info["features"]["frames"]["shape"] == [SIZE, SIZE, 3]
    assert (info["world"], info["world_version"], info["codec"]) == ("room", 1, "libx264rgb, lossless")
    data = recorded / info["data_path"].format(chunk_index=0, file_index=0)
    table = pyarrow.parquet.read_table(data)
    assert set(table.column_names) | {"frames"} == set(info["features"])
    assert table["timestamp"].to_pylist()[3] == pytest.approx(3 / info["fps"])
    assert (recorded / info["video_path"].format(video_key="frames", chunk_index=0, file_index=0)).is_file()
    restored = EpisodesInfo.read(recorded)
    assert json.loads(restored.to_json()) == info


class TestErrors:
    def test_windows_longer_than_an_episode(self, recorded: Path):
        with pytest.raises(ConfigError, match=f"episode 0 .* has {FRAMES} frames; a window of 32"):
            EpisodeDataset(recorded, window=32)
        # 2 sparse frames before 4 frames that cover 1 + 3 x 7.
        assert len(EpisodeDataset(recorded, window=6, skip=7, num_sparse=2)) == 5
        with pytest.raises(ConfigError, match="needs 25"):
            EpisodeDataset(recorded, window=7, skip=7, num_sparse=3)

    def test_missing_and_foreign_folders(self, tmp_path: Path, recorded: Path):
        with pytest.raises(DatasetError, match="is not a folder"):
            EpisodeDataset(tmp_path / "nowhere")
        with pytest.raises(DatasetError, match="no data set of episodes"):
            EpisodeDataset(tmp_path)
        with pytest.raises(ConfigError, match="did you mean 'train'"):
            EpisodeDataset(recorded, "trian")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"version": 9}, "format version 9; allowed: 1"),
            ({"size": 5}, "damaged"),
            ({"pose_names": ["a"]}, "pose_names"),
            ({"fps": 0}, "fps=0"),
        ],
    )
    def test_another_version_and_impossible_info(self, damaged: Path, change: dict, message: str):
        path = damaged / INFO_PATH
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        with pytest.raises((DatasetError, ConfigError), match=message):
            EpisodeDataset(damaged, window=2)

    @pytest.mark.parametrize("in_memory", [True, False])
    def test_missing_truncated_and_other_files(self, damaged: Path, in_memory: bool, tmp_path: Path):
        video, data = damaged / video_path(0), damaged / data_path(0)
        whole = video.read_bytes()
        video.write_bytes(whole[:2000])
        with pytest.raises(VideoDecodeError, match=video.name):
            EpisodeDataset(damaged, window=2, in_memory=in_memory)[0]
        record(RoomWorld(SIZE), tmp_path / "shorter", 1, FRAMES)
        shutil.copy(tmp_path / "shorter" / video_path(0), video)
        with pytest.raises(DatasetError, match=f"holds {FRAMES} frames of 16 x 16 .* there are {5 * FRAMES}"):
            EpisodeDataset(damaged, window=2, in_memory=in_memory)[0]
        video.unlink()
        with pytest.raises(DatasetError, match=f"{video.name} is missing"):
            EpisodeDataset(damaged, window=2, in_memory=in_memory)
        video.write_bytes(whole)
        shutil.copy(tmp_path / "shorter" / data_path(0), data)
        with pytest.raises(DatasetError, match=f"{data.name} holds {FRAMES} rows"):
            EpisodeDataset(damaged, window=2)
        for path in (data, damaged / EPISODES_PATH):
            path.write_bytes(path.read_bytes()[:100])
            with pytest.raises(DatasetError, match=f"cannot read .*{path.name}"):
                EpisodeDataset(damaged, window=2)
            path.unlink()
            with pytest.raises(DatasetError, match=f"cannot read .*{path.name}"):
                EpisodeDataset(damaged, window=2)

    @pytest.mark.parametrize("name", ["action", "pose", "reward"])
    def test_numbers_that_are_not_finite_name_episode_and_frame(self, damaged: Path, name: str):
        path = damaged / data_path(0)
        rows = pyarrow.parquet.read_table(path).to_pylist()
        if name == "reward":
            rows[2 * FRAMES + 7][name] = None  # not there is no number either
        else:
            rows[2 * FRAMES + 7][name][1] = float("nan")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        with pytest.raises(DatasetError, match=f"{name} of episode 2, frame 7 is not finite"):
            EpisodeDataset(damaged, window=2)

    def test_more_frames_than_memory(self, recorded: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(episodes_module, "available_memory", lambda: 1000)
        with pytest.raises(ConfigError, match="in_memory=False"):
            EpisodeDataset(recorded, window=2)
        assert len(EpisodeDataset(recorded, window=2, in_memory=False))

    def test_what_does_not_belong_together_is_not_written(self, tmp_path: Path, world: RoomWorld):
        frames, actions, poses = noise_episode(0, 6)
        with EpisodeWriter(tmp_path / "set", episodes_info(world, 12.0)) as writer:
            with pytest.raises(DatasetError, match=r"actions have shape \(5, 3\)"):
                writer.append(frames, actions[1:], poses)
            with pytest.raises(DatasetError, match="frames have shape"):
                writer.append(frames[:, :8], actions, poses)
            with pytest.raises(DatasetError, match="allowed: uint8"):
                writer.append(frames / 255, actions, poses)
            with pytest.raises(DatasetError, match="first action .* allowed: the null action"):
                writer.append(frames, np.roll(actions, -1, axis=0), poses)
            with pytest.raises(ControlError, match="turn left is 90 in row 2.*multiply by pi / 180"):
                writer.append(frames, np.where(np.arange(6)[:, None] == 2, 90.0, actions), poses)
            with pytest.raises(ConfigError, match="did you mean 'train'"):
                writer.append(frames, actions, poses, split="trian")
            poses[4, 1] = np.nan
            with pytest.raises(DatasetError, match="poses of frame 4 are not finite"):
                writer.append(frames, actions, poses)
        assert writer.records == []

    def test_cameras_of_other_poses(self, tmp_path: Path):
        info = EpisodesInfo("x", 1, (16, 16), 10.0, CAMERA_SPEC.to_dict(), pose_names=("x", "y"))
        EpisodeWriter(tmp_path / "set", info).close()
        with pytest.raises(ConfigError, match="no cameras"):
            EpisodeDataset(tmp_path / "set", controls="cameras")
