"""What would be wrong: a resumed training that differs from a straight one, a corpus that changes under a run, a model
card with numbers that aren't the model's, commands that don't lead to one another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from vidgen.cli.main import main
from vidgen.language import load_language_model
from vidgen.language.causal_lm import heldout_figures
from vidgen.language.corpus import TokenWindows, read_index, token_bytes
from vidgen.recipes.language_model import assemble_language_model, prepare_corpus, train_causal_lm
from vidgen.runtime.errors import ConfigError

SETTINGS = {
    "corpus": "corpus",
    "length": 16,
    "stochastic_depth": 0.3,
    "validation_windows": 5,
    "model": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "train": {
        "output_dir": "run",
        "max_steps": 4,
        "batch_size": 4,
        "ema_decay": 0.9,
        "log_every": 2,
        "validate_every": 2,
        "checkpoint_every": 2,
        "optimizers": {"model": {"kind": "muon", "lr": 0.01}},
    },
}


@pytest.fixture
def corpus_settings(tmp_path, monkeypatch, text_folder):
    """Overrides of the recipe lm_tokenizer for a small corpus in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    Path("lm.yaml").write_text(yaml.safe_dump(SETTINGS))
    source = [f"source.folder={text_folder}", "source.suffix=.txt", "source.heldout_percent=20"]
    return ["output_dir=corpus", "vocab_size=300", *source]


def test_a_resumed_run_equals_a_straight_one_bit_for_bit(corpus_settings):
    prepare_corpus(None, corpus_settings)
    train_causal_lm("lm.yaml", ["train.output_dir=straight"])
    train_causal_lm("lm.yaml", ["train.max_steps=2"])
    result = train_causal_lm("lm.yaml", [])
    assert result.step == 4
    files = [path.relative_to("straight") for path in Path("straight").rglob("*.safetensors")]
    assert {path.parts[0] for path in files} == {"step_000002", "step_000004", "weights"}
    for file in files:
        straight, resumed = load_file(Path("straight") / file), load_file(Path("run") / file)
        assert straight.keys() == resumed.keys()
        assert all(torch.equal(straight[name], resumed[name]) for name in straight), file


@pytest.mark.slow
def test_compiled_blocks_compute_the_same_step(corpus_settings):
    prepare_corpus(None, corpus_settings)
    for run, compiled in (("plain", "false"), ("compiled", "true")):
        overrides = [f"compile={compiled}", f"train.output_dir={run}", "train.max_steps=1"]
        train_causal_lm("lm.yaml", [*overrides, "train.optimizers.model={kind: adamw, lr: 0.01}"])
    plain, compiled = (load_file(f"{run}/step_000001/model.optimizer.safetensors") for run in ("plain", "compiled"))
    assert plain.keys() == compiled.keys()
    for name in plain:
        torch.testing.assert_close(compiled[name], plain[name], rtol=1e-3, atol=1e-6)


def test_a_whole_corpus_is_kept_and_another_one_is_refused(corpus_settings):
    prepare_corpus(None, corpus_settings)
    written = Path("corpus/train.safetensors").stat().st_mtime_ns
    prepare_corpus(None, corpus_settings)
    assert Path("corpus/train.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="corpus holds a corpus of .*'suffix': '.txt'.*, now .*'suffix': '.md'"):
        prepare_corpus(None, [*corpus_settings, "source.suffix=.md"])
    with pytest.raises(ConfigError, match=r"now .*'max_length': 99.*; use another output_dir"):
        prepare_corpus(None, [*corpus_settings, "max_length=99"])
    Path("mine").mkdir()
    with pytest.raises(ConfigError, match="mine exists and holds no corpus"):
        prepare_corpus(None, [*corpus_settings, "output_dir=mine"])


@pytest.mark.parametrize("command", [["lm", "train"], ["lm", "generate"], ["lm", "bench"], ["direct"]])
def test_every_command_has_help(capsys, command):
    assert main([*command, "--help"]) == 0
    assert f"Usage: vidgen {' '.join(command)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("length=513", "length=513; the model's max_position_embeddings is 512"),
        ("length=0", "length=0; it must be 1 or more"),
        ("stochastic_depth=1.0", "stochastic_depth=1.0; it must be from 0"),
    ],
)
def test_settings_out_of_range_are_named(corpus_settings, override, message):
    prepare_corpus(None, corpus_settings)
    with pytest.raises(ConfigError, match=message):
        train_causal_lm("lm.yaml", [override])


def test_from_text_to_a_plan_by_the_commands(corpus_settings, text_folder, capsys):
    train = ["lm", "train", "-o", "out", "--text", str(text_folder), "--suffix", ".txt", "--vocab-size", "300"]
    assert main([*train, "--config", "lm.yaml", "train.max_steps=2"]) == 0
    assert "go on with: vidgen lm generate --model out/model" in capsys.readouterr().err

    # The card tells the figures of the very weights in the folder.
    lm = load_language_model("out/model", device="cpu")
    stored = load_file("out/model/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    heldout = TokenWindows("out/corpus", "heldout", 512).in_order().split(8)
    figures = heldout_figures(lm.model, heldout, token_bytes(lm.tokenizer))
    card = Path("out/model/README.md").read_text()
    assert f"**{figures['bits_per_byte']:.3f} bits per byte**, {figures['loss']:.3f} nats per token" in card
    splits = read_index("out/corpus")["splits"]
    assert f"{splits['train']['files']} files" in card
    parameters = sum(parameter.numel() for parameter in lm.model.parameters())
    assert f"{parameters / 1e6:.2f} M" in card

    assert main([*train, "--config", "lm.yaml", "train.max_steps=3"]) == 0  # goes on, and replaces the model
    assert re.search(r"\| out/run \| 3 \|", Path("out/model/README.md").read_text())
    capsys.readouterr()

    generate = ["lm", "generate", "the meadow", "--model", "out/model", "--max-new-tokens", "8"]
    texts = []
    for seed in (1, 1, 2):
        assert main([*generate, "--temperature", "1", "--seed", str(seed)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_nothing_is_assembled_from_a_run_without_weights(corpus_settings):
    with pytest.raises(ConfigError, match="run/weights/model does not exist; it is made by the recipe lm_causal"):
        assemble_language_model(None, ["output_dir=out", "run=run", "corpus=corpus"])
