"""Writes episodes, so that what is on disk is whole at any moment."""

from __future__ import annotations

import io
import os
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from vidgen.controls import ActionSpec
from vidgen.data.episodes import (
    EPISODES_PATH,
    INFO_PATH,
    LOSSLESS_SIZE,
    SPLITS,
    EpisodeRecord,
    EpisodesInfo,
    data_path,
    import_parquet,
    read_records,
    video_path,
)
from vidgen.data.latent_dataset import DatasetError
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.errors import ConfigError, suggestion

# A file is full at either.
EPISODES_PER_FILE = 16
BYTES_PER_FILE = 2**30  # of pixels, which wait in memory until then


class EpisodeWriter:
    """Adds episodes to a data set, up to `EPISODES_PER_FILE` or `BYTES_PER_FILE` to a file.

    A file appears when it is full, or at `close`; a recording that was interrupted goes on after the last whole one,
    see `records`.

    Args:
        root: the data set, new or of the same world.
        info: what it is about.

    Raises:
        ConfigError: a size that cannot be stored.
        DatasetError: the folder holds episodes of something else.

    Example:
        ```py
        with EpisodeWriter("data/room", info) as writer:
            writer.append(frames, actions, poses, split="train", seed=0)
        ```
    """

    def __init__(self, root: str | os.PathLike, info: EpisodesInfo) -> None:
        import_parquet()
        if not info.is_lossless and any(side % 2 for side in info.size):
            raise ConfigError(f"size={info.size}; allowed: even above {LOSSLESS_SIZE} pixels.")
        self.root, self.info = Path(root), info
        self._action_spec = ActionSpec.from_dict(info.action_spec)
        self._records: list[EpisodeRecord] = []
        self._pending: list[tuple[EpisodeRecord, np.ndarray, list[dict]]] = []
        if (self.root / INFO_PATH).exists():
            present = EpisodesInfo.read(self.root)
            if present != info:
                differing = [name for name, value in asdict(info).items() if value != asdict(present)[name]]
                raise DatasetError(
                    f"{self.root} holds episodes with other {', '.join(differing)}; use another folder, or the "
                    "settings of the first recording."
                )
            self._records = read_records(self.root)
        elif (self.root / EPISODES_PATH).exists() and (lost := len(read_records(self.root))):
            raise DatasetError(
                f"{self.root} holds {lost} episodes and no {INFO_PATH}, which says what they are; restore it or "
                "use another folder."
            )
        else:
            for folder in (INFO_PATH, data_path(0), video_path(0)):
                (self.root / folder).parent.mkdir(parents=True, exist_ok=True)
            self._write_records()
            with atomic_write(self.root / INFO_PATH) as path:
                path.write_text(info.to_json(), encoding="utf-8")

    @property
    def records(self) -> list[EpisodeRecord]:
        """Episodes that are on disk."""
        return list(self._records)

    def append(
        self,
        frames: np.ndarray,
        actions: np.ndarray,
        poses: np.ndarray | None = None,
        rewards: np.ndarray | None = None,
        dones: np.ndarray | None = None,
        split: str = "train",
        seed: int = 0,
        scene_seed: int = 0,
    ) -> None:
        """Add an episode.

        Args:
            frames: uint8 `(frames, height, width, 3)`.
            actions: `(frames, columns)`; row k produced frame k, row 0 is the null action.
            poses: `(frames, numbers of a pose)`, where the world has poses.
            rewards: `(frames,)`; default 0.
            dones: `(frames,)` bool; default False.
            split: one of `SPLITS`.
            seed: of the walk, for the record.
            scene_seed: of the scene, for the record.

        Raises:
            ConfigError: an unknown split.
            ControlError: an action out of its column's range.
            DatasetError: shapes that don't belong together, numbers that are not finite, or a first action that is not
                the null action.
        """
        if split not in SPLITS:
            raise ConfigError(f"split={split!r}: {suggestion(split, SPLITS)}.")
        # A copy: it waits until a file is full, and a caller may render the next episode into the same array.
        frames = np.array(frames)
        length = len(frames)
        poses = np.zeros((length, 0)) if poses is None else np.asarray(poses, np.float64)
        actions = np.asarray(actions, np.float64)
        rewards = np.zeros(length) if rewards is None else np.asarray(rewards, np.float64)
        dones = np.zeros(length, bool) if dones is None else np.asarray(dones, bool)
        wanted = {
            "frames": (frames, (length, *self.info.size, 3)),
            "actions": (actions, (length, self._action_spec.width)),
            "poses": (poses, (length, len(self.info.pose_names))),
            "rewards": (rewards, (length,)),
            "dones": (dones, (length,)),
        }
        for name, (values, shape) in wanted.items():
            if values.shape != shape or not length:
                raise DatasetError(f"{name} have shape {values.shape}; allowed here: {shape}, at least one frame.")
            if not np.isfinite(values).all():
                raise DatasetError(f"{name} of frame {np.argwhere(~np.isfinite(values))[0, 0]} are not finite.")
        if frames.dtype != np.uint8:
            raise DatasetError(f"frames are {frames.dtype}; allowed: uint8.")
        null = self._action_spec.null().numpy()
        if not np.array_equal(actions[0], null):
            raise DatasetError(
                f"the first action is {actions[0].tolist()}; allowed: the null action {null.tolist()}, because row k "
                "holds what produced frame k."
            )
        self._action_spec.check(torch.from_numpy(actions))

        index = len(self._records) + len(self._pending)
        offset = sum(record.length for record, _, _ in self._pending)
        file = self._records[-1].file + 1 if self._records else 0
        record = EpisodeRecord(index, length, split, seed, file, offset, scene_seed)
        rows = [
            {
                "episode_index": index,
                "frame_index": frame,
                "timestamp": frame / self.info.fps,
                "action": actions[frame].tolist(),
                "pose": poses[frame].tolist(),
                "reward": float(rewards[frame]),
                "done": bool(dones[frame]),
            }
            for frame in range(length)
        ]
        self._pending.append((record, frames, rows))
        pixels = sum(frames.nbytes for _, frames, _ in self._pending)
        if len(self._pending) == EPISODES_PER_FILE or pixels >= BYTES_PER_FILE:
            self._write_file()

    def close(self) -> None:
        """Write the episodes that don't fill a file."""
        if self._pending:
            self._write_file()

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an interruption only full files stay, so that going on gives the same files as never having stopped.
        if kind is None:
            self.close()

    def _write_file(self) -> None:
        import pyarrow

        file = self._pending[0][0].file
        for path in (data_path(file), video_path(file)):
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        frames = np.concatenate([frames for _, frames, _ in self._pending])
        with atomic_write(self.root / video_path(file)) as path:
            path.write_bytes(_encode(frames, self.info))
        rows = [row for _, _, episode_rows in self._pending for row in episode_rows]
        with atomic_write(self.root / data_path(file)) as path:
            import_parquet().write_table(pyarrow.Table.from_pylist(rows, schema=_row_schema()), path)
        self._records += [record for record, _, _ in self._pending]
        self._pending = []
        self._write_records()

    def _write_records(self) -> None:
        import pyarrow

        schema = pyarrow.schema(
            [
                (name, pyarrow.string() if name == "split" else pyarrow.int64())
                for name in EpisodeRecord.__annotations__
            ]
        )
        table = pyarrow.Table.from_pylist([asdict(record) for record in self._records], schema=schema)
        with atomic_write(self.root / EPISODES_PATH) as path:
            import_parquet().write_table(table, path)


def _row_schema() -> Any:
    import pyarrow

    vector = pyarrow.list_(pyarrow.float64())
    kinds = {"episode_index": pyarrow.int64(), "frame_index": pyarrow.int64(), "timestamp": pyarrow.float64()}
    kinds |= {"action": vector, "pose": vector, "reward": pyarrow.float64(), "done": pyarrow.bool_()}
    return pyarrow.schema(list(kinds.items()))


def _encode(frames: np.ndarray, info: EpisodesInfo) -> bytes:
    """An mp4: without loss for small frames, else H.264 with short groups of pictures, which random access needs."""
    height, width = info.size
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        codec, options = ("libx264rgb", {"crf": "0"}) if info.is_lossless else ("libx264", {"crf": "17"})
        # bf=0: times then start at 0; one thread: the same bytes on every machine.
        stream = container.add_stream(
            codec, rate=Fraction(info.fps).limit_denominator(1000), options={**options, "bf": "0"}
        )
        stream.width, stream.height = width, height
        stream.pix_fmt = "rgb24" if info.is_lossless else "yuv420p"
        stream.gop_size = 8
        stream.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()
