"""Many worlds that agents play in, one forward pass for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vidgen.envs.rollouts import Rollouts, check_render_mode, prompt_of
from vidgen.runtime.errors import ConfigError, VidgenError

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode
except ImportError as error:
    raise VidgenError('WorldModelVectorEnv needs gymnasium: pip install "vidgen[envs]"') from error

AUTORESET_MODES = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)


class WorldModelVectorEnv(gymnasium.vector.VectorEnv):
    """[`~vidgen.envs.WorldModelEnv`]s side by side in one session.

    Row `i` after `reset(seed=s)` is a single environment after `reset(seed=s + i)`, but for the rounding of batched
    sums. A row that ended starts again by itself: with the next step, whose action it then ignores (`NEXT_STEP`), or
    in the same step, whose info then holds the last frame as `final_obs` (`SAME_STEP`).

    Args:
        num_envs: how many.
        pipeline: as for [`~vidgen.envs.WorldModelEnv`], like the arguments that are not listed here.
        episodes: where to start.
        action_space: of a single one.
        reward_head: predicts rewards and ends.
        max_episode_steps: steps after which a row is truncated.
        render_mode: `None` or `"rgb_array"`.
        autoreset_mode: one of `AUTORESET_MODES`.
        options: see [`~vidgen.envs.WorldModelEnv`]. `cache="rolling"` is refused: its rows share one memory.

    Raises:
        VidgenError: arguments that don't fit each other; names what is allowed.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10, "autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(
        self,
        num_envs: int,
        pipeline: Any,
        episodes: Any = None,
        action_space: str = "discrete",
        reward_head: Any = None,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
        **options: Any,
    ) -> None:
        if autoreset_mode not in AUTORESET_MODES:
            allowed = ", ".join(str(mode) for mode in AUTORESET_MODES)
            raise ConfigError(f"autoreset_mode={autoreset_mode!r}; allowed: {allowed}.")
        self.render_mode = check_render_mode(render_mode)
        self._rollouts = Rollouts(
            num_envs, pipeline, episodes, action_space, reward_head, max_episode_steps, **options
        )
        fps = self._rollouts.pipe.config.fps
        self.metadata = {**self.metadata, "render_fps": fps, "autoreset_mode": autoreset_mode}
        self.num_envs, self.autoreset_mode = num_envs, autoreset_mode
        self.single_observation_space = gymnasium.spaces.Box(0, 255, self._rollouts.frame_shape, np.uint8)
        self.single_action_space = self._rollouts.actions.space
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self._generators = [gymnasium.utils.seeding.np_random()[0] for _ in range(num_envs)]
        self._ended = np.zeros(num_envs, bool)
        self._frames: np.ndarray | None = None

    @property
    def action_names(self) -> tuple[str, ...]:
        """Names of the discrete actions, or of the columns of a box."""
        return self._rollouts.actions.names

    @property
    def stats(self) -> dict[str, dict[str, float]]:
        """Milliseconds of a step per stage, see [`~vidgen.pipelines.WorldSession.stats`]."""
        return self._rollouts.stats

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start all rows.

        Args:
            seed: of row 0, row i gets `seed + i`; or one each.
            options: `{"prompt": ...}` for all rows, or a list with one each.
        """
        # As plain integers, which gymnasium insists on.
        seeds = [None if seed is None else int(seed) + row for row in range(self.num_envs)] if _is_one(seed) else seed
        prompt = prompt_of(options)
        prompts = prompt if isinstance(prompt, list) else [prompt] * self.num_envs
        for name, values in (("seed", seeds), ("prompt", prompts)):
            if len(values) != self.num_envs:
                raise ConfigError(f"{len(values)} values of {name} are given for {self.num_envs} rows.")
        for row, row_seed in enumerate(seeds):
            if row_seed is not None:
                self._generators[row] = gymnasium.utils.seeding.np_random(int(row_seed))[0]
        self._ended[:] = False
        self._frames, row_infos = self._rollouts.reset(range(self.num_envs), self._generators, prompts)
        infos: dict[str, Any] = {}
        for row, info in enumerate(row_infos):
            infos = self._add_info(infos, info, row)
        return self._frames.copy(), infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Make the next frame of all rows.

        Raises:
            ControlError: an action that is not in the space.
            ResetNeeded: before the first `reset`.
        """
        if self._frames is None:
            raise gymnasium.error.ResetNeeded("step before the first reset; reset gives the frames to start from.")
        if len(actions) != self.num_envs:
            raise ConfigError(f"{len(actions)} actions are given for {self.num_envs} rows.")
        infos: dict[str, Any] = {}
        waiting = np.flatnonzero(self._ended)  # only NEXT_STEP leaves rows that ended
        if len(waiting) == self.num_envs:
            frames = np.empty_like(self._frames)
            rewards, ended, cut_off = np.zeros(self.num_envs), *np.zeros((2, self.num_envs), bool)
            row_infos: list[dict[str, Any]] = [{}] * self.num_envs
        else:
            # Rows that wait are stepped along: what they become is thrown away below.
            frames, rewards, ended, cut_off, row_infos = self._rollouts.step(actions)
            rewards[waiting], ended[waiting], cut_off[waiting] = 0.0, False, False
        starting = waiting
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            starting = np.flatnonzero(ended | cut_off)
            for row in starting:
                final = {"final_obs": frames[row].copy(), "final_info": row_infos[row]}
                infos = self._add_info(infos, final, int(row))
        else:
            self._ended = ended | cut_off
        if len(starting):
            generators = [self._generators[row] for row in starting]
            first_frames, first_infos = self._rollouts.reset(starting.tolist(), generators, [None] * len(starting))
            frames[starting] = first_frames
            for row, info in zip(starting, first_infos, strict=True):
                row_infos[row] = info
        for row, info in enumerate(row_infos):
            infos = self._add_info(infos, info, row)
        self._frames = frames
        return frames.copy(), rewards, ended, cut_off, infos

    def render(self) -> tuple[np.ndarray, ...] | None:
        """The newest frames, uint8 `(height, width, 3)` each."""
        return None if self.render_mode is None or self._frames is None else tuple(self._frames.copy())


def _is_one(seed: Any) -> bool:
    return seed is None or isinstance(seed, (int, np.integer))
