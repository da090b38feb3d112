"""`vidgen convert`: foreign checkpoint files into diffusers folders."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Convert foreign checkpoints to diffusers folders.", rich_markup_mode="markdown")


class Weights(StrEnum):
    """Which of the two sets of weights that training leaves in one file."""

    generator_ema = "generator_ema"
    generator = "generator"


@app.callback()
def _group() -> None:
    """Convert foreign checkpoints to diffusers folders."""


@app.command("wan-causal")
def wan_causal(
    checkpoint: Annotated[Path, typer.Argument(metavar="IN.pt", help="A `.pt` file or `.safetensors` file.")],
    output: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Folder to make; must not exist.")],
    base_config: Annotated[
        str,
        typer.Option(metavar="FOLDER|wan-1.3b", help="Transformer folder whose `config.json` the weights must fit."),
    ] = "wan-1.3b",
    lora: Annotated[Path | None, typer.Option(metavar="FILE", help="LoRA weights that belong to it.")] = None,
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora/--keep-lora", help="Fold the LoRA into the weights, or keep it as a file.")
    ] = True,
    weights: Annotated[Weights, typer.Option(help="Which weights to take.")] = Weights.generator_ema,
) -> None:
    """Convert a Self-Forcing, CausVid or LongLive checkpoint to a `CausalWanTransformer3DModel` folder.

    The file is read with `weights_only=True`, so it can't run code. Every key must be known and have the right shape.
    """
    for path in (checkpoint, lora):
        if path is not None and not path.is_file():
            raise typer.BadParameter(f"{path} is not a file")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise typer.BadParameter(f"{output} exists; choose another folder or remove it")

    from vidgen.models.convert_wan import convert_wan_causal

    convert_wan_causal(
        checkpoint,
        output,
        base_config=base_config,
        lora=lora,
        merge_lora=merge_lora,
        weights=weights.value,
    )
