"""What a running video remembers right now: a thumbnail with its time for every slot of the memory."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from vidgen.memory import KVMemory, SlidingWindowMemory, SlowFastMemory

EXPLANATIONS = {
    "sink": "the first frames, for ever",
    "slow": "older frames that differed from what came before",
    "fast": "the newest frames",
    "window": "the newest frames",
    "full": "every frame",
}


@dataclass(frozen=True)
class Slot:
    """One slot of a memory.

    Attributes:
        role: a key of `EXPLANATIONS`.
        latent_frame: which latent frame it holds.
        second: when that frame is seen, from the start of the video.
    """

    role: str
    latent_frame: int
    second: float


def last_frame_of(latent_frame: int, temporal_stride: int) -> int:
    """The last frame that a latent frame stands for: the first stands for one, every later one for the stride."""
    return latent_frame * temporal_stride


def memory_slots(memory: KVMemory, fps: float, temporal_stride: int) -> list[Slot]:
    """The slots of a memory's first sample and layer, in order of time.

    Args:
        memory: of a session.
        fps: frames per second.
        temporal_stride: frames of a latent frame.
    """
    count = memory.num_slots
    if isinstance(memory, SlowFastMemory):
        sink = min(memory.config.sink, count)
        fast = min(memory.config.fast - memory.num_frames_per_block, count - sink)
        roles = ["sink"] * sink + ["slow"] * (count - sink - fast) + ["fast"] * fast
    elif isinstance(memory, SlidingWindowMemory):
        sink = min(memory.config.sink, count)
        roles = ["sink"] * sink + ["window"] * (count - sink)
    else:
        roles = ["full"] * count
    ids = memory.frame_ids[0].tolist() if count else []
    return [Slot(role, i, last_frame_of(i, temporal_stride) / fps) for role, i in zip(roles, ids)]


def memory_html(slots: list[Slot], thumbnails: Mapping[int, str]) -> str:
    """The strip.

    Args:
        slots: of `memory_slots`.
        thumbnails: data URIs by latent frame; a slot without one shows its time alone.
    """
    if not slots:
        return '<div class="vg-strip vg-empty">What the model remembers appears here while a video is made.</div>'
    groups = []
    for role, members in groupby(slots, key=lambda slot: slot.role):
        members = list(members)
        cells = []
        for slot in members:
            picture = thumbnails.get(slot.latent_frame)
            image = f'<img src="{html.escape(picture)}" alt="">' if picture else '<span class="vg-blank"></span>'
            cells.append(f"<figure>{image}<figcaption>{slot.second:.1f}</figcaption></figure>")
        groups.append(
            f'<section class="vg-{role}"><h4 title="{EXPLANATIONS[role]}">{role} <span>{len(members)}</span>'
            f"<small>{EXPLANATIONS[role]}</small></h4><div>{''.join(cells)}</div></section>"
        )
    return f'<div class="vg-strip">{"".join(groups)}</div>'
