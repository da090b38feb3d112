"""What a training algorithm is: its models by role, and the losses of one batch. Everything else is `fit`'s."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vidgen.runtime.checkpoint import save_safetensors


@dataclass
class StepOutput:
    """Result of one micro-batch.

    Args:
        losses: Role name to scalar loss. The loss of a role gives gradients to the parameters of that role only, even
            where its graph runs through another role (a generator's loss through its critic).
        metrics: Numbers to log; the same names on every step and every process.
    """

    losses: dict[str, torch.Tensor]
    metrics: dict[str, torch.Tensor | float] = field(default_factory=dict)


class TrainingMethod(nn.Module):
    """Base class of all training algorithms.

    A subclass registers its models as sub-modules, names them in `roles`, and computes losses in `training_step`.
    It does no optimizer step, no logging, no file access.
    """

    def roles(self) -> dict[str, nn.Module]:
        """Returns every model by name, trained and frozen ones."""
        raise NotImplementedError

    def active_optimizers(self, step: int) -> tuple[str, ...]:
        """Returns the roles that are updated at `step`; by default all that have trainable parameters.

        It must depend on `step` alone: processes and resumed runs have to agree.
        """
        roles = self.roles().items()
        return tuple(name for name, role in roles if any(parameter.requires_grad for parameter in role.parameters()))

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        """Computes the losses of one micro-batch; at least those of the roles active at `step`.

        Args:
            batch: Tensors on the training device.
            step: Optimizer steps done so far.
            generator: Source of all noise, on the training device; a pure function of (seed, step, rank).
        """
        raise NotImplementedError

    def validate(self) -> dict[str, float]:
        """Measures the models, without gradients; trained roles hold their averaged weights, where there are any."""
        return {}

    def save_pretrained(self, directory: str | os.PathLike, ema_roles: dict[str, nn.Module]) -> None:
        """Writes the weights a user loads, by default one folder per trained role.

        Args:
            directory: An existing empty folder.
            ema_roles: The trained roles, holding their averaged weights during the call, where there are any.
        """
        for name, role in ema_roles.items():
            target = Path(directory) / name
            if hasattr(role, "save_pretrained"):
                role.save_pretrained(target)
            else:
                save_safetensors(role.state_dict(), target / "model.safetensors")

    def extra_state(self) -> dict[str, Any]:
        """Returns state beyond the trained roles that a resume needs: tensors and JSON-able values by name.

        It must be the same on every process.
        """
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restores what `extra_state` returned; tensors arrive on the CPU."""
        if state:
            raise NotImplementedError(f"{type(self).__name__} saves extra state but does not restore it")
