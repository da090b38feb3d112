"""How long the items of a decoder take on this machine, by context length and number of tokens.

Attention grows with the context, the MLP doesn't: `t_attn(n) = slope * n + base`. Measured once for a model, device,
number format and attention kernel, and kept as JSON. KnapSpec (arXiv 2602.20217, section 3.1) measures attention and
MLP for one token. The head, a forward pass's own overhead and passes over several tokens are measured here too: with
few layers and a large vocabulary they decide whether drafting pays.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vidgen.language.decoding.items import ItemRunner
from vidgen.language.decoding.knapsack import branch_counts, solve_knapsack
from vidgen.language.decoding.skip import draft_logits, sublayers
from vidgen.runtime.checkpoint import atomic_write
from vidgen.runtime.checks import check_whole
from vidgen.runtime.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LatencyProfile:
    """Seconds of the parts of a forward pass of batch 1.

    Attributes:
        key: what it was measured with; a profile is of no use for anything else.
        layers: of the model.
        tokens: numbers of tokens at which the next four were measured; between them they are interpolated.
        attention_slope: seconds per token of context.
        attention_base: seconds without context.
        mlp: seconds.
        head: seconds of final norm and head.
        call: seconds of a forward pass that are spent in none of the items: embeddings, positions, masks, Python.
        planning: seconds per item that a knapsack takes beyond running them: masks, similarities, Python.
    """

    key: dict[str, Any]
    layers: int
    tokens: tuple[int, ...]
    attention_slope: tuple[float, ...]
    attention_base: tuple[float, ...]
    mlp: tuple[float, ...]
    head: tuple[float, ...]
    call: float
    planning: float

    def attention_seconds(self, context: int, tokens: int = 1) -> float:
        """Of one attention item."""
        return self._at(self.attention_slope, tokens) * context + self._at(self.attention_base, tokens)

    def mlp_seconds(self, tokens: int = 1) -> float:
        """Of one MLP item."""
        return self._at(self.mlp, tokens)

    def head_seconds(self, tokens: int = 1) -> float:
        """Of final norm and head."""
        return self._at(self.head, tokens)

    def pass_seconds(self, context: int, tokens: int = 1, skip: Collection[int] = ()) -> float:
        """Of a forward pass without some items; see `vidgen.language.decoding.skip`."""
        attention = self.layers - sum(item % 2 == 0 for item in skip)
        mlps = self.layers - sum(item % 2 == 1 for item in skip)
        parts = attention * self.attention_seconds(context, tokens) + mlps * self.mlp_seconds(tokens)
        return parts + self.head_seconds(tokens) + self.call

    def plan_seconds(self, context: int, counts: Sequence[int], tokens: int) -> float:
        """Of `solve_knapsack` and of asking the head about what it found, and about the early exits.

        Args:
            context: tokens before those that the plan looks at.
            counts: branches at each item, see `branch_counts`.
            tokens: of each branch.
        """
        seconds = self.planning * len(counts)
        for item, count in enumerate(counts):
            if count:
                many = count * tokens
                # The branches stand in one sequence, so each reads the others' columns too, behind a mask.
                seconds += self.mlp_seconds(many) if item % 2 else self.attention_seconds(context + many, many)
        return seconds + self.head_seconds((counts[-1] + self.layers) * tokens)

    def _at(self, values: Sequence[float], tokens: int) -> float:
        """Linear between the measured numbers of tokens, and beyond the last along the last line."""
        right = next((index for index, measured in enumerate(self.tokens) if measured >= tokens), len(self.tokens) - 1)
        left = max(0, right - 1)
        if left == right:
            return values[0]
        share = (tokens - self.tokens[left]) / (self.tokens[right] - self.tokens[left])
        return values[left] + share * (values[right] - values[left])

    @classmethod
    @torch.no_grad()
    def measure(
        cls,
        model: PreTrainedModel,
        contexts: Sequence[int] = (128, 512, 2048),
        tokens: Sequence[int] = (1, 4, 12, 64),
        repeats: int = 5,
    ) -> LatencyProfile:
        """Times the items of a layer in the middle; some seconds.

        Args:
            model: see `vidgen.language.decoding.skip.sublayers`.
            contexts: at least two different lengths to fit the line of attention through.
            tokens: from 1 upwards, at least two.
            repeats: runs of each, of which the fastest counts: whatever else the machine does only adds time.
        """
        check_whole(1, repeats=repeats)
        if len(set(contexts)) < 2 or min(contexts) < 1:
            raise ConfigError(f"contexts={list(contexts)}; give two different lengths of at least 1")
        if tokens[0] != 1 or len(tokens) < 2 or sorted(set(tokens)) != list(tokens):
            raise ConfigError(f"tokens={list(tokens)}; they must rise from 1")
        layers = len(sublayers(model))
        middle = 2 * (layers // 2)
        weight = sublayers(model)[layers // 2].input_layernorm.weight
        width = model.config.get_text_config().hidden_size

        # Other processes on the machine preempt long work more often than short: a thread's own time leaves them out.
        clock = time.thread_time if weight.device.type == "cpu" else time.perf_counter

        def fastest(work: Callable[[], Any]) -> float:
            best = math.inf
            for _ in range(repeats + 1):  # the first one warms up
                _wait(weight.device)
                began = clock()
                work()
                _wait(weight.device)
                best = min(best, clock() - began)
            return best

        attention = torch.zeros(len(tokens), len(contexts), dtype=torch.float64)
        mlp, head = [], []
        for row, count in enumerate(tokens):
            hidden_states = torch.randn(1, count, width, device=weight.device, dtype=weight.dtype)
            for column, context in enumerate(contexts):
                runner = ItemRunner.with_random_past(model, context, count)
                attention[row, column] = fastest(lambda runner=runner, x=hidden_states: runner(middle, x))
            mlp.append(fastest(lambda runner=runner, x=hidden_states: runner(middle + 1, x)))
            head.append(fastest(lambda x=hidden_states: draft_logits(model, x)))
        lengths = torch.tensor(contexts, dtype=torch.float64)
        line = torch.linalg.lstsq(torch.stack([lengths, torch.ones_like(lengths)], dim=1), attention.T).solution
        # Noise must not make context free or even cheaper.
        slope = line[0].clamp(min=0)
        base = (attention - slope[:, None] * lengths).mean(dim=1).clamp(min=0)
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
        whole = fastest(lambda: model(input_ids=ids, use_cache=False))
        parts = layers * float(base[0] + mlp[0]) + head[0]
        profile = cls(
            key=profile_key(model),
            layers=layers,
            tokens=tuple(tokens),
            attention_slope=tuple(slope.tolist()),
            attention_base=tuple(base.tolist()),
            mlp=tuple(mlp),
            head=tuple(head),
            call=max(0.0, whole - parts),
            planning=0.0,
        )
        weights, count = [1] * 2 * layers, 16
        states = torch.randn(2 * layers + 1, count, width, device=weight.device, dtype=weight.dtype)

        def plan() -> None:
            runner = ItemRunner.with_random_past(model, contexts[0], count)
            solve_knapsack(states, runner, weights, layers, tau=-1.0)

        # Whatever else a plan takes, the head aside, which is the same in both.
        counts = branch_counts(weights, layers)
        foreseen = profile.plan_seconds(contexts[0], counts, count)
        beyond = fastest(plan) - (foreseen - profile.head_seconds((counts[-1] + layers) * count))
        return replace(profile, planning=max(0.0, beyond) / len(weights))

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel) -> LatencyProfile:
        """Reads what `save` wrote.

        Raises:
            ConfigError: it isn't a profile, or one of another model, machine, number format or attention kernel.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            profile = cls(**{name: tuple(value) if type(value) is list else value for name, value in values.items()})
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path} is not a latency profile: {error}") from error
        profile.check(model)
        return profile

    def check(self, model: PreTrainedModel) -> None:
        """Refuses a model that it wasn't measured for."""
        for name, value in profile_key(model).items():
            if self.key.get(name) != value:
                raise ConfigError(
                    f"the latency profile was measured with {name} {self.key.get(name)!r} and this is {value!r}; "
                    "measure again: LatencyProfile.measure(model)"
                )


def profile_key(model: PreTrainedModel) -> dict[str, Any]:
    """What decides how long a model's items take."""
    config = model.config.get_text_config().to_diff_dict()
    config.pop("transformers_version", None)
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "model": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16],
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
