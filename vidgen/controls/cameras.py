"""Pinhole cameras as controls: 16 numbers per frame, as RealEstate10K and the released LIVE models have them.

A camera is (fx, fy, px, py) and a row-major 3 x 4 matrix [R | t]. The intrinsics are in units of the image's width and
height. [R | t] takes world to camera coordinates: x to the right, y down, z forward. R is a rotation, t is in units of
the world. The camera stands at -R't.

Everything is computed in float64 and returned in the dtype it came in: poses far from the origin cancel.

Ray maps are those of "Light Field Networks" (arXiv 2106.02634); the 16 numbers and the normalization to the first
camera of a window follow "LIVE: Long-horizon Interactive Video World Modeling" (arXiv 2602.03747).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vidgen.controls.action_spec import ActionColumn, ActionSpec, ControlError, ControlShapeError

# Rounded to six digits, as files store them, a rotation is orthonormal to about 1e-6; a scaled one is off by far more.
ORTHONORMAL_TOLERANCE = 1e-3
# Of `ray_octaves`: a sine and a cosine per octave and coordinate, and the direction itself.
_ORIGIN_OCTAVES, _DIRECTION_OCTAVES = 7, 3
RAY_OCTAVE_DIM = 3 + 6 * (_ORIGIN_OCTAVES + _DIRECTION_OCTAVES)

CAMERA_SPEC = ActionSpec(
    (
        ActionColumn("fx", "image widths", low=0.0, null=1.0),
        ActionColumn("fy", "image heights", low=0.0, null=1.0),
        ActionColumn("px", "image widths", null=0.5),
        ActionColumn("py", "image heights", null=0.5),
        *(
            ActionColumn(f"R{row}{column}", null=float(row == column))
            if column < 3
            else ActionColumn(f"t{row}", "world units")
            for row in range(3)
            for column in range(4)
        ),
    )
)


class CameraError(ControlError):
    """Numbers that are no pinhole camera, or a camera by another convention."""


def split_cameras(cameras: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of cameras.

    Args:
        cameras: `(..., 16)`.

    Returns:
        Intrinsics `(..., 4)`, R `(..., 3, 3)` and t `(..., 3)`.

    Raises:
        ControlShapeError: Not 16 numbers.
    """
    if cameras.shape[-1] != CAMERA_SPEC.width:
        hint = " RealEstate10K files have two zeros behind the intrinsics: see cameras_from_realestate10k."
        raise ControlShapeError(
            f"A camera has {cameras.shape[-1]} numbers; allowed: 16, {', '.join(CAMERA_SPEC.names)}."
            + (hint if cameras.shape[-1] in (18, 19) else "")
        )
    matrix = cameras[..., 4:].unflatten(-1, (3, 4))
    return cameras[..., :4], matrix[..., :3], matrix[..., 3]


def precise(controls: Tensor) -> Tensor:
    """The controls in float64: on the CPU if their device is MPS, which has none."""
    return (controls.cpu() if controls.device.type == "mps" else controls).double()


def join_cameras(intrinsics: Tensor, rotation: Tensor, translation: Tensor) -> Tensor:
    """The inverse of `split_cameras`.

    Args:
        intrinsics: `(..., 4)`.
        rotation: R, `(..., 3, 3)`.
        translation: t, `(..., 3)`.

    Returns:
        `(..., 16)`.
    """
    matrix = torch.cat([rotation, translation[..., None]], dim=-1)
    return torch.cat([intrinsics, matrix.flatten(-2)], dim=-1)


def cameras_from_realestate10k(rows: Tensor) -> Tensor:
    """Drops the two columns that RealEstate10K stores as zeros behind the intrinsics.

    Args:
        rows: `(..., 18)`, without the time stamp.

    Returns:
        `(..., 16)`.

    Raises:
        ControlShapeError: Not 18 numbers.
        CameraError: The two columns are not zero: these are other numbers.
    """
    if rows.shape[-1] != 18:
        hint = ": drop the time stamp in front" if rows.shape[-1] == 19 else ""
        raise ControlShapeError(f"A row has {rows.shape[-1]} numbers; allowed: 18{hint}.")
    if rows[..., 4:6].any():
        raise CameraError("Columns 4 and 5 are not zero; expected fx, fy, px, py, 0, 0, then 3 x 4 numbers.")
    return torch.cat([rows[..., :4], rows[..., 6:]], dim=-1)


def check_cameras(cameras: Tensor, walks_forward: bool = False) -> None:
    """Says what is wrong with the cameras of a clip; it looks at every value, so call it where data comes in.

    Args:
        cameras: `(..., frames, 16)`.
        walks_forward: The camera is known to move mostly the way it looks. Then matrices that go from camera to world
            are recognized: read as world to camera they make it walk another way.

    Raises:
        ControlShapeError: Not 16 numbers per frame.
        CameraError: A number that is not finite, a focal length of zero, no rotation, or the wrong direction.
    """
    CAMERA_SPEC.check(cameras)
    intrinsics, rotation, translation = split_cameras(precise(cameras))
    if (intrinsics[..., :2] <= 0).any():
        raise CameraError("A focal length is 0; allowed: > 0, in image widths and heights.")
    identity = torch.eye(3, dtype=torch.float64, device=rotation.device)
    error = (rotation @ rotation.mT - identity).abs().amax(dim=(-1, -2))
    if error.max() > ORTHONORMAL_TOLERANCE:
        frame = (error > ORTHONORMAL_TOLERANCE).nonzero()[0, -1].item()
        raise CameraError(
            f"R of frame {frame} is no rotation: R R' differs from 1 by {error.max():.3g}, allowed: "
            f"{ORTHONORMAL_TOLERANCE:g}. A scale belongs into t, and angles into a rotation matrix."
        )
    if (torch.linalg.det(rotation) < 0).any():
        raise CameraError("R is a reflection (determinant -1); the axes are x right, y down, z forward.")
    if walks_forward:
        as_given = look_ahead(cameras)
        inverse = rotation.mT, -(rotation.mT @ translation[..., None])[..., 0]
        inverted = look_ahead(join_cameras(intrinsics, *inverse))
        if as_given < inverted - 0.5:
            raise CameraError(
                f"The camera moves the way it looks with cosine {as_given:.2f}; inverted it would be {inverted:.2f}. "
                "These matrices look like camera to world; allowed: world to camera."
            )


def look_ahead(cameras: Tensor) -> float:
    """How much a camera moves the way it looks: the mean cosine between its steps and its viewing direction.

    Args:
        cameras: `(..., frames, 16)`.

    Returns:
        -1 to 1, weighted by the length of the steps; 0 if it stands still.
    """
    _, rotation, translation = split_cameras(precise(cameras))
    steps = camera_centers(rotation, translation).diff(dim=-2)
    along = (steps * rotation[..., :-1, 2, :]).sum()
    return float(along / steps.norm(dim=-1).sum().clamp(min=1e-12))


def camera_centers(rotation: Tensor, translation: Tensor) -> Tensor:
    """Where cameras stand in the world.

    Args:
        rotation: R, `(..., 3, 3)`.
        translation: t, `(..., 3)`.

    Returns:
        -R't, `(..., 3)`.
    """
    return -(rotation.mT @ translation[..., None])[..., 0]


def normalize_to_first(cameras: Tensor) -> Tensor:
    """Cameras in the coordinates of the first one: P_k P_0^-1, so that moving the whole world changes nothing.

    Args:
        cameras: `(..., frames, 16)`.

    Returns:
        The same shape and dtype; the first camera is [1 | 0].
    """
    intrinsics, rotation, translation = split_cameras(precise(cameras))
    # x_k = R_k x + t_k and x = R_0' (x_0 - t_0).
    relative = rotation @ rotation[..., :1, :, :].mT
    shift = translation - (relative @ translation[..., :1, :, None])[..., 0]
    return join_cameras(intrinsics, relative, shift).to(cameras)


def plucker_rays(cameras: Tensor, height: int, width: int) -> Tensor:
    """The ray through the center of every pixel: unit direction d and moment o x d, in world coordinates.

    Args:
        cameras: `(..., 16)`; usually after `normalize_to_first`.
        height: Rows of the map, those of the latent.
        width: Columns of the map.

    Returns:
        `(..., 6, height, width)` in the dtype of `cameras`: first d, then o x d.
    """
    intrinsics, rotation, translation = split_cameras(precise(cameras))
    fx, fy, px, py = (part[..., None, None] for part in intrinsics.unbind(-1))  # (..., 1, 1)
    rows = (torch.arange(height, dtype=torch.float64, device=rotation.device)[:, None] + 0.5) / height
    across = (torch.arange(width, dtype=torch.float64, device=rotation.device) + 0.5) / width
    x, y = torch.broadcast_tensors((across - px) / fx, (rows - py) / fy)
    in_camera = torch.stack([x, y, torch.ones_like(x)], dim=-1)  # (..., height, width, 3)
    direction = in_camera @ rotation[..., None, :, :]  # a row times R is R' times the column
    direction = direction / direction.norm(dim=-1, keepdim=True)
    origin = camera_centers(rotation, translation)[..., None, None, :]
    moment = torch.linalg.cross(origin.expand_as(direction), direction)
    return torch.cat([direction, moment], dim=-1).movedim(-1, -3).to(cameras)


def ray_octaves(cameras: Tensor, height: int, width: int, unit: float) -> Tensor:
    """The ray through the center of every pixel as sines and cosines of its origin and direction.

    For models that know one world by heart: the coordinates stay those of the world, and octaves let a network tell
    places that are close to each other. The encoding is that of "Scene Representation Transformer" (arXiv 2111.13152).

    Args:
        cameras: `(..., 16)`.
        height: Rows of the map.
        width: Columns of the map.
        unit: Length of a step, in units of the world; the shortest wave is 8 of them, the longest 512.

    Returns:
        `(..., RAY_OCTAVE_DIM, height, width)` in the dtype of `cameras`.
    """
    precise_cameras = precise(cameras)
    direction = plucker_rays(precise_cameras, height, width).narrow(-3, 0, 3)
    _, rotation, translation = split_cameras(precise_cameras)
    origin = camera_centers(rotation, translation)[..., None, None].expand_as(direction) / unit
    angles = [2 * math.pi / 2 ** (octave + 3) * origin for octave in range(_ORIGIN_OCTAVES)]
    angles += [math.pi * 2**octave * direction for octave in range(_DIRECTION_OCTAVES)]
    waves = [wave for angle in angles for wave in (angle.sin(), angle.cos())]
    return torch.cat([direction, *waves], dim=-3).to(cameras)


def mirror_cameras(cameras: Tensor) -> Tensor:
    """Cameras of the horizontally flipped frames: those of a world mirrored along its x axis.

    Args:
        cameras: `(..., 16)`.

    Returns:
        The same shape: M [R | t] M with M = diag(-1, 1, 1), and px from the other side.
    """
    intrinsics, rotation, translation = split_cameras(cameras)
    mirror = torch.tensor([-1.0, 1.0, 1.0], dtype=cameras.dtype, device=cameras.device)
    fx, fy, px, py = intrinsics.unbind(-1)
    # + 0: a negated zero is zero.
    rotation = rotation * mirror[:, None] * mirror + 0.0
    return join_cameras(torch.stack([fx, fy, 1 - px, py], dim=-1), rotation, translation * mirror + 0.0)


def walking_cameras(poses: Tensor, focal: float, eye_height: float = 0.0) -> Tensor:
    """Level cameras of somebody who walks on a plane.

    Args:
        poses: `(..., 3)`: x, y and heading in radians, counterclockwise from x to y seen from above.
        focal: Focal length in image widths and heights; the pictures are square.
        eye_height: Above the plane, in units of the world.

    Returns:
        `(..., 16)` in a world whose z axis points up.
    """
    x, y, heading = poses.unbind(-1)
    cos, sin, zero = heading.cos(), heading.sin(), torch.zeros_like(x)
    right = torch.stack([sin, -cos, zero], dim=-1)
    down = torch.stack([zero, zero, zero - 1], dim=-1)
    ahead = torch.stack([cos, sin, zero], dim=-1)
    rotation = torch.stack([right, down, ahead], dim=-2)
    center = torch.stack([x, y, zero + eye_height], dim=-1)
    intrinsics = torch.stack([zero + focal, zero + focal, zero + 0.5, zero + 0.5], dim=-1)
    return join_cameras(intrinsics, rotation, -(rotation @ center[..., None])[..., 0])
