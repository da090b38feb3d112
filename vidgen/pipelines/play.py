"""What a world is played by without a screen: a script of pressed keys, and real frames to start from.

A line of a script is what is held, and for how many frames:

    # walk to the corner and look around
    forward x 12
    forward + turn left x 4
    none x 2
    turn right
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import torch

from vidgen.controls import ActionSpec
from vidgen.runtime.checkpoint import load_safetensors
from vidgen.runtime.errors import VidgenError, suggestion

NOTHING = "none"
STARTS_NAME = "starts.safetensors"
MAX_FRAMES = 1_000_000
_LINE = re.compile(r"^(?P<keys>.*?)(?:\s+x\s*(?P<count>\d+))?$")


class ScriptError(VidgenError):
    """A script of keys can't be read."""


def parse_script(text: str, spec: ActionSpec) -> list[tuple[str, ...]]:
    """The keys held in every frame.

    Args:
        text: the script.
        spec: whose `choices` are the keys.

    Returns:
        For each frame the names of its choices; empty where nothing is held.

    Raises:
        ScriptError: an unknown key, no frames at all, or more than `MAX_FRAMES`; names the line.
    """
    names = (*spec.choices, NOTHING)
    frames: list[tuple[str, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.match(line)
        keys = [key.strip() for key in match["keys"].split("+")]
        for key in keys:
            if key not in names:
                raise ScriptError(f"line {number}: key {key!r} is unknown: {suggestion(key, names)}.")
        if NOTHING in keys and len(keys) > 1:
            raise ScriptError(f"line {number}: {NOTHING!r} can't be held together with other keys.")
        count = int(match["count"] or 1)
        if not 1 <= count <= MAX_FRAMES - len(frames):
            raise ScriptError(f"line {number}: {count} frames; a script has 1 to {MAX_FRAMES} frames.")
        frames += [() if keys == [NOTHING] else tuple(keys)] * count
    if not frames:
        raise ScriptError(f"the script holds no keys; a line is `KEY + KEY x FRAMES`, keys: {', '.join(names)}.")
    return frames


def load_starts(model: str | os.PathLike, index: int) -> tuple[np.ndarray, torch.Tensor]:
    """One of the starts that come with a world model.

    Args:
        model: its folder.
        index: which one.

    Returns:
        Frames, uint8 `(frames, height, width, 3)`, and their controls `(frames, columns)`.

    Raises:
        VidgenError: the folder has no starts, or not so many.
    """
    path = Path(model) / STARTS_NAME
    if not path.is_file():
        raise VidgenError(f"{model} holds no {STARTS_NAME}, real frames to begin with.")
    tensors, _ = load_safetensors(path)
    count = len(tensors["frames"])
    if not 0 <= index < count:
        raise VidgenError(f"start {index} does not exist; {model} has 0 to {count - 1}.")
    return tensors["frames"][index].numpy(), tensors["controls"][index]
