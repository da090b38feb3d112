"""Training of a causal video autoencoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vidgen.runtime.errors import ConfigError
from vidgen.train.method import StepOutput, TrainingMethod


@dataclass(frozen=True)
class AutoencoderConfig:
    """Loss of [`AutoencoderMethod`].

    Attributes:
        kl_weight: weight of the Kullback-Leibler term, per latent element.
        edge_weight: weight of the L1 distance of spatial gradients, which keeps thin shapes.
    """

    kl_weight: float = 1e-5
    edge_weight: float = 0.5

    def __post_init__(self) -> None:
        if self.kl_weight < 0 or self.edge_weight < 0:
            raise ConfigError(f"kl_weight={self.kl_weight}, edge_weight={self.edge_weight}; they must be >= 0.")


class AutoencoderMethod(TrainingMethod):
    """Reconstruction of short clips: L1 of pixels and of spatial gradients, plus a small KL term.

    Args:
        vae: an `AutoencoderKLWan`.
        validation: held-out clips, uint8 `(clips, frames, height, width, 3)`.
    """

    def __init__(self, vae: nn.Module, config: AutoencoderConfig, validation: torch.Tensor) -> None:
        super().__init__()
        self.vae = vae
        self.config = config
        self.validation_clips = validation

    def roles(self) -> dict[str, nn.Module]:
        return {"vae": self.vae}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        pixels = to_model_pixels(batch["frames"])
        posterior = self.vae.encode(pixels).latent_dist
        # One latent channel set: mean + std * eps, drawn from the step's generator
        noise = torch.randn(posterior.mean.shape, generator=generator, device=pixels.device)
        reconstruction = self.vae.decode(posterior.mean + posterior.std * noise).sample

        pixel_loss = F.l1_loss(reconstruction, pixels)
        edge_loss = F.l1_loss(reconstruction.diff(dim=-1), pixels.diff(dim=-1)) + F.l1_loss(
            reconstruction.diff(dim=-2), pixels.diff(dim=-2)
        )
        kl_loss = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        loss = pixel_loss + self.config.edge_weight * edge_loss + self.config.kl_weight * kl_loss
        return StepOutput({"vae": loss}, {"pixel_l1": pixel_loss.detach(), "kl": kl_loss.detach()})

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        squared_error = []
        for clip in self.validation_clips.split(4):
            pixels = to_model_pixels(clip.to(self.vae.device))
            reconstruction = self.vae.decode(self.vae.encode(pixels).latent_dist.mode()).sample
            squared_error.append((reconstruction - pixels).square().mean(dim=(1, 2, 3, 4)))
        # Pixels span [-1, 1], hence the peak of 2.
        return {"psnr": float((10 * torch.log10(4 / torch.cat(squared_error))).mean())}


def to_model_pixels(frames: torch.Tensor) -> torch.Tensor:
    """uint8 `(batch, frames, height, width, 3)` to float `(batch, 3, frames, height, width)` in [-1, 1]."""
    return frames.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
