"""A tiny language model of the real classes, and a folder of text it can be trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = ["meadow", "river", "dawn", "rain", "storm", "lantern", "harbor", "snow", "birds", "train", "window", "night"]


def make_text(index: int) -> str:
    generator = torch.Generator().manual_seed(index)
    words = [WORDS[int(number)] for number in torch.randint(len(WORDS), (60,), generator=generator)]
    return "".join(f"the {first} and the {second}.\n" for first, second in zip(words[::2], words[1::2]))


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 text files in two folders."""
    folder = tmp_path_factory.mktemp("texts")
    for index in range(40):
        path = folder / f"part{index % 2}" / f"file{index}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(make_text(index))
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges."""
    from vidgen.language.corpus import train_tokenizer

    return train_tokenizer([make_text(index) for index in range(8)], 300, 64)


@pytest.fixture(scope="session")
def save_language_model(byte_tokenizer) -> Callable[..., Path]:
    """Writes a model with random weights and its tokenizer to a folder; keyword arguments change its config."""

    def save(folder: Path, kind: str = "llama", **changes) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {
            "vocab_size": len(byte_tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "eos_token_id": byte_tokenizer.eos_token_id,
            "bos_token_id": byte_tokenizer.bos_token_id,
            "pad_token_id": byte_tokenizer.pad_token_id,
        }
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**sizes, **changes})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        byte_tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def tiny_lm_folder(tmp_path_factory, save_language_model) -> Path:
    """The folder of a tiny Llama."""
    return save_language_model(tmp_path_factory.mktemp("models") / "tiny-lm")
