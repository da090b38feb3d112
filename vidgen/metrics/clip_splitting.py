"""VBench-Long's protocol: a long video is judged by the short clips it is cut into.

VBench (arXiv 2311.17982) was made for videos of a few seconds. VBench-Long ("VBench++", arXiv 2411.13503) cuts a long
one at scene changes, then into clips of fixed length; a dimension is computed on every clip and averaged (the slow
branch), and the two consistency dimensions also on the first frames of all clips in order (the fast branch), which
sees what changes over the whole video. The release of `vbench` on PyPI computes the dimensions, but can't run this
protocol: its configuration is missing there.

Where the reference implementation and its description part, this file decides:

* Each dimension is computed on clips of its own length (`CLIP_SECONDS`). The reference takes the longest of all
  dimensions that share a prompt, so imaging and aesthetic quality meant for 2 s are computed on 10 s
  (Vchitect/VBench#186). Leaderboard numbers of these two are therefore not comparable.
* A video's score is the mean over its clips, the total the mean over videos; the reference averages over the clips of
  all videos, where a long video counts more.
* A video of a single clip has no fast branch and is scored by the slow one; the reference counts 0 for the fast one.
* Clip lengths are rounded from the exact frame rate; the reference cuts 29.97 down to 29.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vidgen.metrics.checks import check_sequence, count_frames, real_array
from vidgen.metrics.consistency import FrameFeatures, FrameSource, read_batches, unit_features
from vidgen.runtime.checkpoint import atomic_directory, atomic_write
from vidgen.runtime.checks import check_finite, check_not_negative, check_whole
from vidgen.runtime.errors import VidgenError, suggestion

# Seconds per clip of the dimensions that need no fixed list of prompts. overall_consistency rests on ViCLIP, which was
# trained on longer clips.
CLIP_SECONDS = {
    "subject_consistency": 2.0,
    "background_consistency": 2.0,
    "motion_smoothness": 2.0,
    "dynamic_degree": 2.0,
    "aesthetic_quality": 2.0,
    "imaging_quality": 2.0,
    "overall_consistency": 10.0,
}

VBENCH_INSTALL = (
    "python3.10 -m venv vbench-env && vbench-env/bin/pip install 'torch<2.6' 'torchvision<0.21' 'vbench==0.1.5'"
)

# Run by the interpreter that has vbench; it can't import vidgen.
_VBENCH_JOB = """
import json, sys
import torch
from vbench import VBench

with open(sys.argv[1]) as file:
    job = json.load(file)
VBench(torch.device(job["device"]), "", job["output"]).evaluate(
    videos_path=job["videos"],
    name="vbench",
    prompt_list=job["prompts"],
    dimension_list=job["dimensions"],
    mode="custom_input",
)
"""


@dataclass(frozen=True)
class Clip:
    """Frames start to stop - 1 of a video."""

    start: int
    stop: int


@dataclass(frozen=True)
class SlowFastWeights:
    """How VBench-Long fuses the branches of a consistency dimension.

    The two branches use different networks over different distances, so the fast score is first moved to the scale of
    the slow one. Means and standard deviations are those that VBench-Long publishes.

    Attributes:
        slow: weight of the score within clips.
        fast: weight of the score between clips.
        slow_mean: mean of the slow branch over VBench-Long's reference videos.
        slow_std: its standard deviation.
        fast_mean: mean of the fast branch over them.
        fast_std: its standard deviation.
    """

    slow: float
    fast: float
    slow_mean: float
    slow_std: float
    fast_mean: float
    fast_std: float


# The fast branches behind these constants: DINOv2 ViT-B/14 for the subject, DreamSim for the background.
SLOW_FAST_WEIGHTS = {
    "subject_consistency": SlowFastWeights(0.7, 0.3, 0.92065315, 0.0045800857, 0.78277396, 0.024658268),
    "background_consistency": SlowFastWeights(0.8, 0.2, 0.94616339, 0.00041191287, 0.88173047, 0.0078867288),
}


def find_scene_cuts(
    frames: FrameSource, fps: float, threshold: float = 35.0, min_scene_seconds: float = 0.6
) -> list[int]:
    """First frames of new scenes, where the color of most pixels changes from one frame to the next.

    The change is the mean over pixels of the absolute differences of hue (half-degrees, 0 to 179, the short way round
    the circle), saturation and value (0 to 255), averaged over the three: the measure and scale of PySceneDetect's
    content detector, which VBench-Long uses. A dissolve over many frames is not found.

    Args:
        frames: uint8 `(frames, height, width, 3)`.
        fps: frames per second.
        threshold: least change; 35 is VBench-Long's.
        min_scene_seconds: a cut sooner than this after the last one, or before the end, belongs to the scene it is in:
            a flash is not a scene, and no clip gets too short to be measured.

    Raises:
        VidgenError: when frames are of another shape or type, or a number is negative or not finite.
    """
    check_not_negative(threshold=threshold)
    min_frames = max(1, count_frames(fps, min_scene_seconds=min_scene_seconds))
    cuts, last_cut = [], 0
    previous, start = None, 0
    for batch in read_batches(frames, 64):
        # Every n-th pixel: about 256 columns tell a cut as surely as all of them.
        step = max(1, batch.shape[2] // 256)
        colors = _hue_saturation_value(batch[:, ::step, ::step])
        joined = colors if previous is None else np.concatenate([previous, colors])
        change = np.abs(np.diff(joined, axis=0))
        change[..., 0] = np.minimum(change[..., 0], 180 - change[..., 0])
        first = start if previous is not None else 1
        for frame, amount in enumerate(change.mean(axis=(1, 2, 3)), start=first):
            if float(amount) >= threshold and frame - last_cut >= min_frames and len(frames) - frame >= min_frames:
                cuts.append(frame)
                last_cut = frame
        previous, start = colors[-1:], start + len(batch)
    return cuts


def _hue_saturation_value(frames: np.ndarray) -> np.ndarray:
    """uint8 RGB `(..., 3)` to float32 hue in half-degrees, saturation and value in 0 to 255."""
    colors = frames.astype(np.float32)
    red, green, blue = colors[..., 0], colors[..., 1], colors[..., 2]
    value = colors.max(axis=-1)
    chroma = value - colors.min(axis=-1)
    # Gray has no hue and black no saturation: both are 0 there.
    divisor = np.where(chroma > 0, chroma, 1)
    sector = np.select(
        [value == red, value == green],
        [(green - blue) / divisor, (blue - red) / divisor + 2],
        (red - green) / divisor + 4,
    )
    hue = np.where(chroma > 0, sector * 30 % 180, 0)
    saturation = 255 * chroma / np.where(value > 0, value, 1)
    return np.stack([hue, saturation, value], axis=-1)


def split_long_video(
    frames: FrameSource,
    fps: float,
    clip_seconds: float = 2.0,
    threshold: float = 35.0,
    scene_cuts: Sequence[int] | None = None,
) -> list[Clip]:
    """Cut a video at scene changes, then into clips of fixed length.

    What is left of a scene is covered by one more clip of full length that ends with the scene and overlaps the one
    before, so all clips are equally long. Only a scene shorter than a clip makes a shorter one.

    Args:
        frames: uint8 `(frames, height, width, 3)`.
        fps: frames per second.
        clip_seconds: length of a clip, rounded to frames.
        threshold: of `find_scene_cuts`.
        scene_cuts: first frames of new scenes where they are known, in place of a search. An empty one for a single
            scene.

    Returns:
        Clips in order of time; every frame lies in at least one, and no clip crosses a cut.

    Raises:
        VidgenError: when a clip would have fewer than two frames, or a cut lies outside the video.
    """
    check_sequence("frames", frames)
    length = count_frames(fps, clip_seconds=clip_seconds)
    if length < 2:
        raise VidgenError(f"clip_seconds={clip_seconds:g} is {length} frames at {fps:g} fps; at least 2 are needed.")
    if scene_cuts is None:
        scene_cuts = find_scene_cuts(frames, fps, threshold)
    for cut in scene_cuts:
        check_whole(1, scene_cuts=cut)
    bounds = [0, *sorted(scene_cuts), len(frames)]
    clips = []
    for start, stop in itertools.pairwise(bounds):
        if stop - start < 2:
            raise VidgenError(
                f"A scene from frame {start} to {stop} of {len(frames)}; scenes need at least 2 frames of the video."
            )
        starts = list(range(start, stop - length + 1, length)) or [start]
        if starts[-1] + length < stop:
            starts.append(stop - length)
        clips += [Clip(first, min(first + length, stop)) for first in starts]
    return clips


def write_clips(
    frames: FrameSource,
    fps: float,
    clips: Sequence[Clip],
    folder: str | os.PathLike,
    name: str,
    write: Callable[[Path, np.ndarray, float], Any],
) -> list[Path]:
    """Write clips as `folder/name-000.mp4`, `name-001.mp4`, …

    Args:
        frames: uint8 `(frames, height, width, 3)`.
        fps: frames per second.
        clips: what to write.
        folder: made if needed.
        name: of the video.
        write: called with path, frames and fps of each clip. It should lose next to nothing: what the codec does to a
            clip is measured as the video's quality.

    Returns:
        The files in order.
    """
    paths = []
    for index, clip in enumerate(clips):
        path = Path(folder) / f"{name}-{index:03d}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, frames[clip.start : clip.stop], fps)
        paths.append(path)
    return paths


def frame_consistency(features: np.ndarray) -> float:
    """VBench's consistency of a sequence of frames.

    Mean over all frames but the first of the cosine similarities to the frame before and to the first frame, averaged,
    each counted as at least 0.

    Args:
        features: `(frames, dim)`, at least two frames.
    """
    features = unit_features(features)
    if len(features) < 2:
        raise VidgenError("Consistency needs at least two frames.")
    to_previous = np.einsum("fd,fd->f", features[1:], features[:-1])
    to_first = features[1:] @ features[0]
    return float((np.maximum(to_previous, 0) + np.maximum(to_first, 0)).mean() / 2)


def fuse_slow_fast(slow: float, fast: float | None, weights: SlowFastWeights) -> float:
    """One score from both branches.

    The fast score is standardized by its own mean and deviation and taken to the slow branch's before the weighted
    sum. It may exceed 1.

    Args:
        slow: mean of the dimension over the clips.
        fast: consistency of the clips' first frames; None for a video of one clip.
        weights: of the dimension.

    Raises:
        VidgenError: when a score isn't finite.
    """
    check_finite(slow=slow)
    if fast is None:
        return slow
    check_finite(fast=fast)
    mapped = (fast - weights.fast_mean) / weights.fast_std * weights.slow_std + weights.slow_mean
    return weights.slow * slow + weights.fast * mapped


def aggregate_clips(scores: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], float]:
    """Means of clip scores.

    Args:
        scores: by video, of its clips.

    Returns:
        Mean over the clips of each video, all clips counting the same (the frames of an overlap count twice), and the
        mean over videos, all videos counting the same.

    Raises:
        VidgenError: when there is no video, a video has no clip, or a score isn't finite.
    """
    empty = [name for name, values in scores.items() if not len(values)]
    if empty or not scores:
        raise VidgenError(f"No clip scores for {', '.join(empty) or 'any video'}.")
    videos = {
        name: float(real_array(f"scores of {name}", values, "(clips)").mean()) for name, values in scores.items()
    }
    return videos, float(np.mean(list(videos.values())))


def vbench_long(
    videos_dir: str | os.PathLike,
    dimensions: Sequence[str],
    output_dir: str | os.PathLike,
    read: Callable[[Path], tuple[FrameSource, float]],
    write: Callable[[Path, np.ndarray, float], Any],
    prompts: Mapping[str, str] | None = None,
    fast_features: Mapping[str, FrameFeatures] | None = None,
    device: str = "cuda",
    python: str | os.PathLike = sys.executable,
) -> dict[str, Any]:
    """Score a folder of long videos by VBench-Long's protocol around the published `vbench` package.

    vbench 0.1.5 pins transformers 4.33 and numpy 1, so it lives in an environment of its own and is run there. It
    downloads the networks it needs.

    Args:
        videos_dir: folder of `*.mp4`.
        dimensions: among `CLIP_SECONDS`.
        output_dir: gets the clips, vbench's own results and `vbench_long.json`.
        read: path to frames and frames per second, for instance by `vidgen.data.VideoReader`.
        write: path, frames and frames per second to a file, for instance by `vidgen.data.VideoWriter`.
        prompts: by file name without suffix; by default the file names themselves. Only overall_consistency reads
            them.
        fast_features: network of the fast branch by consistency dimension. Without one the dimension is the slow
            branch alone, which is VBench-Long's own default. `SLOW_FAST_WEIGHTS` names the networks it was made for.
        device: where vbench computes.
        python: interpreter of the environment that has vbench.

    Returns:
        By dimension: `total`, `clip_seconds`, `fast_features` (a name or None), and by video `score`, `slow`, `fast`
        and `clips`. The same is in `vbench_long.json`.

    Raises:
        VidgenError: when vbench is not installed for `python` (the message has the command), when a dimension, a
            prompt or the videos are missing, or when vbench fails.
    """
    check_sequence("dimensions", dimensions)
    prompts, fast_features = prompts or {}, fast_features or {}
    for dimension in dimensions:
        if dimension not in CLIP_SECONDS:
            raise VidgenError(f"Unknown dimension {dimension!r}: {suggestion(dimension, CLIP_SECONDS)}")
    for dimension in fast_features:
        if dimension not in SLOW_FAST_WEIGHTS:
            raise VidgenError(f"{dimension!r} has no fast branch: {suggestion(dimension, SLOW_FAST_WEIGHTS)}")
    version = _vbench_version(python)
    paths = sorted(Path(videos_dir).glob("*.mp4"))
    if not paths:
        raise VidgenError(f"No *.mp4 in {videos_dir}.")
    lacking = [path.stem for path in paths if prompts and path.stem not in prompts]
    if lacking:
        raise VidgenError(f"No prompt for {', '.join(lacking)}; without any prompts the file names are used.")

    output = Path(output_dir)
    fast = {dimension: {} for dimension in fast_features}
    results = {}
    for seconds in sorted({CLIP_SECONDS[dimension] for dimension in dimensions}):
        of_length = [dimension for dimension in dimensions if CLIP_SECONDS[dimension] == seconds]
        folder = output / f"clips_{seconds:g}s"
        clip_prompts, num_clips = {}, {}
        with atomic_directory(folder) as temporary:
            for path in paths:
                frames, fps = read(path)
                clips = split_long_video(frames, fps, seconds)
                num_clips[path.stem] = len(clips)
                for clip in write_clips(frames, fps, clips, temporary, path.stem, write):
                    clip_prompts[clip.name] = prompts.get(path.stem, path.stem)
                if len(clips) > 1:
                    openings = np.concatenate([frames[clip.start : clip.start + 1] for clip in clips])
                    for dimension in set(of_length) & set(fast_features):
                        fast[dimension][path.stem] = frame_consistency(fast_features[dimension](openings))
        scores = _run_vbench(python, device, folder, clip_prompts, of_length, output / f"vbench_{seconds:g}s")
        for dimension in of_length:
            slow, _ = aggregate_clips(scores[dimension])
            fast_scores = fast.get(dimension, {})
            fused = {
                name: fuse_slow_fast(value, fast_scores.get(name), SLOW_FAST_WEIGHTS[dimension])
                if dimension in fast_features
                else value
                for name, value in slow.items()
            }
            results[dimension] = {
                "total": float(np.mean(list(fused.values()))),
                "clip_seconds": seconds,
                "fast_features": fast_features[dimension].name if dimension in fast_features else None,
                "vbench": version,
                "videos": {
                    name: {
                        "score": fused[name],
                        "slow": slow[name],
                        "fast": fast_scores.get(name),
                        "clips": num_clips[name],
                    }
                    for name in slow
                },
            }
    with atomic_write(output / "vbench_long.json") as temporary:
        temporary.write_text(json.dumps(results, indent=2))
    return results


def _vbench_version(python: str | os.PathLike) -> str:
    command = "import importlib.metadata as m; print(m.version('vbench'))"
    try:
        answer = subprocess.run([str(python), "-c", command], capture_output=True, text=True, check=False)
    except OSError as error:
        raise VidgenError(f"{python} is not a Python interpreter ({error}).") from error
    if answer.returncode:
        raise VidgenError(
            f"vbench is not installed for {python}. It pins transformers 4.33 and numpy 1, which vidgen can't use, so "
            f"install it in an environment of its own and pass its interpreter as python='vbench-env/bin/python': "
            f"{VBENCH_INSTALL}"
        )
    return answer.stdout.strip()


def _run_vbench(
    python: str | os.PathLike,
    device: str,
    clips: Path,
    prompts: Mapping[str, str],
    dimensions: Sequence[str],
    output: Path,
) -> dict[str, dict[str, list[float]]]:
    """Scores of the clips by dimension and video."""
    output.mkdir(parents=True, exist_ok=True)
    job = {
        "device": device,
        "videos": str(clips.resolve()),
        "prompts": dict(prompts),
        "dimensions": list(dimensions),
        "output": str(output.resolve()),
    }
    (output / "job.json").write_text(json.dumps(job))
    log = output / "vbench.log"
    with open(log, "w") as file:
        code = subprocess.run(
            [str(python), "-c", _VBENCH_JOB, str(output.resolve() / "job.json")],
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    written = output / "vbench_eval_results.json"
    if code or not written.is_file():
        tail = "\n".join(log.read_text().splitlines()[-5:])
        raise VidgenError(f"vbench failed with exit code {code}; its log is {log}, which ends with:\n{tail}")
    answers = json.loads(written.read_text())
    scores: dict[str, dict[str, list[float]]] = {}
    for dimension in dimensions:
        # vbench gives the clips' imaging quality in 0 to 100 and only its mean in 0 to 1.
        scale = 0.01 if dimension == "imaging_quality" else 1.0
        videos = scores.setdefault(dimension, {})
        for clip in answers[dimension][1]:
            name = Path(clip["video_path"]).stem.rpartition("-")[0]
            videos.setdefault(name, []).append(scale * float(clip["video_results"]))
        if sum(map(len, videos.values())) != len(prompts):
            raise VidgenError(
                f"vbench scored {sum(map(len, videos.values()))} of {len(prompts)} clips for {dimension}."
            )
    return scores
