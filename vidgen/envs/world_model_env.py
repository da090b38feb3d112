"""One world that an agent plays in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vidgen.envs.rollouts import Rollouts, check_render_mode, prompt_of
from vidgen.runtime.errors import VidgenError

try:
    import gymnasium
except ImportError as error:
    raise VidgenError('WorldModelEnv needs gymnasium: pip install "vidgen[envs]"') from error


class WorldModelEnv(gymnasium.Env):
    """A world model as an environment, after DIAMOND ("Diffusion for World Modeling: Visual Details Matter in Atari",
    arXiv 2405.12399).

    An observation is the newest frame, uint8 `(height, width, 3)`. `reset` takes real frames to start from: drawn, or
    those of `options={"prompt": ...}`, which is the number of an episode, a frame, or frames with their controls,
    `(frames, controls)`. Start and noise come from `np_random` alone: equal seeds and actions give equal rollouts.

    The info holds `context_len`, the frames that the next one sees, and `drift`: how far the mean and the contrast of
    the colors are from those of real start frames, root mean square, in their standard deviations.

    Args:
        pipeline: the world model, or the folder of one.
        episodes: an [`~vidgen.data.EpisodeDataset`], each window of which is a start; or a mapping with "frames",
            uint8 `(starts, frames, height, width, 3)`, and "controls", `(starts, frames, columns)`; or frames alone,
            one per start. `None` takes the starts that came with the folder.
        action_space: `"discrete"`: 0 is nothing, then the choices of the controls; `"box"`: the columns of the
            controls in the units of the data, as far as choices reach, or else the starts.
        reward_head: predicts rewards and ends; `None` gives reward 0 and no end.
        max_episode_steps: steps after which a rollout is truncated; `None` never.
        render_mode: `None` or `"rgb_array"`.
        options: `cache`, `memory`, `num_inference_steps` and `context_sigma` as for
            [`~vidgen.pipelines.WorldModelPipeline.open_session`]; `report_latency=True` adds `latency_ms` to the info,
            in which equal rollouts then differ.

    Raises:
        VidgenError: arguments that don't fit each other; names what is allowed.

    Example:
        ```py
        env = WorldModelEnv("runs/doom/model", max_episode_steps=200)
        observation, info = env.reset(seed=0)
        observation, reward, terminated, truncated, info = env.step(env.action_names.index("forward"))
        ```
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self,
        pipeline: Any,
        episodes: Any = None,
        action_space: str = "discrete",
        reward_head: Any = None,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self.render_mode = check_render_mode(render_mode)
        self._rollouts = Rollouts(1, pipeline, episodes, action_space, reward_head, max_episode_steps, **options)
        self.metadata = {**self.metadata, "render_fps": self._rollouts.pipe.config.fps}
        self.observation_space = gymnasium.spaces.Box(0, 255, self._rollouts.frame_shape, np.uint8)
        self.action_space = self._rollouts.actions.space
        self._frame: np.ndarray | None = None

    @property
    def action_names(self) -> tuple[str, ...]:
        """Names of the discrete actions, or of the columns of a box."""
        return self._rollouts.actions.names

    @property
    def stats(self) -> dict[str, dict[str, float]]:
        """Milliseconds of a step per stage, see [`~vidgen.pipelines.WorldSession.stats`]."""
        return self._rollouts.stats

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start from real frames; the observation is the last of them."""
        super().reset(seed=seed)
        frames, infos = self._rollouts.reset([0], [self.np_random], [prompt_of(options)])
        self._frame = frames[0]
        return self._frame.copy(), infos[0]

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Make the next frame.

        Raises:
            ControlError: an action that is not in the space.
            ResetNeeded: before the first `reset`.
        """
        if self._frame is None:
            raise gymnasium.error.ResetNeeded("step before the first reset; reset gives the frame to start from.")
        frames, rewards, ended, cut_off, infos = self._rollouts.step([action])
        self._frame = frames[0]
        return self._frame.copy(), float(rewards[0]), bool(ended[0]), bool(cut_off[0]), infos[0]

    def render(self) -> np.ndarray | None:
        """The newest frame, uint8 `(height, width, 3)`, or `None` without render mode or before `reset`."""
        return None if self.render_mode is None or self._frame is None else self._frame.copy()
