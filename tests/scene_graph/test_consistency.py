"""What would be wrong: steadiness that isn't what its name says, or that flicker and drift don't lower."""

from __future__ import annotations

import numpy as np
import pytest

from scene_graph.consistency import scene_graph_consistency
from scene_graph.schema import SceneGraph, SceneGraphError, Triplet


def graph(*rows: str) -> SceneGraph:
    """Triplets, each "subject,predicate,object"."""
    return SceneGraph([Triplet.from_spo(row.split(",")) for row in rows])


HOLD, CUT, LIE = "surgeon,holding,saw", "surgeon,cutting,patient", "patient,lyingOn,table"


def test_a_case_worked_by_hand():
    graphs = [graph(HOLD, LIE), graph(LIE), graph(HOLD, LIE), graph("nurse,holding,saw", LIE)]
    report = scene_graph_consistency(graphs, [0, 10, 20, 30])
    assert (report.num_frames, report.num_empty, report.seconds) == (4, 0, 30)
    assert report.predicate_jaccard == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)
    assert report.triplet_jaccard == pytest.approx((1 / 2 + 1 / 2 + 1 / 3) / 3)
    # The surgeon's hold is gone for one frame, and then back for one, in half a minute.
    assert report.flicker_per_minute == {"holding": 4, "lyingOn": 0} and report.total_flicker_per_minute == 4
    # surgeon: 2 frames, never kept; saw: of 2 kept 1; patient and table: 3 of 3.
    assert report.persistence_by_entity == {"patient": 1, "saw": 0.5, "surgeon": 0, "table": 1}
    assert report.entity_persistence == pytest.approx(7 / 10)
    assert report.drift == (1,) and report.agreement is None


def test_a_frozen_video_is_perfect_and_noise_is_not(rng, make_graph):
    still = scene_graph_consistency([graph(HOLD, LIE)] * 5, range(5))
    assert (still.predicate_jaccard, still.triplet_jaccard, still.entity_persistence) == (1, 1, 1)
    assert still.total_flicker_per_minute == 0
    noise = scene_graph_consistency([make_graph(rng, num_triplets=5) for _ in range(20)], range(20))
    assert noise.triplet_jaccard < 0.1 and noise.total_flicker_per_minute > 100


def test_a_lasting_change_is_no_flicker():
    report = scene_graph_consistency([graph(LIE)] * 3 + [graph(LIE, CUT)] * 3, range(6))
    assert report.flicker_per_minute == {"cutting": 0, "lyingOn": 0}


def test_drift_compares_each_minute_with_the_first():
    seconds = np.arange(0, 180, 10)
    graphs = [graph(HOLD, LIE) for _ in range(6)] + [graph(LIE)] * 3 + [graph(HOLD, LIE)] * 3 + [graph(CUT)] * 6
    report = scene_graph_consistency(graphs, seconds)
    # Minute 1 has the hold in half of its frames: (0.5 + 1) / (1 + 1); minute 2 shares nothing.
    assert report.drift == pytest.approx((1, 0.75, 0))
    weighted = scene_graph_consistency(graphs, seconds, weights={"holding": 3, "lyingOn": 1, "cutting": 1})
    assert weighted.drift == pytest.approx((1, (3 * 0.5 + 1) / 4, 0))


def test_agreement_is_the_mean_f1_with_the_condition():
    report = scene_graph_consistency([graph(HOLD, LIE), graph(LIE), graph()], range(3), condition=graph(HOLD, LIE))
    assert report.agreement == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_empty_graphs_agree_and_are_counted():
    report = scene_graph_consistency([SceneGraph()] * 3, range(3))
    assert (report.triplet_jaccard, report.predicate_jaccard, report.num_empty) == (1, 1, 3)
    assert np.isnan(report.entity_persistence) and report.to_dict()["entity_persistence"] is None


def test_wrong_times_and_weights_are_refused():
    with pytest.raises(SceneGraphError, match="1 graphs and 1 times"):
        scene_graph_consistency([graph(LIE)], [0])
    with pytest.raises(SceneGraphError, match=r"graph 2 was seen at 1 s, and the one before at 1 s"):
        scene_graph_consistency([graph(LIE)] * 3, [0, 1, 1])
    with pytest.raises(SceneGraphError, match="'lyingOn'.* no weight"):
        scene_graph_consistency([graph(LIE)] * 3, range(3), weights={"holding": 1})
