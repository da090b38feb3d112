"""What would be wrong: memory claimed for a model that guesses, denied to one that remembers, or at the wrong gap."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch

from vidgen.metrics import (
    RecallByGap,
    code_recall,
    effective_context_length,
    nearest_codes,
    place_agreement,
    validity,
)
from vidgen.runtime.errors import VidgenError
from vidgen.worlds.code_worlds import CODEBOOK, PanoramaWorld, RoomsWorld

WORLDS = [PanoramaWorld(), RoomsWorld()]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def naive_recall(codes: torch.Tensor, places: torch.Tensor) -> tuple[list[int], list[int]]:
    """Hits and counts by walking through each video with a notebook of what was last seen where."""
    frames = codes.shape[1]
    hits, counts = [0] * frames, [0] * frames
    for video_codes, video_places in zip(codes.tolist(), places.tolist()):
        last: dict[int, tuple[int, int]] = {}
        for frame in range(frames):
            for code, place in zip(video_codes[frame], video_places[frame]):
                if place in last and last[place][0] < frame - 1:
                    gap = frame - last[place][0] - 1
                    counts[gap] += 1
                    hits[gap] += code == last[place][1]
            for code, place in zip(video_codes[frame], video_places[frame]):
                last[place] = (frame, code)
    return hits, counts


def play(places: torch.Tensor, remembers: Callable[[int], bool], seed: int = 0) -> torch.Tensor:
    """Codes of a model that copies the last frame and, if `remembers(g)`, what it showed before g absent frames.

    Whatever it sees for the first time or doesn't remember, it draws at random.
    """
    draw = random.Random(seed)
    videos = []
    for video_places in places.tolist():
        last: dict[int, tuple[int, int]] = {}
        video = []
        for frame, looked_at in enumerate(video_places):
            for place in looked_at:
                code = draw.randrange(8)
                if place in last:
                    seen, shown = last[place]
                    absent = frame - seen - 1
                    code = shown if absent == 0 or remembers(absent) else code
                last[place] = (frame, code)
            video.append([last[place][1] for place in looked_at])
        videos.append(video)
    return torch.tensor(videos)


def by_gap(hits: dict[int, int], counts: dict[int, int], size: int = 64) -> RecallByGap:
    recall = RecallByGap(torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64))
    for gap, count in counts.items():
        recall.hits[gap], recall.counts[gap] = hits.get(gap, 0), count
    return recall


# --- recall


def test_three_places_by_hand():
    #                 frame 0  1       2       3       4       5       6
    places = torch.tensor([[[0, 1], [0, 2], [1, 2], [2, 0], [0, 1], [2, 1], [0, 2]]])
    codes = torch.tensor([[[5, 3], [6, 2], [3, 2], [1, 6], [4, 7], [1, 7], [4, 0]]])
    # Place 1 is back at 2 (absent at 1, 3 = 3: hit) and at 4 (absent at 3, 3 then 7: miss).
    # Place 0 is back at 3 (absent at 2, left as 6 and not as 5: hit) and at 6 (absent at 5, 4 = 4: hit).
    # Place 2 is back at 5 (absent at 4, left as 1: hit); that it shows 0 at 6 is no return.
    recall = code_recall(codes, places)
    assert recall.counts.tolist() == [0, 5, 0, 0, 0, 0, 0]
    assert recall.hits.tolist() == [0, 4, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("absent", [1, 2, 5])
def test_the_gap_is_the_number_of_absent_frames(absent):
    places = torch.tensor([[0] + [1] * absent + [0, 0]])[:, :, None]
    codes = torch.tensor([[3] + [1] * absent + [3, 6]])[:, :, None]
    recall = code_recall(codes, places)
    assert recall.counts.nonzero().flatten().tolist() == [absent]
    # The second frame after the return shows something else, and isn't asked.
    assert recall.rate(absent, absent) == 1


def test_a_place_may_come_back_at_another_token():
    world = PanoramaWorld(columns=6)
    places = world.sample(1, 7, generator(), torch.arange(7)[None]).places
    # Column 0 leaves on the left after frame 0 and comes in on the right at frame 3.
    assert places[0, 0].tolist() == [0, 1, 2, 3] and places[0, 3].tolist() == [3, 4, 5, 0]
    codes = places.clone()
    recall = code_recall(codes, places)
    assert (recall.counts[2], recall.hits[2]) == (4, 4) and recall.counts.sum() == 4
    codes[0, 3, 3] = 7
    assert code_recall(codes, places).hits[2] == 3


@pytest.mark.parametrize("world", WORLDS)
def test_counts_equal_those_of_a_walk_through_each_video(world):
    places = world.sample(6, 70, generator()).places
    codes = torch.randint(3, places.shape, generator=generator(1))
    recall = code_recall(codes, places)
    hits, counts = naive_recall(codes, places)
    assert recall.hits.tolist() == hits and recall.counts.tolist() == counts and sum(hits) > 0


@pytest.mark.parametrize("world", WORLDS)
def test_the_world_itself_is_recalled_after_any_absence(world):
    video = world.sample(8, 96, generator())
    recall = code_recall(nearest_codes(video.latents)[0], video.places)
    assert torch.equal(recall.hits, recall.counts) and recall.rate(1, 95) == 1 and recall.counts[40:].sum() > 0
    assert effective_context_length(recall) == recall.counts.nonzero().max()


@pytest.mark.parametrize("world", WORLDS)
def test_a_model_without_memory_is_at_chance(world):
    places = world.sample(64, 96, generator()).places
    recall = code_recall(play(places, lambda gap: False), places)
    total = int(recall.counts.sum())
    assert recall.rate(1, 95) == pytest.approx(1 / 8, abs=4 * math.sqrt(1 / 8 * 7 / 8 / total)) and total > 1000
    assert effective_context_length(recall) == 0


@pytest.mark.parametrize(("world", "longest"), [(PanoramaWorld(), 20), (RoomsWorld(), 18)])
def test_a_window_is_found_where_it_ends(world, longest):
    # Gaps are even in the panorama and whole chunks of three in the rooms.
    places = world.sample(64, 96, generator()).places
    recall = code_recall(play(places, lambda gap: gap <= 20), places)
    assert recall.rate(1, 20) == 1 and recall.rate(21, 95) == pytest.approx(1 / 8, abs=0.05)
    assert effective_context_length(recall) == effective_context_length(recall, bin_width=1) == longest


def test_a_memory_of_the_opening_view_does_not_lengthen_the_context():
    places = RoomsWorld().sample(64, 96, generator()).places
    recall = code_recall(play(places, lambda gap: gap <= 12 or gap >= 45), places)
    assert recall.rate(45, 95) == 1 and effective_context_length(recall) == 12


def test_a_model_is_held_to_what_it_showed_and_not_to_the_world():
    video = PanoramaWorld().sample(4, 60, generator())
    recall = code_recall((video.codes + 1) % 8, video.places)
    assert torch.equal(recall.hits, recall.counts) and recall.counts.sum() > 0


def test_merged_counts_add_up_whatever_the_lengths():
    short, long = by_gap({2: 1}, {2: 4}, size=4), by_gap({2: 3, 7: 1}, {2: 4, 7: 1}, size=9)
    merged = short.merge(long, short)
    assert merged.hits.tolist() == [0, 0, 5, 0, 0, 0, 0, 1, 0] and merged.counts.tolist() == [
        0,
        0,
        12,
        0,
        0,
        0,
        0,
        1,
        0,
    ]
    assert short.counts.tolist() == [0, 0, 4, 0]
    assert merged.rate(2, 2) == 5 / 12 and merged.rate(3, 7) == 1 and merged.rate(0, 99) == 6 / 13
    assert math.isnan(merged.rate(3, 6))


# --- effective context length


def test_the_threshold_lies_rho_of_the_way_from_chance_to_one():
    recall = by_gap({3: 16, 6: 9}, {3: 16, 6: 16})
    # 1/8 + 1/2 * 7/8 = 9/16 exactly
    assert effective_context_length(recall, bin_width=1) == 6
    assert effective_context_length(recall, rho=0.51, bin_width=1) == 3
    assert effective_context_length(recall, chance=0.2, bin_width=1) == 3


def test_bins_pool_their_gaps_and_empty_ones_are_passed_over():
    # Bins of three: 3-5 hold 10 of 12, 30-32 hold 8 of 12, 33-35 hold 1 of 4
    recall = by_gap({3: 9, 5: 1, 30: 8, 35: 1}, {3: 9, 5: 3, 30: 8, 31: 4, 35: 4, 50: 0})
    assert effective_context_length(recall) == 31
    assert effective_context_length(recall, bin_width=1) == 3
    assert effective_context_length(by_gap({4: 0}, {4: 9})) == 0


# --- nearest codes


def test_nearest_codes_equal_a_search_over_all_codes():
    latents = torch.randn(2, 4, 5, 2, 8, generator=generator())
    codes, distances = nearest_codes(latents)
    assert codes.shape == distances.shape == (2, 5, 4)
    for b in range(2):
        for f in range(5):
            for t in range(4):
                patch = latents[b, :, f, :, 2 * t : 2 * t + 2].double()
                to_mean = [(patch.mean((1, 2)) - code).square().sum().item() for code in CODEBOOK.double()]
                nearest = to_mean.index(min(to_mean))
                expected = (patch - CODEBOOK[nearest][:, None, None]).square().mean().item()
                assert codes[b, f, t] == nearest and distances[b, f, t].item() == pytest.approx(expected, rel=1e-5)
    assert validity(latents) == pytest.approx(distances.double().mean().item(), rel=1e-5)


def test_validity_sees_blur_and_noise_that_a_patch_mean_hides():
    latents = PanoramaWorld().sample(2, 12, generator()).latents
    assert validity(latents) == 0
    assert validity(0.5 * latents) == pytest.approx(0.25)
    stripes = torch.tensor([0.3, -0.3]).repeat(4)
    assert validity(latents + stripes) == pytest.approx(0.09)
    assert torch.equal(nearest_codes(latents + stripes)[0], nearest_codes(latents)[0])


def test_wrong_input_is_named():
    with pytest.raises(VidgenError, match="latents have shape \\(1, 3, 5, 2, 8\\)"):
        nearest_codes(torch.zeros(1, 3, 5, 2, 8))
    with pytest.raises(VidgenError, match="codes \\(1, 5, 4\\), places \\(1, 6, 4\\)"):
        code_recall(torch.zeros(1, 5, 4, dtype=torch.int64), torch.zeros(1, 6, 4, dtype=torch.int64))
    with pytest.raises(VidgenError, match="same place twice"):
        code_recall(torch.zeros(1, 2, 2, dtype=torch.int64), torch.tensor([[[0, 1], [1, 1]]]))
    recall = by_gap({3: 1}, {3: 1})
    with pytest.raises(VidgenError, match="gaps 4 to 3"):
        recall.rate(4, 3)
    with pytest.raises(VidgenError, match="rho=0"):
        effective_context_length(recall, rho=0)
    with pytest.raises(VidgenError, match="no place came back"):
        effective_context_length(by_gap({}, {}))


def test_agreement_of_videos_equals_a_loop_over_pairs_of_sights():
    draws = generator()
    codes = torch.randint(8, (4, 5, 2), generator=draws)
    places = torch.stack([torch.randperm(3, generator=draws)[:2] for _ in range(20)]).view(4, 5, 2)
    agreeing, pairs = 0.0, 0
    for one, other in itertools.permutations(range(4), 2):
        for place in range(3):
            first, second = codes[one][places[one] == place], codes[other][places[other] == place]
            if len(first) and len(second):
                agreeing += float((first[:, None] == second).float().mean())
                pairs += 1
    assert place_agreement(codes, places) == pytest.approx(agreeing / pairs, abs=1e-6)


def test_agreement_tells_memorized_places_from_fresh_ones():
    videos = RoomsWorld().sample(64, 60, generator())
    assert place_agreement(videos.codes, videos.places) == pytest.approx(1 / 8, abs=0.02)
    assert place_agreement(videos.places % 8, videos.places) == pytest.approx(1)
    with pytest.raises(VidgenError, match="use more videos"):
        place_agreement(videos.codes[:1], videos.places[:1])
