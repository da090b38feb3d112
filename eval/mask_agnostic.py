"""Do masks behind a question distract a diffusion language model, and does the mask-agnostic loss cure it?

    python eval/mask_agnostic.py                       # 3 seeds
    python eval/mask_agnostic.py --seeds 0 --check
    python eval/mask_agnostic.py --seeds 0 --set base_steps=300 tune_steps=100 items=200

Topics: words of a text hint at its topic, and `? label` names it (`vidgen.language.dllm.topics`). A question is a text
of `words` words, `?` and a mask; the model reads the label after one forward, with 0 to 64 more masks behind it.

Per seed a base model is trained on whole texts with the plain objective. From it, on texts as prompts and the label
with six more words as answers, with the same steps, data, seed and learning rate:

* `ce`: cross-entropy with random numbers of masks behind the answer (beta = 0), the control;
* `ma`: the mask-agnostic loss.

`ar` is a Llama of the same size and the same texts, steps and batch. Other rows are the base with something else: the
neutral token `.` in place of the extra masks; unmasking in k steps; a window of `WINDOW` masks, the rest cut off.
The position probe moves a block of keywords, and the question with its mask, through the text.

Bars. Two gates, without which the benchmark is inconclusive and `--check` fails, on the mean of the seeds: the base
answers half of the questions without extra masks (chance is 1 in 12), and with 64 of them it loses 5 points of
accuracy or gains 0.3 nats of entropy. On every seed: total variation between 0 and 64 extra
masks of `ma` at most a third of that of `ce`. On the mean of the seeds: `ma` loses at most 1 point with 64 extra
masks, and with none it is at most 1 point below the base; the neutral token costs less than half of what masks cost,
in accuracy where the base lost 5 points of it, else in entropy; 16 steps win back 80 % of the lost accuracy, undecided
where fewer than 5 points were lost.

Trained models are run folders under `--work` and every finished measurement is a file beside them, so an interrupted
benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
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
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from vidgen.language.causal_lm import CausalLMMethod
from vidgen.language.dllm.layouts import load_dllm
from vidgen.language.dllm.probes import (
    TopicInductionTask,
    answer_logits,
    gradient_attribution,
    mask_scaling_probe,
    position_probe,
    unmasking_probe,
)
from vidgen.language.dllm.topics import TopicData
from vidgen.recipes import dllm as recipes
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.config import load_config
from vidgen.runtime.device import derive_seed, set_threads
from vidgen.runtime.errors import ConfigError
from vidgen.train import fit

WINDOW, MOST = 8, 64
EXTRA = (0, WINDOW, 16, 32, MOST)
STEPS = (1, 2, 4, 8, 16)
ARMS = ("base", "ce", "ma")
PLACES = 5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Budget of the benchmark.

    Attributes:
        base_steps: of the base model and of the autoregressive one.
        tune_steps: of either fine-tuning.
        batch_size: texts per step of the base; fine-tunings take as many, in two views each.
        hidden_size: of the models.
        num_layers: of the models.
        length: tokens of a text of the base.
        topic_share: share of words that hint at the topic.
        words: of a question's text.
        beta: weight of the total variation.
        items: questions per measurement.
    """

    base_steps: int = 1200
    tune_steps: int = 300
    batch_size: int = 32
    hidden_size: int = 64
    num_layers: int = 2
    length: int = 64
    topic_share: float = 0.25
    words: int = 24
    beta: float = 100.0
    items: int = 768

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.words < 8:
            raise ConfigError(f"words={self.words}; the block of keywords that is moved needs at least 8")


class Texts:
    """The texts of the base as the method of causal models asks for them."""

    def __init__(self, data: TopicData) -> None:
        self.data = data

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.data.batch(step, rank, world_size, batch_size)["input_ids"]}


class Bench(WorkFolder):
    """One seed: what is trained or measured already is read from its folder."""

    def __init__(self, sizes: Sizes, seed: int, work: Path) -> None:
        super().__init__(work / f"seed_{seed}", dataclasses.asdict(sizes))
        self.sizes, self.seed = sizes, seed
        data_seed = derive_seed(seed, 7) % (1 << 31)
        self.data = TopicData(topic_share=sizes.topic_share, length=sizes.length, seed=data_seed)
        self.task = TopicInductionTask(self.data, sizes.words)
        self.tokenizer = self.data.tokenizer()

    def run(self) -> dict[str, Any]:
        """Everything about one seed."""
        sizes = self.sizes
        shape = [f"model.hidden_size={sizes.hidden_size}", f"model.intermediate_size={3 * sizes.hidden_size}"]
        shape.append(f"model.num_hidden_layers={sizes.num_layers}")
        topics = [f"topics.topic_share={sizes.topic_share}", f"topics.seed={self.data.seed}"]
        seconds = {}
        options = [*shape, *topics, f"topics.length={sizes.length}", *self.train_options("base", sizes.base_steps)]
        seconds["base"] = self.timed("base", lambda: recipes.train_masked_diffusion("dllm/tiny_topics", options))
        for name, beta in (("ce", 0.0), ("ma", sizes.beta)):
            tuning = [
                f"init_from.name={self.folder}/base/weights/model",
                f"mask_agnostic.beta={beta}",
                f"mask_agnostic.max_extra_masks={MOST}",
                f"topics.length={sizes.words + 16}",
                f"topics.topic_share={sizes.topic_share}",
                f"topics.seed={self.data.seed + 1}",  # the same texts for both
                *self.train_options(name, sizes.tune_steps),
            ]
            seconds[name] = self.timed(
                name, lambda options=tuning: recipes.train_mask_agnostic("dllm/mask_agnostic_tiny", options)
            )
        seconds["ar"] = self.timed("ar", lambda: self.train_causal(options))
        return {"cpu_seconds": seconds, **self.stored("measured", self.measure)}

    def train_options(self, name: str, steps: int) -> list[str]:
        """The same for every training; fine-tunings share one seed."""
        return [
            f"train.output_dir={self.folder / name}",
            f"train.max_steps={steps}",
            f"train.checkpoint_every={steps}",  # CPU time is that of a run in one go
            f"train.batch_size={self.sizes.batch_size}",
            f"train.seed={derive_seed(self.seed, name != 'base') % (1 << 31)}",
        ]

    def timed(self, name: str, train: Any) -> float:
        """Trains a model, if it isn't yet; CPU seconds."""

        def make() -> dict[str, float]:
            print(f"seed {self.seed}: {name}", flush=True)
            began = time.process_time()
            train()
            return {"cpu_seconds": time.process_time() - began}

        return self.stored(f"trained_{name}", make)["cpu_seconds"]

    def train_causal(self, options: Sequence[str]) -> None:
        """A Llama with the settings of the base; rotary positions, norms and MLPs are the same."""
        recipe = load_config(recipes.MaskedDiffusionRecipe, "dllm/tiny_topics", options)
        torch.manual_seed(recipe.train.seed)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=self.data.vocab_size, **recipe.model))
        nothing = torch.zeros(0, dtype=torch.long)
        method = CausalLMMethod(model, self.tokenizer, nothing, nothing, recipe.train.batch_size)
        train = dataclasses.replace(recipe.train, output_dir=str(self.folder / "ar"))
        fit(method, Texts(self.data), train)

    # --- measuring ----------------------------------------------------------------------------------------------

    def measure(self) -> dict[str, Any]:
        sizes, seed = self.sizes, derive_seed(self.seed, 9) % (1 << 31)
        models: dict[str, Any] = {
            name: load_dllm(self.folder / name / "weights" / "model", "cpu", "float32") for name in ARMS
        }
        models["ar"] = LlamaForCausalLM.from_pretrained(self.folder / "ar" / "weights" / "model").eval()
        probes = self.task.items(self.tokenizer, sizes.items, seed)
        block = dataclasses.replace(self.task, block_words=sizes.words // 4)
        found: dict[str, Any] = {"masks": {}, "steps": {}, "attribution": {}, "position": {}}
        for name in ARMS:
            report_progress(f"seed {self.seed}: {name}")
            found["masks"][name] = mask_scaling_probe(models[name], probes, EXTRA, batch_size=64)
            found["steps"][name] = unmasking_probe(models[name], probes, MOST, STEPS, batch_size=64)
            found["attribution"][name] = gradient_attribution(models[name], probes, MOST, batch_size=64)
        found["filler"] = mask_scaling_probe(models["base"], probes, EXTRA, "dot", batch_size=64)
        predicted = answer_logits(models["ar"], probes, batch_size=64).argmax(-1)
        found["ar"] = float((predicted == probes.answers).double().mean())
        for name in ("base", "ma", "ar"):
            for move in ("block", "query") if name != "ar" else ("block",):
                rows = position_probe(
                    models[name], block, self.tokenizer, move, PLACES, sizes.items // 2, seed, batch_size=64
                )
                found["position"][f"{name}, {move}"] = [row["accuracy"] for row in rows]
        return found


# --- report ------------------------------------------------------------------------------------------------------


def row_of(probe: Mapping[str, Any], extra: int) -> Mapping[str, Any]:
    """The row of a number of extra tokens."""
    return next(row for row in probe["rows"] if row["extra_masks"] == extra)


def lost(probe: Mapping[str, Any]) -> dict[str, float]:
    """What 64 extra tokens cost: points of accuracy lost, nats of entropy gained."""
    none, most = row_of(probe, 0), row_of(probe, MOST)
    return {
        "accuracy": 100 * (none["accuracy"] - most["accuracy"]),
        "entropy": most["entropy"] - none["entropy"],
    }


def claims(runs: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The gate and the bars; `passed` is None where one is undecided."""
    seeds = {str(seed): run for seed, run in runs.items()}

    def mean(values: Mapping[str, float]) -> float:
        return statistics.mean(values.values())

    base = {
        part: {seed: lost(run["masks"]["base"])[part] for seed, run in seeds.items()}
        for part in ("accuracy", "entropy")
    }
    filler = {
        part: {seed: lost(run["filler"])[part] for seed, run in seeds.items()} for part in ("accuracy", "entropy")
    }
    points, nats = mean(base["accuracy"]), mean(base["entropy"])
    learned = {seed: 100 * row_of(run["masks"]["base"], 0)["accuracy"] for seed, run in seeds.items()}
    gates = [
        {
            "claim": "gate: accuracy of the base without extra masks",
            "by_seed": learned,
            "bar": ">= 50, mean",
            "passed": mean(learned) >= 50,
        },
        {
            "claim": "gate: points the base loses to 64 masks; or nats gained, in brackets",
            "by_seed": base["accuracy"],
            "nats_by_seed": base["entropy"],
            "bar": ">= 5 [0.3], mean",
            "passed": points >= 5 or nats >= 0.3,
        },
    ]
    ratio = {
        seed: row_of(run["masks"]["ma"], MOST)["tv"] / max(row_of(run["masks"]["ce"], MOST)["tv"], 1e-12)
        for seed, run in seeds.items()
    }
    drop = {seed: lost(run["masks"]["ma"])["accuracy"] for seed, run in seeds.items()}
    kept = {
        seed: 100 * (row_of(run["masks"]["ma"], 0)["accuracy"] - row_of(run["masks"]["base"], 0)["accuracy"])
        for seed, run in seeds.items()
    }
    part = "accuracy" if points >= 5 else "entropy"
    share = mean(filler[part]) / max(mean(base[part]), 1e-12)
    shares = {seed: filler[part][seed] / max(base[part][seed], 1e-12) for seed in seeds}
    won = {
        seed: 100 * next(row for row in run["steps"]["base"] if row["steps"] == STEPS[-1])["accuracy"]
        - 100 * row_of(run["masks"]["base"], MOST)["accuracy"]
        for seed, run in seeds.items()
    }
    return [
        *gates,
        {
            "claim": "total variation 0 to 64 masks, ma / ce",
            "by_seed": ratio,
            "bar": "<= 1/3, every seed",
            "passed": max(ratio.values()) <= 1 / 3,
        },
        {"claim": "points ma loses to 64 masks", "by_seed": drop, "bar": "<= 1, mean", "passed": mean(drop) <= 1},
        {
            "claim": "accuracy without extra masks, ma - base",
            "by_seed": kept,
            "bar": ">= -1, mean",
            "passed": mean(kept) >= -1,
        },
        {
            "claim": f"{part} that `.` costs the base, as a share of what masks cost",
            "by_seed": shares,
            "bar": "< 0.5, of the means",
            "passed": share < 0.5 if gates[1]["passed"] else None,
        },
        {
            "claim": f"points that {STEPS[-1]} steps win back",
            "by_seed": won,
            "bar": ">= 80 % of the loss, mean",
            "passed": mean(won) >= 0.8 * points if points >= 5 else None,
        },
    ]


def verdict(results: Sequence[Mapping[str, Any]]) -> str:
    """`inconclusive` where a gate is closed, else whether all decided bars are reached."""
    if not all(claim["passed"] for claim in results if claim["claim"].startswith("gate")):
        return "inconclusive"
    return "pass" if all(claim["passed"] is not False for claim in results) else "FAIL"


def make_table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    runs = list(results["seeds"].values())
    sizes = results["sizes"]

    def cell(values: Sequence[float], digits: int = 1, scale: float = 100) -> str:
        return spread([scale * value for value in values], digits)

    lines = [
        f"**{results['verdict']}**. Percent of {sizes['items']} questions; seeds {', '.join(results['seeds'])}"
        ", mean (range) over seeds. gen_length = block_length = extra masks + 1.",
    ]
    for title, key, digits, scale in (
        ("accuracy, 1 step, extra masks:", "accuracy", 1, 100),
        ("entropy, nats", "entropy", 2, 1),
        ("total variation to no extra masks", "tv", 3, 1),
    ):
        lines += ["", f"| {title} | " + " | ".join(map(str, EXTRA)) + " |", "|---" * (len(EXTRA) + 1) + "|"]
        rows = {name: [run["masks"][name] for run in runs] for name in ARMS}
        rows["base, `.` in place of masks"] = [run["filler"] for run in runs]
        for name, probes in rows.items():
            cells = [cell([row_of(probe, extra)[key] for probe in probes], digits, scale) for extra in EXTRA]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        if key == "accuracy":
            cells = [cell([row_of(run["masks"]["base"], min(extra, WINDOW))[key] for run in runs]) for extra in EXTRA]
            lines.append(f"| base, window of {WINDOW} masks | " + " | ".join(cells) + " |")
            lines.append(f"| ar | {cell([run['ar'] for run in runs])} |" + " – |" * (len(EXTRA) - 1))
    lines += ["", f"| accuracy, {MOST} extra masks, steps: | " + " | ".join(map(str, STEPS)) + " |"]
    lines.append("|---" * (len(STEPS) + 1) + "|")
    for name in ARMS:
        cells = [cell([run["steps"][name][index]["accuracy"] for run in runs]) for index in range(len(STEPS))]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    places = [f"{index / (PLACES - 1):g}" for index in range(PLACES)]
    lines += ["", "| accuracy, place of what is moved: | " + " | ".join(places) + " |", "|---" * (PLACES + 1) + "|"]
    for name in runs[0]["position"]:
        cells = [cell([run["position"][name][index] for run in runs]) for index in range(PLACES)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", f"| gradient, {MOST} extra masks | a mask | a token of the text |", "|---|---|---|"]
    for name in ARMS:
        cells = [cell([run["attribution"][name][part] for run in runs], 4, 1) for part in ("mask", "text")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    seconds = ", ".join(
        f"{name} {statistics.mean(run['cpu_seconds'][name] for run in runs):.0f}" for name in (*ARMS, "ar")
    )
    lines += [
        "",
        f"CPU seconds of training, mean: {seconds}.",
        "",
        "| bar | mean (range) | bar | |",
        "|---|---|---|---|",
    ]
    for claim in results["claims"]:
        said = {True: "pass", False: "FAIL", None: "undecided"}[claim["passed"]]
        value = cell(list(claim["by_seed"].values()), 2, 1)
        if "nats_by_seed" in claim:
            value += f" [{cell(list(claim['nats_by_seed'].values()), 2, 1)}]"
        lines.append(f"| {claim['claim']} | {value} | {claim['bar']} | {said} |")
    return "\n".join(lines) + "\n"


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Accuracy and entropy against extra tokens."""
    runs = list(results["seeds"].values())
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    rows = {name: [run["masks"][name] for run in runs] for name in ARMS}
    rows["base, neutral token"] = [run["filler"] for run in runs]
    for axes, (key, scale) in zip(panels, (("accuracy", 100), ("entropy", 1)), strict=True):
        for name, probes in rows.items():
            values = torch.tensor([[scale * row_of(probe, extra)[key] for extra in EXTRA] for probe in probes])
            axes.plot(EXTRA, values.mean(0), marker="o", label=name)
            axes.fill_between(EXTRA, values.amin(0), values.amax(0), alpha=0.15)
        axes.set(xlabel="extra tokens", ylabel="accuracy, %" if key == "accuracy" else "entropy, nats")
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
    parser.add_argument("--work", type=Path, default=Path("runs/eval/mask_agnostic"), help="folder of trained models")
    add_out(parser, "mask_agnostic")
    add_merge(parser)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed or nothing was shown")
    options = parser.parse_args(arguments)
    set_threads()
    disable_progress_bar()
    sizes = parse_sizes(Sizes, options.set)
    settings = dataclasses.asdict(sizes)
    earlier = earlier_results(options, settings).get("seeds", {})
    runs = measure_seeds(options.seeds, lambda seed: Bench(sizes, seed, options.work).run(), earlier)
    claimed = claims(runs)
    results = {
        "benchmark": "mask_agnostic",
        "verdict": verdict(claimed),
        "sizes": settings,
        "seeds": {str(seed): run for seed, run in runs.items()},
        "claims": claimed,
    }
    table = make_table(results)
    write_results(options.out, results, table)
    plot(results, options.out / "curves.png")
    print(table)
    return int(options.check and results["verdict"] != "pass")


if __name__ == "__main__":
    sys.exit(main())
