"""Folders of encoded clips, as `vidgen data encode-latents` writes them.

Format, version 1:

* `dataset.json`, written last: `version`, `model`, `height`, `width` (pixels), `fps`, `chunk` (latent frames),
  `channels`, `latent_size`, `text_length`, `text_dim`, `num_clips`, and in `clips` for each clip its `file`, `frames`
  (latent frames) and `bytes`.
* one safetensors file per clip: `latents` (channels, frames, height, width), float16, normalized by the VAE's mean
  and standard deviation, a whole number of chunks; `prompt_embeds` (length, text_dim) of the caption, zeros behind its
  last token; metadata `source`, `seconds`, `caption`.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.utils.data import Dataset

from vidgen.runtime.errors import VidgenError

FORMAT_VERSION = 1
LATENT_INDEX = "dataset.json"


class DatasetError(VidgenError):
    """A folder of training data is missing, unfinished, damaged, or of another format version."""


def read_index(folder: str | os.PathLike, name: str, command: str) -> dict[str, Any]:
    """Reads the index of a dataset folder.

    Args:
        folder: The dataset.
        name: File name of the index, which is there only once the dataset is whole.
        command: The command that makes such a dataset.

    Raises:
        DatasetError: The folder or its index is missing, the index is damaged or of another version.
    """
    path = Path(folder) / name
    if not Path(folder).is_dir():
        raise DatasetError(f"{str(folder)!r} is not a folder; `{command}` makes one.")
    if not path.is_file():
        raise DatasetError(
            f"{folder} holds no {name}: it is not finished, or no dataset of this kind. `{command}` with the settings "
            "of the first run completes it."
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version = index["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{path} is damaged: {type(error).__name__} {error}.") from error
    if version != FORMAT_VERSION:
        raise DatasetError(f"{path} has format version {version!r}; allowed: {FORMAT_VERSION}.")
    return index


class LatentVideoDataset(Dataset):
    """Encoded clips of any length; files are opened when they are read.

    Args:
        folder: What `vidgen data encode-latents` wrote.

    Attributes:
        index: The content of `dataset.json`.

    Raises:
        DatasetError: The folder is missing, unfinished, empty, of another format version, or a clip is missing or has
            another size than when it was written.

    Example:
        ```py
        videos = LatentVideoDataset("data/teacher_clips")
        videos[0]["latents"]  # float32 (channels, frames, height, width)
        videos.read(0, torch.tensor([0, 1, 2, 30, 31, 32]))  # six latent frames and nothing else from the disk
        ```
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        self.index = read_index(folder, LATENT_INDEX, "vidgen data encode-latents")
        try:
            self._files = [str(clip["file"]) for clip in self.index["clips"]]
            self._frames = [int(clip["frames"]) for clip in self.index["clips"]]
            sizes = [int(clip["bytes"]) for clip in self.index["clips"]]
            self._frame_shape = (int(self.index["channels"]), *(int(size) for size in self.index["latent_size"]))
            self._text_shape = (int(self.index["text_length"]), int(self.index["text_dim"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(f"{self.folder / LATENT_INDEX} is damaged: {type(error).__name__} {error}.") from error
        if not self._files:
            raise DatasetError(f"{self.folder} holds no clips; at least one is needed.")
        # A copy that was cut short shows here and not after hours of training.
        for file, size in zip(self._files, sizes):
            path = self.folder / file
            if not path.is_file():
                raise DatasetError(f"{path} is missing; {LATENT_INDEX} lists {len(self._files)} clips.")
            if path.stat().st_size != size:
                raise DatasetError(f"{path} is damaged: {path.stat().st_size} bytes instead of {size}.")

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        """Returns a whole clip: float32 `latents` (C, F, H, W) and `prompt_embeds` (L, D).

        F differs between clips: batches of whole clips need batch size 1, or `read`.
        """
        return {"latents": self.read(i, torch.arange(self.frames(i))), "prompt_embeds": self.prompt_embeds(i)}

    def frames(self, i: int) -> int:
        """Returns the number of latent frames of clip `i`, without opening it."""
        return self._frames[i]

    def read(self, i: int, frame_ids: torch.Tensor) -> torch.Tensor:
        """Reads some latent frames of a clip, and only those from the disk.

        Args:
            i: Which clip.
            frame_ids: int64 (n,), in any order, repeats allowed.

        Returns:
            float32 (channels, n, height, width).

        Raises:
            DatasetError: A frame lies outside the clip, or the file is damaged.
        """
        ids = [int(frame) for frame in frame_ids]
        if not ids or min(ids) < 0 or max(ids) >= self.frames(i):
            raise DatasetError(
                f"frame_ids={ids} of {self._files[i]}: give at least one, each from 0 to {self.frames(i) - 1}."
            )
        # Consecutive frames are read in one go.
        starts = [0, *(place for place in range(1, len(ids)) if ids[place] != ids[place - 1] + 1), len(ids)]
        runs = [(ids[start], ids[stop - 1] + 1) for start, stop in itertools.pairwise(starts)]
        path = self.folder / self._files[i]
        channels, height, width = self._frame_shape
        try:
            with safe_open(path, framework="pt") as file:
                stored = file.get_slice("latents")
                _check_shape(path, "latents", stored.get_shape(), (channels, self.frames(i), height, width))
                return torch.cat([stored[:, start:stop] for start, stop in runs], dim=1).float()
        except (SafetensorError, OSError) as error:
            raise DatasetError(f"{path} is damaged or missing: {error}.") from error

    def prompt_embeds(self, i: int) -> torch.Tensor:
        """Reads the caption's embeddings of clip `i`: float32 (L, D)."""
        path = self.folder / self._files[i]
        try:
            with safe_open(path, framework="pt") as file:
                embeds = file.get_tensor("prompt_embeds")
        except (SafetensorError, OSError) as error:
            raise DatasetError(f"{path} is damaged or missing: {error}.") from error
        _check_shape(path, "prompt_embeds", embeds.shape, self._text_shape)
        return embeds.float()


def _check_shape(path: Path, name: str, shape: Any, expected: tuple[int, ...]) -> None:
    if tuple(shape) != expected:
        raise DatasetError(f"{path}: {name} has shape {tuple(shape)} instead of {expected}; it is of another dataset.")
