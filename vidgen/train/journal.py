"""What a run writes about itself: `config.yaml`, `environment.json`, `metrics.jsonl`, and the trackers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.config import to_yaml
from vidgen.runtime.meter import run_environment

from .config import TrainConfig
from .state import TrainState


def prepare_folder(output_dir: Path, config: TrainConfig, step: int) -> None:
    """Describes the run, removes what a killed run left half-written, and cuts `metrics.jsonl` back to `step`."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for leftover in [*output_dir.glob(".step_*.tmp"), *output_dir.glob(".weights.*.tmp")]:
        shutil.rmtree(leftover)
    with atomic_write(output_dir / "config.yaml") as path:
        path.write_text(to_yaml(config))
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
