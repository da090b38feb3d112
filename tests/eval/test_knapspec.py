"""What would be wrong: a measurement that is made twice, sizes that are mixed, a bar that anything passes."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path

import pytest

EVAL = Path(__file__).resolve().parents[2] / "eval"
TOY = (
    "steps=2", "length=64", "vocab_size=300", "hidden_size=32", "num_layers=4", "texts=2", "past=16", "calibration=8",
    "scored=16", "draws=2", "prompts=1", "new_tokens=8", "repeats=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVAL)
        yield importlib.import_module("knapspec")


@pytest.fixture(scope="module")
def folder(benchmark, tmp_path_factory) -> Path:
    """A toy run."""
    folder = tmp_path_factory.mktemp("knapspec")
    (folder / "text").mkdir()
    for number in range(240):
        text = "\n".join(f"def function_{number}_{line}(x):\n    return x + {line}" for line in range(20))
        (folder / f"text/{number}.py").write_text(text)
    assert benchmark.main(arguments(folder, "out")) == 0
    return folder


def arguments(folder: Path, out: str, sizes: tuple[str, ...] = TOY) -> list[str]:
    options = [
        "--seeds",
        "0",
        "--contexts",
        "16",
        "32",
        "--text",
        str(folder / "text"),
        "--work",
        str(folder / "work"),
    ]
    return [*options, "--out", str(folder / out), "--set", *sizes]


@pytest.fixture
def results(folder) -> dict:
    return json.loads((folder / "out/results.json").read_text())


def test_every_row_is_measured_and_shown(benchmark, folder, results):
    (run,) = results["seeds"].values()
    assert set(run["selection"]) == set(benchmark.SELECTIONS)
    assert all(list(by_count) == ["2", "4"] for by_count in run["selection"].values())
    for rows in run["speed"]["contexts"].values():
        assert list(rows) == ["ar", "plain", "early_exit:1", "static_skip:2", "clasp:1", "knapspec"]
        assert all(row["differences_are_ties"] and row["predicted"] > 0 for row in rows.values())
    table = (folder / "out/table.md").read_text()
    assert all(f"| {name} |" in table for name in (*benchmark.SELECTIONS, "32 | knapspec"))


def test_a_second_run_measures_nothing_and_writes_the_same(benchmark, folder, results, monkeypatch):
    monkeypatch.setattr(benchmark, "train_causal_lm", lambda *_: pytest.fail("it was trained again"))
    monkeypatch.setattr(benchmark, "benchmark", lambda *_, **__: pytest.fail("it was measured again"))
    assert benchmark.main(arguments(folder, "again")) == 0
    assert json.loads((folder / "again/results.json").read_text())["seeds"] == results["seeds"]


def test_other_sizes_are_refused(benchmark, folder, capsys):
    assert benchmark.main(arguments(folder, "other", TOY[:-1])) == 2
    assert "begun with other sizes" in capsys.readouterr().err
    for wrong in ("step=1", "steps=x", "steps=0", "num_layers=3"):
        assert benchmark.main(["--seeds", "0", "--set", wrong]) == 2


def passing(run: dict) -> dict:
    """A run that reaches every bar, just so."""
    run = copy.deepcopy(run)
    counts = ["4", "6", "10", "12"]
    for name, value in {"knapspec": 0.9, "clasp": 0.88, "static": 0.865, "random": 0.8, "early_exit": 0.5}.items():
        run["selection"][name] = dict.fromkeys(counts, value)
    run["selection"]["random"]["10"] = 0.95
    speeds = {"ar": 1.0, "early_exit:1": 0.9, "static_skip:2": 1.05, "clasp:1": 1.08, "knapspec": 1.11}
    for rows in run["speed"]["contexts"].values():
        for name, value in speeds.items():
            rows[name].update(cpu_speedup=value, predicted=value, plan_share=0.05, differences_are_ties=True)
    return run


def test_bars_pass_and_each_fails_where_it_should(benchmark, results):
    (run,) = results["seeds"].values()
    good = passing(run)
    assert all(claim["passed"] for claim in benchmark.claims({0: good}))

    def failed(change) -> list[int]:
        bad = copy.deepcopy(good)
        change(bad)
        return [number for number, claim in enumerate(benchmark.claims({0: bad})) if not claim["passed"]]

    def rows(bad: dict, context: str) -> dict:
        return bad["speed"]["contexts"][context]

    assert failed(lambda bad: bad["selection"]["clasp"].update({"6": 0.91})) == [0]
    assert failed(lambda bad: bad["selection"]["static"].update({"12": 0.88})) == [1]
    assert failed(lambda bad: rows(bad, "16")["clasp:1"].update(differences_are_ties=False)) == [2]
    assert 3 in failed(lambda bad: rows(bad, "16")["knapspec"].update(cpu_speedup=0.96))
    assert failed(lambda bad: rows(bad, "32")["knapspec"].update(cpu_speedup=1.09)) == [4]
    assert failed(lambda bad: rows(bad, "16")["knapspec"].update(plan_share=0.11)) == [5]
    assert failed(lambda bad: [rows(bad, c)["knapspec"].update(predicted=0.1) for c in ("16", "32")]) == [6]


def test_the_prediction_is_the_time_of_a_mean_round(benchmark, results):
    from vidgen.language.decoding.latency import LatencyProfile

    (run,) = results["seeds"].values()
    known = {name: tuple(v) if isinstance(v, list) else v for name, v in run["speed"]["profile"].items()}
    profile = LatencyProfile(**known)
    assert benchmark.predicted_speed(profile, 50, {}) == pytest.approx(1 / profile.pass_seconds(50))
    row = {"drafting_rounds": 1.0, "drafted_per_round": 3.0, "accept_length": 2.0, "skipped": [2, 3]}
    seconds = 3 * profile.pass_seconds(50, skip=[2, 3]) + profile.pass_seconds(50, 4)
    assert benchmark.predicted_speed(profile, 50, row) == pytest.approx(3 / seconds)
