"""What the benchmarks share: the model under test, held-out scenes, their videos, common options, progress, files."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from vidgen.memory import KVMemoryConfig, SlidingWindowMemoryConfig, SlowFastMemoryConfig
from vidgen.pipelines import ContextForcingPipeline
from vidgen.runtime.assets import find_asset
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.device import generator_for, select_device, select_dtype
from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.runtime.meter import run_environment
from vidgen.worlds import CameraMove, LandscapeScene, LandscapeWorld
from vidgen.worlds.landscape import BIOMES, FAST_SPEED, RAMP_SECONDS, TIMES, TRAVELLERS, WEATHERS

# Held-out scenes; the classifier learns from seeds below, the recipes of the model from lower ones still.
TEST_SEEDS = 4_000_000

Sizes = TypeVar("Sizes")


def make_parser(description: str, name: str) -> argparse.ArgumentParser:
    """Parser of the options that every benchmark has: `--model`, `--out`, `--smoke` and `--check`.

    Args:
        description: the benchmark's docstring.
        name: of the benchmark, and of its folder in `eval/results`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="pipeline folder; default the embedded model")
    add_out(parser, name)
    parser.add_argument("--smoke", action="store_true", help="a few seconds of video: shows direction, not numbers")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    return parser


def add_out(parser: argparse.ArgumentParser, name: str, parent: str = "eval/results") -> None:
    """Adds `--out`, by default the benchmark's folder in `eval/results`.

    Args:
        parser: of the benchmark.
        name: of the benchmark, under `"benchmark"` in its results.
        parent: of the default folder.
    """
    # Text, so that the default too has to be a folder that can be written in.
    folder, default = functools.partial(_output_folder, name), f"{parent}/{name}"
    parser.add_argument("--out", type=folder, default=default, help="output folder; default: %(default)s")


def _output_folder(name: str, text: str) -> Path:
    """Made at once: after hours of measuring it is too late to learn that nothing can be written."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # permission bits don't tell about read-only file systems
            pass
        held = _benchmark_of(folder / "results.json")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't write in {text!r} ({error.strerror}); give a folder") from error
    if held not in (None, name):
        raise argparse.ArgumentTypeError(
            f"{folder / 'results.json'} holds {held}, not results of {name}; give another folder or delete it"
        )
    return folder


def _benchmark_of(results: Path) -> str | None:
    """The benchmark that wrote a file of results; None where there is no file."""
    if not results.exists():
        return None
    try:
        content = json.loads(results.read_text(encoding="utf-8"))
    except ValueError:
        return "no JSON"
    name = content.get("benchmark") if isinstance(content, dict) else None
    return name if isinstance(name, str) else "nothing that says which benchmark it is of"


def add_sizes(parser: argparse.ArgumentParser, kind: type) -> None:
    """Adds `--set`, which changes sizes; see `parse_sizes`."""
    names = ", ".join(field.name for field in dataclasses.fields(kind))
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER", help=f"budget: {names}")


def parse_sizes(kind: type[Sizes], items: Sequence[str]) -> Sizes:
    """Sizes with `NAME=NUMBER` changes.

    Args:
        kind: dataclass of numbers with defaults.
        items: of `--set`.

    Raises:
        ConfigError: an unknown name, no number of its kind, or an impossible one.
    """
    kinds = {field.name: type(field.default) for field in dataclasses.fields(kind)}
    changes = {}
    for item in items:
        name, _, number = item.partition("=")
        try:
            changes[name] = kinds[name](number)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"--set {item}: allowed NAME=NUMBER with NAME of {', '.join(kinds)}") from error
    return kind(**changes)


def check_sizes(sizes: Any, may_be_zero: Sequence[str] = ()) -> None:
    """Refuses what isn't positive and finite among sizes.

    Raises:
        ConfigError: names the field.
    """
    for field in dataclasses.fields(sizes):
        value = getattr(sizes, field.name)
        if not 0 <= value < math.inf or (value == 0 and field.name not in may_be_zero):
            raise ConfigError(f"{field.name}={value}; it must be positive.")


def add_seeds(parser: argparse.ArgumentParser) -> None:
    """Adds `--seeds`, by default three."""
    parser.add_argument(
        "--seeds", nargs="+", type=_seed, action=_DifferentSeeds, default=[0, 1, 2], help="default: 0 1 2"
    )


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; allowed: whole numbers from 0 to {(1 << 31) - 1}")
    return int(text)


class _DifferentSeeds(argparse.Action):
    """The same seed twice would count as two measurements."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if len(set(values)) < len(values):
            parser.error(f"{option} {' '.join(map(str, values))}: every seed once")
        setattr(namespace, self.dest, values)


def add_merge(parser: argparse.ArgumentParser) -> None:
    """Adds `--merge`; see `earlier_results` and `measure_seeds`."""
    text = "keep the other seeds that results.json of --out holds, which must have been measured with the same sizes"
    parser.add_argument("--merge", action="store_true", help=text)


def earlier_results(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """With `--merge`, what results.json of `--out` holds; empty without either.

    Args:
        options: parsed ones, with `merge` and `out`.
        settings: what every measurement was made with, under `"sizes"` in the results.

    Raises:
        ConfigError: the results were measured with other settings.
    """
    path = options.out / "results.json"
    if not options.merge or not path.exists():
        return {}
    results = json.loads(path.read_text(encoding="utf-8"))
    if results["sizes"] != json.loads(json.dumps(settings)):
        raise ConfigError(f"--merge: {path} was measured with other sizes; give the same, or another --out.")
    return results


def measure_seeds(
    seeds: Sequence[int], measure: Callable[[int], dict[str, Any]], earlier: Mapping[str, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Measurements by seed, each with the environment it was made in; earlier ones of other seeds stay.

    Args:
        seeds: to measure now.
        measure: everything about one seed.
        earlier: measurements by seed, as results.json holds them.
    """
    fresh = {seed: {**measure(seed), "environment": run_environment()} for seed in seeds}
    return dict(sorted({**{int(seed): run for seed, run in earlier.items()}, **fresh}.items()))


def reports_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Makes a benchmark end in one line and with status 2 at an error that its user can repair."""

    @functools.wraps(main)
    def reporting(*arguments: Any, **options: Any) -> int:
        try:
            return main(*arguments, **options)
        except (VidgenError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return reporting


class WorkFolder:
    """Where an interrupted benchmark goes on: every finished measurement is a file, trained models are folders beside.

    Args:
        folder: made if needed.
        settings: what all that is in the folder was made with; what JSON can hold.

    Raises:
        ConfigError: when the folder was begun with other settings, or holds something and doesn't say with which.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        unknown = any(folder.iterdir()) and not self.holds("sizes")
        if unknown or self.stored("sizes", lambda: settings) != settings:
            raise ConfigError(f"{folder} was begun with other sizes; use another --work, the same sizes or delete it.")

    def holds(self, name: str) -> bool:
        """Whether the measurement of this name is finished."""
        return self._path(name).exists()

    def stored(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The finished measurement of this name, made if there is none."""
        if not self.holds(name):
            content = make()
            with atomic_write(self._path(name)) as temporary:
                temporary.write_text(json.dumps(content), encoding="utf-8")
        return json.loads(self._path(name).read_text(encoding="utf-8"))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def model_folder(model: str | None) -> Path:
    """Folder of the model under test, by default the embedded one."""
    return Path(model or find_asset())


def load_pipeline(model: str | None) -> ContextForcingPipeline:
    """The pipeline on this machine's device, silent."""
    device = select_device()
    pipe = ContextForcingPipeline.from_pretrained(model_folder(model), dtype=select_dtype(None, device)).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and range over seeds."""
    mean, low, high = (f"{value:.{digits}f}" for value in (statistics.mean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def report_progress(text: str) -> None:
    """One line on stderr, overwritten on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def write_results(out: Path, results: dict[str, Any], table: str) -> None:
    """Write results.json and table.md."""
    for name, text in (("results.json", json.dumps(results, indent=1) + "\n"), ("table.md", table)):
        with atomic_write(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def held_out_scene(
    world: LandscapeWorld,
    index: int,
    seconds: float,
    moves: Sequence[CameraMove] | None = None,
    **attributes: str,
) -> LandscapeScene:
    """Held-out scene; 96 in a row hold every biome, time and weather equally often, 480 every combination once."""
    drawn = {
        "biome": BIOMES[index % 6],
        "time_of_day": TIMES[index // 6 % 4],
        "weather": WEATHERS[index // 24 % 4],
        "traveller": TRAVELLERS[index % 5],
    }
    return world.scene(seed=TEST_SEEDS + index, seconds=seconds, moves=moves, **{**drawn, **attributes})


def generate(
    pipe: ContextForcingPipeline,
    plans: Sequence[Sequence[tuple[str, float | None]]],
    seconds: float,
    seeds: Sequence[int],
    memory: str | KVMemoryConfig = "slow_fast",
) -> tuple[np.ndarray, torch.Tensor]:
    """Videos of several prompt plans at once.

    Returns:
        uint8 frames `(videos, frames, height, width, 3)` and normalized latents `(videos, channels, frames, h, w)`.
    """
    generators = [generator_for(TEST_SEEDS, seed) for seed in seeds]
    session = pipe.session(
        [list(plan) for plan in plans], seconds=seconds, generator=generators, memory=memory, undo_depth=0
    )
    frames, latents = [], []
    for chunk in session:
        frames.append(chunk if len(plans) > 1 else chunk[None])
        latents.append(session.last_latents)
    return np.concatenate(frames, axis=1), torch.cat(latents, dim=2)


def there_and_back(pipe: ContextForcingPipeline, turn: float) -> tuple[CameraMove, CameraMove]:
    """The camera pans right for about `turn` seconds and then back to where it began.

    The prompt changes where a chunk begins, so that the model hears of the turn when the world makes it.
    """
    stride, fps = pipe.vae_scale_factor_temporal, pipe.config.fps
    chunk_frames = pipe.transformer.config.num_frames_per_block * stride
    first_chunk = chunk_frames - stride + 1
    before = (first_chunk + chunk_frames * max(0, round((turn * fps - first_chunk) / chunk_frames))) / fps
    return (
        CameraMove("pan right", before, FAST_SPEED),
        CameraMove("pan left", before + 2 * RAMP_SECONDS, FAST_SPEED),
    )


def turning_second(moves: Sequence[CameraMove]) -> float:
    """Second at which the camera of `there_and_back` stands still to turn."""
    return moves[0].seconds + 0.5 * RAMP_SECONDS


def recall_arms() -> dict[str, str | KVMemoryConfig]:
    """Slow-fast memory, a window of equally many slots, and everything."""
    slow_fast = SlowFastMemoryConfig()
    return {
        "slow_fast": slow_fast,
        "sliding_window": SlidingWindowMemoryConfig(window=slow_fast.sink + slow_fast.slow + slow_fast.fast),
        "full": "full",
    }
