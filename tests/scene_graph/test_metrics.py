"""What would be wrong: numbers that aren't those of the public protocol, or intervals and rankings that flatter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sklearn.metrics import classification_report, ndcg_score, roc_auc_score

from scene_graph.metrics import SceneGraphEvaluator, auc, match_human_indices, ndcg_at_k
from scene_graph.schema import SceneGraph, SceneGraphError, TailSplit, Triplet, Vocabulary

VOCABULARY = Vocabulary.or4d()
SPLIT = TailSplit(
    head=("closeTo", "holding", "lyingOn"),
    tail=("drilling", "cutting"),
    frequencies={},
    max_frame_frequency=0.1,
    source="train",
)


def graph(*rows: str) -> SceneGraph:
    """Triplets in the order given, each "subject,predicate,object"."""
    return SceneGraph([Triplet.from_spo(row.split(",")) for row in rows])


LABEL = graph("head surgeon,holding,instrument", "patient,lyingOn,operating table")
# Of the pair surgeon and instrument the first predicate is wrong and the second right; the last triplet is about
# entities that the labels don't name.
ANSWER = graph(
    "head surgeon,drilling,instrument",
    "head surgeon,holding,instrument",
    "patient,lyingOn,operating table",
    "instrument,closeTo,operating table",
    "circulator,holding,instrument table",
)


def evaluate(answers, labels, takes=None, **settings):
    evaluator = SceneGraphEvaluator(VOCABULARY, **settings)
    evaluator.update(answers, labels, takes or ["a"] * len(labels))
    return evaluator.compute()


def naive_pairs(answer: SceneGraph, label: SceneGraph) -> tuple[list[str], list[str]]:
    """The items of the official protocol, by loops over lists."""
    truths, guesses = [], []
    entities = {row.subject for row in label} | {row.object for row in label}
    for subject in sorted(entities):
        for object_ in sorted(entities):
            if subject == object_:
                continue
            for rows, column in ((label, truths), (answer, guesses)):
                named = [row.predicate for row in rows if row.subject == subject and row.object == object_]
                column.append(named[0] if named else "none")
    return truths, guesses


def noisy(rng: np.random.Generator, label: SceneGraph, make_graph) -> SceneGraph:
    """Some triplets of the label, some with another predicate, and some that are made up."""
    kept = [row for row in label if rng.random() < 0.6]
    changed = [
        Triplet(row.subject, str(rng.choice(VOCABULARY.predicates)), row.object) for row in label if rng.random() < 0.3
    ]
    rows = [*kept, *changed, *make_graph(rng, num_triplets=3)]
    return SceneGraph([rows[index] for index in rng.permutation(len(rows))])


# --- the official protocol ---------------------------------------------------------------------------------------


def test_official_scores_of_a_case_worked_by_hand():
    # 4 labeled entities make 12 ordered pairs: holding, lyingOn and 10 times none. Said: drilling, lyingOn, closeTo
    # and 9 times none. Right: lyingOn and 9 times none.
    report = evaluate([ANSWER], [LABEL], tail=SPLIT)
    none = report.class_score("none")
    assert (none.support, none.predicted, none.precision, none.recall) == (10, 9, 1.0, 0.9)
    assert none.f1 == pytest.approx(18 / 19)
    assert report.class_score("lyingOn").f1 == 1
    wrong = {row.name: (row.support, row.predicted, row.f1) for row in report.classes if row.predicted + row.support}
    assert (wrong["holding"], wrong["drilling"], wrong["closeTo"]) == ((1, 0, 0.0), (0, 1, 0.0), (0, 1, 0.0))
    assert report.scores["macro_f1"] == pytest.approx((1 + 18 / 19) / 15)
    assert report.scores["accuracy"] == pytest.approx(10 / 12)
    # Without none: 1 hit, 3 predictions, 2 labels.
    assert report.scores["micro_f1"] == pytest.approx(2 * 1 / (3 + 2))
    assert report.scores["head_f1"] == pytest.approx(1 / 3) and report.scores["tail_f1"] == 0
    assert report.conflicts == 1


def test_classes_without_support_are_zero_or_left_out():
    report = evaluate([ANSWER], [LABEL], zero_support="skip", tail=SPLIT)
    assert report.scores["macro_f1"] == pytest.approx((0 + 1 + 18 / 19) / 3)
    assert report.scores["macro_recall"] == pytest.approx((0 + 1 + 0.9) / 3)
    assert report.scores["head_f1"] == pytest.approx(1 / 2)
    assert np.isnan(report.scores["tail_f1"]) and report.to_dict()["scores"]["tail_f1"] is None


def test_strict_scores_of_a_case_worked_by_hand():
    report = evaluate([ANSWER], [LABEL], protocol="strict")
    assert [row.name for row in report.classes] == list(VOCABULARY.predicates)
    # Holding: right once, said twice. All: 2 of 5 are right, 2 of 2 are found.
    assert report.class_score("holding").f1 == pytest.approx(2 / 3)
    assert report.scores["micro_precision"] == pytest.approx(2 / 5) and report.scores["micro_recall"] == 1
    assert report.scores["micro_f1"] == pytest.approx(4 / 7)
    assert report.scores["macro_f1"] == pytest.approx((2 / 3 + 1) / 14)
    assert report.scores["set_iou"] == pytest.approx(2 / 5)
    assert report.scores["entity_precision"] == pytest.approx(4 / 6) and report.scores["entity_recall"] == 1
    assert "accuracy" not in report.scores


@pytest.mark.parametrize("seed", range(4))
def test_official_equals_scikit_learn_on_the_expanded_pairs(seed, make_graph):
    rng = np.random.default_rng(seed)
    labels = [make_graph(rng) for _ in range(12)]
    answers = [noisy(rng, label, make_graph) for label in labels]
    truths, guesses = [], []
    for answer, label in zip(answers, labels):
        one, other = naive_pairs(answer, label)
        truths, guesses = truths + one, guesses + other
    names = [*VOCABULARY.predicates, "none"]
    expected = classification_report(truths, guesses, labels=names, output_dict=True, zero_division=0)
    report = evaluate(answers, labels, takes=[str(index % 3) for index in range(12)])
    for row in report.classes:
        oracle = expected[row.name]
        assert (row.precision, row.recall, row.f1) == pytest.approx(
            (oracle["precision"], oracle["recall"], oracle["f1-score"])
        )
        assert row.support == oracle["support"] and row.predicted == guesses.count(row.name)
    for ours, theirs in (("macro_precision", "precision"), ("macro_recall", "recall"), ("macro_f1", "f1-score")):
        assert report.scores[ours] == pytest.approx(expected["macro avg"][theirs])
    assert report.scores["accuracy"] == pytest.approx(expected["accuracy"])
    relations = classification_report(
        truths, guesses, labels=list(VOCABULARY.predicates), output_dict=True, zero_division=0
    )
    assert report.scores["micro_f1"] == pytest.approx(relations["micro avg"]["f1-score"])
    present = [expected[name]["f1-score"] for name in names if expected[name]["support"]]
    skipped = evaluate(answers, labels, zero_support="skip")
    assert skipped.scores["macro_f1"] == pytest.approx(np.mean(present))


def test_strict_equals_scikit_learn_on_indicators(rng, make_graph):
    labels = [make_graph(rng) for _ in range(10)]
    answers = [noisy(rng, label, make_graph) for label in labels]
    truths, guesses = [], []
    for answer, label in zip(answers, labels):
        for row in sorted(set(answer) | set(label)):
            truths.append(row.predicate if row in label else "")
            guesses.append(row.predicate if row in answer else "")
    expected = classification_report(
        truths, guesses, labels=list(VOCABULARY.predicates), output_dict=True, zero_division=0
    )
    report = evaluate(answers, labels, protocol="strict")
    assert [row.f1 for row in report.classes] == pytest.approx(
        [expected[name]["f1-score"] for name in VOCABULARY.predicates]
    )
    assert report.scores["micro_f1"] == pytest.approx(expected["micro avg"]["f1-score"])
    assert report.scores["macro_f1"] == pytest.approx(expected["macro avg"]["f1-score"])


@pytest.mark.parametrize("protocol", ["official", "strict"])
def test_the_labels_themselves_are_perfect(protocol, rng, make_graph):
    labels = [make_graph(rng) for _ in range(20)]
    report = evaluate(labels, labels, protocol=protocol, zero_support="skip")
    for name, value in report.scores.items():
        assert value == 1, name


def test_invented_entities_are_free_officially_and_cost_strictly():
    invented = SceneGraph([*LABEL, Triplet("circulator", "drilling", "instrument table")])
    assert evaluate([invented], [LABEL]).scores["macro_f1"] == evaluate([LABEL], [LABEL]).scores["macro_f1"]
    strict = [evaluate([answer], [LABEL], protocol="strict").scores for answer in (LABEL, invented)]
    assert strict[1]["micro_f1"] < strict[0]["micro_f1"] and strict[1]["set_iou"] < strict[0]["set_iou"]


def test_words_outside_the_vocabulary_are_counted_and_cost_strictly():
    foreign = [*LABEL, Triplet("head surgeon", "juggling", "instrument"), Triplet("robot", "holding", "patient")]
    official = evaluate([foreign], [LABEL])
    assert official.unknown == {"juggling": 1, "robot": 1}
    assert official.scores["macro_f1"] == evaluate([LABEL], [LABEL]).scores["macro_f1"]
    strict = evaluate([foreign], [LABEL], protocol="strict").scores
    assert strict["micro_precision"] == pytest.approx(2 / 4) and strict["set_iou"] == pytest.approx(2 / 4)
    assert "juggling (1)" in official.to_markdown()


def test_a_word_that_names_no_relation_drops_a_triplet_but_an_entity_there_takes_its_place():
    """The public scripts look predicates up among all words; only what isn't there at all is dropped."""
    right = Triplet("head surgeon", "holding", "instrument")
    dropped = evaluate([[Triplet("head surgeon", "juggling", "instrument"), right]], [LABEL])
    blocked = evaluate([[Triplet("head surgeon", "drape table", "instrument"), right]], [LABEL])
    taken = evaluate([[Triplet("head surgeon", "patient", "instrument"), right]], [LABEL])
    assert dropped.class_score("holding").recall == blocked.class_score("holding").recall == 1
    assert taken.class_score("holding").recall == 0


def test_synonyms_and_spelling_count_as_the_name():
    answer = graph("Head_Surgeon,Holding,tool", "patient,lyingon,OT")
    assert evaluate([answer], [LABEL]).scores["accuracy"] == 1
    assert evaluate([answer], [LABEL], protocol="strict").scores["set_iou"] == 1


def test_a_frame_without_relations_has_no_pairs():
    evaluator = SceneGraphEvaluator(VOCABULARY)
    evaluator.update([ANSWER], [SceneGraph()], ["a"])
    report = evaluator.compute()
    assert report.num_samples == 1 and sum(row.support for row in report.classes) == 0
    assert np.isnan(report.scores["accuracy"]) and report.scores["set_iou"] == 0


def test_conflicting_predicates_are_in_the_table():
    assert "1 predicted pairs have more than one predicate." in evaluate([ANSWER], [LABEL]).to_markdown()


def test_parse_failures_are_a_share_of_what_was_parsed():
    evaluator = SceneGraphEvaluator(VOCABULARY)
    evaluator.update([LABEL], [LABEL], ["a"])
    assert "parse_failure_rate" not in evaluator.compute().scores
    evaluator.update([LABEL] * 4, [LABEL] * 4, list("abcd"), parse_failures=[True, False, False, False])
    assert evaluator.compute().scores["parse_failure_rate"] == 0.25


def test_an_update_in_parts_equals_one(rng, make_graph):
    labels = [make_graph(rng) for _ in range(9)]
    answers = [noisy(rng, label, make_graph) for label in labels]
    takes = [str(index % 2) for index in range(9)]
    parts = SceneGraphEvaluator(VOCABULARY)
    for start in range(0, 9, 4):
        parts.update(*(part[start : start + 4] for part in (answers, labels, takes)))
    assert parts.compute() == evaluate(answers, labels, takes)


# --- who is who --------------------------------------------------------------------------------------------------


def brute_force(predicted, labels):
    """As the public script does it: rewrite the predictions for every permutation and count matching labels."""
    names = {name for row in (*predicted, *labels) for name in (row[0], row[2]) if name.startswith("human")}
    names = sorted(names)
    best, most = {}, -1
    for order in itertools.permutations(names):
        renaming = dict(zip(names, order))
        rewritten = [(renaming.get(s, s), p, renaming.get(o, o)) for s, p, o in predicted]
        hits = 0
        for subject, predicate, object_ in labels:
            first = next((row for row in rewritten if (row[0], row[2]) == (subject, object_)), None)
            hits += first is not None and first[1] == predicate
        if hits > most:
            best, most = renaming, hits
    return best, most


def random_rows(rng, num_humans, things_only=False):
    """One predicate for each of some ordered pairs."""
    humans = [f"human_{index}" for index in range(num_humans)]
    others = ["patient", "instrument", "operating table"]
    pairs = list(itertools.product(humans, others))
    if not things_only:
        pairs += list(itertools.permutations(humans, 2)) + [("patient", human) for human in humans]
    chosen = rng.permutation(len(pairs))[: 3 * num_humans]
    return [(pairs[i][0], str(rng.choice(["holding", "cutting", "closeTo"])), pairs[i][1]) for i in chosen]


@pytest.mark.parametrize("seed", range(8))
def test_people_are_matched_as_by_brute_force(seed):
    rng = np.random.default_rng(seed)
    labels, predicted = random_rows(rng, 4), random_rows(rng, 3)
    predicted += [(row[0], "drilling", row[2]) for row in predicted[:2]]
    assert match_human_indices(predicted, labels) == brute_force(predicted, labels)[0]


@pytest.mark.parametrize("seed", range(4))
def test_many_people_are_assigned_as_well_as_by_brute_force(seed):
    rng = np.random.default_rng(seed)
    labels = random_rows(rng, 6, things_only=True)
    order = rng.permutation(6)
    predicted = [(f"human_{order[int(row[0][-1])]}", row[1], row[2]) for row in labels[:-3]]
    predicted += random_rows(rng, 3, things_only=True)
    renaming = match_human_indices(predicted, labels)
    assert sorted(renaming) == sorted(renaming.values()) == [f"human_{index}" for index in range(6)]
    rewritten = {}
    for subject, predicate, object_ in predicted:
        rewritten.setdefault((renaming[subject], object_), predicate)
    hits = sum(rewritten.get((row[0], row[2])) == row[1] for row in labels)
    assert hits == brute_force(predicted, labels)[1]


def test_numbered_people_are_scored_by_the_best_naming():
    # Sorted roles are numbered assistant 0, surgeon 1; the labels have it the other way around.
    label = graph("human_0,cutting,patient", "human_1,assisting,human_0", "human_1,holding,instrument")
    answer = graph(
        "head surgeon,cutting,patient", "assistant surgeon,assisting,head surgeon", "assistant surgeon,holding,patient"
    )
    report = evaluate([answer], [label], match_humans=True, protocol="strict")
    assert report.class_score("cutting").f1 == report.class_score("assisting").f1 == 1
    assert report.class_score("holding").f1 == 0 and report.scores["set_iou"] == pytest.approx(2 / 4)
    with pytest.raises(SceneGraphError, match="human_0"):
        evaluate([answer], [label])


def test_nobody_is_matched_to_nothing():
    assert match_human_indices([], [("human_0", "holding", "instrument")]) == {}
    assert match_human_indices([("human_0", "holding", "instrument")], []) == {}


# --- intervals ---------------------------------------------------------------------------------------------------


def counted(answers, labels, takes, **settings):
    evaluator = SceneGraphEvaluator(VOCABULARY, tail=SPLIT, **settings)
    evaluator.update(answers, labels, takes)
    return evaluator


def takes_of_varying_quality(rng, make_graph):
    labels = [make_graph(rng, num_triplets=6) for _ in range(24)]
    takes = [f"take{index // 4}" for index in range(24)]
    answers = [label if index // 4 % 2 else noisy(rng, label, make_graph) for index, label in enumerate(labels)]
    return answers, labels, takes


def test_intervals_are_those_of_takes_drawn_whole(rng, make_graph):
    answers, labels, takes = takes_of_varying_quality(rng, make_graph)
    evaluator = counted(answers, labels, takes, protocol="strict", zero_support="skip")
    intervals = evaluator.bootstrap(seed=3, num_resamples=200, confidence=0.8)
    names, draws = sorted(set(takes)), np.random.default_rng(3).multinomial(6, [1 / 6] * 6, 200)
    values = []
    for counts in draws:
        frames = [
            i for name, count in zip(names, counts) for i in np.flatnonzero(np.array(takes) == name).tolist() * count
        ]
        report = evaluate(
            [answers[i] for i in frames], [labels[i] for i in frames], protocol="strict", zero_support="skip"
        )
        values.append([report.scores["macro_f1"], report.scores["set_iou"]])
    expected = np.quantile(values, [0.1, 0.9], axis=0)
    assert intervals["macro_f1"] == pytest.approx(tuple(expected[:, 0]))
    assert intervals["set_iou"] == pytest.approx(tuple(expected[:, 1]))
    assert intervals == evaluator.bootstrap(seed=3, num_resamples=200, confidence=0.8)


def test_a_class_that_was_not_drawn_does_not_pull_a_resample_down():
    rows = [f"head surgeon,{name},instrument" for name in VOCABULARY.predicates]
    labels = [graph(row) for row in rows]
    evaluator = counted(labels, labels, [f"take{index}" for index in range(len(labels))])
    assert evaluator.compute().scores["macro_f1"] == 1
    assert evaluator.bootstrap(seed=0, num_resamples=50)["macro_f1"] == (1, 1)


def test_the_interval_of_a_difference_pairs_the_draws(rng, make_graph):
    answers, labels, takes = takes_of_varying_quality(rng, make_graph)
    better = counted(labels, labels, takes, protocol="strict")
    worse = counted(answers, labels, takes, protocol="strict")
    same = better.bootstrap(seed=0, num_resamples=100, baseline=counted(labels, labels, takes, protocol="strict"))
    assert set(same.values()) == {(0.0, 0.0)}
    low, high = better.bootstrap(seed=0, num_resamples=100, baseline=worse)["micro_f1"]
    gain = better.compute().scores["micro_f1"] - worse.compute().scores["micro_f1"]
    assert 0 < low < gain < high


# --- rankings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 20])
def test_ndcg_equals_scikit_learn_with_and_without_ties(k, rng):
    relevance = rng.random((6, 12))
    for scores in (rng.random((6, 12)), rng.integers(0, 4, (6, 12)), np.zeros((6, 12))):
        expected = [ndcg_score(one[None], other[None], k=k) for one, other in zip(relevance, scores)]
        assert ndcg_at_k(relevance, scores, k) == pytest.approx(expected)
        assert ndcg_at_k(relevance[0], scores[0], k) == pytest.approx(expected[0])


def test_ndcg_of_the_true_order_is_one_and_of_nothing_relevant_zero():
    relevance = np.array([0.2, 0.9, 0.0, 0.5])
    assert ndcg_at_k(relevance, relevance, 3) == 1
    # Best at the second place: 0.9 / log2(3) + 0.2 over 0.9 + 0.5 / log2(3).
    assert ndcg_at_k(relevance, np.array([4, 3, 2, 1]), 2) == pytest.approx(
        (0.2 + 0.9 / np.log2(3)) / (0.9 + 0.5 / np.log2(3))
    )
    assert ndcg_at_k(np.zeros(4), relevance, 3) == 0


def test_auc_equals_scikit_learn_with_and_without_ties(rng):
    labels = rng.random(60) < 0.3
    for scores in (rng.random(60), rng.integers(0, 4, 60), np.zeros(60)):
        assert auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores))


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"protocol": "oficial"}, "did you mean 'official'"),
        ({"zero_support": "skipp"}, "did you mean 'skip'"),
        ({"tail": TailSplit((), ("driling",), {}, 0.1, "train")}, "did you mean 'drilling'"),
    ],
)
def test_wrong_settings_name_the_right_ones(settings, message):
    with pytest.raises(SceneGraphError, match=message):
        SceneGraphEvaluator(VOCABULARY, **settings)


def test_wrong_labels_are_named_and_count_nothing():
    evaluator = SceneGraphEvaluator(VOCABULARY)
    with pytest.raises(SceneGraphError, match=r"frame 1 .*take b.* has no labels"):
        evaluator.update([LABEL, LABEL], [LABEL, None], ["a", "b"])
    with pytest.raises(SceneGraphError, match="'holdin' is not in the vocabulary; did you mean 'holding'"):
        evaluator.update([LABEL, LABEL], [LABEL, graph("head surgeon,holdin,instrument")], ["a", "b"])
    with pytest.raises(SceneGraphError, match="2 predictions, 1 targets, 2 takes"):
        evaluator.update([LABEL, LABEL], [LABEL], ["a", "b"])
    with pytest.raises(SceneGraphError, match="nothing was counted"):
        evaluator.compute()


def test_intervals_need_takes_and_a_baseline_of_the_same_ones():
    one, two = counted([LABEL], [LABEL], ["a"]), counted([LABEL, LABEL], [LABEL, LABEL], ["a", "b"])
    with pytest.raises(SceneGraphError, match="at least 2"):
        one.bootstrap(seed=0)
    with pytest.raises(SceneGraphError, match="baseline counted takes"):
        two.bootstrap(seed=0, baseline=one)
    with pytest.raises(SceneGraphError, match="confidence is 1"):
        two.bootstrap(seed=0, confidence=1)


def test_wrong_rankings_are_refused():
    with pytest.raises(SceneGraphError, match="shape"):
        ndcg_at_k(np.ones(3), np.ones(4), 1)
    with pytest.raises(SceneGraphError, match="negative"):
        ndcg_at_k(np.array([-1.0, 1.0]), np.ones(2), 1)
    with pytest.raises(SceneGraphError, match="0 negatives"):
        auc([True, True], [0.1, 0.2])
