from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from scene_graph.methods import (
    AugmentConfig,
    ContextConfig,
    ExampleSampler,
    TinySGGBatches,
    TinySGGMethod,
    answer_weights,
    augment,
)
from scene_graph.predictors import Example, TinyPredictor, TinySGGModel, load_predictor
from scene_graph.predictors.tiny import END, PAD, START
from scene_graph.schema import Sample, SceneGraph, SceneGraphError, Triplet, Vocabulary, idf_weights, triplet_iou
from vidgen.train import OptimizerConfig, TrainConfig, fit

# A world in which the color of a square is the action of the surgeon.
COLORS = {"cutting": (220, 40, 40), "drilling": (40, 200, 60), "sawing": (50, 60, 220), "holding": (220, 210, 40)}
VOCABULARY = Vocabulary(("surgeon", "patient"), tuple(COLORS))


def color_samples(count: int, seed: int, takes: int = 6) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        action = VOCABULARY.predicates[rng.integers(4)]
        image = rng.integers(90, 140, (32, 32, 3)).astype(np.uint8)
        top, left = rng.integers(0, 16, 2)
        image[top : top + 16, left : left + 16] = COLORS[action]
        samples.append(
            Sample(
                id=f"frame{index}",
                take=f"take{index % takes}",
                frame=index,
                seconds=float(index),
                views=(image,),
                view_names=("room",),
                graph=SceneGraph([Triplet("surgeon", action, "patient")]),
            )
        )
    return samples


def color_model(seed: int = 0) -> TinySGGModel:
    torch.manual_seed(seed)
    return TinySGGModel(
        VOCABULARY.entities, VOCABULARY.predicates, image_size=32, num_views=1, max_triplets=2, hidden_size=64
    )


@pytest.fixture
def graphs_of_takes(make_graph, make_sample):
    rng = np.random.default_rng(5)
    # Graphs from few triplets, so that many overlap.
    words = Vocabulary(("head surgeon", "patient", "instrument"), ("closeTo", "holding", "drilling"))
    return [
        make_sample(rng, make_graph(rng, words, int(rng.integers(0, 4))), take=f"t{index // 10}", frame=index)
        for index in range(60)
    ]


# --- choosing examples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_similarity_of_all_pairs_is_that_of_each_pair(graphs_of_takes, weighted):
    graphs = [sample.graph for sample in graphs_of_takes]
    weights = idf_weights(graphs, Vocabulary.or4d()) if weighted else None
    table = ExampleSampler(graphs_of_takes, ContextConfig(), weights, 0).iou(range(60))
    by_pair = [[triplet_iou(a, b, weights) for b in graphs] for a in graphs]
    assert np.allclose(table, by_pair, atol=1e-5)


def test_the_nearest_are_the_most_similar_of_other_takes(graphs_of_takes):
    sampler = ExampleSampler(graphs_of_takes, ContextConfig(nearest=7), None, 0)
    for query, near in enumerate(sampler.nearest):
        assert len(set(near)) == 7
        assert all(graphs_of_takes[index].take != graphs_of_takes[query].take for index in near)
        others = [s for s in graphs_of_takes if s.take != graphs_of_takes[query].take]
        best = sorted((triplet_iou(graphs_of_takes[query].graph, s.graph) for s in others), reverse=True)[:7]
        got = sorted((triplet_iou(graphs_of_takes[query].graph, graphs_of_takes[i].graph) for i in near), reverse=True)
        assert np.allclose(got, best)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_examples_come_from_other_takes_each_its_own_in_order_as_often_as_asked(graphs_of_takes, share):
    sampler, rng = (
        ExampleSampler(graphs_of_takes, ContextConfig(ordered_share=share), None, 0),
        np.random.default_rng(0),
    )
    near, ascending, different = 0, 0, 0
    for query in range(60):
        for _ in range(10):
            chosen = sampler.draw(query, 3, rng)
            takes = [graphs_of_takes[index].take for index in (query, *chosen)]
            assert len(chosen) == 3 and len(set(takes)) == 4
            first, _, last = sampler.iou([query], chosen)[0]
            if first != last:
                ascending, different = ascending + (first < last), different + 1
            near += sum(index in sampler.nearest[query] for index in chosen)
    assert ascending / different == pytest.approx(share + (1 - share) / 2, abs=0.08 * (share < 1))
    assert near / 1800 > 0.5  # 60 % by choice, and some by chance, less where their takes were used up
    assert len(sampler.draw(0, 99, rng)) == 5  # one of each other take


def test_samples_that_cannot_give_examples_are_named(graphs_of_takes):
    with pytest.raises(SceneGraphError, match="come from other takes"):
        ExampleSampler(graphs_of_takes[:10], ContextConfig(), None, 0)
    blind = dataclasses.replace(graphs_of_takes[0], graph=None)
    with pytest.raises(SceneGraphError, match=f"{blind.id} has no labels"):
        ExampleSampler([blind, *graphs_of_takes[1:]], ContextConfig(), None, 0)
    with pytest.raises(SceneGraphError, match="2 takes"):
        TinySGGBatches(color_samples(20, 0, takes=2), VOCABULARY, color_model())


# --- batches -----------------------------------------------------------------------------------------------------


def make_batches(**changes) -> TinySGGBatches:
    config = ContextConfig(**changes)
    return TinySGGBatches(color_samples(60, 0), VOCABULARY, color_model(), config, shuffled=VOCABULARY.predicates)


def test_a_batch_depends_on_its_number_alone():
    batches = TinySGGBatches(color_samples(60, 0), VOCABULARY, color_model(), augmentation=AugmentConfig())
    first = batches.batch(3, 0, 1, 8)
    batches.batch(4, 0, 1, 8)
    again = batches.batch(3, 0, 1, 8)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for other in (batches.batch(4, 0, 1, 8), batches.batch(3, 1, 2, 8)):
        assert not torch.equal(first["images"], other["images"])


@pytest.mark.parametrize(("share", "swapped"), [(0.5, 0.3), (0.5, 0.0), (0.8, 0.5), (1.0, 0.3), (0.35, 0.2)])
def test_the_share_of_answers_without_examples_is_as_asked(share, swapped):
    batches = make_batches(zero_shot_share=share, symbol_shuffle=swapped)
    without = answers = 0
    for step in range(60):
        batch = batches.batch(step, 0, 1, 16)
        trained = batch["supervised"].any(dim=2)
        first = batch["isolated"][:, None] | (torch.arange(3) == 0)
        # A later scene whose names nothing shows is still trained on its other words.
        without, answers = without + int((trained & first).sum()), answers + int(trained.sum())
    assert without / answers == pytest.approx(share, abs=3 * (0.25 / 960) ** 0.5)


def test_a_share_that_sequences_cannot_have_is_refused():
    with pytest.raises(SceneGraphError, match="at least 0.333"):
        make_batches(zero_shot_share=0.2, symbol_shuffle=0.0)


def test_without_swapped_names_rows_are_the_samples_graphs_and_every_word_is_trained():
    samples = color_samples(60, 0)
    batches = TinySGGBatches(samples, VOCABULARY, color_model())
    batch = batches.batch(0, 0, 1, 16)
    model = color_model()
    for row in range(16):
        takes = []
        for scene in range(3):
            words = batch["words"][row, scene].tolist()
            end = words.index(END)
            assert words[0] == START and set(words[end + 1 :]) <= {PAD}
            assert batch["supervised"][row, scene].tolist() == [False] + [True] * end + [False] * (
                len(words) - end - 1
            )
            (sample,) = [s for s in samples if np.array_equal(s.image(), batch["images"][row, scene, 0].numpy())]
            assert SceneGraph(model.read_words(words[1:end])[0]) == sample.graph
            takes.append(sample.take)
        assert batch["isolated"][row] or len(set(takes)) == 3


def test_swapped_names_are_one_bijection_per_row_and_only_shown_names_are_trained():
    samples = color_samples(60, 0)
    batches = make_batches(symbol_shuffle=1.0, zero_shot_share=0.4)
    model, swapped_rows, trained, hidden = color_model(), 0, 0, 0
    for step in range(10):
        batch = batches.batch(step, 0, 1, 16)
        for row in torch.nonzero(~batch["isolated"])[:, 0].tolist():
            names, shown = {}, set()
            for scene in range(3):
                (sample,) = [s for s in samples if np.array_equal(s.image(), batch["images"][row, scene, 0].numpy())]
                words = batch["words"][row, scene].tolist()
                (written,) = model.read_words(words[1 : words.index(END)])[0]
                (truth,) = sample.graph
                assert names.setdefault(truth.predicate, written.predicate) == written.predicate
                is_trained = batch["supervised"][row, scene, 3].item()  # <sg> subject object predicate
                assert is_trained == (scene > 0 and truth.predicate in shown)
                assert batch["supervised"][row, scene, 1].item() == (scene > 0)
                trained, hidden = trained + is_trained, hidden + (scene > 0 and not is_trained)
                shown.add(truth.predicate)
            assert len(set(names.values())) == len(names)
            swapped_rows += any(a != b for a, b in names.items())
    assert swapped_rows > 50 and trained > 50 and hidden > 10


def test_names_outside_the_shuffled_ones_keep_their_meaning():
    batches = TinySGGBatches(
        color_samples(60, 0),
        VOCABULARY,
        color_model(),
        ContextConfig(symbol_shuffle=1.0),
        shuffled=("cutting", "drilling"),
    )
    words = batches.words[0].copy()
    holding = batches.shuffled.max() + 2
    words[3] = holding
    for seed in range(5):
        renamed, _ = batches._swap_names([words], [words > 2], np.random.default_rng(seed))
        assert renamed[0].tolist() == words.tolist()


def test_wrong_batches_are_refused(make_sample, rng):
    with pytest.raises(SceneGraphError, match="'sewing' is no predicate"):
        TinySGGBatches(color_samples(9, 0), VOCABULARY, color_model(), shuffled=("sewing",))
    large = dataclasses.replace(
        color_samples(9, 0)[0],
        graph=SceneGraph([Triplet("surgeon", name, "patient") for name in VOCABULARY.predicates]),
    )
    with pytest.raises(SceneGraphError, match="frame0: a graph has 4 triplets"):
        TinySGGBatches([large, *color_samples(9, 0)[1:]], VOCABULARY, color_model())
    for wrong in ({"zero_shot_share": 1.1}, {"nearest": 0}):
        with pytest.raises(SceneGraphError, match="must be"):
            ContextConfig(**wrong)
    with pytest.raises(SceneGraphError, match="gain"):
        AugmentConfig(gain=2)


def test_augmentation_is_one_light_per_sequence_and_a_shift_per_picture():
    flat = np.full((20, 3, 2, 16, 16, 3), 100, np.uint8)
    config = AugmentConfig(gain=0.3, cast=0.1, shift=0.2, drop_views=0)
    changed = augment(flat, config, np.random.default_rng(0))
    values = changed.reshape(20, -1, 3)
    assert (values == values[:, :1]).all()  # a flat picture shows the light alone
    assert values[:, 0].std(axis=0).min() > 5 and values[:, 0].std(axis=1).max() > 1
    assert values.min() >= 60 and values.max() <= 145
    ramp = np.broadcast_to(np.arange(16, dtype=np.uint8)[:, None], (20, 3, 2, 16, 16))[..., None].repeat(3, -1)
    moved = augment(ramp, AugmentConfig(0, 0, 0.2, 0), np.random.default_rng(0))
    middle = moved[..., 8, 8, 0].astype(int) - 8
    assert set(np.unique(middle)) == set(range(-3, 4)) and (middle.std(axis=(1, 2)) > 0).any()
    still = augment(ramp, AugmentConfig(0, 0, 0, 0), np.random.default_rng(0))
    assert np.array_equal(still, ramp)


def test_dropped_views_are_never_the_primary_one(make_sample, make_graph):
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, make_graph(rng, VOCABULARY, 1), take=f"t{i}", size=(32, 32)) for i in range(8)]
    torch.manual_seed(0)
    model = TinySGGModel(VOCABULARY.entities, VOCABULARY.predicates, image_size=32, hidden_size=32)
    batches = TinySGGBatches(samples, VOCABULARY, model, augmentation=AugmentConfig(drop_views=0.3))
    mask = torch.cat([batches.batch(step, 0, 1, 16)["view_mask"] for step in range(10)])
    assert mask[..., 0].all() and abs(mask[..., 1].float().mean() - 0.7) < 0.1


# --- losses ------------------------------------------------------------------------------------------------------


def test_weights_are_inverse_frequencies_with_a_mean_of_one():
    counts = torch.tensor([0, 4, 1, 0, 5])
    weights = answer_weights(counts)
    assert weights[1] / weights[4] == pytest.approx(5 / 4) and weights[2] / weights[1] == pytest.approx(4)
    assert weights[0] == pytest.approx(float(weights[4]) / 100)
    assert float((weights * counts).sum() / counts.sum()) == pytest.approx(1)
    with pytest.raises(SceneGraphError, match="no training answer"):
        answer_weights(torch.zeros(3))


def test_word_counts_are_those_of_the_graphs():
    samples, model = color_samples(60, 0), color_model()
    counts = TinySGGBatches(samples, VOCABULARY, model).word_counts()
    by_hand = Counter(triplet.predicate for sample in samples for triplet in sample.graph)
    assert [int(counts[model.first_predicate + i]) for i in range(4)] == [by_hand[n] for n in VOCABULARY.predicates]
    assert int(counts[END]) == 60 and int(counts[START]) == int(counts[PAD]) == 0


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_the_weighted_mean_over_trained_words(weighted):
    model = color_model().eval()
    batches = TinySGGBatches(
        color_samples(60, 0), VOCABULARY, model, ContextConfig(symbol_shuffle=0.6), shuffled=VOCABULARY.predicates
    )
    weights = answer_weights(batches.word_counts()) if weighted else None
    batch = batches.batch(0, 0, 1, 8)
    with torch.no_grad():
        output = TinySGGMethod(model, VOCABULARY, weights).training_step(batch, 0, torch.Generator())
        logprobs = model(
            batch["images"], batch["view_mask"], batch["words"], batch["isolated"]
        ).logits.log_softmax(dim=-1)  # fmt: skip
    total = norm = 0.0
    plain = {True: [], False: []}
    for row, scene, place in torch.nonzero(batch["supervised"]).tolist():
        word = int(batch["words"][row, scene, place])
        loss = -float(logprobs[row, scene, place - 1, word])
        weight = float(weights[word]) if weighted else 1.0
        total, norm = total + weight * loss, norm + weight
        plain[bool(batch["isolated"][row]) or scene == 0].append(loss)
    assert float(output.losses["predictor"]) == pytest.approx(total / norm, rel=1e-4)
    assert float(output.metrics["zero_shot_loss"]) == pytest.approx(np.mean(plain[True]), rel=1e-4)
    assert float(output.metrics["in_context_loss"]) == pytest.approx(np.mean(plain[False]), rel=1e-4)


def test_a_model_without_examples_and_a_joint_one_train_on_batches_of_one_size():
    samples = color_samples(60, 0)
    alone, joint = (
        TinySGGBatches(samples, VOCABULARY, color_model(), ContextConfig(zero_shot_share=share)).batch(0, 0, 1, 8)
        for share in (1.0, 0.5)
    )
    assert alone["isolated"].all() and not joint["isolated"].all()
    assert {name: value.shape for name, value in alone.items()} == {name: v.shape for name, v in joint.items()}
    # One take is enough where there are no examples.
    TinySGGBatches(color_samples(9, 0, takes=1), VOCABULARY, color_model(), ContextConfig(zero_shot_share=1.0))


# --- training ----------------------------------------------------------------------------------------------------


def train_config(folder, steps: int, **changes) -> TrainConfig:
    optimizer = OptimizerConfig(lr=2e-3, warmup_steps=20, schedule="cosine")
    return TrainConfig(str(folder), steps, {"predictor": optimizer}, batch_size=16, checkpoint_every=1000, **changes)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    def weights(folder, *steps):
        for last in steps:
            model = color_model()
            batches = TinySGGBatches(color_samples(60, 0), VOCABULARY, model, augmentation=AugmentConfig())
            config = TrainConfig(
                str(folder), last, {"predictor": OptimizerConfig(lr=1e-3)}, batch_size=4, checkpoint_every=2
            )
            fit(TinySGGMethod(model, VOCABULARY), batches, config)
        return model.state_dict()

    straight, resumed = weights(tmp_path / "a", 4), weights(tmp_path / "b", 2, 4)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model trained with swapped names in most prompts, loaded from what the run wrote."""
    folder, model = tmp_path_factory.mktemp("run"), color_model()
    config = ContextConfig(zero_shot_share=0.4, nearest_share=0.3, nearest=40, symbol_shuffle=0.9)
    batches = TinySGGBatches(color_samples(200, 0), VOCABULARY, model, config, shuffled=VOCABULARY.predicates)
    held_out = TinySGGBatches(color_samples(60, 7), VOCABULARY, model, config, shuffled=VOCABULARY.predicates)
    method = TinySGGMethod(model, VOCABULARY, validation=[held_out.batch(0, 0, 1, 32)])
    result = fit(method, batches, train_config(folder, 500, validate_every=250, log_every=50))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return load_predictor(result.weights_dir / "predictor", device="cpu"), rows


def examples_with(samples, rename, change=lambda sample: sample) -> list[list[Example]]:
    """For each sample, in random order, an example of another action and one of its own, under other names."""
    pool = color_samples(200, 0)
    rng = np.random.default_rng(5)
    given = []
    for sample in samples:
        (truth,) = sample.graph.predicates
        other = VOCABULARY.predicates[(VOCABULARY.predicates.index(truth) + 1) % 4]
        chosen = []
        for score, name in zip(rng.permutation(2), (other, truth)):
            fitting = [one for one in pool if one.graph.predicates == (name,)]
            example = fitting[rng.integers(len(fitting))]
            chosen.append(Example(change(example), rename(example.graph), float(score)))
        given.append(chosen)
    return given


def rename(graph: SceneGraph) -> SceneGraph:
    names = dict(zip(VOCABULARY.predicates, VOCABULARY.predicates[1:] + VOCABULARY.predicates[:1]))
    return SceneGraph([dataclasses.replace(triplet, predicate=names[triplet.predicate]) for triplet in graph])


def share_right(predictor: TinyPredictor, samples, given=None, truth=lambda graph: graph) -> float:
    answers = predictor.predict(samples, given)
    return float(np.mean([answer.graph == truth(sample.graph) for answer, sample in zip(answers, samples)]))


@pytest.mark.slow
def test_one_set_of_weights_answers_with_and_without_examples(trained):
    predictor, rows = trained
    samples = color_samples(60, 1)
    assert share_right(predictor, samples) > 0.9
    assert share_right(predictor, samples, examples_with(samples, lambda graph: graph)) > 0.9
    losses = [row["validation"] for row in rows if "validation" in row]
    assert losses[-1]["in_context_loss"] < losses[0]["in_context_loss"] or losses[0]["in_context_loss"] < 0.1


@pytest.mark.slow
def test_names_are_read_from_the_examples(trained):
    predictor, _ = trained
    samples = color_samples(60, 1)
    permuted = share_right(predictor, samples, examples_with(samples, rename), rename)
    assert permuted >= 0.6
    noise = np.random.default_rng(1).integers(0, 256, (32, 32, 3)).astype(np.uint8)
    blind = examples_with(samples, rename, lambda sample: dataclasses.replace(sample, views=(noise,)))
    # Without pictures in the examples nobody can know which of the two names belongs to the query's color.
    assert share_right(predictor, samples, blind, rename) < permuted - 0.3
    assert stats.binomtest(round(60 * permuted), 60, 0.25).pvalue < 1e-6
