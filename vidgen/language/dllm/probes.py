"""How well a language model uses its context: where the evidence stands, and how many masks follow the question.

Every item has one answer of one token. A masked diffusion model reads it at a mask after a single forward, with more
masks behind the text; an autoregressive model predicts it as the next token. Source: "Masks Can Be Distracting: On
Context Comprehension in Diffusion Language Models", Piskorz et al., arXiv 2511.21338. Scores of diffusion models
depend on how many masks there are, so every row of results has `gen_length`, `block_length` and `steps`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vidgen.language.dllm.losses import append_masks, total_variation
from vidgen.language.dllm.modeling import MaskedDiffusionLM
from vidgen.language.dllm.topics import DOT, QUERY, SPECIAL, TopicData
from vidgen.runtime.checks import check_whole
from vidgen.runtime.device import generator_for
from vidgen.runtime.errors import ConfigError, suggestion

# Common words that most tokenizers know as one token; no word has two kinds.
KINDS = {
    "animal": "cat dog horse cow pig bird fish bear lion mouse sheep wolf",
    "color": "red blue green black white brown yellow pink gray purple",
    "body part": "hand foot head arm leg eye ear nose mouth neck knee finger",
    "clothing": "shirt hat coat dress shoe belt boot glove jacket pants",
    "vehicle": "car bus train truck boat plane bike ship van taxi",
    "food": "bread cheese rice soup cake meat egg apple salt butter",
    "furniture": "table chair bed desk lamp shelf sofa mirror drawer bench",
    "weather": "rain snow wind storm cloud fog sun thunder ice frost",
}
DISTRACTORS = {"largest digit": max, "smallest digit": min}
LEAST_WORDS = 4  # of every kind
COPY_ACCURACY = 0.95


@dataclass(frozen=True)
class ProbeItem:
    """One question as tokens.

    Attributes:
        before: what stands before the answer.
        answer: the right token.
        after: what stands behind it, before any extra masks.
    """

    before: tuple[int, ...]
    answer: int
    after: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self.before) + 1 + len(self.after)


@dataclass(frozen=True)
class ProbeSet:
    """Items of one task.

    Attributes:
        items: questions.
        neutral_id: a token that says nothing, the filler of the control.
        refused: words that the tokenizer doesn't know as one token, and that are left out.
    """

    items: tuple[ProbeItem, ...]
    neutral_id: int
    refused: tuple[str, ...] = ()

    @property
    def answers(self) -> torch.Tensor:
        """Right tokens `(items,)`."""
        return torch.tensor([item.answer for item in self.items])


# --- tasks -------------------------------------------------------------------------------------------------------


def one_token(tokenizer: Any, before: str, word: str) -> int:
    """The token of a word behind a text.

    Raises:
        ConfigError: it isn't one token there, or is one that the tokenizer doesn't know.
    """
    prefix, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, before + word))
    if len(whole) != len(prefix) + 1 or whole[:-1] != prefix or whole[-1] == tokenizer.unk_token_id:
        raise ConfigError(f"{word.strip()!r} is not one token in this tokenizer; take another word")
    # Some tokenizers name no unknown token but read every unknown word as the same one.
    if tokenizer.convert_ids_to_tokens(whole[-1]) == tokenizer.pad_token:
        raise ConfigError(f"{word.strip()!r} is unknown to this tokenizer; take another word")
    return whole[-1]


@dataclass(frozen=True)
class RuleInductionTask:
    """Few-shot examples of a rule among examples of another one; the question asks for the rule.

    The rule picks the word of one kind from three; a distractor picks a digit, so its examples say nothing of kinds.

    Args:
        rule: kind of word, one of `KINDS`; None = every question another one.
        distractor: one of `DISTRACTORS`; None = both, each with every rule.
        n_relevant: examples of the rule.
        n_distractor: examples of the distractor.
        layout: `"block"` keeps the examples of the rule together, `"shuffled"` mixes all.
        block_position: examples of the distractor before the block; None = all.
        query_position: examples before the question, which then stands inside the prompt; None = all, at its end.
    """

    rule: str | None = None
    distractor: str | None = None
    n_relevant: int = 10
    n_distractor: int = 40
    layout: Literal["block", "shuffled"] = "block"
    block_position: int | None = None
    query_position: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("rule", KINDS), ("distractor", DISTRACTORS), ("layout", ("block", "shuffled"))):
            value = getattr(self, name)
            if value not in allowed and (value is not None or name == "layout"):
                raise ConfigError(f"{name}={value!r}: {suggestion(str(value), allowed)}")
        check_whole(1, n_relevant=self.n_relevant)
        check_whole(0, n_distractor=self.n_distractor)
        if self.block_position is not None:
            check_whole(0, self.n_distractor, block_position=self.block_position)
            if self.layout != "block":
                raise ConfigError("block_position needs layout='block'")
        if self.query_position is not None:
            check_whole(0, self.n_relevant + self.n_distractor, query_position=self.query_position)

    def at(self, move: Literal["block", "query"], fraction: float) -> RuleInductionTask:
        """The task with its block or its question at a fraction of the prompt: 0 first, 1 last."""
        if move == "block":
            return dataclasses.replace(self, block_position=round(fraction * self.n_distractor))
        return dataclasses.replace(self, query_position=round(fraction * (self.n_relevant + self.n_distractor)))

    def of_question(self, index: int) -> RuleInductionTask:
        """The task with the rule and the distractor of a question."""
        rule = self.rule or list(KINDS)[index % len(KINDS)]
        distractor = self.distractor or list(DISTRACTORS)[index // len(KINDS) % len(DISTRACTORS)]
        return dataclasses.replace(self, rule=rule, distractor=distractor)

    def examples(
        self, source: random.Random, words: Mapping[str, Sequence[str]]
    ) -> tuple[list[tuple[str, str]], tuple[str, str]]:
        """Examples in the order of the prompt and the question, each as text before the answer and answer.

        Args:
            source: of the draws.
            words: kind -> words; rule and distractor are given.
        """
        relevant = [_pick_kind(source, words, self.rule) for _ in range(self.n_relevant)]
        others = [_pick_digit(source, self.distractor) for _ in range(self.n_distractor)]
        if self.layout == "shuffled":
            examples = relevant + others
            source.shuffle(examples)
        else:
            at = self.n_distractor if self.block_position is None else self.block_position
            examples = others[:at] + relevant + others[at:]
        return examples, _pick_kind(source, words, self.rule)

    def items(self, tokenizer: Any, count: int, seed: int) -> ProbeSet:
        """Questions in a model's tokens.

        Args:
            tokenizer: of the model.
            count: questions.
            seed: same seed, same questions.

        Raises:
            ConfigError: the tokenizer knows too few words of a kind as one token each.
        """
        check_whole(1, count=count)
        words, refused = _known_words(tokenizer)
        bos = tokenizer.bos_token_id
        start = [bos] if bos is not None and tokenizer("a")["input_ids"][0] == bos else []

        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        items = []
        for index in range(count):
            # The same question wherever its block stands.
            source = random.Random(f"{seed} {index}")
            examples, (question, answer) = self.of_question(index).examples(source, words)
            at = len(examples) if self.query_position is None else self.query_position
            lines = [f"{text} {right}\n" for text, right in examples]
            before = "".join(lines[:at]) + question
            after = encode("\n" + "".join(lines[at:]).rstrip("\n")) if lines[at:] else []
            right = one_token(tokenizer, "->", f" {answer}")
            items.append(ProbeItem((*start, *encode(before)), right, tuple(after)))
        return ProbeSet(tuple(items), one_token(tokenizer, "->", " ."), refused)


def _known_words(tokenizer: Any) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Words of every kind that are one token, and those that are not."""
    words: dict[str, list[str]] = {}
    refused = []
    for kind, names in KINDS.items():
        words[kind] = []
        for word in names.split():
            try:
                one_token(tokenizer, "->", f" {word}")
            except ConfigError:
                refused.append(word)
            else:
                words[kind].append(word)
    poor = [kind for kind, known in words.items() if len(known) < LEAST_WORDS]
    if poor:
        raise ConfigError(
            f"the tokenizer has too few words of the kind {poor[0]!r} as one token (at least {LEAST_WORDS}); "
            f"it splits or doesn't know {', '.join(refused)}. A small model trained on topics has the task topics"
        )
    return words, tuple(refused)


def _pick_kind(source: random.Random, words: Mapping[str, Sequence[str]], kind: str) -> tuple[str, str]:
    others = source.sample([name for name in words if name != kind], 2)
    answer = source.choice(words[kind])
    shown = [answer, *(source.choice(words[name]) for name in others)]
    source.shuffle(shown)
    return f"{', '.join(shown)} ->", answer


def _pick_digit(source: random.Random, rule: str) -> tuple[str, str]:
    digits = source.sample(range(10), 3)
    return f"{', '.join(map(str, digits))} ->", str(DISTRACTORS[rule](digits))


@dataclass(frozen=True)
class TopicInductionTask:
    """Words of a text, then `?`: which topic? For models trained on `TopicData`.

    Args:
        data: topics and words.
        n_words: words of the text.
        block_words: keywords of the topic, side by side among random words; 0 = spread as in training.
        block_position: words before the block; None = all that are no block.
        query_position: words before the question; None = all.
    """

    data: TopicData = field(default_factory=TopicData)
    n_words: int = 24
    block_words: int = 0
    block_position: int | None = None
    query_position: int | None = None

    def __post_init__(self) -> None:
        check_whole(1, n_words=self.n_words)
        check_whole(0, self.n_words, block_words=self.block_words)
        if self.block_position is not None:
            if not self.block_words:
                raise ConfigError("block_position needs block_words, the size of the block")
            check_whole(0, self.n_words - self.block_words, block_position=self.block_position)
        if self.query_position is not None:
            check_whole(0, self.n_words, query_position=self.query_position)

    def at(self, move: Literal["block", "query"], fraction: float) -> TopicInductionTask:
        """The task with its block or its question at a fraction of the prompt: 0 first, 1 last."""
        if move == "block":
            return dataclasses.replace(self, block_position=round(fraction * (self.n_words - self.block_words)))
        return dataclasses.replace(self, query_position=round(fraction * self.n_words))

    def items(self, tokenizer: Any, count: int, seed: int) -> ProbeSet:
        """Questions; see `RuleInductionTask.items`.

        Raises:
            ConfigError: the model speaks of other words.
        """
        check_whole(1, count=count)
        if tokenizer.get_vocab() != self.data.tokenizer().get_vocab():
            raise ConfigError(
                f"the tokenizer doesn't have the {self.data.vocab_size} tokens of {self.data.topics} topics with "
                f"{self.data.keywords} keywords; the task topics is for models trained on them"
            )
        generator = generator_for(self.data.seed, 2, seed)
        topics = torch.randint(self.data.topics, (count,), generator=generator)
        if self.block_words:
            block = dataclasses.replace(self.data, topic_share=1.0).draw_words(topics, self.block_words, generator)
            anything = torch.randint(self.data.words, (count, self.n_words - self.block_words), generator=generator)
            anything += self.data.vocab_size - self.data.words
            at = anything.shape[1] if self.block_position is None else self.block_position
            words = torch.cat([anything[:, :at], block, anything[:, at:]], dim=1)
        else:
            words = self.data.draw_words(topics, self.n_words, generator)
        at = self.n_words if self.query_position is None else self.query_position
        labels, query = self.data.label_ids(topics).tolist(), SPECIAL.index(QUERY)
        items = tuple(
            ProbeItem((*row[:at], query), label, tuple(row[at:]))
            for row, label in zip(words.tolist(), labels, strict=True)
        )
        return ProbeSet(items, SPECIAL.index(DOT))


ProbeTask = RuleInductionTask | TopicInductionTask


# --- forwards ----------------------------------------------------------------------------------------------------


def require_masks(model: Any) -> MaskedDiffusionLM:
    """The model, if masks mean something to it.

    Raises:
        ConfigError: it is an autoregressive model.
    """
    if not isinstance(model, MaskedDiffusionLM):
        raise ConfigError(
            f"{type(model).__name__} has no mask token and causal attention, which sees nothing behind the question; "
            "give a masked diffusion model, or use the position probe alone"
        )
    if model.config.mask_token_id is None:
        raise ConfigError("the model has no mask token; set mask_token_id in its config")
    return model


def answer_logits(
    model: Any, probes: ProbeSet, extra: int = 0, filler_id: int | None = None, batch_size: int = 32
) -> torch.Tensor:
    """What a model predicts for the answers in one forward, float32 `(items, vocab)` on the CPU.

    Args:
        model: a masked diffusion model, or an autoregressive one of transformers.
        probes: questions.
        extra: tokens behind the text; masks unless `filler_id` is given.
        filler_id: the token they are.
        batch_size: items per forward.

    Raises:
        ConfigError: masks or text behind the answer for a model that sees none of it, or no room for so many tokens.
    """
    if not isinstance(model, MaskedDiffusionLM):
        if extra or any(item.after for item in probes.items):
            require_masks(model)
        return torch.cat([_next_logits(model, items) for items in _batches(probes, batch_size)])
    return torch.cat([_masked_logits(model, items, extra, filler_id)[0] for items in _batches(probes, batch_size)])


def _batches(probes: ProbeSet, batch_size: int) -> Iterator[tuple[ProbeItem, ...]]:
    for start in range(0, len(probes.items), batch_size):
        yield probes.items[start : start + batch_size]


@torch.no_grad()
def _next_logits(model: Any, items: Sequence[ProbeItem]) -> torch.Tensor:
    """Of the token behind each prompt; prompts are padded on the left."""
    _check_room(model, max(len(item.before) for item in items), 0)
    width = max(len(item.before) for item in items)
    device = model.get_input_embeddings().weight.device
    tokens = torch.tensor([[0] * (width - len(item.before)) + list(item.before) for item in items], device=device)
    counts = torch.tensor([len(item.before) for item in items], device=device)
    seen = torch.arange(width, device=device) >= (width - counts)[:, None]
    positions = (seen.long().cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens, "attention_mask": seen.long(), "position_ids": positions}
    output = model(**inputs, use_cache=False, logits_to_keep=1)
    return output.logits[:, -1].float().cpu()


def _masked_logits(
    model: Any, items: Sequence[ProbeItem], extra: int, filler_id: int | None, with_gradients: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Logits at the answers; embeddings that gradients reach, if wanted; which columns are extra tokens."""
    model = require_masks(model)
    longest = max(item.length for item in items)
    _check_room(model, longest, extra)
    device, mask_id = model.get_input_embeddings().weight.device, model.config.mask_token_id
    rows = [[*item.before, mask_id, *item.after] for item in items]
    counts = torch.tensor([len(row) for row in rows], device=device)
    tokens = torch.tensor([row + [mask_id] * (longest - len(row)) for row in rows], device=device)
    exists = torch.arange(longest, device=device) < counts[:, None]
    filler = mask_id if filler_id is None else filler_id
    tokens, seen = append_masks(tokens, exists, torch.full_like(counts, extra), longest + extra, filler)
    at = torch.tensor([len(item.before) for item in items], device=device)
    wanted = slice(int(at.min()), int(at.max()) + 1)
    with torch.set_grad_enabled(with_gradients):
        embeds = model.get_input_embeddings()(tokens)
        if with_gradients:
            embeds = embeds.detach().requires_grad_()
        logits = model(inputs_embeds=embeds, attention_mask=seen, logits_positions=wanted).logits
        logits = logits[torch.arange(len(items), device=device), at - wanted.start].float()
    added = seen & (torch.arange(longest + extra, device=device) >= counts[:, None])
    return (logits, embeds, added) if with_gradients else (logits.cpu(), None, added)


def _check_room(model: Any, length: int, extra: int) -> None:
    limit = model.config.get_text_config().max_position_embeddings
    if length + extra > limit:
        raise ConfigError(
            f"{length} tokens of prompt and {extra} extra masks; the model has positions for {limit}: "
            + (f"allowed are up to {limit - length} extra masks" if length <= limit else "take fewer examples")
        )


# --- measures ----------------------------------------------------------------------------------------------------


def predictive_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of predictions `(..., vocab)`."""
    return torch.special.entr(logits.float().softmax(-1)).sum(-1)


class MaskSensitivity:
    """How far a model's answers depend on the number of masks; a metric with `update`, `compute` and `reset`.

    `max_drop` is accuracy without extra masks minus the least accuracy with some, `area` the mean drop over the number
    of masks by the trapezoidal rule, `mean_tv` the mean total variation between predictions with and without extra
    masks. Accuracies are shares from 0 to 1.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.right: dict[int, int] = {}
        self.distance: dict[int, float] = {}
        self.total = 0

    def update(self, logits: Mapping[int, torch.Tensor], answers: torch.Tensor) -> None:
        """Takes answers to the same questions.

        Args:
            logits: number of extra masks -> `(items, vocab)`; the same numbers at every call, 0 among them.
            answers: right tokens `(items,)`.

        Raises:
            ConfigError: 0 is missing, or the numbers are others than before.
        """
        if 0 not in logits or (self.total and set(logits) != set(self.right)):
            raise ConfigError(f"extra masks {sorted(logits)}; give 0 and the same numbers at every update")
        for count, predicted in logits.items():
            self.right[count] = self.right.get(count, 0) + int((predicted.argmax(-1) == answers).sum())
            distance = float(total_variation(predicted, logits[0]).sum())
            self.distance[count] = self.distance.get(count, 0.0) + distance
        self.total += len(answers)

    def accuracy(self) -> dict[int, float]:
        """Number of extra masks -> share of right answers."""
        if not self.total:
            raise ConfigError("nothing was measured; call update first")
        return {count: right / self.total for count, right in sorted(self.right.items())}

    def compute(self) -> dict[str, float]:
        """`max_drop`, `area` and `mean_tv`."""
        accuracy = self.accuracy()
        counts = list(accuracy)
        drops = torch.tensor([accuracy[0] - accuracy[count] for count in counts])
        area = (
            float(torch.trapezoid(drops, torch.tensor(counts, dtype=torch.float)) / counts[-1]) if counts[-1] else 0.0
        )
        distances = [self.distance[count] / self.total for count in counts if count]
        return {
            "max_drop": float(drops[1:].max()) if len(counts) > 1 else 0.0,
            "area": area,
            "mean_tv": sum(distances) / max(1, len(distances)),
        }


def _score(logits: torch.Tensor, answers: torch.Tensor) -> dict[str, float]:
    right = (logits.argmax(-1) == answers).double().mean()
    return {"accuracy": float(right), "entropy": float(predictive_entropy(logits).mean())}


def _one_step(extra: int) -> dict[str, int]:
    """How the answer was decoded: without which scores can't be compared."""
    return {"gen_length": extra + 1, "block_length": extra + 1, "steps": 1}


# --- probes ------------------------------------------------------------------------------------------------------


def mask_scaling_probe(
    model: Any,
    probes: ProbeSet,
    extra_masks: Sequence[int] = (0, 1, 5, 10, 20, 50),
    filler: Literal["mask", "dot"] = "mask",
    batch_size: int = 32,
) -> dict[str, Any]:
    """The first answer token after one forward, with more and more masks behind the text.

    Args:
        model: a masked diffusion model.
        probes: questions.
        extra_masks: numbers of masks after the answer's; 0 is always measured.
        filler: `"dot"` appends the neutral token instead of masks, the control.
        batch_size: items per forward.

    Returns:
        `rows`, each with `extra_masks`, `accuracy`, `entropy` and `tv`, the total variation to the prediction without
        extra masks; and `sensitivity`, see `MaskSensitivity`.

    Raises:
        ConfigError: an autoregressive model, an unknown filler or more masks than the model has positions for.
    """
    require_masks(model)
    if filler not in ("mask", "dot"):
        raise ConfigError(f"filler={filler!r}: {suggestion(str(filler), ('mask', 'dot'))}")
    for count in extra_masks:
        check_whole(0, extra_masks=count)
    counts = sorted({0, *extra_masks})
    _check_room(model, max(item.length for item in probes.items), counts[-1])
    filler_id = probes.neutral_id if filler == "dot" else None
    logits = {count: answer_logits(model, probes, count, filler_id, batch_size) for count in counts}
    sensitivity = MaskSensitivity()
    sensitivity.update(logits, probes.answers)
    rows = [
        {
            "extra_masks": count,
            **_score(logits[count], probes.answers),
            "tv": float(total_variation(logits[count], logits[0]).mean()),
            **_one_step(count),
        }
        for count in counts
    ]
    return {"filler": filler, "rows": rows, "sensitivity": sensitivity.compute()}


def position_probe(
    model: Any,
    task: ProbeTask,
    tokenizer: Any,
    move: Literal["block", "query"] = "block",
    places: int = 5,
    count: int = 100,
    seed: int = 0,
    batch_size: int = 32,
) -> list[dict[str, Any]]:
    """Accuracy against the place of the evidence, or of the question with its mask.

    Args:
        model: a masked diffusion model; for `move="block"` an autoregressive one too.
        task: what is asked.
        tokenizer: of the model.
        move: what is moved.
        places: places from the first to the last possible one.
        count: questions per place, the same ones everywhere.
        seed: of the questions.
        batch_size: items per forward.

    Returns:
        A row per place: `move`, `position` from 0 (first) to 1 (last), `accuracy`, `entropy`.
    """
    check_whole(2, places=places)
    if move not in ("block", "query"):
        raise ConfigError(f"move={move!r}: {suggestion(str(move), ('block', 'query'))}")
    rows = []
    for place in range(places):
        fraction = place / (places - 1)
        probes = task.at(move, fraction).items(tokenizer, count, seed)
        scores = _score(answer_logits(model, probes, batch_size=batch_size), probes.answers)
        decoded = _one_step(0) if isinstance(model, MaskedDiffusionLM) else {}
        rows.append({"move": move, "position": fraction, **scores, **decoded})
    return rows


def gradient_attribution(model: Any, probes: ProbeSet, extra: int, batch_size: int = 32) -> dict[str, float]:
    """Whether the answer hangs on the extra masks or on the text.

    Per position the norm of the gradient of the right answer's logit by the input embedding, divided by the largest of
    the item.

    Args:
        model: a masked diffusion model.
        probes: questions.
        extra: masks behind the text.
        batch_size: items per backward pass.

    Returns:
        `mask`, the mean over extra masks; `text`, over the text without the answer's own mask; their `ratio`.
    """
    check_whole(1, extra=extra)
    sums, counts = {"mask": 0.0, "text": 0.0}, {"mask": 0, "text": 0}
    for items in _batches(probes, batch_size):
        logits, embeds, added = _masked_logits(model, items, extra, None, with_gradients=True)
        answers = torch.tensor([[item.answer] for item in items], device=logits.device)
        (gradient,) = torch.autograd.grad(logits.gather(1, answers).sum(), embeds)
        norms = gradient.float().norm(dim=-1)
        norms = norms / norms.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        place = torch.arange(norms.shape[1], device=norms.device)
        at = torch.tensor([[len(item.before)] for item in items], device=norms.device)
        length = torch.tensor([[item.length] for item in items], device=norms.device)
        for name, where in (("mask", added), ("text", (place < length) & (place != at))):
            sums[name] += float(norms[where].sum())
            counts[name] += int(where.sum())
    shares = {name: sums[name] / max(1, counts[name]) for name in sums}
    return {**shares, "ratio": shares["mask"] / max(shares["text"], 1e-12)}


def unmasking_probe(
    model: Any, probes: ProbeSet, extra: int, steps: Sequence[int], batch_size: int = 32
) -> list[dict[str, Any]]:
    """Accuracy of the answer when it and the extra masks are filled in by several steps, most certain tokens first.

    Args:
        model: a masked diffusion model.
        probes: questions.
        extra: masks behind the text.
        steps: numbers of denoising steps; 1 fills in everything at once.
        batch_size: items per call.

    Returns:
        A row per number of steps: `steps`, `accuracy`, `gen_length`, `block_length`.
    """
    model = require_masks(model)
    _check_room(model, max(item.length for item in probes.items), extra)
    mask_id, device = model.config.mask_token_id, model.get_input_embeddings().weight.device
    rows = []
    for number in steps:
        check_whole(1, extra + 1, steps=number)
        right = 0
        for items in _batches(probes, batch_size):
            texts = [[*item.before, mask_id, *item.after, *[mask_id] * extra] for item in items]
            width = max(map(len, texts))
            padded = torch.tensor([[0] * (width - len(text)) + text for text in texts], device=device)
            counts = torch.tensor([[len(text)] for text in texts], device=device)
            output = model.generate(
                padded,
                attention_mask=(torch.arange(width, device=device) >= width - counts).long(),
                max_new_tokens=0,
                block_length=None,
                denoising_steps=number,
                remasking="low_confidence_static",
                temperature=0.0,
                use_cache="none",
                rcd=None,
                eos_token_id=None,
            )
            for row, item, text in zip(output.sequences.tolist(), items, texts, strict=True):
                right += row[width - len(text) + len(item.before)] == item.answer
        decoded = {"gen_length": extra + 1, "block_length": extra + 1, "steps": number}
        rows.append({"accuracy": right / len(probes.items), **decoded})
    return rows


def end_position_probe(
    model: Any, probes: ProbeSet, extra_masks: Sequence[int], steps: int | None = None, batch_size: int = 32
) -> list[dict[str, Any]]:
    """Where the model ends its answer, against the number of masks it is given.

    Args:
        model: a masked diffusion model whose generation config names an end token.
        probes: questions; what stands behind their answers is left out.
        extra_masks: masks behind the answer's.
        steps: denoising steps; None = one per mask.
        batch_size: items per call.

    Returns:
        A row per number: `ended`, the share of answers with an end token; `end`, tokens before it on average, None
        where nothing ended; `gen_length`, `block_length`, `steps`.

    Raises:
        ConfigError: there is no end token.
    """
    model = require_masks(model)
    ends = model.generation_config.eos_token_id
    if ends is None:
        raise ConfigError("the model's generation config names no eos_token_id; nothing tells where an answer ends")
    device, rows = model.get_input_embeddings().weight.device, []
    ends = torch.tensor([ends] if isinstance(ends, int) else ends, device=device)
    for extra in extra_masks:
        positions: list[int] = []
        length = extra + 1
        number = length if steps is None else min(steps, length)
        for items in _batches(probes, batch_size):
            width = max(len(item.before) for item in items)
            _check_room(model, width + 1, extra)
            padded = [[0] * (width - len(item.before)) + list(item.before) for item in items]
            counts = torch.tensor([[len(item.before)] for item in items], device=device)
            output = model.generate(
                torch.tensor(padded, device=device),
                attention_mask=(torch.arange(width, device=device) >= width - counts).long(),
                max_new_tokens=length,
                block_length=width + length,
                denoising_steps=number,
                remasking="low_confidence_static",
                temperature=0.0,
                use_cache="none",
                rcd=None,
            )
            is_end = torch.isin(output.sequences[:, width:], ends)
            positions += [int(row.long().argmax()) for row in is_end if row.any()]
        end = sum(positions) / len(positions) if positions else None
        decoded = {"gen_length": length, "block_length": length, "steps": number}
        rows.append({"ended": len(positions) / len(probes.items), "end": end, **decoded})
    return rows


def copy_probe(model: Any, tokenizer: Any, count: int = 50, seed: int = 0, batch_size: int = 32) -> float:
    """Accuracy in repeating a list of words that stands twice before: any language model can, if it is loaded rightly.

    Logits that belong to the neighboring position, as of a Dream checkpoint read as LLaDA, show here as chance.
    """
    words, _ = _known_words(tokenizer)
    everything = [word for known in words.values() for word in known]
    items = []
    for index in range(count):
        source = random.Random(f"{seed} {index} copy")
        names = source.sample(everything, 6)
        line, missing = " ".join(names), source.randrange(1, 6)
        before = f"{line}\n{line}\n" + " ".join(names[:missing])
        encoded = tokenizer(before, add_special_tokens=False)["input_ids"]
        items.append(ProbeItem(tuple(encoded), one_token(tokenizer, "->", f" {names[missing]}")))
    probes = ProbeSet(tuple(items), 0)
    return _score(answer_logits(model, probes, batch_size=batch_size), probes.answers)["accuracy"]
