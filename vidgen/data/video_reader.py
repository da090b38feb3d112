"""Frame-exact video reading with one interface over PyAV (the default) and the decord API.

Frame i is the i-th frame in presentation order, whatever the order of decoding, the key frame spacing or the frame
rate. Nothing is guessed: an index outside the file, a damaged file and a missing frame are errors. Memory stays flat
while reading, because nothing but the frames asked for is kept.
"""

from __future__ import annotations

import importlib
import logging
import operator
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import av
import numpy as np

from vidgen.runtime.errors import VidgenError, suggestion

logger = logging.getLogger(__name__)


class VideoDecodeError(VidgenError):
    """A video file is missing, damaged, or in a format that cannot be decoded."""


class _Backend(Protocol):
    def __init__(self, path: Path, index: _Index) -> None: ...

    def read(self, indices: Sequence[int]) -> np.ndarray: ...

    def close(self) -> None: ...


class VideoReader:
    """Random and sequential access to the frames of a video file.

    Args:
        path: The video file.
        backend: `"pyav"`, `"decord"`, or `"auto"` for the first usable one in this order. In a forked process whose
            parent had loaded decord, `"decord"` reads with PyAV: decord's threads don't survive a fork.

    Raises:
        VideoDecodeError: If the file is missing, cut short or not a video.
        VidgenError: If the backend is unknown or not installed.

    Example:
        ```py
        reader = VideoReader("clip.mp4")
        reader[0]  # uint8 (height, width, 3)
        reader[10:20:2]  # uint8 (5, height, width, 3)
        ```
    """

    def __init__(self, path: str | os.PathLike, backend: str = "auto") -> None:
        self.path = Path(path)
        self.backend = _select_backend(backend)
        self._index = _Index(self.path)
        self._open()

    @property
    def fps(self) -> float:
        """Average frames per second."""
        return float(self._index.fps)

    @property
    def height(self) -> int:
        """Height of a frame in pixels."""
        return self._index.height

    @property
    def width(self) -> int:
        """Width of a frame in pixels."""
        return self._index.width

    @property
    def codec(self) -> str:
        """Name of the codec, such as `h264`."""
        return self._index.codec

    def __len__(self) -> int:
        return len(self._index.timestamps)

    def __getitem__(self, index: int | slice) -> np.ndarray:
        """Returns frame `index` as uint8 (height, width, 3), or a slice as (frames, height, width, 3).

        Raises:
            IndexError: If the index, or a bound of the slice, is negative or beyond the end.
        """
        if isinstance(index, slice):
            start = 0 if index.start is None else operator.index(index.start)
            stop = len(self) if index.stop is None else operator.index(index.stop)
            step = 1 if index.step is None else operator.index(index.step)
            if step < 1:
                raise IndexError(f"{self.path}: slice step {step} is not allowed; use a step of at least 1.")
            for bound in (start, stop):
                if not 0 <= bound <= len(self):
                    raise IndexError(self._out_of_range(bound))
            return self.get_batch(range(start, stop, step))
        return self.get_batch([index])[0]

    def get_batch(self, indices: Sequence[int]) -> np.ndarray:
        """Returns frames in the order asked for, with repeats.

        Args:
            indices: Frame numbers.

        Returns:
            uint8 array (len(indices), height, width, 3), RGB.

        Raises:
            IndexError: If an index is negative or beyond the end.
            VideoDecodeError: If a frame is damaged.
        """
        indices = [operator.index(index) for index in indices]
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(self._out_of_range(index))
        if not indices:
            return np.empty((0, self.height, self.width, 3), np.uint8)
        if self._process != os.getpid():
            # A forked child shares the parent's file position: both would read garbage.
            self._open()
        wanted, inverse = np.unique(indices, return_inverse=True)
        frames = self._backend.read(wanted.tolist())
        return frames if np.array_equal(inverse, np.arange(len(frames))) else frames[inverse]

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Yields frames one after another without keeping them.

        Args:
            start: First frame.
            stop: Frame before which to stop; the end of the file if None.

        Yields:
            uint8 arrays (height, width, 3).

        Raises:
            IndexError: If a bound is negative or beyond the end.
        """
        stop = len(self) if stop is None else stop
        for bound in (start, stop):
            if not 0 <= bound <= len(self):
                raise IndexError(self._out_of_range(bound))
        # Few frames at a time bound the memory; more than one, because decord seeks for every batch.
        for batch_start in range(start, stop, 16):
            yield from self.get_batch(range(batch_start, min(batch_start + 16, stop)))

    def close(self) -> None:
        """Closes the file."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[VideoReader], tuple[Path, str]]:
        return type(self), (self.path, self.backend)

    def _open(self) -> None:
        if self.backend == "decord" and _forked_after_decord:
            # What its threads were doing at the moment of the fork stays half done in the child, which then crashes
            # now and then. The frames are the same.
            logger.info("%s: a forked process whose parent used decord reads with PyAV.", self.path)
            self.backend = "pyav"
        self._backend: _Backend = _BACKENDS[self.backend](self.path, self._index)
        _open_backends.add(self._backend)
        self._process = os.getpid()

    def _out_of_range(self, index: int) -> str:
        allowed = f"use 0 to {len(self) - 1}" if len(self) else "it is empty"
        return f"{self.path}: frame {index} does not exist in a video of {len(self)} frames; {allowed}."


class _Index:
    """When each frame is shown and where decoding can start, from the packets alone (nothing is decoded).

    Attributes:
        timestamps: int64 (frames,), presentation times in the stream's time base, ascending.
        key_timestamps: int64 (key frames,), presentation times of key frames, ascending.
        key_decode_timestamps: int64 (key frames,), their decoding times, by which containers seek.
        has_open_groups: Whether frames shown before a key frame are stored after it, and need the group before it.
    """

    def __init__(self, path: Path) -> None:
        self.codec = "unknown codec"
        if not path.is_file():
            reason = "it is a folder" if path.is_dir() else "there is no such file"
            raise VideoDecodeError(f"cannot read {path}: {reason}.")
        try:
            with av.open(str(path)) as container:
                if not container.streams.video:
                    raise VideoDecodeError(f"cannot read {path}: it holds no video stream.")
                self._scan(path, container, container.streams.video[0])
        except av.FFmpegError as error:
            raise _decode_error(path, self.codec, error) from error

    def _scan(self, path: Path, container: av.container.InputContainer, stream: av.VideoStream) -> None:
        self.codec = stream.codec_context.name
        frames, keys, num_packets, incomplete = [], [], 0, 0
        self.has_open_groups = False
        for packet in container.demux(stream):
            if packet.size == 0:  # the demuxer's end mark
                continue
            num_packets += 1
            if packet.is_corrupt:
                incomplete += 1
            elif not packet.is_discard:
                timestamp = packet.dts if packet.pts is None else packet.pts
                if timestamp is None:
                    raise VideoDecodeError(
                        f"cannot index {path} ({self.codec}): its frames carry no times; rewrap it as mp4."
                    )
                frames.append(timestamp)
                if packet.is_keyframe:
                    keys.append((timestamp, timestamp if packet.dts is None else packet.dts))
                elif keys and timestamp < keys[-1][0]:
                    self.has_open_groups = True
        # A fragmented file declares no length: a killed recording is whole up to its last complete frame. An mp4's own
        # count is exact, that of other containers is a hint.
        missing = num_packets < stream.frames and "mp4" in container.format.name
        if missing or (stream.frames and incomplete):
            raise VideoDecodeError(
                f"cannot read {path} ({self.codec}): it is cut short, "
                f"{num_packets - incomplete} of {stream.frames} frames are there."
            )
        if not frames or not keys:
            raise VideoDecodeError(f"cannot read {path} ({self.codec}): it holds no complete frame.")
        keys.sort()
        self.timestamps = np.unique(np.array(frames, np.int64))
        self.key_timestamps = np.array([pts for pts, _ in keys], np.int64)
        self.key_decode_timestamps = np.array([dts for _, dts in keys], np.int64)
        self.height, self.width = stream.height, stream.width
        self.fps = stream.average_rate or stream.guessed_rate or Fraction(0)


class _PyAVBackend:
    """Seeks to the key frame before the wanted frame and decodes forward; goes on forward where that is enough."""

    def __init__(self, path: Path, index: _Index) -> None:
        self._path, self._index = path, index
        try:
            self._container = av.open(str(path))
        except av.FFmpegError as error:
            raise _decode_error(path, index.codec, error) from error
        self._stream = self._container.streams.video[0]
        # Frames are rarely cut into slices, which is all that threads could share; and where the parent of a forked
        # process had loaded decord, a decoder with threads hangs.
        self._stream.codec_context.thread_count = 1
        self._decoded: Iterator[av.VideoFrame] | None = None
        self._timestamp = -1  # of the frame decoded last

    def read(self, indices: Sequence[int]) -> np.ndarray:
        frames = np.empty((len(indices), self._index.height, self._index.width, 3), np.uint8)
        try:
            for row, index in enumerate(indices):
                # Else each conversion starts threads of its own, which takes longer than a small frame.
                frames[row] = self._frame(index).to_ndarray(format="rgb24", threads=1)
        except av.FFmpegError as error:
            self._decoded = None
            raise _decode_error(self._path, self._index.codec, error) from error
        return frames

    def close(self) -> None:
        self._decoded = None
        self._container.close()

    def _frame(self, index: int) -> av.VideoFrame:
        target = int(self._index.timestamps[index])
        key = max(int(np.searchsorted(self._index.key_timestamps, target, side="right")) - 1, 0)
        can_continue = self._decoded is not None and self._timestamp < target
        if not (can_continue and self._timestamp >= self._index.key_timestamps[key]):
            if not (can_continue and index and self._timestamp == self._index.timestamps[index - 1]):
                self._seek(key)
        while True:
            frame = self._decode_until(target)
            if frame is not None:
                return frame
            # The container put us after the frame, or the key frame could not be decoded from: start one earlier.
            if key == 0:
                self._decoded = None
                raise VideoDecodeError(
                    f"cannot decode frame {index} of {self._path} ({self._index.codec}): it is damaged or missing."
                )
            key -= 1
            self._seek(key)

    def _seek(self, key: int) -> None:
        self._container.seek(int(self._index.key_decode_timestamps[key]), stream=self._stream)
        self._decoded = self._container.decode(self._stream)

    def _decode_until(self, target: int) -> av.VideoFrame | None:
        for frame in self._decoded:
            timestamp = frame.dts if frame.pts is None else frame.pts
            if timestamp < target:
                continue
            self._timestamp = timestamp
            return frame if timestamp == target and not frame.is_corrupt else None
        return None


class _DecordBackend:
    """Reads through `decord.VideoReader` (decord2 or the original package)."""

    def __init__(self, path: Path, index: _Index) -> None:
        self._path, self._index = path, index
        if index.has_open_groups:
            raise VideoDecodeError(
                f"decord counts frames wrongly in {path} ({index.codec}), whose groups of pictures are open; "
                "use backend='pyav'."
            )
        decord = importlib.import_module("decord")
        try:
            self._reader: Any = decord.VideoReader(str(path), num_threads=1)
        except RuntimeError as error:  # decord.DECORDError derives from it
            raise _decode_error(path, index.codec, error) from error
        if len(self._reader) != len(index.timestamps):
            raise VideoDecodeError(
                f"decord finds {len(self._reader)} frames in {path} ({index.codec}) instead of "
                f"{len(index.timestamps)}; use backend='pyav'."
            )

    def read(self, indices: Sequence[int]) -> np.ndarray:
        try:
            frames = self._reader.get_batch(indices).asnumpy()
            # Otherwise decord's thread decodes ahead without bound.
            self._reader.seek(0)
        except RuntimeError as error:
            raise _decode_error(self._path, self._index.codec, error) from error
        return frames

    def close(self) -> None:
        self._reader = None


_BACKENDS: dict[str, type[_Backend]] = {"pyav": _PyAVBackend, "decord": _DecordBackend}


# Decoders own threads, which a forked process does not get: freeing an inherited decoder there waits for them forever.
# So a child keeps what it inherits, and its readers open the file anew.
_open_backends: weakref.WeakSet[_Backend] = weakref.WeakSet()
_inherited_backends: list[_Backend] = []
_forked_after_decord = False


def _after_fork() -> None:
    global _forked_after_decord
    _inherited_backends.extend(_open_backends)
    _forked_after_decord = "decord" in sys.modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def usable_backends() -> dict[str, str | None]:
    """Returns each backend's name with None if it can be used, else the reason why not and what to install."""
    backends: dict[str, str | None] = {"pyav": None}
    try:
        importlib.import_module("decord")
        backends["decord"] = None
    except (ImportError, OSError) as error:  # OSError: its shared libraries cannot be loaded
        backends["decord"] = f"{error}; install decord2 (pip install 'vidgen[video]')"
    return backends


def _select_backend(name: str) -> str:
    if name not in ("auto", *_BACKENDS):
        raise VidgenError(f"backend={name!r} is unknown: {suggestion(name, ('auto', *_BACKENDS))}.")
    if name in ("auto", "pyav"):
        return "pyav"
    reason = usable_backends()[name]
    if reason is not None:
        raise VidgenError(f"backend={name!r} cannot be used: {reason}; or use backend='pyav'.")
    return name


def _decode_error(path: Path, codec: str, error: Exception) -> VideoDecodeError:
    lines = str(error).strip().splitlines()
    return VideoDecodeError(f"cannot decode {path} ({codec}): {lines[0] if lines else type(error).__name__}")
