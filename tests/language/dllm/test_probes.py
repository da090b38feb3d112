"""What would be wrong: a question whose answer can't be known, a distractor that gives it away, a score of another
position than the answer's."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vidgen.language.dllm.context_report import context_report, plot_report, report_lines
from vidgen.language.dllm.modeling import MaskedDiffusionConfig, MaskedDiffusionLM
from vidgen.language.dllm.probes import (
    DISTRACTORS,
    KINDS,
    MaskSensitivity,
    ProbeItem,
    ProbeSet,
    RuleInductionTask,
    TopicInductionTask,
    _known_words,
    answer_logits,
    copy_probe,
    end_position_probe,
    gradient_attribution,
    mask_scaling_probe,
    one_token,
    position_probe,
    predictive_entropy,
    unmasking_probe,
)
from vidgen.language.dllm.topics import TopicData
from vidgen.runtime.errors import ConfigError, VidgenError

DATA = TopicData(topics=3, keywords=4, length=16)


def word_tokenizer(left_out: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Reads ` cat` as one token, as tokenizers of real models do."""
    words = [word for names in KINDS.values() for word in names.split() if word not in left_out]
    tokens = [f" {word}" for word in words] + words + [f" {digit}" for digit in range(10)] + list("0123456789")
    tokens = ["<pad>", "<unk>", "<mask>", "<s>", ",", " ->", "->", " .", "\n", "a", *tokens]
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    tokenizer.pre_tokenizer = Split(Regex(r" ?->|,|\n| ?[^\s,]+"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", mask_token="<mask>"
    )


TOKENIZER = word_tokenizer()
TASKS = [RuleInductionTask(rule, distractor) for rule in KINDS for distractor in DISTRACTORS]


def causal_model(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab_size, max_position_embeddings=512, initializer_range=0.4, **shape)
    ).eval()


def masked_model(vocab_size: int, **changes) -> MaskedDiffusionLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": vocab_size, "mask_token_id": 2, "max_position_embeddings": 512, "initializer_range": 0.4}
    return MaskedDiffusionLM(MaskedDiffusionConfig(**{**shape, **changes})).eval()


@pytest.fixture(scope="module")
def topics() -> ProbeSet:
    return TopicInductionTask(DATA, n_words=9).items(DATA.tokenizer(), 12, 0)


@pytest.fixture(scope="module")
def uneven() -> ProbeSet:
    """Questions of several lengths, some inside their text."""
    items = [ProbeItem((5, 6, 7), 8), ProbeItem((9, 6), 5, (7, 11, 4)), ProbeItem((10, 3, 6, 9, 8), 6, (12,))]
    return ProbeSet(tuple(items), 3)


# --- tasks -------------------------------------------------------------------------------------------------------


def test_there_are_16_rule_tasks_of_different_words():
    words = [word for names in KINDS.values() for word in names.split()]
    assert len(TASKS) == 16 and len(set(words)) == len(words)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.rule}, {task.distractor}")
def test_the_rule_follows_from_relevant_examples_alone(task):
    words, _ = _known_words(TOKENIZER)
    for seed in range(20):
        examples, (question, answer) = task.examples(random.Random(seed), words)
        relevant = [(text, right) for text, right in examples if not right.isdigit()]
        assert len(relevant) == task.n_relevant and len(examples) == task.n_relevant + task.n_distractor
        for text, right in [*relevant, (question, answer)]:
            shown = text.removesuffix(" ->").split(", ")
            # One word of the kind, so the answer is known.
            assert [word for word in shown if word in KINDS[task.rule].split()] == [right]
        for kind in KINDS:  # no other rule could be meant
            names = set(KINDS[kind].split())
            everywhere = all(names & set(text.removesuffix(" ->").split(", ")) for text, _ in relevant)
            assert everywhere == (kind == task.rule)


def test_distractors_say_nothing_of_the_rule():
    words, _ = _known_words(TOKENIZER)
    for task in TASKS:
        examples, _ = task.examples(random.Random(0), words)
        others = [text + right for text, right in examples if right.isdigit()]
        assert len(others) == 40 and not any(re.search("[a-z]", text) for text in others)


def test_the_block_moves_and_nothing_else_changes():
    task, words = RuleInductionTask("color", "smallest digit", 3, 4), _known_words(TOKENIZER)[0]
    drawn = {position: task.at("block", position / 4).examples(random.Random(1), words) for position in range(5)}
    for position, (examples, question) in drawn.items():
        kinds = [right.isdigit() for _, right in examples]
        assert kinds == [True] * position + [False] * 3 + [True] * (4 - position)
        assert question == drawn[0][1] and sorted(examples) == sorted(drawn[0][0])
    mixed = RuleInductionTask("food", "largest digit", 20, 20, "shuffled")
    answers = [right for _, right in mixed.examples(random.Random(1), words)[0]]
    assert sum(a.isdigit() != b.isdigit() for a, b in pairwise(answers)) > 5


def test_questions_are_those_of_their_seed_and_read_as_they_should():
    task = RuleInductionTask(n_relevant=2, n_distractor=1)
    probes = task.items(TOKENIZER, 6, 3)
    assert probes == task.items(TOKENIZER, 6, 3) and probes != task.items(TOKENIZER, 6, 4)
    item = probes.items[0]
    assert item.before[0] == TOKENIZER.bos_token_id and TOKENIZER.decode(probes.neutral_id) == " ."
    text = "".join(TOKENIZER.convert_ids_to_tokens(list(item.before[1:])))
    assert text.count("\n") == 3 and text.endswith(" ->") and "<unk>" not in text
    inside = task.at("query", 0.5).items(TOKENIZER, 6, 3).items[0]
    after = "".join(TOKENIZER.convert_ids_to_tokens(list(inside.after)))
    # The same lines; the question is behind the second of them.
    assert after.startswith("\n") and after.count("\n") == 1 and inside.answer == item.answer
    asked = text.rsplit("\n", 1)[1]
    assert "".join(TOKENIZER.convert_ids_to_tokens(list(inside.before[1:]))).endswith(asked)


def test_questions_go_through_all_rules_and_distractors_unless_one_is_given():
    asked = [RuleInductionTask().of_question(index) for index in range(32)]
    assert set(asked) == set(TASKS) and asked[:16] == asked[16:]
    assert {RuleInductionTask("food").of_question(index).rule for index in range(16)} == {"food"}


def test_words_of_several_tokens_are_named_and_left_out():
    tokenizer = word_tokenizer(left_out=("cat", "dog"))
    with pytest.raises(ConfigError, match="'cat' is not one token"):
        one_token(tokenizer, "->", " cat")
    probes = RuleInductionTask(n_relevant=2, n_distractor=1).items(tokenizer, 30, 0)
    assert probes.refused == ("cat", "dog")
    assert all(tokenizer.unk_token_id not in item.before for item in probes.items)
    poor = word_tokenizer(left_out=tuple(KINDS["color"].split()[:-3]))
    with pytest.raises(ConfigError, match="too few words of the kind 'color'.*red, blue"):
        RuleInductionTask().items(poor, 1, 0)
    with pytest.raises(ConfigError, match="too few words.*task topics"):
        RuleInductionTask().items(DATA.tokenizer(), 1, 0)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"rule": "animals"}, "did you mean 'animal'"),
        ({"distractor": "sum"}, "distractor='sum'"),
        ({"layout": "mixed"}, "layout='mixed'"),
        ({"n_relevant": 0}, "n_relevant=0"),
        ({"block_position": 41}, "block_position=41; allowed: 0 to 40"),
        ({"block_position": 1, "layout": "shuffled"}, "layout='block'"),
        ({"query_position": 51}, "query_position=51"),
    ],
)
def test_tasks_that_do_not_exist_are_refused(values, message):
    with pytest.raises(VidgenError, match=message):
        RuleInductionTask(**values)


def test_topics_are_hinted_at_by_the_words_of_their_block(topics):
    task = TopicInductionTask(DATA, n_words=9, block_words=4)
    for fraction, at in ((0.0, 0), (1.0, 5)):
        probes = task.at("block", fraction).items(DATA.tokenizer(), 20, 0)
        for item in probes.items:
            words = torch.tensor(item.before[:-1]) - 5 - 3
            assert item.before[-1] == 4 and (words[at : at + 4] // 4 == item.answer - 5).all()
    moved = task.at("query", 0.0).items(DATA.tokenizer(), 3, 0).items[0]
    assert moved.before == (4,) and len(moved.after) == 9
    assert topics == TopicInductionTask(DATA, n_words=9).items(DATA.tokenizer(), 12, 0)
    with pytest.raises(ConfigError, match="doesn't have the 20 tokens"):
        task.items(TOKENIZER, 1, 0)


# --- probes ------------------------------------------------------------------------------------------------------


def test_answers_are_read_where_they_stand_whatever_the_batch(uneven):
    model = masked_model(20)
    for extra, filler in ((0, None), (4, None), (4, 3)):
        together = answer_logits(model, uneven, extra, filler)
        for item, logits in zip(uneven.items, together, strict=True):
            tokens = [*item.before, 2, *item.after, *[2 if filler is None else filler] * extra]
            alone = model(torch.tensor([tokens])).logits[0, len(item.before)]
            torch.testing.assert_close(logits, alone.detach(), atol=1e-5, rtol=1e-4)


def test_a_shifted_model_is_read_at_the_position_before(uneven):
    logits = answer_logits(masked_model(20, logits_shift=1), uneven)
    item = uneven.items[1]
    tokens = torch.tensor([[*item.before, 2, *item.after]])
    unshifted = masked_model(20)(tokens).logits[0, len(item.before) - 1]
    torch.testing.assert_close(logits[1], unshifted.detach(), atol=1e-5, rtol=1e-4)


def test_a_causal_model_predicts_the_next_token(uneven):
    model = causal_model(20)
    ends = ProbeSet(tuple(ProbeItem(item.before, item.answer) for item in uneven.items), 3)
    for item, logits in zip(ends.items, answer_logits(model, ends), strict=True):
        alone = model(torch.tensor([item.before])).logits[0, -1]
        torch.testing.assert_close(logits, alone.detach(), atol=1e-5, rtol=1e-4)


def test_causal_models_have_no_mask_probes(uneven, topics):
    model = causal_model(20)
    for probe in (
        lambda: mask_scaling_probe(model, topics),
        lambda: answer_logits(model, uneven),
        lambda: unmasking_probe(model, topics, 3, [1]),
        lambda: gradient_attribution(model, topics, 3),
        lambda: position_probe(model, TopicInductionTask(DATA, 9), DATA.tokenizer(), "query"),
    ):
        with pytest.raises(ConfigError, match="LlamaForCausalLM has no mask token and causal attention"):
            probe()


def test_mask_scaling_says_how_it_decoded_and_starts_from_no_extra_masks(topics):
    result = mask_scaling_probe(masked_model(20), topics, (7, 2), batch_size=5)
    rows = result["rows"]
    assert [row["extra_masks"] for row in rows] == [0, 2, 7] and rows[0]["tv"] == 0 < rows[2]["tv"]
    assert [(row["gen_length"], row["block_length"], row["steps"]) for row in rows] == [
        (1, 1, 1),
        (3, 3, 1),
        (8, 8, 1),
    ]
    control = mask_scaling_probe(masked_model(20), topics, (2,), filler="dot")
    assert control["rows"][0]["entropy"] == pytest.approx(rows[0]["entropy"], rel=1e-4)
    assert control["rows"][1]["tv"] != rows[1]["tv"]


def test_more_masks_than_positions_name_the_largest_number(topics):
    with pytest.raises(ConfigError, match="positions for 512: allowed are up to 501 extra masks"):
        mask_scaling_probe(masked_model(20), topics, (0, 502))
    with pytest.raises(ConfigError, match="filler='comma'"):
        mask_scaling_probe(masked_model(20), topics, filler="comma")


def test_sensitivity_by_hand():
    answers = torch.tensor([0, 0])
    certain, wrong = torch.tensor([40.0, 0.0]), torch.tensor([0.0, 40.0])
    metric = MaskSensitivity()
    with pytest.raises(ConfigError, match="nothing was measured"):
        metric.compute()
    for _ in range(2):
        metric.update(
            {0: torch.stack([certain, certain]), 10: torch.stack([certain, wrong]), 20: torch.stack([wrong, wrong])},
            answers,
        )
    found = metric.compute()
    # Drops of 0, 0.5 and 1; distances of 0.5 and 1.
    assert found == pytest.approx({"max_drop": 1.0, "area": 0.5, "mean_tv": 0.75})
    with pytest.raises(ConfigError, match="give 0 and the same numbers"):
        metric.update({0: torch.stack([certain, certain])}, answers)
    metric.reset()
    metric.update({0: torch.stack([certain, wrong]), 5: torch.stack([certain, certain])}, answers)
    assert metric.compute()["max_drop"] == pytest.approx(-0.5)  # masks that help are no drop


def test_entropy_by_hand():
    logits = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(predictive_entropy(logits), torch.tensor([2.0, 4.0]).log())


def test_a_model_that_sees_no_masks_gives_them_no_gradient(topics):
    model = masked_model(20)
    seen = gradient_attribution(model, topics, 6)
    assert 0 < seen["mask"] < 1 and seen["ratio"] == pytest.approx(seen["mask"] / seen["text"])
    forward = model.forward

    def blind(inputs_embeds, attention_mask, **options):
        columns = torch.arange(attention_mask.shape[1])
        # Nobody sees the extra masks but themselves.
        visible = attention_mask[:, None] & ((columns < 11) | (columns[:, None] == columns))
        return forward(inputs_embeds=inputs_embeds, attention_mask=visible, **options)

    model.forward = blind
    assert gradient_attribution(model, topics, 6)["mask"] == 0


def test_unmasking_at_once_is_the_answer_of_one_step_and_more_steps_differ(topics):
    model = masked_model(20)
    rows = unmasking_probe(model, topics, 5, [1, 6], batch_size=5)
    # Generation never chooses the mask itself.
    logits = answer_logits(model, topics, 5).index_fill(-1, torch.tensor([2]), -torch.inf)
    assert rows[0]["accuracy"] == pytest.approx(float((logits.argmax(-1) == topics.answers).double().mean()))
    assert [(row["gen_length"], row["steps"]) for row in rows] == [(6, 1), (6, 6)]
    with pytest.raises(VidgenError, match="steps=7; allowed: 1 to 6"):
        unmasking_probe(model, topics, 5, [7])


def test_where_an_answer_ends_is_counted_from_the_question(topics):
    model = masked_model(20)
    with pytest.raises(ConfigError, match="names no eos_token_id"):
        end_position_probe(model, topics, [3])
    # Token 1 ends; it is made certain behind the question, from the second token on.
    forward = model.forward

    def ends(*arguments, attention_mask=None, position_ids=None, **options):
        output = forward(*arguments, attention_mask=attention_mask, position_ids=position_ids, **options)
        late = position_ids[:, options["logits_positions"]] >= 12
        output.logits = output.logits + 1e4 * late[..., None] * torch.eye(20)[1]
        output.logits = output.logits - 1e4 * (~late)[..., None] * torch.eye(20)[1]
        return output

    model.forward = ends
    model.generation_config.eos_token_id = 1
    rows = end_position_probe(model, topics, [0, 3, 6])
    assert [(row["ended"], row["end"]) for row in rows] == [(0.0, None), (1.0, 2.0), (1.0, 2.0)]
    assert [(row["gen_length"], row["steps"]) for row in rows] == [(1, 1), (4, 4), (7, 7)]


def test_position_probe_asks_the_same_questions_everywhere():
    task = TopicInductionTask(DATA, n_words=9, block_words=3)
    for model in (masked_model(20), causal_model(20)):
        rows = position_probe(model, task, DATA.tokenizer(), places=3, count=10)
        assert [row["position"] for row in rows] == [0.0, 0.5, 1.0] and all(row["move"] == "block" for row in rows)
    with pytest.raises(ConfigError, match="move='words'"):
        position_probe(masked_model(20), task, DATA.tokenizer(), "words")


def test_copying_is_at_chance_in_an_untrained_model():
    vocabulary = len(TOKENIZER)
    for model in (masked_model(vocabulary), causal_model(vocabulary)):
        assert copy_probe(model, TOKENIZER, count=10) < 0.5


def test_the_report_holds_every_probe_that_fits_the_model(tmp_path):
    task = TopicInductionTask(DATA, n_words=9, block_words=3)
    report = context_report(masked_model(20), DATA.tokenizer(), task, (0, 3), places=2, count=6)
    assert {"masks", "control", "unmasking", "attribution", "end", "position"} <= set(report) and report["end"] is None
    assert [row["steps"] for row in report["unmasking"]] == [1, 2, 4]
    assert {row["move"] for row in report["position"]} == {"block", "query"}
    assert any("gen_length" in line for line in report_lines(report))
    causal = context_report(causal_model(20), DATA.tokenizer(), task, places=2, count=6)
    assert "masks" not in causal and {row["move"] for row in causal["position"]} == {"block"}
    pytest.importorskip("matplotlib")
    for name, content in (("masked", report), ("causal", causal)):
        plot_report(content, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    rules = context_report(
        causal_model(len(TOKENIZER)), TOKENIZER, RuleInductionTask(n_relevant=2, n_distractor=2), places=2, count=4
    )
    assert rules["copy_accuracy"] < 0.95 and any("logits are shifted" in line for line in report_lines(rules))
