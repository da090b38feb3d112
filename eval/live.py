"""Does LIVE keep long rollouts of a world model from drifting? Objectives compared from one common base.

    python eval/live.py                                      # both worlds, 3 seeds
    python eval/live.py --worlds room --seeds 3 --check      # one fresh seed
    python eval/live.py --seeds 0 --set df_steps=100 arm_steps=20

A base is trained by Diffusion Forcing; every arm continues it with the same data, batches, learning rate and steps:

* `df`: Diffusion Forcing goes on. `df_time`: the same for as many steps as fit in the time of `live`, by the seconds
  of both kinds of step taken in turns, so that a busy machine slows both.
* `tf`: goes on with Teacher Forcing, from the same base and not from scratch.
* `live`: LIVE (arXiv 2602.03747), joint rollouts, p falls from T to T/2 and 2.
* `no_cycle`, `live_no_noise`, `live_fixed_noise`, `live_p1`: its ablations, of which `--ablations` chooses the last 3.

Held-out walks through known scenes tell what each frame should have shown. All arms get the same prompts of one frame,
controls and noise; context has the sampler's next-to-last noise level, for `tf` none. Beside the arms stand `truth`,
the true frames after the code that models see pictures through, and `elsewhere`, real frames of other walks: the score
of a model that draws perfectly and is lost.

Before the arms the base has to show that it knows the world (the competence gate). A seed whose base does not is void:
it is reported, and it fails `--check`.

Bars, for every seed, in the last two windows of the horizon: Fréchet distance of LIVE at most 0.75 of DF's and 0.85 of
TF's, PSNR at least DF's; action sensitivity at least 70 % of DF's; without the cycle the distance is larger. What is
said of DF holds for both, `df` and `df_time`.

Pictures are coded by their main components (`vidgen.train.block_code`), 4 x 4 pixels at a time. A network as narrow as
this one can't predict the velocity of whole pixel patches: 8 x 8 x 3 numbers don't pass through 128 channels.

Every trained arm is a run folder under `--work` and every finished measurement a file beside it, so an interrupted
benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from _benchmark import (
    WorkFolder,
    add_merge,
    add_out,
    add_seeds,
    add_sizes,
    check_sizes,
    earlier_results,
    measure_seeds,
    parse_sizes,
    report_progress,
    reports_errors,
    spread,
    write_results,
)
from PIL import Image, ImageDraw
from torch import Tensor

from vidgen.controls import ControlEncoder
from vidgen.data import VideoWriter
from vidgen.forcing.live import (
    NUM_LEVELS,
    CurriculumStage,
    ForcingSchedule,
    LiveMethod,
    RolloutConfig,
    rollout,
)
from vidgen.metrics import (
    FD_WORLD,
    HorizonScores,
    WorldFrechet,
    action_sensitivity,
    cycle_closure,
    drift_slope,
    frame_psnr,
    horizon_bins,
    most_different,
    score_horizon,
    there_and_back,
)
from vidgen.models.world_dit import WorldDiT
from vidgen.runtime.checkpoint import atomic_write, load_safetensors, save_safetensors
from vidgen.runtime.device import derive_seed, generator_for, select_device, set_threads
from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.train import OptimizerConfig, TrainConfig, TrainResult, fit
from vidgen.train.autoencoder import to_model_pixels
from vidgen.train.block_code import BlockCode
from vidgen.worlds.room import RoomWorld
from vidgen.worlds.vizdoom_world import VizDoomWorld

# Walks of one seed: what is trained on, what is tested, and other real frames.
TRAIN, TEST, ELSEWHERE = range(3)
SHOWN_VIDEOS, SHOWN_ARMS = 4, ("df", "tf", "live", "no_cycle")
REFERENCES = ("df", "df_time")
ABLATIONS = ("live_no_noise", "live_fixed_noise", "live_p1")
GATE_SIGMA = 0.98
# Shares of the steps at which the number of prompt frames falls.
STAGE_ENDS = (0.15, 0.4)
TIMED_STEPS = 3
# Fixed before anything was measured.
METRICS = {
    "reference": "frames as rendered, never as the code shows them",
    "frames": "frames of the model; the prompt, frame 0, is left out",
    "psnr": "mean of the dB of single frames",
    "fd": f"{FD_WORLD}, to the true frames of the same walks and the same frames of the horizon",
    "noise": "the same evaluation seed, prompts and controls for all arms",
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Budget of the benchmark; the same for all arms.

    Attributes:
        window: T, frames.
        dim: width of the network.
        layers: its blocks.
        code_channels: numbers per 4 x 4 pixels.
        per_token_controls: 1: the rays of the camera for every token; 0: recorded motion, one vector per frame.
        batch_size: windows.
        df_steps: of the base.
        arm_steps: of each arm.
        df_lr: peak learning rate of the base.
        arm_lr: peak learning rate of the arms.
        rollout_steps: sampler steps of the rollouts in training, which are joint.
        sampler_steps: sampler steps per frame in the test.
        scenes: of a seed, shared by training and test; Doom has one.
        rooms: along each side of a scene.
        train_walks: walks to learn from.
        walk_frames: frames of each.
        sequences: held-out walks.
        horizon: length of the test in windows, even.
    """

    window: int = 8
    dim: int = 128
    layers: int = 4
    code_channels: int = 16
    per_token_controls: int = 1
    batch_size: int = 24
    df_steps: int = 3000
    arm_steps: int = 600
    df_lr: float = 1e-2
    arm_lr: float = 2e-3
    rollout_steps: int = 6
    sampler_steps: int = 6
    scenes: int = 2
    rooms: int = 2
    train_walks: int = 80
    walk_frames: int = 256
    sequences: int = 48
    horizon: int = 8

    def __post_init__(self) -> None:
        check_sizes(self, may_be_zero=("per_token_controls",))
        if self.per_token_controls > 1 or self.window % 4 or self.horizon % 2 or self.dim % 32 or self.sequences < 2:
            raise ConfigError(
                f"per_token_controls={self.per_token_controls}, window={self.window}, horizon={self.horizon}, "
                f"dim={self.dim}, sequences={self.sequences}; allowed: 0 or 1, multiples of 4, 2 and 32, at least 2."
            )
        if self.walk_frames < self.window:
            raise ConfigError(f"walk_frames={self.walk_frames}; allowed: at least window={self.window}.")


@dataclasses.dataclass(frozen=True)
class WorldChoice:
    """A world of the benchmark.

    Attributes:
        open: a context manager of the world.
        skip: poses of a walk per frame; Doom's own steps change too little in 32 pixels to tell controls apart.
        package: what has to be installed.
    """

    open: Callable[[Sizes], contextlib.AbstractContextManager[Any]]
    skip: int = 1
    package: str | None = None


WORLDS = {
    "room": WorldChoice(lambda sizes: contextlib.nullcontext(RoomWorld(32, rooms=(sizes.rooms, sizes.rooms)))),
    "vizdoom": WorldChoice(lambda sizes: VizDoomWorld(32), skip=2, package="vizdoom"),
}


# --- data --------------------------------------------------------------------------------------------------------


class WalkData:
    """Walks through the scenes of one seed, rendered once, and how a model sees them.

    Args:
        choice: the world.
        sizes: budget.
        seed: of scenes and walks.
        path: file that keeps the rendered frames.
    """

    def __init__(self, choice: WorldChoice, sizes: Sizes, seed: int, path: Path) -> None:
        self.sizes, self.seed, self.skip = sizes, seed, choice.skip
        if not path.exists():
            with choice.open(sizes) as world:
                save_safetensors(self._render(world), path)
        self.arrays = {name: tensor.numpy() for name, tensor in load_safetensors(path)[0].items()}
        with choice.open(sizes) as world:
            self.walk, self.turn = (choice.skip * size for size in (world.motion.walk, world.motion.turn))
            cells = world.size // 4
            self.encoder = ControlEncoder(
                world.delta_controls,
                "map" if sizes.per_token_controls else "vector",
                (self.walk,) if sizes.per_token_controls else self.scale,
                latent_size=(cells, cells) if sizes.per_token_controls else None,
                focal=world.focal,
            )
        self.train_frames, self.test_frames = self.arrays["train_frames"], self.arrays["test_frames"]
        self.train_controls, self.test_controls = (
            torch.from_numpy(self.arrays[f"{part}_controls"]) for part in ("train", "test")
        )
        self.distance = WorldFrechet.from_frames(self.train_frames)
        sample = torch.from_numpy(self.train_frames[:, :: max(1, sizes.walk_frames // 32)])
        self.code = BlockCode.fit(to_model_pixels(sample), sizes.code_channels, temporal=1, spatial=4, seed=seed)
        self.train_latents = torch.cat([self.encode(walk[None]) for walk in self.train_frames])

    @property
    def scale(self) -> tuple[float, float, float]:
        """A step of each control."""
        return self.walk, self.walk, self.turn

    def _render(self, world: Any) -> dict[str, Tensor]:
        sizes, scenes = self.sizes, [world.scene(100 * self.seed + index) for index in range(self.sizes.scenes)]
        horizon = sizes.horizon * sizes.window
        parts = {"train": (TRAIN, sizes.train_walks, sizes.walk_frames)}
        parts |= {"test": (TEST, sizes.sequences, horizon), "elsewhere": (ELSEWHERE, sizes.sequences, horizon)}
        arrays: dict[str, list[np.ndarray]] = {}
        for name, (number, num_walks, num_frames) in parts.items():
            for index in range(num_walks):
                report_progress(f"{world.name}, seed {self.seed}: {name} walk {index + 1} of {num_walks}")
                scene = scenes[index % len(scenes)]
                walk_seed = derive_seed(self.seed, number, index)
                poses = world.explore(scene, num_frames * self.skip, walk_seed)[:: self.skip]
                arrays.setdefault(f"{name}_frames", []).append(world.render(scene, poses))
                controls = world.deltas(poses).numpy()
                arrays.setdefault(f"{name}_controls", []).append(controls)
                if name == "test":
                    # What another action than the last of the window would have shown: a turn away from what was done.
                    last = sizes.window - 1
                    turn = self.skip * world.motion.turn * (-1 if controls[last, 2] > 0 else 1)
                    pose = poses[last - 1] + np.array([0, 0, turn])
                    arrays.setdefault("other_action", []).append(world.render(scene, pose[None])[0])
        return {name: torch.from_numpy(np.stack(values)) for name, values in arrays.items()}

    def encode(self, frames: np.ndarray) -> Tensor:
        """Latents `(batch, channels, frames, 8, 8)` of uint8 `(batch, frames, 32, 32, 3)`."""
        return self.code.encode(to_model_pixels(torch.from_numpy(frames)))

    def decode(self, latents: Tensor) -> np.ndarray:
        """uint8 frames of latents."""
        pixels = self.code.decode(latents.cpu()).clamp(-1, 1)
        return ((pixels + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1).numpy()

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, Tensor]:
        """Random windows, as `fit` asks for them."""
        window = self.sizes.window
        random = np.random.default_rng(derive_seed(self.seed, step, rank))
        walks = random.integers(self.train_latents.shape[0], size=batch_size)
        starts = random.integers(self.train_latents.shape[2] - window + 1, size=batch_size)
        pairs = list(zip(walks.tolist(), starts.tolist(), strict=True))
        return {
            "latents": torch.stack([self.train_latents[walk, :, start : start + window] for walk, start in pairs]),
            "controls": torch.stack([self.train_controls[walk, start : start + window] for walk, start in pairs]),
        }


# --- training ----------------------------------------------------------------------------------------------------


def new_transformer(data: WalkData) -> WorldDiT:
    sizes = data.sizes
    torch.manual_seed(data.seed)
    return WorldDiT(
        patch_size=(2, 2),
        num_attention_heads=sizes.dim // 32,
        attention_head_dim=32,
        in_channels=sizes.code_channels,
        num_layers=sizes.layers,
        control_type=data.encoder.control_type,
        control_dim=data.encoder.control_dim,
        control_frame=data.encoder.control_frame,
        window=sizes.window,
        rope_dims=(8, 12, 12),
        freq_dim=64,
    )


def schedules(window: int) -> dict[str, ForcingSchedule]:
    """The objective of each arm."""
    first, second = STAGE_ENDS
    curriculum = [CurriculumStage(window, first), CurriculumStage(window // 2, second), CurriculumStage(2)]
    df = ForcingSchedule.diffusion_forcing(window)
    return {
        "df": df,
        "tf": ForcingSchedule.teacher_forcing(window),
        "live": ForcingSchedule.live(window, curriculum),
        "df_time": df,
        "no_cycle": ForcingSchedule.no_cycle(window, curriculum),
        "live_no_noise": ForcingSchedule.live_no_noise(window, curriculum),
        "live_fixed_noise": ForcingSchedule.live_fixed_noise(window, curriculum),
        "live_p1": ForcingSchedule.live(window, 1),
    }


def make_method(transformer: WorldDiT, schedule: ForcingSchedule, data: WalkData, steps: int) -> LiveMethod:
    return LiveMethod(
        transformer,
        schedule,
        data.encoder.reverse,
        data.encoder,
        RolloutConfig(steps=data.sizes.rollout_steps),
        total_steps=steps,
        seed=data.seed,
    )


def train(
    folder: Path, transformer: WorldDiT, schedule: ForcingSchedule, data: WalkData, steps: int, lr: float
) -> TrainResult:
    """Train by one objective."""
    optimizer = OptimizerConfig(
        kind="muon",
        lr=lr,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        warmup_steps=min(50, steps // 10),
        schedule="cosine",
        min_lr_ratio=0.05,
    )
    config = TrainConfig(
        output_dir=str(folder),
        max_steps=steps,
        batch_size=data.sizes.batch_size,
        optimizers={"transformer": optimizer},
        seed=data.seed,
        log_every=20,
    )
    return fit(make_method(transformer, schedule, data, steps), data, config)


def steps_of_equal_time(data: WalkData) -> dict[str, Any]:
    """How many steps of Diffusion Forcing take as long as LIVE's, measured in turns.

    Returns:
        `steps`, and the median `seconds` of a step of Diffusion Forcing and of each stage of LIVE.
    """
    sizes, device = data.sizes, select_device()
    arms = schedules(sizes.window)
    methods = {
        name: make_method(new_transformer(data).to(device), arms[name], data, sizes.arm_steps)
        for name in ("df", "live")
    }
    # The first step of each stage.
    stages = [0, *(math.ceil(end * sizes.arm_steps) for end in STAGE_ENDS)]
    kinds = {"df": (methods["df"], 0)}
    kinds |= {f"live, stage {index + 1}": (methods["live"], step) for index, step in enumerate(stages)}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(TIMED_STEPS + 1):
        batch = {name: tensor.to(device) for name, tensor in data.batch(turn, 0, 1, sizes.batch_size).items()}
        for kind, (method, step) in kinds.items():
            began = time.perf_counter()
            loss = method.training_step(batch, step, generator_for(turn, device=device)).losses["transformer"]
            loss.backward()
            float(loss.detach())  # waits for the device
            if turn:  # the first one sets things up
                seconds[kind].append(time.perf_counter() - began)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    shares = np.diff([0.0, *STAGE_ENDS, 1.0])
    live = sum(share * value for share, value in zip(shares, list(medians.values())[1:], strict=True))
    return {"steps": max(1, round(sizes.arm_steps * float(live) / medians["df"])), "seconds": medians}


def load_transformer(folder: Path) -> WorldDiT:
    return WorldDiT.from_pretrained(folder / "weights" / "transformer").to(select_device()).eval()


# --- sampling ----------------------------------------------------------------------------------------------------


def generate(transformer: WorldDiT, data: WalkData, prompts: Tensor, controls: Tensor, seed: int) -> np.ndarray:
    """Videos frame by frame, each from the newest T - 1 frames.

    Args:
        transformer: the model.
        data: its code and controls.
        prompts: `(batch, channels, p, 8, 8)` clean latents.
        controls: `(batch, frames, columns)` of all frames, those of the prompts included.
        seed: of the noise.

    Returns:
        uint8 `(batch, frames, 32, 32, 3)`, the prompts as the code shows them.
    """
    window, device = transformer.config.window, transformer.device
    clean = transformer.config.forcing == "teacher_forcing"
    config = RolloutConfig("framewise", data.sizes.sampler_steps, context_sigma=0.0 if clean else None)
    video = prompts.to(device)
    for frame in range(prompts.shape[2], controls.shape[1]):
        start = max(0, frame - window + 1)
        seen = data.encoder(controls[:, start : frame + 1]).to(device)
        generator = generator_for(seed, frame, device=device)
        # A rollout from all frames of a window but the last.
        newest = rollout(transformer, video[:, :, start:], seen, config, generator)[:, :, -1:]
        if not newest.isfinite().all():
            raise VidgenError(f"Frame {frame} of the generated videos is not finite.")
        video = torch.cat([video, newest], dim=2)
    return data.decode(video)


@torch.no_grad()
def first_guess(transformer: WorldDiT, data: WalkData, frames: np.ndarray, controls: Tensor, seed: int) -> np.ndarray:
    """The clean last frame as predicted from almost pure noise, with clean frames before it.

    Args:
        transformer: the model.
        data: its code and controls.
        frames: uint8 `(batch, frames, 32, 32, 3)`.
        controls: `(batch, frames, columns)`.
        seed: of the noise.

    Returns:
        uint8 `(batch, 1, 32, 32, 3)`.
    """
    device = transformer.device
    latents = data.encode(frames).to(device)
    noise = torch.randn(latents[:, :, -1].shape, generator=generator_for(seed, 1, device=device), device=device)
    latents[:, :, -1] = (1 - GATE_SIGMA) * latents[:, :, -1] + GATE_SIGMA * noise
    timestep = torch.zeros(latents.shape[0], latents.shape[2], device=device)
    timestep[:, -1] = NUM_LEVELS * GATE_SIGMA
    velocity = transformer(latents, timestep, data.encoder(controls).to(device)).sample
    return data.decode((latents - GATE_SIGMA * velocity)[:, :, -1:])


# --- measuring ---------------------------------------------------------------------------------------------------


def competence(transformer: WorldDiT, data: WalkData, sensitivity: float) -> dict[str, Any]:
    """Does the base know the world? The spec's gate, on the first window of the held-out walks.

    Returns:
        What was measured and needed, in dB, and whether all of it was passed.
    """
    window, seed = data.sizes.window, derive_seed(data.seed, 11)
    frames, controls = data.test_frames[:, :window], data.test_controls[:, :window]
    truth = frames[:, -1]
    sample = generate(transformer, data, data.encode(frames[:, :-1]), controls, seed)[:, -1]
    one_step = float(frame_psnr(sample, truth).mean())
    other = float(frame_psnr(sample, data.arrays["other_action"]).mean())
    alone = controls[:, -1:]
    guesses = (
        first_guess(transformer, data, frames, controls, seed),
        first_guess(transformer, data, frames[:, -1:], alone, seed),
    )
    informed, blind = (float(frame_psnr(guess[:, 0], truth).mean()) for guess in guesses)
    measured = {
        "one step from real frames": (one_step, 20.0),
        "one step, above the truth of another action": (one_step - other, 6.0),
        f"first guess at sigma {GATE_SIGMA}, above one without context": (informed - blind, 5.0),
        "action sensitivity": (sensitivity, 3.0),
    }
    return {
        "measured": {name: {"value": value, "needed": needed} for name, (value, needed) in measured.items()},
        "world": {
            "truth against the truth of another action": float(frame_psnr(truth, data.arrays["other_action"]).mean()),
            "truth against the frame before": float(frame_psnr(truth, frames[:, -2]).mean()),
            "truth after the code": float(frame_psnr(data.decode(data.encode(truth[:, None]))[:, 0], truth).mean()),
        },
        "passed": all(value >= needed for value, needed in measured.values()),
    }


def summarize(scores: HorizonScores, window: int) -> dict[str, Any]:
    """Scores, and how fast they fall from the second window on, per window."""
    return {
        **dataclasses.asdict(scores),
        "psnr_slope": drift_slope(scores.psnr_curve, window, window),
        "ssim_slope": drift_slope(scores.ssim_curve, window, window),
        "fd_growth": scores.fd[-1] / max(scores.fd[0], 1e-9),
    }


def sensitivity_of(transformer: WorldDiT, data: WalkData, right: np.ndarray, seed: int) -> float:
    """Action sensitivity of a model whose videos with the right controls are given."""
    controls = data.test_controls
    wrong_rows = most_different(controls.numpy(), 4, data.scale)
    wrong = generate(transformer, data, data.encode(data.test_frames[:, :1]), controls[wrong_rows, :5], seed)
    return action_sensitivity(right, wrong, data.test_frames)


def measure(transformer: WorldDiT, data: WalkData) -> tuple[dict[str, Any], np.ndarray]:
    """Everything about one arm, and its videos."""
    sizes, seed = data.sizes, derive_seed(data.seed, 12)
    bins = horizon_bins(sizes.window, sizes.horizon)
    prompts, controls = data.encode(data.test_frames[:, :1]), data.test_controls
    videos = generate(transformer, data, prompts, controls, seed)
    closures = {}
    # Within the window the prompt is still in view when the path closes, beyond it has long left.
    for name, away in (("within", (sizes.window - 2) // 2), ("beyond", sizes.window)):
        path = there_and_back(controls[:, : away + 1], data.encoder.reverse)
        closures[f"cycle_closure_{name}"] = cycle_closure(generate(transformer, data, prompts, path, seed))
    return {
        **summarize(score_horizon(videos, data.test_frames, bins, data.distance), sizes.window),
        "action_sensitivity": sensitivity_of(transformer, data, videos, seed),
        **closures,
    }, videos


def measure_references(data: WalkData) -> dict[str, Any]:
    """The truth as the code shows it, and real frames of other walks."""
    bins = horizon_bins(data.sizes.window, data.sizes.horizon)
    videos = {"truth": data.decode(data.encode(data.test_frames)), "elsewhere": data.arrays["elsewhere_frames"]}
    return {
        name: summarize(score_horizon(frames, data.test_frames, bins, data.distance), data.sizes.window)
        for name, frames in videos.items()
    }


class Bench(WorkFolder):
    """One world and seed: what is measured already is read from its folder."""

    def __init__(self, world: str, sizes: Sizes, seed: int, work: Path) -> None:
        super().__init__(work / f"{world}_{seed}", dataclasses.asdict(sizes))
        self.world, self.sizes, self.seed = world, sizes, seed
        self._data: WalkData | None = None

    @property
    def data(self) -> WalkData:
        if self._data is None:
            self._data = WalkData(WORLDS[self.world], self.sizes, self.seed, self.folder / "walks.safetensors")
        return self._data

    def run(self, ablations: Sequence[str]) -> dict[str, Any]:
        """Base, gate and all arms; ablations that aren't asked for only where they are measured already."""
        base = self.stored("base", self._base)
        print_gate(base["gate"])
        arms = {"base": base["measured"]}
        for name in schedules(self.sizes.window):
            if name not in ABLATIONS or name in ablations or self.holds(name):
                arms[name] = self.stored(name, lambda name=name: self._arm(name))
        arms |= self.stored("references", lambda: measure_references(self.data))
        return {"gate": base["gate"], "arms": arms}

    def _base(self) -> dict[str, Any]:
        print(f"{self.world}, seed {self.seed}: base", flush=True)
        folder = self.folder / "base"
        schedule = ForcingSchedule.diffusion_forcing(self.sizes.window)
        result = train(folder, new_transformer(self.data), schedule, self.data, self.sizes.df_steps, self.sizes.df_lr)
        transformer = load_transformer(folder)
        measured, _ = measure(transformer, self.data)
        gate = competence(transformer, self.data, measured["action_sensitivity"])
        return {"gate": gate, "measured": {**measured, "steps": result.step, "seconds": result.elapsed_seconds}}

    def _arm(self, name: str) -> dict[str, Any]:
        print(f"{self.world}, seed {self.seed}: {name}", flush=True)
        steps = self.sizes.arm_steps
        if name == "df_time":
            steps = self.stored("equal_time", lambda: steps_of_equal_time(self.data))["steps"]
        folder, base = self.folder / name, WorldDiT.from_pretrained(self.folder / "base" / "weights" / "transformer")
        result = train(folder, base, schedules(self.sizes.window)[name], self.data, steps, self.sizes.arm_lr)
        measured, videos = measure(load_transformer(folder), self.data)
        save_safetensors({"frames": torch.from_numpy(videos[:SHOWN_VIDEOS].copy())}, folder / "videos.safetensors")
        return {**measured, "steps": result.step, "seconds": result.elapsed_seconds}

    def write_video(self, path: Path) -> None:
        """Truth and arms side by side, one held-out walk per row."""
        columns = {"truth": self.data.test_frames[:SHOWN_VIDEOS]}
        for arm in SHOWN_ARMS:
            columns[arm] = load_safetensors(self.folder / arm / "videos.safetensors")[0]["frames"].numpy()
        scale = 4
        rows = [np.concatenate(videos, axis=2) for videos in zip(*columns.values(), strict=True)]
        pictures = np.concatenate(rows, axis=1).repeat(scale, axis=1).repeat(scale, axis=2)
        header = Image.new("RGB", (pictures.shape[2], 16))
        for index, name in enumerate(columns):
            ImageDraw.Draw(header).text((index * pictures.shape[2] // len(columns) + 4, 2), name, fill="white")
        headers = np.broadcast_to(np.asarray(header), (len(pictures), *np.asarray(header).shape))
        with VideoWriter(path, fps=8) as writer:
            writer.append(np.concatenate([headers, pictures], axis=1))


# --- report ------------------------------------------------------------------------------------------------------


def print_gate(gate: dict[str, Any]) -> None:
    print("competence gate: " + ("passed" if gate["passed"] else "FAILED, this seed is void"))
    for name, row in gate["measured"].items():
        verdict = "" if row["value"] >= row["needed"] else "  FAIL"
        print(f"  {name}: {row['value']:.2f} dB, needed {row['needed']:g}{verdict}", flush=True)


def claims(world: str, runs: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars, each of which every seed has to reach."""
    claimed = [("the base is competent", lambda arms, run: float(run["gate"]["passed"]), ">=", 1.0)]

    def ratio(key: str, one: str, other: str) -> Callable[[dict[str, Any], dict[str, Any]], float]:
        return lambda arms, run: last(arms[one][key]) / max(last(arms[other][key]), 1e-9)

    for reference in REFERENCES:
        claimed += [
            (f"{FD_WORLD}, last windows: live / {reference}", ratio("fd", "live", reference), "<=", 0.75),
            (
                f"PSNR, last windows: live - {reference} (dB)",
                lambda arms, run, reference=reference: arms["live"]["psnr"][-1] - arms[reference]["psnr"][-1],
                ">=",
                0.0,
            ),
            (
                f"action sensitivity: live / {reference}",
                ratio("action_sensitivity", "live", reference),
                ">=",
                0.7,
            ),
        ]
    claimed += [
        (f"{FD_WORLD}, last windows: live / tf", ratio("fd", "live", "tf"), "<=", 0.85),
        (f"{FD_WORLD}, last windows: no_cycle / live", ratio("fd", "no_cycle", "live"), ">", 1.0),
    ]
    reached = {"<=": lambda value, bar: value <= bar, ">=": lambda value, bar: value >= bar}
    reached[">"] = lambda value, bar: value > bar
    results = []
    for name, measure_of, relation, bar in claimed:
        values = {str(seed): measure_of(run["arms"], run) for seed, run in runs.items()}
        results.append(
            {
                "world": world,
                "claim": name,
                "by_seed": values,
                "relation": relation,
                "bar": bar,
                "passed": all(reached[relation](value, bar) for value in values.values()),
            }
        )
    return results


def last(value: float | list[float]) -> float:
    return value[-1] if isinstance(value, list) else value


# Title of a column: what it shows, of curves the last bin, and its digits.
COLUMNS = {
    "action sensitivity, dB": ("action_sensitivity", 2),
    "cycle closure within the window, dB": ("cycle_closure_within", 2),
    "beyond it, dB": ("cycle_closure_beyond", 2),
    "motion / truth, last": ("motion", 2),
    "sharpness / truth, last": ("sharpness", 2),
    "saturation / truth, last": ("saturation", 2),
    "PSNR slope, dB per window": ("psnr_slope", 3),
    "fd last / first": ("fd_growth", 2),
    "steps": ("steps", 0),
    "seconds": ("seconds", 0),
}


def arms_table(runs: list[dict[str, Any]], arms: Sequence[str]) -> str:
    """Curves in bins, then what tells a good video from a flat one."""
    bins = runs[0]["arms"]["truth"]["bins"]
    names = [f"{start}–{stop - 1}" for start, stop in bins]
    measured_arms = {}
    for arm in arms:
        measured = [run["arms"][arm] for run in runs if arm in run["arms"]]
        measured_arms[arm if len(measured) == len(runs) else f"{arm}, {len(measured)} of {len(runs)} seeds"] = measured
    lines = []
    for title, key, digits in ((FD_WORLD, "fd", 2), ("PSNR, dB", "psnr", 2), ("SSIM", "ssim", 3)):
        lines += [f"| {title}, frames | " + " | ".join(names) + " |", "|---" * (len(bins) + 1) + "|"]
        for arm, measured in measured_arms.items():
            cells = [spread([one[key][index] for one in measured], digits) for index in range(len(bins))]
            lines.append(f"| {arm} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["| arm | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for arm, measured in measured_arms.items():
        # The truth was not trained and takes no controls.
        cells = [
            spread([last(one[key]) for one in measured], digits) if key in measured[0] else "–"
            for key, digits in COLUMNS.values()
        ]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gate_table(runs: dict[int, dict[str, Any]]) -> str:
    lines = ["| competence gate of the base, dB | needed | " + " | ".join(f"seed {seed}" for seed in runs) + " |"]
    lines.append("|---" * (len(runs) + 2) + "|")
    gates = [run["gate"] for run in runs.values()]
    for name, row in gates[0]["measured"].items():
        cells = [f"{gate['measured'][name]['value']:.2f}" for gate in gates]
        lines.append(f"| {name} | {row['needed']:g} | " + " | ".join(cells) + " |")
    for name in gates[0]["world"]:
        lines.append(f"| world: {name} | – | " + " | ".join(f"{gate['world'][name]:.2f}" for gate in gates) + " |")
    lines.append("| passed | | " + " | ".join("yes" if gate["passed"] else "NO: void" for gate in gates) + " |")
    return "\n".join(lines)


def claims_table(results: list[dict[str, Any]]) -> str:
    lines = ["| bar, for every seed | mean (range) | bar | |", "|---|---|---|---|"]
    for claim in results:
        verdict = "pass" if claim["passed"] else "FAIL"
        value = spread(list(claim["by_seed"].values()), 2)
        lines.append(f"| {claim['claim']} | {value} | {claim['relation']} {claim['bar']:g} | {verdict} |")
    return "\n".join(lines)


def plot_curves(runs: list[dict[str, Any]], window: int, path: Path) -> None:
    """PSNR, SSIM and Fréchet distance against the frame, mean and range over seeds."""
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    bins = runs[0]["arms"]["truth"]["bins"]
    middles = [(start + stop - 1) / 2 for start, stop in bins]
    for arm in (*SHOWN_ARMS, "df_time", "truth"):
        style = {"color": "gray", "linestyle": ":"} if arm == "truth" else {}
        for axes, key in zip(panels, ("psnr_curve", "ssim_curve", "fd"), strict=True):
            curves = np.array([run["arms"][arm][key] for run in runs])
            times, curves = (middles, curves) if key == "fd" else (np.arange(1, curves.shape[1]), curves[:, 1:])
            (line,) = axes.plot(times, curves.mean(0), label=arm, marker="o" if key == "fd" else None, **style)
            axes.fill_between(times, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.15)
    for axes, label in zip(panels, ("PSNR, dB", "SSIM", FD_WORLD), strict=True):
        axes.axvline(window, color="black", linewidth=0.6, linestyle="--")
        axes.set(xlabel="frame (dashed: the training window)", ylabel=label)
    panels[0].legend(fontsize=8)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)
    plt.close(figure)


def make_table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    sections = []
    for world, by_seed in results["worlds"].items():
        runs = {int(seed): run for seed, run in by_seed.items()}
        arms = dict.fromkeys(arm for run in runs.values() for arm in run["arms"])
        untrained = ["truth", "elsewhere"]
        equal_steps = [arm for arm in arms if arm not in ("df_time", *untrained)]
        sections += [
            f"## {world}, seeds {', '.join(map(str, runs))}",
            gate_table(runs),
            "### Equal steps",
            arms_table(list(runs.values()), equal_steps + untrained),
            "### Equal time: LIVE, and Diffusion Forcing for as many steps as fit in its time",
            arms_table(list(runs.values()), ["live", "df_time"]),
            "### Bars",
            claims_table([claim for claim in results["claims"] if claim["world"] == world]),
        ]
    sections += [f"{world} was not measured: {reason}" for world, reason in results["skipped"].items()]
    return "\n\n".join(sections) + "\n"


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what isn't measured yet; write results.json, table.md, plots and videos; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS), help="default: all")
    add_seeds(parser)
    parser.add_argument(
        "--ablations", nargs="*", choices=ABLATIONS, default=list(ABLATIONS), help="beside no_cycle; default: all"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/eval/live"), help="default: %(default)s")
    add_out(parser, "live")
    add_merge(parser)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    add_sizes(parser, Sizes)
    options = parser.parse_args(arguments)
    set_threads()

    skipped = {}
    for name in options.worlds:
        package = WORLDS[name].package
        if package is not None and importlib.util.find_spec(package) is None:
            skipped[name] = f'{package} is not installed: pip install "vidgen[worlds]"'
            print(f"{name} is skipped: {skipped[name]}", flush=True)
    sizes = parse_sizes(Sizes, options.set)
    settings = dataclasses.asdict(sizes)
    worlds: dict[str, dict[int, Any]] = {
        name: measure_seeds([], dict, runs)
        for name, runs in earlier_results(options, settings).get("worlds", {}).items()
    }
    for name in options.worlds:
        if name not in skipped:
            benches = {seed: Bench(name, sizes, seed, options.work) for seed in options.seeds}
            worlds[name] = measure_seeds(
                options.seeds,
                lambda seed, benches=benches: benches[seed].run(options.ablations),
                worlds.get(name, {}),
            )
            benches[options.seeds[0]].write_video(options.out / f"{name}.mp4")
    results = {
        "benchmark": "live",
        "sizes": settings,
        "metrics": METRICS,
        "skipped": skipped,
        "claims": [claim for name, runs in worlds.items() for claim in claims(name, runs)],
        "worlds": worlds,
    }
    table = make_table(results)
    write_results(options.out, results, table)
    for name, runs in worlds.items():
        plot_curves(list(runs.values()), sizes.window, options.out / f"{name}_curves.png")
    print(table)
    return int(options.check and not all(claim["passed"] for claim in results["claims"]))


if __name__ == "__main__":
    sys.exit(main())
