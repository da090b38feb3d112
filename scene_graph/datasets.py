"""Samples from disk: 4D-OR and MM-OR as their authors lay them out, any folder of images, any video.

    4D-OR    export_holistic_take2_processed/timestamp_to_pcd_and_frames_list.json    entry k: image numbers of frame k
             export_holistic_take2_processed/colorimage/camera02_colorimage-000517.jpg
             export_holistic_take2_processed/relation_labels/000517.json
             data/relationships_train.json                                           the labels of a split in one file
    MM-OR    004_PKA/timestamp_to_pcd_and_frames_list.json, 015-018_PKA/…_list_016_PKA.json where takes share a folder
             004_PKA/colorimage/camera01_colorimage-….jpg, simstation/camera00_….jpg, trackercam/….jpg
             004_PKA/relation_labels/…, 015-018_PKA/relation_labels_016_PKA/…

The number of a frame is never the number of an image: labels name frames, and only the list of timestamps says which
image of which camera belongs to one. Nothing here takes the number of an image.
"""

from __future__ import annotations

import logging
import operator
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import av
import numpy as np
from PIL import Image

from scene_graph.formats import (
    LabeledFrame,
    complete_relations,
    forward_relations,
    is_mirrored,
    mirrored_relations,
    read_frame_labels,
    read_graphs,
    read_json,
    read_relations,
)
from scene_graph.schema import ImageSource, Sample, SceneDataError, SceneGraph, SceneGraphError, Vocabulary
from vidgen.data.video_reader import VideoReader
from vidgen.runtime.errors import suggestion

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
LABEL_STYLES = ("mmor", "raw")
MISSING_VIEWS = ("skip", "black")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")

OR4D_SPLITS = {"train": (1, 3, 5, 7, 9, 10), "validation": (4, 8), "test": (2, 6)}
OR4D_FOLDER = "export_holistic_take{}_processed"
# Written by the simulator; names the takes of its splits.
SIMULATOR_FILE = "simulator.json"
MMOR_SPLITS = {
    "train": (
        "001_PKA",
        "003_TKA",
        "005_TKA",
        "006_PKA",
        "008_PKA",
        "010_PKA",
        "012_1_PKA",
        "012_2_PKA",
        "035_PKA",
        "037_TKA",
    ),
    "validation": ("002_PKA", "007_TKA", "009_TKA"),
    "test": ("004_PKA", "011_TKA", "036_PKA", "038_TKA"),
}
# Folders of MM-OR with several takes.
_SHARED_FOLDERS = {
    "012_PKA": ("012_1_PKA", "012_2_PKA"),
    "015-018_PKA": ("015_PKA", "016_PKA", "017_PKA", "018_1_PKA", "018_2_PKA"),
    "019-022_PKA": tuple(f"{number:03d}_PKA" for number in range(19, 23)),
    "023-032_PKA": tuple(f"{number:03d}_PKA" for number in range(23, 33)),
}
MMOR_FOLDERS = {take: folder for folder, takes in _SHARED_FOLDERS.items() for take in takes}
# Recorded without the room cameras (issue 3 of the authors' repository): the simulation station stands in.
MMOR_WITHOUT_AZURE = ("005_TKA", "009_TKA")
SIMSTATION_FALLBACK = (2, 0, 3)
# Labeled so densely that it would dominate the validation split; the authors keep every third label.
MMOR_LABEL_STEPS = {"007_TKA": 3}
TIMESTAMPS = "timestamp_to_pcd_and_frames_list"


def telling_frames(graphs: Sequence[SceneGraph], count: int) -> list[int]:
    """Frames that stand for a take: as many stretches of equal length, each by the frame of its rarest relation.

    Args:
        graphs: of all frames of a take, in order.
        count: frames wanted; a shorter take gives all that it has.

    Returns:
        Their places, ascending.
    """
    counts = Counter(predicate for graph in graphs for predicate in graph.predicates)

    def rarity(index: int) -> int:
        return min((counts[predicate] for predicate in graphs[index].predicates), default=len(graphs))

    stretches = np.array_split(np.arange(len(graphs)), min(count, len(graphs)))
    return [min(stretch.tolist(), key=rarity) for stretch in stretches]


class SceneDataset(Sequence[Sample]):
    """Samples of a data set, in order of takes and frames.

    Args:
        samples: all of them.
        vocabulary: of their graphs.
        source: the folder or file they come from, for messages.
        unknown: words of the labels that are in no vocabulary, with their counts.
        skipped: ids of frames that were left out for want of images, and what was missing.

    Attributes:
        vocabulary: as given.
        unknown: as given.
        skipped: as given.
        takes: names of the takes.

    Raises:
        SceneDataError: no samples, or an id twice.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        vocabulary: Vocabulary,
        source: str | os.PathLike,
        unknown: Counter[str] | None = None,
        skipped: Mapping[str, str] | None = None,
    ) -> None:
        self._samples = list(samples)
        self.vocabulary, self.source = vocabulary, Path(source)
        self.unknown, self.skipped = Counter(unknown or {}), dict(skipped or {})
        self.takes = tuple(dict.fromkeys(sample.take for sample in self._samples))
        self._by_id = {sample.id: sample for sample in self._samples}
        if self.skipped:
            name, missing = next(iter(self.skipped.items()))
            total = len(self.skipped) + len(self._samples)
            logger.warning(
                "%s: %d of %d frames lack images and are left out, the first is %s without %s; "
                "missing_views='black' keeps those with at least one view.",
                *(self.source, len(self.skipped), total, name, missing),
            )
        if not self._samples:
            raise SceneDataError(f"{self.source} gives no samples" + (": all lack images." if self.skipped else "."))
        if len(self._by_id) < len(self._samples):
            repeated = Counter(sample.id for sample in self._samples).most_common(1)[0][0]
            raise SceneDataError(f"{self.source}: sample {repeated!r} is there twice.")
        if self.unknown:
            words = ", ".join(f"{word} ({count})" for word, count in self.unknown.most_common(10))
            logger.warning(
                "%s: triplets with unknown words are left out: %s; strict_vocab=True makes this an error.",
                *(self.source, words),
            )
        conflicts = [sample.id for sample in self._samples if sample.graph is not None and sample.graph.conflicts()]
        if conflicts:
            logger.warning(
                "%s: in %d frames a pair has two predicates, the first is %s; the official protocol scores one.",
                *(self.source, len(conflicts), conflicts[0]),
            )

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        return self._samples[index]

    def find(self, sample_id: str) -> Sample:
        """The sample of an id.

        Raises:
            SceneDataError: there is none.
        """
        if sample_id not in self._by_id:
            raise SceneDataError(f"{self.source} has no sample {sample_id!r}: {_nearest(sample_id, self._by_id)}.")
        return self._by_id[sample_id]

    @property
    def has_labels(self) -> bool:
        """Whether every sample has a graph."""
        return all(sample.graph is not None for sample in self._samples)

    def graphs(self) -> list[SceneGraph]:
        """The graph of every sample.

        Raises:
            SceneDataError: a sample has no labels.
        """
        bare = next((sample.id for sample in self._samples if sample.graph is None), None)
        if bare is not None:
            raise SceneDataError(
                f"{self.source} has no labels for {bare}: such data can be predicted, but not trained on or scored."
            )
        return [sample.graph for sample in self._samples]


def _nearest(name: str, names: Iterable[str]) -> str:
    """Like `suggestion`, for lists too long to print."""
    hint = suggestion(name, names)
    return hint if len(hint) < 300 else f"{hint[:300]} …"


def _split_name(split: str) -> str:
    name = "validation" if split == "val" else split
    if name not in SPLITS:
        raise SceneGraphError(f"split={split!r}: {suggestion(split, SPLITS)}.")
    return name


def _check_option(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise SceneGraphError(f"{name}={value!r}: {suggestion(str(value), allowed)}.")


def _label_file(root: Path, split: str) -> Path | None:
    names = [f"relationships_{split}.json"]
    if split == "test":
        names.append("relationships_test_dummy.json")  # frames without labels, in older clones of 4D-OR
    places = (root / folder / name for name in names for folder in ("data", "."))
    return next((place for place in places if place.is_file()), None)


class _Images:
    """The image files of a folder by their names without suffix; one listing instead of a question per frame."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {}
        if folder.is_dir():
            files = (path for path in sorted(folder.iterdir()) if path.suffix.lower() in IMAGE_SUFFIXES)
            self._files = {path.stem: path for path in files}

    def __bool__(self) -> bool:
        return bool(self._files)

    def get(self, stem: str) -> Path | None:
        return self._files.get(stem)


@dataclass
class _Take:
    """The list of timestamps of a take.

    Attributes:
        name: of the take, such as `002_4DOR`.
        folder: where its files are.
        path: of the list.
        entries: time and image numbers of each frame.
    """

    name: str
    folder: Path
    path: Path
    entries: list[Any]

    @classmethod
    def read(cls, name: str, folder: Path, path: Path) -> _Take:
        if not path.is_file():
            raise SceneDataError(f"take {name}: {path} does not exist; it says which images belong to a frame.")
        entries = read_json(path)
        if not isinstance(entries, list):
            raise SceneDataError(f"take {name}: {path} is no list of timestamps.")
        return cls(name, folder, path, entries)

    def entry(self, frame: int) -> tuple[Any, dict[str, Any]]:
        """The timestamp and the image numbers of a frame."""
        if not 0 <= frame < len(self.entries):
            raise SceneDataError(
                f"take {self.name} has no frame {frame}: {self.path} lists {len(self.entries)} frames. Labels count "
                "frames; was this the number of an image?"
            )
        entry = self.entries[frame]
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], dict):
            raise SceneDataError(f"{self.path}, entry {frame}: {entry!r} is not [time, {{camera: image number}}].")
        return entry[0], entry[1]


def _black_like(views: Iterable[ImageSource | None]) -> np.ndarray:
    """A black picture of the size of the first view there is; takes no memory."""
    path = next(view for view in views if view is not None)
    try:
        with Image.open(path) as image:
            width, height = image.size
    except (OSError, SyntaxError, ValueError) as error:
        raise SceneDataError(f"cannot read image {path}: {error}; it is damaged or no image.") from error
    return np.broadcast_to(np.uint8(0), (height, width, 3))


class _Builder:
    """Makes samples of labeled frames and the views found for them."""

    def __init__(self, missing_views: str, seconds_per_frame: float) -> None:
        self.missing_views, self.seconds_per_frame = missing_views, seconds_per_frame
        self.samples: list[Sample] = []
        self.skipped: dict[str, str] = {}

    def add(
        self, labeled: LabeledFrame, timestamp: Any, views: Mapping[str, Path | None], meta: Mapping[str, Any]
    ) -> None:
        missing = [name for name, path in views.items() if path is None]
        if missing and (self.missing_views == "skip" or len(missing) == len(views)):
            self.skipped[labeled.id] = ", ".join(missing)
            return
        sources: list[ImageSource | None] = list(views.values())
        if missing:
            black = _black_like(sources)
            sources = [black if source is None else source for source in sources]
        self.samples.append(
            Sample(
                id=labeled.id,
                take=labeled.take,
                frame=labeled.frame,
                seconds=labeled.frame * self.seconds_per_frame,
                views=tuple(sources),
                view_names=tuple(views),
                graph=labeled.graph,
                meta={"timestamp": timestamp, "humans": dict(labeled.humans), "missing_views": missing, **meta},
            )
        )


def _check_or4d_root(root: Path) -> None:
    pattern = OR4D_FOLDER.format("*")
    if any(root.glob(pattern)):
        return
    inside = next(iter(sorted(root.glob(f"*/{pattern}"))), None) if root.is_dir() else None
    if inside is not None:
        hint = f"; {inside.parent} does"
    elif re.fullmatch(OR4D_FOLDER.format(r"\d+"), root.resolve().name):
        hint = f"; it is one of them, give {root.resolve().parent}"
    else:
        hint = ", as the 4D-OR_data folder of the authors does"
    raise SceneDataError(f"{root} holds no {OR4D_FOLDER.format(1)} and the like{hint}.")


def _or4d_number(take: int | str) -> int:
    number = re.fullmatch(r"0*(\d+)(_4DOR)?", str(take))
    if number is None:
        raise SceneGraphError(
            f"take {take!r} is not of 4D-OR; allowed: numbers such as 2, or names such as '002_4DOR'."
        )
    return int(number[1])


class _OR4DTakes:
    """Finds the views of frames of 4D-OR."""

    def __init__(self, root: Path, views: Sequence[int]) -> None:
        _check_or4d_root(root)
        self.root, self.views = root, tuple(views)
        self._takes: dict[str, tuple[_Take, _Images]] = {}

    def take(self, name: str) -> tuple[_Take, _Images]:
        if name not in self._takes:
            folder = self.root / OR4D_FOLDER.format(_or4d_number(name))
            if not folder.is_dir():
                raise SceneDataError(f"take {name}: {folder} does not exist; takes=… chooses the takes that do.")
            take = _Take.read(name, folder, folder / f"{TIMESTAMPS}.json")
            images = _Images(folder / "colorimage")
            if not images:
                raise SceneDataError(f"take {name}: {images.folder} holds no images.")
            self._takes[name] = (take, images)
        return self._takes[name]

    def find(self, labeled: LabeledFrame) -> tuple[Any, dict[str, Path | None]]:
        take, images = self.take(labeled.take)
        timestamp, numbers = take.entry(labeled.frame)
        views = {}
        for camera in self.views:
            number = numbers.get(f"color_{camera}")
            stem = f"camera{camera:02d}_colorimage-{number}"
            views[f"camera{camera:02d}"] = None if number is None else images.get(stem)
        return timestamp, views


def _check_cameras(views: Sequence[int | str], count: int) -> None:
    cameras = [view for view in views if isinstance(view, int)]
    if not views or len(set(views)) < len(views) or any(not 1 <= camera <= count for camera in cameras):
        raise SceneGraphError(f"views={tuple(views)}; allowed: cameras 1 to {count}, each once, at least one view.")


class OR4DDataset(SceneDataset):
    """4D-OR (arXiv 2203.11937), or what the simulator writes in its layout.

    Args:
        root: the folder with `export_holistic_take1_processed` and the others.
        split: `"train"`, `"validation"` (or `"val"`) or `"test"`.
        views: cameras, 1 to 6; the first is the primary view.
        label_style: `"mmor"` has each closeTo once, `"raw"` in both directions as 4D-OR's own files; whatever the
            labels on disk have is converted.
        labels: an aggregated label file of 4D-OR or MM-OR; by default `relationships_SPLIT.json` in `root` or its
            folder `data`, else the label files of single frames.
        takes: numbers or names, to use only some takes of the split.
        missing_views: `"skip"` leaves frames out that lack an image; `"black"` shows black for it if another is there.
        strict_vocab: raise at an unknown word in the labels instead of counting it.
        seconds_per_frame: frames are one second apart in 4D-OR.

    Raises:
        SceneDataError: the folder isn't 4D-OR's, a take lacks its files, a label file is damaged, or there are no
            labels (but for the test split, whose labels may be absent).
        SceneGraphError: an unknown split, style, view or take.

    Example:
        ```py
        data = OR4DDataset("4D-OR_data", split="train")
        data[0].images()  # four arrays (1536, 2048, 3)
        data[0].graph.sorted()
        ```
    """

    def __init__(
        self,
        root: str | os.PathLike,
        split: str = "train",
        views: Sequence[int] = (2, 1, 3, 5),
        label_style: str = "mmor",
        labels: str | os.PathLike | None = None,
        takes: Sequence[int | str] | None = None,
        missing_views: str = "skip",
        strict_vocab: bool = False,
        seconds_per_frame: float = 1.0,
    ) -> None:
        root, self.split, self.label_style = Path(root), _split_name(split), label_style
        _check_option("label_style", label_style, LABEL_STYLES)
        _check_option("missing_views", missing_views, MISSING_VIEWS)
        _check_cameras(views, 6)
        found = _OR4DTakes(root, views)
        vocabulary, unknown = Vocabulary.or4d(), Counter()
        chosen = None if takes is None else {f"{_or4d_number(take):03d}_4DOR" for take in takes}
        path = _label_file(root, self.split) if labels is None else Path(labels)
        if path is not None:
            frames = [f for f in read_relations(path, vocabulary, strict_vocab, unknown) if f.take.endswith("_4DOR")]
            convert = forward_relations if label_style == "mmor" else mirrored_relations
            if is_mirrored(path) == (label_style == "mmor"):
                frames = [f if f.graph is None else replace(f, graph=convert(f.graph)) for f in frames]
            available = {frame.take for frame in frames}
        else:
            available = {f"{number:03d}_4DOR" for number in _or4d_splits(root)[self.split]}
            wanted = sorted(available if chosen is None else available & chosen)
            frames = [
                frame
                for name in wanted
                for frame in self._single_frames(found, name, vocabulary, strict_vocab, unknown)
            ]
        self.label_source = root if path is None else path
        if chosen is not None:
            absent = sorted(chosen - available)
            if absent:
                raise SceneGraphError(f"takes={absent} are not in the {self.split} split: {_list(available)}.")
            frames = [frame for frame in frames if frame.take in chosen]
        if self.split != "test" and any(frame.graph is None for frame in frames):
            raise SceneDataError(f"{self.label_source} has no labels for {frames[0].take}, a take of {self.split}.")
        builder = _Builder(missing_views, seconds_per_frame)
        for frame in sorted(frames, key=lambda frame: (frame.take, frame.frame)):
            builder.add(frame, *found.find(frame), meta={})
        super().__init__(builder.samples, vocabulary, root, unknown, builder.skipped)

    def _single_frames(
        self, found: _OR4DTakes, name: str, vocabulary: Vocabulary, strict: bool, unknown: Counter[str]
    ) -> list[LabeledFrame]:
        take, _ = found.take(name)
        folder = take.folder / "relation_labels"
        paths = sorted(folder.glob("*.json"))
        if not paths and self.split != "test":
            raise SceneDataError(
                f"take {name}: there is neither {folder} nor a relationships_{self.split}.json in {found.root} or its "
                "folder data; labels=… names one."
            )
        if not paths:
            return [LabeledFrame(name, frame, None) for frame in range(len(take.entries))]
        frames = []
        for path in paths:
            graph, humans = read_frame_labels(path, vocabulary, strict, unknown)
            graph = complete_relations(graph)
            if self.label_style == "raw":
                graph = mirrored_relations(graph)
            frames.append(LabeledFrame(name, _frame_of(path), graph, humans))
        return frames


def _list(names: Iterable[Any]) -> str:
    return "allowed: " + ", ".join(map(str, sorted(names)))


def _frame_of(path: Path) -> int:
    if not path.stem.isdecimal():
        raise SceneDataError(f"{path}: label files are named after frames, such as 000517.json.")
    return int(path.stem)


def _or4d_splits(root: Path) -> Mapping[str, Sequence[int]]:
    path = root / SIMULATOR_FILE
    if not path.is_file():
        return OR4D_SPLITS
    splits = read_json(path).get("splits", {})
    missing = [split for split in SPLITS if split not in splits]
    if missing:
        raise SceneDataError(f"{path} names no takes for the splits {', '.join(missing)}.")
    return {split: [_or4d_number(take) for take in splits[split]] for split in SPLITS}


class _MMORTakes:
    """Finds the views of frames of MM-OR."""

    def __init__(self, root: Path, views: Sequence[int | str]) -> None:
        known = {path.name for path in root.iterdir() if path.is_dir()} if root.is_dir() else set()
        expected = {MMOR_FOLDERS.get(take, take) for takes in MMOR_SPLITS.values() for take in takes}
        expected |= set(_SHARED_FOLDERS)
        if not known & expected and not any(re.fullmatch(r"\d{3}_[PT]KA", name) for name in known):
            raise SceneDataError(
                f"{root} holds no take of MM-OR, such as {MMOR_SPLITS['train'][0]}; expected the MM-OR_data folder of "
                "the authors."
            )
        self.root, self.views = root, tuple(views)
        self._takes: dict[str, tuple[_Take, dict[str, _Images], tuple[int | str, ...]]] = {}

    def folder(self, name: str) -> tuple[Path, bool]:
        """The folder of a take, and whether others are in it."""
        take = name.removesuffix("_MMOR")
        folder = self.root / MMOR_FOLDERS.get(take, take)
        if not folder.is_dir():
            raise SceneDataError(f"take {name}: {folder} does not exist; takes=… chooses the takes that do.")
        return folder, take in MMOR_FOLDERS

    def take(self, name: str) -> tuple[_Take, dict[str, _Images], tuple[int | str, ...]]:
        if name in self._takes:
            return self._takes[name]
        folder, is_shared = self.folder(name)
        short = name.removesuffix("_MMOR")
        # In a shared folder the list without a name belongs to another take.
        path = folder / f"{TIMESTAMPS}_{short}.json"
        if not path.is_file() and not is_shared:
            path = folder / f"{TIMESTAMPS}.json"
        take = _Take.read(name, folder, path)
        images = {kind: _Images(folder / kind) for kind in ("colorimage", "simstation", "trackercam")}
        views = self.views
        has_azure = bool(images["colorimage"]) and any(
            take.entry(frame)[1].get("azure") is not None for frame in range(len(take.entries))
        )
        if not has_azure and any(isinstance(view, int) for view in views):
            if not images["simstation"]:
                raise SceneDataError(
                    f"take {name}: neither {images['colorimage'].folder} nor {folder / 'simstation'} holds images."
                )
            level = logging.INFO if short in MMOR_WITHOUT_AZURE else logging.WARNING
            logger.log(level, "take %s has no images of the room cameras; the simulation station stands in.", name)
            fallback = [f"simstation{index}" for index in SIMSTATION_FALLBACK]
            views = tuple(dict.fromkeys([*fallback, *(view for view in views if isinstance(view, str))]))
        self._takes[name] = (take, images, views)
        return self._takes[name]

    def find(self, labeled: LabeledFrame) -> tuple[Any, dict[str, Path | None]]:
        take, images, cameras = self.take(labeled.take)
        timestamp, numbers = take.entry(labeled.frame)
        views: dict[str, Path | None] = {}
        for view in cameras:
            if isinstance(view, int):
                name, kind, key, stem = f"azure{view}", "colorimage", "azure", f"camera{view:02d}_colorimage-{{}}"
            elif view == "trackercam":
                name, kind, key, stem = view, "trackercam", "trackercam", "{}"
            else:
                name, kind, key, stem = view, "simstation", "simstation", f"camera{int(view[-1]):02d}_{{}}"
            number = numbers.get(key)
            views[name] = None if number is None else images[kind].get(stem.format(number))
        return timestamp, views

    def texts(self, labeled: LabeledFrame) -> dict[str, str]:
        """What was said around a frame and what the robot's screen shows, where there are files."""
        take = self.take(labeled.take)[0]
        short = labeled.take.removesuffix("_MMOR")
        timestamp, numbers = take.entry(labeled.frame)
        texts = {}
        path = self.root / "take_transcripts_per_timepoint" / short / f"{timestamp}.json"
        if path.is_file():
            texts["speech"] = str(_json_object(path).get("text", "")).strip()
        path = self.root / "screen_summaries" / short / f"{numbers.get('simstation')}.json"
        if path.is_file():
            shown = (value for _, value in sorted(_json_object(path).items()) if isinstance(value, dict))
            texts["screen"] = ", ".join(f"{value.get('type')}: {value.get('template_name')}" for value in shown)
        return texts


def _json_object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise SceneDataError(f"{path} is no JSON object.")
    return content


SIMSTATION_VIEWS = tuple(f"simstation{index}" for index in range(4))


class MMORDataset(SceneDataset):
    """MM-OR (arXiv 2503.02579), alone or with 4D-OR as its authors train.

    Takes without room cameras (005_TKA, 009_TKA) show the simulation station in their place, 3 views.

    Args:
        root: the folder with `001_PKA` and the others.
        split: `"train"`, `"validation"` (or `"val"`) or `"test"`; short clips are in none.
        views: room cameras 1 to 5, `"simstation0"` to `"simstation3"` (1 is the robot's screen), `"trackercam"`; the
            first is the primary view.
        labels: an aggregated label file; by default `relationships_SPLIT.json` in `root` or its folder `data`, else
            the label files of single frames.
        takes: names such as `"004_PKA"`, to use only some takes of the split, or with single label files any take.
        or4d_root: folder of 4D-OR, whose frames in the label file are used too; without it they are left out.
        or4d_views: cameras of 4D-OR.
        texts: put transcripts and summaries of the robot's screen into `meta["texts"]` of the samples.
        missing_views: `"skip"` leaves frames out that lack an image; `"black"` shows black for it if another is there.
        strict_vocab: raise at an unknown word in the labels instead of counting it.
        seconds_per_frame: frames are one second apart.

    Raises:
        SceneDataError: the folder isn't MM-OR's, a take lacks its files, a label file is damaged, or there are no
            labels (but for the test split, whose labels may be absent).
        SceneGraphError: an unknown split, view or take.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        split: str = "train",
        views: Sequence[int | str] = (1, 4, 5, 2, 3),
        labels: str | os.PathLike | None = None,
        takes: Sequence[str] | None = None,
        or4d_root: str | os.PathLike | None = None,
        or4d_views: Sequence[int] = (2, 1, 3, 5),
        texts: bool = False,
        missing_views: str = "skip",
        strict_vocab: bool = False,
        seconds_per_frame: float = 1.0,
    ) -> None:
        root, self.split = Path(root), _split_name(split)
        _check_option("missing_views", missing_views, MISSING_VIEWS)
        _check_cameras(views, 5)
        for view in views:
            if not isinstance(view, int):
                _check_option("views", view, (*SIMSTATION_VIEWS, "trackercam"))
        found = _MMORTakes(root, views)
        or4d = None
        if or4d_root is not None:
            _check_cameras(or4d_views, 6)
            or4d = _OR4DTakes(Path(or4d_root), or4d_views)
        vocabulary, unknown = Vocabulary.mmor(), Counter()
        chosen = None if takes is None else {take.removesuffix("_MMOR") for take in takes}
        path = _label_file(root, self.split) if labels is None else Path(labels)
        if path is not None:
            frames = read_relations(path, vocabulary, strict_vocab, unknown)
            if is_mirrored(path):
                raise SceneDataError(f"{path} is a label file of 4D-OR; expected one of MM-OR, a list of frames.")
            if or4d is None:
                frames = [frame for frame in frames if not frame.take.endswith("_4DOR")]
            available = {frame.take.removesuffix("_MMOR") for frame in frames}
        else:
            known = {take for group in MMOR_SPLITS.values() for take in group} | set(MMOR_FOLDERS)
            available = set(MMOR_SPLITS[self.split]) if chosen is None else known
            wanted = sorted(available if chosen is None else chosen & known)
            frames = [
                frame
                for name in wanted
                for frame in self._single_frames(found, name, vocabulary, strict_vocab, unknown)
            ]
        self.label_source = root if path is None else path
        if chosen is not None:
            absent = sorted(chosen - available)
            if absent:
                raise SceneGraphError(
                    f"takes={absent} are not among the takes of {self.label_source}: {_list(available)}."
                )
            frames = [frame for frame in frames if frame.take.removesuffix("_MMOR") in chosen]
        if self.split != "test" and any(frame.graph is None for frame in frames):
            raise SceneDataError(f"{self.label_source} has no labels for {frames[0].take}, a take of {self.split}.")
        builder = _Builder(missing_views, seconds_per_frame)
        for frame in sorted(frames, key=lambda frame: (frame.take, frame.frame)):
            is_or4d = frame.take.endswith("_4DOR")
            meta = {"texts": found.texts(frame)} if texts and not is_or4d else {}
            builder.add(frame, *(or4d if is_or4d else found).find(frame), meta=meta)
        super().__init__(builder.samples, vocabulary, root, unknown, builder.skipped)

    def _single_frames(
        self, found: _MMORTakes, short: str, vocabulary: Vocabulary, strict: bool, unknown: Counter[str]
    ) -> list[LabeledFrame]:
        name = f"{short}_MMOR"
        folder, is_shared = found.folder(name)
        place = folder / f"relation_labels_{short}"
        if not place.is_dir() and not is_shared:
            place = folder / "relation_labels"
        paths = sorted(place.glob("*.json"))[:: MMOR_LABEL_STEPS.get(short, 1)]
        if not paths and self.split != "test":
            raise SceneDataError(
                f"take {name}: there is neither {place} nor a relationships_{self.split}.json in {found.root} or its "
                "folder data; labels=… names one."
            )
        if not paths:
            return [LabeledFrame(name, frame, None) for frame in range(len(found.take(name)[0].entries))]
        frames = []
        for path in paths:
            graph, humans = read_frame_labels(path, vocabulary, strict, unknown)
            graph = complete_relations(graph, with_instrument=False)
            frames.append(LabeledFrame(name, _frame_of(path), graph, humans))
        return frames


def _natural(path: Path) -> tuple[Any, ...]:
    """Sorts `frame 2` before `frame 10`."""
    parts = re.split(r"(\d+)", path.as_posix())
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


class SceneFolder(SceneDataset):
    """Images of a folder and its sub-folders, with labels where a file has them.

    A sample is named after the path of its image without suffix; its take is the folder.

    Args:
        root: the folder.
        vocabulary: of the labels.
        labels: `{"id": [[subject, predicate, object], …]}`; by default `labels.json` in `root`, if it is there.
        folders_are_samples: the images of one sub-folder are the views of one sample, and the folder above its take.
        seconds_per_frame: time between two samples of a take.
        strict_vocab: raise at an unknown word in the labels instead of counting it.

    Raises:
        SceneDataError: no folder, no images, two images of one name, a damaged label file, or labels without image.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        vocabulary: Vocabulary | None = None,
        labels: str | os.PathLike | None = None,
        folders_are_samples: bool = False,
        seconds_per_frame: float = 1.0,
        strict_vocab: bool = False,
    ) -> None:
        root, unknown = Path(root), Counter()
        vocabulary = Vocabulary.or4d() if vocabulary is None else vocabulary
        if not root.is_dir():
            raise SceneDataError(f"{root} is not a folder.")
        files = (path for path in root.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
        paths = sorted(files, key=lambda path: _natural(path.relative_to(root)))
        groups: dict[str, list[Path]] = {}
        for path in paths:
            if folders_are_samples and path.parent == root:
                raise SceneDataError(
                    f"{path} is in no sub-folder; with folders_are_samples=True each image is in one."
                )
            owner = path.parent if folders_are_samples else path.with_suffix("")
            groups.setdefault(owner.relative_to(root).as_posix(), []).append(path)
        if not groups:
            raise SceneDataError(f"{root} holds no images; allowed: {', '.join(IMAGE_SUFFIXES)}.")
        label_path = root / "labels.json" if labels is None else Path(labels)
        graphs = {}
        if labels is not None or label_path.is_file():
            graphs = read_graphs(label_path, vocabulary, strict_vocab, unknown)
            orphan = next((name for name in graphs if name not in groups), None)
            if orphan is not None:
                raise SceneDataError(
                    f"{label_path} labels {orphan!r}, of which {root} has no image: {_nearest(orphan, groups)}."
                )
        samples, counts = [], Counter()
        for name, images in groups.items():
            if not folders_are_samples and len(images) > 1:
                raise SceneDataError(f"{images[0]} and {images[1].name} have the same name; keep one.")
            take = (root.resolve() / name).parent.relative_to(root.resolve()).as_posix()
            take = root.resolve().name if take == "." else take
            names = tuple(path.name if folders_are_samples else "image" for path in images)
            seconds = counts[take] * seconds_per_frame
            sample = Sample(name, take, counts[take], seconds, tuple(images), names, graphs.get(name))
            samples.append(sample)
            counts[take] += 1
        super().__init__(samples, vocabulary, root, unknown)


def _frame_seconds(path: Path) -> np.ndarray:
    """When each frame of a video is shown, float64 `(frames,)`, seconds since the first; from the packets alone."""
    times = []
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            for packet in container.demux(stream):
                if packet.size and not packet.is_corrupt and not packet.is_discard:
                    times.append(packet.dts if packet.pts is None else packet.pts)
            base = float(stream.time_base)
    except (av.FFmpegError, IndexError) as error:
        raise SceneDataError(f"cannot read video {path}: {error}.") from error
    times = np.unique(np.array(times, np.int64))
    return (times - times[0]) * base


class VideoFrames(Sequence[Sample]):
    """Frames of a video at a steady rate, by time: a video of variable frame rate is sampled evenly in seconds.

    Args:
        path: the video.
        fps: samples per second; each is the frame shown at its time.
        vocabulary: that predictions should use.

    Attributes:
        vocabulary: as given.
        takes: the name of the file.
        frames: number of each sample's frame in the video.

    Raises:
        VideoDecodeError: the file is missing, damaged or no video.
        SceneGraphError: `fps` isn't positive.
    """

    def __init__(self, path: str | os.PathLike, fps: float = 1.0, vocabulary: Vocabulary | None = None) -> None:
        if not (np.isfinite(fps) and fps > 0):
            raise SceneGraphError(f"fps={fps}; allowed: above 0.")
        self.path, self.fps = Path(path), float(fps)
        self.vocabulary = Vocabulary.or4d() if vocabulary is None else vocabulary
        self._reader = VideoReader(self.path)
        times = _frame_seconds(self.path)
        if len(times) != len(self._reader):
            raise SceneDataError(f"{self.path} has {len(self._reader)} frames but times for {len(times)}.")
        # A hair is added because the times of frames are rounded to ticks.
        num_samples = int(np.floor(times[-1] * self.fps + 1e-3)) + 1
        self._seconds = np.arange(num_samples) / self.fps
        self.frames = np.searchsorted(times, self._seconds + 1e-3 / self.fps, side="right") - 1
        self.takes = (self.path.stem,)

    def __len__(self) -> int:
        return len(self.frames)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.path}: sample {index} does not exist; allowed: 0 to {len(self) - 1}.")
        index %= len(self)
        frame = int(self.frames[index])
        return Sample(
            id=f"{self.path.stem}_{frame:06d}",
            take=self.path.stem,
            frame=frame,
            seconds=float(self._seconds[index]),
            views=(self._reader[frame],),
            view_names=("video",),
        )
