"""The tab that plays worlds."""

from __future__ import annotations

import secrets
from typing import Any

import gradio as gr

from vidgen.demo.context import DemoContext, shown
from vidgen.demo.landscape_player import LANDSCAPE, LandscapePlayer
from vidgen.demo.page import script
from vidgen.demo.play_run import PlayRun, read_keys
from vidgen.demo.players import ROOM, ModelPlayer, Player, RoomPlayer, is_of_rooms
from vidgen.demo.uploads import PICTURE_SUFFIXES, UploadError, is_video, read_picture
from vidgen.demo.visitors import DemoError
from vidgen.runtime.errors import VidgenError, suggestion

PART = "play"
MAX_WORLDS = 4
GAME = """
<div class="vg-play" tabindex="0" aria-label="Worlds; steer with W A S D and the arrow keys">
<div class="vg-worlds" data-count="1"><div class="vg-world"><div class="vg-screen">
<canvas width="512" height="384"></canvas><div class="vg-idle"><b>Choose worlds and press New game</b>
<span>W A S D to walk, ← → to turn, or the buttons below</span></div></div></div></div>
<div class="vg-pad"></div><div class="vg-hud"></div></div>
"""
HOW_TO_TRAIN = """
<div class="vg-card"><h3>No world model here yet</h3>
The worlds below are renderers, not models. A small model of Doom trains for three and a half hours on one core of a
CPU.
<details><summary>How</summary><pre>vidgen world record vizdoom -o runs/doom/episodes --episodes 600 --frames 240
vidgen world record vizdoom -o runs/doom/episodes --episodes 24 --frames 240 --split validation --seed 1
vidgen train frame_autoencoder --config live/vizdoom64_autoencoder
vidgen train world_model --config live/vizdoom64_df
vidgen train world_model --config live/vizdoom64_live
vidgen train world_model --config live/vizdoom64_tf
vidgen train world_model_assemble --config live/vizdoom64_assemble
vidgen demo --world-model runs/doom/model</pre></details></div>
"""


def build(context: DemoContext) -> None:
    """Make the components and events of the tab."""
    renderers = {ROOM: RoomPlayer, LANDSCAPE: LandscapePlayer}
    names = [*context.worlds, *renderers]
    with gr.Row():
        with gr.Column(scale=3, min_width=300):
            if not context.worlds:
                gr.HTML(HOW_TO_TRAIN)
            worlds = gr.CheckboxGroup(
                names,
                value=names[:1],
                label="Worlds, side by side on the same keys",
                info="A renderer draws the truth, without a model; the room also beside models of rooms.",
                elem_id="play-worlds",
            )
            with gr.Row():
                start = gr.Number(0, label="Start", precision=0, minimum=0, min_width=80, elem_id="play-start")
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, min_width=80, elem_id="play-seed")
            with gr.Accordion("Model settings", open=False, visible=bool(context.worlds)):
                steps = gr.Slider(0, 30, 0, step=1, label="Denoising steps per frame", info="0: the model's own")
                cache = gr.Radio(
                    ["frame", "rolling", "none"],
                    value="frame",
                    label="Keys of past frames",
                    info="frame: once per frame, as trained; rolling: kept, faster; none: in every step, slowest.",
                )
                picture = gr.File(
                    label=f"Start from a picture (up to {context.config.uploads.megabytes:g} MB)",
                    file_types=list(PICTURE_SUFFIXES),
                    height=150,
                    elem_id="play-picture",
                )
            begin = gr.Button("New game", variant="primary", size="lg", elem_id="play-begin")
            with gr.Row():
                record = gr.Button("Record", size="sm", min_width=90, elem_id="play-record")
                save = gr.Button("Save episode", size="sm", min_width=90, elem_id="play-save")
            files = gr.File(label="Saved", interactive=False, visible=False)
            gr.Markdown(
                "Hold keys to walk; a click on the picture gives it the keys back. The bar under a world shows where "
                "the time of its last frame went; full is 200 ms.",
                elem_classes="vg-hint",
            )

        def play_frame(request: dict[str, Any]) -> dict[str, Any]:
            # Called by the page directly, because a queue in between would add to every round trip.
            token, keys = request.get("token"), request.get("keys")
            games = context.visitors.parts(PART)
            key = next((key for key, game in games.items() if secrets.compare_digest(game.token, str(token))), None)
            run = None if key is None else context.visitors.find(key, PART)
            if run is None:
                return {"error": "This game is over; press New game.", "gone": True}
            try:
                return run.step([str(key) for key in keys or ()])
            except VidgenError as error:
                return {"error": str(error)}

        with gr.Column(scale=7, min_width=320):
            game = gr.HTML(
                html_template=GAME,
                js_on_load=script("play.js"),
                server_functions=[play_frame],
                elem_id="play-game",
            )

    def run_of(request: gr.Request) -> PlayRun:
        run = context.visitors.find(request.session_hash, PART)
        if run is None:
            raise DemoError("There is no game of yours here (any more); press New game.")
        return run

    @shown
    def on_begin(
        worlds: list[str], start: int, seed: int, steps: int, cache: str, picture: str | None, request: gr.Request
    ) -> str:
        """Begin a game; returns what the page needs, as JSON.

        Args:
            worlds: their names.
            start: which real frames, rooms or landscape to begin with.
            seed: of the models' noise.
            steps: denoising steps of a frame; 0 takes the model's.
            cache: frame, rolling or none.
            picture: to start from instead.
        """
        if not 1 <= len(worlds) <= MAX_WORLDS:
            raise DemoError(f"{len(worlds)} worlds are chosen; allowed: 1 to {MAX_WORLDS}.")
        for name in worlds:
            if name not in names:
                raise DemoError(f"world {name!r} is unknown: {suggestion(name, names)}.")
        if start is None or start < 0 or seed is None or seed < 0:
            raise DemoError("Start and seed are numbers from 0.")
        first_frame = None
        if picture is not None:
            if set(worlds) <= renderers.keys():
                raise DemoError("A renderer can't start from a picture; choose a model, or remove the picture.")
            if is_video(picture):
                raise UploadError("This file is a video; a game starts from a picture.")
            first_frame = read_picture(picture, context.config.uploads)
        visitor = context.visitors.welcome(request.session_hash)
        players: dict[str, Player] = {}
        with context.turns.turn():
            for name in [name for name in renderers if name in worlds]:
                players[name] = renderers[name](int(start))
            room = players.get(ROOM)
            for name in [name for name in worlds if name not in renderers]:
                pipe, folder = context.worlds[name]
                truth = room if first_frame is None and is_of_rooms(pipe) else None
                players[name] = ModelPlayer(
                    pipe, folder, int(start), int(seed), int(steps) or None, cache, first_frame, truth
                )
        run = PlayRun(players, context.turns, visitor.folder / f"play_{secrets.token_hex(4)}")
        visitor.put(PART, run)
        return run.opening()

    @shown
    def on_step(keys: str, request: gr.Request) -> dict[str, Any]:
        """One frame on; keys as `forward + turn left`, or `none`. The page itself doesn't use this."""
        return run_of(request).step(read_keys(keys))

    @shown
    def on_record(request: gr.Request) -> None:
        """Begin to record an episode."""
        run_of(request).record()
        gr.Info("Recording from this frame on.", duration=3)

    @shown
    def on_save(request: gr.Request) -> str:
        """End the recording; returns a zip of a data set of episodes per world."""
        return str(run_of(request).save())

    many = {"concurrency_limit": context.config.max_visitors, "show_progress": "hidden"}
    settings = [worlds, start, seed, steps, cache, picture]
    begin.click(on_begin, settings, game, api_name="play_begin", **many)
    gr.api(on_step, api_name="play_step", concurrency_limit=context.config.max_visitors)
    record.click(on_record, None, None, api_name="play_record", **many)
    saved = save.click(on_save, None, files, api_name="play_save", **many)
    saved.success(lambda: gr.File(visible=True), None, files, api_visibility="private")
