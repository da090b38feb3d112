"""Rewards and ends of a world model's rollouts, read from its frames.

A small network beside the world model, as in DIAMOND ("Diffusion for World Modeling: Visual Details Matter in Atari",
arXiv 2405.12399): convolutions over a frame and the one before, with the action between them, and a GRU over time. It
predicts the sign of the reward and whether the episode is over, from the same windows that the world model trains on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput
from torch import nn

from vidgen.runtime.errors import ConfigError
from vidgen.train import StepOutput, TrainingMethod

# Rewards -1, 0 and 1 are the classes 0, 1 and 2.
SIGNS = (-1, 0, 1)


@dataclass(frozen=True)
class RewardState:
    """What a [`RewardHead`] remembers.

    Attributes:
        frame: `(batch, 3, height, width)` the newest frame in [-1, 1].
        hidden_states: `(1, batch, hidden_size)` of the GRU.
    """

    frame: torch.Tensor
    hidden_states: torch.Tensor

    def replaced(self, rows: Sequence[int], state: RewardState) -> RewardState:
        """This state with other rows `rows`: those of `state`, in order."""
        index = torch.as_tensor(list(rows), device=self.frame.device)
        return RewardState(
            self.frame.index_copy(0, index, state.frame), self.hidden_states.index_copy(1, index, state.hidden_states)
        )


@dataclass
class RewardHeadOutput(BaseOutput):
    """Output of [`RewardHead`].

    Args:
        reward_logits: `(batch, frames, 3)`: of a negative, no, and a positive reward on the way to each frame.
        done_logits: `(batch, frames)`: of the episode being over at each frame.
        state: to go on from.
    """

    reward_logits: torch.Tensor
    done_logits: torch.Tensor
    state: RewardState

    @property
    def rewards(self) -> torch.Tensor:
        """`(batch, frames)` int64: the likeliest sign."""
        return self.reward_logits.argmax(-1) + SIGNS[0]

    @property
    def dones(self) -> torch.Tensor:
        """`(batch, frames)` bool: likelier over than not."""
        return self.done_logits > 0


class RewardHead(ModelMixin, ConfigMixin):
    """Reads the sign of the reward and the end of the episode from frames and actions.

    Args:
        control_dim: columns of an action.
        sample_size: height and width of a frame, pixels.
        control_units: what counts as 1 in each column; `None` takes 1.
        block_out_channels: channels of the convolutions, each of which halves height and width.
        hidden_size: of the GRU.

    Raises:
        ConfigError: units of another number of columns, or not positive and finite.
    """

    _no_split_modules: list[str] = []

    @register_to_config
    def __init__(
        self,
        control_dim: int,
        sample_size: tuple[int, int] = (64, 64),
        control_units: tuple[float, ...] | None = None,
        block_out_channels: tuple[int, ...] = (16, 32, 32, 32),
        hidden_size: int = 128,
    ) -> None:
        super().__init__()
        if control_units is not None and (
            len(control_units) != control_dim or not all(0 < unit < math.inf for unit in control_units)
        ):
            raise ConfigError(f"control_units={control_units}; allowed: {control_dim} positive, finite numbers.")
        channels = (6, *block_out_channels)
        self.convs = nn.ModuleList(
            [nn.Conv2d(channels[i], channels[i + 1], 3, stride=2, padding=1) for i in range(len(block_out_channels))]
        )
        # A stride of 2 with padding 1 rounds halves up.
        height, width = (-(-length // 2 ** len(block_out_channels)) for length in sample_size)
        self.proj_in = nn.Linear(channels[-1] * height * width, hidden_size)
        self.control_embedding = nn.Linear(control_dim, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.reward_out = nn.Linear(hidden_size, len(SIGNS))
        self.done_out = nn.Linear(hidden_size, 1)

    def forward(
        self, frames: torch.Tensor, controls: torch.Tensor, state: RewardState | None = None
    ) -> RewardHeadOutput:
        """Read a clip, or what follows one.

        Args:
            frames: uint8 `(batch, frames, height, width, 3)`.
            controls: `(batch, frames, columns)` in the units of the data; row k led to frame k.
            state: from the clip before; `None` begins with the first frame, on the way to which nothing is known.
        """
        pixels = frames.movedim(-1, 2).to(self.dtype) / 127.5 - 1  # (B, F, 3, H, W)
        first = pixels[:, 0] if state is None else state.frame
        before = torch.cat([first[:, None], pixels[:, :-1]], dim=1)
        hidden_states = torch.cat([before, pixels], dim=2).flatten(0, 1)
        for conv in self.convs:
            hidden_states = F.silu(conv(hidden_states))
        hidden_states = hidden_states.flatten(1).unflatten(0, frames.shape[:2])  # (B, F, C * h * w)

        if self.config.control_units is not None:
            controls = controls / torch.tensor(self.config.control_units, dtype=controls.dtype, device=controls.device)
        hidden_states = F.silu(self.proj_in(hidden_states) + self.control_embedding(controls.to(self.dtype)))
        hidden_states, last = self.gru(hidden_states, None if state is None else state.hidden_states)

        return RewardHeadOutput(
            reward_logits=self.reward_out(hidden_states),
            done_logits=self.done_out(hidden_states)[..., 0],
            state=RewardState(pixels[:, -1], last),
        )

    @torch.no_grad()
    def observe(self, frames: np.ndarray, controls: np.ndarray, state: RewardState | None = None) -> RewardHeadOutput:
        """`forward` for arrays, without gradients."""
        return self(
            torch.from_numpy(np.ascontiguousarray(frames)).to(self.device),
            torch.from_numpy(np.ascontiguousarray(controls)).float().to(self.device),
            state,
        )

    def check(self, sample_size: tuple[int, int], control_dim: int) -> None:
        """Check that this head reads the frames and actions of a world.

        Raises:
            ConfigError: it reads others.
        """
        for name, given in (("sample_size", tuple(sample_size)), ("control_dim", control_dim)):
            own = self.config[name]
            own = tuple(own) if name == "sample_size" else own
            if own != given:
                raise ConfigError(f"The reward head has {name}={own}; this world needs {given}.")


class RewardMethod(TrainingMethod):
    """Trains a [`RewardHead`] on recorded windows, such as those of [`~vidgen.data.EpisodeDataset`].

    The first frame of a window isn't scored: what led to it is not in the window.

    Args:
        reward_head: the network.
    """

    def __init__(self, reward_head: RewardHead) -> None:
        super().__init__()
        self.reward_head = reward_head

    def roles(self) -> dict[str, nn.Module]:
        return {"reward_head": self.reward_head}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        output = self.reward_head(batch["frames"], batch["controls"])
        signs = batch["rewards"][:, 1:].sign().long() - SIGNS[0]  # (B, F - 1), classes
        reward_loss = F.cross_entropy(output.reward_logits[:, 1:].flatten(0, 1).float(), signs.flatten())
        dones = batch["dones"][:, 1:].float()
        done_loss = F.binary_cross_entropy_with_logits(output.done_logits[:, 1:].float(), dones)
        return StepOutput(
            {"reward_head": reward_loss + done_loss},
            {"reward_loss": reward_loss.detach(), "done_loss": done_loss.detach()},
        )
