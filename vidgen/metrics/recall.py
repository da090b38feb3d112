"""Does a place look the same when the camera comes back to it?

The camera pans one way, turns, and pans back. A frame shown `d` seconds before the turn and the one shown `d` seconds
after it look at the same place. How alike two pictures of one place must be is no absolute number: sky and ground of
any video of the same prompt agree to some degree. So every frame is also compared, by the same search, with other
videos of the same prompt, and only what exceeds that counts as memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vidgen.metrics.checks import check_frames, check_sequence
from vidgen.runtime.checks import check_finite, check_not_negative, check_positive, check_whole
from vidgen.runtime.errors import VidgenError


@dataclass(frozen=True)
class Revisit:
    """One place seen twice.

    Attributes:
        age: seconds between the two sights.
        psnr: dB between the first sight and the best-aligned later one.
        chance: the same against each other video of the prompt, dB.
    """

    age: float
    psnr: float
    chance: tuple[float, ...]

    def __post_init__(self) -> None:
        check_sequence("chance", self.chance)
        for value in (self.psnr, *self.chance):
            check_finite(psnr=value)


def aligned_psnr(frame: np.ndarray, candidates: np.ndarray, max_shift: int = 4, trim: float = 0.1) -> float:
    """Peak signal-to-noise ratio of the best match of a frame among candidates and small horizontal shifts.

    Args:
        frame: uint8 `(height, width, 3)`.
        candidates: uint8 `(n, height, width, 3)`.
        max_shift: pixels that a candidate may lie left or right of the frame; the strip without overlap is left out.
        trim: share of pixels with the largest errors that is left out: what moves by itself (a bird, a raindrop) is
            not part of the place.

    Returns:
        dB, at most 60.

    Raises:
        VidgenError: when a picture isn't uint8, sizes differ, the shift leaves no overlap or the trim no pixels.
    """
    check_frames(frame, "frame", "(height, width, 3)")
    check_frames(candidates, "candidates", "(n, height, width, 3)")
    check_not_negative(trim=trim)
    if candidates.shape[1:] != frame.shape:
        raise VidgenError(
            f"candidates have shape {candidates.shape}; expected (n, {', '.join(map(str, frame.shape))})."
        )
    width = frame.shape[1]
    check_whole(0, width - 1, max_shift=max_shift)
    if trim >= 1:
        raise VidgenError(f"trim={trim:g}; allowed: at least 0 and below 1, a share of the pixels.")
    frame, candidates = frame.astype(np.float32), candidates.astype(np.float32)
    best = np.inf
    for shift in range(-max_shift, max_shift + 1):
        left, right = max(0, shift), width + min(0, shift)
        difference = candidates[:, :, left:right] - frame[:, left - shift : right - shift]
        errors = np.einsum("nhwc,nhwc->nhw", difference, difference).reshape(len(candidates), -1) / 3
        kept = max(1, round(errors.shape[1] * (1 - trim)))
        if kept < errors.shape[1]:
            errors = np.partition(errors, kept - 1, axis=1)[:, :kept]
        best = min(best, float(errors.mean(axis=1).min()))
    return min(60.0, 10 * np.log10(255**2 / max(best, 1e-9)))


def sights(num_frames: int, fps: float, turn: float, distance: float, slack: float) -> tuple[int, slice]:
    """Frame of the first sight of a place, and the frames among which its second sight is looked for.

    Args:
        num_frames: of the video.
        fps: frames per second.
        turn: second at which the camera stands still to turn.
        distance: seconds before and after it.
        slack: seconds by which the second sight may come early or late; every second frame within it is tried.

    Raises:
        VidgenError: when a number isn't finite and positive (a slack of 0 is allowed), or the distance is less than a
            frame or reaches beyond either end of the video.
    """
    check_whole(1, num_frames=num_frames)
    check_positive(fps=fps, turn=turn, distance=distance)
    check_not_negative(slack=slack)
    # What lies outside of the video stays outside, and small enough to be rounded.
    first, middle, second = (
        round(max(-1.0, min(second * fps, num_frames))) for second in (turn - distance, turn, turn + distance)
    )
    if first < 0 or second >= num_frames:
        raise VidgenError(
            f"A distance of {distance:g} s around the turn at {turn:g} s leaves the video of "
            f"{num_frames / fps:g} s; use at most {min(turn, (num_frames - 1) / fps - turn):g} s."
        )
    if not first < middle < second:
        raise VidgenError(
            f"A distance of {distance:g} s is less than a frame at {fps:g} fps; use at least {1 / fps:g} s, so that a "
            "frame isn't compared with itself."
        )
    reach = round(min(slack * fps, num_frames))
    # Never back to the turn itself, where any video agrees with what it has just shown.
    return first, slice(max(second - reach, middle), second + reach + 1, 2)


def score_revisits(
    video: np.ndarray,
    others: Sequence[np.ndarray],
    fps: float,
    turn: float,
    distances: Sequence[float],
    slack: float = 0.75,
) -> list[Revisit]:
    """Compare what was seen before a turn of the camera with what is seen after it.

    Args:
        video: uint8 `(frames, height, width, 3)` of a camera that pans one way, turns at `turn` and pans back.
        others: videos of the same prompt and camera path but other places, which give the level of chance.
        fps: frames per second.
        turn: second at which the camera stands still to turn.
        distances: seconds before and after the turn at which to compare.
        slack: seconds by which the second sight may come early or late, because a generated camera keeps its speed
            only roughly; every second frame within it is tried.

    Raises:
        VidgenError: as `sights`, and when no other video or distance is given, or a video isn't uint8 or of another
            shape.
    """
    check_frames(video, "video", "(frames, height, width, 3)")
    check_sequence("distances", distances)
    if not others:
        raise VidgenError("others is empty; without another video of the same prompt there is no level of chance.")
    for other in others:
        check_frames(other, "others", "(frames, height, width, 3)")
        if other.shape != video.shape:
            raise VidgenError(
                f"video has shape {video.shape} and one of the others {other.shape}; they have to agree."
            )
    revisits = []
    for distance in distances:
        first, window = sights(len(video), fps, turn, distance, slack)
        chance = tuple(aligned_psnr(video[first], other[window]) for other in others)
        revisits.append(Revisit(2 * distance, aligned_psnr(video[first], video[window]), chance))
    return revisits


def summarize_revisits(revisits: Sequence[Revisit]) -> dict[str, float]:
    """Means over revisits.

    Returns:
        `psnr` and `chance` in dB, `gain` = their difference, and `recall`: how often the own past is a better match
        than another video's; 0.5 is chance, 1 perfect.

    Raises:
        VidgenError: when there is no revisit.
    """
    check_sequence("revisits", revisits)
    psnr = float(np.mean([revisit.psnr for revisit in revisits]))
    chance = float(np.mean([np.mean(revisit.chance) for revisit in revisits]))
    wins = [(revisit.psnr > level) + 0.5 * (revisit.psnr == level) for revisit in revisits for level in revisit.chance]
    return {"psnr": psnr, "chance": chance, "gain": psnr - chance, "recall": float(np.mean(wins))}
