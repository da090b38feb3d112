"""Loads published diffusion language models into `MaskedDiffusionLM`, without remote code.

`config.json` says which layout a folder has. Dream's and SDAR's weights carry Qwen's names, which are this package's
own; LLaDA's are renamed. What a config asks for and the model can't do is refused, never left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from vidgen.language.dllm.modeling import MaskedDiffusionConfig, MaskedDiffusionLM
from vidgen.runtime.device import select_device, select_dtype
from vidgen.runtime.errors import CheckpointError, ConfigError, suggestion

# Where a config or tokenizer doesn't name the mask.
KNOWN_MASKS = {"LLaDA": 126336, "Dream v0": 151666, "SDAR": 151669}

# Regular expressions; the names inside a block are LLaDA's for Llama's modules.
LLADA_KEYS = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    **{
        rf"^model\.transformer\.blocks\.(\d+)\.{theirs}\.": rf"model.layers.\1.{ours}."
        for theirs, ours in {
            "attn_norm": "input_layernorm",
            "q_proj": "self_attn.q_proj",
            "k_proj": "self_attn.k_proj",
            "v_proj": "self_attn.v_proj",
            "attn_out": "self_attn.o_proj",
            "ff_norm": "post_attention_layernorm",
            "ff_proj": "mlp.gate_proj",
            "up_proj": "mlp.up_proj",
            "ff_out": "mlp.down_proj",
        }.items()
    },
}


def load_dllm(
    name_or_path: str | os.PathLike,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    attention: str = "auto",
    mask_token_id: int | None = None,
    block_size: int | None = None,
) -> MaskedDiffusionLM:
    """Loads a diffusion language model in LLaDA's, Dream's, SDAR's or this package's layout.

    Args:
        name_or_path: a folder or hub id with `config.json` and safetensors weights.
        device: see `vidgen.runtime.device.select_device`.
        dtype: see `vidgen.runtime.device.select_dtype`.
        attention: kernel, see `vidgen.runtime.attention`.
        mask_token_id: the mask's token id, where the config doesn't have it.
        block_size: tokens per block that a block model was trained with, where the config doesn't have it.

    Raises:
        CheckpointError: there is no config or no safetensors file, or weights are missing, left over or misshapen.
        ConfigError: another kind of model, or one with a feature that isn't supported.
    """
    device = select_device(device)
    dtype = select_dtype(dtype, device)
    try:
        values, _ = PreTrainedConfig.get_config_dict(name_or_path, trust_remote_code=False)
    except OSError as error:
        raise CheckpointError(f"{name_or_path}: no config.json there ({str(error).splitlines()[0]})") from error
    config = read_config(values, mask_token_id, block_size)
    renamed = LLADA_KEYS if values["model_type"] == "llada" else None
    try:
        model, report = MaskedDiffusionLM.from_pretrained(
            name_or_path,
            config=config,
            dtype=dtype,
            key_mapping=renamed,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, all at once
        )
    except OSError as error:
        raise CheckpointError(f"{name_or_path}: no safetensors weights ({str(error).splitlines()[0]})") from error
    problems = [
        f"{len(names)} {what}, such as {next(iter(sorted(map(str, names))))}"
        for what, names in (
            ("missing", report["missing_keys"]),
            ("left over", report["unexpected_keys"]),
            ("of another shape", report["mismatched_keys"]),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"{name_or_path}: weights don't fit the config: {'; '.join(problems)}")
    # A model saved from here has this package's names, whatever it was read from.
    model._weight_conversions = None
    model = model.to(device).eval()
    if attention != "auto":
        model.set_attention_backend(attention)
    return model


def read_config(
    values: Mapping[str, Any], mask_token_id: int | None = None, block_size: int | None = None
) -> MaskedDiffusionConfig:
    """Translates the content of a `config.json`; arguments as of `load_dllm`.

    Raises:
        ConfigError: see `load_dllm`.
    """
    kind, readers = values.get("model_type"), _readers()
    if kind not in readers:
        raise ConfigError(
            f"model_type={kind!r} is no diffusion language model that can be loaded: {suggestion(str(kind), readers)}"
        )
    fields = readers[kind](values)
    fields.setdefault("mask_token_id", values.get("mask_token_id"))
    for name, given in (("mask_token_id", mask_token_id), ("block_size", block_size)):
        if given is not None:
            if fields.get(name) not in (None, given):
                raise ConfigError(f"{name}={given}, but the config says {fields[name]}")
            fields[name] = given
    if fields["mask_token_id"] is None:
        known = ", ".join(f"{name} {token}" for name, token in KNOWN_MASKS.items())
        raise ConfigError(f"the config has no mask_token_id; give it (known: {known})")
    if kind == "sdar" and fields.get("block_size") is None:
        raise ConfigError("the config has no block_size; give the one of training (SDAR-Chat 4; -b32 32, -b64 64)")
    return MaskedDiffusionConfig(**fields)


def is_dllm(name_or_path: str | os.PathLike) -> bool:
    """Whether `load_dllm` reads a folder or hub id; False where there is no config."""
    try:
        values, _ = PreTrainedConfig.get_config_dict(name_or_path, trust_remote_code=False)
    except OSError:
        return False
    return values.get("model_type") in _readers()


def _readers() -> dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """By `model_type`, what translates a config."""
    return {"llada": _read_llada, "Dream": _read_dream, "sdar": _read_sdar, "masked_diffusion": dict}


def _refuse(values: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses a config with a key whose value is none of those allowed; an absent key is as None."""
    for name, choices in allowed.items():
        if values.get(name) not in (None, *choices):
            raise ConfigError(
                f"{values['model_type']} with {name}={values[name]!r} is not supported; "
                f"allowed: {', '.join(map(repr, choices)) or 'none'}"
            )


def _special_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: values[name] for name in names if values.get(name) is not None}


def _read_llada(values: Mapping[str, Any]) -> dict[str, Any]:
    no = (False,)
    _refuse(
        values,
        {
            "block_type": ("llama",),
            "activation_type": ("silu",),
            "layer_norm_type": ("rms",),
            "layer_norm_with_affine": (True,),
            "rope": (True,),
            "alibi": no,
            "attention_layer_norm": no,
            "include_bias": no,
            "bias_for_layer_norm": no,
            "input_emb_norm": no,
            "scale_logits": no,
            "multi_query_attention": no,
            "clip_qkv": (),
        },
    )
    width, heads = values["d_model"], values["n_heads"]
    return {
        "vocab_size": values.get("embedding_size") or values["vocab_size"],
        "hidden_size": width,
        "intermediate_size": values.get("mlp_hidden_size") or values["mlp_ratio"] * width,
        "num_hidden_layers": values["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("n_kv_heads") or heads,
        "max_position_embeddings": values["max_sequence_length"],
        "rope_theta": values.get("rope_theta", 10000.0),
        "rms_norm_eps": values.get("rms_norm_eps", 1e-5),
        "attention_bias": bool(values.get("include_qkv_bias")),
        "tie_word_embeddings": bool(values.get("weight_tying")),
        **_special_tokens(values),
    }


def _read_qwen(values: Mapping[str, Any]) -> dict[str, Any]:
    """What Dream and SDAR have in common."""
    _refuse(
        values,
        {
            "hidden_act": ("silu",),
            "rope_scaling": (),
            "use_mrope": (False,),
            "use_sliding_window": (False,),
        },
    )
    # Folders that transformers 5 saved keep the base of the rotation here.
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"rope_type={rope['rope_type']!r} is not supported; allowed: 'default'")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")  # fmt: skip
    return {
        **{name: values[name] for name in names},
        "head_dim": values.get("head_dim"),
        "rope_theta": rope.get("rope_theta", values.get("rope_theta", 10000.0)),
        "tie_word_embeddings": bool(values.get("tie_word_embeddings")),
        **_special_tokens(values),
    }


def _read_dream(values: Mapping[str, Any]) -> dict[str, Any]:
    shift = values.get("logits_shift")
    if shift is None:
        # Dream v0 was made from an autoregressive model and predicts the next position; later relatives don't.
        if list(values.get("architectures") or ()) != ["DreamModel"]:
            raise ConfigError(
                f"Dream with architectures={values.get('architectures')}: whether its logits are shifted isn't known; "
                "put logits_shift (0 or 1) into its config.json"
            )
        shift = 1
    # Dream v0's code has these biases whatever its config says; its config doesn't mention them.
    bias = values.get("attention_bias", True)
    return {**_read_qwen(values), "attention_bias": bias, "logits_shift": shift}


def _read_sdar(values: Mapping[str, Any]) -> dict[str, Any]:
    fields = _read_qwen(values)
    return {
        **fields,
        "qk_norm": True,
        "attention_bias": bool(values.get("attention_bias")),
        "block_size": values.get("block_size"),
    }
