"""What every predictor of scene graphs takes and gives, whatever model is inside.

A predictor keeps the distribution over predicates of every triplet it writes, because a router judges a draft by how
unsure its model was, and by how much of its belief went to rare predicates.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scene_graph.schema import Sample, SceneGraph, SceneGraphError, TailSplit, Vocabulary

CONFIDENCE_FEATURES = ("mean_entropy", "max_entropy", "min_logprob", "mean_logprob", "min_margin")
TAIL_MASS_FEATURES = ("max_tail_mass", "mean_tail_mass")

# The words of a predictor's vocabulary and its limits, beside its weights.
SETTINGS_NAME = "scene_graph.json"


def saved_class(folder: str | os.PathLike, part: str) -> str | None:
    """Name of the class that wrote a model folder; `None` for those of transformers and peft, which don't say.

    Args:
        folder: of the model.
        part: what it is meant to be, for the error.

    Raises:
        SceneGraphError: the folder holds no such part, or its config is damaged.
    """
    configs = [Path(folder) / name for name in ("config.json", "adapter_config.json")]
    config = next((path for path in configs if path.is_file()), None)
    if config is None:
        raise SceneGraphError(f"{folder} holds no {part}: neither config.json nor adapter_config.json is in it.")
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("_class_name")
    except (ValueError, AttributeError) as error:
        raise SceneGraphError(f"{config} is damaged: {error}") from error


@dataclass(frozen=True, eq=False)
class Example:
    """A labeled frame in a prompt.

    Args:
        sample: its images.
        graph: its labels, or what stands for them.
        score: how similar it is to the query; examples are shown with the most similar one last.
    """

    sample: Sample
    graph: SceneGraph
    score: float = 0.0


@dataclass(frozen=True, eq=False)
class TokenStats:
    """How sure a model was of each predicate it wrote.

    Args:
        predicate_probs: `(triplets, predicates)` float32: at the place of each predicate, the distribution over the
            predicates of the vocabulary, by their first tokens; rows sum to 1.
        chosen_logprobs: `(triplets,)` float32: log-probability of the token that was chosen there, among all tokens.

    Raises:
        SceneGraphError: the shapes don't fit.
    """

    predicate_probs: np.ndarray
    chosen_logprobs: np.ndarray

    def __post_init__(self) -> None:
        if self.predicate_probs.ndim != 2 or self.chosen_logprobs.shape != self.predicate_probs.shape[:1]:
            raise SceneGraphError(
                f"predicate_probs {self.predicate_probs.shape} and chosen_logprobs {self.chosen_logprobs.shape}; "
                "allowed: (triplets, predicates) and (triplets,)."
            )

    def confidence(self) -> dict[str, float]:
        """The features `CONFIDENCE_FEATURES`: entropies and log-probabilities in nats, and the smallest distance of
        the two most probable predicates.

        An empty graph wrote no predicate, so nothing was unsure: entropies and log-probabilities 0, margin 1.
        """
        if not len(self.predicate_probs):
            return dict(zip(CONFIDENCE_FEATURES, (0.0, 0.0, 0.0, 0.0, 1.0)))
        probs = self.predicate_probs.astype(np.float64)
        entropy = -(probs * np.log(np.maximum(probs, np.finfo(np.float64).tiny))).sum(axis=1)
        best = np.sort(probs, axis=1)[:, ::-1]
        margin = best[:, 0] - best[:, 1] if probs.shape[1] > 1 else np.ones(len(probs))
        logprobs = self.chosen_logprobs.astype(np.float64)
        values = (entropy.mean(), entropy.max(), logprobs.min(), logprobs.mean(), margin.min())
        return {name: float(value) for name, value in zip(CONFIDENCE_FEATURES, values)}


def token_features(predicate_probs: np.ndarray, vocabulary: Vocabulary, tail_split: TailSplit) -> dict[str, float]:
    """The features `TAIL_MASS_FEATURES`: largest and mean probability of all rare predicates together.

    Args:
        predicate_probs: `(triplets, predicates)` of `TokenStats`; no triplets give 0.
        vocabulary: the order of the columns.
        tail_split: which predicates are rare.

    Raises:
        SceneGraphError: the columns are not the vocabulary's predicates.
    """
    if predicate_probs.ndim != 2 or predicate_probs.shape[1] != len(vocabulary.predicates):
        raise SceneGraphError(
            f"predicate_probs has the shape {predicate_probs.shape}; allowed: (triplets, "
            f"{len(vocabulary.predicates)}), a column for each predicate of the vocabulary."
        )
    columns = [vocabulary.predicates.index(name) for name in tail_split.tail]
    mass = predicate_probs[:, columns].astype(np.float64).sum(axis=1)
    values = (mass.max(), mass.mean()) if len(mass) else (0.0, 0.0)
    return {name: float(value) for name, value in zip(TAIL_MASS_FEATURES, values)}


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model says of a frame.

    Args:
        graph: known triplets, each once, in the order in which they were written.
        text: what was written, `<SG> subject,object,predicate; … </SG>`.
        token_stats: of the predicates.
        truncated: the model didn't come to an end within its limit.
        num_examples: how many examples were in the prompt.
        malformed: parts of the text that were no triplets, and triplets with unknown words.
    """

    graph: SceneGraph
    text: str
    token_stats: TokenStats
    truncated: bool
    num_examples: int
    malformed: int = 0


class SGGPredictor(ABC):
    """A model that writes the scene graph of a frame, with or without labeled examples before it.

    Attributes:
        vocabulary: the words of its graphs.
    """

    vocabulary: Vocabulary

    @abstractmethod
    def predict(
        self,
        samples: Sequence[Sample],
        examples: Sequence[Sequence[Example]] | None = None,
        batch_size: int = 16,
    ) -> list[Prediction]:
        """Write graphs, greedily; the same whatever else is in the batch.

        Args:
            samples: frames.
            examples: for each frame its examples in any order, or none; `None` gives no frame any.
            batch_size: frames that go through the model together.

        Raises:
            SceneGraphError: not one list of examples for each frame, or a frame that does not fit the model.
        """

    @abstractmethod
    def embed(self, samples: Sequence[Sample], batch_size: int = 16) -> np.ndarray:
        """What the model makes of the images alone, float32 `(samples, dim)`, L2-normalized."""

    @abstractmethod
    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write what `load_predictor` reads."""


def examples_of(samples: Sequence[Sample], examples: Sequence[Sequence[Example]] | None) -> list[tuple[Example, ...]]:
    """The examples of each sample, the most similar one last.

    Raises:
        SceneGraphError: not one list of examples for each sample.
    """
    if examples is None:
        return [() for _ in samples]
    if len(examples) != len(samples):
        raise SceneGraphError(
            f"{len(samples)} samples and {len(examples)} lists of examples; give one list for each sample, which may "
            "be empty."
        )
    return [tuple(sorted(given, key=lambda example: example.score)) for given in examples]
