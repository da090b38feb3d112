"""Does the embedded model show what its captions say, keep its colors for a minute, and remember places?

Four parts, each of which can be run alone and merges into the same results.json:

* `attributes`: 6 s clips from held-out sentence templates and seeds; a small classifier, trained here on the world
  itself, reads biome, time of day, weather and traveller back. Bars: 90 % for biome and time of day, 75 % for weather
  and traveller. The classifier's own accuracy on held-out real clips, and on these after a pass through the model's
  autoencoder, says how much of an error is its own.
* `drift`: color statistics of the last against the first 5 s of one-minute videos, in pixels and in latents, beside
  those of real one-minute videos; and the attributes at the end of the minute.
* `recall`: the camera pans right for T seconds and back; what was seen is compared with what is seen again, for three
  memories and for the world itself as the ceiling.
* `contact_sheet`: 8 prompts x 6 moments of one-minute videos as a picture.

    python eval/default_model.py                        # all parts on the embedded model, about 12 minutes on 2 cores
    python eval/default_model.py --parts recall --model FOLDER
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _benchmark import (
    generate,
    held_out_scene,
    load_pipeline,
    make_parser,
    model_folder,
    recall_arms,
    report_progress,
    reports_errors,
    there_and_back,
    turning_second,
    write_results,
)
from _default_model_report import claims, make_table
from _scene_reader import get_classifier, reconstruct
from PIL import Image, ImageDraw

from vidgen.metrics import (
    SCENE_ATTRIBUTES,
    SceneClassifier,
    channel_drift,
    score_attributes,
    score_revisits,
    summarize_revisits,
)
from vidgen.runtime.checkpoint import atomic_write, file_checksum
from vidgen.runtime.device import derive_seed, set_threads
from vidgen.runtime.meter import run_environment
from vidgen.worlds import LandscapeScene, LandscapeWorld, caption, prompt_plan
from vidgen.worlds.landscape import FAST_SPEED

PARTS = ("attributes", "drift", "contact_sheet", "recall")
MOMENTS = (0, 12, 24, 36, 48, 59)
RECALL_ATTRIBUTES = {"biome": "meadow", "time_of_day": "day", "weather": "clear", "traveller": "none"}
# Every biome, time, weather and traveller at least once.
SHOWN_SCENES = (
    ("meadow", "dawn", "clear", "balloon"),
    ("desert", "dusk", "clear", "train"),
    ("mountains", "day", "snow", "birds"),
    ("coast", "day", "clear", "airplane"),
    ("forest", "dusk", "rain", "train"),
    ("snowfield", "night", "snow", "none"),
    ("meadow", "day", "rain", "birds"),
    ("coast", "night", "fog", "balloon"),
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        captions: clips of the attributes part.
        clip_seconds: their length.
        batch: videos generated together.
        minute: seconds of the long videos.
        edge: seconds at either end that drift compares.
        turns: seconds T of the recall part.
        classifier_scenes: rendered scenes the classifier learns from.
        classifier_steps: its optimizer steps.
    """

    captions: int = 96
    clip_seconds: float = 6.0
    batch: int = 8
    minute: float = 60.0
    edge: float = 5.0
    turns: tuple[float, ...] = (5.0, 10.0, 15.0, 20.0)
    classifier_scenes: int = 960
    classifier_steps: int = 800


SMOKE = Sizes(
    captions=2, clip_seconds=1.5, minute=3.0, edge=1.0, turns=(2.0,), classifier_scenes=32, classifier_steps=12
)


class Clock:
    """The wall-clock budget of the run."""

    def __init__(self, minutes: float | None) -> None:
        self.deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline


# --- parts -----------------------------------------------------------------------------------------------------


def measure_attributes(bench: Bench) -> dict[str, Any]:
    """Attributes read back from generated, real and re-encoded clips."""
    sizes, world, classifier = bench.sizes, bench.world, bench.classifier
    indices = range(bench.first_seed, bench.first_seed + sizes.captions)
    scenes = [held_out_scene(world, index, sizes.clip_seconds) for index in indices]
    prompts = [caption(scene, 0, seed=scene.seed, split="test") for scene in scenes]
    truths = [scene.attributes for scene in scenes]
    readings = []
    for first in range(0, len(scenes), sizes.batch):
        if readings and bench.clock.is_over:
            break
        chosen = range(first, min(first + sizes.batch, len(scenes)))
        plans = [[(prompts[index], None)] for index in chosen]
        seeds = [derive_seed(scenes[index].seed) for index in chosen]
        videos, _ = generate(bench.pipe, plans, sizes.clip_seconds, seeds)
        readings += [classifier.read(video) for video in videos]
        report_progress(f"attributes: {len(readings)}/{len(scenes)} clips")

    real = [world.render(scene) for scene in scenes]
    # Whole groups of four after the first frame, as the autoencoder wants them; two seconds are enough.
    num_frames = min(25, (len(real[0]) - 1) // 4 * 4 + 1)
    short = [clip[:num_frames] for clip in real]
    encoded = [
        clip
        for first in range(0, len(short), 8)
        for clip in reconstruct(bench.pipe, np.stack(short[first : first + 8]))
    ]
    return {
        "complete": len(readings) == len(scenes),
        "num_clips": len(readings),
        "seconds": sizes.clip_seconds,
        "generated": score_attributes(truths[: len(readings)], readings),
        "real": score_attributes(truths, [classifier.read(clip) for clip in real]),
        "real_two_seconds": score_attributes(truths, [classifier.read(clip) for clip in short]),
        "re_encoded_two_seconds": score_attributes(truths, [classifier.read(clip) for clip in encoded]),
    }


def measure_drift(bench: Bench) -> dict[str, Any]:
    """Color statistics at both ends of the minute, and attributes at its end."""
    scenes, videos, latents = bench.minute_videos
    edge_frames = round(bench.sizes.edge * bench.pipe.config.fps)
    edge_latents = max(1, edge_frames // bench.pipe.vae_scale_factor_temporal)
    rows, first_readings, last_readings = [], [], []
    for index, scene in enumerate(scenes):
        real = bench.world.render(scene, 0, videos.shape[1])
        measured = {
            "rgb": channel_drift(torch.from_numpy(videos[index]).permute(0, 3, 1, 2), edge_frames),
            "latent": channel_drift(latents[index].transpose(0, 1), edge_latents),
            "real_rgb": channel_drift(torch.from_numpy(real).permute(0, 3, 1, 2), edge_frames),
        }
        rows.append(
            {
                name: {**dataclasses.asdict(drift), "mean_shift": drift.mean_shift, "std_ratio": drift.std_ratio}
                for name, drift in measured.items()
            }
        )
        first_readings.append(bench.classifier.read(videos[index, :edge_frames]))
        last_readings.append(bench.classifier.read(videos[index, -edge_frames:]))
    truths = [scene.attributes for scene in scenes]
    return {
        "complete": True,
        "seconds": bench.sizes.minute,
        "edge_seconds": bench.sizes.edge,
        "videos": rows,
        "first_attributes": score_attributes(truths, first_readings),
        "last_attributes": score_attributes(truths, last_readings),
    }


def measure_recall(bench: Bench) -> dict[str, Any]:
    """Revisited places, per memory and seconds T before the camera turns."""
    pipe, world, num_videos = bench.pipe, bench.world, max(2, bench.num_seeds)
    fps = pipe.config.fps
    rows, complete = [], True
    for turn in bench.sizes.turns:
        moves = there_and_back(pipe, turn)
        before = moves[0].seconds
        seconds = sum(move.seconds for move in moves)
        scenes = [
            held_out_scene(world, index, seconds, moves, **RECALL_ATTRIBUTES)
            for index in range(bench.first_seed, bench.first_seed + num_videos)
        ]
        # The first plan's wording for all: chance is what another video of the very same prompt would give.
        plan = prompt_plan(scenes[0], scenes[0].seed, split="test")
        videos = {"world": np.stack([world.render(scene) for scene in scenes])}
        for name, memory in recall_arms().items():
            if bench.clock.is_over:
                complete = False
                break
            seeds = [derive_seed(scene.seed) for scene in scenes]
            videos[name], _ = generate(pipe, [plan] * num_videos, seconds, seeds, memory)
            report_progress(f"recall: T = {turn:g} s, {name}")
        turning = turning_second(moves)
        distances = np.linspace(0.25, 1.0, 7) * (before - 1 / fps)
        for name, batch in videos.items():
            for index, video in enumerate(batch):
                others = [batch[other] for other in range(num_videos) if other != index]
                revisits = score_revisits(video, others, fps, turning, distances.tolist())
                oldest = [revisit for revisit in revisits if revisit.age > turn]
                rows.append(
                    {
                        "turn": turn,
                        "memory": name,
                        "video": index,
                        **summarize_revisits(oldest),
                        "revisits": [dataclasses.asdict(revisit) for revisit in revisits],
                    }
                )
    return {"complete": complete, "attributes": RECALL_ATTRIBUTES, "speed": FAST_SPEED, "rows": rows}


def measure_contact_sheet(bench: Bench) -> dict[str, Any]:
    """The picture of 8 prompts x 6 moments, written next to the results."""
    scenes, videos, _ = bench.minute_videos
    fps, (_, num_frames, height, width, _) = bench.pipe.config.fps, videos.shape
    frames = [min(round(second * bench.sizes.minute / 60 * fps), num_frames - 1) for second in MOMENTS]
    zoom, gap, margin = 2, 3, 14
    cell_height, cell_width = zoom * height + gap, zoom * width + gap
    sheet = Image.new("RGB", (cell_width * len(frames), (cell_height + margin) * len(scenes)), "white")
    pen = ImageDraw.Draw(sheet)
    for row, scene in enumerate(scenes):
        top = row * (cell_height + margin)
        pen.text((2, top + 1), scene_prompts(scene)[0][0], fill="black")
        for column, frame in enumerate(frames):
            picture = Image.fromarray(videos[row, frame]).resize(
                (zoom * width, zoom * height), Image.Resampling.LANCZOS
            )
            sheet.paste(picture, (column * cell_width, top + margin))
    path = bench.out / "contact_sheet.jpg"  # a PNG of it is four times as large
    with atomic_write(path) as temporary:
        sheet.save(temporary, quality=88, optimize=True)
    return {
        "complete": True,
        "file": path.name,
        "moments": [frame / fps for frame in frames],
        "plans": [scene_prompts(scene) for scene in scenes],
    }


def scene_prompts(scene: LandscapeScene) -> list[tuple[str, float]]:
    """The prompt plan of a scene in its held-out wording."""
    return prompt_plan(scene, scene.seed, split="test")


class Bench:
    """What the parts share: models, sizes, budget, and long videos that two of them look at."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = model_folder(options.model)
        self.pipe = load_pipeline(options.model)
        config = self.pipe.config
        self.world = LandscapeWorld(config.default_height, config.default_width, int(config.fps))
        self.sizes = SMOKE if options.smoke else Sizes()
        self.clock = Clock(options.minutes)
        self.first_seed, self.num_seeds = options.first_seed, options.seeds
        self.out, self.cache = options.out, options.cache

    @functools.cached_property
    def classifier(self) -> SceneClassifier:
        sizes = self.sizes
        return get_classifier(self.pipe, self.world, sizes.classifier_scenes, sizes.classifier_steps, self.cache)

    @functools.cached_property
    def minute_videos(self) -> tuple[list[LandscapeScene], np.ndarray, torch.Tensor]:
        """Scenes, frames and latents of the shown prompts, generated together."""
        count = max(3, len(SHOWN_SCENES) if self.sizes != SMOKE else 3)
        scenes = []
        for index, values in enumerate(SHOWN_SCENES[:count]):
            attributes = dict(zip(SCENE_ATTRIBUTES, values, strict=True))
            scenes.append(held_out_scene(self.world, self.first_seed + 1000 + index, self.sizes.minute, **attributes))
        report_progress(f"{count} videos of {self.sizes.minute:g} s")
        seeds = [derive_seed(scene.seed) for scene in scenes]
        videos, latents = generate(self.pipe, [scene_prompts(scene) for scene in scenes], self.sizes.minute, seeds)
        return scenes, videos, latents

    def model_checksum(self) -> str:
        """Tells results of different weights apart."""
        return " ".join(f"{file_checksum(file):08x}" for file in sorted(self.model.glob("*/*.safetensors")))


MEASURES = {
    "attributes": measure_attributes,
    "drift": measure_drift,
    "recall": measure_recall,
    "contact_sheet": measure_contact_sheet,
}


def merge_results(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """Parts of earlier runs on the same weights, replaced by those measured now."""
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        if (old["model_checksum"], old["smoke"]) == (fresh["model_checksum"], fresh["smoke"]):
            fresh = {**fresh, "parts": {**old["parts"], **fresh["parts"]}}
    return {**fresh, "claims": claims(fresh["parts"])}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "default_model")
    parser.add_argument("--cache", type=Path, default=Path("runs/eval/scene_classifier"), help="trained classifiers")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--seeds", type=int, default=3, help="videos per memory and T in the recall part")
    parser.add_argument("--first-seed", type=int, default=0, help="shifts all seeds: other scenes, other noise")
    parser.add_argument("--minutes", type=float, help="start no further generation after this many minutes")
    options = parser.parse_args(arguments)
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: above 0")
    if options.seeds < 1 or options.first_seed < 0:
        parser.error(f"--seeds {options.seeds} --first-seed {options.first_seed}: at least 1 and at least 0")
    return options


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen parts, merge and write results.json and table.md, print the table."""
    options = parse_arguments(arguments)
    set_threads()
    bench = Bench(options)
    results: dict[str, Any] = {}
    for name in options.parts:
        if results and bench.clock.is_over:
            print(f"The part {name} is left out: {options.minutes:g} minutes are over.", file=sys.stderr)
            continue
        started = time.perf_counter()
        part = MEASURES[name](bench)
        part |= {
            "minutes": (time.perf_counter() - started) / 60,
            "seeds": {"first": options.first_seed, "number": options.seeds},
        }
        # Written after every part: a run that is stopped keeps what it has measured.
        results = merge_results(
            options.out / "results.json",
            {
                "benchmark": "default_model",
                "model": bench.model.name,
                "model_checksum": bench.model_checksum(),
                "smoke": options.smoke,
                "environment": run_environment(),
                "parts": {name: part},
            },
        )
        write_results(options.out, results, make_table(results))
    print(make_table(results))
    for claim in results["claims"]:
        verdict = "pass" if claim["passed"] else "FAIL"
        print(f"{verdict}: {claim['claim']} {claim['value']:.1%} (at least {claim['at_least']:.0%})")
    return int(options.check and not all(claim["passed"] for claim in results["claims"]))


if __name__ == "__main__":
    sys.exit(main())
