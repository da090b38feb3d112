"""What would be wrong: scores that see other frames than the student, gradients into the past, a curriculum that
processes disagree about, or a distillation whose signal does not vanish at its optimum."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vidgen.forcing.conditions import Conditions
from vidgen.forcing.distribution_matching import (
    DistributionMatchingConfig,
    DistributionMatchingMethod,
    RolloutCurriculum,
)
from vidgen.forcing.rollout import _velocity_beside_memory, rollout
from vidgen.memory import SlowFastMemory, SlowFastMemoryConfig
from vidgen.runtime.device import generator_for
from vidgen.runtime.errors import ConfigError, TrainingError

MEMORY = SlowFastMemoryConfig(sink=3, slow=2, fast=6, tau=0.9)
SHAPE = (4, 2, 4)
CONFIG = DistributionMatchingConfig(
    target_frames=3,
    curriculum=RolloutCurriculum(min_frames=12, max_frames=24, growth_steps=10),
    guidance_scale=1.0,
    student_every=1,
)


@pytest.fixture
def make_method(tiny_transformer):
    def make(
        config: DistributionMatchingConfig = CONFIG, memory: SlowFastMemoryConfig = MEMORY, critic_seed: int = 1
    ) -> DistributionMatchingMethod:
        roles = tiny_transformer(0), tiny_transformer(1), tiny_transformer(critic_seed)
        return DistributionMatchingMethod(*roles, None, memory, SHAPE, config)

    return make


def make_batch(batch_size: int = 2, frames: int = 24) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "prompt_embeds": torch.randn(batch_size, 2, 5, 8, generator=generator),
        "prompt_of_chunk": torch.arange(frames // 3).expand(batch_size, -1) % 2,
        "condition_channels": torch.randn(batch_size, 2, frames, 2, 4, generator=generator),
    }


def make_rollout(method, num_frames=24, exit_step=4, num_target=3, seed=0, **kwargs):
    memory = SlowFastMemory(method.memory_config, num_frames_per_block=3)
    conditions = Conditions.from_batch(make_batch(), None)
    generator = torch.Generator().manual_seed(seed)
    video = rollout(
        method.student,
        memory,
        conditions,
        CONFIG.sigmas,
        SHAPE,
        num_frames,
        num_target,
        exit_step,
        generator,
        **kwargs,
    )
    return video, conditions


class StepCounter(torch.nn.Module):
    """A transformer that remembers the first latent frame and noise level of every forward."""

    def __init__(self, transformer):
        super().__init__()
        self.transformer, self.calls = transformer, []
        self.config = transformer.config

    def forward(self, hidden_states, timestep, text, kv_memory=None, **kwargs):
        first = kv_memory.num_frames if kv_memory is not None else None
        self.calls.append((first, round(float(timestep.flatten()[-1]) / 1000, 4), torch.is_grad_enabled()))
        return self.transformer(hidden_states, timestep, text, kv_memory=kv_memory, **kwargs)


# --- rollout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean_context", [None, 6, 0])
def test_context_runs_all_steps_and_target_leaves_early(make_method, clean_context):
    method = make_method()
    method.student = StepCounter(method.student)
    make_rollout(method, num_frames=18, exit_step=2, num_target=6, num_clean_context=clean_context)
    denoising = [call for call in method.student.calls if call[1] > 0]
    steps = {start: sum(call[0] == start for call in denoising) for start in range(0, 18, 3)}
    clean_start = 0 if clean_context is None else 12 - clean_context
    assert steps == {start: 4 if clean_start <= start < 12 else 2 for start in range(0, 18, 3)}
    # a gradient in the target's exit step alone: sigma of the second step
    assert [(start, sigma) for start, sigma, grad in denoising if grad] == [(12, 0.9375), (15, 0.9375)]
    # every chunk but the last is committed, at noise level 0 and without a gradient
    commits = [call for call in method.student.calls if call[1] == 0]
    assert [call[0] for call in commits] == [0, 3, 6, 9, 12] and not any(call[2] for call in commits)


def test_rollout_is_what_the_sampler_makes_of_the_same_noise(make_method):
    method = make_method()
    video, conditions = make_rollout(method, num_frames=9, exit_step=4, requires_grad=False)
    generator = torch.Generator().manual_seed(0)
    memory = SlowFastMemory(MEMORY, num_frames_per_block=3)
    for index in range(3):
        text, channels = conditions.text[:, index % 2], conditions.channels[:, :, 3 * index : 3 * index + 3]
        sample = torch.randn(2, 4, 3, 2, 4, generator=generator)
        for step, sigma in enumerate(CONFIG.sigmas):
            timestep = torch.full((2,), 1000 * sigma)
            with torch.no_grad():
                velocity = method.student(torch.cat([sample, channels], 1), timestep, text, kv_memory=memory).sample
            clean = sample - sigma * velocity
            if step < 3:
                following = CONFIG.sigmas[step + 1]
                sample = (1 - following) * clean + following * torch.randn(sample.shape, generator=generator)
        with torch.no_grad():
            inputs = torch.cat([clean, channels], 1)
            output = method.student(inputs, torch.zeros(2), text, kv_memory=memory, return_key_values=True)
        memory.commit(output.key_values)
        torch.testing.assert_close(video.latents[:, :, 3 * index : 3 * index + 3], clean)


def test_only_the_target_carries_a_gradient(make_method):
    method = make_method()
    video, _ = make_rollout(method, num_frames=15, num_target=6)
    parameters = list(method.student.parameters())

    def reaches_the_student(frames):
        gradients = torch.autograd.grad(frames.sum(), parameters, retain_graph=True, allow_unused=True)
        return any(value is not None and value.abs().max() > 0 for value in gradients)

    assert not reaches_the_student(video.latents[:, :, :9])
    assert reaches_the_student(video.latents[:, :, 9:12]) and reaches_the_student(video.latents[:, :, 12:])


def test_a_memory_gradient_changes_the_gradient_and_not_the_video(make_method):
    """While nothing was dropped and under one prompt, reading stored keys or computing them anew is the same."""
    method = make_method(memory=SlowFastMemoryConfig(sink=3, slow=9, fast=6, tau=0.9))
    batch = make_batch()
    batch["prompt_of_chunk"] = torch.zeros_like(batch["prompt_of_chunk"])
    conditions = Conditions.from_batch(batch, None)
    target, gradients = {}, {}
    for anew in (False, True):
        memory = SlowFastMemory(method.memory_config, num_frames_per_block=3)
        generator = torch.Generator().manual_seed(0)
        arguments = (conditions, CONFIG.sigmas, SHAPE, 15, 6, 3, generator)
        video = rollout(method.student, memory, *arguments, memory_gradient=anew)
        method.student.zero_grad()
        video.target.square().sum().backward()
        target[anew] = video.target.detach()
        gradients[anew] = method.student.blocks[0].attn1.to_k.weight.grad.clone()
        assert torch.equal(memory.frame_ids, torch.arange(12).expand(2, -1))
    torch.testing.assert_close(target[True], target[False], rtol=1e-4, atol=1e-5)
    assert (gradients[True] - gradients[False]).norm() > 0.05 * gradients[False].norm()


def test_memory_read_anew_holds_each_samples_own_frames(make_method):
    """Past the memory's span samples keep different frames; each must be read as if it were alone."""
    method = make_method()
    video, conditions = make_rollout(method, num_frames=24)
    memory, past = video.memory, video.latents[:, :, :21].detach()
    # Untrained keys promote alike in both samples; what is kept is set apart by hand.
    memory._frame_ids = torch.stack(
        [torch.tensor([0, 1, 2, 5, 9, 18, 19, 20]), torch.tensor([0, 1, 2, 7, 12, 18, 19, 20])]
    )[None]
    sample, text = torch.randn(2, 4, 3, 2, 4), conditions.text_at(7)
    with torch.no_grad():
        both = _velocity_beside_memory(method.student, memory, sample, 0.7, text, past, conditions)
        for index in range(2):
            ids = memory.frame_ids[index].tolist() + [21, 22, 23]
            frames = torch.cat([past[index, :, ids[:8]], sample[index]], dim=1)
            told = conditions.channels[index, :, ids]
            blocks = torch.tensor([0, 0, 0, 1, 2, 3, 3, 3, 4, 4, 4])
            sigma = torch.tensor([[0.0] * 8 + [0.7] * 3]) * 1000
            alone = method.student(
                torch.cat([frames, told])[None], sigma, text[index : index + 1], frame_blocks=blocks
            )
            torch.testing.assert_close(both[index], alone.sample[0, :, 8:], rtol=1e-4, atol=1e-5)


def test_context_of_a_long_target_ends_where_the_target_begins(make_method):
    video, _ = make_rollout(make_method(), num_frames=24, num_target=6)
    assert video.memory.num_frames == 18 and video.memory.frame_ids[:, -3:].tolist() == [[15, 16, 17]] * 2
    assert video.final_memory.num_frames == 21


def test_wrong_lengths_are_named(make_method):
    method = make_method()
    with pytest.raises(ValueError, match="num_frames=10"):
        make_rollout(method, num_frames=10)
    with pytest.raises(ValueError, match="exit_step=5"):
        make_rollout(method, exit_step=5)


# --- what the scores see -----------------------------------------------------------------------------------------


def test_teacher_and_critic_see_the_frames_in_the_students_memory(make_method):
    method = make_method()
    video, conditions = make_rollout(method)
    seen = []
    for role in ("teacher", "critic"):
        module = getattr(method, role)

        def record(module, args, seen=seen):
            seen.append(args[0][:, :4].clone())

        module.register_forward_pre_hook(record)
    context = method.scored_context(video, conditions)
    method.student_loss(video.target, context, torch.Generator().manual_seed(0))
    stored = video.memory.frame_ids
    assert stored.shape == (2, 8) and torch.equal(context.frame_ids, stored)
    assert len(seen) == 2
    for inputs in seen:
        for sample in range(2):
            assert torch.equal(inputs[sample, :, :8], video.latents[sample][:, stored[sample]].detach())


def test_samples_of_a_batch_keep_their_own_frames(make_method):
    method = make_method()
    video, conditions = make_rollout(method, seed=5)
    ids = video.memory.frame_ids.clone()
    ids[1, 3:5] = torch.tensor([3, 9])
    video.memory._frame_ids = ids.unsqueeze(0)
    context = method.scored_context(video, conditions)
    for sample in range(2):
        assert torch.equal(context.latents[sample], video.latents[sample][:, ids[sample]].detach())


@pytest.mark.parametrize(("policy", "expected"), [("window", [18, 19, 20]), ("none", [])])
def test_memoryless_scores_see_the_last_frames_or_nothing(make_method, policy, expected):
    method = make_method(dataclasses.replace(CONFIG, context=policy, window_frames=3))
    video, conditions = make_rollout(method)
    context = method.scored_context(video, conditions)
    assert context.frame_ids.tolist() == [expected] * 2
    assert context.latents.shape[2] == len(expected)
    loss = method.student_loss(video.target, context, torch.Generator().manual_seed(0))
    assert torch.isfinite(loss)


def test_teacher_can_choose_frames_by_its_own_keys(make_method):
    method = make_method(dataclasses.replace(CONFIG, shared_selection=False))
    video, conditions = make_rollout(method)
    context = method.scored_context(video, conditions)
    ids = context.frame_ids
    assert ids.shape == (2, 8) and ids[:, :3].tolist() == [[0, 1, 2]] * 2 and ids[:, 5:].tolist() == [[18, 19, 20]] * 2
    assert bool((ids[:, 3:5] < 21).all())


def test_scored_context_equals_a_cached_forward_while_nothing_was_dropped(make_method):
    """One sequence [context | target] must be what the teacher would compute through its own memory."""
    method = make_method(memory=SlowFastMemoryConfig(sink=3, slow=9, fast=6, tau=0.9))
    video, conditions = make_rollout(method, num_frames=12)
    context = method.scored_context(video, conditions)
    noisy = torch.randn(2, *SHAPE[:1], 3, *SHAPE[1:], generator=torch.Generator().manual_seed(7))
    sigma = torch.tensor([0.4, 0.8])
    with torch.no_grad():
        whole = method.predict_clean(method.teacher, noisy, sigma, context)
        memory = SlowFastMemory(method.memory_config, num_frames_per_block=3)
        text = conditions.text_at(3)
        for start in range(0, 9, 3):
            inputs = torch.cat([video.latents, conditions.channels[:, :, :12]], 1)[:, :, start : start + 3]
            output = method.teacher(inputs, torch.zeros(2), text, kv_memory=memory, return_key_values=True)
            memory.commit(output.key_values)
        inputs = torch.cat([noisy, conditions.channels[:, :, 9:12]], 1)
        velocity = method.teacher(inputs, sigma * 1000, text, kv_memory=memory).sample
    torch.testing.assert_close(whole, noisy - sigma.view(2, 1, 1, 1, 1) * velocity, rtol=1e-4, atol=1e-5)


# --- losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["memory", "none"])
@pytest.mark.parametrize("attention", ["joint", "chunked"])
def test_chunks_of_a_target_see_the_later_ones_only_when_scored_jointly(make_method, attention, context):
    config = dataclasses.replace(CONFIG, target_frames=6, target_attention=attention, context=context)
    method = make_method(config)
    video, conditions = make_rollout(method, num_target=6)
    scored = method.scored_context(video, conditions)
    noisy, sigma = torch.randn(2, 4, 6, 2, 4), torch.tensor([0.4, 0.8])
    changed = noisy.clone()
    changed[:, :, 3:] += 1
    with torch.no_grad():
        before, after = (method.predict_clean(method.teacher, each, sigma, scored) for each in (noisy, changed))
    assert torch.equal(before[:, :, :3], after[:, :, :3]) == (attention == "chunked")
    # Either way the later chunk sees the earlier one.
    changed = noisy.clone()
    changed[:, :, :3] += 1
    with torch.no_grad():
        after = method.predict_clean(method.teacher, changed, sigma, scored)
    assert not torch.equal(before[:, :, 3:], after[:, :, 3:])


def student_gradient(method, video, context) -> torch.Tensor:
    loss = method.student_loss(video.target, context, torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad(loss, video.latents, retain_graph=True)
    return gradient


def test_distillation_signal_is_zero_when_critic_equals_teacher_and_not_when_one_is_blind(make_method):
    method = make_method()
    video, conditions = make_rollout(method)
    context = method.scored_context(video, conditions)
    assert student_gradient(method, video, context).abs().max() == 0

    blind = dataclasses.replace(
        context,
        latents=context.latents[:, :, :0],
        frame_ids=context.frame_ids[:, :0],
        blocks=context.blocks[:0],
        channels=context.channels[:, :, -3:],
    )
    original = method.predict_clean

    def blind_critic(transformer, noisy, sigma, given, *rest, **kwargs):
        return original(transformer, noisy, sigma, blind if transformer is method.critic else given, *rest, **kwargs)

    method.predict_clean = blind_critic
    gradient = student_gradient(method, video, context)
    assert gradient[:, :, -3:].abs().max() > 0 and gradient[:, :, :-3].abs().max() == 0


def test_student_loss_has_the_gradient_of_the_equation(make_method):
    method = make_method(critic_seed=2)
    video, conditions = make_rollout(method)
    context = method.scored_context(video, conditions)
    gradient = student_gradient(method, video, context)[:, :, -3:]
    noisy, sigma, _ = method._add_noise(video.target.detach(), torch.Generator().manual_seed(1))
    with torch.no_grad():
        fake = method.predict_clean(method.critic, noisy, sigma, context)
        real = method.predict_clean(method.teacher, noisy, sigma, context)
    expected = (fake - real) / (video.target.detach() - real).abs().mean(dim=(1, 2, 3, 4), keepdim=True)
    torch.testing.assert_close(gradient, expected / expected.numel())


def test_losses_reach_their_own_role_and_never_the_teacher(make_method):
    method = make_method(critic_seed=2)
    output = method.training_step(make_batch(), 0, torch.Generator().manual_seed(0))
    assert set(output.losses) == {"student", "critic"}
    parameters = {role: list(getattr(method, role).parameters()) for role in ("student", "critic")}
    for role, loss in output.losses.items():
        for name, values in parameters.items():
            gradients = torch.autograd.grad(loss, values, retain_graph=True, allow_unused=True)
            touched = any(value is not None and value.abs().max() > 0 for value in gradients)
            assert touched == (name == role), (role, name)
    assert not any(parameter.requires_grad for parameter in method.teacher.parameters())


def test_guidance_extrapolates_from_the_unconditional_score(make_method):
    method = make_method(dataclasses.replace(CONFIG, guidance_scale=3.0))
    video, conditions = make_rollout(method)
    context = method.scored_context(video, conditions)
    gradient = student_gradient(method, video, context)[:, :, -3:]
    noisy, sigma, _ = method._add_noise(video.target.detach(), torch.Generator().manual_seed(1))
    with torch.no_grad():
        told = method.predict_clean(method.teacher, noisy, sigma, context)
        silent = dataclasses.replace(context, text=torch.zeros_like(context.text))
        untold = method.predict_clean(method.teacher, noisy, sigma, silent)
    real = untold + 3 * (told - untold)
    expected = (told - real) / (video.target.detach() - real).abs().mean(dim=(1, 2, 3, 4), keepdim=True)
    assert expected.abs().max() > 0
    torch.testing.assert_close(gradient, expected / expected.numel())


# --- schedule ----------------------------------------------------------------------------------------------------


def test_curriculum_grows_within_its_bounds():
    curriculum = RolloutCurriculum(min_frames=12, max_frames=60, growth_steps=100)
    means = []
    for step in (0, 50, 100, 1000):
        lengths = [curriculum.sample(step, 3, generator_for(0, step, draw)) for draw in range(200)]
        longest = 12 + min(1, step / 100) * 48
        assert min(lengths) >= 12 and max(lengths) <= longest and all(length % 3 == 0 for length in lengths)
        means.append(sum(lengths) / 200)
    assert means[0] == 12 and means[0] < means[1] < means[2] - 5 and abs(means[2] - means[3]) < 4


def test_processes_agree_on_length_and_exit_step(make_method):
    """Batches and noise differ between ranks; the shape of the work may not."""
    config = dataclasses.replace(CONFIG, curriculum=RolloutCurriculum(min_frames=3, max_frames=15, growth_steps=0))
    seen = []
    for rank in range(2):
        method = make_method(config)
        method.student = StepCounter(method.student)
        for step in range(4):
            generator = generator_for(0, step, rank)
            frames = method.training_step(make_batch(), step, generator).metrics["rollout_frames"]
            seen.append((rank, step, frames, sum(call[2] for call in method.student.calls)))
    first = [entry[1:] for entry in seen if entry[0] == 0]
    assert first == [entry[1:] for entry in seen if entry[0] == 1] and len({entry[1] for entry in first}) > 1


@pytest.mark.parametrize(("first", "expected"), [(1, {1, 2, 3, 4}), (3, {3, 4}), (4, {4})])
def test_exit_steps_are_drawn_from_the_first_one_on(make_method, monkeypatch, first, expected):
    method = make_method(dataclasses.replace(CONFIG, first_exit=first))
    seen = []

    def stop(*arguments, **kwargs):
        seen.append(arguments[7])
        raise KeyboardInterrupt

    monkeypatch.setattr("vidgen.forcing.distribution_matching.rollout", stop)
    for step in range(40):
        with pytest.raises(KeyboardInterrupt):
            method.training_step(make_batch(), step, generator_for(0, step))
    assert set(seen) == expected


def test_critic_learns_in_every_step_and_the_student_in_every_nth(make_method):
    method = make_method(dataclasses.replace(CONFIG, student_every=5))
    active = [method.active_optimizers(step) for step in range(10)]
    assert active == ([("critic",)] * 4 + [("student", "critic")]) * 2
    output = method.training_step(make_batch(), 0, torch.Generator().manual_seed(0))
    assert set(output.losses) == {"critic"}


def test_a_slow_memory_that_takes_nothing_in_stops_the_run(make_method):
    config = dataclasses.replace(CONFIG, stalled_after=6, curriculum=RolloutCurriculum(24, 24, 0))
    method = make_method(config, dataclasses.replace(MEMORY, tau=-1.0))
    with pytest.raises(TrainingError, match="raise memory.tau"):
        for step in range(10):
            method.training_step(make_batch(), step, torch.Generator().manual_seed(step))


def test_counters_survive_a_resume(make_method):
    method, resumed = make_method(), make_method()
    method.training_step(make_batch(), 10, torch.Generator().manual_seed(0))
    assert method.decisions > 0
    resumed.load_extra_state(method.extra_state())
    assert (resumed.decisions, resumed.promotions) == (method.decisions, method.promotions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_exit": 5}, "first_exit=5"),
        ({"target_attention": "causal"}, "allowed: 'joint', 'chunked'"),
        ({"sigmas": (0.9, 0.5)}, "start at 1"),
        ({"context": "everything"}, "allowed: 'memory'"),
        ({"target_frames": 30}, "do not fit"),
        ({"guidance_scale": 0.5}, "guidance_scale=0.5"),
        ({"min_sigma": 0.99}, "min_sigma=0.99"),
    ],
)
def test_wrong_settings_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_target_must_be_whole_chunks(make_method):
    with pytest.raises(ConfigError, match="multiple of the chunk"):
        make_method(dataclasses.replace(CONFIG, target_frames=4))
