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
from vidgen.metrics.horizon import (
    FD_WORLD,
    HorizonScores,
    WorldFrechet,
    action_sensitivity,
    cycle_closure,
    drift_slope,
    frame_psnr,
    frame_ssim,
    frechet_distance,
    horizon_bins,
    most_different,
    motion_magnitude,
    pooled29,
    saturation,
    score_horizon,
    sharpness,
    there_and_back,
)
from vidgen.metrics.recall import Revisit, aligned_psnr, score_revisits, summarize_revisits
from vidgen.metrics.resets import Reset, dynamic_degree, find_resets, pixel_features, similarity_jumps
from vidgen.metrics.scene_classifier import SCENE_ATTRIBUTES, SceneClassifier, score_attributes

__all__ = [
    "FD_WORLD",
    "SCENE_ATTRIBUTES",
    "CLIPFeatures",
    "ChannelDrift",
    "Clip",
    "DINOv2Features",
    "FrameFeatures",
    "HorizonScores",
    "RecallByGap",
    "Reset",
    "Revisit",
    "SceneClassifier",
    "WorldFrechet",
    "action_sensitivity",
    "aligned_psnr",
    "channel_drift",
    "code_recall",
    "consistency_curve",
    "cycle_closure",
    "drift_slope",
    "dynamic_degree",
    "effective_context_length",
    "find_resets",
    "find_scene_cuts",
    "frame_psnr",
    "frame_ssim",
    "frechet_distance",
    "horizon_bins",
    "most_different",
    "motion_magnitude",
    "nearest_codes",
    "pixel_features",
    "place_agreement",
    "pooled29",
    "saturation",
    "score_attributes",
    "score_horizon",
    "score_revisits",
    "sharpness",
    "similarity_jumps",
    "split_long_video",
    "summarize_revisits",
    "text_alignment_curve",
    "there_and_back",
    "validity",
    "vbench_long",
]
