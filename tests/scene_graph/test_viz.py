"""What would be wrong: a picture without one of its parts, labels nobody can read, or changes that don't show."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from scene_graph import viz
from scene_graph.predictors import Example
from scene_graph.schema import SceneDataError, SceneGraph, SceneGraphError, TailSplit, Triplet
from scene_graph.viz import draw_graph, draw_video
from vidgen.data import VideoReader

SPLIT = TailSplit(("closeTo",), ("drilling", "hammering"), {}, 0.1, "train")
DRAFT = SceneGraph(
    [
        Triplet("head surgeon", "holding", "instrument"),
        Triplet("head surgeon", "hammering", "patient"),
        Triplet("circulator", "closeTo", "instrument table"),
    ]
)
FINAL = SceneGraph([*list(DRAFT)[:1], Triplet("head surgeon", "drilling", "patient"), *list(DRAFT)[2:]])


@pytest.fixture
def texts(monkeypatch):
    """Every text of the pages drawn in a test, with what it covers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    found = []
    draw = FigureCanvasAgg.draw

    def remember(canvas):
        draw(canvas)
        for axes in canvas.figure.axes:
            legend = [] if axes.get_legend() is None else axes.get_legend().get_texts()
            found.extend((text.get_text(), text.get_window_extent()) for text in [*axes.texts, *legend])

    monkeypatch.setattr(FigureCanvasAgg, "draw", remember)
    return found


def count(image: Image.Image, color: str) -> int:
    """Pixels of exactly this color."""
    wanted = np.round(255 * np.array(to_rgb(color))).astype(int)
    return int((np.asarray(image).astype(int) == wanted).all(axis=-1).sum())


def test_a_change_shows_by_sign_color_and_line_style(rng, make_sample, texts):
    sample = make_sample(rng)
    same = draw_graph(sample, FINAL, draft=FINAL, tail_split=SPLIT)
    for change in (viz.ADDED, viz.REMOVED):
        assert count(same, viz._STYLES[change].color) == 0
    assert "★ drilling" in [text for text, _ in texts]
    texts.clear()
    changed = draw_graph(sample, FINAL, draft=DRAFT, tail_split=SPLIT)
    shown = [text for text, _ in texts]
    assert "+ ★ drilling" in shown and "− ★ hammering" in shown and "holding" in shown
    assert "+ only in the final graph" in shown and "− only in the draft" in shown and "★ rare predicate" in shown
    assert count(changed, viz._STYLES[viz.ADDED].color) > 200 and count(changed, viz._STYLES[viz.REMOVED].color) > 200
    assert len({(style.color, str(style.line), style.width) for style in viz._STYLES.values()}) == 3
    assert viz._STYLES[viz.REMOVED].line != viz._STYLES[viz.ADDED].line


def test_rare_predicates_are_marked_only_when_they_are_known(rng, make_sample, texts):
    sample = make_sample(rng)
    assert count(draw_graph(sample, FINAL, tail_split=SPLIT), viz._TAIL_FACE) > 200
    assert count(draw_graph(sample, FINAL), viz._TAIL_FACE) == 0
    assert "★ drilling" in [text for text, _ in texts] and "drilling" in [text for text, _ in texts]


def test_views_are_shown_whole_and_as_they_are(rng, make_sample, texts):
    colors = rng.integers(0, 256, (10, 3))
    views = [np.broadcast_to(color, (30, 40, 3)).astype(np.uint8) for color in colors]
    picture = draw_graph(views, FINAL)
    for color, view in zip(colors, views):
        area = (np.asarray(picture) == color).all(axis=-1)
        rows, columns = (np.flatnonzero(area.any(axis=axis)) for axis in (1, 0))
        assert area.sum() > 4000, "the view is too small"
        assert np.ptp(columns) / np.ptp(rows) == pytest.approx(view.shape[1] / view.shape[0], rel=0.05)
    assert {f"view {index}" for index in range(1, 11)} <= {text for text, _ in texts}
    draw_graph(make_sample(rng), FINAL)
    assert {"camera01", "camera02"} <= {text for text, _ in texts}


def test_examples_stand_below_with_score_and_overlap_best_first(rng, make_sample, texts):
    graphs = [DRAFT, FINAL, SceneGraph([Triplet("patient", "lyingOn", "operating table")])]
    samples = [make_sample(rng, take=f"take{index}") for index in range(3)]
    examples = [Example(sample, graph, score) for sample, graph, score in zip(samples, graphs, (0.25, 0.75, 0.5))]
    picture = draw_graph(make_sample(rng), FINAL, draft=DRAFT, examples=examples, routed=True, tail_split=SPLIT)
    without = draw_graph(make_sample(rng), FINAL, draft=DRAFT, routed=False)
    assert picture.height > without.height and picture.width == without.width == viz.WIDTH
    scores = sorted((box.x0, text) for text, box in texts if text.startswith("score"))
    assert [text for _, text in scores] == ["score 0.75, IoU 1.00", "score 0.50, IoU 0.00", "score 0.25, IoU 0.50"]
    shown = {text for text, _ in texts}
    assert {sample.id for sample in samples} <= shown and "★ head surgeon, drilling, patient" in shown
    assert any("routed: second look with 3 examples" in text for text in shown)
    assert any("not routed" in text for text in shown)


@pytest.mark.parametrize("seed", range(2))
def test_names_and_labels_are_inside_the_page_and_off_each_other(seed, make_graph, texts):
    rng = np.random.default_rng(seed)
    final = make_graph(rng, num_triplets=12)
    draft = SceneGraph([*list(final)[:8], *make_graph(rng, num_triplets=3)])
    picture = draw_graph(np.zeros((20, 20, 3), np.uint8), final, draft=draft, tail_split=SPLIT)
    boxes = {f"{index} {text}": box for index, (text, box) in enumerate(texts) if text}
    for name, box in boxes.items():
        assert min(box.x0, box.y0) >= 0 and box.x1 <= picture.width and box.y1 <= picture.height, name
    for (name, one), (other_name, other) in itertools.combinations(boxes.items(), 2):
        smaller = min(one.width * one.height, other.width * other.height)
        assert viz._overlap(one, other) < 0.35 * smaller, f"{name} lies on {other_name}"


@pytest.mark.parametrize(("subject", "object_"), [("patient", "drape"), ("drape", "patient")])
def test_an_arrow_points_at_the_object(subject, object_, texts):
    added = SceneGraph([Triplet(subject, "touching", object_)])
    picture = draw_graph(np.zeros((8, 8, 3), np.uint8), added, draft=SceneGraph([Triplet("a", "holding", "b")]))
    near = {}
    for name in (subject, object_):
        box = next(box for text, box in texts if text == name).padded(26)
        frame = picture.crop((int(box.x0), int(picture.height - box.y1), int(box.x1), int(picture.height - box.y0)))
        near[name] = count(frame, viz._STYLES[viz.ADDED].color)
    assert near[object_] > near[subject] + 20, "the head of an arrow is wider than its line"


def test_closeness_both_ways_is_one_quiet_line(texts):
    one, other = Triplet("patient", "closeTo", "circulator"), Triplet("circulator", "closeTo", "patient")
    assert len(viz._edges(SceneGraph([one, other]), None)) == 1
    assert len(viz._edges(SceneGraph([one, other]), SceneGraph([one]))) == 2
    draw_graph(np.zeros((8, 8, 3), np.uint8), SceneGraph([one, other]))
    assert sum(text == "closeTo" for text, _ in texts) == 1, "in the legend, and nowhere else"


def test_odd_graphs_can_be_drawn(texts):
    view = np.zeros((8, 8, 3), np.uint8)
    draw_graph(view, SceneGraph())
    assert "no relations" in [text for text, _ in texts]
    itself = SceneGraph([Triplet("patient", "touching", "patient"), Triplet("$a$", "x_1^2", "pa$tient")])
    draw_graph(view, itself)
    assert {"touching", "$a$", "x_1^2", "pa$tient"} <= {text for text, _ in texts}


def test_the_same_graph_is_the_same_picture(rng, make_sample, make_graph):
    sample, graph = make_sample(rng), make_graph(rng, num_triplets=6)
    shuffled = SceneGraph(list(graph)[::-1])
    assert draw_graph(sample, graph).tobytes() == draw_graph(sample, shuffled).tobytes()


def test_a_video_has_a_page_for_each_sample_with_everything_in_its_place(rng, make_sample, tmp_path, texts):
    samples = [make_sample(rng, frame=2 * frame) for frame in range(3)]
    graphs = [FINAL, DRAFT, SceneGraph()]
    path = draw_video(samples, graphs, tmp_path / "graphs.mp4", drafts=[DRAFT, DRAFT, FINAL], tail_split=SPLIT)
    reader = VideoReader(path)
    assert len(reader) == 3 and reader.fps == 0.5 and reader.width == viz.WIDTH
    places = [(box.x0, box.y0) for text, box in texts if text == "patient"]
    assert len(places) == 3 and len(set(places)) == 1
    assert np.abs(reader[0].astype(int) - reader[1]).mean() > 0.1


def test_wrong_input_is_refused(rng, make_sample, tmp_path):
    with pytest.raises(SceneGraphError, match="no view"):
        draw_graph([], FINAL)
    with pytest.raises(SceneDataError, match=r"float64 with shape \(8, 8, 3\)"):
        draw_graph(np.zeros((8, 8, 3)), FINAL)
    with pytest.raises(SceneGraphError, match="1 samples, 2 graphs"):
        draw_video([make_sample(rng)], [FINAL, FINAL], tmp_path / "a.mp4")
    with pytest.raises(SceneGraphError, match="0 samples, 0 graphs"):
        draw_video([], [], tmp_path / "a.mp4")
    assert not list(tmp_path.iterdir())
