"""Losses of masked diffusion language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from vidgen.runtime.checks import check_not_negative, check_whole
from vidgen.runtime.errors import ConfigError


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


@dataclass(frozen=True)
class MaskAgnosticConfig:
    """How predictions are kept from depending on the number of masks after the text.

    Args:
        alpha: weight of the cross-entropy.
        beta: weight of the total variation; 0 leaves training with random numbers of extra masks.
        max_extra_masks: most masks that are appended; about as many as generation will append.
        p_min: least probability with which tokens are hidden.
        stop_gradient: `"fewer"` gives no gradient to the prediction with fewer masks, which then teaches the other;
            null gives it to both.
        tv_chunk: positions whose probabilities exist at a time.
    """

    alpha: float = 1.0
    beta: float = 1.0
    max_extra_masks: int = 256
    p_min: float = 1e-3
    stop_gradient: str | None = None
    tv_chunk: int = 512

    def __post_init__(self) -> None:
        check_not_negative(alpha=self.alpha, beta=self.beta)
        if self.alpha == self.beta == 0:
            raise ConfigError("alpha=0 and beta=0: nothing would be trained")
        check_whole(1, max_extra_masks=self.max_extra_masks, tv_chunk=self.tv_chunk)
        if not 0 < self.p_min <= 1:
            raise ConfigError(f"p_min={self.p_min}; allowed: above 0, up to 1")
        if self.stop_gradient not in (None, "fewer"):
            raise ConfigError(f"stop_gradient={self.stop_gradient!r}; allowed: 'fewer', null")


@dataclass
class MaskAgnosticLoss:
    """A loss and its parts.

    Args:
        loss: alpha * ce + beta * tv.
        ce: cross-entropy, weighted by 1 / p.
        tv: total variation, weighted by p.
        n_masked: `(batch,)` hidden tokens.
        logits: `(2, hidden tokens, vocab)` of both views, in the order of `hidden.nonzero()`.
        distance: mean total variation of the hidden tokens, without weights.
    """

    loss: torch.Tensor
    ce: torch.Tensor
    tv: torch.Tensor
    n_masked: torch.Tensor
    logits: torch.Tensor
    distance: torch.Tensor


def draw_extra_masks(count: int, most: int, generator: torch.Generator) -> torch.Tensor:
    """Two different numbers of masks from 0 to `most` for each of `count` texts, `(count, 2)`."""
    device = generator.device
    first = torch.randint(most + 1, (count,), generator=generator, device=device)
    second = torch.randint(most, (count,), generator=generator, device=device)
    return torch.stack([first, second + (second >= first)], dim=1)


def append_masks(
    input_ids: torch.Tensor, exists: torch.Tensor, count: torch.Tensor, width: int, mask_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts with masks right behind them; what comes after these is padding that nobody sees.

    Args:
        input_ids: `(batch, length)`, padded on the right.
        exists: bool `(batch, length)`, False for padding.
        count: `(batch,)` masks to append.
        width: columns of the result.
        mask_token_id: the mask.

    Returns:
        tokens and bool mask of existing ones, both `(batch, width)`.
    """
    place = torch.arange(width, device=input_ids.device)
    ends = exists.sum(1, keepdim=True)
    tokens = F.pad(input_ids, (0, width - input_ids.shape[1]), value=mask_token_id)
    seen = place < ends + count[:, None]
    return tokens.masked_fill(seen & (place >= ends), mask_token_id), seen


def total_variation(logits_a: torch.Tensor, logits_b: torch.Tensor, chunk: int = 512) -> torch.Tensor:
    """Half the sum of |p_a - p_b| over the vocabulary, in float32: 0 for equal distributions, 1 for disjoint ones.

    Args:
        logits_a: `(positions, vocab)`.
        logits_b: as `logits_a`.
        chunk: positions whose probabilities exist at a time; the backward pass computes them again.

    Returns:
        `(positions,)`.
    """

    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # Rounding can lead above 1.
        return (0.5 * (a.float().softmax(-1) - b.float().softmax(-1)).abs().sum(-1)).clamp(max=1)

    pairs = zip(logits_a.split(chunk), logits_b.split(chunk), strict=True)
    return torch.cat([checkpoint(distance, a, b, use_reentrant=False) for a, b in pairs])


def mask_agnostic_loss(
    model: Any,
    input_ids: torch.Tensor,
    hidden: torch.Tensor,
    p: torch.Tensor,
    extra_masks: torch.Tensor,
    config: MaskAgnosticConfig,
    attention_mask: torch.Tensor | None = None,
) -> MaskAgnosticLoss:
    """Cross-entropy of hidden tokens under two numbers of appended masks, and how far both predictions differ.

    Source: "Masks Can Be Distracting: On Context Comprehension in Diffusion Language Models", Piskorz et al., arXiv
    2511.21338: the mean over texts of alpha * L_CE + beta * L_TV. A text without hidden tokens adds 0. Appended masks
    are never scored.

    Args:
        model: with the forward of `MaskedDiffusionLM`.
        input_ids: `(batch, length)` the true tokens, padded on the right.
        hidden: bool `(batch, length)`, the tokens that stand as masks in both views.
        p: `(batch,)` the probability with which they were hidden.
        extra_masks: `(batch, 2)` masks behind the text in either view.
        config: see `MaskAgnosticConfig`.
        attention_mask: `(batch, length)`, 0 where padding stands; None = no padding.

    Raises:
        ConfigError: texts and masks together are longer than the model's positions.
    """
    batch, length = input_ids.shape
    mask_id = model.config.mask_token_id
    width, limit = length + int(extra_masks.max()), model.config.max_position_embeddings
    if width > limit:
        raise ConfigError(
            f"{length} tokens and {width - length} extra masks; the model has positions for {limit}: "
            f"allowed are max_extra_masks up to {limit - length}"
        )
    exists = torch.ones_like(hidden) if attention_mask is None else attention_mask.bool()
    noisy = input_ids.masked_fill(hidden, mask_id)
    # Both views have one width, so that one forward computes them.
    views = [append_masks(noisy, exists, count, width, mask_id) for count in extra_masks.unbind(1)]
    tokens, seen = (torch.cat(parts) for parts in zip(*views, strict=True))
    logits = model(input_ids=tokens, attention_mask=seen, logits_positions=slice(0, length)).logits
    logits = logits.unflatten(0, (2, batch))

    n_masked = hidden.sum(1)
    # L_CE = -1 / (2 p n_m) sum_i sum_j log p(x_j | x_i)
    ce = torch.stack([mdlm_loss(view, input_ids, hidden, p, n_masked) for view in logits]).mean()
    # L_TV = p / n_m sum_j TV(p(. | x_1)_j, p(. | x_2)_j)
    row, _ = hidden.nonzero(as_tuple=True)
    first, second = scored = logits[:, hidden]  # (2, hidden tokens, vocab)
    if config.stop_gradient == "fewer":
        fewer = (extra_masks[:, 0] < extra_masks[:, 1])[row, None]
        first, second = torch.where(fewer, first.detach(), first), torch.where(fewer, second, second.detach())
    distances = total_variation(first, second, config.tv_chunk)
    tv = (distances * (p / n_masked.clamp(min=1))[row]).sum() / batch
    distance = distances.detach().sum() / max(1, len(row))
    return MaskAgnosticLoss(config.alpha * ce + config.beta * tv, ce, tv, n_masked, scored.detach(), distance)
