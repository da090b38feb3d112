"""`fit`, the only training loop of the repository.

Optimizer step s, in this order: learning rates (a function of s), gradients of `gradient_accumulation_steps`
micro-batches, mean over processes, finite check, clipping, optimizers of the active roles, their moving averages. Data
order, noise and dropout are functions of (seed, s, rank), so a resumed run equals an uninterrupted one bit for bit.

Each role's loss adds gradients to that role's parameters alone; losses may share graphs and run through other roles.
Processes average gradients after the backward passes, instead of through `DistributedDataParallel`, whose bookkeeping
assumes one backward pass into all parameters per forward pass. With `fsdp` they are averaged as they are computed, in
each micro-batch: keeping whole gradients until the last one would take the memory that sharding saves.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from tqdm import tqdm

from vidgen.runtime.device import derive_seed, generator_for
from vidgen.runtime.errors import TrainingError, suggestion

from .batches import BatchView, make_loader
from .config import TrainConfig
from .journal import claim_run, prepare_folder, training_row, write_row
from .method import TrainingMethod
from .processes import StopRequest, agree, average_gradients, gradient_norm, make_accelerator, place
from .state import TrainState, newest_checkpoint


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Args:
        step: Optimizer steps done, over all resumes.
        samples: Samples seen, over all resumes and processes.
        elapsed_seconds: Wall-clock time in the loop, over all resumes.
        stop_reason: `"max_steps"` or `"max_minutes"`.
        output_dir: The run folder.
        weights_dir: What the method's `save_pretrained` wrote for the last checkpoint.
    """

    step: int
    samples: int
    elapsed_seconds: float
    stop_reason: str
    output_dir: Path
    weights_dir: Path

    def __str__(self) -> str:
        return (
            f"{self.output_dir}: {self.step} steps and {self.samples} samples in {self.elapsed_seconds / 60:.1f} "
            f"minutes, ended by {self.stop_reason}; weights in {self.weights_dir}"
        )


def fit(method: TrainingMethod, data: Any, config: TrainConfig) -> TrainResult:
    """Trains until `max_steps` or `max_minutes`, from the run folder's newest checkpoint if there is one.

    Args:
        method: The algorithm and its models.
        data: A map-style dataset of dictionaries of tensors whose items depend on the index alone, or an object with
            `batch(step, rank, world_size, batch_size) -> dict`, a pure function; its step counts micro-batches.
        config: The run.

    Returns:
        How the run ended. The method's models hold the last weights, not the averaged ones; with `fsdp` they stay
        sharded.

    Raises:
        TrainingError: A loss or gradient is not finite (the weights are those before the failing step), an active
            role has no loss, the folder is in use or holds a run that this one can't continue (see `claim_run`), or a
            role can't be sharded.
        CheckpointError: The newest checkpoint is damaged or does not fit.
        KeyboardInterrupt: After Ctrl-C or SIGTERM, once a checkpoint is written.
    """
    with claim_run(config, config):
        return _train(method, data, config, config)


def fit_recipe(recipe: Any, build: Callable[[Any], tuple[TrainingMethod, Any]]) -> TrainResult:
    """As `fit`, for a whole recipe: its folder is claimed first, and all of its settings are those of the run.

    Args:
        recipe: Dataclass with the run as `train`.
        build: Makes method and data of it.
    """
    with claim_run(recipe.train, recipe):
        return _train(*build(recipe), recipe.train, recipe)


def _train(method: TrainingMethod, data: Any, config: TrainConfig, description: Any) -> TrainResult:
    output_dir = Path(config.output_dir)
    checkpoint = newest_checkpoint(output_dir)
    accelerator = make_accelerator(config)
    device, main = accelerator.device, accelerator.is_main_process
    twins = place(method, config, accelerator)
    state = TrainState(method, config, twins)
    if checkpoint is not None:
        state.load(checkpoint)
    accelerator.wait_for_everyone()
    if main:
        prepare_folder(output_dir, description, state.step)

    view = BatchView(data, config.batch_size, config.seed, accelerator.process_index, accelerator.num_processes)
    batches = iter(make_loader(view, config, state.step, device))
    first_step = state.step
    saved_step = first_step if checkpoint is not None and (output_dir / "weights").is_dir() else None
    budget = math.inf if config.max_minutes is None else 60 * config.max_minutes
    began = time.monotonic() - state.elapsed_seconds
    bar = tqdm(
        desc=output_dir.name,
        total=config.max_steps,
        initial=state.step,
        unit="step",
        disable=not main,
        mininterval=0.5 if sys.stderr.isatty() else 30.0,
    )
    try:
        with StopRequest() as stop, torch.random.fork_rng([device] if device.type == "cuda" else []), bar:
            while True:
                state.elapsed_seconds, stopping = agree(accelerator, time.monotonic() - began, stop.requested)
                ended = state.step >= config.max_steps or state.elapsed_seconds >= budget
                if config.validate_every and state.step % config.validate_every == 0 and state.step > first_step:
                    with state.averaged_weights(), torch.no_grad():
                        measured = {name: float(value) for name, value in method.validate().items()}
                    write_row(accelerator, output_dir, {"step": state.step, "validation": measured})
                if stopping or ended or (state.step % config.checkpoint_every == 0 and state.step > first_step):
                    if saved_step != state.step and (main or twins):
                        state.save(main)
                    saved_step = state.step
                    accelerator.wait_for_everyone()
                if stopping or ended:
                    break

                active = _active_roles(method, state)
                learning_rates = _set_learning_rates(state, state.elapsed_seconds / budget)
                values = _compute_gradients(method, state, active, batches, accelerator)
                _update_weights(state, active, values)
                state.count_step(values, config.batch_size * view.world_size * config.gradient_accumulation_steps)
                bar.update()
                if state.step % config.log_every == 0 or state.step == config.max_steps:
                    state.elapsed_seconds = time.monotonic() - began
                    row = training_row(state, learning_rates)
                    write_row(accelerator, output_dir, row)
                    state.window = {}
                    shown = {name: f"{value:.4g}" for name, value in row["losses"].items()}
                    if config.max_minutes is not None:
                        shown["minutes"] = f"{state.elapsed_seconds / 60:.1f}/{config.max_minutes:g}"
                    bar.set_postfix(shown, refresh=False)
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
    if stopping:
        raise KeyboardInterrupt(f"stopped at step {state.step}, saved in {output_dir}")
    reason = "max_steps" if state.step >= config.max_steps else "max_minutes"
    return TrainResult(state.step, state.samples, state.elapsed_seconds, reason, output_dir, output_dir / "weights")


def _active_roles(method: TrainingMethod, state: TrainState) -> tuple[str, ...]:
    active = tuple(method.active_optimizers(state.step))
    for role in active:
        if role not in state.optimizers:
            raise TrainingError(f"active_optimizers names the role {role!r}: {suggestion(role, state.optimizers)}")
    return active


def _set_learning_rates(state: TrainState, time_fraction: float) -> dict[str, float]:
    rates = {}
    for role, optimizers in state.optimizers.items():
        config = state.config.optimizers[role]
        factor = config.lr_factor(state.step, state.config.max_steps, time_fraction)
        rates[role] = config.lr * factor
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
    return rates


def _compute_gradients(
    method: TrainingMethod,
    state: TrainState,
    active: tuple[str, ...],
    batches: Iterator[dict[str, Any]],
    accelerator: Accelerator,
) -> dict[str, float]:
    """Leaves the mean gradients in the active roles; returns `losses/…`, `metrics/…`, `grad_norm/…` by name."""
    config, step, rank, device = state.config, state.step, accelerator.process_index, accelerator.device
    accumulation = config.gradient_accumulation_steps
    generator = generator_for(config.seed, step, rank, device=device)
    torch.manual_seed(derive_seed(config.seed, step, rank, 1))  # dropout, and whatever else draws without a generator
    sums: dict[str, torch.Tensor] = {}
    for _ in range(accumulation):
        batch = send_to_device(next(batches), device, non_blocking=True)
        with accelerator.autocast():
            output = method.training_step(batch, step, generator)
        for number, role in enumerate(active):
            if role not in output.losses or not output.losses[role].requires_grad:
                raise TrainingError(f"step {step}: no loss that depends on the active role {role!r}")
            loss = output.losses[role].float() / accumulation
            _backpropagate(loss, state, role, retain_graph=number + 1 < len(active))
        values = {f"losses/{name}": value for name, value in output.losses.items()}
        values |= {f"metrics/{name}": value for name, value in output.metrics.items()}
        for name, value in values.items():
            value = torch.as_tensor(value, dtype=torch.float32, device=device).detach().reshape(())
            sums[name] = sums.get(name, 0.0) + value / accumulation
    for role in active:
        gradients = average_gradients(list(state.parameters[role].values()), accelerator)
        if not gradients:
            raise TrainingError(f"step {step}: the loss of role {role!r} reaches none of its parameters")
        sums[f"grad_norm/{role}"] = gradient_norm(gradients, accelerator)
    # One transfer from the device per step, and one verdict for all processes.
    means = accelerator.reduce(torch.stack([sums[name] for name in sorted(sums)]), "mean").tolist()
    return dict(zip(sorted(sums), means, strict=True))


def _backpropagate(loss: torch.Tensor, state: TrainState, role: str, retain_graph: bool) -> None:
    """Adds the gradients of a loss to the parameters of one role; what reaches others is dropped.

    `backward(inputs=...)` would say it in one word, but sharded parameters are no leaves of the graph: their gathered
    copies are.
    """
    own = {id(parameter) for parameter in state.parameters[role].values()}
    kept = [(parameter, parameter.grad) for parameter in state.method.parameters() if id(parameter) not in own]
    for parameter, _ in kept:
        parameter.grad = None
    loss.backward(retain_graph=retain_graph)
    for parameter, gradient in kept:
        parameter.grad = gradient


def _update_weights(state: TrainState, active: tuple[str, ...], values: dict[str, float]) -> None:
    for kind in ("losses/", "grad_norm/"):  # the cause first
        for name, value in values.items():
            if name.startswith(kind) and not math.isfinite(value):
                raise TrainingError(f"step {state.step}: {name} is {value}; stopped before the weights were changed")
    for role in active:
        if state.config.max_grad_norm is not None:
            norm = torch.tensor(values[f"grad_norm/{role}"])
            torch.nn.utils.clip_grads_with_norm_(state.parameters[role].values(), state.config.max_grad_norm, norm)
        for optimizer in state.optimizers[role]:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state.update_average(role)
