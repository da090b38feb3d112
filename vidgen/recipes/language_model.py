"""A small causal language model from nothing: tokenizer and token arrays, training, the folder with its model card.

Three steps, each a run of (config, overrides) that resumes where it stopped: `prepare_corpus`, `train_causal_lm`,
`assemble_language_model`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from vidgen.language.causal_lm import CausalLMMethod, heldout_figures
from vidgen.language.corpus import (
    INDEX_NAME,
    TextSource,
    TokenWindows,
    read_index,
    token_bytes,
    train_tokenizer,
    write_corpus,
)
from vidgen.language.models import LanguageModel, decoder_layers, load_language_model
from vidgen.recipes.command_line import require_parts, training_recipe
from vidgen.recipes.model_card import run_table
from vidgen.runtime.checkpoint import atomic_directory
from vidgen.runtime.config import load_config
from vidgen.runtime.device import set_threads
from vidgen.runtime.errors import ConfigError
from vidgen.train import TrainConfig, TrainingMethod

# --- 1. tokenizer and corpus -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusRecipe:
    """Tokenizer and token arrays.

    Attributes:
        output_dir: corpus folder to write.
        source: which files are read.
        vocab_size: entries of the tokenizer.
        max_length: context that the tokenizer states, in tokens.
    """

    output_dir: str
    source: TextSource = field(default_factory=TextSource)
    vocab_size: int = 4096
    max_length: int = 512

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ConfigError(f"max_length={self.max_length}; it must be 2 or more.")


def prepare_corpus(source: str | None, overrides: list[str]) -> Path:
    """Fit the tokenizer to the training files, and tokenize everything once; a whole corpus is left as it is.

    Raises:
        ConfigError: the folder holds a corpus of other files or of another tokenizer.
    """
    config = load_config(CorpusRecipe, source, overrides)
    output_dir = Path(config.output_dir)
    if output_dir.exists():
        if not (output_dir / INDEX_NAME).exists():
            raise ConfigError(f"{output_dir} exists and holds no corpus; use another output_dir or remove it.")
        before = read_index(output_dir)
        tokenizer = AutoTokenizer.from_pretrained(output_dir)
        stored = {"source": before["source"], "vocab_size": len(tokenizer), "max_length": tokenizer.model_max_length}
        given = {"source": vars(config.source), "vocab_size": config.vocab_size, "max_length": config.max_length}
        # A small text may not have as many different pairs of bytes as the vocabulary has room for.
        if stored["vocab_size"] <= given["vocab_size"]:
            stored["vocab_size"] = given["vocab_size"]
        if stored != given:
            raise ConfigError(f"{output_dir} holds a corpus of {stored}, now {given}; use another output_dir.")
        return output_dir
    tokenizer = train_tokenizer(config.source.texts("train"), config.vocab_size, config.max_length)
    write_corpus(config.source, tokenizer, output_dir, lambda texts: tqdm(texts, desc="tokenizing", unit="file"))
    return output_dir


# --- 2. training -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CausalLMRecipe:
    """Training of a Llama-like model.

    Attributes:
        train: the run; role `model`.
        corpus: folder of the recipe lm_tokenizer.
        model: arguments of `LlamaConfig`; the vocabulary and its special tokens follow from the corpus.
        length: tokens of a training window.
        stochastic_depth: share of samples for which a sub-layer is absent.
        validation_windows: held-out windows that are measured, spread over all held-out text.
        compile: compile the blocks, which fuses their elementwise work; on CPUs it needs a C++ compiler and a minute
            at the start.
    """

    train: TrainConfig
    corpus: str
    model: dict[str, Any] = field(default_factory=dict)
    length: int = 512
    stochastic_depth: float = 0.1
    validation_windows: int = 32
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("length", "validation_windows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be 1 or more.")
        context = self.model.get("max_position_embeddings")
        if context is not None and self.length > context:
            raise ConfigError(f"length={self.length}; the model's max_position_embeddings is {context}.")


@training_recipe(CausalLMRecipe)
def train_causal_lm(config: CausalLMRecipe) -> tuple[TrainingMethod, Any]:
    """Train a causal language model on a tokenized corpus."""
    read_index(config.corpus)
    disable_progress_bar()  # of transformers, for each checkpoint
    tokenizer = AutoTokenizer.from_pretrained(config.corpus)
    torch.manual_seed(config.train.seed)  # transformers draws initial weights from the global generator
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = LlamaForCausalLM(LlamaConfig(**{"vocab_size": len(tokenizer), **special, **config.model}))
    data = TokenWindows(config.corpus, "train", config.length, config.train.seed)
    heldout = TokenWindows(config.corpus, "heldout", config.length).in_order(config.validation_windows)
    method = CausalLMMethod(
        model, tokenizer, heldout, token_bytes(tokenizer), config.train.batch_size, config.stochastic_depth
    )
    if config.compile:
        for layer in decoder_layers(model):
            layer.compile(dynamic=False)
    return method, data


# --- 3. the whole ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AssembleRecipe:
    """The trained model as a folder that `load_language_model` reads.

    Attributes:
        output_dir: folder to write; an existing one is replaced.
        run: run folder of the recipe lm_causal.
        corpus: folder of the recipe lm_tokenizer.
        batch_size: held-out windows measured at once.
    """

    output_dir: str
    run: str
    corpus: str
    batch_size: int = 8

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}; it must be 1 or more.")


def assemble_language_model(source: str | None, overrides: list[str]) -> Path:
    """Write the model in half precision, measured on all held-out text, with its model card."""
    config = load_config(AssembleRecipe, source, overrides)
    set_threads()
    weights = Path(config.run) / "weights" / "model"
    require_parts([(weights, "the recipe lm_causal"), (Path(config.run) / "metrics.jsonl", "the recipe lm_causal")])
    index = read_index(config.corpus)
    lm = load_language_model(weights)
    # Stored in half the bytes, and measured as it will be loaded: whoever does chooses the type to compute in.
    lm.model.to(torch.float16).to(lm.dtype)
    windows = TokenWindows(config.corpus, "heldout", lm.model.config.max_position_embeddings).in_order()
    batches = tqdm(windows.split(config.batch_size), desc="measuring", unit="batch", file=sys.stderr)
    figures = heldout_figures(lm.model, batches, token_bytes(lm.tokenizer))
    output_dir = Path(config.output_dir)
    with atomic_directory(output_dir) as folder:
        lm.model.to(torch.float16).save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(_model_card(config, lm, index, figures), encoding="utf-8")
    return output_dir


def _model_card(config: AssembleRecipe, lm: LanguageModel, index: dict, figures: dict[str, float]) -> str:
    """Data, sizes, steps, minutes and losses, read from the runs themselves."""
    sizes, source, name = lm.model.config, index["source"], Path(config.output_dir).name
    train, heldout = (index["splits"][split] for split in ("train", "heldout"))
    if source["folder"] is None:
        data = f"the source of Python {index['python']}'s standard library, without its tests and generated tables"
    else:
        data = f"files `*{source['suffix']}` of one folder"
    parameters = sum(parameter.numel() for parameter in lm.model.parameters()) / 1e6
    return f"""---
library_name: transformers
pipeline_tag: text-generation
license: apache-2.0
---

# {name}

A causal language model small enough for a bare CPU, in the layout of Llama, for tests and benchmarks of decoding:
`vidgen lm generate "def "`.

- **Parameters**: {parameters:.2f} M, float16: {sizes.num_hidden_layers} layers of width {sizes.hidden_size},
  {sizes.num_attention_heads} heads, {sizes.num_key_value_heads} of them with keys and values of their own; context
  {sizes.max_position_embeddings} tokens; byte-level BPE of {len(lm.tokenizer)} tokens.
- **Data**: {data}.
  {train["files"]} files, {train["bytes"] / 1e6:.1f} MB, {train["tokens"] / 1e6:.2f} M tokens; nothing was downloaded.
- **Held out**: {heldout["files"]} files, {heldout["bytes"] / 1e6:.2f} MB, chosen by the hash of their path. Over all
  of them **{figures["bits_per_byte"]:.3f} bits per byte**, {figures["loss"]:.3f} nats per token.
- **Recipe**: `training/lm_tokenizer.py`, `training/lm_causal.py`, `training/lm_assemble.py` and `configs/lm/`.

| part | steps | minutes | last training loss | held-out, part of it |
|---|---|---|---|---|
{run_table((config.run,))}

**Limits**: it continues Python source in its manner and follows no instructions; commands that need an instruct model
can only test their path with it.
"""
