"""Pictures to the latents of a world model and back, through an autoencoder of single frames.

Outside, frames are uint8 RGB; inside, latents are `(z - shift_factor) * scaling_factor`, as diffusers' pipelines have
them.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL

# Frames through the autoencoder at once: enough to be fast, few enough for its widest layer at full scale.
FRAMES_AT_ONCE = 32


@torch.no_grad()
def encode_frames(vae: AutoencoderKL, frames: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Latents of frames.

    Args:
        vae: the autoencoder.
        frames: uint8 `(batch, frames, height, width, 3)`, on the device of the autoencoder or not.
        generator: draws from the posterior, as in training; `None` takes its mode.

    Returns:
        `(batch, channels, frames, height / stride, width / stride)`, float32.
    """
    pixels = frames.flatten(0, 1).permute(0, 3, 1, 2).float() / 127.5 - 1
    latents = []
    for part in pixels.split(FRAMES_AT_ONCE):
        posterior = vae.encode(part.to(vae.device, vae.dtype)).latent_dist
        latents.append(posterior.mode() if generator is None else posterior.sample(generator))
    latents = torch.cat(latents).float().unflatten(0, frames.shape[:2]).transpose(1, 2)
    return (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


@torch.no_grad()
def decode_frames(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """Frames of latents, the inverse of `encode_frames`.

    Args:
        vae: the autoencoder.
        latents: `(batch, channels, frames, height, width)`.

    Returns:
        uint8 `(batch, frames, stride * height, stride * width, 3)`.
    """
    latents = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    parts = latents.transpose(1, 2).flatten(0, 1).to(vae.dtype).split(FRAMES_AT_ONCE)
    pixels = torch.cat([vae.decode(part).sample for part in parts]).float()
    frames = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return frames.permute(0, 2, 3, 1).unflatten(0, (latents.shape[0], latents.shape[2]))


def stride_of(vae: AutoencoderKL) -> int:
    """Pixels per latent cell along each side."""
    return 2 ** (len(vae.config.block_out_channels) - 1)
