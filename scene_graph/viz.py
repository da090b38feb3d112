"""Pictures of scene graphs: what the cameras saw, what was answered, what a second look changed, what it was shown.

A change is told by color and by line style, so that it survives a gray printer: relations of both answers are thin and
dark, those that only the final graph has thick and green with a plus, those that only the draft has dashed and red
with a minus. Rare predicates stand on yellow, with a star.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from scene_graph.schema import Sample, SceneGraph, SceneGraphError, TailSplit, Triplet, load_image, triplet_iou

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    from scene_graph.predictors import Example

# Pixels.
WIDTH, GRAPH_WIDTH, GRAPH_HEIGHT = 1680, 1060, 780
HEADER_HEIGHT, LEGEND_HEIGHT, EXAMPLE_HEIGHT = 46, 40, 320
MARGIN = 14
MAX_EXAMPLE_LINES = 9
DPI = 100
# Steps of a line's bend that are tried, as a share of its length.
_BENDS = (0.1, -0.1, 0.22, -0.22, 0.34, -0.34, 0.46, -0.46, 0.6, -0.6)
# Predicates that most pairs have: their lines are drawn, but only a change of them is worth a label.
UNLABELED = ("closeTo",)

KEPT, ADDED, REMOVED = "kept", "added", "removed"


@dataclass(frozen=True)
class _Style:
    color: str
    width: float
    line: Any
    sign: str
    legend: str


# Green and vermilion of a palette for the color-blind (Okabe and Ito).
_STYLES = {
    KEPT: _Style("#3b4656", 1.5, "-", "", "in the graph"),
    ADDED: _Style("#00805c", 3.0, "-", "+ ", "only in the final graph"),
    REMOVED: _Style("#d1480b", 2.2, (0, (4, 2.5)), "− ", "only in the draft"),
}
_CLOSE_COLOR = "#aeb6c2"
_TAIL_FACE, _TAIL_STAR = "#ffe680", "★ "
_INK, _FAINT = "#1d2430", "#8b94a3"


@dataclass(frozen=True)
class _Edge:
    subject: str
    object: str
    predicate: str
    change: str

    @property
    def is_labeled(self) -> bool:
        return self.predicate not in UNLABELED or self.change != KEPT


def draw_graph(
    sample_or_images: Sample | np.ndarray | Sequence[np.ndarray],
    graph: SceneGraph,
    *,
    draft: SceneGraph | None = None,
    examples: Sequence[Example] | None = None,
    routed: bool | None = None,
    tail_split: TailSplit | None = None,
) -> Image.Image:
    """One frame as a picture: its views on the left, its graph on the right, the examples that were used below.

    Args:
        sample_or_images: a sample, or its views: uint8 `(height, width, 3)` or several of them, of any sizes.
        graph: the answer.
        draft: the answer before the second look; differences are marked.
        examples: what stood in the prompt; the best-scored one is drawn first.
        routed: whether the frame got a second look; None leaves it unsaid.
        tail_split: which predicates are rare, to mark them.

    Returns:
        An RGB image, 1680 pixels wide.

    Raises:
        SceneGraphError: no view, or matplotlib isn't installed.
        SceneDataError: an image is missing, damaged, or no uint8 `(height, width, 3)`.
    """
    views = _views(sample_or_images)
    edges = _edges(graph, draft)
    entities = sorted({name for edge in edges for name in (edge.subject, edge.object)})
    places = _arrange(entities, edges)
    header = _header(sample_or_images, routed, examples)
    return _Page(views, places, tail_split).draw(edges, graph, header, examples)


def draw_video(
    samples: Sequence[Sample],
    graphs: Sequence[SceneGraph],
    path: str | os.PathLike,
    *,
    drafts: Sequence[SceneGraph] | None = None,
    tail_split: TailSplit | None = None,
    fps: float | None = None,
) -> Path:
    """A video of frames beside their graphs; an entity has the same place all the time.

    Args:
        samples: frames in order of time.
        graphs: the answer for each.
        path: of the mp4 file, which appears when it is whole.
        drafts: answers before the second look; differences are marked.
        tail_split: which predicates are rare, to mark them.
        fps: of the written video; by default the pace at which the samples were taken.

    Returns:
        The path.

    Raises:
        SceneGraphError: no samples, or not one graph (and draft) for each.
        VideoWriteError: the file can't be written.
    """
    from vidgen.data import VideoWriter

    lengths = {len(samples), len(graphs), len(graphs if drafts is None else drafts)}
    if len(lengths) > 1 or not samples:
        raise SceneGraphError(
            f"{len(samples)} samples, {len(graphs)} graphs"
            + ("" if drafts is None else f", {len(drafts)} drafts")
            + "; a video needs at least one sample, and one of each for it."
        )
    all_edges = [_edges(*pair) for pair in zip(graphs, drafts or [None] * len(graphs))]
    union = list({(edge.subject, edge.object): edge for edges in all_edges for edge in edges}.values())
    places = _arrange(sorted({name for edge in union for name in (edge.subject, edge.object)}), union)
    if fps is None:
        steps = np.diff([sample.seconds for sample in samples])
        fps = 1 / float(np.median(steps)) if len(steps) and np.median(steps) > 0 else 1.0
    with VideoWriter(path, fps=fps) as writer:
        for sample, graph, edges in zip(samples, graphs, all_edges):
            page = _Page(_views(sample), places, tail_split).draw(edges, graph, _header(sample, None, None), None)
            writer.append(np.asarray(page)[None])
    return Path(path)


def _views(sample_or_images: Sample | np.ndarray | Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    if isinstance(sample_or_images, Sample):
        return dict(zip(sample_or_images.view_names, sample_or_images.images()))
    images = [sample_or_images] if isinstance(sample_or_images, np.ndarray) else list(sample_or_images)
    if not images:
        raise SceneGraphError("no view was given; allowed: a sample, or at least one uint8 (height, width, 3) array.")
    return {f"view {index + 1}" if len(images) > 1 else "": load_image(image) for index, image in enumerate(images)}


def _header(sample: Any, routed: bool | None, examples: Sequence[Example] | None) -> str:
    parts = [f"{sample.take}, frame {sample.frame}, {sample.seconds:g} s"] if isinstance(sample, Sample) else []
    if routed is not None:
        number = len(examples or ())
        second_look = f"second look with {number} example{'s' if number != 1 else ''}"
        parts.append(f"routed: {second_look}" if routed else "not routed: the draft is the answer")
    return "   |   ".join(parts)


# --- what is drawn where -----------------------------------------------------------------------------------------


def _edges(graph: SceneGraph, draft: SceneGraph | None) -> list[_Edge]:
    """Every relation of either graph; a closeTo that goes both ways is one line."""
    changes = {triplet: KEPT if draft is None or triplet in draft else ADDED for triplet in graph.sorted()}
    if draft is not None:
        changes |= {triplet: REMOVED for triplet in draft.sorted() if triplet not in graph}
    edges = []
    for triplet, change in sorted(changes.items(), key=lambda item: (list(_STYLES).index(item[1]), item[0])):
        mirrored = Triplet(triplet.object, triplet.predicate, triplet.subject)
        if triplet.predicate in UNLABELED and changes.get(mirrored) == change and mirrored < triplet:
            continue
        edges.append(_Edge(triplet.subject, triplet.object, triplet.predicate, change))
    return edges


def _arrange(entities: Sequence[str], edges: Sequence[_Edge]) -> dict[str, tuple[float, float]]:
    """Places on an ellipse, in pixels of the graph panel: few crossings, related entities near each other.

    Swaps of two places are kept while they help, always in the same order, so that equal graphs are drawn equally.
    """
    if not entities:
        return {}
    angles = np.pi / 2 - 2 * np.pi * np.arange(len(entities)) / len(entities)
    # A superellipse: names are wide, so those at the sides need more room than those at top and bottom.
    x, y = (np.sign(value) * np.abs(value) ** 0.8 for value in (np.cos(angles), np.sin(angles)))
    points = np.stack([GRAPH_WIDTH * (0.5 + 0.385 * x), GRAPH_HEIGHT * (0.5 + 0.42 * y)], axis=-1)
    order = {name: index for index, name in enumerate(entities)}
    # A crossing of labeled lines is worse than one of lines that are only a backdrop.
    weights: dict[tuple[str, str], int] = {}
    for edge in edges:
        if edge.subject != edge.object:
            pair = (min(edge.subject, edge.object), max(edge.subject, edge.object))
            weights[pair] = max(weights.get(pair, 1), 2 if edge.is_labeled else 1)

    def cost() -> float:
        ends = [(*sorted((order[one], order[other])), weight) for (one, other), weight in weights.items()]
        lengths = sum(weight * float(np.linalg.norm(points[a] - points[b])) for a, b, weight in ends)
        crossings = sum(
            one * other
            for (a, b, one), (c, d, other) in itertools.combinations(ends, 2)
            if a < c < b < d or c < a < d < b
        )
        return crossings + lengths / GRAPH_HEIGHT

    best, is_better = cost(), True
    while is_better:
        is_better = False
        for one, other in itertools.combinations(entities, 2):
            order[one], order[other] = order[other], order[one]
            changed = cost()
            if changed < best - 1e-9:
                best, is_better = changed, True
            else:
                order[one], order[other] = order[other], order[one]
    return {name: (float(points[index][0]), float(points[index][1])) for name, index in order.items()}


class _Page:
    """A figure whose axes count in pixels, so that labels can be kept off each other."""

    def __init__(
        self, views: Mapping[str, np.ndarray], places: Mapping[str, tuple[float, float]], tail_split: TailSplit | None
    ) -> None:
        self.views = views
        self.places = places
        self.tail = set(tail_split.tail) if tail_split is not None else set()

    def draw(
        self, edges: Sequence[_Edge], graph: SceneGraph, header: str, examples: Sequence[Example] | None
    ) -> Image.Image:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise SceneGraphError("drawing needs matplotlib: pip install 'vidgen[scene-graph]'") from error
        height = HEADER_HEIGHT + GRAPH_HEIGHT + LEGEND_HEIGHT + (EXAMPLE_HEIGHT if examples else 0)
        height += height % 2  # video codecs want even sizes
        figure = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        top = height - HEADER_HEIGHT
        title = self._axes(figure, 0, top, WIDTH, HEADER_HEIGHT)
        title.text(MARGIN, HEADER_HEIGHT / 2, header, va="center", fontsize=14, color=_INK, parse_math=False)
        self._draw_views(figure, top)
        self._draw_graph(figure, top, edges)
        self._draw_legend(figure, top - GRAPH_HEIGHT - LEGEND_HEIGHT, edges)
        if examples:
            self._draw_examples(figure, graph, examples)
        canvas.draw()
        return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())

    def _axes(self, figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
        page_width, page_height = figure.get_size_inches() * DPI
        axes = figure.add_axes((left / page_width, bottom / page_height, width / page_width, height / page_height))
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(0, height))
        return axes

    def _show(
        self, figure: Figure, image: np.ndarray, left: float, bottom: float, width: float, height: float
    ) -> None:
        axes = figure.add_axes((0, 0, 1, 1), zorder=1)
        axes.set_axis_off()
        scale = min(width / image.shape[1], height / image.shape[0])
        size = (scale * image.shape[1], scale * image.shape[0])
        left, bottom = left + (width - size[0]) / 2, bottom + (height - size[1]) / 2
        page_width, page_height = figure.get_size_inches() * DPI
        axes.set_position((left / page_width, bottom / page_height, size[0] / page_width, size[1] / page_height))
        # The pixels of tiny renders are shown as they are.
        axes.imshow(image, interpolation="nearest" if scale > 1.5 else "antialiased", aspect="auto")

    # --- views ---------------------------------------------------------------------------------------------------

    def _draw_views(self, figure: Figure, top: float) -> None:
        width, height = WIDTH - GRAPH_WIDTH - 2 * MARGIN, GRAPH_HEIGHT
        columns = next(columns for columns in itertools.count(1) if -(-len(self.views) // columns) <= 2 * columns)
        rows = -(-len(self.views) // columns)
        cell_width, cell_height = width / columns, min(height / rows, 0.9 * width / columns + 24)
        panel = self._axes(figure, MARGIN, top - height, width, height)
        for index, (name, image) in enumerate(self.views.items()):
            row, column = divmod(index, columns)
            left, bottom = column * cell_width, height - (row + 1) * cell_height
            self._show(figure, image, MARGIN + left + 3, top - height + bottom + 4, cell_width - 6, cell_height - 26)
            panel.text(
                left + cell_width / 2,
                bottom + cell_height - 12,
                name,
                ha="center",
                va="center",
                fontsize=11,
                color=_INK,
                parse_math=False,
            )

    # --- graph ---------------------------------------------------------------------------------------------------

    def _draw_graph(self, figure: Figure, top: float, edges: Sequence[_Edge]) -> None:
        axes = self._axes(figure, WIDTH - GRAPH_WIDTH, top - GRAPH_HEIGHT, GRAPH_WIDTH, GRAPH_HEIGHT)
        axes.axvline(0.5, color="#d5dae1", linewidth=1)
        if not edges:
            axes.text(
                GRAPH_WIDTH / 2, GRAPH_HEIGHT / 2, "no relations", ha="center", va="center", fontsize=16, color=_FAINT
            )
        nodes = {name: self._draw_node(axes, name, edges) for name in self.places}
        bends = self._bends(edges, {name: _corners(node) for name, node in nodes.items()})
        boxes = [node.get_window_extent() for node in nodes.values()]
        # Thin lines first, so that changes lie above them.
        for edge in sorted(edges, key=lambda edge: edge.is_labeled):
            self._draw_line(axes, edge, nodes, bends[edge])
        curves = {edge: self._curve(edge, bends[edge]) for edge in edges if edge.is_labeled}
        for edge, curve in curves.items():
            others = np.concatenate([np.empty((0, 2)), *(other[1:-1] for one, other in curves.items() if one != edge)])
            boxes.append(self._draw_label(axes, edge, curve, boxes, axes.transData.transform(others)))

    def _draw_node(self, axes: Axes, name: str, edges: Sequence[_Edge]) -> FancyBboxPatch:
        from matplotlib.patches import FancyBboxPatch

        changes = {edge.change for edge in edges if name in (edge.subject, edge.object)}
        style = _STYLES[next(iter(changes)) if len(changes) == 1 else KEPT]
        is_here = bool(changes)
        text = axes.text(
            *self.places[name],
            name,
            ha="center",
            va="center",
            fontsize=13,
            color=_INK if is_here else "#c3c9d2",
            zorder=6,
            parse_math=False,
        )
        # A frame of its own: the one that a text can have isn't where it will be before the page is drawn, and lines
        # have to end at it.
        extent = text.get_window_extent().transformed(axes.transData.inverted())
        return axes.add_patch(
            FancyBboxPatch(
                extent.min,
                extent.width,
                extent.height,
                boxstyle="round,pad=8",
                facecolor="#eef2f7" if is_here else "white",
                edgecolor=style.color if is_here else "#dfe3e9",
                linewidth=1.3 if style is _STYLES[KEPT] else 2.2,
                linestyle=style.line,
                zorder=5,
            )
        )

    def _bends(
        self, edges: Sequence[_Edge], boxes: Mapping[str, tuple[float, float, float, float]]
    ) -> dict[_Edge, float]:
        """How much each line is bent: as little as keeps it off other names, and off other lines of its pair."""
        sides: dict[tuple[str, str], list[float]] = {}
        bends = {}
        for edge in edges:
            # A bend to the left of one direction is one to the right of the other.
            sign = 1 if edge.subject < edge.object else -1
            taken = sides.setdefault((min(edge.subject, edge.object), max(edge.subject, edge.object)), [])
            length = float(np.linalg.norm(np.subtract(self.places[edge.subject], self.places[edge.object])))
            distance = max(0.2, 70 / max(length, 1))
            costs = []
            for bend in _BENDS:
                curve = self._curve(edge, bend)
                hidden = sum(
                    ((curve > (left, bottom)) & (curve < (right, top))).all(axis=1).sum()
                    for name, (left, bottom, right, top) in boxes.items()
                    if name not in (edge.subject, edge.object)
                )
                outside = ((curve < 0) | (curve > (GRAPH_WIDTH, GRAPH_HEIGHT))).any(axis=1).sum()
                crowded = sum(max(0.0, distance - abs(sign * bend - other)) for other in taken)
                costs.append(hidden + outside + 50 * crowded + abs(bend))
            bends[edge] = _BENDS[int(np.argmin(costs))]
            taken.append(sign * bends[edge])
        return bends

    def _draw_line(self, axes: Axes, edge: _Edge, nodes: Mapping[str, FancyBboxPatch], bend: float) -> None:
        from matplotlib.patches import FancyArrowPatch

        style = _STYLES[edge.change]
        is_quiet = not edge.is_labeled
        if edge.subject == edge.object:  # models do say such things: a loop to the right of the name
            _, bottom, right, top = _corners(nodes[edge.subject])
            ends: dict[str, Any] = {"posA": (right - 8, top), "posB": (right - 8, bottom)}
            bend = -2.5
        else:
            ends = {"posA": self.places[edge.subject], "posB": self.places[edge.object]}
            ends |= {"patchA": nodes[edge.subject], "patchB": nodes[edge.object]}
        axes.add_patch(
            FancyArrowPatch(
                **ends,
                arrowstyle="-" if is_quiet else "-|>",
                mutation_scale=16,
                connectionstyle=f"arc3,rad={bend}",
                shrinkA=1,
                shrinkB=1,
                color=_CLOSE_COLOR if is_quiet else style.color,
                linewidth=1.2 if is_quiet else style.width,
                linestyle=(0, (1, 2)) if is_quiet else style.line,
                zorder=2 if is_quiet else 3,
            )
        )

    def _curve(self, edge: _Edge, bend: float) -> np.ndarray:
        """Points of a line from subject to object, `(points, 2)`; the same curve as matplotlib's `arc3`."""
        start, end = (np.array(self.places[name]) for name in (edge.subject, edge.object))
        if edge.subject == edge.object:
            return start + np.array([[130.0, 0.0]] * 3)
        middle = (start + end) / 2 + bend * np.array([end[1] - start[1], start[0] - end[0]])
        share = np.linspace(0, 1, 41)[:, None]
        return (1 - share) ** 2 * start + 2 * share * (1 - share) * middle + share**2 * end

    def _draw_label(
        self, axes: Axes, edge: _Edge, curve: np.ndarray, boxes: Sequence[Bbox], lines: np.ndarray
    ) -> Bbox:
        """The predicate on its curve, where it covers least of other labels, names and curves."""
        is_tail = edge.predicate in self.tail
        style = _STYLES[edge.change]
        label = axes.text(
            0,
            0,
            style.sign + (_TAIL_STAR if is_tail else "") + edge.predicate,
            ha="center",
            va="center",
            fontsize=11.5,
            fontweight="bold" if is_tail or edge.change != KEPT else "normal",
            color=style.color,
            zorder=6,
            parse_math=False,
            bbox={
                "boxstyle": "round,pad=0.18",
                "facecolor": _TAIL_FACE if is_tail else "white",
                "edgecolor": style.color if is_tail else "none",
                "linewidth": 0.8,
                "alpha": 1 if is_tail else 0.92,
            },
        )
        costs = []
        for index in sorted(range(len(curve)), key=lambda index: abs(index - len(curve) // 2)):
            label.set_position(curve[index])
            box = _box(label)
            covered = sum(_overlap(box, other) for other in boxes)
            inside = (lines > [box.x0, box.y0]) & (lines < [box.x1, box.y1])
            off_middle = abs(index / (len(curve) - 1) - 0.5)
            costs.append((covered + 60 * inside.all(axis=1).sum() + 400 * off_middle, index))
        label.set_position(curve[min(costs)[1]])
        return _box(label)

    def _draw_legend(self, figure: Figure, bottom: float, edges: Sequence[_Edge]) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        axes = self._axes(figure, WIDTH - GRAPH_WIDTH, bottom, GRAPH_WIDTH, LEGEND_HEIGHT)
        changes = {edge.change for edge in edges}
        handles = [
            Line2D(
                [], [], color=style.color, linewidth=style.width, linestyle=style.line, label=style.sign + style.legend
            )
            for change, style in _STYLES.items()
            if change in changes
        ]
        if not all(edge.is_labeled for edge in edges):
            quiet = {"color": _CLOSE_COLOR, "linewidth": 1.5, "linestyle": (0, (1, 2))}
            handles.append(Line2D([], [], label=", ".join(UNLABELED), **quiet))
        if any(edge.predicate in self.tail for edge in edges):
            handles.append(
                Patch(facecolor=_TAIL_FACE, edgecolor=_INK, linewidth=0.8, label=f"{_TAIL_STAR}rare predicate")
            )
        if handles:
            axes.legend(
                handles=handles, loc="center", ncols=len(handles), frameon=False, fontsize=11, handlelength=2.6
            )

    # --- examples ------------------------------------------------------------------------------------------------

    def _draw_examples(self, figure: Figure, graph: SceneGraph, examples: Sequence[Example]) -> None:
        panel = self._axes(figure, 0, 0, WIDTH, EXAMPLE_HEIGHT)
        panel.axhline(EXAMPLE_HEIGHT - 1, color="#d5dae1", linewidth=1)
        panel.text(
            MARGIN,
            EXAMPLE_HEIGHT - 18,
            "Examples in the prompt, best score first. Relations in dark are in the final graph, too.",
            va="center",
            fontsize=12,
            color=_INK,
        )
        width = (WIDTH - 2 * MARGIN) / max(3, len(examples))
        ranked = sorted(examples, key=lambda example: -example.score)
        for index, example in enumerate(ranked):
            left, image_width = MARGIN + index * width, min(0.37 * width, 250)
            self._show(figure, example.sample.image(), left, 14, image_width - 12, EXAMPLE_HEIGHT - 54)
            overlap = triplet_iou(example.graph, graph)
            lines = [
                (f"score {example.score:.2f}, IoU {overlap:.2f}", _INK, True, False),
                (example.sample.id, _FAINT, False, False),
                *self._lines(example.graph, graph),
            ]
            for row, (text, color, is_bold, is_tail) in enumerate(lines):
                line = panel.text(
                    left + image_width,
                    EXAMPLE_HEIGHT - 50 - 22 * row,
                    text,
                    va="center",
                    fontsize=10,
                    color=color,
                    fontweight="bold" if is_bold else "normal",
                    parse_math=False,
                )
                if is_tail:
                    line.set_bbox({"boxstyle": "round,pad=0.12", "facecolor": _TAIL_FACE, "edgecolor": "none"})
                while line.get_window_extent().width > width - image_width - 12 and len(text) > 1:
                    text = text[:-1]
                    line.set_text(f"{text}…")

    def _lines(self, example: SceneGraph, graph: SceneGraph) -> Iterable[tuple[str, str, bool, bool]]:
        """Text, color, bold, rare: rare relations first, the unlabeled ones last."""
        ranked = sorted(
            example.sorted(), key=lambda triplet: (triplet.predicate not in self.tail, triplet.predicate in UNLABELED)
        )
        shown = ranked if len(ranked) <= MAX_EXAMPLE_LINES else ranked[: MAX_EXAMPLE_LINES - 1]
        for triplet in shown:
            is_tail = triplet.predicate in self.tail
            text = f"{_TAIL_STAR if is_tail else ''}{triplet.subject}, {triplet.predicate}, {triplet.object}"
            yield text, _INK if triplet in graph else _FAINT, False, is_tail
        if len(shown) < len(ranked):
            yield f"and {len(ranked) - len(shown)} more", _FAINT, False, False


def _box(text: Text) -> Bbox:
    """What a text and the frame around it cover; the frame's own extent follows only when the page is drawn."""
    pad = text.get_bbox_patch().get_boxstyle().pad * text.get_fontsize() * DPI / 72
    return text.get_window_extent().padded(pad)


def _corners(node: FancyBboxPatch) -> tuple[float, float, float, float]:
    """Left, bottom, right and top of a node in the pixels of its axes."""
    (left, bottom), (right, top) = node.axes.transData.inverted().transform(node.get_window_extent())
    return left, bottom, right, top


def _overlap(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(width, 0) * max(height, 0)
