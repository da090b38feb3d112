"""Turns: one at a time, players first, nobody overtaken by their own kind."""

from __future__ import annotations

import threading
import time

from vidgen.demo.turns import CHUNK, PLAY, Turns


def _wait_until_waiting(turns: Turns, count: int) -> None:
    deadline = time.monotonic() + 5
    while len(turns._waiting) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _start(turns: Turns, name: str, priority: int, order: list[str], threads: list[threading.Thread]) -> None:
    def work() -> None:
        with turns.turn(priority):
            order.append(name)

    waiting = len(turns._waiting)
    thread = threading.Thread(target=work)
    thread.start()
    threads.append(thread)
    _wait_until_waiting(turns, waiting + 1)


def test_players_go_first_and_equals_in_order() -> None:
    turns, order, threads = Turns(), [], []
    with turns.turn():
        for name, priority in (("chunk 1", CHUNK), ("play 1", PLAY), ("chunk 2", CHUNK), ("play 2", PLAY)):
            _start(turns, name, priority, order, threads)
        assert order == []  # one at a time
    for thread in threads:
        thread.join(5)
    assert order == ["play 1", "play 2", "chunk 1", "chunk 2"]


def test_a_chunk_that_gives_way_goes_on_before_other_chunks() -> None:
    turns, order, threads = Turns(), [], []
    with turns.turn():
        _start(turns, "other chunk", CHUNK, order, threads)
        turns.give_way()  # no player waits
        assert order == []
        _start(turns, "play", PLAY, order, threads)
        turns.give_way()
        assert order == ["play"]
        order.append("same chunk")
    for thread in threads:
        thread.join(5)
    assert order == ["play", "same chunk", "other chunk"]


def test_who_gives_way_to_all_goes_on_behind_those_who_waited_by_then() -> None:
    turns, order, threads = Turns(), [], []
    with turns.turn():
        turns.give_way(CHUNK)  # nobody waits
        _start(turns, "chunk 1", CHUNK, order, threads)
        _start(turns, "play", PLAY, order, threads)
        turns.give_way(CHUNK)
        assert order == ["play", "chunk 1"]
    for thread in threads:
        thread.join(5)

    with turns.turn():
        rounds = []
        other = threading.Thread(target=lambda: _alternate(turns, "other", rounds))
        other.start()
        _wait_until_waiting(turns, 1)
        for _ in range(3):
            rounds.append("one")
            turns.give_way(CHUNK)
    other.join(5)
    assert rounds == ["one", "other"] * 3


def _alternate(turns: Turns, name: str, rounds: list[str]) -> None:
    with turns.turn():
        for _ in range(3):
            rounds.append(name)
            turns.give_way(CHUNK)


def test_a_turn_that_fails_is_over() -> None:
    turns = Turns()
    try:
        with turns.turn():
            raise ValueError
    except ValueError:
        pass
    with turns.turn():
        pass
