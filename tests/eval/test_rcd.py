"""What would be wrong: a benchmark that measures twice, passes a missed bar, or fails a reached one."""

from __future__ import annotations

import copy
import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

EVAL = Path(__file__).resolve().parents[2] / "eval"
TOY = (
    "base_steps=3", "seqd_steps=2", "rcd_steps=2", "batch_size=4", "hidden_size=16", "num_layers=1", "puzzles=10",
    "tuning_puzzles=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVAL)
        yield importlib.import_module("rcd")


@pytest.fixture(scope="module")
def folder(benchmark, tmp_path_factory) -> Path:
    """A toy run."""
    folder = tmp_path_factory.mktemp("rcd")
    options = ["--seeds", "0", "--set", *TOY, "--work", str(folder / "work"), "--out", str(folder / "out")]
    assert benchmark.main(options) == 0
    return folder


@pytest.fixture
def results(folder) -> dict:
    return json.loads((folder / "out/results.json").read_text())


def test_every_row_is_measured_and_shown(benchmark, folder, results):
    (run,) = results["seeds"].values()
    assert set(run["grid"]) == set(benchmark.ROWS) and set(run["ablations"]) == set(benchmark.ABLATIONS)
    for clues, counts in benchmark.STEPS.items():
        assert all(set(run["grid"][name][str(clues)]) == set(map(str, counts)) for name in benchmark.ROWS)
    assert len(run["sweep"]["curves"]["seqd"]["accuracy"]) == len(benchmark.THRESHOLDS)
    table = (folder / "out/table.md").read_text()
    assert all(f"| {name} |" in table for name in benchmark.ROWS)
    assert (folder / "out/curves.png").stat().st_size > 5000


def test_ablations_are_trained_with_their_own_weights(benchmark, folder):
    bench = benchmark.Bench(benchmark.parse_sizes(benchmark.Sizes, TOY), 0, folder / "work")
    stored = {name: bench.load(name).generation_config.rcd for name in benchmark.ABLATIONS}
    assert stored["rcd"]["alpha"] == "entropy" and stored["inverse"]["alpha"] == "inverse"
    assert (stored["constant 0.3"]["constant"], stored["constant 1"]["constant"]) == (0.3, 1.0)
    assert stored["top 1"]["residual_topk"] == 1
    assert bench.load("seqd").generation_config.rcd is None


def test_a_second_run_trains_nothing_and_writes_the_same(benchmark, folder, results, monkeypatch):
    for name in ("train_masked_diffusion", "train_residual_context"):
        monkeypatch.setattr(benchmark.recipes, name, lambda *_: pytest.fail("it was trained again"))
    options = ["--seeds", "0", "--set", *TOY, "--work", str(folder / "work"), "--out", str(folder / "again")]
    assert benchmark.main(options) == 0
    assert json.loads((folder / "again/results.json").read_text())["seeds"] == results["seeds"]
    assert benchmark.main([*options, "--check"]) == 1


def test_merging_keeps_earlier_seeds_and_measures_those_asked_for_again(
    benchmark, folder, results, tmp_path, monkeypatch
):
    measured = []

    def run(bench) -> dict:
        measured.append(bench.seed)
        return copy.deepcopy(results["seeds"]["0"]) | {"again": True}

    monkeypatch.setattr(benchmark.Bench, "run", run)
    shutil.copytree(folder / "out", tmp_path / "out")
    options = ["--set", *TOY, "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--seeds"]

    def merged(*seeds: str) -> dict:
        assert benchmark.main([*options, *seeds, "--merge"]) == 0
        return json.loads((tmp_path / "out/results.json").read_text())

    with_ten, again = merged("10", "2"), merged("0")
    assert list(with_ten["seeds"]) == ["0", "2", "10"] and measured == [10, 2, 0]
    assert with_ten["seeds"]["0"] == results["seeds"]["0"] and "again" in with_ten["seeds"]["10"]
    assert all(claim["by_seed"].keys() == with_ten["seeds"].keys() for claim in with_ten["claims"])
    assert "again" in again["seeds"]["0"] and again["seeds"]["10"] == with_ten["seeds"]["10"]
    # Without it, results are those of the seeds asked for.
    assert benchmark.main([*options, "2"]) == 0
    assert list(json.loads((tmp_path / "out/results.json").read_text())["seeds"]) == ["2"]


def test_merging_with_other_sizes_is_refused_before_anything_is_measured(benchmark, folder, tmp_path, capsys):
    options = ["--seeds", "1", "--work", str(tmp_path / "work"), "--out", str(folder / "out"), "--merge"]
    assert benchmark.main([*options, "--set", *TOY, "puzzles=11"]) == 2
    assert "was measured with other sizes; give the same, or another --out" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_other_sizes_are_refused(benchmark, folder, capsys):
    options = ["--seeds", "0", "--set", *TOY[:-1], "--work", str(folder / "work"), "--out", str(folder / "other")]
    assert benchmark.main(options) == 2
    assert "begun with other sizes" in capsys.readouterr().err
    for wrong in ("steps=1", "puzzles=x", "puzzles=0"):
        assert benchmark.main(["--seeds", "0", "--set", wrong, "--out", str(folder / "wrong")]) == 2


def test_bars_pass_and_each_fails_where_it_should(benchmark, results):
    (run,) = results["seeds"].values()
    good = copy.deepcopy(run)
    good["cpu_seconds"].update(seqd=10.0, rcd=10.0)
    good["grid"]["base"]["3"]["13"] = 95.0
    for clues, steps in (("3", "5"), ("5", "3")):
        for name, solved in (("seqd", 50.0), ("rcd_cold", 58.0), ("inject", 40.0)):
            good["grid"][name][clues][steps] = solved
    assert all(claim["passed"] for claim in benchmark.claims({0: good}))

    def failed(change) -> list[str]:
        bad = copy.deepcopy(good)
        change(bad)
        # One seed that misses a bar isn't saved by another that reaches it.
        return [claim["claim"] for claim in benchmark.claims({0: good, 1: bad}) if not claim["passed"]]

    for clues, steps in (("3", "5"), ("5", "3")):
        for name, solved in (("rcd_cold", 57.9), ("inject", 40.1)):
            missed = failed(lambda bad: bad["grid"][name][clues].update({steps: solved}))  # noqa: B023 (called at once)
            assert missed == [f"{clues} clues, {steps} steps: {name} - seqd"]
    assert failed(lambda bad: bad["cpu_seconds"].update(seqd=9.0)) == ["gate: CPU time of seqd / rcd"]
    assert failed(lambda bad: bad["grid"]["base"]["3"].update({"13": 94.0})) == [
        "gate: base, 3 clues, one cell per step, %"
    ]


def test_the_distance_of_curves_by_hand(benchmark):
    forwards = {"seqd": np.array([2.0, 6.0]), "rcd_cold": np.array([4.0, 8.0])}
    accuracy = {"seqd": np.array([0.0, 0.4]), "rcd_cold": np.array([0.5, 0.9])}
    # From 4 to 6 forwards: 0.2 to 0.4 against 0.5 to 0.7.
    assert benchmark._area(accuracy, forwards) == pytest.approx(0.3)
    forwards["rcd_cold"] = np.array([7.0, 8.0])
    assert np.isnan(benchmark._area(accuracy, forwards))
