"""Reading and writing video files: exact frames from any backend, and files that survive kills and full disks."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from vidgen.data import VideoDecodeError, VideoReader, VideoWriteError, VideoWriter, usable_backends, video_writer
from vidgen.data.video_writer import VideoClaim
from vidgen.runtime.errors import VidgenError

HEIGHT, WIDTH, BITS = 64, 112, 12
BACKENDS = [
    pytest.param(name, marks=() if reason is None else pytest.mark.skip(reason=reason))
    for name, reason in usable_backends().items()
]


def barcode_frames(start: int, stop: int) -> np.ndarray:
    """Frames (stop - start, HEIGHT, WIDTH, 3) whose top rows spell the frame's number in black and white columns."""
    frames = np.full((stop - start, HEIGHT, WIDTH, 3), (60, 140, 200), np.uint8)
    for row, number in enumerate(range(start, stop)):
        for bit in range(BITS):
            frames[row, :16, bit * 9 : (bit + 1) * 9] = 255 * (number >> bit & 1)
        frames[row, 32:48, number % 96 : number % 96 + 16] = (220, 60, 30)
    return frames


def numbers(frames: np.ndarray) -> list[int]:
    """Reads the bar code of each frame, at any enlargement."""
    scale = frames.shape[1] // HEIGHT
    columns = frames[:, 8 * scale, [(bit * 9 + 4) * scale for bit in range(BITS)]].mean(axis=-1)
    return [sum(1 << bit for bit in range(BITS) if row[bit] > 128) for row in columns]


def encode_clip(path: Path, num_frames: int, codec: str, options: dict[str, str], gaps: bool = False) -> Path:
    """Writes a bar-code clip straight with PyAV, with any group structure; `gaps` makes the frame rate variable."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=24, options=options)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 24)
        for number, image in enumerate(barcode_frames(0, num_frames)):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = number + (number // 7 * 3 if gaps else 0)
            frame.time_base = Fraction(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


CLIPS = {
    "b_frames": ("libx264", {"g": "24", "bf": "3", "x264-params": "b-adapt=0:scenecut=0"}, False, "mp4"),
    "open_groups": (
        "libx264",
        {"g": "12", "bf": "3", "x264-params": "open-gop=1:b-adapt=0:b-pyramid=normal"},
        False,
        "mp4",
    ),
    "variable_rate": ("libx264", {"g": "16", "bf": "2"}, True, "mp4"),
    "hevc": ("libx265", {"x265-params": "log-level=error:keyint=20:bframes=3"}, False, "mp4"),
    "vp9": ("libvpx-vp9", {"g": "20", "cpu-used": "8", "lag-in-frames": "16", "auto-alt-ref": "1"}, False, "webm"),
    "matroska": ("libx264", {"g": "30", "bf": "2"}, False, "mkv"),
}


@pytest.fixture(scope="module", params=CLIPS)
def clip(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    codec, options, gaps, suffix = CLIPS[request.param]
    return encode_clip(tmp_path_factory.mktemp("clips") / f"{request.param}.{suffix}", 75, codec, options, gaps)


@pytest.fixture(scope="module")
def plain_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    codec, options, gaps, _ = CLIPS["b_frames"]
    return encode_clip(tmp_path_factory.mktemp("plain") / "plain.mp4", 75, codec, options, gaps)


@pytest.fixture(scope="module")
def large_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.mp4"
    with VideoWriter(path, fps=12, scale=8) as writer:
        for start in range(0, 96, 24):
            writer.append(barcode_frames(start, start + 24))
    return path


class TestReader:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_every_access_returns_exactly_the_frames_asked_for(self, clip: Path, backend: str) -> None:
        if backend == "decord" and clip.stem in ("open_groups", "hevc"):
            # decord returns other frames than asked for here; refusing is the only exact answer it can give.
            with pytest.raises(VideoDecodeError, match="groups of pictures are open; use backend='pyav'"):
                VideoReader(clip, backend)
            return
        reader = VideoReader(clip, backend)
        assert (len(reader), reader.height, reader.width) == (75, HEIGHT, WIDTH)
        random = np.random.default_rng(0).integers(0, 75, 25).tolist()
        assert numbers(reader.get_batch(random)) == random
        for index in [74, 0, 24, 23, 25, 1, 73]:
            assert numbers(reader[index][None]) == [index]
        assert numbers(reader[20:50:3]) == list(range(20, 50, 3))
        assert numbers(np.stack(list(reader.iterate(5, 60)))) == list(range(5, 60))
        assert numbers(reader[:]) == list(range(75))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_shapes_types_and_facts(self, plain_clip: Path, backend: str) -> None:
        with VideoReader(plain_clip, backend) as reader:
            assert reader.fps == 24
            assert reader.codec == "h264"
            assert reader[3].shape == (HEIGHT, WIDTH, 3)
            assert reader[3].dtype == np.uint8
            assert reader[5:5].shape == (0, HEIGHT, WIDTH, 3)
            assert reader.get_batch([]).shape == (0, HEIGHT, WIDTH, 3)
            np.testing.assert_array_equal(reader.get_batch([7, 2, 7]), np.stack([reader[7], reader[2], reader[7]]))

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("index", [-1, 75, 10**6, slice(-3, None), slice(0, 76), slice(70, -1)])
    def test_index_outside_the_file_is_an_error_naming_file_index_and_length(
        self, plain_clip: Path, backend: str, index: int | slice
    ) -> None:
        reader = VideoReader(plain_clip, backend)
        with pytest.raises(IndexError, match=r"plain\.mp4: frame -?\d+ does not exist in a video of 75 frames"):
            reader[index]
        if isinstance(index, int):
            with pytest.raises(IndexError, match="75 frames"):
                reader.get_batch([0, index])
        with pytest.raises(IndexError, match="75 frames"):
            next(reader.iterate(0, 76))

    def test_backends_agree_on_colors(self, plain_clip: Path) -> None:
        if usable_backends()["decord"] is not None:
            pytest.skip("decord is not installed")
        frames = [VideoReader(plain_clip, name)[::10].astype(int) for name in ("pyav", "decord")]
        assert np.abs(frames[0] - frames[1]).max() <= 3

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_missing_garbage_and_empty_files_are_named(self, tmp_path: Path, backend: str) -> None:
        garbage, empty = tmp_path / "garbage.mp4", tmp_path / "empty.mp4"
        garbage.write_bytes(np.random.default_rng(0).bytes(5000))
        empty.touch()
        for path in (garbage, empty, tmp_path / "missing.mp4", tmp_path):
            with pytest.raises(VideoDecodeError, match=path.name):
                VideoReader(path, backend)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("faststart", [True, False])
    def test_truncated_file_is_an_error_not_a_shorter_video(
        self, plain_clip: Path, tmp_path: Path, backend: str, faststart: bool
    ) -> None:
        source = plain_clip
        if faststart:  # the index is in front, so the file opens and only its end is missing
            source = tmp_path / "whole.mp4"
            video_writer._remux(plain_clip, source)
        cut = tmp_path / "cut.mp4"
        with av.open(str(source)) as container:
            # Ends exactly between two frames, so that no frame by itself looks damaged.
            between_frames = [packet.pos for packet in container.demux(video=0) if packet.size][40]
        for size in (source.stat().st_size * 2 // 3, between_frames):
            cut.write_bytes(source.read_bytes()[:size])
            with pytest.raises(VideoDecodeError, match=r"cut\.mp4 \(.*\)"):
                VideoReader(cut, backend)

    def test_damaged_frame_is_an_error(self, tmp_path: Path) -> None:
        with VideoWriter(tmp_path / "a.mp4", fps=12) as writer:
            for start in range(0, 36, 12):
                writer.append(barcode_frames(start, start + 12))
        with av.open(str(tmp_path / "a.mp4")) as container:
            packet = [packet for packet in container.demux(video=0) if packet.is_keyframe][1]
            position, size = packet.pos, packet.size
        data = bytearray((tmp_path / "a.mp4").read_bytes())
        data[position : position + size] = b"\xff" * size
        (tmp_path / "b.mp4").write_bytes(data)
        reader = VideoReader(tmp_path / "b.mp4")
        assert numbers(reader[0:12]) == list(range(12))
        with pytest.raises(VideoDecodeError, match=r"b\.mp4 \(h264\)"):
            reader[12]
        assert numbers(reader[24:36]) == list(range(24, 36))

    def test_unknown_backend_names_the_nearest(self, plain_clip: Path) -> None:
        with pytest.raises(VidgenError, match="did you mean 'decord'"):
            VideoReader(plain_clip, "decrod")

    def test_uninstalled_backend_says_what_to_install(self, plain_clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "decord", None)
        assert "decord2" in usable_backends()["decord"]
        with pytest.raises(VidgenError, match="install decord2"):
            VideoReader(plain_clip, "decord")
        assert VideoReader(plain_clip, "auto").backend == "pyav"

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_memory_stays_flat_while_reading(self, large_clip: Path, backend: str) -> None:
        # In a process of its own, which gives every freed frame back at once: here, what other tests freed would hide
        # some of the growth and add to the rest.
        script = (
            "import sys, psutil; from vidgen.data import VideoReader\n"
            "process, reader = psutil.Process(), VideoReader(*sys.argv[1:])\n"
            "print(*[process.memory_info().rss for _ in range(6) for _ in reader.iterate()])"
        )
        command = [sys.executable, "-c", script, str(large_clip), backend]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        sizes = [int(size) for size in done.stdout.split()]
        assert len(sizes) == 6 * 96
        # 480 frames go by after the first pass. PyAV must keep none of them; decord's threads add up to 50 frames to
        # their pool, sooner or later.
        frame_bytes = 8 * HEIGHT * 8 * WIDTH * 3
        assert max(sizes[96:]) - max(sizes[:96]) < {"pyav": 2, "decord": 96}[backend] * frame_bytes

    def test_reader_can_be_sent_to_a_worker(self, plain_clip: Path) -> None:
        reader = VideoReader(plain_clip)
        assert numbers(pickle.loads(pickle.dumps(reader))[30:33]) == [30, 31, 32]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_forked_worker_does_not_disturb_its_parent(self, plain_clip: Path, backend: str) -> None:
        reader = VideoReader(plain_clip, backend)
        reader[0]
        child = multiprocessing.get_context("fork").Process(target=_check_frames, args=(reader, 40, 75))
        child.start()
        assert numbers(reader[1:60]) == list(range(1, 60))
        child.join(timeout=30)
        child.kill()
        child.join()
        assert child.exitcode == 0


def _check_frames(reader: VideoReader, start: int, stop: int) -> None:
    assert VideoReader(reader.path, reader.backend).backend == "pyav"  # decord's threads don't survive a fork
    assert numbers(reader[start:stop]) == list(range(start, stop))


class TestWriter:
    @pytest.mark.parametrize("codec", ["h264", "hevc", "vp9", "av1"])
    @pytest.mark.parametrize("scale", [1, 2])
    def test_resumed_file_holds_every_frame_once_in_order(self, tmp_path: Path, codec: str, scale: int) -> None:
        if codec not in video_writer.usable_codecs():
            pytest.skip(f"this PyAV has no encoder for {codec}")
        path = tmp_path / "video.mp4"
        with pytest.raises(KeyboardInterrupt), VideoWriter(path, 12, codec=codec, scale=scale) as writer:
            for start, stop in ((0, 9), (9, 21), (21, 33)):
                writer.append(barcode_frames(start, stop))
            raise KeyboardInterrupt
        assert not path.exists()
        assert numbers(VideoReader(writer.partial_path)[:]) == list(range(33))

        with VideoWriter(path, 12, codec=codec, scale=scale, resume_frames=21) as writer:
            assert writer.num_frames == 21
            for start, stop in ((21, 33), (33, 45)):
                writer.append(barcode_frames(start, stop))
        reader = VideoReader(path)
        assert (reader.height, reader.width, reader.fps) == (HEIGHT * scale, WIDTH * scale, 12)
        assert numbers(reader[:]) == list(range(45))
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            assert stream.duration * stream.time_base == Fraction(45, 12)
            assert stream.start_time == 0
        assert sorted(file.name for file in tmp_path.iterdir()) == ["video.mp4"]

    def test_resumed_file_equals_the_uninterrupted_one(self, tmp_path: Path) -> None:
        for name, runs in (("whole.mp4", [(0, 48)]), ("resumed.mp4", [(0, 24), (24, 48)])):
            for first, last in runs:
                writer = VideoWriter(tmp_path / name, 12, resume_frames=first)
                for start in range(first, last, 12):
                    writer.append(barcode_frames(start, start + 12))
                if last < 48:
                    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
            writer.close()
        assert (tmp_path / "whole.mp4").read_bytes() == (tmp_path / "resumed.mp4").read_bytes()

    def test_killed_run_leaves_a_playable_file_with_all_that_was_appended(self, tmp_path: Path) -> None:
        script = (
            "import os, signal, sys; sys.path.insert(0, sys.argv[2]); from test_video_io import barcode_frames\n"
            "from vidgen.data import VideoWriter\n"
            "writer = VideoWriter(sys.argv[1], fps=12)\n"
            "for start in (0, 12, 24): writer.append(barcode_frames(start, start + 12))\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "a.mp4"), str(Path(__file__).parent)]
        assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
        partial = tmp_path / "a.partial.mp4"
        for backend, reason in usable_backends().items():
            if reason is None:
                assert numbers(VideoReader(partial, backend)[:]) == list(range(36))
        # Even in the middle of a write: the frames before it are there.
        partial.write_bytes(partial.read_bytes()[:-40])
        assert numbers(VideoReader(partial)[:24]) == list(range(24))
        with VideoWriter(tmp_path / "a.mp4", fps=12, resume_frames=24) as writer:
            writer.append(barcode_frames(24, 30))
        assert numbers(VideoReader(tmp_path / "a.mp4")[:]) == list(range(30))

    def test_colors_and_enlargement_survive(self, tmp_path: Path) -> None:
        palette = np.array([[230, 30, 40], [30, 200, 60], [40, 60, 220], [128, 128, 128]], np.uint8)
        frame = np.repeat(np.repeat(palette.reshape(2, 2, 3), 16, axis=0), 24, axis=1)
        with VideoWriter(tmp_path / "a.mp4", fps=12, scale=4) as writer:
            writer.append(np.stack([frame] * 6))
        read = VideoReader(tmp_path / "a.mp4")[3].astype(int)
        assert read.shape == (128, 192, 3)
        centers = read[[32, 32, 96, 96], [48, 144, 48, 144]]
        assert np.abs(centers - palette).max() <= 8

    @pytest.mark.parametrize("fps", [12, 24, 29.97, Fraction(30000, 1001), 60])
    def test_frame_rate_is_kept(self, tmp_path: Path, fps: float) -> None:
        with VideoWriter(tmp_path / "a.mp4", fps=fps) as writer:
            writer.append(barcode_frames(0, 10))
            writer.append(barcode_frames(10, 20))
        reader = VideoReader(tmp_path / "a.mp4")
        assert reader.fps == pytest.approx(float(fps), rel=1e-4)
        assert numbers(reader[:]) == list(range(20))

    def test_finished_file_has_its_index_in_front(self, tmp_path: Path) -> None:
        with VideoWriter(tmp_path / "a.mp4", fps=12) as writer:
            writer.append(barcode_frames(0, 12))
        data = (tmp_path / "a.mp4").read_bytes()
        assert data.index(b"moov") < data.index(b"mdat")
        assert b"moof" not in data

    def test_existing_video_stays_until_the_new_one_is_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "a.mp4"
        path.write_bytes(b"old")
        with pytest.raises(RuntimeError), VideoWriter(path, fps=12) as writer:
            writer.append(barcode_frames(0, 12))
            raise RuntimeError
        assert path.read_bytes() == b"old"
        VideoWriter(path, fps=12, resume_frames=12).close()
        assert numbers(VideoReader(path)[:]) == list(range(12))

    def test_resume_elsewhere_than_between_appends_names_the_nearest_place(self, tmp_path: Path) -> None:
        path = tmp_path / "a.mp4"
        with pytest.raises(VideoWriteError, match=r"no .*a\.partial\.mp4 to resume"):
            VideoWriter(path, fps=12, resume_frames=12)
        with pytest.raises(RuntimeError), VideoWriter(path, fps=12) as writer:
            writer.append(barcode_frames(0, 12))
            writer.append(barcode_frames(12, 24))
            raise RuntimeError
        before = writer.partial_path.read_bytes()
        for frames, nearest in ((13, 12), (20, 24), (36, 24), (2, 0)):
            with pytest.raises(VideoWriteError, match=f"nearest place: {nearest}"):
                VideoWriter(path, fps=12, resume_frames=frames)
        for settings in ({"fps": 24}, {"fps": 12, "codec": "hevc"}, {"fps": 12, "scale": 2}, {"fps": 12, "crf": 40}):
            with pytest.raises(VideoWriteError, match="other settings"):
                VideoWriter(path, resume_frames=12, **settings)
        with pytest.raises(VideoWriteError, match="other settings"):
            VideoWriter(path, fps=12, height=64, width=128, resume_frames=12)
        assert writer.partial_path.read_bytes() == before

    def test_two_runs_cannot_write_one_file(self, tmp_path: Path) -> None:
        first = VideoWriter(tmp_path / "a.mp4", fps=12)
        first.append(barcode_frames(0, 12))
        with pytest.raises(VideoWriteError, match=r"another run is writing .*a\.partial\.mp4"):
            VideoWriter(tmp_path / "a.mp4", fps=12)
        first.append(barcode_frames(12, 24))
        first.close()
        assert numbers(VideoReader(tmp_path / "a.mp4")[:]) == list(range(24))

    def test_claim_keeps_others_out_until_it_is_released(self, tmp_path: Path) -> None:
        path = tmp_path / "a.mp4"
        with VideoClaim(path) as claim:
            for rival in (VideoClaim, lambda path: VideoWriter(path, fps=12)):
                with pytest.raises(VideoWriteError, match="another run is writing"):
                    rival(path)
            with VideoWriter(claim, fps=12) as writer:
                writer.append(barcode_frames(0, 12))
                with pytest.raises(VideoWriteError, match="another run is writing"):
                    VideoClaim(path)
            # Published: the name is free again, and what the next run makes of it is not this claim's to remove.
            next_claim = VideoClaim(path)
        assert next_claim.partial_path.exists()
        next_claim.release()
        assert [file.name for file in tmp_path.iterdir()] == ["a.mp4"]
        with pytest.raises(VideoWriteError, match="was released"):
            VideoWriter(claim, fps=12)

    def test_claim_leaves_a_stopped_run_as_it_was(self, tmp_path: Path) -> None:
        with VideoClaim(tmp_path / "a.mp4"):
            pass
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(RuntimeError), VideoWriter(tmp_path / "a.mp4", fps=12) as writer:
            writer.append(barcode_frames(0, 12))
            raise RuntimeError
        before = writer.partial_path.read_bytes()
        with pytest.raises(VideoWriteError, match="fps=0"), VideoClaim(tmp_path / "a.mp4") as claim:
            VideoWriter(claim, fps=0)
        assert writer.partial_path.read_bytes() == before
        with VideoClaim(tmp_path / "a.mp4") as claim, VideoWriter(claim, fps=12, resume_frames=12) as writer:
            writer.append(barcode_frames(12, 24))
        assert numbers(VideoReader(tmp_path / "a.mp4")[:]) == list(range(24))

    def test_full_disk_does_not_cost_a_stopped_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(RuntimeError), VideoWriter(tmp_path / "a.mp4", fps=12) as writer:
            writer.append(barcode_frames(0, 12))
            raise RuntimeError
        usage = namedtuple("usage", "total used free")(2**30, 2**30 - 2**20, 2**20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(VideoWriteError, match=r"has 1\.0 MiB left"):
            VideoClaim(tmp_path / "a.mp4")
        assert numbers(VideoReader(writer.partial_path)[:]) == list(range(12))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"path": "a.avi"}, r"must end in \.mp4, for example 'a\.mp4'"),
            ({"codec": "h265"}, "did you mean 'h264'.*allowed: .*hevc"),
            ({"crf": 52}, "crf=52 must be from 0 to 51"),
            ({"fps": 0}, "fps=0 must be above 0"),
            ({"fps": float("nan")}, "fps=nan"),
            ({"scale": 0}, "scale=0 must be an integer from 1 to 64"),
            ({"scale": 1.5}, "scale=1.5"),
            ({"height": 63, "width": 112}, "height=63 at scale=1 is odd.*height=64 or scale=2"),
            ({"height": 64, "width": 111}, "width=111"),
            ({"height": 64}, "given together"),
            ({"resume_frames": -1}, "must not be negative"),
        ],
    )
    def test_wrong_settings_are_refused_before_any_file_is_made(
        self, tmp_path: Path, settings: dict, message: str
    ) -> None:
        settings = {"path": "a.mp4", "fps": 12, **settings}
        settings["path"] = tmp_path / settings["path"]
        with pytest.raises(VideoWriteError, match=message):
            VideoWriter(**settings)
        assert list(tmp_path.iterdir()) == []

    def test_odd_sizes_are_fine_once_enlarged_to_even(self, tmp_path: Path) -> None:
        with VideoWriter(tmp_path / "a.mp4", fps=12, scale=2) as writer:
            writer.append(np.zeros((2, 33, 35, 3), np.uint8))
        assert VideoReader(tmp_path / "a.mp4")[0].shape == (66, 70, 3)

    @pytest.mark.parametrize(
        ("frames", "message"),
        [
            (np.zeros((2, HEIGHT, WIDTH, 3), np.float32), "float32; expected uint8"),
            (np.zeros((HEIGHT, WIDTH, 3), np.uint8), r"shape \(64, 112, 3\)"),
            (np.zeros((2, 3, HEIGHT, WIDTH), np.uint8), "expected .frames, height, width, 3"),
            (np.zeros((0, HEIGHT, WIDTH, 3), np.uint8), "not empty"),
            (np.zeros((2, 32, WIDTH, 3), np.uint8), "32x112, but this video is 64x112"),
        ],
    )
    def test_wrong_frames_are_refused_and_the_file_stays_good(
        self, tmp_path: Path, frames: np.ndarray, message: str
    ) -> None:
        with VideoWriter(tmp_path / "a.mp4", fps=12) as writer:
            writer.append(barcode_frames(0, 6))
            with pytest.raises(VideoWriteError, match=message):
                writer.append(frames)
            writer.append(barcode_frames(6, 12))
        assert numbers(VideoReader(tmp_path / "a.mp4")[:]) == list(range(12))

    def test_unusable_folders_are_named_before_any_work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(VideoWriteError, match=r"cannot write in .*file"):
            VideoWriter(tmp_path / "file" / "a.mp4", fps=12)
        (tmp_path / "folder.mp4").mkdir()
        with pytest.raises(VideoWriteError, match="is a folder"):
            VideoWriter(tmp_path / "folder.mp4", fps=12)

        def refuse(*arguments: object) -> int:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(os, "open", refuse)  # a test run by root can write to any folder
        with pytest.raises(VideoWriteError, match="Read-only file system; choose a folder you may write to"):
            VideoWriter(tmp_path / "a.mp4", fps=12)

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
    def test_folder_without_write_permission(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(VideoWriteError, match="Permission denied"):
            VideoWriter(tmp_path / "a.mp4", fps=12)

    def test_full_disk_is_found_before_any_work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = namedtuple("usage", "total used free")(2**30, 2**30 - 2**20, 2**20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(VideoWriteError, match=r"has 1\.0 MiB left"):
            VideoWriter(tmp_path / "a.mp4", fps=12)
        assert list(tmp_path.iterdir()) == []

    def test_disk_that_fills_up_keeps_what_was_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        writer = VideoWriter(tmp_path / "a.mp4", fps=12)
        writer.append(barcode_frames(0, 12))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(VideoWriteError, match=r"No space left.*12 frames are safe.*resume_frames=12"):
                writer.append(barcode_frames(12, 24))
        assert numbers(VideoReader(writer.partial_path)[:]) == list(range(12))
        writer.append(barcode_frames(12, 18))
        writer.close()
        assert numbers(VideoReader(tmp_path / "a.mp4")[:]) == list(range(18))

    @pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="only Linux has scheduling policies")
    @pytest.mark.parametrize("codec", ["h264", "hevc", "vp9", "av1"])
    def test_writing_leaves_the_scheduling_of_the_caller_alone(self, tmp_path: Path, codec: str) -> None:
        if codec not in video_writer.usable_codecs():
            pytest.skip(f"this PyAV has no encoder for {codec}")
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        with VideoWriter(tmp_path / "a.mp4", fps=12, codec=codec) as writer:
            writer.append(barcode_frames(0, 12))
            assert (os.sched_getscheduler(0), os.sched_getparam(0)) == before
        assert (os.sched_getscheduler(0), os.sched_getparam(0)) == before

    def test_closing_twice_is_harmless_and_appending_after_is_not(self, tmp_path: Path) -> None:
        writer = VideoWriter(tmp_path / "a.mp4", fps=12)
        writer.append(barcode_frames(0, 12))
        assert writer.close() == writer.close() == tmp_path / "a.mp4"
        with pytest.raises(VideoWriteError, match="is closed"):
            writer.append(barcode_frames(0, 12))

    def test_video_without_frames_is_not_made(self, tmp_path: Path) -> None:
        with pytest.raises(VideoWriteError, match="no frames were appended"):
            VideoWriter(tmp_path / "a.mp4", fps=12).close()
        with pytest.raises(RuntimeError), VideoWriter(tmp_path / "a.mp4", fps=12):
            raise RuntimeError
        assert list(tmp_path.iterdir()) == []
