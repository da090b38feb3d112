"""What metrics ask of their inputs. A number computed from anything else would look like a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vidgen.runtime.checks import check_not_negative, check_positive
from vidgen.runtime.errors import VidgenError


def count_frames(fps: float, **seconds: float) -> int:
    """A duration in frames, rounded.

    Args:
        fps: frames per second.
        seconds: one duration, under the name by which the caller knows it.

    Raises:
        VidgenError: when the rate isn't positive, the duration negative, either not finite, or the product too large.
    """
    check_positive(fps=fps)
    check_not_negative(**seconds)
    ((name, duration),) = seconds.items()
    if duration > 2**53 / fps:
        raise VidgenError(f"{name}={duration:g} s at fps={fps:g} are more frames than any video has.")
    return round(duration * fps)


def check_frames(frames: np.ndarray, name: str = "frames", axes: str = "(..., height, width, 3)") -> None:
    """Refuses all but uint8 pictures.

    Args:
        frames: the array.
        name: what the caller calls it.
        axes: of the array; a leading `...` stands for any number of them.
    """
    is_array = isinstance(frames, np.ndarray) and frames.dtype == np.uint8
    if not is_array or not frames.size or not _has_axes(frames, axes) or frames.shape[-1] != 3:
        raise VidgenError(f"{name} are {_describe(frames)}; expected uint8 {axes}.")


def real_array(name: str, values: Any, axes: str) -> np.ndarray:
    """The values as a numpy array of finite numbers.

    Args:
        name: what the caller calls it.
        values: an array, or nested sequences.
        axes: such as `(frames, dim)`; says how many there are.

    Raises:
        VidgenError: other axes, no values at all, or one that isn't a finite real number.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise VidgenError(f"{name} can't be read as an array: {error}; expected {axes}.") from error
    if array.dtype.kind not in "iuf" or not _has_axes(array, axes) or not array.size:
        raise VidgenError(f"{name} are {_describe(array)}; expected {axes}, real numbers.")
    finite = np.isfinite(array)
    if not finite.all():
        where = np.argwhere(~finite)[0].tolist()
        raise VidgenError(f"{name}{where} is {array[tuple(where)]}; all values must be finite.")
    return array


def check_tensor(name: str, values: torch.Tensor, axes: str) -> None:
    """Refuses all but tensors of finite real numbers with these axes; as `real_array`."""
    is_tensor = isinstance(values, torch.Tensor)
    if not is_tensor or values.dtype == torch.bool or values.is_complex() or not values.numel():
        raise VidgenError(f"{name} are {_describe(values)}; expected {axes}, a tensor of real numbers.")
    if not _has_axes(values, axes):
        raise VidgenError(f"{name} have shape {tuple(values.shape)}; expected {axes}.")
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        where = (~finite).nonzero()[0].tolist()
        raise VidgenError(f"{name}{where} is {float(values[tuple(where)])}; all values must be finite.")


def check_sequence(name: str, values: Sequence[Any]) -> None:
    """Refuses what has no elements to go through."""
    if not hasattr(values, "__len__") or isinstance(values, str) or not len(values):
        raise VidgenError(f"{name}={values!r:.60}; at least one is needed.")


def _has_axes(values: np.ndarray | torch.Tensor, axes: str) -> bool:
    named = axes.count(",") + 1
    return values.ndim >= named - 1 if axes.startswith("(...") else values.ndim == named


def _describe(values: Any) -> str:
    if isinstance(values, np.ndarray | torch.Tensor):
        return f"{values.dtype} of shape {tuple(values.shape)}"
    return f"a {type(values).__name__}"
