"""Does a world model that is walked through its world keep showing what is there?

    python eval/world_walks.py --episodes runs/doom/episodes                       # the embedded level of Doom
    python eval/world_walks.py --episodes runs/doom/episodes --models LIVE=runs/doom/model

Walks of the test split, which no model has seen, are continued from their first frames by their cameras or motion, and
every generated frame is compared with the recorded one. Arms get the same walks, and the same noise per walk:

* every model with the exact cache, the first one also with the rolling cache, and every baseline that lies in a
  model's folder;
* `nearest`: the training frame that was seen from the nearest pose, a table of the world in place of a model (a turn
  of 1 radian counts like `--set turn_weight` steps);
* `still`: the last real frame, held;
* `autoencoder`: the recorded frame through the autoencoder, the best that a model of its latents can do.

Reported by horizon: PSNR against the recorded frame, and sharpness, the mean gradient of the picture divided by the
recorded one's, which falls when a model answers with a blur. A seed draws its own walks and noise; tables show the
mean over seeds and their range.

Bars, for the first model with the exact cache, on every seed: over the last quarter of the walk its PSNR is at most
1 dB below that of the first quarter (it does not melt), and 3 dB above `still`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from _benchmark import (
    WorkFolder,
    add_out,
    add_seeds,
    add_sizes,
    check_sizes,
    parse_sizes,
    report_progress,
    reports_errors,
    spread,
    write_results,
)

from vidgen.controls import PoseControls
from vidgen.data import EpisodeDataset
from vidgen.data.episodes import PLANAR_POSE
from vidgen.models.frame_autoencoder import decode_frames, encode_frames
from vidgen.pipelines import WorldModelPipeline
from vidgen.runtime.assets import DEFAULT_WORLD_MODEL, find_asset
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.device import select_device, set_threads
from vidgen.runtime.errors import ConfigError
from vidgen.runtime.meter import run_environment

QUARTERS = ("first quarter", "second", "third", "last quarter")
MAX_LOSS_DB, MIN_GAIN_DB = 1.0, 3.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is walked.

    Attributes:
        walks: per seed.
        frames: generated in each.
        prompt_frames: real ones before.
        turn_weight: steps that a turn of 1 radian counts in the distance between poses.
    """

    walks: int = 4
    frames: int = 232
    prompt_frames: int = 7
    turn_weight: float = 10.0

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.frames < len(QUARTERS):
            raise ConfigError(f"frames={self.frames}; at least {len(QUARTERS)}, one per quarter.")


@dataclasses.dataclass(frozen=True)
class Walks:
    """Recorded walks: frames uint8 `(walks, frames, height, width, 3)`, and the episodes they come from."""

    frames: np.ndarray
    places: list[int]
    frame_ids: np.ndarray

    def controls(self, episodes: EpisodeDataset) -> torch.Tensor:
        """`(walks, frames, columns)`."""
        return torch.stack([episodes.controls(place, self.frame_ids) for place in self.places])

    def poses(self, episodes: EpisodeDataset) -> np.ndarray:
        """`(walks, frames, numbers of a pose)`."""
        return np.stack([episodes.poses(place, self.frame_ids) for place in self.places])


def draw_walks(episodes: EpisodeDataset, sizes: Sizes, seed: int) -> Walks:
    """Beginnings of test episodes that are long enough.

    Raises:
        ConfigError: there are fewer than `sizes.walks`.
    """
    length = sizes.prompt_frames + sizes.frames
    enough = [place for place, record in enumerate(episodes.episodes) if record.length >= length]
    if len(enough) < sizes.walks:
        raise ConfigError(
            f"{episodes.root} has {len(enough)} test episodes of {length} frames or more, and {sizes.walks} walks are "
            "wanted; record more, or --set walks=… frames=…"
        )
    places = sorted(np.random.default_rng(seed).choice(enough, sizes.walks, replace=False).tolist())
    frame_ids = np.arange(length)
    return Walks(np.stack([episodes.frames(place, frame_ids) for place in places]), places, frame_ids)


def generate(
    pipe: WorldModelPipeline, walks: Walks, controls: torch.Tensor, cache: str, sizes: Sizes, seed: int, name: str
) -> np.ndarray:
    """Frames uint8 `(walks, frames, height, width, 3)` that a model makes of the walks."""
    prompt = sizes.prompt_frames
    session = pipe.open_session(walks.frames[:, :prompt], controls[:, :prompt], cache=cache, seed=1000 * seed)
    made = []
    for frame in range(sizes.frames):
        report_progress(f"seed {seed}: {name}, frame {frame + 1} of {sizes.frames}")
        made.append(session.step(controls[:, prompt + frame]))
    return np.stack(made, axis=1)


def nearest_frames(train: EpisodeDataset, poses: np.ndarray, sizes: Sizes, step: float) -> np.ndarray:
    """For each pose `(walks, frames, 3)` the training frame that was seen from the nearest one."""

    def features(poses: np.ndarray) -> np.ndarray:
        heading = sizes.turn_weight * np.stack([np.cos(poses[..., 2]), np.sin(poses[..., 2])], axis=-1)
        return np.concatenate([poses[..., :2] / step, heading], axis=-1)

    known = [features(train.poses(place)) for place in range(len(train.episodes))]
    owner = np.repeat(np.arange(len(known)), [len(rows) for rows in known])
    first = np.cumsum([0, *(len(rows) for rows in known[:-1])])
    known = np.concatenate(known)
    found = []
    for walk in features(poses):
        rows = [int(((known - feature) ** 2).sum(-1).argmin()) for feature in walk]
        found.append(np.stack([train.frames(owner[row], [row - first[owner[row]]])[0] for row in rows]))
    return np.stack(found)


def score(made: np.ndarray, true: np.ndarray) -> dict[str, list[float]]:
    """PSNR (dB) and sharpness per quarter of the walk, means over walks."""
    made, true = made.astype(np.float32), true.astype(np.float32)
    error = ((made - true) ** 2).mean(axis=(2, 3, 4))
    psnr = 10 * np.log10(255**2 / np.maximum(error, 0.1))
    edges = [
        sum(np.abs(np.diff(frames, axis=axis)).mean(axis=(2, 3, 4)) for axis in (2, 3)) for frames in (made, true)
    ]
    return {
        "psnr": [float(part.mean()) for part in np.array_split(psnr, len(QUARTERS), axis=1)],
        "sharpness": [
            float(a.mean() / b.mean())
            for a, b in zip(*(np.array_split(edge, len(QUARTERS), axis=1) for edge in edges), strict=True)
        ],
    }


def measure(
    pipes: dict[str, WorldModelPipeline], root: str, sizes: Sizes, seed: int, work: WorkFolder
) -> dict[str, dict[str, list[float]]]:
    """All arms of one seed; those that were measured already are read from the work folder."""
    kinds = {
        name: "cameras" if isinstance(pipe.control_encoder.controls, PoseControls) else "actions"
        for name, pipe in pipes.items()
    }
    test = {
        kind: EpisodeDataset(root, "test", 1, controls=kind, in_memory=False) for kind in {"actions", *kinds.values()}
    }
    walks = draw_walks(test["actions"], sizes, seed)
    true, arms = walks.frames[:, sizes.prompt_frames :], {}

    def arm(name: str, make: Any) -> None:
        arms[name] = work.stored(f"seed_{seed}_{name.replace(' ', '_')}", lambda: score(make(), true))

    for number, (name, pipe) in enumerate(pipes.items()):
        controls = walks.controls(test[kinds[name]])
        caches = ["frame"]
        if number == 0 and pipe.transformer.config.control_frame != "window":
            caches.append("rolling")
        for cache in caches:
            label = name if cache == "frame" else f"{name}, {cache}"
            arm(
                label,
                lambda pipe=pipe, controls=controls, cache=cache, label=label: generate(
                    pipe, walks, controls, cache, sizes, seed, label
                ),
            )
    if test["actions"].info.pose_names == PLANAR_POSE:
        train = EpisodeDataset(root, "train", 1, in_memory=False)
        motion = max(abs(value) for values in train.action_spec.choices.values() for value in values.values())
        poses = walks.poses(test["actions"])[:, sizes.prompt_frames :]
        arm("nearest", lambda: nearest_frames(train, poses, sizes, motion))
    arm("still", lambda: np.broadcast_to(walks.frames[:, sizes.prompt_frames - 1 : sizes.prompt_frames], true.shape))
    vae = next(iter(pipes.values())).vae
    arm("autoencoder", lambda: _through(vae, true))
    return arms


@torch.no_grad()
def _through(vae: Any, frames: np.ndarray) -> np.ndarray:
    made = [decode_frames(vae, encode_frames(vae, torch.from_numpy(walk)[None]))[0] for walk in frames]
    return torch.stack(made).numpy()


def check(results: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """The bars, with the worst seed's value."""
    seeds = results["seeds"].values()
    kept = [arms[model]["psnr"][-1] - arms[model]["psnr"][0] for arms in seeds]
    gain = [arms[model]["psnr"][-1] - arms["still"]["psnr"][-1] for arms in seeds]
    return [
        {
            "claim": f"PSNR, last quarter - first >= -{MAX_LOSS_DB:g} dB",
            "value": min(kept),
            "passed": min(kept) >= -MAX_LOSS_DB,
        },
        {
            "claim": f"PSNR, last quarter, above still >= {MIN_GAIN_DB:g} dB",
            "value": min(gain),
            "passed": min(gain) >= MIN_GAIN_DB,
        },
    ]


def make_table(results: dict[str, Any]) -> str:
    """Mean and range over seeds, by quarter of the walk."""
    seeds = list(results["seeds"].values())
    lines = [
        "| arm | " + " | ".join(f"PSNR, {quarter}" for quarter in QUARTERS) + " | sharpness, last quarter |",
        "|---" * (2 + len(QUARTERS)) + "|",
    ]
    for name in seeds[0]:
        columns = list(zip(*(arms[name]["psnr"] for arms in seeds), strict=True))
        sharp = [arms[name]["sharpness"][-1] for arms in seeds]
        cells = [*(spread(values, 1) for values in columns), spread(sharp, 2)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| bar | worst seed | |", "|---|---|---|"]
    for claim in results["claims"]:
        lines.append(f"| {claim['claim']} | {claim['value']:.2f} | {'pass' if claim['passed'] else 'FAIL'} |")
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """PSNR by quarter, one line per arm."""
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    seeds = list(results["seeds"].values())
    for name in seeds[0]:
        rows = np.array([arms[name]["psnr"] for arms in seeds])
        axes.plot(QUARTERS, rows.mean(0), marker="o", label=name)
        axes.fill_between(QUARTERS, rows.min(0), rows.max(0), alpha=0.15)
    axes.set(ylabel="PSNR, dB")
    axes.legend(fontsize=7)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; write results.json, table.md and psnr.png; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", required=True, help="data set with a test split of the models' world")
    parser.add_argument(
        "--models", nargs="+", default=[], metavar="NAME=FOLDER", help="world models; default the embedded one"
    )
    add_out(parser, "world_walks")
    parser.add_argument("--work", type=Path, default=Path("runs/eval/world_walks"), help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    add_seeds(parser)
    add_sizes(parser, Sizes)
    options = parser.parse_args(arguments)
    sizes = parse_sizes(Sizes, options.set)
    folders = dict(item.partition("=")[::2] for item in options.models)
    if not all(folders.values()) or len(folders) < len(options.models):
        parser.error("--models: NAME=FOLDER, every name once")
    folders = folders or {"model": str(find_asset(DEFAULT_WORLD_MODEL))}

    device, threads = select_device(), set_threads()
    pipes = {name: WorldModelPipeline.from_pretrained(folder).to(device) for name, folder in folders.items()}
    for name, folder in folders.items():
        for objective, pipe in pipes[name].baselines(folder).items():
            prefix = "" if len(folders) == 1 else f"{name}: "
            pipes[prefix + objective.replace("_", " ")] = pipe.to(device)
    work = WorkFolder(options.work, {**dataclasses.asdict(sizes), "models": folders, "episodes": options.episodes})
    results: dict[str, Any] = {
        "benchmark": "world_walks",
        "models": {name: Path(folder).name for name, folder in folders.items()},
        "sizes": dataclasses.asdict(sizes),
        "device": str(device),
        "threads": threads,
        "environment": run_environment(),
        "seeds": {str(seed): measure(pipes, options.episodes, sizes, seed, work) for seed in options.seeds},
    }
    report_progress("")
    results["claims"] = check(results, next(iter(pipes)))
    table = make_table(results)
    write_results(options.out, results, table)
    plot(results, options.out / "psnr.png")
    print(table)
    return int(options.check and not all(claim["passed"] for claim in results["claims"]))


if __name__ == "__main__":
    sys.exit(main())
