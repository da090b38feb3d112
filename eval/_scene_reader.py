"""Trains the classifier that reads attributes back, on renders of the world and the model's own autoencoder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vidgen.metrics import SCENE_ATTRIBUTES, SceneClassifier
from vidgen.metrics.scene_classifier import WINDOW_OFFSETS, WINDOW_SPAN, to_classifier_pixels
from vidgen.pipelines import ContextForcingPipeline
from vidgen.runtime.device import derive_seed
from vidgen.train import OptimizerConfig, StepOutput, TrainConfig, TrainingMethod, fit
from vidgen.worlds import LandscapeWorld

# The recipes of the model train on seeds below 1,000,000 and validate from there.
CLASSIFIER_SEEDS = 3_000_000


@torch.no_grad()
def reconstruct(pipe: ContextForcingPipeline, clips: np.ndarray) -> np.ndarray:
    """Clips `(clips, 4 n + 1 frames, height, width, 3)` uint8 after encoding and decoding."""
    vae = pipe.vae
    pixels = torch.from_numpy(clips).to(vae.device, vae.dtype).permute(0, 4, 1, 2, 3) / 127.5 - 1
    decoded = vae.decode(vae.encode(pixels).latent_dist.mode()).sample
    return ((decoded.float() + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 4, 1).cpu().numpy()


class SceneClassifierMethod(TrainingMethod):
    """Cross-entropy of every attribute on windows that are blurred, noised and dimmed at random.

    The disturbances are those of generated video: without them the classifier would read the crisp edges of the
    renderer, which no autoencoder keeps.
    """

    def __init__(self, classifier: SceneClassifier) -> None:
        super().__init__()
        self.classifier = classifier

    def roles(self) -> dict[str, torch.nn.Module]:
        return {"classifier": self.classifier}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        pixels = to_classifier_pixels(batch["frames"])
        pixels = disturb(pixels, generator)
        logits = self.classifier(pixels)
        losses = {name: F.cross_entropy(logits[name], batch[name]) for name in SCENE_ATTRIBUTES}
        return StepOutput({"classifier": sum(losses.values())}, {name: loss.detach() for name, loss in losses.items()})


def disturb(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random blur, noise and brightness of windows `(batch, frames, 3, height, width)`, alike in all their frames."""

    def draw() -> torch.Tensor:
        return torch.rand(len(pixels), 1, 1, 1, 1, generator=generator, device=pixels.device)

    blurred = F.avg_pool2d(F.pad(pixels.flatten(0, 1), (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    pixels = torch.lerp(pixels, blurred.view_as(pixels), draw())
    noise = torch.randn(pixels.shape, generator=generator, device=pixels.device)
    return pixels * (0.95 + 0.1 * draw()) + 0.06 * (draw() - 0.5) + 0.05 * draw() * noise


class Windows(torch.utils.data.Dataset):
    """Windows of rendered scenes; every third scene went through the model's autoencoder."""

    def __init__(self, pipe: ContextForcingPipeline, world: LandscapeWorld, num_scenes: int) -> None:
        self.windows, self.labels = [], []
        for first in range(0, num_scenes, 8):  # the world keeps the drawings of 8 scenes
            scenes = [world.scene(seed=CLASSIFIER_SEEDS + index, seconds=60.0) for index in range(first, first + 8)]
            for draw in range(4):
                starts = [derive_seed(scene.seed, draw) % (scene.num_frames - WINDOW_SPAN) for scene in scenes]
                clips = np.stack([world.render(*pair, WINDOW_SPAN) for pair in zip(scenes, starts, strict=True)])
                if (first // 8 + draw) % 3 == 0:
                    clips = reconstruct(pipe, clips)
                self.windows.extend(clips[:, list(WINDOW_OFFSETS)])
                self.labels.extend(scene.attributes for scene in scenes)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = {name: values.index(self.labels[index][name]) for name, values in SCENE_ATTRIBUTES.items()}
        return {
            "frames": torch.from_numpy(self.windows[index]),
            **{name: torch.tensor(value) for name, value in labels.items()},
        }


def get_classifier(
    pipe: ContextForcingPipeline, world: LandscapeWorld, num_scenes: int, num_steps: int, cache: Path
) -> SceneClassifier:
    """The classifier for this model's autoencoder and frame size, trained at first use.

    Args:
        pipe: gives the autoencoder.
        world: renders the scenes.
        num_scenes: rendered scenes to learn from.
        num_steps: optimizer steps.
        cache: folder of the classifiers trained so far.
    """
    key = hashlib.sha256(repr((num_scenes, num_steps, world.height, world.width)).encode())
    for parameter in pipe.vae.parameters():
        key.update(parameter.detach().float().flatten()[:16].cpu().numpy().tobytes())
    folder = cache / key.hexdigest()[:12]
    path = folder / "classifier.safetensors"
    if not path.exists():
        torch.manual_seed(0)  # initial weights
        classifier = SceneClassifier()
        optimizer = OptimizerConfig(lr=2e-3, warmup_steps=20, schedule="cosine", schedule_by="time")
        config = TrainConfig(
            output_dir=str(folder),
            max_steps=num_steps,
            max_minutes=3.0,
            batch_size=32,
            checkpoint_every=max(50, num_steps // 4),
            optimizers={"classifier": optimizer},
        )
        fit(SceneClassifierMethod(classifier), Windows(pipe, world, num_scenes), config)
        classifier.save(path)
    return SceneClassifier.load(path).to(pipe.vae.device)
