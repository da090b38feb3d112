"""Faster decoding with the target's own output: drafters, the engine that verifies them, and what it all cost."""

from .base import DRAFTERS, Draft, Drafter, SpeculativeConfig, make_drafter, register_drafter
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
from .stats import SpecStats

__all__ = [
    "DRAFTERS", "Draft", "Drafter", "SpeculativeConfig", "make_drafter", "register_drafter",
    "AssistedDrafter", "EarlyExitDrafter", "PlainDrafter", "PromptLookupDrafter", "SkipDrafter", "StaticSkipDrafter",
    "CLaSpDrafter", "KnapSpecConfig", "KnapSpecDrafter", "LatencyProfile",
    "generate", "speculative_generate", "SpecStats",
]  # fmt: skip
