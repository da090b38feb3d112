"""An endless parallax landscape whose content at every place is known.

A scene is a handful of named attributes, a seed and a list of camera moves. Everything that stands still is a
function of (seed, layer, world position) and never of time, so a camera that comes back sees exactly what it saw
before: this is the ground truth for measuring how well a video model remembers. Only the traveller, the weather
particles and the drifting mist depend on time, and they too are functions of the frame index alone.

All geometry is written in reference pixels of a 64 x 112 frame and scaled to the requested size.
"""

from __future__ import annotations

import difflib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

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

BIOMES = ("meadow", "desert", "mountains", "coast", "forest", "snowfield")
TIMES = ("dawn", "day", "dusk", "night")
WEATHERS = ("clear", "rain", "snow", "fog")
TRAVELLERS = ("none", "balloon", "birds", "train", "airplane")
MOVES = ("pan right", "pan left", "hold")

SLOW_SPEED = 6.0
FAST_SPEED = 12.0
RAMP_SECONDS = 0.8

REFERENCE_HEIGHT = 64
REFERENCE_WIDTH = 112
CLOUDS, FAR, MID, GROUND = "clouds", "far", "mid", "ground"
LAYERS = (CLOUDS, FAR, MID, GROUND)
PARALLAX = {CLOUDS: 0.06, FAR: 0.15, MID: 0.4, GROUND: 1.0}

_LAYER_SALT = {CLOUDS: 11, FAR: 12, MID: 13, GROUND: 14}
_SUPERSAMPLING = 2
_SPRITE_SUPERSAMPLING = 4
_TILE = 64
_MAX_TILES = 64
_MAX_SCENES = 8

Color = tuple[float, float, float]


class LandscapeError(ValueError):
    """A scene, frame range or size that the landscape world cannot draw."""


def _check_name(what: str, given: str, allowed: Sequence[str]) -> str:
    if given in allowed:
        return given
    near = difflib.get_close_matches(str(given), allowed, n=1, cutoff=0.0)
    raise LandscapeError(f"{what} {given!r} is unknown; allowed: {', '.join(allowed)}; nearest: {near[0]!r}")


# ---------------------------------------------------------------------------------------------------------------------
# Hashing: all fixed content comes from here, so it depends on integers only.


def _mix(value: np.ndarray) -> np.ndarray:
    """Finalizer of splitmix64 on uint64 arrays (wraps around by design)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _key(*parts: int) -> int:
    state = 0
    for part in parts:
        state = (
            state * 0x9E3779B97F4A7C15 + (int(part) & 0xFFFFFFFFFFFFFFFF) + 0x632BE59BD9B4E019
        ) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
        state = (state * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 32
    return state


def _uniforms(count: int, *parts: int) -> list[float]:
    """`count` numbers in [0, 1) that are a function of the integers `parts`."""
    values = np.uint64(_key(*parts)) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((_mix(values) >> np.uint64(11)).astype(np.float64) * 2.0**-53).tolist()


def _noise(key: int, x: np.ndarray, period: float) -> np.ndarray:
    """Smooth value noise in [0, 1) along world positions `x`, with one random knot every `period`."""
    position = x / period
    knot = np.floor(position)
    fraction = position - knot
    knots = knot.astype(np.int64).astype(np.uint64)
    step = np.uint64(0x9E3779B97F4A7C15)

    def at(index: np.ndarray) -> np.ndarray:
        return (_mix(index * step + np.uint64(key)) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    left, right = at(knots), at(knots + np.uint64(1))
    return left + (right - left) * fraction * fraction * (3.0 - 2.0 * fraction)


def _smoothstep(low: float, high: float, x: np.ndarray) -> np.ndarray:
    t = np.clip((x - low) / (high - low), 0.0, 1.0)
    return t * t * (3.0 - 2.0 * t)


# ---------------------------------------------------------------------------------------------------------------------
# Scene


@dataclass(frozen=True)
class CameraMove:
    """One piece of a camera path.

    Args:
        kind: one of `MOVES`.
        seconds: duration in seconds, > 0.
        speed: ground-layer pixels per second at frame width 112, > 0 for pans and 0 for "hold".
    """

    kind: str
    seconds: float
    speed: float

    def __post_init__(self) -> None:
        _check_name("camera move", self.kind, MOVES)
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise LandscapeError(f"camera move seconds is {self.seconds}; allowed: > 0, e.g. 4.0")
        if self.kind == "hold" and self.speed != 0:
            raise LandscapeError(f"speed of a 'hold' is {self.speed}; allowed: 0")
        if self.kind != "hold" and not (math.isfinite(self.speed) and self.speed > 0):
            raise LandscapeError(f"speed of a {self.kind!r} is {self.speed}; allowed: > 0, e.g. {SLOW_SPEED}")

    @property
    def velocity(self) -> float:
        """Signed ground-layer pixels per second; positive moves the camera to the right."""
        return {"pan right": self.speed, "pan left": -self.speed, "hold": 0.0}[self.kind]

    @property
    def pace(self) -> str:
        """ "slow", "fast" or, for a hold, "still"."""
        if self.kind == "hold":
            return "still"
        return "slow" if self.speed < 0.5 * (SLOW_SPEED + FAST_SPEED) else "fast"


@dataclass(frozen=True)
class SceneObject:
    """Something on screen: its box is in pixels of a 64 x 112 frame, (x, y) being its top left corner."""

    kind: str
    object_id: str
    layer: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class LandscapeScene:
    """A complete description of one landscape video.

    Args:
        seed: fixes terrain, objects, colors and the phase of everything that moves.
        biome: one of `BIOMES`.
        time_of_day: one of `TIMES`.
        weather: one of `WEATHERS`.
        traveller: one of `TRAVELLERS`.
        moves: camera moves, played one after the other.
        fps: frames per second.
    """

    seed: int
    biome: str
    time_of_day: str
    weather: str
    traveller: str
    moves: tuple[CameraMove, ...]
    fps: int = 12

    def __post_init__(self) -> None:
        _check_name("biome", self.biome, BIOMES)
        _check_name("time_of_day", self.time_of_day, TIMES)
        _check_name("weather", self.weather, WEATHERS)
        _check_name("traveller", self.traveller, TRAVELLERS)
        if not self.moves:
            raise LandscapeError("moves is empty; allowed: at least one CameraMove, e.g. CameraMove('hold', 4.0, 0.0)")
        if self.fps < 1:
            raise LandscapeError(f"fps is {self.fps}; allowed: integers >= 1, nearest: 1")

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return float(sum(move.seconds for move in self.moves))

    @property
    def num_frames(self) -> int:
        """Number of frames, `seconds * fps` rounded."""
        return max(1, round(self.seconds * self.fps))

    @property
    def attributes(self) -> dict[str, str]:
        """The four attributes that hold for the whole video."""
        return {
            "biome": self.biome,
            "time_of_day": self.time_of_day,
            "weather": self.weather,
            "traveller": self.traveller,
        }

    def move_at(self, frame: int) -> CameraMove:
        """The camera move that is under way at `frame` (the last one from the end on)."""
        end = 0.0
        for move in self.moves:
            end += move.seconds
            if frame / self.fps < end - 1e-9:
                return move
        return self.moves[-1]

    def camera_x(self, frame: float) -> float:
        """World position of the left screen edge at `frame`, in ground-layer pixels at width 112.

        The velocity is constant within a move, except for its first moments where it eases over from the move before.
        """
        time = frame / self.fps
        position, previous = 0.0, self.moves[0].velocity
        for index, move in enumerate(self.moves):
            last = index == len(self.moves) - 1
            elapsed = time if last else min(time, move.seconds)
            ramp = min(RAMP_SECONDS, 0.5 * move.seconds)
            # The part of the old velocity that is left is 1 - smoothstep(u); its integral is u - u^3 + u^4 / 2.
            u = min(max(elapsed, 0.0) / ramp, 1.0)
            leftover = ramp * (u - u**3 + 0.5 * u**4)
            position += move.velocity * elapsed + (previous - move.velocity) * leftover
            time -= elapsed
            previous = move.velocity
            if time <= 0:
                break
        return position

    def visible_objects(self, frame: int) -> list[SceneObject]:
        """Every object that is at least partly on screen at `frame`, back to front."""
        objects = []
        camera = self.camera_x(frame)
        for layer in (MID, GROUND):
            offset = camera * PARALLAX[layer]
            for item in _layout(self.seed, self.biome, layer, offset, offset + REFERENCE_WIDTH):
                width, height = _EXTENT[item.kind]
                width, height = width * item.size, height * item.size
                left = item.x - 0.5 * width - offset
                if left < REFERENCE_WIDTH and left + width > 0:
                    name = f"{layer}:{item.cell}"
                    objects.append(SceneObject(item.kind, name, layer, left, item.base - height, width, height))
        traveller = self.traveller_box(frame)
        return objects if traveller is None else [*objects, traveller]

    def traveller_box(self, frame: int) -> SceneObject | None:
        """The traveller at `frame`; it never leaves the screen."""
        if self.traveller == "none":
            return None
        x, y = _traveller_position(self, frame)
        width, height = _TRAVELLER_EXTENT[self.traveller]
        layer = "track" if self.traveller == "train" else "air"
        return SceneObject(self.traveller, "traveller", layer, x - width / 2, y - height / 2, width, height)


# ---------------------------------------------------------------------------------------------------------------------
# Terrain and object placement


@dataclass(frozen=True)
class _Item:
    kind: str
    cell: int
    x: float
    base: float
    size: float
    tint: float


# (object kind, weight) that may stand in a cell, the cell width and the share of cells that are occupied.
_PLACEMENT: dict[tuple[str, str], tuple[float, float, tuple[tuple[str, float], ...]]] = {
    ("meadow", GROUND): (15.0, 0.78, (("tree", 4), ("house", 3), ("bush", 2), ("rock", 0.7))),
    ("meadow", MID): (19.0, 0.5, (("small tree", 1),)),
    ("desert", GROUND): (15.0, 0.72, (("cactus", 5), ("rock", 2), ("barrel cactus", 1.5))),
    ("mountains", GROUND): (11.0, 0.74, (("pine", 5), ("boulder", 2))),
    ("mountains", MID): (8.0, 0.65, (("small pine", 1),)),
    ("coast", GROUND): (17.0, 0.74, (("palm", 5), ("lighthouse", 1.6), ("rock", 1.2), ("parasol", 2))),
    ("coast", MID): (44.0, 0.65, (("sailboat", 1),)),
    ("forest", GROUND): (9.0, 0.82, (("autumn tree", 8), ("bush", 1))),
    ("forest", MID): (7.0, 0.9, (("small autumn tree", 1),)),
    ("snowfield", GROUND): (14.0, 0.78, (("fir", 5), ("cabin", 2.4), ("snowman", 1.8))),
    ("snowfield", MID): (12.0, 0.55, (("small fir", 1),)),
}

# Width and height of each object at size 1, in reference pixels.
_EXTENT: dict[str, tuple[float, float]] = {
    "tree": (11.0, 14.0),
    "small tree": (6.0, 6.0),
    "house": (13.0, 11.0),
    "bush": (8.0, 4.5),
    "rock": (7.0, 4.0),
    "cactus": (9.0, 13.0),
    "barrel cactus": (5.0, 5.0),
    "pine": (9.0, 15.0),
    "small pine": (5.0, 7.5),
    "boulder": (9.0, 6.0),
    "palm": (14.0, 17.0),
    "lighthouse": (7.0, 20.0),
    "parasol": (10.0, 8.0),
    "sailboat": (9.0, 9.0),
    "autumn tree": (11.0, 16.0),
    "small autumn tree": (8.0, 8.0),
    "fir": (10.0, 15.0),
    "small fir": (5.0, 7.0),
    "cabin": (14.0, 10.0),
    "snowman": (6.0, 9.5),
}
_MARGIN = 12.0


def _ridge(key: int, x: np.ndarray, period: float) -> np.ndarray:
    """Noise with sharp crests, in [0, 1]."""
    return 1.0 - np.abs(2.0 * _noise(key, x, period) - 1.0)


def _peaks(key: int, x: np.ndarray, spacing: float, steepness: float) -> np.ndarray:
    """Height of a row of pointed summits: the upper envelope of cones at jittered positions with random heights."""
    height = np.zeros_like(x)
    for cell in range(int(np.floor(x.min() / spacing)) - 2, int(np.floor(x.max() / spacing)) + 3):
        shift, tall, lean = _uniforms(3, key, cell)
        distance = x - (cell + 0.15 + 0.7 * shift) * spacing
        slope = steepness * np.where(distance < 0, 0.85 + 0.4 * lean, 1.25 - 0.4 * lean)
        height = np.maximum(height, (0.45 + 0.55 * tall) - slope * np.abs(distance) / spacing)
    return height


def _treetops(x: np.ndarray, period: float) -> np.ndarray:
    """A row of rounded crowns, in [0, 1]."""
    phase = 2.0 * (x / period - np.floor(x / period)) - 1.0
    return np.sqrt(np.maximum(0.0, 1.0 - phase * phase))


def _terrain(seed: int, biome: str, layer: str, x: np.ndarray) -> np.ndarray:
    """Row of the terrain's upper edge at layer positions `x` (both in reference pixels)."""
    a = _key(seed, _LAYER_SALT[layer], 1)
    b = _key(seed, _LAYER_SALT[layer], 2)
    if layer == GROUND:
        swell = {"coast": 1.2, "desert": 3.0, "snowfield": 2.4}.get(biome, 2.2)
        return 51.0 - swell * _noise(a, x, 46.0) - 0.8 * _noise(b, x, 19.0)
    if layer == FAR:
        if biome == "desert":
            table = _smoothstep(0.52, 0.62, _noise(a, x, 26.0))
            return 37.0 - 2.0 * _noise(b, x, 30.0) - table * (8.0 + 3.0 * _noise(b, x, 61.0))
        if biome == "mountains":
            return 37.0 - 25.0 * _peaks(a, x, 30.0, 0.9) - 2.5 * _ridge(b, x, 9.0)
        if biome == "coast":
            return 36.0 - 22.0 * np.maximum(0.0, _noise(a, x, 34.0) - 0.55) - 1.5 * _noise(b, x, 9.0)
        if biome == "forest":
            return 35.0 - 8.0 * _noise(a, x, 40.0) - 0.9 * _treetops(x, 7.0)
        if biome == "snowfield":
            return 36.0 - 9.0 * _noise(a, x, 38.0) - 3.0 * _noise(b, x, 15.0)
        return 35.0 - 7.0 * _noise(a, x, 38.0) - 2.0 * _noise(b, x, 17.0)
    if biome == "desert":
        return 45.5 - 9.0 * _ridge(a, x, 36.0) ** 1.5
    if biome == "mountains":
        return 46.0 - 11.0 * _ridge(a, x, 30.0) - 1.5 * _ridge(b, x, 11.0)
    if biome == "coast":
        return np.full_like(x, 42.0)
    if biome == "forest":
        return 45.0 - 4.0 * _noise(a, x, 34.0) - 1.5 * _treetops(x, 6.0)
    if biome == "snowfield":
        return 46.0 - 8.0 * _noise(a, x, 36.0)
    return 46.0 - 8.0 * _noise(a, x, 33.0) - 1.0 * _noise(b, x, 14.0)


@lru_cache(maxsize=65536)
def _item(seed: int, biome: str, layer: str, cell: int) -> _Item | None:
    """The object that stands in one cell of a layer, or None."""
    width, density, choices = _PLACEMENT[biome, layer]
    here, which, shift, size, tint = _uniforms(5, seed, _LAYER_SALT[layer], 3, cell)
    if here >= density:
        return None
    target = which * sum(weight for _, weight in choices)
    kind = choices[-1][0]
    for name, weight in choices:
        if target < weight:
            kind = name
            break
        target -= weight
    x = (cell + 0.2 + 0.6 * shift) * width
    base = float(_terrain(seed, biome, layer, np.array([x]))[0]) + (1.6 if layer == GROUND else 1.0)
    return _Item(kind, cell, x, base, 0.85 + 0.3 * size, tint)


def _layout(seed: int, biome: str, layer: str, left: float, right: float) -> list[_Item]:
    """Objects of a layer whose box may touch [left, right), ordered from left to right."""
    if (biome, layer) not in _PLACEMENT:
        return []
    width = _PLACEMENT[biome, layer][0]
    cells = range(math.floor((left - _MARGIN) / width) - 1, math.floor((right + _MARGIN) / width) + 2)
    items = (_item(seed, biome, layer, cell) for cell in cells)
    return [item for item in items if item is not None]


# ---------------------------------------------------------------------------------------------------------------------
# Colors


@dataclass(frozen=True)
class _Light:
    """How one time of day looks: the sky from zenith to horizon, the tint of the land and of the haze."""

    zenith: Color
    middle: Color
    horizon: Color
    tint: Color
    haze: Color
    cloud: Color
    cloud_shade: Color
    rain: Color
    snow: Color
    fog: Color
    flake: Color


_LIGHT = {
    "dawn": _Light(
        (122, 158, 214), (214, 176, 214), (255, 205, 190), (0.98, 0.84, 0.92), (240, 190, 205),
        (255, 226, 222), (226, 170, 196), (158, 140, 158), (206, 182, 200), (236, 206, 212), (255, 244, 246),
    ),
    "day": _Light(
        (58, 138, 228), (116, 184, 244), (190, 228, 250), (1.0, 1.0, 1.0), (186, 216, 240),
        (255, 255, 255), (214, 228, 244), (126, 138, 152), (176, 190, 206), (216, 222, 228), (255, 255, 255),
    ),
    "dusk": _Light(
        (74, 48, 118), (186, 78, 104), (255, 158, 62), (0.78, 0.5, 0.47), (222, 116, 84),
        (255, 150, 96), (150, 70, 112), (112, 78, 84), (146, 104, 122), (196, 136, 112), (255, 224, 210),
    ),
    "night": _Light(
        (8, 12, 40), (18, 28, 70), (44, 62, 116), (0.28, 0.37, 0.6), (38, 55, 106),
        (58, 72, 122), (34, 44, 88), (34, 41, 62), (46, 55, 86), (68, 79, 108), (196, 208, 236),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class _Palette:
    far: tuple[Color, Color]
    mid: tuple[Color, Color]
    ground: tuple[Color, Color]


_PALETTE = {
    "meadow": _Palette(
        ((96, 158, 128), (120, 176, 120)),
        ((112, 182, 78), (88, 158, 66)),
        ((104, 184, 62), (58, 128, 44)),
    ),
    "desert": _Palette(
        ((190, 92, 58), (216, 132, 84)),
        ((236, 170, 92), (214, 140, 70)),
        ((244, 196, 116), (212, 146, 78)),
    ),
    "mountains": _Palette(
        ((104, 120, 152), (128, 146, 172)),
        ((82, 104, 116), (74, 96, 98)),
        ((104, 122, 98), (62, 80, 70)),
    ),
    "coast": _Palette(
        ((70, 132, 126), (96, 150, 140)),
        ((28, 138, 178), (56, 178, 196)),
        ((246, 226, 168), (222, 190, 126)),
    ),
    "forest": _Palette(
        ((176, 98, 62), (200, 128, 74)),
        ((206, 104, 40), (160, 74, 34)),
        ((178, 112, 52), (112, 66, 36)),
    ),
    "snowfield": _Palette(
        ((176, 196, 226), (206, 220, 240)),
        ((214, 226, 244), (228, 236, 248)),
        ((248, 251, 255), (198, 214, 238)),
    ),
}
_AUTUMN: tuple[Color, ...] = ((224, 118, 32), (204, 62, 34), (238, 168, 48), (178, 48, 40))
_DEPTH = {CLOUDS: 1.0, FAR: 0.42, MID: 0.17, GROUND: 0.02, "air": 0.02, "track": 0.0}
_FOG_DEPTH = {CLOUDS: 0.9, FAR: 0.8, MID: 0.58, GROUND: 0.24, "air": 0.3, "track": 0.2}


def _blend(first: Color, second: Color, amount: float) -> Color:
    return tuple(a + (b - a) * amount for a, b in zip(first, second))  # type: ignore[return-value]


class _Grade:
    """Turns the color of a thing under white light into its color in the scene, at the distance of a layer."""

    def __init__(self, scene: LandscapeScene, layer: str):
        self.light = _LIGHT[scene.time_of_day]
        self.weather = scene.weather
        self.haze = _DEPTH[layer]
        self.fog = _FOG_DEPTH[layer]
        # Travellers keep more of their own color, or nobody would recognize them at night.
        keep = 0.45 if layer in ("air", "track") else 0.0
        self.tint = _blend(self.light.tint, (0.9, 0.9, 0.9), keep)
        self.night = scene.time_of_day == "night"
        self.lit = scene.time_of_day in ("night", "dusk")

    def __call__(self, color: Color) -> Color:
        color = tuple(c * t for c, t in zip(color, self.tint))
        if self.night:
            # Moonlight turns everything toward blue, also what has no blue of its own.
            color = _blend(color, (30, 46, 92), 0.22)
        return self.air(_blend(color, self.light.haze, self.haze))

    def air(self, color: Color) -> Color:
        """Applies the weather alone."""
        if self.weather == "rain":
            gray = sum(color) / 3.0
            color = _blend(color, (gray * 0.9, gray * 0.96, gray * 1.08), 0.5)
            return _blend(tuple(0.84 * c for c in color), self.light.rain, 0.12 + 0.5 * self.haze)
        if self.weather == "snow":
            gray = sum(color) / 3.0
            return _blend(_blend(color, (gray, gray, gray), 0.25), self.light.snow, 0.14 + 0.6 * self.haze)
        if self.weather == "fog":
            return _blend(color, self.light.fog, self.fog)
        return color

    def glow(self, color: Color) -> Color:
        """A lamp or a lit window: its own color, dimmed by fog only."""
        return _blend(color, self.light.fog, 0.5 * self.fog) if self.weather == "fog" else color


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


class _Canvas:
    """Paints anti-aliased shapes, given in reference pixels, on a supersampled layer.

    `buffer` is float32 [4, rows, columns]: color times coverage (0..255) in the first three planes, and in the last
    what still shines through from behind. So putting the layer over an image is `image * buffer[3] + buffer[:3]`.
    """

    def __init__(self, left: float, top: float, columns: int, rows: int, scale_x: float, scale_y: float):
        self.x = (left + (np.arange(columns, dtype=np.float64) + 0.5) / scale_x)[None, :]
        self.y = (top + (np.arange(rows, dtype=np.float64) + 0.5) / scale_y)[:, None]
        self.left, self.top = left, top
        self.scale_x, self.scale_y = scale_x, scale_y
        self.edge = 1.0 / min(scale_x, scale_y)
        self.buffer = np.zeros((4, rows, columns), dtype=np.float32)
        self.buffer[3] = 1.0

    def window(
        self, left: float, top: float, right: float, bottom: float, margin: float
    ) -> tuple[slice, slice] | None:
        """Rows and columns that a box touches, or None if it lies outside."""
        rows, columns = self.buffer.shape[1:]
        c0 = max(0, math.floor((left - margin - self.left) * self.scale_x))
        c1 = min(columns, math.ceil((right + margin - self.left) * self.scale_x))
        r0 = max(0, math.floor((top - margin - self.top) * self.scale_y))
        r1 = min(rows, math.ceil((bottom + margin - self.top) * self.scale_y))
        return (slice(r0, r1), slice(c0, c1)) if c0 < c1 and r0 < r1 else None

    def put(self, window: tuple[slice, slice], alpha: np.ndarray, color: Color | np.ndarray) -> None:
        alpha = alpha.astype(np.float32)
        if not isinstance(color, np.ndarray):
            color = np.array(color, dtype=np.float32)[:, None, None]
        part = self.buffer[(slice(None), *window)]
        part *= 1.0 - alpha
        part[:3] += color * alpha

    def _fill(
        self, window: tuple[slice, slice], distance: np.ndarray, color: Color, opacity: float, soft: float
    ) -> None:
        self.put(window, opacity * np.clip(0.5 - distance / max(soft, self.edge), 0.0, 1.0), color)

    def ellipse(
        self, x: float, y: float, rx: float, ry: float, color: Color, opacity: float = 1.0, soft: float = 0.0,
    ) -> None:  # fmt: skip
        window = self.window(x - rx, y - ry, x + rx, y + ry, soft + self.edge)
        if window is not None:
            radius = np.sqrt(((self.x[:, window[1]] - x) / rx) ** 2 + ((self.y[window[0]] - y) / ry) ** 2)
            self._fill(window, (radius - 1.0) * min(rx, ry), color, opacity, soft)

    def polygon(self, points: Sequence[tuple[float, float]], color: Color, opacity: float = 1.0) -> None:
        """Fills a convex polygon."""
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        window = self.window(min(xs), min(ys), max(xs), max(ys), self.edge)
        if window is None:
            return
        x, y = self.x[:, window[1]], self.y[window[0]]
        center_x, center_y = sum(xs) / len(xs), sum(ys) / len(ys)
        distance = None
        for (x0, y0), (x1, y1) in zip(points, [*points[1:], points[0]]):
            length = math.hypot(x1 - x0, y1 - y0)
            nx, ny = (y1 - y0) / length, -(x1 - x0) / length
            if nx * (center_x - x0) + ny * (center_y - y0) > 0:
                nx, ny = -nx, -ny
            side = nx * (x - x0) + ny * (y - y0)
            distance = side if distance is None else np.maximum(distance, side)
        self._fill(window, distance, color, opacity, 0.0)

    def box(self, left: float, top: float, right: float, bottom: float, color: Color, opacity: float = 1.0) -> None:
        window = self.window(left, top, right, bottom, self.edge)
        if window is not None:
            x, y = self.x[:, window[1]], self.y[window[0]]
            across = np.abs(x - 0.5 * (left + right)) - 0.5 * (right - left)
            down = np.abs(y - 0.5 * (top + bottom)) - 0.5 * (bottom - top)
            self._fill(window, np.maximum(across, down), color, opacity, 0.0)

    def line(
        self, x0: float, y0: float, x1: float, y1: float, radius: float, color: Color, opacity: float = 1.0,
        soft: float = 0.0,
    ) -> None:  # fmt: skip
        """A stroke with round ends."""
        window = self.window(
            min(x0, x1) - radius, min(y0, y1) - radius, max(x0, x1) + radius, max(y0, y1) + radius, soft + self.edge
        )
        if window is not None:
            x, y = self.x[:, window[1]] - x0, self.y[window[0]] - y0
            dx, dy = x1 - x0, y1 - y0
            along = np.clip((x * dx + y * dy) / (dx * dx + dy * dy + 1e-9), 0.0, 1.0)
            self._fill(window, np.hypot(x - along * dx, y - along * dy) - radius, color, opacity, soft)

    def below(
        self, top: np.ndarray, upper: Color, lower: Color, depth: float, shade: np.ndarray | None = None,
        bottom: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Fills from the rows `top` (one per column) down to `bottom`, fading from `upper` to `lower` over `depth`."""
        first = max(0, math.floor((float(top.min()) - self.top) * self.scale_y) - 1)
        if first >= self.y.shape[0]:
            return
        y = self.y[first:]
        alpha = np.clip(0.5 + (y - top) / self.edge, 0.0, 1.0)
        if bottom is not None:
            alpha *= np.clip(0.5 + (bottom - y) / self.edge, 0.0, 1.0)
        fade = np.clip((y - top) / depth, 0.0, 1.0)
        start, end = np.array(upper)[:, None, None], np.array(lower)[:, None, None]
        color = start + (end - start) * fade
        if shade is not None:
            # Relief fades out downwards, or the facets would end in stripes.
            color = color * (1.0 + (shade - 1.0) * (1.0 - fade * fade))
        self.put((slice(first, None), slice(None)), alpha, color.astype(np.float32))


def _draw_tree(canvas: _Canvas, item: _Item, grade: _Grade, leaf: Color, trunk_share: float = 0.35) -> None:
    s, x, y = item.size, item.x, item.base
    width, height = _EXTENT[item.kind]
    w, h = width * s, height * s
    canvas.box(x - 0.09 * w, y - 0.55 * h, x + 0.09 * w, y, grade((104, 72, 48)))
    dark, light = _blend(leaf, (20, 30, 40), 0.25), _blend(leaf, (255, 246, 180), 0.24)
    middle = y - h + 0.5 * (1.0 - trunk_share) * h
    r = 0.5 * (1.0 - trunk_share) * h
    canvas.ellipse(x - 0.21 * w, middle + 0.22 * r, 0.29 * w, 0.72 * r, grade(dark))
    canvas.ellipse(x + 0.21 * w, middle + 0.22 * r, 0.29 * w, 0.72 * r, grade(dark))
    canvas.ellipse(x, middle - 0.08 * r, 0.36 * w, 0.92 * r, grade(leaf))
    canvas.ellipse(x - 0.1 * w, middle - 0.34 * r, 0.17 * w, 0.36 * r, grade(light), 0.7, soft=1.2)


def _draw_conifer(canvas: _Canvas, item: _Item, grade: _Grade, leaf: Color, snow: bool) -> None:
    width, height = _EXTENT[item.kind]
    w, h, x, y = width * item.size, height * item.size, item.x, item.base
    canvas.box(x - 0.08 * w, y - 0.16 * h, x + 0.08 * w, y, grade((92, 66, 50)))
    for share, low, high in ((1.0, 0.1, 0.52), (0.78, 0.34, 0.76), (0.54, 0.6, 1.0)):
        tip = (x, y - high * h)
        canvas.polygon([(x - 0.5 * share * w, y - low * h), (x + 0.5 * share * w, y - low * h), tip], grade(leaf))
        if snow:
            cut = low + 0.5 * (high - low)
            half = 0.25 * share * w
            canvas.polygon([(x - half, y - cut * h), (x + half, y - cut * h), tip], grade((240, 246, 255)))


def _draw_house(canvas: _Canvas, item: _Item, grade: _Grade, wall: Color, roof: Color) -> None:
    width, height = _EXTENT[item.kind]
    w, h, x, y = width * item.size, height * item.size, item.x, item.base
    eaves = y - 0.55 * h
    canvas.box(x + 0.2 * w, y - h, x + 0.31 * w, y - 0.6 * h, grade(_blend(roof, (60, 50, 50), 0.5)))
    canvas.box(x - 0.42 * w, eaves, x + 0.42 * w, y, grade(wall))
    canvas.polygon(
        [(x - 0.5 * w, eaves), (x + 0.5 * w, eaves), (x + 0.24 * w, y - h + 1), (x - 0.24 * w, y - h + 1)], grade(roof)
    )
    glass = grade.glow((255, 214, 110)) if grade.lit else grade((84, 116, 148))
    canvas.box(x - 0.31 * w, eaves + 0.13 * h, x - 0.11 * w, eaves + 0.36 * h, glass)
    canvas.box(x + 0.14 * w, eaves + 0.13 * h, x + 0.34 * w, eaves + 0.36 * h, glass)
    canvas.box(x - 0.06 * w, eaves + 0.17 * h, x + 0.08 * w, y, grade((112, 70, 48)))


def _draw_rock(canvas: _Canvas, item: _Item, grade: _Grade, color: Color) -> None:
    width, height = _EXTENT[item.kind]
    w, h, x, y = width * item.size, height * item.size, item.x, item.base
    canvas.polygon(
        [
            (x - 0.5 * w, y),
            (x - 0.36 * w, y - 0.62 * h),
            (x - 0.05 * w, y - h),
            (x + 0.3 * w, y - 0.7 * h),
            (x + 0.5 * w, y),
        ],
        grade(_blend(color, (30, 30, 50), 0.22)),
    )
    canvas.polygon(
        [(x - 0.42 * w, y - 0.3 * h), (x - 0.34 * w, y - 0.6 * h), (x - 0.05 * w, y - h), (x + 0.05 * w, y - 0.5 * h)],
        grade(_blend(color, (255, 255, 255), 0.12)),
    )


def _draw_cactus(canvas: _Canvas, item: _Item, grade: _Grade) -> None:
    s, x, y = item.size, item.x, item.base
    green, light = grade((52, 128, 66)), grade((96, 168, 92))
    lift = 2.2 * (item.tint - 0.5)
    canvas.line(x, y - 11.4 * s, x, y, 1.55 * s, green)
    canvas.line(x - 3.6 * s, y - (5.2 + lift) * s, x, y - (5.2 + lift) * s, 0.95 * s, green)
    canvas.line(x - 3.6 * s, y - (8.6 + lift) * s, x - 3.6 * s, y - (5.2 + lift) * s, 0.95 * s, green)
    canvas.line(x + 3.6 * s, y - (4.2 - lift) * s, x, y - (4.2 - lift) * s, 0.95 * s, green)
    canvas.line(x + 3.6 * s, y - (7.4 - lift) * s, x + 3.6 * s, y - (4.2 - lift) * s, 0.95 * s, green)
    canvas.line(x - 0.5 * s, y - 11.0 * s, x - 0.5 * s, y - 1.0, 0.4 * s, light)


def _draw_palm(canvas: _Canvas, item: _Item, grade: _Grade) -> None:
    s, x, y = item.size, item.x, item.base
    lean = (3.0 if item.tint < 0.5 else -3.0) * s
    bark, leaf, light = grade((150, 110, 70)), grade((44, 132, 62)), grade((88, 172, 78))
    points = [(x - 0.5 * lean + lean * t * t, y - 13.0 * s * t) for t in (0.0, 0.35, 0.7, 1.0)]
    for (x0, y0), (x1, y1) in pairwise(points):
        canvas.line(x0, y0, x1, y1, 0.85 * s, bark)
    top_x, top_y = points[-1]
    for dx, dy, color in (
        (-5.4, 2.6, leaf),
        (5.4, 2.6, leaf),
        (-4.6, -1.4, light),
        (4.6, -1.4, light),
        (-1.2, -3.4, leaf),
        (1.8, -3.2, leaf),
    ):
        bend_x, bend_y = top_x + 0.55 * dx * s, top_y + (0.5 * dy - 1.5) * s
        canvas.line(top_x, top_y, bend_x, bend_y, 0.95 * s, color)
        canvas.line(bend_x, bend_y, top_x + dx * s, top_y + dy * s, 0.7 * s, color)
    canvas.ellipse(top_x, top_y + 0.6 * s, 1.1 * s, 0.9 * s, grade((122, 76, 44)))


def _draw_lighthouse(canvas: _Canvas, item: _Item, grade: _Grade) -> None:
    s, x, y = item.size, item.x, item.base

    def half(height: float) -> float:
        return (2.9 - 1.2 * height / 15.0) * s

    for index in range(5):
        low, high = 3.0 * index, 3.0 * (index + 1)
        color = grade((214, 56, 48) if index % 2 == 0 else (248, 246, 240))
        canvas.polygon(
            [
                (x - half(low), y - low * s),
                (x + half(low), y - low * s),
                (x + half(high), y - high * s),
                (x - half(high), y - high * s),
            ],
            color,
        )
    canvas.box(x - 2.3 * s, y - 15.8 * s, x + 2.3 * s, y - 14.9 * s, grade((62, 66, 80)))
    lamp = grade.glow((255, 236, 150)) if grade.lit else grade((250, 230, 150))
    if grade.lit:
        canvas.ellipse(x, y - 17.0 * s, 4.4, 3.6, grade.glow((255, 226, 130)), 0.5, soft=4.5)
    canvas.box(x - 1.3 * s, y - 18.0 * s, x + 1.3 * s, y - 15.8 * s, lamp)
    canvas.polygon([(x - 1.9 * s, y - 17.9 * s), (x + 1.9 * s, y - 17.9 * s), (x, y - 20.0 * s)], grade((190, 46, 42)))


def _draw_parasol(canvas: _Canvas, item: _Item, grade: _Grade) -> None:
    s, x, y = item.size, item.x, item.base
    cloth: Color = ((230, 70, 70), (60, 120, 210), (250, 190, 60))[int(item.tint * 3) % 3]
    canvas.line(x, y - 6.0 * s, x, y, 0.45 * s, grade((236, 232, 226)))
    for low, high, color in ((-5.0, -1.7, cloth), (-1.7, 1.7, (250, 248, 242)), (1.7, 5.0, cloth)):
        canvas.polygon(
            [
                (x + low * s, y - 4.6 * s),
                (x + high * s, y - 4.6 * s),
                (x + 0.35 * high * s, y - 7.6 * s),
                (x + 0.35 * low * s, y - 7.6 * s),
            ],
            grade(color),
        )


def _draw_sailboat(canvas: _Canvas, item: _Item, grade: _Grade) -> None:
    s, x, y = item.size, item.x, item.base + 1.0
    sail: Color = ((250, 248, 244), (246, 222, 196), (226, 96, 84))[int(item.tint * 3) % 3]
    canvas.polygon(
        [(x - 4.2 * s, y - 1.9 * s), (x + 4.2 * s, y - 1.9 * s), (x + 2.8 * s, y), (x - 2.8 * s, y)],
        grade((120, 62, 44)),
    )
    canvas.polygon([(x - 0.2 * s, y - 9.0 * s), (x - 0.2 * s, y - 2.5 * s), (x + 3.8 * s, y - 2.5 * s)], grade(sail))
    canvas.polygon(
        [(x - 0.8 * s, y - 7.6 * s), (x - 0.8 * s, y - 2.5 * s), (x - 3.2 * s, y - 2.5 * s)],
        grade(_blend(sail, (120, 130, 160), 0.2)),
    )


def _draw_snowman(canvas: _Canvas, item: _Item, grade: _Grade) -> None:
    s, x, y = item.size, item.x, item.base
    shade, white = grade((176, 194, 224)), grade((252, 253, 255))
    for height, radius in ((2.3, 2.8), (5.7, 2.05)):
        canvas.ellipse(x, y - height * s, (radius + 0.35) * s, (radius + 0.25) * s, shade)
        canvas.ellipse(x - 0.25 * s, y - (height + 0.2) * s, radius * s, radius * s, white)
    canvas.box(x - 1.9 * s, y - 7.7 * s, x + 1.9 * s, y - 7.0 * s, grade((44, 44, 58)))
    canvas.box(x - 1.2 * s, y - 9.4 * s, x + 1.2 * s, y - 7.3 * s, grade((44, 44, 58)))
    canvas.box(x - 1.7 * s, y - 4.5 * s, x + 1.7 * s, y - 3.7 * s, grade((212, 58, 58)))
    canvas.polygon(
        [(x + 0.3 * s, y - 6.2 * s), (x + 0.3 * s, y - 5.3 * s), (x + 2.6 * s, y - 5.5 * s)], grade((244, 138, 40))
    )


def _draw_bush(canvas: _Canvas, item: _Item, grade: _Grade, leaf: Color) -> None:
    s, x, y = item.size, item.x, item.base
    canvas.ellipse(x - 1.9 * s, y - 1.3 * s, 2.3 * s, 1.9 * s, grade(_blend(leaf, (20, 40, 40), 0.2)))
    canvas.ellipse(x + 1.7 * s, y - 1.5 * s, 2.4 * s, 2.1 * s, grade(leaf))
    canvas.ellipse(x - 0.1 * s, y - 2.4 * s, 2.3 * s, 2.0 * s, grade(_blend(leaf, (255, 250, 190), 0.14)))


def _draw_barrel_cactus(canvas: _Canvas, item: _Item, grade: _Grade) -> None:
    s, x, y = item.size, item.x, item.base
    canvas.ellipse(x, y - 2.0 * s, 2.4 * s, 2.5 * s, grade((70, 140, 74)))
    canvas.ellipse(x - 0.6 * s, y - 2.4 * s, 0.8 * s, 1.6 * s, grade((122, 178, 104)), 0.7)
    canvas.ellipse(x, y - 4.5 * s, 1.1 * s, 0.8 * s, grade((232, 84, 120)))


def _draw_item(canvas: _Canvas, item: _Item, grade: _Grade, biome: str) -> None:
    kind, tint = item.kind, item.tint
    if kind == "tree":
        _draw_tree(canvas, item, grade, _blend((46, 122, 54), (92, 156, 52), tint))
    elif kind == "small tree":
        _draw_tree(canvas, item, grade, _blend((58, 128, 62), (82, 146, 62), tint), 0.2)
    elif kind == "autumn tree":
        _draw_tree(canvas, item, grade, _AUTUMN[int(tint * 4) % 4], 0.3)
    elif kind == "small autumn tree":
        _draw_tree(canvas, item, grade, _AUTUMN[int(tint * 4) % 4], 0.15)
    elif kind in ("pine", "small pine"):
        _draw_conifer(canvas, item, grade, _blend((30, 82, 64), (50, 100, 66), tint), False)
    elif kind in ("fir", "small fir"):
        _draw_conifer(canvas, item, grade, _blend((24, 70, 68), (34, 86, 74), tint), True)
    elif kind == "house":
        roof = ((206, 62, 48), (186, 48, 52), (220, 88, 58))[int(tint * 3) % 3]
        _draw_house(canvas, item, grade, ((250, 238, 214), (246, 226, 190), (238, 238, 236))[int(tint * 9) % 3], roof)
    elif kind == "cabin":
        _draw_house(canvas, item, grade, _blend((126, 78, 48), (150, 96, 60), tint), (244, 248, 255))
    elif kind == "rock":
        _draw_rock(canvas, item, grade, (188, 104, 70) if biome == "desert" else (150, 148, 146))
    elif kind == "boulder":
        _draw_rock(canvas, item, grade, _blend((128, 134, 146), (150, 152, 156), tint))
    elif kind == "bush":
        _draw_bush(canvas, item, grade, (206, 96, 40) if biome == "forest" else (70, 146, 56))
    else:
        _DRAW[kind](canvas, item, grade)


_DRAW: dict[str, Callable[[_Canvas, _Item, _Grade], None]] = {
    "cactus": _draw_cactus,
    "barrel cactus": _draw_barrel_cactus,
    "palm": _draw_palm,
    "lighthouse": _draw_lighthouse,
    "parasol": _draw_parasol,
    "sailboat": _draw_sailboat,
    "snowman": _draw_snowman,
}


def _draw_clouds(canvas: _Canvas, scene: LandscapeScene) -> None:
    light = _LIGHT[scene.time_of_day]
    overcast = scene.weather in ("rain", "snow")
    if scene.weather == "fog":
        return
    color, shade = light.cloud, light.cloud_shade
    if overcast:
        gray = light.rain if scene.weather == "rain" else light.snow
        color, shade = _blend(gray, light.flake, 0.16), _blend(gray, (0, 0, 0), 0.16)
    spacing = 24.0 if overcast else 40.0
    left, right = float(canvas.x[0, 0]), float(canvas.x[0, -1])
    for cell in range(math.floor((left - 30) / spacing), math.floor((right + 30) / spacing) + 1):
        here, shift, height, size, opacity = _uniforms(5, scene.seed, _LAYER_SALT[CLOUDS], 4, cell)
        if here > (0.95 if overcast else 0.75):
            continue
        x, y, s = (cell + shift) * spacing, 4.0 + 14.0 * height, (1.25 if overcast else 0.8) + 0.5 * size
        solid = (0.75 if overcast else 0.7) + 0.2 * opacity
        canvas.ellipse(x, y + 1.6 * s, 10.5 * s, 2.2 * s, shade, solid, soft=1.8)
        for dx, dy, rx, ry in ((-5.0, 0.3, 4.4, 2.3), (4.6, 0.1, 5.0, 2.6), (-0.8, -1.1, 5.0, 3.4)):
            canvas.ellipse(x + dx * s, y + dy * s, rx * s, ry * s, color, solid, soft=1.6)


def _slope_shade(top: np.ndarray, step: float, strength: float) -> np.ndarray:
    """Brightness per column: the side that faces left is lit."""
    slope = np.gradient(top, step)
    return 1.0 - strength * np.tanh(1.6 * slope)


def _draw_layer(canvas: _Canvas, scene: LandscapeScene, layer: str) -> None:
    if layer == CLOUDS:
        _draw_clouds(canvas, scene)
        return
    seed, biome = scene.seed, scene.biome
    grade = _Grade(scene, layer)
    x = canvas.x[0]
    # One column of slack on both sides, so that slopes at the seam of two tiles agree.
    step = 1.0 / canvas.scale_x
    wide = np.concatenate([x[:1] - step, x, x[-1:] + step])
    top_wide = _terrain(seed, biome, layer, wide)
    top = top_wide[1:-1]
    palette = _PALETTE[biome]
    upper, lower = {FAR: palette.far, MID: palette.mid, GROUND: palette.ground}[layer]
    if layer == FAR:
        shade = None
        if biome in ("mountains", "desert", "snowfield"):
            shade = _slope_shade(top_wide, step, {"mountains": 0.16, "desert": 0.1, "snowfield": 0.06}[biome])[1:-1]
        canvas.below(top, grade(upper), grade(lower), 14.0, shade)
        if biome == "mountains":
            wobble = _noise(_key(seed, 21), x, 3.2)
            cap = top + np.clip((33.0 - top) * 0.42, 0.0, 9.0) + np.where(top < 31.0, 2.6 * wobble, 0.0)
            # Snow catches what light there is, so that the caps stay visible at night.
            scene_white = grade.air(_LIGHT[scene.time_of_day].flake)
            white = _blend(grade((244, 248, 255)), scene_white, 0.35)
            canvas.below(top, white, _blend(white, grade((190, 206, 232)), 0.6), 10.0, shade, bottom=cap)
        if biome == "desert":
            band = np.maximum(top + 3.4, 31.0)
            canvas.below(band, grade((222, 128, 84)), grade((222, 128, 84)), 4.0, None, bottom=band + 1.6)
        if biome == "coast":
            sea = np.full_like(x, 34.0)
            canvas.below(sea, grade((44, 120, 176)), grade((30, 130, 178)), 8.0)
    elif layer == MID:
        if biome == "coast":
            canvas.below(top - 1.0, grade(upper), grade(lower), 10.0)
            crest = _blend(grade(lower), grade((240, 250, 250)), 0.45)
            for row, period, salt in ((43.5, 17.0, 31), (46.6, 23.0, 32)):
                swell = row + 0.9 * _noise(_key(seed, salt), x, period)
                thick = 0.15 + 1.1 * _smoothstep(0.4, 0.7, _noise(_key(seed, salt + 5), x, period))
                canvas.below(swell, crest, crest, 4.0, None, bottom=swell + thick)
        else:
            strength = {"mountains": 0.14, "desert": 0.12, "forest": 0.0}.get(biome, 0.05)
            canvas.below(top, grade(upper), grade(lower), 12.0, _slope_shade(top_wide, step, strength)[1:-1])
    else:
        canvas.below(top, grade(upper), grade(lower), 12.0)
        rim = {"meadow": (140, 208, 84), "coast": (236, 248, 246), "desert": (252, 216, 146)}.get(biome)
        if rim is not None:
            canvas.below(top, grade(rim), grade(rim), 4.0, None, bottom=top + 1.3)
        # A broad path-like band of second tone gives the ground structure without fine noise.
        tone = _blend(lower, upper, 0.55) if biome != "mountains" else (100, 116, 94)
        band = 57.5 + 3.0 * _noise(_key(seed, 41), x, 37.0)
        thick = 3.2 * _smoothstep(0.35, 0.65, _noise(_key(seed, 42), x, 29.0))
        canvas.below(band, grade(_blend(tone, upper, 0.5)), grade(tone), 4.0, None, bottom=band + thick - canvas.edge)
    for item in _layout(seed, biome, layer, float(x[0]), float(x[-1])):
        if layer == GROUND:
            width = _EXTENT[item.kind][0] * item.size
            shadow = grade(_blend(lower, (20, 20, 50), 0.35))
            canvas.ellipse(item.x, item.base, 0.5 * width, 1.2, shadow, 0.55, soft=1.0)
        _draw_item(canvas, item, grade, biome)
    if layer == GROUND:
        _draw_tufts(canvas, scene, grade)


def _draw_tufts(canvas: _Canvas, scene: LandscapeScene, grade: _Grade) -> None:
    """Low plants and stones at the lower screen edge."""
    blade: Color = {
        "meadow": (50, 122, 40), "desert": (150, 124, 62), "mountains": (64, 88, 62), "coast": (146, 164, 84),
        "forest": (140, 60, 30), "snowfield": (170, 192, 226),
    }[scene.biome]  # fmt: skip
    left, right = float(canvas.x[0, 0]), float(canvas.x[0, -1])
    for cell in range(math.floor((left - 8) / 13.0), math.floor((right + 8) / 13.0) + 1):
        here, shift, size, flower = _uniforms(4, scene.seed, _LAYER_SALT[GROUND], 5, cell)
        if here > 0.6:
            continue
        x, y, s = (cell + shift) * 13.0, 64.0, 1.0 + 0.6 * size
        if scene.biome == "snowfield":
            canvas.ellipse(x, y, 6.0 * s, 2.6 * s, grade(blade), 0.7, soft=1.5)
            continue
        for dx, height in ((-2.6, 3.0), (0.0, 4.4), (2.6, 3.2)):
            canvas.polygon(
                [(x + 0.5 * dx * s - 1.1, y + 1.0), (x + 0.5 * dx * s + 1.1, y + 1.0), (x + dx * s, y - height * s)],
                grade(blade),
            )
        if scene.biome == "meadow" and flower < 0.6:
            petal = ((250, 214, 70), (246, 246, 250), (236, 110, 150))[int(flower * 5) % 3]
            canvas.ellipse(x, y - 4.6 * s, 1.5, 1.4, grade(petal))


def _draw_sky(scene: LandscapeScene, height: int, width: int) -> np.ndarray:
    """The sky at infinity, float32 [3, height, width]."""
    light = _LIGHT[scene.time_of_day]
    zenith, middle, horizon = (np.array(c, dtype=np.float64) for c in (light.zenith, light.middle, light.horizon))
    cover = {"clear": 0.0, "rain": 0.82, "snow": 0.72, "fog": 0.92}[scene.weather]
    veil = np.array({"rain": light.rain, "snow": light.snow, "fog": light.fog}.get(scene.weather, light.fog))
    scale_x, scale_y = width / REFERENCE_WIDTH, height / REFERENCE_HEIGHT
    canvas = _Canvas(0.0, 0.0, width * 2, height * 2, 2 * scale_x, 2 * scale_y)
    t = np.clip(canvas.y / 38.0, 0.0, 1.0)
    first = _smoothstep(0.0, 0.6, t)
    second = _smoothstep(0.4, 1.0, t)
    color = [zenith[c] + (middle[c] - zenith[c]) * first for c in range(3)]
    color = [color[c] + (horizon[c] - color[c]) * second for c in range(3)]
    fade = np.broadcast_to(np.stack(color), (3, height * 2, width * 2))
    canvas.put((slice(None), slice(None)), np.ones((height * 2, width * 2)), fade.astype(np.float32))
    sun_x, sun_y, _ = _uniforms(3, scene.seed, 51)
    x = 20.0 + 72.0 * sun_x
    if scene.time_of_day == "night":
        if scene.weather == "clear":
            for index in range(26):
                star_x, star_y, size, bright = _uniforms(4, scene.seed, 52, index)
                radius = 0.6 + 0.35 * size
                canvas.ellipse(
                    (index + 0.85 * star_x) / 26 * 112.0,
                    star_y * 30.0,
                    radius,
                    radius,
                    (236, 240, 255),
                    0.4 + 0.5 * bright,
                    soft=0.9,
                )
        y = 9.0 + 6.0 * sun_y
        canvas.ellipse(x, y, 7.0, 7.0, (130, 150, 210), 0.35, soft=9.0)
        canvas.ellipse(x, y, 4.6, 4.6, (244, 240, 218))
        canvas.ellipse(x - 1.2, y - 0.8, 1.2, 1.1, (214, 210, 196), 0.8, soft=0.8)
        canvas.ellipse(x + 1.5, y + 1.4, 0.9, 0.9, (214, 210, 196), 0.8, soft=0.8)
    else:
        y, radius, core, halo = {
            "dawn": (27.0, 5.0, (255, 246, 214), (255, 226, 200)),
            "day": (9.0 + 4.0 * sun_y, 5.0, (255, 244, 180), (255, 250, 220)),
            "dusk": (26.0, 7.0, (255, 226, 120), (255, 170, 70)),
        }[scene.time_of_day]
        canvas.ellipse(x, y, 2.0 * radius, 2.0 * radius, halo, 0.45, soft=2.2 * radius)
        canvas.ellipse(x, y, radius, radius, core, soft=1.0)
    image = canvas.buffer[:3] + (veil[:, None, None] - canvas.buffer[:3]) * cover
    return image.reshape(3, height, 2, width, 2).mean(axis=(2, 4)).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------------------
# Travellers

_TRAVELLER_EXTENT = {"balloon": (15.0, 22.0), "birds": (41.0, 20.0), "train": (49.5, 11.0), "airplane": (24.0, 11.0)}
_TRACK_ROW = 57.0


def _facing(scene: LandscapeScene) -> int:
    """+1 if train and airplane head to the right, -1 to the left."""
    return 1 if _uniforms(1, scene.seed, 61)[0] < 0.5 else -1


def _traveller_position(scene: LandscapeScene, frame: int) -> tuple[float, float]:
    """Center of the traveller on screen, in reference pixels; it drifts slowly and never leaves the screen."""
    phase, second, place = _uniforms(3, scene.seed, 62)
    time = frame / scene.fps
    sway = math.sin(2.0 * math.pi * (time / 31.0 + phase))
    bob = math.sin(2.0 * math.pi * (time / 9.0 + second))
    if scene.traveller == "train":
        return 56.0 + 16.0 * sway, _TRACK_ROW - 4.2
    if scene.traveller == "airplane":
        return 56.0 + _facing(scene) * (12.0 + 16.0 * sway), 14.0 + 4.0 * place + 1.2 * bob
    if scene.traveller == "birds":
        return 56.0 + 22.0 * sway, 16.0 + 3.0 * place + 1.6 * bob
    return 56.0 + 26.0 * sway, 15.5 + 3.0 * place + 2.0 * bob


class _Sprite:
    """A small picture that can be put anywhere with a quarter of a pixel of precision."""

    def __init__(
        self,
        width: float,
        height: float,
        scale_x: float,
        scale_y: float,
        draw: Callable[[_Canvas], None],
        flip: bool = False,
    ):
        ss = _SPRITE_SUPERSAMPLING
        # A margin of one pixel on every side leaves room for the sub-pixel shift.
        self.columns, self.rows = math.ceil(width * scale_x) + 2, math.ceil(height * scale_y) + 2
        left, top = -0.5 * self.columns / scale_x, -0.5 * self.rows / scale_y
        canvas = _Canvas(left, top, self.columns * ss, self.rows * ss, ss * scale_x, ss * scale_y)
        draw(canvas)
        self.hires = canvas.buffer[:, :, ::-1].copy() if flip else canvas.buffer
        self.scale_x, self.scale_y = scale_x, scale_y
        self.shifted: dict[tuple[int, int], np.ndarray] = {}

    def _at(self, shift_y: int, shift_x: int) -> np.ndarray:
        if (shift_y, shift_x) not in self.shifted:
            ss = _SPRITE_SUPERSAMPLING
            moved = np.zeros((4, (self.rows + 1) * ss, (self.columns + 1) * ss), dtype=np.float32)
            moved[3] = 1.0
            moved[:, shift_y : shift_y + self.rows * ss, shift_x : shift_x + self.columns * ss] = self.hires
            small = moved.reshape(4, self.rows + 1, ss, self.columns + 1, ss).mean(axis=(2, 4))
            self.shifted[shift_y, shift_x] = small
        return self.shifted[shift_y, shift_x]

    def put(self, image: np.ndarray, x: float, y: float) -> None:
        """Puts the sprite's center at (x, y) in reference pixels; `image` is float32 [3, height, width]."""
        ss = _SPRITE_SUPERSAMPLING
        fine_x = round((x * self.scale_x - 0.5 * self.columns) * ss)
        fine_y = round((y * self.scale_y - 0.5 * self.rows) * ss)
        column, row = fine_x // ss, fine_y // ss
        picture = self._at(fine_y % ss, fine_x % ss)
        height, width = image.shape[1:]
        r0, r1 = max(row, 0), min(row + picture.shape[1], height)
        c0, c1 = max(column, 0), min(column + picture.shape[2], width)
        if r0 >= r1 or c0 >= c1:
            return
        part = picture[:, r0 - row : r1 - row, c0 - column : c1 - column]
        target = image[:, r0:r1, c0:c1]
        target *= part[3]
        target += part[:3]


def _draw_balloon(canvas: _Canvas, scene: LandscapeScene) -> None:
    grade = _Grade(scene, "air")
    pick = int(_uniforms(1, scene.seed, 63)[0] * 4) % 4
    first, second = (
        ((226, 60, 54), (252, 238, 214)), ((40, 110, 200), (250, 214, 76)),
        ((240, 140, 40), (252, 244, 224)), ((140, 70, 170), (250, 200, 90)),
    )[pick]  # fmt: skip
    glow = (lambda c: _blend(grade(c), grade.glow(c), 0.35)) if grade.lit else grade
    canvas.polygon([(-5.4, 0.5), (5.4, 0.5), (1.7, 7.2), (-1.7, 7.2)], glow(first))
    canvas.ellipse(0.0, -3.4, 7.3, 7.4, glow(first))
    canvas.ellipse(0.0, -3.2, 4.6, 7.3, glow(second))
    canvas.polygon([(-3.6, 1.0), (3.6, 1.0), (1.1, 7.2), (-1.1, 7.2)], glow(second))
    canvas.ellipse(0.0, -3.2, 1.9, 7.3, glow(first))
    canvas.polygon([(-1.5, 1.0), (1.5, 1.0), (0.5, 7.2), (-0.5, 7.2)], glow(first))
    canvas.ellipse(-3.2, -6.4, 2.0, 2.2, glow(_blend(first, (255, 255, 255), 0.5)), 0.45, soft=2.0)
    canvas.line(-1.3, 7.0, -1.3, 9.0, 0.25, grade((90, 70, 50)))
    canvas.line(1.3, 7.0, 1.3, 9.0, 0.25, grade((90, 70, 50)))
    canvas.box(-2.0, 8.4, 2.0, 11.0, grade((142, 92, 48)))


def _draw_airplane(canvas: _Canvas, scene: LandscapeScene) -> None:
    grade = _Grade(scene, "air")
    body, belly, accent = grade((246, 248, 252)), grade((186, 198, 214)), grade((214, 62, 56))
    trail = _blend(grade((255, 255, 255)), _LIGHT[scene.time_of_day].flake, 0.5)
    for index in range(12):
        x = -11.0 - 2.4 * index
        canvas.line(x, 0.8, x - 2.4, 0.8, 0.95 + 0.05 * index, trail, 0.7 * (1.0 - index / 12.0), soft=1.2)
    canvas.polygon([(-10.8, -5.0), (-8.4, -5.0), (-5.0, -0.6), (-10.0, -0.4)], accent)
    canvas.line(-9.0, 0.2, 8.2, 0.4, 2.1, body)
    canvas.ellipse(9.0, 0.6, 2.8, 1.7, body)
    canvas.line(-8.0, 1.6, 8.5, 1.7, 0.75, belly)
    canvas.line(-5.6, -0.2, 6.2, -0.1, 0.55, grade.glow((255, 222, 130)) if grade.lit else grade((60, 96, 150)))
    canvas.polygon([(-1.8, 1.0), (3.2, 1.0), (-3.4, 5.2), (-5.8, 5.2)], grade((150, 164, 186)))
    canvas.polygon([(-10.4, 0.2), (-7.4, 0.2), (-10.8, 2.0), (-12.0, 2.0)], grade((150, 164, 186)))


def _draw_train(canvas: _Canvas, scene: LandscapeScene, turn: float) -> None:
    """Locomotive at the right end; `turn` in [0, 1) is the position of the wheels."""
    grade = _Grade(scene, "track")
    pick = int(_uniforms(1, scene.seed, 64)[0] * 3) % 3
    coach = ((188, 44, 48), (36, 96, 168), (38, 128, 84))[pick]
    glass = grade.glow((255, 222, 126)) if grade.lit else grade((222, 236, 246))
    dark, steel = grade((40, 42, 52)), grade((168, 174, 186))
    for index in range(3):
        left = -24.0 + 11.8 * index
        canvas.line(left + 10.0, 2.2, left + 12.4, 2.2, 0.5, dark)
        canvas.box(left, -3.4, left + 10.6, 2.6, grade(coach))
        canvas.box(left - 0.2, -4.3, left + 10.8, -3.0, grade(_blend(coach, (235, 232, 226), 0.65)))
        for window in (1.2, 4.3, 7.4):
            canvas.box(left + window, -2.2, left + window + 2.0, 0.2, glass)
    canvas.box(11.6, -4.6, 16.8, 2.6, grade(_blend(coach, (20, 20, 30), 0.35)))
    canvas.box(11.0, -5.4, 17.4, -4.2, dark)
    canvas.box(12.8, -3.2, 15.4, -0.8, glass)
    canvas.box(16.0, -2.2, 23.4, 2.6, grade((52, 56, 70)))
    canvas.ellipse(23.2, 0.2, 1.2, 2.4, grade((74, 80, 96)))
    canvas.box(20.2, -5.0, 22.2, -1.8, dark)
    canvas.box(19.7, -5.5, 22.7, -4.5, dark)
    canvas.box(17.6, -2.5, 18.4, 2.6, grade((222, 178, 70)))
    canvas.polygon([(22.8, 2.0), (24.6, 4.0), (22.8, 4.0)], grade((206, 60, 50)))
    wheels = [-24.0 + 11.8 * index + offset for index in range(3) for offset in (2.2, 8.4)] + [13.4, 17.4, 21.4]
    for x in wheels:
        canvas.ellipse(x, 3.0, 1.5, 1.5, dark)
        angle = 2.0 * math.pi * turn
        canvas.ellipse(x + 0.55 * math.cos(angle), 3.0 + 0.55 * math.sin(angle), 0.6, 0.6, steel)


def _draw_bird(canvas: _Canvas, scene: LandscapeScene, flap: float) -> None:
    grade = _Grade(scene, "air")
    ink = (206, 214, 236) if scene.time_of_day == "night" else grade((44, 44, 62))
    lift = 2.2 * math.sin(2.0 * math.pi * flap)
    canvas.line(0.0, 0.3, -2.0, -0.9 - 0.4 * lift, 0.62, ink)
    canvas.line(-2.0, -0.9 - 0.4 * lift, -4.0, -0.2 - lift, 0.5, ink)
    canvas.line(0.0, 0.3, 2.0, -0.9 - 0.4 * lift, 0.62, ink)
    canvas.line(2.0, -0.9 - 0.4 * lift, 4.0, -0.2 - lift, 0.5, ink)
    canvas.ellipse(0.0, 0.4, 0.9, 0.75, ink)


_FLAPS = 8
_WHEEL_STEPS = 4


class _Traveller:
    def __init__(self, scene: LandscapeScene, scale_x: float, scale_y: float):
        self.scene = scene
        kind = scene.traveller
        flip = _facing(scene) < 0
        self.sprites: list[_Sprite] = []
        if kind == "balloon":
            self.sprites = [_Sprite(16, 23, scale_x, scale_y, lambda canvas: _draw_balloon(canvas, scene))]
        elif kind == "airplane":
            self.sprites = [_Sprite(82, 13, scale_x, scale_y, lambda canvas: _draw_airplane(canvas, scene), flip)]
        elif kind == "train":
            for step in range(_WHEEL_STEPS):
                turn = step / _WHEEL_STEPS
                self.sprites.append(
                    _Sprite(51, 13, scale_x, scale_y, lambda canvas, turn=turn: _draw_train(canvas, scene, turn), flip)
                )
            smoke = _Grade(scene, "track")((236, 236, 240))
            self.puffs = [
                _Sprite(9, 9, scale_x, scale_y, lambda canvas, age=age: canvas.ellipse(
                    0, 0, 1.3 + 2.2 * age, 1.2 + 1.7 * age, smoke, 0.85 * (1.0 - age) ** 1.2, soft=1.2 + 1.2 * age
                ))
                for age in (np.arange(16) / 16.0).tolist()
            ]  # fmt: skip
        elif kind == "birds":
            for step in range(_FLAPS):
                flap = step / _FLAPS
                self.sprites.append(
                    _Sprite(11, 9, scale_x, scale_y, lambda canvas, flap=flap: _draw_bird(canvas, scene, flap))
                )
            count = 4 + int(_uniforms(1, scene.seed, 65)[0] * 3)
            rank = [(0.0, 0.0), (-10.0, 3.4), (9.6, 4.2), (-15.5, 8.6), (1.0, 8.8), (14.0, -3.6)][:count]
            self.flock = [(x, y - 3.0, _uniforms(1, scene.seed, 66, i)[0]) for i, (x, y) in enumerate(rank)]

    def put(self, image: np.ndarray, frame: int) -> None:
        scene, time = self.scene, frame / self.scene.fps
        if scene.traveller == "none":
            return
        x, y = _traveller_position(scene, frame)
        if scene.traveller == "train":
            facing = _facing(scene)
            for index in range(6):
                age = (time / 3.0 + index / 6.0) % 1.0
                self.puffs[int(age * 16)].put(image, x + facing * (21.2 - 26.0 * age), y - 6.4 - 7.0 * math.sqrt(age))
            self.sprites[int(time * 6.0 * facing) % _WHEEL_STEPS].put(image, x, y)
        elif scene.traveller == "birds":
            for dx, dy, phase in self.flock:
                flap = int((time * 1.3 + phase) * _FLAPS) % _FLAPS
                wander = 0.9 * math.sin(2.0 * math.pi * (time / 5.0 + phase))
                self.sprites[flap].put(image, x + dx + wander, y + dy + 0.6 * wander)
        else:
            self.sprites[0].put(image, x, y)


def _draw_track(scene: LandscapeScene, height: int, width: int) -> np.ndarray:
    """The railway embankment, the same in every column: float32 [4, height, width]."""
    scale_x, scale_y = width / REFERENCE_WIDTH, height / REFERENCE_HEIGHT
    canvas = _Canvas(0.0, 0.0, width, height * 2, scale_x, 2 * scale_y)
    grade = _Grade(scene, "track")
    bank: Color = {
        "meadow": (128, 124, 92), "desert": (186, 120, 74), "mountains": (96, 96, 98), "coast": (150, 134, 112),
        "forest": (112, 78, 52), "snowfield": (172, 184, 206),
    }[scene.biome]  # fmt: skip
    flat = np.full(width, _TRACK_ROW)
    canvas.below(flat + 0.4, grade(bank), grade(_blend(bank, (30, 30, 40), 0.3)), 4.0, None, bottom=flat + 4.0)
    canvas.below(flat, grade((74, 70, 74)), grade((74, 70, 74)), 4.0, None, bottom=flat + 0.9)
    return canvas.buffer.reshape(4, height, 2, width).mean(axis=2)


# ---------------------------------------------------------------------------------------------------------------------
# Weather


class _Weather:
    """Rain, snow and drifting mist: periodic pictures that slide over the screen with time."""

    def __init__(self, scene: LandscapeScene, height: int, width: int):
        self.scene, self.height, self.width = scene, height, width
        self.scale_x, self.scale_y = width / REFERENCE_WIDTH, height / REFERENCE_HEIGHT
        light = _LIGHT[scene.time_of_day]
        # Each sheet: coverage, pixels per second across and down, and the width of a sideways sway.
        self.sheets: list[tuple[np.ndarray, float, float, float]] = []
        color: Color = (0, 0, 0)
        if scene.weather == "rain":
            color = _blend(light.flake, (170, 196, 226), 0.5)
            far = self._sheet(
                71, 30, lambda c, x, y, u: c.line(x + 0.8, y - 3.2, x - 0.8, y + 3.2, 0.5, color, 0.42, soft=0.7)
            )
            near = self._sheet(
                72, 24, lambda c, x, y, u: c.line(x + 1.2, y - 4.8, x - 1.2, y + 4.8, 0.75, color, 0.55, soft=0.7)
            )
            self.sheets = [(far, -15.0, 60.0, 0.0), (near, -21.0, 84.0, 0.0)]
        elif scene.weather == "snow":
            color = light.flake
            far = self._sheet(
                73, 60, lambda c, x, y, u: c.ellipse(x, y, 0.8 + 0.3 * u, 0.8 + 0.3 * u, color, 0.75, soft=0.9)
            )
            near = self._sheet(
                74, 40, lambda c, x, y, u: c.ellipse(x, y, 1.2 + 0.5 * u, 1.2 + 0.5 * u, color, 0.95, soft=0.9)
            )
            self.sheets = [(far, -1.5, 8.0, 1.6), (near, -3.0, 14.0, 3.0)]
        elif scene.weather == "fog":
            color = light.fog
            # Banks gather around the feet of the hills and do not fall.
            mist = self._sheet(
                75, 9, lambda c, x, y, u: c.ellipse(x, y, 26.0, 5.0 + 3.0 * u, color, 0.34, soft=9.0), 34.0, 66.0
            )
            self.sheets = [(mist, -3.0, 0.0, 0.0)]
        self.color = np.array(color, dtype=np.float32)[:, None, None]

    def _sheet(
        self,
        salt: int,
        count: int,
        draw: Callable[[_Canvas, float, float, float], None],
        top: float = 0.0,
        bottom: float = 2.0 * REFERENCE_HEIGHT,
    ) -> np.ndarray:
        """Coverage float32 [3 H + 1, 2 W + 1] of a picture with period (2 H, W), repeated for plain slicing.

        `count` particles are spread evenly over the rows `top` to `bottom` of the period.
        """
        height, width = self.height, self.width
        canvas = _Canvas(0.0, 0.0, 2 * width, 4 * height, 2 * self.scale_x, 2 * self.scale_y)
        for index in range(count):
            u, v, size = _uniforms(3, self.scene.seed, salt, index)
            x, y = u * REFERENCE_WIDTH, top + (bottom - top) * (index + 0.8 * v) / count
            for dx in (-REFERENCE_WIDTH, 0, REFERENCE_WIDTH):
                for dy in (-2 * REFERENCE_HEIGHT, 0, 2 * REFERENCE_HEIGHT):
                    draw(canvas, x + dx, y + dy, size)
        cover = (1.0 - canvas.buffer[3]).reshape(2 * height, 2, width, 2).mean(axis=(1, 3))
        return np.tile(cover, (2, 3))[: 3 * height + 1, : 2 * width + 1].copy()

    def put(self, image: np.ndarray, frame: int) -> None:
        time, height, width = frame / self.scene.fps, self.height, self.width
        for sheet, across, down, sway in self.sheets:
            shift_x = (-time * across - sway * math.sin(2.0 * math.pi * time / 4.7)) * self.scale_x
            shift_y = (-time * down) * self.scale_y
            if self.scene.weather == "rain":
                # Whole pixels: rain is too fast for the eye to see the step, and streaks stay crisp.
                shift_x, shift_y = float(round(shift_x)), float(round(shift_y))
            shift_x, shift_y = shift_x % width, shift_y % (2 * height)
            column, row = min(int(shift_x), width - 1), min(int(shift_y), 2 * height - 1)
            fx, fy = np.float32(shift_x - column), np.float32(shift_y - row)
            cover = sheet[row : row + height + 1, column : column + width + 1]
            if fx or fy:
                cover = cover[:, :-1] + fx * (cover[:, 1:] - cover[:, :-1])
                cover = cover[:-1] + fy * (cover[1:] - cover[:-1])
            else:
                cover = cover[:-1, :-1]
            image += (self.color - image) * cover


# ---------------------------------------------------------------------------------------------------------------------
# World


class _SceneArt:
    """What is drawn once per scene: sky, sprites, particle sheets, and tiles of the layers on demand."""

    def __init__(self, scene: LandscapeScene, height: int, width: int):
        self.scene, self.height, self.width = scene, height, width
        self.scale_x, self.scale_y = width / REFERENCE_WIDTH, height / REFERENCE_HEIGHT
        self.sky = _draw_sky(scene, height, width)
        self.track = _draw_track(scene, height, width) if scene.traveller == "train" else None
        self.traveller = _Traveller(scene, self.scale_x, self.scale_y)
        self.weather = _Weather(scene, height, width)
        self.tiles: OrderedDict[tuple[str, int], tuple[np.ndarray, int, int]] = OrderedDict()

    def tile(self, layer: str, index: int) -> tuple[np.ndarray, int, int]:
        """Columns [index * tile, (index + 1) * tile) of a layer.

        Returns:
            float32 [phase, 4, height, tile], where phase p is the layer shifted by p / `_SUPERSAMPLING` pixels, and
            the rows [first, last) outside of which it is empty.
        """
        key = (layer, index)
        if key in self.tiles:
            self.tiles.move_to_end(key)
            return self.tiles[key]
        ss = _SUPERSAMPLING
        canvas = _Canvas(
            index * _TILE / self.scale_x, 0.0, (_TILE + 1) * ss, self.height * ss, ss * self.scale_x, ss * self.scale_y
        )
        _draw_layer(canvas, self.scene, layer)
        # Strided sums: numpy's mean over axes of length 2 is several times slower.
        rows = sum(canvas.buffer[:, r::ss] for r in range(ss))
        last = _TILE * ss
        phases = np.stack([sum(rows[:, :, p + c : p + c + last : ss] for c in range(ss)) for p in range(ss)])
        phases *= np.float32(1.0 / ss**2)
        used = np.flatnonzero((phases[:, 3] < 1.0).any(axis=(0, 2)))
        first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (self.height, 0)
        self.tiles[key] = (phases, first, last)
        while len(self.tiles) > _MAX_TILES:
            self.tiles.popitem(last=False)
        return self.tiles[key]

    def put_layer(self, image: np.ndarray, layer: str, camera: float) -> None:
        """Composites a layer over `image`, float32 [3, height, width], in place."""
        position = camera * PARALLAX[layer] * self.scale_x
        column = math.floor(position)
        sub = (position - column) * _SUPERSAMPLING
        phase = min(int(sub), _SUPERSAMPLING - 1)
        fraction = np.float32(sub - phase)
        start = column // _TILE
        # One more column than the screen, for the second picture of the interpolation.
        tiles = [self.tile(layer, index) for index in range(start, (column + self.width) // _TILE + 1)]
        first, last = min(t[1] for t in tiles), max(t[2] for t in tiles)
        if first >= last:
            return
        offset = column - start * _TILE

        def picture(which: int) -> np.ndarray:
            extra, which = divmod(which, _SUPERSAMPLING)
            strip = np.concatenate([t[0][which, :, first:last] for t in tiles], axis=2)
            return strip[:, :, offset + extra : offset + extra + self.width]

        near = picture(phase)
        if fraction:
            near = near + fraction * (picture(phase + 1) - near)
        target = image[:, first:last]
        target *= near[3]
        target += near[:3]


class LandscapeWorld:
    """Draws landscape scenes.

    Args:
        height: frame height in pixels, a multiple of 8.
        width: frame width in pixels, a multiple of 8.
        fps: frames per second of the scenes it makes.

    Raises:
        LandscapeError: if a size is not a positive multiple of 8, or fps < 1.
    """

    def __init__(self, height: int = 64, width: int = 112, fps: int = 12):
        for name, value in (("height", height), ("width", width)):
            if value < 8 or value % 8:
                raise LandscapeError(
                    f"{name} is {value}; allowed: positive multiples of 8, nearest: {max(8, 8 * round(value / 8))}"
                )
        if fps < 1:
            raise LandscapeError(f"fps is {fps}; allowed: integers >= 1, nearest: 1")
        self.height, self.width, self.fps = height, width, fps
        self._art: OrderedDict[tuple, _SceneArt] = OrderedDict()

    def scene(
        self,
        seed: int,
        seconds: float = 60.0,
        biome: str | None = None,
        time_of_day: str | None = None,
        weather: str | None = None,
        traveller: str | None = None,
        moves: Sequence[CameraMove] | None = None,
    ) -> LandscapeScene:
        """Makes a scene; whatever is None is drawn from the seed.

        Args:
            seed: any integer.
            seconds: duration if `moves` is None; otherwise the moves decide.
            biome, time_of_day, weather, traveller: attribute values.
            moves: camera moves.

        Raises:
            LandscapeError: for an unknown name or a duration that is not positive.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            raise LandscapeError(f"seconds is {seconds}; allowed: > 0, e.g. 60.0")
        u = _uniforms(4, seed, 81)

        def choose(given: str | None, allowed: tuple[str, ...], number: float) -> str:
            return allowed[int(number * len(allowed))] if given is None else given

        return LandscapeScene(
            seed=seed,
            biome=choose(biome, BIOMES, u[0]),
            time_of_day=choose(time_of_day, TIMES, u[1]),
            weather=choose(weather, WEATHERS, u[2]),
            traveller=choose(traveller, TRAVELLERS, u[3]),
            moves=_draw_moves(seed, seconds) if moves is None else tuple(moves),
            fps=self.fps,
        )

    def render(self, scene: LandscapeScene, start_frame: int = 0, num_frames: int | None = None) -> np.ndarray:
        """Renders frames; each one is a function of the scene and its own index alone.

        Args:
            scene: what to draw.
            start_frame: index of the first frame.
            num_frames: how many; None renders to the end of the scene.

        Returns:
            uint8 [num_frames, height, width, 3].

        Raises:
            LandscapeError: if the range leaves the scene.
        """
        if num_frames is None:
            num_frames = scene.num_frames - start_frame
        if start_frame < 0 or num_frames < 0 or start_frame + num_frames > scene.num_frames:
            raise LandscapeError(
                f"frames [{start_frame}, {start_frame + num_frames}) are not in the scene; allowed: within "
                f"[0, {scene.num_frames}), nearest start: {min(max(start_frame, 0), scene.num_frames - 1)}"
            )
        frames = np.empty((num_frames, self.height, self.width, 3), dtype=np.uint8)
        for index in range(num_frames):
            frame = start_frame + index
            frames[index] = self.view(scene, scene.camera_x(frame), frame)
        return frames

    def view(self, scene: LandscapeScene, camera_x: float, frame: int) -> np.ndarray:
        """What is seen from any place at the time of a frame, whatever the scene's camera does.

        Args:
            scene: what to draw.
            camera_x: as `LandscapeScene.camera_x` returns it.
            frame: index of the frame, which moves traveller and weather.

        Returns:
            uint8 [height, width, 3].
        """
        art = self._scene_art(scene)
        image = self._compose(art, camera_x, art.traveller, frame)
        art.weather.put(image, frame)
        return _to_uint8(image)

    def background(self, scene: LandscapeScene, camera_x: float) -> np.ndarray:
        """What stands still, seen from `camera_x`: without traveller, particles and drifting mist.

        Args:
            scene: what to draw.
            camera_x: as `LandscapeScene.camera_x` returns it.

        Returns:
            uint8 [height, width, 3].
        """
        return _to_uint8(self._compose(self._scene_art(scene), camera_x, None, 0))

    def _scene_art(self, scene: LandscapeScene) -> _SceneArt:
        key = (scene.seed, scene.fps, *scene.attributes.values())
        if key not in self._art:
            self._art[key] = _SceneArt(scene, self.height, self.width)
            while len(self._art) > _MAX_SCENES:
                self._art.popitem(last=False)
        self._art.move_to_end(key)
        return self._art[key]

    def _compose(self, art: _SceneArt, camera: float, traveller: _Traveller | None, frame: int) -> np.ndarray:
        """float32 [3, height, width] in 0..255."""
        image = art.sky.copy()
        for layer in (CLOUDS, FAR, MID, GROUND):
            art.put_layer(image, layer, camera)
            if layer == MID and traveller is not None and art.track is None:
                traveller.put(image, frame)
        if art.track is not None:
            # The railway runs in front of the trees: dense woods would hide the train.
            image *= art.track[3]
            image += art.track[:3]
            if traveller is not None:
                traveller.put(image, frame)
        return image


def _to_uint8(image: np.ndarray) -> np.ndarray:
    return np.clip(image + 0.5, 0.0, 255.0).astype(np.uint8).transpose(1, 2, 0)


def _draw_moves(seed: int, seconds: float) -> tuple[CameraMove, ...]:
    """Camera moves of 4 to 12 seconds each; going there and coming back is common."""
    moves: list[CameraMove] = []
    left, index = seconds, 0
    while left > 1e-6:
        length, turn, pace, direction = _uniforms(4, seed, 82, index)
        duration = 4.0 + round(16.0 * length) * 0.5
        speed = SLOW_SPEED if pace < 0.5 else FAST_SPEED
        previous = moves[-1] if moves else None
        if previous is None or previous.kind == "hold":
            # After a pause, mostly return along the pan before it.
            back = next((move for move in reversed(moves) if move.kind != "hold"), None)
            if back is not None and turn < 0.6:
                kind, duration, speed = _opposite(back.kind), back.seconds, back.speed
            else:
                kind = "pan right" if direction < 0.5 else "pan left"
                if previous is None and turn < 0.1:
                    kind = "hold"
        elif turn < 0.5:
            kind, duration, speed = _opposite(previous.kind), previous.seconds, previous.speed
        elif turn < 0.75:
            kind, duration = "hold", min(duration, 6.0)
        else:
            kind = previous.kind
            speed = FAST_SPEED if previous.speed == SLOW_SPEED else SLOW_SPEED
        if left - duration < 4.0:
            # Too little would be left for another move: this one takes the rest, or shares it evenly.
            duration = left if left <= 12.0 else 0.5 * left
        moves.append(CameraMove(kind, duration, 0.0 if kind == "hold" else speed))
        left -= duration
        index += 1
    return tuple(moves)


def _opposite(kind: str) -> str:
    return "pan left" if kind == "pan right" else "pan right"
