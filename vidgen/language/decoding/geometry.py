"""Trajectories of hidden states on the unit sphere: anchors, tangent steps from them, how they turn and crowd.

The formulas are this library's own; see `vidgen.language.decoding.tgr`.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

UNIFORMITY = 2.0  # t of the potential exp(-t * distance^2)


def anchor_of(states: torch.Tensor, valid: torch.Tensor, mean: torch.Tensor, window: int) -> torch.Tensor:
    """Unit vector of the newest states, seen from the mean of the prompt: without it all of them point the same way.

    At most half of the states count: a window over a whole prompt would be its mean, and leave nothing.

    Args:
        states: `(..., length, width)`.
        valid: `(..., length)`, False where there is no state.
        mean: `(..., width)`.
        window: newest states.

    Returns:
        `(..., width)`
    """
    newest = valid.flip(-1).cumsum(-1).flip(-1)  # 1 at the last valid state
    size = (valid.sum(-1, keepdim=True) // 2).clamp(1, window)
    weights = (valid & (newest <= size)).to(states.dtype)
    average = (weights[..., None] * states).sum(-2) / weights.sum(-1, keepdim=True).clamp(min=1)
    centered = average - mean
    # A prompt of one token, or of the same one over and over, is its own mean.
    nothing = centered.norm(dim=-1, keepdim=True) <= 1e-5 * average.norm(dim=-1, keepdim=True)
    return F.normalize(torch.where(nothing, average, centered), dim=-1)


def tangent_basis(states: torch.Tensor, anchor: torch.Tensor, rank: int) -> torch.Tensor:
    """Orthonormal directions, orthogonal to the anchor, in which states differ most.

    Args:
        states: `(length, width)`, centered.
        anchor: `(width,)` unit vector.
        rank: most directions.

    Returns:
        `(width, directions)`, fewer than `rank` where the states span fewer.
    """
    flat = states - (states @ anchor)[:, None] * anchor
    _, sizes, directions = torch.linalg.svd(flat, full_matrices=False)
    # Directions of no size are arbitrary.
    kept = int((sizes > 1e-3 * states.norm(dim=-1).max().clamp(min=1e-12)).sum())
    return _orthonormal(directions[: min(rank, kept)].T, anchor)


def random_basis(anchor: torch.Tensor, rank: int, generator: torch.Generator) -> torch.Tensor:
    """`(width, directions)` random orthonormal directions, orthogonal to the anchor; the control."""
    width = len(anchor)
    drawn = torch.randn(width, min(rank, width - 1), generator=generator).to(anchor)
    return _orthonormal(drawn, anchor)


def _orthonormal(directions: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    for _ in range(2):  # the second time removes what rounding has left
        directions = torch.linalg.qr(directions - anchor[:, None] * (anchor @ directions))[0]
    return directions


def perturbed(anchor: torch.Tensor, basis: torch.Tensor, noise: torch.Tensor, sigma: float) -> torch.Tensor:
    """Candidates on the unit sphere; the first is the anchor itself.

    Args:
        anchor: `(width,)`.
        basis: `(width, directions)`.
        noise: `(candidates - 1, directions)`, standard normal.
        sigma: size of the step.

    Returns:
        `(candidates, width)`
    """
    steps = sigma / math.sqrt(max(1, basis.shape[1])) * noise @ basis.T
    return torch.cat([anchor[None], F.normalize(anchor + steps, dim=-1)])


def turning(ends: torch.Tensor, anchor: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """1 - cos of the angle by which a trajectory turns at an anchor; 0 at the first.

    Args:
        ends: `(rows, candidates, width)` where it may go.
        anchor: `(rows, width)` where it is.
        before: `(rows, width)` where it came from.

    Returns:
        `(rows, candidates)`
    """
    if before is None:
        return torch.zeros_like(ends[..., 0])
    return 1 - F.cosine_similarity(ends - anchor[:, None], (anchor - before)[:, None], dim=-1)


def crowding(ends: torch.Tensor, bank: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """How close points are to those of a bank: logarithm of their mean Gaussian potential; 0 for an empty bank.

    "Understanding Contrastive Representation Learning through Alignment and Uniformity on the Hypersphere" (arXiv
    2005.10242).

    Args:
        ends: `(rows, candidates, width)`.
        bank: `(rows, members, width)`.
        weights: `(rows, members)`, 0 where there is none.

    Returns:
        `(rows, candidates)`
    """
    squared = (ends[:, :, None] - bank[:, None]).square().sum(-1)  # (rows, candidates, members)
    total = weights.sum(-1)[:, None]
    logarithms = (-UNIFORMITY * squared + weights.log()[:, None]).logsumexp(-1) - total.log()
    return torch.where(total > 0, logarithms, torch.zeros_like(ends[..., 0]))


class ResidualTap:
    """Within it, a decoder layer leaves its output in `states`, and what `add` names is added to it afterwards.

    Args:
        layer: of the decoder.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._direction: torch.Tensor | None = None
        self._strength = 0.0
        self.states = torch.empty(0)

    def add(self, direction: torch.Tensor | None, strength: float = 0.0) -> None:
        """From now on, `strength * ||h|| * direction` is added to each state h.

        Args:
            direction: `(rows, width)`; None adds nothing.
            strength: in units of the state's norm.
        """
        self._direction, self._strength = direction, strength

    def __enter__(self) -> ResidualTap:
        self._handle = self._layer.register_forward_hook(self._hook)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handle.remove()

    def _hook(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        self.states = hidden.float()
        if self._direction is None:
            return output
        step = self._strength * self.states.norm(dim=-1, keepdim=True) * self._direction[:, None].to(self.states)
        moved = (self.states + step).to(hidden.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved
