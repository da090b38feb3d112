"""What would be wrong: other noise levels than LIVE was trained for, or a solver that isn't DPM-Solver++."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from vidgen.runtime.errors import ConfigError
from vidgen.schedulers import denoise, flow_sampler

LEVELS_18 = [0.9997, 0.9804, 0.9597, 0.9371, 0.9127, 0.8860, 0.8568, 0.8246, 0.7891,
             0.7496, 0.7055, 0.6559, 0.5996, 0.5354, 0.4612, 0.3747, 0.2725, 0.1499, 0.0]  # fmt: skip


def levels(steps: int, shift: float) -> list[float]:
    evenly = [0.999 * (1 - index / steps) for index in range(steps + 1)]
    return [shift * u / (1 + (shift - 1) * u) for u in evenly]


def velocity_field(sample: torch.Tensor, sigma: float) -> torch.Tensor:
    """A smooth field with no meaning, nonlinear in both arguments."""
    return torch.sin(2 * sample + 3 * sigma) + sample * sigma


@pytest.mark.parametrize(("steps", "shift"), [(18, 3.0), (6, 3.0), (4, 3.0), (4, 1.0), (1, 3.0)])
def test_levels_are_evenly_spaced_warped_and_end_clean(steps, shift):
    sampler = flow_sampler(steps, shift)
    assert sampler.sigmas.tolist() == pytest.approx(levels(steps, shift), abs=1e-6)
    assert sampler.timesteps.tolist() == [math.floor(1000 * level) for level in levels(steps, shift)[:-1]]


def test_level_table_of_the_paper():
    assert flow_sampler().sigmas.tolist() == pytest.approx(LEVELS_18, abs=5e-5)


@pytest.mark.parametrize("order", [1, 2])
def test_the_true_velocity_gives_the_clean_sample_in_one_step(order):
    clean, noise = torch.randn(2, 2, 4, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    level = levels(1, 3.0)[0]
    noisy = (1 - level) * clean + level * noise
    sample = denoise(lambda sample, timestep: noise - clean, noisy, flow_sampler(1, solver_order=order))
    torch.testing.assert_close(sample, clean.to(sample.dtype), atol=1e-5, rtol=0)


def test_second_order_steps_are_those_of_the_multistep_solver():
    """x_t = s_t / s x - a_t (e^-h - 1) (D + (D - D_before) / 2r), first order at both ends."""
    sigmas = levels(9, 3.0)
    sample = expected = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def log_snr(sigma: float) -> float:
        return math.log((1 - sigma) / sigma)

    before = None
    for index, (sigma, next_sigma) in enumerate(pairwise(sigmas)):
        clean = expected - sigma * velocity_field(expected, math.floor(1000 * sigma) / 1000)
        if next_sigma == 0:
            expected = clean
            break
        step = log_snr(next_sigma) - log_snr(sigma)
        direction = clean
        if index > 0:
            ratio = (log_snr(sigma) - log_snr(sigmas[index - 1])) / step
            direction = clean + (clean - before) / (2 * ratio)
        expected = next_sigma / sigma * expected - (1 - next_sigma) * math.expm1(-step) * direction
        before = clean
    result = denoise(lambda x, timestep: velocity_field(x, float(timestep) / 1000), sample, flow_sampler(9))
    torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=0)


def test_order_one_is_euler_along_the_flow():
    sigmas = levels(4, 3.0)
    start = torch.randn(50, generator=torch.Generator().manual_seed(0))
    expected, stock_sample = start, start
    stock = FlowMatchEulerDiscreteScheduler()
    stock.set_timesteps(sigmas=sigmas[:-1])
    for (sigma, next_sigma), timestep in zip(pairwise(sigmas), stock.timesteps, strict=True):
        known = math.floor(1000 * sigma) / 1000
        expected = expected + (next_sigma - sigma) * velocity_field(expected, known)
        stock_sample = stock.step(velocity_field(stock_sample, known), timestep, stock_sample).prev_sample
    sampler = flow_sampler(4, solver_order=1)
    result = denoise(lambda x, timestep: velocity_field(x, float(timestep) / 1000), start, sampler)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(result, stock_sample, atol=1e-4, rtol=0)


def test_a_sampler_keeps_nothing_of_earlier_samples():
    sampler = flow_sampler(5)
    first, second = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))

    def sampled(noise: torch.Tensor) -> torch.Tensor:
        return denoise(lambda x, timestep: velocity_field(x, float(timestep) / 1000), noise, sampler)

    alone = sampled(first)
    sampled(second)
    assert torch.equal(sampled(first), alone)


@pytest.mark.parametrize("arguments", [{"num_inference_steps": 0}, {"shift": 0.0}, {"solver_order": 3}])
def test_settings_that_cannot_work_are_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        flow_sampler(**arguments)
