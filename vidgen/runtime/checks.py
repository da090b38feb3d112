"""Refuses numbers that can't be meant, under the name by which the caller knows them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from vidgen.runtime.errors import ConfigError, VidgenError


def check_positive(**numbers: float) -> None:
    """Refuses what isn't finite and above 0."""
    _check_reals(numbers, lambda number: number > 0, " above 0")


def check_not_negative(**numbers: float) -> None:
    """Refuses what isn't finite and at least 0."""
    _check_reals(numbers, lambda number: number >= 0, " of at least 0")


def check_finite(**numbers: float) -> None:
    """Refuses NaN, infinity and what is no number."""
    _check_reals(numbers, lambda number: True, "")


def check_whole(least: int, most: int | None = None, **numbers: int) -> None:
    """Refuses what isn't a whole number from `least` to `most`, which may be left open."""
    for name, number in numbers.items():
        is_whole = isinstance(number, Integral) and not isinstance(number, bool)
        if not is_whole or number < least or (most is not None and number > most):
            allowed = f"at least {least}" if most is None else f"{least} to {most}"
            raise VidgenError(f"{name}={number!r}; allowed: {allowed}, a whole number.")


def check_finite_fields(config: Any) -> None:
    """Refuses NaN and infinity in a dataclass's fields, also inside lists, tuples and dictionaries.

    For the beginning of `__post_init__`: no comparison is true of NaN, so that a check of what is forbidden lets it
    through, and so does a lower bound with infinity.

    Raises:
        ConfigError: names the field.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _holds_finite_numbers(value):
            raise ConfigError(f"{field.name}={value!r}; allowed: finite numbers.")


def _holds_finite_numbers(value: Any) -> bool:
    if isinstance(value, Real):
        return _is_finite(value)
    if isinstance(value, Mapping):
        return all(map(_holds_finite_numbers, (*value.keys(), *value.values())))
    return not isinstance(value, (list, tuple)) or all(map(_holds_finite_numbers, value))


def _is_finite(number: float) -> bool:
    return abs(number) <= sys.float_info.max


def _check_reals(numbers: dict[str, float], allows: Callable[[float], bool], allowed: str) -> None:
    for name, number in numbers.items():
        is_real = isinstance(number, Real) and not isinstance(number, bool)
        if not is_real or not _is_finite(number) or not allows(number):
            raise VidgenError(f"{name}={number!r}; allowed: finite numbers{allowed}.")
