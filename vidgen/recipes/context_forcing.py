"""The three stages of Context Forcing (arXiv 2602.06028), each resumable, at any scale.

0. `train_teacher`: a context teacher learns to continue videos from what a slow-fast memory holds.
1. `train_stage1`: a student is matched to a short-clip teacher on its own rollouts (Self Forcing).
2. `train_stage2`: long rollouts, scored by the context teacher given the student's memory; with `method.context`
   `"window"` the baseline whose teacher has no memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vidgen.forcing.context_teacher import ContextTeacherConfig, ContextTeacherMethod
from vidgen.forcing.distribution_matching import DistributionMatchingConfig, DistributionMatchingMethod
from vidgen.memory import SlowFastMemoryConfig
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.recipes.command_line import training_recipe
from vidgen.recipes.context_data import (
    CodeLayouts,
    CodeRollouts,
    CodeWorld,
    CodeWorldData,
    FolderData,
    FolderPrompts,
    LandscapeData,
    LandscapePrompts,
    LandscapeRollouts,
    folder_layouts,
    folder_rollouts,
    landscape_layouts,
)
from vidgen.recipes.landscape import load_text_encoder
from vidgen.runtime.assets import require_model
from vidgen.runtime.errors import ConfigError
from vidgen.train import TrainConfig, TrainingMethod


class _OneSource:
    def __post_init__(self) -> None:
        given = [name for name in ("codes", "landscape", "folders") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"data names {given or 'no source'}; name exactly one of codes, landscape, folders.")


@dataclass(frozen=True)
class VideoSource(_OneSource):
    """Videos for the teacher, exactly one of three.

    Attributes:
        codes: a toy world.
        landscape: encoded scenes of LandscapeWorld.
        folders: videos prepared by `vidgen data`.
    """

    codes: CodeWorldData | None = None
    landscape: LandscapeData | None = None
    folders: FolderData | None = None


@dataclass(frozen=True)
class ConditionSource(_OneSource):
    """Conditions of rollouts, exactly one of three.

    Attributes:
        codes: a toy world.
        landscape: captions of LandscapeWorld.
        folders: prompts prepared by `vidgen data`.
    """

    codes: CodeWorld | None = None
    landscape: LandscapePrompts | None = None
    folders: FolderPrompts | None = None


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

    def build(self, makers: str) -> CausalWanTransformer3DModel:
        """Make or load the transformer; `makers` tells which recipes make a pretrained one."""
        if self.new is not None:
            transformer = CausalWanTransformer3DModel(**self.new)
            # Zero output: training starts from predicting nothing instead of noise of the initial weights.
            nn.init.zeros_(transformer.proj_out.weight)
            nn.init.zeros_(transformer.proj_out.bias)
        else:
            require_model(self.pretrained, makers)
            folder = Path(self.pretrained)
            nested = not folder.is_dir() or (folder / "model_index.json").exists()
            try:
                transformer = CausalWanTransformer3DModel.from_pretrained(
                    self.pretrained, subfolder="transformer" if nested else None
                )
            except OSError as error:
                where = "" if folder.is_dir() else ", which is no folder here and was looked up on the Hub"
                reason = str(error).strip().split("\n")[0]
                raise ConfigError(f"can't load a transformer from {self.pretrained}{where}: {reason}") from error
        if self.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        return transformer


def _text(data: VideoSource | ConditionSource) -> tuple[Any, nn.Module | None]:
    """Tokenizer and text encoder, where batches hold tokens instead of embeddings."""
    return (None, None) if data.landscape is None else load_text_encoder(data.landscape.text_encoder)


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
    data: VideoSource
    model: ModelSource
    memory: SlowFastMemoryConfig = field(default_factory=SlowFastMemoryConfig)
    method: ContextTeacherConfig = field(default_factory=ContextTeacherConfig)
    target_frames: int = 21
    validation_samples: int = 16

    def __post_init__(self) -> None:
        for name in ("target_frames", "validation_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be 1 or more.")


@training_recipe(ContextTeacherRecipe)
def train_teacher(config: ContextTeacherRecipe) -> tuple[TrainingMethod, Any]:
    """Stage 0: video continuation from a memory's content, with error recycling."""
    torch.manual_seed(config.train.seed)
    teacher = config.model.build("the recipe landscape_diffusion")
    chunk, seed = teacher.config.num_frames_per_block, config.train.seed
    if config.target_frames % chunk:
        raise ConfigError(f"target_frames={config.target_frames} is no multiple of the chunk of {chunk} frames.")
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
    return method, data


# --- stages 1 and 2 ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DistillationRecipe:
    """Distribution matching of a few-step student.

    Attributes:
        train: the run; roles `student` and `critic`.
        data: conditions of the rollouts.
        student: where the student starts.
        teacher: the real score.
        critic: where the fake score starts; usually the teacher's weights.
        latent_size: height and width of a latent frame.
        memory: the student's memory.
        method: rollouts, context and scores.
    """

    train: TrainConfig
    data: ConditionSource
    student: ModelSource
    teacher: ModelSource
    critic: ModelSource
    latent_size: tuple[int, int]
    memory: SlowFastMemoryConfig = field(default_factory=SlowFastMemoryConfig)
    method: DistributionMatchingConfig = field(default_factory=DistributionMatchingConfig)

    def __post_init__(self) -> None:
        if self.teacher.gradient_checkpointing:
            raise ConfigError("teacher.gradient_checkpointing has no effect: the teacher is frozen.")
        for name in ("guidance_scale", "shift"):
            if not math.isfinite(getattr(self.method, name)):
                raise ConfigError(f"method.{name}={getattr(self.method, name)}; it must be finite.")


@training_recipe(DistillationRecipe)
def distill(config: DistillationRecipe) -> tuple[TrainingMethod, Any]:
    """Stages 1 and 2: which one is a matter of the config (`method.context` and the rollout length)."""
    torch.manual_seed(config.train.seed)
    student, critic = (
        source.build("the recipe landscape_student (for stage 1) or context_forcing_stage1 (for stage 2)")
        for source in (config.student, config.critic)
    )
    teacher = config.teacher.build("the recipe landscape_diffusion (for stage 1) or context_forcing_teacher")
    patch = student.config.patch_size[1:]
    if any(size < 1 or size % unit for size, unit in zip(config.latent_size, patch, strict=True)):
        raise ConfigError(
            f"latent_size={list(config.latent_size)}; height and width must be positive multiples of {list(patch)}, "
            "the transformer's patch."
        )
    chunk, frames = student.config.num_frames_per_block, config.method.curriculum.max_frames
    tokenizer, text_encoder = _text(config.data)
    if config.data.codes is not None:
        data: Any = CodeRollouts(config.data.codes, frames, config.train.seed)
    elif config.data.landscape is not None:
        data = LandscapeRollouts(config.data.landscape, tokenizer, frames, chunk, config.train.seed)
    else:
        data = folder_rollouts(config.data.folders, frames, chunk)
    frame_shape = (student.config.out_channels, *config.latent_size)
    method = DistributionMatchingMethod(
        student, teacher, critic, text_encoder, config.memory, frame_shape, config.method
    )
    return method, data
