"""Prompt plans as lines of text."""

from __future__ import annotations

import pytest

from vidgen.demo.plan_text import add_line, read_plan
from vidgen.pipelines import PromptPlan, PromptPlanError


def test_lines_say_when_a_prompt_begins() -> None:
    plan = read_plan("a meadow\n\n5 s: a meadow in the rain\n 7.5s :  night, at 3 s: after dusk \n")
    assert plan == PromptPlan.parse(
        [("a meadow", 5), ("a meadow in the rain", 2.5), ("night, at 3 s: after dusk", None)]
    )
    assert plan.starts == (0, 5, 7.5)


def test_a_single_prompt_lasts_to_the_end() -> None:
    assert read_plan("0 s: a meadow").to_list() == read_plan("a meadow").to_list() == [["a meadow", None]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  \n ", "empty"),
        ("2 s: a meadow", "begins at 2 s; its first line has to begin at 0 s"),
        ("a meadow\na desert", "Line 2 .* write `5 s: a desert`"),
        ("a meadow\n5 s: rain\n5 s: snow", "Line 3 .* begins at 5 s, the line before at 5 s"),
        ("a meadow\n\n5 s:", "Line 3 .* 0 characters"),
        ("x" * 601, "601 characters"),
        ("\n".join(f"{second} s: a" for second in range(41)), "41 lines; allowed: 40"),
    ],
)
def test_a_plan_that_cannot_be_read_names_the_line(text: str, message: str) -> None:
    with pytest.raises(PromptPlanError, match=message):
        read_plan(text)


def test_a_line_is_added_where_it_belongs_or_replaces() -> None:
    text = add_line("a meadow\n10 s: night", 5, " rain\nat noon ")
    assert text == "0 s: a meadow\n5 s: rain at noon\n10 s: night"
    assert add_line(text, 5, "snow") == "0 s: a meadow\n5 s: snow\n10 s: night"
    assert add_line("", 0, "a meadow") == "0 s: a meadow"


def test_a_line_that_makes_no_plan_is_refused() -> None:
    for second, prompt in ((-1, "a"), (float("nan"), "a"), (5, "  ")):
        with pytest.raises(PromptPlanError):
            add_line("a meadow", second, prompt)
