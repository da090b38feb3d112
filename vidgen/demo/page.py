"""How the page looks: colors, and the style of what gradio has no component for. Nothing is fetched from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

HEADER = """
<div class="vg-header">
  <div class="vg-mark" aria-hidden="true"><i></i><i></i><i></i></div>
  <div><h1>vidgen</h1><p>Long video that may change its mind, and worlds that are dreamed frame by frame.</p></div>
</div>
"""


def script(name: str) -> str:
    """A component's JavaScript, from the file of that name beside this one."""
    return (FOLDER / name).read_text(encoding="utf-8")


def style() -> str:
    """The style sheet."""
    return script("page.css")


def theme() -> Any:
    """Colors and fonts; the fonts are those of the visitor's system."""
    import gradio

    fonts = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif"]
    mono = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
    return gradio.themes.Base(
        primary_hue=gradio.themes.colors.teal,
        secondary_hue=gradio.themes.colors.amber,
        neutral_hue=gradio.themes.colors.slate,
        radius_size=gradio.themes.sizes.radius_lg,
        font=fonts,
        font_mono=mono,
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        block_background_fill="white",
        block_background_fill_dark="*neutral_900",
        block_shadow="0 1px 2px rgba(15, 23, 42, .06)",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        button_primary_text_color="white",
        button_large_padding="10px 14px",
    )
