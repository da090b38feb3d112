"""Checkpoints of causal Wan students (Self-Forcing, CausVid, LongLive) as diffusers folders, and back.

These projects train the original Wan modules ("Wan: Open and Advanced Large-Scale Video Generative Models",
arXiv 2503.20314), whose parameters are the ones of diffusers under other names, and save them with `torch.save`
nested under `generator` or `generator_ema`, with the name parts that wrappers add. Renaming is all that a conversion
does: no tensor changes its shape, and none changes its values unless a LoRA is merged or another dtype is asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights

from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.runtime.checkpoint import CheckpointError, atomic_directory, load_safetensors, save_safetensors
from vidgen.runtime.errors import suggestion

StateDict = dict[str, torch.Tensor]

WAN_CONFIGS: dict[str, dict[str, Any]] = {
    "wan-1.3b": {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 12,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 8960,
        "num_layers": 30,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "rope_max_seq_len": 1024,
    },
}

# Original name -> diffusers name of the modules and bare parameters outside the blocks ...
MODEL_NAMES = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
# ... and inside a block. The original calls the norm of cross-attention norm3; the other two norms have no weights.
BLOCK_NAMES = {
    **{
        f"{original}.{inner}": f"{diffusers}.{diffusers_inner}"
        for original, diffusers in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for inner, diffusers_inner in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    },
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "modulation": "scale_shift_table",
}

# Under which names a checkpoint nests the student, best first.
WEIGHTS = ("generator_ema", "generator", "model")
LORA_WEIGHTS = ("generator_lora",)
# Name parts that FSDP, torch.compile, activation checkpointing and DDP insert.
WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module"}
LORA_FILE = "pytorch_lora_weights.safetensors"
SHOWN_NAMES = 5


# --- names -----------------------------------------------------------------------------------------------------


def _rename(names: Iterable[str], model_names: dict[str, str], block_names: dict[str, str]) -> dict[str, str]:
    """New name of every parameter (or LoRA factor of a parameter), unknown ones reported together."""
    renamed, unknown = {}, []
    for name in names:
        block = re.match(r"blocks\.\d+\.", name)
        prefix = block.group() if block else ""
        rest = name[len(prefix) :]
        for old, new in (block_names if block else model_names).items():
            if rest == old or rest.startswith(f"{old}."):
                renamed[name] = prefix + new + rest[len(old) :]
                break
        else:
            unknown.append(name)
    if unknown:
        raise CheckpointError(f"{len(unknown)} names are not of a text-to-video Wan: {shown_names(unknown)}")
    return renamed


def original_to_diffusers(state: Mapping[str, torch.Tensor]) -> StateDict:
    """Rename the parameters of an original Wan transformer to their diffusers names.

    Args:
        state: Parameters, or LoRA factors such as `blocks.0.self_attn.q.lora_A.weight`, without prefixes.

    Raises:
        CheckpointError: For names the original text-to-video transformer doesn't have.
    """
    return {new: state[old] for old, new in _rename(state, MODEL_NAMES, BLOCK_NAMES).items()}


def diffusers_to_original(state: Mapping[str, torch.Tensor]) -> StateDict:
    """The exact inverse of [`original_to_diffusers`].

    Raises:
        CheckpointError: For names the diffusers text-to-video transformer doesn't have.
    """
    model_names = {new: old for old, new in MODEL_NAMES.items()}
    block_names = {new: old for old, new in BLOCK_NAMES.items()}
    return {new: state[old] for old, new in _rename(state, model_names, block_names).items()}


def shown_names(names: Iterable[str]) -> str:
    """The first few of many names, for an error message."""
    names = list(names)
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def _strip(state: Mapping[str, torch.Tensor], prefixes: tuple[str, ...]) -> StateDict:
    """Remove the name parts of wrappers anywhere, then each prefix that all names share."""
    stripped: StateDict = {}
    for name, tensor in state.items():
        clean = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        if clean in stripped:
            raise CheckpointError(f"Two tensors of the file are called {clean!r} once wrapper names are removed.")
        stripped[clean] = tensor
    for prefix in prefixes:
        if stripped and all(name.startswith(prefix) for name in stripped):
            stripped = {name[len(prefix) :]: tensor for name, tensor in stripped.items()}
    return stripped


# --- files -----------------------------------------------------------------------------------------------------


def _load(path: str | os.PathLike) -> dict[str, Any]:
    """Content of a `.pt` or `.safetensors` file, memory-mapped; pickled objects other than tensors are refused."""
    path = Path(path)
    if path.suffix == ".safetensors":
        return load_safetensors(path)[0]
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        # The format before torch 1.6 isn't a zip archive and can't be mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path} can't be read as tensors only: it is damaged or holds other objects, which could run code "
            f"({reason}). Save its state dict again with torch.save, or as safetensors."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; a dictionary of tensors is needed.")
    return content


def _choose(content: Mapping[str, Any], weights: str | None, nests: tuple[str, ...], path: Any) -> tuple[str, dict]:
    """The state dict to take from a file, and the name it had there (`"state_dict"` when it wasn't nested)."""
    present = [name for name in nests if isinstance(content.get(name), Mapping)]
    if weights is not None and weights not in present:
        has = f"it holds {', '.join(map(repr, present))}" if present else f"it holds {shown_names(map(str, content))}"
        raise CheckpointError(f"{path} has no weights {weights!r}; {has}. Leave weights unset to take what is there.")
    chosen = weights or (present[0] if present else "state_dict")
    state = content if chosen == "state_dict" else content[chosen]
    others = [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others or not state:
        raise CheckpointError(
            f"{path} holds no tensors under {', '.join(map(repr, nests))} and is no state dict itself: "
            f"it has {shown_names(others) or 'nothing'}."
        )
    return chosen, dict(state)


# --- configuration ---------------------------------------------------------------------------------------------


def _resolve_config(base_config: Mapping[str, Any] | str | os.PathLike) -> dict[str, Any]:
    """Constructor arguments from a dictionary, a name in `WAN_CONFIGS`, or a folder with `config.json`."""
    if isinstance(base_config, Mapping):
        config = dict(base_config)
    elif str(base_config) in WAN_CONFIGS:
        config = dict(WAN_CONFIGS[str(base_config)])
    else:
        folder = Path(base_config)
        files = [file for file in (folder / "config.json", folder / "transformer" / "config.json") if file.is_file()]
        if not files:
            hint = suggestion(str(base_config), WAN_CONFIGS)
            raise CheckpointError(
                f"base_config={str(base_config)!r} is no folder with a config.json; or a name: {hint}"
            )
        config = json.loads(files[0].read_text(encoding="utf-8"))
    config = {name: value for name, value in config.items() if not name.startswith("_")}
    allowed = CausalWanTransformer3DModel._get_init_keys(CausalWanTransformer3DModel)
    for name in config:
        if name not in allowed:
            raise CheckpointError(f"Unknown field {name!r} of base_config: {suggestion(name, allowed - {'self'})}")
    return config


def _check_sizes(state: StateDict, model: CausalWanTransformer3DModel, path: Any) -> None:
    """Compare original tensors with a model: first the sizes a configuration names, then every name and shape."""
    config = model.config

    def size(name: str, axis: int) -> int | None:
        return state[name].shape[axis] if name in state and state[name].ndim > axis else None

    blocks = [int(name.split(".")[1]) for name in state if re.match(r"blocks\.\d+\.", name)]
    found = {
        "in_channels": size("patch_embedding.weight", 1),
        "num_attention_heads * attention_head_dim": size("patch_embedding.weight", 0),
        "num_layers": max(blocks, default=-1) + 1,
        "ffn_dim": size("blocks.0.ffn.0.weight", 0),
        "text_dim": size("text_embedding.0.weight", 1),
        "freq_dim": size("time_embedding.0.weight", 1),
        "out_channels * patch": size("head.head.weight", 0),
        "cross_attn_norm": "blocks.0.norm3.weight" in state,
    }
    expected = {
        **{name: config[name] for name in found if name in config},
        "num_attention_heads * attention_head_dim": config.num_attention_heads * config.attention_head_dim,
        "out_channels * patch": config.out_channels * math.prod(config.patch_size),
    }
    differing = [
        f"{name} is {value} in the file and {expected[name]} in base_config"
        for name, value in found.items()
        if value is not None and value != expected[name]
    ]
    expected_state = diffusers_to_original(model.state_dict())
    # A file of something else entirely has no blocks; its names then say more than its sizes.
    if differing and blocks:
        raise CheckpointError(f"{path} doesn't fit base_config: {'; '.join(differing)}.")
    require_exact(state, expected_state, path)


def require_exact(state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], path: Any) -> None:
    """Whether a file holds the tensors of a model, no more and no less, in its shapes.

    Raises:
        CheckpointError: otherwise; it names the first ones.
    """
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    if missing or unexpected:
        parts = [f"{len(missing)} missing: {shown_names(missing)}"] if missing else []
        parts += [f"{len(unexpected)} unexpected: {shown_names(unexpected)}"] if unexpected else []
        raise CheckpointError(f"{path} doesn't hold exactly the tensors of this model. {'; '.join(parts)}.")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the model needs {tuple(expected[name].shape)}."
            )


# --- LoRA ------------------------------------------------------------------------------------------------------


def _load_lora(path: str | os.PathLike, scale: float) -> StateDict:
    """LoRA factors under diffusers names, `blocks.0.attn1.to_q.lora_A.weight`, with all scales folded into `lora_B`.

    Known layouts: peft's (`base_model.model.` before and `.default.` after the factor's name, or without them),
    nested under `generator_lora` or not, and `lora_down` / `lora_up` with `alpha`.
    """
    _, state = _choose(_load(path), None, LORA_WEIGHTS, path)
    state = _strip(state, ("base_model.model.", "diffusion_model.", "model."))
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    unknown = []
    for name, tensor in state.items():
        match = re.fullmatch(r"(.+)\.(?:(lora_A|lora_down|lora_B|lora_up)(?:\.default)?\.weight|(alpha))", name)
        if match is None:
            unknown.append(name)
            continue
        factor = {"lora_A": "A", "lora_down": "A", "lora_B": "B", "lora_up": "B", None: "alpha"}[match[2]]
        pairs.setdefault(match[1], {})[factor] = tensor
    incomplete = [module for module, pair in pairs.items() if not {"A", "B"} <= set(pair)]
    if unknown or incomplete:
        raise CheckpointError(
            f"{path} is not a plain LoRA: {shown_names(unknown or incomplete)} "
            f"{'can not be used' if unknown else 'has only one of its two factors'}."
        )
    factors = {}
    for module, pair in pairs.items():
        rank = pair["A"].shape[0]
        total = scale * (pair["alpha"].item() / rank if "alpha" in pair else 1.0)
        factors[f"{module}.lora_A.weight"] = pair["A"]
        factors[f"{module}.lora_B.weight"] = pair["B"] if total == 1.0 else (pair["B"].float() * total).to(pair["B"])
    return original_to_diffusers(factors)


def _check_lora(lora: StateDict, model: CausalWanTransformer3DModel, path: Any) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in lora:
        module, factor, _ = name.rsplit(".", 2)
        weight = shapes.get(f"{module}.weight")
        lora_a, lora_b = lora[f"{module}.lora_A.weight"], lora[f"{module}.lora_B.weight"]
        update = (lora_b.shape[0], lora_a.shape[-1]) if lora_a.ndim == lora_b.ndim == 2 else None
        if weight is None or weight != update or lora_a.shape[0] != lora_b.shape[1]:
            raise CheckpointError(
                f"{path}: {module} has {factor} of shape {tuple(lora[name].shape)}, which doesn't fit "
                f"{'any linear layer' if weight is None else f'a weight of {weight}'}."
            )


@torch.no_grad()
def _merge_lora(state: StateDict, lora: StateDict) -> None:
    """`weight + lora_B @ lora_A` in float32, rounded once to the dtype of the weight."""
    for name, lora_a in lora.items():
        module, factor, _ = name.rsplit(".", 2)
        if factor == "lora_A":
            weight = state[f"{module}.weight"]
            update = lora[f"{module}.lora_B.weight"].float() @ lora_a.float()
            state[f"{module}.weight"] = (weight.float() + update).to(weight.dtype)


# --- conversion ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What a conversion read and wrote.

    Attributes:
        source: the checkpoint.
        output_dir: the new folder.
        weights: which weights of the checkpoint were taken: `"generator_ema"`, `"generator"`, `"model"`, or
            `"state_dict"` for a file that isn't nested.
        num_tensors: tensors of the transformer.
        num_parameters: their elements.
        dtypes: element types in the folder.
        lora: `"merged"`, `"kept"` or `None`.
        files: for every file of the folder its `size` in bytes and `sha256`.
    """

    source: str
    output_dir: str
    weights: str
    num_tensors: int
    num_parameters: int
    dtypes: tuple[str, ...]
    lora: str | None
    files: dict[str, dict[str, Any]]

    def __str__(self) -> str:
        lora = f", LoRA {self.lora}" if self.lora else ""
        lines = [
            f"{self.source} [{self.weights}] -> {self.output_dir}: {self.num_tensors} tensors, "
            f"{self.num_parameters:,} parameters, {', '.join(self.dtypes)}{lora}"
        ]
        lines += [f"  {name}  {file['size']:,} bytes  sha256 {file['sha256']}" for name, file in self.files.items()]
        return "\n".join(lines)


def require_free_folder(output_dir: str | os.PathLike) -> Path:
    """The path of a folder that doesn't exist or is empty; raises [`CheckpointError`] for any other."""
    output_dir = Path(output_dir)
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise CheckpointError(f"{output_dir} exists; choose another folder or remove it.")
    return output_dir


def file_digests(path: Path) -> dict[str, dict[str, Any]]:
    """`size` in bytes and `sha256` of a file, or of every file in a folder by its path inside."""
    folder, files = (path, sorted(path.rglob("*"))) if path.is_dir() else (path.parent, [path])
    digests = {}
    for file in filter(Path.is_file, files):
        with open(file, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        digests[file.relative_to(folder).as_posix()] = {"size": file.stat().st_size, "sha256": digest}
    return digests


def _read_transformer(
    path: str | os.PathLike,
    base_config: Mapping[str, Any] | str | os.PathLike,
    weights: str | None,
    lora: str | os.PathLike | None,
    lora_scale: float,
    merge_lora: bool,
    dtype: torch.dtype | None,
) -> tuple[CausalWanTransformer3DModel, str, StateDict]:
    """The model, the name of the weights it was given, and the LoRA that was not merged."""
    if weights is not None and weights not in WEIGHTS:
        raise CheckpointError(f"weights={weights!r}; {suggestion(weights, WEIGHTS)}")
    with init_empty_weights(include_buffers=False):
        model = CausalWanTransformer3DModel(**_resolve_config(base_config))

    chosen, state = _choose(_load(path), weights, WEIGHTS, path)
    state = _strip(state, ("model.diffusion_model.", "model."))
    _check_sizes(state, model, path)
    state = original_to_diffusers(state)

    adapter: StateDict = {}
    if lora is not None:
        adapter = _load_lora(lora, lora_scale)
        _check_lora(adapter, model, lora)
        if merge_lora:
            _merge_lora(state, adapter)
            adapter = {}
    if dtype is not None:
        kept = CausalWanTransformer3DModel._keep_in_fp32_modules
        state = {
            name: tensor if any(module in name.split(".") for module in kept) else tensor.to(dtype)
            for name, tensor in state.items()
        }
    model.load_state_dict({name: tensor.contiguous() for name, tensor in state.items()}, strict=True, assign=True)
    return model.eval(), chosen, adapter


def from_original_checkpoint(
    path: str | os.PathLike,
    base_config: Mapping[str, Any] | str | os.PathLike = "wan-1.3b",
    weights: str | None = None,
    lora: str | os.PathLike | None = None,
    lora_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> CausalWanTransformer3DModel:
    """Load a checkpoint of Self-Forcing, CausVid or LongLive, or of the original Wan.

    Args:
        path: `.pt` or `.safetensors` file in the original layout, nested or not.
        base_config: configuration the file must fit: a dictionary, a name in `WAN_CONFIGS`, or a diffusers folder
            with `config.json`. Sizes are compared; what no tensor shows (heads, frames per block) is taken from it.
        weights: `"generator_ema"`, `"generator"` or `"model"`; `None` takes the first of these that the file has.
        lora: LoRA file that goes with the checkpoint; it is merged.
        lora_scale: factor of the LoRA, `alpha / rank` of its training where the file doesn't hold `alpha` (LongLive
            trains with `alpha = rank`, so 1).
        dtype: converts the weights, save those that the model keeps in float32; `None` keeps every tensor's dtype.

    Returns:
        The model on the CPU, in evaluation mode.

    Raises:
        CheckpointError: when a file is damaged, holds objects other than tensors, or doesn't fit exactly.
    """
    return _read_transformer(path, base_config, weights, lora, lora_scale, True, dtype)[0]


def convert_wan_causal(
    source: str | os.PathLike,
    output_dir: str | os.PathLike,
    base_config: Mapping[str, Any] | str | os.PathLike = "wan-1.3b",
    weights: str | None = None,
    lora: str | os.PathLike | None = None,
    merge_lora: bool = True,
    dtype: torch.dtype | None = None,
    lora_scale: float = 1.0,
) -> ConversionReport:
    """Write a checkpoint as a folder that `CausalWanTransformer3DModel.from_pretrained` loads.

    The folder appears under its name only when it is whole.

    Args:
        source: as `path` of [`from_original_checkpoint`].
        output_dir: the folder to make; it must not exist, or be empty.
        base_config: as for [`from_original_checkpoint`].
        weights: as for [`from_original_checkpoint`].
        lora: LoRA file that goes with the checkpoint.
        merge_lora: `False` leaves the weights alone and writes `pytorch_lora_weights.safetensors` into the folder, for
            `transformer.load_lora_adapter(output_dir, weight_name="pytorch_lora_weights.safetensors")`.
        dtype: as for [`from_original_checkpoint`].
        lora_scale: as for [`from_original_checkpoint`]; folded into a LoRA that is kept.

    Raises:
        CheckpointError: when the output exists, or the files are damaged or don't fit.
    """
    output_dir = require_free_folder(output_dir)
    model, chosen, adapter = _read_transformer(source, base_config, weights, lora, lora_scale, merge_lora, dtype)
    with atomic_directory(output_dir) as folder:
        model.save_pretrained(folder)
        if adapter:
            save_safetensors(
                {f"transformer.{name}": tensor for name, tensor in adapter.items()},
                folder / LORA_FILE,
                metadata={"format": "pt"},
            )
        files = file_digests(folder)
    parameters = list(model.parameters())
    return ConversionReport(
        source=str(source),
        output_dir=str(output_dir),
        weights=chosen,
        num_tensors=len(parameters),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        dtypes=tuple(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})),
        lora=None if lora is None else "merged" if merge_lora else "kept",
        files=files,
    )
