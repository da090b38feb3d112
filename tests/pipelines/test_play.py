"""Scripts of keys: what is held in each frame, and what is wrong with a script."""

from __future__ import annotations

import pytest

from vidgen.controls import ActionColumn, ActionSpec
from vidgen.pipelines import ScriptError, parse_script

SPEC = ActionSpec(
    (ActionColumn("forward"), ActionColumn("turn left")),
    {"forward": {"forward": 1.0}, "turn left": {"turn left": 0.1}, "turn right": {"turn left": -0.1}},
)


def test_lines_are_repeated_and_comments_are_not_played():
    script = "# to the corner\nforward x 2\n\nforward + turn left x3   # an arc\nnone\nturn right"
    arc = ("forward", "turn left")
    assert parse_script(script, SPEC) == [("forward",)] * 2 + [arc] * 3 + [(), ("turn right",)]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("forward\nforwrd x 3", "line 2: key 'forwrd' is unknown.*forward"),
        ("none + forward", "line 1: 'none' can't be held together"),
        ("forward x 0", "line 1: 0 frames"),
        ("forward x 99999999", "line 1: 99999999 frames"),
        ("# nothing\n", "holds no keys.*turn right"),
        ("forward x many", "line 1: key 'forward x many' is unknown"),
    ],
)
def test_a_wrong_script_is_an_error_that_names_the_line(script: str, message: str):
    with pytest.raises(ScriptError, match=message):
        parse_script(script, SPEC)
