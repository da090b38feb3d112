"""Long videos and playable worlds with causal video diffusion, on top of diffusers.

Names are imported when first used (PEP 562): `import vidgen` itself loads neither torch nor diffusers.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "CausalWanTransformer3DModel": "vidgen.models.causal_wan",
    "WorldDiT": "vidgen.models.world_dit",
    "StreamingVAEDecoder": "vidgen.models.streaming_vae",
    "StreamingVAEEncoder": "vidgen.models.streaming_vae",
    "KVMemory": "vidgen.memory",
    "FullMemory": "vidgen.memory",
    "FullMemoryConfig": "vidgen.memory",
    "SlidingWindowMemory": "vidgen.memory",
    "SlidingWindowMemoryConfig": "vidgen.memory",
    "SlowFastMemory": "vidgen.memory",
    "SlowFastMemoryConfig": "vidgen.memory",
    "make_memory": "vidgen.memory",
    "FlowConsistencyScheduler": "vidgen.schedulers",
    "ContextForcingPipeline": "vidgen.pipelines",
    "GenerationSession": "vidgen.pipelines",
    "LandscapeWorld": "vidgen.worlds",
    "VideoReader": "vidgen.data",
    "VideoWriter": "vidgen.data",
    "TrainConfig": "vidgen.train",
    "TrainingMethod": "vidgen.train",
    "fit": "vidgen.train",
    "find_asset": "vidgen.runtime.assets",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'vidgen' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value  # the next access skips this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
