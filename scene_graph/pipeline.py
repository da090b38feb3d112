"""SGG-ICL: a draft of every frame, and a second look with similar examples at those that are likely rare.

After "Modeling Long-Tail Relations in the Operating Room via In-Context Multimodal Learning" (ICML 2026), of which the
abstract is public: a router sends samples of the long tail to in-context learning, retrieval gathers candidates from
the training frames, a reranker trained on the overlap of annotated triplets chooses the examples. What the abstract
leaves open, which model, how many examples, how drafts and second answers are merged, is a setting here.

    draft -> retrieve -> route -> [rerank -> choose examples -> decode again -> merge] or the draft
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from scene_graph.predictors import Example, Prediction, SGGPredictor, load_predictor
from scene_graph.reranker import Reranker, load_reranker, select_examples
from scene_graph.retrieval import Candidate, RetrievalConfig, SceneIndex
from scene_graph.router import AdaptiveRouter, router_features
from scene_graph.schema import Sample, SceneGraph, SceneGraphError, TailSplit
from vidgen.runtime.checkpoint import atomic_directory
from vidgen.runtime.errors import suggestion

SETTINGS_NAME = "pipeline.json"
POLICIES = ("routed", "all", "none")
RANKINGS = ("rerank", "retrieval")
MERGES = ("replace", "tail_only")


@dataclass(frozen=True)
class SGGICLConfig:
    """How a pipeline uses its parts.

    Attributes:
        policy: which frames get a second look: those that the router chooses, all, or none.
        ranking: what orders the candidates: the reranker, or retrieval alone.
        num_examples: most examples in the prompt of a second look.
        merge: `"replace"` takes the second answer; `"tail_only"` takes it for pairs where either answer has a rare
            predicate, and the draft for all others.
        mmr_lambda: how much an example loses for resembling those already chosen (maximal marginal relevance).
        min_score: candidates below this score are no examples; a frame without examples keeps its draft.
        retrieval: how candidates are found.
        batch_size: frames that are decoded together.
    """

    policy: Literal["routed", "all", "none"] = "routed"
    ranking: Literal["rerank", "retrieval"] = "rerank"
    num_examples: int = 3
    merge: Literal["replace", "tail_only"] = "replace"
    mmr_lambda: float = 0.0
    min_score: float | None = None
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name, allowed in (("policy", POLICIES), ("ranking", RANKINGS), ("merge", MERGES)):
            if getattr(self, name) not in allowed:
                raise SceneGraphError(f"{name}={getattr(self, name)!r}: {suggestion(getattr(self, name), allowed)}.")
        if self.num_examples < 1 or self.batch_size < 1:
            raise SceneGraphError(
                f"num_examples={self.num_examples}, batch_size={self.batch_size}; both must be at least 1. Use "
                "policy='none' for drafts alone."
            )
        if not 0 <= self.mmr_lambda <= 1:
            raise SceneGraphError(f"mmr_lambda={self.mmr_lambda}; it must be in [0, 1].")


@dataclass(frozen=True)
class SGGICLOutput:
    """What a pipeline says of some frames; every list has an entry per frame.

    Attributes:
        graphs: the answers.
        drafts: the first answers, with the statistics of their decoding.
        routed: which frames got a second look.
        route_probabilities: of being rare, by the router; NaN where there is none.
        examples: what stood in the prompt, the most similar last; empty for frames without a second look.
        scores: the score of each example, in the same order.
    """

    graphs: list[SceneGraph]
    drafts: list[Prediction]
    routed: list[bool]
    route_probabilities: list[float]
    examples: list[list[Example]]
    scores: list[list[float]]


def merge_tail(draft: SceneGraph, answer: SceneGraph, tail: Collection[str]) -> SceneGraph:
    """The second answer for pairs of entities where either answer has a rare predicate, the draft for all others."""
    first, second, rare = draft.pairs(), answer.pairs(), set(tail)
    changed = {pair for pair in {*first, *second} if rare & {*first.get(pair, ()), *second.get(pair, ())}}
    kept = [triplet for triplet in draft if (triplet.subject, triplet.object) not in changed]
    added = [triplet for triplet in answer if (triplet.subject, triplet.object) in changed]
    return SceneGraph([*kept, *added], draft.meta)


class SGGICLPipeline:
    """A predictor with an index of labeled frames, a router and a reranker.

    Args:
        predictor: makes drafts and, given examples, second answers.
        index: labeled training frames.
        router: says which frames are likely rare; not needed with `policy` "all" or "none".
        reranker: orders candidates; not needed with `ranking="retrieval"`.
        config: how they are used.

    Raises:
        SceneGraphError: a part that the configuration needs is missing, or parts don't share a vocabulary.

    Example:
        ```py
        pipe = SGGICLPipeline.from_pretrained("runs/sgg/model")
        output = pipe(OR4DDataset("4D-OR_data", "test"))
        print(output.graphs[0].sorted(), output.routed[0])
        ```
    """

    def __init__(
        self,
        predictor: SGGPredictor,
        index: SceneIndex | None = None,
        router: AdaptiveRouter | None = None,
        reranker: Reranker | None = None,
        config: SGGICLConfig | None = None,
    ) -> None:
        self.predictor, self.index, self.router, self.reranker = predictor, index, router, reranker
        self.config = config or SGGICLConfig()
        self._check_parts()

    def _check_parts(self) -> None:
        config = self.config
        needed = {
            "index": config.policy != "none",
            "router": config.policy == "routed",
            "reranker": config.policy != "none" and config.ranking == "rerank",
        }
        missing = [name for name, is_needed in needed.items() if is_needed and getattr(self, name) is None]
        if missing:
            raise SceneGraphError(
                f"policy={config.policy!r} with ranking={config.ranking!r} needs {', '.join(missing)}, which this "
                "pipeline doesn't have."
            )

    @property
    def tail_split(self) -> TailSplit:
        """Which predicates are rare, by the labels of the index."""
        if self.index is None:
            raise SceneGraphError("a pipeline without an index doesn't know which predicates are rare.")
        return self.index.tail_split

    def with_config(self, **changes: object) -> SGGICLPipeline:
        """The same parts, used in another way."""
        return SGGICLPipeline(
            self.predictor, self.index, self.router, self.reranker, dataclasses.replace(self.config, **changes)
        )

    # --- the steps ----------------------------------------------------------------------------------------------

    def draft(self, samples: Sequence[Sample], progress: bool = False) -> list[Prediction]:
        """First answers, without examples."""
        return self._predict(samples, None, progress)

    def retrieve(self, samples: Sequence[Sample], drafts: Sequence[Prediction]) -> list[list[Candidate]]:
        """Labeled frames that may resemble each sample, best first, none of its own take."""
        return self.index.search(samples, [draft.graph for draft in drafts], config=self.config.retrieval)

    def route(self, drafts: Sequence[Prediction], candidates: Sequence[Sequence[Candidate]]) -> np.ndarray:
        """Probability of each sample to be rare, float64 `(samples,)`."""
        features = router_features(drafts, candidates, self.tail_split, self.index.prior)
        return self.router.predict_proba(features)

    def choose(self, sample: Sample, draft: Prediction, candidates: Sequence[Candidate]) -> list[Example]:
        """The examples for a sample, the most similar last."""
        if not candidates:
            return []
        if self.config.ranking == "rerank":
            scores = self.reranker.score(sample, draft.graph, candidates)
        else:
            scores = np.array([candidate.score for candidate in candidates])
        return select_examples(
            candidates, scores, self.config.num_examples, self.config.mmr_lambda, self.config.min_score
        )

    def refine(
        self,
        samples: Sequence[Sample],
        drafts: Sequence[Prediction],
        examples: Sequence[Sequence[Example]],
        progress: bool = False,
    ) -> list[SceneGraph]:
        """Second answers, merged with the drafts; a sample without examples keeps its draft."""
        graphs = [draft.graph for draft in drafts]
        chosen = [index for index, given in enumerate(examples) if given]
        answers = self._predict([samples[i] for i in chosen], [examples[i] for i in chosen], progress)
        for index, answer in zip(chosen, answers, strict=True):
            # The examples may not have fitted into the prompt at all.
            if answer.num_examples:
                graphs[index] = self.merge(graphs[index], answer.graph)
        return graphs

    def merge(self, draft: SceneGraph, answer: SceneGraph) -> SceneGraph:
        """One graph of a draft and a second answer."""
        return answer if self.config.merge == "replace" else merge_tail(draft, answer, self.tail_split.tail)

    def __call__(self, samples: Sequence[Sample], progress: bool = False) -> SGGICLOutput:
        """Scene graphs of some frames.

        Args:
            samples: frames; a data set or `VideoFrames` is a sequence of them.
            progress: show progress bars.

        Raises:
            SceneGraphError: no samples.
        """
        samples = list(samples)
        if not samples:
            raise SceneGraphError("no samples were given.")
        drafts = self.draft(samples, progress)
        probabilities = np.full(len(samples), np.nan)
        routed = np.full(len(samples), self.config.policy == "all")
        candidates: list[list[Candidate]] = [[] for _ in samples]
        if self.config.policy != "none":
            candidates = self.retrieve(samples, drafts)
        if self.router is not None and self.config.policy != "none":
            probabilities = self.route(drafts, candidates)
            if self.config.policy == "routed":
                routed = probabilities > self.router.threshold
        examples: list[list[Example]] = [[] for _ in samples]
        chosen = np.flatnonzero(routed)
        for index in tqdm(chosen, desc="ranking", unit="frame", disable=not progress):
            examples[index] = self.choose(samples[index], drafts[index], candidates[index])
        graphs = self.refine(samples, drafts, examples, progress)
        return SGGICLOutput(
            graphs=graphs,
            drafts=drafts,
            routed=[bool(flag) for flag in routed],
            route_probabilities=[float(value) for value in probabilities],
            examples=examples,
            scores=[[example.score for example in given] for given in examples],
        )

    def _predict(
        self, samples: Sequence[Sample], examples: Sequence[Sequence[Example]] | None, progress: bool
    ) -> list[Prediction]:
        size, predictions = self.config.batch_size, []
        title = "drafts" if examples is None else "second look"
        for start in tqdm(range(0, len(samples), size), desc=title, unit="batch", disable=not progress):
            given = None if examples is None else examples[start : start + size]
            predictions += self.predictor.predict(samples[start : start + size], given)
        return predictions

    # --- files --------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike, with_images: bool = False) -> None:
        """Write all parts into a folder, which appears whole or not at all.

        Args:
            folder: to make or replace.
            with_images: copy the images of the index, so that the folder can be moved to where the data isn't.
        """
        settings = {"config": dataclasses.asdict(self.config)}
        with atomic_directory(Path(folder)) as target:
            for name in ("predictor", "router", "reranker"):
                part = getattr(self, name)
                if part is not None:
                    part.save_pretrained(target / name)
            if self.index is not None:
                self.index.save_pretrained(target / "index", with_images)
            (target / SETTINGS_NAME).write_text(json.dumps(settings, indent=1), encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike, device: str | None = None) -> SGGICLPipeline:
        """Load what `save_pretrained` wrote.

        Raises:
            SceneGraphError: the folder isn't one of a pipeline.
        """
        folder = Path(folder)
        path = folder / SETTINGS_NAME
        if not path.is_file():
            raise SceneGraphError(f"{folder} is no SGG-ICL pipeline: it holds no {SETTINGS_NAME}.")
        values = json.loads(path.read_text(encoding="utf-8"))["config"]
        config = SGGICLConfig(**{**values, "retrieval": RetrievalConfig(**values["retrieval"])})
        predictor = load_predictor(folder / "predictor", device)
        loaders = {
            "index": lambda part: SceneIndex.from_pretrained(part, predictor=predictor, device=device),
            "router": AdaptiveRouter.from_pretrained,
            "reranker": lambda part: load_reranker(part, device),
        }
        parts = {name: load(folder / name) for name, load in loaders.items() if (folder / name).is_dir()}
        return cls(predictor, config=config, **parts)
