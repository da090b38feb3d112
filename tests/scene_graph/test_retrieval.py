"""Retrieval: fused search against brute force, what may join a pool, encoders, and indexes on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math

import numpy as np
import pytest
import torch

import scene_graph.retrieval as retrieval
from scene_graph.formats import format_triplet_text
from scene_graph.methods import AugmentConfig
from scene_graph.predictors import TinyPredictor, TinySGGModel
from scene_graph.retrieval import (
    ClipBatches,
    ClipMethod,
    OpenClipEncoder,
    PredictorEncoder,
    RetrievalConfig,
    SceneIndex,
    graph_text,
    model_fingerprint,
)
from scene_graph.schema import SceneDataError, SceneGraph, SceneGraphError, TailSplit, Triplet, Vocabulary, tail_split
from vidgen.train import OptimizerConfig, TrainConfig, fit

VOCABULARY = Vocabulary.or4d()
DIM = 12


class FakeEncoder:
    """Unit vectors that depend on the id of a sample, or on a text, alone."""

    kind, fingerprint = "fake", "f"

    def __init__(self, is_joint: bool = True) -> None:
        self.is_joint = is_joint

    def encode_images(self, samples):
        return np.array([self.vector(sample.id) for sample in samples], np.float32).reshape(len(samples), DIM)

    def encode_texts(self, texts):
        return np.array([self.vector(text) for text in texts], np.float32).reshape(len(texts), DIM)

    def vector(self, key):
        rng = np.random.default_rng(int(hashlib.sha256(key.encode()).hexdigest()[:8], 16))
        vector = rng.normal(size=DIM)
        return vector / np.linalg.norm(vector)


@pytest.fixture
def scenes(make_sample, make_graph):
    """120 samples of 5 takes, a frame every 2 seconds, a rare predicate in some."""
    rng = np.random.default_rng(3)
    samples = []
    for take in range(5):
        for frame in range(24):
            graph = make_graph(rng, num_triplets=3)
            kept = [triplet for triplet in graph if triplet.predicate in ("holding", "touching", "closeTo", "lyingOn")]
            if frame in (take, take + 1):
                kept.append(Triplet("head surgeon", ("drilling", "sawing")[take % 2], "patient"))
            sample = make_sample(rng, SceneGraph(kept), f"{take + 1:03d}_4DOR", frame, size=(16, 16))
            samples.append(dataclasses.replace(sample, seconds=2.0 * frame))
    return samples


@pytest.fixture
def rare():
    return TailSplit(("holding", "touching", "closeTo", "lyingOn"), ("drilling", "sawing"), {}, 0.1, "train")


@pytest.fixture
def index(scenes, rare):
    return SceneIndex.build(scenes, FakeEncoder(), rare, VOCABULARY)


def naive_scores(encoder, query, draft, samples, fusion, weights):
    """Fused scores of some samples for a query, one number at a time."""
    image, text = encoder.vector(query.id), encoder.vector(graph_text(draft))
    images = [encoder.vector(sample.id) for sample in samples]
    texts = [encoder.vector(graph_text(sample.graph)) for sample in samples]
    columns = [
        [float(image @ other) for other in images],
        [float(image @ other) for other in texts],
        [float(text @ other) for other in texts],
    ]
    if not encoder.is_joint:
        columns[1], weights = [0.0] * len(samples), (weights[0], 0.0, weights[2])
    total = [0.0] * len(samples)
    for number, (column, weight) in enumerate(zip(columns, weights)):
        if fusion == "rrf":
            if number == 1 and not encoder.is_joint:
                continue
            for row, value in enumerate(column):
                rank = 1 + sum(other > value for other in column)
                # Equal texts have equal similarities; the first of them counts as the better one.
                rank += sum(other == value for other in column[:row])
                total[row] += 1 / (60 + rank)
        elif weight:
            mean = sum(column) / len(column)
            std = math.sqrt(sum((value - mean) ** 2 for value in column) / len(column))
            for row, value in enumerate(column):
                total[row] += weight * (value - mean) / std
    return total


FREE = {"dedup_seconds": 0.0, "tail_quota": 0}


@pytest.mark.parametrize("with_faiss", [False, True])
@pytest.mark.parametrize("is_joint", [True, False])
@pytest.mark.parametrize("fusion", ["zscore", "rrf"])
def test_search_equals_brute_force(scenes, rare, make_graph, monkeypatch, fusion, is_joint, with_faiss):
    if with_faiss:
        pytest.importorskip("faiss")
        monkeypatch.setattr(retrieval, "FAISS_MIN_FRAMES", 1)
    encoder = FakeEncoder(is_joint)
    index = SceneIndex.build(scenes, encoder, rare, VOCABULARY)
    assert (index._faiss is not None) == with_faiss
    rng = np.random.default_rng(0)
    queries = [scenes[3], scenes[77], dataclasses.replace(scenes[5], id="q", take="new")]
    drafts = [make_graph(rng, num_triplets=4) for _ in queries]
    config = RetrievalConfig(fusion=fusion, weights=(0.5, 0.2, 0.3), **FREE)
    for query, draft, found in zip(queries, drafts, index.search(queries, drafts, n=90, config=config)):
        others = [sample for sample in scenes if sample.take != query.take]
        scores = naive_scores(encoder, query, draft, others, fusion, config.weights)
        expected = sorted(scores, reverse=True)[:90]
        np.testing.assert_allclose([candidate.score for candidate in found], expected, atol=2e-5)
        by_id = dict(zip([sample.id for sample in others], scores))
        for candidate in found:
            assert candidate.score == pytest.approx(by_id[candidate.sample_id], abs=2e-5)
            image, text = encoder.vector(query.id), encoder.vector(graph_text(draft))
            own = encoder.vector(graph_text(candidate.graph))
            assert candidate.scores["image"] == pytest.approx(image @ encoder.vector(candidate.sample_id), abs=1e-5)
            assert candidate.scores["text"] == pytest.approx(text @ own, abs=1e-5)
            assert ("cross" in candidate.scores) == is_joint
        assert len({candidate.sample_id for candidate in found}) == 90


def test_presets_use_images_first_and_mmices_then_texts(index, scenes, make_graph, monkeypatch):
    encoder, query = index.encoder, scenes[0]
    draft = make_graph(np.random.default_rng(1), num_triplets=3)
    others = [sample for sample in scenes if sample.take != query.take]
    by_image = sorted(others, key=lambda s: -float(encoder.vector(query.id) @ encoder.vector(s.id)))
    (rices,) = index.search([query], [draft], n=10, config=RetrievalConfig(fusion="rices", **FREE))
    assert [candidate.sample_id for candidate in rices] == [sample.id for sample in by_image[:10]]

    monkeypatch.setattr(retrieval, "MMICES_SHORTLIST", 30)
    (mmices,) = index.search([query], [draft], n=10, config=RetrievalConfig(fusion="mmices", **FREE))
    text = encoder.vector(graph_text(draft))
    similar = sorted((float(text @ encoder.vector(graph_text(s.graph))) for s in by_image[:30]), reverse=True)
    np.testing.assert_allclose([candidate.score for candidate in mmices], similar[:10], atol=1e-5)
    assert {candidate.sample_id for candidate in mmices} <= {sample.id for sample in by_image[:30]}


@pytest.mark.parametrize("fusion", ["zscore", "rrf", "rices", "mmices"])
def test_no_candidate_is_of_the_query_take_or_close_to_another(index, scenes, fusion):
    drafts = [sample.graph for sample in scenes]
    config = RetrievalConfig(fusion=fusion, dedup_seconds=5.0)
    for query, found in zip(scenes, index.search(scenes, drafts, config=config)):
        assert 0 < len(found) <= 24
        assert query.take not in {candidate.sample.take for candidate in found}
        for one in found:
            for other in found:
                if one is not other and one.sample.take == other.sample.take:
                    assert abs(one.sample.seconds - other.sample.seconds) >= 5.0
        scores = [candidate.score for candidate in found]
        assert scores == sorted(scores, reverse=True)


def test_own_take_is_found_only_if_it_is_allowed(index, scenes):
    (found,) = index.search(
        [scenes[9]], [scenes[9].graph], exclude_same_take=False, config=RetrievalConfig(fusion="rices", **FREE)
    )
    assert found[0].sample_id == scenes[9].id


def test_best_frames_of_every_rare_predicate_are_in_the_pool(index, scenes):
    query, draft = scenes[100], SceneGraph()  # of take 5, which drills
    plain = RetrievalConfig(tail_quota=0)
    (every,) = index.search([query], [draft], n=120, config=RetrievalConfig(tail_quota=0, dedup_seconds=0.0))
    (without,) = index.search([query], [draft], n=6, config=plain)
    (found,) = index.search([query], [draft], n=6, config=RetrievalConfig())
    for name in ("drilling", "sawing"):
        ranked = [c for c in every if name in c.graph.predicates]
        best_of_takes = {c.sample.take: c.sample_id for c in reversed(ranked)}  # two frames of a take are 2 s apart
        expected = sorted(best_of_takes.values(), key=[c.sample_id for c in ranked].index)[:2]
        assert [c.sample_id for c in found if name in c.graph.predicates][:2] == expected
    assert sum(bool({"drilling", "sawing"} & set(c.graph.predicates)) for c in without) < 4, "the quota does nothing"
    # The rest of the pool are the best others that aren't too close.
    others = [c.sample_id for c in found if not {"drilling", "sawing"} & set(c.graph.predicates)]
    assert others[0] == next(c.sample_id for c in without if c.sample_id in others)


def test_pool_too_small_for_the_quota_is_refused(index, scenes):
    with pytest.raises(SceneGraphError, match="pool of 3 has no room for 2 candidates of each of 2"):
        index.search(scenes[:1], [SceneGraph()], n=3)


def test_index_of_the_query_take_alone_is_refused(scenes, rare):
    index = SceneIndex.build(scenes[:24], FakeEncoder(), rare, VOCABULARY)
    with pytest.raises(SceneGraphError, match=r"take '001_4DOR', that of sample 001_4DOR_000000"):
        index.search(scenes[:1], [SceneGraph()])


def test_similarities_that_never_vary_count_nothing(scenes, rare):
    """A standard deviation of 0 must neither divide nor let rounding decide."""

    class SameText(FakeEncoder):
        def encode_texts(self, texts):
            return np.tile(self.vector("one"), (len(texts), 1)).astype(np.float32)

    index = SceneIndex.build(scenes, SameText(), rare, VOCABULARY)
    (found,) = index.search([scenes[0]], [SceneGraph()], config=RetrievalConfig(**FREE))
    (images,) = index.search([scenes[0]], [SceneGraph()], config=RetrievalConfig(fusion="rices", **FREE))
    assert [c.sample_id for c in found] == [c.sample_id for c in images]


def test_close_to_is_dropped_unless_nothing_else_is_there():
    close = Triplet("patient", "closeTo", "operating table")
    holding = Triplet("head surgeon", "holding", "instrument")
    assert graph_text(SceneGraph([close, holding])) == format_triplet_text([holding])
    assert graph_text(SceneGraph([close])) == format_triplet_text([close])
    assert graph_text(SceneGraph([holding, Triplet("circulator", "touching", "patient")])).index("circulator") < 10


def test_mistakes_are_named(scenes, rare, index):
    with pytest.raises(SceneGraphError, match="0 drafts"):
        index.search(scenes[:1], [])
    unlabeled = dataclasses.replace(scenes[0], graph=None)
    with pytest.raises(SceneGraphError, match=f"{scenes[0].id} has no labels"):
        SceneIndex.build([unlabeled], FakeEncoder(), rare, VOCABULARY)
    with pytest.raises(SceneGraphError, match="same id"):
        SceneIndex.build([scenes[0], scenes[0]], FakeEncoder(), rare, VOCABULARY)
    with pytest.raises(SceneGraphError, match="at least one"):
        SceneIndex.build([], FakeEncoder(), rare, VOCABULARY)
    with pytest.raises(SceneGraphError, match="vocabulary"):
        SceneIndex.build(scenes, FakeEncoder(), rare)
    with pytest.raises(SceneGraphError, match="did you mean 'zscore'"):
        RetrievalConfig(fusion="zscores")
    with pytest.raises(SceneGraphError, match="weights"):
        RetrievalConfig(weights=(0.0, 1.0, 0.0))


# --- on disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def predictor():
    torch.manual_seed(0)
    model = TinySGGModel(VOCABULARY.entities, VOCABULARY.predicates, image_size=16, hidden_size=16, num_layers=1)
    return TinyPredictor(model, VOCABULARY)


def test_saved_index_finds_the_same(tmp_path, scenes, rare, predictor):
    index = SceneIndex.build(scenes, PredictorEncoder(predictor), rare, VOCABULARY)
    index.save_pretrained(tmp_path / "index")
    loaded = SceneIndex.from_pretrained(tmp_path / "index", predictor=predictor)
    queries = scenes[::30]
    for before, after in zip(*(one.search(queries, [s.graph for s in queries]) for one in (index, loaded))):
        assert [(c.sample_id, c.score) for c in before] == [(c.sample_id, c.score) for c in after]
        for one, other in zip(before, after):
            np.testing.assert_array_equal(one.sample.image(1), other.sample.image(1))
            assert one.graph == other.graph == other.sample.graph
            assert one.sample.seconds == other.sample.seconds
    assert loaded.prior.counts == index.prior.counts and loaded.tail_split == rare


def test_index_with_images_can_be_moved_and_one_without_says_what_is_missing(tmp_path, builders, rare, predictor):
    from scene_graph.datasets import OR4DDataset

    rows = [["human_0", "CloseTo", "Patient"], ["Patient", "LyingOn", "operating_table"]]
    for number in (1, 3):
        builders.write_or4d_take(tmp_path / "data", number, [rows] * 2, {"human_0": "head-surgeon"})
    frames = OR4DDataset(tmp_path / "data", "train", takes=(1, 3))
    pictures = [sample.image() for sample in frames]
    index = SceneIndex.build(frames, PredictorEncoder(predictor), rare)  # the data set knows its vocabulary
    index.save_pretrained(tmp_path / "whole", with_images=True)
    index.save_pretrained(tmp_path / "light")
    (tmp_path / "data").rename(tmp_path / "moved")
    (tmp_path / "whole").rename(tmp_path / "elsewhere")

    loaded = SceneIndex.from_pretrained(tmp_path / "elsewhere", predictor=predictor)
    for sample, picture in zip(loaded.samples, pictures):
        np.testing.assert_array_equal(sample.image(), picture)
    with pytest.raises(SceneDataError, match=r"refers to \d+ images that don't exist, the first is .*color"):
        SceneIndex.from_pretrained(tmp_path / "light", predictor=predictor)
    again = SceneIndex.from_pretrained(
        tmp_path / "light", predictor=predictor, samples=OR4DDataset(tmp_path / "moved", "train", takes=(1, 3))
    )
    np.testing.assert_array_equal(again.samples[1].image(), pictures[1])


def test_another_encoder_or_other_labels_are_refused(tmp_path, scenes, rare, predictor):
    SceneIndex.build(scenes, PredictorEncoder(predictor), rare, VOCABULARY).save_pretrained(tmp_path / "index")
    changed = [dataclasses.replace(scenes[0], graph=SceneGraph()), *scenes[1:]]
    with pytest.raises(SceneGraphError, match="labels changed"):
        SceneIndex.from_pretrained(tmp_path / "index", predictor=predictor, samples=changed)
    with pytest.raises(SceneGraphError, match=f"1 of the 120 samples .* the first is {scenes[0].id}"):
        SceneIndex.from_pretrained(tmp_path / "index", predictor=predictor, samples=scenes[1:])
    with pytest.raises(SceneGraphError, match="give the predictor"):
        SceneIndex.from_pretrained(tmp_path / "index")
    content = json.loads((tmp_path / "index" / "index.json").read_text())
    next(row for row in content["samples"] if row["triplets"])["triplets"].pop()
    (tmp_path / "index" / "index.json").write_text(json.dumps(content))
    with pytest.raises(SceneGraphError, match="labels changed"):
        SceneIndex.from_pretrained(tmp_path / "index", predictor=predictor)
    with torch.no_grad():
        predictor.model.blocks[0].mlp[2].weight += 0.01
    with pytest.raises(SceneGraphError, match="built with another encoder"):
        SceneIndex.from_pretrained(tmp_path / "index", predictor=predictor, samples=scenes)
    with pytest.raises(SceneGraphError, match=r"no index of scenes: index\.json"):
        SceneIndex.from_pretrained(tmp_path)


def test_fingerprint_sees_any_trained_tensor_but_not_the_number_format():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 3))
    before = model_fingerprint(model)
    # As loaded in bfloat16 on another machine.
    assert model_fingerprint(torch.nn.Sequential(*model).to(torch.bfloat16)) == before
    model.float()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter += 0.05
        after = model_fingerprint(model)
        assert after != before
        before = after


# --- encoders ----------------------------------------------------------------------------------------------------


def test_predictor_encodes_texts_by_what_they_share(predictor):
    encoder = PredictorEncoder(predictor)
    drilling = Triplet("head surgeon", "drilling", "patient")
    texts = [
        graph_text(SceneGraph(triplets))
        for triplets in (
            [drilling],
            [drilling, Triplet("assistant surgeon", "touching", "patient")],
            [Triplet("head surgeon", "sawing", "patient")],
            [],
        )
    ]
    vectors = encoder.encode_texts(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    similarity = vectors @ vectors.T
    assert similarity[0, 1] == pytest.approx(3 / math.sqrt(3 * 6))
    assert similarity[0, 2] == similarity[0, 3] == 0


TINY_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


@pytest.fixture
def clip():
    pytest.importorskip("open_clip")
    return OpenClipEncoder("tiny-clip", model_config=TINY_CLIP, seed=1, device="cpu", batch_size=4)


def test_views_are_averaged_and_batches_change_nothing(clip, make_sample, rng):
    samples = [make_sample(rng, num_views=views, frame=views, size=(16, 16)) for views in (1, 3, 2, 1, 2, 3)]
    together = clip.encode_images(samples)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-5)
    for row, sample in enumerate(samples):
        views = [
            clip.encode_images([dataclasses.replace(sample, views=(view,), view_names=("a",), primary=0)])[0]
            for view in sample.views
        ]
        mean = np.mean(views, axis=0)
        np.testing.assert_allclose(together[row], mean / np.linalg.norm(mean), atol=1e-5)
    assert clip.encode_texts([]).shape == (0, 16)


def test_clip_is_the_same_after_saving_and_for_the_same_seed(tmp_path, clip, make_sample, rng):
    samples, texts = [make_sample(rng, size=(20, 30)) for _ in range(2)], ["<SG> a,b,c </SG>", "<SG> </SG>"]
    clip.save_pretrained(tmp_path / "clip")
    OpenClipEncoder.from_pretrained(tmp_path / "clip", device="cpu").save_pretrained(tmp_path / "again")
    loaded = OpenClipEncoder.from_pretrained(tmp_path / "again", device="cpu")
    np.testing.assert_array_equal(loaded.encode_images(samples), clip.encode_images(samples))
    np.testing.assert_array_equal(loaded.encode_texts(texts), clip.encode_texts(texts))
    assert loaded.fingerprint == clip.fingerprint
    state = torch.get_rng_state()
    assert OpenClipEncoder("tiny-clip", model_config=TINY_CLIP, seed=1).fingerprint == clip.fingerprint
    assert OpenClipEncoder("tiny-clip", model_config=TINY_CLIP, seed=2).fingerprint != clip.fingerprint
    assert torch.equal(torch.get_rng_state(), state), "making an encoder moved the global generator"
    with pytest.raises(SceneGraphError, match="without weights"):
        OpenClipEncoder("ViT-B-32")
    with pytest.raises(SceneGraphError, match="can't make 'ViT-Z'"):
        OpenClipEncoder("ViT-Z", pretrained="nothing")
    with pytest.raises(SceneGraphError, match="holds no open_clip model"):
        OpenClipEncoder.from_pretrained(tmp_path)


def test_index_brings_its_clip_along(tmp_path, clip, scenes, rare):
    index = SceneIndex.build(scenes[::6], clip, rare, VOCABULARY)
    index.save_pretrained(tmp_path / "index")
    loaded = SceneIndex.from_pretrained(tmp_path / "index", device="cpu")
    config = RetrievalConfig(tail_quota=0)
    query, draft = scenes[:1], [scenes[0].graph]
    found = [one.search(query, draft, n=5, config=config)[0] for one in (index, loaded)]
    assert [(c.sample_id, c.scores) for c in found[0]] == [(c.sample_id, c.scores) for c in found[1]]
    assert set(found[0][0].scores) == {"image", "cross", "text"}


def test_texts_of_a_clip_batch_all_differ_and_rare_ones_come_as_often(clip, make_sample):
    rng = np.random.default_rng(0)
    common = SceneGraph([Triplet("patient", "lyingOn", "operating table")])
    actions = [SceneGraph([Triplet("head surgeon", name, "patient")]) for name in ("drilling", "sawing", "cutting")]
    graphs = [common] * 30 + actions
    samples = [make_sample(rng, graph, frame=i, num_views=1 + i % 2, size=(8, 8)) for i, graph in enumerate(graphs)]
    batches = ClipBatches(samples, clip, AugmentConfig(), seed=0)
    counts = np.zeros(4)
    tokens = clip.tokenizer(batches.texts)
    for step in range(40):
        batch = batches.batch(step, 0, 1, 2)
        rows = [int((tokens == text).all(dim=1).nonzero()) for text in batch["text"]]
        assert len(set(rows)) == 2
        counts[rows] += 1
    assert counts.min() > 10  # 20 of each are expected; by frames, rare ones would come 2.4 times
    again = batches.batch(39, 0, 1, 2)
    assert all(torch.equal(value, again[name]) for name, value in batch.items())
    assert not torch.equal(batches.batch(39, 1, 2, 2)["pixels"], batch["pixels"])
    with pytest.raises(SceneGraphError, match="batch_size=5; these labels have 4 different texts"):
        batches.batch(0, 0, 1, 5)


def test_contrastive_training_puts_frames_near_their_texts(tmp_path, clip, make_sample):
    """Frames show the color of their action; after training, images find their own text among those of others."""
    rng = np.random.default_rng(0)
    names = ("drilling", "sawing", "cutting", "suturing", "cleaning", "hammering")
    samples = []
    for frame in range(48):
        sample = make_sample(rng, SceneGraph([Triplet("head surgeon", names[frame % 6], "patient")]), frame=frame)
        color = 255 * np.array([(frame % 6 + 1) >> bit & 1 for bit in range(3)])
        view = np.clip(color + rng.normal(0, 20, (16, 16, 3)), 0, 255).astype(np.uint8)
        samples.append(dataclasses.replace(sample, views=(view,), view_names=("a",)))
    texts = [graph_text(sample.graph) for sample in samples[:6]]

    def accuracy():
        similarity = clip.encode_images(samples) @ clip.encode_texts(texts).T
        return (similarity.argmax(axis=1) == np.arange(48) % 6).mean()

    assert accuracy() < 0.5
    batches = ClipBatches(samples, clip, None, seed=0)
    method = ClipMethod(clip, [batches.batch(10**6, 0, 1, 6)])
    config = TrainConfig(
        str(tmp_path / "run"),
        max_steps=40,
        batch_size=6,
        optimizers={"encoder": OptimizerConfig(lr=3e-3)},
        ema_decay=0.9,
        validate_every=40,
    )
    result = fit(method, batches, config)
    assert accuracy() > 0.9
    saved = OpenClipEncoder.from_pretrained(result.weights_dir / "encoder", device="cpu")
    assert saved.fingerprint != clip.fingerprint, "averaged weights are saved, the last ones stay in the model"
    assert (saved.encode_images(samples) @ saved.encode_texts(texts).T).argmax(axis=1).tolist() == [
        frame % 6 for frame in range(48)
    ]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("accuracy" in row.get("validation", {}) for row in rows)


def test_prior_and_split_come_from_the_indexed_labels_alone(index, scenes):
    triplet = Triplet("head surgeon", "drilling", "patient")
    count = sum(triplet in sample.graph for sample in scenes)
    assert count > 0 and index.prior.counts[triplet] == count
    assert index.takes == tuple(f"{take:03d}_4DOR" for take in range(1, 6))
    with pytest.raises(SceneGraphError, match="leaks"):
        tail_split([sample.graph for sample in scenes], VOCABULARY, source="test")
