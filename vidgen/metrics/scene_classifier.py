"""Reads the attributes of a landscape video back from its frames."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from vidgen.metrics.checks import check_frames, check_sequence
from vidgen.runtime.checkpoint import load_safetensors, save_safetensors
from vidgen.runtime.checks import check_whole
from vidgen.runtime.errors import VidgenError, suggestion
from vidgen.worlds.landscape import BIOMES, TIMES, TRAVELLERS, WEATHERS

SCENE_ATTRIBUTES = {"biome": BIOMES, "time_of_day": TIMES, "weather": WEATHERS, "traveller": TRAVELLERS}

# Frames that are looked at together. Every second frame: rain and wings move visibly between them.
WINDOW_OFFSETS = (0, 2, 4)
WINDOW_SPAN = WINDOW_OFFSETS[-1] + 1


class ResidualBlock(nn.Module):
    """Halves the resolution with two 3x3 convolutions beside a pooled shortcut."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1)
        self.norm1 = nn.GroupNorm(8, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, out_channels)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        residual = self.shortcut(F.avg_pool2d(hidden_states, 2, ceil_mode=True))
        hidden_states = F.silu(self.norm1(self.conv1(hidden_states)))
        return F.silu(self.norm2(self.conv2(hidden_states)) + residual)


class SceneClassifier(nn.Module):
    """Small convolutional network with one head per attribute of `LandscapeScene`.

    The frames of a window enter as channels of one picture. Mean and maximum pooling let the heads see both what fills
    the frame (time of day) and what is small (a traveller).

    Args:
        width: channels after the first convolution, a multiple of 8.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3 * len(WINDOW_OFFSETS), width, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(ResidualBlock(width, 2 * width), ResidualBlock(2 * width, 4 * width))
        self.heads = nn.ModuleDict(
            {name: nn.Linear(8 * width, len(values)) for name, values in SCENE_ATTRIBUTES.items()}
        )

    def forward(self, frames: torch.Tensor) -> dict[str, torch.Tensor]:
        """Classify windows.

        Args:
            frames: `(batch, len(WINDOW_OFFSETS), 3, height, width)` in [-1, 1].

        Returns:
            Logits `(batch, values)` by attribute.
        """
        hidden_states = self.blocks(F.silu(self.stem(frames.flatten(1, 2))))
        pooled = torch.cat([hidden_states.mean(dim=(2, 3)), hidden_states.amax(dim=(2, 3))], dim=1)
        return {name: head(pooled) for name, head in self.heads.items()}

    @torch.no_grad()
    def read(self, video: np.ndarray, num_windows: int = 8) -> dict[str, str]:
        """The attributes that most windows of a video show.

        Args:
            video: uint8 `(frames, height, width, 3)`.
            num_windows: windows spread evenly over the video. Their probabilities are averaged, which is a majority
                vote in which a window that is unsure counts less.

        Raises:
            VidgenError: when the video isn't uint8, or shorter than one window.
        """
        check_frames(video, "video", "(frames, height, width, 3)")
        check_whole(1, num_windows=num_windows)
        if len(video) < WINDOW_SPAN:
            raise VidgenError(f"The video has {len(video)} frames; at least {WINDOW_SPAN} are needed.")
        starts = np.linspace(0, len(video) - WINDOW_SPAN, num_windows).round().astype(int)
        windows = np.stack([video[start + np.array(WINDOW_OFFSETS)] for start in starts])
        logits = self(to_classifier_pixels(torch.from_numpy(windows)).to(self.stem.weight.device))
        return {
            name: SCENE_ATTRIBUTES[name][int(values.softmax(-1).mean(0).argmax())] for name, values in logits.items()
        }

    def save(self, path: str | os.PathLike) -> None:
        """Write the weights to one safetensors file."""
        save_safetensors(self.state_dict(), path, {"width": str(self.stem.out_channels)})

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read what `save` wrote, ready for `read`.

        Raises:
            CheckpointError: when the file is missing or damaged.
        """
        tensors, metadata = load_safetensors(path)
        classifier = cls(width=int(metadata["width"]))
        classifier.load_state_dict(tensors)
        return classifier.eval()


def to_classifier_pixels(frames: torch.Tensor) -> torch.Tensor:
    """uint8 `(batch, frames, height, width, 3)` to float `(batch, frames, 3, height, width)` in [-1, 1]."""
    return frames.permute(0, 1, 4, 2, 3).float() / 127.5 - 1


def score_attributes(truths: Sequence[dict[str, str]], readings: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Compare what videos should show with what was read from them.

    Returns:
        By attribute: `accuracy`, its 95 % bootstrap `interval` over videos, and the `confusion` counts, whose rows
        are the true and whose columns the read `values`.

    Raises:
        VidgenError: when there is no video, a video has no reading, or an attribute is missing or unknown.
    """
    check_sequence("truths", truths)
    if not isinstance(readings, Sequence) or len(readings) != len(truths):
        raise VidgenError(f"readings={readings!r:.60}; expected one for each of {len(truths)} videos.")
    for attributes in (*truths, *readings):
        for name, values in SCENE_ATTRIBUTES.items():
            if not isinstance(attributes, Mapping) or attributes.get(name) not in values:
                given = attributes.get(name) if isinstance(attributes, Mapping) else attributes
                raise VidgenError(f"{name}={given!r}: {suggestion(str(given), values)}")
    scores = {}
    for name, values in SCENE_ATTRIBUTES.items():
        hits = np.array([truth[name] == reading[name] for truth, reading in zip(truths, readings, strict=True)])
        resampled = np.random.default_rng(0).choice(hits, size=(2000, len(hits))).mean(axis=1)
        confusion = np.zeros((len(values), len(values)), dtype=int)
        for truth, reading in zip(truths, readings, strict=True):
            confusion[values.index(truth[name]), values.index(reading[name])] += 1
        scores[name] = {
            "accuracy": float(hits.mean()),
            "interval": np.quantile(resampled, (0.025, 0.975)).tolist(),
            "values": list(values),
            "confusion": confusion.tolist(),
        }
    return scores
