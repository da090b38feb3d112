"""What would be wrong: frames of another time or clip than asked for, a whole clip read for six frames, a damaged or
unfinished folder that trains."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from vidgen.data import DatasetError, LatentVideoDataset
from vidgen.data.latent_dataset import FORMAT_VERSION
from vidgen.runtime.checkpoint import save_safetensors

FRAMES = (6, 9)


def make_latents(clip: int) -> torch.Tensor:
    """(2, frames, 3, 4) where every value names its clip, channel, frame and place; exact in float16."""
    frames = FRAMES[clip]
    return (torch.arange(2 * frames * 12).reshape(2, frames, 3, 4) + 500 * clip).half()


def write_dataset(folder):
    clips = []
    for clip, frames in enumerate(FRAMES):
        file = f"clips/{clip}.mp4.safetensors"
        tensors = {"latents": make_latents(clip), "prompt_embeds": torch.full((5, 8), clip + 1.0).bfloat16()}
        save_safetensors(tensors, folder / file)
        clips.append({"file": file, "frames": frames, "bytes": (folder / file).stat().st_size})
    index = {
        "version": FORMAT_VERSION,
        "channels": 2,
        "latent_size": [3, 4],
        "text_length": 5,
        "text_dim": 8,
        "num_clips": len(clips),
        "clips": clips,
    }
    (folder / "dataset.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("latents"))


@pytest.fixture
def folder(tmp_path):
    return write_dataset(tmp_path / "latents")


def edit_index(folder, **changes):
    path = folder / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_items_are_the_clips(whole):
    dataset = LatentVideoDataset(whole)
    assert len(dataset) == 2
    for clip in range(2):
        item = dataset[clip]
        assert dataset.frames(clip) == FRAMES[clip]
        assert item["latents"].dtype == item["prompt_embeds"].dtype == torch.float32
        assert torch.equal(item["latents"], make_latents(clip).float())
        assert torch.equal(item["prompt_embeds"], torch.full((5, 8), clip + 1.0))


def test_read_equals_indexing_the_whole_clip(whole):
    dataset, generator = LatentVideoDataset(whole), torch.Generator().manual_seed(0)
    for count in (1, 2, 5, 12):
        for ids in torch.randint(FRAMES[1], (4, count), generator=generator):
            assert torch.equal(dataset.read(1, ids), make_latents(1)[:, ids].float()), ids
            assert torch.equal(dataset.read(1, ids.sort().values), make_latents(1)[:, ids.sort().values].float()), ids


def test_read_takes_only_the_frames_from_the_disk(whole, monkeypatch):
    import vidgen.data.latent_dataset as module

    slices = []

    class Recorder:
        def __init__(self, stored):
            self.stored = stored

        def get_shape(self):
            return self.stored.get_shape()

        def __getitem__(self, key):
            slices.append(key[1])
            return self.stored[key]

    class File:
        def __init__(self, path, framework):
            self.file = real_open(path, framework=framework)

        def __enter__(self):
            self.opened = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def get_slice(self, name):
            return Recorder(self.opened.get_slice(name))

    real_open = module.safe_open
    monkeypatch.setattr(module, "safe_open", File)
    LatentVideoDataset(whole).read(1, torch.tensor([0, 1, 4, 6, 7, 8]))
    assert slices == [slice(0, 2), slice(4, 5), slice(6, 9)]


def test_dataset_travels_to_data_loader_workers(whole):
    dataset = pickle.loads(pickle.dumps(LatentVideoDataset(whole)))
    assert torch.equal(dataset[1]["latents"], make_latents(1).float())


@pytest.mark.parametrize("ids", [[], [-1], [0, FRAMES[0]]])
def test_frames_outside_the_clip_are_refused(whole, ids):
    with pytest.raises(DatasetError, match="from 0 to 5"):
        LatentVideoDataset(whole).read(0, torch.tensor(ids))


def test_wrong_folders_are_refused(folder, tmp_path):
    with pytest.raises(DatasetError, match="is not a folder; `vidgen data encode-latents` makes one"):
        LatentVideoDataset(tmp_path / "nowhere")

    edit_index(folder, version=FORMAT_VERSION + 1)
    with pytest.raises(DatasetError, match="format version 2; allowed: 1"):
        LatentVideoDataset(folder)

    edit_index(folder, version=FORMAT_VERSION, clips=[])
    with pytest.raises(DatasetError, match="holds no clips"):
        LatentVideoDataset(folder)

    edit_index(folder, clips=[{"file": "clips/0.mp4.safetensors"}])
    with pytest.raises(DatasetError, match="damaged: KeyError 'frames'"):
        LatentVideoDataset(folder)

    (folder / "dataset.json").write_text('{"version": ')
    with pytest.raises(DatasetError, match="is damaged"):
        LatentVideoDataset(folder)

    (folder / "dataset.json").unlink()
    with pytest.raises(DatasetError, match="holds no dataset.json: it is not finished"):
        LatentVideoDataset(folder)


def test_missing_or_shortened_clip_is_found_at_the_start(folder):
    clip = folder / "clips" / "1.mp4.safetensors"
    data = clip.read_bytes()
    clip.write_bytes(data[:-1])
    with pytest.raises(DatasetError, match=f"{len(data) - 1} bytes instead of {len(data)}"):
        LatentVideoDataset(folder)
    clip.unlink()
    with pytest.raises(DatasetError, match="1.mp4.safetensors is missing"):
        LatentVideoDataset(folder)


def test_corrupt_clip_is_named_when_it_is_read(folder):
    dataset = LatentVideoDataset(folder)
    clip = folder / "clips" / "1.mp4.safetensors"
    clip.write_bytes(bytes(len(clip.read_bytes())))
    for read in (lambda: dataset[1], lambda: dataset.prompt_embeds(1)):
        with pytest.raises(DatasetError, match="1.mp4.safetensors is damaged"):
            read()
    save_safetensors({"latents": make_latents(0), "prompt_embeds": torch.zeros(4, 8)}, clip)
    with pytest.raises(DatasetError, match="latents has shape"):
        dataset.read(1, torch.tensor([0]))
    with pytest.raises(DatasetError, match="prompt_embeds has shape"):
        dataset.prompt_embeds(1)
