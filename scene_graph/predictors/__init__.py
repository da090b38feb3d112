"""Models that write the scene graph of a frame, all behind the one interface `SGGPredictor`."""

from __future__ import annotations

import importlib
import os
from typing import Any

from scene_graph.predictors.base import (
    CONFIDENCE_FEATURES,
    TAIL_MASS_FEATURES,
    Example,
    Prediction,
    SGGPredictor,
    TokenStats,
    saved_class,
    token_features,
)

# torch and transformers are loaded with the model that needs them.
_EXPORTS = {
    "HFSceneGraphPredictor": "scene_graph.predictors.hf",
    "TinyPredictor": "scene_graph.predictors.tiny",
    "TinySGGModel": "scene_graph.predictors.tiny",
}

__all__ = [
    "CONFIDENCE_FEATURES",
    "TAIL_MASS_FEATURES",
    "Example",
    "HFSceneGraphPredictor",
    "Prediction",
    "SGGPredictor",
    "TinyPredictor",
    "TinySGGModel",
    "TokenStats",
    "load_predictor",
    "token_features",
]


def load_predictor(folder: str | os.PathLike, device: str | None = None) -> SGGPredictor:
    """Load a predictor of any kind from what its `save_pretrained` wrote.

    Args:
        folder: of the predictor.
        device: as `vidgen.runtime.device.select_device` reads it.

    Raises:
        SceneGraphError: the folder holds no predictor.
    """
    from scene_graph.predictors.hf import HFSceneGraphPredictor
    from scene_graph.predictors.tiny import TinyPredictor

    is_tiny = saved_class(folder, "predictor") == "TinySGGModel"
    return (TinyPredictor if is_tiny else HFSceneGraphPredictor).from_pretrained(folder, device=device)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'scene_graph.predictors' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value
