"""Random graphs, samples of noise, and tiny data sets in the layouts of 4D-OR and MM-OR, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scene_graph.schema import Sample, SceneGraph, Triplet, Vocabulary

# Images are numbered from here on, so that a frame number taken for an image number finds nothing.
FIRST_IMAGE = 4000


def make_graph(
    rng: np.random.Generator, vocabulary: Vocabulary | None = None, num_triplets: int | None = None
) -> SceneGraph:
    """A random graph: 0 to 8 triplets (or as many as asked), one predicate for each ordered pair."""
    vocabulary = Vocabulary.or4d() if vocabulary is None else vocabulary
    pairs = [(s, o) for s in vocabulary.entities for o in vocabulary.entities if s != o]
    number = int(rng.integers(0, 9)) if num_triplets is None else num_triplets
    chosen = rng.choice(len(pairs), number, replace=False)
    return SceneGraph(
        [
            Triplet(pairs[index][0], vocabulary.predicates[rng.integers(len(vocabulary.predicates))], pairs[index][1])
            for index in chosen
        ]
    )


def make_sample(
    rng: np.random.Generator,
    graph: SceneGraph | None = None,
    take: str = "001_4DOR",
    frame: int = 0,
    num_views: int = 2,
    size: tuple[int, int] = (24, 32),
    **fields: Any,
) -> Sample:
    """A sample with views of noise held in memory; a random graph unless one is given."""
    images = rng.integers(0, 256, (num_views, *size, 3), dtype=np.uint8)
    return Sample(
        id=f"{take}_{frame:06d}",
        take=take,
        frame=frame,
        seconds=float(frame),
        views=tuple(images),
        view_names=tuple(f"camera{index + 1:02d}" for index in range(num_views)),
        graph=make_graph(rng) if graph is None else graph,
        **fields,
    )


def write_image(path: Path, value: int, size: tuple[int, int] = (16, 24)) -> None:
    """A picture of one gray, which JPEG keeps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, np.uint8)).save(path, quality=95)


def write_or4d_take(
    root: Path, number: int, annotations: Sequence[Sequence[Sequence[str]]], humans: Mapping[str, str] | None = None
) -> Path:
    """A take of 4D-OR with the annotators' relations [sub, pred, obj] of each frame, and 6 cameras.

    Camera c shows frame f as the gray 10 c + f.
    """
    folder = root / f"export_holistic_take{number}_processed"
    entries = []
    for frame, rows in enumerate(annotations):
        images = {f"color_{camera}": f"{FIRST_IMAGE + 10 * frame + camera:06d}" for camera in range(1, 7)}
        entries.append([f"{1_600_000_000 + frame}", {"pcd": f"{frame + 77:06d}", **images}])
        for camera in range(1, 7):
            name = f"camera0{camera}_colorimage-{images[f'color_{camera}']}.jpg"
            write_image(folder / "colorimage" / name, 10 * camera + frame)
        label = folder / "relation_labels" / f"{frame:06d}.json"
        label.parent.mkdir(exist_ok=True)
        content = {"rel_annotations": [[*row, "", ""] for row in rows], "human_name_annotations": dict(humans or {})}
        label.write_text(json.dumps(content))
    (folder / "timestamp_to_pcd_and_frames_list.json").write_text(json.dumps(entries))
    return folder


def write_mmor_take(
    root: Path,
    take: str,
    annotations: Sequence[Sequence[Sequence[str]]],
    folder: str | None = None,
    first_image: int = FIRST_IMAGE,
    with_azure: bool = True,
    suffix: bool = False,
) -> Path:
    """A take of MM-OR; room camera c shows frame f as the gray 10 c + f, the simulation station as 100 + 10 c + f."""
    place = root / (folder or take)
    entries = []
    for frame in range(len(annotations)):
        azure, station, tracker = (f"{first_image + offset + frame:06d}" for offset in (0, 100, 200))
        numbers = {"azure": azure} if with_azure else {}
        entries.append([f"{frame * 33}", {**numbers, "simstation": station, "trackercam": tracker}])
        if with_azure:
            for camera in range(1, 6):
                write_image(place / "colorimage" / f"camera0{camera}_colorimage-{azure}.jpg", 10 * camera + frame)
        for camera in range(4):
            write_image(place / "simstation" / f"camera0{camera}_{station}.jpg", 100 + 10 * camera + frame)
        write_image(place / "trackercam" / f"{tracker}.jpg", 5)
    ending = f"_{take}" if suffix else ""
    (place / f"timestamp_to_pcd_and_frames_list{ending}.json").write_text(json.dumps(entries))
    labels = place / f"relation_labels{ending}"
    labels.mkdir()
    for frame, rows in enumerate(annotations):
        (labels / f"{frame:06d}.json").write_text(json.dumps({"rel_annotations": [list(row) for row in rows]}))
    return place
