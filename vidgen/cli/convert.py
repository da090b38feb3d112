"""`vidgen convert`: foreign checkpoint files into diffusers folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Convert foreign checkpoints to diffusers folders.", rich_markup_mode="markdown")


@app.callback()
def _group() -> None:
    """Convert foreign checkpoints to diffusers folders."""


def _check_paths(checkpoint: Path, output: Path) -> None:
    if not checkpoint.is_file():
        raise typer.BadParameter(f"{checkpoint} is not a file")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise typer.BadParameter(f"{output} exists; choose another folder or remove it")


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
    _check_paths(checkpoint, output)
    if lora is not None and not lora.is_file():
        raise typer.BadParameter(f"{lora} is not a file")

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


@app.command()
def live(
    checkpoint: Annotated[Path, typer.Argument(metavar="IN.ckpt", help="A Lightning checkpoint of the release.")],
    output: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Folder to make; must not exist, or be empty.")],
    base_config: Annotated[
        str, typer.Option(metavar="NAME", help="Model size which the file must fit.")
    ] = "live-re10k",
    forcing: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="live, diffusion_forcing or teacher_forcing. Default: known for released files."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: as stored.")] = None,
) -> None:
    """Convert a LIVE, DF or TF world model of the LIVE release to a `WorldDiT` folder.

    Only the weights are read; pickled objects beside them can't run code. Every key must be known and have the right
    shape.
    """
    _check_paths(checkpoint, output)

    from vidgen.models.convert_live import convert_live
    from vidgen.runtime.device import select_dtype

    target = None if dtype is None else select_dtype(dtype)
    print(convert_live(checkpoint, output, base_config=base_config, forcing=forcing, dtype=target))


@app.command("live-vae")
def live_vae(
    checkpoint: Annotated[Path, typer.Argument(metavar="IN.ckpt", help="The KL-16 autoencoder of the release.")],
    output: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Folder to make; must not exist, or be empty.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: as stored.")] = None,
) -> None:
    """Convert the KL-16 autoencoder of LIVE (and MAR) to a diffusers `AutoencoderKL` folder."""
    _check_paths(checkpoint, output)

    from vidgen.models.convert_live import convert_kl16
    from vidgen.runtime.device import select_dtype

    print(convert_kl16(checkpoint, output, dtype=None if dtype is None else select_dtype(dtype)))
