"""Incremental video writing: what was appended survives a kill, and a stopped run continues where it was.

Every `append` is encoded as a closed group of pictures and added to `<stem>.partial.mp4` as complete mp4 fragments, so
the partial file is playable at any moment and holds all appended frames. Resuming cuts the partial file at an append
boundary and goes on; frames already there are not encoded again. `close` rewrites the packets, without re-encoding, as
a regular mp4 with its index in front and renames it to the final name.

Streams have no B-frames: with them a fragment's decoding times would reach back before its first frame, and fragments
made by separate encoders could not be joined.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import av
import numpy as np
from PIL import Image

from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.errors import VidgenError, suggestion

try:
    import fcntl
except ImportError:  # Windows: two runs that write one file are not told apart there
    fcntl = None


@contextlib.contextmanager
def _same_scheduling() -> Iterator[None]:
    """Gives the calling thread its scheduling back.

    The AV1 encoder makes it a real-time one where it may (as root), and the thread would stay so and starve others.
    """
    if not hasattr(os, "sched_getscheduler"):  # Linux only, as what the encoder does
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != policy:
            os.sched_setscheduler(0, policy, parameters)


class VideoWriteError(VidgenError):
    """A video cannot be written: wrong frames or settings, an unusable folder, or a full disk."""


class _Codec(NamedTuple):
    encoder: str
    max_crf: int
    default_crf: int
    options: dict[str, str]


CODECS = {
    "h264": _Codec("libx264", 51, 17, {"bf": "0"}),
    "hevc": _Codec("libx265", 51, 20, {"bf": "0", "tag": "hvc1", "x265-params": "log-level=error:bframes=0"}),
    "vp9": _Codec("libvpx-vp9", 63, 24, {"b": "0", "row-mt": "1", "cpu-used": "4"}),
    "av1": _Codec("libsvtav1", 63, 28, {"preset": "8", "svtav1-params": "pred-struct=1"}),
}

# Below this much free space a video is not started.
MIN_FREE_BYTES = 16 * 2**20

# BT.601 limited range, tagged: it is also what readers that ignore the tags assume.
_SMPTE170M = 6
_LIMITED_RANGE = 1


class VideoClaim:
    """The right to write one video, held until it is released or the process ends.

    Made before anything expensive, it lets a run whose video cannot be written end at once. It is a lock on the
    video's partial file, whose content it leaves as it is.

    Args:
        path: Name of the finished file, ending in `.mp4`; its folder is made if there is none.

    Raises:
        VideoWriteError: If the name is unfit, the folder cannot be written, the disk is full, or another run has
            claimed the same video.

    Example:
        ```py
        with VideoClaim("minute.mp4") as claim:
            pipeline = load_pipeline()
            with VideoWriter(claim, fps=pipeline.config.fps) as writer:
                ...
        ```
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        if self.path.suffix.lower() != ".mp4":
            raise VideoWriteError(f"path={str(path)!r} must end in .mp4, for example {self.path.stem + '.mp4'!r}.")
        if self.path.is_dir():
            raise VideoWriteError(f"{self.path} is a folder; give the name of a file in it.")
        self.partial_path = self.path.with_name(f"{self.path.stem}.partial.mp4")
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file: BinaryIO | None = self._open_locked()
        except OSError as error:
            raise VideoWriteError(
                f"cannot write in {folder}: {error.strerror}; choose a folder you may write to."
            ) from error
        free = shutil.disk_usage(folder).free
        if free < MIN_FREE_BYTES:
            self.release()
            raise VideoWriteError(
                f"the disk of {folder} has {free / 2**20:.1f} MiB left, a video needs at least "
                f"{MIN_FREE_BYTES // 2**20} MiB; free some space or choose another folder."
            )

    def _open_locked(self) -> BinaryIO:
        while True:
            file = os.fdopen(os.open(self.partial_path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            if fcntl is None:
                return file
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.close()
                raise VideoWriteError(
                    f"another run is writing {self.partial_path}; wait for it or choose another name than {self.path}."
                ) from error
            # The run that held the name may have published and removed it since it was opened here.
            if self.partial_path.exists() and os.path.samestat(os.fstat(file.fileno()), self.partial_path.stat()):
                return file
            file.close()

    def release(self, remove: bool = False) -> None:
        """Gives the name back; a second call does nothing.

        Args:
            remove: Whether to remove the partial file; one without content is removed in any case.
        """
        if self.file is None:
            return
        # Removed while it is locked: afterwards it may be another run's.
        if remove or os.fstat(self.file.fileno()).st_size == 0:
            self.partial_path.unlink(missing_ok=True)
        self.file.close()
        self.file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class VideoWriter:
    """Writes an mp4 file piece by piece; it appears under its name when `close` finds it whole.

    As a context manager it publishes the file when the block ends normally. If the block raises, the partial file
    stays and can be played, or continued with `resume_frames`.

    Args:
        path: Name of the finished file, ending in `.mp4`, or a claim of it, which the writer takes over. An existing
            file is replaced at the end, not before.
        fps: Frames per second.
        height: Height of the appended frames in pixels; taken from the first append if None.
        width: Width of the appended frames in pixels; taken from the first append if None.
        codec: One of `h264`, `hevc`, `vp9`, `av1`.
        crf: Constant quality, lower is better; a visually clean default for the codec if None.
        scale: Integer factor by which frames are enlarged (Lanczos), so that tiny videos can be watched.
        resume_frames: Continue an earlier run's partial file after this many frames; a number of frames at which an
            append ended. 0 starts anew.

    Raises:
        VideoWriteError: If a setting is out of range, the folder cannot be written, the disk is full, another run is
            writing the same file, or there is nothing fitting to resume; all found before any frame is made.

    Example:
        ```py
        with VideoWriter("minute.mp4", fps=12, scale=4) as writer:
            for frames in pipeline.stream(prompt):  # uint8 (frames, height, width, 3)
                writer.append(frames)
        ```
    """

    def __init__(
        self,
        path: str | os.PathLike | VideoClaim,
        fps: float | Fraction,
        height: int | None = None,
        width: int | None = None,
        codec: str = "h264",
        crf: int | None = None,
        scale: int = 1,
        resume_frames: int = 0,
    ) -> None:
        if not (math.isfinite(fps) and 0 < fps <= 1000):
            raise VideoWriteError(f"fps={fps} must be above 0 and at most 1000.")
        self.fps = Fraction(fps).limit_denominator(1001)
        if codec not in CODECS:
            raise VideoWriteError(f"codec={codec!r} is unknown: {suggestion(codec, usable_codecs())}.")
        if codec not in usable_codecs():
            raise VideoWriteError(
                f"codec={codec!r} needs {CODECS[codec].encoder}, which this PyAV was built without; "
                f"allowed: {', '.join(usable_codecs())}."
            )
        self.codec = codec
        max_crf = CODECS[codec].max_crf
        self.crf = CODECS[codec].default_crf if crf is None else crf
        if not 0 <= self.crf <= max_crf:
            raise VideoWriteError(f"crf={crf} must be from 0 to {max_crf} for {codec}.")
        if not (isinstance(scale, int) and 1 <= scale <= 64):
            raise VideoWriteError(f"scale={scale!r} must be an integer from 1 to 64.")
        self.scale = scale
        if resume_frames < 0:
            raise VideoWriteError(f"resume_frames={resume_frames} must not be negative.")
        if (height is None) != (width is None):
            raise VideoWriteError(f"height={height} and width={width} must be given together or both left out.")
        self._size: tuple[int, int] | None = None
        if height is not None:
            self._set_size(height, width)

        self._num_frames = 0
        self._num_fragments = 0
        self._claim = path if isinstance(path, VideoClaim) else VideoClaim(path)
        self.path, self.partial_path = self._claim.path, self._claim.partial_path
        if self._claim.file is None:
            raise VideoWriteError(f"the claim of {self.path} was released; make a new one.")
        self._file: BinaryIO | None = self._claim.file
        try:
            if resume_frames:
                self._resume(resume_frames)
            else:
                self._file.truncate(0)
        except BaseException:
            self._release()
            raise

    @property
    def num_frames(self) -> int:
        """Frames in the file so far."""
        return self._num_frames

    def append(self, frames: np.ndarray) -> None:
        """Encodes frames and puts them on disk; once it returns they survive a kill.

        Each call starts a new group of pictures: append about a second at a time, not single frames.

        Args:
            frames: uint8 array (frames, height, width, 3), RGB.

        Raises:
            VideoWriteError: If the array does not fit or the disk is full. The file then ends after the last append
                that succeeded.
        """
        if self._file is None:
            raise VideoWriteError(f"{self.path} is closed; nothing can be appended.")
        frames = np.asarray(frames)
        if frames.dtype != np.uint8:
            raise VideoWriteError(
                f"frames are {frames.dtype}; expected uint8 from 0 to 255 (for floats in [0, 1]: (x * 255).round())."
            )
        if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
            raise VideoWriteError(f"frames have shape {frames.shape}; expected (frames, height, width, 3), not empty.")
        if self._size is None:
            self._set_size(*frames.shape[1:3])
        if frames.shape[1:3] != self._size:
            raise VideoWriteError(
                f"frames are {frames.shape[1]}x{frames.shape[2]}, but this video is {self._size[0]}x{self._size[1]}."
            )
        header, fragments = self._encode(frames)
        start = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(fragments if start else header + fragments)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            # Half a fragment would hide what is appended after it.
            os.ftruncate(self._file.fileno(), start)
            raise VideoWriteError(
                f"cannot write {self.partial_path}: {error.strerror}; {self._num_frames} frames are safe in it, "
                f"continue with resume_frames={self._num_frames}."
            ) from error
        self._num_frames += len(frames)
        self._num_fragments += sum(1 for _ in _iterate_fragments(io.BytesIO(fragments)))

    def close(self) -> Path:
        """Publishes the video under its final name and removes the partial file.

        Returns:
            The path of the finished file.

        Raises:
            VideoWriteError: If no frame was appended, or the file cannot be written; the partial file then stays.
        """
        if self._file is None:
            return self.path
        if not self._num_frames:
            self._release()
            raise VideoWriteError(f"{self.path} was not written: no frames were appended.")
        whole = False
        try:
            with atomic_write(self.path) as temporary:
                num_packets = _remux(self.partial_path, temporary)
                if num_packets != self._num_frames:
                    raise VideoWriteError(
                        f"{self.partial_path} holds {num_packets} frames instead of {self._num_frames}: "
                        "something else changed it."
                    )
            whole = True
        except (OSError, av.FFmpegError) as error:
            raise VideoWriteError(f"cannot write {self.path}: {error}; {self.partial_path} is kept.") from error
        finally:
            self._release(remove=whole)
        return self.path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def _set_size(self, height: int, width: int) -> None:
        for name, size in (("height", height), ("width", width)):
            if size < 1 or (size * self.scale) % 2:
                nearest = size + 1 if size > 0 else 2
                raise VideoWriteError(
                    f"{name}={size} at scale={self.scale} is odd; video stores color at half resolution and needs "
                    f"even sizes: use {name}={nearest}" + (f" or scale={self.scale + 1}." if size > 0 else ".")
                )
        self._size = (int(height), int(width))

    def _release(self, remove: bool = False) -> None:
        self._claim.release(remove)
        self._file = None

    def _resume(self, resume_frames: int) -> None:
        if self._file.seek(0, os.SEEK_END) == 0:  # made by the claim
            raise VideoWriteError(f"there is no {self.partial_path} to resume; use resume_frames=0.")
        boundaries, end = [0], 0
        for end_offset, num_samples in _iterate_fragments(self._file):
            boundaries.append(boundaries[-1] + num_samples)
            self._num_fragments += 1
            if boundaries[-1] == resume_frames:
                end = end_offset
                break
        if not end:
            nearest = min(boundaries, key=lambda boundary: (abs(boundary - resume_frames), boundary))
            raise VideoWriteError(
                f"{self.partial_path} cannot be resumed at resume_frames={resume_frames}; nearest place: {nearest}."
            )
        try:
            with av.open(str(self.partial_path)) as container:
                stream = container.streams.video[0]
                height, width = stream.height / self.scale, stream.width / self.scale
        except (av.FFmpegError, IndexError) as error:
            raise VideoWriteError(f"{self.partial_path} is not a video that can be resumed: {error}.") from error
        if self._size is None and height.is_integer() and width.is_integer():
            self._set_size(int(height), int(width))
        # The header holds codec, size, time base and the decoder's parameter sets: if a new encoder writes the same
        # bytes, fragments of old and new decode alike.
        self._file.seek(0)
        header = None if self._size is None else self._encode(None)[0]
        if header is None or self._file.read(len(header)) != header:
            raise VideoWriteError(
                f"{self.partial_path} was made with other settings (codec, size, fps, crf or scale) or by another "
                "version of the encoder; resume with the settings of the first run, or use resume_frames=0."
            )
        self._file.truncate(end)
        self._num_frames = resume_frames

    def _encode(self, frames: np.ndarray | None) -> tuple[bytes, bytes]:
        """Encodes frames with a fresh encoder as (header boxes, fragment boxes); None gives the header alone."""
        codec = CODECS[self.codec]
        if self.codec == "av1":
            os.environ.setdefault("SVT_LOG", "1")  # errors only; SVT-AV1 has no other way to be quiet
        buffer = io.BytesIO()
        container_options = {
            "movflags": "frag_keyframe+empty_moov+default_base_moof+frag_discont+skip_trailer",
            "fragment_index": str(self._num_fragments + 1),
            "avoid_negative_ts": "disabled",  # else every fragment is moved to time 0
            "fflags": "bitexact",  # no version strings: a resumed run compares headers
        }
        try:
            with (
                _same_scheduling(),
                av.open(buffer, "w", format="mp4", container_options=container_options) as container,
            ):
                stream = container.add_stream(
                    codec.encoder, rate=self.fps, options={**codec.options, "crf": str(self.crf)}
                )
                stream.height, stream.width = (size * self.scale for size in self._size)
                stream.pix_fmt = "yuv420p"
                context = stream.codec_context
                context.time_base = 1 / self.fps
                context.colorspace = context.color_primaries = context.color_trc = _SMPTE170M
                context.color_range = _LIMITED_RANGE
                # Settings that the stream itself does not tell, for a resumed run to compare.
                container.metadata["comment"] = f"vidgen scale={self.scale} crf={self.crf}"
                container.start_encoding()
                for packet in () if frames is None else self._packets(stream, frames):
                    packet.duration = 1  # libvpx leaves it out
                    container.mux(packet)
        except av.FFmpegError as error:
            raise VideoWriteError(
                f"{codec.encoder} cannot encode {self._size[0] * self.scale}x{self._size[1] * self.scale} at "
                f"{float(self.fps):g} frames per second: {error}."
            ) from error
        data = buffer.getvalue()
        fragments = (box.start for box in _iterate_boxes(buffer, 0, len(data)) if box.kind == b"moof")
        header_end = next(fragments, len(data))
        return data[:header_end], data[header_end:]

    def _packets(self, stream: av.VideoStream, frames: np.ndarray) -> Iterator[av.Packet]:
        for index, image in enumerate(frames):
            frame = self._video_frame(image)
            frame.pts = self._num_frames + index
            frame.time_base = 1 / self.fps
            yield from stream.encode(frame)
        yield from stream.encode()

    def _video_frame(self, image: np.ndarray) -> av.VideoFrame:
        if self.scale > 1:
            height, width = self._size
            picture = Image.fromarray(np.ascontiguousarray(image))
            image = np.asarray(picture.resize((width * self.scale, height * self.scale), Image.Resampling.LANCZOS))
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
        return frame.reformat(
            format="yuv420p", dst_colorspace="ITU601", dst_color_range="MPEG", interpolation="BICUBIC"
        )


def usable_codecs() -> list[str]:
    """Returns the names of the codecs this PyAV can encode."""
    return [name for name, codec in CODECS.items() if codec.encoder in av.codecs_available]


def _remux(source: Path, target: Path) -> int:
    """Copies packets into an mp4 with its index in front; returns their number."""
    num_packets = 0
    with (
        av.open(str(source)) as reading,
        av.open(str(target), "w", format="mp4", container_options={"movflags": "faststart"}) as writing,
    ):
        stream = reading.streams.video[0]
        copy = writing.add_stream_from_template(stream, opaque=True)
        for packet in reading.demux(stream):
            if packet.dts is None:  # the demuxer's end mark
                continue
            packet.stream = copy
            writing.mux(packet)
            num_packets += 1
    return num_packets


class _Box(NamedTuple):
    kind: bytes
    start: int
    content: int
    end: int


def _iterate_boxes(file: BinaryIO, start: int, end: int) -> Iterator[_Box]:
    """Yields the complete mp4 boxes between two offsets of a file."""
    while start + 8 <= end:
        file.seek(start)
        head = file.read(16)
        size, content = int.from_bytes(head[:4], "big"), start + 8
        if size == 1:
            size, content = int.from_bytes(head[8:16], "big"), start + 16
        if size < content - start or start + size > end:
            return
        yield _Box(head[4:8], start, content, start + size)
        start += size


def _iterate_fragments(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yields (offset of its end, number of frames) of each complete fragment: a `moof` box and the `mdat` after it."""
    num_samples = 0
    for box in _iterate_boxes(file, 0, file.seek(0, os.SEEK_END)):
        if box.kind == b"moof":
            num_samples = 0
            for track in _iterate_boxes(file, box.content, box.end):
                if track.kind != b"traf":
                    continue
                for run in _iterate_boxes(file, track.content, track.end):
                    if run.kind == b"trun":
                        file.seek(run.content + 4)  # after version and flags
                        num_samples += int.from_bytes(file.read(4), "big")
        elif box.kind == b"mdat":
            yield box.end, num_samples
