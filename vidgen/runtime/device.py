"""Devices, number formats, threads, seeds and memory: what a run needs to know about the machine it is on."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import psutil
import torch

from .errors import DeviceError, suggestion

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_MASK = (1 << 64) - 1
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc


def select_device(name: str | torch.device | None = None) -> torch.device:
    """Chooses where tensors live.

    Args:
        name: `"cpu"`, `"cuda"`, `"cuda:1"`, `"mps"`; `None` or `"auto"` takes CUDA, then MPS, then CPU.

    Returns:
        A device that exists on this machine.

    Raises:
        DeviceError: The device is unknown, or not present.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name is None or name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    present = ["auto", "cpu"] + ["mps"] * mps
    if cuda:
        present += ["cuda"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"unknown device {str(name)!r}: {suggestion(str(name), present)}") from error
    if str(device) not in present and not (device.type == "cpu" or (device.type == "mps" and mps)):
        raise DeviceError(f"device {str(name)!r} is not present on this machine: {suggestion(str(name), present)}")
    return device


def select_dtype(name: str | torch.dtype | None = None, device: torch.device | str = "cpu") -> torch.dtype:
    """Chooses the number format of weights and activations.

    Args:
        name: `"float32"`/`"fp32"`, `"bfloat16"`/`"bf16"`, `"float16"`/`"fp16"` or a `torch.dtype`; `None` or `"auto"`
            takes bfloat16 on a GPU that computes in it and float32 everywhere else.
        device: The device the tensors will live on.

    Raises:
        DeviceError: The name is not one of the above.
    """
    if isinstance(name, torch.dtype):
        return name
    if name is None or name == "auto":
        bf16 = torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if bf16 else torch.float32
    if name not in _DTYPES:
        raise DeviceError(f"unknown dtype {name!r}: {suggestion(name, [*_DTYPES, 'auto'])}")
    return _DTYPES[name]


def return_freed_memory(threshold: int = 16 << 20) -> bool:
    """Makes the C allocator give large freed buffers back to the system at once, for the rest of this process.

    glibc raises its own limit up to 32 MiB as buffers are freed; from then on activations of several MiB share the
    heap with small objects, and the resident set of a long generation wanders by a tenth. A fixed limit keeps it flat
    at the cost of page faults. A process decides this once, so programs call it and the library does not.

    Args:
        threshold: Bytes from which a buffer gets its own mapping.

    Returns:
        Whether the allocator can be told so; others than glibc's are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, threshold))


def set_threads() -> int:
    """Gives torch as many CPU threads as this process may use, or `OMP_NUM_THREADS` where that is set.

    Containers often show every core of the host while the process is pinned to a few: torch's own default then
    oversubscribes them.

    Returns:
        The number of threads.
    """
    requested = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if requested.isdigit() and int(requested) > 0:
        threads = int(requested)
    elif hasattr(os, "sched_getaffinity"):
        threads = len(os.sched_getaffinity(0))
    else:
        threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    return threads


def _mix(value: int) -> int:
    """The output function of the SplitMix64 generator: a bijection of 64-bit integers without visible structure."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_seed(*keys: int) -> int:
    """Folds integers (a user seed, a step, a rank, a chunk index, …) into one seed.

    The value depends on the order and the number of keys and on nothing else: not on the process, the machine, or
    what was drawn before. Nearby keys give unrelated seeds.

    Returns:
        An integer in [0, 2^63).
    """
    state = _mix(len(keys))
    for key in keys:
        state = _mix(state ^ _mix(int(key) & _MASK))
    return state >> 1


def generator_for(*keys: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a fresh `torch.Generator` on `device`, seeded with `derive_seed(*keys)`."""
    return torch.Generator(device=device).manual_seed(derive_seed(*keys))


def available_memory(device: torch.device | str = "cpu") -> int:
    """Returns the bytes that can still be allocated on `device`; a container's limit counts as the machine's."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if Path(limit_file).is_file() and Path(used_file).is_file():
            limit = Path(limit_file).read_text().strip()
            if limit.isdigit():
                free = min(free, max(0, int(limit) - int(Path(used_file).read_text())))
    return free
