"""Rerankers: losses and batches against naive ones, yes/no scores, training, selection of examples."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from scene_graph.methods import AugmentConfig
from scene_graph.predictors.hf import add_lora
from scene_graph.reranker import (
    MLLMReranker,
    MLLMRerankerBatches,
    MLLMRerankerMethod,
    OracleReranker,
    PairSampler,
    RerankerConfig,
    RerankerPrompt,
    TinyReranker,
    TinyRerankerBatches,
    TinyRerankerMethod,
    evaluate_reranker,
    load_reranker,
    reranker_loss,
    select_examples,
)
from scene_graph.retrieval import Candidate
from scene_graph.schema import SceneGraph, SceneGraphError, TailSplit, Triplet, Vocabulary, triplet_iou
from vidgen.train import OptimizerConfig, TrainConfig, fit

VOCABULARY = Vocabulary.or4d()
RARE = ("cementing", "cleaning", "cutting", "drilling", "hammering", "sawing", "suturing")
SPLIT = TailSplit(("holding", "closeTo", "lyingOn"), RARE, {}, 0.1, "train")
WEIGHTS = {name: 4.0 if name in RARE else 0.5 for name in VOCABULARY.predicates}
LYING = Triplet("patient", "lyingOn", "operating table")


def action(name, with_patient=True):
    triplets = [Triplet("head surgeon", name, "patient"), Triplet("head surgeon", "holding", "instrument")]
    return SceneGraph([*triplets, LYING] if with_patient else triplets)


def as_candidates(samples):
    return [Candidate(sample, sample.graph, 0.0) for sample in samples]


# --- selection ---------------------------------------------------------------------------------------------------


def test_best_scores_are_chosen_and_the_best_comes_last(make_sample, rng):
    pool = as_candidates([make_sample(rng, frame=frame) for frame in range(6)])
    chosen = select_examples(pool, [0.1, 0.9, 0.3, 0.8, 0.2, 0.9], k=3)
    assert [example.sample.frame for example in chosen] == [3, 5, 1]  # of the two best, the first of the pool is last
    assert [example.score for example in chosen] == [0.8, 0.9, 0.9]
    assert chosen[0].graph == pool[3].graph
    assert [e.sample.frame for e in select_examples(pool, [0.1, 0.9, 0.3, 0.8, 0.2, 0.9], 3, 0.0, 0.85)] == [5, 1]
    assert select_examples(pool, np.zeros(6), 3, min_score=0.5) == []
    assert select_examples([], [], 3) == []
    for scores in ([0.1] * 5, [math.nan] * 6):
        with pytest.raises(SceneGraphError, match="for 6 candidates"):
            select_examples(pool, scores)


def test_likeness_is_weighed_against_score(make_sample, rng):
    drill, saw = action("drilling"), action("sawing")
    pool = as_candidates([make_sample(rng, graph, frame=f) for f, graph in enumerate((drill, drill, saw, saw))])
    scores = [0.9, 0.89, 0.8, 0.5]
    assert [e.sample.frame for e in select_examples(pool, scores, 2)] == [1, 0]
    # The second drilling loses 0.2 for being the same, sawing 0.2 * IoU for being somewhat alike.
    assert triplet_iou(drill, saw) == 0.5
    assert [e.sample.frame for e in select_examples(pool, scores, 2, 0.2)] == [2, 0]
    assert [e.sample.frame for e in select_examples(pool, [0.9, 0.89, 0.78, 0.5], 2, 0.2)] == [1, 0]
    # Weighted, both actions have little in common.
    assert [e.sample.frame for e in select_examples(pool, [0.9, 0.89, 0.75, 0.5], 2, 0.2, weights=WEIGHTS)] == [2, 0]


def test_oracle_finds_the_best_of_every_pool_exactly(make_sample, make_graph):
    rng = np.random.default_rng(5)
    queries = [make_sample(rng, make_graph(rng, num_triplets=4)) for _ in range(6)]
    pools = []
    for query in queries:
        known = list(query.graph)
        graphs = [SceneGraph([*known[: rng.integers(5)], *make_graph(rng, num_triplets=2)]) for _ in range(9)]
        pools.append(as_candidates([make_sample(rng, graph, frame=f) for f, graph in enumerate(graphs)]))
    best = [max(triplet_iou(q.graph, c.graph, WEIGHTS) for c in pool) for q, pool in zip(queries, pools)]
    result = evaluate_reranker(OracleReranker(WEIGHTS), queries, [None] * 6, pools, WEIGHTS)
    assert result["iou_at_1"] == result["best_iou"] == np.mean(best)
    assert result["ndcg_at_3"] == pytest.approx(1) and result["spearman"] == pytest.approx(1)
    with pytest.raises(SceneGraphError, match="has no labels"):
        OracleReranker().score(dataclasses.replace(queries[0], graph=None), None, pools[0])
    with pytest.raises(SceneGraphError, match="no candidates"):
        evaluate_reranker(OracleReranker(), queries[:1], [None], [[]])


def test_rank_correlation_is_that_of_scipy_ties_included(make_sample, make_graph):
    rng = np.random.default_rng(6)
    query = make_sample(rng, make_graph(rng, num_triplets=4))
    known = list(query.graph)
    pool = as_candidates([make_sample(rng, SceneGraph(known[: rng.integers(5)])) for _ in range(12)])
    scores = rng.integers(0, 4, 12).astype(float)

    class Fixed:
        def score(self, query, draft, candidates):
            return scores

    iou = [triplet_iou(query.graph, candidate.graph) for candidate in pool]
    result = evaluate_reranker(Fixed(), [query], [None], [pool])
    assert result["spearman"] == pytest.approx(spearmanr(iou, scores).statistic)
    assert result["iou_at_1"] == iou[int(np.argmax(scores))]


# --- losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bce", "listwise", "pairwise", "mse"])
def test_loss_equals_its_formula_term_by_term(name):
    rng = np.random.default_rng(0)
    z, u = rng.normal(size=(3, 5)), np.round(rng.random((3, 5)), 1)
    config = RerankerConfig(**{"bce": 0.0, "listwise": 0.0, name: 2.0}, tau=0.2)
    loss, parts = reranker_loss(torch.from_numpy(z), torch.from_numpy(u), config)

    terms = []
    for zs, us in zip(z, u):
        rho = [1 / (1 + math.exp(-value)) for value in zs]
        if name == "bce":
            terms += [-(a * math.log(p) + (1 - a) * math.log(1 - p)) for a, p in zip(us, rho)]
        elif name == "mse":
            terms += [(p - a) ** 2 for a, p in zip(us, rho)]
        elif name == "listwise":
            wanted = [math.exp(a / 0.2) for a in us]
            given = [math.exp(value) for value in zs]
            wanted, given = [w / sum(wanted) for w in wanted], [g / sum(given) for g in given]
            terms.append(sum(w * math.log(w / g) for w, g in zip(wanted, given)))
        else:
            us = np.float32(us)
            terms += [
                math.log(1 + math.exp(-(zs[i] - zs[j]))) for i in range(5) for j in range(5) if us[i] - us[j] > 0.1
            ]
    assert list(parts) == [name]
    assert float(loss) == pytest.approx(2 * np.mean(terms), rel=1e-5)


def test_losses_add_up_and_wrong_settings_are_named():
    z, u = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), torch.rand(2, 4)
    single = [float(reranker_loss(z, u, RerankerConfig(bce=a, listwise=b))[0]) for a, b in ((1.0, 0.0), (0.0, 0.5))]
    assert float(reranker_loss(z, u, RerankerConfig())[0]) == pytest.approx(sum(single), rel=1e-5)
    for wrong in ({"bce": 0.0, "listwise": 0.0}, {"tau": 0.0}, {"candidates": 3}, {"tail_share": 2.0}):
        with pytest.raises(SceneGraphError, match=next(iter(wrong))):
            RerankerConfig(**wrong)


def test_equal_iou_gives_the_pairwise_loss_nothing_to_order():
    loss, _ = reranker_loss(torch.randn(2, 4), torch.full((2, 4), 0.3), RerankerConfig(0.0, 0.0, pairwise=1.0))
    assert float(loss) == 0


# --- batches -----------------------------------------------------------------------------------------------------


@pytest.fixture
def scenes(make_sample):
    """Frames of 4 takes, 2 of each rare action and 16 without any in each."""
    rng, samples = np.random.default_rng(1), []
    for take in range(4):
        graphs = [action(name, bool(copy)) for name in RARE for copy in range(2)]
        graphs += [SceneGraph([LYING] if frame % 3 else []) for frame in range(16)]
        samples += [
            make_sample(rng, graph, f"{take + 1:03d}_4DOR", frame, size=(16, 16)) for frame, graph in enumerate(graphs)
        ]
    return samples


def test_batches_are_composed_as_they_say(scenes):
    sampler = PairSampler(scenes, SPLIT, RerankerConfig(), WEIGHTS, seed=0)
    rows = sampler.draw(200, np.random.default_rng(0))
    assert rows.shape == (200, 9)
    relevance = sampler.relevance(rows)
    is_tail = [SPLIT.is_tail(scenes[query].graph) for query in rows[:, 0]]
    # 14 of 30 frames are rare: 0.75 + 0.25 * 14 / 30
    assert np.mean(is_tail) == pytest.approx(0.867, abs=0.08)
    for (query, *candidates), row in zip(rows, relevance):
        assert scenes[query].take not in {scenes[candidate].take for candidate in candidates}
        expected = [triplet_iou(scenes[query].graph, scenes[candidate].graph, WEIGHTS) for candidate in candidates]
        np.testing.assert_allclose(row, expected, rtol=1e-5)
        others = [s for s in scenes if s.take != scenes[query].take]
        best = sorted((triplet_iou(scenes[query].graph, s.graph, WEIGHTS) for s in others), reverse=True)
        assert max(expected) >= best[11] - 1e-6, "no candidate is among the 12 most similar"
        actions = {name for candidate in candidates for name in scenes[candidate].graph.predicates if name in RARE}
        assert len(actions) >= 5
    # The positive isn't always at one place.
    assert len(set(relevance.argmax(axis=1))) == 8


def test_tail_predicates_that_other_takes_lack_are_replaced_by_random_frames(scenes):
    few = [
        sample for sample in scenes if not {"sawing", "suturing", "cutting", "cleaning"} & set(sample.graph.predicates)
    ]
    rows = PairSampler(few, SPLIT, RerankerConfig(), None, seed=0).draw(20, np.random.default_rng(0))
    assert rows.shape == (20, 9)
    without = [sample for sample in scenes if not SPLIT.is_tail(sample.graph)]
    with pytest.raises(SceneGraphError, match="none of the 64 samples has a rare predicate"):
        PairSampler(without, SPLIT, RerankerConfig(), None, seed=0)
    with pytest.raises(SceneGraphError, match="other takes"):
        PairSampler(scenes[:30], SPLIT, RerankerConfig(), None, seed=0)


def test_batch_is_a_function_of_step_and_rank_and_augments_a_query_like_its_candidates(scenes):
    model = TinyReranker(image_size=16, channels=16)
    gray = [
        dataclasses.replace(sample, views=tuple(np.full((16, 16, 3), 100, np.uint8) for _ in sample.views))
        for sample in scenes
    ]
    batches = TinyRerankerBatches(gray, model, SPLIT, augmentation=AugmentConfig(gain=0.4, cast=0.2), seed=3)
    batch = batches.batch(5, 0, 1, 6)
    assert batch["images"].shape == (6, 9, 16, 16, 3) and batch["images"].dtype == torch.uint8
    assert batch["relevance"].shape == (6, 8)
    again = batches.batch(5, 0, 1, 6)
    assert all(torch.equal(value, again[name]) for name, value in batch.items())
    assert not torch.equal(batches.batch(5, 1, 2, 6)["images"], batch["images"])
    colors = batch["images"].float().flatten(2, 3)
    assert float(colors.var(dim=(1, 2)).max()) == 0, "a query and its candidates are lit alike"
    assert float(colors[:, 0, 0].std(dim=0).min()) > 1, "different queries aren't"


# --- the tiny reranker -------------------------------------------------------------------------------------------


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    return TinyReranker(image_size=32, channels=32, hidden_size=32).eval()


def test_candidates_are_scored_one_by_one_and_where_something_is_does_not_matter(tiny, make_sample, rng):
    query, *others = [make_sample(rng, frame=frame, size=(32, 32)) for frame in range(6)]
    pool = as_candidates(others)
    scores = tiny.score(query, None, pool)
    assert scores.shape == (5,) and ((scores > 0) & (scores < 1)).all()
    for candidate, score in zip(pool, scores):
        assert tiny.score(query, query.graph, [candidate])[0] == pytest.approx(score, abs=1e-6)
    assert tiny.score(query, None, []).shape == (0,)
    # Symmetric but for nothing: both sides go through the same network.
    assert tiny.score(others[0], None, as_candidates([query]))[0] == pytest.approx(scores[0], abs=1e-6)
    tiny.train()
    tiny.score(query, None, pool)
    assert tiny.training
    with pytest.raises(SceneGraphError, match="image_size=20"):
        TinyReranker(image_size=20)


def test_grid_has_a_cell_for_eight_pixels(tiny):
    assert TinyReranker().stem(torch.zeros(1, 3, 64, 64)).shape == (1, 96, 8, 8)
    assert tiny.stem(torch.zeros(1, 3, 32, 32)).shape[-2:] == (4, 4)


TOOLS = {name: index for index, name in enumerate(RARE)}


def draw_tool(name, rng):
    """A bright figure of one of seven shapes, at any place, in any color, on a dark background."""
    image = rng.integers(0, 50, (32, 32, 3)).astype(np.float64)
    shapes = [
        lambda y, x: abs(y) < 2,
        lambda y, x: abs(x) < 2,
        lambda y, x: (abs(y) < 2) | (abs(x) < 2),
        lambda y, x: abs(y - x) < 2,
        lambda y, x: (y + x) % 4 < 2,
        lambda y, x: (abs(y) > 4) | (abs(x) > 4),
        lambda y, x: y % 4 < 2,
    ]
    y, x = np.mgrid[-6:7, -6:7]
    top, left = rng.integers(0, 20, 2)
    color = 255 * (0.4 + 0.6 * rng.random(3))
    image[top : top + 13, left : left + 13] += shapes[TOOLS[name]](y, x)[..., None] * color
    return np.clip(image, 0, 255).astype(np.uint8)


def tool_scenes(make_sample, takes, per_tool, seed):
    rng, samples = np.random.default_rng(seed), []
    for take in takes:
        for frame in range(per_tool * len(RARE)):
            name = RARE[frame % len(RARE)]
            sample = make_sample(rng, action(name, bool(rng.integers(2))), f"{take:03d}_4DOR", frame, num_views=1)
            samples.append(dataclasses.replace(sample, views=(draw_tool(name, rng),)))
    return samples


@pytest.mark.slow
def test_trained_scores_follow_iou_on_unseen_takes_and_untrained_ones_do_not(tmp_path, make_sample):
    train, held_out = tool_scenes(make_sample, (1, 2, 3, 4), 6, 0), tool_scenes(make_sample, (5, 6), 2, 1)
    queries, pool = held_out[:14], as_candidates(held_out[14:])
    torch.manual_seed(0)
    model = TinyReranker(image_size=32, channels=32, hidden_size=64)
    pools = [pool] * len(queries)
    before = evaluate_reranker(model, queries, [None] * len(queries), pools, WEIGHTS)
    assert abs(before["spearman"]) < 0.3

    batches = TinyRerankerBatches(train, model, SPLIT, augmentation=AugmentConfig(), weights=WEIGHTS, seed=0)
    method = TinyRerankerMethod(model, validation=list(zip(queries, pools)), weights=WEIGHTS)
    config = TrainConfig(
        str(tmp_path / "run"),
        max_steps=400,
        batch_size=8,
        optimizers={"reranker": OptimizerConfig(lr=2e-3, schedule="cosine", warmup_steps=20)},
        validate_every=100,
    )
    result = fit(method, batches, config)
    trained = load_reranker(result.weights_dir / "reranker", "cpu")
    after = evaluate_reranker(trained, queries, [None] * len(queries), pools, WEIGHTS)
    assert after["spearman"] > 0.4, (before, after)
    assert after["iou_at_1"] > before["iou_at_1"] + 0.2, (before, after)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [row["validation"]["iou_at_1"] for row in rows if "validation" in row]
    assert after["iou_at_1"] == pytest.approx(max(measured), abs=1e-5), "not the best weights are saved"


def test_best_weights_are_kept_over_worse_ones_and_over_a_resume(tmp_path, make_sample, tiny):
    held_out = tool_scenes(make_sample, (5, 6), 1, 1)
    pools = [(query, as_candidates(held_out[7:])) for query in held_out[:7]]
    method = TinyRerankerMethod(tiny, validation=pools, weights=WEIGHTS)
    weight = tiny.compare[2].weight
    found = {}
    for seed in range(6):
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))
        found[seed] = (method.validate()["iou_at_1"], weight.clone())
    best = max(found.values(), key=lambda pair: pair[0])
    assert len({score for score, _ in found.values()}) > 1
    resumed = TinyRerankerMethod(tiny, validation=pools, weights=WEIGHTS)
    state = method.extra_state()
    resumed.load_extra_state(json.loads(json.dumps({"best_score": state.pop("best_score")})) | state)
    for one in (method, resumed):
        one.save_pretrained(tmp_path / "weights", {"reranker": tiny})
        loaded = load_reranker(tmp_path / "weights" / "reranker", "cpu")
        assert torch.equal(loaded.compare[2].weight, best[1])
    plain = TinyRerankerMethod(tiny)
    assert plain.validate() == {}
    plain.save_pretrained(tmp_path / "plain", {"reranker": tiny})
    assert torch.equal(load_reranker(tmp_path / "plain" / "reranker", "cpu").compare[2].weight, weight)


def test_saved_reranker_scores_the_same(tmp_path, tiny, make_sample, rng):
    query, *others = [make_sample(rng, frame=frame) for frame in range(4)]
    tiny.save_pretrained(tmp_path / "reranker")
    loaded = load_reranker(tmp_path / "reranker", "cpu")
    np.testing.assert_array_equal(
        loaded.score(query, None, as_candidates(others)), tiny.score(query, None, as_candidates(others))
    )
    with pytest.raises(SceneGraphError, match="holds no reranker"):
        load_reranker(tmp_path)


def test_a_step_resumes_exactly(tmp_path, make_sample):
    train = tool_scenes(make_sample, (1, 2), 1, 0)

    def run(name, steps):
        torch.manual_seed(0)
        model = TinyReranker(image_size=16, channels=16, hidden_size=8)
        method = TinyRerankerMethod(model, validation=[(train[0], as_candidates(train[7:]))])
        config = TrainConfig(
            str(tmp_path / name),
            max_steps=steps,
            batch_size=2,
            optimizers={"reranker": OptimizerConfig()},
            validate_every=1,
        )
        fit(method, TinyRerankerBatches(train, model, SPLIT, seed=0), config)
        return model.state_dict()

    whole = run("whole", 4)
    run("parts", 2)
    parts = run("parts", 4)
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


# --- multimodal language models ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen3", "qwen2.5"])
def mllm(request, qwen):
    processor = qwen.make_processor(request.param, VOCABULARY)
    return qwen.make_model(request.param, processor.tokenizer), processor


@pytest.fixture
def pair(make_sample):
    """A query and candidates of other numbers of views and triplets, so that chats have different lengths."""
    rng = np.random.default_rng(2)
    query = make_sample(rng, num_views=2, size=(64, 64))
    graphs = [action("drilling"), SceneGraph([LYING]), SceneGraph()]
    others = [
        make_sample(rng, graph, "002_4DOR", frame, num_views=frame + 1, size=(64, 64))
        for frame, graph in enumerate(graphs)
    ]
    return query, as_candidates(others)


def test_score_is_the_softmax_of_yes_and_no_and_the_same_alone_or_padded(mllm, pair):
    model, processor = mllm
    query, pool = pair
    draft = action("sawing")
    reranker = MLLMReranker(model, processor, RerankerPrompt("all"), batch_size=3)
    scores = reranker.score(query, draft, pool)
    yes, no = (processor.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ("yes", "no"))
    for candidate, score in zip(pool, scores):
        chat = reranker.prompt.messages(query, draft, candidate.sample, candidate.graph)
        inputs = processor.apply_chat_template(
            [chat],
            tokenize=True,
            return_dict=True,
            add_generation_prompt=True,
            processor_kwargs={"return_tensors": "pt"},
        )
        with torch.no_grad():
            output = model(**inputs, output_hidden_states=True)
        alone = output.logits[0, -1, [yes, no]].double().softmax(dim=0)[0]
        assert score == pytest.approx(float(alone), abs=1e-5)
        # Equivalently, the last hidden state times the difference of the two rows of the output layer.
        rows = model.get_output_embeddings().weight
        z = output.hidden_states[-1][0, -1] @ (rows[yes] - rows[no]).detach()
        assert float(z) == pytest.approx(math.log(score / (1 - score)), abs=1e-4)
    single = MLLMReranker(model, processor, RerankerPrompt("all"), batch_size=1).score(query, draft, pool)
    np.testing.assert_allclose(scores, single, atol=1e-4)
    assert reranker.score(query, draft, []).shape == (0,)


def test_every_part_of_a_pair_changes_its_score(mllm, pair, make_sample, rng):
    reranker = MLLMReranker(*mllm)
    query, pool = pair
    (base,) = reranker.logits(query, action("sawing"), pool[:1])
    other = make_sample(rng, num_views=2, size=(64, 64))
    changed = [
        reranker.logits(other, action("sawing"), pool[:1]),
        reranker.logits(query, None, pool[:1]),
        reranker.logits(query, action("sawing"), [Candidate(other, pool[0].graph, 0.0)]),
        reranker.logits(query, action("sawing"), [Candidate(pool[0].sample, action("cutting"), 0.0)]),
    ]
    for value in changed:
        assert abs(value[0] - base) > 1e-4


def test_candidates_show_their_primary_view_and_queries_all(pair):
    query, pool = pair

    def pictures(prompt, candidate):
        chat = prompt.messages(query, None, candidate.sample, candidate.graph)
        return [part["image"] for part in chat[1]["content"] if part["type"] == "image"]

    shown = pictures(RerankerPrompt(), pool[2])
    assert len(shown) == 3
    np.testing.assert_array_equal(np.asarray(shown[2]), pool[2].sample.image())
    assert len(pictures(RerankerPrompt("all"), pool[2])) == 5
    texts = [
        part.get("text", "")
        for part in RerankerPrompt().messages(query, None, pool[0].sample, pool[0].graph)[1]["content"]
    ]
    assert "Perhaps" not in "".join(texts) and "head surgeon,patient,drilling" in texts[-1]
    with pytest.raises(SceneGraphError, match="did you mean 'primary'"):
        RerankerPrompt("primry")


def test_answers_of_several_tokens_are_refused_with_their_tokens(qwen, mllm):
    from transformers import PreTrainedTokenizerFast

    _, processor = mllm
    broken = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    broken["model"]["merges"] = [m for m in broken["model"]["merges"] if list(m) not in (["n", "o"], ["Ġn", "o"])]
    from tokenizers import Tokenizer

    class Other:
        chat_template = "x"
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(broken)))

    with pytest.raises(SceneGraphError, match=r"'no' is 2 tokens to .*\['n', 'o'\]"):
        MLLMReranker(torch.nn.Linear(1, 1), Other())


def test_training_batches_hold_pairs_of_queries_padded_on_the_left(mllm, scenes):
    _, processor = mllm
    drafts = [action("drilling")] * len(scenes)
    options = {"drafts": drafts, "config": RerankerConfig(candidates=4), "weights": WEIGHTS, "seed": 1}
    batches = MLLMRerankerBatches(scenes, processor, SPLIT, **options)
    batch = batches.batch(0, 0, 1, 2)
    assert batch["relevance"].shape == (2, 4) and len(batch["input_ids"]) == 8
    assert bool(batch["attention_mask"][:, -1].all()) and "pixel_values" in batch
    counts = []
    for share in (0.0, 1.0, 0.5):
        some = MLLMRerankerBatches(scenes, processor, SPLIT, draft_dropout=share, **options)
        texts = processor.tokenizer.batch_decode(
            torch.cat([some.batch(step, 0, 1, 4)["input_ids"].flatten() for step in range(2)])[None]
        )
        counts.append(texts[0].count("Perhaps"))
    assert counts[0] == 32 and counts[1] == 0 and counts[2] in (4, 8, 12, 16, 20, 24, 28)
    with pytest.raises(SceneGraphError, match="120 samples and 1 drafts"):
        MLLMRerankerBatches(scenes, processor, SPLIT, drafts[:1])


@pytest.mark.slow
def test_adapter_learns_pairs_by_heart_and_is_loaded_again(tmp_path, qwen, pair):
    """A LoRA adapter is trained on three pairs until their IoUs are what it says, and reloaded onto its base."""
    folder = qwen.save_qwen(tmp_path / "base", "qwen3", VOCABULARY)
    reranker = MLLMReranker.from_pretrained(folder, device="cpu")
    query, pool = pair
    torch.manual_seed(0)
    model = add_lora(reranker.model, rank=8, alpha=16)
    wanted = torch.tensor([[0.95, 0.05, 0.5]])

    class Pairs:
        def batch(self, step, rank, world_size, batch_size):
            from scene_graph.predictors.hf import encode_chats

            chats = [RerankerPrompt().messages(query, None, c.sample, c.graph) for c in pool]
            return {**encode_chats(reranker.processor, chats, ["q"], for_generation=True), "relevance": wanted}

    method = MLLMRerankerMethod(model, reranker.processor, validation=[Pairs().batch(0, 0, 1, 1)])
    assert method.roles()["reranker"] is model
    config = TrainConfig(
        str(tmp_path / "run"),
        max_steps=25,
        optimizers={"reranker": OptimizerConfig(lr=5e-3)},
        validate_every=25,
    )
    result = fit(method, Pairs(), config)
    loaded = load_reranker(result.weights_dir / "reranker", "cpu")
    scores = loaded.score(query, None, pool)
    np.testing.assert_allclose(scores, wanted[0], atol=0.15)
    np.testing.assert_allclose(scores, MLLMReranker(model, reranker.processor).score(query, None, pool), atol=1e-5)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("validation", {}).get("iou_at_1", 0) == pytest.approx(0.95) for row in rows)
    frozen = [name for name, value in model.named_parameters() if value.requires_grad and "lora" not in name]
    assert frozen == []
