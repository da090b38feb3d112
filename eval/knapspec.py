"""Does KnapSpec choose better what a draft leaves out, and is it faster where attention dominates?

    python eval/knapspec.py                      # 3 seeds
    python eval/knapspec.py --seeds 0 --check
    python eval/knapspec.py --seeds 0 --contexts 128 512 --set steps=300 hidden_size=128

One Llama-like model per seed is trained on the source of Python's standard library with stochastic depth
(`vidgen.recipes.language_model`), on as many tokens as the sizes say.

(a) Selection, without a clock. On held-out text the model reads `past` tokens. What to skip is chosen by the hidden
states of the next `calibration` tokens; then the model without these items reads the `scored` tokens that follow, on
the whole model's keys of all before. Agreement is the share of tokens after which its best token is the whole model's:

* `knapspec`: the knapsack over sub-layers, all of weight 1, so that all rows skip equally many;
* `clasp`: the same programme over whole layers;
* `static`: layers in the middle; `random`: sub-layers between first and last layer, mean of `draws`; `early_exit`: the
  last layers.

(b) Speed, greedy, at several context lengths: `vidgen.language.decoding.bench`, in turns with plain `generate` of
transformers. KnapSpec may plan when its latency profile says that it pays, and keeps a plan for the prompts that
follow; what planning took is in its share of all its runs. CPU time is what the bars are on: other processes of the
machine don't count. Contexts beyond the `length` of the training windows are beyond what the model has learned.

Bars, for the mean over seeds: (a) knapspec >= clasp >= random for 3 of 4 shares at least, knapspec 0.03 above static
at half of the sub-layers; (b) greedy answers identical but for ties; knapspec at least 0.97x plain at each context and
1.1x at the longest; planning at most 10 % of its time; the latency profile ranks methods as measured (Spearman 0.6).

Trained models are run folders under `--work` and every finished measurement a file beside them, so an interrupted
benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
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

from vidgen.language.corpus import TextSource, TokenWindows
from vidgen.language.decoding.baselines import middle_block
from vidgen.language.decoding.bench import benchmark
from vidgen.language.decoding.bench import make_table as speed_table
from vidgen.language.decoding.cache import RollbackCache
from vidgen.language.decoding.clasp import layer_plans
from vidgen.language.decoding.items import ItemRunner
from vidgen.language.decoding.knapsack import solve_knapsack
from vidgen.language.decoding.latency import LatencyProfile
from vidgen.language.decoding.skip import SublayerSkip, recorded_states
from vidgen.language.models import LanguageModel, load_language_model
from vidgen.recipes.language_model import prepare_corpus, train_causal_lm
from vidgen.runtime.device import derive_seed, set_threads
from vidgen.runtime.errors import ConfigError

SELECTIONS = ("knapspec", "clasp", "static", "random", "early_exit")
# Sub-layers that are left out, of twelve: a sixth, a quarter, five twelfths and a half of the model.
SHARES = (4 / 24, 6 / 24, 10 / 24, 12 / 24)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Budget of the benchmark.

    Attributes:
        steps: of training, 8 windows each.
        length: tokens of a window.
        vocab_size: of the tokenizer.
        hidden_size: width of the model.
        num_layers: of the model; a multiple of 12 gives all four shares as whole layers.
        texts: held-out texts of part (a).
        past: tokens before the calibration.
        calibration: tokens by which is chosen.
        scored: tokens on which the choice is judged.
        draws: random choices.
        prompts: of part (b).
        new_tokens: of each answer.
        repeats: of part (b).
    """

    steps: int = 360
    length: int = 1024
    vocab_size: int = 4096
    hidden_size: int = 192
    num_layers: int = 12
    texts: int = 12
    past: int = 128
    calibration: int = 32
    scored: int = 128
    draws: int = 5
    prompts: int = 2
    new_tokens: int = 200
    repeats: int = 3

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.num_layers < 4:
            raise ConfigError(f"num_layers={self.num_layers}; first and last layer stay, so it must be 4 or more.")

    def skipped(self) -> list[int]:
        """Sub-layers that are left out, whole layers each time."""
        layers = [max(1, min(self.num_layers - 2, round(share * self.num_layers))) for share in SHARES]
        return sorted({2 * count for count in layers})


class Bench(WorkFolder):
    """One seed: what is measured already is read from its folder.

    Args:
        sizes: budget.
        seed: of training and draws.
        contexts: of part (b).
        text: folder of text; None is Python's standard library.
        work: folder of all seeds.
    """

    def __init__(self, sizes: Sizes, seed: int, contexts: Sequence[int], text: str | None, work: Path) -> None:
        super().__init__(work / f"seed_{seed}", self.settings(sizes, contexts, text))
        self.sizes, self.seed, self.contexts = sizes, seed, contexts
        self.source = TextSource(text)
        self.corpus = self.folder / "corpus"

    @staticmethod
    def settings(sizes: Sizes, contexts: Sequence[int], text: str | None) -> dict[str, Any]:
        """What measurements depend on."""
        return {**dataclasses.asdict(sizes), "contexts": list(contexts), "text": text}

    def run(self) -> dict[str, Any]:
        """Everything about one seed."""
        trained = self.stored("trained", self.train)
        quality, speed = self.stored("selection", self.selection), self.stored("speed", self.speed)
        return {"training": trained, "selection": quality, "speed": speed}

    def train(self) -> dict[str, float]:
        """Train the model if it isn't; its held-out loss and what training took."""
        sizes = self.sizes
        print(f"seed {self.seed}: training", flush=True)
        source = [] if self.source.folder is None else [f"source.folder={self.source.folder}"]
        options = [f"output_dir={self.corpus}", f"vocab_size={sizes.vocab_size}", f"max_length={sizes.length}"]
        prepare_corpus("lm/tiny_tokenizer", [*options, *source])
        model = {
            "hidden_size": sizes.hidden_size,
            "intermediate_size": 8 * round(sizes.hidden_size / 3),
            "num_hidden_layers": sizes.num_layers,
            "max_position_embeddings": max(sizes.length, *self.contexts) + sizes.new_tokens,
        }
        result = train_causal_lm(
            "lm/tiny_causal",
            [
                f"corpus={self.corpus}",
                f"length={sizes.length}",
                "compile=false",
                f"train.output_dir={self.folder / 'run'}",
                f"train.max_steps={sizes.steps}",
                f"train.seed={self.seed}",
                f"train.validate_every={sizes.steps}",
                f"train.optimizers.model.warmup_steps={min(40, max(1, sizes.steps // 10))}",
                *(f"model.{name}={value}" for name, value in model.items()),
            ],
        )
        tokens = TokenWindows(self.corpus, "heldout", sizes.length).in_order(8)
        lm = self.model()
        with torch.no_grad():
            loss = [float(lm.model(window[None, :-1], labels=window[None, :-1]).loss) for window in tokens]
        return {"seconds": result.elapsed_seconds, "heldout_loss": statistics.mean(loss)}

    def model(self) -> LanguageModel:
        return load_language_model(self.folder / "run" / "weights" / "model", "cpu")

    @torch.no_grad()
    def selection(self) -> dict[str, Any]:
        """Part (a): mean agreement of each kind of choice for each number of skipped sub-layers."""
        sizes, lm = self.sizes, self.model()
        length = sizes.past + sizes.calibration + sizes.scored
        texts = TokenWindows(self.corpus, "heldout", length - 1).in_order(sizes.texts)
        random = np.random.default_rng(derive_seed(self.seed, 31))
        counts = sizes.skipped()
        agreement: dict[str, dict[int, list[float]]] = {name: {count: [] for count in counts} for name in SELECTIONS}
        for number, ids in enumerate(texts):
            report_progress(f"seed {self.seed}: selection, text {number + 1} of {len(texts)}")
            reader = _Reader(lm, ids[None], sizes)
            for count in counts:
                for name in ("knapspec", "clasp", "static", "early_exit"):
                    agreement[name][count].append(reader.agreement(reader.choose(name, count)))
                inner = np.arange(2, 2 * sizes.num_layers - 2)
                draws = [random.choice(inner, count, replace=False).tolist() for _ in range(sizes.draws)]
                agreement["random"][count].append(statistics.mean(reader.agreement(draw) for draw in draws))
        return {
            name: {str(count): statistics.mean(values) for count, values in by_count.items()}
            for name, by_count in agreement.items()
        }

    def speed(self) -> dict[str, Any]:
        """Part (b)."""
        sizes, lm = self.sizes, self.model()
        third, half = max(1, sizes.num_layers // 3), max(1, sizes.num_layers // 2)
        methods = ["ar", "plain", f"early_exit:{third}", f"static_skip:{half}", f"clasp:{third}", "knapspec"]
        profile = LatencyProfile.measure(lm.model)
        texts = sorted(self.source.texts("heldout"), key=len, reverse=True)[: sizes.prompts]
        results = benchmark(
            lm,
            texts,
            methods,
            self.contexts,
            sizes.new_tokens,
            repeats=sizes.repeats,
            seed=self.seed,
            profile=profile,
            progress=lambda text: report_progress(f"seed {self.seed}: {text}"),
        )
        for context, rows in results["contexts"].items():
            for row in rows.values():
                row["predicted"] = predicted_speed(profile, int(context) + sizes.new_tokens // 2, row)
        return {**results, "profile": dataclasses.asdict(profile)}


class _Reader:
    """One text: the whole model has read it all; choices are made and judged on it."""

    def __init__(self, lm: LanguageModel, ids: torch.Tensor, sizes: Sizes) -> None:
        from transformers import DynamicCache

        self.model, self.ids = lm.model, ids
        self.first, self.judged = sizes.past, sizes.past + sizes.calibration
        self.cache, passes = RollbackCache(DynamicCache(config=self.model.config)), []
        with recorded_states(self.model, None, passes):
            logits = self.model(input_ids=ids, cache=self.cache.cache, use_cache=True).logits
        self.best = logits[0, self.judged :].argmax(-1)
        self.states = passes[0][:, self.first : self.judged]
        self.runner = ItemRunner.from_cache(self.model, self.cache, 0, 0, self.first, self.judged)
        self.cache.rollback(self.judged)

    def choose(self, name: str, count: int) -> Sequence[int] | frozenset[int]:
        """Items to skip."""
        layers = len(self.states) // 2
        if name == "static":
            return middle_block(layers, count // 2)
        if name == "early_exit":
            return range(2 * layers - count, 2 * layers)
        if name == "clasp":
            return layer_plans(self.states, self.runner, count // 2)[-1].skip
        return solve_knapsack(self.states, self.runner, [1] * 2 * layers, count, tau=-1.0)[-1].skip

    def agreement(self, skip: Sequence[int] | frozenset[int]) -> float:
        with SublayerSkip(self.model, skip):
            logits = self.model(input_ids=self.ids[:, self.judged :], cache=self.cache.cache, use_cache=True).logits
        self.cache.rollback(self.judged)
        return float((logits[0].argmax(-1) == self.best).float().mean())


def predicted_speed(profile: LatencyProfile, context: int, row: Mapping[str, Any]) -> float:
    """Tokens per second by the latency profile, given how long drafts were and how many of them were confirmed."""
    drafting, drafted = row.get("drafting_rounds", 0.0), row.get("drafted_per_round", 0.0)
    plain = profile.pass_seconds(context)
    draft = profile.pass_seconds(context, skip=row.get("skipped", ()))
    seconds = (1 - drafting) * plain
    if drafting:
        # Between whole numbers of tokens
        below = profile.pass_seconds(context, 1 + int(drafted))
        above = profile.pass_seconds(context, 2 + int(drafted))
        verify = below + (drafted - int(drafted)) * (above - below)
        seconds += drafting * (drafted * draft + verify)
    return (1 + drafting * row.get("accept_length", 0.0)) / seconds


# --- report ------------------------------------------------------------------------------------------------------


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Correlation of ranks; values are all different in practice."""
    ranks = [np.argsort(np.argsort(values)) for values in (left, right)]
    return float(np.corrcoef(*ranks)[0, 1])


def _orders(run: Mapping[str, Any]) -> float:
    """Numbers of skipped sub-layers for which knapspec >= clasp >= random."""
    rows = run["selection"]
    return sum(rows["knapspec"][count] >= rows["clasp"][count] >= rows["random"][count] for count in rows["random"])


def _ranking(run: Mapping[str, Any]) -> float:
    """Mean over contexts."""
    values = []
    for rows in run["speed"]["contexts"].values():
        # `plain` is the engine without drafts, which the profile takes for the same as `ar`.
        measured = [row["cpu_speedup"] for name, row in rows.items() if name != "plain"]
        values.append(spearman([row["predicted"] for name, row in rows.items() if name != "plain"], measured))
    return statistics.mean(values)


def claims(runs: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The bars, on means over seeds."""

    def knapspec(key: str, choose: Callable[[list[float]], float]) -> Callable[[Mapping[str, Any]], float]:
        return lambda run: choose([rows["knapspec"][key] for rows in run["speed"]["contexts"].values()])

    def over_static(run: Mapping[str, Any]) -> float:
        half = list(run["selection"]["static"])[-1]
        return run["selection"]["knapspec"][half] - run["selection"]["static"][half]

    def different(run: Mapping[str, Any]) -> float:
        rows = [row for rows in run["speed"]["contexts"].values() for row in rows.values()]
        return sum(not row["differences_are_ties"] for row in rows)

    claimed = [
        ("(a) skipped shares with knapspec >= clasp >= random", _orders, ">=", 3),
        ("(a) agreement at half the sub-layers, knapspec - static", over_static, ">=", 0.03),
        ("(b) methods and contexts with an answer that differs beyond ties", different, "<=", 0),
        ("(b) knapspec against plain, CPU time, slowest context", knapspec("cpu_speedup", min), ">=", 0.97),
        (
            "(b) knapspec against plain, CPU time, longest context",
            knapspec("cpu_speedup", lambda values: values[-1]),
            ">=",
            1.1,
        ),
        ("(b) share of planning in knapspec's time, largest", knapspec("plan_share", max), "<=", 0.1),
        ("(b) Spearman of predicted and measured speed", _ranking, ">=", 0.6),
    ]
    results = []
    for name, measure_of, relation, bar in claimed:
        values = {str(seed): measure_of(run) for seed, run in runs.items()}
        value = statistics.mean(values.values())
        passed = value <= bar if relation == "<=" else value >= bar
        results.append(
            {"claim": name, "by_seed": values, "value": value, "relation": relation, "bar": bar, "passed": passed}
        )
    return results


def make_table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    runs = list(results["seeds"].values())
    loss = spread([run["training"]["heldout_loss"] for run in runs], 2)
    lines = [f"Seeds {', '.join(results['seeds'])}; mean (range) over seeds. Held-out loss {loss} nats per token.", ""]
    counts = list(runs[0]["selection"]["random"])
    total = 2 * results["sizes"]["num_layers"]
    lines += [f"| agreement, sub-layers skipped of {total} | {' | '.join(counts)} |", "|---" * (len(counts) + 1) + "|"]
    for name in SELECTIONS:
        cells = [spread([run["selection"][name][count] for run in runs], 3) for count in counts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for seed, run in results["seeds"].items():
        lines += ["", f"Speed of seed {seed}, {run['speed']['max_new_tokens']} new tokens:", ""]
        lines += speed_table(run["speed"]).rstrip().split("\n")
    lines += ["", "| bar | mean (range) | bar | |", "|---|---|---|---|"]
    for claim in results["claims"]:
        verdict = "pass" if claim["passed"] else "FAIL"
        value = spread(list(claim["by_seed"].values()), 3)
        lines.append(f"| {claim['claim']} | {value} | {claim['relation']} {claim['bar']:g} | {verdict} |")
    return "\n".join(lines) + "\n"


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what isn't measured yet; write results.json and table.md; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_seeds(parser)
    add_sizes(parser, Sizes)
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1024, 4096], help="default: 128 1024 4096")
    parser.add_argument("--text", metavar="FOLDER", help="*.py files to learn from; default: the standard library")
    parser.add_argument("--work", type=Path, default=Path("runs/eval/knapspec"), help="folder of the trained models")
    add_out(parser, "knapspec")
    add_merge(parser)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    options = parser.parse_args(arguments)
    set_threads()
    sizes, contexts = parse_sizes(Sizes, options.set), sorted(set(options.contexts))
    settings = Bench.settings(sizes, contexts, options.text)
    earlier = earlier_results(options, settings).get("seeds", {})
    runs = measure_seeds(
        options.seeds, lambda seed: Bench(sizes, seed, contexts, options.text, options.work).run(), earlier
    )
    results = {
        "benchmark": "knapspec",
        "sizes": settings,
        "seeds": {str(seed): run for seed, run in runs.items()},
        "claims": claims(runs),
    }
    table = make_table(results)
    write_results(options.out, results, table)
    print(table)
    return int(options.check and not all(claim["passed"] for claim in results["claims"]))


if __name__ == "__main__":
    sys.exit(main())
