"""What would be wrong: an environment that gymnasium refuses, a seed that doesn't fix a rollout, an action that steers
another way than its name says, a usual training loop that doesn't run."""

from __future__ import annotations

import random
import re
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("gymnasium", reason="needs gymnasium (extra: envs)")

import gymnasium
from gymnasium.utils.env_checker import check_env
from gymnasium.utils.seeding import np_random
from torch import nn

import vidgen.envs
from vidgen.controls import (
    CAMERA_SPEC,
    ActionColumn,
    ActionSpec,
    ButtonControls,
    ControlEncoder,
    FloorPlan,
    PoseControls,
    Walk,
    walking_cameras,
)
from vidgen.controls import planar_delta_spec as delta_spec
from vidgen.data import EpisodeDataset, record
from vidgen.envs import RewardHead, WorldModelEnv
from vidgen.envs.rollouts import Actions, Starts
from vidgen.pipelines.play import STARTS_NAME
from vidgen.runtime.checkpoint import save_safetensors
from vidgen.runtime.errors import VidgenError
from vidgen.worlds.room import RoomWorld


def rollout(env: gymnasium.Env, actions: list[Any], seed: int | None = None, **options: Any) -> np.ndarray:
    frames = [env.reset(seed=seed, options=options)[0]]
    return np.stack(frames + [env.step(action)[0] for action in actions])


@pytest.mark.parametrize("action_space", ["discrete", "box"])
@pytest.mark.parametrize("cache", ["frame", "rolling"])
def test_gymnasium_accepts_the_environment(pipe, starts, action_space: str, cache: str):
    arguments = {"pipeline": pipe, "episodes": starts, "action_space": action_space, "cache": cache}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # Columns are in the units of the data, so that a rollout can be compared with it.
        warnings.filterwarnings("ignore", message=".*symmetric and normalized.*")
        # As registered: the checks of render modes and of closing twice need a spec.
        check_env(gymnasium.make("vidgen/WorldModel-v0", **arguments).unwrapped)


def test_equal_seeds_and_actions_give_equal_frames(pipe, starts):
    env = WorldModelEnv(pipe, starts)
    first = rollout(env, [1, 2, 1, 0, 0, 2], seed=7)
    np.testing.assert_array_equal(rollout(WorldModelEnv(pipe, starts), [1, 2, 1, 0, 0, 2], seed=7), first)
    np.testing.assert_array_equal(rollout(env, [1, 2, 1, 0, 0, 2], seed=7), first)
    # The second rollout after a seed has its own start and noise.
    assert not np.array_equal(rollout(env, [1, 2, 1, 0, 0, 2]), first)
    assert not np.array_equal(rollout(env, [2, 2, 1, 0, 0, 2], seed=7)[1], first[1])
    fixed = [rollout(env, [1], seed=seed, prompt=3) for seed in (7, 8)]
    np.testing.assert_array_equal(fixed[0][0], fixed[1][0])
    assert not np.array_equal(fixed[0][1], fixed[1][1])


def test_a_rollout_is_what_the_pipeline_makes_of_the_same_start_and_controls(pipe, starts):
    generator, _ = np_random(7)
    seed, start = int(generator.integers(2**62)), int(generator.integers(5))
    steered = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0, 0, 0.4], [0.5, 0, 0]], dtype=torch.float64)
    controls = torch.cat([torch.from_numpy(starts["controls"][start]), steered])
    expected = pipe(starts["frames"][start], controls, seed=[seed]).frames[1:]
    discrete = WorldModelEnv(pipe, starts)
    assert discrete.action_names == ("none", "forward", "turn left")
    np.testing.assert_array_equal(rollout(discrete, [0, 1, 2, 1], seed=7), expected)
    box = WorldModelEnv(pipe, starts, action_space="box")
    assert np.abs(rollout(box, list(steered.float().numpy()), seed=7).astype(int) - expected).max() <= 1


def test_a_prompt_is_an_episode_a_frame_or_frames_with_controls(pipe, starts):
    env = WorldModelEnv(pipe, starts)
    by_number = rollout(env, [1, 1], seed=1, prompt=4)
    np.testing.assert_array_equal(by_number[0], starts["frames"][4, -1])
    pair = (starts["frames"][4], starts["controls"][4])
    np.testing.assert_array_equal(rollout(env, [1, 1], seed=1, prompt=pair), by_number)
    single = rollout(env, [1, 1], seed=1, prompt=starts["frames"][4, -1])
    np.testing.assert_array_equal(single[0], by_number[0])
    assert not np.array_equal(single[1], by_number[1])  # it knows one frame less


class Episodes:
    """As `EpisodeDataset` has them: windows of every second frame of the episodes 3 and 8, 7 and 9 frames long."""

    def __init__(self) -> None:
        generator = np.random.default_rng(1)
        self.videos = [generator.integers(0, 256, (length, 8, 8, 3), dtype=np.uint8) for length in (7, 9)]
        self.episodes = [type("Record", (), {"index": index}) for index in (3, 8)]

    def __len__(self) -> int:
        return 5 + 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        episode, start = (0, index) if index < 5 else (1, index - 5)
        frame_ids = start + np.array([0, 2])
        frames = torch.from_numpy(self.frames(episode, frame_ids))
        return {"frames": frames, "controls": self.controls(episode, frame_ids)}

    def first_window(self, episode: int) -> np.ndarray:
        return np.array([0, 2])

    def frames(self, episode: int, frame_ids: np.ndarray) -> np.ndarray:
        return self.videos[episode][frame_ids]

    def controls(self, episode: int, frame_ids: np.ndarray) -> torch.Tensor:
        return torch.tensor([[0.0, 0, 0], [0.1 * float(frame_ids[1]), 0, 0]], dtype=torch.float64)


def test_episodes_start_at_any_window_or_at_the_beginning_of_one(pipe):
    data = Episodes()
    env = WorldModelEnv(pipe, data)
    last = {video[end].tobytes() for video in data.videos for end in range(2, len(video))}
    drawn = {env.reset(seed=seed)[0].tobytes() for seed in range(60)}
    assert drawn <= last and len(drawn) > 8
    np.testing.assert_array_equal(env.reset(options={"prompt": 8})[0], data.videos[1][2])
    controls = data.controls(1, np.array([0, 2]))
    expected = rollout(env, [2], seed=5, prompt=(data.videos[1][[0, 2]], controls.numpy()))
    np.testing.assert_array_equal(rollout(env, [2], seed=5, prompt=8), expected)
    with pytest.raises(VidgenError, match="Episode 5 does not exist; allowed: 3 to 8"):
        env.reset(options={"prompt": 5})


def test_an_episode_with_sparse_windows_begins_with_its_own_frames(tmp_path: Path):
    world = RoomWorld(16)
    record(world, tmp_path / "room", 2, 24)
    data = EpisodeDataset(tmp_path / "room", window=16, skip=2, num_sparse=8)
    starts = Starts(data, world.delta_controls.spec)
    for number, first in ((0, 0), (1, data._num_starts[0])):
        frames, controls = starts.episode(number)
        np.testing.assert_array_equal(frames, data[first]["frames"])
        np.testing.assert_array_equal(controls, data[first]["controls"])
        assert np.array_equal(frames, data.frames(number, [*range(8), *range(8, 24, 2)]))


def test_rollouts_are_cut_off_after_their_steps(pipe, starts):
    env = WorldModelEnv(pipe, starts, max_episode_steps=3)
    for _ in range(2):
        env.reset(seed=0)
        steps = [env.step(0) for _ in range(3)]
        assert [step[1:4] for step in steps] == [(0.0, False, False)] * 2 + [(0.0, False, True)]


def test_the_info_tells_how_much_is_seen_and_how_far_colors_have_drifted(pipe, starts):
    env = WorldModelEnv(pipe, starts, report_latency=True)
    _, info = env.reset(seed=0)
    lengths = [info["context_len"]]
    for _ in range(3):
        frame, _, _, _, info = env.step(1)
        lengths.append(info["context_len"])
    assert lengths == [2, 3, 3, 3]  # a window of 4 has room for 3 beside the new frame
    real = starts["frames"].reshape(10, -1, 3).astype(np.float64)
    looks = np.concatenate([real.mean(1), real.std(1)], axis=1)
    pixels = frame.reshape(-1, 3).astype(np.float64)
    z = (np.concatenate([pixels.mean(0), pixels.std(0)]) - looks.mean(0)) / looks.std(0)
    assert info["drift"] == pytest.approx(np.sqrt((z**2).mean()), rel=1e-3)
    assert info["latency_ms"] > sum(stage["last"] for stage in env.stats.values()) * 0.9 > 0


def test_the_picture_is_the_newest_frame(pipe, starts):
    env = WorldModelEnv(pipe, starts, render_mode="rgb_array")
    assert env.metadata["render_fps"] == 8 and env.render() is None
    for begin_or_go_on in (lambda: env.reset(seed=0), lambda: env.step(1)):
        frame = begin_or_go_on()[0]
        np.testing.assert_array_equal(env.render(), frame)
        frame[:] = 0
        assert env.render().any()  # nobody can paint on it


def test_a_box_reaches_as_far_as_choices_or_else_starts_and_no_further():
    wide = delta_spec("cells", **{"forward": {"forward": 0.1}, "spin": {"turn left": np.pi}})
    frames = np.zeros((3, 2, 8, 8, 3), np.uint8)
    controls = np.zeros((3, 2, 3))
    controls[:, 1, 1] = [-0.3, 0.1, 0.2]
    actions = Actions("box", wide, Starts({"frames": frames, "controls": controls}, wide))
    np.testing.assert_allclose(actions.space.low, [0, -0.3, 0], atol=1e-6)
    np.testing.assert_allclose(actions.space.high, [0.1, 0.2, np.pi], atol=1e-6)
    # pi as float32 is more than pi, which the column would refuse.
    assert actions.controls([actions.space.high]).tolist() == [[0.1, 0.2, np.pi]]


def test_buttons_that_do_nothing_together_with_those_that_do(make_world_model):
    spec = ActionSpec(
        tuple(ActionColumn(name, "pressed", 0, 1) for name in ("left", "fire")),
        {name: {name: 1.0} for name in ("left", "fire")},
    )
    encoder = ControlEncoder(ButtonControls(spec, {}, direction_embedding=True), units=(1.0, 1.0))
    env = WorldModelEnv(make_world_model(encoder), np.zeros((2, 1, 8, 8, 3), np.uint8))
    assert env.action_names == ("none", "left", "fire")
    frames = [rollout(env, [action], seed=0)[1] for action in range(3)]
    assert not any(np.array_equal(frames[one], frames[other]) for one, other in ((0, 1), (0, 2), (1, 2)))


def test_a_folder_brings_its_starts(pipe, starts, tmp_path: Path):
    pipe.save_pretrained(tmp_path)
    with pytest.raises(VidgenError, match="episodes are missing"):
        WorldModelEnv(tmp_path)
    tensors = {name: torch.from_numpy(values) for name, values in starts.items()}
    save_safetensors(tensors, tmp_path / STARTS_NAME)
    env = gymnasium.make("vidgen/WorldModel-v0", pipeline=str(tmp_path), max_episode_steps=5)
    np.testing.assert_array_equal(rollout(env, [1, 2], seed=3), rollout(WorldModelEnv(pipe, starts), [1, 2], seed=3))


def test_predicted_rewards_and_ends_are_given(pipe, starts):
    torch.manual_seed(0)
    head = RewardHead(3, (8, 8), block_out_channels=(4,), hidden_size=8).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(4)
    env = WorldModelEnv(pipe, starts, reward_head=head)
    actions = [0, 1, 2, 1, 1, 0, 2, 2]
    rewards, ends = [], []
    frames = [env.reset(seed=0, options={"prompt": 2})[0]]
    for action in actions:
        frame, reward, terminated, _, _ = env.step(action)
        frames.append(frame)
        rewards.append(reward)
        ends.append(terminated)
    # The head on the whole video at once.
    video = np.concatenate([starts["frames"][2, :1], np.stack(frames)])
    rows = np.array([[0, 0, 0], [0.5, 0, 0], [0, 0, 0.4]])[actions]
    output = head.observe(video[None], np.concatenate([starts["controls"][2], rows])[None])
    assert rewards == output.rewards[0, 2:].tolist() and len(set(rewards)) > 1
    assert ends == output.dones[0, 2:].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action_space": "discreet"}, "action_space='discreet'; did you mean 'discrete'"),
        ({"episodes": np.zeros((0, 1, 8, 8, 3), np.uint8)}, "no starts"),
        ({"episodes": np.zeros((2, 2, 8, 8, 3), np.uint8)}, "2 frames and no controls"),
        ({"episodes": np.zeros((2, 8, 8, 3), np.uint8)}, r"allowed: uint8 \(starts, frames, height, width, 3\)"),
        ({"max_episode_steps": 0}, "max_episode_steps=0"),
        ({"render_mode": "human"}, "render_mode='human'; allowed: None, 'rgb_array'"),
        ({"cache": "rollling"}, "cache='rollling'"),
        ({"reward_head": RewardHead(2, (8, 8))}, "control_dim=2; this world needs 3"),
        ({"reward_head": RewardHead(3, (8, 16))}, re.escape("sample_size=(8, 16); this world needs (8, 8)")),
    ],
)
def test_wrong_arguments_are_named(pipe, starts, arguments: dict[str, Any], message: str):
    with pytest.raises(VidgenError, match=message):
        WorldModelEnv(**{"pipeline": pipe, "episodes": starts, **arguments})


def test_absolute_poses_are_no_actions(make_world_model):
    encoder = ControlEncoder(PoseControls(CAMERA_SPEC), "map", units=(0.7,), latent_size=(4, 4))
    with pytest.raises(VidgenError, match="absolute poses, which are no actions"):
        WorldModelEnv(make_world_model(encoder), np.zeros((2, 1, 8, 8, 3), np.uint8))


def test_actions_walk_where_a_model_is_steered_by_absolute_poses(make_world_model):
    moves = delta_spec("units", forward={"forward": 0.5}, **{"turn left": {"turn left": 0.4}})
    encoder = ControlEncoder(
        PoseControls(CAMERA_SPEC),
        "map",
        (0.7,),
        (4, 4),
        in_world=True,
        walk=Walk(moves, FloorPlan(1.0, (0, 0), ("..",))),
    )
    poses = torch.tensor([[[0.5, 0.5, 0.0]], [[1.5, 0.5, 0.0]]], dtype=torch.float64)
    frames = np.random.default_rng(0).integers(0, 256, (2, 1, 8, 8, 3), dtype=np.uint8)
    pipe = make_world_model(encoder)
    world = {"frames": frames, "controls": walking_cameras(poses, 0.7, 0.5).numpy()}
    env = WorldModelEnv(pipe, world)
    assert env.action_space.n == 3
    env.reset(seed=0, options={"prompt": 1})
    shown = [env.step(1)[0] for _ in range(3)]
    session = pipe.open_session(
        frames[1], walking_cameras(poses[1], 0.7, 0.5), seed=int(np_random(0)[0].integers(2**62))
    )
    # The floor ends half a unit ahead: the second step leads nowhere.
    np.testing.assert_array_equal(shown, [session.step(["forward"]) for _ in range(3)])
    assert session.rows[0].places[-1].equal(session.rows[0].places[0])
    with pytest.raises(VidgenError, match="no controls"):
        WorldModelEnv(pipe, frames)
    with pytest.raises(VidgenError, match=r"needs \(frames, cameras\)"):
        env.reset(options={"prompt": frames[0, 0]})
    with pytest.raises(VidgenError, match="reward head"):
        WorldModelEnv(pipe, world, reward_head=RewardHead(3, (8, 8)))
    box = WorldModelEnv(pipe, world, action_space="box")
    np.testing.assert_allclose(box.action_space.high, [0.5, 0.0, 0.4], atol=1e-6)


def test_wrong_actions_and_prompts_are_named(pipe, starts):
    env = WorldModelEnv(pipe, starts)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(VidgenError, match="action=3; allowed: an integer of 0 none, 1 forward, 2 turn left"):
        env.step(3)
    box = WorldModelEnv(pipe, starts, action_space="box")
    box.reset(seed=0)
    for action in ([0.0, 0.0, 2.0], [0.0, 0.0, np.nan], [0.0, 0.0]):
        with pytest.raises(VidgenError, match=r"allowed: forward 0 to 0.5, .*turn left 0 to 0.4"):
            box.step(np.array(action, np.float32))
    for prompt in (5, True, starts["frames"][0, 0, 0], starts["frames"][0], (starts["frames"][0], [[0.0] * 3])):
        with pytest.raises(VidgenError, match="does not exist|allowed: the number of an episode"):
            env.reset(options={"prompt": prompt})
    with pytest.raises(VidgenError, match="Starts have frames.*allowed"):
        env.reset(options={"prompt": np.zeros((16, 16, 3), np.uint8)})
    with pytest.raises(VidgenError, match="Unknown options 'promt'; allowed: 'prompt'"):
        env.reset(options={"promt": 1})


def train_dqn(env: gymnasium.Env, num_steps: int, seed: int = 0) -> tuple[nn.Module, list[float]]:
    """Q-learning with a replay buffer and a target network, for any environment with numbers in and few actions."""
    torch.manual_seed(seed)
    choice = random.Random(seed)
    num_inputs, num_actions = int(np.prod(env.observation_space.shape)), int(env.action_space.n)
    scale = 255.0 if env.observation_space.dtype == np.uint8 else 1.0

    def to_input(observations: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(observations)).float().flatten(1) / scale

    q_net, target_net = (
        nn.Sequential(nn.Linear(num_inputs, 32), nn.ReLU(), nn.Linear(32, num_actions)) for _ in range(2)
    )
    target_net.load_state_dict(q_net.state_dict())
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-3)
    buffer: deque[tuple] = deque(maxlen=1000)
    losses = []
    observation, _ = env.reset(seed=seed)
    for step in range(num_steps):
        epsilon = max(0.1, 1 - step / num_steps)
        if choice.random() < epsilon:
            action = choice.randrange(num_actions)
        else:
            with torch.no_grad():
                action = int(q_net(to_input([observation])).argmax())
        next_observation, reward, terminated, truncated, _ = env.step(action)
        buffer.append((observation, action, float(reward), next_observation, terminated))
        observation = next_observation
        if terminated or truncated:
            observation, _ = env.reset()
        if len(buffer) < 16:
            continue
        observations, actions, rewards, next_observations, ends = zip(*choice.sample(list(buffer), 16), strict=True)
        with torch.no_grad():
            following = target_net(to_input(next_observations)).max(1).values
            target = torch.tensor(rewards) + 0.99 * following * (1 - torch.tensor(ends).float())
        value = q_net(to_input(observations)).gather(1, torch.tensor(actions)[:, None])[:, 0]
        loss = F.smooth_l1_loss(value, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            target_net.load_state_dict(q_net.state_dict())
    return q_net, losses


def test_one_dqn_loop_runs_on_cartpole_and_on_a_world_model(pipe, starts):
    for env in (
        gymnasium.make("CartPole-v1"),
        gymnasium.make("vidgen/WorldModel-v0", pipeline=pipe, episodes=starts, max_episode_steps=10),
    ):
        _, losses = train_dqn(env, num_steps=35)
        assert len(losses) == 20 and np.isfinite(losses).all()


def test_the_package_names_the_extra_it_needs(monkeypatch: pytest.MonkeyPatch):
    import importlib.util
    import sys

    monkeypatch.setitem(sys.modules, "gymnasium", None)
    for name in ("world_model_env", "vector_env"):
        path = Path(vidgen.envs.__file__).with_name(f"{name}.py")
        spec = importlib.util.spec_from_file_location(f"without_gymnasium_{name}", path)
        with pytest.raises(VidgenError, match=r"vidgen\[envs\]"):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
