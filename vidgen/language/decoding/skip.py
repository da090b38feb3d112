"""A decoder as a list of items, attention and MLP of each layer, that can be left out, run alone and listened to.

Item 2i is the attention of layer i with its norm and residual, item 2i + 1 its MLP. A skipped item is the identity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vidgen.language.models import LanguageModelError, decoder_layers
from vidgen.runtime.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Their layers compute x + attention(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)). Others have parts
# of the same names and compute something else (scaled residuals, parallel branches, experts): no guess is made.
_KNOWN = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma"})
_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})


def sublayers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a decoder of attention and MLP with residuals.

    Raises:
        LanguageModelError: it is built otherwise, or of a kind that isn't known to be built so.
    """
    layers = decoder_layers(model)
    kind = model.config.get_text_config().model_type
    for index, layer in enumerate(layers):
        parts = {name for name, _ in layer.named_children()}
        if kind not in _KNOWN or parts != _PARTS:
            raise LanguageModelError(
                f"layer {index} of this {kind} model is a {type(layer).__name__} of {', '.join(sorted(parts))}; "
                f"skipping needs residual blocks of attention and MLP as {', '.join(sorted(_KNOWN))} have them."
            )
    return layers


def run_attention(layer: nn.Module, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Hidden states `(batch, length, width)` after the attention item; `inputs` as the layer gets them."""
    return hidden_states + layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **inputs)[0]


def run_mlp(layer: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Hidden states `(batch, length, width)` after the MLP item."""
    return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))


def check_skip(model: PreTrainedModel, skip: Collection[int]) -> frozenset[int]:
    """The items to leave out, if a draft can do without them.

    Raises:
        ConfigError: there is no such item, or it is the first attention.
        LanguageModelError: see `sublayers`.
    """
    count = 2 * len(sublayers(model))
    wrong = sorted(item for item in skip if not 0 < item < count)
    if wrong:
        raise ConfigError(
            f"item {wrong[0]} can't be skipped; allowed: 1 to {count - 1}. The first attention (item 0) stays, "
            "because attention masks are sized by its cache."
        )
    return frozenset(skip)


class SublayerSkip:
    """Within it, the model runs without some of its items, and their caches don't grow.

    Args:
        model: see `sublayers`.
        skip: item numbers; see `check_skip`.
    """

    def __init__(self, model: PreTrainedModel, skip: Collection[int]) -> None:
        self.skip = check_skip(model, skip)
        self._forwards = []
        for index, layer in enumerate(sublayers(model)):
            attention, mlp = 2 * index not in self.skip, 2 * index + 1 not in self.skip
            if not (attention and mlp):
                self._forwards.append((layer, partial(_forward, layer, attention, mlp)))

    def __enter__(self) -> SublayerSkip:
        for layer, forward in self._forwards:
            layer.forward = forward
        return self

    def __exit__(self, *_: object) -> None:
        for layer, _forward_without in self._forwards:
            del layer.forward  # the class's own shows again


def _forward(layer: nn.Module, attention: bool, mlp: bool, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
    if attention:
        hidden_states = run_attention(layer, hidden_states, **inputs)
    return run_mlp(layer, hidden_states) if mlp else hidden_states


@contextlib.contextmanager
def recorded_states(model: PreTrainedModel, last: int | None, store: list[torch.Tensor]) -> Iterator[None]:
    """Within it, every forward pass of the model leaves its hidden states of the first row in `store`.

    Args:
        model: see `sublayers`.
        last: only this many of the newest positions; None takes all.
        store: gets one `(2 * layers + 1, length, width)` per pass: embeddings, then the state after each item.
    """
    states: list[torch.Tensor] = []

    def take(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        # Copied: a view would keep the states of a whole prompt alive.
        states.append(inputs[0][0].clone() if last is None else inputs[0][0, -last:].clone())

    def finish(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        take(_module, inputs)
        store.append(torch.stack([state.to(states[0].device) for state in states]))
        states.clear()

    handles = []
    for layer in sublayers(model):
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            handles.append(norm.register_forward_pre_hook(take))
    handles.append(final_norm(model).register_forward_pre_hook(finish))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the last layer and the head."""
    return model.get_decoder().norm


def draft_logits(model: PreTrainedModel, hidden_states: torch.Tensor) -> torch.Tensor:
    """Logits `(..., vocabulary)` of hidden states `(..., width)` that came out of some item."""
    return model.get_output_embeddings()(final_norm(model)(hidden_states))
