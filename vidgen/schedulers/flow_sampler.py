"""The sampler of world models: DPM-Solver++ on the straight path of flow matching, at the levels LIVE uses.

"DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models" (arXiv 2211.01095) as diffusers
implements it. The noise levels are `s = shift * u / (1 + (shift - 1) * u)` at `num_inference_steps + 1` evenly spaced
`u` from 0.999 to 0 (arXiv 2602.03747): the last step is of first order and ends on clean frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from diffusers import DPMSolverMultistepScheduler

from vidgen.runtime.errors import ConfigError


def flow_sampler(
    num_inference_steps: int = 18, shift: float = 3.0, solver_order: int = 2
) -> DPMSolverMultistepScheduler:
    """Build the sampler.

    Args:
        num_inference_steps: steps N; `sampler.sigmas` are N levels and a final 0, and `sampler.sigmas[-2]` is the
            level at which LIVE keeps the context of a frame.
        shift: warps evenly spaced levels toward noise; 1 leaves them.
        solver_order: 2 for the multistep solver; 1 is exactly Euler's method along the flow, enough for few steps.

    Raises:
        ConfigError: for less than one step, a shift that is not positive and finite, or another order.
    """
    if num_inference_steps < 1 or not 0 < shift < math.inf or solver_order not in (1, 2):
        raise ConfigError(
            f"num_inference_steps={num_inference_steps}, shift={shift}, solver_order={solver_order}; "
            "at least 1 step, a positive, finite shift and order 1 or 2 are needed."
        )
    sampler = DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=shift, solver_order=solver_order
    )
    sampler.set_timesteps(num_inference_steps)
    return sampler


def denoise(
    velocity: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    noise: torch.Tensor,
    sampler: DPMSolverMultistepScheduler,
) -> torch.Tensor:
    """Turn noise into frames.

    Args:
        velocity: predicts `noise - clean` from a sample and its timestep, a scalar `1000 * sigma`.
        noise: standard normal, of any shape.
        sampler: from [`flow_sampler`]; its memory of earlier samples is cleared first.
    """
    sampler.set_timesteps(sampler.num_inference_steps, device=noise.device)
    sample = noise
    for timestep in sampler.timesteps:
        sample = sampler.step(velocity(sample, timestep), timestep, sample, return_dict=False)[0]
    return sample
