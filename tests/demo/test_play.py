"""Games: worlds that step together on the same keys, one request at a time, and recordings that can be trained on."""

from __future__ import annotations

import json
import math
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from vidgen.data import EpisodeDataset
from vidgen.demo import play_run
from vidgen.demo.landscape_player import LANDSCAPE, LandscapePlayer
from vidgen.demo.names import folder_names
from vidgen.demo.play_run import PlayRun, read_keys
from vidgen.demo.players import ROOM, ModelPlayer, RoomPlayer, is_of_rooms
from vidgen.demo.turns import Turns
from vidgen.demo.visitors import DemoError
from vidgen.pipelines import load_starts
from vidgen.runtime.errors import VidgenError
from vidgen.worlds.landscape import LandscapeWorld
from vidgen.worlds.room import RoomWorld

WALK = [["forward"], ["forward", "turn left"], [], ["turn right"], ["back"], ["left"]]


@pytest.fixture
def make_game(world: Any, tmp_path: Path) -> Callable[..., PlayRun]:
    def make(name: str = "game") -> PlayRun:
        players = {ROOM: RoomPlayer(3), "tiny": ModelPlayer(*world, start=0, seed=1)}
        return PlayRun(players, Turns(), tmp_path / name)

    return make


def test_the_room_shows_what_its_renderer_shows_at_its_pose() -> None:
    player, world = RoomPlayer(3), RoomWorld(96)
    scene = world.scene(3)
    for keys in WALK * 3:
        player.step(keys)
        assert np.array_equal(player.frame, world.render(scene, player.pose[None])[0])


def test_nobody_walks_through_walls_and_what_is_recorded_is_where_they_went() -> None:
    player, world = RoomPlayer(0), RoomWorld(96)
    scene, stopped = world.scene(0), 0
    poses, actions = [player.pose], []
    for step in range(200):
        player.step(["forward", "turn left"] if step % 40 > 36 else ["forward"])
        poses.append(player.pose)
        actions.append(player.action)
        assert world.is_free(scene, player.pose[:2])
        stopped += not player.action[:2].any()
    assert stopped > 0
    assert np.allclose(world.deltas(np.stack(poses))[1:], np.stack(actions))


def test_against_a_wall_one_still_turns() -> None:
    player = RoomPlayer(0)
    for _ in range(200):
        player.step(["forward"])
    heading = player.pose[2]
    player.step(["forward", "turn left"])
    assert player.pose[2] - heading == pytest.approx(math.radians(9))


def test_the_landscape_slides_and_time_goes_on() -> None:
    player, world = LandscapePlayer(5), LandscapeWorld(96, 168)
    scene, camera = world.scene(5), 0.0
    assert np.array_equal(player.frame, world.view(scene, 0.0, 0))
    for number, (key, step) in enumerate([("right", 2.0), ("right", 2.0), ("left", -2.0), ("forward", 0.0)], start=1):
        player.step([key])
        camera += step
        assert player.action == step and np.array_equal(player.frame, world.view(scene, camera, number))
    assert set(player.choices) == {"left", "right"}


def test_a_recorded_landscape_is_a_data_set(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    game = PlayRun({LANDSCAPE: LandscapePlayer(0)}, Turns(), tmp_path / "game")
    game.record()
    for key in ("left", "left", "right"):
        game.step([key])
    with zipfile.ZipFile(game.save()) as archive:
        archive.extractall(tmp_path / "episodes")
    window = EpisodeDataset(tmp_path / "episodes/0_landscape__renderer", window=4)[0]
    assert window["controls"].flatten().tolist() == [0.0, -2.0, -2.0, 2.0]


def test_a_model_begins_with_its_start_and_plays_its_session(world: Any) -> None:
    pipe, folder = world
    player = ModelPlayer(pipe, folder, start=1, seed=7)
    frames, controls = load_starts(folder, 1)
    assert np.array_equal(player.frame, frames[-1])
    session = pipe.open_session(frames, controls, seed=7)
    for keys in WALK:
        player.step(keys)
        assert np.array_equal(player.frame, session.step(keys))
    assert set(player.stages) == {"encode", "context", "denoise", "decode"} and player.stages["denoise"] > 0


def test_a_model_begins_with_a_given_picture(world: Any) -> None:
    picture = PIL.Image.new("RGB", (64, 32), (200, 30, 30))
    player = ModelPlayer(*world, start=0, seed=0, picture=picture)
    assert (player.frame == (200, 30, 30)).all() and player.frame.shape == (16, 16, 3)
    player.step(["forward"])


def test_a_model_of_rooms_follows_the_renderer_walls_included(world: Any) -> None:
    assert is_of_rooms(world[0])
    room = RoomPlayer(0)
    for _ in range(200):
        room.step(["forward"])
    model = ModelPlayer(*world, start=0, seed=0, room=room)
    seen = np.asarray(PIL.Image.fromarray(room.frame).resize((16, 16), PIL.Image.Resampling.LANCZOS))
    assert np.array_equal(model.frame, seen)
    for player in (room, model):
        player.step(["forward", "turn left"])
    assert np.array_equal(model.action, room.action) and not model.action[:2].any() and model.action[2] > 0


def test_a_start_that_does_not_exist_is_named(world: Any) -> None:
    with pytest.raises(VidgenError, match="start 9 .* 0 to 1"):
        ModelPlayer(*world, start=9, seed=0)


def test_worlds_step_together(make_game: Any) -> None:
    game = make_game()
    opening = json.loads(game.opening())
    assert opening["fps"] == 8 and "turn left" in opening["choices"] and opening["token"] == game.token
    before = [world["picture"] for world in opening["worlds"]]
    answer = game.step(["turn left"])
    assert answer["frame"] == 1 and [world["name"] for world in answer["worlds"]] == [ROOM, "tiny"]
    assert all(world["picture"] != old for world, old in zip(answer["worlds"], before, strict=True))
    assert make_game("other").token != game.token


def test_an_unknown_key_is_refused_before_anything_moves(make_game: Any) -> None:
    game = make_game()
    with pytest.raises(DemoError, match="'jump' is unknown"):
        game.step(["forward", "jump"])
    assert game.step([])["frame"] == 1


def test_one_request_is_in_flight(make_game: Any) -> None:
    game = make_game()
    with game._turns.turn():  # somebody else computes
        first = threading.Thread(target=game.step, args=(["forward"],))
        first.start()
        while not game._turns._waiting:
            pass
        assert game.busy
        with pytest.raises(DemoError, match="one request at a time"):
            game.step(["forward"])
    first.join(20)
    assert game.step(["forward"])["frame"] == 2


def test_a_recording_is_a_data_set(make_game: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    game = make_game()
    with pytest.raises(DemoError, match="Nothing was recorded"):
        game.save()
    game.step(["forward"])
    game.record()
    shown = {ROOM: [game._players[ROOM].frame], "tiny": [game._players["tiny"].frame]}
    for number, keys in enumerate(WALK):
        assert game.step(keys)["recorded"] == number + 2
        for name, player in game._players.items():
            shown[name].append(player.frame)
    actions = game._players["tiny"].action
    with zipfile.ZipFile(game.save()) as archive:
        archive.extractall(tmp_path / "episodes")
    folders = sorted((tmp_path / "episodes").iterdir())
    assert [folder.name for folder in folders] == ["0_room__renderer", "1_tiny"]
    for folder, name in zip(folders, shown, strict=True):
        window = EpisodeDataset(folder, window=len(WALK) + 1)[0]
        if name == "tiny":  # the room's are larger, but lossless too
            assert np.array_equal(window["frames"], np.stack(shown[name]))
            assert np.allclose(window["controls"][-1], actions) and not window["controls"][0].any()
    assert game.recorded is None
    with pytest.raises(DemoError):
        game.save()


def test_a_recording_that_is_full_asks_to_be_saved(make_game: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play_run, "MAX_RECORDED", 3)
    game = make_game()
    game.record()
    game.step([])
    game.step([])
    with pytest.raises(DemoError, match="full, 3 frames"):
        game.step([])


def test_a_closed_game_is_over(make_game: Any) -> None:
    game = make_game()
    game.close()
    for use in (lambda: game.step([]), game.record, game.save):
        with pytest.raises(DemoError, match="over"):
            use()


@pytest.mark.parametrize(
    ("text", "keys"),
    [("forward + turn left", ["forward", "turn left"]), ("none", []), ("", []), (" back ", ["back"])],
)
def test_keys_are_read_from_text(text: str, keys: list[str]) -> None:
    assert read_keys(text) == keys


def test_worlds_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "doom/model", tmp_path / "room/model", tmp_path / "room/other"]
    assert list(folder_names(folders)) == ["doom/model", "room/model", "other"]
    with pytest.raises(VidgenError, match="twice"):
        folder_names([tmp_path / "a", tmp_path / "b/../a"])
