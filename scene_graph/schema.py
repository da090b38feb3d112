"""What a scene graph is made of: triplets, graphs, vocabularies, the head/tail split, similarity, and samples.

The public label files and models use three orders of the same triplet: subject, predicate, object (per-frame label
files of 4D-OR, exporters), subject, object, predicate (MM-OR's files, the text that language models write) and indices
into word lists (aggregated files of 4D-OR). Swapped orders are the classic silent error of this field, so each order
is a type of its own here: `SPO`, `SOP` and `TripletIndex`.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vidgen.runtime.errors import VidgenError, suggestion

# Where an image comes from: a file, read when it is looked at, or pixels, uint8 (height, width, 3).
ImageSource = str | os.PathLike | np.ndarray

# The constant added to an inverse document frequency, so that a predicate of every frame still counts a little.
IDF_FLOOR = 0.05


class SceneGraphError(VidgenError):
    """A scene graph, a vocabulary or a sample is malformed, or used in a way that would give wrong results."""


class SceneDataError(SceneGraphError):
    """A file or folder of operating-room data is missing, damaged, or of an unexpected layout."""


class SPO(NamedTuple):
    """Three words in the order subject, predicate, object."""

    subject: str
    predicate: str
    object: str


class SOP(NamedTuple):
    """Three words in the order subject, object, predicate."""

    subject: str
    object: str
    predicate: str


class TripletIndex(NamedTuple):
    """Indices of a triplet's words in the lists of a `Vocabulary`."""

    subject: int
    predicate: int
    object: int


@dataclass(frozen=True, order=True, slots=True)
class Triplet:
    """A relation between two entities: `subject` does `predicate` to `object`."""

    subject: str
    predicate: str
    object: str

    def spo(self) -> SPO:
        """The words in the order subject, predicate, object."""
        return SPO(self.subject, self.predicate, self.object)

    def sop(self) -> SOP:
        """The words in the order subject, object, predicate."""
        return SOP(self.subject, self.object, self.predicate)

    @classmethod
    def from_spo(cls, words: Sequence[str]) -> Triplet:
        """Make a triplet from words in the order subject, predicate, object.

        Raises:
            SceneGraphError: not three words, or words whose type says that their order is another.
        """
        subject, predicate, object = cls._words(words, SPO)
        return cls(subject, predicate, object)

    @classmethod
    def from_sop(cls, words: Sequence[str]) -> Triplet:
        """Make a triplet from words in the order subject, object, predicate.

        Raises:
            SceneGraphError: not three words, or words whose type says that their order is another.
        """
        subject, object, predicate = cls._words(words, SOP)
        return cls(subject, predicate, object)

    @staticmethod
    def _words(words: Sequence[str], order: type) -> Sequence[str]:
        other = {SPO: SOP, SOP: SPO}[order]
        if isinstance(words, (other, TripletIndex)):
            raise SceneGraphError(
                f"{words!r} was given where {order.__name__} is expected; allowed: {order.__name__} or three words "
                f"in the order {', '.join(order._fields)}."
            )
        if isinstance(words, str) or len(words) != 3 or not all(isinstance(word, str) for word in words):
            raise SceneGraphError(f"{words!r} is no triplet; allowed: three words {', '.join(order._fields)}.")
        return words


@dataclass(frozen=True, init=False)
class SceneGraph:
    """A set of triplets: what happens in one frame. Two graphs with the same triplets are equal.

    It iterates in the order in which the triplets were given, duplicates left out, or in canonical order if they came
    as a set; the official protocol needs to know which of two predicates of a pair a model wrote first.

    Args:
        triplets: of the frame.
        meta: what else is known about the frame; no part of equality.

    Attributes:
        triplets: the set.
        meta: as given.
    """

    triplets: frozenset[Triplet]
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    _order: tuple[Triplet, ...] = field(default=(), compare=False, repr=False)

    def __init__(self, triplets: Iterable[Triplet] = (), meta: Mapping[str, Any] | None = None) -> None:
        is_ordered = not isinstance(triplets, (set, frozenset))
        order = tuple(dict.fromkeys(triplets))
        wrong = next((triplet for triplet in order if not isinstance(triplet, Triplet)), None)
        if wrong is not None:
            raise SceneGraphError(
                f"{wrong!r} is no Triplet; make one with Triplet.from_spo or Triplet.from_sop, which name the order."
            )
        object.__setattr__(self, "triplets", frozenset(order))
        object.__setattr__(self, "meta", dict(meta or {}))
        object.__setattr__(self, "_order", order if is_ordered else tuple(sorted(order)))

    def __iter__(self) -> Iterator[Triplet]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self.triplets)

    def __contains__(self, triplet: Triplet) -> bool:
        return triplet in self.triplets

    @property
    def entities(self) -> tuple[str, ...]:
        """Every subject and object, sorted."""
        return tuple(sorted({name for triplet in self.triplets for name in (triplet.subject, triplet.object)}))

    @property
    def predicates(self) -> tuple[str, ...]:
        """Every predicate, sorted."""
        return tuple(sorted({triplet.predicate for triplet in self.triplets}))

    def pairs(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """The predicates of each ordered pair (subject, object), in the order of the graph."""
        pairs: dict[tuple[str, str], tuple[str, ...]] = {}
        for triplet in self:
            pair = (triplet.subject, triplet.object)
            pairs[pair] = (*pairs.get(pair, ()), triplet.predicate)
        return pairs

    def conflicts(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Those of `pairs()` with more than one predicate, which real labels don't have."""
        return {pair: predicates for pair, predicates in self.pairs().items() if len(predicates) > 1}

    def sorted(self) -> tuple[Triplet, ...]:
        """The triplets in canonical order: by subject, predicate, object."""
        return tuple(sorted(self.triplets))

    def without(self, *predicates: str) -> SceneGraph:
        """The graph without the triplets of some predicates."""
        return SceneGraph([triplet for triplet in self if triplet.predicate not in predicates], self.meta)

    def to_prompt(self) -> str:
        """An English sentence per triplet, for models that make pictures or video from text."""
        sentences = []
        for triplet in self.sorted():
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", triplet.predicate).lower()
            sentences.append(f"The {triplet.subject} is {words} the {triplet.object}.")
        return " ".join(sentences) if sentences else "An operating room where nothing happens."


def _key(word: str) -> str:
    """What spellings of one word have in common: `CloseTo`, `close_to` and `close to` have the key `closeto`."""
    return re.sub(r"[\s_\-]+", "", word).lower()


_OR_SYNONYMS = {
    "circulating nurse": "circulator",
    "anesthetist": "anaesthetist",
    "anest": "anaesthetist",
    "head surgent": "head surgeon",
    "tool": "instrument",
    "anaesthetist station": "anesthesia equipment",
    "close": "closeTo",
    "ae": "anesthesia equipment",
    "anaesthesia equipment": "anesthesia equipment",
    "ot": "operating table",
    "opertating table": "operating table",
    "operating": "manipulating",
}

_OR4D_ENTITIES = (
    "anaesthetist",
    "anesthesia equipment",
    "assistant surgeon",
    "circulator",
    "head surgeon",
    "instrument",
    "instrument table",
    "operating table",
    "patient",
    "secondary table",
)
_OR4D_PREDICATES = (
    "assisting",
    "cementing",
    "cleaning",
    "closeTo",
    "cutting",
    "drilling",
    "hammering",
    "holding",
    "lyingOn",
    "manipulating",
    "preparing",
    "sawing",
    "suturing",
    "touching",
)
_MMOR_ENTITIES = (
    *_OR4D_ENTITIES,
    "c arm",
    "drape",
    "drill",
    "hammer",
    "mako robot",
    "monitor",
    "mps",
    "mps station",
    "nurse",
    "saw",
    "student",
    "tracker",
    "unrelated person",
)
_EGOEXOR_ENTITIES = (
    "anesthetist",
    "anesthesia equipment",
    "antiseptic",
    "assistant",
    "bin",
    "body marker",
    "circulator",
    "cotton",
    "curette",
    "dressing material",
    "forceps",
    "gloves",
    "head surgeon",
    "health monitor",
    "herbal disk",
    "instrument table",
    "instruments",
    "microscope",
    "microscope controller",
    "microscope eye",
    "microscope screen",
    "needle",
    "operating room",
    "operating table",
    "patient",
    "scalpel",
    "scissors",
    "syringe",
    "tissue mark",
    "tissue paper",
    "ultrasound gel",
    "ultrasound machine",
    "ultrasound probe",
    "ultrasound screen",
    "unsterile instruments",
    "vertebrae",
)
_EGOEXOR_PREDICATES = (
    "anaesthetising",
    "applying",
    "aspirating",
    "closeTo",
    "controlling",
    "cutting",
    "disinfection",
    "dressing",
    "dropping",
    "entering",
    "holding",
    "injecting",
    "inserting",
    "looking",
    "lyingOn",
    "manipulating",
    "positioning",
    "preparing",
    "removing",
    "scanning",
    "touching",
    "wearing",
)


@dataclass(frozen=True)
class Vocabulary:
    """The entities and predicates of a data set, and other spellings of them.

    Entities are written in lower case with blanks ("instrument table"), predicates in camel case ("closeTo"). Case,
    blanks, underscores and hyphens never matter in a look-up.

    Args:
        entities: canonical names; their order gives the indices.
        predicates: canonical names; their order gives the indices.
        synonyms: other words, and the canonical entity or predicate that each stands for.

    Raises:
        SceneGraphError: a name twice, an empty list, `none` as a predicate, or a synonym of an unknown name.
    """

    entities: tuple[str, ...]
    predicates: tuple[str, ...]
    synonyms: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("entities", "predicates"):
            words = tuple(getattr(self, name))
            object.__setattr__(self, name, words)
            repeated = [key for key, count in Counter(map(_key, words)).items() if count > 1]
            if not words or repeated or "none" in map(_key, words):
                raise SceneGraphError(
                    f"{name}={words}; allowed: at least one name, each once, 'none' (no relation) not among them."
                )
        object.__setattr__(self, "synonyms", dict(self.synonyms))
        entities = {_key(name): name for name in self.entities}
        predicates = {_key(name): name for name in self.predicates}
        for word, name in self.synonyms.items():
            if name not in self.entities and name not in self.predicates:
                raise SceneGraphError(
                    f"synonym {word!r} stands for {name!r}: {suggestion(name, (*self.entities, *self.predicates))}."
                )
            (entities if name in self.entities else predicates).setdefault(_key(word), name)
        object.__setattr__(self, "_entities", entities)
        object.__setattr__(self, "_predicates", predicates)

    def __hash__(self) -> int:
        return hash((self.entities, self.predicates, tuple(sorted(self.synonyms.items()))))

    @classmethod
    def or4d(cls) -> Vocabulary:
        """10 entities (roles) and 14 predicates of 4D-OR (arXiv 2203.11937); `Operating` is `manipulating`."""
        return cls(_OR4D_ENTITIES, _OR4D_PREDICATES, _OR_SYNONYMS)

    @classmethod
    def mmor(cls) -> Vocabulary:
        """23 entities and 16 predicates of MM-OR (arXiv 2503.02579), which has those of 4D-OR among them."""
        predicates = tuple(sorted((*_OR4D_PREDICATES, "calibrating", "scanning")))
        return cls(tuple(sorted(_MMOR_ENTITIES)), predicates, _OR_SYNONYMS)

    @classmethod
    def egoexor(cls) -> Vocabulary:
        """36 entities and 22 predicates of EgoExOR (arXiv 2505.24287)."""
        synonyms = {
            "anaesthetist": "anesthetist",
            "assistant surgeon": "assistant",
            "circulating nurse": "circulator",
            "instrument": "instruments",
        }
        return cls(_EGOEXOR_ENTITIES, _EGOEXOR_PREDICATES, synonyms)

    @classmethod
    def from_files(
        cls, classes: str | os.PathLike, relations: str | os.PathLike, synonyms: Mapping[str, str] | None = None
    ) -> Vocabulary:
        """Read the `classes.txt` and `relationships.txt` of a data set, one name per line; `none` is left out.

        Raises:
            SceneDataError: a file is missing or empty.
        """
        words = []
        for path in (Path(classes), Path(relations)):
            try:
                lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise SceneDataError(f"cannot read {path}: {error}.") from error
            words.append([line for line in lines if line and line.lower() != "none"])
            if not words[-1]:
                raise SceneDataError(f"{path} names nothing; expected one name per line.")
        entities = (re.sub(r"[\s_\-]+", " ", word).lower() for word in words[0])
        known = {_key(name): name for name in (*_OR4D_PREDICATES, *_EGOEXOR_PREDICATES)}
        predicates = (known.get(_key(word), word[0].lower() + word[1:]) for word in words[1])
        try:
            return cls(tuple(entities), tuple(predicates), synonyms or {})
        except SceneGraphError as error:
            raise SceneDataError(f"{classes}, {relations}: {error}") from error

    def entity(self, word: str) -> str | None:
        """The canonical entity that a word stands for, or None."""
        return self._entities.get(_key(word))

    def predicate(self, word: str) -> str | None:
        """The canonical predicate that a word stands for, or None."""
        return self._predicates.get(_key(word))

    def normalize(self, graph: Iterable[Triplet], strict: bool = False) -> tuple[SceneGraph, Counter[str]]:
        """Put canonical names into a graph; triplets with an unknown word are left out and their words counted.

        Args:
            graph: a graph or triplets.
            strict: raise at the first unknown word.

        Returns:
            The graph, and how often each unknown word occurred.

        Raises:
            SceneGraphError: `strict` and a word is unknown.
        """
        known: list[Triplet] = []
        unknown: Counter[str] = Counter()
        for triplet in graph:
            words = (triplet.subject, triplet.predicate, triplet.object)
            names = (self.entity(words[0]), self.predicate(words[1]), self.entity(words[2]))
            for word, name, allowed in zip(words, names, (self.entities, self.predicates, self.entities)):
                if name is None:
                    unknown[word] += 1
                    if strict:
                        raise SceneGraphError(f"{word!r} in {triplet} is unknown: {suggestion(word, allowed)}.")
            if None not in names:
                known.append(Triplet(*names))
        return SceneGraph(known, getattr(graph, "meta", None)), unknown

    def indices(self, triplet: Triplet) -> TripletIndex:
        """The indices of a triplet's words.

        Raises:
            SceneGraphError: a word is unknown.
        """
        entities, predicate = (self.entity(triplet.subject), self.entity(triplet.object)), triplet.predicate
        name = self.predicate(predicate)
        if None in entities or name is None:
            self.normalize([triplet], strict=True)
        subject, object = (self.entities.index(entity) for entity in entities)
        return TripletIndex(subject=subject, predicate=self.predicates.index(name), object=object)

    def from_indices(self, index: TripletIndex) -> Triplet:
        """The triplet that indices stand for.

        Raises:
            SceneGraphError: a plain tuple, whose order nobody knows, or an index out of range.
        """
        if not isinstance(index, TripletIndex):
            raise SceneGraphError(f"{index!r} is no TripletIndex(subject=…, predicate=…, object=…).")
        for name, words in (("subject", self.entities), ("predicate", self.predicates), ("object", self.entities)):
            if not 0 <= getattr(index, name) < len(words):
                raise SceneGraphError(f"{name} of {index} does not exist; allowed: 0 to {len(words) - 1}.")
        return Triplet(self.entities[index.subject], self.predicates[index.predicate], self.entities[index.object])

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` makes the same vocabulary of."""
        return {"entities": list(self.entities), "predicates": list(self.predicates), "synonyms": dict(self.synonyms)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Vocabulary:
        """The inverse of `to_dict`."""
        return cls(tuple(values["entities"]), tuple(values["predicates"]), values.get("synonyms", {}))


@dataclass(frozen=True)
class TailSplit:
    """Which predicates are rare, and the labels that say so.

    Attributes:
        head: predicates of many frames, in the order of the vocabulary.
        tail: predicates of few frames, in the order of the vocabulary.
        frequencies: share of the frames with each predicate.
        max_frame_frequency: a predicate of fewer frames than this share is in the tail.
        source: the split of labels it was computed from.

    Raises:
        SceneGraphError: a predicate is in both parts, or the source is a test split: a split chosen by test labels
            would tell the model about them.
    """

    head: tuple[str, ...]
    tail: tuple[str, ...]
    frequencies: Mapping[str, float]
    max_frame_frequency: float
    source: str

    def __post_init__(self) -> None:
        if not self.source or "test" in re.split(r"[^a-z]+", Path(self.source).name.lower()):
            raise SceneGraphError(
                f"source={self.source!r}; allowed: the name of a training split, since a tail chosen by test labels "
                "leaks them."
            )
        if set(self.head) & set(self.tail):
            raise SceneGraphError(f"{sorted(set(self.head) & set(self.tail))} are in the head and in the tail.")
        if not 0 < self.max_frame_frequency <= 1:
            raise SceneGraphError(f"max_frame_frequency={self.max_frame_frequency}; allowed: above 0, at most 1.")

    def is_tail(self, graph: Iterable[Triplet]) -> bool:
        """Whether a graph has a triplet with a rare predicate."""
        return any(triplet.predicate in self.tail for triplet in graph)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` makes the same split of."""
        return {
            "head": list(self.head),
            "tail": list(self.tail),
            "frequencies": dict(self.frequencies),
            "max_frame_frequency": self.max_frame_frequency,
            "source": self.source,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TailSplit:
        """The inverse of `to_dict`."""
        return cls(
            tuple(values["head"]),
            tuple(values["tail"]),
            dict(values["frequencies"]),
            float(values["max_frame_frequency"]),
            values["source"],
        )


def tail_split(
    graphs: Iterable[SceneGraph], vocabulary: Vocabulary, max_frame_frequency: float = 0.10, source: str = "train"
) -> TailSplit:
    """Split predicates into head and tail by the share of training frames they occur in.

    With the default, the tail of MM-OR is the list that its authors' code treats as most distinctive; how the paper of
    SGG-ICL draws the line isn't public.

    Args:
        graphs: of the training frames.
        vocabulary: whose predicates are split.
        max_frame_frequency: a predicate of fewer frames than this share is in the tail.
        source: the name of the split.

    Raises:
        SceneGraphError: no graphs, or `source` is a test split.
    """
    counts, num_frames = _frame_counts(graphs, vocabulary)
    frequencies = {name: counts[name] / num_frames for name in vocabulary.predicates}
    return TailSplit(
        head=tuple(name for name in vocabulary.predicates if frequencies[name] >= max_frame_frequency),
        tail=tuple(name for name in vocabulary.predicates if frequencies[name] < max_frame_frequency),
        frequencies=frequencies,
        max_frame_frequency=max_frame_frequency,
        source=source,
    )


def _frame_counts(graphs: Iterable[SceneGraph], vocabulary: Vocabulary) -> tuple[Counter[str], int]:
    counts: Counter[str] = Counter()
    num_frames = 0
    for graph in graphs:
        counts.update(set(graph.predicates))
        num_frames += 1
    if num_frames == 0:
        raise SceneGraphError("no labeled frames were given; predicates can't be counted.")
    unknown = set(counts) - set(vocabulary.predicates)
    if unknown:
        word = sorted(unknown)[0]
        raise SceneGraphError(
            f"predicate {word!r} is not in the vocabulary: {suggestion(word, vocabulary.predicates)}."
        )
    return counts, num_frames


def idf_weights(graphs: Iterable[SceneGraph], vocabulary: Vocabulary) -> dict[str, float]:
    """Weights of predicates for `triplet_iou`: `log((1 + N) / (1 + n)) + 0.05`, scaled to a mean of 1.

    N is the number of frames, n how many of them have the predicate. Without weights, closeTo (two of three triplets
    of 4D-OR) decides which frames are similar.

    Args:
        graphs: of the training frames.
        vocabulary: whose predicates get a weight.

    Raises:
        SceneGraphError: no graphs, or a predicate that isn't in the vocabulary.
    """
    counts, num_frames = _frame_counts(graphs, vocabulary)
    weights = {name: math.log((1 + num_frames) / (1 + counts[name])) + IDF_FLOOR for name in vocabulary.predicates}
    mean = sum(weights.values()) / len(weights)
    return {name: weight / mean for name, weight in weights.items()}


def triplet_iou(a: SceneGraph, b: SceneGraph, weights: Mapping[str, float] | None = None) -> float:
    """Weight of the triplets that two graphs share, over the weight of all their triplets; 1 if both are empty.

    Args:
        a: a graph.
        b: another.
        weights: weight of each predicate; all 1 by default.

    Raises:
        SceneGraphError: a predicate without a weight.
    """
    if a.triplets == b.triplets:
        return 1.0
    try:
        shared, union = (
            sum(1.0 if weights is None else weights[triplet.predicate] for triplet in triplets)
            for triplets in (a.triplets & b.triplets, a.triplets | b.triplets)
        )
    except KeyError as error:
        raise SceneGraphError(f"predicate {error} has no weight; weights of: {', '.join(sorted(weights))}.") from error
    return shared / union if union else 0.0


def load_image(source: ImageSource) -> np.ndarray:
    """Read an image, or check one that is given as pixels.

    Args:
        source: a file, or uint8 `(height, width, 3)`.

    Returns:
        uint8 `(height, width, 3)`, RGB, writable.

    Raises:
        SceneDataError: the file is missing or damaged, or the pixels have another shape or type.
    """
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3:
            raise SceneDataError(
                f"an image is {source.dtype} with shape {source.shape}; allowed: uint8 (height, width, 3)."
            )
        return source if source.flags.writeable else source.copy()
    path = Path(source)
    if not path.is_file():
        raise SceneDataError(f"image {path} does not exist.")
    try:
        with Image.open(path) as image:
            return np.array(image.convert("RGB"))
    # A damaged JPEG shows as OSError, SyntaxError or ValueError, depending on where it is damaged.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise SceneDataError(f"cannot read image {path}: {error}; it is damaged or no image.") from error


@dataclass(frozen=True, eq=False)
class Sample:
    """One frame: its views, and its graph where it has labels.

    Args:
        id: unique in a data set, such as `002_4DOR_000517`.
        take: name of the recording.
        frame: number of the frame in its take.
        seconds: since the start of the take.
        views: where the images come from; read when they are looked at.
        view_names: a name for each view, such as `camera02`.
        graph: the labels; None where there are none, an empty graph where nothing happens.
        memory: text about what happened before, or None.
        primary: index of the view that shows most, used where only one fits.
        meta: anything else, such as the humans of the frame and their roles.

    Raises:
        SceneGraphError: no views, names that don't match the views, or a primary view that doesn't exist.
    """

    id: str
    take: str
    frame: int
    seconds: float
    views: tuple[ImageSource, ...]
    view_names: tuple[str, ...]
    graph: SceneGraph | None = None
    memory: str | None = None
    primary: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "views", tuple(self.views))
        object.__setattr__(self, "view_names", tuple(self.view_names))
        if not self.views or len(self.views) != len(self.view_names) or len(set(self.view_names)) < len(self.views):
            raise SceneGraphError(
                f"sample {self.id} has {len(self.views)} views and the view names {self.view_names}; allowed: at "
                "least one view, each with a name of its own."
            )
        if not 0 <= self.primary < len(self.views):
            raise SceneGraphError(
                f"sample {self.id} has primary={self.primary}; allowed: 0 to {len(self.views) - 1}, its views."
            )

    def image(self, view: int | str | None = None) -> np.ndarray:
        """The pixels of a view, uint8 `(height, width, 3)`.

        Args:
            view: index or name; the primary view by default.

        Raises:
            SceneGraphError: there is no such view.
            SceneDataError: its file is missing or damaged.
        """
        if view is None:
            view = self.primary
        if isinstance(view, str):
            if view not in self.view_names:
                raise SceneGraphError(f"sample {self.id} has no view {view!r}: {suggestion(view, self.view_names)}.")
            view = self.view_names.index(view)
        if not 0 <= view < len(self.views):
            raise SceneGraphError(f"sample {self.id} has no view {view}; allowed: 0 to {len(self.views) - 1}.")
        try:
            return load_image(self.views[view])
        except SceneDataError as error:
            raise SceneDataError(f"sample {self.id}, view {self.view_names[view]}: {error}") from error

    def images(self) -> list[np.ndarray]:
        """The pixels of all views, each uint8 `(height, width, 3)`."""
        return [self.image(view) for view in range(len(self.views))]
