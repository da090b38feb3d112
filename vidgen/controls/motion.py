"""Recorded motion as controls: how a body moved from one frame to the next, in its own frame of reference.

A step of a rigid body is a translation and a turn, and it matters in whose frame the translation is written. Written
in the frame halfway through the turn, T = R(w/2) t R(w/2), a step is undone by R(-w/2) (-t) R(-w/2): by its negative.
So deltas are written like that, and their reverse is exact where an inverse computed with rotations would round.
Holding "forward" and "turn left" at the same time is then the chord of an arc.

Conditioning on recorded motion and not on pressed keys keeps the reverse right in engines with momentum and walls.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vidgen.controls.action_spec import ActionColumn, ActionSpec, ControlShapeError
from vidgen.controls.cameras import camera_centers, join_cameras, precise, split_cameras

CAMERA_DELTA_SPEC = ActionSpec(
    (
        *(ActionColumn(name, "world units") for name in ("right", "down", "forward")),
        *(ActionColumn(f"turn about {axis}", "radians", -math.pi, math.pi) for axis in ("right", "down", "forward")),
    )
)


def planar_delta_spec(unit: str, **choices: dict[str, float]) -> ActionSpec:
    """Columns of a body that walks on a plane.

    Args:
        unit: Of its steps.
        choices: See `ActionSpec`.
    """
    columns = (
        ActionColumn("forward", unit),
        ActionColumn("left", unit),
        ActionColumn("turn left", "radians", -math.pi, math.pi),
    )
    return ActionSpec(columns, choices)


def planar_deltas(poses: Tensor) -> Tensor:
    """Steps between poses on a plane.

    Args:
        poses: `(..., frames, 3)`: x, y and heading in radians, counterclockwise.

    Returns:
        `(..., frames, 3)`: forward, left, turn left in [-pi, pi]; row 0 is zero.

    Raises:
        ControlShapeError: Not three columns.
    """
    _check_columns(poses, 3, "x, y, heading")
    steps = poses.diff(dim=-2)
    turn = steps[..., 2]
    turn = turn - 2 * math.pi * (turn / (2 * math.pi)).round()
    middle = poses[..., :-1, 2] + turn / 2
    forward = steps[..., 0] * middle.cos() + steps[..., 1] * middle.sin()
    left = steps[..., 1] * middle.cos() - steps[..., 0] * middle.sin()
    deltas = torch.stack([forward, left, turn], dim=-1)
    return torch.cat([torch.zeros_like(poses[..., :1, :]), deltas], dim=-2)


def integrate_planar(first: Tensor, deltas: Tensor) -> Tensor:
    """The inverse of `planar_deltas`.

    Args:
        first: `(..., 3)`, the pose at frame 0.
        deltas: `(..., frames, 3)`; row 0 is not used.

    Returns:
        Poses `(..., frames, 3)`; headings are not wrapped.

    Raises:
        ControlShapeError: Not three columns.
    """
    _check_columns(deltas, 3, "forward, left, turn left")
    first = first[..., None, :]
    forward, left, turn = deltas[..., 1:, :].unbind(-1)
    heading = first[..., 2] + turn.cumsum(-1)
    middle = heading - turn / 2
    x = first[..., 0] + (forward * middle.cos() - left * middle.sin()).cumsum(-1)
    y = first[..., 1] + (forward * middle.sin() + left * middle.cos()).cumsum(-1)
    return torch.cat([first.expand_as(deltas[..., :1, :]), torch.stack([x, y, heading], dim=-1)], dim=-2)


def camera_deltas(cameras: Tensor) -> Tensor:
    """Steps between cameras in space.

    Args:
        cameras: `(..., frames, 16)`.

    Returns:
        `(..., frames, 6)`: translation to the right, down and forward, and the rotation vector about these axes in
        radians; row 0 is zero.
    """
    _, rotation, translation = split_cameras(precise(cameras))
    before = rotation[..., :-1, :, :]
    turn = _rotation_vector(before @ rotation[..., 1:, :, :].mT)
    steps = camera_centers(rotation, translation).diff(dim=-2)[..., None]
    halfway = (_rotation(-turn / 2) @ before @ steps)[..., 0]
    deltas = torch.cat([halfway, turn], dim=-1)
    return torch.cat([deltas.new_zeros(*deltas.shape[:-2], 1, 6), deltas], dim=-2).to(cameras)


def integrate_cameras(first: Tensor, deltas: Tensor) -> Tensor:
    """The inverse of `camera_deltas`; the intrinsics stay those of the first camera.

    Args:
        first: `(..., 16)`, the camera at frame 0.
        deltas: `(..., frames, 6)`; row 0 is not used.

    Returns:
        Cameras `(..., frames, 16)` in the dtype of `first`.

    Raises:
        ControlShapeError: Not six columns.
    """
    _check_columns(deltas, 6, ", ".join(CAMERA_DELTA_SPEC.names))
    intrinsics, rotation, translation = split_cameras(precise(first))
    to_world, center = rotation.mT, camera_centers(rotation, translation)
    cameras = [first]
    for step in precise(deltas[..., 1:, :]).unbind(-2):
        half = _rotation(step[..., 3:] / 2)
        center = center + (to_world @ half @ step[..., :3, None])[..., 0]
        to_world = to_world @ half @ half
        translation = -(to_world.mT @ center[..., None])[..., 0]
        cameras.append(join_cameras(intrinsics, to_world.mT, translation).to(first))
    return torch.stack(cameras, dim=-2)


def _rotation(vector: Tensor) -> Tensor:
    """Rotation matrices (..., 3, 3) of rotation vectors (..., 3)."""
    x, y, z = vector.unbind(-1)
    zero = torch.zeros_like(x)
    skew = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).unflatten(-1, (3, 3))
    return torch.linalg.matrix_exp(skew)


def _rotation_vector(rotation: Tensor) -> Tensor:
    """Rotation vectors (..., 3), at most pi long, of rotation matrices (..., 3, 3)."""
    r = [[rotation[..., row, column] for column in range(3)] for row in range(3)]
    # 4 q q' for the unit quaternion q = (x, y, z, w): its longest row is q up to sign without dividing by little.
    xy, xz, yz = r[0][1] + r[1][0], r[0][2] + r[2][0], r[1][2] + r[2][1]
    xw, yw, zw = r[2][1] - r[1][2], r[0][2] - r[2][0], r[1][0] - r[0][1]
    xx = 1 + r[0][0] - r[1][1] - r[2][2]
    yy = 1 - r[0][0] + r[1][1] - r[2][2]
    zz = 1 - r[0][0] - r[1][1] + r[2][2]
    ww = 1 + r[0][0] + r[1][1] + r[2][2]
    rows = torch.stack([xx, xy, xz, xw, xy, yy, yz, yw, xz, yz, zz, zw, xw, yw, zw, ww], dim=-1).unflatten(-1, (4, 4))
    longest = rows.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None].expand(*rows.shape[:-2], 1, 4)
    q = rows.gather(-2, longest)[..., 0, :]
    q = q / q.norm(dim=-1, keepdim=True)
    q = torch.where(q[..., 3:] < 0, -q, q)
    sine = q[..., :3].norm(dim=-1, keepdim=True)
    # The limit of angle / sin(angle / 2) at 0 is 2.
    scale = torch.where(sine > 1e-12, 2 * torch.atan2(sine, q[..., 3:]) / sine.clamp(min=1e-12), 2.0)
    return q[..., :3] * scale


def _check_columns(values: Tensor, count: int, names: str) -> None:
    if values.ndim < 2 or values.shape[-1] != count or not values.is_floating_point():
        raise ControlShapeError(
            f"Got {values.dtype} {tuple(values.shape)}; allowed: floating point (..., frames, {count}) with columns "
            f"{names}."
        )
