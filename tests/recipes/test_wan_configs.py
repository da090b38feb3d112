"""The full-scale configs, whole but for the model's size and the number of steps, on two processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vidgen.data import VideoWriter
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.recipes.encode_data import LatentEncoding, encode_prompts, encode_videos
from vidgen.runtime.checkpoint import load_safetensors

# Nine starts of two processes each.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TRAINING = Path(__file__).parents[2] / "training"
# 7 chunks of context and 21 frames to denoise: 4 * 42 - 3 pictures at 12 frames/s.
CLIP_FRAMES = 4 * 42 - 3


@pytest.fixture(scope="module")
def data(tiny_model_folder, tmp_path_factory) -> Path:
    """What `vidgen data` makes of a folder of videos and a file of prompts: `clips` and `prompts`."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "videos").mkdir()
    captions = []
    for number in range(4):
        picture = np.random.default_rng(number).integers(0, 256, (32, 48, 3), np.uint8)
        with VideoWriter(folder / "videos" / f"{number}.mp4", fps=12) as writer:
            writer.append(np.stack([np.roll(picture, frame, axis=1) for frame in range(CLIP_FRAMES)]))
        captions.append(json.dumps({"video": f"{number}.mp4", "caption": "a meadow at dawn"}))
    (folder / "captions.jsonl").write_text("\n".join(captions))
    (folder / "prompts.txt").write_text("a meadow at dawn\na coast at night in the rain\na desert with birds\nsnow\n")
    settings = LatentEncoding(min_seconds=10.0, max_seconds=20.0, device="cpu")
    encode_videos(folder / "videos", folder / "captions.jsonl", tiny_model_folder, folder / "clips", settings)
    encode_prompts(folder / "prompts.txt", tiny_model_folder, folder / "prompts", device="cpu")
    return folder


@pytest.fixture(scope="module")
def stages(data, tiny_model_folder, run_two_processes, tmp_path_factory) -> Path:
    """Each stage's config twice: in one go, and stopped after the first step and resumed."""
    root = tmp_path_factory.mktemp("stages")

    def train(stage: str, *overrides: str) -> None:
        script = TRAINING / f"context_forcing_{stage}.py"
        # One optimizer step of a student is the fifth of the config's cadence; two are enough to be resumed between.
        source = f"data.folders.videos={data}/clips" if stage == "teacher" else f"data.folders.prompts={data}/prompts"
        shared = ("train.checkpoint_every=1", "train.log_every=1", source, *overrides)
        for name, steps in (("whole", (2,)), ("parts", (1, 2))):
            for last in steps:
                run = (f"train.output_dir={root}/{stage}_{name}", f"train.max_steps={last}")
                run_two_processes(script, "--config", f"context_forcing/wan1_3b_{stage}", *shared, *run)

    small = ("latent_size=[4,6]", "train.gradient_accumulation_steps=2", "method.student_every=2")
    teacher, critic, student = (f"{root}/{name}" for name in ("teacher_whole", "stage1_whole", "stage1_whole"))
    train("teacher", f"model.pretrained={tiny_model_folder}")
    train("stage1", *(f"{role}.pretrained={tiny_model_folder}" for role in ("student", "teacher", "critic")), *small)
    train(
        "stage2",
        f"student.pretrained={student}/weights/student",
        f"teacher.pretrained={teacher}/weights/teacher",
        f"critic.pretrained={critic}/weights/critic",
        *small,
    )
    return root


@pytest.mark.parametrize(
    ("stage", "roles"),
    [("teacher", ["teacher"]), ("stage1", ["student", "critic"]), ("stage2", ["student", "critic"])],
)
def test_full_scale_configs_train_on_two_processes_and_resume_exactly(stages, stage, roles):
    for name in ("whole", "parts"):
        config = (stages / f"{stage}_{name}" / "config.yaml").read_text()
        assert "mixed_precision: bf16" in config and "fsdp: true" in config
    for role in roles:
        whole, parts = (
            load_safetensors(stages / f"{stage}_{name}" / "weights" / role / "diffusion_pytorch_model.safetensors")[0]
            for name in ("whole", "parts")
        )
        assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)
        CausalWanTransformer3DModel.from_pretrained(stages / f"{stage}_whole" / "weights" / role)


def test_every_stage_changes_its_weights(stages, tiny_model_folder):
    before = CausalWanTransformer3DModel.from_pretrained(tiny_model_folder, subfolder="transformer").state_dict()
    for stage, role in (("teacher", "teacher"), ("stage1", "student"), ("stage2", "student")):
        after = load_safetensors(stages / f"{stage}_whole" / "weights" / role / "diffusion_pytorch_model.safetensors")[
            0
        ]
        assert any(not torch.equal(before[name], after[name].to(before[name])) for name in before)
        before = after if stage == "stage1" else before
