"""Does a rolling world model with slow-fast memory show the same room when one turns around?

    python eval/world_revisits.py                              # 3 seeds
    python eval/world_revisits.py --seeds 3 --check            # one fresh seed
    python eval/world_revisits.py --seeds 0 --set steps=200 train_places=100

The camera stands in a textured room of `RoomWorld`, 32 pixels wide, and turns on the spot: 12 headings 30 degrees
apart, of which a picture covers 80. Rooms are many in training and others in the test, so that none can be known by
heart. A small `WorldDiT` learns by Diffusion Forcing from windows of T frames. Every second batch is sparse: the older
half of its windows comes from long before, in order, and each control is the motion since the frame before it *in the
window*, computed from the poses. One set of weights per seed serves all arms:

* `none, window` and `frame, window`: the newest T - 1 frames, whose keys are computed anew with every step or every
  frame. The same frames but for rounding: the window-recompute mode.
* `rolling, window`: the newest T - 1 frames, whose keys are computed once.
* `rolling, slow-fast`: the claim. Equally many slots: the first frame, T / 2 - 1 slow frames, T / 2 - 1 newest ones.
* `frame, slow-fast`: the same memory chooses the frames; their keys are recomputed, with the motion between those that
  were chosen, so that this model knows where each of them was seen.
* `frame, oldest out`: the same with the default eviction, which forgets the oldest surprise. The two above evict the
  newest: the look of a place has to outlast everything that surprises after it.
* `rolling, full`: everything, as long as the T positions that the model knows last; until then it is the window.

`tau` is the memory's own suggestion, by which half of the frames would be promoted, from turning about in training
rooms, for each cache on its own.

**What rolling keys can't know.** A kept key says how far the camera had turned since the frame before it, and nothing
of where that was: it holds no pose. When its neighbors are dropped, the turn between the kept frame and the next one
in memory is nowhere. Only pictures that overlap, and what deeper layers had summed up when the key was made, can tell
where it belongs. That is why `frame, slow-fast` stands beside it: what it gains over `rolling, slow-fast` is the worth
of knowing the pose, and what rolling gains over its window is what can be recalled without.

A script looks at three headings, of which the first is a given real picture and the others are the model's own, turns
away for N frames, N = 2, 4, 8 ... 32, and comes back over the very same headings. Up to T - 4 frames of absence both
own pictures are still within the window, from T - 1 on neither is. All arms get the same pictures, controls and noise.

Measures, fixed before anything was run, each of the returning frames at the model's own two headings:

* recall: PSNR to the model's own frame at this heading before the absence; *gain*, the measure of the claim: that
  minus the mean PSNR to the own earlier frames of the same video that look elsewhere, at least 90 degrees away, where
  nothing is in both pictures. A flat, frozen or repeated picture gains nothing. At N = 2 only one heading has them.
* gain of the given picture: the same at the first heading.
* PSNR to the truth; sharpness of these frames and motion between them, as ratios to the truth's.
* held: share of these frames whose first sight was still in the context.

`truth` is the ceiling: earlier frames as rendered, returning ones as the code shows them. `another room` is chance:
the same, but the returning frames are those of another room.

Bars, on every seed, of means over the absences of T - 1 frames and more: `rolling, slow-fast` gains more than
`rolling, window` and more than `frame, window`; and `frame, slow-fast` more than `frame, window`. A base whose
`frame, window` gains less than 3 dB within the window doesn't even recall what it sees: its seed is void, and fails.

Every trained base is a run folder under `--work` and every finished measurement a file beside it, so an interrupted
benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
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
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from PIL import Image, ImageDraw
from torch import Tensor

from vidgen.controls import ControlEncoder, planar_deltas
from vidgen.forcing.live import ForcingSchedule, LiveMethod
from vidgen.memory import FullMemoryConfig, KVMemoryConfig, SlowFastMemoryConfig
from vidgen.metrics import frame_psnr
from vidgen.metrics.horizon import motion_magnitude, sharpness
from vidgen.models.world_dit import WorldDiT
from vidgen.pipelines import WorldModelPipeline, WorldSession
from vidgen.runtime.checkpoint import atomic_write, load_safetensors, save_safetensors
from vidgen.runtime.device import derive_seed, select_device, set_threads
from vidgen.runtime.errors import ConfigError
from vidgen.schedulers import flow_sampler
from vidgen.train import OptimizerConfig, TrainConfig, TrainResult, fit
from vidgen.train.autoencoder import to_model_pixels
from vidgen.train.block_code import BlockCode
from vidgen.worlds.room import RoomWorld

# A circle of headings; two pictures this many apart have nothing in common.
HEADINGS, ELSEWHERE = 12, 3
# Turns of training, in headings per frame: how often each is begun, and how often one is ended.
TURNS, TURN_SHARES, CHANGE = (-2, -1, 0, 1, 2), (0.22, 0.22, 0.12, 0.22, 0.22), 0.4
# What the camera looks at, of which the first picture is given, and where it goes on the way out and while away.
LOOK, GIVEN, WAY_OUT, AWAY = (0, 1, 2), 1, 4, (6, 8)
CONTEXT_SIGMA = 0.15
MIN_GAIN = 3.0
# Places that are kept as pictures, and the absence that is shown of the first.
SHOWN_PLACES, SHOWN_ABSENCE = 2, 16
TRAIN, TEST = range(2)
METRICS = {
    "frames": "returning frames at the headings that the model itself drew before the absence",
    "recall": "PSNR in dB to the own frame at the same heading before the absence, mean of the dB of single frames",
    "elsewhere": "PSNR to the own earlier frames of the same video that look at least 90 degrees away",
    "gain": "recall - elsewhere",
    "given_gain": "the same at the heading of the given picture",
    "truth": "PSNR to the frames as rendered",
    "first_truth": "the same of the own frames before the absence",
    "sharpness, motion": "ratios to those of the true frames",
    "held": "share of the frames whose first sight was still in the context",
    "noise": "the same evaluation seeds, prompts and controls for all arms",
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Budget of the benchmark.

    Attributes:
        window: T, frames.
        dim: width of the network.
        layers: its blocks.
        code_channels: numbers per 4 x 4 pixels.
        batch_size: windows.
        steps: of the training.
        lr: peak learning rate.
        sampler_steps: sampler steps per frame.
        train_places: places to learn from, each in a room of its own.
        test_places: held-out ones.
        span: frames before the newest half of a sparse window, of which the older half is drawn.
        longest: frames of the longest absence, a power of 2.
    """

    window: int = 8
    dim: int = 128
    layers: int = 4
    code_channels: int = 16
    batch_size: int = 24
    steps: int = 6000
    lr: float = 1e-2
    sampler_steps: int = 6
    train_places: int = 800
    test_places: int = 24
    span: int = 40
    longest: int = 32

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.window % 2 or self.window < 8 or self.dim % 32 or self.test_places < 2:
            raise ConfigError(
                f"window={self.window}, dim={self.dim}, test_places={self.test_places}; allowed: even from 8 on, "
                "multiples of 32, and at least 2, since another room is chance."
            )
        if self.longest & (self.longest - 1) or self.longest < self.window - 1:
            raise ConfigError(
                f"longest={self.longest}; allowed: powers of 2 from window - 1 = {self.window - 1} on, where the "
                "window holds nothing of the place."
            )
        if self.span < self.num_sparse:
            raise ConfigError(f"span={self.span}; allowed: at least window / 2 = {self.num_sparse}.")

    @property
    def num_sparse(self) -> int:
        """Frames of a sparse window that come from long before; as many as slow-fast memory keeps."""
        return self.window // 2

    @property
    def absences(self) -> list[int]:
        return [2**power for power in range(1, self.longest.bit_length())]

    @property
    def within(self) -> list[int]:
        """Absences after which the window still holds all of the model's own first sights."""
        return [absence for absence in self.absences if absence + 1 + 2 * (len(LOOK) - GIVEN - 1) < self.window]

    @property
    def beyond(self) -> list[int]:
        """Absences after which it holds none."""
        return [absence for absence in self.absences if absence + 1 >= self.window]


# --- headings ----------------------------------------------------------------------------------------------------


def script(absence: int) -> np.ndarray:
    """Headings `(2 * 3 + absence,)`: look, turn away, and back over the same headings."""
    out = [WAY_OUT, *(AWAY[index % 2] for index in range(absence // 2 - 1))]
    return np.array([*LOOK, *out, *out[::-1], *LOOK[::-1]])


def look_about(random: np.random.Generator, num_frames: int) -> np.ndarray:
    """Headings `(num_frames,)` of a camera that turns on the spot, holding a turn for a while; not wrapped."""
    begun = random.choice(TURNS, size=num_frames, p=TURN_SHARES)
    is_new = random.random(num_frames) < CHANGE
    is_new[0] = True
    turns = begun[np.maximum.accumulate(np.where(is_new, np.arange(num_frames), 0))]
    turns[0] = random.integers(HEADINGS)
    return np.cumsum(turns)


def turns_between(headings: np.ndarray) -> Tensor:
    """Controls `(..., frames, 3)`, the motion from each of the headings `(..., frames)` to the next."""
    poses = torch.zeros(*headings.shape, 3, dtype=torch.float64)
    poses[..., 2] = torch.from_numpy(headings) * (2 * math.pi / HEADINGS)
    return planar_deltas(poses)


def headings_apart(one: np.ndarray | int, other: np.ndarray | int) -> np.ndarray:
    """Steps from heading to heading, the shorter way round."""
    apart = np.abs(one - other) % HEADINGS
    return np.minimum(apart, HEADINGS - apart)


# --- data --------------------------------------------------------------------------------------------------------


class PanoramaData:
    """All headings of places in rooms of one seed, rendered once, and how a model sees them.

    Args:
        sizes: budget.
        seed: of rooms and places.
        path: file that keeps the rendered frames.
    """

    def __init__(self, sizes: Sizes, seed: int, path: Path) -> None:
        self.sizes, self.seed = sizes, seed
        world = RoomWorld(32, rooms=(1, 1))
        if not path.exists():
            parts = {"train": (TRAIN, sizes.train_places), "test": (TEST, sizes.test_places)}
            save_safetensors({name: self._render(world, *part) for name, part in parts.items()}, path)
        arrays = load_safetensors(path)[0]
        # (places, headings, 32, 32, 3)
        self.train_frames, self.test_frames = arrays["train"].numpy(), arrays["test"].numpy()
        cells = world.size // 4
        self.encoder = ControlEncoder(
            world.delta_controls, "map", (world.motion.walk,), latent_size=(cells, cells), focal=world.focal
        )
        pixels = to_model_pixels(torch.from_numpy(self.train_frames))
        self.code = BlockCode.fit(pixels, sizes.code_channels, temporal=1, spatial=4, seed=seed)
        # (places, headings, channels, 8, 8)
        self.train_latents = torch.cat([self.code.encode(part).transpose(1, 2) for part in pixels.split(64)])

    def _render(self, world: RoomWorld, part: int, num_places: int) -> Tensor:
        panoramas = []
        for index in range(num_places):
            report_progress(f"seed {self.seed}: place {index + 1} of {num_places}")
            scene = world.scene(derive_seed(self.seed, part, index))
            poses = np.repeat(world.explore(scene, 1, self.seed), HEADINGS, axis=0)
            poses[:, 2] += np.arange(HEADINGS) * 2 * math.pi / HEADINGS
            panoramas.append(world.render(scene, poses))
        return torch.from_numpy(np.stack(panoramas))

    def shown(self, frames: np.ndarray) -> np.ndarray:
        """uint8 frames `(places, frames, 32, 32, 3)` as the code shows them."""
        pixels = self.code.decode(self.code.encode(to_model_pixels(torch.from_numpy(frames)))).clamp(-1, 1)
        return ((pixels + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1).numpy()

    def window(self, random: np.random.Generator, is_sparse: bool) -> np.ndarray:
        """Headings `(T,)` of one window."""
        sizes = self.sizes
        if not is_sparse:
            return look_about(random, sizes.window)
        past = int(random.integers(sizes.num_sparse, sizes.span + 1))
        headings = look_about(random, past + sizes.window - sizes.num_sparse)
        older = np.sort(random.choice(past, sizes.num_sparse, replace=False))
        return np.concatenate([headings[older], headings[past:]])

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, Tensor]:
        """Random windows, as `fit` asks for them; those of odd steps are sparse."""
        random = np.random.default_rng(derive_seed(self.seed, step, rank))
        places = random.integers(len(self.train_latents), size=batch_size)
        headings = np.stack([self.window(random, step % 2 == 1) for _ in places])
        latents = self.train_latents[places[:, None], headings % HEADINGS]
        return {"latents": latents.transpose(1, 2), "controls": turns_between(headings)}


class CodeAutoencoder(ModelMixin, ConfigMixin):
    """The linear code in the place of the autoencoder that a pipeline has."""

    @register_to_config
    def __init__(
        self,
        block_out_channels: tuple[int, ...] = (1, 1, 1),
        scaling_factor: float = 1.0,
        shift_factor: float | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))  # by which it knows its device and type
        self.code: BlockCode | None = None

    @classmethod
    def of(cls, code: BlockCode) -> CodeAutoencoder:
        autoencoder = cls()
        autoencoder.code = code
        return autoencoder

    def encode(self, pixels: Tensor) -> SimpleNamespace:
        latents = self.code.encode(pixels.unsqueeze(2)).squeeze(2)
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents))

    def decode(self, latents: Tensor) -> SimpleNamespace:
        return SimpleNamespace(sample=self.code.decode(latents.unsqueeze(2)).squeeze(2))


# --- training ----------------------------------------------------------------------------------------------------


def new_transformer(data: PanoramaData) -> WorldDiT:
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


def train(folder: Path, data: PanoramaData) -> TrainResult:
    """Train the base."""
    sizes = data.sizes
    method = LiveMethod(
        new_transformer(data),
        ForcingSchedule.diffusion_forcing(sizes.window),
        encode_controls=data.encoder,
        total_steps=sizes.steps,
        seed=data.seed,
    )
    optimizer = OptimizerConfig(
        kind="muon",
        lr=sizes.lr,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        warmup_steps=min(50, sizes.steps // 10),
        schedule="cosine",
        min_lr_ratio=0.05,
    )
    config = TrainConfig(
        output_dir=str(folder),
        max_steps=sizes.steps,
        batch_size=sizes.batch_size,
        optimizers={"transformer": optimizer},
        seed=data.seed,
        log_every=20,
    )
    return fit(method, data, config)


def load_pipeline(folder: Path, data: PanoramaData) -> WorldModelPipeline:
    pipe = WorldModelPipeline(
        transformer=WorldDiT.from_pretrained(folder / "weights" / "transformer").eval(),
        vae=CodeAutoencoder.of(data.code),
        scheduler=flow_sampler(data.sizes.sampler_steps),
        controls=data.encoder.to_dict(),
        num_inference_steps=data.sizes.sampler_steps,
        context_sigma=CONTEXT_SIGMA,
    )
    return pipe.to(select_device())


# --- arms --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to remember.

    Attributes:
        cache: when keys are computed.
        memory: `"window"`, `"full"`, or the eviction of a slow-fast memory.
    """

    cache: str
    memory: str


CLAIM, ROLLING_WINDOW, RECOMPUTE, CHOSEN = "rolling, slow-fast", "rolling, window", "frame, window", "frame, slow-fast"
ARMS = {
    "none, window": Arm("none", "window"),
    RECOMPUTE: Arm("frame", "window"),
    ROLLING_WINDOW: Arm("rolling", "window"),
    "rolling, full": Arm("rolling", "full"),
    CLAIM: Arm("rolling", "newest"),
    CHOSEN: Arm("frame", "newest"),
    "frame, oldest out": Arm("frame", "oldest"),
}
TRUTH, CHANCE = "truth", "another room"


def slow_fast(window: int, tau: float, eviction: str) -> SlowFastMemoryConfig:
    """As many slots as the window has: the first frame, the slow ones, the newest and the one being made."""
    fast = window // 2
    return SlowFastMemoryConfig(
        sink=GIVEN, slow=window - fast - GIVEN, fast=fast, tau=tau, interval=1, eviction=eviction
    )


def memory_of(arm: Arm, window: int, taus: dict[str, float]) -> KVMemoryConfig | None:
    """None keeps the newest frames."""
    if arm.memory == "window":
        return None
    if arm.memory == "full":
        return FullMemoryConfig(max_frames=window - 1)
    return slow_fast(window, taus[arm.cache], arm.memory)


def noise_seeds(data: PanoramaData) -> list[int]:
    return [derive_seed(data.seed, TEST, index) for index in range(data.sizes.test_places)]


def suggested_taus(pipe: WorldModelPipeline, data: PanoramaData) -> dict[str, float]:
    """Per cache the `tau` that would promote half of the frames, in training rooms and the longest script."""
    prompts, taus = data.train_frames[: data.sizes.test_places, :1], {}
    turns = turns_between(script(data.sizes.longest))
    for cache in ("rolling", "frame"):
        memory = slow_fast(data.sizes.window, math.inf, "newest")
        session = pipe.open_session(prompts, cache=cache, memory=memory, seed=noise_seeds(data)[: len(prompts)])
        for turn in turns[1:]:
            session.step(turn)
        memories = [session.memory] if cache == "rolling" else [row.memory for row in session.rows]
        taus[cache] = statistics.median(memory.statistics()["suggested_tau"] for memory in memories)
    return taus


@dataclasses.dataclass(frozen=True)
class Revisit:
    """What an arm made of a script.

    Attributes:
        frames: uint8 `(places, frames, 32, 32, 3)`, the given picture included.
        held: per frame and place the numbers of the frames that it was made from; None for what no model made.
    """

    frames: np.ndarray
    held: list[list[tuple[int, ...]]] | None


def play(session: WorldSession, given: np.ndarray, turns: Tensor, num_frames: int) -> Revisit:
    """The first frames of a script."""
    frames, held = [given[:, 0]], [[() for _ in given]]
    for turn in turns[1:num_frames]:
        held.append([row.frame_ids for row in session.rows])
        frames.append(session.step(turn))
    return Revisit(np.stack(frames, axis=1), held)


def revisit(
    pipe: WorldModelPipeline, data: PanoramaData, arm: Arm, absence: int, taus: dict[str, float]
) -> Revisit | None:
    """A script as an arm plays it in all held-out places; None where its memory is full before the model is back."""
    headings, window = script(absence), data.sizes.window
    # A full memory takes every frame that it makes.
    num_frames = min(len(headings), window - 1) if arm.memory == "full" else len(headings)
    if num_frames < len(headings) - GIVEN:
        return None
    given = data.test_frames[:, :1]
    session = pipe.open_session(given, cache=arm.cache, memory=memory_of(arm, window, taus), seed=noise_seeds(data))
    return play(session, given, turns_between(headings), num_frames)


def references(data: PanoramaData, absence: int) -> dict[str, Revisit]:
    """The ceiling and chance."""
    truth, back = true_frames(data, absence), len(LOOK) + absence
    results = {}
    for name, returning in ((TRUTH, truth[:, back:]), (CHANCE, np.roll(truth[:, back:], 1, axis=0))):
        results[name] = Revisit(np.concatenate([truth[:, :back], data.shown(returning)], axis=1), None)
    return results


def true_frames(data: PanoramaData, absence: int) -> np.ndarray:
    return data.test_frames[:, script(absence) % HEADINGS]


# --- measuring ---------------------------------------------------------------------------------------------------


def score(revisit: Revisit, truth: np.ndarray, absence: int) -> dict[str, float | None]:
    """The measures of one script, see the top of this file.

    Args:
        revisit: what was made, perhaps without the return to the given picture.
        truth: uint8 `(places, frames, 32, 32, 3)` of the whole script.
        absence: N.

    Returns:
        Means over frames and places; None for what can't be known.
    """
    frames, headings, back = revisit.frames, script(absence), len(LOOK) + absence
    firsts = {back + index: len(LOOK) - 1 - index for index in range(len(LOOK))}  # of each returning frame
    own = [frame for frame, first in firsts.items() if first >= GIVEN]

    def compare(returning: Sequence[int]) -> tuple[float, float] | None:
        """Recall, and PSNR to frames elsewhere."""
        recall, elsewhere = [], []
        for frame in returning:
            others = [
                other for other in range(GIVEN, frame) if headings_apart(headings[frame], headings[other]) >= ELSEWHERE
            ]
            if frame < frames.shape[1] and others:
                now = frames[:, frame]
                recall.append(frame_psnr(now, frames[:, firsts[frame]]))
                elsewhere.append(np.mean([frame_psnr(now, frames[:, other]) for other in others], axis=0))
        return (float(np.mean(recall)), float(np.mean(elsewhere))) if recall else None

    recall, elsewhere = compare(own)
    given = compare([frame for frame in firsts if frame not in own])
    firsts_in_order = [firsts[frame] for frame in own]
    held = None
    if revisit.held is not None:
        held = float(np.mean([[firsts[frame] in ids for ids in revisit.held[frame]] for frame in own]))
    return {
        "gain": recall - elsewhere,
        "recall": recall,
        "elsewhere": elsewhere,
        "given_gain": None if given is None else given[0] - given[1],
        "truth": float(frame_psnr(frames[:, own], truth[:, own]).mean()),
        "first_truth": float(frame_psnr(frames[:, firsts_in_order], truth[:, firsts_in_order]).mean()),
        "sharpness": sharpness(frames[:, own]) / max(sharpness(truth[:, own]), 1e-6),
        "motion": motion_magnitude(frames[:, own]) / max(motion_magnitude(truth[:, own]), 1e-6),
        "held": held,
    }


class Bench(WorkFolder):
    """One seed: what is measured already is read from its folder."""

    def __init__(self, sizes: Sizes, seed: int, work: Path) -> None:
        super().__init__(work / f"seed_{seed}", dataclasses.asdict(sizes))
        self.sizes, self.seed = sizes, seed
        self._data: PanoramaData | None = None
        self._pipe: WorldModelPipeline | None = None

    @property
    def data(self) -> PanoramaData:
        if self._data is None:
            self._data = PanoramaData(self.sizes, self.seed, self.folder / "panoramas.safetensors")
        return self._data

    @property
    def pipe(self) -> WorldModelPipeline:
        if self._pipe is None:
            self._pipe = load_pipeline(self.folder / "base", self.data)
            self._pipe.set_progress_bar_config(disable=True)
        return self._pipe

    def run(self) -> dict[str, Any]:
        """Base, taus, all arms and references: `arms` holds per arm and absence the measures."""
        base = self.stored("base", self._base)
        taus = self.stored("taus", lambda: suggested_taus(self.pipe, self.data))
        arms = {name: self.stored(slug(name), lambda name=name: self._arm(name, taus)) for name in ARMS}
        arms |= self.stored("references", self._references)
        return {"base": base, "taus": taus, "arms": arms}

    def _base(self) -> dict[str, Any]:
        print(f"seed {self.seed}: base", flush=True)
        result = train(self.folder / "base", self.data)
        return {"steps": result.step, "seconds": result.elapsed_seconds}

    def _arm(self, name: str, taus: dict[str, float]) -> dict[str, Any]:
        print(f"seed {self.seed}: {name}", flush=True)
        measured, shown = {}, {}
        for absence in self.sizes.absences:
            made = revisit(self.pipe, self.data, ARMS[name], absence, taus)
            if made is not None:
                measured[str(absence)] = score(made, true_frames(self.data, absence), absence)
                shown[str(absence)] = torch.from_numpy(made.frames[:SHOWN_PLACES].copy())
        save_safetensors(shown, self.folder / f"{slug(name)}.safetensors")
        return measured

    def _references(self) -> dict[str, Any]:
        measured: dict[str, Any] = {}
        for absence in self.sizes.absences:
            for name, made in references(self.data, absence).items():
                scored = score(made, true_frames(self.data, absence), absence)
                measured.setdefault(name, {})[str(absence)] = scored
        return measured

    def write_sheet(self, path: Path) -> None:
        """One revisit per arm: what was seen before, some of the absence, and the return beside it."""
        absence = min(SHOWN_ABSENCE, self.sizes.longest)
        headings, num_looks = script(absence), len(LOOK)
        back = num_looks + absence
        columns = [*range(num_looks), num_looks + 1, num_looks + absence // 2, *range(back, len(headings))]
        rows = {TRUTH: true_frames(self.data, absence)[0]}
        for name in ARMS:
            frames = load_safetensors(self.folder / f"{slug(name)}.safetensors")[0].get(str(absence))
            if frames is not None:
                rows[name] = frames[0].numpy()
        zoom, gap, margin, title = 4, 4, 18, 130
        cell = zoom * self.data.test_frames.shape[-2] + gap
        sheet = Image.new("RGB", (title + cell * len(columns), margin + cell * len(rows)), "white")
        pen = ImageDraw.Draw(sheet)
        for column, frame in enumerate(columns):
            degrees = headings[frame] * 360 // HEADINGS
            what = "given" if frame < GIVEN else "look" if frame < num_looks else "away"
            what = "return" if frame >= back else what
            pen.text((title + column * cell + 2, 3), f"{frame}: {what}, {degrees} deg", fill="black")
        for row, (name, frames) in enumerate(rows.items()):
            pen.text((4, margin + row * cell + cell // 2), name, fill="black")
            for column, frame in enumerate(columns):
                picture = Image.fromarray(frames[frame]).resize((cell - gap, cell - gap), Image.Resampling.NEAREST)
                sheet.paste(picture, (title + column * cell, margin + row * cell))
        with atomic_write(path) as temporary:
            sheet.save(temporary, format="PNG", optimize=True)


def slug(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_")


# --- report ------------------------------------------------------------------------------------------------------


def mean_gain(run: dict[str, Any], arm: str, absences: Sequence[int]) -> float:
    return statistics.mean(run["arms"][arm][str(absence)]["gain"] for absence in absences)


def claims(runs: dict[int, dict[str, Any]], sizes: Sizes) -> list[dict[str, Any]]:
    """The bars, each of which every seed has to reach."""

    def compare(one: str, other: str) -> dict[str, float]:
        return {
            str(seed): mean_gain(run, one, sizes.beyond) - mean_gain(run, other, sizes.beyond)
            for seed, run in runs.items()
        }

    competence = {str(seed): mean_gain(run, RECOMPUTE, sizes.within) for seed, run in runs.items()}
    is_competent = min(competence.values()) >= MIN_GAIN
    results = [
        {
            "claim": f"the base recalls what it sees: gain within the window, dB, {RECOMPUTE}",
            "by_seed": competence,
            "bar": f">= {MIN_GAIN:g}",
            "passed": is_competent,
        }
    ]
    for one, other in ((CLAIM, ROLLING_WINDOW), (CLAIM, RECOMPUTE), (CHOSEN, RECOMPUTE)):
        values = compare(one, other)
        results.append(
            {
                "claim": f"gain beyond the window, dB: {one} - {other}",
                "by_seed": values,
                "bar": "> 0",
                # Models that recall nothing differ by a hair, either way.
                "passed": is_competent and min(values.values()) > 0,
            }
        )
    return results


# Title of a table and its measure.
TABLES = {
    "gain, dB": "gain",
    "recall, PSNR in dB": "recall",
    "elsewhere, PSNR in dB": "elsewhere",
    "gain of the given picture, dB": "given_gain",
    "returning frames to the truth, PSNR in dB": "truth",
    "first sights to the truth, PSNR in dB": "first_truth",
    "sharpness / truth": "sharpness",
    "motion / truth": "motion",
    "held": "held",
}


def measure_table(title: str, key: str, runs: list[dict[str, Any]], sizes: Sizes) -> str:
    names = [f"{absence}{' (beyond)' if absence in sizes.beyond else ''}" for absence in sizes.absences]
    lines = [f"| {title}, by absence | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for arm in runs[0]["arms"]:
        cells = []
        for absence in sizes.absences:
            values = [run["arms"][arm].get(str(absence), {}).get(key) for run in runs]
            cells.append("–" if None in values else spread(values, 2))
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def make_table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    sizes, runs = Sizes(**results["sizes"]), list(results["seeds"].values())
    bars = ["| bar, for every seed | mean (range) | bar | |", "|---|---|---|---|"]
    for claim in results["claims"]:
        verdict = "pass" if claim["passed"] else "FAIL"
        values = spread(list(claim["by_seed"].values()), 2)
        bars.append(f"| {claim['claim']} | {values} | {claim['bar']} | {verdict} |")
    void = [seed for seed, value in results["claims"][0]["by_seed"].items() if value < MIN_GAIN]
    head = f"Seeds {', '.join(results['seeds'])}; window T = {sizes.window} frames, {sizes.steps} steps."
    if void:
        head += f" Void, since the base doesn't recall what it sees: seed {', '.join(void)}."
    tables = [measure_table(title, key, runs, sizes) for title, key in TABLES.items()]
    return "\n\n".join([head, "\n".join(bars), *tables]) + "\n"


def plot_gains(runs: list[dict[str, Any]], sizes: Sizes, path: Path) -> None:
    """Gain of one's own and of the given picture against the absence, mean and range over seeds."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, key, label in zip(panels, ("gain", "given_gain"), ("own pictures", "given picture"), strict=True):
        for arm in (*ARMS, CHANCE):  # the ceiling is off the scale
            points = []
            for absence in sizes.absences:
                values = [run["arms"][arm].get(str(absence), {}).get(key) for run in runs]
                if None not in values:
                    points.append((absence, np.mean(values), min(values), max(values)))
            if points:
                x, mean, low, high = np.array(points).T
                style = {"color": "gray", "linestyle": ":"} if arm == CHANCE else {"marker": "o", "markersize": 4}
                axes.errorbar(x, mean, (mean - low, high - mean), capsize=3, label=arm, **style)
        axes.axvline(sizes.window - 1, color="black", linewidth=0.6, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes.absences, [str(absence) for absence in sizes.absences])
        axes.set(xlabel="frames of absence (dashed: the window holds nothing)", ylabel=f"gain, {label}, dB")
    panels[0].legend(fontsize=8)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)
    plt.close(figure)


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what isn't measured yet; write results.json, table.md, the plot and the sheet; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_seeds(parser)
    parser.add_argument("--work", type=Path, default=Path("runs/eval/world_revisits"), help="default: %(default)s")
    add_out(parser, "world_revisits")
    add_merge(parser)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    add_sizes(parser, Sizes)
    options = parser.parse_args(arguments)
    set_threads()
    sizes = parse_sizes(Sizes, options.set)
    settings = dataclasses.asdict(sizes)
    earlier = earlier_results(options, settings).get("seeds", {})
    benches = {seed: Bench(sizes, seed, options.work) for seed in options.seeds}
    runs = measure_seeds(options.seeds, lambda seed: benches[seed].run(), earlier)
    results = {
        "benchmark": "world_revisits",
        "sizes": settings,
        "metrics": METRICS,
        "claims": claims(runs, sizes),
        "seeds": {str(seed): run for seed, run in runs.items()},
    }
    table = make_table(results)
    write_results(options.out, results, table)
    plot_gains(list(runs.values()), sizes, options.out / "gain_against_absence.png")
    benches[options.seeds[0]].write_sheet(options.out / "revisit.png")
    print(table)
    return int(options.check and not all(claim["passed"] for claim in results["claims"]))


if __name__ == "__main__":
    sys.exit(main())
