"""The tab of language models: each side is what the library decodes, and is charged for its own time alone."""

from __future__ import annotations

import re
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gradio")

from gradio_client import Client
from gradio_client.exceptions import AppError

from vidgen.demo import context as context_module
from vidgen.demo import language_run, language_tab
from vidgen.demo.context import TAB_ENTRY_POINTS, DemoContext
from vidgen.demo.language_run import (
    MAX_CHARACTERS,
    MAX_NEW_TOKENS,
    METHODS,
    PLAIN,
    DecodingRequest,
    LanguageRun,
    Target,
    TokenTexts,
)
from vidgen.demo.language_view import LanguageView
from vidgen.demo.turns import CHUNK, Turns
from vidgen.demo.visitors import DemoError
from vidgen.language import LanguageModel, load_language_model
from vidgen.language.decoding import Draft, Drafter
from vidgen.language.decoding.bench import DEFAULT_METHODS
from vidgen.language.generation import GenerationRequestError, encode_prompt, generate_tokens
from vidgen.runtime.assets import AssetError
from vidgen.runtime.errors import VidgenError

PROMPT = "the meadow and the river.\nthe meadow and"
POINT = EntryPoint("language", "vidgen.demo.language_tab:tab", TAB_ENTRY_POINTS)


@pytest.fixture(scope="module")
def folder(save_language_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, so that every method has some to leave out."""
    return save_language_model(
        tmp_path_factory.mktemp("models") / "toy", num_hidden_layers=4, max_position_embeddings=640
    )


@pytest.fixture
def lm(folder: Path) -> LanguageModel:
    lm = load_language_model(folder, "cpu")
    lm.tokenizer.eos_token = None
    lm.model.generation_config.eos_token_id = None  # random weights would end anywhere
    return lm


class _Oracle(Drafter):
    """Knows what the model will say, and says some of it wrongly."""

    def __init__(self, lm: LanguageModel, answer: list[int], plan: list[tuple[int, int]]) -> None:
        super().__init__(lm.model)
        self._answer, self._plan = answer, iter(plan)

    def get_candidates(self, state: Any, limit: int) -> Draft | None:
        """Of each pair as many right tokens, then as many wrong ones."""
        right, wrong = next(self._plan, (0, 0))
        begin = state.stats.new_tokens
        true = self._answer[begin : begin + right + wrong]
        tokens = true[:right] + [(token + 1) % 200 for token in true[right:]]
        return Draft(torch.tensor([tokens]), [len(tokens)]) if tokens else None


class _OracleTarget(Target):
    def __init__(self, lm: LanguageModel, answer: list[int], plan: list[tuple[int, int]]) -> None:
        super().__init__(lm)
        self._oracle = _Oracle(lm, answer, plan)

    def drafter(self, method: str) -> Drafter:
        return self._oracle


def asked(**changes: Any) -> DecodingRequest:
    values = {"prompt": PROMPT, "method": "prompt_lookup", "max_new_tokens": 12, "temperature": 0.0, "seed": 0}
    return DecodingRequest(**{**values, **changes})


def played(target: Target, turns: Turns | None = None, **changes: Any) -> LanguageRun:
    run = LanguageRun(target, asked(**changes), turns or Turns())
    for _ in run.play():
        pass
    return run


def answer_of(lm: LanguageModel, count: int = 12, **settings: Any) -> list[int]:
    return generate_tokens(lm, encode_prompt(lm, PROMPT), count, **settings).tolist()


# --- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_both_sides_are_what_the_library_decodes(lm: LanguageModel, method: str) -> None:
    run = played(Target(lm), method=method)
    said = run.to_dict()
    assert said["plain"]["tokens"] == said["speculative"]["tokens"] == answer_of(lm)
    assert said["plain"]["text"] == lm.tokenizer.decode(answer_of(lm))
    assert run.identical and said["identical"] and not run.is_tie and not run.busy
    assert sum(said["speculative"]["drafted"]) == run.speculative.stats.accepted
    assert [side.state for side in run.sides] == ["finished"] * 2
    assert said["speculative"]["accept_length"] == run.speculative.stats.accept_length
    assert not any(run.plain.drafted) and len(run.plain.rounds) == 12


def test_the_methods_are_those_of_the_benchmark() -> None:
    assert {PLAIN, *METHODS} == set(DEFAULT_METHODS) and PLAIN not in METHODS


def test_tokens_are_colored_that_a_draft_had_proposed_and_no_others(lm: LanguageModel) -> None:
    answer = answer_of(lm)
    run = played(_OracleTarget(lm, answer, [(3, 0), (0, 2), (1, 1)]))
    marks = run.speculative.drafted
    # The prompt's own next token; three drafts and one; a wrong draft and one; a right and a wrong draft and one.
    assert marks == [False] + [True] * 3 + [False] + [False] + [True, False] + [False] * 4
    assert run.speculative.stats.accept_length == pytest.approx(4 / 3)
    page = LanguageView(run).html()
    colored = re.findall(r"<span class='lm-draft'>(.*?)</span>", page.split("lm-legend")[0], re.DOTALL)
    assert len(colored) == 2 and "accept length <b>1.33</b>" in page and "identical output" in page


def test_a_stop_token_within_a_draft_was_drafted_too(lm: LanguageModel) -> None:
    answer = answer_of(lm)
    end = next(place for place in range(3, 12) if answer[place] not in answer[:place])
    lm.model.generation_config.eos_token_id = answer[end]
    run = played(_OracleTarget(lm, answer, [(end - 2, 0), (6, 0)]))
    assert run.identical and run.speculative.tokens == answer[: end + 1]
    assert run.speculative.drafted == [False] + [True] * (end - 2) + [False, True]


def test_draws_follow_from_the_seed_though_the_sides_take_turns(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_run, "SLICE_SECONDS", 0.0)  # after each token
    state = torch.random.get_rng_state()
    alone = answer_of(lm, temperature=1.0, seed=3)
    drafts = answer_of(lm, temperature=1.0, seed=3, decoder="early_exit")
    run = played(Target(lm), temperature=1.0, seed=3, method="early_exit")
    assert run.plain.tokens == alone and run.speculative.tokens == drafts and run.identical is None
    assert alone != answer_of(lm, temperature=1.0, seed=4)
    assert "same distribution" in LanguageView(run).html()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_nobody_is_charged_for_the_turns_of_others(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_run, "SLICE_SECONDS", 0.0)
    turns, over, waits = Turns(), threading.Event(), []

    def disturb() -> None:
        while not over.is_set():
            with turns.turn(CHUNK):
                time.sleep(0.02)
                waits.append(0.02)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    began = time.perf_counter()
    try:
        run = played(Target(lm), turns)
    finally:
        over.set()
        disturber.join()
    wall = time.perf_counter() - began
    # Everyone who waits is let in after each token of each side.
    assert len(waits) >= 12 and all(side.seconds > 0 for side in run.sides)
    assert sum(side.seconds for side in run.sides) <= wall - 0.02 * (len(waits) - 1)


def test_a_stop_keeps_what_there_is_and_says_so(lm: LanguageModel) -> None:
    run = LanguageRun(Target(lm), asked(max_new_tokens=MAX_NEW_TOKENS), Turns())
    for _ in run.play():
        if run.busy and run.plain.rounds:
            run.stop()
    assert run.plain.state == "stopped" and 0 < len(run.plain.tokens) < MAX_NEW_TOKENS
    assert run.identical is None and "the same so far" in LanguageView(run).html()
    with pytest.raises(DemoError, match="made already"):
        next(run.play())


def test_a_page_that_is_left_stops_both_sides(lm: LanguageModel) -> None:
    turns = Turns()
    run = LanguageRun(Target(lm), asked(max_new_tokens=MAX_NEW_TOKENS), turns)
    steps = run.play()
    while not run.plain.rounds:
        next(steps)
    assert run.busy
    steps.close()
    assert not run.busy and run.plain.state == "stopped"
    with turns.turn():  # nobody holds it any more
        pass


def test_a_side_that_fails_ends_the_other_and_is_heard(lm: LanguageModel) -> None:
    class Failing(_Oracle):
        def get_candidates(self, state: Any, limit: int) -> None:
            raise VidgenError("no draft today")

    target = _OracleTarget(lm, [], [])
    target._oracle = Failing(lm, [], [])
    run = LanguageRun(target, asked(max_new_tokens=MAX_NEW_TOKENS), Turns())
    with pytest.raises(VidgenError, match="no draft today"):
        list(run.play())
    assert run.plain.state == "stopped" and not run.busy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": " \n"}, "prompt is empty"),
        ({"prompt": "x" * (MAX_CHARACTERS + 1)}, f"{MAX_CHARACTERS + 1} characters; allowed: at most"),
        ({"method": "promptlookup"}, "method 'promptlookup' is unknown: did you mean 'prompt_lookup'"),
        ({"method": PLAIN}, "is unknown"),
        ({"method": None}, "is unknown"),
        ({"max_new_tokens": 0}, "max_new_tokens=0; allowed: 1 to 512"),
        ({"max_new_tokens": 513}, "max_new_tokens=513"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
        ({"max_new_tokens": None}, "max_new_tokens=None"),
        ({"temperature": -0.1}, "temperature=-0.1; allowed: 0 to 2"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": None}, "temperature=None"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1 << 31}, "seed=2147483648"),
    ],
)
def test_absurd_requests_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(VidgenError, match=re.escape(message)):
        asked(**changes)


def test_more_than_the_context_holds_is_refused_before_anything_is_computed(lm: LanguageModel) -> None:
    with pytest.raises(GenerationRequestError, match="room for"):
        LanguageRun(Target(lm), asked(prompt=PROMPT * 30, max_new_tokens=MAX_NEW_TOKENS), Turns())
    with pytest.raises(GenerationRequestError, match="context 640"):
        LanguageRun(Target(lm), asked(prompt=PROMPT * 200), Turns())


# --- what is shown ------------------------------------------------------------------------------------------------


def test_pieces_of_text_are_whole_characters_and_together_the_text(lm: LanguageModel) -> None:
    text = "the river — 雪 \N{SNOWMAN} naïve.\nthe snow"
    ids = lm.tokenizer(text)["input_ids"]
    texts = TokenTexts(lm.tokenizer)
    pieces = [texts.add(token) for token in ids]
    assert "".join(pieces) == text == lm.tokenizer.decode(ids)
    assert "" in pieces and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_what_the_model_says_is_text_and_no_markup(lm: LanguageModel) -> None:
    run = played(Target(lm))
    run.plain.rounds = [(lm.tokenizer("<b>&</b><script>")["input_ids"], 0)]
    page = LanguageView(run).html()
    assert "&lt;b&gt;&amp;&lt;/b&gt;&lt;script&gt;" in page and "<script" not in page


def test_sides_that_differ_are_said_to_differ(lm: LanguageModel) -> None:
    run = played(Target(lm))
    run.identical = False
    tokens = run.plain.tokens
    run.speculative.rounds = [([*tokens[:4], (tokens[4] + 1) % 200], 2)]
    assert "not identical: they part at token 5" in LanguageView(run).html()
    run.is_tie = True
    assert "equally probable but for rounding" in LanguageView(run).html()


# --- the tab ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(make_context: Callable[..., DemoContext], start_demo: Any, folder: Path) -> Iterator[Any]:
    context = make_context(tab_models={"language": [folder]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_module, "entry_points", lambda group: [POINT])
        with start_demo(context) as address:
            yield context, address


def connect(running: Any, tmp_path: Path) -> Client:
    return Client(running[1], verbose=False, download_files=str(tmp_path / "downloads"))


@pytest.fixture
def client(running: Any, tmp_path: Path) -> Iterator[Client]:
    yield connect(running, tmp_path)
    running[0].visitors.close()


def test_text_streams_to_the_page_and_the_api_says_the_same(client: Client) -> None:
    said = client.predict("toy", PROMPT, "prompt_lookup", 200, 0.0, 0, api_name="/language_compare")
    assert said["identical"] and said["plain"]["tokens_per_second"] > 0 and len(said["plain"]["tokens"]) <= 200
    job = client.submit("toy", PROMPT, "prompt_lookup", 200, 0.0, 0, api_name="/language_decode")
    assert job.exception() is None
    pages = job.outputs()
    assert len(pages) >= 3 and "identical output" in pages[-1] and "preparing" in pages[0]
    assert pages[-1].count("<span>finished") == 2 and "tokens/s" in pages[-1]


def test_a_visitor_stops_what_is_their_own(running: Any, client: Client, tmp_path: Path) -> None:
    other = connect(running, tmp_path)
    with pytest.raises(AppError, match="Nothing of yours"):
        other.predict(api_name="/language_stop")
    settings = ("toy", PROMPT, "early_exit", MAX_NEW_TOKENS, 2.0, 5)
    job = client.submit(*settings, api_name="/language_compare")
    deadline = time.monotonic() + 30
    while not any(run.plain.rounds for run in running[0].visitors.parts("language").values()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    client.predict(api_name="/language_stop")
    said = job.result(timeout=30)
    assert "stopped" in (said["plain"]["state"], said["speculative"]["state"]) and said["identical"] is None


@pytest.mark.parametrize(
    ("arguments", "message", "on_page"),
    [
        (("toi", PROMPT, "clasp", 4, 0.0, 0), "model 'toi' is unknown: did you mean 'toy'", "toi.* not in the list"),
        (("toy", "", "clasp", 4, 0.0, 0), "prompt is empty", "prompt is empty"),
        (("toy", PROMPT, "magic", 4, 0.0, 0), "method 'magic' is unknown", "magic.* not in the list"),
        (("toy", PROMPT, "clasp", 10**5, 0.0, 0), "max_new_tokens=100000; allowed: 1 to 512", "greater than maximum"),
        (("toy", PROMPT, "clasp", 4, 99.0, 0), "temperature=99.0; allowed: 0 to 2", "greater than maximum"),
        (("toy", PROMPT, "clasp", 4, 0.0, -1), "seed=-1; allowed: 0 to", "less than minimum"),
    ],
)
def test_wrong_arguments_are_named(running: Any, client: Client, arguments: tuple, message: str, on_page: str) -> None:
    with pytest.raises(AppError, match=message):
        client.predict(*arguments, api_name="/language_compare")
    with pytest.raises(AppError, match=on_page):  # most of it gradio finds itself
        client.predict(*arguments, api_name="/language_decode")
    assert not running[0].visitors.parts("language")


def test_without_a_model_the_tab_says_how_to_give_it_one(
    make_context: Any, start_demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_nothing(name: str) -> Path:
        raise AssetError(name)

    monkeypatch.setattr(language_tab, "find_asset", find_nothing)
    monkeypatch.setattr(context_module, "entry_points", lambda group: [POINT])
    with start_demo(make_context()) as address:
        client = connect((None, address), tmp_path)
        parts = client.config["components"]
        shown = [part["props"].get("value") for part in parts if part["props"].get("elem_id") == "language-empty"]
    assert len(shown) == 1 and "--tab-model language=" in shown[0] and "vidgen lm train -o runs/lm" in shown[0]


def test_the_embedded_model_is_found_and_others_replace_it(
    make_context: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    monkeypatch.setattr(language_tab, "find_asset", lambda name: names.append(name) or folder)
    assert list(language_tab.load_models(make_context())) == ["toy"] and names == ["lm-tiny"]
    assert list(language_tab.load_models(make_context(tab_models={"language": []}))) == []
    with pytest.raises(VidgenError, match="has no config.json"):
        language_tab.load_models(make_context(tab_models={"language": [folder.parent]}))


def test_the_tab_is_announced_and_absent_without_what_it_needs(
    make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][TAB_ENTRY_POINTS][POINT.name] == POINT.value
    assert POINT.load() is language_tab.tab
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert language_tab.tab(make_context()) is None
