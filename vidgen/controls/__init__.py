"""What steers a world model: actions and cameras, and what steers the same clip backwards."""

from vidgen.controls.action_spec import ActionColumn, ActionSpec, ControlError, ControlShapeError
from vidgen.controls.cameras import (
    CAMERA_SPEC,
    CameraError,
    camera_centers,
    cameras_from_realestate10k,
    check_cameras,
    join_cameras,
    look_ahead,
    mirror_cameras,
    normalize_to_first,
    plucker_rays,
    ray_octaves,
    split_cameras,
    walking_cameras,
)
from vidgen.controls.encoder import ControlEncoder
from vidgen.controls.motion import (
    CAMERA_DELTA_SPEC,
    camera_deltas,
    integrate_cameras,
    integrate_planar,
    planar_delta_spec,
    planar_deltas,
)
from vidgen.controls.reversal import (
    ButtonControls,
    DeltaControls,
    NonInvertibleActionError,
    PoseControls,
    ReversibleControls,
    reverse,
)
from vidgen.controls.walk import FloorPlan, Walk

__all__ = [
    "ActionColumn",
    "ActionSpec",
    "ControlError",
    "ControlShapeError",
    "ReversibleControls",
    "PoseControls",
    "DeltaControls",
    "ButtonControls",
    "NonInvertibleActionError",
    "reverse",
    "ControlEncoder",
    "CAMERA_SPEC",
    "CameraError",
    "camera_centers",
    "cameras_from_realestate10k",
    "check_cameras",
    "join_cameras",
    "look_ahead",
    "mirror_cameras",
    "normalize_to_first",
    "plucker_rays",
    "ray_octaves",
    "split_cameras",
    "walking_cameras",
    "CAMERA_DELTA_SPEC",
    "camera_deltas",
    "integrate_cameras",
    "integrate_planar",
    "planar_delta_spec",
    "planar_deltas",
    "FloorPlan",
    "Walk",
]
