"""What would be wrong: numbers that aren't what they are called, or a model that ignores its controls unnoticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vidgen.metrics import (
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
from vidgen.runtime.errors import VidgenError
from vidgen.worlds.panorama import PanoramaWorld


def pictures(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


# --- frames against the truth ------------------------------------------------------------------------------------


def test_psnr_is_the_mean_of_decibels_and_not_of_errors():
    truth = np.full((2, 1, 8, 8, 3), 100, np.uint8)
    frames = truth.copy()
    frames[0] += 1
    frames[1] += 100
    assert frame_psnr(frames, truth)[:, 0] == pytest.approx([20 * np.log10(255), 20 * np.log10(2.55)])
    # Bytes don't wrap around, and equal frames have a number.
    assert frame_psnr(truth, frames)[1, 0] == pytest.approx(20 * np.log10(2.55))
    assert frame_psnr(truth, truth).tolist() == [[60.0], [60.0]]


def test_ssim_is_the_textbook_one():
    one, other = pictures(2, 14, 13), pictures(2, 14, 13, seed=1)
    other[1] = one[1] // 2 + 60
    weights = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    kernel = np.outer(weights, weights) / weights.sum() ** 2

    def windows(frame: np.ndarray) -> np.ndarray:
        """The 11 x 11 pixels around each, borders reflected: (height, width, color, 11, 11)."""
        padded = np.pad(frame.astype(float), ((5, 5), (5, 5), (0, 0)), mode="reflect")
        return np.lib.stride_tricks.sliding_window_view(padded, (11, 11), axis=(0, 1))

    expected = []
    for x, y in zip(one, other, strict=True):
        a, b = windows(x), windows(y)
        mean_a, mean_b = ((kernel * z).sum((-2, -1)) for z in (a, b))
        variance_a, variance_b = ((kernel * z * z).sum((-2, -1)) - m**2 for z, m in ((a, mean_a), (b, mean_b)))
        covariance = (kernel * a * b).sum((-2, -1)) - mean_a * mean_b
        luminance = (2 * mean_a * mean_b + 2.55**2) / (mean_a**2 + mean_b**2 + 2.55**2)
        expected.append((luminance * (2 * covariance + 7.65**2) / (variance_a + variance_b + 7.65**2)).mean())
    assert frame_ssim(one, other) == pytest.approx(expected, abs=1e-4)
    assert frame_ssim(one[None], one[None]).tolist() == [pytest.approx([1, 1])]


# --- looks -------------------------------------------------------------------------------------------------------


def test_looks_of_known_pictures():
    still = np.repeat(pictures(1, 8, 8), 5, axis=0)
    assert motion_magnitude(still) == 0
    blinking = np.zeros((5, 4, 4, 3), np.uint8)
    blinking[1::2] = 200
    assert motion_magnitude(blinking) == 200

    gray, red = np.full((4, 6, 3), 77, np.uint8), np.zeros((4, 6, 3), np.uint8)
    red[..., 0] = 10
    assert saturation(gray) == 0 and saturation(red) == 1
    assert saturation(np.full((2, 2, 3), [200, 150, 100], np.uint8)) == pytest.approx(0.5)

    stripes = np.zeros((6, 6, 3), np.uint8)
    stripes[:, 1::2] = 100
    assert sharpness(gray) == 0
    assert sharpness(stripes) == pytest.approx(50)  # 100 along the rows, 0 along the columns


def test_a_blurred_video_is_less_sharp_than_its_truth():
    frames = pictures(3, 16, 16)
    blurred = frames.reshape(3, 8, 2, 8, 2, 3).mean(axis=(2, 4)).repeat(2, axis=1).repeat(2, axis=2).astype(np.uint8)
    assert sharpness(blurred) < 0.5 * sharpness(frames)


# --- Fréchet distance --------------------------------------------------------------------------------------------


def test_the_29_features_are_cells_and_edges():
    frames = pictures(2, 9, 12)
    features = pooled29(frames)
    assert features.shape == (2, 29)
    for frame, values in zip(frames.astype(float), features, strict=True):
        expected = [
            frame[row : row + 3, column : column + 4, color].mean()
            for row in (0, 3, 6)
            for column in (0, 4, 8)
            for color in range(3)
        ]
        luma = 0.299 * frame[..., 0] + 0.587 * frame[..., 1] + 0.114 * frame[..., 2]
        expected += [np.abs(luma[:, 1:] - luma[:, :-1]).mean(), np.abs(luma[1:] - luma[:-1]).mean()]
        assert values == pytest.approx(expected)


def test_cells_of_a_size_that_three_does_not_divide_cover_the_frame():
    frame = np.zeros((1, 32, 32, 3), np.uint8)
    frame[:, 11:21, 21:, 1] = 90
    cells = pooled29(frame)[0, :27].reshape(3, 3, 3)
    assert cells[1, 2, 1] == 90 and cells.sum() == 90


def test_frechet_distance_has_its_closed_form():
    generator = np.random.default_rng(0)
    one = generator.normal(size=(400, 3)) @ generator.normal(size=(3, 3)) + 1.0
    other = generator.normal(size=(300, 3)) @ generator.normal(size=(3, 3))
    covariances = [torch.from_numpy(np.cov(values, rowvar=False)) for values in (one, other)]
    product = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.sqrt().sum()
    expected = np.square(one.mean(0) - other.mean(0)).sum()
    expected += float(covariances[0].trace() + covariances[1].trace() - 2 * product)
    assert frechet_distance(one, other) == pytest.approx(expected)
    assert frechet_distance(one, other) == pytest.approx(frechet_distance(other, one))
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(one, one + [2, 0, 0]) == pytest.approx(4)
    # In one dimension, and with fewer samples than a covariance of full rank needs.
    assert frechet_distance(np.array([[0.0], [2.0]]), np.array([[1.0], [1.0]])) == pytest.approx(2)
    assert frechet_distance(one[:2], other) > 0


def test_the_world_distance_counts_in_standard_deviations_of_real_frames():
    world = PanoramaWorld()
    scene = world.scene(0)
    real = world.render(scene, world.explore(scene, 400, 0)).astype(np.int64)
    real = np.clip(real, 0, 200).astype(np.uint8)
    distance = WorldFrechet.from_frames(real)
    scale = pooled29(real).std(axis=0)
    # Brighter by 20 in every pixel: each cell moves, no edge changes.
    assert distance(real + np.uint8(20), real) == pytest.approx((400 / scale[:27] ** 2).sum(), rel=1e-6)
    assert distance(real, real) == pytest.approx(0, abs=1e-9)
    # What loses detail is farther away than other frames of the same place.
    flat = np.broadcast_to(real.mean(axis=(1, 2), keepdims=True), real.shape).astype(np.uint8)
    assert distance(flat, real) > 10 * distance(real[::2], real[1::2])
    with pytest.raises(VidgenError, match="the same in all"):
        WorldFrechet.from_frames(np.zeros((4, 8, 8, 3), np.uint8))


# --- over the horizon --------------------------------------------------------------------------------------------


def test_bins_begin_after_the_prompt_and_grow():
    assert horizon_bins(8, 8) == [(1, 8), (8, 16), (16, 32), (32, 48), (48, 64)]
    assert horizon_bins(4, 2) == [(1, 4), (4, 8)]
    with pytest.raises(VidgenError, match="num_windows=3"):
        horizon_bins(8, 3)


def test_scores_belong_to_their_frames():
    truth = pictures(3, 8, 12, 12)
    frames = truth.copy()
    frames[:, 0] = 255 - frames[:, 0]  # the prompt is not scored
    frames[:, 4:] = frames[:, 4:5]  # frozen from frame 4 on
    distance = WorldFrechet.from_frames(truth)
    scores = score_horizon(frames, truth, [(1, 4), (4, 8)], distance)
    assert scores.psnr[0] == 60 and scores.ssim[0] == pytest.approx(1) and scores.fd[0] == pytest.approx(0, abs=1e-9)
    assert scores.psnr[1] == pytest.approx(frame_psnr(frames, truth)[:, 4:].mean()) and scores.psnr[1] < 30
    assert scores.fd[1] == pytest.approx(distance(frames[:, 4:], truth[:, 4:])) and scores.fd[1] > 0
    assert scores.motion == [pytest.approx(1), 0] and scores.sharpness[0] == scores.saturation[0] == 1
    assert scores.psnr_curve[1:5] == [60] * 4 and len(scores.psnr_curve) == 8
    for wrong in ((0, 4), (6, 9), (3, 4)):
        with pytest.raises(VidgenError, match="at least 2 from frame 1 on"):
            score_horizon(frames, truth, [wrong], distance)


def test_slope_is_that_of_least_squares():
    curve = np.random.default_rng(0).normal(size=30) - 0.3 * np.arange(30)
    assert drift_slope(curve) == pytest.approx(np.polyfit(np.arange(30), curve, 1)[0])
    assert drift_slope(curve, start=8, frames_per_unit=8) == pytest.approx(
        8 * np.polyfit(np.arange(22), curve[8:], 1)[0]
    )
    with pytest.raises(VidgenError, match="needs 2"):
        drift_slope([1.0, 2.0], start=1)


# --- do controls do what they should -----------------------------------------------------------------------------


class Walks:
    """Walks of a panorama whose pixels move by `step`, and renderers that are given a prompt and controls."""

    def __init__(self, num_videos: int = 12, num_frames: int = 6) -> None:
        self.world = PanoramaWorld(size=16, step=2)
        self.scenes = [self.world.scene(seed) for seed in range(num_videos)]
        self.poses = [self.world.explore(scene, num_frames, 7) for scene in self.scenes]
        self.controls = torch.stack([self.world.deltas(poses) for poses in self.poses])
        self.truth = self.oracle(self.controls)

    def oracle(self, controls: torch.Tensor) -> np.ndarray:
        return np.stack(
            [
                self.world.render(scene, self.world.integrate(poses[0], row))
                for scene, poses, row in zip(self.scenes, self.poses, controls, strict=True)
            ]
        )

    def copy_last_frame(self, controls: torch.Tensor) -> np.ndarray:
        return np.repeat(self.truth[:, :1], controls.shape[1], axis=1)

    def constant(self, controls: torch.Tensor) -> np.ndarray:
        frames = self.copy_last_frame(controls)
        frames[:, 1:] = 128
        return frames

    def blurred_oracle(self, controls: torch.Tensor) -> np.ndarray:
        """What a middling model makes: right, without detail."""
        frames = self.oracle(controls).astype(np.float64)
        coarse = frames.reshape(*frames.shape[:2], 8, 2, 8, 2, 3).mean(axis=(3, 5))
        return coarse.repeat(2, axis=2).repeat(2, axis=3).astype(np.uint8)


@pytest.mark.parametrize(
    ("model", "sensitive"),
    [("oracle", True), ("blurred_oracle", True), ("copy_last_frame", False), ("constant", False)],
)
def test_who_ignores_the_controls_is_found(model, sensitive):
    walks = Walks()
    wrong = most_different(walks.controls.numpy(), 4, (2, 2))
    generate = getattr(walks, model)
    measured = action_sensitivity(generate(walks.controls), generate(walks.controls[wrong]), walks.truth)
    assert (measured >= 2) == sensitive
    if not sensitive:
        assert measured == 0


def test_sensitivity_is_a_difference_of_decibels_over_the_first_frames():
    truth = np.full((2, 7, 4, 4, 3), 100, np.uint8)
    right, wrong = truth + np.uint8(1), truth + np.uint8(10)
    right[:, 0] = wrong[:, 5:] = 0  # neither the prompt nor what comes later counts
    assert action_sensitivity(right, wrong, truth) == pytest.approx(20)
    with pytest.raises(VidgenError, match="at least 5"):
        action_sensitivity(right[:, :4], wrong, truth)


def test_wrong_controls_are_the_farthest_and_never_ones_own():
    controls = np.zeros((4, 5, 2))
    controls[1:, 1:, 0] = np.array([1.0, 2.0, 5.0])[:, None]
    controls[1, 0, 0] = 99  # the first row leads to the prompt and says nothing
    assert most_different(controls, 4, (1, 1)).tolist() == [3, 3, 3, 0]
    # A column of large units doesn't outweigh the others.
    controls[2, 1:, 1] = 30
    assert most_different(controls, 4, (1, 100)).tolist() == [3, 3, 3, 0]
    assert most_different(controls, 4, (1, 1)).tolist() == [2, 2, 3, 2]
    with pytest.raises(VidgenError, match="differ from no other"):
        most_different(np.zeros((3, 5, 2)), 4, (1, 1))


def test_a_path_there_and_back_closes_for_the_world_and_not_for_who_drifts():
    walks = Walks()
    path = there_and_back(walks.controls, walks.world.delta_controls.reverse)
    assert path.shape == (12, 11, 2) and not path.sum(dim=1).any()
    frames = walks.oracle(path)
    assert np.array_equal(frames[:, 5:], frames[:, 5::-1])
    assert cycle_closure(frames) == 60
    slipping = path.clone()
    slipping[:, -1] += 3
    assert cycle_closure(walks.oracle(slipping)) < 25
    assert cycle_closure(frames, num_prompt_frames=3) == pytest.approx(frame_psnr(frames[:, -1], frames[:, 2]).mean())


# --- user errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: frame_psnr(pictures(2, 8, 8), pictures(3, 8, 8)), "they have to agree"),
        (lambda: frame_psnr(pictures(2, 8, 8).astype(float), pictures(2, 8, 8)), "expected uint8"),
        (lambda: frame_psnr(pictures(2, 8, 8), pictures(2, 8, 8) / 255), "true frames are float64"),
        (lambda: frame_ssim(pictures(2, 8, 8), pictures(2, 8, 8)), "needs 11 pixels"),
        (lambda: motion_magnitude(pictures(1, 8, 8)), "motion needs 2 frames"),
        (lambda: pooled29(pictures(2, 2, 8)), "at least 3x3"),
        (lambda: frechet_distance(np.zeros((1, 3)), np.zeros((4, 3))), "n >= 2"),
        (lambda: frechet_distance(np.full((4, 3), np.nan), np.zeros((4, 3))), "finite"),
        (lambda: frechet_distance(np.zeros((4, 2)), np.zeros((4, 3))), "2 dimensions and reference 3"),
        (lambda: cycle_closure(pictures(5, 8, 8)), "expected uint8"),
    ],
)
def test_other_arrays_are_refused(call, message):
    with pytest.raises(VidgenError, match=message):
        call()
