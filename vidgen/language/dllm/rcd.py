"""Residual context: what a denoising step found out about the tokens it did not keep, handed to the next step.

Each distribution that is not committed becomes the mean of the model's own input embeddings under it, and is mixed
into the mask embedding with its normalized entropy as weight. Source: "Residual Context Diffusion Language Models", Hu
et al., arXiv 2601.22954v2: Eq. 1 to 3, Algorithms 1 and 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from vidgen.runtime.checks import check_not_negative, check_positive, check_whole
from vidgen.runtime.errors import ConfigError, suggestion

ALPHAS = ("entropy", "inverse", "confidence", "constant", "zero")
STARTS = ("cold", "self", "dirichlet", "reference")


@dataclass(frozen=True)
class ResidualContextConfig:
    """How residuals are made and mixed.

    Args:
        alpha: weight of the residual at a position with distribution p over V tokens: `"entropy"` is H(p) / log V as
            in the paper; `"inverse"` 1 - H(p) / log V, `"confidence"` max p, `"constant"` and `"zero"` are ablations.
        constant: the weight with `alpha="constant"`.
        residual_temperature: divides the logits that alpha is computed from, in generation alone: it brings the
            entropy of the target near that of the reference it was trained with.
        temper_residual: divide the logits of the residual itself too; Algorithm 2 does not.
        init: residuals of the first step of a block: `"cold"` none, `"self"` from one forward of the model on the
            masked block, `"reference"` from one of the reference model, `"dirichlet"` from random distributions.
        residual_topk: tokens that a residual is made of, the most probable ones, renormalized; null = all (exact).
        residual_chunk: positions whose probabilities exist at a time.
        detach_residual_embeddings: no gradient from residuals to the embedding table.
    """

    alpha: str = "entropy"
    constant: float = 0.3
    residual_temperature: float = 1.0
    temper_residual: bool = False
    init: str = "cold"
    residual_topk: int | None = None
    residual_chunk: int = 512
    detach_residual_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.alpha not in ALPHAS:
            raise ConfigError(f"alpha={self.alpha!r}: {suggestion(self.alpha, ALPHAS)}")
        if self.init not in STARTS:
            raise ConfigError(f"init={self.init!r}: {suggestion(self.init, STARTS)}")
        check_not_negative(constant=self.constant)
        if self.constant > 1:
            raise ConfigError(f"constant={self.constant}; allowed: 0 to 1")
        check_positive(residual_temperature=self.residual_temperature)
        check_whole(1, residual_chunk=self.residual_chunk)
        if self.residual_topk is not None:
            check_whole(1, residual_topk=self.residual_topk)


def residual_context(
    logits: torch.Tensor,
    embedding: torch.Tensor,
    mask_token_id: int | None,
    config: ResidualContextConfig = ResidualContextConfig(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residuals and their weights (Eq. 1 and 2).

    Args:
        logits: `(..., V)`, any float type; computed with in float32.
        embedding: `(V, D)` input embeddings of the model that will read the residuals.
        mask_token_id: a token that gets no probability, so that a residual is never the mask itself; None = none.
        config: see `ResidualContextConfig`.

    Returns:
        Residuals `(..., D)` in the type of `embedding`, and weights `(...)` in float32, from 0 to 1.
    """
    if logits.shape[-1] != embedding.shape[0]:
        raise ConfigError(
            f"logits over {logits.shape[-1]} tokens with an embedding table of {embedding.shape[0]}: "
            "both models must share one vocabulary"
        )
    if config.detach_residual_embeddings:
        embedding = embedding.detach()
    flat = logits.reshape(-1, logits.shape[-1])
    chunks = flat.split(config.residual_chunk)
    # Probabilities are made again in the backward pass where keeping those of all positions would undo the chunks.
    again = len(chunks) > 1 and torch.is_grad_enabled() and (embedding.requires_grad or logits.requires_grad)
    parts = [
        checkpoint(_chunk_context, chunk, embedding, mask_token_id, config, use_reentrant=False)
        if again
        else _chunk_context(chunk, embedding, mask_token_id, config)
        for chunk in chunks
    ]
    delta, alpha = (torch.cat(column) for column in zip(*parts, strict=True))
    return delta.reshape(*logits.shape[:-1], -1), alpha.reshape(logits.shape[:-1])


def _chunk_context(
    logits: torch.Tensor, embedding: torch.Tensor, mask_token_id: int | None, config: ResidualContextConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.float()
    if mask_token_id is not None:
        logits = logits.index_fill(-1, torch.tensor([mask_token_id], device=logits.device), -math.inf)
    tempered = (logits / config.residual_temperature).softmax(-1)
    alpha = residual_weight(tempered, config)
    p = tempered if config.temper_residual or config.residual_temperature == 1 else logits.softmax(-1)  # (n, V)
    if config.residual_topk is None:
        return p.to(embedding.dtype) @ embedding, alpha
    top, tokens = p.topk(min(config.residual_topk, p.shape[-1]), dim=-1)
    top = (top / top.sum(-1, keepdim=True)).to(embedding.dtype)
    return (top[:, None, :] @ embedding[tokens])[:, 0], alpha  # (n, 1, k) @ (n, k, D)


def residual_weight(probabilities: torch.Tensor, config: ResidualContextConfig) -> torch.Tensor:
    """Weights `(...)` of residuals from distributions `(..., V)` in float32."""
    if config.alpha == "constant":
        return probabilities.new_full(probabilities.shape[:-1], config.constant)
    if config.alpha == "zero":
        return probabilities.new_zeros(probabilities.shape[:-1])
    if config.alpha == "confidence":
        return probabilities.amax(-1)
    # entr is -p log p with its limit 0 at p = 0.
    entropy = torch.special.entr(probabilities).sum(-1) / math.log(probabilities.shape[-1])
    entropy = entropy.clamp(0, 1)
    return 1 - entropy if config.alpha == "inverse" else entropy


def inject_residual(
    inputs_embeds: torch.Tensor, mask: torch.Tensor, delta: torch.Tensor, alpha: torch.Tensor
) -> torch.Tensor:
    """Mixes residuals into the embeddings of masked positions (Eq. 3); all others are left as they are, bit for bit.

    Args:
        inputs_embeds: `(batch, length, D)`, the mask's embedding at masked positions.
        mask: bool `(batch, length)`.
        delta: `(batch, length, D)` residuals.
        alpha: `(batch, length)` weights; where one is 0 the mask's embedding stays, bit for bit.
    """
    weight = alpha[..., None]
    mixed = ((1 - weight) * inputs_embeds.float() + weight * delta.float()).to(inputs_embeds.dtype)
    return torch.where(mask[..., None], mixed, inputs_embeds)
