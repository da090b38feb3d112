"""`vidgen world`: record worlds, and check what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Record worlds for training.", rich_markup_mode="markdown")


@app.callback()
def _group() -> None:
    """Record worlds for training."""


@app.command("record")
def record(
    world: Annotated[str, typer.Argument(metavar="WORLD", help="room or vizdoom.")],
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
    correlations = align_check(episodes)
    frames = sum(record.length for record in episodes.episodes)
    print(f"{folder}: {len(episodes.episodes)} episodes, {frames} frames of {split}, {episodes.info.world}")
    print("correlation by shift: " + ", ".join(f"{lag:+d}: {value:.2f}" for lag, value in correlations.items()))
