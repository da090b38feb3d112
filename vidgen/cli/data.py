"""`vidgen data`: videos and prompts into the folders that training reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Encode videos and prompts for training.", rich_markup_mode="markdown")

Model = Annotated[str, typer.Option(metavar="FOLDER|HUB_ID", help="Pipeline whose VAE and text encoder are used.")]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Dataset to make or to continue.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps. Default: the fastest there is.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16. Default: bfloat16 on a GPU that has it.")
]


@app.callback()
def _group() -> None:
    """Encode videos and prompts for training."""


@app.command("encode-latents")
def encode_latents(
    videos: Annotated[Path, typer.Argument(metavar="VIDEOS_FOLDER", help="Folder the captions' paths start from.")],
    captions: Annotated[
        Path,
        typer.Option(metavar="FILE.jsonl", help='A `{"video": "relative/path.mp4", "caption": "…"}` per line.'),
    ],
    model: Model,
    output: Output,
    height: Annotated[int | None, typer.Option(help="Pixels. Default: the model's.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels. Default: the model's.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second. Default: the model's.")] = None,
    min_seconds: Annotated[float, typer.Option(help="Shorter videos are left out.")] = 10.0,
    max_seconds: Annotated[float, typer.Option(help="Of longer videos the beginning is taken.")] = 30.0,
    device: Device = None,
    dtype: Dtype = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Finish without videos that can't be read, instead of failing.")
    ] = False,
) -> None:
    """Encode captioned videos into latents and text embeddings, one clip per video, cut to whole chunks.

    Videos are resampled to the model's frame rate, resized and center-cropped. A run that was stopped goes on where it
    was. For several GPUs give each process a part of the captions and the same folder, then run once with all of them.
    """
    from vidgen.recipes.encode_data import LatentEncoding, encode_videos

    config = LatentEncoding(height, width, fps, min_seconds, max_seconds, device, dtype)
    print(encode_videos(videos, captions, model, output, config, skip_broken))


@app.command("prompts")
def prompts(
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPTS_FILE",
            help='A `.txt` with a prompt per line, or a `.jsonl` with `{"prompt": "…"}` or '
            '`{"prompts": [["…", seconds], …]}` per line.',
        ),
    ],
    model: Model,
    output: Output,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Take only the first N.")] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Encode prompts, or timed plans of several prompts, into text embeddings. A stopped run goes on where it was."""
    from vidgen.recipes.encode_data import encode_prompts

    print(encode_prompts(prompts, model, output, limit, device, dtype))
