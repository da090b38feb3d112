"""Walks through a world, recorded as episodes."""

from __future__ import annotations

import os
from typing import Any

from tqdm import tqdm

from vidgen.data.episode_writer import EpisodeWriter
from vidgen.data.episodes import PLANAR_POSE, SPLITS, EpisodesInfo
from vidgen.runtime.device import derive_seed
from vidgen.runtime.errors import ConfigError, suggestion
from vidgen.worlds.room import RoomWorld

WORLDS = ("room", "vizdoom")


def make_world(name: str, size: int = 64) -> Any:
    """A world by its name on the command line.

    Args:
        name: one of `WORLDS`.
        size: height and width of a frame, pixels.

    Raises:
        ConfigError: an unknown name, or a size the world doesn't have.
        VidgenError: the package that the world needs isn't installed.
    """
    if name == "room":
        return RoomWorld(size)
    if name == "vizdoom":
        from vidgen.worlds.vizdoom_world import VizDoomWorld

        return VizDoomWorld(size)
    raise ConfigError(f"world {name!r} is unknown: {suggestion(name, WORLDS)}.")


def episodes_info(world: Any, fps: float) -> EpisodesInfo:
    """What a data set of a world is about."""
    return EpisodesInfo(
        world=world.name,
        world_version=world.version,
        size=(world.size, world.size),
        fps=fps,
        action_spec=world.delta_controls.spec.to_dict(),
        pose_names=PLANAR_POSE,
        focal=world.focal,
        eye_height=world.eye_height,
    )


def record(
    world: Any,
    root: str | os.PathLike,
    num_episodes: int,
    num_frames: int,
    split: str = "train",
    num_scenes: int = 1,
    first_scene: int = 0,
    seed: int = 0,
    fps: float = 12.0,
) -> int:
    """Record walks; a recording that was interrupted goes on, and ends with the same files.

    Args:
        world: a walkable world.
        root: folder of the data set; splits of one data set are recorded one after another.
        num_episodes: episodes of this split.
        num_frames: frames of each.
        split: `"train"`, `"validation"` or `"test"`.
        num_scenes: scenes that take turns.
        first_scene: seed of the first of them.
        seed: of the walks; every split, scene and episode has its own.
        fps: frames per second at which the world is meant to be played.

    Returns:
        Episodes that were added.

    Raises:
        ConfigError: a number that is less than 1.
        DatasetError: the folder holds episodes of something else.
    """
    for name, value in (("num_episodes", num_episodes), ("num_frames", num_frames), ("num_scenes", num_scenes)):
        if value < 1:
            raise ConfigError(f"{name}={value}; allowed: at least 1.")
    if split not in SPLITS:
        raise ConfigError(f"split={split!r}: {suggestion(split, SPLITS)}.")
    if not fps > 0:
        raise ConfigError(f"fps={fps}; allowed: > 0.")
    with EpisodeWriter(root, episodes_info(world, fps)) as writer:
        done = sum(item.split == split for item in writer.records)
        for episode in tqdm(range(done, num_episodes), initial=done, total=num_episodes, desc=split, unit="episode"):
            scene_seed = first_scene + episode % num_scenes
            scene = world.scene(scene_seed)
            walk = derive_seed(seed, SPLITS.index(split), episode)
            poses = world.explore(scene, num_frames, walk)
            writer.append(world.render(scene, poses), world.deltas(poses).numpy(), poses, split=split, seed=walk)
    return max(0, num_episodes - done)
