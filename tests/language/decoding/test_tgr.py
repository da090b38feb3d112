"""What would be wrong: a search that isn't plain decoding when it tries nothing, memory that grows, rows that mix."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from vidgen.language.decoding.geometry import (
    ResidualTap,
    anchor_of,
    crowding,
    perturbed,
    random_basis,
    tangent_basis,
    turning,
)
from vidgen.language.decoding.tgr import LookAhead, TGRConfig, combined, look_ahead_value, tgr_generate
from vidgen.language.models import LanguageModelError, decoder_layers
from vidgen.runtime.errors import ConfigError, VidgenError

SMALL = {"chunk_length": 8, "carry_over": 4, "num_candidates": 3, "lookahead": 3, "tangent_rank": 4, "sigma": 1.0}
PLAIN = {"num_candidates": 1, "kv_reset": False}
NO_STEP = {"sigma": 0.0, "lambda_smooth": 0.0, "lambda_diverse": 0.0, "kv_reset": False}


def search(model, ids, changes=None, samples=1, sample=True, tokens=30, **options):
    """A search with `SMALL` sizes."""
    return model.generate(
        ids,
        custom_generate=tgr_generate,
        tgr_config=TGRConfig(**{**SMALL, **(changes or {})}),
        num_return_sequences=samples,
        do_sample=sample,
        top_k=0,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        **options,
    )


def plainly(model, ids, seed=0, sample=True, tokens=30, **options):
    torch.manual_seed(seed)
    return model.generate(ids, do_sample=sample, top_k=0, max_new_tokens=tokens, **options)


def padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(ids.shape[1] for ids in prompts)
    pad = nn.functional.pad
    ids = torch.cat([pad(ids, (longest - ids.shape[1], 0)) for ids in prompts])
    return ids, torch.cat([pad(torch.ones_like(ids), (longest - ids.shape[1], 0)) for ids in prompts])


def random_prompts(lengths, seed=0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 64, (1, length), generator=generator) for length in lengths]


# --- no search: plain decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [PLAIN, NO_STEP], ids=["one candidate", "no step"])
def test_a_search_among_equals_is_plain_decoding(any_model, nothing):
    for index, ids in enumerate(random_prompts([1, 5, 17])):
        for sample in (False, True):
            expected = plainly(any_model, ids, index, sample)
            assert torch.equal(search(any_model, ids, {**nothing, "seed": index}, sample=sample).sequences, expected)
            end = int(expected[0, ids.shape[1] + 9])
            got = search(any_model, ids, {**nothing, "seed": index}, sample=sample, eos_token_id=end).sequences
            assert torch.equal(got, plainly(any_model, ids, index, sample, eos_token_id=end))


def test_temperature_and_processors_are_those_of_plain_decoding(model, prompt):
    options = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    expected = plainly(model, prompt, 5, **options)
    for nothing in (PLAIN, NO_STEP):
        assert torch.equal(search(model, prompt, {**nothing, "seed": 5}, **options).sequences, expected)


# --- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ["latent", "token"])
@pytest.mark.parametrize("kv_reset", [True, False])
def test_samples_in_lockstep_are_those_run_alone(model, space, kv_reset):
    prompts = random_prompts([6, 11, 3], seed=2)
    ids, mask = padded(prompts)
    changes = {"space": space, "kv_reset": kv_reset, "lambda_diverse": 0.0, "seed": 3}
    end = int(search(model, prompts[0], changes).sequences[0, -9])
    together = search(model, ids, changes, samples=4, attention_mask=mask, eos_token_id=end)
    assert together.independent
    rows = together.sequences[:, ids.shape[1] :]
    assert len({tuple(row.tolist()) for row in rows}) > 8
    for row in range(12):
        alone = search(model, prompts[row // 4], {**changes, "seed": 3 + row}, eos_token_id=end).sequences
        alone = alone[0, prompts[row // 4].shape[1] :]
        assert torch.equal(rows[row, : len(alone)], alone)
        assert not rows[row, len(alone) :].any()
    sequential = search(
        model, ids, {**changes, "bank_mode": "sequential"}, samples=4, attention_mask=mask, eos_token_id=end
    )
    assert torch.equal(sequential.sequences, together.sequences)


def test_diversity_couples_the_samples_of_one_prompt_and_no_others(model):
    prompts = random_prompts([7, 7], seed=4)
    strong = {"lambda_diverse": 50.0, "lambda_smooth": 0.0}
    for mode in ("lockstep", "sequential"):
        both = search(model, torch.cat(prompts), {**strong, "bank_mode": mode}, samples=3)
        assert not both.independent and both.bank_mode == mode
        first = search(model, prompts[0], {**strong, "bank_mode": mode}, samples=3)
        assert torch.equal(both.sequences[:3], first.sequences)
        # In the first chunk there is nothing to keep away from but the samples before.
        records = {int(row): record for record in first.trajectories for row in record.rows if record.rows[0] == row}
        assert not first.trajectories[0].scores["diverse"][0].any()
        if mode == "lockstep":
            record = first.trajectories[0]
            bank = record.ends[[0], record.chosen[[0]]]
            expected = crowding(record.ends[1:2], bank[None], torch.ones(1, 1))
            torch.testing.assert_close(record.scores["diverse"][1:2], expected)
            assert int(record.chosen[1]) == int(expected.argmin())
        else:
            assert set(records) == {0, 1, 2}
            assert first.trajectories[-1].scores["diverse"].any()


def test_a_stop_inside_the_look_ahead_ends_the_row_and_counts_real_tokens_alone(model, prompt):
    class AtSecond(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.full((len(input_ids),), input_ids.shape[1] >= prompt.shape[1] + 2)

    seen = []

    def value(found: LookAhead) -> torch.Tensor:
        seen.append(found)
        return found.logprobs.sum(-1)

    stop = StoppingCriteriaList([AtSecond()])
    output = search(model, prompt, {"value": value}, stopping_criteria=stop)
    assert output.sequences.shape[1] == prompt.shape[1] + 2 and output.stats.emitted_tokens == 2
    assert output.stats.decoded_tokens == 6 and seen[0].tokens.shape == (1, 3, 2)

    valid = torch.tensor([[[True, True], [True, False]]])
    logprobs = torch.tensor([[[-1.0, -3.0], [-1.5, 0.0]]])
    found = LookAhead(prompt, torch.zeros(1, 2, 2, dtype=torch.long), valid, logprobs, torch.zeros(1, 2, 2, 4))
    assert look_ahead_value(TGRConfig(), found, torch.zeros(2, 2, 8)).tolist() == [[-2.0, -1.5]]


def test_candidates_that_end_do_not_change_those_that_go_on(model):
    """With an end that some candidates reach in their look-ahead, sequences end there once and nothing follows."""
    ids = random_prompts([9], seed=8)[0].expand(6, -1)
    end = int(search(model, ids[:1]).sequences[0, ids.shape[1] + 1])
    output = search(model, ids, eos_token_id=end, samples=2)
    ended = 0
    for row in output.sequences[:, ids.shape[1] :].tolist():
        if end in row:
            ended += 1
            assert not any(row[row.index(end) + 1 :])
    assert ended >= 2
    made = sum(len(row) if end not in row else row.index(end) + 1 for row in output.sequences[:, 9:].tolist())
    assert output.stats.emitted_tokens == made < output.stats.decoded_tokens


# --- memory and cost ---------------------------------------------------------------------------------------------


def test_memory_and_work_per_chunk_do_not_grow_with_the_length(model, prompt, monkeypatch):
    from transformers.cache_utils import DynamicLayer

    held = []
    update = DynamicLayer.update

    def watched(layer, *arguments, **options):
        keys, values = update(layer, *arguments, **options)
        held.append(keys.shape[-2])
        return keys, values

    monkeypatch.setattr(DynamicLayer, "update", watched)
    output = search(model, prompt, samples=2, tokens=80)
    bound = prompt.shape[1] + SMALL["carry_over"] + SMALL["chunk_length"]
    assert output.stats.peak_kv_tokens == max(held) <= bound
    assert len(output.trajectories) == 10
    work = [record.positions for record in output.trajectories]
    assert len(set(work[1:])) == 1 and sum(work) == output.stats.read_positions
    full = search(model, prompt, {"kv_reset": False}, samples=2, tokens=80).stats
    assert full.peak_kv_tokens > bound


def test_the_context_of_a_chunk_is_the_prompt_and_what_is_carried_over(model, prompt):
    """The first token of the second chunk is the one that a plain generation gives after just that context."""
    changes = {"num_candidates": 1}
    got = search(model, prompt, changes, sample=False, tokens=9).sequences
    context = torch.cat([prompt, got[:, -5:-1]], 1)
    assert torch.equal(plainly(model, context, sample=False, tokens=1)[:, -1], got[:, -1])


def test_overhead_is_what_was_decoded_and_dropped(model, prompt):
    stats = search(model, prompt, samples=4, tokens=32).stats
    assert stats.emitted_tokens == 128 and stats.extra_tokens == 4 * 4 * 2 * 3
    assert stats.overhead == 1.75
    assert search(model, prompt, PLAIN).stats.overhead == 1


def test_a_streamer_gets_the_prompt_and_what_is_kept(model, prompt):
    class Recorder(BaseStreamer):
        def __init__(self):
            self.got, self.ended = [], False

        def put(self, value):
            self.got += value.flatten().tolist()

        def end(self):
            self.ended = True

    recorder = Recorder()
    config = TGRConfig(**SMALL)
    got = model.generate(
        prompt, custom_generate=partial(tgr_generate, streamer=recorder), tgr_config=config, do_sample=True,
        max_new_tokens=20,
    )  # fmt: skip
    assert recorder.ended and recorder.got == got[0].tolist()
    with pytest.raises(ConfigError, match="one row"):
        model.generate(
            prompt.expand(2, -1), custom_generate=partial(tgr_generate, streamer=recorder), tgr_config=config,
            do_sample=True, max_new_tokens=20,
        )  # fmt: skip


# --- geometry ----------------------------------------------------------------------------------------------------


def test_candidates_lie_on_the_sphere_in_the_tangent_space():
    generator = torch.Generator().manual_seed(0)
    for length in (2, 5, 60):
        states = torch.randn(length, 24, generator=generator)
        anchor = nn.functional.normalize(torch.randn(24, generator=generator), dim=0)
        for basis in (tangent_basis(states, anchor, 8), random_basis(anchor, 8, generator)):
            rank = basis.shape[1]
            assert 1 <= rank <= 8
            torch.testing.assert_close(basis.T @ basis, torch.eye(rank), atol=1e-5, rtol=0)
            assert (anchor @ basis).abs().max() < 1e-5
            candidates = perturbed(anchor, basis, torch.randn(5, rank, generator=generator), 0.7)
            torch.testing.assert_close(candidates.norm(dim=-1), torch.ones(6), atol=1e-5, rtol=0)
            assert torch.equal(candidates[0], anchor) and (candidates[1:] @ anchor < 0.999).all()
            span = torch.cat([anchor[:, None], basis], 1)
            assert (candidates - candidates @ span @ span.T).norm(dim=-1).max() < 1e-5
    # The directions of the largest differences come first; none are made up where there are none.
    flat = torch.zeros(30, 24)
    flat[:, 3], flat[:, 7] = torch.randn(30, generator=generator), 0.1 * torch.randn(30, generator=generator)
    basis = tangent_basis(flat, torch.eye(24)[0], 8)
    assert basis.shape[1] == 2 and basis[3, 0].abs() > 0.99
    assert tangent_basis(torch.zeros(4, 24), torch.eye(24)[0], 8).shape == (24, 0)
    assert torch.equal(perturbed(torch.eye(24)[0], torch.zeros(24, 0), torch.zeros(3, 0), 1.0), torch.eye(24)[[0] * 4])


def test_candidates_of_a_search_are_unit_vectors_that_differ(model):
    ids, mask = padded(random_prompts([5, 12], seed=5))
    for tangent in ("local", "random"):
        for record in search(model, ids, {"tangent": tangent}, samples=2, attention_mask=mask).trajectories:
            torch.testing.assert_close(record.candidates.norm(dim=-1), torch.ones(record.candidates.shape[:2]))
            assert torch.equal(record.candidates[:, 0], record.anchors)
            assert (record.candidates[:, 1:] * record.anchors[:, None]).sum(-1).max() < 0.999
    token = search(model, ids, {"space": "token"}, attention_mask=mask).trajectories[0]
    assert torch.equal(token.candidates, token.anchors[:, None].expand(-1, 3, -1))
    assert not torch.equal(token.ends[:, 0], token.ends[:, 1])


def test_an_anchor_is_the_centered_mean_of_the_newest_states():
    states, mean = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([[1.0, 2, 3, 4]] * 2)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, :2] = valid[1, -1] = False  # padding on the left, an end on the right
    got = anchor_of(states, valid, mean, 3)
    for row, places in enumerate((slice(6, 9), slice(5, 8))):
        expected = nn.functional.normalize(states[row, places].mean(0) - mean[row], dim=0)
        torch.testing.assert_close(got[row], expected)
    # A window over everything would be the mean itself: half of the states count.
    whole = anchor_of(states[:1], valid[:1], states[:1].mean(1), 100)
    torch.testing.assert_close(whole[0], nn.functional.normalize(states[0, 5:].mean(0) - states[0].mean(0), dim=0))
    same = torch.ones(1, 6, 4)
    torch.testing.assert_close(anchor_of(same, valid[:1, :6], same.mean(1), 3), torch.full((1, 4), 0.5))


def test_a_tap_adds_what_it_says_at_its_layer_alone_and_goes_away(model, prompt):
    layers = decoder_layers(model)
    direction = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))

    def inputs_of_layers() -> list[torch.Tensor]:
        seen = []
        handles = [layer.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for layer in layers]
        with torch.no_grad():
            model(prompt)
        for handle in handles:
            handle.remove()
        return seen

    before = inputs_of_layers()
    with ResidualTap(layers[1]) as tap:
        tap.add(direction, 0.25)
        during = inputs_of_layers()
        assert torch.equal(tap.states, before[2])
        tap.add(None)
        assert torch.equal(inputs_of_layers()[2], before[2])
    assert torch.equal(during[0], before[0]) and torch.equal(during[1], before[1])
    step = 0.25 * before[2].norm(dim=-1, keepdim=True) * direction[:, None]
    torch.testing.assert_close(during[2] - before[2], step, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(during[3] - step, before[3])
    assert not layers[1]._forward_hooks

    def value(found):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        search(model, prompt, {"value": value})
    assert not any(layer._forward_hooks for layer in layers)


def test_a_search_steers_the_first_tokens_of_a_chunk_and_no_others(model, prompt):
    """Perturbed passes: `inject_tokens` per chunk at most, with decaying strength, none while values are read."""
    added = []
    tap_add = ResidualTap.add

    def watched(tap, direction, strength=0.0):
        tap_add(tap, direction, strength)
        if direction is not None:
            added.append((direction.shape[0], round(strength, 6)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResidualTap, "add", watched)
        search(model, prompt, {"inject_tokens": 5, "inject_strength": 1.0, "inject_decay": 0.5}, tokens=16)
        # Three candidates for three passes, and the kept one for the pass after the one that values were read in.
        assert added == 2 * [(3, 1.0), (3, 0.5), (3, 0.25), (1, 0.0625)]
        added.clear()
        search(model, prompt, {"space": "token"})
        assert not added


# --- scores ------------------------------------------------------------------------------------------------------


def test_large_weights_choose_the_straightest_and_the_farthest():
    circle = torch.linspace(0, 3, 7)
    ends = torch.stack([circle.cos(), circle.sin()], -1)[None]  # (1, 7, 2)
    anchor, before = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.9, -0.435]])
    value = torch.randn(1, 7, generator=torch.Generator().manual_seed(0))
    smooth = turning(ends[:, 1:], anchor, before)
    ahead = ends[:, 1:] - anchor[:, None]
    straightest = nn.functional.cosine_similarity(ahead, (anchor - before)[:, None], dim=-1).argmax()
    config = TGRConfig(lambda_smooth=1e4, lambda_diverse=0.0)
    assert combined(value[:, 1:], smooth, torch.zeros_like(smooth), config).argmax() == straightest
    assert not turning(ends, anchor, None).any()

    bank = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    for weights, farthest in (([1.0, 1.0], 6), ([0.0, 1.0], 0), ([1.0, 0.0], 6)):
        diverse = crowding(ends, bank, torch.tensor([weights]))
        config = TGRConfig(lambda_smooth=0.0, lambda_diverse=1e4)
        assert combined(value, torch.zeros_like(diverse), diverse, config).argmax() == farthest
    by_hand = torch.log((torch.exp(-2 * (ends[0] - bank[0, 0]).square().sum(-1)) * 1 +
                         torch.exp(-2 * (ends[0] - bank[0, 1]).square().sum(-1)) * 0.5) / 1.5)  # fmt: skip
    torch.testing.assert_close(crowding(ends, bank, torch.tensor([[1.0, 0.5]]))[0], by_hand)
    assert not crowding(ends, bank, torch.zeros(1, 2)).any()


def test_scores_that_agree_count_nothing():
    value = torch.tensor([[1.0, 2.0, 3.0]])
    same = torch.full((1, 3), 7.3)
    expected = (value - 2) / (2 / 3) ** 0.5
    torch.testing.assert_close(combined(value, same, same, TGRConfig(lambda_smooth=1e6, lambda_diverse=1e6)), expected)


def test_an_entropy_floor_stops_the_repetition_that_confidence_prefers():
    """Candidate 0 repeats itself with certainty, candidate 1 says something."""
    logits = torch.zeros(2, 4, 8)
    logits[0, :, 3] = 20.0
    logprobs = logits.log_softmax(-1)[..., 3].view(1, 2, 4)
    tokens = torch.full((1, 2, 4), 3)
    found = LookAhead(tokens[:, 0], tokens, torch.ones(1, 2, 4, dtype=torch.bool), logprobs, torch.zeros(1, 2, 4, 4))
    assert look_ahead_value(TGRConfig(), found, logits).argmax() == 0
    assert look_ahead_value(TGRConfig(value="entropy"), found, logits).argmax() == 0
    guarded = look_ahead_value(TGRConfig(entropy_floor=1.0), found, logits)
    torch.testing.assert_close(guarded[0, 1], logprobs[0, 1].mean())
    assert guarded[0, 0] < guarded[0, 1] - 0.9


# --- bad input ---------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_fit_are_refused_with_the_three_numbers(model, prompt):
    with pytest.raises(ConfigError, match="carry_over=8, chunk_length=8, prompt of 24"):
        search(model, prompt, {"carry_over": 8})
    with pytest.raises(ConfigError, match="prompt of 250 tokens, carry_over=4, chunk_length=8"):
        search(model, torch.ones(1, 250, dtype=torch.long))
    with pytest.raises(ConfigError, match="256"):
        search(model, prompt, {"kv_reset": False}, tokens=250)
    # Whatever the length, a window is enough for one chunk.
    assert search(model, prompt, {"num_candidates": 1}, tokens=250).sequences.shape[1] == 274
    for wrong in (
        {"lookahead": 8}, {"num_candidates": 0}, {"sigma": -1.0}, {"sigma": float("nan")}, {"space": "tokens"},
        {"tangent": "none"}, {"bank_mode": "both"}, {"value": "reward"}, {"anchor_layer": 0.0}, {"carry_over": -1},
        {"seed": -1}, {"entropy_floor": -1.0},
    ):  # fmt: skip
        with pytest.raises(VidgenError, match=next(iter(wrong))):
            TGRConfig(**{**SMALL, **wrong})


def test_requests_that_a_search_cannot_serve_are_refused(model, prompt, make_model):
    for message, options in (
        ("num_beams=2", {"num_beams": 2, "samples": 2}),
        ("DynamicCache", {"cache_implementation": "static"}),
        ("use_cache", {"use_cache": False}),
        ("output_scores", {"output_scores": True}),
        ("do_sample=True", {"sample": False, "changes": {"space": "token"}}),
        ("finite numbers", {"changes": {"value": lambda found: found.logprobs}}),
        ("finite numbers", {"changes": {"value": lambda found: found.logprobs.sum(-1) / 0}}),
        ("PrefixConstrained", {"logits_processor": LogitsProcessorList(
            [PrefixConstrainedLogitsProcessor(lambda batch, ids: [1], 1)])}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            search(model, prompt, **options)
    with pytest.raises(LanguageModelError, match="Sliding"):
        search(make_model("mistral", sliding_window=8), prompt)
    with pytest.raises(LanguageModelError, match="decoder.layers"):
        decoder_layers(SimpleNamespace(get_decoder=lambda: nn.Linear(1, 1)))


def test_loops_are_warned_of_and_greedy_samples_refused(model, prompt):
    # Without noise they would differ by the search alone; transformers says so before a search begins.
    with pytest.raises(ValueError, match="num_return_sequences"):
        search(model, prompt, samples=2, sample=False)
    with pytest.warns(UserWarning, match="kv_reset=False"):
        looping = search(model, prompt, sequence_bias={(5,): 100.0})
    assert looping.stats.repeat_rate > 0.9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(model, prompt, samples=2)
