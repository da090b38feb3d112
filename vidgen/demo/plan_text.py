"""A prompt plan as lines that a visitor types: from which second on, which prompt.

a green meadow at dawn
5 s: a green meadow in the rain
12.5s: a green meadow at night
"""

from __future__ import annotations

import itertools
import re

from vidgen.pipelines.prompt_plan import PromptPlan, PromptPlanError, PromptSegment

MAX_LINES, MAX_PROMPT = 40, 600
_LINE = re.compile(r"^(?:(?P<second>\d+(?:\.\d+)?)\s*s\s*:)?\s*(?P<prompt>.*)$")


def _read_lines(text: str) -> list[tuple[float, str, int]]:
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        match = _LINE.match(line.strip())
        if match["second"] is None and lines:
            raise PromptPlanError(
                f"Line {number} of the plan doesn't say when it begins; write `5 s: {line.strip()[:40]}`."
            )
        prompt = match["prompt"].strip()
        if not prompt or len(prompt) > MAX_PROMPT:
            raise PromptPlanError(
                f"Line {number} of the plan has a prompt of {len(prompt)} characters; allowed: 1 to {MAX_PROMPT}."
            )
        lines.append((float(match["second"] or 0), prompt, number))
    if len(lines) > MAX_LINES:
        raise PromptPlanError(f"The plan has {len(lines)} lines; allowed: {MAX_LINES}.")
    return lines


def read_plan(text: str) -> PromptPlan:
    """The plan of a text; its last prompt goes on to the end of the video.

    Raises:
        PromptPlanError: no prompt, a line that can't be read, or seconds that don't grow; names the line.
    """
    lines = _read_lines(text)
    if not lines:
        raise PromptPlanError("The plan is empty; write what to show, such as `a green meadow at dawn`.")
    if lines[0][0] != 0:
        raise PromptPlanError(f"The plan begins at {lines[0][0]:g} s; its first line has to begin at 0 s.")
    for (before, _, _), (second, _, number) in itertools.pairwise(lines):
        if second <= before:
            raise PromptPlanError(
                f"Line {number} of the plan begins at {second:g} s, the line before at {before:g} s."
            )
    ends = [second for second, _, _ in lines[1:]]
    durations = [end - start for (start, _, _), end in zip(lines, ends)]
    return PromptPlan(
        tuple(PromptSegment(prompt, seconds) for (_, prompt, _), seconds in zip(lines, [*durations, None]))
    )


def add_line(text: str, second: float, prompt: str) -> str:
    """The text with one more line, in order of time; a line that begins at the same second is replaced.

    Raises:
        PromptPlanError: as for `read_plan`.
    """
    if not second >= 0:
        raise PromptPlanError(f"A prompt can't begin at {second} s; allowed: 0 or later.")
    lines = {start: line for start, line, _ in _read_lines(text)}
    lines[float(second)] = " ".join(prompt.split())
    added = "\n".join(f"{start:g} s: {line}" for start, line in sorted(lines.items()))
    read_plan(added)
    return added
