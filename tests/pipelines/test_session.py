"""Sessions: whatever is streamed, saved, forked, undone or batched gives the frames of the uninterrupted run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vidgen.memory import FullMemory, FullMemoryConfig, SlidingWindowMemoryConfig, SlowFastMemoryConfig
from vidgen.pipelines import GenerationError, GenerationSession, PromptPlan, PromptPlanError, SessionFileError
from vidgen.runtime.errors import VidgenError

DAWN, NIGHT, RAIN = "a meadow at dawn", "desert at night", "coast in the rain with birds"
SMALL = SlowFastMemoryConfig(sink=3, slow=3, fast=6, tau=1.0, interval=1)
PLAN = [(DAWN, 1.5), (NIGHT, 2.0), (RAIN, None)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(session: GenerationSession, chunks: int) -> list[np.ndarray]:
    return [session.step() for _ in range(chunks)]


def assert_equal(first, second) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("memory", [SMALL, SlidingWindowMemoryConfig(window=6), "full"])
@pytest.mark.parametrize("chunk", range(5))
def test_resume_from_every_chunk_equals_the_uninterrupted_run(pipe, tmp_path, memory, chunk):
    whole = run(pipe.session(PLAN, seconds=5, memory=memory, generator=seeded(1)), 5)
    session = pipe.session(PLAN, seconds=5, memory=memory, generator=seeded(1))
    run(session, chunk)
    session.save(tmp_path / "s.safetensors")
    resumed = GenerationSession.load(tmp_path / "s.safetensors", pipe)
    assert resumed.num_frames_emitted == session.num_frames_emitted
    assert_equal(run(resumed, 5 - chunk), whole[chunk:])


def test_resume_with_guidance_image_and_pending_prompt(ode_pipe, tmp_path):
    image = np.random.default_rng(0).integers(0, 255, (16, 32, 3), dtype=np.uint8)

    def start() -> GenerationSession:
        return ode_pipe.session(DAWN, negative_prompt=NIGHT, image=image, num_inference_steps=3, generator=seeded())

    session = start()
    session.set_prompt(RAIN)
    session.save(tmp_path / "s.safetensors")
    resumed = GenerationSession.load(tmp_path / "s.safetensors", ode_pipe)
    assert_equal(run(resumed, 3), run(session, 3))


def test_forks_agree_until_they_are_told_to_differ(pipe):
    session = pipe.session(DAWN, memory=SMALL, generator=seeded())
    run(session, 3)
    same, other = session.fork(), session.fork()
    other.set_prompt(NIGHT)
    expected = run(session, 3)
    assert_equal(run(same, 3), expected)
    different = run(other, 3)
    assert all((a != b).any() for a, b in zip(different, expected))
    assert session.plans[0].prompts == (DAWN,)


def test_undo_returns_to_the_chunk_before(pipe):
    session = pipe.session(PLAN, seconds=6, memory=SMALL, generator=seeded(), undo_depth=2)
    frames = run(session, 5)
    session.undo(2)
    assert session.chunk_index == 3
    assert session.num_frames_emitted == sum(map(len, frames[:3]))
    assert_equal(run(session, 2), frames[3:])


def test_undo_takes_back_prompts_and_is_bounded(pipe):
    session = pipe.session(DAWN, memory=SMALL, generator=seeded())
    twin = pipe.session(DAWN, memory=SMALL, generator=seeded())
    run(session, 2)
    expected = run(twin, 3)
    session.step()
    session.set_prompt(NIGHT)
    session.undo()
    np.testing.assert_array_equal(session.step(), expected[2])
    session.undo()
    with pytest.raises(GenerationError, match="undo_depth=1"):
        session.undo()
    with pytest.raises(GenerationError, match=r"undo\(0\)"):
        session.undo(0)
    for count in (None, "1", 0.5, float("nan"), -1):
        with pytest.raises(GenerationError, match="undo_depth=1"):
            session.undo(count)


def test_no_undo_history_without_depth(pipe):
    session = pipe.session(DAWN, generator=seeded(), undo_depth=0)
    run(session, 2)
    with pytest.raises(GenerationError, match="0 chunks can be taken back"):
        session.undo()


@pytest.mark.parametrize("memory", [SMALL, "full"])
def test_a_sample_of_a_batch_equals_the_sample_alone(pipe, memory):
    plans = [PLAN, [(RAIN, 3.0), (DAWN, None)]]  # the samples switch at different chunks
    generators = [seeded(4), seeded(9)]
    batch = np.concatenate(run(pipe.session(plans, seconds=6, memory=memory, generator=generators), 6), axis=1)
    for sample, seed in enumerate((4, 9)):
        alone = run(pipe.session(plans[sample], seconds=6, memory=memory, generator=seeded(seed)), 6)
        difference = np.abs(batch[sample].astype(int) - np.concatenate(alone).astype(int))
        assert difference.max() <= 1  # batched matrix products round differently


def test_first_sample_of_a_shared_generator_keeps_its_seed(pipe):
    alone = pipe.session(DAWN, generator=seeded(3))
    batch = pipe.session([DAWN, DAWN], generator=seeded(3))
    assert batch.sample_seeds[0] == alone.sample_seeds[0]
    assert batch.sample_seeds[0] != batch.sample_seeds[1]
    frames = batch.step()
    assert (frames[0] != frames[1]).any()


# --- prompts ----------------------------------------------------------------------------------------------------


def next_velocity(session: GenerationSession) -> torch.Tensor:
    """What the transformer makes of the next chunk's first step: a probe of the whole memory."""
    latents = torch.randn(session.batch_size, 4, 3, 2, 4, generator=seeded(7))
    return session.pipe.transformer(
        latents, torch.full((session.batch_size,), 700.0), session._embed_batch([DAWN]), kv_memory=session.memory
    ).sample


def test_recache_under_the_same_prompt_is_exact_for_full_memory(pipe):
    session = pipe.session(DAWN, memory=FullMemory(FullMemoryConfig(max_frames=30)), generator=seeded())
    run(session, 4)
    with torch.no_grad():
        before = next_velocity(session)
        session._switch_prompt("recache", session._embed_batch([DAWN]), [True])
        torch.testing.assert_close(next_velocity(session), before, atol=1e-4, rtol=0)
        session._switch_prompt("recache", session._embed_batch([NIGHT]), [True])
        assert (next_velocity(session) - before).abs().max() > 1e-3


def test_recache_is_exact_when_the_first_block_is_a_single_image(pipe):
    image = np.full((16, 32, 3), 80, np.uint8)
    session = pipe.session(DAWN, memory=FullMemory(FullMemoryConfig(max_frames=30)), image=image, generator=seeded())
    run(session, 3)
    with torch.no_grad():
        before = next_velocity(session)
        session._switch_prompt("recache", session._embed_batch([DAWN]), [True])
        torch.testing.assert_close(next_velocity(session), before, atol=1e-4, rtol=0)


@pytest.mark.parametrize("memory", [SMALL, SlidingWindowMemoryConfig(window=9, sink=3)])
def test_recache_of_a_compressed_memory_touches_only_sink_and_newest(pipe, memory):
    session = pipe.session(DAWN, memory=memory, generator=seeded())
    run(session, 7)
    slots = session._recache_slots()
    keys, ids = [key.clone() for key in session.memory._keys], session.memory.frame_ids.clone()
    with torch.no_grad():
        session._switch_prompt("recache", session._embed_batch([NIGHT]), [True])
    recached = set(ids[0, slots].tolist())
    changed = (session.memory._keys[1] != keys[1]).flatten(2).any(-1)[0]
    assert changed.tolist() == [frame_id in recached for frame_id in ids[0].tolist()]
    assert torch.equal(session.memory.frame_ids, ids)


def test_recache_under_the_same_prompt_is_close_for_compressed_memory(pipe):
    session = pipe.session(DAWN, memory=SMALL, generator=seeded())
    run(session, 7)
    with torch.no_grad():
        before = next_velocity(session)
        session._switch_prompt("recache", session._embed_batch([DAWN]), [True])
        same = (next_velocity(session) - before).abs().mean()
        session._switch_prompt("recache", session._embed_batch([NIGHT]), [True])
        other = (next_velocity(session) - before).abs().mean()
    assert 0 < same < other


@pytest.mark.parametrize("mode", ["recache", "keep", "flush"])
@pytest.mark.parametrize("memory", [SMALL, "full", SlidingWindowMemoryConfig(window=6, sink=3)])
def test_a_switch_never_changes_emitted_chunks_and_changes_later_ones(pipe, mode, memory):
    plain = run(pipe.session(DAWN, seconds=6, memory=memory, generator=seeded()), 6)
    session = pipe.session(
        [(DAWN, 3.0), (NIGHT, None)], seconds=6, memory=memory, prompt_switch=mode, generator=seeded()
    )
    switched = run(session, 6)
    # Chunks begin at frames 0, 9, 21, 33, 45 …; 3 s are 36 frames: the chunk at 45 is the first that begins later.
    assert_equal(switched[:4], plain[:4])
    assert all((a != b).any() for a, b in zip(switched[4:], plain[4:]))


def test_modes_differ_and_flush_forgets(pipe):
    frames = {}
    for mode in ("recache", "keep", "flush"):
        session = pipe.session(DAWN, memory=SMALL, generator=seeded())
        run(session, 6)
        session.set_prompt(NIGHT, mode)
        frames[mode] = session.step()
        if mode == "flush":
            assert session.memory.frame_ids.tolist() == [[0, 1, 2, 15, 16, 17, 18, 19, 20]]
        run(session, 4)  # and goes on well
    assert (frames["recache"] != frames["keep"]).any()
    assert (frames["flush"] != frames["keep"]).any()


def test_flush_of_part_of_a_batch_is_refused(pipe):
    plans = [[(DAWN, 1.0), (NIGHT, None)], DAWN]
    session = pipe.session(plans, seconds=4, prompt_switch="flush", generator=seeded())
    run(session, 2)
    with pytest.raises(GenerationError, match=r"chunk 2 only samples \[0\]"):
        session.step()
    assert session.chunk_index == 2


def test_set_prompt_equals_the_plan_that_switches_there(pipe):
    planned = run(pipe.session([(DAWN, 9 / 12), (NIGHT, None)], seconds=4, generator=seeded()), 4)
    session = pipe.session(DAWN, seconds=4, generator=seeded())
    steered = run(session, 1)
    session.set_prompt(NIGHT)
    assert_equal(steered + run(session, 3), planned)
    assert session.plans[0].to_list() == [[DAWN, 0.75], [NIGHT, None]]


def test_set_prompt_rejects_nonsense_and_changes_nothing(pipe):
    session = pipe.session(DAWN, generator=seeded())
    with pytest.raises(PromptPlanError, match="non-empty"):
        session.set_prompt("  ")
    with pytest.raises(GenerationError, match="did you mean 'recache'"):
        session.set_prompt(NIGHT, "recash")
    with pytest.raises(GenerationError, match="prompt holds 2 texts for 1 prompts"):
        session.set_prompt([NIGHT, RAIN])
    for nothing in (None, 5, b"night", [None], [], {}, ""):
        with pytest.raises(VidgenError):
            session.set_prompt(nothing)
    for mode in ("", []):
        with pytest.raises(GenerationError, match="prompt_switch"):
            session.set_prompt(NIGHT, mode)
    assert session.plans == (PromptPlan.parse(DAWN),)


# --- endings ----------------------------------------------------------------------------------------------------


def test_endless_session_has_constant_memory(pipe):
    session = pipe.session(DAWN, memory=SMALL, generator=seeded())
    run(session, 8)
    sizes = [session.memory.nbytes, session._state.decoder.nbytes, session._state.latents.nbytes]
    run(session, 40)
    assert sizes == [session.memory.nbytes, session._state.decoder.nbytes, session._state.latents.nbytes]
    assert not session.finished and session.num_chunks_left is None


def test_finished_session_refuses_to_step(pipe):
    session = pipe.session(DAWN, num_frames=10, generator=seeded())
    assert session.num_chunks_left == 2
    chunks = list(session)
    assert [len(chunk) for chunk in chunks] == [9, 1]
    assert session.finished and session.num_frames_emitted == 10
    with pytest.raises(GenerationError, match="all 10 frames exist"):
        session.step()


def test_interrupt_leaves_a_session_that_goes_on_exactly(pipe):
    expected = run(pipe.session(DAWN, num_frames=33, generator=seeded()), 3)
    calls = []

    def stop_once(pipe, step, timestep, tensors):
        calls.append(step)
        if len(calls) == 4:  # second step of the second chunk
            session.interrupt()

    session = pipe.session(DAWN, num_frames=33, generator=seeded(), callback_on_step_end=stop_once)
    first = list(session)
    assert len(first) == 1 and session.chunk_index == 1
    assert_equal(first + list(session), expected)


def test_nonfinite_latents_name_the_chunk_and_leave_the_session_whole(pipe):
    def poison(pipe, step, timestep, tensors):
        if session.chunk_index == 1 and poisoned:
            return {"latents": tensors["latents"] * float("nan")}
        return {}

    poisoned = True
    session = pipe.session(DAWN, num_frames=33, generator=seeded(), callback_on_step_end=poison)
    first = session.step()
    with pytest.raises(GenerationError, match="chunk 1, sample 0"):
        session.step()
    poisoned = False
    assert_equal([first, *session], run(pipe.session(DAWN, num_frames=33, generator=seeded()), 3))


def test_out_of_memory_says_what_would_help(pipe, monkeypatch):
    session = pipe.session([DAWN, DAWN], memory="full", num_frames=33, generator=seeded())

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(session, "_denoise", fail)
    with pytest.raises(GenerationError, match=r"chunk 0.*keys and values.*undo_depth.*one by one.*bfloat16"):
        session.step()


# --- files ------------------------------------------------------------------------------------------------------


def rewrite_header(path, **changes) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["vidgen_session"])
    save_file(load_file(path), path, metadata={"vidgen_session": json.dumps({**header, **changes})})


def test_file_of_a_newer_schema_is_refused(pipe, tmp_path):
    path = tmp_path / "s.safetensors"
    pipe.session(DAWN, generator=seeded()).save(path)
    rewrite_header(path, schema=99)
    with pytest.raises(SessionFileError, match="schema 99"):
        GenerationSession.load(path, pipe)


def test_file_of_another_model_is_refused(pipe, make_pipeline, tmp_path):
    path = tmp_path / "s.safetensors"
    pipe.session(DAWN, generator=seeded()).save(path)
    with pytest.raises(SessionFileError, match="transformer and vae"):
        GenerationSession.load(path, make_pipeline(seed=1))


def test_files_that_are_no_sessions_are_refused(pipe, tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(SessionFileError, match="not a saved session"):
        GenerationSession.load(tmp_path / "a.safetensors", pipe)
    (tmp_path / "b.safetensors").write_bytes(b"nonsense")
    with pytest.raises(VidgenError, match="damaged"):
        GenerationSession.load(tmp_path / "b.safetensors", pipe)


DAMAGE = {
    "settings": {},
    "plans": [],
    "sample_seeds": [1, 2],
    "state": {},
    "memory": {"name": "elephant", "num_frames_per_block": 3, "config": {}},
    "fingerprint": 7,
    "schema": "one",
}


@pytest.mark.parametrize("part", DAMAGE)
def test_a_header_that_does_not_fit_is_damage_not_a_traceback(pipe, tmp_path, part):
    path = tmp_path / "s.safetensors"
    session = pipe.session(DAWN, generator=seeded())
    session.step()
    session.save(path)
    rewrite_header(path, **{part: DAMAGE[part]})
    with pytest.raises(SessionFileError, match="damaged"):
        GenerationSession.load(path, pipe)


@pytest.mark.parametrize(
    "name", ["latents", "memory.keys.1", "memory.values.0", "memory.header", "decoder.num_frames"]
)
@pytest.mark.parametrize("change", ["missing", "cut"])
def test_tensors_that_do_not_fit_are_named(pipe, tmp_path, name, change):
    from safetensors import safe_open

    path = tmp_path / "s.safetensors"
    session = pipe.session(DAWN, generator=seeded())
    session.step()
    session.save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][..., :-1].contiguous()
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(SessionFileError, match="damaged"):
        GenerationSession.load(path, pipe)


def test_a_memory_s_header_sets_nothing_but_its_counters(pipe, tmp_path):
    session = pipe.session(DAWN, generator=seeded())
    session.step()
    state = session.memory.state_dict()
    header = json.loads(bytes(state["header"].tolist()).decode())
    state["header"] = torch.tensor(list(json.dumps({**header, "commit": 1}).encode()), dtype=torch.uint8)
    with pytest.raises(VidgenError, match="commit"):
        session.memory.load_state_dict(state)


@pytest.mark.parametrize("seconds", [45 / 12, 3])  # whole chunks; a last chunk of which 9 frames are cut off
@pytest.mark.parametrize("saved", [False, True])
def test_an_extended_video_is_the_longer_one_but_for_what_was_cut(pipe, tmp_path, seconds, saved):
    plan = [(DAWN, 1.5), (NIGHT, None)]
    whole = np.concatenate(list(pipe.session(plan, seconds=5, generator=seeded(1))))
    session = pipe.session(plan, seconds=seconds, generator=seeded(1))
    list(session)
    if saved:
        session.save(tmp_path / "s.safetensors")
        session = GenerationSession.load(tmp_path / "s.safetensors", pipe)
    assert session.finished
    session.extend(15)
    assert not session.finished and session.num_frames_emitted == 45 and session.num_frames_total == 60
    np.testing.assert_array_equal(np.concatenate(list(session)), whole[45:])
    assert session.finished and session.num_frames_emitted == 60


def test_an_unfinished_video_is_extended_from_where_it_is(pipe):
    session = pipe.session(DAWN, seconds=60, generator=seeded(1))
    first = run(session, 2)
    session.extend(12)
    assert session.num_frames_total == 33
    whole = np.concatenate(list(pipe.session(DAWN, seconds=33 / 12, generator=seeded(1))))
    np.testing.assert_array_equal(np.concatenate([*first, *session]), whole)
    with pytest.raises(VidgenError, match="num_frames=0"):
        session.extend(0)


def test_frames_in_total_count_a_given_video_where_it_is_shown(pipe):
    video = np.random.default_rng(0).integers(0, 255, (9, 16, 32, 3), dtype=np.uint8)
    for shown in (False, True):
        session = pipe.session(DAWN, seconds=1, video=video, include_input=shown, generator=seeded())
        assert session.num_frames_total == 12 + 9 * shown == sum(map(len, session))
    assert pipe.session(DAWN, generator=seeded()).num_frames_total is None


def test_failed_save_leaves_the_old_file(pipe, tmp_path, monkeypatch):
    path = tmp_path / "s.safetensors"
    session = pipe.session(DAWN, generator=seeded())
    session.save(path)
    before = path.read_bytes()
    monkeypatch.setattr("vidgen.runtime.checkpoint.os.replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    session.step()
    with pytest.raises(OSError, match="full"):
        session.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["s.safetensors"]
