"""From a script in prose to a timed plan of shots, through any causal language model.

A logits processor lets through only tokens that keep the answer on the way to a whole plan, one JSON object per line
(the idea of "Efficient Guided Generation for Large Language Models", arXiv 2307.09702, for one fixed schema): even a
model that understands nothing writes a plan that can be read. What is good about a plan comes from the model alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import LogitsProcessor

from vidgen.runtime.checks import check_whole
from vidgen.runtime.errors import ConfigError, VidgenError

from .generation import encode_prompt, generate_tokens, room_for_answer, stop_tokens
from .models import LanguageModel, LanguageModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The lines of a plan are these pieces with a number of seconds and a prompt between them.
OPENING, MIDDLE, CLOSING = '{"seconds": ', ', "prompt": "', '"}\n'

# The least that a shot lasts once a plan is stretched to a given length, seconds.
SHORTEST_SHOT = 0.5


class DirectError(VidgenError):
    """A script can't be turned into a plan."""


@dataclass(frozen=True)
class Shot:
    """One prompt of a plan and the seconds it is shown."""

    prompt: str
    seconds: float


@dataclass(frozen=True)
class PlanSchema:
    """What a plan may hold.

    Attributes:
        min_shots: fewest shots.
        max_shots: most shots.
        max_seconds: longest shot, a whole number; the shortest is 1.
        min_characters: of a prompt, blanks at its end included.
        max_characters: of a prompt.
    """

    min_shots: int = 2
    max_shots: int = 12
    max_seconds: int = 30
    min_characters: int = 12
    max_characters: int = 300

    def __post_init__(self) -> None:
        for low, high in (("min_shots", "max_shots"), ("min_characters", "max_characters")):
            check_whole(1, **{low: getattr(self, low)})
            check_whole(getattr(self, low), **{high: getattr(self, high)})
        check_whole(1, max_seconds=self.max_seconds)


@dataclass(frozen=True)
class _State:
    """Where in a plan a text ends.

    Attributes:
        place: `opening`, `number`, `middle`, `text`, `closing`, or `done` after the token that ends the answer.
        shots: whole lines so far.
        used: tokens of the piece that are written; in a text, its characters.
        digits: of the number so far.
    """

    place: str = "opening"
    shots: int = 0
    used: int = 0
    digits: str = ""


class PlanProcessor(LogitsProcessor):
    """Lets through only tokens that lead to a plan within a budget of tokens.

    What is allowed follows from the tokens of a row alone, so drafts can be judged and taken back. Fixed pieces are
    written with the longest tokens that fit. Characters whose bytes no single token holds can't be written.

    Args:
        tokenizer: any of transformers.
        stops: tokens that end an answer.
        prompt_length: tokens before the answer.
        max_new_tokens: the budget.
        schema: what a plan may hold.

    Raises:
        LanguageModelError: the tokenizer can't write a plan.
        DirectError: the budget is too small for the shortest plan.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: list[int],
        prompt_length: int,
        max_new_tokens: int,
        schema: PlanSchema,
    ) -> None:
        if not stops:
            raise LanguageModelError("the model has no end-of-text token, so a plan could never end.")
        self.stops, self.prompt_length, self.budget, self.schema = stops, prompt_length, max_new_tokens, schema
        self.texts = token_texts(tokenizer)
        by_text = {text: index for index, text in reversed(list(enumerate(self.texts))) if text}
        self.pieces = {
            "opening": _longest_tokens(by_text, OPENING),
            "middle": _longest_tokens(by_text, MIDDLE),
            "closing": _longest_tokens(by_text, CLOSING),
        }
        self.numbers = {index: text for index, text in enumerate(self.texts) if text.isascii() and text.isdecimal()}
        if missing := set("0123456789") - set(self.numbers.values()):
            raise LanguageModelError(
                f"the tokenizer has no token for the digit {min(missing)}; it can't write a plan."
            )
        # Characters of each token that may stand in a prompt, 0 for the others.
        self.lengths = torch.tensor([len(text) if _is_plain(text) else 0 for text in self.texts])
        self.begins_blank = torch.tensor([text[:1].isspace() for text in self.texts])
        if not bool(((self.lengths == 1) & ~self.begins_blank).any()):
            raise LanguageModelError("the tokenizer has no token of a single letter; it can't write a plan.")
        self.number_cost = len(str(schema.max_seconds))
        if max_new_tokens < self.cost(schema):
            raise DirectError(
                f"a plan of {schema.min_shots} shots may take {self.cost(schema)} tokens, and there is room for "
                f"{max_new_tokens}; shorten the script, ask for fewer shots, or use a model with a longer context."
            )
        self._rows: dict[int, tuple[list[int], list[_State]]] = {}

    def cost(self, schema: PlanSchema) -> int:
        """Tokens that the shortest plan may take, at one character per token."""
        return schema.min_shots * self._line_cost + 1

    @property
    def _line_cost(self) -> int:
        fixed = sum(map(len, self.pieces.values()))
        return fixed + self.number_cost + self.schema.min_characters

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `(batch, vocabulary)` with -inf for what would leave the plan after `input_ids` `(batch, length)`."""
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        for row, ids in enumerate(input_ids[:, self.prompt_length :].tolist()):
            state = self._state_after(row, ids)
            allowed[row, self._allowed(state, self.budget - len(ids)).to(scores.device)] = True
        return scores.masked_fill(~allowed, float("-inf"))

    def read(self, ids: list[int]) -> list[Shot]:
        """The plan that an answer holds."""
        text = "".join(self.texts[index] for index in ids if index not in self.stops)
        shots = []
        for line in text.splitlines():
            entry = json.loads(line)
            shots.append(Shot(" ".join(entry["prompt"].split()), float(entry["seconds"])))
        return shots

    def _state_after(self, row: int, ids: list[int]) -> _State:
        """The state after a row's answer; only what it doesn't share with the row's last call is read."""
        known, states = self._rows.setdefault(row, ([], [_State()]))
        shared = 0
        while shared < min(len(known), len(ids)) and known[shared] == ids[shared]:
            shared += 1
        del known[shared:], states[shared + 1 :]
        for index in ids[shared:]:
            known.append(index)
            states.append(self._advance(states[-1], index))
        return states[-1]

    def _advance(self, state: _State, index: int) -> _State:
        """The state one token later; tokens that weren't allowed, as drafts may have, end it."""
        if index in self.stops or state.place == "done":
            return replace(state, place="done")
        if state.place in self.pieces:
            piece = self.pieces[state.place]
            if piece[state.used] != index:
                return replace(state, place="done")
            if state.used + 1 < len(piece):
                return replace(state, used=state.used + 1)
            return {
                "opening": _State("number", state.shots),
                "middle": _State("text", state.shots),
                "closing": _State("opening", state.shots + 1),
            }[state.place]
        if state.place == "number":
            if index in self.numbers:
                return replace(state, digits=state.digits + self.numbers[index])
            return self._advance(_State("middle", state.shots), index)
        if index == self.pieces["closing"][0]:
            return self._advance(_State("closing", state.shots), index)
        return replace(state, used=state.used + int(self.lengths[index]))

    def _allowed(self, state: _State, budget: int) -> torch.Tensor:
        """Tokens that may come next, when `budget` tokens are left, this one included."""
        schema = self.schema
        if state.place == "done":
            return torch.tensor(self.stops)
        # What has to be paid after the line that is being written: the shots still missing, and the end.
        later = max(0, schema.min_shots - state.shots - 1) * self._line_cost + 1
        if state.place == "opening" and state.used == 0:
            choices = []
            if state.shots < schema.max_shots and budget >= self._line_cost + later:
                choices.append(self.pieces["opening"][0])
            if state.shots >= schema.min_shots:
                choices += self.stops
            return torch.tensor(choices)
        if state.place in self.pieces:
            return torch.tensor([self.pieces[state.place][state.used]])
        if state.place == "number":
            choices = [] if not state.digits else [self.pieces["middle"][0]]
            for index, text in self.numbers.items():
                value = state.digits + text
                if value[0] != "0" and int(value) <= schema.max_seconds:
                    choices.append(index)
            return torch.tensor(choices)
        missing = max(0, schema.min_characters - state.used - 1)
        allowed = torch.zeros_like(self.begins_blank)
        if budget - 1 >= missing + len(self.pieces["closing"]) + later:
            allowed = (self.lengths > 0) & (self.lengths <= schema.max_characters - state.used)
            if state.used == 0:
                allowed = allowed & ~self.begins_blank
        if state.used >= schema.min_characters:
            allowed[self.pieces["closing"][0]] = True
        return allowed.nonzero()[:, 0]


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token adds to a text when it follows a letter; special and incomplete ones add nothing here."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    # Behind something, since some tokenizers drop a blank at the beginning of a text.
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    before = tokenizer.decode(anchor, **options)
    decoded = tokenizer.batch_decode([anchor + [index] for index in range(len(tokenizer))], **options)
    texts = []
    for index, text in enumerate(decoded):
        whole = index not in special and text.startswith(before) and "\N{REPLACEMENT CHARACTER}" not in text
        texts.append(text[len(before) :] if whole else "")
    return texts


def _longest_tokens(by_text: dict[str, int], piece: str) -> list[int]:
    tokens, begin = [], 0
    while begin < len(piece):
        ends = [end for end in range(len(piece), begin, -1) if piece[begin:end] in by_text]
        if not ends:
            raise LanguageModelError(f"the tokenizer has no token for {piece[begin]!r}; it can't write a plan.")
        tokens.append(by_text[piece[begin : ends[0]]])
        begin = ends[0]
    return tokens


def _is_plain(text: str) -> bool:
    """Whether a token may stand in a prompt as it is: nothing that JSON would escape, and one line."""
    return bool(text) and text.isprintable() and not set(text) & set('"\\')


def instructions(script: str, schema: PlanSchema, seconds: float | None) -> str:
    """What the model is asked.

    Args:
        script: in prose.
        schema: what a plan may hold.
        seconds: length of the video, where it is given.
    """
    shots = f"{schema.min_shots} to {schema.max_shots}" if schema.min_shots < schema.max_shots else schema.min_shots
    length = "" if seconds is None else f" Together they last about {seconds:g} seconds."
    example = f"{OPENING}5{MIDDLE}a red train crosses a bridge in the rain{CLOSING}"
    return (
        f"Turn this script into {shots} shots of a video, in order, one JSON object per line, such as\n{example}"
        f"A prompt is one sentence with everything that is to be seen, complete without the others. A shot lasts 1 to "
        f"{schema.max_seconds} seconds.{length} Answer with the lines alone.\n\nScript:\n{script.strip()}\n\nShots:\n"
    )


def direct(
    lm: LanguageModel,
    script: str,
    schema: PlanSchema | None = None,
    seconds: float | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    decoder: str | None = None,
) -> list[Shot]:
    """Turn a script into a plan.

    Args:
        lm: an instruct model; others yield plans that can be read and mean nothing.
        script: in prose.
        schema: what the plan may hold.
        seconds: length that the plan is stretched or shortened to; by default as long as the model makes it.
        temperature: 0 takes the most probable token.
        seed: fixes what is drawn.
        decoder: name of a drafter for speculative decoding.

    Raises:
        DirectError: the script is empty, the length too short, or the plan doesn't fit the model's context.
        GenerationRequestError: the script alone doesn't fit.
    """
    schema = schema or PlanSchema()
    if not script.strip():
        raise DirectError("the script is empty; write what happens, in prose.")
    shortest = schema.max_shots * SHORTEST_SHOT
    if seconds is not None and not shortest <= seconds < float("inf"):
        raise DirectError(
            f"seconds={seconds:g}; {schema.max_shots} shots last {shortest:g} seconds at least. Ask for fewer shots."
        )
    input_ids = encode_prompt(lm, instructions(script, schema, seconds))
    room, stops = room_for_answer(lm, input_ids), stop_tokens(lm)
    processor = PlanProcessor(lm.tokenizer, stops, input_ids.shape[1], room, schema)
    answer = generate_tokens(
        lm,
        input_ids,
        room,
        temperature=temperature,
        seed=seed,
        decoder=decoder,
        logits_processor=[processor],
    )
    shots = processor.read(answer.tolist())
    return shots if seconds is None else stretch(shots, seconds)


def stretch(shots: list[Shot], seconds: float) -> list[Shot]:
    """The plan with another length; shots keep their shares of what exceeds the shortest possible plan.

    Args:
        shots: of the plan.
        seconds: at least `SHORTEST_SHOT` per shot.
    """
    free = seconds - SHORTEST_SHOT * len(shots)
    if free < 0:
        raise ConfigError(f"seconds={seconds:g}; {len(shots)} shots last {SHORTEST_SHOT * len(shots):g} at least.")
    total = sum(shot.seconds for shot in shots)
    ends, passed = [0.0], 0.0
    for shot in shots:
        passed += SHORTEST_SHOT + free * shot.seconds / total
        ends.append(round(passed, 2))
    ends[-1] = seconds
    return [replace(shot, seconds=round(end - begin, 2)) for shot, begin, end in zip(shots, ends, ends[1:])]
