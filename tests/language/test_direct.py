"""What would be wrong: a plan that can't be read, whatever the model, tokenizer or budget; a model that is kept from a
plan it wants to write; a state that drafts leave behind; a note about the embedded model that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vidgen.cli.direct import format_plan
from vidgen.cli.main import main
from vidgen.language import LanguageModelError, load_language_model
from vidgen.language.direct import (
    CLOSING,
    MIDDLE,
    OPENING,
    DirectError,
    PlanProcessor,
    PlanSchema,
    Shot,
    direct,
    stretch,
    token_texts,
)
from vidgen.pipelines import PromptPlan

SCHEMA = PlanSchema(min_shots=2, max_shots=4, max_seconds=12, min_characters=5, max_characters=20)


def metaspace_tokenizer():
    """As SentencePiece writes them: blanks as ▁, unknown characters as bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127))]
    pieces += ["▁", "▁the", "▁a", "storm", '▁"', '":', "▁▁", "12", "13", "007", "é", "▁1", 'm"']
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(params=["byte-level", "metaspace"])
def tokenizer(request, byte_tokenizer):
    return byte_tokenizer if request.param == "byte-level" else metaspace_tokenizer()


def processor_for(tokenizer, budget=10_000, schema=SCHEMA, prompt_length=0):
    return PlanProcessor(tokenizer, [tokenizer.eos_token_id], prompt_length, budget, schema)


def write(processor, score, budget):
    """Tokens that a model with these scores writes, as generation takes them."""
    ids = []
    for _ in range(budget):
        scores = processor(torch.tensor([ids], dtype=torch.long), score(ids)[None])[0]
        assert bool(scores.isfinite().any()), "nothing is allowed"
        ids.append(int(scores.argmax()))
        if ids[-1] in processor.stops:
            return ids
    raise AssertionError("the plan isn't finished within its budget")


def check(shots, schema=SCHEMA):
    assert schema.min_shots <= len(shots) <= schema.max_shots
    for shot in shots:
        assert shot.seconds in range(1, schema.max_seconds + 1)
        assert shot.prompt == shot.prompt.strip()
        assert 1 <= len(shot.prompt) <= schema.max_characters
        assert not set(shot.prompt) & set('"\\\n')


@pytest.mark.parametrize("slack", [0, 1, 7, 60, 2000])
def test_any_model_writes_a_plan_that_can_be_read_within_any_budget(tokenizer, slack):
    budget = processor_for(tokenizer).cost(SCHEMA) + slack
    generator = torch.Generator().manual_seed(slack)
    rounds = [processor_for(tokenizer, budget) for _ in range(6)]
    for processor in rounds:
        ids = write(processor, lambda _: torch.randn(len(tokenizer) + 5, generator=generator), budget)
        check(processor.read(ids))


def test_a_model_that_never_stops_is_led_to_the_end(tokenizer):
    processor = processor_for(tokenizer, 10_000)
    likes_letters = processor.lengths.float()
    check(processor.read(write(processor, lambda _: likes_letters, 10_000)))


def test_a_model_that_stops_at_once_writes_the_fewest_shots(tokenizer):
    processor = processor_for(tokenizer, 10_000)
    scores = torch.zeros(len(tokenizer))
    scores[[tokenizer.eos_token_id, processor.pieces["closing"][0]]] = 1
    shots = processor.read(write(processor, lambda _: scores, 10_000))
    assert len(shots) == SCHEMA.min_shots


def test_a_plan_within_the_schema_can_be_written_as_the_model_wants_it(tokenizer):
    wanted = [Shot("the storm, a (red) train", 3), Shot("a meadow: dawn", 30), Shot("birds' nest #7", 10)]
    schema = PlanSchema(min_shots=1, max_shots=3, max_seconds=30, min_characters=5, max_characters=40)
    processor = processor_for(tokenizer, 10_000, schema)
    target = "".join(f"{OPENING}{shot.seconds:g}{MIDDLE}{shot.prompt}{CLOSING}" for shot in wanted)

    def prefers_target(ids):
        rest = target[sum(len(processor.texts[index]) for index in ids) :]
        fits = [len(text) if text and rest.startswith(text) else 0 for text in processor.texts]
        scores = torch.tensor(fits, dtype=torch.float)
        scores[tokenizer.eos_token_id] = 0.5
        return scores

    assert processor.read(write(processor, prefers_target, 1000)) == wanted


def test_what_is_allowed_does_not_depend_on_drafts_that_were_taken_back(tokenizer):
    generator = torch.Generator().manual_seed(0)
    used = processor_for(tokenizer, 300)
    ids = write(used, lambda _: torch.randn(len(tokenizer), generator=generator), 300)
    zeros = torch.zeros(2, len(tokenizer))
    for length in (3, 20, 11, len(ids), 5):
        wild = torch.randint(len(tokenizer), (6,), generator=generator).tolist()
        used(torch.tensor([ids[:length] + wild]), zeros[:1])  # a draft that ignores the plan
        fresh = processor_for(tokenizer, 300)
        rows = torch.tensor([ids[:length], ids[1 : length + 1][:length] if length < len(ids) else ids])
        allowed = used(torch.tensor([ids[:length]]), zeros[:1])
        assert torch.equal(fresh(torch.tensor([ids[:length]]), zeros[:1]), allowed)
        assert torch.equal(fresh(rows, zeros)[:1], allowed)


def test_texts_of_tokens_make_up_what_is_decoded(tokenizer):
    texts = token_texts(tokenizer)
    ids = tokenizer("a the storm, (12) a birds", add_special_tokens=False)["input_ids"]
    assert "".join(texts[index] for index in ids).strip() == tokenizer.decode(ids).strip()
    assert texts[tokenizer.eos_token_id] == ""


def test_a_tokenizer_that_can_not_write_a_plan_is_refused():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    with pytest.raises(LanguageModelError, match="the tokenizer has no token for '{'; it can't write a plan"):
        processor_for(tokenizer)


def test_a_budget_below_the_shortest_plan_is_refused(byte_tokenizer):
    cost = processor_for(byte_tokenizer).cost(SCHEMA)
    with pytest.raises(DirectError, match=f"plan of 2 shots may take {cost} tokens, and there is room for {cost - 1}"):
        processor_for(byte_tokenizer, cost - 1)


def test_a_stretched_plan_has_the_length_and_the_shares():
    shots = [Shot("one", 1.0), Shot("two", 3.0), Shot("three", 2.0)]
    stretched = stretch(shots, 61.5)
    assert [shot.seconds for shot in stretched] == [10.5, 30.5, 20.5]
    assert sum(shot.seconds for shot in stretch(shots, 7.77)) == pytest.approx(7.77)
    assert [shot.seconds for shot in stretch(shots, 1.5)] == [0.5, 0.5, 0.5]


def test_a_plan_file_holds_the_plan(tmp_path):
    plan = PromptPlan.parse([("a meadow | at #dawn, \\ “é”", 2.5), ("rain", 0.07), ("a third one", 12345.67)])
    for suffix in (".txt", ".jsonl"):
        path = tmp_path / f"plan{suffix}"
        path.write_text(format_plan(plan, suffix), encoding="utf-8")
        assert PromptPlan.from_file(path) == plan


def test_a_decoder_by_name_gives_the_same_plan(tiny_lm_folder):
    lm = load_language_model(tiny_lm_folder, device="cpu")
    assert direct(lm, "Rain.", SCHEMA, decoder="prompt_lookup") == direct(lm, "Rain.", SCHEMA)


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.txt").write_text("A storm comes up over the harbor. Then the sun is back, and birds.")
    return "script.txt"


def test_the_command_writes_a_plan_that_generate_reads(script, tiny_lm_folder, capsys):
    arguments = ["direct", script, "--model", str(tiny_lm_folder), "--max-shots", "3"]
    arguments += ["--seconds", "20"]
    assert main([*arguments, "-o", "plan.jsonl", "--temperature", "1", "--seed", "3"]) == 0
    plan = PromptPlan.from_file("plan.jsonl")
    assert 2 <= len(plan.segments) <= 3
    assert plan.seconds == pytest.approx(20)
    assert "has no chat template, so it is hardly an instruct model" in capsys.readouterr().err
    assert main([*arguments, "-o", "-", "--temperature", "1", "--seed", "3"]) == 0
    Path("plan.txt").write_text(capsys.readouterr().out)
    assert PromptPlan.from_file("plan.txt") == plan
    assert main([*arguments]) == 2
    assert "plan.txt exists; choose another --output, or add --force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope.txt"], "nope.txt is not a file"),
        (["script.txt", "-o", "plan.md"], "must end in .txt or .jsonl"),
        (["script.txt", "--min-shots", "5", "--max-shots", "4"], "max_shots=4; allowed: at least 5"),
        (["script.txt", "--seconds", "2"], "seconds=2; 12 shots last 6 seconds at least"),
        (["empty.txt"], "the script is empty"),
        (["long.txt"], "tokens, the model's context 2048; shorten it"),
        (["script.txt", "--max-shot-seconds", "0"], "max_seconds=0; allowed: at least 1"),
    ],
)
def test_wrong_requests_are_one_line(script, tiny_lm_folder, capsys, arguments, message):
    Path("empty.txt").write_text("\n")
    Path("long.txt").write_text("word " * 3000)
    assert main(["direct", *arguments, "--model", str(tiny_lm_folder)]) == 2
    assert message in capsys.readouterr().err
