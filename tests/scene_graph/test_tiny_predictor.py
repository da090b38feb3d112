from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from scene_graph.formats import parse_triplet_text
from scene_graph.predictors import (
    CONFIDENCE_FEATURES,
    TAIL_MASS_FEATURES,
    Example,
    TinyPredictor,
    TinySGGModel,
    TokenStats,
    load_predictor,
    token_features,
)
from scene_graph.predictors.tiny import END, PAD, START, CopyAttention, ShownWords, load_views
from scene_graph.schema import SceneDataError, SceneGraph, SceneGraphError, TailSplit, Triplet, Vocabulary

VOCABULARY = Vocabulary.or4d()
TAIL = TailSplit(("closeTo", "holding"), ("drilling", "sawing"), {}, 0.1, "train")


def make_model(seed: int = 0, scale: float = 1.0, **sizes) -> TinySGGModel:
    """A small model; a larger scale makes its random answers depend on pictures and examples."""
    torch.manual_seed(seed)
    sizes = {"image_size": 32, "max_triplets": 6, "hidden_size": 32, "num_layers": 2, **sizes}
    model = TinySGGModel(VOCABULARY.entities, VOCABULARY.predicates, **sizes).eval()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.mul_(scale)
    return model


@pytest.fixture(scope="module")
def predictor() -> TinyPredictor:
    return TinyPredictor(make_model(scale=6.0), VOCABULARY)


@pytest.fixture
def samples(make_graph, make_sample):
    rng = np.random.default_rng(3)
    return [
        make_sample(rng, make_graph(rng, num_triplets=i), take=f"t{i}", num_views=1 + i % 3, size=(32, 32))
        for i in range(5)
    ]


def examples_for(samples):
    others = [Example(sample, sample.graph, index / 10) for index, sample in enumerate(samples)]
    return [others[:0], others[1:2], others[2:4], others[1:3], others[4:5]]


def random_words(model: TinySGGModel, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    words = torch.randint(3, model.num_words, shape, generator=torch.Generator().manual_seed(seed))
    words[..., 0] = START
    return words


def scene_inputs(model: TinySGGModel, scenes: int, seed: int = 0):
    images = torch.randint(
        0, 256, (1, scenes, 2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return images, torch.ones(1, scenes, 2, dtype=torch.bool), random_words(model, (1, scenes, 7), seed)


# --- the transformer ---------------------------------------------------------------------------------------------


def test_words_see_nothing_that_comes_after_them():
    model = make_model(scale=4.0)
    images, mask, words = scene_inputs(model, 3)
    base = model(images, mask, words).logits
    changed = words.clone()
    changed[0, 1, 4:] = PAD
    after = model(images, mask, changed).logits
    assert torch.allclose(after[0, 0], base[0, 0], atol=1e-6) and torch.allclose(
        after[0, 1, :4], base[0, 1, :4], atol=1e-6
    )
    assert not torch.allclose(after[0, 2], base[0, 2], atol=1e-3)
    images[0, 2] = 0
    after = model(images, mask, words).logits
    assert torch.allclose(after[0, :2], base[0, :2], atol=1e-6)
    assert not torch.allclose(after[0, 2], base[0, 2], atol=1e-3)


def test_an_isolated_row_is_its_scenes_one_by_one():
    model = make_model(scale=4.0)
    images, mask, words = scene_inputs(model, 3)
    together = model(images, mask, words, torch.tensor([True])).logits[0]
    for scene in range(3):
        alone = model(images[:, scene : scene + 1], mask[:, :1], words[:, scene : scene + 1]).logits[0, 0]
        assert torch.allclose(together[scene], alone, atol=1e-5)
    context = model(images, mask, words).logits[0]
    assert torch.allclose(context[0], together[0], atol=1e-5) and not torch.allclose(context[1], together[1], atol=0.1)


def test_padding_and_missing_views_change_nothing():
    model = make_model(scale=4.0)
    images, mask, words = scene_inputs(model, 2)
    mask[0, 0, 1] = False
    base = model(images, mask, words).logits
    images[0, 0, 1] = 255  # a view that isn't there
    longer = torch.cat([words, torch.full((1, 2, 3), PAD)], dim=2)
    assert torch.allclose(model(images, mask, longer).logits[:, :, :7], base, atol=1e-5)


def test_decoding_with_cached_keys_equals_whole_forward_passes(predictor, samples):
    model = predictor.model
    given = examples_for(samples)
    for sample, chosen, prediction in zip(samples, given, predictor.predict(samples, given), strict=True):
        images, mask, words = predictor._inputs([sample], [chosen])
        written: list[int] = []
        for place in range(3 * model.config.max_triplets + 1):
            query = torch.tensor([[START, *written]])
            length = max(words.shape[2], query.shape[1])
            padded = torch.nn.functional.pad(words, (0, length - words.shape[2]), value=PAD)
            padded[0, -1, : query.shape[1]] = query
            logits = model(images, mask, padded).logits[0, -1, place]
            allowed = predictor._allowed_words(logits.device)[place % 3]
            written.append(int(logits.masked_fill(~allowed, -math.inf).argmax()))
            if written[-1] == END:
                break
        # The last word is the end, or the one that had no room.
        triplets, _, _ = model.read_words(written[:-1])
        assert prediction.graph == SceneGraph(triplets)
        assert prediction.truncated == (written[-1] != END)


def test_initial_loss_is_that_of_a_uniform_guess():
    model = make_model(image_size=64, hidden_size=96, num_layers=3)
    images, mask, words = scene_inputs(model, 2)
    images = torch.nn.functional.interpolate(images[0].flatten(0, 1).permute(0, 3, 1, 2).float(), size=64)
    images = images.to(torch.uint8).permute(0, 2, 3, 1).unflatten(0, (1, 2, 2))
    logits = model(images, mask, words).logits[:, :, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 2), words[:, :, 1:].flatten())
    assert abs(loss.item() - math.log(model.num_words)) < 0.5


# --- copying from examples ---------------------------------------------------------------------------------------


def test_copied_words_share_what_the_sentinel_leaves():
    attention = CopyAttention(2)
    with torch.no_grad():
        attention.to_query.weight.copy_(torch.eye(2))
        attention.to_key.weight.copy_(torch.eye(2))
        attention.sentinel.weight.zero_()
        attention.sentinel.bias.fill_(0.0)
    # Scores of the query (1, 0) * sqrt(2): sentinel 0, then 2, 0 and -2 for what was shown.
    scale = math.sqrt(2)
    states = torch.tensor([[[2.0 * scale, 0.0], [0.0, 2.0 * scale], [-2.0 * scale, 0.0]]])
    query, logits = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 0.0, math.log(2.0)]]])
    mask = torch.tensor([[[True, True, True]]])
    shown = ShownWords(states, torch.tensor([[0, 1, 0]]), mask)
    weights = np.exp([0.0, 2.0, 0.0, -2.0])
    weights /= weights.sum()
    expected = weights[0] * np.array([0.25, 0.25, 0.5]) + np.array([weights[1] + weights[3], weights[2], 0.0])
    assert np.allclose(attention(logits, query, shown).exp().detach(), expected, atol=1e-6)
    shown.mask = torch.zeros_like(mask)
    assert np.allclose(attention(logits, query, shown).exp().detach(), [0.25, 0.25, 0.5], atol=1e-6)


def test_only_words_of_earlier_scenes_are_copied():
    model = make_model(scale=4.0)
    images, mask, words = scene_inputs(model, 3)
    words[0, 1, 5:] = PAD
    own = model(images, mask, words).logits.exp()
    with torch.no_grad():  # nothing but copying, wherever there is something to copy
        model.copy_attention.sentinel.bias.fill_(-100.0)
    copied = model(images, mask, words).logits.exp()
    assert torch.allclose(copied[0, 0], own[0, 0], atol=1e-6)
    for scene, shown in ((1, words[0, 0, 1:]), (2, torch.cat([words[0, 0, 1:], words[0, 1, 1:5]]))):
        elsewhere = torch.ones(model.num_words, dtype=torch.bool)
        elsewhere[shown] = False
        assert copied[0, scene][:, elsewhere].max() < 1e-6 < own[0, scene][:, elsewhere].min()
        assert torch.allclose(copied[0, scene].sum(dim=1), torch.ones(7), atol=1e-5)


# --- words -------------------------------------------------------------------------------------------------------


def test_words_and_triplets_are_inverse(make_graph, rng):
    model = make_model(max_triplets=10)
    for _ in range(20):
        graph = make_graph(rng)
        triplets, places, malformed = model.read_words(model.triplet_words(model.sorted_triplets(graph)))
        assert SceneGraph(triplets) == graph and malformed == 0
        assert places == [3 * index + 2 for index in range(len(graph))]


def test_broken_word_sequences_are_read_as_far_as_they_make_sense():
    model = make_model()
    good = model.triplet_words([Triplet("patient", "lyingOn", "operating table")])
    entity, predicate = good[0], good[2]
    triplets, places, malformed = model.read_words([predicate, *good, entity, predicate, START, *good, entity])
    assert [triplet.predicate for triplet in triplets] == ["lyingOn"] * 2
    assert places == [3, 9] and malformed == 4  # alone, one entity, the mark, and what the end cuts off


def test_words_reject_unknown_names_and_graphs_that_are_too_large(make_graph, rng):
    with pytest.raises(SceneGraphError, match="at most 6"):
        make_model().triplet_words(make_graph(rng, num_triplets=7).sorted())
    with pytest.raises(SceneGraphError, match="wasn't made for"):
        make_model().triplet_words([Triplet("robot", "drilling", "patient")])


# --- the predictor -----------------------------------------------------------------------------------------------


def test_a_batch_gives_what_single_frames_give(predictor, samples):
    given = examples_for(samples)
    together = predictor.predict(samples, given)
    assert len({prediction.text for prediction in together}) > 1
    for sample, chosen, prediction in zip(samples, given, together, strict=True):
        (alone,) = predictor.predict([sample], [chosen])
        assert alone.text == prediction.text and alone.num_examples == len(chosen)
        assert np.allclose(
            alone.token_stats.predicate_probs, prediction.token_stats.predicate_probs, atol=1e-5
        ) and np.allclose(alone.token_stats.chosen_logprobs, prediction.token_stats.chosen_logprobs, atol=1e-4)


def test_no_examples_and_empty_lists_of_examples_are_the_same(predictor, samples):
    plain, empty = predictor.predict(samples), predictor.predict(samples, [[] for _ in samples])
    assert [a.text for a in plain] == [b.text for b in empty]
    assert all(np.array_equal(a.token_stats.predicate_probs, b.token_stats.predicate_probs)
               for a, b in zip(plain, empty))  # fmt: skip


def test_examples_change_the_answer_and_their_order_is_that_of_the_score(predictor, samples):
    first, second = (Example(samples[i], samples[i].graph, score) for i, score in ((3, 0.2), (4, 0.8)))
    query = samples[:1]
    forward, backward, swapped = (
        predictor.predict(query, [given])[0].token_stats.predicate_probs
        for given in (
            [first, second],
            [second, first],
            [dataclasses.replace(first, score=0.8), dataclasses.replace(second, score=0.2)],
        )
    )
    assert np.array_equal(forward, backward)
    assert forward.shape != swapped.shape or not np.allclose(forward, swapped, atol=1e-3)


def test_too_many_examples_are_dropped_from_the_least_similar_end_with_a_warning(predictor, samples):
    given = [Example(sample, sample.graph, score) for sample, score in zip(samples[1:4], (0.9, 0.1, 0.5))]
    with pytest.warns(UserWarning, match="3 examples were given, and this model reads at most 2"):
        (dropped,) = predictor.predict(samples[:1], [given])
    (kept,) = predictor.predict(samples[:1], [[given[0], given[2]]])
    assert dropped.num_examples == 2 and np.array_equal(
        dropped.token_stats.predicate_probs, kept.token_stats.predicate_probs
    )


def test_constrained_answers_are_always_graphs_and_free_ones_are_parsed(samples):
    model = make_model(seed=4, scale=6.0)
    for prediction in TinyPredictor(model, VOCABULARY).predict(samples):
        parsed = parse_triplet_text(prediction.text, VOCABULARY)
        assert parsed.graph == prediction.graph and not parsed.malformed and prediction.malformed == 0
        assert prediction.token_stats.predicate_probs.shape[1] == 14
    free = TinyPredictor(model, VOCABULARY, constrained=False).predict(samples)
    assert sum(prediction.malformed for prediction in free) > 0


def test_an_answer_without_an_end_is_truncated_and_full(samples):
    model = make_model()
    with torch.no_grad():
        model.norm_out.weight.zero_()
        model.norm_out.bias.copy_(-10 * model.token_embedding.weight[END])
    (prediction,) = TinyPredictor(model, VOCABULARY).predict(samples[:1])
    assert prediction.truncated and len(prediction.token_stats.predicate_probs) == 6
    with torch.no_grad():
        model.norm_out.bias.copy_(100 * model.token_embedding.weight[END])
    (prediction,) = TinyPredictor(model, VOCABULARY).predict(samples[:1])
    assert not prediction.truncated and len(prediction.graph) == 0
    assert prediction.token_stats.predicate_probs.shape == (0, 14)


def test_a_saved_predictor_gives_the_same_answers_and_knows_its_synonyms(predictor, samples, tmp_path):
    predictor.save_pretrained(tmp_path / "model")
    loaded = load_predictor(tmp_path / "model", device="cpu")
    assert isinstance(loaded, TinyPredictor) and loaded.vocabulary == VOCABULARY
    assert [p.text for p in loaded.predict(samples)] == [p.text for p in predictor.predict(samples)]
    with pytest.raises(SceneGraphError, match="holds no predictor"):
        load_predictor(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name"')
    with pytest.raises(SceneGraphError, match=r"config\.json is damaged"):
        load_predictor(tmp_path)


def test_wrong_use_is_named(predictor, samples):
    with pytest.raises(SceneGraphError, match="5 samples and 1 lists"):
        predictor.predict(samples, [[]])
    with pytest.raises(SceneGraphError, match="the same, in the same order"):
        TinyPredictor(make_model(), Vocabulary.mmor())
    with pytest.raises(SceneGraphError, match="multiple of 16"):
        make_model(image_size=40)
    strange = Example(samples[1], SceneGraph([Triplet("robot", "drilling", "patient")]), 1.0)
    with pytest.raises(SceneGraphError, match=f"sample {samples[0].id}: an example"):
        predictor.predict(samples[:1], [[strange]])


def test_views_are_ordered_with_the_primary_one_first_and_resized(make_sample, rng):
    sample = make_sample(rng, num_views=3, size=(48, 64), primary=1)
    flat = [np.full((48, 64, 3), 50 * index, np.uint8) for index in range(3)]
    images, mask = load_views(dataclasses.replace(sample, views=tuple(flat)), 32, 2)
    assert images.shape == (2, 32, 32, 3) and mask.tolist() == [True, True]
    assert (images[0] == 50).all() and (images[1] == 0).all()
    images, mask = load_views(dataclasses.replace(sample, views=tuple(flat)), 32, 5)
    assert mask.tolist() == [True, True, True, False, False] and (images[2] == 100).all()


def test_a_damaged_picture_is_named(predictor, samples, tmp_path):
    path = tmp_path / "broken.jpg"
    path.write_bytes(b"\xff\xd8\xff\xe0 no picture")
    broken = dataclasses.replace(samples[0], views=(path,))
    with pytest.raises(SceneDataError, match="broken.jpg"):
        predictor.predict([broken])


def test_embeddings_are_unit_vectors_of_the_pictures_alone(predictor, samples):
    embedded = predictor.embed(samples, batch_size=2)
    assert embedded.shape == (5, 32) and np.allclose(np.linalg.norm(embedded, axis=1), 1, atol=1e-5)
    relabeled = [dataclasses.replace(sample, graph=None) for sample in samples]
    assert np.allclose(predictor.embed(relabeled), embedded, atol=1e-5)
    assert np.abs(embedded[0] - embedded[1]).max() > 1e-3


# --- statistics --------------------------------------------------------------------------------------------------


def test_statistics_of_certain_and_of_uniform_predicates():
    certain = TokenStats(np.eye(14, dtype=np.float32)[[3, 5]], np.zeros(2, np.float32)).confidence()
    assert certain == {"mean_entropy": 0, "max_entropy": 0, "min_logprob": 0, "mean_logprob": 0, "min_margin": 1}
    probs = np.stack([np.full(14, 1 / 14), np.eye(14)[2]]).astype(np.float32)
    mixed = TokenStats(probs, np.log(np.array([1 / 14, 1], np.float32))).confidence()
    assert tuple(mixed) == CONFIDENCE_FEATURES
    assert mixed["max_entropy"] == pytest.approx(math.log(14), abs=1e-5)
    assert mixed["mean_entropy"] == pytest.approx(math.log(14) / 2, abs=1e-5)
    assert mixed["min_logprob"] == pytest.approx(-math.log(14), abs=1e-5) and mixed["min_margin"] == 0


def test_tail_mass_is_the_probability_of_rare_predicates(rng):
    probs = rng.dirichlet(np.ones(14), size=5).astype(np.float32)
    features = token_features(probs, VOCABULARY, TAIL)
    columns = [VOCABULARY.predicates.index(name) for name in ("drilling", "sawing")]
    by_hand = [sum(float(row[column]) for column in columns) for row in probs]
    assert tuple(features) == TAIL_MASS_FEATURES
    assert features["max_tail_mass"] == pytest.approx(max(by_hand))
    assert features["mean_tail_mass"] == pytest.approx(sum(by_hand) / 5)
    everything = TailSplit((), VOCABULARY.predicates, {}, 0.1, "train")
    assert token_features(probs, VOCABULARY, everything)["max_tail_mass"] <= 1 + 1e-5
    assert set(token_features(np.zeros((0, 14)), VOCABULARY, TAIL).values()) == {0.0}


def test_statistics_of_another_vocabulary_are_refused():
    with pytest.raises(SceneGraphError, match="a column for each predicate"):
        token_features(np.zeros((2, 16)), VOCABULARY, TAIL)
    with pytest.raises(SceneGraphError, match="allowed"):
        TokenStats(np.zeros((2, 14)), np.zeros(3))
