"""A tiny world model that hears every input, and starts for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from vidgen.controls import ControlEncoder, DeltaControls, planar_delta_spec
from vidgen.models.world_dit import WorldDiT
from vidgen.pipelines import WorldModelPipeline
from vidgen.schedulers import flow_sampler

SIZE, WINDOW = 8, 4
MOVES = planar_delta_spec("cells", **{"forward": {"forward": 0.5}, "turn left": {"turn left": 0.4}})


def build_world_model(encoder: ControlEncoder | None = None) -> WorldModelPipeline:
    encoder = encoder or ControlEncoder(DeltaControls(MOVES), "vector", units=(0.5, 0.5, 0.4))
    torch.manual_seed(0)
    transformer = WorldDiT(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=2,
        ffn_dim=16,
        num_layers=2,
        control_type=encoder.control_type,
        control_dim=encoder.control_dim,
        control_frame=encoder.control_frame,
        window=WINDOW,
        rope_dims=(4, 2, 2),
        freq_dim=16,
    )
    for parameter in transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=2,
        norm_num_groups=4,
    )
    pipe = WorldModelPipeline(
        transformer.eval(),
        vae.eval(),
        flow_sampler(2),
        controls=encoder.to_dict(),
        fps=8,
        num_inference_steps=2,
        context_sigma=0.3,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def make_world_model() -> Callable[..., WorldModelPipeline]:
    """Builds a pipeline of 8 x 8 pixels, a window of 4 and 2 denoising steps."""
    return build_world_model


@pytest.fixture(scope="session")
def pipe() -> WorldModelPipeline:
    """The same, for recorded motion with the choices "forward" and "turn left". Tests don't change it."""
    return build_world_model()


@pytest.fixture(scope="session")
def starts() -> dict[str, Any]:
    """Five starts of two frames."""
    generator = np.random.default_rng(0)
    frames = generator.integers(0, 256, (5, 2, SIZE, SIZE, 3), dtype=np.uint8)
    return {"frames": frames, "controls": generator.normal(0, 0.3, (5, 2, 3)) * [[[0.0], [1.0]]]}
