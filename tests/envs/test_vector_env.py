"""What would be wrong: rows that aren't the environments they stand for, or that start again at another time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium", reason="needs gymnasium (extra: envs)")

import gymnasium
from gymnasium.vector import AutoresetMode

from vidgen.envs import RewardHead, WorldModelEnv, WorldModelVectorEnv
from vidgen.runtime.errors import VidgenError

NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP


def make_head(env: WorldModelEnv, seeds: range) -> RewardHead:
    """Ends a rollout in about every third frame."""
    torch.manual_seed(0)
    head = RewardHead(3, (8, 8), block_out_channels=(4,), hidden_size=8).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(4)
    logits = []
    for seed in seeds:
        env.reset(seed=seed)
        video = np.stack([env.step(action)[0] for action in (0, 1, 2, 1)])
        logits.append(head.observe(video[None], np.zeros((1, 4, 3))).done_logits)
    with torch.no_grad():
        head.done_out.bias.sub_(torch.cat(logits).quantile(0.67))
    return head


def follow(single: gymnasium.Env, actions: np.ndarray, seed: int, mode: AutoresetMode) -> list[dict[str, Any]]:
    """What a row of a vector environment shows, written out for a single one."""
    observation, info = single.reset(seed=seed)
    shown = [{"obs": observation, "info": info}]
    ended = False
    for action in actions:
        if ended and mode == NEXT_STEP:
            observation, info = single.reset()
            shown.append({"obs": observation, "reward": 0.0, "end": False, "cut": False, "info": info})
            ended = False
            continue
        observation, reward, end, cut, info = single.step(action)
        entry = {"obs": observation, "reward": reward, "end": end, "cut": cut, "info": info}
        ended = end or cut
        if ended and mode == SAME_STEP:
            entry["final_obs"], entry["final_info"] = entry["obs"], entry["info"]
            entry["obs"], entry["info"] = single.reset()
        shown.append(entry)
    return shown


def assert_close(one: np.ndarray, other: np.ndarray) -> None:
    # Sums of a batch are rounded in another order, which can carry a pixel over to the next of 256 levels.
    difference = np.abs(one.astype(int) - other.astype(int))
    assert difference.max() <= 1 and (difference > 0).mean() < 0.05


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
@pytest.mark.parametrize("ends", ["together", "each"])
def test_a_row_is_a_single_environment(pipe, starts, mode: AutoresetMode, ends: str):
    # All are cut off in the same step, or each ends when its own head says so.
    num_steps, seed = 9, 11
    options = {"max_episode_steps": 4}
    if ends == "each":
        head = make_head(WorldModelEnv(pipe, starts), range(seed, seed + 3))
        options = {"reward_head": head, "max_episode_steps": 5}
    envs = WorldModelVectorEnv(3, pipe, starts, autoreset_mode=mode, **options)
    actions = np.random.default_rng(0).integers(3, size=(num_steps, 3))
    expected = [follow(WorldModelEnv(pipe, starts, **options), actions[:, row], seed + row, mode) for row in range(3)]

    observations, infos = envs.reset(seed=seed)
    num_ends = np.zeros(3, int)
    for row in range(3):
        np.testing.assert_array_equal(observations[row], expected[row][0]["obs"])
    for step in range(1, num_steps + 1):
        observations, rewards, terminations, truncations, infos = envs.step(actions[step - 1])
        for row in range(3):
            entry = expected[row][step]
            assert_close(observations[row], entry["obs"])
            assert (rewards[row], terminations[row], truncations[row]) == (
                entry["reward"], entry["end"], entry["cut"]
            )  # fmt: skip
            assert infos["context_len"][row] == entry["info"]["context_len"]
            assert infos["drift"][row] == pytest.approx(entry["info"]["drift"], abs=0.05)
            has_final = "_final_obs" in infos and infos["_final_obs"][row]
            assert has_final == ("final_obs" in entry)
            if has_final:
                assert_close(infos["final_obs"][row], entry["final_obs"])
                assert infos["final_info"]["context_len"][row] == entry["final_info"]["context_len"]
            num_ends[row] += entry["end"] or entry["cut"]
    assert num_ends.min() >= 1
    if ends == "each":
        at_once = [tuple(entry["end"] or entry["cut"] for entry in row[1:]) for row in expected]
        assert len(set(at_once)) > 1  # otherwise no row started while another went on


def test_next_step_is_announced_and_the_default(pipe, starts):
    assert WorldModelVectorEnv(2, pipe, starts).metadata["autoreset_mode"] == NEXT_STEP
    assert WorldModelVectorEnv(2, pipe, starts, autoreset_mode=SAME_STEP).metadata["autoreset_mode"] == SAME_STEP
    assert WorldModelVectorEnv.metadata["autoreset_mode"] == NEXT_STEP


@pytest.mark.parametrize("action_space", ["discrete", "box"])
def test_gymnasium_makes_it_and_wrappers_take_it(pipe, starts, action_space: str):
    envs = gymnasium.make_vec(
        "vidgen/WorldModel-v0", num_envs=2, pipeline=pipe, episodes=starts, action_space=action_space,
        max_episode_steps=2, render_mode="rgb_array",
    )  # fmt: skip
    assert isinstance(envs.unwrapped, WorldModelVectorEnv)
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
    observations, _ = envs.reset(seed=0)
    assert observations in envs.observation_space
    envs.action_space.seed(0)
    for _ in range(4):
        observations, _, _, truncations, infos = envs.step(envs.action_space.sample())
        assert observations in envs.observation_space
        if truncations.all():
            assert infos["episode"]["l"].tolist() == [2, 2]
    np.testing.assert_array_equal(np.stack(envs.render()), observations)
    envs.close()


def test_every_row_can_have_its_own_prompt_and_seed(pipe, starts):
    envs = WorldModelVectorEnv(3, pipe, starts)
    observations, _ = envs.reset(seed=[5, 5, 6], options={"prompt": [1, 1, 4]})
    np.testing.assert_array_equal(observations, starts["frames"][[1, 1, 4], -1])
    observations, *_ = envs.step(np.array([1, 1, 1]))
    np.testing.assert_array_equal(observations[0], observations[1])
    assert not np.array_equal(observations[0], observations[2])


def test_seeds_may_be_numbers_of_numpy(pipe, starts):
    env = WorldModelVectorEnv(2, pipe, starts)
    plain = env.reset(seed=3)[0]
    np.testing.assert_array_equal(env.reset(seed=np.int64(3))[0], plain)
    np.testing.assert_array_equal(env.reset(seed=np.array([3, 4]))[0], plain)


def test_returned_arrays_belong_to_the_caller(pipe, starts):
    envs = WorldModelVectorEnv(2, pipe, starts, max_episode_steps=1, autoreset_mode=SAME_STEP, render_mode="rgb_array")
    first, _ = envs.reset(seed=0)
    first[:] = 0
    second, *_, infos = envs.step(np.array([0, 1]))
    kept, final = second.copy(), infos["final_obs"][0].copy()
    envs.step(np.array([0, 1]))
    np.testing.assert_array_equal(second, kept)
    np.testing.assert_array_equal(infos["final_obs"][0], final)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs=0; allowed: at least 1"),
        ({"autoreset_mode": AutoresetMode.DISABLED}, "autoreset_mode=.*allowed: .*NEXT_STEP, .*SAME_STEP"),
        ({"cache": "rolling"}, "cache='rolling' with several rows"),
    ],
)
def test_wrong_arguments_are_named(pipe, starts, arguments: dict[str, Any], message: str):
    with pytest.raises(VidgenError, match=message):
        WorldModelVectorEnv(**{"num_envs": 2, "pipeline": pipe, "episodes": starts, **arguments})


def test_wrong_calls_are_named(pipe, starts):
    envs = WorldModelVectorEnv(2, pipe, starts)
    with pytest.raises(gymnasium.error.ResetNeeded):
        envs.step(np.array([0, 0]))
    with pytest.raises(VidgenError, match="3 values of seed are given for 2 rows"):
        envs.reset(seed=[1, 2, 3])
    with pytest.raises(VidgenError, match="1 values of prompt are given for 2 rows"):
        envs.reset(options={"prompt": [1]})
    envs.reset(seed=0)
    with pytest.raises(VidgenError, match="3 actions are given for 2 rows"):
        envs.step(np.array([0, 0, 0]))
