"""Few-step student by regression onto its teacher's probability-flow trajectories, given the same memory.

The initialization of CausVid ("From Slow Bidirectional to Fast Autoregressive Video Diffusion Models",
arXiv 2412.07772, section 4.3), used here as the whole distillation: the teacher integrates the flow of one chunk in
many guided steps; the student learns to name the end point from each of its own few noise levels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vidgen.forcing.conditions import predict_velocity
from vidgen.forcing.diffusion_forcing import shift_sigma
from vidgen.memory import SlowFastMemory, SlowFastMemoryConfig
from vidgen.runtime.errors import ConfigError
from vidgen.train.caption_encoder import encode_text
from vidgen.train.method import StepOutput, TrainingMethod


@dataclass(frozen=True)
class ODEDistillationConfig:
    """Settings of [`ODEDistillationMethod`].

    Attributes:
        student_steps: noise levels of the student.
        teacher_steps: Euler steps of the teacher; a multiple of `student_steps`, whose levels it passes through.
        guidance_scale: classifier-free guidance of the teacher, baked into the student; 1 is none.
        shift: warp of the noise levels, as in the student's scheduler.
        renoise_probability: share of inputs that are the end point with fresh noise, as the sampler makes them, rather
            than a point of the teacher's trajectory.
        context_noise: largest standard deviation of an error added to the past, so that the student tolerates its own.
        noises_per_past: chunks that are generated after each past of a batch; reading the past costs as much as
            several steps.
    """

    student_steps: int = 4
    teacher_steps: int = 12
    guidance_scale: float = 2.0
    shift: float = 3.0
    renoise_probability: float = 0.5
    context_noise: float = 0.1
    noises_per_past: int = 1

    def __post_init__(self) -> None:
        if self.student_steps < 1 or self.teacher_steps % self.student_steps:
            raise ConfigError(
                f"teacher_steps={self.teacher_steps} is no multiple of student_steps={self.student_steps}."
            )
        if self.guidance_scale < 1 or self.shift <= 0 or self.context_noise < 0:
            raise ConfigError("guidance_scale must be >= 1, shift > 0 and context_noise >= 0.")
        if self.noises_per_past < 1:
            raise ConfigError(f"noises_per_past={self.noises_per_past}; at least 1 is needed.")
        if not 0 <= self.renoise_probability <= 1:
            raise ConfigError(f"renoise_probability={self.renoise_probability}; it must be in [0, 1].")


class ODEDistillationMethod(TrainingMethod):
    """Regress the end of the teacher's guided flow from the student's noise levels.

    Args:
        student: the transformer that is trained, initialized from the teacher.
        teacher: frozen transformer.
        text_encoder: frozen encoder of the captions.
        memory: sizes of the slow-fast memory both read.
        config: steps and guidance.
        validation: returns one fixed batch for `validate`.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        text_encoder: nn.Module,
        memory: SlowFastMemoryConfig,
        config: ODEDistillationConfig,
        validation: Callable[[], dict[str, torch.Tensor]],
    ) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher.requires_grad_(False)
        self.text_encoder = text_encoder.requires_grad_(False)
        self.memory_config = memory
        self.config = config
        self.validation_batch = validation
        # sigma_0 = 1 > ... > sigma_T = 0
        self.sigmas = shift_sigma(torch.linspace(1, 0, config.teacher_steps + 1), config.shift).tolist()

    def roles(self) -> dict[str, nn.Module]:
        return {"student": self.student, "teacher": self.teacher, "text_encoder": self.text_encoder}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        loss = self._loss(batch, generator)
        return StepOutput({"student": loss})

    def _loss(self, batch: dict[str, Any], generator: torch.Generator) -> torch.Tensor:
        latents = batch["latents"].float()  # (B, C, F, H, W)
        frame_blocks = batch["frame_blocks"][0]
        device = latents.device

        # 1. The chunk to generate, and its past: the layout's frames before it
        num_blocks = int(frame_blocks[-1]) + 1
        target_block = num_blocks - 1
        if not bool(batch["is_slow"].any()):
            target_block = int(torch.randint(0, num_blocks, (), generator=generator, device=device))
        past = latents[:, :, frame_blocks < target_block]
        error = torch.randn(past.shape, generator=generator, device=device)
        scale = torch.rand(past.shape[0], 1, 1, 1, 1, generator=generator, device=device) * self.config.context_noise
        past = past + scale * error
        past_blocks = frame_blocks[frame_blocks < target_block]

        text = encode_text(self.text_encoder, batch["input_ids"], batch["attention_mask"])
        embeddings = text.repeat_interleave(self.config.noises_per_past, 0)
        no_text = torch.zeros_like(embeddings)

        # 2. x_sigma of the teacher's guided flow, kept at the student's levels
        _, channels, _, height, width = latents.shape
        shape = (len(embeddings), channels, int((frame_blocks == target_block).sum()), height, width)
        noise = torch.randn(shape, generator=generator, device=device)
        with torch.no_grad():
            conditional = self._memory(self.teacher, past, past_blocks, text)
            unconditional = self._memory(self.teacher, past, past_blocks, torch.zeros_like(text))
            trajectory, sample = [], noise
            stride = self.config.teacher_steps // self.config.student_steps
            for index, (sigma, next_sigma) in enumerate(zip(self.sigmas[:-1], self.sigmas[1:], strict=True)):
                if index % stride == 0:
                    trajectory.append((sigma, sample))
                velocity = predict_velocity(self.teacher, sample, sigma, embeddings, None, kv_memory=conditional)
                if self.config.guidance_scale > 1:
                    free = predict_velocity(self.teacher, sample, sigma, no_text, None, kv_memory=unconditional)
                    velocity = free + self.config.guidance_scale * (velocity - free)
                sample = sample + (next_sigma - sigma) * velocity
            clean = sample
            student_memory = self._memory(self.student, past, past_blocks, text)

        # 3. x_0 = x_sigma - sigma v from each level
        loss = torch.zeros((), device=device)
        for sigma, point in trajectory:
            fresh = torch.randn(clean.shape, generator=generator, device=device)
            renoise = torch.rand(clean.shape[0], 1, 1, 1, 1, generator=generator, device=device)
            if sigma < 1:
                point = torch.where(
                    renoise < self.config.renoise_probability, (1 - sigma) * clean + sigma * fresh, point
                )
            velocity = predict_velocity(self.student, point, sigma, embeddings, None, kv_memory=student_memory)
            predicted = point - sigma * velocity
            loss = loss + (predicted - clean).square().mean() / len(trajectory)
        return loss

    def _memory(
        self, transformer: nn.Module, past: torch.Tensor, past_blocks: torch.Tensor, embeddings: torch.Tensor
    ) -> SlowFastMemory:
        """A memory filled by one clean forward over the past frames in their slots, for every noise of each past."""
        memory = SlowFastMemory(self.memory_config, num_frames_per_block=transformer.config.num_frames_per_block)
        if past.shape[2]:
            timestep = torch.zeros(past.shape[0], device=past.device)
            output = transformer(past, timestep, embeddings, frame_blocks=past_blocks, return_key_values=True)
            count = self.config.noises_per_past
            memory.commit([tuple(each.repeat_interleave(count, 0) for each in pair) for pair in output.key_values])
        return memory

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        generator = torch.Generator(device=self.student.device).manual_seed(0)
        return {"validation_loss": float(self._loss(self.validation_batch(), generator))}
