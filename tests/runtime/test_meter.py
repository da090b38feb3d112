from __future__ import annotations

import json
import time

import pytest
import torch

from vidgen.runtime.meter import Meter, count_flops, matmul_peak, peak_rss, run_environment


def test_meter_sees_time_and_memory():
    with Meter(interval=0.001) as meter:
        # 128 MiB: beyond the size up to which the allocator may reuse memory that is resident already
        block = torch.ones(2**25)
        time.sleep(0.02)
        del block
    assert 0.02 <= meter.seconds < 5
    assert meter.cpu_seconds >= 0
    assert meter.added_bytes >= 2**26
    assert meter.peak_bytes >= meter.added_bytes
    assert peak_rss() >= meter.added_bytes


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
