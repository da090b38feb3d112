"""Errors a user can cause and repair: `ValueError`s whose message says what was given and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VidgenError(ValueError):
    """Base class of the errors raised by vidgen for wrong input, configuration or files."""


class ConfigError(VidgenError):
    """A configuration is missing, malformed, or holds an unknown key or a value out of range."""


class CheckpointError(VidgenError):
    """A checkpoint file is missing, damaged, or does not fit the models it is loaded into."""


class DeviceError(VidgenError):
    """A device or a number format was requested that does not exist on this machine."""


class TrainingError(VidgenError):
    """A training run cannot start or continue (non-finite loss, a role without a loss, an occupied output folder)."""


def suggestion(given: str, allowed: Iterable[str]) -> str:
    """Returns the tail of an error message: the nearest allowed name if one is close, then every allowed name.

    Args:
        given: The name the user gave.
        allowed: The valid names.
    """
    names = sorted(set(allowed))
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(names) if names else '(nothing)'}"
