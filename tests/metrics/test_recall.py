"""What would be wrong: memory claimed for videos that forget, or denied to a world that forgets nothing."""

from __future__ import annotations

import numpy as np
import pytest

from vidgen.metrics import Revisit, aligned_psnr, score_revisits, summarize_revisits
from vidgen.runtime.errors import VidgenError
from vidgen.worlds import CameraMove, LandscapeWorld
from vidgen.worlds.landscape import RAMP_SECONDS

WORLD = LandscapeWorld(32, 56)
SECONDS = 6.0
TURN = SECONDS + 0.5 * RAMP_SECONDS
MOVES = (CameraMove("pan right", SECONDS, 12.0), CameraMove("pan left", SECONDS + 2 * RAMP_SECONDS, 12.0))


def pan_and_return(seed: int, **attributes: str) -> np.ndarray:
    given = {"biome": "meadow", "time_of_day": "day", "weather": "clear", "traveller": "none", **attributes}
    return WORLD.render(WORLD.scene(seed=seed, moves=MOVES, **given))


@pytest.fixture(scope="module")
def videos() -> list[np.ndarray]:
    return [pan_and_return(seed) for seed in range(3)]


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_the_world_remembers_every_place(videos):
    summary = summarize_revisits(score_revisits(videos[0], videos[1:], WORLD.fps, TURN, [2.0, 4.0, 6.0]))
    assert summary["recall"] == 1
    assert summary["psnr"] > 35 and summary["gain"] > 10


def test_a_video_that_goes_on_elsewhere_is_at_chance(videos):
    middle = round(TURN * WORLD.fps)
    forgetful = [np.concatenate([videos[i][:middle], videos[(i + 1) % 3][middle:]]) for i in range(3)]
    summaries = [
        summarize_revisits(
            score_revisits(video, [other for other in forgetful if other is not video], WORLD.fps, TURN, [3.0, 5.0])
        )
        for video in forgetful
    ]
    assert np.mean([summary["gain"] for summary in summaries]) < 1
    assert np.mean([summary["recall"] for summary in summaries]) < 0.8


def test_a_traveller_does_not_spoil_recall():
    videos = [pan_and_return(seed, traveller="birds") for seed in range(2)]
    assert summarize_revisits(score_revisits(videos[0], videos[1:], WORLD.fps, TURN, [3.0, 5.0]))["recall"] == 1


@pytest.mark.parametrize("shift", [-3, 0, 2])
def test_shifted_pictures_are_found_exactly(shift):
    wide = noise((10, 40, 3))
    frame, candidate = wide[:, 8:32], wide[:, 8 + shift : 32 + shift]
    assert aligned_psnr(frame, candidate[None], max_shift=3) == 60
    if shift:
        assert aligned_psnr(frame, candidate[None], max_shift=1) < 15


def test_best_candidate_counts_and_a_moving_spot_is_trimmed():
    frame = noise((10, 24, 3))
    spotted = frame.copy()
    spotted[2:5, 4:10] = 255 - spotted[2:5, 4:10]  # 18 of 240 pixels
    candidates = np.stack([noise(frame.shape, 1), spotted, noise(frame.shape, 2)])
    assert aligned_psnr(frame, candidates, max_shift=0) == 60
    assert aligned_psnr(frame, candidates, max_shift=0, trim=0.0) < 25


def test_known_error_gives_the_known_decibels():
    frame = np.full((8, 8, 3), 100, dtype=np.uint8)
    assert aligned_psnr(frame, frame[None] + 10, max_shift=0) == pytest.approx(10 * np.log10(255**2 / 100))


def test_summary_is_the_mean_over_pairs():
    summary = summarize_revisits([Revisit(4.0, 30.0, (20.0, 32.0)), Revisit(8.0, 20.0, (20.0, 16.0))])
    assert summary == pytest.approx({"psnr": 25.0, "chance": 22.0, "gain": 3.0, "recall": (1 + 0 + 0.5 + 1) / 4})


def test_wrong_arguments_are_named(videos):
    with pytest.raises(VidgenError, match="use at most"):
        score_revisits(videos[0], videos[1:], WORLD.fps, TURN, [7.0])
    with pytest.raises(VidgenError, match="no level of chance"):
        score_revisits(videos[0], [], WORLD.fps, TURN, [1.0])
    with pytest.raises(VidgenError, match="candidates have shape"):
        aligned_psnr(videos[0][0], videos[1][:2, :8])
    with pytest.raises(VidgenError, match="max_shift=56"):
        aligned_psnr(videos[0][0], videos[1][:2], max_shift=56)
