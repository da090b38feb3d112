"""What the processes of a run (torchrun: one per GPU, or gloo on CPUs) have to agree on, and the signals they get."""

from __future__ import annotations

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

from vidgen.runtime.device import select_device
from vidgen.runtime.errors import TrainingError, suggestion

from .config import TrainConfig

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


def share_weights(module: torch.nn.Module, accelerator: Accelerator) -> None:
    """Copies the first process's parameters and buffers to all others."""
    if accelerator.num_processes > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.data.copy_(broadcast(tensor.data))


def average_gradients(parameters: Sequence[torch.nn.Parameter], accelerator: Accelerator) -> list[torch.Tensor]:
    """Replaces gradients by their mean over processes, in pieces of 64 MiB; returns those that exist anywhere.

    A parameter that no process used keeps no gradient, as in a run of one process.
    """
    if accelerator.num_processes > 1:
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
