"""Floor plans, wallpapers, pictures and pillars of `RoomWorld`: everything in a scene comes from its seed."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass

import numpy as np

# Texels along one wall face (one cell), and along one cell of floor or ceiling.
FACE_TEXELS = 64
FLOOR_TEXELS = 32
# Sides of a free cell in the order of `RoomScene.faces`.
EAST, NORTH, WEST, SOUTH = range(4)
PILLAR_RADIUS = 0.17

PATTERNS = ("bricks", "planks", "stripes", "checks", "dots", "waves", "diamonds", "panels")


@dataclass(frozen=True, eq=False)
class RoomScene:
    """Rooms with doors between them on a grid of cells; cell (row j, column i) is x in [i, i + 1), y in [j, j + 1).

    Attributes:
        seed: Where it comes from.
        solid: bool `(rows, columns)`; True where a wall is.
        rooms: int `(rows, columns)`; number of the room a free cell belongs to, -1 in walls and doorways.
        faces: int `(rows, columns, 4)`; texture on each side of a free cell, where a wall is there.
        textures: uint8 `(n, 64, 64, 3)`, row 0 at the ceiling, column 0 at the left of who looks at it.
        floor: uint8 `(32 rows, 32 columns, 3)`, texel (0, 0) at x = y = 0.
        ceiling: uint8 of the same size.
        pillars: float64 `(n, 2)`; centers of round pillars of radius `PILLAR_RADIUS`.
        pillar_textures: int `(n,)`.
    """

    seed: int
    solid: np.ndarray
    rooms: np.ndarray
    faces: np.ndarray
    textures: np.ndarray
    floor: np.ndarray
    ceiling: np.ndarray
    pillars: np.ndarray
    pillar_textures: np.ndarray

    def mirrored(self) -> RoomScene:
        """The scene in a mirror: what was at (x, y) is at (columns - x, y)."""
        return RoomScene(
            self.seed,
            self.solid[:, ::-1],
            self.rooms[:, ::-1],
            self.faces[:, ::-1, [WEST, NORTH, EAST, SOUTH]],
            self.textures[:, :, ::-1],
            self.floor[:, ::-1],
            self.ceiling[:, ::-1],
            np.stack([self.solid.shape[1] - self.pillars[:, 0], self.pillars[:, 1]], axis=1),
            self.pillar_textures,
        )


def make_scene(seed: int, across: int, down: int) -> RoomScene:
    """Draws a scene of `across` x `down` rooms.

    Args:
        seed: Same seed, same scene.
        across: Rooms along x.
        down: Rooms along y.
    """
    rng = np.random.default_rng((seed, across, down))
    widths, heights = rng.integers(3, 6, across), rng.integers(3, 6, down)
    lefts = 1 + np.concatenate([[0], np.cumsum(widths + 1)[:-1]])
    tops = 1 + np.concatenate([[0], np.cumsum(heights + 1)[:-1]])
    shape = (int(heights.sum()) + down + 1, int(widths.sum()) + across + 1)
    rooms = np.full(shape, -1)
    for room in range(across * down):
        row, column = divmod(room, across)
        rooms[tops[row] : tops[row] + heights[row], lefts[column] : lefts[column] + widths[column]] = room
    solid = rooms < 0
    for row, column in _doors(rng, across, down, lefts, tops, widths, heights):
        solid[row, column] = False

    # Ten colors around the wheel would repeat between rooms; hues are spread over all of their walls and shuffled.
    hues = (rng.permutation(4 * across * down) + rng.random()) / (4 * across * down)
    patterns = np.concatenate([rng.permutation(len(PATTERNS)) for _ in range(across * down)])[: 4 * across * down]
    textures = [_stone(rng)]
    faces = np.zeros((*shape, 4), int)
    for room in range(across * down):
        cells = rooms == room
        for side in range(4):
            wall = _pattern(rng, PATTERNS[patterns[4 * room + side]], hues[4 * room + side])
            textures.append(wall)
            faces[cells, side] = plain = len(textures) - 1
            # A picture on every third piece of wall, at least one per side.
            pieces = np.argwhere(cells & _neighbor(solid, side))
            for row, column in rng.permutation(pieces)[: max(1, len(pieces) // 3)]:
                textures.append(_hang_picture(rng, textures[plain]))
                faces[row, column, side] = len(textures) - 1

    pillars, pillar_textures = [], []
    for room in range(across * down):
        row, column = divmod(room, across)
        if min(widths[column], heights[row]) < 4:
            continue
        # Off the middle, and a cell away from the walls: no door is ever blocked.
        corner = np.array([lefts[column], tops[row]])
        pillars.append(corner + 1.5 + rng.random(2) * (np.array([widths[column], heights[row]]) - 3.0))
        textures.append(_pillar(rng))
        pillar_textures.append(len(textures) - 1)
    return RoomScene(
        seed,
        solid,
        rooms,
        faces,
        np.stack(textures),
        _floors(rng, rooms),
        _ceilings(rng, rooms),
        np.array(pillars).reshape(-1, 2),
        np.array(pillar_textures, int),
    )


def _doors(rng, across, down, lefts, tops, widths, heights) -> list[tuple[int, int]]:
    """One door in every wall between two rooms: one can walk in circles."""
    doors = []
    for row in range(down):
        for column in range(across):
            if column + 1 < across:
                doors.append((int(tops[row] + rng.integers(heights[row])), int(lefts[column + 1] - 1)))
            if row + 1 < down:
                doors.append((int(tops[row + 1] - 1), int(lefts[column] + rng.integers(widths[column]))))
    return doors


def _neighbor(cells: np.ndarray, side: int) -> np.ndarray:
    """What lies on a side of each cell (the map's border is never asked)."""
    shift, axis = {EAST: (-1, 1), NORTH: (-1, 0), WEST: (1, 1), SOUTH: (1, 0)}[side]
    return np.roll(cells, shift, axis)


# ---------------------------------------------------------------------------------------------------------------------
# Surfaces


def _color(hue: float, saturation: float, value: float) -> np.ndarray:
    return np.array(colorsys.hsv_to_rgb(hue % 1.0, saturation, value)) * 255


def _grain(rng: np.random.Generator, image: np.ndarray, strength: float = 5.0) -> np.ndarray:
    """Soft noise of four texels' size, the same in all channels."""
    height, width = image.shape[:2]
    coarse = rng.normal(0, strength, (height // 4 + 1, width // 4 + 1))
    noise = coarse.repeat(4, 0).repeat(4, 1)[:height, :width]
    return np.clip(image + noise[..., None], 0, 255).astype(np.uint8)


def _pattern(rng: np.random.Generator, kind: str, hue: float) -> np.ndarray:
    """A wallpaper that continues from face to face."""
    n = FACE_TEXELS
    y, x = np.mgrid[0:n, 0:n]
    ground = _color(hue, rng.uniform(0.5, 0.75), rng.uniform(0.7, 0.9))
    figure = _color(hue + rng.choice([0.5, 0.08, -0.08]), rng.uniform(0.3, 0.7), rng.choice([0.42, 0.98]))
    if kind == "bricks":
        shifted = x + np.where(y // 16 % 2, 16, 0)
        mask = (y % 16 < 2) | (shifted % 32 < 2)
    elif kind == "planks":
        mask = x % 16 < 3
    elif kind == "stripes":
        mask = y % 32 < 14
    elif kind == "checks":
        mask = (x // 16 + y // 16) % 2 == 0
    elif kind == "dots":
        mask = (x % 32 - 15.5) ** 2 + (y % 32 - 15.5) ** 2 < 81
    elif kind == "waves":
        mask = (y + np.round(5 * np.sin(2 * np.pi * x / 32))) % 21 < 8
    elif kind == "diamonds":
        mask = np.abs(x % 32 - 15.5) + np.abs(y % 32 - 15.5) < 11
    else:
        inner = (np.abs(x % 32 - 15.5) < 11) & (np.abs(y - 24) < 18)
        mask = inner & ~((np.abs(x % 32 - 15.5) < 8) & (np.abs(y - 24) < 15))
    image = np.where(mask[..., None], figure, ground)
    # Skirting board and cornice make the edges of a room legible.
    image[y >= n - 6] = ground * 0.35
    image[y < 3] = 0.5 * ground + 110
    return _grain(rng, image)


def _stone(rng: np.random.Generator) -> np.ndarray:
    """The inside of doorways."""
    y, x = np.mgrid[0:FACE_TEXELS, 0:FACE_TEXELS]
    return _grain(rng, np.where(((y % 16 < 2) | (x % 64 < 2))[..., None], 95.0, 168.0) * np.ones(3), 9.0)


def _pillar(rng: np.random.Generator) -> np.ndarray:
    y, x = np.mgrid[0:FACE_TEXELS, 0:FACE_TEXELS]
    hue = rng.random()
    one, two = _color(hue, 0.9, 0.95), _color(hue + 0.45, 0.85, 0.55)
    rings = y // 11 % 2 == 0
    spiral = (x + y) // 16 % 2 == 0
    return _grain(rng, np.where((rings if rng.random() < 0.5 else spiral)[..., None], one, two))


def _hang_picture(rng: np.random.Generator, wall: np.ndarray) -> np.ndarray:
    """A face with a framed painting of a few large shapes."""
    image = wall.copy()
    top, bottom, left, right = 12, 46, 10, 54
    image[top:bottom, left:right] = _color(rng.random(), 0.5, rng.choice([0.12, 0.95]))
    y, x = np.mgrid[top + 3 : bottom - 3, left + 3 : right - 3].astype(float)
    v, u = (y - top - 3) / (bottom - top - 6), (x - left - 3) / (right - left - 6)
    hue = rng.random()
    canvas = np.where(v[..., None] < rng.uniform(0.3, 0.7), _color(hue, 0.55, 0.95), _color(hue + 0.3, 0.7, 0.6))
    for _ in range(rng.integers(1, 4)):
        center, size = rng.uniform(0.15, 0.85, 2), rng.uniform(0.12, 0.3)
        across, along = np.abs(u - center[0]) * 1.3, np.abs(v - center[1])
        inside = [across**2 + along**2 < size**2, np.maximum(across, along) < size * 0.85, across + along < size * 1.2]
        canvas[inside[rng.integers(3)]] = _color(rng.random(), 0.9, rng.uniform(0.5, 1.0))
    image[top + 3 : bottom - 3, left + 3 : right - 3] = canvas
    return image


def _floors(rng: np.random.Generator, rooms: np.ndarray) -> np.ndarray:
    """Boards, tiles or carpet per room, with a rug."""
    n = FLOOR_TEXELS
    image = np.full((rooms.shape[0] * n, rooms.shape[1] * n, 3), 110.0)
    for room in range(rooms.max() + 1):
        (top, left), (bottom, right) = (edge * n for edge in _extent(rooms == room))
        y, x = np.mgrid[top:bottom, left:right]
        hue, kind = rng.random(), room % 3
        one = _color(hue, 0.35, 0.62)
        two = _color(hue + rng.uniform(-0.1, 0.1), 0.5, 0.42)
        mask = [y % 16 < 2, (x // 32 + y // 32) % 2 == 0, (x // 8 + y // 8) % 2 == 0][kind]
        image[top:bottom, left:right] = np.where(mask[..., None], two, one)
        v, u = (y - top) / (bottom - top) - 0.5, (x - left) / (right - left) - 0.5
        reach = np.maximum(np.abs(u), np.abs(v)) if rng.random() < 0.5 else np.hypot(u, v)
        rug = rng.random()
        for size, value in ((0.36, 0.35), (0.32, 0.9), (0.2, 0.55)):
            image[top:bottom, left:right][reach < size] = _color(rug + 0.2 * (value > 0.5), 0.7, value)
    return _grain(rng, image, 4.0)


def _ceilings(rng: np.random.Generator, rooms: np.ndarray) -> np.ndarray:
    """Light boards and lamps."""
    n = FLOOR_TEXELS
    image = np.full((rooms.shape[0] * n, rooms.shape[1] * n, 3), 120.0)
    for room in range(rooms.max() + 1):
        (top, left), (bottom, right) = (edge * n for edge in _extent(rooms == room))
        y, x = np.mgrid[top:bottom, left:right]
        board = _color(rng.random(), 0.18, 0.72)
        beams = (x if room % 2 else y) % 64 < 8
        image[top:bottom, left:right] = np.where(beams[..., None], board * 0.5, board)
        lamp = np.hypot(y - (top + bottom) / 2, x - (left + right) / 2)
        image[top:bottom, left:right][lamp < 18] = (255, 246, 205)
    return _grain(rng, image, 3.0)


def _extent(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    places = np.argwhere(cells)
    return places.min(0), places.max(0) + 1
