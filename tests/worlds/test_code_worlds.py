"""What would be wrong: content that can be guessed, a truth that isn't shown, or a model told the wrong place."""

from __future__ import annotations

import math
from itertools import groupby, pairwise

import pytest
import torch

from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.worlds.code_worlds import CODEBOOK, CodeVideos, PanoramaWorld, RoomsWorld

WORLDS = [PanoramaWorld(), PanoramaWorld(columns=7, view=2), RoomsWorld(), RoomsWorld(rooms=3, chunk=2, max_visit=1)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shares(values: torch.Tensor, size: int) -> list[float]:
    return (values.flatten().bincount(minlength=size) / values.numel()).tolist()


def room_visits(video: CodeVideos) -> list[list[tuple[int, int]]]:
    """(room, frames) of each visit of each video."""
    rooms = (video.places[:, :, 0] // 4).tolist()
    return [[(room, len(list(frames))) for room, frames in groupby(of_video)] for of_video in rooms]


def test_codes_are_the_even_corners_and_far_apart():
    even = {tuple(corner) for corner in CODEBOOK.int().tolist()}
    assert len(even) == 8 and all(set(map(abs, corner)) == {1} and math.prod(corner) == 1 for corner in even)
    assert torch.equal((CODEBOOK @ CODEBOOK.T).abs().unique(), torch.tensor([0.0, 4.0]))


@pytest.mark.parametrize("world", WORLDS)
def test_every_pixel_shows_the_code_of_its_place(world):
    video = world.sample(3, 31, generator())
    tokens = video.places.shape[2]
    assert video.latents.shape == (3, 4, 31, 2, 2 * tokens) and video.conditions.shape == (3, 8, 31, 2, 2 * tokens)
    latents = video.latents.permute(0, 2, 3, 4, 1).tolist()
    codebook, places, codes = CODEBOOK.tolist(), video.places.tolist(), video.codes.tolist()
    for b in range(3):
        contents: dict[int, int] = {}
        for f in range(31):
            assert len(set(places[b][f])) == tokens
            for t in range(tokens):
                assert contents.setdefault(places[b][f][t], codes[b][f][t]) == codes[b][f][t]
                pixels = [latents[b][f][row][2 * t + column] for row in (0, 1) for column in (0, 1)]
                assert pixels == [codebook[codes[b][f][t]]] * 4


@pytest.mark.parametrize("world", WORLDS)
def test_the_same_seed_gives_the_same_videos_and_another_seed_others(world):
    first, again, other = (vars(world.sample(2, 30, generator(seed))) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["codes"], other["codes"])


def test_contents_are_uniform_and_independent():
    world = PanoramaWorld()
    every_column = torch.tensor([[0, 4, 8, 12]])
    codes = world.sample(1000, 4, generator(), every_column).codes.flatten(1)  # (videos, columns)
    # Four standard deviations of a share of 1/8 in 16,000 draws
    tolerance = 4 * math.sqrt(1 / 8 * 7 / 8 / codes.numel())
    assert shares(codes, 8) == pytest.approx([1 / 8] * 8, abs=tolerance)
    assert (codes[1:] == codes[:-1]).float().mean().item() == pytest.approx(1 / 8, abs=tolerance)
    assert (codes[:, 1:] == codes[:, :-1]).float().mean().item() == pytest.approx(1 / 8, abs=tolerance)


# --- panorama


def test_panorama_tells_the_angle_of_each_column_in_view():
    world = PanoramaWorld()
    path = torch.tensor([[0, 1, 14, -1, 17], [5, 5, 6, 7, 7]])
    video = world.sample(2, 5, generator(), path)
    for b in range(2):
        for f in range(5):
            for t in range(4):
                column = (path[b, f].item() + t) % 16
                assert video.places[b, f, t] == column
                angle = 2 * math.pi * column / 16
                told = [function(k * angle) for function in (math.sin, math.cos) for k in (1, 3, 5, 7)]
                patch = video.conditions[b, :, f, :, 2 * t : 2 * t + 2]
                torch.testing.assert_close(patch, torch.tensor(told)[:, None, None].expand(8, 2, 2), rtol=0, atol=1e-5)


def test_conditions_of_two_columns_are_orthogonal_or_opposite():
    video = PanoramaWorld().sample(1, 4, generator(), torch.tensor([[0, 4, 8, 12]]))
    told = video.conditions[0, :, :, 0, ::2].flatten(1).T  # (16, 8)
    expected = 4 * (torch.eye(16) - torch.eye(16).roll(8, dims=1))
    torch.testing.assert_close(told @ told.T, expected, rtol=0, atol=1e-5)


def test_a_path_can_be_shared_and_never_changes_the_content():
    world = PanoramaWorld()
    path = torch.tensor([[0, 4, 8, 12]])
    shared = world.sample(3, 4, generator(), path)
    own = world.sample(3, 4, generator(), torch.cat([path, path + 16, path - 16]))
    assert torch.equal(shared.latents, own.latents) and torch.equal(shared.places, own.places)
    wandering = world.sample(3, 60, generator())
    contents = shared.codes.flatten(1)
    assert torch.equal(contents.gather(1, wandering.places.flatten(1)), wandering.codes.flatten(1))


def test_random_paths_move_at_most_one_column_every_two_frames_and_keep_going():
    path = PanoramaWorld().random_path(400, 97, generator())
    assert path.shape == (400, 97)
    assert torch.equal(path[:, 0:96:2], path[:, 1:96:2])
    velocity = (path[:, 2::2] - path[:, :-2:2] + 1) % 16
    assert velocity.max() == 2
    assert shares(velocity, 3) == pytest.approx([1 / 3] * 3, abs=0.03)
    # A new velocity in a quarter of the steps, another one in two thirds of these
    assert (velocity[:, 1:] == velocity[:, :-1]).float().mean().item() == pytest.approx(1 - 2 / 12, abs=0.02)
    assert shares(path[:, 0], 16) == pytest.approx([1 / 16] * 16, abs=4 * math.sqrt(1 / 16 * 15 / 16 / 400))


def test_sweeps_turn_where_the_script_says():
    world = PanoramaWorld()
    assert world.sweep_path(right=5, pause=2, back=4).tolist() == [[0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0]]
    assert world.sweep_path(right=2, pause=0, back=5).tolist() == [[0, 0, 0, 0, 15, 15, 14]]
    there_and_back = world.sweep_path(right=37, pause=11, back=37)
    assert there_and_back.max() == 15 and torch.equal(there_and_back, there_and_back.flip(1))


# --- rooms


@pytest.mark.parametrize("world", WORLDS[2:])
def test_visits_last_whole_chunks_and_jump_to_another_room(world):
    video = world.sample(40, 61, generator())
    assert (
        torch.equal(video.places, video.places[:, :, :1] + torch.arange(4)) and not (video.places[:, :, 0] % 4).any()
    )
    for visits in room_visits(video):
        assert all(0 <= room < world.rooms for room, _ in visits)
        assert all(frames in [world.chunk * n for n in range(1, world.max_visit + 1)] for _, frames in visits[:-1])
        assert 1 <= visits[-1][1] <= world.chunk * world.max_visit


def test_rooms_and_lengths_of_visits_are_uniform():
    visits = room_visits(RoomsWorld().sample(400, 96, generator()))
    lengths = torch.tensor([frames // 3 - 1 for of_video in visits for _, frames in of_video[:8]])
    assert shares(lengths, 3) == pytest.approx([1 / 3] * 3, abs=4 * math.sqrt(2 / 9 / len(lengths)))
    jumps = torch.tensor([(b[0] - a[0]) % 8 for of_video in visits for a, b in pairwise(of_video)])
    tolerance = 4 * math.sqrt(1 / 7 * 6 / 7 / len(jumps))
    assert shares(jumps, 8) == pytest.approx([0] + [1 / 7] * 7, abs=tolerance)
    first = torch.tensor([of_video[0][0] for of_video in visits])
    assert shares(first, 8) == pytest.approx([1 / 8] * 8, abs=4 * math.sqrt(1 / 8 * 7 / 8 / 400))


@pytest.mark.parametrize("world", WORLDS[2:])
def test_the_cut_flag_marks_the_chunk_that_enters_a_room_and_no_other(world):
    video = world.sample(10, 50, generator())
    flags = video.conditions[:, 7]
    for visits, told in zip(room_visits(video), flags[:, :, 0, 0].tolist()):
        expected = [1.0 if frame < world.chunk else 0.0 for _, frames in visits for frame in range(frames)]
        assert told == expected
    assert torch.equal(flags, flags[:, :, :1, :1].expand_as(flags))


def test_a_room_has_one_word_in_all_videos_four_bits_from_any_other():
    video = RoomsWorld().sample(20, 60, generator())
    words: dict[int, tuple[float, ...]] = {}
    rooms, told = video.places[:, :, 0].flatten() // 4, video.conditions[:, :7].permute(0, 2, 3, 4, 1).flatten(2, 3)
    assert torch.equal(told, told[:, :, :1].expand_as(told))
    for room, word in zip(rooms.tolist(), told[:, :, 0].flatten(0, 1).tolist()):
        assert words.setdefault(room, tuple(word)) == tuple(word)
    assert len(words) == 8
    for room, word in words.items():
        distances = [sum(a != b for a, b in zip(word, other)) for name, other in words.items() if name != room]
        assert set(word) <= {-1, 1} and distances == [4] * 7


def test_wrong_input_is_named():
    with pytest.raises(ConfigError, match="view=4 of columns=4"):
        PanoramaWorld(columns=4)
    with pytest.raises(ConfigError, match="rooms=9; allowed: 2 to 8"):
        RoomsWorld(rooms=9)
    with pytest.raises(ConfigError, match="max_visit=0"):
        RoomsWorld(max_visit=0)
    for world in (PanoramaWorld(), RoomsWorld()):
        with pytest.raises(VidgenError, match="batch_size=0, num_frames=6"):
            world.sample(0, 6, generator())
    with pytest.raises(VidgenError, match="\\(2, 5\\); allowed: int64 \\(3, 5\\) or \\(1, 5\\)"):
        PanoramaWorld().sample(3, 5, generator(), torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(VidgenError, match="path is torch.float32"):
        PanoramaWorld().sample(3, 5, generator(), torch.zeros(1, 5))
    with pytest.raises(VidgenError, match="right=0, pause=1, back=2"):
        PanoramaWorld().sweep_path(0, 1, 2)
