"""Masked diffusion language models: one transformer; LLaDA, Dream, SDAR and the tiny models are configurations of it.

It predicts every masked token from all others (`block_size=None`; LLaDA, arXiv 2502.09992; Dream, arXiv 2508.15487),
or from its own block and the blocks before (SDAR, arXiv 2510.06303; BD3-LM, arXiv 2503.09573). Parameter names are
those of Llama and Qwen checkpoints. A forward is pure: it returns the new keys and values and stores nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from vidgen.language.dllm.generation import DLLMGenerationConfig, DLLMGenerationMixin
from vidgen.language.dllm.rcd import ResidualContextConfig, inject_residual, residual_context
from vidgen.runtime.attention import resolve_attention_backend
from vidgen.runtime.checks import check_whole
from vidgen.runtime.errors import ConfigError

KeyValues = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class MaskedDiffusionConfig(PreTrainedConfig):
    """Shape of a masked diffusion language model.

    Args:
        mask_token_id: the token that stands where one is to be predicted; it has a row in the embedding table.
        block_size: tokens per block of a model that sees its own block and those before; None = it sees everything.
        logits_shift: 1 where the model was trained to predict token i at position i - 1 (Dream), else 0. Its `forward`
            returns aligned logits either way.
        position_embedding: `"rope"`, or `"learned"` vectors that are added to the token embeddings.
        attention_bias: queries, keys and values have biases (Qwen2).
        qk_norm: queries and keys are normalized per head (Qwen3).
    """

    model_type = "masked_diffusion"

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 4096
    position_embedding: str = "rope"
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    mask_token_id: int | None = None
    block_size: int | None = None
    logits_shift: int = 0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs) -> None:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        check_whole(1, max_position_embeddings=self.max_position_embeddings, **{n: getattr(self, n) for n in names})
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self._check_shape()
        super().__post_init__(**kwargs)

    def _check_shape(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.position_embedding not in ("rope", "learned"):
            raise ConfigError(f"position_embedding={self.position_embedding!r}; allowed: rope, learned")
        if self.logits_shift not in (0, 1):
            raise ConfigError(f"logits_shift={self.logits_shift}; allowed: 0, 1")
        if self.block_size is not None and self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size}; allowed: 1 or more, or null")
        if self.block_size is not None and self.logits_shift:
            raise ConfigError("logits_shift=1 with block_size: a block's first token would stand in the block before")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask_token_id={self.mask_token_id} is not in the vocabulary of {self.vocab_size}")


@dataclass
class MaskedDiffusionOutput(ModelOutput):
    """What a forward gives.

    Args:
        logits: `(batch, positions, vocab)`; position i predicts token i, whatever `logits_shift`.
        key_values: per layer the keys and values `(batch, length, kv_heads, head_dim)` of the tokens given; keys are
            rotated to their positions.
    """

    logits: torch.Tensor | None = None
    key_values: KeyValues | None = None


def block_visibility(query_positions: torch.Tensor, key_positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Who sees whom in block diffusion: bool `(batch, queries, keys)` from positions `(batch, n)`."""
    return query_positions[:, :, None] // block_size >= key_positions[:, None, :] // block_size


def noisy_clean_visibility(positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Who sees whom in the training layout [noisy ‖ clean] of block diffusion (BD3-LM, section 3.2).

    A noisy token sees its own noisy block and the clean blocks before; a clean token sees clean blocks up to its own.

    Args:
        positions: `(batch, length)` of one half.
        block_size: tokens per block.

    Returns:
        bool `(batch, 2 * length, 2 * length)`.
    """
    query, key = positions[:, :, None] // block_size, positions[:, None, :] // block_size
    noisy = torch.cat([query == key, query > key], dim=2)
    clean = torch.cat([torch.zeros_like(query == key), query >= key], dim=2)
    return torch.cat([noisy, clean], dim=1)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(hidden_states.float(), (hidden_states.shape[-1],), eps=self.eps)
        return self.weight * normed.to(hidden_states.dtype)


def _rotary(position_ids: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `(batch, length, 1, head_dim)` in float32."""
    powers = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32) / head_dim
    angles = position_ids[..., None].float() / theta**powers
    angles = torch.cat([angles, angles], dim=-1)[:, :, None]
    return angles.cos(), angles.sin()


def _rotate(states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotary
    first, second = states.float().chunk(2, dim=-1)
    return (states.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(states.dtype)


class MaskedDiffusionAttention(nn.Module):
    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm
        self.backend: AttentionBackendName | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        visible: torch.Tensor | None,
        past: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        query = self.q_proj(hidden_states).unflatten(-1, (self.heads, self.head_dim))  # (batch, length, heads, dim)
        key = self.k_proj(hidden_states).unflatten(-1, (self.kv_heads, self.head_dim))
        value = self.v_proj(hidden_states).unflatten(-1, (self.kv_heads, self.head_dim))
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotary is not None:
            query, key = _rotate(query, rotary), _rotate(key, rotary)
        new = (key, value)
        if past is not None:
            key, value = (torch.cat([old, fresh], dim=1) for old, fresh in zip(past, new, strict=True))
        hidden_states = dispatch_attention_fn(
            query, key, value, attn_mask=visible, enable_gqa=self.heads != self.kv_heads, backend=self.backend
        )
        return self.o_proj(hidden_states.flatten(2)), new


class MaskedDiffusionMLP(nn.Module):
    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class MaskedDiffusionLayer(GradientCheckpointingLayer):
    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MaskedDiffusionAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MaskedDiffusionMLP(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        visible: torch.Tensor | None,
        past: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        attended, new = self.self_attn(self.input_layernorm(hidden_states), rotary, visible, past)
        hidden_states = hidden_states + attended
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states, new


class MaskedDiffusionDecoder(nn.Module):
    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(MaskedDiffusionLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MaskedDiffusionLM(PreTrainedModel, DLLMGenerationMixin):
    """A masked diffusion language model; `generate` fills in masks, see `DLLMGenerationMixin`."""

    config_class = MaskedDiffusionConfig
    generation_config_class = DLLMGenerationConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MaskedDiffusionLayer"]
    _repeated_blocks = ["MaskedDiffusionLayer"]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__(config)
        self.model = MaskedDiffusionDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_attention_backend(self, name: str) -> None:
        """Chooses the attention kernel by a name of `vidgen.runtime.attention`."""
        backend = AttentionBackendName(resolve_attention_backend(name, self.device, self.dtype))
        for layer in self.model.layers:
            layer.self_attn.backend = backend

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: KeyValues | None = None,
        inputs_embeds: torch.Tensor | None = None,
        residual_logits: torch.Tensor | None = None,
        residual_config: ResidualContextConfig | None = None,
        logits_positions: slice | None = None,
    ) -> MaskedDiffusionOutput:
        """Predicts all tokens at once.

        Args:
            input_ids: `(batch, length)`; or `inputs_embeds`, `(batch, length, hidden_size)`.
            attention_mask: bool or 0/1. `(batch, keys)` says which keys exist, those of `past_key_values` first;
                `(batch, length, keys)` says who sees whom and replaces the model's own rule. None = all keys exist.
            position_ids: `(batch, length)`. Default: they count the keys that exist.
            past_key_values: keys and values of other tokens, which all tokens given here see. They may stand anywhere.
            residual_logits: `(batch, n, vocab)` of the first n positions: their residuals are mixed into the
                embeddings of masked ones. Training uses this; it needs `input_ids`.
            residual_config: how; default `ResidualContextConfig()`.
            logits_positions: positions whose logits are wanted; None = all.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.model.embed_tokens(input_ids)
        if residual_logits is not None:
            n = residual_logits.shape[1]
            masked = input_ids[:, :n] == self.config.mask_token_id
            table = self.model.embed_tokens.weight
            residual_config = residual_config or ResidualContextConfig()
            delta, alpha = residual_context(residual_logits, table, self.config.mask_token_id, residual_config)
            mixed = inject_residual(inputs_embeds[:, :n], masked, delta, alpha)
            inputs_embeds = torch.cat([mixed, inputs_embeds[:, n:]], dim=1)

        batch, length = inputs_embeds.shape[:2]
        past_length = 0 if past_key_values is None else past_key_values[0][0].shape[1]
        if position_ids is None:
            if attention_mask is not None and attention_mask.ndim == 2:
                position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, past_length:]
            else:
                position_ids = torch.arange(past_length, past_length + length, device=inputs_embeds.device)[None]
                position_ids = position_ids.expand(batch, -1)
        visible = self._visible(attention_mask, position_ids, past_length)

        # 1. positions
        rotary, hidden_states = None, inputs_embeds
        if self.config.position_embedding == "learned":
            hidden_states = hidden_states + self.model.embed_positions(position_ids)
        else:
            rotary = _rotary(position_ids, self.config.head_dim, self.config.rope_theta)

        # 2. transformer
        key_values = []
        for index, layer in enumerate(self.model.layers):
            past = None if past_key_values is None else past_key_values[index]
            hidden_states, new = layer(hidden_states, rotary, visible, past)
            key_values.append(new)

        # 3. head, on the positions that are wanted
        if logits_positions is not None or self.config.logits_shift:
            rows = torch.arange(length, device=hidden_states.device)[logits_positions or slice(None)]
            hidden_states = hidden_states[:, (rows - self.config.logits_shift).clamp(min=0)]
        return MaskedDiffusionOutput(self.lm_head(self.model.norm(hidden_states)), tuple(key_values))

    def _visible(
        self, attention_mask: torch.Tensor | None, position_ids: torch.Tensor, past_length: int
    ) -> torch.Tensor | None:
        """bool `(batch, 1, queries or 1, keys)`, None where everything is seen, which lets more kernels run."""
        if attention_mask is not None:
            attention_mask = attention_mask.bool()
            if attention_mask.ndim == 3:
                return attention_mask[:, None]
        visible = None
        if self.config.block_size is not None:
            own = block_visibility(position_ids, position_ids, self.config.block_size)
            visible = F.pad(own, (past_length, 0), value=True)[:, None]
        if attention_mask is not None and not attention_mask.all():
            keys = attention_mask[:, None, None]
            visible = keys if visible is None else visible & keys
        return visible


AutoConfig.register(MaskedDiffusionConfig.model_type, MaskedDiffusionConfig)
AutoModel.register(MaskedDiffusionConfig, MaskedDiffusionLM)
