"""A game of the Arcade Learning Environment, played at random.

Unlike the worlds that can be walked through, its picture depends on everything that happened before, and nothing that
happened can be undone: a world model of it is trained by teacher or diffusion forcing, or is told which way time runs.
The emulator is that of "The Arcade Learning Environment: An Evaluation Platform for General Agents" (arXiv 1207.4708).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vidgen.controls import ActionColumn, ActionSpec, ButtonControls
from vidgen.runtime.errors import ConfigError, VidgenError, suggestion

SCREEN_HEIGHT, SCREEN_WIDTH = 210, 160
# Emulated frames per frame; the emulator runs at 60 per second.
FRAME_SKIP = 4
# How many frames a player holds a key on average.
MEAN_HOLD = 5
_DIRECTIONS = ("UP", "DOWN", "RIGHT", "LEFT", "FIRE")


class AtariWorld:
    """A game with the actions it knows, one column each; doing nothing is the null action.

    Args:
        game: Name of its ROM, such as "pong" or "breakout"; they come with ale-py.
        size: Height and width of a frame, 8 to 160 pixels.

    Attributes:
        name: For records.
        version: Changes when the same seed gives other frames.
        size: As given.
        fps: Frames per second of the game at its own speed.
        button_controls: What `play` returns as actions. Nothing has an inverse, so the direction of time is told.

    Raises:
        ConfigError: An unknown game, or another size.
        VidgenError: ale-py isn't installed.

    Example:
        >>> world = AtariWorld("pong", size=64)
        >>> frames, actions, rewards, dones = world.play(num_frames=100, seed=0)
    """

    version = 1
    fps = 60 / FRAME_SKIP

    def __init__(self, game: str = "pong", size: int = 64) -> None:
        try:
            import ale_py
            import ale_py.roms
        except ImportError as error:
            raise VidgenError('AtariWorld needs ale-py: pip install "vidgen[worlds]"') from error
        games = ale_py.roms.get_all_rom_ids()
        if game not in games:
            raise ConfigError(f"Unknown game {game!r}; {suggestion(game, games)}")
        if not 8 <= size <= SCREEN_WIDTH:
            raise ConfigError(f"size={size}; allowed: 8 to {SCREEN_WIDTH}.")
        self.name, self.game, self.size = f"atari:{game}", game, size
        # The emulator writes a page about every game it starts.
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._actions = [action for action in self._start(0).getMinimalActionSet() if action != ale_py.Action.NOOP]
        names = [_words(action.name) for action in self._actions]
        columns = tuple(ActionColumn(name, "pressed", 0.0, 1.0) for name in names)
        spec = ActionSpec(columns, {name: {name: 1.0} for name in names})
        self.button_controls = ButtonControls(spec, {}, direction_embedding=True)

    def _start(self, seed: int) -> Any:
        import ale_py
        import ale_py.roms

        emulator = ale_py.ALEInterface()
        emulator.setInt("random_seed", seed)
        # Keys are held by the player here, so that the recorded action is what the game was given.
        emulator.setFloat("repeat_action_probability", 0.0)
        emulator.loadROM(ale_py.roms.get_rom_path(self.game))
        return emulator

    def play(self, num_frames: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Plays at random, holding each key for a while.

        After the end of a game the next frame is the first of a new one, with the null action.

        Args:
            num_frames: Frames to return.
            seed: Of the player and of the game.

        Returns:
            Frames, uint8 `(num_frames, size, size, 3)`; actions, float64 `(num_frames, columns)`, of which row k led
            to frame k and row 0 is null; rewards, float64 `(num_frames,)`, on the way to each frame; dones, bool
            `(num_frames,)`, true for the last frame of a game.

        Raises:
            VidgenError: No frames.
        """
        if num_frames < 1:
            raise VidgenError(f"num_frames={num_frames}; allowed: at least 1.")
        import ale_py

        generator = np.random.default_rng(seed)
        emulator = self._start(int(generator.integers(2**31)))
        frames = np.empty((num_frames, self.size, self.size, 3), np.uint8)
        actions = np.zeros((num_frames, len(self._actions)))
        rewards, dones = np.zeros(num_frames), np.zeros(num_frames, bool)
        held = -1  # the index of a column, -1 for none
        for frame in range(num_frames):
            if frame and dones[frame - 1]:
                emulator.reset_game()
            elif frame:
                if generator.random() < 1 / MEAN_HOLD:
                    held = int(generator.integers(-1, len(self._actions)))
                if held >= 0:
                    actions[frame, held] = 1.0
                pressed = self._actions[held] if held >= 0 else ale_py.Action.NOOP
                for _ in range(FRAME_SKIP):
                    rewards[frame] += emulator.act(pressed)
                dones[frame] = emulator.game_over()
            frames[frame] = average_down(emulator.getScreenRGB(), self.size)
        return frames, actions, rewards, dones


def average_down(picture: np.ndarray, size: int) -> np.ndarray:
    """The picture in `size` x `size` pixels, each the mean of the area it covers.

    Args:
        picture: uint8 `(height, width, 3)`.
        size: Pixels, at most height and width.

    Returns:
        uint8 `(size, size, 3)`.
    """
    rows, columns = (torch.from_numpy(_area_weights(length, size)) for length in picture.shape[:2])
    # (size, height) (height, width, 3) (width, size) -> (size, size, 3)
    averaged = torch.einsum("yh,hwc,xw->yxc", rows, torch.from_numpy(picture).float(), columns)
    return averaged.round().clamp(0, 255).byte().numpy()


def _area_weights(length: int, size: int) -> np.ndarray:
    """float32 `(size, length)`: the share that each old pixel has in each new one; rows sum to 1."""
    edges = np.linspace(0, length, size + 1)
    pixels = np.arange(length)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (np.maximum(overlap, 0) * size / length).astype(np.float32)


def _words(name: str) -> str:
    """ "UPRIGHTFIRE" as "up right fire"."""
    words = []
    while name:
        word = next(word for word in _DIRECTIONS if name.startswith(word))
        words.append(word.lower())
        name = name[len(word) :]
    return " ".join(words)
