"""Pictures of every tab of the demo, on a desk and on a phone: `python demos/screenshots.py`.

Starts the demo, uses it in a browser as a visitor would, and writes JPEG files. Needs `pip install playwright` and a
Chromium, such as Debian's package chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vidgen.cli.demo import embedded_world_models
from vidgen.cli.loading import load_pipeline
from vidgen.demo.app import check_gradio, launch, load_context
from vidgen.demo.context import DemoConfig
from vidgen.runtime.assets import find_asset
from vidgen.runtime.errors import VidgenError

OUT = Path(__file__).parent / "screenshots"
SIZES = {"desk": (1280, 900), "phone": (390, 844)}
PATIENCE_MS = 300_000
QUALITY = 72
KEYS = ("KeyD", "ArrowLeft", "KeyD", "KeyW")
OPERATION, FRAME = 2, 6


def open_tab(page: Any, name: str) -> None:
    """Show a tab; in a narrow window those that have no room are in a menu."""
    page.wait_for_function(
        "(name) => [...document.querySelectorAll('[role=tab], .overflow-dropdown button')].some("
        "(button) => button.innerText === name || button.textContent === name)",
        arg=name,
    )
    tab = page.get_by_role("tab", name=name)
    if not tab.count():
        page.get_by_label("More tabs").click()
        tab = page.locator(".overflow-dropdown").get_by_text(name)
    tab.click()


def long_video(page: Any) -> None:
    """Eight seconds of video, finished."""
    page.fill("#video-seconds input[type=number]", "8")
    page.press("#video-seconds input[type=number]", "Tab")
    page.click("#video-generate")
    page.wait_for_function("() => document.querySelector('#video-status').innerText.includes('finished')")
    page.wait_for_timeout(1500)  # while it plays


def play(page: Any) -> None:
    """Every world there is, after a few steps."""
    open_tab(page, "Play")
    for box in page.locator("#play-worlds input[type=checkbox]").all()[:4]:
        box.check()
    page.click("#play-begin")
    page.wait_for_selector(".vg-pad button")
    for number, key in enumerate(KEYS, start=1):
        page.keyboard.press(key)
        page.wait_for_function(f"() => document.querySelector('#play-game [data-frame=\"{number}\"]') !== null")
    page.wait_for_timeout(500)


def scene_graph(page: Any) -> None:
    """A frame of a simulated operation, read with a second look where there is a model."""
    open_tab(page, "Scene graph")
    page.fill("#scene-seed input", str(OPERATION))
    page.click("#scene-simulate")
    page.wait_for_selector("#scene-views img")
    page.fill("#scene-frame input[type=number]", str(FRAME))
    page.press("#scene-frame input[type=number]", "Tab")
    page.wait_for_selector(f"#scene-views >> text={FRAME} of")
    if page.locator("#scene-policy").count():
        page.locator("#scene-policy").get_by_label("always").check()
    page.click("#scene-read")
    page.wait_for_selector("#scene-picture img")
    page.wait_for_timeout(500)


def language(page: Any) -> None:
    """A prompt decoded both ways, or how to come by a model."""
    open_tab(page, "Language")
    if not page.locator("#language-decode").count():
        page.wait_for_selector("#language-empty")
        return
    page.click("#language-decode")
    page.wait_for_function(
        "() => document.querySelectorAll('#language-answer .lm-side[data-state=finished]').length === 2"
    )
    page.locator("#language-answer").scroll_into_view_if_needed()
    page.wait_for_timeout(500)


TABS = {"long_video": long_video, "play": play, "scene_graph": scene_graph, "language": language}


def take_screenshots(
    browser: Any, address: str, out: Path, tabs: Sequence[str], full_page: bool = False
) -> list[Path]:
    """Use tabs of a running demo, each in a page of its own.

    Args:
        browser: of playwright.
        address: of the demo.
        out: folder to write in.
        tabs: names from `TABS`.
        full_page: beyond what the window shows.
    """
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name in tabs:
        for size, (width, height) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(PATIENCE_MS)
            page.goto(address)
            page.wait_for_selector("#video-generate")
            TABS[name](page)
            page.evaluate("() => window.scrollTo(0, 0)")
            page.wait_for_timeout(300)
            written.append(out / f"{name}_{size}.jpg")
            page.screenshot(path=written[-1], type="jpeg", quality=QUALITY, full_page=full_page)
            page.close()
    return written


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """Chromium without a window.

    Raises:
        VidgenError: there is no playwright or no Chromium.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise VidgenError("screenshots need playwright: pip install playwright") from error
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise VidgenError("screenshots need a Chromium on the PATH, such as Debian's package chromium.")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the demo, take the pictures, say where they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder; default: %(default)s")
    parser.add_argument("--tabs", nargs="+", choices=list(TABS), default=list(TABS))
    parser.add_argument("--model", help="model of long video; default: the embedded one")
    parser.add_argument("--world-model", type=Path, action="append", help="may be repeated; default: the embedded one")
    parser.add_argument("--scene-graph-model", type=Path, action="append", help="default: the embedded one")
    parser.add_argument("--language-model", type=Path, action="append", help="default: the embedded one")
    parser.add_argument("--full-page", action="store_true", help="beyond what the window shows")
    options = parser.parse_args(arguments)
    given = {"scene-graph": options.scene_graph_model, "language": options.language_model}
    models = {tab: folders for tab, folders in given.items() if folders}
    worlds = embedded_world_models() if options.world_model is None else options.world_model
    try:
        check_gradio()
        with tempfile.TemporaryDirectory(prefix="vidgen_demo_") as folder:
            config = DemoConfig(Path(folder), tab_models=models)
            context = load_context(config, options.model or find_asset(), worlds, load_pipeline)
            app, address = launch(context, block=False)
            try:
                with open_browser() as browser:
                    written = take_screenshots(browser, address, options.out, options.tabs, options.full_page)
            finally:
                app.close()
                context.visitors.close()
    except (VidgenError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
