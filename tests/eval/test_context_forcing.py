"""What would be wrong: models of another budget in a result, a bar that nobody measured, hours lost to an option."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vidgen.runtime.errors import ConfigError
from vidgen.worlds.code_worlds import RoomsWorld

EVAL = Path(__file__).resolve().parents[2] / "eval"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported as Python finds its neighbors when it is started: in its own folder first."""
    monkeypatch.syspath_prepend(EVAL)
    return importlib.import_module("context_forcing")


@pytest.fixture
def measured(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Stand-ins of the parts, and a list of what was measured in a test."""
    calls: list[tuple[str, int]] = []

    def stand_in(part: str, result: dict[str, Any]) -> Callable[..., dict[str, Any]]:
        def measure(folder: Path, sizes: Any, seed: int) -> dict[str, Any]:
            calls.append((part, seed))
            return result

        return measure

    remembering, forgetful = ({**score(18), "hits": [hits] * 90} for hits in (9, 1))
    arms = {"A context teacher": remembering, "B memoryless teacher": forgetful, "C no stage 2": forgetful}
    script = {"full": {**remembering, "recall": dict.fromkeys(("1-8", "9-17", "18-35", "36-71"), 0.5)}}
    error = {name: {"clean": 0.1, "drifted": 0.2} for name in ("on", "off")}
    cost = {"full": {"seconds": {"10": 0.1}, "bytes": {"10": 1000}}}
    for part, result in (
        ("rooms", {"arms": arms}),
        ("panorama", {"sweep": script, "long pause": script, "error recycling": error}),
        ("cost", cost),
    ):
        monkeypatch.setitem(benchmark.PARTS, part, stand_in(part, result))
    return calls


def score(length: float) -> dict[str, Any]:
    recall = dict.fromkeys(("1-5", "6-14", "15-29", "30-59", "60-119"), 0.5)
    measured = {"agreement": 0.125, "validity": 0.1, "ecl_seconds": length}
    return {**measured, "recall": recall, "hits": [5] * 90, "counts": [10] * 90}


def results(out: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads((out / "results.json").read_text(), parse_constant=refuse)


def test_an_interrupted_benchmark_goes_on_and_its_parts_merge(benchmark, measured, tmp_path, capsys):
    work = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert benchmark.main([*work, "--seeds", "0", "1", "--parts", "rooms"]) == 0
    assert measured == [("rooms", 0), ("rooms", 1)]
    first = results(tmp_path / "out")
    assert first["cost"] == {"0": None, "1": None} and first["rooms verdict"]["A - B >= 0.20"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert "### Cost per chunk, 0 of 2 seeds\n\nNot measured: seed 0, 1." in table

    assert benchmark.main([*work, "--seeds", "0", "1", "--parts", "cost"]) == 0
    assert measured[2:] == [("cost", 0), ("cost", 1)]
    assert benchmark.main([*work, "--seeds", "0", "1"]) == 0
    assert measured[4:] == [("panorama", 0), ("panorama", 1)]
    complete = results(tmp_path / "out")
    assert complete["rooms"] == first["rooms"] and complete["cost"]["1"] and complete["panorama"]["1"]

    # Nothing is chosen, nothing is measured, everything is reported.
    assert benchmark.main([*work, "--seeds", "0", "1", "--parts"]) == 0
    assert len(measured) == 6 and results(tmp_path / "out").keys() == complete.keys()
    assert "Not measured" not in (tmp_path / "out" / "table.md").read_text()


def test_bars_are_not_decided_while_a_seed_is_missing(benchmark, measured, tmp_path):
    work = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    benchmark.main([*work, "--seeds", "0", "--parts", "rooms"])
    benchmark.main([*work, "--seeds", "0", "1", "--parts"])
    assert results(tmp_path / "out")["rooms verdict"] is None
    table = (tmp_path / "out" / "table.md").read_text()
    assert "### Rooms, 1 of 2 seeds\n\nNot measured: seed 1." in table and "- bars: not measured" in table
    assert "True" not in table


def test_a_number_that_does_not_exist_decides_no_bar(benchmark, tmp_path):
    latents = RoomsWorld().sample(2, 6, torch.Generator().manual_seed(0)).latents
    places = torch.arange(latents.shape[-1] // 2).expand(2, 6, -1)  # nothing ever leaves the view
    short = benchmark.score(latents, places, "rooms")
    assert short["ecl_seconds"] is None and benchmark.beyond_window(short) is None
    arms = {"A context teacher": short, "B memoryless teacher": score(0.0), "C no stage 2": score(0.0)}
    verdict = benchmark.rooms_verdict([{"arms": arms}])
    undecided = [name for name, value in verdict.items() if value is None]
    assert undecided == [name for name in verdict if name.startswith(("A - ", "ECL"))]
    table = benchmark.report({"rooms": {0: {"arms": arms}}}, benchmark.Sizes(), tmp_path)
    assert "- A - B >= 0.20: no value\n" in table and "A no value, B 0.500, C 0.500" in table
    assert "nan" not in table and results(tmp_path)["rooms verdict"]["A - B >= 0.20"] is None
    assert benchmark.known(math.nan) is None


def test_a_work_folder_belongs_to_its_sizes_from_the_moment_it_is_opened(benchmark, measured, tmp_path, capsys):
    work = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--seeds", "0"]
    benchmark.main([*work, "--set", "teacher_steps=4", "--parts"])  # interrupted before anything was finished
    assert benchmark.main([*work, "--set", "teacher_steps=5"]) == 2
    assert "begun with other sizes" in capsys.readouterr().err and not measured
    assert benchmark.main([*work, "--set", "teacher_steps=4"]) == 0
    # One that doesn't say what it was begun with is nobody's.
    (tmp_path / "old" / "seed_0" / "context_teacher").mkdir(parents=True)
    with pytest.raises(ConfigError, match="other sizes"):
        benchmark.WorkFolder(tmp_path / "old" / "seed_0", {})


@pytest.mark.parametrize(
    "options",
    [
        ["--set", "teacher_step=4"],
        ["--set", "teacher_steps"],
        ["--set", "teacher_steps=x"],
        ["--set", "teacher_steps=²"],
        ["--set", "teacher_steps=-1"],
        ["--set", "teacher_steps=0"],
        ["--set", "test_videos=1"],
        ["--set", "test_frames=10"],
        ["--set", "min_rollout=60"],
        ["--set", "min_rollout=2"],
        ["--seeds", "-1"],
        ["--seeds", "x"],
        ["--seeds", "0", "1", "0"],
        ["--seeds", "99999999999999999999"],
        ["--parts", "attic"],
        ["--out", "taken/out"],
        ["--out", "taken"],
        ["--work", "taken"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_one_line(benchmark, measured, options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("a file")
    try:
        status = benchmark.main(options)
    except SystemExit as stopped:
        status = stopped.code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert status == 2 and options[-1].split("=")[0].split("/")[0] in line and not measured


def test_videos_that_share_no_room_are_refused_before_the_training(benchmark, measured, tmp_path, capsys):
    options = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--seeds", "0", "1", "2", "3", "4"]
    assert benchmark.main([*options, "--set", "test_videos=2", "test_frames=3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: test_videos=2, test_frames=3, seed ") and "no place is shown by two videos" in line
    assert not measured and not (tmp_path / "work").exists()
    # The other parts don't look at them.
    benchmark.main([*options, "--set", "test_videos=2", "test_frames=3", "--parts", "cost"])
    assert measured == [("cost", seed) for seed in range(5)]


@pytest.mark.parametrize("name", ["default_model", "generation_cost", "landscape_revisits"])
@pytest.mark.parametrize("options", [["--out", "taken"], ["--model", "nowhere"], ["--seeds", "-1"]], ids=" ".join)
def test_a_wrong_option_is_one_line_in_every_benchmark(name, options, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EVAL)
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("a file")
    try:
        status = importlib.import_module(name).main(["--smoke", *options])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2 and options[-1] in capsys.readouterr().err.splitlines()[-1]
