"""What would be wrong: a reversed clip steered by controls that don't steer it, such as actions off by one frame."""

from __future__ import annotations

import pytest
import torch

from vidgen.controls import (
    CAMERA_DELTA_SPEC,
    CAMERA_SPEC,
    ActionColumn,
    ActionSpec,
    ButtonControls,
    ControlShapeError,
    DeltaControls,
    NonInvertibleActionError,
    PoseControls,
    planar_delta_spec,
    reverse,
)
from vidgen.runtime.errors import ConfigError

BUTTONS = ActionSpec(
    (
        ActionColumn("forward", "pressed", 0, 1),
        ActionColumn("back", "pressed", 0, 1),
        ActionColumn("mouse x", "pixels", -100, 100),
        ActionColumn("sneak", "pressed", 0, 1),
    )
)
INVERSES = {"forward": "back", "back": "forward", "mouse x": "-mouse x", "sneak": "sneak"}
JUMP = ActionSpec((*BUTTONS.columns, ActionColumn("jump", "pressed", 0, 1)))

KINDS = {
    "poses": PoseControls(CAMERA_SPEC),
    "planar deltas": DeltaControls(planar_delta_spec("cells")),
    "camera deltas": DeltaControls(CAMERA_DELTA_SPEC),
    "buttons": ButtonControls(BUTTONS, INVERSES),
    "buttons and time": ButtonControls(JUMP, INVERSES, direction_embedding=True),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reversing_twice_gives_the_same_clip_to_the_last_bit(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    controls = kind.begin(torch.randn(3, 8, kind.spec.width, generator=generator, dtype=dtype))
    frames = torch.randn(3, 8, 2, 2, generator=generator)
    once = reverse(frames, controls, kind)
    assert not torch.equal(once[0], frames) and not torch.equal(once[1], controls)
    twice = reverse(*once, kind)
    assert torch.equal(twice[0], frames)
    assert torch.equal(twice[1], controls) and twice[1].dtype == dtype


def test_reversed_controls_begin_a_clip(kind):
    controls = torch.randn(8, kind.spec.width, generator=torch.Generator().manual_seed(1))
    reversed_controls = kind.reverse(controls)
    assert torch.equal(kind.begin(reversed_controls), reversed_controls)


def test_latent_frames_can_be_in_any_dimension():
    frames = torch.arange(24).reshape(1, 2, 4, 3)
    flipped, _ = reverse(frames, torch.zeros(1, 4, 16), KINDS["poses"], dim=2)
    assert torch.equal(flipped, frames[:, :, [3, 2, 1, 0]])


def test_a_delta_moves_to_the_step_that_undoes_it():
    # A body on a line: positions 0, 1, 3, 6. In reverse 6, 3, 1, 0: steps of -3, -2, -1.
    steps = torch.tensor([[9.0], [1.0], [2.0], [3.0]])
    kind = DeltaControls(ActionSpec((ActionColumn("forward"),)))
    assert kind.reverse(steps)[:, 0].tolist() == [0, -3, -2, -1]
    assert kind.begin(steps)[:, 0].tolist() == [0, 1, 2, 3]


def test_a_button_is_undone_by_its_opposite_one_frame_later():
    presses = torch.tensor([[0, 0, 0, 0], [1, 0, 5, 0], [0, 0, -2, 1], [0, 1, 0, 0]], dtype=torch.float32)
    undone = [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 2, 1], [0, 1, -5, 0]]
    assert KINDS["buttons"].reverse(presses).tolist() == undone
    jumps = torch.cat([presses, torch.tensor([[0.0], [0], [0], [1]])], dim=1)
    told = KINDS["buttons and time"].reverse(jumps)
    assert told[:, :4].tolist() == undone and told[:, 4].tolist() == [0, 1, 0, 0]


def test_a_button_without_inverse_needs_the_direction_of_time():
    with pytest.raises(NonInvertibleActionError, match="No inverse for jump. Allowed: .*direction_embedding=True"):
        ButtonControls(JUMP, INVERSES)
    assert ButtonControls(JUMP, INVERSES, direction_embedding=True).direction_embedding
    assert not KINDS["buttons"].direction_embedding
    unused = ActionSpec((*BUTTONS.columns, ActionColumn("jump", "pressed", 0, 1, used=False)))
    assert ButtonControls(unused, INVERSES).spec is unused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"back": "back"}, "undoes 'forward' by 'back' but 'back' by 'back'"),
        ({"mouse x": "mouse y"}, "inverse_map names 'mouse y'; did you mean 'mouse x'"),
        ({"forwrd": "back"}, "inverse_map names 'forwrd'"),
        ({"sneak": "-sneak"}, "'sneak' is undone by '-sneak', whose range or null value differs"),
        ({"forward": "-back"}, "undoes 'forward' by '-back' but 'back' by 'forward'"),
    ],
)
def test_an_inverse_that_is_none_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        ButtonControls(BUTTONS, {**INVERSES, **change})


def test_two_axes_that_undo_each_other_by_the_negative():
    spec = ActionSpec((ActionColumn("a"), ActionColumn("b")))
    kind = ButtonControls(spec, {"a": "-b", "b": "-a"})
    assert kind.reverse(torch.tensor([[0.0, 0.0], [1.0, 2.0]])).tolist() == [[0, 0], [-2, -1]]


def test_deltas_that_a_sign_cannot_undo_are_refused():
    for column in (ActionColumn("forward", low=0, high=1), ActionColumn("gear", null=1.0)):
        with pytest.raises(ConfigError, match="allowed: a symmetric range around null=0"):
            DeltaControls(ActionSpec((column,)))


def test_other_columns_are_refused(kind):
    with pytest.raises(ControlShapeError, match=kind.spec.names[0]):
        kind.reverse(torch.zeros(4, kind.spec.width + 1))
    with pytest.raises(ControlShapeError):
        kind.begin(torch.zeros(kind.spec.width))
