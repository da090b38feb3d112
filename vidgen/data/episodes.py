"""Episodes: frames with the actions that made them, on disk in the layout of LeRobot's data sets, version 3.

    meta/info.json                       world, frame size, rate, meaning of the columns; written once, at the start
    meta/episodes.parquet                one row per episode: length, split, seed, file, frame_offset
    data/chunk-000/file-000.parquet      one row per frame: action, pose, reward, done
    videos/frames/chunk-000/file-000.mp4 the frames of the same episodes, one after another

Row k holds the action that *produced* frame k and the pose *at* frame k; row 0 of an episode is the null action. The
action of a world that can be walked through is the recorded motion, never a pressed key.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from vidgen.controls import CAMERA_SPEC, ActionSpec, camera_deltas, planar_deltas, walking_cameras
from vidgen.data.latent_dataset import DatasetError
from vidgen.data.video_reader import VideoReader
from vidgen.runtime.device import available_memory, generator_for
from vidgen.runtime.errors import ConfigError, VidgenError, suggestion

FORMAT_VERSION = 1
INFO_PATH = Path("meta/info.json")
EPISODES_PATH = Path("meta/episodes.parquet")
SPLITS = ("train", "validation", "test")
# What the numbers of a pose are, for the worlds whose motion can be computed from poses: somebody who walks, a crop
# that slides over a picture, cameras in space.
PLANAR_POSE = ("x", "y", "heading")
SLIDING_POSE = ("x", "y")
CAMERA_POSE = CAMERA_SPEC.names
# Up to this many pixels on a side, frames are stored without loss: chroma subsampling would hurt small ones badly.
LOSSLESS_SIZE = 96
# What a video file can say of its rate.
MIN_FPS, MAX_FPS = 0.001, 1000
# Files kept open by a data set that doesn't hold its frames in memory.
MAX_OPEN_FILES = 32


def import_parquet() -> Any:
    """Get pyarrow.parquet, or an error that says what to install."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise VidgenError('Episodes need pyarrow: pip install "vidgen[train]".') from error
    return pyarrow.parquet


def data_path(file: int) -> Path:
    """Where the numbers of a file are, relative to the data set."""
    return Path(f"data/chunk-{file // 1000:03d}/file-{file % 1000:03d}.parquet")


def video_path(file: int) -> Path:
    """Where the frames of a file are, relative to the data set."""
    return Path(f"videos/frames/chunk-{file // 1000:03d}/file-{file % 1000:03d}.mp4")


@dataclass(frozen=True)
class EpisodesInfo:
    """What a data set of episodes is about.

    Attributes:
        world: name of the world.
        world_version: its version.
        size: height and width of a frame, pixels.
        fps: frames per second of play.
        action_spec: `ActionSpec.to_dict()` of the actions.
        inverse_map: of `ButtonControls`, where actions are buttons; `None` where they are motion.
        pose_names: what the numbers of a pose are; empty for a world without poses.
        focal: focal length in widths of the picture, where poses are `PLANAR_POSE`.
        eye_height: of the camera, in units of the world.
        version: of the format.
    """

    world: str
    world_version: int
    size: tuple[int, int]
    fps: float
    action_spec: dict[str, Any]
    inverse_map: dict[str, str] | None = None
    pose_names: tuple[str, ...] = ()
    focal: float | None = None
    eye_height: float = 0.0
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.pose_names not in ((), PLANAR_POSE, SLIDING_POSE, CAMERA_POSE):
            raise ConfigError(
                f"pose_names={self.pose_names}; allowed: {PLANAR_POSE}, {SLIDING_POSE}, those of CAMERA_SPEC, none."
            )
        if not MIN_FPS <= self.fps <= MAX_FPS:
            raise ConfigError(f"fps={self.fps}; allowed: {MIN_FPS} to {MAX_FPS}.")

    @property
    def is_lossless(self) -> bool:
        """Whether frames come back exactly."""
        return max(self.size) <= LOSSLESS_SIZE

    def to_json(self) -> str:
        """The text of `info.json`: the attributes, and for other readers what they say about the files."""
        actions = [column["name"] for column in self.action_spec["columns"]]
        numbers = {"episode_index": "int64", "frame_index": "int64", "timestamp": "float64", "reward": "float64"}
        features = {
            "frames": {"dtype": "video", "shape": [*self.size, 3], "names": ["height", "width", "channel"]},
            "action": {"dtype": "float64", "shape": [len(actions)], "names": actions},
            "pose": {"dtype": "float64", "shape": [len(self.pose_names)], "names": list(self.pose_names)},
            **{name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in numbers.items()},
            "done": {"dtype": "bool", "shape": [1], "names": None},
        }
        chunk = "chunk-{chunk_index:03d}/file-{file_index:03d}"
        paths = {"data_path": f"data/{chunk}.parquet", "video_path": f"videos/{{video_key}}/{chunk}.mp4"}
        codec = "libx264rgb, lossless" if self.is_lossless else "libx264, yuv420p"
        return json.dumps({**asdict(self), "codec": codec, "features": features, **paths}, indent=1)

    @classmethod
    def read(cls, root: Path) -> EpisodesInfo:
        """Read `info.json`.

        Raises:
            DatasetError: it is missing, damaged or of another format version.
        """
        path = root / INFO_PATH
        if not root.is_dir():
            raise DatasetError(f"{str(root)!r} is not a folder; `vidgen world record` makes one.")
        if not path.is_file():
            raise DatasetError(
                f"{root} holds no {INFO_PATH}: it is no data set of episodes, or recording never began."
            )
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            version = fields["version"]
            if version != FORMAT_VERSION:
                raise DatasetError(f"{path} has format version {version!r}; allowed: {FORMAT_VERSION}.")
            fields = {name: fields[name] for name in cls.__dataclass_fields__}
            return cls(**{**fields, "size": tuple(fields["size"]), "pose_names": tuple(fields["pose_names"])})
        except DatasetError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(f"{path} is damaged: {type(error).__name__} {error}.") from error


@dataclass(frozen=True)
class EpisodeRecord:
    """An episode: its number, frames, split, seed of its walk, file and first frame there, seed of its scene."""

    index: int
    length: int
    split: str
    seed: int
    file: int
    frame_offset: int
    scene_seed: int


def read_records(root: Path) -> list[EpisodeRecord]:
    """Every episode of a data set.

    Raises:
        DatasetError: the list is missing or damaged.
    """
    path = root / EPISODES_PATH
    try:
        rows = import_parquet().read_table(path).to_pylist()
        return [EpisodeRecord(**row) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error


class EpisodeDataset(Dataset):
    """Windows of recorded episodes.

    Args:
        root: the data set.
        split: one of `SPLITS`.
        window: frames of a window.
        skip: every how many recorded frames a window takes one.
        controls: `"actions"`, or `"cameras"` for absolute cameras.
        num_sparse: frames of the window that come from anywhere before the others, drawn from `seed` and the index
            of the window; what a model with a long memory is shown.
        seed: see `num_sparse`.
        in_memory: decode all frames at the start; otherwise each window is read from its file.

    Attributes:
        info: what the data set is about.
        action_spec: the columns of `"actions"`.
        episodes: the records of the split.

    Raises:
        DatasetError: the folder is missing, damaged, of another version, or holds numbers that are not finite.
        ConfigError: an unknown split or kind of controls, a window that is longer than an episode, or more frames than
            fit in memory.

    Example:
        ```py
        windows = EpisodeDataset("data/doom", window=16)
        windows[0]["frames"]  # uint8 (16, height, width, 3)
        windows[0]["controls"]  # float64 (16, columns)
        ```
    """

    def __init__(
        self,
        root: str | os.PathLike,
        split: str = "train",
        window: int = 16,
        skip: int = 1,
        controls: str = "actions",
        num_sparse: int = 0,
        seed: int = 0,
        in_memory: bool = True,
    ) -> None:
        if split not in SPLITS:
            raise ConfigError(f"split={split!r}: {suggestion(split, SPLITS)}.")
        if controls not in ("actions", "cameras"):
            raise ConfigError(f"controls={controls!r}; allowed: 'actions', 'cameras'.")
        if window < 1 or skip < 1 or not 0 <= num_sparse < window:
            raise ConfigError(
                f"window={window}, skip={skip}, num_sparse={num_sparse}; window and skip must be at least 1 and "
                "num_sparse less than window."
            )
        self.root, self.split = Path(root), split
        self.window, self.skip, self.num_sparse, self.seed = window, skip, num_sparse, seed
        self.controls_kind = controls
        self.info = EpisodesInfo.read(self.root)
        self.action_spec = ActionSpec.from_dict(self.info.action_spec)
        if not self.info.pose_names and (skip > 1 or num_sparse or controls == "cameras"):
            raise ConfigError(f"{self.root} holds no poses; allowed: skip=1, num_sparse=0, controls='actions'.")
        if controls == "cameras" and self.info.pose_names not in (PLANAR_POSE, CAMERA_POSE):
            raise ConfigError(
                f"Poses of {self.root} are {', '.join(self.info.pose_names)}: no cameras; allowed: controls='actions'."
            )
        records = read_records(self.root)
        self.episodes = [record for record in records if record.split == split]
        self._file_frames = {
            file: sum(record.length for record in records if record.file == file)
            for file in sorted({record.file for record in self.episodes})
        }
        self._columns = {file: self._read_columns(file) for file in self._file_frames}

        dense = (window - num_sparse - 1) * skip + 1  # recorded frames that the contiguous part covers
        self._first_start = num_sparse  # frames before it, of which the sparse ones are drawn
        self._num_starts = []
        for record in self.episodes:
            starts = record.length - dense - self._first_start + 1
            if starts < 1:
                raise ConfigError(
                    f"episode {record.index} of {self.root} has {record.length} frames; a window of {window} frames "
                    f"with skip={skip} and num_sparse={num_sparse} needs {dense + self._first_start}."
                )
            self._num_starts.append(starts)
        self._ends = np.cumsum(self._num_starts)

        self._videos: dict[int, np.ndarray] = {}
        self._readers: dict[int, VideoReader] = {}
        missing = [video_path(file) for file in self._file_frames if not (self.root / video_path(file)).is_file()]
        if missing:
            raise DatasetError(f"{self.root / missing[0]} is missing; {EPISODES_PATH} names it.")
        if in_memory:
            self._read_videos()

    def _read_videos(self) -> None:
        needed = sum(self._file_frames.values()) * 3 * math.prod(self.info.size)
        if needed > available_memory():
            raise ConfigError(
                f"frames of {self.root} need {needed / 2**30:.1f} GiB of memory, {available_memory() / 2**30:.1f} GiB "
                "are free; allowed: in_memory=False, which reads each window from its file."
            )
        files = list(self._file_frames)
        for file in tqdm(files, desc=f"reading {self.root.name}", disable=len(files) < 4, leave=False):
            with self._open_video(file) as reader:
                self._videos[file] = reader[:]

    def _open_video(self, file: int) -> VideoReader:
        path = self.root / video_path(file)
        reader = VideoReader(path)
        found = (len(reader), reader.height, reader.width)
        if found != (self._file_frames[file], *self.info.size):
            reader.close()
            raise DatasetError(
                f"{path} holds {found[0]} frames of {found[1]} x {found[2]} pixels; by the other files there are "
                f"{self._file_frames[file]} of {self.info.size[0]} x {self.info.size[1]}."
            )
        return reader

    def _read_columns(self, file: int) -> dict[str, np.ndarray]:
        """Actions, poses, rewards and dones of a file."""
        path = self.root / data_path(file)
        widths = {"action": self.action_spec.width, "pose": len(self.info.pose_names), "reward": 1}
        num_frames = self._file_frames[file]
        try:
            table = import_parquet().read_table(path)
            vectors = {
                name: table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.float64)
                for name in ("action", "pose")
            }
            vectors["reward"] = table["reward"].to_numpy().astype(np.float64)
            columns = {"dones": table["done"].to_numpy()}
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise DatasetError(f"cannot read {path}: {error}") from error
        for name, width in widths.items():
            if len(table) != num_frames or vectors[name].size != num_frames * width:
                raise DatasetError(
                    f"{path} holds {len(table)} rows and {vectors[name].size} numbers of {name}; by the other files "
                    f"there are {num_frames} rows with {width} numbers each."
                )
            values = columns[f"{name}s"] = vectors[name].reshape(num_frames, width)
            wrong = np.argwhere(~np.isfinite(values))
            if len(wrong):
                row = table.slice(int(wrong[0, 0]), 1).to_pylist()[0]
                raise DatasetError(
                    f"{path}: {name} of episode {row['episode_index']}, frame {row['frame_index']} is not finite."
                )
        return {**columns, "rewards": columns["rewards"][:, 0]}

    def __getstate__(self) -> dict[str, Any]:
        # A worker process that isn't forked opens the files itself.
        return {**self.__dict__, "_readers": {}}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def window_frames(self, index: int) -> tuple[int, np.ndarray]:
        """Which frames window `index` is made of: the episode's place in `episodes`, and frame numbers `(window,)`."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} does not exist; allowed: 0 to {len(self) - 1}.")
        episode = int(np.searchsorted(self._ends, index, side="right"))
        start = self._first_start + index - (int(self._ends[episode]) - self._num_starts[episode])
        frame_ids = start + self.skip * np.arange(self.window - self.num_sparse)
        if self.num_sparse:
            order = torch.randperm(start, generator=generator_for(self.seed, index))[: self.num_sparse]
            frame_ids = np.concatenate([np.sort(order.numpy()), frame_ids])
        return episode, frame_ids

    def first_window(self, episode: int) -> np.ndarray:
        """Frame numbers `(window,)` of the earliest window of an episode, given its place in `episodes`."""
        dense = self._first_start + self.skip * np.arange(self.window - self.num_sparse)
        return np.concatenate([np.arange(self.num_sparse), dense])

    def __getitem__(self, index: int) -> dict[str, Any]:
        episode, frame_ids = self.window_frames(index)
        return {**self.episode(episode, frame_ids), "start": int(frame_ids[0])}

    def episode(self, episode: int, frame_ids: np.ndarray | None = None) -> dict[str, Any]:
        """An episode, or chosen frames of it.

        Args:
            episode: its place in `episodes`.
            frame_ids: numbers of frames `(frames,)` in rising order; `None` takes all.

        Raises:
            ConfigError: a frame that the episode doesn't have.

        Returns:
            `frames` uint8 `(frames, height, width, 3)`, `controls` float64 `(frames, columns)`, `poses` float64
            `(frames, numbers of a pose)`, `rewards` float32 and `dones` bool `(frames,)`, and `episode`, its number in
            the data set.
        """
        columns, rows = self._columns[self.episodes[episode].file], self._rows(episode, frame_ids)
        return {
            "frames": torch.from_numpy(self.frames(episode, frame_ids)),
            "controls": self.controls(episode, frame_ids),
            "poses": torch.from_numpy(columns["poses"][rows]),
            "rewards": torch.from_numpy(columns["rewards"][rows].astype(np.float32)),
            "dones": torch.from_numpy(columns["dones"][rows].astype(bool)),
            "episode": self.episodes[episode].index,
        }

    def _rows(self, episode: int, frame_ids: np.ndarray | None) -> np.ndarray:
        record = self.episodes[episode]
        frame_ids = np.arange(record.length) if frame_ids is None else np.asarray(frame_ids)
        # Beyond its ends are the frames of its neighbors in the file.
        if frame_ids.size and not 0 <= frame_ids.min() <= frame_ids.max() < record.length:
            raise ConfigError(
                f"frames {frame_ids.min()} to {frame_ids.max()} of episode {record.index}; allowed: 0 to "
                f"{record.length - 1}."
            )
        return record.frame_offset + frame_ids

    def frames(self, episode: int, frame_ids: np.ndarray | None = None) -> np.ndarray:
        """uint8 `(frames, height, width, 3)`: an episode, or chosen frames of it."""
        file, rows = self.episodes[episode].file, self._rows(episode, frame_ids)
        if file in self._videos:
            return self._videos[file][rows]
        if file not in self._readers:
            if len(self._readers) == MAX_OPEN_FILES:
                self._readers.pop(next(iter(self._readers))).close()
            self._readers[file] = self._open_video(file)
        return self._readers[file].get_batch(rows.tolist())

    def poses(self, episode: int, frame_ids: np.ndarray | None = None) -> np.ndarray:
        """float64 `(frames, numbers of a pose)`."""
        return self._columns[self.episodes[episode].file]["poses"][self._rows(episode, frame_ids)]

    def actions(self, episode: int, frame_ids: np.ndarray | None = None) -> np.ndarray:
        """float64 `(frames, columns)`, as recorded."""
        return self._columns[self.episodes[episode].file]["actions"][self._rows(episode, frame_ids)]

    def controls(self, episode: int, frame_ids: np.ndarray | None = None) -> Tensor:
        """Controls of chosen frames, float64 `(frames, columns)`: cameras, buttons, or the motion between them."""
        poses = torch.from_numpy(self.poses(episode, frame_ids))
        names = self.info.pose_names
        if self.controls_kind == "cameras":
            return poses if names == CAMERA_POSE else walking_cameras(poses, self.info.focal, self.info.eye_height)
        if not names:
            return torch.from_numpy(self.actions(episode, frame_ids))
        if names == SLIDING_POSE:
            return torch.cat([torch.zeros_like(poses[:1]), poses.diff(dim=0)])
        return planar_deltas(poses) if names == PLANAR_POSE else camera_deltas(poses)
