"""Recipes of masked diffusion language models: the plain objective; on top of it residual context, or predictions that
don't depend on the number of masks behind the text."""

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
from vidgen.language.dllm.losses import MaskAgnosticConfig
from vidgen.language.dllm.methods import MaskAgnosticMethod, MaskedDiffusionMethod, ResidualContextMethod
from vidgen.language.dllm.modeling import MaskedDiffusionConfig, MaskedDiffusionLM
from vidgen.language.dllm.rcd import ResidualContextConfig
from vidgen.language.dllm.sudoku import SudokuData
from vidgen.language.dllm.topics import TopicData
from vidgen.recipes.command_line import training_recipe
from vidgen.runtime.assets import require_model
from vidgen.runtime.errors import ConfigError, suggestion
from vidgen.train import TrainConfig, TrainingMethod
from vidgen.train.lora import LoraConfig, add_lora

LORA_TARGETS = r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


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
        sudoku: data; this, `topics` or `pairs`.
        topics: data.
        pairs: data; needs `init_from`, whose tokenizer reads it.
        generation: options that the saved model generates with.
        gradient_checkpointing: compute activations again in the backward pass.
    """

    train: TrainConfig
    model: dict[str, Any] | None = None
    init_from: ModelSource | None = None
    sudoku: SudokuData | None = None
    topics: TopicData | None = None
    pairs: PairsData | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        _one_data(self)
        if (self.model is None) == (self.init_from is None):
            raise ConfigError("give either model (a new one) or init_from")
        if self.model is not None and self.pairs is not None:
            raise ConfigError("a new model is trained on sudoku or topics; pairs need init_from")


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


@dataclass(frozen=True)
class MaskAgnosticRecipe:
    """Fine-tune a model so that it predicts the same whatever number of masks follows the text.

    Args:
        train: the run; its role is `model`.
        init_from: the model to go on with; it sees everything, none of blocks.
        mask_agnostic: see `MaskAgnosticConfig`; with beta=0 the control, cross-entropy with random numbers of masks.
        lora: adapters, which are all that is trained and saved; null = all weights.
        topics: data; this or `pairs`.
        pairs: data.
        generation: options that the saved model generates with; not with `lora`, whose folder holds no model.
        gradient_checkpointing: compute activations again in the backward pass.
    """

    train: TrainConfig
    init_from: ModelSource
    mask_agnostic: MaskAgnosticConfig = field(default_factory=MaskAgnosticConfig)
    lora: LoraConfig | None = None
    topics: TopicData | None = None
    pairs: PairsData | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        _one_data(self)
        if self.lora is not None and self.generation:
            raise ConfigError("generation with lora: adapters are saved alone; give the options when generating")


Recipe = MaskedDiffusionRecipe | ResidualContextRecipe | MaskAgnosticRecipe


def _one_data(recipe: Recipe) -> None:
    names = [name for name in ("sudoku", "topics", "pairs") if hasattr(recipe, name)]
    if sum(getattr(recipe, name) is not None for name in names) != 1:
        raise ConfigError(f"give either {' or '.join(names)} as data")


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


def _finish(model: MaskedDiffusionLM, recipe: Recipe) -> None:
    """Options that all recipes have."""
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    current = model.generation_config
    options = {name: getattr(current, name) for name in current.option_names()}
    model.generation_config = DLLMGenerationConfig(**{**options, **recipe.generation})


def _data(
    recipe: Recipe, model: MaskedDiffusionLM, source: ModelSource | None
) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """Data and tokenizer of a recipe."""
    for kind in ("sudoku", "topics"):
        data = getattr(recipe, kind, None)
        if data is None:
            continue
        for name in ("vocab_size", "mask_token_id"):
            own, wanted = getattr(model.config, name), getattr(data, name)
            if own != wanted:
                raise ConfigError(f"{name} of the model is {own}, of the {kind} {wanted}")
        return data, data.tokenizer() if kind == "topics" else None
    tokenizer = AutoTokenizer.from_pretrained(source.name)
    return Pairs(recipe.pairs, tokenizer), tokenizer


@training_recipe(MaskedDiffusionRecipe)
def train_masked_diffusion(config: MaskedDiffusionRecipe) -> tuple[TrainingMethod, Any]:
    """Train a masked diffusion language model; stage 1 of residual context and its control."""
    if config.init_from is not None:
        model = config.init_from.load()
    else:
        torch.manual_seed(config.train.seed)
        language = config.sudoku or config.topics
        shape = {"vocab_size": language.vocab_size, "mask_token_id": language.mask_token_id, **config.model}
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


@training_recipe(MaskAgnosticRecipe)
def train_mask_agnostic(config: MaskAgnosticRecipe) -> tuple[TrainingMethod, Any]:
    """Train a model to predict the same whatever number of masks follows the text."""
    model = config.init_from.load()
    data, tokenizer = _data(config, model, config.init_from)
    room = model.config.max_position_embeddings - data.length
    if config.mask_agnostic.max_extra_masks > room:
        raise ConfigError(
            f"mask_agnostic.max_extra_masks={config.mask_agnostic.max_extra_masks}; behind texts of {data.length} "
            f"tokens the model's {model.config.max_position_embeddings} positions leave room for {max(0, room)}"
        )
    _finish(model, config)
    if config.lora is not None:
        model = add_lora(model, LORA_TARGETS, config.lora)
    return MaskAgnosticMethod(model, config.mask_agnostic, tokenizer), data
