"""Control encoders: what a world model is told about a clip."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vidgen.controls import (
    CAMERA_DELTA_SPEC,
    CAMERA_SPEC,
    ActionColumn,
    ActionSpec,
    ButtonControls,
    ControlEncoder,
    DeltaControls,
    FloorPlan,
    PoseControls,
    Walk,
    camera_deltas,
    normalize_to_first,
    planar_delta_spec,
    planar_deltas,
    plucker_rays,
    walking_cameras,
)
from vidgen.runtime.errors import ConfigError

FOCAL = 0.7


def walk(num_frames: int, seed: int = 0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy(np.cumsum(generator.normal(size=(2, num_frames, 3)), axis=1))


def encoders() -> dict[str, ControlEncoder]:
    buttons = ActionSpec((ActionColumn("left", low=0, high=1), ActionColumn("right", low=0, high=1)))
    swap = ButtonControls(buttons, {"left": "right", "right": "left"})
    planar = DeltaControls(planar_delta_spec("units"))
    by_keys = Walk(planar_delta_spec("units"), FloorPlan(2.0, (0.0, -4.0), ("..#", "#..")))
    return {
        "world map": ControlEncoder(PoseControls(CAMERA_SPEC), "map", (2.0,), (3, 4), in_world=True, walk=by_keys),
        "pose map": ControlEncoder(PoseControls(CAMERA_SPEC), "map", (2.0,), (3, 4)),
        "planar map": ControlEncoder(planar, "map", (2.0,), (3, 4), FOCAL),
        "camera map": ControlEncoder(DeltaControls(CAMERA_DELTA_SPEC), "map", (2.0,), (3, 4), FOCAL),
        "planar vector": ControlEncoder(planar, "vector", (2.0, 2.0, 0.1)),
        "buttons": ControlEncoder(swap, "vector", (1.0, 1.0)),
    }


def test_motion_on_a_plane_and_in_space_give_the_rays_of_each_camera_seen_from_the_one_before():
    poses = walk(5)
    cameras = walking_cameras(poses, FOCAL)
    expected = torch.stack(
        [plucker_rays(normalize_to_first(cameras[:, k - 1 : k + 1])[:, 1], 3, 4) for k in range(1, 5)], dim=2
    )
    expected[:, 3:] /= 2
    by_pose = encoders()["planar map"](planar_deltas(poses))
    torch.testing.assert_close(by_pose[:, :, 1:].double(), expected, atol=1e-6, rtol=0)
    by_camera = encoders()["camera map"](camera_deltas(cameras))
    torch.testing.assert_close(by_camera[:, :, 1:].double(), expected, atol=1e-6, rtol=0)


def test_poses_give_rays_relative_to_the_first_camera_of_the_window():
    cameras = walking_cameras(walk(5), FOCAL)
    encode = encoders()["pose map"]
    whole, later = encode(cameras), encode(cameras[:, 2:])
    rays = plucker_rays(normalize_to_first(cameras), 3, 4).transpose(1, 2)
    torch.testing.assert_close(whole[:, :3].double(), rays[:, :3], atol=1e-6, rtol=0)
    torch.testing.assert_close(whole[:, 3:].double(), rays[:, 3:] / 2, atol=1e-6, rtol=0)
    assert later[:, 3:, 0].abs().max() < 1e-6  # the first camera stands at the origin
    assert (later - whole[:, :, 2:]).abs().max() > 0.1


def test_vectors_are_in_units_and_start_with_the_null_action():
    deltas = planar_deltas(walk(5))[:, 1:]
    vectors = encoders()["planar vector"](deltas)
    assert not vectors[:, 0].any()
    torch.testing.assert_close(vectors[:, 1:], (deltas[:, 1:] / torch.tensor([2.0, 2.0, 0.1])).float())


@pytest.mark.parametrize("name", encoders())
def test_a_description_gives_the_same_encoder(name: str):
    encoder = encoders()[name]
    twin = ControlEncoder.from_dict(encoder.to_dict())
    assert twin.to_dict() == encoder.to_dict()
    controls = torch.rand(1, 4, encoder.controls.spec.width, dtype=torch.float64)
    if name == "pose map":
        controls = walking_cameras(walk(4), FOCAL)
    encoded = encoder(controls)
    assert torch.equal(twin(controls), encoded)
    assert torch.equal(twin.reverse(controls), encoder.reverse(controls))
    assert encoded.shape[1 if encoder.control_type == "map" else 2] == encoder.control_dim
    frames = {"pose map": "window", "world map": "world"}
    assert encoder.control_frame == frames.get(name, "delta")


def test_wrong_settings_are_named():
    planar = DeltaControls(planar_delta_spec("units"))
    with pytest.raises(ConfigError, match="focal=None"):
        ControlEncoder(planar, "map", (1.0,), (3, 4))
    with pytest.raises(ConfigError, match="latent_size"):
        ControlEncoder(planar, "map", (1.0,), None, FOCAL)
    with pytest.raises(ConfigError, match="3 positive numbers"):
        ControlEncoder(planar, "vector", (1.0,))
    with pytest.raises(ConfigError, match="absolute poses"):
        ControlEncoder(PoseControls(CAMERA_SPEC), "vector")
    with pytest.raises(ConfigError, match="KeyError 'kind'"):
        ControlEncoder.from_dict({"spec": planar.spec.to_dict()})


def test_rays_in_the_world_tell_where_one_is_and_those_of_the_window_do_not():
    cameras = walking_cameras(walk(4), FOCAL)
    moved = walking_cameras(walk(4) + torch.tensor([30.0, -7.0, 0.0]), FOCAL)
    encoder = encoders()["pose map"]
    torch.testing.assert_close(encoder(cameras), encoder(moved), atol=1e-5, rtol=0)
    encoder = encoders()["world map"]
    known = encoder(cameras)
    assert known.shape == (2, encoder.control_dim, 4, 3, 4)
    torch.testing.assert_close(known[:, :3], plucker_rays(cameras, 3, 4)[:, :, :3].transpose(1, 2).float())
    torch.testing.assert_close(encoder(cameras[:, 2:]), known[:, :, 2:], atol=0, rtol=0)  # of each frame alone
    assert (encoder(moved) - known).abs().amax(dim=(0, 1, 3, 4)).min() > 0.1
    # The shortest wave is 8 units long, and a walker comes back to the same numbers after the longest only.
    far = walking_cameras(walk(4) + torch.tensor([2.0 * 8, 0.0, 0.0]), FOCAL)
    same = (encoder(far) - known).abs().amax(dim=(0, 2, 3, 4)) < 1e-4
    assert same[3:9].all() and not same.all()


def test_motion_has_no_place_in_the_world():
    with pytest.raises(ConfigError, match="absolute poses"):
        ControlEncoder(DeltaControls(planar_delta_spec("units")), "map", (2.0,), (3, 4), FOCAL, in_world=True)
