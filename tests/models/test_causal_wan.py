"""What would be wrong: another network than Wan, a leak from the future, chunks that differ from the whole."""

from __future__ import annotations

import hashlib

import pytest
import torch
from diffusers import WanTransformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from vidgen.memory import FullMemory, FullMemoryConfig, KVMemory, make_memory
from vidgen.models.causal_wan import (
    CausalWanTransformer3DModel,
    apply_rotary_emb,
    block_causal_frames,
    frame_attention_mask,
    frame_mask_mod,
    precondition,
)

CONFIG = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 8,
    "freq_dim": 16,
    "ffn_dim": 48,
    "num_layers": 2,
}
CHUNK = 3


def make_model(**overrides) -> CausalWanTransformer3DModel:
    torch.manual_seed(0)
    return CausalWanTransformer3DModel(**{**CONFIG, **overrides}).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> CausalWanTransformer3DModel:
    return make_model()


def make_inputs(num_frames: int = 9, batch_size: int = 2, height: int = 6, width: int = 10, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(batch_size, 4, num_frames, height, width, generator=generator)
    timestep = torch.rand(batch_size, num_frames, generator=generator) * 1000
    text = torch.randn(batch_size, 5, 8, generator=generator)
    return latents, timestep, text


def generate(model, latents, timestep, text, memory: KVMemory, chunk: int = CHUNK) -> torch.Tensor:
    """Run chunk after chunk, committing each, as a pipeline does with its clean frames."""
    outputs = []
    for start in range(0, latents.shape[2], chunk):
        part = slice(start, start + chunk)
        output = model(latents[:, :, part], timestep[:, part], text, kv_memory=memory, return_key_values=True)
        memory.commit(output.key_values)
        outputs.append(output.sample)
    return torch.cat(outputs, dim=2)


def fingerprint(memory: KVMemory) -> str:
    digest = hashlib.sha256()
    for name, tensor in memory.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --- the same network as diffusers' Wan ------------------------------------------------------------------------


def test_stock_weights_load_and_give_the_stock_output(tmp_path):
    torch.manual_seed(0)
    stock = WanTransformer3DModel(**CONFIG).eval().requires_grad_(False)
    stock.save_pretrained(tmp_path)
    causal = CausalWanTransformer3DModel.from_pretrained(tmp_path, causal=False).eval()
    assert causal.state_dict().keys() == stock.state_dict().keys()
    latents, timestep, text = make_inputs(num_frames=4)
    expected = stock(latents, timestep[:, 0], text).sample
    torch.testing.assert_close(causal(latents, timestep[:, 0], text).sample, expected, atol=1e-5, rtol=1e-5)


def test_our_weights_load_into_the_stock_model(model, tmp_path):
    model.save_pretrained(tmp_path)
    stock = WanTransformer3DModel.from_pretrained(tmp_path).eval()
    latents, timestep, text = make_inputs(num_frames=4)
    one_block = torch.zeros(4, dtype=torch.int64)
    output = model(latents, timestep[:, 0], text, frame_blocks=one_block).sample
    torch.testing.assert_close(output, stock(latents, timestep[:, 0], text).sample, atol=1e-5, rtol=1e-5)


def test_timestep_per_frame_equals_stock_timestep_per_token(model, tmp_path):
    model.save_pretrained(tmp_path)
    stock = WanTransformer3DModel.from_pretrained(tmp_path).eval()
    latents, timestep, text = make_inputs(num_frames=4)
    per_token = timestep.repeat_interleave(model.tokens_per_frame(6, 10), dim=1)
    output = model(latents, timestep, text, frame_blocks=torch.zeros(4, dtype=torch.int64)).sample
    torch.testing.assert_close(output, stock(latents, per_token, text).sample, atol=1e-5, rtol=1e-5)


def test_equal_timesteps_per_frame_equal_one_timestep(model):
    latents, timestep, text = make_inputs(num_frames=4)
    one = timestep[:, :1]
    torch.testing.assert_close(
        model(latents, one.expand(-1, 4), text).sample, model(latents, one[:, 0], text).sample, atol=1e-5, rtol=1e-5
    )


def test_folder_round_trip_is_exact(model, tmp_path):
    model.save_pretrained(tmp_path)
    again = CausalWanTransformer3DModel.from_pretrained(tmp_path).eval()
    fields = [name for name in model.config if not name.startswith("_")]
    assert [again.config[name] for name in fields if name != "patch_size"] == [
        model.config[name] for name in fields if name != "patch_size"
    ]
    inputs = make_inputs()
    assert torch.equal(again(*inputs).sample, model(*inputs).sample)


# --- causality -------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    tokens_per_frame=st.integers(1, 3),
)
def test_mask_equals_a_naive_double_loop_and_its_mask_mod(steps, tokens_per_frame):
    frame_blocks = torch.tensor([0, *steps]).cumsum(0)
    tokens = len(frame_blocks) * tokens_per_frame
    naive = torch.zeros(tokens, tokens, dtype=torch.bool)
    for query in range(tokens):
        for key in range(tokens):
            naive[query, key] = frame_blocks[key // tokens_per_frame] <= frame_blocks[query // tokens_per_frame]
    mask = frame_attention_mask(block_causal_frames(frame_blocks), tokens_per_frame)
    assert bool(naive.all()) if mask is None else torch.equal(mask[0, 0], naive)
    mask_mod = frame_mask_mod(block_causal_frames(frame_blocks), tokens_per_frame)
    index = torch.arange(tokens)
    assert torch.equal(mask_mod(0, 0, index[:, None], index[None, :]), naive)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_the_mask_mod_equals_masked_attention():
    frame_blocks = torch.tensor([0, 0, 1, 1, 1, 2])
    query, key, value = torch.randn(3, 1, 2, 24, 16, generator=torch.Generator().manual_seed(0)).unbind()
    frame_mask = block_causal_frames(frame_blocks)
    flex_mask = create_block_mask(frame_mask_mod(frame_mask, 4), None, None, 24, 24, device="cpu")
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=frame_attention_mask(frame_mask, 4)
    )
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=flex_mask), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frames_per_block", [1, 3])
def test_a_frame_sees_its_own_block_and_earlier_ones_only(frames_per_block):
    model = make_model(num_frames_per_block=frames_per_block)
    latents, timestep, text = make_inputs(num_frames=6, batch_size=1)
    before = model(latents, timestep, text).sample
    for frame in range(6):
        changed = latents.clone()
        changed[:, :, frame] += 1
        difference = (model(changed, timestep, text).sample - before).abs().amax(dim=(0, 1, 3, 4))
        first_seen = frame // frames_per_block * frames_per_block
        assert (difference[:first_seen] == 0).all()
        assert (difference[first_seen:] > 1e-6).all()


def test_causal_false_lets_the_first_frame_see_the_last():
    model = make_model(causal=False)
    latents, timestep, text = make_inputs(num_frames=6, batch_size=1)
    before = model(latents, timestep, text).sample
    latents[:, :, -1] += 1
    assert (model(latents, timestep, text).sample - before)[:, :, 0].abs().max() > 1e-6


# --- cached equals uncached ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("size", [(2, 2), (6, 10), (2, 14)])
def test_chunks_with_full_memory_equal_one_block_causal_forward(model, batch_size, size):
    inputs = make_inputs(9, batch_size, *size)
    whole = model(*inputs).sample
    chunks = generate(model, *inputs, make_memory("full"))
    torch.testing.assert_close(chunks, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["full", "sliding_window", "slow_fast"])
def test_a_copy_or_a_saved_memory_continues_bit_identically(model, tmp_path, name):
    options = {"sink": 3, "slow": 3, "fast": 6, "interval": 1} if name == "slow_fast" else {}
    options = {"window": 9} if name == "sliding_window" else options
    latents, timestep, text = make_inputs(num_frames=21)
    memory = make_memory(name, **options)
    generate(model, latents[:, :, :15], timestep[:, :15], text, memory)
    save_file(memory.state_dict(), tmp_path / "memory.safetensors")

    rest = latents[:, :, 15:], timestep[:, 15:], text
    twin = memory.clone()
    loaded = make_memory(name, **options)
    loaded.load_state_dict(load_file(tmp_path / "memory.safetensors"))
    expected = generate(model, *rest, memory)
    assert torch.equal(generate(model, *rest, twin), expected)
    assert torch.equal(generate(model, *rest, loaded), expected)
    assert loaded.statistics() == memory.statistics() == twin.statistics()


def test_clone_is_independent_of_its_original(model):
    latents, timestep, text = make_inputs(num_frames=6)
    memory = make_memory("full")
    generate(model, latents[:, :, :3], timestep[:, :3], text, memory)
    before = fingerprint(memory)
    twin = memory.clone()
    generate(model, latents[:, :, 3:], timestep[:, 3:], text, twin)
    assert fingerprint(memory) == before
    assert twin.num_frames == 6 and memory.num_frames == 3


def test_forward_without_commit_leaves_the_memory_unchanged(model):
    latents, timestep, text = make_inputs(num_frames=6)
    memory = make_memory("slow_fast")
    generate(model, latents[:, :, :3], timestep[:, :3], text, memory)
    before = fingerprint(memory)
    first = model(latents[:, :, 3:], timestep[:, 3:], text, kv_memory=memory).sample
    second = model(latents[:, :, 3:], timestep[:, 3:], text, kv_memory=memory, return_key_values=True).sample
    assert fingerprint(memory) == before
    assert torch.equal(first, second)


def test_the_cached_copy_of_rotated_keys_is_renewed_by_a_commit(model):
    latents, timestep, text = make_inputs(num_frames=12)
    reused, fresh = make_memory("sliding_window", window=6), make_memory("sliding_window", window=6)
    for start in range(0, 12, CHUNK):
        part = latents[:, :, start : start + CHUNK], timestep[:, start : start + CHUNK], text
        fresh.load_state_dict(reused.state_dict())
        output = model(*part, kv_memory=reused, return_key_values=True)
        assert torch.equal(model(*part, kv_memory=fresh).sample, output.sample)
        reused.commit(output.key_values)


def test_a_batch_equals_its_samples_alone(model):
    latents, timestep, text = make_inputs(num_frames=9, batch_size=3)
    together = generate(model, latents, timestep, text, make_memory("full"))
    for i in range(3):
        alone = generate(model, latents[i : i + 1], timestep[i : i + 1], text[i : i + 1], make_memory("full"))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


# --- positions -------------------------------------------------------------------------------------------------


class ShiftedMemory(FullMemory):
    """Full memory whose slots all sit at a later position."""

    shift = 0

    def key_positions(self, layer: int = 0) -> torch.Tensor:
        return super().key_positions(layer) + self.shift

    def query_positions(self, num_frames: int) -> torch.Tensor:
        return super().query_positions(num_frames) + self.shift


def test_shifting_all_slots_by_a_constant_changes_nothing(model):
    inputs = make_inputs(num_frames=9)
    expected = generate(model, *inputs, ShiftedMemory(FullMemoryConfig()))
    for shift in (1, 500):
        shifted = ShiftedMemory(FullMemoryConfig())
        shifted.shift = shift
        torch.testing.assert_close(generate(model, *inputs, shifted), expected, atol=2e-5, rtol=1e-5)


def test_the_distance_between_slots_matters(model):
    latents, timestep, text = make_inputs(num_frames=6)
    memory = make_memory("full")
    generate(model, latents[:, :, :3], timestep[:, :3], text, memory)
    part = latents[:, :, 3:], timestep[:, 3:], text
    near = model(*part, kv_memory=memory).sample
    far = model(*part, kv_memory=memory, frame_positions=torch.tensor([103, 104, 105])).sample
    assert (near - far).abs().max() > 1e-5


def test_keys_are_stored_before_rotation(model):
    latents, timestep, text = make_inputs(num_frames=3)
    here = model(latents, timestep, text, return_key_values=True).key_values
    there = model(latents, timestep, text, return_key_values=True, frame_positions=torch.arange(7, 10)).key_values
    assert torch.equal(here[0][0], there[0][0])
    assert here[0][0].shape == (2, 3, model.tokens_per_frame(6, 10), 2, 16)


def test_positions_may_differ_between_samples(model):
    latents, timestep, text = make_inputs(num_frames=3)
    positions = torch.tensor([[0, 1, 2], [0, 5, 9]])
    together = model(latents, timestep, text, frame_positions=positions).sample
    for i in range(2):
        alone = model(latents[i : i + 1], timestep[i : i + 1], text[i : i + 1], frame_positions=positions[i]).sample
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_rotation_keeps_norms_and_depends_on_the_distance_only():
    model = make_model()
    query, key = torch.randn(2, 1, 1, 2, 16, generator=torch.Generator().manual_seed(0)).unbind()

    def rotated(tensor: torch.Tensor, position: int) -> torch.Tensor:
        return apply_rotary_emb(tensor, model.rotary_embedding(torch.tensor([[position]]), 1, 1))

    torch.testing.assert_close(rotated(query, 9).norm(), query.norm())
    torch.testing.assert_close(
        (rotated(query, 9) * rotated(key, 4)).sum(), (rotated(query, 5) * rotated(key, 0)).sum()
    )


def test_absolute_positions_are_frame_numbers_and_bounded_ones_are_slots(model):
    inputs = make_inputs(num_frames=15)
    absolute, bounded = (make_memory("sliding_window", window=9, positions=p) for p in ("absolute", "bounded"))
    with_absolute, with_bounded = generate(model, *inputs, absolute), generate(model, *inputs, bounded)
    assert absolute.key_positions().tolist() == [[9, 10, 11, 12, 13, 14]] * 2
    assert absolute.query_positions(3).tolist() == [[15, 16, 17]]
    assert bounded.key_positions().tolist() == [[0, 1, 2, 3, 4, 5]]
    assert bounded.query_positions(3).tolist() == [[6, 7, 8]]
    # Without a gap in the window only distances count; behind a sink the two layouts are really different.
    torch.testing.assert_close(with_absolute, with_bounded, atol=2e-5, rtol=1e-5)
    absolute, bounded = (make_memory("sliding_window", window=6, sink=3, positions=p) for p in ("absolute", "bounded"))
    assert (generate(model, *inputs, absolute) - generate(model, *inputs, bounded)).abs().max() > 1e-5


def test_leaving_the_rotary_table_is_an_error_that_names_the_frame():
    model = make_model(rope_max_seq_len=8)
    latents, timestep, text = make_inputs(num_frames=9, batch_size=1)
    with pytest.raises(ValueError, match="position 8 lies outside the rotary table of 8"):
        model(latents, timestep, text)
    with pytest.raises(ValueError, match="position -1 lies outside"):
        model(latents[:, :, :3], timestep[:, :3], text, frame_positions=torch.tensor([-1, 0, 1]))
    with pytest.raises(ValueError, match="bounded positions"):
        generate(model, latents, timestep, text, make_memory("sliding_window", window=6, positions="absolute"))
    assert generate(model, latents, timestep, text, make_memory("sliding_window", window=6)).isfinite().all()


# --- every slot is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_perturbing_any_live_slot_changes_the_next_chunk(model, kind):
    latents, timestep, text = make_inputs(num_frames=21, batch_size=1, height=2, width=4)
    options = {"sink": 3, "slow": 4, "fast": 6, "interval": 1}
    memory = make_memory("slow_fast", **options)
    generate(model, latents[:, :, :18], timestep[:, :18], text, memory)
    state, part = memory.state_dict(), (latents[:, :, 18:], timestep[:, 18:], text)
    before = model(*part, kv_memory=memory).sample
    assert memory.num_slots == memory.capacity == 10
    for slot in range(memory.num_slots):
        tensor = state[f"{kind}.1"].clone()
        tensor[:, slot] = -tensor[:, slot]
        perturbed = make_memory("slow_fast", **options)
        perturbed.load_state_dict(state | {f"{kind}.1": tensor})
        assert (model(*part, kv_memory=perturbed).sample - before).abs().max() > 1e-7, f"slot {slot} is not read"


def test_per_layer_choices_are_read_by_their_layer(model):
    options = {"sink": 0, "slow": 2, "fast": 6, "interval": 1, "scope": "per_layer", "positions": "absolute"}
    memory = make_memory("slow_fast", **options)
    latents, timestep, text = make_inputs(num_frames=12, batch_size=1)
    for start in range(0, 12, CHUNK):
        part = slice(start, start + CHUNK)
        output = model(latents[:, :, part], timestep[:, part], text, kv_memory=memory, return_key_values=True)
        memory.commit(output.key_values, promote=torch.tensor([[True], [False]]))
    assert memory.key_positions(0).tolist() == [[6, 9, 9, 10, 11]]
    assert memory.key_positions(1).tolist() == [[0, 1, 9, 10, 11]]
    rotated_at = []

    def rotate(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rotated_at.append(positions.tolist())
        return keys

    memory.read(0, CHUNK, rotate)
    memory.read(1, CHUNK, rotate)
    assert rotated_at == [[[6, 9, 9, 10, 11]], [[0, 1, 9, 10, 11]]]


# --- training --------------------------------------------------------------------------------------------------


def test_gradient_checkpointing_changes_neither_loss_nor_gradients():
    latents, timestep, text = make_inputs(num_frames=6)
    results = []
    for checkpointing in (False, True):
        model = make_model().requires_grad_(True).train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        memory = make_memory("full")
        with torch.no_grad():
            generate(model, latents[:, :, :3], timestep[:, :3], text, memory)
        before = fingerprint(memory)
        part = latents[:, :, 3:], timestep[:, 3:], text
        whole = model(latents, timestep, text).sample.square().mean()
        loss = whole + model(*part, kv_memory=memory).sample.square().mean()
        loss.backward()
        assert fingerprint(memory) == before and memory.num_commits == 1
        results.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    (plain_loss, plain), (checkpointed_loss, checkpointed) = results
    torch.testing.assert_close(checkpointed_loss, plain_loss, atol=1e-7, rtol=1e-6)
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
        assert gradient.abs().max() > 0, f"{name} gets no gradient"


def test_commit_cuts_the_graph_and_earlier_graphs_stay_valid():
    model = make_model().requires_grad_(True)
    latents, timestep, text = make_inputs(num_frames=6)
    memory = make_memory("full")
    first = model(latents[:, :, :3], timestep[:, :3], text, kv_memory=memory, return_key_values=True)
    memory.commit(first.key_values)
    assert not any(tensor.requires_grad for tensor in memory.state_dict().values())
    second = model(latents[:, :, 3:], timestep[:, 3:], text, kv_memory=memory, return_key_values=True)
    memory.commit(second.key_values)
    assert not any(tensor.requires_grad for tensor in memory.state_dict().values())
    second.sample.square().mean().backward()
    assert model.blocks[0].attn1.to_q.weight.grad.isfinite().all()


def test_lora_adapter_attaches_scales_and_travels(tmp_path):
    peft = pytest.importorskip("peft")
    inputs = make_inputs(num_frames=3)
    model = make_model()
    base = model(*inputs).sample
    model.add_adapter(peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v", "ffn.net.2"]))
    assert torch.equal(model(*inputs).sample, base), "a new adapter must not change the model"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    adapted = model(*inputs).sample
    assert (adapted - base).abs().max() > 1e-4
    torch.testing.assert_close(model(*inputs, attention_kwargs={"scale": 0.0}).sample, base, atol=1e-6, rtol=1e-6)
    model.save_lora_adapter(tmp_path)
    fresh = make_model()
    fresh.load_lora_adapter(tmp_path, prefix=None, use_safetensors=True)
    torch.testing.assert_close(fresh(*inputs).sample, adapted, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_compiled_blocks_equal_eager_ones_without_graph_breaks(model):
    compiled = make_model()
    compiled.load_state_dict(model.state_dict())
    compiled.compile_repeated_blocks(fullgraph=True)
    inputs = make_inputs(num_frames=9)
    torch.testing.assert_close(compiled(*inputs).sample, model(*inputs).sample, atol=1e-5, rtol=1e-4)
    expected = generate(model, *inputs, make_memory("slow_fast"))
    torch.testing.assert_close(generate(compiled, *inputs, make_memory("slow_fast")), expected, atol=1e-5, rtol=1e-4)


def test_bfloat16_keeps_its_type_and_chunks_stay_close(tmp_path, model):
    model.save_pretrained(tmp_path)
    half = CausalWanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16).eval()
    assert half.blocks[0].scale_shift_table.dtype == torch.float32
    latents, timestep, text = make_inputs(num_frames=6)
    inputs = latents.bfloat16(), timestep, text.bfloat16()
    memory = make_memory("full")
    chunks = generate(half, *inputs, memory)
    assert chunks.dtype == torch.bfloat16
    assert memory.state_dict()["keys.0"].dtype == torch.bfloat16
    torch.testing.assert_close(chunks.float(), model(latents, timestep, text).sample, atol=0.1, rtol=0.1)


@pytest.mark.gpu
def test_chunks_equal_the_whole_on_cuda_with_every_mask_backend():
    model = make_model().to("cuda")
    inputs = [tensor.cuda() for tensor in make_inputs(num_frames=9)]
    whole = model(*inputs).sample
    torch.testing.assert_close(generate(model, *inputs, make_memory("full")), whole, atol=1e-3, rtol=1e-3)
    model.set_attention_backend("flex")
    torch.testing.assert_close(model(*inputs).sample, whole, atol=1e-3, rtol=1e-3)


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0])
def test_preconditioned_targets_have_unit_variance_and_give_the_velocity(sigma):
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(8, 4, 3, 16, 16, generator=generator) for _ in range(2))
    clean = 1.7 * clean
    noisy, timestep = (1 - sigma) * clean + sigma * noise, torch.full((8, 1), 1000 * sigma)
    guess = precondition(torch.zeros_like(noisy), noisy, timestep, sigma_data=1.7)
    target = (guess - (noise - clean)) * ((1 - sigma) ** 2 * 1.7**2 + sigma**2) ** 0.5 / 1.7
    assert target.std() == pytest.approx(1, abs=0.02)
    # The linear guess leaves nothing that a linear function of the input could still explain.
    assert (target * noisy).mean().abs() < 0.05
    torch.testing.assert_close(precondition(target, noisy, timestep, 1.7), noise - clean, atol=1e-5, rtol=0)


def test_an_untrained_preconditioned_model_with_zero_output_gives_the_linear_guess():
    model = make_model(sigma_data=1.0)
    torch.nn.init.zeros_(model.proj_out.weight)
    torch.nn.init.zeros_(model.proj_out.bias)
    latents, _, text = make_inputs(batch_size=1)
    timestep = torch.tensor([[0.0] * 3 + [500.0] * 3 + [1000.0] * 3])
    velocity = model(latents, timestep, text).sample
    # -x where there is no noise, 0 half way, x at pure noise
    torch.testing.assert_close(velocity, torch.cat([-latents[:, :, :3], 0 * latents[:, :, 3:6], latents[:, :, 6:]], 2))


def test_condition_channels_are_no_part_of_the_linear_guess():
    model = make_model(sigma_data=1.0, in_channels=6)
    torch.nn.init.zeros_(model.proj_out.weight)
    torch.nn.init.zeros_(model.proj_out.bias)
    latents, _, text = make_inputs(batch_size=1)
    told = torch.randn(1, 2, *latents.shape[2:])
    velocity = model(torch.cat([latents, told], dim=1), torch.tensor([1000.0]), text).sample
    torch.testing.assert_close(velocity, latents)


def test_preconditioned_chunks_equal_one_block_causal_forward(tmp_path):
    model = make_model(sigma_data=0.5)
    latents, timestep, text = make_inputs()
    memory = make_memory("full", num_frames_per_block=CHUNK, max_frames=9)
    whole = model(latents, timestep, text).sample
    torch.testing.assert_close(generate(model, latents, timestep, text, memory), whole, atol=1e-5, rtol=1e-4)
    assert not torch.equal(whole, make_model()(latents, timestep, text).sample)
    model.save_pretrained(tmp_path)
    again = CausalWanTransformer3DModel.from_pretrained(tmp_path).eval()
    assert torch.equal(again(latents, timestep, text).sample, whole)


def test_bad_shapes_are_named(model):
    latents, timestep, text = make_inputs(num_frames=6)
    with pytest.raises(ValueError, match="5x10 cells do not divide into 2x2"):
        model(latents[:, :, :, :5], timestep, text)
    with pytest.raises(ValueError, match=r"timestep has shape \(2, 2\); allowed: \(2,\) or \(2, 6\)"):
        model(latents, timestep[:, :2], text)
    with pytest.raises(ValueError, match=r"frame_blocks has shape \(3,\); allowed: \(6,\)"):
        model(latents, timestep, text, frame_blocks=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"frame_positions has shape \(1,\)"):
        model(latents, timestep, text, frame_positions=torch.zeros(1, dtype=torch.int64))
    memory = make_memory("full")
    generate(model, latents[:, :, :3], timestep[:, :3], text, memory)
    with pytest.raises(ValueError, match="memory holds 2 videos and hidden_states 1"):
        model(latents[:1, :, 3:], timestep[:1, 3:], text[:1], kv_memory=memory)
    with pytest.raises(ValueError, match="with kv_memory all frames are one block"):
        model(latents, timestep, text, kv_memory=memory, frame_blocks=torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ValueError, match="num_frames_per_block=6"):
        model(latents, timestep, text, kv_memory=memory)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"patch_size": (2, 2, 2)}, "temporal patch of 1"), ({"image_dim": 8}, "image-conditioned")],
)
def test_configurations_of_other_wans_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        make_model(**overrides)


def test_return_dict_false_gives_a_tuple(model):
    inputs = make_inputs(num_frames=3)
    output = model(*inputs, return_dict=False)
    assert isinstance(output, tuple) and torch.equal(output[0], model(*inputs).sample)
    assert model(*inputs).key_values is None
