"""What would be wrong: actions or rewards of other frames than they are stored with, a seed that doesn't fix the game,
a picture that isn't the screen's."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from vidgen.controls import ControlEncoder
from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.worlds.atari_world import FRAME_SKIP, AtariWorld, average_down

ale_py = pytest.importorskip("ale_py", reason="needs ale-py (extra: worlds)")


@pytest.fixture(scope="module")
def pong() -> AtariWorld:
    return AtariWorld("pong", size=32)


@pytest.fixture(scope="module")
def played(pong: AtariWorld) -> tuple[np.ndarray, ...]:
    return pong.play(120, seed=3)


def replay(game: str, seed: int, actions: np.ndarray, dones: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Screens and rewards of the given actions, from the emulator alone."""
    emulator = ale_py.ALEInterface()
    emulator.setInt("random_seed", int(np.random.default_rng(seed).integers(2**31)))
    emulator.setFloat("repeat_action_probability", 0.0)
    emulator.loadROM(ale_py.roms.get_rom_path(game))
    keys = [action for action in emulator.getMinimalActionSet() if action.name != "NOOP"]
    screens, rewards = [emulator.getScreenRGB()], [0.0]
    for frame in range(1, len(actions)):
        reward = 0.0
        if dones[frame - 1]:
            emulator.reset_game()
        else:
            key = keys[int(actions[frame].argmax())] if actions[frame].any() else ale_py.Action.NOOP
            reward = float(sum(emulator.act(key) for _ in range(FRAME_SKIP)))
        screens.append(emulator.getScreenRGB())
        rewards.append(reward)
    return np.stack(screens), np.array(rewards)


def test_row_k_is_the_action_that_produced_frame_k(pong: AtariWorld, played: tuple[np.ndarray, ...]):
    frames, actions, rewards, dones = played
    screens, replayed_rewards = replay("pong", 3, actions, dones)
    assert all(np.array_equal(frame, average_down(screen, 32)) for frame, screen in zip(frames, screens, strict=True))
    np.testing.assert_array_equal(rewards, replayed_rewards)
    assert rewards.min() == -1  # somebody who presses keys at random loses points
    shifted, _ = replay("pong", 3, np.roll(actions, 1, axis=0), dones)
    assert not np.array_equal(shifted, screens)


def test_actions_are_one_hot_held_and_all_used(pong: AtariWorld):
    _, actions, _, _ = pong.play(900, seed=0)
    assert actions.dtype == np.float64 and not actions[0].any()
    assert set(np.unique(actions)) == {0.0, 1.0} and set(actions.sum(1)) == {0.0, 1.0}
    assert (actions.sum(0) > 0).all()
    changed = (actions[1:] != actions[:-1]).any(1).mean()
    # Of the 1 in 5 frames at which a key is chosen, 1 in 6 chooses the same again.
    assert changed == pytest.approx(1 / 5 * 5 / 6, abs=0.04)


def test_a_seed_fixes_a_game_and_another_gives_another(pong: AtariWorld, played: tuple[np.ndarray, ...]):
    for one, other in zip(played, pong.play(120, seed=3), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(pong.play(120, seed=4)[0], played[0])
    # A shorter game is the beginning of a longer one.
    np.testing.assert_array_equal(pong.play(40, seed=3)[0], played[0][:40])


def test_after_the_end_a_new_game_begins():
    world = AtariWorld("breakout", size=16)
    frames, actions, _, dones = world.play(320, seed=1)
    ends = np.flatnonzero(dones[:-1])
    assert len(ends) >= 1
    for end in ends:
        assert not actions[end + 1].any()
    screens, _ = replay("breakout", 1, actions, dones)
    assert np.array_equal(frames[ends[0] + 1], average_down(screens[ends[0] + 1], 16))


def test_a_pixel_is_the_mean_of_its_area():
    picture = np.random.default_rng(0).integers(0, 256, (21, 16, 3), dtype=np.uint8)
    # Every pixel 10 x 10 times: areas then have whole numbers of pixels.
    fine = picture.astype(np.float64).repeat(10, axis=0).repeat(10, axis=1)
    expected = fine.reshape(10, 21, 10, 16, 3).mean(axis=(1, 3))
    assert np.abs(average_down(picture, 10) - expected).max() <= 0.5 + 1e-4


def test_columns_are_the_actions_of_the_game(pong: AtariWorld):
    assert pong.name == "atari:pong" and pong.version == 1
    spec = pong.button_controls.spec
    assert spec.names == ("fire", "right", "left", "right fire", "left fire") == tuple(spec.choices)
    assert spec.row("right fire").tolist() == [0, 0, 0, 1, 0]
    assert "down left fire" in AtariWorld("seaquest", 16).button_controls.spec.names


def test_reversed_actions_are_told_apart_by_the_direction_of_time(pong: AtariWorld, played: tuple[np.ndarray, ...]):
    assert pong.button_controls.direction_embedding
    actions = torch.from_numpy(played[1])
    encoder = ControlEncoder(pong.button_controls, "vector", units=(1.0,) * 5)
    backward = ControlEncoder.from_dict(encoder.to_dict()).reverse(actions)
    assert torch.equal(backward[1:], actions[1:].flip(0))


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigError, match="Unknown game 'pongg'; did you mean 'pong'"):
        AtariWorld("pongg")
    with pytest.raises(ConfigError, match="size=512; allowed: 8 to 160"):
        AtariWorld(size=512)
    with pytest.raises(VidgenError, match="num_frames=0"):
        AtariWorld(size=16).play(0, seed=0)


def test_a_missing_emulator_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(VidgenError, match=r"vidgen\[worlds\]"):
        AtariWorld()
