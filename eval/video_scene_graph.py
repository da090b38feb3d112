"""How steady the scene graphs of videos are: generated ones beside real ones, under one model.

    python eval/video_scene_graph.py real.mp4 generated.mp4 --model FOLDER --fps 1
    python eval/video_scene_graph.py generated.mp4 --model FOLDER --condition graphs.json

A model of scene graphs looks at each video at a steady rate. Reported are the agreement of consecutive graphs,
flicker, how long entities stay, how far the last minute is from the first and, for videos that were made from a graph,
the F1 of the triplets against it. The model's own mistakes flicker, too, and a frozen video is perfectly steady: read
the numbers of a generated video beside those of real ones.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _benchmark import add_out, report_progress, reports_errors, write_results

from scene_graph.consistency import scene_graph_consistency
from scene_graph.datasets import VideoFrames
from scene_graph.formats import read_graphs
from scene_graph.schema import Sample, SceneGraph, SceneGraphError, Vocabulary
from vidgen.runtime.device import set_threads
from vidgen.runtime.errors import suggestion
from vidgen.runtime.meter import run_environment


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", nargs="+", type=Path, metavar="VIDEO", help="video files")
    parser.add_argument("--model", required=True, type=Path, help="folder of a trained SGG-ICL pipeline")
    parser.add_argument("--fps", type=float, default=1.0, help="graphs per second of video; default 1")
    parser.add_argument(
        "--condition", type=Path, help="JSON file: by video name without ending, [[subject, predicate, object], ...]"
    )
    add_out(parser, "video_scene_graph", parent="runs")
    return parser.parse_args(arguments)


def read_conditions(
    path: Path | None, videos: Sequence[Path], vocabulary: Vocabulary
) -> tuple[dict[str, SceneGraph], dict[str, int]]:
    """The graphs that videos were made from, by name, and the words in them that the model doesn't know.

    Raises:
        SceneGraphError: two videos have one name, or one of them isn't in the file.
    """
    names = [video.stem for video in videos]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise SceneGraphError(f"several videos are named {', '.join(repeated)}; each needs a name of its own.")
    if path is None:
        return {}, {}
    unknown: Counter[str] = Counter()
    graphs = read_graphs(path, vocabulary, unknown=unknown)
    for name in names:
        if name not in graphs:
            raise SceneGraphError(f"{path} has no graph for video {name!r}; {suggestion(name, graphs)}")
    return graphs, dict(unknown)


def measure(
    video: Path, predict: Callable[[Sequence[Sample]], Any], fps: float, condition: SceneGraph | None
) -> dict[str, Any]:
    """Consistency of one video, and the graphs it comes from.

    Raises:
        VidgenError: the file can't be read, or it is too short for two graphs.
    """
    samples = VideoFrames(video, fps=fps)
    if len(samples) < 2:
        raise SceneGraphError(
            f"{video} has {len(samples)} sample at {fps:g} per second, and 2 are needed; raise --fps."
        )
    output = predict(samples)
    seconds = [sample.seconds for sample in samples]
    report = scene_graph_consistency(output.graphs, seconds, condition=condition)
    return {
        "video": str(video),
        "fps": fps,
        "consistency": {**report.to_dict(), "total_flicker_per_minute": report.total_flicker_per_minute},
        "share_routed": sum(output.routed) / len(output.routed),
        "condition": None if condition is None else [triplet.spo() for triplet in condition.sorted()],
        "samples": [
            {"seconds": second, "graph": [triplet.spo() for triplet in graph.sorted()]}
            for second, graph in zip(seconds, output.graphs)
        ],
    }


def make_table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        f"Model `{results['model']}`, {results['fps']:g} graphs per second of video.",
        "",
        "| video | graphs | empty | predicates, Jaccard | triplets, Jaccard | flickers per minute | entities kept "
        "| last minute against first | triplet F1 with condition |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, measured in results["videos"].items():
        row = measured["consistency"]
        cells = [f"{row['num_frames']}", f"{row['num_empty']}"]
        cells += [f"{row[key]:.3f}" for key in ("predicate_jaccard", "triplet_jaccard")]
        cells.append(f"{row['total_flicker_per_minute']:.1f}")
        last = row["drift"][-1] if len(row["drift"]) > 1 else None
        cells += [f"{value:.3f}" if value is not None else "" for value in (row["entity_persistence"], last)]
        cells.append(f"{row['agreement']:.3f}" if row["agreement"] is not None else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    names = sorted({name for one in results["videos"].values() for name in one["consistency"]["flicker_per_minute"]})
    if names:
        lines += ["", f"| flickers per minute | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for name, measured in results["videos"].items():
            flickers = measured["consistency"]["flicker_per_minute"]
            cells = (f"{flickers[predicate]:.1f}" if predicate in flickers else "" for predicate in names)
            lines.append(f"| {name} | {' | '.join(cells)} |")
    if results["unknown_condition_words"]:
        words = ", ".join(f"{word} ({count})" for word, count in results["unknown_condition_words"].items())
        lines += ["", f"Words of the conditions that the model doesn't know, whose triplets were left out: {words}."]
    return "\n".join(lines) + "\n"


@reports_errors
def main(arguments: Sequence[str] | None = None, pipeline: Any = None) -> int:
    """Measure all videos; write results.json and table.md; print the table.

    Args:
        arguments: command line, by default the process's.
        pipeline: used instead of the one in `--model`.
    """
    options = parse_arguments(arguments)
    set_threads()
    if pipeline is None:
        from scene_graph.pipeline import SGGICLPipeline

        pipeline = SGGICLPipeline.from_pretrained(options.model)
    conditions, unknown = read_conditions(options.condition, options.videos, pipeline.predictor.vocabulary)
    measured = {}
    for number, video in enumerate(options.videos, start=1):
        report_progress(f"{video.name} ({number}/{len(options.videos)})")
        measured[video.stem] = measure(video, pipeline, options.fps, conditions.get(video.stem))
    results = {
        "benchmark": "video_scene_graph",
        "model": str(options.model),
        "fps": options.fps,
        "environment": run_environment(),
        "unknown_condition_words": unknown,
        "videos": measured,
    }
    table = make_table(results)
    write_results(options.out, results, table)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
