"""What the processes of a run (torchrun: one per GPU, or gloo on CPUs) have to agree on, and the signals they get."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vidgen.runtime.device import select_device
from vidgen.runtime.errors import TrainingError, suggestion

from .config import TrainConfig
from .method import TrainingMethod

_BUCKET_BYTES = 2**26


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Joins the process group if there is one, and starts the trackers.

    Raises:
        TrainingError: A tracker is unknown or not installed.
    """
    available = [str(tracker) for tracker in get_available_trackers()]
    for tracker in config.trackers:
        if tracker not in available:  # accelerate itself would skip a missing package without a word
            raise TrainingError(f"tracker {tracker!r} is unknown or not installed: {suggestion(tracker, available)}")
    if "wandb" in config.trackers:
        os.environ.setdefault("WANDB_MODE", "offline")
    AcceleratorState._reset_state()  # an earlier run of this process may have used another precision
    accelerator = Accelerator(
        cpu=select_device("auto").type == "cpu",  # accelerate starts gloo only when told so
        mixed_precision=config.mixed_precision,
        log_with=list(config.trackers) or None,
        project_dir=config.output_dir,
    )
    if config.trackers:
        accelerator.init_trackers(Path(config.output_dir).name)
    return accelerator


def place(method: TrainingMethod, config: TrainConfig, accelerator: Accelerator) -> dict[str, nn.Module]:
    """Moves a method to the training device, with the first process's weights everywhere, sharded if `config.fsdp`.

    Returns:
        Of each trained role that is sharded now, an unsharded twin without weights, for exports: a sharded module
        can't be copied, and its class has another name.

    Raises:
        TrainingError: A role can't be sharded.
    """
    twins: dict[str, nn.Module] = {}
    if config.fsdp and accelerator.num_processes > 1:
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        for name, role in method.roles().items():
            if any(isinstance(parameter, DTensor) for parameter in role.parameters()):
                raise TrainingError(f"role {name!r} is sharded already, by an earlier fit or as part of another role")
            if name in config.optimizers:
                twins[name] = _without_weights(role)
            # One role after the other: no device ever holds more than one whole.
            share_weights(role.to(accelerator.device), accelerator)
            try:
                _shard(role, mesh, config.mixed_precision)
            except ValueError as error:
                raise TrainingError(f"role {name!r} can't be sharded: {error}") from error
    share_weights(method.to(accelerator.device), accelerator)
    return twins


def share_weights(module: nn.Module, accelerator: Accelerator) -> None:
    """Copies the first process's parameters and buffers to all others; sharded ones are left as they are."""
    if accelerator.num_processes > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            if not isinstance(tensor, DTensor):
                tensor.data.copy_(broadcast(tensor.data))


def _without_weights(role: nn.Module) -> nn.Module:
    """Copies a module, its parameters replaced by empty ones on the meta device."""
    empty = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in role.parameters()}
    return copy.deepcopy(role, empty).eval()


def _shard(role: nn.Module, mesh: DeviceMesh, mixed_precision: str) -> None:
    """Shards a model in place: each repeated block is gathered by itself, then whatever is left.

    The blocks are those that diffusers and transformers models name for compilation or placement.
    """
    names = getattr(role, "_repeated_blocks", None) or getattr(role, "_no_split_modules", None) or ()
    blocks = [module for module in role.modules() if module is not role and type(module).__name__ in names]
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed_precision == "bf16" else None,
        reduce_dtype=torch.float32,
        # Autocast casts what may be cast; timesteps and rotary tables in bfloat16 would be too coarse.
        cast_forward_inputs=False,
    )
    for module in [*reversed(blocks), role]:
        # Said explicitly, it holds for the root too. Otherwise the root keeps its gathered weights after a forward
        # without a backward, and the next forward doesn't see what has been loaded or averaged in between.
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    for module in role.modules():
        if isinstance(module, FSDPModule) and mesh.device_type == "cpu":
            # Gloo's reduce-scatter takes a mean for a sum (github.com/pytorch/pytorch/issues/162338).
            module.set_force_sum_reduction_for_comms(True)


def average_gradients(parameters: Sequence[torch.nn.Parameter], accelerator: Accelerator) -> list[torch.Tensor]:
    """Replaces gradients by their mean over processes, in pieces of 64 MiB; returns those that exist anywhere.

    A parameter that no process used keeps no gradient, as in a run of one process. Those of sharded parameters are
    means already.
    """
    if accelerator.num_processes > 1 and not any(isinstance(parameter, DTensor) for parameter in parameters):
        present = torch.tensor([float(p.grad is not None) for p in parameters], device=accelerator.device)
        counts = accelerator.reduce(present, "sum").tolist()
        used = [parameter for parameter, count in zip(parameters, counts, strict=True) if count > 0]
        bucket: list[torch.Tensor] = []
        for number, parameter in enumerate(used):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            last = number + 1 == len(used) or used[number + 1].dtype != parameter.dtype
            if last or sum(gradient.nbytes for gradient in bucket) >= _BUCKET_BYTES:
                mean = accelerator.reduce(torch.cat([gradient.flatten() for gradient in bucket]), "mean")
                pieces = mean.split([gradient.numel() for gradient in bucket])
                for gradient, piece in zip(bucket, pieces, strict=True):
                    gradient.copy_(piece.view_as(gradient))
                bucket = []
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def gradient_norm(gradients: Sequence[torch.Tensor], accelerator: Accelerator) -> torch.Tensor:
    """Returns the 2-norm of gradients, over all their shards, in float32."""
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients).float()
    own = torch.nn.utils.get_total_norm([gradient.to_local() for gradient in gradients]).float()
    return accelerator.reduce(own.square(), "sum").sqrt()


def agree(accelerator: Accelerator, elapsed_seconds: float, stop: bool) -> tuple[float, bool]:
    """Makes all processes see the first one's clock and anyone's request to stop."""
    if accelerator.num_processes == 1:
        return elapsed_seconds, stop
    clock = elapsed_seconds if accelerator.is_main_process else 0.0
    own = torch.tensor([clock, float(stop)], device=accelerator.device)
    elapsed_seconds, stops = accelerator.reduce(own, "sum").tolist()
    return elapsed_seconds, stops > 0


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM in a `with` block into `requested`; the second interrupts at once."""

    def __enter__(self) -> StopRequest:
        self.requested = False
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        self._restore()


def gather_samples(tensor: torch.Tensor) -> torch.Tensor:
    """Concatenates equally shaped tensors of all processes along their first dimension, in order of rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)
