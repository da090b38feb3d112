"""A level of Doom as a world whose picture is a function of the pose.

The engine is used as a renderer: for every frame the player is put at a pose, and what was recorded is the pose and
never a pressed key. Doom's own movement has momentum, so it can't be undone exactly; a pose can.

What makes it exact, found by experiment with vizdoom 1.3.2:

* console command `warp` takes whole map units; headings are multiples of 360 / 256 degrees, which add up without
  rounding;
* the picture shows a warp one tic later, so one empty tic is played before it is taken;
* things that move by themselves are taken out of the level.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.worlds.exploration import MotionStatistics, explore, places_between
from vidgen.worlds.planar import PlanarWorld, check_poses

# The engine draws 192 x 256 pixels with 90 degrees from left to right; the square in the middle is averaged down.
PICTURE_HEIGHT, PICTURE_WIDTH = 192, 256
SIZES = (24, 32, 48, 64, 96, 192)
TURN_UNIT = 2 * math.pi / 256
# Doomguy's radius is 16 map units.
BODY_RADIUS = 20.0
WARM_UP_TICS = 10
MOVING_THINGS = ("GreenArmor",)


@dataclass(frozen=True, eq=False)
class VizDoomScene:
    """A level.

    Attributes:
        scenario: Its name.
        walls: float64 `(n, 4)`; lines that stop a body, x1, y1, x2, y2 in map units.
    """

    scenario: str
    walls: np.ndarray


class VizDoomWorld(PlanarWorld):
    """The maze "my way home" of ViZDoom, at poses of one's choice.

    A pose is (x, y, heading): whole map units, and radians in multiples of 2 pi / 256, counterclockwise from x to y.
    Close the world, or use it in a `with` statement: it holds a process.

    Args:
        size: Height and width of a frame, one of `SIZES`.

    Raises:
        ConfigError: Another size.
        VidgenError: vizdoom isn't installed.
    """

    name = "vizdoom:my_way_home"
    version = 1
    scenario = "my_way_home"
    focal = 0.5 * PICTURE_WIDTH / PICTURE_HEIGHT
    eye_height = 41.0
    motion = MotionStatistics(walk=12.0, turn=4 * TURN_UNIT, clearance=32.0, position_grid=1.0, turn_grid=TURN_UNIT)

    def __init__(self, size: int = 64) -> None:
        if size not in SIZES:
            nearest = min(SIZES, key=lambda allowed: abs(allowed - size))
            raise ConfigError(f"size={size}; allowed: {', '.join(map(str, SIZES))}, nearest: {nearest}.")
        self.size = size
        super().__init__("map units")
        self._folder = tempfile.TemporaryDirectory(prefix="vidgen-vizdoom-")
        self._game = self._start()

    def _start(self) -> Any:
        try:
            import vizdoom
        except ImportError as error:
            raise VidgenError('VizDoomWorld needs vizdoom: pip install "vidgen[worlds]"') from error
        game = vizdoom.DoomGame()
        game.load_config(os.path.join(vizdoom.scenarios_path, f"{self.scenario}.cfg"))
        game.set_doom_config_path(os.path.join(self._folder.name, "vizdoom.ini"))
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_256X192)
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        game.set_window_visible(False)
        game.set_mode(vizdoom.Mode.PLAYER)
        game.set_available_buttons([vizdoom.Button.TURN_LEFT_RIGHT_DELTA])
        variables = vizdoom.GameVariable
        game.set_available_game_variables([variables.POSITION_X, variables.POSITION_Y, variables.ANGLE])
        for hidden in ("hud", "weapon", "crosshair", "decals", "particles", "effects_sprites", "messages", "corpses"):
            getattr(game, f"set_render_{hidden}")(False)
        game.set_episode_timeout(0)
        game.set_sectors_info_enabled(True)
        game.set_seed(0)
        game.add_game_args("+sv_cheats 1 +movebob 0")
        # The engine makes a folder where it is started.
        with contextlib.chdir(self._folder.name):
            game.init()
        game.new_episode()
        game.make_action([0.0], WARM_UP_TICS)
        for thing in MOVING_THINGS:
            game.send_game_command(f"remove {thing}")
        game.make_action([0.0], 2)
        return game

    def close(self) -> None:
        """Ends the engine."""
        self._game.close()
        self._folder.cleanup()

    def __enter__(self) -> VizDoomWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def scene(self, seed: int) -> VizDoomScene:
        """The level; it is the same for every seed."""
        lines = {
            (line.x1, line.y1, line.x2, line.y2)
            for sector in self._game.get_state().sectors
            for line in sector.lines
            if line.is_blocking
        }
        return VizDoomScene(self.scenario, np.array(sorted(lines), np.float64))

    def is_free(self, scene: VizDoomScene, place: np.ndarray, target: np.ndarray | None = None) -> bool:
        """Whether a body of `BODY_RADIUS` fits at a place, or can go from there to another.

        Args:
            scene: Where.
            place: `(2,)`: x, y.
            target: `(2,)`; the way is tested at every `BODY_RADIUS`, and `place` itself isn't.
        """
        places = places_between(place, target, BODY_RADIUS)
        start, along = scene.walls[:, :2], scene.walls[:, 2:] - scene.walls[:, :2]
        to_place = places[:, None] - start
        share = np.clip((to_place * along).sum(-1) / np.maximum((along**2).sum(-1), 1e-9), 0, 1)
        gap = np.hypot(*np.moveaxis(to_place - share[..., None] * along, -1, 0))
        return bool(gap.min() >= BODY_RADIUS)

    def is_inside(self, scene: VizDoomScene, place: np.ndarray) -> bool:
        """Whether a place is in the level: a ray to the east crosses its walls an odd number of times."""
        x1, y1, x2, y2 = scene.walls.T
        crosses = (y1 > place[1]) != (y2 > place[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            x = x1 + (place[1] - y1) * (x2 - x1) / (y2 - y1)
        return bool((crosses & (x > place[0])).sum() % 2)

    def explore(
        self, scene: VizDoomScene, num_frames: int, seed: int, motion: MotionStatistics | None = None
    ) -> np.ndarray:
        """Walks about from a random free place.

        Args:
            scene: Where.
            num_frames: Poses to return.
            seed: Of the walk.
            motion: Its statistics, with grids of this world; None takes the world's own.

        Returns:
            float64 `(num_frames, 3)`.

        Raises:
            VidgenError: No frames.
        """
        motion = motion or self.motion
        generator = np.random.default_rng(seed)
        corners = scene.walls.reshape(-1, 2)
        while True:
            place = np.round(generator.uniform(corners.min(0), corners.max(0)))
            if self.is_inside(scene, place) and self.is_free(scene, place):
                break
        first = np.array([*place, generator.integers(256) * TURN_UNIT])
        return explore(lambda here, there: self.is_free(scene, here, there), first, num_frames, motion, generator)

    def render(self, scene: VizDoomScene, poses: np.ndarray) -> np.ndarray:
        """What is seen at each pose.

        Args:
            scene: Where.
            poses: `(frames, 3)`, on the grid.

        Returns:
            uint8 `(frames, size, size, 3)`.

        Raises:
            VidgenError: Poses of another shape or off the grid, or a place where the engine puts nobody.
        """
        poses = check_poses(poses)
        turns = poses[:, 2] / TURN_UNIT
        off = (poses[:, :2] != np.round(poses[:, :2])).any(axis=1) | (np.abs(turns - np.round(turns)) > 1e-6)
        if off.any():
            frame = int(np.flatnonzero(off)[0])
            raise VidgenError(
                f"Pose {frame} is {poses[frame].tolist()}; allowed: whole map units, and headings that are multiples "
                "of 2 pi / 256 = 0.0245 radians."
            )
        frames = np.empty((len(poses), self.size, self.size, 3), np.uint8)
        edge = (PICTURE_WIDTH - PICTURE_HEIGHT) // 2
        for frame, ((x, y), turn) in enumerate(zip(poses[:, :2].astype(int), np.round(turns).astype(int) % 256)):
            picture = self._look(int(x), int(y), float(turn) * 360 / 256)
            frames[frame] = self._average(picture[:, edge : edge + PICTURE_HEIGHT])
        return frames

    def _average(self, picture: np.ndarray) -> np.ndarray:
        """Rounded means over squares of pixels; summed slice by slice, which is much faster than over two axes."""
        pixels = PICTURE_HEIGHT // self.size
        total = np.full((self.size, self.size, 3), pixels**2 // 2, np.uint16)
        for row in range(pixels):
            for column in range(pixels):
                total += picture[row::pixels, column::pixels]
        return total // pixels**2

    def _look(self, x: int, y: int, degrees: float) -> np.ndarray:
        game = self._game
        game.send_game_command(f"warp {x} {y}")
        # The engine rounds a turn to the right down to whole units of 360 / 65536 degrees; a quarter keeps it from
        # losing one.
        units = round(((game.get_state().game_variables[2] - degrees + 180) % 360 - 180) * 65536 / 360)
        game.set_action([(units + 0.25) * 360 / 65536])
        game.advance_action(1, False)
        game.make_action([0.0])
        state = game.get_state()
        there = state.game_variables
        if (there[0], there[1]) != (x, y) or abs((there[2] - degrees + 180) % 360 - 180) > 1e-3:
            raise VidgenError(
                f"The engine is at x={there[0]:g}, y={there[1]:g}, {there[2]:g} degrees instead of {x}, {y}, "
                f"{degrees:g}: nobody fits there. Allowed: places where is_inside and is_free are true."
            )
        return state.screen_buffer

    def integrate(self, first: np.ndarray, deltas: Tensor) -> np.ndarray:
        """As in any world on a plane, rounded to the grid."""
        grid = np.array([1.0, 1.0, TURN_UNIT])
        return np.round(super().integrate(first, deltas) / grid) * grid
