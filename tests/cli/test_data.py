"""What would be wrong: a dataset command that training cannot read from, success reported where videos were lost."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from vidgen.data import LatentVideoDataset, PromptDataset, VideoWriter


def test_videos_and_prompts_become_training_data(run, tmp_path, tiny_model_folder):
    (tmp_path / "videos").mkdir()
    with VideoWriter(tmp_path / "videos" / "a.mp4", fps=12) as writer:
        writer.append(np.full((12, 32, 48, 3), 90, np.uint8))
    (tmp_path / "captions.jsonl").write_text('{"video": "a.mp4", "caption": "a meadow"}\n')
    encode = ["data", "encode-latents", "videos", "--captions", "captions.jsonl", "--model", tiny_model_folder]
    encode += ["-o", "clips", "--min-seconds", "0.5", "--max-seconds", "1", "--device", "cpu", "--dtype", "float32"]
    code, out, err = run(*encode)
    assert (code, out) == (0, "clips: 1 in all, 1 encoded now\n"), err
    videos = LatentVideoDataset("clips")
    assert videos.read(0, torch.tensor([2, 0])).shape == (4, 2, 4, 6)

    (tmp_path / "prompts.txt").write_text("a meadow\na coast at night\nrain\n")
    code, out, err = run(
        *("data", "prompts", "prompts.txt", "--model", tiny_model_folder, "-o", "prompts"),
        *("--limit", "2", "--device", "cpu"),
    )
    assert (code, out) == (0, "prompts: 2 in all, 2 encoded now\n"), err
    prompts = PromptDataset("prompts", num_chunks=4, chunk_seconds=1.0)
    assert len(prompts) == 2
    # The clip's caption and the first prompt are the same text.
    torch.testing.assert_close(prompts[0]["prompt_embeds"][0], videos.prompt_embeds(0))

    lines = [{"video": "a.mp4", "caption": "a meadow"}, {"video": "lost.mp4", "caption": "rain"}]
    (tmp_path / "captions.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    code, out, err = run(*encode)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: 1 of 2 videos could not be read")
    code, out, err = run(*encode, "--skip-broken")
    assert (code, out) == (0, "clips: 1 in all, 0 encoded now, 1 left out as broken\n")


@pytest.mark.parametrize("command", ["encode-latents", "prompts"])
def test_commands_have_help(run, command):
    code, out, _ = run("data", command, "--help")
    assert code == 0
    assert "Usage: vidgen data" in out


def test_wrong_input_is_one_line_and_leaves_nothing_behind(run, tmp_path):
    for arguments, message in (
        (["data", "encode-latents", "videos", "--model", "m", "-o", "out"], "--captions"),
        (["data", "encode-latents", "v", "--captions", "c.jsonl", "--model", "m", "-o", "out"], "v is not a folder"),
        (["data", "encode-latents", "v", "--captions", "c", "--model", "m", "-o", "o", "--fps", "0"], "fps=0"),
        (["data", "prompts", "prompts.txt", "--model", "m", "-o", "out"], "prompts.txt is not a file"),
        (["data", "prompts", "prompts.csv", "--model", "m", "-o", "out"], "use .txt or .jsonl"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1
        assert message in err
        assert not list(tmp_path.iterdir())
