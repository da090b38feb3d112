"""Faster decoding with the target's own output: drafters, the engine that verifies them, and what it all cost."""

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

__all__ = [
    "DRAFTERS", "PLUGINS", "Draft", "Drafter", "SpeculativeConfig", "make_drafter", "register_drafter",
    "register_plugin",
    "AssistedDrafter", "EarlyExitDrafter", "PlainDrafter", "PromptLookupDrafter", "SkipDrafter", "StaticSkipDrafter",
    "CLaSpDrafter", "KnapSpecConfig", "KnapSpecDrafter", "LatencyProfile",
    "ActiveVocabulary", "GatheredLMHead", "NanoSpecConfig", "StaticVocabulary", "with_nanospec",
    "with_static_vocabulary",
    "generate", "speculative_generate", "SpecStats",
]  # fmt: skip
