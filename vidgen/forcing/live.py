"""LIVE and the objectives it generalizes, as settings of one loss.

"LIVE: Long-horizon Interactive Video World Modeling" (arXiv 2602.03747) lets a world model continue p real frames by
itself, plays the result backward, and asks for the *real* frames given its own noised continuation and the reversed
controls. Nothing is compared with the continuation, so it may differ from the video, and no teacher is needed. That
long rollouts then drift less is an observation of the paper, not a guarantee.

Every member of the family looks at a window of T frames in the same way:

    [ctx_0 … ctx_{T-1} | tgt_0 … tgt_{T-1}],   id(s) = T - p + floor(s p / T),   tgt_s = real frame id(s)

    ctx_i sees ctx_j for j <= i;  tgt_s sees ctx_j for j < id(s), and itself

    loss = mean_s |v(tgt_s) - (eps_s - x_s)|^2,   x_sigma = (1 - sigma) x + sigma eps

| objective | p | context | context noise | time |
|---|---|---|---|---|
| Teacher Forcing | T | real | none | forward |
| Diffusion Forcing (arXiv 2407.01392) | T | real, and the targets themselves | uniform per frame | forward |
| LIVE | falls from T | own rollout | uniform per frame | backward |
| LIVE without noise, with fixed noise | falls from T | own rollout | none, constant | backward |
| no cycle | falls from T | own rollout | uniform per frame | forward |

Diffusion Forcing scores the noisy frames that are context for the later ones, so its window is T frames long and one
step costs less than half of the others'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from vidgen.forcing.diffusion_forcing import shift_sigma
from vidgen.memory import FullMemory, FullMemoryConfig
from vidgen.models.frame_autoencoder import encode_frames
from vidgen.runtime.checks import check_finite_fields
from vidgen.runtime.device import generator_for
from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.schedulers import denoise, flow_sampler
from vidgen.train.method import StepOutput, TrainingMethod

logger = logging.getLogger(__name__)

# Noise levels are u = i / NUM_LEVELS before they are warped, and the network sees floor(NUM_LEVELS * sigma).
NUM_LEVELS = 1000


class DivisibilityError(ConfigError):
    """A number of prompt frames doesn't divide the window."""


class RolloutFromTFInitError(ConfigError):
    """A model trained by Teacher Forcing is asked for many frames at once, at noise levels it has never seen."""


@dataclass(frozen=True)
class NoiseLevels:
    """Distribution of the noise level of a frame.

    Attributes:
        kind: `"uniform"` or `"logit_normal"` before the warp, or `"constant"`.
        shift: warps levels toward noise: sigma = shift * u / (1 + (shift - 1) * u).
        mean: of the logit, for `"logit_normal"`.
        std: of the logit, for `"logit_normal"`.
        sigma: the level, for `"constant"`.
    """

    kind: Literal["uniform", "logit_normal", "constant"] = "uniform"
    shift: float = 3.0
    mean: float = 0.0
    std: float = 1.0
    sigma: float = 0.0

    def __post_init__(self) -> None:
        check_finite_fields(self)
        if self.kind not in ("uniform", "logit_normal", "constant"):
            raise ConfigError(f"kind={self.kind!r}; allowed: uniform, logit_normal, constant.")
        if self.shift <= 0 or self.std <= 0 or not 0 <= self.sigma <= 1:
            raise ConfigError(
                f"shift={self.shift}, std={self.std}, sigma={self.sigma}; "
                "shift and std must be positive and sigma in [0, 1]."
            )

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Draw levels, one of `NUM_LEVELS` each, on the device of the generator."""
        if self.kind == "constant":
            return torch.full(shape, self.sigma, device=generator.device)
        if self.kind == "uniform":
            unwarped = torch.rand(shape, generator=generator, device=generator.device)
        else:
            normal = torch.randn(shape, generator=generator, device=generator.device)
            unwarped = torch.sigmoid(self.mean + self.std * normal)
        level = (NUM_LEVELS * unwarped).floor().clamp(max=NUM_LEVELS - 1)
        return shift_sigma(level / NUM_LEVELS, self.shift)


NO_NOISE = NoiseLevels(kind="constant", sigma=0.0)
LOGIT_NORMAL = NoiseLevels(kind="logit_normal")


@dataclass(frozen=True)
class CurriculumStage:
    """A part of the training with its own number of prompt frames.

    Attributes:
        p: prompt frames, or `{p: weight}` to draw from.
        until: end of the stage: a fraction of all steps if it has a decimal point, a step if it is whole, `None` for
            the last stage.
    """

    p: Any
    until: float | int | None = None

    def __post_init__(self) -> None:
        check_finite_fields(self)

    @property
    def weights(self) -> dict[int, float]:
        """Probability of each p, not normalized."""
        return {int(p): float(weight) for p, weight in self.p.items()} if hasattr(self.p, "items") else {self.p: 1.0}


def prompt_curriculum(window: int) -> list[CurriculumStage]:
    """T prompt frames for a tenth of the training, T/4 for two tenths, then 2; LIVE gives no numbers."""
    return [
        CurriculumStage(window, until=0.1),
        CurriculumStage(max(2, window // 4), until=0.3),
        CurriculumStage(min(2, window)),
    ]


def epoch_curriculum(window: int, steps_per_epoch: int) -> list[CurriculumStage]:
    """A quarter of the prompt frames of the epoch before, at least 2, as LIVE's released code counts them.

    Args:
        window: T, prompt frames of the first epoch.
        steps_per_epoch: optimizer steps of one pass over the data.
    """
    stages = [CurriculumStage(window, until=steps_per_epoch)]
    while stages[-1].p > 2:
        stages.append(CurriculumStage(max(2, stages[-1].p // 4), until=steps_per_epoch * (len(stages) + 1)))
    return [*stages[:-1], replace(stages[-1], until=None)]


@dataclass(frozen=True)
class ForcingSchedule:
    """One member of the family; the constructors below are its published members.

    Attributes:
        window: T, frames of a window.
        curriculum: prompt frames over the training; each p divides T.
        name: kept in the configuration of the trained model.
        context: `"real"` frames or the model's own `"rollout"`.
        direction: whether the window is played `"forward"` or in `"reverse"`.
        context_noise: noise of context frames.
        target_noise: noise of targets.
        targets_are_context: the context frames are the targets, as in Diffusion Forcing.
        context_includes_prompts: whether a prompt frame, as target, sees the prompt frames that come before it in the
            window, as in LIVE's released code; `False` leaves it the rollout alone, as in Eq. 14 of the paper.
    """

    window: int
    curriculum: list[CurriculumStage]
    name: str
    context: Literal["real", "rollout"] = "real"
    direction: Literal["forward", "reverse"] = "forward"
    context_noise: NoiseLevels = field(default_factory=NoiseLevels)
    target_noise: NoiseLevels = LOGIT_NORMAL
    targets_are_context: bool = False
    context_includes_prompts: bool = True

    def __post_init__(self) -> None:
        check_finite_fields(self)
        if self.window < 1:
            raise ConfigError(f"window={self.window}; it must be at least 1.")
        if self.context not in ("real", "rollout"):
            raise ConfigError(f"context={self.context!r}; allowed: real, rollout.")
        if self.direction not in ("forward", "reverse"):
            raise ConfigError(f"direction={self.direction!r}; allowed: forward, reverse.")
        ends = [stage.until for stage in self.curriculum]
        if not ends or ends[-1] is not None or None in ends[:-1]:
            raise ConfigError(f"curriculum ends at {ends}; every stage but the last needs `until`, and the last none.")
        if len({type(end) for end in ends[:-1]}) > 1 or any(a >= b for a, b in pairwise(ends[:-1])):
            raise ConfigError(f"curriculum ends at {ends}; these must increase, all as fractions or all as steps.")
        for stage in self.curriculum:
            if not stage.weights or min(stage.weights.values()) < 0 or sum(stage.weights.values()) <= 0:
                raise ConfigError(f"p={stage.p}; weights must not be negative, and one of them positive.")
            for p in stage.weights:
                check_divides(p, self.window)
        if (self.context == "real" or self.targets_are_context) and self.prompt_counts != {self.window}:
            raise ConfigError(
                f"p={sorted(self.prompt_counts)}; real context has p = window = {self.window}, fewer prompt frames "
                "need a rollout."
            )

    @property
    def prompt_counts(self) -> set[int]:
        """Every p of the curriculum."""
        return {p for stage in self.curriculum for p in stage.weights}

    def prompt_frames(self, step: int, total_steps: int, generator: torch.Generator) -> int:
        """p of an optimizer step."""
        for stage in self.curriculum:
            end = stage.until * total_steps if isinstance(stage.until, float) else stage.until
            if end is None or step < end:
                break
        counts, weights = zip(*stage.weights.items(), strict=True)
        choice = torch.multinomial(torch.tensor(weights), 1, generator=generator)
        return counts[int(choice)]

    @classmethod
    def teacher_forcing(cls, window: int) -> ForcingSchedule:
        """Real, clean context."""
        return cls(window, [CurriculumStage(window)], "teacher_forcing", context_noise=NO_NOISE)

    @classmethod
    def diffusion_forcing(cls, window: int) -> ForcingSchedule:
        """Real context; every frame has its own noise level and is scored at it."""
        return cls(window, [CurriculumStage(window)], "diffusion_forcing", targets_are_context=True)

    @classmethod
    def live(cls, window: int, p: int | list[CurriculumStage] | None = None) -> ForcingSchedule:
        """Reversed rollout with random noise; `p` may be fixed or a curriculum of its own."""
        return cls(window, _stages(window, p), "live", context="rollout", direction="reverse")

    @classmethod
    def live_no_noise(cls, window: int, p: int | list[CurriculumStage] | None = None) -> ForcingSchedule:
        """Ablation: the reversed rollout is shown clean."""
        return replace(cls.live(window, p), name="live_no_noise", context_noise=NO_NOISE)

    @classmethod
    def live_fixed_noise(
        cls, window: int, p: int | list[CurriculumStage] | None = None, sigma: float = 0.3
    ) -> ForcingSchedule:
        """Ablation: the reversed rollout always has the same noise level."""
        noise = NoiseLevels(kind="constant", sigma=sigma)
        return replace(cls.live(window, p), name="live_fixed_noise", context_noise=noise)

    @classmethod
    def no_cycle(cls, window: int, p: int | list[CurriculumStage] | None = None) -> ForcingSchedule:
        """Ablation: the rollout is played forward and the real frames it diverged from are asked for."""
        return replace(cls.live(window, p), name="no_cycle", direction="forward")


def _stages(window: int, p: int | list[CurriculumStage] | None) -> list[CurriculumStage]:
    if p is None:
        return prompt_curriculum(window)
    return [CurriculumStage(p)] if isinstance(p, int) else p


def check_divides(p: int, window: int) -> None:
    """Raises [`DivisibilityError`] unless p prompt frames divide the window."""
    divisors = [divisor for divisor in range(1, window + 1) if window % divisor == 0]
    if p not in divisors:
        nearest = min(divisors, key=lambda divisor: abs(divisor - p))
        raise DivisibilityError(
            f"p={p} prompt frames do not divide the window of {window} frames; nearest: {nearest}, "
            f"allowed: {', '.join(map(str, divisors))}."
        )


@dataclass(frozen=True)
class RolloutConfig:
    """How the model continues the prompt frames.

    Attributes:
        mode: `"joint"`, all frames at once at one noise level, which needs a model that knows noisy context;
            `"framewise"`, one after another.
        steps: steps of the sampler.
        shift: of the sampler's levels.
        solver_order: of the sampler.
        context_sigma: noise level of prompts and finished frames; `None` is the sampler's next-to-last level.
    """

    mode: Literal["joint", "framewise"] = "joint"
    steps: int = 18
    shift: float = 3.0
    solver_order: int = 2
    context_sigma: float | None = None

    def __post_init__(self) -> None:
        check_finite_fields(self)
        if self.mode not in ("joint", "framewise"):
            raise ConfigError(f"mode={self.mode!r}; allowed: joint, framewise.")
        if self.context_sigma is not None and not 0 <= self.context_sigma <= 1:
            raise ConfigError(f"context_sigma={self.context_sigma}; it must be in [0, 1].")
        flow_sampler(self.steps, self.shift, self.solver_order)


def take_frames(controls: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Controls of chosen frames: maps `(batch, dim, frames, height, width)` or vectors `(batch, frames, dim)`."""
    return controls.index_select(2 if controls.ndim == 5 else 1, index.to(controls.device))


@torch.no_grad()
def rollout(
    transformer: nn.Module,
    prompts: torch.Tensor,
    controls: torch.Tensor,
    config: RolloutConfig,
    generator: torch.Generator,
) -> torch.Tensor:
    """Continue real frames to the end of a window.

    Each frame or chunk reads the frames before it from a memory, at a light noise that was drawn once.

    Args:
        transformer: a `WorldDiT`.
        prompts: `(batch, channels, p, height, width)` clean latents.
        controls: as the transformer takes them, of all T frames of the window.
        config: see [`RolloutConfig`].
        generator: source of all noise.

    Returns:
        `(batch, channels, T, height, width)`, the prompts and what follows, without a graph.
    """
    batch_size, _, num_prompts = prompts.shape[:3]
    window = controls.shape[2 if controls.ndim == 5 else 1]
    sampler = flow_sampler(config.steps, config.shift, config.solver_order)
    context_sigma = float(sampler.sigmas[-2]) if config.context_sigma is None else config.context_sigma
    memory = FullMemory(FullMemoryConfig(max_frames=window), num_frames_per_block=window)

    def predict(sample: torch.Tensor, timestep: torch.Tensor | float, start: int, **options: bool):
        frame_ids = torch.arange(start, start + sample.shape[2])
        timestep = torch.as_tensor(timestep, device=sample.device).expand(batch_size)
        return transformer(sample, timestep, take_frames(controls, frame_ids), kv_memory=memory, **options)

    def commit(frames: torch.Tensor, start: int) -> None:
        noise = torch.randn(frames.shape, generator=generator, device=frames.device)
        noisy = (1 - context_sigma) * frames + context_sigma * noise
        memory.commit(predict(noisy, NUM_LEVELS * context_sigma, start, return_key_values=True).key_values)

    def continue_from(start: int, num_frames: int) -> torch.Tensor:
        shape = (*prompts.shape[:2], num_frames, *prompts.shape[3:])
        noise = torch.randn(shape, generator=generator, device=prompts.device)
        return denoise(lambda sample, timestep: predict(sample, timestep, start).sample, noise, sampler)

    was_training = transformer.training
    transformer.eval()
    commit(prompts, 0)
    frames = [prompts]
    chunk = window - num_prompts if config.mode == "joint" else 1
    for start in range(num_prompts, window, chunk):
        frames.append(continue_from(start, chunk))
        if start + chunk < window:
            commit(frames[-1], start)
    transformer.train(was_training)
    return torch.cat(frames, dim=2)


@dataclass(frozen=True)
class ForcingWindow:
    """The sequence of one training step, before noise.

    Attributes:
        latents: `(batch, channels, length, height, width)`, 2T frames, or T where the targets are the context.
        controls: of each of them, as the transformer takes them.
        frame_positions: `(length,)` position of each in the window.
        frame_mask: `(length, length)` bool, which frame sees which.
        num_context: frames that are only context; the rest are targets.
        is_reversed: whether time runs backward.
    """

    latents: torch.Tensor
    controls: torch.Tensor
    frame_positions: torch.Tensor
    frame_mask: torch.Tensor
    num_context: int
    is_reversed: bool


def target_frames(window: int, p: int) -> torch.Tensor:
    """id(s), `(T,)` int64: the last p frames of the window, each T / p times."""
    check_divides(p, window)
    return torch.arange(window - p, window).repeat_interleave(window // p)


def window_mask(window: int, p: int, context_includes_prompts: bool = True) -> torch.Tensor:
    """`(2T, 2T)` bool, which frame of `[context | targets]` sees which.

    The last context frame is nobody's past; it sees what it would, so that no row is empty.
    """
    context = torch.arange(window)
    ids = target_frames(window, p)
    mask = torch.zeros(2 * window, 2 * window, dtype=torch.bool)
    mask[:window, :window] = context <= context[:, None]
    mask[window:, :window] = context < ids[:, None]
    if not context_includes_prompts and p < window:
        mask[window:, :window] &= context < window - p
    mask[window:, window:] = torch.eye(window, dtype=torch.bool)
    return mask


def build_window(
    schedule: ForcingSchedule,
    latents: torch.Tensor,
    rolled: torch.Tensor,
    controls: torch.Tensor,
    p: int,
    reverse_controls: Callable[[torch.Tensor], torch.Tensor],
    encode_controls: Callable[[torch.Tensor], torch.Tensor],
) -> ForcingWindow:
    """Lay out context and targets.

    Args:
        schedule: the objective.
        latents: `(batch, channels, T, height, width)` real frames, forward in time.
        rolled: what the context is made of, forward in time: `latents`, or the output of [`rollout`].
        controls: of the T frames, forward in time, in the form of the data.
        p: prompt frames.
        reverse_controls: turns the controls of a clip into those of the clip played backward.
        encode_controls: turns the controls of a window into what the transformer takes.
    """
    window, is_reversed = schedule.window, schedule.direction == "reverse"
    if is_reversed:
        latents, rolled, controls = latents.flip(2), rolled.flip(2), reverse_controls(controls)
    controls = encode_controls(controls)
    positions = torch.arange(window)
    if schedule.targets_are_context:
        causal = torch.ones(window, window, dtype=torch.bool).tril()
        return ForcingWindow(latents, controls, positions, causal, 0, is_reversed)

    positions = torch.cat([positions, target_frames(window, p)])
    targets = latents.index_select(2, positions[window:].to(latents.device))
    return ForcingWindow(
        torch.cat([rolled, targets], dim=2),
        take_frames(controls, positions),
        positions,
        window_mask(window, p, schedule.context_includes_prompts),
        window,
        is_reversed,
    )


def draw_noise(
    schedule: ForcingSchedule, window: ForcingWindow, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise levels `(batch, length)` and noise shaped as the latents; every frame and slot has its own."""
    batch_size, _, length = window.latents.shape[:3]
    if schedule.targets_are_context:
        sigma = schedule.context_noise.sample((batch_size, length), generator)
    else:
        context = schedule.context_noise.sample((batch_size, window.num_context), generator)
        target = schedule.target_noise.sample((batch_size, length - window.num_context), generator)
        sigma = torch.cat([context, target], dim=1)
    noise = torch.randn(window.latents.shape, generator=generator, device=generator.device)
    return sigma, noise


def forcing_errors(
    transformer: nn.Module, window: ForcingWindow, sigma: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """Squared error of the predicted velocity of each target, `(batch, targets)`; the loss is its mean."""
    # x_sigma = (1 - sigma) x + sigma eps
    view = sigma[:, None, :, None, None]
    noisy_latents = (1 - view) * window.latents + view * noise
    time_direction = None
    if transformer.config.direction_embedding:
        time_direction = torch.full((sigma.shape[0],), int(window.is_reversed), device=sigma.device)
    velocity = transformer(
        noisy_latents,
        NUM_LEVELS * sigma,
        window.controls,
        time_direction=time_direction,
        frame_mask=window.frame_mask,
        frame_positions=window.frame_positions,
    ).sample
    error = (velocity.float() - (noise - window.latents)).square().mean(dim=(1, 3, 4))  # (B, length)
    return error[:, window.num_context :]


class LiveMethod(TrainingMethod):
    """Trains a world model by any member of the family.

    Batches hold `controls`, `T` per sample along the second axis, and `latents` `(batch, channels, T, height, width)`
    or, with a `vae`, `frames`, uint8 `(batch, T, height, width, 3)`.

    Args:
        transformer: a `WorldDiT` whose window is that of the schedule.
        schedule: the objective.
        reverse_controls: turns the controls of a clip into those of the clip played backward; `None` for objectives
            that play forward.
        encode_controls: turns the controls of a window into what the transformer takes (poses into rays relative to
            the first camera); `None` gives them to it as they are.
        rollout_config: how the model continues the prompt frames.
        total_steps: optimizer steps of the training, of which the curriculum names fractions.
        seed: fixes the number of prompt frames of a step, which all processes share.
        validation: returns one fixed batch for `validate`, or `None`.
        vae: a frozen `AutoencoderKL` that encodes batches of frames, or `None`.

    Raises:
        RolloutFromTFInitError: the transformer was trained by Teacher Forcing, and rollouts are joint.
        ConfigError: the window differs from the transformer's, or time is reversed without a way to reverse controls.
    """

    def __init__(
        self,
        transformer: nn.Module,
        schedule: ForcingSchedule,
        reverse_controls: Callable[[torch.Tensor], torch.Tensor] | None = None,
        encode_controls: Callable[[torch.Tensor], torch.Tensor] | None = None,
        rollout_config: RolloutConfig | None = None,
        total_steps: int = 1,
        seed: int = 0,
        validation: Callable[[], dict[str, torch.Tensor]] | None = None,
        vae: nn.Module | None = None,
    ) -> None:
        super().__init__()
        rollout_config = rollout_config or RolloutConfig()
        if schedule.window != transformer.config.window:
            raise ConfigError(
                f"window={schedule.window}, but the transformer was made for windows of {transformer.config.window}."
            )
        if schedule.direction == "reverse" and reverse_controls is None:
            raise ConfigError(f"{schedule.name!r} plays clips backward and needs reverse_controls.")
        rolls_out = min(schedule.prompt_counts) < schedule.window
        if rolls_out and rollout_config.mode == "joint" and transformer.config.forcing == "teacher_forcing":
            raise RolloutFromTFInitError(
                "this transformer was trained by teacher_forcing and has never seen noisy context, so it can't "
                "denoise several frames at once. Start from one trained by diffusion_forcing, or set "
                "mode='framewise' and context_sigma=0 for the rollout."
            )
        if rolls_out and schedule.context_noise == NO_NOISE:
            logger.warning(
                "%s shows its rollout without noise: the model learns to copy the nearest frame and drifts later.",
                schedule.name,
            )
        if schedule.curriculum[0].weights.keys() == {1} and schedule.window > 1:
            logger.warning("%s starts with 1 prompt frame; a curriculum from T downward works better.", schedule.name)
        self.transformer, self.schedule, self.rollout_config = transformer, schedule, rollout_config
        self.reverse_controls = reverse_controls
        self.encode_controls = encode_controls or (lambda controls: controls)
        self.total_steps, self.seed, self.validation_batch = total_steps, seed, validation
        self.vae = None if vae is None else vae.requires_grad_(False)
        transformer.register_to_config(forcing=schedule.name)

    def roles(self) -> dict[str, nn.Module]:
        return {"transformer": self.transformer}

    def _latents(self, batch: dict[str, Any], generator: torch.Generator) -> torch.Tensor:
        """`(batch, channels, T, height, width)`; the posterior is sampled, as in LIVE's released code."""
        if self.vae is None:
            return batch["latents"].float()
        return encode_frames(self.vae, batch["frames"], generator)

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        latents, controls = self._latents(batch, generator), batch["controls"]  # (B, C, T, h, w), (B, T, ...)
        self._check_batch(latents, controls)

        # 1. Prompt frames of this step, the same on all processes
        p = self.schedule.prompt_frames(step, self.total_steps, generator_for(self.seed, step))

        # 2. The model continues them; without a graph
        rolled = latents
        if p < self.schedule.window:
            rolled = rollout(
                self.transformer, latents[:, :, :p], self.encode_controls(controls), self.rollout_config, generator
            )

        # 3. The real frames given the (reversed) rollout
        window = build_window(self.schedule, latents, rolled, controls, p, self.reverse_controls, self.encode_controls)
        errors = forcing_errors(self.transformer, window, *draw_noise(self.schedule, window, generator))
        return StepOutput({"transformer": errors.mean()}, {"prompt_frames": float(p)})

    def _check_batch(self, latents: torch.Tensor, controls: torch.Tensor) -> None:
        window = self.schedule.window
        if latents.shape[2] != window or controls.shape[1] != window:
            raise VidgenError(
                f"a batch holds {latents.shape[2]} frames and {controls.shape[1]} controls; the window is {window}."
            )

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Loss of Diffusion Forcing on the fixed batch: the same for all objectives."""
        if self.validation_batch is None:
            return {}
        batch = self.validation_batch()
        generator = torch.Generator(device=self.transformer.device).manual_seed(0)
        latents, controls = self._latents(batch, generator), batch["controls"]
        self._check_batch(latents, controls)
        schedule = ForcingSchedule.diffusion_forcing(self.schedule.window)
        window = build_window(schedule, latents, latents, controls, schedule.window, lambda c: c, self.encode_controls)
        errors = forcing_errors(self.transformer, window, *draw_noise(schedule, window, generator))
        return {"validation_loss": float(errors.mean())}
