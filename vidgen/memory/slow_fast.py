"""Slow-fast memory of Context Forcing.

"Context Forcing: Consistent Autoregressive Video Generation with Long Context", arXiv 2602.06028.

Slots, in this order: `sink` (the first frames, for ever), `slow` (surprising frames of the past), `fast` (the newest
frames). The chunk being denoised takes the last slots of `fast`, so what is stored between two chunks is
`sink + slow + fast - num_frames_per_block` frames, and with bounded positions no temporal index ever exceeds
`sink + slow + fast - 1`.

Until the slots are full nothing is dropped. Afterwards frames leave `fast` for good unless they were promoted: every
`interval` chunks the newest chunk's retained frame is compared with a reference frame by the cosine similarity of
their unrotated keys (equation 7: promote below `tau`; the figure of the paper prints the opposite sign). A promoted
frame stays in `fast` too until it ages out.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F

from vidgen.memory.kv_memory import KeyValues, KVMemory, KVMemoryConfig, MemoryConfigError

# Enough recent similarities for stable quantiles, few enough to stay negligible beside one slot.
SIMILARITY_HISTORY = 512


@dataclasses.dataclass(frozen=True)
class SlowFastMemoryConfig(KVMemoryConfig):
    """Settings of [`SlowFastMemory`]; sizes in latent frames, defaults of the paper.

    Attributes:
        sink: first frames, never dropped.
        slow: slots for promoted frames.
        fast: newest frames, the chunk being denoised included.
        tau: promote when the similarity is below it, in [-1, 1]; `math.inf` promotes always (uniform sampling).
        interval: chunks between two decisions.
        retain: which latent frame of a chunk is compared and stored: `"first"` or `"last"`.
        eviction: which slow frame makes room: `"oldest"` or `"newest"`.
        scope: `"global"` (one decision per sample, averaged over layers) or `"per_layer"`.
        reference: what a frame is compared with: `"previous_frame"` (last frame of the chunk before) or `"last_slow"`
            (newest slow frame).
    """

    sink: int = 3
    slow: int = 12
    fast: int = 6
    tau: float = 0.95
    interval: int = 2
    retain: str = "first"
    eviction: str = "oldest"
    scope: str = "global"
    reference: str = "previous_frame"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink < 0 or self.slow < 0 or self.fast < 1:
            raise MemoryConfigError(
                f"sink={self.sink}, slow={self.slow}, fast={self.fast}; sink and slow must be >= 0, fast >= 1."
            )
        if math.isnan(self.tau) or not (-1 <= self.tau <= 1 or self.tau == math.inf):
            raise MemoryConfigError(f"tau={self.tau} is no cosine similarity; use [-1, 1], or inf to promote always.")
        if self.interval < 1:
            raise MemoryConfigError(f"interval={self.interval}; it must be at least 1 chunk.")
        for field, allowed in (
            ("retain", ("first", "last")),
            ("eviction", ("oldest", "newest")),
            ("scope", ("global", "per_layer")),
            ("reference", ("previous_frame", "last_slow")),
        ):
            if getattr(self, field) not in allowed:
                raise MemoryConfigError(f"{field}={getattr(self, field)!r}; allowed: {', '.join(map(repr, allowed))}.")


class SlowFastMemory(KVMemory):
    """Constant-size memory of an attention sink, surprising past frames and the newest frames.

    A commit takes a decision, its own or that of `commit(promote=…)`, when there are slow slots, the new frames no
    longer fit beside the stored ones, and it is the `interval`-th, 2 `interval`-th, … commit since `reset`, those that
    filled the memory included. Between decisions nothing is promoted and `promote` is not read. `num_decisions` counts
    the samples (times layers, with `scope="per_layer"`) decided so far.
    """

    name = "slow_fast"
    config: SlowFastMemoryConfig

    def __init__(self, config: SlowFastMemoryConfig | None = None, num_frames_per_block: int = 3) -> None:
        config = config or SlowFastMemoryConfig()
        super().__init__(config, num_frames_per_block)
        if config.fast < 2 * num_frames_per_block:
            raise MemoryConfigError(
                f"fast={config.fast} leaves no room beside the chunk of {num_frames_per_block} latent frames being "
                f"denoised; use at least {2 * num_frames_per_block}."
            )

    def reset(self) -> None:
        super().reset()
        self.num_decisions = 0
        self.num_promotions = 0
        self.similarities: list[float] = []

    @property
    def capacity(self) -> int:
        return self.config.sink + self.config.slow + self.config.fast - self.num_frames_per_block

    def _num_groups(self, num_layers: int) -> int:
        return num_layers if self.config.scope == "per_layer" else 1

    def _select(
        self, num_slots: int, num_new: int, key_values: KeyValues, promote: torch.Tensor | None
    ) -> torch.Tensor | None:
        sink, slow = self.config.sink, self.config.slow
        if num_slots + num_new <= self.capacity:
            return None
        if num_new > self.num_frames_per_block:
            raise MemoryConfigError(
                f"A commit of {num_new} latent frames overflows the memory's {self.capacity} slots, which hold "
                f"{num_slots}. Commit chunks of at most {self.num_frames_per_block}, so that each can be judged."
            )

        # Slots are in order of time, so the roles follow from the counts: sink, slow, then the newest as fast.
        groups, batch_size = self._frame_ids.shape[:2]
        candidates = torch.arange(num_slots + num_new)
        num_fast = self.config.fast - self.num_frames_per_block
        fast_slots = candidates[len(candidates) - num_fast :].expand(groups, batch_size, -1)
        sink_slots = candidates[:sink].expand(groups, batch_size, -1)
        slow_slots = candidates[sink : sink + slow].expand(groups, batch_size, -1)

        if slow and (self.num_commits + 1) % self.config.interval == 0:
            retained = 0 if self.config.retain == "first" else num_new - 1
            if promote is None:
                promote = self._decide(key_values, retained, num_slots)
            promote = promote.cpu().expand(groups, batch_size)
            newcomer = torch.full((groups, batch_size, 1), num_slots + retained)
            survivors = slow_slots[..., 1:] if self.config.eviction == "oldest" else slow_slots[..., :-1]
            promoted_slots = torch.cat([survivors, newcomer], dim=-1)
            slow_slots = torch.where(promote.unsqueeze(-1), promoted_slots, slow_slots)
            self.num_decisions += promote.numel()
            self.num_promotions += int(promote.sum())
        return torch.cat([sink_slots, slow_slots, fast_slots], dim=-1)

    def _decide(self, key_values: KeyValues, retained: int, num_slots: int) -> torch.Tensor:
        """`(groups, batch)` bool: is the retained frame unlike its reference?"""
        reference = num_slots - 1
        if self.config.reference == "last_slow":
            reference = min(self.config.sink + self.config.slow, num_slots) - 1
        # Keys at equal token and head are compared, then averaged over tokens and heads: (layers, batch)
        similarity = torch.stack(
            [
                F.cosine_similarity(key[:, retained].float(), stored[:, reference].float(), dim=-1).mean(dim=(1, 2))
                for (key, _), stored in zip(key_values, self._keys, strict=True)
            ]
        ).cpu()
        if self.config.scope == "global":
            similarity = similarity.mean(dim=0, keepdim=True)
        # Rounding can leave [-1, 1], and tau=-1 means never.
        similarity = similarity.clamp(-1, 1)
        self.similarities = (self.similarities + similarity.flatten().tolist())[-SIMILARITY_HISTORY:]
        return similarity < self.config.tau

    def statistics(self) -> dict[str, Any]:
        """Adds the promotion rate, the quantiles of observed similarities and the `tau` that would promote half."""
        statistics = super().statistics()
        if self.num_decisions:
            statistics["promotion_rate"] = self.num_promotions / self.num_decisions
        if self.similarities:
            levels = (0.05, 0.25, 0.5, 0.75, 0.95)
            quantiles = torch.tensor(self.similarities).quantile(torch.tensor(levels)).tolist()
            statistics["similarity_quantiles"] = dict(zip(map(str, levels), quantiles, strict=True))
            statistics["suggested_tau"] = statistics["similarity_quantiles"]["0.5"]
        return statistics

    def _scalars(self) -> dict[str, Any]:
        return {
            **super()._scalars(),
            "num_decisions": self.num_decisions,
            "num_promotions": self.num_promotions,
            "similarities": self.similarities,
        }
