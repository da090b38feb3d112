"""`vidgen direct`: a timed prompt plan for `vidgen generate --plan`, from a script in prose."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vidgen.cli.loading import LANGUAGE_MODEL_HELP, load_lm
from vidgen.runtime.errors import VidgenError

if TYPE_CHECKING:
    from vidgen.pipelines import PromptPlan


def direct(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Text file: what happens, in prose.")],
    model: Annotated[str | None, typer.Option(metavar="FOLDER", help=LANGUAGE_MODEL_HELP)] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Plan to write: .txt or .jsonl, or `-` for stdout.")
    ] = Path("plan.txt"),
    seconds: Annotated[float | None, typer.Option(help="Length of the video. Default: as the model sees fit.")] = None,
    min_shots: Annotated[int, typer.Option(help="Fewest prompts.")] = 2,
    max_shots: Annotated[int, typer.Option(help="Most prompts.")] = 12,
    max_shot_seconds: Annotated[int, typer.Option(help="Longest time that the model may give to a prompt.")] = 30,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable words.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same plan.")] = 0,
    decoder: Annotated[
        str | None, typer.Option(metavar="NAME", help="Speculative decoding, as prompt_lookup. Default: plain.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps. Default: the best there is.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the device's.")] = None,
    attention: Annotated[str, typer.Option(metavar="BACKEND", help="Kernel; `vidgen doctor` lists them.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace the plan.")] = False,
) -> None:
    """Turn a script into prompts with times, through a language model; the plan can be read whatever the model.

    For real use give `--model` an instruct model, such as a folder of Qwen3. The embedded one follows no instructions:
    with it, this only tests the path.
    """
    to_stdout = str(output) == "-"
    if not script.is_file():
        raise typer.BadParameter(f"{script} is not a file; give a text file with the script")
    if not to_stdout and output.suffix not in (".txt", ".jsonl"):
        raise typer.BadParameter(f"--output {output} must end in .txt or .jsonl")
    if not to_stdout and output.exists() and not force:
        raise typer.BadParameter(f"{output} exists; choose another --output, or add --force to replace it")
    try:
        text = script.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise VidgenError(f"{script} is not UTF-8 text: {error.reason} at byte {error.start}") from error

    from vidgen.language.direct import PlanSchema, direct
    from vidgen.pipelines import PromptPlan
    from vidgen.runtime.checkpoint import atomic_write

    schema = PlanSchema(min_shots=min_shots, max_shots=max_shots, max_seconds=max_shot_seconds)
    lm = load_lm(model, device, dtype, attention)
    if lm.tokenizer.chat_template is None:
        name = model or "the embedded model"
        print(
            f"note: {name} has no chat template, so it is hardly an instruct model: its plan can be read, but may say "
            "nothing of the script",
            file=sys.stderr,
        )
    shots = direct(lm, text, schema, seconds, temperature, seed, decoder)
    plan = PromptPlan.parse([(shot.prompt, shot.seconds) for shot in shots])
    lines = format_plan(plan, output.suffix)
    if to_stdout:
        print(lines, end="")
        return
    with atomic_write(output) as path:
        path.write_text(lines, encoding="utf-8")
    print(
        f"{output}: {len(plan.segments)} prompts, {plan.seconds:g} s; go on with: vidgen generate --plan {output}",
        file=sys.stderr,
    )


def format_plan(plan: PromptPlan, suffix: str) -> str:
    """The text of a plan file, which `PromptPlan.from_file` reads back: `.jsonl`, or else lines `seconds | prompt`."""
    if suffix == ".jsonl":
        entries = ({"prompt": segment.prompt, "seconds": segment.seconds} for segment in plan.segments)
        return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    return "".join(f"{segment.seconds:.12g} | {segment.prompt}\n" for segment in plan.segments)
