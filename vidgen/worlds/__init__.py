"""Data sources with a known truth."""

from vidgen.worlds.code_worlds import CODEBOOK, CodeVideos, PanoramaWorld, RoomsWorld
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
    "CODEBOOK",
    "MOVES",
    "TIMES",
    "TRAVELLERS",
    "WEATHERS",
    "CameraMove",
    "CodeVideos",
    "LandscapeError",
    "LandscapeScene",
    "LandscapeWorld",
    "PanoramaWorld",
    "RoomsWorld",
    "SceneObject",
    "caption",
    "parse_caption",
    "prompt_plan",
]
