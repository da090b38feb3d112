"""How well predicted scene graphs agree with labels, how well scores rank, and how sure one can be of either.

Two protocols count the same predictions.

`official` is the pair classification of the public evaluations of 4D-OR ("4D-OR: Semantic Scene Graphs for OR Domain
Modeling", arXiv 2203.11937), ORacle (arXiv 2404.07031) and MM-OR (arXiv 2503.02579). Every ordered pair of different
entities that occur in a frame's *labels* is one item; its class is the predicate of the first triplet that names the
pair, or `none`. Precision, recall and F1 of all classes, `none` included, are pooled over all frames of all takes.
A predicted triplet with an entity that the labels don't name is never looked at, so inventing entities is free.

`strict` compares the sets of triplets: a predicted triplet that isn't labeled is a false positive, whatever its
entities; there is no `none`. Words outside the vocabulary count as false positives, too.

Mean set IoU and entity F1 are computed from the sets in both protocols.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from scene_graph.schema import SceneGraphError, TailSplit, Triplet, Vocabulary
from vidgen.runtime.errors import suggestion

NONE = "none"
PROTOCOLS = ("official", "strict")
ZERO_SUPPORT = ("zero", "skip")
# The people whom the index-level labels of 4D-OR number; the patient has a name of its own there.
HUMAN_ROLES = ("head surgeon", "assistant surgeon", "circulator", "nurse", "anaesthetist")
# All orders of five people are 120; of eight they would be 40,320, for every frame.
MAX_PERMUTED_HUMANS = 5

_HUMAN = re.compile(r"human[ _](\d+)", re.IGNORECASE)
_SUMS = ("frames", "iou", "entity_hits", "entity_predicted", "entity_support", "judged", "failures", "foreign")

_Row = tuple[str, str, str]


# --- the evaluator -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassScore:
    """One row of the report.

    Args:
        name: the predicate, or `none`.
        precision: 0 to 1; 0 when the class was never predicted.
        recall: 0 to 1; 0 when the class never occurs.
        f1: their harmonic mean; 0 when both are.
        support: how often the class is in the labels.
        predicted: how often it was predicted.
        part: `"head"`, `"tail"`, or empty without a split.
    """

    name: str
    precision: float
    recall: float
    f1: float
    support: int
    predicted: int
    part: str


@dataclass(frozen=True)
class Report:
    """What an evaluation found.

    Args:
        protocol: `"official"` or `"strict"`.
        zero_support: `"zero"` or `"skip"`.
        num_samples: frames.
        num_takes: takes they come from.
        classes: a row for each predicate in the vocabulary's order, then `none` with the official protocol.
        scores: `macro_`, `micro_`, `entity_` and, with a split, `head_` and `tail_` `precision`, `recall` and `f1`;
            `set_iou`; `accuracy` (official: share of pairs, `none` included); `parse_failure_rate` where it is known.
            A mean over no class at all is nan.
        conflicts: predicted pairs with more than one predicate.
        unknown: words of the predictions that aren't in the vocabulary, with their number.
    """

    protocol: str
    zero_support: str
    num_samples: int
    num_takes: int
    classes: tuple[ClassScore, ...]
    scores: dict[str, float]
    conflicts: int
    unknown: dict[str, int]

    def class_score(self, name: str) -> ClassScore:
        """Row of a predicate or of `none`.

        Raises:
            SceneGraphError: there is no such row.
        """
        for row in self.classes:
            if row.name == name:
                return row
        raise SceneGraphError(
            f"the report has no class {name!r}; {suggestion(name, (row.name for row in self.classes))}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types; a score that doesn't exist is None."""
        return {
            **{key: getattr(self, key) for key in ("protocol", "zero_support", "num_samples", "num_takes")},
            "classes": [dict(vars(row)) for row in self.classes],
            "scores": {name: None if np.isnan(value) else value for name, value in self.scores.items()},
            "conflicts": self.conflicts,
            "unknown": dict(self.unknown),
        }

    def to_markdown(self, intervals: Mapping[str, tuple[float, float]] | None = None) -> str:
        """The report as two tables.

        Args:
            intervals: of scores, by name, as `SceneGraphEvaluator.bootstrap` returns them.
        """
        lines = [
            f"Protocol `{self.protocol}`, classes without support: {self.zero_support}; "
            f"{self.num_samples} frames of {self.num_takes} takes.",
            "",
            "| predicate | part | precision | recall | F1 | support | predicted |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row.name} | {row.part} | {row.precision:.3f} | {row.recall:.3f} | {row.f1:.3f} | {row.support} "
            f"| {row.predicted} |"
            for row in self.classes
        ]
        lines += [
            "",
            "| score | value |" + (" interval |" if intervals else ""),
            "|---|---|" + "---|" * bool(intervals),
        ]
        for name, value in self.scores.items():
            interval = ""
            if intervals:
                interval = f" {intervals[name][0]:.3f} to {intervals[name][1]:.3f} |" if name in intervals else " |"
            lines.append(f"| {name} | {value:.3f} |{interval}")
        if self.conflicts:
            lines += ["", f"{self.conflicts} predicted pairs have more than one predicate."]
        if self.unknown:
            words = ", ".join(f"{word} ({count})" for word, count in self.unknown.items())
            lines += ["", f"Predicted words outside the vocabulary: {words}."]
        return "\n".join(lines) + "\n"


class SceneGraphEvaluator:
    """Counts predictions against labels, take by take.

    Args:
        vocabulary: of the labels. Synonyms count as the name they stand for.
        protocol: `"official"` or `"strict"`, see the module.
        zero_support: whether a class that never occurs in the labels counts as 0 in the macro means (`"zero"`, as
            4D-OR's and ORacle's scripts do) or is left out of them (`"skip"`, as MM-OR's does).
        tail: which predicates are rare, from training labels; without it there are no head and tail means.
        match_humans: labels name people `human_0`, `human_1`, ... as 4D-OR's index-level labels do. Predicted roles
            are numbered, and the numbers permuted frame by frame to the best accuracy (`match_human_indices`).

    Raises:
        SceneGraphError: an unknown protocol or rule, or a split with predicates outside the vocabulary.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        protocol: Literal["official", "strict"] = "official",
        zero_support: Literal["zero", "skip"] = "zero",
        tail: TailSplit | None = None,
        match_humans: bool = False,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise SceneGraphError(f"unknown protocol {protocol!r}; {suggestion(protocol, PROTOCOLS)}")
        if zero_support not in ZERO_SUPPORT:
            raise SceneGraphError(f"unknown zero_support {zero_support!r}; {suggestion(zero_support, ZERO_SUPPORT)}")
        self.vocabulary = vocabulary
        self.protocol = protocol
        self.zero_support = zero_support
        self.tail = tail
        self.match_humans = match_humans
        self.classes = (*vocabulary.predicates, NONE) if protocol == "official" else tuple(vocabulary.predicates)
        self._index = {name: index for index, name in enumerate(self.classes)}
        self._parts: dict[str, np.ndarray] = {}
        for part in ("head", "tail") if tail is not None else ():
            names = getattr(tail, part)
            for name in names:
                if name not in vocabulary.predicates:
                    raise SceneGraphError(
                        f"the {part} predicate {name!r} is not in the vocabulary; "
                        f"{suggestion(name, vocabulary.predicates)}"
                    )
            self._parts[part] = np.array([name in names for name in self.classes])
        self.reset()

    def reset(self) -> None:
        """Forget everything counted."""
        self._counts: dict[str, np.ndarray] = {}
        self._conflicts = 0
        self._unknown: Counter[str] = Counter()

    def update(
        self,
        predictions: Sequence[Iterable[Triplet]],
        targets: Sequence[Iterable[Triplet] | None],
        takes: Sequence[str],
        parse_failures: Sequence[bool] | None = None,
    ) -> None:
        """Count frames.

        Args:
            predictions: a graph, or triplets, for each frame; of two predicates of one pair the first one counts in
                the official protocol, so graphs have to keep the order of the text, as `parse_triplet_text` does.
            targets: the labeled graphs.
            takes: the take of each frame.
            parse_failures: whether a frame's text was malformed, where there was a text.

        Raises:
            SceneGraphError: sequences of different lengths, a frame without labels, or a label outside the vocabulary.
        """
        lengths = [len(predictions), len(targets), len(takes)]
        if len({*lengths, len(takes if parse_failures is None else parse_failures)}) > 1:
            raise SceneGraphError(
                f"{lengths[0]} predictions, {lengths[1]} targets, {lengths[2]} takes"
                + ("" if parse_failures is None else f", {len(parse_failures)} parse failures")
                + "; there must be one of each for every frame."
            )
        # Labels are checked before anything is counted, so that an error leaves the evaluator as it was.
        labels = [self._read_target(target, take, frame) for frame, (target, take) in enumerate(zip(targets, takes))]
        for frame, (prediction, label, take) in enumerate(zip(predictions, labels, takes)):
            failed = None if parse_failures is None else bool(parse_failures[frame])
            counts = self._count(self._read_prediction(prediction, label), label, failed)
            self._counts[take] = self._counts.get(take, 0) + counts

    def compute(self) -> Report:
        """The report of everything counted so far.

        Raises:
            SceneGraphError: nothing was counted.
        """
        totals = self._totals().sum(axis=0)
        precision, recall, f1, support, predicted = self._class_scores(totals)
        parts = {name: part for part, names in self._parts.items() for name in np.array(self.classes)[names]}
        return Report(
            protocol=self.protocol,
            zero_support=self.zero_support,
            num_samples=int(self._sum(totals, "frames")),
            num_takes=len(self._counts),
            classes=tuple(
                ClassScore(
                    name=name,
                    precision=float(precision[index]),
                    recall=float(recall[index]),
                    f1=float(f1[index]),
                    support=int(support[index]),
                    predicted=int(predicted[index]),
                    part=parts.get(name, ""),
                )
                for name, index in self._index.items()
            ),
            scores={name: float(value) for name, value in self._scores(totals, support).items()},
            conflicts=self._conflicts,
            unknown=dict(self._unknown.most_common()),
        )

    def bootstrap(
        self,
        seed: int,
        num_resamples: int = 1000,
        confidence: float = 0.95,
        baseline: SceneGraphEvaluator | None = None,
    ) -> dict[str, tuple[float, float]]:
        """Percentile intervals of the scores when whole takes are drawn with replacement.

        Frames of one take are seconds apart and nearly the same, so frames can't be drawn as if they were independent.
        A class that merely wasn't drawn is left out of a resample's means; with `zero_support="zero"` a class that no
        take has is 0 in all of them, as in the report.

        Args:
            seed: of the draws.
            num_resamples: how often all takes are drawn anew.
            confidence: share of the resamples inside the interval.
            baseline: another evaluator that has counted the same takes. The intervals are then those of the
                difference of the scores, this one's minus the baseline's, over the same draws.

        Returns:
            Lower and upper bound by name of the score.

        Raises:
            SceneGraphError: fewer than 2 takes, a confidence outside (0, 1), or a baseline of other takes or settings.
        """
        if not 0 < confidence < 1 or num_resamples < 1:
            raise SceneGraphError(
                f"confidence is {confidence} and num_resamples {num_resamples}; allowed: between 0 and 1, at least 1."
            )
        takes = sorted(self._counts)
        if len(takes) < 2:
            raise SceneGraphError(f"an interval over takes needs at least 2 of them; counted: {takes}.")
        if baseline is not None and (
            sorted(baseline._counts) != takes
            or (baseline.protocol, baseline.classes) != (self.protocol, self.classes)
            or baseline.zero_support != self.zero_support
        ):
            raise SceneGraphError(
                f"the baseline counted takes {sorted(baseline._counts)} with {baseline.protocol}, "
                f"{baseline.zero_support}; it has to be {takes} with {self.protocol}, {self.zero_support}, "
                "and the same vocabulary."
            )
        draws = np.random.default_rng(seed).multinomial(len(takes), np.full(len(takes), 1 / len(takes)), num_resamples)
        values = self._resampled(draws, takes)
        if baseline is not None:
            others = baseline._resampled(draws, takes)
            values = {name: value - others[name] for name, value in values.items() if name in others}
        edges = (0.5 - confidence / 2, 0.5 + confidence / 2)
        intervals = {}
        for name, value in values.items():
            value = value[~np.isnan(value)]
            low, high = np.quantile(value, edges) if value.size else (np.nan, np.nan)
            intervals[name] = (float(low), float(high))
        return intervals

    # --- reading -------------------------------------------------------------------------------------------------

    def _entity(self, word: str) -> str | None:
        if self.match_humans and (match := _HUMAN.fullmatch(word.strip())):
            return f"human_{int(match[1])}"
        return self.vocabulary.entity(word)

    def _read_target(self, target: Iterable[Triplet] | None, take: str, frame: int) -> list[_Row]:
        if target is None:
            raise SceneGraphError(f"frame {frame} of this update (take {take}) has no labels; evaluation needs them.")
        rows = []
        for triplet in target:
            subject, object_ = self._entity(triplet.subject), self._entity(triplet.object)
            predicate = self.vocabulary.predicate(triplet.predicate)
            if subject is None or predicate is None or object_ is None:
                given, allowed = next(
                    (word, names)
                    for word, name, names in (
                        (triplet.subject, subject, self.vocabulary.entities),
                        (triplet.predicate, predicate, self.vocabulary.predicates),
                        (triplet.object, object_, self.vocabulary.entities),
                    )
                    if name is None
                )
                raise SceneGraphError(
                    f"frame {frame} of this update (take {take}) is labeled {triplet.spo()}, and {given!r} is not in "
                    f"the vocabulary; {suggestion(given, allowed)}"
                )
            rows.append((subject, predicate, object_))
        return rows

    def _read_prediction(self, prediction: Iterable[Triplet], label: Sequence[_Row]) -> list[_Row]:
        rows = []
        for triplet in prediction:
            words = (triplet.subject, triplet.predicate, triplet.object)
            names = (self._entity(words[0]), self.vocabulary.predicate(words[1]), self._entity(words[2]))
            self._unknown.update(word for word, name in zip(words, names) if name is None)
            rows.append(tuple(word if name is None else name for word, name in zip(words, names)))
        if self.match_humans:
            roles = sorted({name for row in rows for name in row[::2] if name in HUMAN_ROLES})
            rows = _renamed(rows, {role: f"human_{index}" for index, role in enumerate(roles)})
            rows = _renamed(rows, match_human_indices([row for row in rows if self._is_scored(row)], label))
        pairs = {(subject, object_, predicate) for subject, predicate, object_ in rows}
        self._conflicts += sum(number > 1 for number in Counter((row[0], row[1]) for row in pairs).values())
        return rows

    def _is_scored(self, row: _Row) -> bool:
        """Whether the public scripts keep a predicted triplet: they look all three words up in one table.

        So an entity's name in the predicate's place isn't dropped, but takes the place of the pair's predicate.
        """
        subject, predicate, object_ = row
        return (
            self._entity(subject) is not None
            and self._entity(object_) is not None
            and (self.vocabulary.predicate(predicate) is not None or self._entity(predicate) is not None)
        )

    # --- counting ------------------------------------------------------------------------------------------------

    def _count(self, predicted: Sequence[_Row], label: Sequence[_Row], failed: bool | None) -> np.ndarray:
        """`(3 * classes + sums,)`: hits, predictions and support of each class, then `_SUMS`."""
        hits, guesses, support = np.zeros((3, len(self.classes)))
        predicted_set, label_set = set(predicted), set(label)
        foreign = 0
        if self.protocol == "official":
            first_guess, first_label = {}, {}
            for first, rows in ((first_guess, filter(self._is_scored, predicted)), (first_label, label)):
                for subject, predicate, object_ in rows:
                    first.setdefault((subject, object_), self._index.get(predicate, self._index[NONE]))
            entities = sorted({name for row in label for name in row[::2]})
            for pair in itertools.permutations(entities, 2):
                guess = first_guess.get(pair, self._index[NONE])
                truth = first_label.get(pair, self._index[NONE])
                guesses[guess] += 1
                support[truth] += 1
                hits[truth] += guess == truth
        else:
            for counts, rows in ((hits, predicted_set & label_set), (guesses, predicted_set), (support, label_set)):
                for _, predicate, _ in rows:
                    if predicate in self._index:
                        counts[self._index[predicate]] += 1
                    else:
                        foreign += 1
        entities, label_entities = ({name for row in rows for name in row[::2]} for rows in (predicted, label))
        union = predicted_set | label_set
        sums = {
            "frames": 1,
            "iou": len(predicted_set & label_set) / len(union) if union else 1,
            "entity_hits": len(entities & label_entities),
            "entity_predicted": len(entities),
            "entity_support": len(label_entities),
            "judged": failed is not None,
            "failures": bool(failed),
            "foreign": foreign,
        }
        return np.concatenate([hits, guesses, support, [sums[name] for name in _SUMS]])

    def _totals(self, takes: Sequence[str] | None = None) -> np.ndarray:
        if not self._counts:
            raise SceneGraphError("nothing was counted; call update with predictions and labels first.")
        return np.stack([self._counts[take] for take in takes or sorted(self._counts)])

    def _sum(self, totals: np.ndarray, name: str) -> np.ndarray:
        return totals[..., 3 * len(self.classes) + _SUMS.index(name)]

    def _class_scores(self, totals: np.ndarray) -> tuple[np.ndarray, ...]:
        """Precision, recall, F1, support and predictions, each `(..., classes)`."""
        hits, guesses, support = np.split(totals[..., : 3 * len(self.classes)], 3, axis=-1)
        return *_precision_recall_f1(hits, guesses, support), support, guesses

    def _scores(self, totals: np.ndarray, support_of_all: np.ndarray) -> dict[str, np.ndarray]:
        """Scores of `(..., 3 * classes + sums)`, each `(...)`."""
        per_class = self._class_scores(totals)
        support, guesses = per_class[3:]
        counted = support > 0
        if self.zero_support == "zero":
            counted = counted | (support_of_all == 0)
        scores = {}
        names = ("precision", "recall", "f1")
        for mean, members in {"macro": np.ones(len(self.classes), bool), **self._parts}.items():
            chosen = counted & members
            number = chosen.sum(axis=-1)
            for name, value in zip(names, per_class):
                total = np.where(chosen, value, 0).sum(axis=-1)
                scores[f"{mean}_{name}"] = np.where(number > 0, total / np.maximum(number, 1), np.nan)
        is_relation = np.array([name != NONE for name in self.classes])
        hits = totals[..., : len(self.classes)]
        foreign = self._sum(totals, "foreign")
        micro = _precision_recall_f1(
            hits[..., is_relation].sum(axis=-1),
            guesses[..., is_relation].sum(axis=-1) + foreign,
            support[..., is_relation].sum(axis=-1),
        )
        scores |= {f"micro_{name}": value for name, value in zip(names, micro)}
        if self.protocol == "official":
            pairs = support.sum(axis=-1)
            scores["accuracy"] = np.where(pairs > 0, hits.sum(axis=-1) / np.maximum(pairs, 1), np.nan)
        scores["set_iou"] = self._sum(totals, "iou") / self._sum(totals, "frames")
        entity = (self._sum(totals, f"entity_{name}") for name in ("hits", "predicted", "support"))
        scores |= {f"entity_{name}": value for name, value in zip(names, _precision_recall_f1(*entity))}
        judged = self._sum(totals, "judged")
        if np.any(judged > 0):
            failures = self._sum(totals, "failures")
            scores["parse_failure_rate"] = np.where(judged > 0, failures / np.maximum(judged, 1), np.nan)
        return scores

    def _resampled(self, draws: np.ndarray, takes: Sequence[str]) -> dict[str, np.ndarray]:
        totals = self._totals(takes)
        return self._scores(draws @ totals, self._class_scores(totals.sum(axis=0))[3])


def _renamed(rows: Iterable[_Row], names: Mapping[str, str]) -> list[_Row]:
    return [
        (names.get(subject, subject), predicate, names.get(object_, object_)) for subject, predicate, object_ in rows
    ]


def _precision_recall_f1(hits: np.ndarray, predicted: np.ndarray, support: np.ndarray) -> tuple[np.ndarray, ...]:
    """Where a denominator is 0, the score is 0, as in scikit-learn."""
    precision = hits / np.where(predicted > 0, predicted, 1)
    recall = hits / np.where(support > 0, support, 1)
    total = predicted + support
    return precision, recall, 2 * hits / np.where(total > 0, total, 1)


# --- who is who --------------------------------------------------------------------------------------------------


def match_human_indices(
    predicted: Sequence[tuple[str, str, str]], labels: Sequence[tuple[str, str, str]]
) -> dict[str, str]:
    """The renaming of predicted `human_k` that makes most labeled triplets right, as ORacle's evaluation has it.

    Up to five people all permutations are tried in lexicographic order, and the first of the best ones is taken. Above
    that an assignment is solved in which a triplet between two people gives half a point to each of them; it is exact
    where people relate to things only.

    Args:
        predicted: (subject, predicate, object), people as `human_0`, `human_1`, ...; of a pair the first one counts.
        labels: likewise.

    Returns:
        New name by old name, a permutation of all people in either; empty when one side has no triplets.
    """
    if not predicted or not labels:
        return {}
    numbers = {
        name: int(match[1])
        for row in itertools.chain(predicted, labels)
        for name in row[::2]
        if (match := _HUMAN.fullmatch(name))
    }
    humans = sorted(numbers, key=numbers.__getitem__)
    first: dict[tuple[str, str], str] = {}
    for subject, predicate, object_ in predicted:
        first.setdefault((subject, object_), predicate)
    if len(humans) > MAX_PERMUTED_HUMANS:
        return _assigned_humans(first, labels, humans)
    best, best_hits = {}, -1
    for order in itertools.permutations(humans):
        old_name = dict(zip(order, humans))
        hits = sum(
            first.get((old_name.get(subject, subject), old_name.get(object_, object_))) == predicate
            for subject, predicate, object_ in labels
        )
        if hits > best_hits:
            best, best_hits = dict(zip(humans, order)), hits
    return best


def _assigned_humans(
    first: Mapping[tuple[str, str], str], labels: Sequence[_Row], humans: Sequence[str]
) -> dict[str, str]:
    # networkx comes with torch; its matching is slow on large graphs, and these have about ten nodes on each side.
    import networkx

    agreement: dict[tuple[str, str], float] = defaultdict(float)
    for subject, predicate, object_ in labels:
        for (old_subject, old_object), guess in first.items():
            if guess != predicate:
                continue
            pairs = ((old_subject, subject), (old_object, object_))
            people = [pair for pair in pairs if pair[0] in humans and pair[1] in humans]
            if all(pair in people or pair[0] == pair[1] for pair in pairs):
                for pair in people:
                    agreement[pair] += 1 / len(people)
    graph = networkx.Graph()
    for old, new in itertools.product(humans, repeat=2):
        # Among equal assignments the one that renames fewest: nothing else would make the choice reproducible.
        graph.add_edge(("old", old), ("new", new), weight=agreement[old, new] + (old == new) / (4 * len(humans)))
    matching = networkx.max_weight_matching(graph, maxcardinality=True)
    return {name: other for (_, name), (_, other) in (sorted(edge, reverse=True) for edge in matching)}


# --- rankings ----------------------------------------------------------------------------------------------------


def ndcg_at_k(relevance: np.ndarray, scores: np.ndarray, k: int) -> float | np.ndarray:
    """Normalized discounted cumulative gain of the `k` best-scored candidates, with the relevance itself as gain.

    Candidates with equal scores share the mean discount of their places, so that a constant score gets what a random
    order gets on average.

    Args:
        relevance: `(n,)` or `(queries, n)`, at least 0, such as IoUs.
        scores: the same shape.
        k: at least 1.

    Returns:
        0 to 1: a float, or float64 `(queries,)`; 0 where nothing is relevant.

    Raises:
        SceneGraphError: other shapes, negative or non-finite values, or k below 1.

    Reference: "Computing Information Retrieval Performance Measures Efficiently in the Presence of Tied Scores",
    McSherry and Najork, ECIR 2008.
    """
    relevance, scores = np.asarray(relevance, np.float64), np.asarray(scores, np.float64)
    if relevance.shape != scores.shape or relevance.ndim not in (1, 2) or not relevance.size or k < 1:
        raise SceneGraphError(
            f"relevance has shape {relevance.shape}, scores {scores.shape}, k is {k}; allowed: the same (n,) or "
            "(queries, n), k of at least 1."
        )
    if not np.isfinite(relevance).all() or (relevance < 0).any() or np.isnan(scores).any():
        raise SceneGraphError(
            "a relevance is negative or not finite, or a score is nan; allowed: at least 0, numbers."
        )
    if relevance.ndim == 2:
        return np.array([ndcg_at_k(one, other, k) for one, other in zip(relevance, scores)])
    discount = 1 / np.log2(np.arange(len(scores)) + 2)
    discount[k:] = 0
    _, group, sizes = np.unique(-scores, return_inverse=True, return_counts=True)
    ends = sizes.cumsum()
    discounts_before = np.concatenate([[0.0], discount.cumsum()])
    shared = (discounts_before[ends] - discounts_before[ends - sizes]) / sizes
    ideal = np.sort(relevance)[::-1] @ discount
    return float(relevance @ shared[group] / ideal) if ideal > 0 else 0.0


def auc(labels: Sequence[bool] | np.ndarray, scores: Sequence[float] | np.ndarray) -> float:
    """Area under the ROC curve: how often a positive scores higher than a negative, a tie being half.

    Args:
        labels: `(n,)`, True for positives.
        scores: `(n,)`.

    Returns:
        0 to 1; 0.5 is chance.

    Raises:
        SceneGraphError: other shapes, a nan, or only one class.
    """
    positive, scores = np.asarray(labels).astype(bool), np.asarray(scores, np.float64)
    if positive.shape != scores.shape or positive.ndim != 1 or np.isnan(scores).any():
        raise SceneGraphError(
            f"labels have shape {positive.shape}, scores {scores.shape}; allowed: the same (n,), no nan."
        )
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        raise SceneGraphError(
            f"there are {num_positive} positives and {num_negative} negatives; the area needs one of each."
        )
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = sizes.cumsum() - (sizes - 1) / 2
    rank_sum = mean_rank[group][positive].sum()
    return float((rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))
