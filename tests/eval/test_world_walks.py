"""The benchmark of walks: arms that know the truth score as they must, and a toy model runs through."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib (extra: eval)")
pytest.importorskip("pyarrow", reason="needs pyarrow (extra: train)")

from vidgen.controls import CAMERA_SPEC, ControlEncoder, PoseControls, Walk
from vidgen.data import EpisodeDataset, make_world, record
from vidgen.runtime.errors import ConfigError

EVAL = Path(__file__).resolve().parents[2] / "eval"
SIZES = ["walks=2", "frames=8", "prompt_frames=2"]


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVAL)
        yield importlib.import_module("world_walks")


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("walks") / "episodes"
    world = make_world("room", 16)
    for split, count in (("train", 2), ("test", 3)):
        record(world, root, count, 12, split)
    return root


@pytest.fixture(scope="module")
def model(make_world_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    walk = Walk(make_world("room", 16).delta_controls.spec)
    encoder = ControlEncoder(PoseControls(CAMERA_SPEC), "map", (0.12,), (8, 8), in_world=True, walk=walk)
    folder = tmp_path_factory.mktemp("models") / "world"
    make_world_model(encoder).save_pretrained(folder)
    return folder


def test_a_toy_model_is_measured_and_an_interrupted_run_goes_on(
    benchmark, episodes: Path, model: Path, tmp_path: Path, capsys
):
    arguments = [f"--episodes={episodes}", "--models", f"toy={model}", "--seeds", "0", "1", "--set", *SIZES]
    folders = [f"--out={tmp_path}/out", f"--work={tmp_path}/work"]
    assert benchmark.main([*arguments, *folders]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    arms = results["seeds"]["0"]
    assert list(arms) == ["toy", "toy, rolling", "nearest", "still", "autoencoder"]
    assert all(len(arm[score]) == 4 for arm in arms.values() for score in ("psnr", "sharpness"))
    assert arms["toy"] != results["seeds"]["1"]["toy"]
    assert (tmp_path / "out/psnr.png").stat().st_size > 1000 and "| toy, rolling |" in capsys.readouterr().out
    stored = tmp_path / "work/seed_1_still.json"
    stored.write_text(json.dumps({"psnr": [1.0, 2.0, 3.0, 4.0], "sharpness": [1.0] * 4}))
    benchmark.main([*arguments, *folders])
    assert json.loads((tmp_path / "out/results.json").read_text())["seeds"]["1"]["still"]["psnr"][3] == 4.0
    assert benchmark.main([*arguments, *folders, "--check"]) == 1  # noise keeps no walk


def test_scores_of_frames_that_are_known(benchmark):
    true = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 8, 3), dtype=np.uint8)
    same = benchmark.score(true, true)
    assert min(same["psnr"]) > 50 and same["sharpness"] == [1.0] * 4
    off = true.copy()
    off[:, 6:] = np.where(true[:, 6:] < 128, true[:, 6:] + 10, true[:, 6:] - 10)
    assert benchmark.score(off, true)["psnr"][3] == pytest.approx(20 * np.log10(255 / 10), abs=1e-3)
    gray = np.full_like(true, 128)
    assert benchmark.score(gray, true)["sharpness"] == [0.0] * 4


def test_the_nearest_frame_of_a_walk_that_is_known_is_itself(benchmark, episodes: Path):
    train = EpisodeDataset(episodes, "train", 1, in_memory=False)
    found = benchmark.nearest_frames(train, train.poses(1)[None, [3, 7]], benchmark.Sizes(), 0.12)
    np.testing.assert_array_equal(found[0], train.frames(1, [3, 7]))


def test_too_few_walks_are_named(benchmark, episodes: Path):
    test = EpisodeDataset(episodes, "test", 1, in_memory=False)
    with pytest.raises(ConfigError, match="3 test episodes of 10 frames"):
        benchmark.draw_walks(test, benchmark.Sizes(walks=4, frames=8, prompt_frames=2), 0)
    with pytest.raises(ConfigError, match="frames=3"):
        benchmark.Sizes(frames=3)


def test_bars_judge_the_worst_seed(benchmark):
    def seed(first: float, last: float, still: float) -> dict:
        return {"m": {"psnr": [first, 0.0, 0.0, last]}, "still": {"psnr": [0.0, 0.0, 0.0, still]}}

    good, melting = seed(25.0, 24.5, 14.0), seed(25.0, 20.0, 14.0)
    assert [claim["passed"] for claim in benchmark.check({"seeds": {"0": good}}, "m")] == [True, True]
    assert [claim["passed"] for claim in benchmark.check({"seeds": {"0": good, "1": melting}}, "m")] == [False, True]
    assert not benchmark.check({"seeds": {"0": seed(25.0, 24.5, 22.0)}}, "m")[1]["passed"]


def test_a_window_frame_model_has_no_rolling_arm(benchmark, episodes: Path, make_world_model, tmp_path: Path):
    encoder = ControlEncoder(PoseControls(CAMERA_SPEC), "map", (0.12,), (8, 8))
    pipe = make_world_model(encoder)
    sizes = benchmark.Sizes(walks=1, frames=4, prompt_frames=2)
    work = benchmark.WorkFolder(tmp_path / "work", {})
    arms = benchmark.measure({"m": pipe}, str(episodes), sizes, 0, work)
    assert list(arms) == ["m", "nearest", "still", "autoencoder"]
