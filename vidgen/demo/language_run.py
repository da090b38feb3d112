"""A visitor's comparison of two ways to decode one prompt: they take turns, and each is charged for its own alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import BaseStreamer

from vidgen.demo.turns import CHUNK, PLAY, Turns
from vidgen.demo.visitors import DemoError
from vidgen.language.decoding import KnapSpecDrafter, LatencyProfile, make_drafter
from vidgen.language.decoding.bench import DEFAULT_METHODS, logit_gap
from vidgen.language.generation import check_room, encode_prompt, generate_tokens
from vidgen.runtime.checks import check_whole
from vidgen.runtime.errors import suggestion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vidgen.language.decoding import Drafter, SpecStats
    from vidgen.language.models import LanguageModel

PLAIN = "ar"
METHODS = tuple(method for method in DEFAULT_METHODS if method != PLAIN)
MAX_NEW_TOKENS = 512
MAX_CHARACTERS = 20_000
MAX_TEMPERATURE = 2.0
MAX_SEED = (1 << 31) - 1
# How long a side computes before the other one, and whoever else waits, goes on.
SLICE_SECONDS = 0.1
REFRESH_SECONDS = 0.1
# What the page shows of bytes that aren't a character yet.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class DecodingRequest:
    """What is to be decoded.

    Attributes:
        prompt: to continue, or to answer by an instruct model.
        method: drafter of the speculative side, one of `METHODS`.
        max_new_tokens: most tokens of each side.
        temperature: 0 takes the most probable token.
        seed: of both sides' draws.
    """

    prompt: str
    method: str
    max_new_tokens: int
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise DemoError("The prompt is empty; give a text to continue.")
        if len(self.prompt) > MAX_CHARACTERS:
            raise DemoError(f"The prompt has {len(self.prompt)} characters; allowed: at most {MAX_CHARACTERS}.")
        if self.method not in METHODS:
            raise DemoError(f"method {self.method!r} is unknown: {suggestion(str(self.method), METHODS)}.")
        check_whole(1, MAX_NEW_TOKENS, max_new_tokens=self.max_new_tokens)
        check_whole(0, MAX_SEED, seed=self.seed)
        is_number = isinstance(self.temperature, int | float) and not isinstance(self.temperature, bool)
        if not is_number or not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise DemoError(f"temperature={self.temperature!r}; allowed: 0 to {MAX_TEMPERATURE:g}.")


class Target:
    """A language model, and what is measured of it once for all visitors.

    Args:
        lm: the model.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self._profile: LatencyProfile | None = None
        self._is_warm = False

    def drafter(self, method: str) -> Drafter:
        """A new drafter: what another visitor's would have learned is not this one's. Call it within a turn."""
        if method != KnapSpecDrafter.name:
            return make_drafter(method, self.lm.model)
        if self._profile is None:
            self._profile = LatencyProfile.measure(self.lm.model)
        return KnapSpecDrafter(self.lm.model, profile=self._profile)

    def warm_up(self, input_ids: torch.Tensor) -> None:
        """The first pass of a process is slow; it shall be no side's. Call it within a turn."""
        if not self._is_warm:
            generate_tokens(self.lm, input_ids, 1)
            self._is_warm = True


@dataclass
class Side:
    """One way to decode, as far as it has come.

    Attributes:
        method: `PLAIN`, or the drafter's name.
        rounds: for each pass of the model its tokens, and how many of them, the first ones, had been drafted.
        seconds: of its own turns, prompt included.
        stats: of the drafter; None for the plain side and before it begins.
        state: `"waiting"`, `"decoding"`, `"finished"` or `"stopped"`.
    """

    method: str
    rounds: list[tuple[list[int], int]] = field(default_factory=list)
    seconds: float = 0.0
    stats: SpecStats | None = None
    state: str = "waiting"

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return [token for tokens, _ in self.rounds for token in tokens]

    @property
    def drafted(self) -> list[bool]:
        """For each token, whether a draft had proposed it."""
        return [place < count for tokens, count in self.rounds for place in range(len(tokens))]

    @property
    def tokens_per_second(self) -> float:
        """Of its own time."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0


class _StoppedError(Exception):
    """Ends a generation in the middle."""


class _Collector(BaseStreamer):
    """Writes down what a side emits, and between passes lets others compute."""

    def __init__(self, side: Side, drafter: Drafter | None, turns: Turns, stop: threading.Event, lm: LanguageModel):
        self._side, self._drafter, self._turns, self._stop = side, drafter, turns, stop
        self._devices = [lm.device] if lm.device.type == "cuda" else []
        self._is_prompt, self._accepted = True, 0
        self._began = self._slice = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """Called by the decoder: with the prompt, then with the tokens of each pass."""
        self._count_time()
        if self._is_prompt:
            self._is_prompt = False
        else:
            self._take(value.flatten().tolist())
        if self._stop.is_set():
            raise _StoppedError
        is_over = time.perf_counter() - self._slice >= SLICE_SECONDS
        # Draws come from torch's own generator: those of the next in turn must not change the ones here.
        with torch.random.fork_rng(self._devices):
            self._turns.give_way(CHUNK if is_over else PLAY)
        self._began = time.perf_counter()
        if is_over:
            self._slice = self._began

    def end(self) -> None:
        """Called by the decoder after the last token."""
        self._count_time()

    def _count_time(self) -> None:
        now = time.perf_counter()
        self._side.seconds += now - self._began
        self._began = now

    def _take(self, tokens: list[int]) -> None:
        drafted = 0
        if self._drafter is not None:
            stats = self._side.stats = self._drafter.stats
            # A stop token within the draft leaves out confirmed ones behind it.
            drafted = min(len(tokens), stats.accepted - self._accepted)
            self._accepted = stats.accepted
        self._side.rounds.append((tokens, drafted))


class LanguageRun:
    """One comparison of one visitor.

    Args:
        target: the model.
        request: what to decode.
        turns: who computes when.

    Attributes:
        target: as given.
        request: as given.
        plain: token by token.
        speculative: with drafts.
        identical: whether both sides gave the same tokens; None before the end, after a stop, and for drawn tokens,
            which are other ones of the same distribution.
        is_tie: of sides that differ: whether the two logits are as close as rounding.
        busy: whether it is decoding.

    Raises:
        GenerationRequestError: the prompt and so many tokens don't fit in the model's context.
    """

    def __init__(self, target: Target, request: DecodingRequest, turns: Turns) -> None:
        self.target, self.request, self._turns = target, request, turns
        self.input_ids = encode_prompt(target.lm, request.prompt)
        check_room(target.lm, self.input_ids, request.max_new_tokens)
        self.plain, self.speculative = Side(PLAIN), Side(request.method)
        self.identical: bool | None = None
        self.is_tie = False
        self._stop = threading.Event()
        self._was_played = self.busy = False

    @property
    def sides(self) -> tuple[Side, Side]:
        """Plain, speculative."""
        return self.plain, self.speculative

    def play(self) -> Iterator[None]:
        """Decode both ways at once; comes back about ten times a second while there is more, and at the end.

        Raises:
            DemoError: it was decoded already.
            VidgenError: the model can't be decoded this way.
        """
        if self._was_played:
            raise DemoError("This comparison was made already; begin a new one.")
        self._was_played = self.busy = True
        try:
            yield
            with self._turns.turn():
                self.target.warm_up(self.input_ids)
                drafter = self.target.drafter(self.request.method)
            with ThreadPoolExecutor(2) as pool:
                try:
                    futures = [
                        pool.submit(self._decode, self.plain, None),
                        pool.submit(self._decode, self.speculative, drafter),
                    ]
                    while True:
                        done, waiting = wait(futures, REFRESH_SECONDS, FIRST_EXCEPTION)
                        for future in done:
                            future.result()
                        if not waiting:
                            break
                        yield
                finally:
                    self.stop()  # the other side of one that failed, or both of a page that was left
            if self.request.temperature == 0 and all(side.state == "finished" for side in self.sides):
                self._compare()
            yield
        finally:
            self.busy = False

    def stop(self) -> None:
        """End it at the next token; what there is stays."""
        self._stop.set()

    def close(self) -> None:
        """The visitor leaves."""
        self.stop()

    def to_dict(self) -> dict[str, Any]:
        """As JSON, see the API's `language_compare`."""
        plain, speculative = (self._side_dict(side) for side in self.sides)
        stats = self.speculative.stats
        if stats is not None:
            values = stats.to_dict()
            names = ("accept_length", "acceptance", "tokens_per_round", "rounds", "drafting_rounds", "notes")
            speculative |= {name: values[name] for name in names}
        speculative["drafted"] = self.speculative.drafted
        return {
            "prompt_tokens": self.input_ids.shape[1],
            "plain": plain,
            "speculative": speculative,
            "identical": self.identical,
            "is_tie": self.is_tie,
        }

    def _side_dict(self, side: Side) -> dict[str, Any]:
        tokens = side.tokens
        return {
            "method": side.method,
            "state": side.state,
            "text": self.target.lm.tokenizer.decode(tokens, skip_special_tokens=True),
            "tokens": tokens,
            "seconds": side.seconds,
            "tokens_per_second": side.tokens_per_second,
        }

    def _decode(self, side: Side, drafter: Drafter | None) -> None:
        request, lm = self.request, self.target.lm
        with self._turns.turn():
            side.state = "decoding"
            collector = _Collector(side, drafter, self._turns, self._stop, lm)
            try:
                generate_tokens(
                    lm,
                    self.input_ids,
                    request.max_new_tokens,
                    request.temperature,
                    seed=request.seed,
                    decoder=drafter,
                    streamer=collector,
                )
                side.state = "finished"
            except _StoppedError:
                side.state = "stopped"

    def _compare(self) -> None:
        plain, speculative = (torch.cat([self.input_ids[0].cpu(), torch.tensor(side.tokens)]) for side in self.sides)
        self.identical = torch.equal(plain, speculative)
        if not self.identical:
            with self._turns.turn():
                self.is_tie = logit_gap(self.target.lm, plain, speculative)[1]


class TokenTexts:
    """Turns tokens into pieces of text one at a time; the pieces together are the text.

    A character may be made of several tokens; it comes with the last of them.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = self._shown = 0

    def add(self, token: int) -> str:
        """The text that a token adds, which may be empty."""
        self._ids.append(token)
        # Tokenizers that mark words by a space in front decode a token by its neighbor, so one is kept before it.
        before = self._decode(self._ids[self._begin : self._shown])
        now = self._decode(self._ids[self._begin :])
        if now.endswith(_INCOMPLETE):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
