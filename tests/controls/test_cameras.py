"""What would be wrong: a camera by another convention, or a model that sees where the world's origin is."""

from __future__ import annotations

import math

import pytest
import torch

from vidgen.controls import (
    CAMERA_SPEC,
    CameraError,
    ControlError,
    ControlShapeError,
    camera_centers,
    cameras_from_realestate10k,
    check_cameras,
    join_cameras,
    look_ahead,
    mirror_cameras,
    normalize_to_first,
    plucker_rays,
    split_cameras,
    walking_cameras,
)


def path(num_frames: int = 10, seed: int = 0) -> torch.Tensor:
    """Cameras that wander, looking about."""
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(num_frames, 3, 3, generator=generator, dtype=torch.float64))[0]
    rotation = rotation * torch.linalg.det(rotation)[:, None, None]
    translation = 2 * torch.randn(num_frames, 3, generator=generator, dtype=torch.float64)
    intrinsics = torch.tensor([0.9, 1.3, 0.45, 0.55], dtype=torch.float64).expand(num_frames, 4)
    return join_cameras(intrinsics, rotation, translation)


def moved_world(cameras: torch.Tensor) -> torch.Tensor:
    """The same cameras after the world has been turned and shifted: x = Q x' + s."""
    generator = torch.Generator().manual_seed(7)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    turn = turn * torch.linalg.det(turn)
    shift = 5 * torch.randn(3, generator=generator, dtype=torch.float64)
    intrinsics, rotation, translation = split_cameras(cameras)
    return join_cameras(intrinsics, rotation @ turn, (rotation @ shift) + translation)


def test_the_first_camera_becomes_the_identity():
    first = normalize_to_first(path())[0]
    expected = CAMERA_SPEC.null()
    torch.testing.assert_close(first[4:], expected[4:], atol=1e-12, rtol=0)
    assert torch.equal(first[:4], path()[0, :4])


def test_moving_the_whole_world_changes_nothing():
    cameras, moved = path(), moved_world(path())
    assert (moved - cameras).abs().max() > 1
    rays = plucker_rays(normalize_to_first(cameras), 4, 6)
    torch.testing.assert_close(plucker_rays(normalize_to_first(moved), 4, 6), rays, atol=1e-10, rtol=0)


def test_normalization_keeps_what_one_camera_sees_of_another():
    before, after = path(), normalize_to_first(path())

    def seen(cameras):
        _, rotation, translation = split_cameras(cameras)
        return (rotation[3] @ camera_centers(rotation, translation)[8]) + translation[3]

    torch.testing.assert_close(seen(after), seen(before), atol=1e-10, rtol=0)


def test_far_from_the_origin_float32_still_normalizes():
    cameras = path()
    cameras[:, [7, 11, 15]] *= 100
    exact = normalize_to_first(cameras.float().double())
    assert (normalize_to_first(cameras.float()).double() - exact).abs().max() < 1e-4


def test_rays_are_unit_plucker_coordinates():
    direction, moment = plucker_rays(path(), 5, 7).unflatten(1, (2, 3)).unbind(1)
    assert direction.shape == (10, 3, 5, 7)
    torch.testing.assert_close(direction.norm(dim=1), torch.ones(10, 5, 7, dtype=torch.float64))
    assert (direction * moment).sum(1).abs().max() < 1e-12


def test_rays_run_through_the_points_that_project_to_their_pixels():
    height, width, (fx, fy, px, py) = 4, 6, (0.9, 1.3, 0.45, 0.55)
    cameras = path()
    _, rotation, translation = split_cameras(cameras)
    rays = plucker_rays(cameras, height, width)
    for frame, row, column in [(0, 0, 0), (3, 2, 5), (9, 3, 1)]:
        direction, moment = rays[frame, :3, row, column], rays[frame, 3:, row, column]
        point = camera_centers(rotation, translation)[frame] + 2.5 * direction
        torch.testing.assert_close(torch.linalg.cross(point, direction), moment)  # the line holds the point
        x, y, z = rotation[frame] @ point + translation[frame]
        assert z > 0  # in front of the camera
        assert abs(fx * x / z + px - (column + 0.5) / width) < 1e-12
        assert abs(fy * y / z + py - (row + 0.5) / height) < 1e-12


def test_mirrored_cameras_cast_mirrored_rays():
    cameras = path()
    rays, mirrored = plucker_rays(cameras, 4, 6), plucker_rays(mirror_cameras(cameras), 4, 6)
    # x changes sign in a direction; a moment, being a cross product, changes the sign of y and z.
    signs = torch.tensor([-1, 1, 1, 1, -1, -1], dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(mirrored, rays.flip(-1) * signs)
    check_cameras(mirror_cameras(cameras))
    assert torch.equal(mirror_cameras(mirror_cameras(cameras))[:, 4:], cameras[:, 4:])


def test_mirroring_flips_the_signs_of_the_release():
    cameras = torch.rand(3, 16) + 0.1
    cameras[:, 2] = 0.5
    changed = (mirror_cameras(cameras) != cameras).all(dim=0).nonzero().flatten().tolist()
    assert changed == [5, 6, 7, 8, 12]


def test_a_level_camera_looks_where_it_walks():
    poses = torch.tensor([[1.0, 2.0, math.pi / 2], [1.0, 3.0, math.pi / 2]], dtype=torch.float64)
    cameras = walking_cameras(poses, 0.6, eye_height=0.5)
    check_cameras(cameras, walks_forward=True)
    assert look_ahead(cameras) == pytest.approx(1)
    _, rotation, translation = split_cameras(cameras)
    # North of (1, 2), to the east of the line of sight and on the floor: ahead, to the right, below.
    point = rotation[0] @ torch.tensor([1.5, 6.0, 0.0], dtype=torch.float64) + translation[0]
    torch.testing.assert_close(point, torch.tensor([0.5, 0.5, 4.0], dtype=torch.float64))


def test_realestate10k_rows_lose_their_two_zeros():
    rows = torch.arange(36.0).reshape(2, 18)
    rows[:, 4:6] = 0
    assert cameras_from_realestate10k(rows)[1].tolist() == [18, 19, 20, 21, *range(24, 36)]
    with pytest.raises(CameraError, match="Columns 4 and 5 are not zero"):
        cameras_from_realestate10k(rows + 1)
    with pytest.raises(ControlShapeError, match="19 numbers; allowed: 18: drop the time stamp"):
        cameras_from_realestate10k(torch.zeros(2, 19))


def walk(inverted: bool) -> torch.Tensor:
    """Forward along a curve; inverted stores camera-to-world matrices."""
    angle = 0.1 * torch.arange(20, dtype=torch.float64)
    cameras = walking_cameras(torch.stack([4 * angle.sin(), 4 - 4 * angle.cos(), angle], dim=-1), 0.6)
    if not inverted:
        return cameras
    intrinsics, rotation, translation = split_cameras(cameras)
    return join_cameras(intrinsics, rotation.mT, camera_centers(rotation, translation))


def test_camera_to_world_matrices_are_recognized_on_a_walk():
    check_cameras(walk(inverted=False), walks_forward=True)
    check_cameras(walk(inverted=True))  # nothing but the way it moves tells
    with pytest.raises(CameraError, match="look like camera to world; allowed: world to camera"):
        check_cameras(walk(inverted=True), walks_forward=True)


@pytest.mark.parametrize(
    ("column", "value", "error", "message"),
    [
        (0, 0.0, CameraError, "focal length is 0"),
        (0, -0.5, ControlError, "fx is -0.5 in row 2; allowed: 0 to inf image widths"),
        (7, math.nan, ControlError, "t0 is nan in row 2"),
        (9, 45.0, CameraError, "R of frame 2 is no rotation"),
    ],
)
def test_a_broken_camera_is_refused(column, value, error, message):
    cameras = path()
    cameras[2, column] = value
    with pytest.raises(error, match=message):
        check_cameras(cameras)


def test_scaled_and_reflected_matrices_are_refused():
    scaled, reflected = path(), path()
    scaled[:, 4:] *= 2
    reflected[:, 4:8] *= -1
    with pytest.raises(CameraError, match="A scale belongs into t"):
        check_cameras(scaled)
    with pytest.raises(CameraError, match="reflection"):
        check_cameras(reflected)
    with pytest.raises(ControlShapeError, match="18 numbers; allowed: 16, .*cameras_from_realestate10k"):
        split_cameras(torch.zeros(2, 18))
