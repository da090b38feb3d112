"""What a video is generated from, beside its own past."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vidgen.train.caption_encoder import encode_text


@dataclass(frozen=True)
class Conditions:
    """Text of every chunk and, for models that take them, channels of every latent frame.

    Attributes:
        text: `(batch, prompts, length, text_dim)` embeddings.
        prompt_of_chunk: `(batch, chunks)` int64, which prompt holds in which chunk; chunks beyond the last column keep
            its prompt.
        channels: `(batch, channels, frames, height, width)`, concatenated to the latents as in Wan's image-to-video
            models, or `None`.
    """

    text: torch.Tensor
    prompt_of_chunk: torch.Tensor
    channels: torch.Tensor | None = None

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any], text_encoder: nn.Module | None) -> Conditions:
        """Conditions of a training batch.

        Args:
            batch: either `input_ids` and `attention_mask`, `(batch, length)` or `(batch, prompts, length)`, or
                `prompt_embeds`, `(batch, length, text_dim)` or `(batch, prompts, length, text_dim)`; optionally
                `prompt_of_chunk` and `condition_channels`.
            text_encoder: frozen encoder; needed for `input_ids`.
        """
        if "prompt_embeds" in batch:
            text = batch["prompt_embeds"]
            text = text if text.ndim == 4 else text.unsqueeze(1)
        else:
            input_ids, mask = batch["input_ids"], batch["attention_mask"]
            length = input_ids.shape[-1]
            text = encode_text(text_encoder, input_ids.reshape(-1, length), mask.reshape(-1, length))
            text = text.view(input_ids.shape[0], -1, *text.shape[1:])
        prompts = batch.get("prompt_of_chunk")
        if prompts is None:
            prompts = torch.zeros(text.shape[0], 1, dtype=torch.int64, device=text.device)
        return cls(text, prompts, batch.get("condition_channels"))

    def text_at(self, chunk: int) -> torch.Tensor:
        """`(batch, length, text_dim)`, the prompt of a chunk."""
        prompt = self.prompt_of_chunk[:, min(chunk, self.prompt_of_chunk.shape[1] - 1)]
        return self.text[torch.arange(len(prompt), device=self.text.device), prompt]

    def channels_at(self, frame_ids: torch.Tensor) -> torch.Tensor | None:
        """`(batch, channels, n, height, width)` of frames `(n,)` or `(batch, n)`."""
        return None if self.channels is None else take_frames(self.channels, frame_ids)


def take_frames(video: torch.Tensor, frame_ids: torch.Tensor) -> torch.Tensor:
    """Frames `(n,)` or `(batch, n)` of `(batch, channels, frames, height, width)`."""
    batch_size, channels, _, height, width = video.shape
    index = frame_ids.to(video.device).expand(batch_size, -1)[:, None, :, None, None]
    return video.gather(2, index.expand(-1, channels, -1, height, width))


def predict_beside_context(
    transformer: nn.Module,
    context: torch.Tensor,
    context_blocks: torch.Tensor,
    noisy: torch.Tensor,
    sigma: torch.Tensor,
    text: torch.Tensor,
    channels: torch.Tensor | None,
    target_blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Velocity of noisy frames in one forward beside the clean frames that they follow.

    Args:
        transformer: a `CausalWanTransformer3DModel`.
        context: `(batch, channels, n, height, width)` clean frames.
        context_blocks: `(n,)` block of each for the block-causal mask.
        noisy: `(batch, channels, l, height, width)`.
        sigma: `(batch,)` noise level of the noisy frames.
        text: `(batch, length, text_dim)`.
        channels: condition channels of all n + l frames, or `None`.
        target_blocks: `(l,)` blocks of the noisy frames counted from 0; `None` puts all into one.

    Returns:
        `(batch, channels, l, height, width)`.
    """
    num_context, num_target = context.shape[2], noisy.shape[2]
    if target_blocks is None:
        target_blocks = context_blocks.new_zeros(num_target)
    if num_context:
        target_blocks = target_blocks + context_blocks[-1] + 1
    frame_sigma = torch.cat([sigma.new_zeros(len(sigma), num_context), sigma[:, None].expand(-1, num_target)], 1)
    velocity = predict_velocity(
        transformer,
        torch.cat([context, noisy], dim=2),
        frame_sigma,
        text,
        channels,
        frame_blocks=torch.cat([context_blocks, target_blocks]),
    )
    return velocity[:, :, num_context:]


def predict_velocity(
    transformer: nn.Module,
    sample: torch.Tensor,
    sigma: torch.Tensor | float,
    text: torch.Tensor,
    channels: torch.Tensor | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Velocity `noise - x_0` of a noisy sample, in float32.

    Args:
        transformer: a `CausalWanTransformer3DModel`.
        sample: `(batch, channels, frames, height, width)`.
        sigma: noise level: one number, `(batch,)` or `(batch, frames)`.
        text: `(batch, length, text_dim)`.
        channels: condition channels of these frames, or `None`.
        **kwargs: `kv_memory` or `frame_blocks`.
    """
    timestep = torch.as_tensor(sigma, device=sample.device, dtype=torch.float32) * 1000
    timestep = timestep if timestep.ndim else timestep.expand(sample.shape[0])
    hidden_states = sample if channels is None else torch.cat([sample, channels.to(sample)], dim=1)
    return transformer(hidden_states, timestep, text, **kwargs).sample.float()
