"""What the page shows of a comparison: both texts as they grow, with what was drafted colored, and how fast."""

from __future__ import annotations

import html

from vidgen.demo.language_run import PLAIN, LanguageRun, Side, TokenTexts

IDLE = (
    "<div class='lm-idle'><b>Nothing decoded yet</b><span>Give the beginning of a text and press Decode: it is "
    "continued plainly and with drafts, side by side.</span></div>"
)
_NAMES = {PLAIN: "Plain", "clasp": "CLaSp", "knapspec": "KnapSpec"}
_PREPARING = "<div class='lm-verdict'>preparing; KnapSpec measures this machine once, for some seconds</div>"


def method_name(method: str) -> str:
    """A method's name for people."""
    return _NAMES.get(method, method.replace("_", " ").capitalize())


class LanguageView:
    """HTML of a run, made again and again while it grows.

    Args:
        run: to show.
    """

    def __init__(self, run: LanguageRun) -> None:
        self._run = run
        tokenizer = run.target.lm.tokenizer
        self._texts = [TokenTexts(tokenizer) for _ in run.sides]
        self._parts: list[list[str]] = [[] for _ in run.sides]

    def html(self) -> str:
        """The comparison as it is now."""
        run = self._run
        fastest = max(side.tokens_per_second for side in run.sides)
        sides = "".join(self._side(number, side, fastest) for number, side in enumerate(run.sides))
        return (
            f"{self._verdict()}<div class='lm-sides'>{sides}</div><div class='lm-legend'>"
            "<span class='lm-draft'>drafted tokens</span> that one pass of the model confirmed together; what is "
            "not colored is the model's own next token.</div>"
        )

    def _verdict(self) -> str:
        run, (plain, speculative) = self._run, self._run.sides
        if plain.state == speculative.state == "waiting":
            return _PREPARING
        words, style = self._sameness()
        if plain.tokens_per_second and speculative.tokens_per_second:
            ratio = speculative.tokens_per_second / plain.tokens_per_second
            words = f"<b>{ratio:.2f}x</b> the speed of plain decoding · {words}"
        return f"<div class='lm-verdict {style}'>{words} · {run.input_ids.shape[1]} tokens of prompt</div>"

    def _sameness(self) -> tuple[str, str]:
        run, (plain, speculative) = self._run, self._run.sides
        if run.request.temperature > 0:
            return "drawn: other tokens from the same distribution", ""
        place = _first_difference(plain.tokens, speculative.tokens)
        if run.identical:
            return "✓ identical output", "lm-yes"
        if run.identical is None:
            return ("the same so far", "") if place is None else (f"they part at token {place}", "")
        where = "one side ends before the other" if place is None else f"they part at token {place}"
        if run.is_tie:
            return f"{where}, where two tokens are equally probable but for rounding", ""
        return f"✗ not identical: {where}", "lm-no"

    def _side(self, number: int, side: Side, fastest: float) -> str:
        parts, texts = self._parts[number], self._texts[number]
        for tokens, drafted in side.rounds[len(parts) :]:
            pieces = [html.escape(texts.add(token)) for token in tokens]
            draft, own = "".join(pieces[:drafted]), "".join(pieces[drafted:])
            parts.append((f"<span class='lm-draft'>{draft}</span>" if draft else "") + own)
        share = 100 * side.tokens_per_second / fastest if fastest else 0
        cursor = "<i class='lm-cursor'></i>" if side.state == "decoding" else ""
        count = sum(len(tokens) for tokens, _ in side.rounds)
        return (
            f"<section class='lm-side' data-state='{side.state}'>"
            f"<h4>{method_name(side.method)} <span>{side.state}</span></h4>"
            f"<div class='lm-speed'><b>{side.tokens_per_second:.1f}</b> tokens/s "
            f"<span>{count} tokens in {side.seconds:.2f} s</span></div>"
            f"<div class='vg-bar'><i style='width:{share:.1f}%'></i></div><p class='lm-facts'>{_facts(side)}</p>"
            f"<div class='lm-text'><div>{''.join(parts)}{cursor}</div></div></section>"
        )


def _facts(side: Side) -> str:
    if side.method == PLAIN:
        return "one token a pass of the model"
    stats = side.stats
    if stats is None:
        return "&nbsp;"
    if not stats.drafted:
        finished = side.state == "finished"
        return "it found no draft worth the try, and decoded plainly" if finished else "no draft yet"
    return (
        f"accept length <b>{stats.accept_length:.2f}</b> · {stats.acceptance:.0%} confirmed · "
        f"{stats.tokens_per_round:.2f} tokens a pass"
    )


def _first_difference(left: list[int], right: list[int]) -> int | None:
    """Number of the first token that differs, from 1; None where one is the beginning of the other."""
    return next((place for place, (a, b) in enumerate(zip(left, right), start=1) if a != b), None)
