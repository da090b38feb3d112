"""The tiny pipeline, distilled and with an ODE solver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from diffusers import UniPCMultistepScheduler

from vidgen.pipelines import ContextForcingPipeline


@pytest.fixture(scope="session")
def pipe(make_pipeline: Callable[..., ContextForcingPipeline]) -> ContextForcingPipeline:
    """The distilled pipeline: 16x32 pixels, 12 fps, 2 tokens per latent frame. Tests don't change it."""
    return make_pipeline()


@pytest.fixture(scope="session")
def ode_pipe(make_pipeline: Callable[..., ContextForcingPipeline]) -> ContextForcingPipeline:
    """The same models with an ODE solver and guidance."""
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return make_pipeline(scheduler=scheduler)
