"""What the numbers that steer a world mean: one column each, with unit, range and rest value.

A control of a clip of T frames is a tensor `(..., T, columns)`. Row k belongs to frame k: an absolute pose is the
pose at frame k, an action is what turned frame k - 1 into frame k. So the first action of a clip is the null action.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vidgen.runtime.errors import ConfigError, VidgenError, suggestion


class ControlError(VidgenError):
    """Controls hold values that no world could have produced."""


class ControlShapeError(ControlError):
    """Controls have another number of columns or frames than they should; names the columns."""


@dataclass(frozen=True)
class ActionColumn:
    """One number of a control.

    Args:
        name: What it is, such as "forward" or "turn left".
        unit: What it is counted in, such as "radians" or "pressed".
        low: Smallest value.
        high: Largest value.
        null: Value that changes nothing.
        used: False for a column that a data format carries but that is always `null`.
    """

    name: str
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    null: float = 0.0
    used: bool = True

    def __post_init__(self) -> None:
        if not self.name or self.name.startswith("-"):
            raise ConfigError(f"Column name is {self.name!r}; allowed: not empty, and no minus sign in front.")
        if not self.low <= self.null <= self.high:
            raise ConfigError(f"Column {self.name!r} has null={self.null}; allowed: {self.low:g} to {self.high:g}.")


@dataclass(frozen=True)
class ActionSpec:
    """The columns of a control, and the named rows a player chooses from.

    Args:
        columns: In the order of the tensor's last dimension.
        choices: What a key or a discrete action stands for: name -> values of the columns it sets.

    Raises:
        ConfigError: No columns, a name twice, or a choice that sets an unknown column or a value out of range.

    Example:
        >>> spec = ActionSpec((ActionColumn("forward", "cells"),), choices={"walk": {"forward": 0.15}})
        >>> spec.row("walk").tolist()
        [0.15]
    """

    columns: tuple[ActionColumn, ...]
    choices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.columns:
            raise ConfigError("columns is empty; allowed: at least one ActionColumn.")
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ConfigError(f"Columns named twice: {', '.join(twice)}.")
        for choice, values in self.choices.items():
            for name, value in values.items():
                column = self.columns[self.index(name)]
                if not column.low <= value <= column.high:
                    raise ConfigError(
                        f"Choice {choice!r} sets {name} to {value}; allowed: {column.low:g} to {column.high:g} "
                        f"{column.unit}."
                    )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns in order."""
        return tuple(column.name for column in self.columns)

    @property
    def width(self) -> int:
        """Number of columns."""
        return len(self.columns)

    def index(self, name: str) -> int:
        """Position of a column.

        Raises:
            ConfigError: No column has this name.
        """
        if name not in self.names:
            raise ConfigError(f"Unknown column {name!r}; {suggestion(name, self.names)}")
        return self.names.index(name)

    def null(self, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
        """The row that changes nothing.

        Returns:
            `(columns,)`.
        """
        return torch.tensor([column.null for column in self.columns], dtype=dtype, device=device)

    def row(self, *choices: str) -> Tensor:
        """The row of keys held at the same time: their changes add up and stay within range.

        Args:
            choices: Names from `choices`; none gives the null action.

        Returns:
            `(columns,)`, float64.

        Raises:
            ConfigError: An unknown choice.
        """
        row = self.null()
        for choice in choices:
            if choice not in self.choices:
                raise ConfigError(f"Unknown action {choice!r}; {suggestion(choice, self.choices)}")
            for name, value in self.choices[choice].items():
                row[self.index(name)] += value - self.columns[self.index(name)].null
        limits = torch.tensor([(column.low, column.high) for column in self.columns], dtype=row.dtype)
        return row.clamp(limits[:, 0], limits[:, 1])

    def check(self, controls: Tensor, num_frames: int | None = None) -> None:
        """Says what is wrong with controls; it looks at every value, so call it where data comes in.

        Args:
            controls: `(..., frames, columns)`.
            num_frames: Frames of the clip they steer; None takes any number.

        Raises:
            ControlShapeError: Not floating point, another number of columns, or of frames.
            ControlError: A value that is not finite or out of its column's range.
        """
        self.check_shape(controls)
        if num_frames is not None and controls.shape[-2] != num_frames:
            raise ControlShapeError(
                f"Controls of {controls.shape[-2]} frames for a clip of {num_frames}; a clip has one row per frame, "
                "the first action being the null action."
            )
        for index, column in enumerate(self.columns):
            values = controls[..., index]
            low, high = (column.low, column.high) if column.used else (column.null, column.null)
            # Compared in the controls' own precision, in which a limit such as pi is rounded too.
            limits = torch.tensor([low, high], dtype=controls.dtype, device=controls.device)
            wrong = ~values.isfinite() | (values < limits[0]) | (values > limits[1])
            if wrong.any():
                place = wrong.nonzero()[0].tolist()
                value = values[tuple(place)].item()
                message = f"{column.name} is {value:g} in row {place[-1]}; allowed: {low:g} to {high:g} {column.unit}"
                if column.unit == "radians" and math.isfinite(value):
                    message += ". If these are degrees, multiply by pi / 180"
                raise ControlError(message.rstrip() + ".")

    def check_shape(self, controls: Tensor) -> None:
        """Checks number and kind of columns without looking at values.

        Args:
            controls: `(..., frames, columns)`.

        Raises:
            ControlShapeError: Not floating point, or another number of columns.
        """
        if controls.ndim < 2 or controls.shape[-1] != self.width or not controls.is_floating_point():
            raise ControlShapeError(
                f"Controls are {controls.dtype} {tuple(controls.shape)}; allowed: floating point (..., frames, "
                f"{self.width}) with columns {', '.join(self.names)}."
            )

    def to_dict(self) -> dict[str, Any]:
        """A description that JSON can hold; an unlimited range is null there."""
        columns = []
        for column in self.columns:
            low, high = (limit if math.isfinite(limit) else None for limit in (column.low, column.high))
            columns.append({**vars(column), "low": low, "high": high})
        return {"columns": columns, "choices": {name: dict(values) for name, values in self.choices.items()}}

    @classmethod
    def from_dict(cls, description: Mapping[str, Any]) -> ActionSpec:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: A description that `to_dict` did not write.
        """
        try:
            columns = [dict(column) for column in description["columns"]]
            for column in columns:
                column["low"] = -math.inf if column["low"] is None else column["low"]
                column["high"] = math.inf if column["high"] is None else column["high"]
            return cls(tuple(ActionColumn(**column) for column in columns), dict(description["choices"]))
        except (KeyError, TypeError) as error:
            raise ConfigError(f"No description of controls: {type(error).__name__} {error}.") from error
