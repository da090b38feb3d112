"""What a generation costs: seconds per chunk, memory, video seconds per wall second, utilization of the machine.

Claim: with a memory of constant size, the 200th chunk costs what the 10th does, in time and in bytes; the embedded
model makes a minute of video in at most a minute.

    python eval/generation_cost.py                    # the embedded model, about 8 minutes on 2 cores
    python eval/generation_cost.py --model FOLDER --check

All memories generate the same video side by side, chunk by chunk in turns, so that whatever else the machine does hits
all of them alike. The curves time denoising and commit, without decoding, whose constant cost would hide a growth. The
ratio of late to early chunks is measured in turns as well: a session kept aside at chunk 10 against the same session
at its end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from _benchmark import load_pipeline, make_parser, model_folder, report_progress, reports_errors, write_results
from torch.nn.attention import SDPBackend, sdpa_kernel

from vidgen.data import VideoWriter
from vidgen.memory import FullMemoryConfig, KVMemoryConfig, SlidingWindowMemoryConfig, SlowFastMemoryConfig
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.pipelines import ContextForcingPipeline, GenerationSession
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.device import generator_for, return_freed_memory, set_threads
from vidgen.runtime.errors import VidgenError
from vidgen.runtime.meter import count_flops, matmul_peak, run_environment

PROMPT = (
    "A hot-air balloon floats over a green meadow at dawn in clear weather while the camera pans slowly to the right"
)
MINUTE = 60.0
EARLY_CHUNK = 10
MAX_RATIO, MAX_GROWTH = 1.15, 1.05
DISPLAY_HEIGHT = 256  # `vidgen generate` enlarges smaller frames to at least this many lines
ONE_SHOT_FRAMES = (15, 30, 60, 120, 240)


def arms(num_chunks: int, num_frames_per_block: int) -> dict[str, KVMemoryConfig]:
    """The memories that are compared; window and slow-fast hold equally many slots."""
    slow_fast = SlowFastMemoryConfig()
    return {
        "full": FullMemoryConfig(max_frames=num_chunks * num_frames_per_block),
        "sliding_window": SlidingWindowMemoryConfig(window=slow_fast.sink + slow_fast.slow + slow_fast.fast),
        "slow_fast": slow_fast,
    }


def start_session(
    pipe: ContextForcingPipeline, memory: KVMemoryConfig, num_chunks: int, seed: int, decode: bool
) -> GenerationSession:
    """A session of exactly `num_chunks` chunks."""
    num_latents = num_chunks * pipe.transformer.config.num_frames_per_block
    num_frames = (num_latents - 1) * pipe.vae_scale_factor_temporal + 1
    generator = generator_for(seed)
    return pipe.session(PROMPT, num_frames=num_frames, memory=memory, generator=generator, undo_depth=0, decode=decode)


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Wall seconds of a call, work queued on a GPU included."""
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


# --- measurements ----------------------------------------------------------------------------------------------


def measure_memories(
    pipe: ContextForcingPipeline, num_chunks: int, seeds: Sequence[int], turns: int
) -> dict[str, Any]:
    """Seconds and memory bytes of every chunk, per arm and seed, and late against early chunks."""
    device = pipe._execution_device
    early = min(EARLY_CHUNK, num_chunks // 2)
    configs = arms(num_chunks, pipe.transformer.config.num_frames_per_block)
    results: dict[str, Any] = {
        name: {"seconds": [], "nbytes": [], "early_seconds": [], "late_seconds": [], "late_to_early": []}
        for name in configs
    }
    for seed in seeds:
        sessions = {
            name: start_session(pipe, config, num_chunks, seed, decode=False) for name, config in configs.items()
        }
        kept: dict[str, GenerationSession] = {}
        for measured in results.values():
            measured["seconds"].append([])
            measured["nbytes"].append([])
        for chunk in range(num_chunks - 1):
            # Nobody is always first: what one arm leaves in the caches is not always met by the same other arm.
            order = list(sessions)[chunk % len(sessions) :] + list(sessions)[: chunk % len(sessions)]
            for name in order:
                if chunk == early:
                    kept[name] = sessions[name].fork()
                results[name]["seconds"][-1].append(timed(sessions[name].step, device))
                results[name]["nbytes"][-1].append(sessions[name].memory.nbytes)
            report_progress(f"seed {seed}: chunk {chunk + 1}/{num_chunks}")
        for name, session in sessions.items():
            early_seconds, late_seconds = [], []
            for _ in range(turns):
                # A fork is stepped, so that every turn repeats the very same chunk.
                early_seconds.append(timed(kept[name].fork().step, device))
                late_seconds.append(timed(session.fork().step, device))
            early_median, late_median = statistics.median(early_seconds), statistics.median(late_seconds)
            results[name]["early_seconds"].append(early_median)
            results[name]["late_seconds"].append(late_median)
            results[name]["late_to_early"].append(late_median / early_median)
    for name, measured in results.items():
        session = start_session(pipe, configs[name], num_chunks, seeds[0], decode=False)
        while session.chunk_index < min(num_chunks - 1, 2 * early):
            session.step()
        # Fused attention on the CPU is invisible to the counter; its plain form has the same products.
        with sdpa_kernel(SDPBackend.MATH):
            measured["flops_per_chunk"] = count_flops(session.fork().step)
        measured["flops_chunk_index"] = session.chunk_index
    return results


def measure_one_shot(pipe: ContextForcingPipeline, max_frames: int, repeats: int) -> list[dict[str, Any]]:
    """A bidirectional forward over the whole video: no memory, and nothing to show before the end."""
    transformer = pipe.transformer
    one_shot = CausalWanTransformer3DModel.from_config({**transformer.config, "causal": False})
    one_shot.load_state_dict(transformer.state_dict())
    one_shot.to(transformer.device, transformer.dtype).eval()
    device = pipe._execution_device
    text = pipe.encode_prompt(PROMPT, do_classifier_free_guidance=False)[0]
    session = start_session(pipe, SlowFastMemoryConfig(), 1, 0, decode=False)
    channels, height, width = session.latent_shape
    num_steps = session.settings.num_inference_steps
    rows = []
    for num_frames in [size for size in ONE_SHOT_FRAMES if size <= max_frames]:
        latents = torch.zeros(1, channels, num_frames, height, width, device=device, dtype=transformer.dtype)
        timestep = torch.full((1,), 500.0, device=device)

        @torch.no_grad()
        def forward(latents: torch.Tensor = latents, timestep: torch.Tensor = timestep) -> None:
            one_shot(hidden_states=latents, timestep=timestep, encoder_hidden_states=text)

        seconds = [num_steps * timed(forward, device) for _ in range(repeats)]
        report_progress(f"one-shot: {num_frames} latent frames")
        num_chunks = num_frames / transformer.config.num_frames_per_block
        rows.append(
            {
                "latent_frames": num_frames,
                "chunks": num_chunks,
                "seconds_whole_video": seconds,
                "seconds_per_chunk": [value / num_chunks for value in seconds],
            }
        )
    return rows


def measure_resident(pipe: ContextForcingPipeline, num_chunks: int) -> dict[str, list[int]]:
    """Resident and memory bytes after every chunk of one decoded slow-fast generation; meant for a fresh process."""
    process = psutil.Process()
    session = start_session(pipe, SlowFastMemoryConfig(), num_chunks, 0, decode=True)
    resident, stored = [], []
    for _ in session:
        resident.append(process.memory_info().rss)
        stored.append(session.memory.nbytes)
    return {"resident_bytes": resident, "memory_bytes": stored}


def resident_in_fresh_process(model: str | None, num_chunks: int) -> dict[str, Any]:
    """[`measure_resident`] undisturbed by what this process has allocated before."""
    command = [sys.executable, __file__, "--resident-only", "--chunks", str(num_chunks)]
    command += ["--model", model] if model else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise VidgenError(f"measuring the resident memory failed:\n{done.stderr}")
    return add_growth(json.loads(done.stdout.splitlines()[-1]), num_chunks)


def add_growth(measured: dict[str, Any], num_chunks: int) -> dict[str, Any]:
    """Adds how much larger than at the early chunk each series ever gets afterwards."""
    early = min(EARLY_CHUNK, num_chunks // 2)
    for name in ("resident", "memory"):
        series = measured[f"{name}_bytes"][early:]
        measured[f"{name}_growth"] = max(series) / series[0]
    return measured


def measure_minute(pipe: ContextForcingPipeline, seconds: float, seeds: Sequence[int]) -> list[dict[str, float]]:
    """Text encoding, denoising, decoding and mp4 writing of whole videos in this process."""
    scale = -(-DISPLAY_HEIGHT // pipe.config.default_height)
    runs = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            session = pipe.session(PROMPT, seconds=seconds, generator=generator_for(seed), undo_depth=0)
            writing = 0.0
            with VideoWriter(Path(folder) / "video.mp4", fps=pipe.config.fps, scale=scale) as writer:
                for frames in session:
                    before = time.perf_counter()
                    writer.append(frames)
                    writing += time.perf_counter() - before
            total = time.perf_counter() - started
        report_progress(f"{seconds:g} s of video in {total:.1f} s")
        runs.append({"seed": seed, "seconds": total, "write": writing, **session.timings})
    return runs


def time_command(model: str | None, seconds: float, seeds: Sequence[int]) -> list[float]:
    """Wall seconds of `vidgen generate` from the shell's point of view: start of Python and loading included."""
    totals = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            entry_point = "import sys; from vidgen.cli.main import main; sys.exit(main())"
            command = [sys.executable, "-c", entry_point, "generate", PROMPT, "--seconds", f"{seconds:g}"]
            command += ["--seed", str(seed), "-o", str(Path(folder) / "video.mp4")]
            command += ["--model", model] if model else []
            started = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            totals.append(time.perf_counter() - started)
        if done.returncode != 0:
            raise VidgenError(f"vidgen generate failed:\n{done.stderr}")
        report_progress(f"vidgen generate: {seconds:g} s of video in {totals[-1]:.1f} s")
    return totals


# --- report ----------------------------------------------------------------------------------------------------


def claims(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar with the measured value; the median over seeds counts."""
    slow_fast, resident = results["memories"]["slow_fast"], results["resident"]
    checks = [
        ("late to early seconds per chunk, slow_fast", statistics.median(slow_fast["late_to_early"]), MAX_RATIO),
        ("growth of resident memory, slow_fast", resident["resident_growth"], MAX_GROWTH),
        ("growth of key-value memory, slow_fast", resident["memory_growth"], MAX_GROWTH),
    ]
    if results["command_seconds"]:
        minute = statistics.median(results["command_seconds"]) / results["video_seconds"]
        checks.append(("wall seconds per video second, whole `vidgen generate`", minute, 1.0))
    return [{"claim": claim, "value": value, "at_most": bar, "passed": value <= bar} for claim, value, bar in checks]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """`median (least to greatest)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def make_table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        f"Model `{results['model']}`, {results['chunks']} chunks, {len(results['seeds'])} seeds, "
        f"{results['environment']['cpu']}, {results['environment']['threads']} threads, {results['dtype']}. "
        "Median (least to greatest) over seeds.",
        "",
        f"| memory | s per chunk at {results['early_chunk']} | s per chunk at {results['chunks']} | late / early "
        "| key-value bytes at the end | utilization |",
        "|---|---|---|---|---|---|",
    ]
    for name, measured in results["memories"].items():
        cells = [spread(measured[key]) for key in ("early_seconds", "late_seconds", "late_to_early")]
        cells += [f"{measured['nbytes'][0][-1]:,}", f"{measured['utilization']:.0%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| one-shot bidirectional, latent frames | s for the video = until the first frame | s per chunk |"]
    lines += ["|---|---|---|"]
    for row in results["one_shot"]:
        cells = (spread(row["seconds_whole_video"], 2), spread(row["seconds_per_chunk"]))
        lines.append(f"| {row['latent_frames']} | {' | '.join(cells)} |")
    wall = [run["seconds"] for run in results["whole_video"]]
    speed = spread([results["video_seconds"] / seconds for seconds in wall], 2)
    parts = {key: statistics.median(run[key] for run in results["whole_video"]) for key in PHASES}
    lines += [
        "",
        f"{results['video_seconds']:g} s of video in {spread(wall, 1)} s: {speed} video seconds per wall second ("
        + ", ".join(f"{key} {value:.1f} s" for key, value in parts.items())
        + ").",
    ]
    if results["command_seconds"]:
        lines.append(f"`vidgen generate`, start and loading included: {spread(results['command_seconds'], 1)} s.")
    resident = results["resident"]["resident_bytes"]
    lines += [
        f"Resident memory of a fresh process: {resident[results['early_chunk']] / 2**20:.0f} MiB at chunk "
        f"{results['early_chunk']}, at most {max(resident) / 2**20:.0f} MiB.",
        f"Matrix-product peak of this machine: {results['matmul_peak'] / 1e9:.0f} GFLOP/s.",
        "",
        "| bar | measured | at most | |",
        "|---|---|---|---|",
    ]
    for claim in results["claims"]:
        verdict = "pass" if claim["passed"] else "FAIL"
        lines.append(f"| {claim['claim']} | {claim['value']:.3f} | {claim['at_most']:g} | {verdict} |")
    return "\n".join(lines) + "\n"


PHASES = ("text", "denoise", "commit", "decode", "write")


def draw_curves(results: dict[str, Any], path: Path) -> None:
    """Seconds per chunk against chunk index; bands span the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, measured in results["memories"].items():
        series = torch.tensor(measured["seconds"])
        # A running median of 5 chunks: single chunks show the scheduler of the operating system.
        smooth = torch.nn.functional.pad(series, (2, 2), mode="replicate").unfold(1, 5, 1).median(-1).values
        index = range(smooth.shape[1])
        axes.plot(index, smooth.median(0).values, label=name)
        axes.fill_between(index, smooth.amin(0), smooth.amax(0), alpha=0.2)
    if results["one_shot"]:
        chunks = [row["chunks"] for row in results["one_shot"]]
        seconds = [statistics.median(row["seconds_per_chunk"]) for row in results["one_shot"]]
        axes.plot(chunks, seconds, "k.--", label="one-shot bidirectional (whole video / chunks)")
    axes.set(xlabel="chunk (length of the video for one-shot)", ylabel="seconds per chunk", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=120)
    pyplot.close(figure)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "generation_cost")
    parser.add_argument("--chunks", type=int, default=200, help="chunks of the curves")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, 0, 1, …")
    parser.add_argument("--resident-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.chunks < 4 or options.seeds < 1:
        parser.error(f"--chunks {options.chunks} --seeds {options.seeds}: at least 4 chunks and 1 seed are needed")
    return options


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write results.json, table.md and seconds_per_chunk.png, print the table."""
    options = parse_arguments(arguments)
    set_threads()
    return_freed_memory()
    pipe = load_pipeline(options.model)
    if options.resident_only:
        print(json.dumps(measure_resident(pipe, options.chunks)))
        return 0
    num_chunks = min(options.chunks, 16) if options.smoke else options.chunks
    seeds = list(range(options.seeds))
    video_seconds = 2.0 if options.smoke else MINUTE
    table_size = pipe.transformer.config.rope_max_seq_len
    chunk = pipe.transformer.config.num_frames_per_block

    start_session(pipe, SlowFastMemoryConfig(), 2, 0, decode=True).step()  # warm-up
    peaks = [matmul_peak(pipe.transformer.dtype, device=pipe._execution_device)]
    results: dict[str, Any] = {
        "benchmark": "generation_cost",
        "model": model_folder(options.model).name,
        "smoke": options.smoke,
        "seeds": seeds,
        "chunks": num_chunks,
        "early_chunk": min(EARLY_CHUNK, num_chunks // 2),
        "video_seconds": video_seconds,
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        "environment": run_environment(),
        "memories": measure_memories(pipe, num_chunks, seeds, turns=3 if options.smoke else 15),
        "one_shot": measure_one_shot(pipe, min(table_size, num_chunks * chunk), repeats=max(1, len(seeds))),
        "whole_video": measure_minute(pipe, video_seconds, seeds),
        "command_seconds": [] if options.smoke else time_command(options.model, video_seconds, seeds),
        "resident": resident_in_fresh_process(options.model, num_chunks),
    }
    # Measured at both ends and the better one taken: a busy neighbor must not make the utilization look good.
    peaks.append(matmul_peak(pipe.transformer.dtype, device=pipe._execution_device))
    results["matmul_peak"] = max(peaks)
    for measured in results["memories"].values():
        at = measured["flops_chunk_index"]
        near = [value for series in measured["seconds"] for value in series[max(0, at - 2) : at + 3]]
        measured["utilization"] = measured["flops_per_chunk"] / (statistics.median(near) * results["matmul_peak"])
    results["claims"] = claims(results)

    table = make_table(results)
    write_results(options.out, results, table)
    draw_curves(results, options.out / "seconds_per_chunk.png")
    print(table)
    return int(options.check and not all(claim["passed"] for claim in results["claims"]))


if __name__ == "__main__":
    sys.exit(main())
