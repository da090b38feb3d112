"""The landscape, played by its renderer: the camera slides, and time goes on with every frame."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from vidgen.controls import ActionColumn, ActionSpec
from vidgen.data import EpisodesInfo
from vidgen.worlds.landscape import FAST_SPEED, LandscapeWorld

LANDSCAPE = "Landscape (renderer)"
HEIGHT, WIDTH = 96, 168
# Of the ground and frame, at the width that the world is written for.
STEP = 2 * FAST_SPEED / 12


class LandscapePlayer:
    """[`~vidgen.worlds.LandscapeWorld`] itself; see [`~vidgen.demo.players.Player`].

    Its picture is a function of place and time, so what is recorded has no poses.

    Args:
        scene_seed: which landscape.
    """

    def __init__(self, scene_seed: int) -> None:
        self._world = LandscapeWorld(HEIGHT, WIDTH)
        self._scene = self._world.scene(scene_seed)
        self._spec = ActionSpec(
            (ActionColumn("right", "pixels of a frame that is 112 wide", -STEP, STEP),),
            {"left": {"right": -STEP}, "right": {"right": STEP}},
        )
        self.fps = float(self._world.fps)
        self.info = EpisodesInfo(
            world="landscape",
            world_version=1,
            size=(HEIGHT, WIDTH),
            fps=self.fps,
            action_spec=self._spec.to_dict(),
        )
        self._camera, self._time = 0.0, 0
        self.action, self.pose = self._spec.null().numpy(), np.zeros(0)
        self.stages: dict[str, float] = {}
        self.frame = self._world.view(self._scene, self._camera, self._time)

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(self._spec.choices)

    def step(self, keys: Sequence[str]) -> None:
        began = time.perf_counter()
        self.action = self._spec.row(*[key for key in keys if key in self._spec.choices]).numpy()
        self._camera += float(self.action[0])
        self._time += 1
        self.frame = self._world.view(self._scene, self._camera, self._time)
        self.stages = {"render": 1000 * (time.perf_counter() - began)}
