from __future__ import annotations

import dataclasses
import functools
import itertools
import json

import numpy as np
import pytest
import torch

from scene_graph.formats import format_triplet_text, parse_triplet_text
from scene_graph.methods import ContextConfig, HFSGGBatches, HFSGGMethod, answer_weights
from scene_graph.predictors import (
    CONFIDENCE_FEATURES,
    Example,
    HFSceneGraphPredictor,
    TinyPredictor,
    TinySGGModel,
    load_predictor,
    token_features,
)
from scene_graph.predictors.hf import (
    add_lora,
    answer_labels,
    encode_chats,
    keep_last_logits,
    predicate_first_tokens,
)
from scene_graph.prompting import SGGPromptBuilder
from scene_graph.schema import Sample, SceneGraph, SceneGraphError, TailSplit, Triplet, Vocabulary
from vidgen.train import OptimizerConfig, TrainConfig, fit

VOCABULARY = Vocabulary.or4d()
KINDS = ("qwen3", "qwen2.5")


@pytest.fixture(scope="module", params=KINDS)
def folder(request, qwen, tmp_path_factory):
    """A model and a processor on disk, as somebody would have downloaded them."""
    return qwen.save_qwen(tmp_path_factory.mktemp("models") / request.param, request.param, VOCABULARY)


@pytest.fixture
def predictor(folder) -> HFSceneGraphPredictor:
    # Loaded anew for each test, as adapters change a model in place.
    return HFSceneGraphPredictor.from_pretrained(folder, VOCABULARY, device="cpu")


def color_samples(count: int = 8, size: int = 64) -> list[Sample]:
    """Flat pictures of different colors, each with a graph of its own."""
    colors = list(itertools.product((40, 220), repeat=3))
    return [
        Sample(
            id=f"frame{index}",
            take=f"take{index}",
            frame=index,
            seconds=float(index),
            views=(np.full((size, size, 3), colors[index % 8], np.uint8),),
            view_names=("room",),
            graph=SceneGraph([Triplet("head surgeon", VOCABULARY.predicates[index % 14], "patient")]),
        )
        for index in range(count)
    ]


@pytest.fixture
def samples(make_sample, make_graph) -> list[Sample]:
    rng = np.random.default_rng(2)
    return [
        make_sample(rng, make_graph(rng, num_triplets=2), take=f"t{index}", num_views=1 + index, size=(64, 64))
        for index in range(3)
    ]


def examples_for(samples):
    return [[], [Example(samples[0], samples[0].graph, 0.5)], [Example(s, s.graph, 0.1) for s in samples[:2]]]


def speak(predictor: HFSceneGraphPredictor, answers: list[str]) -> None:
    """Makes the model write given texts, one for each row of the batch, with a probability of nearly 1."""
    tokenizer = predictor.processor.tokenizer
    scripts = [[*tokenizer(answer)["input_ids"], tokenizer.eos_token_id] for answer in answers]
    begun = {}
    original = predictor.model.forward

    @functools.wraps(original)
    def forward(input_ids=None, **inputs):
        output = original(input_ids=input_ids, **inputs)
        step = begun["step"] = begun.get("step", -1) + 1
        output.logits[:] = 0
        for row, script in enumerate(scripts):
            output.logits[row, -1, script[min(step, len(script) - 1)]] = 20
        return output

    predictor.model.forward = forward


# --- prompts and labels ------------------------------------------------------------------------------------------


def test_labels_are_the_answer_and_its_end_alone(predictor, samples):
    processor = predictor.processor
    chats = [
        predictor.prompt.messages(sample, given, sample.graph) for sample, given in zip(samples, examples_for(samples))
    ]
    encoded = encode_chats(processor, chats, [sample.id for sample in samples], for_generation=False)
    labels = answer_labels(processor, chats, encoded)
    for row, sample in enumerate(samples):
        kept = labels[row][labels[row] != -100].tolist()
        assert processor.tokenizer.decode(kept) == format_triplet_text(sample.graph) + "<|im_end|>"
        places = torch.nonzero(labels[row] != -100)[:, 0]
        assert len(places) == int(places[-1] - places[0]) + 1
        before = processor.tokenizer.decode(encoded["input_ids"][row, int(places[0]) - 3 : int(places[0])])
        assert before.endswith("assistant\n")


def test_everything_the_processor_says_reaches_the_model(predictor, samples):
    """Without the token types Qwen3-VL fails, and Qwen2.5-VL computes other numbers without a word."""
    chats = [predictor.prompt.messages(samples[2])]
    inputs = encode_chats(predictor.processor, chats, ["a"], for_generation=True)
    assert "mm_token_type_ids" in inputs
    seen = {}
    original = predictor.model.generate
    predictor.model.generate = lambda **given: seen.update(given) or original(**given)
    predictor.predict(samples[2:])
    assert all(torch.equal(seen[name], value) for name, value in inputs.items())
    with torch.no_grad():
        whole = predictor.model(**inputs).logits
        del inputs["mm_token_type_ids"]
        try:
            partial = predictor.model(**inputs).logits
        except (ValueError, TypeError, RuntimeError):
            return
    assert not torch.allclose(whole, partial, atol=1e-4)


def test_padding_is_on_the_left_for_answers_and_on_the_right_for_training(predictor, samples):
    chats = [predictor.prompt.messages(sample, answer=sample.graph) for sample in samples]
    ids = [sample.id for sample in samples]
    left = encode_chats(predictor.processor, chats, ids, for_generation=True)["attention_mask"]
    right = encode_chats(predictor.processor, chats, ids, for_generation=False)["attention_mask"]
    assert left[:, -1].all() and not left[0, 0] and right[:, 0].all() and not right[0, -1]


def test_padding_on_the_wrong_side_is_refused(predictor, samples, monkeypatch):
    chats = [predictor.prompt.messages(sample) for sample in samples]
    original = type(predictor.processor).apply_chat_template

    def stubborn(self, *args, processor_kwargs, **kwargs):
        return original(self, *args, processor_kwargs={**processor_kwargs, "padding_side": "right"}, **kwargs)

    monkeypatch.setattr(type(predictor.processor), "apply_chat_template", stubborn)
    with pytest.raises(SceneGraphError, match="doesn't pad on the left"):
        encode_chats(predictor.processor, chats, ["a", "b", "c"], for_generation=True)


def test_more_placeholders_than_pictures_are_reported_with_the_sample(predictor, samples):
    chat = predictor.prompt.messages(samples[0])
    chat[-1]["content"].append({"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|>"})
    with pytest.raises(SceneGraphError, match="sample-with-a-name"):
        encode_chats(predictor.processor, [chat], ["sample-with-a-name"], for_generation=True)


def test_a_template_that_never_ends_an_answer_is_refused(predictor, samples):
    predictor.processor.chat_template = predictor.processor.chat_template.replace(
        "{% endif %}<|im_end|>\n", "{% endif %}{% if message['role'] != 'assistant' %}<|im_end|>\n{% endif %}"
    )
    chats = [predictor.prompt.messages(samples[0], answer=samples[0].graph)]
    encoded = encode_chats(predictor.processor, chats, ["a"], for_generation=False)
    with pytest.raises(SceneGraphError, match="doesn't end an answer"):
        answer_labels(predictor.processor, chats, encoded)


# --- decoding ----------------------------------------------------------------------------------------------------


def test_a_batch_gives_what_single_frames_give(predictor, samples):
    predictor.max_triplets = 1
    given = examples_for(samples)
    together = predictor.predict(samples, given, batch_size=3)
    for sample, chosen, prediction in zip(samples, given, together, strict=True):
        (alone,) = predictor.predict([sample], [chosen])
        assert alone.text == prediction.text and alone.num_examples == len(chosen) == prediction.num_examples
        assert alone.truncated == prediction.truncated


def test_answers_are_read_with_the_statistics_of_their_predicates(predictor, samples):
    texts = [
        "<SG> head surgeon,patient,drilling; head surgeon,instrument table,closeTo </SG>",
        "<SG> patient,operating table,lyingOn; robot,patient,sawing; nothing </SG>",
        "<SG> </SG>",
    ]
    speak(predictor, texts)
    predictions = predictor.predict(samples, batch_size=3)
    assert [prediction.text for prediction in predictions] == texts
    columns = [["drilling", "closeTo"], ["lyingOn", "sawing"], []]
    for prediction, text, names in zip(predictions, texts, columns, strict=True):
        assert prediction.graph == parse_triplet_text(text, VOCABULARY).graph and not prediction.truncated
        probs = prediction.token_stats.predicate_probs
        assert probs.shape == (len(names), 14) and np.allclose(probs.sum(axis=1), 1, atol=1e-5)
        first = predicate_first_tokens(predictor.processor.tokenizer, VOCABULARY)
        for row, name in zip(probs, names, strict=True):
            # All of the probability, shared with the predicates that begin alike.
            column = VOCABULARY.predicates.index(name)
            alike = [other for other in range(14) if first[other] == first[column]]
            assert row[alike].sum() > 0.99 and np.allclose(row[alike], row[column])
        assert (prediction.token_stats.chosen_logprobs > -0.01).all()
    assert predictions[1].malformed == 2 and predictions[0].malformed == 0


def test_an_answer_without_an_end_is_truncated(predictor, samples):
    predictor.max_triplets = 1
    speak(predictor, ["<SG> " + "head surgeon,patient,drilling; " * 9])
    (prediction,) = predictor.predict(samples[:1])
    assert prediction.truncated and Triplet("head surgeon", "drilling", "patient") in prediction.graph


def test_statistics_are_those_of_the_tiny_predictor_in_name_and_shape(predictor, samples):
    speak(predictor, ["<SG> head surgeon,patient,drilling </SG>"])
    (large,) = predictor.predict(samples[:1])
    torch.manual_seed(0)
    model = TinySGGModel(VOCABULARY.entities, VOCABULARY.predicates, image_size=32, hidden_size=32, num_layers=1)
    (tiny,) = TinyPredictor(model, VOCABULARY).predict(samples[:1])
    split = TailSplit(("closeTo",), ("drilling",), {}, 0.1, "train")
    for stats in (large.token_stats, tiny.token_stats):
        assert stats.predicate_probs.shape[1] == 14 and stats.predicate_probs.dtype == np.float32
        assert stats.chosen_logprobs.dtype == np.float32 and tuple(stats.confidence()) == CONFIDENCE_FEATURES
    features = [token_features(one.token_stats.predicate_probs, VOCABULARY, split) for one in (large, tiny)]
    assert features[0].keys() == features[1].keys() and 0.3 < features[0]["max_tail_mass"] <= 1


@pytest.mark.parametrize("joined", [False, True])
def test_first_tokens_hold_the_first_letter_of_a_predicate(qwen, joined):
    """Also where a tokenizer joins the comma with the word after it, as Qwen's do."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer = qwen.make_tokenizer(qwen.triplet_texts(VOCABULARY))
    if joined:
        split = pre_tokenizers.Split(Regex(r"[^\s\w]?\w+|\s+|[^\s\w]+"), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    for token, predicate in zip(predicate_first_tokens(tokenizer, VOCABULARY), VOCABULARY.predicates, strict=True):
        assert tokenizer.decode([token]).lstrip(",").startswith(predicate[0])
        assert predicate.startswith(tokenizer.decode([token]).lstrip(","))


def test_prompts_longer_than_the_context_lose_examples(predictor, samples):
    predictor.max_triplets = 1
    query, example = samples[0], Example(samples[1], samples[1].graph, 0.5)
    alone = predictor._length(query, predictor.prompt.messages(query))
    predictor.model.config.get_text_config().max_position_embeddings = alone + predictor.max_new_tokens
    with pytest.warns(UserWarning, match="1 examples don't fit"):
        (prediction,) = predictor.predict([query], [[example]])
    assert prediction.num_examples == 0 and prediction.text == predictor.predict([query])[0].text
    with pytest.raises(SceneGraphError, match=f"{samples[2].id}: its 3 views"):
        predictor.predict([samples[2]])
    predictor.max_triplets = 10_000
    with pytest.raises(SceneGraphError, match="may need 100020 tokens"):
        predictor.predict([query])


def test_embeddings_are_unit_vectors_that_padding_does_not_change(predictor, samples):
    together = predictor.embed(samples, batch_size=3)
    alone = np.concatenate([predictor.embed([sample]) for sample in samples])
    assert together.shape == (3, 128) and np.allclose(together, alone, atol=1e-4)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)


# --- files -------------------------------------------------------------------------------------------------------


def test_a_saved_predictor_is_the_same_and_says_how_it_is_asked(predictor, samples, tmp_path):
    predictor.prompt = SGGPromptBuilder(VOCABULARY, "all", 3)
    predictor.max_triplets = 2
    predictor.save_pretrained(tmp_path / "model")
    loaded = load_predictor(tmp_path / "model", device="cpu")
    assert loaded.prompt.to_dict() == predictor.prompt.to_dict() and loaded.max_triplets == 2
    assert [p.text for p in loaded.predict(samples)] == [p.text for p in predictor.predict(samples)]


@pytest.mark.parametrize("count", [1, 2, 15])
def test_the_longest_graph_of_training_fits_into_an_answer(predictor, make_graph, rng, count):
    predictor.max_triplets = count
    for _ in range(20):
        text = format_triplet_text(make_graph(rng, num_triplets=count))
        assert len(predictor.processor.tokenizer(text)["input_ids"]) < predictor.max_new_tokens


def test_a_model_without_names_or_a_template_is_refused(folder, predictor):
    with pytest.raises(SceneGraphError, match="give a vocabulary"):
        HFSceneGraphPredictor.from_pretrained(folder, device="cpu")
    with pytest.raises(SceneGraphError, match="another vocabulary"):
        HFSceneGraphPredictor(
            predictor.model, predictor.processor, VOCABULARY, SGGPromptBuilder(Vocabulary.mmor())
        )  # fmt: skip
    predictor.processor.chat_template = None
    with pytest.raises(SceneGraphError, match="no chat template"):
        HFSceneGraphPredictor(predictor.model, predictor.processor, VOCABULARY)


def logits_of(predictor: HFSceneGraphPredictor, sample: Sample) -> torch.Tensor:
    inputs = encode_chats(predictor.processor, [predictor.prompt.messages(sample)], [sample.id], for_generation=True)
    with torch.no_grad():
        return predictor.model(**inputs).logits


def test_an_adapter_is_saved_alone_and_loads_onto_its_base(predictor, samples, folder, tmp_path):
    plain = logits_of(predictor, samples[0])
    predictor.model = add_lora(predictor.model, rank=8, alpha=16)
    trainable = {name: p for name, p in predictor.model.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trainable.values()) == 65_536
    assert all("language_model" in name and "lora_" in name for name in trainable)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainable.values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    changed = logits_of(predictor, samples[0])
    assert not torch.allclose(plain, changed, atol=1e-2)
    predictor.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*.safetensors"))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        folder
    )
    loaded = load_predictor(tmp_path / "adapter", device="cpu")
    assert torch.equal(logits_of(loaded, samples[0]), changed)
    onto_base = HFSceneGraphPredictor.from_pretrained(folder, adapter=tmp_path / "adapter", device="cpu")
    assert torch.equal(logits_of(onto_base, samples[0]), changed)
    merged = loaded.model.merge_and_unload()
    loaded.model = merged
    assert torch.allclose(logits_of(loaded, samples[0]), changed, atol=1e-4)


def test_gradients_reach_the_adapter_under_gradient_checkpointing(predictor, samples):
    predictor.model.gradient_checkpointing_enable()
    model = add_lora(predictor.model, rank=4).train()
    batches = HFSGGBatches(samples, predictor.processor, predictor.prompt, ContextConfig(zero_shot_share=1.0))
    method = HFSGGMethod(model, predictor.processor, predictor.prompt)
    loss = method.training_step(batches.batch(0, 0, 1, 2), 0, torch.Generator()).losses["predictor"]
    loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert gradients and all(g is not None and float(g.abs().sum()) > 0 for g in gradients)


# --- batches and losses ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processor(qwen):
    return qwen.make_processor("qwen3", VOCABULARY)


def test_prompts_with_examples_are_as_many_as_asked_and_views_and_triplets_are_shuffled(processor, samples):
    rng = np.random.default_rng(0)
    config = ContextConfig(zero_shot_share=0.5, max_examples=2, symbol_shuffle=0.0)
    remembered = [dataclasses.replace(sample, memory="past", primary=len(sample.views) - 1) for sample in samples]
    batches = HFSGGBatches(remembered, processor, SGGPromptBuilder(VOCABULARY), config)
    counts, orders, views, memories = [], set(), set(), []
    for _ in range(300):
        sample, examples, answer = batches.prompt_of(2, rng)
        counts.append(len(examples))
        orders.add(tuple(answer))
        views.add(sample.view_names)
        memories.append(sample.memory is not None)
        assert SceneGraph(answer) == samples[2].graph
        assert np.array_equal(sample.image(), samples[2].images()[-1])  # the primary view, wherever it is now
        for example in examples:
            assert example.sample.take != sample.take and example.graph == example.sample.graph
    assert np.mean(np.array(counts) == 0) == pytest.approx(0.5, abs=0.1)
    assert set(counts) == {0, 1, 2} and abs(counts.count(1) - counts.count(2)) < 50
    assert len(orders) == 2 and len(views) == 6 and 0.4 < np.mean(memories) < 0.6


def test_swapped_names_are_one_bijection_of_examples_and_answer_and_can_be_known(processor):
    samples = color_samples(28)
    shuffled = VOCABULARY.predicates[:4]
    config = ContextConfig(zero_shot_share=0.0, max_examples=3, symbol_shuffle=1.0)
    batches = HFSGGBatches(samples, processor, SGGPromptBuilder(VOCABULARY), config, shuffled=shuffled)
    rng, swapped = np.random.default_rng(0), 0
    for step in range(600):
        query, examples, answer = batches.prompt_of(step % 28, rng)
        pairs = [(example.sample.graph, example.graph) for example in examples]
        names = {}
        for before, after in [*pairs, (query.graph, SceneGraph(answer))]:
            (old,), (new,) = before.predicates, after.predicates
            assert names.setdefault(old, new) == new
            assert old in shuffled or old == new
        assert len(set(names.values())) == len(names)
        if query.graph != SceneGraph(answer):
            swapped += 1
            assert query.graph.predicates[0] in {before.predicates[0] for before, _ in pairs}
    assert swapped > 10


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_that_of_the_answers_words(predictor, samples, weighted):
    batches = HFSGGBatches(samples, predictor.processor, predictor.prompt, ContextConfig(max_examples=1))
    weights = answer_weights(batches.word_counts()) if weighted else None
    batch = next(b for b in (batches.batch(s, 0, 1, 4) for s in range(20)) if 0 < int(b["in_context"].sum()) < 4)
    method = HFSGGMethod(predictor.model, predictor.processor, predictor.prompt, token_weights=weights)
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "in_context")}
    with torch.no_grad():
        output = method.training_step(batch, 0, torch.Generator())
        logprobs = predictor.model(**inputs).logits.log_softmax(dim=-1)
        reference = float(predictor.model(**inputs, labels=batch["labels"]).loss)
    total = norm = 0.0
    plain = {True: [], False: []}
    for row, place in torch.nonzero(batch["labels"] != -100).tolist():
        token = int(batch["labels"][row, place])
        loss, weight = -float(logprobs[row, place - 1, token]), float(weights[token]) if weighted else 1.0
        total, norm = total + weight * loss, norm + weight
        plain[bool(batch["in_context"][row])].append(loss)
    assert float(output.losses["predictor"]) == pytest.approx(total / norm, rel=1e-4)
    assert weighted or reference == pytest.approx(total / norm, rel=1e-4)
    assert float(output.metrics["zero_shot_loss"]) == pytest.approx(np.mean(plain[False]), rel=1e-4)
    assert float(output.metrics["in_context_loss"]) == pytest.approx(np.mean(plain[True]), rel=1e-4)


def test_only_the_logits_of_answers_are_computed(predictor):
    assert keep_last_logits(predictor.model, 5) == {"logits_to_keep": 5}
    assert keep_last_logits(add_lora(predictor.model, rank=2), 5) == {"logits_to_keep": 5}
    assert keep_last_logits(torch.nn.Linear(1, 1), 5) == {}


def test_token_counts_are_those_of_the_answers(processor):
    samples = color_samples(8)
    batches = HFSGGBatches(samples, processor, SGGPromptBuilder(VOCABULARY), ContextConfig(zero_shot_share=1.0))
    counts = batches.word_counts()
    labels = torch.cat([batches.batch(step, 0, 1, 8)["labels"].flatten() for step in range(8)])
    assert set(torch.nonzero(counts)[:, 0].tolist()) == set(labels[labels != -100].tolist())
    assert int(counts[processor.tokenizer.eos_token_id]) == 8 and batches.max_triplets == 1


# --- training ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [False, True])
def test_a_model_learns_its_training_frames_by_heart(qwen, kind, lora, tmp_path):
    folder = qwen.save_qwen(tmp_path / "base", kind, VOCABULARY)
    predictor = HFSceneGraphPredictor.from_pretrained(folder, VOCABULARY, device="cpu")
    samples = color_samples(8)
    config = ContextConfig(zero_shot_share=1.0)
    batches = HFSGGBatches(samples, predictor.processor, predictor.prompt, config)
    model = add_lora(predictor.model, rank=8, alpha=16) if lora else predictor.model
    method = HFSGGMethod(model, predictor.processor, predictor.prompt, batches.max_triplets)
    optimizer = OptimizerConfig(lr=1e-2 if lora else 1e-3)
    steps = 40 if lora else 150
    run = TrainConfig(str(tmp_path / "run"), steps, {"predictor": optimizer}, batch_size=8, checkpoint_every=1000)
    result = fit(method, batches, run)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["losses"]["predictor"] for row in rows]
    assert losses[0] > 3
    loaded = load_predictor(result.weights_dir / "predictor", device="cpu")
    if lora:
        # The output layer stays random, and with its small weights no logit gets far from the others.
        assert losses[-1] < losses[0] - 1
        assert torch.equal(logits_of(loaded, samples[0]), logits_of(HFSceneGraphPredictor(
            model, predictor.processor, VOCABULARY), samples[0]))  # fmt: skip
    else:
        assert losses[-1] < 0.1
        assert [answer.graph for answer in loaded.predict(samples)] == [sample.graph for sample in samples]
