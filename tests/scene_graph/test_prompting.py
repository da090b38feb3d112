from __future__ import annotations

import numpy as np
import pytest

from scene_graph.formats import format_triplet_text, parse_triplet_text
from scene_graph.predictors import Example
from scene_graph.prompting import SGGPromptBuilder
from scene_graph.schema import SceneGraph, SceneGraphError, Vocabulary


def texts(message) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def pictures(message) -> list[np.ndarray]:
    return [np.asarray(part["image"]) for part in message["content"] if part["type"] == "image"]


@pytest.fixture
def builder() -> SGGPromptBuilder:
    return SGGPromptBuilder(Vocabulary.or4d())


@pytest.fixture
def query(make_sample, rng):
    return make_sample(rng, num_views=3, memory="Short: drilling began.")


@pytest.fixture
def examples(make_sample, rng) -> list[Example]:
    return [
        Example(sample, sample.graph, score)
        for score in (0.5, 0.9, 0.1)
        for sample in [make_sample(rng, take=f"take{score}", num_views=2, primary=1)]
    ]


def test_examples_are_turns_of_the_chat_with_the_most_similar_one_before_the_query(builder, query, examples):
    chat = builder.messages(query, examples)
    assert [turn["role"] for turn in chat] == ["system", *["user", "assistant"] * 3, "user"]
    for place, index in ((1, 2), (3, 0), (5, 1)):
        example = examples[index]
        # One picture: the primary view.
        assert len(pictures(chat[place])) == 1
        assert np.array_equal(pictures(chat[place])[0], example.sample.images()[1])
        assert parse_triplet_text(texts(chat[place + 1]), builder.vocabulary).graph == example.graph


def test_the_query_has_all_views_in_order_its_memory_and_every_name(builder, query, examples):
    last = builder.messages(query, examples)[-1]
    assert all(np.array_equal(a, b) for a, b in zip(pictures(last), query.images(), strict=True))
    for name in (*builder.vocabulary.entities, *builder.vocabulary.predicates, "Short: drilling began."):
        assert name in texts(last)
    assert texts(last).index("Short:") < texts(last).index("head surgeon") < texts(last).index("closeTo")
    assert "Memory" not in builder.request(None)


def test_an_answer_keeps_the_order_of_triplets_and_sorts_a_graph(builder, query):
    shuffled = list(query.graph.sorted())[::-1]
    assert texts(builder.messages(query, answer=shuffled)[-1]) == format_triplet_text(shuffled)
    assert texts(builder.messages(query, answer=SceneGraph(shuffled))[-1]) == format_triplet_text(query.graph.sorted())


def test_no_examples_is_the_prompt_without_examples(builder, query):
    assert [turn["role"] for turn in builder.messages(query, [])] == ["system", "user"]


def test_examples_beyond_the_limit_are_dropped_from_the_least_similar_end(query, examples):
    builder = SGGPromptBuilder(Vocabulary.or4d(), max_examples=2)
    with pytest.warns(UserWarning, match="3 examples were given, the limit is 2"):
        chat = builder.messages(query, examples)
    assert texts(chat[2]) == format_triplet_text(examples[0].graph)
    assert texts(chat[4]) == format_triplet_text(examples[1].graph)


def num_pictures(chat) -> int:
    return sum(len(pictures(turn)) for turn in chat)


@pytest.mark.parametrize(
    ("most", "kept", "shown"),
    [(9, 3, 9), (8, 2, 7), (7, 2, 7), (6, 1, 5), (5, 1, 5), (4, 1, 4), (3, 0, 3)],
)
def test_a_long_prompt_loses_examples_then_their_views_and_never_the_querys(query, examples, most, kept, shown):
    builder = SGGPromptBuilder(Vocabulary.or4d(), example_views="all")
    if kept < 3:
        with pytest.warns(UserWarning, match=f"the {3 - kept} least similar are dropped"):
            chat, count = builder.messages_within(query, examples, num_pictures, most)
    else:
        chat, count = builder.messages_within(query, examples, num_pictures, most)
    assert (count, num_pictures(chat)) == (kept, shown)
    assert len(pictures(chat[-1])) == 3
    if kept:
        assert texts(chat[-2]) == format_triplet_text(examples[1].graph)  # the most similar one stays to the last


def test_a_query_that_does_not_fit_alone_is_an_error_with_its_name(query, examples):
    with pytest.raises(SceneGraphError, match=f"{query.id}: its 3 views"):
        SGGPromptBuilder(Vocabulary.or4d()).messages_within(query, examples, num_pictures, 2)


def test_settings_survive_and_wrong_ones_are_named(builder):
    other = SGGPromptBuilder(Vocabulary.mmor(), "all", 2)
    assert SGGPromptBuilder.from_dict(other.to_dict()).to_dict() == other.to_dict()
    with pytest.raises(SceneGraphError, match="did you mean 'primary'"):
        SGGPromptBuilder(Vocabulary.or4d(), "primar")
