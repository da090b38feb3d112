"""Keys and values of a decoder that can be taken back: to a length, and row by row where a batch advances unevenly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vidgen.language.models import LanguageModelError

if TYPE_CHECKING:
    from transformers import Cache


class RollbackCache:
    """A `DynamicCache` or `StaticCache` whose layers may hold different lengths while a draft is made.

    Columns are aligned at the right: the newest token of every row is in the same column, and what lies left of a
    row's first token is for the attention mask to hide.

    Args:
        cache: of transformers, empty or filled.

    Raises:
        LanguageModelError: a layer can't give back what it has read (recurrent, sliding and quantized ones can't).
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.check()

    def check(self) -> None:
        """Refuses layers that can't be taken back; some caches make their layers at the first forward pass."""
        from transformers.cache_utils import DynamicLayer, StaticLayer

        for index, layer in enumerate(self.cache.layers):
            if type(layer) not in (DynamicLayer, StaticLayer):
                raise LanguageModelError(
                    f"layer {index} of the {type(self.cache).__name__} is a {type(layer).__name__}, which can't take "
                    "back rejected drafts; speculative decoding needs full attention in every layer and a "
                    "DynamicCache or StaticCache."
                )

    @property
    def length(self) -> int:
        """Columns of the first layer, which every forward pass fills."""
        return int(self.cache.layers[0].get_seq_length()) if self.cache.layers else 0

    def rollback(self, length: int) -> None:
        """Forgets everything after the first `length` columns, in every layer."""
        for layer in self.cache.layers:
            surplus = int(layer.get_seq_length()) - length
            if surplus > 0:
                layer.crop(-surplus)

    def realign(self, shifts: Sequence[int], length: int) -> None:
        """Keeps `length` columns and moves each row to the right, so that the rows end together again.

        Args:
            shifts: of each row, in columns; new column c holds what was in column c - shift, and anything where there
                was no such column.
            length: columns that remain.
        """
        if any(shifts):
            for layer in self.cache.layers:
                moved = torch.arange(length) - torch.tensor(list(shifts))[:, None]  # (batch, length)
                source = moved.clamp(0, int(layer.get_seq_length()) - 1).to(layer.keys.device)[:, None, :, None]
                for states in (layer.keys, layer.values):
                    index = source.expand(-1, states.shape[1], -1, states.shape[3])
                    # In place for the sake of static caches, whose memory must stay where it is.
                    states[:, :, :length] = states.gather(2, index)
        self.rollback(length)

    def prefix(self, layer: int, row: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `(1, heads, last - first, head_dim)` of a row's columns `first` to `last`."""
        held = self.cache.layers[layer]
        return held.keys[row : row + 1, :, first:last], held.values[row : row + 1, :, first:last]
