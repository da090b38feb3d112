"""What would be wrong: a bar that a slow or a lost key passes, a table of other games, a way in that isn't checked."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")
EVAL = Path(__file__).resolve().parents[2] / "eval"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EVAL)
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    return importlib.import_module("demo_round_trip")


def game(trips: list[float], lost: int = 0) -> dict[str, Any]:
    return {"trips": trips, "model": [trip - 40 for trip in trips], "lost": lost}


def test_the_bar_is_for_the_median_of_every_game_with_the_model_alone(benchmark: Any) -> None:
    fast, slow = [150.0, 160.0, 500.0], [150.0, 201.0, 500.0]

    def passed(alone: list[dict[str, Any]], beside: list[dict[str, Any]]) -> list[bool]:
        measured = {
            name: {str(seed): row for seed, row in enumerate(games)}
            for name, games in (("alone", alone), ("beside the renderers", beside))
        }
        return [claim["passed"] for claim in benchmark.claims(measured)]

    assert passed([game(fast), game(fast)], [game(slow, lost=1)]) == [True, True]
    assert passed([game(fast), game(slow)], [game(fast)]) == [False, True]
    assert passed([game(fast), game(fast, lost=1)], [game(fast)]) == [True, False]
    assert passed([game([], lost=3)], [game(fast)]) == [False, False]


def test_bad_arguments_are_one_line(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for keys in ("0", "1001", "few"):
        with pytest.raises(SystemExit):
            benchmark.main(["--keys", keys, "--out", str(tmp_path)])
        assert "--keys" in capsys.readouterr().err


@pytest.mark.xdist_group("browser")
@pytest.mark.flaky(reruns=1)  # as the tests of the page
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, such as Debian's package chromium")
def test_keys_change_the_picture_of_the_embedded_level(benchmark: Any, tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="needs playwright")
    assert benchmark.main(["--seeds", "3", "--keys", "2", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["benchmark"] == "demo_round_trip"
    assert set(results["measured"]) == {"alone", "beside the renderers"}
    for games in results["measured"].values():
        (played,) = games.values()
        assert len(played["trips"]) == len(played["model"]) == 2 and played["lost"] == 0
        assert all(trip > model > 0 for trip, model in zip(played["trips"], played["model"], strict=True))
    assert "| alone |" in (tmp_path / "table.md").read_text()
