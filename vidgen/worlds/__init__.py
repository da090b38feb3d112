"""Data sources with a known truth.

`vidgen.worlds.code_worlds` is imported by its own name: it needs torch, which a process that only renders does not.
"""

from vidgen.worlds.landscape import (
    BIOMES,
    MOVES,
    TIMES,
    TRAVELLERS,
    WEATHERS,
    CameraMove,
    LandscapeError,
    LandscapeScene,
    LandscapeWorld,
    SceneObject,
)
from vidgen.worlds.landscape_captions import caption, parse_caption, prompt_plan

__all__ = [
    "BIOMES",
    "MOVES",
    "TIMES",
    "TRAVELLERS",
    "WEATHERS",
    "CameraMove",
    "LandscapeError",
    "LandscapeScene",
    "LandscapeWorld",
    "SceneObject",
    "caption",
    "parse_caption",
    "prompt_plan",
]
