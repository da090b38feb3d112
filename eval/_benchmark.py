"""What the benchmarks share: the model under test, their common options, progress, and the files they leave."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vidgen.pipelines import ContextForcingPipeline
from vidgen.runtime.assets import find_asset
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.device import select_device, select_dtype


def make_parser(description: str, name: str) -> argparse.ArgumentParser:
    """Parser of the options that every benchmark has: `--model`, `--out`, `--smoke` and `--check`.

    Args:
        description: the benchmark's docstring.
        name: of the benchmark, and of its folder in `eval/results`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="pipeline folder; default the embedded model")
    parser.add_argument("--out", type=Path, default=Path("eval/results") / name, help="output folder")
    parser.add_argument("--smoke", action="store_true", help="a few seconds of video: shows direction, not numbers")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    return parser


def model_folder(model: str | None) -> Path:
    """Folder of the model under test, by default the embedded one."""
    return Path(model or find_asset())


def load_pipeline(model: str | None) -> ContextForcingPipeline:
    """The pipeline on this machine's device, silent."""
    device = select_device()
    pipe = ContextForcingPipeline.from_pretrained(model_folder(model), dtype=select_dtype(None, device)).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def report_progress(text: str) -> None:
    """One line on stderr, overwritten on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def write_results(out: Path, results: dict[str, Any], table: str) -> None:
    """Write results.json and table.md."""
    for name, text in (("results.json", json.dumps(results, indent=1) + "\n"), ("table.md", table)):
        with atomic_write(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
