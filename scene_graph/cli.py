"""`vidgen scene-graph`: operating-room scene graphs from the command line. No logic of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vidgen.cli.train import run_recipe
from vidgen.runtime.errors import suggestion

if TYPE_CHECKING:
    from scene_graph.datasets import SceneDataset

# As in vidgen.cli.train.
RECIPES = {
    "predictor": ("scene_graph.recipes:train_predictor", "sgg/tiny_predictor"),
    "predictor_mllm": ("scene_graph.recipes:train_mllm_predictor", "sgg/qwen3vl_2b_4dor_predictor"),
    "encoder": ("scene_graph.recipes:train_encoder", "sgg/tiny_encoder"),
    "reranker": ("scene_graph.recipes:train_reranker", "sgg/tiny_reranker"),
    "reranker_mllm": ("scene_graph.recipes:train_mllm_reranker", "sgg/qwen3vl_2b_4dor_reranker"),
    "index": ("scene_graph.recipes:build_index", "sgg/tiny_index"),
    "router": ("scene_graph.recipes:train_router", "sgg/tiny_router"),
    "assemble": ("scene_graph.recipes:assemble", "sgg/tiny_assemble"),
}
EXPORTS = ("jsonld", "cypher", "graphml", "csv", "4dor-eval")
PROTOCOLS = ("official", "strict")

app = typer.Typer(
    help="Operating-room scene graphs: simulate, train, predict, score, draw.", rich_markup_mode="markdown"
)

Data = Annotated[Path, typer.Argument(metavar="DATA", help="4D-OR or MM-OR root folder, or a folder of images.")]
Split = Annotated[str, typer.Option(help="train, validation or test; a folder of images has none.")]
Views = Annotated[
    str | None,
    typer.Option(metavar="N,N,…", help="Cameras, the first shows most. Default: the data set's four or five."),
]
Model = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="What `vidgen scene-graph train assemble` wrote. Default: the embedded model, of simulated operations.",
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps. Default: the fastest there is.")]


@app.callback()
def _group() -> None:
    """Operating-room scene graphs: simulate, train, predict, score, draw."""


@app.command("simulate")
def simulate(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make or to continue.")],
    takes: Annotated[int, typer.Option(help="Recordings; about 6 of 10 train, 2 validate, 2 test.")] = 10,
    frames: Annotated[int, typer.Option(help="Frames of each, one per second.")] = 300,
    size: Annotated[int, typer.Option(help="Height and width of an image, pixels.")] = 128,
    seed: Annotated[int, typer.Option(help="Same seed, same data.")] = 0,
) -> None:
    """Simulate operations with the long tail of the real labels, and write them as 4D-OR is laid out."""
    from scene_graph.simulator import SimulatorConfig
    from scene_graph.simulator import simulate as write

    write(output, SimulatorConfig(takes=takes, frames_per_take=frames, size=size, seed=seed))
    print(f"{output}: {takes} takes of {frames} frames")


@app.command("stats")
def stats(data: Data, split: Split = "train", views: Views = None) -> None:
    """How often each predicate occurs, and which are the long tail."""
    from rich.console import Console
    from rich.table import Table

    from scene_graph.schema import tail_split

    scenes = _open(data, split, views)
    graphs = scenes.graphs()
    source = "train" if split == "train" else "shown labels"
    parts = tail_split(graphs, scenes.vocabulary, source=source)
    table = Table("predicate", "triplets", "frames", "share of frames", "part", title=f"{data}, {split}")
    for name in sorted(scenes.vocabulary.predicates, key=parts.frequencies.get, reverse=True):
        triplets = sum(triplet.predicate == name for graph in graphs for triplet in graph)
        frames = round(parts.frequencies[name] * len(graphs))
        part = "tail" if name in parts.tail else "head"
        table.add_row(name, str(triplets), str(frames), f"{parts.frequencies[name]:.1%}", part)
    console = Console()
    console.print(table)
    mean = sum(map(len, graphs)) / len(graphs)
    console.print(f"{len(scenes)} frames of {len(scenes.takes)} takes, {mean:.1f} triplets per frame")


@app.command("train")
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help=f"One of: {', '.join(RECIPES)}.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe's config, as `train.max_steps=100`."),
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", "-c", metavar="NAME|FILE", help="A YAML file, or a packaged one's name.")
    ] = None,
) -> None:
    """Run a training recipe. A run that was stopped goes on where it was."""
    run_recipe("vidgen scene-graph train", RECIPES, recipe, list(overrides or ()), config)


@app.command("search")
def search(
    data: Data,
    sample: Annotated[str, typer.Option(metavar="ID", help="Sample whose look-alikes are wanted.")],
    model: Model = None,
    split: Split = "test",
    views: Views = None,
    count: Annotated[int, typer.Option("--count", "-n", help="How many.")] = 8,
    device: Device = None,
) -> None:
    """Show what retrieval finds for a sample: candidates, their scores, and their triplets without closeTo."""
    pipe = _load(model, device)
    query = _open(data, split, views).find(sample)
    (candidates,) = pipe.retrieve([query], pipe.draft([query]))
    for candidate in candidates[:count]:
        words = "; ".join(",".join(triplet.sop()) for triplet in candidate.graph.without("closeTo").sorted())
        print(f"{candidate.score:7.3f}  {candidate.sample_id}  {words}")


@app.command("run")
def run(
    data: Annotated[
        Path | None, typer.Argument(metavar="[DATA]", help="4D-OR or MM-OR root folder, or a folder of images.")
    ] = None,
    model: Model = None,
    video: Annotated[Path | None, typer.Option(metavar="FILE", help="A video in place of DATA.")] = None,
    fps: Annotated[float, typer.Option(help="Graphs per second of video.")] = 1.0,
    split: Split = "test",
    views: Views = None,
    policy: Annotated[
        str | None, typer.Option(metavar="WHICH[/RANKING]", help="routed, all or none; with /rerank or /retrieval.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="JSON: graphs by sample.")] = Path(
        "predictions.json"
    ),
    device: Device = None,
) -> None:
    """Predict the scene graph of every frame."""
    if (data is None) == (video is None):
        raise typer.BadParameter("give either DATA or --video")
    from scene_graph.datasets import VideoFrames
    from scene_graph.formats import write_graphs

    pipe = _load(model, device)
    if policy is not None:
        which, _, ranking = policy.partition("/")
        pipe = pipe.with_config(policy=which, **({"ranking": ranking} if ranking else {}))
    scenes = _open(data, split, views) if video is None else VideoFrames(video, fps, pipe.predictor.vocabulary)
    answer = pipe(scenes, progress=True)
    write_graphs(output, {sample.id: graph for sample, graph in zip(scenes, answer.graphs)})
    print(f"{output}: {len(answer.graphs)} graphs, {sum(answer.routed)} after a second look", file=sys.stderr)


@app.command("eval")
def evaluate(
    predictions: Annotated[Path, typer.Argument(metavar="PREDS", help="What `run` wrote.")],
    data: Annotated[Path, typer.Option(metavar="DATA", help="Data set with the labels.")],
    split: Split = "test",
    views: Views = None,
    protocol: Annotated[list[str] | None, typer.Option(help="official and strict; repeat it. Default: both.")] = None,
    zero_support: Annotated[str, typer.Option(help="Predicates without labels: zero or skip.")] = "zero",
    train_labels: Annotated[
        str | None, typer.Option(metavar="SPLIT", help="Split whose labels say what is rare; `none` for no such rows.")
    ] = "train",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score predictions against labels, with intervals over takes."""
    from scene_graph.formats import read_graphs
    from scene_graph.metrics import SceneGraphEvaluator
    from scene_graph.schema import SceneGraphError, tail_split

    scenes = _open(data, split, views)
    targets = scenes.graphs()
    given = read_graphs(predictions, scenes.vocabulary)
    missing = [sample.id for sample in scenes if sample.id not in given]
    if missing:
        raise SceneGraphError(
            f"{predictions} lacks {len(missing)} of {len(scenes)} samples, the first is {missing[0]}."
        )
    tail = None
    if train_labels != "none":
        tail = tail_split(_open(data, train_labels, views).graphs(), scenes.vocabulary, source=train_labels)
    reports = {}
    for name in protocol or PROTOCOLS:
        evaluator = SceneGraphEvaluator(scenes.vocabulary, name, zero_support, tail)
        evaluator.update([given[s.id] for s in scenes], targets, [s.take for s in scenes])
        intervals = evaluator.bootstrap(seed=0) if len(scenes.takes) > 1 else None
        reports[name] = {**evaluator.compute().to_dict(), "intervals": intervals}
        if not as_json:
            print(evaluator.compute().to_markdown(intervals))
    if as_json:
        print(json.dumps(reports, indent=1))


@app.command("export")
def export(
    predictions: Annotated[Path, typer.Argument(metavar="PREDS", help="What `run` wrote.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help=f"One of: {', '.join(EXPORTS)}.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")],
    vocabulary: Annotated[str, typer.Option(help="Words of the graphs: or4d, mmor or egoexor.")] = "or4d",
) -> None:
    """Write predictions in a format of others."""
    from scene_graph import formats
    from scene_graph.schema import Vocabulary
    from vidgen.runtime.checkpoint import atomic_write

    if to not in EXPORTS:
        raise typer.BadParameter(f"--to {to}: {suggestion(to, EXPORTS)}")
    names = ("or4d", "mmor", "egoexor")
    if vocabulary not in names:
        raise typer.BadParameter(f"--vocabulary {vocabulary}: {suggestion(vocabulary, names)}")
    graphs = formats.read_graphs(predictions, getattr(Vocabulary, vocabulary)())
    if to == "cypher":
        statement, parameters = formats.to_cypher(graphs)
        text = json.dumps({"statement": statement, "parameters": parameters}, indent=1)
    elif to in ("graphml", "csv"):
        text = getattr(formats, f"to_{to}")(graphs)
    else:
        content = formats.to_jsonld(graphs) if to == "jsonld" else formats.to_4dor_evaluator(graphs)
        text = json.dumps(content, indent=1)
    with atomic_write(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"{output}: {len(graphs)} graphs")


@app.command("draw")
def draw(
    data: Data,
    sample: Annotated[str, typer.Option(metavar="ID", help="Which sample.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.png", help="Picture to write.")],
    model: Model = None,
    split: Split = "test",
    views: Views = None,
    device: Device = None,
) -> None:
    """Draw a sample: its views, the draft against the final graph, and the examples that were used."""
    from scene_graph.viz import draw_graph
    from vidgen.runtime.checkpoint import atomic_write

    pipe = _load(model, device)
    query = _open(data, split, views).find(sample)
    answer = pipe([query])
    picture = draw_graph(
        query,
        answer.graphs[0],
        draft=answer.drafts[0].graph,
        examples=answer.examples[0],
        routed=answer.routed[0],
        tail_split=pipe.tail_split,
    )
    with atomic_write(output) as temporary:
        picture.save(temporary, format="PNG")
    print(output)


def _open(data: Path, split: str, views: str | None) -> SceneDataset:
    from scene_graph.recipes import open_scenes

    cameras = None if views is None else [int(view) if view.isdigit() else view for view in views.split(",")]
    return open_scenes(data, split, cameras)


def _load(model: Path | None, device: str | None):
    from scene_graph.pipeline import SGGICLPipeline
    from vidgen.runtime.assets import DEFAULT_SCENE_GRAPH_MODEL, find_asset

    return SGGICLPipeline.from_pretrained(model or find_asset(DEFAULT_SCENE_GRAPH_MODEL), device)
