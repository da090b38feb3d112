"""Which samples make up micro-batch m of a process: a function of (seed, m, rank), so there is no state to save."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from vidgen.runtime.device import generator_for
from vidgen.runtime.errors import TrainingError

from .config import TrainConfig


class BatchView(Dataset):
    """Numbered micro-batches of one process.

    Item m of a map-style dataset of n samples: places `(m * world_size + rank) * batch_size` and following of an
    endless sequence of permutations of `range(n)`, permutation e drawn from (seed, e). An object with a `batch` method
    is asked instead.

    Args:
        data: See `fit`.
        batch_size: Samples per item.
        seed: Fixes the permutations.
        rank: Index of this process.
        world_size: Number of processes.

    Raises:
        TrainingError: The dataset is empty.
    """

    def __init__(self, data: Any, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if not hasattr(data, "batch") and len(data) == 0:
            raise TrainingError("the dataset is empty; it must hold at least one sample")
        self.data, self.batch_size, self.seed, self.rank, self.world_size = data, batch_size, seed, rank, world_size
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if hasattr(self.data, "batch"):
            return self.data.batch(index, self.rank, self.world_size, self.batch_size)
        return default_collate([self.data[sample] for sample in self.samples(index)])

    def samples(self, index: int) -> list[int]:
        """Returns the dataset indices of item `index` of a map-style dataset."""
        first = (index * self.world_size + self.rank) * self.batch_size
        chosen = []
        for position in range(first, first + self.batch_size):
            epoch, place = divmod(position, len(self.data))
            if epoch != self._epoch:
                self._order = torch.randperm(len(self.data), generator=generator_for(self.seed, epoch))
                self._epoch = epoch
            chosen.append(int(self._order[place]))
        return chosen


def make_loader(view: BatchView, config: TrainConfig, first_step: int, device: torch.device) -> DataLoader:
    """Returns a loader of the micro-batches of steps `first_step` to `max_steps`, in order."""
    accumulation = config.gradient_accumulation_steps
    return DataLoader(
        view,
        batch_size=None,
        sampler=range(first_step * accumulation, config.max_steps * accumulation),
        num_workers=config.num_workers,
        pin_memory=device.type == "cuda" and config.num_workers > 0,
        generator=generator_for(config.seed),  # otherwise the loader draws from the global generator
    )
