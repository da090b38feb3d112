"""What would be wrong: a leak between frames, a cache that differs from the whole, controls nobody hears."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from vidgen.memory import make_memory
from vidgen.models.causal_wan import frame_attention_mask, frame_mask_mod
from vidgen.models.world_dit import WorldDiT
from vidgen.runtime.errors import ConfigError, VidgenError

WINDOW = 8
CONFIG = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "ffn_dim": 32,
    "num_layers": 2,
    "window": WINDOW,
    "rope_dims": (4, 6, 6),
    "freq_dim": 16,
}


def make_model(control_type: str = "map", **overrides) -> WorldDiT:
    """A model whose zero-initialized layers are not zero, so that every input is heard."""
    torch.manual_seed(0)
    control_dim = 6 if control_type == "map" else 3
    model = WorldDiT(**{**CONFIG, "control_type": control_type, "control_dim": control_dim, **overrides})
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().requires_grad_(False)


def make_inputs(model: WorldDiT, num_frames: int = 6, batch_size: int = 2, height: int = 4, width: int = 6):
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch_size, 4, num_frames, height, width, generator=generator)
    timestep = torch.rand(batch_size, num_frames, generator=generator) * 1000
    if model.config.control_type == "map":
        return latents, timestep, torch.randn(batch_size, 6, num_frames, height, width, generator=generator)
    return latents, timestep, torch.randn(batch_size, num_frames, 3, generator=generator)


def part_of(inputs, start: int, end: int):
    latents, timestep, controls = inputs
    controls = controls[:, :, start:end] if controls.ndim == 5 else controls[:, start:end]
    return latents[:, :, start:end], timestep[:, start:end], controls


def generate(model, inputs, memory, sizes) -> torch.Tensor:
    outputs, start = [], 0
    for size in sizes:
        output = model(*part_of(inputs, start, start + size), kv_memory=memory, return_key_values=True)
        memory.commit(output.key_values)
        outputs.append(output.sample)
        start += size
    return torch.cat(outputs, dim=2)


def changed_frames(model, inputs, changed) -> torch.Tensor:
    """`(frames,)`, how much each frame's output differs between two inputs."""
    return (model(*changed).sample - model(*inputs).sample).abs().amax(dim=(0, 1, 3, 4))


# --- the network -----------------------------------------------------------------------------------------------


def naive_forward(model: WorldDiT, latents, timestep, controls) -> torch.Tensor:
    """The equations of the network on one video, a token at a time where it matters: no masks, no reshaping tricks."""
    state, config = model.state_dict(), model.config
    heads, size = config.num_attention_heads, config.attention_head_dim
    _, frames, height, width = latents.shape
    rows, columns = height // 2, width // 2

    def patches(video: torch.Tensor, name: str) -> torch.Tensor:
        weight = state[f"{name}.weight"][:, :, 0]
        tokens = [
            torch.einsum("cpq,dcpq->d", video[:, f, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2], weight)
            for f in range(frames)
            for r in range(rows)
            for c in range(columns)
        ]
        return torch.stack(tokens) + state[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = state.get(f"{name}.bias")
        return x @ state[f"{name}.weight"].T + (0 if bias is None else bias)

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * state[f"{name}.weight"]

    place = [(f, r, c) for f in range(frames) for r in range(rows) for c in range(columns)]

    def rotate(x: torch.Tensor) -> torch.Tensor:  # (tokens, heads, size): complex pairs, axis after axis
        out = x.clone()
        for token, position in enumerate(place):
            first = 0
            for coordinate, dim in zip(position, config.rope_dims, strict=True):
                for pair in range(dim // 2):
                    angle = torch.tensor(coordinate * 256.0 ** (-2 * pair / dim))
                    a, b = x[token, :, first + 2 * pair], x[token, :, first + 2 * pair + 1]
                    out[token, :, first + 2 * pair] = a * angle.cos() - b * angle.sin()
                    out[token, :, first + 2 * pair + 1] = a * angle.sin() + b * angle.cos()
                first += dim
        return out

    hidden = patches(latents, "patch_embedding")
    half = config.freq_dim // 2
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    angles = timestep.floor()[:, None] * frequencies
    silu = torch.nn.functional.silu
    temb = linear(
        silu(linear(torch.cat([angles.cos(), angles.sin()], -1), "time_embedder.linear_1")), "time_embedder.linear_2"
    )
    conditioning = temb.repeat_interleave(rows * columns, 0) + patches(controls, "control_embedding")
    for layer in range(config.num_layers):
        name = f"blocks.{layer}"
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = linear(silu(conditioning), f"{name}.modulation").chunk(
            6, -1
        )
        x = rms(hidden, f"{name}.norm1") * (1 + scale_a) + shift_a
        query, key, value = linear(x, f"{name}.attn.to_qkv").view(len(x), 3, heads, size).unbind(1)
        query, key = rotate(query), rotate(key)
        attended = torch.empty_like(query)
        for token, (frame, _, _) in enumerate(place):
            seen = [other for other, (past, _, _) in enumerate(place) if past <= frame]
            scores = torch.einsum("hd,khd->hk", query[token], key[seen]) / size**0.5
            attended[token] = torch.einsum("hk,khd->hd", scores.softmax(-1), value[seen])
        hidden = hidden + gate_a * linear(attended.flatten(1), f"{name}.attn.to_out")
        x = rms(hidden, f"{name}.norm2") * (1 + scale_f) + shift_f
        up, gate = linear(x, f"{name}.ffn.net.0.proj").chunk(2, -1)
        hidden = hidden + gate_f * linear(up * silu(gate), f"{name}.ffn.net.2")
    shift, scale = linear(silu(conditioning), "modulation_out").chunk(2, -1)
    normalized = (hidden - hidden.mean(-1, keepdim=True)) / (
        hidden.var(-1, unbiased=False, keepdim=True) + 1e-6
    ).sqrt()
    output = linear(normalized * (1 + scale) + shift, "proj_out").view(len(place), -1, 2, 2)
    sample = torch.empty_like(latents)
    for token, (f, r, c) in enumerate(place):
        sample[:, f, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2] = output[token]
    return sample


def test_the_network_is_what_its_equations_say():
    model = make_model()
    latents, timestep, controls = make_inputs(model, num_frames=3)
    output = model(latents, timestep, controls).sample
    for i in range(2):
        expected = naive_forward(model, latents[i], timestep[i], controls[i])
        torch.testing.assert_close(output[i], expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


def test_a_fresh_network_predicts_nothing_and_still_learns():
    torch.manual_seed(0)
    model = WorldDiT(**CONFIG)
    output = model(*make_inputs(model)).sample
    assert not output.any()
    (output - 1).square().mean().backward()
    assert model.proj_out.bias.grad.abs().max() > 0


def test_size_of_the_published_model():
    with torch.device("meta"):
        model = WorldDiT()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(774e6, rel=5e-3)
    assert model.blocks[0].ffn.net[2].in_features == 4096


def test_folder_round_trip_is_exact(tmp_path):
    model = make_model("vector", direction_embedding=True, forcing="diffusion_forcing")
    model.save_pretrained(tmp_path)
    again = WorldDiT.from_pretrained(tmp_path).eval()
    assert again.config.forcing == "diffusion_forcing"
    inputs = make_inputs(model)
    assert torch.equal(again(*inputs).sample, model(*inputs).sample)


@pytest.mark.parametrize("control_type", ["map", "vector"])
def test_gradient_checkpointing_changes_no_gradient(control_type):
    gradients = []
    for checkpointing in (False, True):
        model = make_model(control_type).train().requires_grad_(True)
        if checkpointing:
            model.enable_gradient_checkpointing()
        model(*make_inputs(model)).sample.square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_half_precision_of_the_released_code_is_close_but_not_the_same():
    exact, compat = make_model(), make_model(compat_fp16_norm=True)
    inputs = make_inputs(exact)
    difference = (compat(*inputs).sample - exact(*inputs).sample).abs().max() / exact(*inputs).sample.abs().max()
    assert 1e-6 < difference < 1e-2


# --- what sees what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("control_type", ["map", "vector"])
def test_a_frame_and_its_control_reach_that_frame_and_later_ones_only(control_type):
    model = make_model(control_type)
    latents, timestep, controls = inputs = make_inputs(model)
    for frame in range(6):
        for index in (0, 2):
            changed = [latents.clone(), timestep, controls.clone()]
            axis = 2 if changed[index].ndim == 5 else 1
            changed[index].select(axis, frame).add_(1)
            difference = changed_frames(model, inputs, changed)
            assert (difference[:frame] == 0).all() and (difference[frame:] > 1e-5).all()


def test_a_map_is_local_to_its_token_where_attention_mixes_nothing():
    model = make_model()
    for block in model.blocks:
        block.attn.to_out.weight.zero_()
    latents, timestep, controls = inputs = make_inputs(model, num_frames=2)
    controls = controls.clone()
    controls[:, :, 1, :2, 2:4] += 1
    difference = (model(latents, timestep, controls).sample - model(*inputs).sample).abs().amax(dim=(0, 1))
    inside = torch.zeros(2, 4, 6, dtype=torch.bool)
    inside[1, :2, 2:4] = True
    assert difference[inside].min() > 1e-4 and difference[~inside].max() < 1e-5


def test_only_the_integer_part_of_a_timestep_counts():
    model = make_model()
    latents, _, controls = make_inputs(model)
    level = torch.full((2, 6), 149.0)
    assert torch.equal(model(latents, level, controls).sample, model(latents, level + 0.85, controls).sample)
    assert not torch.equal(model(latents, level, controls).sample, model(latents, level + 1, controls).sample)


def test_one_timestep_per_video_is_that_timestep_in_every_frame():
    model = make_model()
    latents, timestep, controls = make_inputs(model)
    one = timestep[:, 0]
    per_frame = model(latents, one[:, None].expand(-1, 6), controls).sample
    torch.testing.assert_close(model(latents, one, controls).sample, per_frame, atol=1e-5, rtol=1e-5)


def test_direction_of_time_is_heard_per_video_and_defaults_to_forward():
    model = make_model(direction_embedding=True)
    inputs = make_inputs(model)
    default = model(*inputs).sample
    mixed = model(*inputs, time_direction=torch.tensor([0, 1])).sample
    assert torch.equal(model(*inputs, time_direction=torch.zeros(2, dtype=torch.int64)).sample, default)
    torch.testing.assert_close(mixed[0], default[0])
    assert (mixed[1] - default[1]).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_bool_mask_and_flex_mask_come_from_one_rule_and_agree():
    generator = torch.Generator().manual_seed(0)
    frame_mask = (torch.rand(4, 6, generator=generator) < 0.5) | torch.eye(4, 6, dtype=torch.bool)
    naive = torch.zeros(12, 18, dtype=torch.bool)
    for query in range(12):
        for key in range(18):
            naive[query, key] = frame_mask[query // 3, key // 3]
    mask = frame_attention_mask(frame_mask, 3)
    assert torch.equal(mask[0, 0], naive)
    query = torch.randn(1, 2, 12, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, 18, 16, generator=generator).unbind()
    block_mask = create_block_mask(frame_mask_mod(frame_mask, 3), None, None, 12, 18, device="cpu")
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(
        flex_attention(query, key, value, block_mask=block_mask), expected, atol=1e-5, rtol=1e-5
    )
    assert frame_attention_mask(torch.ones(2, 3, dtype=torch.bool), 3) is None


@pytest.mark.gpu
def test_flex_attention_on_the_gpu_gives_the_output_of_sdpa():
    model = make_model(attention_head_dim=32, rope_dims=(8, 12, 12)).cuda()
    inputs = [tensor.cuda() for tensor in make_inputs(model)]
    expected = model(*inputs).sample
    model.set_attention_backend("flex")
    torch.testing.assert_close(model(*inputs).sample, expected, atol=2e-3, rtol=2e-3)


# --- cached equals uncached ------------------------------------------------------------------------------------


@pytest.mark.parametrize("control_type", ["map", "vector"])
@pytest.mark.parametrize("sizes", [(1,) * 6, (5, 1), (2, 4), (3, 1, 2)])
def test_frames_read_from_a_memory_equal_one_forward(control_type, sizes):
    model = make_model(control_type)
    inputs = make_inputs(model)
    whole = model(*inputs).sample
    cached = generate(model, inputs, make_memory("full", num_frames_per_block=6), sizes)
    torch.testing.assert_close(cached, whole, atol=2e-6 * float(whole.abs().max()), rtol=1e-4)


def test_a_sliding_window_equals_the_whole_under_a_banded_mask():
    model = make_model("vector")
    inputs = make_inputs(model, num_frames=WINDOW)
    index = torch.arange(WINDOW)
    band = (index <= index[:, None]) & (index > index[:, None] - 4)
    memory = make_memory("sliding_window", num_frames_per_block=1, window=4)
    rolling = generate(model, inputs, memory, (1,) * WINDOW)
    whole = model(*inputs, frame_mask=band).sample
    torch.testing.assert_close(rolling, whole, atol=2e-6 * float(whole.abs().max()), rtol=1e-4)
    assert memory.num_slots == 3
    assert (whole - model(*inputs).sample)[:, :, -1].abs().max() > 1e-3


def test_a_rolling_memory_goes_on_beyond_the_window_and_remembers_by_slot():
    model = make_model("vector")
    inputs = make_inputs(model, num_frames=3 * WINDOW)
    memory = make_memory("sliding_window", num_frames_per_block=1, window=WINDOW)
    assert generate(model, inputs, memory, (1,) * (3 * WINDOW)).isfinite().all()
    with pytest.raises(VidgenError, match=f"Frame position {WINDOW} lies outside the trained window of {WINDOW}"):
        generate(model, inputs, make_memory("full", num_frames_per_block=1), (1,) * (3 * WINDOW))


def test_slow_fast_memory_serves_the_world_model():
    model = make_model("vector")
    inputs = make_inputs(model, num_frames=12)
    memory = make_memory("slow_fast", num_frames_per_block=1, sink=1, slow=2, fast=3, interval=1)
    assert generate(model, inputs, memory, (1,) * 12).isfinite().all()
    assert memory.num_slots <= 6 and memory.num_frames == 12


def test_forward_stores_nothing_and_keys_are_unrotated():
    model = make_model()
    inputs = make_inputs(model)
    memory = make_memory("full", num_frames_per_block=6)
    first = model(*part_of(inputs, 0, 3), kv_memory=memory, return_key_values=True)
    assert memory.num_slots == 0
    shifted = model(*part_of(inputs, 0, 3), frame_positions=torch.arange(4, 7), return_key_values=True)
    assert torch.equal(first.key_values[0][0], shifted.key_values[0][0])
    assert first.key_values[0][0].shape == (2, 3, model.tokens_per_frame(4, 6), 2, 16)
    estimate = memory.estimate_nbytes(model.config, model.tokens_per_frame(4, 6), 2, torch.float32)
    memory.commit(first.key_values)
    model(*part_of(inputs, 3, 4), kv_memory=memory)
    assert memory.nbytes * memory.capacity == estimate * 3


# --- user errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rope_dims": (4, 6, 4)}, "rope_dims"),
        ({"control_type": "plucker"}, "control_type='plucker'; allowed: 'map', 'vector'"),
        ({"control_frame": "first"}, "control_frame"),
        ({"window": 0}, "window"),
    ],
)
def test_wrong_configurations_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        WorldDiT(**{**CONFIG, **arguments})


def test_wrong_inputs_are_named():
    model = make_model("vector")
    latents, timestep, controls = make_inputs(model)
    cases = [
        ((latents[..., :5], timestep, controls), {}, "4x5 cells do not divide into 2x2 patches; 4x4 do"),
        ((latents, timestep[:, :3], controls), {}, "timestep"),
        ((latents, timestep, controls[:, :5]), {}, r"controls have shape \(2, 5, 3\).*\(2, 6, 3\)"),
        ((latents, timestep, controls), {"time_direction": torch.zeros(2)}, "direction_embedding"),
        ((latents, timestep, controls), {"frame_mask": torch.ones(5, 5, dtype=torch.bool)}, "frame_mask"),
        ((latents, timestep, controls), {"frame_positions": torch.arange(4, 10)}, "position 9"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(VidgenError, match=message):
            model(*arguments, **options)
    memory = make_memory("full", num_frames_per_block=6)
    memory.commit(model(latents, timestep, controls, return_key_values=True).key_values)
    with pytest.raises(VidgenError, match="The memory holds 2 videos and hidden_states 1"):
        model(latents[:1, :, :1], timestep[:1, :1], controls[:1, :1], kv_memory=memory)
