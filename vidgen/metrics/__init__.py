"""What generated videos are measured by, against worlds whose truth is known."""

from __future__ import annotations

from vidgen.metrics.drift import ChannelDrift, channel_drift
from vidgen.metrics.recall import Revisit, aligned_psnr, score_revisits, summarize_revisits
from vidgen.metrics.scene_classifier import SCENE_ATTRIBUTES, SceneClassifier, score_attributes

__all__ = [
    "SCENE_ATTRIBUTES",
    "ChannelDrift",
    "Revisit",
    "SceneClassifier",
    "aligned_psnr",
    "channel_drift",
    "score_attributes",
    "score_revisits",
    "summarize_revisits",
]
