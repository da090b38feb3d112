"""Parts of a model card that are read from the runs and the models themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from diffusers import DiffusionPipeline
from torch import nn


def run_table(folders: Sequence[str]) -> str:
    """Rows of a Markdown table: run, steps, minutes, last training losses, last held-out figures.

    Args:
        folders: run folders of `fit`.
    """
    rows = []
    for folder in map(Path, folders):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        last = next(record for record in reversed(records) if "losses" in record)
        validations = [record["validation"] for record in records if "validation" in record]
        losses = ", ".join(f"{role} {value:.4f}" for role, value in last["losses"].items())
        held_out = ", ".join(f"{key} {value:.3f}" for key, value in (validations[-1] if validations else {}).items())
        rows.append(
            f"| {'/'.join(folder.parts[-2:])} | {last['step']} | {last['seconds'] / 60:.1f} | {losses} | {held_out} |"
        )
    return "\n".join(rows)


def parameter_counts(pipeline: DiffusionPipeline) -> dict[str, float]:
    """Millions of parameters of each network, largest first."""
    counts = {
        name: sum(parameter.numel() for parameter in component.parameters()) / 1e6
        for name, component in pipeline.components.items()
        if isinstance(component, nn.Module)
    }
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
