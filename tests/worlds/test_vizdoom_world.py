"""What would be wrong: a frame of Doom that depends on how the player came there."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from vidgen.controls import check_cameras
from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.worlds.world import World

pytest.importorskip("vizdoom", reason="needs vizdoom (extra: worlds)")

from vidgen.worlds.vizdoom_world import TURN_UNIT, VizDoomWorld


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cwd")
    here = os.getcwd()
    os.chdir(folder)
    with VizDoomWorld(size=64) as world:
        os.chdir(here)
        assert not list(folder.iterdir())  # the engine leaves nothing behind
        yield world


@pytest.fixture(scope="module")
def scene(world):
    return world.scene(0)


def test_a_walk_played_backwards_is_the_walk_rendered_at_the_reversed_poses(world, scene):
    poses = world.explore(scene, 60, seed=3)
    frames = world.render(scene, poses)
    assert frames.shape == (60, 64, 64, 3) and frames.dtype == np.uint8
    assert np.array_equal(world.render(scene, poses[::-1]), frames[::-1])
    # And from places all over the level in between.
    elsewhere = np.concatenate([world.explore(scene, 1, seed) for seed in range(5)])
    mixed = world.render(scene, np.concatenate([elsewhere, poses[[30]], elsewhere[::-1], poses[[7]]]))
    assert np.array_equal(mixed[5], frames[30]) and np.array_equal(mixed[-1], frames[7])
    changed = (frames[1:] != frames[:-1]).any(axis=-1).mean(axis=(1, 2))
    moved = (poses[1:] != poses[:-1]).any(axis=1)
    assert (changed[moved] > 0.05).mean() > 0.9 and not changed[~moved].any()


def test_reversed_deltas_lead_back_exactly(world, scene):
    poses = world.explore(scene, 300, seed=4)
    deltas = world.deltas(poses)
    assert np.array_equal(world.integrate(poses[0], deltas), poses)
    back = world.integrate(poses[-1], world.delta_controls.reverse(deltas))
    assert np.array_equal(back, poses[::-1])
    world.delta_controls.spec.check(deltas, num_frames=300)
    check_cameras(world.cameras(poses), walks_forward=True)


def test_it_is_a_world(world):
    assert isinstance(world, World)


def test_walks_stay_inside_and_clear_of_walls(world, scene):
    poses = world.explore(scene, 300, seed=5)
    assert all(world.is_inside(scene, place) and world.is_free(scene, place) for place in poses[:, :2])
    assert not world.is_inside(scene, np.array([-5000.0, 0.0]))


def test_turning_left_moves_the_picture_to_the_right(world, scene):
    first = world.explore(scene, 1, seed=3)[0]
    turn = world.delta_controls.spec.row("turn left")
    frames = world.render(scene, world.integrate(first, torch.stack([torch.zeros_like(turn), turn]))).astype(float)
    # 5.6 degrees are about four of 64 pixels in the middle of a picture 74 degrees wide.
    middle = slice(20, 44)
    errors = {
        shift: np.abs(frames[1, :, middle] - np.roll(frames[0], shift, axis=1)[:, middle]).mean()
        for shift in range(-8, 9)
    }
    assert 2 <= min(errors, key=errors.get) <= 6


def test_a_small_frame_is_the_mean_of_a_large_one(world, scene):
    poses = world.explore(scene, 3, seed=6)
    with VizDoomWorld(size=192) as large:
        pictures = large.render(large.scene(0), poses).reshape(3, 64, 3, 64, 3, 3)
    assert np.abs(pictures.mean(axis=(2, 4)) - world.render(scene, poses)).max() <= 0.5


def test_bad_input_is_refused(world, scene):
    with pytest.raises(ConfigError, match="size=50; allowed: 24, 32, 48, 64, 96, 192, nearest: 48"):
        VizDoomWorld(size=50)
    place = world.explore(scene, 1, seed=3)[0]
    for change, message in (
        ([0.5, 0, 0], "allowed: whole map units"),
        ([0, 0, 0.4 * TURN_UNIT], "multiples of 2 pi / 256"),
        ([np.nan, 0, 0], "allowed: finite"),
    ):
        with pytest.raises(VidgenError, match=message):
            world.render(scene, place[None] + change)
