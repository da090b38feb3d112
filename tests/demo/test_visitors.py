"""Visitors: a bounded table from which nobody is thrown out while something is computed for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vidgen.demo.visitors import DemoError, Visitors


class Part:
    def __init__(self) -> None:
        self.busy, self.closed = False, 0

    def close(self) -> None:
        self.closed += 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def visitors(tmp_path: Path, clock: Clock) -> Visitors:
    return Visitors(tmp_path / "visitors", capacity=2, idle_seconds=10, forget_seconds=100, clock=clock)


def test_a_page_keeps_its_visitor_and_two_pages_share_nothing(visitors: Visitors) -> None:
    first, second = visitors.welcome("a"), visitors.welcome("b")
    first.put("video", Part())
    assert visitors.welcome("a") is first
    assert visitors.find("b", "video") is None
    assert first.folder != second.folder and first.folder.is_dir()
    assert "a" not in first.folder.name or len(first.folder.name) == 32  # names can't be told from the page's key


def test_leaving_frees_parts_and_files(visitors: Visitors) -> None:
    visitor, part = visitors.welcome("a"), Part()
    visitor.put("video", part)
    (visitor.folder / "chunk.npy").write_bytes(b"x")
    visitors.leave("a")
    assert part.closed == 1 and not visitor.folder.exists() and visitors.find("a", "video") is None
    visitors.leave("a")  # a page that is closed twice


def test_a_part_in_place_of_another_frees_it(visitors: Visitors) -> None:
    visitor, before, after = visitors.welcome("a"), Part(), Part()
    visitor.put("video", before)
    visitor.put("video", after)
    assert (before.closed, after.closed) == (1, 0) and visitor.get("video") is after


def test_a_full_demo_refuses_while_everybody_is_active(visitors: Visitors, clock: Clock) -> None:
    visitors.welcome("a")
    visitors.welcome("b")
    clock.now = 4
    with pytest.raises(DemoError, match="All 2 places .* in 6 seconds"):
        visitors.welcome("c")
    assert len(visitors) == 2


def test_the_longest_idle_makes_room(visitors: Visitors, clock: Clock) -> None:
    part = Part()
    visitors.welcome("a").put("video", part)
    clock.now = 5
    visitors.welcome("b")
    clock.now = 12
    visitors.find("a", "video")  # a is used again
    clock.now = 20
    visitors.welcome("c")
    assert visitors.find("a", "video") is part and part.closed == 0
    assert set(visitors._visitors) == {"a", "c"}


def test_nobody_is_evicted_while_something_is_computed_for_them(visitors: Visitors, clock: Clock) -> None:
    parts = {key: Part() for key in "ab"}
    for key, part in parts.items():
        visitors.welcome(key).put("video", part)
        part.busy = True
    clock.now = 1000
    with pytest.raises(DemoError, match="when somebody has finished"):
        visitors.welcome("c")
    parts["b"].busy = False
    visitors.welcome("c")
    assert [parts["a"].closed, parts["b"].closed] == [0, 1]


def test_whoever_was_away_for_long_is_forgotten_without_need(visitors: Visitors, clock: Clock) -> None:
    part = Part()
    visitors.welcome("a").put("video", part)
    clock.now = 100
    visitors.welcome("b")
    assert part.closed == 1 and len(visitors) == 1
