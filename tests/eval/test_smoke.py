"""What would be wrong: a benchmark that no longer runs, or whose numbers point the wrong way."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vidgen.pipelines import ContextForcingPipeline
from vidgen.worlds import CameraMove, LandscapeWorld

EVAL = Path(__file__).resolve().parents[2] / "eval"


@pytest.fixture
def load_benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script as Python finds its neighbors when it is started: in its own folder first."""
    monkeypatch.syspath_prepend(EVAL)
    return importlib.import_module


@pytest.fixture(scope="module")
def model(make_pipeline: Callable[..., ContextForcingPipeline], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an untrained pipeline of 16x32 pixels at 12 fps, for prompts of a whole sentence."""
    folder = tmp_path_factory.mktemp("model")
    make_pipeline(max_sequence_length=64).save_pretrained(folder)
    return folder


def test_generation_cost_shows_which_memories_grow(load_benchmark, model, tmp_path, monkeypatch, capsys):
    benchmark = load_benchmark("generation_cost")
    # What the fresh process does, without starting one.
    benchmark.main(["--resident-only", "--chunks", "16", "--model", str(model)])
    growth = benchmark.add_growth(json.loads(capsys.readouterr().out.splitlines()[-1]), 16)
    monkeypatch.setattr(benchmark, "resident_in_fresh_process", lambda *_: growth)
    benchmark.main(["--smoke", "--model", str(model), "--out", str(tmp_path), "--seeds", "1"])

    results = json.loads((tmp_path / "results.json").read_text())
    nbytes = {name: measured["nbytes"][0] for name, measured in results["memories"].items()}
    assert nbytes["full"][-1] > 2 * nbytes["full"][5]
    assert nbytes["slow_fast"][-1] == nbytes["slow_fast"][8] == nbytes["sliding_window"][-1]
    flops = {name: measured["flops_per_chunk"] for name, measured in results["memories"].items()}
    assert flops["full"] > flops["slow_fast"] == flops["sliding_window"] > 0
    assert results["resident"]["memory_growth"] == 1
    assert all(0 < measured["utilization"] < 1 for measured in results["memories"].values())
    assert [row["latent_frames"] for row in results["one_shot"]] == [15, 30]
    assert {"versions", "cpu", "git_revision"} <= results["environment"].keys() and results["seeds"] == [0]
    table = (tmp_path / "table.md").read_text()
    assert "| slow_fast |" in table and "growth of resident memory" in table
    assert Image.open(tmp_path / "seconds_per_chunk.png").size == (840, 480)


def test_a_missed_bar_fails_only_when_asked_to_check(load_benchmark, model, tmp_path, monkeypatch):
    benchmark = load_benchmark("generation_cost")
    series = {"resident_bytes": [100] * 10 + [200] * 6, "memory_bytes": [10] * 16}
    monkeypatch.setattr(benchmark, "resident_in_fresh_process", lambda *_: benchmark.add_growth(series, 16))
    for name in ("measure_memories", "measure_one_shot", "measure_minute"):
        monkeypatch.setattr(benchmark, name, STAND_INS[name])
    monkeypatch.setattr(benchmark, "matmul_peak", lambda *_, **__: 1e9)
    arguments = ["--smoke", "--model", str(model), "--out", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    assert benchmark.main([*arguments, "--check"]) == 1
    assert "| growth of resident memory, slow_fast | 2.000 | 1.05 | FAIL |" in (tmp_path / "table.md").read_text()


MEASURED = {
    "seconds": [[1.0] * 16],
    "nbytes": [[1] * 16],
    "early_seconds": [1.0],
    "late_seconds": [1.0],
    "late_to_early": [1.0],
    "flops_per_chunk": 1,
    "flops_chunk_index": 8,
}
STAND_INS = {
    "measure_memories": lambda *_, **__: {name: dict(MEASURED) for name in ("full", "sliding_window", "slow_fast")},
    "measure_one_shot": lambda *_, **__: [],
    "measure_minute": lambda *_: [dict.fromkeys(("seconds", "text", "denoise", "commit", "decode", "write"), 1.0)],
}


def test_default_model_parts_merge_and_point_the_right_way(load_benchmark, model, tmp_path):
    benchmark = load_benchmark("default_model")
    arguments = ["--smoke", "--model", str(model), "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    benchmark.main([*arguments, "--parts", "recall", "contact_sheet", "--seeds", "2"])
    assert benchmark.main([*arguments, "--parts", "attributes", "drift", "--check"]) == 1  # it is untrained

    results = json.loads((tmp_path / "out" / "results.json").read_text())
    parts = results["parts"]
    assert parts.keys() == {"attributes", "drift", "recall", "contact_sheet"}
    gain = {row["memory"]: row["gain"] for row in parts["recall"]["rows"]}
    assert gain.keys() == {"world", "slow_fast", "sliding_window", "full"}
    assert gain["world"] > 3 and gain["world"] == max(gain.values())
    scores = parts["attributes"]
    assert all(len(score["interval"]) == 2 for score in scores["generated"].values())
    assert sum(map(sum, scores["real"]["biome"]["confusion"])) == benchmark.SMOKE.captions
    assert len(parts["drift"]["videos"]) == 3
    assert all(len(video["latent"]["first_mean"]) == 4 for video in parts["drift"]["videos"])
    attributes = ("biome", "time_of_day", "weather", "traveller")
    assert [claim["claim"] for claim in results["claims"]] == [f"accuracy of {name}" for name in attributes]
    with Image.open(tmp_path / "out" / parts["contact_sheet"]["file"]) as sheet:
        assert (sheet.format, sheet.size[0]) == ("JPEG", 6 * (2 * 32 + 3))
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| biome |" in table and "| generated, latents |" in table and "| 2 | slow_fast |" in table
    # One trained classifier serves all later runs on the same autoencoder.
    assert len(list((tmp_path / "cache").glob("*/classifier.safetensors"))) == 1


def test_results_of_other_weights_are_not_merged(load_benchmark, tmp_path):
    benchmark = load_benchmark("default_model")
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"model_checksum": "old", "smoke": False, "parts": {"recall": {"rows": []}}}))
    fresh = {"model_checksum": "new", "smoke": False, "parts": {"drift": {}}}
    assert benchmark.merge_results(path, fresh)["parts"].keys() == {"drift"}
    assert benchmark.merge_results(path, {**fresh, "model_checksum": "old"})["parts"].keys() == {"drift", "recall"}


def test_accuracy_and_confusion_of_known_readings(load_benchmark):
    benchmark = load_benchmark("default_model")
    truth = {"biome": "meadow", "time_of_day": "day", "weather": "rain", "traveller": "none"}
    readings = [truth, truth, truth, {**truth, "weather": "clear"}]
    scores = benchmark.score_attributes([truth] * 4, readings)
    assert scores["biome"]["accuracy"] == 1 and scores["biome"]["interval"] == [1, 1]
    assert scores["weather"]["accuracy"] == 0.75
    row, column = (scores["weather"]["values"].index(name) for name in ("rain", "clear"))
    assert scores["weather"]["confusion"][row][column] == 1


def test_held_out_scenes_ask_for_every_value_equally_often(load_benchmark):
    benchmark = load_benchmark("default_model")
    world = benchmark.LandscapeWorld()
    scenes = [benchmark.held_out_scene(world, index, 6.0) for index in range(480)]
    assert len({tuple(scene.attributes.values()) for scene in scenes}) == 480
    for name, values in benchmark.SCENE_ATTRIBUTES.items():
        counts = [sum(scene.attributes[name] == value for scene in scenes[:96]) for value in values]
        assert max(counts) - min(counts) <= 1


def test_landscape_revisits_goes_on_where_it_was(load_benchmark, model, tmp_path, monkeypatch):
    benchmark = load_benchmark("landscape_revisits")
    transformer = model / "transformer"
    arguments = ["--smoke", "--model", str(model), "--work", str(tmp_path / "work"), "--seeds", "0", "--videos", "2"]
    benchmark.main([*arguments, "--out", str(tmp_path / "first")])
    first = json.loads((tmp_path / "first" / "results.json").read_text())

    # Whatever is done already isn't generated again; an arm of other weights is.
    generated = []
    generate = benchmark.generate
    monkeypatch.setattr(benchmark, "generate", lambda *given: generated.append(given) or generate(*given))
    arguments += ["--out", str(tmp_path / "out"), "--baseline", str(transformer)]
    assert benchmark.main([*arguments, "--check"]) == 1  # A and B are the same weights
    assert len(generated) == 1
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    gains = {arm: benchmark.values(results["rows"], arm, 4.0, "psnr") for arm in (benchmark.A, benchmark.B, "world")}
    assert gains[benchmark.A] == gains[benchmark.B] == benchmark.values(first["rows"], benchmark.A, 4.0, "psnr")
    assert gains["world"][0] > 3 and gains["world"] > gains[benchmark.A]
    assert len(results["claims"]) == 8 and len(first["claims"]) == 4
    counts = [row["objects"]["other_videos"] for row in results["rows"]]
    assert len(counts) == 6 * 4 and all(count["seen"] + count["empty"] == 2 for count in counts)
    assert results["detector"]["rendered"].keys() >= {"average_precision", "base_rate", "f1"}
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| B memoryless teacher | 4 |" in table and "was not measured" not in table
    assert "was not measured" in (tmp_path / "first" / "table.md").read_text()
    assert Image.open(tmp_path / "out" / "gain_against_age.png").size == (1320, 504)
    # Two videos, a pair of pictures for each of four ages
    assert Image.open(tmp_path / "work" / "A_window_seed0.png").size == (4 * (2 * (2 * 32 + 2) + 8), 28 + 2 * (32 + 2))


def test_a_video_that_stands_still_gains_nothing_over_its_other_places(load_benchmark):
    benchmark = load_benchmark("landscape_revisits")
    moves = (CameraMove("pan right", 20.0, 12.0), CameraMove("pan left", 21.6, 12.0))
    world = LandscapeWorld(16, 32)
    bench = SimpleNamespace(world=world, moves=moves, sizes=benchmark.Sizes(ages=(5.0, 20.0, 40.0)))
    attributes = {"biome": "meadow", **benchmark.ATTRIBUTES}
    walk, other = (world.render(world.scene(seed=seed, moves=moves, **attributes)) for seed in range(2))
    still = np.repeat(walk[:1], len(walk), axis=0)
    for video, remembers in ((walk, True), (still, False)):
        compared = benchmark.Bench.compare(bench, benchmark.score_revisits, [video, other], 0)
        gains = {
            name: [revisit.psnr - revisit.chance[0] for revisit in revisits] for name, revisits in compared.items()
        }
        assert min(gains["other_videos"]) > 5
        assert min(gains["other_places"]) > 5 if remembers else gains["other_places"] == [0, 0, 0]


def test_bars_of_revisits_ask_for_more_than_both_references(load_benchmark):
    benchmark = load_benchmark("landscape_revisits")

    def rows(arm: str, gains: dict[float, float | None]) -> list[dict]:
        psnr, objects = ({"other_videos": {"gain": 1.0}}, {"other_videos": {"gain": None}})
        return [
            {"arm": arm, "age": age, "psnr": psnr, "objects": objects | {"other_videos": {"gain": gain}}}
            for age, gain in gains.items()
        ]

    own = rows(benchmark.A, {10.0: 0.0, 20.0: 0.4, 40.0: 0.2}) + rows(benchmark.A, {20.0: 0.2, 40.0: None})
    window = rows(benchmark.WINDOW, {10.0: 9.0, 20.0: 0.1, 40.0: 0.2})
    verdicts = {claim["claim"]: claim for claim in benchmark.claims(own + window)}
    at_20 = verdicts[f"objects: gain of {benchmark.A} at 20 s above {benchmark.WINDOW}"]
    assert at_20["value"] == pytest.approx(0.3) and at_20["above"] == 0.1 and at_20["passed"]
    assert not verdicts[f"objects: gain of {benchmark.A} at 40 s above {benchmark.WINDOW}"]["passed"]
    assert len(verdicts) == 4  # without a baseline there is no bar about it
