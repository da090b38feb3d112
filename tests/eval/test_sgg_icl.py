"""What would be wrong: a bar that anything passes, a void seed that others save, measurements of other sizes."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path

import pytest

EVAL = Path(__file__).resolve().parents[2] / "eval"
TOY = (
    "takes=18", "frames=24", "size=32", "looks=2", "predictor_steps=2", "encoder_steps=0", "reranker_steps=2",
    "hidden_size=16", "num_layers=1", "batch_size=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVAL)
        yield importlib.import_module("sgg_icl")


@pytest.fixture(scope="module")
def folder(benchmark, tmp_path_factory) -> Path:
    """A toy run."""
    folder = tmp_path_factory.mktemp("sgg_icl")
    options = ["--seeds", "0", "--set", *TOY, "--work", str(folder / "work"), "--out", str(folder / "out")]
    assert benchmark.main(options) == 0
    return folder


@pytest.fixture
def results(folder) -> dict:
    return json.loads((folder / "out/results.json").read_text())


def test_every_row_is_measured_and_shown(folder, results):
    assert results["benchmark"] == "sgg_icl"
    (run,) = results["seeds"].values()
    rows = {"base", "base_reweighted", "joint", "oracle_router/rerank", "routed/rerank, replaced"}
    rows |= {"routed/rerank, 1 of them", "routed/rerank, 2 of them"}
    rows |= {
        f"{policy}/{name}"
        for policy in ("icl_all", "routed")
        for name in ("random", "retrieval", "rerank", "oracle_iou")
    }
    assert set(run["rows"]) == rows and set(run["negative_control"]) == set(run["seen_looks"]) == rows
    chosen = run["num_examples"]["chosen"]
    assert chosen == (1 if run["num_examples"]["1"] >= run["num_examples"]["2"] else 2)
    assert run["rows"]["routed/rerank"] == run["rows"][f"routed/rerank, {chosen} of them"]
    table = (folder / "out/table.md").read_text()
    assert all(f"| {name} |" in table for name in rows)
    assert run["rankings"]["oracle_iou"]["iou_at_1"] == run["rankings"]["oracle_iou"]["best_iou"]
    assert (folder / "out/scores.png").stat().st_size > 5000


def test_a_second_run_trains_nothing_and_writes_the_same(benchmark, folder, results, monkeypatch):
    for name in ("train_predictor", "train_reranker", "train_router"):
        monkeypatch.setattr(benchmark.recipes, name, lambda *_: pytest.fail("it was trained again"))
    options = ["--seeds", "0", "--set", *TOY, "--work", str(folder / "work"), "--out", str(folder / "again")]
    assert benchmark.main(options) == 0
    assert json.loads((folder / "again/results.json").read_text())["seeds"] == results["seeds"]


def test_other_sizes_are_refused(benchmark, folder, capsys):
    options = ["--seeds", "0", "--set", *TOY[:-1], "--work", str(folder / "work"), "--out", str(folder / "other")]
    assert benchmark.main(options) == 2
    assert "begun with other sizes" in capsys.readouterr().err
    for wrong in ("steps=1", "takes=x", "takes=0"):
        assert benchmark.main(["--seeds", "0", "--set", wrong]) == 2


def passing(run: dict) -> dict:
    """A run that reaches every bar, just so."""
    run = copy.deepcopy(run)
    levels = {
        "base": 0.30, "base_reweighted": 0.35, "joint": 0.30, "routed/random": 0.31, "routed/retrieval": 0.35,
        "routed/rerank": 0.401, "routed/oracle_iou": 0.5,
    }  # fmt: skip
    for name, tail in levels.items():
        run["rows"][name].update(tail_f1=tail, head_f1=0.8, macro_f1=0.5 + 0.04 * (name == "routed/rerank"))
    run["rankings"]["rerank"]["iou_at_1"], run["rankings"]["retrieval"]["iou_at_1"] = 0.6, 0.4
    run["router"]["test_auc"] = 0.9
    run["negative_control"].update({"routed/rerank": 0.1, "joint": 0.1})
    return run


def test_bars_pass_and_each_fails_where_it_should(benchmark, results):
    (run,) = results["seeds"].values()
    good = passing(run)
    assert all(claim["passed"] for claim in benchmark.claims({0: good}))

    def failed(change) -> list[str]:
        bad = copy.deepcopy(good)
        change(bad)
        return [claim["claim"] for claim in benchmark.claims({0: bad}) if not claim["passed"]]

    assert "tail F1, routed/rerank - base" in failed(lambda bad: bad["rows"]["base"].update(tail_f1=0.32))
    assert failed(lambda bad: bad["rows"]["base"].update(head_f1=0.815))[0] == "head F1, routed/rerank - base"
    assert failed(lambda bad: bad["router"].update(test_auc=0.84)) == ["AUC of the router, test"]
    assert failed(lambda bad: bad["negative_control"].update(joint=0.2)) == [
        "negative control, |rerank - joint| on unseen looks"
    ]
    assert "tail F1, routed: rerank - retrieval" in failed(
        lambda bad: bad["rows"]["routed/retrieval"].update(tail_f1=0.39)
    )


def test_a_void_seed_is_not_saved_by_the_others(benchmark, results):
    (run,) = results["seeds"].values()
    good, void = passing(run), passing(run)
    void["rows"]["joint"]["head_f1"] = 0.7
    gate = benchmark.claims({0: good, 1: good, 2: void})[0]
    assert gate["value"] == pytest.approx(0.1) and not gate["passed"]
