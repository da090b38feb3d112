"""`vidgen lm`: train a small language model, generate text with any, and compare ways of decoding."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from vidgen.cli.lm_bench import bench
from vidgen.cli.lm_probe import probe_context
from vidgen.cli.loading import LANGUAGE_MODEL_HELP, load_lm

INTERRUPTED = 130

app = typer.Typer(help="Train, run and compare language models.", rich_markup_mode="markdown")
app.command("bench")(bench)
app.command("probe-context")(probe_context)


@app.callback()
def _group() -> None:
    """Train, run and compare language models."""


@app.command("train")
def train(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Gets corpus, run and model.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the training's config, as `train.max_steps=100`."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Text to learn. Default: Python's standard library.")
    ] = None,
    suffix: Annotated[str, typer.Option(help="Of the files that are read.")] = ".py",
    vocab_size: Annotated[int, typer.Option(help="Entries of the tokenizer.")] = 4096,
    config: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Config of the recipe lm_causal.")
    ] = "lm/tiny_causal",
) -> None:
    """Tokenizer, model and model card from nothing: the recipes lm_tokenizer, lm_causal and lm_assemble in a row.

    A run that was stopped goes on where it was. The model is in FOLDER/model.
    """
    from transformers.utils.logging import disable_progress_bar

    from vidgen.recipes.language_model import assemble_language_model, prepare_corpus, train_causal_lm

    disable_progress_bar()
    corpus, run = output / "corpus", output / "run"
    source = [f"source.suffix={suffix}", *([] if text is None else [f"source.folder={text}"])]
    try:
        prepare_corpus("lm/tiny_tokenizer", [f"output_dir={corpus}", f"vocab_size={vocab_size}", *source])
        train_causal_lm(config, [f"corpus={corpus}", f"train.output_dir={run}", *(overrides or ())])
    except KeyboardInterrupt as stop:
        again = ["vidgen", "lm", "train", "-o", str(output), "--suffix", suffix, "--vocab-size", str(vocab_size)]
        again += ["--config", config, *(["--text", str(text)] if text else []), *(overrides or ())]
        print(f"{str(stop) or 'stopped'}; go on with: {shlex.join(again)}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from stop
    model = assemble_language_model(
        "lm/tiny_assemble", [f"output_dir={output / 'model'}", f"run={run}", f"corpus={corpus}"]
    )
    print(f"{model}: go on with: vidgen lm generate --model {model} PROMPT", file=sys.stderr)
    print(model)


@app.command("generate")
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue or to answer; `-` reads stdin.")],
    model: Annotated[str | None, typer.Option(metavar="FOLDER", help=LANGUAGE_MODEL_HELP)] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most tokens. Default: 256, or what the context has room for.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the most probable tokens that have this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    decoder: Annotated[
        str | None, typer.Option(metavar="NAME", help="Speculative decoding, as prompt_lookup. Default: plain.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt, even of an instruct model.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps. Default: the best there is.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the device's.")] = None,
    attention: Annotated[str, typer.Option(metavar="BACKEND", help="Kernel; `vidgen doctor` lists them.")] = "auto",
) -> None:
    """Generate text; it is printed as it comes, the speed on stderr. An instruct model answers the prompt."""
    from transformers import TextStreamer

    from vidgen.language.generation import encode_prompt, generate_tokens, room_for_answer

    lm = load_lm(model, device, dtype, attention)
    input_ids = encode_prompt(lm, sys.stdin.read() if prompt == "-" else prompt, chat=False if raw else None)
    limit = min(256, room_for_answer(lm, input_ids)) if max_new_tokens is None else max_new_tokens
    streamer = TextStreamer(lm.tokenizer, skip_prompt=True, skip_special_tokens=True)
    began = time.perf_counter()
    tokens = generate_tokens(lm, input_ids, limit, temperature, top_p, seed, decoder, streamer=streamer)
    seconds = time.perf_counter() - began
    print(
        f"{input_ids.shape[1]} tokens of prompt, {len(tokens)} new in {seconds:.1f} s: "
        f"{len(tokens) / seconds:.1f} tokens/s",
        file=sys.stderr,
    )
