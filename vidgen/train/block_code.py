"""A linear code of pixel blocks: the latent space that a small autoencoder is trained towards."""

from __future__ import annotations

from pathlib import Path

import torch

from vidgen.runtime.checkpoint import load_safetensors, save_safetensors
from vidgen.runtime.errors import CheckpointError, ConfigError


class BlockCode:
    """Principal components of space-time pixel blocks, mixed by a fixed rotation.

    The first frame of a clip is coded as if it stood still for a whole block, every further block covers `temporal`
    frames: the frame layout of `AutoencoderKLWan`. Component i is divided by its standard deviation to the power
    `whitening`. With 0 the latents keep the pixels' metric, in which fine detail drowns in the first bit of noise;
    with 1 detail weighs as much as structure and is as hard to denoise. The rotation gives all channels a similar
    variance, so that a per-channel normalization would not undo that balance.

    Args:
        mean: `(block,)`, block = 3 * temporal * spatial * spatial.
        encoder: `(block, channels)`.
        decoder: `(channels, block)`.
        temporal: frames per block.
        spatial: pixels per block side.
    """

    def __init__(
        self, mean: torch.Tensor, encoder: torch.Tensor, decoder: torch.Tensor, temporal: int, spatial: int
    ) -> None:
        self.mean, self.encoder, self.decoder = mean, encoder, decoder
        self.temporal, self.spatial = temporal, spatial

    @classmethod
    def fit(
        cls,
        pixels: torch.Tensor,
        channels: int,
        temporal: int = 4,
        spatial: int = 8,
        whitening: float = 0.5,
        seed: int = 0,
    ) -> BlockCode:
        """Fits the code to clips `(batch, 3, frames, height, width)` in [-1, 1], frames = temporal * n + 1.

        Its latents of these clips have mean 0 and, over all channels, variance 1.
        """
        if not 0 <= whitening <= 1:
            raise ConfigError(f"whitening={whitening}; it must be in [0, 1].")
        block = 3 * temporal * spatial * spatial
        if not 1 <= channels <= block:
            raise ConfigError(f"channels={channels}; a block of {block} values has 1 to {block} components.")
        blocks = _to_blocks(pixels[:, :, 1:], temporal, spatial).flatten(0, -2)
        mean = blocks.mean(0)
        centered = blocks - mean
        variances, directions = torch.linalg.eigh(centered.T @ centered / len(centered))
        scales = variances.flip(0)[:channels].clamp_min(1e-12).sqrt()
        directions = directions.flip(1)[:, :channels]
        generator = torch.Generator().manual_seed(seed)
        rotation = torch.linalg.qr(torch.randn(channels, channels, generator=generator))[0].to(directions)
        weights = scales**whitening
        size = (scales / weights).square().mean().sqrt()
        encoder = directions / weights @ rotation / size
        decoder = size * rotation.T @ (directions * weights).T
        return cls(mean, encoder.contiguous(), decoder.contiguous(), temporal, spatial)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Latents `(batch, channels, 1 + n, height / s, width / s)` of pixels in [-1, 1].

        Args:
            pixels: `(batch, 3, 1 + temporal * n, height, width)`.
        """
        frames, height, width = pixels.shape[2:]
        if (frames - 1) % self.temporal or height % self.spatial or width % self.spatial:
            raise ValueError(
                f"pixels are {tuple(pixels.shape)}; the code needs {self.temporal} * n + 1 frames and a height and "
                f"width divisible by {self.spatial}."
            )
        still = pixels[:, :, :1].expand(-1, -1, self.temporal - 1, -1, -1)
        blocks = _to_blocks(torch.cat([still, pixels], dim=2), self.temporal, self.spatial)
        return ((blocks - self.mean.to(blocks)) @ self.encoder.to(blocks)).movedim(-1, 1)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The best linear reconstruction, shaped as the input of `encode`, not clamped."""
        blocks = latents.movedim(1, -1) @ self.decoder.to(latents) + self.mean.to(latents)
        batch, steps, rows, columns, _ = blocks.shape
        blocks = blocks.view(batch, steps, rows, columns, 3, self.temporal, self.spatial, self.spatial)
        pixels = blocks.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(
            batch, 3, steps * self.temporal, rows * self.spatial, columns * self.spatial
        )
        first = pixels[:, :, : self.temporal].mean(dim=2, keepdim=True)
        return torch.cat([first, pixels[:, :, self.temporal :]], dim=2)

    def save(self, path: str | Path) -> None:
        save_safetensors(
            {"mean": self.mean, "encoder": self.encoder, "decoder": self.decoder},
            path,
            {"temporal": str(self.temporal), "spatial": str(self.spatial)},
        )

    @classmethod
    def load(cls, path: str | Path) -> BlockCode:
        tensors, metadata = load_safetensors(path)
        missing = {"mean", "encoder", "decoder"} - tensors.keys()
        if missing or not {"temporal", "spatial"} <= metadata.keys():
            raise CheckpointError(f"{path} is not a block code: it lacks {sorted(missing) or 'its block size'}.")
        return cls(**tensors, temporal=int(metadata["temporal"]), spatial=int(metadata["spatial"]))


def _to_blocks(pixels: torch.Tensor, temporal: int, spatial: int) -> torch.Tensor:
    """`(batch, 3, frames, height, width)` to `(batch, frames / t, height / s, width / s, 3 * t * s * s)`."""
    batch, _, frames, height, width = pixels.shape
    blocks = pixels.reshape(
        batch, 3, frames // temporal, temporal, height // spatial, spatial, width // spatial, spatial
    )
    return blocks.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)
