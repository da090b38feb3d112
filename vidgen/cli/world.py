"""`vidgen world`: record worlds, check what was recorded, and play a trained model."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from vidgen.cli.generate import claim_output
from vidgen.cli.loading import load_pipeline
from vidgen.runtime.assets import DEFAULT_WORLD_MODEL, find_asset

app = typer.Typer(help="Record worlds and play models of them.", rich_markup_mode="markdown")


@app.callback()
def _group() -> None:
    """Record worlds and play models of them."""


@app.command("record")
def record(
    world: Annotated[str, typer.Argument(metavar="WORLD", help="room, panorama, vizdoom or atari:GAME.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Data set to make or to continue.")],
    episodes: Annotated[int, typer.Option(help="Walks of this split.")] = 200,
    frames: Annotated[int, typer.Option(help="Frames of each.")] = 200,
    size: Annotated[int, typer.Option(help="Height and width of a frame, pixels.")] = 64,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "train",
    scenes: Annotated[int, typer.Option(help="Scenes that take turns; a Doom level is a single one.")] = 1,
    first_scene: Annotated[int, typer.Option(help="Seed of the first scene.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the walks.")] = 0,
    fps: Annotated[float, typer.Option(help="Frames per second of play.")] = 12.0,
) -> None:
    """Walk about in a world and record frames, motion and poses. A recording that was stopped goes on."""
    from vidgen.data import make_world
    from vidgen.data import record as record_walks

    place = make_world(world, size)
    try:
        added = record_walks(place, output, episodes, frames, split, scenes, first_scene, seed=seed, fps=fps)
    finally:
        if hasattr(place, "close"):
            place.close()
    print(f"{output}: {added} episodes of {frames} frames added to {split}")


@app.command("check")
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Data set of episodes.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "train",
) -> None:
    """Check that actions and frames of a data set belong together: row k holds what produced frame k."""
    from vidgen.data import EpisodeDataset, align_check

    episodes = EpisodeDataset(folder, split, window=1, in_memory=False)
    found = align_check(episodes)
    frames = sum(record.length for record in episodes.episodes)
    print(f"{folder}: {len(episodes.episodes)} episodes, {frames} frames of {split}, {episodes.info.world}")
    print(f"correlation by shift: {found}")
    if found.lag is None:
        print("undetermined: too little of what changes in the frames comes from the actions to tell", file=sys.stderr)


@app.command("import-realestate10k")
def import_realestate10k(
    tree: Annotated[Path, typer.Argument(metavar="TREE", help="Folder that holds training_256, training_poses, …")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Data set to make or to continue.")],
) -> None:
    """Import RealEstate10K as the Diffusion Forcing Transformer lays it out, without clips of broken cameras."""
    from vidgen.data import import_realestate10k as import_clips

    report = import_clips(tree, output)
    print(f"{output}: {report.added} episodes added, {len(report.rejected)} left out")


@app.command("play")
def play(
    script: Annotated[
        Path, typer.Option(metavar="FILE", help="Keys: lines `KEY + KEY x FRAMES`, such as `forward + turn left x 4`.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="What `vidgen train world_model_assemble` wrote. Default: the embedded level of Doom.",
        ),
    ] = None,
    headless: Annotated[bool, typer.Option("--headless", help="Play without a screen, into a file.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="An .mp4 file.")] = Path("play.mp4"),
    start: Annotated[int, typer.Option(help="Which of the model's starts to begin at.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Denoising steps per frame. Default: the model's.")] = None,
    cache: Annotated[str, typer.Option(help="When context is computed: frame, rolling or none.")] = "frame",
    seed: Annotated[int, typer.Option(help="Same seed, same video.")] = 0,
    scale: Annotated[int, typer.Option(help="Enlarge frames in the file.")] = 4,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps. Default: the best there is.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output.")] = False,
) -> None:
    """Play a script of keys in a world model, and say how long each stage of a frame takes."""
    if not headless:
        raise typer.BadParameter("this command plays without a screen; add --headless")
    if not script.is_file():
        raise typer.BadParameter(f"--script {script} is not a file")
    with claim_output(output, force, resuming=False) as claim:
        from vidgen.data import VideoWriter
        from vidgen.pipelines import WorldModelPipeline, load_starts, parse_script

        model = model or str(find_asset(DEFAULT_WORLD_MODEL))
        pipe = load_pipeline(WorldModelPipeline, model, device)
        keys = parse_script(script.read_text(encoding="utf-8"), pipe.control_encoder.actions)
        frames, controls = load_starts(model, start)
        session = pipe.open_session(frames, controls, cache=cache, num_inference_steps=steps, seed=seed)
        began = time.perf_counter()
        with VideoWriter(claim, fps=pipe.config.fps, scale=scale) as writer:
            writer.append(frames)
            for held in tqdm(keys, unit="frame"):
                writer.append(session.step(held)[None])
        rate = len(keys) / (time.perf_counter() - began)
    stages = ", ".join(f"{stage} {times['mean']:.0f} ms" for stage, times in session.stats.items() if times["mean"])
    print(f"{output}: {len(keys)} frames after {len(frames)} real ones, {rate:.1f} frames/s", file=sys.stderr)
    print(f"per frame: {stages}", file=sys.stderr)
