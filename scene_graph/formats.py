"""Scene graphs as text and files: what language models write, the label files of 4D-OR and MM-OR, and exports.

    text of a model            <SG> head surgeon,patient,drilling; … </SG>       subject, object, predicate
    4D-OR, one file per frame  rel_annotations: [[sub, pred, obj, …], …]         subject, predicate, object
    4D-OR, aggregated          {"scans": [{"relationships": [[1, 2, 5, "…"]]}]}  subject, object, predicate, by index
    MM-OR, one file per frame  rel_annotations: [[sub, pred, obj], …]            subject, predicate, object
    MM-OR, aggregated          [{"relationships": [[sub, obj, pred], …]}, …]     subject, object, predicate
    predictions                {"2_000517_0": [[sub, pred, obj], …]}             subject, predicate, object

The aggregated files of 4D-OR name people `human_0` … and say who they are beside; they store every closeTo in both
directions, and one for each other relation. Those of MM-OR name roles and have each closeTo once. Graphs here have
roles; `mirrored_relations` and `forward_relations` go from one habit to the other.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scene_graph.schema import (
    SceneDataError,
    SceneGraph,
    SceneGraphError,
    Triplet,
    Vocabulary,
)
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.errors import suggestion

# Predicates of 4D-OR as its files write and number them.
OR4D_RELATIONS = (
    "Assisting",
    "Cementing",
    "Cleaning",
    "CloseTo",
    "Cutting",
    "Drilling",
    "Hammering",
    "Holding",
    "LyingOn",
    "Operating",
    "Preparing",
    "Sawing",
    "Suturing",
    "Touching",
)
# Roles as 4D-OR's files write them, and everything else that isn't a human.
OR4D_ROLES = {
    "head surgeon": "head-surgeon",
    "assistant surgeon": "assistant-surgeon",
    "circulator": "circulating-nurse",
    "anaesthetist": "anaesthetist",
}
NUM_OR4D_HUMANS = 6
# A person whose role nobody wrote down counts as this one, as in MM-OR's converter.
UNNAMED_ROLE = "circulator"
# Artifacts of the labeling tool, which MM-OR's converter leaves out.
IGNORED_HUMANS = ("human_7", "human_8")
# Whoever does one of these holds an instrument, says MM-OR's converter of 4D-OR.
TOOL_PREDICATES = ("cementing", "cleaning", "cutting", "drilling", "hammering", "sawing", "suturing")
# Who is the subject when two things are close to each other: people before things, and of the other pairs the way
# most labels of MM-OR have it. Only for the patient and the anesthesia equipment they have both (1,709 and 579 of the
# validation and test frames of 4D-OR).
_SUBJECT_RANK = (
    "anaesthetist",
    "assistant surgeon",
    "circulator",
    "head surgeon",
    "nurse",
    "mps",
    "student",
    "patient",
)
SHORT_MEMORY = 5
CONTEXT_IRI = "https://schema.org/"


@dataclass(frozen=True)
class LabeledFrame:
    """A frame of a label file.

    Attributes:
        take: such as `002_4DOR` or `004_PKA_MMOR`.
        frame: number of the frame in the take's list of timestamps; not the number of an image file.
        graph: the labels, None where the file has none.
        humans: role of `human_0` …, as the file writes it; 4D-OR only.
    """

    take: str
    frame: int
    graph: SceneGraph | None
    humans: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Unique name, such as `002_4DOR_000517`."""
        return f"{self.take}_{self.frame:06d}"


# ---------------------------------------------------------------------------------------------- text of a model


@dataclass(frozen=True)
class ParsedGraph:
    """What was understood of a model's text.

    Attributes:
        graph: the triplets, in the order they were written.
        unknown: words that are in no vocabulary, with their counts; their triplets are left out.
        malformed: pieces that aren't three words with commas between them.
        truncated: the text began a graph and stopped before its end mark.
    """

    graph: SceneGraph
    unknown: Counter[str]
    malformed: tuple[str, ...]
    truncated: bool

    @property
    def is_failure(self) -> bool:
        """Whether nothing could be used of a text that isn't an empty graph."""
        return not self.graph and (self.truncated or bool(self.unknown) or bool(self.malformed))


def parse_triplet_text(text: str, vocabulary: Vocabulary) -> ParsedGraph:
    """Read the graph that a language model wrote; never raises, says what it could not use.

    The part between `<SG>` and `</SG>` counts, or all of the text where a mark is missing; pieces end at `;`, dots are
    dropped, a piece is subject, object, predicate (the protocol of ORacle, arXiv 2404.07031, and MM-OR).

    Args:
        text: as decoded; other marks in angle brackets are ignored.
        vocabulary: names and synonyms that are known.
    """
    start = text.find("<SG>")
    end = text.find("</SG>", max(start, 0))
    body = text[start + len("<SG>") : end] if 0 <= start < end else text
    truncated = start >= 0 and end < 0
    body = re.sub(r"</?[A-Za-z]+>|<\|[^<>|]*\|>", " ", body).replace(".", "")
    pieces = re.split(r"[;\n]", body)
    triplets, unknown, malformed = [], Counter(), []
    for index, piece in enumerate(pieces):
        words = [word.strip() for word in piece.split(",")]
        if words == [""]:
            continue
        is_cut = truncated and index == len(pieces) - 1
        if len(words) != 3:
            if not is_cut:
                malformed.append(piece.strip())
            continue
        known, words_unknown = vocabulary.normalize([Triplet.from_sop(words)])
        triplets.extend(known)
        if not is_cut:
            unknown.update(words_unknown)
    if start < 0 and not triplets and not malformed and not unknown:
        malformed.append(text.strip())  # no marks and no triplet: not even an empty graph
    return ParsedGraph(SceneGraph(triplets), unknown, tuple(malformed), truncated)


def format_triplet_text(graph: SceneGraph | Sequence[Triplet]) -> str:
    """The text that a language model should write: `<SG> subject,object,predicate; … </SG>`.

    Args:
        graph: a graph, written in canonical order, or triplets, written in theirs.

    Raises:
        SceneGraphError: a name contains a character that separates names.
    """
    triplets = graph.sorted() if isinstance(graph, SceneGraph) else tuple(graph)
    for triplet in triplets:
        if any(re.search(r"[,;.<>\n]", word) for word in triplet.spo()):
            raise SceneGraphError(
                f"{triplet} can't be written as text: a name contains one of , ; . < > or a new line."
            )
    body = "; ".join(",".join(triplet.sop()) for triplet in triplets)
    return f"<SG> {body} </SG>" if body else "<SG> </SG>"


# ---------------------------------------------------------------------------------------------- conventions of labels


def complete_relations(graph: SceneGraph, with_instrument: bool = True) -> SceneGraph:
    """Add what annotators left out, as MM-OR's converter does.

    The patient lies on the operating table as soon as either occurs; whoever has a relation with the patient is close
    to the table unless another relation with it is labeled; with `with_instrument`, whoever uses a tool holds an
    instrument.

    Args:
        graph: labels of one frame.
        with_instrument: as for 4D-OR; the labels of MM-OR name the tools themselves.
    """
    triplets = list(graph)
    names = set(graph.entities)
    if names & {"patient", "operating table"}:
        names |= {"patient", "operating table"}
        triplets.append(Triplet("patient", "lyingOn", "operating table"))
    with_patient = {name for t in triplets if "patient" in (t.subject, t.object) for name in (t.subject, t.object)} - {
        "patient",
        "operating table",
    }
    on_table = {t.subject for t in triplets if t.object == "operating table"}
    triplets.extend(Triplet(name, "closeTo", "operating table") for name in sorted(with_patient - on_table))
    if with_instrument:
        taken = {(t.subject, t.object) for t in triplets}
        users = {t.subject for t in graph if t.predicate in TOOL_PREDICATES}
        triplets.extend(
            Triplet(name, "holding", "instrument") for name in sorted(users) if (name, "instrument") not in taken
        )
    return SceneGraph(triplets, graph.meta)


def mirrored_relations(graph: SceneGraph) -> SceneGraph:
    """Add closeTo in the other direction to every pair with a relation in one, as 4D-OR's aggregated files have it."""
    pairs = graph.pairs()
    reverse = [Triplet(o, "closeTo", s) for s, o in pairs if s != o and (o, s) not in pairs]
    return SceneGraph([*graph, *reverse], graph.meta)


def forward_relations(graph: SceneGraph) -> SceneGraph:
    """Undo `mirrored_relations`: each pair of entities keeps its closeTo once, and none beside another relation.

    On the validation and test labels of 4D-OR this gives MM-OR's triplets exactly, but for the direction of closeTo
    between the patient and the anesthesia equipment, which the mirrored form has lost.
    """
    pairs = graph.pairs()

    def is_reverse(triplet: Triplet) -> bool:
        pair = (triplet.subject, triplet.object)
        back = pairs.get(pair[::-1])
        if triplet.predicate != "closeTo" or pair[0] == pair[1] or back is None:
            return False
        if any(predicate != "closeTo" for predicate in back):
            return True
        return _subject_order(pair[0]) > _subject_order(pair[1])

    return SceneGraph([triplet for triplet in graph if not is_reverse(triplet)], graph.meta)


def _subject_order(entity: str) -> tuple[int, str]:
    rank = _SUBJECT_RANK.index(entity) if entity in _SUBJECT_RANK else len(_SUBJECT_RANK)
    return rank, entity


# ---------------------------------------------------------------------------------------------- label files


def read_json(path: str | os.PathLike) -> Any:
    """Read a JSON file.

    Raises:
        SceneDataError: it is missing, or no JSON.
    """
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SceneDataError(f"{path} does not exist.") from error
    except (OSError, ValueError) as error:
        raise SceneDataError(f"cannot read {path}: {error}; it is damaged or no JSON file.") from error


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Write a JSON file that appears under its name when whole."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content), encoding="utf-8")


class _Reader:
    """Turns the words of one label file into triplets, and complains with the name of the file."""

    def __init__(self, path: str | os.PathLike, vocabulary: Vocabulary, strict: bool, unknown: Counter | None) -> None:
        self.path, self.vocabulary, self.strict = Path(path), vocabulary, strict
        self.unknown = Counter() if unknown is None else unknown

    def fail(self, where: str, problem: str) -> SceneDataError:
        return SceneDataError(f"{self.path}, {where}: {problem}.")

    def graph(self, triplets: Iterable[Triplet], where: str, humans: Mapping[str, str]) -> SceneGraph:
        named = []
        for triplet in triplets:
            if triplet.subject in IGNORED_HUMANS or triplet.object in IGNORED_HUMANS:
                continue
            subject, object = (_role(word, humans) for word in (triplet.subject, triplet.object))
            named.append(Triplet(subject, triplet.predicate, object))
        try:
            graph, unknown = self.vocabulary.normalize(named, self.strict)
        except SceneGraphError as error:
            raise self.fail(where, str(error).rstrip(".")) from error
        self.unknown.update(unknown)
        return SceneGraph(graph, {"humans": dict(humans)} if humans else None)

    def words(self, row: Any, where: str, lengths: tuple[int, ...]) -> list[str]:
        if not isinstance(row, list) or len(row) not in lengths or not all(isinstance(word, str) for word in row[:3]):
            raise self.fail(where, f"relation {row!r} is not a list of {' or '.join(map(str, lengths))} names")
        return row


def _role(word: str, humans: Mapping[str, str]) -> str:
    if not word.startswith("human_"):
        return word
    role = humans.get(word, "none")
    return UNNAMED_ROLE if role == "none" else role


def read_frame_labels(
    path: str | os.PathLike, vocabulary: Vocabulary, strict: bool = False, unknown: Counter[str] | None = None
) -> tuple[SceneGraph, dict[str, str]]:
    """Read `relation_labels/000517.json` of 4D-OR or MM-OR: the annotators' relations, nothing inferred.

    Args:
        path: the file.
        vocabulary: of the data set.
        strict: raise at an unknown word instead of leaving its triplet out.
        unknown: where to count unknown words.

    Returns:
        The graph with roles in place of humans, and the role of each human as written.

    Raises:
        SceneDataError: the file is missing, damaged or of another layout, or `strict` and a word is unknown.
    """
    reader = _Reader(path, vocabulary, strict, unknown)
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("rel_annotations"), list):
        raise SceneDataError(f"{path} has no list 'rel_annotations'; it isn't a label file of one frame.")
    humans = content.get("human_name_annotations") or {}
    rows = [reader.words(row, "rel_annotations", (3, 5)) for row in content["rel_annotations"]]
    return reader.graph([Triplet.from_spo(row[:3]) for row in rows], "rel_annotations", humans), humans


def write_frame_labels(path: str | os.PathLike, graph: SceneGraph, humans: Mapping[str, str] | None = None) -> None:
    """Write `relation_labels/000517.json` of 4D-OR; what touches what is left empty.

    Args:
        path: the file.
        graph: with roles.
        humans: role of `human_0` …; by default each role of the graph gets a human.

    Raises:
        SceneGraphError: a name or predicate that 4D-OR doesn't have.
    """
    humans = name_humans(graph, humans)
    rows = [
        [_raw_entity(t.subject, humans), _raw_predicate(t.predicate), _raw_entity(t.object, humans), "", ""]
        for t in graph.sorted()
    ]
    write_json(path, {"rel_annotations": rows, "human_name_annotations": humans})


def name_humans(graph: SceneGraph, humans: Mapping[str, str] | None = None) -> dict[str, str]:
    """The role of each human as 4D-OR writes it, with a human for every role of the graph that has none.

    Raises:
        SceneGraphError: there are more roles than humans.
    """
    named = dict(humans or {})
    present = {OR4D_ROLES[name] for name in graph.entities if name in OR4D_ROLES} - set(named.values())
    free = [f"human_{index}" for index in range(NUM_OR4D_HUMANS) if f"human_{index}" not in named]
    if len(present) > len(free):
        raise SceneGraphError(
            f"{named} leaves no human for {', '.join(sorted(present))}; 4D-OR has {NUM_OR4D_HUMANS}."
        )
    named.update(zip(free, sorted(present)))
    return named


def _raw_entity(name: str, humans: Mapping[str, str]) -> str:
    if name == "patient":
        return "Patient"
    role = OR4D_ROLES.get(name)
    if role is None:
        if Vocabulary.or4d().entity(name) != name:
            raise SceneGraphError(f"entity {name!r} is not in 4D-OR: {suggestion(name, Vocabulary.or4d().entities)}.")
        return name.replace(" ", "_")
    return min(human for human, given in humans.items() if given == role)


def _raw_predicate(name: str) -> str:
    raw = "Operating" if name == "manipulating" else name[:1].upper() + name[1:]
    if raw not in OR4D_RELATIONS:
        raise SceneGraphError(f"predicate {name!r} is not in 4D-OR: {suggestion(name, Vocabulary.or4d().predicates)}.")
    return raw


def read_relations(
    path: str | os.PathLike, vocabulary: Vocabulary, strict: bool = False, unknown: Counter[str] | None = None
) -> list[LabeledFrame]:
    """Read an aggregated label file, `relationships_train.json`, of 4D-OR or MM-OR, whichever it is.

    Args:
        path: the file.
        vocabulary: of the data set.
        strict: raise at an unknown word instead of leaving its triplet out.
        unknown: where to count unknown words.

    Returns:
        The frames in the order of the file, closeTo as stored. Frames of a file without labels, such as
        `relationships_test_dummy.json`, have no graph.

    Raises:
        SceneDataError: the file is missing, damaged or of another layout, a frame is in it twice, or `strict` and a
            word is unknown.
    """
    content = read_json(path)
    reader = _Reader(path, vocabulary, strict, unknown)
    if isinstance(content, dict) and isinstance(content.get("scans"), list):
        frames = [_read_scan(scan, index, reader) for index, scan in enumerate(content["scans"])]
    elif isinstance(content, list):
        frames = [_read_entry(entry, index, reader) for index, entry in enumerate(content)]
    else:
        raise SceneDataError(
            f"{path} is neither a file of 4D-OR ({{'scans': [...]}}) nor one of MM-OR (a list of frames)."
        )
    repeated = [frame_id for frame_id, count in Counter(frame.id for frame in frames).items() if count > 1]
    if repeated:
        raise SceneDataError(f"{path} has frame {repeated[0]} twice.")
    return frames


def is_mirrored(path: str | os.PathLike) -> bool:
    """Whether an aggregated label file is one of 4D-OR, which stores closeness in both directions."""
    return isinstance(read_json(path), dict)


def _frame_number(text: Any, where: str, reader: _Reader) -> int:
    try:
        return int(text)
    except (TypeError, ValueError) as error:
        raise reader.fail(where, f"frame {text!r} is no number") from error


def _read_scan(scan: Any, index: int, reader: _Reader) -> LabeledFrame:
    where = f"scan {index}"
    if not isinstance(scan, dict) or "take_idx" not in scan or "scan" not in scan:
        raise reader.fail(where, "it has no 'take_idx' and 'scan'")
    take = f"{_frame_number(scan['take_idx'], where, reader):03d}_4DOR"
    frame = _frame_number(scan["scan"], where, reader)
    if "relationships" not in scan:
        return LabeledFrame(take, frame, None)
    objects, humans = scan.get("objects", {}), scan.get("human_idx_to_name") or {}
    triplets = []
    for row in scan["relationships"]:
        if not isinstance(row, list) or len(row) != 4 or not isinstance(row[3], str):
            raise reader.fail(f"{take} frame {frame}", f"relation {row!r} is not [subject, object, number, name]")
        missing = [number for number in row[:2] if str(number) not in objects]
        if missing:
            raise reader.fail(
                f"{take} frame {frame}", f"relation {row!r} is about object {missing[0]}, not in 'objects'"
            )
        triplets.append(Triplet.from_sop([objects[str(row[0])], objects[str(row[1])], row[3]]))
    return LabeledFrame(take, frame, reader.graph(triplets, f"{take} frame {frame}", humans), humans)


def _read_entry(entry: Any, index: int, reader: _Reader) -> LabeledFrame:
    where = f"entry {index}"
    if not isinstance(entry, dict) or "take_name" not in entry or "frame_id" not in entry:
        raise reader.fail(where, "it has no 'take_name' and 'frame_id'")
    take, frame = str(entry["take_name"]), _frame_number(entry["frame_id"], where, reader)
    if "relationships" not in entry:
        return LabeledFrame(take, frame, None)
    where = f"{take} frame {frame}"
    rows = [reader.words(row, where, (3,)) for row in entry["relationships"]]
    return LabeledFrame(take, frame, reader.graph([Triplet.from_sop(row) for row in rows], where, {}))


def write_or4d_relations(path: str | os.PathLike, frames: Iterable[LabeledFrame]) -> None:
    """Write the aggregated file of 4D-OR, `{"scans": [...]}`, people as humans; closeTo is written as given.

    Args:
        path: the file.
        frames: of takes named `002_4DOR`; without a graph they are written without relations.

    Raises:
        SceneGraphError: another take, or a name that 4D-OR doesn't have.
    """
    scans = []
    for frame in frames:
        number = re.fullmatch(r"(\d+)_4DOR", frame.take)
        if number is None:
            raise SceneGraphError(f"take {frame.take!r} can't be in a file of 4D-OR; allowed: names like '002_4DOR'.")
        scan: dict[str, Any] = {"take_idx": int(number[1]), "scan": f"{frame.frame:06d}"}
        if frame.graph is not None:
            humans = name_humans(frame.graph, frame.humans)
            names = {name: _raw_entity(name, humans) for name in frame.graph.entities}
            numbers = {raw: index + 1 for index, raw in enumerate(sorted(names.values()))}
            scan["objects"] = {str(index): raw for raw, index in numbers.items()}
            scan["relationships"] = []
            for subject, object, predicate in (triplet.sop() for triplet in frame.graph.sorted()):
                raw = _raw_predicate(predicate)
                row = [numbers[names[subject]], numbers[names[object]], OR4D_RELATIONS.index(raw), raw]
                scan["relationships"].append(row)
            scan["human_idx_to_name"] = humans
        scans.append(scan)
    write_json(path, {"scans": scans})


def write_mmor_relations(path: str | os.PathLike, frames: Iterable[LabeledFrame]) -> None:
    """Write the aggregated file of MM-OR, a list of frames with subject, object, predicate."""
    entries = []
    for frame in frames:
        entry: dict[str, Any] = {"take_name": frame.take, "frame_id": f"{frame.frame:06d}"}
        if frame.graph is not None:
            rows = (triplet.sop() for triplet in frame.graph.sorted())
            entry["relationships"] = [[s.replace(" ", "_"), o.replace(" ", "_"), p] for s, o, p in rows]
        entries.append(entry)
    write_json(path, entries)


# ---------------------------------------------------------------------------------------------- predictions


def to_4dor_evaluator(
    graphs: Mapping[str, SceneGraph], humans: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, list[list[str]]]:
    """The upload of 4D-OR's evaluator: `{"2_000517_0": [[subject, predicate, object], …]}` with its own names.

    Args:
        graphs: of samples named like `002_4DOR_000517`.
        humans: by sample, the role of `human_0` …; by default each role of a graph gets a human.

    Raises:
        SceneGraphError: another sample name, or a name that 4D-OR doesn't have.
    """
    scans = {}
    for sample_id, graph in graphs.items():
        parts = re.fullmatch(r"(\d+)_4DOR_(\d+)", sample_id)
        if parts is None:
            raise SceneGraphError(f"sample {sample_id!r} is not of 4D-OR; allowed: names like '002_4DOR_000517'.")
        named = name_humans(graph, (humans or {}).get(sample_id))
        scans[f"{int(parts[1])}_{int(parts[2]):06d}_0"] = [
            [_raw_entity(t.subject, named), _raw_predicate(t.predicate), _raw_entity(t.object, named)]
            for t in graph.sorted()
        ]
    return scans


def write_graphs(path: str | os.PathLike, graphs: Mapping[str, SceneGraph]) -> None:
    """Write graphs by sample as JSON: `{"id": [[subject, predicate, object], …]}`."""
    write_json(path, {name: [list(triplet.spo()) for triplet in graph] for name, graph in graphs.items()})


def read_graphs(
    path: str | os.PathLike,
    vocabulary: Vocabulary,
    strict: bool = False,
    unknown: Counter[str] | None = None,
    humans: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, SceneGraph]:
    """Read what `write_graphs` wrote, or a `preds.json` with subject, predicate, object.

    Args:
        path: the file.
        vocabulary: names and synonyms that are known.
        strict: raise at an unknown word instead of leaving its triplet out.
        unknown: where to count unknown words.
        humans: by sample, the role of `human_0` …, for files that name humans.

    Raises:
        SceneDataError: the file is missing, damaged or of another layout, or `strict` and a word is unknown.
    """
    content = read_json(path)
    reader = _Reader(path, vocabulary, strict, unknown)
    if not isinstance(content, dict) or not all(isinstance(rows, list) for rows in content.values()):
        raise SceneDataError(f"{path} is no file of graphs; expected {{'sample': [[subject, predicate, object], …]}}.")
    graphs = {}
    for name, rows in content.items():
        triplets = [Triplet.from_spo(reader.words(row, f"sample {name}", (3,))) for row in rows]
        graphs[name] = reader.graph(triplets, f"sample {name}", (humans or {}).get(name, {}))
    return graphs


# ---------------------------------------------------------------------------------------------- exports


def to_jsonld(graphs: Mapping[str, SceneGraph]) -> dict[str, Any]:
    """Graphs as a JSON-LD document: frames, entities of a frame, and relations between them.

    Args:
        graphs: by sample.
    """
    nodes: list[dict[str, Any]] = []
    for sample_id, graph in graphs.items():
        frame = f"urn:frame:{_iri(sample_id)}"
        nodes.append({"@id": frame, "@type": "Frame", "name": sample_id})
        for entity in graph.entities:
            nodes.append(
                {"@id": f"{frame}:{_iri(entity)}", "@type": "Entity", "name": entity, "frame": {"@id": frame}}
            )
        for number, triplet in enumerate(graph.sorted()):
            nodes.append(
                {
                    "@id": f"{frame}:relation:{number}",
                    "@type": "Relation",
                    "frame": {"@id": frame},
                    "subject": {"@id": f"{frame}:{_iri(triplet.subject)}"},
                    "predicate": triplet.predicate,
                    "object": {"@id": f"{frame}:{_iri(triplet.object)}"},
                }
            )
    vocabulary = "urn:scene-graph:"
    return {"@context": {"@vocab": vocabulary, "name": f"{CONTEXT_IRI}name"}, "@graph": nodes}


def _iri(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]", lambda match: f"%{ord(match[0]):02X}" if match[0] != " " else "_", name)


def to_graphml(graphs: Mapping[str, SceneGraph]) -> str:
    """Graphs as one GraphML document: a node for each entity of each frame, an edge for each triplet.

    Args:
        graphs: by sample.

    Raises:
        SceneGraphError: networkx isn't installed.
    """
    try:
        import networkx
    except ImportError as error:
        raise SceneGraphError('GraphML needs networkx: pip install "vidgen[scene-graph]".') from error
    document = networkx.MultiDiGraph()
    for sample_id, graph in graphs.items():
        for entity in graph.entities:
            document.add_node(f"{sample_id}/{entity}", frame=sample_id, name=entity)
        for triplet in graph.sorted():
            ends = (f"{sample_id}/{triplet.subject}", f"{sample_id}/{triplet.object}")
            document.add_edge(*ends, frame=sample_id, predicate=triplet.predicate)
    return "\n".join(networkx.generate_graphml(document))


def to_cypher(graphs: Mapping[str, SceneGraph]) -> tuple[str, dict[str, Any]]:
    """Graphs as one Cypher statement and its parameters, for `session.run(statement, parameters)` of Neo4j.

    Names travel as parameters only, so no name can change the statement; merging makes a second import harmless.
    Types of relationships can't be parameters, so the predicate is a property.

    Args:
        graphs: by sample.

    Returns:
        The statement and its parameters.
    """
    statement = (
        "UNWIND $frames AS frame\n"
        "MERGE (f:Frame {id: frame.id})\n"
        "WITH f, frame\n"
        "UNWIND frame.triplets AS triplet\n"
        "MERGE (s:Entity {frame: frame.id, name: triplet.subject})\n"
        "MERGE (o:Entity {frame: frame.id, name: triplet.object})\n"
        "MERGE (s)-[:IN]->(f)\n"
        "MERGE (o)-[:IN]->(f)\n"
        "MERGE (s)-[:RELATION {predicate: triplet.predicate}]->(o)"
    )
    frames = [
        {"id": sample_id, "triplets": [triplet.spo()._asdict() for triplet in graph.sorted()]}
        for sample_id, graph in graphs.items()
    ]
    return statement, {"frames": frames}


def to_csv(graphs: Mapping[str, SceneGraph]) -> str:
    """Graphs as a table with the columns sample, subject, predicate, object; an empty graph is a row without names.

    Args:
        graphs: by sample.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("sample", "subject", "predicate", "object"))
    for sample_id, graph in graphs.items():
        writer.writerows((sample_id, *triplet.spo()) for triplet in graph.sorted())
        if not graph:
            writer.writerow((sample_id, "", "", ""))
    return text.getvalue()


# ---------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Change:
    """A triplet that appeared at a frame, or ended there."""

    frame: int
    triplet: Triplet
    is_removal: bool = False


def change_log(frames: Iterable[tuple[int, SceneGraph]], ignored: Sequence[str] = ("closeTo",)) -> list[Change]:
    """What changed from frame to frame of a take: endings first, then beginnings, each in canonical order.

    A pair whose predicate changes is logged as an end and a beginning (in ORacle's log, arXiv 2404.07031, such a
    change is missing).

    Args:
        frames: number and graph of each frame, in order.
        ignored: predicates that come and go too often.

    Raises:
        SceneGraphError: frame numbers that don't rise.
    """
    changes: list[Change] = []
    current: frozenset[Triplet] = frozenset()
    last = None
    for frame, graph in frames:
        if last is not None and frame <= last:
            raise SceneGraphError(f"frame {frame} follows frame {last}; a log needs frames in rising order.")
        triplets = graph.without(*ignored).triplets
        changes.extend(Change(frame, triplet, is_removal=True) for triplet in sorted(current - triplets))
        changes.extend(Change(frame, triplet) for triplet in sorted(triplets - current))
        current, last = triplets, frame
    return changes


def memory_text(
    changes: Sequence[Change], style: str = "longshort", drop: float = 0.0, rng: np.random.Generator | None = None
) -> str:
    """What happened before, as text for a prompt: `Long: subject,object,predicate; … Short: …`.

    Long memory has the first time of each triplet, short memory the last 5 changes with their ends as `not …` (the
    memory of ORacle, arXiv 2404.07031).

    Args:
        changes: of the frames before the one that is asked about.
        style: `"long"`, `"short"` or `"longshort"`.
        drop: probability of leaving an item out, an augmentation.
        rng: draws what is left out.

    Returns:
        The text, empty if nothing changed yet.

    Raises:
        SceneGraphError: an unknown style, or `drop` without `rng`.
    """
    if style not in ("long", "short", "longshort"):
        raise SceneGraphError(f"style={style!r}: {suggestion(style, ('long', 'short', 'longshort'))}.")
    if not 0 <= drop < 1 or (drop and rng is None):
        raise SceneGraphError(f"drop={drop}, rng={rng}; allowed: 0 to below 1, above 0 only with a generator.")
    if not changes:
        return ""
    long, short = list(changes[:-SHORT_MEMORY]), list(changes[-SHORT_MEMORY:])
    if style == "long":
        long, short = list(changes), []
    first_times: dict[Triplet, Change] = {}
    for change in long:
        if not change.is_removal:
            first_times.setdefault(change.triplet, change)
    parts = []
    for name, items in (("Long", list(first_times.values())), ("Short", short)):
        if name.lower() not in style:
            continue
        kept = [change for change in items if not drop or rng.random() >= drop]
        words = ("{},{},{}{}".format(*c.triplet.sop()[:2], "not " * c.is_removal, c.triplet.predicate) for c in kept)
        parts.append(" ".join((f"{name}:", *(f"{item};" for item in words))))
    return " ".join(parts)
