"""A visitor's game: players that step together on the same keys, one request at a time, and its recording."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vidgen.controls import ActionSpec
from vidgen.data import EpisodeWriter
from vidgen.demo.pictures import to_data_uri
from vidgen.demo.players import Player
from vidgen.demo.turns import PLAY, Turns
from vidgen.demo.visitors import DemoError
from vidgen.runtime.errors import suggestion

MAX_RECORDED = 3000
NOTHING = "none"


@dataclass
class _Recording:
    """Frames, actions and poses of each player since the recording began."""

    frames: dict[str, list[np.ndarray]] = field(default_factory=dict)
    actions: dict[str, list[np.ndarray]] = field(default_factory=dict)
    poses: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(self, name: str, player: Player, action: np.ndarray) -> None:
        for values, value in ((self.frames, player.frame), (self.actions, action), (self.poses, player.pose)):
            values.setdefault(name, []).append(np.array(value))

    def __len__(self) -> int:
        return max((len(frames) for frames in self.frames.values()), default=0)


class PlayRun:
    """One game of one visitor.

    Args:
        players: by name.
        turns: who computes when.
        folder: for its files.

    Attributes:
        token: what a page shows to be allowed to step; nobody can guess it.
    """

    def __init__(self, players: Mapping[str, Player], turns: Turns, folder: Path) -> None:
        self.token = secrets.token_urlsafe(24)
        self._players, self._turns, self._folder = dict(players), turns, folder
        self._lock = threading.Lock()
        self._frame, self._closed = 0, False
        self._recording: _Recording | None = None
        folder.mkdir()

    @property
    def busy(self) -> bool:
        """Whether a frame is being made."""
        return self._lock.locked()

    @property
    def choices(self) -> tuple[str, ...]:
        """What can be held in any of the worlds."""
        return tuple(dict.fromkeys(name for player in self._players.values() for name in player.choices))

    @property
    def recorded(self) -> int | None:
        """Frames recorded so far, None when nothing is being recorded."""
        return None if self._recording is None else len(self._recording)

    def opening(self) -> str:
        """JSON for the page: `{"token", "fps", "choices", "frame", "worlds": [{"name", "picture", "stages"}]}`."""
        return json.dumps(
            {
                "token": self.token,
                "fps": min(player.fps for player in self._players.values()),
                "choices": self.choices,
                **self._state(0.0),
            }
        )

    def _state(self, waited: float) -> dict[str, Any]:
        worlds = [
            {"name": name, "picture": to_data_uri(player.frame), "stages": player.stages}
            for name, player in self._players.items()
        ]
        return {"frame": self._frame, "waited": 1000 * waited, "recorded": self.recorded, "worlds": worlds}

    def step(self, keys: list[str]) -> dict[str, Any]:
        """One frame on in every world.

        Args:
            keys: what is held, names from `choices`.

        Returns:
            `{"frame", "waited", "recorded", "worlds"}`; times in milliseconds.

        Raises:
            DemoError: another step is in flight, an unknown key, or a recording that is full.
            VidgenError: a model failed; the worlds before it are one frame ahead.
        """
        for key in keys:
            if key not in self.choices:
                raise DemoError(f"key {key!r} is unknown: {suggestion(key, (*self.choices, NOTHING))}.")
        if not self._lock.acquire(blocking=False):
            raise DemoError("A frame is being made; one request at a time.")
        try:
            self._check_open()
            if self._recording is not None and len(self._recording) >= MAX_RECORDED:
                raise DemoError(f"The recording is full, {MAX_RECORDED} frames; save it.")
            began = time.monotonic()
            with self._turns.turn(PLAY):
                waited = time.monotonic() - began
                for player in self._players.values():
                    player.step(keys)
            self._frame += 1
            if self._recording is not None:
                for name, player in self._players.items():
                    self._recording.add(name, player, player.action)
            return self._state(waited)
        finally:
            self._lock.release()

    def record(self) -> None:
        """Begin to record, with the present frame; what was recorded before is given up."""
        with self._lock:
            self._check_open()
            self._recording = _Recording()
            for name, player in self._players.items():
                self._recording.add(name, player, ActionSpec.from_dict(player.info.action_spec).null().numpy())

    def save(self) -> Path:
        """Write what was recorded as a data set of episodes per world, and end the recording.

        Returns:
            A zip file; each folder in it is what [`~vidgen.data.EpisodeDataset`] reads.

        Raises:
            DemoError: nothing was recorded.
            VidgenError: pyarrow, which writes episodes, isn't installed.
        """
        with self._lock:
            self._check_open()
            recording = self._recording
            if recording is None or len(recording) < 2:
                raise DemoError("Nothing was recorded; start a recording and walk.")
            root = self._folder / "episodes"
            shutil.rmtree(root, ignore_errors=True)
            for index, (name, player) in enumerate(self._players.items()):
                with EpisodeWriter(root / f"{index}_{_file_name(name)}", player.info) as writer:
                    writer.append(
                        np.stack(recording.frames[name]),
                        np.stack(recording.actions[name]),
                        np.stack(recording.poses[name]),
                    )
            self._recording = None
            return Path(shutil.make_archive(str(self._folder / "episodes"), "zip", root))

    def close(self) -> None:
        """Free the sessions; the folder is the visitor's to delete."""
        with self._lock:
            self._closed = True
            self._players, self._recording = {}, None

    def _check_open(self) -> None:
        if self._closed:
            raise DemoError("This game is over; begin again.")


def read_keys(text: str) -> list[str]:
    """The names in a text such as `forward + turn left`; `none` or nothing holds no key."""
    names = [name.strip() for name in text.split("+")]
    return [name for name in names if name and name != NOTHING]


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name).strip("_").lower()
