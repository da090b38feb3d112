"""World models: a frame autoencoder, a transformer by any objective of the LIVE family, and the folder of both.

Three steps, each a run of (config, overrides) that resumes where it stopped: `train_frame_autoencoder`,
`train_world_model` (Diffusion Forcing from nothing, then LIVE from its weights), `assemble_world_model`. Episodes come
from `vidgen world record`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from diffusers import AutoencoderKL
from tqdm import tqdm

from vidgen.controls import (
    CAMERA_SPEC,
    ButtonControls,
    ControlEncoder,
    DeltaControls,
    FloorPlan,
    PoseControls,
    ReversibleControls,
    Walk,
)
from vidgen.data import EpisodeDataset
from vidgen.data.episodes import PLANAR_POSE
from vidgen.forcing.live import CurriculumStage, ForcingSchedule, LiveMethod, RolloutConfig
from vidgen.models.frame_autoencoder import stride_of
from vidgen.models.world_dit import WorldDiT
from vidgen.pipelines import WorldModelPipeline
from vidgen.pipelines.play import STARTS_NAME
from vidgen.pipelines.world_model import BASELINES_NAME
from vidgen.recipes.command_line import require_parts, training_recipe
from vidgen.recipes.model_card import parameter_counts, run_table
from vidgen.runtime.checkpoint import atomic_directory, atomic_write, save_safetensors
from vidgen.runtime.config import load_config
from vidgen.runtime.device import derive_seed, generator_for
from vidgen.runtime.errors import ConfigError, suggestion
from vidgen.schedulers import flow_sampler
from vidgen.train import TrainConfig, TrainingMethod
from vidgen.train.autoencoder import AutoencoderConfig, FrameAutoencoderMethod, to_model_pixels
from vidgen.train.block_code import BlockCode
from vidgen.train.state import newest_checkpoint

CODE_NAME = "code.safetensors"
CONTROLS_NAME = "controls.json"

# --- 1. frame autoencoder ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrameAutoencoderRecipe:
    """Training of an autoencoder of single frames.

    Attributes:
        train: the run; role `vae`. Its folder also gets the linear code that the autoencoder learns.
        episodes: folder of episodes.
        model: arguments of `AutoencoderKL`.
        method: loss weights.
        code_frames: frames that the code is fitted to.
    """

    train: TrainConfig
    episodes: str
    model: dict[str, Any] = field(default_factory=dict)
    method: AutoencoderConfig = field(default_factory=AutoencoderConfig)
    code_frames: int = 4000

    def __post_init__(self) -> None:
        if self.code_frames < 1:
            raise ConfigError(f"code_frames={self.code_frames}; it must be 1 or more.")
        for name in ("latent_channels", "block_out_channels"):
            if name not in self.model:
                raise ConfigError(f"model.{name} is missing; the code is made to fit it.")


class FrameBatches:
    """Batches of single frames as `fit` asks for them.

    Args:
        frames: uint8 `(frames, height, width, 3)`.
        seed: fixes the draws.
    """

    def __init__(self, frames: np.ndarray, seed: int) -> None:
        self.frames, self.seed = frames, seed

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        random = np.random.default_rng(derive_seed(self.seed, step, rank))
        chosen = self.frames[random.integers(len(self.frames), size=batch_size)]
        mirrored = random.random(batch_size) < 0.5
        chosen[mirrored] = chosen[mirrored, :, ::-1]
        return {"frames": torch.from_numpy(chosen)[:, None]}


@training_recipe(FrameAutoencoderRecipe)
def train_frame_autoencoder(config: FrameAutoencoderRecipe) -> tuple[TrainingMethod, Any]:
    """Train an autoencoder of single frames."""
    frames = np.concatenate(_all_frames(EpisodeDataset(config.episodes, "train", window=1, in_memory=False)))
    held_out = np.concatenate(_all_frames(EpisodeDataset(config.episodes, "validation", window=1, in_memory=False)))
    spread = np.linspace(0, len(held_out) - 1, min(64, len(held_out))).astype(int)
    channels, num_blocks = config.model["latent_channels"], len(config.model["block_out_channels"])
    output_dir = Path(config.train.output_dir)
    processes = PartialState()
    with processes.main_process_first():
        # Without a checkpoint, a code that is there may be one of other settings.
        if processes.is_main_process and newest_checkpoint(output_dir) is None:
            chosen = np.random.default_rng(config.train.seed).choice(len(frames), min(config.code_frames, len(frames)))
            pixels = to_model_pixels(torch.from_numpy(frames[np.sort(chosen)])[None])
            code = BlockCode.fit(pixels, channels, temporal=1, spatial=2 ** (num_blocks - 1), seed=config.train.seed)
            code.save(output_dir / CODE_NAME)
        code = BlockCode.load(output_dir / CODE_NAME)
    torch.manual_seed(config.train.seed)  # diffusers draws initial weights from the global generator
    vae = AutoencoderKL(scaling_factor=1.0, shift_factor=None, **config.model)  # the code is normalized already
    validation = torch.from_numpy(held_out[spread])[:, None]
    method = FrameAutoencoderMethod(vae, code, config.method, validation)
    return method, FrameBatches(frames, config.train.seed)


def _all_frames(episodes: EpisodeDataset) -> list[np.ndarray]:
    if not len(episodes.episodes):
        raise ConfigError(f"{episodes.root} has no episodes of split {episodes.split!r}; record some.")
    return [episodes.frames(index) for index in range(len(episodes.episodes))]


# --- 2. world model ----------------------------------------------------------------------------------------------

OBJECTIVES: dict[str, Callable[..., ForcingSchedule]] = {
    "teacher_forcing": ForcingSchedule.teacher_forcing,
    "diffusion_forcing": ForcingSchedule.diffusion_forcing,
    "live": ForcingSchedule.live,
    "live_no_noise": ForcingSchedule.live_no_noise,
    "live_fixed_noise": ForcingSchedule.live_fixed_noise,
    "no_cycle": ForcingSchedule.no_cycle,
}


@dataclass(frozen=True)
class EpisodesSource:
    """Windows of recorded episodes, and how their frames become latents.

    Attributes:
        root: the data set.
        code: linear code of the frame autoencoder's run; frames are encoded once, at the start.
        vae: folder of an `AutoencoderKL`; every batch is encoded by it, with a sampled posterior.
        skip: every how many recorded frames a window takes one.
        num_sparse: frames of a window that come from long before the others.
        controls: `"actions"`, or `"cameras"` for absolute poses.
    """

    root: str
    code: str | None = None
    vae: str | None = None
    skip: int = 1
    num_sparse: int = 0
    controls: str = "actions"

    def __post_init__(self) -> None:
        if (self.code is None) == (self.vae is None):
            raise ConfigError("episodes need exactly one of code, vae.")
        if self.skip < 1 or self.num_sparse < 0:
            raise ConfigError(f"skip={self.skip}, num_sparse={self.num_sparse}; skip >= 1 and num_sparse >= 0.")


@dataclass(frozen=True)
class WorldModelRecipe:
    """Training of a world model.

    Attributes:
        train: the run; role `transformer`.
        episodes: data.
        control_type: `"map"`, rays per token, or `"vector"`, the columns themselves.
        units: what counts as 1 in controls: one number per column, or the length of a step for a map.
        in_world: rays of absolute poses stay in the coordinates of the world, for a model of one world that is the
            same in all episodes; else they are relative to the first frame of the window.
        new: arguments of `WorldDiT` for random weights; channels and controls follow from the data.
        pretrained: folder of a transformer to go on from.
        objective: a member of the family, by name.
        curriculum: its prompt frames; default that of the objective.
        rollout: how the model continues them.
        direction_embedding: a new transformer is told which way time runs; buttons without an inverse need it.
        gradient_checkpointing: recompute activations in the backward pass.
        compile: compile the transformer's blocks; on CPUs it needs a C++ compiler.
        validation_windows: held-out windows whose loss is measured; 0 for none.
    """

    train: TrainConfig
    episodes: EpisodesSource
    control_type: str = "map"
    units: tuple[float, ...] = (1.0,)
    in_world: bool = False
    new: dict[str, Any] | None = None
    pretrained: str | None = None
    objective: str = "diffusion_forcing"
    curriculum: list[CurriculumStage] | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    direction_embedding: bool = False
    gradient_checkpointing: bool = False
    compile: bool = False
    validation_windows: int = 32

    def __post_init__(self) -> None:
        if (self.new is None) == (self.pretrained is None):
            raise ConfigError("A world model needs either `new` or `pretrained`.")
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"objective={self.objective!r}: {suggestion(self.objective, OBJECTIVES)}.")
        if self.control_type not in ("map", "vector"):
            raise ConfigError(f"control_type={self.control_type!r}; allowed: 'map', 'vector'.")
        if not self.units or not all(0 < unit < math.inf for unit in self.units):
            raise ConfigError(f"units={list(self.units)}; they must be positive and finite.")
        if self.validation_windows < 0:
            raise ConfigError(f"validation_windows={self.validation_windows}; it must be 0 or more.")
        if self.new is not None and "window" not in self.new:
            raise ConfigError("new.window is missing; the data's windows are made to fit it.")


class LatentWindows:
    """Windows of latents with their controls, as `fit` asks for them.

    Args:
        episodes: the data set.
        code: encodes its frames once; `None` leaves batches as frames.
        seed: fixes the draws.
    """

    def __init__(self, episodes: EpisodeDataset, code: BlockCode | None, seed: int) -> None:
        self.episodes, self.seed = episodes, seed
        self.latents: list[torch.Tensor] | None = None
        if code is not None:
            indices = tqdm(range(len(episodes.episodes)), desc="encoding episodes", leave=False)
            self.latents = [self._encode(code, episodes.frames(index)) for index in indices]

    @staticmethod
    def _encode(code: BlockCode, frames: np.ndarray) -> torch.Tensor:
        return code.encode(to_model_pixels(torch.from_numpy(frames)[None]))[0].half()

    def window(self, index: int) -> dict[str, torch.Tensor]:
        """Window `index` of the data set: `controls`, and `latents` or `frames`."""
        episode, frame_ids = self.episodes.window_frames(index)
        controls = self.episodes.controls(episode, frame_ids)
        if self.latents is None:
            return {"frames": torch.from_numpy(self.episodes.frames(episode, frame_ids)), "controls": controls}
        return {"latents": self.latents[episode][:, frame_ids].float(), "controls": controls}

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        generator = generator_for(self.seed, step, rank)
        chosen = torch.randint(len(self.episodes), (batch_size,), generator=generator)
        return torch.utils.data.default_collate([self.window(int(index)) for index in chosen])

    def spread(self, count: int) -> dict[str, torch.Tensor]:
        """`count` windows from all over the data set."""
        chosen = np.linspace(0, len(self.episodes) - 1, count).astype(int)
        return torch.utils.data.default_collate([self.window(int(index)) for index in chosen])


def control_encoder(
    config: WorldModelRecipe, episodes: EpisodeDataset, latent_size: tuple[int, int]
) -> ControlEncoder:
    """How the world model reads the controls of a data set."""
    info = episodes.info
    if config.in_world and not _is_one_scene(episodes):
        raise ConfigError(
            f"in_world=true, but {episodes.root} has several scenes, whose coordinates have nothing in common; "
            "allowed: episodes of one scene."
        )
    walk = None
    if config.episodes.controls == "cameras":
        kind: ReversibleControls = PoseControls(CAMERA_SPEC)
        if info.pose_names == PLANAR_POSE:
            walk = _walk(config, episodes)
    elif info.inverse_map is None:
        kind = DeltaControls(episodes.action_spec)
    else:
        kind = ButtonControls(episodes.action_spec, info.inverse_map, config.direction_embedding)
    is_map = config.control_type == "map"
    return ControlEncoder(
        kind,
        config.control_type,
        config.units,
        latent_size if is_map else None,
        info.focal if is_map else None,
        config.in_world,
        walk,
    )


def _walk(config: WorldModelRecipe, episodes: EpisodeDataset) -> Walk:
    """How keys move the camera: where there is one scene only, on the floor that its episodes covered."""
    floor = None
    if _is_one_scene(episodes):
        places = np.concatenate([episodes.poses(index)[:, :2] for index in range(len(episodes.episodes))])
        floor = FloorPlan.visited(places, config.units[0])
    return Walk(episodes.action_spec, floor)


def _is_one_scene(episodes: EpisodeDataset) -> bool:
    return len({record.scene_seed for record in episodes.episodes}) == 1


def write_controls(folder: Path, encoder: ControlEncoder, episodes: EpisodeDataset) -> None:
    """Leave beside the run what a pipeline needs to know of the data."""
    known = {"controls": encoder.to_dict(), "fps": episodes.info.fps, "world": episodes.info.world}
    with atomic_write(folder / CONTROLS_NAME) as path:
        path.write_text(json.dumps(known, indent=1))


@training_recipe(WorldModelRecipe)
def train_world_model(config: WorldModelRecipe) -> tuple[TrainingMethod, Any]:
    """Train a world model by Teacher Forcing, Diffusion Forcing, LIVE or one of its ablations."""
    parts = [
        (config.episodes.code, "the recipe frame_autoencoder"),
        (config.episodes.vae, "the recipe frame_autoencoder or `vidgen convert live-vae`"),
        (config.pretrained, "the recipe world_model or `vidgen convert`"),
    ]
    require_parts([(path, maker) for path, maker in parts if path is not None])
    code = vae = None
    if config.episodes.code is not None:
        code = BlockCode.load(config.episodes.code)
        channels, stride = code.decoder.shape[0], code.spatial
    else:
        vae = AutoencoderKL.from_pretrained(config.episodes.vae)
        channels, stride = vae.config.latent_channels, stride_of(vae)

    # 1. Transformer, whose window decides the data's
    window = config.new["window"] if config.new else None
    transformer = None
    if config.pretrained is not None:
        transformer = WorldDiT.from_pretrained(config.pretrained)
        window = transformer.config.window
    sets = {
        split: EpisodeDataset(
            config.episodes.root,
            split,
            window,
            config.episodes.skip,
            config.episodes.controls,
            config.episodes.num_sparse,
            config.train.seed,
            in_memory=False,
        )
        for split in ("train", "validation")
    }
    height, width = sets["train"].info.size
    if height % stride or width % stride:
        raise ConfigError(f"frames are {width}x{height} pixels; the autoencoder's stride is {stride}.")
    encoder = control_encoder(config, sets["train"], (height // stride, width // stride))
    if transformer is None:
        torch.manual_seed(config.train.seed)  # initial weights are drawn from the global generator
        transformer = WorldDiT(
            in_channels=channels,
            control_type=encoder.control_type,
            control_dim=encoder.control_dim,
            control_frame=encoder.control_frame,
            direction_embedding=config.direction_embedding,
            **config.new,
        )
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if config.compile:
        # Static shapes, a graph per number of prompt frames: dynamic ones make slower code.
        transformer.compile_repeated_blocks(dynamic=False)

    if PartialState().is_main_process:
        write_controls(Path(config.train.output_dir), encoder, sets["train"])

    # 2. Objective
    arguments = [window] if config.curriculum is None else [window, config.curriculum]
    validation = None
    if config.validation_windows:
        held_out = LatentWindows(sets["validation"], code, config.train.seed).spread(config.validation_windows)
        validation = lambda: held_out  # noqa: E731
    method = LiveMethod(
        transformer,
        OBJECTIVES[config.objective](*arguments),
        reverse_controls=encoder.reverse,
        encode_controls=encoder,
        rollout_config=config.rollout,
        total_steps=config.train.max_steps,
        seed=config.train.seed,
        validation=validation,
        vae=vae,
    )
    return method, LatentWindows(sets["train"], code, config.train.seed)


# --- 3. the whole ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AssembleWorldModelRecipe:
    """Where the trained parts are (run folders) and how the model samples.

    Attributes:
        output_dir: the diffusers folder to write; an existing one is replaced.
        vae: run folder of the frame autoencoder.
        transformer: run folders of the transformer's stages; the last one's is taken.
        baselines: run folders of transformers of other objectives, put beside it to be compared with.
        num_inference_steps: steps of the sampler per frame.
        shift: of the sampler's levels.
        solver_order: of the sampler.
        context_sigma: noise level of context frames; the default is LIVE's, the next-to-last level of 18 steps. That
            of a few steps would drown the context.
        episodes: data set from which the starts that come with the model are taken.
        num_starts: how many; each is `start_frames` frames.
        start_frames: real frames of a start.
    """

    output_dir: str
    vae: str
    transformer: tuple[str, ...]
    episodes: str
    num_inference_steps: int = 4
    shift: float = 3.0
    solver_order: int = 2
    context_sigma: float = 0.15
    num_starts: int = 8
    start_frames: int = 8
    baselines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.transformer:
            raise ConfigError("transformer is empty; name the run folder of a world model.")
        for name in ("num_inference_steps", "num_starts", "start_frames"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be 1 or more.")


def assemble_world_model(source: str | None, overrides: list[str]) -> Path:
    """Write the pipeline folder, some starts and a model card from the trained parts."""
    config = load_config(AssembleWorldModelRecipe, source, overrides)
    last = Path(config.transformer[-1])
    transformer, vae = last / "weights" / "transformer", Path(config.vae) / "weights" / "vae"
    require_parts(
        [
            (vae, "the recipe frame_autoencoder"),
            *((Path(run) / "metrics.jsonl", "the recipe world_model") for run in config.transformer),
            (last / CONTROLS_NAME, "the recipe world_model"),
            (transformer, "the recipe world_model"),
            *((Path(run) / "weights" / "transformer", "the recipe world_model") for run in config.baselines),
        ]
    )
    baselines = _open_baselines(config, last)
    known = json.loads((last / CONTROLS_NAME).read_text())
    pipeline = WorldModelPipeline(
        transformer=WorldDiT.from_pretrained(transformer),
        vae=AutoencoderKL.from_pretrained(vae),
        scheduler=flow_sampler(config.num_inference_steps, config.shift, config.solver_order),
        controls=known["controls"],
        fps=known["fps"],
        num_inference_steps=config.num_inference_steps,
        context_sigma=config.context_sigma,
    )
    window = pipeline.transformer.config.window
    if config.start_frames >= window:
        raise ConfigError(
            f"start_frames={config.start_frames}; the transformer sees {window - 1} beside a new one; allowed: at "
            f"most {window - 1}."
        )
    # Stored in half the bytes; whoever loads them chooses the type to compute in, float32 by default.
    for model in (pipeline.transformer, pipeline.vae, *baselines.values()):
        model.to(torch.float16)
    kind = "cameras" if isinstance(pipeline.control_encoder.controls, PoseControls) else "actions"
    starts = EpisodeDataset(config.episodes, "validation", config.start_frames, controls=kind, in_memory=False)
    chosen = _telling_windows(starts, config.num_starts)
    output_dir = Path(config.output_dir)
    with atomic_directory(output_dir) as folder:
        pipeline.save_pretrained(folder, safe_serialization=True)
        for forcing, baseline in baselines.items():
            baseline.save_pretrained(folder / BASELINES_NAME / forcing)
        windows = [starts[index] for index in chosen]
        save_safetensors(
            {name: torch.stack([window[name] for window in windows]) for name in ("frames", "controls")},
            folder / STARTS_NAME,
        )
        (folder / "README.md").write_text(_model_card(config, pipeline, known["world"]))
    return output_dir


def _open_baselines(config: AssembleWorldModelRecipe, model: Path) -> dict[str, WorldDiT]:
    """The transformers to be compared with, by their objectives."""
    controls, baselines = (model / CONTROLS_NAME).read_text(), {}
    for run in config.baselines:
        transformer = WorldDiT.from_pretrained(Path(run) / "weights" / "transformer")
        forcing = transformer.config.forcing
        if forcing is None or forcing in baselines:
            raise ConfigError(f"baselines: {run} was trained with {forcing}; allowed: one of each objective.")
        if (Path(run) / CONTROLS_NAME).read_text() != controls:
            raise ConfigError(f"baselines: {run} has other controls than {model}, so the same keys can't steer it.")
        baselines[forcing] = transformer
    return baselines


def _telling_windows(starts: EpisodeDataset, count: int) -> list[int]:
    """Windows from all over a data set in which most is to be seen: a blank wall doesn't tell where one is.

    Of each of `count` equal parts, that of up to 64 windows whose frames have the largest spread of colors.
    """
    if count > len(starts):
        raise ConfigError(f"num_starts={count}; {starts.root} has {len(starts)} windows for validation.")
    chosen = []
    for part in np.array_split(np.arange(len(starts)), count):
        tried = part[:: max(1, len(part) // 64)]
        spread = [starts[int(index)]["frames"].double().std(dim=(1, 2)).mean() for index in tried]
        chosen.append(int(tried[int(np.argmax(spread))]))
    return chosen


def _model_card(config: AssembleWorldModelRecipe, pipeline: WorldModelPipeline, world: str) -> str:
    sizes = ", ".join(f"{name} {count:.2f} M" for name, count in parameter_counts(pipeline).items())
    actions = pipeline.control_encoder.actions
    limits = (
        "it knows one level. That its rollouts don't drift is an observation at the lengths that\n"
        "`eval/live.py` measures, not a guarantee."
    )
    if pipeline.control_encoder.in_world:
        limits = (
            "it knows one level, and is told where in that level it stands: other first frames can't lead it to\n"
            "another one. `eval/world_walks.py` measures whether it keeps showing what is there."
        )
    return f"""---
library_name: diffusers
license: apache-2.0
---

# {Path(config.output_dir).name}

A world model of `{world}` small enough to play on a bare CPU: one frame at a time, {config.num_inference_steps}
denoising steps each, steered by {", ".join(actions.names)}. `vidgen world play` plays it.

- **Parameters**: {sizes}. Context: the last {pipeline.transformer.config.window - 1} frames.
- **Data**: recorded by `vidgen world record`; nothing was downloaded.
- **Recipe**: `training/` and `configs/live/`, by the names of the table's first column.

| part | steps | minutes | last training loss | held-out |
|---|---|---|---|---|
{run_table((config.vae, *config.transformer, *config.baselines))}

**Limits**: {limits}
"""
