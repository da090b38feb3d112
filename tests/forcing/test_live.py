"""What would be wrong: a layout that isn't the loop it stands for, false special cases, a rollout with a graph."""

from __future__ import annotations

import copy
import dataclasses
import logging

import pytest
import torch

from vidgen.forcing.live import (
    NO_NOISE,
    CurriculumStage,
    DivisibilityError,
    ForcingSchedule,
    LiveMethod,
    NoiseLevels,
    RolloutConfig,
    RolloutFromTFInitError,
    build_window,
    draw_noise,
    epoch_curriculum,
    forcing_errors,
    rollout,
    target_frames,
    window_mask,
)
from vidgen.models.causal_wan import frame_attention_mask
from vidgen.models.world_dit import WorldDiT
from vidgen.runtime.config import load_config
from vidgen.runtime.device import generator_for
from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.schedulers import flow_sampler
from vidgen.train import OptimizerConfig, TrainConfig, fit

T = 4
FAST = RolloutConfig(steps=2)


def make_model(control_type: str = "vector", window: int = T, seed: int = 0, **overrides) -> WorldDiT:
    torch.manual_seed(seed)
    model = WorldDiT(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=2,
        ffn_dim=16,
        num_layers=2,
        control_type=control_type,
        control_dim=3,
        window=window,
        rope_dims=(4, 2, 2),
        freq_dim=16,
        **overrides,
    )
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def make_clip(window: int = T, batch_size: int = 2, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and, per frame, a position in space: what is seen depends on where the camera is."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch_size, 2, window, 4, 4, generator=generator),
        torch.randn(batch_size, window, 3, generator=generator),
    )


def flip(controls: torch.Tensor) -> torch.Tensor:
    """Positions of the clip played backward."""
    return controls.flip(1)


def relative(controls: torch.Tensor) -> torch.Tensor:
    """Positions as seen from the first of the window."""
    return controls - controls[:, :1]


def as_map(controls: torch.Tensor) -> torch.Tensor:
    return relative(controls).transpose(1, 2)[..., None, None].expand(-1, -1, -1, 4, 4)


def window_of(schedule, latents, rolled, controls, p, encode=relative):
    return build_window(schedule, latents, rolled, controls, p, flip, encode)


def view(sigma: torch.Tensor) -> torch.Tensor:
    return sigma[:, None, :, None, None]


# --- the layout is the loop it stands for ----------------------------------------------------------------------


@pytest.mark.parametrize("control_type", ["vector", "map"])
@pytest.mark.parametrize("context_noise", [NO_NOISE, NoiseLevels()])
@pytest.mark.parametrize("p", [4, 2, 1])
def test_one_forward_over_the_window_equals_a_loop_over_its_slots(control_type, context_noise, p):
    model, encode = make_model(control_type).eval(), as_map if control_type == "map" else relative
    latents, controls = make_clip()
    rolled = torch.randn(latents.shape, generator=torch.Generator().manual_seed(5))
    rolled[:, :, :p] = latents[:, :, :p]
    schedule = dataclasses.replace(ForcingSchedule.live(T, p), context_noise=context_noise)
    window = window_of(schedule, latents, rolled, controls, p, encode)
    sigma, noise = draw_noise(schedule, window, torch.Generator().manual_seed(2))
    together = forcing_errors(model, window, sigma, noise)

    # Independent of the layout: one ordinary causal forward per slot over the frames before it and itself.
    backward, past = latents.flip(2), rolled.flip(2)
    reversed_controls = encode(controls.flip(1))
    for slot in range(T):
        frame = T - p + slot * p // T
        context_level, level = sigma[:, :frame], sigma[:, T + slot : T + slot + 1]
        clean = torch.cat([past[:, :, :frame], backward[:, :, frame : frame + 1]], dim=2)
        levels = torch.cat([context_level, level], dim=1)
        eps = torch.cat([noise[:, :, :frame], noise[:, :, T + slot : T + slot + 1]], dim=2)
        noisy = (1 - view(levels)) * clean + view(levels) * eps
        seen = reversed_controls[:, :, : frame + 1] if control_type == "map" else reversed_controls[:, : frame + 1]
        predicted = model(noisy, levels * 1000, seen).sample[:, :, -1]
        expected = (predicted - (eps - clean)[:, :, -1]).square().mean(dim=(1, 2, 3))
        torch.testing.assert_close(together[:, slot], expected, atol=1e-5, rtol=1e-5)


def test_without_prompts_in_the_context_a_prompt_sees_the_rollout_alone():
    mask = window_mask(8, 2, context_includes_prompts=False)
    assert mask[8:, :8].sum(1).tolist() == [6] * 8
    assert window_mask(8, 2)[8:, :8].sum(1).tolist() == [6] * 4 + [7] * 4
    assert torch.equal(window_mask(8, 8, context_includes_prompts=False), window_mask(8, 8))


@pytest.mark.parametrize(("p", "ids"), [(4, [0, 1, 2, 3]), (2, [2, 2, 3, 3]), (1, [3, 3, 3, 3])])
def test_the_last_prompts_of_the_window_fill_the_slots(p, ids):
    assert target_frames(4, p).tolist() == ids


# --- special cases ---------------------------------------------------------------------------------------------


def test_teacher_forcing_is_the_textbook_loss():
    model = make_model().eval()
    latents, controls = make_clip()
    schedule = ForcingSchedule.teacher_forcing(T)
    window = window_of(schedule, latents, latents, controls, T)
    sigma, noise = draw_noise(schedule, window, torch.Generator().manual_seed(2))
    loss = forcing_errors(model, window, sigma, noise).mean()

    expected = 0.0
    for frame in range(T):  # denoise each frame given the clean ones before it
        level, eps = sigma[:, T + frame], noise[:, :, T + frame]
        noisy = (1 - level[:, None, None, None]) * latents[:, :, frame] + level[:, None, None, None] * eps
        clip = torch.cat([latents[:, :, :frame], noisy.unsqueeze(2)], dim=2)
        levels = torch.cat([torch.zeros(2, frame), 1000 * level[:, None]], dim=1)
        predicted = model(clip, levels, relative(controls)[:, : frame + 1]).sample[:, :, -1]
        expected += (predicted - (eps - latents[:, :, frame])).square().mean() / T
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert not sigma[:, :T].any() and (sigma[:, T:] > 0).all()


def test_diffusion_forcing_is_the_textbook_loss():
    model = make_model().eval()
    latents, controls = make_clip()
    schedule = ForcingSchedule.diffusion_forcing(T)
    window = window_of(schedule, latents, latents, controls, T)
    sigma, noise = draw_noise(schedule, window, torch.Generator().manual_seed(2))
    loss = forcing_errors(model, window, sigma, noise).mean()
    noisy = (1 - view(sigma)) * latents + view(sigma) * noise
    expected = (model(noisy, 1000 * sigma, relative(controls)).sample - (noise - latents)).square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert sigma.shape == (2, T) and sigma.unique().numel() == 2 * T


def test_live_without_rollout_on_a_palindrome_is_diffusion_forcing():
    model = make_model().eval()
    half, half_controls = make_clip(T // 2)
    latents, controls = torch.cat([half, half.flip(2)], dim=2), torch.cat([half_controls, half_controls.flip(1)], 1)
    diffusion, live = ForcingSchedule.diffusion_forcing(T), ForcingSchedule.live(T, T)
    plain = window_of(diffusion, latents, latents, controls, T)
    cycle = window_of(live, latents, latents, controls, T)
    sigma, noise = draw_noise(diffusion, plain, torch.Generator().manual_seed(2))
    expected = forcing_errors(model, plain, sigma, noise)
    given = forcing_errors(model, cycle, torch.cat([sigma, sigma], 1), torch.cat([noise, noise], 2))
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


def count_calls(model: WorldDiT) -> list[torch.Size]:
    calls: list[torch.Size] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(args[0].shape), with_kwargs=True)
    return calls


@pytest.mark.parametrize("name", ["teacher_forcing", "diffusion_forcing", "live"])
def test_all_prompt_frames_means_no_rollout(name):
    model = make_model()
    calls = count_calls(model)
    schedule = ForcingSchedule.live(T, T) if name == "live" else getattr(ForcingSchedule, name)(T)
    latents, controls = make_clip()
    batch = {"latents": latents, "controls": controls}
    LiveMethod(model, schedule, flip, relative, FAST).training_step(batch, 0, torch.Generator().manual_seed(0))
    assert [shape[2] for shape in calls] == [T if name == "diffusion_forcing" else 2 * T]


def test_ablations_differ_from_live_in_what_they_are_named_after():
    live = ForcingSchedule.live(8)
    differences = {}
    for other in (
        ForcingSchedule.live_no_noise(8),
        ForcingSchedule.live_fixed_noise(8),
        ForcingSchedule.no_cycle(8),
        ForcingSchedule.live(8, p=1),
    ):
        fields = [field.name for field in dataclasses.fields(live) if field.name != "name"]
        differences[other.name] = [name for name in fields if getattr(other, name) != getattr(live, name)]
    assert differences == {
        "live_no_noise": ["context_noise"],
        "live_fixed_noise": ["context_noise"],
        "no_cycle": ["direction"],
        "live": ["curriculum"],
    }
    latents, controls = make_clip(8)
    window = window_of(ForcingSchedule.live_fixed_noise(8, sigma=0.3), latents, latents, controls, 2)
    sigma, _ = draw_noise(ForcingSchedule.live_fixed_noise(8, sigma=0.3), window, torch.Generator().manual_seed(0))
    assert torch.equal(sigma[:, :8], torch.full((2, 8), 0.3)) and sigma[:, 8:].unique().numel() == 16


def test_without_a_cycle_the_real_frames_the_rollout_left_are_asked_for():
    latents, controls = make_clip()
    rolled = torch.randn(latents.shape, generator=torch.Generator().manual_seed(5))
    forward = window_of(ForcingSchedule.no_cycle(T, 2), latents, rolled, controls, 2)
    assert torch.equal(forward.latents[:, :, :T], rolled) and not forward.is_reversed
    assert torch.equal(forward.latents[:, :, T:], latents[:, :, [2, 2, 3, 3]])
    backward = window_of(ForcingSchedule.live(T, 2), latents, rolled, controls, 2)
    assert torch.equal(backward.latents[:, :, T:], latents[:, :, [1, 1, 0, 0]]) and backward.is_reversed
    # Controls are made relative to the first frame of the window as it is played.
    assert torch.equal(backward.controls[:, :T], controls.flip(1) - controls[:, -1:])


# --- the mask --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [4, 2, 1])
def test_who_changes_when_a_frame_of_the_window_changes(p):
    model = make_model().eval().requires_grad_(False)
    latents, controls = make_clip(batch_size=1)
    schedule = ForcingSchedule.live(T, p)
    window = window_of(schedule, latents, latents, controls, p)
    sigma, noise = draw_noise(schedule, window, torch.Generator().manual_seed(2))
    noisy = (1 - view(sigma)) * window.latents + view(sigma) * noise

    def output(frames: torch.Tensor) -> torch.Tensor:
        options = {"frame_mask": window.frame_mask, "frame_positions": window.frame_positions}
        return model(frames, 1000 * sigma, window.controls, **options).sample

    before = output(noisy)
    ids = target_frames(T, p)
    for frame in range(2 * T):
        changed = noisy.clone()
        changed[:, :, frame] += 1
        moved = (output(changed) - before).abs().amax(dim=(0, 1, 3, 4))[T:] > 0
        assert torch.equal(moved, ids > frame if frame < T else torch.arange(T) == frame - T)


def test_no_row_is_empty_and_the_math_backend_stays_finite():
    for p in (8, 4, 2, 1):
        mask = window_mask(8, p)
        assert mask.any(1).all() and not mask[:7, 7].any() and not mask[8:, 7].any() and not mask[:8, 8:].any()
        bool_mask = frame_attention_mask(mask, 2)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            value = torch.randn(1, 1, 32, 4)
            assert torch.nn.functional.scaled_dot_product_attention(value, value, value, bool_mask).isfinite().all()


# --- rollout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("control_type", ["vector", "map"])
def test_a_joint_rollout_is_one_chunk_under_the_causal_mask(control_type):
    model, encode = make_model(control_type).eval(), as_map if control_type == "map" else relative
    latents, controls = make_clip()
    config, encoded = RolloutConfig(steps=3), encode(controls)
    written = rollout(model, latents[:, :, :2], encoded, config, torch.Generator().manual_seed(4))

    # Independent: no memory, prompts kept at the next-to-last level with one draw, Euler-free reference of the solver.
    generator = torch.Generator().manual_seed(4)
    sampler = flow_sampler(3)
    level = float(sampler.sigmas[-2])
    prompts = (1 - level) * latents[:, :, :2] + level * torch.randn(2, 2, 2, 4, 4, generator=generator)
    sample = torch.randn(2, 2, 2, 4, 4, generator=generator)
    with torch.no_grad():
        for timestep in sampler.timesteps:
            levels = torch.tensor([[1000 * level] * 2 + [float(timestep)] * 2] * 2)
            velocity = model(torch.cat([prompts, sample], 2), levels, encoded).sample[:, :, 2:]
            sample = sampler.step(velocity, timestep, sample).prev_sample
    torch.testing.assert_close(written[:, :, 2:], sample, atol=1e-4, rtol=1e-4)
    assert torch.equal(written[:, :, :2], latents[:, :, :2])


def test_a_framewise_rollout_of_the_last_frame_is_the_joint_one():
    model = make_model().eval()
    latents, controls = make_clip()

    def written(mode: str, num_prompts: int) -> torch.Tensor:
        config = RolloutConfig(mode=mode, steps=2, context_sigma=0.1)
        generator = torch.Generator().manual_seed(4)
        return rollout(model, latents[:, :, :num_prompts], relative(controls), config, generator)

    assert torch.equal(written("framewise", 3), written("joint", 3))
    assert not torch.equal(written("framewise", 1), written("joint", 1))


def test_a_framewise_rollout_adds_frames_one_by_one():
    model = make_model()
    calls = count_calls(model)
    latents, controls = make_clip()
    config = RolloutConfig(mode="framewise", steps=3)
    rollout(model, latents[:, :, :2], controls, config, torch.Generator().manual_seed(0))
    assert [shape[2] for shape in calls] == [2] + [1] * 3 + [1] + [1] * 3
    assert model.training


def test_gradients_do_not_know_whose_rollout_it_was():
    latents, controls = make_clip()
    model = make_model()
    method = LiveMethod(model, ForcingSchedule.live(T, 2), flip, relative, FAST)
    step = method.training_step({"latents": latents, "controls": controls}, 0, torch.Generator().manual_seed(3))
    step.losses["transformer"].backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    generator = torch.Generator().manual_seed(3)
    rolled = rollout(copy.deepcopy(model), latents[:, :, :2], relative(controls), FAST, generator)
    assert not rolled.requires_grad
    window = window_of(method.schedule, latents, rolled, controls, 2)
    forcing_errors(model, window, *draw_noise(method.schedule, window, generator)).mean().backward()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), expected, strict=True))
    assert any(gradient.abs().max() > 0 for gradient in expected)


# --- noise and curriculum --------------------------------------------------------------------------------------


def test_levels_are_thousandths_warped_toward_noise():
    generator = torch.Generator().manual_seed(0)
    uniform = NoiseLevels().sample((20000,), generator)
    unwarped = 1000 * uniform / (3 - 2 * uniform)
    torch.testing.assert_close(unwarped, unwarped.round(), atol=1e-2, rtol=0)
    assert abs(float(unwarped.mean()) - 499.5) < 8 and unwarped.max() < 999.5
    normal = NoiseLevels(kind="logit_normal", shift=1.0, mean=1.0, std=0.5).sample((20000,), generator)
    logit = torch.logit(normal.clamp(1e-4, 1 - 1e-4))
    assert float(logit.mean()) == pytest.approx(1.0, abs=0.02) and float(logit.std()) == pytest.approx(0.5, abs=0.02)


def prompts_over(schedule: ForcingSchedule, steps: int) -> list[int]:
    return [schedule.prompt_frames(step, steps, generator_for(0, step)) for step in range(steps)]


def test_prompt_frames_fall_as_the_curriculum_says():
    assert prompts_over(ForcingSchedule.live(32), 20) == [32] * 2 + [8] * 4 + [2] * 14
    released = ForcingSchedule.live(32, epoch_curriculum(32, steps_per_epoch=3))
    assert prompts_over(released, 15) == [32] * 3 + [8] * 3 + [2] * 9
    assert prompts_over(ForcingSchedule.live(8, p=1), 3) == [1, 1, 1]
    assert prompts_over(ForcingSchedule.teacher_forcing(8), 3) == [8, 8, 8]


def test_mixtures_are_drawn_with_their_weights():
    weights = {32: 1.0, 4: 1.0, 2: 8.0}
    schedule = ForcingSchedule.live(32, [CurriculumStage(weights)])
    drawn = prompts_over(schedule, 2000)
    expected = {p: 2000 * weight / 10 for p, weight in weights.items()}
    assert set(drawn) == set(weights)
    chi_square = sum((drawn.count(p) - number) ** 2 / number for p, number in expected.items())
    assert chi_square < 13.8  # two degrees of freedom, one in a thousand
    assert drawn == prompts_over(schedule, 2000)


def test_a_schedule_is_written_in_yaml():
    source = {
        "window": 32,
        "name": "live",
        "context": "rollout",
        "direction": "reverse",
        "curriculum": [{"until": 0.1, "p": 32}, {"until": 0.5, "p": {32: 0.3, 8: 0.7}}, {"p": 2}],
        "context_noise": {"kind": "constant", "sigma": 0.3},
    }
    schedule = load_config(ForcingSchedule, source)
    assert [stage.weights for stage in schedule.curriculum] == [{32: 1.0}, {32: 0.3, 8: 0.7}, {2: 1.0}]
    assert schedule.context_noise.sigma == 0.3 and schedule.target_noise.kind == "logit_normal"
    steps = load_config(ForcingSchedule, {**source, "curriculum": [{"until": 3, "p": 32}, {"p": 2}]})
    assert prompts_over(steps, 5) == [32, 32, 32, 2, 2]


# --- training --------------------------------------------------------------------------------------------------


class Crash(Exception):
    pass


class Clips(torch.utils.data.Dataset):
    """Clips of a world that is a function of the position: brightness follows the first coordinate."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.controls = torch.randn(16, T, 3, generator=generator).cumsum(1)
        self.stop_at: int | None = None

    def __len__(self) -> int:
        return len(self.controls)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.stop_at is not None:
            self.stop_at -= 1
            if self.stop_at < 0:
                raise Crash
        latents = self.controls[index, :, 0].sin()[None, :, None, None].expand(2, -1, 4, 4)
        return {"latents": latents.clone(), "controls": self.controls[index]}


def live_method() -> LiveMethod:
    stages = [CurriculumStage(T, until=2), CurriculumStage({2: 0.5, 1: 0.5})]
    schedule = ForcingSchedule.live(T, stages)
    return LiveMethod(make_model(direction_embedding=True), schedule, flip, relative, FAST, total_steps=6)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    def config(name: str) -> TrainConfig:
        optimizers = {"transformer": OptimizerConfig(lr=1e-3)}
        return TrainConfig(str(tmp_path / name), 6, optimizers, batch_size=2, checkpoint_every=3, ema_decay=0.9,
                           log_every=1)  # fmt: skip

    straight, resumed = live_method(), live_method()
    fit(straight, Clips(), config("straight"))
    interrupted = Clips()
    interrupted.stop_at = 2 * 3 + 1
    with pytest.raises(Crash):
        fit(live_method(), interrupted, config("resumed"))
    assert [path.name for path in (tmp_path / "resumed").glob("step_*")] == ["step_000003"]
    fit(resumed, Clips(), config("resumed"))
    for name, tensor in straight.transformer.state_dict().items():
        assert torch.equal(tensor, resumed.transformer.state_dict()[name]), name
    saved = WorldDiT.from_pretrained(tmp_path / "resumed" / "weights" / "transformer")
    assert saved.config.forcing == "live"


def test_training_teaches_the_world():
    method = LiveMethod(make_model(), ForcingSchedule.diffusion_forcing(T), validation=lambda: batch, total_steps=60)
    clips = Clips()
    batch = {
        "latents": torch.stack([clips[index]["latents"] for index in range(16)]),
        "controls": clips.controls,
    }
    before = method.validate()["validation_loss"]
    assert method.validate()["validation_loss"] == before
    optimizer = torch.optim.Adam(method.transformer.parameters(), lr=1e-2)
    for step in range(60):
        method.training_step(batch, step, torch.Generator().manual_seed(step)).losses["transformer"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert method.validate()["validation_loss"] < 0.6 * before


def test_reversed_clips_are_told_apart_by_the_direction_embedding():
    model = make_model(direction_embedding=True)
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("time_direction")), with_kwargs=True
    )
    latents, controls = make_clip()
    for schedule in (ForcingSchedule.live(T, 2), ForcingSchedule.no_cycle(T, 2)):
        seen.clear()
        method = LiveMethod(model, schedule, flip, relative, FAST)
        method.training_step({"latents": latents, "controls": controls}, 0, torch.Generator().manual_seed(0))
        assert all(direction is None for direction in seen[:-1])  # the rollout plays forward
        assert seen[-1].tolist() == [int(schedule.direction == "reverse")] * 2


# --- user errors -----------------------------------------------------------------------------------------------


def test_a_rollout_from_a_teacher_forcing_model_must_be_framewise():
    model = make_model(forcing="teacher_forcing")
    with pytest.raises(RolloutFromTFInitError, match="diffusion_forcing, or set mode='framewise'"):
        LiveMethod(model, ForcingSchedule.live(T), flip)
    LiveMethod(model, ForcingSchedule.teacher_forcing(T))  # nothing is rolled out
    LiveMethod(model, ForcingSchedule.live(T), flip, rollout_config=RolloutConfig(mode="framewise", context_sigma=0.0))


def test_settings_that_work_badly_are_warned_about(caplog):
    with caplog.at_level(logging.WARNING, logger="vidgen.forcing.live"):
        LiveMethod(make_model(), ForcingSchedule.live(T), flip)
        assert not caplog.messages
        LiveMethod(make_model(), ForcingSchedule.live_no_noise(T), flip)
        LiveMethod(make_model(), ForcingSchedule.live(T, 1), flip)
    assert ["without noise" in message for message in caplog.messages] == [True, False]
    assert "starts with 1 prompt frame" in caplog.messages[1]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: ForcingSchedule.live(32, 5), DivisibilityError, "p=5 .* window of 32 frames; nearest: 4"),
        (lambda: ForcingSchedule.live(8, 0), DivisibilityError, "p=0"),
        (lambda: target_frames(6, 4), DivisibilityError,
         "nearest: 3, allowed: 1, 2, 3, 6"),
        (lambda: ForcingSchedule.live(8, [CurriculumStage(8, until=0.5)]), ConfigError, "and the last none"),
        (lambda: ForcingSchedule.live(8, [CurriculumStage(8), CurriculumStage(2)]), ConfigError, "needs `until`"),
        (lambda: ForcingSchedule.live(8, [CurriculumStage(8, 5), CurriculumStage(4, 0.5), CurriculumStage(2)]),
         ConfigError, "all as fractions or all as steps"),
        (lambda: ForcingSchedule.live(8, [CurriculumStage({8: 0.0})]), ConfigError, "weights"),
        (lambda: ForcingSchedule(8, [CurriculumStage(4)], "x"), ConfigError, "real context has p = window"),
        (lambda: NoiseLevels(kind="beta"), ConfigError, "kind='beta'"),
        (lambda: NoiseLevels(shift=0.0), ConfigError, "shift"),
        (lambda: RolloutConfig(mode="all"), ConfigError, "joint, framewise"),
        (lambda: RolloutConfig(steps=0), ConfigError, "num_inference_steps"),
        (lambda: RolloutConfig(context_sigma=2.0), ConfigError, "context_sigma"),
        (lambda: LiveMethod(make_model(window=8), ForcingSchedule.live(T), flip), ConfigError, "windows of 8"),
        (lambda: LiveMethod(make_model(), ForcingSchedule.live(T)), ConfigError, "needs reverse_controls"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_a_batch_of_another_length_is_refused():
    latents, controls = make_clip(2)
    method = LiveMethod(make_model(), ForcingSchedule.diffusion_forcing(T))
    with pytest.raises(VidgenError, match="2 frames and 2 controls; the window is 4"):
        method.training_step({"latents": latents, "controls": controls}, 0, torch.Generator())
