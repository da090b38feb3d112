"""Text and label files keep every triplet in its order; exports can be read by others; damage is reported by file."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from scene_graph.formats import (
    OR4D_RELATIONS,
    Change,
    LabeledFrame,
    change_log,
    complete_relations,
    format_triplet_text,
    forward_relations,
    memory_text,
    mirrored_relations,
    parse_triplet_text,
    read_frame_labels,
    read_graphs,
    read_relations,
    to_4dor_evaluator,
    to_csv,
    to_cypher,
    to_graphml,
    to_jsonld,
    write_frame_labels,
    write_graphs,
    write_mmor_relations,
    write_or4d_relations,
)
from scene_graph.schema import SceneDataError, SceneGraph, SceneGraphError, Triplet, Vocabulary

DRILL = Triplet("head surgeon", "drilling", "patient")
HOLD = Triplet("head surgeon", "holding", "instrument")
LIE = Triplet("patient", "lyingOn", "operating table")
VOCABULARY = Vocabulary.or4d()


# ------------------------------------------------------------------------------------------------ text


@pytest.mark.parametrize("vocabulary", [Vocabulary.or4d(), Vocabulary.mmor(), Vocabulary.egoexor()])
def test_text_and_back_is_the_same_graph(vocabulary: Vocabulary, make_graph, rng) -> None:
    for _ in range(100):
        graph = make_graph(rng, vocabulary)
        parsed = parse_triplet_text(format_triplet_text(graph), vocabulary)
        assert parsed.graph == graph
        assert not (parsed.unknown or parsed.malformed or parsed.truncated or parsed.is_failure)


def test_text_is_subject_object_predicate() -> None:
    graph = SceneGraph([HOLD, DRILL])
    text = "<SG> head surgeon,patient,drilling; head surgeon,instrument,holding </SG>"
    assert format_triplet_text(graph) == text
    assert format_triplet_text([HOLD]) == "<SG> head surgeon,instrument,holding </SG>"
    assert list(parse_triplet_text(text, VOCABULARY).graph) == [DRILL, HOLD]
    assert format_triplet_text([HOLD, DRILL]).index("holding") < format_triplet_text([HOLD, DRILL]).index("drilling")


@pytest.mark.parametrize("text", ["<SG> </SG>", "<SG></SG>", "Here: <SG>  ; </SG></s>"])
def test_an_empty_graph_is_no_failure(text: str) -> None:
    parsed = parse_triplet_text(text, VOCABULARY)
    assert parsed.graph == SceneGraph() and not parsed.is_failure and not parsed.malformed
    assert format_triplet_text(SceneGraph()) == "<SG> </SG>"


@pytest.mark.parametrize(
    "text",
    [
        "head surgeon,patient,drilling",
        "head surgeon,patient,drilling;",
        "Sure! <SG> Head_Surgeon, Patient, Drilling. </SG> Anything else? a,b,c",
        "<SG> head surgeon,patient,drilling; head-surgeon,patient,drilling; </SG><|im_end|>",
        "<SG>head surgeon,patient,drilling\n</SG>",
    ],
)
def test_sloppy_text_is_understood(text: str) -> None:
    parsed = parse_triplet_text(text, VOCABULARY)
    assert parsed.graph == SceneGraph([DRILL]) and not parsed.malformed and not parsed.unknown


def test_synonyms_in_text_are_understood() -> None:
    text = "<SG> circulating-nurse,ot,Operating; anesthetist,anaesthesia_equipment,close to </SG>"
    assert parse_triplet_text(text, VOCABULARY).graph == SceneGraph(
        [
            Triplet("circulator", "manipulating", "operating table"),
            Triplet("anaesthetist", "closeTo", "anesthesia equipment"),
        ]
    )


def test_unknown_words_and_broken_pieces_are_reported_not_lost() -> None:
    text = "<SG> head surgeon,patient,drilling; robot,patient,drilling; robot,head surgeon; a,b,c,d </SG>"
    parsed = parse_triplet_text(text, VOCABULARY)
    assert parsed.graph == SceneGraph([DRILL])
    assert parsed.unknown == Counter(robot=1) and parsed.malformed == ("robot,head surgeon", "a,b,c,d")
    assert not parsed.is_failure
    assert parse_triplet_text("<SG> robot,ghost,flying </SG>", VOCABULARY).is_failure


@pytest.mark.parametrize("text", ["", "I see an operating room.", "one, two"])
def test_text_without_a_graph_is_a_failure(text: str) -> None:
    parsed = parse_triplet_text(text, VOCABULARY)
    assert parsed.is_failure and not parsed.graph and not parsed.truncated


def test_text_that_stops_early_is_truncated_and_its_last_piece_not_blamed() -> None:
    parsed = parse_triplet_text("<SG> head surgeon,patient,drilling; head surgeon,instrument,hol", VOCABULARY)
    assert parsed.truncated and parsed.graph == SceneGraph([DRILL]) and not parsed.unknown
    whole = parse_triplet_text("<SG> head surgeon,patient,drilling; head surgeon,instrument,holding", VOCABULARY)
    assert whole.truncated and whole.graph == SceneGraph([DRILL, HOLD])
    assert parse_triplet_text("<SG> head sur", VOCABULARY).is_failure


def test_the_first_of_two_predicates_comes_first() -> None:
    text = "<SG> head surgeon,patient,sawing; head surgeon,patient,drilling </SG>"
    conflicts = parse_triplet_text(text, VOCABULARY).graph.conflicts()
    assert conflicts == {("head surgeon", "patient"): ("sawing", "drilling")}


def test_names_that_would_break_the_text_are_refused() -> None:
    with pytest.raises(SceneGraphError, match="can't be written"):
        format_triplet_text([Triplet("a,b", "holding", "c")])


# ------------------------------------------------------------------------------------------------ conventions


def test_completion_adds_what_annotators_left_out() -> None:
    nurse = Triplet("circulator", "touching", "patient")
    push = Triplet("anaesthetist", "manipulating", "operating table")
    near = Triplet("anaesthetist", "closeTo", "patient")
    graph = complete_relations(SceneGraph([DRILL, nurse, push, near]))
    assert graph == SceneGraph(
        [
            *(DRILL, nurse, push, near, LIE, HOLD),
            Triplet("head surgeon", "closeTo", "operating table"),
            Triplet("circulator", "closeTo", "operating table"),
        ]
    )
    assert complete_relations(SceneGraph([DRILL]), with_instrument=False) == SceneGraph(
        [DRILL, LIE, Triplet("head surgeon", "closeTo", "operating table")]
    )
    assert complete_relations(SceneGraph()) == SceneGraph()
    touch = Triplet("head surgeon", "touching", "instrument")
    assert complete_relations(SceneGraph([DRILL, touch])).conflicts() == {}


def test_mirroring_and_its_inverse() -> None:
    near = Triplet("circulator", "closeTo", "secondary table")
    mirrored = mirrored_relations(SceneGraph([DRILL, near]))
    assert mirrored == SceneGraph(
        [
            *(DRILL, near),
            Triplet("patient", "closeTo", "head surgeon"),
            Triplet("secondary table", "closeTo", "circulator"),
        ]
    )
    assert forward_relations(mirrored) == SceneGraph([DRILL, near])
    both = SceneGraph(
        [Triplet("head surgeon", "assisting", "circulator"), Triplet("circulator", "touching", "head surgeon")]
    )
    assert mirrored_relations(both) == both == forward_relations(both)


def test_inverse_of_mirroring_on_random_role_level_graphs(rng) -> None:
    # One relation for each unordered pair, closeTo from people to things: what real labels have.
    people = ["anaesthetist", "assistant surgeon", "circulator", "head surgeon"]
    things = [name for name in VOCABULARY.entities if name not in people]
    for _ in range(100):
        triplets = []
        for person in people:
            for thing in things:
                if rng.random() < 0.3:
                    triplets.append(Triplet(person, VOCABULARY.predicates[rng.integers(14)], thing))
        graph = SceneGraph(triplets)
        assert forward_relations(mirrored_relations(graph)) == graph
        assert len(mirrored_relations(graph)) == 2 * len(graph)


# ------------------------------------------------------------------------------------------------ label files


def test_a_frame_label_file_names_people_by_role(tmp_path: Path) -> None:
    path = tmp_path / "000517.json"
    rows = [
        ["human_0", "Drilling", "Patient", "right_hand", "knee"],
        ["human_1", "CloseTo", "secondary_table", "", ""],
        ["human_2", "Operating", "operating_table", "", ""],
        ["human_7", "Touching", "Patient", "", ""],
    ]
    humans = {"human_0": "head-surgeon", "human_1": "none"}
    path.write_text(json.dumps({"rel_annotations": rows, "human_name_annotations": humans}))
    graph, names = read_frame_labels(path, VOCABULARY)
    assert names == humans and graph == SceneGraph(
        [
            DRILL,
            Triplet("circulator", "closeTo", "secondary table"),
            Triplet("circulator", "manipulating", "operating table"),
        ]
    )
    path.write_text(
        json.dumps({"rel_annotations": [["mps", "Calibrating", "mako_robot"], ["anest", "closeTo", "ae"]]})
    )
    graph, _ = read_frame_labels(path, Vocabulary.mmor())
    assert graph == SceneGraph(
        [Triplet("mps", "calibrating", "mako robot"), Triplet("anaesthetist", "closeTo", "anesthesia equipment")]
    )


def independent_4dor(path: Path) -> dict[str, set[tuple[str, str, str]]]:
    """The aggregated file of 4D-OR read with nothing of ours: (subject, object, predicate) by frame."""
    frames = {}
    for scan in json.loads(path.read_text())["scans"]:
        rows = set()
        for subject, object, number, name in scan["relationships"]:
            words = [scan["objects"][str(subject)], scan["objects"][str(object)]]
            words = [scan["human_idx_to_name"].get(word, word).lower().replace("-", "_") for word in words]
            assert sorted(OR4D_RELATIONS)[number] == name
            rows.add((*(word.replace("circulating_nurse", "circulator") for word in words), name))
        frames[f"{scan['take_idx']:03d}_4DOR_{scan['scan']}"] = rows
    return frames


def test_aggregated_4dor_file_agrees_with_an_independent_reader(make_graph, rng, tmp_path: Path) -> None:
    path = tmp_path / "relationships_train.json"
    frames = [LabeledFrame(f"{take:03d}_4DOR", frame, make_graph(rng)) for take in (1, 3) for frame in range(20)]
    write_or4d_relations(path, frames)
    other = independent_4dor(path)
    for frame in frames:
        expected = {
            (s.replace(" ", "_"), o.replace(" ", "_"), "Operating" if p == "manipulating" else p[0].upper() + p[1:])
            for s, o, p in (triplet.sop() for triplet in frame.graph)
        }
        assert other[frame.id] == expected
    back = read_relations(path, VOCABULARY, strict=True)
    assert [(frame.id, frame.graph) for frame in back] == [(frame.id, frame.graph) for frame in frames]


def test_humans_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "labels.json"
    humans = {"human_3": "head-surgeon", "human_0": "none"}
    write_or4d_relations(path, [LabeledFrame("002_4DOR", 5, SceneGraph([DRILL]), humans)])
    scan = json.loads(path.read_text())["scans"][0]
    assert scan["objects"] == {"1": "Patient", "2": "human_3"}
    assert scan["relationships"] == [[2, 1, OR4D_RELATIONS.index("Drilling"), "Drilling"]]
    assert read_relations(path, VOCABULARY)[0].humans == humans


def test_mmor_file_is_subject_object_predicate(make_graph, rng, tmp_path: Path) -> None:
    path, vocabulary = tmp_path / "relationships_test.json", Vocabulary.mmor()
    frames = [LabeledFrame("004_PKA_MMOR", frame, make_graph(rng, vocabulary)) for frame in range(20)]
    write_mmor_relations(path, [*frames, LabeledFrame("002_4DOR", 8, SceneGraph([HOLD]))])
    last = json.loads(path.read_text())[-1]
    assert last == {
        "take_name": "002_4DOR",
        "frame_id": "000008",
        "relationships": [["head_surgeon", "instrument", "holding"]],
    }
    back = read_relations(path, vocabulary, strict=True)
    assert [(frame.id, frame.graph) for frame in back[:-1]] == [(frame.id, frame.graph) for frame in frames]
    assert back[-1].take == "002_4DOR" and back[-1].frame == 8


def test_frame_labels_written_and_read(make_graph, rng, tmp_path: Path) -> None:
    for number in range(20):
        graph = make_graph(rng)
        write_frame_labels(tmp_path / f"{number:06d}.json", graph)
        assert read_frame_labels(tmp_path / f"{number:06d}.json", VOCABULARY, strict=True)[0] == graph


def test_a_file_without_labels_has_frames_without_graphs(tmp_path: Path) -> None:
    path = tmp_path / "relationships_test_dummy.json"
    path.write_text(json.dumps({"scans": [{"take_idx": 2, "scan": "000000"}]}))
    assert read_relations(path, VOCABULARY) == [LabeledFrame("002_4DOR", 0, None)]


def test_names_of_other_data_sets_cannot_be_written_as_4dor(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(SceneGraphError, match="drape"):
        write_or4d_relations(path, [LabeledFrame("001_4DOR", 0, SceneGraph([Triplet("drape", "closeTo", "patient")]))])
    with pytest.raises(SceneGraphError, match="calibrating"):
        write_frame_labels(path, SceneGraph([Triplet("head surgeon", "calibrating", "instrument")]))
    with pytest.raises(SceneGraphError, match="004_PKA_MMOR"):
        write_or4d_relations(path, [LabeledFrame("004_PKA_MMOR", 0, SceneGraph())])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged or no JSON"),
        ("3", "neither a file of 4D-OR"),
        ('{"frames": []}', "neither a file of 4D-OR"),
        ('[{"frame_id": "1"}]', "entry 0.*take_name"),
        ('[{"take_name": "a", "frame_id": "x", "relationships": []}]', "frame 'x' is no number"),
        ('[{"take_name": "a", "frame_id": "1", "relationships": [["a", "b"]]}]', "a frame 1.*not a list of 3"),
        ('{"scans": [{"scan": "1"}]}', "scan 0.*take_idx"),
        (
            '{"scans": [{"take_idx": 1, "scan": "7", "objects": {}, "relationships": [[1, 2, 3, "CloseTo"]]}]}',
            "object 1",
        ),
        ('{"scans": [{"take_idx": 1, "scan": "7", "objects": {}, "relationships": [["a", "b", "c"]]}]}', "frame 7"),
        ('{"scans": [{"take_idx": 1, "scan": "7"}, {"take_idx": 1, "scan": "7"}]}', "001_4DOR_000007 twice"),
    ],
)
def test_damaged_label_files_are_reported_by_name(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "relationships_train.json"
    path.write_text(content)
    with pytest.raises(SceneDataError, match=rf"relationships_train\.json.*{message}"):
        read_relations(path, VOCABULARY)


def test_unknown_labels_are_counted_or_raise_with_file_and_frame(tmp_path: Path) -> None:
    path = tmp_path / "relationships_train.json"
    rows = [["head_surgeon", "patient", "drilling"], ["head_surgeon", "pationt", "drilling"]]
    path.write_text(json.dumps([{"take_name": "002_4DOR", "frame_id": "000003", "relationships": rows}]))
    unknown: Counter[str] = Counter()
    assert read_relations(path, VOCABULARY, unknown=unknown)[0].graph == SceneGraph([DRILL])
    assert unknown == Counter(pationt=1)
    with pytest.raises(SceneDataError, match=r"relationships_train\.json, 002_4DOR frame 3: 'pationt'.*'patient'"):
        read_relations(path, VOCABULARY, strict=True)
    with pytest.raises(SceneDataError, match=r"nowhere\.json does not exist"):
        read_relations(tmp_path / "nowhere.json", VOCABULARY)
    with pytest.raises(SceneDataError, match="rel_annotations"):
        read_frame_labels(path, VOCABULARY)


# ------------------------------------------------------------------------------------------------ exports


@pytest.fixture
def graphs(make_graph, rng) -> dict[str, SceneGraph]:
    return {f"002_4DOR_{frame:06d}": make_graph(rng, num_triplets=frame) for frame in range(6)}


def words(graph: SceneGraph) -> set[tuple[str, str, str]]:
    return {tuple(triplet.spo()) for triplet in graph}


def test_evaluator_file_names_humans_and_is_read_back(graphs, tmp_path: Path) -> None:
    scans = to_4dor_evaluator(
        {"002_4DOR_000517": SceneGraph([DRILL, LIE])}, {"002_4DOR_000517": {"human_2": "head-surgeon"}}
    )
    assert scans == {
        "2_000517_0": [["human_2", "Drilling", "Patient"], ["Patient", "LyingOn", "operating_table"]],
    }
    roles = {f"2_{frame:06d}_0": {"human_0": "anaesthetist", "human_1": "assistant-surgeon", "human_2": "head-surgeon",
                                  "human_3": "circulating-nurse"} for frame in range(6)}  # fmt: skip
    by_sample = {f"002_4DOR_{frame:06d}": roles[f"2_{frame:06d}_0"] for frame in range(6)}
    path = tmp_path / "preds.json"
    path.write_text(json.dumps(to_4dor_evaluator(graphs, by_sample)))
    back = read_graphs(path, VOCABULARY, strict=True, humans=roles)
    assert list(back.values()) == list(graphs.values())
    with pytest.raises(SceneGraphError, match="004_PKA_MMOR_000001"):
        to_4dor_evaluator({"004_PKA_MMOR_000001": SceneGraph()})


def test_graphs_written_and_read_keep_their_order(graphs, tmp_path: Path) -> None:
    path = tmp_path / "graphs.json"
    graphs["x"] = SceneGraph([HOLD, DRILL])
    write_graphs(path, graphs)
    back = read_graphs(path, VOCABULARY, strict=True)
    assert back == graphs and list(back["x"]) == [HOLD, DRILL]
    path.write_text("[]")
    with pytest.raises(SceneDataError, match=r"graphs\.json is no file of graphs"):
        read_graphs(path, VOCABULARY)


def test_csv_holds_every_triplet(graphs) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(graphs))))
    assert {row["sample"] for row in rows} == set(graphs)
    for name, graph in graphs.items():
        found = {(r["subject"], r["predicate"], r["object"]) for r in rows if r["sample"] == name and r["subject"]}
        assert found == words(graph)


def test_graphml_is_xml_with_every_triplet(graphs) -> None:
    tree = ElementTree.fromstring(to_graphml(graphs))
    space = {"g": "http://graphml.graphdrawing.org/xmlns"}
    keys = {key.get("id"): key.get("attr.name") for key in tree.findall("g:key", space)}

    def data(element: ElementTree.Element) -> dict[str, str]:
        return {keys[item.get("key")]: item.text for item in element.findall("g:data", space)}

    nodes = {node.get("id"): data(node) for node in tree.iter(f"{{{space['g']}}}node")}
    found = Counter()
    for edge in tree.iter(f"{{{space['g']}}}edge"):
        source, target = nodes[edge.get("source")], nodes[edge.get("target")]
        found[source["frame"], source["name"], data(edge)["predicate"], target["name"]] += 1
    assert found == Counter((name, *triplet) for name, graph in graphs.items() for triplet in words(graph))


def test_cypher_holds_names_in_parameters_only(graphs) -> None:
    evil = 'x"}) DETACH DELETE n //'
    statement, parameters = to_cypher({**graphs, evil: SceneGraph([DRILL])})
    assert "drilling" not in statement and "DELETE" not in statement and "$frames" in statement
    frames = {frame["id"]: frame["triplets"] for frame in json.loads(json.dumps(parameters))["frames"]}
    assert frames[evil] == [{"subject": "head surgeon", "predicate": "drilling", "object": "patient"}]
    assert all(
        {(t["subject"], t["predicate"], t["object"]) for t in frames[name]} == words(g) for name, g in graphs.items()
    )


def test_jsonld_links_every_triplet(graphs) -> None:
    document = json.loads(json.dumps(to_jsonld(graphs)))
    nodes = {node["@id"]: node for node in document["@graph"]}
    assert len(nodes) == len(document["@graph"]) and "@context" in document
    assert all(" " not in node_id for node_id in nodes)
    found = {name: set() for name in graphs}
    for node in nodes.values():
        if node["@type"] == "Relation":
            subject, object, frame = (nodes[node[key]["@id"]]["name"] for key in ("subject", "object", "frame"))
            found[frame].add((subject, node["predicate"], object))
    assert found == {name: words(graph) for name, graph in graphs.items()}


# ------------------------------------------------------------------------------------------------ memory


def test_a_changed_predicate_is_an_end_and_a_beginning() -> None:
    saw = Triplet("head surgeon", "sawing", "patient")
    near = Triplet("head surgeon", "closeTo", "patient")
    log = change_log(
        [(3, SceneGraph([DRILL])), (4, SceneGraph([saw])), (6, SceneGraph([saw, HOLD])), (7, SceneGraph([near]))]
    )
    assert log == [
        Change(3, DRILL),
        Change(4, DRILL, is_removal=True),
        Change(4, saw),
        Change(6, HOLD),
        Change(7, HOLD, is_removal=True),
        Change(7, saw, is_removal=True),
    ]
    with pytest.raises(SceneGraphError, match="frame 3 follows frame 3"):
        change_log([(3, SceneGraph()), (3, SceneGraph())])


def test_the_log_replays_to_the_last_graph(make_graph, rng) -> None:
    frames = [(number, make_graph(rng)) for number in range(30)]
    state: set[Triplet] = set()
    for change in change_log(frames, ignored=()):
        (state.remove if change.is_removal else state.add)(change.triplet)
    assert state == frames[-1][1].triplets


def test_memory_text_orders_and_shortens() -> None:
    names = ["cutting", "sawing", "drilling", "hammering", "cementing", "suturing"]
    actions = [Triplet("head surgeon", name, "patient") for name in names]
    log = change_log([(number, SceneGraph([action])) for number, action in enumerate(actions)])
    short = memory_text(log, "short")
    assert short == (
        "Short: head surgeon,patient,hammering; head surgeon,patient,not hammering; head surgeon,patient,cementing; "
        "head surgeon,patient,not cementing; head surgeon,patient,suturing;"
    )
    both = memory_text(log)
    assert both.endswith(short) and both.startswith("Long: head surgeon,patient,cutting; head surgeon,patient,sawing;")
    assert "not" not in both.split("Short:")[0]
    long = memory_text(log, "long")
    assert [item.split(",")[-1] for item in long.removesuffix(";").split(";")] == names
    assert memory_text([]) == ""
    with pytest.raises(SceneGraphError, match="style='longish'"):
        memory_text(log, "longish")
    with pytest.raises(SceneGraphError, match="drop"):
        memory_text(log, drop=0.5)


def test_dropped_memory_is_a_repeatable_part() -> None:
    log = [Change(number, Triplet("head surgeon", "cutting", f"object {number}")) for number in range(200)]
    texts = [memory_text(log, "long", drop=0.5, rng=np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert 70 < texts[0].count(";") < 130
