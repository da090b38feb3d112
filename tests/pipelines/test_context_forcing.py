"""The pipeline: lengths, inputs, guidance, loading and saving, and refusals that say what to do."""

from __future__ import annotations

import json
import logging
import re

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.utils import convert_state_dict_to_diffusers

from vidgen.memory import FullMemory, SlowFastMemory, SlowFastMemoryConfig
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.models.streaming_vae import StreamingVAEDecoder
from vidgen.pipelines import ContextForcingPipeline, GenerationError, PromptPlan, PromptPlanError
from vidgen.runtime.errors import VidgenError
from vidgen.schedulers import FlowConsistencyScheduler

DAWN, NIGHT, RAIN = "a meadow at dawn", "desert at night", "coast in the rain with birds"
PLAN = [(DAWN, 1.0), (NIGHT, 1.0), (RAIN, None)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pixels(num_frames: int | None = None, seed: int = 0) -> np.ndarray:
    shape = (16, 32, 3) if num_frames is None else (num_frames, 16, 32, 3)
    return np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)


def as_uint8(frames: np.ndarray) -> np.ndarray:
    return (frames * 255).round().astype(np.uint8)


# --- lengths and outputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["slow_fast", "sliding_window", "full"])
def test_stream_equals_call(pipe, memory):
    whole = pipe(PLAN, seconds=4, memory=memory, generator=seeded(), output_type="np").frames[0]
    chunks = list(pipe.stream(PLAN, seconds=4, memory=memory, generator=seeded()))
    assert [len(chunk) for chunk in chunks] == [9, 12, 12, 12, 3]
    assert chunks[0].dtype == np.uint8
    np.testing.assert_array_equal(np.concatenate(chunks), as_uint8(whole))


def test_streaming_decode_equals_one_shot_decode_of_the_latents(pipe):
    output = pipe(DAWN, num_frames=45, generator=seeded(), output_type="np")
    decoded = StreamingVAEDecoder(pipe.vae).decode(output.latents)
    expected = ((decoded + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 4, 1).numpy()
    np.testing.assert_array_equal(as_uint8(output.frames), expected)


@pytest.mark.parametrize(("num_frames", "latents"), [(1, 3), (9, 3), (10, 6), (21, 6), (22, 9), (40, 12)])
def test_whole_chunks_are_generated_and_exactly_the_requested_frames_returned(pipe, num_frames, latents):
    output = pipe(DAWN, num_frames=num_frames, generator=seeded(), output_type="np")
    assert output.frames.shape == (1, num_frames, 16, 32, 3)
    assert output.latents.shape[2] == latents
    longer = pipe(DAWN, num_frames=40, generator=seeded(), output_type="np")
    np.testing.assert_array_equal(output.frames, longer.frames[:, :num_frames])


def test_length_comes_from_seconds_plan_or_default(pipe):
    assert pipe(DAWN, seconds=1.7, output_type="np").frames.shape[1] == round(1.7 * 12)
    assert pipe([(DAWN, 1.0), (NIGHT, 0.5)], output_type="np").frames.shape[1] == 18
    assert pipe(DAWN, output_type="np").frames.shape[1] == 60


def test_output_types_show_the_same_video(pipe):
    results = {
        kind: pipe([DAWN, NIGHT], num_frames=9, generator=seeded(), output_type=kind).frames
        for kind in ("pil", "np", "pt", "latent")
    }
    assert len(results["pil"]) == 2 and isinstance(results["pil"][0][8], PIL.Image.Image)
    frames = as_uint8(results["np"])
    np.testing.assert_array_equal(np.stack([[np.asarray(f) for f in video] for video in results["pil"]]), frames)
    np.testing.assert_array_equal(as_uint8(results["pt"].permute(0, 1, 3, 4, 2).numpy()), frames)
    assert results["latent"].shape == (2, 4, 3, 2, 4)
    assert torch.equal(results["latent"], pipe([DAWN, NIGHT], num_frames=9, generator=seeded()).latents)
    assert isinstance(pipe(DAWN, num_frames=1, return_dict=False), tuple)


def test_seed_decides_and_global_state_does_not(pipe):
    first = pipe(DAWN, num_frames=21, generator=seeded(5), output_type="np").frames
    torch.manual_seed(123)
    torch.randn(7)
    np.testing.assert_array_equal(first, pipe(DAWN, num_frames=21, generator=seeded(5), output_type="np").frames)
    assert (first != pipe(DAWN, num_frames=21, generator=seeded(6), output_type="np").frames).any()


def test_given_noise_replaces_the_drawn_one(pipe):
    noise = torch.randn(1, 4, 6, 2, 4, generator=seeded(3))
    first = pipe(DAWN, num_frames=21, latents=noise, generator=seeded(), output_type="latent").frames
    second = pipe(DAWN, num_frames=21, latents=noise + 1, generator=seeded(), output_type="latent").frames
    assert torch.equal(
        first, pipe(DAWN, num_frames=21, latents=noise, generator=seeded(), output_type="latent").frames
    )
    assert not torch.equal(first, second)


def test_statistics_and_timings_are_reported(pipe):
    output = pipe(DAWN, num_frames=33, generator=seeded())
    assert output.statistics["num_chunks"] == 3 and output.statistics["num_frames_emitted"] == 33
    assert output.statistics["memory"]["num_frames"] == 9
    assert 0 < output.timings["first_chunk"] < output.timings["total"]


def test_callbacks_see_every_step_and_chunk(pipe):
    steps, chunks = [], []
    pipe(
        DAWN,
        num_frames=21,
        callback_on_step_end=lambda pipe, step, timestep, tensors: steps.append((step, float(timestep))),
        callback_on_chunk_end=lambda session, index, frames: chunks.append((index, len(frames))),
    )
    assert [step for step, _ in steps] == [0, 1, 0, 1] and steps[0][1] == 1000
    assert chunks == [(0, 9), (1, 12)]


# --- text -------------------------------------------------------------------------------------------------------


def test_padding_is_zero_and_the_batch_changes_nothing(pipe, caplog):
    embeds, negative = pipe.encode_prompt([DAWN, RAIN], negative_prompt="")
    assert embeds.shape == negative.shape == (2, 8, 16)
    assert (embeds[0, 5:] == 0).all() and (embeds[0, :5] != 0).any(-1).all()  # 4 words and the end token
    torch.testing.assert_close(embeds[:1], pipe.encode_prompt(f"  {DAWN} \n")[0])
    with caplog.at_level(logging.WARNING):
        pipe.encode_prompt("a meadow at dawn in the rain with birds", do_classifier_free_guidance=False)
    assert "cut to 8" in caplog.text


def test_plan_files_give_the_same_video(pipe, tmp_path):
    expected = pipe(PLAN, seconds=3, generator=seeded(), output_type="np").frames
    (tmp_path / "plan.txt").write_text(f"# three scenes\n1 | {DAWN}\n\n1.0|{NIGHT}\n{RAIN}\n")
    lines = [{"prompt": DAWN, "seconds": 1}, {"prompt": NIGHT, "seconds": 1}, {"prompt": RAIN}]
    (tmp_path / "plan.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name in ("plan.txt", "plan.jsonl"):
        frames = pipe(tmp_path / name, seconds=3, generator=seeded(), output_type="np").frames
        np.testing.assert_array_equal(frames, expected)


@pytest.mark.parametrize(
    ("plan", "fragment"),
    [
        ([], "empty"),
        ("   ", "non-empty"),
        ([(DAWN, 1), ("", None)], "non-empty"),
        ([(DAWN, 0), (NIGHT, None)], "seconds=0"),
        ([(DAWN, -1.0), (NIGHT, None)], "seconds=-1.0"),
        ([(DAWN, float("nan")), (NIGHT, None)], "seconds=nan"),
        ([(DAWN, "2 s"), (NIGHT, None)], "non-empty|pairs|number"),
        ([(DAWN, None), (NIGHT, 1)], "only the last"),
        ([(DAWN, 9.0), (NIGHT, None)], "beyond the end"),
        ([(DAWN, 1.0), (NIGHT, 0.5)], "covers 1.5 s of a video of 3 s"),
        ([(DAWN, 1.0), (NIGHT, 1.0, 1.0)], "pairs"),
        (3, "int"),
    ],
)
def test_bad_plans_are_named(pipe, plan, fragment):
    with pytest.raises(PromptPlanError, match=fragment):
        pipe(plan, seconds=3)


def test_a_plan_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "plan.txt").write_bytes("\ufeff1 | dawn\nnight\n".encode())
    assert PromptPlan.from_file(tmp_path / "plan.txt").to_list() == [["dawn", 1.0], ["night", None]]


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("plan.txt", f"1 | {DAWN}\nsoon | {NIGHT}", "line 2.*'soon'"),
        ("plan.jsonl", '{"prompt": "a"}\n{"text": "b"}', "line 2"),
        ("plan.jsonl", "nonsense", "line 1"),
        ("plan.txt", "# nothing\n", "holds no prompt"),
        ("plan.csv", "a", "use .txt or .jsonl"),
    ],
)
def test_bad_plan_files_name_the_line(tmp_path, name, content, fragment):
    (tmp_path / name).write_text(content)
    with pytest.raises(PromptPlanError, match=fragment):
        PromptPlan.from_file(tmp_path / name)
    with pytest.raises(PromptPlanError, match="does not exist"):
        PromptPlan.from_file(tmp_path / "absent.txt")


def test_plan_lookup_switches_at_the_exact_frame():
    plan = PromptPlan.parse([(DAWN, 0.1 + 0.2), (NIGHT, 0.7), (RAIN, None)])
    assert [plan.prompt_at(frame, 10) for frame in (0, 2, 3, 9, 10, 99)] == [DAWN, DAWN, NIGHT, NIGHT, RAIN, RAIN]


# --- image and video --------------------------------------------------------------------------------------------


def test_image_becomes_the_first_frame_and_the_past_of_the_rest(pipe):
    first = pipe(DAWN, num_frames=25, image=pixels(), generator=seeded(), output_type="np")
    assert first.frames.shape[1] == 25 and first.latents.shape[2] == 1 + 2 * 3
    reconstruction = StreamingVAEDecoder(pipe.vae).decode(first.latents[:, :, :1])
    expected = ((reconstruction + 1) / 2)[0, :, 0].permute(1, 2, 0).numpy()
    np.testing.assert_allclose(first.frames[0, 0], expected, atol=1 / 255)
    other = pipe(DAWN, num_frames=25, image=pixels(seed=1), generator=seeded(), output_type="np")
    assert (first.frames[0, 1:] != other.frames[0, 1:]).any()
    pil = pipe(DAWN, num_frames=25, image=PIL.Image.fromarray(pixels()), generator=seeded(), output_type="np")
    tensor = torch.from_numpy(pixels()).permute(2, 0, 1) / 255
    np.testing.assert_array_equal(first.frames, pil.frames)
    np.testing.assert_array_equal(
        first.frames, pipe(DAWN, num_frames=25, image=tensor, generator=seeded(), output_type="np").frames
    )


def test_image_alone_is_a_video_of_one_frame_plus_a_chunk(pipe):
    chunks = list(pipe.stream(DAWN, num_frames=14, image=pixels(), generator=seeded()))
    assert [len(chunk) for chunk in chunks] == [13, 1]


def test_video_is_continued_with_new_frames_only(pipe, caplog):
    video = pixels(23)
    with caplog.at_level(logging.WARNING):
        output = pipe(PLAN, seconds=3, video=video, generator=seeded(), output_type="np")
    assert "newest 21" in caplog.text
    assert output.frames.shape[1] == 36 and output.latents.shape[2] == 9
    newest = pipe(PLAN, seconds=3, video=video[2:], generator=seeded(), output_type="np")
    np.testing.assert_array_equal(output.frames, newest.frames)
    included = pipe(PLAN, seconds=3, video=video[2:], include_input=True, generator=seeded(), output_type="np")
    assert included.frames.shape[1] == 21 + 36 and included.latents.shape[2] == 15
    np.testing.assert_array_equal(included.frames[:, 21:], newest.frames)
    chunks = list(pipe.stream(PLAN, seconds=3, video=video[2:], include_input=True, generator=seeded()))
    np.testing.assert_array_equal(np.concatenate(chunks), as_uint8(included.frames[0]))


def test_continuing_decoded_latents_matches_their_frames_in_time(pipe):
    # 6 latent frames are two chunks: the continuation begins where the third chunk of the plan's own time would.
    session = pipe.session(DAWN, num_frames=12, video=pixels(21), generator=seeded())
    assert session.memory.num_frames == 6 and session.num_chunks_left == 1
    assert session.step().shape == (12, 16, 32, 3)


def test_frames_are_resized_and_shared_by_a_batch(pipe):
    large = np.repeat(np.repeat(pixels(), 2, axis=0), 2, axis=1)
    frames = pipe([DAWN, NIGHT], num_frames=13, image=large, generator=seeded(), output_type="np").frames
    assert frames.shape == (2, 13, 16, 32, 3)
    np.testing.assert_array_equal(frames[0, 0], frames[1, 0])


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"image": pixels(), "video": pixels(9)}, "pick one"),
        ({"video": pixels(8)}, "8 frames.*chunk of 9"),
        ({"image": pixels() / 100.0}, r"outside \[0, 1\]"),
        ({"image": torch.full((3, 16, 32), float("nan"))}, r"outside \[0, 1\]"),
        ({"image": np.zeros((16, 32, 4), np.uint8)}, "4 channels"),
        ({"image": np.zeros((16, 32), np.uint8)}, "height, width and channels"),
        ({"image": "cat.png"}, "PIL images"),
        *(
            ({"image": pixels().astype(dtype)}, "give uint8, or floats")
            for dtype in (int, np.int8, bool, complex, object)
        ),
        *(({"image": torch.zeros(3, 16, 32, dtype=dtype)}, "give uint8") for dtype in (torch.int64, torch.complex64)),
        ({"image": np.stack([pixels()] * 3)}, "3 samples for 1 prompts"),
        ({"video": [pixels(), np.zeros((8, 8, 3), np.uint8)]}, "different shapes"),
    ],
)
def test_bad_frames_are_named(pipe, arguments, fragment):
    with pytest.raises(GenerationError, match=fragment):
        pipe(DAWN, num_frames=9, **arguments)


# --- schedulers and guidance ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler",
    [
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    ],
)
def test_ode_schedulers_leak_nothing_between_chunks(make_pipeline, scheduler):
    pipe = make_pipeline(scheduler=scheduler)
    arguments = {"num_frames": 33, "num_inference_steps": 4, "guidance_scale": 3.0, "negative_prompt": NIGHT}
    first = pipe(DAWN, generator=seeded(), output_type="np", **arguments).frames
    np.testing.assert_array_equal(first, pipe(DAWN, generator=seeded(), output_type="np", **arguments).frames)
    weaker = pipe(DAWN, generator=seeded(), output_type="np", **{**arguments, "guidance_scale": 1.0}).frames
    assert (first != weaker).any()


def test_guidance_equals_two_separate_predictions(ode_pipe):
    session = ode_pipe.session(
        DAWN, negative_prompt=NIGHT, guidance_scale=4.0, num_inference_steps=2, generator=seeded()
    )
    session.step()
    latents = torch.randn(1, 4, 3, 2, 4, generator=seeded(1))
    with torch.no_grad():
        guided = session._predict(latents, torch.tensor(500.0), session._embed_batch([DAWN]))
        both = ode_pipe.transformer(
            torch.cat([latents] * 2), torch.full((2,), 500.0), session._embed_batch([DAWN]), kv_memory=session.memory
        ).sample
    torch.testing.assert_close(guided, both[1:] + 4.0 * (both[:1] - both[1:]))
    assert session.memory.frame_ids.shape[0] == 2


def test_guidance_on_a_distilled_model_is_refused(pipe):
    with pytest.raises(GenerationError, match="distilled"):
        pipe(DAWN, guidance_scale=5.0)


def test_unfit_schedulers_are_refused(make_pipeline):
    for scheduler, fragment in (
        (LCMScheduler(), "LCMScheduler.*FlowConsistencyScheduler"),
        (UniPCMultistepScheduler(), "flow_prediction"),
        (FlowMatchEulerDiscreteScheduler(stochastic_sampling=True), "stochastic_sampling"),
    ):
        with pytest.raises(GenerationError, match=fragment):
            make_pipeline(scheduler=scheduler)(DAWN, num_frames=9)


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"height": 20, "width": 40}, "multiples of 16.*Nearest valid: 16x48|multiples of 16.*Nearest valid: 16x32"),
        ({"height": -16}, "multiples of 16"),
        ({"num_frames": 9, "seconds": 1}, "give one of them"),
        ({"num_frames": 0}, "num_frames=0"),
        ({"num_frames": 9.5}, "num_frames=9.5"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"seconds": -1}, "seconds=-1"),
        ({"seconds": 1e9}, r"seconds=1e\+09; .* 10,000,000"),
        ({"seconds": 1e300}, r"seconds=1e\+300; .* 10,000,000"),
        ({"num_frames": 10_000_001}, "num_frames=10000001; allowed: whole numbers from 1 to 10,000,000"),
        ({"num_frames": 10**400}, "num_frames=1000"),
        ({"num_inference_steps": 0}, "num_inference_steps=0"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan"),
        ({"memory": "slow_fats"}, "Did you mean 'slow_fast'"),
        ({"prompt_switch": "cut"}, "allowed: flush, keep, recache"),
        ({"output_type": "mp4"}, "'pil', 'np', 'pt', 'latent'"),
        ({"negative_prompt": ["a", "b"]}, "negative_prompt holds 2 texts for 1"),
        ({"generator": [seeded(), seeded()]}, "2 generators are given for 1"),
        ({"num_frames": 9, "latents": torch.zeros(1, 4, 6, 2, 4)}, r"\(1, 4, 3, 2, 4\)"),
        ({"num_frames": 9, "latents": torch.full((1, 4, 3, 2, 4), float("inf"))}, "NaN or infinity"),
        ({"max_memory_gb": 0}, "max_memory_gb=0"),
        ({"generator": 5}, "generator=5; give a torch.Generator"),
        ({"generator": [np.random.default_rng(0)]}, "give a torch.Generator"),
        ({"negative_prompt": 5}, "negative_prompt=5"),
        ({"negative_prompt": [None]}, r"negative_prompt=\[None\]"),
        ({"memory": ["slow_fast"]}, "Unknown memory"),
        ({"num_frames": 9, "latents": np.zeros((1, 4, 3, 2, 4))}, "latents is a ndarray"),
        # Not a number, not finite, or nothing: for every number that a call takes.
        *(
            ({name: value}, f"{name}={re.escape(repr(value))}")
            for name in (
                "num_frames",
                "seconds",
                "height",
                "width",
                "num_inference_steps",
                "guidance_scale",
                "max_memory_gb",
            )
            for value in (float("nan"), float("inf"), -float("inf"), -1, "3", [3])
        ),
        *(({name: 0}, f"{name}=0") for name in ("num_frames", "seconds", "height", "width", "num_inference_steps")),
    ],
)
def test_bad_arguments_are_named(pipe, arguments, fragment):
    with pytest.raises(VidgenError, match=fragment):
        pipe(DAWN, **arguments)


@pytest.mark.parametrize("seconds", [1e9, 1e308, 0.01])
def test_a_plan_that_gives_no_possible_length_is_named(pipe, seconds):
    with pytest.raises(GenerationError, match=re.escape(f"seconds={seconds:g}; allowed")):
        pipe([(DAWN, seconds)])


@pytest.mark.parametrize(
    "prompt", [None, 5, b"a meadow", [], [None], [5], ["a meadow", 5], {}, torch.zeros(2)], ids=repr
)
def test_what_is_no_prompt_is_named(pipe, prompt):
    with pytest.raises(PromptPlanError, match="prompt"):
        pipe(prompt, num_frames=9)


@pytest.mark.parametrize("depth", [None, "1", -1, 0.5, float("nan")])
def test_sessions_keep_a_whole_number_of_chunks_to_undo(pipe, depth):
    with pytest.raises(VidgenError, match="undo_depth"):
        pipe.session(DAWN, undo_depth=depth)


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), None, "12"])
def test_a_plan_has_no_prompt_at_an_impossible_rate(fps):
    plan = PromptPlan.parse([(DAWN, 1.0), ("a forest", None)])
    for ask in (
        lambda: plan.prompt_at(3, fps),
        lambda: plan.check_length(30, fps),
        lambda: plan.switch_to("night", 3, fps),
    ):
        with pytest.raises(VidgenError, match="fps="):
            ask()


def test_stream_refuses_at_the_call_and_not_at_the_first_chunk(pipe):
    with pytest.raises(GenerationError, match="num_frames=0"):
        pipe.stream(DAWN, num_frames=0)


def test_used_or_unfit_memory_is_refused(pipe):
    memory = SlowFastMemory()
    session = pipe.session(DAWN, memory=memory, generator=seeded())
    session.step()
    with pytest.raises(GenerationError, match="already holds"):
        pipe(DAWN, memory=session.memory)
    with pytest.raises(GenerationError, match="num_frames_per_block=3"):
        pipe(DAWN, memory=FullMemory(num_frames_per_block=1))
    with pytest.raises(GenerationError, match="no end"):
        pipe.session(DAWN, memory="full")


def test_three_hours_need_a_bounded_memory(make_pipeline):
    pipe = make_pipeline()
    three_hours = 3 * 3600
    with pytest.raises(GenerationError, match=r"rotary table has 64, enough for 21 s.*slow_fast"):
        pipe.session(DAWN, seconds=three_hours, memory="full")

    pipe.transformer.register_to_config(rope_max_seq_len=10**6)
    with pytest.raises(GenerationError, match=r"estimated [\d,]+ bytes.*limit is 20 MB.*memory slow_fast") as caught:
        pipe.session(DAWN, seconds=three_hours, memory="full", max_memory_gb=0.02)
    assert str(caught.value).count("(") >= 4  # three remedies, each with its bytes

    sizes = []
    stream = pipe.stream(
        DAWN,
        seconds=three_hours,
        memory="slow_fast",
        max_memory_gb=0.02,
        generator=seeded(),
        callback_on_chunk_end=lambda session, index, frames: sizes.append(session.memory.nbytes),
    )
    for _ in range(30):
        next(stream)
    assert len(set(sizes[8:])) == 1


def test_the_estimate_covers_what_a_session_really_holds(pipe):
    from vidgen.pipelines.budget import estimate_budget

    config = SlowFastMemoryConfig(sink=3, slow=3, fast=6)
    session = pipe.session([DAWN, NIGHT], memory=config, generator=seeded())
    budget = estimate_budget(pipe, session.memory, session.settings, 2)
    held = []

    def measure(session, index, frames):
        held.append(session.memory.nbytes + sum(state.memory.nbytes for state in session._history))

    session.callback_on_chunk_end = measure
    for _ in range(6):
        session.step()
    # The peak is inside the commit, when the old chunk's tensors are still there.
    assert budget.key_values / 2 <= held[-1] <= budget.key_values
    assert session._state.decoder.nbytes == budget.decoder


# --- files ------------------------------------------------------------------------------------------------------


def test_pipeline_round_trip(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    assert not list(tmp_path.rglob("*.bin"))
    loaded = ContextForcingPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded.transformer) is CausalWanTransformer3DModel
    assert type(loaded.scheduler) is FlowConsistencyScheduler
    assert (loaded.config.fps, loaded.config.default_height, loaded.config.default_width) == (12, 16, 32)
    expected = pipe(DAWN, num_frames=21, generator=seeded(), output_type="np").frames
    frames = loaded(DAWN, num_frames=21, generator=seeded(), output_type="np").frames
    # Where weights lie in memory may change the last bit, and with it a rounded level.
    np.testing.assert_allclose(expected, frames, atol=1.01 / 255, rtol=0)


def test_stock_wan_folder_loads_with_a_warning(ode_pipe, tmp_path, caplog):
    causal = ode_pipe.transformer
    stock_config = {
        k: v
        for k, v in causal.config.items()
        if k not in ("num_frames_per_block", "causal", "sigma_data") and k[0] != "_"
    }
    transformer = WanTransformer3DModel(**stock_config)
    transformer.load_state_dict(causal.state_dict())
    stock = WanPipeline(
        tokenizer=ode_pipe.tokenizer,
        text_encoder=ode_pipe.text_encoder,
        vae=ode_pipe.vae,
        scheduler=ode_pipe.scheduler,
        transformer=transformer,
    )
    stock.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        pipe = ContextForcingPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert "bidirectional" in caplog.text
    assert type(pipe.transformer) is CausalWanTransformer3DModel and pipe.transformer.dtype == torch.bfloat16
    assert (pipe.config.fps, pipe.config.default_height, pipe.config.default_width) == (16, 480, 832)
    for name, weight in causal.state_dict().items():
        torch.testing.assert_close(pipe.transformer.state_dict()[name].float(), weight, atol=0.05, rtol=0.01)
    pipe.set_progress_bar_config(disable=True)
    frames = pipe(DAWN, num_frames=13, height=16, width=32, num_inference_steps=2, output_type="np").frames
    assert frames.shape == (1, 13, 16, 32, 3) and np.isfinite(frames).all()


def test_pickled_weights_and_two_transformers_are_refused(pipe, tmp_path):
    with pytest.raises(ValueError, match="pickled"):
        ContextForcingPipeline.from_pretrained(tmp_path, use_safetensors=False)
    index = {"_class_name": "WanPipeline", "transformer_2": ["diffusers", "WanTransformer3DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="two transformers"):
        ContextForcingPipeline.from_pretrained(tmp_path)
    pipe.save_pretrained(tmp_path / "pickled")
    weights = tmp_path / "pickled/transformer/diffusion_pytorch_model.safetensors"
    torch.save(pipe.transformer.state_dict(), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(OSError, match="safetensors"):
        ContextForcingPipeline.from_pretrained(tmp_path / "pickled")


def test_lora_loads_scales_and_unloads(make_pipeline, tmp_path):
    peft = pytest.importorskip("peft")
    from diffusers.loaders import WanLoraLoaderMixin

    trained = make_pipeline().transformer
    trained.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    layers = convert_state_dict_to_diffusers(peft.get_peft_model_state_dict(trained))
    WanLoraLoaderMixin.save_lora_weights(tmp_path, transformer_lora_layers=layers)

    pipe = make_pipeline()
    arguments = {"num_frames": 21, "output_type": "latent"}
    plain = pipe(DAWN, generator=seeded(), **arguments).frames
    pipe.load_lora_weights(tmp_path)
    adapted = pipe(DAWN, generator=seeded(), **arguments).frames
    assert not torch.allclose(plain, adapted)
    off = pipe(DAWN, generator=seeded(), attention_kwargs={"scale": 0.0}, **arguments).frames
    torch.testing.assert_close(off, plain)
    pipe.unload_lora_weights()
    assert torch.equal(pipe(DAWN, generator=seeded(), **arguments).frames, plain)
