"""`vidgen world record` and `check` must say what they did and fail where the data is wrong."""

from __future__ import annotations

import numpy as np

from vidgen.data import EpisodeDataset, EpisodeWriter
from vidgen.data.episodes import EpisodesInfo
from vidgen.worlds.room import RoomWorld


def test_record_continue_and_check(run):
    command = ["world", "record", "room", "-o", "data", "--frames", "40", "--size", "16", "--scenes", "2"]
    assert run(*command, "--episodes", "2")[:2] == (0, "data: 2 episodes of 40 frames added to train\n")
    assert run(*command, "--episodes", "3")[:2] == (0, "data: 1 episodes of 40 frames added to train\n")
    assert run(*command, "--episodes", "1", "--split", "validation", "--seed", "3")[0] == 0
    read = EpisodeDataset("data", window=40)
    world = RoomWorld(16)
    assert [item.scene_seed for item in read.episodes] == [0, 1, 0]
    assert np.array_equal(read.frames(1), world.render(world.scene(1), read.poses(1)))

    code, out, err = run("world", "check", "data")
    assert code == 0, err
    assert out.startswith("data: 3 episodes, 120 frames of train, room\ncorrelation by shift: -2: ")

    code, out, err = run(*command, "--episodes", "4", "--seed", "9")
    assert (code, out) == (2, "") and "use the frames, seed and scenes of the first recording" in err


def test_check_fails_with_the_shift_it_found(run):
    assert run("world", "record", "room", "-o", "data", "--frames", "60", "--size", "16", "--episodes", "3")[0] == 0
    read = EpisodeDataset("data", window=1)
    with EpisodeWriter("shifted", EpisodesInfo.read(read.root)) as writer:
        for index in range(3):
            late = np.roll(read.actions(index), 1, axis=0)
            late[0] = 0
            writer.append(read.frames(index), late, read.poses(index))
    code, out, err = run("world", "check", "shifted")
    assert (code, out) == (2, "")
    assert "stored too late: they fit the frames -1 rows away" in err


def test_wrong_words_are_one_line(run):
    for arguments, message in (
        (("record", "rom", "-o", "data"), "did you mean 'room'?"),
        (("record", "room", "-o", "data", "--split", "trian"), "did you mean 'train'?"),
        (("record", "room", "-o", "data", "--episodes", "0"), "num_episodes=0"),
        (("record", "room", "-o", "data", "--fps", "0"), "fps=0"),
        (("check", "nowhere"), "is not a folder"),
        (("import-realestate10k", "nowhere", "-o", "data"), "holds no clips"),
    ):
        code, out, err = run("world", *arguments)
        assert (code, out) == (2, ""), arguments
        assert message in err and err.count("\n") == 1, err
