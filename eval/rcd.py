"""Does residual context let a diffusion language model decode more tokens per step? RCD against plain denoising.

    python eval/rcd.py                       # 3 seeds
    python eval/rcd.py --seeds 0 --check
    python eval/rcd.py --seeds 0 --set base_steps=300 rcd_steps=100 seqd_steps=145

4 x 4 sudoku: puzzles with few clues, filled in with fewer steps than there are blanks, so that many cells are
committed at once. A puzzle counts as solved when all clues are kept and every row, column and box has each digit;
puzzles with few clues have many solutions. All 288 grids exist in training: held out is which clues are shown.

Per seed a base model is trained with the plain objective; then, from the base, with the same learning rate:

* `seqd`: the plain objective goes on, for at least the CPU seconds that stage 2 takes (the control);
* `rcd`: stage 2 of residual context, the reference is the base; four ablations of it are trained the same way:
  weights 1 - H / log V, 0.3 and 1 in place of H / log V, and residuals of the most probable token alone.

Rows: `base`; `seqd`; `rcd_cold`, without residuals at the first step; `rcd_warm`, which starts with one forward of the
base that is counted as a step; `inject`, the base given residuals without stage 2. Equal numbers of forwards are
compared. The temperature of the weights is chosen on other puzzles than those that are scored.

Bars, on every seed: rcd_cold at least 8 points above seqd with 3 clues at 5 steps, and with 5 clues at 3 steps; inject
at least 10 points below seqd at both. Two gates: the base solves 95 % of the puzzles with 3 clues at one cell per
step, and seqd had no less CPU time than rcd. Curves over confidence thresholds are reported as found: accuracy against
mean forwards, points of rcd_cold above seqd's curve, and the distance of the curves with a bootstrap interval over
puzzles.

Trained models are run folders under `--work` and every finished measurement is a file beside them, so an interrupted
benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from _benchmark import (
    WorkFolder,
    add_merge,
    add_out,
    add_seeds,
    add_sizes,
    check_sizes,
    earlier_results,
    measure_seeds,
    parse_sizes,
    report_progress,
    reports_errors,
    spread,
    write_results,
)

from vidgen.language.dllm.layouts import load_dllm
from vidgen.language.dllm.modeling import MaskedDiffusionLM
from vidgen.language.dllm.sudoku import SudokuData
from vidgen.recipes import dllm as recipes
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.device import derive_seed, set_threads

STEPS = {3: (2, 3, 4, 5, 13), 5: (2, 3, 4, 6, 11)}  # by clues; the last is one cell per step
BARS = ((3, 5), (5, 3))  # clues, steps
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)
TEMPERATURES = (0.7, 1.0, 1.5)
ABLATIONS = {
    "rcd": [],
    "inverse": ["rcd.alpha=inverse"],
    "constant 0.3": ["rcd.alpha=constant", "rcd.constant=0.3"],
    "constant 1": ["rcd.alpha=constant", "rcd.constant=1.0"],
    "top 1": ["rcd.residual_topk=1"],
}
ROWS = ("base", "seqd", "rcd_cold", "rcd_warm", "inject")
TEST, TUNING = 1, 2  # seeds of puzzles


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Budget of the benchmark.

    Attributes:
        base_steps: of the base model.
        seqd_steps: of the control; more than `rcd_steps`, whose steps take longer.
        rcd_steps: of stage 2 and of every ablation.
        batch_size: grids per step.
        hidden_size: of the models.
        num_layers: of the models.
        puzzles: scored per number of clues.
        tuning_puzzles: for the choice of the temperature.
    """

    base_steps: int = 1350
    seqd_steps: int = 1200
    rcd_steps: int = 800
    batch_size: int = 64
    hidden_size: int = 64
    num_layers: int = 2
    puzzles: int = 1000
    tuning_puzzles: int = 200

    def __post_init__(self) -> None:
        check_sizes(self)


class Bench(WorkFolder):
    """One seed: what is trained or measured already is read from its folder."""

    def __init__(self, sizes: Sizes, seed: int, work: Path) -> None:
        super().__init__(work / f"seed_{seed}", dataclasses.asdict(sizes))
        self.sizes, self.seed, self.data = sizes, seed, SudokuData(seed=derive_seed(seed, 7) % (1 << 31))

    def run(self) -> dict[str, Any]:
        """Everything about one seed."""
        sizes, source = self.sizes, f"{self.folder}/base/weights/model"
        shape = [f"model.hidden_size={sizes.hidden_size}", f"model.intermediate_size={3 * sizes.hidden_size}"]
        shape.append(f"model.num_hidden_layers={sizes.num_layers}")
        seconds = {"base": self.train("base", "tiny_base", sizes.base_steps, shape)}
        start = [f"init_from.name={source}"]
        seconds["seqd"] = self.train("seqd", "tiny_seqd", sizes.seqd_steps, start)
        start = [f"target.name={source}", f"reference.name={source}"]
        for name, changes in ABLATIONS.items():
            seconds[name] = self.train(name, "tiny_rcd", sizes.rcd_steps, [*start, *changes])
        return {"cpu_seconds": seconds, **self.stored("measured", self.measure)}

    def train(self, name: str, config: str, steps: int, changes: Sequence[str]) -> float:
        """Trains a model, if it isn't yet; CPU seconds."""
        folder = name.replace(" ", "_")

        def make() -> dict[str, float]:
            print(f"seed {self.seed}: {name}", flush=True)
            options = [
                f"sudoku.seed={self.data.seed}",
                f"train.seed={derive_seed(self.seed, name != 'base') % (1 << 31)}",
                f"train.output_dir={self.folder / folder}",
                f"train.max_steps={steps}",
                f"train.checkpoint_every={steps}",  # CPU time is that of a run in one go
                f"train.batch_size={self.sizes.batch_size}",
            ]
            recipe = recipes.train_residual_context if config == "tiny_rcd" else recipes.train_masked_diffusion
            began = time.process_time()
            recipe(f"dllm/{config}", [*options, *changes])
            return {"cpu_seconds": time.process_time() - began}

        return self.stored(f"trained_{folder}", make)["cpu_seconds"]

    def load(self, name: str) -> MaskedDiffusionLM:
        return load_dllm(self.folder / name.replace(" ", "_") / "weights" / "model", "cpu")

    # --- measuring ----------------------------------------------------------------------------------------------

    def solve(self, model: MaskedDiffusionLM, puzzles: torch.Tensor, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Which puzzles are solved, and forwards per puzzle."""
        output = model.generate(puzzles, max_new_tokens=0, **options)
        solved = self.data.solved(puzzles, output.sequences)
        return solved.numpy(), output.denoising_steps.numpy()

    def accuracy(self, model: MaskedDiffusionLM, clues: int, steps: int, **options: Any) -> float:
        """Percent of the test puzzles solved with a fixed number of steps."""
        puzzles = self.data.puzzles(self.sizes.puzzles, clues, TEST)
        fixed = {"denoising_steps": steps, "remasking": "low_confidence_static"}
        return 100 * float(self.solve(model, puzzles, **fixed, **options)[0].mean())

    def measure(self) -> dict[str, Any]:
        models = {name: self.load(name) for name in ("base", "seqd", *ABLATIONS)}
        temperature = self.choose_temperature(models["rcd"])
        cold = {**models["rcd"].generation_config.rcd, "residual_temperature": temperature}
        warm = {**cold, "init": "reference"}
        arms = {
            "base": (models["base"], {"rcd": None}),
            "seqd": (models["seqd"], {"rcd": None}),
            "rcd_cold": (models["rcd"], {"rcd": cold}),
            "rcd_warm": (models["rcd"], {"rcd": warm, "reference_model": models["base"]}),
            "inject": (models["base"], {"rcd": cold}),
        }
        grid = {}
        for name, (model, options) in arms.items():
            report_progress(f"seed {self.seed}: {name}")
            grid[name] = {
                str(clues): {
                    # The reference's forward is one of the steps.
                    str(steps): self.accuracy(model, clues, steps - (name == "rcd_warm"), **options)
                    for steps in counts
                }
                for clues, counts in STEPS.items()
            }
        ablations = {
            name: {
                f"{clues} clues, {steps} steps": self.accuracy(
                    models[name], clues, steps, rcd=models[name].generation_config.rcd
                )
                for clues, steps in BARS
            }
            for name in ABLATIONS
        }
        return {
            "temperature": temperature,
            "grid": grid,
            "ablations": ablations,
            "sweep": self.sweep({name: arms[name] for name in ("seqd", "rcd_cold")}),
        }

    def choose_temperature(self, model: MaskedDiffusionLM) -> float:
        """The temperature of the weights that solves most of the tuning puzzles."""
        scores = {}
        for temperature in TEMPERATURES:
            rcd = {**model.generation_config.rcd, "residual_temperature": temperature}
            scores[temperature] = sum(
                self.solve(
                    model,
                    self.data.puzzles(self.sizes.tuning_puzzles, clues, TUNING),
                    denoising_steps=steps,
                    remasking="low_confidence_static",
                    rcd=rcd,
                )[0].mean()
                for clues, steps in BARS
            )
        # 1 where nothing is better.
        return max(TEMPERATURES, key=lambda temperature: (scores[temperature], temperature == 1))

    def sweep(self, arms: Mapping[str, tuple[MaskedDiffusionLM, dict[str, Any]]]) -> dict[str, Any]:
        """Accuracy against mean forwards over confidence thresholds, with 3 clues."""
        puzzles = self.data.puzzles(self.sizes.puzzles, 3, TEST)
        solved, forwards = {}, {}
        for name, (model, options) in arms.items():
            runs = [
                self.solve(
                    model, puzzles, remasking="low_confidence_dynamic", confidence_threshold=threshold, **options
                )
                for threshold in THRESHOLDS
            ]
            solved[name], forwards[name] = (np.stack(column).astype(float) for column in zip(*runs, strict=True))
        curves = {
            name: {"accuracy": (100 * solved[name].mean(1)).tolist(), "forwards": forwards[name].mean(1).tolist()}
            for name in arms
        }
        reached = np.interp(curves["rcd_cold"]["forwards"], curves["seqd"]["forwards"], curves["seqd"]["accuracy"])
        above = int((np.array(curves["rcd_cold"]["accuracy"]) > reached).sum())
        random = np.random.default_rng(derive_seed(self.seed, 9))
        areas = []
        for _ in range(1000):
            rows = random.integers(0, len(puzzles), len(puzzles))
            drawn = ({name: values[name][:, rows].mean(1) for name in arms} for values in (solved, forwards))
            areas.append(_area(*drawn))
        area = _area(*({name: values[name].mean(1) for name in arms} for values in (solved, forwards)))
        found = {"curves": curves, "points_above": above, "area": None, "area_interval": None}
        if np.isfinite([area, *areas]).all():
            found |= {"area": 100 * area, "area_interval": (100 * np.percentile(areas, [2.5, 97.5])).tolist()}
        return found


def _area(accuracy: Mapping[str, np.ndarray], forwards: Mapping[str, np.ndarray]) -> float:
    """Mean difference rcd_cold - seqd of two curves where both have points; NaN where that is nowhere."""
    low = max(forwards[name].min() for name in forwards)
    high = min(forwards[name].max() for name in forwards)
    if low >= high:
        return float("nan")
    grid = np.linspace(low, high, 50)
    curves = {name: np.interp(grid, forwards[name], accuracy[name]) for name in forwards}
    return float((curves["rcd_cold"] - curves["seqd"]).mean())


# --- report ------------------------------------------------------------------------------------------------------


def claims(runs: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The gates and bars; every seed has to reach them."""

    def gain(name: str, clues: int, steps: int) -> dict[str, float]:
        return {
            str(seed): run["grid"][name][str(clues)][str(steps)] - run["grid"]["seqd"][str(clues)][str(steps)]
            for seed, run in runs.items()
        }

    full = {str(seed): run["grid"]["base"]["3"][str(STEPS[3][-1])] for seed, run in runs.items()}
    ratio = {str(seed): run["cpu_seconds"]["seqd"] / run["cpu_seconds"]["rcd"] for seed, run in runs.items()}
    claimed = [
        ("gate: base, 3 clues, one cell per step, %", full, ">=", 95.0),
        ("gate: CPU time of seqd / rcd", ratio, ">=", 1.0),
    ]
    for clues, steps in BARS:
        claimed.append((f"{clues} clues, {steps} steps: rcd_cold - seqd", gain("rcd_cold", clues, steps), ">=", 8.0))
    for clues, steps in BARS:
        claimed.append((f"{clues} clues, {steps} steps: inject - seqd", gain("inject", clues, steps), "<=", -10.0))
    results = []
    for name, values, relation, bar in claimed:
        worst = min(values.values()) if relation == ">=" else max(values.values())
        passed = worst >= bar if relation == ">=" else worst <= bar
        results.append({"claim": name, "by_seed": values, "relation": relation, "bar": bar, "passed": bool(passed)})
    return results


def make_table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    runs = list(results["seeds"].values())
    sizes = results["sizes"]
    lines = [
        f"Percent of {sizes['puzzles']} puzzles solved; seeds {', '.join(results['seeds'])}, mean (range) over seeds. "
        "One block of 16 tokens; forwards of the reference are counted as steps.",
    ]
    for clues, counts in STEPS.items():
        lines += ["", f"| {clues} clues, steps: | " + " | ".join(map(str, counts)) + " |"]
        lines.append("|---" * (len(counts) + 1) + "|")
        for name in ROWS:
            cells = [spread([run["grid"][name][str(clues)][str(steps)] for run in runs], 1) for steps in counts]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    columns = list(runs[0]["ablations"]["rcd"])
    lines += ["", "| weights, trained with each | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in ABLATIONS:
        cells = [spread([run["ablations"][name][column] for run in runs], 1) for column in columns]
        lines.append(f"| {'entropy' if name == 'rcd' else name} | " + " | ".join(cells) + " |")
    lines += ["", "| 3 clues, threshold: | " + " | ".join(map(str, THRESHOLDS)) + " |"]
    lines.append("|---" * (len(THRESHOLDS) + 1) + "|")
    for name in ("seqd", "rcd_cold"):
        cells = []
        for index in range(len(THRESHOLDS)):
            accuracy, forwards = (
                np.mean([run["sweep"]["curves"][name][key][index] for run in runs]) for key in ("accuracy", "forwards")
            )
            cells.append(f"{accuracy:.1f} @ {forwards:.1f}")
        lines.append(f"| {name}, percent @ forwards | " + " | ".join(cells) + " |")
    lines += ["", "| | by seed |", "|---|---|"]
    for name, show in (
        ("points of rcd_cold above seqd's curve, of 8", lambda run: str(run["sweep"]["points_above"])),
        (
            "mean distance of the curves, points, 95 % interval",
            lambda run: (
                "nowhere both"
                if run["sweep"]["area"] is None
                else "{:.1f} ({:.1f} to {:.1f})".format(run["sweep"]["area"], *run["sweep"]["area_interval"])
            ),
        ),
        ("temperature of the weights", lambda run: str(run["temperature"])),
        (
            "CPU seconds of base, seqd, rcd",
            lambda run: ", ".join(f"{run['cpu_seconds'][part]:.0f}" for part in ("base", "seqd", "rcd")),
        ),
    ):
        lines.append(f"| {name} | " + "; ".join(map(show, runs)) + " |")
    lines += ["", "| bar, on every seed | mean (range) | bar | |", "|---|---|---|---|"]
    for claim in results["claims"]:
        verdict, digits = "pass" if claim["passed"] else "FAIL", 2 if "CPU" in claim["claim"] else 1
        value = spread(list(claim["by_seed"].values()), digits)
        lines.append(f"| {claim['claim']} | {value} | {claim['relation']} {claim['bar']:g} | {verdict} |")
    return "\n".join(lines) + "\n"


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Accuracy against steps: fixed numbers of them, and by confidence."""
    runs = list(results["seeds"].values())
    figure, panels = plt.subplots(1, 3, figsize=(13, 4), sharey=True, layout="constrained")
    for axes, (clues, counts) in zip(panels, STEPS.items(), strict=False):
        for name in ROWS:
            values = np.array([[run["grid"][name][str(clues)][str(steps)] for steps in counts] for run in runs])
            axes.plot(counts, values.mean(0), marker="o", label=name)
            axes.fill_between(counts, values.min(0), values.max(0), alpha=0.15)
        axes.set(title=f"{clues} clues, fixed steps", xlabel="forwards")
    for name, color in (("seqd", "tab:orange"), ("rcd_cold", "tab:green")):
        for run in runs:
            curve = run["sweep"]["curves"][name]
            panels[2].plot(curve["forwards"], curve["accuracy"], marker=".", color=color)
    panels[2].set(title="3 clues, by confidence", xlabel="mean forwards")
    panels[0].set(ylabel="solved, %", ylim=(0, 102))
    panels[0].legend()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what isn't measured yet; write results.json, table.md and curves.png; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_seeds(parser)
    add_sizes(parser, Sizes)
    parser.add_argument("--work", type=Path, default=Path("runs/eval/rcd"), help="folder of the trained models")
    add_out(parser, "rcd")
    add_merge(parser)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    options = parser.parse_args(arguments)
    set_threads()
    sizes = parse_sizes(Sizes, options.set)
    settings = dataclasses.asdict(sizes)
    earlier = earlier_results(options, settings).get("seeds", {})
    runs = measure_seeds(options.seeds, lambda seed: Bench(sizes, seed, options.work).run(), earlier)
    results = {
        "benchmark": "rcd",
        "sizes": settings,
        "seeds": {str(seed): run for seed, run in runs.items()},
        "claims": claims(runs),
    }
    table = make_table(results)
    write_results(options.out, results, table)
    plot(results, options.out / "curves.png")
    print(table)
    return int(options.check and not all(claim["passed"] for claim in results["claims"]))


if __name__ == "__main__":
    sys.exit(main())
