"""What would be wrong: a benchmark that passes where nothing was shown, measures twice, or fails a reached bar."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path

import pytest

EVAL = Path(__file__).resolve().parents[2] / "eval"
TOY = (
    "base_steps=2", "tune_steps=2", "batch_size=2", "hidden_size=16", "num_layers=1", "length=32", "words=8",
    "items=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVAL)
        yield importlib.import_module("mask_agnostic")


@pytest.fixture(scope="module")
def folder(benchmark, tmp_path_factory) -> Path:
    """A toy run."""
    folder = tmp_path_factory.mktemp("mask_agnostic")
    options = ["--seeds", "0", "--set", *TOY, "--work", str(folder / "work"), "--out", str(folder / "out")]
    assert benchmark.main(options) == 0
    return folder


@pytest.fixture
def results(folder) -> dict:
    return json.loads((folder / "out/results.json").read_text())


@pytest.fixture
def good(benchmark, results) -> dict:
    """A run that reaches every bar."""
    (run,) = copy.deepcopy(results["seeds"]).values()

    def put(probe, accuracies, entropies, tv):
        for extra, accuracy, entropy in zip((0, benchmark.MOST), accuracies, entropies, strict=True):
            benchmark.row_of(probe, extra).update(accuracy=accuracy, entropy=entropy, tv=tv if extra else 0.0)

    put(run["masks"]["base"], (0.75, 0.6875), (1.5, 2.5), 0.25)
    put(run["masks"]["ce"], (0.75, 0.75), (1.5, 1.5), 0.09)
    put(run["masks"]["ma"], (0.75, 0.75), (1.5, 1.5), 0.029)
    put(run["filler"], (0.75, 0.734375), (1.5, 1.75), 0.1)
    run["steps"]["base"][-1]["accuracy"] = 0.75
    return run


def test_every_row_is_measured_and_shown(benchmark, folder, results):
    (run,) = results["seeds"].values()
    assert set(run["masks"]) == set(run["steps"]) == set(run["attribution"]) == set(benchmark.ARMS)
    assert set(run["position"]) == {"base, block", "base, query", "ma, block", "ma, query", "ar, block"}
    assert set(run["cpu_seconds"]) == {*benchmark.ARMS, "ar"}
    table = (folder / "out/table.md").read_text()
    for name in (*benchmark.ARMS, "ar", "base, `.` in place of masks", "base, window of 8 masks"):
        assert f"| {name} |" in table
    assert results["verdict"] in table and (folder / "out/curves.png").stat().st_size > 5000


def test_the_arms_differ_in_beta_alone(folder):
    arms = [(folder / f"work/seed_0/{name}/config.yaml").read_text().splitlines() for name in ("ce", "ma")]
    differing = [a.strip().split(":")[0] for a, b in zip(*arms, strict=True) if a != b]
    assert sorted(differing) == ["beta", "output_dir"]


def test_a_finished_run_is_not_measured_again(benchmark, folder, results, monkeypatch):
    monkeypatch.setattr(benchmark, "mask_scaling_probe", None)
    options = ["--seeds", "0", "--set", *TOY, "--work", str(folder / "work"), "--out", str(folder / "again")]
    assert benchmark.main(options) == 0
    assert json.loads((folder / "again/results.json").read_text())["seeds"] == results["seeds"]
    assert benchmark.main([*options, "--check"]) == 1


def test_other_sizes_are_refused(benchmark, folder, capsys):
    options = ["--seeds", "0", "--set", *TOY[:-1], "--work", str(folder / "work"), "--out", str(folder / "other")]
    assert benchmark.main(options) == 2
    assert "begun with other sizes" in capsys.readouterr().err
    for wrong in ("steps=1", "items=0", "words=7"):
        assert benchmark.main(["--seeds", "0", "--set", wrong, "--out", str(folder / "wrong")]) == 2


def test_bars_pass_and_each_fails_where_it_should(benchmark, good):
    assert all(claim["passed"] for claim in benchmark.claims({0: good}))
    assert benchmark.verdict(benchmark.claims({0: good})) == "pass"

    def failed(change) -> list[str]:
        bad = copy.deepcopy(good)
        change(bad)
        found = benchmark.claims({0: good, 1: bad})
        assert benchmark.verdict(found) == "FAIL"
        return [claim["claim"] for claim in found if not claim["passed"]]

    row = benchmark.row_of
    assert failed(lambda bad: row(bad["masks"]["ma"], 64).update(tv=0.031)) == [
        "total variation 0 to 64 masks, ma / ce"
    ]
    assert failed(lambda bad: row(bad["masks"]["ma"], 64).update(accuracy=0.72)) == ["points ma loses to 64 masks"]
    assert failed(lambda bad: [row(bad["masks"]["ma"], extra).update(accuracy=0.72) for extra in (0, 64)]) == [
        "accuracy without extra masks, ma - base"
    ]
    assert failed(lambda bad: row(bad["filler"], 64).update(accuracy=0.6875))[0].startswith("accuracy that `.` costs")
    assert failed(lambda bad: bad["steps"]["base"][-1].update(accuracy=0.69)) == ["points that 16 steps win back"]


def test_a_base_that_is_not_distracted_shows_nothing(benchmark, good):
    benchmark.row_of(good["masks"]["base"], 64).update(accuracy=0.71, entropy=1.79)
    found = benchmark.claims({0: good})
    assert benchmark.verdict(found) == "inconclusive"
    assert [claim["passed"] for claim in found[-2:]] == [None, None]


def test_a_base_that_has_not_learned_the_task_shows_nothing(benchmark, good):
    for name in benchmark.ARMS:
        for extra in (0, benchmark.MOST):
            benchmark.row_of(good["masks"][name], extra)["accuracy"] -= 0.3
    assert benchmark.verdict(benchmark.claims({0: good})) == "inconclusive"


def test_a_distraction_that_only_shows_in_entropy_leaves_the_steps_undecided(benchmark, good):
    benchmark.row_of(good["masks"]["base"], 64).update(accuracy=0.71)
    found = benchmark.claims({0: good})
    assert [claim["passed"] for claim in found[-2:]] == [True, None] and found[-2]["claim"].startswith("entropy that")
    assert benchmark.verdict(found) == "pass"
