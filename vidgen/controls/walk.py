"""Keys for a model of cameras: a body that walks on a plane and stays where somebody has been.

A model that was shown absolute cameras is steered by them, and a player holds keys. A walk turns the one into the
other. What lies behind a wall was never shown to the model, so the walk keeps to the floor that recordings covered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vidgen.controls.action_spec import ActionSpec, ControlError, ControlShapeError
from vidgen.controls.cameras import camera_centers, split_cameras, walking_cameras
from vidgen.controls.motion import integrate_planar
from vidgen.runtime.errors import ConfigError

FREE, TAKEN = ".", "#"


@dataclass(frozen=True)
class FloorPlan:
    """Where one can stand, in square cells.

    Attributes:
        cell: their size, in units of the world.
        origin: x and y of the first cell's corner.
        rows: a string per cell of y, a character per cell of x: `"."` is free, `"#"` is not.

    Raises:
        ConfigError: rows of different lengths or other characters, or a size that isn't positive.
    """

    cell: float
    origin: tuple[float, float]
    rows: tuple[str, ...]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cell) and self.cell > 0):
            raise ConfigError(f"cell={self.cell}; it must be positive.")
        if not self.rows or len(set(map(len, self.rows))) > 1 or set("".join(self.rows)) - {FREE, TAKEN}:
            raise ConfigError(f"rows of a floor plan are equally long strings of {FREE!r} and {TAKEN!r}.")

    @classmethod
    def visited(cls, places: np.ndarray, cell: float) -> FloorPlan:
        """The cells in which somebody has stood.

        Args:
            places: `(n, 2)`: x, y.
            cell: size of a cell.
        """
        first = np.floor(places.min(axis=0) / cell).astype(int)
        cells = np.floor(places / cell).astype(int) - first
        free = np.zeros(cells.max(axis=0)[::-1] + 1, bool)
        free[cells[:, 1], cells[:, 0]] = True
        rows = tuple("".join(FREE if is_free else TAKEN for is_free in row) for row in free)
        return cls(float(cell), (float(first[0] * cell), float(first[1] * cell)), rows)

    def is_free(self, x: float, y: float) -> bool:
        """Whether one can stand at a place."""
        column, row = (math.floor((value - first) / self.cell) for value, first in zip((x, y), self.origin))
        return 0 <= row < len(self.rows) and 0 <= column < len(self.rows[0]) and self.rows[row][column] == FREE


class Walk:
    """Motion on a plane, applied to a level camera.

    Args:
        spec: columns forward, left and turn left, and the keys.
        floor: where one can stand; None is everywhere.

    Raises:
        ConfigError: other columns than three.
    """

    def __init__(self, spec: ActionSpec, floor: FloorPlan | None = None) -> None:
        if spec.width != 3:
            raise ConfigError(
                f"A walk has columns {', '.join(spec.names)}; allowed: three, forward, left and turn left."
            )
        self.spec, self.floor = spec, floor

    def __call__(self, camera: Tensor, delta: Tensor) -> Tensor:
        """Where a step leads: as far as the floor goes, sliding along its edge, and always turning.

        Args:
            camera: `(16,)`, level, in a world whose z axis points up.
            delta: `(3,)`.

        Returns:
            `(16,)`, float64.

        Raises:
            ControlShapeError: other numbers of columns.
            ControlError: the camera isn't level.
        """
        if delta.shape != (3,) or camera.ndim != 1:
            raise ControlShapeError(
                f"A step of a walk is {tuple(delta.shape)} at a camera {tuple(camera.shape)}; allowed: (3,) at (16,)."
            )
        intrinsics, rotation, translation = split_cameras(camera.double())
        if not torch.allclose(rotation[1], rotation.new_tensor([0.0, 0.0, -1.0]), atol=1e-6):
            raise ControlError("The camera isn't level, so no key can move it; give cameras in place of keys.")
        x, y, height = camera_centers(rotation, translation).tolist()
        heading = math.atan2(float(rotation[2, 1]), float(rotation[2, 0]))
        deltas = torch.stack([torch.zeros(3, dtype=torch.float64), delta.double()])
        there = integrate_planar(torch.tensor([x, y, heading], dtype=torch.float64), deltas)[-1]
        target = self._reached((x, y), (float(there[0]), float(there[1])))
        pose = torch.tensor([*target, float(there[2])], dtype=torch.float64)
        walked = walking_cameras(pose, float(intrinsics[0]), height)
        return torch.cat([camera.double()[:4], walked[4:]])

    def _reached(self, place: tuple[float, float], target: tuple[float, float]) -> tuple[float, float]:
        for reached in (target, (target[0], place[1]), (place[0], target[1])):
            if self._is_open(place, reached):
                return reached
        return place

    def _is_open(self, place: tuple[float, float], target: tuple[float, float]) -> bool:
        """Whether all of a straight way is free; where one stands already is not asked."""
        if self.floor is None:
            return True
        steps = max(1, math.ceil(2 * math.dist(place, target) / self.floor.cell))
        return all(
            self.floor.is_free(*(start + (end - start) * step / steps for start, end in zip(place, target)))
            for step in range(1, steps + 1)
        )

    def to_dict(self) -> dict[str, Any]:
        """A description that JSON can hold."""
        floor = self.floor and {**vars(self.floor), "origin": list(self.floor.origin), "rows": list(self.floor.rows)}
        return {"spec": self.spec.to_dict(), "floor": floor}

    @classmethod
    def from_dict(cls, description: Mapping[str, Any]) -> Walk:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: a description that `to_dict` did not write.
        """
        try:
            floor = description["floor"]
            if floor is not None:
                floor = FloorPlan(float(floor["cell"]), tuple(map(float, floor["origin"])), tuple(floor["rows"]))
            return cls(ActionSpec.from_dict(description["spec"]), floor)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"No description of a walk: {type(error).__name__} {error}.") from error
