"""What would be wrong: videos that see more than the model may, a gate or a bar that lets anything pass, lost work."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import av
import numpy as np
import pytest
import torch
from PIL import Image

from vidgen.metrics import frame_psnr
from vidgen.train.method import StepOutput

EVAL = Path(__file__).resolve().parents[2] / "eval"
TOY = {
    "window": 4,
    "dim": 32,
    "layers": 1,
    "code_channels": 4,
    "batch_size": 2,
    "df_steps": 6,
    "arm_steps": 2,
    "rollout_steps": 1,
    "sampler_steps": 2,
    "rooms": 1,
    "train_walks": 3,
    "walk_frames": 40,
    "sequences": 3,
    "horizon": 2,
}
ABLATION = "live_p1"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The script as Python finds its neighbors when it is started: in its own folder first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVAL)
        yield importlib.import_module("live")


@pytest.fixture(scope="module")
def folder(benchmark, tmp_path_factory) -> Path:
    """Work and results of a toy run."""
    folder = tmp_path_factory.mktemp("live")
    assert benchmark.main([*arguments(folder), "--ablations", ABLATION]) == 0
    return folder


def arguments(folder: Path) -> list[str]:
    paths = ["--work", str(folder / "work"), "--out", str(folder / "out")]
    return ["--worlds", "room", "--seeds", "5", *paths, "--set", *(f"{name}={number}" for name, number in TOY.items())]


@pytest.fixture(scope="module")
def data(benchmark, folder):
    return benchmark.Bench("room", benchmark.Sizes(**TOY), 5, folder / "work").data


@pytest.fixture(scope="module")
def model(benchmark, data):
    """A model in which everything that is seen matters."""
    model = benchmark.new_transformer(data).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_a_toy_run_writes_everything(benchmark, folder):
    out = folder / "out"
    results = json.loads((out / "results.json").read_text())
    assert results["benchmark"] == "live"
    run = results["worlds"]["room"]["5"]
    trained = ["base", "df", "tf", "live", "df_time", "no_cycle", ABLATION]
    assert list(run["arms"]) == [*trained, "truth", "elsewhere"]
    steps = {arm: run["arms"][arm]["steps"] for arm in trained}
    equal_time = json.loads((folder / "work" / "room_5" / "equal_time.json").read_text())
    assert steps.pop("base") == 6 and steps.pop("df_time") == equal_time["steps"] and set(steps.values()) == {2}
    assert equal_time["seconds"].keys() == {"df", *(f"live, stage {stage}" for stage in (1, 2, 3))}
    forcings = {arm: config_of(folder, arm)["forcing"] for arm in trained}
    assert forcings == {
        "base": "diffusion_forcing",
        "df": "diffusion_forcing",
        "tf": "teacher_forcing",
        "live": "live",
        "df_time": "diffusion_forcing",
        "no_cycle": "no_cycle",
        ABLATION: "live",
    }
    # The renderer is better than what was never trained, and every arm is another model.
    for arm in trained:
        assert run["arms"]["truth"]["psnr"][-1] > run["arms"][arm]["psnr"][-1] + 3
        assert run["arms"]["truth"]["fd"][-1] < run["arms"][arm]["fd"][-1]
    assert len({tuple(run["arms"][arm]["psnr_curve"][1:]) for arm in trained}) == len(trained)
    assert results["sizes"]["df_steps"] == 6 and {"versions", "cpu"} <= run["environment"].keys()
    table = (out / "table.md").read_text()
    assert "NO: void" in table and "| no_cycle |" in table and "### Equal time" in table and "| elsewhere |" in table
    assert Image.open(out / "room_curves.png").size == (1650, 462)
    with av.open(str(out / "room.mp4")) as video:
        stream = video.streams.video[0]
        # Three walks, five columns, four times enlarged, and a line of names.
        assert (stream.frames, stream.height, stream.width) == (8, 3 * 128 + 16, 5 * 128)


def config_of(folder: Path, arm: str) -> dict:
    path = folder / "work" / "room_5" / arm / "weights" / "transformer" / "config.json"
    return json.loads(path.read_text())


def test_what_is_measured_is_not_measured_again(benchmark, folder, tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("trained or rendered again")

    for name in ("fit", "RoomWorld"):
        monkeypatch.setattr(benchmark, name, forbidden)
    monkeypatch.setattr(benchmark.Bench, "write_video", lambda *_: None)
    # An ablation that isn't asked for stays in the table; its base is void, so a check fails.
    again = [*arguments(folder), "--out", str(tmp_path), "--ablations", "--check"]
    assert benchmark.main(again) == 1
    first, second = (json.loads((path / "results.json").read_text()) for path in (folder / "out", tmp_path))
    assert second["worlds"] == first["worlds"] and second["claims"] == first["claims"]


def test_other_sizes_are_not_mixed_in(benchmark, folder, capsys):
    assert benchmark.main([*arguments(folder), "arm_steps=4"]) == 2
    assert "was begun with other sizes" in capsys.readouterr().err


def test_a_world_without_its_package_is_skipped_and_said_to_be(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "out"
    benchmark.main(["--worlds", "vizdoom", "--work", str(tmp_path / "work"), "--out", str(out)])
    assert 'vizdoom is skipped: vizdoom is not installed: pip install "vidgen[worlds]"' in capsys.readouterr().out
    assert json.loads((out / "results.json").read_text())["skipped"].keys() == {"vizdoom"}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["steps=3"], "steps=3: allowed NAME=NUMBER"),
        (["df_steps=3.5"], "df_steps=3.5: allowed"),
        (["df_steps=0"], "df_steps=0; it must be positive"),
        (["df_lr=nan"], "df_lr=nan; it must be positive"),
        (["window=6"], "window=6"),
        (["horizon=3"], "horizon=3"),
        (["walk_frames=4"], "at least window=8"),
    ],
)
def test_impossible_sizes_are_named(benchmark, items, message):
    with pytest.raises(benchmark.ConfigError, match=message):
        benchmark.parse_sizes(benchmark.Sizes, items)
    assert benchmark.parse_sizes(benchmark.Sizes, ["df_lr=0.01", "per_token_controls=0"]).df_lr == 0.01


# --- sampling ----------------------------------------------------------------------------------------------------


def test_a_frame_sees_the_window_and_nothing_older(benchmark, data, model):
    controls = data.test_controls[:1, :6]
    prompts = data.encode(data.test_frames[:1, :5])

    def newest(frame: int | None = None, control: int | None = None) -> np.ndarray:
        latents, changed = prompts.clone(), controls.clone()
        if frame is not None:
            latents[:, :, frame] += 3
        if control is not None:
            changed[:, control] += 0.3
        return benchmark.generate(model, data, latents, changed, seed=0)[:, 5]

    # T = 4: frame 5 sees frames 2, 3 and 4, and how 3, 4 and 5 were reached.
    known = newest()
    assert [not np.array_equal(newest(frame=frame), known) for frame in range(5)] == [False, False, True, True, True]
    reached = [not np.array_equal(newest(control=control), known) for control in range(6)]
    assert reached == [False, False, False, True, True, True]


def test_only_teacher_forcing_sees_clean_context(benchmark, data, model):
    controls = data.test_controls[:1, :3]
    prompts = data.encode(data.test_frames[:1, :2])
    levels = []
    model = copy.deepcopy(model)
    model.register_forward_pre_hook(lambda module, args: levels.append(float(args[1].flatten()[0])))
    for forcing, context in (("teacher_forcing", 0.0), ("diffusion_forcing", 1.0), ("live", 1.0)):
        levels.clear()
        model.register_to_config(forcing=forcing)
        benchmark.generate(model, data, prompts, controls, seed=0)
        # Two steps from u = 0.999 and half of it, warped by 3: sigma = 3 u / (1 + 2 u). The second is the context's.
        second = 1000 * 3 * 0.4995 / (1 + 2 * 0.4995)
        assert levels == [pytest.approx(level, abs=2) for level in (context * second, 999.7, second)]


def test_arms_are_sampled_with_the_same_noise(benchmark, data, model):
    controls, prompts = data.test_controls[:2, :6], data.encode(data.test_frames[:2, :1])
    videos = [benchmark.generate(model, data, prompts, controls, seed) for seed in (0, 0, 1)]
    assert np.array_equal(videos[0], videos[1]) and not np.array_equal(videos[0], videos[2])
    assert np.array_equal(videos[0][:, 0], videos[2][:, 0])


def test_batches_are_windows_of_walks_with_their_controls(data):
    batch = data.batch(3, 0, 1, 5)
    again = data.batch(3, 0, 1, 5)
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    for latents, controls in zip(batch["latents"], batch["controls"], strict=True):
        matches = [
            (walk, start)
            for walk in range(3)
            for start in range(37)
            if torch.equal(data.train_latents[walk, :, start : start + 4], latents)
            and torch.equal(data.train_controls[walk, start : start + 4], controls)
        ]
        assert matches
    assert torch.allclose(data.encode(data.train_frames[:1]), data.train_latents[:1], atol=1e-5)


def test_equal_time_counts_each_stage_of_the_curriculum_by_its_share(benchmark, data, monkeypatch):
    clock = [0.0]

    def step(method, batch, number, generator):
        prompts = method.schedule.prompt_frames(number, method.total_steps, generator)
        clock[0] += 1.0 if method.schedule.name == "diffusion_forcing" else {4: 2.0, 2: 5.0}[prompts]
        return StepOutput({"transformer": torch.zeros((), requires_grad=True)})

    monkeypatch.setattr(benchmark.LiveMethod, "training_step", step)
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(data, "sizes", benchmark.Sizes(**{**TOY, "arm_steps": 600}))
    # 15 % of the steps have p = T = 4, the others 2.
    assert benchmark.steps_of_equal_time(data)["steps"] == round(600 * (0.15 * 2 + 0.85 * 5))


# --- gate and bars -----------------------------------------------------------------------------------------------


class Oracle:
    """Knows the walk, or plays another action's frame instead of the last."""

    def __init__(self, data, knows: bool) -> None:
        self.frames = data.test_frames[:, : data.sizes.window].copy()
        if not knows:
            self.frames[:, -1] = data.arrays["other_action"]

    def generate(self, *_) -> np.ndarray:
        return self.frames

    def first_guess(self, transformer, data, frames, controls, seed) -> np.ndarray:
        return self.frames[:, -1:] if frames.shape[1] > 1 else np.full_like(self.frames[:, -1:], 128)


@pytest.mark.parametrize(
    ("knows", "sensitivity", "passed"), [(True, 3.5, True), (True, 2.5, False), (False, 3.5, False)]
)
def test_the_gate_lets_in_who_knows_the_world(benchmark, data, monkeypatch, knows, sensitivity, passed):
    oracle = Oracle(data, knows)
    monkeypatch.setattr(benchmark, "generate", oracle.generate)
    monkeypatch.setattr(benchmark, "first_guess", oracle.first_guess)
    gate = benchmark.competence(None, data, sensitivity)
    apart = frame_psnr(data.test_frames[:, 3], data.arrays["other_action"]).mean()
    margin = gate["measured"]["one step, above the truth of another action"]
    assert gate["passed"] == passed and margin["value"] == pytest.approx((60 - apart) * (1 if knows else -1))
    assert gate["world"]["truth against the truth of another action"] == pytest.approx(apart) and apart < 30


def test_the_other_action_is_a_turn_from_the_place_before(benchmark, data):
    world = benchmark.RoomWorld(32, rooms=(1, 1))
    for index in range(3):
        scene = world.scene(100 * 5 + index % 2)
        poses = world.explore(scene, 8, benchmark.derive_seed(5, benchmark.TEST, index))
        assert np.array_equal(world.render(scene, poses), data.test_frames[index])
        turns = [world.render(scene, poses[2:3] + [0, 0, sign * world.motion.turn])[0] for sign in (1, -1)]
        shown = [np.array_equal(turn, data.arrays["other_action"][index]) for turn in turns]
        assert sum(shown) == 1 and not np.array_equal(data.test_frames[index, 3], data.arrays["other_action"][index])


GOOD = {
    "df": {"fd": [1.0, 4.0], "psnr": [20.0, 15.0], "action_sensitivity": 5.0},
    "df_time": {"fd": [1.0, 4.0], "psnr": [20.0, 15.0], "action_sensitivity": 5.0},
    "tf": {"fd": [1.0, 4.0], "psnr": [20.0, 15.0], "action_sensitivity": 5.0},
    "live": {"fd": [9.0, 3.0], "psnr": [9.0, 15.0], "action_sensitivity": 3.5},
    "no_cycle": {"fd": [1.0, 3.5], "psnr": [20.0, 15.0], "action_sensitivity": 5.0},
}


@pytest.mark.parametrize(
    ("arm", "change", "missed"),
    [
        ("live", {}, set()),
        ("live", {"fd": [0.0, 3.1]}, {"live / df ", "live / df_time"}),
        ("live", {"fd": [0.0, 3.45]}, {"live / df ", "live / df_time", "live / tf"}),
        ("df_time", {"fd": [1.0, 3.9]}, {"live / df_time"}),
        ("df", {"psnr": [0.0, 15.1]}, {"live - df "}),
        ("live", {"action_sensitivity": 3.4}, {"sensitivity: live / df ", "sensitivity: live / df_time"}),
        ("no_cycle", {"fd": [9.0, 3.0]}, {"no_cycle / live"}),
    ],
)
def test_every_bar_can_be_missed(benchmark, arm, change, missed):
    arms = copy.deepcopy(GOOD)
    arms[arm].update(change)
    runs = {0: {"gate": {"passed": True}, "arms": GOOD}, 1: {"gate": {"passed": True}, "arms": arms}}
    claims = benchmark.claims("room", runs)
    failed = [f"{claim['claim']} " for claim in claims if not claim["passed"]]
    assert len(claims) == 9 and len(failed) == len(missed)
    assert all(any(part in name for name in failed) for part in missed)


def test_a_void_seed_fails(benchmark):
    runs = {0: {"gate": {"passed": True}, "arms": GOOD}, 1: {"gate": {"passed": False}, "arms": GOOD}}
    assert [claim["claim"] for claim in benchmark.claims("room", runs) if not claim["passed"]] == [
        "the base is competent"
    ]
