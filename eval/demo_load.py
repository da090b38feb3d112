"""Eight people at once use the demo for a minute: nobody loses a session, and memory stays bounded.

    python eval/demo_load.py                           # the embedded model
    python eval/demo_load.py --check
    python eval/demo_load.py --smoke                   # two visitors for a few seconds

The demo runs in a process of its own, as `vidgen demo` starts it; visitors are clients on loopback. Each makes a short
video, plays the room, and simulates an operation where that tab is installed, over and over. After every stretch they
look whether what the demo has is still theirs: the video of their length, the game at their frame. A session that is
gone or is somebody else's counts as lost; any other failure of a request counts as an error.

Bars: no error, no lost session, and resident memory at the end at most 1.25 times what it was after everybody's first
round.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from _benchmark import make_parser, report_progress, reports_errors, write_results

from vidgen.demo.app import check_gradio
from vidgen.demo.players import ROOM
from vidgen.runtime.errors import VidgenError
from vidgen.runtime.meter import run_environment

APP = Path(__file__).resolve().parents[1] / "demos" / "app.py"
START_SECONDS = 300
# A slow answer is slow, not an error.
PATIENCE_SECONDS = 120
VIDEO_SECONDS, PLAN = 2, "a green meadow at noon in clear weather while the camera pans slowly to the right"
KEYS = ("forward", "turn left", "forward", "turn right")
MAX_GROWTH = 1.25
# What the demo answers when it has nothing of a visitor.
GONE = ("no video of yours", "no game of yours", "no frames of yours", "is gone", "are gone", "is over")


class Visit:
    """What one visitor does, and what came of it.

    Args:
        address: of the demo.
        number: of the visitor.
        record: called with what was asked for, its seconds, and the error or None.
    """

    def __init__(self, address: str, number: int, record: Callable[[str, float, str | None], None]) -> None:
        from gradio_client import Client

        self._client = Client(address, verbose=False, httpx_kwargs={"timeout": PATIENCE_SECONDS})
        self._number, self._record = number, record
        self._has_scenes = "/scene_simulate" in self._client.view_api(return_format="dict")["named_endpoints"]
        self.rounds = 0

    def run(self, until: float) -> None:
        """Rounds until the deadline; one that was begun is finished."""
        while time.monotonic() < until:
            self.round()

    def round(self) -> None:
        """A video, a game, an operation."""
        seed = 1000 * self._number + self.rounds
        self._ask("video", lambda: self._video(seed))
        self._ask("game", lambda: self._begin(seed))
        for step in range(1, 1 + len(KEYS)):
            self._ask("step", lambda step=step: self._step(step))
        if self._has_scenes:
            self._ask("operation", lambda: self._client.predict(seed, api_name="/scene_simulate"))
            self._ask("graph", lambda: self._scene(seed))
        self._ask("undo", self._undo)
        self.rounds += 1

    def _ask(self, what: str, request: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            request()
            error = None
        except Exception as failure:  # whatever it is, it is counted
            error = " ".join(str(failure).split()) or type(failure).__name__
        self._record(what, time.monotonic() - began, error)

    def _video(self, seed: int) -> None:
        job = self._client.submit(PLAN, VIDEO_SECONDS, seed, "slow_fast", "recache", None, api_name="/generate")
        # Not by iterating over the job, which polls a thousand times a second and takes the time from the demo.
        if error := job.exception():
            raise error
        stages = [json.loads(update[0]) for update in job.outputs()]
        frames, total = sum(len(stage["frames"]) for stage in stages), stages[-1]["total"]
        if frames != total:
            raise VidgenError(f"{frames} of {total} frames arrived")

    def _begin(self, seed: int) -> None:
        opening = json.loads(self._client.predict([ROOM], seed, seed, 0, "frame", None, api_name="/play_begin"))
        if opening["frame"] != 0:
            raise VidgenError("lost: a new game doesn't begin at its beginning")

    def _step(self, step: int) -> None:
        frame = self._client.predict(KEYS[step - 1], api_name="/play_step")["frame"]
        if frame != step:
            raise VidgenError(f"lost: the game is at frame {frame}, not {step}")

    def _scene(self, seed: int) -> None:
        graph = self._client.predict(None, "where the router says so", 1 + seed % 12, api_name="/scene_graph")
        if not graph["truth"]:
            raise VidgenError("lost: no operation of this visitor's")

    def _undo(self) -> None:
        """The video is still there, and of this visitor's length."""
        status = self._client.predict(api_name="/undo")[1]
        if f"of {VIDEO_SECONDS:.1f} s" not in status or "paused" not in status:
            raise VidgenError(f"lost: the video is {status}")


class Resident:
    """Watches the resident memory of a process and its children, in bytes."""

    def __init__(self, pid: int, every: float = 0.25) -> None:
        self._process, self._every = psutil.Process(pid), every
        self._stopped = threading.Event()
        self.peak = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def now(self) -> int:
        """Bytes now."""
        total = 0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        self.peak = max(self.peak, total)
        return total

    def _watch(self) -> None:
        while not self._stopped.wait(self._every):
            self.now()


@contextlib.contextmanager
def started_demo(model: str | None, visitors: int) -> Iterator[tuple[str, int]]:
    """Address and process of a demo that runs for the block.

    Raises:
        VidgenError: it ends or says nothing; holds what it printed last.
    """
    with tempfile.TemporaryDirectory(prefix="vidgen_load_") as folder:
        log = Path(folder) / "log.txt"
        command = [sys.executable, str(APP), "--output", f"{folder}/out", "--visitors", str(visitors)]
        command += [] if model is None else ["--model", model]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )
        try:
            deadline, address = time.monotonic() + START_SECONDS, None
            while address is None:
                address = re.search(r"^vidgen demo: (http://\S+)", log.read_text(), re.MULTILINE)
                if process.poll() is not None or time.monotonic() > deadline:
                    raise VidgenError(f"the demo doesn't start: {log.read_text()[-400:]!r}")
                time.sleep(0.1)
            yield address[1], process.pid
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(address: str, pid: int, visitors: int, seconds: float) -> dict[str, Any]:
    """Let visitors come, and count.

    Args:
        address: of the demo.
        pid: of its process.
        visitors: at a time.
        seconds: after everybody's first round.

    Returns:
        Requests by kind with their seconds, errors, lost sessions, rounds, and resident bytes.
    """
    lock = threading.Lock()
    times: dict[str, list[float]] = defaultdict(list)
    errors: list[str] = []
    lost: list[str] = []

    def record(what: str, duration: float, error: str | None) -> None:
        with lock:
            if error is None:
                times[what].append(duration)
            else:
                is_lost = error.startswith("lost") or any(words in error for words in GONE)
                (lost if is_lost else errors).append(f"{what}: {error}")

    def everybody(act: Callable[[Visit], None]) -> None:
        threads = [threading.Thread(target=act, args=(visit,)) for visit in visits]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with Resident(pid) as resident:
        empty = resident.now()
        visits = [Visit(address, number, record) for number in range(visitors)]
        report_progress("first round")
        everybody(Visit.round)
        begin, began = resident.now(), time.monotonic()
        report_progress(f"{visitors} visitors for {seconds:g} s")
        everybody(lambda visit: visit.run(began + seconds))
        lasted, end = time.monotonic() - began, resident.now()
    report_progress("")
    return {
        "visitors": visitors,
        "seconds": lasted,
        "rounds": [visit.rounds for visit in visits],
        "requests": {what: {"count": len(values), "seconds": values} for what, values in times.items()},
        "errors": errors,
        "lost": lost,
        "resident_bytes": {"empty": empty, "begin": begin, "end": end, "peak": resident.peak},
    }


def claims(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars."""
    growth = measured["resident_bytes"]["end"] / measured["resident_bytes"]["begin"]
    return [
        {"claim": "errors = 0", "value": len(measured["errors"]), "passed": not measured["errors"]},
        {"claim": "lost sessions = 0", "value": len(measured["lost"]), "passed": not measured["lost"]},
        {
            "claim": f"resident memory, end / after the first round <= {MAX_GROWTH:g}",
            "value": round(growth, 3),
            "passed": growth <= MAX_GROWTH,
        },
    ]


def make_table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["| request | completed | median, s | slowest, s |", "|---|---|---|---|"]
    for what, row in results["requests"].items():
        values = row["seconds"]
        lines.append(f"| {what} | {row['count']} | {statistics.median(values):.2f} | {max(values):.2f} |")
    sizes = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in results["resident_bytes"].items())
    lines += [
        "",
        f"{results['visitors']} visitors, {results['seconds']:.0f} s, {sum(results['rounds'])} rounds; "
        f"resident MB: {sizes}.",
        "",
        "| bar | value | |",
        "|---|---|---|",
    ]
    for claim in results["claims"]:
        lines.append(f"| {claim['claim']} | {claim['value']:g} | {'pass' if claim['passed'] else 'FAIL'} |")
    return "\n".join([*lines, *(f"\n- {text}" for text in [*results["errors"][:5], *results["lost"][:5]])]) + "\n"


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; write results.json and table.md; print the table."""
    parser = make_parser(__doc__, "demo_load")
    parser.add_argument("--visitors", type=int, help="at a time; default 8")
    parser.add_argument("--seconds", type=float, help="after the first round; default 60")
    options = parser.parse_args(arguments)
    visitors = options.visitors if options.visitors is not None else (2 if options.smoke else 8)
    seconds = options.seconds if options.seconds is not None else (3.0 if options.smoke else 60.0)
    if visitors < 1 or not 0 < seconds <= 3600:
        parser.error(f"--visitors {visitors} --seconds {seconds:g}: at least 1, and more than 0 up to 3600")
    check_gradio()
    with started_demo(options.model, visitors) as (address, pid):
        measured = measure(address, pid, visitors, seconds)
    results = {"benchmark": "demo_load", **measured, "claims": claims(measured), "environment": run_environment()}
    table = make_table(results)
    write_results(options.out, results, table)
    print(table)
    return int(options.check and not all(claim["passed"] for claim in results["claims"]))


if __name__ == "__main__":
    sys.exit(main())
