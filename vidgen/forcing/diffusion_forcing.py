"""Diffusion Forcing over slow-fast layouts.

"Diffusion Forcing: Next-token Prediction Meets Full-Sequence Diffusion" (arXiv 2407.01392): every block of a sequence
gets its own noise level, so one forward trains the denoising of each block under every state of its past. Here the
sequence is a slow-fast layout, and half of the time the past up to a random block is clean or nearly so, which is what
generation shows the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vidgen.runtime.checks import check_finite_fields
from vidgen.runtime.errors import ConfigError
from vidgen.train.caption_encoder import encode_text
from vidgen.train.method import StepOutput, TrainingMethod


@dataclass(frozen=True)
class DiffusionForcingConfig:
    """Noise of [`DiffusionForcingMethod`].

    Attributes:
        shift: warps uniform noise levels toward more noise: sigma = shift * u / (1 + (shift - 1) * u).
        clean_past_probability: share of sequences whose blocks before a random one are (almost) clean.
        past_noise: largest sigma of such a past; half of these pasts have none at all.
        drop_text_probability: share of sequences without text, for classifier-free guidance.
        slow_weight: loss weight of slow frames, which stand alone and matter as context rather than as target.
    """

    shift: float = 3.0
    clean_past_probability: float = 0.6
    past_noise: float = 0.2
    drop_text_probability: float = 0.1
    slow_weight: float = 0.25

    def __post_init__(self) -> None:
        check_finite_fields(self)
        if self.shift <= 0:
            raise ConfigError(f"shift={self.shift}; it must be positive.")
        for field in ("clean_past_probability", "past_noise", "drop_text_probability", "slow_weight"):
            if not 0 <= getattr(self, field) <= 1:
                raise ConfigError(f"{field}={getattr(self, field)}; it must be in [0, 1].")


def shift_sigma(uniform: torch.Tensor, shift: float) -> torch.Tensor:
    """sigma = shift * u / (1 + (shift - 1) * u)."""
    return shift * uniform / (1 + (shift - 1) * uniform)


class DiffusionForcingMethod(TrainingMethod):
    """Flow matching with one noise level per block.

    Batches hold `latents` `(batch, channels, frames, height, width)`, `input_ids`, `attention_mask`, `frame_blocks`,
    `is_slow`, `matches_caption` `(batch, frames)` and, where some cells matter more, `loss_weight`
    `(batch, frames, height, width)`.

    Args:
        transformer: a `CausalWanTransformer3DModel`.
        text_encoder: frozen encoder of the captions.
        config: noise and weights.
        validation: returns one fixed batch for `validate`.
    """

    def __init__(
        self,
        transformer: nn.Module,
        text_encoder: nn.Module,
        config: DiffusionForcingConfig,
        validation: Callable[[], dict[str, torch.Tensor]],
    ) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder.requires_grad_(False)
        self.config = config
        self.validation_batch = validation

    def roles(self) -> dict[str, nn.Module]:
        return {"transformer": self.transformer, "text_encoder": self.text_encoder}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        loss, target_loss = self._losses(batch, generator)
        return StepOutput({"transformer": loss}, {"target_mse": target_loss})

    def _losses(self, batch: dict[str, Any], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        latents = batch["latents"].float()  # (B, C, F, H, W)
        batch_size = latents.shape[0]
        device = latents.device
        # All samples of a batch share one layout kind, hence one mask.
        frame_blocks = batch["frame_blocks"][0]
        num_blocks = int(frame_blocks[-1]) + 1

        # 1. One noise level per block; blocks before `first_noisy` may be (almost) clean
        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, device=device)

        sigma = shift_sigma(uniform(batch_size, num_blocks), self.config.shift)
        first_noisy = torch.randint(0, num_blocks, (batch_size, 1), generator=generator, device=device)
        past_sigma = uniform(batch_size, 1) * self.config.past_noise * (uniform(batch_size, 1) < 0.5)
        is_past = torch.arange(num_blocks, device=device) < first_noisy
        is_past &= uniform(batch_size, 1) < self.config.clean_past_probability
        sigma = torch.where(is_past, past_sigma, sigma)[:, frame_blocks]  # (B, F)

        # 2. x_t = (1 - sigma) x_0 + sigma eps
        noise = torch.randn(latents.shape, generator=generator, device=device)
        sigma_view = sigma[:, None, :, None, None]
        noisy_latents = (1 - sigma_view) * latents + sigma_view * noise

        # 3. Text, dropped for some samples
        embeddings = encode_text(self.text_encoder, batch["input_ids"], batch["attention_mask"])
        keep_text = uniform(batch_size, 1, 1) >= self.config.drop_text_probability
        embeddings = embeddings * keep_text

        arguments = {
            "hidden_states": noisy_latents,
            "timestep": sigma * 1000,
            "encoder_hidden_states": embeddings,
            "frame_blocks": frame_blocks,
        }
        velocity = self._target(noise - latents, arguments)
        predicted = self.transformer(**arguments).sample

        # 4. Clean frames have nothing to predict; frames the caption does not describe would teach it wrong motion
        error = (predicted.float() - velocity).square().mean(dim=1)  # (B, F, H, W)
        if "loss_weight" in batch:
            error = error * batch["loss_weight"]
        error = error.mean(dim=(2, 3))
        weight = torch.where(batch["is_slow"], self.config.slow_weight, 1.0)
        weight = weight * ~is_past[:, frame_blocks] * batch["matches_caption"]
        target = (frame_blocks == num_blocks - 1).float().expand_as(error)
        loss = (error * weight).sum() / weight.sum().clamp(min=1)
        return loss, (error * target).sum().detach() / target.sum()

    def _target(self, velocity: torch.Tensor, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the transformer should predict from `arguments`; `velocity` is that of the data."""
        return velocity

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        batch = self.validation_batch()
        generator = torch.Generator(device=self.transformer.device).manual_seed(0)
        loss, target_loss = self._losses(batch, generator)
        return {"validation_loss": float(loss), "validation_target_mse": float(target_loss)}
