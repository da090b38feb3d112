"""Controls of a clip that is played backwards.

LIVE trains on its own rollouts in reverse, so the reverse of what steered a clip must steer the clip in reverse, and
exactly: "LIVE: Long-horizon Interactive Video World Modeling" (arXiv 2602.03747), equations 12 to 14. The paper writes
(c_T, ..., c_1) for all controls. That is right for absolute poses. An action a_k leads from frame k - 1 to frame k; in
reverse, step j leads from frame T - 1 - (j - 1) to frame T - 1 - j and undoes a_{T - j}:

    reverse(a)_0 = null,    reverse(a)_j = inverse(a_{T - j})    for j = 1 ... T - 1.

Where an action cannot be undone (a jump, a shot), a learned embedding has to tell the model which way time runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from vidgen.controls.action_spec import ActionSpec
from vidgen.runtime.errors import ConfigError, VidgenError, suggestion


class NonInvertibleActionError(VidgenError):
    """An action that has no inverse would be trained backwards as if it had one."""


class ReversibleControls(ABC):
    """Controls whose reverse is known.

    Args:
        spec: Their columns.
    """

    # True if the reverse is no control of the same world, so that the model must be told the direction of time.
    direction_embedding = False

    def __init__(self, spec: ActionSpec) -> None:
        self.spec = spec

    @abstractmethod
    def begin(self, controls: Tensor) -> Tensor:
        """Controls of a clip that starts at its first frame, where nothing is known of the frame before.

        Args:
            controls: `(..., frames, columns)`, cut from anywhere in an episode.
        """

    @abstractmethod
    def reverse(self, controls: Tensor) -> Tensor:
        """Controls of the clip played backwards; applied twice, the controls of `begin` come back.

        Args:
            controls: `(..., frames, columns)`.

        Returns:
            The same shape and dtype.

        Raises:
            ControlShapeError: Other columns than `spec`'s.
        """


def reverse(frames: Tensor, controls: Tensor, kind: ReversibleControls, dim: int = 1) -> tuple[Tensor, Tensor]:
    """A clip played backwards, with the controls that steer it so.

    Args:
        frames: Pixels or latents.
        controls: `(..., frames, columns)`.
        kind: Which controls these are.
        dim: Dimension of `frames` that counts frames.
    """
    return frames.flip(dim), kind.reverse(controls)


class PoseControls(ReversibleControls):
    """Absolute poses: the reverse is the same poses in reverse order.

    What is relative to the first frame of a window (`normalize_to_first`) must be computed again afterwards.
    """

    def begin(self, controls: Tensor) -> Tensor:
        self.spec.check_shape(controls)
        return controls

    def reverse(self, controls: Tensor) -> Tensor:
        self.spec.check_shape(controls)
        return controls.flip(-2)


class _ActionControls(ReversibleControls):
    """Actions, which lead from one frame to the next."""

    @abstractmethod
    def inverse(self, actions: Tensor) -> Tensor:
        """What undoes each action.

        Args:
            actions: `(..., columns)`.
        """

    def begin(self, controls: Tensor) -> Tensor:
        self.spec.check_shape(controls)
        return torch.cat([self._null(controls), controls[..., 1:, :]], dim=-2)

    def reverse(self, controls: Tensor) -> Tensor:
        self.spec.check_shape(controls)
        return torch.cat([self._null(controls), self.inverse(controls[..., 1:, :].flip(-2))], dim=-2)

    def _null(self, controls: Tensor) -> Tensor:
        return self.spec.null(controls.dtype, controls.device).expand_as(controls[..., :1, :])


class DeltaControls(_ActionControls):
    """Relative motion from frame to frame, as `vidgen.controls.motion` writes it.

    There the translation is given in the frame halfway through the turn, which makes the inverse in SE(2) and SE(3)
    the negative of every column: exact to the last bit.

    Raises:
        ConfigError: A column that doesn't rest at 0, or whose range isn't symmetric.
    """

    def __init__(self, spec: ActionSpec) -> None:
        super().__init__(spec)
        for column in spec.columns:
            if column.null != 0 or column.low != -column.high:
                raise ConfigError(
                    f"Column {column.name!r} is {column.low:g} to {column.high:g} with null={column.null:g}; a motion "
                    "is undone by its negative, so allowed: a symmetric range around null=0."
                )

    def inverse(self, actions: Tensor) -> Tensor:
        # 0 - a and not -a: the null action has no sign.
        return 0 - actions


class ButtonControls(_ActionControls):
    """Buttons and pointers of a player.

    Args:
        spec: One column per button or axis.
        inverse_map: Column -> the column that undoes it, with "-" in front if by its negative: a button that walks
            forward {"forward": "back", "back": "forward"}, a pointer {"mouse x": "-mouse x"}.
        direction_embedding: The model is told which way time runs. Then buttons that cannot be undone keep their
            column and are only moved to the frame where they happen in reverse.

    Raises:
        NonInvertibleActionError: A used column has no inverse and `direction_embedding` is False.
        ConfigError: `inverse_map` names unknown columns, or its inverse of an inverse is not the action itself.
    """

    def __init__(self, spec: ActionSpec, inverse_map: Mapping[str, str], direction_embedding: bool = False) -> None:
        super().__init__(spec)
        self.inverse_map, self.direction_embedding = dict(inverse_map), direction_embedding
        # Column i of the inverse is sign[i] times column source[i] of the action.
        source, sign = list(range(spec.width)), [1.0] * spec.width
        for name, undone_by in inverse_map.items():
            other = undone_by.removeprefix("-")
            for column in (name, other):
                if column not in spec.names:
                    raise ConfigError(f"inverse_map names {column!r}; {suggestion(column, spec.names)}")
            minus = "-" if undone_by.startswith("-") else ""
            if inverse_map.get(other) != minus + name:
                raise ConfigError(
                    f"inverse_map undoes {name!r} by {undone_by!r} but {other!r} by {inverse_map.get(other)!r}; "
                    f"the inverse of an inverse is the action itself, so allowed: {minus + name!r}."
                )
            one, two = spec.columns[spec.index(name)], spec.columns[spec.index(other)]
            limits = (-two.high, -two.low, -two.null) if minus else (two.low, two.high, two.null)
            if (one.low, one.high, one.null) != limits:
                raise ConfigError(f"{name!r} is undone by {undone_by!r}, whose range or null value differs.")
            source[spec.index(other)] = spec.index(name)
            sign[spec.index(other)] = -1.0 if minus else 1.0
        stuck = [column.name for column in spec.columns if column.used and column.name not in inverse_map]
        if stuck and not direction_embedding:
            raise NonInvertibleActionError(
                f"No inverse for {', '.join(stuck)}. Allowed: an entry in inverse_map (its own name, if it undoes "
                "itself), direction_embedding=True, or used=False for a column that is never pressed."
            )
        self._source, self._sign = source, sign

    def inverse(self, actions: Tensor) -> Tensor:
        sign = torch.tensor(self._sign, dtype=actions.dtype, device=actions.device)
        # + 0: a negated zero is zero.
        return actions[..., self._source] * sign + 0.0
