"""The router: its features by hand, its fit against another implementation, calibration, and thresholds."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from scene_graph.predictors import CONFIDENCE_FEATURES, TAIL_MASS_FEATURES, Prediction, TokenStats
from scene_graph.retrieval import Candidate
from scene_graph.router import (
    FEATURE_NAMES,
    AdaptiveRouter,
    RelationPrior,
    RouterConfig,
    router_features,
    tail_labels,
    utility_labels,
)
from scene_graph.schema import SceneGraph, SceneGraphError, TailSplit, Triplet, Vocabulary

VOCABULARY = Vocabulary(("surgeon", "patient"), ("holding", "closeTo", "drilling"))
SPLIT = TailSplit(("holding", "closeTo"), ("drilling",), {}, 0.1, "train")
HOLDING, CLOSE, DRILLING = (Triplet("surgeon", name, "patient") for name in VOCABULARY.predicates)


def draft(triplets, probs, logprobs):
    stats = TokenStats(np.array(probs, np.float32).reshape(-1, 3), np.array(logprobs, np.float32))
    return Prediction(SceneGraph(triplets), "", stats, truncated=False, num_examples=0)


def candidates(make_sample, rng, *rows):
    return [Candidate(make_sample(rng, SceneGraph(triplets)), SceneGraph(triplets), score) for triplets, score in rows]


def test_features_are_those_worked_out_by_hand(make_sample, rng):
    prior = RelationPrior.from_graphs([SceneGraph([HOLDING, CLOSE]), SceneGraph([CLOSE])], VOCABULARY)
    predicted = draft([HOLDING, DRILLING], [[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], [math.log(0.4), math.log(0.8)])
    found = candidates(
        make_sample, rng, ([DRILLING], 3.0), ([CLOSE], 1.0), ([HOLDING, DRILLING], 0.5), ([DRILLING], -2.0)
    )
    (row,) = router_features([predicted], [found], SPLIT, prior)
    features = dict(zip(FEATURE_NAMES, row, strict=True))
    entropies = [-sum(p * math.log(p) for p in probs) for probs in ([0.5, 0.25, 0.25], [0.1, 0.1, 0.8])]
    # 3 triplets are labeled, 2 * 3 * 2 can be written; holding is there once, drilling never.
    surprises = [-math.log(2 / 15), -math.log(1 / 15)]
    expected = {
        "mean_entropy": sum(entropies) / 2,
        "max_entropy": max(entropies),
        "min_logprob": math.log(0.4),
        "mean_logprob": (math.log(0.4) + math.log(0.8)) / 2,
        "min_margin": 0.25,
        "max_tail_mass": 0.8,
        "mean_tail_mass": (0.25 + 0.8) / 2,
        "max_surprise": surprises[1],
        "mean_surprise": sum(surprises) / 2,
        "neighbor_tail_vote": (3.0 + 0.5) / 4.5,  # the score below 0 has no vote
        "neighbor_iou": 1 / 2,
        "draft_has_tail": 1.0,
        "draft_has_holding": 1.0,
        "draft_triplets": 2.0,
    }
    assert tuple(expected) == FEATURE_NAMES
    for name, value in expected.items():
        assert features[name] == pytest.approx(value, rel=1e-6), name


def test_features_of_an_empty_draft_and_no_neighbors_are_finite(make_sample, rng):
    prior = RelationPrior.from_graphs([SceneGraph([HOLDING])], VOCABULARY)
    empty = draft([], [], [])
    found = candidates(make_sample, rng, ([DRILLING], -1.0), ([CLOSE], -2.0))
    rows = router_features([empty, empty], [[], found], SPLIT, prior)
    assert rows.shape == (2, len(FEATURE_NAMES)) and np.isfinite(rows).all()
    vote = FEATURE_NAMES.index("neighbor_tail_vote")
    assert rows[0, vote] == 0 and rows[1, vote] == 0.5  # without a positive score all votes count alike
    with pytest.raises(SceneGraphError, match="2 drafts and 1 lists"):
        router_features([empty, empty], [[]], SPLIT, prior)


def test_only_the_eight_nearest_vote(make_sample, rng):
    prior = RelationPrior.from_graphs([SceneGraph([HOLDING])], VOCABULARY)
    found = candidates(make_sample, rng, *[([CLOSE], 1.0)] * 8, ([DRILLING], 1.0))
    (row,) = router_features([draft([], [], [])], [found], SPLIT, prior)
    assert row[FEATURE_NAMES.index("neighbor_tail_vote")] == 0


def test_probabilities_of_all_triplets_sum_to_one():
    prior = RelationPrior.from_graphs([SceneGraph([HOLDING, CLOSE]), SceneGraph([CLOSE])], VOCABULARY)
    total = sum(
        math.exp(-prior.surprise(Triplet(subject, predicate, object)))
        for subject in VOCABULARY.entities
        for predicate in VOCABULARY.predicates
        for object in VOCABULARY.entities
    )
    assert total == pytest.approx(1)


def test_targets_say_who_is_rare_and_who_gains():
    graphs = [SceneGraph([DRILLING]), SceneGraph([HOLDING]), SceneGraph()]
    assert tail_labels(graphs, SPLIT).tolist() == [True, False, False]
    drafts = [SceneGraph(), SceneGraph([HOLDING]), SceneGraph()]
    answers = [SceneGraph([DRILLING]), SceneGraph([CLOSE]), SceneGraph()]
    assert utility_labels(drafts, answers, graphs).tolist() == [True, False, False]


# --- fitting -----------------------------------------------------------------------------------------------------


def frames(seed, count=600, bias=-1.8):
    """Features of which a few tell a rare frame, with scales as real ones have."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(count, len(FEATURE_NAMES)))
    logits = 1.6 * noise[:, 5] + 1.2 * noise[:, 9] - 0.8 * noise[:, 3] + bias
    labels = rng.random(count) < 1 / (1 + np.exp(-logits))
    scales = np.geomspace(0.01, 30, len(FEATURE_NAMES))
    return noise * scales + 3 * scales - 5 * (np.arange(len(FEATURE_NAMES)) == 3) * scales, labels


@pytest.fixture(scope="module")
def router():
    features, labels = frames(0)
    return AdaptiveRouter().fit(features, labels)


def test_it_ranks_unseen_frames_about_as_well_as_logistic_regression_where_that_is_the_truth(router):
    features, labels = frames(0)
    unseen, truth = frames(1, 3000)
    scale = features.std(axis=0)
    linear = LogisticRegression(class_weight="balanced").fit(features / scale, labels)
    reference = roc_auc_score(truth, linear.predict_proba(unseen / scale)[:, 1])
    assert reference > 0.85, "the data are too hard to tell anything"
    assert roc_auc_score(truth, router.predict_proba(unseen)) > reference - 0.025


def test_it_learns_what_a_line_cannot():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(800, len(FEATURE_NAMES)))
    labels = np.abs(features[:, 2] - features[:, 7]) > 1.6
    router = AdaptiveRouter().fit(features[:500], labels[:500])
    assert roc_auc_score(labels[500:], router.predict_proba(features[500:])) > 0.85
    linear = LogisticRegression().fit(features[:500], labels[:500])
    assert roc_auc_score(labels[500:], linear.predict_proba(features[500:])[:, 1]) < 0.65


@pytest.mark.parametrize("loss", ["bce", "focal"])
def test_rare_positives_weigh_as_much_as_all_others(loss):
    """With both classes weighing the same, frames without any evidence get one half, not the base rate."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, len(FEATURE_NAMES)))
    labels = np.arange(400) % 10 == 0
    strong = AdaptiveRouter(RouterConfig(loss=loss, weight_decay=1e4)).fit(features, labels)
    np.testing.assert_allclose(strong.predict_proba(features), 0.5, atol=0.02)


def test_the_same_seed_gives_the_same_router_whatever_was_drawn_before():
    features, labels = frames(0)
    first = AdaptiveRouter().fit(features, labels).predict_proba(features)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    np.testing.assert_array_equal(AdaptiveRouter().fit(features, labels).predict_proba(features), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.abs(AdaptiveRouter(RouterConfig(seed=1)).fit(features, labels).predict_proba(features) - first).max() > 0


def test_a_feature_that_never_varied_is_ignored_later():
    features, labels = frames(0)
    features[:, 12] = 1.0
    router = AdaptiveRouter().fit(features, labels)
    before = router.predict_proba(features)
    features[:, 12] = 0.0
    np.testing.assert_array_equal(router.predict_proba(features), before)


def test_mistakes_are_named():
    features, labels = frames(0)
    with pytest.raises(SceneGraphError, match=r"\(600, 13\)"):
        AdaptiveRouter().fit(features[:, 1:], labels)
    with pytest.raises(SceneGraphError, match="0 of them true"):
        AdaptiveRouter().fit(features, np.zeros(600, bool))
    features[3, 3] = np.nan
    with pytest.raises(SceneGraphError, match="finite"):
        AdaptiveRouter().predict_proba(features)
    with pytest.raises(SceneGraphError, match="did you mean 'focal'"):
        RouterConfig(loss="focus")
    with pytest.raises(SceneGraphError, match="target"):
        RouterConfig(target="head")


# --- calibration and threshold -----------------------------------------------------------------------------------


def test_calibration_makes_probabilities_honest_and_keeps_the_order(router):
    # Balanced classes, so that a temperature is all that can be wrong.
    features, labels = frames(2, 2000, bias=0.0)
    over = AdaptiveRouter(RouterConfig(weight_decay=0.0, iterations=30)).fit(
        features[:150], labels[:150]
    )  # over-fitted: too sure
    unseen, truth = features[150:], labels[150:]
    before = over.predict_proba(unseen)
    area = over.calibrate(unseen, truth)
    after = over.predict_proba(unseen)
    assert over.temperature > 1.5

    def nll(probabilities):
        return -np.log(np.where(truth, probabilities, 1 - probabilities)).mean()

    assert nll(after) < nll(before)
    assert area == pytest.approx(roc_auc_score(truth, after))
    # Where probabilities aren't at their limits, the order is the same.
    inner = (before > 1e-6) & (before < 1 - 1e-6)
    np.testing.assert_array_equal(np.argsort(before[inner], kind="stable"), np.argsort(after[inner], kind="stable"))
    for factor in (0.8, 1.25):
        logits = np.log(after / (1 - after)) * factor
        assert nll(1 / (1 + np.exp(-logits))) > nll(after) - 1e-3, "another temperature is better"


def test_raising_the_threshold_never_routes_more(router):
    features, _ = frames(3)
    probabilities = router.predict_proba(features)
    shares = [(probabilities > threshold).mean() for threshold in np.linspace(0, 1, 101)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0 and shares[-1] == 0.0


def test_thresholds_0_and_1_send_all_and_none_even_if_logits_are_huge(router):
    features, _ = frames(3)
    router = AdaptiveRouter().fit(*frames(0))
    router.temperature = 1e-4
    probabilities = router.predict_proba(features * 1e6)
    assert (probabilities > 0).all() and not (probabilities > 1).any()


def test_fitting_on_seen_takes_is_warned_about():
    features, labels = frames(0)
    column = FEATURE_NAMES.index("mean_logprob")
    features[:, column] = -0.01
    router = AdaptiveRouter().fit(features, labels)
    held_out = features.copy()
    held_out[:, column] = -0.5
    with pytest.warns(UserWarning, match=r"0\.99, on held-out frames 0\.61"):
        router.calibrate(held_out, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        router.calibrate(features, labels)


def outcome(labels, harm):
    """Macro and head F1 as functions of the routed frames: rare frames gain, each other one costs head F1."""

    def evaluate(routed):
        head = 0.8 - harm * float((routed & ~labels).mean())
        return 0.5 + 0.4 * float((routed & labels).sum() / labels.sum()) - (0.8 - head), head

    return evaluate


@pytest.mark.parametrize("harm", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("budget", [None, 0.1])
def test_threshold_is_the_best_allowed_one_by_exhaustive_search(router, harm, budget):
    features, labels = frames(4, 80)
    evaluate = outcome(labels, harm)
    rows = router.choose_threshold(features, evaluate, epsilon=0.005, budget=budget, num_thresholds=1000)
    probabilities = router.predict_proba(features)
    best = (-1.0, 0.0)
    for threshold in [1.0, *sorted(probabilities, reverse=True), 0.0]:
        routed = probabilities > threshold
        macro, head = evaluate(routed)
        if head >= 0.8 - 0.005 and (budget is None or routed.mean() <= budget) and macro > best[0]:
            best = (macro, routed.sum())
    chosen = probabilities > router.threshold
    assert evaluate(chosen)[0] == pytest.approx(best[0])
    assert chosen.sum() == best[1]
    assert rows[0].threshold == 1.0 and rows[0].routed == 0 and rows[-1].routed == 1
    if harm == 0.5:
        assert not rows[-1].is_allowed
    router.threshold = 0.5


def test_nothing_is_routed_if_that_helps_nobody(router):
    features, _ = frames(4, 80)
    router.choose_threshold(features, lambda routed: (0.5 - 0.1 * routed.mean(), 0.8))
    assert not (router.predict_proba(features) > router.threshold).any()
    router.threshold = 0.5
    with pytest.raises(SceneGraphError, match="budget=2"):
        router.choose_threshold(features, lambda routed: (0.5, 0.5), budget=2)
    with pytest.raises(SceneGraphError, match="nan"):
        router.choose_threshold(features, lambda routed: (math.nan, 0.5))


def test_saved_router_decides_the_same(tmp_path):
    features, labels = frames(0)
    router = AdaptiveRouter(RouterConfig(hidden=8, loss="focal")).fit(features, labels)
    router.calibrate(*frames(2))
    router.threshold = 0.37
    router.save_pretrained(tmp_path / "router")
    loaded = AdaptiveRouter.from_pretrained(tmp_path / "router")
    np.testing.assert_array_equal(loaded.predict_proba(features), router.predict_proba(features))
    assert (loaded.threshold, loaded.config, loaded.train_confidence) == (0.37, router.config, router.train_confidence)
    path = tmp_path / "router" / "router.json"
    path.write_text(path.read_text().replace("max_surprise", "surprise"))
    with pytest.raises(SceneGraphError, match="Fit it again"):
        AdaptiveRouter.from_pretrained(tmp_path / "router")
    with pytest.raises(SceneGraphError, match="holds no router"):
        AdaptiveRouter.from_pretrained(tmp_path)


def test_feature_names_hold_those_of_predictors():
    assert FEATURE_NAMES[: len(CONFIDENCE_FEATURES) + len(TAIL_MASS_FEATURES)] == (
        *CONFIDENCE_FEATURES,
        *TAIL_MASS_FEATURES,
    )
    assert len(set(FEATURE_NAMES)) == len(FEATURE_NAMES) == 14
