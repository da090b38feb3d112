"""Does a teacher with memory teach memory? Context Forcing against the same budget without it, and memories compared.

    python eval/context_forcing.py                   # all parts, 3 seeds
    python eval/context_forcing.py --parts rooms --seeds 0 --set student_steps=100
    python eval/context_forcing.py --parts           # measures nothing, writes what is measured

Parts (spec of the worlds: `vidgen.worlds.code_worlds`; chance is 1/8):

* `rooms`: three students with the same memory at test time. A is distilled from a context teacher, B with the same
  budget from a teacher that knows the last chunk only, C is their common start. If C already recalls more than 0.45
  the world leaks and the comparison is void. A student that collapsed shows the same in every video and so recalls
  without a memory: what two videos agree on is reported beside, and only recall above it counts.
* `panorama`: one teacher, sampled with different memories; a long pause; unbounded positions; error recycling on, off.
* `cost`: seconds per chunk and bytes against length.

Every trained model is a run folder under `--work` and every finished measurement a file beside it, so an interrupted
benchmark goes on where it was. The results hold all that is measured for the chosen seeds, whatever `--parts` chose
this time; a part that lacks a seed is marked as such, and its bars are not decided.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from _benchmark import (
    WorkFolder,
    add_out,
    add_seeds,
    add_sizes,
    check_sizes,
    parse_sizes,
    reports_errors,
    write_results,
)

from vidgen.forcing.conditions import Conditions, predict_velocity
from vidgen.forcing.context_teacher import ContextTeacherConfig, ContextTeacherMethod
from vidgen.forcing.diffusion_forcing import shift_sigma
from vidgen.forcing.distribution_matching import (
    DistributionMatchingConfig,
    DistributionMatchingMethod,
    RolloutCurriculum,
)
from vidgen.forcing.rollout import commit_frames, rollout
from vidgen.memory import (
    FullMemory,
    FullMemoryConfig,
    KVMemory,
    SlidingWindowMemory,
    SlidingWindowMemoryConfig,
    SlowFastMemory,
    SlowFastMemoryConfig,
)
from vidgen.metrics import RecallByGap, code_recall, effective_context_length, nearest_codes, place_agreement, validity
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.recipes.context_data import TEXT_DIM, CodeLayouts, CodeRollouts, CodeWorldData, ContextRange
from vidgen.runtime.device import generator_for, set_threads
from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.runtime.meter import run_environment
from vidgen.train import OptimizerConfig, TrainConfig, fit
from vidgen.worlds.code_worlds import CodeVideos, PanoramaWorld, RoomsWorld

CHUNK, FRAME_SHAPE, CHANCE = 3, (4, 2, 8), 1 / 8
# What the toy worlds' latent frames stand for: Wan's 4 latent frames per second
LATENT_FPS = 4
LEAKY_WORLD = 0.45
STUDENT_SIGMAS = (1.0, 0.9375, 0.8333, 0.625)
GAP_BINS = {
    "rooms": ((1, 5), (6, 14), (15, 29), (30, 59), (60, 119)),
    "panorama": ((1, 8), (9, 17), (18, 35), (36, 71)),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Budget of the benchmark; the same for all arms."""

    teacher_steps: int = 2000
    memoryless_steps: int = 1000
    student_steps: int = 1000
    panorama_steps: int = 1200
    student_every: int = 2
    batch_size: int = 16
    min_rollout: int = 24
    max_rollout: int = 42
    test_videos: int = 64
    test_frames: int = 150
    ode_steps: int = 8

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.test_frames % CHUNK or self.test_videos < 2:
            raise ConfigError(
                f"test_frames={self.test_frames}, test_videos={self.test_videos}; allowed: multiples of {CHUNK}, and "
                "at least 2, since videos are compared."
            )
        if not CHUNK <= self.min_rollout <= self.max_rollout or self.max_rollout % CHUNK:
            raise ConfigError(
                f"min_rollout={self.min_rollout}, max_rollout={self.max_rollout}; allowed: from {CHUNK} to "
                f"max_rollout, a multiple of {CHUNK}."
            )


def new_transformer(seed: int) -> CausalWanTransformer3DModel:
    torch.manual_seed(seed)
    transformer = CausalWanTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=24,
        in_channels=12,
        out_channels=4,
        text_dim=TEXT_DIM,
        freq_dim=32,
        ffn_dim=144,
        num_layers=2,
    )
    torch.nn.init.zeros_(transformer.proj_out.weight)
    torch.nn.init.zeros_(transformer.proj_out.bias)
    return transformer


MEMORY = SlowFastMemoryConfig(sink=3, slow=12, fast=6, interval=1, tau=0.9)
LAST_CHUNK = SlowFastMemoryConfig(sink=0, slow=0, fast=6)


# --- training ----------------------------------------------------------------------------------------------------


def train_config(
    folder: Path, steps: int, sizes: Sizes, seed: int, rates: dict[str, float], momentum: float = 0.9
) -> TrainConfig:
    optimizers = {
        role: OptimizerConfig(lr=rate, betas=(momentum, 0.99), warmup_steps=50, schedule="cosine", min_lr_ratio=0.05)
        for role, rate in rates.items()
    }
    return TrainConfig(
        output_dir=str(folder),
        max_steps=steps,
        batch_size=sizes.batch_size,
        optimizers=optimizers,
        ema_decay=0.99,
        seed=seed,
        checkpoint_every=200,
        log_every=20,
    )


def train_teacher(
    folder: Path, world: str, memory: SlowFastMemoryConfig, steps: int, sizes: Sizes, seed: int, recycle: bool = True
) -> CausalWanTransformer3DModel:
    """A teacher that continues videos of a world from what a memory holds."""
    data = CodeWorldData(world, frames=96, context=ContextRange(0, 30))
    batches = CodeLayouts(data, memory, CHUNK, CHUNK, seed)
    config = ContextTeacherConfig(shift=3.0, drop_text_probability=0.0, error_probability=0.5 if recycle else 0.0)
    method = ContextTeacherMethod(new_transformer(seed), None, config, lambda: batches.batch(0, 0, 1, 16))
    fit(method, batches, train_config(folder, steps, sizes, seed, {"teacher": 3e-3}))
    return CausalWanTransformer3DModel.from_pretrained(folder / "weights" / "teacher").eval()


def train_student(
    folder: Path,
    init: CausalWanTransformer3DModel,
    teacher: CausalWanTransformer3DModel,
    context: str,
    memory: SlowFastMemoryConfig,
    sizes: Sizes,
    seed: int,
) -> CausalWanTransformer3DModel:
    """A student distilled on its own rollouts."""
    data = CodeRollouts(CodeWorldData("rooms"), sizes.max_rollout, seed + 17)
    config = DistributionMatchingConfig(
        sigmas=STUDENT_SIGMAS,
        target_frames=CHUNK,
        context=context,
        # The common start has never read more than one chunk: it must learn to write keys that can be found again.
        memory_gradient=True,
        # A student of this size that learns to leave early answers all noise alike, and its videos collapse into one.
        first_exit=len(STUDENT_SIGMAS),
        curriculum=RolloutCurriculum(sizes.min_rollout, sizes.max_rollout, sizes.student_steps // 2),
        guidance_scale=1.0,
        shift=3.0,
        student_every=sizes.student_every,
        seed=seed,
    )
    roles = [copy.deepcopy(model) for model in (init, teacher, teacher)]
    method = DistributionMatchingMethod(*roles, None, memory, FRAME_SHAPE, config)
    rates = {"student": 2e-3, "critic": 3e-3}
    # No momentum: the critic's target moves with the student.
    fit(method, data, train_config(folder, sizes.student_steps, sizes, seed, rates, momentum=0.0))
    return CausalWanTransformer3DModel.from_pretrained(folder / "weights" / "student").eval()


# --- sampling ----------------------------------------------------------------------------------------------------


def conditions_of(channels: torch.Tensor) -> Conditions:
    return Conditions.from_batch(
        {"prompt_embeds": torch.zeros(len(channels), 1, TEXT_DIM), "condition_channels": channels}, None
    )


def sample_student(
    student: CausalWanTransformer3DModel, memory: KVMemory, channels: torch.Tensor, seed: int
) -> torch.Tensor:
    """Videos by the student's few steps."""
    frames = channels.shape[2]
    return rollout(
        student,
        memory,
        conditions_of(channels),
        STUDENT_SIGMAS,
        FRAME_SHAPE,
        frames,
        frames,
        len(STUDENT_SIGMAS),
        generator_for(seed, 2),
        requires_grad=False,
    ).latents


@torch.no_grad()
def sample_teacher(
    teacher: CausalWanTransformer3DModel, memory: KVMemory, channels: torch.Tensor, seed: int, steps: int
) -> torch.Tensor:
    """Videos by Euler integration of the teacher's flow, chunk by chunk through a memory."""
    conditions, generator = conditions_of(channels), generator_for(seed, 3)
    sigmas = shift_sigma(torch.linspace(1, 0, steps + 1), 3.0).tolist()
    chunks = []
    for start in range(0, channels.shape[2], CHUNK):
        text, told = conditions.text_at(0), conditions.channels_at(torch.arange(start, start + CHUNK))
        sample = torch.randn(len(channels), FRAME_SHAPE[0], CHUNK, *FRAME_SHAPE[1:], generator=generator)
        for sigma, following in pairwise(sigmas):
            velocity = predict_velocity(teacher, sample, sigma, text, told, kv_memory=memory)
            sample = sample + (following - sigma) * velocity
        commit_frames(teacher, memory, sample, text, told)
        chunks.append(sample)
    return torch.cat(chunks, dim=2)


def calibrate_tau(
    teacher: CausalWanTransformer3DModel,
    world: RoomsWorld | PanoramaWorld,
    seed: int,
    slow_fast: SlowFastMemoryConfig = MEMORY,
) -> float:
    """The similarity that half of the judged chunks of true videos fall below: news and stays are equally frequent."""
    videos = world.sample(16, 60, generator_for(seed, 4))
    memory = SlowFastMemory(dataclasses.replace(slow_fast, tau=-1.0), num_frames_per_block=CHUNK)
    conditions = conditions_of(videos.conditions)
    for start in range(0, 60, CHUNK):
        told = conditions.channels_at(torch.arange(start, start + CHUNK))
        commit_frames(teacher, memory, videos.latents[:, :, start : start + CHUNK], conditions.text_at(0), told)
    return float(memory.statistics()["suggested_tau"])


def score(latents: torch.Tensor, places: torch.Tensor, world: str) -> dict[str, Any]:
    """Recall by length of absence, validity, effective context length."""
    codes = nearest_codes(latents)[0]
    recall, agreement = code_recall(codes, places), place_agreement(codes, places)
    rates = {f"{low}-{high}": recall.rate(low, high) for low, high in GAP_BINS[world]}
    length = None
    if bool(recall.counts.any()):
        length = effective_context_length(recall, chance=max(CHANCE, agreement)) / LATENT_FPS
    return {
        "recall": {name: known(rate) for name, rate in rates.items()},
        "agreement": agreement,
        "validity": validity(latents),
        "ecl_seconds": length,
        "hits": recall.hits.tolist(),
        "counts": recall.counts.tolist(),
    }


def known(rate: float) -> float | None:
    """A rate, or None where nothing was counted."""
    return None if math.isnan(rate) else rate


# --- parts -------------------------------------------------------------------------------------------------------


def beyond_window(measured: dict[str, Any]) -> float | None:
    """Recall over absences longer than a window of as many slots as the memory's reaches back; None without any."""
    recall = RecallByGap(torch.tensor(measured["hits"]), torch.tensor(measured["counts"]))
    shortest = MEMORY.sink + MEMORY.slow + MEMORY.fast - CHUNK
    return known(recall.rate(shortest, max(shortest, len(measured["counts"]) - 1)))


def rooms_test_videos(sizes: Sizes, seed: int) -> CodeVideos:
    """The true videos that students and teachers are tested on.

    Raises:
        ConfigError: too few or short for two of them to visit the same room, which is what agreement is about.
    """
    videos = RoomsWorld().sample(sizes.test_videos, sizes.test_frames, generator_for(seed, 5))
    try:
        place_agreement(videos.codes, videos.places)
    except VidgenError as error:
        raise ConfigError(
            f"test_videos={sizes.test_videos}, test_frames={sizes.test_frames}, seed {seed}: {error}"
        ) from error
    return videos


def rooms(work: Path, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Students A, B and C, and the teachers themselves."""
    context = train_teacher(work / "context_teacher", "rooms", MEMORY, sizes.teacher_steps, sizes, seed)
    blind = train_teacher(work / "memoryless_teacher", "rooms", LAST_CHUNK, sizes.memoryless_steps, sizes, seed + 100)
    memory = dataclasses.replace(MEMORY, tau=calibrate_tau(blind, RoomsWorld(), seed))
    students = {
        "A context teacher": train_student(work / "student_a", blind, context, "memory", memory, sizes, seed),
        "B memoryless teacher": train_student(work / "student_b", blind, blind, "window", memory, sizes, seed),
        "C no stage 2": blind,
    }
    videos = rooms_test_videos(sizes, seed)
    measured = {}
    for name, student in students.items():
        latents = sample_student(student, SlowFastMemory(memory, CHUNK), videos.conditions, seed)
        measured[name] = score(latents, videos.places, "rooms")
    own = dataclasses.replace(MEMORY, tau=calibrate_tau(context, RoomsWorld(), seed))
    for name, teacher, policy in (
        ("context teacher", context, SlowFastMemory(own, CHUNK)),
        ("memoryless teacher", blind, SlowFastMemory(LAST_CHUNK, CHUNK)),
    ):
        latents = sample_teacher(teacher, policy, videos.conditions, seed, sizes.ode_steps)
        measured[name] = score(latents, videos.places, "rooms")
    return {"tau": memory.tau, "arms": measured}


def memory_policies(slow_fast: SlowFastMemoryConfig, frames: int) -> dict[str, Callable[[], KVMemory]]:
    """Memories that are compared on the same weights; `window` and `sink + window` hold as many slots as slow-fast."""
    slots = slow_fast.sink + slow_fast.slow + slow_fast.fast

    def slow(**changes: Any) -> Callable[[], KVMemory]:
        return lambda: SlowFastMemory(dataclasses.replace(slow_fast, **changes), CHUNK)

    def window(size: int, sink: int) -> Callable[[], KVMemory]:
        return lambda: SlidingWindowMemory(SlidingWindowMemoryConfig(window=size, sink=sink), CHUNK)

    return {
        "full": lambda: FullMemory(FullMemoryConfig(max_frames=frames), CHUNK),
        "slow-fast": slow(),
        "uniform slow, every chunk": slow(tau=math.inf, interval=1),
        "uniform slow, every 2 chunks": slow(tau=math.inf, interval=2),
        "window": window(slots, 0),
        "sink + window": window(slots - slow_fast.sink, slow_fast.sink),
        "6-slot window": window(6, 0),
        "slow-fast, absolute positions": slow(positions="absolute"),
    }


def panorama(work: Path, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Memories on the weights of one teacher; and what error recycling does."""
    world = PanoramaWorld()
    teacher = train_teacher(work / "panorama_teacher", "panorama", MEMORY, sizes.panorama_steps, sizes, seed)
    plain = train_teacher(
        work / "panorama_teacher_without_recycling", "panorama", MEMORY, sizes.panorama_steps, sizes, seed, False
    )
    # The camera moves every two frames, so at every second chunk's beginning: judged there, a stay is a stay.
    every_second = dataclasses.replace(MEMORY, interval=2)
    slow_fast = dataclasses.replace(every_second, tau=calibrate_tau(teacher, world, seed, every_second))
    scripts = {"sweep": world.sweep_path(36, 6, 36), "long pause": world.sweep_path(36, 60, 36)}
    results: dict[str, Any] = {"tau": slow_fast.tau}
    for script, path in scripts.items():
        frames = path.shape[1] // CHUNK * CHUNK
        videos = world.sample(sizes.test_videos, frames, generator_for(seed, 6), path=path[:, :frames])
        results[script] = {}
        for name, make in memory_policies(slow_fast, frames).items():
            latents = sample_teacher(teacher, make(), videos.conditions, seed, sizes.ode_steps)
            results[script][name] = score(latents, videos.places, "panorama")
    results["error recycling"] = {
        name: drifted_error(model, world, sizes, seed) for name, model in (("on", teacher), ("off", plain))
    }
    return results


@torch.no_grad()
def drifted_error(
    teacher: CausalWanTransformer3DModel, world: PanoramaWorld, sizes: Sizes, seed: int
) -> dict[str, float]:
    """Flow-matching loss of the target, given clean context and context with the model's own residuals."""
    batches = CodeLayouts(CodeWorldData("panorama", 96, ContextRange(4, 30)), MEMORY, CHUNK, CHUNK, seed + 999)
    config = ContextTeacherConfig(shift=3.0, drop_text_probability=0.0, warmup_steps=8, clean_admission=1.0)
    method = ContextTeacherMethod(teacher, None, config, lambda: batches.batch(0, 0, 1, sizes.test_videos))
    for step in range(8):
        method.training_step(batches.batch(step, 0, 1, sizes.batch_size), step, generator_for(seed, 7, step))
    measured = method.validate()
    return {"clean": measured["validation_loss"], "drifted": measured["validation_loss_drifted"]}


@torch.no_grad()
def cost(work: Path, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Seconds per chunk (median of 10) and bytes after 10, 50, 100 and 200 chunks, all memories in turns."""
    transformer = new_transformer(seed).eval()
    marks, repeats = (10, 50, 100, 200), 10
    frames = CHUNK * (marks[-1] + repeats)
    videos = RoomsWorld().sample(4, frames, generator_for(seed, 8))
    conditions = conditions_of(videos.conditions)
    policies = memory_policies(MEMORY, frames)
    memories = {name: policies[name]() for name in ("full", "slow-fast", "window")}
    results: dict[str, Any] = {name: {"seconds": {}, "bytes": {}} for name in memories}
    seconds: dict[str, list[float]] = {name: [] for name in memories}
    for chunk in range(marks[-1] + repeats):
        told = conditions.channels_at(torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK))
        clean = videos.latents[:, :, chunk * CHUNK : (chunk + 1) * CHUNK]
        for name, memory in memories.items():
            began = time.perf_counter()
            for sigma in STUDENT_SIGMAS:
                predict_velocity(transformer, clean, sigma, conditions.text_at(0), told, kv_memory=memory)
            commit_frames(transformer, memory, clean, conditions.text_at(0), told)
            seconds[name].append(time.perf_counter() - began)
            if chunk + 1 in marks:
                results[name]["bytes"][chunk + 1] = memory.nbytes
    for name, values in seconds.items():
        for mark in marks:
            results[name]["seconds"][mark] = statistics.median(values[mark : mark + repeats])
    return results


PARTS: dict[str, Callable[[Path, Sizes, int], dict[str, Any]]] = {"rooms": rooms, "panorama": panorama, "cost": cost}


def measure(part: str, folder: WorkFolder, sizes: Sizes, seed: int) -> dict[str, Any]:
    """What the work folder holds of a part, measured if there is nothing."""

    def make() -> dict[str, Any]:
        print(f"seed {seed}: {part}", flush=True)
        return {"measured": PARTS[part](folder.folder, sizes, seed)}

    return folder.stored(part, make)["measured"]


# --- report ------------------------------------------------------------------------------------------------------


def spread(values: list[float | None]) -> str:
    """Mean and range over the seeds that measured it."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{statistics.mean(known):.2f} ({min(known):.2f}–{max(known):.2f})"


def arms_table(runs: list[dict[str, Any]], world: str) -> str:
    """Recall by absence, validity and effective context length, mean and range over seeds."""
    bins = [f"{low}-{high}" for low, high in GAP_BINS[world]]
    lines = [
        "| arm | "
        + " | ".join(f"recall, {name} frames" for name in bins)
        + " | recall beyond the window | two videos agree | validity | ECL, s |"
    ]
    lines.append("|---" * (len(bins) + 5) + "|")
    for arm in runs[0]:
        cells = [spread([run[arm]["recall"][name] for run in runs]) for name in bins]
        cells.append(spread([beyond_window(run[arm]) for run in runs]))
        cells += [spread([run[arm][key] for run in runs]) for key in ("agreement", "validity", "ecl_seconds")]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def above_agreement(measured: dict[str, Any]) -> float | None:
    """`beyond_window` less what two videos agree on."""
    recall = beyond_window(measured)
    return None if recall is None else recall - measured["agreement"]


def rooms_verdict(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The spec's bars, from means over seeds; None where a seed has no value for what a bar is about."""
    arms = {name: name.split()[0] for name in runs[0]["arms"] if name[1] == " "}

    def means(letters: str, measure: Callable[[dict[str, Any]], float | None]) -> dict[str, float | None]:
        result = {}
        for letter in letters:
            name = next(arm for arm, short in arms.items() if short == letter)
            values = [measure(run["arms"][name]) for run in runs]
            result[letter] = None if None in values else statistics.mean(values)
        return result

    def decide(reached: Callable[..., bool], *values: float | None) -> bool | None:
        return None if None in values else reached(*values)

    recall, remembered = means("ABC", beyond_window), means("ABC", above_agreement)
    quality = means("AB", lambda arm: arm["validity"])
    ecl = means("AB", lambda arm: arm["ecl_seconds"])
    return {
        "recall beyond the window": recall,
        "recall above what two videos agree on": remembered,
        "world leaks (C > 0.45), comparison void": decide(lambda c: c > LEAKY_WORLD, recall["C"]),
        "A - B >= 0.20": decide(lambda a, b: a - b >= 0.20, recall["A"], recall["B"]),
        "A - C >= 0.25": decide(lambda a, c: a - c >= 0.25, recall["A"], recall["C"]),
        "A - B >= 0.20, above agreement": decide(lambda a, b: a - b >= 0.20, remembered["A"], remembered["B"]),
        "A - C >= 0.25, above agreement": decide(lambda a, c: a - c >= 0.25, remembered["A"], remembered["C"]),
        "validity of A within 20 % of B": decide(lambda a, b: a <= 1.2 * b, quality["A"], quality["B"]),
        "ECL of A >= 3 x B": decide(lambda a, b: a >= 3 * b and a > 0, ecl["A"], ecl["B"]),
    }


def plot_recall(runs: list[dict[str, Any]], path: Path, window: int = 6) -> None:
    """Recall against length of absence, pooled over seeds."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for arm in runs[0]:
        recalls = [RecallByGap(torch.tensor(run[arm]["hits"]), torch.tensor(run[arm]["counts"])) for run in runs]
        pooled = recalls[0].merge(*recalls[1:])
        edges = range(1, len(pooled.counts) - window, window)
        points = [(low + window / 2, pooled.rate(low, low + window - 1)) for low in edges]
        points = [(gap / LATENT_FPS, rate) for gap, rate in points if not math.isnan(rate)]
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=arm)
    axes.axhline(CHANCE, color="gray", linestyle=":", label="chance")
    axes.set(xlabel="absence, seconds", ylabel="recall", ylim=(0, 1.02))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def rooms_sections(runs: list[dict[str, Any]], out: Path) -> list[str]:
    arms = [run["arms"] for run in runs]
    plot_recall(arms, out / "rooms_recall.png")
    return [arms_table(arms, "rooms")]


def panorama_sections(runs: list[dict[str, Any]], out: Path) -> list[str]:
    sections = []
    for script in ("sweep", "long pause"):
        arms = [run[script] for run in runs]
        sections += [f"#### {script.capitalize()}", arms_table(arms, "panorama")]
        plot_recall(arms, out / f"panorama_{script.replace(' ', '_')}_recall.png")
    lines = [
        "#### Error recycling: target loss",
        "",
        "| recycling | clean context | drifted context |",
        "|---|---|---|",
    ]
    for name in ("on", "off"):
        cells = [spread([run["error recycling"][name][key] for run in runs]) for key in ("clean", "drifted")]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return [*sections, "\n".join(lines)]


def cost_sections(runs: list[dict[str, Any]], out: Path) -> list[str]:
    marks = list(runs[0]["full"]["seconds"])
    lines = ["| memory | " + " | ".join(f"chunk {mark}" for mark in marks) + " |", "|---" * (len(marks) + 1) + "|"]
    for name in runs[0]:
        cells = [
            f"{1000 * statistics.median(run[name]['seconds'][mark] for run in runs):.0f} ms, "
            f"{runs[0][name]['bytes'][mark] / 1e6:.2f} MB"
            for mark in marks
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return ["\n".join(lines)]


TITLES = {"rooms": "Rooms", "panorama": "Panorama", "cost": "Cost per chunk"}
SECTIONS = {"rooms": rooms_sections, "panorama": panorama_sections, "cost": cost_sections}


def report(results: dict[str, dict[int, Any]], sizes: Sizes, out: Path) -> str:
    """Writes results.json, table.md and the plots.

    Args:
        results: by part and seed what was measured; None where nothing was.
        sizes: budget.
        out: folder of the files.

    Returns:
        The table.
    """
    sections = []
    summary: dict[str, Any] = {
        "benchmark": "context_forcing",
        "environment": run_environment(),
        "sizes": dataclasses.asdict(sizes),
    }
    for part, by_seed in results.items():
        runs = [run for run in by_seed.values() if run is not None]
        missing = ", ".join(str(seed) for seed, run in by_seed.items() if run is None)
        summary[part] = {str(seed): run for seed, run in by_seed.items()}
        sections.append(f"### {TITLES[part]}, {len(runs)} of {len(by_seed)} seeds")
        if missing:
            sections.append(f"Not measured: seed {missing}.")
        if runs:
            sections += SECTIONS[part](runs, out)
        if part == "rooms":
            # A bar is about all the seeds that were asked for.
            verdict = None if missing else rooms_verdict(runs)
            summary["rooms verdict"] = verdict
            bars = {"bars": "not measured"} if verdict is None else verdict
            sections.append("\n".join(f"- {name}: {describe(value)}" for name, value in bars.items()))
    table = "\n\n".join(sections) + "\n"
    write_results(out, summary, table)
    return table


def describe(value: Any) -> str:
    """A bar's verdict or the numbers of the arms that it is about."""
    if isinstance(value, dict):
        return ", ".join(f"{arm} {describe(number)}" for arm, number in value.items())
    if value is None:
        return "no value"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen parts where they aren't measured yet; write and print what is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="to measure; default: all")
    add_seeds(parser)
    parser.add_argument("--work", type=Path, default=Path("runs/context_forcing_bench"), help="default: %(default)s")
    add_out(parser, "context_forcing")
    add_sizes(parser, Sizes)
    options = parser.parse_args(arguments)
    sizes = parse_sizes(Sizes, options.set)
    set_threads()

    if "rooms" in options.parts:
        for seed in options.seeds:
            rooms_test_videos(sizes, seed)  # after hours of training is too late to find them unfit
    folders = {seed: WorkFolder(options.work / f"seed_{seed}", dataclasses.asdict(sizes)) for seed in options.seeds}
    results: dict[str, dict[int, Any]] = {part: {} for part in PARTS}
    for seed, folder in folders.items():
        for part in PARTS:
            wanted = part in options.parts or folder.holds(part)
            results[part][seed] = measure(part, folder, sizes, seed) if wanted else None
    print(report(results, sizes, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
