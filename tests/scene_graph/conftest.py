"""What the tests of scene graphs share: helper modules of this folder, by fixture, and random graphs and samples."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from scene_graph.schema import Sample, SceneGraph


def load_helper(name: str) -> ModuleType:
    """A module beside this file; test folders aren't packages, so it can't be imported by name."""
    full_name = f"scene_graph_test_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


@pytest.fixture(scope="session")
def builders() -> ModuleType:
    """`builders.py`."""
    return load_helper("builders")


@pytest.fixture(scope="session")
def qwen() -> ModuleType:
    """`qwen.py`: processors and tiny models of real architectures, made here."""
    return load_helper("qwen")


@pytest.fixture(scope="session")
def make_graph(builders: ModuleType) -> Callable[..., SceneGraph]:
    """Builds a random graph from a generator, and optionally a vocabulary and a number of triplets."""
    return builders.make_graph


@pytest.fixture(scope="session")
def make_sample(builders: ModuleType) -> Callable[..., Sample]:
    """Builds a sample with views of noise from a generator, and optionally a graph, a take and a frame."""
    return builders.make_sample


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with the same numbers in every test."""
    return np.random.default_rng(0)
