"""Training of a small text encoder by reading out what its captions state."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vidgen.train.method import StepOutput, TrainingMethod


class CaptionEncoderMethod(TrainingMethod):
    """Classify every attribute of the scene from the mean of the caption's token embeddings.

    The linear heads are thrown away; what remains is an encoder whose tokens carry the attributes, so that a small
    diffusion model does not have to learn language from pixels.

    Args:
        text_encoder: a T5-style encoder.
        num_classes: attribute name to number of values.
        validation: batch of held-out captions, as `training_step` takes them.
    """

    def __init__(
        self, text_encoder: nn.Module, num_classes: dict[str, int], validation: dict[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.text_encoder = text_encoder
        width = text_encoder.config.d_model
        self.heads = nn.ModuleDict({name: nn.Linear(width, classes) for name, classes in num_classes.items()})
        self.validation_batch = validation

    def roles(self) -> dict[str, nn.Module]:
        return {"text_encoder": self.text_encoder, "heads": self.heads}

    def _logits(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        embeddings = encode_text(self.text_encoder, batch["input_ids"], batch["attention_mask"])
        pooled = embeddings.sum(dim=1) / batch["attention_mask"].sum(dim=1, keepdim=True)
        return {name: head(pooled) for name, head in self.heads.items()}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        logits = self._logits(batch)
        loss = sum(F.cross_entropy(logits[name], batch[name]) for name in logits)
        return StepOutput({"text_encoder": loss, "heads": loss})

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        batch = {name: tensor.to(self.text_encoder.device) for name, tensor in self.validation_batch.items()}
        logits = self._logits(batch)
        return {f"accuracy_{name}": float((logits[name].argmax(-1) == batch[name]).float().mean()) for name in logits}


def encode_text(text_encoder: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """`(batch, length, d_model)` embeddings with padding zeroed, as Wan's transformer expects them."""
    embeddings = text_encoder(input_ids, attention_mask=attention_mask).last_hidden_state
    return embeddings * attention_mask.unsqueeze(-1).to(embeddings.dtype)
