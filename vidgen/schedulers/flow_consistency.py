"""Few-step sampler of distilled flow-matching students: predict the clean sample, then add fresh noise.

This is multistep consistency sampling ("Consistency Models", arXiv 2303.01469, algorithm 1) on the straight path of
flow matching, as causal video students (arXiv 2412.07772, 2506.08009, 2602.06028) are trained to be sampled:

    x_s = (1 - s) x_0 + s * noise,   v = noise - x_0,   x_0 = x_s - s * v

with noise levels `s = shift * u / (1 + (shift - 1) * u)` at evenly spaced `u`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor

# Timesteps of a schedule are at least this far apart; float32 rounding of a timestep is far below it.
TIMESTEP_TOLERANCE = 1e-2


@dataclass
class FlowConsistencySchedulerOutput(BaseOutput):
    """Output of [`FlowConsistencyScheduler.step`].

    Args:
        prev_sample: the sample at the next, lower noise level; the clean sample after the last step.
        pred_original_sample: the predicted clean sample.
    """

    prev_sample: torch.Tensor
    pred_original_sample: torch.Tensor


class FlowConsistencyScheduler(SchedulerMixin, ConfigMixin):
    """Stateless between steps: a step depends on its arguments and the schedule alone.

    Args:
        num_train_timesteps: timestep of pure noise; `sigma = timestep / num_train_timesteps`.
        shift: warps evenly spaced noise levels toward noise; 1 leaves them.
        num_inference_steps: steps of the schedule when `set_timesteps` is given no number.
        timesteps: unwarped timesteps the student was distilled at, decreasing, in `(0, num_train_timesteps]`; they
            replace the evenly spaced ones whenever as many steps are asked for.
        eta: share of fresh noise in a step, as in "Denoising Diffusion Implicit Models" (arXiv 2010.02502): 1 is
            consistency sampling, 0 keeps the predicted noise, which is an Euler step along the flow.

    Raises:
        ValueError: for an eta outside [0, 1], a shift or number of steps that is not positive, or timesteps that do
            not decrease.
    """

    _compatibles: list[str] = []
    order = 1

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        shift: float = 5.0,
        num_inference_steps: int = 4,
        timesteps: list[float] | None = None,
        eta: float = 1.0,
    ) -> None:
        if not 0 <= eta <= 1:
            raise ValueError(f"eta={eta}; it must be in [0, 1].")
        if not 0 < shift < math.inf:
            raise ValueError(f"shift={shift}; it must be positive and finite, 1 for no warp.")
        if timesteps is not None:
            self._check_timesteps(timesteps)
        self.init_noise_sigma = 1.0
        self.set_timesteps()

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        timesteps: Sequence[float] | None = None,
    ) -> None:
        """Choose the schedule.

        Args:
            num_inference_steps: number of steps; default the configured schedule.
            device: where `timesteps` and `sigmas` are put.
            timesteps: unwarped timesteps instead of evenly spaced ones.

        Raises:
            ValueError: for less than one step, or timesteps that do not decrease within `(0, num_train_timesteps]`.
        """
        if timesteps is None:
            configured = self.config.timesteps
            steps = num_inference_steps
            if steps is None:
                steps = len(configured) if configured is not None else self.config.num_inference_steps
            if steps < 1:
                raise ValueError(f"num_inference_steps={steps}; at least 1 step is needed.")
            if configured is not None and steps == len(configured):
                timesteps = configured
            else:
                timesteps = [self.config.num_train_timesteps * (1 - index / steps) for index in range(steps)]
        elif num_inference_steps is not None and num_inference_steps != len(timesteps):
            raise ValueError(f"num_inference_steps={num_inference_steps}, but {len(timesteps)} timesteps are given.")
        self._check_timesteps(timesteps)

        unwarped = torch.tensor(list(timesteps), dtype=torch.float64) / self.config.num_train_timesteps
        sigmas = self.config.shift * unwarped / (1 + (self.config.shift - 1) * unwarped)
        self.num_inference_steps = len(sigmas)
        self.timesteps = (sigmas * self.config.num_train_timesteps).to(device=device, dtype=torch.float32)
        self.sigmas = torch.cat([sigmas, torch.zeros(1, dtype=torch.float64)]).to(device=device, dtype=torch.float32)

    def _check_timesteps(self, timesteps: Sequence[float]) -> None:
        bounds = [self.config.num_train_timesteps, *timesteps, 0]
        decreasing = all(earlier > later for earlier, later in pairwise(bounds[1:]))
        if not timesteps or not decreasing or bounds[1] > bounds[0]:
            raise ValueError(
                f"timesteps={list(timesteps)}; they must decrease strictly within "
                f"(0, {self.config.num_train_timesteps}]."
            )

    def scale_model_input(self, sample: torch.Tensor, timestep: torch.Tensor | None = None) -> torch.Tensor:
        """Flow matching needs no input scaling; returns `sample`."""
        return sample

    def _sigma(self, timestep: torch.Tensor | float, sample: torch.Tensor) -> torch.Tensor:
        """Noise level in float32, shaped to broadcast against `(batch, channels, frames, height, width)`."""
        sigma = torch.as_tensor(timestep, dtype=torch.float32, device=sample.device) / self.config.num_train_timesteps
        if sigma.ndim == 2:  # one timestep per frame
            return sigma.view(sigma.shape[0], 1, sigma.shape[1], *[1] * (sample.ndim - 3))
        return sigma.view(-1, *[1] * (sample.ndim - 1))

    def _next_timestep(self, timestep: torch.Tensor | float, device: torch.device) -> torch.Tensor:
        """The schedule's largest timestep below `timestep`, or 0, elementwise."""
        timestep = torch.as_tensor(timestep, dtype=torch.float32, device=device)
        schedule = self.timesteps.to(device)
        index = (schedule >= timestep.unsqueeze(-1) - TIMESTEP_TOLERANCE).sum(-1)
        return torch.cat([schedule, schedule.new_zeros(1)])[index]

    def step(
        self,
        model_output: torch.Tensor,
        timestep: torch.Tensor | float,
        sample: torch.Tensor,
        noise: torch.Tensor | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
    ) -> FlowConsistencySchedulerOutput | tuple[torch.Tensor, torch.Tensor]:
        """Predict the clean sample and renoise it to the next level of the schedule.

        Args:
            model_output: predicted velocity `noise - clean`, shaped as `sample`.
            timestep: scalar, `(batch,)` or, for samples with a frame axis, `(batch, frames)`.
            sample: `(batch, channels, frames, height, width)` (or any `(batch, …)` without per-frame timesteps).
            noise: fresh noise shaped as `sample`; drawn when absent.
            generator: source of the noise when `noise` is absent.
            return_dict: return a [`FlowConsistencySchedulerOutput`] instead of a tuple.
        """
        next_sigma = self._sigma(self._next_timestep(timestep, sample.device), sample)
        clean = sample.float() - self._sigma(timestep, sample) * model_output.float()
        eta = self.config.eta
        carried = (clean + model_output.float()).mul((1 - eta**2) ** 0.5) if eta < 1 else 0.0
        if noise is None and eta > 0 and bool((next_sigma > 0).any()):
            noise = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=torch.float32)
        if noise is not None:
            carried = carried + eta * noise.to(clean)
        previous = (1 - next_sigma) * clean + next_sigma * carried
        previous, clean = previous.to(sample.dtype), clean.to(sample.dtype)
        if not return_dict:
            return previous, clean
        return FlowConsistencySchedulerOutput(prev_sample=previous, pred_original_sample=clean)

    def add_noise(
        self, original_samples: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor | float
    ) -> torch.Tensor:
        """Put clean samples at the noise level of `timesteps`, which are shaped as in `step`."""
        sigma = self._sigma(timesteps, original_samples)
        return ((1 - sigma) * original_samples.float() + sigma * noise.float()).to(original_samples.dtype)

    def __len__(self) -> int:
        return self.config.num_train_timesteps
