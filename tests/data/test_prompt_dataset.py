"""What would be wrong: a prompt shown in another chunk than generation shows it in, another prompt's embeddings, items
that cannot be batched, a damaged or unfinished folder that trains."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch.utils.data import default_collate

from vidgen.data import DatasetError, PromptDataset
from vidgen.data.latent_dataset import FORMAT_VERSION
from vidgen.pipelines import PromptPlan
from vidgen.runtime.checkpoint import save_safetensors
from vidgen.runtime.errors import VidgenError

FPS, LENGTH, DIM = 12, 5, 4
# Three shards; prompt texts are unique, so that a text names a prompt.
PLANS = [
    [[("a", None)], [("b", 2.0), ("c", 2.0), ("d", None)]],
    [[("e", None)]],
    [[("f", 0.75), ("g", None)], [("h", 3.0), ("i", 0.1), ("j", 0.1), ("k", 4.0)]],
]
ALL_PLANS = [plan for shard in PLANS for plan in shard]


def embed(text: str) -> torch.Tensor:
    """(1 to 5, DIM): as many rows as the text's number in the alphabet says, all telling the text."""
    number = ord(text) - ord("a")
    return torch.full((number % LENGTH + 1, DIM), number + 1.0)


def write_dataset(folder):
    shards = []
    for number, plans in enumerate(PLANS):
        parsed = [PromptPlan.parse(plan) for plan in plans]
        rows = [embed(segment.prompt) for plan in parsed for segment in plan.segments]
        tensors = {
            "embeds": torch.cat(rows).bfloat16(),
            "token_offsets": torch.tensor([0, *(len(row) for row in rows)]).cumsum(0),
            "plan_offsets": torch.tensor([0, *(len(plan) for plan in plans)]).cumsum(0),
            "starts": torch.tensor([start for plan in parsed for start in plan.starts], dtype=torch.float64),
        }
        save_safetensors(tensors, folder / f"prompts_{number}.safetensors")
        shards.append({"file": f"prompts_{number}.safetensors", "plans": len(plans)})
    index = {"version": FORMAT_VERSION, "fps": FPS, "text_length": LENGTH, "text_dim": DIM, "shards": shards}
    (folder / "prompts.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("prompts"))


@pytest.fixture
def folder(tmp_path):
    return write_dataset(tmp_path / "prompts")


def edit_index(folder, **changes):
    path = folder / "prompts.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 9])
def test_every_chunk_has_the_prompt_that_generation_would_show(whole, num_chunks):
    dataset = PromptDataset(whole, num_chunks, chunk_seconds=1.0)
    assert len(dataset) == len(ALL_PLANS)
    for item, plan in zip(dataset, ALL_PLANS):
        assert item["prompt_of_chunk"].shape == (num_chunks,)
        for chunk in range(num_chunks):
            # Chunks of three latent frames: 9 frames, then 12 each.
            text = PromptPlan.parse(plan).prompt_at(max(0, 12 * chunk - 3), FPS)
            expected = torch.zeros(LENGTH, DIM)
            expected[: len(embed(text))] = embed(text)
            assert torch.equal(item["prompt_embeds"][item["prompt_of_chunk"][chunk]], expected), (plan, chunk)


def test_items_hold_no_prompt_that_is_not_shown_and_can_be_batched(whole):
    # In 9 chunks b, c, d are shown; h and k too, but i and j are over before a chunk begins.
    dataset = PromptDataset(whole, num_chunks=9, chunk_seconds=1.0)
    shown = [len(item["prompt_of_chunk"].unique()) for item in dataset]
    assert shown == [1, 3, 1, 2, 2]
    assert dataset.num_prompts == 3
    batch = default_collate([dataset[i] for i in range(len(dataset))])
    assert batch["prompt_embeds"].shape == (5, 3, LENGTH, DIM)
    assert batch["prompt_embeds"].dtype == torch.float32
    assert batch["prompt_of_chunk"].dtype == torch.int64
    assert not batch["prompt_embeds"][0, 1:].any()


def test_rollout_of_one_chunk_has_one_prompt(whole):
    assert PromptDataset(whole, num_chunks=1, chunk_seconds=1.0)[1]["prompt_embeds"].shape == (1, LENGTH, DIM)


def test_dataset_travels_to_data_loader_workers(whole):
    dataset = PromptDataset(whole, num_chunks=4, chunk_seconds=1.0)
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy[4]["prompt_embeds"], dataset[4]["prompt_embeds"])


@pytest.mark.parametrize("i", [-1, len(ALL_PLANS)])
def test_iteration_ends_with_the_last_plan(whole, i):
    with pytest.raises(IndexError, match="holds 5"):
        PromptDataset(whole, num_chunks=1, chunk_seconds=1.0)[i]


def test_wrong_lengths_are_refused(whole):
    with pytest.raises(VidgenError, match="num_chunks=0"):
        PromptDataset(whole, num_chunks=0, chunk_seconds=1.0)
    for seconds in (0.0, float("nan")):
        with pytest.raises(VidgenError, match="chunk_seconds"):
            PromptDataset(whole, num_chunks=1, chunk_seconds=seconds)


def test_wrong_folders_are_refused(folder, tmp_path):
    def open_dataset(path=folder):
        return PromptDataset(path, num_chunks=1, chunk_seconds=1.0)

    with pytest.raises(DatasetError, match="`vidgen data prompts` makes one"):
        open_dataset(tmp_path / "nowhere")

    shards = json.loads((folder / "prompts.json").read_text())["shards"]
    edit_index(folder, version=0)
    with pytest.raises(DatasetError, match="format version 0; allowed: 1"):
        open_dataset()
    edit_index(folder, version=FORMAT_VERSION, shards=[])
    with pytest.raises(DatasetError, match="holds no prompts"):
        open_dataset()
    edit_index(folder, shards=shards, text_dim=DIM + 1)
    with pytest.raises(DatasetError, match="prompts_0.safetensors does not fit prompts.json"):
        open_dataset()
    edit_index(folder, text_dim=DIM, shards=[{**shards[0], "plans": 3}, *shards[1:]])
    with pytest.raises(DatasetError, match="prompts_0.safetensors does not fit prompts.json"):
        open_dataset()
    edit_index(folder, shards=shards)
    assert len(open_dataset()) == len(ALL_PLANS)

    shard = folder / "prompts_1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DatasetError, match="prompts_1.safetensors is damaged"):
        open_dataset()
    shard.unlink()
    with pytest.raises(DatasetError, match="prompts_1.safetensors is missing"):
        open_dataset()
    (folder / "prompts.json").unlink()
    with pytest.raises(DatasetError, match="holds no prompts.json: it is not finished"):
        open_dataset()
