"""Next-token training of causal language models, with stochastic depth per sub-layer.

Deep Networks with Stochastic Depth (arXiv 1603.09382), applied to attention and MLP separately, as the layer-skipping
drafts of LayerSkip (arXiv 2404.16710) and KnapSpec want it: a model whose sub-layers were absent now and then in
training loses little when some are skipped in decoding.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from vidgen.runtime.errors import ConfigError
from vidgen.train import StepOutput, TrainingMethod

from .models import LanguageModelError, decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What adds its output to the residual stream, in the order of a block.
SUBLAYERS = ("self_attn", "mlp")


class StochasticDepth:
    """While the model trains, what a sub-layer adds to the residual stream is multiplied by 0 or 1 / (1 - rate).

    It is for blocks that add the output of attention and MLP as it is: a norm behind it, as in Gemma 2, would undo the
    second factor.

    Args:
        model: the causal language model; stays as it is but for hooks on its sub-layers.
        rate: share of samples for which a sub-layer is absent.

    Raises:
        ConfigError: the rate is out of range.
        LanguageModelError: the blocks have no sub-layers of the known names.
    """

    def __init__(self, model: PreTrainedModel, rate: float) -> None:
        if not 0 <= rate < 1:
            raise ConfigError(f"stochastic_depth={rate}; it must be from 0 up to, but not including, 1.")
        self.rate = rate
        self.sublayers: list[nn.Module] = []
        for layer in decoder_layers(model):
            for name in SUBLAYERS:
                sublayer = getattr(layer, name, None)
                if not isinstance(sublayer, nn.Module):
                    raise LanguageModelError(
                        f"{type(layer).__name__} has no sub-layer {name!r}; stochastic depth needs blocks with "
                        f"{' and '.join(SUBLAYERS)}."
                    )
                # One function for all, which reads the factor from its module: blocks then share one compiled graph.
                sublayer.register_forward_hook(_scale_while_training)
                self.sublayers.append(sublayer)

    def draw(self, batch_size: int, generator: torch.Generator) -> None:
        """Decide for each sample of the next batch which sub-layers are absent."""
        shape = (len(self.sublayers), batch_size, 1, 1)
        kept = torch.rand(shape, generator=generator, device=generator.device) >= self.rate
        for sublayer, factor in zip(self.sublayers, kept.float() / (1 - self.rate)):
            sublayer.depth_factor = factor.clone()  # a view of all of them would carry its offset into compiled guards


def _scale_while_training(module: nn.Module, inputs: Any, output: Any) -> Any:
    """The first output `(batch, length, dim)` times `depth_factor` `(batch, 1, 1)`."""
    if not module.training:
        return output
    if isinstance(output, tuple):
        return (output[0] * module.depth_factor.to(output[0].dtype), *output[1:])
    return output * module.depth_factor.to(output.dtype)


class CausalLMMethod(TrainingMethod):
    """Cross-entropy of the next token; every position of a window counts the same.

    Args:
        model: the causal language model, role `model`.
        tokenizer: saved beside it.
        heldout: windows for `validate`, int64 `(windows, length + 1)`.
        token_bytes: bytes of each token, int64 `(tokens,)`.
        batch_size: windows that are validated at once.
        stochastic_depth: share of samples for which a sub-layer is absent in training.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        heldout: torch.Tensor,
        token_bytes: torch.Tensor,
        batch_size: int,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.heldout, self.token_bytes, self.batch_size = heldout, token_bytes, batch_size
        self.depth = StochasticDepth(model, stochastic_depth) if stochastic_depth else None

    def roles(self) -> dict[str, nn.Module]:
        return {"model": self.model}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        tokens = batch["tokens"]  # (B, T + 1)
        if self.depth is not None:
            self.depth.draw(len(tokens), generator)
        return StepOutput({"model": next_token_loss(self.model, tokens).mean()})

    def validate(self) -> dict[str, float]:
        return heldout_figures(self.model, self.heldout.split(self.batch_size), self.token_bytes)

    def save_pretrained(self, directory: str | os.PathLike, ema_roles: dict[str, nn.Module]) -> None:
        super().save_pretrained(directory, ema_roles)
        self.tokenizer.save_pretrained(Path(directory) / "model")


def next_token_loss(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of all tokens of windows but the first, float32 `(batch, length)`.

    Args:
        model: a causal language model.
        tokens: int64 `(batch, length + 1)`, without padding.
    """
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # (B, T, V)
    return F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")


@torch.no_grad()
def heldout_figures(
    model: PreTrainedModel, batches: Iterable[torch.Tensor], token_bytes: torch.Tensor
) -> dict[str, float]:
    """Mean loss in nats per token, and bits per byte, by which models with other tokenizers can be compared.

    Bits of end-of-text tokens count, though these stand for no bytes.

    Args:
        model: a causal language model, in `eval()`.
        batches: of windows, int64 `(batch, length + 1)`.
        token_bytes: bytes of each token, int64 `(tokens,)`.
    """
    device = model.get_input_embeddings().weight.device
    nats, tokens, size = 0.0, 0, 0
    for windows in batches:
        nats += float(next_token_loss(model, windows.to(device)).double().sum())
        tokens += windows[:, 1:].numel()
        size += int(token_bytes[windows[:, 1:]].sum())
    return {"loss": nats / tokens, "bits_per_byte": nats / math.log(2) / size}
