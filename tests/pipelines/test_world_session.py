"""What would be wrong: a cache that changes frames, a memory that is read at wrong places, rows that aren't alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vidgen.controls import (
    CAMERA_DELTA_SPEC,
    CAMERA_SPEC,
    ActionColumn,
    ActionSpec,
    ButtonControls,
    ControlEncoder,
    ControlError,
    DeltaControls,
    FloorPlan,
    PoseControls,
    Walk,
    integrate_planar,
    join_cameras,
    normalize_to_first,
    planar_delta_spec,
    planar_deltas,
    plucker_rays,
    walking_cameras,
)
from vidgen.memory import FullMemoryConfig, SlidingWindowMemoryConfig, SlowFastMemoryConfig
from vidgen.pipelines import WorldModelPipeline, WorldSession, WorldSessionError
from vidgen.runtime.device import generator_for
from vidgen.runtime.errors import ConfigError, VidgenError
from vidgen.schedulers import flow_sampler

WINDOW, STEPS, SIZE, SIGMA = 4, 2, 8, 0.3
MOVES = planar_delta_spec("cells", **{"forward": {"forward": 0.5}, "turn left": {"turn left": 0.4}})
DELTAS = ControlEncoder(DeltaControls(MOVES), "vector", units=(0.5, 0.5, 0.4))
CAMERAS = ControlEncoder(PoseControls(CAMERA_SPEC), "map", units=(0.7,), latent_size=(4, 4))
BUTTONS = ControlEncoder(
    ButtonControls(ActionSpec((ActionColumn("fire", "pressed", 0, 1),)), {}, direction_embedding=True), units=(1.0,)
)
# Promotes every frame, so that the context is sink, slow and fast frames with gaps between.
SLOW_FAST = SlowFastMemoryConfig(sink=1, slow=1, fast=2, tau=math.inf, interval=2)


@pytest.fixture(scope="module")
def pipe(make_world_model: Callable[..., WorldModelPipeline]) -> WorldModelPipeline:
    return make_world_model(DELTAS)


@pytest.fixture(scope="module")
def camera_pipe(make_world_model: Callable[..., WorldModelPipeline]) -> WorldModelPipeline:
    return make_world_model(CAMERAS)


def make_frames(*leading: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*leading, SIZE, SIZE, 3), dtype=np.uint8)


def make_deltas(*leading: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.6 * torch.randn(*leading, 3, generator=generator, dtype=torch.float64)


def make_cameras(num_frames: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    skew = torch.randn(num_frames, 3, 3, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.matrix_exp(0.3 * (skew - skew.mT))
    translation = torch.randn(num_frames, 3, generator=generator, dtype=torch.float64)
    return join_cameras(torch.tensor([0.8, 0.9, 0.5, 0.5]).double().expand(num_frames, 4), rotation, translation)


def play(session: WorldSession, controls: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """Frames, and the newest latents of row 0 after each step."""
    frames, latents = [], []
    for control in controls:
        frames.append(session.step(control))
        latents.append(session.latents()[0][:, -1])
    return np.stack(frames), torch.stack(latents)


def encode(pipe: WorldModelPipeline, frames: np.ndarray) -> torch.Tensor:
    """`(channels, frames, h, w)`"""
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        return ((pipe.vae.encode(pixels).latent_dist.mean - 0.1) * 1.3).transpose(0, 1)


def sample_frame(pipe: WorldModelPipeline, velocity: Any, seed: int, index: int) -> torch.Tensor:
    """The sampler's loop, written out; `velocity(sample, timestep)` of `(channels, h, w)`."""
    sampler = flow_sampler(STEPS)
    sample = torch.randn(2, 1, 4, 4, generator=generator_for(seed, index, 0))[:, 0]
    for timestep in sampler.timesteps:
        sample = sampler.step(velocity(sample, timestep), timestep, sample, return_dict=False)[0]
    return sample


@torch.no_grad()
def naive_play(pipe: WorldModelPipeline, latents: torch.Tensor, window_controls: Any, num_frames: int, seed: int):
    """One forward over the whole window for each denoising step, in a plain loop over frames.

    `window_controls(first, last)` are those of a window as the transformer takes them, with a batch axis.
    """
    made = []
    while latents.shape[1] < num_frames:
        index = latents.shape[1]
        first = max(0, index - (WINDOW - 1))
        context = latents[:, first:]
        noise = torch.randn(context.shape, generator=generator_for(seed, index, 1))
        context = (1 - SIGMA) * context + SIGMA * noise

        def velocity(sample, timestep, context=context, first=first, index=index):
            levels = torch.tensor([[1000 * SIGMA] * context.shape[1] + [float(timestep)]])
            frames = torch.cat([context, sample[:, None]], dim=1)[None]
            return pipe.transformer(frames, levels, window_controls(first, index)).sample[0, :, -1]

        made.append(sample_frame(pipe, velocity, seed, index))
        latents = torch.cat([latents, made[-1][:, None]], dim=1)
    return torch.stack(made)


# --- the same frames by every way ------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["none", "frame"])
def test_frames_of_a_window_are_those_of_a_plain_loop(pipe, cache):
    frames, deltas = make_frames(2), make_deltas(8)
    session = pipe.open_session(frames, deltas[:2], cache=cache, seed=5)
    _, latents = play(session, deltas[2:])

    def window_controls(first, last):
        window = deltas[first : last + 1].clone()
        window[0] = 0
        return (window / torch.tensor([0.5, 0.5, 0.4]))[None].float()

    expected = naive_play(pipe, encode(pipe, frames), window_controls, 8, seed=5)
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-5)
    assert (session.num_frames, session.context_length) == (8, WINDOW - 1)
    assert session.rows[0].frame_ids == (5, 6, 7)


@pytest.mark.parametrize("cache", ["none", "frame"])
def test_poses_are_relative_to_the_first_frame_of_the_window_however_far_it_slid(camera_pipe, cache):
    frames, cameras = make_frames(2), make_cameras(8)
    _, latents = play(camera_pipe.open_session(frames, cameras[:2], cache=cache), cameras[2:])

    def window_controls(first, last):
        rays = plucker_rays(normalize_to_first(cameras[first : last + 1]), 4, 4)
        rays[:, 3:] /= 0.7
        return rays.transpose(0, 1)[None].float()

    expected = naive_play(camera_pipe, encode(camera_pipe, frames), window_controls, 8, seed=0)
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("encoder", [DELTAS, CAMERAS])
def test_keys_made_once_per_frame_give_the_frames_of_keys_made_with_every_step(encoder, pipe, camera_pipe):
    controls = make_deltas(2, 9) if encoder is DELTAS else torch.stack([make_cameras(9, seed) for seed in (0, 1)])
    which = pipe if encoder is DELTAS else camera_pipe
    latents = {}
    for cache in ("none", "frame"):
        session = which.open_session(make_frames(2, 3), controls[:, :3], cache=cache)
        for frame in range(3, 9):
            session.step(controls[:, frame])
        latents[cache] = torch.stack(session.latents())
    torch.testing.assert_close(latents["frame"], latents["none"], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rolling_frames_are_those_of_one_long_sequence_under_a_banded_mask(pipe, make_world_model):
    frames, deltas, total = make_frames(3), make_deltas(9), 9
    session = pipe.open_session(frames, deltas[:3], cache="rolling", seed=4)
    _, latents = play(session, deltas[3:])

    # The same weights with room for positions 0 to 8: a whole forward for each denoising step, nothing cached.
    long_model = make_world_model(window=total).transformer
    controls = deltas.clone()
    controls[0] = 0
    controls = (controls / torch.tensor([0.5, 0.5, 0.4]))[None].float()
    age = torch.arange(total)[:, None] - torch.arange(total)
    band = (age >= 0) & (age < WINDOW)

    clean = encode(pipe, frames)
    noisy = torch.zeros(2, 0, 4, 4)
    for index in range(total):
        if index >= 3:

            def velocity(sample, timestep, noisy=noisy, index=index):
                levels = torch.tensor([[1000 * SIGMA] * index + [float(timestep)]])
                sequence = torch.cat([noisy, sample[:, None]], dim=1)[None]
                mask = band[: index + 1, : index + 1]
                return long_model(sequence, levels, controls[:, : index + 1], frame_mask=mask).sample[0, :, -1]

            clean = torch.cat([clean, sample_frame(pipe, velocity, 4, index)[:, None]], dim=1)
        noise = torch.randn(2, 1, 4, 4, generator=generator_for(4, index, 2))
        noisy = torch.cat([noisy, (1 - SIGMA) * clean[:, index : index + 1] + SIGMA * noise], dim=1)
    torch.testing.assert_close(latents, clean[:, 3:].transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert session.memory.frame_ids.tolist() == [[6, 7, 8]]


@torch.no_grad()
def test_a_memory_that_leaves_frames_out_gives_the_motion_between_those_it_keeps(pipe):
    frames, deltas = make_frames(1), make_deltas(7)
    session = pipe.open_session(frames, cache="frame", memory=SLOW_FAST, seed=3)
    play(session, deltas[1:5])
    row = session.rows[0]
    assert row.frame_ids == (0, 3, 4)

    poses = integrate_planar(torch.zeros(3).double(), deltas)
    between = planar_deltas(poses[[0, 3, 4, 5]])
    controls = (between / torch.tensor([0.5, 0.5, 0.4]))[None].float()
    noise = torch.randn(row.latents.shape, generator=generator_for(3, 5, 1))
    context = (1 - SIGMA) * row.latents + SIGMA * noise

    def velocity(sample, timestep):
        levels = torch.tensor([[1000 * SIGMA] * 3 + [float(timestep)]])
        return pipe.transformer(torch.cat([context, sample[:, None]], dim=1)[None], levels, controls).sample[0, :, -1]

    session.step(deltas[5])
    expected = sample_frame(pipe, velocity, 3, 5)
    torch.testing.assert_close(session.latents()[0][:, -1], expected, atol=1e-5, rtol=1e-5)
    assert session.rows[0].frame_ids == (0, 5)  # promoted while it is the newest: one frame of the window, not two


CAMERA_DELTAS = ControlEncoder(DeltaControls(CAMERA_DELTA_SPEC), "vector", units=(1.0,) * 6)


@pytest.mark.parametrize("encoder", [DELTAS, CAMERA_DELTAS, CAMERAS], ids=["planar", "spatial", "absolute"])
def test_a_memory_of_the_newest_frames_is_the_window(encoder, make_world_model):
    pipe = make_world_model(encoder)
    columns = encoder.controls.spec.width
    controls = make_cameras(8) if encoder is CAMERAS else 0.4 * torch.randn(8, columns, dtype=torch.float64)
    latents = []
    for memory in (None, SlidingWindowMemoryConfig(window=WINDOW)):
        session = pipe.open_session(make_frames(1), controls[:1], memory=memory)
        latents.append(play(session, controls[1:])[1])
        assert session.rows[0].frame_ids == (5, 6, 7)
    torch.testing.assert_close(latents[0], latents[1], atol=1e-5, rtol=1e-5)


def test_rolling_keeps_the_keys_that_its_memory_chooses_within_the_trained_positions(pipe):
    session = pipe.open_session(make_frames(1), cache="rolling", memory=SLOW_FAST)
    plain = pipe.open_session(make_frames(1), cache="rolling")
    deltas = make_deltas(8)
    _, latents = play(session, deltas)
    _, plain_latents = play(plain, deltas)
    assert session.memory.frame_ids.tolist() == [[0, 7, 8]]
    assert session.rows[0].frame_ids == (0, 7, 8)
    assert torch.equal(latents[:3], plain_latents[:3])  # nothing was dropped yet
    assert (latents[4:] - plain_latents[4:]).abs().amax() > 1e-3


# --- sessions --------------------------------------------------------------------------------------------------

WAYS = [("none", None), ("frame", None), ("frame", SLOW_FAST), ("rolling", None), ("rolling", SLOW_FAST)]


@pytest.mark.parametrize(("cache", "memory"), WAYS)
def test_a_restored_moment_is_played_on_bit_for_bit(pipe, cache, memory):
    deltas = make_deltas(12)
    session = pipe.open_session(make_frames(2), deltas[:2], cache=cache, memory=memory)
    play(session, deltas[2:5])
    moment = session.snapshot()
    kept = [row.latents.clone() for row in moment.rows]
    frames, latents = play(session, deltas[5:])
    returned = frames.copy()

    session.restore(moment)
    play(session, -deltas[5:])  # another future, which must not reach back into the moment
    session.restore(moment)
    again, latents_again = play(session, deltas[5:])
    assert np.array_equal(again, returned) and torch.equal(latents, latents_again)
    assert np.array_equal(frames, returned)
    assert all(torch.equal(before, row.latents) for before, row in zip(kept, moment.rows, strict=True))

    fork = pipe.open_session(make_frames(1, seed=9), cache=cache, memory=memory)
    fork.restore(moment)
    assert np.array_equal(play(fork, deltas[5:])[0], returned)


@pytest.mark.parametrize(("cache", "memory"), WAYS)
def test_rows_of_a_batch_are_sessions_of_their_own(pipe, cache, memory):
    prompts, deltas = make_frames(3, 2), make_deltas(3, 8)
    batch = pipe.open_session(prompts, deltas[:, :2], cache=cache, memory=memory, seed=[7, 1, 7])
    for frame in range(2, 8):
        frames = batch.step(deltas[:, frame])
    for row, seed in enumerate((7, 1, 7)):
        single = pipe.open_session(prompts[row], deltas[row, :2], cache=cache, memory=memory, seed=seed)
        last, _ = play(single, deltas[row, 2:])
        torch.testing.assert_close(batch.latents()[row], single.latents()[0], atol=1e-5, rtol=1e-5)
        assert batch.rows[row].frame_ids == single.rows[0].frame_ids
        assert np.abs(last[-1].astype(int) - frames[row]).max() <= 1


@pytest.mark.parametrize("cache", ["frame", "rolling"])
def test_rows_choose_what_they_remember_on_their_own(cache, make_world_model):
    pipe = make_world_model(window=6)
    prompts, deltas = make_frames(4, 1), make_deltas(4, 9)
    sizes = {"sink": 1, "slow": 2, "fast": 2, "interval": 1}
    probe = pipe.open_session(prompts, deltas[:, :1], cache="rolling", memory=SlowFastMemoryConfig(**sizes))
    for frame in range(1, 9):
        probe.step(deltas[:, frame])
    memory = SlowFastMemoryConfig(**sizes, tau=probe.memory.statistics()["suggested_tau"])

    batch = pipe.open_session(prompts, deltas[:, :1], cache=cache, memory=memory)
    for frame in range(1, 9):
        batch.step(deltas[:, frame])
    assert len({row.frame_ids for row in batch.rows}) > 1
    for row in range(4):
        single = pipe.open_session(prompts[row], deltas[row, :1], cache=cache, memory=memory, seed=row)
        play(single, deltas[row, 1:])
        assert batch.rows[row].frame_ids == single.rows[0].frame_ids
        torch.testing.assert_close(batch.latents()[row], single.latents()[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("cache", "memory"), WAYS[:3])
def test_a_row_that_begins_again_is_a_session_of_its_own(pipe, cache, memory):
    deltas = make_deltas(3, 9)
    batch = pipe.open_session(make_frames(3, 1), cache=cache, memory=memory)
    for frame in range(1, 4):
        batch.step(deltas[:, frame])
    prompts = make_frames(2, 2, seed=8)
    batch.reset_rows([2, 0], prompts, deltas[[2, 0], 4:6], seeds=[11, 12])
    assert [row.num_frames for row in batch.rows] == [2, 4, 2]
    for frame in range(6, 9):
        batch.step(deltas[:, frame])

    for row, prompt, seed in ((2, prompts[0], 11), (0, prompts[1], 12)):
        single = pipe.open_session(prompt, deltas[row, 4:6], cache=cache, memory=memory, seed=seed)
        play(single, deltas[row, 6:])
        torch.testing.assert_close(batch.latents()[row], single.latents()[0], atol=1e-5, rtol=1e-5)
    undisturbed = pipe.open_session(make_frames(3, 1)[1], cache=cache, memory=memory, seed=1)
    play(undisturbed, torch.cat([deltas[1, 1:4], deltas[1, 6:]]))
    torch.testing.assert_close(batch.latents()[1], undisturbed.latents()[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("cache", "memory"), WAYS)
def test_appended_frames_are_a_longer_prompt(pipe, cache, memory):
    frames, deltas = make_frames(3), make_deltas(6)
    whole = pipe.open_session(frames, deltas[:3], cache=cache, memory=memory)
    grown = pipe.open_session(frames[:1], deltas[:1], cache=cache, memory=memory)
    for frame, control in zip(frames[1:], deltas[1:3], strict=True):
        grown.append_frame(frame, control)
    # An encoder may sum three frames at once in another order than one by one.
    difference = play(whole, deltas[3:])[0].astype(int) - play(grown, deltas[3:])[0]
    assert np.abs(difference).max() <= 1
    torch.testing.assert_close(whole.latents()[0], grown.latents()[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("cache", "memory"), WAYS)
def test_the_same_seed_gives_the_same_bytes_and_another_does_not(pipe, cache, memory):
    deltas = make_deltas(5)
    session = pipe.open_session(make_frames(1), cache=cache, memory=memory, seed=2)
    frames, latents = play(session, deltas)
    session.reset()
    assert np.array_equal(play(session, deltas)[0], frames)
    session.reset(seed=3)
    assert (play(session, deltas)[1] - latents).abs().amax() > 1e-2
    session.reset(make_frames(1, seed=4), seed=2)
    _, other_latents = play(session, deltas)
    assert (other_latents - latents).abs().amax() > 1e-3


def test_row_r_of_a_seeded_batch_is_a_single_session_with_r_added(pipe):
    batch = pipe.open_session(make_frames(1, 1).repeat(2, axis=0), seed=10)
    single = pipe.open_session(make_frames(1, 1)[0], seed=11)
    assert [row.seed for row in batch.rows] == [10, 11]
    batch.step([])
    single.step([])
    torch.testing.assert_close(batch.latents()[1], single.latents()[0], atol=1e-5, rtol=1e-5)


def test_named_choices_are_held_at_the_same_time(pipe):
    names, numbers, other = (pipe.open_session(make_frames(1)) for _ in range(3))
    assert np.array_equal(names.step(["forward", "turn left"]), numbers.step([0.5, 0.0, 0.4]))
    assert np.array_equal(names.step("forward"), numbers.step(np.array([0.5, 0, 0])))
    assert np.array_equal(names.step([]), numbers.step(torch.zeros(3)))
    other.step(["turn left"])
    assert (other.latents()[0][:, -1] - names.latents()[0][:, 1]).abs().amax() > 1e-3
    with pytest.raises(ConfigError, match="did you mean 'forward'"):
        names.step(["forwards"])


def test_every_way_listens_to_controls_and_to_the_past(pipe):
    for cache, memory in WAYS:
        latents = []
        for sign, seed in ((1, 0), (-1, 0), (1, 1)):
            session = pipe.open_session(make_frames(1, seed=seed), cache=cache, memory=memory)
            session.step(sign * make_deltas())
            latents.append(session.latents()[0][:, -1])
        assert (latents[0] - latents[1]).abs().amax() > 1e-3, cache
        assert (latents[0] - latents[2]).abs().amax() > 1e-4, cache


def test_decoded_frames_are_the_rounded_picture_of_the_latents(pipe):
    session = pipe.open_session(make_frames(1))
    frame = session.step(["forward"])
    with torch.no_grad():
        pixels = pipe.vae.decode(session.latents()[0][None, :, -1] / 1.3 + 0.1).sample[0]
    expected = ((pixels.permute(1, 2, 0) + 1) / 2 * 255).clamp(0, 255)
    assert frame.shape == (SIZE, SIZE, 3) and frame.dtype == np.uint8
    assert np.abs(frame - expected.numpy()).max() <= 0.501


def test_stages_of_a_step_are_timed(pipe, monkeypatch):
    session = pipe.open_session(make_frames(1))
    assert session.stats["denoise"] == {"mean": 0.0, "last": 0.0}
    now = iter(range(1000))
    monkeypatch.setattr("vidgen.pipelines.world_session.time.perf_counter", lambda: float(next(now)))
    session.step([])
    session.append_frame(make_frames(), [])  # no step
    session.step([])
    # One look at the clock at each end of a stage: a second each.
    expected = {"mean": 1000.0, "last": 1000.0}
    assert session.stats == {stage: expected for stage in ("encode", "context", "denoise", "decode")}


# --- noise of the context --------------------------------------------------------------------------------------


def test_the_context_gets_the_next_to_last_level_and_clean_frames_after_teacher_forcing(make_world_model):
    default = make_world_model(context_sigma=None)
    assert default.open_session(make_frames(1)).context_sigma == pytest.approx(float(flow_sampler(STEPS).sigmas[-2]))
    sigma = default.open_session(make_frames(1), num_inference_steps=18).context_sigma
    assert sigma == pytest.approx(0.1499, abs=1e-4)
    assert default.open_session(make_frames(1), context_sigma=0.05).context_sigma == 0.05
    with pytest.raises(ConfigError, match="context_sigma"):
        default.open_session(make_frames(1), num_inference_steps=1)

    taught = make_world_model(context_sigma=None, forcing="teacher_forcing")
    levels = []
    taught.transformer.register_forward_pre_hook(lambda _, args: levels.append((args[0].clone(), args[1].clone())))
    session = taught.open_session(make_frames(2), torch.zeros(2, 3))
    before = session.latents()[0]
    session.step(["forward"])
    assert session.context_sigma == 0
    assert torch.equal(levels[0][0][0], before) and not levels[0][1].any()
    assert (
        make_world_model(context_sigma=0.2, forcing="teacher_forcing").open_session(make_frames(1)).context_sigma
        == 0.2
    )


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "all"}, "'none', 'frame', 'rolling'"),
        ({"cache": "none", "memory": SLOW_FAST}, "allowed: 'frame'"),
        ({"memory": "slow_fast"}, "KVMemoryConfig"),
        ({"memory": SlowFastMemoryConfig(sink=1, slow=2, fast=2)}, "keeps up to 4 frames.*trained on 4"),
        ({"memory": SlidingWindowMemoryConfig(window=4, positions="absolute")}, "bounded"),
        ({"memory": SlowFastMemoryConfig(sink=1, slow=1, fast=2, scope="per_layer")}, "global"),
        ({"cache": "rolling", "memory": FullMemoryConfig(max_frames=4)}, "keeps up to 4"),
        ({"num_inference_steps": 0}, "at least 1"),
        ({"context_sigma": 1.0}, "below 1"),
        ({"seed": [1, 2]}, "2 seeds are given for 1 rows"),
        ({"prompt_frames": make_frames(4), "prompt_controls": make_deltas(4)}, "4 frames.*sees 3"),
        ({"prompt_frames": make_frames(2)}, "missing for 2"),
        ({"prompt_frames": make_frames(2), "prompt_controls": make_deltas(3)}, "3 frames for a clip of 2"),
        ({"prompt_controls": torch.zeros(1, 2)}, "forward, left, turn left"),
        ({"prompt_controls": torch.tensor([[math.nan, 0, 0]])}, "forward is nan"),
        ({"prompt_frames": make_frames()}, r"uint8 \(batch, frames"),
        ({"prompt_frames": make_frames(1) / 255}, "float64"),
        ({"prompt_frames": np.zeros((1, 9, 8, 3), np.uint8)}, "9x8 pixels.*8x8"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(pipe, options, message):
    arguments = {"prompt_frames": make_frames(1), **options}
    with pytest.raises(VidgenError, match=message):
        pipe.open_session(**arguments)


def test_a_session_refuses_what_does_not_fit_and_stays_as_it_was(pipe):
    session = pipe.open_session(make_frames(2, 1))
    session.step([])
    moment = session.snapshot()
    for control, message in (
        (torch.zeros(2), "forward, left, turn left"),
        (torch.zeros(3, 3), r"\(2, 3\)"),
        (torch.tensor([0.0, 0.0, 4.0]), "turn left is 4"),
    ):
        with pytest.raises(ControlError, match=message):
            session.step(control)
    with pytest.raises(WorldSessionError, match="16x8 pixels; this world has 8x8"):
        session.append_frame(np.zeros((2, 16, 8, 3), np.uint8), [])
    with pytest.raises(WorldSessionError, match="1 videos are given for 2"):
        session.append_frame(make_frames(1), [])
    with pytest.raises(WorldSessionError, match="from 0 to 1"):
        session.reset_rows([2], make_frames(1, 1), None, [0])
    with pytest.raises(WorldSessionError, match="without prompt_frames"):
        session.reset(prompt_controls=torch.zeros(1, 3))
    with pytest.raises(WorldSessionError, match="2 rows of 4x4 latent cells.*1 rows"):
        pipe.open_session(make_frames(1)).restore(moment)
    assert session.snapshot() is moment


def test_rolling_is_refused_where_every_key_changes_when_the_window_slides(camera_pipe):
    with pytest.raises(ConfigError, match="control_frame='window'.*'frame'"):
        camera_pipe.open_session(make_frames(1), make_cameras(1), cache="rolling")
    with pytest.raises(WorldSessionError, match="missing"):
        camera_pipe.open_session(make_frames(1))
    with pytest.raises(WorldSessionError, match="16x16 pixels; this world has 8x8"):
        camera_pipe.open_session(np.zeros((1, 16, 16, 3), np.uint8), make_cameras(1))


def test_rows_that_share_a_memory_cannot_begin_again_alone(pipe):
    session = pipe.open_session(make_frames(2, 1), cache="rolling")
    with pytest.raises(WorldSessionError, match="rolling"):
        session.reset_rows([0], make_frames(1, 1), None, [0])


def test_motion_from_which_no_pose_is_computed_cannot_be_left_out(make_world_model):
    spec = ActionSpec((ActionColumn("right", "pixels"), ActionColumn("down", "pixels")))
    pipe = make_world_model(ControlEncoder(DeltaControls(spec), "vector", units=(1.0, 1.0)))
    with pytest.raises(ConfigError, match="motion of 2 columns"):
        pipe.open_session(make_frames(1), memory=SLOW_FAST)
    assert pipe.open_session(make_frames(1), memory=SLOW_FAST, cache="rolling").num_frames == 1


def test_frames_between_which_only_buttons_are_known_cannot_be_left_out(make_world_model):
    pipe = make_world_model(BUTTONS)
    with pytest.raises(ConfigError, match="buttons"):
        pipe.open_session(make_frames(1), memory=SLOW_FAST)
    session = pipe.open_session(make_frames(1), cache="rolling", memory=SLOW_FAST)
    assert session.step([1.0]).shape == (SIZE, SIZE, 3)


@pytest.mark.parametrize("cache", ["none", "frame", "rolling"])
def test_nan_names_frame_and_step_and_leaves_the_session_where_it_was(cache, make_world_model):
    pipe = make_world_model()
    session = pipe.open_session(make_frames(2), make_deltas(2), cache=cache)
    session.step([])
    moment = session.snapshot()
    expected = session.step(["forward"])
    session.restore(moment)

    calls_before_step_2 = {"none": 1, "frame": 2, "rolling": 1}[cache]
    calls = iter(range(100))

    def spoil(_, __, output):
        if next(calls) == calls_before_step_2:
            output.sample[:] = math.nan

    hook = pipe.transformer.register_forward_hook(spoil)
    with pytest.raises(WorldSessionError, match="step 2 of 2 of frame 3, row 0"):
        session.step(["forward"])
    hook.remove()
    assert session.snapshot() is moment
    assert np.array_equal(session.step(["forward"]), expected)


@pytest.mark.parametrize("cache", ["frame", "rolling"])
def test_an_interrupted_step_leaves_the_session_where_it_was(pipe, cache, monkeypatch):
    session = pipe.open_session(make_frames(1), cache=cache)
    moment = session.snapshot()
    expected = session.step(["forward"])
    session.restore(moment)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipe.vae, "decode", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.step(["forward"])
    assert session.snapshot() is moment
    assert np.array_equal(session.step(["forward"]), expected)


# --- a world that is the same in every video ------------------------------------------------------------------------

FLOOR = FloorPlan(1.0, (0.0, 0.0), ("....", "##.."))
IN_WORLD = ControlEncoder(
    PoseControls(CAMERA_SPEC), "map", units=(0.7,), latent_size=(4, 4), in_world=True, walk=Walk(MOVES, FLOOR)
)


@pytest.fixture(scope="module")
def world_pipe(make_world_model: Callable[..., WorldModelPipeline]) -> WorldModelPipeline:
    return make_world_model(IN_WORLD)


def start_in_world(x: float = 0.5, y: float = 0.5, heading: float = 0.0) -> tuple[np.ndarray, torch.Tensor]:
    poses = torch.tensor([[x, y, heading]], dtype=torch.float64)
    return make_frames(1), walking_cameras(poses, 0.7, 0.5)


@pytest.mark.parametrize("cache", ["none", "frame", "rolling"])
def test_keys_and_motion_walk_to_the_cameras_they_lead_to(world_pipe: WorldModelPipeline, cache: str):
    frames, cameras = start_in_world()
    by_key = world_pipe.open_session(frames, cameras, cache=cache)
    by_camera = world_pipe.open_session(frames, cameras, cache=cache)
    poses = integrate_planar(
        torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64),
        torch.stack([MOVES.null(), MOVES.row("forward"), MOVES.row("forward", "turn left"), MOVES.row("forward")]),
    )
    expected = walking_cameras(poses, 0.7, 0.5)
    for keys, camera in zip((["forward"], ["forward", "turn left"], MOVES.row("forward")), expected[1:], strict=True):
        np.testing.assert_array_equal(by_key.step(keys), by_camera.step(camera))
        torch.testing.assert_close(by_key.rows[0].places[-1], camera, atol=1e-9, rtol=0)


def test_a_wall_stops_a_walk_and_a_snapshot_remembers_where_it_was(world_pipe: WorldModelPipeline):
    session = world_pipe.open_session(*start_in_world(heading=math.pi / 2))
    before = session.snapshot()
    session.step(["forward"])
    session.step(["forward"])
    torch.testing.assert_close(
        session.rows[0].places[-1], start_in_world(heading=math.pi / 2)[1][0], atol=1e-9, rtol=0
    )
    session.step(["turn left"])
    turned = session.rows[0].places[-1]
    assert not torch.allclose(turned, session.rows[0].places[0])
    session.restore(before)
    session.step(["turn left"])
    torch.testing.assert_close(session.rows[0].places[-1], turned, atol=1e-9, rtol=0)


def test_frames_of_a_world_depend_on_where_they_are_seen_from(world_pipe, camera_pipe):
    here, there = start_in_world(), start_in_world(x=2.5)
    views = [world_pipe.open_session(*start).step(["forward"]) for start in (here, there)]
    assert not np.array_equal(*views)


def test_keys_need_a_walk(camera_pipe: WorldModelPipeline):
    session = camera_pipe.open_session(*start_in_world())
    with pytest.raises(ConfigError, match="forward"):
        session.step(["forward"])
    with pytest.raises(ControlError, match="16"):
        session.step(MOVES.row("forward"))
