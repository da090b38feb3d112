"""A body that walks about: the poses of an aimless, never quite random walk among obstacles.

Commands are held for a while, as keys are, and what is recorded is where the body went, not what was commanded: the
reverse of recorded motion is exact even where a wall has stopped the body.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vidgen.runtime.errors import ConfigError, VidgenError

# Each command: what it is for, how often it is drawn, and (forward, left, turn left) in units of walk and turn.
COMMANDS: tuple[tuple[str, float, tuple[float, float, float]], ...] = (
    ("forward", 0.6, (1.0, 0.0, 0.0)),
    ("forward, turn left", 0.1, (1.0, 0.0, 1.0)),
    ("forward, turn right", 0.1, (1.0, 0.0, -1.0)),
    ("turn left", 0.06, (0.0, 0.0, 1.0)),
    ("turn right", 0.06, (0.0, 0.0, -1.0)),
    ("back", 0.04, (-1.0, 0.0, 0.0)),
    ("left", 0.02, (0.0, 1.0, 0.0)),
    ("right", 0.02, (0.0, -1.0, 0.0)),
)
_PROBABILITIES = [share for _, share, _ in COMMANDS]
# Where a body that is stopped looks for a way, and how many strides ahead.
_DIRECTIONS, _FARTHEST = 12, 8
_MOTIONS = np.array([motion for _, _, motion in COMMANDS])


@dataclass(frozen=True)
class MotionStatistics:
    """How a body walks about.

    Args:
        walk: Step per frame, in units of the world.
        turn: Turn per frame, radians.
        clearance: How far ahead the way must be free for it to walk on, so that it isn't always close to a wall.
        hold: Mean number of frames that a command is kept, >= 1.
        jitter: Relative standard deviation of a held command's steps and turns; 0 repeats them exactly.
        position_grid: Poses are rounded to multiples of it; 0 keeps them as they are.
        turn_grid: The same for headings, radians.

    Raises:
        ConfigError: A field out of range.
    """

    walk: float
    turn: float
    clearance: float = 0.0
    hold: float = 6.0
    jitter: float = 0.0
    position_grid: float = 0.0
    turn_grid: float = 0.0

    def __post_init__(self) -> None:
        for name in ("walk", "turn", "clearance", "jitter", "position_grid", "turn_grid"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name}={getattr(self, name)}; allowed: >= 0.")
        if self.turn > math.pi:
            raise ConfigError(f"turn={self.turn}; allowed: 0 to pi radians per frame; degrees times pi / 180.")
        if not self.hold >= 1:
            raise ConfigError(f"hold={self.hold}; allowed: >= 1 frames.")

    def rounded(self, pose: np.ndarray) -> np.ndarray:
        """The nearest pose `(3,)` on the grids."""
        pose = pose.copy()
        if self.position_grid:
            pose[:2] = np.round(pose[:2] / self.position_grid) * self.position_grid
        if self.turn_grid:
            pose[2] = np.round(pose[2] / self.turn_grid) * self.turn_grid
        return pose


def places_between(place: np.ndarray, target: np.ndarray | None, spacing: float) -> np.ndarray:
    """Places `(n, 2)` to test: `spacing` apart on the straight way to a target, or without one the place itself.

    Args:
        place: `(2,)`: x, y; left out if there is a target.
        target: `(2,)`, included.
        spacing: In units of the world.
    """
    if target is None:
        return place[None]
    steps = max(1, math.ceil(math.dist(place, target) / spacing))
    return place + (target - place) * np.arange(1, steps + 1)[:, None] / steps


def step_planar(pose: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """One step of `vidgen.controls.motion`: half the turn, the translation, the other half.

    Args:
        pose: `(3,)`: x, y, heading.
        delta: `(3,)`: forward, left, turn left.
    """
    forward, left, turn = delta
    middle = pose[2] + 0.5 * turn
    cos, sin = math.cos(middle), math.sin(middle)
    return np.array([pose[0] + forward * cos - left * sin, pose[1] + forward * sin + left * cos, pose[2] + turn])


def explore(
    is_free: Callable[[np.ndarray, np.ndarray], bool],
    first: np.ndarray,
    num_frames: int,
    motion: MotionStatistics,
    generator: np.random.Generator,
) -> np.ndarray:
    """Walks about from a pose.

    Args:
        is_free: Whether a body can go straight from a place `(2,)` to another.
        first: `(3,)`, the pose at frame 0.
        num_frames: Poses to return.
        motion: Its statistics.
        generator: Draws the commands.

    Returns:
        float64 `(num_frames, 3)`: x, y and the unwrapped heading in radians.

    Raises:
        VidgenError: No frames.
    """
    if num_frames < 1:
        raise VidgenError(f"num_frames={num_frames}; allowed: >= 1.")
    poses = np.empty((num_frames, 3))
    poses[0] = pose = motion.rounded(np.asarray(first, np.float64))
    scale = np.array([motion.walk, motion.walk, motion.turn])
    command, turns_left = int(generator.choice(len(COMMANDS), p=_PROBABILITIES)), 0
    for frame in range(1, num_frames):
        if turns_left:
            delta = np.array([0.0, 0.0, math.copysign(motion.turn, turns_left)])
            turns_left -= 1 if turns_left > 0 else -1
        else:
            if generator.random() < 1 / motion.hold:
                command = int(generator.choice(len(COMMANDS), p=_PROBABILITIES))
            delta = _MOTIONS[command] * scale
        if motion.jitter:
            delta = delta * (1 + motion.jitter * generator.standard_normal(3))
        target = motion.rounded(step_planar(pose, delta))
        way = target[:2] - pose[:2]
        length = math.hypot(*way)
        beyond = target[:2] + way * (motion.clearance / length if delta[0] > 0 and length else 0.0)
        if length and not is_free(pose[:2], beyond):
            target = pose
            turns_left = _turns_to_open_space(is_free, pose, motion, generator)
            command = 0
        poses[frame] = pose = target
    return poses


def _turns_to_open_space(
    is_free: Callable[[np.ndarray, np.ndarray], bool],
    pose: np.ndarray,
    motion: MotionStatistics,
    generator: np.random.Generator,
) -> int:
    """How often to turn on the spot, to the left or (negative) right: the farther one can go, the likelier.

    Turning at random would keep a body in a corner for long, and hardly ever lead it through a door.
    """
    if not motion.turn:
        return 0
    stride = max(motion.clearance, motion.walk)
    turns = np.round(np.linspace(-math.pi, math.pi, _DIRECTIONS, endpoint=False) / motion.turn).astype(int)
    reach = np.zeros(_DIRECTIONS)
    for index, heading in enumerate(pose[2] + turns * motion.turn):
        ahead = stride * np.array([math.cos(heading), math.sin(heading)])
        place = pose[:2]
        while reach[index] < _FARTHEST and is_free(place, place + ahead):
            place = place + ahead
            reach[index] += 1
    if not reach.any():
        return int(generator.choice(turns))
    return int(generator.choice(turns, p=reach**3 / (reach**3).sum()))
