"""What would be wrong: things read in the wrong column, places recognized that show other things, lost weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vidgen.metrics.object_detector import (
    COLUMN_WIDTH,
    HELD_OUT_SEEDS,
    OBJECT_KINDS,
    ObjectDetector,
    ObjectRevisit,
    disturb,
    fit_detector,
    match_objects,
    object_map,
    render_object_maps,
    score_object_revisits,
    summarize_object_revisits,
    to_detector_pixels,
    validate,
)
from vidgen.runtime.errors import CheckpointError, VidgenError
from vidgen.worlds import CameraMove, LandscapeWorld
from vidgen.worlds.landscape import BIOMES, RAMP_SECONDS, TRAVELLERS

SECONDS = 8.0
TURN = SECONDS + 0.5 * RAMP_SECONDS
MOVES = (CameraMove("pan right", SECONDS, 12.0), CameraMove("pan left", SECONDS + 2 * RAMP_SECONDS, 12.0))


def random_map(seed: int, kinds: int = 5, columns: int = 14) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.random((kinds, columns)) * (generator.random(columns) < 0.4)


@pytest.fixture(scope="module")
def true_maps() -> list[np.ndarray]:
    """What a perfect detector would see in six meadows."""
    scenes = [LandscapeWorld().scene(seed=seed, biome="meadow", moves=MOVES) for seed in range(6)]
    return [np.stack([object_map(scene, frame, 14) for frame in range(scene.num_frames)]) for scene in scenes]


# --- maps --------------------------------------------------------------------------------------------------------


def test_the_kinds_are_exactly_what_stands_in_the_world():
    world, kinds = LandscapeWorld(), set()
    for biome in BIOMES:
        for seed in range(6):
            scene = world.scene(seed=seed, biome=biome, moves=[CameraMove("pan right", 60.0, 12.0)])
            kinds.update(item.kind for frame in range(0, 720, 60) for item in scene.visible_objects(frame))
    assert kinds - set(TRAVELLERS) == set(OBJECT_KINDS) and len(set(OBJECT_KINDS)) == len(OBJECT_KINDS)


def test_a_map_marks_the_columns_of_the_centers_and_no_traveller():
    scene = LandscapeWorld().scene(seed=3, biome="coast", traveller="train", moves=[CameraMove("hold", 4.0, 0.0)])
    expected = np.zeros((len(OBJECT_KINDS), 14))
    for item in scene.visible_objects(10):
        center = item.x + item.width / 2
        for column in range(14):
            if item.object_id != "traveller" and 8 * column <= center < 8 * (column + 1):
                expected[OBJECT_KINDS.index(item.kind), column] = 1
    assert expected.sum() >= 3
    np.testing.assert_array_equal(object_map(scene, 10, 14), expected)
    # Coarser columns hold what stood in any of theirs.
    np.testing.assert_array_equal(object_map(scene, 10, 7), expected.reshape(-1, 7, 2).max(axis=2))


def test_mirrored_frames_come_with_mirrored_maps():
    frames = torch.zeros(64, 16, 32, 3)
    frames[:, :, :COLUMN_WIDTH] = 1  # a bright pillar in the first column
    maps = torch.zeros(64, len(OBJECT_KINDS), 4)
    maps[:, 2, 0] = 1
    disturbed, moved = disturb(frames, maps, torch.Generator().manual_seed(0))
    pillar = disturbed.mean(dim=(1, 3)).view(64, 4, COLUMN_WIDTH).mean(dim=2).argmax(dim=1)
    assert set(pillar.tolist()) == {0, 3}
    assert torch.equal(moved[:, 2].argmax(dim=1), pillar) and moved.sum() == 64


# --- detector ----------------------------------------------------------------------------------------------------


def test_a_short_training_beats_knowing_how_frequent_things_are():
    world = LandscapeWorld(32, 56)
    detector = fit_detector(world, num_scenes=40, steps=80, width=16)
    frames, maps = render_object_maps(world, range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + 16), per_scene=3)
    scores = validate(detector, frames, maps)

    # The average precision of always answering with each kind's frequency, from the same frames
    frequency = maps.mean(dim=(0, 2), keepdim=True).expand_as(maps).flatten()
    ranked = maps.flatten()[frequency.argsort(descending=True, stable=True)]
    blind = float(((ranked.cumsum(0) / torch.arange(1, len(ranked) + 1))[ranked > 0]).mean())
    assert scores["base_rate"] < blind
    assert scores["average_precision"] > 2 * blind
    assert scores["precision"] > 0.5 > scores["base_rate"]

    again = fit_detector(world, num_scenes=2, steps=2, width=8)
    same = fit_detector(world, num_scenes=2, steps=2, width=8)
    other = fit_detector(world, num_scenes=2, steps=2, width=8, seed=1)
    assert torch.equal(again.head.weight, same.head.weight)
    assert not torch.equal(again.head.weight, other.head.weight)


def test_validation_counts_what_was_found_missed_and_made_up():
    class Oracle(ObjectDetector):
        def detect(self, video: np.ndarray, batch_size: int = 64) -> np.ndarray:
            return probability

    maps = torch.zeros(1, len(OBJECT_KINDS), 4)
    maps[0, 0, 1] = maps[0, 0, 2] = maps[0, 3, 0] = 1
    probability = np.full(maps.shape, 0.1, dtype=np.float32)
    probability[0, 0, 1], probability[0, 5, 0], probability[0, 0, 2] = 0.9, 0.8, 0.7
    probability[0, 3, 0] = 0.4  # right, but below one half
    scores = validate(Oracle(8), torch.zeros(1, 16, 32, 3, dtype=torch.uint8), maps)
    assert scores["average_precision"] == pytest.approx((1 / 1 + 2 / 3 + 3 / 4) / 3)
    assert scores["base_rate"] == pytest.approx(3 / maps.numel())
    assert scores["precision"] == scores["recall"] == scores["f1"] == pytest.approx(2 / 3)
    assert scores["f1_by_kind"] == {"tree": 1.0, OBJECT_KINDS[3]: 0.0}


def test_detection_in_batches_equals_one_by_one_and_survives_saving(tmp_path):
    torch.manual_seed(0)
    detector = ObjectDetector(width=8).eval()
    video = np.random.default_rng(0).integers(0, 256, (5, 24, 40, 3), dtype=np.uint8)
    detector.save(tmp_path / "detector.safetensors")
    loaded = ObjectDetector.load(tmp_path / "detector.safetensors")
    found = loaded.detect(video, batch_size=2)
    assert found.shape == (5, len(OBJECT_KINDS), 40 // COLUMN_WIDTH) and found.dtype == np.float32
    for frame, expected in zip(video, found):
        pixels = to_detector_pixels(torch.from_numpy(frame[None]))
        np.testing.assert_allclose(detector(pixels).sigmoid().detach().numpy()[0], expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(CheckpointError, match="does not exist"):
        ObjectDetector.load(tmp_path / "missing.safetensors")


# --- revisited places --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shift", [0, 2])
def test_match_equals_a_search_by_loops(max_shift):
    first, candidates = random_map(0), np.stack([random_map(seed) for seed in (2, 4, 6)])
    best = 0.0
    for candidate in candidates:
        for shift in range(-max_shift, max_shift + 1):
            product, sizes = 0.0, 0.0
            for kind in range(first.shape[0]):
                for column in range(first.shape[1]):
                    if 0 <= column + shift < first.shape[1]:
                        p, q = first[kind, column], candidate[kind, column + shift]
                        product, sizes = product + p * q, sizes + p * p + q * q
            best = max(best, 2 * product / sizes)
    assert match_objects(first, candidates, max_shift) == pytest.approx(best)


def test_equal_maps_match_fully_and_shifted_ones_within_reach():
    row = np.zeros((3, 10))
    row[0, 3], row[2, 6] = 1, 0.8
    assert match_objects(row, row[None], max_shift=0) == pytest.approx(1)
    shifted = np.roll(row, 2, axis=1)
    assert match_objects(row, shifted[None], max_shift=2) == pytest.approx(1)
    assert match_objects(row, shifted[None], max_shift=1) == 0
    # The same columns, but other things
    assert match_objects(row, row[[1, 0, 1]][None], max_shift=0) == 0


def test_nothing_in_the_overlap_is_no_agreement():
    edge = np.zeros((2, 4))
    edge[0, 0] = 1
    assert match_objects(edge, np.zeros((1, 2, 4)), max_shift=1) == 0


def test_the_world_shows_the_same_things_again(true_maps):
    summary = summarize_object_revisits(
        score_object_revisits(true_maps[0], true_maps[1:], 12, TURN, [2.0, 4.0, 6.0, 8.0])
    )
    assert summary["recall"] == 1 and summary["match"] > 0.9 and summary["gain"] > 0.3
    assert (summary["seen"], summary["empty"]) == (4, 0)


def test_a_video_that_goes_on_elsewhere_is_at_chance(true_maps):
    middle = round(TURN * 12)
    forgetful = [np.concatenate([true_maps[i][:middle], true_maps[i + 3][middle:]]) for i in range(3)]
    revisits = []
    for index, maps in enumerate(forgetful):
        others = [other for position, other in enumerate(forgetful) if position != index]
        revisits += score_object_revisits(maps, others, 12, TURN, [3.0, 5.0, 7.0])
    summary = summarize_object_revisits(revisits)
    assert abs(summary["gain"]) < 0.15 and 0.2 < summary["recall"] < 0.8


def test_the_second_sight_may_come_late_by_the_slack_only():
    maps = np.zeros((41, 2, 4))
    maps[10, 0, 1] = maps[34, 0, 1] = 1  # the second sight is due in frame 30
    other = [np.zeros_like(maps)]
    for slack, expected in ((0.4, 1), (0.3, 0)):
        (revisit,) = score_object_revisits(maps, other, fps=10, turn=2.0, distances=[1.0], slack=slack)
        assert revisit == ObjectRevisit(2.0, expected, (0,))


def test_the_turn_itself_is_no_second_sight():
    maps = np.zeros((41, 2, 4))
    maps[15:20, 0, 1] = 1  # seen until just before the turn in frame 20, never after
    (revisit,) = score_object_revisits(maps, [maps], fps=10, turn=2.0, distances=[0.5], slack=1.0)
    assert revisit == ObjectRevisit(1.0, 0, (0,))


def test_empty_first_sights_are_left_out_and_counted():
    maps = np.zeros((21, 2, 4))
    maps[6, 1, 2] = maps[14, 1, 2] = 1
    maps[2, 1, 2] = 0.49  # too unsure to be a first sight
    revisits = score_object_revisits(maps, [np.zeros_like(maps)], fps=10, turn=1.0, distances=[0.4, 0.8], slack=0.0)
    assert revisits == [ObjectRevisit(0.8, 1.0, (0.0,)), ObjectRevisit(1.6, None, ())]
    summary = summarize_object_revisits(revisits)
    assert summary == {"match": 1, "chance": 0, "gain": 1, "recall": 1, "seen": 1, "empty": 1}
    assert summarize_object_revisits(revisits[1:]) == {
        "match": None, "chance": None, "gain": None, "recall": None, "seen": 0, "empty": 1,
    }  # fmt: skip


def test_summary_is_the_mean_over_pairs():
    summary = summarize_object_revisits([ObjectRevisit(4.0, 0.9, (0.5, 1.0)), ObjectRevisit(8.0, 0.3, (0.3, 0.2))])
    assert summary == pytest.approx(
        {"match": 0.6, "chance": 0.5, "gain": 0.1, "recall": (1 + 0 + 0.5 + 1) / 4, "seen": 2, "empty": 0}
    )


def test_wrong_arguments_are_named(true_maps):
    with pytest.raises(VidgenError, match="use at most"):
        score_object_revisits(true_maps[0], true_maps[1:], 12, TURN, [9.0])
    with pytest.raises(VidgenError, match="no level of chance"):
        score_object_revisits(true_maps[0], [], 12, TURN, [1.0])
    with pytest.raises(VidgenError, match="candidates have shape"):
        match_objects(random_map(0), random_map(1)[None, :, :7])
    with pytest.raises(VidgenError, match="max_shift=14"):
        match_objects(random_map(0), random_map(1)[None], max_shift=14)
