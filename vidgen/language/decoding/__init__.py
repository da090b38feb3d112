"""Decoding: drafters and the engine that verifies them, which keep the target's output; a search that betters it."""

from .base import DRAFTERS, PLUGINS, Draft, Drafter, SpeculativeConfig, make_drafter, register_drafter, register_plugin
from .baselines import (
    AssistedDrafter,
    EarlyExitDrafter,
    PlainDrafter,
    PromptLookupDrafter,
    SkipDrafter,
    StaticSkipDrafter,
)
from .clasp import CLaSpDrafter
from .coverage import bootstrap_ci, coverage_auc, first_k_curves, pass_at_k, pass_at_k_curves
from .engine import generate, speculative_generate
from .knapspec import KnapSpecConfig, KnapSpecDrafter
from .latency import LatencyProfile
from .nanospec import (
    ActiveVocabulary,
    GatheredLMHead,
    NanoSpecConfig,
    StaticVocabulary,
    with_nanospec,
    with_static_vocabulary,
)
from .stats import SpecStats
from .tgr import LookAhead, TGRConfig, TGROutput, TGRStats, tgr_generate

__all__ = [
    "DRAFTERS", "PLUGINS", "Draft", "Drafter", "SpeculativeConfig", "make_drafter", "register_drafter",
    "register_plugin",
    "AssistedDrafter", "EarlyExitDrafter", "PlainDrafter", "PromptLookupDrafter", "SkipDrafter", "StaticSkipDrafter",
    "CLaSpDrafter", "KnapSpecConfig", "KnapSpecDrafter", "LatencyProfile",
    "ActiveVocabulary", "GatheredLMHead", "NanoSpecConfig", "StaticVocabulary", "with_nanospec",
    "with_static_vocabulary",
    "generate", "speculative_generate", "SpecStats",
    "LookAhead", "TGRConfig", "TGROutput", "TGRStats", "tgr_generate",
    "bootstrap_ci", "coverage_auc", "first_k_curves", "pass_at_k", "pass_at_k_curves",
]  # fmt: skip
