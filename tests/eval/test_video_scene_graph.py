"""What would be wrong: steadiness of other frames than the video's, or a video that is wrongly left out or let in."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from scene_graph.schema import Sample, SceneGraph, Triplet, Vocabulary
from vidgen.data import VideoWriter

EVAL = Path(__file__).resolve().parents[2] / "eval"
LIE = Triplet("patient", "lyingOn", "operating table")
HOLD = Triplet("head surgeon", "holding", "instrument")


class Stand:
    """Sees the hold in bright frames."""

    predictor = SimpleNamespace(vocabulary=Vocabulary.or4d())

    def __call__(self, samples: Sequence[Sample]) -> SimpleNamespace:
        graphs = [SceneGraph([LIE, HOLD] if sample.image().mean() > 128 else [LIE]) for sample in samples]
        return SimpleNamespace(graphs=graphs, routed=[HOLD in graph for graph in graphs])


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The script as Python finds its neighbors when it is started: in its own folder first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVAL)
        yield importlib.import_module("video_scene_graph")


def write_video(path: Path, seconds_bright: Sequence[bool], fps: int = 4) -> Path:
    values = np.repeat(np.where(seconds_bright, 220, 30), fps)
    with VideoWriter(path, fps=fps) as writer:
        writer.append(np.broadcast_to(values[:, None, None, None], (len(values), 32, 48, 3)).astype(np.uint8))
    return path


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    write_video(folder / "steady.mp4", [True] * 7)
    write_video(folder / "flickering.mp4", [True, False, True, True, True, True, True])
    return folder


def test_a_flickering_video_is_told_from_a_steady_one(benchmark, videos, tmp_path, capsys):
    condition = tmp_path / "graphs.json"
    rows = [list(triplet.spo()) for triplet in (LIE, HOLD)]
    condition.write_text(json.dumps({"steady": rows, "flickering": [*rows, ["head surgeon", "juggling", "patient"]]}))
    paths = [str(videos / f"{name}.mp4") for name in ("steady", "flickering")]
    options = ["--model", "stand", "--fps", "1", "--condition", str(condition), "--out", str(tmp_path / "out")]
    assert benchmark.main([*paths, *options], pipeline=Stand()) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    steady, flickering = (results["videos"][name]["consistency"] for name in ("steady", "flickering"))
    assert (steady["num_frames"], steady["triplet_jaccard"], steady["agreement"]) == (7, 1, 1)
    # 7 graphs in 6 s: the hold is gone once, so 2 of 6 pairs share 1 of 2 triplets.
    assert flickering["triplet_jaccard"] == pytest.approx((4 + 2 / 2) / 6)
    assert flickering["flicker_per_minute"] == {"holding": 10, "lyingOn": 0}
    assert flickering["agreement"] == pytest.approx((6 + 2 / 3) / 7)
    assert results["videos"]["flickering"]["share_routed"] == pytest.approx(6 / 7)
    assert results["videos"]["flickering"]["samples"][1] == {"seconds": 1, "graph": [list(LIE.spo())]}
    assert results["unknown_condition_words"] == {"juggling": 1}
    table = capsys.readouterr().out
    assert table == (tmp_path / "out" / "table.md").read_text() + "\n"
    assert "| flickering | 7 | 0 | 0.833 | 0.833 | 10.0 | 0.909 |  | 0.952 |" in table


def test_the_rate_decides_how_many_graphs_there_are(benchmark, videos):
    samples = benchmark.measure(videos / "flickering.mp4", Stand(), 4, None)["samples"]
    assert len(samples) == 28
    assert [len(sample["graph"]) for sample in samples] == [2] * 4 + [1] * 4 + [2] * 20


@pytest.mark.parametrize(
    ("videos_given", "options", "message"),
    [
        (["nowhere.mp4"], [], "nowhere.mp4"),
        (["steady.mp4"], ["--fps", "0.1"], "raise --fps"),
        (["steady.mp4"], ["--fps", "0"], "fps=0"),
        (["steady.mp4", "steady.mp4"], [], "several videos are named steady"),
        (["steady.mp4"], ["--condition", "graphs.json"], "has no graph for video 'steady'; did you mean 'steadi'"),
    ],
)
def test_wrong_input_is_named_and_writes_nothing(benchmark, videos, tmp_path, capsys, videos_given, options, message):
    (tmp_path / "graphs.json").write_text('{"steadi": []}')
    options = [str(tmp_path / word) if word.endswith(".json") else word for word in options]
    paths = [str(videos / name) for name in videos_given]
    out = tmp_path / "out"
    assert benchmark.main([*paths, "--model", "stand", "--out", str(out), *options], pipeline=Stand()) == 2
    assert message in capsys.readouterr().err and not list(out.iterdir())
