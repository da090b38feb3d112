"""The few-step sampler: schedule, exactness on the straight path, per-frame noise levels."""

from __future__ import annotations

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from vidgen.schedulers import FlowConsistencyScheduler

SHAPE = (2, 4, 3, 2, 4)  # (batch, channels, frames, height, width)


def random(seed: int, shape=SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_default_schedule_is_the_papers():
    scheduler = FlowConsistencyScheduler()
    assert scheduler.timesteps.tolist() == pytest.approx([1000, 937.5, 833.3333, 625], abs=1e-3)
    assert scheduler.sigmas.tolist() == pytest.approx([1, 0.9375, 0.8333333, 0.625, 0], abs=1e-6)


def test_explicit_timesteps_replace_the_even_ones_only_for_their_number_of_steps():
    scheduler = FlowConsistencyScheduler(shift=1.0, timesteps=[1000, 600])
    assert scheduler.timesteps.tolist() == pytest.approx([1000, 600])
    scheduler.set_timesteps(2)
    assert scheduler.timesteps.tolist() == pytest.approx([1000, 600])
    scheduler.set_timesteps(4)
    assert scheduler.timesteps.tolist() == pytest.approx([1000, 750, 500, 250])
    scheduler.set_timesteps(timesteps=[900, 300, 100])
    assert scheduler.timesteps.tolist() == pytest.approx([900, 300, 100])


def test_perfect_velocity_recovers_the_clean_sample_from_any_step():
    scheduler = FlowConsistencyScheduler()
    clean, noise, fresh = random(0), random(1), random(2)
    for index, timestep in enumerate(scheduler.timesteps):
        sample = scheduler.add_noise(clean, noise, timestep)
        output = scheduler.step(noise - clean, timestep, sample, noise=fresh)
        torch.testing.assert_close(output.pred_original_sample, clean, atol=1e-5, rtol=0)
        sigma = scheduler.sigmas[index + 1]
        torch.testing.assert_close(output.prev_sample, (1 - sigma) * clean + sigma * fresh, atol=1e-5, rtol=0)


def test_last_step_returns_the_clean_sample_without_drawing():
    scheduler = FlowConsistencyScheduler()
    sample, velocity, generator = random(0), random(1), torch.Generator().manual_seed(5)
    before = generator.get_state()
    output = scheduler.step(velocity, scheduler.timesteps[-1], sample, generator=generator)
    assert torch.equal(output.prev_sample, output.pred_original_sample)
    assert torch.equal(generator.get_state(), before)


def test_per_frame_timesteps_equal_separate_steps():
    scheduler = FlowConsistencyScheduler()
    sample, velocity, noise = random(0), random(1), random(2)
    timesteps = torch.stack([scheduler.timesteps[[0, 1, 3]], scheduler.timesteps[[2, 2, 0]]])  # (batch, frames)
    together = scheduler.step(velocity, timesteps, sample, noise=noise).prev_sample
    noised = scheduler.add_noise(sample, noise, timesteps)
    for b in range(2):
        for f in range(3):
            cell = (slice(b, b + 1), slice(None), slice(f, f + 1))
            alone = scheduler.step(velocity[cell], timesteps[b, f], sample[cell], noise=noise[cell]).prev_sample
            assert torch.equal(together[cell], alone)
            assert torch.equal(noised[cell], scheduler.add_noise(sample[cell], noise[cell], timesteps[b, f]))


def test_batched_timesteps_and_plain_tensors():
    scheduler = FlowConsistencyScheduler()
    sample, velocity, noise = random(0, (2, 5)), random(1, (2, 5)), random(2, (2, 5))
    together = scheduler.step(velocity, scheduler.timesteps[[0, 2]], sample, noise=noise).prev_sample
    for b, index in enumerate((0, 2)):
        row = slice(b, b + 1)
        alone = scheduler.step(velocity[row], scheduler.timesteps[index], sample[row], noise=noise[row]).prev_sample
        assert torch.equal(together[row], alone)


def test_a_step_keeps_no_state():
    scheduler = FlowConsistencyScheduler()
    sample, velocity, noise = random(0), random(1), random(2)
    first = scheduler.step(velocity, scheduler.timesteps[1], sample, noise=noise).prev_sample
    scheduler.step(velocity, scheduler.timesteps[3], sample)
    assert torch.equal(first, scheduler.step(velocity, scheduler.timesteps[1], sample, noise=noise).prev_sample)


def test_half_precision_is_computed_in_float32():
    scheduler = FlowConsistencyScheduler()
    sample, velocity = random(0).bfloat16(), random(1).bfloat16()
    output = scheduler.step(velocity, scheduler.timesteps[-1], sample)
    exact = sample.float() - scheduler.sigmas[-2] * velocity.float()
    assert output.prev_sample.dtype == torch.bfloat16
    assert torch.equal(output.prev_sample, exact.bfloat16())


def test_generator_decides_the_noise():
    scheduler = FlowConsistencyScheduler()

    def step(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return scheduler.step(random(1), scheduler.timesteps[0], random(0), generator=generator, return_dict=False)[0]

    assert torch.equal(step(3), step(3))
    assert not torch.equal(step(3), step(4))


def test_without_fresh_noise_a_step_is_an_euler_step():
    generator = torch.Generator().manual_seed(0)
    sample, velocity = (torch.randn(2, 4, 3, 4, 4, generator=generator) for _ in range(2))
    ours = FlowConsistencyScheduler(shift=3.0, num_inference_steps=8, eta=0.0)
    euler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    euler.set_timesteps(sigmas=[1 - index / 8 for index in range(8)])
    torch.testing.assert_close(ours.timesteps, euler.timesteps)
    for timestep in ours.timesteps:
        expected = euler.step(velocity, timestep, sample, return_dict=False)[0]
        # No noise is drawn, and noise that is given has no part.
        for options in ({}, {"noise": torch.full_like(sample, 9.0)}):
            previous = ours.step(velocity, timestep, sample, return_dict=False, **options)[0]
            torch.testing.assert_close(previous, expected, atol=1e-5, rtol=1e-5)


def test_eta_mixes_carried_and_fresh_noise_at_unit_variance():
    generator = torch.Generator().manual_seed(0)
    clean, noise, fresh = (torch.randn(1, 4, 3, 64, 64, generator=generator) for _ in range(3))
    scheduler = FlowConsistencyScheduler(shift=1.0, num_inference_steps=2, eta=0.6)
    first, second = scheduler.sigmas[:2]
    sample = (1 - first) * clean + first * noise
    previous = scheduler.step(noise - clean, scheduler.timesteps[0], sample, noise=fresh).prev_sample
    carried = (previous - (1 - second) * clean) / second
    torch.testing.assert_close(carried, 0.8 * noise + 0.6 * fresh, atol=1e-4, rtol=1e-4)
    assert carried.std() == pytest.approx(1, abs=0.02)


def test_config_round_trip(tmp_path):
    scheduler = FlowConsistencyScheduler(shift=3.0, timesteps=[1000.0, 400.0])
    scheduler.save_pretrained(tmp_path)
    loaded = FlowConsistencyScheduler.from_pretrained(tmp_path)
    assert loaded.config.shift == 3.0
    assert torch.equal(loaded.timesteps, scheduler.timesteps)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"shift": 0.0}, "shift=0.0"),
        ({"shift": float("nan")}, "shift=nan"),
        ({"num_inference_steps": 0}, "num_inference_steps=0"),
        ({"timesteps": [500, 750]}, "decrease"),
        ({"timesteps": [1200, 500]}, r"\(0, 1000\]"),
        ({"timesteps": [500, 0]}, "decrease"),
        ({"timesteps": []}, "decrease"),
    ],
)
def test_bad_configurations_are_named(arguments, fragment):
    with pytest.raises(ValueError, match=fragment):
        FlowConsistencyScheduler(**arguments)


def test_number_of_steps_must_match_given_timesteps():
    with pytest.raises(ValueError, match="num_inference_steps=3"):
        FlowConsistencyScheduler().set_timesteps(3, timesteps=[1000, 500])
