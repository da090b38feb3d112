"""Whether actions are stored with the frames they produced.

Data sets of games are often off by a row: the action is stored with the frame it was chosen at, or a recorder drops
the first frame. Training then still works, and the model reacts one frame late. It shows in the data: pictures change
when something is done.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from vidgen.data.episodes import EpisodeDataset
from vidgen.data.latent_dataset import DatasetError

LAGS = (-2, -1, 0, 1, 2)
# Below it pictures change by themselves. At the right shift, walks through this library's worlds reach 0.77 to 0.96;
# at random play of Pong no shift reaches 0.15.
MIN_CORRELATION = 0.3
# Below that many standard deviations, 1 / sqrt(rows), the best of five shifts may be chance.
MIN_DEVIATIONS = 4.0


class EpisodeAlignmentError(DatasetError):
    """Actions do not belong to the frames they are stored with; names the shift that fits."""


@dataclass(frozen=True)
class Alignment:
    """How well actions explain what changes, if they are shifted.

    Attributes:
        correlations: shift -> correlation. Shift 1 compares action k with the change to frame k + 1: it fits best
            where actions are stored one row early.
        num_rows: how many rows were compared.
    """

    correlations: dict[int, float]
    num_rows: int

    @property
    def lag(self) -> int | None:
        """The shift that fits best; `None` where none fits well enough to tell."""
        best = max(self.correlations, key=self.correlations.__getitem__)
        enough = max(MIN_CORRELATION, MIN_DEVIATIONS / math.sqrt(max(self.num_rows, 1)))
        return best if self.correlations[best] >= enough else None

    def __str__(self) -> str:
        return ", ".join(f"{lag:+d}: {value:.2f}" for lag, value in self.correlations.items())


def alignment(clips: Iterable[tuple[np.ndarray, np.ndarray]]) -> Alignment:
    """Correlate the size of actions with the change of pictures.

    Both are differenced in time first: keys are held for several frames, and how much a step changes the picture
    depends on the place, so that neighboring rows are alike and a shift by one would fit almost as well.

    Args:
        clips: frames, uint8 `(frames, height, width, 3)`, and actions `(frames, columns)` of which row k produced
            frame k, of each episode. Episodes of fewer than 8 frames are left out.
    """
    sizes: list[np.ndarray] = []
    changes: dict[int, list[np.ndarray]] = {lag: [] for lag in LAGS}
    edge = max(LAGS)
    for frames, actions in clips:
        if len(frames) < 2 * edge + 4:
            continue
        change = np.array([np.abs(new.astype(np.int16) - old).mean() for old, new in itertools.pairwise(frames)])
        largest = np.abs(actions).max(axis=0)
        size = np.abs(actions[1:] / np.where(largest > 0, largest, 1)).max(axis=1)
        change, size = np.diff(change), np.diff(size)
        sizes.append(size[edge : len(size) - edge])
        for lag in LAGS:
            changes[lag].append(change[edge + lag : len(change) - edge + lag])
    if not sizes:
        return Alignment(dict.fromkeys(LAGS, 0.0), 0)
    size = np.concatenate(sizes)
    return Alignment({lag: _correlation(size, np.concatenate(changes[lag])) for lag in LAGS}, len(size))


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    deviations = x.std() * y.std()
    return float(((x - x.mean()) * (y - y.mean())).mean() / deviations) if deviations > 0 else 0.0


def align_check(episodes: EpisodeDataset, num_episodes: int = 32) -> Alignment:
    """Check that the actions of a data set belong to its frames.

    Args:
        episodes: the data set.
        num_episodes: how many of its episodes are looked at.

    Returns:
        What was found; its `lag` is 0, or `None` where actions show too little in the pictures to tell.

    Raises:
        EpisodeAlignmentError: another shift fits better than none; named.
    """
    chosen = tqdm(range(min(num_episodes, len(episodes.episodes))), desc="aligning", unit="episode", leave=False)
    found = alignment((episodes.frames(episode), episodes.actions(episode)) for episode in chosen)
    if found.lag:
        raise EpisodeAlignmentError(
            f"Actions of {episodes.root} are stored too {'early' if found.lag > 0 else 'late'}: they fit the frames "
            f"{found.lag:+d} rows away (correlation by shift: {found}). Row k must hold the action that produced "
            "frame k; shift them, or record again."
        )
    return found
