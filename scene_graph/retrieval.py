"""Labeled frames that may resemble a query: embeddings, an index over the training frames, and what joins its pool.

A query is compared with every labeled frame in up to three ways: its images with the frame's images, its images with
the frame's labels as text, and its draft graph as text with the frame's labels. The fused score ranks the frames; two
rules then keep the pool diverse. Neighboring frames of a take say the same, so only one per few seconds joins; and a
draft with the wrong action attracts frames of that wrong action, so the best frames of every rare predicate always
join, whatever their score. Frames of the query's own take never do: seconds apart, they would give its answer away.

After RICES (OpenFlamingo) and MMICES (arXiv 2311.18021), which are presets; how SGG-ICL itself fuses isn't public.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from tqdm import tqdm

from scene_graph.formats import format_triplet_text, parse_triplet_text
from scene_graph.methods import AugmentConfig, augment
from scene_graph.predictors.base import SGGPredictor
from scene_graph.predictors.hf import scene_graph_extra
from scene_graph.router import RelationPrior
from scene_graph.schema import Sample, SceneDataError, SceneGraph, SceneGraphError, TailSplit, Triplet, Vocabulary
from vidgen.runtime.checkpoint import atomic_directory, load_safetensors, save_safetensors
from vidgen.runtime.device import derive_seed, select_device
from vidgen.runtime.errors import suggestion
from vidgen.train import StepOutput, TrainingMethod

FUSIONS = ("zscore", "rrf", "rices", "mmices")
# Image with image, image with text, text with text: the names of a candidate's scores, in the order of the weights.
SOURCES = ("image", "cross", "text")
# Two of three triplets say closeTo; with it in the text, every frame resembles every other.
UBIQUITOUS = ("closeTo",)

RRF_CONSTANT = 60
MMICES_SHORTLIST = 200
# Below this many frames one product with all of them is as fast as an index.
FAISS_MIN_FRAMES = 20_000
# Similarities of float32 unit vectors that spread less than this differ by rounding only.
MIN_SPREAD = 1e-5

INDEX_NAME = "index.json"
EMBEDDINGS_NAME = "embeddings.safetensors"
IMAGES_NAME = "images.safetensors"
ENCODER_FOLDER = "encoder"
INDEX_FORMAT = 1


# --- encoders ----------------------------------------------------------------------------------------------------


class SceneEncoder(Protocol):
    """Images and graph texts as vectors.

    Attributes:
        kind: what is written into an index that was made with it.
        is_joint: whether an image and a text can be compared with each other.
        fingerprint: differs between encoders that give different vectors.
    """

    kind: str
    is_joint: bool

    @property
    def fingerprint(self) -> str: ...

    def encode_images(self, samples: Sequence[Sample]) -> np.ndarray:
        """One vector per sample, of all its views: float32 `(samples, dim)`, L2-normalized."""
        ...

    def encode_texts(self, texts: Sequence[str]) -> np.ndarray:
        """float32 `(texts, text_dim)`, L2-normalized."""
        ...


def graph_text(graph: SceneGraph) -> str:
    """The text that stands for a graph in retrieval: canonical order, no closeTo unless nothing else is there."""
    telling = graph.without(*UBIQUITOUS)
    return format_triplet_text(telling if len(telling) else graph)


def model_fingerprint(model: nn.Module) -> str:
    """A hash of a model's weights, the same for float32 and bfloat16 copies.

    Up to 64 values of each tensor are read: a training step changes all of them, and a large model is hashed at once.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().flatten()
        chosen = values[:: max(1, values.numel() // 64)][:64].to("cpu", torch.bfloat16).float().numpy()
        digest.update(f"{name} {tuple(tensor.shape)} ".encode() + chosen.tobytes())
    return digest.hexdigest()[:16]


class PredictorEncoder:
    """The predictor itself as an encoder: nothing more to train or to load.

    Images are what it makes of them before it writes. It has no vector for a text that could be compared with these,
    so texts are counts of their parts: predicates, predicates with their subject, and predicates with their object.

    Args:
        predictor: of the drafts.
    """

    kind = "predictor"
    is_joint = False

    def __init__(self, predictor: SGGPredictor) -> None:
        self.predictor = predictor
        vocabulary = predictor.vocabulary
        parts = [(predicate,) for predicate in vocabulary.predicates]
        parts += [(end, name, predicate) for end in ("subject", "object") for name in vocabulary.entities
                  for predicate in vocabulary.predicates]  # fmt: skip
        self._columns = {part: column for column, part in enumerate(parts)}

    @property
    def fingerprint(self) -> str:
        return model_fingerprint(self.predictor.model)

    def encode_images(self, samples: Sequence[Sample]) -> np.ndarray:
        return self.predictor.embed(samples)

    def encode_texts(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), len(self._columns) + 1), np.float32)  # the last column: no triplet at all
        for row, text in enumerate(texts):
            graph = parse_triplet_text(text, self.predictor.vocabulary).graph
            for triplet in graph:
                subject, predicate, object = triplet.spo()
                for part in ((predicate,), ("subject", subject, predicate), ("object", object, predicate)):
                    vectors[row, self._columns[part]] += 1
            vectors[row, -1] = not len(graph)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class OpenClipEncoder:
    """A contrastive image-text model of open_clip.

    Args:
        model_name: of open_clip, as `ViT-L-14`, or `local-dir:FOLDER` of one that `save_pretrained` wrote.
        pretrained: a tag of open_clip, which downloads, or a file of weights.
        model_config: makes a new model with random weights instead: a dict as in open_clip's `model_configs`.
            `model_name` is then the name it gets there.
        seed: of the random weights.
        device: as `select_device` reads it.
        batch_size: samples, or texts, that go through the model together.

    Raises:
        SceneGraphError: open_clip is missing, the model can't be made, or there would be neither weights nor a
            configuration for new ones.
    """

    kind = "open_clip"
    is_joint = True

    def __init__(
        self,
        model_name: str,
        pretrained: str | os.PathLike | None = None,
        model_config: Mapping[str, Any] | None = None,
        seed: int = 0,
        device: str | None = None,
        batch_size: int = 32,
    ) -> None:
        try:
            import open_clip
        except ImportError as error:
            raise scene_graph_extra("open_clip_torch") from error
        if pretrained is None and model_config is None and ":" not in model_name:
            raise SceneGraphError(
                f"{model_name} without weights can't compare anything; give `pretrained`, a tag or a file, or "
                "`model_config` for a new model that is trained."
            )
        if model_config is not None:
            # open_clip keeps what it has read, so the file may go.
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{model_name}.json"
                path.write_text(json.dumps(dict(model_config)), encoding="utf-8")
                open_clip.add_model_config(path)
        try:
            with torch.random.fork_rng([]):
                torch.manual_seed(seed)  # initial weights are drawn from the global generator
                self.model = open_clip.create_model(
                    model_name,
                    None if pretrained is None else str(pretrained),
                    device=select_device(device),
                    output_dict=True,
                    # A view that isn't square keeps its borders: people stand there.
                    force_preprocess_cfg=None if model_config is None else {"resize_mode": "squash"},
                )
            self.tokenizer = open_clip.get_tokenizer(model_name)
        except (RuntimeError, ValueError, OSError, TypeError) as error:
            raise SceneGraphError(f"open_clip can't make {model_name!r}: {error}") from error
        self.model.eval()
        self.model_config = open_clip.get_model_config(model_name)
        preprocessing = open_clip.transform.PreprocessCfg(**self.model.visual.preprocess_cfg)
        self._preprocess = open_clip.transform.image_transform_v2(preprocessing, is_train=False)
        self.batch_size = batch_size

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike, device: str | None = None) -> OpenClipEncoder:
        """Load what `save_pretrained` wrote."""
        if not (Path(folder) / "open_clip_config.json").is_file():
            raise SceneGraphError(f"{folder} holds no open_clip model: open_clip_config.json is not in it.")
        return cls(f"local-dir:{folder}", device=device)

    def save_pretrained(self, folder: str | os.PathLike, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write a folder that open_clip itself loads, too.

        Args:
            folder: to make.
            weights: instead of the model's own, such as averaged ones.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_cfg": self.model_config, "preprocess_cfg": self.model.visual.preprocess_cfg}
        (folder / "open_clip_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        save_safetensors(weights or self.model.state_dict(), folder / "open_clip_model.safetensors")
        if hasattr(self.tokenizer, "save_pretrained"):
            self.tokenizer.save_pretrained(folder)

    @property
    def fingerprint(self) -> str:
        return model_fingerprint(self.model)

    def pixels(
        self, samples: Sequence[Sample], change: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The views of samples as the model wants them.

        Args:
            samples: with any number of views.
            change: of each picture before it is resized, uint8 `(height, width, 3)`.

        Returns:
            float32 `(samples, views, 3, side, side)`, zeros where there is no view, and bool `(samples, views)`.
        """
        num_views = max(len(sample.views) for sample in samples)
        mask = torch.zeros(len(samples), num_views, dtype=torch.bool)
        rows = []
        for row, sample in enumerate(samples):
            images = sample.images()
            views = [self._preprocess(Image.fromarray(image if change is None else change(image))) for image in images]
            mask[row, : len(views)] = True
            rows.append(torch.stack([*views, *[torch.zeros_like(views[0])] * (num_views - len(views))]))
        return torch.stack(rows), mask

    @torch.no_grad()
    def encode_images(self, samples: Sequence[Sample]) -> np.ndarray:
        device, vectors = next(self.model.parameters()).device, []
        self.model.eval()
        for start in range(0, len(samples), self.batch_size):
            pixels, mask = self.pixels(samples[start : start + self.batch_size])
            features = self.model.encode_image(pixels[mask].to(device), normalize=True).float().cpu()
            vectors.append(_mean_of_views(features, mask).numpy())
        return np.concatenate(vectors) if vectors else np.empty((0, self.model_config["embed_dim"]), np.float32)

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> np.ndarray:
        device, vectors = next(self.model.parameters()).device, []
        self.model.eval()
        for start in range(0, len(texts), self.batch_size):
            tokens = self.tokenizer(list(texts[start : start + self.batch_size])).to(device)
            vectors.append(self.model.encode_text(tokens, normalize=True).float().cpu().numpy())
        return np.concatenate(vectors) if vectors else np.empty((0, self.model_config["embed_dim"]), np.float32)


def _mean_of_views(features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Normalized mean per sample of view features `(existing views, dim)`; `mask` is bool `(samples, views)`."""
    row = mask.nonzero()[:, 0].to(features.device)
    sums = torch.zeros(len(mask), features.shape[1], dtype=features.dtype, device=features.device)
    return F.normalize(sums.index_add(0, row, features), dim=1)


class ClipBatches:
    """Images with the texts of their graphs, as `fit` asks for them.

    Texts of a batch are all different, drawn with equal chances: two frames with one text would be each other's
    negatives, and rare graphs would hardly be seen.

    Args:
        samples: with graphs; pictures are read when they are needed.
        encoder: prepares pictures and texts.
        augmentation: changes of pictures; `None` for none.
        seed: fixes the draws.

    Raises:
        SceneGraphError: a sample without a graph.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        encoder: OpenClipEncoder,
        augmentation: AugmentConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.samples, self.encoder, self.augmentation, self.seed = samples, encoder, augmentation, seed
        self.rows: dict[str, list[int]] = defaultdict(list)
        for row, graph in enumerate(_labels(samples)):
            self.rows[graph_text(graph)].append(row)
        self.texts = sorted(self.rows)

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        """`pixels` float32 `(batch, views, 3, side, side)`, `view_mask` bool `(batch, views)` and `text` int64
        `(batch, tokens)`.

        Raises:
            SceneGraphError: more samples are asked for than there are different texts.
        """
        if batch_size > len(self.texts):
            raise SceneGraphError(
                f"batch_size={batch_size}; these labels have {len(self.texts)} different texts, and a batch has each "
                "once at most."
            )
        random = np.random.default_rng(derive_seed(self.seed, step, rank))
        texts = [self.texts[index] for index in random.choice(len(self.texts), batch_size, replace=False)]
        samples = [self.samples[self.rows[text][random.integers(len(self.rows[text]))]] for text in texts]
        change = None
        if self.augmentation is not None:
            change = lambda image: augment(image[None], self.augmentation, random)[0]  # noqa: E731
        pixels, mask = self.encoder.pixels(samples, change)
        return {"pixels": pixels, "view_mask": mask, "text": self.encoder.tokenizer(texts)}


class ClipMethod(TrainingMethod):
    """Contrastive training of an encoder on frames and their graphs (CLIP, arXiv 2103.00020); role `encoder`.

    Args:
        encoder: whose model is trained.
        validation: held-out batches, of which the loss is measured.
    """

    def __init__(self, encoder: OpenClipEncoder, validation: Sequence[Mapping[str, torch.Tensor]] = ()) -> None:
        super().__init__()
        from open_clip import ClipLoss

        self.encoder, self.model, self.loss = encoder, encoder.model, ClipLoss()
        self.validation = tuple(validation)

    def roles(self) -> dict[str, nn.Module]:
        return {"encoder": self.model}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        loss, accuracy = self._loss(batch)
        return StepOutput({"encoder": loss}, {"accuracy": accuracy})

    def _loss(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.model(batch["pixels"][batch["view_mask"]], batch["text"])
        images = _mean_of_views(output["image_features"], batch["view_mask"])  # (B, D)
        texts = output["text_features"]  # (B, D)
        # As in CLIP, logits are scaled by 100 at most.
        loss = self.loss(images, texts, output["logit_scale"].clamp(max=100))
        right = (images @ texts.T).argmax(dim=1) == torch.arange(len(images), device=images.device)
        return loss, right.float().mean()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean loss of the validation batches, and how often an image is nearest to its own text."""
        device = next(self.model.parameters()).device
        rows = [self._loss({key: value.to(device) for key, value in batch.items()}) for batch in self.validation]
        if not rows:
            return {}
        losses, accuracies = (torch.stack(values).mean() for values in zip(*rows))
        return {"loss": float(losses), "accuracy": float(accuracies)}

    def save_pretrained(self, directory: str | os.PathLike, ema_roles: dict[str, nn.Module]) -> None:
        self.encoder.save_pretrained(Path(directory) / "encoder", ema_roles["encoder"].state_dict())


# --- index -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RetrievalConfig:
    """How candidates are found.

    Attributes:
        pool: most candidates per query.
        fusion: `"zscore"`: weighted sum of the scores, each standardized over the frames that may be chosen; `"rrf"`:
            sum of `1 / (60 + rank)`; `"rices"`: images alone; `"mmices"`: the 200 best by images, ranked by texts.
        weights: of image with image, image with text, text with text, for `"zscore"`. An encoder that can't compare
            images with texts leaves the second one out.
        dedup_seconds: candidates of one take are at least this far apart; 0 for no limit.
        tail_quota: the best candidates of every rare predicate that always are in the pool, if they aren't too close
            to each other in time; 0 for none.
    """

    pool: int = 24
    fusion: Literal["zscore", "rrf", "rices", "mmices"] = "zscore"
    weights: tuple[float, float, float] = (0.5, 0.2, 0.3)
    dedup_seconds: float = 5.0
    tail_quota: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        if self.fusion not in FUSIONS:
            raise SceneGraphError(f"fusion={self.fusion!r}: {suggestion(self.fusion, FUSIONS)}.")
        if len(self.weights) != len(SOURCES) or min(self.weights) < 0 or not self.weights[0] + self.weights[2]:
            raise SceneGraphError(
                f"weights={self.weights}; allowed: three numbers of at least 0, of which the first or the third is "
                "positive."
            )
        if self.pool < 1 or self.dedup_seconds < 0 or self.tail_quota < 0:
            raise SceneGraphError(
                f"pool={self.pool}, dedup_seconds={self.dedup_seconds}, tail_quota={self.tail_quota}; allowed: a pool "
                "of at least 1, nothing negative."
            )


@dataclass(frozen=True, eq=False)
class Candidate:
    """A labeled frame that may become an example.

    Args:
        sample: its images.
        graph: its labels.
        score: by which the pool is ordered.
        scores: cosine similarity of each kind of comparison, `"image"`, `"cross"` and `"text"`, where it was made.
    """

    sample: Sample
    graph: SceneGraph
    score: float
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def sample_id(self) -> str:
        """Of the frame."""
        return self.sample.id


class SceneIndex:
    """Labeled frames that can be searched; made by `build` or `from_pretrained`.

    Args:
        samples: with graphs.
        image_embeddings: float32 `(samples, dim)`, L2-normalized.
        text_embeddings: of the graphs, float32 `(samples, text_dim)`, L2-normalized.
        encoder: what the embeddings were made with.
        tail_split: which predicates are rare.
        vocabulary: of the graphs.

    Attributes:
        prior: how often each triplet is among the labels.

    Raises:
        SceneGraphError: no samples, two with one id, one without a graph, or embeddings that don't fit.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        image_embeddings: np.ndarray,
        text_embeddings: np.ndarray,
        encoder: SceneEncoder,
        tail_split: TailSplit,
        vocabulary: Vocabulary,
    ) -> None:
        self.samples, self.encoder, self.tail_split = tuple(samples), encoder, tail_split
        self.vocabulary = vocabulary
        self.graphs = tuple(vocabulary.normalize(graph, strict=True)[0] for graph in _labels(self.samples))
        if not self.samples:
            raise SceneGraphError("an index needs at least one labeled sample.")
        if len({sample.id for sample in self.samples}) < len(self.samples):
            raise SceneGraphError("two samples of the index have the same id; ids must differ.")
        for embeddings in (image_embeddings, text_embeddings):
            if embeddings.ndim != 2 or len(embeddings) != len(self.samples):
                raise SceneGraphError(
                    f"embeddings {embeddings.shape} for {len(self.samples)} samples; give a row each."
                )
        self.image_embeddings = np.ascontiguousarray(image_embeddings, np.float32)
        self.text_embeddings = np.ascontiguousarray(text_embeddings, np.float32)
        self.prior = RelationPrior.from_graphs(self.graphs, vocabulary)
        self._takes = np.array([sample.take for sample in self.samples])
        self._seconds = np.array([sample.seconds for sample in self.samples])
        self._with_predicate = {
            name: np.array([any(triplet.predicate == name for triplet in graph) for graph in self.graphs])
            for name in tail_split.tail
        }
        self._moments = [_Moments(self.image_embeddings), _Moments(self.text_embeddings)]
        self._faiss = self._make_faiss() if len(self.samples) >= FAISS_MIN_FRAMES else None

    @classmethod
    def build(
        cls,
        samples: Sequence[Sample],
        encoder: SceneEncoder,
        tail_split: TailSplit,
        vocabulary: Vocabulary | None = None,
        progress: bool = False,
    ) -> SceneIndex:
        """Embed labeled frames.

        Args:
            samples: with graphs.
            encoder: of images and texts.
            tail_split: which predicates are rare, by training labels.
            vocabulary: of the graphs; by default that of `samples`, if it is a data set.
            progress: show a progress bar.

        Raises:
            SceneGraphError: see the class; no vocabulary.
        """
        vocabulary = vocabulary or getattr(samples, "vocabulary", None)
        if vocabulary is None:
            raise SceneGraphError("these samples don't say what their vocabulary is; give one.")
        samples = list(samples)
        graphs = _labels(samples)
        size = 256
        parts = [
            encoder.encode_images(samples[start : start + size])
            for start in tqdm(range(0, len(samples), size), desc="embedding", unit="batch", disable=not progress)
        ]
        images = np.concatenate(parts) if parts else np.empty((0, 1), np.float32)
        texts = _encode_unique(encoder, [graph_text(vocabulary.normalize(graph, strict=True)[0]) for graph in graphs])
        return cls(samples, images, texts, encoder, tail_split, vocabulary)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def takes(self) -> tuple[str, ...]:
        """The takes of its frames, sorted."""
        return tuple(sorted(set(self._takes.tolist())))

    def search(
        self,
        query_samples: Sequence[Sample],
        drafts: Sequence[SceneGraph],
        *,
        n: int | None = None,
        exclude_same_take: bool = True,
        config: RetrievalConfig | None = None,
    ) -> list[list[Candidate]]:
        """Labeled frames for each query.

        Args:
            query_samples: their images are compared.
            drafts: what a predictor says of each without examples.
            n: most candidates per query, by default `config.pool`.
            exclude_same_take: leave out the frames of a query's own take.
            config: how candidates are found.

        Returns:
            For each query its candidates, best first.

        Raises:
            SceneGraphError: not one draft per query, every frame is of a query's own take, or a pool too small for
                the quota of rare predicates.
        """
        config = config or RetrievalConfig()
        n = config.pool if n is None else n
        if len(query_samples) != len(drafts):
            raise SceneGraphError(f"{len(query_samples)} queries and {len(drafts)} drafts; give one draft for each.")
        num_rare = sum(bool(mask.any()) for mask in self._with_predicate.values())
        if n < max(1, config.tail_quota * num_rare):
            raise SceneGraphError(
                f"a pool of {n} has no room for {config.tail_quota} candidates of each of {num_rare} rare predicates; "
                f"allowed: at least {max(1, config.tail_quota * num_rare)} candidates, or a smaller tail_quota."
            )
        images = self.encoder.encode_images(query_samples)
        texts = _encode_unique(self.encoder, [graph_text(draft) for draft in drafts])
        return [
            self._search_one(sample, image, text, n, exclude_same_take, config)
            for sample, image, text in zip(query_samples, images, texts, strict=True)
        ]

    def _search_one(
        self,
        sample: Sample,
        image: np.ndarray,
        text: np.ndarray,
        n: int,
        exclude_same_take: bool,
        config: RetrievalConfig,
    ) -> list[Candidate]:
        allowed = np.ones(len(self.samples), bool)
        if exclude_same_take:
            allowed = self._takes != sample.take
        if not allowed.any():
            raise SceneGraphError(
                f"every frame of the index is of take {sample.take!r}, that of sample {sample.id}; add other takes."
            )
        # Which vector of the query meets which embeddings of the frames.
        pairs = {"image": (image, 0), "text": (text, 1)}
        if self.encoder.is_joint:
            pairs["cross"] = (image, 1)
        if config.fusion == "rrf":
            ranking: _Ranking = _ArrayRanking(self._reciprocal_ranks(pairs, allowed))
        elif config.fusion == "zscore":
            ranking = self._ranking(*self._standardized(pairs, config.weights, allowed))
        else:
            ranking = self._ranking(image, np.zeros_like(text), 0.0)
            if config.fusion == "mmices":
                shortlist = [row for row, _ in zip(ranking.best(allowed), range(MMICES_SHORTLIST))]
                allowed = np.zeros_like(allowed)
                allowed[shortlist] = True
                ranking = self._ranking(np.zeros_like(image), text, 0.0)
        rows = self._pool(ranking, allowed, n, config)
        candidates = []
        for row in rows:
            embeddings = (self.image_embeddings[row], self.text_embeddings[row])
            scores = {name: float(pairs[name][0] @ embeddings[pairs[name][1]]) for name in SOURCES if name in pairs}
            candidates.append(Candidate(self.samples[row], self.graphs[row], ranking.score(row), scores))
        return sorted(candidates, key=lambda candidate: -candidate.score)

    def _pool(self, ranking: _Ranking, allowed: np.ndarray, n: int, config: RetrievalConfig) -> list[int]:
        """Rows of the frames that join: the quota of each rare predicate, the rarest first, then the best others."""
        chosen: dict[int, None] = {}
        times: dict[str, list[float]] = defaultdict(list)

        def join(row: int) -> bool:
            take, seconds = self._takes[row], self._seconds[row]
            if any(abs(seconds - other) < config.dedup_seconds for other in times[take]):
                return False
            chosen[row] = None
            times[take].append(seconds)
            return True

        if config.tail_quota:
            for mask in sorted(self._with_predicate.values(), key=lambda mask: int(mask.sum())):
                count = 0
                for row in ranking.best(allowed & mask):
                    count += row in chosen or join(row)
                    if count == config.tail_quota:
                        break
        for row in ranking.best(allowed):
            if len(chosen) >= n:
                break
            if row not in chosen:
                join(row)
        return list(chosen)

    def _standardized(
        self, pairs: Mapping[str, tuple[np.ndarray, int]], weights: Sequence[float], allowed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """The weighted sum of standardized similarities as one inner product.

        `sum_s w_s (q_s · e_s - mean_s) / std_s` is a vector against image embeddings, one against text embeddings, and
        a constant; mean and standard deviation are over the allowed frames.
        """
        vectors = [np.zeros(self.image_embeddings.shape[1]), np.zeros(self.text_embeddings.shape[1])]
        constant = 0.0
        for name, weight in zip(SOURCES, weights):
            if name not in pairs or not weight:
                continue
            query, place = pairs[name]
            mean, std = self._moments[place].of(query, ~allowed)
            if std > MIN_SPREAD:
                vectors[place] += weight / std * query
                constant -= weight * mean / std
        return vectors[0].astype(np.float32), vectors[1].astype(np.float32), constant

    def _reciprocal_ranks(self, pairs: Mapping[str, tuple[np.ndarray, int]], allowed: np.ndarray) -> np.ndarray:
        """Reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009); ranks are among the allowed frames."""
        total = np.zeros(len(self.samples))
        for query, place in pairs.values():
            similarity = (self.image_embeddings, self.text_embeddings)[place] @ query
            rows = _descending(similarity)
            rows = rows[allowed[rows]]
            total[rows] += 1 / (RRF_CONSTANT + 1 + np.arange(len(rows)))
        return total

    def _ranking(self, image: np.ndarray, text: np.ndarray, constant: float) -> _Ranking:
        if self._faiss is None:
            return _ArrayRanking(self.image_embeddings @ image + self.text_embeddings @ text + constant)
        return _FaissRanking(self._faiss, np.concatenate([image, text]), constant)

    def _make_faiss(self) -> Any:
        """A flat inner-product index of image and text embeddings side by side, or None without faiss."""
        try:
            import faiss
        except ImportError:
            return None  # the search is then one product with all frames, which gives the same
        vectors = np.concatenate([self.image_embeddings, self.text_embeddings], axis=1)
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        return index

    # --- files --------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike, with_images: bool = False) -> None:
        """Write the index; the folder appears whole or not at all.

        Args:
            folder: to make or replace.
            with_images: put the frames' image files into it, so that it can be moved to where the data isn't; they
                are held in memory once it is loaded. Without it only pictures that are no files are put there.
        """
        packed: dict[str, torch.Tensor] = {}
        rows = []
        for number, (sample, graph) in enumerate(zip(self.samples, self.graphs)):
            views: list[str | None] = []
            for view, source in enumerate(sample.views):
                is_file = not isinstance(source, np.ndarray)
                views.append(str(Path(source).resolve()) if is_file and not with_images else None)
                if views[-1] is None:
                    packed[_packed_name(number, view)] = torch.frombuffer(_encoded(source), dtype=torch.uint8)
            rows.append(
                {
                    "id": sample.id,
                    "take": sample.take,
                    "frame": sample.frame,
                    "seconds": sample.seconds,
                    "views": views,
                    "view_names": list(sample.view_names),
                    "primary": sample.primary,
                    "memory": sample.memory,
                    "triplets": [list(triplet.spo()) for triplet in graph.sorted()],
                }
            )
        content = {
            "format": INDEX_FORMAT,
            "encoder": {"kind": self.encoder.kind, "fingerprint": self.encoder.fingerprint},
            "labels": _labels_fingerprint(self.samples, self.graphs),
            "tail_split": self.tail_split.to_dict(),
            "vocabulary": self.vocabulary.to_dict(),
            "samples": rows,
        }
        embeddings = {"images": self.image_embeddings, "texts": self.text_embeddings}
        with atomic_directory(folder) as target:
            (target / INDEX_NAME).write_text(json.dumps(content), encoding="utf-8")
            save_safetensors(
                {name: torch.from_numpy(value) for name, value in embeddings.items()}, target / EMBEDDINGS_NAME
            )
            if packed:
                save_safetensors(packed, target / IMAGES_NAME)
            if hasattr(self.encoder, "save_pretrained"):
                self.encoder.save_pretrained(target / ENCODER_FOLDER)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike,
        *,
        predictor: SGGPredictor | None = None,
        encoder: SceneEncoder | None = None,
        samples: Sequence[Sample] | None = None,
        device: str | None = None,
    ) -> SceneIndex:
        """Load what `save_pretrained` wrote.

        Args:
            folder: of the index.
            predictor: needed where the predictor was the encoder.
            encoder: in place of the one in the folder, which it has to equal.
            samples: the data set of the index, where it has been moved; it must have the index's samples, with the
                same labels.
            device: of the encoder.

        Raises:
            SceneGraphError: the folder is no index, another encoder was used to build it, or its labels or those of
                `samples` are others.
            SceneDataError: image files of the index are missing.
        """
        folder = Path(folder)
        try:
            content = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise SceneGraphError(f"{folder} is no index of scenes: {INDEX_NAME} can't be read ({error}).") from error
        if content.get("format") != INDEX_FORMAT:
            raise SceneGraphError(
                f"{folder / INDEX_NAME} has format {content.get('format')}; this version reads {INDEX_FORMAT}."
            )
        if encoder is None:
            encoder = cls._load_encoder(folder, content["encoder"]["kind"], predictor, device)
        given, wanted = encoder.fingerprint, content["encoder"]["fingerprint"]
        if given != wanted:
            raise SceneGraphError(
                f"{folder} was built with another encoder ({content['encoder']['kind']} {wanted}, now "
                f"{encoder.kind} {given}); build the index again."
            )
        vocabulary = Vocabulary.from_dict(content["vocabulary"])
        if samples is None:
            packed = load_safetensors(folder / IMAGES_NAME)[0] if (folder / IMAGES_NAME).is_file() else {}
            samples = [_read_sample(row, number, packed) for number, row in enumerate(content["samples"])]
            files = [view for row in content["samples"] for view in row["views"] if view is not None]
            missing = [view for view in files if not Path(view).is_file()]
            if missing:
                raise SceneDataError(
                    f"{folder} refers to {len(missing)} images that don't exist, the first is {missing[0]}; give "
                    "`samples`, the data set where it is now."
                )
        else:
            by_id = {sample.id: sample for sample in samples}
            absent = [row["id"] for row in content["samples"] if row["id"] not in by_id]
            if absent:
                raise SceneGraphError(
                    f"{len(absent)} of the {len(content['samples'])} samples of {folder} are not in the data set, the "
                    f"first is {absent[0]}."
                )
            samples = [by_id[row["id"]] for row in content["samples"]]
        graphs = [vocabulary.normalize(graph, strict=True)[0] for graph in _labels(samples)]
        if _labels_fingerprint(samples, graphs) != content["labels"]:
            raise SceneGraphError(f"the labels changed since {folder} was built; build the index again.")
        tensors, _ = load_safetensors(folder / EMBEDDINGS_NAME)
        return cls(
            samples,
            tensors["images"].numpy(),
            tensors["texts"].numpy(),
            encoder,
            TailSplit.from_dict(content["tail_split"]),
            vocabulary,
        )

    @staticmethod
    def _load_encoder(folder: Path, kind: str, predictor: SGGPredictor | None, device: str | None) -> SceneEncoder:
        if kind == PredictorEncoder.kind:
            if predictor is None:
                raise SceneGraphError(f"{folder} was built with a predictor as its encoder; give the predictor.")
            return PredictorEncoder(predictor)
        if kind != OpenClipEncoder.kind:
            raise SceneGraphError(f"{folder} was built with an encoder of kind {kind!r}; give it as `encoder`.")
        return OpenClipEncoder.from_pretrained(folder / ENCODER_FOLDER, device)


class _Moments:
    """Mean and standard deviation of a query's similarities to rows, without computing them all."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.sum = rows.sum(axis=0, dtype=np.float64)  # (D,)
        self.products = np.zeros((rows.shape[1], rows.shape[1]))  # (D, D)
        for start in range(0, len(rows), 4096):
            part = rows[start : start + 4096].astype(np.float64)
            self.products += part.T @ part

    def of(self, query: np.ndarray, excluded: np.ndarray) -> tuple[float, float]:
        """Over all rows but those that the bool mask `excluded` marks."""
        query = query.astype(np.float64)
        out = self.rows[excluded].astype(np.float64) @ query
        count = len(self.rows) - len(out)
        mean = (self.sum @ query - out.sum()) / count
        square = (query @ self.products @ query - (out**2).sum()) / count
        return float(mean), float(max(0.0, square - mean**2) ** 0.5)


class _Ranking(Protocol):
    """All frames by their score for one query."""

    def best(self, allowed: np.ndarray) -> Iterator[int]:
        """The rows that a bool mask allows, best first."""
        ...

    def score(self, row: int) -> float: ...


class _ArrayRanking:
    def __init__(self, scores: np.ndarray) -> None:
        self.scores, self.order = scores, _descending(scores)

    def best(self, allowed: np.ndarray) -> Iterator[int]:
        yield from self.order[allowed[self.order]].tolist()

    def score(self, row: int) -> float:
        return float(self.scores[row])


class _FaissRanking:
    def __init__(self, index: Any, vector: np.ndarray, constant: float) -> None:
        self.index, self.vector, self.constant = index, vector, constant

    def best(self, allowed: np.ndarray) -> Iterator[int]:
        import faiss

        rows = np.flatnonzero(allowed)
        parameters = faiss.SearchParameters(sel=faiss.IDSelectorBatch(rows))
        seen, depth = 0, 64
        while seen < len(rows):
            depth = min(depth, len(rows))
            _, found = self.index.search(self.vector[None], depth, params=parameters)
            yield from found[0, seen:].tolist()
            seen, depth = depth, 4 * depth

    def score(self, row: int) -> float:
        return float(self.index.reconstruct(row) @ self.vector) + self.constant


def _descending(values: np.ndarray) -> np.ndarray:
    """Indices of the largest values first; equal ones in their order."""
    return np.argsort(-values, kind="stable")


def _labels(samples: Iterable[Sample]) -> list[SceneGraph]:
    graphs = []
    for sample in samples:
        if sample.graph is None:
            raise SceneGraphError(f"sample {sample.id} has no labels; only labeled frames can be used here.")
        graphs.append(sample.graph)
    return graphs


def _encode_unique(encoder: SceneEncoder, texts: Sequence[str]) -> np.ndarray:
    """Embeddings of texts, each different one computed once; frames in a row mostly have the same."""
    unique = sorted(set(texts))
    place = {text: index for index, text in enumerate(unique)}
    return encoder.encode_texts(unique)[[place[text] for text in texts]]


def _labels_fingerprint(samples: Sequence[Sample], graphs: Sequence[SceneGraph]) -> str:
    lines = [f"{sample.id}\t{format_triplet_text(graph)}" for sample, graph in zip(samples, graphs)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _packed_name(row: int, view: int) -> str:
    return f"{row}.{view}"


def _encoded(source: str | os.PathLike | np.ndarray) -> bytearray:
    """The bytes of an image file: of the file itself, or of a PNG of pixels."""
    if isinstance(source, np.ndarray):
        buffer = io.BytesIO()
        Image.fromarray(source).save(buffer, format="PNG")
        return bytearray(buffer.getvalue())
    try:
        return bytearray(Path(source).read_bytes())
    except OSError as error:
        raise SceneDataError(f"cannot read image {source}: {error}.") from error


def _decoded(data: torch.Tensor) -> np.ndarray:
    with Image.open(io.BytesIO(data.numpy().tobytes())) as image:
        return np.array(image.convert("RGB"))


def _read_sample(row: Mapping[str, Any], number: int, packed: Mapping[str, torch.Tensor]) -> Sample:
    views = [
        _decoded(packed[_packed_name(number, view)]) if path is None else path
        for view, path in enumerate(row["views"])
    ]
    return Sample(
        id=row["id"],
        take=row["take"],
        frame=row["frame"],
        seconds=row["seconds"],
        views=tuple(views),
        view_names=tuple(row["view_names"]),
        graph=SceneGraph([Triplet.from_spo(words) for words in row["triplets"]]),
        memory=row["memory"],
        primary=row["primary"],
    )
