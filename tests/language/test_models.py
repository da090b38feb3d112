"""What would be wrong: random weights in place of missing ones, a checkpoint that is unpickled or runs its own code, a
folder of another kind that loads, a decoder's blocks that are others."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from vidgen.language import LanguageModelError, decoder_layers, load_language_model
from vidgen.runtime.attention import AttentionBackendError
from vidgen.runtime.errors import DeviceError


@pytest.fixture
def folder(tmp_path, tiny_lm_folder):
    """A copy of the tiny model's folder."""
    return shutil.copytree(tiny_lm_folder, tmp_path / "model")


def test_a_folder_loads_as_it_was_saved(folder, byte_tokenizer):
    lm = load_language_model(folder, device="cpu")
    assert (lm.device.type, lm.dtype, lm.vocab_size) == ("cpu", torch.float32, len(byte_tokenizer))
    assert not lm.model.training
    assert lm.tokenizer.padding_side == "left"
    stored = load_file(folder / "model.safetensors")
    loaded = lm.model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())


def test_dtype_and_attention_are_those_asked_for(folder):
    lm = load_language_model(folder, device="cpu", dtype="bf16", attention="_native_math")
    assert lm.dtype == torch.bfloat16
    assert lm.model.config._attn_implementation == "eager"


def test_a_model_without_padding_token_pads_with_its_end(folder):
    for file in ("tokenizer_config.json", "config.json", "generation_config.json"):
        content = json.loads((folder / file).read_text())
        content = {key: value for key, value in content.items() if not key.startswith("pad_token")}
        (folder / file).write_text(json.dumps(content))
    lm = load_language_model(folder, device="cpu")
    assert lm.tokenizer.pad_token == lm.tokenizer.eos_token
    assert lm.model.generation_config.pad_token_id == lm.tokenizer.eos_token_id


def drop_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pickle_weights(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def change_config(**values):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return change


def remove(*names):
    def change(folder):
        for name in names:
            (folder / name).unlink()

    return change


own_code = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.B"}}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_weight, "lacks 1 weights of LlamaForCausalLM, such as 'model.layers.1.mlp.up_proj.weight'"),
        (pickle_weights, "only pytorch_model.bin, and unpickling it could run code"),
        (remove("model.safetensors"), "no .safetensors file but no weights at all"),
        (remove("config.json"), "has no config.json"),
        (remove("tokenizer.json"), "has no tokenizer: none of tokenizer.json"),
        (change_config(architectures=["LlamaModel"]), "is a LlamaModel, not a causal language model; .* LlamaForCaus"),
        (change_config(model_type="vit", architectures=["ViTModel"]), "is a ViTModel, .* no causal language model of"),
        (change_config(**own_code), "can't load the language model"),
        (change_config(vocab_size=20), "can't load the language model|lacks|don't belong together"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 50), "can't load the language model"),
        (lambda folder: (folder / "config.json").write_text("{"), "can't load the language model"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(folder, damage, message):
    (folder / "evil.py").write_text("raise SystemExit('ran code of the checkpoint')")
    damage(folder)
    with pytest.raises(LanguageModelError, match=message):
        load_language_model(folder, device="cpu")


@pytest.mark.parametrize("name", ["/nope", "nope", "runs/a/b"])
def test_a_missing_folder_is_not_looked_for_on_the_hub(name):
    with pytest.raises(LanguageModelError, match=f"there is no folder {name}; give the folder of a causal language"):
        load_language_model(name)


def test_settings_that_can_not_be_had_are_refused(folder):
    with pytest.raises(AttentionBackendError, match="unknown attention backend 'fash'"):
        load_language_model(folder, attention="fash")
    with pytest.raises(DeviceError, match="unknown dtype"):
        load_language_model(folder, dtype="float17")


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {}),
        ("qwen3", {"head_dim": 16}),
        ("mistral", {}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
        ("gpt_neox", {}),
        ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 32}),
    ],
)
def test_the_blocks_of_a_decoder_are_found_in_order(tmp_path, save_language_model, kind, config):
    model = load_language_model(save_language_model(tmp_path, kind, **config), device="cpu").model
    layers = decoder_layers(model)
    assert len(layers) == 2
    called = []
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: called.append(index))
    model(torch.tensor([[5, 6]]))
    assert called == [0, 1]


def test_a_model_without_known_blocks_names_what_was_looked_for():
    from transformers import XLMConfig, XLMWithLMHeadModel

    model = XLMWithLMHeadModel(XLMConfig(vocab_size=16, emb_dim=8, n_layers=1, n_heads=2))
    with pytest.raises(LanguageModelError, match="none of the attributes layers, h, blocks, decoder.layers"):
        decoder_layers(model)
