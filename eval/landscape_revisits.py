"""Does the embedded model remember places because it was taught to, and because of its memory?

The camera pans right for 21 s, turns, and pans back, so that a place is seen again 5, 10, 20 and 40 s after its first
sight. What was seen is compared with what is seen again, in pixels and in the things that stand there (read by a
detector that is trained here on the world's own truth), above the same comparison with other videos of the prompt.

Arms, all on the same prompts and noise:

* `A, slow-fast`: the model with its slow-fast memory.
* `B memoryless teacher` (`--baseline`): a transformer that was distilled without a past to look at, same memory.
* `C stage 1 only` (`--stage1`): the transformer before it, same memory.
* `A, window`, `A, 6-slot window`, `A, full`: the model with a window of as many slots, a short one, and everything.
* `world`: the renderer itself, which forgets nothing.

Bars: at ages of 20 and 40 s, A gains more than B and than the window of equally many slots, in pixels and in objects.

    python eval/landscape_revisits.py
    python eval/landscape_revisits.py --model MODEL --baseline FOLDER --stage1 FOLDER

The second compares what Context Forcing distilled (`runs/context_forcing`). B and C are sampled as the model is, so
all three must be students of as many steps; the embedded model is not one of them.

Every finished (arm, seed) is a file under `--work`, with a picture to check by eye beside it; an interrupted benchmark
goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from _benchmark import (
    add_seeds,
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
from _scene_reader import reconstruct
from PIL import Image, ImageDraw

from vidgen.memory import KVMemoryConfig, SlidingWindowMemoryConfig
from vidgen.metrics import Revisit, score_revisits, summarize_revisits
from vidgen.metrics.object_detector import (
    HELD_OUT_SEEDS,
    ObjectDetector,
    ObjectRevisit,
    fit_detector,
    object_map,
    score_object_revisits,
    summarize_object_revisits,
    validate,
)
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.runtime.checkpoint import atomic_write, file_checksum
from vidgen.runtime.device import derive_seed, set_threads
from vidgen.runtime.errors import VidgenError
from vidgen.runtime.meter import run_environment
from vidgen.worlds import LandscapeScene, LandscapeWorld, prompt_plan
from vidgen.worlds.landscape import BIOMES

A, B, C, WINDOW, WORLD = "A, slow-fast", "B memoryless teacher", "C stage 1 only", "A, window", "world"
KINDS = ("psnr", "objects")
# Neither weather nor traveller hides anything.
ATTRIBUTES = {"time_of_day": "day", "weather": "clear", "traveller": "none"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        turn: seconds before the camera turns, rounded to the nearest beginning of a chunk.
        ages: seconds between two sights of a place; the bars are about the two oldest.
        detector_scenes: rendered scenes the detector learns from.
        detector_steps: its optimizer steps.
        test_clips: held-out clips it is tested on.
    """

    turn: float = 21.0
    ages: tuple[float, ...] = (5.0, 10.0, 20.0, 40.0)
    detector_scenes: int = 600
    detector_steps: int = 600
    test_clips: int = 96


SMOKE = Sizes(turn=2.0, ages=(1.0, 2.0, 3.0, 4.0), detector_scenes=4, detector_steps=4, test_clips=2)


@dataclasses.dataclass(frozen=True)
class Arm:
    """One side of the comparison.

    Attributes:
        transformer: folder of the weights; None for the model's own.
        memory: what the model remembers with; None for the renderer.
    """

    transformer: Path | None
    memory: str | KVMemoryConfig | None


def make_arms(baseline: Path | None, stage1: Path | None) -> dict[str, Arm]:
    """The arms for which there are weights."""
    memories = recall_arms()
    given = {B: baseline, C: stage1}
    return {
        A: Arm(None, memories["slow_fast"]),
        **{name: Arm(folder, memories["slow_fast"]) for name, folder in given.items() if folder is not None},
        WINDOW: Arm(None, memories["sliding_window"]),
        "A, 6-slot window": Arm(None, SlidingWindowMemoryConfig(window=6)),
        "A, full": Arm(None, memories["full"]),
        WORLD: Arm(None, None),
    }


# --- measuring ---------------------------------------------------------------------------------------------------


class Bench:
    """The model, the script the camera follows, and the detector."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = model_folder(options.model)
        self.pipe = load_pipeline(options.model)
        config = self.pipe.config
        self.world = LandscapeWorld(config.default_height, config.default_width, int(config.fps))
        self.sizes = SMOKE if options.smoke else Sizes()
        self.biome, self.num_videos, self.work = options.biome, options.videos, options.work
        self.moves = there_and_back(self.pipe, self.sizes.turn)
        self.own_transformer = self.pipe.transformer

    @functools.cached_property
    def detector(self) -> ObjectDetector:
        """Trained at first use."""
        path = self.work / self.detector_name
        if not path.exists():
            fit_detector(
                self.world, self.sizes.detector_scenes, self.sizes.detector_steps, progress=sys.stderr.isatty()
            ).save(path)
        return ObjectDetector.load(path).to(self.pipe.vae.device)

    @property
    def detector_name(self) -> str:
        sizes, world = self.sizes, self.world
        return f"detector_{world.height}x{world.width}_{sizes.detector_scenes}_{sizes.detector_steps}.safetensors"

    def test_detector(self) -> dict[str, Any]:
        """How well the detector reads held-out frames, as rendered and after the model's autoencoder."""
        clips, maps = [], []
        for seed in range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + self.sizes.test_clips):
            scene = self.world.scene(seed=seed, seconds=60.0, biome=self.biome, **ATTRIBUTES)
            start = derive_seed(seed) % (scene.num_frames - 5)
            clips.append(self.world.render(scene, start, 5))
            maps.append(object_map(scene, start + 4, self.world.width // self.pipe.vae_scale_factor_spatial))
        truth = torch.from_numpy(np.stack(maps))
        rendered = np.stack(clips)
        coded = np.concatenate([reconstruct(self.pipe, rendered[i : i + 8]) for i in range(0, len(rendered), 8)])
        return {
            name: validate(self.detector, torch.from_numpy(videos[:, -1].copy()), truth)
            for name, videos in (("rendered", rendered), ("re_encoded", coded))
        }

    def checksum(self, arm: Arm) -> str:
        """Tells the weights of an arm apart; the renderer has none."""
        if arm.memory is None:
            return "none"
        files = sorted(self.model.glob("*/*.safetensors"))
        if arm.transformer is not None:
            files += sorted(arm.transformer.glob("*.safetensors"))
        return " ".join(f"{file_checksum(file):08x}" for file in files)

    def transformer(self, arm: Arm) -> CausalWanTransformer3DModel:
        """The network of an arm.

        Raises:
            VidgenError: when it doesn't fit the model's other parts.
        """
        own = self.own_transformer
        if arm.transformer is None:
            return own
        transformer = CausalWanTransformer3DModel.from_pretrained(arm.transformer, dtype=own.dtype)
        for key in ("in_channels", "out_channels", "text_dim", "num_frames_per_block"):
            if transformer.config[key] != own.config[key]:
                raise VidgenError(
                    f"{arm.transformer} has {key}={transformer.config[key]}; the model has {own.config[key]}."
                )
        return transformer.to(own.device).eval()

    def videos(self, arm: Arm, seed: int) -> np.ndarray:
        """uint8 `(videos, frames, height, width, 3)`: one prompt, other places and noise in each."""
        seconds = sum(move.seconds for move in self.moves)
        scenes = [
            held_out_scene(self.world, 100 * seed + index, seconds, self.moves, biome=self.biome, **ATTRIBUTES)
            for index in range(self.num_videos)
        ]
        if arm.memory is None:
            return np.stack([self.world.render(scene) for scene in scenes])
        self.pipe.register_modules(transformer=self.transformer(arm))
        seeds = [derive_seed(scene.seed) for scene in scenes]
        return generate(self.pipe, [plan_of(scenes[0])] * len(scenes), seconds, seeds, arm.memory)[0]

    def measure(self, name: str, arm: Arm, seed: int) -> dict[str, Any]:
        """Revisits of one arm and seed, from `--work` where they were measured before.

        Returns:
            `settings`, and `videos`: per video, kind of comparison and level of chance a revisit for every age.
        """
        settings = {
            "arm": name,
            "seed": seed,
            "weights": self.checksum(arm),
            "memory": repr(arm.memory),
            "biome": self.biome,
            "num_videos": self.num_videos,
            "turn": turning_second(self.moves),
            "ages": list(self.sizes.ages),
            "detector": self.detector_name,
        }
        path = self.work / f"{name.replace(',', '').replace(' ', '_')}_seed{seed}.json"
        if path.exists() and (stored := json.loads(path.read_text(encoding="utf-8")))["settings"] == settings:
            return stored
        videos = self.videos(arm, seed)
        self.save_contact_picture(videos, path.with_suffix(".png"), name)
        maps = [self.detector.detect(video) for video in videos]
        measured = {
            "settings": settings,
            "videos": [
                {
                    kind: {
                        chance: [dataclasses.asdict(revisit) for revisit in revisits]
                        for chance, revisits in self.compare(score, batch, index).items()
                    }
                    for kind, score, batch in (
                        ("psnr", score_revisits, videos),
                        ("objects", score_object_revisits, maps),
                    )
                }
                for index in range(self.num_videos)
            ],
        }
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(measured), encoding="utf-8")
        return measured

    def compare(
        self, score: Callable[..., list[Any]], batch: Sequence[np.ndarray], index: int
    ) -> dict[str, list[Any]]:
        """Revisits of one video, with the other videos and with the own video's other places as level of chance.

        The second level unmasks a video that keeps its style, stands still or repeats itself: it matches itself
        anywhere. Half the way back lies between the two places, more than the width of the picture; that is half the
        way in time too, so the drift of a video counts in this gain, and arms are compared at the same age only.
        """
        others = [video for other, video in enumerate(batch) if other != index]
        distances = [age / 2 for age in self.sizes.ages]
        fps, turn = self.world.fps, turning_second(self.moves)
        turning_frame, away = round(turn * fps), batch[index].copy()
        away[turning_frame:] = np.roll(away[turning_frame:], (len(away) - turning_frame) // 2, axis=0)
        return {
            "other_videos": score(batch[index], others, fps, turn, distances),
            "other_places": score(batch[index], [away], fps, turn, distances),
        }

    def save_contact_picture(self, videos: np.ndarray, path: Path, title: str) -> None:
        """A row per video: each place as first seen and, beside it, at the moment it should be seen again."""
        turn, fps = turning_second(self.moves), self.world.fps
        height, width = videos.shape[2:4]
        zoom, gap, margin = 2, 2, 14
        pair_width = 2 * (zoom * width + gap) + 8
        row_height = zoom * height + gap
        sheet = Image.new("RGB", (pair_width * len(self.sizes.ages), 2 * margin + row_height * len(videos)), "white")
        pen = ImageDraw.Draw(sheet)
        pen.text((2, 1), title, fill="black")
        for column, age in enumerate(reversed(self.sizes.ages)):
            pen.text((column * pair_width + 2, margin), f"{age:g} s: before the turn, after it", fill="black")
            for row, video in enumerate(videos):
                for which, second in enumerate((turn - age / 2, turn + age / 2)):
                    picture = Image.fromarray(video[round(second * fps)])
                    picture = picture.resize((zoom * width, zoom * height), Image.Resampling.LANCZOS)
                    left = column * pair_width + which * (zoom * width + gap)
                    sheet.paste(picture, (left, 2 * margin + row * row_height))
        with atomic_write(path) as temporary:
            sheet.save(temporary, optimize=True)


def plan_of(scene: LandscapeScene) -> list[tuple[str, float]]:
    """The prompt plan of a scene in its held-out wording."""
    return prompt_plan(scene, scene.seed, split="test")


# --- report ------------------------------------------------------------------------------------------------------


def summarize_seed(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Per age the means over the videos of one arm and seed."""
    rows = []
    for index, age in enumerate(measured["settings"]["ages"]):
        row: dict[str, Any] = {"arm": measured["settings"]["arm"], "seed": measured["settings"]["seed"], "age": age}
        for kind, revisit, summarize in (
            ("psnr", Revisit, summarize_revisits),
            ("objects", ObjectRevisit, summarize_object_revisits),
        ):
            for chance in ("other_videos", "other_places"):
                row.setdefault(kind, {})[chance] = summarize(
                    [revisit(**video[kind][chance][index]) for video in measured["videos"]]
                )
        rows.append(row)
    return rows


def values(
    rows: list[dict[str, Any]], arm: str, age: float, kind: str, key: str = "gain", chance: str = "other_videos"
) -> list[float]:
    """One number per seed; seeds without an object to recognize are left out."""
    chosen = [row[kind][chance][key] for row in rows if row["arm"] == arm and row["age"] == age]
    return [value for value in chosen if value is not None]


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars, on means over seeds."""
    arms, ages = dict.fromkeys(row["arm"] for row in rows), sorted({row["age"] for row in rows})
    results = []
    for reference in (B, WINDOW):
        if reference not in arms:
            continue
        for kind in KINDS:
            for age in ages[-2:]:
                own, other = (values(rows, arm, age, kind) for arm in (A, reference))
                value, bar = (float(np.mean(gains)) if gains else None for gains in (own, other))
                results.append(
                    {
                        "claim": f"{kind}: gain of {A} at {age:g} s above {reference}",
                        "value": value,
                        "above": bar,
                        "passed": value is not None and bar is not None and value > bar,
                    }
                )
    return results


def spread(numbers: list[float]) -> str:
    """Mean and range over seeds."""
    if not numbers:
        return "no object seen"
    return f"{np.mean(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


def make_table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows, detector = results["rows"], results["detector"]
    arms, ages = dict.fromkeys(row["arm"] for row in rows), sorted({row["age"] for row in rows})
    lines = [
        f"Model `{results['model']}` on {results['environment']['cpu']}: {results['num_videos']} videos per seed of a "
        f"{results['biome']}, seeds {', '.join(map(str, results['seeds']))}.",
        "",
        "How much better a place seen again matches its first sight than other videos of the prompt do (gain), and "
        "than another place of the same video does (gain over elsewhere): best-aligned PSNR, and soft Dice of the "
        "objects found. `recall`: how often the own past matches better than another video; 0.5 is chance. Mean over "
        "seeds (range).",
        "",
        "| arm | age (s) | PSNR gain (dB) | over elsewhere (dB) | object gain | over elsewhere | object recall |",
        "|---|---|---|---|---|---|---|",
    ]
    columns = [
        ("psnr", "gain", "other_videos"),
        ("psnr", "gain", "other_places"),
        ("objects", "gain", "other_videos"),
        ("objects", "gain", "other_places"),
        ("objects", "recall", "other_videos"),
    ]
    for arm in arms:
        for age in ages:
            cells = [spread(values(rows, arm, age, *column)) for column in columns]
            lines.append(f"| {arm} | {age:g} | {' | '.join(cells)} |")
    lines += ["", "First sights without any object, which are left out of the object columns:", ""]
    for arm in arms:
        counts = [row["objects"]["other_videos"] for row in rows if row["arm"] == arm]
        empty, total = (
            sum(count["empty"] for count in counts),
            sum(count["empty"] + count["seen"] for count in counts),
        )
        lines.append(f"- {arm}: {empty} of {total}")
    lines += [
        "",
        "The detector on held-out frames of this biome (average precision; a blind guess has "
        f"{detector['rendered']['base_rate']:.3f}): {detector['rendered']['average_precision']:.3f} as rendered, "
        f"{detector['re_encoded']['average_precision']:.3f} after the model's autoencoder; F1 at 0.5 "
        f"{detector['rendered']['f1']:.3f} and {detector['re_encoded']['f1']:.3f}.",
        "",
        "| bar | value | above | |",
        "|---|---|---|---|",
    ]
    for claim in results["claims"]:
        numbers = ("–" if claim[key] is None else f"{claim[key]:.2f}" for key in ("value", "above"))
        lines.append(f"| {claim['claim']} | {' | '.join(numbers)} | {'pass' if claim['passed'] else 'FAIL'} |")
    if B not in arms:
        lines += ["", f"`{B}` was not measured: no `--baseline`."]
    return "\n".join(lines) + "\n"


def plot_gains(rows: list[dict[str, Any]], path: Path) -> None:
    """Gain against age, one line per arm, with the range over seeds; the renderer is off the scale of the pixels."""
    ages = sorted({row["age"] for row in rows})
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, kind, label in zip(
        panels, KINDS, ("PSNR gain over chance (dB)", "object gain over chance"), strict=True
    ):
        for arm in dict.fromkeys(row["arm"] for row in rows):
            if arm == WORLD and kind == "psnr":
                continue
            gains = {age: values(rows, arm, age, kind) for age in ages}
            points = [(age, np.mean(gain), min(gain), max(gain)) for age, gain in gains.items() if gain]
            if not points:
                continue
            x, mean, low, high = np.array(points).T
            axes.errorbar(x, mean, (mean - low, high - mean), marker="o", markersize=4, capsize=3, label=arm)
        axes.axhline(0, color="gray", linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ages, [f"{age:g}" for age in ages])
        axes.set(xlabel="seconds since the first sight", ylabel=label)
    panels[0].legend(fontsize=8)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=120)
    plt.close(figure)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "landscape_revisits")
    parser.add_argument("--baseline", type=Path, help=f"transformer folder of arm {B}")
    parser.add_argument("--stage1", type=Path, help=f"transformer folder of arm {C}")
    parser.add_argument("--biome", choices=BIOMES, default="meadow", help="default: %(default)s, whose things differ")
    add_seeds(parser)
    parser.add_argument("--videos", type=int, default=4, help="per seed; default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("runs/eval/landscape_revisits"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if not 2 <= options.videos <= 100:
        parser.error(f"--videos {options.videos}: 2 to 100, since other videos are chance")
    for name in ("baseline", "stage1"):
        folder = getattr(options, name)
        if folder is not None and not (folder / "config.json").is_file():
            parser.error(f"--{name} {folder}: expected a folder with config.json and safetensors")
    return options


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what isn't measured yet; write results.json, table.md and the plot; print the table."""
    options = parse_arguments(arguments)
    set_threads()
    bench, rows, measured = Bench(options), [], []
    arms = make_arms(options.baseline, options.stage1)
    for seed in options.seeds:
        for name, arm in arms.items():
            report_progress(f"seed {seed}: {name}")
            measured.append(bench.measure(name, arm, seed))
            rows += summarize_seed(measured[-1])
    results = {
        "benchmark": "landscape_revisits",
        "model": bench.model.name,
        "smoke": options.smoke,
        "biome": options.biome,
        "seeds": options.seeds,
        "num_videos": options.videos,
        "sizes": dataclasses.asdict(bench.sizes),
        "environment": run_environment(),
        "detector": bench.test_detector(),
        "rows": rows,
        "claims": claims(rows),
        "measured": measured,
    }
    table = make_table(results)
    write_results(options.out, results, table)
    plot_gains(rows, options.out / "gain_against_age.png")
    print(table)
    return int(options.check and not all(claim["passed"] for claim in results["claims"]))


if __name__ == "__main__":
    sys.exit(main())
