"""What would be wrong: a loss with other weights, a reference that learns, residuals of the wrong table."""

from __future__ import annotations

import json
import math

import pytest
import torch

from vidgen.language.dllm.layouts import load_dllm
from vidgen.language.dllm.losses import draw_masks, mdlm_loss
from vidgen.language.dllm.methods import MaskedDiffusionMethod, ResidualContextMethod
from vidgen.language.dllm.modeling import MaskedDiffusionConfig, MaskedDiffusionLM
from vidgen.language.dllm.rcd import ResidualContextConfig, inject_residual, residual_context
from vidgen.language.dllm.sudoku import SudokuData
from vidgen.runtime.errors import ConfigError, TrainingError
from vidgen.train import OptimizerConfig, TrainConfig, fit


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 60, (3, 12), generator=generator())
    place = torch.arange(12)
    exists = torch.stack([place < 12, place < 9, place < 12])
    return {"input_ids": tokens, "attention_mask": exists, "loss_mask": exists & (place >= 3)}


def test_the_loss_by_hand():
    logits = torch.zeros(2, 3, 4)
    logits[0, 1] = torch.tensor([0.0, math.log(3), 0.0, 0.0])  # probabilities 1/6, 1/2, 1/6, 1/6
    labels = torch.tensor([[0, 1, 2], [3, 3, 3]])
    mask = torch.tensor([[False, True, True], [False, False, False]])
    loss = mdlm_loss(logits, labels, mask, p=torch.tensor([0.5, 0.1]), lengths=torch.tensor([3, 2]))
    torch.testing.assert_close(loss, torch.tensor((math.log(2) + math.log(4)) / (0.5 * 3) / 2))


def test_nothing_hidden_is_a_loss_of_0_with_gradients_of_0():
    logits = torch.randn(2, 3, 4, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    loss = mdlm_loss(logits, torch.zeros(2, 3, dtype=torch.long), nothing, torch.ones(2) * 1e-3, torch.tensor([3, 0]))
    loss.backward()
    assert loss == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_hidden_tokens_are_as_many_as_their_probability_says_and_only_trainable_ones():
    trainable = torch.ones(400, 50, dtype=torch.bool)
    trainable[:, :10] = False
    hidden, p = draw_masks(trainable, generator())
    assert not hidden[:, :10].any() and p.min() >= 1e-3 and p.max() <= 1 and abs(p.mean() - 0.5) < 0.05
    assert (hidden[:, 10:].float().mean(1) - p).abs().mean() < 0.08


def test_prompts_and_padding_are_never_hidden_nor_seen(make_model, batch):
    method = MaskedDiffusionMethod(make_model())
    inputs, hidden, _, lengths = method.corrupt(batch, generator())
    assert torch.equal(hidden, inputs["input_ids"] == 63) and not (hidden & ~batch["loss_mask"]).any()
    assert lengths.tolist() == [9, 6, 9]
    changed = {**batch, "input_ids": batch["input_ids"].masked_fill(~batch["attention_mask"], 1)}
    losses = [method.training_step(given, 0, generator()).losses["model"] for given in (batch, changed)]
    torch.testing.assert_close(*losses)


def test_a_block_model_is_scored_on_what_it_sees_in_generation(make_model, batch):
    model = make_model(block_size=4)
    method = MaskedDiffusionMethod(model)
    batch = {"input_ids": batch["input_ids"]}
    _, hidden, p, lengths = method.corrupt(batch, generator())
    noisy = batch["input_ids"].masked_fill(hidden, 63)
    logits = [
        model(torch.cat([batch["input_ids"][:, :start], noisy[:, start : start + 4]], 1)).logits[:, start:]
        for start in (0, 4, 8)
    ]
    expected = mdlm_loss(torch.cat(logits, 1), batch["input_ids"], hidden, p, lengths)
    torch.testing.assert_close(method.training_step(batch, 0, generator()).losses["model"], expected)


@pytest.mark.parametrize("block_size", [None, 4])
def test_the_target_learns_and_the_reference_does_not(make_model, batch, block_size):
    target, reference = make_model(block_size=block_size), make_model(seed=1, block_size=block_size)
    method = ResidualContextMethod(target, reference, ResidualContextConfig())
    method.training_step(batch, 0, generator()).losses["model"].backward()
    assert all(parameter.grad is not None for parameter in target.parameters())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in reference.parameters())
    assert method.active_optimizers(0) == ("model",)


@pytest.mark.parametrize("block_size", [None, 4])
def test_residuals_are_the_references_predictions_in_the_targets_table(make_model, batch, block_size):
    target = make_model(block_size=block_size)
    reference = make_model(seed=1, block_size=block_size, hidden_size=16, num_attention_heads=2, head_dim=8)
    # The temperature is one of generation.
    method = ResidualContextMethod(target, reference, ResidualContextConfig(residual_temperature=3.0))
    inputs, hidden, p, lengths = method.corrupt(batch, generator())
    with torch.no_grad():
        predicted = reference(**inputs).logits
    table = target.get_input_embeddings().weight
    delta, alpha = residual_context(predicted, table, 63)
    masked = predicted.index_fill(-1, torch.tensor([63]), -torch.inf).softmax(-1)
    torch.testing.assert_close(delta, masked @ table)
    embeds = target.get_input_embeddings()(inputs["input_ids"])
    embeds = torch.cat([inject_residual(embeds[:, :12], hidden, delta, alpha), embeds[:, 12:]], dim=1)
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    expected = mdlm_loss(target(inputs_embeds=embeds, **rest).logits, batch["input_ids"], hidden, p, lengths)
    torch.testing.assert_close(method.training_step(batch, 0, generator()).losses["model"], expected)


def test_gradients_reach_the_table_through_residuals_unless_detached(make_model, batch):
    gradients = []
    for detach in (False, True):
        target = make_model()
        config = ResidualContextConfig(detach_residual_embeddings=detach)
        ResidualContextMethod(target, make_model(seed=1), config).training_step(batch, 0, generator()).losses[
            "model"
        ].backward()
        gradients.append(target.get_input_embeddings().weight.grad)
    # Token 62 stands nowhere in the batch: only residuals lead to it.
    assert gradients[0][62].abs().sum() > 0 and gradients[1][62].abs().sum() == 0


def test_models_that_do_not_belong_together_are_refused(make_model):
    with pytest.raises(ConfigError, match="mask_token_id is 63 in the target and 62"):
        ResidualContextMethod(make_model(), make_model(mask_token_id=62), ResidualContextConfig())
    with pytest.raises(TrainingError, match="block_size is None in the target and 4"):
        ResidualContextMethod(make_model(), make_model(block_size=4), ResidualContextConfig())
    with pytest.raises(TrainingError, match="no mask token"):
        MaskedDiffusionMethod(make_model(mask_token_id=None))


def test_stage_2_resumes_exactly_and_its_model_generates_with_residuals(tmp_path):
    data = SudokuData(grids=20)

    def run(folder: str, steps: int):
        torch.manual_seed(0)
        shape = {"vocab_size": 5, "mask_token_id": 4, "hidden_size": 16, "intermediate_size": 32}
        shape |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
        config = MaskedDiffusionConfig(**shape, initializer_range=0.5)
        target, reference = MaskedDiffusionLM(config), MaskedDiffusionLM(config)
        method = ResidualContextMethod(target, reference, ResidualContextConfig(alpha="inverse"))
        train = TrainConfig(
            str(tmp_path / folder), steps, {"model": OptimizerConfig(lr=1e-2)}, batch_size=8, checkpoint_every=2
        )
        return fit(method, data, train)

    straight = run("straight", 4)
    run("stopped", 2)
    resumed = run("stopped", 4)
    models = [load_dllm(result.weights_dir / "model", "cpu") for result in (straight, resumed)]
    for ours, theirs in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(ours, theirs)
    stored = json.loads((straight.weights_dir / "model" / "generation_config.json").read_text())
    assert stored["rcd"]["alpha"] == "inverse"
    assert not (straight.weights_dir / "reference").exists()
    puzzles = data.puzzles(4, 5, 0)
    options = {"max_new_tokens": 0, "denoising_steps": 4}
    assert not torch.equal(
        models[0].generate(puzzles, **options).sequences, models[0].generate(puzzles, rcd=None, **options).sequences
    )
