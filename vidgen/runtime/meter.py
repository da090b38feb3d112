"""Measurements: seconds, peak memory, floating-point operations, and the description of the machine they belong to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.flop_counter import FlopCounterMode

_PACKAGES = ("vidgen", "torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "av")


class Meter:
    """Measures the code inside a `with` block.

    After the block: `seconds` (wall), `cpu_seconds` (this process, all threads), `peak_bytes` (CUDA: most memory
    allocated by torch on `device`; CPU: largest resident set seen) and `added_bytes` (the part above the start).

    Args:
        device: The device whose memory is watched; CUDA work is waited for at both ends.
        interval: Seconds between looks at the resident set of a CPU run; shorter peaks can be missed.
    """

    def __init__(self, device: torch.device | str = "cpu", interval: float = 0.005) -> None:
        self.device = torch.device(device)
        self.interval = interval
        self.seconds = self.cpu_seconds = 0.0
        self.peak_bytes = self.added_bytes = 0

    def __enter__(self) -> Meter:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start_bytes = torch.cuda.memory_allocated(self.device)
        else:
            self._process = psutil.Process()
            self._start_bytes = self.peak_bytes = self._process.memory_info().rss
            self._done = threading.Event()
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = time.perf_counter() - self._wall
        self.cpu_seconds = time.process_time() - self._cpu
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            self._done.set()
            self._watcher.join()
            self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)
        self.added_bytes = max(0, self.peak_bytes - self._start_bytes)

    def _watch(self) -> None:
        while not self._done.wait(self.interval):
            self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)


def peak_rss() -> int:
    """Returns the largest resident set of this process since it began, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def count_flops(function: Callable[[], Any]) -> int:
    """Runs `function` once and returns its floating-point operations (matrix products, convolutions, attention).

    A multiply-add counts as two; elementwise operations are not counted.
    """
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def matmul_peak(
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    device: torch.device | str = "cpu",
    size: int = 1024,
    seconds: float = 0.5,
) -> float:
    """Measures the best FLOP/s of a square matrix product: the ceiling for model-FLOPs utilization.

    Args:
        dtype: Number format of the operands.
        threads: CPU threads during the measurement; `None` = the current number, which is restored afterwards.
        device: Where to measure.
        size: Rows and columns.
        seconds: How long to repeat; the fastest repetition counts.
    """
    device = torch.device(device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        left = torch.ones(size, size, dtype=dtype, device=device)
        right = torch.ones(size, size, dtype=dtype, device=device)
        product = left @ right  # the first call sets up kernels and buffers
        best, deadline = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < deadline or best == float("inf"):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            torch.matmul(left, right, out=product)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / best


def run_environment() -> dict[str, Any]:
    """Describes what a result was made with: versions, processor, GPU, threads, git revision; all JSON-able."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    revision, modified = _git_state()
    return {
        "versions": versions,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "git_revision": revision,
        "git_modified": modified,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_state() -> tuple[str | None, bool | None]:
    """The revision of the checkout vidgen runs from; a pip-installed vidgen has none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None, None
    answers = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None, None
        if done.returncode != 0:
            return None, None
        answers.append(done.stdout.strip())
    return answers[0], bool(answers[1])
