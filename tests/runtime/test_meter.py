from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from vidgen.runtime.meter import Meter, count_flops, matmul_peak, run_environment


def test_meter_sees_time_and_memory():
    # In a process of its own: in this one, memory that other tests freed would be reused and not be seen as added.
    script = """
import json, time, torch
from vidgen.runtime.meter import Meter, peak_rss

with Meter(interval=0.001) as meter:
    block = torch.ones(2**24)  # 64 MiB
    time.sleep(0.05)
    del block
print(json.dumps([meter.seconds, meter.cpu_seconds, meter.added_bytes, meter.peak_bytes, peak_rss()]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seconds, cpu_seconds, added_bytes, peak_bytes, whole_life_peak = json.loads(done.stdout)
    assert seconds >= 0.05
    assert cpu_seconds > 0
    # The block, freed again before the end, and little besides: code that is paged in by its first use.
    assert 2**26 <= added_bytes < 2**26 + 2**24
    assert added_bytes < peak_bytes <= whole_life_peak + 2**20  # the kernel counts in pages per thread, then sums up


def test_meter_stops_watching_after_an_error():
    with pytest.raises(RuntimeError), Meter() as meter:
        raise RuntimeError
    assert not meter._watcher.is_alive()


def test_flops_of_a_matrix_product():
    left, right = torch.ones(3, 5), torch.ones(5, 7)
    assert count_flops(lambda: left @ right) == 2 * 3 * 5 * 7


def test_flops_of_training_a_layer_are_three_times_the_forward():
    layer, inputs = torch.nn.Linear(8, 8, bias=False), torch.ones(4, 8, requires_grad=True)
    assert count_flops(lambda: layer(inputs).sum().backward()) == 3 * 2 * 4 * 8 * 8


def test_matmul_peak_restores_the_threads():
    before = torch.get_num_threads()
    assert matmul_peak(torch.float32, threads=1, size=64, seconds=0.01) > 1e6
    assert torch.get_num_threads() == before


def test_environment_is_json_and_names_versions():
    environment = json.loads(json.dumps(run_environment()))
    assert environment["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert environment["cpu"]
    assert environment.keys() >= {"git_revision", "git_modified", "threads", "gpus"}
