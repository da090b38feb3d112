"""What would be wrong: a jump back to the first frame hidden in an average, or an honest camera accused of one."""

from __future__ import annotations

import numpy as np
import pytest

from vidgen.metrics import dynamic_degree, find_resets, pixel_features, similarity_jumps
from vidgen.metrics.consistency import unit_features
from vidgen.runtime.errors import VidgenError

FPS = 16


def scene(seed: int, height: int = 36, width: int = 512) -> np.ndarray:
    """A panorama with structure at several scales, float `(height, width, 3)` in 0 to 255; its ends meet."""
    rng = np.random.default_rng(seed)
    x, y = np.arange(width) / width, np.arange(height)[:, None] / height
    image = np.zeros((height, width, 3))
    for channel in range(3):
        for wave in range(1, 7):
            phase, tilt = rng.uniform(0, 6.28, 2)
            image[..., channel] += rng.normal() * np.cos(2 * np.pi * wave * x + tilt * y + phase)
    return np.clip(127.5 + 60 * image / image.std(), 0, 255)


def view(panorama: np.ndarray, position: float, width: int = 64) -> np.ndarray:
    columns = (position + np.arange(width)) % panorama.shape[1]
    low, part = np.floor(columns).astype(int), (columns % 1)[:, None]
    return (1 - part) * panorama[:, low] + part * panorama[:, (low + 1) % panorama.shape[1]]


def film(positions: np.ndarray, panorama: np.ndarray, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    frames = np.stack([view(panorama, position) for position in positions])
    frames = frames + noise * np.random.default_rng(seed).normal(size=frames.shape)
    return np.clip(frames.round(), 0, 255).astype(np.uint8)


DRIFT = np.linspace(0, 200, 12 * FPS)  # 12 seconds, about a pixel per frame


@pytest.mark.parametrize("noise", [0.0, 8.0, 40.0])
@pytest.mark.parametrize("seed", range(3))
def test_slow_drift_is_no_reset(noise, seed):
    assert find_resets(pixel_features(film(DRIFT, scene(seed), noise, seed)), FPS) == []


@pytest.mark.parametrize("noise", [0.0, 8.0, 40.0])
@pytest.mark.parametrize("seed", range(3))
def test_return_to_the_first_frame_is_found_at_its_frame(noise, seed):
    positions = DRIFT.copy()
    positions[131:] = DRIFT[: len(DRIFT) - 131]
    features = pixel_features(film(positions, scene(seed), noise, seed))
    (reset,) = find_resets(features, FPS)
    assert reset.frame == 131 and reset.second == 131 / FPS
    assert abs(reset.resembles_frame - 0) <= 3
    # The numbers of the report are those of the features.
    unit = unit_features(features)
    similarity = unit @ unit[reset.resembles_frame]
    assert reset.similarity_before == pytest.approx(similarity[131 - FPS : 131].max(), abs=0.05)
    assert reset.similarity_after == pytest.approx(similarity[131:135].max(), abs=0.02)
    assert reset.similarity_after - reset.similarity_before > 0.3


def test_return_to_a_later_moment_names_that_moment():
    positions = np.concatenate([DRIFT, DRIFT[60:]])
    (reset,) = find_resets(pixel_features(film(positions, scene(1))), FPS)
    assert reset.frame == len(DRIFT) and abs(reset.resembles_frame - 60) <= 3


def test_a_single_stray_frame_is_one_reset_and_going_on_is_none():
    frames = film(DRIFT, scene(2), 4.0)
    frames[100] = frames[0]
    (reset,) = find_resets(pixel_features(frames), FPS)
    assert (reset.frame, reset.resembles_frame) == (100, 0) and reset.similarity_after == pytest.approx(1)


def test_return_blended_over_a_latent_frame_is_found_once():
    frames = film(DRIFT, scene(0)).astype(float)
    after = frames[: len(DRIFT) - 120].copy()
    for i in range(3):
        after[i] = (3 - i) / 4 * frames[119] + (i + 1) / 4 * after[i]
    video = np.concatenate([frames[:120], after]).round().astype(np.uint8)
    (reset,) = find_resets(pixel_features(video), FPS)
    assert 120 <= reset.frame <= 123


def test_every_return_of_a_looping_video_is_found():
    video = film(np.tile(DRIFT[:80], 4), scene(1), 4.0)
    assert [reset.frame for reset in find_resets(pixel_features(video), FPS)] == [80, 160, 240]


@pytest.mark.parametrize("noise", [0.0, 8.0])
@pytest.mark.parametrize("seed", [0, 5, 11])
def test_cut_to_a_new_scene_is_no_reset_although_it_ruptures(noise, seed):
    frames = film(DRIFT, scene(seed), noise)
    frames[100:] = film(DRIFT, scene(seed + 100), noise)[100:]
    features = pixel_features(frames)
    assert find_resets(features, FPS) == []
    assert similarity_jumps(features, FPS).rupture[100] > 6


@pytest.mark.parametrize("seconds", [2.0, 4.0])
@pytest.mark.parametrize("noise", [0.0, 8.0])
def test_camera_that_comes_back_is_no_reset(seconds, noise):
    there = np.concatenate([np.linspace(0, 160, 5 * FPS), np.full(2 * FPS, 160.0)])
    back = 80 + 80 * np.cos(np.linspace(0, np.pi, round(seconds * FPS)))
    positions = np.concatenate([there, back, np.zeros(2 * FPS)])
    for seed in range(3):
        assert find_resets(pixel_features(film(positions, scene(seed), noise)), FPS) == []


def test_a_dark_frame_and_a_still_video_are_no_reset():
    frames = film(DRIFT, scene(0), 2.0)
    frames[90] = 0
    assert find_resets(pixel_features(frames), FPS) == []
    still = np.repeat(film(np.zeros(1), scene(0)), 100, axis=0)
    assert find_resets(pixel_features(still), FPS) == []
    noisy = film(np.zeros(160), scene(0), 20.0)
    assert find_resets(pixel_features(noisy), FPS) == []


def test_jumps_equal_a_loop_over_all_pairs():
    features = np.random.default_rng(0).normal(size=(60, 5)).cumsum(axis=0)
    fps, transition, trend, age = 10, 2, 7, 12
    jumps = similarity_jumps(features, fps, transition=0.2, trend=0.7, min_age=1.2)
    cosine = unit_features(features) @ unit_features(features).T
    for frame in range(60):
        rises = {
            past: cosine[frame, past] - max(cosine[u, past] for u in range(frame - trend, frame - transition + 1))
            for past in range(frame - age + 1)
        }
        if not rises:
            assert np.isnan(jumps.opening[frame]) and np.isnan(jumps.earlier[frame])
            assert jumps.resembles_frame[frame] == -1
            continue
        assert jumps.opening[frame] == pytest.approx(rises[0])
        assert jumps.earlier[frame] == pytest.approx(max(rises.values()))
        assert jumps.resembles_frame[frame] == max(rises, key=rises.get)


def test_rupture_equals_a_loop_over_both_sides():
    features = np.random.default_rng(1).normal(size=(60, 5)).cumsum(axis=0)
    rupture = similarity_jumps(features, 10, transition=0.2, trend=0.7, min_age=1.2).rupture
    cosine = unit_features(features) @ unit_features(features).T
    change = {frame: 1 - cosine[frame, frame - 2] for frame in range(2, 60)}
    for frame in range(12, 55):
        scores = []
        for side in (range(frame - 7, frame - 1), range(frame + 2, min(frame + 8, 60))):
            usual = np.array([change[u] for u in side])
            spread = 1.4826 * np.median(np.abs(usual - np.median(usual)))
            scores.append((change[frame] - np.median(usual)) / spread)
        assert rupture[frame] == pytest.approx(min(scores))
    assert np.isnan(rupture[:12]).all() and np.isnan(rupture[55:]).all()


def test_blocks_of_the_past_do_not_change_the_result(monkeypatch):
    positions = np.concatenate([DRIFT, DRIFT[60:]])
    features = pixel_features(film(positions, scene(1), 8.0))
    whole, jumps = find_resets(features, FPS), similarity_jumps(features, FPS)
    monkeypatch.setattr("vidgen.metrics.resets._BLOCK", 37)
    assert find_resets(features, FPS) == whole
    assert np.array_equal(similarity_jumps(features, FPS).resembles_frame, jumps.resembles_frame)


@pytest.mark.parametrize("fps", [8.0, 24.0])
def test_a_turning_feature_has_its_angular_speed_at_any_frame_rate(fps):
    angle = np.where(np.arange(10 * fps) / fps < 5, 0.3, 0.0).cumsum() / fps
    features = 7.0 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    curve = dynamic_degree(features, fps)
    assert curve[:4] == pytest.approx(0.3) and curve[5:] == pytest.approx(0)


def test_downscaled_pixels_are_area_means_around_gray():
    frames = np.random.default_rng(0).integers(0, 256, (70, 36, 64, 3), dtype=np.uint8)
    features = pixel_features(frames, (18, 32)).reshape(70, 3, 18, 32)
    expected = frames[66, 4:6, 10:12, 1].mean() / 127.5 - 1
    assert features.shape == (70, 3, 18, 32) and features[66, 1, 2, 5] == pytest.approx(expected, rel=1e-5)


def test_wrong_arguments_are_named():
    features = np.random.default_rng(0).normal(size=(64, 4))
    with pytest.raises(VidgenError, match="closure=0"):
        find_resets(features, FPS, closure=0)
    with pytest.raises(VidgenError, match="trend >= 5"):
        find_resets(features, 1)
    with pytest.raises(VidgenError, match="at least trend"):
        find_resets(features, FPS, min_age=1.0)
    with pytest.raises(VidgenError, match="nothing older"):
        find_resets(features[:32], FPS)
    with pytest.raises(VidgenError, match="fps=0"):
        find_resets(features, 0)
    with pytest.raises(VidgenError, match=r"features\[3, 0\] is nan"):
        find_resets(np.where(np.arange(64)[:, None] == 3, np.nan, features), FPS)
    with pytest.raises(VidgenError, match="allowed: 1 to 63"):
        dynamic_degree(features, FPS, window=4.0)
    with pytest.raises(VidgenError, match="expected uint8"):
        pixel_features(np.zeros((3, 8, 8, 3), dtype=np.float32))
