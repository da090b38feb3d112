"""What would be wrong: a head that learns nothing, looks ahead, forgets between calls, or is scored on what it can't
know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("gymnasium", reason="needs gymnasium (extra: envs)")

from vidgen.envs.reward_head import RewardHead, RewardMethod
from vidgen.runtime.errors import ConfigError
from vidgen.train import OptimizerConfig, TrainConfig, fit


def make_batch(num_windows: int, seed: int, num_frames: int = 6) -> dict[str, torch.Tensor]:
    """A lamp on the left or on the right is a reward of 2 or -3; pressing the button in the dark is the end."""
    generator = torch.Generator().manual_seed(seed)
    lamp = torch.randint(3, (num_windows, num_frames), generator=generator) - 1
    pressed = torch.rand(num_windows, num_frames, generator=generator) < 0.3
    frames = torch.randint(0, 60, (num_windows, num_frames, 8, 8, 3), generator=generator, dtype=torch.uint8)
    frames[..., 2:6, 1:3, :][lamp == 1] += 150
    frames[..., 2:6, 5:7, :][lamp == -1] += 150
    rewards = torch.tensor([-3.0, 0.0, 2.0])[lamp + 1]
    controls = torch.stack([4.0 * pressed, torch.zeros(lamp.shape)], dim=-1).double()
    return {"frames": frames, "controls": controls, "rewards": rewards, "dones": pressed & (lamp == 0)}


class Batches(torch.utils.data.Dataset):
    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.windows = batch

    def __len__(self) -> int:
        return len(self.windows["frames"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.windows.items()}


def make_head(**options: Any) -> RewardHead:
    torch.manual_seed(0)
    settings = {"block_out_channels": (8, 16), "hidden_size": 32, "control_units": (4.0, 1.0), **options}
    return RewardHead(2, (8, 8), **settings)


def test_it_learns_a_rule_from_frames_and_actions(tmp_path: Path):
    head = make_head()
    optimizers = {"reward_head": OptimizerConfig(lr=1e-2, weight_decay=0.0)}
    config = TrainConfig(str(tmp_path / "run"), max_steps=80, optimizers=optimizers, batch_size=32)
    result = fit(RewardMethod(head), Batches(make_batch(256, seed=0)), config)
    trained = RewardHead.from_pretrained(result.weights_dir / "reward_head")
    test = make_batch(64, seed=1)
    output = trained.observe(test["frames"].numpy(), test["controls"].numpy())
    # The commonest answer is right for a third of the rewards and, for ends, is never "yes".
    assert (output.rewards == test["rewards"].sign())[:, 1:].float().mean() > 0.95
    found = output.dones[:, 1:][test["dones"][:, 1:]].float().mean()
    false = output.dones[:, 1:][~test["dones"][:, 1:]].float().mean()
    assert found > 0.9 and false < 0.05


def test_frame_by_frame_is_the_same_as_at_once_and_nothing_looks_ahead():
    head = make_head().eval()
    batch = make_batch(3, seed=2)
    frames, controls = batch["frames"].numpy(), batch["controls"].numpy()
    whole = head.observe(frames, controls)
    state, logits, dones = None, [], []
    for frame in range(6):
        output = head.observe(frames[:, frame : frame + 1], controls[:, frame : frame + 1], state)
        state = output.state
        logits.append(output.reward_logits)
        dones.append(output.done_logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), whole.reward_logits)
    torch.testing.assert_close(torch.cat(dones, dim=1), whole.done_logits)
    later = frames.copy()
    later[:, 4:] = 255 - later[:, 4:]
    changed = head.observe(later, controls).reward_logits
    torch.testing.assert_close(changed[:, :4], whole.reward_logits[:, :4])
    assert not torch.allclose(changed[:, 4:], whole.reward_logits[:, 4:])


def test_rows_of_a_state_are_replaced_alone():
    head = make_head().eval()
    one, other = (make_batch(3, seed=seed) for seed in (3, 4))
    states = [head.observe(batch["frames"].numpy(), batch["controls"].numpy()).state for batch in (one, other)]
    first = head.observe(other["frames"][:2].numpy(), other["controls"][:2].numpy()).state
    mixed = states[0].replaced([2, 0], first)
    for name, dim in (("frame", 0), ("hidden_states", 1)):
        rows = [getattr(state, name).unbind(dim) for state in (mixed, states[0], states[1])]
        torch.testing.assert_close(rows[0][2], rows[2][0])
        torch.testing.assert_close(rows[0][0], rows[2][1])
        torch.testing.assert_close(rows[0][1], rows[1][1])


def test_the_loss_is_that_of_signs_and_ends_without_the_first_frame():
    head = make_head()
    batch = make_batch(4, seed=5)
    method = RewardMethod(head)
    output = method.training_step(batch, 0, torch.Generator())
    logits = head(batch["frames"], batch["controls"])
    likelihood = F.log_softmax(logits.reward_logits, -1)
    done = torch.sigmoid(logits.done_logits)
    expected = 0.0
    for window in range(4):
        for frame in range(1, 6):
            sign = int(batch["rewards"][window, frame].sign())
            expected -= likelihood[window, frame, sign + 1] / 20
            right = done[window, frame] if batch["dones"][window, frame] else 1 - done[window, frame]
            expected -= right.log() / 20
    torch.testing.assert_close(output.losses["reward_head"], expected)
    batch["rewards"][:, 0] += 9
    torch.testing.assert_close(method.training_step(batch, 0, torch.Generator()).losses["reward_head"], expected)


def test_odd_sizes_fit_and_wrong_units_are_named():
    assert RewardHead(1, (9, 13), block_out_channels=(2, 2)).observe(
        np.zeros((1, 2, 9, 13, 3), np.uint8), np.zeros((1, 2, 1))
    ).rewards.shape == (1, 2)
    for unit in (0.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="control_units=.*allowed: 2 positive, finite numbers"):
            RewardHead(2, (8, 8), control_units=(1.0, unit))
