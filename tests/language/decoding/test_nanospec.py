"""What would be wrong: rows of other tokens, sets that outlive their request, an answer that isn't the target's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from vidgen.language.decoding import (
    ActiveVocabulary,
    AssistedDrafter,
    EarlyExitDrafter,
    GatheredLMHead,
    NanoSpecConfig,
    SpeculativeConfig,
    StaticSkipDrafter,
    StaticVocabulary,
    generate,
    make_drafter,
    with_nanospec,
    with_static_vocabulary,
)
from vidgen.language.decoding.nanospec import top_tokens
from vidgen.runtime.checkpoint import save_safetensors
from vidgen.runtime.errors import ConfigError, VidgenError

DRAFTS = SpeculativeConfig(4, None)
CONTEXT_ONLY = NanoSpecConfig(prefill_topk=0, verify_topk=0)
EXTENSION_ONLY = NanoSpecConfig(include_prompt=False)


def plainly(model, ids, **options):
    return model.generate(ids, do_sample=False, **options)


def narrowed(model, config=None, drafts=DRAFTS):
    return with_nanospec(EarlyExitDrafter(model, 2, drafts), config)


def drawn(generator: torch.Generator, *shape: int, high: int = 64) -> torch.Tensor:
    return torch.randint(2, high, shape, generator=generator)


# --- the set and its rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", ["fifo", "lru"])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_the_heads_rows_after_a_thousand_adds_and_evictions(eviction, bias):
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(6, 500, bias=bias)
    active = ActiveVocabulary(500, 40, pinned_ids=(3, 499), eviction=eviction)
    gathered = GatheredLMHead(head, active)
    for _ in range(1000):
        before = set(active.ids.tolist())
        added = torch.randint(500, (int(torch.randint(1, 12, (), generator=generator)),), generator=generator)
        gathered.add(added)
        ids = active.ids
        assert len(ids) == len(active) == len(set(ids.tolist())) <= 40
        assert {3, 499} <= set(ids.tolist()) <= before | set(added.tolist())
        # At most 11 arrive, so none of them is pushed out by the others; what was there before may be.
        new = [token for token in added.tolist() if token not in before]
        assert set(new) <= set(ids.tolist())
    assert torch.equal(active.slot_of_token[ids].long(), torch.arange(40))
    assert int((active.slot_of_token >= 0).sum()) == 40
    assert torch.equal(gathered.rows, head.weight[ids])
    assert gathered.bias is None or torch.equal(gathered.bias, head.bias[ids])
    hidden_states = torch.randn(2, 3, 6)
    torch.testing.assert_close(gathered.forward(hidden_states), head(hidden_states)[..., ids])


def test_the_oldest_tokens_go_first_and_with_lru_the_least_used():
    kept = {}
    for eviction in ("fifo", "lru"):
        active = ActiveVocabulary(50, 5, pinned_ids=(9,), eviction=eviction)
        active.add(torch.tensor([[1, 2], [2, 3]]))
        active.add(torch.tensor([1, 9]))
        assert active.add(torch.tensor([4, 5, 5])).tolist() in ([4, 1], [4, 2])
        kept[eviction] = set(active.ids.tolist())
    assert kept == {"fifo": {9, 2, 3, 4, 5}, "lru": {9, 1, 3, 4, 5}}
    # More at once than there is room for: the last ones stay.
    active.add(torch.arange(20, 40))
    assert set(active.ids.tolist()) == {9, 36, 37, 38, 39}
    assert active.coverage(torch.tensor([36, 9, 35, 1])) == 0.5
    assert active.contains(torch.tensor([[36], [35]])).tolist() == [[True], [False]]
    assert active.reset([7]).tolist() == [0] and active.ids.tolist() == [7]


def test_impossible_sets_are_refused():
    with pytest.raises(ConfigError, match="3 pinned tokens don't fit a capacity of 2"):
        ActiveVocabulary(50, 2, pinned_ids=(1, 2, 3))
    with pytest.raises(ConfigError, match="pinned token 50; allowed: 0 to 49"):
        ActiveVocabulary(50, 8, pinned_ids=(50,))
    with pytest.raises(ConfigError, match="eviction='random'; allowed: fifo, lru"):
        NanoSpecConfig(eviction="random")
    for wrong in ({"capacity": 0}, {"prefill_topk": -1}, {"verify_topk": 1.5}, {"prefill_positions": 0}):
        with pytest.raises(VidgenError, match=next(iter(wrong))):
            NanoSpecConfig(**wrong)


def test_a_changed_head_is_gathered_again():
    head = nn.Linear(6, 50, bias=False)
    gathered = GatheredLMHead(head, ActiveVocabulary(50, 10))
    gathered.add(torch.arange(5, 12))
    hidden_states = torch.randn(1, 6)

    def change_in_place():
        with torch.no_grad():
            head.weight.mul_(2)

    def train():
        optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
        head(hidden_states).sum().backward()
        optimizer.step()

    for change in (change_in_place, train, head.double):
        before = gathered.rows.clone()
        change()
        hidden_states = hidden_states.to(head.weight.dtype)
        torch.testing.assert_close(gathered.forward(hidden_states), head(hidden_states)[:, 5:12])
        assert not torch.equal(gathered.rows[:7].double(), before[:7].double()) or change == head.double
    change_in_place()
    gathered.add(torch.tensor([20]))  # of the old rows none is left
    assert torch.equal(gathered.rows[:8], head.weight[gathered.active.ids])


def test_heads_whose_rows_cannot_be_copied_are_refused():
    class Linear8bitLt(nn.Linear):
        """Named as the one of bitsandbytes."""

    vocabulary = ActiveVocabulary(50, 10)
    with pytest.raises(ConfigError, match="the LM head is a Linear8bitLt; its rows can't be gathered"):
        GatheredLMHead(Linear8bitLt(6, 50), vocabulary)
    with pytest.raises(ConfigError, match="on meta"):
        GatheredLMHead(nn.Linear(6, 50, device="meta"), vocabulary)
    with pytest.raises(ConfigError, match="the head has 51 rows, the vocabulary 50 tokens"):
        GatheredLMHead(nn.Linear(6, 51), vocabulary)
    with pytest.raises(ConfigError, match="async_gather needs a CUDA device"):
        GatheredLMHead(nn.Linear(6, 50), vocabulary, async_gather=True)


@pytest.mark.parametrize("size", [700, 512 * 8, 512 * 8 + 1, 5000])
def test_the_partial_search_finds_the_largest_logits(size):
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(size))
    logits[0, -1] = logits[1, 0] = 9.0
    logits[2, 300:303] = 8.0 + torch.arange(3)  # all three in one chunk
    assert torch.equal(top_tokens(logits, 3), logits.topk(3).indices)


@pytest.mark.gpu
def test_rows_gathered_on_another_stream_are_those_of_the_head():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(2048, 60_000, device="cuda", dtype=torch.bfloat16)
    gathered = GatheredLMHead(head, ActiveVocabulary(60_000, 512, device="cuda"))
    hidden_states = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        gathered.add(torch.randint(60_000, (200,), generator=generator))
        logits = gathered.forward(hidden_states)
        torch.testing.assert_close(logits, nn.functional.linear(hidden_states, head.weight[gathered.active.ids]))
    assert torch.equal(gathered.rows, head.weight[gathered.active.ids])
    torch.cuda.synchronize()
    gathered.read_waits()
    assert gathered.stats.wait_seconds > 0


# --- decoding ----------------------------------------------------------------------------------------------------


def proposals(drafter) -> list[list[int]]:
    """Everything that a drafter proposes from now on."""
    seen, own = [], drafter.get_candidates

    def get_candidates(state, limit):
        draft = own(state, limit)
        if draft is not None:
            seen.append(draft.tokens.tolist())
        return draft

    drafter.get_candidates = get_candidates
    return seen


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_with_all_tokens_active_the_drafts_are_those_of_the_whole_head(any_model, prompt, penalty):
    every = torch.arange(64).roll(23)[None]
    ids = torch.cat([every, prompt], dim=1)
    options = {"max_new_tokens": 40, "repetition_penalty": penalty}
    whole, narrow = EarlyExitDrafter(any_model, 2, DRAFTS), narrowed(any_model)
    expected, got = proposals(whole), proposals(narrow)
    assert torch.equal(
        generate(any_model, ids, whole, do_sample=False, **options),
        generate(any_model, ids, narrow, do_sample=False, **options),
    )
    assert len(narrow.active) == 64 and got == expected and len(expected) > 5
    assert narrow.stats.vocabulary.coverage == 1 and narrow.stats.vocabulary.active_mean == 64


@pytest.mark.parametrize("eviction", ["fifo", "lru"])
def test_greedy_output_is_that_of_plain_decoding_for_fifty_prompts(any_model, eviction):
    """Alone and in batches, of one token and of more different ones than the set has room for."""
    generator = torch.Generator().manual_seed(1)
    configs = [NanoSpecConfig(capacity=12, eviction=eviction), NanoSpecConfig(eviction=eviction)]
    drafters = [narrowed(any_model, config) for config in configs]
    batches = [drawn(generator, 1, 1), drawn(generator, 1, 60), drawn(generator, 24, 5), drawn(generator, 24, 20)]
    assert len(set(batches[1][0].tolist())) > 12
    confirmed = 0
    for number, ids in enumerate(batches):
        expected = plainly(any_model, ids, max_new_tokens=12)
        # Then again with answers that end at a token that comes up in the middle of one of them.
        for end in (None, int(expected[number % len(ids), ids.shape[1] + 5])):
            expected = plainly(any_model, ids, max_new_tokens=12, eos_token_id=end)
            for drafter in drafters:
                got = generate(any_model, ids, drafter, do_sample=False, max_new_tokens=12, eos_token_id=end)
                assert torch.equal(got, expected)
                assert drafter.stats.vocabulary.active_max <= drafter.active.capacity
                confirmed += drafter.stats.accepted
    assert confirmed > 20


@pytest.mark.parametrize("method", ["early_exit:2", "static_skip:2", "clasp:2", "knapspec"])
def test_any_drafter_with_a_head_can_be_narrowed(model, method):
    generator = torch.Generator().manual_seed(2)
    ids, mask = drawn(generator, 3, 14), torch.ones(3, 14, dtype=torch.long)
    mask[0, :5] = 0
    drafter = make_drafter(f"{method}+nanospec:32", model)
    assert drafter.name == f"{method.partition(':')[0]}+nanospec"
    expected = plainly(model, ids, attention_mask=mask, max_new_tokens=20)
    assert torch.equal(
        generate(model, ids, drafter, do_sample=False, attention_mask=mask, max_new_tokens=20), expected
    )
    assert "forward" not in vars(model.get_output_embeddings())


def test_an_assistant_with_capped_logits_drafts_as_with_its_whole_head(model, prompt):
    """Gemma 2 caps the logits that its head returns; the confidence of a draft depends on it."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "final_logit_softcapping": 0.5, "sliding_window": 512,
        "layer_types": ["full_attention"] * 2, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    assistant = Gemma2ForCausalLM(Gemma2Config(**sizes)).eval()
    ids = torch.cat([torch.arange(64)[None], prompt], dim=1)
    mask = torch.ones_like(ids)  # token 0 is of the prompt too, not padding
    drafts = []
    for narrow in (False, True):
        drafter = AssistedDrafter(model, assistant, SpeculativeConfig(6, 0.02))
        drafter = with_nanospec(drafter) if narrow else drafter
        drafts.append(proposals(drafter))
        got = generate(model, ids, drafter, do_sample=False, attention_mask=mask, max_new_tokens=16)
        assert torch.equal(got, plainly(model, ids, attention_mask=mask, max_new_tokens=16))
    assert drafts[0] == drafts[1] and drafts[0]


def test_drafters_that_run_in_turns_share_nothing_and_forget_their_last_request(model):
    generator = torch.Generator().manual_seed(4)
    prompts = [drawn(generator, 1, 10, high=20), drawn(generator, 1, 10) // 2 + 32]
    alone = []
    for ids in prompts:
        drafter = narrowed(model, CONTEXT_ONLY)
        alone.append((proposals(drafter), generate(model, ids, drafter, do_sample=False, max_new_tokens=15), drafter))

    # Two generations whose rounds alternate: the second begins, and ends, within a round of the first.
    first, second = narrowed(model, CONTEXT_ONLY), narrowed(model, CONTEXT_ONLY)
    seen = [proposals(first), proposals(second)]
    own, inner = first.update, []

    def update(state, outcome):
        if not inner:
            inner.append(generate(model, prompts[1], second, do_sample=False, max_new_tokens=15))
        own(state, outcome)

    first.update = update
    assert torch.equal(generate(model, prompts[0], first, do_sample=False, max_new_tokens=15), alone[0][1])
    assert torch.equal(inner[0], alone[1][1]) and seen == [alone[0][0], alone[1][0]]

    again = narrowed(model, CONTEXT_ONLY)
    generate(model, prompts[1], again, do_sample=False, max_new_tokens=15)
    repeated = proposals(again)
    generate(model, prompts[0], again, do_sample=False, max_new_tokens=15)
    assert repeated == alone[0][0]
    assert set(again.active.ids.tolist()) == set(alone[0][2].active.ids.tolist())


def test_the_coverage_counter_is_a_recount(model):
    ids = drawn(torch.Generator().manual_seed(5), 2, 6)
    drafter = narrowed(model, NanoSpecConfig(capacity=24))
    known: list[set[int]] = []
    own = drafter.get_candidates

    def get_candidates(state, limit):
        known.append(set(drafter.active.ids.tolist()))
        return own(state, limit)

    drafter.get_candidates = get_candidates
    update, found = drafter.update, []

    def count(state, outcome):
        for row, advanced in enumerate(outcome.advanced):
            tokens = state.sequences.get(row, state.ids[row])[-advanced:] if advanced else []
            found.extend(int(token) in known[-1] for token in tokens)
        update(state, outcome)

    drafter.update = count
    tokens = generate(model, ids, drafter, do_sample=False, max_new_tokens=30)
    stats = drafter.stats.vocabulary
    assert stats.emitted == len(found) == 2 * (tokens.shape[1] - 7) and stats.covered == sum(found)
    assert 0 < stats.coverage < 1 and stats.active_max <= 24
    assert drafter.stats.to_dict()["vocabulary"]["coverage"] == stats.coverage


def test_each_stream_adds_its_own_tokens(model, prompt):
    with torch.no_grad():
        logits = model(prompt).logits[0]
    first = int(logits[-1].argmax())
    active = {}
    for name, config in {
        "context": CONTEXT_ONLY,
        "extension": EXTENSION_ONLY,
        "both": NanoSpecConfig(),
        "last": dataclasses.replace(EXTENSION_ONLY, prefill_positions=2),
    }.items():
        drafter = narrowed(model, config)
        generate(model, prompt, drafter, do_sample=False, max_new_tokens=1, eos_token_id=5)
        active[name] = set(drafter.active.ids.tolist())
    assert active["context"] == {first, 5, *prompt[0].tolist()}
    assert active["extension"] == {first, 5, *logits.topk(3).indices.flatten().tolist()}
    assert active["last"] == {first, 5, *logits[-2:].topk(3).indices.flatten().tolist()}
    assert active["both"] == active["context"] | active["extension"]


def test_verified_positions_add_the_targets_candidates(model, prompt):
    config = NanoSpecConfig(include_prompt=False, prefill_topk=0)
    drafter = narrowed(model, config)
    tokens = generate(model, prompt, drafter, do_sample=False, max_new_tokens=12)
    with torch.no_grad():
        logits = model(tokens).logits[0, prompt.shape[1] :]
    # The last emitted token has no answer yet.
    assert set(drafter.active.ids.tolist()) == set(logits[:-1].topk(3).indices.flatten().tolist())


def test_a_static_list_is_the_most_frequent_tokens(model, prompt, tmp_path):
    counts = torch.zeros(64, dtype=torch.int64)
    counts[[7, 9, 11]] = torch.tensor([5, 9, 5])
    save_safetensors({"counts": counts}, tmp_path / "counts.safetensors")
    vocabulary = StaticVocabulary.from_counts(tmp_path / "counts.safetensors", 3)
    assert vocabulary.ids.tolist() == [9, 7, 11]
    assert not len(vocabulary.add(torch.tensor([30]))) and vocabulary.ids.tolist() == [9, 7, 11]
    drafter = with_static_vocabulary(StaticSkipDrafter(model, 2, DRAFTS), vocabulary)
    seen = proposals(drafter)
    got = generate(model, prompt, drafter, do_sample=False, max_new_tokens=15)
    assert torch.equal(got, plainly(model, prompt, max_new_tokens=15))
    assert {token for draft in seen for token in draft[0]} <= {7, 9, 11}
    assert drafter.stats.vocabulary.active_max == 3
    by_name = make_drafter(f"early_exit:2+static_vocab:3:{tmp_path / 'counts.safetensors'}", model)
    assert by_name.active.ids.tolist() == [9, 7, 11]
    save_safetensors({"other": counts}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="no tensor 'counts'"):
        StaticVocabulary.from_counts(tmp_path / "other.safetensors", 3)
    with pytest.raises(VidgenError, match="size=65; allowed: 1 to 64"):
        StaticVocabulary.from_counts(counts, 65)


def test_drafters_that_cannot_be_narrowed_are_refused(model, make_model):
    for method, message in {
        "prompt_lookup+nanospec": "prompt_lookup drafts without an LM head",
        "early_exit:2+nanospec:many": "nanospec:many: give a number of tokens",
        "early_exit:2+static_vocab:3": "static_vocab:3072:FILE",
        "early_exit+nonospec": "unknown plug-in 'nonospec' of early_exit",
        "early_exi+nanospec": "unknown drafter 'early_exi'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            make_drafter(method, model)
    with pytest.raises(ConfigError, match="narrowed already"):
        with_nanospec(narrowed(model).inner)
    assistant = make_model(num_hidden_layers=2)
    assistant.lm_head = nn.Linear(32, 40, bias=False)
    with pytest.raises(ConfigError, match="already pruned to 40 of 64 tokens"):
        with_nanospec(AssistedDrafter(model, assistant))


def test_a_draft_ends_where_every_active_token_is_forbidden(model, prompt):
    drafter = narrowed(model, NanoSpecConfig(include_prompt=False, prefill_topk=0, verify_topk=0))
    # Only what has been emitted is active, and nothing may come twice.
    options = {"max_new_tokens": 10, "no_repeat_ngram_size": 1}
    got = generate(model, prompt, drafter, do_sample=False, **options)
    assert torch.equal(got, plainly(model, prompt, **options)) and drafter.stats.drafted == 0
    torch.manual_seed(0)
    assert generate(model, prompt, drafter, do_sample=True, **options).shape == (1, 34)
