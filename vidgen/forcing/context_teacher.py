"""The context teacher: video continuation given what a slow-fast memory holds, robust to its own errors.

Stage 0 of "Context Forcing: Consistent Autoregressive Video Generation with Long Context" (arXiv 2602.06028).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vidgen.forcing.conditions import Conditions, predict_velocity, take_frames
from vidgen.forcing.diffusion_forcing import shift_sigma
from vidgen.forcing.error_bank import ErrorBank, ErrorBankConfig
from vidgen.runtime.checks import check_finite_fields
from vidgen.runtime.errors import ConfigError
from vidgen.train.method import StepOutput, TrainingMethod
from vidgen.train.processes import gather_samples


@dataclass(frozen=True)
class ContextTeacherConfig:
    """Settings of [`ContextTeacherMethod`].

    Attributes:
        shift: warp of the target's noise level.
        error_probability: share of samples whose context gets errors from the bank; 0 turns error recycling off.
        warmup_steps: optimizer steps that only fill the bank.
        clean_admission: share of residuals of clean-context samples that enter the bank; they are smaller than those
            the model makes in use.
        drop_text_probability: share of samples without text, for classifier-free guidance.
        bank: sizes of the error bank.
    """

    shift: float = 5.0
    error_probability: float = 0.5
    warmup_steps: int = 50
    clean_admission: float = 0.1
    drop_text_probability: float = 0.1
    bank: ErrorBankConfig = field(default_factory=ErrorBankConfig)

    def __post_init__(self) -> None:
        check_finite_fields(self)
        if self.shift <= 0 or self.warmup_steps < 0:
            raise ConfigError(f"shift={self.shift}, warmup_steps={self.warmup_steps}; shift > 0, warmup_steps >= 0.")
        for name in ("error_probability", "clean_admission", "drop_text_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be in [0, 1].")


class ContextTeacherMethod(TrainingMethod):
    """Flow matching of a target block, given clean or drifted context frames at noise level 0.

    Batches hold `latents` `(B, C, F, H, W)` laid out as [`~vidgen.forcing.layouts.Layout`] says, `frame_blocks`
    `(B, F)`, equal in all samples, whose last block is the target, `frame_ids` `(B, F)` when there are
    `condition_channels`, and the text ([`Conditions`]).

    Args:
        teacher: a `CausalWanTransformer3DModel`.
        text_encoder: frozen encoder, or `None` when batches hold embeddings.
        config: noise and error recycling.
        validation: returns one fixed batch for `validate`.
    """

    def __init__(
        self,
        teacher: nn.Module,
        text_encoder: nn.Module | None,
        config: ContextTeacherConfig,
        validation: Callable[[], dict[str, torch.Tensor]],
    ) -> None:
        super().__init__()
        self.teacher = teacher
        self.text_encoder = None if text_encoder is None else text_encoder.requires_grad_(False)
        self.config = config
        self.validation_batch = validation
        self.bank = ErrorBank(config.bank)

    def roles(self) -> dict[str, nn.Module]:
        roles = {"teacher": self.teacher, "text_encoder": self.text_encoder}
        return {name: role for name, role in roles.items() if role is not None}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        config, device = self.config, generator.device
        batch_size = len(batch["latents"])
        warming_up = step < config.warmup_steps

        def chance(probability: float) -> torch.Tensor:
            return torch.rand(batch_size, generator=generator, device=device) < probability

        # The bank lives on the CPU and is drawn from there.
        draws = torch.Generator().manual_seed(int(torch.randint(1 << 62, (), generator=generator, device=device)))
        drifted = chance(config.error_probability if len(self.bank) and not warming_up else 0.0)
        loss, residual, sigma = self._loss(batch, generator, drifted, draws)
        metrics = {"residual_rms": residual.square().mean().sqrt()}

        if config.error_probability:
            admitted = drifted | chance(1.0 if warming_up else config.clean_admission)
            # All processes add the same, so that they hold the same bank and any of them can write the checkpoint.
            residual, sigma = gather_samples(residual), gather_samples(sigma)
            admitted = gather_samples(admitted.float()) > 0
            self.bank.add(residual[admitted], sigma[admitted], torch.Generator().manual_seed(step))
            metrics["bank_entries"] = float(len(self.bank))
        return StepOutput({"teacher": loss}, metrics)

    def _loss(
        self, batch: dict[str, Any], generator: torch.Generator, drifted: torch.Tensor, draws: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss, residual `x0_hat - x0` of the target `(B, C, l, H, W)` and its noise level `(B,)`."""
        latents = batch["latents"].float()  # (B, C, F, H, W)
        frame_blocks = batch["frame_blocks"][0]
        batch_size, device = latents.shape[0], latents.device
        is_target = frame_blocks == frame_blocks[-1]
        num_context = int((~is_target).sum())
        context, target = latents[:, :, :num_context], latents[:, :, num_context:]

        # 1. X~ = X + I e_drift: one stored clip of errors per sample, repeated over the context's frames
        if bool(drifted.any()) and num_context:
            errors = self.bank.sample(batch_size, draws).to(latents)
            errors = errors[:, :, torch.arange(num_context, device=device) % errors.shape[2]]
            context = context + drifted[:, None, None, None, None] * errors

        # 2. x_t = (1 - s) x_0 + s eps with one s per sample;  v = eps - x_0
        sigma = shift_sigma(torch.rand(batch_size, generator=generator, device=device), self.config.shift)
        noise = torch.randn(target.shape, generator=generator, device=device)
        view = sigma[:, None, None, None, None]
        noisy = (1 - view) * target + view * noise
        velocity = noise - target

        # 3. Context at noise level 0, target at s
        conditions = Conditions.from_batch(batch, self.text_encoder)
        keep_text = torch.rand(batch_size, 1, 1, generator=generator, device=device)
        text = conditions.text[:, 0] * (keep_text >= self.config.drop_text_probability)
        channels = conditions.channels
        if channels is not None:
            channels = take_frames(channels, batch["frame_ids"])
        frame_sigma = sigma[:, None] * is_target
        predicted = predict_velocity(
            self.teacher, torch.cat([context, noisy], dim=2), frame_sigma, text, channels, frame_blocks=frame_blocks
        )[:, :, num_context:]
        loss = (predicted - velocity).square().mean()
        residual = (noisy - view * predicted - target).detach()
        return loss, residual, sigma

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Held-out loss with clean context and with context drifted by the bank, under the same noise."""
        batch = self.validation_batch()
        batch_size, device = batch["latents"].shape[0], batch["latents"].device
        measured = {}
        for name, drift in (("validation_loss", False), ("validation_loss_drifted", True)):
            if drift and not len(self.bank):
                continue
            generator = torch.Generator(device=device).manual_seed(0)
            drifted = torch.full((batch_size,), drift, device=device)
            loss, _, _ = self._loss(batch, generator, drifted, torch.Generator().manual_seed(0))
            measured[name] = float(loss)
        return measured

    def extra_state(self) -> dict[str, Any]:
        return self.bank.state_dict()

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.bank.load_state_dict(state)
