"""What would be wrong: a cache or a batch that changes the text, a rule that keeps other tokens than it says."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LogitsProcessorList, PreTrainedTokenizerFast, StoppingCriteriaList, TextIteratorStreamer

from vidgen.language.dllm.generation import DLLMGenerationConfig, _accept, check_same_tokenizer
from vidgen.language.dllm.modeling import MaskedDiffusionLM
from vidgen.runtime.errors import ConfigError

MASK = 63
RULES = ["low_confidence_static", "low_confidence_dynamic", "sequential", "entropy_bound"]


class Recorder:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.values, self.drafts, self.ended = [], [], False

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value)

    def put_draft(self, value: torch.Tensor) -> None:
        self.drafts.append(value)

    def end(self) -> None:
        self.ended = True


# --- caches and batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rcd", [None, {}])
@pytest.mark.parametrize("remasking", RULES)
def test_cached_blocks_give_the_text_of_no_cache(make_model, prompts, remasking, rcd):
    model = make_model(block_size=4)
    ids, mask = prompts
    options = {"max_new_tokens": 11, "remasking": remasking, "confidence_threshold": 0.3, "rcd": rcd}
    none = model.generate(ids, mask, use_cache="none", **options)
    block = model.generate(ids, mask, use_cache="block", **options)
    assert torch.equal(none.sequences, block.sequences) and torch.equal(none.denoising_steps, block.denoising_steps)
    assert none.stats.cache == 0 < block.stats.cache
    assert not (block.sequences[:, 7:] == MASK).any()


@pytest.mark.parametrize(
    "changes, cache",
    [({"block_size": 4}, "block"), ({}, "none"), ({}, "prefix"), ({}, "dual"), ({"logits_shift": 1}, "dual")],
)
@pytest.mark.parametrize("rcd", [None, {}])
def test_a_row_of_a_ragged_batch_is_what_it_is_alone(make_model, prompts, changes, cache, rcd):
    model = make_model(**changes)
    ids, mask = prompts
    options = {"max_new_tokens": 10, "use_cache": cache, "rcd": rcd}
    if "block_size" not in changes:
        options["block_length"] = 4
    batch = model.generate(ids, mask, **options)
    for row in range(3):
        alone = model.generate(ids[row : row + 1, mask[row] == 1], **options)
        assert torch.equal(batch.sequences[row, mask[row].logical_not().sum() :], alone.sequences[0])
        assert batch.denoising_steps[row] == alone.denoising_steps[0]
    assert torch.equal(batch.sequences[:, :7], ids)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_what_a_prefix_or_dual_cache_holds_is_the_first_step_of_the_block(make_model, prompts, shift, cache):
    model = make_model(logits_shift=shift)
    ids, mask = prompts
    # One step per block never looks into the cache, so the text is exact.
    options = {"max_new_tokens": 12, "block_length": 4, "denoising_steps": 1}
    exact = model.generate(ids, mask, **options)
    assert torch.equal(model.generate(ids, mask, use_cache=cache, **options).sequences, exact.sequences)
    # From the second step on, keys outside the block are those of before.
    options["denoising_steps"] = 2
    seen = []
    handle = model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model.generate(ids[:1], use_cache=cache, **{**options, "max_new_tokens": 8})
    handle.remove()
    first, second = seen[0], seen[1]
    assert first.key_values[0][0].shape[1] == 15
    assert second.key_values[0][0].shape[1] == (8 if cache == "prefix" else 4) + shift


def test_a_later_block_cannot_change_an_earlier_one(make_model):
    model = make_model(block_size=4)
    ids = torch.arange(4)[None]
    short = model.generate(ids, max_new_tokens=8, rcd={}).sequences
    assert torch.equal(model.generate(ids, max_new_tokens=20, rcd={}).sequences[:, :12], short)


def test_masks_of_a_prompt_are_filled_in_and_nothing_else(make_model):
    for changes in ({}, {"block_size": 4}):
        model = make_model(**changes)
        puzzle = torch.randint(0, 60, (3, 16), generator=torch.Generator().manual_seed(0))
        blank = torch.rand(3, 16, generator=torch.Generator().manual_seed(1)) < 0.5
        filled = model.generate(puzzle.masked_fill(blank, MASK), max_new_tokens=0)
        assert torch.equal(filled.sequences[~blank], puzzle[~blank]) and not (filled.sequences == MASK).any()
        assert torch.equal(filled.tokens_per_forward * filled.denoising_steps, blank.sum(1).float())


# --- rules of remasking ------------------------------------------------------------------------------------------


def accepted(config: dict, confidences: list[float], quota: int, masked: list[int] | None = None) -> list[int]:
    """Positions that are kept, of five tokens in a vocabulary of 3 with the given largest probabilities."""
    p = torch.tensor([[[c, 1 - c, 0.0] for c in confidences]])
    is_masked = torch.tensor([[masked is None or i in masked for i in range(len(confidences))]])
    tokens = torch.zeros(1, len(confidences), dtype=torch.long)
    kept = _accept(p, tokens, is_masked, torch.tensor([quota]), DLLMGenerationConfig(**config))
    return kept[0].nonzero().flatten().tolist()


def test_which_tokens_are_kept():
    confidences = [0.6, 0.95, 0.7, 0.99, 0.9]
    static = {"remasking": "low_confidence_static"}
    assert accepted(static, confidences, 2) == [1, 3]
    assert accepted(static, confidences, 2, masked=[0, 2, 4]) == [2, 4]
    dynamic = {"remasking": "low_confidence_dynamic", "confidence_threshold": 0.85}
    assert accepted(dynamic, confidences, 1) == [1, 3, 4]
    assert accepted(dynamic, confidences, 4) == [1, 2, 3, 4]
    assert accepted(dynamic, confidences, 1, masked=[0, 2]) == [2]
    assert accepted({"remasking": "sequential"}, confidences, 2, masked=[1, 2, 4]) == [1, 2]
    # Entropies: 0.056, 0.199, 0.325, 0.611, 0.673. All but the largest of those kept sum to at most the bound.
    bound = {"remasking": "entropy_bound", "entropy_bound": 0.26}
    assert accepted(bound, confidences, 1) == [1, 3, 4]
    assert accepted({**bound, "entropy_bound": 0.0}, confidences, 1) == [3]
    assert accepted({**bound, "entropy_bound": 0.0}, confidences, 2) == [1, 3]


@pytest.mark.parametrize("remasking", RULES)
@pytest.mark.parametrize("steps", [1, 3, 5, 16])
def test_a_block_never_takes_more_steps_than_allowed(make_model, remasking, steps):
    model = make_model()
    bounds = {"confidence_threshold": 1.0, "entropy_bound": 0.0}
    output = model.generate(
        torch.full((2, 16), MASK), max_new_tokens=0, denoising_steps=steps, remasking=remasking, **bounds
    )
    assert output.denoising_steps.tolist() == [steps, steps] and not (output.sequences == MASK).any()
    assert output.tokens_per_forward.tolist() == pytest.approx([16 / steps] * 2)


def test_low_thresholds_take_fewer_steps(make_model, prompts):
    model = make_model(block_size=4)
    ids, mask = prompts
    steps = [
        int(model.generate(ids, mask, max_new_tokens=12, confidence_threshold=t).denoising_steps.sum())
        for t in (0.0, 0.2, 1.0)
    ]
    assert steps[0] < steps[1] < steps[2]


def test_draws_come_from_the_generator(make_model, prompts):
    model = make_model()
    ids, mask = prompts

    def draw(seed: int, **options) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return model.generate(ids, mask, max_new_tokens=8, generator=generator, **options).sequences

    greedy = model.generate(ids, mask, max_new_tokens=8).sequences
    assert torch.equal(draw(0, temperature=1.0), draw(0, temperature=1.0))
    assert not torch.equal(draw(0, temperature=1.0), draw(1, temperature=1.0))
    assert torch.equal(draw(0, temperature=1.0, top_k=1), greedy)
    assert torch.equal(draw(0, temperature=1.0, top_p=1e-6), greedy)


def test_a_draw_follows_the_distribution_of_the_model(make_model):
    model = make_model(initializer_range=0.15)
    ids = torch.tensor([[3, 4, MASK]]).expand(4000, -1)
    drawn = model.generate(ids, max_new_tokens=0, temperature=1.0, generator=torch.Generator().manual_seed(0))
    expected = model(ids[:1]).logits[0, 2].index_fill(-1, torch.tensor([MASK]), -torch.inf).softmax(-1)
    found = torch.bincount(drawn.sequences[:, 2], minlength=64) / 4000
    assert 0.5 * (found - expected).abs().sum() < 0.08 and expected.max() < 0.5


# --- ends, streams, processors -----------------------------------------------------------------------------------


def test_a_row_ends_at_its_end_token(make_model, prompts):
    model = make_model(block_size=4)
    ids, mask = prompts
    free = model.generate(ids, mask, max_new_tokens=20).sequences
    end = int(free[0, 9])
    ended = model.generate(ids, mask, max_new_tokens=20, eos_token_id=end, pad_token_id=62)
    first = int((free[0, 7:] == end).nonzero()[0]) + 7
    assert torch.equal(ended.sequences[0, : first + 1], free[0, : first + 1])
    assert (ended.sequences[0, first + 1 :] == 62).all()
    assert ended.denoising_steps[0] < model.generate(ids, mask, max_new_tokens=20).denoising_steps[0]
    tokens = ended.tokens_per_forward[0] * ended.denoising_steps[0]
    torch.testing.assert_close(tokens, torch.tensor(float(first + 1 - 7)))


def test_stopping_criteria_end_after_a_block(make_model):
    model = make_model(block_size=4)

    def enough(rows: torch.Tensor, scores: None) -> torch.Tensor:
        return torch.full((len(rows),), rows.shape[1] >= 12)

    output = model.generate(
        torch.arange(4)[None], max_new_tokens=20, stopping_criteria=StoppingCriteriaList([enough]), pad_token_id=62
    )
    assert len(output.block_stats) == 2 and (output.sequences[0, 12:] == 62).all()


def test_streamers_get_every_token_and_every_draft(make_model):
    # The first block holds the end of the prompt, the last one reaches beyond what was asked for.
    for ids in (torch.arange(6)[None], torch.tensor([[5, MASK, 7, MASK, 9, 10]])):
        model, streamer = make_model(block_size=4), Recorder()
        output = model.generate(ids, max_new_tokens=8, streamer=streamer, denoising_steps=4, rcd={})
        assert torch.equal(torch.cat(streamer.values, dim=1), output.sequences) and streamer.ended
        assert len(streamer.drafts) == int(output.denoising_steps[0])
        assert torch.equal(streamer.drafts[-1], output.sequences[:, 12:])
        assert all((draft != MASK).all() for draft in streamer.drafts)
    end = int(output.sequences[0, 9])
    streamer = Recorder()
    model.generate(ids, max_new_tokens=8, streamer=streamer, denoising_steps=4, rcd={}, eos_token_id=end)
    shown = torch.cat(streamer.values, dim=1)[0]
    assert (shown == end).nonzero().flatten().tolist() == [len(shown) - 1]
    with pytest.raises(ConfigError, match="one row, not 2"):
        model.generate(ids.expand(2, -1), streamer=streamer)


def test_transformers_own_streamers_work(make_model):
    model = make_model(block_size=4)
    tokens = [chr(65 + index) if index < 26 else f"t{index}" for index in range(64)]
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="A"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    ids = torch.arange(6)[None]
    output = model.generate(ids, max_new_tokens=8, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(output.sequences[0, 6:])


def test_a_folder_without_options_gets_the_default_ones(make_model, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert MaskedDiffusionLM.from_pretrained(tmp_path).generation_config.remasking == "low_confidence_dynamic"


def test_processors_choose_tokens(make_model, prompts):
    model = make_model()
    ids, mask = prompts
    plain = model.generate(ids, mask, max_new_tokens=6).sequences[:, 7:]

    def ban(rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape[0] == len(rows) and logits.ndim == 3
        return logits.index_fill(-1, plain.unique(), -torch.inf)

    banned = model.generate(ids, mask, max_new_tokens=6, logits_processor=LogitsProcessorList([ban])).sequences[:, 7:]
    assert not torch.isin(banned, plain).any()


# --- options -----------------------------------------------------------------------------------------------------


def test_options_are_saved_with_the_model_and_used(make_model, tmp_path):
    model = make_model(block_size=4)
    ids = torch.arange(8)[None]
    model.generation_config = DLLMGenerationConfig(max_new_tokens=8, denoising_steps=2, rcd={"alpha": "inverse"})
    expected = model.generate(ids).sequences
    assert expected.shape == (1, 16)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "generation_config.json").read_text())
    assert stored["rcd"] == {"alpha": "inverse"} and stored["denoising_steps"] == 2
    again = MaskedDiffusionLM.from_pretrained(tmp_path)
    assert again.generation_config.rcd == {"alpha": "inverse"}
    assert torch.equal(again.generate(ids).sequences, expected)
    assert not torch.equal(again.generate(ids, rcd=None).sequences, expected)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"remasking": "low_confidence"}, "did you mean 'low_confidence_"),
        ({"denoising_steps": 0}, "denoising_steps=0"),
        ({"block_lenght": 4}, "did you mean 'block_length'"),
        ({"use_cache": "block"}, "does not fit a bidirectional model; allowed: prefix, dual, none"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"max_new_tokens": 60}, "68 tokens; the model has positions for 64"),
        ({"rcd": {"alpa": "entropy"}}, "did you mean 'alpha'"),
    ],
)
def test_wrong_options_are_one_line_that_says_what_is_right(make_model, options, message):
    with pytest.raises(ValueError, match=message):
        make_model().generate(torch.arange(8)[None], **{"max_new_tokens": 4, **options})


def test_models_and_prompts_that_do_not_fit_are_refused(make_model):
    ids = torch.arange(8)[None]
    with pytest.raises(ConfigError, match="use_cache='dual' does not fit a block model"):
        make_model(block_size=4).generate(ids, max_new_tokens=4, use_cache="dual")
    with pytest.raises(ConfigError, match="pad on the left"):
        make_model().generate(ids, torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]), max_new_tokens=4)
    with pytest.raises(ConfigError, match="no mask token"):
        make_model(mask_token_id=None).generate(ids, max_new_tokens=4)
    with pytest.warns(UserWarning, match="block_length=8, but the model was trained with 4"):
        make_model(block_size=4).generate(ids, max_new_tokens=8, block_length=8)


def test_tokenizers_that_differ_are_refused():
    class Tokens:
        def __init__(self, *tokens: str) -> None:
            self.tokens = tokens

        def get_vocab(self) -> dict[str, int]:
            return {token: index for index, token in enumerate(self.tokens)}

    check_same_tokenizer(Tokens("a", "b"), Tokens("a", "b"))
    with pytest.raises(ConfigError, match="2 and 3 tokens, first difference 'b' and 'c' at id 1"):
        check_same_tokenizer(Tokens("a", "b"), Tokens("a", "c", "b"))
