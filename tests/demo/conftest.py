"""A demo of tiny random models, served on loopback."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vidgen.controls import ControlEncoder, DeltaControls
from vidgen.demo.context import DemoConfig, DemoContext
from vidgen.demo.uploads import UploadLimits
from vidgen.demo.visitors import Visitors
from vidgen.pipelines import WorldModelPipeline
from vidgen.runtime.checkpoint import save_safetensors
from vidgen.worlds.room import RoomWorld

SIZE = 16


@pytest.fixture(scope="session")
def pipe(make_pipeline: Callable[..., Any]) -> Any:
    """32 x 48 pixels, 12 frames per second, prompts of a whole sentence."""
    return make_pipeline(default_height=32, default_width=48, max_sequence_length=64)


@pytest.fixture(scope="session")
def world(make_world_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of rooms with random weights, and its folder, in which only the starts are."""
    spec = RoomWorld(SIZE).delta_controls.spec
    pipe = make_world_model(ControlEncoder(DeltaControls(spec), "vector", units=(0.12, 0.12, 0.16)))
    folder = tmp_path_factory.mktemp("worlds") / "tiny"
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (2, 2, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator)
    save_safetensors(
        {"frames": frames, "controls": torch.zeros(2, 2, 3, dtype=torch.float64)}, folder / "starts.safetensors"
    )
    return pipe, folder


@pytest.fixture(scope="session")
def make_context(
    pipe: Any, world: tuple[WorldModelPipeline, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., DemoContext]:
    """A context of the tiny models with other limits."""

    def make(worlds: bool = True, **limits: Any) -> DemoContext:
        limits.setdefault("uploads", UploadLimits(megabytes=0.5, side=256, seconds=2))
        config = DemoConfig(tmp_path_factory.mktemp("demo"), **limits)
        visitors = Visitors(
            config.output / "visitors", config.max_visitors, config.idle_seconds, config.forget_seconds
        )
        return DemoContext(config, pipe, {"tiny": world} if worlds else {}, visitors)

    return make


@contextlib.contextmanager
def serve(context: DemoContext) -> Iterator[str]:
    """The address of a running demo."""
    from vidgen.demo.app import launch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Where gradio keeps files is the process's; another demo of it may be running.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", "")
        app, address = launch(context, port=port, block=False)
        try:
            yield address
        finally:
            app.close()
            context.visitors.close()


@pytest.fixture(scope="session")
def start_demo() -> Callable[[DemoContext], contextlib.AbstractContextManager[str]]:
    """Serves a context on a free port."""
    return serve


@pytest.fixture
def picture_file(tmp_path: Path) -> Path:
    """A PNG of 40 x 30 pixels."""
    import PIL.Image

    path = tmp_path / "picture.png"
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(path)
    return path
