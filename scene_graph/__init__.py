"""Operating-room scene graphs whose rare actions are found: routed in-context learning for the long tail (SGG-ICL).

Names are imported when first used (PEP 562): `import scene_graph` itself loads no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "schema": (
        "SOP",
        "SPO",
        "Sample",
        "SceneDataError",
        "SceneGraph",
        "SceneGraphError",
        "TailSplit",
        "Triplet",
        "TripletIndex",
        "Vocabulary",
        "idf_weights",
        "tail_split",
        "triplet_iou",
    ),
    "formats": (
        "LabeledFrame",
        "ParsedGraph",
        "change_log",
        "format_triplet_text",
        "memory_text",
        "parse_triplet_text",
        "read_graphs",
        "read_relations",
        "to_4dor_evaluator",
        "to_csv",
        "to_cypher",
        "to_graphml",
        "to_jsonld",
        "write_graphs",
    ),
    "datasets": ("MMORDataset", "OR4DDataset", "SceneDataset", "SceneFolder", "VideoFrames"),
    "simulator": ("SimulatorConfig", "simulate"),
    "prompting": ("SGGPromptBuilder",),
    "predictors": (
        "Example",
        "HFSceneGraphPredictor",
        "Prediction",
        "SGGPredictor",
        "TinyPredictor",
        "TinySGGModel",
        "TokenStats",
        "load_predictor",
        "token_features",
    ),
    "methods": ("HFSGGMethod", "TinySGGMethod"),
    "metrics": ("Report", "SceneGraphEvaluator", "auc", "ndcg_at_k"),
    "consistency": ("ConsistencyReport", "scene_graph_consistency"),
    "viz": ("draw_graph", "draw_video"),
    "retrieval": (
        "Candidate",
        "ClipMethod",
        "OpenClipEncoder",
        "PredictorEncoder",
        "RetrievalConfig",
        "SceneEncoder",
        "SceneIndex",
    ),
    "router": ("FEATURE_NAMES", "AdaptiveRouter", "RouterConfig", "router_features"),
    "reranker": (
        "MLLMReranker",
        "MLLMRerankerMethod",
        "Reranker",
        "TinyReranker",
        "TinyRerankerMethod",
        "load_reranker",
        "select_examples",
    ),
    "pipeline": ("SGGICLConfig", "SGGICLOutput", "SGGICLPipeline"),
}
_EXPORTS = {name: f"scene_graph.{module}" for module, names in _MODULES.items() for name in names}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'scene_graph' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value  # the next access skips this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
