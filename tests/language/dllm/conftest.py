"""Tiny masked diffusion language models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vidgen.language.dllm.modeling import MaskedDiffusionConfig, MaskedDiffusionLM

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "mask_token_id": 63,
}


def build_model(seed: int = 0, **changes: Any) -> MaskedDiffusionLM:
    """A model whose weights are large enough that every input reaches every output."""
    torch.manual_seed(seed)
    return MaskedDiffusionLM(MaskedDiffusionConfig(**{**SHAPE, "initializer_range": 0.4, **changes})).eval()


@pytest.fixture(scope="session")
def make_model():
    """Builds a fresh model from a seed and changes to its shape."""
    return build_model


@pytest.fixture
def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of 7, 4 and 2 tokens, padded on the left."""
    ids = torch.randint(0, 60, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :5] = 0, 0
    return ids.masked_fill(mask == 0, 61), mask
