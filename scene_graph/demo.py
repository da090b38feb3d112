"""The demo's tab of scene graphs: frames of a simulated operation or a visitor's pictures, draft against final graph.

The demo finds `tab` through the entry-point group `vidgen.demo_tabs`.
"""

from __future__ import annotations

import html
import importlib.util
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from PIL import Image

from scene_graph.datasets import telling_frames
from scene_graph.pipeline import SGGICLOutput, SGGICLPipeline
from scene_graph.schema import Sample, SceneGraph, TailSplit, Triplet
from scene_graph.simulator import Renderer, SimulatorConfig, make_take, plan_study
from scene_graph.simulator.writer import JPEG_QUALITY
from scene_graph.viz import UNLABELED, draw_graph
from vidgen.demo.context import DemoContext, DemoTab, shown
from vidgen.demo.names import folder_names
from vidgen.demo.pictures import to_data_uri
from vidgen.demo.uploads import PICTURE_SUFFIXES, UploadError, UploadLimits, read_picture
from vidgen.demo.visitors import DemoError
from vidgen.runtime.assets import DEFAULT_SCENE_GRAPH_MODEL, AssetError, find_asset
from vidgen.runtime.errors import suggestion

NAME = PART = "scene-graph"
# As in the README: a model trained by it knows the tools of this study, and would be misled by those of another.
STUDY = SimulatorConfig(takes=48, frames_per_take=190, views=(2, 1), size=64)
NUM_FRAMES = 12
MAX_PICTURES = 6
THUMBNAIL_WIDTH = 128
POLICIES = {"where the router says so": "routed", "always": "all", "never": "none"}
TRAIN = (
    "vidgen scene-graph simulate runs/sgg/data --takes 48 --frames 190 --size 64 && for part in predictor encoder "
    "index reranker router assemble; do vidgen scene-graph train $part; done && vidgen demo --tab-model "
    "scene-graph=runs/sgg/model"
)
HOW_TO_TRAIN = (
    "<div class='vg-card'><h3>No model here yet</h3>A simulated frame shows its true graph. This trains a model:"
    f"<pre>{html.escape(TRAIN)}</pre></div>"
)
IDLE = "<div class='sg-idle'><b>Nothing read yet</b><span>Simulate an operation or upload pictures, then read a frame."
IDLE += "</span></div>"
STYLE = """
.sg-views { display: flex; gap: 8px; flex-wrap: wrap; }
.sg-views figure { margin: 0; flex: 1 1 130px; max-width: 260px; }
.sg-views img { width: 100%; display: block; border-radius: 10px; image-rendering: pixelated; }
.sg-views figcaption, .sg-faint { font-size: .78rem; color: var(--body-text-color-subdued); }
.sg-idle { display: grid; place-content: center; text-align: center; gap: 6px; min-height: 200px; padding: 20px;
  background: #0b1120; color: #cbd5e1; border-radius: 14px; font-size: .95rem; }
.sg-idle b { color: #f8fafc; font-size: 1.1rem; } .sg-idle span { color: #cbd5e1; }
h4 { margin: 16px 0 6px; font-size: .92rem; font-weight: 650; }
.sg-verdict b { font-size: 1.02rem; }
.sg-meter { position: relative; height: 8px; border-radius: 4px; background: var(--border-color-primary);
  margin: 8px 0 4px; }
.sg-meter i { position: absolute; inset: 0 auto 0 0; border-radius: 4px; background: #0d9488; }
.sg-meter u { position: absolute; top: -4px; bottom: -4px; width: 2px; background: #f59e0b; }
.sg-scroll { overflow-x: auto; }
.sg-scroll table { border-collapse: collapse; width: 100%; font-size: .84rem; border: 0 !important; }
.sg-scroll th { text-align: left; font-weight: 600; color: var(--body-text-color-subdued); }
.sg-scroll th, .sg-scroll td { padding: 4px 10px 4px 0 !important; border: 0 !important;
  border-bottom: 1px solid var(--border-color-primary) !important; }
.sg-scroll .sg-mark { text-align: center; width: 50px; padding: 4px 0 !important; }
td.sg-yes { color: #0d9488; font-weight: 700; } td.sg-no { color: #dc2626; font-weight: 700; }
tr.sg-rare td:first-child::before { content: "★ "; color: #d97706; }
.sg-examples { display: grid; gap: 10px; grid-template-columns: repeat(auto-fill, minmax(min(230px, 100%), 1fr)); }
.sg-example { display: flex; gap: 10px; font-size: .8rem; min-width: 0; }
.sg-example img { width: 92px; height: 92px; border-radius: 8px; image-rendering: pixelated; flex: none; }
.sg-example div { min-width: 0; overflow-wrap: anywhere; line-height: 1.4; }
.sg-example b { display: block; font-variant-numeric: tabular-nums; }
"""


# --- frames -------------------------------------------------------------------------------------------------------


def simulate_frames(folder: Path, seed: int, config: SimulatorConfig = STUDY, count: int = NUM_FRAMES) -> list[Sample]:
    """Some frames of an operation that no model was trained on.

    Args:
        folder: for the images.
        seed: which operation; the first ones are the test takes of the data set that `config` describes.
        config: of the data set whose tools are used.
        count: frames.
    """
    study = plan_study(config)
    turn, place = divmod(seed, len(study.splits["test"]))
    config = replace(config, seed=config.seed + turn)
    take = make_take(config, study, study.splits["test"][place])
    renderer = Renderer(take, config.views, config.size, config.seed)
    graphs = {labeled.frame: labeled.graph for labeled in take.labeled_frames()}
    samples = []
    for index in telling_frames([state.graph for state in take.states], count):
        state = take.states[index]
        names, paths = [], []
        for view, pixels in zip(config.views, renderer.render(state)):
            names.append(f"camera{view:02d}")
            paths.append(folder / f"{state.frame:06d}_{names[-1]}.jpg")
            # As the data set is written: what a model was trained on.
            Image.fromarray(pixels).save(paths[-1], quality=JPEG_QUALITY, subsampling=0)
        samples.append(
            Sample(
                id=f"{take.name}_{state.frame:06d}",
                take=take.name,
                frame=state.frame,
                seconds=state.seconds,
                views=tuple(paths),
                view_names=tuple(names),
                graph=graphs[state.frame],
            )
        )
    return samples


def read_pictures(paths: Sequence[str], limits: UploadLimits) -> Sample:
    """A visitor's pictures as the views of one frame.

    Raises:
        UploadError: none, too many, or one that isn't taken; says which.
    """
    if not 1 <= len(paths) <= MAX_PICTURES:
        raise UploadError(f"{len(paths)} pictures were given; allowed: 1 to {MAX_PICTURES}, one per view of a frame.")
    views = []
    for number, path in enumerate(paths, start=1):
        try:
            views.append(np.array(read_picture(path, limits)))
        except UploadError as error:
            raise UploadError(f"Picture {number}: {error}") from error
    names = tuple(f"view {number}" for number in range(1, len(views) + 1))
    return Sample(id="upload", take="upload", frame=0, seconds=0.0, views=tuple(views), view_names=names)


class SceneRun:
    """A visitor's frames.

    Args:
        folder: of their images and drawings; deleted when they are closed.
        samples: in order of time.

    Attributes:
        folder: as given.
        lock: held while one of them is read.
    """

    def __init__(self, folder: Path, samples: Sequence[Sample]) -> None:
        self.folder, self._samples = folder, tuple(samples)
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def busy(self) -> bool:
        """Whether a frame is being read."""
        return self.lock.locked()

    def sample(self, number: int) -> Sample:
        """A frame by its number from 1.

        Raises:
            DemoError: there is no such frame.
        """
        if not self._samples:
            raise DemoError("These frames are gone; simulate an operation or upload pictures again.")
        if number not in range(1, len(self) + 1):
            raise DemoError(f"There is no frame {number}; allowed: 1 to {len(self)}.")
        return self._samples[int(number) - 1]

    def close(self) -> None:
        """Free the pictures and delete the files."""
        self._samples = ()
        shutil.rmtree(self.folder, ignore_errors=True)


# --- readings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """What is said of a frame.

    Attributes:
        sample: the frame.
        output: of the pipeline for this frame alone; None without a model.
        threshold: of the router, None without one.
        tail_split: which predicates are rare, None where it isn't known.
    """

    sample: Sample
    output: SGGICLOutput | None = None
    threshold: float | None = None
    tail_split: TailSplit | None = None

    @property
    def rare(self) -> tuple[str, ...]:
        """Rare predicates."""
        return () if self.tail_split is None else self.tail_split.tail

    @property
    def draft(self) -> SceneGraph | None:
        """The first answer."""
        return None if self.output is None else self.output.drafts[0].graph

    @property
    def final(self) -> SceneGraph:
        """The answer; the truth without a model."""
        return self.sample.graph if self.output is None else self.output.graphs[0]

    @property
    def probability(self) -> float | None:
        """That a rare relation is in the frame, by the router; None where it wasn't asked."""
        if self.output is None or np.isnan(self.output.route_probabilities[0]):
            return None
        return self.output.route_probabilities[0]

    def to_dict(self) -> dict[str, Any]:
        """As JSON, see the API's `scene_graph`."""
        examples = [] if self.output is None else self.output.examples[0][::-1]
        return {
            "frame": self.sample.id,
            "routed": None if self.output is None else self.output.routed[0],
            "probability": self.probability,
            "threshold": self.threshold,
            "draft": _words(self.draft),
            "final": _words(self.final),
            "truth": _words(self.sample.graph),
            "rare": list(self.rare),
            "examples": [
                {"frame": example.sample.id, "score": float(example.score), "graph": _words(example.graph)}
                for example in examples
            ],
        }


def _words(graph: SceneGraph | None) -> list[tuple[str, str, str]] | None:
    return None if graph is None else [tuple(triplet.spo()) for triplet in graph.sorted()]


def read_frame(pipe: SGGICLPipeline | None, sample: Sample, policy: str) -> Reading:
    """Draft, route and answer one frame.

    Args:
        pipe: the model; without one the truth of a simulated frame is all there is.
        sample: the frame.
        policy: of [`~scene_graph.SGGICLConfig`].

    Raises:
        DemoError: neither a model nor a truth.
        SceneGraphError: the model has no parts for this policy.
    """
    if pipe is None:
        if sample.graph is None:
            raise DemoError(f"There is no model here that could read pictures. This trains one: {TRAIN}")
        return Reading(sample)
    output = pipe.with_config(policy=policy)([sample])
    threshold = None if pipe.router is None else float(pipe.router.threshold)
    return Reading(sample, output, threshold, None if pipe.index is None else pipe.tail_split)


def draw_reading(reading: Reading) -> Image.Image:
    """The picture of [`~scene_graph.draw_graph`]."""
    if reading.output is None:
        return draw_graph(reading.sample, reading.final)
    return draw_graph(
        reading.sample,
        reading.final,
        draft=reading.draft,
        examples=reading.output.examples[0],
        routed=reading.output.routed[0],
        tail_split=reading.tail_split,
    )


# --- HTML ---------------------------------------------------------------------------------------------------------


def views_html(sample: Sample, number: int, count: int) -> str:
    """The views of a frame, and which it is."""
    figures = [
        f"<figure><img src='{to_data_uri(pixels, 2 * THUMBNAIL_WIDTH)}' alt='{name}'>"
        f"<figcaption>{name}</figcaption></figure>"
        for name, pixels in zip(sample.view_names, sample.images())
    ]
    where = f"{sample.take}, frame {sample.frame}, {sample.seconds:.0f} s" if sample.graph is not None else "upload"
    return f"<div class='sg-views'>{''.join(figures)}</div><span class='sg-faint'>{number} of {count}: {where}</span>"


def reading_html(reading: Reading) -> str:
    """Verdict of the router, table of triplets, examples."""
    parts = [_verdict(reading), _table(reading)]
    if reading.output is not None and reading.output.examples[0]:
        parts.append(_examples(reading))
    return "".join(parts)


def _verdict(reading: Reading) -> str:
    if reading.output is None:
        return "<div class='sg-verdict'><b>The truth, by the simulator</b></div>"
    count = len(reading.output.examples[0])
    if not reading.output.routed[0]:
        text = "Not routed: the draft is the answer"
    elif count:
        text = f"A second look, with {count} example{'s' if count > 1 else ''}"
    else:
        text = "A second look was wanted, but no example is good enough: the draft is the answer"
    meter = ""
    if reading.probability is not None:
        place, mark = 100 * reading.probability, 100 * reading.threshold
        meter = (
            f"<div class='sg-meter'><i style='width:{place:.1f}%'></i><u style='left:{mark:.1f}%'></u></div>"
            f"<span class='sg-faint'>router: {reading.probability:.2f} that something rare is here; a second look "
            f"above {reading.threshold:.2f}</span>"
        )
    return f"<div class='sg-verdict'><b>{text}</b>{meter}</div>"


def _ranked(triplets: Iterable[Triplet], rare: Sequence[str]) -> list[Triplet]:
    """Rare relations first, the commonest last."""
    return sorted(
        triplets, key=lambda triplet: (triplet.predicate not in rare, triplet.predicate in UNLABELED, triplet)
    )


def _table(reading: Reading) -> str:
    columns: dict[str, SceneGraph] = {"draft": reading.draft, "final": reading.final, "truth": reading.sample.graph}
    if reading.output is None:
        columns = {"truth": reading.sample.graph}
    columns = {name: graph for name, graph in columns.items() if graph is not None}
    truth = columns.get("truth")
    rows = []
    for triplet in _ranked({triplet for graph in columns.values() for triplet in graph}, reading.rare):
        cells = []
        for graph in columns.values():
            is_right = truth is None or triplet in truth
            mark, style = ("●", "sg-yes" if is_right else "sg-no") if triplet in graph else ("", "")
            cells.append(f"<td class='sg-mark {style}'>{mark}</td>")
        kind = " class='sg-rare'" if triplet.predicate in reading.rare else ""
        words = "".join(f"<td>{html.escape(word)}</td>" for word in triplet.spo())
        rows.append(f"<tr{kind}>{words}{''.join(cells)}</tr>")
    if not rows:
        return "<h4>Relations</h4><span class='sg-faint'>none</span>"
    heads = "".join(f"<th class='sg-mark'>{name}</th>" for name in columns)
    note = " <span class='sg-faint'>★ rare; red: not in the truth</span>" if reading.output is not None else ""
    return (
        f"<h4>Relations{note}</h4><div class='sg-scroll'><table><tr><th>subject</th><th>predicate</th><th>object</th>"
        f"{heads}</tr>{''.join(rows)}</table></div>"
    )


def _examples(reading: Reading) -> str:
    cards = []
    for example in reading.output.examples[0][::-1]:
        ranked = _ranked((triplet for triplet in example.graph if triplet.predicate not in UNLABELED), reading.rare)
        words = "; ".join(html.escape(f"{t.subject} {t.predicate} {t.object}") for t in ranked)
        picture = to_data_uri(example.sample.image(), THUMBNAIL_WIDTH)
        cards.append(
            f"<div class='sg-example'><img src='{picture}' alt=''><div><b>score {example.score:.2f}</b>"
            f"<span class='sg-faint'>{html.escape(example.sample.id)}</span><br>{words or 'nothing but closeTo'}"
            "</div></div>"
        )
    return f"<h4>Examples it was shown, best first</h4><div class='sg-examples'>{''.join(cards)}</div>"


# --- the tab ------------------------------------------------------------------------------------------------------


def load_models(context: DemoContext) -> Mapping[str, SGGICLPipeline]:
    """The models given with `--tab-model scene-graph=FOLDER`, else the embedded one, if there is one.

    Raises:
        SceneGraphError: a folder holds no pipeline.
    """
    folders = context.config.tab_models.get(NAME)
    if folders is None:
        try:
            folders = [find_asset(DEFAULT_SCENE_GRAPH_MODEL)]
        except AssetError:
            folders = []
    device = str(context.video.device)
    return {name: SGGICLPipeline.from_pretrained(folder, device) for name, folder in folder_names(folders).items()}


def tab(context: DemoContext) -> DemoTab | None:
    """The tab; None where matplotlib, which draws the graphs, isn't installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    models = load_models(context)
    return DemoTab("Scene graph", lambda context: build(context, models), order=30)


def build(context: DemoContext, models: Mapping[str, SGGICLPipeline]) -> None:
    """Make the components and events of the tab."""
    config, drawing = context.config, threading.Lock()
    has_models, names, default = bool(models), list(models), next(iter(models), None)
    with gr.Row():
        with gr.Column(scale=4, min_width=300):
            if not has_models:
                gr.HTML(HOW_TO_TRAIN)
            seed = gr.Number(
                0,
                label="Operation",
                info="A number: each is another one.",
                precision=0,
                minimum=0,
                elem_id="scene-seed",
            )
            simulate = gr.Button("Simulate it", elem_id="scene-simulate")
            pictures = gr.File(
                label=f"Or pictures of one frame, one per view (up to {config.uploads.megabytes:g} MB each)",
                file_types=list(PICTURE_SUFFIXES),
                file_count="multiple",
                height=150,
                visible=has_models,
                elem_id="scene-pictures",
            )
            views = gr.HTML("", css_template=STYLE, elem_id="scene-views")
            frame = gr.Slider(1, NUM_FRAMES, 1, step=1, label="Frame", visible=False, elem_id="scene-frame")
            model = gr.Dropdown(names, value=default, label="Model", visible=has_models, elem_id="scene-model")
            second_look = gr.Radio(
                list(POLICIES),
                value=next(iter(POLICIES)),
                label="Second look with similar examples",
                visible=has_models,
                elem_id="scene-policy",
            )
            read = gr.Button("Read the frame", variant="primary", size="lg", elem_id="scene-read")
        with gr.Column(scale=7, min_width=320):
            answer = gr.HTML(IDLE, css_template=STYLE, elem_id="scene-answer")
            picture = gr.Image(
                label="Draft and final graph",
                show_label=False,
                type="filepath",
                format="png",
                interactive=False,
                visible=False,
                buttons=["download", "fullscreen"],
                elem_id="scene-picture",
                elem_classes="vg-wide",
            )

    def run_of(request: gr.Request) -> SceneRun:
        run = context.visitors.find(request.session_hash, PART)
        if run is None:
            raise DemoError("There are no frames of yours here (any more); simulate an operation or upload pictures.")
        return run

    def begin(make: Callable[[Path], Sequence[Sample]], request: gr.Request) -> list[Any]:
        visitor = context.visitors.welcome(request.session_hash)
        folder = visitor.folder / f"scene_{secrets.token_hex(4)}"
        folder.mkdir()
        run = SceneRun(folder, make(folder))
        visitor.put(PART, run)
        slider = gr.Slider(1, max(2, len(run)), 1, visible=len(run) > 1)
        return [views_html(run.sample(1), 1, len(run)), slider]

    def reading_of(model: str | None, second_look: str, number: int, request: gr.Request) -> Reading:
        if model and model not in models:
            raise DemoError(f"model {model!r} is unknown: {suggestion(model, models)}.")
        if second_look not in POLICIES:
            raise DemoError(f"second look {second_look!r} is unknown: {suggestion(second_look, POLICIES)}.")
        run = run_of(request)
        with run.lock, context.turns.turn():
            return read_frame(models.get(model or default), run.sample(number), POLICIES[second_look])

    @shown
    def on_simulate(seed: int, request: gr.Request) -> list[Any]:
        """Simulate an operation; its frames take the place of the ones before.

        Args:
            seed: which operation.
        """
        if seed is None or seed < 0:
            raise DemoError("The seed of an operation is a number from 0.")

        def make(folder: Path) -> list[Sample]:
            with context.turns.turn():
                return simulate_frames(folder, int(seed))

        return begin(make, request)

    @shown
    def on_upload(pictures: list[str] | None, request: gr.Request) -> list[Any]:
        """Take pictures as the views of one frame, the one that shows most first.

        Args:
            pictures: 1 to 6 files.
        """
        sample = read_pictures(pictures or [], config.uploads)
        return begin(lambda folder: [sample], request)

    @shown
    def on_show(number: int, request: gr.Request) -> str:
        """The views of a frame."""
        run = run_of(request)
        return views_html(run.sample(number), int(number), len(run))

    @shown
    def on_read(model: str | None, second_look: str, number: int, request: gr.Request) -> list[Any]:
        """Read a frame; returns what is said of it as HTML, and the drawing.

        Args:
            model: its name; None takes the first.
            second_look: where the router says so, always, or never.
            number: of the frame, from 1.
        """
        reading = reading_of(model, second_look, number, request)
        # One file for each answer there can be, however often it is asked for.
        which = f"{reading.sample.frame}_{names.index(model) if model else 0}_{list(POLICIES).index(second_look)}"
        path = run_of(request).folder / f"graph_{which}.png"
        with drawing:  # matplotlib isn't made for several threads
            draw_reading(reading).save(path)
        return [reading_html(reading), str(path)]

    @shown
    def on_graph(model: str | None, second_look: str, number: int, request: gr.Request) -> dict[str, Any]:
        """Read a frame; returns frame, routed, probability, threshold, draft, final, truth, rare and examples as JSON.

        The page itself doesn't use this. Arguments are those of `scene_read`.
        """
        return reading_of(model, second_look, number, request).to_dict()

    many = {"concurrency_limit": config.max_visitors, "show_progress": "hidden"}
    simulate.click(on_simulate, seed, [views, frame], api_name="scene_simulate", **many)
    pictures.upload(on_upload, pictures, [views, frame], api_name="scene_upload", **many)
    frame.change(on_show, frame, views, api_visibility="private", **many)
    answered = read.click(
        on_read,
        [model, second_look, frame],
        [answer, picture],
        api_name="scene_read",
        concurrency_limit=config.max_visitors,
        show_progress_on=answer,
    )
    answered.success(lambda: gr.Image(visible=True), None, picture, api_visibility="private")
    gr.api(on_graph, api_name="scene_graph", concurrency_limit=config.max_visitors)
