"""What would be wrong: a loss that sees the token it predicts, sub-layers that are absent in evaluation or for the
wrong samples, an optimizer that takes other weights than it should."""

from __future__ import annotations

import math

import pytest
import torch

from vidgen.language import LanguageModelError, load_language_model
from vidgen.language.causal_lm import CausalLMMethod, StochasticDepth, heldout_figures, next_token_loss
from vidgen.language.corpus import token_bytes
from vidgen.runtime.errors import ConfigError
from vidgen.train import OptimizerConfig


@pytest.fixture
def lm(tiny_lm_folder):
    return load_language_model(tiny_lm_folder, device="cpu")


def windows(lm, count=3, length=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(lm.vocab_size, (count, length + 1), generator=generator)


def test_the_loss_is_that_of_each_next_token(lm):
    tokens = windows(lm)
    loss = next_token_loss(lm.model, tokens)
    assert loss.shape == (3, 9)
    for position in (0, 4, 8):
        logits = lm.model(tokens[:, : position + 1]).logits[:, -1]
        expected = -logits.log_softmax(-1).gather(1, tokens[:, position + 1 : position + 2])[:, 0]
        torch.testing.assert_close(loss[:, position], expected)


def test_bits_per_byte_of_a_model_that_knows_nothing(lm):
    with torch.no_grad():
        lm.model.lm_head.weight.zero_()
    tokens, lengths = windows(lm), token_bytes(lm.tokenizer)
    figures = heldout_figures(lm.model, tokens.split(2), lengths)
    assert figures["loss"] == pytest.approx(math.log(lm.vocab_size))
    size = int(lengths[tokens[:, 1:]].sum())
    assert figures["bits_per_byte"] == pytest.approx(27 * math.log2(lm.vocab_size) / size)


def test_an_absent_sub_layer_changes_its_own_samples_alone(lm):
    model, tokens = lm.model.train(), windows(lm)[:, :-1]
    depth = StochasticDepth(model, 0.5)
    assert len(depth.sublayers) == 4
    for sublayer in depth.sublayers:
        sublayer.depth_factor = torch.ones(3, 1, 1)
    whole = model(tokens).logits
    depth.sublayers[1].depth_factor = torch.tensor([1.0, 0.0, 1.0]).view(3, 1, 1)
    dropped = model(tokens).logits
    assert torch.equal(dropped[[0, 2]], whole[[0, 2]])
    model.model.layers[0].mlp.down_proj.weight.data.zero_()
    torch.testing.assert_close(dropped[1], model(tokens).logits[1])
    assert not torch.equal(dropped[1], whole[1])


def test_sub_layers_are_absent_at_the_given_rate_and_keep_their_expectation(lm):
    depth = StochasticDepth(lm.model, 0.25)
    depth.draw(4000, torch.Generator().manual_seed(0))
    for sublayer in depth.sublayers:
        torch.testing.assert_close(sublayer.depth_factor.unique(), torch.tensor([0.0, 4 / 3]))
        assert float(sublayer.depth_factor.mean()) == pytest.approx(1.0, abs=0.05)
    together = torch.stack([sublayer.depth_factor.flatten() for sublayer in depth.sublayers]).corrcoef()
    assert float((together - torch.eye(4)).abs().max()) < 0.08


def test_nothing_is_absent_in_evaluation(lm):
    tokens = windows(lm)[:, :-1]
    before = lm.model(tokens).logits
    depth = StochasticDepth(lm.model, 0.9)
    depth.draw(3, torch.Generator().manual_seed(0))
    assert torch.equal(lm.model.eval()(tokens).logits, before)
    assert not torch.equal(lm.model.train()(tokens).logits, before)


def test_stochastic_depth_is_drawn_anew_from_the_generator_alone(lm):
    method = CausalLMMethod(lm.model.train(), lm.tokenizer, windows(lm), token_bytes(lm.tokenizer), 2, 0.5)
    batch = {"tokens": windows(lm)}
    losses = []
    for seed in (1, 2, 1):
        output = method.training_step(batch, 0, torch.Generator().manual_seed(seed))
        losses.append(float(output.losses["model"].detach()))
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]


def test_blocks_without_known_sub_layers_are_refused(tmp_path, save_language_model, lm):
    other = load_language_model(save_language_model(tmp_path, "gpt2", n_embd=32, n_layer=1, n_head=2), device="cpu")
    with pytest.raises(LanguageModelError, match="GPT2Block has no sub-layer 'self_attn'"):
        StochasticDepth(other.model, 0.1)
    with pytest.raises(ConfigError, match="stochastic_depth=1"):
        StochasticDepth(lm.model, 1.0)


def test_muon_takes_the_matrices_of_the_blocks_and_nothing_else(lm):
    muon, adamw = OptimizerConfig(kind="muon").build(lm.model)
    assert isinstance(muon, torch.optim.Muon)
    names = {id(parameter): name for name, parameter in lm.model.named_parameters()}
    taken = {names[id(parameter)] for group in muon.param_groups for parameter in group["params"]}
    matrices = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert len(taken) == 2 * len(matrices)
    assert all(name.split(".")[-2] in matrices for name in taken)
    rest = {names[id(parameter)] for group in adamw.param_groups for parameter in group["params"]}
    assert taken | rest == set(names.values())
