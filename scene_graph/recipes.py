"""Whole trainings of SGG-ICL: predictor, encoder, index, reranker, router, and the folder of all of them.

Each is a run of (config, overrides) that resumes where it stopped. The parts are trained on the same takes, and what
is chosen, thresholds included, is chosen on validation takes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from scene_graph.datasets import MMORDataset, OR4DDataset, SceneDataset, SceneFolder, telling_frames
from scene_graph.formats import read_json
from scene_graph.methods import (
    AugmentConfig,
    ContextConfig,
    HFSGGBatches,
    HFSGGMethod,
    TinySGGBatches,
    TinySGGMethod,
    answer_weights,
)
from scene_graph.metrics import SceneGraphEvaluator
from scene_graph.pipeline import SGGICLConfig, SGGICLPipeline
from scene_graph.predictors import HFSceneGraphPredictor, SGGPredictor, TinySGGModel, load_predictor
from scene_graph.predictors.hf import add_lora
from scene_graph.prompting import SGGPromptBuilder
from scene_graph.reranker import (
    MLLMRerankerBatches,
    MLLMRerankerMethod,
    RerankerConfig,
    TinyReranker,
    TinyRerankerBatches,
    TinyRerankerMethod,
    load_reranker,
)
from scene_graph.retrieval import (
    ClipBatches,
    ClipMethod,
    OpenClipEncoder,
    PredictorEncoder,
    SceneEncoder,
    SceneIndex,
)
from scene_graph.router import AdaptiveRouter, RouterConfig, router_features, tail_labels, utility_labels
from scene_graph.schema import Sample, SceneDataError, SceneGraphError, TailSplit, idf_weights, tail_split
from scene_graph.simulator.writer import SIMULATOR_FILE
from vidgen.recipes.command_line import require_parts, training_recipe
from vidgen.runtime.config import load_config
from vidgen.runtime.device import set_threads
from vidgen.train import TrainConfig, TrainingMethod
from vidgen.train.lora import LoraConfig

# Batches whose loss is measured; their numbers are far from those of training steps.
VALIDATION_STEP = 1_000_000_000


# --- data --------------------------------------------------------------------------------------------------------


def open_scenes(
    root: str | Path, split: str = "train", views: Sequence[int | str] | None = None, labels: str | None = None
) -> SceneDataset:
    """A data set of any known layout: 4D-OR, MM-OR, or a folder of images.

    Args:
        root: its folder.
        split: train, validation or test; a folder of images has none.
        views: cameras; by default those of the data set's authors.
        labels: an aggregated label file in place of the data set's own.

    Raises:
        SceneDataError: the folder doesn't exist, or holds nothing that is known.
    """
    root = Path(root)
    if not root.is_dir():
        raise SceneDataError(f"{root} is not a folder.")
    names = [path.name for path in root.iterdir() if path.is_dir()]
    chosen = {} if views is None else {"views": tuple(views)}
    if any(re.fullmatch(r"export_holistic_take\d+_processed", name) for name in names):
        settings = root / SIMULATOR_FILE
        if settings.is_file():  # simulated frames may be further apart than 4D-OR's
            chosen["seconds_per_frame"] = read_json(settings)["seconds_per_frame"]
        return OR4DDataset(root, split, labels=labels, **chosen)
    if any(re.fullmatch(r"\d{3}[\d_-]*_(PKA|TKA)", name) for name in names):
        return MMORDataset(root, split, labels=labels, **chosen)
    return SceneFolder(root, labels=labels)


@dataclass(frozen=True)
class SceneSource:
    """Where labeled frames come from.

    Attributes:
        root: folder of 4D-OR, of MM-OR, or of images.
        views: cameras, the first shows most; by default those of the data set's authors.
        labels: by split, an aggregated label file in place of the data set's own.
        max_frame_frequency: predicates of fewer training frames than this share are rare.
    """

    root: str
    views: list[Any] | None = None
    labels: dict[str, str] = field(default_factory=dict)
    max_frame_frequency: float = 0.10

    def open(self, split: str) -> SceneDataset:
        """The frames of a split."""
        return open_scenes(self.root, split, self.views, self.labels.get(split))

    def tail(self, train: SceneDataset) -> TailSplit:
        """Which predicates are rare, by the training labels."""
        return tail_split(train.graphs(), train.vocabulary, self.max_frame_frequency, source="train")


# --- 1. predictor ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictorRecipe:
    """Training of a tiny predictor.

    Attributes:
        train: the run; role `predictor`.
        data: labeled frames.
        model: arguments of `TinySGGModel`; words follow from the data.
        context: how often, and with which examples, prompts are made; `zero_shot_share: 1.0` makes a model that knows
            no examples.
        augment: changes of pictures.
        reweight: weigh the words of answers by the inverse of their frequency.
        validation_batches: of held-out takes, whose loss is measured; 0 for none.
    """

    train: TrainConfig
    data: SceneSource
    model: dict[str, Any] = field(default_factory=dict)
    context: ContextConfig = field(default_factory=ContextConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    reweight: bool = False
    validation_batches: int = 8


@training_recipe(PredictorRecipe)
def train_predictor(config: PredictorRecipe) -> tuple[TrainingMethod, Any]:
    """Train a tiny predictor of scene graphs, with examples in its prompts or without."""
    train, held_out = config.data.open("train"), config.data.open("validation")
    vocabulary, seed = train.vocabulary, config.train.seed
    torch.manual_seed(seed)  # initial weights are drawn from the global generator
    model = TinySGGModel(entities=vocabulary.entities, predicates=vocabulary.predicates, **config.model)
    options = {
        "shuffled": config.data.tail(train).tail,
        "weights": idf_weights(train.graphs(), vocabulary),
    }
    batches = TinySGGBatches(train, vocabulary, model, config.context, config.augment, seed=seed, **options)
    validation = []
    if config.validation_batches:
        # Held-out frames with training frames as examples, as they will be asked.
        everything, asked = [*train, *held_out], range(len(train), len(train) + len(held_out))
        others = TinySGGBatches(
            everything, vocabulary, model, config.context, None, queries=asked, seed=seed, **options
        )
        validation = [
            others.batch(VALIDATION_STEP + index, 0, 1, config.train.batch_size)
            for index in range(config.validation_batches)
        ]
    weights = answer_weights(batches.word_counts()) if config.reweight else None
    return TinySGGMethod(model, vocabulary, weights, validation), batches


@dataclass(frozen=True)
class MLLMPredictorRecipe:
    """Fine-tuning of a multimodal language model.

    Attributes:
        train: the run; role `predictor`.
        data: labeled frames.
        pretrained: folder or hub name of the model.
        lora: adapters, or `null` to train all weights.
        attn_implementation: as transformers names them.
        dtype: of the frozen weights.
        max_pixels: most pixels of a picture.
        gradient_checkpointing: recompute activations in the backward pass.
        context: how often, and with which examples, prompts are made.
        reweight: weigh the tokens of answers by the inverse of their frequency.
        memory_dropout: share of the queries that are asked without their memory.
        validation_batches: of held-out takes, whose loss is measured; 0 for none.
    """

    train: TrainConfig
    data: SceneSource
    pretrained: str
    lora: LoraConfig | None = field(default_factory=lambda: LoraConfig(rank=128, alpha=256))
    attn_implementation: str | None = None
    dtype: str | None = None
    max_pixels: int | None = 336 * 336
    gradient_checkpointing: bool = True
    context: ContextConfig = field(default_factory=ContextConfig)
    reweight: bool = False
    memory_dropout: float = 0.5
    validation_batches: int = 8


@training_recipe(MLLMPredictorRecipe)
def train_mllm_predictor(config: MLLMPredictorRecipe) -> tuple[TrainingMethod, Any]:
    """Fine-tune a multimodal language model as a predictor, with examples in half of its prompts."""
    train, held_out = config.data.open("train"), config.data.open("validation")
    predictor = _open_mllm(config, train)
    prompt = SGGPromptBuilder(train.vocabulary, max_examples=config.context.max_examples)
    options = {
        "shuffled": config.data.tail(train).tail,
        "weights": idf_weights(train.graphs(), train.vocabulary),
        "memory_dropout": config.memory_dropout,
        "seed": config.train.seed,
    }
    batches = HFSGGBatches(train, predictor.processor, prompt, config.context, **options)
    others = HFSGGBatches(held_out, predictor.processor, prompt, config.context, **options)
    validation = [
        others.batch(VALIDATION_STEP + index, 0, 1, config.train.batch_size)
        for index in range(config.validation_batches)
    ]
    weights = answer_weights(batches.word_counts()) if config.reweight else None
    method = HFSGGMethod(predictor.model, predictor.processor, prompt, batches.max_triplets, weights, validation)
    return method, batches


def _open_mllm(config: Any, train: SceneDataset) -> HFSceneGraphPredictor:
    """A multimodal model that is ready to be trained."""
    predictor = HFSceneGraphPredictor.from_pretrained(
        config.pretrained,
        vocabulary=train.vocabulary,
        dtype=config.dtype,
        attn_implementation=config.attn_implementation,
        max_pixels=config.max_pixels,
    )
    if config.gradient_checkpointing:
        predictor.model.gradient_checkpointing_enable()
    if config.lora is not None:
        torch.manual_seed(config.train.seed)  # adapters are drawn from the global generator
        predictor.model = add_lora(predictor.model, config.lora.rank, config.lora.alpha, config.lora.dropout)
    predictor.model.train()
    return predictor


# --- 2. encoder and index ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncoderRecipe:
    """Training of an image-text encoder on frames and their graphs.

    Attributes:
        train: the run; role `encoder`.
        data: labeled frames.
        model_name: of open_clip, or the name of a new model.
        model_config: of a new model, as open_clip's files have it; `null` to go on from weights.
        pretrained: weights of a known model: a tag of open_clip, or a file.
        augment: changes of pictures.
        validation_batches: of held-out takes; 0 for none.
    """

    train: TrainConfig
    data: SceneSource
    model_name: str
    model_config: dict[str, Any] | None = None
    pretrained: str | None = None
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    validation_batches: int = 4


@training_recipe(EncoderRecipe)
def train_encoder(config: EncoderRecipe) -> tuple[TrainingMethod, Any]:
    """Train an open_clip model to put a frame near the text of its graph."""
    train, held_out = config.data.open("train"), config.data.open("validation")
    seed = config.train.seed
    encoder = OpenClipEncoder(config.model_name, config.pretrained, config.model_config, seed=seed)
    others = ClipBatches(held_out, encoder, None, seed)
    size = min(config.train.batch_size, len(others.texts))
    validation = [others.batch(VALIDATION_STEP + index, 0, 1, size) for index in range(config.validation_batches)]
    encoder.model.train()
    return ClipMethod(encoder, validation), ClipBatches(train, encoder, config.augment, seed)


@dataclass(frozen=True)
class IndexRecipe:
    """Building of an index.

    Attributes:
        output_dir: folder to write.
        data: labeled frames; those of the split `train` are indexed.
        encoder: folder of an open_clip model; by default the predictor encodes.
        predictor: folder of the predictor, where it encodes.
        with_images: copy the images, so that the index can be moved.
        frames_per_take: most frames of each take, those with rare relations first (`telling_frames`); `null` for all.
    """

    output_dir: str
    data: SceneSource
    encoder: str | None = None
    predictor: str | None = None
    with_images: bool = False
    frames_per_take: int | None = None

    def __post_init__(self) -> None:
        if self.frames_per_take is not None and self.frames_per_take < 1:
            raise SceneGraphError(f"frames_per_take={self.frames_per_take}; it must be 1 or more, or null for all.")
        if (self.encoder is None) == (self.predictor is None):
            raise SceneGraphError("an index needs exactly one of encoder, predictor.")


def build_index(source: str | None, overrides: list[str]) -> Path:
    """Embed the training frames and write the index."""
    config = load_config(IndexRecipe, source, overrides)
    set_threads()
    train = config.data.open("train")
    samples, tail = list(train), config.data.tail(train)
    if config.frames_per_take is not None:
        samples = [sample for take in train.takes for sample in telling_samples(samples, take, config.frames_per_take)]
    index = SceneIndex.build(samples, open_encoder(config), tail, train.vocabulary, progress=True)
    index.save_pretrained(config.output_dir, config.with_images)
    return Path(config.output_dir)


def telling_samples(samples: Sequence[Sample], take: str, count: int) -> list[Sample]:
    """Those samples of a take that stand for it, see `telling_frames`."""
    own = [sample for sample in samples if sample.take == take]
    return [own[index] for index in telling_frames([sample.graph for sample in own], count)]


def open_encoder(config: IndexRecipe) -> SceneEncoder:
    """The encoder that an index asks for."""
    if config.encoder is not None:
        require_parts([(config.encoder, "the recipe encoder")])
        return OpenClipEncoder.from_pretrained(config.encoder)
    require_parts([(config.predictor, "the recipe predictor")])
    return PredictorEncoder(load_predictor(config.predictor))


# --- 3. reranker -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RerankerRecipe:
    """Training of a tiny reranker.

    Attributes:
        train: the run; role `reranker`.
        data: labeled frames.
        model: arguments of `TinyReranker`.
        method: losses and pairs.
        augment: changes of pictures, the same light for a query and its candidates.
        predictor: folder of the predictor, whose drafts find the pools of validation.
        index: folder of the index, where these are found.
        validation_queries: held-out frames with a rare predicate; the weights that order their pools best are kept.
    """

    train: TrainConfig
    data: SceneSource
    predictor: str
    index: str
    model: dict[str, Any] = field(default_factory=dict)
    method: RerankerConfig = field(default_factory=RerankerConfig)
    augment: AugmentConfig = field(default_factory=lambda: AugmentConfig(drop_views=0.0))
    validation_queries: int = 96


@training_recipe(RerankerRecipe)
def train_reranker(config: RerankerRecipe) -> tuple[TrainingMethod, Any]:
    """Train a small Siamese network to order candidates by the overlap of their triplets with a query's."""
    require_parts([(config.predictor, "the recipe predictor"), (config.index, "the recipe index")])
    train, held_out = config.data.open("train"), config.data.open("validation")
    weights, tail = idf_weights(train.graphs(), train.vocabulary), config.data.tail(train)
    predictor = load_predictor(config.predictor)
    index = SceneIndex.from_pretrained(config.index, predictor=predictor)
    queries = [sample for sample in held_out if tail.is_tail(sample.graph)]
    queries = queries[:: max(1, len(queries) // max(1, config.validation_queries))][: config.validation_queries]
    drafts = [prediction.graph for prediction in predictor.predict(queries)]
    pools = list(zip(queries, index.search(queries, drafts), strict=True))
    torch.manual_seed(config.train.seed)  # initial weights are drawn from the global generator
    model = TinyReranker(**config.model)
    batches = TinyRerankerBatches(train, model, tail, config.method, config.augment, weights, config.train.seed)
    return TinyRerankerMethod(model, config.method, pools, weights), batches


@dataclass(frozen=True)
class MLLMRerankerRecipe:
    """Fine-tuning of a multimodal language model as a reranker.

    Attributes:
        train: the run; role `reranker`.
        data: labeled frames.
        pretrained: folder or hub name of the model.
        predictor: folder of a predictor, whose drafts are shown with queries; `null` shows none.
        lora: adapters, or `null` to train all weights.
        attn_implementation: as transformers names them.
        dtype: of the frozen weights.
        max_pixels: most pixels of a picture.
        gradient_checkpointing: recompute activations in the backward pass.
        method: losses and pairs.
        draft_dropout: share of the queries without their draft.
        validation_batches: of held-out takes; 0 for none.
    """

    train: TrainConfig
    data: SceneSource
    pretrained: str
    predictor: str | None = None
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    attn_implementation: str | None = None
    dtype: str | None = None
    max_pixels: int | None = 336 * 336
    gradient_checkpointing: bool = True
    method: RerankerConfig = field(default_factory=RerankerConfig)
    draft_dropout: float = 0.5
    validation_batches: int = 8


@training_recipe(MLLMRerankerRecipe)
def train_mllm_reranker(config: MLLMRerankerRecipe) -> tuple[TrainingMethod, Any]:
    """Fine-tune a multimodal language model to say whether two scenes show the same relations."""
    train, held_out = config.data.open("train"), config.data.open("validation")
    weights, tail = idf_weights(train.graphs(), train.vocabulary), config.data.tail(train)
    drafts = {"train": None, "validation": None}
    if config.predictor is not None:
        require_parts([(config.predictor, "the recipe predictor_mllm or predictor")])
        predictor = load_predictor(config.predictor)
        for split, scenes in (("train", train), ("validation", held_out)):
            drafts[split] = [prediction.graph for prediction in _drafts(predictor, scenes)]
        del predictor  # two large models needn't be in memory at once
    opened = _open_mllm(config, train)
    options = {"config": config.method, "draft_dropout": config.draft_dropout, "weights": weights}
    options["seed"] = config.train.seed
    batches = MLLMRerankerBatches(train, opened.processor, tail, drafts["train"], **options)
    validation = []
    if config.validation_batches:
        others = MLLMRerankerBatches(held_out, opened.processor, tail, drafts["validation"], **options)
        validation = [
            others.batch(VALIDATION_STEP + index, 0, 1, config.train.batch_size)
            for index in range(config.validation_batches)
        ]
    method = MLLMRerankerMethod(opened.model, opened.processor, None, config.method, validation)
    return method, batches


def _drafts(predictor: SGGPredictor, scenes: Sequence[Any], batch_size: int = 32) -> list[Any]:
    starts = range(0, len(scenes), batch_size)
    return [
        prediction
        for start in tqdm(starts, desc="drafts", unit="batch", leave=False)
        for prediction in predictor.predict(scenes[start : start + batch_size])
    ]


# --- 4. router ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RouterRecipe:
    """Fitting of a router, on takes that the predictor hasn't seen.

    Attributes:
        output_dir: folder to write.
        data: labeled frames; those of the split `validation` are used.
        predictor: folder of the predictor.
        index: folder of the index.
        reranker: folder of the reranker; `null` orders candidates by retrieval.
        router: how it is fitted.
        pipeline: how many examples a frame gets, and how answers are merged.
        fit_share: share of the takes that the router is fitted to; temperature and threshold are chosen on the others.
        epsilon: how much F1 of frequent predicates the threshold may cost.
        budget: largest share of frames with a second look; `null` for no limit.
    """

    output_dir: str
    data: SceneSource
    predictor: str
    index: str
    reranker: str | None = None
    router: RouterConfig = field(default_factory=RouterConfig)
    pipeline: SGGICLConfig = field(default_factory=SGGICLConfig)
    fit_share: float = 0.6
    epsilon: float = 0.005
    budget: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fit_share < 1:
            raise SceneGraphError(f"fit_share={self.fit_share}; it must be between 0 and 1.")


def train_router(source: str | None, overrides: list[str]) -> Path:
    """Fit, calibrate and set the threshold of a router; write it with what it was chosen by."""
    config = load_config(RouterRecipe, source, overrides)
    set_threads()
    parts = [(config.predictor, "the recipe predictor"), (config.index, "the recipe index")]
    parts += [(config.reranker, "the recipe reranker")] if config.reranker is not None else []
    require_parts(parts)
    predictor = load_predictor(config.predictor)
    ranking = "retrieval" if config.reranker is None else config.pipeline.ranking
    pipe = SGGICLPipeline(
        predictor,
        SceneIndex.from_pretrained(config.index, predictor=predictor),
        reranker=None if config.reranker is None else load_reranker(config.reranker),
        config=dataclasses.replace(config.pipeline, policy="all", ranking=ranking),
    )
    held_out = config.data.open("validation")
    router, report = fit_router(pipe, held_out, config.router, config.fit_share, config.epsilon, config.budget)
    folder = Path(config.output_dir)
    router.save_pretrained(folder)
    (folder / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    return folder


def fit_router(
    pipe: SGGICLPipeline,
    scenes: SceneDataset,
    config: RouterConfig | None = None,
    fit_share: float = 0.6,
    epsilon: float = 0.005,
    budget: float | None = None,
) -> tuple[AdaptiveRouter, dict[str, Any]]:
    """Fit a router for a pipeline that gives every frame a second look.

    Args:
        pipe: with `policy="all"`.
        scenes: labeled frames of takes that the predictor hasn't seen.
        config: how it is fitted.
        fit_share: share of the takes it is fitted to; temperature and threshold are chosen on the others.
        epsilon: how much head F1 the threshold may cost.
        budget: largest share of frames with a second look.

    Returns:
        The router, and what it was chosen by: its area under the ROC curve and the thresholds that were tried.

    Raises:
        SceneGraphError: fewer than two takes.
    """
    config, tail = config or RouterConfig(), pipe.tail_split
    count = min(len(scenes.takes) - 1, max(1, round(fit_share * len(scenes.takes))))
    if count < 1:
        raise SceneGraphError(f"a router needs 2 validation takes or more, to fit and to choose; got {scenes.takes}.")
    samples = list(scenes)
    drafts = pipe.draft(samples, progress=True)
    candidates = pipe.retrieve(samples, drafts)
    features = router_features(drafts, candidates, tail, pipe.index.prior)
    is_fitted = np.isin([sample.take for sample in samples], scenes.takes[:count])
    chosen_on = np.flatnonzero(~is_fitted)
    first = [drafts[index].graph for index in chosen_on]
    second_of = chosen_on if config.target == "tail" else np.arange(len(samples))
    examples = [pipe.choose(samples[index], drafts[index], candidates[index]) for index in second_of]
    looked_again = pipe.refine([samples[i] for i in second_of], [drafts[i] for i in second_of], examples, True)
    second = dict(zip(second_of.tolist(), looked_again, strict=True))

    graphs = scenes.graphs()
    if config.target == "tail":
        labels = tail_labels(graphs, tail)
    else:
        weights = idf_weights(pipe.index.graphs, scenes.vocabulary)
        labels = utility_labels([draft.graph for draft in drafts], looked_again, graphs, weights)
    router = AdaptiveRouter(config).fit(features[is_fitted], labels[is_fitted])
    area = router.calibrate(features[~is_fitted], labels[~is_fitted])

    targets, takes = [graphs[i] for i in chosen_on], [samples[i].take for i in chosen_on]

    def evaluate(routed: np.ndarray) -> tuple[float, float]:
        answers = [second[row] if flag else draft for row, flag, draft in zip(chosen_on.tolist(), routed, first)]
        evaluator = SceneGraphEvaluator(scenes.vocabulary, "official", "skip", tail)
        evaluator.update(answers, targets, takes)
        scores = evaluator.compute().scores
        return scores["macro_f1"], scores["head_f1"]

    rows = router.choose_threshold(features[~is_fitted], evaluate, epsilon, budget)
    report = {
        "auc": area,
        "temperature": router.temperature,
        "threshold": router.threshold,
        "fitted_on": list(scenes.takes[:count]),
        "chosen_on": list(scenes.takes[count:]),
        "thresholds": [dataclasses.asdict(row) for row in rows],
    }
    return router, report


# --- 5. the whole ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AssembleRecipe:
    """Where the parts are.

    Attributes:
        output_dir: folder to write; an existing one is replaced.
        predictor: folder of the predictor.
        index: folder of the index.
        router: folder of the router.
        reranker: folder of the reranker.
        pipeline: how the parts are used.
        with_images: copy the images of the index, so that the folder can be moved.
    """

    output_dir: str
    predictor: str
    index: str
    router: str
    reranker: str
    pipeline: SGGICLConfig = field(default_factory=SGGICLConfig)
    with_images: bool = False


def assemble(source: str | None, overrides: list[str]) -> Path:
    """Write the folder that `SGGICLPipeline.from_pretrained` loads."""
    config = load_config(AssembleRecipe, source, overrides)
    parts = {name: getattr(config, name) for name in ("predictor", "index", "router", "reranker")}
    require_parts([(folder, f"the recipe {name}") for name, folder in parts.items()])
    predictor = load_predictor(config.predictor)
    pipe = SGGICLPipeline(
        predictor,
        SceneIndex.from_pretrained(config.index, predictor=predictor),
        AdaptiveRouter.from_pretrained(config.router),
        load_reranker(config.reranker),
        config.pipeline,
    )
    pipe.save_pretrained(config.output_dir, config.with_images)
    return Path(config.output_dir)
