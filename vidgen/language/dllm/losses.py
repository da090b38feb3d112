"""Losses of masked diffusion language models."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def draw_masks(
    trainable: torch.Tensor, generator: torch.Generator, p_min: float = 1e-3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens are hidden: each with its row's probability p ~ U(p_min, 1) (LLaDA, arXiv 2502.09992, Algorithm 1).

    Args:
        trainable: bool `(batch, length)`; only these are ever hidden.
        generator: source of the draws, on the same device.

    Returns:
        bool `(batch, length)`, and p `(batch,)`.
    """
    device = trainable.device
    p = p_min + (1 - p_min) * torch.rand(len(trainable), generator=generator, device=device)
    hidden = torch.rand(trainable.shape, generator=generator, device=device) < p[:, None]
    return hidden & trainable, p


def mdlm_loss(
    logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, p: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Mean over rows of 1 / (p * length) times the sum of -log p(token) over hidden tokens, in float32.

    Args:
        logits: `(batch, length, vocab)`.
        labels: `(batch, length)` the true tokens.
        mask: bool `(batch, length)`, the hidden tokens; a row without any adds 0.
        p: `(batch,)` the probability with which they were hidden.
        lengths: `(batch,)` tokens that could have been hidden.
    """
    row, _ = mask.nonzero(as_tuple=True)
    # Hidden positions first: float32 logits of all positions would take the most memory of a training step.
    losses = F.cross_entropy(logits[mask].float(), labels[mask], reduction="none")
    weights = 1 / (p * lengths.clamp(min=1))
    return (losses * weights[row]).sum() / len(labels)
