"""Training of scene-graph predictors, the tiny one and multimodal language models, with and without examples.

Part of the prompts carry labeled examples from other takes: some of the most similar training graphs, some at random,
so that a model learns to use examples that fit and to distrust those that don't. In some of these prompts the rare
predicates swap names, in examples and answer alike, so that names must be read from the context and can't come from
the weights (the idea of the symbolic prompts of ORacle, arXiv 2404.07031). Without such prompts the same classes train
the baselines: `zero_shot_share=1` is a model without examples, `token_weights` the one with reweighted words.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from scene_graph.formats import format_triplet_text
from scene_graph.predictors.base import Example
from scene_graph.predictors.hf import (
    HFSceneGraphPredictor,
    answer_labels,
    encode_chats,
    eos_ids,
    keep_last_logits,
)
from scene_graph.predictors.tiny import END, PAD, START, TinyPredictor, TinySGGModel, load_views
from scene_graph.prompting import SGGPromptBuilder
from scene_graph.schema import Sample, SceneGraph, SceneGraphError, Triplet, Vocabulary
from vidgen.runtime.device import derive_seed
from vidgen.train import StepOutput, TrainingMethod

# A word that no training answer has counts this much less than the least of those that occur (as in ORacle).
UNSEEN_WEIGHT = 0.01


@dataclass(frozen=True)
class ContextConfig:
    """How often, and with which examples, training prompts are made.

    Attributes:
        zero_shot_share: share of the trained answers that are given without examples.
        max_examples: most examples of a prompt of a multimodal model; a tiny model brings its own number.
        nearest_share: share of the examples that are among the most similar graphs; the others are random.
        nearest: how many graphs count as most similar.
        ordered_share: share of the prompts whose most similar example is last; in others the order is random. In use
            the last one only seems to be the most similar. With the truly most similar one always last, a model
            learns to copy the last answer and never looks at the pictures.
        symbol_shuffle: share of the prompts with examples in which predicates swap names.
    """

    zero_shot_share: float = 0.5
    max_examples: int = 3
    nearest_share: float = 0.6
    nearest: int = 12
    ordered_share: float = 0.5
    symbol_shuffle: float = 0.3

    def __post_init__(self) -> None:
        for name in ("zero_shot_share", "nearest_share", "ordered_share", "symbol_shuffle"):
            if not 0 <= getattr(self, name) <= 1:
                raise SceneGraphError(f"{name}={getattr(self, name)}; it must be in [0, 1].")
        if self.max_examples < 1 or self.nearest < 1:
            raise SceneGraphError(f"max_examples={self.max_examples}, nearest={self.nearest}; both must be 1 or more.")


@dataclass(frozen=True)
class AugmentConfig:
    """Random changes of training pictures.

    Attributes:
        gain: largest relative change of brightness, one for all pictures of a sequence.
        cast: largest relative change of a color channel, one for all pictures of a sequence.
        shift: largest shift, as a fraction of the side, another one for each picture.
        drop_views: share of the scenes that keep their primary view only.
    """

    gain: float = 0.2
    cast: float = 0.1
    shift: float = 0.06
    drop_views: float = 0.1

    def __post_init__(self) -> None:
        for name in ("gain", "cast", "shift", "drop_views"):
            if not 0 <= getattr(self, name) < 1:
                raise SceneGraphError(f"{name}={getattr(self, name)}; it must be in [0, 1).")


def augment(images: np.ndarray, config: AugmentConfig, random: np.random.Generator) -> np.ndarray:
    """Changes brightness and color of whole sequences alike, and shifts each picture on its own.

    Examples stay comparable with their query: a tool of one color has one color in all of them.

    Args:
        images: uint8 `(sequences, …, height, width, 3)`.
        config: how much.
        random: source of the changes.

    Returns:
        uint8, of the same shape.
    """
    shape = images.shape
    gain = 1 + config.gain * random.uniform(-1, 1, (shape[0], 1))
    factors = (gain * (1 + config.cast * random.uniform(-1, 1, (shape[0], 3)))).astype(np.float32)
    factors = factors.reshape(shape[0], *[1] * (len(shape) - 2), 3)
    images = np.minimum(images * factors, 255).astype(np.uint8)

    pictures = images.reshape(-1, *shape[-3:])
    reach = np.round(config.shift * np.array(shape[-3:-1])).astype(int)
    moves = random.integers(-reach, reach + 1, (len(pictures), 2))
    rows, columns = (
        np.clip(np.arange(side) + moves[:, axis, None], 0, side - 1) for axis, side in enumerate(shape[-3:-1])
    )
    picture = np.arange(len(pictures))[:, None, None]
    return pictures[picture, rows[:, :, None], columns[:, None, :]].reshape(shape)


def answer_weights(counts: torch.Tensor) -> torch.Tensor:
    """Loss weights of words, `1 / count`; words that don't occur get a hundredth of the smallest (as in ORacle).

    Args:
        counts: `(vocabulary,)`: how often each word stands in a training answer.

    Returns:
        float32 `(vocabulary,)`; the mean over the words of the training answers is 1.

    Raises:
        SceneGraphError: no word occurs.
    """
    counts = counts.double()
    seen = counts > 0
    if not bool(seen.any()):
        raise SceneGraphError("no training answer has any word; their frequencies can't be used as weights.")
    weights = torch.where(seen, 1 / counts.clamp(min=1), torch.inf)
    weights = torch.where(seen, weights, weights.min() * UNSEEN_WEIGHT)
    return (weights * counts.sum() / (weights * counts).sum()).float()


class ExampleSampler:
    """Chooses examples among training samples, always from other takes than the query and each other's.

    Args:
        samples: with graphs.
        config: shares of similar and random examples.
        weights: weight of each predicate in the similarity (`triplet_iou`); all 1 by default.
        seed: breaks ties among equally similar graphs, which are many in neighboring frames.

    Raises:
        SceneGraphError: a sample without a graph, or a single take.
    """

    def __init__(
        self, samples: Sequence[Sample], config: ContextConfig, weights: Mapping[str, float] | None, seed: int
    ) -> None:
        missing = next((sample.id for sample in samples if sample.graph is None), None)
        if missing is not None:
            raise SceneGraphError(f"sample {missing} has no labels; training needs them.")
        names = sorted({sample.take for sample in samples})
        if len(names) < 2:
            raise SceneGraphError(f"all samples are of the takes {names}; examples come from other takes, so give 2.")
        self.config = config
        self.takes = np.array([names.index(sample.take) for sample in samples])
        triplets = sorted({triplet for sample in samples for triplet in sample.graph})
        column = {triplet: index for index, triplet in enumerate(triplets)}
        self._weight = np.array([1.0 if weights is None else weights[t.predicate] for t in triplets], np.float32)
        self._has = np.zeros((len(samples), max(1, len(triplets))), np.float32)
        for row, sample in enumerate(samples):
            self._has[row, [column[triplet] for triplet in sample.graph]] = 1
        if not triplets:
            self._weight = np.zeros(1, np.float32)
        self._size = self._has @ self._weight
        self.nearest = self._nearest(np.random.default_rng(derive_seed(seed)))

    def iou(self, rows: np.ndarray | Sequence[int], columns: np.ndarray | Sequence[int] | None = None) -> np.ndarray:
        """Weighted overlap of samples, `(rows, columns)`; columns are all samples by default."""
        columns = np.arange(len(self._has)) if columns is None else np.asarray(columns)
        shared = (self._has[rows] * self._weight) @ self._has[columns].T
        union = self._size[rows][:, None] + self._size[columns] - shared
        # Two empty graphs are equal.
        return np.where(union > 0, shared / np.where(union > 0, union, 1), 1.0)

    def _nearest(self, random: np.random.Generator) -> np.ndarray:
        count = min(self.config.nearest, len(self.takes) - int(np.bincount(self.takes).max()))
        nearest = np.empty((len(self.takes), count), np.int64)
        for start in range(0, len(self.takes), 512):
            rows = np.arange(start, min(start + 512, len(self.takes)))
            score = self.iou(rows) + 1e-4 * random.random((len(rows), len(self.takes)))
            score[self.takes[rows][:, None] == self.takes] = -1
            nearest[rows] = np.argpartition(-score, count - 1, axis=1)[:, :count]
        return nearest

    def draw(self, query: int, count: int, random: np.random.Generator) -> list[int]:
        """Examples for a sample; fewer than `count` if there aren't enough takes."""
        chosen: list[int] = []
        used = {self.takes[query]}
        for _ in range(count):
            options = np.empty(0, np.int64)
            if random.random() < self.config.nearest_share:
                near = self.nearest[query]
                options = near[~np.isin(self.takes[near], list(used))]
            if not len(options):
                options = np.flatnonzero(~np.isin(self.takes, list(used)))
            if not len(options):
                break
            chosen.append(int(options[random.integers(len(options))]))
            used.add(self.takes[chosen[-1]])
        if chosen and random.random() < self.config.ordered_share:
            chosen = [chosen[place] for place in np.argsort(self.iou([query], chosen)[0], kind="stable")]
        return chosen


class _AnswerMethod(TrainingMethod):
    """What both methods share: one role, a loss per batch, and losses of held-out batches."""

    def __init__(
        self,
        model: nn.Module,
        token_weights: torch.Tensor | None,
        validation: Sequence[Mapping[str, torch.Tensor]],
    ) -> None:
        super().__init__()
        self.model, self.validation = model, tuple(validation)
        self.register_buffer("token_weights", token_weights, persistent=False)

    def roles(self) -> dict[str, nn.Module]:
        return {"predictor": self.model}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        loss, metrics = self._loss(batch)
        return StepOutput({"predictor": loss}, metrics)

    def _loss(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        raise NotImplementedError

    def _weighted_loss(
        self, logits: torch.Tensor, words: torch.Tensor, supervised: torch.Tensor, in_context: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weighted mean of the cross-entropy, and its plain means over answers without and with examples.

        Args:
            logits: `(answers, words, vocabulary)`.
            words: `(answers, words)`, that these logits should predict.
            supervised: bool `(answers, words)`.
            in_context: bool `(answers,)`: given with examples.
        """
        losses = F.cross_entropy(logits.float().transpose(1, 2), words, reduction="none")
        weights = supervised.float()
        if self.token_weights is not None:
            weights = weights * self.token_weights[words]
        loss = (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
        metrics = {}
        for name, answers in (("zero_shot", ~in_context), ("in_context", in_context)):
            counted = supervised & answers[:, None]
            metrics[f"{name}_loss"] = (losses.detach() * counted).sum() / counted.sum().clamp(min=1)
        return loss, metrics

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean loss over the validation batches: of all answers as trained, and of those without and with examples."""
        device, rows = next(self.model.parameters()).device, []
        for batch in self.validation:
            loss, metrics = self._loss({name: value.to(device) for name, value in batch.items()})
            rows.append({"loss": float(loss), **{name: float(value) for name, value in metrics.items()}})
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} if rows else {}


# --- the tiny model ----------------------------------------------------------------------------------------------


class TinySGGBatches:
    """Training sequences of a [`TinySGGModel`], as `fit` asks for them.

    Each row has as many scenes as the model reads, in one of two ways with the same cost: a query after its examples,
    where every scene is trained with those before it as context, or scenes that don't see each other. So a model
    without examples is trained with the same compute and the same number of answers.

    Args:
        samples: with graphs; their pictures are read once, at the start.
        vocabulary: puts canonical names into the graphs.
        model: whose words and sizes are used.
        config: how examples are chosen; `max_examples` isn't used, the model has its own.
        augmentation: changes of pictures; `None` for none.
        shuffled: predicates that swap names in part of the sequences: usually the rare ones.
        weights: of predicates, in the similarity of graphs.
        queries: rows of the samples that are asked, by default all; the others are examples only.
        seed: fixes the draws.

    Raises:
        SceneGraphError: see `ExampleSampler`; a graph too large for the model, or a `zero_shot_share` below what
            sequences of this length have anyway.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        vocabulary: Vocabulary,
        model: TinySGGModel,
        config: ContextConfig | None = None,
        augmentation: AugmentConfig | None = None,
        shuffled: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
        queries: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        config = config or ContextConfig()
        self.seed, self.config, self.augmentation = seed, config, augmentation
        self.scenes = model.config.max_examples + 1
        self.num_words = model.num_words
        unknown = [name for name in shuffled if name not in vocabulary.predicates]
        if unknown:
            raise SceneGraphError(f"shuffled={tuple(shuffled)}: {unknown[0]!r} is no predicate of the vocabulary.")
        self.shuffled = np.array(
            [model.first_predicate + vocabulary.predicates.index(name) for name in shuffled], np.int64
        )
        self.shuffle_share = config.symbol_shuffle if len(shuffled) > 1 else 0.0
        self.isolated_share = self._isolated_share()
        self.words = []
        for sample in samples:
            if sample.graph is None:
                raise SceneGraphError(f"sample {sample.id} has no labels; training needs them.")
            graph, _ = vocabulary.normalize(sample.graph, strict=True)
            try:
                self.words.append(np.array([START, *model.triplet_words(model.sorted_triplets(graph)), END]))
            except SceneGraphError as error:
                raise SceneGraphError(f"sample {sample.id}: {error}") from error
        self.queries = np.arange(len(self.words)) if queries is None else np.asarray(queries)
        self.sampler = None
        if self.isolated_share < 1:  # without examples no other take is needed
            takes = {sample.take for sample in samples}
            if len(takes) < self.scenes:
                raise SceneGraphError(
                    f"the samples are of {len(takes)} takes; sequences of {self.scenes} scenes, each of another take, "
                    "need as many."
                )
            self.sampler = ExampleSampler(samples, config, weights, seed)
        loaded = [load_views(sample, model.config.image_size, model.config.num_views) for sample in samples]
        self.images = np.stack([images for images, _ in loaded])
        self.view_mask = np.stack([mask for _, mask in loaded])

    def _isolated_share(self) -> float:
        """Share f of rows without context that gives the wanted share z of answers without examples.

        A row without context has S such answers, one with context 1, or none if its names are swapped (a share s):
        the first of such a row can't know the names.
        """
        wanted, swapped, scenes = self.config.zero_shot_share, self.shuffle_share, self.scenes
        if scenes == 1 or wanted == 1:
            return 1.0
        excess = wanted * (scenes - swapped) - (1 - swapped)
        if excess < 0:
            raise SceneGraphError(
                f"zero_shot_share={wanted}; of sequences of {scenes} scenes it is at least "
                f"{(1 - swapped) / (scenes - swapped):.3f}, as every first scene has no examples."
            )
        return excess / (scenes * (1 - wanted) + excess)

    def word_counts(self) -> torch.Tensor:
        """How often each word stands in an answer, `(vocabulary,)`, for `answer_weights`."""
        words = np.concatenate([words[1:] for words in self.words])
        return torch.from_numpy(np.bincount(words, minlength=self.num_words))

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        """Batch of a step.

        Returns:
            `images` uint8 `(batch, scenes, views, height, width, 3)`, `view_mask` bool `(batch, scenes, views)`,
            `words` int64 `(batch, scenes, words)`, `isolated` bool `(batch,)` as the model takes them, and
            `supervised` bool, of the shape of `words`: which words are to be predicted.
        """
        random = np.random.default_rng(derive_seed(self.seed, step, rank))
        isolated = random.random(batch_size) < self.isolated_share
        rows, texts, masks = [], [], []
        for is_isolated in isolated:
            chosen = self.queries[random.integers(len(self.queries), size=self.scenes)]
            if not is_isolated:
                chosen[:-1] = self.sampler.draw(int(chosen[-1]), self.scenes - 1, random)
            words = [self.words[index] for index in chosen]
            supervised = [np.arange(len(text)) > 0 for text in words]
            if not is_isolated and random.random() < self.shuffle_share:
                words, supervised = self._swap_names(words, supervised, random)
            rows.append(chosen)
            texts.append(words)
            masks.append(supervised)

        length = max(len(text) for row in texts for text in row)
        padded = np.full((batch_size, self.scenes, length), PAD, np.int64)
        supervised = np.zeros(padded.shape, bool)
        for row in range(batch_size):
            for scene, (text, mask) in enumerate(zip(texts[row], masks[row])):
                padded[row, scene, : len(text)] = text
                supervised[row, scene, : len(text)] = mask
        chosen = np.stack(rows)
        images, view_mask = self.images[chosen], self.view_mask[chosen]
        if self.augmentation is not None:
            images = augment(images, self.augmentation, random)
            view_mask[random.random(view_mask.shape[:2]) < self.augmentation.drop_views, 1:] = False
        arrays = {
            "images": images,
            "view_mask": view_mask,
            "words": padded,
            "isolated": isolated,
            "supervised": supervised,
        }
        return {name: torch.from_numpy(value) for name, value in arrays.items()}

    def _swap_names(
        self, words: list[np.ndarray], supervised: list[np.ndarray], random: np.random.Generator
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Renames predicates in all scenes of a row; names that nothing before them shows are not trained."""
        renamed = np.arange(self.num_words)
        renamed[self.shuffled] = random.permutation(self.shuffled)
        shown: set[int] = set()
        masks = []
        for scene, text in enumerate(words):
            unknown = np.isin(text, self.shuffled) & ~np.isin(text, list(shown))
            masks.append(supervised[scene] & ~unknown & (scene > 0))
            shown |= set(text[np.isin(text, self.shuffled)].tolist())
        return [renamed[text] for text in words], masks


class TinySGGMethod(_AnswerMethod):
    """Next-word prediction of scene graphs; role `predictor`.

    Args:
        model: to train.
        vocabulary: saved with the model.
        token_weights: loss weight of each word, `answer_weights`; `None` weighs all alike.
        validation: batches of held-out samples, whose losses are measured.
    """

    def __init__(
        self,
        model: TinySGGModel,
        vocabulary: Vocabulary,
        token_weights: torch.Tensor | None = None,
        validation: Sequence[Mapping[str, torch.Tensor]] = (),
    ) -> None:
        super().__init__(model, token_weights, validation)
        self.vocabulary = vocabulary

    def _loss(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        words, isolated = batch["words"], batch["isolated"]
        logits = self.model(batch["images"], batch["view_mask"], words, isolated).logits
        in_context = ~isolated[:, None] & (torch.arange(words.shape[1], device=words.device) > 0)
        # Word t + 1 is predicted at word t.
        return self._weighted_loss(
            logits[:, :, :-1].flatten(0, 1),
            words[:, :, 1:].flatten(0, 1),
            batch["supervised"][:, :, 1:].flatten(0, 1),
            in_context.flatten(),
        )

    def save_pretrained(self, directory: str | os.PathLike, ema_roles: dict[str, nn.Module]) -> None:
        TinyPredictor(ema_roles["predictor"], self.vocabulary).save_pretrained(Path(directory) / "predictor")


# --- multimodal language models ----------------------------------------------------------------------------------


class HFSGGBatches:
    """Training chats for a multimodal language model, as `fit` asks for them.

    Triplets of an answer and the views of a query are in another order each time: a graph is a set, and a camera has
    no number (ORacle, arXiv 2404.07031).

    Args:
        samples: with graphs; pictures are read when they are needed.
        processor: of the model.
        prompt: how the model is asked.
        config: how examples are chosen.
        shuffled: predicates that swap names in part of the prompts, where the examples show all those of the answer.
        weights: of predicates, in the similarity of graphs.
        memory_dropout: share of the queries that are asked without their memory.
        seed: fixes the draws.

    Raises:
        SceneGraphError: see `ExampleSampler`.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        processor: Any,
        prompt: SGGPromptBuilder,
        config: ContextConfig | None = None,
        shuffled: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
        memory_dropout: float = 0.5,
        seed: int = 0,
    ) -> None:
        self.samples, self.processor, self.prompt, self.seed = list(samples), processor, prompt, seed
        self.config, self.shuffled, self.memory_dropout = config or ContextConfig(), tuple(shuffled), memory_dropout
        missing = next((sample.id for sample in samples if sample.graph is None), None)
        if missing is not None:
            raise SceneGraphError(f"sample {missing} has no labels; training needs them.")
        self.graphs = [prompt.vocabulary.normalize(sample.graph, strict=True)[0] for sample in self.samples]
        self.sampler = (
            None if self.config.zero_shot_share == 1 else ExampleSampler(self.samples, self.config, weights, seed)
        )

    @property
    def max_triplets(self) -> int:
        """Triplets of the largest graph."""
        return max(len(graph) for graph in self.graphs)

    def word_counts(self) -> torch.Tensor:
        """How often each token stands in an answer, for `answer_weights`; as long as the tokenizer's vocabulary."""
        tokenizer = self.processor.tokenizer
        ids = tokenizer([format_triplet_text(graph) for graph in self.graphs], add_special_tokens=False)["input_ids"]
        counts = torch.bincount(torch.tensor([token for row in ids for token in row]), minlength=len(tokenizer))
        for token in eos_ids(self.processor):
            counts[token] += len(ids)
        return counts

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        """Batch of a step: what the processor returns, padded on the right, `labels`, and `in_context`, bool
        `(batch,)`: which prompts have examples."""
        random = np.random.default_rng(derive_seed(self.seed, step, rank))
        chosen = random.integers(len(self.samples), size=batch_size)
        chats, counts = [], []
        for index in chosen:
            sample, examples, answer = self.prompt_of(int(index), random)
            chats.append(self.prompt.messages(sample, examples, answer))
            counts.append(len(examples))
        encoded = encode_chats(self.processor, chats, [self.samples[i].id for i in chosen], for_generation=False)
        encoded["labels"] = answer_labels(self.processor, chats, encoded)
        encoded["in_context"] = torch.tensor(counts) > 0
        return encoded

    def prompt_of(self, index: int, random: np.random.Generator) -> tuple[Sample, list[Example], list[Triplet]]:
        """A training prompt of a sample: the query, its examples, and the answer's triplets in their order."""
        sample = self.samples[index]
        order = random.permutation(len(sample.views))
        sample = dataclasses.replace(
            sample,
            views=tuple(sample.views[view] for view in order),
            view_names=tuple(sample.view_names[view] for view in order),
            primary=int(np.flatnonzero(order == sample.primary)[0]),
            memory=None if random.random() < self.memory_dropout else sample.memory,
        )
        rows: list[int] = []
        if random.random() >= self.config.zero_shot_share:
            rows = self.sampler.draw(index, int(random.integers(1, self.config.max_examples + 1)), random)
        graphs = [self.graphs[row] for row in [*rows, index]]
        if rows and random.random() < self.config.symbol_shuffle:
            graphs = self._swap_names(graphs, random)
        examples = [
            Example(self.samples[row], graph, score)
            for row, graph, score in zip(rows, graphs, range(len(rows)))  # scores that keep the order
        ]
        answer = graphs[-1].sorted()
        return sample, examples, [answer[place] for place in random.permutation(len(answer))]

    def _swap_names(self, graphs: list[SceneGraph], random: np.random.Generator) -> list[SceneGraph]:
        """Renames predicates in examples and answer alike, if the examples show all those the answer needs."""
        shown = {predicate for graph in graphs[:-1] for predicate in graph.predicates}
        if set(graphs[-1].predicates) & set(self.shuffled) - shown:
            return graphs
        renamed = dict(zip(self.shuffled, random.permutation(np.array(self.shuffled, dtype=object))))
        return [
            SceneGraph([dataclasses.replace(t, predicate=renamed.get(t.predicate, t.predicate)) for t in graph])
            for graph in graphs
        ]


class HFSGGMethod(_AnswerMethod):
    """Supervised fine-tuning of a multimodal language model on its answers alone; role `predictor`.

    Args:
        model: of transformers, or what `add_lora` made of one.
        processor: saved with the model.
        prompt: saved with the model.
        max_triplets: of a training graph, `HFSGGBatches.max_triplets`; saved with the model.
        token_weights: loss weight of each token, `answer_weights`; `None` weighs all alike.
        validation: batches of held-out samples, whose loss is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        prompt: SGGPromptBuilder,
        max_triplets: int = 30,
        token_weights: torch.Tensor | None = None,
        validation: Sequence[Mapping[str, torch.Tensor]] = (),
    ) -> None:
        super().__init__(model, token_weights, validation)
        self.processor, self.prompt, self.max_triplets = processor, prompt, max_triplets

    def _loss(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        labels = batch["labels"]
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "in_context")}
        # Logits of 150,000 words at every token of a long prompt don't fit; those before the first answer aren't used.
        answers = labels[:, int((labels != -100).any(dim=0).float().argmax()) :]
        kept = answers.shape[1] + 1
        logits = self.model(**inputs, use_cache=False, **keep_last_logits(self.model, kept)).logits
        return self._weighted_loss(logits[:, -kept:-1], answers.clamp(min=0), answers != -100, batch["in_context"])

    def save_pretrained(self, directory: str | os.PathLike, ema_roles: dict[str, nn.Module]) -> None:
        predictor = HFSceneGraphPredictor(
            ema_roles["predictor"], self.processor, self.prompt.vocabulary, self.prompt, self.max_triplets
        )
        predictor.save_pretrained(Path(directory) / "predictor")
