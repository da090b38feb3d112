"""A visitor's video: the frames are those of the pipeline, however it was paused, undone, forked and left."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from vidgen.cli import generate
from vidgen.data import VideoReader, VideoWriter
from vidgen.demo import video_run
from vidgen.demo.plan_text import read_plan
from vidgen.demo.turns import PLAY, Turns
from vidgen.demo.uploads import UploadLimits
from vidgen.demo.video_run import VideoRun, View
from vidgen.demo.visitors import DemoError
from vidgen.pipelines import GenerationError, GenerationSession

PLAN = "a meadow at dawn\n2 s: a desert in the snow"
SECONDS, SEED = 4, 5


@pytest.fixture
def make_run(pipe: Any, tmp_path: Path) -> Callable[..., VideoRun]:
    def make(name: str = "run", **options: Any) -> VideoRun:
        options = {"plan": read_plan(PLAN), "seconds": SECONDS, "seed": SEED, **options}
        return VideoRun.begin(pipe, Turns(), tmp_path / name, **options)

    return make


@pytest.fixture(scope="module")
def truth(pipe: Any) -> np.ndarray:
    """The same video, made by the pipeline alone."""
    generator = torch.Generator().manual_seed(SEED)
    return np.concatenate(list(pipe.stream(read_plan(PLAN), seconds=SECONDS, generator=generator)))


def frames_of(run: VideoRun) -> np.ndarray:
    """What would be saved, before it is encoded."""
    return np.concatenate([np.load(path) for path in run._branch.chunks])


def stage(view: View) -> dict[str, Any]:
    return json.loads(view.stage)


def pixels(uri: str) -> np.ndarray:
    return np.array(PIL.Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def play_chunks(run: VideoRun, count: int) -> list[View]:
    """So many chunks, then a pause."""
    views, loop = [], run.play()
    for _ in range(count):
        views.append(next(loop))
    run.pause()
    return [*views, *loop]


def test_frames_arrive_chunk_by_chunk_and_are_those_of_the_pipeline(make_run: Any, truth: np.ndarray) -> None:
    run = make_run()
    views = list(run.play())
    assert np.array_equal(frames_of(run), truth)
    starts = [stage(view)["start"] for view in views[:-1]]
    assert starts == [0, 9, 21, 33, 45] and stage(views[-1])["frames"] == []
    sent = [uri for view in views for uri in stage(view)["frames"]]
    assert len(sent) == len(truth) == SECONDS * 12
    # JPEGs of noise are poor, but no other frame is nearer.
    errors = [np.abs(pixels(sent[20]).astype(float) - frame).mean() for frame in truth]
    assert int(np.argmin(errors)) == 20
    assert "finished" in views[-1].status and "finished" not in views[0].status
    assert 0 < run.first_frame_seconds < 60 and not run.busy


def test_paused_and_resumed_equals_uninterrupted(make_run: Any, truth: np.ndarray) -> None:
    run = make_run()
    paused = play_chunks(run, 2)[-1]
    assert "paused" in paused.status and len(frames_of(run)) == 21
    list(run.play())
    assert np.array_equal(frames_of(run), truth)


def test_interrupted_in_the_middle_of_a_chunk_equals_uninterrupted(make_run: Any, truth: np.ndarray) -> None:
    run = make_run()
    calls = []
    give_way = run._turns.give_way

    def pause_once() -> None:
        give_way()
        calls.append(1)
        if len(calls) == 3:  # the first step of the second chunk
            run.pause()

    run._turns.give_way = pause_once
    list(run.play())
    assert len(frames_of(run)) == 9
    list(run.play())
    assert np.array_equal(frames_of(run), truth)


def test_undo_takes_back_frames_and_prompts(make_run: Any, truth: np.ndarray) -> None:
    run = make_run()
    play_chunks(run, 2)
    run.set_prompt("a coast at night")
    play_chunks(run, 1)
    assert not np.array_equal(frames_of(run), truth[:33])
    run.undo()
    view = run.view()
    assert stage(view)["start"] == 21 and stage(view)["frames"] == []
    run.undo()
    list(run.play())  # the prompt set after the second chunk is gone with it
    assert np.array_equal(frames_of(run), truth)


def test_nothing_can_be_undone_at_the_start(make_run: Any) -> None:
    with pytest.raises(GenerationError, match="0 chunks"):
        make_run().undo()


def test_a_prompt_that_is_set_while_it_runs_changes_the_next_chunk(make_run: Any, truth: np.ndarray) -> None:
    run = make_run()
    loop = run.play()
    next(loop)
    setter = threading.Thread(target=run.set_prompt, args=("a coast in the rain",))
    setter.start()
    setter.join(20)
    list(loop)
    frames = frames_of(run)
    assert np.array_equal(frames[:9], truth[:9])
    assert not np.array_equal(frames[9:21], truth[9:21])
    with pytest.raises(DemoError, match="finished"):
        run.set_prompt("a meadow")


def test_branches_share_the_past_and_not_the_future(make_run: Any, truth: np.ndarray) -> None:
    run = make_run()
    play_chunks(run, 1)
    assert run.fork() == "B"
    run.set_prompt("a coast in the rain")
    list(run.play())
    other = frames_of(run)
    run.select("A")
    assert len(frames_of(run)) == 9
    assert len(stage(run.view(start=0))["frames"]) == 9
    list(run.play())
    assert np.array_equal(frames_of(run), truth)
    run.select("B")
    assert np.array_equal(frames_of(run), other)
    assert np.array_equal(other[:9], truth[:9]) and not np.array_equal(other, truth)
    with pytest.raises(DemoError, match="no branch 'Z'; allowed: A, B"):
        run.select("Z")
    with pytest.raises(DemoError, match="at most 6"):
        for _ in range(6):
            run.fork()


def test_what_is_saved_is_what_generate_would_have_written(
    make_run: Any, truth: np.ndarray, pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert video_run.MIN_DISPLAY_HEIGHT == generate.MIN_DISPLAY_HEIGHT
    monkeypatch.setattr(video_run, "MIN_DISPLAY_HEIGHT", 64)  # encoding large pictures takes long
    run = make_run()
    with pytest.raises(DemoError, match="nothing to save"):
        run.save()
    play_chunks(run, 3)
    video, session = run.save()
    with VideoWriter(tmp_path / "expected.mp4", fps=12, scale=2) as writer:
        for chunk in np.split(truth[:33], [9, 21]):
            writer.append(chunk)
    assert video.read_bytes() == (tmp_path / "expected.mp4").read_bytes()
    assert len(VideoReader(video)) == 33
    rest = np.concatenate(list(GenerationSession.load(session, pipe)))
    assert np.array_equal(rest, truth[33:])


def test_a_saved_session_goes_on_where_it_was(make_run: Any, truth: np.ndarray, pipe: Any, tmp_path: Path) -> None:
    run = make_run()
    play_chunks(run, 2)
    _, session = run.save()
    run.close()
    more = VideoRun.go_on(pipe, Turns(), tmp_path / "more", session, UploadLimits(), (len(truth) - 21) / 12)
    opening = more.view(start=0)
    assert stage(opening)["frames"] == [] and stage(opening)["total"] == len(truth) - 21
    assert "1.8 of 4.0 s" in opening.status
    views = list(more.play())
    assert [stage(view)["start"] for view in views[:-1]] == [0, 12, 24]
    assert np.array_equal(frames_of(more), truth[21:])
    assert views[-1].memory.count("<figure>") == more.session.memory.num_slots
    more.undo()
    assert stage(more.view())["start"] == 24
    more.fork()
    list(more.play())
    assert np.array_equal(frames_of(more), truth[21:])
    assert len(VideoReader(more.save()[0])) == len(truth) - 21


def test_a_session_goes_on_beyond_its_end(make_run: Any, pipe: Any, tmp_path: Path) -> None:
    run = make_run()
    list(run.play())  # 48 of 57 frames: nine of the last chunk are cut off
    _, session = run.save()
    more = VideoRun.go_on(pipe, Turns(), tmp_path / "more", session, UploadLimits(), 1)
    list(more.play())
    longer = make_run("longer", seconds=69 / 12)
    list(longer.play())
    assert np.array_equal(frames_of(more), frames_of(longer)[57:]) and more.total == 12


def test_thumbnails_are_of_the_frames_they_name(make_run: Any, truth: np.ndarray) -> None:
    run = make_run()
    views = list(run.play())
    thumbnails = run._branch.thumbnails
    # 48 frames are latent frames 0 to 11 and three quarters of the 12th, which has no last frame.
    assert sorted(thumbnails) == list(range(12))
    for latent in (0, 1, 7, 11):
        errors = [np.abs(pixels(thumbnails[latent]).astype(float) - frame).mean() for frame in truth]
        assert int(np.argmin(errors)) == 4 * latent
    assert views[-1].memory.count("<figure>") == run.session.memory.num_slots


def test_a_given_video_is_part_of_what_is_shown(make_run: Any) -> None:
    given = np.random.default_rng(0).integers(0, 256, (9, 32, 48, 3), np.uint8)
    run = make_run(video=given, plan=read_plan("a meadow"), seconds=1)
    views = list(run.play())
    assert len(frames_of(run)) == run.total == stage(views[0])["total"] == 9 + 12
    assert stage(views[0])["start"] == 0
    with_picture = make_run("picture", image=given[0], plan=read_plan("a meadow"), seconds=1)
    list(with_picture.play())
    assert len(frames_of(with_picture)) == with_picture.total == 12


def test_it_is_generated_once_at_a_time(make_run: Any) -> None:
    run = make_run()
    loop = run.play()
    next(loop)
    assert run.busy
    with pytest.raises(DemoError, match="already"):
        next(run.play())
    loop.close()  # the page went away
    assert not run.busy
    list(run.play())
    assert run.session.finished


def test_closing_ends_the_loop_and_frees_the_memory(make_run: Any) -> None:
    import gc
    import weakref

    run = make_run()
    loop = run.play()
    next(loop)
    memory = weakref.ref(run.session.memory)
    run.close()
    assert list(loop) == []
    gc.collect()
    assert memory() is None
    for change in (run.undo, run.fork, run.save, lambda: run.set_prompt("a meadow"), lambda: list(run.play())):
        with pytest.raises(DemoError, match="gone"):
            change()


def test_a_player_waits_for_a_denoising_step_not_for_a_chunk(make_run: Any) -> None:
    run = make_run()
    waiting, log = threading.Event(), []
    predict = GenerationSession._predict

    def slow(self: GenerationSession, *arguments: Any) -> torch.Tensor:
        log.append("step")
        if len(log) == 1:
            waiting.set()
            while not run._turns._waiting:
                time.sleep(0.001)
        return predict(self, *arguments)

    def play() -> None:
        waiting.wait(20)
        with run._turns.turn(PLAY):
            log.append("play")

    player = threading.Thread(target=play)
    player.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationSession, "_predict", slow)
        next(run.play())
    player.join(20)
    assert log[:3] == ["step", "play", "step"]
