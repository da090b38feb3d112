"""How steady a video's scene graphs are over time.

Consecutive frames a second apart mostly show the same relations, so what flickers is a mistake: of the predictor, or,
with a predictor that is right on real videos, of a generated video. None of these numbers knows what is true, and a
frozen video is perfectly steady. Beside them belong the same numbers of real videos and, where the video was made from
a graph, the agreement with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from scene_graph.schema import SceneGraph, SceneGraphError, triplet_iou

DRIFT_WINDOW = 60.0


@dataclass(frozen=True)
class ConsistencyReport:
    """How steady the graphs of one video are.

    Args:
        num_frames: graphs.
        num_empty: graphs without a triplet; two of them in a row agree perfectly, so many of them are a warning.
        seconds: from the first graph to the last.
        predicate_jaccard: mean Jaccard index of the sets of predicates of consecutive frames, as in "LABRAD-OR:
            Lightweight Memory Scene Graphs for Accurate Bimodal Reasoning in Dynamic Operating Rooms" (arXiv
            2303.13293); 1 for two empty graphs.
        triplet_jaccard: the same with triplets: a relation that moves to another person counts as a change.
        flicker_per_minute: by predicate, how often per minute one of its triplets appears or disappears for a single
            frame.
        entity_persistence: share of a frame's entities that the next frame has, too, pooled over all frames; nan when
            there is no entity.
        persistence_by_entity: the same by entity, for entities that are seen before the last frame.
        drift: agreement of each minute that has graphs with the first one: the weighted Jaccard index of the shares of
            frames that have a triplet. The first is 1.
        agreement: mean F1 of the triplets of a frame against those of the graph the video was made from; None without.
    """

    num_frames: int
    num_empty: int
    seconds: float
    predicate_jaccard: float
    triplet_jaccard: float
    flicker_per_minute: dict[str, float]
    entity_persistence: float
    persistence_by_entity: dict[str, float]
    drift: tuple[float, ...]
    agreement: float | None

    @property
    def total_flicker_per_minute(self) -> float:
        """Flicker of all predicates together."""
        return sum(self.flicker_per_minute.values())

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        persistence = None if np.isnan(self.entity_persistence) else self.entity_persistence
        return {**vars(self), "entity_persistence": persistence, "drift": list(self.drift)}


def scene_graph_consistency(
    graphs: Sequence[SceneGraph],
    seconds: Sequence[float],
    *,
    condition: SceneGraph | None = None,
    weights: Mapping[str, float] | None = None,
) -> ConsistencyReport:
    """How steady the graphs of one video are.

    Args:
        graphs: in order of time, at least 2.
        seconds: when each was seen, increasing.
        condition: the graph that the video was to show.
        weights: of predicates, for the drift; without them all triplets count alike.

    Raises:
        SceneGraphError: fewer than 2 graphs, times that don't increase or are too many or too few, or a predicate
            without a weight.
    """
    times = np.asarray(seconds, np.float64)
    if len(graphs) < 2 or times.shape != (len(graphs),):
        raise SceneGraphError(f"{len(graphs)} graphs and {times.size} times; allowed: as many of each, at least 2.")
    if not (np.diff(times) > 0).all():
        frame = int(np.flatnonzero(~(np.diff(times) > 0))[0]) + 1
        raise SceneGraphError(
            f"graph {frame} was seen at {times[frame]:g} s, and the one before at {times[frame - 1]:g} s; "
            "times have to increase."
        )
    unweighted = {triplet.predicate for graph in graphs for triplet in graph} - set(weights or {})
    if weights is not None and unweighted:
        raise SceneGraphError(f"{sorted(unweighted)} have no weight; weights of: {', '.join(sorted(weights))}.")
    duration = float(times[-1] - times[0])
    seen: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for before, after in pairwise(graphs):
        entities = set(before.entities)
        seen.update(entities)
        kept.update(entities & set(after.entities))
    return ConsistencyReport(
        num_frames=len(graphs),
        num_empty=sum(not len(graph) for graph in graphs),
        seconds=duration,
        predicate_jaccard=_mean_jaccard([frozenset(graph.predicates) for graph in graphs]),
        triplet_jaccard=float(np.mean([triplet_iou(before, after) for before, after in pairwise(graphs)])),
        flicker_per_minute={name: 60 * number / duration for name, number in sorted(_flickers(graphs).items())},
        entity_persistence=kept.total() / seen.total() if seen else float("nan"),
        persistence_by_entity={name: kept[name] / number for name, number in sorted(seen.items())},
        drift=_drift(graphs, times, weights),
        agreement=None if condition is None else float(np.mean([_triplet_f1(graph, condition) for graph in graphs])),
    )


def _mean_jaccard(sets: Sequence[frozenset[str]]) -> float:
    return float(
        np.mean(
            [len(before & after) / len(before | after) if before | after else 1 for before, after in pairwise(sets)]
        )
    )


def _flickers(graphs: Sequence[SceneGraph]) -> Counter[str]:
    """By predicate, how often a triplet differs from both the frame before and the frame after; 0 for steady ones."""
    flickers = Counter({triplet.predicate: 0 for graph in graphs for triplet in graph})
    for before, now, after in zip(graphs, graphs[1:], graphs[2:]):
        flickers.update(triplet.predicate for triplet in now if triplet not in before and triplet not in after)
        flickers.update(triplet.predicate for triplet in before if triplet in after and triplet not in now)
    return flickers


def _drift(graphs: Sequence[SceneGraph], times: np.ndarray, weights: Mapping[str, float] | None) -> tuple[float, ...]:
    windows: dict[int, list[SceneGraph]] = {}
    for graph, time in zip(graphs, times):
        windows.setdefault(int((time - times[0]) // DRIFT_WINDOW), []).append(graph)
    shares = {}
    for window, members in windows.items():
        counts = Counter(triplet for graph in members for triplet in graph)
        shares[window] = {triplet: number / len(members) for triplet, number in counts.items()}
    agreements = []
    for share in shares.values():
        triplets = share.keys() | shares[0].keys()
        pairs = [
            (1.0 if weights is None else weights[one.predicate], share.get(one, 0.0), shares[0].get(one, 0.0))
            for one in triplets
        ]
        union = sum(weight * max(here, first) for weight, here, first in pairs)
        agreements.append(sum(weight * min(here, first) for weight, here, first in pairs) / union if union else 1.0)
    return tuple(agreements)


def _triplet_f1(graph: SceneGraph, condition: SceneGraph) -> float:
    total = len(graph) + len(condition)
    return 2 * sum(triplet in condition for triplet in graph) / total if total else 1.0
