"""What would be wrong: losses that train the frozen networks, ignore masks, or depend on hidden randomness."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import UMT5Config, UMT5EncoderModel

from vidgen.forcing.diffusion_forcing import DiffusionForcingConfig, DiffusionForcingMethod, shift_sigma
from vidgen.forcing.guidance_distillation import GuidanceDistillationMethod
from vidgen.forcing.layouts import sample_layout
from vidgen.memory import SlowFastMemoryConfig
from vidgen.models.causal_wan import CausalWanTransformer3DModel
from vidgen.runtime.errors import ConfigError

MEMORY = SlowFastMemoryConfig(sink=3, slow=3, fast=6)


def transformer(seed: int) -> CausalWanTransformer3DModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return CausalWanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=1,
        )


def text_encoder() -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)).eval()


def make_batch(steady: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    layout = sample_layout(MEMORY, 30, 3, steady, generator)
    return {
        "latents": torch.randn(2, 4, 12, 4, 4, generator=generator),
        "frame_blocks": layout.frame_blocks.expand(2, -1),
        "is_slow": layout.is_slow.expand(2, -1),
        "matches_caption": torch.ones(2, 12, dtype=torch.bool),
        "input_ids": torch.randint(1, 16, (2, 6), generator=generator),
        "attention_mask": torch.ones(2, 6, dtype=torch.long),
    }


@pytest.mark.parametrize("steady", [False, True])
def test_diffusion_forcing_trains_the_transformer_only_and_repeats_with_its_generator(steady):
    batch = make_batch(steady)
    method = DiffusionForcingMethod(transformer(0), text_encoder(), DiffusionForcingConfig(), lambda: batch)
    losses = [method.training_step(batch, 0, torch.Generator().manual_seed(1)).losses["transformer"] for _ in range(2)]
    assert torch.equal(losses[0], losses[1])
    losses[0].backward()
    assert all(parameter.grad is None for parameter in method.text_encoder.parameters())
    assert method.transformer.proj_out.weight.grad.abs().sum() > 0


def test_frames_whose_move_the_caption_does_not_describe_do_not_count():
    batch = make_batch(steady=False)
    config = DiffusionForcingConfig(clean_past_probability=0.0)
    method = DiffusionForcingMethod(transformer(0), text_encoder(), config, lambda: batch)

    def gradient(latents):
        latents = latents.clone().requires_grad_()
        loss = method.training_step({**batch, "latents": latents}, 0, torch.Generator().manual_seed(1)).losses
        return torch.autograd.grad(loss["transformer"], latents)[0]

    # The last chunk is nobody's past: without a loss of its own it has no influence at all.
    batch["matches_caption"][:, -3:] = False
    assert gradient(batch["latents"])[:, :, -3:].abs().max() == 0
    batch["matches_caption"][:, -3:] = True
    assert gradient(batch["latents"])[:, :, -3:].abs().max() > 0


def test_loss_weight_decides_which_cells_are_learned():
    batch = make_batch(steady=True)
    shape = (*batch["latents"].shape[:1], *batch["latents"].shape[2:])
    encoder = text_encoder()
    plain, ones, twice = (
        DiffusionForcingMethod(
            transformer(0), encoder, DiffusionForcingConfig(), lambda extra=extra: {**batch, **extra}
        ).validate()["validation_loss"]
        for extra in ({}, {"loss_weight": torch.ones(shape)}, {"loss_weight": torch.full(shape, 2.0)})
    )
    assert plain == ones and twice == pytest.approx(2 * plain)
    corner = torch.zeros(shape)
    corner[..., :1, :1] = 1.0
    method = DiffusionForcingMethod(transformer(0), text_encoder(), DiffusionForcingConfig(), lambda: batch)
    losses = []
    for sign in (1, -1):  # content of other cells as targets: no weight, no loss
        latents = batch["latents"].clone()
        latents[..., 1:, 1:] *= sign
        generator = torch.Generator().manual_seed(0)
        method.transformer.forward = lambda hidden_states, **_: SimpleNamespace(sample=0 * hidden_states)
        losses.append(float(method._losses({**batch, "latents": latents, "loss_weight": corner}, generator)[0]))
    assert losses[0] == losses[1] > 0


def test_guided_student_is_its_teacher_without_guidance_and_learns_the_difference():
    batch, encoder, teacher = make_batch(steady=True), text_encoder(), transformer(0)
    config = DiffusionForcingConfig(drop_text_probability=0.0)

    def loss_at(scale: float, student=teacher) -> float:
        method = GuidanceDistillationMethod(student, teacher, encoder, scale, config, lambda: batch)
        return method.validate()["validation_loss"]

    # A student that is its teacher errs by (w - 1) times the difference of its two predictions.
    assert loss_at(1.0 + 1e-6) < 1e-9
    assert loss_at(3.0) == pytest.approx(4 * loss_at(2.0), rel=1e-3)
    assert loss_at(2.0) > 1e-6

    student = transformer(0)
    method = GuidanceDistillationMethod(student, teacher, encoder, 2.0, config, lambda: batch)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    before = method.validate()["validation_loss"]
    for step in range(40):
        method.training_step(batch, step, torch.Generator().manual_seed(0)).losses["student"].backward()
        assert all(parameter.grad is None for parameter in method.teacher.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert method.validate()["validation_loss"] < 0.5 * before


@pytest.mark.parametrize(("scale", "drop", "message"), [(1.0, 0.0, "guidance_scale"), (2.0, 0.1, "drop_text")])
def test_guidance_that_cannot_be_distilled_is_refused(scale, drop, message):
    config = DiffusionForcingConfig(drop_text_probability=drop)
    with pytest.raises(ConfigError, match=message):
        GuidanceDistillationMethod(transformer(0), transformer(0), text_encoder(), scale, config, dict)


def test_shift_keeps_the_ends_and_moves_the_middle_up():
    sigma = shift_sigma(torch.tensor([0.0, 0.5, 1.0]), 3.0)
    assert sigma.tolist() == pytest.approx([0.0, 0.75, 1.0])


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (DiffusionForcingConfig, {"shift": 0.0}, "shift"),
        (DiffusionForcingConfig, {"past_noise": 2.0}, "past_noise"),
    ],
)
def test_wrong_settings_are_named(config, arguments, message):
    with pytest.raises(ConfigError, match=message):
        config(**arguments)
