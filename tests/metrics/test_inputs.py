"""What would be wrong: a number, a traceback or a hang where the input can't be measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vidgen import metrics
from vidgen.metrics import clip_splitting, object_detector
from vidgen.runtime.errors import VidgenError
from vidgen.worlds import LandscapeWorld
from vidgen.worlds.code_worlds import RoomsWorld

RNG = np.random.default_rng(0)
VIDEO = RNG.integers(0, 255, (40, 16, 24, 3), dtype=np.uint8)
VIDEOS = VIDEO.reshape(2, 20, 16, 24, 3)
FEATURES = RNG.standard_normal((200, 8))
MAPS = RNG.random((40, 20, 4))
PLACES = RoomsWorld().sample(2, 30, torch.Generator().manual_seed(0)).places
RECALL = metrics.code_recall(PLACES % 8, PLACES)
SCENE = {"biome": "meadow", "time_of_day": "day", "weather": "rain", "traveller": "none"}
CONTROLS = RNG.random((4, 6, 3))


def validate(frames: torch.Tensor, maps: torch.Tensor) -> dict[str, Any]:
    return object_detector.validate(object_detector.ObjectDetector(8), frames, maps)


def render_maps(per_scene: int) -> Any:
    return object_detector.render_object_maps(LandscapeWorld(16, 32), [1], per_scene)


# Every public measurement, with arguments that it takes.
MEASUREMENTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "nearest_codes": (metrics.nearest_codes, {"latents": torch.randn(2, 4, 6, 2, 16)}),
    "validity": (metrics.validity, {"latents": torch.randn(2, 4, 6, 2, 16)}),
    "code_recall": (metrics.code_recall, {"codes": PLACES % 8, "places": PLACES}),
    "place_agreement": (metrics.place_agreement, {"codes": PLACES % 8, "places": PLACES}),
    "rate": (RECALL.rate, {"low": 1, "high": 20}),
    "effective_context_length": (
        metrics.effective_context_length,
        {"recall": RECALL, "rho": 0.5, "chance": 0.125, "bin_width": 3},
    ),
    "consistency_curve": (
        metrics.consistency_curve,
        {"features": FEATURES, "fps": 8.0, "seconds": [10.0, 20.0], "window": 1.0},
    ),
    "consistency_curve by default": (metrics.consistency_curve, {"features": FEATURES, "fps": 8.0, "window": 1.0}),
    "text_alignment_curve": (
        metrics.text_alignment_curve,
        {"features": FEATURES, "text_feature": FEATURES[0], "fps": 8.0, "seconds": [10.0], "window": 1.0},
    ),
    "channel_drift": (metrics.channel_drift, {"video": torch.rand(20, 3, 4, 4), "num_frames": 4}),
    "drift_slope": (metrics.drift_slope, {"curve": [1.0, 2.0, 3.0], "start": 0, "frames_per_unit": 1.0}),
    "frame_psnr": (metrics.frame_psnr, {"frames": VIDEO, "truth": VIDEO[::-1]}),
    "motion_magnitude": (metrics.motion_magnitude, {"frames": VIDEO}),
    "sharpness": (metrics.sharpness, {"frames": VIDEO}),
    "saturation": (metrics.saturation, {"frames": VIDEO}),
    "pooled29": (metrics.pooled29, {"frames": VIDEO}),
    "frechet_distance": (metrics.frechet_distance, {"features": FEATURES, "reference": FEATURES + 1}),
    "WorldFrechet": (metrics.WorldFrechet.from_frames, {"frames": VIDEO}),
    "horizon_bins": (metrics.horizon_bins, {"window": 4, "num_windows": 4}),
    "most_different": (metrics.most_different, {"controls": CONTROLS, "num_frames": 3, "scale": [1.0, 1.0, 1.0]}),
    "action_sensitivity": (
        metrics.action_sensitivity,
        {"right": VIDEOS, "wrong": VIDEOS[::-1], "truth": VIDEOS, "num_prompt_frames": 1, "num_frames": 4},
    ),
    "there_and_back": (
        lambda controls: metrics.there_and_back(controls, lambda path: -path.flip(-2)),
        {"controls": torch.rand(2, 5, 3)},
    ),
    "cycle_closure": (metrics.cycle_closure, {"frames": VIDEOS, "num_prompt_frames": 1}),
    "aligned_psnr": (
        metrics.aligned_psnr,
        {"frame": VIDEO[0], "candidates": VIDEO[1:4], "max_shift": 4, "trim": 0.1},
    ),
    "score_revisits": (
        metrics.score_revisits,
        {"video": VIDEO, "others": [VIDEO[::-1]], "fps": 4.0, "turn": 5.0, "distances": [2.0, 3.0], "slack": 0.75},
    ),
    "summarize_revisits": (metrics.summarize_revisits, {"revisits": [metrics.Revisit(1.0, 2.0, (1.0,))]}),
    "find_resets": (
        metrics.find_resets,
        {
            "features": FEATURES,
            "fps": 16.0,
            "closure": 0.75,
            "min_jump": 0.02,
            "min_rupture": 6.0,
            "transition": 0.25,
            "trend": 1.0,
            "min_age": 2.0,
        },
    ),
    "similarity_jumps": (
        metrics.similarity_jumps,
        {"features": FEATURES, "fps": 16.0, "transition": 0.25, "trend": 1.0, "min_age": 2.0},
    ),
    "dynamic_degree": (metrics.dynamic_degree, {"features": FEATURES, "fps": 16.0, "window": 1.0}),
    "pixel_features": (metrics.pixel_features, {"frames": VIDEO}),
    "find_scene_cuts": (
        metrics.find_scene_cuts,
        {"frames": VIDEO, "fps": 8.0, "threshold": 35.0, "min_scene_seconds": 0.6},
    ),
    "split_long_video": (metrics.split_long_video, {"frames": VIDEO, "fps": 8.0, "clip_seconds": 1.0}),
    "frame_consistency": (clip_splitting.frame_consistency, {"features": FEATURES}),
    "fuse_slow_fast": (
        lambda slow: clip_splitting.fuse_slow_fast(
            slow, None, clip_splitting.SLOW_FAST_WEIGHTS["subject_consistency"]
        ),
        {"slow": 0.9},
    ),
    "SceneClassifier": (metrics.SceneClassifier(8).read, {"video": VIDEO, "num_windows": 4}),
    "ObjectDetector": (object_detector.ObjectDetector(8).detect, {"video": VIDEO, "batch_size": 8}),
    "validate": (validate, {"frames": torch.from_numpy(VIDEO[:4]), "maps": torch.ones(4, 20, 3)}),
    "match_objects": (object_detector.match_objects, {"first": MAPS[0], "candidates": MAPS[1:4], "max_shift": 1}),
    "score_object_revisits": (
        object_detector.score_object_revisits,
        {"video_maps": MAPS, "other_maps": [MAPS], "fps": 4.0, "turn": 5.0, "distances": [2.0], "slack": 0.75},
    ),
    "render_object_maps": (render_maps, {"per_scene": 1}),
}


def hostile(given: Any) -> dict[str, Any]:
    """Values that no argument of this kind may have."""
    if isinstance(given, float):
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "text": "3", "None": None}
    if isinstance(given, int):
        return {"nan": math.nan, "inf": math.inf, "half": 0.5, "negative": -1, "text": "3", "None": None}
    if isinstance(given, list):
        return {"empty": [], **{f"[{name}]": [value] for name, value in hostile(given[0]).items()}}
    if not isinstance(given, np.ndarray | torch.Tensor):
        return {}
    wrong = {
        "empty": given[:0],
        "empty at the end": given[..., :0],
        "one number": given[(0,) * given.ndim],
        "None": None,
        "text": "video",
        "complex": given.astype(complex) if isinstance(given, np.ndarray) else given.to(torch.complex64),
    }
    is_float = given.dtype.kind == "f" if isinstance(given, np.ndarray) else given.is_floating_point()
    for name, value in (("nan", math.nan), ("inf", math.inf)) if is_float else ():
        spoilt = given.copy() if isinstance(given, np.ndarray) else given.clone()
        spoilt[(-1,) * spoilt.ndim] = value
        wrong[name] = spoilt
    if not is_float and isinstance(given, np.ndarray):
        wrong["floats"] = given.astype(np.float32)
        wrong["nan floats"] = np.full(given.shape, np.nan, dtype=np.float32)
    return wrong


CASES = [
    pytest.param(measure, arguments, name, value, id=f"{measurement}: {name} is {label}")
    for measurement, (measure, arguments) in MEASUREMENTS.items()
    for name, given in arguments.items()
    for label, value in hostile(given).items()
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("measure", "arguments"), MEASUREMENTS.values(), ids=MEASUREMENTS)
def test_what_every_measurement_takes_is_measured(measure, arguments):
    measure(**arguments)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("measure", "arguments", "name", "value"), CASES)
def test_what_cannot_be_measured_is_named(measure, arguments, name, value):
    with pytest.raises(VidgenError, match=r"\w"):
        measure(**{**arguments, name: value})


@pytest.mark.parametrize("fps", [0.0, -1.0, 1e-9, 1e-320])
@pytest.mark.parametrize(
    "measurement", ["consistency_curve by default", "dynamic_degree", "find_resets", "split_long_video"]
)
def test_a_frame_rate_at_which_nothing_can_be_seen_is_refused_at_once(measurement, fps):
    measure, arguments = MEASUREMENTS[measurement]
    with pytest.raises(VidgenError):
        measure(**{**arguments, "fps": fps})


def test_a_frame_is_never_compared_with_itself():
    measure, arguments = MEASUREMENTS["score_revisits"]
    for distance in (0.0, 0.05, -2.0):
        with pytest.raises(VidgenError, match="distance"):
            measure(**{**arguments, "distances": [distance]})
    for trim in (1.0, 2.0, -0.1):
        with pytest.raises(VidgenError, match="trim"):
            metrics.aligned_psnr(VIDEO[0], VIDEO[1:4], trim=trim)
    with pytest.raises(VidgenError, match="have to agree"):
        measure(**{**arguments, "others": [VIDEO[:39]]})


def test_codes_and_places_are_whole_numbers_that_exist():
    for name, wrong in (("codes", PLACES % 8 + 1), ("codes", PLACES % 8 - 1), ("places", PLACES - 1 - PLACES.min())):
        for measurement in ("code_recall", "place_agreement"):
            measure, arguments = MEASUREMENTS[measurement]
            with pytest.raises(VidgenError, match=name):
                measure(**{**arguments, name: wrong})
    with pytest.raises(VidgenError, match="codes are torch.float32"):
        metrics.code_recall(PLACES.float(), PLACES)
    far = {"codes": PLACES % 8, "places": PLACES + 10**12}
    assert metrics.place_agreement(**far) == metrics.place_agreement(PLACES % 8, PLACES)
    assert torch.equal(metrics.code_recall(**far).hits, RECALL.hits)


@pytest.mark.parametrize(
    ("truths", "readings", "message"),
    [
        ([], [], "at least one"),
        (None, [], "at least one"),
        ([SCENE], [], "one for each of 1"),
        ([SCENE], None, "one for each of 1"),
        ([SCENE], [{}], "biome=None"),
        ([SCENE], [{**SCENE, "weather": "rian"}], "did you mean 'rain'"),
        ([None], [SCENE], "biome=None"),
    ],
)
def test_readings_that_do_not_belong_to_the_truth_are_named(truths, readings, message):
    with pytest.raises(VidgenError, match=message):
        metrics.score_attributes(truths, readings)


def test_a_revisit_without_a_number_cannot_be_made():
    for make in (metrics.Revisit, object_detector.ObjectRevisit):
        for value, chance in ((math.nan, (1.0,)), (1.0, (math.nan,)), (1.0, ())):
            with pytest.raises(VidgenError):
                make(1.0, value, chance)
    with pytest.raises(VidgenError, match="revisits"):
        metrics.summarize_revisits([])
    for scores in ({}, {"a": []}, {"a": [math.nan]}, {"a": [None]}):
        with pytest.raises(VidgenError):
            clip_splitting.aggregate_clips(scores)
