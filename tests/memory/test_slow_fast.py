"""What would be wrong: a memory that promotes on the wrong sign, mixes samples, forgets its sink, or grows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vidgen.memory import KVMemory, MemoryConfigError, SlowFastMemory, SlowFastMemoryConfig, make_memory
from vidgen.models.causal_wan import CausalWanTransformer3DModel

TOKENS, HEADS, DIM = 2, 1, 8
SMALL = {"sink": 3, "slow": 3, "fast": 6, "interval": 1}


def directions(*axes: int) -> torch.Tensor:
    """Unit vectors `(frames, dim)`; a negative number is the opposite of that axis (counted from 1)."""
    return torch.stack([math.copysign(1, axis) * torch.eye(DIM)[abs(axis) - 1] for axis in axes])


def key_values(samples: list[torch.Tensor], num_layers: int = 1):
    """Keys that are the given `(frames, dim)` vectors of each sample at every token; values are all ones."""
    key = torch.stack(samples)[:, :, None, None, :].expand(-1, -1, TOKENS, HEADS, -1).contiguous()
    return [(key, torch.ones_like(key))] * num_layers


def run(memory: KVMemory, chunks: list[torch.Tensor]) -> KVMemory:
    for chunk in chunks:
        memory.commit(key_values([chunk]))
    return memory


def slow_ids(memory: SlowFastMemory, sample: int = 0, layer: int = 0) -> list[int]:
    first = memory.config.sink
    return memory.layer_frame_ids(layer)[sample, first : first + memory.config.slow].tolist()


SAME = directions(1, 1, 1)
# Frame after frame at right angles, the first one also to the last one of the chunk before
ORTHOGONAL = [directions(1, 2, 3), directions(4, 5, 6)]


# --- equal to the simpler memories when they must be -----------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> CausalWanTransformer3DModel:
    torch.manual_seed(0)
    return (
        CausalWanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            text_dim=8,
            freq_dim=16,
            ffn_dim=48,
            num_layers=2,
        )
        .eval()
        .requires_grad_(False)
    )


def generate(model, memory: KVMemory, num_frames: int, batch_size: int = 1, samples: slice = slice(None)):
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(batch_size, 4, num_frames, 4, 4, generator=generator)[samples]
    text = torch.randn(batch_size, 5, 8, generator=generator)[samples]
    outputs = []
    for start in range(0, num_frames, 3):
        chunk = latents[:, :, start : start + 3]
        output = model(chunk, torch.zeros(len(chunk)), text, kv_memory=memory, return_key_values=True)
        memory.commit(output.key_values)
        outputs.append(output.sample)
    return torch.cat(outputs, dim=2)


def test_while_it_fills_it_is_the_full_memory_bit_for_bit(model):
    slow_fast = make_memory("slow_fast", tau=math.inf, interval=1)
    assert torch.equal(generate(model, slow_fast, 21), generate(model, make_memory("full"), 21))
    longer = generate(model, make_memory("slow_fast", tau=math.inf, interval=1), 24)
    assert not torch.equal(longer, generate(model, make_memory("full"), 24)), "24 frames can't fit 21 slots"


def test_without_sink_and_slow_slots_it_is_the_sliding_window_bit_for_bit(model):
    slow_fast, window = make_memory("slow_fast", sink=0, slow=0, fast=9), make_memory("sliding_window", window=9)
    assert torch.equal(generate(model, slow_fast, 21), generate(model, window, 21))
    assert torch.equal(slow_fast.frame_ids, window.frame_ids)
    assert slow_fast.statistics() == window.statistics()


def test_samples_decide_for_themselves_in_a_batch(model):
    options = {**SMALL, "interval": 1}
    probe = make_memory("slow_fast", **options)
    generate(model, probe, 30, batch_size=3)
    tau = probe.statistics()["suggested_tau"]
    together = make_memory("slow_fast", tau=tau, **options)
    outputs = generate(model, together, 30, batch_size=3)
    assert len(set(map(tuple, together.frame_ids.tolist()))) > 1, "alike samples prove nothing"
    for i in range(3):
        alone = make_memory("slow_fast", tau=tau, **options)
        output = generate(model, alone, 30, batch_size=3, samples=slice(i, i + 1))
        assert torch.equal(alone.frame_ids[0], together.frame_ids[i])
        torch.testing.assert_close(output[0], outputs[i], atol=1e-5, rtol=1e-5)


# --- when a frame is promoted ----------------------------------------------------------------------------------


def test_identical_frames_are_never_promoted():
    memory = run(make_memory("slow_fast", **SMALL), [SAME] * 20)
    assert memory.frame_ids.tolist() == [[0, 1, 2, 3, 4, 5, 57, 58, 59]]
    assert memory.statistics()["promotion_rate"] == 0


def test_orthogonal_frames_are_always_promoted():
    memory = run(make_memory("slow_fast", **SMALL), ORTHOGONAL * 10)
    assert memory.frame_ids.tolist() == [[0, 1, 2, 51, 54, 57, 57, 58, 59]]
    assert memory.statistics()["promotion_rate"] == 1


def test_tau_of_minus_one_never_promotes_not_even_opposites():
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, DIM, generator=generator).expand(3, -1)
    memory = run(make_memory("slow_fast", tau=-1.0, **SMALL), [vector, -vector] * 10)
    assert slow_ids(memory) == [3, 4, 5]


def test_infinite_tau_promotes_even_identical_frames():
    memory = run(make_memory("slow_fast", tau=math.inf, **SMALL), [SAME] * 20)
    assert slow_ids(memory) == [51, 54, 57]


@pytest.mark.parametrize(("tau", "promoted"), [(0.55, False), (0.65, True)])
def test_tau_is_the_border_of_the_similarity(tau, promoted):
    # Every frame has the cosine 0.6 with the frame before it.
    angle = math.acos(0.6)
    frames = [torch.tensor([math.cos(i * angle), math.sin(i * angle)] + [0.0] * (DIM - 2)) for i in range(30)]
    memory = run(make_memory("slow_fast", tau=tau, **SMALL), list(torch.stack(frames).split(3)))
    assert slow_ids(memory) == ([21, 24, 27] if promoted else [3, 4, 5])


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
def test_at_most_one_promotion_per_interval(interval):
    memory = make_memory("slow_fast", sink=3, slow=3, fast=6, interval=interval)
    promotions = []
    for chunk in range(40):
        before = slow_ids(memory) if memory.num_slots == memory.capacity else None
        run(memory, [ORTHOGONAL[chunk % 2]])
        if before is not None and slow_ids(memory) != before:
            promotions.append(chunk)
    assert promotions, "nothing was promoted"
    assert all(later - earlier == interval for earlier, later in itertools.pairwise(promotions))
    assert len(promotions) == memory.num_promotions == memory.num_decisions


@pytest.mark.parametrize(("retain", "offset"), [("first", 0), ("last", 2)])
def test_retain_chooses_the_frame_of_the_chunk(retain, offset):
    memory = run(make_memory("slow_fast", retain=retain, **SMALL), ORTHOGONAL * 5)
    assert slow_ids(memory) == [21 + offset, 24 + offset, 27 + offset]


def test_retain_chooses_the_frame_that_is_judged():
    # The chunk begins as the one before ended and ends elsewhere.
    chunks = [directions(1, 1, 2), directions(2, 2, 1)] * 5
    assert slow_ids(run(make_memory("slow_fast", retain="first", **SMALL), chunks)) == [3, 4, 5]
    assert slow_ids(run(make_memory("slow_fast", retain="last", **SMALL), chunks)) == [23, 26, 29]


@pytest.mark.parametrize(("eviction", "expected"), [("oldest", [21, 24, 27]), ("newest", [3, 4, 27])])
def test_eviction_chooses_who_makes_room(eviction, expected):
    assert slow_ids(run(make_memory("slow_fast", eviction=eviction, **SMALL), ORTHOGONAL * 5)) == expected


def test_reference_is_the_previous_frame_or_the_newest_slow_one():
    # Each chunk is still, but unlike the one before: news to the previous frame ...
    chunks = [directions(1, 1, 1), directions(2, 2, 2)] * 5
    assert slow_ids(run(make_memory("slow_fast", **SMALL), chunks)) == [21, 24, 27]
    # ... while the slow slots, frames 3 to 5 of direction 2, miss direction 1 only until it is promoted, and then 2.
    memory = make_memory("slow_fast", reference="last_slow", **SMALL)
    assert slow_ids(run(memory, chunks)) == [21, 24, 27]
    # A scene that cuts away from the newest slow frame and stays: promoted once, then known.
    stays = [directions(1, 1, 1)] * 4 + [directions(2, 2, 2)] * 6
    assert slow_ids(run(make_memory("slow_fast", reference="last_slow", **SMALL), stays)) == [4, 5, 12]
    # A slow turn: neighbors alike (0.98), the newest slow frame soon not.
    turn = [torch.tensor([[math.cos(i / 5), math.sin(i / 5)] + [0.0] * (DIM - 2)]).expand(3, -1) for i in range(10)]
    assert slow_ids(run(make_memory("slow_fast", **SMALL), turn)) == [3, 4, 5]
    assert slow_ids(run(make_memory("slow_fast", reference="last_slow", **SMALL), turn)) != [3, 4, 5]


def test_scope_is_one_decision_or_one_per_layer():
    moving, still = key_values([ORTHOGONAL[0]])[0], key_values([SAME])[0]
    turned = key_values([ORTHOGONAL[1]])[0]
    both = make_memory("slow_fast", scope="global", tau=0.4, **SMALL)
    each = make_memory("slow_fast", scope="per_layer", tau=0.4, **SMALL)
    for chunk in range(10):
        layers = [moving if chunk % 2 == 0 else turned, still]
        both.commit(layers)
        each.commit(layers)
    # The layers' mean, 0.5, is no surprise; the first layer alone is one.
    assert slow_ids(both, layer=0) == slow_ids(both, layer=1) == [3, 4, 5]
    assert slow_ids(each, layer=0) == [21, 24, 27]
    assert slow_ids(each, layer=1) == [3, 4, 5]
    assert torch.equal(each.state_dict()["keys.0"][0, 3], moving[0][0, 0] if 21 // 3 % 2 == 0 else turned[0][0, 0])


def test_similarity_averages_over_tokens_and_heads():
    generator = torch.Generator().manual_seed(0)
    chunks = [torch.randn(2, 3, 4, 3, 5, generator=generator) for _ in range(8)]
    memory = make_memory("slow_fast", **SMALL)
    for chunk in chunks:
        memory.commit([(chunk, chunk)])
    naive = []
    for previous, chunk in itertools.pairwise(chunks[2:]):
        for sample in range(2):
            cosines = []
            for token in range(4):
                for head in range(3):
                    a, b = chunk[sample, 0, token, head], previous[sample, -1, token, head]
                    cosines.append(float(a @ b / (a.norm() * b.norm())))
            naive.append(sum(cosines) / len(cosines))
    assert memory.similarities == pytest.approx(naive, abs=1e-6)


# --- what never happens ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slots_equal_a_naive_list_of_roles(data):
    sink, slow = data.draw(st.integers(0, 4), "sink"), data.draw(st.integers(0, 4), "slow")
    fast, interval = data.draw(st.integers(6, 8), "fast"), data.draw(st.integers(1, 3), "interval")
    retain = data.draw(st.sampled_from(["first", "last"]), "retain")
    eviction = data.draw(st.sampled_from(["oldest", "newest"]), "eviction")
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=16), "sizes")
    surprising = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)), "surprising")
    config = SlowFastMemoryConfig(
        sink=sink, slow=slow, fast=fast, interval=interval, retain=retain, eviction=eviction, tau=0.5
    )
    memory = SlowFastMemory(config, num_frames_per_block=3)

    roles: dict[str, list[int]] = {"sink": [], "slow": [], "fast": []}
    first, axis = 0, 1
    for number, (size, surprise) in enumerate(zip(sizes, surprising), start=1):
        # All frames of a chunk are alike; a surprising chunk turns away from the one before.
        axis = axis % DIM + 1 if surprise else axis
        memory.commit(key_values([directions(*[axis] * size)]))
        frames = list(range(first, first + size))
        first += size
        overflows = first > sink + slow + fast - 3
        roles["fast"] += frames
        while len(roles["sink"]) < sink and roles["fast"]:
            roles["sink"].append(roles["fast"].pop(0))
        while len(roles["slow"]) < slow and roles["fast"]:
            roles["slow"].append(roles["fast"].pop(0))
        roles["fast"] = roles["fast"][-(fast - 3) :]
        if overflows and slow and surprise and number % interval == 0:
            roles["slow"].pop(0 if eviction == "oldest" else -1)
            roles["slow"].append(frames[0 if retain == "first" else -1])
        assert memory.frame_ids.tolist() == [roles["sink"] + roles["slow"] + roles["fast"]]


def test_ten_thousand_chunks_in_constant_space():
    memory = make_memory("slow_fast", interval=2)
    generator = torch.Generator().manual_seed(0)
    chunks = torch.randn(64, 2, 3, 1, 1, 2, generator=generator)
    sizes = set()
    for chunk in range(10_000):
        key = chunks[chunk % 64]
        memory.commit([(key, key)])
        if chunk % 97 == 0 and chunk > 7:
            sizes.add(memory.nbytes)
            ids = memory.frame_ids
            assert ids[:, :3].tolist() == [[0, 1, 2]] * 2
            assert bool((ids[:, 3:15].diff(dim=-1) > 0).all()), "slow slots are in order of time, without repeats"
            assert ids[:, 15:].tolist() == [list(range(3 * chunk, 3 * chunk + 3))] * 2
    assert memory.num_slots + 3 == 21
    assert len(sizes) == 1
    assert memory.num_frames == 30_000
    assert len(memory.similarities) <= 512
    assert int(memory.query_positions(3).max()) == 20
    assert 0 < memory.num_promotions < memory.num_decisions == 2 * (10_000 // 2 - 3)


def test_a_promoted_frame_survives_in_slow_after_it_left_fast():
    memory = run(make_memory("slow_fast", **SMALL), ORTHOGONAL * 3)
    assert memory.frame_ids.tolist() == [[0, 1, 2, 9, 12, 15, 15, 16, 17]]
    run(memory, [directions(6, 6, 6)] * 3)
    assert memory.frame_ids.tolist() == [[0, 1, 2, 9, 12, 15, 24, 25, 26]]
    assert torch.equal(memory.state_dict()["keys.0"][0, 5, 0, 0], ORTHOGONAL[1][0])


# --- steering and statistics -----------------------------------------------------------------------------------


def test_promote_replaces_the_decision_at_the_same_interval():
    memory = make_memory("slow_fast", sink=3, slow=3, fast=6, interval=2)
    for chunk in range(10):
        memory.commit(key_values([SAME, ORTHOGONAL[chunk % 2]]), promote=torch.tensor([True, False]))
    assert slow_ids(memory, 0) == [15, 21, 27]
    assert slow_ids(memory, 1) == [3, 4, 5]
    assert memory.similarities == []


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_promote_is_read_by_the_commits_that_decide_and_by_no_other(interval):
    options = {"sink": 3, "slow": 3, "fast": 6, "interval": interval}
    memory, undecided = make_memory("slow_fast", **options), make_memory("slow_fast", **options)
    promoted = [3, 4, 5]
    for number in range(1, 13):
        # Nine slots are full after three commits.
        decides = number > 3 and number % interval == 0
        # The memory's own decision on still frames is never to promote.
        memory.commit(key_values([SAME]), promote=torch.tensor([True]))
        undecided.commit(key_values([SAME]), promote=torch.tensor([not decides]))
        promoted = [*promoted[1:], 3 * (number - 1)] if decides else promoted
        if number >= 3:
            assert slow_ids(memory) == promoted
            assert slow_ids(undecided) == [3, 4, 5]
    assert memory.num_decisions == memory.num_promotions == undecided.num_decisions > 0
    assert undecided.num_promotions == 0
    assert memory.similarities == undecided.similarities == []


def test_promote_has_no_effect_on_memories_without_decisions():
    for name, options in (
        ("full", {"max_frames": 24}),
        ("sliding_window", {"window": 9}),
        ("slow_fast", {"slow": 0, "fast": 9, "sink": 0, "interval": 1}),
    ):
        plain, told = make_memory(name, **options), make_memory(name, **options)
        for chunk in range(6):
            plain.commit(key_values([ORTHOGONAL[chunk % 2]]))
            told.commit(key_values([ORTHOGONAL[chunk % 2]]), promote=torch.tensor([True]))
        assert torch.equal(plain.frame_ids, told.frame_ids)


def test_promote_can_differ_between_layers():
    memory = make_memory("slow_fast", scope="per_layer", **SMALL)
    for _ in range(5):
        memory.commit(key_values([SAME, SAME], num_layers=2), promote=torch.tensor([[True, False], [False, True]]))
    assert slow_ids(memory, sample=0, layer=0) == slow_ids(memory, sample=1, layer=1) == [5, 9, 12]
    assert slow_ids(memory, sample=1, layer=0) == slow_ids(memory, sample=0, layer=1) == [3, 4, 5]


def test_statistics_report_rate_quantiles_and_a_threshold():
    memory = run(make_memory("slow_fast", **SMALL), [SAME] * 3)
    assert "promotion_rate" not in memory.statistics()
    run(memory, [directions(1, 1, 2), directions(1, 1, 1)] * 4)
    statistics = memory.statistics()
    assert statistics["promotion_rate"] == pytest.approx(memory.num_promotions / memory.num_decisions)
    assert 0 < statistics["promotion_rate"] < 1
    quantiles = list(statistics["similarity_quantiles"].values())
    assert quantiles == sorted(quantiles) and len(quantiles) == 5
    assert min(memory.similarities) <= statistics["suggested_tau"] <= max(memory.similarities)


def test_a_video_prefix_is_taken_in_one_commit_while_it_fits():
    memory = make_memory("slow_fast", **SMALL)
    run(memory, [torch.cat([SAME] * 3)])
    assert memory.frame_ids.tolist() == [list(range(9))]
    run(memory, [ORTHOGONAL[1]])
    assert memory.num_slots == memory.capacity
    with pytest.raises(MemoryConfigError, match="commit of 6 latent frames overflows the memory's 9 slots"):
        run(memory, [torch.cat([SAME] * 2)])
    with pytest.raises(MemoryConfigError, match="Commit chunks of at most 3"):
        run(make_memory("slow_fast", **SMALL), [torch.cat([SAME] * 4)])
