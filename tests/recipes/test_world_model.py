"""The recipe of a world model: from episodes to a folder that plays, resumed, with either encoder of frames."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from vidgen.controls import camera_centers, split_cameras
from vidgen.data import EpisodeDataset, make_world, record
from vidgen.models.frame_autoencoder import decode_frames, encode_frames
from vidgen.models.world_dit import WorldDiT
from vidgen.pipelines import WorldModelPipeline, load_starts
from vidgen.recipes import world_model
from vidgen.recipes.world_model import LatentWindows
from vidgen.runtime.checkpoint import load_safetensors
from vidgen.runtime.config import find_config, load_config
from vidgen.runtime.errors import ConfigError
from vidgen.train.autoencoder import to_model_pixels
from vidgen.train.block_code import BlockCode

SHORT = (
    "train.batch_size=2",
    "train.max_minutes=null",
    "train.checkpoint_every=1",
    "train.validate_every=0",
    "train.log_every=1",
)
BY_STEPS = "train.optimizers.transformer.schedule_by=steps"
NETWORK = (
    "new.num_attention_heads=2",
    "new.attention_head_dim=16",
    "new.rope_dims=[4,6,6]",
    "new.num_layers=1",
    "new.window=4",
    "new.patch_size=[1,1]",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes of RoomWorld at 16 px, a toy autoencoder, DF, LIVE from it, and the folder."""
    root = tmp_path_factory.mktemp("runs")
    world = make_world("room", 16)
    for split, count in (("train", 3), ("validation", 2)):
        record(world, root / "episodes", count, 12, split)
    episodes = f"episodes={root}/episodes"
    world_model.train_frame_autoencoder(
        "live/vizdoom64_autoencoder",
        [
            *SHORT,
            episodes,
            f"train.output_dir={root}/autoencoder",
            "train.max_steps=2",
            "train.optimizers.vae.schedule_by=steps",
            "model.block_out_channels=[4,4]",
            "model.down_block_types=[DownEncoderBlock2D,DownEncoderBlock2D]",
            "model.up_block_types=[UpDecoderBlock2D,UpDecoderBlock2D]",
            "model.latent_channels=4",
            "model.norm_num_groups=2",
            "code_frames=20",
        ],
    )
    data = (
        f"episodes.root={root}/episodes",
        f"episodes.code={root}/autoencoder/code.safetensors",
        "compile=false",
        "validation_windows=2",
        "units=[0.12]",
    )
    world_model.train_world_model(
        "live/vizdoom64_df", [*SHORT, *data, *NETWORK, BY_STEPS, "train.max_steps=2", f"train.output_dir={root}/df"]
    )
    world_model.train_world_model(
        "live/vizdoom64_live",
        [
            *SHORT,
            *data,
            f"pretrained={root}/df/weights/transformer",
            "rollout.steps=2",
            "curriculum=[{p: 2}]",
            "train.max_steps=3",
            "train.validate_every=1",
            f"train.output_dir={root}/live",
        ],
    )
    world_model.train_world_model(
        "live/vizdoom64_tf",
        [
            *SHORT,
            *data,
            BY_STEPS,
            f"pretrained={root}/df/weights/transformer",
            "train.max_steps=2",
            f"train.output_dir={root}/tf",
        ],
    )
    world_model.assemble_world_model(
        "live/vizdoom64_assemble",
        [
            f"output_dir={root}/model",
            f"vae={root}/autoencoder",
            f"transformer=[{root}/df, {root}/live]",
            f"baselines=[{root}/tf, {root}/df]",
            f"episodes={root}/episodes",
            "num_starts=2",
            "start_frames=2",
        ],
    )
    return root


def test_the_folder_plays_the_weights_of_the_last_stage(runs: Path):
    pipeline = WorldModelPipeline.from_pretrained(runs / "model")
    trained = WorldDiT.from_pretrained(runs / "live/weights/transformer")
    assert trained.config.forcing == "live"
    for name, value in pipeline.transformer.state_dict().items():
        torch.testing.assert_close(value, trained.state_dict()[name].half().float(), msg=name)
    frames, controls = load_starts(runs / "model", 1)
    session = pipeline.open_session(frames, controls)
    assert session.context_sigma == 0.15  # and not the next-to-last level of 4 steps, 0.5
    assert frames.shape == (2, 16, 16, 3) and controls.shape == (2, 16)
    assert session.step(["forward"]).shape == (16, 16, 3)
    card = (runs / "model/README.md").read_text()
    assert f"| {runs.name}/live | 3 |" in card and "forward, left, turn left" in card


def test_baselines_lie_beside_the_model_and_play_the_same_start(runs: Path):
    pipeline = WorldModelPipeline.from_pretrained(runs / "model")
    baselines = pipeline.baselines(runs / "model")
    assert set(baselines) == {"teacher_forcing", "diffusion_forcing"}
    frames, controls = load_starts(runs / "model", 0)
    sigmas = {"teacher_forcing": 0.0, "diffusion_forcing": 0.15}
    for run, (forcing, baseline) in zip(("df", "tf"), sorted(baselines.items()), strict=True):
        trained = WorldDiT.from_pretrained(runs / run / "weights/transformer").state_dict()
        for name, value in baseline.transformer.state_dict().items():
            torch.testing.assert_close(value, trained[name].half().float(), msg=name)
        assert baseline.vae is pipeline.vae and baseline.config.fps == pipeline.config.fps
        session = baseline.open_session(frames, controls)
        assert session.context_sigma == sigmas[forcing]
        assert session.step(["forward"]).shape == (16, 16, 3)
    assert f"| {runs.name}/tf | 2 |" in (runs / "model/README.md").read_text()
    assert pipeline.baselines(runs) == {}


def test_baselines_need_an_objective_of_their_own_and_the_same_controls(runs: Path, tmp_path: Path):
    def assemble(baselines: str) -> None:
        options = {"output_dir": tmp_path / "model", "vae": runs / "autoencoder", "episodes": runs / "episodes"}
        options |= {"transformer": f"[{runs}/df, {runs}/live]", "baselines": baselines}
        world_model.assemble_world_model(
            "live/vizdoom64_assemble", [f"{key}={value}" for key, value in options.items()]
        )

    with pytest.raises(ConfigError, match="one of each objective"):
        assemble(f"[{runs}/df, {runs}/df]")
    with pytest.raises(ConfigError, match="nowhere"):
        assemble(f"[{runs}/nowhere]")
    shutil.copytree(runs / "tf", tmp_path / "tf")
    path = tmp_path / "tf/controls.json"
    path.write_text(path.read_text().replace("12.0", "13.0").replace("0.12", "0.13"))
    with pytest.raises(ConfigError, match="other controls"):
        assemble(f"[{tmp_path}/tf]")
    assert not (tmp_path / "model").exists()


def test_keys_lead_along_the_floor_of_the_recordings(runs: Path):
    pipeline = WorldModelPipeline.from_pretrained(runs / "model")
    floor = pipeline.control_encoder.walk.floor
    episodes = EpisodeDataset(runs / "episodes", "train", 1)
    places = np.concatenate([episodes.poses(index)[:, :2] for index in range(len(episodes.episodes))])
    assert all(floor.is_free(*place) for place in places)
    area = sum(row.count(".") for row in floor.rows) * floor.cell**2
    assert floor.cell == 0.12 and area <= len(places) * floor.cell**2
    # A start is of another walk, so it may stand beside that floor; whoever is on it stays there.
    session = pipeline.open_session(episodes.frames(0, [0]), episodes_cameras(runs, [0]))
    for _ in range(30):
        session.step(["forward"])
    camera = session.rows[0].places[-1]
    x, y, _ = camera_centers(*split_cameras(camera)[1:]).tolist()
    assert floor.is_free(x, y)


def episodes_cameras(runs: Path, frame_ids: list[int]) -> torch.Tensor:
    return EpisodeDataset(runs / "episodes", "train", 1, controls="cameras").controls(0, np.array(frame_ids))


def test_scenes_of_their_own_share_no_coordinates(runs: Path, tmp_path: Path):
    record(make_world("room", 16), tmp_path / "episodes", 2, 6, "train", 2)
    record(make_world("room", 16), tmp_path / "episodes", 1, 6, "validation")
    settings = [
        f"episodes.root={tmp_path}/episodes",
        f"episodes.code={runs}/autoencoder/code.safetensors",
        "new.window=4",
        f"train.output_dir={tmp_path}/df",
    ]
    with pytest.raises(ConfigError, match="several scenes"):
        world_model.train_world_model("live/vizdoom64_df", settings)


def test_starts_are_the_windows_in_which_most_is_seen(runs: Path):
    windows = EpisodeDataset(runs / "episodes", "validation", 2)
    spread = [window["frames"].double().std(dim=(1, 2)).mean().item() for window in windows]
    half = len(windows) // 2
    for index, part in enumerate((range(half), range(half, len(windows)))):
        frames, _ = load_starts(runs / "model", index)
        assert np.array_equal(frames, windows[max(part, key=lambda place: spread[place])]["frames"])
    with pytest.raises(ConfigError, match="num_starts=99"):
        world_model._telling_windows(windows, 99)


def test_live_starts_from_the_base_and_moves_it(runs: Path):
    rows = [json.loads(line) for line in (runs / "live/metrics.jsonl").read_text().splitlines()]
    assert {row["metrics"]["prompt_frames"] for row in rows if "metrics" in row} == {2.0}
    base, live = (WorldDiT.from_pretrained(runs / name / "weights/transformer") for name in ("df", "live"))
    changed = [not torch.equal(value, live.state_dict()[name]) for name, value in base.state_dict().items()]
    assert any(changed)
    assert base.config.control_type == "map" and base.config.control_frame == "world"


def test_a_longer_run_resumes(runs: Path):
    data = (f"episodes.root={runs}/episodes", f"episodes.code={runs}/autoencoder/code.safetensors", "compile=false")
    settings = [*SHORT, *data, *NETWORK, BY_STEPS, "validation_windows=0", "units=[0.12]"]
    for folder, steps in (("whole", (4,)), ("parts", (2, 4))):
        for count in steps:
            world_model.train_world_model(
                "live/vizdoom64_df",
                [
                    *settings,
                    f"train.max_steps={count}",
                    f"train.output_dir={runs}/{folder}",
                    "train.optimizers.transformer.schedule=constant",
                ],
            )
    whole, parts = (
        load_safetensors(next((runs / name / "weights/transformer").glob("*.safetensors")))[0]
        for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.slow
def test_of_two_processes_one_writes_the_code_and_both_train_towards_it(runs: Path, run_two_processes, tmp_path: Path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys; from vidgen.recipes import world_model; from vidgen.train.block_code import BlockCode\n"
        "save, rank = BlockCode.save, os.environ['RANK']\n"
        "BlockCode.save = lambda code, path: (print(f'code by {rank};'), save(code, path))\n"
        "write = world_model.write_controls\n"
        "world_model.write_controls = lambda *given: (print(f'controls by {rank};'), write(*given))\n"
        "world_model.train_frame_autoencoder('live/vizdoom64_autoencoder', sys.argv[1].split('|'))\n"
        "world_model.train_world_model('live/vizdoom64_df', sys.argv[2].split('|'))\n"
    )
    toy = (
        f"episodes={runs}/episodes", f"train.output_dir={tmp_path}/vae", "train.max_steps=1", "code_frames=20",
        "train.optimizers.vae.schedule_by=steps", "model.block_out_channels=[4,4]", "model.latent_channels=4",
        "model.down_block_types=[DownEncoderBlock2D,DownEncoderBlock2D]", "model.norm_num_groups=2",
        "model.up_block_types=[UpDecoderBlock2D,UpDecoderBlock2D]",
    )  # fmt: skip
    world = (
        *NETWORK, BY_STEPS, f"episodes.root={runs}/episodes", f"episodes.code={tmp_path}/vae/code.safetensors",
        "compile=false", "units=[0.12]", "validation_windows=0", "train.max_steps=1",
        f"train.output_dir={tmp_path}/df",
    )  # fmt: skip
    output = run_two_processes(script, "|".join([*SHORT, *toy]), "|".join([*SHORT, *world]))
    assert output.count("code by 0;") == output.count("controls by 0;") == 1 and " by 1;" not in output
    assert not (tmp_path / "vae" / "run.lock").exists()


def test_windows_hold_the_code_of_the_recorded_frames(runs: Path):
    code = BlockCode.load(runs / "autoencoder/code.safetensors")
    episodes = EpisodeDataset(runs / "episodes", window=4, num_sparse=1)
    windows = LatentWindows(episodes, code, seed=0)
    window, item = windows.window(5), episodes[5]
    expected = code.encode(to_model_pixels(item["frames"][None]))[0]
    torch.testing.assert_close(window["latents"], expected, atol=2e-3, rtol=2e-3)  # kept in float16
    assert torch.equal(window["controls"], item["controls"])
    one, again, other = (windows.batch(step, 0, 1, 2)["latents"] for step in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_frames_go_through_an_autoencoder_where_there_is_no_code(runs: Path):
    settings = [
        *SHORT, *NETWORK, BY_STEPS, f"episodes.root={runs}/episodes", "episodes.code=null",
        f"episodes.vae={runs}/autoencoder/weights/vae", "episodes.controls=cameras", "compile=false",
        "units=[1.0]", "train.max_steps=1", "validation_windows=2", f"train.output_dir={runs}/cameras",
    ]  # fmt: skip
    world_model.train_world_model("live/room64_df", settings)
    transformer = WorldDiT.from_pretrained(runs / "cameras/weights/transformer")
    assert transformer.config.control_frame == "window" and transformer.config.in_channels == 4
    controls = json.loads((runs / "cameras/controls.json").read_text())["controls"]
    assert controls["kind"] == "pose"


def test_latents_are_shifted_and_scaled_means_and_come_back():
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=2,
        scaling_factor=0.5,
        shift_factor=0.25,
    ).eval()
    frames = torch.randint(0, 256, (2, 3, 8, 8, 3), dtype=torch.uint8)
    latents = encode_frames(vae, frames)
    with torch.no_grad():
        mean = vae.encode(frames[1, 2].permute(2, 0, 1)[None] / 127.5 - 1).latent_dist.mean[0]
        picture = vae.decode(mean[None]).sample[0].permute(1, 2, 0)
    torch.testing.assert_close(latents[1, :, 2], (mean - 0.25) * 0.5)
    expected = ((picture.clamp(-1, 1) + 1) * 127.5).round()
    assert (decode_frames(vae, latents)[1, 2].float() - expected).abs().max() <= 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective=lives", "did you mean 'live'"),
        ("pretrained=somewhere", "either `new` or `pretrained`"),
        ("episodes.vae=somewhere", "exactly one of code, vae"),
        ("episodes.code=nowhere.safetensors", "nowhere.safetensors does not exist; .* the recipe frame_autoencoder"),
    ],
)
def test_wrong_settings_are_named(override: str, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        world_model.train_world_model("live/vizdoom64_df", [override, f"train.output_dir={tmp_path}"])


RECIPES = {
    "autoencoder": world_model.FrameAutoencoderRecipe,
    "assemble": world_model.AssembleWorldModelRecipe,
    "df": world_model.WorldModelRecipe,
    "live": world_model.WorldModelRecipe,
    "tf": world_model.WorldModelRecipe,
}


@pytest.mark.parametrize("path", sorted(find_config("live/vizdoom64_df").parent.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_is_one_of_its_recipe(path: Path):
    stage = path.stem.rpartition("_")[2]
    config = load_config(RECIPES[stage], str(path), [])
    if stage in ("df", "live", "tf"):
        window = {"re10k": 32, "vizdoom64": 8}.get(path.stem.partition("_")[0], 16)
        assert config.objective == {"df": "diffusion_forcing", "live": "live", "tf": "teacher_forcing"}[stage]
        assert config.new is None or config.new["window"] == window
        assert all(window % p == 0 for part in config.curriculum or [] for p in part.weights)
