"""`vidgen doctor`: what this machine can run and what it will cost. The first thing to send with a bug report."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

CORE_PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "omegaconf", "av", "numpy")
# Import name of each optional package and the extra that installs it.
OPTIONAL_PACKAGES = {
    "decord2": "video",
    "opencv-python": "video",
    "peft": "train",
    "tensorboard": "train",
    "torchvision": "eval",
    "torchmetrics": "eval",
    "vizdoom": "worlds",
    "ale-py": "worlds",
    "gymnasium": "envs",
    "gradio": "demo",
    "xformers": "gpu",
}

# What Wan2.1-T2V-1.3B's transformer and VAE say in their config.json.
WAN_1_3B = {"num_layers": 30, "num_attention_heads": 12, "attention_head_dim": 128}
WAN_SPATIAL_STRIDE = 8


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: Annotated[str | None, typer.Option(help="Device to judge: cpu, cuda, cuda:1, mps.")] = None,
) -> None:
    """Show versions, device, usable attention and video backends (or why not), and what memory will cost."""
    report = collect(device)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)


def collect(device: str | None = None) -> dict[str, Any]:
    """Gathers the report as JSON-able values; sizes are in bytes."""
    import torch

    import vidgen
    from vidgen.data import usable_backends
    from vidgen.runtime.attention import list_attention_backends
    from vidgen.runtime.device import available_memory, select_device, select_dtype, set_threads

    chosen = select_device(device)
    dtype = select_dtype(None, chosen)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else platform.processor() or "CPU"
    return {
        "versions": {"vidgen": vidgen.__version__, "python": platform.python_version()}
        | {name: _version(name) for name in (*CORE_PACKAGES, *OPTIONAL_PACKAGES)},
        "machine": {
            "platform": platform.platform(),
            "device": str(chosen),
            "device_name": name,
            "default_dtype": str(dtype).removeprefix("torch."),
            "cores": cores,
            "threads": set_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "available_memory": available_memory(chosen),
        },
        "attention_backends": list_attention_backends(chosen, dtype),
        "video_backends": usable_backends(),
        "embedded_model": _embedded_model(),
        "memory_cost": _memory_cost(dtype),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _embedded_model() -> str | None:
    from vidgen.runtime.assets import AssetError, find_asset

    try:
        return str(find_asset())
    except AssetError:
        return None


def _memory_cost(dtype: Any) -> list[dict[str, Any]]:
    """What the default slow-fast memory holds once full, for one video without classifier-free guidance."""
    import torch

    from vidgen.memory import SlowFastMemory

    memory = SlowFastMemory()
    slots = memory.config.sink + memory.config.slow + memory.config.fast
    models = [("Wan2.1-T2V-1.3B", WAN_1_3B, (480, 832), (1, 2, 2), torch.bfloat16)]
    if embedded := _embedded_model():
        with open(os.path.join(embedded, "transformer", "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        models.insert(0, ("embedded default", config, (64, 112), config["patch_size"], dtype))
    costs = []
    for name, config, (height, width), (_, patch_height, patch_width), model_dtype in models:
        tokens = (height // WAN_SPATIAL_STRIDE // patch_height) * (width // WAN_SPATIAL_STRIDE // patch_width)
        costs.append(
            {
                "model": name,
                "height": height,
                "width": width,
                "dtype": str(model_dtype).removeprefix("torch."),
                "slots": slots,
                "tokens_per_slot": tokens,
                "bytes": memory.estimate_nbytes(config, tokens, 1, model_dtype),
            }
        )
    return costs


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from vidgen.pipelines.budget import format_bytes

    console = Console()

    def table(title: str, *columns: str) -> Table:
        return Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))

    versions = table("Versions", "package", "version")
    for name, number in report["versions"].items():
        extra = OPTIONAL_PACKAGES.get(name)
        versions.add_row(name, number or f'not installed: pip install "vidgen\\[{extra}]"')
    console.print(versions, "")

    machine = table("Machine", "", "")
    for name, value in report["machine"].items():
        machine.add_row(name.replace("_", " "), format_bytes(value) if name == "available_memory" else str(value))
    machine.add_row("embedded model", report["embedded_model"] or "absent: the installation is incomplete")
    console.print(machine, "")

    for title, backends in (("Attention", report["attention_backends"]), ("Video reading", report["video_backends"])):
        rows = table(f"{title} backends", "name", "usable")
        for name, reason in sorted(backends.items(), key=lambda item: item[1] is not None):
            rows.add_row(name, "yes" if reason is None else f"no: {reason}")
        console.print(rows, "")

    costs = table("What a slow-fast memory costs, however long the video", "model", "size", "bytes")
    for cost in report["memory_cost"]:
        size = f"{cost['height']}x{cost['width']}, {cost['slots']} slots of {cost['tokens_per_slot']} tokens"
        costs.add_row(f"{cost['model']} ({cost['dtype']})", size, format_bytes(cost["bytes"]))
    console.print(costs)
