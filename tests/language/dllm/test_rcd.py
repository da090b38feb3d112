"""What would be wrong: residuals that touch other tokens, come from another table, or outlive their block."""

from __future__ import annotations

import math

import pytest
import torch

from vidgen.language.dllm.rcd import ResidualContextConfig, inject_residual, residual_context
from vidgen.runtime.errors import ConfigError


def logits_of(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.log()


def check_entropy_and_mean(make_residual) -> None:
    """One-hot distributions have no weight, uniform ones all of it and the table's mean as residual."""
    table = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    one_hot = torch.nn.functional.one_hot(torch.tensor([3, 49]), 50).float()
    delta, alpha = make_residual(logits_of(one_hot), table)
    torch.testing.assert_close(alpha, torch.zeros(2))
    torch.testing.assert_close(delta, table[[3, 49]])
    delta, alpha = make_residual(torch.zeros(2, 50), table)
    torch.testing.assert_close(alpha, torch.ones(2))
    torch.testing.assert_close(delta, table.mean(0).expand(2, -1))


def test_weight_and_residual_of_one_hot_and_uniform_distributions():
    check_entropy_and_mean(lambda logits, table: residual_context(logits, table, None))


@pytest.mark.parametrize(
    "sham",
    [
        ResidualContextConfig(residual_topk=1),  # the most probable token alone
        ResidualContextConfig(alpha="constant", constant=1.0),  # residuals without a weight
        ResidualContextConfig(alpha="inverse"),
    ],
)
def test_shams_are_found_out(sham):
    with pytest.raises(AssertionError):
        check_entropy_and_mean(lambda logits, table: residual_context(logits, table, None, sham))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_a_large_vocabulary_stay_in_range_in_half_precision(dtype):
    logits = torch.randn(3, 128_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1] = 0
    logits[2, 5] = 3e4 if dtype == torch.float16 else 1e30
    delta, alpha = residual_context(logits, torch.randn(128_000, 4, dtype=dtype), 7)
    assert alpha.dtype == torch.float32 and delta.dtype == dtype
    assert (alpha >= 0).all() and (alpha <= 1).all() and delta.isfinite().all()
    expected = [
        -(p[p > 0] * p[p > 0].log()).sum() / math.log(128_000)
        for p in (logits.double().index_fill(-1, torch.tensor([7]), -torch.inf).softmax(-1))
    ]
    torch.testing.assert_close(alpha, torch.stack(expected).float(), rtol=1e-4, atol=1e-5)


def test_the_mask_is_never_part_of_its_own_residual():
    table = torch.zeros(6, 2)
    table[5] = 1e6
    logits = torch.zeros(1, 6)
    logits[0, 5] = 20
    delta, alpha = residual_context(logits, table, 5)
    assert torch.equal(delta, torch.zeros(1, 2))
    torch.testing.assert_close(alpha, torch.tensor([math.log(5) / math.log(6)]))


def test_only_masked_positions_change_and_weight_0_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    embeds, delta = (torch.randn(2, 5, 8, generator=generator).to(torch.bfloat16) for _ in range(2))
    mask = torch.rand(2, 5, generator=generator) < 0.5
    alpha = torch.rand(2, 5, generator=generator)
    mixed = inject_residual(embeds, mask, delta, alpha)
    assert torch.equal(mixed[~mask], embeds[~mask]) and (mixed[mask] != embeds[mask]).any(-1).all()
    assert torch.equal(inject_residual(embeds, mask, delta, torch.zeros_like(alpha)), embeds)
    # A convex mix: with weight 1 the residual alone.
    assert torch.equal(inject_residual(embeds, mask, delta, torch.ones_like(alpha))[mask], delta[mask])


def test_the_temperature_scales_the_weight_alone_unless_told():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    table = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    plain, tempered, both = (
        residual_context(logits, table, None, ResidualContextConfig(residual_temperature=t, temper_residual=r))
        for t, r in ((1.0, False), (2.0, False), (2.0, True))
    )
    assert torch.equal(plain[0], tempered[0]) and (tempered[1] > plain[1]).all()
    torch.testing.assert_close(both[0], (logits / 2).softmax(-1) @ table)


def test_chunks_change_neither_values_nor_gradients():
    logits = torch.randn(2, 9, 30, generator=torch.Generator().manual_seed(0))
    results = []
    for chunk in (100, 4):
        table = torch.randn(30, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        delta, alpha = residual_context(logits, table, 3, ResidualContextConfig(residual_chunk=chunk))
        delta.square().sum().backward()
        results.append((delta, alpha, table.grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked)


def test_few_tokens_are_renormalized_and_all_of_them_are_exact():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    table = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    top, tokens = logits.softmax(-1).topk(3)
    delta, _ = residual_context(logits, table, None, ResidualContextConfig(residual_topk=3))
    expected = [(row / row.sum()) @ table[chosen] for row, chosen in zip(top, tokens, strict=True)]
    torch.testing.assert_close(delta, torch.stack(expected))
    torch.testing.assert_close(
        residual_context(logits, table, None, ResidualContextConfig(residual_topk=30))[0],
        residual_context(logits, table, None)[0],
    )


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"alpha": "entropie"}, "did you mean 'entropy'"),
        ({"init": "warm"}, "allowed: cold, dirichlet, reference, self"),
        ({"constant": 1.5}, "constant=1.5"),
        ({"residual_temperature": 0}, "above 0"),
        ({"residual_topk": 0}, "residual_topk=0"),
    ],
)
def test_impossible_settings_are_refused(fields, message):
    with pytest.raises(ConfigError if "alpha" in fields or "init" in fields else ValueError, match=message):
        ResidualContextConfig(**fields)


def test_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="logits over 7 tokens with an embedding table of 9"):
        residual_context(torch.zeros(1, 7), torch.zeros(9, 2), None)


# --- in generation -----------------------------------------------------------------------------------------------


def test_without_weight_a_generation_is_plain_decoding(make_model, prompts):
    ids, mask = prompts
    for changes in ({"block_size": 4}, {}):
        model = make_model(**changes)
        plain = model.generate(ids, mask, max_new_tokens=12, rcd=None)
        for alpha in ({"alpha": "zero"}, {"alpha": "constant", "constant": 0.0}):
            assert torch.equal(model.generate(ids, mask, max_new_tokens=12, rcd=alpha).sequences, plain.sequences)
        # And with one, it isn't.
        assert not torch.equal(model.generate(ids, mask, max_new_tokens=12, rcd={}).sequences, plain.sequences)


def watch(model, call) -> list[torch.Tensor]:
    """Logits of every forward during a call."""
    seen: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits))
    try:
        call()
    finally:
        handle.remove()
    return seen


def test_a_cold_start_is_plain_at_the_first_step_of_every_block(make_model):
    model = make_model(block_size=4)
    ids = torch.arange(8)[None]
    options = {"max_new_tokens": 8, "use_cache": "none", "denoising_steps": 2, "remasking": "sequential"}
    plain = watch(model, lambda: model.generate(ids, rcd=None, **options))
    cold = watch(model, lambda: model.generate(ids, rcd={}, **options))
    assert torch.equal(plain[0], cold[0]) and not torch.equal(plain[1], cold[1])
    # The second block starts from what the first became, without a residual of it.
    rows = model.generate(ids, rcd={}, **options).sequences
    fresh = model(torch.cat([rows[:, :12], torch.full((1, 4), 63)], dim=1)).logits[:, 12:]
    torch.testing.assert_close(cold[2], fresh, rtol=1e-4, atol=1e-5)


def test_rows_and_calls_do_not_know_of_each_other(make_model):
    model = make_model(block_size=4)
    ids = torch.randint(0, 60, (2, 8), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 12, "rcd": {}, "denoising_steps": 3}
    first = model.generate(ids, **options).sequences
    assert torch.equal(model.generate(ids.flip(0), **options).sequences, first.flip(0))
    assert torch.equal(model.generate(ids, **options).sequences, first)


def test_starts(make_model):
    model, reference = make_model(), make_model(seed=5, hidden_size=16, num_attention_heads=2, head_dim=8)
    ids = torch.full((2, 8), 63)
    ids[:, :2] = torch.tensor([[3, 4], [5, 6]])
    table = model.get_input_embeddings().weight

    def first_inputs(**options) -> torch.Tensor:
        seen = []
        handle = model.register_forward_pre_hook(
            lambda module, inputs, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
        )
        model.generate(ids, max_new_tokens=0, denoising_steps=2, **options)
        handle.remove()
        return seen[1 if options["rcd"].get("init") == "self" else 0]

    plain = model.get_input_embeddings()(ids)
    assert torch.equal(first_inputs(rcd={}), plain)
    for init, other in (("reference", reference), ("self", model)):
        with torch.no_grad():
            logits = other(ids).logits
        expected = inject_residual(plain, ids == 63, *residual_context(logits, table, 63))
        given = first_inputs(rcd={"init": init}, reference_model=reference if init == "reference" else None)
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
    draws = [first_inputs(rcd={"init": "dirichlet"}, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert torch.equal(draws[0][ids != 63], plain[ids != 63])


def test_a_reference_counts_as_a_forward_and_must_speak_the_same_tokens(make_model):
    model = make_model()
    ids = torch.full((1, 6), 63)
    warm = model.generate(ids, max_new_tokens=0, denoising_steps=3, rcd={"init": "reference"}, reference_model=model)
    cold = model.generate(ids, max_new_tokens=0, denoising_steps=3, remasking="low_confidence_static", rcd={})
    assert (int(warm.denoising_steps), warm.stats.reference) == (4, 1) and int(cold.denoising_steps) == 3
    with pytest.raises(ConfigError, match="needs reference_model"):
        model.generate(ids, rcd={"init": "reference"})
    with pytest.raises(ConfigError, match="vocab_size is 64 in the target and 70 in the reference"):
        model.generate(ids, rcd={"init": "reference"}, reference_model=make_model(vocab_size=70))
