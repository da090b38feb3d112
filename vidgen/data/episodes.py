"""Episodes: frames with the actions that made them, on disk in the layout of LeRobot's data sets, version 3.

    meta/info.json                       world, frame size, rate, meaning of the columns; written last
    meta/episodes.parquet                one row per episode: length, split, seed, file, frame_offset
    data/chunk-000/file-000.parquet      one row per frame: action, pose, reward, done
    videos/frames/chunk-000/file-000.mp4 the frames of the same episodes, one after another

Row k holds the action that *produced* frame k and the pose *at* frame k; row 0 of an episode is the null action. The
action of a world that can be walked through is the recorded motion, never a pressed key.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from vidgen.controls import ActionSpec, camera_deltas, planar_deltas, walking_cameras
from vidgen.data.latent_dataset import DatasetError
from vidgen.data.video_reader import VideoReader
from vidgen.runtime.device import generator_for
from vidgen.runtime.errors import ConfigError, VidgenError, suggestion

FORMAT_VERSION = 1
INFO_PATH = Path("meta/info.json")
EPISODES_PATH = Path("meta/episodes.parquet")
SPLITS = ("train", "validation", "test")
# What the numbers of a pose are, for the worlds whose motion can be computed from poses.
PLANAR_POSE = ("x", "y", "heading")
# The actions of a clip are compared with what changes in its frames at these shifts.
LAGS = (-2, -1, 0, 1, 2)


class EpisodeAlignmentError(VidgenError):
    """Actions do not belong to the frames they are stored with; names the shift that fits."""


def import_parquet() -> Any:
    """pyarrow.parquet, or an error that says what to install."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise VidgenError('Episodes need pyarrow: pip install "vidgen[worlds]".') from error
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

    def to_json(self) -> str:
        """The text of `info.json`."""
        return json.dumps(asdict(self), indent=1)

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
            fields["size"], fields["pose_names"] = tuple(fields["size"]), tuple(fields["pose_names"])
            return cls(**fields)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, DatasetError):
                raise
            raise DatasetError(f"{path} is damaged: {type(error).__name__} {error}.") from error


@dataclass(frozen=True)
class EpisodeRecord:
    """An episode: its number, frames, split, seed of its walk, file and first frame there."""

    index: int
    length: int
    split: str
    seed: int
    file: int
    frame_offset: int


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
        ConfigError: an unknown split or kind of controls, or a window that is longer than an episode.

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
        self.window, self.skip, self.controls_kind, self.num_sparse, self.seed = (
            window,
            skip,
            controls,
            num_sparse,
            seed,
        )
        self.info = EpisodesInfo.read(self.root)
        self.action_spec = ActionSpec.from_dict(self.info.action_spec)
        self.episodes = [record for record in read_records(self.root) if record.split == split]
        if not self.info.pose_names and (skip > 1 or num_sparse or controls == "cameras"):
            raise ConfigError(f"{self.root} holds no poses; allowed: skip=1, num_sparse=0, controls='actions'.")
        self._columns = self._read_columns()
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
        self._videos: dict[int, Any] = {}
        if in_memory:
            files = sorted({record.file for record in self.episodes})
            for file in tqdm(files, desc=f"reading {self.root.name}", disable=len(files) < 4, leave=False):
                with self._reader(file) as reader:
                    self._videos[file] = reader[:]

    def _reader(self, file: int) -> VideoReader:
        return VideoReader(self.root / video_path(file))

    def _read_columns(self) -> dict[int, dict[str, np.ndarray]]:
        """Actions, poses, rewards and dones of every file."""
        columns = {}
        for file in sorted({record.file for record in self.episodes}):
            path = self.root / data_path(file)
            try:
                table = import_parquet().read_table(path)
                columns[file] = {
                    "actions": np.array(table["action"].to_pylist(), np.float64),
                    "poses": np.array(table["pose"].to_pylist(), np.float64),
                    "rewards": table["reward"].to_numpy(),
                    "dones": table["done"].to_numpy(),
                }
            except (OSError, KeyError, ValueError) as error:
                raise DatasetError(f"cannot read {path}: {error}") from error
            for name in ("actions", "poses"):
                wrong = np.argwhere(~np.isfinite(columns[file][name]))
                if len(wrong):
                    row = table.slice(int(wrong[0, 0]), 1).to_pylist()[0]
                    raise DatasetError(
                        f"{path}: {name} of episode {row['episode_index']}, frame {row['frame_index']} are not finite."
                    )
        return columns

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

    def __getitem__(self, index: int) -> dict[str, Any]:
        episode, frame_ids = self.window_frames(index)
        columns = self._columns[self.episodes[episode].file]
        rows = self.episodes[episode].frame_offset + frame_ids
        return {
            "frames": torch.from_numpy(self.frames(episode, frame_ids)),
            "controls": self.controls(episode, frame_ids),
            "rewards": torch.from_numpy(columns["rewards"][rows].astype(np.float32)),
            "dones": torch.from_numpy(columns["dones"][rows].astype(bool)),
            "episode": self.episodes[episode].index,
            "start": int(frame_ids[0]),
        }

    def _rows(self, episode: int, frame_ids: np.ndarray | None) -> np.ndarray:
        record = self.episodes[episode]
        return record.frame_offset + (np.arange(record.length) if frame_ids is None else np.asarray(frame_ids))

    def frames(self, episode: int, frame_ids: np.ndarray | None = None) -> np.ndarray:
        """uint8 `(frames, height, width, 3)`: an episode, or chosen frames of it."""
        file, rows = self.episodes[episode].file, self._rows(episode, frame_ids)
        if file in self._videos:
            return self._videos[file][rows]
        with self._reader(file) as reader:
            return reader.get_batch(rows.tolist())

    def poses(self, episode: int, frame_ids: np.ndarray | None = None) -> np.ndarray:
        """float64 `(frames, numbers of a pose)`."""
        return self._columns[self.episodes[episode].file]["poses"][self._rows(episode, frame_ids)]

    def actions(self, episode: int, frame_ids: np.ndarray | None = None) -> np.ndarray:
        """float64 `(frames, columns)`, as recorded."""
        return self._columns[self.episodes[episode].file]["actions"][self._rows(episode, frame_ids)]

    def controls(self, episode: int, frame_ids: np.ndarray | None = None) -> Tensor:
        """Controls of chosen frames, float64 `(frames, columns)`: cameras, buttons, or the motion between them."""
        poses = torch.from_numpy(self.poses(episode, frame_ids))
        is_planar = self.info.pose_names == PLANAR_POSE
        if self.controls_kind == "cameras":
            return walking_cameras(poses, self.info.focal, self.info.eye_height) if is_planar else poses
        if not self.info.pose_names:
            return torch.from_numpy(self.actions(episode, frame_ids))
        return planar_deltas(poses) if is_planar else camera_deltas(poses)


def alignment(frames: np.ndarray, actions: np.ndarray) -> dict[int, float]:
    """How well actions explain what changes, if they are shifted.

    Args:
        frames: uint8 `(frames, height, width, 3)` of one episode.
        actions: `(frames, columns)`.

    Returns:
        Shift -> correlation of the size of action k with the change from frame k - 1 + shift to k + shift. It is
        largest at 0 where row k is the action that produced frame k; at 1 actions are stored one row early.
    """
    change = np.abs(np.diff(frames.astype(np.float32), axis=0)).mean(axis=(1, 2, 3))
    spread = np.abs(actions).max(axis=0)
    size = np.abs(actions[1:] / np.where(spread > 0, spread, 1)).max(axis=1)
    edge = max(LAGS)
    middle = size[edge : len(size) - edge]
    correlations = {}
    for lag in LAGS:
        shifted = change[edge + lag : len(change) - edge + lag]
        deviations = middle.std() * shifted.std()
        covariance = ((middle - middle.mean()) * (shifted - shifted.mean())).mean()
        correlations[lag] = float(covariance / deviations) if deviations > 0 else 0.0
    return correlations


def align_check(episodes: EpisodeDataset, num_episodes: int = 32) -> dict[int, float]:
    """Check that the actions of a data set belong to its frames.

    Args:
        episodes: the data set.
        num_episodes: how many of its episodes are looked at.

    Returns:
        Mean of [`alignment`] over the episodes.

    Raises:
        EpisodeAlignmentError: another shift fits better than none; named.
    """
    chosen = range(min(num_episodes, len(episodes.episodes)))
    each = [alignment(episodes.frames(episode), episodes.actions(episode)) for episode in chosen]
    means = {lag: float(np.mean([correlations[lag] for correlations in each])) for lag in LAGS}
    best = max(means, key=means.__getitem__)
    if best != 0:
        table = ", ".join(f"{lag:+d}: {value:.2f}" for lag, value in means.items())
        raise EpisodeAlignmentError(
            f"Actions of {episodes.root} fit the frames {best:+d} rows away (correlation by shift: {table}). Row k "
            "must hold the action that produced frame k; record it again, or shift the actions."
        )
    return means
