"""The strip of what a memory holds."""

from __future__ import annotations

import pytest
import torch

from vidgen.demo.memory_strip import memory_html, memory_slots
from vidgen.memory import KVMemory, make_memory


def commit_chunks(memory: KVMemory, count: int) -> None:
    """Chunks of 3 latent frames whose keys all differ."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        key_values = [tuple(torch.randn(1, 3, 2, 1, 4, generator=generator) for _ in range(2))]
        memory.commit(key_values)


def roles(memory: KVMemory) -> list[tuple[str, int]]:
    return [(slot.role, slot.latent_frame) for slot in memory_slots(memory, fps=12, temporal_stride=4)]


def test_roles_of_a_slow_fast_memory_follow_its_definition() -> None:
    memory = make_memory("slow_fast", sink=2, slow=3, fast=6, tau=1.0, interval=1)
    assert roles(memory) == []
    commit_chunks(memory, 1)
    assert roles(memory) == [("sink", 0), ("sink", 1), ("fast", 2)]
    commit_chunks(memory, 7)
    found = roles(memory)
    assert [role for role, _ in found] == ["sink"] * 2 + ["slow"] * 3 + ["fast"] * 3
    assert [frame for role, frame in found if role != "slow"] == [0, 1, 21, 22, 23]  # the first and the newest
    # Everything is promoted: the first frame of each of the newest chunks.
    assert [frame for role, frame in found if role == "slow"] == [15, 18, 21]


def test_roles_of_other_memories() -> None:
    window = make_memory("sliding_window", window=6, sink=1)
    commit_chunks(window, 4)
    assert roles(window) == [("sink", 0), ("window", 9), ("window", 10), ("window", 11)]
    full = make_memory("full", max_frames=9)
    commit_chunks(full, 2)
    assert roles(full) == [("full", frame) for frame in range(6)]


@pytest.mark.parametrize(("latent_frame", "second"), [(0, 0.0), (1, 4 / 12), (5, 20 / 12)])
def test_times_are_those_of_frames(latent_frame: int, second: float) -> None:
    # Latent frame k > 0 stands for frames 4k - 3 to 4k.
    memory = make_memory("full", max_frames=9)
    commit_chunks(memory, 2)
    assert memory_slots(memory, fps=12, temporal_stride=4)[latent_frame].second == pytest.approx(second)


def test_the_strip_shows_every_slot_and_escapes() -> None:
    memory = make_memory("slow_fast", sink=2, slow=3, fast=6)
    assert "appears here" in memory_html([], {})
    commit_chunks(memory, 3)
    strip = memory_html(memory_slots(memory, 12, 4), {0: 'data:x"><script>', 8: "data:newest"})
    assert strip.count("<figure>") == 8 and strip.count("<img") == 2
    assert "<script>" not in strip and "data:newest" in strip
    assert ">2.7</figcaption>" in strip  # frame 32 of 12 per second
