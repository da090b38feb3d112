"""What would be wrong: latents of other frames or of another crop than the video's, embeddings that the pipeline would
not make, a broken video that vanishes, a resumed run that mixes settings."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from vidgen.data import DatasetError, LatentVideoDataset, PromptDataset, VideoReader, VideoWriter
from vidgen.pipelines import ContextForcingPipeline
from vidgen.recipes import encode_data
from vidgen.recipes.encode_data import (
    LatentEncoding,
    encode_prompts,
    encode_videos,
    fit_pixels,
    nearest_frames,
    read_captions,
    read_prompts,
)
from vidgen.runtime.errors import VidgenError

HEIGHT, WIDTH = 32, 48
SHORT = LatentEncoding(min_seconds=0.5, max_seconds=2.0, device="cpu")


def write_video(path, num_frames, fps, seed=0):
    """Smooth moving pictures, so that the codec keeps them."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), np.uint8)
    picture = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    frames = np.stack([np.roll(np.asarray(picture), 2 * number, axis=1) for number in range(num_frames)])
    path.parent.mkdir(parents=True, exist_ok=True)
    with VideoWriter(path, fps=fps, crf=10) as writer:
        writer.append(frames)


def write_captions(path, *entries):
    lines = [
        entry if isinstance(entry, str) else json.dumps(dict(zip(("video", "caption"), entry))) for entry in entries
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def pipe(tiny_model_folder):
    return ContextForcingPipeline.from_pretrained(tiny_model_folder)


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """`fast.mp4` at twice the model's rate, `sub/slow.mp4` at two thirds of it, `short.mp4` of 1/4 s, `broken.mp4`."""
    folder = tmp_path_factory.mktemp("videos")
    write_video(folder / "fast.mp4", 24, fps=24)
    write_video(folder / "sub" / "slow.mp4", 11, fps=8, seed=1)
    write_video(folder / "short.mp4", 3, fps=12)
    data = (folder / "fast.mp4").read_bytes()
    (folder / "broken.mp4").write_bytes(data[: len(data) // 2])
    return folder


# --- videos ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("video", "shown"),
    [
        # 24 -> 12 frames/s: every second of 24 frames; 9 of those 12 fill a chunk.
        ("fast.mp4", range(0, 18, 2)),
        # 8 -> 12 frames/s: source time 2/3 k, rounded half up; 11 frames last 16, of which 9 fill a chunk.
        ("sub/slow.mp4", [0, 1, 1, 2, 3, 3, 4, 5, 5]),
    ],
)
def test_latents_are_those_of_the_whole_video_at_the_models_rate(
    pipe, tiny_model_folder, videos, tmp_path, video, shown
):
    captions = write_captions(tmp_path / "captions.jsonl", (video, "a meadow at dawn"))
    encode_videos(videos, captions, tiny_model_folder, tmp_path / "out", SHORT)
    dataset = LatentVideoDataset(tmp_path / "out")

    with VideoReader(videos / video) as reader:
        frames = torch.from_numpy(reader.get_batch(list(shown)))
    pixels = frames.permute(3, 0, 1, 2)[None].float() / 255 * 2 - 1
    with torch.no_grad():
        latents = pipe.vae.encode(pixels).latent_dist.mode()
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    torch.testing.assert_close(dataset[0]["latents"], ((latents - mean) / std)[0], rtol=2e-3, atol=2e-3)
    expected, _ = pipe.encode_prompt("a meadow at dawn", do_classifier_free_guidance=False)
    torch.testing.assert_close(dataset[0]["prompt_embeds"], expected[0])


def test_index_tells_what_is_in_the_folder(tiny_model_folder, videos, tmp_path):
    captions = write_captions(
        tmp_path / "captions.jsonl", ("fast.mp4", "a meadow"), ("short.mp4", "a coast"), ("sub/slow.mp4", "rain")
    )
    report = encode_videos(videos, captions, tiny_model_folder, tmp_path / "out", SHORT)
    assert (report.items, report.encoded, report.too_short, report.broken) == (2, 2, ("short.mp4",), ())
    index = LatentVideoDataset(tmp_path / "out").index
    told = {name: index[name] for name in ("version", "model", "fps", "chunk", "channels", "latent_size", "num_clips")}
    assert told == {
        "version": 1,
        "model": tiny_model_folder,
        "fps": 12,
        "chunk": 3,
        "channels": 4,
        "latent_size": [4, 6],
        "num_clips": 2,
    }
    assert (index["text_length"], index["text_dim"], index["too_short"]) == (64, 16, ["short.mp4"])
    assert [clip["file"] for clip in index["clips"]] == [
        "clips/fast.mp4.safetensors",
        "clips/sub/slow.mp4.safetensors",
    ]
    with encode_data.safe_open(tmp_path / "out" / "clips/sub/slow.mp4.safetensors", framework="pt") as file:
        assert file.metadata() == {"source": "sub/slow.mp4", "seconds": "0.750", "caption": "rain"}
        assert file.get_tensor("latents").dtype == torch.float16


def test_longer_video_is_cut_to_whole_chunks_below_the_limit(tiny_model_folder, tmp_path):
    write_video(tmp_path / "videos" / "long.mp4", 40, fps=12)
    captions = write_captions(tmp_path / "captions.jsonl", ("long.mp4", "a meadow"))
    for seconds, frames in ((3.0, 9), (2.0, 6), (1.0, 3)):
        config = LatentEncoding(min_seconds=1.0, max_seconds=seconds, device="cpu")
        output = tmp_path / f"out{frames}"
        encode_videos(tmp_path / "videos", captions, tiny_model_folder, output, config)
        assert LatentVideoDataset(output).frames(0) == frames


def test_stopped_run_goes_on_and_makes_no_clip_twice(tiny_model_folder, videos, tmp_path, monkeypatch):
    captions = write_captions(tmp_path / "captions.jsonl", ("fast.mp4", "a meadow"), ("sub/slow.mp4", "rain"))
    arguments = (videos, captions, tiny_model_folder, tmp_path / "out", SHORT)
    encode_clip = encode_data._encode_clip

    def stop_at_second(pipe, videos, video, *rest):
        if video != "fast.mp4":
            raise KeyboardInterrupt
        return encode_clip(pipe, videos, video, *rest)

    monkeypatch.setattr(encode_data, "_encode_clip", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        encode_videos(*arguments)
    with pytest.raises(DatasetError, match="not finished"):
        LatentVideoDataset(tmp_path / "out")
    monkeypatch.undo()

    first = tmp_path / "out" / "clips" / "fast.mp4.safetensors"
    made = first.stat().st_mtime_ns
    assert encode_videos(*arguments).encoded == 1
    assert first.stat().st_mtime_ns == made
    assert len(LatentVideoDataset(tmp_path / "out")) == 2

    with pytest.raises(DatasetError, match="this run has max_seconds=1.5 instead of 2.0"):
        encode_videos(*arguments[:4], LatentEncoding(min_seconds=0.5, max_seconds=1.5, device="cpu"))

    write_captions(captions, ("fast.mp4", "a desert"), ("sub/slow.mp4", "rain"))
    before = LatentVideoDataset(tmp_path / "out")[0]
    assert encode_videos(*arguments).encoded == 1
    after = LatentVideoDataset(tmp_path / "out")[0]
    assert torch.equal(before["latents"], after["latents"])
    assert not torch.equal(before["prompt_embeds"], after["prompt_embeds"])


def test_broken_video_fails_the_run_or_is_listed(tiny_model_folder, videos, tmp_path, capsys):
    captions = write_captions(
        tmp_path / "captions.jsonl", ("broken.mp4", "a"), ("nowhere.mp4", "a"), ("fast.mp4", "a meadow")
    )
    arguments = (videos, captions, tiny_model_folder, tmp_path / "out", SHORT)
    with pytest.raises(DatasetError, match="2 of 3 videos could not be read, the first is 'broken.mp4'; 1 clips"):
        encode_videos(*arguments)
    told = capsys.readouterr().err
    assert "captions.jsonl line 1: cannot" in told and "captions.jsonl line 2: cannot" in told
    with pytest.raises(DatasetError, match="not finished"):
        LatentVideoDataset(tmp_path / "out")

    report = encode_videos(*arguments, skip_broken=True)
    assert (report.items, report.encoded, report.broken) == (1, 0, ("broken.mp4", "nowhere.mp4"))
    assert LatentVideoDataset(tmp_path / "out").index["broken"] == ["broken.mp4", "nowhere.mp4"]


def test_dataset_without_clips_is_an_error(tiny_model_folder, videos, tmp_path):
    captions = write_captions(tmp_path / "captions.jsonl", ("short.mp4", "a coast"))
    with pytest.raises(DatasetError, match="1 are shorter than 0.5 s"):
        encode_videos(videos, captions, tiny_model_folder, tmp_path / "out", SHORT)


@pytest.mark.parametrize("video", ["short.mp4", "broken.mp4"])
def test_run_that_encoded_nothing_binds_nothing(tiny_model_folder, videos, tmp_path, monkeypatch, video):
    captions = write_captions(tmp_path / "captions.jsonl", (video, "a coast"))
    with pytest.raises(DatasetError):
        encode_videos(videos, captions, tiny_model_folder, tmp_path / "out", SHORT)
    (tmp_path / "prompts.txt").write_text("a meadow\nrain\n")

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(encode_data, "_encode_shard", stop)
        encode_prompts(tmp_path / "prompts.txt", tiny_model_folder, tmp_path / "prompts", device="cpu")
    assert not (tmp_path / "out").exists() and not (tmp_path / "prompts").exists()

    write_captions(captions, ("fast.mp4", "a meadow"))
    other = LatentEncoding(min_seconds=0.1, max_seconds=1.0, device="cpu")
    assert encode_videos(videos, captions, tiny_model_folder, tmp_path / "out", other).encoded == 1
    assert encode_prompts(tmp_path / "prompts.txt", tiny_model_folder, tmp_path / "prompts", 1, "cpu").encoded == 1


@pytest.mark.parametrize(
    "config",
    [
        LatentEncoding(fps=1000.0, min_seconds=0.1, max_seconds=0.2, device="cpu"),
        LatentEncoding(fps=1e-9, min_seconds=0.1, max_seconds=1e300, device="cpu"),
        LatentEncoding(fps=1e-300, min_seconds=0.1, max_seconds=1e308, device="cpu"),
    ],
)
def test_extreme_rates_and_lengths_make_clips_or_are_too_slow_for_one(tiny_model_folder, videos, tmp_path, config):
    captions = write_captions(tmp_path / "captions.jsonl", ("fast.mp4", "a meadow"))
    arguments = (videos, captions, tiny_model_folder, tmp_path / "out", config)
    if config.fps < 1:
        with pytest.raises(DatasetError, match="than one chunk"):
            encode_videos(*arguments)
    else:
        encode_videos(*arguments)
        assert LatentVideoDataset(tmp_path / "out").frames(0) == 48  # 200 pictures are 50 latent frames


def test_frames_that_do_not_fit_into_memory_are_told(tiny_model_folder, videos, tmp_path, monkeypatch):
    captions = write_captions(tmp_path / "captions.jsonl", ("fast.mp4", "a meadow"))
    arguments = (videos, captions, tiny_model_folder, tmp_path / "out", SHORT)

    def too_large(encoder, pixels):
        return torch.empty(1 << 60)

    monkeypatch.setattr(encode_data.StreamingVAEEncoder, "encode", too_large)
    with pytest.raises(VidgenError, match="frames of 48x32 pixels do not fit into the memory of cpu"):
        encode_videos(*arguments)

    def broken(encoder, pixels):
        raise RuntimeError("another")

    monkeypatch.setattr(encode_data.StreamingVAEEncoder, "encode", broken)
    with pytest.raises(RuntimeError, match="another"):
        encode_videos(*arguments)


def test_folder_with_other_files_is_left_alone(tiny_model_folder, videos, tmp_path):
    captions = write_captions(tmp_path / "captions.jsonl", ("fast.mp4", "a meadow"))
    with pytest.raises(DatasetError, match="holds something else"):
        encode_videos(videos, captions, tiny_model_folder, tmp_path, SHORT)
    with pytest.raises(DatasetError, match="cannot use the folder .*xxx: File name too long; choose another one"):
        encode_videos(videos, captions, tiny_model_folder, tmp_path / ("x" * 300), SHORT)


def test_every_wrong_line_of_the_captions_is_named(tmp_path):
    captions = write_captions(
        tmp_path / "captions.jsonl",
        ("a.mp4", "a meadow"),
        "",
        "{",
        ("../b.mp4", "a coast"),
        ("c.mp4", " "),
        '{"video": "d.mp4", "caption": "rain", "start": 3}',
        ("./a.mp4", "again"),
        ("/e.mp4", "a desert"),
    )
    with pytest.raises(DatasetError) as error:
        read_captions(captions)
    for number in (3, 4, 5, 6, 7, 8):
        assert f"line {number}: " in str(error.value)
    assert "line 1:" not in str(error.value) and "line 2:" not in str(error.value)
    assert "already in line 1" in str(error.value)


@pytest.mark.parametrize("source_fps", [6.0, 11.9, 12.0, 23.976, 25.0, 60.0])
def test_resampled_frames_are_the_nearest_in_time(source_fps):
    num_frames, fps = 37, 12.0
    indices = nearest_frames(num_frames, source_fps, fps)
    for number, index in enumerate(indices):
        distances = np.abs(np.arange(num_frames) / source_fps - number / fps)
        assert distances[index] <= distances.min() + 1e-9
    assert abs(len(indices) / fps - num_frames / source_fps) <= 0.5 / source_fps + 1 / fps


@pytest.mark.parametrize("size", [(64, 200), (150, 60), (32, 48), (20, 30)])
def test_frames_are_cropped_around_their_center(size):
    picture = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    # The largest centered box of the shape wanted.
    box_height = min(size[0], round(size[1] * HEIGHT / WIDTH))
    box_width = min(size[1], round(size[0] * WIDTH / HEIGHT))
    top, left = (size[0] - box_height) // 2, (size[1] - box_width) // 2
    cropped = Image.fromarray(picture[top : top + box_height, left : left + box_width])
    expected = np.asarray(cropped.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR))
    pixels = fit_pixels(torch.from_numpy(picture[None]), HEIGHT, WIDTH)
    assert pixels.shape == (1, 3, 1, HEIGHT, WIDTH)
    found = (pixels[0, :, 0].permute(1, 2, 0) + 1) * 127.5
    assert np.abs(found.numpy() - expected).max() <= 1.01  # Pillow rounds twice


# --- prompts -----------------------------------------------------------------------------------------------------


def test_prompts_are_what_the_pipeline_would_embed(pipe, tiny_model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(encode_data, "PLANS_PER_SHARD", 2)
    monkeypatch.setattr(encode_data, "TEXT_BATCH_SIZE", 3)
    prompts = tmp_path / "prompts.jsonl"
    plans = [["a meadow at dawn"], ["rain", "a coast in the snow"], ["a desert"], ["night"]]
    entries = [{"prompt": plan[0]} for plan in plans]
    entries[1] = {"prompts": [["rain", 1.0], ["a coast in the snow", None]]}
    prompts.write_text("\n".join(json.dumps(entry) for entry in entries))

    arguments = (prompts, tiny_model_folder, tmp_path / "out", 3, "cpu")
    report = encode_prompts(*arguments)
    assert (report.items, report.encoded) == (3, 3)
    dataset = PromptDataset(tmp_path / "out", num_chunks=4, chunk_seconds=1.0)
    assert len(dataset) == 3 and dataset.num_prompts == 2
    assert dataset[1]["prompt_of_chunk"].tolist() == [0, 0, 1, 1]
    for item, texts in zip(dataset, plans):
        for row, text in enumerate(texts):
            expected, _ = pipe.encode_prompt(text, do_classifier_free_guidance=False)
            torch.testing.assert_close(item["prompt_embeds"][row], expected[0])
            assert torch.equal(item["prompt_embeds"][row] == 0, expected[0] == 0)

    # Only what is missing is made again; another file or number of prompts is not mixed in.
    (tmp_path / "out" / "prompts_00000.safetensors").unlink()
    assert encode_prompts(*arguments).encoded == 2
    with pytest.raises(DatasetError, match="num_plans=2 instead of 3"):
        encode_prompts(*arguments[:3], 2, "cpu")
    prompts.write_text(prompts.read_text() + "\n")
    with pytest.raises(DatasetError, match="prompts_crc32"):
        encode_prompts(*arguments)


def test_text_file_has_one_prompt_per_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a meadow, 5 | 3\n\n  # a desert\n", encoding="utf-8")
    assert [plan.prompts for plan in read_prompts(path)] == [("a meadow, 5 | 3",), ("# a desert",)]


def test_every_wrong_line_of_the_prompts_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "a meadow"}', '"rain"', '{"prompt": ""}', '{"prompts": []}', '{"prompts": [["rain", -1]]}']
    lines += ['{"prompts": [["rain", null], ["snow", 1]]}', '{"prompt": "rain", "prompts": [["rain", 1]]}', "{"]
    path.write_text("\n".join(lines))
    with pytest.raises(DatasetError) as error:
        read_prompts(path)
    for number in range(2, 9):
        assert f"line {number}: " in str(error.value)
    assert "line 1:" not in str(error.value)


def test_a_file_that_is_no_text_is_named(tmp_path):
    for name, read in (("prompts.txt", read_prompts), ("prompts.jsonl", read_prompts), ("c.jsonl", read_captions)):
        (tmp_path / name).write_bytes(b"\xff\xfea\x00")
        with pytest.raises(DatasetError, match=f"{name} is not UTF-8 text"):
            read(tmp_path / name)


def test_wrong_arguments_are_refused(tiny_model_folder, videos, tmp_path):
    for changes, message in (
        ({"fps": 0.0}, "fps=0"),
        ({"fps": 1e30}, "fps=1e\\+30 must be above 0 and at most 1000"),
        ({"fps": float("nan")}, "fps=nan"),
        ({"height": -16}, "height=-16"),
        ({"width": 16 * 10**9}, "width=16000000000 must be above 0 and at most 8192"),
        ({"min_seconds": 3.0, "max_seconds": 2.0}, "min_seconds <= max_seconds"),
    ):
        with pytest.raises(VidgenError, match=message):
            LatentEncoding(**changes)
    captions = write_captions(tmp_path / "captions.jsonl", ("fast.mp4", "a meadow"))
    with pytest.raises(VidgenError, match="has no model_index.json"):
        encode_videos(videos, captions, str(tmp_path), tmp_path / "out", SHORT)
    with pytest.raises(VidgenError, match="height=20, width=48; both must be multiples of 16"):
        encode_videos(videos, captions, tiny_model_folder, tmp_path / "out", LatentEncoding(height=20))
    with pytest.raises(DatasetError, match="use .txt or .jsonl"):
        encode_prompts(tmp_path / "prompts.csv", tiny_model_folder, tmp_path / "out")
    with pytest.raises(VidgenError, match="limit=0"):
        encode_prompts(tmp_path / "prompts.txt", tiny_model_folder, tmp_path / "out", limit=0)
    assert not (tmp_path / "out").exists()
