"""Triplets keep their order, graphs are sets, vocabularies map words, tails come from training labels only."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

import scene_graph
from scene_graph.schema import (
    SOP,
    SPO,
    Sample,
    SceneDataError,
    SceneGraph,
    SceneGraphError,
    TailSplit,
    Triplet,
    TripletIndex,
    Vocabulary,
    idf_weights,
    tail_split,
    triplet_iou,
)

DRILL = Triplet("head surgeon", "drilling", "patient")
HOLD = Triplet("head surgeon", "holding", "instrument")
NEAR = Triplet("circulator", "closeTo", "secondary table")


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, scene_graph; scene_graph.Triplet; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
    assert "SceneGraph" in dir(scene_graph)
    with pytest.raises(AttributeError):
        _ = scene_graph.no_such_name


def test_every_exported_name_exists() -> None:
    missing = [name for name in scene_graph.__all__ if getattr(scene_graph, name, None) is None]
    assert not missing


def test_three_orders_of_a_triplet_convert_without_loss() -> None:
    vocabulary = Vocabulary.or4d()
    assert DRILL.spo() == ("head surgeon", "drilling", "patient")
    assert DRILL.sop() == ("head surgeon", "patient", "drilling")
    assert Triplet.from_spo(DRILL.spo()) == Triplet.from_sop(DRILL.sop()) == DRILL
    index = vocabulary.indices(DRILL)
    assert vocabulary.entities[index.object] == "patient" and vocabulary.predicates[index.predicate] == "drilling"
    assert vocabulary.from_indices(index) == DRILL


def test_a_triplet_in_the_wrong_order_is_refused() -> None:
    with pytest.raises(SceneGraphError, match="SPO"):
        Triplet.from_spo(DRILL.sop())
    with pytest.raises(SceneGraphError, match="SOP"):
        Triplet.from_sop(SPO("a", "b", "c"))
    with pytest.raises(SceneGraphError, match="three words"):
        Triplet.from_sop(["a", "b"])
    with pytest.raises(SceneGraphError, match="three words"):
        Triplet.from_spo("abc")
    with pytest.raises(SceneGraphError, match="TripletIndex"):
        Vocabulary.or4d().from_indices((0, 1, 2))
    with pytest.raises(SceneGraphError, match="predicate of .* does not exist"):
        Vocabulary.or4d().from_indices(TripletIndex(subject=0, predicate=99, object=0))


def test_graphs_are_sets_that_remember_their_order() -> None:
    graph = SceneGraph([HOLD, DRILL, HOLD], {"frame": 3})
    assert graph == SceneGraph({DRILL, HOLD}) and hash(graph) == hash(SceneGraph([DRILL, HOLD]))
    assert list(graph) == [HOLD, DRILL] and graph.sorted() == (DRILL, HOLD)
    assert list(SceneGraph({NEAR, HOLD, DRILL})) == sorted([NEAR, HOLD, DRILL])
    assert len(graph) == 2 and DRILL in graph and NEAR not in graph
    assert graph.entities == ("head surgeon", "instrument", "patient")
    assert graph.predicates == ("drilling", "holding")
    assert graph.without("holding") == SceneGraph([DRILL])
    assert pickle.loads(pickle.dumps(graph)) == graph
    assert not SceneGraph() and SceneGraph().entities == ()
    with pytest.raises(SceneGraphError, match="no Triplet"):
        SceneGraph([("a", "b", "c")])


def test_two_predicates_of_a_pair_are_a_conflict_in_written_order() -> None:
    saw = Triplet("head surgeon", "sawing", "patient")
    graph = SceneGraph([saw, NEAR, DRILL])
    assert graph.conflicts() == {("head surgeon", "patient"): ("sawing", "drilling")}
    assert graph.pairs()[("circulator", "secondary table")] == ("closeTo",)
    assert SceneGraph([saw, NEAR]).conflicts() == {}


def test_a_graph_becomes_english() -> None:
    assert SceneGraph([NEAR]).to_prompt() == "The circulator is close to the secondary table."
    assert SceneGraph().to_prompt()


@pytest.mark.parametrize(
    ("vocabulary", "num_entities", "num_predicates"),
    [(Vocabulary.or4d(), 10, 14), (Vocabulary.mmor(), 23, 16), (Vocabulary.egoexor(), 36, 22)],
)
def test_vocabularies_have_the_sizes_of_their_data_sets(
    vocabulary: Vocabulary, num_entities: int, num_predicates: int
) -> None:
    assert (len(vocabulary.entities), len(vocabulary.predicates)) == (num_entities, num_predicates)
    assert Vocabulary.from_dict(vocabulary.to_dict()) == vocabulary
    assert "none" not in vocabulary.predicates
    assert all(vocabulary.entity(name) == name for name in vocabulary.entities)
    assert all(vocabulary.predicate(name) == name for name in vocabulary.predicates)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("circulating-nurse", "circulator"),
        ("anesthetist", "anaesthetist"),
        ("Patient", "patient"),
        ("instrument_table", "instrument table"),
        ("HEAD-SURGEON", "head surgeon"),
        ("anaesthesia equipment", "anesthesia equipment"),
        ("ot", "operating table"),
        ("human_3", None),
    ],
)
def test_other_spellings_of_entities(word: str, name: str | None) -> None:
    assert Vocabulary.or4d().entity(word) == name


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("CloseTo", "closeTo"),
        ("close to", "closeTo"),
        ("Operating", "manipulating"),
        ("lyingon", "lyingOn"),
        ("x", None),
    ],
)
def test_other_spellings_of_predicates(word: str, name: str | None) -> None:
    assert Vocabulary.or4d().predicate(word) == name


def test_operating_is_a_predicate_and_the_operating_table_an_entity() -> None:
    vocabulary = Vocabulary.mmor()
    assert vocabulary.predicate("Operating") == "manipulating" and vocabulary.entity("operating") is None
    assert (
        vocabulary.entity("operating_table") == "operating table" and vocabulary.predicate("operating_table") is None
    )


def test_unknown_words_are_counted_and_refused_when_strict() -> None:
    vocabulary = Vocabulary.or4d()
    triplets = [Triplet("Head-Surgeon", "Drilling", "Patient"), Triplet("robot", "closeTo", "ghost"), HOLD]
    graph, unknown = vocabulary.normalize(triplets)
    assert graph == SceneGraph([DRILL, HOLD]) and unknown == Counter(robot=1, ghost=1)
    with pytest.raises(SceneGraphError, match="'robot'.*allowed"):
        vocabulary.normalize(triplets, strict=True)
    with pytest.raises(SceneGraphError, match="dril'.*did you mean 'drilling'"):
        vocabulary.indices(Triplet("head surgeon", "dril", "patient"))


def test_a_vocabulary_from_files_leaves_none_out(tmp_path) -> None:
    classes, relations = tmp_path / "classes.txt", tmp_path / "relationships.txt"
    classes.write_text("Patient\ninstrument_table\nnone\n")
    relations.write_text("closeto\nCutting\nnone\n")
    vocabulary = Vocabulary.from_files(classes, relations)
    assert vocabulary.entities == ("patient", "instrument table") and vocabulary.predicates == ("closeTo", "cutting")
    classes.write_text("a\nA\n")
    with pytest.raises(SceneDataError, match="classes.txt"):
        Vocabulary.from_files(classes, relations)
    with pytest.raises(SceneDataError, match="nowhere.txt"):
        Vocabulary.from_files(tmp_path / "nowhere.txt", relations)
    relations.write_text("none\n")
    with pytest.raises(SceneDataError, match=r"relationships\.txt names nothing"):
        Vocabulary.from_files(classes, relations)


def test_bad_vocabularies_are_refused() -> None:
    with pytest.raises(SceneGraphError, match="none"):
        Vocabulary(("a",), ("b", "none"))
    with pytest.raises(SceneGraphError, match="stands for 'c'"):
        Vocabulary(("a",), ("b",), {"x": "c"})


def test_the_tail_is_what_few_training_frames_have() -> None:
    graphs = [SceneGraph([NEAR])] * 17 + [SceneGraph([NEAR, HOLD])] * 2 + [SceneGraph([DRILL])]
    split = tail_split(graphs, Vocabulary.or4d())
    assert split.frequencies["closeTo"] == 0.95 and split.frequencies["holding"] == 0.1
    assert split.head == ("closeTo", "holding") and "drilling" in split.tail and len(split.tail) == 12
    assert split.is_tail(SceneGraph([DRILL])) and not split.is_tail(SceneGraph([NEAR, HOLD]))
    assert not split.is_tail(SceneGraph())
    assert TailSplit.from_dict(split.to_dict()) == split


@pytest.mark.parametrize("source", ["test", "Test", "data/relationships_test.json", ""])
def test_a_tail_from_test_labels_is_refused(source: str) -> None:
    with pytest.raises(SceneGraphError, match="leaks"):
        tail_split([SceneGraph([NEAR])], Vocabulary.or4d(), source=source)


def test_a_tail_needs_frames_and_known_predicates() -> None:
    with pytest.raises(SceneGraphError, match="no labeled frames"):
        tail_split([], Vocabulary.or4d())
    with pytest.raises(SceneGraphError, match="calibrating"):
        tail_split([SceneGraph([Triplet("mps", "calibrating", "tracker")])], Vocabulary.or4d())
    assert tail_split([SceneGraph([NEAR])], Vocabulary.or4d(), source="latest labels").source == "latest labels"


def test_iou_is_jaccard_symmetric_and_one_only_for_equal_graphs(make_graph, rng) -> None:
    weights = {name: float(rng.uniform(0.1, 3)) for name in Vocabulary.or4d().predicates}
    for _ in range(200):
        pool = list(make_graph(rng, num_triplets=6))
        a, b = (SceneGraph([t for t in pool if rng.random() < 0.6]) for _ in range(2))
        union = set(a) | set(b)
        expected = len(set(a) & set(b)) / len(union) if union else 1.0
        assert triplet_iou(a, b) == pytest.approx(expected)
        weighted = triplet_iou(a, b, weights)
        naive = sum(weights[t.predicate] for t in union if t in a and t in b)
        total = sum(weights[t.predicate] for t in union)
        assert weighted == pytest.approx(naive / total if union else 1.0)
        assert weighted == pytest.approx(triplet_iou(b, a, weights)) and 0 <= weighted <= 1
        assert (weighted == 1) == (a == b)
    assert triplet_iou(SceneGraph(), SceneGraph([DRILL])) == 0
    with pytest.raises(SceneGraphError, match="drilling"):
        triplet_iou(SceneGraph(), SceneGraph([DRILL]), {"holding": 1.0})


def test_rare_predicates_weigh_more_and_weights_average_to_one() -> None:
    vocabulary = Vocabulary(("head surgeon", "patient", "instrument", "circulator", "secondary table"),
                            ("closeTo", "holding", "drilling"))  # fmt: skip
    graphs = [SceneGraph([NEAR])] * 6 + [SceneGraph([NEAR, HOLD])] * 3 + [SceneGraph([NEAR, DRILL])]
    raw = [math.log(11 / 11) + 0.05, math.log(11 / 4) + 0.05, math.log(11 / 2) + 0.05]
    weights = idf_weights(graphs, vocabulary)
    assert list(weights) == ["closeTo", "holding", "drilling"]
    assert list(weights.values()) == pytest.approx([3 * value / sum(raw) for value in raw])


def test_images_are_read_when_looked_at_and_errors_name_file_and_sample(builders, make_sample, rng, tmp_path) -> None:
    path = tmp_path / "view.jpg"
    sample = Sample("a_000001", "a", 1, 1.0, (path, np.zeros((4, 5, 3), np.uint8)), ("one", "two"), primary=1)
    assert sample.image().shape == (4, 5, 3)
    with pytest.raises(SceneDataError, match=r"a_000001, view one: .*view\.jpg does not exist"):
        sample.image("one")
    builders.write_image(path, 200)
    assert sample.image(0).shape == (16, 24, 3) and abs(int(sample.image("one").mean()) - 200) <= 1
    assert [image.shape for image in sample.images()] == [(16, 24, 3), (4, 5, 3)]
    path.write_bytes(path.read_bytes()[:300])  # cut short
    with pytest.raises(SceneDataError, match=r"view\.jpg.*damaged"):
        sample.image(0)
    path.write_bytes(b"no image at all")
    with pytest.raises(SceneDataError, match=r"view\.jpg.*damaged"):
        sample.images()
    with pytest.raises(SceneGraphError, match="no view 'three'"):
        sample.image("three")
    with pytest.raises(SceneGraphError, match="no view 2; allowed: 0 to 1"):
        sample.image(2)
    with pytest.raises(SceneDataError, match="float64"):
        Sample("x", "x", 0, 0.0, (np.zeros((2, 2, 3)),), ("v",)).image()
    assert all(image.flags.writeable for image in make_sample(rng).images())


def test_impossible_samples_are_refused() -> None:
    image = np.zeros((2, 2, 3), np.uint8)
    with pytest.raises(SceneGraphError, match="s1 has 0 views"):
        Sample("s1", "t", 0, 0.0, (), ())
    with pytest.raises(SceneGraphError, match="name of its own"):
        Sample("s1", "t", 0, 0.0, (image, image), ("v", "v"))
    with pytest.raises(SceneGraphError, match="primary=1"):
        Sample("s1", "t", 0, 0.0, (image,), ("v",), primary=1)


def test_ten_views_are_fine(make_sample, rng) -> None:
    sample = make_sample(rng, num_views=10)
    assert len(sample.images()) == 10 and np.array_equal(sample.image("camera10"), sample.image(9))


def test_words_of_an_order_are_named() -> None:
    assert SPO._fields == ("subject", "predicate", "object") and SOP._fields == ("subject", "object", "predicate")
