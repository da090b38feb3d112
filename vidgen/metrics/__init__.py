"""What generated videos are measured by, against worlds whose truth is known."""

from __future__ import annotations

from vidgen.metrics.clip_splitting import Clip, find_scene_cuts, split_long_video, vbench_long
from vidgen.metrics.code_recall import (
    RecallByGap,
    code_recall,
    effective_context_length,
    nearest_codes,
    place_agreement,
    validity,
)
from vidgen.metrics.consistency import (
    CLIPFeatures,
    DINOv2Features,
    FrameFeatures,
    consistency_curve,
    text_alignment_curve,
)
from vidgen.metrics.drift import ChannelDrift, channel_drift
from vidgen.metrics.recall import Revisit, aligned_psnr, score_revisits, summarize_revisits
from vidgen.metrics.resets import Reset, dynamic_degree, find_resets, pixel_features, similarity_jumps
from vidgen.metrics.scene_classifier import SCENE_ATTRIBUTES, SceneClassifier, score_attributes

__all__ = [
    "SCENE_ATTRIBUTES",
    "CLIPFeatures",
    "ChannelDrift",
    "Clip",
    "DINOv2Features",
    "FrameFeatures",
    "RecallByGap",
    "Reset",
    "Revisit",
    "SceneClassifier",
    "aligned_psnr",
    "channel_drift",
    "code_recall",
    "consistency_curve",
    "dynamic_degree",
    "effective_context_length",
    "find_resets",
    "find_scene_cuts",
    "nearest_codes",
    "place_agreement",
    "pixel_features",
    "score_attributes",
    "score_revisits",
    "similarity_jumps",
    "split_long_video",
    "summarize_revisits",
    "text_alignment_curve",
    "validity",
    "vbench_long",
]
