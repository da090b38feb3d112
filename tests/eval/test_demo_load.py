"""What would be wrong: a load nobody bears, a lost session that counts as an answer, a bar that anything passes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")
EVAL = Path(__file__).resolve().parents[2] / "eval"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EVAL)
    # Without a network gradio would wait for its own servers; it looks when it is imported.
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    return importlib.import_module("demo_load")


@pytest.fixture
def serve(benchmark: Any, make_pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a demo of a tiny random model, in this process, in the place of the one that would be started."""
    from vidgen.demo import context as context_module
    from vidgen.demo.app import launch
    from vidgen.demo.context import DemoConfig, DemoContext
    from vidgen.demo.visitors import Visitors

    monkeypatch.setenv("GRADIO_TEMP_DIR", "")
    monkeypatch.setattr(context_module, "entry_points", lambda group: [])
    contexts = []

    @contextlib.contextmanager
    def started_demo(model: str | None, visitors: int) -> Iterator[tuple[str, int]]:
        config = DemoConfig(tmp_path / "demo", max_visitors=visitors, idle_seconds=0)
        config.output.mkdir()
        places = Visitors(config.output / "visitors", visitors, config.idle_seconds, config.forget_seconds)
        context = DemoContext(config, make_pipeline(max_sequence_length=64), {}, places)
        contexts.append(context)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        app, address = launch(context, port=port, block=False)
        try:
            yield address, os.getpid()
        finally:
            app.close()
            places.close()

    monkeypatch.setattr(benchmark, "started_demo", started_demo)
    return contexts


def test_visitors_are_served_and_counted(benchmark: Any, serve: Any, tmp_path: Path, capsys: Any) -> None:
    assert benchmark.main(["--smoke", "--seconds", "0.5", "--out", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["errors"] == results["lost"] == [] and results["visitors"] == 2
    assert all(rounds >= 1 for rounds in results["rounds"]) and len(results["rounds"]) == 2
    counts = {what: row["count"] for what, row in results["requests"].items()}
    total = sum(results["rounds"])
    assert counts == {"video": total, "game": total, "step": 4 * total, "undo": total}
    sizes = results["resident_bytes"]
    assert 0 < sizes["empty"] <= sizes["peak"] and sizes["begin"] <= sizes["peak"] and sizes["end"] <= sizes["peak"]
    assert "| video |" in capsys.readouterr().out and (tmp_path / "out/table.md").is_file()


def test_a_session_that_is_thrown_out_is_lost_and_fails_the_check(
    benchmark: Any, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = benchmark.Visit._begin

    def begin_and_be_thrown_out(visit: Any, seed: int) -> None:
        played(visit, seed)
        serve[0].visitors.close()

    monkeypatch.setattr(benchmark.Visit, "_begin", begin_and_be_thrown_out)
    arguments = ["--smoke", "--visitors", "1", "--seconds", "0.1", "--out", str(tmp_path / "out"), "--check"]
    assert benchmark.main(arguments) == 1
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["errors"] == [] and any(text.startswith("step: ") for text in results["lost"])
    assert any(text.startswith("undo: ") for text in results["lost"])


def test_each_bar_fails_where_it_should(benchmark: Any) -> None:
    good = {"errors": [], "lost": [], "resident_bytes": {"begin": 1000, "end": 1250}}
    assert all(claim["passed"] for claim in benchmark.claims(good))
    worse = [{"errors": ["video: x"]}, {"lost": ["undo: x"]}, {"resident_bytes": {"begin": 1000, "end": 1251}}]
    for number, change in enumerate(worse):
        assert [claim["passed"] for claim in benchmark.claims({**good, **change})].index(False) == number


def test_a_demo_that_does_not_start_is_one_line(benchmark: Any, tmp_path: Path, capsys: Any) -> None:
    assert benchmark.main(["--smoke", "--model", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "the demo doesn't start" in error and "is not a folder" in error
    with pytest.raises(SystemExit):
        benchmark.main(["--visitors", "0", "--out", str(tmp_path / "out")])
