"""How long after a key does the picture change? The demo's Play tab in a real browser on loopback.

    python eval/demo_round_trip.py                     # the embedded level of Doom, 3 games of 50 keys
    python eval/demo_round_trip.py --check
    python eval/demo_round_trip.py --seeds 0 --keys 10

Needs `pip install playwright` and a Chromium, such as Debian's package chromium. The demo runs in a process of its
own, as `vidgen demo` starts it. A visitor begins a game with the world model alone, and one with the model beside the
room's and the landscape's renderers, and presses keys one after the other, each when the last one's frame is there.
From the key's own event to the first drawn frame of the browser in which the model's canvas shows other pixels: that
is the round trip. Beside it: the time that the model took for the frame, as the page shows it, and the difference,
which is the way through gradio, the network stack and the browser.

Bar: with the model alone the median round trip is at most 200 ms in every game. A key after which no pixel changes
within 10 s counts as lost, and fails the bar too.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _benchmark import add_out, add_seeds, report_progress, reports_errors, spread, write_results
from demo_load import started_demo

from vidgen.demo.app import check_gradio
from vidgen.demo.landscape_player import LANDSCAPE
from vidgen.demo.players import ROOM
from vidgen.runtime.errors import VidgenError
from vidgen.runtime.meter import run_environment

# The script that shows the demo in the README knows how to open a browser and the page's tabs.
_spec = importlib.util.spec_from_file_location("screenshots", Path(__file__).parents[1] / "demos" / "screenshots.py")
screenshots = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(screenshots)

KEYS = ("ArrowLeft", "ArrowLeft", "KeyW", "ArrowRight")
PATIENCE_MS = 10_000
MAX_MEDIAN_MS = 200.0
# Hash of a canvas, and the watch that a key starts: the time is asked for again at every frame that the browser draws.
WATCH = """([world, patience]) => {
  const canvas = document.querySelectorAll("#play-game .vg-worlds canvas")[world];
  const look = () => {
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let hash = 0;
    for (let i = 0; i < data.length; i++) hash = (hash * 31 + data[i]) | 0;
    return hash;
  };
  const before = look();
  window.roundTrip = new Promise((resolve) => {
    addEventListener("keydown", (event) => {
      const tick = (now) => {
        if (look() !== before) resolve(performance.now() - event.timeStamp);
        else if (now - event.timeStamp > patience) resolve(null);
        else requestAnimationFrame(tick);
      };
      requestAnimationFrame(tick);
    }, { once: true, capture: true });
  });
}"""
MODEL_MS = """(world) => parseFloat(
  document.querySelectorAll("#play-game .vg-world h4 span")[world].innerText)"""


def play(page: Any, worlds: Sequence[str], model: str, seed: int, keys: int) -> dict[str, Any]:
    """One game.

    Args:
        page: of the demo.
        worlds: names of those that are played side by side.
        model: the one whose picture is watched.
        seed: of the game, and its start.
        keys: how many are pressed.

    Returns:
        Milliseconds of every round trip and of the model, and how many keys changed nothing.
    """
    from playwright.sync_api import Error

    screenshots.open_tab(page, "Play")
    page.wait_for_selector("#play-worlds input[type=checkbox]")
    for box in page.locator("#play-worlds input[type=checkbox]").all():
        box.set_checked(box.evaluate("(box) => box.closest('label').innerText.trim()") in worlds)
    for field in ("#play-start", "#play-seed"):
        page.fill(f"{field} input[type=number]", str(seed))
        page.press(f"{field} input[type=number]", "Tab")
    page.click("#play-begin")
    page.wait_for_function(f"() => document.querySelectorAll('.vg-worlds canvas').length === {len(worlds)}")
    page.wait_for_function("() => document.querySelector('#play-game [data-frame=\"0\"]') !== null")
    page.wait_for_timeout(300)
    names = [text.split("\n")[0].strip() for text in page.locator("#play-game .vg-world h4 b").all_inner_texts()]
    world = names.index(model)
    trips, computes, lost = [], [], 0
    for number in range(1, keys + 1):
        report_progress(f"{len(worlds)} worlds, game {seed}, key {number} of {keys}")
        page.evaluate(WATCH, [world, PATIENCE_MS])
        page.keyboard.press(KEYS[number % len(KEYS)])
        try:
            milliseconds = page.evaluate("() => window.roundTrip")
            page.wait_for_function(f"() => document.querySelector('#play-game [data-frame=\"{number}\"]') !== null")
        except Error as error:
            raise VidgenError(f"key {number} of game {seed}: {error}") from error
        if milliseconds is None:
            lost += 1
        else:
            trips.append(milliseconds)
            computes.append(page.evaluate(MODEL_MS, world))
    return {"trips": trips, "model": computes, "lost": lost}


def measure(address: str, seeds: Sequence[int], keys: int) -> dict[str, dict[str, Any]]:
    """Games of every seed, alone and beside the renderers; a page of its own for each."""
    found: dict[str, dict[str, Any]] = {"alone": {}, "beside the renderers": {}}
    with screenshots.open_browser() as browser:
        for seed in seeds:
            for name, games in found.items():
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                page.goto(address)
                screenshots.open_tab(page, "Play")
                page.wait_for_selector("#play-worlds input[type=checkbox]")
                labels = page.locator("#play-worlds label:has(input)").all_inner_texts()
                models = [label.strip() for label in labels if label.strip() not in (ROOM, LANDSCAPE)]
                if not models:
                    raise VidgenError("the demo has no world model to play")
                worlds = models[:1] if name == "alone" else [models[0], ROOM, LANDSCAPE]
                games[str(seed)] = play(page, worlds, models[0], seed, keys)
                page.close()
    report_progress("")
    return found


def claims(measured: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars."""
    games = measured["alone"]
    medians = {seed: statistics.median(game["trips"]) if game["trips"] else None for seed, game in games.items()}
    slow = [value for value in medians.values() if value is None or value > MAX_MEDIAN_MS]
    lost = sum(game["lost"] for game in games.values())
    return [
        {"claim": f"median round trip <= {MAX_MEDIAN_MS:g} ms", "by_seed": medians, "passed": not slow},
        {"claim": "keys without a picture = 0", "value": lost, "passed": lost == 0},
    ]


def make_table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["| worlds | round trip, median (ms) | 90 % (ms) | model (ms) | the way (ms) | lost |", "|---" * 6 + "|"]
    for name, games in results["measured"].items():
        rows = [game for game in games.values() if game["trips"]]
        cells = [
            spread([statistics.median(row["trips"]) for row in rows], 0),
            spread([float(np.quantile(row["trips"], 0.9)) for row in rows], 0),
            spread([statistics.median(row["model"]) for row in rows], 0),
            spread([statistics.median(np.subtract(row["trips"], row["model"])) for row in rows], 0),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {sum(game['lost'] for game in games.values())} |")
    lines += ["", f"Mean (range) over games of {results['keys']} keys.", "", "| bar | |", "|---|---|"]
    lines += [f"| {claim['claim']} | {'pass' if claim['passed'] else 'FAIL'} |" for claim in results["claims"]]
    return "\n".join(lines) + "\n"


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; write results.json and table.md; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_seeds(parser)
    parser.add_argument("--keys", type=int, default=50, help="of each game; default: %(default)s")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    add_out(parser, "demo_round_trip")
    options = parser.parse_args(arguments)
    if not 1 <= options.keys <= 1000:
        parser.error(f"--keys {options.keys}: from 1 to 1000")
    check_gradio()
    with started_demo(None, 2 * len(options.seeds)) as (address, _):
        measured = measure(address, options.seeds, options.keys)
    results = {
        "benchmark": "demo_round_trip",
        "measured": measured,
        "keys": options.keys,
        "claims": claims(measured),
        "environment": run_environment(),
    }
    table = make_table(results)
    write_results(options.out, results, table)
    print(table)
    return int(options.check and not all(claim["passed"] for claim in results["claims"]))


if __name__ == "__main__":
    sys.exit(main())
