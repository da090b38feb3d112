"""Rooms to walk through: a ray caster in numpy whose picture is a function of the pose alone.

What the camera sees at (x, y, heading) never depends on how it came there, so a walk played backwards is the walk
rendered at the reversed poses, to the last bit, and coming back to a place shows exactly what was there. That makes it
a benchmark for world models: every generated frame has a truth.

One ray is cast per column and frame; walls, floor and ceiling are looked up in mipmaps of one table of colors, and a
whole batch of frames is drawn at once.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.worlds.exploration import MotionStatistics, explore, places_between
from vidgen.worlds.planar import PlanarWorld, check_poses
from vidgen.worlds.room_scenes import (
    EAST,
    FACE_TEXELS,
    FLOOR_TEXELS,
    NORTH,
    PILLAR_RADIUS,
    SOUTH,
    WEST,
    RoomScene,
    make_scene,
)

WALL_HEIGHT = 1.2
BODY_RADIUS = 0.2
MAX_SIZE = 512
LEVELS = 6
# Frames drawn at once: their temporary arrays stay in a core's cache.
_PIXELS_AT_ONCE = 16 * 64 * 64
_DARKEST = 0.3


class RoomWorld(PlanarWorld):
    """Textured rooms on a grid, seen by a level camera at half the height of the walls.

    A pose is (x, y, heading): cells and radians, counterclockwise from x to y.

    Args:
        size: Height and width of a frame, even, 16 to 512 pixels.
        field_of_view: Degrees from the left to the right edge, 30 to 120.
        rooms: Rooms along x and along y, 1 to 6 each.

    Raises:
        ConfigError: A field out of range.

    Example:
        >>> world = RoomWorld(size=32)
        >>> scene = world.scene(seed=0)
        >>> poses = world.explore(scene, num_frames=8, seed=1)
        >>> world.render(scene, poses).shape
        (8, 32, 32, 3)
    """

    name = "room"
    version = 1
    motion = MotionStatistics(walk=0.12, turn=math.radians(9.0), clearance=0.5)

    def __init__(self, size: int = 64, field_of_view: float = 80.0, rooms: tuple[int, int] = (2, 2)) -> None:
        if size % 2 or not 16 <= size <= MAX_SIZE:
            raise ConfigError(f"size={size}; allowed: even, 16 to {MAX_SIZE}, nearest: {_nearest_size(size)}.")
        if not 30 <= field_of_view <= 120:
            raise ConfigError(f"field_of_view={field_of_view}; allowed: 30 to 120 degrees.")
        if not all(1 <= count <= 6 for count in rooms):
            raise ConfigError(f"rooms={rooms}; allowed: 1 to 6 along x and y.")
        self.size, self.rooms = size, rooms
        self.focal = 0.5 / math.tan(math.radians(field_of_view) / 2)
        super().__init__("cells")

    def scene(self, seed: int) -> RoomScene:
        """The scene of a seed."""
        return make_scene(seed, *self.rooms)

    def is_free(self, scene: RoomScene, place: np.ndarray, target: np.ndarray | None = None) -> bool:
        """Whether a body of `BODY_RADIUS` fits at a place, or can go from there to another.

        Args:
            scene: Where.
            place: `(2,)`: x, y.
            target: `(2,)`; the straight way there is tested at every `BODY_RADIUS`, and `place` itself isn't.
        """
        rows, columns = scene.solid.shape
        for x, y in places_between(place, target, BODY_RADIUS).tolist():
            if not (BODY_RADIUS < x < columns - BODY_RADIUS and BODY_RADIUS < y < rows - BODY_RADIUS):
                return False
            for row in range(int(y - BODY_RADIUS), int(y + BODY_RADIUS) + 1):
                for column in range(int(x - BODY_RADIUS), int(x + BODY_RADIUS) + 1):
                    gap = math.hypot(x - min(max(x, column), column + 1), y - min(max(y, row), row + 1))
                    if scene.solid[row, column] and gap < BODY_RADIUS:
                        return False
            for px, py in scene.pillars:
                if math.hypot(x - px, y - py) < BODY_RADIUS + PILLAR_RADIUS:
                    return False
        return True

    def explore(
        self, scene: RoomScene, num_frames: int, seed: int, motion: MotionStatistics | None = None
    ) -> np.ndarray:
        """Walks about from a random free place.

        Args:
            scene: Where.
            num_frames: Poses to return.
            seed: Of the walk.
            motion: Its statistics; None takes the world's own.

        Returns:
            float64 `(num_frames, 3)`.

        Raises:
            VidgenError: No frames.
        """
        motion = motion or self.motion
        generator = np.random.default_rng((seed, scene.seed))
        cells = np.argwhere(~scene.solid)[:, ::-1]
        while True:
            place = motion.rounded(np.array([*generator.choice(cells) + generator.random(2), 0.0]))[:2]
            if self.is_free(scene, place):
                break
        first = np.array([*place, generator.uniform(-math.pi, math.pi)])
        return explore(lambda here, there: self.is_free(scene, here, there), first, num_frames, motion, generator)

    def render(self, scene: RoomScene, poses: np.ndarray) -> np.ndarray:
        """What is seen at each pose.

        Args:
            scene: Where.
            poses: `(frames, 3)`.

        Returns:
            uint8 `(frames, size, size, 3)`.

        Raises:
            VidgenError: Poses of another shape, not finite, outside the map or inside a wall.
        """
        poses = check_poses(poses)
        rows, columns = scene.solid.shape
        cells = np.floor(poses[:, :2]).astype(int)
        inside = ((cells >= 0) & (cells < (columns, rows))).all(axis=1)
        cells[~inside] = 0  # the border is solid
        blocked = scene.solid[cells[:, 1], cells[:, 0]]
        if blocked.any():
            frame = int(np.flatnonzero(blocked)[0])
            raise VidgenError(
                f"Pose {frame} at x={poses[frame, 0]:g}, y={poses[frame, 1]:g} is in a wall or off the map of "
                f"{columns} x {rows} cells; allowed: free cells."
            )
        frames = np.empty((len(poses), self.size, self.size, 3), np.uint8)
        count = max(1, _PIXELS_AT_ONCE // self.size**2)
        caster = _caster(scene, self.size, self.focal)
        for start in range(0, len(poses), count):
            frames[start : start + count] = caster.draw(poses[start : start + count])
        return frames


def _nearest_size(size: int) -> int:
    return min(max(size + size % 2, 16), MAX_SIZE)


@lru_cache(maxsize=4)
def _caster(scene: RoomScene, size: int, focal: float) -> _RayCaster:
    return _RayCaster(scene, size, focal)


def _brightness(distance: np.ndarray) -> np.ndarray:
    """Light falls off with distance; 256 is full light."""
    return (256 * np.maximum(_DARKEST, 1.0 / (1.0 + 0.03 * distance**2))).astype(np.uint32)


def _mipmaps(image: np.ndarray) -> list[np.ndarray]:
    """Means of 1, 2 x 2, 4 x 4, ... texels of `(..., height, width, 3)`, packed into one integer per texel."""
    maps, image = [], image.astype(np.float32)
    for level in range(LEVELS):
        if level:
            pairs = image[..., 0::2, :, :] + image[..., 1::2, :, :]
            image = (pairs[..., 0::2, :] + pairs[..., 1::2, :]) / 4
        r, g, b = (np.round(image[..., channel]).astype(np.uint32) for channel in range(3))
        maps.append(r | g << 8 | b << 16)
    return maps


def _level(texels: np.ndarray) -> np.ndarray:
    """The mipmap in which one texel is about as large as a pixel that covers `texels` of the finest."""
    return np.clip(np.round(np.log2(np.maximum(texels, 1e-9))), 0, LEVELS - 1).astype(np.int32)


class _RayCaster:
    """Draws one scene at one size.

    Distances are measured along the viewing direction. Floor and ceiling lie symmetrically about the eye, so the rays
    of the upper rows are those of the lower ones.
    """

    def __init__(self, scene: RoomScene, size: int, focal: float) -> None:
        self.scene, self.size = scene, size
        columns = scene.solid.shape[1]
        faces, floor, ceiling = (_mipmaps(image) for image in (scene.textures, scene.floor, scene.ceiling))
        parts = [*faces, *floor, *ceiling]
        starts = np.concatenate([[0], np.cumsum([part.size for part in parts])]).astype(np.int32)
        self.colors = np.concatenate([part.ravel() for part in parts])
        self.face_starts = starts[:LEVELS]
        self.ceiling_minus_floor = starts[2 * LEVELS] - starts[LEVELS]

        across = (np.arange(size) + 0.5) / size - 0.5
        self.side = across / focal  # (W,): how far a ray goes to the right per unit forward
        self.stretch = np.sqrt(1 + self.side**2)
        self.slope = (across / focal).astype(np.float32)[:, None]  # (H, 1): downwards per unit forward
        self.texels_per_pixel = FACE_TEXELS / (focal * size)

        # Rows of the lower half: how far ahead they meet the floor, in which mipmap, and where that map starts.
        ahead = 0.5 * WALL_HEIGHT / self.slope[size // 2 :, 0].astype(np.float64)
        # A pixel is ahead / focal / size wide and ahead / (WALL_HEIGHT / 2) times that long.
        area = (ahead / focal / size) ** 2 * ahead / (0.5 * WALL_HEIGHT)
        level = _level(FLOOR_TEXELS * np.sqrt(area))
        scale = FLOOR_TEXELS / 2.0**level
        self.floor_scale = scale[:, None]  # (H / 2, 1)
        self.floor_reach = (ahead * scale).astype(np.float32)[:, None]
        self.floor_stride = (columns * scale).astype(np.int32)[:, None]
        self.floor_starts = starts[LEVELS + level][:, None]
        lit = _brightness(ahead[:, None] * self.stretch)
        self.floor_light = np.concatenate([lit[::-1], lit])  # (H, W)

        # Where a wall is, the cell on this side of it says which face is seen.
        self.solid = scene.solid.ravel()
        self.faces = scene.faces.reshape(-1, 4)

    def draw(self, poses: np.ndarray) -> np.ndarray:
        """Frames `(N, H, W, 3)` at poses `(N, 3)`."""
        size, half = self.size, self.size // 2
        cos, sin = np.cos(poses[:, 2:]), np.sin(poses[:, 2:])
        ray_x, ray_y = cos + self.side * sin, sin - self.side * cos  # (N, W)
        distance, face, along, light = self._cast(poses, ray_x, ray_y)

        level = _level(distance * self.texels_per_pixel)
        texels = np.right_shift(FACE_TEXELS, level)
        column = np.minimum((along * texels).astype(np.int32), texels - 1)
        start = (self.face_starts[level] + face * texels**2 + column).astype(np.int32)

        # Wall: texture row = (depth below the ceiling) / WALL_HEIGHT.                                   (N, H, W)
        below_eye = distance.astype(np.float32)[:, None] * self.slope
        is_wall = np.abs(below_eye) < 0.5 * WALL_HEIGHT - 1e-5
        below_eye *= (texels / WALL_HEIGHT).astype(np.float32)[:, None]
        below_eye += (0.5 * texels).astype(np.float32)[:, None]
        wall = below_eye.astype(np.int32)
        wall *= texels.astype(np.int32)[:, None]
        wall += start[:, None]

        # Floor, and the ceiling above it.                                                            (N, H / 2, W)
        x = self.floor_reach * ray_x.astype(np.float32)[:, None]
        x += (poses[:, 0, None, None] * self.floor_scale).astype(np.float32)
        y = self.floor_reach * ray_y.astype(np.float32)[:, None]
        y += (poses[:, 1, None, None] * self.floor_scale).astype(np.float32)
        floor = y.astype(np.int32)
        floor *= self.floor_stride
        floor += x.astype(np.int32)
        floor += self.floor_starts

        index = np.empty((len(poses), size, size), np.intp)
        index[:, half:] = floor
        np.add(floor[:, ::-1], self.ceiling_minus_floor, out=index[:, :half])
        np.copyto(index, wall, where=is_wall)
        color = self.colors.take(index, mode="clip")

        # All of red, green and blue times light / 256: two channels at a time have room between them.
        light = np.where(is_wall, light[:, None], self.floor_light)
        pair = color & 0xFF00FF
        pair *= light
        pair >>= 8
        pair &= 0xFF00FF
        color >>= 8
        color &= 0xFF
        color *= light
        color &= 0xFF00
        color |= pair
        return color.view(np.uint8).reshape(*color.shape, 4)[..., :3]

    def _cast(self, poses: np.ndarray, ray_x: np.ndarray, ray_y: np.ndarray) -> tuple[np.ndarray, ...]:
        """First hit of each ray `(N, W)`: distance, texture, place along the texture in [0, 1], light."""
        columns = self.scene.solid.shape[1]
        shape = ray_x.shape
        x, y = (np.broadcast_to(poses[:, axis, None], shape) for axis in (0, 1))
        cell_x, cell_y = np.floor(x).astype(np.int32), np.floor(y).astype(np.int32)
        with np.errstate(divide="ignore"):
            pace_x, pace_y = np.abs(1 / ray_x), np.abs(1 / ray_y)
        east, north = ray_x > 0, ray_y > 0
        # Distances at which the ray crosses the next line of the grid in either direction.
        next_x = np.where(east, cell_x + 1 - x, x - cell_x) * pace_x
        next_y = np.where(north, cell_y + 1 - y, y - cell_y) * pace_y
        step_x, step_y = np.where(east, 1, -1).astype(np.int32), np.where(north, columns, -columns).astype(np.int32)
        cell = cell_y * columns + cell_x
        distance = np.empty(shape)
        sideways = np.empty(shape, bool)
        before = np.empty(shape, np.int32)

        cell, step_x, step_y = cell.ravel(), step_x.ravel(), step_y.ravel()
        next_x, next_y, pace_x, pace_y = next_x.ravel(), next_y.ravel(), pace_x.ravel(), pace_y.ravel()
        alive = np.arange(cell.size)
        while alive.size:
            crosses_x = next_x < next_y
            reached = np.where(crosses_x, next_x, next_y)
            target = cell + np.where(crosses_x, step_x, step_y)
            hit = self.solid[target]
            where = alive[hit]
            distance.flat[where], sideways.flat[where], before.flat[where] = reached[hit], crosses_x[hit], cell[hit]
            keep = ~hit
            alive, cell, step_x, step_y = alive[keep], target[keep], step_x[keep], step_y[keep]
            next_x = np.where(crosses_x, next_x + pace_x, next_x)[keep]
            next_y = np.where(crosses_x, next_y, next_y + pace_y)[keep]
            pace_x, pace_y = pace_x[keep], pace_y[keep]

        side = np.where(sideways, np.where(east, EAST, WEST), np.where(north, NORTH, SOUTH))
        face = self.faces[before, side]
        along = np.where(sideways, y + distance * ray_y, x + distance * ray_x)
        along -= np.floor(along)
        # Left to right for who looks at the wall: to the east, y falls from left to right.
        along = np.where((side == EAST) | (side == SOUTH), 1 - along, along)
        light = _brightness(distance * self.stretch) * np.where(sideways, 205, 256).astype(np.uint32) >> 8

        for (px, py), texture in zip(self.scene.pillars, self.scene.pillar_textures):
            # |o + d r|^2 = R^2 with o from the pillar's center to the eye.
            ox, oy = x - px, y - py
            a, b = ray_x**2 + ray_y**2, ox * ray_x + oy * ray_y
            root = b**2 - a * (ox**2 + oy**2 - PILLAR_RADIUS**2)
            near = (-b - np.sqrt(np.maximum(root, 0))) / a
            seen = (root > 0) & (near > 0) & (near < distance)
            if not seen.any():
                continue
            angle = np.arctan2(oy + near * ray_y, ox + near * ray_x)
            turns = angle / math.pi + 2  # the texture goes round twice
            facing = np.sqrt(np.maximum(root, 0)) / (np.sqrt(a) * PILLAR_RADIUS)
            shade = _brightness(near * self.stretch) * (256 * (0.45 + 0.55 * facing)).astype(np.uint32) >> 8
            distance, face = np.where(seen, near, distance), np.where(seen, texture, face)
            along, light = np.where(seen, turns - np.floor(turns), along), np.where(seen, shade, light)
        return distance, face, along, light
