"""Data sources with a known truth.

Worlds that need torch, which a process that only draws landscapes does not, are imported by their own names:
`code_worlds`, and those with controls, `panorama`, `room` and `vizdoom_world`.
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
