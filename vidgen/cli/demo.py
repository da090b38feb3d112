"""`vidgen demo`: the page on which everything can be tried."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from vidgen.cli.loading import load_pipeline
from vidgen.runtime.assets import DEFAULT_WORLD_MODEL, AssetError, find_asset


def demo(
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Pipeline folder, or owner/name on the Hub. Default: the embedded model."),
    ] = None,
    world_model: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="World model to play; may be repeated. Default: the embedded one."),
    ] = None,
    tab_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TAB=FOLDER",
            help="Model of the tab scene-graph or language, as language=runs/lm/model; may be repeated.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; the default lets nobody else in.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Default: the first that is free from 7860 on.")] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Make a public link through gradio's servers for a week.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For the visitors' files. Default: one that goes with the end."),
    ] = None,
    visitors: Annotated[int, typer.Option(help="Pages that are kept at a time.")] = 8,
    max_seconds: Annotated[float, typer.Option(help="Longest video.")] = 120.0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps. Default: the best there is.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the device's.")] = None,
) -> None:
    """Open a page to make long videos and play worlds, served to this machine alone."""
    from vidgen.demo.app import check_gradio, launch, load_context
    from vidgen.demo.context import DemoConfig

    check_gradio()
    if port is not None and not 0 < port < 65536:
        raise typer.BadParameter(f"--port {port} must be from 1 to 65535")
    tab_models: dict[str, list[Path]] = {}
    for setting in tab_model or ():
        tab, separator, model_folder = setting.partition("=")
        if not (tab and separator and model_folder):
            raise typer.BadParameter(f"--tab-model {setting!r} is not TAB=FOLDER, such as scene-graph=runs/sgg/model")
        tab_models.setdefault(tab, []).append(Path(model_folder))
    with tempfile.TemporaryDirectory(prefix="vidgen_demo_") as temporary:
        folder = Path(temporary) if output is None else output
        folder.mkdir(parents=True, exist_ok=True)
        config = DemoConfig(folder, max_visitors=visitors, max_seconds=max_seconds, tab_models=tab_models)
        worlds = embedded_world_models() if world_model is None else world_model
        context = load_context(config, model or find_asset(), worlds, load_pipeline, device=device, dtype=dtype)
        launch(context, host, port, share)


def embedded_world_models() -> list[Path]:
    """The world models that came with vidgen."""
    try:
        return [find_asset(DEFAULT_WORLD_MODEL)]
    except AssetError:
        return []
