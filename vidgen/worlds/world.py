"""What a world that can be walked through has to offer."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from vidgen.controls import DeltaControls, PoseControls


@runtime_checkable
class World(Protocol):
    """A world whose picture is a function of scene and pose alone.

    A pose is a row of numbers whose meaning is the world's own; `cameras` and `deltas` turn poses into what models are
    conditioned on, and `pose_controls` and `delta_controls` know how to reverse these.

    Attributes:
        name: For records.
        version: Changes when the same scene and pose give another picture.
        size: Height and width of a frame, pixels.
        pose_controls: Of what `cameras` returns.
        delta_controls: Of what `deltas` returns; its spec holds the moves of a player.
    """

    name: str
    version: int
    size: int
    pose_controls: PoseControls
    delta_controls: DeltaControls

    def scene(self, seed: int) -> Any:
        """The scene of a seed."""

    def explore(self, scene: Any, num_frames: int, seed: int) -> np.ndarray:
        """Poses `(num_frames, numbers of a pose)` of a walk."""

    def render(self, scene: Any, poses: np.ndarray) -> np.ndarray:
        """uint8 `(frames, size, size, 3)`: what is seen at each pose."""

    def cameras(self, poses: np.ndarray) -> Tensor:
        """float64 `(..., frames, 16)`: absolute poses, see `vidgen.controls.cameras`."""

    def deltas(self, poses: np.ndarray) -> Tensor:
        """float64 `(..., frames, columns)`: motion from the frame before; row 0 is null."""

    def integrate(self, first: np.ndarray, deltas: Tensor) -> np.ndarray:
        """The poses that lie on a path: the inverse of `deltas`. It passes through walls."""
