"""What would be wrong: a router that changes frames it doesn't route, answers from a query's own take, lost drafts,
a merge that mixes up pairs, a folder that answers differently after it was loaded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from scene_graph.pipeline import SGGICLConfig, SGGICLPipeline
from scene_graph.reranker import OracleReranker
from scene_graph.router import AdaptiveRouter
from scene_graph.schema import SceneGraph, SceneGraphError, Triplet, triplet_iou


@pytest.fixture(scope="module")
def scenes(make_sample):
    rng = np.random.default_rng(5)
    return [make_sample(rng, take=f"{take:03d}_4DOR", frame=frame) for take in range(1, 5) for frame in range(4)]


@pytest.fixture(scope="module")
def pipe(scenes, make_scene_pipeline):
    """Random weights, scaled so that pictures and examples change the answer."""
    return make_scene_pipeline(scenes)


def at_threshold(pipe, threshold: float) -> SGGICLPipeline:
    """The pipeline with the threshold of its router replaced."""
    router = AdaptiveRouter(pipe.router.config)
    router.__dict__.update({**pipe.router.__dict__, "threshold": threshold})
    return SGGICLPipeline(pipe.predictor, pipe.index, router, pipe.reranker, pipe.config)


def test_thresholds_0_and_1_are_all_and_none(pipe, scenes):
    everything, nothing = pipe.with_config(policy="all")(scenes), pipe.with_config(policy="none")(scenes)
    assert everything.graphs != nothing.graphs  # or the comparison would say nothing
    assert [list(graph) for graph in at_threshold(pipe, 1.0)(scenes).graphs] == [list(g) for g in nothing.graphs]
    routed = at_threshold(pipe, 0.0)(scenes)
    assert [list(graph) for graph in routed.graphs] == [list(graph) for graph in everything.graphs]
    assert all(routed.routed) and nothing.graphs == [draft.graph for draft in nothing.drafts]


def test_frames_that_are_not_routed_keep_their_draft_whatever_the_others_get(pipe, scenes):
    probabilities = pipe(scenes).route_probabilities
    middle = at_threshold(pipe, float(np.median(probabilities)))
    output = middle(scenes)
    assert 0 < sum(output.routed) < len(scenes)
    assert output.routed == [value > middle.router.threshold for value in probabilities]
    for graph, draft, routed, examples in zip(output.graphs, output.drafts, output.routed, output.examples):
        assert bool(examples) == routed
        if not routed:
            assert list(graph) == list(draft.graph)
    # The same frames alone: nothing depends on what else is in the batch.
    alone = [middle([sample]).graphs[0] for sample in scenes[:3]]
    assert [list(graph) for graph in alone] == [list(graph) for graph in output.graphs[:3]]


def test_no_example_is_of_the_querys_take(pipe, scenes):
    output = pipe.with_config(policy="all")(scenes)
    for sample, examples in zip(scenes, output.examples):
        assert len(examples) == 2
        assert all(example.sample.take != sample.take for example in examples)


def test_examples_are_the_best_of_the_reranker_and_the_best_comes_last(pipe, scenes):
    ranked = SGGICLPipeline(
        pipe.predictor, pipe.index, None, OracleReranker(), dataclasses.replace(pipe.config, policy="all")
    )
    output = ranked(scenes)
    pools = ranked.retrieve(scenes, output.drafts)
    for sample, pool, examples, scores in zip(scenes, pools, output.examples, output.scores):
        wanted = sorted(triplet_iou(sample.graph, candidate.graph) for candidate in pool)[-2:]
        assert scores == pytest.approx(wanted)
        assert [triplet_iou(sample.graph, example.graph) for example in examples] == pytest.approx(wanted)
    by_retrieval = pipe.with_config(policy="all", ranking="retrieval")(scenes)
    assert [examples[-1].sample.id for examples in by_retrieval.examples] == [pool[0].sample_id for pool in pools]


def test_a_candidate_below_the_limit_is_no_example_and_the_draft_stays(pipe, scenes):
    output = pipe.with_config(policy="all", min_score=2.0)(scenes)  # a reranker's score is at most 1
    assert all(output.routed) and not any(output.examples)
    assert output.graphs == [draft.graph for draft in output.drafts]


def test_tail_only_takes_pairs_with_a_rare_predicate_from_the_answer_and_all_others_from_the_draft(pipe):
    def graph(*rows: str) -> SceneGraph:
        return SceneGraph([Triplet.from_spo(row.split(",")) for row in rows])

    draft = graph("head surgeon,holding,instrument", "head surgeon,sawing,patient", "patient,lyingOn,operating table")
    answer = graph("head surgeon,touching,instrument", "head surgeon,drilling,patient", "circulator,sawing,patient")
    merged = pipe.with_config(merge="tail_only").merge(draft, answer)
    assert merged == graph(
        "head surgeon,holding,instrument",
        "patient,lyingOn,operating table",
        "head surgeon,drilling,patient",
        "circulator,sawing,patient",
    )
    # A rare predicate of the draft that the answer doesn't confirm is gone; one that only closeTo speaks of stays.
    assert pipe.with_config(merge="tail_only").merge(draft, graph()) == draft.without("sawing")
    assert pipe.merge(draft, answer) is answer


def test_a_saved_pipeline_answers_the_same(pipe, scenes, tmp_path):
    before = pipe(scenes)
    pipe.save_pretrained(tmp_path / "model", with_images=True)
    loaded = SGGICLPipeline.from_pretrained(tmp_path / "model")
    assert loaded.config == pipe.config
    after = loaded(scenes)
    assert [list(graph) for graph in after.graphs] == [list(graph) for graph in before.graphs]
    assert after.routed == before.routed
    np.testing.assert_allclose(after.route_probabilities, before.route_probabilities, rtol=1e-6)
    assert [[e.sample.id for e in given] for given in after.examples] == [
        [e.sample.id for e in given] for given in before.examples
    ]


def test_missing_parts_and_wrong_settings_are_named(pipe, scenes, tmp_path):
    with pytest.raises(SceneGraphError, match="needs router, which this pipeline doesn't have"):
        SGGICLPipeline(pipe.predictor, pipe.index, None, pipe.reranker)
    with pytest.raises(SceneGraphError, match="needs index, router, reranker"):
        SGGICLPipeline(pipe.predictor)
    assert SGGICLPipeline(pipe.predictor, config=SGGICLConfig(policy="none"))(scenes[:1]).routed == [False]
    for settings, message in (
        ({"policy": "routedd"}, "did you mean 'routed'"),
        ({"ranking": "rank"}, "rerank"),
        ({"merge": "tail"}, "tail_only"),
        ({"num_examples": 0}, "num_examples=0"),
        ({"mmr_lambda": 2.0}, "mmr_lambda=2.0"),
    ):
        with pytest.raises(SceneGraphError, match=message):
            SGGICLConfig(**settings)
    with pytest.raises(SceneGraphError, match="no samples"):
        pipe([])
    with pytest.raises(SceneGraphError, match=r"holds no pipeline.json"):
        SGGICLPipeline.from_pretrained(tmp_path)
