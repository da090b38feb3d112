"""What worlds have in common in which somebody walks on a plane: a pose is (x, y, heading)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vidgen.controls import (
    CAMERA_SPEC,
    DeltaControls,
    PoseControls,
    integrate_planar,
    planar_delta_spec,
    planar_deltas,
    walking_cameras,
)
from vidgen.runtime.errors import VidgenError
from vidgen.worlds.exploration import MotionStatistics


class PlanarWorld:
    """Controls of a world that knows its `focal` and `motion`.

    Attributes:
        motion: Statistics of a walk.
        focal: Focal length, in widths of the picture.
        eye_height: Of the camera above the plane.
    """

    motion: MotionStatistics
    focal: float
    eye_height = 0.0

    def __init__(self, unit: str) -> None:
        walk, turn = self.motion.walk, self.motion.turn
        choices = {
            "forward": {"forward": walk},
            "back": {"forward": -walk},
            "left": {"left": walk},
            "right": {"left": -walk},
            "turn left": {"turn left": turn},
            "turn right": {"turn left": -turn},
        }
        self.pose_controls = PoseControls(CAMERA_SPEC)
        self.delta_controls = DeltaControls(planar_delta_spec(unit, **choices))

    def cameras(self, poses: np.ndarray) -> Tensor:
        """Absolute poses as controls.

        Args:
            poses: `(..., 3)`.

        Returns:
            float64 `(..., 16)`, see `vidgen.controls.cameras`.
        """
        return walking_cameras(torch.from_numpy(np.asarray(poses, np.float64)), self.focal, self.eye_height)

    def deltas(self, poses: np.ndarray) -> Tensor:
        """Recorded motion as controls.

        Args:
            poses: `(..., frames, 3)`.

        Returns:
            float64 `(..., frames, 3)`: forward, left, turn left.
        """
        return planar_deltas(torch.from_numpy(np.asarray(poses, np.float64)))

    def integrate(self, first: np.ndarray, deltas: Tensor) -> np.ndarray:
        """The inverse of `deltas`, through walls.

        Args:
            first: `(..., 3)`, the pose at frame 0.
            deltas: `(..., frames, 3)`; row 0 is not used.

        Returns:
            float64 `(..., frames, 3)`.
        """
        return integrate_planar(torch.from_numpy(np.asarray(first, np.float64)), deltas.double()).numpy()


def check_poses(poses: np.ndarray) -> np.ndarray:
    """Poses to render, as float64.

    Raises:
        VidgenError: Another shape than `(frames, 3)`, or not finite.
    """
    poses = np.asarray(poses, np.float64)
    if poses.ndim != 2 or poses.shape[1] != 3 or not np.isfinite(poses).all():
        raise VidgenError(f"poses have shape {poses.shape}; allowed: finite (frames, 3): x, y, heading in radians.")
    return poses
