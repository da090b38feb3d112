from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vidgen.runtime.checkpoint import load_safetensors
from vidgen.runtime.config import load_config, to_yaml
from vidgen.runtime.errors import CheckpointError, ConfigError, TrainingError
from vidgen.train import OptimizerConfig, StepOutput, TrainConfig, TrainingMethod, fit, fit_recipe
from vidgen.train.batches import BatchView
from vidgen.train.config import MAY_CHANGE


class Student(nn.Module):
    """Everything that is treated differently: matrices in blocks, an embedding, biases, dropout, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.label = nn.Embedding(3, 6)
        self.out = nn.Linear(6, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        hidden_states = hidden_states + self.label.weight[0]
        for block in self.blocks:
            hidden_states = F.dropout(torch.tanh(block(hidden_states)), 0.1, self.training)
        return hidden_states


class Game(TrainingMethod):
    """A critic that is updated at every step, a student at every second one, a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.critic, self.teacher = Student(), nn.Linear(6, 1), nn.Linear(6, 6)
        self.bank = torch.zeros(2)
        self.fail_at: int | None = None
        self.seen: list[tuple[int, list[float]]] = []

    def roles(self):
        return {"student": self.student, "critic": self.critic, "teacher": self.teacher}

    def active_optimizers(self, step):
        return ("student", "critic") if step % 2 == 0 else ("critic",)

    def training_step(self, batch, step, generator):
        self.seen.append((step, batch["x"][:, 0].tolist()))
        inputs = batch["x"] + 0.1 * torch.randn(batch["x"].shape, generator=generator)
        hidden = self.student(inputs)
        # Both losses run through both roles on purpose.
        imitation = F.mse_loss(hidden, self.teacher(inputs)) + self.student.out(hidden).square().mean()
        student_loss = imitation + self.critic(hidden).mean()
        critic_loss = (self.critic(hidden) - 1).square().mean()
        if self.fail_at == step:
            critic_loss = critic_loss * float("nan")
        self.bank = self.bank + hidden.detach().mean()
        return StepOutput({"student": student_loss, "critic": critic_loss}, {"bank": float(self.bank[0])})

    def extra_state(self):
        return {"bank": self.bank, "note": ["json", 1]}

    def load_extra_state(self, state):
        assert state["note"] == ["json", 1]
        self.bank = state["bank"]

    def validate(self):
        assert not self.student.training
        return {"weight": float(self.student.out.weight.sum())}


class Regression(TrainingMethod):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(6, 1, bias=bias)

    def roles(self):
        return {"model": self.model}

    def training_step(self, batch, step, generator):
        return StepOutput({"model": (self.model(batch["x"]) - 1).square().mean()})


class Samples(torch.utils.data.Dataset):
    def __init__(self, length: int = 11) -> None:
        self.x = torch.randn(length, 6, generator=torch.Generator().manual_seed(5))
        self.stop_after: int | None = None
        self.action = None

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.stop_after is not None:
            self.stop_after -= 1
            if self.stop_after < 0:
                self.stop_after = None
                self.action()
        return {"x": self.x[index]}


class Crash(Exception):
    pass


def crash():
    raise Crash


def game_config(folder, **changes) -> TrainConfig:
    values = {
        "output_dir": str(folder),
        "max_steps": 10,
        "optimizers": {
            "student": OptimizerConfig(kind="muon", lr=1e-2, adamw_lr=3e-3, schedule="cosine", warmup_steps=2),
            "critic": OptimizerConfig(lr=1e-2, schedule="linear", min_lr_ratio=0.1),
        },
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "ema_decay": 0.9,
        "ema_start": 1,
        "seed": 3,
        "checkpoint_every": 5,
        "log_every": 3,
        "validate_every": 4,
    }
    return TrainConfig(**{**values, **changes})


def model_config(folder, **changes) -> TrainConfig:
    values = {"output_dir": str(folder), "max_steps": 4, "optimizers": {"model": OptimizerConfig(lr=1e-2)}}
    return TrainConfig(**{**values, **changes})


def rows(folder: Path) -> list[dict]:
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in read:
        row.pop("seconds", None)
    return read


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file.relative_to(folder)}/{name}": tensor
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_safetensors(file)[0].items()
    }


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    method = Game()
    return method, fit(method, Samples(), game_config(folder)), folder


# --- exact resume ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("samples_before_crash", [4 * 5 + 1, 4 * 8 + 3])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, straight, samples_before_crash, workers):
    if workers and samples_before_crash > 30:
        pytest.skip("one crash is enough for worker processes")
    method, result, folder = straight
    data = Samples()
    data.stop_after, data.action = samples_before_crash, crash
    with pytest.raises(Crash):
        fit(Game(), data, game_config(tmp_path / "run"))
    assert [path.name for path in tmp_path.glob("run/step_*")] == ["step_000005"]
    torch.manual_seed(99)
    resumed = Game()
    again = fit(resumed, Samples(), game_config(tmp_path / "run", num_workers=workers))
    assert (
        (again.step, again.samples, again.stop_reason)
        == (10, 40, "max_steps")
        == (
            result.step,
            result.samples,
            result.stop_reason,
        )
    )
    assert resumed.seen == method.seen[10:]
    assert_same(tensors(folder), tensors(tmp_path / "run"))
    assert_same(method.state_dict(), resumed.state_dict())
    assert rows(folder) == rows(tmp_path / "run")


def test_a_checkpoint_holds_all_that_training_changes(straight):
    _, _, folder = straight
    stored = tensors(folder / "step_000010")
    assert stored["extra_state.safetensors/bank"].shape == (2,)
    assert stored["student.safetensors/calls"] == 20
    assert "student.optimizer.safetensors/0/momentum_buffer/blocks.0.weight" in stored
    assert "student.optimizer.safetensors/1/exp_avg/label.weight" in stored
    assert "student.ema.safetensors/out.bias" in stored
    assert not any(name.startswith("teacher") for name in stored)
    assert not list(folder.rglob("*.pt")) + list(folder.rglob("*.bin")) + list(folder.rglob("*.pkl"))


def test_metrics_rows_and_run_description(straight):
    _, _, folder = straight
    read = rows(folder)
    assert [row["step"] for row in read if "losses" in row] == [3, 6, 9, 10]
    assert [row["step"] for row in read if "validation" in row] == [4, 8]
    assert read[0].keys() == {"step", "losses", "metrics", "lr", "grad_norm", "samples"}
    assert read[0]["losses"].keys() == {"student", "critic"}
    assert read[0]["samples"] == 12
    assert json.loads((folder / "environment.json").read_text())["versions"]["torch"]
    assert load_config(TrainConfig, folder / "config.yaml") == game_config(folder)


def test_rows_beyond_the_checkpoint_are_dropped_on_resume(tmp_path):
    data = Samples()
    data.stop_after, data.action = 8, crash
    config = model_config(tmp_path, max_steps=10, checkpoint_every=5, log_every=1)
    with pytest.raises(Crash):
        fit(Regression(), data, config)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 8]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "los')
    fit(Regression(), Samples(), config)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 11))


def test_a_finished_run_is_left_alone(tmp_path):
    config = model_config(tmp_path)
    first = fit(Regression(), Samples(), config)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    again = fit(Regression(), Samples(), config)
    assert again.step == first.step == 4
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before


def test_a_finished_run_can_be_extended(tmp_path):
    fit(Regression(), Samples(), model_config(tmp_path / "a", max_steps=4))
    fit(Regression(), Samples(), model_config(tmp_path / "a", max_steps=9))
    fit(Regression(), Samples(), model_config(tmp_path / "b", max_steps=9))
    assert_same(tensors(tmp_path / "a" / "step_000009"), tensors(tmp_path / "b" / "step_000009"))


def test_oldest_checkpoints_are_dropped(tmp_path):
    fit(Regression(), Samples(), model_config(tmp_path, max_steps=7, checkpoint_every=2, keep_checkpoints=2))
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000006", "step_000007"]
    assert not list(tmp_path.glob(".*"))


def test_resume_off_refuses_an_occupied_folder(tmp_path):
    fit(Regression(), Samples(), model_config(tmp_path))
    with pytest.raises(TrainingError, match="holds the checkpoint step_000004; use resume=true or another folder"):
        fit(Regression(), Samples(), model_config(tmp_path, resume=False))


# --- one run per folder ---------------------------------------------------------------------------------------------

OTHER_SETTINGS = {
    "optimizers": {"model": OptimizerConfig(lr=2e-2)},
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "mixed_precision": "bf16",
    "fsdp": True,
    "max_grad_norm": None,
    "ema_decay": 0.5,
    "ema_start": 1,
    "seed": 1,
    "max_steps": 5,
    "max_minutes": 1.0,
    "checkpoint_every": 3,
    "keep_checkpoints": 1,
    "log_every": 2,
    "validate_every": 1,
    "num_workers": 1,
    "trackers": ("tensorboard",),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    train: TrainConfig
    width: int = 6
    model: dict[str, Any] = dataclasses.field(default_factory=dict)

    def build(self):
        return Regression(), Samples()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name", sorted({field.name for field in dataclasses.fields(TrainConfig)} - {"output_dir", "resume"})
)
def test_a_setting_that_makes_another_run_is_refused_and_any_other_accepted(tmp_path, name):
    fit(Regression(), Samples(), model_config(tmp_path))
    before = contents(tmp_path)
    changed = model_config(tmp_path, **{name: OTHER_SETTINGS[name]})
    if name in MAY_CHANGE:
        assert fit(Regression(), Samples(), changed).step == (5 if name == "max_steps" else 4)
        assert load_config(TrainConfig, tmp_path / "config.yaml") == changed
    else:
        key = "optimizers.model.lr: 0.01 -> 0.02" if name == "optimizers" else f"{name}: .* -> "
        with pytest.raises(TrainingError, match=rf"other settings \(stored -> given\): {key}"):
            fit(Regression(), Samples(), changed)
        assert contents(tmp_path) == before


def test_all_settings_of_a_recipe_are_stored_and_guarded_before_anything_is_built(tmp_path):
    recipe = Recipe(model_config(tmp_path), model={"layers": 2})
    fit_recipe(recipe, Recipe.build)
    assert load_config(Recipe, tmp_path / "config.yaml") == recipe
    before = contents(tmp_path)

    def build(recipe):
        raise AssertionError("built")

    other = Recipe(model_config(tmp_path, seed=2, log_every=3), width=7, model={"heads": 3})
    with pytest.raises(TrainingError) as error:
        fit_recipe(other, build)
    told = "train.seed: 0 -> 2; width: 6 -> 7; model.layers: 2 -> (absent); model.heads: (absent) -> 3."
    assert told in str(error.value)
    assert contents(tmp_path) == before


def test_a_moved_run_goes_on(tmp_path):
    fit(Regression(), Samples(), model_config(tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "b")
    assert fit(Regression(), Samples(), model_config(tmp_path / "b", max_steps=6)).step == 6


def test_a_run_without_a_checkpoint_binds_nothing(tmp_path):
    data = Samples()
    data.stop_after, data.action = 2, crash
    with pytest.raises(Crash):
        fit(Regression(), data, model_config(tmp_path))
    fit(Regression(), Samples(), model_config(tmp_path, seed=1))
    assert load_config(TrainConfig, tmp_path / "config.yaml").seed == 1


@pytest.mark.parametrize("damage", ["absent", "cut", "binary"])
def test_checkpoints_of_unknown_settings_are_refused(tmp_path, damage):
    fit(Regression(), Samples(), model_config(tmp_path))
    path = tmp_path / "config.yaml"
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(b"seed: [1" if damage == "cut" else b"\xff\xfe")
    with pytest.raises(
        TrainingError, match="config.yaml is missing or damaged.*put it back or use another output_dir"
    ):
        fit(Regression(), Samples(), model_config(tmp_path))


def test_a_second_training_in_the_folder_is_refused_while_the_first_runs(tmp_path):
    refused = []

    def intrude():
        with pytest.raises(TrainingError, match="another training is using"):
            fit(Regression(), Samples(), model_config(tmp_path))
        refused.append(True)

    data = Samples()
    data.stop_after, data.action = 2, intrude
    fit(Regression(), data, model_config(tmp_path))
    assert refused
    assert not (tmp_path / "run.lock").exists()


def test_a_killed_training_leaves_its_folder_free(tmp_path):
    script = (
        "import sys; from test_loop import model_config; from vidgen.train.journal import claim_run\n"
        "config = model_config(sys.argv[1])\n"
        "with claim_run(config, config): print('claimed', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    # Started here: `-c` looks for modules in the working folder.
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    try:
        assert holder.stdout.readline() == "claimed\n"
        with pytest.raises(TrainingError, match="another training is using"):
            fit(Regression(), Samples(), model_config(tmp_path))
    finally:
        holder.kill()
        holder.communicate()
    assert fit(Regression(), Samples(), model_config(tmp_path)).step == 4


def test_a_folder_that_cannot_be_one_is_named(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "x" * 300):
        with pytest.raises(TrainingError, match=f"cannot use .*{name}: .*; use another output_dir"):
            fit(Regression(), Samples(), model_config(tmp_path / name))


def test_a_result_reads_as_a_sentence(tmp_path):
    result = str(fit(Regression(), Samples(), model_config(tmp_path)))
    assert result.startswith(f"{tmp_path}: 4 steps and 4 samples in 0.")
    assert result.endswith(f"minutes, ended by max_steps; weights in {tmp_path}/weights")


# --- damaged or foreign checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["student.safetensors", "critic.optimizer.safetensors", "student.ema.safetensors",
                                  "extra_state.safetensors", "state.json"])  # fmt: skip
@pytest.mark.parametrize("damage", ["flip", "cut", "absent"])
def test_damage_is_named_and_the_older_checkpoint_used_only_after_deletion(tmp_path, straight, file, damage):
    _, _, folder = straight
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run" / "step_000010" / file
    content = bytearray(path.read_bytes())
    if damage == "absent":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[-2] ^= 255
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file}.*delete .*step_000010 to continue from the checkpoint before"):
        fit(Game(), Samples(), game_config(tmp_path / "run"))
    if damage == "flip" and file == "student.safetensors":
        shutil.rmtree(path.parent)
        fit(Game(), Samples(), game_config(tmp_path / "run"))
        assert_same(tensors(folder), tensors(tmp_path / "run"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    fit(Regression(), Samples(), model_config(tmp_path))
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not fit the role 'model'.*bias"):
        fit(Regression(bias=False), Samples(), model_config(tmp_path))


def test_averages_cannot_appear_from_nothing(tmp_path):
    fit(Regression(), Samples(), model_config(tmp_path))
    config = model_config(tmp_path, ema_decay=0.9)
    (tmp_path / "config.yaml").write_text(to_yaml(config))  # the settings alone would be refused already
    with pytest.raises(CheckpointError, match="holds no averaged weights"):
        fit(Regression(), Samples(), config)


def test_another_optimizer_kind_is_refused(tmp_path, straight):
    _, _, folder = straight
    shutil.copytree(folder, tmp_path / "run")
    config = game_config(tmp_path / "run", max_steps=12)
    config = dataclasses.replace(config, optimizers={**config.optimizers, "student": OptimizerConfig()})
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(CheckpointError, match="was its kind changed"):
        fit(Game(), Samples(), config)


# --- stopping -------------------------------------------------------------------------------------------------------


def test_a_non_finite_loss_stops_before_the_weights_change(tmp_path, straight):
    method = Game()
    method.fail_at = 5
    with pytest.raises(TrainingError, match="step 5: losses/critic is nan"):
        fit(method, Samples(), game_config(tmp_path / "run"))
    stored = tensors(tmp_path / "run" / "step_000005")
    for name in ("critic", "student"):
        for key, tensor in getattr(method, name).state_dict().items():
            assert key == "calls" or torch.equal(tensor, stored[f"{name}.safetensors/{key}"])


def test_a_non_finite_gradient_stops_too(tmp_path):
    class Root(Regression):
        def training_step(self, batch, step, generator):
            # sqrt has an infinite slope at its finite value 0
            return StepOutput({"model": (self.model(batch["x"]) * 0).abs().sqrt().mean()})

    method = Root()
    before = method.model.weight.clone()
    with pytest.raises(TrainingError, match="step 0: grad_norm/model is nan"):
        fit(method, Samples(), model_config(tmp_path))
    assert torch.equal(before, method.model.weight)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_from_which_the_run_goes_on_exactly(tmp_path, straight, number):
    _, _, folder = straight
    data = Samples()
    data.stop_after, data.action = 4 * 6 + 1, lambda: os.kill(os.getpid(), number)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 7, saved in .*run"):
        fit(Game(), data, game_config(tmp_path / "run"))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert (tmp_path / "run" / "step_000007").is_dir()
    resumed = Game()
    fit(resumed, Samples(), game_config(tmp_path / "run"))
    assert_same(tensors(folder / "step_000010"), tensors(tmp_path / "run" / "step_000010"))
    assert rows(folder) == rows(tmp_path / "run")


def test_the_wall_clock_budget_counts_over_resumes(tmp_path):
    config = model_config(tmp_path, max_steps=10**6, max_minutes=0.2 / 60, checkpoint_every=10**6)
    first = fit(Regression(), Samples(), config)
    assert first.stop_reason == "max_minutes"
    assert 0 < first.step < 10**6
    assert 0.2 <= first.elapsed_seconds < 5
    again = fit(Regression(), Samples(), config)
    assert again.step == first.step
    longer = fit(Regression(), Samples(), dataclasses.replace(config, max_minutes=(first.elapsed_seconds + 0.1) / 60))
    assert longer.step > first.step


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    (tmp_path / ".step_000002.abcdef12.tmp").mkdir()
    fit(Regression(), Samples(), model_config(tmp_path))
    assert not list(tmp_path.glob(".*"))


# --- roles and gradients --------------------------------------------------------------------------------------------


def test_each_loss_moves_its_own_role_only(tmp_path):
    method, data = Game(), Samples()
    batch = {"x": data.x[:2]}
    output = method.training_step(batch, 0, torch.Generator().manual_seed(0))
    expected = torch.autograd.grad(output.losses["student"], method.student.out.weight, retain_graph=True)[0]
    foreign = torch.autograd.grad(output.losses["student"], method.critic.weight, retain_graph=True)[0]
    assert expected.abs().sum() > 0
    assert foreign.abs().sum() > 0

    class Recorder(Game):
        def active_optimizers(self, step):
            return ("student",) if step == 0 else ("critic",)

    method = Recorder()
    start = {name: role.weight.clone() for name, role in (("critic", method.critic), ("teacher", method.teacher))}
    fit(method, data, game_config(tmp_path, max_steps=1, ema_decay=None, gradient_accumulation_steps=1))
    assert torch.equal(method.critic.weight, start["critic"])
    assert torch.equal(method.teacher.weight, start["teacher"])
    assert method.critic.weight.grad is None
    assert not method.teacher.weight.requires_grad


def test_accumulated_micro_batches_equal_one_large_batch(tmp_path):
    one, four = Regression(), Regression()
    fit(one, Samples(), model_config(tmp_path / "one", batch_size=8))
    fit(four, Samples(), model_config(tmp_path / "four", batch_size=2, gradient_accumulation_steps=4))
    torch.testing.assert_close(one.model.weight, four.model.weight, rtol=1e-5, atol=1e-7)


def test_one_step_is_the_textbook_update(tmp_path):
    method = Regression()
    reference = Regression().model
    config = model_config(tmp_path, max_steps=1, max_grad_norm=0.01, optimizers={"model": OptimizerConfig(lr=1e-2)})
    data = Samples()
    fit(method, data, config)
    index = BatchView(data, 1, config.seed).samples(0)
    (reference(data.x[index]) - 1).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    optimizer = torch.optim.AdamW(
        [{"params": [reference.weight], "weight_decay": 0.01}, {"params": [reference.bias], "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95),
    )  # fmt: skip
    optimizer.step()
    torch.testing.assert_close(method.model.weight, reference.weight)
    torch.testing.assert_close(method.model.bias, reference.bias)


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    student = Student()
    muon, adamw = OptimizerConfig(kind="muon", lr=1e-2, adamw_lr=1e-3).build(student)
    assert isinstance(muon, torch.optim.Muon)
    assert {id(p) for p in muon.param_groups[0]["params"]} == {id(block.weight) for block in student.blocks}
    assert [group["peak_lr"] for group in adamw.param_groups] == [1e-3, 1e-3]
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.01, 0.0]
    assert {id(p) for p in adamw.param_groups[0]["params"]} == {id(student.label.weight), id(student.out.weight)}


def test_averages_follow_the_documented_decay_in_float32(tmp_path):
    method = Regression()
    method.model.bfloat16()
    history: list[torch.Tensor] = [method.model.weight.detach().clone()]

    class Watched(Regression):
        def training_step(self, batch, step, generator):
            history.append(self.model.weight.detach().clone())
            return StepOutput({"model": (self.model(batch["x"].bfloat16()) - 1).square().mean()})

    method.__class__ = Watched
    fit(method, Samples(), model_config(tmp_path, max_steps=6, ema_decay=0.25, ema_start=2))
    history = history[1:] + [method.model.weight.detach()]
    average = history[0].float()
    for step in range(1, 7):
        decay = 0.0 if step <= 2 else min(0.25, (1 + step - 2) / (10 + step - 2))
        average = decay * average + (1 - decay) * history[step].float()
    stored = tensors(tmp_path / "step_000006")["model.ema.safetensors/weight"]
    assert stored.dtype == torch.float32
    torch.testing.assert_close(stored, average)


def test_exported_and_validated_weights_are_the_averages_and_training_weights_return(straight):
    method, result, folder = straight
    exported, stored = tensors(result.weights_dir), tensors(folder / "step_000010")
    assert torch.equal(exported["student/model.safetensors/out.weight"], stored["student.ema.safetensors/out.weight"])
    assert not torch.equal(method.student.out.weight, stored["student.ema.safetensors/out.weight"])
    assert torch.equal(method.student.out.weight, stored["student.safetensors/out.weight"])


def test_a_missing_loss_is_named(tmp_path):
    class Silent(Regression):
        def training_step(self, batch, step, generator):
            return StepOutput({})

    with pytest.raises(TrainingError, match="step 0: no loss that depends on the active role 'model'"):
        fit(Silent(), Samples(), model_config(tmp_path))


def test_a_loss_that_misses_its_role_is_named(tmp_path):
    class Elsewhere(Regression):
        def training_step(self, batch, step, generator):
            return StepOutput({"model": torch.ones((), requires_grad=True) * 2})

    with pytest.raises(TrainingError, match="loss of role 'model' reaches none of its parameters"):
        fit(Elsewhere(), Samples(), model_config(tmp_path))


@pytest.mark.parametrize("name", ["optimizers", "active"])
def test_unknown_roles_name_the_nearest(tmp_path, name):
    method, config = Regression(), model_config(tmp_path)
    if name == "optimizers":
        config = model_config(tmp_path, optimizers={"modle": OptimizerConfig()})
    else:
        method.active_optimizers = lambda step: ("modle",)
    with pytest.raises(TrainingError, match="role 'modle': did you mean 'model'"):
        fit(method, Samples(), config)


def test_a_parameter_cannot_belong_to_two_trained_roles(tmp_path):
    class Shared(Regression):
        def roles(self):
            return {"model": self.model, "copy": self.model}

    optimizers = {"model": OptimizerConfig(), "copy": OptimizerConfig()}
    with pytest.raises(TrainingError, match="roles 'model' and 'copy' share the parameter 'weight'"):
        fit(Shared(), Samples(), model_config(tmp_path, optimizers=optimizers))


def test_bf16_autocast_leaves_weights_in_float32(tmp_path):
    seen = []

    class Watched(Regression):
        def training_step(self, batch, step, generator):
            predicted = self.model(batch["x"])
            seen.append(predicted.dtype)
            return StepOutput({"model": (predicted - 1).square().mean()})

    method = Watched()
    fit(method, Samples(), model_config(tmp_path, max_steps=1, mixed_precision="bf16"))
    assert seen == [torch.bfloat16]
    assert method.model.weight.dtype == torch.float32


# --- data order -----------------------------------------------------------------------------------------------------


def test_every_epoch_is_another_permutation_shared_out_without_overlap():
    data = Samples(12)
    views = [BatchView(data, 2, seed=1, rank=rank, world_size=3) for rank in range(3)]
    epochs = [
        [index for item in (2 * epoch, 2 * epoch + 1) for view in views for index in view.samples(item)]
        for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert views[0].samples(5) == BatchView(data, 2, seed=1, rank=0, world_size=3).samples(5)
    assert views[0].samples(0) != BatchView(data, 2, seed=2, rank=0, world_size=3).samples(0)


def test_a_dataset_smaller_than_a_batch_is_repeated():
    chosen = BatchView(Samples(3), 7, seed=0).samples(0)
    assert sorted(chosen[:3]) == sorted(chosen[3:6]) == [0, 1, 2]


def test_an_object_with_batch_is_asked_for_each_micro_batch(tmp_path):
    class Endless:
        def __init__(self):
            self.asked = []

        def batch(self, step, rank, world_size, batch_size):
            self.asked.append((step, rank, world_size, batch_size))
            return {"x": torch.ones(batch_size, 6)}

    data = Endless()
    fit(Regression(), data, model_config(tmp_path, max_steps=2, batch_size=3, gradient_accumulation_steps=2))
    assert data.asked == [(step, 0, 1, 3) for step in range(4)]


def test_an_empty_dataset_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="the dataset is empty"):
        fit(Regression(), Samples(0), model_config(tmp_path))


def test_the_callers_random_state_is_untouched(tmp_path):
    method = Regression()
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    fit(method, Samples(), model_config(tmp_path))
    assert torch.equal(torch.rand(3), expected)


# --- configs --------------------------------------------------------------------------------------------------------


def test_learning_rate_schedules():
    config = OptimizerConfig(lr=1.0, warmup_steps=4, schedule="linear", min_lr_ratio=0.1)
    assert [config.lr_factor(step, 14) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert config.lr_factor(4, 14) == 1.0
    assert config.lr_factor(9, 14) == pytest.approx(0.55)
    assert config.lr_factor(14, 14) == pytest.approx(0.1)
    assert config.lr_factor(99, 14) == pytest.approx(0.1)
    cosine = OptimizerConfig(schedule="cosine")
    assert [cosine.lr_factor(step, 4) for step in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])
    assert OptimizerConfig().lr_factor(3, 4) == 1.0


def test_time_schedule_follows_the_faster_of_clock_and_steps():
    by_time = OptimizerConfig(schedule="linear", schedule_by="time")
    assert by_time.lr_factor(10, 100, time_fraction=0.75) == pytest.approx(0.25)
    assert by_time.lr_factor(80, 100, time_fraction=0.75) == pytest.approx(0.2)
    assert by_time.lr_factor(80, 100, time_fraction=1.5) == 0.0
    by_steps = OptimizerConfig(schedule="linear")
    assert by_steps.lr_factor(10, 100, time_fraction=0.75) == pytest.approx(0.9)


def test_a_run_that_the_clock_ends_is_annealed(tmp_path):
    optimizer = OptimizerConfig(lr=1e-2, schedule="cosine", schedule_by="time")
    fit(
        Regression(),
        Samples(),
        model_config(
            tmp_path, max_steps=10**6, max_minutes=0.3 / 60, log_every=1, checkpoint_every=10**6,
            optimizers={"model": optimizer},
        ),
    )  # fmt: skip
    rates = [row["lr"]["model"] for row in rows(tmp_path)]
    assert rates[0] > 9e-3
    assert rates[-1] < 2e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 0}, "max_steps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"optimizers": {}}, "optimizers is empty"),
        ({"mixed_precision": "fp8"}, "allowed: no, bf16"),
        ({"ema_decay": 1.0}, "ema_decay=1.0"),
        ({"max_minutes": 0}, "max_minutes=0"),
        ({"seed": -1}, "seed=-1"),
        ({"optimizers": {"model": OptimizerConfig(schedule_by="time")}}, "schedule_by='time' needs max_minutes"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_config("x", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "sgd"}, "allowed: adamw, muon"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"schedule": "step"}, "allowed: constant, cosine, linear"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio=2.0"),
    ],
)
def test_optimizer_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**changes)


def test_an_unknown_tracker_is_an_error_and_not_skipped(tmp_path):
    with pytest.raises(TrainingError, match="tracker 'tensorbord' is unknown or not installed"):
        fit(Regression(), Samples(), model_config(tmp_path, trackers=("tensorbord",)))


# --- several processes ----------------------------------------------------------------------------------------------

_WORKER = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
from test_loop import Game, Samples, game_config
from vidgen.train import fit

class Odd(Game):
    # different starting weights on each process; the second one never uses the embedding
    def __init__(self):
        super().__init__()
        rank = int(os.environ["RANK"])
        torch.manual_seed(rank)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        if rank == 1:
            label = self.student.label
            self.student.label = torch.nn.Embedding(3, 6)
            self.student.label.weight = label.weight
            self.student.forward = lambda x: self.student.blocks[1](torch.tanh(self.student.blocks[0](x)))

method = Odd()
result = fit(method, Samples(), game_config(sys.argv[2]))
weights = torch.cat([p.detach().flatten() for p in method.parameters()])
both = [torch.empty_like(weights) for _ in range(2)]
torch.distributed.all_gather(both, weights)
assert torch.equal(both[0], both[1])
assert result.samples == 80, result
data = [None, None]
torch.distributed.all_gather_object(data, method.seen)
assert data[0] != data[1]
torch.distributed.destroy_process_group()
print("SYNCED")
"""


@pytest.mark.slow
def test_two_processes_keep_equal_weights_and_resume_exactly(tmp_path, run_two_processes):
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)

    def launch(folder: str) -> None:
        output = run_two_processes(script, str(Path(__file__).parent), str(tmp_path / folder))
        assert output.count("SYNCED") == 2

    launch("straight")
    launch("resumed")
    shutil.rmtree(tmp_path / "resumed" / "step_000010")
    launch("resumed")
    assert_same(tensors(tmp_path / "straight"), tensors(tmp_path / "resumed"))
