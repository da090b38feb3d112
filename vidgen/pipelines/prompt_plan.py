"""What a video is asked to show, and for how long: a sequence of prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vidgen.runtime.checks import check_positive
from vidgen.runtime.errors import VidgenError


class PromptPlanError(VidgenError):
    """A prompt plan is empty, malformed, or does not fit the length of the video."""


@dataclass(frozen=True)
class PromptSegment:
    """One prompt of a plan.

    Attributes:
        prompt: the text.
        seconds: how long it is shown; `None`, for the last segment only, means until the end.
    """

    prompt: str
    seconds: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise PromptPlanError(
                f"A prompt plan holds the prompt {self.prompt!r}; every segment needs a non-empty text."
            )
        if self.seconds is None:
            return
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, (int, float)):
            raise PromptPlanError(f"seconds={self.seconds!r} of prompt {self.prompt!r} is not a number.")
        if not math.isfinite(self.seconds) or self.seconds <= 0:
            raise PromptPlanError(
                f"seconds={self.seconds} of prompt {self.prompt!r}; a segment lasts a positive, finite time."
            )


@dataclass(frozen=True)
class PromptPlan:
    """Prompts in order. A switch takes effect at the first chunk that begins at or after it.

    Attributes:
        segments: at least one; only the last may leave its duration open.
    """

    segments: tuple[PromptSegment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise PromptPlanError("The prompt plan is empty; give at least one prompt.")
        for segment in self.segments[:-1]:
            if segment.seconds is None:
                raise PromptPlanError(
                    f"The prompt {segment.prompt!r} has no duration but others follow it; only the last may omit it."
                )

    @classmethod
    def parse(cls, prompt: str | Path | PromptPlan | Sequence[tuple[str, float | None]]) -> PromptPlan:
        """Read a plan from any form a user may give.

        Args:
            prompt: a text, `(text, seconds)` pairs, the `pathlib.Path` of a plan file, or a plan.

        Raises:
            PromptPlanError: when it is none of these.
        """
        if isinstance(prompt, PromptPlan):
            return prompt
        if isinstance(prompt, Path):
            return cls.from_file(prompt)
        if isinstance(prompt, str):
            return cls((PromptSegment(prompt),))
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise PromptPlanError(
                f"prompt={prompt!r:.60}; give a text, (prompt, seconds) pairs or the Path of a file."
            )
        segments = []
        for index, pair in enumerate(prompt):
            if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise PromptPlanError(f"Segment {index} of the prompt plan is {pair!r}; give (prompt, seconds) pairs.")
            segments.append(PromptSegment(*pair))
        return cls(tuple(segments))

    @classmethod
    def from_file(cls, path: str | Path) -> PromptPlan:
        """Read a plan file.

        A `.txt` file has one `seconds | prompt` per line (the last line may be the prompt alone); a `.jsonl` file has
        one `{"prompt": …, "seconds": …}` per line. Blank lines and lines that start with `#` are skipped.

        Raises:
            PromptPlanError: when the file is missing, of another kind, or a line cannot be read; names the line.
        """
        path = Path(path)
        if path.suffix not in (".txt", ".jsonl"):
            raise PromptPlanError(f"{path} is not a prompt plan file; use .txt or .jsonl.")
        if not path.is_file():
            raise PromptPlanError(f"The prompt plan file {path} does not exist.")
        segments = []
        try:
            text = path.read_text(encoding="utf-8-sig")  # editors on Windows put a byte order mark in front
        except UnicodeDecodeError as error:
            raise PromptPlanError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
        for number, line in enumerate(text.splitlines(), start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            try:
                segments.append(cls._read_json(line) if path.suffix == ".jsonl" else cls._read_text(line))
            except ValueError as error:
                raise PromptPlanError(f"{path}, line {number}: {error}") from error
        if not segments:
            raise PromptPlanError(f"{path} holds no prompt; give at least one line.")
        return cls(tuple(segments))

    @staticmethod
    def _read_json(line: str) -> PromptSegment:
        entry = json.loads(line)
        if not isinstance(entry, dict) or "prompt" not in entry or set(entry) - {"prompt", "seconds"}:
            raise ValueError(f'{line!r} is not of the form {{"prompt": "…", "seconds": 5}}.')
        return PromptSegment(entry["prompt"], entry.get("seconds"))

    @staticmethod
    def _read_text(line: str) -> PromptSegment:
        seconds, separator, prompt = line.partition("|")
        if not separator:
            return PromptSegment(line)
        try:
            duration = float(seconds)
        except ValueError:
            raise ValueError(f"{seconds.strip()!r} before '|' is not a number of seconds.") from None
        return PromptSegment(prompt.strip(), duration)

    @property
    def starts(self) -> tuple[float, ...]:
        """Second at which each segment begins."""
        starts = [0.0]
        for segment in self.segments[:-1]:
            starts.append(starts[-1] + segment.seconds)
        return tuple(starts)

    @property
    def seconds(self) -> float | None:
        """Total duration, `None` when the last segment is open."""
        last = self.segments[-1].seconds
        return None if last is None else self.starts[-1] + last

    @property
    def prompts(self) -> tuple[str, ...]:
        """The distinct texts, in order of appearance."""
        return tuple(dict.fromkeys(segment.prompt for segment in self.segments))

    def prompt_at(self, frame: int, fps: float) -> str:
        """The prompt shown at a frame; the last one goes on beyond the end of the plan."""
        check_positive(fps=fps)
        # Half a frame of slack, so that 0.1 + 0.2 seconds switch at the frame a reader expects.
        now = (frame + 0.5) / fps
        shown = [segment.prompt for segment, start in zip(self.segments, self.starts) if start <= now]
        return shown[-1]

    def switch_to(self, prompt: str, frame: int, fps: float) -> PromptPlan:
        """The plan that agrees with this one before `frame` and shows `prompt` from there on."""
        check_positive(fps=fps)
        now = frame / fps
        segments = []
        for segment, start in zip(self.segments, self.starts):
            if start + 0.5 / fps < now:
                rest = now - start
                segments.append(PromptSegment(segment.prompt, min(rest, segment.seconds or rest)))
        if segments:  # the plan may have ended before now
            segments[-1] = PromptSegment(segments[-1].prompt, now - self.starts[len(segments) - 1])
        return PromptPlan((*segments, PromptSegment(prompt)))

    def check_length(self, num_frames: int, fps: float) -> None:
        """Make sure that the plan describes a video of `num_frames` frames.

        Raises:
            PromptPlanError: when a prompt would never be shown, or the plan ends before the video.
        """
        check_positive(fps=fps)
        length = num_frames / fps
        slack = 0.5 / fps
        if self.starts[-1] >= length - slack:
            raise PromptPlanError(
                f"The prompt {self.segments[-1].prompt!r} begins at {self.starts[-1]:g} s, beyond the end of the "
                f"video at {length:g} s. Shorten the plan or ask for more than {self.starts[-1]:g} s."
            )
        if self.seconds is not None and self.seconds < length - 1 / fps - slack:
            raise PromptPlanError(
                f"The prompt plan covers {self.seconds:g} s of a video of {length:g} s. Ask for {self.seconds:g} s, "
                "or give the last prompt seconds=None to keep it until the end."
            )

    def to_list(self) -> list[list]:
        """`[prompt, seconds]` pairs, ready for JSON; `parse` reads them back."""
        return [[segment.prompt, segment.seconds] for segment in self.segments]
