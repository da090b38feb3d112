"""`vidgen convert`: foreign checkpoint files into diffusers folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Convert foreign checkpoints to diffusers folders.", rich_markup_mode="markdown")


@app.callback()
def _group() -> None:
    """Convert foreign checkpoints to diffusers folders."""


@app.command("wan-causal")
def wan_causal(
    checkpoint: Annotated[Path, typer.Argument(metavar="IN.pt", help="A `.pt` or `.safetensors` file.")],
    output: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Folder to make; must not exist, or be empty.")],
    base_config: Annotated[
        str, typer.Option(metavar="FOLDER|NAME", help="Transformer folder, or model size, which the file must fit.")
    ] = "wan-1.3b",
    weights: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="generator_ema, generator or model. Default: the first the file has."),
    ] = None,
    lora: Annotated[Path | None, typer.Option(metavar="FILE", help="LoRA that goes with the checkpoint.")] = None,
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora/--keep-lora", help="Fold the LoRA into the weights, or keep it as a file.")
    ] = True,
    lora_scale: Annotated[float, typer.Option(help="Factor of the LoRA, if the file doesn't hold its alpha.")] = 1.0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: as stored.")] = None,
) -> None:
    """Convert a Self-Forcing, CausVid, LongLive or original Wan checkpoint to a `CausalWanTransformer3DModel` folder.

    The file is read with `weights_only=True`, so it can't run code. Every key must be known and have the right shape.
    """
    for path in (checkpoint, lora):
        if path is not None and not path.is_file():
            raise typer.BadParameter(f"{path} is not a file")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise typer.BadParameter(f"{output} exists; choose another folder or remove it")

    from vidgen.models.convert_wan import convert_wan_causal
    from vidgen.runtime.device import select_dtype

    report = convert_wan_causal(
        checkpoint,
        output,
        base_config=base_config,
        weights=weights,
        lora=lora,
        merge_lora=merge_lora,
        lora_scale=lora_scale,
        dtype=None if dtype is None else select_dtype(dtype),
    )
    print(report)
