"""From the controls of a clip to what a world model takes, and back in time.

A data set stores controls in the units of its world: absolute cameras, recorded motion, or buttons. A
`WorldDiT` takes a vector per frame or a map per token. Maps are the Plücker rays of a camera ("LIVE: Long-horizon
Interactive Video World Modeling", arXiv 2602.03747): of an absolute camera in the coordinates of the first camera of
the window, of recorded motion in those of the frame before. A model of a single world can have its rays in the
coordinates of that world instead: then it always knows where it is, and what it shows can't drift away from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vidgen.controls.action_spec import ActionSpec
from vidgen.controls.cameras import (
    RAY_OCTAVE_DIM,
    normalize_to_first,
    plucker_rays,
    ray_octaves,
    walking_cameras,
)
from vidgen.controls.motion import CAMERA_DELTA_SPEC, integrate_cameras, integrate_planar
from vidgen.controls.reversal import ButtonControls, DeltaControls, PoseControls, ReversibleControls
from vidgen.controls.walk import Walk
from vidgen.runtime.errors import ConfigError

_KINDS = {"pose": PoseControls, "delta": DeltaControls, "buttons": ButtonControls}


@dataclass(frozen=True)
class ControlEncoder:
    """How a world model reads controls.

    Attributes:
        controls: their columns and how they are reversed.
        control_type: `"vector"`, the columns divided by `units`, or `"map"`, the rays of the camera.
        units: what counts as 1: one number per column for vectors; for maps the length of a step, one number.
        latent_size: height and width of a map, in latent cells.
        focal: focal length of motion given in three columns, in widths of the picture; cameras carry their own.
        in_world: rays of absolute cameras in the coordinates of the world, which is the same one in all clips; else in
            those of the first camera of the window.
        walk: how keys move an absolute camera; None where there are no keys.

    Raises:
        ConfigError: a map of buttons, absolute poses as vectors, or a missing or impossible number.
    """

    controls: ReversibleControls
    control_type: str = "vector"
    units: tuple[float, ...] = (1.0,)
    latent_size: tuple[int, int] | None = None
    focal: float | None = None
    in_world: bool = False
    walk: Walk | None = None

    def __post_init__(self) -> None:
        if self.control_type not in ("vector", "map"):
            raise ConfigError(f"control_type={self.control_type!r}; allowed: 'vector', 'map'.")
        if self.control_type == "vector" and isinstance(self.controls, PoseControls):
            raise ConfigError("control_type='vector' with absolute poses; allowed: 'map', or recorded motion.")
        if self.control_type == "map" and isinstance(self.controls, ButtonControls):
            raise ConfigError("control_type='map' with buttons; allowed: 'vector'.")
        if (self.in_world or self.walk) and not isinstance(self.controls, PoseControls):
            raise ConfigError("in_world and walk are for absolute poses; these controls are something else.")
        count = 1 if self.control_type == "map" else self.controls.spec.width
        if len(self.units) != count or min(self.units) <= 0:
            raise ConfigError(f"units={self.units}; allowed: {count} positive numbers for a {self.control_type}.")
        if self.control_type == "map":
            if self.latent_size is None or min(self.latent_size) < 1:
                raise ConfigError(f"latent_size={self.latent_size}; a map needs its height and width.")
            if self._is_planar and not (self.focal and self.focal > 0):
                raise ConfigError(f"focal={self.focal}; the rays of motion on a plane need a positive focal length.")

    @property
    def _is_planar(self) -> bool:
        return isinstance(self.controls, DeltaControls) and self.controls.spec.names != CAMERA_DELTA_SPEC.names

    @property
    def control_frame(self) -> str:
        """What the model's controls are relative to: `"window"`, `"delta"` or `"world"`, see `WorldDiT`."""
        if self.in_world:
            return "world"
        return "window" if isinstance(self.controls, PoseControls) else "delta"

    @property
    def actions(self) -> ActionSpec:
        """What a player does, with the names of keys: the controls themselves, or the motion of a walk."""
        return self.walk.spec if self.walk else self.controls.spec

    @property
    def control_dim(self) -> int:
        """Channels of what the model takes."""
        if self.in_world:
            return RAY_OCTAVE_DIM
        return 6 if self.control_type == "map" else self.controls.spec.width

    def reverse(self, controls: Tensor) -> Tensor:
        """Controls `(..., frames, columns)` of the clip played backward."""
        return self.controls.reverse(controls)

    def __call__(self, controls: Tensor) -> Tensor:
        """What the model takes for a clip that starts at its first frame.

        Args:
            controls: `(batch, frames, columns)`.

        Returns:
            float32, `(batch, frames, columns)` or `(batch, control_dim, frames, height, width)`.

        Raises:
            ControlShapeError: other columns than the spec's.
        """
        controls = self.controls.begin(controls)
        if self.control_type == "vector":
            return (controls / torch.tensor(self.units, dtype=controls.dtype, device=controls.device)).float()
        if self.in_world:
            return ray_octaves(controls.double(), *self.latent_size, self.units[0]).transpose(1, 2).float()
        rays = plucker_rays(self._cameras(controls.double()), *self.latent_size)  # (B, T, 6, h, w)
        direction, moment = rays.chunk(2, dim=2)
        return torch.cat([direction, moment / self.units[0]], dim=2).transpose(1, 2).float()

    def _cameras(self, controls: Tensor) -> Tensor:
        """Cameras `(batch, frames, 16)` in the coordinates that `control_frame` names."""
        if isinstance(self.controls, PoseControls):
            return normalize_to_first(controls)
        # Each step on its own, from the origin: (batch, frames, 2, columns), of which the second is where it ends.
        steps = torch.stack([torch.zeros_like(controls), controls], dim=-2)
        if self._is_planar:
            poses = integrate_planar(torch.zeros_like(controls), steps)
            cameras = walking_cameras(poses, self.focal)
        else:
            origin = torch.eye(3, 4, dtype=controls.dtype, device=controls.device).flatten()
            intrinsics = torch.tensor(
                [self.focal or 1.0] * 2 + [0.5] * 2, dtype=controls.dtype, device=controls.device
            )
            first = torch.cat([intrinsics, origin]).expand(*controls.shape[:-1], -1)
            cameras = integrate_cameras(first, steps)
        return normalize_to_first(cameras)[..., 1, :]

    def to_dict(self) -> dict[str, Any]:
        """A description that JSON can hold."""
        kind = next(name for name, cls in _KINDS.items() if isinstance(self.controls, cls))
        description = {"kind": kind, "spec": self.controls.spec.to_dict(), "control_type": self.control_type}
        if kind == "buttons":
            description["inverse_map"] = dict(self.controls.inverse_map)
            description["direction_embedding"] = self.controls.direction_embedding
        latent_size = list(self.latent_size) if self.latent_size else None
        return {
            **description,
            "units": list(self.units),
            "latent_size": latent_size,
            "focal": self.focal,
            "in_world": self.in_world,
            "walk": self.walk and self.walk.to_dict(),
        }

    @classmethod
    def from_dict(cls, description: Mapping[str, Any]) -> ControlEncoder:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: a description that `to_dict` did not write.
        """
        try:
            arguments = [ActionSpec.from_dict(description["spec"])]
            if description["kind"] == "buttons":
                arguments += [description["inverse_map"], description["direction_embedding"]]
            latent_size = tuple(description["latent_size"]) if description["latent_size"] else None
            return cls(
                _KINDS[description["kind"]](*arguments),
                description["control_type"],
                tuple(description["units"]),
                latent_size,
                description["focal"],
                description["in_world"],
                description["walk"] and Walk.from_dict(description["walk"]),
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"No description of a control encoder: {type(error).__name__} {error}.") from error
