"""Tiny models of three architectures with random weights that say something different after each context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}


def build_model(kind: str = "llama", **sizes: Any) -> PreTrainedModel:
    config, model, options = KINDS[kind]
    defaults = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = model(config(**{**defaults, **options, **sizes})).eval()
    with torch.no_grad():
        # Beside large embeddings an item more or less changes some of the answers, not all.
        built.get_input_embeddings().weight.mul_(8)
    return built


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """Builds a model of a kind (llama, qwen3, mistral) with other sizes."""
    return build_model


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return build_model()


@pytest.fixture(scope="session", params=list(KINDS))
def any_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build_model(request.param)


@pytest.fixture
def prompt() -> torch.Tensor:
    """One prompt `(1, 24)`."""
    return torch.randint(2, 64, (1, 24), generator=torch.Generator().manual_seed(6))
