"""A run's folder: who may use it, and what a run writes there about itself: `config.yaml`, `environment.json`,
`metrics.jsonl`, and the trackers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState

from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.config import changed_settings, to_yaml
from vidgen.runtime.device import select_device
from vidgen.runtime.errors import ConfigError, TrainingError
from vidgen.runtime.meter import run_environment

from .config import MAY_CHANGE, TrainConfig
from .state import TrainState, newest_checkpoint

try:
    import fcntl
except ImportError:  # not on Windows, where two runs in one folder go unnoticed
    fcntl = None

CONFIG_NAME = "config.yaml"
LOCK_NAME = "run.lock"


@contextlib.contextmanager
def claim_run(config: TrainConfig, description: Any) -> Iterator[None]:
    """Keeps other trainings out of a run's folder, once it is sure that its checkpoints are of the same settings.

    Claimed before anything is computed or written, a run that can't go on ends at once and changes nothing. All
    processes of the run join; the first one claims the folder for them.

    Args:
        config: The run.
        description: Dataclass of everything the run depends on; `config` itself, or a recipe that holds it.

    Raises:
        TrainingError: Another training is using the folder, its checkpoints were made with other settings, or it has
            some and `resume` is off.
    """
    processes = PartialState(cpu=select_device("auto").type == "cpu")  # as `make_accelerator`, which joins the same
    with contextlib.ExitStack() as stack:
        if processes.is_main_process:
            stack.enter_context(_lock(Path(config.output_dir)))
            _check_settings(config, description)
        processes.wait_for_everyone()
        yield


@contextlib.contextmanager
def _lock(output_dir: Path) -> Iterator[None]:
    """Holds a lock of the operating system, which ends with the process, however it ends."""
    path = output_dir / LOCK_NAME
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        while True:
            file = open(path, "w")  # noqa: SIM115
            if fcntl is None:
                break
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run that held it may have removed it since it was opened here.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
            file.close()
    except BlockingIOError as error:
        file.close()
        raise TrainingError(
            f"another training is using {output_dir}; wait until it ends, stop it, or use another output_dir"
        ) from error
    except OSError as error:
        raise TrainingError(f"cannot use {output_dir}: {error.strerror}; use another output_dir") from error
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _check_settings(config: TrainConfig, description: Any) -> None:
    """Refuses to mix settings; a folder without checkpoints holds nothing yet to be mixed with."""
    output_dir = Path(config.output_dir)
    checkpoint = newest_checkpoint(output_dir)
    if checkpoint is None:
        return
    if not config.resume:
        raise TrainingError(f"{output_dir} holds the checkpoint {checkpoint.name}; use resume=true or another folder")
    path = output_dir / CONFIG_NAME
    try:
        changed = changed_settings(path.read_text(), to_yaml(description))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise TrainingError(
            f"{path} is missing or damaged, so nothing tells which settings {checkpoint.name} was made with; put it "
            f"back or use another output_dir ({error})"
        ) from error
    mixed = [f"{key}: {values}" for key, values in changed.items() if key.split(".")[-1] not in MAY_CHANGE]
    if mixed:
        raise TrainingError(
            f"{output_dir} holds a run with other settings (stored -> given): {'; '.join(mixed)}. Use the stored ones "
            "or another output_dir"
        )


def prepare_folder(output_dir: Path, description: Any, step: int) -> None:
    """Describes the run, removes what a killed run left half-written, and cuts `metrics.jsonl` back to `step`."""
    for leftover in [*output_dir.glob(".step_*.tmp"), *output_dir.glob(".weights.*.tmp")]:
        shutil.rmtree(leftover)
    with atomic_write(output_dir / CONFIG_NAME) as path:
        path.write_text(to_yaml(description))
    with atomic_write(output_dir / "environment.json") as path:
        path.write_text(json.dumps(run_environment(), indent=1))
    metrics = output_dir / "metrics.jsonl"
    kept = []
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        try:
            if json.loads(line)["step"] > step:
                break
        except json.JSONDecodeError:  # the row that a crash cut short
            break
        kept.append(line + "\n")
    with atomic_write(metrics) as path:
        path.write_text("".join(kept))


def write_row(accelerator: Accelerator, output_dir: Path, row: dict[str, Any]) -> None:
    """Appends a row to `metrics.jsonl` and sends its numbers to the trackers; the main process alone writes."""
    if accelerator.is_main_process:
        with open(output_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
    parts = {kind: part for kind, part in row.items() if isinstance(part, dict)}
    accelerator.log(
        {f"{kind}/{name}": value for kind, part in parts.items() for name, value in part.items()}, step=row["step"]
    )


def training_row(state: TrainState, learning_rates: dict[str, float]) -> dict[str, Any]:
    """Returns the means since the last row."""
    row: dict[str, Any] = {"step": state.step, "losses": {}, "metrics": {}, "lr": learning_rates, "grad_norm": {}}
    for full_name, (total, count) in state.window.items():
        kind, _, name = full_name.partition("/")
        row[kind][name] = total / count
    return row | {"seconds": round(state.elapsed_seconds, 3), "samples": state.samples}
