"""Coverage: how often at least one of k samples is right, and the area under that curve."""

from __future__ import annotations

from math import comb

import numpy as np

from vidgen.runtime.checks import check_whole
from vidgen.runtime.errors import ConfigError, suggestion

SCALES = ("linear", "log2")


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that one of k samples, drawn without return from `samples`, is among the correct ones.

    Unbiased for exchangeable samples: "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374, eq. 1).
    """
    check_whole(1, samples=samples)
    check_whole(0, samples, correct=correct)
    check_whole(1, samples, k=k)
    return 1 - comb(samples - correct, k) / comb(samples, k)


def pass_at_k_curves(correct: np.ndarray, largest: int | None = None) -> np.ndarray:
    """pass@1 to pass@`largest` of every problem, `(problems, largest)`.

    Args:
        correct: bool `(problems, samples)`.
        largest: k; by default the number of samples.
    """
    correct = _checked(correct)
    samples = correct.shape[1]
    largest = samples if largest is None else largest
    check_whole(1, samples, largest=largest)
    by_count = np.array(
        [[pass_at_k(samples, count, k) for k in range(1, largest + 1)] for count in range(samples + 1)]
    )
    return by_count[correct.sum(1)]


def first_k_curves(correct: np.ndarray, largest: int | None = None) -> np.ndarray:
    """Whether one of the first k samples is correct, `(problems, largest)`.

    For samples that depend on those before them, and so aren't exchangeable.
    """
    correct = _checked(correct)
    largest = correct.shape[1] if largest is None else largest
    check_whole(1, correct.shape[1], largest=largest)
    return np.maximum.accumulate(correct[:, :largest], axis=1).astype(float)


def coverage_auc(curves: np.ndarray, scale: str = "linear") -> np.ndarray:
    """Mean height of curves over k, in percent; of a constant curve 100 times its constant.

    Args:
        curves: `(..., largest)`, k from 1.
        scale: of k, `"linear"` or `"log2"`.

    Returns:
        `(...)`: the area of a mean curve is the mean of the areas.
    """
    if scale not in SCALES:
        raise ConfigError(f"scale={scale!r}: {suggestion(scale, SCALES)}")
    k = np.arange(1, curves.shape[-1] + 1, dtype=float)
    if len(k) == 1:
        return 100 * curves[..., 0]
    places = k if scale == "linear" else np.log2(k)
    return 100 * np.trapezoid(curves, places, axis=-1) / (places[-1] - places[0])


def bootstrap_ci(
    values: np.ndarray, seed: int = 0, confidence: float = 0.95, resamples: int = 2000
) -> tuple[float, float]:
    """Percentile interval of a mean over problems; of differences of two methods on the same problems it is paired.

    Args:
        values: `(problems,)`.
        seed: of the resampling.
        confidence: share of the resampled means inside.
        resamples: how many.
    """
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or not len(values):
        raise ConfigError(f"values have the shape {values.shape}; give one number per problem")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence}; it must be between 0 and 1")
    check_whole(1, resamples=resamples)
    drawn = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    low, high = np.percentile(values[drawn].mean(1), [50 * (1 - confidence), 50 * (1 + confidence)])
    return float(low), float(high)


def _checked(correct: np.ndarray) -> np.ndarray:
    correct = np.asarray(correct)
    if correct.ndim != 2 or 0 in correct.shape or correct.dtype != bool:
        raise ConfigError(
            f"correct is {correct.dtype} of shape {correct.shape}; give bool (problems, samples), none of them 0"
        )
    return correct
