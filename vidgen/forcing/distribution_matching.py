"""Distribution matching on a student's own rollouts, with or without the student's context in the scores.

One family covers three published methods:

* **Self Forcing** ("Self Forcing: Bridging the Train-Test Gap in Autoregressive Video Diffusion", arXiv 2506.08009):
  the whole rollout is scored, nothing is context (`context="none"`, target = rollout).
* **Streaming long tuning** ("LongLive: Real-time Interactive Long Video Generation", arXiv 2509.22622): long rollouts
  whose end is scored by a teacher that knows only the last frames (`context="window"`).
* **Contextual distribution matching** ("Context Forcing", arXiv 2602.06028, Algorithm 1): the end of a long rollout is
  scored given what the student's slow-fast memory held (`context="memory"`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from vidgen.forcing.conditions import Conditions, predict_beside_context, take_frames
from vidgen.forcing.diffusion_forcing import shift_sigma
from vidgen.forcing.layouts import slot_blocks
from vidgen.forcing.rollout import Rollout, replay, rollout
from vidgen.memory import SlowFastMemory, SlowFastMemoryConfig
from vidgen.runtime.checks import check_finite_fields
from vidgen.runtime.device import generator_for
from vidgen.runtime.errors import ConfigError, TrainingError
from vidgen.train.method import StepOutput, TrainingMethod
from vidgen.train.processes import gather_samples


@dataclass(frozen=True)
class RolloutCurriculum:
    """Length of the rollouts, which grows so that training starts where the student already is.

    At step s the length is uniform over the multiples of the chunk in
    [min_frames, min_frames + min(1, s / growth_steps) * (max_frames - min_frames)].

    Attributes:
        min_frames: shortest rollout, latent frames.
        max_frames: longest rollout at the end of the growth, latent frames.
        growth_steps: optimizer steps until then.
    """

    min_frames: int = 40
    max_frames: int = 120
    growth_steps: int = 250

    def __post_init__(self) -> None:
        check_finite_fields(self)
        if not 1 <= self.min_frames <= self.max_frames or self.growth_steps < 0:
            raise ConfigError(
                f"min_frames={self.min_frames}, max_frames={self.max_frames}, growth_steps={self.growth_steps}; "
                "they must satisfy 1 <= min_frames <= max_frames and growth_steps >= 0."
            )

    def sample(self, step: int, chunk: int, generator: torch.Generator) -> int:
        """Latent frames of the rollout at an optimizer step."""
        progress = min(1.0, step / self.growth_steps) if self.growth_steps else 1.0
        longest = self.min_frames + int(progress * (self.max_frames - self.min_frames))
        fewest = -(-self.min_frames // chunk)
        most = max(fewest, longest // chunk)
        return chunk * int(torch.randint(fewest, most + 1, (), generator=generator))


@dataclass(frozen=True)
class DistributionMatchingConfig:
    """Settings of [`DistributionMatchingMethod`].

    Attributes:
        sigmas: noise levels of the student's sampler, decreasing from 1.
        target_frames: l, latent frames that are scored together.
        target_attention: how they see each other while they are scored: `"joint"`, all of them, for a teacher that
            was trained on such targets; `"chunked"`, each chunk itself and the equally noisy chunks before it, for a
            teacher by diffusion forcing.
        context: what teacher and critic read: `"memory"`, the frames in the student's memory; `"window"`, the last
            `window_frames`; `"none"`.
        window_frames: latent frames of `context="window"`.
        shared_selection: teacher and critic see the very frames the student's memory held; `False` lets the teacher
            choose by its own keys, for both.
        clean_context_frames: c, context frames that run all denoising steps; `None` is the whole context.
        memory_gradient: whether the student's gradient also reaches how it writes the frames in its memory, see
            [`~vidgen.forcing.rollout.rollout`]. Needed by a student whose start has never read a long memory.
        first_exit: earliest step after which the target may leave the sampler; 1 in the papers. From pure noise a
            small student finds a single answer for all noise, which the later steps then keep.
        curriculum: rollout length.
        guidance_scale: classifier-free guidance of the teacher, v_uncond + w (v_cond - v_uncond); 1 is none.
        shift: warp of the noise level at which the scores are compared.
        min_sigma: smallest of those levels.
        max_sigma: largest of those levels.
        student_every: optimizer steps between two updates of the student; the critic is updated in each.
        stalled_after: decisions without a single promotion after which the run stops: a slow memory that never
            takes anything in teaches nothing.
        seed: fixes rollout length and exit step, which all processes share.
    """

    sigmas: tuple[float, ...] = (1.0, 0.9375, 0.8333, 0.625)
    target_frames: int = 21
    target_attention: str = "joint"
    context: str = "memory"
    window_frames: int = 3
    shared_selection: bool = True
    clean_context_frames: int | None = None
    memory_gradient: bool = False
    first_exit: int = 1
    curriculum: RolloutCurriculum = field(default_factory=RolloutCurriculum)
    guidance_scale: float = 4.0
    shift: float = 5.0
    min_sigma: float = 0.02
    max_sigma: float = 0.98
    student_every: int = 5
    stalled_after: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        check_finite_fields(self)
        levels = [*self.sigmas, 0.0]
        if len(levels) < 2 or levels[0] != 1 or any(a <= b for a, b in pairwise(levels)):
            raise ConfigError(f"sigmas={list(self.sigmas)}; they must start at 1 and decrease towards 0.")
        if self.context not in ("memory", "window", "none"):
            raise ConfigError(f"context={self.context!r}; allowed: 'memory', 'window', 'none'.")
        if self.target_attention not in ("joint", "chunked"):
            raise ConfigError(f"target_attention={self.target_attention!r}; allowed: 'joint', 'chunked'.")
        if self.target_frames < 1 or self.window_frames < 1 or self.student_every < 1:
            raise ConfigError("target_frames, window_frames and student_every must be at least 1.")
        if self.target_frames > self.curriculum.min_frames:
            raise ConfigError(
                f"target_frames={self.target_frames} do not fit into rollouts of "
                f"curriculum.min_frames={self.curriculum.min_frames}."
            )
        if not 1 <= self.first_exit <= len(self.sigmas):
            raise ConfigError(
                f"first_exit={self.first_exit}; it must be between 1 and {len(self.sigmas)}, the number of sigmas."
            )
        if not 0 < self.min_sigma < self.max_sigma < 1:
            raise ConfigError(f"min_sigma={self.min_sigma}, max_sigma={self.max_sigma}; 0 < min < max < 1 is needed.")
        if self.guidance_scale < 1 or self.shift <= 0:
            raise ConfigError(f"guidance_scale={self.guidance_scale} must be >= 1 and shift={self.shift} > 0.")


@dataclass(frozen=True)
class ScoredContext:
    """What teacher and critic are shown beside a target of l frames.

    Attributes:
        latents: `(batch, channels, n, height, width)` context frames, detached.
        frame_ids: `(batch, n)` which frames of the rollout these are.
        blocks: `(n,)` block of each for the block-causal mask.
        text: `(batch, length, text_dim)` prompt of the target.
        channels: condition channels of the n context frames and the l target frames, or `None`.
    """

    latents: torch.Tensor
    frame_ids: torch.Tensor
    blocks: torch.Tensor
    text: torch.Tensor
    channels: torch.Tensor | None


class DistributionMatchingMethod(TrainingMethod):
    """Trains a few-step student and the critic that follows its distribution; no video data.

    Batches hold conditions only ([`Conditions`]) for at least `curriculum.max_frames` frames.

    Args:
        student: few-step causal transformer.
        teacher: frozen real score.
        critic: fake score, initialized from the teacher.
        text_encoder: frozen encoder, or `None` when batches hold embeddings.
        memory: the student's memory.
        frame_shape: channels, height and width of a latent frame.
        config: see [`DistributionMatchingConfig`].
        evaluate: measures the (averaged) student for `validate`, or `None`.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        critic: nn.Module,
        text_encoder: nn.Module | None,
        memory: SlowFastMemoryConfig,
        frame_shape: tuple[int, int, int],
        config: DistributionMatchingConfig,
        evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    ) -> None:
        super().__init__()
        self.student, self.critic = student, critic
        self.teacher = teacher.requires_grad_(False)
        self.text_encoder = None if text_encoder is None else text_encoder.requires_grad_(False)
        self.memory_config, self.frame_shape, self.config = memory, tuple(frame_shape), config
        self.evaluate = evaluate
        self.decisions = self.promotions = 0
        chunk = student.config.num_frames_per_block
        if config.target_frames % chunk:
            raise ConfigError(f"target_frames={config.target_frames} is no multiple of the chunk of {chunk} frames.")

    def roles(self) -> dict[str, nn.Module]:
        roles = {name: getattr(self, name) for name in ("student", "teacher", "critic", "text_encoder")}
        return {name: role for name, role in roles.items() if role is not None}

    def active_optimizers(self, step: int) -> tuple[str, ...]:
        # The critic learns first, so that the student never follows an untrained one.
        return ("student", "critic") if (step + 1) % self.config.student_every == 0 else ("critic",)

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        config = self.config
        conditions = Conditions.from_batch(batch, self.text_encoder)
        student_learns = "student" in self.active_optimizers(step)

        # 1. Length L and exit step r, the same on all processes
        chunk = self.student.config.num_frames_per_block
        shared = generator_for(config.seed, step)
        num_frames = config.curriculum.sample(step, chunk, shared)
        exit_step = int(torch.randint(config.first_exit, len(config.sigmas) + 1, (), generator=shared))

        # 2. The student writes the video; gradient in the exit step of the target's chunks
        video = rollout(
            self.student,
            SlowFastMemory(self.memory_config, num_frames_per_block=chunk),
            conditions,
            config.sigmas,
            self.frame_shape,
            num_frames,
            config.target_frames,
            exit_step,
            generator,
            num_clean_context=config.clean_context_frames,
            requires_grad=student_learns,
            memory_gradient=config.memory_gradient,
        )
        context = self.scored_context(video, conditions)

        # 3. Teacher and critic score the target given that context
        losses = {"critic": self.critic_loss(video.target.detach(), context, generator)}
        metrics = self._memory_metrics(video)
        if student_learns:
            losses["student"] = self.student_loss(video.target, context, generator)
        return StepOutput(losses, metrics | {"rollout_frames": float(num_frames)})

    def scored_context(self, video: Rollout, conditions: Conditions) -> ScoredContext:
        """What teacher and critic are shown of a rollout before its target."""
        past = video.latents[:, :, : -video.num_target].detach()
        batch_size, _, num_past = past.shape[:3]
        chunk = self.student.config.num_frames_per_block
        if self.config.context == "memory":
            memory = video.memory
            if not self.config.shared_selection:
                empty = SlowFastMemory(self.memory_config, num_frames_per_block=chunk)
                memory = replay(self.teacher, empty, past, conditions)
            frame_ids, (blocks, _) = memory.frame_ids, slot_blocks(memory)
            frame_ids = frame_ids if memory.num_slots else torch.zeros(batch_size, 0, dtype=torch.int64)
        else:
            first = max(0, num_past - self.config.window_frames) if self.config.context == "window" else num_past
            frame_ids = torch.arange(first, num_past).expand(batch_size, -1)
            blocks = torch.arange(num_past - first) // chunk
        target_ids = torch.arange(num_past, num_past + video.num_target).expand(batch_size, -1)
        return ScoredContext(
            take_frames(past, frame_ids),
            frame_ids,
            blocks.to(past.device),
            conditions.text_at((num_past + video.num_target) // chunk - 1),
            conditions.channels_at(torch.cat([frame_ids, target_ids], dim=1)),
        )

    def student_loss(self, target: torch.Tensor, context: ScoredContext, generator: torch.Generator) -> torch.Tensor:
        """0.5 ||x - sg(x - g)||^2 with g = (x0_fake - x0_real) / mean |x - x0_real|, whose gradient is g."""
        noisy, sigma, _ = self._add_noise(target.detach(), generator)
        with torch.no_grad():
            fake = self.predict_clean(self.critic, noisy, sigma, context)
            real = self.predict_clean(self.teacher, noisy, sigma, context)
            if self.config.guidance_scale > 1:
                free = self.predict_clean(self.teacher, noisy, sigma, context, drop_text=True)
                real = free + self.config.guidance_scale * (real - free)
            scale = (target - real).abs().mean(dim=(1, 2, 3, 4), keepdim=True)
            gradient = (fake - real) / scale.clamp(min=1e-6)
        return 0.5 * (target - (target - gradient).detach()).square().mean()

    def critic_loss(self, target: torch.Tensor, context: ScoredContext, generator: torch.Generator) -> torch.Tensor:
        """Flow matching on the student's own frames."""
        noisy, sigma, noise = self._add_noise(target, generator)
        predicted = self._velocity(self.critic, noisy, sigma, context)
        return (predicted - (noise - target)).square().mean()

    def _add_noise(
        self, target: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x_t, t of each sample and the noise."""
        uniform = torch.rand(target.shape[0], generator=generator, device=target.device)
        sigma = shift_sigma(uniform, self.config.shift).clamp(self.config.min_sigma, self.config.max_sigma)
        noise = torch.randn(target.shape, generator=generator, device=target.device)
        view = sigma[:, None, None, None, None]
        return (1 - view) * target + view * noise, sigma, noise

    def predict_clean(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        sigma: torch.Tensor,
        context: ScoredContext,
        drop_text: bool = False,
    ) -> torch.Tensor:
        """x_0 of a noisy target `(batch, channels, l, height, width)` given the context, by x_t - t v."""
        velocity = self._velocity(transformer, noisy, sigma, context, drop_text)
        return noisy - sigma[:, None, None, None, None] * velocity

    def _velocity(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        sigma: torch.Tensor,
        context: ScoredContext,
        drop_text: bool = False,
    ) -> torch.Tensor:
        target_blocks = None
        if self.config.target_attention == "chunked":
            frames = torch.arange(noisy.shape[2], device=noisy.device)
            target_blocks = frames // self.student.config.num_frames_per_block
        return predict_beside_context(
            transformer,
            context.latents,
            context.blocks,
            noisy,
            sigma,
            torch.zeros_like(context.text) if drop_text else context.text,
            context.channels,
            target_blocks,
        )

    def _memory_metrics(self, video: Rollout) -> dict[str, float]:
        """How the student's memory was used; stops a run whose slow memory stays as it was first filled."""
        memory = video.final_memory
        # Summed over processes, which then agree on when to stop and on what a checkpoint holds.
        used = torch.tensor([[memory.num_decisions, memory.num_promotions]], device=video.latents.device)
        decisions, promotions = gather_samples(used).sum(0).tolist()
        self.decisions += decisions
        self.promotions += promotions
        statistics = memory.statistics()
        if memory.config.slow and self.decisions >= self.config.stalled_after and not self.promotions:
            raise TrainingError(
                f"none of {self.decisions} decisions promoted a frame, so the slow memory holds the opening for ever; "
                f"raise memory.tau={memory.config.tau} to about {statistics.get('suggested_tau', 1.0):.3f}."
            )
        ages = memory.num_frames - memory.frame_ids[:, memory.config.sink :]
        return {
            "promotion_rate": promotions / max(1, decisions),
            "oldest_slow_age": float(ages.max()) if ages.numel() else 0.0,
            "suggested_tau": statistics.get("suggested_tau", memory.config.tau),
        }

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        return {} if self.evaluate is None else self.evaluate(self.student)

    def extra_state(self) -> dict[str, Any]:
        return {"decisions": self.decisions, "promotions": self.promotions}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.decisions, self.promotions = int(state["decisions"]), int(state["promotions"])
