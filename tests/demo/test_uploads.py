"""Uploads: what is too large, too long or of another kind is refused before it is decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import save

from vidgen.data import VideoWriter
from vidgen.demo import uploads
from vidgen.demo.uploads import UploadError, UploadLimits, fit, is_video, read_picture, read_session, read_video
from vidgen.pipelines import GenerationSession

LIMITS = UploadLimits(megabytes=0.2, side=128, seconds=1.0, frames=30)


@pytest.fixture
def video_file(tmp_path: Path) -> Path:
    with VideoWriter(tmp_path / "clip.mp4", fps=10) as writer:
        writer.append(np.zeros((10, 32, 48, 3), np.uint8))
    return tmp_path / "clip.mp4"


def test_a_picture_is_read_upright_in_rgb(tmp_path: Path) -> None:
    picture = PIL.Image.new("L", (20, 10))
    picture.getexif()[0x0112] = 6  # shown turned by a quarter
    picture.save(tmp_path / "a.jpg", exif=picture.getexif())
    read = read_picture(tmp_path / "a.jpg", LIMITS)
    assert (read.mode, read.size) == ("RGB", (10, 20))
    assert fit(read, 8, 16).shape == (8, 16, 3)


def test_a_picture_with_too_many_pixels_is_refused_undecoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 20000 x 20000 black pixels: a few hundred kilobytes that would become more than a gigabyte.
    path = tmp_path / "bomb.png"
    PIL.Image.MAX_IMAGE_PIXELS, limit = None, PIL.Image.MAX_IMAGE_PIXELS
    try:
        PIL.Image.new("1", (20000, 20000)).save(path)
    finally:
        PIL.Image.MAX_IMAGE_PIXELS = limit
    monkeypatch.setattr(PIL.Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(UploadError):
        read_picture(path, UploadLimits())
    PIL.Image.new("L", (129, 20)).save(path)
    with pytest.raises(UploadError, match="129 x 20 pixels; allowed: 128"):
        read_picture(path, LIMITS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("text.png", b"no picture"),
        ("empty.png", b""),
        ("vector.png", b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        ("script.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n"),
    ],
)
def test_what_is_no_picture_is_refused_whatever_its_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UploadError, match="can't be read as a picture") as error:
        read_picture(tmp_path / name, LIMITS)
    assert str(tmp_path) not in str(error.value)


def test_a_picture_cut_short_is_refused(tmp_path: Path, picture_file: Path) -> None:
    picture_file.write_bytes(picture_file.read_bytes()[:1000])
    with pytest.raises(UploadError, match="can't be read"):
        read_picture(picture_file, LIMITS)


def test_a_large_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(bytes(300_000))
    monkeypatch.setattr(PIL.Image, "open", lambda *_, **__: pytest.fail("opened"))
    for read in (read_picture, read_video):
        with pytest.raises(UploadError, match="0.3 MB; allowed: 0.2 MB"):
            read(path, LIMITS)


def test_a_video_within_the_limits_is_read(video_file: Path, picture_file: Path) -> None:
    assert is_video(video_file) and not is_video(picture_file)
    assert read_video(video_file, LIMITS).shape == (10, 32, 48, 3)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"seconds": 0.9}, "10 frames, 1.0 s; allowed: 1000 frames and 0.9 s"),
        ({"frames": 9}, "10 frames"),
        ({"side": 40}, "48 x 32 pixels"),
    ],
)
def test_a_video_beyond_a_limit_is_refused_undecoded(
    video_file: Path, limits: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads.VideoReader, "get_batch", lambda *_: pytest.fail("decoded"))
    with pytest.raises(UploadError, match=message):
        read_video(video_file, UploadLimits(**limits))


@pytest.mark.parametrize(
    "content", [b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"]
)
def test_a_playlist_never_reaches_the_demuxer(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # Demuxers follow such files to others of this machine.
    path = tmp_path / "list.mp4"
    path.write_bytes(content)
    monkeypatch.setattr(uploads, "VideoReader", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(UploadError, match="no video"):
        read_video(path, LIMITS)


def test_a_damaged_video_is_refused_without_a_path(tmp_path: Path, video_file: Path) -> None:
    video_file.write_bytes(video_file.read_bytes()[:200])
    with pytest.raises(UploadError, match="damaged") as error:
        read_video(video_file, LIMITS)
    assert str(tmp_path) not in str(error.value)


@pytest.fixture(scope="module")
def session_file(pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session after its first chunk."""
    path = tmp_path_factory.mktemp("session") / "s.session.safetensors"
    session = pipe.session("a meadow", seconds=1, generator=torch.Generator().manual_seed(0))
    session.step()
    session.save(path)
    return path


def test_a_session_of_this_model_is_read(session_file: Path, pipe: Any) -> None:
    assert read_session(session_file, UploadLimits(), pipe).chunk_index == 1


def test_files_that_are_no_sessions_of_this_model_are_refused_without_a_path(
    session_file: Path, pipe: Any, make_pipeline: Any, tmp_path: Path
) -> None:
    content = session_file.read_bytes()
    other = make_pipeline(seed=1, default_height=32, default_width=48, max_sequence_length=64)
    files = {
        "damaged": (content[:-100], pipe),
        "not a safetensors file": (b"no session", pipe),
        "not a saved session": (save({"a": torch.zeros(1)}), pipe),
        "another transformer": (content, other),
    }
    for number, (message, (written, model)) in enumerate(files.items()):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(written)
        with pytest.raises(UploadError, match=message) as error:
            read_session(path, UploadLimits(), model)
        assert str(tmp_path) not in str(error.value)


def test_a_large_session_is_refused_unread(session_file: Path, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationSession, "load", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(UploadError, match="MB; allowed: 0.001 MB"):
        read_session(session_file, UploadLimits(megabytes=0.001), pipe)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"prompt": ["a meadow", "a desert"], "seeds": 2}, "allowed: one video"),
        ({"height": 64}, "48 x 64 pixels; allowed: 48 x 32"),
        ({"num_inference_steps": 101}, "101 steps a chunk; allowed: 100"),
    ],
)
def test_a_session_that_asks_for_too_much_is_refused(request_: dict, message: str, pipe: Any, tmp_path: Path) -> None:
    options = dict(request_)
    generators = [torch.Generator().manual_seed(seed) for seed in range(options.pop("seeds", 1))]
    session = pipe.session(options.pop("prompt", "a meadow"), seconds=1, generator=generators, **options)
    session.save(tmp_path / "s.safetensors")
    with pytest.raises(UploadError, match=message):
        read_session(tmp_path / "s.safetensors", UploadLimits(), pipe)
