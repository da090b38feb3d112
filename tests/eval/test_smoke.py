"""What would be wrong: a benchmark that no longer runs, or whose numbers point the wrong way."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.pipelines import ContextForcingPipeline
from vidgen.schedulers import FlowConsistencyScheduler

EVAL = Path(__file__).resolve().parents[2] / "eval"


def load_benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", EVAL / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Folder of an untrained pipeline of 16x32 pixels at 12 fps."""
    torch.manual_seed(0)
    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "meadow": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    text = UMT5Config(vocab_size=4, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0)
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=8,
        scale_factor_temporal=4,
    )
    transformer = CausalWanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=48,
        num_layers=2,
    )
    pipe = ContextForcingPipeline(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
        ),
        UMT5EncoderModel(text).eval(),
        vae.eval(),
        transformer.eval(),
        FlowConsistencyScheduler(num_inference_steps=2),
        fps=12,
        default_height=16,
        default_width=32,
        max_sequence_length=64,
    )
    folder = tmp_path_factory.mktemp("model")
    pipe.save_pretrained(folder)
    return folder


def test_generation_cost_shows_which_memories_grow(model, tmp_path, monkeypatch, capsys):
    benchmark = load_benchmark("generation_cost")
    # What the fresh process does, without starting one.
    benchmark.main(["--resident-only", "--chunks", "16", "--model", str(model)])
    growth = benchmark.add_growth(json.loads(capsys.readouterr().out.splitlines()[-1]), 16)
    monkeypatch.setattr(benchmark, "resident_in_fresh_process", lambda *_: growth)
    benchmark.main(["--smoke", "--model", str(model), "--out", str(tmp_path), "--seeds", "1"])

    results = json.loads((tmp_path / "results.json").read_text())
    nbytes = {name: measured["nbytes"][0] for name, measured in results["memories"].items()}
    assert nbytes["full"][-1] > 2 * nbytes["full"][5]
    assert nbytes["slow_fast"][-1] == nbytes["slow_fast"][8] == nbytes["sliding_window"][-1]
    flops = {name: measured["flops_per_chunk"] for name, measured in results["memories"].items()}
    assert flops["full"] > flops["slow_fast"] == flops["sliding_window"] > 0
    assert results["resident"]["memory_growth"] == 1
    assert all(0 < measured["utilization"] < 1 for measured in results["memories"].values())
    assert [row["latent_frames"] for row in results["one_shot"]] == [15, 30]
    assert {"versions", "cpu", "git_revision"} <= results["environment"].keys() and results["seeds"] == [0]
    table = (tmp_path / "table.md").read_text()
    assert "| slow_fast |" in table and "growth of resident memory" in table
    assert Image.open(tmp_path / "seconds_per_chunk.png").size == (840, 480)


def test_a_missed_bar_fails_only_when_asked_to_check(model, tmp_path, monkeypatch):
    benchmark = load_benchmark("generation_cost")
    series = {"resident_bytes": [100] * 10 + [200] * 6, "memory_bytes": [10] * 16}
    monkeypatch.setattr(benchmark, "resident_in_fresh_process", lambda *_: benchmark.add_growth(series, 16))
    for name in ("measure_memories", "measure_one_shot", "measure_minute"):
        monkeypatch.setattr(benchmark, name, STAND_INS[name])
    monkeypatch.setattr(benchmark, "matmul_peak", lambda *_, **__: 1e9)
    arguments = ["--smoke", "--model", str(model), "--out", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    assert benchmark.main([*arguments, "--check"]) == 1
    assert "| growth of resident memory, slow_fast | 2.000 | 1.05 | FAIL |" in (tmp_path / "table.md").read_text()


MEASURED = {
    "seconds": [[1.0] * 16],
    "nbytes": [[1] * 16],
    "early_seconds": [1.0],
    "late_seconds": [1.0],
    "late_to_early": [1.0],
    "flops_per_chunk": 1,
    "flops_chunk_index": 8,
}
STAND_INS = {
    "measure_memories": lambda *_, **__: {name: dict(MEASURED) for name in ("full", "sliding_window", "slow_fast")},
    "measure_one_shot": lambda *_, **__: [],
    "measure_minute": lambda *_: [dict.fromkeys(("seconds", "text", "denoise", "commit", "decode", "write"), 1.0)],
}


def test_default_model_parts_merge_and_point_the_right_way(model, tmp_path):
    benchmark = load_benchmark("default_model")
    arguments = ["--smoke", "--model", str(model), "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    benchmark.main([*arguments, "--parts", "recall", "contact_sheet", "--seeds", "2"])
    assert benchmark.main([*arguments, "--parts", "attributes", "drift", "--check"]) == 1  # it is untrained

    results = json.loads((tmp_path / "out" / "results.json").read_text())
    parts = results["parts"]
    assert parts.keys() == {"attributes", "drift", "recall", "contact_sheet"}
    gain = {row["memory"]: row["gain"] for row in parts["recall"]["rows"]}
    assert gain.keys() == {"world", "slow_fast", "sliding_window", "full"}
    assert gain["world"] > 3 and gain["world"] == max(gain.values())
    scores = parts["attributes"]
    assert all(len(score["interval"]) == 2 for score in scores["generated"].values())
    assert sum(map(sum, scores["real"]["biome"]["confusion"])) == benchmark.SMOKE.captions
    assert len(parts["drift"]["videos"]) == 3
    assert all(len(video["latent"]["first_mean"]) == 4 for video in parts["drift"]["videos"])
    assert [claim["claim"] for claim in results["claims"]] == [f"accuracy of {name}" for name in benchmark.BARS]
    assert Image.open(tmp_path / "out" / "contact_sheet.png").size[0] == 6 * (2 * 32 + 3)
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| biome |" in table and "| generated, latents |" in table and "| 2 | slow_fast |" in table
    # One trained classifier serves all later runs on the same autoencoder.
    assert len(list((tmp_path / "cache").glob("*/classifier.safetensors"))) == 1


def test_results_of_other_weights_are_not_merged(tmp_path):
    benchmark = load_benchmark("default_model")
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"model_checksum": "old", "smoke": False, "parts": {"recall": {"rows": []}}}))
    fresh = {"model_checksum": "new", "smoke": False, "parts": {"drift": {}}}
    assert benchmark.merge_results(path, fresh)["parts"].keys() == {"drift"}
    assert benchmark.merge_results(path, {**fresh, "model_checksum": "old"})["parts"].keys() == {"drift", "recall"}


def test_accuracy_and_confusion_of_known_readings():
    benchmark = load_benchmark("default_model")
    truth = {"biome": "meadow", "time_of_day": "day", "weather": "rain", "traveller": "none"}
    readings = [truth, truth, truth, {**truth, "weather": "clear"}]
    scores = benchmark.score_attributes([truth] * 4, readings)
    assert scores["biome"]["accuracy"] == 1 and scores["biome"]["interval"] == [1, 1]
    assert scores["weather"]["accuracy"] == 0.75
    row, column = (scores["weather"]["values"].index(name) for name in ("rain", "clear"))
    assert scores["weather"]["confusion"][row][column] == 1


def test_held_out_scenes_ask_for_every_value_equally_often():
    benchmark = load_benchmark("default_model")
    world = benchmark.LandscapeWorld()
    scenes = [benchmark.held_out_scene(world, index, 6.0) for index in range(480)]
    assert len({tuple(scene.attributes.values()) for scene in scenes}) == 480
    for name, values in benchmark.SCENE_ATTRIBUTES.items():
        counts = [sum(scene.attributes[name] == value for scene in scenes[:96]) for value in values]
        assert max(counts) - min(counts) <= 1
