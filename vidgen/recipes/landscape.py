"""The embedded default model, from nothing to a few-step student, on `LandscapeWorld`.

Six steps, each a run of (config, overrides) that resumes where it stopped: `encode_latents`, `train_vae`,
`train_text_encoder`, `train_diffusion` on single chunks, then on chunks with their past, `train_student`. The stages
of `vidgen.recipes.context_forcing` go on from there; `assemble` puts the results into one diffusers folder.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from vidgen.forcing.diffusion_forcing import DiffusionForcingConfig, DiffusionForcingMethod
from vidgen.forcing.guidance_distillation import GuidanceDistillationMethod
from vidgen.forcing.layouts import Layout, sample_layout
from vidgen.memory import SlowFastMemoryConfig
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.pipelines import ContextForcingPipeline
from vidgen.recipes.command_line import require_parts, training_recipe
from vidgen.recipes.model_card import parameter_counts, run_table
from vidgen.runtime.checkpoint import atomic_directory, atomic_write, load_safetensors, save_safetensors
from vidgen.runtime.config import load_config
from vidgen.runtime.device import derive_seed, generator_for, set_threads
from vidgen.runtime.errors import ConfigError
from vidgen.schedulers import FlowConsistencyScheduler
from vidgen.train import TrainConfig, TrainingMethod
from vidgen.train.autoencoder import AutoencoderConfig, AutoencoderMethod, to_model_pixels
from vidgen.train.block_code import BlockCode
from vidgen.train.caption_encoder import CaptionEncoderMethod
from vidgen.worlds import LandscapeScene, LandscapeWorld, caption
from vidgen.worlds.landscape import (
    BIOMES,
    MOVES,
    REFERENCE_HEIGHT,
    REFERENCE_WIDTH,
    TIMES,
    TRAVELLERS,
    WEATHERS,
)

ATTRIBUTES = {"biome": BIOMES, "time_of_day": TIMES, "weather": WEATHERS, "traveller": TRAVELLERS}

# Scene seeds are split by purpose, so that no held-out scene is ever trained on.
TRAIN_SEEDS, VALIDATION_SEEDS = 0, 1_000_000

SETTINGS_NAME, CODE_NAME, LATENTS_NAME = "settings.json", "code.safetensors", "latents.json"


@dataclass(frozen=True)
class WorldConfig:
    """Size and rate of the rendered world: pixels, pixels, frames per second."""

    height: int = 64
    width: int = 112
    fps: int = 12

    def build(self) -> LandscapeWorld:
        return LandscapeWorld(height=self.height, width=self.width, fps=self.fps)


def make_scene(world: LandscapeWorld, index: int, seconds: float) -> LandscapeScene:
    """Scene `index`; attributes cycle through all combinations, so that even a small set holds every value."""
    attributes = {}
    remaining = index
    for name in ("biome", "time_of_day", "weather"):
        remaining, value = divmod(remaining, len(ATTRIBUTES[name]))
        attributes[name] = ATTRIBUTES[name][value]
    # 5 travellers and 6 * 4 * 4 other combinations share no factor.
    attributes["traveller"] = TRAVELLERS[index % len(TRAVELLERS)]
    return world.scene(seed=index, seconds=seconds, **attributes)


# --- 1. latents --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedScenes:
    """Scenes encoded by the recipe landscape_latents, in the world and the latent space that its folder names.

    Attributes:
        output_dir: folder of the code and the latents.
        num_scenes: training scenes.
        num_validation_scenes: held-out scenes.
    """

    output_dir: str
    num_scenes: int = 480
    num_validation_scenes: int = 16

    def __post_init__(self) -> None:
        for name in ("num_scenes", "num_validation_scenes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be 1 or more.")

    def scene_indices(self, split: str) -> range:
        first, count = {
            "train": (TRAIN_SEEDS, self.num_scenes),
            "validation": (VALIDATION_SEEDS, self.num_validation_scenes),
        }[split]
        return range(first, first + count)


@dataclass(frozen=True)
class LatentsRecipe(EncodedScenes):
    """The latent space and whole scenes in it.

    Attributes:
        world: rendered data.
        channels: channels of a latent.
        whitening: how evenly its components weigh; see [`BlockCode`].
        latent_frames: latent frames per scene, a multiple of the chunk.
    """

    world: WorldConfig = field(default_factory=WorldConfig)
    channels: int = 32
    whitening: float = 0.5
    latent_frames: int = 75

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.latent_frames < 1:
            raise ConfigError(f"latent_frames={self.latent_frames}; it must be 1 or more.")

    @property
    def seconds(self) -> float:
        """Length of a scene: the first latent frame is one picture, every other one is four."""
        return (4 * self.latent_frames - 3) / self.world.fps


@torch.no_grad()
def encode_latents(source: str | None, overrides: list[str]) -> Path:
    """Fit the latent space, then render and encode scenes one by one; a scene already encoded is skipped.

    Returns:
        The output folder: `settings.json`, `code.safetensors`, `scene_*.safetensors` with latents
        `(channels, frames, height, width)`, and `latents.json` once all are there.

    Raises:
        ConfigError: when the folder was begun with another world, code or length.
    """
    config = load_config(LatentsRecipe, source, overrides)
    set_threads()
    output_dir = Path(config.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    world = config.world.build()
    # Scenes that are there already are kept, so they have to be in the very same latent space.
    settings = {"world": asdict(config.world), "channels": config.channels, "whitening": config.whitening}
    settings = json.loads(json.dumps({**settings, "latent_frames": config.latent_frames}))
    settings_path, code_path = output_dir / SETTINGS_NAME, output_dir / CODE_NAME
    if settings_path.exists() and (before := json.loads(settings_path.read_text())) != settings:
        raise ConfigError(
            f"{output_dir} holds latents of {before}, now {settings}; use another output_dir or delete it."
        )
    if not code_path.exists():
        clips = render_clips(world, TRAIN_SEEDS, min(96, config.num_scenes), per_scene=8, frames=9)
        code = BlockCode.fit(to_model_pixels(torch.from_numpy(clips)), config.channels, whitening=config.whitening)
        # Not before there is something that they bind.
        with atomic_write(settings_path) as path:
            path.write_text(json.dumps(settings))
        code.save(code_path)
    code = BlockCode.load(code_path)
    for split in ("train", "validation"):
        for index in tqdm(config.scene_indices(split), desc=f"encoding {split} scenes"):
            path = output_dir / f"scene_{index}.safetensors"
            if path.exists():
                continue
            scene = make_scene(world, index, config.seconds)
            frames = torch.from_numpy(world.render(scene, 0, 4 * config.latent_frames - 3))
            latents = code.encode(to_model_pixels(frames[None]))[0]
            save_safetensors({"latents": latents.half()}, path)
    with atomic_write(output_dir / LATENTS_NAME) as path:
        path.write_text(json.dumps({"num_scenes": config.num_scenes}))
    return output_dir


def read_settings(folder: Path) -> LatentsRecipe:
    """How the scenes of a folder were encoded, as it says itself."""
    require_parts([(folder / name, "the recipe landscape_latents") for name in (SETTINGS_NAME, CODE_NAME)])
    return load_config(LatentsRecipe, {**json.loads((folder / SETTINGS_NAME).read_text()), "output_dir": str(folder)})


def load_scenes(config: EncodedScenes, split: str) -> tuple[list[LandscapeScene], list[torch.Tensor]]:
    """Scenes of a split and their latents, float16 `(channels, frames, height, width)` each.

    Raises:
        ConfigError: when they aren't encoded yet.
    """
    folder, indices = Path(config.output_dir), config.scene_indices(split)
    paths = [folder / f"scene_{index}.safetensors" for index in indices]
    require_parts([(path, "the recipe landscape_latents") for path in (folder / LATENTS_NAME, *paths)])
    settings = read_settings(folder)
    world = settings.world.build()
    latents = [load_safetensors(path)[0]["latents"] for path in paths]
    return [make_scene(world, index, settings.seconds) for index in indices], latents


def render_clips(world: LandscapeWorld, first_scene: int, num_scenes: int, per_scene: int, frames: int) -> np.ndarray:
    """uint8 `(num_scenes * per_scene, frames, height, width, 3)`, clips at random times of one-minute scenes."""
    clips = []
    for index in tqdm(range(first_scene, first_scene + num_scenes), desc="rendering clips"):
        scene = make_scene(world, index, seconds=60.0)
        starts = np.random.default_rng(derive_seed(index)).integers(0, scene.num_frames - frames, per_scene)
        # One continuous stretch keeps the scene's cached strips small.
        clips.extend(world.render(scene, int(start), frames) for start in np.sort(starts))
    return np.stack(clips)


# --- 2. autoencoder ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VAERecipe:
    """Autoencoder training.

    Attributes:
        train: the run; role `vae`.
        latents: folder of the recipe landscape_latents, whose latent space it is trained towards.
        model: arguments of `AutoencoderKLWan`.
        method: loss weights.
        num_scenes: scenes rendered for training.
        clips_per_scene: short clips cut from each.
        clip_frames: frames of a clip, 4 n + 1.
        crop: frames (4 n + 1), height and width of the crops that most batches are made of.
        crop_probability: share of such batches.
    """

    train: TrainConfig
    latents: str
    model: dict[str, Any] = field(default_factory=dict)
    method: AutoencoderConfig = field(default_factory=AutoencoderConfig)
    num_scenes: int = 240
    clips_per_scene: int = 16
    clip_frames: int = 9
    crop: tuple[int, int, int] = (5, 32, 48)
    crop_probability: float = 0.8

    def __post_init__(self) -> None:
        for name in ("num_scenes", "clips_per_scene"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be 1 or more.")
        if self.clip_frames < 1 or self.clip_frames % 4 != 1:
            raise ConfigError(f"clip_frames={self.clip_frames}; it must be 4 n + 1.")
        if min(self.crop) < 1 or self.crop[0] % 4 != 1 or self.crop[0] > self.clip_frames:
            raise ConfigError(
                f"crop={list(self.crop)}; its frames must be 4 n + 1, up to clip_frames={self.clip_frames}, and its "
                "height and width 1 or more."
            )
        if not 0 <= self.crop_probability <= 1:
            raise ConfigError(f"crop_probability={self.crop_probability}; it must be in [0, 1].")


class ClipBatches:
    """Batches of clips as `fit` asks for them: mostly many small crops, sometimes few whole, longer clips.

    A convolution learns as much from a crop; the whole clips teach the attention of the middle block and the steady
    state of the causal caches.

    Args:
        clips: uint8 `(clips, frames, height, width, 3)`.
        crop: frames, height and width of the small ones.
        crop_probability: share of batches made of crops.
        seed: fixes the draws.
    """

    def __init__(self, clips: np.ndarray, crop: tuple[int, int, int], crop_probability: float, seed: int) -> None:
        self.clips, self.crop, self.crop_probability, self.seed = clips, crop, crop_probability, seed

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        random = np.random.default_rng(derive_seed(self.seed, step, rank))
        size = self.clips.shape[1:4]
        if random.random() < self.crop_probability:
            size = self.crop
        else:
            batch_size = max(1, batch_size * math.prod(self.crop) // math.prod(size))
        clips = []
        for index in random.integers(len(self.clips), size=batch_size):
            _, top, left = (
                int(random.integers(full - part + 1)) for full, part in zip(self.clips.shape[1:4], size, strict=True)
            )
            clip = self.clips[index, : size[0], top : top + size[1], left : left + size[2]]
            clips.append(clip[:, :, ::-1] if random.random() < 0.5 else clip)
        return {"frames": torch.from_numpy(np.stack(clips))}


@training_recipe(VAERecipe)
def train_vae(config: VAERecipe) -> tuple[TrainingMethod, Any]:
    """Train the autoencoder on short clips."""
    settings = read_settings(Path(config.latents))
    code = BlockCode.load(Path(config.latents) / CODE_NAME)
    world = settings.world.build()
    if config.crop[1] > world.height or config.crop[2] > world.width:
        raise ConfigError(f"crop={list(config.crop)}; frames are {world.height}x{world.width} pixels.")
    clips = render_clips(world, TRAIN_SEEDS, config.num_scenes, config.clips_per_scene, config.clip_frames)
    validation = render_clips(world, VALIDATION_SEEDS, 16, 1, config.clip_frames)
    torch.manual_seed(config.train.seed)  # diffusers and transformers draw initial weights from the global generator
    # The code is normalized already, so the pipeline has nothing to rescale.
    channels = settings.channels
    vae = AutoencoderKLWan(z_dim=channels, latents_mean=[0.0] * channels, latents_std=[1.0] * channels, **config.model)
    method = AutoencoderMethod(vae, code, config.method, torch.from_numpy(validation))
    return method, ClipBatches(clips, config.crop, config.crop_probability, config.train.seed)


# --- 3. text encoder ---------------------------------------------------------------------------------------------

SPECIAL_TOKENS = ["<pad>", "</s>", "<unk>"]
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + len(pre_tokenizers.ByteLevel.alphabet())


@dataclass(frozen=True)
class TextEncoderRecipe:
    """Tokenizer and text encoder training.

    Attributes:
        train: the run; roles `text_encoder` and `heads`.
        fps: frames per second of the scenes that captions come from.
        model: arguments of `UMT5Config`, without the vocabulary size.
        vocab_size: entries of the tokenizer.
        max_length: tokens of a caption.
    """

    train: TrainConfig
    fps: int = 12
    model: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 1024
    max_length: int = 64

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ConfigError(f"max_length={self.max_length}; a word and the end take 2 tokens.")
        if self.vocab_size < MIN_VOCAB_SIZE:
            raise ConfigError(f"vocab_size={self.vocab_size}; bytes and special tokens alone take {MIN_VOCAB_SIZE}.")


def train_tokenizer(texts: list[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any text can be read, with T5's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=max_length,
        padding_side="right",
    )


class Captions:
    """Endless captions with the attributes they state, as `fit` asks for them."""

    def __init__(self, world: LandscapeWorld, tokenizer: PreTrainedTokenizerFast, seed: int, split: str) -> None:
        self.world, self.tokenizer, self.seed, self.split = world, tokenizer, seed, split

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        first = (step * world_size + rank) * batch_size
        texts, labels = [], {name: [] for name in (*ATTRIBUTES, "move", "fast")}
        for index in range(first, first + batch_size):
            scene = self.world.scene(seed=derive_seed(self.seed, index), seconds=20.0)
            frame = derive_seed(index) % scene.num_frames
            texts.append(caption(scene, frame, seed=index, split=self.split))
            move = scene.move_at(frame)
            for name, names in ATTRIBUTES.items():
                labels[name].append(names.index(getattr(scene, name)))
            labels["move"].append(MOVES.index(move.kind))
            labels["fast"].append(int(move.speed > 9))
        tokens = tokenize(self.tokenizer, texts)
        return {**tokens, **{name: torch.tensor(values) for name, values in labels.items()}}


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, `(batch, model_max_length)`."""
    tokens = tokenizer(
        texts, padding="max_length", truncation=True, max_length=tokenizer.model_max_length, return_tensors="pt"
    )
    return {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask}


class _TokenizerBeside(CaptionEncoderMethod):
    """Whenever there are weights, they come with their tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tokenizer = tokenizer

    def save_pretrained(self, directory: str | os.PathLike, ema_roles: dict[str, torch.nn.Module]) -> None:
        super().save_pretrained(directory, ema_roles)
        self.tokenizer.save_pretrained(Path(directory) / "tokenizer")


@training_recipe(TextEncoderRecipe)
def train_text_encoder(config: TextEncoderRecipe) -> tuple[TrainingMethod, Any]:
    """Train the tokenizer, then the text encoder."""
    world = LandscapeWorld(fps=config.fps)
    texts = []
    for index in range(4000):
        scene = world.scene(seed=derive_seed(TRAIN_SEEDS, index), seconds=20.0)
        texts.append(caption(scene, derive_seed(index) % scene.num_frames, seed=index))
    tokenizer = train_tokenizer(texts, config.vocab_size, config.max_length)
    torch.manual_seed(config.train.seed)
    text_encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **config.model))
    classes = {name: len(names) for name, names in ATTRIBUTES.items()} | {"move": len(MOVES), "fast": 2}
    validation = Captions(world, tokenizer, VALIDATION_SEEDS, "test").batch(0, 0, 1, 256)
    method = _TokenizerBeside(tokenizer, text_encoder, classes, validation)
    return method, Captions(world, tokenizer, TRAIN_SEEDS, "train")


def load_text_encoder(folder: str) -> tuple[PreTrainedTokenizerFast, UMT5EncoderModel]:
    """Tokenizer and text encoder from the weights folder of the recipe landscape_text_encoder."""
    names = ("tokenizer", "text_encoder")
    require_parts([(Path(folder) / name, "the recipe landscape_text_encoder") for name in names])
    tokenizer, text_encoder = (Path(folder) / name for name in names)
    return AutoTokenizer.from_pretrained(tokenizer), UMT5EncoderModel.from_pretrained(text_encoder).eval()


# --- 4. diffusion ------------------------------------------------------------------------------------------------


class LatentScenes:
    """Slow-fast layouts of encoded scenes with a caption of the moment, as `fit` asks for them.

    Args:
        config: which scenes.
        split: `"train"` or `"validation"`.
        tokenizer: tokenizer of the captions.
        memory: sizes of the memory.
        chunk: latent frames per chunk.
        seed: fixes layouts and wordings.
        steady_probability: share of batches in which the memory has already dropped frames.
        single_chunks: chunks of any moment, each without a past, instead of layouts.
        traveller_weight: loss weight of the latent cells where the traveller is; everything else weighs 1.
    """

    def __init__(
        self,
        config: EncodedScenes,
        split: str,
        tokenizer: PreTrainedTokenizerFast,
        memory: SlowFastMemoryConfig,
        chunk: int = 3,
        seed: int = 0,
        steady_probability: float = 0.6,
        single_chunks: bool = False,
        traveller_weight: float = 1.0,
    ) -> None:
        self.scenes, self.latents = load_scenes(config, split)
        self.tokenizer, self.memory, self.chunk = tokenizer, memory, chunk
        self.seed, self.steady_probability = seed, steady_probability
        self.single_chunks, self.traveller_weight = single_chunks, traveller_weight

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        # The kind of layout is drawn per step, not per rank: it decides the mask and the work of a forward.
        shared = generator_for(self.seed, step)
        steady = bool(torch.rand((), generator=shared) < self.steady_probability)
        generator = generator_for(self.seed, step, rank)
        samples, texts = [], []
        for _ in range(batch_size):
            index = int(torch.randint(len(self.scenes), (), generator=generator))
            scene, latents = self.scenes[index], self.latents[index]
            if self.single_chunks:
                layout = self._single_chunk(latents.shape[1], generator)
            else:
                layout = sample_layout(self.memory, latents.shape[1], self.chunk, steady, generator)
            # The caption tells the move of the target, or of any moment when no frame was dropped yet.
            moment = layout.frame_ids[-1]
            if self.single_chunks or not steady:
                moment = layout.frame_ids[int(torch.randint(len(layout.frame_ids), (), generator=generator))]
            move = scene.move_at(pixel_frame(int(moment)))
            same_move = [scene.move_at(pixel_frame(int(frame))) == move for frame in layout.frame_ids]
            wording = int(torch.randint(1 << 30, (), generator=generator))
            texts.append(caption(scene, pixel_frame(int(moment)), seed=wording))
            samples.append(
                {
                    "latents": latents[:, layout.frame_ids],
                    "frame_blocks": layout.frame_blocks,
                    "is_slow": layout.is_slow,
                    "matches_caption": torch.tensor(same_move) | layout.is_slow,
                    "loss_weight": self._loss_weight(scene, layout.frame_ids.tolist(), latents.shape[-2:]),
                }
            )
        return {**torch.utils.data.default_collate(samples), **tokenize(self.tokenizer, texts)}

    def _loss_weight(self, scene: LandscapeScene, frame_ids: list[int], size: tuple[int, int]) -> torch.Tensor:
        """`(frames, height, width)`; a traveller fills a few cells in a hundred, and every caption names it."""
        weight = torch.ones(len(frame_ids), *size)
        for index, frame in enumerate(frame_ids):
            box = scene.traveller_box(pixel_frame(frame))
            if box is not None:
                scale_y, scale_x = size[0] / REFERENCE_HEIGHT, size[1] / REFERENCE_WIDTH
                top, left = max(0, math.floor(scale_y * box.y)), max(0, math.floor(scale_x * box.x))
                bottom, right = math.ceil(scale_y * (box.y + box.height)), math.ceil(scale_x * (box.x + box.width))
                weight[index, top:bottom, left:right] = self.traveller_weight
        return weight

    def _single_chunk(self, num_frames: int, generator: torch.Generator) -> Layout:
        first = int(torch.randint(num_frames - self.chunk + 1, (), generator=generator))
        frame_ids = torch.arange(first, first + self.chunk)
        return Layout(frame_ids, torch.zeros_like(frame_ids), torch.zeros_like(frame_ids, dtype=torch.bool))


def pixel_frame(latent_frame: int) -> int:
    """The middle of the four pictures of a latent frame; latent frame 0 is picture 0."""
    return 0 if latent_frame == 0 else 4 * latent_frame - 2


@dataclass(frozen=True)
class DiffusionRecipe:
    """Diffusion forcing of the causal transformer.

    Attributes:
        train: the run; role `transformer`.
        latents: encoded scenes.
        text_encoder: weights folder of the text encoder recipe (holds `text_encoder/` and `tokenizer/`).
        model: arguments of `CausalWanTransformer3DModel`.
        memory: sizes of the memory whose layouts are trained.
        method: noise and weights.
        compile: compile the transformer's blocks, which fuses their elementwise work; on CPUs it needs a C++ compiler
            and a minute at the start.
        single_chunks: train on chunks without a past. A first stage of this kind shows a network what the world looks
            like at a seventh of the cost per scene.
        traveller_weight: loss weight of the few latent cells where the traveller is.
        initial_weights: transformer folder to go on from, which then also fixes `model`; `None` starts from nothing.
    """

    train: TrainConfig
    latents: EncodedScenes
    text_encoder: str
    compile: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    memory: SlowFastMemoryConfig = field(default_factory=SlowFastMemoryConfig)
    method: DiffusionForcingConfig = field(default_factory=DiffusionForcingConfig)
    single_chunks: bool = False
    traveller_weight: float = 1.0
    initial_weights: str | None = None

    def __post_init__(self) -> None:
        if self.initial_weights is not None and self.model:
            raise ConfigError("initial_weights brings its own model arguments; leave out model.")
        if self.single_chunks and self.memory != SlowFastMemoryConfig():
            raise ConfigError("single_chunks trains without a past; leave out memory.")
        _check_weight(self.traveller_weight)


def _check_weight(traveller_weight: float) -> None:
    if not 0 <= traveller_weight < math.inf:
        raise ConfigError(f"traveller_weight={traveller_weight}; it must be finite and not negative.")


def scene_batches(
    config: DiffusionRecipe | StudentRecipe,
    tokenizer: PreTrainedTokenizerFast,
    transformer: CausalWanTransformer3DModel,
    single_chunks: bool = False,
) -> tuple[LatentScenes, LatentScenes]:
    """Training batches, and held-out ones in which every cell weighs the same."""
    shared = (tokenizer, config.memory, transformer.config.num_frames_per_block)
    return (
        LatentScenes(
            config.latents,
            "train",
            *shared,
            seed=config.train.seed,
            single_chunks=single_chunks,
            traveller_weight=config.traveller_weight,
        ),
        LatentScenes(config.latents, "validation", *shared, steady_probability=1.0, single_chunks=single_chunks),
    )


@training_recipe(DiffusionRecipe)
def train_diffusion(config: DiffusionRecipe) -> tuple[TrainingMethod, Any]:
    """Train the many-step causal model."""
    tokenizer, text_encoder = load_text_encoder(config.text_encoder)
    if config.initial_weights is not None:
        require_parts([(config.initial_weights, "the recipe landscape_diffusion_chunks")])
        transformer = CausalWanTransformer3DModel.from_pretrained(config.initial_weights)
    else:
        torch.manual_seed(config.train.seed)
        transformer = CausalWanTransformer3DModel(**config.model)
        # Zero output: training starts from predicting nothing instead of noise of the initial weights.
        torch.nn.init.zeros_(transformer.proj_out.weight)
        torch.nn.init.zeros_(transformer.proj_out.bias)
    if config.compile:
        # Batch sizes are few and fixed: one specialized graph each is faster than one for all.
        transformer.compile_repeated_blocks(dynamic=False)
    data, held_out = scene_batches(config, tokenizer, transformer, config.single_chunks)
    method = DiffusionForcingMethod(transformer, text_encoder, config.method, lambda: held_out.batch(0, 0, 1, 16))
    return method, data


# --- 5. student --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudentRecipe:
    """Distillation of the few-step student.

    Attributes:
        train: the run; role `student`.
        latents: encoded scenes.
        text_encoder: weights folder of the text encoder recipe.
        teacher: transformer folder of the many-step model.
        guidance_scale: classifier-free guidance that is baked in.
        memory: sizes of the memory.
        method: noise and weights.
        traveller_weight: loss weight of the few latent cells where the traveller is.
        compile: compile the blocks of both transformers.
    """

    train: TrainConfig
    latents: EncodedScenes
    text_encoder: str
    teacher: str
    guidance_scale: float
    memory: SlowFastMemoryConfig = field(default_factory=SlowFastMemoryConfig)
    method: DiffusionForcingConfig = field(default_factory=lambda: DiffusionForcingConfig(drop_text_probability=0.0))
    traveller_weight: float = 1.0
    compile: bool = False

    def __post_init__(self) -> None:
        if not 1 < self.guidance_scale < math.inf:
            raise ConfigError(f"guidance_scale={self.guidance_scale}; it must be finite and above 1.")
        _check_weight(self.traveller_weight)


@training_recipe(StudentRecipe)
def train_student(config: StudentRecipe) -> tuple[TrainingMethod, Any]:
    """Distill the few-step student."""
    tokenizer, text_encoder = load_text_encoder(config.text_encoder)
    require_parts([(config.teacher, "the recipe landscape_diffusion")])
    student, teacher = (CausalWanTransformer3DModel.from_pretrained(config.teacher) for _ in range(2))
    if config.compile:
        for transformer in (student, teacher):
            transformer.compile_repeated_blocks(dynamic=False)
    data, held_out = scene_batches(config, tokenizer, student)
    method = GuidanceDistillationMethod(
        student, teacher, text_encoder, config.guidance_scale, config.method, lambda: held_out.batch(0, 0, 1, 16)
    )
    return method, data


# --- the whole ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AssembleRecipe:
    """Where the trained parts are (run folders) and how the student samples.

    Attributes:
        output_dir: the diffusers folder to write; an existing one is replaced.
        text_encoder: run folder.
        vae: run folder.
        transformer: run folders of the transformer's stages, for the model card; the student is that of the last one.
        shift: warp of the student's noise levels.
        num_inference_steps: steps of the student.
        eta: 0 for a student of a flow (Euler steps), 1 for one that was trained with fresh noise in every step.
        world: size and rate of the videos.
    """

    output_dir: str
    text_encoder: str
    vae: str
    transformer: tuple[str, ...]
    shift: float = 3.0
    num_inference_steps: int = 8
    eta: float = 0.0
    world: WorldConfig = field(default_factory=WorldConfig)

    def __post_init__(self) -> None:
        if not self.transformer:
            raise ConfigError("transformer is empty; name the run folder of a student.")
        if self.num_inference_steps < 1:
            raise ConfigError(f"num_inference_steps={self.num_inference_steps}; it must be 1 or more.")


def assemble(source: str | None, overrides: list[str]) -> Path:
    """Write the pipeline folder and its model card from the trained parts."""
    config = load_config(AssembleRecipe, source, overrides)
    vae, student = Path(config.vae) / "weights" / "vae", Path(config.transformer[-1]) / "weights" / "student"
    stages = "a recipe landscape_diffusion… or context_forcing_…"
    require_parts(
        [
            (vae, "the recipe landscape_vae"),
            (student, "the recipe landscape_student or context_forcing_stage2"),
            *((Path(run) / "metrics.jsonl", stages) for run in config.transformer),
        ]
    )
    tokenizer, text_encoder = load_text_encoder(str(Path(config.text_encoder) / "weights"))
    pipeline = ContextForcingPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=AutoencoderKLWan.from_pretrained(vae),
        transformer=CausalWanTransformer3DModel.from_pretrained(student),
        scheduler=FlowConsistencyScheduler(
            shift=config.shift, num_inference_steps=config.num_inference_steps, eta=config.eta
        ),
        fps=float(config.world.fps),
        default_height=config.world.height,
        default_width=config.world.width,
        max_sequence_length=tokenizer.model_max_length,
    )
    # Stored in half the bytes; whoever loads them chooses the type to compute in, float32 by default.
    pipeline.transformer.to(torch.float16)
    pipeline.vae.to(torch.float16)
    output_dir = Path(config.output_dir)
    with atomic_directory(output_dir) as folder:
        pipeline.save_pretrained(folder, safe_serialization=True)
        (folder / "README.md").write_text(_model_card(config, pipeline))
    return output_dir


def _model_card(config: AssembleRecipe, pipeline: ContextForcingPipeline) -> str:
    """Data, sizes, steps, minutes and losses, read from the runs themselves."""
    sizes = ", ".join(f"{name} {count:.2f} M" for name, count in parameter_counts(pipeline).items())
    world = config.world
    table = run_table((config.vae, config.text_encoder, *config.transformer))
    return f"""---
library_name: diffusers
pipeline_tag: text-to-video
license: apache-2.0
---

# landscape-tiny

A text-to-video model small enough for a bare CPU: {world.width}x{world.height} pixels at {world.fps} frames/s, any
length, {config.num_inference_steps} denoising steps per chunk of one second. Same classes as Wan2.1 at full scale.

- **Parameters**: {sizes}.
- **Data**: `vidgen.worlds.LandscapeWorld`, rendered by this repository; nothing was downloaded. Captions come from a
  grammar; some sentence templates are held out for testing.
- **Recipe**: `training/` and `configs/`, by the names of the table's first column.

| part | steps | minutes | last training loss | held-out |
|---|---|---|---|---|
{table}

**Limits**: it knows landscapes only (6 biomes, 4 times of day, 4 kinds of weather, 4 travellers) and the words of its
grammar. `eval/default_model.py` measures how well it follows them and what it remembers.
"""
