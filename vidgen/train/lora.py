"""Low-rank adapters (LoRA, arXiv 2106.09685), by `peft`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vidgen.runtime.checks import check_finite_fields, check_whole
from vidgen.runtime.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of a run.

    Attributes:
        rank: of the matrices.
        alpha: their scale is `alpha / rank`.
        dropout: before them.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_finite_fields(self)
        check_whole(1, rank=self.rank, alpha=self.alpha)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout}; it must be from 0 up to, but not including, 1")


def add_lora(model: Any, targets: str, config: LoraConfig) -> Any:
    """Freezes a model and adds trainable low-rank matrices to it.

    Args:
        model: of transformers.
        targets: regular expression of the names of the layers.
        config: see `LoraConfig`.

    Returns:
        A `peft.PeftModel`; its `save_pretrained` writes the adapter alone.

    Raises:
        ConfigError: peft is missing.
    """
    peft = _peft()
    model.enable_input_require_grads()  # layers that are recomputed have gradients only if what enters them has
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=targets
    )
    return peft.get_peft_model(model, settings)


def merge_lora(model: Any, directory: str | os.PathLike) -> Any:
    """The model with the adapters of a folder added to its weights, of its own class again.

    Raises:
        ConfigError: peft is missing.
        CheckpointError: the folder holds no adapters, or those of another model.
    """
    peft = _peft()
    if not Path(directory, "adapter_config.json").is_file():
        raise CheckpointError(
            f"{directory} has no adapter_config.json; give a folder that peft's save_pretrained wrote"
        )
    try:
        return peft.PeftModel.from_pretrained(model, str(directory)).merge_and_unload().eval()
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{directory}: the adapters don't fit the model ({reason})") from error


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("peft is not installed; it comes with: pip install vidgen[train]") from error
    return peft
