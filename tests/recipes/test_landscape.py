"""The recipe of the embedded model must run from nothing to a pipeline that generates, and resume."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from vidgen.memory import SlowFastMemoryConfig
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.pipelines import ContextForcingPipeline
from vidgen.recipes import landscape
from vidgen.recipes.landscape import ATTRIBUTES, WorldConfig, make_scene
from vidgen.runtime.checkpoint import load_safetensors
from vidgen.runtime.errors import ConfigError
from vidgen.train.autoencoder import to_model_pixels
from vidgen.train.block_code import BlockCode

TRAIN = ("train.max_minutes=null", "train.checkpoint_every=1", "train.log_every=1", "train.validate_every=0")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All seven steps at toy size: 32x48 pixels, one or two optimizer steps each."""
    root = tmp_path_factory.mktemp("runs")
    world = ("world.height=32", "world.width=48")
    latents = (
        f"output_dir={root}/latents",
        "num_scenes=2",
        "num_validation_scenes=1",
        "latent_frames=27",
        *world,
    )
    nested = tuple(f"latents.{item}" for item in latents[:3])

    def steps(name, role, count):
        return (
            f"train.output_dir={root}/{name}",
            f"train.max_steps={count}",
            "train.batch_size=2",
            f"train.optimizers.{role}.schedule_by=steps",
            *TRAIN,
        )

    landscape.encode_latents("landscape/tiny_latents", list(latents))
    landscape.train_vae(
        "landscape/tiny_vae",
        [
            *steps("vae", "vae", 1),
            f"latents={root}/latents",
            "model.base_dim=4",
            "num_scenes=2",
            "clips_per_scene=1",
            "crop=[5,16,16]",
        ],
    )
    landscape.train_text_encoder(
        "landscape/tiny_text_encoder", [*steps("text_encoder", "text_encoder", 1), "model.d_model=16", "model.d_ff=16"]
    )
    model = ("model.num_attention_heads=2", "model.attention_head_dim=12", "model.num_layers=1", "model.ffn_dim=32")
    text = (f"text_encoder={root}/text_encoder/weights",)
    landscape.train_diffusion(
        "landscape/tiny_diffusion_chunks",
        [
            *steps("diffusion_chunks", "transformer", 2),
            *nested,
            *model,
            *text,
            "model.text_dim=16",
            "train.seed=7",  # other initial weights than a second stage that started from nothing would have
        ],
    )
    landscape.train_diffusion(
        "landscape/tiny_diffusion",
        [
            *steps("diffusion", "transformer", 2),
            *nested,
            *text,
            f"initial_weights={root}/diffusion_chunks/weights/transformer",
        ],
    )
    landscape.train_student(
        "landscape/tiny_student",
        [*steps("student", "student", 1), *nested, *text, f"teacher={root}/diffusion/weights/transformer"],
    )
    stages = ", ".join(f"{root}/{name}" for name in ("diffusion_chunks", "diffusion", "student"))
    parts = [f"text_encoder={root}/text_encoder", f"vae={root}/vae", f"transformer=[{stages}]"]
    landscape.assemble("landscape/tiny_assemble", [f"output_dir={root}/model", *parts, *world])
    return root


def test_recipe_ends_in_a_pipeline_that_generates(runs):
    pipe = ContextForcingPipeline.from_pretrained(runs / "model")
    frames = pipe(
        "a meadow at dawn", num_frames=9, generator=torch.Generator().manual_seed(0), output_type="np"
    ).frames
    assert frames.shape == (1, 9, 32, 48, 3)


def test_weights_are_stored_in_half_and_computed_in_full_precision(runs):
    pipe = ContextForcingPipeline.from_pretrained(runs / "model")
    trained = CausalWanTransformer3DModel.from_pretrained(runs / "student" / "weights" / "student").state_dict()
    for name, weight in pipe.transformer.state_dict().items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, trained[name], rtol=2**-11, atol=1e-7)
    assert {parameter.dtype for parameter in pipe.vae.parameters()} == {torch.float32}
    stored = load_safetensors(runs / "model" / "transformer" / "diffusion_pytorch_model.safetensors")[0]
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}


def test_latents_are_normalized(runs):
    code = BlockCode.load(runs / "latents" / "code.safetensors")
    world = WorldConfig(height=32, width=48).build()
    clips = landscape.render_clips(world, landscape.TRAIN_SEEDS, 2, per_scene=8, frames=9)
    latents = code.encode(to_model_pixels(torch.from_numpy(clips)))[:, :, 1:]
    assert latents.mean().abs() < 0.05 and latents.std() == pytest.approx(1, abs=0.02)


def test_model_card_tells_what_the_runs_did(runs):
    card = (runs / "model" / "README.md").read_text()
    assert "/diffusion_chunks | 2 |" in card and "/diffusion | 2 |" in card and "/student | 1 |" in card


def test_the_second_diffusion_stage_goes_on_from_the_first(runs):
    first, second = (
        CausalWanTransformer3DModel.from_pretrained(runs / name / "weights" / "transformer")
        for name in ("diffusion_chunks", "diffusion")
    )
    assert first.config.sigma_data == second.config.sigma_data == 1.0
    for name, weight in second.state_dict().items():
        # Two steps of one thousandth leave the weights where they were; other initial weights would be far away.
        assert (weight - first.state_dict()[name]).abs().max() < 0.02, name
    with pytest.raises(ConfigError, match="leave out model"):
        landscape.train_diffusion("landscape/tiny_diffusion", ["model.num_layers=1"])


def test_a_traveller_weighs_more_where_it_is_and_nowhere_else(runs):
    config = landscape.EncodedScenes(f"{runs}/latents", num_scenes=2, num_validation_scenes=1)
    tokenizer = AutoTokenizer.from_pretrained(runs / "text_encoder" / "weights" / "tokenizer")
    data = landscape.LatentScenes(config, "train", tokenizer, SlowFastMemoryConfig(), traveller_weight=5.0)
    world = WorldConfig().build()
    nobody, balloon = (world.scene(seed=3, seconds=10, traveller=kind) for kind in ("none", "balloon"))
    assert torch.equal(data._loss_weight(nobody, [0, 9], (8, 14)), torch.ones(2, 8, 14))
    for index, weight in enumerate(data._loss_weight(balloon, [0, 9], (8, 14))):
        box = balloon.traveller_box(landscape.pixel_frame((0, 9)[index]))
        for row in range(8):
            for column in range(14):
                touches_x = box.x < 8 * column + 8 and box.x + box.width > 8 * column
                touches_y = box.y < 8 * row + 8 and box.y + box.height > 8 * row
                assert weight[row, column] == (5.0 if touches_x and touches_y else 1.0), (row, column)


def test_single_chunks_are_neighbouring_frames_of_any_moment(runs):
    config = landscape.EncodedScenes(f"{runs}/latents", num_scenes=2, num_validation_scenes=1)
    tokenizer = AutoTokenizer.from_pretrained(runs / "text_encoder" / "weights" / "tokenizer")
    data = landscape.LatentScenes(config, "train", tokenizer, SlowFastMemoryConfig(), single_chunks=True)
    latents = data.batch(0, 0, 1, 40)["latents"]
    assert latents.shape[2] == 3
    firsts = set()
    for sample in latents:
        places = [
            (scene, first)
            for scene, whole in enumerate(data.latents)
            for first in range(25)
            if torch.equal(whole[:, first : first + 3], sample)
        ]
        assert places
        firsts.update(places)
    assert len(firsts) > 15


def test_encoding_again_keeps_finished_scenes(runs):
    scene = runs / "latents" / "scene_0.safetensors"
    before = scene.stat().st_mtime_ns
    landscape.encode_latents(
        "landscape/tiny_latents",
        [
            f"output_dir={runs}/latents",
            "num_scenes=2",
            "num_validation_scenes=1",
            "latent_frames=27",
            "world.height=32",
            "world.width=48",
        ],
    )
    assert scene.stat().st_mtime_ns == before


def test_latents_of_another_space_are_not_mixed_with_those_that_are_there(runs):
    sizes = ["num_scenes=2", "num_validation_scenes=1", "latent_frames=27", "world.height=32", "world.width=48"]
    for change in ("whitening=0.25", "channels=16", "latent_frames=30", "world.fps=10"):
        with pytest.raises(ConfigError, match="use another output_dir"):
            landscape.encode_latents("landscape/tiny_latents", [f"output_dir={runs}/latents", *sizes, change])


def test_latents_that_could_not_be_made_bind_nothing(tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(landscape, "render_clips", stop)
    for channels in (16, 32):  # of the second call, too, rendering is as far as it comes
        with pytest.raises(KeyboardInterrupt):
            landscape.encode_latents("landscape/tiny_latents", [f"output_dir={tmp_path}", f"channels={channels}"])


def test_scenes_that_were_not_encoded_are_named(runs):
    with pytest.raises(ConfigError, match=r"scene_2\.safetensors does not exist; .* the recipe landscape_latents"):
        landscape.load_scenes(landscape.EncodedScenes(f"{runs}/latents", num_scenes=3), "train")


def test_weights_of_a_text_encoder_always_come_with_their_tokenizer(runs, monkeypatch):
    settings = [
        f"train.output_dir={runs}/stopped",
        "train.max_steps=9",
        "train.checkpoint_every=1",
        "train.batch_size=2",
    ]

    def interrupt(captions, step, *arguments):
        if step == 2:
            raise KeyboardInterrupt
        return batch(captions, step, *arguments)

    batch = landscape.Captions.batch
    monkeypatch.setattr(landscape.Captions, "batch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        landscape.train_text_encoder(
            "landscape/tiny_text_encoder", [*settings, "model.d_model=16", "model.d_ff=16", "train.validate_every=0"]
        )
    landscape.load_text_encoder(f"{runs}/stopped/weights")


def test_every_value_of_every_attribute_is_rendered_equally_often():
    world = WorldConfig().build()
    scenes = [make_scene(world, index, seconds=2.0) for index in range(480)]
    for name, values in ATTRIBUTES.items():
        counts = [sum(getattr(scene, name) == value for scene in scenes) for value in values]
        assert min(counts) == max(counts), (name, counts)
    combinations = {tuple(getattr(scene, name) for name in ATTRIBUTES) for scene in scenes}
    assert len(combinations) == 480
