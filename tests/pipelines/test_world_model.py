"""What would be wrong: a folder that loads as another model, a stream that isn't the call, rows that swap places."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from vidgen.controls import ControlEncoder, ControlError, DeltaControls, planar_delta_spec
from vidgen.models.world_dit import WorldDiT
from vidgen.pipelines import WorldModelPipeline
from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.schedulers import flow_sampler

SPEC = planar_delta_spec("cells", walk={"forward": 0.5})


def make_pipe(**options) -> WorldModelPipeline:
    encoder = ControlEncoder(DeltaControls(SPEC), "map", units=(0.5,), latent_size=(4, 6), focal=0.6)
    torch.manual_seed(0)
    transformer = WorldDiT(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=2,
        ffn_dim=16,
        num_layers=1,
        control_frame="delta",
        window=4,
        rope_dims=(4, 2, 2),
        freq_dim=16,
    )
    for parameter in transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    vae = AutoencoderKL(block_out_channels=(8,), latent_channels=2, norm_num_groups=4)
    settings = {"controls": encoder.to_dict(), "fps": 8, "num_inference_steps": 2, **options}
    pipe = WorldModelPipeline(transformer.eval(), vae.eval(), flow_sampler(2), **settings)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe() -> WorldModelPipeline:
    return make_pipe()


@pytest.fixture(scope="module")
def prompt() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def controls() -> torch.Tensor:
    return 0.6 * torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_saved_pipeline_is_the_same_model(pipe, prompt, controls, tmp_path):
    expected = pipe(prompt, controls, seed=3).frames
    pipe.save_pretrained(tmp_path)
    assert not [file for file in tmp_path.rglob("*") if file.suffix in (".bin", ".pt", ".pkl")]
    loaded = WorldModelPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert loaded.control_encoder.to_dict() == pipe.control_encoder.to_dict()
    assert (loaded.config.fps, loaded.config.num_inference_steps, loaded.config.context_sigma) == (8, 2, None)
    assert np.array_equal(loaded(prompt, controls, seed=3).frames, expected)


@pytest.mark.parametrize("cache", ["none", "frame", "rolling"])
def test_streamed_stepped_and_called_frames_are_the_same(pipe, prompt, controls, cache):
    called = pipe(prompt, controls, cache=cache, seed=1).frames
    assert called.shape == (7, 4, 6, 3) and called.dtype == np.uint8
    assert np.array_equal(called[:2], prompt)
    streamed = list(pipe.stream(prompt, controls, cache=cache, seed=1))
    assert np.array_equal(np.stack(streamed), called[2:])
    session = pipe.open_session(prompt, controls[:2], cache=cache, seed=1)
    assert np.array_equal(np.stack([session.step(control) for control in controls[2:]]), called[2:])
    assert not np.array_equal(pipe(prompt, controls, cache=cache, seed=2).frames, called)


def test_a_batch_has_its_axis_first_in_every_form(pipe, prompt, controls):
    prompts, rows = np.stack([prompt, prompt[::-1]]), torch.stack([controls, -controls])
    batch = pipe(prompts, rows, seed=[4, 5]).frames
    assert batch.shape == (2, 7, 4, 6, 3)
    assert np.array_equal(batch[:, :2], prompts)
    single = pipe(prompt[::-1], -controls, seed=5).frames
    assert np.abs(batch[1].astype(int) - single).max() <= 1
    assert np.array_equal(np.stack(list(pipe.stream(prompts, rows, seed=[4, 5])), axis=1), batch[:, 2:])
    pictures = pipe(prompts, rows, seed=[4, 5], output_type="pil").frames
    assert np.array_equal(np.stack([np.stack([np.asarray(p) for p in video]) for video in pictures]), batch)
    alone = pipe(prompt, controls, seed=4, output_type="pil").frames
    assert len(alone) == 7 and alone[0].size == (6, 4)


def test_numpy_controls_and_torch_frames_are_taken_too(pipe, prompt, controls):
    expected = pipe(prompt, controls).frames
    assert np.array_equal(pipe(torch.from_numpy(prompt), controls.numpy()).frames, expected)
    assert np.array_equal(pipe(prompt, controls[:2]).frames, prompt)  # nothing to make


def test_wrong_arguments_raise_before_the_first_frame(pipe, prompt, controls):
    with pytest.raises(ControlError, match="1 frames for a prompt of 2"):
        pipe.stream(prompt, controls[:1])
    with pytest.raises(ControlError, match="forward, left, turn left"):
        pipe.stream(prompt, controls[:, :2])
    with pytest.raises(VidgenError, match="6x6 pixels; this world has 4x6"):
        pipe.stream(np.zeros((1, 6, 6, 3), np.uint8), controls)
    with pytest.raises(VidgenError, match="float32"):
        pipe.stream(prompt.astype(np.float32), controls)
    with pytest.raises(ConfigError, match="'np', 'pil'"):
        pipe(prompt, controls, output_type="latent")


def test_controls_that_the_transformer_was_not_made_for_are_refused():
    vectors = ControlEncoder(DeltaControls(SPEC), "vector", units=(1.0, 1.0, 1.0))
    with pytest.raises(ConfigError, match="control_type='vector'.*'map'"):
        make_pipe(controls=vectors.to_dict())
    with pytest.raises(ConfigError, match="controls are missing"):
        make_pipe(controls=None)
