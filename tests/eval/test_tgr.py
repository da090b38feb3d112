"""What would be wrong: tours that no model could walk, a method measured with another's settings, bars that pass."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vidgen.language.decoding.tgr import LookAhead

EVAL = Path(__file__).resolve().parents[2] / "eval"
TOY = (
    "nodes=12", "waypoints=2", "tokens=12", "train_steps=3", "batch_size=4", "hidden_size=16", "num_layers=1",
    "problems=3", "tuning_problems=2", "samples=4", "tuning_samples=4", "chunk_length=6", "carry_over=3",
    "num_candidates=2", "lookahead=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVAL)
        yield importlib.import_module("tgr")


@pytest.fixture(scope="module")
def folder(benchmark, tmp_path_factory) -> Path:
    """A toy run."""
    folder = tmp_path_factory.mktemp("tgr")
    options = ["--seeds", "0", "--set", *TOY, "--work", str(folder / "work"), "--out", str(folder / "out")]
    assert benchmark.main(options) == 0
    return folder


@pytest.fixture
def results(folder) -> dict:
    return json.loads((folder / "out/results.json").read_text())


def tours(benchmark, **changes):
    return benchmark.Tours(**{"nodes": 20, "waypoints": 3, "tokens": 60, "carry_over": 5, "seed": 1, **changes})


def test_the_guide_walks_along_edges_and_reaches_what_it_says(benchmark):
    task = tours(benchmark)
    prompts = task.problems(50, 3)
    answers = task.walks(prompts, torch.Generator().manual_seed(0))
    reached = task.reached(prompts, answers)
    ended = (answers == benchmark.END).any(1)
    assert ended.sum() > 30 and (reached[ended] == 3).all()
    assert (reached[~ended] == ((answers[~ended] >= 2) & (answers[~ended] < task.first_node)).sum(1)).all()
    # By hand: one wrong edge, and nothing after it counts; a mark where there is nothing to mark is a mistake too.
    first = answers[ended][:1]
    asked = prompts[ended][:1]
    edges = task.edges()[asked[0, -1] - task.first_node]
    wrong = next(node for node in range(20) if node not in edges.tolist())
    for mistake in (task.first_node + wrong, 2, benchmark.END):
        changed = first.clone()
        changed[0, 0] = mistake
        assert int(task.reached(asked, changed)) == 0
    assert (task.edges() != torch.arange(20)[:, None]).all() and (task.distances() < 20).all()
    assert not torch.equal(tours(benchmark, seed=2).edges(), task.edges())


def test_training_walks_are_whole_or_cut_as_a_reset_cuts_them(benchmark):
    task = tours(benchmark)
    batch = task.batch(0, 0, 1, 200)
    assert torch.equal(batch["tokens"], task.batch(0, 0, 1, 200)["tokens"])
    prompts, answers = batch["tokens"][:, :4], batch["tokens"][:, 4:]
    learned = batch["learned"][:, 3:]
    assert not batch["learned"][:, :3].any() and not learned[answers == benchmark.PAD].any()
    whole = learned[:, 0]
    assert 80 < whole.sum() < 140
    assert not learned[~whole][:, :5].any() and learned[~whole][:, 5].all()
    start = prompts[:, -1] - task.first_node
    assert all(
        int(token) - task.first_node in task.edges()[place] for token, place in zip(answers[whole, 0], start[whole])
    )


def test_returning_to_a_node_of_the_same_leg_is_what_the_other_value_counts(benchmark):
    task = tours(benchmark)
    a, b, c, mark = task.first_node, task.first_node + 1, task.first_node + 2, 2
    context = torch.tensor([[a, b]])
    tokens = torch.tensor([[[c, a], [c, c], [mark, a], [c, 0]]])
    valid = torch.tensor([[[True, True], [True, True], [True, True], [True, False]]])
    found = LookAhead(context, tokens, valid, torch.zeros(1, 4, 2), torch.zeros(1, 4, 2, 3))
    assert task.fresh_nodes(found).tolist() == [[0.5, 0.5, 1.0, 1.0]]


def test_power_sampling_prefers_what_is_probable_to_the_power(benchmark):
    """Two tokens of a one-layer model: shares of sequences against p^2, computed for all of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=4, max_position_embeddings=8, initializer_range=1.0, **sizes)
    ).eval()
    prompt = torch.tensor([[2, 3]])
    probabilities = {}
    with torch.no_grad():
        first = model(prompt).logits[0, -1].softmax(-1)
        for one in range(4):
            if one == benchmark.END:
                probabilities[one, benchmark.PAD] = float(first[one])
                continue
            second = model(torch.cat([prompt, torch.tensor([[one]])], 1)).logits[0, -1].softmax(-1)
            probabilities.update({(one, two): float(first[one] * second[two]) for two in range(4)})
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    total = sum(p**2 for p in probabilities.values())
    answers, decoded = benchmark.power_sample(model, prompt.expand(4000, -1), 2, 1, torch.Generator().manual_seed(1))
    assert decoded > 2 * 4000
    pairs = [tuple(pair) for pair in answers.tolist()]
    distance = sum(abs(pairs.count(pair) / 4000 - p**2 / total) for pair, p in probabilities.items()) / 2
    proposed = sum(abs(p - p**2 / total) for p in probabilities.values()) / 2
    assert distance < 0.05 < proposed


def test_every_row_is_measured_with_its_own_settings_and_shown(benchmark, folder, results):
    (run,) = results["seeds"].values()
    assert set(run["rows"]) == set(benchmark.ROWS)
    rows = run["rows"]
    assert rows["plain"]["overhead"] == rows["plain_reset"]["overhead"] == 1
    assert all(rows[name]["overhead"] > 1 for name in benchmark.SEARCHES if name != "plain_reset")
    assert rows["latent_no_reset"]["peak_kv_tokens"] > rows["tgr_latent"]["peak_kv_tokens"]
    assert (rows["plain"]["samples"], rows["tgr_latent"]["samples"], rows["power"]["samples"]) == (8, 4, 1)
    for name, row in rows.items():
        assert row["against_plain"]["samples"]["ratio"] == 1
        assert row["against_plain"]["tokens"]["ratio"] > 0 and len(row["curve"]) == (1 if name == "power" else 2)
    table = (folder / "out/table.md").read_text()
    assert all(f"| {name} |" in table for name in benchmark.ROWS)


def test_a_second_run_measures_nothing_and_writes_the_same(benchmark, folder, results, monkeypatch):
    for name in ("fit", "tgr_generate", "power_sample"):
        monkeypatch.setattr(benchmark, name, lambda *_, **__: pytest.fail("it was measured again"))
    options = ["--seeds", "0", "--set", *TOY, "--work", str(folder / "work"), "--out", str(folder / "again")]
    assert benchmark.main(options) == 0
    assert json.loads((folder / "again/results.json").read_text())["seeds"] == results["seeds"]
    assert benchmark.main([*options, "--set", *TOY[:-1]]) == 2


def test_equal_budgets_compare_with_more_samples_of_plain(benchmark, folder):
    """Every problem is solved by one of plain's eight samples, and by one of the search's four."""
    bench = benchmark.Bench(benchmark.parse_sizes(benchmark.Sizes, TOY), 0, folder / "work")
    plain = {"samples": 8, "decoded": 80, "cpu_seconds": 8.0, "reached": [[2] + [0] * 7] * 3}
    search = {"samples": 4, "decoded": 80, "cpu_seconds": 4.0, "reached": [[2] + [0] * 3] * 3}
    measured = {"plain": plain, **{name: search for name in benchmark.SEARCHES}}
    compared = bench.compare({"required": 2}, measured)["rows"]["tgr_latent"]["against_plain"]
    # pass@k is k / 8 for plain and k / 4 for the search, k = 1, 2.
    assert {name: (found["ratio"], found["mean"]) for name, found in compared.items()} == {
        "samples": (1.0, pytest.approx(100 * 1.5 / 8)),
        "tokens": (2.0, pytest.approx(0)),
        "cpu": (1.0, pytest.approx(100 * 1.5 / 8)),
    }


def test_bars_pass_and_each_fails_where_it_should(benchmark, results):
    (run,) = results["seeds"].values()
    sizes = benchmark.parse_sizes(benchmark.Sizes, TOY)
    good = copy.deepcopy(run)
    good["plain_pass@16"] = 60.0
    good["rows"]["plain"]["curve"][0] = 20.0
    latent = good["rows"]["tgr_latent"]
    latent.update(overhead=1.3, peak_kv_tokens=2 + 1 + 3 + 6)
    latent["curve"][0] = 18.0
    for budget, mean in (("samples", 2.0), ("tokens", 0.5)):
        latent["against_plain"][budget].update(mean=mean, low=0.1)
    for found in good["latent_minus"].values():
        found["low"] = -0.1

    def failed(change, of_three: int) -> list[int]:
        runs = {seed: copy.deepcopy(good) for seed in range(3)}
        for seed in range(of_three):
            change(runs[seed])
        return [place for place, claim in enumerate(benchmark.claims(runs, sizes)) if not claim["passed"]]

    assert failed(lambda bad: None, 3) == []
    for place, change in (
        (0, lambda bad: bad.update({"plain_pass@16": 81.0})),
        (0, lambda bad: bad.update({"plain_pass@16": 19.0})),
        (1, lambda bad: bad["rows"]["tgr_latent"].update(overhead=1.31)),
        (2, lambda bad: bad["rows"]["tgr_latent"].update(peak_kv_tokens=13)),
        (3, lambda bad: bad["rows"]["plain"]["curve"].__setitem__(0, 20.1)),
    ):
        assert failed(change, 1) == [place]
    for place, budget in ((4, "samples"), (5, "tokens")):
        for worse in ({"low": 0.0}, {"mean": -0.1}):
            change = lambda bad: bad["rows"]["tgr_latent"]["against_plain"][budget].update(worse)  # noqa: B023, E731
            assert failed(change, 1) == [] and failed(change, 2) == [place]

    runs = {seed: copy.deepcopy(good) for seed in range(3)}
    assert benchmark.findings(runs) == {"geometry helps": False, "latents help": False}
    for name, found in (("latent_random_tangent", "geometry helps"), ("tgr_token", "latents help")):
        for seed in (0, 1):
            assert not benchmark.findings(runs)[found]
            runs[seed]["latent_minus"][name]["low"] = 0.1
        assert benchmark.findings(runs)[found]


def test_the_value_check_by_hand(benchmark, folder):
    bench = benchmark.Bench(benchmark.parse_sizes(benchmark.Sizes, TOY), 0, folder / "work")
    model = bench.model()
    answers = torch.randint(2, bench.tours.vocab_size, (8, 2), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([bench.tours.problems(2, 1).repeat_interleave(4, 0), answers], 1)
    output = SimpleNamespace(sequences=ids)
    assert bench.value_auroc(model, output, np.zeros((2, 4), dtype=bool)) is None
    with torch.no_grad():
        logprobs = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    value = logprobs[:, 2:].mean(1).view(2, 4)
    best = (value >= value.sort(1).values[:, 2:3]).numpy()
    assert bench.value_auroc(model, output, best) == 1.0 and bench.value_auroc(model, output, ~best) == 0.0
    # What has ended before a chunk begins says nothing of it.
    ids[best.reshape(-1), 3:] = benchmark.PAD
    assert bench.value_auroc(model, output, best) is None
