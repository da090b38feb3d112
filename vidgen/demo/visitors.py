"""Who is here and what the demo keeps for them: a bounded table, from which the idle make room for the new."""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from vidgen.runtime.errors import VidgenError


class DemoError(VidgenError):
    """A visitor asks for what the demo can't do now."""


class Part(Protocol):
    """What a tab keeps for a visitor."""

    @property
    def busy(self) -> bool:
        """Whether it is computing; then its visitor keeps the place."""

    def close(self) -> None:
        """Free what it holds, and stop what it computes."""


class Visitor:
    """One open page.

    Args:
        folder: for the visitor's files; deleted with the visitor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last_used = 0.0
        self._parts: dict[str, Part] = {}
        folder.mkdir(parents=True)

    @property
    def busy(self) -> bool:
        """Whether any part computes."""
        return any(part.busy for part in list(self._parts.values()))

    def put(self, name: str, part: Part) -> None:
        """Keep a part, in place of the one of that name."""
        before = self._parts.pop(name, None)
        if before is not None:
            before.close()
        self._parts[name] = part

    def get(self, name: str) -> Any | None:
        """The part of a name, if there is one."""
        return self._parts.get(name)

    def close(self) -> None:
        """Free everything."""
        while self._parts:
            self._parts.popitem()[1].close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Visitors:
    """The visitors by the key of their page.

    Whoever has been away for `forget_seconds` is forgotten. A new visitor who finds all places taken gets that of the
    one who has been idle longest, if that is at least `idle_seconds`.

    Args:
        root: folder of the visitors' folders.
        capacity: most visitors at a time.
        idle_seconds: see above.
        forget_seconds: see above.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        root: Path,
        capacity: int,
        idle_seconds: float,
        forget_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root, self.capacity = root, capacity
        self.idle_seconds, self.forget_seconds = idle_seconds, forget_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._visitors: dict[str, Visitor] = {}

    def __len__(self) -> int:
        return len(self._visitors)

    def welcome(self, key: str) -> Visitor:
        """The visitor of a page, new if need be.

        Raises:
            DemoError: all places are taken by people who are using them.
        """
        with self._lock:
            now = self._clock()
            leaving = self._overdue(now)
            try:
                if key not in self._visitors:
                    if len(self._visitors) >= self.capacity:
                        leaving.append(self._make_room(now))
                    # Nobody can guess another visitor's file names.
                    self._visitors[key] = Visitor(self.root / secrets.token_hex(16))
                visitor = self._visitors[key]
                visitor.last_used = now
            finally:
                for gone in leaving:
                    gone.close()
        return visitor

    def find(self, key: str, part: str) -> Any | None:
        """A part of the visitor of a page, if both are still here."""
        with self._lock:
            visitor = self._visitors.get(key)
            if visitor is None:
                return None
            visitor.last_used = self._clock()
            return visitor.get(part)

    def parts(self, name: str) -> dict[str, Any]:
        """Every visitor's part of a name, by the key of the page."""
        with self._lock:
            found = {key: visitor.get(name) for key, visitor in self._visitors.items()}
        return {key: part for key, part in found.items() if part is not None}

    def leave(self, key: str) -> None:
        """The page was closed."""
        with self._lock:
            visitor = self._visitors.pop(key, None)
        if visitor is not None:
            visitor.close()

    def close(self) -> None:
        """Everybody leaves."""
        for key in list(self._visitors):
            self.leave(key)

    def _overdue(self, now: float) -> list[Visitor]:
        keys = [
            key
            for key, visitor in self._visitors.items()
            if now - visitor.last_used >= self.forget_seconds and not visitor.busy
        ]
        return [self._visitors.pop(key) for key in keys]

    def _make_room(self, now: float) -> Visitor:
        idle = {key: now - visitor.last_used for key, visitor in self._visitors.items() if not visitor.busy}
        key = max(idle, key=idle.__getitem__, default=None)
        if key is None or idle[key] < self.idle_seconds:
            wait = "when somebody has finished" if key is None else f"in {self.idle_seconds - idle[key]:.0f} seconds"
            raise DemoError(f"All {self.capacity} places of this demo are taken. One may be free {wait}.")
        return self._visitors.pop(key)
