"""How a world model's video holds out: agreement with the true frames, and looks, against the distance from the start.

A world's picture is a function of the pose, so the controls of a held-out walk tell what every generated frame should
have shown. "LIVE: Long-horizon Interactive Video World Modeling" (arXiv 2602.03747) reports such curves. Frames are
compared with the true ones as rendered, never with what an autoencoder makes of them; prompt frames are left out; the
PSNR of a window is the mean of its frames' dB.

A frozen or gray video has flat curves too. So `action_sensitivity` and the ratio of motion belong beside every curve.

`fd_world[pooled29]` is the Fréchet distance (arXiv 1706.08500) of 29 numbers per frame: the mean red, green and blue
of 3 x 3 equal cells, and the mean absolute difference of the luma of neighboring pixels, horizontally and vertically.
Each is divided by its standard deviation over a large set of real frames, so that a loss of detail counts as much as
one of color. It isn't FID, and comparable only between videos of one world and size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from vidgen.metrics.checks import check_frames, check_sequence, check_tensor, real_array
from vidgen.runtime.checks import check_finite, check_whole
from vidgen.runtime.errors import VidgenError

FD_WORLD = "fd_world[pooled29]"
# Two pictures that differ by 1 in every 15th value: no generated frame comes near.
MAX_PSNR = 60.0
_LUMA = np.array([0.299, 0.587, 0.114])
_CELLS = 3
_SSIM_KERNEL = 11
_SSIM_FRAMES = 256
_VIDEO, _VIDEOS = "(..., frames, height, width, 3)", "(videos, frames, height, width, 3)"


# --- frames against the truth ------------------------------------------------------------------------------------


def frame_psnr(frames: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio of each frame.

    Args:
        frames: uint8 `(..., height, width, 3)`.
        truth: the same shape.

    Returns:
        float64 `(...)`, dB, at most `MAX_PSNR`.

    Raises:
        VidgenError: other arrays than these.
    """
    _check_pair(frames, truth)
    error = np.square(frames.astype(np.float32) - truth).mean(axis=(-3, -2, -1), dtype=np.float64)
    return 10 * np.log10(255**2 / np.maximum(error, 255**2 / 10 ** (MAX_PSNR / 10)))


def frame_ssim(frames: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Structural similarity of each frame, by torchmetrics: a Gaussian of 11 pixels, mean over pixels and colors.

    Args:
        frames: uint8 `(..., height, width, 3)`, at least 11 pixels high and wide.
        truth: the same shape.

    Returns:
        float64 `(...)`, at most 1.

    Raises:
        VidgenError: other arrays than these, or torchmetrics is not installed.
    """
    _check_pair(frames, truth)
    if min(frames.shape[-3:-1]) < _SSIM_KERNEL:
        raise VidgenError(f"frames have shape {frames.shape}; SSIM needs {_SSIM_KERNEL} pixels in height and width.")
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure
    except ImportError as error:
        raise VidgenError("SSIM needs torchmetrics: pip install 'vidgen[eval]'") from error
    pairs = [
        torch.from_numpy(np.ascontiguousarray(array).reshape(-1, *array.shape[-3:])).movedim(-1, 1)
        for array in (frames, truth)
    ]
    values = [
        structural_similarity_index_measure(one.float(), other.float(), data_range=255.0, reduction="none")
        for one, other in zip(*(pair.split(_SSIM_FRAMES) for pair in pairs), strict=True)
    ]
    return torch.cat([value.reshape(-1) for value in values]).double().numpy().reshape(frames.shape[:-3])


def _check_pair(frames: np.ndarray, truth: np.ndarray) -> None:
    check_frames(frames)
    check_frames(truth, "true frames")
    if frames.shape != truth.shape:
        raise VidgenError(f"frames have shape {frames.shape} and true frames {truth.shape}; they have to agree.")


# --- looks -------------------------------------------------------------------------------------------------------


def motion_magnitude(frames: np.ndarray) -> float:
    """Mean absolute difference of consecutive frames, uint8 `(..., frames, height, width, 3)`; 0 to 255."""
    check_frames(frames, axes=_VIDEO)
    if frames.shape[-4] < 2:
        raise VidgenError(f"frames have shape {frames.shape}; motion needs 2 frames.")
    return float(np.abs(np.diff(frames.astype(np.int16), axis=-4)).mean())


def sharpness(frames: np.ndarray) -> float:
    """Mean absolute difference of the luma of neighboring pixels, uint8 `(..., height, width, 3)`; 0 to 255."""
    check_frames(frames)
    return float(np.mean(_edges(frames)))


def saturation(frames: np.ndarray) -> float:
    """Mean saturation of the HSV model, 0 (gray) to 1, of uint8 `(..., height, width, 3)`."""
    check_frames(frames)
    high, low = frames.max(axis=-1).astype(np.float32), frames.min(axis=-1)
    return float(((high - low) / np.maximum(high, 1)).mean())


def _edges(frames: np.ndarray) -> np.ndarray:
    """`(..., 2)`: mean absolute luma differences of a frame along its rows and along its columns."""
    luma = frames @ _LUMA
    return np.stack([np.abs(np.diff(luma, axis=axis)).mean(axis=(-2, -1)) for axis in (-1, -2)], axis=-1)


# --- Fréchet distance --------------------------------------------------------------------------------------------


def pooled29(frames: np.ndarray) -> np.ndarray:
    """The features of `fd_world[pooled29]` before they are scaled.

    Args:
        frames: uint8 `(..., height, width, 3)`, at least 3 pixels high and wide.

    Returns:
        float64 `(frames, 29)`, values of 0 to 255; cells row by row, then horizontal and vertical differences.
    """
    check_frames(frames)
    frames = frames.reshape(-1, *frames.shape[-3:])
    if min(frames.shape[1:3]) < _CELLS:
        raise VidgenError(f"frames are {frames.shape[1]}x{frames.shape[2]}; allowed: at least {_CELLS}x{_CELLS}.")
    rows, columns = (np.linspace(0, length, _CELLS + 1).round().astype(int) for length in frames.shape[1:3])
    colors = [
        frames[:, top:bottom, left:right].mean(axis=(1, 2))
        for top, bottom in pairwise(rows)
        for left, right in pairwise(columns)
    ]
    return np.concatenate([*colors, _edges(frames)], axis=1)


def frechet_distance(features: np.ndarray, reference: np.ndarray) -> float:
    """|m - m_r|^2 + tr(C + C_r - 2 (C C_r)^(1/2)) of the normal distributions with these means and covariances.

    Args:
        features: `(n, dim)`, n at least 2.
        reference: `(n_r, dim)`.

    Raises:
        VidgenError: other shapes, or a feature that isn't finite.
    """
    statistics = []
    for name, values in (("features", features), ("reference", reference)):
        values = real_array(name, values, "(n, dim)").astype(np.float64)
        if len(values) < 2:
            raise VidgenError(f"{name} have shape {values.shape}; expected (n >= 2, dim).")
        statistics.append((values.mean(axis=0), np.atleast_2d(np.cov(values, rowvar=False))))
    (mean, covariance), (mean_r, covariance_r) = statistics
    if mean.shape != mean_r.shape:
        raise VidgenError(f"features have {mean.size} dimensions and reference {mean_r.size}; they have to agree.")
    # tr (C C_r)^(1/2) = tr (R C_r R)^(1/2) with R = C^(1/2), which is symmetric.
    variances, directions = np.linalg.eigh(covariance)
    root = (directions * np.sqrt(np.maximum(variances, 0))) @ directions.T
    overlap = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ covariance_r @ root), 0)).sum()
    return float(np.square(mean - mean_r).sum() + np.trace(covariance) + np.trace(covariance_r) - 2 * overlap)


@dataclass(frozen=True)
class WorldFrechet:
    """`fd_world[pooled29]`.

    Attributes:
        scale: `(29,)`, the standard deviation of each feature over real frames of the world.
    """

    scale: np.ndarray

    @classmethod
    def from_frames(cls, frames: np.ndarray) -> WorldFrechet:
        """Takes the scale from real frames, uint8 `(..., height, width, 3)`, of as many places as there are.

        Raises:
            VidgenError: a feature that never changes.
        """
        scale = pooled29(frames).std(axis=0)
        if not (scale > 0).all():
            raise VidgenError(f"Feature {int(scale.argmin())} is the same in all {frames.shape} real frames.")
        return cls(scale)

    def __call__(self, frames: np.ndarray, reference: np.ndarray) -> float:
        """Distance between two sets of frames, uint8 `(..., height, width, 3)` each; 0 for equal ones."""
        return max(0.0, frechet_distance(pooled29(frames) / self.scale, pooled29(reference) / self.scale))


# --- over the horizon --------------------------------------------------------------------------------------------


def horizon_bins(window: int, num_windows: int) -> list[tuple[int, int]]:
    """Frames [start, stop) that are averaged: 1 to T, T to 2T, then 2T at a time; frame 0 is the prompt.

    Args:
        window: T, frames of the training window.
        num_windows: the horizon in windows, even.

    Raises:
        VidgenError: another number.
    """
    check_whole(2, window=window, num_windows=num_windows)
    if num_windows % 2:
        raise VidgenError(f"num_windows={num_windows}; allowed: 2, 4, 6 ... windows.")
    edges = [1, window, *range(2 * window, (num_windows + 1) * window, 2 * window)]
    return list(pairwise(edges))


@dataclass(frozen=True)
class HorizonScores:
    """What became of videos whose truth is known.

    Attributes:
        bins: frames [start, stop) of each number below.
        psnr: dB, mean over frames and videos.
        ssim: likewise.
        fd: `fd_world[pooled29]` to the true frames of the same videos and the same bin.
        motion: motion magnitude divided by that of the true frames; 0 is a frozen video.
        sharpness: likewise; below 1 is blurred.
        saturation: likewise; below 1 is pale.
        psnr_curve: dB of each frame from 0 on, mean over videos; prompt frames are 60.
        ssim_curve: likewise.
    """

    bins: list[tuple[int, int]]
    psnr: list[float]
    ssim: list[float]
    fd: list[float]
    motion: list[float]
    sharpness: list[float]
    saturation: list[float]
    psnr_curve: list[float]
    ssim_curve: list[float]


def score_horizon(
    frames: np.ndarray, truth: np.ndarray, bins: Sequence[tuple[int, int]], distance: WorldFrechet
) -> HorizonScores:
    """Compare videos with the truth, bin by bin.

    Args:
        frames: uint8 `(videos, frames, height, width, 3)`, prompt frames included.
        truth: what should have been seen, the same shape.
        bins: frames [start, stop) to average over; at least 2 frames each, and no prompt frame among them.
        distance: the world's Fréchet distance.

    Raises:
        VidgenError: other shapes, or a bin that reaches beyond the end.
    """
    check_frames(frames, axes=_VIDEOS)
    check_sequence("bins", bins)
    psnr, ssim = frame_psnr(frames, truth), frame_ssim(frames, truth)
    for bin_ in bins:
        if np.shape(bin_) != (2,):
            raise VidgenError(f"Bin {bin_!r}; expected (start, stop).")
        start, stop = bin_
        check_whole(0, start=start, stop=stop)
        if not 1 <= start <= stop - 2 < frames.shape[1] - 1:
            raise VidgenError(
                f"Bin {start} to {stop} of {frames.shape[1]} frames; allowed: at least 2 from frame 1 on."
            )

    def ratios(measure: Callable[[np.ndarray], float]) -> list[float]:
        return [measure(frames[:, start:stop]) / max(measure(truth[:, start:stop]), 1e-6) for start, stop in bins]

    return HorizonScores(
        bins=list(bins),
        psnr=[float(psnr[:, start:stop].mean()) for start, stop in bins],
        ssim=[float(ssim[:, start:stop].mean()) for start, stop in bins],
        fd=[distance(frames[:, start:stop], truth[:, start:stop]) for start, stop in bins],
        motion=ratios(motion_magnitude),
        sharpness=ratios(sharpness),
        saturation=ratios(saturation),
        psnr_curve=psnr.mean(axis=0).tolist(),
        ssim_curve=ssim.mean(axis=0).tolist(),
    )


def drift_slope(curve: Sequence[float], start: int = 0, frames_per_unit: float = 1.0) -> float:
    """Slope of the straight line nearest to a curve over frames.

    Args:
        curve: a value per frame.
        start: first frame that counts.
        frames_per_unit: what the slope is per: 1 for a frame, T for a window of T frames.

    Raises:
        VidgenError: fewer than 2 frames, or a number that isn't finite.
    """
    check_whole(0, start=start)
    check_finite(frames_per_unit=frames_per_unit)
    values = real_array("curve", curve, "(frames)").astype(np.float64)[start:]
    if len(values) < 2:
        raise VidgenError(f"start={start} of {len(curve)} frames; a slope needs 2 of them.")
    time = np.arange(len(values)) - (len(values) - 1) / 2
    return float(frames_per_unit * (time * values).sum() / np.square(time).sum())


# --- do controls do what they should -----------------------------------------------------------------------------


def most_different(controls: np.ndarray, num_frames: int, scale: Sequence[float]) -> np.ndarray:
    """For each video the one whose first controls differ most from its own: wrong controls for `action_sensitivity`.

    Where most walks begin with the same step, controls that are shuffled at random would often be right.

    Args:
        controls: `(videos, frames, columns)`, the first row of a video null.
        num_frames: how many frames after the first count.
        scale: what counts as 1 in each column.

    Returns:
        int64 `(videos,)`.

    Raises:
        VidgenError: a single video, all with the same controls, fewer of them than `num_frames`, or another scale than
            one positive number per column.
    """
    controls = real_array("controls", controls, "(videos, frames, columns)").astype(np.float64)
    scale = real_array("scale", scale, "(columns)")
    check_whole(1, num_frames=num_frames)
    if len(scale) != controls.shape[2] or not (scale > 0).all() or num_frames >= controls.shape[1]:
        raise VidgenError(
            f"scale={scale.tolist()}, num_frames={num_frames} for controls of shape {controls.shape}; allowed: a "
            f"positive number for each of {controls.shape[2]} columns, at most {controls.shape[1] - 1} frames."
        )
    steps = (controls[:, 1 : num_frames + 1] / scale).reshape(len(controls), -1)
    gaps = np.square(steps[:, None] - steps).sum(axis=-1)
    if not gaps.max(axis=1, initial=0).all():
        raise VidgenError(f"Of {len(steps)} videos some differ from no other in their first {num_frames} controls.")
    return gaps.argmax(axis=1)


def action_sensitivity(
    right: np.ndarray, wrong: np.ndarray, truth: np.ndarray, num_prompt_frames: int = 1, num_frames: int = 4
) -> float:
    """PSNR with the right controls minus PSNR with the controls of other videos, over the first frames.

    A model that ignores its controls has 0.

    Args:
        right: uint8 `(videos, frames, height, width, 3)`, generated with the controls of `truth`.
        wrong: generated from the same prompts with other controls.
        truth: what the right controls should have shown.
        num_prompt_frames: frames that were given.
        num_frames: frames after them that count.

    Returns:
        dB.

    Raises:
        VidgenError: other shapes, or too few frames.
    """
    check_whole(0, num_prompt_frames=num_prompt_frames)
    check_whole(1, num_frames=num_frames)
    for name, array in (("right", right), ("wrong", wrong), ("truth", truth)):
        check_frames(array, name, _VIDEOS)
    first = slice(num_prompt_frames, num_prompt_frames + num_frames)
    videos = [array[:, first] for array in (right, wrong, truth)]
    if min(array.shape[1] for array in videos) < num_frames:
        raise VidgenError(
            f"videos have {min(array.shape[1] for array in (right, wrong, truth))} frames; "
            f"allowed: at least {first.stop}."
        )
    return float(frame_psnr(videos[0], videos[2]).mean() - frame_psnr(videos[1], videos[2]).mean())


def there_and_back(controls: torch.Tensor, reverse: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Controls that undo themselves: n frames away and n frames back to frame 0.

    Args:
        controls: `(..., n + 1, columns)`, row 0 for the frame where the path begins.
        reverse: of these controls, as `vidgen.controls` defines it.

    Returns:
        `(..., 2 n + 1, columns)`.

    Raises:
        VidgenError: no rows of finite numbers.
    """
    check_tensor("controls", controls, "(..., frames, columns)")
    return torch.cat([controls, reverse(controls)[..., 1:, :]], dim=-2)


def cycle_closure(frames: np.ndarray, num_prompt_frames: int = 1) -> float:
    """PSNR between the last frame of a path there and back and the last prompt frame, where it began.

    Args:
        frames: uint8 `(videos, frames, height, width, 3)`.
        num_prompt_frames: frames that were given.

    Returns:
        dB.

    Raises:
        VidgenError: other frames than these, or no frame after the prompt.
    """
    check_frames(frames, axes=_VIDEOS)
    check_whole(1, frames.shape[1] - 1, num_prompt_frames=num_prompt_frames)
    return float(frame_psnr(frames[:, -1], frames[:, num_prompt_frames - 1]).mean())
