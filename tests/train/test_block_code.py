"""The block code must be the best linear code of its size, normalized, and aligned with the frames of a causal VAE."""

from __future__ import annotations

import pytest
import torch

from vidgen.runtime.checkpoint import save_safetensors
from vidgen.runtime.errors import CheckpointError, ConfigError
from vidgen.train.block_code import BlockCode


@pytest.fixture(scope="module")
def clips():
    """Smooth random clips `(6, 3, 9, 16, 24)`."""
    coarse = torch.randn(6, 3, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, size=(9, 16, 24), mode="trilinear").tanh()


def test_all_components_reconstruct_exactly(clips):
    code = BlockCode.fit(clips.double(), channels=24, temporal=2, spatial=2, whitening=0.5)
    video = clips.double()
    decoded = code.decode(code.encode(video))
    torch.testing.assert_close(decoded[:, :, 1:], video[:, :, 1:], rtol=0, atol=1e-5)
    # The first frame is coded as a still block, whose decoded frames are averaged
    torch.testing.assert_close(decoded[:, :, :1], video[:, :, :1], rtol=0, atol=1e-5)


def test_latents_are_normalized_and_shaped_like_those_of_a_causal_vae(clips):
    code = BlockCode.fit(clips, channels=12)
    latents = code.encode(clips)
    assert latents.shape == (6, 12, 3, 2, 3)
    assert latents[:, :, 1:].mean(dim=(0, 2, 3, 4)).abs().max() < 1e-3
    assert latents[:, :, 1:].square().mean() == pytest.approx(1, abs=1e-3)


def test_first_latent_codes_the_first_frame_standing_still(clips):
    code = BlockCode.fit(clips, channels=12)
    moving = clips.roll(3, dims=2)
    assert not torch.equal(moving[:, :, 0], moving[:, :, 1])
    all_still = code.encode(moving[:, :, :1].expand(-1, -1, 9, -1, -1))
    for step in range(3):
        torch.testing.assert_close(all_still[:, :, step], code.encode(moving)[:, :, 0])


def test_error_is_the_variance_left_out_whatever_the_whitening(clips):
    blocks = clips[:, :, 1:].reshape(6, 3, 2, 4, 2, 8, 3, 8).permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(0, 3)
    singular = torch.linalg.svdvals(blocks - blocks.mean(0))
    left_out = singular[5:].square().sum() / blocks.numel()
    for whitening in (0.0, 0.5, 1.0):
        code = BlockCode.fit(clips, channels=5, whitening=whitening)
        error = (code.decode(code.encode(clips)) - clips)[:, :, 1:].square().mean()
        torch.testing.assert_close(error, left_out, rtol=1e-3, atol=1e-6)


def test_full_whitening_makes_the_latents_white(clips):
    latents = BlockCode.fit(clips, channels=5, whitening=1.0).encode(clips)[:, :, 1:].movedim(1, -1).reshape(-1, 5)
    torch.testing.assert_close(torch.cov(latents.T, correction=0), torch.eye(5), rtol=0, atol=2e-3)


def test_a_saved_code_is_the_same_code(clips, tmp_path):
    code = BlockCode.fit(clips, channels=5)
    code.save(tmp_path / "code.safetensors")
    assert torch.equal(BlockCode.load(tmp_path / "code.safetensors").encode(clips), code.encode(clips))


def test_wrong_input_is_named(clips, tmp_path):
    code = BlockCode.fit(clips, channels=5)
    with pytest.raises(ValueError, match="4 \\* n \\+ 1 frames"):
        code.encode(clips[:, :, :8])
    with pytest.raises(ValueError, match="divisible by 8"):
        code.encode(clips[:, :, :, :15])
    with pytest.raises(ConfigError, match="channels=769"):
        BlockCode.fit(clips, channels=769)
    with pytest.raises(ConfigError, match="whitening=2"):
        BlockCode.fit(clips, channels=5, whitening=2)
    save_safetensors({"mean": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="decoder"):
        BlockCode.load(tmp_path / "other.safetensors")
