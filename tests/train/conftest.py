"""Runs a training script as two processes on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def _run(script: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        output, errors = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers; killed, it would leave them behind
        process.communicate()
        raise
    assert process.returncode == 0, errors[-4000:]
    return output


@pytest.fixture(scope="session")
def run_two_processes() -> Callable[..., str]:
    """Calls torchrun with a script and its arguments; returns what both processes printed, fails if one fails."""
    return _run
