"""Does a generated code video show a place as it showed it before, and after how long an absence?

Recall is measured on the worlds of `vidgen.worlds.code_worlds`, against what the model itself showed and not against
the world: a model that invents a place is right, one that invents it twice is not. No learned metric is involved, and
chance is 1/8.

The effective context length is the longest absence up to which recall holds at every shorter one too. It stands
beside the span that a memory can reach by its sizes, which is what "context length" means in "Context Forcing:
Consistent Autoregressive Video Generation with Long Context" (arXiv 2602.06028). The condition on every shorter
absence matters: a memory that keeps the first frames for ever recalls the opening view after any time, and yet forgets
what it saw lately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vidgen.metrics.checks import check_tensor
from vidgen.runtime.checks import check_finite, check_whole
from vidgen.runtime.errors import VidgenError
from vidgen.worlds.code_worlds import CODEBOOK


@dataclass(frozen=True)
class RecallByGap:
    """Re-entries into view, counted by the length of the absence.

    Attributes:
        hits: int64 `(gaps,)`; `hits[g]` tokens that came back after g absent latent frames showed their old code.
        counts: int64 `(gaps,)`; `counts[g]` tokens came back after g absent latent frames. Gap 0 never occurs.
    """

    hits: Tensor
    counts: Tensor

    def rate(self, low: int, high: int) -> float:
        """Share of hits over all re-entries with low <= gap <= high; NaN if there are none.

        Raises:
            VidgenError: when the range is negative or empty.
        """
        check_whole(0, low=low, high=high)
        if low > high:
            raise VidgenError(f"gaps {low} to {high}; allowed: 0 <= low <= high.")
        count = int(self.counts[low : high + 1].sum())
        return int(self.hits[low : high + 1].sum()) / count if count else math.nan

    def merge(self, *others: RecallByGap) -> RecallByGap:
        """Counts of this and other batches or seeds together; the videos may differ in length."""
        recalls = (self, *others)
        size = max(len(recall.counts) for recall in recalls)
        hits, counts = torch.zeros(2, size, dtype=torch.int64)
        for recall in recalls:
            hits[: len(recall.hits)] += recall.hits
            counts[: len(recall.counts)] += recall.counts
        return RecallByGap(hits, counts)


def nearest_codes(latents: Tensor) -> tuple[Tensor, Tensor]:
    """The code each token shows.

    Args:
        latents: float `(batch, 4, frames, 2, 2T)`.

    Returns:
        codes: int64 `(batch, frames, T)`, the row of `CODEBOOK` nearest to the mean of the token's 2 x 2 pixels.
        squared_distance: float32 `(batch, frames, T)`, mean over the 4 channels and 4 pixels to that code.

    Raises:
        VidgenError: for another shape, or latents that aren't all finite.
    """
    check_tensor("latents", latents, "(batch, 4, frames, 2, 2 * tokens)")
    if latents.shape[1] != CODEBOOK.shape[1] or latents.shape[3] != 2 or latents.shape[4] % 2:
        raise VidgenError(f"latents have shape {tuple(latents.shape)}; expected (batch, 4, frames, 2, 2 * tokens).")
    codebook = CODEBOOK.to(latents.device)
    patches = latents.float().unflatten(4, (-1, 2)).permute(0, 2, 4, 3, 5, 1).flatten(3, 4)  # (B, F, T, 4 pixels, 4)
    # All codes have the same norm: the nearest one has the largest inner product.
    codes = (patches.mean(3) @ codebook.T).argmax(-1)
    return codes, (patches - codebook[codes][:, :, :, None]).square().mean((3, 4))


def validity(latents: Tensor) -> float:
    """Mean squared distance of the pixels to their token's nearest code; 0 means that only codes are shown.

    Args:
        latents: float `(batch, 4, frames, 2, 2T)`.

    Raises:
        VidgenError: as `nearest_codes`.
    """
    return float(nearest_codes(latents)[1].mean())


def code_recall(codes: Tensor, places: Tensor) -> RecallByGap:
    """Compares what a place shows when it comes back into view with what it showed when it left.

    A place re-enters at frame f after a gap of g latent frames if it is in view at f and at f - g - 1 and at no frame
    between, g >= 1; it may stand at another token. Only frame f is counted, later frames could copy it. It is a hit if
    the code at f equals the one at f - g - 1, the last frame before the absence. The first sight of a place counts
    nowhere.

    Args:
        codes: int64 `(batch, frames, T)` as `nearest_codes` finds them in the model's own video.
        places: int64 `(batch, frames, T)`, >= 0, as `CodeVideos.places`.

    Returns:
        Hits and counts for gaps 0 to frames - 1.

    Raises:
        VidgenError: when shapes differ, a frame shows one place twice, or a code or place is none.
    """
    codes, places = _sights(codes, places)
    batch, frames, _ = places.shape
    # Sights in the order (video, place, frame): neighbors in this order are consecutive sights of one place.
    video = torch.arange(batch)[:, None, None]
    sights = (video * (int(places.max()) + 1) + places) * frames + torch.arange(frames)[:, None]
    sights, order = sights.flatten().sort()
    shown = codes.flatten()[order]
    if bool((sights[1:] == sights[:-1]).any()):
        raise VidgenError("a frame of places holds the same place twice; each token must look at a place of its own.")
    same_place = sights[1:] // frames == sights[:-1] // frames
    gaps = sights[1:] - sights[:-1] - 1
    returns = same_place & (gaps > 0)
    hits = returns & (shown[1:] == shown[:-1])
    return RecallByGap(gaps[hits].bincount(minlength=frames), gaps[returns].bincount(minlength=frames))


def _sights(codes: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Checked codes and places on the CPU; places are numbered anew from 0 on, without gaps."""
    for name, values in (("codes", codes), ("places", places)):
        check_tensor(name, values, "(batch, frames, tokens)")
        if values.is_floating_point() or bool((values < 0).any()):
            raise VidgenError(f"{name} are {values.dtype} from {values.min()} on; expected whole numbers from 0 on.")
    if codes.shape != places.shape:
        raise VidgenError(
            f"codes {tuple(codes.shape)}, places {tuple(places.shape)}; expected the same (batch, frames, tokens)."
        )
    if int(codes.max()) >= len(CODEBOOK):
        raise VidgenError(f"codes go up to {int(codes.max())}; allowed: 0 to {len(CODEBOOK) - 1}.")
    return codes.cpu().long(), places.cpu().unique(return_inverse=True)[1]


def place_agreement(codes: Tensor, places: Tensor) -> float:
    """How often two videos show the same code at the same place, over all pairs of sights; chance is 1/8.

    Content is drawn anew for every video, so a model whose videos agree has not remembered but memorized: it shows the
    same at a place whatever was there before. That much recall comes without any memory.

    Args:
        codes: int64 `(batch, frames, T)`, as for `code_recall`.
        places: int64 `(batch, frames, T)`, >= 0.

    Raises:
        VidgenError: when shapes differ, no place is shown by two videos, or a code or place is none.
    """
    codes, places = (values.flatten(1) for values in _sights(codes, places))
    num_places, num_codes = int(places.max()) + 1, len(CODEBOOK)
    # Of each video and place, the share of sights that show each code: (batch, places, codes)
    shares = torch.zeros(len(codes), num_places * num_codes)
    shares.scatter_add_(1, places * num_codes + codes, torch.ones(codes.shape))
    shares = shares.unflatten(1, (num_places, num_codes))
    sights = shares.sum(2, keepdim=True)
    shares = shares / sights.clamp(min=1)
    # Sums over ordered pairs of different videos: all pairs less each video with itself.
    seen = (sights[:, :, 0] > 0).float()
    pairs = (seen.sum(0).square() - seen.sum(0)).sum()
    if not pairs:
        raise VidgenError("no place is shown by two videos, so their agreement is undefined; use more videos.")
    agreeing = (shares.sum(0).square() - shares.square().sum(0)).sum()
    return float(agreeing / pairs)


def effective_context_length(recall: RecallByGap, rho: float = 0.5, chance: float = 1 / 8, bin_width: int = 3) -> int:
    """The longest absence up to which a model remembers.

    max{g : recall(g') >= chance + rho * (1 - chance) for all g' <= g}, over the gaps that occur. Single gaps are often
    too rare to tell memory from luck, so recall is pooled over bins [k * bin_width, (k + 1) * bin_width); bins without
    re-entries are passed over. A bin that straddles the edge of a memory can add up to bin_width - 1 frames.

    Args:
        recall: from `code_recall`.
        rho: share of the way from chance to perfect recall that counts as remembering, in (0, 1].
        chance: recall of a model without memory, in [0, 1).
        bin_width: latent frames; the default is a chunk.

    Returns:
        Latent frames: the longest gap that occurs in the bins before the first one that fails; 0 if the first fails.

    Raises:
        VidgenError: when a number is out of range or no place ever came back.
    """
    check_finite(rho=rho, chance=chance)
    check_whole(1, bin_width=bin_width)
    if not (0 < rho <= 1 and 0 <= chance < 1):
        raise VidgenError(f"rho={rho}, chance={chance}; allowed: 0 < rho <= 1, 0 <= chance < 1.")
    occurring = recall.counts.nonzero().flatten().tolist()
    if not occurring:
        raise VidgenError("no place came back into view; use longer videos or a path that returns.")
    threshold = chance + rho * (1 - chance)
    longest = 0
    for gap in occurring:
        start = gap - gap % bin_width
        if recall.rate(start, start + bin_width - 1) < threshold:
            break
        longest = gap
    return longest
