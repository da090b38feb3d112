"""The tab of scene graphs: what it shows is what the pipeline says of frames that are those of the data set."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

pytest.importorskip("gradio")
pytest.importorskip("matplotlib")

from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from scene_graph import demo as scene_demo
from scene_graph.datasets import OR4DDataset, telling_frames
from scene_graph.demo import POLICIES, STUDY, SceneRun, read_frame, reading_html, simulate_frames
from scene_graph.simulator import SimulatorConfig, make_take, plan_study, simulate
from vidgen.demo import context as context_module
from vidgen.demo.context import TAB_ENTRY_POINTS, DemoContext
from vidgen.demo.visitors import DemoError
from vidgen.runtime.assets import AssetError

SMALL = SimulatorConfig(takes=10, frames_per_take=24, views=(2, 1), size=32, looks_per_action=2)
ROUTER, ALWAYS, NEVER = POLICIES
POINT = EntryPoint("scene-graph", "scene_graph.demo:tab", TAB_ENTRY_POINTS)


@pytest.fixture(scope="module")
def scene_pipe(make_scene_pipeline: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Random weights; its examples are of simulated training takes."""
    root = simulate(tmp_path_factory.mktemp("sgg") / "data", SMALL)
    return make_scene_pipeline(list(OR4DDataset(root, "train", views=SMALL.views))[::8], max_triplets=24)


@pytest.fixture(scope="module")
def model(scene_pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "toy"
    scene_pipe.save_pretrained(folder, with_images=True)
    return folder


@pytest.fixture(scope="module")
def running(make_context: Callable[..., DemoContext], start_demo: Any, model: Path) -> Iterator[Any]:
    context = make_context(tab_models={"scene-graph": [model]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_module, "entry_points", lambda group: [POINT])
        with start_demo(context) as address:
            yield context, address


@pytest.fixture
def demo(running: Any) -> Iterator[Any]:
    yield running
    running[0].visitors.close()


def connect(address: str, tmp_path: Path) -> Client:
    return Client(address, verbose=False, download_files=str(tmp_path / "downloads"))


@pytest.fixture
def client(demo: Any, tmp_path: Path) -> Client:
    return connect(demo[1], tmp_path)


def ask(client: Client, number: int = 1, second_look: str = ROUTER, model: str = "toy") -> dict[str, Any]:
    return client.predict(model, second_look, number, api_name="/scene_graph")


# --- frames -------------------------------------------------------------------------------------------------------


def test_simulated_frames_are_those_of_the_data_set(tmp_path: Path) -> None:
    """A model sees in the demo what it would be evaluated on: the same pixels, labels and names."""
    data = OR4DDataset(simulate(tmp_path / "data", SMALL), "test", views=SMALL.views)
    for seed, take in enumerate(data.takes):
        folder = tmp_path / f"shown_{seed}"
        folder.mkdir()
        shown = simulate_frames(folder, seed, SMALL, count=6)
        assert len({sample.id for sample in shown}) == 6
        for sample in shown:
            truth = data.find(sample.id)
            assert (sample.take, sample.frame, sample.view_names) == (take, truth.frame, truth.view_names)
            assert sample.graph == truth.graph
            assert all(np.array_equal(a, b) for a, b in zip(sample.images(), truth.images(), strict=True))


def test_other_seeds_are_other_operations_with_the_same_tools(tmp_path: Path) -> None:
    pictures = []
    for seed in (0, 2):  # two test takes: the third operation is in no data set
        (tmp_path / str(seed)).mkdir()
        samples = simulate_frames(tmp_path / str(seed), seed, SMALL, count=3)
        assert samples[0].take == "002_4DOR"
        pictures.append(samples[1].image())
    assert not np.array_equal(*pictures)
    study = plan_study(SMALL)
    other = SimulatorConfig(**{**vars(SMALL), "seed": 1})
    assert make_take(other, study, 2).looks == make_take(SMALL, study, 2).looks


def test_a_take_is_shown_by_its_telling_frames() -> None:
    study = plan_study(STUDY)
    take = make_take(STUDY, study, study.splits["test"][0])
    states = [take.states[index] for index in telling_frames([state.graph for state in take.states], 12)]
    frames = [state.frame for state in states]
    assert len(frames) == 12 and frames == sorted(frames)
    counts = Counter(predicate for state in take.states for predicate in state.graph.predicates)
    rarest = min(counts, key=counts.__getitem__)
    assert any(rarest in state.graph.predicates for state in states)
    evenly = [take.states[index] for index in range(8, 190, 16)]
    kinds = [len({p for state in chosen for p in state.graph.predicates}) for chosen in (states, evenly)]
    assert kinds[0] > kinds[1]


# --- readings -----------------------------------------------------------------------------------------------------


def test_the_api_says_what_the_pipeline_says(client: Client, scene_pipe: Any, tmp_path: Path) -> None:
    views, _ = client.predict(1, api_name="/scene_simulate")
    assert views.count("<figure>") == 2 and "1 of 12" in views
    folder = tmp_path / "frames"
    folder.mkdir()
    sample = simulate_frames(folder, 1)[3]
    for second_look, policy in POLICIES.items():
        said, output = ask(client, 4, second_look), scene_pipe.with_config(policy=policy)([sample])
        assert said["frame"] == sample.id and said["routed"] == output.routed[0]
        words = {"draft": output.drafts[0].graph, "final": output.graphs[0], "truth": sample.graph}
        for name, graph in words.items():
            assert [tuple(row) for row in said[name]] == [tuple(triplet.spo()) for triplet in graph.sorted()]
        expected = [(e.sample.id, pytest.approx(e.score, rel=1e-4)) for e in output.examples[0][::-1]]
        assert [(example["frame"], example["score"]) for example in said["examples"]] == expected
        if policy == "none":
            assert said["probability"] is None
        else:
            assert said["probability"] == pytest.approx(output.route_probabilities[0], rel=1e-4)
            assert said["threshold"] == pytest.approx(scene_pipe.router.threshold)
        assert said["rare"] == ["drilling", "sawing"]


def test_the_page_gets_verdict_table_examples_and_a_drawing(client: Client) -> None:
    client.predict(0, api_name="/scene_simulate")
    answer, picture = client.predict("toy", ALWAYS, 2, api_name="/scene_read")
    said = ask(client, 2, ALWAYS)
    assert "A second look, with 2 examples" in answer and answer.count("sg-example'") == 2
    assert f"router: {said['probability']:.2f}" in answer
    rows = {tuple(row) for name in ("draft", "final", "truth") for row in said[name]}
    assert answer.count("<tr") == 1 + len(rows)
    with PIL.Image.open(picture) as drawing:
        assert drawing.format == "PNG" and drawing.width == 1680
    answer, _ = client.predict("toy", NEVER, 2, api_name="/scene_read")
    assert "Not routed" in answer and "sg-example'" not in answer


def test_a_wrong_relation_is_told_from_a_right_one(scene_pipe: Any, tmp_path: Path) -> None:
    sample = simulate_frames(tmp_path, 0)[0]
    reading = read_frame(scene_pipe, sample, "none")
    page = reading_html(reading)
    wrong = [triplet for triplet in reading.final if triplet not in sample.graph]
    assert wrong and page.count("sg-no") == 2 * len(wrong)  # in the draft, and in the final graph, which is the draft
    right = len(reading.final) - len(wrong)
    assert page.count("sg-yes") == 2 * right + len(sample.graph)


# --- uploads ------------------------------------------------------------------------------------------------------


def test_pictures_are_the_views_of_one_frame(client: Client, picture_file: Path) -> None:
    views, _ = client.predict([handle_file(str(picture_file))] * 2, api_name="/scene_upload")
    assert views.count("<figure>") == 2 and "1 of 1: upload" in views
    said = ask(client)
    assert said["truth"] is None and said["frame"] == "upload"
    with pytest.raises(AppError, match="no frame 2; allowed: 1 to 1"):
        ask(client, 2)


def test_what_is_no_picture_is_refused_and_named(client: Client, picture_file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    files = [handle_file(str(picture_file)), handle_file(str(tmp_path / "text.png"))]
    with pytest.raises(AppError, match="Picture 2: This file can't be read as a picture"):
        client.predict(files, api_name="/scene_upload")
    with pytest.raises(AppError, match="7 pictures were given; allowed: 1 to 6"):
        client.predict([handle_file(str(picture_file))] * 7, api_name="/scene_upload")
    with pytest.raises(AppError, match="0 pictures"):
        client.predict(None, api_name="/scene_upload")
    PIL.Image.new("RGB", (300, 20)).save(tmp_path / "wide.png")
    with pytest.raises(AppError, match="Picture 1: It is 300 x 20 pixels; allowed: 256"):
        client.predict([handle_file(str(tmp_path / "wide.png"))], api_name="/scene_upload")


# --- visitors -----------------------------------------------------------------------------------------------------


def test_visitors_have_frames_of_their_own_and_only_the_newest(demo: Any, client: Client, tmp_path: Path) -> None:
    context, address = demo
    other = connect(address, tmp_path)
    client.predict(0, api_name="/scene_simulate")
    with pytest.raises(AppError, match="no frames of yours"):
        ask(other)
    other.predict(1, api_name="/scene_simulate")
    assert ask(client)["truth"] != ask(other)["truth"]
    client.predict(2, api_name="/scene_simulate")
    folders = list(context.config.output.glob("visitors/*/scene_*"))
    assert len(folders) == 2
    context.visitors.close()
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("toy", ROUTER, 13), "no frame 13; allowed: 1 to 12"),
        (("toi", ROUTER, 1), "model 'toi' is unknown: did you mean 'toy'"),
        (("toy", "sometimes", 1), "second look 'sometimes' is unknown"),
    ],
)
def test_wrong_arguments_are_named(client: Client, arguments: tuple, message: str) -> None:
    client.predict(0, api_name="/scene_simulate")
    with pytest.raises(AppError, match=message):
        client.predict(*arguments, api_name="/scene_graph")


def test_frames_that_were_left_are_gone(tmp_path: Path) -> None:
    (tmp_path / "frames").mkdir()
    run = SceneRun(tmp_path / "frames", simulate_frames(tmp_path / "frames", 0, SMALL, 2))
    assert not run.busy
    run.close()
    assert not (tmp_path / "frames").exists()
    with pytest.raises(DemoError, match="gone"):
        run.sample(1)


# --- models -------------------------------------------------------------------------------------------------------


def test_without_a_model_the_truth_is_shown_and_how_to_train_one(
    make_context: Any, start_demo: Any, tmp_path: Path, picture_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_nothing(name: str) -> Path:
        raise AssetError(name)

    monkeypatch.setattr(scene_demo, "find_asset", find_nothing)
    monkeypatch.setattr(context_module, "entry_points", lambda group: [POINT])
    with start_demo(make_context()) as address:
        client = connect(address, tmp_path)
        client.predict(0, api_name="/scene_simulate")
        answer, _ = client.predict(None, ROUTER, 1, api_name="/scene_read")
        assert "The truth" in answer and "sg-no" not in answer
        client.predict([handle_file(str(picture_file))], api_name="/scene_upload")
        with pytest.raises(AppError, match="vidgen scene-graph train"):
            client.predict(None, ROUTER, 1, api_name="/scene_read")
        parts = json.dumps(client.view_api(return_format="dict"))
        assert "/scene_read" in parts


def test_the_training_that_is_named_is_that_of_the_readme() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    simulate_line, loop, _ = scene_demo.TRAIN.split(" && ")
    assert simulate_line in readme and loop in readme
    assert f"--takes {STUDY.takes} --frames {STUDY.frames_per_take} --size {STUDY.size}" in simulate_line


def test_the_embedded_model_is_found_and_others_replace_it(
    make_context: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene_demo, "find_asset", lambda name: model)
    assert list(scene_demo.load_models(make_context())) == ["toy"]
    assert list(scene_demo.load_models(make_context(tab_models={"scene-graph": []}))) == []
    with pytest.raises(ValueError, match="is no SGG-ICL pipeline"):
        scene_demo.load_models(make_context(tab_models={"scene-graph": [model / "router"]}))


def test_the_tab_is_announced_and_absent_without_what_it_needs(
    make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][TAB_ENTRY_POINTS][POINT.name] == POINT.value
    assert POINT.load() is scene_demo.tab
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert scene_demo.tab(make_context()) is None
