"""One computation at a time, whoever asks: waiting callers go in order, players before makers of video."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# A key press waits for at most a denoising step of the chunk that is being made, not for chunks that others queued;
# the chunk that gave way goes on before those.
PLAY, _RESUMED, CHUNK = 0, 1, 2


class Turns:
    """A lock that is fair within a priority. Two models that compute at once would only slow each other down."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: list[tuple[int, int]] = []
        self._numbers = itertools.count()
        self._taken = False

    @contextmanager
    def turn(self, priority: int = CHUNK) -> Iterator[None]:
        """Waits until it is the caller's turn, and holds it for the block.

        Args:
            priority: `PLAY` or `CHUNK`; the smaller goes first.
        """
        with self._condition:
            self._wait(priority)
        try:
            yield
        finally:
            with self._condition:
                self._taken = False
                self._condition.notify_all()

    def give_way(self, to: int = PLAY) -> None:
        """Lets others who wait go first; called in the middle of a turn, which goes on afterwards.

        Args:
            to: `PLAY` lets players go; `CHUNK` everybody who waits now.
        """
        with self._condition:
            if self._waiting and self._waiting[0][0] <= to:
                self._taken = False
                self._condition.notify_all()
                self._wait(_RESUMED if to == PLAY else CHUNK)

    def _wait(self, priority: int) -> None:
        ticket = (priority, next(self._numbers))
        heapq.heappush(self._waiting, ticket)
        self._condition.wait_for(lambda: not self._taken and self._waiting[0] == ticket)
        heapq.heappop(self._waiting)
        self._taken = True
