"""Keys that move a camera: what would be wrong is to walk through walls, or to be elsewhere than the camera."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vidgen.controls import (
    CAMERA_SPEC,
    ControlError,
    ControlShapeError,
    FloorPlan,
    Walk,
    planar_delta_spec,
    planar_deltas,
    walking_cameras,
)
from vidgen.runtime.errors import ConfigError

SPEC = planar_delta_spec("units", forward={"forward": 1.0}, **{"turn left": {"turn left": 0.3}})
# A corridor along x with a room above its end.
FLOOR = FloorPlan(1.0, (-1.0, 0.0), ("......", "###...", "###..."))


def camera(*pose: float) -> torch.Tensor:
    return walking_cameras(torch.tensor(pose, dtype=torch.float64), focal=0.7, eye_height=1.5)


def test_without_a_floor_a_walk_follows_the_recorded_motion():
    poses = torch.from_numpy(np.cumsum(np.random.default_rng(0).normal(size=(20, 3)), axis=0))
    walk, cameras = Walk(SPEC), walking_cameras(poses, 0.7, 1.5)
    place = cameras[0]
    for delta, expected in zip(planar_deltas(poses)[1:], cameras[1:], strict=True):
        place = walk(place, delta)
        torch.testing.assert_close(place, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("pose", "delta", "expected"),
    [
        ((0.5, 0.5, 0.0), (2.0, 0.0, 0.0), (2.5, 0.5, 0.0)),  # along the corridor
        ((0.5, 0.5, math.pi / 2), (1.0, 0.0, 0.0), (0.5, 0.5, math.pi / 2)),  # into its wall
        ((-0.9, 0.5, math.pi), (1.0, 0.0, 0.5), (-0.9, 0.5 - math.sin(0.25), math.pi + 0.5)),  # its end: still turns
        ((0.5, 0.5, math.pi / 4), (1.0, 0.0, 0.0), (0.5 + math.sqrt(0.5), 0.5, math.pi / 4)),  # slides along it
        ((4.5, 2.5, 0.0), (4.0, 0.0, 0.0), (4.5, 2.5, 0.0)),  # out of the plan
        ((4.5, 2.5, -math.pi), (5.0, 0.0, 0.0), (4.5, 2.5, -math.pi)),  # what lies behind a wall is not reached
    ],
)
def test_a_walk_keeps_to_the_floor(pose: tuple, delta: tuple, expected: tuple):
    reached = Walk(SPEC, FLOOR)(camera(*pose), torch.tensor(delta, dtype=torch.float64))
    torch.testing.assert_close(reached, camera(*expected), atol=1e-9, rtol=0)


def test_a_long_step_does_not_jump_over_a_thin_wall():
    floor = FloorPlan(1.0, (0.0, 0.0), ("..#..",))
    place = camera(0.5, 0.5, 0.0)
    torch.testing.assert_close(Walk(SPEC, floor)(place, torch.tensor([3.0, 0.0, 0.0])), place, atol=1e-9, rtol=0)


def test_the_visited_floor_is_where_somebody_stood_and_nowhere_else():
    places = np.random.default_rng(0).uniform(-20, 30, (500, 2))
    floor = FloorPlan.visited(places, 4.0)
    assert all(floor.is_free(*place) for place in places)
    cells = {tuple(cell) for cell in np.floor(places / 4.0).astype(int)}
    for place in np.random.default_rng(1).uniform(-40, 50, (500, 2)):
        assert floor.is_free(*place) == (tuple(np.floor(place / 4.0).astype(int)) in cells)


def test_a_walk_survives_its_description():
    again = Walk.from_dict(Walk(SPEC, FLOOR).to_dict())
    assert (again.floor, again.spec) == (FLOOR, SPEC)
    assert Walk.from_dict(Walk(SPEC).to_dict()).floor is None


def test_wrong_walks_are_named():
    tilted = camera(0.0, 0.0, 0.0).clone()
    tilted[8:12] = torch.tensor([0.0, 0.6, -0.8, 0.0])
    with pytest.raises(ControlError, match="isn't level"):
        Walk(SPEC)(tilted, torch.zeros(3))
    with pytest.raises(ControlShapeError, match=r"\(3,\) at \(16,\)"):
        Walk(SPEC)(camera(0.0, 0.0, 0.0), torch.zeros(6))
    with pytest.raises(ConfigError, match="three"):
        Walk(CAMERA_SPEC)
    with pytest.raises(ConfigError, match="equally long"):
        FloorPlan(1.0, (0.0, 0.0), ("..", "..."))
    with pytest.raises(ConfigError, match="cell=0"):
        FloorPlan(0.0, (0.0, 0.0), ("..",))
    with pytest.raises(ConfigError, match="No description of a walk"):
        Walk.from_dict({"floor": None})
