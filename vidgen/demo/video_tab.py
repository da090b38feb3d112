"""The tab that makes long videos."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import gradio as gr

from vidgen.demo.context import DemoContext, shown
from vidgen.demo.memory_strip import memory_html
from vidgen.demo.page import script
from vidgen.demo.plan_text import add_line, read_plan
from vidgen.demo.uploads import (
    PICTURE_SUFFIXES,
    SESSION_SUFFIX,
    VIDEO_SUFFIXES,
    fit,
    is_video,
    read_picture,
    read_video,
)
from vidgen.demo.video_run import VideoRun, View
from vidgen.demo.visitors import DemoError
from vidgen.memory import MEMORIES
from vidgen.pipelines.session_state import PROMPT_SWITCHES

PART = "video"
DEFAULT_SECONDS = 12
FIRST_PLAN = (
    "a hot-air balloon floats over a green meadow at noon in clear weather while the camera pans slowly to the right\n"
    "6 s: a hot-air balloon floats over a green meadow at night in falling snow while the camera pans slowly to the "
    "right"
)
EXAMPLES = {
    "Day to night": [FIRST_PLAN, 12],
    "A boat at dusk": ["a tropical coast at dusk under a clear sky, a sailboat passes by, the camera pans left", 10],
    "Three moods of a forest": [
        "an autumn forest at dawn in thick fog while the camera stays still\n"
        "5 s: an autumn forest at noon in clear weather while the camera stays still\n"
        "10 s: an autumn forest at night in the rain while the camera stays still",
        15,
    ],
    "A minute of dunes": [
        "orange dunes with cacti in broad daylight in clear weather, a train passes by, the camera moves forward",
        60,
    ],
}
STAGE = """
<div class="vg-stage"><div class="vg-screen"><canvas width="672" height="384"></canvas>
<div class="vg-idle"><b>Nothing here yet</b>
<span>Write a plan and press Generate. Frames appear while they are made.</span></div></div>
<div class="vg-transport"><button type="button" aria-label="Play or stop">❚❚</button>
<input type="range" min="0" max="1" value="0" aria-label="Time"><output></output></div></div>
"""
WAITING = "<div class='vg-status'><div class='vg-bar'></div><p class='vg-prompt'>waiting for a plan</p></div>"


def build(context: DemoContext) -> None:
    """Make the components and events of the tab."""
    config = context.config
    with gr.Row():
        with gr.Column(scale=4, min_width=320):
            plan = gr.Textbox(
                FIRST_PLAN,
                label="Prompt plan",
                info="One prompt per line; from the second line on, begin with when it starts, such as `5 s: …`.",
                lines=5,
                max_lines=14,
                elem_id="video-plan",
            )
            with gr.Row():
                line_second = gr.Number(6, label="From second", minimum=0, scale=1, min_width=90)
                line_prompt = gr.Textbox(
                    label="show this",
                    placeholder="a green meadow at night",
                    submit_btn="Add line",
                    scale=3,
                    min_width=200,
                    max_lines=3,
                    elem_id="video-line",
                )
            with gr.Row():
                seconds = gr.Slider(
                    1, config.max_seconds, min(DEFAULT_SECONDS, config.max_seconds), step=1, label="Seconds",
                    elem_id="video-seconds",
                )  # fmt: skip
                seed = gr.Number(0, label="Seed", precision=0, minimum=-1, info="-1 draws one", min_width=110)
            with gr.Accordion("Memory and start", open=False):
                memory = gr.Radio(list(MEMORIES), value="slow_fast", label="Memory")
                switch = gr.Radio(
                    list(PROMPT_SWITCHES),
                    value="recache",
                    label="When the prompt changes",
                    info="recache: remember the past as if the new prompt had been there; flush: forget most of it.",
                )
                start = gr.File(
                    label=f"Begin with a picture, or continue a video (up to {config.uploads.megabytes:g} MB)",
                    file_types=[*PICTURE_SUFFIXES, *VIDEO_SUFFIXES],
                    height=150,
                    elem_id="video-start",
                )
            with gr.Accordion("Go on with a saved session", open=False):
                saved_session = gr.File(
                    label=f"A session that was saved here (up to {config.uploads.megabytes:g} MB)",
                    file_types=[SESSION_SUFFIX],
                    height=150,
                    elem_id="video-session",
                )
                go_on = gr.Button("Go on for so many seconds more", elem_id="video-go-on")
            generate = gr.Button("Generate", variant="primary", size="lg", elem_id="video-generate")
            gr.Examples(
                list(EXAMPLES.values()),
                [plan, seconds],
                label="Plans to try",
                example_labels=list(EXAMPLES),
                api_visibility="private",
            )
        with gr.Column(scale=7, min_width=320):
            stage = gr.HTML(html_template=STAGE, js_on_load=script("stage.js"), elem_id="video-stage")
            status = gr.HTML(WAITING, elem_id="video-status")
            with gr.Row():
                pause = gr.Button("Pause", size="sm", min_width=70, elem_id="video-pause")
                resume = gr.Button("Resume", size="sm", min_width=70, elem_id="video-resume")
                undo = gr.Button("Undo a chunk", size="sm", min_width=100, elem_id="video-undo")
                fork = gr.Button("Fork", size="sm", min_width=70, elem_id="video-fork")
                save = gr.Button("Save", size="sm", min_width=70, elem_id="video-save")
            now = gr.Textbox(
                label="Change the prompt from here on",
                placeholder="what to show next; works while the video is being made",
                submit_btn="Change",
                max_lines=3,
                elem_id="video-now",
            )
            branch = gr.Radio(["A"], value="A", label="Branch", visible=False, elem_id="video-branch")
            gr.Markdown("**Memory now**", elem_classes="vg-hint")
            strip = gr.HTML(memory_html([], {}), elem_id="video-memory")
            files = gr.File(label="Saved", file_count="multiple", interactive=False, visible=False)

    def outputs_of(view: View) -> list[Any]:
        branches = gr.Radio(view.branches, value=view.current, visible=len(view.branches) > 1)
        return [view.stage, view.status, view.memory, branches]

    def run_of(request: gr.Request) -> VideoRun:
        run = context.visitors.find(request.session_hash, PART)
        if run is None:
            raise DemoError("There is no video of yours here (any more); press Generate.")
        return run

    def check_seconds(seconds: float) -> None:
        if not 0 < seconds <= config.max_seconds:
            raise DemoError(f"{seconds} seconds; allowed: more than 0, at most {config.max_seconds:g}.")

    @shown
    def on_generate(
        plan: str, seconds: float, seed: int, memory: str, switch: str, start: str | None, request: gr.Request
    ) -> Iterator[list[Any]]:
        """Make a video; yields the stage, a status, the memory and the branches after every chunk.

        Args:
            plan: prompts, one per line, from the second line on as `SECOND s: PROMPT`.
            seconds: length.
            seed: same seed, same video; -1 draws one.
            memory: slow_fast, sliding_window or full.
            switch: recache, keep or flush.
            start: a picture or video to begin with.
        """
        prompt_plan = read_plan(plan)
        check_seconds(seconds)
        given = {}
        if start is not None:
            height, width = context.video.config.default_height, context.video.config.default_width
            if is_video(start):
                given["video"] = read_video(start, config.uploads)
            else:
                given["image"] = fit(read_picture(start, config.uploads), height, width)
        visitor = context.visitors.welcome(request.session_hash)
        seed = secrets.randbits(31) if seed is None or seed < 0 else int(seed)
        folder = visitor.folder / f"video_{secrets.token_hex(4)}"
        run = VideoRun.begin(context.video, context.turns, folder, prompt_plan, seconds, seed, memory, switch, **given)
        visitor.put(PART, run)
        yield outputs_of(run.view(note=f"seed {seed}"))
        for view in run.play():
            yield outputs_of(view)

    @shown
    def on_go_on(session: str | None, seconds: float, request: gr.Request) -> Iterator[list[Any]]:
        """Go on with a saved session; yields as `generate` does, frames that follow those made before.

        Args:
            session: file that `save` gave.
            seconds: how much longer the video gets.
        """
        if session is None:
            raise DemoError("There is no session to go on with; give the .session.safetensors file that Save made.")
        check_seconds(seconds)
        visitor = context.visitors.welcome(request.session_hash)
        folder = visitor.folder / f"video_{secrets.token_hex(4)}"
        run = VideoRun.go_on(context.video, context.turns, folder, session, config.uploads, seconds)
        visitor.put(PART, run)
        yield outputs_of(run.view(note="This goes on where the session was saved; its own frames are in its video."))
        for view in run.play():
            yield outputs_of(view)

    @shown
    def on_resume(request: gr.Request) -> Iterator[list[Any]]:
        """Go on with a paused video; yields as `generate` does."""
        for view in run_of(request).play():
            yield outputs_of(view)

    @shown
    def on_pause(request: gr.Request) -> None:
        """Pause the video that is being made."""
        run_of(request).pause()

    @shown
    def on_change(prompt: str, switch: str, request: gr.Request) -> None:
        """Show another prompt from the next chunk on."""
        run_of(request).set_prompt(prompt, switch)
        gr.Info("The next chunk shows it.", duration=3)

    @shown
    def on_undo(request: gr.Request) -> list[Any]:
        """Pause and take back a chunk."""
        run = run_of(request)
        run.undo()
        return outputs_of(run.view(note="A chunk was taken back; Resume makes it again, or change the prompt first."))

    @shown
    def on_fork(request: gr.Request) -> list[Any]:
        """Pause and go on in a copy."""
        run = run_of(request)
        name = run.fork()
        return outputs_of(run.view(start=0, note=f"This is branch {name}; the one before stays as it is."))

    @shown
    def on_select(name: str, request: gr.Request) -> list[Any]:
        """Show another branch."""
        run = run_of(request)
        run.select(name)
        return outputs_of(run.view(start=0))

    @shown
    def on_save(request: gr.Request) -> list[str]:
        """Write the video so far and its session; returns both files."""
        return [str(path) for path in run_of(request).save()]

    @shown
    def on_add(plan: str, second: float, prompt: str) -> str:
        """Add a line to a plan."""
        return add_line(plan, second, prompt)

    shows = [stage, status, strip, branch]
    many = {"concurrency_limit": config.max_visitors, "show_progress": "hidden"}
    settings = [plan, seconds, seed, memory, switch, start]
    generate.click(
        on_generate, settings, shows, api_name="generate", concurrency_id="video", trigger_mode="multiple", **many
    )
    go_on.click(on_go_on, [saved_session, seconds], shows, api_name="go_on", concurrency_id="video", **many)
    resume.click(on_resume, None, shows, api_name="resume", concurrency_id="video", **many)
    pause.click(on_pause, None, None, api_name="pause", **many)
    now.submit(on_change, [now, switch], None, api_name="set_prompt", **many)
    undo.click(on_undo, None, shows, api_name="undo", **many)
    fork.click(on_fork, None, shows, api_name="fork", **many)
    branch.input(on_select, branch, shows, api_name="select_branch", **many)
    saved = save.click(on_save, None, files, api_name="save", **many)
    saved.success(lambda: gr.File(visible=True), None, files, api_visibility="private")
    line_prompt.submit(on_add, [plan, line_second, line_prompt], plan, api_name="add_line", **many)
