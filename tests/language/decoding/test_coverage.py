"""What would be wrong: a pass@k that isn't what choosing k samples gives, an area that isn't a mean height."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest

from vidgen.language.decoding.coverage import (
    bootstrap_ci,
    coverage_auc,
    first_k_curves,
    pass_at_k,
    pass_at_k_curves,
)
from vidgen.runtime.errors import ConfigError, VidgenError


def test_pass_at_k_is_the_share_of_choices_with_a_correct_sample():
    for samples in range(1, 11):
        for correct in range(samples + 1):
            right = [index < correct for index in range(samples)]
            by_k = []
            for k in range(1, samples + 1):
                chosen = list(combinations(right, k))
                by_k.append(pass_at_k(samples, correct, k))
                assert by_k[-1] == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)
            assert by_k == sorted(by_k) and by_k[0] == pytest.approx(correct / samples)


def test_curves_are_those_of_each_problem():
    correct = np.array([[False, True, False, True], [False] * 4, [True] * 4])
    curves = pass_at_k_curves(correct, 3)
    assert curves.tolist() == [[pass_at_k(4, count, k) for k in (1, 2, 3)] for count in (2, 0, 4)]
    assert first_k_curves(correct).tolist() == [[0, 1, 1, 1], [0] * 4, [1] * 4]
    # The mean over all orders of the samples is what pass@k expects.
    orders = [first_k_curves(correct[:, list(order)], 3) for order in permutations(range(4))]
    np.testing.assert_allclose(np.mean(orders, 0), curves)


def test_the_area_is_the_mean_height():
    for scale in ("linear", "log2"):
        for largest in (1, 2, 7):
            assert coverage_auc(np.full((3, largest), 0.37), scale) == pytest.approx([37.0] * 3)
    assert coverage_auc(np.array([0.0, 0.5, 1.0])) == pytest.approx(50.0)
    # In log2 of k, from 0 over 1 to log2(3).
    expected = 100 * (0.25 * 1 + 0.75 * (np.log2(3) - 1)) / np.log2(3)
    assert coverage_auc(np.array([0.0, 0.5, 1.0]), "log2") == pytest.approx(expected)


def test_a_bootstrap_interval_is_as_wide_as_the_mean_is_uncertain():
    values = np.random.default_rng(1).normal(3, 2, 400)
    low, high = bootstrap_ci(values, seed=4)
    assert low < values.mean() < high and high - low == pytest.approx(2 * 1.96 * 2 / 20, rel=0.15)
    assert bootstrap_ci(values, seed=4) == (low, high) != bootstrap_ci(values, seed=5)
    assert bootstrap_ci(np.full(9, 2.5)) == (2.5, 2.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: pass_at_k(4, 5, 1),
        lambda: pass_at_k(4, 2, 5),
        lambda: pass_at_k(4, 2, 0),
        lambda: pass_at_k_curves(np.zeros((2, 3))),
        lambda: pass_at_k_curves(np.zeros((2, 3), dtype=bool), 4),
        lambda: first_k_curves(np.zeros((0, 3), dtype=bool)),
        lambda: coverage_auc(np.zeros(3), "log"),
        lambda: bootstrap_ci(np.zeros(0)),
        lambda: bootstrap_ci(np.zeros(3), confidence=1.0),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(call):
    with pytest.raises((ConfigError, VidgenError), match="allowed|must be|give|log2"):
        call()
