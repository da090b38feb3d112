"""What would be wrong: branches that see each other, plans that don't pay, drafting where plain decoding is faster."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import DynamicCache

from vidgen.language.decoding import KnapSpecConfig, KnapSpecDrafter, LatencyProfile, generate
from vidgen.language.decoding.cache import RollbackCache
from vidgen.language.decoding.items import ItemRunner
from vidgen.language.decoding.knapspec import Acceptance
from vidgen.language.decoding.latency import profile_key
from vidgen.language.decoding.skip import SublayerSkip, recorded_states
from vidgen.runtime.errors import ConfigError

PAST, TOKENS = 16, 8


def profile(model, attention=1e-3, slope=0.0, mlp=1e-3, head=1e-5, call=0.0, per_token=1e-6) -> LatencyProfile:
    """A profile as a GPU has it: many tokens cost little more than one."""
    grow = (0.0, 63 * per_token)
    return LatencyProfile(
        key=profile_key(model), layers=model.config.num_hidden_layers, tokens=(1, 64),
        attention_slope=(slope, slope), attention_base=tuple(attention + g for g in grow),
        mlp=tuple(mlp + g for g in grow), head=tuple(head + g for g in grow), call=call, planning=0.0,
    )  # fmt: skip


@pytest.fixture
def read(any_model):
    """A model, its states `(2 * layers + 1, 8, width)` of the last tokens and a runner on the past before them."""
    ids = torch.randint(2, 64, (1, PAST + TOKENS), generator=torch.Generator().manual_seed(6))
    cache, store = DynamicCache(config=any_model.config), []
    with torch.no_grad(), recorded_states(any_model, TOKENS, store):
        any_model(input_ids=ids, cache=cache, use_cache=True)
        runner = ItemRunner.from_cache(any_model, RollbackCache(cache), 0, 0, PAST, PAST + TOKENS)
    return any_model, ids, store[0], runner


@torch.no_grad()
def test_an_item_on_branches_computes_what_the_model_does_and_branches_dont_see_each_other(read):
    _, _, states, runner = read
    for item in range(len(states) - 1):
        other = torch.randn_like(states[item])
        alone = runner(item, states[item][None])
        together = runner(item, torch.stack([other, states[item], other]))
        assert torch.allclose(alone[0], states[item + 1], atol=1e-4)
        assert torch.allclose(together[1], states[item + 1], atol=1e-4)
        assert torch.allclose(together[0], together[2], atol=1e-4)


@torch.no_grad()
def test_a_plans_states_are_those_of_the_model_without_these_items(read):
    """The whole programme against real forward passes: skipped items shift only what comes after them."""
    model, ids, _, _ = read
    # Branches read the past as the whole model left it, so the past is read by the whole model here too.
    drafter = KnapSpecDrafter(model, KnapSpecConfig(tau=-1.0), profile(model))
    _, _, states, runner = read
    plans = drafter.solve(drafter.weights(64), states, runner)
    assert len(plans) >= 3
    for plan in plans:
        cache, store = DynamicCache(config=model.config), []
        model(input_ids=ids[:, :PAST], cache=cache, use_cache=True)
        skipping, last = SublayerSkip(model, plan.skip), []
        norm = model.get_decoder().norm
        handle = norm.register_forward_pre_hook(lambda _, inputs, last=last: last.append(inputs[0][0]))
        with skipping:
            model(input_ids=ids[:, PAST:], cache=cache, use_cache=True)
        handle.remove()
        assert torch.allclose(last[0], plan.hidden_states, atol=1e-4)
        assert not store


def test_greedy_output_is_the_targets_while_plans_come_and_go(any_model):
    settings = KnapSpecConfig(draft_confidence=None, max_draft_tokens=4, calibration_tokens=6, replan_interval=5)
    drafter = KnapSpecDrafter(any_model, settings, profile(any_model, per_token=0.0))
    planned = drafted = 0
    for seed in range(4):
        ids = torch.randint(2, 64, (1, 4 + 4 * seed), generator=torch.Generator().manual_seed(seed))
        expected = any_model.generate(ids, do_sample=False, max_new_tokens=40)
        assert torch.equal(generate(any_model, ids, drafter, do_sample=False, max_new_tokens=40), expected)
        planned += drafter.stats.notes.get("plans", 0)
        drafted += drafter.stats.accepted
    assert planned > 1 and drafted > 20


def test_a_batch_with_padding_is_planned_by_its_first_row(model):
    ids = torch.randint(2, 64, (3, 20), generator=torch.Generator().manual_seed(6))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :9] = 0, 0
    settings = KnapSpecConfig(draft_confidence=None, calibration_tokens=8, replan_interval=6)
    drafter = KnapSpecDrafter(model, settings, profile(model, per_token=0.0))
    options = {"do_sample": False, "max_new_tokens": 30, "attention_mask": mask}
    assert torch.equal(generate(model, ids, drafter, **options), model.generate(ids, **options))
    assert drafter.stats.notes["plans"] >= 1 and drafter.stats.drafting_rounds


def test_where_plans_cost_more_than_they_can_save_nothing_is_planned_or_drafted(model, prompt):
    """As on a CPU: forty tokens through an item take forty times as long as one."""
    drafter = KnapSpecDrafter(model, profile=profile(model, per_token=1e-3))
    expected = model.generate(prompt, do_sample=False, max_new_tokens=20)
    assert torch.equal(generate(model, prompt, drafter, do_sample=False, max_new_tokens=20), expected)
    assert drafter.stats.drafting_rounds == 0 and drafter.stats.drafted == 0
    assert drafter.stats.notes == {"plans_declined": 1} and not drafter.skip


def test_where_drafts_can_pay_nothing_because_a_pass_costs_all_the_same_decoding_is_plain(model, prompt):
    """All the time is in the forward pass's own overhead, which skipping doesn't save."""
    drafter = KnapSpecDrafter(model, profile=profile(model, 1e-7, mlp=1e-7, call=1.0, per_token=1.0))
    generate(model, prompt, drafter, do_sample=False, max_new_tokens=20)
    assert drafter.stats.drafting_rounds == 0


def test_a_plan_that_disappoints_is_replaced_or_given_up(model, prompt):
    drafter = KnapSpecDrafter(model, KnapSpecConfig(draft_confidence=None), profile(model, per_token=0.0))
    generate(model, prompt, drafter, do_sample=False, max_new_tokens=30)
    length, _ = drafter.best_length(30, drafter.skip, drafter.acceptance.estimate, 10)
    assert length > 0
    for _ in range(30):
        drafter.acceptance.update(length, 0)
        drafter._promise.observed.update(length, 0)
    assert drafter._is_stale(30)
    assert drafter.best_length(30, drafter.skip, drafter.acceptance.estimate, 10) == (0, drafter.plain_speed(30))


def test_a_plan_is_kept_for_the_next_prompt_of_its_length_and_renewed_for_a_longer_one(model, prompt):
    drafter = KnapSpecDrafter(model, KnapSpecConfig(draft_confidence=None), profile(model, per_token=0.0))
    plans = []
    for ids in (prompt.repeat(1, 2), prompt.repeat(1, 2), prompt.repeat(1, 4)):
        generate(model, ids, drafter, do_sample=False, max_new_tokens=10)
        plans.append(drafter.stats.notes.get("plans", 0))
        assert drafter.skip and drafter.stats.drafting_rounds
    assert plans == [1, 0, 1]


def test_the_longer_attention_takes_the_more_of_it_is_skipped(make_model):
    """Each item adds a vector of its own, all of one length: what counts is how many items are skipped, not which."""
    model = make_model(num_hidden_layers=8)
    basis = torch.eye(17)
    states = torch.cat([basis[:1], basis[:1] + basis[1:].cumsum(0)])[:, None].expand(-1, TOKENS, -1)

    def run_item(item, branches):
        return branches + basis[item + 1]

    attention = []
    for slope in (0.0, 2e-6, 5e-6, 1e-5, 1e-4):
        drafter = KnapSpecDrafter(model, profile=profile(model, attention=5e-4, slope=slope, mlp=1e-3))
        plans = [plan for plan in drafter.solve(drafter.weights(200), states, run_item) if len(plan.skip) == 4]
        fastest = min(plans, key=lambda plan: drafter.profile.pass_seconds(200, skip=plan.skip))
        attention.append(sum(item % 2 == 0 for item in fastest.skip))
    assert attention == sorted(attention) and attention[0] == 0 and attention[-1] == 4


def test_the_acceptance_begins_doubtful_and_follows_what_is_seen():
    estimate = Acceptance(16, 16)
    assert estimate.estimate == pytest.approx(17 / 18)  # all right, and still not certain
    assert Acceptance().estimate == 0.5
    for _ in range(200):
        estimate.update(4, 1)
    assert estimate.estimate == pytest.approx(0.5, abs=0.02)  # one of two judged tokens in each round


def test_whole_layers_and_equal_weights_are_settings(read):
    model, _, states, runner = read
    with torch.no_grad():
        layers = KnapSpecDrafter(model, KnapSpecConfig(unit="layer", tau=-1), profile(model)).solve([], states, runner)
    assert layers and all({item ^ 1 for item in plan.skip} == plan.skip for plan in layers)
    assert KnapSpecDrafter(model, KnapSpecConfig(weights="unit"), profile(model, attention=9.0)).weights(50) == [1] * 8
    for wrong in ({"tau": 2}, {"max_skip_fraction": 1}, {"weights": "x"}, {"unit": "x"}, {"replan_interval": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            KnapSpecConfig(**wrong)


# --- latency -----------------------------------------------------------------------------------------------------


def test_a_profile_is_measured_saved_and_refused_elsewhere(model, make_model, tmp_path):
    measured = LatencyProfile.measure(model, contexts=(8, 64), tokens=(1, 4), repeats=1)
    assert min(*measured.attention_slope, *measured.attention_base, measured.call, measured.planning) >= 0
    assert min(measured.mlp) > 0 and min(measured.head) > 0
    measured.save(tmp_path / "profile.json")
    assert LatencyProfile.load(tmp_path / "profile.json", model) == measured
    assert KnapSpecDrafter(model, profile=measured).profile is measured
    with pytest.raises(ConfigError, match="measured with model"):
        LatencyProfile.load(tmp_path / "profile.json", make_model(num_hidden_layers=3))
    with pytest.raises(ConfigError, match="measured with attention 'flex'"):
        dataclasses.replace(measured, key={**measured.key, "attention": "flex"}).check(model)
    (tmp_path / "other.json").write_text(json.dumps({"layers": 3}))
    with pytest.raises(ConfigError, match="not a latency profile"):
        LatencyProfile.load(tmp_path / "other.json", model)
    with pytest.raises(ConfigError, match="two different lengths"):
        LatencyProfile.measure(model, contexts=(8, 8))


def test_seconds_are_linear_in_context_and_between_measured_numbers_of_tokens(model):
    known = LatencyProfile(
        key={}, layers=2, tokens=(1, 3, 5), attention_slope=(1.0, 2.0, 2.0), attention_base=(10.0, 20.0, 40.0),
        mlp=(1.0, 3.0, 9.0), head=(5.0, 5.0, 5.0), call=100.0, planning=0.5,
    )  # fmt: skip
    assert known.attention_seconds(7) == 17 and known.attention_seconds(7, 2) == 1.5 * 7 + 15
    assert [known.mlp_seconds(tokens) for tokens in (1, 2, 3, 4, 5, 6)] == [1, 2, 3, 6, 9, 12]
    assert known.pass_seconds(7) == 2 * 17 + 2 * 1 + 5 + 100
    assert known.pass_seconds(7, skip={2, 3}) == 17 + 1 + 5 + 100
    # Items 1 and 2 run two branches of one token each, then three states go through the head.
    assert known.plan_seconds(8, [0, 2, 2, 1], 1) == 4 * 0.5 + known.mlp_seconds(2) + (
        known.attention_seconds(10, 2) + known.mlp_seconds(1) + known.head_seconds(3)
    )


def test_kernels_without_masks_are_refused(model, monkeypatch):
    monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(ConfigError, match="flash_attention_2"):
        ItemRunner.with_random_past(model, 4, 2)
