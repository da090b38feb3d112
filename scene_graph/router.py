"""Which frames are likely of the long tail: a small network on what a draft and its neighbors say.

A frame is worth a second look if its predictor was unsure, believed a little in rare predicates, wrote triplets that
are rare in training, or if similar training frames hold rare predicates. Features of training frames have to come
from a predictor that hasn't seen their take: on its own training frames it is sure of everything, and a router would
learn nothing from that.

Of the router of SGG-ICL only the purpose is public; features, loss and the choice of the threshold are filled in here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from scene_graph.metrics import auc
from scene_graph.predictors.base import CONFIDENCE_FEATURES, TAIL_MASS_FEATURES, Prediction, token_features
from scene_graph.schema import SceneGraph, SceneGraphError, TailSplit, Triplet, Vocabulary, triplet_iou
from vidgen.runtime.checkpoint import atomic_directory, load_safetensors, save_safetensors
from vidgen.runtime.errors import suggestion

if TYPE_CHECKING:
    from scene_graph.retrieval import Candidate

logger = logging.getLogger(__name__)

PRIOR_FEATURES = ("max_surprise", "mean_surprise")
NEIGHBOR_FEATURES = ("neighbor_tail_vote", "neighbor_iou")
DRAFT_FEATURES = ("draft_has_tail", "draft_has_holding", "draft_triplets")
FEATURE_NAMES = (*CONFIDENCE_FEATURES, *TAIL_MASS_FEATURES, *PRIOR_FEATURES, *NEIGHBOR_FEATURES, *DRAFT_FEATURES)

# Retrieved frames that vote.
NUM_NEIGHBORS = 8
# The predicate that nearly always goes with a surgical action.
ACTION_COMPANION = "holding"

LOSSES = ("bce", "focal")
TARGETS = ("tail", "utility")
# Temperatures that calibration tries; beyond them a probability says nothing, or everything.
TEMPERATURES = np.geomspace(0.01, 1000.0, 901)
# A probability is never quite 0 or 1, so that the thresholds 0 and 1 send all frames, or none.
MIN_PROBABILITY = 1e-7
# How much more probable its own words may be to a predictor on the router's training frames than on held-out ones.
MAX_CONFIDENCE_GAP = 0.1

SETTINGS_NAME = "router.json"
WEIGHTS_NAME = "router.safetensors"


@dataclass(frozen=True)
class RelationPrior:
    """How often each triplet is among the training labels.

    Args:
        vocabulary: of the triplets.
        counts: of the triplets that occur.
    """

    vocabulary: Vocabulary
    counts: Mapping[Triplet, int]

    @classmethod
    def from_graphs(cls, graphs: Iterable[SceneGraph], vocabulary: Vocabulary) -> RelationPrior:
        """Count the triplets of training graphs."""
        return cls(vocabulary, Counter(triplet for graph in graphs for triplet in graph))

    def __post_init__(self) -> None:
        # All triplets that can be written are one more sighting each (Laplace), so nothing is impossible.
        possible = len(self.vocabulary.entities) ** 2 * len(self.vocabulary.predicates)
        object.__setattr__(self, "_total", sum(self.counts.values()) + possible)

    def surprise(self, triplet: Triplet) -> float:
        """`-log((n + 1) / (N + A))` in nats: n of the N labeled triplets are this one, A triplets are possible."""
        return -math.log((self.counts.get(triplet, 0) + 1) / self._total)


def router_features(
    predictions: Sequence[Prediction],
    candidates: Sequence[Sequence[Candidate]],
    tail_split: TailSplit,
    prior: RelationPrior,
) -> np.ndarray:
    """What the router is told of each frame.

    An empty draft was sure of nothing and surprises nobody: its features of tokens and triplets are those of
    `TokenStats` without triplets, and 0.

    Args:
        predictions: drafts, without examples.
        candidates: retrieved for each draft, best first, none of the draft's own take.
        tail_split: which predicates are rare.
        prior: of the training labels, `SceneIndex.prior`.

    Returns:
        float64 `(predictions, len(FEATURE_NAMES))`, in the order of `FEATURE_NAMES`.

    Raises:
        SceneGraphError: not one list of candidates per draft, or a draft over another vocabulary.
    """
    if len(predictions) != len(candidates):
        raise SceneGraphError(
            f"{len(predictions)} drafts and {len(candidates)} lists of candidates; give one for each draft."
        )
    rows = np.empty((len(predictions), len(FEATURE_NAMES)))
    for row, (draft, found) in enumerate(zip(predictions, candidates)):
        surprises = [prior.surprise(triplet) for triplet in draft.graph] or [0.0]
        values = {
            **draft.token_stats.confidence(),
            **token_features(draft.token_stats.predicate_probs, prior.vocabulary, tail_split),
            "max_surprise": max(surprises),
            "mean_surprise": sum(surprises) / len(surprises),
            "neighbor_tail_vote": _tail_vote(found[:NUM_NEIGHBORS], tail_split),
            "neighbor_iou": triplet_iou(draft.graph, found[0].graph) if found else 0.0,
            "draft_has_tail": tail_split.is_tail(draft.graph),
            "draft_has_holding": any(triplet.predicate == ACTION_COMPANION for triplet in draft.graph),
            "draft_triplets": len(draft.graph),
        }
        rows[row] = [values[name] for name in FEATURE_NAMES]
    return rows


def _tail_vote(neighbors: Sequence[Candidate], tail_split: TailSplit) -> float:
    """Share of the neighbors with a rare predicate, weighted by score; one below 0, the average, counts nothing."""
    if not neighbors:
        return 0.0
    weights = np.maximum([neighbor.score for neighbor in neighbors], 0.0)
    if not weights.sum():
        weights = np.ones(len(neighbors))
    return float(weights @ [tail_split.is_tail(neighbor.graph) for neighbor in neighbors] / weights.sum())


def tail_labels(graphs: Iterable[SceneGraph], tail_split: TailSplit) -> np.ndarray:
    """Which frames have a rare predicate among their labels, bool `(frames,)`: the router's target `"tail"`."""
    return np.array([tail_split.is_tail(graph) for graph in graphs], bool)


def utility_labels(
    drafts: Sequence[SceneGraph],
    answers: Sequence[SceneGraph],
    graphs: Sequence[SceneGraph],
    weights: Mapping[str, float] | None = None,
) -> np.ndarray:
    """Which frames a second look brings closer to their labels, bool `(frames,)`: the router's target `"utility"`.

    Args:
        drafts: without examples.
        answers: with examples.
        graphs: labels.
        weights: of predicates, for `triplet_iou`.
    """
    return np.array(
        [
            triplet_iou(answer, graph, weights) > triplet_iou(draft, graph, weights)
            for draft, answer, graph in zip(drafts, answers, graphs, strict=True)
        ],
        bool,
    )


@dataclass(frozen=True)
class RouterConfig:
    """How a router is fitted.

    Attributes:
        target: what its labels say: `"tail"`, the frame has a rare predicate (`tail_labels`), or `"utility"`, a second
            look helps (`utility_labels`).
        hidden: units of the hidden layer.
        loss: `"bce"`, cross-entropy in which both classes weigh the same, or `"focal"` (arXiv 1708.02002).
        gamma: exponent of the focal loss.
        weight_decay: factor of the sum of the squared weights, divided by the number of frames, in the loss.
        iterations: most steps of the optimizer, each with all frames; a few hundred frames are over-fitted by more.
        seed: of the first weights.
    """

    target: Literal["tail", "utility"] = "tail"
    hidden: int = 64
    loss: Literal["bce", "focal"] = "bce"
    gamma: float = 2.0
    weight_decay: float = 20.0
    iterations: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("target", TARGETS), ("loss", LOSSES)):
            if getattr(self, name) not in allowed:
                raise SceneGraphError(f"{name}={getattr(self, name)!r}: {suggestion(getattr(self, name), allowed)}.")
        if self.hidden < 1 or self.iterations < 1 or self.gamma < 0 or self.weight_decay < 0:
            raise SceneGraphError(
                f"hidden={self.hidden}, iterations={self.iterations}, gamma={self.gamma}, "
                f"weight_decay={self.weight_decay}; allowed: at least 1, 1, 0 and 0."
            )


@dataclass(frozen=True)
class ThresholdRow:
    """What a threshold would do to held-out frames.

    Attributes:
        threshold: frames above it get a second look.
        routed: share of the frames that do.
        macro_f1: of the merged answers.
        head_f1: of their frequent predicates.
        is_allowed: whether the head stays good enough, and the share small enough.
    """

    threshold: float
    routed: float
    macro_f1: float
    head_f1: float
    is_allowed: bool


class AdaptiveRouter:
    """Probability that a frame is of the long tail: `sigmoid(W2 GELU(W1 LayerNorm(r)) / T)`.

    The features r are standardized by the mean and deviation of the frames it was fitted to.

    Args:
        config: how it is fitted.

    Attributes:
        threshold: frames with a higher probability get a second look.
        temperature: T, 1 until it is calibrated.
    """

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        count = len(FEATURE_NAMES)
        self.network = self._new_network()
        self.mean, self.std = np.zeros(count), np.ones(count)
        self.temperature, self.threshold = 1.0, 0.5
        self.train_confidence: float | None = None

    def _new_network(self) -> nn.Sequential:
        count, hidden = len(FEATURE_NAMES), self.config.hidden
        with torch.random.fork_rng([]):
            torch.manual_seed(self.config.seed)  # layers draw their weights from the global generator
            layers = (nn.LayerNorm(count), nn.Linear(count, hidden), nn.GELU(), nn.Linear(hidden, 1))
        return nn.Sequential(*layers).double()

    def fit(self, features: np.ndarray, labels: Sequence[bool] | np.ndarray) -> AdaptiveRouter:
        """Learn from labeled frames, out of fold.

        The loss is minimized by L-BFGS over all frames at once; the same frames and seed give the same weights.

        Args:
            features: `(frames, features)`, of drafts whose predictor hasn't seen these frames' takes.
            labels: bool `(frames,)`, as `RouterConfig.target` says.

        Returns:
            Itself.

        Raises:
            SceneGraphError: features of another shape or not finite, or labels of one kind only.
        """
        features, labels = self._checked(features, labels)
        config = self.config
        self.mean = features.mean(axis=0)
        # What never varies says nothing, and mustn't become large where it does vary.
        spread = features.std(axis=0)
        self.std = np.where(spread > 1e-9 * np.maximum(1.0, np.abs(self.mean)), spread, np.inf)
        self.temperature, self.threshold = 1.0, 0.5
        self.train_confidence = _confidence(features)
        inputs = torch.from_numpy((features - self.mean) / self.std)
        targets = torch.from_numpy(labels.astype(np.float64))
        positive_weight = (len(targets) - targets.sum()) / targets.sum()
        self.network = self._new_network()
        matrices = [layer.weight for layer in self.network if isinstance(layer, nn.Linear)]
        optimizer = torch.optim.LBFGS(
            self.network.parameters(), max_iter=config.iterations, line_search_fn="strong_wolfe"
        )

        def objective() -> torch.Tensor:
            optimizer.zero_grad()
            logits = self.network(inputs)[:, 0]
            losses = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=positive_weight, reduction="none")
            if config.loss == "focal":
                probability_of_truth = torch.sigmoid(torch.where(targets > 0, logits, -logits))
                losses = (1 - probability_of_truth) ** config.gamma * losses
            penalty = sum(matrix.square().sum() for matrix in matrices) / len(targets)
            loss = losses.mean() + config.weight_decay * penalty
            loss.backward()
            return loss

        optimizer.step(objective)
        return self

    def calibrate(self, features: np.ndarray, labels: Sequence[bool] | np.ndarray) -> float:
        """Choose the temperature that makes probabilities honest on held-out frames (arXiv 1706.04599).

        It keeps the order of the frames. A predictor that is much surer of its words on the frames that the router was
        fitted to than on these has seen them in training; then a warning says so.

        Args:
            features: of held-out frames.
            labels: of these.

        Returns:
            The area under the ROC curve on these frames.

        Raises:
            SceneGraphError: as `fit`.
        """
        features, labels = self._checked(features, labels)
        confidence = _confidence(features)
        if self.train_confidence is not None and self.train_confidence - confidence > MAX_CONFIDENCE_GAP:
            warnings.warn(
                f"on the frames the router was fitted to, the predictor gave its words a probability of "
                f"{self.train_confidence:.2f}, on held-out frames {confidence:.2f}: it was probably trained on the "
                "former. Fit the router to takes that the predictor hasn't seen.",
                stacklevel=2,
            )
        logits = self._logits(features)
        signed = np.where(labels, logits, -logits)
        losses = [np.logaddexp(0, -signed / temperature).mean() for temperature in TEMPERATURES]
        self.temperature = float(TEMPERATURES[int(np.argmin(losses))])
        area = auc(labels, logits)
        logger.info("router: AUC %.3f on %d held-out frames, temperature %.2f", area, len(labels), self.temperature)
        return area

    def choose_threshold(
        self,
        features: np.ndarray,
        evaluate: Callable[[np.ndarray], tuple[float, float]],
        epsilon: float = 0.005,
        budget: float | None = None,
        num_thresholds: int = 48,
    ) -> list[ThresholdRow]:
        """Set the threshold with the best macro F1 that doesn't harm the head, on held-out frames.

        Among equally good ones the highest is taken, which sends the fewest frames. Sending no frame is always
        allowed, so there always is one.

        Args:
            features: of held-out frames.
            evaluate: gets which frames are routed, bool `(frames,)`; gives the macro F1 and the head F1 of drafts and
                second answers merged accordingly.
            epsilon: how much head F1 may be lost against drafts alone.
            budget: largest share of the frames that may be routed.
            num_thresholds: how many are tried, at quantiles of the probabilities.

        Returns:
            What was tried, the highest threshold first.

        Raises:
            SceneGraphError: a budget outside [0, 1], or a score that is no number.
        """
        if budget is not None and not 0 <= budget <= 1:
            raise SceneGraphError(f"budget={budget}; it is a share of the frames, in [0, 1].")
        probabilities = self.predict_proba(features)
        ordered = np.unique(probabilities)
        between = (ordered[1:] + ordered[:-1]) / 2
        if len(between) > num_thresholds:
            between = between[np.linspace(0, len(between) - 1, num_thresholds).round().astype(int)]
        rows: list[ThresholdRow] = []
        for threshold in (1.0, *between[::-1], 0.0):
            routed = probabilities > threshold
            macro, head = evaluate(routed)
            if math.isnan(macro) or math.isnan(head):
                raise SceneGraphError(
                    f"macro F1 {macro} and head F1 {head} with {int(routed.sum())} routed frames; the threshold needs "
                    "frames with labels of both parts."
                )
            base_head = rows[0].head_f1 if rows else head
            share = float(routed.mean())
            allowed = head >= base_head - epsilon and (budget is None or share <= budget)
            rows.append(ThresholdRow(float(threshold), share, macro, head, allowed))
        # max() keeps the first of equals, and the rows begin with the highest threshold.
        self.threshold = max((row for row in rows if row.is_allowed), key=lambda row: row.macro_f1).threshold
        return rows

    def predict_proba(self, features: np.ndarray) -> np.ndarray:
        """Probability of each frame to be of the long tail, float64 `(frames,)`, strictly between 0 and 1.

        Raises:
            SceneGraphError: features of another shape, or not finite.
        """
        logits = self._logits(self._checked(features, None)[0]) / self.temperature
        probabilities = 1 / (1 + np.exp(-np.clip(logits, -500, 500)))
        return np.clip(probabilities, MIN_PROBABILITY, 1 - MIN_PROBABILITY)

    @torch.no_grad()
    def _logits(self, features: np.ndarray) -> np.ndarray:
        return self.network(torch.from_numpy((features - self.mean) / self.std))[:, 0].numpy()

    @staticmethod
    def _checked(features: np.ndarray, labels: Any) -> tuple[np.ndarray, np.ndarray]:
        features = np.asarray(features, np.float64)
        if features.ndim != 2 or features.shape[1] != len(FEATURE_NAMES) or not np.isfinite(features).all():
            raise SceneGraphError(
                f"features have the shape {features.shape}; allowed: finite numbers (frames, {len(FEATURE_NAMES)}), "
                "as router_features makes them."
            )
        if labels is None:
            return features, np.zeros(len(features), bool)
        labels = np.asarray(labels).astype(bool)
        if labels.shape != features.shape[:1] or labels.all() or not labels.any():
            raise SceneGraphError(
                f"labels have the shape {labels.shape}, {int(labels.sum())} of them true; allowed: one for each of "
                f"the {len(features)} frames, some true and some false."
            )
        return features, labels

    # --- files --------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Write weights and settings; the folder appears whole or not at all."""
        settings = {
            "features": list(FEATURE_NAMES),
            "config": dataclasses.asdict(self.config),
            "temperature": self.temperature,
            "threshold": self.threshold,
            "train_confidence": self.train_confidence,
        }
        tensors = {
            **self.network.state_dict(),
            "features.mean": torch.from_numpy(self.mean),
            "features.std": torch.from_numpy(self.std),
        }
        with atomic_directory(folder) as target:
            save_safetensors(tensors, target / WEIGHTS_NAME)
            (target / SETTINGS_NAME).write_text(json.dumps(settings, indent=1), encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike) -> AdaptiveRouter:
        """Load what `save_pretrained` wrote.

        Raises:
            SceneGraphError: the folder holds no router, or one of other features.
        """
        path = Path(folder) / SETTINGS_NAME
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise SceneGraphError(f"{folder} holds no router: {SETTINGS_NAME} can't be read ({error}).") from error
        if tuple(settings["features"]) != FEATURE_NAMES:
            raise SceneGraphError(
                f"{path} is of a router of the features {', '.join(settings['features'])}; this version computes "
                f"{', '.join(FEATURE_NAMES)}. Fit it again."
            )
        router = cls(RouterConfig(**settings["config"]))
        tensors, _ = load_safetensors(Path(folder) / WEIGHTS_NAME)
        router.mean, router.std = (tensors.pop(f"features.{name}").numpy() for name in ("mean", "std"))
        router.network.load_state_dict(tensors)
        router.temperature, router.threshold = settings["temperature"], settings["threshold"]
        router.train_confidence = settings["train_confidence"]
        return router


def _confidence(features: np.ndarray) -> float:
    """Mean probability of the chosen predicates, as the geometric mean within each draft."""
    return float(np.exp(features[:, FEATURE_NAMES.index("mean_logprob")]).mean())
