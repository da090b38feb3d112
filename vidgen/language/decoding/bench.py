"""Methods of decoding side by side: speed against plain decoding, and whether the output is the same.

Runs are interleaved, so that whatever else the machine does slows all methods alike. `ar` is the plain `generate` of
transformers, which all others are compared with.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vidgen.language.corpus import TextSource
from vidgen.language.decoding.base import PLUGINS, Drafter, make_drafter, split_method
from vidgen.language.decoding.baselines import SkipDrafter
from vidgen.language.decoding.engine import generate
from vidgen.language.decoding.knapspec import KnapSpecDrafter
from vidgen.language.decoding.latency import LatencyProfile
from vidgen.language.decoding.nanospec import (
    NarrowDrafter,
    StaticVocabulary,
    parse_size,
    with_static_vocabulary,
)
from vidgen.language.decoding.stats import VocabularyStats
from vidgen.runtime.checks import check_not_negative, check_whole
from vidgen.runtime.errors import ConfigError

if TYPE_CHECKING:
    from vidgen.language.models import LanguageModel

BUILTIN = "builtin"
DEFAULT_METHODS = ("ar", "prompt_lookup", "early_exit", "static_skip", "clasp", "knapspec")
# Text by which the most frequent tokens are found, where no file of counts is given.
_COUNTED_CHARACTERS = 2_000_000
# Rounding of one forward pass over several tokens against several over one, in units of the number format.
_TIE = 32


def read_prompts(source: str, count: int) -> list[str]:
    """Texts whose beginnings are the prompts.

    Args:
        source: a text file, a `.jsonl` file of objects with a `prompt`, or `builtin`: held-out files of Python's
            standard library, the longest first.
        count: at most so many.

    Raises:
        ConfigError: there is no such file, or it holds no prompt.
    """
    check_whole(1, count=count)
    if source == BUILTIN:
        return sorted(TextSource().texts("heldout"), key=len, reverse=True)[:count]
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            texts = [json.loads(line)["prompt"] for line in text.splitlines() if line.strip()]
        else:
            texts = [text]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read prompts from {source}: {error}; give a text file or {BUILTIN}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{source}: each line must be a JSON object with "prompt" ({error!r})') from error
    if not all(isinstance(prompt, str) and prompt.strip() for prompt in texts) or not texts:
        raise ConfigError(f"{source} holds an empty prompt, or none")
    return texts[:count]


def prompt_ids(lm: LanguageModel, texts: Sequence[str], context: int) -> list[torch.Tensor]:
    """The first `context` tokens `(1, context)` of each text that has as many.

    Raises:
        ConfigError: none has.
    """
    # A token of a byte-level tokenizer seldom stands for more than 16 bytes; the rest of a long text isn't needed.
    encoded = [
        lm.tokenizer(text[: 16 * context], add_special_tokens=False, verbose=False)["input_ids"] for text in texts
    ]
    ids = [torch.tensor([tokens[:context]], device=lm.device) for tokens in encoded if len(tokens) >= context]
    if not ids:
        longest = max(len(tokens) for tokens in encoded)
        raise ConfigError(f"context {context}: the longest prompt has {longest} tokens; give longer texts")
    return ids


def count_tokens(lm: LanguageModel, texts: Iterable[str]) -> torch.Tensor:
    """How often each token stands in some texts, int64 `(vocabulary,)`."""
    counts = torch.zeros(lm.model.get_output_embeddings().weight.shape[0], dtype=torch.int64)
    for text in texts:
        ids = lm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        counts += torch.bincount(torch.tensor([*ids, lm.tokenizer.eos_token_id]), minlength=len(counts))
    return counts


def _library_texts() -> Iterator[str]:
    """Python's standard library, up to a length."""
    left = _COUNTED_CHARACTERS
    for text in TextSource().texts("train"):
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def benchmark(
    lm: LanguageModel,
    texts: Sequence[str],
    methods: Sequence[str] = DEFAULT_METHODS,
    contexts: Sequence[int] = (512,),
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    repeats: int = 3,
    seed: int = 0,
    profile: LatencyProfile | None = None,
    progress: Callable[[str], None] = lambda text: None,
    makers: Mapping[str, Callable[[], Drafter]] | None = None,
) -> dict[str, Any]:
    """Runs all methods on all prompts.

    A method's drafter is made once per context length: what it learns with one prompt it uses for the next, as in
    serving. Models run beyond the context they were trained for if they are told to.

    Args:
        lm: the target.
        texts: see `read_prompts`.
        methods: `ar`, and names that `make_drafter` takes. `ar` runs in any case. `+static_vocab:SIZE` without a file
            of counts takes the most frequent tokens of Python's standard library.
        contexts: lengths of the prompts, in tokens.
        max_new_tokens: of each answer.
        temperature: 0 is greedy decoding.
        repeats: how often everything is run.
        seed: of the draws.
        profile: for KnapSpec; measured if it isn't given.
        progress: is told what runs.
        makers: of drafters that no name describes, by the names that they have in `methods`.

    Returns:
        `{"contexts": {context: {method: figures}}}` and the settings. `identical` says for each prompt whether the
        tokens are those of `ar`; a difference is a `tie` if the logits of the two tokens are as close as rounding.
    """
    check_whole(1, max_new_tokens=max_new_tokens, repeats=repeats)
    check_not_negative(temperature=temperature)
    for context in contexts:
        check_whole(2, context=context)
    methods = ["ar", *(method for method in dict.fromkeys(methods) if method != "ar")]
    makers = makers or {}
    parts = {method: split_method(method) for method in methods[1:] if method not in makers}
    if profile is None and any(drafter == "knapspec" for drafter, _ in parts.values()):
        progress("latency profile")
        profile = LatencyProfile.measure(lm.model)
    counts = None
    if any(_is_uncounted(plugin) for _, plugin in parts.values()):
        progress("counting tokens")
        counts = count_tokens(lm, _library_texts())

    def make(method: str) -> Drafter | None:
        if method == "ar":
            return None
        if method in makers:
            return makers[method]()
        name, plugin = parts[method]
        drafter = KnapSpecDrafter(lm.model, profile=profile) if name == "knapspec" else make_drafter(name, lm.model)
        if plugin is None:
            return drafter
        name, _, argument = plugin.partition(":")
        if _is_uncounted(plugin):
            size = parse_size(name, argument)
            return with_static_vocabulary(drafter, StaticVocabulary.from_counts(counts, size, lm.device))
        return PLUGINS[name](drafter, argument or None)

    sampling = {"do_sample": temperature > 0, **({"temperature": temperature} if temperature > 0 else {})}
    results = {}
    for context in contexts:
        prompts = prompt_ids(lm, texts, context)
        drafters = {method: make(method) for method in methods}
        runs: dict[str, list[list[dict[str, Any]]]] = {method: [] for method in methods}
        outputs: dict[str, list[torch.Tensor]] = {}
        for repeat in range(repeats):
            for method in methods:
                runs[method].append([])
            for number, ids in enumerate(prompts):
                for method in methods:
                    progress(f"context {context}, repeat {repeat + 1} of {repeats}, prompt {number + 1}, {method}")
                    torch.manual_seed(seed + number)
                    tokens, figures = _run(lm, drafters[method], ids, max_new_tokens, sampling)
                    runs[method][-1].append(figures)
                    if repeat == 0:
                        outputs.setdefault(method, []).append(tokens)
        results[str(context)] = {
            method: _summary(runs[method], runs["ar"])
            | _skipped(drafters[method])
            | ({} if temperature > 0 else _comparison(lm, outputs[method], outputs["ar"], context))
            for method in methods
        }
    return {
        "contexts": results,
        "methods": methods,
        "prompts": len(texts),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "repeats": repeats,
        "seed": seed,
    }


def _is_uncounted(plugin: str | None) -> bool:
    """Whether it is a static vocabulary without a file of counts."""
    name, _, argument = (plugin or "").partition(":")
    return name == "static_vocab" and ":" not in argument


def _skipped(drafter: Drafter | None) -> dict[str, list[int]]:
    if isinstance(drafter, NarrowDrafter):
        drafter = drafter.inner
    return {"skipped": sorted(drafter.skip)} if isinstance(drafter, SkipDrafter) else {}


def _run(
    lm: LanguageModel, drafter: Drafter | None, ids: torch.Tensor, max_new_tokens: int, sampling: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    wall, cpu = time.perf_counter(), time.process_time()
    options = {"max_new_tokens": max_new_tokens, "attention_mask": torch.ones_like(ids), **sampling}
    if drafter is None:
        tokens = lm.model.generate(ids, **options)
    else:
        tokens = generate(lm.model, ids, drafter, **options)
    tokens = tokens[0].cpu()  # waits for the device
    figures = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    figures["new_tokens"] = len(tokens) - ids.shape[1]
    return tokens, figures | ({} if drafter is None else {"stats": drafter.stats.to_dict()})


def _summary(runs: list[list[dict[str, Any]]], plain: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over repeats; counts of all runs together."""

    def speed(repeat: list[dict[str, Any]], clock: str) -> float:
        return sum(run["new_tokens"] for run in repeat) / sum(run[clock] for run in repeat)

    summary: dict[str, Any] = {
        "tokens_per_second": statistics.median(speed(repeat, "seconds") for repeat in runs),
        "speedup": statistics.median(
            speed(own, "seconds") / speed(other, "seconds") for own, other in zip(runs, plain, strict=True)
        ),
        "cpu_speedup": statistics.median(
            speed(own, "cpu_seconds") / speed(other, "cpu_seconds") for own, other in zip(runs, plain, strict=True)
        ),
        "new_tokens": sum(run["new_tokens"] for run in runs[0]),
    }
    stats = [run["stats"] for repeat in runs for run in repeat if "stats" in run]
    if stats:
        numbers = [name for name, value in stats[0].items() if isinstance(value, int | float)]
        total = {name: sum(entry[name] for entry in stats) for name in numbers}
        drafted_rows = sum(sum(entry["accept_lengths"].values()) for entry in stats)
        summary |= {
            "accept_length": total["accepted"] / drafted_rows if drafted_rows else 0.0,
            "drafted_per_round": total["drafted"] / drafted_rows if drafted_rows else 0.0,
            "acceptance": total["accepted"] / total["drafted"] if total["drafted"] else 0.0,
            "drafting_rounds": total["drafting_rounds"] / total["rounds"] if total["rounds"] else 0.0,
            "draft_share": total["draft_seconds"] / total["total_seconds"],
            "plan_share": total["plan_seconds"] / total["total_seconds"],
            "notes": [entry["notes"] for entry in stats if entry["notes"]][-1:],
        }
    vocabularies = [entry["vocabulary"] for entry in stats if entry["vocabulary"] is not None]
    if vocabularies:
        names = [field.name for field in dataclasses.fields(VocabularyStats)]
        whole = VocabularyStats()
        for entry in vocabularies:
            whole.add(VocabularyStats(**{name: entry[name] for name in names}))
        summary["vocabulary"] = whole.to_dict()
    return summary


def _comparison(
    lm: LanguageModel, own: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], context: int
) -> dict[str, Any]:
    """For each prompt, whether the tokens are the same, and where not, how close the two logits are."""
    identical, gaps, ties = [], [], []
    for left, right in zip(own, plain, strict=True):
        identical.append(torch.equal(left, right))
        if not identical[-1]:
            gap, is_tie = logit_gap(lm, left, right)
            gaps.append(gap)
            ties.append(is_tie)
    return {"identical": identical, "logit_gaps": gaps, "differences_are_ties": all(ties)}


@torch.no_grad()
def logit_gap(lm: LanguageModel, left: torch.Tensor, right: torch.Tensor) -> tuple[float, bool]:
    """How far the logits of two answers are apart where they part, and whether rounding can explain it.

    Args:
        lm: the target.
        left: `(length,)` tokens.
        right: `(length,)` tokens that differ from them.
    """
    shared = min(len(left), len(right))
    differ = (left[:shared] != right[:shared]).nonzero()[:, 0]
    if not len(differ):
        return float("inf"), False  # one goes on where the other ended
    place = int(differ[0])
    logits = lm.model(left[None, :place].to(lm.device), logits_to_keep=1).logits[0, -1].float()
    gap = float((logits[left[place]] - logits[right[place]]).abs())
    return gap, gap <= _TIE * torch.finfo(lm.dtype).eps * float(logits.abs().max())


def is_lossless(results: dict[str, Any]) -> bool:
    """Whether every greedy answer is that of plain decoding, but for ties."""
    return all(
        figures.get("differences_are_ties", True)
        for methods in results["contexts"].values()
        for figures in methods.values()
    )


def make_table(results: dict[str, Any]) -> str:
    """Figures of `benchmark` as Markdown."""
    head = ("context", "method", "tokens/s", "speed-up", "speed-up, CPU time", "accepted per draft", "acceptance",
            "drafting", "planning", "active tokens", "coverage", "identical")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for context, methods in results["contexts"].items():
        for method, row in methods.items():
            cells = [f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f}x", f"{row['cpu_speedup']:.2f}x"]
            if "acceptance" in row:
                cells += [f"{row['accept_length']:.2f}", f"{row['acceptance']:.0%}"]
                cells += [f"{row['draft_share']:.0%}", f"{row['plan_share']:.1%}"]
            else:
                cells += ["–"] * 4
            vocabulary = row.get("vocabulary")
            if vocabulary is None:
                cells += ["–"] * 2
            else:
                cells += [f"{vocabulary['active_mean']:.0f}", f"{vocabulary['coverage']:.1%}"]
            if "identical" in row:
                same = f"{sum(row['identical'])} of {len(row['identical'])}"
                ties = ", rest ties" if row["logit_gaps"] and row["differences_are_ties"] else ""
                cells.append(same + ties)
            else:
                cells.append("sampled")
            lines.append(f"| {context} | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
