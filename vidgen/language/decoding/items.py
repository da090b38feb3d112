"""Runs single items of a decoder on several branches at once, all of them continuations of one cached past."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vidgen.language.decoding.cache import RollbackCache
from vidgen.language.decoding.skip import run_attention, run_mlp, sublayers
from vidgen.runtime.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The mask below is a tensor that these two add to the scores; flash kernels have no place for one.
_MASKED = ("eager", "sdpa")


class _Past:
    """Stands for a cache in a layer's attention: shows a fixed past before the new keys and keeps nothing."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2)


class ItemRunner:
    """Runs items on branches of `tokens` positions each, which share a past and don't see each other.

    The branches stand one behind the other in one sequence, under a block-diagonal causal mask; the past's keys are
    there once, however many branches there are.

    Args:
        model: see `vidgen.language.decoding.skip.sublayers`.
        past: keys and values `(1, heads, context, head_dim)` of each layer.
        tokens: positions of a branch; the first follows the past.

    Raises:
        ConfigError: the attention kernel of the model takes no mask of this kind.
    """

    def __init__(self, model: PreTrainedModel, past: list[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> None:
        kernel = model.config._attn_implementation
        if kernel not in _MASKED:
            raise ConfigError(
                f"attention {kernel!r} can't keep branches apart; load the model with {' or '.join(_MASKED)} attention"
            )
        self._layers, self._past, self._tokens = sublayers(model), past, tokens
        self._rotary = model.get_decoder().rotary_emb
        self._inputs: dict[tuple[int, torch.device], tuple[Any, torch.Tensor]] = {}

    @classmethod
    def from_cache(
        cls, model: PreTrainedModel, cache: RollbackCache, row: int, begin: int, first: int, last: int
    ) -> ItemRunner:
        """On the past of a row, from column `begin` to `first`; branches are columns `first` to `last`."""
        past = [cache.prefix(layer, row, begin, first) for layer in range(len(sublayers(model)))]
        return cls(model, past, last - first)

    @classmethod
    def with_random_past(cls, model: PreTrainedModel, context: int, tokens: int) -> ItemRunner:
        """On a past that means nothing, to measure how long items take."""
        past = []
        for layer in sublayers(model):
            weight = layer.self_attn.k_proj.weight
            shape = (1, weight.shape[0] // layer.self_attn.head_dim, context, layer.self_attn.head_dim)
            past.append(tuple(torch.randn(2, *shape, device=weight.device, dtype=weight.dtype).unbind()))
        return cls(model, past, tokens)

    def __call__(self, item: int, branches: torch.Tensor) -> torch.Tensor:
        """Hidden states `(branches, tokens, width)` after the item."""
        layer = self._layers[item // 2]
        # Layers may be on different devices.
        sequence = branches.to(layer.input_layernorm.weight.device).flatten(0, 1)[None]
        if item % 2:
            result = run_mlp(layer, sequence)
        else:
            embeddings, mask = self._positions_and_mask(sequence, len(branches))
            result = run_attention(
                layer,
                sequence,
                position_embeddings=embeddings,
                attention_mask=mask,
                cache=_Past(*self._past[item // 2]),
            )
        return result[0].unflatten(0, branches.shape[:2]).to(branches.device)

    def _positions_and_mask(self, sequence: torch.Tensor, branches: int) -> tuple[Any, torch.Tensor | None]:
        key = (branches, sequence.device)
        if key not in self._inputs:
            context, tokens, device = self._past[0][0].shape[-2], self._tokens, sequence.device
            positions = (context + torch.arange(tokens, device=device)).repeat(branches)
            mask = None
            if branches * tokens > 1:
                causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
                seen = torch.block_diag(*[causal] * branches).bool()
                seen = torch.cat([seen.new_ones(branches * tokens, context), seen], dim=1)[None, None]
                mask = torch.zeros_like(seen, dtype=sequence.dtype).masked_fill(~seen, torch.finfo(sequence.dtype).min)
            self._inputs[key] = (self._rotary(sequence, positions[None]), mask)
        return self._inputs[key]
