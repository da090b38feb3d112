"""Worlds that are played side by side on the same keys: models, and the renderer that knows the truth."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import PIL.Image
import torch

from vidgen.controls import ActionSpec, PoseControls
from vidgen.data import EpisodesInfo
from vidgen.data.recording import episodes_info
from vidgen.demo.uploads import fit
from vidgen.pipelines.play import load_starts
from vidgen.worlds.exploration import step_planar
from vidgen.worlds.room import RoomWorld

if TYPE_CHECKING:
    from vidgen.pipelines import WorldModelPipeline

FORCINGS = {"teacher_forcing": "TF", "diffusion_forcing": "DF", "live": "LIVE"}
ROOM = "Room (renderer)"
ROOM_SIZE = 96
ROOM_FPS = 12.0


class Player(Protocol):
    """A world at one moment.

    Attributes:
        fps: frames per second of play.
        info: of episodes recorded in it.
        frame: what is seen, uint8 `(height, width, 3)`.
        action: `(columns,)`, what led to this frame.
        pose: `(numbers of a pose,)`, where it is seen from; empty for a world without poses.
        stages: milliseconds of the last step by what they were spent on.
    """

    fps: float
    info: EpisodesInfo
    frame: np.ndarray
    action: np.ndarray
    pose: np.ndarray
    stages: Mapping[str, float]

    @property
    def choices(self) -> tuple[str, ...]:
        """What can be held."""

    def step(self, keys: Sequence[str]) -> None:
        """One frame on; keys that the world doesn't know do nothing."""


class RoomPlayer:
    """[`~vidgen.worlds.RoomWorld`] itself.

    Args:
        scene_seed: which rooms.
    """

    def __init__(self, scene_seed: int) -> None:
        self._world = RoomWorld(ROOM_SIZE)
        self._scene = self._world.scene(scene_seed)
        self.fps, self.info = ROOM_FPS, episodes_info(self._world, ROOM_FPS)
        self._spec = self._world.delta_controls.spec
        self.pose = self._world.explore(self._scene, 1, seed=scene_seed)[0]
        self.action = self._spec.null().numpy()
        self.stages: dict[str, float] = {}
        self.frame = self._world.render(self._scene, self.pose[None])[0]

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(self._spec.choices)

    def step(self, keys: Sequence[str]) -> None:
        began = time.perf_counter()
        delta = self._spec.row(*[key for key in keys if key in self._spec.choices]).numpy()
        target = step_planar(self.pose, delta)
        if delta[:2].any() and not self._world.is_free(self._scene, self.pose[:2], target[:2]):
            target = step_planar(self.pose, delta * (0, 0, 1))  # against a wall one still turns
        # The motion that happened, never the key: so says the format of episodes.
        self.action = self._world.deltas(np.stack([self.pose, target]))[1].numpy()
        self.pose = target
        self.frame = self._world.render(self._scene, target[None])[0]
        self.stages = {"render": 1000 * (time.perf_counter() - began)}


class ModelPlayer:
    """A trained world model.

    Args:
        pipe: the model.
        folder: which it was loaded from, with real frames to start from.
        start: which of these.
        seed: of all noise.
        steps: denoising steps of a frame; None takes the model's.
        cache: when keys of context frames are computed, see [`~vidgen.pipelines.WorldSession`].
        picture: to start from instead.
        room: for a model of rooms: the renderer to start from and whose motion, walls included, is followed, so that
            it shows what the model ought to. It has to be stepped first.

    Raises:
        VidgenError: a start that doesn't exist, or settings that the model doesn't allow.
    """

    def __init__(
        self,
        pipe: WorldModelPipeline,
        folder: Path,
        start: int,
        seed: int,
        steps: int | None = None,
        cache: str = "frame",
        picture: PIL.Image.Image | None = None,
        room: RoomPlayer | None = None,
    ) -> None:
        frames, controls = load_starts(folder, start)
        self._room = room
        if room is not None:
            picture = PIL.Image.fromarray(room.frame)
        if picture is not None:
            # A picture doesn't tell where it was taken; a model of absolute poses has it where the start is.
            controls = controls[-1:] if isinstance(pipe.control_encoder.controls, PoseControls) else None
            frames = fit(picture, *frames.shape[1:3])[None]
        else:
            newest = pipe.transformer.config.window - 1
            frames, controls = frames[-newest:], controls[-newest:]
        self._session = pipe.open_session(frames, controls, cache=cache, num_inference_steps=steps, seed=seed)
        self._spec: ActionSpec = pipe.control_encoder.actions
        self.fps, self.frame = pipe.config.fps, frames[-1]
        self.action, self.pose = self._spec.null().numpy(), np.zeros(0)
        self.stages: dict[str, float] = {}
        self.info = EpisodesInfo(
            world=f"model:{folder.name}",
            world_version=1,
            size=tuple(self.frame.shape[:2]),
            fps=self.fps,
            action_spec=self._spec.to_dict(),
            inverse_map=_inverse_map(pipe.control_encoder.controls),
        )

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(self._spec.choices)

    def step(self, keys: Sequence[str]) -> None:
        if self._room is None:
            row = self._spec.row(*[key for key in keys if key in self._spec.choices])
        else:
            row = torch.from_numpy(self._room.action)
        self.frame = self._session.step(row)
        self.action = row.numpy()
        self.stages = {stage: times["last"] for stage, times in self._session.stats.items()}


def _inverse_map(controls: Any) -> dict[str, str] | None:
    return dict(controls.inverse_map) if hasattr(controls, "inverse_map") else None


def is_of_rooms(pipe: WorldModelPipeline) -> bool:
    """Whether a model is steered by the motion of [`~vidgen.worlds.RoomWorld`], in its units, in any of its rooms."""
    spec = pipe.control_encoder.actions
    return not pipe.control_encoder.in_world and [(column.name, column.unit) for column in spec.columns] == [
        (column.name, column.unit) for column in RoomWorld().delta_controls.spec.columns
    ]
