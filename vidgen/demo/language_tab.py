"""The demo's tab of language models: one prompt decoded plainly and with drafts, side by side.

The demo finds `tab` through the entry-point group `vidgen.demo_tabs`.
"""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import gradio as gr

from vidgen.demo.context import DemoContext, DemoTab, shown
from vidgen.demo.names import folder_names
from vidgen.demo.visitors import DemoError
from vidgen.runtime.assets import DEFAULT_LANGUAGE_MODEL, AssetError, find_asset
from vidgen.runtime.errors import VidgenError, suggestion

if TYPE_CHECKING:
    from vidgen.demo.language_run import Target

NAME = PART = "language"
COMPONENTS = ("transformers", "vidgen.language")
DEFAULT_METHOD = "prompt_lookup"
DEFAULT_NEW_TOKENS = 160
TRAIN = "vidgen lm train -o runs/lm\nvidgen demo --tab-model language=runs/lm/model"
HOW_TO_TRAIN = (
    "<div class='vg-card'><h3>No language model here yet</h3>Give the folder of any causal language model of "
    "transformers with <code>--tab-model language=FOLDER</code>; it may be repeated. This trains a small one that "
    f"writes Python, in about two hours on one core of a CPU:<pre>{html.escape(TRAIN)}</pre></div>"
)
# On a phone the answer is below what is pressed.
SHOW_ANSWER = """() => {
  const answer = document.querySelector("#language-answer");
  if (answer.getBoundingClientRect().top > innerHeight / 2) answer.scrollIntoView({ behavior: "smooth" });
}"""
PROMPTS = {
    "Reading a file": "def read_lines(path):\n    with open(path) as file:\n",
    "A class of shapes": (
        "class Circle(Shape):\n"
        "    def __init__(self, name, color, radius):\n"
        "        self.name = name\n"
        "        self.color = color\n"
        "        self.radius = radius\n\n"
        "class Square(Shape):\n"
        "    def __init__(self, name, color, side):\n"
        "        self.name"
    ),
    "Tests": (
        "class StackTest(unittest.TestCase):\n"
        "    def test_push(self):\n"
        "        stack = Stack()\n"
        "        stack.push(1)\n"
        "        self.assertEqual(stack.pop(), 1)\n\n"
        "    def test_pop(self):\n"
        "        stack = Stack()"
    ),
}


def load_models(context: DemoContext) -> Mapping[str, Target]:
    """The models given with `--tab-model language=FOLDER`, else the embedded one, if there is one.

    Raises:
        LanguageModelError: a folder holds no causal language model.
    """
    from vidgen.demo.language_run import Target
    from vidgen.language import load_language_model

    folders = context.config.tab_models.get(NAME)
    if folders is None:
        try:
            folders = [find_asset(DEFAULT_LANGUAGE_MODEL)]
        except AssetError:
            folders = []
    device = context.video.device
    return {name: Target(load_language_model(folder, device)) for name, folder in folder_names(folders).items()}


def tab(context: DemoContext) -> DemoTab | None:
    """The tab; None where what language models need isn't installed."""
    if any(importlib.util.find_spec(name) is None for name in COMPONENTS):
        return None
    models = load_models(context)
    return DemoTab("Language", lambda context: build(context, models), order=40)


def build(context: DemoContext, models: Mapping[str, Target]) -> None:
    """Make the components and events of the tab."""
    if not models:
        gr.HTML(HOW_TO_TRAIN, elem_id="language-empty")
        return

    from vidgen.demo.language_run import (
        MAX_NEW_TOKENS,
        MAX_SEED,
        MAX_TEMPERATURE,
        METHODS,
        DecodingRequest,
        LanguageRun,
    )
    from vidgen.demo.language_view import IDLE, LanguageView, method_name

    config, names = context.config, list(models)
    with gr.Row():
        with gr.Column(scale=4, min_width=300):
            model = gr.Dropdown(names, value=names[0], label="Model", visible=len(names) > 1, elem_id="language-model")
            prompt = gr.Textbox(
                next(iter(PROMPTS.values())),
                label="Prompt",
                info="A model that was taught to answer answers it; others continue it.",
                lines=6,
                max_lines=14,
                elem_id="language-prompt",
                elem_classes="lm-prompt",
            )
            method = gr.Radio(
                [(method_name(name), name) for name in METHODS],
                value=DEFAULT_METHOD,
                label="Who drafts",
                info="Prompt lookup copies from the text so far; the others are the model without some of its layers.",
                elem_id="language-method",
            )
            max_new_tokens = gr.Slider(
                1, MAX_NEW_TOKENS, DEFAULT_NEW_TOKENS, step=1, label="New tokens", elem_id="language-tokens"
            )
            temperature = gr.Slider(
                0, MAX_TEMPERATURE, 0, step=0.05, label="Temperature", info="0 takes the most probable token.",
                elem_id="language-temperature",
            )  # fmt: skip
            seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MAX_SEED, elem_id="language-seed")
            with gr.Row():
                decode = gr.Button("Decode", variant="primary", size="lg", scale=3, elem_id="language-decode")
                stop = gr.Button("Stop", size="lg", scale=1, min_width=80, elem_id="language-stop")
            gr.Examples(
                [[text] for text in PROMPTS.values()],
                prompt,
                label="Prompts to try",
                example_labels=list(PROMPTS),
                api_visibility="private",
            )
        with gr.Column(scale=7, min_width=320):
            answer = gr.HTML(IDLE, elem_id="language-answer")

    def begin(
        model: str | None,
        prompt: str,
        method: str,
        max_new_tokens: float,
        temperature: float,
        seed: float,
        request: gr.Request,
    ) -> LanguageRun:
        if model and model not in models:
            raise DemoError(f"model {model!r} is unknown: {suggestion(model, models)}.")
        asked = DecodingRequest(prompt, method, _whole(max_new_tokens), temperature, _whole(seed))
        run = LanguageRun(models[model or names[0]], asked, context.turns)
        context.visitors.welcome(request.session_hash).put(PART, run)
        return run

    @shown
    def on_decode(
        model: str | None,
        prompt: str,
        method: str,
        max_new_tokens: float,
        temperature: float,
        seed: float,
        request: gr.Request,
    ) -> Iterator[str]:
        """Decode a prompt plainly and with drafts; yields HTML while both texts grow.

        Args:
            model: its name; None takes the first.
            prompt: to continue.
            method: prompt_lookup, early_exit, static_skip, clasp or knapspec.
            max_new_tokens: most tokens of each side.
            temperature: 0 takes the most probable token.
            seed: of the draws.
        """
        run = begin(model, prompt, method, max_new_tokens, temperature, seed, request)
        view = LanguageView(run)
        try:
            for _ in run.play():
                yield view.html()
        except VidgenError:
            yield IDLE
            raise

    @shown
    def on_compare(
        model: str | None,
        prompt: str,
        method: str,
        max_new_tokens: float,
        temperature: float,
        seed: float,
        request: gr.Request,
    ) -> dict[str, Any]:
        """Decode a prompt plainly and with drafts; returns both sides, and whether they are identical.

        The page itself doesn't use this. Arguments are those of `language_decode`.
        """
        run = begin(model, prompt, method, max_new_tokens, temperature, seed, request)
        for _ in run.play():
            pass
        return run.to_dict()

    @shown
    def on_stop(request: gr.Request) -> None:
        """Stop decoding at the next token; what there is stays."""
        run = context.visitors.find(request.session_hash, PART)
        if run is None:
            raise DemoError("Nothing of yours is being decoded here.")
        run.stop()

    many = {"concurrency_limit": config.max_visitors, "show_progress": "hidden"}
    settings = [model, prompt, method, max_new_tokens, temperature, seed]
    decode.click(None, js=SHOW_ANSWER, api_visibility="private")
    decode.click(on_decode, settings, answer, api_name="language_decode", **many)
    stop.click(on_stop, None, None, api_name="language_stop", **many)
    gr.api(on_compare, api_name="language_compare", concurrency_limit=config.max_visitors)


def _whole(number: Any) -> Any:
    """A slider's 64.0 as 64; what isn't whole stays as it is, to be refused."""
    return int(number) if isinstance(number, float) and number.is_integer() else number
