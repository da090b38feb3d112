"""Writes simulated operations as 4D-OR lies on disk, so that whatever reads one reads the other.

export_holistic_take1_processed/colorimage/camera02_colorimage-001234.jpg
export_holistic_take1_processed/timestamp_to_pcd_and_frames_list.json     entry k: images of frame k
export_holistic_take1_processed/relation_labels/000000.json               labels of a frame
export_holistic_take1_processed/camera02.json                             calibration
export_holistic_take1_processed/phase_to_frames_1.json                    first and last frame of each phase
data/relationships_train.json                                             labels of a split, as 4D-OR's
data/relationships_train_mmor.json                                        the same as MM-OR's
data/classes.txt, data/relationships.txt                                  names of objects and predicates
simulator.json                                                            settings, splits, looks; written last
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import uuid
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from scene_graph.formats import (
    OR4D_RELATIONS,
    OR4D_ROLES,
    LabeledFrame,
    mirrored_relations,
    read_json,
    write_json,
    write_mmor_relations,
    write_or4d_relations,
)
from scene_graph.schema import SceneDataError
from scene_graph.simulator.render import Renderer
from scene_graph.simulator.world import SimulatedTake, SimulatorConfig, Study, make_take, plan_study
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.device import derive_seed

SIMULATOR_FILE = "simulator.json"
FORMAT_VERSION = 1
JPEG_QUALITY = 92
# Milliseconds, as in the names of 4D-OR's point clouds; only differences mean something.
FIRST_TIMESTAMP = 1_600_000_000_000
CLASSES = (
    "Patient",
    "anesthesia_equipment",
    *(f"human_{index}" for index in range(6)),
    "instrument",
    "instrument_table",
    "operating_table",
    "secondary_table",
)


def take_folder(number: int) -> str:
    """The folder of a take, relative to the data set."""
    return f"export_holistic_take{number}_processed"


def simulate(root: str | os.PathLike, config: SimulatorConfig, workers: int = 1) -> Path:
    """Write a simulated data set in the layout of 4D-OR.

    A take appears when it is whole, and takes that are there are kept: an interrupted call is continued by the same.
    A file depends on the settings alone, not on `workers` nor on what was written before.

    Args:
        root: folder of the data set; made if it doesn't exist.
        config: what is simulated.
        workers: processes that share the takes.

    Returns:
        `root`.

    Raises:
        SceneDataError: `root` holds another data set.
    """
    root, settings = Path(root), root_settings(config)
    draft = root / f".{SIMULATOR_FILE}"
    study = plan_study(config)
    for path in (root / SIMULATOR_FILE, draft):
        if path.is_file() and read_json(path).get("settings") != settings:
            raise SceneDataError(f"{path} was written with other settings; choose another folder or remove {root}.")
    if not draft.is_file() and not (root / SIMULATOR_FILE).is_file() and any(root.glob(take_folder("*"))):
        raise SceneDataError(f"{root} holds takes that were not simulated; choose another folder.")
    if (root / SIMULATOR_FILE).is_file():
        return root
    root.mkdir(parents=True, exist_ok=True)
    write_json(draft, {"settings": settings})
    for path in root.glob(f".{take_folder('*')}.*.tmp"):  # of an interrupted call
        shutil.rmtree(path)
    everything = range(1, config.takes + 1)
    numbers = [number for number in everything if not (root / take_folder(number)).is_dir()]
    work = partial(_write_take, root, config, study)
    takes: dict[int, SimulatedTake] = {}
    with tqdm(total=config.takes, initial=config.takes - len(numbers), desc="simulate", unit="take") as bar:
        if workers > 1 and len(numbers) > 1:
            # Spawned, since a fork copies the locks of whatever threads the caller has.
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(min(workers, len(numbers)), mp_context=context) as pool:
                for take in pool.map(work, numbers):
                    takes[take.number] = take
                    bar.update()
        else:
            for number in numbers:
                takes[number] = work(number)
                bar.update()
    takes = {number: takes.get(number) or make_take(config, study, number) for number in everything}
    _write_labels(root / "data", study, takes)
    # One flush for all images: flushing each would take longer than drawing it.
    os.sync()
    write_json(root / SIMULATOR_FILE, describe(config, study, takes))
    draft.unlink(missing_ok=True)
    return root


def root_settings(config: SimulatorConfig) -> dict[str, Any]:
    """What two calls must agree on to work on one folder."""
    settings = dataclasses.asdict(config)
    return {**settings, "views": list(config.views), "version": FORMAT_VERSION}


def describe(config: SimulatorConfig, study: Study, takes: dict[int, SimulatedTake]) -> dict[str, Any]:
    """The content of `simulator.json`: splits, and which looks are in which take."""
    looks = {
        number: {
            action: {"look": look.index, "body": look.body, "hue": look.hue, "is_unseen": look.is_unseen}
            for action, look in takes[number].looks.items()
        }
        for number in takes
    }
    return {
        "settings": root_settings(config),
        "splits": {split: list(numbers) for split, numbers in study.splits.items()},
        "seconds_per_frame": config.seconds_per_frame,
        "looks": {f"{number:03d}_4DOR": entry for number, entry in looks.items()},
    }


def _write_labels(folder: Path, study: Study, takes: dict[int, SimulatedTake]) -> None:
    for split, numbers in study.splits.items():
        frames = [frame for number in numbers for frame in takes[number].labeled_frames()]
        write_mmor_relations(folder / f"relationships_{split}_mmor.json", frames)
        raw = [replace(frame, graph=mirrored_relations(frame.graph)) for frame in frames]
        write_or4d_relations(folder / f"relationships_{split}.json", raw)
    for name, words in (("classes.txt", CLASSES), ("relationships.txt", OR4D_RELATIONS)):
        with atomic_write(folder / name) as temporary:
            temporary.write_text("\n".join(words) + "\n", encoding="utf-8")


def _image_numbers(config: SimulatorConfig, number: int) -> np.ndarray:
    """The number of each camera's image of each frame, `(frames, cameras)`, never that of the frame.

    Cameras start at moments of their own and drop images now and then, as real ones do.
    """
    rng = np.random.default_rng(derive_seed(config.seed, 4, number))
    first = rng.integers(6000, 9000, len(config.views))
    steps = 1 + rng.integers(0, 3, (config.frames_per_take, len(config.views)))
    return first + np.cumsum(steps, axis=0)


def _write_take(root: Path, config: SimulatorConfig, study: Study, number: int) -> SimulatedTake:
    take, numbers = make_take(config, study, number), _image_numbers(config, number)
    folder = root / take_folder(number)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        for name in ("colorimage", "relation_labels"):
            (temporary / name).mkdir(parents=True)
        _write_images(temporary / "colorimage", take, config, numbers)
        entries = []
        for state, row, labeled in zip(take.states, numbers.tolist(), take.labeled_frames()):
            cameras = {f"color_{view}": f"{image:06d}" for view, image in zip(config.views, row)}
            timestamp = FIRST_TIMESTAMP + round(1000 * state.seconds)
            entries.append([str(timestamp), {"pcd": f"{row[0] + 7:06d}", **cameras}])
            _dump(temporary / "relation_labels" / f"{state.frame:06d}.json", _frame_labels(labeled))
        _dump(temporary / "timestamp_to_pcd_and_frames_list.json", entries)
        phases = {}
        for phase, states in groupby(take.states, key=lambda state: state.phase):
            frames = [state.frame for state in states]
            phases[phase] = [frames[0], frames[-1]]
        _dump(temporary / f"phase_to_frames_{number}.json", phases)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return take


def _write_images(folder: Path, take: SimulatedTake, config: SimulatorConfig, numbers: np.ndarray) -> None:
    renderer = Renderer(take, config.views, config.size, config.seed)
    for view in config.views:
        _dump(folder.parent / f"camera{view:02d}.json", renderer.calibration(view))
    for state, row in zip(take.states, numbers.tolist()):
        for view, number, pixels in zip(config.views, row, renderer.render(state)):
            name = f"camera{view:02d}_colorimage-{number:06d}.jpg"
            # Full color resolution: the tip of a tool is a few pixels.
            Image.fromarray(pixels).save(folder / name, quality=JPEG_QUALITY, subsampling=0)


def _dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _frame_labels(frame: LabeledFrame) -> dict[str, Any]:
    """The labels of one frame as annotators write them: closeTo once, and which human has which role."""
    humans = dict(frame.humans)
    names = {role: human for human, role in sorted(humans.items(), reverse=True)}

    def raw(entity: str) -> str:
        if entity in OR4D_ROLES:
            return names[OR4D_ROLES[entity]]
        return "Patient" if entity == "patient" else entity.replace(" ", "_")

    def raw_predicate(predicate: str) -> str:
        return "Operating" if predicate == "manipulating" else predicate[0].upper() + predicate[1:]

    triplets = frame.graph.sorted()
    rows = [[raw(t.subject), raw_predicate(t.predicate), raw(t.object), "", ""] for t in triplets]
    return {"rel_annotations": rows, "human_name_annotations": humans}
