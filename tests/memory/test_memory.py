"""What would be wrong: a frame lost, kept too long, or stored under another frame's number; memory that grows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from vidgen.memory import (
    MEMORIES,
    FullMemory,
    FullMemoryConfig,
    KVMemory,
    MemoryConfigError,
    SlidingWindowMemory,
    SlidingWindowMemoryConfig,
    SlowFastMemory,
    SlowFastMemoryConfig,
    make_memory,
)
from vidgen.memory.kv_memory import KV_DTYPES
from vidgen.runtime.errors import VidgenError

LAYERS, TOKENS, HEADS, DIM = 2, 2, 1, 4
TRANSFORMER = {"num_layers": LAYERS, "num_attention_heads": HEADS, "attention_head_dim": DIM}

# One small memory of every kind, by name and options.
SMALL = [
    ("full", {"max_frames": 30}),
    ("sliding_window", {"window": 6}),
    ("sliding_window", {"window": 6, "sink": 2}),
    ("slow_fast", {"sink": 3, "slow": 2, "fast": 6, "interval": 1}),
]


def numbered(first: int, num_frames: int, batch_size: int = 1, dtype: torch.dtype = torch.float32):
    """Keys of frame f that are all f + 1, values that are its negative, plus the layer in the last channel."""
    frames = torch.arange(first + 1, first + num_frames + 1, dtype=dtype)
    key = frames[None, :, None, None, None].expand(batch_size, -1, TOKENS, HEADS, DIM).clone()
    layers = []
    for layer in range(LAYERS):
        layer_key = key.clone()
        layer_key[..., -1] = layer
        layers.append((layer_key, -layer_key))
    return layers


def fill(memory: KVMemory, sizes: list[int], batch_size: int = 1) -> KVMemory:
    for size in sizes:
        memory.commit(numbered(memory.num_frames, size, batch_size))
    return memory


def unrotated(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return keys


def check_content(memory: KVMemory) -> None:
    """Every slot of every layer holds the key and value of the frame it claims to hold."""
    for layer in range(LAYERS):
        keys, values = memory.read(layer, 1, unrotated)
        ids = memory.layer_frame_ids(layer)
        stored = keys.unflatten(1, (-1, TOKENS))
        assert torch.equal(stored[..., 0, 0, 0], ids + 1.0)
        assert bool((stored[..., -1] == layer).all())
        assert torch.equal(values, -keys)


# --- what is kept ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    window=st.integers(6, 9),
    sink=st.integers(0, 4),
    batch_size=st.integers(1, 2),
)
def test_sliding_window_keeps_the_sink_and_the_newest(sizes, window, sink, batch_size):
    memory = fill(make_memory("sliding_window", window=window, sink=sink), sizes, batch_size)
    frames, capacity = list(range(sum(sizes))), sink + window - 3
    expected = frames if len(frames) <= capacity else frames[:sink] + frames[len(frames) - (window - 3) :]
    assert memory.frame_ids.tolist() == [expected] * batch_size
    assert memory.num_slots == len(expected) <= memory.capacity == capacity
    check_content(memory)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=9))
def test_full_memory_keeps_every_frame_in_order(sizes):
    memory = fill(make_memory("full"), sizes)
    assert memory.frame_ids.tolist() == [list(range(sum(sizes)))]
    assert memory.num_frames == sum(sizes) and memory.num_commits == len(sizes)
    check_content(memory)


@pytest.mark.parametrize(("name", "options"), SMALL)
def test_evicted_frames_leave_nothing_behind(name, options):
    memory = make_memory(name, **options)
    sizes = []
    for _ in range(10):
        fill(memory, [3])
        check_content(memory)
        sizes.append(memory.nbytes)
        tensors = [tensor for key, tensor in memory.state_dict().items() if key.startswith(("keys", "values"))]
        # A view into a larger, older tensor would keep dropped frames alive.
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    if name != "full":
        assert sizes[3:] == [sizes[-1]] * 7


def test_full_memory_refuses_more_frames_than_it_was_made_for():
    memory = fill(make_memory("full", max_frames=6), [3, 3])
    before = memory.state_dict()
    with pytest.raises(MemoryConfigError, match="max_frames=6 latent frames and is asked to hold 9"):
        fill(memory, [3])
    assert all(torch.equal(tensor, memory.state_dict()[name]) for name, tensor in before.items())


# --- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), SMALL)
def test_an_empty_memory_gives_nothing_to_read(name, options):
    memory = make_memory(name, **options)
    assert memory.read(0, 3, unrotated) is None
    assert memory.num_slots == memory.num_frames == memory.nbytes == 0
    assert memory.query_positions(3).tolist() == [[0, 1, 2]]


def test_keys_are_rotated_once_per_chunk_and_layer():
    memory = fill(make_memory("full"), [3])
    calls = []

    def rotate(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        calls.append(positions.tolist())
        return keys + 1

    first = [memory.read(layer, 3, rotate)[0] for layer in (0, 1)]
    again = [memory.read(layer, 3, rotate)[0] for layer in (0, 1)]
    assert calls == [[[0, 1, 2]]] * 2
    assert all(a is b for a, b in zip(first, again))
    fill(memory, [3])
    memory.read(0, 3, rotate)
    assert calls[2:] == [[[0, 1, 2, 3, 4, 5]]]


@pytest.mark.parametrize("name", ["full", "sliding_window", "slow_fast"])
def test_absolute_positions_follow_frames_and_bounded_ones_slots(name):
    options = {"window": 6, "sink": 3} if name == "sliding_window" else {}
    options = {"sink": 3, "slow": 0, "fast": 6} if name == "slow_fast" else options
    absolute = fill(make_memory(name, positions="absolute", **options), [3] * 5)
    bounded = fill(make_memory(name, positions="bounded", **options), [3] * 5)
    assert torch.equal(absolute.frame_ids, bounded.frame_ids)
    assert torch.equal(absolute.key_positions(), absolute.frame_ids)
    assert absolute.query_positions(2).tolist() == [[15, 16]]
    assert bounded.key_positions().tolist() == [list(range(bounded.num_slots))]
    assert bounded.query_positions(2).tolist() == [[bounded.num_slots, bounded.num_slots + 1]]


def test_a_larger_chunk_than_the_memory_was_made_for_is_refused():
    memory = fill(make_memory("full", num_frames_per_block=2), [2])
    assert memory.read(0, 1, unrotated) is not None
    with pytest.raises(MemoryConfigError, match=r"chunk of 3 .* num_frames_per_block=3"):
        memory.read(0, 3, unrotated)


@pytest.mark.parametrize("frames_per_block", [1, 2, 3])
def test_the_chunk_being_denoised_counts_as_part_of_the_window(frames_per_block):
    memory = make_memory("sliding_window", num_frames_per_block=frames_per_block, window=6)
    fill(memory, [frames_per_block] * 12)
    assert memory.num_slots + frames_per_block == 6


# --- size ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", [None, *KV_DTYPES])
@pytest.mark.parametrize(("name", "options"), SMALL)
def test_estimated_bytes_are_the_bytes_of_a_full_memory(name, options, kv_dtype):
    memory = fill(make_memory(name, kv_dtype=kv_dtype, **options), [3] * 10, batch_size=2)
    for layer in range(LAYERS):
        memory.read(layer, 3, unrotated)
    assert memory.num_slots == memory.capacity
    assert memory.nbytes == memory.estimate_nbytes(TRANSFORMER, TOKENS, 2, torch.float32)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_kv_dtype_is_the_type_of_storage(kv_dtype, tmp_path):
    memory = fill(make_memory("slow_fast", kv_dtype=kv_dtype, sink=0, slow=1, fast=6, interval=1), [3] * 4)
    state = memory.state_dict()
    assert state["keys.0"].dtype == state["values.1"].dtype == KV_DTYPES[kv_dtype]
    keys, values = memory.read(0, 3, unrotated)
    exact = torch.tensor([slot + 1.0 for slot in memory.frame_ids[0].tolist()]).to(KV_DTYPES[kv_dtype]).float()
    assert torch.equal(keys.float()[0, ::TOKENS, 0, 0], exact)
    assert torch.equal(values.float(), -keys.float())
    save_file(state, tmp_path / "memory.safetensors")
    again = make_memory("slow_fast", kv_dtype=kv_dtype, sink=0, slow=1, fast=6, interval=1)
    again.load_state_dict(load_file(tmp_path / "memory.safetensors"))
    assert torch.equal(fill(again, [3]).read(0, 3, unrotated)[0], fill(memory, [3]).read(0, 3, unrotated)[0])


def test_no_kv_dtype_keeps_the_type_of_the_model():
    memory = make_memory("full")
    memory.commit(numbered(0, 3, dtype=torch.bfloat16))
    assert memory.state_dict()["keys.0"].dtype == torch.bfloat16


def test_to_converts_what_is_stored():
    memory = fill(make_memory("full"), [3])
    memory.read(0, 3, unrotated)
    assert memory.to("cpu", torch.bfloat16) is memory
    assert memory.read(0, 3, unrotated)[0].dtype == memory.read(0, 3, unrotated)[1].dtype == torch.bfloat16


# --- copies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), SMALL)
def test_state_dict_restores_everything(name, options, tmp_path):
    memory = fill(make_memory(name, **options), [1, 3, 3, 2, 3], batch_size=2)
    save_file(memory.state_dict(), tmp_path / "memory.safetensors")
    again = make_memory(name, **options)
    again.load_state_dict(load_file(tmp_path / "memory.safetensors"))
    assert again.statistics() == memory.statistics()
    assert again.num_commits == memory.num_commits
    fill(again, [3, 3], batch_size=2)
    fill(memory, [3, 3], batch_size=2)
    check_content(again)
    assert torch.equal(again.frame_ids, memory.frame_ids)


def test_the_state_of_another_configuration_is_refused():
    state = fill(make_memory("sliding_window", window=6), [3]).state_dict()
    for other in (make_memory("sliding_window", window=9), make_memory("full")):
        with pytest.raises(MemoryConfigError, match=r"saved memory is .*'window': 6.*this one is"):
            other.load_state_dict(state)


@pytest.mark.parametrize(("name", "options"), SMALL)
def test_a_clone_and_its_original_go_separate_ways(name, options):
    memory = fill(make_memory(name, **options), [3] * 4)
    before = {key: tensor.clone() for key, tensor in memory.state_dict().items()}
    twin = memory.clone()
    assert type(twin) is type(memory)
    newest = torch.tensor([memory.num_frames - 1])
    twin.recache(numbered(100, 1), newest)
    memory.clone().keep(newest)
    twin.read(0, 3, unrotated)
    fill(twin, [3, 3])
    assert all(torch.equal(tensor, memory.state_dict()[key]) for key, tensor in before.items())
    check_content(memory)
    twin = memory.clone()
    memory.reset()
    assert memory.num_slots == 0 and twin.num_frames == 12
    check_content(twin)


def test_a_part_of_a_larger_forward_can_be_committed_and_saved(tmp_path):
    memory = make_memory("full")
    memory.commit([(key[:, 3:6], value[:, 3:6]) for key, value in numbered(-3, 9, batch_size=2)])
    save_file(memory.state_dict(), tmp_path / "memory.safetensors")
    again = make_memory("full")
    again.load_state_dict(load_file(tmp_path / "memory.safetensors"))
    check_content(again)


def test_reset_forgets_the_batch_size_too():
    memory = fill(make_memory("slow_fast"), [3], batch_size=2)
    memory.reset()
    assert memory.frame_ids.numel() == 0 and memory.nbytes == 0
    check_content(fill(memory, [3], batch_size=1))


# --- prompt switches -------------------------------------------------------------------------------------------


def test_recache_replaces_the_named_frames_wherever_they_are_stored():
    memory = make_memory("slow_fast", sink=3, slow=2, fast=6, interval=1, tau=float("inf"))
    fill(memory, [3] * 5)
    assert memory.frame_ids.tolist() == [[0, 1, 2, 9, 12, 12, 13, 14]]
    memory.read(0, 3, unrotated)
    memory.recache(numbered(49, 2), torch.tensor([12, 14]))
    keys, values = memory.read(0, 3, unrotated)
    assert keys[0, ::TOKENS, 0, 0].tolist() == [1, 2, 3, 10, 50, 50, 14, 51]
    assert torch.equal(values, -keys)
    assert memory.num_frames == 15 and memory.num_commits == 5


def test_recache_can_leave_samples_alone():
    memory = fill(make_memory("full"), [3], batch_size=2)
    memory.recache(numbered(49, 2, batch_size=2), torch.tensor([[[0, 2]], [[-1, -1]]]))
    keys, _ = memory.read(1, 3, unrotated)
    assert keys[:, ::TOKENS, 0, 0].tolist() == [[50, 2, 51], [1, 2, 3]]


def test_keep_drops_all_other_frames_and_copies():
    memory = make_memory("slow_fast", sink=3, slow=2, fast=6, interval=1, tau=float("inf"))
    fill(memory, [3] * 5, batch_size=2)
    memory.read(0, 3, unrotated)
    memory.keep(torch.tensor([0, 1, 2, 12, 14]))
    assert memory.frame_ids.tolist() == [[0, 1, 2, 12, 14]] * 2
    check_content(memory)
    fill(memory, [3], batch_size=2)
    assert memory.frame_ids.tolist() == [[0, 1, 2, 12, 14, 15, 16, 17]] * 2
    check_content(memory)
    memory.keep(torch.tensor([], dtype=torch.int64))
    assert memory.num_slots == 0
    check_content(fill(memory, [3], batch_size=2))


def test_keep_refuses_frames_that_are_gone():
    memory = fill(make_memory("sliding_window", window=6), [3] * 3)
    with pytest.raises(MemoryConfigError, match=r"Frames \[0, 8\] are not all stored; slots hold \[\[6, 7, 8\]\]"):
        memory.keep(torch.tensor([0, 8]))
    with pytest.raises(MemoryConfigError, match="not all stored"):
        make_memory("full").keep(torch.tensor([0]))


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), SMALL)
def test_keys_of_another_video_or_model_are_refused_and_change_nothing(name, options):
    memory = fill(make_memory(name, **options), [3], batch_size=2)
    with pytest.raises(MemoryConfigError, match="holds 2 layers, the model gave 1"):
        memory.commit(numbered(3, 3, batch_size=2)[:1])
    with pytest.raises(MemoryConfigError, match=r"\(2, 2, 1, 4\), the model gave \(1, 2, 1, 4\)"):
        memory.commit(numbered(3, 3, batch_size=1))
    with pytest.raises(MemoryConfigError, match="another video or model"):
        memory.commit([(key[..., :1, :, :], value) for key, value in numbered(3, 3, batch_size=2)])
    assert memory.num_frames == 3
    check_content(memory)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make_memory("slowfast"), "Unknown memory 'slowfast'.*Did you mean 'slow_fast'"),
        (lambda: make_memory("sliding_window", sinks=3), "Unknown option 'sinks'.*allowed: .*sink"),
        (lambda: make_memory(FullMemoryConfig(), max_frame=2), "does not describe a memory"),
        (lambda: make_memory("full", max_frames=0), "max_frames=0"),
        (lambda: make_memory("full", num_frames_per_block=0), "num_frames_per_block=0"),
        (lambda: make_memory("full", positions="relative"), "positions='relative'; allowed: 'bounded', 'absolute'"),
        (lambda: make_memory("full", kv_dtype="int4"), "kv_dtype='int4'; allowed: None, 'float32'"),
        (lambda: make_memory("sliding_window", window=0), "window must be >= 1"),
        (lambda: make_memory("sliding_window", window=5), "window=5 leaves no room.*use at least 6"),
        (lambda: make_memory("slow_fast", fast=5), "fast=5 leaves no room.*use at least 6"),
        (lambda: make_memory("slow_fast", slow=-1), "slow must be >= 0"),
        (lambda: make_memory("slow_fast", tau=1.5), "tau=1.5 is no cosine similarity"),
        (lambda: make_memory("slow_fast", tau=float("nan")), "tau=nan"),
        (lambda: make_memory("slow_fast", interval=0), "interval=0"),
        (lambda: make_memory("slow_fast", retain="middle"), "retain='middle'; allowed: 'first', 'last'"),
        (lambda: make_memory("slow_fast", eviction="random"), "eviction='random'; allowed: 'oldest', 'newest'"),
        (lambda: make_memory("slow_fast", scope="token"), "scope='token'; allowed: 'global', 'per_layer'"),
        (lambda: make_memory("slow_fast", reference="first"), "reference='first'; allowed: 'previous_frame'"),
    ],
)
def test_a_configuration_that_cannot_work_says_what_would(build, message):
    with pytest.raises(MemoryConfigError, match=message):
        build()


@pytest.mark.parametrize("value", ["", "3", [], {}, True, float("nan"), 0.5 - 3], ids=repr)
def test_a_setting_of_another_kind_is_an_error_that_users_see(value):
    for name, (_, config_class) in MEMORIES.items():
        for field in dataclasses.fields(config_class):
            with pytest.raises(VidgenError, match=f"{field.name}="):
                make_memory(name, **{field.name: value})
        with pytest.raises(VidgenError, match="num_frames_per_block="):
            make_memory(name, value)
    with pytest.raises(VidgenError, match="Unknown memory"):
        make_memory(value)


def test_make_memory_builds_what_was_named():
    assert isinstance(make_memory("full", max_frames=9), FullMemory)
    assert make_memory("full", max_frames=9).capacity == 9
    assert isinstance(make_memory(SlidingWindowMemoryConfig(window=9), 2), SlidingWindowMemory)
    assert make_memory(SlidingWindowMemoryConfig(window=9), 2).capacity == 7
    memory = make_memory(SlowFastMemoryConfig(slow=5))
    assert isinstance(memory, SlowFastMemory) and memory.config.slow == 5
    # The size of a whole video concerns the full memory only.
    assert make_memory("sliding_window", max_frames=9).capacity == 18


def test_configurations_cannot_be_changed_under_a_memory():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_memory("full").config.max_frames = 3


def test_statistics_are_plain_numbers():
    statistics = fill(make_memory("sliding_window", window=6), [3] * 3).statistics()
    assert statistics == {
        "num_frames": 9,
        "num_slots": 3,
        "slot_ages": [[3, 2, 1]],
        "nbytes": 2 * LAYERS * 3 * TOKENS * DIM * 4,
    }
