"""The chat that asks a multimodal language model for a scene graph, with or without labeled examples before it.

Examples are real turns of a chat, a question with pictures and the answer that would have been right, so that every
chat template works; the most similar one comes last, as in RICES (OpenFlamingo). The answer is one line of
`subject,object,predicate` triplets, the format of ORacle (arXiv 2404.07031) and MM-OR (arXiv 2503.02579).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from PIL import Image

from scene_graph.formats import format_triplet_text
from scene_graph.predictors.base import Example
from scene_graph.schema import Sample, SceneGraph, SceneGraphError, Triplet, Vocabulary
from vidgen.runtime.errors import suggestion

# One turn: {"role": …, "content": [{"type": "text", "text": …} or {"type": "image", "image": a PIL image}, …]}
Message = dict[str, Any]

EXAMPLE_VIEWS = ("primary", "all")


class SGGPromptBuilder:
    """Makes chats of samples and examples.

    Args:
        vocabulary: the names that the model may use.
        example_views: pictures of an example: its primary view, or all; a query always has all.
        max_examples: the least similar examples beyond this number are dropped with a warning.

    Raises:
        SceneGraphError: an unknown value of `example_views`, or a negative number.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        example_views: Literal["primary", "all"] = "primary",
        max_examples: int = 8,
    ) -> None:
        if example_views not in EXAMPLE_VIEWS:
            raise SceneGraphError(f"example_views={example_views!r}: {suggestion(example_views, EXAMPLE_VIEWS)}.")
        if max_examples < 0:
            raise SceneGraphError(f"max_examples={max_examples}; it must be 0 or more.")
        self.vocabulary, self.example_views, self.max_examples = vocabulary, example_views, max_examples

    @property
    def rule(self) -> str:
        """What the system turn says."""
        return (
            "You watch an operating room through several cameras and describe it as a scene graph. Answer with "
            "nothing but the relations between the entities, each written entity1,entity2,predicate; where entity1 "
            "does the predicate to entity2. Put them between <SG> and </SG>."
        )

    def request(self, memory: str | None = None) -> str:
        """The text of a question, which follows the pictures.

        Args:
            memory: what happened before, if anything is known.
        """
        past = f"Memory: {memory}\n" if memory else ""
        return (
            f"{past}Entities: {', '.join(self.vocabulary.entities)}\n"
            f"Predicates: {', '.join(self.vocabulary.predicates)}\n"
            "Write the scene graph of timepoint T."
        )

    def messages(
        self,
        sample: Sample,
        examples: Sequence[Example] = (),
        answer: SceneGraph | Sequence[Triplet] | None = None,
    ) -> list[Message]:
        """The chat for a sample.

        Args:
            sample: the query.
            examples: in any order.
            answer: the right answer, for training; triplets are written in their order, a graph in canonical order.
        """
        return self._chat(sample, self._chosen(sample, examples), self.example_views, answer)

    def messages_within(
        self, sample: Sample, examples: Sequence[Example], length: Callable[[list[Message]], int], max_length: int
    ) -> tuple[list[Message], int]:
        """The chat for a sample, cut to what a model can read; pictures of the query are never given up.

        Examples are dropped from the least similar end while more than one is left; then the last one's other views,
        then the last one.

        Args:
            sample: the query.
            examples: in any order.
            length: tokens of a chat.
            max_length: most tokens.

        Returns:
            The chat, and how many examples are in it.

        Raises:
            SceneGraphError: the query alone is too long.
        """
        chosen = self._chosen(sample, examples)
        tries = [(chosen[first:], self.example_views) for first in range(len(chosen))]
        if chosen and self.example_views == "all":
            tries.append((chosen[-1:], "primary"))
        tries.append(((), self.example_views))
        for kept, views in tries:
            chat = self._chat(sample, kept, views, None)
            tokens = length(chat)
            if tokens <= max_length:
                if len(kept) < len(chosen):
                    warnings.warn(
                        f"sample {sample.id}: {len(chosen)} examples don't fit into {max_length} tokens; the "
                        f"{len(chosen) - len(kept)} least similar are dropped.",
                        stacklevel=3,
                    )
                return chat, len(kept)
        raise SceneGraphError(
            f"sample {sample.id}: its {len(sample.views)} views and the request are {tokens} tokens, the model reads "
            f"{max_length}; give fewer views, or lower the processor's max_pixels."
        )

    def _chosen(self, sample: Sample, examples: Sequence[Example]) -> tuple[Example, ...]:
        """Examples with the most similar last, those beyond the limit dropped."""
        ordered = tuple(sorted(examples, key=lambda example: example.score))
        if len(ordered) > self.max_examples:
            warnings.warn(
                f"sample {sample.id}: {len(ordered)} examples were given, the limit is {self.max_examples}; the least "
                "similar are dropped.",
                stacklevel=3,
            )
            ordered = ordered[len(ordered) - self.max_examples :]
        return ordered

    def _chat(
        self,
        sample: Sample,
        examples: Sequence[Example],
        example_views: str,
        answer: SceneGraph | Sequence[Triplet] | None,
    ) -> list[Message]:
        chat = [{"role": "system", "content": [{"type": "text", "text": self.rule}]}]
        for example in examples:
            shown = [example.sample.primary] if example_views == "primary" else range(len(example.sample.views))
            chat.append(self._question(example.sample, shown))
            chat.append(self._answer(example.graph))
        chat.append(self._question(sample, range(len(sample.views))))
        if answer is not None:
            chat.append(self._answer(answer))
        return chat

    def _question(self, sample: Sample, views: Sequence[int]) -> Message:
        pictures = [{"type": "image", "image": Image.fromarray(sample.image(view))} for view in views]
        return {"role": "user", "content": [*pictures, {"type": "text", "text": self.request(sample.memory)}]}

    @staticmethod
    def _answer(graph: SceneGraph | Sequence[Triplet]) -> Message:
        return {"role": "assistant", "content": [{"type": "text", "text": format_triplet_text(graph)}]}

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` makes the same builder of."""
        return {
            "vocabulary": self.vocabulary.to_dict(),
            "example_views": self.example_views,
            "max_examples": self.max_examples,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SGGPromptBuilder:
        """The inverse of `to_dict`."""
        return cls(Vocabulary.from_dict(values["vocabulary"]), values["example_views"], values["max_examples"])
