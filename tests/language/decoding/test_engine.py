"""What would be wrong: output that isn't the target's, caches that remember rejected drafts, rows that mix."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList, TemperatureLogitsWarper
from transformers.generation import TopPLogitsWarper

from vidgen.language.decoding import (
    ActiveVocabulary,
    AssistedDrafter,
    Draft,
    Drafter,
    EarlyExitDrafter,
    GatheredLMHead,
    PlainDrafter,
    PromptLookupDrafter,
    SkipDrafter,
    SpeculativeConfig,
    StaticSkipDrafter,
    generate,
    make_drafter,
    speculative_generate,
)
from vidgen.language.decoding.base import DecodingState, draw_draft
from vidgen.language.decoding.engine import choose_tokens
from vidgen.language.decoding.skip import SublayerSkip
from vidgen.language.decoding.stats import SpecStats
from vidgen.language.models import LanguageModelError
from vidgen.runtime.errors import ConfigError

DRAFTS = SpeculativeConfig(4, None)


def plainly(model, ids, **options):
    return model.generate(ids, do_sample=False, **options)


def with_drafts(model, ids, drafter, **options):
    return model.generate(ids, do_sample=False, custom_generate=speculative_generate, drafter=drafter, **options)


def random_prompts(count: int, seed: int, shortest: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, 30, (count,), generator=generator).tolist()
    return [torch.randint(2, 64, (1, length), generator=generator) for length in lengths]


# --- greedy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 10])
def test_greedy_output_is_that_of_plain_decoding_for_many_prompts(any_model, length):
    """Eighteen prompts of each architecture and draft length: sixteen in a batch, two alone."""
    drafter = StaticSkipDrafter(any_model, 1, SpeculativeConfig(length, None))
    generator = torch.Generator().manual_seed(length)
    batches = [torch.randint(2, 64, (16, 9 + length), generator=generator), *random_prompts(2, seed=length)]
    confirmed = 0
    for ids in batches:
        expected = plainly(any_model, ids, max_new_tokens=14)
        # Then again with answers that end at a token that comes up in the middle of one of them.
        for end in (None, int(expected[0, ids.shape[1] + 7])):
            expected = plainly(any_model, ids, max_new_tokens=14, eos_token_id=end)
            assert torch.equal(with_drafts(any_model, ids, drafter, max_new_tokens=14, eos_token_id=end), expected)
            confirmed += drafter.stats.accepted
    assert confirmed > 20


@pytest.mark.parametrize("method", ["plain", "prompt_lookup", "early_exit:2", "static_skip:2", "clasp:2"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_rows_of_a_batch_get_what_they_would_get_alone(model, method, cache):
    prompts = random_prompts(5, seed=3, shortest=12)
    longest = max(ids.shape[1] for ids in prompts)
    ids = torch.cat([torch.nn.functional.pad(ids, (longest - ids.shape[1], 0)) for ids in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(i), (longest - i.shape[1], 0)) for i in prompts])
    # One token ends some of the rows early.
    end = int(plainly(model, prompts[0], max_new_tokens=6)[0, -1])
    options = {"max_new_tokens": 20, "eos_token_id": end, "cache_implementation": cache}
    drafter = make_drafter(method, model)
    together = with_drafts(model, ids, drafter, attention_mask=mask, **options)
    assert torch.equal(together, plainly(model, ids, attention_mask=mask, **options))
    for row, alone in enumerate(prompts):
        expected = plainly(model, alone, max_new_tokens=20, eos_token_id=end)[0, alone.shape[1] :]
        assert torch.equal(together[row, longest : longest + len(expected)], expected)


def test_an_assistant_keeps_up_with_rows_that_advance_unevenly(model, make_model):
    assistant = make_model(num_hidden_layers=2)
    ids = torch.cat([ids[:, -12:] for ids in random_prompts(4, seed=9, shortest=12)])
    drafter = AssistedDrafter(model, assistant, DRAFTS)
    assert torch.equal(with_drafts(model, ids, drafter, max_new_tokens=24), plainly(model, ids, max_new_tokens=24))
    # A copy of the target is always right, so each of its forward passes must have read the right tokens.
    drafter = AssistedDrafter(model, model, DRAFTS)
    with_drafts(model, ids, drafter, max_new_tokens=24)
    assert drafter.stats.acceptance == 1


def test_a_draft_beyond_the_end_of_the_answer_is_dropped(model, prompt):
    expected = plainly(model, prompt, max_new_tokens=12)
    # First occurrence in the middle, where a perfect draft of ten runs over it.
    answer = expected[0, prompt.shape[1] :].tolist()
    place = next(place for place in range(3, 9) if answer.index(answer[place]) == place)

    class Stop(StoppingCriteria):
        """Unknown to the drafter, unlike an end-of-text token."""

        def __call__(self, input_ids, scores, **_):
            return input_ids[:, -1] == answer[place]

    drafter = AssistedDrafter(model, model, SpeculativeConfig(10, None))
    for options in ({"eos_token_id": answer[place]}, {"stopping_criteria": StoppingCriteriaList([Stop()])}):
        got = with_drafts(model, prompt, drafter, max_new_tokens=12, **options)
        assert torch.equal(got, expected[:, : prompt.shape[1] + place + 1])
        assert drafter.stats.new_tokens == place + 1
    got = with_drafts(model, prompt, drafter, max_new_tokens=12, eos_token_id=answer[place], min_new_tokens=place + 3)
    expected = plainly(model, prompt, max_new_tokens=12, eos_token_id=answer[place], min_new_tokens=place + 3)
    assert torch.equal(got, expected)


def test_logits_processors_see_what_they_see_in_plain_decoding(model, prompt):
    options = {"max_new_tokens": 24, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    drafter = EarlyExitDrafter(model, 3, DRAFTS)
    assert torch.equal(with_drafts(model, prompt, drafter, **options), plainly(model, prompt, **options))
    assert drafter.stats.accepted


def test_a_cache_that_already_holds_a_part_of_the_prompt_is_used(model, prompt):
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(input_ids=prompt[:, :9], cache=cache, use_cache=True)
    got = with_drafts(model, prompt, StaticSkipDrafter(model, 1, DRAFTS), max_new_tokens=12, cache=cache)
    assert torch.equal(got, plainly(model, prompt, max_new_tokens=12))


# --- skipping ----------------------------------------------------------------------------------------------------


def test_with_nothing_skipped_draft_logits_are_the_targets_bit_for_bit(any_model, prompt):
    with torch.no_grad():
        whole = any_model(prompt).logits
        with SublayerSkip(any_model, ()):
            assert torch.equal(any_model(prompt).logits, whole)
    drafter = SkipDrafter(any_model, (), DRAFTS)
    with_drafts(any_model, prompt, drafter, max_new_tokens=20)
    assert drafter.stats.acceptance == 1 and set(drafter.stats.accept_lengths) <= {3, 4}


def test_skipping_the_last_layers_is_the_model_without_them_bit_for_bit(any_model, prompt):
    count = any_model.config.num_hidden_layers
    with torch.no_grad():
        with SublayerSkip(any_model, range(4, 2 * count)):
            skipped = any_model(prompt).logits
        whole = any_model(prompt).logits
        any_model.config.num_hidden_layers = 2
        try:
            shorter = any_model(prompt).logits
        finally:
            any_model.config.num_hidden_layers = count
    assert torch.equal(skipped, shorter) and not torch.equal(skipped, whole)


class Checked(StaticSkipDrafter):
    """Compares the cache with a fresh prefill after each round."""

    worst, rounds = 0.0, 0

    def update(self, state, outcome):
        super().update(state, outcome)
        if all(state.finished):
            return
        ids, mask = state.ids[:, :-1], None if state.mask is None else state.mask[:, :-1]
        visible = torch.ones_like(ids) if mask is None else mask
        position = (visible.cumsum(-1) - 1).clamp(min=0)
        fresh = self.model(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=True).cache
        running = [row for row, finished in enumerate(state.finished) if not finished]
        for own, other in zip(state.cache.cache.layers, fresh.layers, strict=True):
            assert own.get_seq_length() == ids.shape[1]
            for left, right in ((own.keys, other.keys), (own.values, other.values)):
                shown = visible.bool()[:, None, :, None].expand_as(right)
                difference = (left[:, :, : ids.shape[1]] - right).masked_fill(~shown, 0)[running]
                self.worst = max(self.worst, float(difference.abs().max()))
        self.rounds += 1


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("rows", [1, 3])
def test_after_each_round_the_cache_is_that_of_a_fresh_prefill(model, rows, cache):
    ids = torch.cat([ids[:, -10:] for ids in random_prompts(rows, seed=21, shortest=10)])
    drafter = Checked(model, 1, DRAFTS)
    with_drafts(model, ids, drafter, max_new_tokens=24, cache_implementation=cache)
    assert drafter.rounds > 5 and drafter.stats.accepted and drafter.stats.accepted < drafter.stats.drafted
    assert drafter.worst < 1e-5


# --- sampling ----------------------------------------------------------------------------------------------------

DRAWS = 200_000
P = torch.tensor([0.02, 0.30, 0.05, 0.13, 0.2, 0.05, 0.2, 0.05])
Q = torch.tensor([0.25, 0.10, 0.20, 0.0, 0.1, 0.2, 0.10, 0.05])


def many_states(processors=(), rows: int = DRAWS, seed: int = 0) -> DecodingState:
    return DecodingState(
        model=None, cache=None, ids=torch.zeros(rows, 1, dtype=torch.long), starts=[0] * rows,
        last_position=torch.zeros(rows), mask=None, processors=LogitsProcessorList(processors), do_sample=True,
        generator=torch.Generator().manual_seed(seed), stop_tokens=frozenset(), stats=SpecStats("test"),
        finished=[False] * rows,
    )  # fmt: skip


def total_variation(tokens: list[int], expected: torch.Tensor) -> float:
    share = torch.bincount(torch.tensor(tokens), minlength=len(expected)) / len(tokens)
    return float((share - expected).abs().sum() / 2)


def warped(probabilities: torch.Tensor, processors) -> torch.Tensor:
    return LogitsProcessorList(processors)(None, probabilities.log()[None])[0]


@pytest.mark.parametrize(
    "processors", [(), (TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.8))], ids=["plain", "temperature and top-p"]
)
def test_drawn_tokens_have_the_targets_distribution(processors):
    p, q = warped(P, processors), warped(Q, processors)
    state = many_states()
    draft = draw_draft(state, lambda last, depth: q.expand(DRAWS, -1), 2, None)
    chosen = choose_tokens(state, p.expand(DRAWS, 3, -1), draft)
    expected = p.softmax(-1)
    assert total_variation([tokens[0] for tokens in chosen], expected) < 0.01
    assert total_variation([tokens[1] for tokens in chosen if len(tokens) > 1], expected) < 0.02
    overlap = float(torch.minimum(expected, q.softmax(-1)).sum())
    assert sum(len(tokens) > 1 for tokens in chosen) / DRAWS == pytest.approx(overlap, abs=0.01)


def test_certain_drafts_leave_the_targets_distribution_too():
    state = many_states()
    draft = Draft(torch.full((DRAWS, 1), 1), [1] * DRAWS)
    chosen = choose_tokens(state, P.log().expand(DRAWS, 2, -1), draft)
    assert total_variation([tokens[0] for tokens in chosen], P) < 0.01


@pytest.mark.parametrize("processors", [(), (TemperatureLogitsWarper(0.7),)], ids=["plain", "temperature"])
def test_a_head_without_the_most_likely_token_leaves_the_targets_distribution_too(processors):
    head = torch.nn.Linear(1, 8, bias=False)
    with torch.no_grad():
        head.weight.copy_(Q.log()[:, None])
    narrow = GatheredLMHead(head, ActiveVocabulary(8, 4))
    narrow.add(torch.tensor([6, 4, 0, 2]))
    assert not narrow.active.contains(P.argmax())
    state = many_states(processors)
    # What the model computes at each step: the head, on the same hidden states for all.
    draft = draw_draft(state, lambda last, depth: head(torch.ones(DRAWS, 1)), 2, None, narrow)
    assert set(draft.tokens.unique().tolist()) == set(narrow.active.ids.tolist())
    chosen = choose_tokens(state, P.log().expand(DRAWS, 3, -1), draft)
    expected = warped(P, processors).softmax(-1)
    assert total_variation([tokens[0] for tokens in chosen], expected) < 0.01
    assert total_variation([tokens[1] for tokens in chosen if len(tokens) > 1], expected) < 0.02


def test_processors_apply_to_every_position_of_a_draft():
    processors = (TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.8))
    q = warped(Q, processors)
    raw = draw_draft(many_states(processors, 50), lambda last, depth: Q.log().expand(50, -1), 3, None)
    ready = draw_draft(many_states((), 50), lambda last, depth: q.expand(50, -1), 3, None)
    assert torch.equal(raw.tokens, ready.tokens) and torch.allclose(raw.logits, ready.logits)
    chosen = choose_tokens(many_states(processors, 50), P.log().expand(50, 4, -1), raw)
    expected = choose_tokens(many_states((), 50), warped(P, processors).expand(50, 4, -1), ready)
    assert chosen == expected


def test_acceptance_is_that_of_transformers_rule():
    """Same draft, same target: the mean confirmed length agrees with transformers' speculative sampling."""
    from transformers.generation.utils import _speculative_sampling

    generator = torch.Generator().manual_seed(0)
    target = torch.randn(1, 4, 8, generator=generator) * 2
    source = torch.randn(1, 3, 8, generator=generator) * 2
    rows = 2000
    tokens = torch.stack([torch.multinomial(source[0].softmax(-1), 1, generator=generator)[:, 0] for _ in range(rows)])
    torch.manual_seed(0)
    theirs = [int(_speculative_sampling(row[None], source, 3, target)[1]) for row in tokens]
    state = many_states(rows=rows, seed=1)
    draft = Draft(tokens, [3] * rows, source.expand(rows, -1, -1))
    ours = [len(new) - 1 for new in choose_tokens(state, target.expand(rows, -1, -1), draft)]
    assert sum(ours) / rows == pytest.approx(sum(theirs) / rows, abs=0.08)


def test_a_whole_sampled_generation_has_the_targets_distribution(make_model):
    tiny = make_model(vocab_size=8, num_hidden_layers=2, initializer_range=0.3, hidden_size=16, head_dim=4)
    prompt, rows = torch.tensor([[2, 5, 3, 7]]), 2000
    drafter = EarlyExitDrafter(tiny, 1, SpeculativeConfig(2, 0.3))
    torch.manual_seed(0)
    tokens = tiny.generate(
        prompt, do_sample=True, max_new_tokens=3, num_return_sequences=rows,
        custom_generate=speculative_generate, drafter=drafter,
    )[:, 4:]  # fmt: skip
    pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    with torch.no_grad():
        logits = tiny(torch.cat([prompt.expand(64, -1), pairs], dim=1)).logits.softmax(-1)
    expected = logits[:, 3].gather(1, pairs[:, :1])[:, 0] * logits[:, 4].gather(1, pairs[:, 1:])[:, 0]
    assert total_variation((tokens[:, 0] * 8 + tokens[:, 1]).tolist(), expected) < 0.08
    assert 0.2 < drafter.stats.acceptance < 0.99


def test_a_generator_fixes_what_is_drawn(model, prompt):
    def draw(seed):
        drafter = StaticSkipDrafter(model, 1, DRAFTS)
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompt, drafter, do_sample=True, max_new_tokens=12, generator=generator)

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))


# --- around it ---------------------------------------------------------------------------------------------------


class Streamer:
    """Keeps what it gets."""

    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, tokens):
        self.pieces.append(tokens.flatten())

    def end(self):
        self.ended = True


def test_a_streamer_gets_every_token_once(model, prompt):
    streamer = Streamer()
    tokens = generate(model, prompt, StaticSkipDrafter(model, 1, DRAFTS), streamer, do_sample=False, max_new_tokens=20)
    assert torch.equal(torch.cat(streamer.pieces), tokens[0]) and streamer.ended
    assert len(streamer.pieces) < 20
    with pytest.raises(ConfigError, match="a streamer shows one row"):
        generate(model, prompt.repeat(2, 1), PlainDrafter(model), Streamer(), max_new_tokens=2)


def test_stop_strings_end_an_answer(make_model):
    from vidgen.language.corpus import train_tokenizer

    model = make_model(vocab_size=258)
    tokenizer = train_tokenizer(["only bytes"], 258, 256)
    prompt = torch.tensor([[70, 71, 72, 73]])
    answer = plainly(model, prompt, max_new_tokens=30)[0, 4:].tolist()
    letters = [tokenizer.decode(token) for token in answer[3:]]
    letter = next(text for text in letters if text.isalnum() and text.isascii())
    options = {"tokenizer": tokenizer, "stop_strings": letter, "max_new_tokens": 30}
    expected = plainly(model, prompt, **options)
    drafter = AssistedDrafter(model, model, SpeculativeConfig(10, None))
    assert torch.equal(generate(model, prompt, drafter, do_sample=False, **options), expected)
    assert expected.shape[1] < 4 + 30 and drafter.stats.accepted
    with pytest.raises(ConfigError, match="tokenizer"):
        generate(model, prompt, drafter, stop_strings="x", max_new_tokens=2)


def test_statistics_add_up(model, prompt):
    drafter = StaticSkipDrafter(model, 1, DRAFTS)
    output = with_drafts(model, prompt, drafter, max_new_tokens=30, return_dict_in_generate=True)
    stats = output.spec_stats
    assert stats is drafter.stats and output.sequences.shape == (1, prompt.shape[1] + 30)
    assert output.cache.get_seq_length() == prompt.shape[1] + 29
    assert stats.new_tokens == 30 == 1 + stats.rounds + stats.accepted
    assert sum(stats.accept_lengths.values()) == stats.drafting_rounds
    assert sum(length * times for length, times in stats.accept_lengths.items()) == stats.accepted
    named = stats.prefill_seconds + stats.draft_seconds + stats.verify_seconds + stats.plan_seconds
    assert named + stats.other_seconds == pytest.approx(stats.total_seconds)
    assert stats.to_dict()["tokens_per_round"] == pytest.approx(29 / stats.rounds)


def test_the_confidence_threshold_follows_the_acceptance(model):
    from vidgen.language.decoding.base import ConfidenceStop

    stop = ConfidenceStop(0.5)
    for _ in range(20):
        stop.update(4, 0)
    risen = stop.threshold
    assert risen > 0.5
    for _ in range(60):
        stop.update(4, 4)
    assert stop.threshold < risen
    never = ConfidenceStop(None)
    never.update(4, 0)
    assert never.threshold is None


def test_prompt_lookup_continues_the_last_longest_match(model):
    drafter = PromptLookupDrafter(model, max_draft_tokens=3, max_ngram=2)
    state = many_states(rows=1)
    for tokens, expected in (
        ([1, 2, 3, 4, 9, 2, 3, 5, 6, 2, 3], [5, 6, 2]),  # two matches: the newer one
        ([7, 8, 3, 1, 2, 3], [1, 2, 3]),  # no pair matches, a single token does
        ([1, 2, 3], None),
    ):
        state.ids = torch.tensor([tokens])
        draft = drafter.get_candidates(state, 5)
        assert (draft if draft is None else draft.tokens[0].tolist()) == expected


def test_what_cant_be_done_is_refused_by_name(model, make_model, prompt):
    drafter = PlainDrafter(model)
    with pytest.raises(ConfigError, match="num_beams=2"):
        with_drafts(model, prompt, drafter, max_new_tokens=2, num_beams=2)
    with pytest.raises(ConfigError, match="needs a drafter"):
        model.generate(prompt, max_new_tokens=2, custom_generate=speculative_generate)
    with pytest.raises(ConfigError, match="another model"):
        with_drafts(make_model(), prompt, drafter, max_new_tokens=2)
    with pytest.raises(ConfigError, match="output_scores"):
        with_drafts(model, prompt, drafter, max_new_tokens=2, return_dict_in_generate=True, output_scores=True)
    with pytest.raises(ConfigError, match="did you mean 'early_exit'"):
        make_drafter("early_exits", model)
    with pytest.raises(ConfigError, match="early_exit:x"):
        make_drafter("early_exit:x", model)
    with pytest.raises(ConfigError, match="assisted:FOLDER"):
        make_drafter("assisted", model)
    with pytest.raises(ConfigError, match="vocabulary of 32"):
        AssistedDrafter(model, make_model(vocab_size=32))
    with pytest.raises(ConfigError, match="item 0"):
        SkipDrafter(model, {0})
    sliding = make_model("mistral", sliding_window=8)
    with pytest.raises(LanguageModelError, match="SlidingWindowLayer"):
        with_drafts(sliding, prompt, PlainDrafter(sliding), max_new_tokens=2)


def test_blocks_of_unknown_build_are_refused(make_model):
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    # Parts of the same names as in Llama, and a factor on the residual.
    with pytest.raises(LanguageModelError, match="granite model is a GraniteDecoderLayer"):
        StaticSkipDrafter(GraniteForCausalLM(config), 1)


def test_a_drafter_must_say_what_it_proposes(model, prompt):
    with pytest.raises(NotImplementedError):
        Drafter(model).get_candidates(many_states(rows=1), 3)
