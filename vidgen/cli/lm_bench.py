"""`vidgen lm bench`: decoding methods side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vidgen.cli.loading import LANGUAGE_MODEL_HELP, load_lm, whole_numbers


def bench(
    model: Annotated[str | None, typer.Option(metavar="FOLDER", help=LANGUAGE_MODEL_HELP)] = None,
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="A text, a .jsonl with prompts, or builtin: Python sources.")
    ] = "builtin",
    methods: Annotated[
        str,
        typer.Option(
            help="With commas; early_exit:4, static_skip:6, clasp:4 take layers, assisted:FOLDER a model. +nanospec "
            "or +static_vocab:3072 behind one of these narrows its head."
        ),
    ] = "ar,prompt_lookup,early_exit,static_skip,clasp,knapspec",
    context: Annotated[str, typer.Option(help="Tokens of the prompts; lengths with commas.")] = "256",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 0.0,
    repeat: Annotated[int, typer.Option(help="Runs of everything, in turns; medians are shown.")] = 3,
    count: Annotated[int, typer.Option(help="Most prompts.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="KnapSpec's latency profile: read, or measured and written.")
    ] = None,
    reprofile: Annotated[bool, typer.Option("--reprofile", help="Measure the profile again.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="JSON of all figures.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps. Default: the best there is.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the device's.")] = None,
    attention: Annotated[str, typer.Option(metavar="BACKEND", help="Kernel; `vidgen doctor` lists them.")] = "auto",
) -> None:
    """Compare the speed of decoding methods. Exits with 1 if a greedy answer differs from plain decoding's.

    A difference where two tokens' logits are as close as rounding is a tie, and is reported as one.
    """
    import json

    from tqdm import tqdm

    from vidgen.language.decoding.bench import benchmark, is_lossless, make_table, read_prompts
    from vidgen.language.decoding.latency import LatencyProfile
    from vidgen.runtime.checkpoint import atomic_write
    from vidgen.runtime.meter import run_environment

    lengths = whole_numbers("--context", context)
    lm = load_lm(model, device, dtype, attention)
    texts = read_prompts(prompts, count)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    known = None
    if profile is not None:
        if profile.exists() and not reprofile:
            known = LatencyProfile.load(profile, lm.model)
        else:
            known = LatencyProfile.measure(lm.model)
            known.save(profile)
    with tqdm(bar_format="{desc}", leave=False, disable=not sys.stderr.isatty()) as line:
        results = benchmark(
            lm, texts, names, lengths, max_new_tokens, temperature, repeat, seed, known, line.set_description
        )
    print(make_table(results), end="")
    if output is not None:
        with atomic_write(output) as temporary:
            content = {**results, "environment": run_environment()}
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if not is_lossless(results):
        print("a greedy answer differs from plain decoding's by more than rounding", file=sys.stderr)
        raise typer.Exit(1)
