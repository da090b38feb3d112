"""Folders of encoded prompts, as `vidgen data prompts` writes them.

Format, version 1:

* `prompts.json`, written last: `version`, `model`, `fps`, `text_length`, `text_dim`, `num_plans`, and in `shards` for
  each shard its `file` and the number of `plans` in it.
* shards of up to 1024 prompt plans, safetensors. A plan is one prompt, or several with their seconds. `embeds`
  (tokens, text_dim) holds all tokens of all prompts one after another, without padding; prompt p has rows
  `token_offsets[p]` to `token_offsets[p + 1]`, plan i has prompts `plan_offsets[i]` to `plan_offsets[i + 1]`, and
  prompt p begins at second `starts[p]` of its plan.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.utils.data import Dataset

from vidgen.runtime.errors import VidgenError

from .latent_dataset import DatasetError, read_index

PROMPT_INDEX = "prompts.json"


class _Shard(NamedTuple):
    """Where things are in a shard: int64 (prompts + 1,), int64 (plans + 1,), float64 (prompts,)."""

    path: Path
    token_offsets: np.ndarray
    plan_offsets: np.ndarray
    starts: np.ndarray


class PromptDataset(Dataset):
    """Text for rollouts of a fixed number of chunks; embeddings are read when they are asked for.

    A prompt of a plan takes effect at the first chunk that begins at or after it, as in generation; the last one holds
    until the end, and prompts that no chunk of the rollout shows are left out.

    Args:
        folder: What `vidgen data prompts` wrote.
        num_chunks: Chunks of a rollout.
        chunk_seconds: Seconds per chunk, once the video runs.

    Attributes:
        index: The content of `prompts.json`.

    Raises:
        DatasetError: The folder is missing, unfinished, empty, of another format version, or a shard is damaged.
        VidgenError: `num_chunks` or `chunk_seconds` is out of range.
    """

    def __init__(self, folder: str | os.PathLike, num_chunks: int, chunk_seconds: float) -> None:
        if num_chunks < 1:
            raise VidgenError(f"num_chunks={num_chunks} must be at least 1.")
        if not (math.isfinite(chunk_seconds) and chunk_seconds > 0):
            raise VidgenError(f"chunk_seconds={chunk_seconds} must be above 0.")
        self.folder = Path(folder)
        self.index = read_index(folder, PROMPT_INDEX, "vidgen data prompts")
        try:
            shards = [(self.folder / shard["file"], int(shard["plans"])) for shard in self.index["shards"]]
            self._text_shape = (int(self.index["text_length"]), int(self.index["text_dim"]))
            fps = float(self.index["fps"])
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(f"{self.folder / PROMPT_INDEX} is damaged: {type(error).__name__} {error}.") from error
        if not sum(plans for _, plans in shards):
            raise DatasetError(f"{self.folder} holds no prompts; at least one is needed.")
        self._shards = [self._open_shard(*shard) for shard in shards]
        self._ends = list(itertools.accumulate(plans for _, plans in shards))
        # The first latent frame decodes to one frame and not to four, so every later chunk begins three frames early.
        # Half a frame of slack absorbs rounding, as in `PromptPlan.prompt_at`.
        begins = np.maximum(np.arange(num_chunks) * chunk_seconds - 3 / fps, 0.0)
        self._chunk_times = begins + 0.5 / fps
        self.num_prompts = max(
            len(np.unique(self._schedule(shard, plan)))
            for shard in self._shards
            for plan in range(len(shard.plan_offsets) - 1)
        )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        """Returns the text of one rollout.

        Returns:
            `prompt_embeds`, float32 (P, L, D) with zeros behind a prompt's last token; P is the same for all items,
            prompts that were added for it are zeros. `prompt_of_chunk`, int64 (num_chunks,).
        """
        if not 0 <= i < len(self):
            raise IndexError(f"plan {i} does not exist; {self.folder} holds {len(self)}.")
        number = bisect.bisect_right(self._ends, i)
        shard = self._shards[number]
        plan = i - (self._ends[number - 1] if number else 0)
        shown, prompt_of_chunk = np.unique(self._schedule(shard, plan), return_inverse=True)
        embeds = torch.zeros(self.num_prompts, *self._text_shape)
        try:
            with safe_open(shard.path, framework="pt") as file:
                stored = file.get_slice("embeds")
                for row, prompt in enumerate(shown + shard.plan_offsets[plan]):
                    start, stop = (int(offset) for offset in shard.token_offsets[prompt : prompt + 2])
                    embeds[row, : stop - start] = stored[start:stop].float()
        except (SafetensorError, OSError) as error:
            raise DatasetError(f"{shard.path} is damaged or missing: {error}.") from error
        return {"prompt_embeds": embeds, "prompt_of_chunk": torch.from_numpy(prompt_of_chunk.astype(np.int64))}

    def _schedule(self, shard: _Shard, plan: int) -> np.ndarray:
        """Which prompt of the plan holds in each chunk, (num_chunks,)."""
        starts = shard.starts[shard.plan_offsets[plan] : shard.plan_offsets[plan + 1]]
        return np.searchsorted(starts, self._chunk_times, side="right") - 1

    def _open_shard(self, path: Path, num_plans: int) -> _Shard:
        if not path.is_file():
            raise DatasetError(f"{path} is missing; {PROMPT_INDEX} lists it.")
        try:
            with safe_open(path, framework="pt") as file:
                arrays = (file.get_tensor(name).numpy() for name in _Shard._fields[1:])
                shard = _Shard(path, *arrays)
                shape = tuple(file.get_slice("embeds").get_shape())
        except (SafetensorError, OSError) as error:
            raise DatasetError(f"{path} is damaged: {error}.") from error
        lengths = np.diff(shard.token_offsets)
        consistent = (
            len(shard.plan_offsets) == num_plans + 1
            and shape == (shard.token_offsets[-1], self._text_shape[1])
            and len(shard.starts) == len(lengths) == shard.plan_offsets[-1]
            and (np.diff(shard.plan_offsets) > 0).all()
            and ((lengths > 0) & (lengths <= self._text_shape[0])).all()
        )
        if not consistent:
            raise DatasetError(f"{path} does not fit {PROMPT_INDEX}: it is damaged or of another dataset.")
        return shard
