"""`vidgen lm probe-context`: how a language model uses its context."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vidgen.cli.loading import load_lm, whole_numbers


def probe_context(
    model: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="Diffusion (LLaDA, Dream, our own) or causal model; or owner/name on the Hub."
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="JSON of all figures.")],
    adapter: Annotated[Path | None, typer.Option(metavar="FOLDER", help="LoRA adapters, as peft saves them.")] = None,
    task: Annotated[
        str, typer.Option(help="rules: words and digits, few-shot; topics: for models of the recipe's own language.")
    ] = "rules",
    extra_masks: Annotated[
        str, typer.Option(help="Masks after the answer's; numbers with commas.")
    ] = "0,1,5,10,20,50",
    places: Annotated[int, typer.Option(help="Positions of the evidence, from first to last.")] = 5,
    n_relevant: Annotated[int, typer.Option(help="Rules: examples of the rule.")] = 10,
    n_distractor: Annotated[int, typer.Option(help="Rules: examples of another rule.")] = 40,
    n_words: Annotated[int, typer.Option(help="Topics: words of a text, a third of them keywords side by side.")] = 24,
    count: Annotated[int, typer.Option(help="Questions of every probe.")] = 100,
    seed: Annotated[int, typer.Option(help="Same seed, same questions.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Questions at once.")] = 16,
    mask_token_id: Annotated[int | None, typer.Option(help="Where the config doesn't have it; LLaDA: 126336.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Curves as PNG.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps. Default: the best there is.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the device's.")] = None,
    attention: Annotated[str, typer.Option(metavar="BACKEND", help="Kernel; `vidgen doctor` lists them.")] = "auto",
) -> None:
    """Accuracy against the number of masks behind the question and against the place of the evidence.

    Also entropy, total variation to no extra masks, a control with a neutral token in their place, unmasking in steps,
    gradients, and where answers end. Of causal models: the place of the evidence alone.
    """
    import json

    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from vidgen.language.dllm.context_report import context_report, plot_report, report_lines
    from vidgen.language.dllm.layouts import is_dllm, load_dllm
    from vidgen.language.dllm.probes import RuleInductionTask, TopicInductionTask
    from vidgen.runtime.checkpoint import atomic_write
    from vidgen.runtime.device import set_threads
    from vidgen.runtime.meter import run_environment
    from vidgen.train.lora import merge_lora

    counts = whole_numbers("--extra-masks", extra_masks)
    if task not in ("rules", "topics"):
        raise typer.BadParameter(f"--task {task}; allowed: rules, topics")
    if task == "rules":
        asked = RuleInductionTask(n_relevant=n_relevant, n_distractor=n_distractor)
    else:
        asked = TopicInductionTask(n_words=n_words, block_words=max(1, n_words // 3))
    for file in (out, *([] if plot is None else [plot])):
        if not file.parent.is_dir():
            raise typer.BadParameter(f"the folder of {file} doesn't exist")
    if is_dllm(model):
        set_threads()
        disable_progress_bar()
        loaded = load_dllm(model, device, dtype, attention, mask_token_id=mask_token_id)
        try:
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(
                f"--model {model} has no tokenizer; save it there with save_pretrained"
            ) from error
    else:
        lm = load_lm(model, device, dtype, attention)
        loaded, tokenizer = lm.model, lm.tokenizer
    if adapter is not None:
        loaded = merge_lora(loaded, adapter)
    report = context_report(
        loaded,
        tokenizer,
        asked,
        counts,
        places,
        count,
        seed,
        batch_size,
        lambda text: print(text, file=sys.stderr) if sys.stderr.isatty() else None,
    )
    with atomic_write(out) as temporary:
        temporary.write_text(
            json.dumps({**report, "environment": run_environment()}, indent=1) + "\n", encoding="utf-8"
        )
    if plot is not None:
        plot_report(report, plot)
    print("\n".join(report_lines(report)))
