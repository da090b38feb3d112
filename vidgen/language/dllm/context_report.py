"""All context probes of one model in one report: the work of `vidgen lm probe-context`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vidgen.language.dllm.modeling import MaskedDiffusionLM
from vidgen.language.dllm.probes import (
    COPY_ACCURACY,
    ProbeTask,
    RuleInductionTask,
    copy_probe,
    end_position_probe,
    gradient_attribution,
    mask_scaling_probe,
    position_probe,
    unmasking_probe,
)
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.errors import ConfigError


def context_report(
    model: Any,
    tokenizer: Any,
    task: ProbeTask,
    extra_masks: Sequence[int] = (0, 1, 5, 10, 20, 50),
    places: int = 5,
    count: int = 100,
    seed: int = 0,
    batch_size: int = 32,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Probes a masked diffusion model, or the position probe of an autoregressive one.

    Args:
        model: the model.
        tokenizer: of the model.
        task: what is asked.
        extra_masks: numbers of masks after the answer's.
        places: of the position probe; see there.
        count: questions of every probe.
        seed: of the questions.
        batch_size: items per forward.
        progress: told what is measured.

    Returns:
        `position` for every model; for masked diffusion models also `masks` and `control` (see `mask_scaling_probe`),
        `unmasking`, `attribution` and `end`, the last null where the model names no end token; for rules also
        `copy_accuracy`.
    """
    probes = task.items(tokenizer, count, seed)
    masked = isinstance(model, MaskedDiffusionLM)
    report: dict[str, Any] = {
        "model": type(model).__name__,
        "task": {"kind": type(task).__name__, "items": count, "seed": seed, "refused_words": list(probes.refused)},
    }
    if isinstance(task, RuleInductionTask):
        progress("copying")
        report["copy_accuracy"] = copy_probe(model, tokenizer, min(count, 50), seed, batch_size)
    if masked:
        most = max(extra_masks)
        for name, filler in (("masks", "mask"), ("control", "dot")):
            progress(f"extra tokens: {filler}")
            report[name] = mask_scaling_probe(model, probes, extra_masks, filler, batch_size)
        progress("unmasking in steps")
        report["extra_masks_of_unmasking"] = most
        steps = sorted({1, *(2**power for power in range(1, 10) if 2**power <= most), most + 1})
        report["unmasking"] = unmasking_probe(model, probes, most, steps, batch_size)
        report["attribution"] = None
        if most:
            progress("gradients")
            report["attribution"] = {"extra_masks": most, **gradient_attribution(model, probes, most, batch_size)}
        report["end"] = None
        if model.generation_config.eos_token_id is not None:
            progress("where answers end")
            report["end"] = end_position_probe(model, probes, extra_masks, batch_size=batch_size)
    report["position"] = []
    for move in ("block", "query") if masked else ("block",):
        progress(f"position of the {move}")
        report["position"] += position_probe(model, task, tokenizer, move, places, count, seed, batch_size)
    return report


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """The report as lines of text."""
    lines = [f"{report['model']}, {report['task']['items']} items"]
    copied = report.get("copy_accuracy")
    if copied is not None:
        lines.append(f"copying: {100 * copied:.0f} % right")
        if copied < COPY_ACCURACY:
            lines.append(
                f"  below {100 * COPY_ACCURACY:.0f} %: the model is too weak for these probes, or its logits are"
                " shifted (logits_shift in config.json)"
            )
    if report["task"]["refused_words"]:
        lines.append(f"not one token, left out: {', '.join(report['task']['refused_words'])}")
    for name, filler in (("masks", "mask"), ("control", "dot")):
        if name not in report:
            continue
        lines.append(f"gen_length = block_length, 1 step, the rest {filler}s | accuracy % | entropy | TV")
        for row in report[name]["rows"]:
            lines.append(
                f"  {row['gen_length']} | {100 * row['accuracy']:.1f} | {row['entropy']:.2f} | {row['tv']:.3f}"
            )
    if "unmasking" in report:
        length = report["extra_masks_of_unmasking"] + 1
        lines.append(f"gen_length = block_length = {length}, steps | accuracy %")
        lines += [f"  {row['steps']} | {100 * row['accuracy']:.1f}" for row in report["unmasking"]]
    if report.get("attribution"):
        lines.append(
            "gradient of an extra mask / of the text: {mask:.4f} / {text:.4f}".format(**report["attribution"])
        )
    for row in report.get("end") or ():
        end = "never" if row["end"] is None else f"after {row['end']:.1f} tokens"
        lines.append(
            "gen_length {gen_length}, {steps} steps: ends in {0:.0f} %, ".format(100 * row["ended"], **row) + end
        )
    lines.append("position of | place | accuracy %")
    lines += [f"  {row['move']} | {row['position']:.2f} | {100 * row['accuracy']:.1f}" for row in report["position"]]
    return lines


def plot_report(report: Mapping[str, Any], path: Path) -> None:
    """Accuracy against extra masks and against position, as a PNG.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install 'vidgen[eval]'") from error
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for name, label in (("masks", "masks"), ("control", "neutral token")):
        rows = report[name]["rows"] if name in report else []
        if rows:
            left.plot([row["extra_masks"] for row in rows], [100 * row["accuracy"] for row in rows], "o-", label=label)
    if left.lines:
        left.legend()
    left.set(xlabel="extra tokens", ylabel="accuracy, %", ylim=(0, 102))
    for move in ("block", "query"):
        rows = [row for row in report["position"] if row["move"] == move]
        if rows:
            right.plot([row["position"] for row in rows], [100 * row["accuracy"] for row in rows], "o-", label=move)
    right.set(xlabel="position (0 first, 1 last)")
    right.legend()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
