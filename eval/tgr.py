"""Does a look-ahead search cover more problems than sampling does, and does geometry help it? TGR against sampling.

    python eval/tgr.py                       # 3 seeds
    python eval/tgr.py --seeds 0 --check
    python eval/tgr.py --seeds 0 --set train_steps=100 problems=20

Tours: a fixed directed graph, which a small model holds in its weights. A prompt names waypoints and a start; the
answer is a walk along edges that passes the waypoints in their order and says so at each. Per seed a new graph is
drawn and a model is trained on noisy walks, half of them cut as a reset of the context cuts them.

On validation problems, before anything is tested: the temperature of plain sampling is tuned; how many of the
waypoints a walk has to reach is the smallest number for which plain sampling at its best temperature solves at most
75 % of the problems in 16 samples; the size of the perturbation is tuned, for local and random tangents alone. The
look-ahead value is checked: AUROC, within problems, of the mean log-probability of the tokens after a chunk's start
for the success of the whole sample. Below 0.55 the search values walks that don't return to a node instead.

Methods, at plain sampling's temperature: `plain`; `plain_reset`, chunks and resets without search; `tgr_token`, whose
candidates are independent draws; `tgr_latent`; four of its variants, without diversity, without smoothness, with
random tangents, without resets; `power`, Metropolis moves towards p^2 ("Reasoning with Sampling", arXiv 2510.14901).

Each is compared with plain sampling at equal samples, at equal decoded tokens and at equal CPU time: pass@k of the
method against plain's pass@(r k), r the ratio of costs per sample. Areas are over k up to half of the samples, since
samples of a search depend on each other; intervals are paired bootstraps over problems.

Gates: plain solves at most 80 % of the test problems in 16 samples, and 20 % at least. Bars: overhead of tgr_latent
at most 1.3 on every seed; no row caches more than prompt, carry-over and chunk; pass@1 at least plain's - 2; on two of
three seeds area at least 2 above plain at equal samples, and above plain at equal decoded tokens, both with an
interval above 0. That geometry helps is said only if the variant without diversity or the one with random tangents is
below tgr_latent with an interval above 0 on two of three seeds; that latents help, if tgr_token is.

Trained models are run folders under `--work` and every finished measurement is a file beside them, so an interrupted
benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _benchmark import (
    WorkFolder,
    add_merge,
    add_out,
    add_seeds,
    add_sizes,
    check_sizes,
    earlier_results,
    measure_seeds,
    parse_sizes,
    report_progress,
    reports_errors,
    spread,
    write_results,
)
from torch import nn
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from vidgen.language.causal_lm import next_token_loss
from vidgen.language.decoding.coverage import bootstrap_ci, coverage_auc, first_k_curves, pass_at_k_curves
from vidgen.language.decoding.tgr import LookAhead, TGRConfig, TGROutput, tgr_generate
from vidgen.runtime.device import derive_seed, generator_for, set_threads
from vidgen.train import OptimizerConfig, StepOutput, TrainConfig, TrainingMethod, fit

PAD, END = 0, 1
DEGREE = 3
TEMPERATURES = (0.4, 0.6, 0.8, 1.0)
SIGMAS = (0.3, 1.0, 3.0)
HARD_ENOUGH = 75.0  # pass@16 of plain sampling on validation problems, percent
SEARCHES: dict[str, dict[str, Any]] = {
    "plain_reset": {"num_candidates": 1},
    "tgr_token": {"space": "token"},
    "tgr_latent": {},
    "latent_no_diversity": {"lambda_diverse": 0.0},
    "latent_no_smoothness": {"lambda_smooth": 0.0},
    "latent_random_tangent": {"tangent": "random"},
    "latent_no_reset": {"kv_reset": False},
}
ROWS = ("plain", *SEARCHES, "power")
BUDGETS = ("samples", "tokens", "cpu")
POWER, MOVES = 2.0, 4  # exponent; Metropolis moves per chunk
TEST, TUNING = 1, 2  # seeds of problems


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Budget of the benchmark.

    Attributes:
        nodes: of the graph.
        waypoints: in a prompt.
        tokens: longest answer.
        train_steps: of the model.
        batch_size: walks per step.
        hidden_size: of the model.
        num_layers: of the model.
        problems: that are tested.
        tuning_problems: for every choice.
        samples: per test problem; plain sampling draws twice as many, power sampling a quarter.
        tuning_samples: per tuning problem, 16 at least for a full run.
        chunk_length: of the search.
        carry_over: of the search.
        num_candidates: of the search.
        lookahead: of the search.
    """

    nodes: int = 96
    waypoints: int = 6
    tokens: int = 80
    train_steps: int = 500
    batch_size: int = 48
    hidden_size: int = 128
    num_layers: int = 3
    problems: int = 100
    tuning_problems: int = 40
    samples: int = 32
    tuning_samples: int = 16
    chunk_length: int = 28
    carry_over: int = 14
    num_candidates: int = 3
    lookahead: int = 3

    def __post_init__(self) -> None:
        check_sizes(self)


# --- task --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tours:
    """Walks over waypoints in a random graph, as `fit` asks for them.

    Tokens: padding, end, one mark for each waypoint ("reached"), nodes.

    Args:
        nodes: of the graph.
        waypoints: of a tour.
        tokens: longest answer.
        carry_over: tokens of a walk that a cut sample begins with.
        seed: fixes graph, batches and problems.
    """

    nodes: int
    waypoints: int
    tokens: int
    carry_over: int
    seed: int

    @property
    def first_node(self) -> int:
        return 2 + self.waypoints

    @property
    def vocab_size(self) -> int:
        return self.first_node + self.nodes

    @property
    def prompt_length(self) -> int:
        return self.waypoints + 1

    def edges(self) -> torch.Tensor:
        """Successors `(nodes, DEGREE)` of each node; a ring among them makes every node reachable."""
        generator = generator_for(self.seed, 0)
        drawn = torch.rand(self.nodes, self.nodes, generator=generator)
        ring = torch.randperm(self.nodes, generator=generator)
        drawn[ring, ring.roll(1)] = 2.0
        drawn.fill_diagonal_(-1.0)
        return drawn.topk(DEGREE).indices

    def distances(self) -> torch.Tensor:
        """Edges from node to node `(nodes, nodes)`."""
        far = torch.full((self.nodes, self.nodes), float(self.nodes))
        far.scatter_(1, self.edges(), 1.0)
        far.fill_diagonal_(0.0)
        for middle in range(self.nodes):
            far = torch.minimum(far, far[:, middle, None] + far[None, middle])
        return far

    def prompts(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Waypoints and start, all different, `(count, waypoints + 1)` tokens."""
        order = torch.rand(count, self.nodes, generator=generator).argsort(1)
        return self.first_node + order[:, : self.prompt_length]

    def problems(self, count: int, seed: int) -> torch.Tensor:
        return self.prompts(count, generator_for(self.seed, 2, seed))

    def walks(self, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Answers `(count, tokens)` of a guide that takes a nearer edge more often than a farther one."""
        edges, distances = self.edges(), self.distances()
        count = len(prompts)
        rows = torch.arange(count)
        nodes = prompts - self.first_node
        place, reached = nodes[:, -1], torch.zeros(count, dtype=torch.long)
        ended = torch.zeros(count, dtype=torch.bool)
        marking = torch.zeros(count, dtype=torch.bool)
        answer = torch.full((count, self.tokens), PAD)
        for step in range(self.tokens):
            goal = nodes[rows, reached.clamp(max=self.waypoints - 1)]
            closeness = -distances[edges[place], goal[:, None]]
            noise = torch.empty(count, DEGREE).exponential_(generator=generator)
            following = edges[place, (closeness.softmax(1) / noise).argmax(1)]
            ends = (reached == self.waypoints) & ~ended
            walks = ~(marking | ends | ended)
            token = torch.where(marking, 1 + reached, self.first_node + following)  # marks begin behind END
            answer[:, step] = torch.where(ended, PAD, torch.where(ends & ~marking, END, token))
            ended |= ends & ~marking
            place = torch.where(walks, following, place)
            marking = walks & (place == goal)
            reached = reached + marking.long()
        return answer

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        """Prompts and walks `(batch, length)`, half of these cut where a chunk may begin; what is to be learned."""
        generator = generator_for(self.seed, 1, step, rank)
        prompts = self.prompts(batch_size, generator)
        answers = self.walks(prompts, generator)
        lengths = (answers != PAD).sum(1, keepdim=True)
        cuts = torch.rand(batch_size, 2, generator=generator)
        latest = (lengths - self.carry_over - 1).clamp(min=0)
        cut = (cuts[:, :1] * (latest + 1)).long() * (cuts[:, 1:] < 0.5)
        places = cut + torch.arange(self.tokens)
        answers = answers.gather(1, places.clamp(max=self.tokens - 1)).masked_fill(places >= self.tokens, PAD)
        learned = answers != PAD
        # What was carried over is read, never written.
        learned &= (cut == 0) | (torch.arange(self.tokens) >= self.carry_over)
        return {
            "tokens": torch.cat([prompts, answers], 1),
            "learned": torch.cat([torch.zeros(batch_size, self.prompt_length - 1, dtype=torch.bool), learned], 1),
        }

    def reached(self, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Waypoints `(count,)` that answers `(count, length)` reach and mark, before their first mistake."""
        allowed = torch.zeros(self.nodes, self.nodes, dtype=torch.bool).scatter_(1, self.edges(), True)
        nodes = prompts - self.first_node
        rows = torch.arange(len(prompts))
        place, count = nodes[:, -1].clone(), torch.zeros(len(prompts), dtype=torch.long)
        right = torch.ones(len(prompts), dtype=torch.bool)
        for token in answers.T:
            goal = nodes[rows, count.clamp(max=self.waypoints - 1)]
            following = token - self.first_node
            steps = following >= 0
            marks = right & (token == 2 + count) & (place == goal) & (count < self.waypoints)
            right &= marks | (steps & allowed[place, following.clamp(min=0)])
            place = torch.where(right & steps, following.clamp(min=0), place)
            count = count + marks.long()
        return count

    def fresh_nodes(self, found: LookAhead) -> torch.Tensor:
        """Share of look-ahead tokens that don't repeat one since the last mark: a sense of going round."""
        count, ahead = found.tokens.shape[1:]
        tokens = torch.cat([found.context[:, None].expand(-1, count, -1), found.tokens], -1)
        legs = ((tokens >= 2) & (tokens < self.first_node)).cumsum(-1)
        named = legs * self.vocab_size + tokens
        same = named[..., -ahead:, None] == named[..., None, :]  # (rows, candidates, ahead, all)
        before = torch.arange(named.shape[-1]) < torch.arange(named.shape[-1])[-ahead:, None]
        fresh = ~(same & before).any(-1) & found.valid
        return fresh.sum(-1) / found.valid.sum(-1)


class TourMethod(TrainingMethod):
    """Next-token training on what a walker writes.

    Args:
        model: the causal language model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def roles(self) -> dict[str, nn.Module]:
        return {"model": self.model}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        losses = next_token_loss(self.model, batch["tokens"])
        return StepOutput({"model": (losses * batch["learned"]).sum() / batch["learned"].sum()})


@torch.no_grad()
def power_sample(
    model: PreTrainedModel, prompts: torch.Tensor, tokens: int, chunk: int, generator: torch.Generator
) -> tuple[torch.Tensor, int]:
    """Samples of p^POWER by Metropolis moves: after each chunk the rest from a random place is proposed anew.

    "Reasoning with Sampling: Your Base Model is Smarter Than You Think" (arXiv 2510.14901). Proposals are drawn at
    temperature 1 / POWER; the rows of a batch share the place, which doesn't depend on them.

    Returns:
        answers `(rows, tokens)`, and how many tokens were decoded.
    """
    length, decoded = prompts.shape[1], 0
    # Of each token: log p, and log of the probability that it was proposed with.
    ids, logp, logq = prompts, torch.zeros(prompts.shape), torch.zeros(prompts.shape)

    def propose(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Columns up to `first` are kept, those up to `last` drawn."""
        cache, drawn = DynamicCache(config=model.config), 0
        new, p, q = ids[:, :first], logp[:, :first], logq[:, :first]
        ended = (new == END).any(1)
        reading = new
        while new.shape[1] < last and not bool(ended.all()):
            logits = model(input_ids=reading, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
            proposal = (POWER * logits).log_softmax(-1)
            reading = torch.multinomial(proposal.exp(), 1, generator=generator)
            p_new, q_new = logits.log_softmax(-1).gather(1, reading), proposal.gather(1, reading)
            reading = reading.masked_fill(ended[:, None], PAD)
            new = torch.cat([new, reading], 1)
            p = torch.cat([p, p_new.masked_fill(ended[:, None], 0)], 1)
            q = torch.cat([q, q_new.masked_fill(ended[:, None], 0)], 1)
            drawn += int((~ended).sum())
            ended = ended | (reading[:, 0] == END)
        missing = last - new.shape[1]
        new = nn.functional.pad(new, (0, missing), value=PAD)
        return new, nn.functional.pad(p, (0, missing)), nn.functional.pad(q, (0, missing)), drawn

    for last in range(length + chunk, length + tokens + chunk, chunk):
        last = min(last, length + tokens)
        ids, logp, logq, drawn = propose(ids.shape[1], last)
        decoded += drawn
        for _ in range(MOVES):
            first = int(torch.randint(length, last, (), generator=generator))
            new, p, q, drawn = propose(first, last)
            decoded += drawn
            gain = POWER * (p - logp).sum(1) + (logq - q).sum(1)
            accepted = (torch.rand(len(ids), generator=generator).log() < gain)[:, None]
            ids, logp, logq = (torch.where(accepted, a, b) for a, b in ((new, ids), (p, logp), (q, logq)))
    return ids[:, length:], decoded


# --- measuring ---------------------------------------------------------------------------------------------------


class Bench(WorkFolder):
    """One seed: what is trained or measured already is read from its folder."""

    def __init__(self, sizes: Sizes, seed: int, work: Path) -> None:
        super().__init__(work / f"seed_{seed}", dataclasses.asdict(sizes))
        self.sizes, self.seed = sizes, seed
        own = derive_seed(seed, 11) % (1 << 31)
        self.tours = Tours(sizes.nodes, sizes.waypoints, sizes.tokens, sizes.carry_over, own)

    def run(self) -> dict[str, Any]:
        """Everything about one seed."""
        seconds = self.stored("trained", self.train)
        choices = self.stored("choices", self.choose)
        measured = {name: self.stored(f"row_{name}", partial(self.measure, name, choices)) for name in ROWS}
        return {"cpu_seconds_training": seconds["cpu_seconds"], "choices": choices, **self.compare(choices, measured)}

    def train(self) -> dict[str, float]:
        print(f"seed {self.seed}: training", flush=True)
        sizes, tours = self.sizes, self.tours
        torch.manual_seed(tours.seed)  # transformers draws initial weights from the global generator
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=tours.vocab_size,
                hidden_size=sizes.hidden_size,
                intermediate_size=3 * sizes.hidden_size,
                num_hidden_layers=sizes.num_layers,
                num_attention_heads=4,
                num_key_value_heads=1,
                max_position_embeddings=2 * (tours.prompt_length + sizes.tokens),
                pad_token_id=PAD,
                eos_token_id=END,
                bos_token_id=None,
            )
        )
        config = TrainConfig(
            output_dir=str(self.folder / "model"),
            max_steps=sizes.train_steps,
            optimizers={"model": OptimizerConfig(lr=2e-3, warmup_steps=30, schedule="cosine")},
            batch_size=sizes.batch_size,
            seed=tours.seed,
            checkpoint_every=sizes.train_steps,
            log_every=50,
        )
        began = time.process_time()
        fit(TourMethod(model), tours, config)
        return {"cpu_seconds": time.process_time() - began}

    def model(self) -> PreTrainedModel:
        return LlamaForCausalLM.from_pretrained(self.folder / "model" / "weights" / "model").eval()

    def sample(
        self,
        model: PreTrainedModel,
        problems: torch.Tensor,
        samples: int,
        temperature: float,
        seed: int,
        **changes: Any,
    ) -> TGROutput:
        """Samples of every problem, in chunks if `changes` say nothing else."""
        sizes = self.sizes
        sizes_of_search = {
            name: getattr(sizes, name) for name in ("chunk_length", "carry_over", "num_candidates", "lookahead")
        }
        config = TGRConfig(**{**sizes_of_search, "seed": derive_seed(self.seed, seed) % (1 << 31), **changes})
        return model.generate(
            problems,
            custom_generate=tgr_generate,
            tgr_config=config,
            attention_mask=torch.ones_like(problems),
            generation_config=GenerationConfig(
                do_sample=True,
                temperature=temperature,
                top_k=0,
                max_new_tokens=sizes.tokens,
                num_return_sequences=samples,
                eos_token_id=END,
                pad_token_id=PAD,
                return_dict_in_generate=True,
            ),
        )

    def plain(self) -> dict[str, Any]:
        """Changes that make a search plain sampling, token for token."""
        return {"num_candidates": 1, "kv_reset": False}

    def reached(self, problems: torch.Tensor, output: TGROutput, samples: int) -> np.ndarray:
        """Waypoints `(problems, samples)` that were reached."""
        answers = output.sequences[:, self.tours.prompt_length :]
        return self.tours.reached(problems.repeat_interleave(samples, 0), answers).view(-1, samples).numpy()

    def choose(self) -> dict[str, Any]:
        """What is chosen on validation problems, before any test."""
        sizes, model = self.sizes, self.model()
        problems = self.tours.problems(sizes.tuning_problems, TUNING)
        samples, largest = sizes.tuning_samples, min(16, sizes.tuning_samples)
        outputs, reached = {}, {}
        for temperature in TEMPERATURES:
            report_progress(f"seed {self.seed}: temperature {temperature}")
            outputs[temperature] = self.sample(model, problems, samples, temperature, 1, **self.plain())
            reached[temperature] = self.reached(problems, outputs[temperature], samples)
        tuning = {}
        for required in range(1, sizes.waypoints + 1):
            curves = {key: pass_at_k_curves(found >= required).mean(0) for key, found in reached.items()}
            areas = {key: float(coverage_auc(curve[: max(1, samples // 2)])) for key, curve in curves.items()}
            best = max(areas, key=areas.__getitem__)
            tuning[str(required)] = {
                "areas": {str(key): area for key, area in areas.items()},
                "temperature": best,
                "pass@16": 100 * float(curves[best][largest - 1]),
            }
            if tuning[str(required)]["pass@16"] <= HARD_ENOUGH:
                break
        temperature = tuning[str(required)]["temperature"]
        auroc = self.value_auroc(model, outputs[temperature], reached[temperature] >= required)
        value = "fresh nodes" if auroc is not None and auroc < 0.55 else "logprob"
        sigmas = {}
        for name in ("tgr_latent", "latent_random_tangent"):
            areas = {}
            for sigma in SIGMAS:
                report_progress(f"seed {self.seed}: {name}, sigma {sigma}")
                changes = {**SEARCHES[name], "sigma": sigma, "value": self.value(value)}
                output = self.sample(model, problems, samples, temperature, 1, **changes)
                found = pass_at_k_curves(self.reached(problems, output, samples) >= required)
                areas[str(sigma)] = float(coverage_auc(found[:, : max(1, samples // 2)]).mean())
            sigmas[name] = {"areas": areas, "sigma": float(max(areas, key=areas.__getitem__))}
        return {
            "tuning": tuning,
            "required": required,
            "temperature": temperature,
            "auroc": auroc,
            "value": value,
            "sigmas": sigmas,
        }

    def value(self, name: str) -> Any:
        return self.tours.fresh_nodes if name == "fresh nodes" else name

    @torch.no_grad()
    def value_auroc(self, model: PreTrainedModel, output: TGROutput, solved: np.ndarray) -> float | None:
        """How well the value of what followed a chunk's start tells solved samples of a problem from unsolved ones.

        Mean over the starts of chunks and, in each, over all pairs within problems; None without a pair.
        """
        sizes, prompt = self.sizes, self.tours.prompt_length
        ids = output.sequences
        logprobs = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        wins, pairs = [], 0
        for start in range(prompt, ids.shape[1] - sizes.lookahead + 1, sizes.chunk_length):
            window = slice(start, start + sizes.lookahead)
            written = (ids[:, window] != PAD).float()
            value = (logprobs[:, start - 1 : start - 1 + sizes.lookahead] * written).sum(1) / written.sum(1).clamp(
                min=1
            )
            value = value.view(solved.shape).numpy()
            running = written[:, 0].bool().view(solved.shape).numpy()
            better = total = 0.0
            for values, right, runs in zip(value, solved, running):
                good, bad = values[right & runs], values[~right & runs]
                difference = good[:, None] - bad[None]
                better += (difference > 0).sum() + 0.5 * (difference == 0).sum()
                total += difference.size
            if total:
                wins.append(better / total)
                pairs += int(total)
        return float(np.mean(wins)) if pairs else None

    def measure(self, name: str, choices: Mapping[str, Any]) -> dict[str, Any]:
        """Waypoints reached on the test problems by one method, and its costs."""
        report_progress(f"seed {self.seed}: {name}")
        sizes, model = self.sizes, self.model()
        problems = self.tours.problems(sizes.problems, TEST)
        samples = {"plain": 2 * sizes.samples, "power": max(1, sizes.samples // 4)}.get(name, sizes.samples)
        began = time.process_time()
        costs: dict[str, Any]
        if name == "power":
            generator = generator_for(self.seed, 3)
            answers, decoded = power_sample(
                model, problems.repeat_interleave(samples, 0), sizes.tokens, sizes.chunk_length, generator
            )
            seconds = time.process_time() - began
            reached = self.tours.reached(problems.repeat_interleave(samples, 0), answers).view(-1, samples).numpy()
            emitted = int((answers != PAD).sum())
            costs = {"overhead": decoded / emitted, "decoded": decoded}
        else:
            changes = self.plain()
            if name != "plain":
                tuned = "latent_random_tangent" if name == "latent_random_tangent" else "tgr_latent"
                changes = {"sigma": choices["sigmas"][tuned]["sigma"], "value": self.value(choices["value"])}
                changes |= SEARCHES[name]
            output = self.sample(model, problems, samples, choices["temperature"], 2, **changes)
            seconds = time.process_time() - began
            reached = self.reached(problems, output, samples)
            stats = output.stats
            costs = {
                "overhead": stats.overhead,
                "decoded": stats.decoded_tokens,
                "positions": stats.read_positions,
                "peak_kv_tokens": stats.peak_kv_tokens,
                "repeat_rate": stats.repeat_rate,
                "curvature": _mean([record.curvature for record in output.trajectories[1:]]),
                "changed": _mean([(record.chosen > 0).float() for record in output.trajectories]),
            }
        return {**costs, "samples": samples, "cpu_seconds": seconds, "reached": reached.tolist()}

    def compare(self, choices: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Coverage of every method, and its differences to plain sampling and to tgr_latent."""
        required, rows = choices["required"], {}
        correct = {name: np.array(row["reached"]) >= required for name, row in measured.items()}
        per_sample = {
            name: {
                "samples": 1.0,
                "tokens": row["decoded"] / row["samples"],
                "cpu": row["cpu_seconds"] / row["samples"],
            }
            for name, row in measured.items()
        }
        plain = pass_at_k_curves(correct["plain"])
        half = {name: max(1, found.shape[1] // (4 if name == "plain" else 2)) for name, found in correct.items()}
        curves = {name: pass_at_k_curves(found, half[name]) for name, found in correct.items()}
        for name, row in measured.items():
            against = {}
            for budget in BUDGETS:
                ratio = per_sample[name][budget] / per_sample["plain"][budget]
                largest = max(1, min(half[name], int(plain.shape[1] / ratio)))
                places = [min(plain.shape[1], math.ceil(ratio * k)) - 1 for k in range(1, largest + 1)]
                gain = coverage_auc(curves[name][:, :largest]) - coverage_auc(plain[:, places])
                against[budget] = {"ratio": ratio, "largest_k": largest, **self.interval(gain)}
            rows[name] = {
                **{key: value for key, value in row.items() if key != "reached"},
                "curve": (100 * curves[name].mean(0)).tolist(),
                "auc": self.interval(coverage_auc(curves[name])),
                "auc_log2": float(coverage_auc(curves[name], "log2").mean()),
                "auc_first_k": float(coverage_auc(first_k_curves(correct[name], half[name])).mean()),
                "against_plain": against,
            }
        pass_16 = plain[:, min(16, plain.shape[1]) - 1]
        latent = coverage_auc(curves["tgr_latent"])
        return {
            "rows": rows,
            "plain_pass@16": 100 * float(pass_16.mean()),
            "latent_minus": {
                name: self.interval(latent - coverage_auc(curves[name])) for name in SEARCHES if name != "tgr_latent"
            },
        }

    def interval(self, values: np.ndarray) -> dict[str, float]:
        low, high = bootstrap_ci(values, derive_seed(self.seed, 9) % (1 << 31))
        return {"mean": float(values.mean()), "low": low, "high": high}


def _mean(parts: Sequence[torch.Tensor]) -> float | None:
    return float(torch.cat(list(parts)).mean()) if parts else None


# --- report ------------------------------------------------------------------------------------------------------


def claims(runs: Mapping[int, Mapping[str, Any]], sizes: Sizes) -> list[dict[str, Any]]:
    """The gates and bars. Those on gains need two of three seeds, the others every seed."""
    latent = {str(seed): run["rows"]["tgr_latent"] for seed, run in runs.items()}
    most = math.ceil(2 * len(runs) / 3)
    bound = sizes.waypoints + 1 + sizes.carry_over + sizes.chunk_length
    claimed: list[tuple[str, dict[str, float], dict[str, bool], int]] = []

    def every(name: str, values: dict[str, float], reached: dict[str, bool]) -> None:
        claimed.append((name, values, reached, len(runs)))

    solved = {str(seed): run["plain_pass@16"] for seed, run in runs.items()}
    every("gate: plain pass@16, %, 20 to 80", solved, {seed: 20 <= value <= 80 for seed, value in solved.items()})
    overhead = {seed: row["overhead"] for seed, row in latent.items()}
    every("overhead of tgr_latent <= 1.3", overhead, {seed: value <= 1.3 for seed, value in overhead.items()})
    peak = {seed: float(row["peak_kv_tokens"]) for seed, row in latent.items()}
    every(f"cached positions of a row <= {bound}", peak, {seed: value <= bound for seed, value in peak.items()})
    first = {str(seed): run["rows"]["tgr_latent"]["curve"][0] - run["rows"]["plain"]["curve"][0]
             for seed, run in runs.items()}  # fmt: skip
    every("pass@1 of tgr_latent - plain >= -2", first, {seed: value >= -2 for seed, value in first.items()})
    for budget, bar in (("samples", 2.0), ("tokens", 0.0)):
        gains = {seed: row["against_plain"][budget] for seed, row in latent.items()}
        claimed.append(
            (
                f"area of tgr_latent - plain at equal {budget} >= {bar:g}, interval above 0",
                {seed: gain["mean"] for seed, gain in gains.items()},
                {seed: gain["mean"] >= bar and gain["low"] > 0 for seed, gain in gains.items()},
                most,
            )
        )
    return [
        {"claim": name, "by_seed": values, "reached": reached, "needed": needed,
         "passed": sum(reached.values()) >= needed}
        for name, values, reached, needed in claimed
    ]  # fmt: skip


def findings(runs: Mapping[int, Mapping[str, Any]]) -> dict[str, bool]:
    """What the controls allow to say."""

    def lower(name: str) -> bool:
        reached = sum(run["latent_minus"][name]["low"] > 0 for run in runs.values())
        return reached >= math.ceil(2 * len(runs) / 3)

    return {
        "geometry helps": lower("latent_no_diversity") or lower("latent_random_tangent"),
        "latents help": lower("tgr_token"),
    }


def make_table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    runs = list(results["seeds"].values())
    sizes = results["sizes"]

    def over(read: Any, digits: int = 1) -> str:
        values = [read(run) for run in runs]
        return "–" if any(value is None for value in values) else spread(values, digits)

    def with_intervals(read: Any) -> str:
        return "; ".join("{mean:+.1f} [{low:+.1f}, {high:+.1f}]".format(**read(run)) for run in runs)

    lines = [
        f"{sizes['problems']} problems, {sizes['samples']} samples; seeds {', '.join(results['seeds'])}: mean "
        "(range), or each seed with its 95 % interval over problems. Areas in percent, k up to half of the samples "
        "(power: of a quarter of them). Samples of rows with look-ahead and diversity depend on each other.",
        "",
        "| method | pass@1 | area | first-k area | overhead, tokens | CPU, x plain | cached | chose another |",
        "|---" * 8 + "|",
    ]
    for name in ROWS:
        cells = [
            over(lambda run: run["rows"][name]["curve"][0]),  # noqa: B023 (called at once)
            over(lambda run: run["rows"][name]["auc"]["mean"]),  # noqa: B023
            over(lambda run: run["rows"][name]["auc_first_k"]),  # noqa: B023
            over(lambda run: run["rows"][name]["overhead"], 2),  # noqa: B023
            over(lambda run: run["rows"][name]["against_plain"]["cpu"]["ratio"], 2),  # noqa: B023
            over(lambda run: run["rows"][name].get("peak_kv_tokens"), 0),  # noqa: B023
            over(lambda run: run["rows"][name].get("changed"), 2),  # noqa: B023
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| area - plain's at equal | samples | decoded tokens | CPU time |", "|---|---|---|---|"]
    for name in ROWS[1:]:
        cells = [with_intervals(lambda run: run["rows"][name]["against_plain"][budget]) for budget in BUDGETS]  # noqa: B023
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| area of tgr_latent above | by seed |", "|---|---|"]
    for name in runs[0]["latent_minus"]:
        lines.append(f"| {name} | {with_intervals(lambda run: run['latent_minus'][name])} |")  # noqa: B023
    lines += ["", "| on validation problems | by seed |", "|---|---|"]
    for name, read in (
        ("AUROC of the look-ahead value", lambda run: _number(run["choices"]["auroc"])),
        ("value of the search", lambda run: run["choices"]["value"]),
        ("waypoints that are required", lambda run: run["choices"]["required"]),
        ("temperature", lambda run: run["choices"]["temperature"]),
        ("sigma, local tangents", lambda run: run["choices"]["sigmas"]["tgr_latent"]["sigma"]),
        ("sigma, random tangents", lambda run: run["choices"]["sigmas"]["latent_random_tangent"]["sigma"]),
    ):
        lines.append(f"| {name} | " + "; ".join(str(read(run)) for run in runs) + " |")
    lines += ["", "| gate or bar | mean (range) | seeds that reach it | |", "|---|---|---|---|"]
    for claim in results["claims"]:
        value = spread(list(claim["by_seed"].values()), 2)
        reached = f"{sum(claim['reached'].values())} of {len(runs)}, {claim['needed']} needed"
        lines.append(f"| {claim['claim']} | {value} | {reached} | {'pass' if claim['passed'] else 'FAIL'} |")
    said = "; ".join(f"{name}: {'yes' if found else 'not shown'}" for name, found in results["findings"].items())
    return "\n".join([*lines, "", f"By the controls, {said}."]) + "\n"


def _number(value: float | None) -> str:
    return "no pair" if value is None else f"{value:.2f}"


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what isn't measured yet; write results.json and table.md; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_seeds(parser)
    add_sizes(parser, Sizes)
    parser.add_argument("--work", type=Path, default=Path("runs/eval/tgr"), help="folder of the trained models")
    add_out(parser, "tgr")
    add_merge(parser)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a gate or bar is missed")
    options = parser.parse_args(arguments)
    set_threads()
    sizes = parse_sizes(Sizes, options.set)
    settings = dataclasses.asdict(sizes)
    earlier = earlier_results(options, settings).get("seeds", {})
    runs = measure_seeds(options.seeds, lambda seed: Bench(sizes, seed, options.work).run(), earlier)
    results = {
        "benchmark": "tgr",
        "sizes": settings,
        "seeds": {str(seed): run for seed, run in runs.items()},
        "claims": claims(runs, sizes),
        "findings": findings(runs),
    }
    table = make_table(results)
    write_results(options.out, results, table)
    print(table)
    return int(options.check and not all(claim["passed"] for claim in results["claims"]))


if __name__ == "__main__":
    sys.exit(main())
