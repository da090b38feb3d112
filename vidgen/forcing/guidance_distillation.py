"""A student that gives in one forward what its teacher gives in two, with and without text.

The first stage of "On Distillation of Guided Diffusion Models" (arXiv 2210.03142): the student regresses the velocity
of classifier-free guidance at one guidance scale, on noised data. Its flow is smooth enough for a few deterministic
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vidgen.forcing.diffusion_forcing import DiffusionForcingConfig, DiffusionForcingMethod
from vidgen.runtime.errors import ConfigError
from vidgen.train.method import StepOutput


class GuidanceDistillationMethod(DiffusionForcingMethod):
    """Regress the guided velocity of a teacher under the noise and the layouts of diffusion forcing.

    Batches are those of [`DiffusionForcingMethod`].

    Args:
        student: the transformer that is trained, initialized from the teacher.
        teacher: frozen transformer that knows the empty text.
        text_encoder: frozen encoder of the captions.
        guidance_scale: w of `free + w * (conditional - free)`, above 1.
        config: noise and weights; a student is never without text, so `drop_text_probability` must be 0.
        validation: returns one fixed batch for `validate`.

    Raises:
        ConfigError: for a guidance scale that is none, or dropped text.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        text_encoder: nn.Module,
        guidance_scale: float,
        config: DiffusionForcingConfig,
        validation: Callable[[], dict[str, torch.Tensor]],
    ) -> None:
        if not 1 < guidance_scale < math.inf:
            raise ConfigError(
                f"guidance_scale={guidance_scale}; it must be finite and above 1, else there is nothing to distill."
            )
        if config.drop_text_probability:
            raise ConfigError(f"drop_text_probability={config.drop_text_probability}; the student needs its text: 0.")
        super().__init__(student, text_encoder, config, validation)
        self.teacher = teacher.requires_grad_(False)
        self.guidance_scale = guidance_scale

    def roles(self) -> dict[str, nn.Module]:
        return {"student": self.transformer, "teacher": self.teacher, "text_encoder": self.text_encoder}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        loss, target_loss = self._losses(batch, generator)
        return StepOutput({"student": loss}, {"target_mse": target_loss})

    @torch.no_grad()
    def _target(self, velocity: torch.Tensor, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        text = arguments["encoder_hidden_states"]
        conditional, free = (
            self.teacher(**{**arguments, "encoder_hidden_states": each}).sample.float()
            for each in (text, torch.zeros_like(text))
        )
        return free + self.guidance_scale * (conditional - free)
