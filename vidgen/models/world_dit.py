"""A world model: a diffusion transformer that makes a video frame by frame while somebody steers it.

The network of "Playing with Transformer at 30+ FPS via Next-Frame Diffusion" (NFD, arXiv 2506.01380), which "LIVE:
Long-horizon Interactive Video World Modeling" (arXiv 2602.03747) post-trains: RMSNorm, SwiGLU, one projection for
query, key and value, and AdaLN-Zero whose input is the embedding of the frame's noise level plus the embedding of its
control. A control is a vector per frame (an action, a relative motion) or a map per token (the rays of a camera).

As in [`~vidgen.models.causal_wan`] every frame has its own noise level, attention is causal in frames and full inside
a frame, the past can be read from a [`~vidgen.memory.KVMemory`] of unrotated keys, and the forward pass is pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import AttentionMixin, AttentionModuleMixin, FeedForward
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput
from torch.nn.attention.flex_attention import BlockMask

from vidgen.memory.kv_memory import KVMemory
from vidgen.models.causal_wan import RotaryEmbedding, apply_rotary_emb, frame_attention_mask
from vidgen.runtime.errors import ConfigError, VidgenError


class WorldDiTAttnProcessor:
    """Self-attention over the given frames and, where there is a memory, the past."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: WorldDiTAttention,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | BlockMask | None,
        rotary_emb: RotaryEmbedding,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, raw_key, raw_value = attn.to_qkv(hidden_states).unflatten(2, (3, attn.heads, -1)).unbind(2)

        query = apply_rotary_emb(query, rotary_emb)
        key, value = apply_rotary_emb(raw_key, rotary_emb), raw_value
        if past_key_value is not None:
            past_key, past_value = past_key_value
            key = torch.cat([past_key.type_as(key), key], dim=1)
            value = torch.cat([past_value.type_as(value), value], dim=1)
        if attn.compat_fp16 and not attn.training:
            query, key, value = query.half(), key.half(), value.half()

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
        hidden_states = attn.to_out(hidden_states.flatten(2, 3).type_as(raw_key))
        return hidden_states, raw_key, raw_value


class WorldDiTAttention(nn.Module, AttentionModuleMixin):
    """Multi-head attention with one projection for query, key and value, without biases."""

    _default_processor_cls = WorldDiTAttnProcessor
    _available_processors = [WorldDiTAttnProcessor]
    _supports_qkv_fusion = False  # they are one matrix already

    def __init__(self, dim: int, heads: int, compat_fp16: bool) -> None:
        super().__init__()
        self.heads = heads
        self.compat_fp16 = compat_fp16
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.set_processor(WorldDiTAttnProcessor())

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | BlockMask | None,
        rotary_emb: RotaryEmbedding,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.processor(self, hidden_states, attention_mask, rotary_emb, past_key_value)


class WorldDiTRMSNorm(nn.Module):
    """RMSNorm in float32; `compat_fp16` rounds the normalized values to float16 before they are scaled."""

    def __init__(self, dim: int, eps: float, compat_fp16: bool) -> None:
        super().__init__()
        self.eps = eps
        self.compat_fp16 = compat_fp16
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normalized = torch.rms_norm(hidden_states.float(), self.weight.shape, eps=self.eps).type_as(hidden_states)
        if self.compat_fp16:
            normalized = normalized.half()
        return (normalized * self.weight).type_as(hidden_states)


class WorldDiTBlock(nn.Module):
    """Attention and SwiGLU, each modulated and gated per token (AdaLN-Zero, arXiv 2212.09748)."""

    def __init__(self, dim: int, ffn_dim: int, num_heads: int, eps: float, compat_fp16: bool) -> None:
        super().__init__()
        self.norm1 = WorldDiTRMSNorm(dim, eps, compat_fp16)
        self.attn = WorldDiTAttention(dim, num_heads, compat_fp16)
        self.norm2 = WorldDiTRMSNorm(dim, eps, compat_fp16)
        self.ffn = FeedForward(dim, inner_dim=ffn_dim, activation_fn="swiglu", bias=False)
        self.modulation = nn.Linear(dim, 6 * dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        conditioning: torch.Tensor,
        rotary_emb: RotaryEmbedding,
        attention_mask: torch.Tensor | BlockMask | None = None,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # hidden_states: (batch, frames, tokens, dim); conditioning: (batch, frames or 1, tokens or 1, dim)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.modulation(conditioning).chunk(6, dim=-1)

        # 1. Self-attention
        norm_hidden_states = self.norm1(hidden_states) * (1 + scale_msa) + shift_msa
        attn_output, key, value = self.attn(
            norm_hidden_states.flatten(1, 2), attention_mask, rotary_emb, past_key_value
        )
        hidden_states = hidden_states + gate_msa * attn_output.unflatten(1, hidden_states.shape[1:3])

        # 2. Feed-forward
        norm_hidden_states = self.norm2(hidden_states) * (1 + scale_mlp) + shift_mlp
        hidden_states = hidden_states + gate_mlp * self.ffn(norm_hidden_states)

        return hidden_states, key, value


@dataclass
class WorldDiTOutput(BaseOutput):
    """Output of [`WorldDiT`].

    Args:
        sample: `(batch, channels, frames, height, width)`, the predicted velocity `noise - clean`.
        key_values: per layer the unrotated `(key, value)`, each `(batch, frames, tokens, heads, head_dim)`, or `None`.
    """

    sample: torch.Tensor
    key_values: list[tuple[torch.Tensor, torch.Tensor]] | None = None


class WorldDiT(ModelMixin, ConfigMixin, PeftAdapterMixin, AttentionMixin):
    """Frame-causal diffusion transformer steered by a control per frame.

    Args:
        patch_size: height and width of a token in latent cells; its time extent is 1 frame.
        num_attention_heads: attention heads.
        attention_head_dim: channels of one head.
        in_channels: channels of a frame, in and out.
        ffn_dim: hidden channels of the SwiGLU layers; `None` takes 8/3 of the width, rounded up to a multiple of 256.
        num_layers: transformer blocks.
        control_type: `"map"`: `control_dim` channels for every latent cell, patched like the frame (the six Plücker
            coordinates of a camera's rays, or their octaves); `"vector"`: `control_dim` numbers per frame (an action,
            a relative motion).
        control_dim: channels of the control.
        control_frame: what a control is relative to. `"window"`: the first frame of the window, so every control
            changes when the window slides; `"delta"`: the frame before; `"world"`: a world that is the same in every
            video. A rolling cache needs one of the last two.
        direction_embedding: whether time may run backward, told by `time_direction`; training on reversed clips needs
            it where the controls have no exact inverse.
        window: frames of the training window; no frame position reaches it.
        rope_dims: channels of a head that rotate with time, row and column.
        rope_theta: base of the rotary frequencies.
        freq_dim: channels of the sinusoidal embedding of the noise level.
        eps: epsilon of the norms.
        forcing: the objective these weights were trained with; it decides what context noise they know.
        compat_fp16_norm: rounds like the released LIVE code at inference: normalized values, queries, keys and values
            to float16.

    Raises:
        ConfigError: for rotary dimensions that don't fill a head, or an unknown control type or frame.
    """

    _supports_gradient_checkpointing = True
    _skip_layerwise_casting_patterns = ["patch_embedding", "control_embedding", "time_embedder", "norm"]
    _no_split_modules = ["WorldDiTBlock"]
    _repeated_blocks = ["WorldDiTBlock"]
    # Device hooks move what they are given; a memory must stay the one object that the session owns.
    _skip_keys = ["kv_memory"]

    @register_to_config
    def __init__(
        self,
        patch_size: tuple[int, int] = (2, 2),
        num_attention_heads: int = 24,
        attention_head_dim: int = 64,
        in_channels: int = 16,
        ffn_dim: int | None = None,
        num_layers: int = 18,
        control_type: str = "map",
        control_dim: int = 6,
        control_frame: str = "window",
        direction_embedding: bool = False,
        window: int = 32,
        rope_dims: tuple[int, int, int] = (8, 28, 28),
        rope_theta: float = 256.0,
        freq_dim: int = 256,
        eps: float = 1e-6,
        forcing: str | None = None,
        compat_fp16_norm: bool = False,
    ) -> None:
        super().__init__()
        if sum(rope_dims) != attention_head_dim or any(dim % 2 for dim in rope_dims):
            raise ConfigError(
                f"rope_dims={tuple(rope_dims)}; they must be even and sum to attention_head_dim={attention_head_dim}."
            )
        if control_type not in ("map", "vector"):
            raise ConfigError(f"control_type={control_type!r}; allowed: 'map', 'vector'.")
        if control_frame not in ("window", "delta", "world"):
            raise ConfigError(f"control_frame={control_frame!r}; allowed: 'window', 'delta', 'world'.")
        if window < 1:
            raise ConfigError(f"window={window}; it must be at least 1.")
        dim = num_attention_heads * attention_head_dim
        ffn_dim = ffn_dim or 256 * math.ceil(int(8 * dim / 3) / 256)
        kernel = (1, *patch_size)

        # 1. Patch embedding
        self.patch_embedding = nn.Conv3d(in_channels, dim, kernel_size=kernel, stride=kernel)

        # 2. Conditions: noise level, control, direction of time
        self.time_proj = Timesteps(freq_dim, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time_embedder = TimestepEmbedding(freq_dim, dim)
        if control_type == "map":
            self.control_embedding = nn.Conv3d(control_dim, dim, kernel_size=kernel, stride=kernel)
        else:
            self.control_embedding = TimestepEmbedding(control_dim, dim)
        self.direction_embedder = nn.Embedding(2, dim) if direction_embedding else None

        # 3. Transformer blocks
        self.blocks = nn.ModuleList(
            [WorldDiTBlock(dim, ffn_dim, num_attention_heads, eps, compat_fp16_norm) for _ in range(num_layers)]
        )

        # 4. Output norm & projection
        self.norm_out = nn.LayerNorm(dim, eps, elementwise_affine=False)
        self.modulation_out = nn.Linear(dim, 2 * dim)
        self.proj_out = nn.Linear(dim, in_channels * math.prod(patch_size))

        self.gradient_checkpointing = False
        self._initialize_weights()

    @torch.no_grad()
    def _initialize_weights(self) -> None:
        """Xavier for the layers, small normal embeddings, and zeros where a fresh network must do nothing."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv3d)):
                nn.init.xavier_uniform_(module.weight.flatten(1))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in (self.time_embedder, self.control_embedding):
            if isinstance(module, TimestepEmbedding):
                nn.init.normal_(module.linear_1.weight, std=0.02)
                nn.init.normal_(module.linear_2.weight, std=0.02)
        for module in (*(block.modulation for block in self.blocks), self.modulation_out, self.proj_out):
            nn.init.zeros_(module.weight)
        if self.direction_embedder is not None:
            nn.init.zeros_(self.direction_embedder.weight)

    def tokens_per_frame(self, height: int, width: int) -> int:
        """Tokens of one frame of `height` x `width` latent cells."""
        patch_height, patch_width = self.config.patch_size
        return (height // patch_height) * (width // patch_width)

    def rotary_embedding(
        self, frame_positions: torch.Tensor, height: int, width: int, device: torch.device
    ) -> RotaryEmbedding:
        """Cosines and sines of the tokens of frames at given positions in time.

        Args:
            frame_positions: `(1 or batch, frames)` int64 positions in the window.
            height: token rows.
            width: token columns.
            device: where the tables are needed.

        Returns:
            cos and sin, each `(1 or batch, frames * height * width, 1, head_dim)`.

        Raises:
            VidgenError: when a position lies outside the trained window.
        """
        first, last = int(frame_positions.min()), int(frame_positions.max())
        if first < 0 or last >= self.config.window:
            raise VidgenError(
                f"Frame position {first if first < 0 else last} lies outside the trained window of "
                f"{self.config.window} frames. Use a memory with bounded positions and fewer slots, or fewer frames."
            )
        rows = torch.arange(height, device=device)
        columns = torch.arange(width, device=device)
        shape = (*frame_positions.shape, height, width)
        grids = (
            frame_positions.to(device)[:, :, None, None].expand(shape),
            rows.view(1, 1, height, 1).expand(shape),
            columns.view(1, 1, 1, width).expand(shape),
        )
        angles = []
        for grid, dim in zip(grids, self.config.rope_dims, strict=True):
            exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / max(dim, 1)
            angles.append(grid.unsqueeze(-1) * self.config.rope_theta**-exponent)
        angles = torch.cat(angles, dim=-1).repeat_interleave(2, dim=-1).flatten(1, 3).unsqueeze(2)
        return angles.cos(), angles.sin()

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        controls: torch.Tensor,
        time_direction: torch.Tensor | None = None,
        kv_memory: KVMemory | None = None,
        frame_mask: torch.Tensor | None = None,
        frame_positions: torch.Tensor | None = None,
        return_key_values: bool = False,
        return_dict: bool = True,
    ) -> WorldDiTOutput | tuple:
        """Predict the velocity of a clip, or of the frames that follow what a memory holds.

        Args:
            hidden_states: `(batch, channels, frames, height, width)` noisy latents.
            timestep: `(batch,)` or `(batch, frames)`, `1000 * sigma`; the network sees its integer part.
            controls: `(batch, control_dim, frames, height, width)` for a map, `(batch, frames, control_dim)` for a
                vector.
            time_direction: `(batch,)` int64, 1 where time runs backward; default 0. With `direction_embedding` only.
            kv_memory: past frames; every given frame sees all readable slots.
            frame_mask: `(frames, frames)` bool, which given frame sees which; default: itself and those before.
            frame_positions: `(frames,)` or `(1 or batch, frames)` positions in the window; default 0, 1, 2 … or, with
                a memory, the slots that follow it.
            return_key_values: also return the unrotated keys and values, which `kv_memory.commit` stores.
            return_dict: return a [`WorldDiTOutput`] instead of a tuple.

        Raises:
            VidgenError: when the sizes don't divide into patches, or an argument doesn't fit the frames.
        """
        batch_size, _, num_frames, height, width = hidden_states.shape
        self._check_arguments(hidden_states, timestep, controls, time_direction, kv_memory, frame_mask)
        patch_height, patch_width = self.config.patch_size
        rows, columns = height // patch_height, width // patch_width
        tokens = rows * columns
        device = hidden_states.device

        # 1. Positions, mask and past keys
        if frame_positions is None:
            if kv_memory is not None:
                frame_positions = kv_memory.query_positions(num_frames)
            else:
                frame_positions = torch.arange(num_frames)
        if frame_positions.ndim == 1:
            frame_positions = frame_positions.unsqueeze(0)
        rotary_emb = self.rotary_embedding(frame_positions, rows, columns, device)

        if frame_mask is None:
            frame_mask = torch.ones(num_frames, num_frames, dtype=torch.bool).tril()
        if kv_memory is not None:
            frame_mask = torch.cat([frame_mask.new_ones(num_frames, kv_memory.num_slots), frame_mask], dim=1)
        attention_mask = frame_attention_mask(
            frame_mask.to(device), tokens, self.blocks[0].attn.processor._attention_backend
        )

        def rotate_keys(key: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return apply_rotary_emb(key, self.rotary_embedding(positions, rows, columns, key.device))

        # 2. Patch & condition embedding: (B, C, F, H, W) -> (B, F, tokens, dim)
        hidden_states = self.patch_embedding(hidden_states).flatten(3).permute(0, 2, 3, 1).contiguous()
        timestep = timestep.unsqueeze(1) if timestep.ndim == 1 else timestep
        temb = self.time_proj(timestep.flatten().floor()).to(self.time_embedder.linear_1.weight.dtype)
        temb = self.time_embedder(temb).unflatten(0, timestep.shape).unsqueeze(2)
        controls = controls.to(self.time_embedder.linear_1.weight.dtype)
        if self.config.control_type == "map":
            control_emb = self.control_embedding(controls).flatten(3).permute(0, 2, 3, 1)
        else:
            control_emb = self.control_embedding(controls).unsqueeze(2)
        conditioning = temb + control_emb
        if self.direction_embedder is not None:
            if time_direction is None:
                time_direction = torch.zeros(batch_size, dtype=torch.int64)
            conditioning = conditioning + self.direction_embedder(time_direction.to(device))[:, None, None]
        conditioning = nn.functional.silu(conditioning)

        # 3. Transformer blocks
        key_values = []
        for layer, block in enumerate(self.blocks):
            past_key_value = None
            if kv_memory is not None:
                past_key_value = kv_memory.read(layer, num_frames, rotate_keys)
            arguments = (hidden_states, conditioning, rotary_emb, attention_mask, past_key_value)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states, key, value = self._gradient_checkpointing_func(block, *arguments)
            else:
                hidden_states, key, value = block(*arguments)
            if return_key_values:
                key_values.append((key.unflatten(1, (num_frames, -1)), value.unflatten(1, (num_frames, -1))))

        # 4. Output norm, projection & unpatchify
        shift, scale = self.modulation_out(conditioning).chunk(2, dim=-1)
        hidden_states = self.proj_out(self.norm_out(hidden_states) * (1 + scale) + shift)
        hidden_states = hidden_states.reshape(batch_size, num_frames, rows, columns, -1, patch_height, patch_width)
        # (B, F, h, w, C, p, q) -> (B, C, F, h, p, w, q)
        sample = hidden_states.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)

        output = WorldDiTOutput(sample=sample, key_values=key_values if return_key_values else None)
        return output if return_dict else output.to_tuple()

    def _check_arguments(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        controls: torch.Tensor,
        time_direction: torch.Tensor | None,
        kv_memory: KVMemory | None,
        frame_mask: torch.Tensor | None,
    ) -> None:
        batch_size, _, num_frames, height, width = hidden_states.shape
        patch_height, patch_width = self.config.patch_size
        if height % patch_height or width % patch_width:
            raise VidgenError(
                f"Latents of {height}x{width} cells do not divide into {patch_height}x{patch_width} patches; "
                f"{patch_height * (height // patch_height)}x{patch_width * (width // patch_width)} do."
            )
        if timestep.shape not in ((batch_size,), (batch_size, num_frames)):
            raise VidgenError(
                f"timestep has shape {tuple(timestep.shape)}; allowed: {(batch_size,)} or {(batch_size, num_frames)}."
            )
        if self.config.control_type == "map":
            control_shape = (batch_size, self.config.control_dim, num_frames, height, width)
        else:
            control_shape = (batch_size, num_frames, self.config.control_dim)
        if controls.shape != control_shape:
            raise VidgenError(
                f"controls have shape {tuple(controls.shape)}; this model takes a {self.config.control_type} per "
                f"frame: {control_shape}."
            )
        if time_direction is not None and self.direction_embedder is None:
            raise VidgenError("time_direction is given, but this model has no direction_embedding.")
        if frame_mask is not None and frame_mask.shape != (num_frames, num_frames):
            raise VidgenError(f"frame_mask has shape {tuple(frame_mask.shape)}; allowed: {(num_frames, num_frames)}.")
        if kv_memory is not None and kv_memory.num_slots and kv_memory.frame_ids.shape[0] != batch_size:
            raise VidgenError(
                f"The memory holds {kv_memory.frame_ids.shape[0]} videos and hidden_states {batch_size}; "
                "use one memory per batch."
            )
