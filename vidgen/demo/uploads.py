"""Files from visitors, checked before anything is decoded: kind, bytes, resolution, length."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import PIL.ImageOps

from vidgen.data import VideoReader
from vidgen.runtime.errors import VidgenError

if TYPE_CHECKING:
    from vidgen.pipelines import ContextForcingPipeline, GenerationSession

PICTURE_FORMATS = ("PNG", "JPEG", "WEBP")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
VIDEO_SUFFIXES = (".mp4", ".mov", ".webm", ".mkv")
SESSION_SUFFIX = ".safetensors"
# What a session may ask for, in denoising steps of a chunk.
MAX_STEPS = 100
# Only these containers are handed to the demuxer: playlists and scripts could name other files of this machine.
_EBML, _FTYP = b"\x1a\x45\xdf\xa3", b"ftyp"


class UploadError(VidgenError):
    """An uploaded file is none that the demo takes."""


@dataclass(frozen=True)
class UploadLimits:
    """What is taken.

    Attributes:
        megabytes: largest file, in 10^6 bytes.
        side: largest height and width, pixels.
        seconds: longest video.
        frames: most frames of a video.
    """

    megabytes: float = 16.0
    side: int = 4096
    seconds: float = 30.0
    frames: int = 1000


def is_video(path: str | os.PathLike) -> bool:
    """Whether a file begins like a video of a kind that is taken."""
    with Path(path).open("rb") as file:
        head = file.read(12)
    return head.startswith(_EBML) or head[4:8] == _FTYP


def read_picture(path: str | os.PathLike, limits: UploadLimits) -> PIL.Image.Image:
    """A picture, upright and in RGB.

    Raises:
        UploadError: too large, or no picture.
    """
    _check_bytes(path, limits)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # the limit here is lower
            with PIL.Image.open(path, formats=PICTURE_FORMATS) as picture:
                _check_size(picture.height, picture.width, limits)
                return PIL.ImageOps.exif_transpose(picture).convert("RGB")
    except UploadError:
        raise
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        # Pillow reports damage in many ways, and with paths of this machine in the text.
        raise UploadError(
            f"This file can't be read as a picture; allowed: whole {', '.join(PICTURE_FORMATS)} files."
        ) from error


def read_video(path: str | os.PathLike, limits: UploadLimits) -> np.ndarray:
    """A video's frames, uint8 `(frames, height, width, 3)`.

    Raises:
        UploadError: too large or too long, or no video.
    """
    _check_bytes(path, limits)
    if not is_video(path):
        raise UploadError(f"This file is no video; allowed: {', '.join(VIDEO_SUFFIXES)}.")
    try:
        with VideoReader(path, backend="pyav") as reader:  # reads headers and the index, no picture
            _check_size(reader.height, reader.width, limits)
            seconds = len(reader) / reader.fps
            if seconds > limits.seconds or len(reader) > limits.frames:
                raise UploadError(
                    f"The video has {len(reader)} frames, {seconds:.1f} s; allowed: {limits.frames} frames and "
                    f"{limits.seconds:g} s. Cut it first."
                )
            return reader[:]
    except UploadError:
        raise
    except (VidgenError, OSError, ZeroDivisionError) as error:
        raise UploadError("The video is damaged, or in a format that can't be decoded here.") from error


def read_session(
    path: str | os.PathLike, limits: UploadLimits, pipe: ContextForcingPipeline, **callbacks: Any
) -> GenerationSession:
    """A saved session that the demo can go on with: one video, of its model's size, in pixels.

    Args:
        path: the file.
        limits: of which bytes matter.
        pipe: the models that the session has to be of.
        callbacks: see [`~vidgen.pipelines.GenerationSession.load`].

    Raises:
        UploadError: too large, no session, damaged, of another model, or one that asks for more than the demo gives.
    """
    from vidgen.pipelines import GenerationSession

    _check_bytes(path, limits)
    try:
        session = GenerationSession.load(path, pipe, **callbacks)
    except VidgenError as error:
        raise UploadError(str(error).replace(str(path), "This file")) from error
    settings = session.settings
    largest = (pipe.config.default_height, pipe.config.default_width)
    if session.batch_size != 1 or not settings.decode or session.noise is not None:
        raise UploadError(
            "This session makes several videos, latents, or begins with noise of its own; allowed: one video."
        )
    if settings.height > largest[0] or settings.width > largest[1]:
        raise UploadError(
            f"This session makes {settings.width} x {settings.height} pixels; allowed: {largest[1]} x {largest[0]}."
        )
    if settings.num_inference_steps > MAX_STEPS:
        raise UploadError(f"This session takes {settings.num_inference_steps} steps a chunk; allowed: {MAX_STEPS}.")
    return session


def fit(picture: PIL.Image.Image, height: int, width: int) -> np.ndarray:
    """A picture cropped about its middle and scaled to uint8 `(height, width, 3)`."""
    return np.array(PIL.ImageOps.fit(picture, (width, height), PIL.Image.Resampling.LANCZOS))


def _check_bytes(path: str | os.PathLike, limits: UploadLimits) -> None:
    megabytes = os.stat(path).st_size / 1e6
    if megabytes > limits.megabytes:
        raise UploadError(f"The file has {megabytes:.1f} MB; allowed: {limits.megabytes:g} MB.")


def _check_size(height: int, width: int, limits: UploadLimits) -> None:
    if max(height, width) > limits.side:
        raise UploadError(f"It is {width} x {height} pixels; allowed: {limits.side} on a side.")
    if min(height, width) < 8:
        raise UploadError(f"It is {width} x {height} pixels; allowed: at least 8 on a side.")
