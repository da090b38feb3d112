"""Prompts, frames and generators: from the forms in which users give them to the one that pipelines work with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F

from vidgen.pipelines.prompt_plan import PromptPlan, PromptPlanError
from vidgen.pipelines.session_state import GenerationError

Prompt = str | Path | PromptPlan | Sequence
ImageInput = PIL.Image.Image | np.ndarray | torch.Tensor | Sequence


def parse_prompts(prompt: Prompt) -> list[PromptPlan]:
    """One plan per sample.

    A text, a plan, the path of a plan file or a list of `(text, seconds)` pairs is one sample; a list of texts, plans
    or lists of pairs is a batch.
    """
    if isinstance(prompt, (str, Path, PromptPlan)):
        return [PromptPlan.parse(prompt)]
    if not isinstance(prompt, Sequence):
        raise PromptPlanError(
            f"prompt is a {type(prompt).__name__}; give a text, (prompt, seconds) pairs or a list of them."
        )
    if not prompt:
        raise PromptPlanError("The prompt plan is empty; give at least one prompt.")
    first = prompt[0]
    is_pair = (
        isinstance(first, Sequence) and not isinstance(first, str) and len(first) == 2 and isinstance(first[0], str)
    )
    if is_pair and not isinstance(first[1], str):
        return [PromptPlan.parse(prompt)]
    return [PromptPlan.parse(entry) for entry in prompt]


def per_sample(texts: str | Sequence[str], batch_size: int, name: str) -> list[str]:
    """One text per sample from one for all or a list."""
    texts = [texts] * batch_size if isinstance(texts, str) else texts
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise GenerationError(f"{name}={texts!r:.60}; give a text, or a list of texts.")
    if len(texts) != batch_size:
        raise GenerationError(f"{name} holds {len(texts)} texts for {batch_size} prompts; give 1 or {batch_size}.")
    return list(texts)


def draw_seeds(generator: torch.Generator | Sequence[torch.Generator] | None, batch_size: int) -> list[int]:
    """One seed per sample. From a single generator, sample 0 of any batch gets the seed it would get alone."""
    generators = list(generator) if isinstance(generator, Sequence) else [generator] * batch_size
    if len(generators) != batch_size:
        raise GenerationError(
            f"{len(generators)} generators are given for {batch_size} prompts; give 1 or {batch_size}."
        )
    for each in generators:
        if each is not None and not isinstance(each, torch.Generator):
            raise GenerationError(f"generator={each!r:.60}; give a torch.Generator, or one per prompt.")
    return [
        int(torch.randint(2**63 - 1, (1,), generator=each, device="cpu" if each is None else each.device))
        for each in generators
    ]


def to_pixels(frames: ImageInput, height: int, width: int, batch_size: int, is_video: bool) -> torch.Tensor:
    """Given frames as the VAE wants them.

    Args:
        frames: PIL images, uint8 arrays with channels last, or float tensors in [0, 1] with channels first; with or
            without a batch axis.
        height: frames are resized to it.
        width: as `height`.
        batch_size: samples; frames without a batch axis serve them all.
        is_video: whether there is an axis of frames.

    Returns:
        `(batch, 3, frames, height, width)` float32 in [-1, 1].

    Raises:
        GenerationError: for another shape, range or number of samples.
    """
    name = "video" if is_video else "image"
    # Everything becomes (batch, frames, channels, height, width) in [0, 1] first.
    pixels = _stack(frames, name)
    missing = (5 if is_video else 4) - pixels.ndim
    if missing not in (0, 1):
        raise GenerationError(
            f"{name} has {pixels.ndim} axes; expected {'frames, ' if is_video else ''}height, width and channels "
            "(uint8, or channels first for float tensors), and at most a batch axis before them."
        )
    pixels = pixels.unsqueeze(0) if missing else pixels
    pixels = pixels if is_video else pixels.unsqueeze(1)
    if pixels.shape[2] != 3 or 0 in pixels.shape:
        raise GenerationError(
            f"{name} has {pixels.shape[2]} channels and shape {tuple(pixels.shape)}; RGB frames are needed."
        )
    if pixels.shape[0] not in (1, batch_size):
        raise GenerationError(
            f"{name} holds {pixels.shape[0]} samples for {batch_size} prompts; give 1 or {batch_size}."
        )
    if not bool(torch.isfinite(pixels).all()) or float(pixels.min()) < 0 or float(pixels.max()) > 1:
        raise GenerationError(
            f"{name} holds values outside [0, 1] (from {float(pixels.min()):g} to {float(pixels.max()):g}); "
            "give uint8, or floats in [0, 1]."
        )
    pixels = pixels.expand(batch_size, *pixels.shape[1:])
    if pixels.shape[-2:] != (height, width):
        resized = F.interpolate(pixels.flatten(0, 1), (height, width), mode="bilinear", antialias=True)
        pixels = resized.unflatten(0, pixels.shape[:2])
    return (pixels * 2 - 1).transpose(1, 2).contiguous()


def _stack(frames: ImageInput, name: str) -> torch.Tensor:
    """Float tensor `(…, channels, height, width)` in [0, 1] of nested lists of frames."""
    if isinstance(frames, PIL.Image.Image):
        frames = np.asarray(frames.convert("RGB"))
    if isinstance(frames, np.ndarray):
        if frames.dtype != np.uint8 and not np.issubdtype(frames.dtype, np.floating):
            raise GenerationError(f"{name} is an array of {frames.dtype}; give uint8, or floats in [0, 1].")
        tensor = torch.from_numpy(np.array(frames))
        if tensor.ndim < 3:
            raise GenerationError(f"{name} has shape {frames.shape}; height, width and channels are needed.")
        tensor = tensor.movedim(-1, -3)
        return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor.float()
    if isinstance(frames, torch.Tensor):
        if frames.dtype != torch.uint8 and not frames.is_floating_point():
            raise GenerationError(f"{name} is a tensor of {frames.dtype}; give uint8, or floats in [0, 1].")
        return frames.float().cpu() / (255 if frames.dtype == torch.uint8 else 1)
    if not isinstance(frames, Sequence) or isinstance(frames, str) or not frames:
        raise GenerationError(f"{name} is {frames!r:.60}; give PIL images, a uint8 array or a float tensor.")
    stacked = [_stack(frame, name) for frame in frames]
    if len({tensor.shape for tensor in stacked}) > 1:
        raise GenerationError(
            f"The frames of {name} have different shapes: {sorted({tuple(t.shape) for t in stacked})}."
        )
    return torch.stack(stacked)


def convert_frames(frames: np.ndarray, output_type: str) -> Any:
    """uint8 `(frames, height, width, 3)` or a batch of them, as diffusers returns videos: always with a batch axis."""
    frames = frames if frames.ndim == 5 else frames[None]
    if output_type == "pil":
        return [[PIL.Image.fromarray(frame) for frame in video] for video in frames]
    scaled = frames.astype(np.float32) / 255
    return scaled if output_type == "np" else torch.from_numpy(scaled).permute(0, 1, 4, 2, 3).contiguous()
