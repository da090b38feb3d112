"""A camera that slides over an endless picture: the smallest world with exact controls, for tests.

The picture is a torus, the camera shows a crop of it, and moves by whole pixels. So frames can be compared to the last
bit, and a step is undone exactly by its negative. `vidgen.worlds.code_worlds` has a panorama of another kind, which
shows codes to measure memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vidgen.controls import (
    CAMERA_SPEC,
    ActionColumn,
    ActionSpec,
    DeltaControls,
    PoseControls,
    join_cameras,
)
from vidgen.runtime.errors import ConfigError, VidgenError


@dataclass(frozen=True, eq=False)
class PanoramaScene:
    """A picture that continues at its other side.

    Attributes:
        seed: Where it comes from.
        picture: uint8 `(period, period, 3)`.
    """

    seed: int
    picture: np.ndarray

    def mirrored(self) -> PanoramaScene:
        """The picture in a mirror: what was in column x is in column period - 1 - x."""
        return PanoramaScene(self.seed, self.picture[:, ::-1])


class PanoramaWorld:
    """Crops of a colorful torus.

    A pose is (x, y): the column and row of the picture in the frame's top left corner, whole numbers without limits.

    Args:
        size: Height and width of a frame, pixels.
        period: Height and width of the picture, pixels.
        step: Pixels per frame of a move.

    Raises:
        ConfigError: A field out of range.
    """

    name = "panorama"
    version = 1

    def __init__(self, size: int = 16, period: int = 64, step: int = 1) -> None:
        if not 1 <= size <= period:
            raise ConfigError(f"size={size} of period={period} pixels; allowed: 1 <= size <= period.")
        if step < 1:
            raise ConfigError(f"step={step}; allowed: >= 1 pixel.")
        self.size, self.period, self.step = size, period, step
        choices = {
            "right": {"right": step},
            "left": {"right": -step},
            "down": {"down": step},
            "up": {"down": -step},
        }
        columns = (ActionColumn("right", "pixels"), ActionColumn("down", "pixels"))
        self.pose_controls = PoseControls(CAMERA_SPEC)
        self.delta_controls = DeltaControls(ActionSpec(columns, choices))

    def scene(self, seed: int) -> PanoramaScene:
        """The scene of a seed: waves of a few pixels' to the period's length, different in every color."""
        rng = np.random.default_rng(seed)
        angle = 2 * np.pi * np.arange(self.period) / self.period
        picture = np.zeros((self.period, self.period, 3))
        for _ in range(24):
            across, along = rng.integers(-6, 7, 2)
            phase = across * angle + along * angle[:, None] + 2 * np.pi * rng.random()
            picture += np.sign(np.sin(phase))[..., None] * rng.normal(0, 22.0, 3)
        return PanoramaScene(seed, np.clip(128 + picture, 0, 255).astype(np.uint8))

    def explore(self, scene: PanoramaScene, num_frames: int, seed: int, turn_probability: float = 0.25) -> np.ndarray:
        """Moves in one of nine ways (the four, two of them at once, none), and now and then in another.

        Args:
            scene: Where.
            num_frames: Poses to return.
            seed: Of the path.
            turn_probability: That a frame draws a new move.

        Returns:
            int64 `(num_frames, 2)`.

        Raises:
            VidgenError: No frames.
        """
        if num_frames < 1:
            raise VidgenError(f"num_frames={num_frames}; allowed: >= 1.")
        rng = np.random.default_rng((seed, scene.seed))
        turns = rng.random(num_frames) < turn_probability
        turns[0] = True
        drawn = rng.integers(-1, 2, (num_frames, 2))
        latest = np.maximum.accumulate(np.where(turns, np.arange(num_frames), 0))
        moves = drawn[latest] * self.step
        moves[0] = rng.integers(0, self.period, 2)
        return np.cumsum(moves, axis=0)

    def render(self, scene: PanoramaScene, poses: np.ndarray) -> np.ndarray:
        """What is seen at each pose.

        Args:
            scene: Where.
            poses: `(frames, 2)`, whole numbers.

        Returns:
            uint8 `(frames, size, size, 3)`.

        Raises:
            VidgenError: Poses of another shape, or between pixels.
        """
        poses = np.asarray(poses)
        if poses.ndim != 2 or poses.shape[1] != 2 or not np.array_equal(poses, np.round(poses)):
            raise VidgenError(f"poses have shape {poses.shape}; allowed: (frames, 2) whole numbers: x, y in pixels.")
        corner = poses.astype(np.int64)[:, :, None]
        x, y = ((corner[:, axis] + np.arange(self.size)) % self.period for axis in (0, 1))
        return scene.picture[y[:, :, None], x[:, None, :]]

    def cameras(self, poses: np.ndarray) -> Tensor:
        """Absolute poses as controls: a camera at distance 1 from a wall, of which it sees 1 x 1.

        Args:
            poses: `(..., 2)`.

        Returns:
            float64 `(..., 16)`.
        """
        center = torch.from_numpy(np.asarray(poses, np.float64)) / self.size + 0.5
        translation = -torch.cat([center, torch.zeros_like(center[..., :1])], dim=-1)
        rotation = torch.eye(3, dtype=torch.float64).expand(*center.shape[:-1], 3, 3)
        intrinsics = torch.tensor([1.0, 1.0, 0.5, 0.5], dtype=torch.float64).expand(*center.shape[:-1], 4)
        return join_cameras(intrinsics, rotation, translation)

    def deltas(self, poses: np.ndarray) -> Tensor:
        """Recorded motion as controls.

        Args:
            poses: `(..., frames, 2)`.

        Returns:
            float64 `(..., frames, 2)`: pixels to the right and down.
        """
        poses = torch.from_numpy(np.asarray(poses, np.float64))
        return torch.cat([torch.zeros_like(poses[..., :1, :]), poses.diff(dim=-2)], dim=-2)

    def integrate(self, first: np.ndarray, deltas: Tensor) -> np.ndarray:
        """The inverse of `deltas`.

        Args:
            first: `(..., 2)`, the pose at frame 0.
            deltas: `(..., frames, 2)`; row 0 is not used.

        Returns:
            int64 `(..., frames, 2)`.
        """
        self.delta_controls.spec.check_shape(deltas)
        moves = self.delta_controls.begin(deltas.double()).cumsum(-2).round().long()
        return np.asarray(first, np.int64)[..., None, :] + moves.numpy()
