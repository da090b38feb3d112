"""What would be wrong: a mask, a position or a cache that changes what a token sees."""

from __future__ import annotations

import pytest
import torch

from vidgen.language.dllm.modeling import noisy_clean_visibility
from vidgen.runtime.errors import ConfigError


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("changes", [{}, {"block_size": 4}, {"logits_shift": 1}, {"position_embedding": "learned"}])
def test_padding_on_the_left_changes_nothing(make_model, ids, changes):
    model = make_model(**changes)
    padded = torch.cat([torch.full((2, 3), 5), ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    # The first logits of a shifted model come from the position before, which is padding here.
    first = model.config.logits_shift
    torch.testing.assert_close(
        model(padded, attention_mask=mask).logits[:, 3 + first :], model(ids).logits[:, first:], rtol=1e-4, atol=1e-5
    )


def test_a_bidirectional_model_sees_what_follows_and_a_block_model_its_own_block_only(make_model, ids):
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 60
    model = make_model()
    assert (model(ids).logits != model(changed).logits).any(-1).all()
    model = make_model(block_size=4)
    differs = (model(ids).logits != model(changed).logits).any(-1)
    assert not differs[:, :4].any() and differs[:, 4:].all()


@pytest.mark.parametrize("block_size", [None, 4])
def test_keys_and_values_of_others_can_be_given(make_model, ids, block_size):
    model = make_model(block_size=block_size)
    whole = model(ids)
    past = tuple((key[:, :8], value[:, :8]) for key, value in whole.key_values)
    last = model(ids[:, 8:], past_key_values=past)
    torch.testing.assert_close(last.logits, whole.logits[:, 8:], rtol=1e-4, atol=1e-5)
    # A bidirectional model takes them in any order.
    if block_size is None:
        around = tuple(
            (torch.cat([k[:, 8:], k[:, :4]], 1), torch.cat([v[:, 8:], v[:, :4]], 1)) for k, v in whole.key_values
        )
        middle = model(ids[:, 4:8], past_key_values=around, position_ids=torch.arange(4, 8).expand(2, -1))
        torch.testing.assert_close(middle.logits, whole.logits[:, 4:8], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shift", [0, 1])
def test_wanted_positions_are_those_of_the_whole(make_model, ids, shift):
    model = make_model(logits_shift=shift)
    torch.testing.assert_close(model(ids, logits_positions=slice(5, 9)).logits, model(ids).logits[:, 5:9])


def test_the_training_layout_shows_each_block_what_generation_shows_it(make_model, ids):
    model = make_model(block_size=4)
    noisy = ids.clone()
    noisy[:, [1, 5, 6, 10]] = model.config.mask_token_id
    positions = torch.arange(12).expand(2, -1)
    trained = model(
        torch.cat([noisy, ids], dim=1),
        position_ids=positions.repeat(1, 2),
        attention_mask=noisy_clean_visibility(positions, 4),
    ).logits
    for block in range(3):
        start, stop = 4 * block, 4 * block + 4
        generated = model(torch.cat([ids[:, :start], noisy[:, start:stop]], dim=1)).logits[:, start:]
        torch.testing.assert_close(trained[:, start:stop], generated, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trained[:, 12:], model(ids).logits, rtol=1e-4, atol=1e-5)


def test_embeddings_stand_for_their_tokens(make_model, ids):
    model = make_model(position_embedding="learned")
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)
    with pytest.raises(ConfigError, match="either input_ids or inputs_embeds"):
        model()


def test_checkpointed_gradients_are_the_same(make_model, ids):
    model = make_model().train()
    gradients = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids).logits.square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for before, after in zip(*gradients, strict=True):
        torch.testing.assert_close(before, after)


def test_an_attention_backend_is_chosen_by_name(make_model, ids):
    model = make_model()
    expected = model(ids).logits
    model.set_attention_backend("_native_math")
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="unknown attention backend"):
        model.set_attention_backend("nonsense")
