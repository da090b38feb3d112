from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from vidgen.runtime.device import (
    available_memory,
    derive_seed,
    generator_for,
    select_device,
    select_dtype,
    set_threads,
)
from vidgen.runtime.errors import DeviceError

GOLDEN = [
    8147104208329303767,
    7602086088874765910,
    1984132862828970201,
    5992091912978933115,
    4664725284122301705,
]


def test_derived_seeds_never_change_between_versions():
    assert [derive_seed(), derive_seed(0), derive_seed(0, 0), derive_seed(1, 2, 3), derive_seed(-1)] == GOLDEN


def test_derived_seeds_of_neighbors_are_distinct_and_unordered():
    seeds = [derive_seed(seed, step, rank) for seed in range(10) for step in range(100) for rank in range(4)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert derive_seed(1) != derive_seed(1, 0)
    ones = sum(bin(seed).count("1") for seed in seeds) / len(seeds)
    assert abs(ones - 31.5) < 0.5


def test_generator_depends_on_its_keys_alone():
    torch.manual_seed(1)
    first = torch.randn(4, generator=generator_for(3, 4))
    torch.manual_seed(2)
    torch.randn(7)
    assert torch.equal(first, torch.randn(4, generator=generator_for(3, 4)))
    assert not torch.equal(first, torch.randn(4, generator=generator_for(3, 5)))


def test_auto_device_is_present_and_names_pass_through():
    assert select_device(None) == select_device("auto")
    assert select_device("cpu") == torch.device("cpu")
    assert select_device(torch.device("cpu")).type == "cpu"


def test_unknown_device_names_the_nearest():
    with pytest.raises(DeviceError, match="unknown device 'cpuu': did you mean 'cpu'"):
        select_device("cpuu")


def test_absent_device_is_refused():
    with pytest.raises(DeviceError, match="'cuda:77' is not present on this machine"):
        select_device("cuda:77")


def test_dtype_names():
    assert select_dtype(None, "cpu") == torch.float32
    assert select_dtype("bf16") == select_dtype("bfloat16") == select_dtype(torch.bfloat16) == torch.bfloat16
    with pytest.raises(DeviceError, match="did you mean 'float32'"):
        select_dtype("flaot32")


def test_threads_follow_the_environment_variable(monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert set_threads() == 1 == torch.get_num_threads()
        monkeypatch.setenv("OMP_NUM_THREADS", "")
        assert set_threads() == torch.get_num_threads() >= 1
    finally:
        torch.set_num_threads(before)


def test_available_memory_is_positive():
    assert available_memory("cpu") > 2**20


LARGE_BUFFER_BETWEEN_SMALL_ONES = """
import sys, psutil, torch
from vidgen.runtime.device import return_freed_memory
if sys.argv[1] == "yes":
    assert return_freed_memory()
torch.empty(7 << 20).fill_(1)  # glibc learns from freed buffers up to 32 MiB
large = torch.empty(5 << 20).fill_(1)
kept = [torch.ones(20000) for _ in range(20)]
del large
print(psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such limit")
def test_freed_buffers_leave_the_resident_set():
    resident = {
        answer: int(subprocess.check_output([sys.executable, "-c", LARGE_BUFFER_BETWEEN_SMALL_ONES, answer]))
        for answer in ("no", "yes")
    }
    assert resident["no"] - resident["yes"] > 15 << 20
