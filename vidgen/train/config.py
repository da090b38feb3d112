"""What a training run is told: `TrainConfig`, and one `OptimizerConfig` per trained role."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from vidgen.runtime.errors import ConfigError

# Settings, by the last part of their key, that may differ from those of the run that is resumed: where it is, how long
# it goes on, how often it writes and to whom, and how fast it computes the same. Anything else makes another run.
MAY_CHANGE = frozenset(
    {
        *("output_dir", "resume", "max_steps", "max_minutes"),
        *("checkpoint_every", "keep_checkpoints", "log_every", "validate_every", "trackers"),
        *("num_workers", "fsdp", "compile", "gradient_checkpointing"),
    }
)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning rate of one role.

    Weight decay is decoupled and applies to parameters with two or more dimensions only.

    Args:
        kind: `"adamw"`, or `"muon"`: Muon for the two-dimensional weights inside transformer blocks (parameter name
            contains `blocks.` or, as in transformers, `layers.`; embeddings excluded) and AdamW for everything else.
            Muon's update is scaled to AdamW's typical size, so both take similar learning rates.
        lr: Peak learning rate.
        betas: AdamW's decay rates of the first and second moment.
        weight_decay: Decoupled weight decay.
        warmup_steps: Optimizer steps of linear warm-up.
        schedule: Course of the learning rate after the warm-up.
        schedule_by: What the decay follows. `"steps"`: step / max_steps. `"time"`: the larger of step / max_steps and
            elapsed / max_minutes, so that a run ended by the clock is annealed too; it depends on the speed of the
            machine, so two such runs are not equal bit for bit.
        min_lr_ratio: Learning rate at the end of the decay, as a fraction of `lr`.
        adamw_lr: With `kind="muon"`, the peak learning rate of the parameters Muon does not take; `None` = `lr`.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    schedule_by: Literal["steps", "time"] = "steps"
    min_lr_ratio: float = 0.0
    adamw_lr: float | None = None

    def __post_init__(self) -> None:
        _require(self.kind in ("adamw", "muon"), f"kind={self.kind!r}; allowed: adamw, muon")
        _require(0 < self.lr < math.inf, f"lr={self.lr}; it must be positive and finite")
        _require(
            self.adamw_lr is None or 0 < self.adamw_lr < math.inf,
            f"adamw_lr={self.adamw_lr}; it must be positive and finite, or null",
        )
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"betas={self.betas}; both must be in [0, 1)",
        )
        _require(self.weight_decay >= 0, f"weight_decay={self.weight_decay}; it must not be negative")
        _require(self.warmup_steps >= 0, f"warmup_steps={self.warmup_steps}; it must not be negative")
        _require(
            self.schedule in ("constant", "cosine", "linear"),
            f"schedule={self.schedule!r}; allowed: constant, cosine, linear",
        )
        _require(self.schedule_by in ("steps", "time"), f"schedule_by={self.schedule_by!r}; allowed: steps, time")
        _require(0 <= self.min_lr_ratio <= 1, f"min_lr_ratio={self.min_lr_ratio}; it must be in [0, 1]")

    def lr_factor(self, step: int, max_steps: int, time_fraction: float = 0.0) -> float:
        """Returns learning rate / `lr` of a step; it depends on the arguments alone, so resuming needs no state.

        Args:
            step: Optimizer steps done before this one.
            max_steps: Steps of the whole run.
            time_fraction: Elapsed share of the wall-clock budget, used with `schedule_by="time"`.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, max_steps - self.warmup_steps)
        if self.schedule_by == "time":
            progress = max(progress, time_fraction)
        progress = min(1.0, max(0.0, progress))
        if self.schedule == "constant":
            return 1.0
        remaining = 0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1 - progress
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * remaining

    def build(self, role: torch.nn.Module) -> list[torch.optim.Optimizer]:
        """Builds the optimizers of a role's trainable parameters; each group keeps its peak rate as `peak_lr`."""
        embeddings = {
            id(parameter)
            for module in role.modules()
            if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
            for parameter in module.parameters(recurse=False)
        }
        hidden, decayed, plain = [], [], []
        for name, parameter in role.named_parameters():
            if not parameter.requires_grad:
                continue
            inside = "blocks." in name or "layers." in name
            if self.kind == "muon" and inside and parameter.ndim == 2 and id(parameter) not in embeddings:
                hidden.append(parameter)
            elif parameter.ndim >= 2:
                decayed.append(parameter)
            else:
                plain.append(parameter)
        optimizers: list[torch.optim.Optimizer] = []
        if hidden:
            muon = torch.optim.Muon(hidden, lr=self.lr, weight_decay=self.weight_decay, adjust_lr_fn="match_rms_adamw")
            muon.param_groups[0]["peak_lr"] = self.lr
            optimizers.append(muon)
        rest_lr = self.lr if self.kind == "adamw" or self.adamw_lr is None else self.adamw_lr
        groups = [
            {"params": parameters, "weight_decay": decay, "peak_lr": rest_lr}
            for parameters, decay in ((decayed, self.weight_decay), (plain, 0.0))
            if parameters
        ]
        if groups:
            # One kernel per group instead of a dozen per parameter; MPS and others keep torch's own choice.
            fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in decayed + plain)
            optimizers.append(torch.optim.AdamW(groups, lr=rest_lr, betas=self.betas, fused=fused or None))
        return optimizers


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Args:
        output_dir: Run folder: checkpoints, `weights/`, `metrics.jsonl`, `config.yaml`, `environment.json`.
        max_steps: Optimizer steps of the whole run.
        optimizers: Role name to optimizer. Roles that are not named are frozen.
        batch_size: Samples per process and micro-batch.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        mixed_precision: `"bf16"` runs the forward under autocast; weights, gradients and EMA stay as they are.
        fsdp: Shard parameters, gradients, optimizer states and averages of all roles, frozen ones too, over the
            processes (FSDP2, `torch.distributed.fsdp.fully_shard`); with bf16, gathered weights are bfloat16 and
            gradients are averaged in float32. Checkpoints and `weights/` are those of an unsharded run, so a run can
            be resumed with or without it and by any number of processes. A role is then used through its forward
            only, and all processes make the same calls in the same order, with the same parameters in use. One
            process has nobody to share with and trains as if it were off.
        max_grad_norm: Gradients of a role are scaled down to this norm; `None` = no clipping.
        ema_decay: Largest decay of the moving average of the weights (in float32); it rises from 0.1 as
            (1 + n) / (10 + n) over n updates. `None` = no average.
        ema_start: Steps before the average starts; until then it equals the weights.
        seed: Fixes data order and noise; 0 is a seed like any other.
        max_minutes: Wall-clock budget in minutes, counted over all resumes; `None` = none.
        checkpoint_every: Steps between checkpoints.
        keep_checkpoints: Newest checkpoints that are kept.
        log_every: Steps between rows of `metrics.jsonl`; a row holds means over these steps.
        validate_every: Steps between calls of the method's `validate`; 0 = never.
        resume: Continue from the newest checkpoint of `output_dir`, which must have been begun with the same settings,
            but for those of `MAY_CHANGE`; `False` refuses a folder that has one.
        num_workers: Processes that load data; 0 = load in the training process.
        trackers: Names of accelerate trackers (`"tensorboard"`, `"wandb"`, …) that get the rows too.
    """

    output_dir: str
    max_steps: int
    optimizers: dict[str, OptimizerConfig]
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    mixed_precision: Literal["no", "bf16"] = "no"
    fsdp: bool = False
    max_grad_norm: float | None = 1.0
    ema_decay: float | None = None
    ema_start: int = 0
    seed: int = 0
    max_minutes: float | None = None
    checkpoint_every: int = 200
    keep_checkpoints: int = 2
    log_every: int = 10
    validate_every: int = 0
    resume: bool = True
    num_workers: int = 0
    trackers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "gradient_accumulation_steps", "checkpoint_every",
                     "keep_checkpoints", "log_every"):  # fmt: skip
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}; it must be 1 or more")
        for name in ("ema_start", "seed", "validate_every", "num_workers"):
            _require(getattr(self, name) >= 0, f"{name}={getattr(self, name)}; it must be 0 or more")
        _require(bool(self.output_dir), "output_dir is empty; give a folder")
        _require(bool(self.optimizers), "optimizers is empty; name at least one role to train")
        _require(
            self.mixed_precision in ("no", "bf16"),
            f"mixed_precision={self.mixed_precision!r}; allowed: no, bf16",
        )
        for name in ("max_grad_norm", "max_minutes"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name}={value}; it must be positive or null")
        _require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f"ema_decay={self.ema_decay}; it must be between 0 and 1, or null",
        )
        for role, optimizer in self.optimizers.items():
            _require(
                not self.fsdp or optimizer.kind != "muon",
                f"optimizers.{role}.kind='muon' needs whole matrices, which fsdp=true shards; use adamw or fsdp=false",
            )
            _require(
                optimizer.schedule_by == "steps" or self.max_minutes is not None,
                f"optimizers.{role}.schedule_by='time' needs max_minutes",
            )
