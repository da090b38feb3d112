"""What would be wrong: a method judged against something else, a difference that passes as identical, silence."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from vidgen.cli.lm import app
from vidgen.language.corpus import train_tokenizer
from vidgen.language.decoding import DRAFTERS, PlainDrafter
from vidgen.language.decoding.bench import benchmark, is_lossless, logit_gap, make_table, prompt_ids, read_prompts
from vidgen.language.models import LanguageModel
from vidgen.runtime.errors import ConfigError

TEXT = "def add(left, right):\n    return left + right\n" * 6


@pytest.fixture(scope="module")
def lm(make_model) -> LanguageModel:
    return LanguageModel(make_model(vocab_size=300), train_tokenizer([TEXT], 300, 256))


@pytest.fixture(scope="module")
def results(lm) -> dict:
    return benchmark(
        lm, [TEXT, TEXT[7:]], ("prompt_lookup", "early_exit:2", "knapspec"), (8, 16), max_new_tokens=6, repeats=2
    )


def test_every_method_is_run_on_every_context_and_gives_the_plain_answer(results):
    assert results["methods"] == ["ar", "prompt_lookup", "early_exit:2", "knapspec"]
    assert list(results["contexts"]) == ["8", "16"]
    for rows in results["contexts"].values():
        assert rows["ar"]["speedup"] == rows["ar"]["cpu_speedup"] == 1
        assert rows["early_exit:2"]["skipped"] == [4, 5, 6, 7] and rows["early_exit:2"]["drafting_rounds"] > 0
        for row in rows.values():
            assert row["identical"] == [True, True] and row["new_tokens"] == 12 and row["tokens_per_second"] > 0
    assert is_lossless(results)
    table = make_table(results)
    assert table.count("2 of 2") == 8 and "| 16 | knapspec |" in table
    assert json.loads(json.dumps(results)) == results


def test_another_answer_is_told_from_a_tie(lm, results):
    ids = prompt_ids(lm, [TEXT], 8)[0]
    plain = lm.model.generate(ids, do_sample=False, max_new_tokens=4)[0]
    other = plain.clone()
    other[9] = (other[9] + 1) % 300
    gap, is_tie = logit_gap(lm, other, plain)
    assert gap > 0.01 and not is_tie
    with torch.no_grad():
        head = lm.model.get_output_embeddings().weight
        kept = head[other[9]].clone()
        head[other[9]] = head[plain[9]]  # now both tokens have the same logit
        assert logit_gap(lm, other, plain) == (0.0, True)
        head[other[9]] = kept
    assert logit_gap(lm, plain[:-1], plain) == (float("inf"), False)
    different = json.loads(json.dumps(results))
    different["contexts"]["8"]["knapspec"]["differences_are_ties"] = False
    assert not is_lossless(different)


def test_a_drafter_that_changed_the_answer_would_be_found(lm, monkeypatch):
    class Wrong(PlainDrafter):
        name = "wrong"

        def prefill(self, state):
            state.ids = state.ids.clone()
            state.ids[0, -1] = (state.ids[0, -1] + 1) % 300

    monkeypatch.setitem(DRAFTERS, "wrong", Wrong)
    found = benchmark(lm, [TEXT], ("wrong",), (8,), max_new_tokens=4, repeats=1)
    row = found["contexts"]["8"]["wrong"]
    assert row["identical"] == [False] and not row["differences_are_ties"] and not is_lossless(found)


def test_sampled_answers_are_not_compared(lm):
    row = benchmark(lm, [TEXT], ("early_exit:2",), (8,), 4, temperature=1.0, repeats=1)["contexts"]["8"][
        "early_exit:2"
    ]
    assert "identical" not in row


def test_wrong_requests_are_named(lm, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'knapspec'"):
        benchmark(lm, [TEXT], ("knapspecs",))
    with pytest.raises(ConfigError, match="context 500: the longest prompt has"):
        benchmark(lm, [TEXT], ("plain",), (500,))
    with pytest.raises(ConfigError, match="can't read prompts"):
        read_prompts(str(tmp_path / "none.txt"), 1)
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(ConfigError, match='with "prompt"'):
        read_prompts(str(tmp_path / "bad.jsonl"), 1)
    (tmp_path / "good.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert read_prompts(str(tmp_path / "good.jsonl"), 5) == ["a", "b"]
    first, second = read_prompts("builtin", 2)
    assert len(first) >= len(second) > 1000


def test_the_command_prints_the_table_and_writes_figures_and_profile(lm, tmp_path):
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "prompt.txt").write_text(TEXT)
    command = [
        "bench", "--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompt.txt"),
        "--methods", "ar,early_exit:2,knapspec", "--context", "8", "--max-new-tokens", "4", "--repeat", "1",
        "--profile", str(tmp_path / "profile.json"), "-o", str(tmp_path / "out.json"), "--device", "cpu",
    ]  # fmt: skip
    for _ in range(2):  # the second time the profile is read
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        assert "| 8 | early_exit:2 |" in done.output and "1 of 1" in done.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["contexts"]["8"]["ar"]["identical"] == [True] and "versions" in written["environment"]
    assert json.loads((tmp_path / "profile.json").read_text())["layers"] == 4
    assert CliRunner().invoke(app, [*command[:-4], "--context", "x"]).exit_code == 2
