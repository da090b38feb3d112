"""Worlds, recorded as episodes."""

from __future__ import annotations

import os
from typing import Any

from tqdm import tqdm

from vidgen.data.episode_writer import EpisodeWriter
from vidgen.data.episodes import PLANAR_POSE, SLIDING_POSE, SPLITS, EpisodeRecord, EpisodesInfo
from vidgen.data.latent_dataset import DatasetError
from vidgen.runtime.device import derive_seed
from vidgen.runtime.errors import ConfigError, suggestion
from vidgen.worlds.panorama import PanoramaWorld
from vidgen.worlds.planar import PlanarWorld
from vidgen.worlds.room import RoomWorld

WORLDS = ("room", "panorama", "vizdoom", "atari:GAME")


def make_world(name: str, size: int = 64) -> Any:
    """A world by its name on the command line.

    Args:
        name: one of `WORLDS`; GAME is that of a ROM, as in `atari:pong`.
        size: height and width of a frame, pixels.

    Raises:
        ConfigError: an unknown name, or a size the world doesn't have.
        VidgenError: the package that the world needs isn't installed.
    """
    if name == "room":
        return RoomWorld(size)
    if name == "panorama":
        return PanoramaWorld(size)
    if name == "vizdoom":
        from vidgen.worlds.vizdoom_world import VizDoomWorld

        return VizDoomWorld(size)
    if name.startswith("atari:"):
        from vidgen.worlds.atari_world import AtariWorld

        return AtariWorld(name.removeprefix("atari:"), size)
    raise ConfigError(f"world {name!r} is unknown: {suggestion(name, WORLDS)}.")


def episodes_info(world: Any, fps: float) -> EpisodesInfo:
    """What a data set of a world is about.

    Args:
        world: one that can be walked through, see `World`, or one with `play` and `button_controls`.
        fps: frames per second of play.
    """
    is_planar, has_poses = isinstance(world, PlanarWorld), not hasattr(world, "button_controls")
    controls = world.delta_controls if has_poses else world.button_controls
    return EpisodesInfo(
        world=world.name,
        world_version=world.version,
        size=(world.size, world.size),
        fps=fps,
        action_spec=controls.spec.to_dict(),
        inverse_map=None if has_poses else dict(controls.inverse_map),
        pose_names=(PLANAR_POSE if is_planar else SLIDING_POSE) if has_poses else (),
        focal=world.focal if is_planar else None,
        eye_height=world.eye_height if is_planar else 0.0,
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
    """Record a world; a recording that was interrupted goes on, and ends with the same files.

    Args:
        world: one that can be walked through, see `World`, or one with `play` and `button_controls`.
        root: folder of the data set; splits of one data set are recorded one after another.
        num_episodes: episodes of this split.
        num_frames: frames of each.
        split: `"train"`, `"validation"` or `"test"`.
        num_scenes: scenes that take turns; of no meaning where a world only plays.
        first_scene: seed of the first of them.
        seed: of the walks; every split and episode has its own.
        fps: frames per second at which the world is meant to be played.

    Returns:
        Episodes that were added.

    Raises:
        ConfigError: a number that is less than 1.
        DatasetError: the folder holds episodes of something else, or of this split with other settings.
    """
    for name, value in (("num_episodes", num_episodes), ("num_frames", num_frames), ("num_scenes", num_scenes)):
        if value < 1:
            raise ConfigError(f"{name}={value}; allowed: at least 1.")
    if split not in SPLITS:
        raise ConfigError(f"split={split!r}: {suggestion(split, SPLITS)}.")
    has_scenes = not hasattr(world, "button_controls")

    def seeds(episode: int) -> tuple[int, int]:
        scene_seed = first_scene + episode % num_scenes if has_scenes else 0
        return derive_seed(seed, SPLITS.index(split), episode), scene_seed

    with EpisodeWriter(root, episodes_info(world, fps)) as writer:
        present = [item for item in writer.records if item.split == split]
        for episode, item in enumerate(present):
            _check_present(root, item, num_frames, *seeds(episode))
        progress = range(len(present), num_episodes)
        for episode in tqdm(progress, initial=len(present), total=num_episodes, desc=split, unit="episode"):
            walk, scene_seed = seeds(episode)
            if has_scenes:
                scene = world.scene(scene_seed)
                poses = world.explore(scene, num_frames, walk)
                frames, actions = world.render(scene, poses), world.deltas(poses).numpy()
                writer.append(frames, actions, poses, split=split, seed=walk, scene_seed=scene_seed)
            else:
                frames, actions, rewards, dones = world.play(num_frames, walk)
                writer.append(frames, actions, None, rewards, dones, split=split, seed=walk)
    return max(0, num_episodes - len(present))


def _check_present(root: str | os.PathLike, item: EpisodeRecord, num_frames: int, walk: int, scene_seed: int) -> None:
    """A recording that goes on with other settings would be neither the one nor the other."""
    if (item.length, item.seed, item.scene_seed) != (num_frames, walk, scene_seed):
        raise DatasetError(
            f"episode {item.index} of {root} has {item.length} frames, walk {item.seed} and scene {item.scene_seed} "
            f"where these settings give {num_frames}, {walk} and {scene_seed}; use the frames, seed and scenes of the "
            "first recording, or another folder."
        )
