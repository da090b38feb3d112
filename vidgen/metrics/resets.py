"""Sudden returns to an earlier moment, and videos that stop moving.

A consistency curve rewards a video that jumps back to its first frame and one that freezes. "Context Forcing" (arXiv
2602.06028) points at such a jump in a baseline's best-scored minute; an average over the video hides it. So this file
looks for the jump itself: a frame that within a moment becomes like something seen long ago, while the video breaks
with what it has just shown. Neither alone is a reset: a camera that returns comes back gradually, and a cut to a new
scene resembles nothing. What can't be told apart from a reset is a deliberate cut back to an earlier shot, and a flash
that looks like an earlier flash.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from vidgen.metrics.checks import check_sequence, count_frames
from vidgen.metrics.consistency import FrameSource, read_batches, unit_features
from vidgen.runtime.checks import check_not_negative, check_positive, check_whole
from vidgen.runtime.errors import VidgenError

# Frames of the past that are compared at once: bounds memory to frames x block.
_BLOCK = 512
# Changes that a median and a spread are taken of, at least.
_FEWEST = 4


@dataclass(frozen=True)
class Reset:
    """One sudden return.

    Attributes:
        frame: the first frame of the new look, where the similarity rises most steeply.
        second: the same in seconds.
        similarity_before: the highest similarity to the resembled frame in the second before.
        similarity_after: the similarity once the new look is there.
        resembles_frame: the earlier frame that it is most alike.
    """

    frame: int
    second: float
    similarity_before: float
    similarity_after: float
    resembles_frame: int


@dataclass(frozen=True)
class SimilarityJumps:
    """How far each frame jumps towards the past, `(frames,)` each; NaN where no earlier moment is old enough.

    Attributes:
        opening: rise of the similarity to frame 0 above the highest of the second before; below 0 without a jump.
        earlier: the same for the earlier frame to which it rises most.
        resembles_frame: that earlier frame, -1 where there is none.
        rupture: how much more a frame breaks with its immediate past than the frames of the second before do and than
            those of the second after do, in robust standard deviations; the lower of the two. Also NaN in the last
            frames, after which too little comes (half a second at 16 fps).
    """

    opening: np.ndarray
    earlier: np.ndarray
    resembles_frame: np.ndarray
    rupture: np.ndarray


@dataclass(frozen=True)
class _Spans:
    """The three durations of the search in frames."""

    transition: int
    trend: int
    min_age: int


def _spans(num_frames: int, fps: float, transition: float, trend: float, min_age: float) -> _Spans:
    spans = _Spans(
        max(1, count_frames(fps, transition=transition)),
        count_frames(fps, trend=trend),
        count_frames(fps, min_age=min_age),
    )
    if spans.trend < spans.transition + _FEWEST:
        raise VidgenError(
            f"trend={trend:g} s is {spans.trend} frames at {fps:g} fps; to tell a jump from the trend it takes "
            f"at least {spans.transition + _FEWEST}: trend >= {(spans.transition + _FEWEST) / fps:g}."
        )
    if spans.min_age < spans.trend + spans.transition:
        raise VidgenError(f"min_age={min_age:g} s; allowed: at least trend + transition = {trend + transition:g} s.")
    if num_frames <= spans.min_age:
        raise VidgenError(f"The video of {num_frames / fps:g} s has nothing older than min_age={min_age:g} s.")
    return spans


def _rupture(features: np.ndarray, spans: _Spans) -> np.ndarray:
    """How much a frame differs from the one a transition before, against what is usual on either side of it."""
    change = np.full(len(features), np.nan)
    change[spans.transition :] = 1 - np.einsum("fd,fd->f", features[spans.transition :], features[: -spans.transition])
    rupture = np.full(len(features), np.nan)
    for frame in range(spans.min_age, len(features) - spans.transition - _FEWEST + 1):
        # A change contains the jump if it ends during the transition; those are left out on both sides. The side after
        # matters where a camera starts to move: there too the change leaves the trend, but it goes on.
        usual = []
        for side in (
            change[frame - spans.trend : frame - spans.transition + 1],
            change[frame + spans.transition : frame + spans.trend + 1],
        ):
            median = np.median(side)
            # The floor is that of rounding to 8 bits: a still picture has no spread at all.
            usual.append((median, max(1.4826 * np.median(np.abs(side - median)), 1e-4)))
        rupture[frame] = min((change[frame] - median) / spread for median, spread in usual)
    return rupture


def _similarities(features: np.ndarray, columns: slice, spans: _Spans) -> tuple[np.ndarray, np.ndarray]:
    """Similarity of every frame to the frames `columns`, and its highest value in the trend before the transition.

    Both `(frames, columns)`, NaN where the column's frame is younger than `min_age`.
    """
    similarity = torch.from_numpy(features @ features[columns].T)
    reach = spans.trend - spans.transition + 1
    padded = F.pad(similarity.T, (spans.trend, 0), value=-2.0)
    before = F.max_pool1d(padded[None], reach, stride=1)[0, :, : len(features)].T
    ages = torch.arange(len(features))[:, None] - torch.arange(len(features))[columns]
    young = ages < spans.min_age
    return (
        similarity.masked_fill(young, torch.nan).numpy(),
        before.masked_fill(young, torch.nan).numpy(),
    )


def similarity_jumps(
    features: np.ndarray, fps: float, transition: float = 0.25, trend: float = 1.0, min_age: float = 2.0
) -> SimilarityJumps:
    """The jump of similarity to the opening and to any much earlier moment, at each frame.

    Args:
        features: `(frames, dim)` from a network or `pixel_features`.
        fps: frames per second.
        transition: seconds a reset may take. A causal VAE decodes 4 frames per latent frame and blends a cut over
            them: a quarter of a second at 16 fps.
        trend: seconds before and after the transition that say what is usual. One second spans a gesture or a flicker,
            so a periodic motion or the return of light after a dark frame is no rise above it.
        min_age: seconds after which a moment counts as much earlier; longer than the trend, or the trend itself would
            be found.

    Raises:
        VidgenError: when the video is shorter than `min_age`, or the durations don't fit each other.
    """
    features = unit_features(features)
    spans = _spans(len(features), fps, transition, trend, min_age)
    similarity, before = _similarities(features, slice(0, 1), spans)
    opening = (similarity - before)[:, 0]
    earlier = np.full(len(features), np.nan)
    resembles = np.full(len(features), -1)
    for start in range(0, len(features) - spans.min_age, _BLOCK):
        similarity, before = _similarities(features, slice(start, start + _BLOCK), spans)
        rise = np.nan_to_num(similarity - before, nan=-np.inf)
        best, where = rise.max(axis=1), rise.argmax(axis=1)
        higher = np.isfinite(best) & ~(earlier >= best)
        earlier[higher], resembles[higher] = best[higher], start + where[higher]
    return SimilarityJumps(opening, earlier, resembles, _rupture(features, spans))


def find_resets(
    features: np.ndarray,
    fps: float,
    closure: float = 0.75,
    min_jump: float = 0.02,
    min_rupture: float = 6.0,
    transition: float = 0.25,
    trend: float = 1.0,
    min_age: float = 2.0,
) -> list[Reset]:
    """Frames at which a video suddenly returns to a much earlier moment.

    Args:
        features: `(frames, dim)` from a network or `pixel_features`.
        fps: frames per second.
        closure: share of the way to "the same look" that a transition has to go. The same look is how alike
            consecutive frames of this video are (the median), whatever the features and the noise. The way is counted
            twice: from the similarity before the transition, and from that of any two distant moments (the median).
            Three quarters: a new scene that happens to be more like the past than the last one was stays below, and a
            moving camera needs longer than a transition for it.
        min_jump: least rise in cosine similarity. In a video that hardly changes, any share of the way is next to
            nothing; 0.02 is meant to lie above compression noise.
        min_rupture: least `rupture` of `similarity_jumps`. Six standard deviations, since they are estimated from
            about ten frames.
        transition: seconds, as in `similarity_jumps`.
        trend: seconds, as in `similarity_jumps`.
        min_age: seconds, as in `similarity_jumps`.

    Returns:
        Resets in order of time. One in the last frames, where `rupture` is NaN, can't be told from the start of a
        movement and is not reported.

    Raises:
        VidgenError: as `similarity_jumps`, and when `closure` is outside (0, 1] or a threshold negative.
    """
    check_positive(closure=closure)
    check_not_negative(min_jump=min_jump, min_rupture=min_rupture)
    if closure > 1:
        raise VidgenError(f"closure={closure:g}; allowed: above 0 and at most 1.")
    features = unit_features(features)
    spans = _spans(len(features), fps, transition, trend, min_age)
    alike = float(np.median(np.einsum("fd,fd->f", features[1:], features[:-1])))
    some = np.unique(np.linspace(0, len(features) - 1, _BLOCK).astype(int))
    distant = some[:, None] - some >= spans.min_age
    unlike = float(np.median((features[some] @ features[some].T)[distant]))
    least = unlike + closure * (alike - unlike)
    ruptured = _rupture(features, spans) >= min_rupture

    # The most alike earlier frame among those to which this frame jumped, for every frame.
    after = np.full(len(features), -np.inf)
    before = np.full(len(features), np.nan)
    resembles = np.full(len(features), -1)
    for start in range(0, len(features) - spans.min_age, _BLOCK):
        similarity, level = _similarities(features, slice(start, start + _BLOCK), spans)
        jumped = similarity - level >= np.maximum(closure * (alike - level), min_jump)
        jumped &= (similarity >= least) & ruptured[:, None]
        candidates = np.where(jumped, similarity, -np.inf)
        where = candidates.argmax(axis=1)
        best = candidates[np.arange(len(features)), where]
        higher = best > after
        after[higher], resembles[higher] = best[higher], start + where[higher]
        before[higher] = level[higher, where[higher]]

    resets = []
    found = np.flatnonzero(resembles >= 0)
    # One transition leaves a run of such frames.
    for run in np.split(found, np.flatnonzero(np.diff(found) > spans.transition) + 1) if len(found) else ():
        peak = run[after[run].argmax()]
        steps = np.diff(features[run[0] - spans.transition : peak + 1] @ features[resembles[peak]])
        frame = int(run[0] - spans.transition + 1 + steps.argmax())
        resets.append(
            Reset(frame, frame / fps, float(before[peak]), float(after[peak]), int(resembles[peak])),
        )
    return resets


def dynamic_degree(features: np.ndarray, fps: float, window: float = 1.0) -> np.ndarray:
    """How much a video changes per second, over time: a curve that falls to 0 is a video that freezes.

    The change between two frames is the angle between their features. Angles of a smooth motion add up, so the curve
    hardly depends on the frame rate; one minus the cosine would shrink with its square. It is no optical flow and not
    VBench's dimension of this name.

    Args:
        features: `(frames, dim)` from a network or `pixel_features`.
        fps: frames per second.
        window: seconds per point of the curve; what is left over at the end is not counted.

    Returns:
        Radians per second, `(windows,)`.

    Raises:
        VidgenError: when the video is shorter than a window, or a window than one frame.
    """
    features = unit_features(features)
    size = count_frames(fps, window=window)
    if not 1 <= size < len(features):
        raise VidgenError(
            f"window={window:g} s is {size} frames at {fps:g} fps; allowed: 1 to {len(features) - 1} frames."
        )
    # The half-chord keeps small angles, whose cosine rounds to 1.
    angles = 2 * np.arcsin(np.minimum(np.linalg.norm(np.diff(features, axis=0), axis=1) / 2, 1))
    num_windows = len(angles) // size
    return angles[: num_windows * size].reshape(num_windows, size).mean(axis=1) * fps


def pixel_features(frames: FrameSource, size: tuple[int, int] = (18, 32)) -> np.ndarray:
    """Downscaled pixels as features, for where no network is at hand.

    Args:
        frames: uint8 `(frames, height, width, 3)`.
        size: height and width to which areas are averaged: coarse enough that rain and leaves even out, fine enough
            to see where the horizon is.

    Returns:
        float32 `(frames, size[0] * size[1] * 3)` around middle gray: without that any two pictures are alike, since
        pixels are never negative. Not of unit length.

    Raises:
        VidgenError: when frames are of another shape or type, or a size is no positive whole number.
    """
    check_sequence("size", size)
    if len(size) != 2:
        raise VidgenError(f"size={size}; expected height and width.")
    for length in size:
        check_whole(1, size=length)
    features = []
    for batch in read_batches(frames, 64):
        pixels = torch.from_numpy(batch).permute(0, 3, 1, 2).float()
        features.append((F.adaptive_avg_pool2d(pixels, size) / 127.5 - 1).flatten(1))
    return torch.cat(features).numpy()
