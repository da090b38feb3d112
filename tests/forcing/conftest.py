"""A transformer with condition channels, small enough for property tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vidgen.models.causal_wan import CausalWanTransformer3DModel


@pytest.fixture
def tiny_transformer() -> Callable[[int], CausalWanTransformer3DModel]:
    """Builds a model of 4 latent and 2 condition channels; the argument is the seed of its weights."""

    def build(seed: int = 0) -> CausalWanTransformer3DModel:
        torch.manual_seed(seed)
        return CausalWanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=6,
            out_channels=4,
            text_dim=8,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
        )

    return build
