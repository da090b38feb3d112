"""Which items of a decoder to leave out: a knapsack over hidden states, and what a draft is worth per second.

"KnapSpec: Self-Speculative Decoding via Adaptive Layer Selection as a Knapsack Problem" (arXiv 2602.20217).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vidgen.runtime.errors import ConfigError


@dataclass(frozen=True)
class SkipPlan:
    """A choice of items to leave out.

    Args:
        skip: their numbers.
        weight: their summed weight.
        similarity: mean cosine of the last hidden states with the whole model's.
        hidden_states: `(tokens, width)` the states themselves.
    """

    skip: frozenset[int]
    weight: int
    similarity: float
    hidden_states: torch.Tensor


def knapsack_weights(attention_seconds: float, mlp_seconds: float, cap: int) -> tuple[int, int]:
    """Whole weights of an attention and an MLP item: multiples of the shorter one's time, up to a cap."""
    unit = min(attention_seconds, mlp_seconds)
    if unit <= 0:
        raise ConfigError(f"attention takes {attention_seconds} s and the MLP {mlp_seconds} s; both must be above 0")
    return min(cap, round(attention_seconds / unit)), min(cap, round(mlp_seconds / unit))


def solve_knapsack(
    states: torch.Tensor,
    run_item: Callable[[int, torch.Tensor], torch.Tensor],
    weights: Sequence[int],
    budget: int,
    tau: float = 0.5,
    edge: int = 2,
) -> list[SkipPlan]:
    """For each skipped weight, the choice of items whose hidden states stay most like the whole model's.

    Table g[i][j]: state after the first i items with skipped weight j. An item is run or skipped, and of two ways to
    the same place the one more similar to the whole model's state survives, so the result is optimal where the more
    similar prefix stays the more similar one. All branches of an item are run in one call.

    Args:
        states: `(items + 1, tokens, width)` of the whole model: embeddings, then after each item.
        run_item: `(item, (branches, tokens, width)) -> (branches, tokens, width)`.
        weights: of each item.
        budget: largest skipped weight.
        tau: states with a smaller mean cosine are given up.
        edge: items at either end that are never skipped: one layer's.

    Returns:
        The surviving choices that skip something, by rising weight.
    """
    count = len(states) - 1
    if len(weights) != count or min(weights) < 1:
        raise ConfigError(f"{count} items need as many weights of at least 1, not {list(weights)}")
    branches = {0: (1.0, states[edge], frozenset())}
    for item in range(edge, count):
        target = states[item + 1]
        found = {0: (1.0, target, frozenset())}  # nothing skipped: the whole model's own state
        held = [(weight, *branch[1:]) for weight, branch in branches.items()]
        changed = [entry for entry in held if entry[0]]
        candidates = []
        if changed:
            executed = run_item(item, torch.stack([state for _, state, _ in changed]))
            candidates += _with_similarity(target, [(w, x, s) for (w, _, s), x in zip(changed, executed, strict=True)])
        if item < count - edge:
            more = [(w + weights[item], x, s | {item}) for w, x, s in held if w + weights[item] <= budget]
            candidates += _with_similarity(target, more)
        for weight, similarity, state, skip in candidates:
            if similarity >= tau and (weight not in found or similarity > found[weight][0]):
                found[weight] = (similarity, state, skip)
        branches = found
    plans = [SkipPlan(skip, weight, similarity, state) for weight, (similarity, state, skip) in branches.items()]
    return sorted((plan for plan in plans if plan.skip), key=lambda plan: plan.weight)


def _with_similarity(
    target: torch.Tensor, entries: list[tuple[int, torch.Tensor, frozenset[int]]]
) -> list[tuple[int, float, torch.Tensor, frozenset[int]]]:
    if not entries:
        return []
    states = torch.stack([state for _, state, _ in entries])
    cosine = F.cosine_similarity(states.float(), target.float()[None], dim=-1).mean(dim=1).tolist()
    return [(weight, value, state, skip) for (weight, state, skip), value in zip(entries, cosine, strict=True)]


def branch_counts(weights: Sequence[int], budget: int, edge: int = 2) -> list[int]:
    """Branches that `solve_knapsack` runs at each item, at most: what a plan costs."""
    reachable, counts = {0}, [0] * len(weights)
    for item in range(edge, len(weights)):
        counts[item] = len(reachable) - 1
        if item < len(weights) - edge:
            reachable |= {weight + weights[item] for weight in reachable if weight + weights[item] <= budget}
    return counts


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Mean tokens of a round that drafts so many: 1 + a + ... + a^drafted."""
    if acceptance >= 1:
        return drafted + 1.0
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def tokens_per_time(acceptance: float, drafted: int, draft_seconds: float, target_seconds: float) -> float:
    """Objective of KnapSpec (eq. 3): expected tokens of a round by its seconds.

    Args:
        acceptance: probability that a draft token is confirmed.
        drafted: draft tokens of a round.
        draft_seconds: of one of them.
        target_seconds: of the pass that verifies them all.
    """
    return expected_tokens(acceptance, drafted) / (drafted * draft_seconds + target_seconds)


def best_draft_length(
    acceptance: float,
    draft_seconds: float,
    target_seconds: Callable[[int], float],
    lengths: Iterable[int],
) -> tuple[int, float]:
    """The draft length with the most tokens per second, and these.

    Args:
        acceptance: probability that a draft token is confirmed.
        draft_seconds: of one draft token.
        target_seconds: of verifying so many tokens, the last emitted one among them.
        lengths: to choose from.
    """
    speeds = {k: tokens_per_time(acceptance, k, draft_seconds, target_seconds(k + 1)) for k in lengths}
    best = max(speeds, key=speeds.__getitem__)
    return best, speeds[best]


def cosine_acceptance_bound(hidden_states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Cosine above which a state of the same norm has the same best token (arXiv 2602.20217, lemma 4.1).

    cos(x, x') >= 1 - margin(x)^2 / (2 |x|^2 max_j |w_best - w_j|^2) suffices.

    Args:
        hidden_states: `(..., width)` what goes into the head.
        head: `(vocabulary, width)` its weight.

    Returns:
        `(...)` cosines.
    """
    logits = hidden_states @ head.T
    best = logits.topk(2, dim=-1)
    margin = best.values[..., 0] - best.values[..., 1]
    # |w_best - w_j|^2 without a (..., vocabulary, width) tensor
    winner, norms = head[best.indices[..., 0]], head.square().sum(-1)
    distance = (winner.square().sum(-1, keepdim=True) + norms - 2 * winner @ head.T).amax(dim=-1)
    return 1 - margin.square() / (2 * hidden_states.square().sum(-1) * distance)
