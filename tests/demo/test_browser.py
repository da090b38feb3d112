"""The page as a person sees it, in a real browser."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from vidgen.demo import context as context_module
from vidgen.demo.context import DemoContext
from vidgen.demo.landscape_player import LANDSCAPE
from vidgen.demo.players import ROOM

pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, such as Debian's package chromium"),
    pytest.mark.xdist_group("browser"),
    # Page and test run side by side on a machine that may be busy; whatever is wrong is wrong twice.
    pytest.mark.flaky(reruns=1),
]

_spec = importlib.util.spec_from_file_location("screenshots", Path(__file__).parents[2] / "demos/screenshots.py")
screenshots = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(screenshots)

PATIENCE_MS = 60_000
# What a canvas shows, as a number that differs when its pixels do.
LOOK = """(selector) => { const c = document.querySelector(selector);
  const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  let h = 0; for (let i = 0; i < d.length; i += 97) h = (h * 31 + d[i]) | 0; return h; }"""
FRAMES = "() => Number(document.querySelector('[data-frames]')?.dataset.frames ?? 0)"
PLAY = "() => ({ ...document.querySelector('[data-frame]')?.dataset })"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served(
    make_context: Callable[..., DemoContext], start_demo: Any, tiny_lm_folder: Path
) -> Iterator[tuple[DemoContext, str]]:
    context = make_context(max_visitors=4, tab_models={"language": [tiny_lm_folder]})
    group = context_module.TAB_ENTRY_POINTS
    points = [
        EntryPoint("scene-graph", "scene_graph.demo:tab", group),
        EntryPoint("language", "vidgen.demo.language_tab:tab", group),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_module, "entry_points", lambda group: points)
        with start_demo(context) as address:
            yield context, address


@pytest.fixture
def open_page(browser: Any, served: tuple[DemoContext, str]) -> Iterator[Callable[..., Any]]:
    """Opens the page; whatever it reports as an error, or asks of another machine, fails the test."""
    complaints: list[str] = []
    contexts, address = [], served[1]

    def open_page(width: int = 1280, height: int = 900) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))

        def on_request(request: Any) -> None:
            if not request.url.startswith((address, "data:", "blob:")):
                complaints.append(f"request to {request.url}")

        page.on("request", on_request)
        page.goto(address)
        page.wait_for_selector("#video-generate")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def start_video(page: Any, seconds: int) -> None:
    page.fill("#video-plan textarea", "a meadow at dawn")
    page.fill("#video-seconds input[type=number]", str(seconds))
    page.press("#video-seconds input[type=number]", "Tab")
    page.click("#video-generate")


def start_game(page: Any) -> None:
    screenshots.open_tab(page, "Play")
    page.get_by_label(ROOM).check()
    page.click("#play-begin")
    page.wait_for_selector(".vg-pad button")


def test_frames_arrive_before_the_end_and_the_prompt_changes_midway(open_page: Any) -> None:
    page = open_page()
    page.fill("#video-now textarea", "a coast in the rain")  # in advance: the tiny model takes a second for everything
    start_video(page, 8)
    page.wait_for_function(f"() => ({FRAMES})() > 0")
    page.click("#video-now button")
    first = page.evaluate(FRAMES)
    assert 0 < first < 96
    page.wait_for_function(f"() => ({FRAMES})() === 96")
    status = page.inner_text("#video-status")
    assert "finished" in status and "first frame after" in status and "a coast in the rain" in status
    assert page.locator("#video-memory figure").count() == 18
    page.wait_for_function("() => document.querySelector('#video-stage output').textContent.endsWith('8.0 s')")


def test_keys_move_the_picture_one_request_at_a_time(open_page: Any) -> None:
    page = open_page()
    start_game(page)
    in_flight, most = 0, 0

    def begun(request: Any) -> None:
        nonlocal in_flight, most
        if "component_server" in request.url:
            in_flight += 1
            most = max(most, in_flight)

    def ended(request: Any) -> None:
        nonlocal in_flight
        in_flight -= "component_server" in request.url

    page.on("request", begun)
    page.on("requestfinished", ended)
    looks = [page.evaluate(LOOK, "#play-game canvas")]
    for number in range(1, 51):
        page.keyboard.press("ArrowLeft" if number % 2 else "KeyQ")
        page.wait_for_function(f"() => Number(({PLAY})().frame) === {number}")
        if number % 10 == 0:
            page.wait_for_timeout(100)  # until the picture is drawn
            looks.append(page.evaluate(LOOK, "#play-game canvas"))
    # Forty turns to the left lead around; the renderer then shows what it showed at first.
    assert len(set(looks)) == 4 and looks[4:] == looks[:2] and most == 1
    print("median round trip, ms:", page.evaluate(PLAY)["median"])


def test_keys_go_up_when_the_window_loses_the_focus_and_nothing_is_typed_away(open_page: Any) -> None:
    page = open_page()
    start_game(page)
    page.keyboard.down("KeyW")
    page.wait_for_selector(".vg-pad .vg-held")
    page.evaluate("() => window.dispatchEvent(new Event('blur'))")
    page.wait_for_function("() => !document.querySelector('.vg-pad .vg-held')")
    page.wait_for_timeout(500)
    frame = page.evaluate(PLAY)["frame"]
    page.wait_for_timeout(500)
    assert page.evaluate(PLAY)["frame"] == frame  # the key isn't held any more
    page.keyboard.up("KeyW")
    screenshots.open_tab(page, "Long video")
    page.fill("#video-plan textarea", "")
    page.type("#video-plan textarea", "wasd")
    assert page.input_value("#video-plan textarea") == "wasd"
    screenshots.open_tab(page, "Play")
    assert page.evaluate(PLAY)["frame"] == frame


def test_buttons_on_the_screen_are_keys(open_page: Any) -> None:
    page = open_page(390, 844)
    start_game(page)
    page.locator(".vg-pad button[data-key='turn left']").scroll_into_view_if_needed()
    page.locator(".vg-pad button[data-key='turn left']").click(delay=200)
    page.wait_for_function(f"() => Number(({PLAY})().frame) >= 1")
    page.wait_for_function("() => !document.querySelector('.vg-pad .vg-held')")


def test_a_bad_upload_shows_a_message(open_page: Any, tmp_path: Path) -> None:
    page = open_page()
    (tmp_path / "text.png").write_text("no picture")
    page.get_by_text("Memory and start").click()
    page.set_input_files("#video-start input[type=file]", str(tmp_path / "text.png"))
    page.wait_for_selector("#video-start >> text=text.png")
    page.click("#video-generate")
    page.wait_for_selector("text=can't be read as a picture")


def test_two_pages_share_nothing_and_a_closed_one_frees_its_place(
    open_page: Any, served: tuple[DemoContext, str]
) -> None:
    visitors = served[0].visitors
    visitors.close()
    first, second = open_page(), open_page()
    start_game(first)
    start_game(second)
    first.keyboard.press("KeyQ")
    first.wait_for_function(f"() => Number(({PLAY})().frame) === 1")
    assert second.evaluate(PLAY)["frame"] == "0" and len(visitors) == 2
    second.context.close()
    deadline = time.monotonic() + 30
    while len(visitors) == 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_text_grows_on_both_sides_and_can_be_stopped(open_page: Any) -> None:
    page = open_page(390, 844)
    screenshots.open_tab(page, "Language")
    page.fill("#language-prompt textarea", "the meadow and the river.\nthe meadow and the <b>")
    page.fill("#language-tokens input[type=number]", "512")
    page.press("#language-tokens input[type=number]", "Tab")
    page.fill("#language-temperature input[type=number]", "1")  # a random model would end or repeat itself otherwise
    page.press("#language-temperature input[type=number]", "Tab")
    # Every length that is seen on either side: the tiny model may be done before a second question is asked.
    grows = """() => { const seen = window.seen ??= [new Set(), new Set()];
      document.querySelectorAll(".lm-text").forEach((text, side) => seen[side].add(text.innerText.length));
      return seen.every((lengths) => lengths.size > 3); }"""
    page.click("#language-decode")
    page.wait_for_function(grows)
    page.click("#language-stop")
    page.wait_for_selector(".lm-side[data-state=stopped]")
    assert page.locator(".lm-side[data-state=decoding]").count() == 0
    assert "tokens/s" in page.inner_text("#language-answer") and "drawn" in page.inner_text(".lm-verdict")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    boxes = [page.locator(".lm-side").nth(side).bounding_box() for side in range(2)]
    assert boxes[0]["x"] == boxes[1]["x"] and boxes[0]["y"] < boxes[1]["y"]  # one under the other


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_page_fits_its_window(open_page: Any, width: int) -> None:
    page = open_page(width, 800)
    for tab in ("Long video", "Play", "Scene graph", "Language"):
        screenshots.open_tab(page, tab)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_arrows_slide_the_landscape_that_cannot_turn(open_page: Any) -> None:
    page = open_page()
    screenshots.open_tab(page, "Play")
    for box in page.locator("#play-worlds input[type=checkbox]").all():
        box.uncheck()
    page.get_by_label(LANDSCAPE).check()
    page.click("#play-begin")
    page.wait_for_selector(".vg-pad button")
    page.keyboard.press("ArrowUp")  # no key of this world
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"() => Number(({PLAY})().frame) === 1")
    assert page.locator(".vg-pad button").count() == 2


def test_every_tab_can_be_shown_in_the_readme(served: tuple[DemoContext, str], browser: Any, tmp_path: Path) -> None:
    """The script uses the page as the others do, so it breaks with the page and not with the next README."""
    served[0].visitors.close()
    written = screenshots.take_screenshots(browser, served[1], tmp_path, list(screenshots.TABS))
    names = [f"{tab}_{size}.jpg" for tab in screenshots.TABS for size in screenshots.SIZES]
    assert [path.name for path in written] == names
    assert all(5_000 < path.stat().st_size < 150_000 for path in written)
