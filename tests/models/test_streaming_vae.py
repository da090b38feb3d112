"""Streaming VAE: the same as one-shot coding, constant memory, state that can be forked, saved and restored."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan
from safetensors.torch import load, save

from vidgen.models.streaming_vae import StreamingVAEDecoder, StreamingVAEEncoder
from vidgen.runtime.errors import CheckpointError, VidgenError

PATCHED = {"patch_size": 2, "in_channels": 12, "out_channels": 12}
CONFIGS = {
    "wan2.1": {"dim_mult": [1, 1, 1, 1], "temperal_downsample": [False, True, True]},
    "shipped": {"dim_mult": [1, 2, 4], "temperal_downsample": [True, True], **PATCHED},
    "shipped_residual": {"dim_mult": [1, 2, 2], "temperal_downsample": [True, True], "is_residual": True, **PATCHED},
    "wan2.2": {
        "dim_mult": [1, 1, 2, 2],
        "temperal_downsample": [False, True, True],
        "is_residual": True,
        "scale_factor_spatial": 16,
        **PATCHED,
    },
}
HEIGHT, WIDTH = 32, 48


def make_vae(name: str, dtype: torch.dtype = torch.float32) -> AutoencoderKLWan:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=1, **CONFIGS[name]).eval()
    return torch.nn.Module.to(vae, dtype)


@pytest.fixture(scope="module", params=CONFIGS)
def vae(request: pytest.FixtureRequest) -> AutoencoderKLWan:
    return make_vae(request.param)


@pytest.fixture(scope="module")
def shipped() -> AutoencoderKLWan:
    return make_vae("shipped")


def make_latents(vae: AutoencoderKLWan, num_latent_frames: int, batch_size: int = 2, seed: int = 1) -> torch.Tensor:
    ratio = vae.config.scale_factor_spatial
    shape = (batch_size, 16, num_latent_frames, HEIGHT // ratio, WIDTH // ratio)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_frames(num_frames: int, batch_size: int = 2, seed: int = 2) -> torch.Tensor:
    shape = (batch_size, 3, num_frames, HEIGHT, WIDTH)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def statistics(vae: AutoencoderKLWan) -> tuple[torch.Tensor, torch.Tensor]:
    mean = torch.tensor(vae.config.latents_mean).view(1, 16, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, 16, 1, 1, 1)
    return mean.to(vae.dtype), (1.0 / std).to(vae.dtype)


@torch.no_grad()
def decode_at_once(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """As diffusers' Wan pipelines do it."""
    mean, inverse_std = statistics(vae)
    return vae.decode(latents.to(vae.dtype) / inverse_std + mean).sample


@torch.no_grad()
def encode_at_once(vae: AutoencoderKLWan, frames: torch.Tensor) -> torch.Tensor:
    mean, inverse_std = statistics(vae)
    return (vae.encode(frames.to(vae.dtype)).latent_dist.mode() - mean) * inverse_std


def assert_same(pieces: torch.Tensor, whole: torch.Tensor) -> None:
    """Equal up to rounding: on some processors a convolution adds up in another order when it gets fewer frames."""
    rounding = 2e-5 if pieces.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(pieces, whole, atol=rounding, rtol=0)


def decode_in_pieces(decoder: StreamingVAEDecoder, latents: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return torch.cat([decoder.decode(piece) for piece in latents.split(sizes, dim=2)], dim=2)


def encode_in_pieces(encoder: StreamingVAEEncoder, frames: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return torch.cat([encoder.encode(piece) for piece in frames.split(sizes, dim=2)], dim=2)


@pytest.mark.parametrize("sizes", [[6], [3, 3], [1, 1, 1, 1, 1, 1], [2, 1, 3]])
def test_decoded_pieces_equal_the_whole(vae: AutoencoderKLWan, sizes: list[int]) -> None:
    latents = make_latents(vae, 6)
    whole = decode_at_once(vae, latents)
    assert whole.shape == (2, 3, 21, HEIGHT, WIDTH)
    assert_same(decode_in_pieces(StreamingVAEDecoder(vae), latents, sizes), whole)


@pytest.mark.parametrize("sizes", [[17], [1, 4, 4, 4, 4], [9, 8], [5, 4, 8]])
def test_encoded_pieces_equal_the_whole(vae: AutoencoderKLWan, sizes: list[int]) -> None:
    frames = make_frames(17)
    whole = encode_at_once(vae, frames)
    ratio = vae.config.scale_factor_spatial
    assert whole.shape == (2, 16, 5, HEIGHT // ratio, WIDTH // ratio)
    assert_same(encode_in_pieces(StreamingVAEEncoder(vae), frames, sizes), whole)


@pytest.mark.parametrize("name", ["wan2.1", "shipped"])
def test_half_precision_equals_one_shot(name: str) -> None:
    vae = make_vae(name, torch.bfloat16)
    latents, frames = make_latents(vae, 4), make_frames(9)
    decoded = decode_in_pieces(StreamingVAEDecoder(vae), latents, [1, 3])
    assert decoded.dtype == torch.bfloat16
    assert_same(decoded, decode_at_once(vae, latents))
    assert_same(encode_in_pieces(StreamingVAEEncoder(vae), frames, [5, 4]), encode_at_once(vae, frames))


def test_values_are_clamped_as_by_the_vae(shipped: AutoencoderKLWan) -> None:
    latents = make_latents(shipped, 3) * 100
    decoded = StreamingVAEDecoder(shipped).decode(latents)
    assert decoded.abs().max() == 1
    assert_same(decoded, decode_at_once(shipped, latents))


def test_streams_over_one_vae_do_not_mix_even_with_one_shot_calls_between(shipped: AutoencoderKLWan) -> None:
    videos = [make_latents(shipped, 4, seed=seed) for seed in (1, 2)]
    wholes = [decode_at_once(shipped, video) for video in videos]
    decoders = [StreamingVAEDecoder(shipped) for _ in videos]
    pieces = [[], []]
    for frame in range(4):
        for index, decoder in enumerate(decoders):
            pieces[index].append(decoder.decode(videos[index][:, :, frame : frame + 1]))
            decode_at_once(shipped, videos[0][:, :, :2])
            StreamingVAEEncoder(shipped).encode(make_frames(5))
    for index, whole in enumerate(wholes):
        assert_same(torch.cat(pieces[index], dim=2), whole)


def test_memory_is_constant_and_equals_the_estimate(vae: AutoencoderKLWan) -> None:
    ratio = vae.config.scale_factor_spatial
    decoder, encoder = StreamingVAEDecoder(vae), StreamingVAEEncoder(vae)
    assert decoder.nbytes == encoder.nbytes == 0
    decoder.decode(make_latents(vae, 3))
    encoder.encode(make_frames(9))
    assert decoder.nbytes == decoder.estimate_nbytes(2, HEIGHT // ratio, WIDTH // ratio)
    assert encoder.nbytes == encoder.estimate_nbytes(2, HEIGHT, WIDTH)
    sizes = {(decoder.nbytes, encoder.nbytes)}
    for _ in range(3):
        decoder.decode(make_latents(vae, 2))
        encoder.encode(make_frames(8))
        sizes.add((decoder.nbytes, encoder.nbytes))
    assert len(sizes) == 1
    # No cached view keeps a larger tensor alive.
    for entry in decoder._feature_cache + encoder._feature_cache:
        if isinstance(entry, torch.Tensor):
            assert entry.untyped_storage().nbytes() == entry.nbytes


@pytest.mark.parametrize("before", [1, 2, 4])
def test_clone_goes_its_own_way(vae: AutoencoderKLWan, before: int) -> None:
    latents, other = make_latents(vae, 6), make_latents(vae, 6, seed=9)
    decoder = StreamingVAEDecoder(vae)
    first = decoder.decode(latents[:, :, :before])
    clone = decoder.clone()
    assert clone.vae is vae
    clone_frames = clone.decode(other[:, :, before:])
    original_frames = decoder.decode(latents[:, :, before:])
    assert_same(torch.cat([first, original_frames], dim=2), decode_at_once(vae, latents))
    mixed = torch.cat([latents[:, :, :before], other[:, :, before:]], dim=2)
    assert_same(torch.cat([first, clone_frames], dim=2), decode_at_once(vae, mixed))


@pytest.mark.parametrize("before", [0, 1, 2, 4])
def test_saved_decoder_continues(vae: AutoencoderKLWan, before: int) -> None:
    latents = make_latents(vae, 6)
    decoder = StreamingVAEDecoder(vae)
    frames = [decoder.decode(latents[:, :, :before])] if before else []
    restored = StreamingVAEDecoder(vae)
    restored.load_state_dict(load(save(decoder.state_dict())))
    assert restored.num_frames == before
    assert restored.nbytes == decoder.nbytes
    frames.append(restored.decode(latents[:, :, before:]))
    assert_same(torch.cat(frames, dim=2), decode_at_once(vae, latents))


@pytest.mark.parametrize("before", [0, 1, 5, 13])
def test_saved_encoder_continues(vae: AutoencoderKLWan, before: int) -> None:
    frames = make_frames(17)
    encoder = StreamingVAEEncoder(vae)
    latents = [encoder.encode(frames[:, :, :before])] if before else []
    restored = StreamingVAEEncoder(vae)
    restored.load_state_dict(load(save(encoder.state_dict())))
    latents.append(restored.encode(frames[:, :, before:]))
    assert_same(torch.cat(latents, dim=2), encode_at_once(vae, frames))


def test_reset_starts_a_new_video_of_any_size(shipped: AutoencoderKLWan) -> None:
    decoder = StreamingVAEDecoder(shipped)
    decoder.decode(make_latents(shipped, 3))
    decoder.reset()
    assert decoder.num_frames == decoder.nbytes == 0
    latents = make_latents(shipped, 3, batch_size=1)
    assert_same(decoder.decode(latents), decode_at_once(shipped, latents))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_input_names_the_frame_and_leaves_the_stream_usable(
    shipped: AutoencoderKLWan, value: float
) -> None:
    latents, frames = make_latents(shipped, 6), make_frames(13)
    decoder, encoder = StreamingVAEDecoder(shipped), StreamingVAEEncoder(shipped)
    decoded, encoded = [decoder.decode(latents[:, :, :3])], [encoder.encode(frames[:, :, :5])]
    bad_latents, bad_frames = latents.clone(), frames.clone()
    bad_latents[1, 3, 4, 0, 0] = value
    bad_frames[1, 0, 7, 0, 0] = value
    with pytest.raises(VidgenError, match=r"latent frame 4 of the stream \(batch element 1\)"):
        decoder.decode(bad_latents[:, :, 3:])
    with pytest.raises(VidgenError, match=r"in frame 7 of the stream \(batch element 1\)"):
        encoder.encode(bad_frames[:, :, 5:])
    decoded.append(decoder.decode(latents[:, :, 3:]))
    encoded.append(encoder.encode(frames[:, :, 5:]))
    assert_same(torch.cat(decoded, dim=2), decode_at_once(shipped, latents))
    assert_same(torch.cat(encoded, dim=2), encode_at_once(shipped, frames))


def test_interrupted_step_leaves_the_stream_unchanged(
    shipped: AutoencoderKLWan, monkeypatch: pytest.MonkeyPatch
) -> None:
    latents = make_latents(shipped, 4)
    decoder = StreamingVAEDecoder(shipped)
    first = decoder.decode(latents[:, :, :2])

    def interrupt(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shipped.decoder.conv_out, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            decoder.decode(latents[:, :, 2:])
    second = decoder.decode(latents[:, :, 2:])
    assert_same(torch.cat([first, second], dim=2), decode_at_once(shipped, latents))


@pytest.mark.parametrize(
    ("consumed", "num_frames", "message"),
    [
        (0, 4, "1 [+] 4k frames at the start: pass 1 or 5"),
        (0, 12, "pass 9 or 13"),
        (5, 1, "4k frames after the start: pass 4"),
        (5, 5, "pass 4 or 8"),
    ],
)
def test_encoder_refuses_frames_that_do_not_fill_groups(
    shipped: AutoencoderKLWan, consumed: int, num_frames: int, message: str
) -> None:
    encoder = StreamingVAEEncoder(shipped)
    if consumed:
        encoder.encode(make_frames(consumed))
    with pytest.raises(VidgenError, match=message):
        encoder.encode(make_frames(num_frames))


def test_wrong_shapes_say_what_fits(shipped: AutoencoderKLWan) -> None:
    decoder, encoder = StreamingVAEDecoder(shipped), StreamingVAEEncoder(shipped)
    for latents in (torch.zeros(1, 4, 3, 4, 6), torch.zeros(16, 3, 4, 6), torch.zeros(1, 16, 0, 4, 6)):
        with pytest.raises(VidgenError, match=r"latents has shape .*expected \(batch, 16, frames, height, width\)"):
            decoder.decode(latents)
    with pytest.raises(VidgenError, match=r"expected \(batch, 3, frames, height, width\)"):
        encoder.encode(torch.zeros(1, 12, 5, 16, 24))
    with pytest.raises(VidgenError, match=r"30x48; height and width must be multiples of 8, for example 32x48"):
        encoder.encode(torch.zeros(1, 3, 5, 30, 48))
    decoder.decode(make_latents(shipped, 1))
    with pytest.raises(VidgenError, match=r"\(1, 4, 6\), but this stream started with \(2, 4, 6\)"):
        decoder.decode(make_latents(shipped, 1, batch_size=1))


def test_only_wan_vaes_are_accepted() -> None:
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=2)
    with pytest.raises(VidgenError, match="AutoencoderKL; streaming needs a diffusers AutoencoderKLWan"):
        StreamingVAEDecoder(vae)


def test_tiling_that_would_change_frames_is_refused(shipped: AutoencoderKLWan) -> None:
    shipped.enable_tiling(16, 16, 8, 8)
    try:
        with pytest.raises(VidgenError, match=r"32x48 exceed one tile.*disable_tiling"):
            StreamingVAEDecoder(shipped).decode(make_latents(shipped, 1))
        with pytest.raises(VidgenError, match="disable_tiling"):
            StreamingVAEEncoder(shipped).encode(make_frames(1))
    finally:
        shipped.disable_tiling()


def test_state_of_another_model_is_refused_and_the_stream_kept(shipped: AutoencoderKLWan) -> None:
    latents = make_latents(shipped, 4)
    decoder = StreamingVAEDecoder(shipped)
    first = decoder.decode(latents[:, :, :2])
    state = decoder.state_dict()
    with pytest.raises(CheckpointError, match="cache entries, this VAE needs"):
        StreamingVAEDecoder(make_vae("wan2.1")).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"is torch\.float32, the VAE is torch\.bfloat16"):
        StreamingVAEDecoder(make_vae("shipped", torch.bfloat16)).load_state_dict(state)
    without = {name: tensor for name, tensor in state.items() if name != "feature_cache.0"}
    for broken in ({}, without, {**state, "feature_cache.999": torch.zeros(1)}):
        with pytest.raises(CheckpointError, match=r"has no entry|missing entries"):
            decoder.load_state_dict(broken)
    second = decoder.decode(latents[:, :, 2:])
    assert_same(torch.cat([first, second], dim=2), decode_at_once(shipped, latents))


def test_offloaded_vae_is_brought_back_before_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = make_vae("shipped")
    calls = []

    class Hook:
        def pre_forward(self, module: torch.nn.Module) -> None:
            calls.append(module)

    monkeypatch.setattr(vae, "_hf_hook", Hook(), raising=False)
    StreamingVAEDecoder(vae).decode(make_latents(vae, 1))
    StreamingVAEEncoder(vae).encode(make_frames(1))
    assert calls == [vae, vae]


def test_no_gradient_graph_is_kept_between_calls(shipped: AutoencoderKLWan) -> None:
    decoder = StreamingVAEDecoder(shipped)
    frames = decoder.decode(make_latents(shipped, 2).requires_grad_())
    assert not frames.requires_grad
    assert not any(tensor.requires_grad for tensor in decoder.state_dict().values())
