"""Sharded runs against unsharded ones: the same losses, the same files, resumed in either direction."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from vidgen.runtime.checkpoint import load_safetensors
from vidgen.runtime.errors import ConfigError
from vidgen.train import OptimizerConfig, StepOutput, TrainConfig, TrainingMethod, fit, loop, processes

# Sums over two processes and norms over shards are rounded in another order; AdamW's division amplifies that.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, hidden_states):
        return hidden_states + torch.tanh(self.linear(hidden_states))


class Student(nn.Module):
    """Sizes that two processes can't halve, parameters outside the blocks, an unused one, a buffer."""

    _repeated_blocks = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.shift = nn.Parameter(torch.zeros(1, 5))
        self.unused = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden_states):
        if torch.is_grad_enabled() and self.training:
            self.calls += 1
        hidden_states = self.embed(hidden_states)
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states + self.shift


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(5, 7), nn.Linear(7, 1)

    def forward(self, hidden_states):
        return self.out(torch.tanh(self.hidden(hidden_states)))


class Duel(TrainingMethod):
    """A student that rolls out before it learns; both losses run through both trained roles."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.student, self.critic, self.teacher = Student(), Critic(), Student()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)
        self.bank = torch.zeros(2)
        self.fail_at: int | None = None
        self.losses: list[list[float]] = []

    def roles(self):
        return {"student": self.student, "critic": self.critic, "teacher": self.teacher}

    def active_optimizers(self, step):
        return ("student", "critic") if step % 2 == 0 else ("critic",)

    def training_step(self, batch, step, generator):
        start = batch["x"]
        with torch.no_grad():
            for _ in range(2):
                start = torch.tanh(self.student(start))
        hidden = self.student(self.student(start))
        with torch.no_grad():
            target = self.teacher(start)
        student_loss = F.mse_loss(hidden, target) + self.critic(hidden).mean()
        critic_loss = (self.critic(hidden) - 1).square().mean() + self.critic(target).square().mean()
        if self.fail_at == step:
            critic_loss = critic_loss * float("nan")
        self.bank = self.bank + 1
        self.losses.append([student_loss.item(), critic_loss.item()])
        return StepOutput({"student": student_loss, "critic": critic_loss})

    def validate(self):
        return {"critic": float(self.critic(torch.ones(1, 5))), "student": float(self.student(torch.ones(1, 5)).sum())}

    def extra_state(self):
        return {"bank": self.bank, "note": ["json", 1]}

    def load_extra_state(self, state):
        assert state["note"] == ["json", 1]
        self.bank = state["bank"]


class Samples(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(11, 5, generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index]}


def duel_config(folder, processes: int, **changes) -> TrainConfig:
    """One process takes in one batch what two share out."""
    values = {
        "output_dir": str(folder),
        "max_steps": 4,
        "optimizers": {"student": OptimizerConfig(lr=1e-2), "critic": OptimizerConfig(lr=1e-2)},
        "batch_size": 4 // processes,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "ema_decay": 0.9,
        "checkpoint_every": 2,
        "log_every": 1,
        "validate_every": 2,
        "fsdp": True,
    }
    return TrainConfig(**{**values, **changes})


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {
        f"{file.relative_to(folder)}/{name}": tensor
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_safetensors(file)[0].items()
    }
    assert found
    return found


def rows(folder: Path) -> list[str]:
    return [line.split(', "seconds"')[0] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], **tolerance) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            first[name], second[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def launch(run_two_processes) -> Callable[[str, Path], None]:
    """Runs the body in two processes on the CPU; it has to print DONE."""

    def run(body: str, folder: Path) -> None:
        script = folder / "worker.py"
        script.write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_fsdp import *\n{body}"
        )
        assert run_two_processes(script, str(folder)).count("DONE") == 2

    return run


# --- a toy method ---------------------------------------------------------------------------------------------------

_DUEL = """
from vidgen.runtime.errors import TrainingError
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])

def run(name, **changes):
    method = Duel(seed=rank)  # other starting weights on each process: the first one's count
    fit(method, Samples(), duel_config(folder / name, 2, **changes))
    return method

plain = run("plain", fsdp=False)
sharded = run("sharded")
torch.testing.assert_close(torch.tensor(plain.losses), torch.tensor(sharded.losses), **TOLERANCE)

for role in sharded.roles().values():
    own = sum(parameter.to_local().numel() for parameter in role.parameters())
    assert own < 0.7 * sum(parameter.numel() for parameter in role.parameters())
assert torch.equal(sharded.bank, torch.full((2,), 8.0))
try:
    fit(sharded, Samples(), duel_config(folder / "again", 2))
except TrainingError as error:
    assert "role 'student' is sharded already" in str(error)

run("resumed", max_steps=2)
run("resumed")
run("from_one")

failing = Duel()
failing.fail_at = 1 if rank else None
try:
    fit(failing, Samples(), duel_config(folder / "failing", 2))
    raise SystemExit("a loss that is not finite on one process went by")
except TrainingError as error:
    assert "step 1: losses/critic is nan" in str(error)

class Container(Duel):
    def roles(self):
        return {"student": torch.nn.ModuleList([self.student]), "critic": self.critic}

try:
    fit(Container(), Samples(), duel_config(folder / "container", 2))
    raise SystemExit("a container was sharded")
except TrainingError as error:
    assert "role 'student' can't be sharded" in str(error)
torch.distributed.destroy_process_group()
print("DONE")
"""


@pytest.fixture(scope="module")
def duel(tmp_path_factory, launch) -> Path:
    folder = tmp_path_factory.mktemp("duel")
    fit(Duel(), Samples(), duel_config(folder / "one", 1))
    shutil.copytree(folder / "one" / "step_000002", folder / "from_one" / "step_000002")
    launch(_DUEL, folder)
    shutil.copytree(folder / "sharded" / "step_000002", folder / "from_sharded" / "step_000002")
    fit(Duel(), Samples(), duel_config(folder / "from_sharded", 1))
    return folder


@pytest.mark.slow
def test_a_sharded_run_writes_what_an_unsharded_one_writes(duel):
    for name in ("step_000002", "step_000004", "weights"):
        assert_close(tensors(duel / "plain" / name), tensors(duel / "sharded" / name), **TOLERANCE)
    stored = tensors(duel / "sharded" / "step_000004")
    assert stored["student.safetensors/calls"] == 16
    assert stored["student.optimizer.safetensors/0/exp_avg/blocks.1.linear.weight"].shape == (5, 5)
    # No process used it, so neither weight decay nor an optimizer state touched it.
    assert not any(name.startswith("student.optimizer") and "unused" in name for name in stored)
    assert "critic.ema.safetensors/out.bias" in stored
    assert not list((duel / "sharded").glob(".*"))


@pytest.mark.slow
def test_a_resumed_sharded_run_equals_an_uninterrupted_one_bit_for_bit(duel):
    assert_close(tensors(duel / "sharded"), tensors(duel / "resumed"), rtol=0, atol=0)
    assert rows(duel / "sharded") == rows(duel / "resumed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["from_one", "from_sharded", "sharded"])
def test_processes_may_become_more_or_fewer_at_a_resume(duel, name):
    assert_close(tensors(duel / "one" / "step_000004"), tensors(duel / name / "step_000004"), **TOLERANCE)
    assert_close(tensors(duel / "one" / "weights"), tensors(duel / name / "weights"), **TOLERANCE)


# --- a video transformer --------------------------------------------------------------------------------------------


class Flow(TrainingMethod):
    """A student that commits chunks to its memory, learns on the next one, and follows a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        from vidgen.models.causal_wan import CausalWanTransformer3DModel

        torch.manual_seed(int(os.environ["RANK"]))
        self.student, self.teacher = (
            CausalWanTransformer3DModel(
                num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
                ffn_dim=48, num_layers=2, rope_max_seq_len=64, num_frames_per_block=1,
            )
            for _ in range(2)
        )  # fmt: skip
        self.student.enable_gradient_checkpointing()
        self.losses: list[float] = []

    def roles(self):
        return {"student": self.student, "teacher": self.teacher}

    def training_step(self, batch, step, generator):
        from vidgen.memory import FullMemory

        latents, text = batch["latents"], batch["text"]
        noise = torch.randn(latents.shape, generator=generator)
        timestep = torch.full((len(latents),), 637.0)
        memory, loss = FullMemory(num_frames_per_block=1), 0.0
        for frame in range(latents.shape[2]):
            chunk, noisy = latents[:, :, frame : frame + 1], 0.6 * noise[:, :, frame : frame + 1]
            predicted = self.student(chunk + noisy, timestep, text, kv_memory=memory).sample
            with torch.no_grad():
                target = self.teacher(chunk + noisy, timestep, text, kv_memory=memory).sample
                clean = self.student(chunk, 0 * timestep, text, kv_memory=memory, return_key_values=True)
                memory.commit(clean.key_values)
            loss = loss + F.mse_loss(predicted.float(), target.float())
        self.losses.append(loss.item())
        return StepOutput({"student": loss})


class Clips:
    def batch(self, step, rank, world_size, batch_size):
        generator = torch.Generator().manual_seed(2 * step + rank)
        return {
            "latents": torch.randn(batch_size, 4, 3, 4, 4, generator=generator),
            "text": torch.randn(batch_size, 5, 16, generator=generator),
        }


_FLOW = """
folder = Path(sys.argv[1])
for precision, tolerance in (("no", TOLERANCE), ("bf16", {"rtol": 2e-2, "atol": 0})):
    losses = []
    for fsdp in (False, True):
        method = Flow()
        config = TrainConfig(
            output_dir=str(folder / f"{precision}_{fsdp}"), max_steps=3, mixed_precision=precision, fsdp=fsdp,
            optimizers={"student": OptimizerConfig(lr=3e-3)}, ema_decay=0.9,
        )
        fit(method, Clips(), config)
        losses.append(torch.tensor(method.losses))
    print(precision, losses, flush=True)
    torch.testing.assert_close(*losses, **tolerance)
assert all(parameter.dtype == torch.float32 for parameter in method.parameters())
torch.distributed.destroy_process_group()
print("DONE")
"""


@pytest.mark.slow
def test_a_video_transformer_trains_sharded_as_unsharded_and_its_export_loads(tmp_path, launch):
    from vidgen.models.causal_wan import CausalWanTransformer3DModel

    launch(_FLOW, tmp_path)
    for name in ("step_000003", "weights"):
        assert_close(tensors(tmp_path / "no_False" / name), tensors(tmp_path / "no_True" / name), rtol=1e-3, atol=1e-5)
    plain, sharded = (tmp_path / f"no_{fsdp}" / "weights" / "student" for fsdp in (False, True))
    assert (plain / "config.json").read_text() == (sharded / "config.json").read_text()
    averages = load_safetensors(tmp_path / "no_True" / "step_000003" / "student.ema.safetensors")[0]
    loaded = CausalWanTransformer3DModel.from_pretrained(sharded)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, averages[name]), name


# --- one process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def place_sharded():
    """Shards over a process group of one: all of the sharded code but the exchange."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))

    def place(method, config, accelerator):
        twins = {name: processes._without_weights(method.roles()[name]) for name in config.optimizers}
        for role in method.roles().values():
            processes._shard(role, mesh, config.mixed_precision)
        return twins

    yield place
    torch.distributed.destroy_process_group()


def test_shards_change_neither_the_losses_nor_the_files_of_a_run_or_of_its_resume(
    tmp_path, monkeypatch, place_sharded
):
    plain = Duel()
    fit(plain, Samples(), duel_config(tmp_path / "plain", 1))
    monkeypatch.setattr(loop, "place", place_sharded)
    fit(Duel(), Samples(), duel_config(tmp_path / "sharded", 1, max_steps=2))
    sharded = Duel()
    fit(sharded, Samples(), duel_config(tmp_path / "sharded", 1))
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    torch.testing.assert_close(torch.tensor(plain.losses[4:]), torch.tensor(sharded.losses), **TOLERANCE)
    assert_close(tensors(tmp_path / "plain"), tensors(tmp_path / "sharded"), **TOLERANCE)


def test_one_process_trains_as_if_fsdp_were_off(tmp_path):
    for fsdp in (False, True):
        fit(Duel(), Samples(), duel_config(tmp_path / str(fsdp), 1, fsdp=fsdp))
    assert_close(tensors(tmp_path / "False"), tensors(tmp_path / "True"), rtol=0, atol=0)


def test_muon_is_refused_because_it_needs_whole_matrices():
    config = duel_config("x", 1, fsdp=False)
    optimizers = {**config.optimizers, "critic": OptimizerConfig(kind="muon")}
    dataclasses.replace(config, optimizers=optimizers)
    with pytest.raises(ConfigError, match=r"optimizers\.critic\.kind='muon' needs whole matrices"):
        dataclasses.replace(config, optimizers=optimizers, fsdp=True)
