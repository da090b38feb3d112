"""What would be wrong: masks that are scored, a total variation that isn't one, a run that collapses and goes on."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from vidgen.language.dllm.layouts import load_dllm
from vidgen.language.dllm.losses import (
    MaskAgnosticConfig,
    append_masks,
    draw_extra_masks,
    mask_agnostic_loss,
    mdlm_loss,
    total_variation,
)
from vidgen.language.dllm.methods import CollapseGuard, MaskAgnosticMethod
from vidgen.language.dllm.modeling import MaskedDiffusionConfig, MaskedDiffusionLM
from vidgen.language.dllm.topics import TopicData
from vidgen.runtime.errors import CheckpointError, ConfigError, TrainingError, VidgenError
from vidgen.train import OptimizerConfig, TrainConfig, fit
from vidgen.train.lora import LoraConfig, add_lora, merge_lora

MASK = 63
CONFIG = MaskAgnosticConfig(alpha=2.0, beta=3.0, max_extra_masks=20)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def texts() -> dict[str, torch.Tensor]:
    """Three texts of 12, 9 and 12 tokens with 2, 3 and no hidden ones."""
    tokens = torch.randint(0, 60, (3, 12), generator=generator())
    place = torch.arange(12)
    hidden = torch.zeros(3, 12, dtype=torch.bool)
    hidden[0, [4, 11]] = hidden[1, [2, 6, 8]] = True
    exists = torch.stack([place < 12, place < 9, place < 12])
    return {"input_ids": tokens, "hidden": hidden, "p": torch.tensor([0.5, 0.2, 0.9]), "attention_mask": exists}


def extra(*pairs: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(pairs)


def suffix_blind(model: MaskedDiffusionLM, length: int) -> MaskedDiffusionLM:
    """The same weights, but nobody sees the columns from `length` on but themselves."""
    forward = model.forward

    def blind(input_ids, attention_mask, **options):
        columns = torch.arange(input_ids.shape[1])
        seen = attention_mask[:, None, :] & ((columns < length)[None, None, :] | (columns[:, None] == columns))
        seen |= columns[:, None] == columns
        positions = columns.expand_as(input_ids)
        return forward(input_ids, attention_mask=seen, position_ids=positions, **options)

    model.forward = blind
    return model


# --- the loss ----------------------------------------------------------------------------------------------------


def test_equal_numbers_of_masks_are_the_plain_loss(make_model, texts):
    model = make_model()
    loss = mask_agnostic_loss(model, extra_masks=extra((5, 5), (0, 0), (7, 7)), config=CONFIG, **texts)
    assert loss.tv == 0 and loss.distance == 0 and loss.n_masked.tolist() == [2, 3, 0]
    noisy = texts["input_ids"].masked_fill(texts["hidden"], MASK)
    tokens, seen = append_masks(noisy, texts["attention_mask"], torch.tensor([5, 0, 7]), 19, MASK)
    logits = model(tokens, attention_mask=seen).logits[:, :12]
    plain = mdlm_loss(logits, texts["input_ids"], texts["hidden"], texts["p"], loss.n_masked)
    torch.testing.assert_close(loss.loss, 2.0 * plain)


def test_total_variation_by_hand():
    a = torch.tensor([[0.5, 0.25, 0.25], [1.0, 1.0, 2.0], [1.0, 0.0, 0.0]]).log()
    b = torch.tensor([[0.25, 0.25, 0.5], [1.0, 1.0, 2.0], [0.0, 0.5, 0.5]]).log()
    expected = torch.tensor([0.25, 0.0, 1.0])
    torch.testing.assert_close(total_variation(a, b), expected)
    torch.testing.assert_close(total_variation(b, a, chunk=1), expected)


def test_total_variation_is_symmetric_within_0_and_1_and_half_of_l1():
    a, b = 5 * torch.randn(2, 200, 30, generator=generator())
    found = total_variation(a, b, chunk=7)
    assert torch.equal(found, total_variation(b, a, chunk=7)) and found.min() > 0 and found.max() <= 1
    torch.testing.assert_close(found, 0.5 * (a.softmax(-1) - b.softmax(-1)).abs().sum(-1))


def test_chunks_of_positions_have_the_same_gradients():
    a, b = torch.randn(2, 9, 5, generator=generator())
    gradients = []
    for chunk in (2, 100):
        leaf = a.clone().requires_grad_()
        total_variation(leaf, b, chunk).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_the_loss_by_hand(make_model, texts):
    model, counts = make_model(), extra((3, 9), (8, 0), (1, 2))
    loss = mask_agnostic_loss(model, extra_masks=counts, config=CONFIG, **texts)
    ce = tv = 0.0
    for row in range(2):  # the third text has nothing hidden
        length, hidden, p = int(texts["attention_mask"][row].sum()), texts["hidden"][row], float(texts["p"][row])
        noisy = texts["input_ids"][row].masked_fill(hidden, MASK)[:length]
        views = [
            model(torch.cat([noisy, torch.full((int(count),), MASK)])[None]).logits[0, :length][hidden[:length]]
            for count in counts[row]
        ]
        labels = texts["input_ids"][row][hidden]
        n = len(labels)
        for view in views:
            ce += float(-view.log_softmax(-1).gather(1, labels[:, None]).sum()) / (2 * p * n) / 3
        tv += p / n * float(0.5 * (views[0].softmax(-1) - views[1].softmax(-1)).abs().sum()) / 3
    assert float(loss.ce) == pytest.approx(ce, rel=1e-4) and float(loss.tv) == pytest.approx(tv, rel=1e-4)
    assert float(loss.loss) == pytest.approx(2 * ce + 3 * tv, rel=1e-4)


def test_the_weights_are_1_over_p_and_p(make_model, texts):
    model, counts = make_model(), extra((3, 9), (8, 0), (1, 2))
    found = {
        p: mask_agnostic_loss(model, extra_masks=counts, config=CONFIG, **{**texts, "p": torch.full((3,), p)})
        for p in (0.25, 1.0)
    }
    torch.testing.assert_close(found[0.25].ce, 4 * found[1.0].ce)
    torch.testing.assert_close(found[0.25].tv, found[1.0].tv / 4)


def test_texts_without_hidden_tokens_add_0(make_model, texts):
    model = make_model()
    nothing = {**texts, "hidden": torch.zeros_like(texts["hidden"])}
    loss = mask_agnostic_loss(model, extra_masks=extra((3, 9), (8, 0), (1, 2)), config=CONFIG, **nothing)
    loss.loss.backward()
    assert loss.loss == 0 and all(
        parameter.grad is None or not parameter.grad.any() for parameter in model.parameters()
    )


def test_appended_masks_get_no_gradient(make_model, texts):
    model = make_model()
    seen = {}

    def keep(module, arguments, output):
        output.retain_grad()
        seen["states"] = output

    model.model.norm.register_forward_hook(keep)
    loss = mask_agnostic_loss(model, extra_masks=extra((3, 9), (8, 0), (1, 2)), config=CONFIG, **texts)
    loss.loss.backward()
    # The head computes no logits of them, and those of the text get gradients where a token was hidden alone.
    assert seen["states"].shape[:2] == (6, 12)
    reached = seen["states"].grad.abs().sum(-1) > 0
    assert torch.equal(reached, texts["hidden"].repeat(2, 1))


def test_a_model_blind_to_what_follows_has_no_variation_and_a_seeing_one_has(make_model, texts):
    texts["attention_mask"][1] = True
    for counts in (extra((3, 9), (8, 0), (1, 2)), extra((20, 0), (1, 20), (5, 6))):
        blind = mask_agnostic_loss(suffix_blind(make_model(), 12), extra_masks=counts, config=CONFIG, **texts)
        # Attention over other columns may round differently.
        assert float(blind.distance) < 1e-5
        assert float(mask_agnostic_loss(make_model(), extra_masks=counts, config=CONFIG, **texts).distance) > 1e-3


def test_padding_to_one_width_changes_no_logits(make_model, texts):
    model = make_model()
    for count in (0, 4):
        row = texts["input_ids"][1, :9]
        alone = model(torch.cat([row, torch.full((count,), MASK)])[None]).logits[0, :9]
        tokens, seen = append_masks(texts["input_ids"], texts["attention_mask"], torch.tensor([9, count, 2]), 21, MASK)
        padded = model(tokens, attention_mask=seen).logits[1, :9]
        assert (alone - padded).abs().max() < 1e-5


def test_the_teacher_is_the_view_with_fewer_masks(make_model, texts):
    config = dataclasses.replace(CONFIG, alpha=0.0, stop_gradient="fewer")
    counts = extra((3, 9), (8, 0), (1, 2))
    model = make_model()
    seen = {}

    def keep(module, arguments, output):
        output.retain_grad()
        seen["states"] = output

    model.model.norm.register_forward_hook(keep)
    mask_agnostic_loss(model, extra_masks=counts, config=config, **texts).loss.backward()
    first, second = (seen["states"].grad.abs().sum((1, 2)) > 0).unflatten(0, (2, 3))
    assert first.tolist() == [False, True, False] and second.tolist() == [True, False, False]


def test_numbers_of_masks_differ_and_reach_both_ends():
    pairs = draw_extra_masks(3000, 5, generator())
    assert (pairs[:, 0] != pairs[:, 1]).all() and pairs.min() == 0 and pairs.max() == 5
    for column in pairs.unbind(1):
        assert (column.bincount() / 3000 - 1 / 6).abs().max() < 0.03


@pytest.mark.parametrize(
    "values, message",
    [
        ({"alpha": 0.0, "beta": 0.0}, "nothing would be trained"),
        ({"beta": -1.0}, "beta=-1.0"),
        ({"beta": math.nan}, "beta=nan"),
        ({"max_extra_masks": 0}, "max_extra_masks=0"),
        ({"p_min": 0.0}, "p_min=0.0"),
        ({"stop_gradient": "more"}, "stop_gradient='more'"),
    ],
)
def test_settings_that_can_not_be_meant_are_refused(values, message):
    with pytest.raises(VidgenError, match=message):
        MaskAgnosticConfig(**values)


def test_masks_beyond_the_models_positions_name_the_largest_number(make_model, texts):
    with pytest.raises(ConfigError, match="positions for 64: allowed are max_extra_masks up to 52"):
        mask_agnostic_loss(make_model(), extra_masks=extra((0, 53), (0, 1), (0, 1)), config=CONFIG, **texts)


# --- the training ------------------------------------------------------------------------------------------------


def topic_model(data: TopicData, **changes) -> MaskedDiffusionLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": data.vocab_size, "mask_token_id": data.mask_token_id, "max_position_embeddings": 64}
    return MaskedDiffusionLM(MaskedDiffusionConfig(**shape, initializer_range=0.3, **changes))


DATA = TopicData(topics=3, keywords=4, topic_share=0.8, length=16, answer_words=2)


def run(method: MaskAgnosticMethod, folder, steps: int, lr: float = 3e-3):
    config = TrainConfig(
        str(folder), steps, {"model": OptimizerConfig(lr=lr)}, batch_size=8, checkpoint_every=2, log_every=5
    )
    return fit(method, DATA, config)


def test_training_makes_predictions_agree_and_cross_entropy_alone_does_not(tmp_path):
    def distance(beta: float) -> float:
        config = MaskAgnosticConfig(beta=beta, max_extra_masks=20, p_min=0.2)
        method = MaskAgnosticMethod(topic_model(DATA), config)
        run(method, tmp_path / str(beta), 60)
        return float(method.training_step(DATA.batch(1000, 0, 1, 64), 0, generator()).metrics["distance"])

    assert distance(50.0) < 0.5 * distance(0.0)


def test_a_resumed_run_equals_a_straight_one_with_its_guard(tmp_path):
    config = MaskAgnosticConfig(max_extra_masks=20)

    def make() -> MaskAgnosticMethod:
        return MaskAgnosticMethod(topic_model(DATA), config, DATA.tokenizer())

    straight, resumed = make(), make()
    weights = run(straight, tmp_path / "straight", 4).weights_dir
    run(make(), tmp_path / "stopped", 2)
    run(resumed, tmp_path / "stopped", 4)
    assert straight.guard == resumed.guard and straight.guard.seen == 4
    for ours, theirs in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert load_dllm(weights / "model", "cpu").config.vocab_size == DATA.vocab_size


def test_adapters_are_all_that_is_trained_and_saved_and_merge_back(tmp_path):
    pytest.importorskip("peft")
    base = topic_model(DATA)
    base.save_pretrained(tmp_path / "base")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    base.gradient_checkpointing_enable()
    model = add_lora(base, r".*\.(q_proj|v_proj|down_proj)", LoraConfig(rank=2, alpha=4))
    method = MaskAgnosticMethod(model, MaskAgnosticConfig(max_extra_masks=20), DATA.tokenizer())
    folder = run(method, tmp_path / "run", 3).weights_dir / "model"
    assert not (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists()
    plain = load_dllm(tmp_path / "base", "cpu")
    merged = merge_lora(load_dllm(tmp_path / "base", "cpu"), folder)
    assert type(merged) is MaskedDiffusionLM
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")) for name in changed)
    tokens = DATA.batch(0, 0, 1, 2)["input_ids"]
    torch.testing.assert_close(merged(tokens).logits, model.eval()(input_ids=tokens).logits, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(merged(tokens).logits, plain(tokens).logits)
    with pytest.raises(CheckpointError, match="no adapter_config.json"):
        merge_lora(plain, tmp_path)


def test_models_for_which_it_means_nothing_are_refused(make_model):
    with pytest.raises(TrainingError, match="block_size=4: it doesn't see the masks of later blocks"):
        MaskAgnosticMethod(make_model(block_size=4), CONFIG)
    with pytest.raises(TrainingError, match="no mask token"):
        MaskAgnosticMethod(make_model(mask_token_id=None), CONFIG)


def test_a_collapse_stops_the_run_after_its_patience():
    guard = CollapseGuard()
    for step in range(20):
        guard.observe(step, 2.0, 0.1)
    for step in range(20, 300):  # high, but not by a fifth
        guard.observe(step, 2.3, 0.1)
    with pytest.raises(TrainingError, match="smaller beta"):
        for step in range(300, 500):
            guard.observe(step, 4.0, 0.0)
    # The moving average needs some steps to rise, then a hundred pass.
    assert 400 <= step < 420


def test_a_collapse_that_recovers_goes_on():
    guard = CollapseGuard()
    for step in range(20):
        guard.observe(step, 2.0, 0.1)
    for _ in range(5):
        for step in range(60):
            guard.observe(step, 4.0, 0.0)
        for step in range(60):
            guard.observe(step, 2.0, 0.1)
    assert guard.above == 0
