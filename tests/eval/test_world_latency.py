"""What would be wrong: a bar any model passes, an arm that is timed on other work, results without their rounds."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from vidgen.pipelines.play import STARTS_NAME
from vidgen.runtime.checkpoint import save_safetensors

EVAL = Path(__file__).resolve().parents[2] / "eval"


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVAL)
        yield importlib.import_module("world_latency")


@pytest.fixture(scope="module")
def model(make_world_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_world_model().save_pretrained(folder)
    start = {"frames": torch.zeros(1, 2, 8, 8, 3, dtype=torch.uint8), "controls": torch.zeros(1, 2, 3)}
    save_safetensors(start, folder / STARTS_NAME)
    return folder


def test_all_caches_play_the_same_keys_and_are_reported(benchmark, model, tmp_path, capsys, monkeypatch):
    played: dict[str, list] = {}
    plain = benchmark.WorldModelPipeline.open_session

    def watched(pipe, *arguments, cache, **options):
        session = plain(pipe, *arguments, cache=cache, **options)
        step, keys = session.step, played.setdefault(cache, [])
        session.step = lambda control: keys.append(tuple(control)) or step(control)
        return session

    monkeypatch.setattr(benchmark.WorldModelPipeline, "open_session", watched)
    arguments = ["--model", str(model), "--frames", "3", "--rounds", "2", "--out", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    assert played["none"] == played["frame"] == played["rolling"] and len(set(played["none"])) > 1
    assert len(played["none"]) == 2 * (4 + 3)  # two rounds, each a window that isn't timed and 3 frames
    results = json.loads((tmp_path / "results.json").read_text())
    assert {cache: len(rounds) for cache, rounds in results["rounds"].items()} == dict.fromkeys(benchmark.CACHES, 2)
    assert all(row["ms"]["denoise"] > 0 for rounds in results["rounds"].values() for row in rounds)
    assert (tmp_path / "stages.png").stat().st_size > 1000
    assert capsys.readouterr().out.startswith("| cache | frames/s")


def test_a_missed_bar_fails_the_check(benchmark, model, tmp_path, monkeypatch):
    rates = {"none": 3.0, "frame": 6.0, "rolling": 9.0}
    row = {"ms": dict.fromkeys(benchmark.STAGES, 1.0)}
    monkeypatch.setattr(
        benchmark, "play", lambda pipe, start, cache, *rest: {"frames_per_second": rates[cache], **row}
    )
    arguments = ["--model", str(model), "--out", str(tmp_path), "--check"]
    assert benchmark.main(arguments) == 1
    assert "| frames/s with frame >= 8 | 6.00 | FAIL |" in (tmp_path / "table.md").read_text()
    rates.update(frame=8.0, none=9.0)
    assert benchmark.main(arguments) == 1
    rates.update(none=4.0)
    assert benchmark.main(arguments) == 0


def test_a_model_that_does_not_exist_is_one_line(benchmark, tmp_path, capsys):
    assert benchmark.main(["--model", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit):
        benchmark.main(["--rounds", "0"])
