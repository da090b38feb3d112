"""What the environments share: where a rollout starts, which actions there are, and many worlds in one session."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from vidgen.controls import ActionSpec, ControlError, PoseControls
from vidgen.envs.reward_head import RewardHead, RewardState
from vidgen.memory import KVMemoryConfig
from vidgen.pipelines.play import NOTHING, STARTS_NAME
from vidgen.pipelines.world_model import WorldModelPipeline
from vidgen.runtime.checkpoint import load_safetensors
from vidgen.runtime.errors import ConfigError, suggestion

if TYPE_CHECKING:
    import gymnasium

ACTION_SPACES = ("discrete", "box")
# Starts that are looked at for the ranges of controls and for what real frames look like.
SAMPLED_STARTS = 32

Start = tuple[np.ndarray, np.ndarray]


class Windows(Protocol):
    """What [`~vidgen.data.EpisodeDataset`] offers: windows that are whole starts, and episodes by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def _is_array(source: Any) -> bool:
    return isinstance(source, (np.ndarray, torch.Tensor))


class Starts:
    """Real frames that rollouts start from, with the controls that led to them.

    Args:
        source: an [`~vidgen.data.EpisodeDataset`], each window of which is a start; or a mapping with "frames", uint8
            `(starts, frames, height, width, 3)`, and "controls", `(starts, frames, columns)`; or such frames alone,
            one per start.
        spec: the columns of the controls.

    Raises:
        ConfigError: no starts, or arrays of other shapes.
    """

    def __init__(self, source: Windows | Mapping[str, Any] | np.ndarray | torch.Tensor, spec: ActionSpec) -> None:
        if _is_array(source):
            source = {"frames": source}
        self._windows: Windows | None = None
        if not isinstance(source, Mapping):
            self._windows = source
            self._count = len(source)
        else:
            self._frames = np.asarray(source["frames"])
            if self._frames.dtype != np.uint8 or self._frames.ndim != 5 or self._frames.shape[-1] != 3:
                raise ConfigError(
                    f"Frames to start from are {self._frames.dtype} {self._frames.shape}; allowed: uint8 (starts, "
                    "frames, height, width, 3)."
                )
            self._count, num_frames = self._frames.shape[:2]
            if "controls" not in source and num_frames > 1:
                raise ConfigError(f"Starts have {num_frames} frames and no controls; only single frames need none.")
            null = np.broadcast_to(spec.null().numpy(), (self._count, num_frames, spec.width))
            self._controls = np.asarray(source.get("controls", null), np.float64)
            if self._controls.shape != null.shape:
                raise ConfigError(f"Controls of the starts have shape {self._controls.shape}; allowed: {null.shape}.")
        if not self._count:
            raise ConfigError("There are no starts; allowed: at least one.")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Start:
        """Frames uint8 `(frames, height, width, 3)` and controls float64 `(frames, columns)` of a start."""
        if self._windows is None:
            return self._frames[index], self._controls[index]
        window = self._windows[index]
        return np.asarray(window["frames"]), np.asarray(window["controls"], np.float64)

    def draw(self, generator: np.random.Generator) -> Start:
        """Any start."""
        return self[int(generator.integers(self._count))]

    def episode(self, number: int) -> Start:
        """The beginning of an episode, or, where starts are arrays, the start of this number.

        Raises:
            ConfigError: there is none of this number.
        """
        if self._windows is None:
            numbers = range(self._count)
        elif hasattr(self._windows, "episodes"):
            numbers = [record.index for record in self._windows.episodes]
        else:
            raise ConfigError(f"prompt={number}: a {type(self._windows).__name__} has no episodes; give frames.")
        if number not in numbers:
            raise ConfigError(f"Episode {number} does not exist; allowed: {min(numbers)} to {max(numbers)}.")
        if self._windows is None:
            return self[number]
        place = numbers.index(number)
        frame_ids = self._windows.first_window(place)
        controls = self._windows.controls(place, frame_ids)
        return self._windows.frames(place, frame_ids), np.asarray(controls, np.float64)

    def sample(self) -> list[Start]:
        """Up to `SAMPLED_STARTS` starts, evenly spread."""
        return [self[int(i)] for i in np.unique(np.linspace(0, self._count - 1, SAMPLED_STARTS).round())]


class Actions:
    """Actions of an agent, as controls of a world.

    Args:
        kind: `"discrete"`: nothing, or one of the spec's choices; `"box"`: the columns, in the units of the data.
        spec: columns and choices.
        starts: where the range of a column that no choice sets is taken from; None where their controls are others.

    Attributes:
        space: `Discrete` or `Box`.
        names: of the discrete actions, or of the columns.

    Raises:
        ConfigError: an unknown kind; no choices; or no column that varies.
    """

    def __init__(self, kind: str, spec: ActionSpec, starts: Starts | None) -> None:
        from gymnasium import spaces

        self._spec, self._is_discrete = spec, kind == "discrete"
        if kind == "discrete":
            if not spec.choices:
                raise ConfigError("action_space='discrete' for controls without choices; allowed: 'box'.")
            self.names = (NOTHING, *spec.choices)
            self._rows = torch.stack([spec.null(), *(spec.row(choice) for choice in spec.choices)]).numpy()
            self.space: gymnasium.Space = spaces.Discrete(len(self.names))
        elif kind == "box":
            self.names = spec.names
            self._low, self._high = self._limits(starts)
            self.space = spaces.Box(self._low.astype(np.float32), self._high.astype(np.float32), dtype=np.float32)
        else:
            raise ConfigError(f"action_space={kind!r}; {suggestion(kind, ACTION_SPACES)}.")

    def _limits(self, starts: Starts | None) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest value of each column."""
        spec = self._spec
        seen = np.zeros((0, spec.width))
        if starts is not None:
            seen = np.concatenate([controls for _, controls in starts.sample()])
        low, high = [], []
        for index, column in enumerate(spec.columns):
            chosen = [values[column.name] for values in spec.choices.values() if column.name in values]
            values = np.array([column.null, *(chosen or seen[:, index])])
            low.append(values.min())
            high.append(values.max())
        if not np.less(low, high).any():
            raise ConfigError(
                "action_space='box': neither choices nor starts show a range of "
                f"{', '.join(spec.names)}; give starts in which they vary."
            )
        return np.array(low), np.array(high)

    def controls(self, actions: Sequence[Any] | np.ndarray) -> np.ndarray:
        """Controls, float64 `(rows, columns)`, of an action per row.

        Raises:
            ControlError: an action that is not in `space`.
        """
        if self._is_discrete:
            for action in actions:
                if not self.space.contains(action):
                    names = ", ".join(f"{number} {name}" for number, name in enumerate(self.names))
                    raise ControlError(f"action={action!r}; allowed: an integer of {names}.")
            return self._rows[np.asarray(actions, np.int64)]
        rows = np.asarray(actions, np.float32)
        for row in rows:
            if not self.space.contains(row):
                limits = ", ".join(
                    f"{name} {low:g} to {high:g}"
                    for name, low, high in zip(self.names, self.space.low, self.space.high, strict=True)
                )
                raise ControlError(f"action={row.tolist()}; allowed: {limits}.")
        # A limit such as pi is more as float32, and its column would refuse it.
        return rows.astype(np.float64).clip(self._low, self._high)


class Rollouts:
    """Worlds that run side by side in one session, each with its own start, noise, reward and end.

    What happens in a row depends on its own generator and actions alone.

    Args:
        num_rows: how many.
        pipeline: the world model, or the folder of one.
        episodes: see [`Starts`]; `None` takes the starts that came with the folder.
        action_space: see [`Actions`].
        reward_head: predicts rewards and ends; `None` gives no reward and no end.
        max_episode_steps: steps after which a rollout is truncated; `None` never.
        cache: see [`~vidgen.pipelines.world_session`].
        memory: which frames stay context; `None` keeps the newest.
        num_inference_steps: denoising steps of a frame; default the pipeline's.
        context_sigma: noise level of context frames; default the pipeline's.
        report_latency: whether the info tells the milliseconds of a step.

    Raises:
        VidgenError: arguments that don't fit each other; names what is allowed.
    """

    def __init__(
        self,
        num_rows: int,
        pipeline: WorldModelPipeline | str | os.PathLike,
        episodes: Windows | Mapping[str, Any] | np.ndarray | torch.Tensor | None = None,
        action_space: str = "discrete",
        reward_head: RewardHead | None = None,
        max_episode_steps: int | None = None,
        cache: str = "frame",
        memory: KVMemoryConfig | None = None,
        num_inference_steps: int | None = None,
        context_sigma: float | None = None,
        report_latency: bool = False,
    ) -> None:
        if num_rows < 1:
            raise ConfigError(f"num_envs={num_rows}; allowed: at least 1.")
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ConfigError(f"max_episode_steps={max_episode_steps}; allowed: at least 1, or None.")
        if not isinstance(pipeline, WorldModelPipeline):
            folder = Path(pipeline)
            pipeline = WorldModelPipeline.from_pretrained(pipeline)
            if episodes is None and (folder / STARTS_NAME).is_file():
                episodes, _ = load_safetensors(folder / STARTS_NAME)
        if episodes is None:
            raise ConfigError("episodes are missing, real frames to start from; give an EpisodeDataset or arrays.")
        controls = pipeline.control_encoder.controls
        spec = pipeline.control_encoder.actions
        if isinstance(controls, PoseControls) and pipeline.control_encoder.walk is None:
            raise ConfigError(
                "This model is steered by absolute poses, which are no actions; allowed: models of recorded motion, "
                "of buttons, or of absolute poses with a walk."
            )
        self._walks = isinstance(controls, PoseControls)
        if self._walks and reward_head is not None:
            raise ConfigError("A reward head reads motion, and this model's starts are absolute poses; give none.")
        if cache == "rolling" and num_rows > 1:
            raise ConfigError("cache='rolling' with several rows, which end at different times; allowed: 'frame'.")
        self.pipe, self.num_rows, self.max_episode_steps = pipeline, num_rows, max_episode_steps
        if self._walks and ((isinstance(episodes, Mapping) and "controls" not in episodes) or _is_array(episodes)):
            raise ConfigError("Starts have no controls; a model of absolute poses needs to know where they were seen.")
        self.starts = Starts(episodes, controls.spec)
        self.actions = Actions(action_space, spec, self.starts if spec is controls.spec else None)
        frames, start_controls = self.starts[0]
        self.frame_shape: tuple[int, ...] = frames.shape[1:]
        self._session = pipeline.open_session(
            np.repeat(frames[None], num_rows, axis=0),
            np.repeat(start_controls[None], num_rows, axis=0),
            cache=cache,
            memory=memory,
            num_inference_steps=num_inference_steps,
            context_sigma=context_sigma,
        )
        if reward_head is not None:
            reward_head.check(self.frame_shape[:2], spec.width)
        self._reward_head = reward_head
        self._reward_state: RewardState | None = None
        looks = np.concatenate([_look(frames) for frames, _ in self.starts.sample()])
        # One level of 255 is the least that counts.
        self._usual_look = looks.mean(0), np.maximum(looks.std(0), 1.0)
        self._report_latency = report_latency
        self._steps = np.zeros(num_rows, np.int64)

    @property
    def stats(self) -> dict[str, dict[str, float]]:
        """Milliseconds of a step per stage, see [`~vidgen.pipelines.WorldSession.stats`]."""
        return self._session.stats

    def reset(
        self,
        rows: Sequence[int],
        generators: Sequence[np.random.Generator],
        prompts: Sequence[Any],
    ) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Begin again in some rows.

        Args:
            rows: their indices.
            generators: of each of them: draws the start and the seed of all noise.
            prompts: for each of them the frames or the number of the episode to start from; `None` draws.

        Returns:
            The last real frame of each, uint8 `(rows, height, width, 3)`, and an info each.

        Raises:
            VidgenError: a prompt that doesn't exist or doesn't fit.
        """
        started = time.perf_counter()
        seeds, starts = [], []
        for generator, prompt in zip(generators, prompts, strict=True):
            # Drawn first, so that the noise is the same whichever way the start is chosen.
            seeds.append(int(generator.integers(2**62)))
            starts.append(self.starts.draw(generator) if prompt is None else self._prompt(prompt))
        shapes = {frames.shape for frames, _ in starts}
        if len(shapes) > 1 or shapes.pop()[1:] != self.frame_shape:
            raise ConfigError(
                f"Starts have frames {', '.join(str(frames.shape) for frames, _ in starts)}; allowed: the same number "
                f"for all rows, each {self.frame_shape}."
            )
        frames = np.stack([frames for frames, _ in starts])
        controls = np.stack([controls for _, controls in starts])
        if len(rows) == self.num_rows:
            self._session.reset(frames, controls, seeds)
        else:
            self._session.reset_rows(rows, frames, controls, seeds)
        self._steps[list(rows)] = 0
        if self._reward_head is not None:
            output = self._reward_head.observe(frames, controls)
            whole = len(rows) == self.num_rows
            self._reward_state = output.state if whole else self._reward_state.replaced(rows, output.state)
        return frames[:, -1].copy(), self._infos(rows, frames[:, -1], started)

    def _prompt(self, prompt: Any) -> Start:
        """The start that an option of `reset` names."""
        if isinstance(prompt, (int, np.integer)) and not isinstance(prompt, bool):
            return self.starts.episode(int(prompt))
        frames, controls = prompt if isinstance(prompt, tuple) else (prompt, None)
        frames = np.asarray(frames)
        frames = frames[None] if frames.ndim == 3 else frames
        spec = self.pipe.control_encoder.controls.spec
        if controls is None and self._walks:
            raise ConfigError("prompt has no controls; a model of absolute poses needs (frames, cameras).")
        null = spec.null().numpy()[None]
        controls = null if controls is None else np.asarray(controls, np.float64)
        if frames.ndim != 4 or controls.shape != (len(frames), spec.width):
            raise ConfigError(
                f"prompt has frames {frames.shape} and controls {controls.shape}; allowed: the number of an episode, "
                f"one frame {self.frame_shape}, or (frames, controls) with {spec.width} columns each."
            )
        return frames, controls

    def step(
        self, actions: Sequence[Any] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """One frame of every row.

        Args:
            actions: one per row.

        Returns:
            Frames, uint8 `(rows, height, width, 3)`; rewards, float64 `(rows,)`; whether each ended, and whether it
            was cut off, bool `(rows,)`; an info each.
        """
        started = time.perf_counter()
        controls = self.actions.controls(actions)
        frames = self._session.step(controls)
        rewards, ended = np.zeros(self.num_rows), np.zeros(self.num_rows, bool)
        if self._reward_head is not None:
            output = self._reward_head.observe(frames[:, None], controls[:, None], self._reward_state)
            self._reward_state = output.state
            rewards = output.rewards[:, -1].double().cpu().numpy()
            ended = output.dones[:, -1].cpu().numpy()
        self._steps += 1
        cut_off = np.zeros(self.num_rows, bool)
        if self.max_episode_steps is not None:
            cut_off = self._steps >= self.max_episode_steps
        return frames, rewards, ended, cut_off, self._infos(range(self.num_rows), frames, started)

    def _infos(self, rows: Sequence[int], frames: np.ndarray, started: float) -> list[dict[str, Any]]:
        mean, std = self._usual_look
        drifts = np.sqrt((((_look(frames) - mean) / std) ** 2).mean(1))
        session_rows = self._session.rows
        infos = [
            {"context_len": len(session_rows[row].frame_ids), "drift": float(drift)}
            for row, drift in zip(rows, drifts, strict=True)
        ]
        if self._report_latency:
            latency = 1000 * (time.perf_counter() - started)
            infos = [{**info, "latency_ms": latency} for info in infos]
        return infos


def check_render_mode(render_mode: str | None) -> str | None:
    """The given mode.

    Raises:
        ConfigError: another than `None` and `"rgb_array"`.
    """
    if render_mode not in (None, "rgb_array"):
        raise ConfigError(f"render_mode={render_mode!r}; allowed: None, 'rgb_array'.")
    return render_mode


def prompt_of(options: Mapping[str, Any] | None) -> Any:
    """The start that options of `reset` ask for, or `None`.

    Raises:
        ConfigError: another option.
    """
    unknown = set(options or {}) - {"prompt"}
    if unknown:
        raise ConfigError(f"Unknown options {', '.join(map(repr, sorted(unknown)))}; allowed: 'prompt'.")
    return (options or {}).get("prompt")


def _look(frames: np.ndarray) -> np.ndarray:
    """`(frames, 6)`: mean and standard deviation of red, green and blue, 0 to 255."""
    values = frames.astype(np.float32)
    return np.concatenate([values.mean((1, 2)), values.std((1, 2))], axis=1).astype(np.float64)
