"""Causal language models of `transformers`, loaded on the shared runtime: device, number format, attention kernel."""

from __future__ import annotations

import os
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from vidgen.runtime.assets import is_hub_id
from vidgen.runtime.attention import ALIASES, resolve_attention_backend
from vidgen.runtime.device import select_device, select_dtype
from vidgen.runtime.errors import VidgenError, suggestion

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# The runtime's names of attention kernels -> those of transformers.
ATTENTION_IMPLEMENTATIONS = {
    "native": "sdpa",
    "_native_math": "eager",
    "flex": "flex_attention",
    "flash": "flash_attention_2",
    "_flash_3": "flash_attention_3",
}

# Where the blocks of a decoder are, from the module that `get_decoder` returns.
LAYER_PATHS = ("layers", "h", "blocks", "decoder.layers", "language_model.layers", "transformer.blocks")


class LanguageModelError(VidgenError):
    """A language model can't be loaded, or isn't built as expected."""


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model and its tokenizer: what all commands and benchmarks of the companion work with.

    One that `load_language_model` doesn't know how to place (several GPUs, quantized) is put together by hand:
    `LanguageModel(AutoModelForCausalLM.from_pretrained(..., device_map="auto"), tokenizer)`.

    Attributes:
        model: in `eval()`, on its device.
        tokenizer: pads on the left, as batched generation needs.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def device(self) -> torch.device:
        """Where the inputs belong."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """Entries of the logits; some models have more of them than their tokenizer has tokens."""
        return self.model.config.get_text_config().vocab_size


def load_language_model(
    name_or_path: str | os.PathLike,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    attention: str = "auto",
) -> LanguageModel:
    """Load a causal language model and its tokenizer; safetensors only, and never code from the checkpoint.

    Args:
        name_or_path: folder that `save_pretrained` wrote, or owner/name on the Hub.
        device: as `vidgen.runtime.device.select_device` reads it.
        dtype: as `vidgen.runtime.device.select_dtype` reads it.
        attention: name of an attention backend that `vidgen doctor` lists; `"auto"` leaves the choice to transformers.

    Raises:
        LanguageModelError: there is no such folder, it has no config, tokenizer or safetensors, weights are missing
            from it, it isn't a causal language model, or needs code of its own.
        AttentionBackendError: the attention backend is unknown or can't run here.
        DeviceError: the device or dtype is unknown or absent.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    name = str(name_or_path)
    _check_folder(name)
    device = select_device(device)
    dtype = select_dtype(dtype, device)
    implementation = _attention_implementation(attention, device, dtype)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        _check_kind(name, config)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, padding_side="left")
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            device_map={"": device},
            attn_implementation=implementation,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except VidgenError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        # transformers reports damaged folders in many ways.
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        hint = " (no such folder here, so it was looked up on the Hub)" if not Path(name).is_dir() else ""
        raise LanguageModelError(f"can't load the language model {name}{hint}: {reason}") from error
    # transformers would go on with random weights in their place.
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise LanguageModelError(
            f"{name} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]!r}; "
            "it is incomplete or of another kind."
        )
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise LanguageModelError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, the model embeds "
            f"{model.get_input_embeddings().num_embeddings}; they don't belong together."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return LanguageModel(model.eval(), tokenizer)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The blocks of a decoder in their order, found by the structure of the model.

    Args:
        model: of transformers, or of peft around one.

    Raises:
        LanguageModelError: no known attribute holds them.
    """
    if hasattr(model, "get_base_model"):  # peft
        model = model.get_base_model()
    decoder = model.get_decoder() or model.base_model
    for path in LAYER_PATHS:
        try:
            layers = attrgetter(path)(decoder)
        except AttributeError:
            continue
        if isinstance(layers, nn.ModuleList) and len(layers):
            return layers
    raise LanguageModelError(
        f"{type(decoder).__name__} of {type(model).__name__} has none of the attributes {', '.join(LAYER_PATHS)} "
        "that hold a decoder's blocks."
    )


def _check_folder(name: str) -> None:
    folder = Path(name)
    if not folder.is_dir():
        if is_hub_id(name):
            return
        raise LanguageModelError(
            f"there is no folder {name}; give the folder of a causal language model, or owner/name on the Hub."
        )
    if not (folder / "config.json").is_file():
        raise LanguageModelError(f"{name} has no config.json; it isn't what save_pretrained of transformers writes.")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        found = f"only {pickled[0]}, and unpickling it could run code" if pickled else "no weights at all"
        raise LanguageModelError(
            f"{name} has no .safetensors file but {found}; save it again with "
            "save_pretrained of transformers, which writes safetensors."
        )
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        raise LanguageModelError(
            f"{name} has no tokenizer: none of tokenizer.json, tokenizer.model, vocab.json, vocab.txt; "
            "save it there with tokenizer.save_pretrained."
        )


def _check_kind(name: str, config: PretrainedConfig) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    architectures = config.architectures or []
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        known = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
        if not architectures or known in architectures:
            return
        wanted = f"; the causal language model of this kind is {known}"
    else:
        wanted = "; transformers has no causal language model of this kind"
    raise LanguageModelError(
        f"{name} is a {' or '.join(architectures) or config.model_type}, not a causal language model{wanted}."
    )


def _attention_implementation(attention: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if attention == "auto":
        return None
    backend = resolve_attention_backend(attention, device, dtype)
    if backend not in ATTENTION_IMPLEMENTATIONS:
        names = [*ATTENTION_IMPLEMENTATIONS, *ALIASES]
        raise LanguageModelError(
            f"transformers has no language models with the attention backend {attention!r}: "
            f"{suggestion(attention, names)}"
        )
    return ATTENTION_IMPLEMENTATIONS[backend]
