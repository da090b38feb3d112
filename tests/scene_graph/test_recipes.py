"""What would be wrong: a training that can't be repeated from its config, parts that don't fit together, a command
that dies with a traceback. Simulated operations, toy sizes, everything a user would type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scene_graph import recipes
from scene_graph.datasets import telling_frames
from scene_graph.formats import read_graphs
from scene_graph.pipeline import SGGICLPipeline
from scene_graph.predictors import load_predictor
from scene_graph.retrieval import IMAGES_NAME, SceneIndex
from scene_graph.schema import SceneGraphError, Vocabulary
from scene_graph.simulator import SimulatorConfig, simulate
from vidgen.cli.main import main
from vidgen.runtime.config import find_config, load_config
from vidgen.runtime.errors import ConfigError

SCHEMAS = {
    "predictor": (recipes.PredictorRecipe, recipes.MLLMPredictorRecipe),
    "encoder": (recipes.EncoderRecipe, recipes.EncoderRecipe),
    "index": (recipes.IndexRecipe, recipes.IndexRecipe),
    "reranker": (recipes.RerankerRecipe, recipes.MLLMRerankerRecipe),
    "router": (recipes.RouterRecipe, recipes.RouterRecipe),
    "assemble": (recipes.AssembleRecipe, recipes.AssembleRecipe),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Simulated data, and every recipe on it in order."""
    root = tmp_path_factory.mktemp("sgg")
    simulate(root / "data", SimulatorConfig(takes=10, frames_per_take=24, views=(2, 1), size=32, looks_per_action=2))
    data = f"data.root={root}/data"
    short = ["train.max_steps=2", "train.checkpoint_every=1", "train.validate_every=1", "train.batch_size=2"]
    predictor = ["model.image_size=32", "model.hidden_size=16", "model.num_layers=1", "validation_batches=1"]
    parts = {name: f"{name}={root}/{name}/weights/{name}" for name in ("predictor", "encoder", "reranker")}
    index, router = f"index={root}/index", f"router={root}/router"
    for name, settings in (
        ("predictor", [*short, *predictor]),
        ("encoder", [*short, "model_config.vision_cfg.image_size=32", "validation_batches=1"]),
        ("index", [parts["encoder"]]),
        ("reranker", [*short, parts["predictor"], index, "model.image_size=32", "validation_queries=4"]),
        ("router", [parts["predictor"], index, parts["reranker"]]),
        ("assemble", [parts["predictor"], index, parts["reranker"], router]),
    ):
        where = f"train.output_dir={root}/{name}" if name in parts else f"output_dir={root}/{name}"
        function = {"index": "build_index", "assemble": "assemble"}.get(name, f"train_{name}")
        given = [*settings, where] if name == "assemble" else [data, *settings, where]
        getattr(recipes, function)(f"sgg/tiny_{name}", given)
    return root


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs `vidgen scene-graph` and returns exit code, stdout and stderr."""
    monkeypatch.delenv("VIDGEN_DEBUG", raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["scene-graph", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize("path", sorted(find_config("sgg/tiny_index").parent.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_is_one_of_its_recipe(path: Path):
    size, _, part = path.stem.rpartition("_")
    load_config(SCHEMAS[part][size != "tiny"], str(path), [])


def test_the_predictor_is_trained_on_training_takes_only(runs: Path):
    source = recipes.SceneSource(f"{runs}/data", views=[2, 1])
    takes = {split: set(source.open(split).takes) for split in ("train", "validation", "test")}
    assert not takes["train"] & takes["validation"] and not (takes["train"] | takes["validation"]) & takes["test"]
    indexed = SGGICLPipeline.from_pretrained(runs / "assemble").index
    assert set(indexed.takes) == takes["train"]
    report = json.loads((runs / "router/report.json").read_text())
    assert {*report["fitted_on"], *report["chosen_on"]} == takes["validation"]
    assert not {*report["fitted_on"]} & {*report["chosen_on"]}


def test_a_small_index_has_the_telling_frames_of_every_take(runs: Path, tmp_path: Path):
    settings = [f"data.root={runs}/data", f"output_dir={tmp_path}/index", "with_images=true", "encoder=null"]
    settings.append(f"predictor={runs}/predictor/weights/predictor")
    folder = recipes.build_index("sgg/tiny_index", [*settings, "frames_per_take=3"])
    predictor = load_predictor(runs / "predictor/weights/predictor")
    index = SceneIndex.from_pretrained(folder, predictor=predictor)
    train = recipes.SceneSource(f"{runs}/data", views=[2, 1]).open("train")
    assert len(index) == 3 * len(train.takes) and (folder / IMAGES_NAME).is_file()
    for take in train.takes:
        own = [sample for sample in train if sample.take == take]
        wanted = [own[row].id for row in telling_frames([sample.graph for sample in own], 3)]
        assert [sample.id for sample in index.samples if sample.take == take] == wanted
    with pytest.raises(ConfigError, match="frames_per_take=0"):
        recipes.build_index("sgg/tiny_index", [*settings, "frames_per_take=0"])


def test_reweighted_and_plain_training_differ_and_the_plain_one_repeats(runs: Path, tmp_path: Path):
    settings = [
        f"data.root={runs}/data", "train.max_steps=2", "train.batch_size=2", "train.validate_every=0",
        "model.image_size=32", "model.hidden_size=16", "model.num_layers=1", "validation_batches=0",
    ]  # fmt: skip
    weights = []
    for name, more in (("one", []), ("again", []), ("reweighted", ["reweight=true"])):
        recipes.train_predictor("sgg/tiny_predictor", [*settings, *more, f"train.output_dir={tmp_path / name}"])
        weights.append((tmp_path / name / "weights/predictor/diffusion_pytorch_model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_data_sets_are_told_apart(runs: Path, tmp_path: Path):
    simulated = recipes.open_scenes(runs / "data", "test", [2, 1])
    assert type(simulated).__name__ == "OR4DDataset"
    assert simulated[1].seconds == pytest.approx(673 / 24)  # 24 frames of an operation, not 24 seconds
    images = next((runs / "data").glob("export*/colorimage"))
    assert type(recipes.open_scenes(images)).__name__ == "SceneFolder"
    with pytest.raises(SceneGraphError, match="is not a folder"):
        recipes.open_scenes(tmp_path / "none")


def test_missing_parts_name_the_recipe_that_makes_them(tmp_path: Path):
    nothing = [f"predictor={tmp_path}/no", f"index={tmp_path}/no", f"reranker={tmp_path}/no", f"router={tmp_path}/no"]
    with pytest.raises(ConfigError, match="made by the recipe predictor"):
        recipes.assemble("sgg/tiny_assemble", nothing)
    with pytest.raises(ConfigError, match="exactly one of encoder, predictor"):
        recipes.build_index("sgg/tiny_index", ["predictor=somewhere"])


def test_predictions_are_run_scored_exported_and_drawn(runs: Path, tmp_path: Path, run):
    predictions = tmp_path / "predictions.json"
    data, views = runs / "data", ("--views", "2,1")
    code, _, err = run(
        "run", data, "--model", runs / "assemble", *views, "-o", predictions, "--policy", "all/retrieval"
    )
    assert code == 0 and f"{predictions}: 48 graphs, 48 after a second look" in err
    graphs = read_graphs(predictions, Vocabulary.or4d())

    code, out, _ = run("eval", predictions, "--data", data, *views, "--json")
    reports = json.loads(out)
    assert code == 0 and set(reports) == {"official", "strict"}
    assert reports["strict"]["num_samples"] == 48 and "tail_f1" in reports["official"]["scores"]
    code, out, _ = run("eval", predictions, "--data", data, *views, "--protocol", "strict")
    assert code == 0 and "Protocol `strict`" in out and "official" not in out

    for name in ("jsonld", "cypher", "graphml", "csv", "4dor-eval"):
        assert run("export", predictions, "--to", name, "-o", tmp_path / name)[0] == 0
        assert (tmp_path / name).stat().st_size > 100
    sample = sorted(graphs)[0]
    code, out, _ = run(
        "draw", data, "--model", runs / "assemble", "--sample", sample, *views, "-o", tmp_path / "a.png"
    )
    assert code == 0 and (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    code, out, _ = run("search", data, "--model", runs / "assemble", "--sample", sample, *views, "-n", "3")
    assert code == 0 and len(out.splitlines()) == 3


def test_statistics_show_head_and_tail(runs: Path, run):
    code, out, _ = run("stats", runs / "data", "--views", "2,1")
    assert code == 0 and "closeTo" in out and "head" in out and "tail" in out and "144 frames of 6 takes" in out


def test_simulating_twice_adds_nothing_and_other_settings_are_refused(tmp_path: Path, run):
    arguments = ("simulate", tmp_path / "data", "--takes", 8, "--frames", 16, "--size", 32)
    assert run(*arguments)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*.jpg")}
    assert run(*arguments)[0] == 0
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*.jpg")}
    code, _, err = run(*arguments, "--seed", 1)
    assert code == 2 and "other settings" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "predictr"), "did you mean 'predictor'"),
        (("train", "predictor", "steps"), "is not KEY=VALUE"),
        (("train", "predictor", "context.zero_shot=1"), "zero_shot_share"),
        (("run", "--model", "nowhere"), "give either DATA or --video"),
        (("run", ".", "--model", "nowhere"), "nowhere is no SGG-ICL pipeline"),
        (("stats", "nowhere"), "nowhere is not a folder"),
        (("export", "no.json", "--to", "jsonl", "-o", "a"), "did you mean 'jsonld'"),
        (("export", "no.json", "--to", "csv", "-o", "a"), "no.json"),
        (("simulate", "data", "--takes", "1"), "takes=1"),
    ],
)
def test_wrong_words_are_one_line(arguments, message: str, run, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1, err


def test_predictions_that_lack_samples_or_are_of_other_ones_are_refused(runs: Path, tmp_path: Path, run):
    (tmp_path / "few.json").write_text('{"002_4DOR_000000": []}')
    code, _, err = run("eval", tmp_path / "few.json", "--data", runs / "data", "--views", "2,1")
    assert code == 2 and "lacks 47 of 48 samples" in err
