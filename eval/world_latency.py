"""How fast a world is played: frames per second and milliseconds per stage of every way to keep context.

    python eval/world_latency.py                           # the embedded world model
    python eval/world_latency.py --model FOLDER --check

The same keys are played from the same start with each cache: `none` computes the context anew in every denoising
step, `frame` once per new frame (the same frames as `none`), `rolling` once per frame ever. Arms take turns within a
round, so that a busy machine slows all of them; a round's ratios are taken within it. The first frames of an arm fill
the window and are not timed: what is measured is play that goes on.

Bars: `frame` plays at 8 frames/s or more, and is faster than `none`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from _benchmark import add_out, report_progress, reports_errors, write_results

from vidgen.pipelines import WorldModelPipeline, load_starts
from vidgen.runtime.assets import DEFAULT_WORLD_MODEL, find_asset
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.device import select_device, set_threads
from vidgen.runtime.meter import run_environment

CACHES = ("none", "frame", "rolling")
STAGES = ("context", "denoise", "decode")
MIN_RATE = 8.0


def caches_of(pipe: WorldModelPipeline) -> tuple[str, ...]:
    """Keys that stay need controls that don't depend on where the window begins."""
    return CACHES[:2] if pipe.transformer.config.control_frame == "window" else CACHES


def play(pipe: WorldModelPipeline, start: tuple[np.ndarray, torch.Tensor], cache: str, frames: int, seed: int) -> Any:
    """One arm of one round: frames/s, and milliseconds per stage."""
    session = pipe.open_session(*start, cache=cache, seed=seed)
    names = list(pipe.control_encoder.actions.choices)
    keys = np.random.default_rng(seed).integers(len(names), size=pipe.transformer.config.window + frames)
    for key in keys[: pipe.transformer.config.window]:
        session.step([names[key]])
    totals, began = dict.fromkeys(STAGES, 0.0), time.perf_counter()
    for key in keys[pipe.transformer.config.window :]:
        session.step([names[key]])
        for stage in STAGES:
            totals[stage] += session.stats[stage]["last"]
    rate = frames / (time.perf_counter() - began)
    return {"frames_per_second": rate, "ms": {stage: total / frames for stage, total in totals.items()}}


def spread(values: Sequence[float], digits: int = 1) -> str:
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def make_table(results: dict[str, Any]) -> str:
    """The results as Markdown: medians and ranges over rounds."""
    lines = ["| cache | frames/s | × none | " + " | ".join(f"{stage}, ms" for stage in STAGES) + " |"]
    lines.append("|---" * (3 + len(STAGES)) + "|")
    for cache, rounds in results["rounds"].items():
        ratios = [
            row["frames_per_second"] / none["frames_per_second"]
            for row, none in zip(rounds, results["rounds"]["none"], strict=True)
        ]
        cells = [spread([row["ms"][stage] for row in rounds]) for stage in STAGES]
        rate = spread([row["frames_per_second"] for row in rounds])
        lines.append(f"| {cache} | {rate} | {spread(ratios, 2)} | " + " | ".join(cells) + " |")
    lines += ["", "| bar | median | |", "|---|---|---|"]
    for claim in results["claims"]:
        lines.append(f"| {claim['claim']} | {claim['value']:.2f} | {'pass' if claim['passed'] else 'FAIL'} |")
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """Milliseconds of a frame by stage, one bar per cache."""
    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    left = np.zeros(len(results["rounds"]))
    for stage in STAGES:
        widths = [statistics.median(row["ms"][stage] for row in rounds) for rounds in results["rounds"].values()]
        axes.barh(list(results["rounds"]), widths, left=left, label=stage)
        left += widths
    axes.axvline(1000 / MIN_RATE, color="black", linewidth=0.8, linestyle="--", label=f"{MIN_RATE:g} frames/s")
    axes.set(xlabel="milliseconds per frame")
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; write results.json, table.md and stages.png; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a world model with starts; default the embedded one")
    add_out(parser, "world_latency")
    parser.add_argument("--frames", type=int, default=48, help="timed frames of an arm and round; default 48")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    options = parser.parse_args(arguments)
    if options.frames < 1 or options.rounds < 1:
        parser.error(f"--frames {options.frames} --rounds {options.rounds}: both must be at least 1")

    folder = options.model or find_asset(DEFAULT_WORLD_MODEL)
    start = load_starts(folder, 0)
    device, threads = select_device(), set_threads()
    pipe = WorldModelPipeline.from_pretrained(folder).to(device)
    rounds: dict[str, list[Any]] = {cache: [] for cache in caches_of(pipe)}
    for number in range(options.rounds):
        for cache, measured in rounds.items():
            report_progress(f"round {number + 1} of {options.rounds}: {cache}")
            measured.append(play(pipe, start, cache, options.frames, number))
    report_progress("")

    rates = {cache: statistics.median(row["frames_per_second"] for row in rows) for cache, rows in rounds.items()}
    claims = [
        {
            "claim": f"frames/s with frame >= {MIN_RATE:g}",
            "value": rates["frame"],
            "passed": rates["frame"] >= MIN_RATE,
        },
        {
            "claim": "frames/s, frame / none > 1",
            "value": rates["frame"] / rates["none"],
            "passed": rates["frame"] > rates["none"],
        },
    ]
    results = {
        "benchmark": "world_latency",
        "model": Path(folder).name,
        "frames": options.frames,
        "num_inference_steps": pipe.config.num_inference_steps,
        "window": pipe.transformer.config.window,
        "device": str(device),
        "threads": threads,
        "environment": run_environment(),
        "rounds": rounds,
        "claims": claims,
    }
    table = make_table(results)
    write_results(options.out, results, table)
    plot(results, options.out / "stages.png")
    print(table)
    return int(options.check and not all(claim["passed"] for claim in claims))


if __name__ == "__main__":
    sys.exit(main())
