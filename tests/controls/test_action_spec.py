"""What would be wrong: a column read as another, degrees taken for radians, keys that can't be held together."""

from __future__ import annotations

import json
import math

import pytest
import torch

from vidgen.controls import ActionColumn, ActionSpec, ControlError, ControlShapeError, planar_delta_spec
from vidgen.runtime.errors import ConfigError

SPEC = ActionSpec(
    (
        ActionColumn("forward", "cells", -0.5, 0.5),
        ActionColumn("turn left", "radians", -math.pi, math.pi),
        ActionColumn("unused", used=False),
    ),
    choices={"walk": {"forward": 0.3}, "run": {"forward": 0.4}, "left": {"turn left": 0.1}},
)


def test_keys_held_together_add_up_within_the_range():
    assert SPEC.row().tolist() == [0, 0, 0]
    assert SPEC.row("walk", "left").tolist() == [0.3, 0.1, 0]
    assert SPEC.row("walk", "run").tolist() == [0.5, 0, 0]


def test_description_survives_json():
    assert ActionSpec.from_dict(json.loads(json.dumps(SPEC.to_dict()))) == SPEC
    with pytest.raises(ConfigError, match="No description of controls: KeyError 'columns'"):
        ActionSpec.from_dict({})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_value_at_the_limit_is_allowed_in_every_precision(dtype):
    controls = torch.zeros(2, 3, dtype=dtype)
    controls[1, 1] = math.pi
    SPEC.check(controls, num_frames=2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0.0, 7.5, 0.0], "turn left is 7.5 in row 3; allowed: -3.14159 to 3.14159 radians. If these are degrees"),
        ([0.6, 0.0, 0.0], "forward is 0.6 in row 3; allowed: -0.5 to 0.5 cells."),
        ([math.nan, 0.0, 0.0], "forward is nan in row 3"),
        ([0.0, -math.inf, 0.0], "turn left is -inf in row 3"),
        ([0.0, 0.0, 1.0], "unused is 1 in row 3; allowed: 0 to 0."),
    ],
)
def test_a_wrong_value_is_named_with_its_column_and_row(row, message):
    controls = torch.zeros(2, 5, 3, dtype=torch.float64)
    controls[1, 3] = torch.tensor(row)
    with pytest.raises(ControlError) as error:
        SPEC.check(controls)
    assert message in str(error.value)


def test_a_wrong_shape_names_the_columns():
    with pytest.raises(
        ControlShapeError, match="allowed: floating point .*3. with columns forward, turn left, unused"
    ):
        SPEC.check(torch.zeros(5, 2))
    with pytest.raises(ControlShapeError, match="int64"):
        SPEC.check(torch.zeros(5, 3, dtype=torch.long))
    with pytest.raises(ControlShapeError, match="Controls of 5 frames for a clip of 6"):
        SPEC.check(torch.zeros(5, 3), num_frames=6)


def test_bad_specs_are_refused():
    with pytest.raises(ConfigError, match="named twice: a"):
        ActionSpec((ActionColumn("a"), ActionColumn("a")))
    with pytest.raises(ConfigError, match="at least one"):
        ActionSpec(())
    with pytest.raises(ConfigError, match="allowed: -0.1 to 0.1"):
        ActionColumn("a", low=-0.1, high=0.1, null=1)
    with pytest.raises(ConfigError, match="minus"):
        ActionColumn("-a")
    with pytest.raises(ConfigError, match="did you mean 'forward'"):
        planar_delta_spec("cells", go={"foward": 1.0})
    with pytest.raises(ConfigError, match="Choice 'spin' sets turn left to 90; allowed: -3.14"):
        planar_delta_spec("cells", spin={"turn left": 90})
    with pytest.raises(ConfigError, match="Unknown action 'wlak'; did you mean 'walk'"):
        SPEC.row("wlak")
