"""What would be wrong: attributes read from the wrong head or frame, a vote that one odd window wins, lost weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vidgen.metrics import SCENE_ATTRIBUTES, SceneClassifier
from vidgen.metrics.scene_classifier import WINDOW_OFFSETS, WINDOW_SPAN, to_classifier_pixels
from vidgen.runtime.errors import CheckpointError, VidgenError
from vidgen.worlds import LandscapeWorld


@pytest.fixture(scope="module")
def classifier() -> SceneClassifier:
    torch.manual_seed(0)
    return SceneClassifier(width=8).eval()


def test_every_attribute_of_a_scene_has_a_head_of_its_size(classifier):
    logits = classifier(torch.zeros(2, len(WINDOW_OFFSETS), 3, 24, 40))
    assert {name: tuple(values.shape) for name, values in logits.items()} == {
        name: (2, len(values)) for name, values in SCENE_ATTRIBUTES.items()
    }
    assert set(SCENE_ATTRIBUTES) == set(LandscapeWorld().scene(seed=0).attributes)


def test_learns_time_of_day_from_a_few_scenes():
    world = LandscapeWorld(16, 32)
    scenes = [world.scene(seed=seed, seconds=4.0, weather="clear") for seed in range(12)]
    windows = np.stack([world.render(scene, 3, WINDOW_SPAN)[list(WINDOW_OFFSETS)] for scene in scenes])
    pixels = to_classifier_pixels(torch.from_numpy(windows))
    times = SCENE_ATTRIBUTES["time_of_day"]
    truth = torch.tensor([times.index(scene.time_of_day) for scene in scenes])
    torch.manual_seed(0)
    classifier = SceneClassifier(width=8)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-2)
    for _ in range(15):
        loss = torch.nn.functional.cross_entropy(classifier(pixels)["time_of_day"], truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    readings = [classifier.eval().read(world.render(scene))["time_of_day"] for scene in scenes]
    assert np.mean([reading == scene.time_of_day for reading, scene in zip(readings, scenes)]) > 0.9


def test_reading_averages_over_the_whole_video(classifier):
    generator = np.random.default_rng(0)
    video = generator.integers(0, 256, (40, 16, 32, 3), dtype=np.uint8)
    starts = np.linspace(0, 40 - WINDOW_SPAN, 8).round().astype(int)
    windows = torch.from_numpy(np.stack([video[start + np.array(WINDOW_OFFSETS)] for start in starts]))
    logits = classifier(to_classifier_pixels(windows))
    expected = {name: SCENE_ATTRIBUTES[name][logits[name].softmax(-1).mean(0).argmax()] for name in SCENE_ATTRIBUTES}
    assert classifier.read(video) == expected


def test_saved_weights_read_the_same(classifier, tmp_path):
    classifier.save(tmp_path / "classifier.safetensors")
    loaded = SceneClassifier.load(tmp_path / "classifier.safetensors")
    frames = torch.randn(1, len(WINDOW_OFFSETS), 3, 16, 32)
    for name, values in loaded(frames).items():
        assert torch.equal(values, classifier(frames)[name])
    with pytest.raises(CheckpointError, match="does not exist"):
        SceneClassifier.load(tmp_path / "missing.safetensors")


def test_a_video_shorter_than_a_window_is_refused(classifier):
    with pytest.raises(VidgenError, match="has 4 frames; at least 5"):
        classifier.read(np.zeros((4, 16, 32, 3), dtype=np.uint8))
