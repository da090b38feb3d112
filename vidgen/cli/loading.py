"""Loading of models for a command: whatever is wrong with the folder is one line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from vidgen.runtime.assets import is_hub_id
from vidgen.runtime.errors import VidgenError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from vidgen.language.models import LanguageModel

LANGUAGE_MODEL_HELP = (
    "Folder of a causal language model of transformers, or owner/name on the Hub. Default: the embedded one."
)

Pipeline = TypeVar("Pipeline", bound="DiffusionPipeline")


def load_pipeline(
    kind: type[Pipeline],
    model: str | Path,
    device: str | None = None,
    dtype: str | None = None,
    attention: str | None = None,
    compile_blocks: bool = False,
) -> Pipeline:
    """Load a pipeline and place it.

    Args:
        kind: Its class.
        model: Pipeline folder, or owner/name on the Hub.
        device: Default: the fastest there is.
        dtype: Default: the device's.
        attention: Name of an attention backend.
        compile_blocks: Compile the transformer's blocks.

    Raises:
        VidgenError: The folder is damaged or of another kind.
    """
    from vidgen.runtime.device import return_freed_memory, select_device, select_dtype, set_threads

    folder = str(model)
    on_hub = is_hub_id(folder)
    if not on_hub and not Path(folder, "model_index.json").is_file():
        what = "a pipeline folder: it has no model_index.json" if Path(folder).is_dir() else "a folder"
        raise typer.BadParameter(f"--model {folder} is not {what}")
    torch_device = select_device(device)
    torch_dtype = select_dtype(dtype, torch_device)
    set_threads()
    return_freed_memory()

    from diffusers.utils.logging import disable_progress_bar
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar as disable_transformers_progress_bar

    from vidgen.runtime.attention import resolve_attention_backend

    backend = None if attention is None else resolve_attention_backend(attention, torch_device, torch_dtype)
    disable_progress_bar()
    disable_transformers_progress_bar()
    try:
        pipe = kind.from_pretrained(folder, dtype=torch_dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        # diffusers and transformers report damaged folders in many ways.
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        hint = " (no such folder here, so it was looked up on the Hub)" if on_hub else ""
        raise VidgenError(f"can't load the model {folder}{hint}: {reason}") from error
    pipe.to(torch_device)
    if backend is not None:
        pipe.transformer.set_attention_backend(backend)
    if compile_blocks:
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    return pipe


def load_lm(model: str | None, device: str | None, dtype: str | None, attention: str) -> LanguageModel:
    """Load a language model and place it.

    Args:
        model: Folder, or owner/name on the Hub. None: the embedded one.
        device: Default: the fastest there is.
        dtype: Default: the device's.
        attention: Name of an attention backend.
    """
    from transformers.utils.logging import disable_progress_bar

    from vidgen.language.models import load_language_model
    from vidgen.runtime.assets import DEFAULT_LANGUAGE_MODEL, find_asset
    from vidgen.runtime.device import set_threads

    set_threads()
    disable_progress_bar()
    return load_language_model(model or find_asset(DEFAULT_LANGUAGE_MODEL), device, dtype, attention)


def whole_numbers(option: str, text: str) -> list[int]:
    """Reads an option of numbers with commas between them.

    Raises:
        BadParameter: names the option.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise typer.BadParameter(f"{option} {text}: give whole numbers with commas, such as 16,256")
    return [int(part) for part in parts]
