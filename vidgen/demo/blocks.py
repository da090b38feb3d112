"""The page: a header, and a tab for each thing that can be tried."""

from __future__ import annotations

import os

import gradio as gr

from vidgen.demo import play_tab, video_tab
from vidgen.demo.context import DemoContext, DemoTab, installed_tabs
from vidgen.demo.page import HEADER

# Files of the page's cache are looked at every minute and deleted after an hour.
CACHE_SECONDS = (60, 3600)


def build_app(context: DemoContext) -> gr.Blocks:
    """The page, not launched yet.

    Args:
        context: models and limits.

    Raises:
        VidgenError: the tab of another package fails.
    """
    # Uploads and what gradio copies stay in the demo's own folder; it serves files from there alone.
    os.environ["GRADIO_TEMP_DIR"] = str(context.config.output.resolve())
    tabs = [
        DemoTab("Long video", video_tab.build, order=10),
        DemoTab("Play", play_tab.build, order=20),
        *installed_tabs(context),
    ]
    with gr.Blocks(title="vidgen", analytics_enabled=False, delete_cache=CACHE_SECONDS) as app:
        gr.HTML(HEADER)
        with gr.Tabs():
            for tab in sorted(tabs, key=lambda tab: tab.order):
                with gr.Tab(tab.title):
                    tab.build(context)

        def on_leave(request: gr.Request) -> None:
            context.visitors.leave(request.session_hash)

        app.unload(on_leave)
    app.queue(max_size=context.config.queue_size, default_concurrency_limit=context.config.max_visitors)
    return app
