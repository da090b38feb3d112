"""A world that is being played: one frame per step, steered by one control.

A frame is denoised against what the session remembers of the frames before it, lightly noised, because a model that
was trained on noisy context drifts less ("LIVE: Long-horizon Interactive Video World Modeling", arXiv 2602.03747).
There are three ways to get the keys and values of these context frames:

- `"none"`: with every denoising step anew;
- `"frame"`: once per new frame, for all its steps. The same frames as `"none"`, and the way models are trained: frame
  positions and controls are relative to the first frame of the window, which slides;
- `"rolling"`: once per frame, when it is committed; they stay until the memory drops them. Needs controls that are
  relative to the frame before, or to the world. A key then knows more of the past than one window; the frames are
  those of one long sequence under a banded mask.

All noise of frame `i` comes from (seed of its video, `i`): nothing depends on what else is in the batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vidgen.controls import (
    CAMERA_DELTA_SPEC,
    CAMERA_SPEC,
    ButtonControls,
    ControlEncoder,
    ControlShapeError,
    DeltaControls,
    PoseControls,
    camera_deltas,
    integrate_cameras,
    integrate_planar,
    planar_deltas,
)
from vidgen.memory import (
    FullMemory,
    FullMemoryConfig,
    KeyValues,
    KVMemory,
    KVMemoryConfig,
    SlidingWindowMemoryConfig,
    make_memory,
)
from vidgen.models.frame_autoencoder import decode_frames, encode_frames
from vidgen.runtime.device import generator_for
from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.schedulers import denoise

if TYPE_CHECKING:
    from vidgen.models.world_dit import WorldDiTOutput
    from vidgen.pipelines.world_model import WorldModelPipeline

CACHES = ("none", "frame", "rolling")
STAGES = ("encode", "context", "denoise", "decode")
# What the noise of a frame is for: to become the frame, to be added to the frames it sees, to be added to itself when
# its keys are computed.
FRAME_NOISE, CONTEXT_NOISE, COMMIT_NOISE = range(3)

Frames = np.ndarray | torch.Tensor
Control = np.ndarray | torch.Tensor | Sequence[str] | Sequence[float]


class WorldSessionError(VidgenError):
    """A session cannot start or continue."""


@dataclasses.dataclass(frozen=True)
class WorldRow:
    """What one video of a session remembers. Never changed, only replaced.

    Attributes:
        seed: of all its noise.
        num_frames: frames so far, prompt included: the index of the next one.
        frame_ids: indices of the frames that are still context, in order.
        latents: `(channels, context frames, h, w)` clean latents of these, float32.
        places: `(context frames, columns)` their controls; where frames may be left out of recorded motion, their
            poses, from which the motion between those that remain is computed.
        memory: which frames stay context, where the session computes keys anew and a memory chooses.
    """

    seed: int
    num_frames: int
    frame_ids: tuple[int, ...]
    latents: torch.Tensor
    places: torch.Tensor
    memory: KVMemory | None = None


@dataclasses.dataclass(frozen=True)
class WorldSnapshot:
    """A moment of a session. Never changed, only replaced: keeping one costs no copy.

    Attributes:
        rows: what each video remembers.
        memory: keys and values of all rows, where these stay.
    """

    rows: tuple[WorldRow, ...]
    memory: KVMemory | None = None


@dataclasses.dataclass(frozen=True)
class _Context:
    """What the next frame of some rows, which have equally many context frames, is denoised against.

    Attributes:
        indices: which rows of the batch.
        rows: the same.
        controls: of the new frame, as the transformer takes them; with `latents` of the frames before it too.
        memory: keys and values of the context frames, or `None` when they are computed with every step.
        latents: `(rows, channels, context frames, h, w)` noisy context frames, when there is no memory.
    """

    indices: list[int]
    rows: list[WorldRow]
    controls: torch.Tensor
    memory: KVMemory | None
    latents: torch.Tensor | None = None


class WorldSession:
    """One running world, or a batch of them. Made by [`WorldModelPipeline.open_session`], whose arguments it takes.

    Every call that fails leaves the session as it was.

    Example:
        ```py
        session = pipe.open_session(frame[None], seed=7)  # uint8 (1, height, width, 3)
        for keys in (["forward"], ["forward", "turn left"], []):
            show(session.step(keys))  # uint8 (height, width, 3)
        before = session.snapshot()
        ```
    """

    def __init__(
        self,
        pipe: WorldModelPipeline,
        prompt_frames: Frames,
        prompt_controls: Frames | None = None,
        cache: str = "frame",
        memory: KVMemoryConfig | None = None,
        num_inference_steps: int | None = None,
        context_sigma: float | None = None,
        seed: int | Sequence[int] = 0,
    ) -> None:
        self.pipe = pipe
        # Diffusers looks through all components for it: too slow for every use.
        self._device: torch.device = pipe._execution_device
        self.encoder: ControlEncoder = pipe.control_encoder
        self.window: int = pipe.transformer.config.window
        self.cache = cache
        self._memory_config = self._check_memory(memory)
        self._sampler = type(pipe.scheduler).from_config(pipe.scheduler.config)
        self._sampler.set_timesteps(self._check_steps(num_inference_steps))
        self._num_levels: int = self._sampler.config.num_train_timesteps
        self.context_sigma = self._check_context_sigma(context_sigma)
        self._clock_ms = dict.fromkeys(STAGES, 0.0)
        self._step_ms = dict.fromkeys(STAGES, 0.0)
        self._total_ms = dict.fromkeys(STAGES, 0.0)
        self._num_steps = 0
        self.reset(prompt_frames, prompt_controls, seed)

    # --- what the session is at ---------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Videos that run side by side."""
        return len(self._state.rows)

    @property
    def num_inference_steps(self) -> int:
        """Denoising steps of a frame."""
        return self._sampler.num_inference_steps

    @property
    def rows(self) -> tuple[WorldRow, ...]:
        """What each video remembers."""
        return self._state.rows

    @property
    def num_frames(self) -> int:
        """Frames so far, prompt included; of the longest row where rows were reset."""
        return max(row.num_frames for row in self._state.rows)

    @property
    def context_length(self) -> int:
        """Frames that the next one sees; the most of any row."""
        return max(len(row.frame_ids) for row in self._state.rows)

    @property
    def memory(self) -> KVMemory | None:
        """Keys and values of a rolling session."""
        return self._state.memory

    def latents(self) -> list[torch.Tensor]:
        """Per row the clean latents of its context frames, `(channels, frames, h, w)` float32."""
        return [row.latents for row in self._state.rows]

    @property
    def stats(self) -> dict[str, dict[str, float]]:
        """Milliseconds of a step per stage: `{"encode", "context", "denoise", "decode"} -> {"mean", "last"}`."""
        steps = max(1, self._num_steps)
        return {stage: {"mean": self._total_ms[stage] / steps, "last": self._step_ms[stage]} for stage in STAGES}

    # --- playing ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, control: Control) -> np.ndarray:
        """Make the next frame.

        Args:
            control: what leads to it, or for absolute poses where it is seen from: `(columns,)` for all rows or
                `(batch, columns)`; or names of choices, held at the same time, as `["forward", "turn left"]`. A model
                of absolute poses that has a `walk` also takes the columns of its motion.

        Returns:
            uint8 `(batch, height, width, 3)`, or `(height, width, 3)` for a prompt without a batch axis.

        Raises:
            WorldSessionError: the network gave NaN or infinity; names the frame and the denoising step.
            ControlError: the control has other columns, or values out of range.
        """
        controls = self._parse_control(control)
        self._clock_ms = dict.fromkeys(STAGES, 0.0)
        state, latents = self._advance(self._state, controls)
        frames = self._decode(latents)
        self._state = state
        self._num_steps += 1
        self._step_ms = self._clock_ms
        self._total_ms = {stage: self._total_ms[stage] + self._step_ms[stage] for stage in STAGES}
        return frames if self._is_batched else frames[0]

    @torch.no_grad()
    def append_frame(self, frame: Frames, control: Control) -> None:
        """Take a real frame in place of a generated one.

        Args:
            frame: uint8 `(batch, height, width, 3)`, or `(height, width, 3)` for a prompt without a batch axis.
            control: as for `step`.

        Raises:
            WorldSessionError: a frame of another size or type than the prompt's.
            ControlError: as for `step`.
        """
        controls = self._parse_control(control)
        frames = _as_tensor(frame)
        frames = frames if self._is_batched else frames[None]
        self._check_frames(frames[:, None], self.batch_size, self._frame_size)
        self._state, _ = self._advance(
            self._state, controls, encode_frames(self.pipe.vae, frames[:, None].to(self._device))[:, :, 0]
        )

    @torch.no_grad()
    def reset(
        self,
        prompt_frames: Frames | None = None,
        prompt_controls: Frames | None = None,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        """Begin again.

        Args:
            prompt_frames: as for `open_session`; `None` takes the last prompt with its controls.
            prompt_controls: as for `open_session`.
            seed: `None` takes the last one.

        Raises:
            VidgenError: as for `open_session`.
        """
        if prompt_frames is not None:
            frames = _as_tensor(prompt_frames)
            controls = None if prompt_controls is None else _as_tensor(prompt_controls)
            is_batched = frames.ndim == 5
            if not is_batched:
                frames, controls = frames[None], None if controls is None else controls[None]
            self._check_frames(frames, None, None)
            prompt = (
                encode_frames(self.pipe.vae, frames.to(self._device)),
                self._check_prompt_controls(controls, *frames.shape[:2]),
            )
            size = tuple(frames.shape[2:4])
        elif prompt_controls is not None:
            raise WorldSessionError("prompt_controls are given without prompt_frames; give both or neither.")
        else:
            prompt, is_batched, size = self._prompt, self._is_batched, self._frame_size
        seed = self._seed if seed is None else seed
        self._state = self._start(*prompt, _seeds(seed, len(prompt[0])))
        self._prompt, self._seed, self._is_batched, self._frame_size = prompt, seed, is_batched, size

    @torch.no_grad()
    def reset_rows(
        self, rows: Sequence[int], prompt_frames: Frames, prompt_controls: Frames | None, seeds: Sequence[int]
    ) -> None:
        """Begin again in some rows of a batch, which then run as they would in a session of their own.

        Args:
            rows: their indices.
            prompt_frames: uint8 `(rows, prompt frames, height, width, 3)`.
            prompt_controls: `(rows, prompt frames, columns)`, or `None` as for `open_session`.
            seeds: one per row.

        Raises:
            WorldSessionError: the session is rolling, whose rows share one memory; or rows it doesn't have.
        """
        if self.cache == "rolling":
            raise WorldSessionError("reset_rows with cache='rolling', whose rows share one memory; allowed: 'frame'.")
        rows = [int(row) for row in rows]
        if not rows or len(set(rows)) != len(rows) or min(rows) < 0 or max(rows) >= self.batch_size:
            raise WorldSessionError(f"rows={rows}; allowed: different numbers from 0 to {self.batch_size - 1}.")
        frames = _as_tensor(prompt_frames)
        self._check_frames(frames, len(rows), self._frame_size)
        controls = self._check_prompt_controls(prompt_controls, *frames.shape[:2])
        latents = encode_frames(self.pipe.vae, frames.to(self._device))
        started = self._start(latents, controls, _seeds(seeds, len(rows)))
        all_rows = list(self._state.rows)
        for row, begun in zip(rows, started.rows, strict=True):
            all_rows[row] = begun
        self._state = WorldSnapshot(tuple(all_rows))

    def snapshot(self) -> WorldSnapshot:
        """The present moment, for `restore`."""
        return self._state

    def restore(self, snapshot: WorldSnapshot) -> None:
        """Go back to a moment of this session, or on from one of a session with the same settings.

        Raises:
            WorldSessionError: the snapshot is of a rolling session and this is none, or the other way round; or it has
                another batch or frame size.
        """
        found, expected = (
            f"{len(state.rows)} rows of {'x'.join(map(str, state.rows[0].latents.shape[-2:]))} latent cells, "
            f"{'rolling' if state.memory is not None else 'not rolling'}"
            for state in (snapshot, self._state)
        )
        if found != expected:
            raise WorldSessionError(f"The snapshot has {found}; this session has {expected}.")
        self._state = snapshot

    # --- settings and inputs ------------------------------------------------------------------------------------

    def _check_memory(self, memory: KVMemoryConfig | None) -> KVMemoryConfig | None:
        """The memory's configuration, where something else than the newest frames of a window is kept."""
        control_frame = self.pipe.transformer.config.control_frame
        if self.cache not in CACHES:
            raise ConfigError(f"cache={self.cache!r}; allowed: {', '.join(map(repr, CACHES))}.")
        if self.window < 2:
            raise ConfigError(f"The transformer's window is {self.window}; a world needs room for a past: 2 or more.")
        if self.cache == "rolling" and control_frame == "window":
            raise ConfigError(
                f"cache='rolling' with control_frame={control_frame!r}: these controls are relative to the first "
                "frame of the window, so every key changes when it slides. Allowed: 'frame', or a model with "
                "control_frame='delta' or 'world'."
            )
        if memory is None:
            return SlidingWindowMemoryConfig(window=self.window) if self.cache == "rolling" else None
        if not isinstance(memory, KVMemoryConfig):
            raise ConfigError(f"memory is a {type(memory).__name__}; allowed: None or a KVMemoryConfig.")
        if self.cache == "none":
            raise ConfigError("memory with cache='none'; allowed: 'frame', which gives the same frames, or 'rolling'.")
        if memory.positions != "bounded":
            raise ConfigError(
                f"positions={memory.positions!r}; this model knows {self.window} positions, so allowed: 'bounded'."
            )
        capacity = make_memory(memory, num_frames_per_block=1).capacity
        if capacity + 1 > self.window:
            raise ConfigError(
                f"The memory keeps up to {capacity} frames; with the new one {capacity + 1} are in view and the "
                f"transformer was trained on {self.window}. Allowed: memories of at most {self.window - 1} frames."
            )
        if self.cache == "frame":
            if isinstance(self.encoder.controls, ButtonControls):
                raise ConfigError(
                    "memory with cache='frame' leaves frames out, and buttons can't tell what lies between the "
                    "others; allowed: cameras or recorded motion, or cache='rolling'."
                )
            columns = self.encoder.controls.spec.width
            if isinstance(self.encoder.controls, DeltaControls) and columns not in (3, 6):
                raise ConfigError(
                    f"memory with cache='frame' for motion of {columns} columns, from which no pose is computed; "
                    "allowed: 3, on a plane, or 6, in space; or cache='rolling'."
                )
            if getattr(memory, "scope", "global") != "global":
                raise ConfigError("scope='per_layer' with cache='frame', which recomputes frames; allowed: 'global'.")
        return memory

    def _check_steps(self, num_inference_steps: int | None) -> int:
        steps = self.pipe.config.num_inference_steps if num_inference_steps is None else num_inference_steps
        if steps < 1:
            raise ConfigError(f"num_inference_steps={steps}; allowed: at least 1.")
        return steps

    def _check_context_sigma(self, context_sigma: float | None) -> float:
        if context_sigma is None:
            context_sigma = self.pipe.config.context_sigma
        if context_sigma is None and self.pipe.transformer.config.forcing == "teacher_forcing":
            return 0.0  # noisy context is nothing it has seen
        if context_sigma is None:
            if self.num_inference_steps == 1:
                raise ConfigError(
                    "num_inference_steps=1 has no level between noise and clean frames for the context; give "
                    "context_sigma too, such as 0.15."
                )
            return float(self._sampler.sigmas[-2])
        if not 0 <= context_sigma < 1:
            raise ConfigError(f"context_sigma={context_sigma}; allowed: from 0 to below 1.")
        return float(context_sigma)

    def _check_frames(self, frames: torch.Tensor, batch_size: int | None, size: tuple[int, int] | None) -> None:
        """Check uint8 frames `(batch, frames, height, width, 3)`."""
        if frames.ndim != 5 or frames.shape[-1] != 3 or frames.dtype != torch.uint8 or 0 in frames.shape:
            raise WorldSessionError(
                f"Frames are {frames.dtype} {tuple(frames.shape)}; allowed: uint8 (batch, frames, height, width, 3), "
                "at least one frame; without the batch axis for one video."
            )
        if batch_size is not None and len(frames) != batch_size:
            raise WorldSessionError(f"Frames of {len(frames)} videos are given for {batch_size}.")
        height, width = frames.shape[2:4]
        if size is None and self.encoder.latent_size is not None:
            size = tuple(cells * self.pipe.vae_scale_factor for cells in self.encoder.latent_size)
        if size is not None and (height, width) != size:
            raise WorldSessionError(f"Frames are {height}x{width} pixels; this world has {size[0]}x{size[1]}.")
        multiples = [self.pipe.vae_scale_factor * patch for patch in self.pipe.transformer.config.patch_size]
        if height % multiples[0] or width % multiples[1]:
            nearest = [max(1, round(n / m)) * m for n, m in zip((height, width), multiples, strict=True)]
            raise WorldSessionError(
                f"Frames are {height}x{width} pixels; height must be a multiple of {multiples[0]} and width of "
                f"{multiples[1]}, such as {nearest[0]}x{nearest[1]}."
            )
        if self._memory_config is None and frames.shape[1] > self.window - 1:
            raise WorldSessionError(
                f"The prompt has {frames.shape[1]} frames; beside a new frame the model sees {self.window - 1}. Give "
                "the newest of them, or a memory, which chooses."
            )

    def _check_prompt_controls(self, controls: Frames | None, batch_size: int, num_frames: int) -> torch.Tensor:
        """`(batch, frames, columns)` float64 on the CPU."""
        spec = self.encoder.controls.spec
        if controls is None:
            if num_frames > 1 or isinstance(self.encoder.controls, PoseControls):
                raise WorldSessionError(
                    f"prompt_controls are missing for {num_frames} prompt frames; only a single frame that motion or "
                    "buttons lead on from needs none."
                )
            return spec.null().expand(batch_size, 1, -1)
        controls = _as_tensor(controls).double()
        spec.check(controls, num_frames)
        if controls.ndim != 3 or len(controls) != batch_size:
            raise ControlShapeError(
                f"Controls are {tuple(controls.shape)}; allowed, as for the frames: "
                f"{(batch_size, num_frames, spec.width)}."
            )
        return controls

    def _parse_control(self, control: Control) -> torch.Tensor:
        """`(batch, columns)` float64 on the CPU."""
        spec, walk = self.encoder.controls.spec, self.encoder.walk
        if isinstance(control, str):
            control = [control]
        if not isinstance(control, (np.ndarray, torch.Tensor)) and all(isinstance(name, str) for name in control):
            controls = self.encoder.actions.row(*control)
        else:
            controls = _as_tensor(control).double()
        if walk is not None and controls.shape in ((walk.spec.width,), (self.batch_size, walk.spec.width)):
            motion = controls.expand(self.batch_size, -1)
            walk.spec.check(motion[:, None], 1)
            controls = torch.stack(
                [walk(row.places[-1], delta) for row, delta in zip(self._state.rows, motion, strict=True)]
            )
        if controls.shape not in ((spec.width,), (self.batch_size, spec.width)):
            raise ControlShapeError(
                f"The control has shape {tuple(controls.shape)}; allowed: {(spec.width,)} or "
                f"{(self.batch_size, spec.width)} with columns {', '.join(spec.names)}."
            )
        controls = controls.expand(self.batch_size, -1)
        spec.check(controls[:, None], 1)
        return controls

    # --- pixels and latents -------------------------------------------------------------------------------------

    def _decode(self, latents: torch.Tensor) -> np.ndarray:
        """Latents `(batch, channels, h, w)` to uint8 `(batch, height, width, 3)`."""
        with self._clock("decode"):
            return decode_frames(self.pipe.vae, latents.unsqueeze(2))[:, 0].contiguous().cpu().numpy()

    def _noise(self, rows: Sequence[WorldRow], purpose: int, num_frames: int = 1) -> torch.Tensor:
        """Standard normal `(rows, channels, frames, h, w)` of the rows' next frames."""
        # Drawn on the CPU, row by row: the same numbers on every device and in every batch.
        channels, _, height, width = rows[0].latents.shape
        shape = (channels, num_frames, height, width)
        noise = [torch.randn(shape, generator=generator_for(row.seed, row.num_frames, purpose)) for row in rows]
        return torch.stack(noise).to(self._device)

    def _add_noise(self, latents: torch.Tensor, rows: Sequence[WorldRow], purpose: int) -> torch.Tensor:
        """x_sigma = (1 - sigma) x + sigma eps, at the level of the context."""
        if self.context_sigma == 0:
            return latents
        noise = self._noise(rows, purpose, latents.shape[2])
        return (1 - self.context_sigma) * latents + self.context_sigma * noise

    # --- one frame ----------------------------------------------------------------------------------------------

    def _start(self, latents: torch.Tensor, controls: torch.Tensor, seeds: Sequence[int]) -> WorldSnapshot:
        """After a prompt: latents `(rows, channels, frames, h, w)`, controls `(rows, frames, columns)`."""
        is_rolling = self.cache == "rolling"
        chooses = self._memory_config is not None and not is_rolling
        no_places = (_origin(self.encoder) if self._leaves_frames_out else controls[0, 0])[None][:0]
        rows = []
        for seed, latent in zip(seeds, latents, strict=True):
            memory = make_memory(self._memory_config, 1) if chooses else None
            rows.append(WorldRow(seed, 0, (), latent[:, :0], no_places, memory))
        state = WorldSnapshot(tuple(rows), make_memory(self._memory_config, 1) if is_rolling else None)
        for frame in range(latents.shape[2]):
            state, _ = self._advance(state, controls[:, frame], latents[:, :, frame])
        return state

    def _advance(
        self, state: WorldSnapshot, controls: torch.Tensor, latents: torch.Tensor | None = None
    ) -> tuple[WorldSnapshot, torch.Tensor]:
        """One frame later.

        Args:
            state: before; stays as it is.
            controls: `(rows, columns)` of the next frame.
            latents: `(rows, channels, h, w)` clean latents of the next frame; `None` makes them.

        Returns:
            The state after, and the clean latents of the new frame.
        """
        # Rows with equally many context frames share a forward; rolling rows always have.
        groups: dict[int, list[int]] = {}
        for index, row in enumerate(state.rows):
            groups.setdefault(0 if state.memory is not None else len(row.frame_ids), []).append(index)

        rows, made, memory = list(state.rows), {}, state.memory
        for indices in groups.values():
            group = [state.rows[index] for index in indices]
            places = self._next_places(group, controls[indices])
            if latents is None or self._memory_config is not None:
                context = self._context(indices, group, places, state.memory)
            new = self._denoise(context) if latents is None else latents[indices]
            key_values = None if self._memory_config is None else self._key_values(context, new)
            if memory is not None:
                memory = state.memory.clone()
                memory.commit(key_values)
            for position, index in enumerate(indices):
                kept, row_memory = None, None
                if memory is not None:
                    kept = memory.frame_ids[index]
                elif key_values is not None:
                    row_memory = _committed(group[position], position, key_values)
                    kept = row_memory.frame_ids[0]
                rows[index] = self._appended(group[position], new[position], places[position], kept, row_memory)
                made[index] = new[position]
        return WorldSnapshot(tuple(rows), memory), torch.stack([made[index] for index in range(len(rows))])

    def _appended(
        self,
        row: WorldRow,
        latent: torch.Tensor,
        place: torch.Tensor,
        kept: torch.Tensor | None,
        memory: KVMemory | None,
    ) -> WorldRow:
        """A row with one more frame; its context are the frame ids in `kept`, or the newest that fit."""
        frame_ids = (*row.frame_ids, row.num_frames)
        staying = set(frame_ids[-(self.window - 1) :] if kept is None else kept.tolist())
        index = [position for position, frame_id in enumerate(frame_ids) if frame_id in staying]
        return WorldRow(
            seed=row.seed,
            num_frames=row.num_frames + 1,
            frame_ids=tuple(frame_ids[position] for position in index),
            latents=torch.cat([row.latents, latent[:, None]], dim=1)[:, index],
            places=_with(row.places, place)[index],
            memory=memory,
        )

    # --- what a frame sees --------------------------------------------------------------------------------------

    def _context(
        self, indices: list[int], rows: list[WorldRow], places: torch.Tensor, memory: KVMemory | None
    ) -> _Context:
        """What the next frame, with its places `(rows, columns)`, sees."""
        num_context = len(rows[0].frame_ids)
        with self._clock("encode"):
            controls = self._window_controls(rows, places).to(self._device)
        if memory is not None:
            return _Context(indices, rows, _take(controls, -1, None), memory)
        with self._clock("context"):
            latents = self._add_noise(torch.stack([row.latents for row in rows]), rows, CONTEXT_NOISE)
            if self.cache == "none":
                return _Context(indices, rows, controls, None, latents)
            memory = FullMemory(FullMemoryConfig(max_frames=self.window), num_frames_per_block=1)
            if num_context:
                level = self._level(self.context_sigma, len(rows))
                context_controls = _take(controls, None, num_context)
                memory.commit(self._forward(latents, level, context_controls, return_key_values=True).key_values)
        return _Context(indices, rows, _take(controls, -1, None), memory)

    def _window_controls(self, rows: list[WorldRow], places: torch.Tensor) -> torch.Tensor:
        """Controls of the context frames and the new one as the transformer takes them."""
        if self.cache == "rolling":
            # Relative to the frame before, wherever that is now; only the first frame of the video has none.
            window = places[:, None]
            if rows[0].num_frames and not isinstance(self.encoder.controls, PoseControls):
                window = torch.cat([self.encoder.controls.spec.null().expand_as(window), window], dim=1)
            return self.encoder(window)
        windows = torch.stack([_with(row.places, place) for row, place in zip(rows, places, strict=True)])
        if self._leaves_frames_out:
            windows = _motion_between(windows)
        return self.encoder(windows)

    @property
    def _leaves_frames_out(self) -> bool:
        """Whether recorded motion has to be that between chosen frames."""
        chooses = self.cache == "frame" and self._memory_config is not None
        return chooses and not isinstance(self.encoder.controls, PoseControls)

    def _next_places(self, rows: list[WorldRow], controls: torch.Tensor) -> torch.Tensor:
        """`(rows, columns)` that the rows keep of the next frame's controls."""
        if not self._leaves_frames_out:
            return controls
        origin = _origin(self.encoder)
        return torch.stack(
            [
                _integrate(row.places[-1], delta) if row.num_frames else origin
                for row, delta in zip(rows, controls, strict=True)
            ]
        )

    # --- the network --------------------------------------------------------------------------------------------

    def _level(self, sigma: float, batch_size: int) -> torch.Tensor:
        return torch.full((batch_size,), self._num_levels * sigma, device=self._device)

    def _forward(
        self, latents: torch.Tensor, level: torch.Tensor, controls: torch.Tensor, **options: Any
    ) -> WorldDiTOutput:
        return self.pipe.transformer(latents.to(self.pipe.transformer.dtype), level, controls, **options)

    def _predict(self, context: _Context, sample: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Velocity of the new frame, `(rows, channels, 1, h, w)` float32."""
        if context.memory is not None:
            return self._forward(sample, level, context.controls, kv_memory=context.memory).sample.float()
        num_context = context.latents.shape[2]
        context_level = self._level(self.context_sigma, len(sample))
        levels = torch.cat([context_level[:, None].expand(-1, num_context), level[:, None]], dim=1)
        frames = torch.cat([context.latents, sample], dim=2)
        return self._forward(frames, levels, context.controls).sample[:, :, -1:].float()

    def _denoise(self, context: _Context) -> torch.Tensor:
        """Clean latents `(rows, channels, h, w)` of the next frame."""
        steps = itertools.count(1)

        def velocity(sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            step = next(steps)
            predicted = self._predict(context, sample, timestep.float().expand(len(sample)))
            finite = predicted.isfinite().flatten(1).all(1)
            if not finite.all():
                position = int((~finite).nonzero()[0])
                raise WorldSessionError(
                    f"NaN or infinity in denoising step {step} of {self.num_inference_steps} of frame "
                    f"{context.rows[position].num_frames}, row {context.indices[position]}. The session stays at the "
                    "frame before; try another dtype (float16 overflows easily)."
                )
            return predicted

        with self._clock("denoise"):
            return denoise(velocity, self._noise(context.rows, FRAME_NOISE), self._sampler)[:, :, 0]

    def _key_values(self, context: _Context, latents: torch.Tensor) -> KeyValues:
        """Keys and values of a finished frame, `(rows, channels, h, w)`."""
        with self._clock("context"):
            noisy = self._add_noise(latents.unsqueeze(2), context.rows, COMMIT_NOISE)
            level = self._level(self.context_sigma, len(noisy))
            return self._forward(
                noisy, level, context.controls, kv_memory=context.memory, return_key_values=True
            ).key_values

    @contextlib.contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        """Adds the time of a block to a stage of the current step."""
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._clock_ms[stage] += 1000 * (time.perf_counter() - started)


def _as_tensor(values: Frames | Sequence) -> torch.Tensor:
    """On the CPU; arrays are copied, because torch reads neither flipped nor read-only ones."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu()
    return torch.from_numpy(np.array(values, order="C"))


def _seeds(seed: int | Sequence[int], batch_size: int) -> list[int]:
    """One per row: row `r` of a batch with seed `s` is what a single video with seed `s + r` is."""
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + row for row in range(batch_size)]
    if len(seed) != batch_size:
        raise WorldSessionError(
            f"{len(seed)} seeds are given for {batch_size} rows; allowed: one number, or one each."
        )
    return [int(each) for each in seed]


def _take(controls: torch.Tensor, start: int | None, stop: int | None) -> torch.Tensor:
    """Frames of maps `(batch, dim, frames, height, width)` or vectors `(batch, frames, dim)`."""
    return controls[:, :, start:stop] if controls.ndim == 5 else controls[:, start:stop]


def _with(places: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """One row more."""
    return torch.cat([places, place[None]])


def _committed(row: WorldRow, index: int, key_values: KeyValues) -> KVMemory:
    """The memory of a row with one more frame; `index` is that of the row in the keys and values."""
    memory = row.memory.clone()
    memory.commit([(key[index : index + 1], value[index : index + 1]) for key, value in key_values])
    return memory


def _origin(encoder: ControlEncoder) -> torch.Tensor:
    """The pose `(3 or 16,)` at the first frame of a video that is steered by motion."""
    spec = encoder.controls.spec
    return CAMERA_SPEC.null() if spec.names == CAMERA_DELTA_SPEC.names else spec.null()


def _integrate(pose: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The pose `(3 or 16,)` that a delta leads to."""
    deltas = torch.stack([torch.zeros_like(delta), delta])
    return (integrate_planar if len(pose) == 3 else integrate_cameras)(pose, deltas)[-1]


def _motion_between(places: torch.Tensor) -> torch.Tensor:
    """Deltas from each pose `(frames, 3 or 16)` to the next; row 0 is null."""
    return planar_deltas(places) if places.shape[-1] == 3 else camera_deltas(places)
