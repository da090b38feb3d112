"""What holds for every recipe: one run per folder with one set of settings; missing parts, and wrong or idle settings,
named before any work; the Hugging Face Hub left out of it."""

from __future__ import annotations

import importlib
import sys

import pytest
from omegaconf import OmegaConf

from vidgen.cli.train import RECIPES
from vidgen.pipelines import ContextForcingPipeline, WorldModelPipeline
from vidgen.recipes.command_line import main
from vidgen.runtime.config import find_config
from vidgen.runtime.errors import ConfigError, TrainingError, VidgenError

TRAININGS = [name for name, (_, config) in RECIPES.items() if "train" in OmegaConf.load(find_config(config))]


def run(name: str, *overrides: str, config: str | None = None):
    target, default = RECIPES[name]
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(config or default, list(overrides))


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- settings of a run ---------------------------------------------------------------------------------------------


def test_trainings_are_those_with_a_run():
    others = {"landscape_latents", "landscape_assemble", "world_model_assemble", "lm_tokenizer", "lm_assemble"}
    assert set(RECIPES) - set(TRAININGS) == others


@pytest.mark.parametrize("name", TRAININGS)
def test_a_run_of_other_settings_is_refused_before_any_work(empty, name):
    stored = OmegaConf.load(find_config(RECIPES[name][1]))
    (empty / "run" / "step_000001").mkdir(parents=True)
    (empty / "run" / "config.yaml").write_text(OmegaConf.to_yaml(stored))
    batch_size = stored.train.batch_size
    with pytest.raises(TrainingError, match=rf"train\.batch_size: {batch_size} -> {batch_size + 1}"):
        run(name, "train.output_dir=run", f"train.batch_size={batch_size + 1}")
    assert sorted(path.name for path in (empty / "run").iterdir()) == ["config.yaml", "step_000001"]


# --- parts that other recipes make ---------------------------------------------------------------------------------

LATENTS = "runs/landscape/latents"
TEXT = "runs/landscape/text_encoder/weights"
DOOM_CODE = "episodes.code=null"
MISSING = [
    ("landscape_vae", [], f"{LATENTS}/settings.json does not exist; it is made by the recipe landscape_latents"),
    (
        "landscape_diffusion_chunks",
        [],
        f"{TEXT}/tokenizer does not exist; it is made by the recipe landscape_text_enc",
    ),
    ("landscape_diffusion", [], f"{TEXT}/tokenizer does not exist; it is made by the recipe landscape_text_encoder"),
    ("landscape_student", [], f"{TEXT}/tokenizer does not exist; it is made by the recipe landscape_text_encoder"),
    (
        "landscape_assemble",
        [],
        "runs/landscape/vae/weights/vae does not exist; it is made by the recipe landscape_vae",
    ),
    (
        "context_forcing_teacher",
        [],
        "no folder runs/landscape/diffusion/weights/transformer; it is made by the recipe landscape_diffusion",
    ),
    (
        "context_forcing_stage1",
        [],
        "no folder runs/landscape/student/weights/student; it is made by the recipe landscape_student",
    ),
    (
        "context_forcing_stage2",
        [],
        "no folder runs/context_forcing/stage1/weights/student; .* the recipe .* context_forcing_stage1",
    ),
    ("frame_autoencoder", [], "'runs/doom/episodes' is not a folder; `vidgen world record` makes one"),
    (
        "world_model",
        [],
        "runs/doom/autoencoder/code.safetensors does not exist; it is made by the recipe frame_autoenc",
    ),
    (
        "world_model",
        [DOOM_CODE, "episodes.vae=/nope"],
        "/nope does not exist; it is made by the recipe frame_autoencoder or `vidgen convert live-vae`",
    ),
    (
        "world_model",
        [DOOM_CODE, "episodes.vae=.", "new=null", "pretrained=runs/df"],
        "runs/df does not exist; it is made by the recipe world_model",
    ),
    ("world_model_assemble", [], "runs/doom/autoencoder/weights/vae does not exist; .* the recipe frame_autoencoder"),
    ("lm_causal", [], "runs/lm/corpus/corpus.json does not exist; it is made by the recipe lm_tokenizer"),
    ("lm_assemble", [], "runs/lm/causal/weights/model does not exist; it is made by the recipe lm_causal"),
]


@pytest.mark.parametrize(("name", "overrides", "message"), MISSING)
def test_a_missing_part_is_named_with_its_maker(empty, name, overrides, message):
    with pytest.raises(VidgenError, match=message):
        run(name, *overrides)


def test_a_part_is_missed_where_the_ones_before_it_are_there(empty, make_pipeline):
    make_pipeline().transformer.save_pretrained("transformer")
    with pytest.raises(ConfigError, match=f"{TEXT}/tokenizer does not exist; it is made by the recipe landscape_text"):
        run("context_forcing_teacher", "model.pretrained=transformer")


@pytest.mark.parametrize("name", ["/nope", "nope", "runs/a/b", "./a/b", "here/model"])
@pytest.mark.parametrize(
    ("pipeline", "maker"),
    [(ContextForcingPipeline, "landscape_assemble"), (WorldModelPipeline, "world_model_assemble")],
)
def test_a_missing_pipeline_folder_is_not_looked_for_on_the_hub(empty, pipeline, maker, name):
    (empty / "here").mkdir()
    with pytest.raises(VidgenError, match=f"no folder {name}; it is made by the recipe {maker}, or give owner/name"):
        pipeline.from_pretrained(name)


def test_a_transformer_that_the_hub_does_not_give_is_named(empty):
    with pytest.raises(ConfigError, match="from some/model, which is no folder here and was looked up on the Hub: "):
        run("context_forcing_teacher", "model.pretrained=some/model")


# --- values --------------------------------------------------------------------------------------------------------

STAGE = "context_forcing_stage1"
TEACHER = "context_forcing_teacher"


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        (STAGE, "method.guidance_scale=nan", "method.guidance_scale' is not a number"),
        (STAGE, "method.guidance_scale=.inf", "method.guidance_scale=inf; it must be finite"),
        (STAGE, "method.sigmas=[1.0,.nan,0.5]", "method.sigmas' is not a number"),
        (STAGE, "train.optimizers.student.lr=.nan", "lr' is not a number"),
        (STAGE, "train.optimizers.student.lr=.inf", "lr=inf; it must be positive and finite"),
        (TEACHER, "target_frames=0", "target_frames=0; it must be 1 or more"),
        (TEACHER, "validation_samples=0", "validation_samples=0; it must be 1 or more"),
        (TEACHER, "data.landscape.latents.num_scenes=0", "num_scenes=0; it must be 1 or more"),
        ("landscape_latents", "latent_frames=0", "latent_frames=0; it must be 1 or more"),
        ("landscape_latents", "num_validation_scenes=0", "num_validation_scenes=0; it must be 1 or more"),
        ("landscape_vae", "clip_frames=8", r"clip_frames=8; it must be 4 n \+ 1"),
        ("landscape_vae", "crop=[17,8,8]", r"crop=\[17, 8, 8\]; its frames must be 4 n \+ 1, up to clip_frames=13"),
        ("landscape_vae", "crop=[5,0,8]", r"crop=\[5, 0, 8\]"),
        ("landscape_vae", "crop_probability=.nan", "crop_probability' is not a number"),
        ("landscape_vae", "crop_probability=2", r"crop_probability=2.0; it must be in \[0, 1\]"),
        ("landscape_text_encoder", "vocab_size=100", "vocab_size=100; bytes and special tokens alone take 259"),
        ("landscape_text_encoder", "max_length=1", "max_length=1; a word and the end take 2 tokens"),
        ("landscape_diffusion", "traveller_weight=-1", "traveller_weight=-1.0; it must be finite and not negative"),
        ("landscape_student", "traveller_weight=.inf", "traveller_weight=inf; it must be finite"),
        ("landscape_student", "guidance_scale=.inf", "guidance_scale=inf; it must be finite and above 1"),
        ("landscape_assemble", "transformer=[]", "transformer is empty"),
        ("landscape_assemble", "num_inference_steps=0", "num_inference_steps=0; it must be 1 or more"),
        ("frame_autoencoder", "code_frames=0", "code_frames=0; it must be 1 or more"),
        ("world_model", "control_type=maps", "control_type='maps'; allowed: 'map', 'vector'"),
        ("world_model", "units=[0]", r"units=\[0.0\]; they must be positive and finite"),
        ("world_model", "episodes.skip=0", "skip=0, num_sparse=0; skip >= 1"),
        ("world_model", "validation_windows=-1", "validation_windows=-1; it must be 0 or more"),
        ("world_model_assemble", "num_starts=0", "num_starts=0; it must be 1 or more"),
    ],
)
def test_a_value_out_of_range_is_refused_before_any_work(empty, name, override, message):
    with pytest.raises(ConfigError, match=message):
        run(name, override)
    assert not list(empty.iterdir())


NEW = (
    "{num_attention_heads: 2, attention_head_dim: 12, in_channels: 12, out_channels: 4, text_dim: 8, freq_dim: 16, "
    "ffn_dim: 32, num_layers: 1}"
)
CODES = ("data={landscape: null, codes: {world: rooms}}",)


@pytest.mark.parametrize("size", ["[0,0]", "[2,0]", "[-2,8]", "[3,8]"])
def test_a_latent_size_that_holds_no_whole_patches_is_refused(empty, size):
    models = [f"{role}={{pretrained: null, new: {NEW}}}" for role in ("student", "teacher", "critic")]
    with pytest.raises(ConfigError, match=r"latent_size=.*; height and width must be positive multiples of \[2, 2\]"):
        run(STAGE, *CODES, *models, f"latent_size={size}", "train.output_dir=run")


@pytest.mark.parametrize("frames", [1, 4])
def test_a_target_of_part_of_a_chunk_is_refused(empty, frames):
    model = f"model={{pretrained: null, new: {NEW}}}"
    with pytest.raises(ConfigError, match=f"target_frames={frames} is no multiple of the chunk of 3 frames"):
        run(TEACHER, *CODES, model, f"target_frames={frames}", "train.output_dir=run")


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (STAGE, ["chunk_seconds=1.0"], "unknown key 'chunk_seconds'"),
        (STAGE, ["data.landscape.latents.num_scenes=3"], "unknown key 'data.landscape.latents'"),
        (STAGE, ["data.landscape.context.max_chunks=3"], "unknown key 'data.landscape.context'"),
        (STAGE, ["data={landscape: null, codes: {frames: 48}}"], "unknown key 'data.codes.frames'"),
        (STAGE, ["data={landscape: null, folders: {prompts: p, videos: v}}"], "unknown key 'data.folders.videos'"),
        (STAGE, ["teacher.gradient_checkpointing=true"], "has no effect: the teacher is frozen"),
        (TEACHER, ["data.landscape.latents.channels=16"], "unknown key 'data.landscape.latents.channels'"),
        (TEACHER, ["data.landscape.latents.world.fps=10"], "unknown key 'data.landscape.latents.world'"),
        (TEACHER, ["data.landscape.single_prompt=true"], "unknown key 'data.landscape.single_prompt'"),
        (TEACHER, ["data={landscape: null, folders: {prompts: p, videos: v}}"], "unknown key 'data.folders.prompts'"),
        ("landscape_diffusion", ["latents.whitening=1.0"], "unknown key 'latents.whitening'"),
        ("landscape_student", ["latents.latent_frames=9"], "unknown key 'latents.latent_frames'"),
        ("landscape_text_encoder", ["world.height=32"], "unknown key 'world'"),
        ("landscape_diffusion_chunks", ["memory.slow=2"], "single_chunks trains without a past; leave out memory"),
    ],
)
def test_a_setting_without_effect_is_refused(empty, name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        run(name, *overrides)


# --- command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "told"), [(KeyboardInterrupt(), "stopped"), (KeyboardInterrupt("stopped at step 7"), "stopped at step 7")]
)
def test_a_stopped_script_tells_how_to_go_on(monkeypatch, capsys, stop, told):
    def recipe(source, overrides):
        """Train."""
        raise stop

    monkeypatch.setattr(sys, "argv", ["training/x.py"])
    with pytest.raises(SystemExit) as exit:
        main(recipe, "x")
    assert exit.value.code == 130
    assert capsys.readouterr().err == f"{told}; the same command goes on\n"
