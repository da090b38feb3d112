"""A tiny world model, and starts for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vidgen.pipelines import WorldModelPipeline

SIZE = 8


@pytest.fixture(scope="session")
def pipe(make_world_model: Callable[..., WorldModelPipeline]) -> WorldModelPipeline:
    """A tiny world model with the choices "forward" and "turn left". Tests don't change it."""
    return make_world_model()


@pytest.fixture(scope="session")
def starts() -> dict[str, Any]:
    """Five starts of two frames."""
    generator = np.random.default_rng(0)
    frames = generator.integers(0, 256, (5, 2, SIZE, SIZE, 3), dtype=np.uint8)
    return {"frames": frames, "controls": generator.normal(0, 0.3, (5, 2, 3)) * [[[0.0], [1.0]]]}
