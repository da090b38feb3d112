"""What would be wrong: a traceback for a bad argument, work that starts before its output is known to be writable, a
stopped run that can't be continued to the same frames."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

import vidgen
from vidgen.cli import generate as generate_command
from vidgen.cli.main import main
from vidgen.cli.train import RECIPES


def read_video(path):
    from vidgen.data import VideoReader

    with VideoReader(path) as reader:
        return reader[0 : len(reader)]


# --- help and errors ----------------------------------------------------------------------------------------------


def test_help_lists_the_commands(run):
    code, out, _ = run("--help")
    assert code == 0
    for command in ("generate", "convert", "train", "doctor"):
        assert command in out


def test_version(run):
    assert run("--version")[:2] == (0, f"vidgen {vidgen.__version__}\n")


@pytest.mark.parametrize("command", [["generate"], ["convert", "wan-causal"], ["train"], ["doctor"]])
def test_every_command_has_help(run, command):
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "Usage: vidgen" in out


BAD_ARGUMENTS = {
    "unknown command": (["generat"], "generat"),
    "unknown option": (["generate", "a meadow", "--second", "3"], "--second"),
    "no prompt": (["generate"], "either a PROMPT"),
    "prompt and plan": (["generate", "a meadow", "--plan", "plan.txt"], "either a PROMPT"),
    "empty prompt": (["generate", " "], "PROMPT is empty"),
    "plan missing": (["generate", "--plan", "plan.txt"], "plan.txt is not a file"),
    "seconds not a number": (
        ["generate", "a meadow", "--seconds", "long"],
        "'--seconds': Input should be a valid number",
    ),
    "seconds zero": (["generate", "a meadow", "--seconds", "0"], "--seconds 0 must be above 0"),
    "seconds infinite": (["generate", "a meadow", "--seconds", "inf"], "--seconds inf must be above 0"),
    "seconds nan": (["generate", "a meadow", "--seconds", "nan"], "--seconds nan must be above 0"),
    "frames negative": (["generate", "a meadow", "--frames", "-4"], "--frames -4 must be above 0"),
    "two lengths": (["generate", "a meadow", "--frames", "4", "--seconds", "1"], "exclude each other"),
    "two inputs": (["generate", "a meadow", "--image", "a.png", "--video", "a.mp4"], "exclude each other"),
    "image missing": (["generate", "a meadow", "--image", "a.png"], "a.png is not a file"),
    "seed negative": (["generate", "a meadow", "--seed", "-1"], "--seed -1 must be from 0 to"),
    "seed too large": (["generate", "a meadow", "--seed", str(1 << 70)], "must be from 0 to 9223372036854775807"),
    "scale": (["generate", "a meadow", "--scale", "0"], "--scale 0 must be from 1 to 64"),
    "output empty": (["generate", "a meadow", "-o", ""], "--output names no file"),
    "output suffix only": (["generate", "a meadow", "-o", ".mp4"], "must end in .mp4, as video.mp4"),
    "option not a number": (
        ["generate", "a meadow", "--seed", "0", "--memory-option", "slow=abc"],
        "slow='abc'; it must be a whole number",
    ),
    "option not whole": (
        ["generate", "a meadow", "--seed", "0", "--memory-option", "slow=1.5"],
        "slow=1.5; it must be a whole number",
    ),
    "session-every": (["generate", "a meadow", "--session-every", "-1"], "must be 0 or more chunks"),
    "budget": (["generate", "a meadow", "--max-memory-gb", "0"], "--max-memory-gb 0 must be above 0"),
    "output format": (["generate", "a meadow", "-o", "video.avi"], "must end in .mp4, as video.mp4"),
    "output folder": (["generate", "a meadow", "-o", "nowhere/video.mp4"], "folder nowhere doesn't exist"),
    "output name too long": (
        ["generate", "a meadow", "-o", "a" * 300 + ".mp4"],
        "name of --output has 304 bytes; allowed: at most 221",
    ),
    "session name too long": (["generate", "a meadow", "-o", "ä" * 109 + ".mp4"], "has 222 bytes; allowed: at most"),
    "output folder name too long": (
        ["generate", "a meadow", "-o", "a" * 300 + "/video.mp4"],
        "aa/video.mp4: File name too long; choose another one",
    ),
    "output path too long": (
        ["generate", "a meadow", "-o", "a/" * 3000 + "video.mp4"],
        "a/video.mp4: File name too long; choose another one",
    ),
    "resume missing": (["generate", "--resume", "v.mp4.session.safetensors"], "is not a file"),
    "resume with prompt": (["generate", "a meadow", "--resume", "x"], "leave out PROMPT"),
    "resume with seed": (["generate", "--seed", "0", "--resume", "x"], "leave out --seed"),
    "model missing": (["generate", "a meadow", "--model", "./nowhere"], "--model ./nowhere is not a folder"),
    "model not a pipeline": (["generate", "a meadow", "--model", "."], "has no model_index.json"),
    "recipe": (["train", "landscape_va"], "did you mean 'landscape_vae'"),
    "override": (["train", "landscape_vae", "max_steps"], "is not KEY=VALUE"),
    "checkpoint missing": (["convert", "wan-causal", "in.pt", "out"], "in.pt is not a file"),
    "device": (["doctor", "--device", "gpu"], "unknown device 'gpu'"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS.values(), ids=list(BAD_ARGUMENTS))
def test_bad_argument_is_one_line_and_leaves_nothing_behind(run, tmp_path, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err
    assert not list(tmp_path.iterdir())


def test_inputs_that_nothing_can_be_made_of(run, tmp_path):
    Image.new("L", (12_000, 16_000)).save(tmp_path / "huge.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "small.png")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "empty.txt").write_text("# nothing\n")
    start = ["generate", "a meadow", "--seed", "0", "--frames"]
    for arguments, message in (
        ([*start, "4", "--image", "huge.png"], "huge.png can't be read as a picture"),
        ([*start, "1", "--image", "small.png"], "the --image is the first frame"),
        (["generate", "--plan", "binary.txt", "--seed", "0"], "binary.txt is not UTF-8 text"),
        (["generate", "--plan", "empty.txt", "--seed", "0"], "empty.txt holds no prompt"),
        ([*start, "4", "--max-memory-gb", "0.0001"], "No single change is enough"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "") and err.startswith("error: ") and message in err, err


def test_debug_variable_shows_the_traceback(run, monkeypatch):
    monkeypatch.setenv("VIDGEN_DEBUG", "1")
    with pytest.raises(Exception, match="either a PROMPT"):
        run("generate")


def test_convert_refuses_to_write_over_a_folder(run, tmp_path):
    (tmp_path / "in.pt").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept.txt").touch()
    code, _, err = run("convert", "wan-causal", "in.pt", "out")
    assert (code, err) == (2, "error: out exists; choose another folder or remove it\n")


def test_commands_of_other_packages_are_added(run, monkeypatch):
    import typer

    other = typer.Typer()

    @other.command()
    def hello() -> None:
        print("hello from another package")

    class EntryPoint:
        name = "another"

        def load(self):
            return other

    monkeypatch.setattr("vidgen.cli.main.entry_points", lambda group: [EntryPoint()] * (group == "vidgen.commands"))
    assert run("another", "hello") == (0, "hello from another package\n", "")


@pytest.mark.parametrize(("option", "config"), [([], "default"), (["--config", "mine.yaml"], "mine.yaml")])
def test_train_hands_config_and_overrides_to_the_recipe(run, monkeypatch, option, config):
    recorder = type(sys)("recorder")
    recorder.record = lambda *arguments: arguments
    monkeypatch.setitem(sys.modules, "recorder", recorder)
    monkeypatch.setitem(RECIPES, "landscape_vae", ("recorder:record", "default"))
    code, out, _ = run("train", "landscape_vae", "train.max_steps=3", *option)
    assert (code, out) == (0, f"('{config}', ['train.max_steps=3'])\n")


@pytest.mark.parametrize("stop", ["", "stopped at step 7, saved in runs/x"])
def test_a_stopped_training_tells_the_command_that_goes_on(run, monkeypatch, stop):
    def interrupted(*arguments):
        raise KeyboardInterrupt(*([stop] if stop else []))

    recorder = type(sys)("recorder")
    recorder.interrupted = interrupted
    monkeypatch.setitem(sys.modules, "recorder", recorder)
    monkeypatch.setitem(RECIPES, "landscape_vae", ("recorder:interrupted", "default"))
    code, out, err = run("train", "landscape_vae", "crop=[5, 8, 8]", "--config", "my file.yaml")
    again = "vidgen train landscape_vae 'crop=[5, 8, 8]' --config 'my file.yaml'"
    assert (code, out, err) == (130, "", f"{stop or 'stopped'}; go on with: {again}\n")


def test_a_stopped_training_of_scene_graphs_tells_it_too(run, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt("stopped at step 7")

    monkeypatch.setattr("scene_graph.recipes.train_predictor", interrupted)
    code, out, err = run("scene-graph", "train", "predictor", "train.max_steps=9")
    again = "vidgen scene-graph train predictor train.max_steps=9"
    assert (code, out, err) == (130, "", f"stopped at step 7; go on with: {again}\n")


def test_recipes_are_the_training_scripts_and_exist():
    from vidgen.runtime.config import find_config

    scripts = {path.stem for path in (Path(vidgen.__file__).parents[1] / "training").glob("*.py")}
    from scene_graph.cli import RECIPES as SCENE_GRAPH_RECIPES

    # What isn't trained by steps, an index and the folder of all parts, has no script.
    trained = {f"sgg_{name}" for name in SCENE_GRAPH_RECIPES} - {"sgg_index", "sgg_assemble"}
    assert {*RECIPES, *trained} == scripts
    for target, config in [*RECIPES.values(), *SCENE_GRAPH_RECIPES.values()]:
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), target
        assert find_config(config).is_file()


def test_train_reports_a_mistyped_override_in_one_line(run, tmp_path):
    code, _, err = run("train", "landscape_vae", "train.max_step=3")
    assert code == 2
    assert "did you mean 'max_steps'" in err and err.count("\n") == 1


# --- doctor -------------------------------------------------------------------------------------------------------


def test_doctor_reports_what_a_bug_report_needs(run):
    code, out, _ = run("doctor", "--json", "--device", "cpu")
    assert code == 0
    report = json.loads(out)
    assert report["versions"]["vidgen"] == vidgen.__version__
    assert report["attention_backends"]["native"] is None
    assert report["video_backends"]["pyav"] is None
    wan = report["memory_cost"][-1]
    # 60x104 latent cells in 2x2 patches; keys, values and rotated keys of 12 heads x 128 channels x 30 layers in bf16,
    # without the 3 slots of the chunk being made.
    assert wan["tokens_per_slot"] == 1560
    assert wan["bytes"] == (21 - 3) * 1560 * 12 * 128 * 30 * 3 * 2


def test_doctor_prints_tables(run):
    code, out, _ = run("doctor", "--device", "cpu")
    assert code == 0
    for title in (
        "Versions",
        "Machine",
        "Attention backends",
        "Video reading",
        "slow-fast memory costs",
    ):
        assert title in out


# --- generate -----------------------------------------------------------------------------------------------------


def test_generates_a_video_of_the_asked_length(run, tiny_model_folder, tmp_path):
    code, out, err = run(
        "generate", "a meadow", "--model", tiny_model_folder, "--seconds", 2, "--seed", 1, "--scale", 2
    )
    assert code == 0, err
    assert out == ""
    assert "24 frames" in err and "real time" in err and "estimated" in err
    assert read_video(tmp_path / "video.mp4").shape == (24, 64, 96, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["video.mp4"]


def test_same_seed_same_video_other_seed_other_video(run, tiny_model_folder, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        code, _, err = run(
            "generate", "a meadow", "--model", tiny_model_folder, "--frames", 9, "--seed", seed, "-o", f"{name}.mp4"
        )
        assert code == 0, err
    first, second, third = (read_video(tmp_path / f"{name}.mp4") for name in "abc")
    assert np.array_equal(first, second)
    assert not np.array_equal(first, third)


def test_unset_seed_is_printed_and_repeats_the_video(run, tiny_model_folder, tmp_path):
    common = ("generate", "a meadow", "--model", tiny_model_folder, "--frames", 9)
    _, _, err = run(*common, "-o", "a.mp4")
    (seed,) = [line.removeprefix("seed ") for line in err.splitlines() if line.startswith("seed ")]
    assert run(*common, "-o", "b.mp4", "--seed", seed)[0] == 0
    assert np.array_equal(read_video(tmp_path / "a.mp4"), read_video(tmp_path / "b.mp4"))


def test_raw_frames_on_stdout_are_the_pipelines_frames(capfdbinary, tiny_model_folder):
    import torch

    from vidgen.pipelines import ContextForcingPipeline

    capfdbinary.readouterr()
    code = main(["generate", "a meadow", "--model", tiny_model_folder, "--frames", "21", "--seed", "5", "-o", "-"])
    assert code == 0
    frames = np.frombuffer(capfdbinary.readouterr().out, np.uint8).reshape(21, 32, 48, 3)
    pipe = ContextForcingPipeline.from_pretrained(tiny_model_folder)
    session = pipe.session("a meadow", num_frames=21, generator=torch.Generator().manual_seed(5))
    assert np.array_equal(frames, np.concatenate(list(session)))


def test_stream_prints_a_line_per_chunk(run, tiny_model_folder):
    code, out, _ = run("generate", "a meadow", "--model", tiny_model_folder, "--frames", 21, "--stream")
    assert code == 0
    lines = out.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["chunk 0: frames 0-8", "chunk 1: frames 9-20"]


def test_plan_file_gives_length_and_prompts(run, tiny_model_folder, tmp_path):
    (tmp_path / "plan.txt").write_text("1 | a meadow\n1.5 | a desert\n")
    code, _, err = run("generate", "--plan", "plan.txt", "--model", tiny_model_folder)
    assert code == 0, err
    assert len(read_video(tmp_path / "video.mp4")) == 30


def test_fps_counts_in_file_and_length(run, tiny_model_folder, tmp_path):
    from vidgen.data import VideoReader

    code, _, err = run("generate", "a meadow", "--model", tiny_model_folder, "--seconds", 1, "--fps", 20)
    assert code == 0, err
    with VideoReader(tmp_path / "video.mp4") as reader:
        assert (len(reader), reader.fps) == (20, 20)


def test_image_and_video_inputs(run, tiny_model_folder, tmp_path):
    from PIL import Image

    Image.new("RGB", (48, 32), (200, 30, 30)).save(tmp_path / "red.png")
    common = ("--model", tiny_model_folder, "--frames", 21)
    code, _, err = run("generate", "a meadow", "--image", "red.png", *common, "-o", "a.mp4")
    assert code == 0, err
    code, _, err = run("generate", "a meadow", "--video", "a.mp4", *common, "-o", "b.mp4")
    assert code == 0, err
    assert len(read_video(tmp_path / "a.mp4")) == len(read_video(tmp_path / "b.mp4")) == 21


def test_unreadable_image_and_video_are_named(run, tiny_model_folder, tmp_path):
    (tmp_path / "noise.bin").write_bytes(b"\x00\x01" * 50)
    for option in ("--image", "--video"):
        code, _, err = run("generate", "a meadow", option, "noise.bin", "--model", tiny_model_folder)
        assert code == 2
        assert "noise.bin" in err.splitlines()[-1]


def test_memory_options_reach_the_memory(run, tiny_model_folder, monkeypatch):
    seen = []
    monkeypatch.setattr(generate_command, "_print_budget", lambda session: seen.append(session.memory))
    common = ("generate", "a meadow", "--model", tiny_model_folder, "--frames", 9)
    assert (
        run(*common, "--memory", "slow_fast", "--memory-option", "slow=5", "--memory-option", "kv_dtype=null")[0] == 0
    )
    assert seen[0].config.slow == 5


@pytest.mark.parametrize(("tau", "kept"), [(-1, 0), (1, "all")])
def test_what_the_slow_memory_took_in_is_told(run, tiny_model_folder, tau, kept):
    memory = ("--memory-option", "slow=2", "--memory-option", f"tau={tau}")
    code, _, err = run("generate", "a meadow", "--model", tiny_model_folder, "--seconds", "12", *memory)
    assert code == 0
    taken, judged = map(int, re.search(r"memory: (\d+) of (\d+) frames judged", err).groups())
    assert judged > 2 and taken == (judged if kept == "all" else 0)
    assert ("warning: the slow memory still holds the opening alone" in err) == (taken == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "slow_fst"], "did you mean 'slow_fast'"),
        (["--memory", "slow_fast", "--memory-option", "slwo=3"], "slwo"),
        (["--memory", "slow_fast", "--memory-option", "slow"], "is not KEY=VALUE"),
        (["--prompt-switch", "kep"], "did you mean 'keep'"),
        (["--attention", "nativ"], "did you mean 'native'"),
        (["--device", "cda"], "unknown device 'cda'"),
        (["--dtype", "float12"], "float12"),
        (["--height", "33"], "33"),
        (["--guidance", "7"], "guidance_scale"),
        (["--max-memory-gb", "0.000001"], "limit"),
    ],
)
def test_what_the_model_refuses_is_one_line(run, tiny_model_folder, tmp_path, options, message):
    code, _, err = run("generate", "a meadow", "--model", tiny_model_folder, "--seed", 0, "--frames", 9, *options)
    assert code == 2
    assert err.splitlines()[-1].startswith("error: ")
    assert message.lower() in err.lower()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", [("--seconds", 1e30), ("--seconds", 1e9), ("--frames", 10**9)])
def test_a_length_without_end_is_refused_with_the_longest_that_is_allowed(run, tiny_model_folder, tmp_path, option):
    code, _, err = run("generate", "a meadow", "--model", tiny_model_folder, "--seed", 0, *option)
    assert code == 2
    assert "10,000,000" in err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_longest_name_of_an_output_can_be_stopped_and_is_named_in_full(run, tiny_model_folder, tmp_path, monkeypatch):
    name = "a" * 217 + ".mp4"
    stop_after(monkeypatch, chunks=1, kill=False)
    code, _, err = run("generate", "a meadow", "--model", tiny_model_folder, "--seed", 0, "--frames", 60, "-o", name)
    assert code == 130 and name in err
    assert (tmp_path / f"{name}.session.safetensors").is_file()


def test_full_memory_of_three_hours_is_refused_with_a_remedy(run, tiny_model_folder):
    code, _, err = run(
        "generate", "a meadow", "--model", tiny_model_folder, "--seconds", 3 * 3600, "--memory", "full",
        "--max-memory-gb", "0.05",
    )  # fmt: skip
    assert code == 2
    assert "slow_fast" in err


# --- outputs, stopping and resuming -------------------------------------------------------------------------------


def test_existing_video_is_kept_without_force(run, tiny_model_folder, tmp_path):
    (tmp_path / "video.mp4").write_bytes(b"precious")
    common = ("generate", "a meadow", "--model", tiny_model_folder, "--frames", 9)
    code, _, err = run(*common)
    assert code == 2
    assert "video.mp4 exists" in err and "--force" in err
    assert (tmp_path / "video.mp4").read_bytes() == b"precious"
    assert run(*common, "--force")[0] == 0
    assert len(read_video(tmp_path / "video.mp4")) == 9


def test_unwritable_folder_is_found_before_the_model_is_loaded(run, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(generate_command.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(generate_command, "load_pipeline", lambda *_: pytest.fail("the model was loaded"))
    code, _, err = run("generate", "a meadow")
    assert code == 2
    assert err == f"error: can't write in folder {tmp_path}: Permission denied\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any folder")
def test_read_only_folder(run, tmp_path):
    tmp_path.chmod(0o555)
    code, _, err = run("generate", "a meadow")
    tmp_path.chmod(0o755)
    assert (code, "can't write in folder" in err) == (2, True)


@pytest.mark.parametrize("option", ["", "--force", "--resume"])
def test_second_run_on_one_output_is_refused_before_the_model_is_loaded(run, tmp_path, monkeypatch, option):
    from vidgen.data import VideoWriter

    monkeypatch.setattr(generate_command, "load_pipeline", lambda *_: pytest.fail("the model was loaded"))
    session_file = tmp_path / "video.mp4.session.safetensors"
    with VideoWriter(tmp_path / "video.mp4", fps=12, height=32, width=48) as other:
        other.append(np.zeros((4, 32, 48, 3), np.uint8))
        session_file.touch()  # the other run saves its session now and then; it hasn't stopped
        arguments = [option, session_file] if option == "--resume" else ["a meadow", *filter(None, [option])]
        code, _, err = run("generate", *arguments)
        assert code == 2
        assert err.startswith("error: another run is writing") and err.count("\n") == 1
        other.append(np.zeros((4, 32, 48, 3), np.uint8))
    assert session_file.exists()
    assert len(read_video(tmp_path / "video.mp4")) == 8


def test_run_that_cannot_start_leaves_a_stopped_one_alone(run, tmp_path):
    partial, session = tmp_path / "video.partial.mp4", tmp_path / "video.mp4.session.safetensors"
    partial.write_bytes(b"frames")
    session.write_bytes(b"state")
    for arguments in (["a meadow", "--force", "--model", "./nowhere"], ["--resume", session, "--model", "./nowhere"]):
        code, _, err = run("generate", *arguments)
        assert (code, err) == (2, "error: --model ./nowhere is not a folder\n")
        assert (partial.read_bytes(), session.read_bytes()) == (b"frames", b"state")


@pytest.mark.parametrize("damage", ["weights", "config", "missing"])
def test_damaged_model_folder_is_one_line(run, tiny_model_folder, tmp_path, damage):
    import shutil

    shutil.copytree(tiny_model_folder, tmp_path / "model")
    weights = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    if damage == "weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif damage == "config":
        (tmp_path / "model" / "transformer" / "config.json").write_text("{")
    else:
        weights.unlink()
    code, _, err = run("generate", "a meadow", "--model", "model")
    assert code == 2
    assert err.splitlines()[-1].startswith("error: can't load the model model: ")
    assert "Traceback" not in err


def stop_after(monkeypatch, chunks, kill):
    """Makes the run end in its `chunks`-th chunk: by a signal, or as if the process were killed."""
    from vidgen.pipelines import GenerationSession

    step = GenerationSession.step

    def stopping(session):
        if session.chunk_index == chunks:
            if kill:
                raise SystemExit("killed")
            os.kill(os.getpid(), signal.SIGTERM)
        return step(session)

    monkeypatch.setattr(GenerationSession, "step", stopping)


@pytest.mark.parametrize("kill", [False, True], ids=["sigterm", "killed"])
def test_stopped_run_resumes_to_the_same_file(run, tiny_model_folder, tmp_path, monkeypatch, kill):
    common = ("--model", tiny_model_folder)
    request = ("generate", "a meadow", *common, "--seconds", 4, "--seed", 7, "--session-every", 2)
    assert run(*request, "-o", "whole.mp4")[0] == 0

    with monkeypatch.context() as patch:
        stop_after(patch, chunks=3, kill=kill)
        if kill:
            with pytest.raises(SystemExit):
                run(*request, "-o", "part.mp4")
        else:
            code, _, err = run(*request, "-o", "part.mp4")
            assert code == 130
            assert "go on with: vidgen generate --resume part.mp4.session.safetensors" in err
    assert not (tmp_path / "part.mp4").exists()
    assert len(read_video(tmp_path / "part.partial.mp4")) == 9 + 2 * 12, "the partial file must play"

    code, _, err = run(*request, "-o", "part.mp4")
    assert code == 2
    assert "has a stopped run; continue it with --resume" in err

    code, _, err = run("generate", "--resume", "part.mp4.session.safetensors", *common)
    assert code == 0, err
    assert (tmp_path / "part.mp4").read_bytes() == (tmp_path / "whole.mp4").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.mp4", "whole.mp4"]


def test_interrupt_from_the_keyboard_in_a_real_process(tiny_model_folder, tmp_path):
    command = [sys.executable, "-m", "vidgen.cli.main", "generate", "a meadow", "--model", tiny_model_folder]
    process = subprocess.Popen(
        [*command, "--seconds", "10000", "--stream", "-o", "long.mp4"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    guard = threading.Timer(120, process.kill)
    guard.start()
    assert process.stdout.readline().startswith("chunk 0")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    guard.cancel()
    assert process.returncode == 130
    assert "Traceback" not in err
    with safe_open(tmp_path / "long.mp4.session.safetensors", "pt") as file:
        emitted = json.loads(file.metadata()["vidgen_session"])["state"]["num_frames_emitted"]
    assert len(read_video(tmp_path / "long.partial.mp4")) == emitted > 0


def test_session_of_another_model_is_refused(run, tiny_model_folder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, chunks=1, kill=False)
        assert run("generate", "a meadow", "--model", tiny_model_folder, "--seconds", 5)[0] == 130
    import shutil

    import torch

    from vidgen.models.causal_wan import CausalWanTransformer3DModel

    shutil.copytree(tiny_model_folder, tmp_path / "other")
    transformer = CausalWanTransformer3DModel.from_pretrained(tmp_path / "other" / "transformer")
    with torch.no_grad():
        transformer.proj_out.bias.add_(1)
    transformer.save_pretrained(tmp_path / "other" / "transformer")
    code, _, err = run("generate", "--resume", "video.mp4.session.safetensors", "--model", "other")
    assert code == 2
    assert "another transformer" in err
    assert (tmp_path / "video.partial.mp4").exists()


@pytest.mark.parametrize("content", [b"", b"not a session"])
def test_damaged_session_file_is_one_line(run, tiny_model_folder, tmp_path, content):
    (tmp_path / "video.mp4.session.safetensors").write_bytes(content)
    code, _, err = run("generate", "--resume", "video.mp4.session.safetensors", "--model", tiny_model_folder)
    assert code == 2
    assert err.splitlines()[-1].startswith("error: ") and "video.mp4.session.safetensors" in err


def test_embedded_model_makes_two_seconds(run, tmp_path):
    from vidgen.runtime.assets import find_asset

    assert Path(find_asset(), "model_index.json").is_file()
    started = time.monotonic()
    code, _, err = run("generate", "a meadow at dawn", "--seconds", 2, "--seed", 0)
    assert code == 0, err
    assert time.monotonic() - started < 60
    frames = read_video(tmp_path / "video.mp4")
    assert frames.shape[0] == 24
    assert frames.shape[1] >= generate_command.MIN_DISPLAY_HEIGHT
    assert frames.std() > 10, "a blank picture"


def test_a_missing_asset_is_compared_with_assets_only():
    from vidgen.runtime.assets import AssetError, find_asset

    with pytest.raises(AssetError, match=r"did you mean 'landscape-tiny'\? allowed: ") as error:
        find_asset("landscape-tinyy")
    assert "README" not in str(error.value)
