"""What would be wrong: a teacher trained on its context, an error bank that never reaches the context or is lost."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vidgen.forcing.context_teacher import ContextTeacherConfig, ContextTeacherMethod
from vidgen.forcing.error_bank import ErrorBank, ErrorBankConfig
from vidgen.forcing.layouts import sample_context_layout
from vidgen.memory import SlowFastMemoryConfig
from vidgen.runtime.errors import ConfigError

MEMORY = SlowFastMemoryConfig(sink=3, slow=2, fast=6)
BANK = ErrorBankConfig(buckets=4, capacity=3, jitter=0.0)
CONFIG = ContextTeacherConfig(warmup_steps=1, clean_admission=1.0, error_probability=1.0, bank=BANK)


def make_batch(context_chunks: int = 6, target_frames: int = 3):
    generator = torch.Generator().manual_seed(0)
    layouts = [sample_context_layout(MEMORY, context_chunks, 3, target_frames, generator) for _ in range(2)]
    ids = torch.stack([layout.frame_ids for layout in layouts])
    video = torch.randn(2, 4, 24, 2, 4, generator=generator)
    return {
        "latents": torch.stack([video[sample][:, ids[sample]] for sample in range(2)]),
        "frame_ids": ids,
        "frame_blocks": torch.stack([layout.frame_blocks for layout in layouts]),
        "condition_channels": torch.randn(2, 2, 24, 2, 4, generator=generator),
        "prompt_embeds": torch.randn(2, 5, 8, generator=generator),
    }


@pytest.fixture
def make_method(tiny_transformer):
    return lambda config=CONFIG: ContextTeacherMethod(tiny_transformer(), None, config, make_batch)


def recorded_inputs(method, step, batch):
    inputs = []
    hook = method.teacher.register_forward_pre_hook(lambda module, args: inputs.append((args[0], args[1])))
    output = method.training_step(batch, step, torch.Generator().manual_seed(step))
    hook.remove()
    return inputs[0][0], inputs[0][1], output


def test_context_enters_clean_at_noise_level_zero_and_with_its_own_condition_channels(make_method):
    method, batch = make_method(), make_batch()
    hidden_states, timestep, _ = recorded_inputs(method, 0, batch)
    assert torch.equal(hidden_states[:, :4, :8], batch["latents"][:, :, :8])
    assert timestep[:, :8].abs().max() == 0 and bool((timestep[:, 8:] > 0).all())
    for sample in range(2):
        expected = batch["condition_channels"][sample][:, batch["frame_ids"][sample]]
        assert torch.equal(hidden_states[sample, 4:], expected)


def test_loss_is_the_velocity_error_of_the_target_alone(make_method):
    method, batch = make_method(dataclasses.replace(CONFIG, drop_text_probability=0.0)), make_batch()
    hidden_states, timestep, output = recorded_inputs(method, 0, batch)
    with torch.no_grad():
        predicted = method.teacher(
            hidden_states, timestep, batch["prompt_embeds"], frame_blocks=batch["frame_blocks"][0]
        ).sample[:, :, 8:]
    sigma = (timestep[:, -1] / 1000).view(2, 1, 1, 1, 1)
    target = batch["latents"][:, :, 8:]
    noise = (hidden_states[:, :4, 8:] - (1 - sigma) * target) / sigma
    torch.testing.assert_close(output.losses["teacher"], (predicted - (noise - target)).square().mean())
    # and the bank holds x0_hat - x0
    residual = hidden_states[:, :4, 8:] - sigma * predicted - target
    stored = [method.bank.entries[b, :n] for b, n in enumerate(method.bank.counts.tolist()) if n]
    torch.testing.assert_close(torch.cat(stored).sum(0), residual.sum(0))


def test_errors_drift_the_context_after_the_warmup_and_leave_the_target(make_method):
    method, batch = make_method(), make_batch()
    recorded_inputs(method, 0, batch)
    stored = method.bank.entries[:, :1].flatten(0, 1)
    hidden_states, _, _ = recorded_inputs(method, 1, batch)
    drift = hidden_states[:, :4, :8] - batch["latents"][:, :, :8]
    for sample in range(2):
        # the same stored clip of three frames, repeated over the context
        repeated = stored[:, :, torch.arange(8) % 3]
        assert any(torch.allclose(drift[sample], entry, atol=1e-5) for entry in repeated if entry.abs().max() > 0)


def test_recycling_can_be_turned_off(make_method):
    method, batch = make_method(dataclasses.replace(CONFIG, error_probability=0.0)), make_batch()
    for step in range(3):
        hidden_states, _, _ = recorded_inputs(method, step, batch)
        assert torch.equal(hidden_states[:, :4, :8], batch["latents"][:, :, :8])
    assert len(method.bank) == 0


def test_bank_and_its_future_survive_a_resume(make_method):
    method, batch = make_method(), make_batch()
    for step in range(3):
        method.training_step(batch, step, torch.Generator().manual_seed(step))
    resumed = make_method()
    resumed.load_extra_state(method.extra_state())
    resumed.teacher.load_state_dict(method.teacher.state_dict())
    for step in (3, 4):
        losses = [
            each.training_step(batch, step, torch.Generator().manual_seed(step)).losses["teacher"]
            for each in (method, resumed)
        ]
        assert torch.equal(*losses)


def test_first_chunk_without_any_context_can_be_trained(make_method):
    method = make_method()
    output = method.training_step(make_batch(context_chunks=0), 0, torch.Generator().manual_seed(0))
    assert torch.isfinite(output.losses["teacher"])


def test_validation_reports_clean_and_drifted_context(make_method):
    method = make_method()
    assert set(method.validate()) == {"validation_loss"}
    method.training_step(make_batch(), 0, torch.Generator().manual_seed(0))
    measured = method.validate()
    assert set(measured) == {"validation_loss", "validation_loss_drifted"} and measured == method.validate()


def test_bank_keeps_residuals_by_noise_level_and_never_grows_beyond_its_capacity():
    bank = ErrorBank(BANK)
    generator = torch.Generator().manual_seed(0)
    residuals = torch.arange(10.0).view(10, 1, 1, 1, 1)
    bank.add(residuals[:2], torch.tensor([0.1, 0.99]), generator)
    assert bank.counts.tolist() == [1, 0, 0, 1]
    assert bank.entries[0, 0].item() == 0 and bank.entries[3, 0].item() == 1
    bank.add(100 + residuals, torch.full((10,), 0.3), generator)
    assert bank.counts.tolist() == [1, 3, 0, 1] and len(bank) == 5
    drawn = bank.sample(4000, generator).flatten()
    # every entry is equally likely, and nothing else comes out
    counts = {value: int((drawn == value).sum()) for value in drawn.unique().tolist()}
    assert set(counts) == {0.0, 1.0, *bank.entries[1].flatten().tolist()}
    assert len(counts) == 5 and all(700 < count < 900 for count in counts.values())


def test_jitter_scales_within_its_bounds():
    bank = ErrorBank(dataclasses.replace(BANK, jitter=0.3))
    generator = torch.Generator().manual_seed(0)
    bank.add(torch.ones(1, 1, 1, 1, 1), torch.tensor([0.5]), generator)
    drawn = bank.sample(1000, generator)
    assert 0.7 <= drawn.min() < 0.75 and 1.25 < drawn.max() <= 1.3


def test_sampling_an_empty_bank_and_wrong_settings_are_named():
    with pytest.raises(ValueError, match="bank is empty"):
        ErrorBank(BANK).sample(1, torch.Generator())
    with pytest.raises(ConfigError, match="error_probability=2"):
        ContextTeacherConfig(error_probability=2)
    with pytest.raises(ConfigError, match="capacity=0"):
        ErrorBankConfig(capacity=0)
