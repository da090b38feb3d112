"""What would be wrong: a picture that depends on more than the pose, or controls that describe another camera."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from vidgen.controls import check_cameras, mirror_cameras, normalize_to_first, reverse, split_cameras
from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.worlds.exploration import MotionStatistics, explore, step_planar
from vidgen.worlds.panorama import PanoramaWorld
from vidgen.worlds.planar import PlanarWorld
from vidgen.worlds.room import BODY_RADIUS, WALL_HEIGHT, RoomWorld
from vidgen.worlds.room_scenes import FLOOR_TEXELS, PILLAR_RADIUS, RoomScene
from vidgen.worlds.world import World

WORLDS = {
    "panorama": PanoramaWorld(size=16, step=3),
    "room": RoomWorld(size=32),
    "wide room": RoomWorld(size=64, field_of_view=100, rooms=(3, 1)),
}


@pytest.fixture(params=WORLDS)
def world(request):
    return WORLDS[request.param]


@pytest.fixture(scope="module")
def room_scene() -> RoomScene:
    return WORLDS["room"].scene(5)


def test_worlds_offer_what_a_world_has_to(world):
    assert isinstance(world, World)


def test_a_walk_played_backwards_is_the_walk_rendered_at_the_reversed_poses(world):
    scene = world.scene(3)
    poses = world.explore(scene, 37, seed=1)
    frames = world.render(scene, poses)
    assert frames.shape == (37, world.size, world.size, 3) and frames.dtype == np.uint8
    assert np.array_equal(world.render(scene, poses[::-1]), frames[::-1])
    # Neither the batch nor the frame before shows.
    assert np.array_equal(world.render(scene, poses[[20]])[0], frames[20])
    assert np.array_equal(world.render(world.scene(3), poses[5:11]), frames[5:11])


def test_reversed_controls_are_the_controls_of_the_reversed_walk(world):
    scene = world.scene(3)
    poses = world.explore(scene, 37, seed=1)
    frames = torch.from_numpy(world.render(scene, poses))[None]
    for kind, controls in (
        (world.pose_controls, world.cameras),
        (world.delta_controls, world.deltas),
    ):
        kind.spec.check(controls(poses), num_frames=37)
        flipped, reversed_controls = reverse(frames, controls(poses)[None], kind)
        assert np.array_equal(flipped[0], world.render(scene, poses[::-1]))
        torch.testing.assert_close(reversed_controls[0], controls(poses[::-1].copy()), atol=1e-12, rtol=0)


def test_deltas_lead_back_to_where_the_walk_began(world):
    poses = world.explore(world.scene(3), 200, seed=2)
    deltas = world.deltas(poses)
    np.testing.assert_allclose(world.integrate(poses[0], deltas), poses, atol=1e-9)
    back = world.integrate(poses[-1], world.delta_controls.reverse(deltas))
    np.testing.assert_allclose(back, poses[::-1], atol=1e-6)


def test_same_seed_same_walk_and_another_seed_another(world):
    scene = world.scene(3)
    walk = world.explore(scene, 20, seed=4)
    assert np.array_equal(walk, world.explore(world.scene(3), 20, seed=4))
    assert not np.array_equal(walk, world.explore(scene, 20, seed=5))
    corner = np.array([[2.5, 2.5, 0.3]]) if isinstance(world, RoomWorld) else walk[:1]
    assert not np.array_equal(world.render(scene, corner), world.render(world.scene(4), corner))


def test_every_key_moves_what_is_seen_and_its_opposite_brings_it_back(world):
    scene = world.scene(3)
    first = np.array([2.5, 2.5, 0.3]) if isinstance(world, RoomWorld) else np.array([7, 9])
    opposites = {"forward": "back", "left": "right", "turn left": "turn right", "up": "down"}
    spec = world.delta_controls.spec
    for key, opposite in opposites.items():
        if key not in spec.choices:
            continue
        deltas = torch.stack([spec.row(), spec.row(key), spec.row(opposite)])
        poses = world.integrate(first, deltas)
        frames = world.render(scene, poses)
        assert (frames[1] != frames[0]).mean() > 0.05
        np.testing.assert_allclose(poses[2], first, atol=1e-12)


def test_flipped_frames_are_frames_of_the_mirrored_world(world):
    scene = world.scene(6)
    poses = world.explore(scene, 24, seed=3)
    flipped = world.render(scene, poses)[:, :, ::-1]
    if isinstance(world, RoomWorld):
        mirrored = np.stack([scene.solid.shape[1] - poses[:, 0], poses[:, 1], math.pi - poses[:, 2]], axis=1)
    else:
        mirrored = np.stack([world.period - world.size - poses[:, 0], poses[:, 1]], axis=1)
    frames = world.render(scene.mirrored(), mirrored)
    # Rounding decides which of two texels is seen where a pixel's center lies between them.
    assert (frames == flipped).all(axis=-1).mean() > 0.998
    cameras = normalize_to_first(world.cameras(mirrored))
    expected = normalize_to_first(mirror_cameras(world.cameras(poses)))
    torch.testing.assert_close(cameras, expected, atol=1e-12, rtol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Panorama


def test_the_panorama_is_a_crop_that_goes_round():
    world = WORLDS["panorama"]
    picture = world.scene(0).picture
    for x, y in ((0, 0), (60, 5), (-7, 130)):
        frame = world.render(world.scene(0), np.array([[x, y]]))[0]
        for row in range(16):
            for column in range(16):
                assert np.array_equal(frame[row, column], picture[(y + row) % 64, (x + column) % 64])


def test_the_panorama_camera_sees_its_pixels_on_a_wall():
    """Pixel (row, column) at pose (x, y) looks at the point (x + column, y + row) of the wall z = 0."""
    world = WORLDS["panorama"]
    intrinsics, rotation, translation = split_cameras(world.cameras(np.array([[5, 8]])))
    point = torch.tensor([5 + 3.5, 8 + 11.5, 0]).double() / 16  # the middle of column 3, row 11
    # The wall is at distance 1 of cameras in the plane z = 0.
    x, y, z = rotation[0] @ (point + torch.tensor([0, 0, 1.0]).double()) + translation[0]
    fx, fy, px, py = intrinsics[0]
    assert (float(fx * x / z + px) * 16, float(fy * y / z + py) * 16) == (3.5, 11.5)


def test_bad_panoramas_are_refused():
    with pytest.raises(ConfigError, match="size=80 of period=64"):
        PanoramaWorld(size=80)
    with pytest.raises(ConfigError, match="step=0"):
        PanoramaWorld(step=0)
    world = WORLDS["panorama"]
    with pytest.raises(VidgenError, match="whole numbers"):
        world.render(world.scene(0), np.array([[0.5, 1]]))
    with pytest.raises(VidgenError, match="num_frames=0"):
        world.explore(world.scene(0), 0, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Rooms


def test_frames_show_what_a_ray_through_each_pixel_meets(room_scene):
    """March along the ray of each pixel, taken from the camera, until it leaves the free space of the room."""
    world = WORLDS["room"]
    # Plain surfaces of different hues, so that light and mipmaps don't matter.
    count = len(room_scene.textures)
    colors = np.random.default_rng(0).integers(20, 256, (count + 2, 3)).astype(np.uint8)
    plain = dataclasses.replace(
        room_scene,
        textures=np.broadcast_to(colors[:count, None, None], room_scene.textures.shape),
        floor=np.broadcast_to(colors[-2], room_scene.floor.shape),
        ceiling=np.broadcast_to(colors[-1], room_scene.ceiling.shape),
    )
    poses = world.explore(plain, 400, seed=2)[::16]
    frames = world.render(plain, poses).astype(float)
    agreeing = []
    for frame, camera in zip(frames, world.cameras(poses)):
        intrinsics, rotation, translation = (part.numpy() for part in split_cameras(camera))
        eye = -rotation.T @ translation + [0, 0, WALL_HEIGHT / 2]
        for row, column in np.random.default_rng(1).integers(0, world.size, (40, 2)):
            pixel = (np.array([column, row]) + 0.5) / world.size
            ray = np.append((pixel - intrinsics[2:]) / intrinsics[:2], 1.0) @ rotation
            points = eye + np.arange(0, 14, 0.01)[:, None] * ray / np.linalg.norm(ray)
            cells = np.clip(np.floor(points[:, :2]).astype(int), 0, np.array(plain.solid.shape)[::-1] - 1)
            in_wall = plain.solid[cells[:, 1], cells[:, 0]]
            pillar = np.linalg.norm(points[:, None, :2] - plain.pillars, axis=-1) < PILLAR_RADIUS
            outside = (points[:, 2] < 0) | (points[:, 2] > WALL_HEIGHT)
            hit = int(np.argmax(in_wall | pillar.any(1) | outside))
            if outside[hit]:
                texture = -2 if points[hit, 2] < 0 else -1
            elif in_wall[hit]:
                step = tuple(cells[hit] - cells[hit - 1])
                side = {(1, 0): 0, (0, 1): 1, (-1, 0): 2, (0, -1): 3}.get(step, 0)
                texture = plain.faces[cells[hit - 1][1], cells[hit - 1][0], side]
            else:
                texture = plain.pillar_textures[np.argmax(pillar[hit])]
            seen, expected = frame[row, column], colors[texture].astype(float)
            agreeing.append(seen @ expected > 0.998 * np.linalg.norm(seen) * np.linalg.norm(expected))
    assert np.mean(agreeing) > 0.98  # a march in steps misses a little at edges


@pytest.mark.parametrize("heading", [0.0, math.pi / 2, math.pi, -math.pi / 2], ids=["east", "north", "west", "south"])
def test_pictures_hang_the_right_way_round(room_scene, heading):
    left_is_red = np.zeros_like(room_scene.textures)
    left_is_red[:, :32, :32], left_is_red[:, :32, 32:], left_is_red[:, 32:] = (255, 0, 0), (0, 0, 255), (0, 255, 0)
    scene = dataclasses.replace(room_scene, textures=left_is_red, pillars=np.zeros((0, 2)))
    cells = np.argwhere(scene.rooms == 0)[:, ::-1]
    ahead = np.round([math.cos(heading), math.sin(heading)]).astype(int)
    x, y = next(cell for cell in cells if scene.solid[cell[1] + ahead[1], cell[0] + ahead[0]])
    frame = WORLDS["room"].render(scene, np.array([[x + 0.5, y + 0.5, heading]]))[0].astype(int)
    # Half a cell in front of the wall, where its upper half fills the upper half of the frame.
    assert (frame[4:14, 8:15].argmax(-1) == 0).all()
    assert (frame[4:14, 17:24].argmax(-1) == 2).all()
    assert (frame[18:28].argmax(-1) == 1).all()


def test_the_floor_lies_where_its_texels_say(room_scene):
    """One bright tile of half a cell on a dark floor, seen from a cell away: in front, on the right-hand side."""
    world = WORLDS["room"]
    floor = np.full_like(room_scene.floor, 10)
    half = FLOOR_TEXELS // 2
    x, y = 2, 2
    # The tile spans x + 1 to x + 1.5 and y to y + 0.5; the camera at (x, y + 0.5) looks east.
    floor[y * FLOOR_TEXELS : y * FLOOR_TEXELS + half, (x + 1) * FLOOR_TEXELS : (x + 1) * FLOOR_TEXELS + half] = 250
    scene = dataclasses.replace(
        room_scene, floor=floor, ceiling=np.zeros_like(floor), textures=np.zeros_like(room_scene.textures)
    )
    assert not scene.solid[y, x : x + 2].any()
    frame = world.render(dataclasses.replace(scene, pillars=np.zeros((0, 2))), np.array([[x, y + 0.5, 0.0]]))[0]
    rows, columns = np.nonzero(frame[..., 0] > 120)
    focal = world.focal * world.size
    nearest, farthest = (focal * WALL_HEIGHT / 2 / distance + world.size / 2 for distance in (1.0, 1.5))
    assert abs(rows.max() + 1 - nearest) <= 1 and abs(rows.min() - farthest) <= 1
    assert columns.min() == world.size / 2
    assert abs(columns[rows == rows.max()].max() + 1 - (world.size / 2 + focal * 0.5 / 1.0)) <= 2


def test_things_far_away_are_darker():
    world = RoomWorld(size=32, rooms=(1, 1))
    scene = world.scene(0)
    white = dataclasses.replace(
        scene,
        textures=np.full_like(scene.textures, 255),
        floor=np.full_like(scene.floor, 255),
        ceiling=np.full_like(scene.ceiling, 255),
        pillars=np.zeros((0, 2)),
    )
    frame = world.render(white, np.array([[1.2, 2.5, 0.0]]))[0].astype(int)
    assert (np.diff(frame[16:, 16, 0]) >= 0).all() and frame[31, 16, 0] > 1.2 * frame[16, 16, 0]
    assert (frame[..., 0] == frame[..., 1]).all() and (frame[..., 0] == frame[..., 2]).all()


@pytest.mark.parametrize("seed", range(8))
def test_every_room_can_be_reached_and_nothing_is_open_to_the_outside(seed):
    scene = RoomWorld(rooms=(3, 2)).scene(seed)
    assert scene.solid[[0, -1]].all() and scene.solid[:, [0, -1]].all()
    reached = np.zeros_like(scene.solid)
    reached[tuple(np.argwhere(~scene.solid)[0])] = True
    for _ in range(scene.solid.size):
        spread = reached.copy()
        for shift, axis in ((1, 0), (-1, 0), (1, 1), (-1, 1)):
            spread |= np.roll(reached, shift, axis)
        reached = spread & ~scene.solid
    assert reached.sum() == (~scene.solid).sum()
    assert set(scene.rooms[scene.rooms >= 0]) == set(range(6))


def test_walls_of_a_scene_can_be_told_apart():
    scene = WORLDS["room"].scene(1)
    # Plain faces by room and side: the doorways' stone is texture 0, pictures come on top of plain walls.
    plain = {
        int(np.bincount(scene.faces[scene.rooms == room][:, side]).argmax()) for room in range(4) for side in range(4)
    }
    assert len(plain) == 16
    walls = scene.textures[sorted(plain)].astype(float)
    colors = walls.mean(axis=(1, 2))
    gaps = np.abs(colors[:, None] - colors[None]).max(-1) + 999 * np.eye(16)
    assert gaps.min() > 4
    pictures = np.setdiff1d(scene.faces, [0, *plain])
    assert len(pictures) >= 16


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_keeps_clear_of_walls_and_gets_about(seed):
    world = WORLDS["room"]
    scene = world.scene(seed)
    poses = world.explore(scene, 1000, seed=0)
    for place in poses[:, :2]:
        assert world.is_free(scene, place)
        gaps = np.hypot(*(scene.pillars - place).T)
        assert not gaps.size or gaps.min() >= PILLAR_RADIUS + BODY_RADIUS
    cells = {tuple(cell) for cell in np.floor(poses[:, :2]).astype(int)}
    assert len(cells) > 12


def test_a_walk_has_the_statistics_it_is_given(room_scene):
    world = WORLDS["room"]
    motion = MotionStatistics(walk=0.1, turn=0.2, hold=4.0)
    deltas = world.deltas(world.explore(room_scene, 600, seed=1, motion=motion))[1:]
    length = deltas[:, :2].norm(dim=1)
    assert ((length - 0.1).abs().minimum(length) < 1e-9).all()
    assert ((deltas[:, 2].abs() - 0.2).abs().minimum(deltas[:, 2].abs()) < 1e-9).all()
    assert (length > 0.05).float().mean() > 0.3
    assert (deltas[:, 0] > 0.05).sum() > 2 * (deltas[:, 0] < -0.05).sum()
    jittered = world.deltas(world.explore(room_scene, 200, 1, dataclasses.replace(motion, jitter=0.1)))[1:]
    assert 0.005 < jittered[:, 0][jittered[:, 0] > 0.05].std() < 0.02


def test_poses_stay_on_their_grid():
    motion = MotionStatistics(walk=12.0, turn=0.3, position_grid=1.0, turn_grid=math.pi / 128)
    poses = explore(lambda here, there: True, np.array([0.4, 0.6, 1.0]), 100, motion, np.random.default_rng(0))
    assert np.array_equal(poses[:, :2], np.round(poses[:, :2]))
    turns = poses[:, 2] / (math.pi / 128)
    np.testing.assert_allclose(turns, np.round(turns), atol=1e-9)
    assert np.ptp(poses[:, 0]) > 50


def test_a_step_is_the_step_of_the_controls():
    world = WORLDS["room"]
    delta = world.delta_controls.spec.row("forward", "turn left")
    pose = np.array([2.0, 3.0, 0.7])
    path = world.integrate(pose, torch.stack([torch.zeros_like(delta), delta]))
    np.testing.assert_allclose(step_planar(pose, delta.numpy()), path[1], atol=1e-12)


def test_cameras_of_a_walk_are_cameras(room_scene):
    world = WORLDS["room"]
    check_cameras(world.cameras(world.explore(room_scene, 200, seed=0)), walks_forward=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 33}, "size=33; allowed: even, 16 to 512, nearest: 34"),
        ({"size": 1000}, "nearest: 512"),
        ({"field_of_view": 1.4}, "field_of_view=1.4; allowed: 30 to 120 degrees"),
        ({"rooms": (0, 2)}, "rooms=\\(0, 2\\)"),
    ],
)
def test_bad_rooms_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RoomWorld(**arguments)


def test_bad_poses_are_refused(room_scene):
    world = WORLDS["room"]
    for pose, message in (
        ([0.5, 0.5, 0.0], "Pose 1 at x=0.5, y=0.5 is in a wall"),
        ([-3.0, 1.5, 0.0], "Pose 1 at x=-3, y=1.5 is in a wall or off the map"),
        ([1e9, 1.5, 0.0], "off the map"),
        ([1.5, math.nan, 0.0], "allowed: finite"),
    ):
        with pytest.raises(VidgenError, match=message):
            world.render(room_scene, np.array([[1.5, 1.5, 0.0], pose]))
    with pytest.raises(VidgenError, match="shape \\(3,\\)"):
        world.render(room_scene, np.zeros(3))
    with pytest.raises(VidgenError, match="num_frames=0"):
        world.explore(room_scene, 0, seed=0)
    with pytest.raises(ConfigError, match="turn=9; allowed: 0 to pi radians"):
        MotionStatistics(walk=0.1, turn=9)
    with pytest.raises(ConfigError, match="hold=0.5"):
        MotionStatistics(walk=0.1, turn=0.1, hold=0.5)
    with pytest.raises(ConfigError, match="walk=nan"):
        MotionStatistics(walk=math.nan, turn=0.1)


def test_cameras_of_a_planar_world_stand_at_its_eye_height():
    class Walkers(PlanarWorld):
        motion = MotionStatistics(walk=1.0, turn=0.1, clearance=0.0)
        focal = 0.7
        eye_height = 41.0

    cameras = Walkers("meters").cameras(np.array([[3.0, -2.0, 0.4], [0.0, 5.0, -2.0]]))
    world_to_camera = cameras[:, 4:].unflatten(1, (3, 4))
    rotation, translation = world_to_camera[:, :, :3], world_to_camera[:, :, 3]
    centers = -(rotation.mT @ translation[:, :, None])[:, :, 0]
    # Distance from the same places on the ground; which axis points up is the cameras' convention.
    grounded = Walkers("meters")
    grounded.eye_height = 0.0
    world_to_camera = grounded.cameras(np.array([[3.0, -2.0, 0.4], [0.0, 5.0, -2.0]]))[:, 4:].unflatten(1, (3, 4))
    floor = -(world_to_camera[:, :, :3].mT @ world_to_camera[:, :, 3:])[:, :, 0]
    torch.testing.assert_close((centers - floor).norm(dim=1), torch.full((2,), 41.0, dtype=torch.float64))
