"""Which things stand where in a landscape frame, and do the same ones stand there when the camera comes back?

Pixels agree on a place as soon as sky and ground do. The things on it (a house between two trees) are what a viewer
recognizes it by, so they are read from the frames by a small network that has learned them from the world's own truth.
A map says for every kind and every column of the picture how likely a thing of this kind has its center there. Two
sights of a place are compared by the soft Dice coefficient of their maps (squared form of "V-Net: Fully Convolutional
Neural Networks for Volumetric Medical Image Segmentation", arXiv:1606.04797, section 3), and as in
`vidgen.metrics.recall` only what exceeds the same comparison with other videos of the prompt counts as memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from vidgen.metrics.checks import check_frames, check_sequence, check_tensor, real_array
from vidgen.metrics.recall import sights
from vidgen.metrics.scene_classifier import ResidualBlock
from vidgen.runtime.checkpoint import load_safetensors, save_safetensors
from vidgen.runtime.checks import check_finite, check_whole
from vidgen.runtime.device import derive_seed, generator_for
from vidgen.runtime.errors import VidgenError
from vidgen.worlds.landscape import REFERENCE_WIDTH, LandscapeScene, LandscapeWorld

# Everything that stands still in any biome.
OBJECT_KINDS = (
    "tree",
    "small tree",
    "house",
    "bush",
    "rock",
    "cactus",
    "barrel cactus",
    "pine",
    "small pine",
    "boulder",
    "palm",
    "lighthouse",
    "parasol",
    "sailboat",
    "autumn tree",
    "small autumn tree",
    "fir",
    "small fir",
    "cabin",
    "snowman",
)

# Pixels per column of a map: the stride of the network.
COLUMN_WIDTH = 8

# A thing counts as seen from this probability on.
PRESENT = 0.5

# The recipes of the model and the benchmarks use seeds below.
TRAIN_SEEDS, HELD_OUT_SEEDS = 5_000_000, 6_000_000
FRAMES_PER_SCENE = 8


class ObjectDetector(nn.Module):
    """Small convolutional network from a frame to a map of its objects.

    Args:
        width: channels after the first convolution, a multiple of 8.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(ResidualBlock(width, 2 * width), ResidualBlock(2 * width, 4 * width))
        self.columns = nn.Conv1d(8 * width, 4 * width, 3, padding=1)
        self.head = nn.Conv1d(4 * width, len(OBJECT_KINDS), 1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Find objects.

        Args:
            frames: uint8 `(batch, height, width, 3)`, or floats in [-1, 1] of the same shape.

        Returns:
            Logits `(batch, kinds, width / 8)`.
        """
        if frames.dtype == torch.uint8:
            frames = to_detector_pixels(frames)
        hidden_states = self.blocks(F.silu(self.stem(frames.permute(0, 3, 1, 2))))
        # What stands in a column, whatever its row.
        hidden_states = torch.cat([hidden_states.mean(dim=2), hidden_states.amax(dim=2)], dim=1)
        return self.head(F.silu(self.columns(hidden_states)))

    @torch.no_grad()
    def detect(self, video: np.ndarray, batch_size: int = 64) -> np.ndarray:
        """Maps of all frames.

        Args:
            video: uint8 `(frames, height, width, 3)`.
            batch_size: frames looked at together.

        Returns:
            Probabilities, float32 `(frames, kinds, width / 8)`.

        Raises:
            VidgenError: when the video isn't uint8 or has no frames.
        """
        check_frames(video, "video", "(frames, height, width, 3)")
        check_whole(1, batch_size=batch_size)
        device = self.head.weight.device
        batches = torch.from_numpy(np.ascontiguousarray(video)).split(batch_size)
        return torch.cat([self(batch.to(device)).sigmoid().cpu() for batch in batches]).numpy()

    def save(self, path: str | os.PathLike) -> None:
        """Write the weights to one safetensors file."""
        save_safetensors(self.state_dict(), path, {"width": str(self.stem.out_channels)})

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read what `save` wrote, ready for `detect`.

        Raises:
            CheckpointError: when the file is missing or damaged.
        """
        tensors, metadata = load_safetensors(path)
        detector = cls(width=int(metadata["width"]))
        detector.load_state_dict(tensors)
        return detector.eval()


def to_detector_pixels(frames: torch.Tensor) -> torch.Tensor:
    """uint8 to floats in [-1, 1]."""
    return frames.float() / 127.5 - 1


def object_map(scene: LandscapeScene, frame: int, columns: int) -> np.ndarray:
    """The truth about one frame.

    Args:
        scene: the scene.
        frame: index of the frame.
        columns: parts the picture is divided into from left to right.

    Returns:
        float32 `(kinds, columns)`, 1 where at least one object of the kind has its center in the column. An object
        whose center is off screen isn't in it.
    """
    present = np.zeros((len(OBJECT_KINDS), columns), dtype=np.float32)
    for item in scene.visible_objects(frame):
        column = math.floor((item.x + 0.5 * item.width) / REFERENCE_WIDTH * columns)
        if item.kind in OBJECT_KINDS and 0 <= column < columns:
            present[OBJECT_KINDS.index(item.kind), column] = 1
    return present


def render_object_maps(
    world: LandscapeWorld, seeds: Sequence[int], per_scene: int, progress: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames at random moments of one-minute scenes, and what is on them.

    Args:
        world: renders them.
        seeds: one scene each.
        per_scene: frames of a scene.
        progress: show a bar.

    Returns:
        uint8 `(scenes * per_scene, height, width, 3)` and float32 `(scenes * per_scene, kinds, width / 8)`.

    Raises:
        VidgenError: when there is no seed or no frame.
    """
    check_sequence("seeds", seeds)
    check_whole(1, per_scene=per_scene)
    frames, maps = [], []
    for seed in tqdm(seeds, desc="rendering scenes", disable=not progress):
        scene = world.scene(seed=seed, seconds=60.0)
        moments = np.random.default_rng(derive_seed(seed)).integers(0, scene.num_frames, per_scene)
        for moment in np.sort(moments):
            frames.append(world.render(scene, int(moment), 1)[0])
            maps.append(object_map(scene, int(moment), world.width // COLUMN_WIDTH))
    return torch.from_numpy(np.stack(frames)), torch.from_numpy(np.stack(maps))


def fit_detector(
    world: LandscapeWorld, num_scenes: int, steps: int, seed: int = 0, width: int = 32, progress: bool = False
) -> ObjectDetector:
    """Train a detector on the world's truth, in every biome, time of day and weather.

    The frames are mirrored, blurred, noised and dimmed at random: generated pictures lack the crisp edges of the
    renderer.

    Args:
        world: renders the scenes.
        num_scenes: rendered scenes to learn from, 8 frames each.
        steps: optimizer steps on 32 frames each.
        seed: fixes initial weights and draws; the scenes are always the same.
        width: of the network.
        progress: show bars.

    Returns:
        The detector, ready for `detect`.

    Raises:
        VidgenError: when there are no scenes or steps.
    """
    check_whole(1, num_scenes=num_scenes, steps=steps)
    seeds = range(TRAIN_SEEDS, TRAIN_SEEDS + num_scenes)
    frames, maps = render_object_maps(world, seeds, FRAMES_PER_SCENE, progress)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        detector = ObjectDetector(width)
    # Most of a map is empty. Starting at each kind's frequency saves the steps in which only that would be learned.
    with torch.no_grad():
        detector.head.bias.copy_(maps.mean(dim=(0, 2)).clamp(1e-3, 0.5).logit())
    generator = generator_for(seed, 1)
    optimizer = torch.optim.AdamW(detector.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1, pct_start=0.1)
    for _ in tqdm(range(steps), desc="training the detector", disable=not progress):
        chosen = torch.randint(len(frames), (32,), generator=generator)
        pixels, target = disturb(to_detector_pixels(frames[chosen]), maps[chosen], generator)
        loss = F.binary_cross_entropy_with_logits(detector(pixels), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(detector.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return detector.eval()


def disturb(pixels: torch.Tensor, maps: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random mirroring, blur, noise and brightness of frames `(batch, height, width, 3)`, and the maps that belong."""

    def draw() -> torch.Tensor:
        return torch.rand(len(pixels), 1, 1, 1, generator=generator)

    mirrored = draw() < 0.5
    pixels = torch.where(mirrored, pixels.flip(2), pixels)
    maps = torch.where(mirrored.flatten(1, 2), maps.flip(2), maps)
    planes = F.pad(pixels.permute(0, 3, 1, 2), (1, 1, 1, 1), mode="replicate")
    pixels = torch.lerp(pixels, F.avg_pool2d(planes, 3, stride=1).permute(0, 2, 3, 1), draw())
    noise = torch.randn(pixels.shape, generator=generator)
    return pixels * (0.95 + 0.1 * draw()) + 0.06 * (draw() - 0.5) + 0.05 * draw() * noise, maps


def validate(detector: ObjectDetector, frames: torch.Tensor, maps: torch.Tensor) -> dict[str, Any]:
    """Compare what a detector finds with the truth.

    Args:
        detector: the detector.
        frames: uint8 `(n, height, width, 3)`, of scenes it wasn't trained on; `render_object_maps` on seeds from
            `HELD_OUT_SEEDS` gives some.
        maps: `(n, kinds, columns)`, ones and zeros.

    Returns:
        Over all kinds and columns: `average_precision`, whose value for a blind guess is the `base_rate`; `precision`,
        `recall` and `f1` at probability 0.5; and `f1_by_kind` for the kinds that occur.

    Raises:
        VidgenError: when frames and maps don't belong together, or nothing is on any of them.
    """
    check_tensor("frames", frames, "(n, height, width, 3)")
    check_tensor("maps", maps, "(n, kinds, columns)")
    probability, truth = detector.detect(frames.numpy()), maps.numpy() > 0.5
    if probability.shape != truth.shape or not truth.any():
        raise VidgenError(
            f"maps have shape {truth.shape} and hold {truth.sum()} objects; expected {probability.shape}, and one."
        )
    found = probability >= PRESENT
    ranked = truth.ravel()[np.argsort(-probability.ravel(), kind="stable")]
    precision_at = np.cumsum(ranked) / np.arange(1, ranked.size + 1)
    hits, claimed, real = (array.sum() for array in (found & truth, found, truth))
    by_kind = 2 * (found & truth).sum((0, 2)) / np.maximum(found.sum((0, 2)) + truth.sum((0, 2)), 1)
    return {
        "average_precision": float(precision_at[ranked].mean()),
        "base_rate": float(truth.mean()),
        "precision": float(hits / max(claimed, 1)),
        "recall": float(hits / max(real, 1)),
        "f1": float(2 * hits / max(claimed + real, 1)),
        "f1_by_kind": {
            kind: float(f1)
            for kind, f1, occurs in zip(OBJECT_KINDS, by_kind, truth.any((0, 2)), strict=True)
            if occurs
        },
    }


# --- revisited places --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObjectRevisit:
    """The objects of one place seen twice.

    Attributes:
        age: seconds between the two sights.
        match: agreement of the first sight with the best-aligned later one, in [0, 1]; None when there was no object
            in the first sight.
        chance: the same against each other video of the prompt; empty when `match` is None.
    """

    age: float
    match: float | None
    chance: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.match is None:
            return
        check_sequence("chance", self.chance)
        for value in (self.match, *self.chance):
            check_finite(match=value)


def match_objects(first: np.ndarray, candidates: np.ndarray, max_shift: int = 1) -> float:
    """Soft Dice coefficient of the best match of a map among candidates and small horizontal shifts.

    For maps p and q it is 2 sum(p q) / (sum(p^2) + sum(q^2)): 1 for equal maps, and the usual Dice coefficient for
    ones and zeros.

    Args:
        first: `(kinds, columns)`, in [0, 1].
        candidates: `(n, kinds, columns)`.
        max_shift: columns that a candidate may lie left or right; what doesn't overlap is left out.

    Returns:
        Agreement in [0, 1].

    Raises:
        VidgenError: when shapes differ, the shift leaves no overlap, or a value isn't finite.
    """
    first = real_array("first", first, "(kinds, columns)")
    candidates = real_array("candidates", candidates, "(n, kinds, columns)")
    if candidates.shape[1:] != first.shape:
        raise VidgenError(
            f"candidates have shape {candidates.shape}; expected (n, {', '.join(map(str, first.shape))})."
        )
    columns = first.shape[1]
    check_whole(0, columns - 1, max_shift=max_shift)
    best = 0.0
    for shift in range(-max_shift, max_shift + 1):
        left, right = max(0, shift), columns + min(0, shift)
        kept, overlap = first[:, left - shift : right - shift], candidates[:, :, left:right]
        sizes = np.square(kept).sum() + np.square(overlap).sum(axis=(1, 2))
        dice = 2 * (overlap * kept).sum(axis=(1, 2)) / np.maximum(sizes, 1e-9)
        best = max(best, float(dice.max()))
    return best


def score_object_revisits(
    video_maps: np.ndarray,
    other_maps: Sequence[np.ndarray],
    fps: float,
    turn: float,
    distances: Sequence[float],
    slack: float = 0.75,
    max_shift: int = 1,
) -> list[ObjectRevisit]:
    """Compare the objects seen before a turn of the camera with those seen after it.

    Args:
        video_maps: `(frames, kinds, columns)` as `ObjectDetector.detect` returns them, of a camera that pans one way,
            turns at `turn` and pans back.
        other_maps: of videos of the same prompt and camera path but other places; they give the level of chance.
        fps: frames per second.
        turn: second at which the camera stands still to turn.
        distances: seconds before and after the turn at which to compare.
        slack: seconds by which the second sight may come early or late.
        max_shift: columns, see `match_objects`.

    Returns:
        One revisit per distance.

    Raises:
        VidgenError: when no other video or distance is given, a value isn't finite, or as `sights`.
    """
    video_maps = real_array("video_maps", video_maps, "(frames, kinds, columns)")
    check_sequence("distances", distances)
    if not other_maps:
        raise VidgenError("other_maps is empty; without another video of the prompt there is no level of chance.")
    for maps in other_maps:
        if real_array("other_maps", maps, "(frames, kinds, columns)").shape != video_maps.shape:
            raise VidgenError(f"video_maps have shape {video_maps.shape}, others {maps.shape}; they have to agree.")
    revisits = []
    for distance in distances:
        before, later = sights(len(video_maps), fps, turn, distance, slack)
        first = video_maps[before]
        if first.max() < PRESENT:
            revisits.append(ObjectRevisit(2 * distance, None, ()))
            continue
        match, *chance = (match_objects(first, maps[later], max_shift) for maps in (video_maps, *other_maps))
        revisits.append(ObjectRevisit(2 * distance, match, tuple(chance)))
    return revisits


def summarize_object_revisits(revisits: Sequence[ObjectRevisit]) -> dict[str, float | int | None]:
    """Means over revisits whose first sight shows an object.

    Returns:
        `match` and `chance`, `gain` = their difference, `recall`: how often the own past is a better match than
        another video's (0.5 is chance, 1 perfect); all None when no first sight shows an object. And how many do,
        `seen`, and don't, `empty`.
    """
    seen = [revisit for revisit in revisits if revisit.match is not None]
    counts = {"seen": len(seen), "empty": len(revisits) - len(seen)}
    if not seen:
        return {"match": None, "chance": None, "gain": None, "recall": None, **counts}
    match = float(np.mean([revisit.match for revisit in seen]))
    chance = float(np.mean([np.mean(revisit.chance) for revisit in seen]))
    wins = [(revisit.match > level) + 0.5 * (revisit.match == level) for revisit in seen for level in revisit.chance]
    return {"match": match, "chance": chance, "gain": match - chance, "recall": float(np.mean(wins)), **counts}
