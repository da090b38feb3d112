"""The three stages must run from their configs, chained, and resume to the same weights."""

from __future__ import annotations

import json

import pytest
import torch

from vidgen.data.latent_dataset import FORMAT_VERSION
from vidgen.memory import SlowFastMemoryConfig
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.recipes import context_forcing
from vidgen.recipes.context_data import (
    CodeLayouts,
    CodeWorldData,
    ContextLayouts,
    ContextRange,
    FolderData,
    LandscapePrompts,
    LandscapeRollouts,
    folder_layouts,
)
from vidgen.recipes.landscape import train_tokenizer
from vidgen.runtime.checkpoint import load_safetensors, save_safetensors
from vidgen.runtime.config import load_config
from vidgen.runtime.errors import ConfigError

NEW = (
    "{num_attention_heads: 2, attention_head_dim: 12, in_channels: 12, out_channels: 4, text_dim: 8, freq_dim: 16, "
    "ffn_dim: 32, num_layers: 1}"
)
SMALL = (
    "memory.slow=2",
    "train.max_minutes=null",
    "train.batch_size=2",
    "train.checkpoint_every=1",
    "data.landscape=null",
)
TEACHER = (
    *SMALL,
    "data.codes={world: rooms, frames: 48}",
    "model.pretrained=null",
    f"model.new={NEW}",
    "method.warmup_steps=1",
    "train.validate_every=0",
    "train.optimizers.teacher.schedule_by=steps",
)
STAGE2 = (
    *SMALL,
    "data.codes={world: rooms}",
    "latent_size=[2,8]",
    "method.curriculum.min_frames=12",
    "method.curriculum.max_frames=18",
    "method.student_every=2",
    *(f"train.optimizers.{role}.schedule_by=steps" for role in ("student", "critic")),
)


def stage2(root, name: str, steps: int):
    roles = [f"{role}.pretrained={root}/teacher/weights/teacher" for role in ("student", "teacher", "critic")]
    return context_forcing.distill(
        "context_forcing/tiny_stage2",
        [*STAGE2, *roles, f"train.output_dir={root}/{name}", f"train.max_steps={steps}"],
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    context_forcing.train_teacher(
        "context_forcing/tiny_teacher", [*TEACHER, f"train.output_dir={root}/teacher", "train.max_steps=3"]
    )
    stage2(root, "whole", 4)
    return root


def weights(folder) -> dict[str, torch.Tensor]:
    return load_safetensors(folder / "diffusion_pytorch_model.safetensors")[0]


def test_stages_chain_and_the_student_is_a_loadable_transformer(runs):
    student = CausalWanTransformer3DModel.from_pretrained(runs / "whole" / "weights" / "student")
    teacher = CausalWanTransformer3DModel.from_pretrained(runs / "teacher" / "weights" / "teacher")
    assert student.config.in_channels == 12
    assert any(not torch.equal(a, b) for a, b in zip(student.parameters(), teacher.parameters(), strict=True))


def test_an_interrupted_distillation_ends_in_the_same_weights(runs):
    stage2(runs, "parts", 3)
    stage2(runs, "parts", 4)
    for role in ("student", "critic"):
        whole, parts = (weights(runs / name / "weights" / role) for name in ("whole", "parts"))
        assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)


def test_memory_is_monitored(runs):
    rows = [json.loads(line) for line in (runs / "whole" / "metrics.jsonl").read_text().splitlines()]
    names = set().union(*(row.get("metrics", {}) for row in rows))
    assert {"promotion_rate", "oldest_slow_age", "suggested_tau", "rollout_frames"} <= names


def test_layouts_of_fresh_videos_hold_true_codes_and_differ_between_steps_and_processes():
    memory = SlowFastMemoryConfig(sink=3, slow=2, fast=6)
    data = CodeLayouts(CodeWorldData("rooms", frames=48, context=ContextRange(8, 14)), memory, 3, 3, seed=0)
    first, again, later, other = (data.batch(*place, 2, 4) for place in ((0, 0), (0, 0), (1, 0), (0, 1)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["latents"], later["latents"]) and not torch.equal(first["latents"], other["latents"])
    assert torch.equal(first["frame_blocks"], other["frame_blocks"])  # the work of a step is the same everywhere
    assert first["latents"].shape == (4, 4, 3 + 2 + 3 + 3, 2, 8)
    assert set(first["latents"].unique().tolist()) == {-1.0, 1.0}


def test_a_rollout_keeps_its_first_prompt_where_the_whole_target_is_scored_under_one():
    tokenizer = train_tokenizer(["a meadow", "the camera pans left", "the camera pans right", "holds"], 100, 64)
    batches = {
        single: LandscapeRollouts(LandscapePrompts("unused", single_prompt=single), tokenizer, 60, 3, seed=0).batch(
            0, 0, 1, 3
        )
        for single in (False, True)
    }
    assert batches[True]["input_ids"].shape[1] == 1 and not batches[True]["prompt_of_chunk"].any()
    assert batches[False]["prompt_of_chunk"].shape == (3, 20) and batches[False]["prompt_of_chunk"].any()
    assert torch.equal(batches[True]["input_ids"][:, 0], batches[False]["input_ids"][:, 0])


def test_layouts_only_use_videos_that_are_long_enough():
    def read(index, layout, generator):
        assert int(layout.frame_ids.max()) < frames[index]
        return {"latents": torch.full((1, len(layout.frame_ids), 1, 1), float(index))}

    frames = [6, 30, 60]
    memory = SlowFastMemoryConfig(sink=3, slow=2, fast=6)
    layouts = ContextLayouts(read, frames, memory, ContextRange(4, 20), 3, 3, seed=0)
    used = torch.cat([layouts.batch(step, 0, 1, 4)["latents"][:, 0, 0, 0, 0] for step in range(30)])
    assert set(used.tolist()) == {1.0, 2.0}
    with pytest.raises(ConfigError, match="No video has 93 latent frames"):
        ContextLayouts(read, frames, memory, ContextRange(30, 40), 3, 3, seed=0)


def test_validation_never_reads_a_training_video(tmp_path):
    (tmp_path / "clips").mkdir()
    clips = []
    for number in range(101):
        tensors = {"latents": torch.full((1, 9, 2, 2), float(number)).half(), "prompt_embeds": torch.zeros(1, 8)}
        file = f"clips/{number}.safetensors"
        save_safetensors(tensors, tmp_path / file)
        clips.append({"file": file, "frames": 9, "bytes": (tmp_path / file).stat().st_size})
    index = {"version": FORMAT_VERSION, "channels": 1, "latent_size": [2, 2], "text_length": 1, "text_dim": 8}
    (tmp_path / "dataset.json").write_text(json.dumps({**index, "num_clips": len(clips), "clips": clips}))
    data = FolderData(videos=str(tmp_path), context=ContextRange(1, 2))
    memory = SlowFastMemoryConfig(sink=3, slow=2, fast=6)
    read = {}
    for split in ("train", "validation"):
        layouts = folder_layouts(data, split, memory, 3, 3, seed=0)
        batches = [layouts.batch(step, 0, 1, 16)["latents"][:, 0, 0, 0, 0] for step in range(40)]
        read[split] = {int(number) for number in torch.cat(batches)}
    assert read["validation"] == {0, 50, 100}
    assert len(read["train"]) > 90 and not read["train"] & read["validation"]


def test_a_source_and_a_model_must_be_named_exactly_once():
    for source in (context_forcing.VideoSource, context_forcing.ConditionSource):
        with pytest.raises(ConfigError, match="exactly one of"):
            source()
        with pytest.raises(ConfigError, match="exactly one of"):
            source(codes=CodeWorldData(), folders=FolderData("clips"))
    with pytest.raises(ConfigError, match="either `pretrained` or `new`"):
        context_forcing.ModelSource()
    with pytest.raises(ConfigError, match="allowed: 'rooms', 'panorama'"):
        CodeWorldData(world="moon")


@pytest.mark.parametrize("name", ["tiny_teacher", "wan1_3b_teacher"])
def test_teacher_configs_are_complete(name):
    load_config(context_forcing.ContextTeacherRecipe, f"context_forcing/{name}", [])


@pytest.mark.parametrize("name", ["tiny_stage1", "tiny_stage2", "wan1_3b_stage1", "wan1_3b_stage2"])
def test_distillation_configs_are_complete(name):
    load_config(context_forcing.DistillationRecipe, f"context_forcing/{name}", [])
