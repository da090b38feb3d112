"""RealEstate10K as the Diffusion Forcing Transformer lays it out, imported as episodes.

    training_256/CLIP.mp4   training_poses/CLIP.pt      (frames, 18): fx, fy, px, py, 0, 0, then 3 x 4 numbers
    validation_256/…        validation_poses/…
    test_256/…              test_poses/…

The data set is that of "Stereo Magnification: Learning View Synthesis using Multiplane Images" (arXiv 1805.09817), the
layout that of "History-Guided Video Diffusion" (arXiv 2502.06764).
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from vidgen.controls import CAMERA_DELTA_SPEC, ControlError, camera_deltas, cameras_from_realestate10k, check_cameras
from vidgen.data.episode_writer import EpisodeWriter
from vidgen.data.episodes import CAMERA_POSE, EpisodesInfo
from vidgen.data.latent_dataset import DatasetError
from vidgen.data.video_reader import VideoDecodeError, VideoReader

FOLDERS = {"train": "training", "validation": "validation", "test": "test"}


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        added: episodes that were added.
        rejected: clip -> why it was left out.
    """

    added: int
    rejected: dict[str, str]


def import_realestate10k(tree: str | os.PathLike, root: str | os.PathLike) -> ImportReport:
    """Import clips as episodes whose poses are cameras and whose actions are the motion between them.

    Clips that cannot be used are left out, never repaired: videos that cannot be read, cameras that are missing, not
    finite or no rotations, and another number of cameras than frames. An import that was interrupted goes on.

    Args:
        tree: the folder that holds `training_256` and so on; a split that is not there is left out.
        root: the data set to make.

    Raises:
        DatasetError: `tree` holds none of the splits, no clip that can be read, or clips of different sizes, or
            `root` something else.
    """
    tree = Path(tree)
    clips = [
        (split, number, video)
        for split, folder in FOLDERS.items()
        for number, video in enumerate(sorted((tree / f"{folder}_256").glob("*.mp4")))
    ]
    if not clips:
        expected = ", ".join(f"{folder}_256/*.mp4" for folder in FOLDERS.values())
        raise DatasetError(f"{tree} holds no clips; expected {expected}.")
    info = _info([video for _, _, video in clips])
    added, rejected = 0, {}
    with EpisodeWriter(root, info) as writer:
        # The number of a clip in its split is stored as its seed.
        done = dict.fromkeys(FOLDERS, -1)
        for item in writer.records:
            done[item.split] = max(done[item.split], item.seed)
        for split, number, video in tqdm(clips, desc="importing", unit="clip"):
            if number <= done[split]:
                continue
            try:
                cameras = read_cameras(tree / f"{FOLDERS[split]}_poses" / f"{video.stem}.pt")
                with VideoReader(video) as reader:
                    if len(reader) != len(cameras):
                        raise ControlError(f"{len(cameras)} cameras for {len(reader)} frames.")
                    frames = reader[:]
            except (VideoDecodeError, ControlError) as error:
                tqdm.write(f"left out {video}: {error}", file=sys.stderr)
                rejected[str(video)] = str(error)
                continue
            actions, poses = camera_deltas(cameras).numpy(), cameras.numpy()
            writer.append(frames, actions, poses, split=split, seed=number)
            added += 1
    return ImportReport(added, rejected)


def read_cameras(path: Path) -> Tensor:
    """Cameras of a clip, float64 `(frames, 16)`.

    Raises:
        ControlError: the file is missing or damaged, or holds no cameras.
    """
    try:
        rows = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        # torch's own message advises to load the file unsafely.
        raise ControlError(f"cannot read {path}: it is missing or holds other things than tensors.") from error
    if not isinstance(rows, Tensor) or rows.ndim != 2 or not len(rows):
        raise ControlError(f"{path} holds no tensor (frames, 18).")
    wrong = (~rows.isfinite()).nonzero()
    if len(wrong):
        raise ControlError(f"{path}: frame {wrong[0, 0]} is not finite.")
    cameras = cameras_from_realestate10k(rows.double())
    check_cameras(cameras)
    return cameras


def _info(videos: list[Path]) -> EpisodesInfo:
    """Size and rate are those of the first video that can be read."""
    for video in videos:
        try:
            with VideoReader(video) as reader:
                size, fps = (reader.height, reader.width), reader.fps
        except VideoDecodeError:
            continue
        return EpisodesInfo(
            world="realestate10k",
            world_version=1,
            size=size,
            fps=fps,
            action_spec=CAMERA_DELTA_SPEC.to_dict(),
            pose_names=CAMERA_POSE,
        )
    raise DatasetError(f"none of {len(videos)} clips can be read, the first is {videos[0]}.")
