"""A visitor's long video: it runs, is paused and steered, and branches, while its frames wait on disk."""

from __future__ import annotations

import html
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from vidgen.demo.memory_strip import last_frame_of, memory_html, memory_slots
from vidgen.demo.pictures import to_data_uri
from vidgen.demo.turns import Turns
from vidgen.demo.uploads import UploadLimits, read_session
from vidgen.demo.visitors import DemoError

if TYPE_CHECKING:
    from vidgen.pipelines import ContextForcingPipeline, GenerationSession, PromptPlan

UNDO_DEPTH = 8
MAX_BRANCHES = 6
LEAVING_SECONDS = 30
THUMBNAIL_WIDTH = 96
# Below this many lines a video is enlarged, as `vidgen generate` does.
MIN_DISPLAY_HEIGHT = 256


@dataclass
class Branch:
    """One course of a video.

    Attributes:
        session: its state.
        chunks: files of its frames; never changed once written, so branches share them.
        thumbnails: of its latent frames, data URIs.
    """

    session: GenerationSession
    chunks: list[Path] = field(default_factory=list)
    thumbnails: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """What a page shows of a run.

    Attributes:
        stage: JSON for the player: `{"video", "fps", "start", "total", "height", "width", "frames"}`; frames from
            `start` on are replaced.
        status: HTML.
        memory: HTML.
        branches: their names.
        current: the name of the one that is shown.
    """

    stage: str
    status: str
    memory: str
    branches: list[str]
    current: str


class VideoRun:
    """One long video of one visitor.

    Methods may be called from several threads; what changes the video waits for the chunk that is being made.

    Args:
        session: whose `callback_on_step_end` lets others go first, see `begin` and `go_on`.
        turns: who computes when.
        folder: for its files.
        started: when it was asked for, `time.monotonic()`.
    """

    def __init__(self, session: GenerationSession, turns: Turns, folder: Path, started: float) -> None:
        self._started = started
        self._turns, self._folder = turns, folder
        folder.mkdir()
        self._stride = session.pipe.vae_scale_factor_temporal
        # Frames of a session that was saved elsewhere; the page has those after them.
        self._before = session.num_frames_emitted
        self._names = itertools.cycle("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        self._files = itertools.count()
        self._current = next(self._names)
        self._branches = {self._current: Branch(session)}
        self._lock = threading.Lock()  # held while a chunk is made or the video is changed
        self._playing = threading.Lock()
        self._go = self._closed = False
        self.first_frame_seconds: float | None = None
        self._made, self._computing = 0, 0.0

    @classmethod
    def begin(
        cls,
        pipe: ContextForcingPipeline,
        turns: Turns,
        folder: Path,
        plan: PromptPlan,
        seconds: float,
        seed: int,
        memory: str = "slow_fast",
        prompt_switch: str = "recache",
        image: np.ndarray | None = None,
        video: np.ndarray | None = None,
    ) -> Self:
        """A new video.

        Args:
            pipe: the models, shared by all.
            turns: who computes when.
            folder: for its files.
            plan: what to show when.
            seconds: length.
            seed: same seed, same video as `vidgen generate --seed`.
            memory: name of a memory.
            prompt_switch: what happens to the memory when the prompt changes.
            image: what the video begins with, uint8 `(height, width, 3)`.
            video: what it continues, uint8 `(frames, height, width, 3)`.

        Raises:
            VidgenError: arguments that don't fit each other.
        """
        import torch

        started = time.monotonic()
        with turns.turn():
            session = pipe.session(
                plan,
                seconds=seconds,
                memory=memory,
                prompt_switch=prompt_switch,
                image=image,
                video=video,
                include_input=video is not None,
                generator=torch.Generator().manual_seed(seed),
                undo_depth=UNDO_DEPTH,
                callback_on_step_end=lambda *_: turns.give_way(),
            )
        return cls(session, turns, folder, started)

    @classmethod
    def go_on(
        cls,
        pipe: ContextForcingPipeline,
        turns: Turns,
        folder: Path,
        path: str | os.PathLike,
        limits: UploadLimits,
        seconds: float,
    ) -> Self:
        """A video of which the session was saved; its frames begin where that one's ended.

        Args:
            pipe: the models that began it.
            turns: who computes when.
            folder: for its files.
            path: of the session, from `save`.
            limits: of uploads.
            seconds: how much longer it gets.

        Raises:
            UploadError: the file is none that can be gone on with; says why.
        """
        started = time.monotonic()
        with turns.turn():
            session = read_session(path, limits, pipe, callback_on_step_end=lambda *_: turns.give_way())
        session.settings = replace(session.settings, undo_depth=UNDO_DEPTH)
        session.extend(max(1, round(seconds * session.settings.fps)))
        return cls(session, turns, folder, started)

    # --- what it is at ------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether it is being generated."""
        return self._playing.locked()

    @property
    def _branch(self) -> Branch:
        self._check_open()
        return self._branches[self._current]

    @property
    def session(self) -> GenerationSession:
        """The state of the branch that is shown."""
        return self._branch.session

    @property
    def total(self) -> int:
        """Frames of the whole video, without those that were made before its session was saved."""
        return self.session.num_frames_total - self._before

    def view(self, start: int | None = None, note: str = "") -> View:
        """What a page shows now.

        Args:
            start: first frame that the page doesn't have; None sends no frames and keeps all that exist.
            note: a sentence for the status.
        """
        branch = self._branch
        session, now = branch.session, branch.session.num_frames_emitted - self._before
        frames = [] if start is None else [to_data_uri(frame) for frame in self._frames(branch, start)]
        stage = {
            "video": f"{self._folder.name}/{self._current}",
            "fps": session.settings.fps,
            "start": now if start is None else start,
            "total": self.total,
            "height": session.settings.height,
            "width": session.settings.width,
            "live": self._go and not session.finished,
            "frames": frames,
        }
        slots = memory_slots(session.memory, session.settings.fps, self._stride)
        return View(
            stage=json.dumps(stage),
            status=self._status(note),
            memory=memory_html(slots, branch.thumbnails),
            branches=list(self._branches),
            current=self._current,
        )

    def _status(self, note: str) -> str:
        session = self.session
        fps, done = session.settings.fps, session.num_frames_emitted
        total, given = session.num_frames_total, session.num_frames_total - session.settings.num_frames
        plan_frame = max(0, min(done, total - 1) - given)
        state = "finished" if session.finished else "generating" if self._go else "paused"
        facts = [f"<b>{state}</b>", f"{done / fps:.1f} of {total / fps:.1f} s"]
        if self._made:
            rate = self._made / self._computing
            facts.append(f"{rate:.1f} frames/s ({rate / fps:.2f}x real time)")
        if self.first_frame_seconds is not None:
            facts.append(f"first frame after {self.first_frame_seconds:.2f} s")
        facts.append(f"memory {session.memory.nbytes / 1e6:.1f} MB")
        prompt = html.escape(session.plans[0].prompt_at(plan_frame, fps))
        share = 100 * done / max(1, total)
        note = f"<p class='vg-note'>{html.escape(note)}</p>" if note else ""
        return (
            f"<div class='vg-status vg-{state}'><div class='vg-bar'><i style='width:{share:.1f}%'></i></div>"
            f"<p>{' · '.join(facts)}</p><p class='vg-prompt'>{prompt}</p>{note}</div>"
        )

    # --- generating ---------------------------------------------------------------------------------------------

    def play(self) -> Iterator[View]:
        """Generate until the video is finished, paused or left; yields a view after every chunk.

        Raises:
            DemoError: it is running already.
            GenerationError: a chunk failed; the video stays as it was before.
        """
        self._check_open()
        # After a pause the loop before may still be at its last step.
        if self._go or not self._playing.acquire(timeout=LEAVING_SECONDS):
            raise DemoError("This video is being generated already.")
        try:
            self._go = True
            while self._go and not self._closed and not self.session.finished:
                start = self._step()
                if start is not None and not self._closed:
                    yield self.view(start)
            self._go = False
            if not self._closed:
                yield self.view()
        finally:
            self._go = False
            self._playing.release()

    def _step(self) -> int | None:
        """Make a chunk; returns its first frame, or None when it was interrupted."""
        with self._lock:
            if not self._go:
                return None
            branch = self._branch
            start = branch.session.num_frames_emitted
            with self._turns.turn():
                began = time.monotonic()
                frames = branch.session.step()
                self._computing += time.monotonic() - began
            if frames is None or self._closed:
                return None
            self._made += len(frames)
            if self.first_frame_seconds is None:
                self.first_frame_seconds = time.monotonic() - self._started
            path = self._folder / f"chunk_{next(self._files):06d}.npy"
            np.save(path, frames)
            branch.chunks.append(path)
            for latent in range(math.ceil(start / self._stride), branch.session.memory.num_frames):
                frame = last_frame_of(latent, self._stride) - start
                if 0 <= frame < len(frames):  # the last chunk may be cut
                    branch.thumbnails[latent] = to_data_uri(frames[frame], THUMBNAIL_WIDTH)
            return start - self._before

    def pause(self) -> None:
        """Stop at the next denoising step; what the chunk had so far is made again later, to the same frames."""
        was_playing, self._go = self._go, False
        if was_playing:
            self.session.interrupt()

    # --- changing it --------------------------------------------------------------------------------------------

    def set_prompt(self, prompt: str, mode: str | None = None) -> None:
        """Show another prompt from the next chunk on.

        Raises:
            VidgenError: an empty prompt, an unknown mode, or a video that is finished.
        """
        with self._lock:
            if self.session.finished:
                raise DemoError("The video is finished; take back a chunk first, or start a new one.")
            with self._turns.turn():  # the text encoder
                self.session.set_prompt(prompt, mode)

    def undo(self) -> None:
        """Pause, and take back a chunk and the prompts set since.

        Raises:
            DemoError: no chunk can be taken back.
        """
        self.pause()
        with self._lock:
            branch = self._branch
            branch.session.undo()
            branch.chunks.pop()

    def fork(self) -> str:
        """Pause, and go on in a copy of the video; the one before stays as it is.

        Returns:
            The name of the copy.

        Raises:
            DemoError: too many branches.
        """
        self.pause()
        with self._lock:
            if len(self._branches) >= MAX_BRANCHES:
                raise DemoError(f"A video has at most {MAX_BRANCHES} branches; start a new one.")
            branch = self._branch
            self._current = next(self._names)
            self._branches[self._current] = replace(
                branch,
                session=branch.session.fork(),
                chunks=list(branch.chunks),
                thumbnails=dict(branch.thumbnails),
            )
            return self._current

    def select(self, name: str) -> None:
        """Pause, and show another branch.

        Raises:
            DemoError: there is no such branch.
        """
        if name not in self._branches:
            raise DemoError(f"There is no branch {name!r}; allowed: {', '.join(self._branches)}.")
        if name != self._current:
            self.pause()
            with self._lock:
                self._current = name

    # --- files --------------------------------------------------------------------------------------------------

    def save(self) -> tuple[Path, Path]:
        """Write the frames so far as mp4, and the session.

        Returns:
            Both files.

        Raises:
            DemoError: there are no frames yet.
        """
        from vidgen.data import VideoWriter

        with self._lock:
            branch = self._branch
            if not branch.chunks:
                raise DemoError("There is nothing to save yet; generate first.")
            settings = branch.session.settings
            number = next(self._files)
            video = self._folder / f"video_{self._current}_{number:06d}.mp4"
            session = video.with_suffix(".session.safetensors")
            scale = max(1, math.ceil(MIN_DISPLAY_HEIGHT / settings.height))
            with VideoWriter(
                video, fps=settings.fps, height=settings.height, width=settings.width, scale=scale
            ) as out:
                for chunk in branch.chunks:
                    out.append(np.load(chunk, allow_pickle=False))
            branch.session.save(session)
            return video, session

    def close(self) -> None:
        """Stop, and free what the memory holds; the folder is the visitor's to delete."""
        self.pause()
        self._closed = True
        with self._lock:
            self._branches = {}

    def _check_open(self) -> None:
        if self._closed:
            raise DemoError("This video is gone; start a new one.")

    def _frames(self, branch: Branch, start: int) -> Iterator[np.ndarray]:
        """The frames of a branch from one on."""
        first = 0
        for path in branch.chunks:
            chunk = np.load(path, mmap_mode="r", allow_pickle=False)
            if first + len(chunk) > start:
                yield from np.asarray(chunk[max(0, start - first) :])
            first += len(chunk)
