"""Recipes of masked diffusion language models: the plain objective, and residual context on top of it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vidgen.language.dllm.generation import DLLMGenerationConfig, check_same_tokenizer
from vidgen.language.dllm.layouts import load_dllm, read_config
from vidgen.language.dllm.methods import MaskedDiffusionMethod, ResidualContextMethod
from vidgen.language.dllm.modeling import MaskedDiffusionConfig, MaskedDiffusionLM
from vidgen.language.dllm.rcd import ResidualContextConfig
from vidgen.language.dllm.sudoku import SudokuData
from vidgen.recipes.command_line import training_recipe
from vidgen.runtime.assets import require_model
from vidgen.runtime.errors import ConfigError, suggestion
from vidgen.train import TrainConfig, TrainingMethod


@dataclass(frozen=True)
class PairsData:
    """Prompts and answers; only answers are hidden and scored.

    Args:
        path: JSON lines with `prompt` and `answer`.
        max_length: tokens of both; longer pairs are left out.
    """

    path: str
    max_length: int = 2048


@dataclass(frozen=True)
class ModelSource:
    """A published or own model.

    Args:
        name: folder or hub id.
        mask_token_id: see `load_dllm`.
        block_size: see `load_dllm`.
        dtype: of the weights; null = bfloat16 where the device computes in it.
    """

    name: str
    mask_token_id: int | None = None
    block_size: int | None = None
    dtype: str | None = "float32"

    def load(self) -> MaskedDiffusionLM:
        require_model(self.name, "the recipe dllm_base")
        return load_dllm(self.name, "cpu", self.dtype, mask_token_id=self.mask_token_id, block_size=self.block_size)


@dataclass(frozen=True)
class MaskedDiffusionRecipe:
    """Train or fine-tune with the plain masked loss.

    Args:
        train: the run; its role is `model`.
        model: fields of `MaskedDiffusionConfig` of a new model; the data gives those of the vocabulary.
        init_from: the model to go on with, in place of a new one.
        sudoku: data; this or `pairs`.
        pairs: data; needs `init_from`, whose tokenizer reads it.
        generation: options that the saved model generates with.
        gradient_checkpointing: compute activations again in the backward pass.
    """

    train: TrainConfig
    model: dict[str, Any] | None = None
    init_from: ModelSource | None = None
    sudoku: SudokuData | None = None
    pairs: PairsData | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        _one_data(self)
        if (self.model is None) == (self.init_from is None):
            raise ConfigError("give either model (a new one) or init_from")
        if self.model is not None and self.sudoku is None:
            raise ConfigError("a new model is trained on sudoku; pairs need init_from")


@dataclass(frozen=True)
class ResidualContextRecipe:
    """Stage 2 of residual context.

    Args:
        train: the run; its role is `model`.
        target: the model to train.
        reference: what stage 1 (`dllm_base`) made, on the same data; it may be smaller.
        rcd: see `ResidualContextConfig`.
        sudoku: data; this or `pairs`.
        pairs: data.
        generation: options that the saved model generates with.
        gradient_checkpointing: compute activations again in the backward pass.
    """

    train: TrainConfig
    target: ModelSource
    reference: ModelSource
    rcd: ResidualContextConfig = field(default_factory=ResidualContextConfig)
    sudoku: SudokuData | None = None
    pairs: PairsData | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        _one_data(self)


def _one_data(recipe: MaskedDiffusionRecipe | ResidualContextRecipe) -> None:
    if (recipe.sudoku is None) == (recipe.pairs is None):
        raise ConfigError("give either sudoku or pairs as data")


class Pairs(torch.utils.data.Dataset):
    """Prompts and answers as tokens, padded on the right to one length.

    Args:
        config: see `PairsData`.
        tokenizer: with an end token, which ends every answer.
    """

    def __init__(self, config: PairsData, tokenizer: PreTrainedTokenizerBase) -> None:
        if not Path(config.path).is_file():
            raise ConfigError(f"{config.path} does not exist; give JSON lines with prompt and answer")
        self.rows: list[tuple[list[int], list[int]]] = []
        with open(config.path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    pair = json.loads(line)
                    texts = pair["prompt"], pair["answer"]
                except (json.JSONDecodeError, KeyError, TypeError) as error:
                    raise ConfigError(f"{config.path}, line {number}: expected prompt and answer as JSON") from error
                prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
                answer = [*answer, tokenizer.eos_token_id]
                if len(prompt) + len(answer) <= config.max_length:
                    self.rows.append((prompt, answer))
        if not self.rows:
            raise ConfigError(f"{config.path}: no pair is at most {config.max_length} tokens long")
        self.length = max(len(prompt) + len(answer) for prompt, answer in self.rows)
        self.padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        prompt, answer = self.rows[index]
        count, end = len(prompt), len(prompt) + len(answer)
        place = torch.arange(self.length)
        tokens = torch.full((self.length,), self.padding)
        tokens[:end] = torch.tensor([*prompt, *answer])
        return {"input_ids": tokens, "attention_mask": place < end, "loss_mask": (place >= count) & (place < end)}


def _finish(model: MaskedDiffusionLM, recipe: MaskedDiffusionRecipe | ResidualContextRecipe) -> None:
    """Options that both recipes have."""
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    current = model.generation_config
    options = {name: getattr(current, name) for name in current.option_names()}
    model.generation_config = DLLMGenerationConfig(**{**options, **recipe.generation})


def _data(
    recipe: MaskedDiffusionRecipe | ResidualContextRecipe, model: MaskedDiffusionLM, source: ModelSource | None
) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """Data and tokenizer of a recipe."""
    if recipe.sudoku is not None:
        for name in ("vocab_size", "mask_token_id"):
            own, wanted = getattr(model.config, name), getattr(recipe.sudoku, name)
            if own != wanted:
                raise ConfigError(f"{name} of the model is {own}, of the sudoku {wanted}")
        return recipe.sudoku, None
    tokenizer = AutoTokenizer.from_pretrained(source.name)
    return Pairs(recipe.pairs, tokenizer), tokenizer


@training_recipe(MaskedDiffusionRecipe)
def train_masked_diffusion(config: MaskedDiffusionRecipe) -> tuple[TrainingMethod, Any]:
    """Train a masked diffusion language model; stage 1 of residual context and its control."""
    if config.init_from is not None:
        model = config.init_from.load()
    else:
        torch.manual_seed(config.train.seed)
        shape = {"vocab_size": config.sudoku.vocab_size, "mask_token_id": config.sudoku.mask_token_id, **config.model}
        known = {known.name for known in dataclasses.fields(MaskedDiffusionConfig)}
        for name in shape:
            if name not in known:
                raise ConfigError(f"unknown key model.{name}: {suggestion(name, known)}")
        model = MaskedDiffusionLM(read_config({"model_type": MaskedDiffusionConfig.model_type, **shape}))
    data, tokenizer = _data(config, model, config.init_from)
    _finish(model, config)
    return MaskedDiffusionMethod(model, tokenizer), data


@training_recipe(ResidualContextRecipe)
def train_residual_context(config: ResidualContextRecipe) -> tuple[TrainingMethod, Any]:
    """Train a model to read the residual context of a reference model."""
    target, reference = config.target.load(), config.reference.load()
    data, tokenizer = _data(config, target, config.target)
    if tokenizer is not None:
        check_same_tokenizer(tokenizer, AutoTokenizer.from_pretrained(config.reference.name))
    _finish(target, config)
    return ResidualContextMethod(target, reference, config.rcd, tokenizer), data
