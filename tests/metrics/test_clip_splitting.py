"""What would be wrong: clips over a cut, frames that no clip holds, scores averaged or scaled the wrong way."""

from __future__ import annotations

import colorsys
import json
import sys
import textwrap

import numpy as np
import pytest

from vidgen.metrics import Clip, find_scene_cuts, split_long_video, vbench_long
from vidgen.metrics.clip_splitting import (
    SLOW_FAST_WEIGHTS,
    SlowFastWeights,
    aggregate_clips,
    frame_consistency,
    fuse_slow_fast,
    write_clips,
)
from vidgen.runtime.errors import VidgenError


def solid(*runs: tuple[int, tuple[int, int, int]]) -> np.ndarray:
    """Frames of one color each: (number, RGB) after one another."""
    return np.concatenate([np.tile(np.uint8(color), (count, 6, 8, 1)) for count, color in runs])


RED, CYAN, DARK_RED = (200, 0, 0), (0, 200, 200), (100, 0, 0)


def test_a_cut_is_the_first_frame_of_the_new_color():
    # Red to cyan turns the hue by 90 half-degrees and nothing else: a change of 30.
    video = solid((70, RED), (30, CYAN))
    assert find_scene_cuts(video, 8, threshold=29.9) == [70]
    assert find_scene_cuts(video, 8, threshold=30.1) == []
    # Half the value is a change of 100 / 3.
    video = solid((64, RED), (30, DARK_RED))
    assert find_scene_cuts(video, 8, threshold=33.3) == [64]
    assert find_scene_cuts(video, 8, threshold=33.4) == []


def test_change_of_color_equals_colorsys():
    frames = np.random.default_rng(0).integers(0, 256, (2, 6, 8, 3), dtype=np.uint8)
    frames[0, 0, 0], frames[0, 0, 1] = 0, 77  # black and gray
    total = 0.0
    for first, second in zip(frames[0].reshape(-1, 3), frames[1].reshape(-1, 3), strict=True):
        (h1, s1, v1), (h2, s2, v2) = (colorsys.rgb_to_hsv(*(color / 255)) for color in (first, second))
        turn = abs(h1 - h2) * 180
        total += min(turn, 180 - turn) + abs(s1 - s2) * 255 + abs(v1 - v2) * 255
    change = total / (48 * 3)
    assert find_scene_cuts(frames, 8, change - 1e-3, min_scene_seconds=0) == [1]
    assert find_scene_cuts(frames, 8, change + 1e-3, min_scene_seconds=0) == []


def test_flashes_and_stubs_make_no_scene():
    assert find_scene_cuts(solid((20, RED), (2, CYAN), (20, RED)), 10, 25.0) == [20]
    assert find_scene_cuts(solid((3, RED), (30, CYAN)), 10, 25.0) == []
    assert find_scene_cuts(solid((30, RED), (3, CYAN)), 10, 25.0) == []
    assert find_scene_cuts(solid((6, RED), (6, CYAN), (6, RED)), 10, 25.0) == [6, 12]


@pytest.mark.parametrize(
    ("frames", "cuts", "expected"),
    [
        (8, [], [(0, 4), (4, 8)]),
        (10, [], [(0, 4), (4, 8), (6, 10)]),
        (3, [], [(0, 3)]),
        (15, [9], [(0, 4), (4, 8), (5, 9), (9, 13), (11, 15)]),
        (15, [12], [(0, 4), (4, 8), (8, 12), (12, 15)]),
        (9, [4, 6], [(0, 4), (4, 6), (6, 9)]),
    ],
)
def test_clips_of_hand_worked_cases(frames, cuts, expected):
    video = np.zeros((frames, 2, 2, 3), dtype=np.uint8)
    clips = split_long_video(video, 2.0, clip_seconds=2.0, scene_cuts=cuts)
    assert clips == [Clip(*bounds) for bounds in expected]


def test_cuts_are_searched_and_the_exact_frame_rate_counts():
    clips = split_long_video(solid((70, RED), (60, CYAN)), 29.97, threshold=25.0)
    assert clips == [Clip(0, 60), Clip(10, 70), Clip(70, 130)]
    # 2 s are 60 frames of 29.97; cut down to 29 fps they would be 58.
    assert split_long_video(solid((120, RED)), 29.97) == [Clip(0, 60), Clip(60, 120)]


def test_written_clips_are_the_frames_in_order(tmp_path):
    video = np.random.default_rng(0).integers(0, 256, (10, 4, 4, 3), dtype=np.uint8)
    written = {}
    clips = split_long_video(video, 2.0, scene_cuts=[])
    paths = write_clips(video, 2.0, clips, tmp_path / "new", "a", lambda path, *rest: written.update({path: rest}))
    assert [path.name for path in paths] == ["a-000.mp4", "a-001.mp4", "a-002.mp4"] and (tmp_path / "new").is_dir()
    for path, clip in zip(paths, clips, strict=True):
        assert np.array_equal(written[path][0], video[clip.start : clip.stop]) and written[path][1] == 2.0


def test_consistency_of_hand_worked_directions():
    # Angles 0, 60, 180 degrees: to the frame before 0.5 and -0.5 (counts 0), to the first 0.5 and -1 (counts 0).
    angles = np.radians([0, 60, 180])
    features = np.stack([np.cos(angles), np.sin(angles)], axis=1) * [[1.0], [5.0], [2.0]]
    assert frame_consistency(features) == pytest.approx((0.5 + 0.5) / 2 / 2)
    with pytest.raises(VidgenError, match="at least two"):
        frame_consistency(features[:1])


def test_branches_are_fused_on_the_scale_of_the_slow_one():
    weights = SlowFastWeights(slow=0.75, fast=0.25, slow_mean=0.9, slow_std=0.01, fast_mean=0.6, fast_std=0.1)
    # 0.4 is two deviations below the fast mean: 0.88 on the slow scale.
    assert fuse_slow_fast(0.96, 0.4, weights) == pytest.approx(0.75 * 0.96 + 0.25 * 0.88)
    assert fuse_slow_fast(0.96, None, weights) == 0.96
    for published in SLOW_FAST_WEIGHTS.values():
        assert published.slow + published.fast == pytest.approx(1)
        assert fuse_slow_fast(published.slow_mean, published.fast_mean, published) == pytest.approx(
            published.slow_mean
        )


def test_long_videos_do_not_count_more():
    videos, total = aggregate_clips({"long": [0.2] * 9, "short": [0.4, 0.8]})
    assert videos == pytest.approx({"long": 0.2, "short": 0.6}) and total == pytest.approx(0.4)
    with pytest.raises(VidgenError, match="for b"):
        aggregate_clips({"a": [1.0], "b": []})
    with pytest.raises(VidgenError, match="any video"):
        aggregate_clips({})


def test_wrong_splits_are_named():
    video = solid((20, RED))
    with pytest.raises(VidgenError, match="1 frames at 8 fps; at least 2"):
        split_long_video(video, 8, clip_seconds=0.1)
    with pytest.raises(VidgenError, match="at least 2 frames of the video"):
        split_long_video(video, 8, scene_cuts=[25])
    with pytest.raises(VidgenError, match="at least 2 frames of the video"):
        split_long_video(video, 8, scene_cuts=[19])
    with pytest.raises(VidgenError, match="fps=0"):
        split_long_video(video, 0)
    with pytest.raises(VidgenError, match="expected uint8"):
        find_scene_cuts(video / 255, 8)


def read_array(path):
    return np.load(path), 8.0


def write_array(path, frames, fps):
    with open(path, "wb") as file:
        np.save(file, frames)


@pytest.fixture
def videos(tmp_path):
    """`.mp4` files that hold arrays: the protocol leaves reading and writing to the caller."""
    folder = tmp_path / "videos"
    folder.mkdir()
    write_array(folder / "a red one.mp4", solid((40, RED)), 8.0)
    write_array(folder / "b-2.mp4", solid((16, DARK_RED)), 8.0)
    return folder


def test_missing_vbench_is_refused_with_the_command_that_installs_it(videos, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(VidgenError, match=r"vbench-env/bin/pip install .*'vbench==0.1.5'"):
        vbench_long(videos, ["subject_consistency"], tmp_path / "out", read_array, write_array)
    with pytest.raises(VidgenError, match="not a Python interpreter"):
        vbench_long(videos, ["imaging_quality"], tmp_path / "out", read_array, write_array, python=tmp_path / "no")
    assert not (tmp_path / "out").exists()


def test_unknown_dimensions_are_refused(videos, tmp_path):
    with pytest.raises(VidgenError, match="did you mean 'imaging_quality'"):
        vbench_long(videos, ["image_quality"], tmp_path, read_array, write_array)
    with pytest.raises(VidgenError, match="'imaging_quality' has no fast branch"):
        vbench_long(
            videos, ["imaging_quality"], tmp_path, read_array, write_array, fast_features={"imaging_quality": None}
        )


@pytest.fixture
def fake_vbench(tmp_path, monkeypatch):
    """A package with vbench's interface, whose score of a clip is its frames and its mean red."""
    package = tmp_path / "site" / "vbench"
    package.mkdir(parents=True)
    (tmp_path / "site" / "torch.py").write_text("device = str\n")
    (tmp_path / "site" / "vbench-0.1.5.dist-info").mkdir()
    (tmp_path / "site" / "vbench-0.1.5.dist-info" / "METADATA").write_text("Name: vbench\nVersion: 0.1.5\n")
    (package / "__init__.py").write_text(
        textwrap.dedent(
            """
            import json, os
            import numpy as np

            class VBench:
                def __init__(self, device, full_info_dir, output_path):
                    self.device, self.output_path = device, output_path

                def evaluate(self, videos_path, name, prompt_list, dimension_list, mode):
                    assert mode == "custom_input" and self.device == "cpu"
                    results = {}
                    for dimension in dimension_list:
                        clips = []
                        for file in reversed(os.listdir(videos_path)):
                            frames = np.load(os.path.join(videos_path, file))
                            score = len(frames) + frames[..., 0].mean() / 1000 + 100 * len(prompt_list[file])
                            clips.append({"video_path": os.path.join(videos_path, file), "video_results": score})
                        results[dimension] = [0.0, clips]
                    if os.environ.get("FAIL_VBENCH"):
                        raise RuntimeError("out of luck")
                    with open(os.path.join(self.output_path, name + "_eval_results.json"), "w") as file:
                        json.dump(results, file)
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


class RedAgainstBlue:
    name = "red"

    def __call__(self, frames):
        return np.stack([frames[:, 0, 0, 0], np.arange(len(frames))], axis=1) + 1.0


def test_each_dimension_gets_clips_of_its_length_and_scores_return_to_their_videos(videos, tmp_path, fake_vbench):
    results = vbench_long(
        videos,
        ["imaging_quality", "subject_consistency", "overall_consistency"],
        tmp_path / "out",
        read_array,
        write_array,
        prompts={"a red one": "r", "b-2": "dd"},
        fast_features={"subject_consistency": RedAgainstBlue()},
        device="cpu",
        python=sys.executable,
    )
    # 2 s are 16 frames: a has clips at 0, 16, 24, b one; 10 s are more than either.
    assert {dimension: result["clip_seconds"] for dimension, result in results.items()} == {
        "imaging_quality": 2.0,
        "subject_consistency": 2.0,
        "overall_consistency": 10.0,
    }
    a, b = 16 + 0.2 + 100, 16 + 0.1 + 200
    imaging = results["imaging_quality"]
    assert imaging["videos"]["a red one"] == pytest.approx(
        {"score": a / 100, "slow": a / 100, "fast": None, "clips": 3}
    )
    assert imaging["total"] == pytest.approx((a + b) / 200) and imaging["fast_features"] is None
    assert results["overall_consistency"]["videos"]["a red one"]["slow"] == pytest.approx(40 + 0.2 + 100)
    subject = results["subject_consistency"]
    fast = frame_consistency(np.array([[201.0, 1], [201, 2], [201, 3]]))
    fused = fuse_slow_fast(a, fast, SLOW_FAST_WEIGHTS["subject_consistency"])
    assert subject["videos"]["a red one"] == pytest.approx({"score": fused, "slow": a, "fast": fast, "clips": 3})
    assert subject["videos"]["b-2"] == pytest.approx({"score": b, "slow": b, "fast": None, "clips": 1})
    assert subject["total"] == pytest.approx((fused + b) / 2) and subject["fast_features"] == "red"
    assert json.loads((tmp_path / "out" / "vbench_long.json").read_text()) == results


def test_a_failure_of_vbench_shows_the_end_of_its_log(videos, tmp_path, fake_vbench, monkeypatch):
    monkeypatch.setenv("FAIL_VBENCH", "1")
    with pytest.raises(VidgenError, match="(?s)exit code 1.*out of luck"):
        vbench_long(videos, ["imaging_quality"], tmp_path / "out", read_array, write_array, device="cpu")
    assert not (tmp_path / "out" / "vbench_long.json").exists()


def test_missing_videos_and_prompts_are_named(videos, tmp_path, fake_vbench):
    with pytest.raises(VidgenError, match="No \\*.mp4"):
        vbench_long(tmp_path, ["imaging_quality"], tmp_path / "out", read_array, write_array)
    with pytest.raises(VidgenError, match="No prompt for a red one"):
        vbench_long(videos, ["imaging_quality"], tmp_path / "out", read_array, write_array, prompts={"b-2": "dark"})
