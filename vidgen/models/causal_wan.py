"""Block-causal Wan: the Wan2.1 video transformer that attends backward in time, chunk by chunk.

The architecture is `diffusers.WanTransformer3DModel` ("Wan: Open and Advanced Large-Scale Video Generative Models",
arXiv 2503.20314) parameter for parameter, so its checkpoints load unchanged in both directions. Four things differ:

1. Self-attention is causal over blocks of frames and bidirectional inside a block (arXiv 2412.07772, 2506.08009).
2. Every frame may carry its own timestep (Diffusion Forcing, arXiv 2407.01392).
3. Past frames are read from a [`~vidgen.memory.KVMemory`] that holds *unrotated* keys: the temporal rotary position
   of a frame is its slot in memory, decided when it is read (Context Forcing, arXiv 2602.06028, section 3.3).
4. The forward pass is pure: it returns the new keys and values, and `kv_memory.commit` stores them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import FromOriginalModelMixin, PeftAdapterMixin
from diffusers.models.attention import AttentionMixin, FeedForward
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanRotaryPosEmbed,
    WanTimeTextImageEmbedding,
)
from diffusers.utils import BaseOutput, apply_lora_scale
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from vidgen.memory.kv_memory import KVMemory

RotaryEmbedding = tuple[torch.Tensor, torch.Tensor]
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def apply_rotary_emb(hidden_states: torch.Tensor, rotary_emb: RotaryEmbedding) -> torch.Tensor:
    """Rotate channel pairs of `(batch, tokens, heads, head_dim)` by tables `(1 or batch, tokens, 1, head_dim)`."""
    freqs_cos, freqs_sin = rotary_emb
    real, imaginary = hidden_states.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = freqs_cos[..., 0::2], freqs_sin[..., 1::2]
    rotated = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    return rotated.flatten(-2).type_as(hidden_states)


def frame_mask_mod(frame_mask: torch.Tensor, tokens_per_frame: int) -> MaskMod:
    """Mask rule: a token sees every token of the frames that its own frame sees.

    Args:
        frame_mask: `(query frames, key frames)` bool.
        tokens_per_frame: tokens of one frame after patching.
    """

    def mask_mod(batch, head, query_index, key_index):
        return frame_mask[query_index // tokens_per_frame, key_index // tokens_per_frame]

    return mask_mod


def frame_attention_mask(
    frame_mask: torch.Tensor, tokens_per_frame: int, backend: str | None = None
) -> torch.Tensor | BlockMask | None:
    """Materialize [`frame_mask_mod`] for an attention backend.

    Returns:
        A `BlockMask` for the flex backend on CUDA, else a bool mask `(1, 1, query tokens, key tokens)`; `None` when
        every frame sees every other, because an all-true mask would only disable the fast kernels.
    """
    if bool(frame_mask.all()):
        return None
    query_tokens, key_tokens = (frames * tokens_per_frame for frames in frame_mask.shape)
    mask_mod, device = frame_mask_mod(frame_mask, tokens_per_frame), frame_mask.device
    if backend == "flex" and device.type == "cuda":
        return create_block_mask(mask_mod, None, None, query_tokens, key_tokens, device=device)
    return create_mask(mask_mod, 1, 1, query_tokens, key_tokens, device=device)


def block_causal_frames(frame_blocks: torch.Tensor) -> torch.Tensor:
    """`(frames, frames)` bool: a frame sees the frames of its own and of earlier blocks.

    Args:
        frame_blocks: `(frames,)` int64, the non-decreasing block index of each frame.
    """
    return frame_blocks[:, None] >= frame_blocks


class CausalWanAttnProcessor:
    """Self- and cross-attention of a Wan block; self-attention can also read keys and values of past frames."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | BlockMask | None = None,
        rotary_emb: RotaryEmbedding | None = None,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        is_self_attention = encoder_hidden_states is None
        encoder_hidden_states = hidden_states if is_self_attention else encoder_hidden_states

        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        raw_key = attn.norm_k(attn.to_k(encoder_hidden_states)).unflatten(2, (attn.heads, -1))
        raw_value = attn.to_v(encoder_hidden_states).unflatten(2, (attn.heads, -1))

        key, value = raw_key, raw_value
        if rotary_emb is not None:
            query = apply_rotary_emb(query, rotary_emb)
            key = apply_rotary_emb(key, rotary_emb)
        if past_key_value is not None:
            past_key, past_value = past_key_value
            key = torch.cat([past_key.type_as(key), key], dim=1)
            value = torch.cat([past_value.type_as(value), value], dim=1)

        hidden_states = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=None,
        )
        hidden_states = hidden_states.flatten(2, 3).type_as(query)
        hidden_states = attn.to_out[1](attn.to_out[0](hidden_states))
        return hidden_states, raw_key, raw_value


class CausalWanTransformerBlock(nn.Module):
    """A Wan block whose modulation is per frame and whose self-attention reads past keys and values."""

    def __init__(self, dim: int, ffn_dim: int, num_heads: int, cross_attn_norm: bool = False, eps: float = 1e-6):
        super().__init__()

        # 1. Self-attention
        self.norm1 = FP32LayerNorm(dim, eps, elementwise_affine=False)
        self.attn1 = WanAttention(
            dim=dim, heads=num_heads, dim_head=dim // num_heads, eps=eps, processor=CausalWanAttnProcessor()
        )

        # 2. Cross-attention
        self.attn2 = WanAttention(
            dim=dim,
            heads=num_heads,
            dim_head=dim // num_heads,
            eps=eps,
            cross_attention_dim_head=dim // num_heads,
            processor=CausalWanAttnProcessor(),
        )
        self.norm2 = FP32LayerNorm(dim, eps, elementwise_affine=True) if cross_attn_norm else nn.Identity()

        # 3. Feed-forward
        self.ffn = FeedForward(dim, inner_dim=ffn_dim, activation_fn="gelu-approximate")
        self.norm3 = FP32LayerNorm(dim, eps, elementwise_affine=False)

        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep_proj: torch.Tensor,
        rotary_emb: RotaryEmbedding,
        attention_mask: torch.Tensor | BlockMask | None = None,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # timestep_proj: (batch, modulated_frames, 6, dim); modulated_frames is 1 when all frames share a timestep
        modulation = self.scale_shift_table.unsqueeze(0) + timestep_proj.float()
        shift_msa, scale_msa, gate_msa, c_shift_msa, c_scale_msa, c_gate_msa = modulation.chunk(6, dim=2)
        modulated_frames = modulation.shape[1]

        # 1. Self-attention
        norm_hidden_states = self.norm1(hidden_states.float()).unflatten(1, (modulated_frames, -1))
        norm_hidden_states = (norm_hidden_states * (1 + scale_msa) + shift_msa).flatten(1, 2).type_as(hidden_states)
        attn_output, key, value = self.attn1(
            norm_hidden_states, None, attention_mask, rotary_emb, past_key_value=past_key_value
        )
        attn_output = (attn_output.unflatten(1, (modulated_frames, -1)) * gate_msa).flatten(1, 2)
        hidden_states = (hidden_states.float() + attn_output).type_as(hidden_states)

        # 2. Cross-attention
        norm_hidden_states = self.norm2(hidden_states.float()).type_as(hidden_states)
        attn_output, _, _ = self.attn2(norm_hidden_states, encoder_hidden_states)
        hidden_states = hidden_states + attn_output

        # 3. Feed-forward
        norm_hidden_states = self.norm3(hidden_states.float()).unflatten(1, (modulated_frames, -1))
        norm_hidden_states = (norm_hidden_states * (1 + c_scale_msa) + c_shift_msa).flatten(1, 2)
        ff_output = self.ffn(norm_hidden_states.type_as(hidden_states))
        ff_output = (ff_output.float().unflatten(1, (modulated_frames, -1)) * c_gate_msa).flatten(1, 2)
        hidden_states = (hidden_states.float() + ff_output).type_as(hidden_states)

        return hidden_states, key, value


def precondition(
    output: torch.Tensor, noisy_latents: torch.Tensor, timestep: torch.Tensor, sigma_data: float
) -> torch.Tensor:
    """Velocity from the output of a network whose targets have unit variance at every noise level.

    With `x_s = (1 - s) x_0 + s eps` and `Var(x_s) = (1 - s)^2 sigma_data^2 + s^2`, the best linear guess of the
    velocity `eps - x_0` is `(s - (1 - s) sigma_data^2) / Var(x_s) * x_s`; what is left has variance
    `sigma_data^2 / Var(x_s)`. The output is minus what is left in these units: the clean latents at `s = 1`.

    Args:
        output: `(batch, channels, frames, height, width)`.
        noisy_latents: `x_s`, of the same shape.
        timestep: `(batch, 1 or frames)`, `1000 * s`.
        sigma_data: standard deviation of `x_0`.
    """
    sigma = (timestep.float() / 1000)[:, None, :, None, None]
    variance = (1 - sigma) ** 2 * sigma_data**2 + sigma**2
    guess = (sigma - (1 - sigma) * sigma_data**2) / variance * noisy_latents.float()
    return (guess - sigma_data * variance.rsqrt() * output.float()).type_as(output)


@dataclass
class CausalWanTransformerOutput(BaseOutput):
    """Output of [`CausalWanTransformer3DModel`].

    Args:
        sample: `(batch, channels, frames, height, width)`, the predicted velocity `noise - clean`.
        key_values: per layer the unrotated `(key, value)`, each `(batch, frames, tokens, heads, head_dim)`, or `None`.
    """

    sample: torch.Tensor
    key_values: list[tuple[torch.Tensor, torch.Tensor]] | None = None


class CausalWanTransformer3DModel(
    ModelMixin, ConfigMixin, PeftAdapterMixin, FromOriginalModelMixin, CacheMixin, AttentionMixin
):
    """Block-causal Wan transformer with the parameters of `diffusers.WanTransformer3DModel`.

    Args:
        patch_size: `(time, height, width)` extent of one token in latent cells; the time extent must be 1.
        num_attention_heads: attention heads.
        attention_head_dim: channels of one head.
        in_channels: latent channels in.
        out_channels: latent channels out.
        text_dim: channels of the text embeddings.
        freq_dim: channels of the sinusoidal timestep embedding.
        ffn_dim: hidden channels of the feed-forward layers.
        num_layers: transformer blocks.
        cross_attn_norm: whether cross-attention has its own input norm.
        qk_norm: query/key normalization; Wan only knows `"rms_norm_across_heads"`.
        eps: epsilon of the norms.
        image_dim: must be `None`: image-to-video conditions through the memory, not through CLIP tokens.
        added_kv_proj_dim: must be `None`, as `image_dim`.
        rope_max_seq_len: number of positions in the rotary table.
        pos_embed_seq_len: must be `None`, as `image_dim`.
        num_frames_per_block: latent frames of one chunk, the unit of autoregression.
        causal: `False` turns the default mask off, which is the stock bidirectional Wan.
        sigma_data: standard deviation of the latents, which turns the network's output into the velocity through the
            preconditioning of "Elucidating the Design Space of Diffusion-Based Generative Models" (arXiv 2206.00364,
            section 5), written for flow matching; `None`: the output is the velocity itself, as in every Wan. A narrow
            network needs it: noise fills all `in_channels * patch` numbers of a token, and without it the hidden
            state must carry every one of them from input to output.

    Raises:
        ValueError: for a configuration of the image-conditioned Wan variants or a patch longer than one frame.
    """

    _supports_gradient_checkpointing = True
    _skip_layerwise_casting_patterns = ["patch_embedding", "condition_embedder", "norm"]
    _no_split_modules = ["CausalWanTransformerBlock"]
    _keep_in_fp32_modules = ["rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"]
    _repeated_blocks = ["CausalWanTransformerBlock"]
    # Device hooks move what they are given; a memory must stay the one object that the session owns.
    _skip_keys = ["kv_memory"]

    @register_to_config
    def __init__(
        self,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        num_attention_heads: int = 12,
        attention_head_dim: int = 128,
        in_channels: int = 16,
        out_channels: int = 16,
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 8960,
        num_layers: int = 30,
        cross_attn_norm: bool = True,
        qk_norm: str = "rms_norm_across_heads",
        eps: float = 1e-6,
        image_dim: int | None = None,
        added_kv_proj_dim: int | None = None,
        rope_max_seq_len: int = 1024,
        pos_embed_seq_len: int | None = None,
        num_frames_per_block: int = 3,
        causal: bool = True,
        sigma_data: float | None = None,
    ) -> None:
        super().__init__()
        if sigma_data is not None and not sigma_data > 0:
            raise ValueError(f"sigma_data={sigma_data}; it must be positive, or None for a plain velocity output.")
        if patch_size[0] != 1:
            raise ValueError(
                f"patch_size={tuple(patch_size)}: a causal model needs a temporal patch of 1 latent frame."
            )
        if image_dim is not None or added_kv_proj_dim is not None or pos_embed_seq_len is not None:
            raise ValueError(
                "This is the configuration of an image-conditioned Wan (image_dim, added_kv_proj_dim or "
                "pos_embed_seq_len set). Use a text-to-video checkpoint: images enter through the memory."
            )

        inner_dim = num_attention_heads * attention_head_dim

        # 1. Patch & position embedding
        self.rope = WanRotaryPosEmbed(attention_head_dim, patch_size, rope_max_seq_len)
        self.patch_embedding = nn.Conv3d(in_channels, inner_dim, kernel_size=patch_size, stride=patch_size)

        # 2. Condition embeddings
        self.condition_embedder = WanTimeTextImageEmbedding(
            dim=inner_dim, time_freq_dim=freq_dim, time_proj_dim=inner_dim * 6, text_embed_dim=text_dim
        )

        # 3. Transformer blocks
        self.blocks = nn.ModuleList(
            [
                CausalWanTransformerBlock(inner_dim, ffn_dim, num_attention_heads, cross_attn_norm, eps)
                for _ in range(num_layers)
            ]
        )

        # 4. Output norm & projection
        self.norm_out = FP32LayerNorm(inner_dim, eps, elementwise_affine=False)
        self.proj_out = nn.Linear(inner_dim, out_channels * math.prod(patch_size))
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, inner_dim) / inner_dim**0.5)

        self.gradient_checkpointing = False

    @classmethod
    def from_original_checkpoint(
        cls, path: str | os.PathLike, *args: Any, **kwargs: Any
    ) -> CausalWanTransformer3DModel:
        """Load a `.pt` file of Self-Forcing, CausVid or LongLive, as [`~vidgen.models.convert_wan`] describes."""
        from vidgen.models.convert_wan import from_original_checkpoint

        return from_original_checkpoint(path, *args, **kwargs)

    def tokens_per_frame(self, height: int, width: int) -> int:
        """Tokens of one latent frame of `height` x `width` latent cells."""
        _, patch_height, patch_width = self.config.patch_size
        return (height // patch_height) * (width // patch_width)

    def rotary_embedding(self, frame_positions: torch.Tensor, height: int, width: int) -> RotaryEmbedding:
        """Rotary table entries of frames at given temporal positions.

        Args:
            frame_positions: `(1 or batch, frames)` int64 temporal positions.
            height: token rows.
            width: token columns.

        Returns:
            cos and sin, each `(1 or batch, frames * height * width, 1, head_dim)`.

        Raises:
            ValueError: when a position lies outside the rotary table.
        """
        first, last, table = int(frame_positions.min()), int(frame_positions.max()), self.rope.max_seq_len
        if first < 0 or last >= table:
            raise ValueError(
                f"Frame position {last if last >= table else first} lies outside the rotary table of {table} latent "
                "frames. Use a memory with bounded positions, or generate fewer frames."
            )
        tables = []
        for freqs in (self.rope.freqs_cos, self.rope.freqs_sin):
            time, row, column = freqs.split([self.rope.t_dim, self.rope.h_dim, self.rope.w_dim], dim=1)
            shape = (*frame_positions.shape, height, width, -1)
            time = time[frame_positions][:, :, None, None].expand(shape)
            row = row[:height].view(1, 1, height, 1, -1).expand(shape)
            column = column[:width].view(1, 1, 1, width, -1).expand(shape)
            tables.append(torch.cat([time, row, column], dim=-1).flatten(1, 3).unsqueeze(2))
        return tables[0], tables[1]

    @apply_lora_scale("attention_kwargs")
    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        kv_memory: KVMemory | None = None,
        frame_blocks: torch.Tensor | None = None,
        frame_positions: torch.Tensor | None = None,
        return_key_values: bool = False,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> CausalWanTransformerOutput | tuple:
        """Predict the velocity of a clip, or of the chunk that follows what a memory holds.

        Args:
            hidden_states: `(batch, channels, frames, height, width)` noisy latents.
            timestep: `(batch,)` or `(batch, frames)`, `1000 * sigma`.
            encoder_hidden_states: `(batch, length, text_dim)` text embeddings.
            kv_memory: past frames. All given frames then form one block that sees every readable slot and itself.
            frame_blocks: `(frames,)` block index of each frame, non-decreasing; default `num_frames_per_block` frames
                to a block. Without a memory only.
            frame_positions: `(frames,)` or `(1 or batch, frames)` temporal positions; default 0, 1, 2 … or, with a
                memory, the slots that follow it.
            return_key_values: also return the unrotated keys and values, which `kv_memory.commit` stores.
            return_dict: return a [`CausalWanTransformerOutput`] instead of a tuple.
            attention_kwargs: `{"scale": …}` scales LoRA layers.

        Raises:
            ValueError: when the sizes do not divide into patches or `frame_blocks` is given beside a memory.
        """
        batch_size, _, num_frames, height, width = hidden_states.shape
        _, patch_height, patch_width = self.config.patch_size
        if height % patch_height or width % patch_width:
            raise ValueError(
                f"Latents of {height}x{width} cells do not divide into {patch_height}x{patch_width} patches."
            )
        if kv_memory is not None and frame_blocks is not None:
            raise ValueError(
                "frame_blocks describes a forward without memory; with kv_memory all frames are one block."
            )
        if timestep.shape not in ((batch_size,), (batch_size, num_frames)):
            raise ValueError(
                f"timestep has shape {tuple(timestep.shape)}; allowed: {(batch_size,)} or {(batch_size, num_frames)}."
            )
        if frame_blocks is not None and frame_blocks.shape != (num_frames,):
            raise ValueError(f"frame_blocks has shape {tuple(frame_blocks.shape)}; allowed: {(num_frames,)}.")
        position_shapes = ((num_frames,), (1, num_frames), (batch_size, num_frames))
        if frame_positions is not None and frame_positions.shape not in position_shapes:
            raise ValueError(
                f"frame_positions has shape {tuple(frame_positions.shape)}; "
                f"allowed: {' or '.join(map(str, position_shapes))}."
            )
        if kv_memory is not None and kv_memory.num_slots and kv_memory.frame_ids.shape[0] != batch_size:
            raise ValueError(
                f"The memory holds {kv_memory.frame_ids.shape[0]} videos and hidden_states {batch_size}; "
                "use one memory per batch."
            )
        post_patch_height, post_patch_width = height // patch_height, width // patch_width
        device = hidden_states.device

        # 1. Positions, mask and past keys
        if frame_positions is None:
            if kv_memory is not None:
                frame_positions = kv_memory.query_positions(num_frames).to(device)
            else:
                frame_positions = torch.arange(num_frames, device=device)
        if frame_positions.ndim == 1:
            frame_positions = frame_positions.unsqueeze(0)
        rotary_emb = self.rotary_embedding(frame_positions, post_patch_height, post_patch_width)

        attention_mask = None
        if kv_memory is None:
            if frame_blocks is None and self.config.causal:
                frame_blocks = torch.arange(num_frames, device=device) // self.config.num_frames_per_block
            if frame_blocks is not None:
                attention_mask = frame_attention_mask(
                    block_causal_frames(frame_blocks.to(device)),
                    post_patch_height * post_patch_width,
                    self.blocks[0].attn1.processor._attention_backend,
                )

        def rotate_keys(key: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return apply_rotary_emb(
                key, self.rotary_embedding(positions.to(key.device), post_patch_height, post_patch_width)
            )

        # 2. Patch & condition embedding
        noisy_latents = hidden_states
        hidden_states = self.patch_embedding(hidden_states).flatten(2).transpose(1, 2).contiguous()
        # A frame's timestep is embedded once and broadcast to its tokens inside the blocks.
        timestep = timestep.unsqueeze(1) if timestep.ndim == 1 else timestep
        temb, timestep_proj, encoder_hidden_states, _ = self.condition_embedder(
            timestep.flatten(), encoder_hidden_states, None, timestep_seq_len=timestep.shape[1]
        )
        timestep_proj = timestep_proj.unflatten(2, (6, -1))

        # 3. Transformer blocks
        key_values = []
        for layer, block in enumerate(self.blocks):
            past_key_value = None
            if kv_memory is not None:
                past_key_value = kv_memory.read(layer, num_frames, rotate_keys)
            arguments = (
                hidden_states,
                encoder_hidden_states,
                timestep_proj,
                rotary_emb,
                attention_mask,
                past_key_value,
            )
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states, key, value = self._gradient_checkpointing_func(block, *arguments)
            else:
                hidden_states, key, value = block(*arguments)
            if return_key_values:
                key_values.append((key.unflatten(1, (num_frames, -1)), value.unflatten(1, (num_frames, -1))))

        # 4. Output norm, projection & unpatchify
        shift, scale = (self.scale_shift_table.unsqueeze(0) + temb.unsqueeze(2)).chunk(2, dim=2)
        norm_hidden_states = self.norm_out(hidden_states.float()).unflatten(1, (timestep.shape[1], -1))
        hidden_states = (norm_hidden_states * (1 + scale) + shift).flatten(1, 2).type_as(hidden_states)
        hidden_states = self.proj_out(hidden_states)
        hidden_states = hidden_states.reshape(
            batch_size, num_frames, post_patch_height, post_patch_width, patch_height, patch_width, -1
        )
        # (B, F, h, w, p, q, C) -> (B, C, F, h, p, w, q)
        sample = hidden_states.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)
        if self.config.sigma_data is not None:
            sample = precondition(sample, noisy_latents[:, : sample.shape[1]], timestep, self.config.sigma_data)

        output = CausalWanTransformerOutput(sample=sample, key_values=key_values if return_key_values else None)
        return output if return_dict else output.to_tuple()
