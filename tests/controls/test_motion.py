"""What would be wrong: steps that don't add up to the path they were taken from, or a way back that ends elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

from vidgen.controls import (
    CAMERA_DELTA_SPEC,
    ControlShapeError,
    DeltaControls,
    camera_deltas,
    check_cameras,
    integrate_cameras,
    integrate_planar,
    join_cameras,
    normalize_to_first,
    planar_delta_spec,
    planar_deltas,
    walking_cameras,
)


def random_poses(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_cameras(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(*shape, 3, 3, generator=generator, dtype=torch.float64))[0]
    rotation = rotation * torch.linalg.det(rotation)[..., None, None]
    translation = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    intrinsics = torch.tensor([0.9, 1.2, 0.5, 0.4], dtype=torch.float64).expand(*shape, 4)
    return join_cameras(intrinsics, rotation, translation)


def test_walking_straight_ahead_is_forward_whatever_the_heading():
    heading = 2.0
    step = torch.tensor([math.cos(heading), math.sin(heading), 0.0], dtype=torch.float64)
    poses = torch.tensor([5.0, -1.0, heading], dtype=torch.float64) + torch.arange(4)[:, None] * step
    expected = torch.tensor([[0.0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(planar_deltas(poses), expected)


def test_an_arc_is_a_chord_straight_ahead():
    # Round a circle of radius 2 in steps of 0.3 radians: forward by the chord 2 r sin(0.15), no step to the side.
    angle = 0.3 * torch.arange(5, dtype=torch.float64)
    poses = torch.stack([2 * angle.sin(), 2 - 2 * angle.cos(), angle], dim=-1)
    expected = torch.tensor([4 * math.sin(0.15), 0, 0.3], dtype=torch.float64).expand(4, 3)
    torch.testing.assert_close(planar_deltas(poses)[1:], expected)


def test_the_short_way_round_is_taken():
    poses = torch.tensor([[0.0, 0, 3.1], [0, 0, -3.1], [0, 0, 12.0]], dtype=torch.float64)
    turns = planar_deltas(poses)[:, 2]
    torch.testing.assert_close(turns, torch.tensor([0, 2 * math.pi - 6.2, 15.1 - 4 * math.pi], dtype=torch.float64))


def test_steps_on_the_plane_add_up_and_their_reverse_leads_back():
    poses = random_poses(2, 64)
    deltas = planar_deltas(poses)
    there = integrate_planar(poses[:, 0], deltas)
    torch.testing.assert_close(there[..., :2], poses[..., :2], atol=1e-9, rtol=0)
    torch.testing.assert_close((there - poses)[..., 2].cos(), torch.ones(2, 64, dtype=torch.float64))
    back = integrate_planar(there[:, -1], DeltaControls(planar_delta_spec("cells")).reverse(deltas))
    torch.testing.assert_close(back, there.flip(1), atol=1e-9, rtol=0)


def test_steps_in_space_add_up_and_their_reverse_leads_back():
    cameras = random_cameras(2, 32)
    deltas = camera_deltas(cameras)
    CAMERA_DELTA_SPEC.check(deltas, num_frames=32)
    there = integrate_cameras(cameras[:, 0], deltas)
    torch.testing.assert_close(there, cameras, atol=1e-9, rtol=0)
    back = integrate_cameras(cameras[:, -1], DeltaControls(CAMERA_DELTA_SPEC).reverse(deltas))
    torch.testing.assert_close(back, cameras.flip(1), atol=1e-9, rtol=0)
    check_cameras(back)


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-4, 1.0, 3.0, math.pi - 1e-9, math.pi])
def test_every_turn_is_found_again(angle):
    axis = torch.tensor([2.0, -3.0, 6.0], dtype=torch.float64) / 7
    deltas = torch.cat([torch.zeros(2, 3, dtype=torch.float64), torch.stack([0 * axis, angle * axis])], dim=-1)
    cameras = integrate_cameras(random_cameras(1)[0], deltas)
    found = camera_deltas(cameras)[1, 3:]
    # Half a turn one way is half a turn the other way.
    if angle == math.pi and found @ axis < 0:
        found = -found
    torch.testing.assert_close(found, angle * axis, atol=1e-8, rtol=0)


def test_cameras_on_a_plane_move_as_the_body_does():
    poses = random_poses(16)
    planar, spatial = planar_deltas(poses), camera_deltas(walking_cameras(poses, 0.6, 0.5))
    zero = torch.zeros(16, dtype=torch.float64)
    # Right is minus left, and a turn to the left is one about the upward axis, which is minus down.
    expected = torch.stack([-planar[:, 1], zero, planar[:, 0], zero, -planar[:, 2], zero], dim=-1)
    torch.testing.assert_close(spatial, expected, atol=1e-9, rtol=0)


def test_deltas_do_not_depend_on_the_origin_of_the_world():
    cameras = random_cameras(12)
    torch.testing.assert_close(camera_deltas(normalize_to_first(cameras)), camera_deltas(cameras), atol=1e-9, rtol=0)


def test_other_columns_are_refused():
    with pytest.raises(ControlShapeError, match="columns x, y, heading"):
        planar_deltas(torch.zeros(4, 2))
    with pytest.raises(ControlShapeError, match="columns forward, left, turn left"):
        integrate_planar(torch.zeros(3), torch.zeros(4, 6))
    with pytest.raises(ControlShapeError, match="columns right, down, forward"):
        integrate_cameras(random_cameras(1)[0], torch.zeros(4, 3))


def test_a_single_camera_has_one_null_step():
    cameras = walking_cameras(torch.randn(2, 1, 3, dtype=torch.float64), 0.6)
    assert torch.equal(camera_deltas(cameras), torch.zeros(2, 1, 6, dtype=torch.float64))
