"""What would be wrong: a recipe that trains something else than its config says, stages that can't follow another."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from vidgen.language.dllm.layouts import load_dllm
from vidgen.language.dllm.modeling import MaskedDiffusionConfig, MaskedDiffusionLM
from vidgen.recipes.dllm import (
    MaskAgnosticRecipe,
    MaskedDiffusionRecipe,
    Pairs,
    PairsData,
    ResidualContextRecipe,
    train_mask_agnostic,
    train_masked_diffusion,
    train_residual_context,
)
from vidgen.runtime.config import load_config
from vidgen.runtime.errors import ConfigError

TINY = ["train.max_steps=2", "train.batch_size=4", "sudoku.grids=20"]
SHAPE = ["model.hidden_size=16", "model.intermediate_size=32", "model.num_hidden_layers=1"]
WORDS = ["<pad>", "</s>", "<mask>", "one", "two", "three", "plus", "is"]


def make_tokenizer(words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


@pytest.fixture
def pairs(tmp_path) -> PairsData:
    rows = [{"prompt": "one plus one is", "answer": "two"}, {"prompt": "two is", "answer": "two " * 30}]
    rows.append({"prompt": "one plus two is", "answer": "three is three"})
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PairsData(str(path), max_length=10)


def test_the_stages_follow_each_other(tmp_path):
    base = train_masked_diffusion("dllm/tiny_base", [*TINY, *SHAPE, f"train.output_dir={tmp_path / 'base'}"])
    source = str(base.weights_dir / "model")
    model = load_dllm(source, "cpu")
    assert (model.config.vocab_size, model.config.mask_token_id, model.config.hidden_size) == (5, 4, 16)
    assert model.generation_config.max_new_tokens == 0 and model.generation_config.rcd is None

    options = [*TINY, f"init_from.name={source}", f"train.output_dir={tmp_path / 'seqd'}"]
    control = load_dllm(train_masked_diffusion("dllm/tiny_seqd", options).weights_dir / "model", "cpu")
    assert control.generation_config.rcd is None

    options = [*TINY, f"target.name={source}", f"reference.name={source}", f"train.output_dir={tmp_path / 'rcd'}"]
    result = train_residual_context("dllm/tiny_rcd", [*options, "rcd.alpha=inverse"])
    trained = load_dllm(result.weights_dir / "model", "cpu")
    assert trained.generation_config.rcd["alpha"] == "inverse"
    assert trained.generation_config.max_new_tokens == 0  # of the base
    assert not torch.equal(trained.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    "recipe, name",
    [
        (MaskedDiffusionRecipe, "dllm/sdar_reference"),
        (ResidualContextRecipe, "dllm/sdar_rcd"),
    ],
)
def test_configs_of_real_size_are_valid(recipe, name):
    config = load_config(recipe, name)
    assert config.pairs.max_length == 8192 and config.train.fsdp


def test_the_adapter_config_of_real_size_is_valid():
    config = load_config(MaskAgnosticRecipe, "dllm/mask_agnostic_llada_lora")
    assert config.lora.rank == 16 and config.mask_agnostic.max_extra_masks == 256 and config.train.max_steps == 1200
    # LLaDA has 4096 positions.
    assert config.pairs.max_length + config.mask_agnostic.max_extra_masks <= 4096


def test_answers_are_scored_and_prompts_and_padding_are_not(pairs):
    data = Pairs(pairs, make_tokenizer())
    assert len(data) == 2  # the long one is left out
    row = data[0]
    assert row["input_ids"].tolist() == [3, 6, 3, 7, 4, 1, 0, 0]
    assert row["attention_mask"].tolist() == [True] * 6 + [False] * 2
    assert row["loss_mask"].nonzero().flatten().tolist() == [4, 5]


def test_broken_data_is_named(pairs, tmp_path):
    with open(pairs.path, "a", encoding="utf-8") as file:
        file.write('{"prompt": "one"}\n')
    with pytest.raises(ConfigError, match="line 4: expected prompt and answer"):
        Pairs(pairs, make_tokenizer())
    with pytest.raises(ConfigError, match="does not exist"):
        Pairs(PairsData(str(tmp_path / "none.jsonl")), make_tokenizer())
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "one", "answer": "one two"}))
    with pytest.raises(ConfigError, match="no pair is at most 2 tokens long"):
        Pairs(PairsData(str(tmp_path / "long.jsonl"), max_length=2), make_tokenizer())


def save_model(folder, words: list[str] = WORDS, block_size: int | None = 4) -> str:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MaskedDiffusionConfig(vocab_size=8, mask_token_id=2, block_size=block_size, eos_token_id=1, **shape)
    MaskedDiffusionLM(config).save_pretrained(folder)
    make_tokenizer(words).save_pretrained(folder)
    return str(folder)


def test_text_is_read_with_the_models_own_tokenizer_which_is_saved_beside_it(pairs, tmp_path):
    target = save_model(tmp_path / "target")
    settings = {
        "target": {"name": target},
        "reference": {"name": target},
        "pairs": {"path": pairs.path, "max_length": 10},
        "gradient_checkpointing": True,
        "train": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 2,
            "batch_size": 2,
            "optimizers": {"model": {"lr": 1e-3}},
        },
    }
    weights = train_residual_context(settings, []).weights_dir / "model"
    assert PreTrainedTokenizerFast.from_pretrained(weights).get_vocab() == make_tokenizer().get_vocab()
    settings["reference"] = {"name": save_model(tmp_path / "other", [*WORDS[:-2], "is", "plus"])}
    settings["train"]["output_dir"] = str(tmp_path / "refused")
    with pytest.raises(ConfigError, match="first difference 'plus' and 'is' at id 6"):
        train_residual_context(settings, [])


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["sudoku=null"], "either sudoku or topics or pairs"),
        (["model=null"], "either model"),
        (["model.hiden_size=3"], "did you mean 'hidden_size'"),
        (["model.vocab_size=9"], "vocab_size of the model is 9, of the sudoku 5"),
        (["generation.remasking=best"], "remasking='best'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides, message, tmp_path):
    options = [*TINY, *SHAPE, f"train.output_dir={tmp_path}", *overrides]
    options = [option for option in options if not (overrides == ["sudoku=null"] and option.startswith("sudoku."))]
    options = [option for option in options if not (overrides == ["model=null"] and option.startswith("model."))]
    with pytest.raises(ConfigError, match=message):
        train_masked_diffusion("dllm/tiny_base", options)


def test_a_missing_model_names_its_recipe(tmp_path):
    options = [f"target.name={tmp_path / 'none'}", f"train.output_dir={tmp_path / 'run'}"]
    with pytest.raises(ValueError, match="made by the recipe dllm_base"):
        train_residual_context("dllm/tiny_rcd", options)


SMALL = ["train.max_steps=2", "train.batch_size=4"]


@pytest.fixture(scope="module")
def topic_model(tmp_path_factory) -> str:
    """A model of topics after two steps."""
    folder = tmp_path_factory.mktemp("topics")
    result = train_masked_diffusion("dllm/tiny_topics", [*SMALL, *SHAPE, f"train.output_dir={folder}"])
    return str(result.weights_dir / "model")


@pytest.mark.parametrize("beta", [0.0, 100.0])
def test_mask_agnostic_training_follows_the_base_with_its_words(topic_model, tmp_path, beta):
    options = [*SMALL, f"init_from.name={topic_model}", f"train.output_dir={tmp_path}", f"mask_agnostic.beta={beta}"]
    weights = train_mask_agnostic("dllm/mask_agnostic_tiny", options).weights_dir / "model"
    before, after = (load_dllm(folder, "cpu") for folder in (topic_model, weights))
    assert after.config.vocab_size == 113 and not torch.equal(before.lm_head.weight, after.lm_head.weight)
    vocabularies = [PreTrainedTokenizerFast.from_pretrained(folder).get_vocab() for folder in (topic_model, weights)]
    assert vocabularies[0] == vocabularies[1] and vocabularies[0]["topic0"] == 5
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"ce", "tv", "nats", "distance"} <= set(rows[-1]["metrics"])


def test_adapters_of_text_are_saved_alone_beside_the_tokenizer(pairs, tmp_path):
    pytest.importorskip("peft")
    settings = {
        "init_from": {"name": save_model(tmp_path / "model", block_size=None)},
        "mask_agnostic": {"max_extra_masks": 8},
        "lora": {"rank": 2, "alpha": 4},
        "pairs": {"path": pairs.path, "max_length": 10},
        "gradient_checkpointing": True,
        "train": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 2,
            "batch_size": 2,
            "optimizers": {"model": {"lr": 1e-3}},
        },
    }
    weights = train_mask_agnostic(settings, []).weights_dir / "model"
    names = {path.name for path in weights.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "model.safetensors" not in names


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["mask_agnostic.max_extra_masks=217"], "positions leave room for 216"),
        (["mask_agnostic.beta=-1"], "beta=-1.0"),
        (["mask_agnostic.max_masks=3"], "max_extra_masks"),
        (["topics.topics=3"], "vocab_size of the model is 113, of the topics 32"),
        (["lora.rank=0"], "rank=0"),
        (["lora.rank=2", "generation.max_new_tokens=0"], "adapters are saved alone"),
    ],
)
def test_mask_agnostic_settings_that_do_not_fit_are_refused(topic_model, tmp_path, overrides, message):
    options = [*SMALL, f"init_from.name={topic_model}", f"train.output_dir={tmp_path / 'run'}", *overrides]
    with pytest.raises(ValueError, match=message):
        train_mask_agnostic("dllm/mask_agnostic_tiny", options)
