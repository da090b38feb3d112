"""The three stages of Context Forcing (arXiv 2602.06028), each resumable, at any scale.

0. `train_teacher`: a context teacher learns to continue videos from what a slow-fast memory holds.
1. `train_stage1`: a student is matched to a short-clip teacher on its own rollouts (Self Forcing).
2. `train_stage2`: long rollouts, scored by the context teacher given the student's memory; with `method.context`
   `"window"` the baseline whose teacher has no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, UMT5EncoderModel

from vidgen.forcing.context_teacher import ContextTeacherConfig, ContextTeacherMethod
from vidgen.forcing.distribution_matching import DistributionMatchingConfig, DistributionMatchingMethod
from vidgen.memory import SlowFastMemoryConfig
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.recipes.context_data import (
    CodeLayouts,
    CodeRollouts,
    CodeWorldData,
    FolderData,
    LandscapeData,
    LandscapeRollouts,
    folder_layouts,
    folder_rollouts,
    landscape_layouts,
)
from vidgen.runtime.config import load_config
from vidgen.runtime.device import set_threads
from vidgen.runtime.errors import ConfigError
from vidgen.train import TrainConfig, TrainResult, fit


@dataclass(frozen=True)
class DataSource:
    """Exactly one of three.

    Attributes:
        codes: a toy world.
        landscape: encoded scenes of LandscapeWorld.
        folders: data prepared by `vidgen data`.
    """

    codes: CodeWorldData | None = None
    landscape: LandscapeData | None = None
    folders: FolderData | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("codes", "landscape", "folders") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"data names {given or 'no source'}; name exactly one of codes, landscape, folders.")


@dataclass(frozen=True)
class ModelSource:
    """A transformer, pretrained or new.

    Attributes:
        pretrained: transformer folder, pipeline folder or hub id.
        new: arguments of `CausalWanTransformer3DModel` for random weights.
        gradient_checkpointing: recompute activations in the backward pass.
    """

    pretrained: str | None = None
    new: dict[str, Any] | None = None
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if (self.pretrained is None) == (self.new is None):
            raise ConfigError("A model needs either `pretrained` or `new`.")

    def build(self, trainable: bool = True) -> CausalWanTransformer3DModel:
        if self.new is not None:
            transformer = CausalWanTransformer3DModel(**self.new)
            # Zero output: training starts from predicting nothing instead of noise of the initial weights.
            nn.init.zeros_(transformer.proj_out.weight)
            nn.init.zeros_(transformer.proj_out.bias)
        else:
            folder = Path(self.pretrained)
            nested = not folder.is_dir() or (folder / "model_index.json").exists()
            transformer = CausalWanTransformer3DModel.from_pretrained(
                self.pretrained, subfolder="transformer" if nested else None
            )
        if trainable and self.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        return transformer


def _text(data: DataSource) -> tuple[Any, nn.Module | None]:
    """Tokenizer and text encoder, where batches hold tokens instead of embeddings."""
    if data.landscape is None:
        return None, None
    folder = Path(data.landscape.text_encoder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    return tokenizer, UMT5EncoderModel.from_pretrained(folder / "text_encoder").eval()


# --- stage 0 -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContextTeacherRecipe:
    """Training of a context teacher; with `memory.sink = memory.slow = 0` of one that knows a short window only.

    Attributes:
        train: the run; role `teacher`.
        data: videos.
        model: where the weights start.
        memory: the memory whose content it learns to read.
        method: noise and error recycling.
        target_frames: latent frames it continues by.
        validation_samples: held-out samples.
    """

    train: TrainConfig
    data: DataSource
    model: ModelSource
    memory: SlowFastMemoryConfig = field(default_factory=SlowFastMemoryConfig)
    method: ContextTeacherConfig = field(default_factory=ContextTeacherConfig)
    target_frames: int = 21
    validation_samples: int = 16


def train_teacher(source: str | None, overrides: list[str]) -> TrainResult:
    """Stage 0: video continuation from a memory's content, with error recycling."""
    config = load_config(ContextTeacherRecipe, source, overrides)
    set_threads()
    torch.manual_seed(config.train.seed)
    teacher = config.model.build()
    chunk, seed = teacher.config.num_frames_per_block, config.train.seed
    sizes = (config.memory, config.target_frames, chunk)
    tokenizer, text_encoder = _text(config.data)
    if config.data.codes is not None:
        data, held_out = (CodeLayouts(config.data.codes, *sizes, each) for each in (seed, seed + 1_000_000))
    elif config.data.landscape is not None:
        data, held_out = (
            landscape_layouts(config.data.landscape, split, tokenizer, *sizes, seed)
            for split in ("train", "validation")
        )
    else:
        data, held_out = (
            folder_layouts(config.data.folders, split, *sizes, seed) for split in ("train", "validation")
        )
    method = ContextTeacherMethod(
        teacher, text_encoder, config.method, lambda: held_out.batch(0, 0, 1, config.validation_samples)
    )
    return fit(method, data, config.train)


# --- stages 1 and 2 ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DistillationRecipe:
    """Distribution matching of a few-step student.

    Attributes:
        train: the run; roles `student` and `critic`.
        data: conditions of the rollouts; videos are not read.
        student: where the student starts.
        teacher: the real score.
        critic: where the fake score starts; usually the teacher's weights.
        latent_size: height and width of a latent frame.
        chunk_seconds: seconds per chunk, for timed prompt plans.
        memory: the student's memory.
        method: rollouts, context and scores.
    """

    train: TrainConfig
    data: DataSource
    student: ModelSource
    teacher: ModelSource
    critic: ModelSource
    latent_size: tuple[int, int]
    chunk_seconds: float = 0.75
    memory: SlowFastMemoryConfig = field(default_factory=SlowFastMemoryConfig)
    method: DistributionMatchingConfig = field(default_factory=DistributionMatchingConfig)


def distill(source: str | None, overrides: list[str]) -> TrainResult:
    """Stages 1 and 2: which one is a matter of the config (`method.context` and the rollout length)."""
    config = load_config(DistillationRecipe, source, overrides)
    set_threads()
    torch.manual_seed(config.train.seed)
    student, critic = config.student.build(), config.critic.build()
    teacher = config.teacher.build(trainable=False)
    chunk, frames = student.config.num_frames_per_block, config.method.curriculum.max_frames
    tokenizer, text_encoder = _text(config.data)
    if config.data.codes is not None:
        data: Any = CodeRollouts(config.data.codes, frames, config.train.seed)
    elif config.data.landscape is not None:
        data = LandscapeRollouts(config.data.landscape, tokenizer, frames, chunk, config.train.seed)
    else:
        data = folder_rollouts(config.data.folders, frames, chunk, config.chunk_seconds)
    frame_shape = (student.config.out_channels, *config.latent_size)
    method = DistributionMatchingMethod(
        student, teacher, critic, text_encoder, config.memory, frame_shape, config.method
    )
    return fit(method, data, config.train)
