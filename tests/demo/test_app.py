"""The page as a program sees it, through gradio's own client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")
# Before gradio is imported: without a network it would wait for its own servers.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from vidgen.cli.main import main
from vidgen.data import VideoReader
from vidgen.demo import context as context_module
from vidgen.demo.context import DemoContext, DemoTab
from vidgen.demo.landscape_player import LANDSCAPE
from vidgen.demo.players import ROOM
from vidgen.runtime.errors import ConfigError, VidgenError

PLAN = "a meadow at dawn\n2 s: a desert in the snow"


@pytest.fixture(scope="module")
def running(make_context: Callable[..., DemoContext], start_demo: Any) -> Iterator[tuple[DemoContext, str]]:
    context = make_context(max_visitors=2, max_seconds=8)
    with start_demo(context) as address:
        yield context, address


@pytest.fixture
def demo(running: tuple[DemoContext, str]) -> Iterator[tuple[DemoContext, str]]:
    """A demo with two places, all free."""
    yield running
    running[0].visitors.close()


def connect(address: str, tmp_path: Path) -> Client:
    return Client(address, verbose=False, download_files=str(tmp_path / "downloads"))


def generate(client: Client, **settings: Any) -> Any:
    values = {"plan": PLAN, "seconds": 3, "seed": 1, "memory": "slow_fast", "switch": "recache", "start": None}
    return client.submit(**{**values, **settings}, api_name="/generate")


def begin(client: Client, worlds: list[str], **settings: Any) -> dict[str, Any]:
    values = {"start": 0, "seed": 0, "steps": 0, "cache": "frame", "picture": None}
    return json.loads(client.predict(worlds, **{**values, **settings}, api_name="/play_begin"))


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_three_seconds_of_video_arrive_while_they_are_made(demo: Any, tmp_path: Path) -> None:
    client = connect(demo[1], tmp_path)
    stages = [json.loads(update[0]) for update in generate(client)]
    frames = [frame for stage in stages for frame in stage["frames"]]
    assert len(frames) == 36 and all(frame.startswith("data:image/jpeg;base64,") for frame in frames)
    assert [stage["start"] for stage in stages if stage["frames"]] == [0, 9, 21, 33]

    video, session = client.predict(api_name="/save")
    assert len(VideoReader(video)) == 36
    assert session.endswith(".session.safetensors")


def test_a_video_is_steered_from_outside(demo: Any, tmp_path: Path) -> None:
    client = connect(demo[1], tmp_path)
    list(generate(client, seconds=8, plan="a meadow"))
    _, status, memory, _ = client.predict(api_name="/undo")
    assert "paused" in status and "7.8 of 8.0 s" in status and "<figure>" in memory
    stage, _, _, branches = client.predict(api_name="/fork")
    assert len(json.loads(stage)["frames"]) == 93 and branches["value"] == "B"
    client.predict("a coast in the rain", "recache", api_name="/set_prompt")
    *_, last = client.submit(api_name="/resume")
    assert "finished" in last[1] and "a coast in the rain" in last[1]
    stage, status, *_ = client.predict("A", api_name="/select_branch")
    assert len(json.loads(stage)["frames"]) == 93 and "a coast" not in status


def test_pause_stops_a_video_that_is_being_made(demo: Any, tmp_path: Path) -> None:
    context, address = demo
    client = connect(address, tmp_path)
    job = generate(client, seconds=8)
    wait_for(lambda: len(job.outputs()) >= 2)
    client.predict(api_name="/pause")
    assert "paused" in job.result(timeout=30)[1] or "paused" in job.outputs()[-1][1]
    (run,) = context.visitors.parts("video").values()
    assert 0 < run.session.num_frames_emitted < 96


def test_worlds_are_played_and_recorded(demo: Any, tmp_path: Path) -> None:
    client = connect(demo[1], tmp_path)
    opening = begin(client, ["tiny", ROOM])
    assert [world["name"] for world in opening["worlds"]] == [ROOM, "tiny"]
    client.predict(api_name="/play_record")
    answers = [client.predict("forward + turn left", api_name="/play_step") for _ in range(3)]
    assert [answer["frame"] for answer in answers] == [1, 2, 3] and answers[-1]["recorded"] == 4
    pictures = {answer["worlds"][1]["picture"] for answer in answers}
    assert len(pictures) == 3
    assert Path(client.predict(api_name="/play_save")).suffix == ".zip"


def test_the_page_steps_with_a_token_and_with_nothing_else(demo: Any, tmp_path: Path) -> None:
    _, address = demo
    client = connect(address, tmp_path)
    opening = begin(client, [ROOM])
    config = json.loads(urllib.request.urlopen(f"{address}config").read())
    (game,) = [part["id"] for part in config["components"] if part["props"].get("elem_id") == "play-game"]

    def step(**data: Any) -> dict[str, Any]:
        body = {"data": data, "fn_name": "play_frame", "session_hash": "any", "component_id": game}
        request = urllib.request.Request(
            f"{address}gradio_api/component_server",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return json.loads(urllib.request.urlopen(request).read())

    answer = step(token=opening["token"], keys=["turn left"])
    assert answer["frame"] == 1 and answer["worlds"][0]["picture"] != opening["worlds"][0]["picture"]
    assert "unknown" in step(token=opening["token"], keys=["fly"])["error"]
    for token in ("", "guess", None):
        assert step(token=token, keys=["turn left"])["gone"]


def test_two_visitors_share_nothing(demo: Any, tmp_path: Path) -> None:
    _, address = demo
    first, second = connect(address, tmp_path), connect(address, tmp_path)
    jobs = [generate(first, seed=1), generate(second, seed=2)]
    frames = [[f for update in job for f in json.loads(update[0])["frames"]] for job in jobs]
    assert len(frames[0]) == len(frames[1]) == 36 and not set(frames[0]) & set(frames[1])
    alone = [f for update in generate(first, seed=2) for f in json.loads(update[0])["frames"]]
    assert alone == frames[1]
    begin(first, [ROOM])
    with pytest.raises(AppError, match="no game of yours"):
        second.predict("forward", api_name="/play_step")


def test_a_full_demo_says_so(demo: Any, tmp_path: Path) -> None:
    context, address = demo
    for _ in range(2):
        begin(connect(address, tmp_path), [ROOM])
    with pytest.raises(AppError, match="All 2 places of this demo are taken"):
        begin(connect(address, tmp_path), [ROOM])
    assert len(context.visitors) == 2


def test_a_full_queue_says_so(make_context: Any, start_demo: Any, tmp_path: Path) -> None:
    context = make_context(max_visitors=1, queue_size=1)
    with start_demo(context) as address, context.turns.turn():  # nobody gets further
        client = connect(address, tmp_path)
        jobs = [generate(client)]
        wait_for(lambda: len(context.turns._waiting) == 1)
        for _ in range(3):
            jobs.append(generate(client))
            time.sleep(0.2)
        errors = [job.exception(timeout=20) for job in jobs[2:]]
        assert any("Queue is full" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plan": " "}, "plan is empty"),
        ({"plan": "a meadow\nwithout a time"}, "Line 2"),
        ({"seconds": 9}, "9"),
        ({"memory": "elephant"}, "elephant"),
        ({"plan": "a meadow\n5 s: a desert"}, "begins at 5 s, beyond the end"),
    ],
)
def test_wrong_settings_are_named(demo: Any, tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises((AppError, ValueError), match=message):
        generate(connect(demo[1], tmp_path), **settings).result(timeout=30)


def test_uploads_are_used_and_bad_ones_are_named(demo: Any, tmp_path: Path, picture_file: Path) -> None:
    context, address = demo
    client = connect(address, tmp_path)
    *_, last = generate(client, seconds=1, plan="a meadow", start=handle_file(str(picture_file)))
    assert "finished" in last[1]
    begin(client, ["tiny"], picture=handle_file(str(picture_file)))

    (tmp_path / "text.png").write_text("no picture")
    for call in (
        lambda file: generate(client, start=file).result(timeout=30),
        lambda file: begin(client, ["tiny"], picture=file),
    ):
        with pytest.raises(AppError, match="can't be read as a picture"):
            call(handle_file(str(tmp_path / "text.png")))
    with pytest.raises(AppError, match="renderer can't start from a picture"):
        begin(client, [ROOM], picture=handle_file(str(picture_file)))
    (tmp_path / "large.png").write_bytes(bytes(600_000))
    with pytest.raises(Exception, match="maximum file size"):
        begin(client, ["tiny"], picture=handle_file(str(tmp_path / "large.png")))
    uploaded = [path for path in context.config.output.rglob("*") if path.name in ("picture.png", "text.png")]
    assert len(uploaded) >= 2  # in the demo's own folder


def test_a_saved_session_is_uploaded_and_gone_on_with(demo: Any, tmp_path: Path) -> None:
    client = connect(demo[1], tmp_path)
    list(generate(client, seconds=1, plan="a meadow"))
    _, session = client.predict(api_name="/save")
    other = connect(demo[1], tmp_path)
    *_, last = updates = list(other.submit(handle_file(session), 2, api_name="/go_on"))
    assert sum(len(json.loads(update[0])["frames"]) for update in updates) == 24
    assert "finished" in last[1] and "a meadow" in last[1]
    (tmp_path / "none.safetensors").write_bytes(b"none")
    for file, seconds, message in (
        (handle_file(str(tmp_path / "none.safetensors")), 2, "damaged or not a safetensors file"),
        (handle_file(session), 9, "9 is greater"),
        (None, 2, "no session to go on with"),
    ):
        with pytest.raises(AppError, match=message):
            other.submit(file, seconds, api_name="/go_on").result(timeout=30)


def test_only_the_demo_s_own_folder_is_served(demo: Any, tmp_path: Path) -> None:
    context, address = demo
    (tmp_path / "secret.txt").write_text("secret")
    beside = context.config.output / ".." / "secret.txt"
    for path in ("/etc/passwd", str(tmp_path / "secret.txt"), str(beside), str(Path.cwd() / "README.md"), __file__):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{address}gradio_api/file={path}")
        assert error.value.code in (403, 404)
    client = connect(address, tmp_path)
    server_side = {"path": str(tmp_path / "secret.txt"), "meta": {"_type": "gradio.FileData"}}
    with pytest.raises(Exception) as refused:
        client.predict([], 0, 0, 0, "frame", server_side, api_name="/play_begin")
    assert "secret" not in str(refused.value).replace("secret.txt", "")


def test_leaving_frees_everything(demo: Any, tmp_path: Path) -> None:
    context, address = demo
    client = connect(address, tmp_path)
    list(generate(client))
    begin(client, [ROOM])
    (visitor,) = context.visitors._visitors.values()
    assert list(visitor.folder.rglob("chunk_*.npy"))
    # What a browser does: it holds this request open until its page is closed.
    beat = urllib.request.urlopen(f"{address}gradio_api/heartbeat/{client.session_hash}")
    beat.read(5)
    beat.close()
    wait_for(lambda: len(context.visitors) == 0)
    wait_for(lambda: not visitor.folder.exists())
    with pytest.raises(AppError, match="no video of yours"):
        client.predict(api_name="/undo")


def test_visitors_at_once_lose_nothing_and_memory_is_bounded(
    make_context: Any, start_demo: Any, tmp_path: Path
) -> None:
    context = make_context(max_visitors=8)
    errors: list[str] = []

    def visit(address: str, number: int) -> None:
        try:
            client = connect(address, tmp_path)
            frames = sum(len(json.loads(update[0])["frames"]) for update in generate(client, seed=number))
            opening = begin(client, [ROOM], start=number)
            answer = client.predict("turn left", api_name="/play_step")
            if frames != 36 or answer["frame"] != 1 or not opening["token"]:
                errors.append(f"{number}: {frames} frames, frame {answer['frame']}")
        except Exception as error:  # counted, whatever it is
            errors.append(f"{number}: {error}")

    with start_demo(context) as address:
        threads = [threading.Thread(target=visit, args=(address, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert errors == [] and len(context.visitors) == 8
        sizes = {run.session.memory.nbytes for run in context.visitors.parts("video").values()}
        assert len(sizes) == 1


def test_without_models_the_page_says_how_to_train_one(make_context: Any, start_demo: Any, tmp_path: Path) -> None:
    with start_demo(make_context(worlds=False)) as address:
        page = urllib.request.urlopen(f"{address}config").read().decode()
        assert "vidgen train world_model" in page
        client = connect(address, tmp_path)
        opening = begin(client, [LANDSCAPE, ROOM])
        assert [world["name"] for world in opening["worlds"]] == [ROOM, LANDSCAPE]
        assert all("renderer" in name for name in (ROOM, LANDSCAPE))
        answer = client.predict("left", api_name="/play_step")
        pictures = [[world["picture"] for world in state["worlds"]] for state in (opening, answer)]
        assert all(before != after for before, after in zip(*pictures, strict=True))


def test_another_package_adds_a_tab(
    make_context: Any, start_demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gradio

    def build(context: DemoContext) -> None:
        text = gradio.Textbox("hello")
        text.submit(lambda value: f"{value} {context.config.max_visitors}", text, text, api_name="greet")

    def fail(_: DemoContext) -> DemoTab:
        raise KeyError("lost")

    found = {
        "shown": lambda context: DemoTab("Other", build),
        "absent": lambda context: None,
        "wrong": lambda _: "tab",
        "failing": fail,
    }

    class Point(EntryPoint):
        def load(self) -> Any:
            if self.name not in found:
                raise ImportError("no module named 'package'")
            return found[self.name]

    points = [Point(name, f"package:{name}", context_module.TAB_ENTRY_POINTS) for name in ("shown", "absent")]
    monkeypatch.setattr(context_module, "entry_points", lambda group: points)
    context = make_context()
    with start_demo(context) as address:
        assert connect(address, tmp_path).predict("hello", api_name="/greet") == "hello 8"
    for name, reason in {"wrong": "gives a str", "failing": "KeyError: 'lost'", "gone": "no module named"}.items():
        points.insert(0, Point(name, f"package:{name}", context_module.TAB_ENTRY_POINTS))
        with pytest.warns(UserWarning, match=f"'{name}' \\(package:{name}\\) is left out: .*{reason}"):
            tabs = context_module.installed_tabs(context)
        assert [tab.title for tab in tabs] == ["Other"]
        points.pop(0)


def test_a_model_for_a_tab_that_is_not_here_is_an_error(make_context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("scene-graph", "package:tab", context_module.TAB_ENTRY_POINTS)
    monkeypatch.setattr(EntryPoint, "load", lambda self: lambda context: DemoTab("Other", print))
    monkeypatch.setattr(context_module, "entry_points", lambda group: [point])
    assert len(context_module.installed_tabs(make_context(tab_models={"scene-graph": []}))) == 1
    with pytest.raises(VidgenError, match="'scene_graph', which isn't here: did you mean 'scene-graph'"):
        context_module.installed_tabs(make_context(tab_models={"scene_graph": []}))


def test_limits_are_checked(tmp_path: Path) -> None:
    for limit in ({"max_visitors": 0}, {"max_seconds": 0}, {"queue_size": 0}, {"idle_seconds": -1}):
        with pytest.raises(ConfigError, match=f"{next(iter(limit))}={next(iter(limit.values()))}"):
            context_module.DemoConfig(tmp_path, **limit)


@pytest.mark.slow
def test_the_script_serves_until_it_is_interrupted(tiny_model_folder: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "demos" / "app.py"
    command = [sys.executable, str(script), "--model", tiny_model_folder, "--output", str(tmp_path / "out")]
    log = tmp_path / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
    try:
        wait_for(lambda: "http" in log.read_text() or process.poll() is not None, seconds=240)
        address = re.search(r"http://\S+", log.read_text())[0]
        assert address.startswith("http://127.0.0.1:")
        stages = [json.loads(update[0]) for update in generate(connect(address, tmp_path), seconds=1, plan="a meadow")]
        assert sum(len(stage["frames"]) for stage in stages) == 12
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    assert "Traceback" not in log.read_text()
    assert not any((tmp_path / "out" / "visitors").iterdir())


def test_the_command_offers_what_it_is_given_to_this_machine_alone(
    tiny_model_folder: str, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = {}

    def launch(context: DemoContext, host: str, port: int | None, share: bool) -> None:
        served.update(context=context, host=host, port=port, share=share)

    monkeypatch.setattr("vidgen.demo.app.launch", launch)
    world[0].save_pretrained(tmp_path / "a/model")
    world[0].save_pretrained(tmp_path / "b/model")
    arguments = ["demo", "--model", tiny_model_folder, "--max-seconds", "9", "--visitors", "3"]
    models = ["--world-model", str(tmp_path / "a/model"), "--world-model", str(tmp_path / "b/model")]
    models += ["--tab-model", "scene-graph=runs/a", "--tab-model", "scene-graph=runs/b"]
    assert main([*arguments, *models]) == 0
    assert (served["host"], served["port"], served["share"]) == ("127.0.0.1", None, False)
    assert list(served["context"].worlds) == ["a/model", "b/model"]
    assert served["context"].config.tab_models == {"scene-graph": [Path("runs/a"), Path("runs/b")]}
    assert (served["context"].config.max_visitors, served["context"].config.max_seconds) == (3, 9)


def test_the_command_says_in_one_line_what_is_wrong(
    tiny_model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vidgen.demo.app.launch", lambda *_: pytest.fail("launched"))
    wrong = {
        "model_index.json": ["--model", str(tmp_path)],
        "must be from 1 to 65535": ["--port", "70000"],
        "max_visitors=0": ["--visitors", "0"],
        "is not TAB=FOLDER": ["--tab-model", "scene-graph"],
        "is not a folder": ["--model", tiny_model_folder, "--world-model", str(tmp_path / "none")],
    }
    for message, arguments in wrong.items():
        assert main(["demo", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.splitlines()[-1].startswith("error: ")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert 'pip install "vidgen[demo]"' in capsys.readouterr().err
