"""Everything a training run changes, and its checkpoint folder.

Layout of a checkpoint `step_000200/` (200 = optimizer steps done):

    ROLE.safetensors             parameters and buffers of a trained role
    ROLE.ema.safetensors         float32 moving average of its trainable parameters
    ROLE.optimizer.safetensors   optimizer tensors, named INDEX/STATE/PARAMETER (INDEX: position in `build`'s list)
    extra_state.safetensors      tensors of `TrainingMethod.extra_state`
    state.json                   counters, log window, JSON part of the extra state, CRC-32 of each other file

Frozen roles are not in it: whoever builds the method loads them again. Tensors are whole, also those of a sharded run.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vidgen.runtime.checkpoint import atomic_directory, file_checksum, load_safetensors, save_safetensors
from vidgen.runtime.errors import CheckpointError, TrainingError, suggestion

from .config import TrainConfig
from .method import TrainingMethod

FORMAT = 1


def newest_checkpoint(output_dir: Path) -> Path | None:
    """Returns the checkpoint folder with the most steps, whole or damaged; unfinished ones have another name."""
    found = list_checkpoints(output_dir)
    return found[-1] if found else None


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Returns the checkpoint folders, oldest first."""
    found = [path for path in output_dir.glob("step_*") if path.is_dir() and re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]))


class TrainState:
    """Trained roles, their optimizers and averages, and the run's counters.

    Args:
        method: Already on the training device. Roles without optimizer config are frozen and set to `eval()`.
        config: The run.
        twins: Unsharded twins, without weights, of the trained roles that are sharded.

    Raises:
        TrainingError: A configured role does not exist or has nothing to train.
    """

    def __init__(self, method: TrainingMethod, config: TrainConfig, twins: Mapping[str, nn.Module]) -> None:
        self.method = method
        self.config = config
        self.twins = twins
        self.step = 0
        self.samples = 0
        self.elapsed_seconds = 0.0
        # name -> [sum, count] since the last row of metrics.jsonl
        self.window: dict[str, list[float]] = {}

        roles = method.roles()
        for name in config.optimizers:
            if name not in roles:
                raise TrainingError(f"optimizers names the role {name!r}: {suggestion(name, roles)}")
        for name, role in roles.items():
            role.train(name in config.optimizers)
            if name not in config.optimizers:
                role.requires_grad_(False)
        self.roles: dict[str, nn.Module] = {name: roles[name] for name in config.optimizers}
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        self.optimizers: dict[str, list[torch.optim.Optimizer]] = {}
        owners: dict[int, str] = {}
        for name, role in self.roles.items():
            trainable = {key: parameter for key, parameter in role.named_parameters() if parameter.requires_grad}
            if not trainable:
                raise TrainingError(f"role {name!r} has an optimizer but no parameter that requires a gradient")
            for key, parameter in trainable.items():
                if id(parameter) in owners:
                    raise TrainingError(f"roles {owners[id(parameter)]!r} and {name!r} share the parameter {key!r}")
                owners[id(parameter)] = name
            self.parameters[name] = trainable
            self.optimizers[name] = config.optimizers[name].build(role)
        self.ema: dict[str, dict[str, torch.Tensor]] = {}
        if config.ema_decay is not None:
            self.ema = {
                name: {key: parameter.detach().float().clone() for key, parameter in parameters.items()}
                for name, parameters in self.parameters.items()
            }

    @torch.no_grad()
    def update_average(self, role: str) -> None:
        """Moves a role's average toward the weights that the current step gave it."""
        updates = self.step + 1 - self.config.ema_start
        decay = 0.0 if updates <= 0 else min(self.config.ema_decay or 0.0, (1 + updates) / (10 + updates))
        for key, average in self.ema.get(role, {}).items():
            _local(average).lerp_(_local(self.parameters[role][key].detach()).float(), 1 - decay)

    def count_step(self, values: dict[str, float], samples: int) -> None:
        """Counts a finished step and adds its numbers to the log window."""
        self.step += 1
        self.samples += samples
        for name, value in values.items():
            total, count = self.window.get(name, (0.0, 0))
            self.window[name] = [total + value, count + 1]

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[dict[str, nn.Module]]:
        """Yields the trained roles in `eval()` holding their averages, and puts the weights back afterwards."""
        kept = {
            name: {key: self.parameters[name][key].detach().clone() for key in averages}
            for name, averages in self.ema.items()
        }
        try:
            self._assign(self.ema)
            for role in self.roles.values():
                role.eval()
            yield self.roles
        finally:
            self._assign(kept)
            for role in self.roles.values():
                role.train()

    @torch.no_grad()
    def _assign(self, values: dict[str, dict[str, torch.Tensor]]) -> None:
        for name, tensors in values.items():
            for key, tensor in tensors.items():
                self.parameters[name][key].copy_(tensor)

    def save(self, main: bool) -> None:
        """Writes the checkpoint of the current step and the weights a user loads; drops the oldest checkpoints.

        Args:
            main: Whether this process writes. Of a sharded run all have to call it, the others give their shards.
        """
        output_dir = Path(self.config.output_dir)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(atomic_directory(output_dir / f"step_{self.step:06d}")) if main else None
            for name, role in self.roles.items():
                _save_whole(role.state_dict(), folder, f"{name}.safetensors")
                _save_whole(self._optimizer_tensors(name), folder, f"{name}.optimizer.safetensors")
                if name in self.ema:
                    _save_whole(self.ema[name], folder, f"{name}.ema.safetensors")
            if folder is not None:
                self._save_scalars(folder)
        with self.averaged_weights() as roles, torch.no_grad():
            for name, twin in self.twins.items():
                weights = _gather(roles[name].state_dict(), keep=main)
                if main:
                    twin.load_state_dict(weights, assign=True)
            if main:
                with atomic_directory(output_dir / "weights") as folder:
                    self.method.save_pretrained(folder, {**roles, **self.twins})
                for twin in self.twins.values():
                    empty = {key: tensor.to("meta") for key, tensor in twin.state_dict().items()}
                    twin.load_state_dict(empty, assign=True)
        if main:
            for old in list_checkpoints(output_dir)[: -self.config.keep_checkpoints]:
                shutil.rmtree(old)

    def _save_scalars(self, folder: Path) -> None:
        extra = self.method.extra_state()
        tensors = {key: value for key, value in extra.items() if isinstance(value, torch.Tensor)}
        save_safetensors(tensors, folder / "extra_state.safetensors")
        scalars = {
            "format": FORMAT,
            "step": self.step,
            "samples": self.samples,
            "elapsed_seconds": self.elapsed_seconds,
            "window": self.window,
            "extra_state": {key: value for key, value in extra.items() if key not in tensors},
            "files": {file.name: file_checksum(file) for file in sorted(folder.glob("*.safetensors"))},
        }
        (folder / "state.json").write_text(json.dumps(scalars, indent=1))

    def load(self, folder: Path) -> None:
        """Restores a checkpoint.

        Raises:
            CheckpointError: A file is missing, damaged, or does not fit the roles or optimizers; nothing older is
                tried, because silently losing steps would be worse.
        """
        try:
            scalars = self._read_scalars(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; delete {folder} to continue from the checkpoint before it") from error
        for name, role in self.roles.items():
            self._load_role(folder, name, role)
        extra, _ = load_safetensors(folder / "extra_state.safetensors")
        self.method.load_extra_state({**scalars["extra_state"], **extra})
        self.step = scalars["step"]
        self.samples = scalars["samples"]
        self.elapsed_seconds = scalars["elapsed_seconds"]
        self.window = scalars["window"]

    def _read_scalars(self, folder: Path) -> dict[str, Any]:
        path = folder / "state.json"
        try:
            scalars = json.loads(path.read_text())
            if scalars["format"] != FORMAT:
                raise CheckpointError(f"{path} has format {scalars['format']}; this version reads {FORMAT}")
            missing = {"step", "samples", "elapsed_seconds", "window", "extra_state", "files"} - scalars.keys()
        except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is missing or damaged ({error})") from error
        if missing:
            raise CheckpointError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}")
        for name, checksum in scalars["files"].items():
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder / name} does not exist")
            if file_checksum(folder / name) != checksum:
                raise CheckpointError(f"{folder / name} is damaged: its checksum differs from the one in state.json")
        return scalars

    def _load_role(self, folder: Path, name: str, role: nn.Module) -> None:
        path = folder / f"{name}.safetensors"
        if not path.exists():
            raise CheckpointError(
                f"{folder} holds no role {name!r}; was it added to optimizers after this checkpoint?"
            )
        tensors, _ = load_safetensors(path)
        own = role.state_dict()
        try:
            role.load_state_dict({key: _shard_like(tensor, own.get(key)) for key, tensor in tensors.items()})
        except RuntimeError as error:
            raise CheckpointError(f"{path} does not fit the role {name!r}: {' '.join(str(error).split())}") from error
        if name in self.ema:
            path = folder / f"{name}.ema.safetensors"
            if not path.exists():
                raise CheckpointError(f"{folder} holds no averaged weights; the run was begun with ema_decay=null")
            tensors, _ = load_safetensors(path)
            if {key: tensor.shape for key, tensor in tensors.items()} != {
                key: tensor.shape for key, tensor in self.ema[name].items()
            }:
                raise CheckpointError(f"{path} does not fit the trainable parameters of the role {name!r}")
            for key, tensor in tensors.items():
                self.ema[name][key].copy_(_shard_like(tensor, self.ema[name][key]))
        path = folder / f"{name}.optimizer.safetensors"
        tensors, _ = load_safetensors(path)
        self._load_optimizers(name, tensors, path)

    def _optimizer_tensors(self, name: str) -> dict[str, torch.Tensor]:
        names = {id(parameter): key for key, parameter in self.parameters[name].items()}
        return {
            f"{index}/{key}/{names[id(parameter)]}": value
            for index, optimizer in enumerate(self.optimizers[name])
            for parameter, values in optimizer.state.items()
            for key, value in values.items()
        }

    def _load_optimizers(self, name: str, tensors: dict[str, torch.Tensor], path: Path) -> None:
        names = {id(parameter): key for key, parameter in self.parameters[name].items()}
        by_parameter: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
        for full, tensor in tensors.items():
            index, key, parameter_name = full.split("/", 2)
            # Step counts are scalars, which every process has.
            sharded = _shard_like(tensor, self.parameters[name].get(parameter_name)) if tensor.ndim else tensor
            by_parameter.setdefault((int(index), parameter_name), {})[key] = sharded
        for index, optimizer in enumerate(self.optimizers[name]):
            # torch numbers the parameters of an optimizer in the order of its groups
            ordered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
            entries = {
                number: by_parameter.pop((index, key))
                for number, key in enumerate(ordered)
                if (index, key) in by_parameter
            }
            needed = (
                {"momentum_buffer"} if isinstance(optimizer, torch.optim.Muon) else {"step", "exp_avg", "exp_avg_sq"}
            )
            if misfits := [number for number, entry in entries.items() if entry.keys() != needed]:
                raise self._other_optimizer(path, ordered[misfits[0]])
            optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})
        if by_parameter:
            raise self._other_optimizer(path, next(iter(by_parameter))[1])

    @staticmethod
    def _other_optimizer(path: Path, parameter: str) -> CheckpointError:
        return CheckpointError(
            f"{path} holds another optimizer's state of {parameter!r}; was its kind changed, or what is trainable?"
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this process's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gather(tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Returns whole tensors, or none at all without `keep`; all processes of a sharded run have to call it."""
    whole = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            gathered = tensor.full_tensor()
            tensor = gathered.cpu() if keep else gathered  # one at a time on the device
        if keep:
            whole[key] = tensor
    return whole


def _save_whole(tensors: Mapping[str, torch.Tensor], folder: Path | None, name: str) -> None:
    """Gathers tensors and writes them where a folder is given."""
    whole = _gather(tensors, keep=folder is not None)
    if folder is not None:
        save_safetensors(whole, folder / name)


def _shard_like(tensor: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
    """Cuts this process's part out of a whole tensor where the reference of that shape is sharded."""
    if not isinstance(reference, DTensor) or reference.shape != tensor.shape:
        return tensor
    tensor = tensor.to(reference.device)
    # Every process has read the file, so nothing is sent; the copy lets go of the rest of the tensor.
    return distribute_tensor(tensor, reference.device_mesh, reference.placements, src_data_rank=None).clone()
