"""Does routed in-context learning find the rare actions of an operating room? SGG-ICL against its parts.

    python eval/sgg_icl.py                       # 3 seeds
    python eval/sgg_icl.py --seeds 0 --check
    python eval/sgg_icl.py --seeds 0 --set predictor_steps=100 reranker_steps=50

Operations are simulated with the label statistics of 4D-OR (`scene_graph.simulator`): one data set per seed, split by
take. Three predictors of one architecture are trained with the same steps, batches and number of answers:

* `base` never sees an example; `base_reweighted` neither, its words are weighed by the inverse of their frequency;
* `joint` gets examples in a part of its answers. Only it can be asked with examples.

Index, reranker and router are trained on the same takes as the predictors; the reranker's weights, the number of
examples (one or two), the router, its temperature and its threshold are chosen on validation takes. Rows of the table:

* `base`, `base_reweighted`, `joint`: first answers, without examples;
* `icl_all/X`: every frame is asked again with examples; `routed/X`: those that the router sends, and of the second
  answer only what concerns rare predicates is taken (`merge="tail_only"`). X says what chooses the examples of a pool
  of 24: `random`, `retrieval` (its order), `rerank`, or `oracle_iou` (test labels: a bound);
* `routed/rerank, replaced`: the whole second answer is taken;
* `oracle_router/rerank`: the frames that really have a rare predicate are asked again, merged as in `routed`;
* `routed/rerank, N of them`: with N examples on every seed.

Scores are F1 by the official protocol (see `scene_graph.metrics`): means over the rare predicates (tail), over the
others (head), over all with `none` (macro); predicates without a test label are left out. `strict` is the micro F1 of
triplet sets. Intervals are a bootstrap over test takes.

Before the rows the joint model has to show that it hasn't paid for its examples (the gate): without examples its head
F1 is within 0.02 of `base`'s. A seed where it isn't is void: it is reported, and it fails `--check`.

Bars, for the mean over seeds: tail F1 of routed/rerank at least 0.10 above base and 0.05 above base_reweighted; its
head F1 at least base's - 0.01, its macro F1 base's + 0.03; oracle_iou > rerank > retrieval >= random in tail F1, with
rerank 0.05 above retrieval and 0.10 above it in IoU of the first example; the router's AUC at least 0.85; rerank gains
less than 0.05 on rare frames with tools of looks that no training take has (the negative control; what it gains on all
other rare frames stands beside it). Whether asking about every frame hurts the head is reported as found.

Every trained part is a run folder under `--work` and every finished measurement a file beside it, so an interrupted
benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

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

from scene_graph import recipes
from scene_graph.metrics import SceneGraphEvaluator, auc
from scene_graph.pipeline import SGGICLConfig, SGGICLPipeline, merge_tail
from scene_graph.predictors import load_predictor
from scene_graph.reranker import OracleReranker, load_reranker, ranking_quality, select_examples
from scene_graph.retrieval import SceneIndex
from scene_graph.router import AdaptiveRouter, router_features, tail_labels
from scene_graph.schema import SceneGraph, idf_weights
from scene_graph.simulator import SimulatorConfig, simulate
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.device import derive_seed, set_threads

MOST_EXAMPLES = 2
RANKINGS = ("random", "retrieval", "rerank", "oracle_iou")
FIRST_ANSWERS = ("base", "base_reweighted", "joint")
SCORES = ("tail_f1", "head_f1", "macro_f1", "strict_f1")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Budget of the benchmark, the same for all predictors.

    Attributes:
        takes: of a data set, about 8 in 10 to learn from.
        frames: of a take.
        size: height and width of an image, pixels.
        looks: of the tools of each action in the training takes.
        predictor_steps: of each predictor.
        encoder_steps: of the index's encoder; 0 lets the predictor encode.
        reranker_steps: of the reranker.
        hidden_size: of the predictors.
        num_layers: of the predictors.
        batch_size: sequences of the predictors.
    """

    takes: int = 48
    frames: int = 190
    size: int = 64
    looks: int = 3
    predictor_steps: int = 2500
    encoder_steps: int = 300
    reranker_steps: int = 2500
    hidden_size: int = 96
    num_layers: int = 3
    batch_size: int = 16

    def __post_init__(self) -> None:
        check_sizes(self, may_be_zero=("encoder_steps",))


class Bench(WorkFolder):
    """One seed: what is measured already is read from its folder."""

    def __init__(self, sizes: Sizes, seed: int, work: Path) -> None:
        super().__init__(work / f"seed_{seed}", dataclasses.asdict(sizes))
        self.sizes, self.seed = sizes, seed

    # --- trained parts ------------------------------------------------------------------------------------------

    @property
    def data(self) -> Path:
        sizes = self.sizes
        config = SimulatorConfig(sizes.takes, sizes.frames, (2, 1), sizes.size, sizes.looks, seed=self.seed)
        return simulate(self.folder / "data", config)

    def settings(self, part: str, steps: int) -> list[str]:
        """Overrides of the packaged config of a trained part."""
        every = max(1, steps // 10)
        return [
            f"data.root={self.folder / 'data'}",
            f"train.output_dir={self.folder / part}",
            f"train.max_steps={steps}",
            f"train.seed={self.seed}",
            f"train.checkpoint_every={every}",
            f"train.validate_every={every}",
        ]

    def train(self) -> dict[str, float]:
        """Train all parts that aren't trained yet; seconds of each."""
        sizes, seconds = self.sizes, {}
        model = [
            f"model.{name}={value}"
            for name, value in (
                ("image_size", sizes.size),
                ("max_examples", MOST_EXAMPLES),
                ("hidden_size", sizes.hidden_size),
                ("num_layers", sizes.num_layers),
            )
        ]
        kinds = {"joint": [], "base": ["context.zero_shot_share=1.0"]}
        kinds["base_reweighted"] = [*kinds["base"], "reweight=true"]
        for name, changes in kinds.items():
            print(f"seed {self.seed}: {name}", flush=True)
            options = [*self.settings(name, sizes.predictor_steps), f"train.batch_size={sizes.batch_size}"]
            result = recipes.train_predictor("sgg/tiny_predictor", [*options, *model, *changes])
            seconds[name] = result.elapsed_seconds
        predictor, index = f"{self.folder}/joint/weights/predictor", self.folder / "index"
        encoder = ["encoder=null", f"predictor={predictor}"]
        if sizes.encoder_steps:
            print(f"seed {self.seed}: encoder", flush=True)
            options = [
                *self.settings("encoder", sizes.encoder_steps),
                f"model_config.vision_cfg.image_size={sizes.size}",
            ]
            seconds["encoder"] = recipes.train_encoder("sgg/tiny_encoder", options).elapsed_seconds
            encoder = [f"encoder={self.folder}/encoder/weights/encoder"]
        if not index.is_dir():
            options = [f"data.root={self.folder / 'data'}", f"output_dir={index}"]
            recipes.build_index("sgg/tiny_index", [*options, *encoder])
        print(f"seed {self.seed}: reranker", flush=True)
        options = [*self.settings("reranker", sizes.reranker_steps), f"predictor={predictor}", f"index={index}"]
        options.append(f"model.image_size={sizes.size}")
        seconds["reranker"] = recipes.train_reranker("sgg/tiny_reranker", options).elapsed_seconds
        reranker, router = f"{self.folder}/reranker/weights/reranker", self.folder / "router"
        if not router.is_dir():
            print(f"seed {self.seed}: router", flush=True)
            options = [f"data.root={self.folder / 'data'}", f"output_dir={router}", f"predictor={predictor}"]
            options += [f"index={index}", f"reranker={reranker}", "pipeline.merge=tail_only"]
            recipes.train_router("sgg/tiny_router", [*options, f"pipeline.num_examples={self.num_examples}"])
        return seconds

    def open(self, num_examples: int) -> SGGICLPipeline:
        """Predictor, index and reranker, for the second look at every frame."""
        predictor = load_predictor(self.folder / "joint" / "weights" / "predictor")
        return SGGICLPipeline(
            predictor,
            SceneIndex.from_pretrained(self.folder / "index", predictor=predictor),
            reranker=load_reranker(self.folder / "reranker" / "weights" / "reranker"),
            config=SGGICLConfig(policy="all", num_examples=num_examples, merge="tail_only"),
        )

    @property
    def num_examples(self) -> int:
        """The number of examples whose answers have the best tail F1 on validation takes."""
        scores = self.stored("examples", self.try_examples)
        return int(max(scores, key=lambda count: scores[count]))

    def try_examples(self) -> dict[str, float]:
        """Tail F1 on validation takes by number of examples."""
        scenes, scores = recipes.SceneSource(str(self.data), views=[2, 1]).open("validation"), {}
        graphs, takes = scenes.graphs(), [sample.take for sample in scenes]
        for count in range(1, MOST_EXAMPLES + 1):
            report_progress(f"seed {self.seed}: {count} examples, validation")
            pipe = self.open(count)
            answers = pipe(scenes).graphs
            scores[str(count)] = score(scenes.vocabulary, pipe.tail_split, answers, graphs, takes)["tail_f1"]
        return scores

    # --- measuring ----------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Everything about one seed."""
        data = self.data
        trained = self.stored("trained", self.train)
        return {"seconds": trained, **self.stored("measured", lambda: self.measure(data))}

    def measure(self, data: Path) -> dict[str, Any]:
        """All rows on the test takes."""
        source = recipes.SceneSource(str(data), views=[2, 1])
        train, test = source.open("train"), source.open("test")
        # The whole second answer; rows merge it as they want.
        pipe = self.open(self.num_examples).with_config(merge="replace")
        router = AdaptiveRouter.from_pretrained(self.folder / "router")
        predictors = {
            name: load_predictor(self.folder / name / "weights" / "predictor") for name in FIRST_ANSWERS[:-1]
        }
        predictors["joint"] = pipe.predictor
        samples, graphs = list(test), test.graphs()
        weights, tail = idf_weights(train.graphs(), test.vocabulary), pipe.tail_split
        clock = _Clock()

        first = {}
        for name, predictor in predictors.items():
            report_progress(f"seed {self.seed}: {name}")
            drafts = clock(f"draft of {name}", lambda predictor=predictor: predictor.predict(samples))
            first[name] = drafts
        drafts = first["joint"]
        answers: dict[str, list[SceneGraph]] = {name: [draft.graph for draft in first[name]] for name in FIRST_ANSWERS}
        candidates = clock("retrieval", lambda: pipe.retrieve(samples, drafts))
        probabilities = router.predict_proba(router_features(drafts, candidates, tail, pipe.index.prior))
        routed, is_tail = probabilities > router.threshold, tail_labels(graphs, tail)

        # Scores of every pool by everything that can order it
        oracle = OracleReranker(weights)
        random = np.random.default_rng(derive_seed(self.seed, 21))
        orders: dict[str, list[np.ndarray]] = {
            "random": [random.random(len(pool)) for pool in candidates],
            "retrieval": [np.array([candidate.score for candidate in pool]) for pool in candidates],
            "rerank": clock(
                "reranking",
                lambda: [
                    pipe.reranker.score(sample, draft.graph, pool)
                    for sample, draft, pool in zip(samples, drafts, candidates, strict=True)
                ],
            ),
            "oracle_iou": [oracle.score(sample, None, pool) for sample, pool in zip(samples, candidates, strict=True)],
        }
        relevance = orders["oracle_iou"]

        def second(ranking: str, count: int) -> list[SceneGraph]:
            report_progress(f"seed {self.seed}: examples by {ranking}")
            examples = [
                select_examples(pool, scores, count) for pool, scores in zip(candidates, orders[ranking], strict=True)
            ]
            return clock(f"second look, {count} examples", lambda: pipe.refine(samples, drafts, examples))

        def merged(looked_again: Sequence[SceneGraph], chosen: np.ndarray) -> list[SceneGraph]:
            return [
                merge_tail(draft, again, tail.tail) if flag else draft
                for again, draft, flag in zip(looked_again, answers["joint"], chosen, strict=True)
            ]

        for ranking in RANKINGS:
            looked_again = second(ranking, self.num_examples)
            answers[f"icl_all/{ranking}"] = looked_again
            answers[f"routed/{ranking}"] = merged(looked_again, routed)
            if ranking == "rerank":
                answers["oracle_router/rerank"] = merged(looked_again, is_tail)
                answers["routed/rerank, replaced"] = [
                    again if flag else draft for again, draft, flag in zip(looked_again, answers["joint"], routed)
                ]
        for count in range(1, MOST_EXAMPLES + 1):
            answers[f"routed/rerank, {count} of them"] = merged(second("rerank", count), routed)

        tail_rows = np.flatnonzero(is_tail)
        unseen = _unseen_rows(data, samples, tail.tail)
        takes = [sample.take for sample in samples]
        scored = {name: score(test.vocabulary, tail, given, graphs, takes) for name, given in answers.items()}
        return {
            "rows": scored,
            "num_examples": {"chosen": self.num_examples, **self.stored("examples", self.try_examples)},
            "negative_control": _rare_f1(answers, graphs, unseen, tail.tail),
            "seen_looks": _rare_f1(answers, graphs, sorted({*tail_rows.tolist()} - {*unseen}), tail.tail),
            "rankings": {
                name: ranking_quality([(relevance[row], orders[name][row]) for row in tail_rows]) for name in RANKINGS
            },
            "router": {
                **json.loads((self.folder / "router" / "report.json").read_text()),
                "test_auc": auc(is_tail, probabilities),
                "test_routed": float(routed.mean()),
                "test_tail_recall": float(routed[is_tail].mean()),
            },
            "frames": {"test": len(samples), "tail": int(is_tail.sum()), "tail with an unseen look": len(unseen)},
            "tail": list(tail.tail),
            "ms_per_frame": {name: 1000 * seconds / len(samples) for name, seconds in clock.seconds.items()},
        }


class _Clock:
    """Runs parts of the work and remembers how long each took; the last time of a name counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - began
        return result


def score(
    vocabulary: Any, tail: Any, answers: Sequence[SceneGraph], graphs: Sequence[SceneGraph], takes: Sequence[str]
) -> dict[str, Any]:
    """Scores of one row, with intervals over takes."""
    official = SceneGraphEvaluator(vocabulary, "official", "skip", tail)
    strict = SceneGraphEvaluator(vocabulary, "strict", "skip", tail)
    for evaluator in (official, strict):
        evaluator.update(answers, graphs, takes)
    report, sets = official.compute(), strict.compute()
    intervals = official.bootstrap(seed=0) if len(set(takes)) > 1 else {}
    return {
        **{name: report.scores[name] for name in ("tail_f1", "head_f1", "macro_f1")},
        "strict_f1": sets.scores["micro_f1"],
        "set_iou": sets.scores["set_iou"],
        "intervals": {name: intervals[name] for name in ("tail_f1", "head_f1", "macro_f1") if name in intervals},
        "classes": {row.name: {"f1": row.f1, "support": row.support} for row in report.classes},
    }


def _unseen_rows(data: Path, samples: Sequence[Any], tail: Sequence[str]) -> list[int]:
    """Test frames whose rare actions all use a tool of a look that no training take has."""
    looks = json.loads((data / "simulator.json").read_text())["looks"]
    rows = []
    for row, sample in enumerate(samples):
        actions = [name for name in sample.graph.predicates if name in tail and name in looks[sample.take]]
        if actions and all(looks[sample.take][name]["is_unseen"] for name in actions):
            rows.append(row)
    return rows


def _rare_f1(
    answers: Mapping[str, Sequence[SceneGraph]], graphs: Sequence[SceneGraph], rows: Sequence[int], tail: Sequence[str]
) -> dict[str, float]:
    """Micro F1 of triplets with a rare predicate, of some frames alone."""
    scores = {}
    for name, given in answers.items():
        hits = predicted = labeled = 0
        for row in rows:
            said = {triplet for triplet in given[row] if triplet.predicate in tail}
            true = {triplet for triplet in graphs[row] if triplet.predicate in tail}
            hits, predicted, labeled = hits + len(said & true), predicted + len(said), labeled + len(true)
        scores[name] = 2 * hits / max(1, predicted + labeled)
    return scores


# --- report ------------------------------------------------------------------------------------------------------


def claims(runs: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The bars, on means over seeds."""

    def gain(name: str, reference: str, key: str) -> Callable[[Mapping[str, Any]], float]:
        return lambda run: run["rows"][name][key] - run["rows"][reference][key]

    def first(name: str, reference: str) -> Callable[[Mapping[str, Any]], float]:
        return lambda run: run["rankings"][name]["iou_at_1"] - run["rankings"][reference]["iou_at_1"]

    def control(run: Mapping[str, Any]) -> float:
        return abs(run["negative_control"]["routed/rerank"] - run["negative_control"]["joint"])

    best = "routed/rerank"
    claimed = [
        ("gate: head F1, |joint - base|, largest", lambda run: abs(gain("joint", "base", "head_f1")(run)), "<=", 0.02),
        ("tail F1, routed/rerank - base", gain(best, "base", "tail_f1"), ">=", 0.10),
        ("tail F1, routed/rerank - base_reweighted", gain(best, "base_reweighted", "tail_f1"), ">=", 0.05),
        ("head F1, routed/rerank - base", gain(best, "base", "head_f1"), ">=", -0.01),
        ("macro F1, routed/rerank - base", gain(best, "base", "macro_f1"), ">=", 0.03),
        ("tail F1, routed: oracle_iou - rerank", gain("routed/oracle_iou", best, "tail_f1"), ">=", 0.0),
        ("tail F1, routed: rerank - retrieval", gain(best, "routed/retrieval", "tail_f1"), ">=", 0.05),
        ("tail F1, routed: retrieval - random", gain("routed/retrieval", "routed/random", "tail_f1"), ">=", 0.0),
        ("IoU of the first example: rerank - retrieval", first("rerank", "retrieval"), ">=", 0.10),
        ("AUC of the router, test", lambda run: run["router"]["test_auc"], ">=", 0.85),
        ("negative control, |rerank - joint| on unseen looks", control, "<=", 0.05),
    ]
    results = []
    for name, measure_of, relation, bar in claimed:
        values = {str(seed): measure_of(run) for seed, run in runs.items()}
        # A void seed isn't saved by the others.
        value = max(values.values()) if name.startswith("gate") else statistics.mean(values.values())
        passed = value <= bar if relation == "<=" else value >= bar
        results.append(
            {"claim": name, "by_seed": values, "value": value, "relation": relation, "bar": bar, "passed": passed}
        )
    return results


def make_table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    runs = list(results["seeds"].values())
    names = list(runs[0]["rows"])
    lines = [
        f"Seeds {', '.join(results['seeds'])}; mean (range) over seeds. {runs[0]['frames']} frames of seed 0.",
        "",
    ]
    header = ("row", "tail F1", "head F1", "macro F1", "strict F1", "rare triplets, seen looks", "unseen looks")
    lines += [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for name in names:
        cells = [spread([run["rows"][name][key] for run in runs], 3) for key in SCORES]
        cells += [spread([run[looks][name] for run in runs], 3) for looks in ("seen_looks", "negative_control")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| order of the pool, rare frames | IoU@1 | best of the pool | NDCG@3 | Spearman |",
        "|---" * 5 + "|",
    ]
    for name in RANKINGS:
        keys = ("iou_at_1", "best_iou", "ndcg_at_3", "spearman")
        cells = [spread([run["rankings"][name][key] for run in runs], 3) for key in keys]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| router | |", "|---|---|"]
    for key in ("auc", "test_auc", "test_routed", "test_tail_recall", "threshold"):
        lines.append(f"| {key} | {spread([run['router'][key] for run in runs], 3)} |")
    chosen = ", ".join(f"{run['num_examples']['chosen']}" for run in runs)
    lines += ["", f"Examples that validation chose, by seed: {chosen}.", "", "| cost, ms per frame | |", "|---|---|"]
    for key in runs[0]["ms_per_frame"]:
        lines.append(f"| {key} | {spread([run['ms_per_frame'][key] for run in runs], 1)} |")
    lines += ["", "| bar | mean (range) | bar | |", "|---|---|---|---|"]
    for claim in results["claims"]:
        verdict = "pass" if claim["passed"] else "FAIL"
        value = spread(list(claim["by_seed"].values()), 3)
        lines.append(f"| {claim['claim']} | {value} | {claim['relation']} {claim['bar']:g} | {verdict} |")
    return "\n".join(lines) + "\n"


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Tail and head F1 of every row, mean and range over seeds."""
    runs = list(results["seeds"].values())
    names = list(runs[0]["rows"])
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for axes, key, color in zip(panels, ("tail_f1", "head_f1"), ("tab:orange", "tab:blue"), strict=True):
        values = np.array([[run["rows"][name][key] for run in runs] for name in names])
        mean = values.mean(axis=1)
        error = np.stack([mean - values.min(axis=1), values.max(axis=1) - mean])
        axes.barh(names, mean, xerr=error, color=color, alpha=0.8)
        axes.set(xlabel=key.replace("_f1", " F1"), xlim=(0, 1))
        axes.axvline(mean[names.index("base")], color="black", linestyle="--", linewidth=0.8)
    panels[0].invert_yaxis()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what isn't measured yet; write results.json, table.md and scores.png; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_seeds(parser)
    add_sizes(parser, Sizes)
    parser.add_argument("--work", type=Path, default=Path("runs/eval/sgg_icl"), help="folder of the trained parts")
    add_out(parser, "sgg_icl")
    add_merge(parser)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    options = parser.parse_args(arguments)
    set_threads()
    sizes = parse_sizes(Sizes, options.set)
    settings = dataclasses.asdict(sizes)
    earlier = earlier_results(options, settings).get("seeds", {})
    runs = measure_seeds(options.seeds, lambda seed: Bench(sizes, seed, options.work).run(), earlier)
    results = {
        "benchmark": "sgg_icl",
        "sizes": settings,
        "seeds": {str(seed): run for seed, run in runs.items()},
        "claims": claims(runs),
    }
    table = make_table(results)
    write_results(options.out, results, table)
    plot(results, options.out / "scores.png")
    print(table)
    return int(options.check and not all(claim["passed"] for claim in results["claims"]))


if __name__ == "__main__":
    sys.exit(main())
