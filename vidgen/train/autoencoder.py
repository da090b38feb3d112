"""Training of autoencoders, of video and of single frames, towards a linear code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vidgen.runtime.checks import check_finite_fields
from vidgen.runtime.errors import ConfigError
from vidgen.train.block_code import BlockCode
from vidgen.train.method import StepOutput, TrainingMethod


@dataclass(frozen=True)
class AutoencoderConfig:
    """Losses of [`AutoencoderMethod`].

    Attributes:
        edge_weight: weight of the L1 distance of spatial gradients, which keeps thin shapes.
        latent_noise: standard deviation of the noise added to the code before decoding (the code's own is about 1), so
            that small errors of the encoder and of a generator stay small in the picture.
    """

    edge_weight: float = 0.5
    latent_noise: float = 0.05

    def __post_init__(self) -> None:
        check_finite_fields(self)
        if self.edge_weight < 0 or self.latent_noise < 0:
            raise ConfigError(f"edge_weight={self.edge_weight}, latent_noise={self.latent_noise}; they must be >= 0.")


class AutoencoderMethod(TrainingMethod):
    """Encoder and decoder learn towards a given linear code, side by side.

    An autoencoder that has to find its own latent space spends most of a short training on that; here the encoder
    regresses the code and the decoder inverts it, and a generator can be trained on the code at the same time.

    Args:
        vae: an `AutoencoderKLWan` with the strides and channels of the code.
        code: the latent space.
        validation: held-out clips, uint8 `(clips, frames, height, width, 3)`.
    """

    def __init__(self, vae: nn.Module, code: BlockCode, config: AutoencoderConfig, validation: torch.Tensor) -> None:
        super().__init__()
        given = self._layout(vae)
        wanted = (code.decoder.shape[0], code.temporal, code.spatial)
        if given != wanted:
            raise ConfigError(
                f"The autoencoder has (channels, stride in time, stride in space) = {given}, the code {wanted}."
            )
        self.vae = vae
        self.code = code
        self.config = config
        self.validation_clips = validation

    def _layout(self, vae: nn.Module) -> tuple[int, int, int]:
        """(channels, stride in time, stride in space)"""
        return vae.config.z_dim, vae.config.scale_factor_temporal, vae.config.scale_factor_spatial

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.vae.encode(pixels).latent_dist.mean

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(latents).sample

    def roles(self) -> dict[str, nn.Module]:
        return {"vae": self.vae}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        pixels = to_model_pixels(batch["frames"])
        latents = self.code.encode(pixels)
        encoder_loss = F.l1_loss(self._encode(pixels), latents)

        noise = torch.randn(latents.shape, generator=generator, device=latents.device)
        reconstruction = self._decode(latents + self.config.latent_noise * noise)
        pixel_loss = F.l1_loss(reconstruction, pixels)
        edge_loss = F.l1_loss(reconstruction.diff(dim=-1), pixels.diff(dim=-1)) + F.l1_loss(
            reconstruction.diff(dim=-2), pixels.diff(dim=-2)
        )
        loss = encoder_loss + pixel_loss + self.config.edge_weight * edge_loss
        return StepOutput({"vae": loss}, {"pixel_l1": pixel_loss.detach(), "code_l1": encoder_loss.detach()})

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean PSNR of the round trip, of decoding the exact code, and of the code's own linear reconstruction."""
        psnr: dict[str, list[torch.Tensor]] = {"psnr": [], "psnr_decoder": [], "psnr_linear": []}
        for clip in self.validation_clips.split(4):
            pixels = to_model_pixels(clip.to(self.vae.device))
            latents = self.code.encode(pixels)
            reconstructions = {
                "psnr": self._decode(self._encode(pixels)),
                "psnr_decoder": self._decode(latents),
                "psnr_linear": self.code.decode(latents),
            }
            for name, reconstruction in reconstructions.items():
                error = (reconstruction - pixels).square().mean(dim=(1, 2, 3, 4))
                # Pixels span [-1, 1], hence the peak of 2.
                psnr[name].append(10 * torch.log10(4 / error))
        return {name: float(torch.cat(values).mean()) for name, values in psnr.items()}


class FrameAutoencoderMethod(AutoencoderMethod):
    """The same for an autoencoder of single frames.

    Args:
        vae: an `AutoencoderKL` with the stride and channels of the code.
        code: the latent space, of blocks that last 1 frame.
        validation: held-out clips, uint8 `(clips, frames, height, width, 3)`.
    """

    def _layout(self, vae: nn.Module) -> tuple[int, int, int]:
        return vae.config.latent_channels, 1, 2 ** (len(vae.config.block_out_channels) - 1)

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        frames = pixels.transpose(1, 2)  # (B, T, 3, H, W)
        return self.vae.encode(frames.flatten(0, 1)).latent_dist.mean.unflatten(0, frames.shape[:2]).transpose(1, 2)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        frames = latents.transpose(1, 2)
        return self.vae.decode(frames.flatten(0, 1)).sample.unflatten(0, frames.shape[:2]).transpose(1, 2)


def to_model_pixels(frames: torch.Tensor) -> torch.Tensor:
    """uint8 `(batch, frames, height, width, 3)` to float `(batch, 3, frames, height, width)` in [-1, 1]."""
    return frames.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
