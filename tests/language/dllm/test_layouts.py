"""What would be wrong: a published checkpoint that loads into another function than its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vidgen.language.dllm.layouts import load_dllm, read_config
from vidgen.runtime.errors import CheckpointError, ConfigError, VidgenError

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
ROPE = {"rope_type": "default", "rope_theta": 500000.0}
LLADA_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "q_proj", "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj", "self_attn.o_proj": "attn_out", "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out",
}  # fmt: skip
LLADA = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 32, "n_layers": 2, "n_heads": 4,
    "n_kv_heads": 2, "mlp_hidden_size": 48, "mlp_ratio": 4, "embedding_size": 64, "vocab_size": 60,
    "max_sequence_length": 64, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "mask_token_id": 60,
    "eos_token_id": 59, "weight_tying": False, "include_bias": False, "include_qkv_bias": False,
    "activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms", "layer_norm_with_affine": True,
    "attention_layer_norm": False, "bias_for_layer_norm": False, "rope": True, "rope_full_precision": True,
    "alibi": False, "input_emb_norm": False, "scale_logits": False, "multi_query_attention": None,
}  # fmt: skip
QWEN = {**SHAPE, "hidden_act": "silu", "rope_theta": 500000.0, "rope_scaling": None, "use_sliding_window": False}
DREAM = {
    **QWEN, "model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": 60, "use_mrope": False,
    "tie_word_embeddings": False,
}  # fmt: skip
SDAR = {
    **QWEN, "model_type": "sdar", "architectures": ["SDARForCausalLM"], "mask_token_id": 60, "block_size": 4,
    "head_dim": 8, "attention_bias": False, "tie_word_embeddings": True,
}  # fmt: skip


def llada_name(name: str) -> str:
    """The name that LLaDA gives a tensor of Llama."""
    rest = {"lm_head": "ff_out", "model.norm": "ln_f", "model.embed_tokens": "wte"}
    module = name.removesuffix(".weight")
    if module in rest:
        return f"model.transformer.{rest[module]}.weight"
    layer, inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module).groups()
    return f"model.transformer.blocks.{layer}.{LLADA_NAMES[inner]}.weight"


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    # Two shards, as published folders have them.
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    index = {name: shard for shard, owned in shards.items() for name in owned}
    for shard, owned in shards.items():
        save_file({name: tensors[name].clone() for name in owned}, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    # A causal generation config, of which only the special tokens are understood.
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "eos_token_id": 7})
    )
    return folder


def reference(kind: str):
    """transformers' causal model of the same weights; its causal mask is replaced in the tests."""
    torch.manual_seed(1)
    if kind == "llada":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=ROPE))
    elif kind == "dream":
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, rope_parameters=ROPE))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, rope_parameters=ROPE, tie_word_embeddings=True))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def written(kind: str, folder: Path) -> tuple[Path, torch.nn.Module]:
    model = reference(kind)
    tensors = {name: tensor for name, tensor in model.state_dict().items()}
    if kind == "llada":
        return write(folder, LLADA, {llada_name(name): tensor for name, tensor in tensors.items()}), model
    if kind == "sdar":
        tensors.pop("lm_head.weight")  # tied
    return write(folder, DREAM if kind == "dream" else SDAR, tensors), model


@pytest.mark.parametrize("kind", ["llada", "dream", "sdar"])
def test_published_weights_give_the_logits_of_their_architecture(kind, tmp_path):
    folder, expected_model = written(kind, tmp_path)
    model = load_dllm(folder, "cpu")
    ids = torch.randint(0, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    hidden = torch.zeros(11, 11)
    if kind == "sdar":
        block = torch.arange(11) // 4
        hidden = torch.zeros(11, 11).masked_fill(block[:, None] < block, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = expected_model(ids, attention_mask=hidden.expand(2, 1, 11, 11)).logits
        logits = model(ids).logits
    if kind == "dream":
        # Dream predicts token i at position i - 1.
        torch.testing.assert_close(logits[:, 1:], expected[:, :-1], rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert model.generation_config.eos_token_id == 7 and model.generation_config.temperature == 0
    assert model.config.logits_shift == (kind == "dream")
    assert model.config.block_size == (4 if kind == "sdar" else None)


@pytest.mark.parametrize("kind", ["llada", "sdar"])
def test_a_loaded_model_is_saved_in_one_layout_and_read_back(kind, tmp_path):
    model = load_dllm(written(kind, tmp_path / "theirs")[0], "cpu")
    model.save_pretrained(tmp_path / "ours")
    assert "model.embed_tokens.weight" in load_file(tmp_path / "ours" / "model.safetensors")
    ids = torch.arange(10)[None]
    for again in (load_dllm(tmp_path / "ours", "cpu"), AutoModel.from_pretrained(tmp_path / "ours")):
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert again.config.mask_token_id == 60


@pytest.mark.parametrize(
    "config, changes, message",
    [
        (LLADA, {"rope": False}, "rope=False is not supported"),
        (LLADA, {"block_type": "sequential"}, "block_type='sequential'"),
        (LLADA, {"attention_layer_norm": True}, "attention_layer_norm=True"),
        (LLADA, {"mask_token_id": None}, "LLaDA 126336"),
        (DREAM, {"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        (DREAM, {"architectures": ["DreamForCausalLM"]}, "logits_shift"),
        (SDAR, {"block_size": None}, "no block_size"),
        (SDAR, {"model_type": "sdar_moe"}, "did you mean 'sdar'"),
        (SDAR, {"model_type": "llama"}, "'llama' is no diffusion language model"),
        (SDAR, {"num_key_value_heads": 3}, "no multiple"),
        (SDAR, {"mask_token_id": 64}, "not in the vocabulary of 64"),
        (SDAR, {"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_what_the_model_cannot_do_is_refused(config, changes, message):
    with pytest.raises(VidgenError, match=re.escape(message)):
        read_config({**config, **changes})


def test_missing_facts_can_be_given_but_not_contradicted():
    config = read_config({**SDAR, "block_size": None, "mask_token_id": None}, mask_token_id=60, block_size=16)
    assert (config.mask_token_id, config.block_size) == (60, 16)
    assert read_config({**DREAM, "architectures": ["DreamForCausalLM"], "logits_shift": 0}).logits_shift == 0
    with pytest.raises(ConfigError, match="mask_token_id=3, but the config says 60"):
        read_config(SDAR, mask_token_id=3)


def test_weights_that_do_not_fit_are_named(tmp_path):
    model = reference("dream")
    tensors = dict(model.state_dict())
    lost = tensors.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"1 missing, such as model\.norm\.weight"):
        load_dllm(write(tmp_path / "a", DREAM, tensors), "cpu")
    tensors |= {"model.norm.weight": lost[:16], "extra.weight": lost}
    with pytest.raises(CheckpointError, match=r"left over, such as extra.*another shape"):
        load_dllm(write(tmp_path / "b", DREAM, tensors), "cpu")


def test_only_safetensors_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DREAM))
    torch.save(reference("dream").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        load_dllm(tmp_path, "cpu")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_dllm(tmp_path / "nowhere", "cpu")
