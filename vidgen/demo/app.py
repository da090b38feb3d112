"""The demo: a page with a tab for each thing that can be tried, on this machine alone unless asked otherwise."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vidgen.demo.context import DemoConfig, DemoContext
from vidgen.demo.names import folder_names
from vidgen.demo.page import style, theme
from vidgen.demo.players import FORCINGS
from vidgen.demo.visitors import Visitors
from vidgen.runtime.errors import VidgenError

if TYPE_CHECKING:
    from vidgen.pipelines import ContextForcingPipeline

LOOPBACK = "127.0.0.1"


def check_gradio() -> None:
    """Make sure that gradio can be imported, without doing so.

    Raises:
        VidgenError: it isn't installed; says how to.
    """
    if importlib.util.find_spec("gradio") is None:
        raise VidgenError('The demo needs gradio: pip install "vidgen[demo]".')


def load_context(
    config: DemoConfig,
    model: str | Path,
    world_models: Sequence[str | Path],
    load_pipeline: Callable[..., Any],
    **options: Any,
) -> DemoContext:
    """Load the models.

    Args:
        config: the limits.
        model: pipeline folder of the model of long video.
        world_models: folders of world models.
        load_pipeline: `load_pipeline(kind, folder, **options)`.
        options: see above.

    Raises:
        VidgenError: a folder that can't be loaded, or a world model that keys can't steer.
    """
    from vidgen.pipelines import ContextForcingPipeline, WorldModelPipeline

    video: ContextForcingPipeline = load_pipeline(ContextForcingPipeline, model, **options)
    worlds = {}
    for name, folder in folder_names([Path(folder) for folder in world_models]).items():
        pipe = load_pipeline(WorldModelPipeline, folder, **options)
        if not pipe.control_encoder.actions.choices:
            raise VidgenError(f"{folder}: its controls have no choices, so no key can steer this world model.")
        for world in (pipe, *pipe.baselines(folder).values()):
            kind = FORCINGS.get(world.transformer.config.forcing)
            worlds[f"{name} ({kind})" if kind else name] = (world, folder)
    visitors = Visitors(config.output / "visitors", config.max_visitors, config.idle_seconds, config.forget_seconds)
    return DemoContext(config, video, worlds, visitors)


def launch(
    context: DemoContext,
    host: str = LOOPBACK,
    port: int | None = None,
    share: bool = False,
    block: bool = True,
) -> tuple[Any, str]:
    """Serve the page.

    Args:
        context: models and limits.
        host: address to listen on; others than loopback let the network in.
        port: None takes the first that is free from 7860 on.
        share: ask gradio's servers for a public link.
        block: serve until interrupted, then free everything.

    Returns:
        The page and its address.
    """
    check_gradio()
    # Read when gradio is imported: it would call home at every start, and wait where there is no network.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

    from vidgen.demo.blocks import build_app

    app = build_app(context)
    limits = context.config.uploads
    try:
        _, address, _ = app.launch(
            server_name=host,
            server_port=port,
            share=share,
            quiet=True,
            inbrowser=False,
            show_error=True,
            ssr_mode=False,
            enable_monitoring=False,
            max_file_size=int(limits.megabytes * 1e6),
            allowed_paths=[],
            footer_links=["api"],
            theme=theme(),
            css=style(),
            prevent_thread_lock=True,
        )
        if block:
            print(f"vidgen demo: {app.share_url or address} (Ctrl-C ends it)")
            app.block_thread()
    finally:
        if block:
            app.close()
            context.visitors.close()
    return app, address
