"""What would be wrong: a plan over budget or not the best, a bound that doesn't hold, a wrong objective."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from vidgen.language.decoding.knapsack import (
    best_draft_length,
    branch_counts,
    cosine_acceptance_bound,
    expected_tokens,
    knapsack_weights,
    solve_knapsack,
    tokens_per_time,
)
from vidgen.runtime.errors import ConfigError

ITEMS, TOKENS = 8, 3


def additive_items(seed: int):
    """Each item adds a vector of its own, orthogonal to all others: the more of the sum is there, the more similar
    the state is, whatever comes later. So the more similar prefix stays the more similar one."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 0.2 + torch.rand(ITEMS, generator=generator)
    basis = torch.eye(ITEMS + 1)
    added = sizes[:, None] * basis[1:]
    states = [basis[0].expand(TOKENS, -1)]
    for item in range(ITEMS):
        states.append(states[-1] + added[item])
    return torch.stack(states), lambda item, branches: branches + added[item], added


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weights", [[1] * ITEMS, [2, 1] * (ITEMS // 2), [1, 3, 2, 1, 1, 2, 3, 1]])
def test_the_plans_are_those_of_brute_force(seed, weights):
    states, run_item, added = additive_items(seed)
    budget = sum(weights) // 2
    plans = solve_knapsack(states, run_item, weights, budget, tau=-1.0)
    best: dict[int, float] = {}
    for count in range(1, ITEMS - 3):
        for skip in combinations(range(2, ITEMS - 2), count):
            weight = sum(weights[item] for item in skip)
            if weight <= budget:
                final = states[-1] - added[list(skip)].sum(0)
                similarity = float(F.cosine_similarity(final, states[-1], dim=-1).mean())
                best[weight] = max(similarity, best.get(weight, -1.0))
    assert {plan.weight: plan.similarity for plan in plans} == pytest.approx(best, abs=1e-6)
    for plan in plans:
        assert plan.skip and plan.skip <= set(range(2, ITEMS - 2))
        assert plan.weight == sum(weights[item] for item in plan.skip) <= budget
        assert torch.allclose(plan.hidden_states, states[-1] - added[sorted(plan.skip)].sum(0), atol=1e-6)


def test_each_item_is_run_once_with_all_branches_and_never_more_than_foreseen():
    states, run_item, _ = additive_items(0)
    weights, calls = [2, 1] * (ITEMS // 2), {}

    def counting(item, branches):
        assert item not in calls
        calls[item] = len(branches)
        return run_item(item, branches)

    solve_knapsack(states, counting, weights, 6, tau=-1.0)
    foreseen = branch_counts(weights, 6)
    assert calls == {item: count for item, count in enumerate(foreseen) if count}


def test_states_that_lost_their_direction_are_given_up():
    states, run_item, _ = additive_items(1)
    everything = solve_knapsack(states, run_item, [1] * ITEMS, 4, tau=-1.0)
    threshold = sorted(plan.similarity for plan in everything)[1]
    strict = solve_knapsack(states, run_item, [1] * ITEMS, 4, tau=threshold)
    assert {plan.weight for plan in strict} < {plan.weight for plan in everything}
    assert all(plan.similarity >= threshold - 1e-6 for plan in strict)


def test_weights_are_multiples_of_the_shorter_time_up_to_a_cap():
    assert knapsack_weights(2.1, 1.0, cap=5) == (2, 1)
    assert knapsack_weights(1.0, 3.4, cap=5) == (1, 3)
    assert knapsack_weights(90.0, 1.0, cap=5) == (5, 1)
    with pytest.raises(ConfigError, match="above 0"):
        knapsack_weights(1.0, 0.0, cap=5)
    states, run_item, _ = additive_items(0)
    with pytest.raises(ConfigError, match="8 items need as many weights"):
        solve_knapsack(states, run_item, [1] * 7, 4)


def test_tokens_per_time_has_its_closed_forms():
    assert tokens_per_time(0.0, 4, 1.0, 2.0) == pytest.approx(1 / 6)  # every draft is lost
    assert tokens_per_time(1.0, 4, 1.0, 2.0) == pytest.approx(5 / 6)  # every draft is kept
    assert tokens_per_time(0.7, 0, 1.0, 2.0) == pytest.approx(1 / 2)  # plain decoding
    assert expected_tokens(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_tokens(1 - 1e-9, 3) == pytest.approx(expected_tokens(1.0, 3))


def test_the_best_draft_length_grows_with_the_acceptance():
    def best(acceptance):
        return best_draft_length(acceptance, 1.0, lambda tokens: 4.0 + 0.1 * tokens, range(11))[0]

    lengths = [best(acceptance) for acceptance in (0.0, 0.3, 0.6, 0.9, 1.0)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] == 10


def test_a_cosine_above_the_bound_keeps_the_best_token():
    """Lemma 4.1 in 100,000 trials, with states on one sphere that are just inside the bound."""
    generator = torch.Generator().manual_seed(0)
    width, trials = 12, 100_000
    head = torch.randn(20, width, generator=generator, dtype=torch.float64)
    hidden = torch.randn(trials, width, generator=generator, dtype=torch.float64)
    bound = cosine_acceptance_bound(hidden, head)
    cosine = bound + 1e-9 + torch.rand(trials, generator=generator, dtype=torch.float64) * (1 - bound) * 0.1
    unit = F.normalize(hidden, dim=-1)
    # A third of the directions lead to the token in second place, which are the worst there are.
    aside = torch.randn(trials, width, generator=generator, dtype=torch.float64)
    first, second = (hidden @ head.T).topk(2, dim=-1).indices.unbind(-1)
    aside[::3] = (head[second] - head[first])[::3]
    aside = F.normalize(aside - (aside * unit).sum(-1, keepdim=True) * unit, dim=-1)
    angle = cosine.clamp(-1, 1).arccos()[:, None]
    moved = hidden.norm(dim=-1, keepdim=True) * (angle.cos() * unit + angle.sin() * aside)
    assert torch.equal((moved @ head.T).argmax(-1), first)
    # Well outside the bound it does change.
    angle = 3 * angle
    moved = hidden.norm(dim=-1, keepdim=True) * (angle.cos() * unit + angle.sin() * aside)
    assert not torch.equal((moved @ head.T).argmax(-1), first)
