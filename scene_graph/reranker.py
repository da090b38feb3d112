"""Which candidates to show as examples: rerankers trained on the overlap of annotated triplets.

SGG-ICL supervises its reranker with the IoU of the triplets of query and candidate; loss and batches aren't public and
are filled in here. Two rerankers give the same kind of score, in [0, 1]:

- `MLLMReranker` asks a multimodal language model whether two scenes show the same relations, and reads the probability
  of "yes" (as LamRA, arXiv 2412.01720, and Qwen3-VL-Reranker do);
- `TinyReranker` compares the views that show most with a small Siamese network, and trains on a CPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from PIL import Image
from torch import nn

from scene_graph.formats import format_triplet_text
from scene_graph.methods import AugmentConfig, ContextConfig, ExampleSampler, augment
from scene_graph.metrics import ndcg_at_k
from scene_graph.predictors.base import Example, saved_class
from scene_graph.predictors.hf import encode_chats, keep_last_logits, scene_graph_extra
from scene_graph.predictors.tiny import load_views
from scene_graph.prompting import EXAMPLE_VIEWS, Message
from scene_graph.retrieval import Candidate
from scene_graph.schema import Sample, SceneGraph, SceneGraphError, TailSplit, triplet_iou
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.device import derive_seed, select_device, select_dtype
from vidgen.runtime.errors import suggestion
from vidgen.train import StepOutput, TrainingMethod

SETTINGS_NAME = "reranker.json"
# Pairs whose overlaps differ by less are not ordered by the pairwise loss.
PAIRWISE_MARGIN = 0.1
ANSWERS = ("yes", "no")


class Reranker(Protocol):
    """Judges how well candidates would do as examples for a query."""

    def score(self, query: Sample, draft: SceneGraph | None, candidates: Sequence[Candidate]) -> np.ndarray:
        """How well each candidate's labels would fit the query, float64 `(candidates,)`; higher is better."""
        ...

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write what `load_reranker` reads."""
        ...


def load_reranker(folder: str | os.PathLike, device: str | None = None) -> TinyReranker | MLLMReranker:
    """Load a reranker of any kind from what its `save_pretrained` wrote.

    Args:
        folder: of the reranker.
        device: as `vidgen.runtime.device.select_device` reads it.

    Raises:
        SceneGraphError: the folder holds no reranker.
    """
    if saved_class(folder, "reranker") == TinyReranker.__name__:
        return TinyReranker.from_pretrained(folder, low_cpu_mem_usage=False).to(select_device(device)).eval()
    return MLLMReranker.from_pretrained(folder, device=device)


class OracleReranker:
    """Scores by the labels of the query itself: what a perfect reranker could do, for comparison only.

    Args:
        weights: of predicates, for `triplet_iou`.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = weights

    def score(self, query: Sample, draft: SceneGraph | None, candidates: Sequence[Candidate]) -> np.ndarray:
        """IoU with the query's labels.

        Raises:
            SceneGraphError: the query has no labels.
        """
        return _relevance(query, candidates, self.weights)


def select_examples(
    candidates: Sequence[Candidate],
    scores: Sequence[float] | np.ndarray,
    k: int = 3,
    mmr_lambda: float = 0.0,
    min_score: float | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[Example]:
    """Choose examples one by one: each time the candidate with the largest `score - lambda * likeness`.

    Likeness is the largest IoU with the graph of an example already chosen (maximal marginal relevance, Carbonell and
    Goldstein, SIGIR 1998).

    Args:
        candidates: in any order.
        scores: one for each; higher is better.
        k: most examples.
        mmr_lambda: weight of the likeness; 0 takes the best scores.
        min_score: candidates below it aren't chosen.
        weights: of predicates, for `triplet_iou`.

    Returns:
        The examples, the best score last, as prompts want them.

    Raises:
        SceneGraphError: not one score for each candidate, or a score that is no number.
    """
    scores = np.asarray(scores, np.float64)
    if scores.shape != (len(candidates),) or np.isnan(scores).any():
        raise SceneGraphError(f"scores {scores} for {len(candidates)} candidates; give one number for each.")
    free = [row for row in range(len(candidates)) if min_score is None or scores[row] >= min_score]
    likeness = np.zeros(len(candidates))
    chosen: list[int] = []
    while free and len(chosen) < k:
        best = max(free, key=lambda row: scores[row] - mmr_lambda * likeness[row])  # the first of equals
        chosen.append(best)
        free.remove(best)
        if mmr_lambda:
            for row in free:
                iou = triplet_iou(candidates[best].graph, candidates[row].graph, weights)
                likeness[row] = max(likeness[row], iou)
    # Of equal scores the one that was chosen first comes last.
    ordered = sorted(reversed(chosen), key=lambda row: scores[row])
    return [Example(candidates[row].sample, candidates[row].graph, float(scores[row])) for row in ordered]


def evaluate_reranker(
    reranker: Reranker,
    queries: Sequence[Sample],
    drafts: Sequence[SceneGraph | None],
    candidates: Sequence[Sequence[Candidate]],
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """How well a reranker orders the pools of labeled queries.

    Args:
        reranker: to be measured.
        queries: with graphs.
        drafts: of these.
        candidates: of these, at least one each.
        weights: of predicates, for `triplet_iou`.

    Returns:
        Means over the queries: `iou_at_1` of the best-scored candidate, `best_iou` that the pool has, `ndcg_at_3`,
        and `spearman`, the correlation of the ranks of score and IoU within a pool, where the IoUs differ.

    Raises:
        SceneGraphError: no queries, one without labels or without candidates.
    """
    rows = []
    for query, draft, pool in zip(queries, drafts, candidates, strict=True):
        if not pool:
            raise SceneGraphError(f"sample {query.id} has no candidates to order.")
        rows.append((_relevance(query, pool, weights), np.asarray(reranker.score(query, draft, pool), np.float64)))
    return ranking_quality(rows)


def ranking_quality(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """As `evaluate_reranker`, of the IoUs and scores of each pool, `(candidates,)` both."""
    if not rows:
        raise SceneGraphError("no queries were given; there is no ranking to judge.")
    correlations = [_spearman(iou, score) for iou, score in rows if np.ptp(iou) > 0]
    return {
        "iou_at_1": float(np.mean([iou[np.argmax(score)] for iou, score in rows])),
        "best_iou": float(np.mean([iou.max() for iou, _ in rows])),
        "ndcg_at_3": float(np.mean([ndcg_at_k(iou, score, 3) for iou, score in rows])),
        "spearman": float(np.mean(correlations)) if correlations else 0.0,
    }


def _relevance(query: Sample, candidates: Sequence[Candidate], weights: Mapping[str, float] | None) -> np.ndarray:
    if query.graph is None:
        raise SceneGraphError(f"sample {query.id} has no labels to compare candidates with.")
    return np.array([triplet_iou(query.graph, candidate.graph, weights) for candidate in candidates])


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of ranks, equal values sharing theirs; 0 if either is constant."""
    ranks = []
    for values in (a, b):
        _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((sizes.cumsum() - (sizes - 1) / 2)[group])
    if np.ptp(ranks[0]) == 0 or np.ptp(ranks[1]) == 0:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


# --- losses ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RerankerConfig:
    """What a reranker is trained on, and by which losses between scores and IoUs.

    With z the logits of the candidates of a query, rho their sigmoid and u the IoUs:

    Attributes:
        bce: weight of `-[u log rho + (1 - u) log(1 - rho)]`, for the scale of the score.
        listwise: weight of `KL(softmax(u / tau) || softmax(z))` over the candidates of a query, for their order.
        pairwise: weight of `log(1 + exp(-(z_i - z_j)))` over pairs with `u_i - u_j > 0.1` (RankNet).
        mse: weight of `(rho - u)^2`.
        tau: temperature of the IoUs in the listwise loss.
        candidates: per query: one that is among the most similar, two at random, and all others of different rare
            predicates.
        tail_share: share of the queries with a rare predicate; the others are drawn from all frames.
        nearest: how many frames count as most similar.
    """

    bce: float = 1.0
    listwise: float = 0.5
    pairwise: float = 0.0
    mse: float = 0.0
    tau: float = 0.1
    candidates: int = 8
    tail_share: float = 0.75
    nearest: int = 12

    def __post_init__(self) -> None:
        weights = (self.bce, self.listwise, self.pairwise, self.mse)
        if min(weights) < 0 or not sum(weights) or self.tau <= 0:
            raise SceneGraphError(
                f"bce={self.bce}, listwise={self.listwise}, pairwise={self.pairwise}, mse={self.mse}, tau={self.tau}; "
                "allowed: weights of at least 0, one of them positive, and a positive tau."
            )
        if self.candidates < 4 or not 0 <= self.tail_share <= 1 or self.nearest < 1:
            raise SceneGraphError(
                f"candidates={self.candidates}, tail_share={self.tail_share}, nearest={self.nearest}; allowed: at "
                "least 4, in [0, 1], at least 1."
            )


def reranker_loss(
    logits: torch.Tensor, relevance: torch.Tensor, config: RerankerConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted sum of the losses, and those with a weight by name.

    Args:
        logits: `(queries, candidates)`.
        relevance: IoUs in [0, 1], of the same shape.
        config: their weights.
    """
    logits, relevance = logits.float(), relevance.float()
    losses = {}
    if config.bce:
        losses["bce"] = F.binary_cross_entropy_with_logits(logits, relevance)
    if config.listwise:
        wanted = (relevance / config.tau).log_softmax(dim=1)
        losses["listwise"] = F.kl_div(logits.log_softmax(dim=1), wanted, reduction="batchmean", log_target=True)
    if config.pairwise:
        better = relevance[:, :, None] - relevance[:, None, :] > PAIRWISE_MARGIN  # (Q, C, C): i before j
        losses["pairwise"] = (F.softplus(logits[:, None, :] - logits[:, :, None]) * better).sum() / better.sum().clamp(
            min=1
        )
    if config.mse:
        losses["mse"] = F.mse_loss(logits.sigmoid(), relevance)
    total = sum(getattr(config, name) * loss for name, loss in losses.items())
    return total, {name: loss.detach() for name, loss in losses.items()}


# --- batches -----------------------------------------------------------------------------------------------------


class PairSampler:
    """Draws queries with candidates from other takes, and knows their IoUs.

    Args:
        samples: with graphs.
        tail_split: which predicates are rare.
        config: which pairs.
        weights: of predicates, in the IoU.
        seed: breaks ties among equally similar graphs.

    Raises:
        SceneGraphError: a sample without a graph, a single take, or no frame with a rare predicate.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        tail_split: TailSplit,
        config: RerankerConfig,
        weights: Mapping[str, float] | None,
        seed: int,
    ) -> None:
        self.config = config
        self._sampler = ExampleSampler(samples, ContextConfig(nearest=config.nearest), weights, seed)
        self.takes, self._nearest = self._sampler.takes, self._sampler.nearest
        rows = {
            name: np.array(
                [row for row, sample in enumerate(samples) if name in sample.graph.predicates], dtype=np.int64
            )
            for name in tail_split.tail
        }
        self._with_predicate = {name: found for name, found in rows.items() if len(found)}
        if not self._with_predicate:
            raise SceneGraphError(
                f"none of the {len(samples)} samples has a rare predicate ({', '.join(tail_split.tail)}); a reranker "
                "is trained to tell these apart."
            )
        self._tail = np.unique(np.concatenate(list(self._with_predicate.values())))

    def draw(self, queries: int, random: np.random.Generator) -> np.ndarray:
        """Rows of the samples, int64 `(queries, 1 + candidates)`: each query, then its candidates in random order."""
        rows = np.empty((queries, 1 + self.config.candidates), np.int64)
        for place in range(queries):
            is_tail = random.random() < self.config.tail_share
            query = int(random.choice(self._tail)) if is_tail else int(random.integers(len(self.takes)))
            chosen = [int(random.choice(self._nearest[query]))]
            names = list(self._with_predicate)
            for index in random.permutation(len(names)):
                options = self._with_predicate[names[index]]
                options = options[self.takes[options] != self.takes[query]]
                if len(options) and len(chosen) < self.config.candidates - 2:
                    chosen.append(int(random.choice(options)))
            others = np.flatnonzero(self.takes != self.takes[query])
            chosen += random.choice(others, self.config.candidates - len(chosen)).tolist()
            rows[place] = query, *random.permutation(chosen)
        return rows

    def relevance(self, rows: np.ndarray) -> np.ndarray:
        """IoU of each query with its candidates, float32 `(queries, candidates)`."""
        return np.stack([self._sampler.iou(row[:1], row[1:])[0] for row in rows]).astype(np.float32)


class TinyRerankerBatches:
    """Queries with candidates for a [`TinyReranker`], as `fit` asks for them; a sample of `fit` is a query.

    Args:
        samples: with graphs; their primary views are read once, at the start.
        model: whose image size is used.
        tail_split: which predicates are rare.
        config: which pairs.
        augmentation: changes of pictures, the same brightness and color for a query and its candidates; `None` for
            none.
        weights: of predicates, in the IoU.
        seed: fixes the draws.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        model: TinyReranker,
        tail_split: TailSplit,
        config: RerankerConfig | None = None,
        augmentation: AugmentConfig | None = None,
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.sampler = PairSampler(samples, tail_split, config or RerankerConfig(), weights, seed)
        self.augmentation, self.seed = augmentation, seed
        self.images = np.stack([load_views(sample, model.config.image_size, 1)[0][0] for sample in samples])

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        """`images` uint8 `(queries, 1 + candidates, height, width, 3)` and `relevance` `(queries, candidates)`."""
        random = np.random.default_rng(derive_seed(self.seed, step, rank))
        rows = self.sampler.draw(batch_size, random)
        images = self.images[rows]
        if self.augmentation is not None:
            images = augment(images, self.augmentation, random)
        return {"images": torch.from_numpy(images), "relevance": torch.from_numpy(self.sampler.relevance(rows))}


# --- the tiny reranker -------------------------------------------------------------------------------------------


class TinyReranker(ModelMixin, ConfigMixin):
    """A Siamese comparison of two pictures at a fine grid: do they show the same tools at work?

    The coarse tokens of the tiny predictor don't tell tools apart; this stem keeps a cell per 8 pixels. What stands
    out is pooled, by attention maps and by maxima, so that it doesn't matter where it is.

    Args:
        image_size: side of a picture in pixels, a multiple of 8.
        channels: of the stem, a multiple of 16.
        num_maps: attention maps that pool.
        hidden_size: of the comparing network.

    Raises:
        SceneGraphError: a size that isn't possible.
    """

    @register_to_config
    def __init__(self, image_size: int = 64, channels: int = 96, num_maps: int = 2, hidden_size: int = 128) -> None:
        super().__init__()
        if image_size < 8 or image_size % 8 or channels < 16 or channels % 16:
            raise SceneGraphError(
                f"image_size={image_size}, channels={channels}; allowed: multiples of 8 and of 16, not 0."
            )
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels // 2, 4, stride=4),
            nn.GroupNorm(8, channels // 2),
            nn.GELU(approximate="tanh"),
            nn.Conv2d(channels // 2, channels, 3, stride=2, padding=1),
            nn.GroupNorm(8, channels),
            nn.GELU(approximate="tanh"),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
            nn.GELU(approximate="tanh"),
        )
        self.saliency = nn.Conv2d(channels, num_maps, 1)
        self.norm = nn.BatchNorm1d((num_maps + 1) * channels)
        self.compare = nn.Sequential(
            nn.Linear(2 * (num_maps + 1) * channels, hidden_size),
            nn.GELU(approximate="tanh"),
            nn.Linear(hidden_size, 1),
        )
        self.cosine_scale = nn.Parameter(torch.tensor(4.0))

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Vectors of pictures, uint8 `(…, height, width, 3)` to `(…, dim)`."""
        pixels = images.flatten(0, -4).permute(0, 3, 1, 2).to(self.cosine_scale.dtype) / 127.5 - 1
        features = self.stem(pixels)  # (N, C, H/8, W/8)
        maps = self.saliency(features).flatten(2).softmax(dim=2)  # (N, M, cells)
        cells = features.flatten(2)  # (N, C, cells)
        pooled = torch.cat([(maps @ cells.transpose(1, 2)).flatten(1), cells.amax(dim=2)], dim=1)
        return self.norm(pooled).unflatten(0, images.shape[:-3])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of each query and its candidates.

        Args:
            images: uint8 `(queries, 1 + candidates, height, width, 3)`, the query first.

        Returns:
            `(queries, candidates)`.
        """
        vectors = self.encode(images)
        query, candidates = vectors[:, :1].expand_as(vectors[:, 1:]), vectors[:, 1:]
        compared = torch.cat([query * candidates, (query - candidates).abs()], dim=-1)
        cosine = F.cosine_similarity(query, candidates, dim=-1)
        return self.compare(compared)[..., 0] + self.cosine_scale * cosine

    @torch.no_grad()
    def score(self, query: Sample, draft: SceneGraph | None, candidates: Sequence[Candidate]) -> np.ndarray:
        """As [`Reranker.score`]: the sigmoid of the logits. Graphs aren't looked at, pictures alone."""
        if not candidates:
            return np.empty(0)
        samples = [query, *(candidate.sample for candidate in candidates)]
        images = np.stack([load_views(sample, self.config.image_size, 1)[0][0] for sample in samples])
        was_training = self.training
        self.eval()
        logits = self(torch.from_numpy(images)[None].to(self.device))[0]
        self.train(was_training)
        return logits.double().sigmoid().cpu().numpy()


class TinyRerankerMethod(TrainingMethod):
    """Training of a [`TinyReranker`] on IoUs; role `reranker`.

    Small rerankers over-fit, so the weights with the best IoU of the first candidate on held-out pools are kept, where
    there are such pools, and saved instead of the last ones.

    Args:
        model: to train.
        config: losses.
        validation: held-out queries with their candidates.
        weights: of predicates, in the IoU of the validation.
    """

    def __init__(
        self,
        model: TinyReranker,
        config: RerankerConfig | None = None,
        validation: Sequence[tuple[Sample, Sequence[Candidate]]] = (),
        weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.config = model, config or RerankerConfig()
        self._pools = [
            (
                np.stack(
                    [load_views(sample, model.config.image_size, 1)[0][0]
                     for sample in (query, *(candidate.sample for candidate in pool))]
                ),
                _relevance(query, pool, weights),
            )
            for query, pool in validation
        ]  # fmt: skip
        self._best_score = -1.0
        self._best: dict[str, torch.Tensor] = {}

    def roles(self) -> dict[str, nn.Module]:
        return {"reranker": self.model}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        logits = self.model(batch["images"])
        loss, parts = reranker_loss(logits, batch["relevance"], self.config)
        first = batch["relevance"].gather(1, logits.detach().argmax(dim=1, keepdim=True))
        return StepOutput({"reranker": loss}, {**parts, "iou_at_1": first.mean()})

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """`ranking_quality` on the held-out pools; keeps the weights if they are the best so far."""
        if not self._pools:
            return {}
        rows = []
        for images, relevance in self._pools:
            logits = self.model(torch.from_numpy(images)[None].to(self.model.device))[0]
            rows.append((relevance, logits.double().cpu().numpy()))
        quality = ranking_quality(rows)
        if quality["iou_at_1"] > self._best_score:
            self._best_score = quality["iou_at_1"]
            self._best = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        return {**quality, "best_iou_at_1": self._best_score}

    def extra_state(self) -> dict[str, Any]:
        return {"best_score": self._best_score, **{f"best.{name}": value for name, value in self._best.items()}}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self._best_score = state["best_score"]
        self._best = {name[5:]: value for name, value in state.items() if name.startswith("best.")}

    def save_pretrained(self, directory: str | os.PathLike, ema_roles: dict[str, nn.Module]) -> None:
        model = ema_roles["reranker"]
        if self._best:
            model = TinyReranker.from_config(model.config)
            model.load_state_dict(self._best)
        model.save_pretrained(Path(directory) / "reranker")


# --- multimodal language models ----------------------------------------------------------------------------------


class RerankerPrompt:
    """The chat that asks whether two scenes show the same relations.

    Instruction, query and document are marked as in the prompts of Qwen3-VL-Reranker, which can be the base model.

    Args:
        candidate_views: pictures of a candidate: its primary view, or all; a query always has all.

    Raises:
        SceneGraphError: an unknown value.
    """

    def __init__(self, candidate_views: Literal["primary", "all"] = "primary") -> None:
        if candidate_views not in EXAMPLE_VIEWS:
            raise SceneGraphError(
                f"candidate_views={candidate_views!r}: {suggestion(candidate_views, EXAMPLE_VIEWS)}."
            )
        self.candidate_views = candidate_views

    def messages(self, query: Sample, draft: SceneGraph | None, candidate: Sample, graph: SceneGraph) -> list[Message]:
        """The chat for a pair.

        Args:
            query: its views are shown.
            draft: what is believed of the query, if anything.
            candidate: its views are shown.
            graph: the candidate's labels.
        """
        shown = [candidate.primary] if self.candidate_views == "primary" else range(len(candidate.views))
        believed = f"Perhaps: {format_triplet_text(draft)}\n" if draft is not None else ""
        content = [
            _text(
                "<Instruct>: Decide whether the operating room of the document shows the same relations between "
                "people and things as that of the query, above all the same rare actions.\n<Query>: "
            ),
            *(_picture(query, view) for view in range(len(query.views))),
            _text(f"{believed}\n<Document>: "),
            *(_picture(candidate, view) for view in shown),
            _text(format_triplet_text(graph)),
        ]
        rule = f"You compare two scenes of operating rooms. Your answer is one word, {' or '.join(ANSWERS)}."
        return [{"role": "system", "content": [_text(rule)]}, {"role": "user", "content": content}]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _picture(sample: Sample, view: int) -> dict[str, Any]:
    return {"type": "image", "image": Image.fromarray(sample.image(view))}


def answer_tokens(processor: Any) -> tuple[int, int]:
    """The tokens of "yes" and "no".

    Raises:
        SceneGraphError: one of them is not a single token.
    """
    ids = {word: processor.tokenizer(word, add_special_tokens=False)["input_ids"] for word in ANSWERS}
    for word, tokens in ids.items():
        if len(tokens) != 1:
            parts = processor.tokenizer.convert_ids_to_tokens(tokens)
            raise SceneGraphError(
                f"{word!r} is {len(tokens)} tokens to {type(processor.tokenizer).__name__}: {parts}; a reranker needs "
                f"models for which {' and '.join(ANSWERS)} are one token each."
            )
    return ids["yes"][0], ids["no"][0]


def answer_logits(model: nn.Module, inputs: Mapping[str, torch.Tensor], tokens: tuple[int, int]) -> torch.Tensor:
    """How much more likely "yes" is than "no" as the next word, as a logit.

    The softmax over the two words is the sigmoid of their difference.

    Args:
        model: of transformers.
        inputs: left-padded chats that ask for an answer.
        tokens: of yes and no.

    Returns:
        float32 `(chats,)`.
    """
    logits = model(**inputs, use_cache=False, **keep_last_logits(model, 1)).logits[:, -1].float()
    return logits[:, tokens[0]] - logits[:, tokens[1]]


class MLLMReranker:
    """The probability that a multimodal language model says "yes" to a pair of scenes.

    Args:
        model: of transformers, or of peft around one.
        processor: its processor, with a chat template.
        prompt: how it is asked.
        batch_size: pairs that go through the model together.

    Raises:
        SceneGraphError: the processor has no chat template, or "yes" or "no" isn't one token.
    """

    def __init__(
        self, model: nn.Module, processor: Any, prompt: RerankerPrompt | None = None, batch_size: int = 8
    ) -> None:
        if getattr(processor, "chat_template", None) is None:
            raise SceneGraphError(
                f"{type(processor).__name__} has no chat template; use the processor of an instruction-tuned model."
            )
        self.tokens = answer_tokens(processor)
        self.model, self.processor, self.prompt = model.eval(), processor, prompt or RerankerPrompt()
        self.batch_size = batch_size

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike,
        device: str | None = None,
        dtype: str | None = None,
        attn_implementation: str | None = None,
    ) -> MLLMReranker:
        """Load a model, or a LoRA adapter together with the model it was trained on.

        Args:
            directory: what `save_pretrained` wrote, or any model of the kind, by folder or the hub's name.
            device: as `select_device` reads it.
            dtype: as `select_dtype` reads it.
            attn_implementation: such as `"sdpa"` or `"flash_attention_2"`.

        Raises:
            SceneGraphError: transformers or peft is missing.
        """
        try:
            from transformers import AutoModelForImageTextToText, AutoProcessor
        except ImportError as error:
            raise scene_graph_extra("transformers") from error
        adapter, settings = Path(directory) / "adapter_config.json", Path(directory) / SETTINGS_NAME
        base = str(directory)
        if adapter.is_file():
            base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
        device = select_device(device)
        model = AutoModelForImageTextToText.from_pretrained(
            base, dtype=select_dtype(dtype, device), attn_implementation=attn_implementation
        ).to(device)
        if adapter.is_file():
            try:
                from peft import PeftModel
            except ImportError as error:
                raise scene_graph_extra("peft") from error
            model = PeftModel.from_pretrained(model, str(directory))
        known = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        return cls(model, AutoProcessor.from_pretrained(str(directory)), RerankerPrompt(**known))

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write the model, or its adapter alone if it has one, the processor, and how the model is asked."""
        _save_mllm(self.model, self.processor, self.prompt, Path(directory))

    @torch.no_grad()
    def logits(self, query: Sample, draft: SceneGraph | None, candidates: Sequence[Candidate]) -> np.ndarray:
        """Logit of "yes" against "no" for each candidate, float64 `(candidates,)`."""
        parts = [np.empty(0)]
        for start in range(0, len(candidates), self.batch_size):
            part = candidates[start : start + self.batch_size]
            chats = [self.prompt.messages(query, draft, candidate.sample, candidate.graph) for candidate in part]
            ids = [query.id, *(candidate.sample_id for candidate in part)]
            inputs = encode_chats(self.processor, chats, ids, for_generation=True)
            inputs = {name: value.to(self.model.device) for name, value in inputs.items()}
            parts.append(answer_logits(self.model, inputs, self.tokens).double().cpu().numpy())
        return np.concatenate(parts)

    def score(self, query: Sample, draft: SceneGraph | None, candidates: Sequence[Candidate]) -> np.ndarray:
        """As [`Reranker.score`]: the probability of "yes" among the two answers."""
        return 1 / (1 + np.exp(-self.logits(query, draft, candidates)))


def _save_mllm(model: nn.Module, processor: Any, prompt: RerankerPrompt, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    with atomic_write(directory / SETTINGS_NAME) as path:
        path.write_text(json.dumps({"candidate_views": prompt.candidate_views}, indent=1), encoding="utf-8")


class MLLMRerankerBatches:
    """Chats of queries with candidates, as `fit` asks for them; a sample of `fit` is a query.

    Args:
        samples: with graphs; pictures are read when they are needed.
        processor: of the model.
        tail_split: which predicates are rare.
        drafts: a predictor's, for each sample; `None` shows no drafts.
        prompt: how the model is asked.
        config: which pairs.
        draft_dropout: share of the queries without their draft: those of training frames are better than drafts will
            be, and mustn't be relied on.
        weights: of predicates, in the IoU.
        seed: fixes the draws.

    Raises:
        SceneGraphError: see `PairSampler`; not one draft for each sample.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        processor: Any,
        tail_split: TailSplit,
        drafts: Sequence[SceneGraph] | None = None,
        prompt: RerankerPrompt | None = None,
        config: RerankerConfig | None = None,
        draft_dropout: float = 0.5,
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        if drafts is not None and len(drafts) != len(samples):
            raise SceneGraphError(f"{len(samples)} samples and {len(drafts)} drafts; give one draft for each sample.")
        self.sampler = PairSampler(samples, tail_split, config or RerankerConfig(), weights, seed)
        self.samples, self.processor, self.drafts = samples, processor, drafts
        self.prompt, self.draft_dropout, self.seed = prompt or RerankerPrompt(), draft_dropout, seed

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        """What the processor returns, a row per pair, padded on the left, and `relevance` `(queries, candidates)`."""
        random = np.random.default_rng(derive_seed(self.seed, step, rank))
        rows = self.sampler.draw(batch_size, random)
        chats = []
        for query, *candidates in rows.tolist():
            has_draft = self.drafts is not None and random.random() >= self.draft_dropout
            draft = self.drafts[query] if has_draft else None
            for candidate in candidates:
                sample = self.samples[candidate]
                chats.append(self.prompt.messages(self.samples[query], draft, sample, sample.graph))
        ids = [self.samples[row].id for row in np.unique(rows)]
        inputs = encode_chats(self.processor, chats, ids, for_generation=True)
        return {**inputs, "relevance": torch.from_numpy(self.sampler.relevance(rows))}


class MLLMRerankerMethod(TrainingMethod):
    """Training of a multimodal language model as a reranker, on IoUs; role `reranker`.

    Args:
        model: of transformers, or what `add_lora` made of one.
        processor: saved with the model.
        prompt: saved with the model.
        config: losses.
        validation: held-out batches, whose losses and rankings are measured.

    Raises:
        SceneGraphError: "yes" or "no" isn't one token.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        prompt: RerankerPrompt | None = None,
        config: RerankerConfig | None = None,
        validation: Sequence[Mapping[str, torch.Tensor]] = (),
    ) -> None:
        super().__init__()
        self.tokens = answer_tokens(processor)
        self.model, self.processor, self.prompt = model, processor, prompt or RerankerPrompt()
        self.config, self.validation = config or RerankerConfig(), tuple(validation)

    def roles(self) -> dict[str, nn.Module]:
        return {"reranker": self.model}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        logits = self._logits(batch)
        loss, parts = reranker_loss(logits, batch["relevance"], self.config)
        first = batch["relevance"].gather(1, logits.detach().argmax(dim=1, keepdim=True))
        return StepOutput({"reranker": loss}, {**parts, "iou_at_1": first.mean()})

    def _logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        inputs = {name: value for name, value in batch.items() if name != "relevance"}
        return answer_logits(self.model, inputs, self.tokens).view_as(batch["relevance"])

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """`ranking_quality` and the loss on the held-out batches."""
        device, rows, losses = next(self.model.parameters()).device, [], []
        for batch in self.validation:
            batch = {name: value.to(device) for name, value in batch.items()}
            logits = self._logits(batch)
            losses.append(float(reranker_loss(logits, batch["relevance"], self.config)[0]))
            rows += zip(batch["relevance"].cpu().double().numpy(), logits.cpu().double().numpy())
        return {"loss": sum(losses) / len(losses), **ranking_quality(rows)} if rows else {}

    def save_pretrained(self, directory: str | os.PathLike, ema_roles: dict[str, nn.Module]) -> None:
        _save_mllm(ema_roles["reranker"], self.processor, self.prompt, Path(directory) / "reranker")
