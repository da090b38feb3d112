"""Bars and tables of `default_model.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from vidgen.metrics import SCENE_ATTRIBUTES

BARS = {"biome": 0.9, "time_of_day": 0.9, "weather": 0.75, "traveller": 0.75}


def claims(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars of the attributes part, for what of it was measured."""
    scores = parts.get("attributes", {}).get("generated", {})
    return [
        {
            "claim": f"accuracy of {name}",
            "value": scores[name]["accuracy"],
            "at_least": bar,
            "passed": scores[name]["accuracy"] >= bar,
        }
        for name, bar in BARS.items()
        if name in scores
    ]


def attribute_lines(part: dict[str, Any]) -> list[str]:
    lines = [
        f"Attributes read back from {part['num_clips']} generated clips of {part['seconds']:g} s (95 % interval); the "
        "classifier itself on held-out real clips and on these after the model's autoencoder.",
        "",
        "| attribute | generated | bar | | real | real, 2 s | re-encoded, 2 s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, bar in BARS.items():
        score = part["generated"][name]
        low, high = score["interval"]
        verdict = "pass" if score["accuracy"] >= bar else "FAIL"
        others = " | ".join(
            f"{part[kind][name]['accuracy']:.1%}" for kind in ("real", "real_two_seconds", "re_encoded_two_seconds")
        )
        lines.append(
            f"| {name} | {score['accuracy']:.1%} ({low:.1%} to {high:.1%}) | {bar:.0%} | {verdict} | {others} |"
        )
    return lines


def drift_lines(part: dict[str, Any]) -> list[str]:
    lines = [
        f"Drift over {part['seconds']:g} s, last {part['edge_seconds']:g} s against the first, "
        f"{len(part['videos'])} videos: mean over videos (worst). Real videos change too, because the camera moves.",
        "",
        "| | shift of the mean, in standard deviations | standard deviation, last / first |",
        "|---|---|---|",
    ]
    for kind, label in (("rgb", "generated, RGB"), ("latent", "generated, latents"), ("real_rgb", "real, RGB")):
        shifts = [video[kind]["mean_shift"] for video in part["videos"]]
        ratios = [video[kind]["std_ratio"] for video in part["videos"]]
        worst = max(ratios, key=lambda ratio: abs(np.log(max(ratio, 1e-8))))
        lines.append(f"| {label} | {np.mean(shifts):.3f} ({max(shifts):.3f}) | {np.mean(ratios):.3f} ({worst:.3f}) |")
    lines += ["", "| attribute | first seconds | last seconds |", "|---|---|---|"]
    for name in SCENE_ATTRIBUTES:
        first, last = (part[f"{end}_attributes"][name]["accuracy"] for end in ("first", "last"))
        lines.append(f"| {name} | {first:.0%} | {last:.0%} |")
    return lines


def recall_lines(part: dict[str, Any]) -> list[str]:
    lines = [
        "Recall of revisited places after the camera panned right for T seconds and back: best-aligned PSNR against "
        "the own past, above the same search in other videos of the prompt (mean ± standard deviation over videos), "
        "over places first seen more than T seconds before. `recall` is how often the own past matches better; 0.5 is "
        "chance.",
        "",
        "| T (s) | memory | PSNR (dB) | chance (dB) | gain (dB) | recall |",
        "|---|---|---|---|---|---|",
    ]
    for turn, memory in dict.fromkeys((row["turn"], row["memory"]) for row in part["rows"]):
        rows = [row for row in part["rows"] if (row["turn"], row["memory"]) == (turn, memory)]
        cells = [
            f"{np.mean(values):.2f} ± {np.std(values):.2f}"
            for values in ([row[key] for row in rows] for key in ("psnr", "chance", "gain", "recall"))
        ]
        lines.append(f"| {turn:g} | {memory} | {' | '.join(cells)} |")
    return lines


def make_table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [f"Model `{results['model']}` on {results['environment']['cpu']}."]
    for name, report in (("attributes", attribute_lines), ("drift", drift_lines), ("recall", recall_lines)):
        part = results["parts"].get(name)
        if part is None:
            continue
        lines += ["", *report(part)]
        if not part["complete"]:
            lines += ["", f"The part `{name}` ran out of its time budget and is incomplete."]
    return "\n".join(lines) + "\n"
