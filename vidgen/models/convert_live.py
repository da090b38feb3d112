"""Checkpoints of LIVE and the models it starts from as [`~vidgen.models.world_dit.WorldDiT`] folders, and their VAE.

The release of "LIVE: Long-horizon Interactive Video World Modeling" (arXiv 2602.03747) holds Lightning checkpoints of
RealEstate10K models and the KL-16 autoencoder of MAR ("Autoregressive Image Generation without Vector Quantization",
arXiv 2406.11838). Besides the weights these files hold optimizer state and pickled configurations. The weights are
memory-mapped, so that the rest is never read, and objects other than tensors and plain containers become inert
placeholders: no code of theirs runs.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from vidgen.models.convert_wan import (
    ConversionReport,
    StateDict,
    file_digests,
    require_exact,
    require_free_folder,
    shown_names,
)
from vidgen.models.world_dit import WorldDiT
from vidgen.runtime.checkpoint import CheckpointError, atomic_directory, load_safetensors
from vidgen.runtime.errors import suggestion

LIVE_CONFIGS: dict[str, dict[str, Any]] = {
    "live-re10k": {"control_type": "map", "control_frame": "window", "window": 32}
}

# Objectives of the released files, by the first and last digits of their published SHA-256.
PUBLISHED = {
    ("aa33f088", "ba16"): "live",
    ("f048e607", "51fc"): "diffusion_forcing",
    ("df89f9c4", "1e57"): "teacher_forcing",
}
FORCINGS = ("live", "diffusion_forcing", "teacher_forcing")

# Released name -> name here, outside the blocks ...
MODEL_NAMES = {
    "x_embedder.proj": "patch_embedding",
    "t_embedder.mlp.0": "time_embedder.linear_1",
    "t_embedder.mlp.2": "time_embedder.linear_2",
    "c_embedder.proj": "control_embedding",
    "c_embedder.mlp.0": "control_embedding.linear_1",
    "c_embedder.mlp.2": "control_embedding.linear_2",
    "final_layer.adaLN_modulation.1": "modulation_out",
    "final_layer.linear": "proj_out",
}
# ... and inside a block. The two halves of the first SwiGLU layer are one matrix here.
BLOCK_NAMES = {
    "attention.wqkv": "attn.to_qkv",
    "attention.wo": "attn.to_out",
    "attention_norm": "norm1",
    "ffn_norm": "norm2",
    "feed_forward.w2": "ffn.net.2",
    "adaLN_modulation.1": "modulation",
}
SWIGLU_VALUE, SWIGLU_GATE = "feed_forward.w3.weight", "feed_forward.w1.weight"
# Rebuilt masks, the frozen VAE and the networks of the metrics.
DROPPED = re.compile(r"(.*\.)?attn_mask_.*|tokenizer\..*|(val|train)_metrics\..*|perceptual_loss\..*")
VAE_DROPPED = re.compile(r"(loss|perceptual_loss|metrics\w*|model_ema|regularization)\..*")

VAE_SCALING_FACTOR = 0.2325


class _Placeholder:
    """Stands for any object of a file that isn't needed: it takes what it is given and does nothing."""

    def __new__(cls, *arguments: Any, **options: Any) -> _Placeholder:
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _plain_dict(*arguments: Any) -> dict:
    """Stands for `collections.defaultdict`: pickle fills it item by item, which only a dictionary allows."""
    return {}


def load_lightning_checkpoint(path: str | os.PathLike) -> StateDict:
    """Tensors of a Lightning checkpoint, of a file with `"model"` weights, or of a plain state dict, memory-mapped.

    Raises:
        CheckpointError: when the file is damaged or holds no state dict.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        return load_safetensors(path)[0]
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        placeholders = [
            (_plain_dict if name == "collections.defaultdict" else _Placeholder, name)
            for name in get_unsafe_globals_in_checkpoint(path)
        ]
        with safe_globals(placeholders):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        # torch puts advice to load without this protection in front of what it found.
        found = str(error).rpartition("WeightsUnpickler error: ")[2].rpartition("from a trusted source.")[2]
        reason = next((line.strip() for line in found.splitlines() if line.strip()), type(error).__name__)
        raise CheckpointError(f"{path} is damaged or no checkpoint of torch.save ({reason})") from error
    if isinstance(content, Mapping):
        for nest in ("state_dict", "model"):
            if isinstance(content.get(nest), Mapping):
                content = content[nest]
        if content and all(isinstance(value, torch.Tensor) for value in content.values()):
            return dict(content)
    raise CheckpointError(f"{path} holds no dictionary of tensors, neither itself nor under 'state_dict' or 'model'.")


def released_to_world_dit(state: Mapping[str, torch.Tensor]) -> StateDict:
    """Rename the tensors of a released transformer, given without prefixes.

    Raises:
        CheckpointError: for names it doesn't have, or a SwiGLU layer of which one half is missing.
    """
    renamed, unknown = {}, []
    for name, tensor in state.items():
        block = re.match(r"blocks\.\d+\.", name)
        prefix = block.group() if block else ""
        rest = name[len(prefix) :]
        module, _, kind = rest.rpartition(".")
        names = BLOCK_NAMES if block else MODEL_NAMES
        if module in names:
            renamed[f"{prefix}{names[module]}.{kind}"] = tensor
        elif block and rest == SWIGLU_VALUE and prefix + SWIGLU_GATE in state:
            renamed[f"{prefix}ffn.net.0.proj.weight"] = torch.cat([tensor, state[prefix + SWIGLU_GATE]])
        elif not (block and rest == SWIGLU_GATE and prefix + SWIGLU_VALUE in state):
            unknown.append(name)
    if unknown:
        raise CheckpointError(f"{len(unknown)} names are not of a LIVE transformer: {shown_names(unknown)}")
    return renamed


def _model_weights(state: Mapping[str, torch.Tensor], path: Any) -> StateDict:
    """Weights of the transformer, without what `torch.compile` and Lightning put before their names."""
    weights, foreign = {}, []
    for name, tensor in state.items():
        if DROPPED.fullmatch(name):
            continue
        if name.startswith("model."):
            weights[name.removeprefix("model.").removeprefix("_orig_mod.")] = tensor
        else:
            foreign.append(name)
    if foreign or not weights:
        raise CheckpointError(
            f"{path} is no checkpoint of LIVE: {shown_names(foreign)} {'is' if len(foreign) == 1 else 'are'} unknown."
            if foreign
            else f"{path} holds no weights under 'model.'."
        )
    return weights


def _write(
    model: torch.nn.Module, state: StateDict, source: Any, output_dir: Path, dtype: torch.dtype | None
) -> ConversionReport:
    require_exact(state, model.state_dict(), source)
    state = {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in state.items()}
    model.load_state_dict(state, strict=True, assign=True)
    with atomic_directory(output_dir) as folder:
        model.save_pretrained(folder)
        files = file_digests(folder)
    parameters = list(model.parameters())
    return ConversionReport(
        source=str(source),
        output_dir=str(output_dir),
        weights="state_dict",
        num_tensors=len(parameters),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        dtypes=tuple(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})),
        lora=None,
        files=files,
    )


def convert_live(
    source: str | os.PathLike,
    output_dir: str | os.PathLike,
    base_config: Mapping[str, Any] | str = "live-re10k",
    forcing: str | None = None,
    dtype: torch.dtype | None = None,
) -> ConversionReport:
    """Write a LIVE, DF or TF checkpoint of the release as a folder that `WorldDiT.from_pretrained` loads.

    Args:
        source: Lightning checkpoint.
        output_dir: the folder to make; it must not exist, or be empty.
        base_config: arguments of `WorldDiT` the file must fit, or a name in `LIVE_CONFIGS`.
        forcing: objective the model was trained with, which decides how it may be sampled and trained on; `None`
            recognizes the released files by their SHA-256.
        dtype: converts the weights; `None` keeps every tensor's dtype.

    Raises:
        CheckpointError: when the output exists, the file is damaged, doesn't fit exactly, or is unknown and `forcing`
            isn't given.
    """
    output_dir = require_free_folder(output_dir)
    if not isinstance(base_config, Mapping):
        if base_config not in LIVE_CONFIGS:
            raise CheckpointError(f"base_config={base_config!r}; {suggestion(str(base_config), LIVE_CONFIGS)}")
        base_config = LIVE_CONFIGS[base_config]
    if forcing is not None and forcing not in FORCINGS:
        raise CheckpointError(f"forcing={forcing!r}; {suggestion(forcing, FORCINGS)}")
    weights = _model_weights(load_lightning_checkpoint(source), source)
    if forcing is None:
        digest = file_digests(Path(source))[Path(source).name]["sha256"]
        forcing = PUBLISHED.get((digest[:8], digest[-4:]))
        if forcing is None:
            raise CheckpointError(
                f"{source} (sha256 {digest}) is none of the released files; say what it was trained with: "
                f"forcing={', '.join(FORCINGS)}."
            )
    with init_empty_weights(include_buffers=False):
        model = WorldDiT(**{**base_config, "forcing": forcing})
    return _write(model, released_to_world_dit(weights), source, output_dir, dtype)


# --- VAE -------------------------------------------------------------------------------------------------------

_RESNET_NAMES = {"nin_shortcut": "conv_shortcut"}
_ATTENTION_NAMES = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}


def _vae_name(name: str, levels: int) -> str | None:
    """The name `AutoencoderKL` has for a tensor of the latent-diffusion layout, `None` if it has none."""
    match = re.fullmatch(
        r"(encoder|decoder)\.(?:(?P<at>down|up|mid)\.)?(?:(?P<level>\d+)\.)?"
        r"(?P<part>block|attn|block_1|block_2|attn_1|downsample|upsample|norm_out|conv_in|conv_out)"
        r"(?:\.(?P<index>\d+))?(?:\.(?P<inner>\w+))?\.(?P<kind>weight|bias)",
        name,
    )
    if match is None:
        return name if re.fullmatch(r"(post_)?quant_conv\.(weight|bias)", name) else None
    side, at, part, inner = match[1], match["at"], match["part"], match["inner"]
    if at is None:
        where = {"norm_out": "conv_norm_out"}.get(part, part)
    elif at == "mid":
        index = {"block_1": "resnets.0", "block_2": "resnets.1", "attn_1": "attentions.0"}[part]
        names = _ATTENTION_NAMES if part == "attn_1" else _RESNET_NAMES
        where = f"mid_block.{index}.{names.get(inner, inner)}"
    else:
        level = int(match["level"])
        # The original counts the levels of its decoder from the fine end.
        block = f"down_blocks.{level}" if at == "down" else f"up_blocks.{levels - 1 - level}"
        if part in ("downsample", "upsample"):
            where = f"{block}.{part}rs.0.{inner}"
        else:
            kind, names = ("resnets", _RESNET_NAMES) if part == "block" else ("attentions", _ATTENTION_NAMES)
            where = f"{block}.{kind}.{match['index']}.{names.get(inner, inner)}"
    return f"{side}.{where}.{match['kind']}"


def _vae_config(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Arguments of `AutoencoderKL`, read from the tensors of a latent-diffusion autoencoder."""
    levels = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder.down."))
    per_level = 1 + max(int(name.split(".")[4]) for name in state if name.startswith("encoder.down.0.block."))

    def has_attention(side: str, level: int) -> bool:
        return f"{side}.{level}.attn.0.q.weight" in state

    return {
        "in_channels": state["encoder.conv_in.weight"].shape[1],
        "out_channels": state["decoder.conv_out.weight"].shape[0],
        "latent_channels": state["decoder.conv_in.weight"].shape[1],
        "block_out_channels": tuple(state[f"encoder.down.{i}.block.0.conv2.weight"].shape[0] for i in range(levels)),
        "layers_per_block": per_level,
        "down_block_types": tuple(
            "AttnDownEncoderBlock2D" if has_attention("encoder.down", i) else "DownEncoderBlock2D"
            for i in range(levels)
        ),
        "up_block_types": tuple(
            "AttnUpDecoderBlock2D" if has_attention("decoder.up", i) else "UpDecoderBlock2D"
            for i in reversed(range(levels))
        ),
        "sample_size": 256,
        "scaling_factor": VAE_SCALING_FACTOR,
    }


def convert_kl16(
    source: str | os.PathLike, output_dir: str | os.PathLike, dtype: torch.dtype | None = None
) -> ConversionReport:
    """Write the KL-16 autoencoder of LIVE as a folder that `diffusers.AutoencoderKL.from_pretrained` loads.

    Args:
        source: checkpoint in the layout of latent diffusion (arXiv 2112.10752); its sizes are read from its tensors.
        output_dir: the folder to make; it must not exist, or be empty.
        dtype: converts the weights; `None` keeps every tensor's dtype.

    Raises:
        CheckpointError: when the output exists, or the file is damaged or doesn't fit exactly.
    """
    output_dir = require_free_folder(output_dir)
    state = {name: x for name, x in load_lightning_checkpoint(source).items() if not VAE_DROPPED.fullmatch(name)}
    needed = ("encoder.conv_in.weight", "decoder.conv_in.weight", "decoder.conv_out.weight", "quant_conv.weight")
    if any(name not in state for name in needed) or "encoder.down.0.block.0.conv2.weight" not in state:
        raise CheckpointError(f"{source} is no autoencoder of latent diffusion: it holds {shown_names(state)}.")
    config = _vae_config(state)
    names = {name: _vae_name(name, len(config["block_out_channels"])) for name in state}
    unknown = [name for name, new in names.items() if new is None]
    if unknown:
        raise CheckpointError(f"{source}: {len(unknown)} names are not of an autoencoder: {shown_names(unknown)}")
    with init_empty_weights(include_buffers=False):
        model = AutoencoderKL(**config)
    expected = {name: parameter.ndim for name, parameter in model.named_parameters()}
    # The original writes the linear layers of its attention as 1x1 convolutions.
    renamed = {new: state[name].flatten(1) if expected.get(new) == 2 else state[name] for name, new in names.items()}
    return _write(model, renamed, source, output_dir, dtype)
