"""What the stages of Context Forcing train on: videos for the teacher, conditions alone for rollouts.

Three sources of either: a toy world of codes, LandscapeWorld (its videos encoded by the recipe landscape_latents), and
folders written by `vidgen data`. All are objects with `batch(step, rank, world_size, batch_size)`, as `fit` asks for
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils.data import default_collate
from transformers import PreTrainedTokenizerFast

from vidgen.data import LatentVideoDataset, PromptDataset
from vidgen.forcing.layouts import Layout, sample_context_layout
from vidgen.memory import SlowFastMemoryConfig
from vidgen.recipes.landscape import EncodedScenes, load_scenes, make_scene, pixel_frame, tokenize
from vidgen.runtime.device import derive_seed, generator_for
from vidgen.runtime.errors import ConfigError
from vidgen.worlds import LandscapeWorld, caption
from vidgen.worlds.code_worlds import PanoramaWorld, RoomsWorld

# The toy worlds have no text; a transformer wants an embedding of some width all the same.
TEXT_DIM = 8
# Of a folder of videos, every 50th is for validation.
HELD_OUT_EVERY = 50


@dataclass(frozen=True)
class ContextRange:
    """How much context a teacher is trained on, in chunks; each batch draws one number.

    Attributes:
        min_chunks: fewest chunks before the target.
        max_chunks: most chunks before the target.
    """

    min_chunks: int = 0
    max_chunks: int = 26

    def __post_init__(self) -> None:
        if not 0 <= self.min_chunks <= self.max_chunks:
            raise ConfigError(
                f"min_chunks={self.min_chunks}, max_chunks={self.max_chunks}; 0 <= min_chunks <= max_chunks is needed."
            )


class ContextLayouts:
    """Batches for [`~vidgen.forcing.context_teacher.ContextTeacherMethod`] from numbered videos.

    The number of context chunks is drawn per step, not per process: it decides the work of a forward.

    Args:
        read: `(video index, layout, generator) -> sample`, a dictionary of tensors with `latents` of the layout.
        frames: latent frames of each video.
        memory: the memory whose content the teacher learns to read.
        context: range of the context's length.
        target_frames: latent frames to denoise.
        chunk: latent frames per chunk.
        seed: fixes all draws.
    """

    def __init__(
        self,
        read: Callable[[int, Layout, torch.Generator], dict[str, torch.Tensor]],
        frames: list[int],
        memory: SlowFastMemoryConfig,
        context: ContextRange,
        target_frames: int,
        chunk: int,
        seed: int,
    ) -> None:
        needed = context.min_chunks * chunk + target_frames
        self.videos = [index for index, count in enumerate(frames) if count >= needed]
        if not self.videos:
            raise ConfigError(
                f"No video has {needed} latent frames ({context.min_chunks} context chunks and a target of "
                f"{target_frames}); the longest has {max(frames, default=0)}."
            )
        self.read, self.frames, self.memory, self.context = read, frames, memory, context
        self.target_frames, self.chunk, self.seed = target_frames, chunk, seed

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        shared = generator_for(self.seed, step)
        longest = max(self.frames)
        most = min(self.context.max_chunks, (longest - self.target_frames) // self.chunk)
        chunks = int(torch.randint(self.context.min_chunks, most + 1, (), generator=shared))
        fitting = [index for index in self.videos if self.frames[index] >= chunks * self.chunk + self.target_frames]
        generator = generator_for(self.seed, step, rank)
        samples = []
        for _ in range(batch_size):
            index = fitting[int(torch.randint(len(fitting), (), generator=generator))]
            # Once the memory has dropped frames its layout is the same at any time, so each video picks its own.
            last = (self.frames[index] - self.target_frames) // self.chunk
            capacity = self.memory.sink + self.memory.slow + self.memory.fast - self.chunk
            own = chunks
            if chunks * self.chunk > capacity:
                fewest = capacity // self.chunk + 1
                own = int(torch.randint(fewest, min(last, self.context.max_chunks) + 1, (), generator=generator))
            layout = sample_context_layout(self.memory, own, self.chunk, self.target_frames, generator)
            sample = self.read(index, layout, generator)
            samples.append({**sample, "frame_ids": layout.frame_ids, "frame_blocks": layout.frame_blocks})
        return default_collate(samples)


# --- toy worlds --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodeWorld:
    """[`RoomsWorld`] or [`PanoramaWorld`], whose videos are drawn anew for every batch.

    Attributes:
        world: `"rooms"` or `"panorama"`.
    """

    world: str = "rooms"

    def __post_init__(self) -> None:
        if self.world not in ("rooms", "panorama"):
            raise ConfigError(f"world={self.world!r}; allowed: 'rooms', 'panorama'.")

    def build(self) -> RoomsWorld | PanoramaWorld:
        return RoomsWorld() if self.world == "rooms" else PanoramaWorld()


@dataclass(frozen=True)
class CodeWorldData(CodeWorld):
    """Videos of a toy world for the teacher.

    Attributes:
        frames: latent frames of a video.
        context: context of the teacher.
    """

    frames: int = 96
    context: ContextRange = field(default_factory=ContextRange)


class CodeLayouts:
    """As [`ContextLayouts`], vectorized over a batch of fresh videos."""

    def __init__(
        self, data: CodeWorldData, memory: SlowFastMemoryConfig, target_frames: int, chunk: int, seed: int
    ) -> None:
        self.data, self.world, self.memory = data, data.build(), memory
        self.target_frames, self.chunk, self.seed = target_frames, chunk, seed

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        generator = generator_for(self.seed, step, rank)
        videos = self.world.sample(batch_size, self.data.frames, generator)

        def read(index: int, layout: Layout, generator: torch.Generator) -> dict[str, torch.Tensor]:
            return {
                "latents": videos.latents[index][:, layout.frame_ids],
                "condition_channels": videos.conditions[index],
                "prompt_embeds": torch.zeros(1, TEXT_DIM),
            }

        frames = [self.data.frames] * batch_size
        arguments = (self.memory, self.data.context, self.target_frames, self.chunk, derive_seed(self.seed, 1))
        return ContextLayouts(read, frames, *arguments).batch(step, rank, world_size, batch_size)


class CodeRollouts:
    """Conditions of fresh toy videos; no latents."""

    def __init__(self, data: CodeWorld, frames: int, seed: int) -> None:
        self.world, self.frames, self.seed = data.build(), frames, seed

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        videos = self.world.sample(batch_size, self.frames, generator_for(self.seed, step, rank))
        return {
            "condition_channels": videos.conditions,
            "prompt_embeds": torch.zeros(batch_size, 1, TEXT_DIM),
        }


# --- LandscapeWorld ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LandscapeData:
    """Encoded scenes of LandscapeWorld for the teacher.

    Attributes:
        latents: encoded scenes.
        text_encoder: weights folder of the recipe landscape_text_encoder.
        context: context of the teacher.
    """

    latents: EncodedScenes
    text_encoder: str
    context: ContextRange = field(default_factory=lambda: ContextRange(0, 24))


@dataclass(frozen=True)
class LandscapePrompts:
    """Captions of fresh scenes of LandscapeWorld for rollouts.

    Attributes:
        text_encoder: weights folder of the recipe landscape_text_encoder.
        fps: frames per second of the scenes.
        single_prompt: whether a rollout keeps its first prompt; for targets of several chunks, which are scored under
            one prompt.
    """

    text_encoder: str
    fps: int = 12
    single_prompt: bool = False


def landscape_layouts(
    data: LandscapeData,
    split: str,
    tokenizer: PreTrainedTokenizerFast,
    memory: SlowFastMemoryConfig,
    target_frames: int,
    chunk: int,
    seed: int,
) -> ContextLayouts:
    """Layouts of encoded scenes, captioned at the target."""
    scenes, latents = load_scenes(data.latents, split)

    def read(index: int, layout: Layout, generator: torch.Generator) -> dict[str, torch.Tensor]:
        wording = int(torch.randint(1 << 30, (), generator=generator))
        text = caption(scenes[index], pixel_frame(int(layout.frame_ids[-1])), seed=wording)
        tokens = tokenize(tokenizer, [text])
        return {
            "latents": latents[index][:, layout.frame_ids].float(),
            **{name: value[0] for name, value in tokens.items()},
        }

    frames = [tensor.shape[1] for tensor in latents]
    return ContextLayouts(read, frames, memory, data.context, target_frames, chunk, seed)


class LandscapeRollouts:
    """Prompt plans of fresh scenes: one wording per scene, one prompt per camera move."""

    def __init__(
        self, data: LandscapePrompts, tokenizer: PreTrainedTokenizerFast, frames: int, chunk: int, seed: int
    ) -> None:
        self.world, self.tokenizer, self.seed = LandscapeWorld(fps=data.fps), tokenizer, seed
        self.chunks, self.chunk = frames // chunk, chunk
        self.seconds = (4 * frames - 3) / data.fps
        self.single_prompt = data.single_prompt

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        tokens, prompts = [], []
        for sample in range(batch_size):
            seed = derive_seed(self.seed, step, rank, sample)
            scene = make_scene(self.world, seed % (1 << 31), self.seconds)
            texts = [
                caption(scene, pixel_frame(chunk * self.chunk + self.chunk // 2), seed=seed)
                for chunk in range(1 if self.single_prompt else self.chunks)
            ]
            distinct = list(dict.fromkeys(texts))
            prompts.append(torch.tensor([distinct.index(text) for text in texts]))
            # All samples of a batch hold equally many prompts; the added ones are never referred to.
            tokens.append(tokenize(self.tokenizer, distinct + [distinct[-1]] * (len(texts) - len(distinct))))
        return {
            "input_ids": torch.stack([sample["input_ids"] for sample in tokens]),
            "attention_mask": torch.stack([sample["attention_mask"] for sample in tokens]),
            "prompt_of_chunk": torch.stack(prompts),
        }


# --- folders of `vidgen data` ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderData:
    """Videos for the teacher.

    Attributes:
        videos: folder of `vidgen data encode-latents`.
        context: context of the teacher; 5 to 20 s are 7 to 27 chunks of three latent frames at 16 frames/s.
    """

    videos: str
    context: ContextRange = field(default_factory=lambda: ContextRange(7, 27))


@dataclass(frozen=True)
class FolderPrompts:
    """Prompts for rollouts.

    Attributes:
        prompts: folder of `vidgen data prompts`.
        chunk_seconds: seconds per chunk, for timed prompt plans.
    """

    prompts: str
    chunk_seconds: float = 0.75

    def __post_init__(self) -> None:
        if not 0 < self.chunk_seconds < math.inf:
            raise ConfigError(f"chunk_seconds={self.chunk_seconds}; it must be positive and finite.")


def folder_layouts(
    data: FolderData, split: str, memory: SlowFastMemoryConfig, target_frames: int, chunk: int, seed: int
) -> ContextLayouts:
    """Layouts of encoded videos of a split, `"train"` or `"validation"`; only the frames of a layout are read."""
    videos = LatentVideoDataset(data.videos)
    numbers = [n for n in range(len(videos)) if (n % HELD_OUT_EVERY == 0) == (split == "validation")]

    def read(index: int, layout: Layout, generator: torch.Generator) -> dict[str, torch.Tensor]:
        number = numbers[index]
        return {"latents": videos.read(number, layout.frame_ids), "prompt_embeds": videos.prompt_embeds(number)}

    frames = [videos.frames(number) for number in numbers]
    return ContextLayouts(read, frames, memory, data.context, target_frames, chunk, seed)


def folder_rollouts(data: FolderPrompts, frames: int, chunk: int) -> PromptDataset:
    """Prompts for rollouts of `frames` latent frames."""
    return PromptDataset(data.prompts, num_chunks=frames // chunk, chunk_seconds=data.chunk_seconds)
