"""Training of masked diffusion language models: the plain loss, with the residual context of a reference model, and
without regard to how many masks follow the text."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from vidgen.language.dllm.generation import check_same_vocabulary
from vidgen.language.dllm.losses import (
    MaskAgnosticConfig,
    draw_extra_masks,
    draw_masks,
    mask_agnostic_loss,
    mdlm_loss,
)
from vidgen.language.dllm.modeling import MaskedDiffusionLM, noisy_clean_visibility
from vidgen.language.dllm.rcd import ResidualContextConfig
from vidgen.runtime.errors import TrainingError
from vidgen.train import StepOutput, TrainingMethod


class MaskedDiffusionMethod(TrainingMethod):
    """Predict hidden tokens: stage 1 of residual context, its control, and any pre-training or fine-tuning.

    A batch holds `input_ids` `(batch, length)`, and maybe `attention_mask` (0 = padding on the right) and `loss_mask`
    (0 = prompt, never hidden). A block model is trained on the layout [noisy ‖ clean].

    Args:
        model: the model.
        tokenizer: saved beside the weights, where there is one.
    """

    def __init__(self, model: MaskedDiffusionLM, tokenizer: Any = None) -> None:
        super().__init__()
        if model.config.mask_token_id is None:
            raise TrainingError("the model has no mask token; set mask_token_id in its config")
        self.model, self.tokenizer = model, tokenizer

    def roles(self) -> dict[str, torch.nn.Module]:
        return {"model": self.model}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        inputs, hidden, p, lengths = self.corrupt(batch, generator)
        logits = self.model(**inputs).logits
        loss = mdlm_loss(logits, batch["input_ids"], hidden, p, lengths)
        return StepOutput({"model": loss}, {"accuracy": _accuracy(logits, batch["input_ids"], hidden)})

    @staticmethod
    def trainable(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that may be hidden and tokens that exist, both bool `(batch, length)`."""
        everything = torch.ones_like(batch["input_ids"])
        exists = batch.get("attention_mask", everything).bool()
        return exists & batch.get("loss_mask", everything).bool(), exists

    def corrupt(
        self, batch: dict[str, Any], generator: torch.Generator
    ) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Arguments of a forward; hidden tokens `(batch, length)`, their probability and their largest number."""
        tokens = batch["input_ids"]
        trainable, exists = self.trainable(batch)
        hidden, p = draw_masks(trainable, generator)
        noisy = tokens.masked_fill(hidden, self.model.config.mask_token_id)
        length, block = tokens.shape[1], self.model.config.block_size
        inputs: dict[str, Any] = {"logits_positions": slice(0, length)}
        if block is None:
            inputs |= {"input_ids": noisy, "attention_mask": exists}
        else:
            positions = torch.arange(length, device=tokens.device).expand_as(tokens)
            inputs |= {
                "input_ids": torch.cat([noisy, tokens], dim=1),
                "position_ids": positions.repeat(1, 2),
                "attention_mask": noisy_clean_visibility(positions, block) & exists.repeat(1, 2)[:, None, :],
            }
        return inputs, hidden, p, trainable.sum(1)

    def save_pretrained(self, directory: str | os.PathLike, ema_roles: dict[str, torch.nn.Module]) -> None:
        super().save_pretrained(directory, ema_roles)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(os.path.join(directory, "model"))


class ResidualContextMethod(MaskedDiffusionMethod):
    """Stage 2: read the residuals of what a frozen reference model predicts on the same hidden tokens (Algorithm 1).

    One forward of either model per step; time is not unrolled. The saved model generates with residual context.

    Args:
        model: the target; its own embedding table makes the residuals.
        reference: a trained model with the same tokens, of any size.
        config: see `ResidualContextConfig`; its temperature and start are those of generation.
        tokenizer: see `MaskedDiffusionMethod`.
    """

    def __init__(
        self,
        model: MaskedDiffusionLM,
        reference: MaskedDiffusionLM,
        config: ResidualContextConfig,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(model, tokenizer)
        check_same_vocabulary(model, reference)
        if model.config.block_size != reference.config.block_size:
            sizes = model.config.block_size, reference.config.block_size
            raise TrainingError("block_size is {} in the target and {} in the reference".format(*sizes))
        self.reference = reference.eval().requires_grad_(False)
        self.training_config = dataclasses.replace(config, residual_temperature=1.0)
        model.generation_config.rcd = dataclasses.asdict(config)

    def roles(self) -> dict[str, torch.nn.Module]:
        return {"model": self.model, "reference": self.reference}

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        inputs, hidden, p, lengths = self.corrupt(batch, generator)
        with torch.no_grad():
            residual_logits = self.reference(**inputs).logits  # (batch, length, vocab)
        logits = self.model(**inputs, residual_logits=residual_logits, residual_config=self.training_config).logits
        loss = mdlm_loss(logits, batch["input_ids"], hidden, p, lengths)
        tokens = batch["input_ids"]
        metrics = {
            "accuracy": _accuracy(logits, tokens, hidden),
            "reference_accuracy": _accuracy(residual_logits, tokens, hidden),
        }
        return StepOutput({"model": loss}, metrics)


class MaskAgnosticMethod(MaskedDiffusionMethod):
    """Predict hidden tokens, and the same whatever number of masks follows the text; see `mask_agnostic_loss`.

    Args:
        model: a model that sees everything, or `peft` around one: then the adapters are what is saved.
        config: see `MaskAgnosticConfig`.
        tokenizer: see `MaskedDiffusionMethod`.
    """

    def __init__(self, model: MaskedDiffusionLM, config: MaskAgnosticConfig, tokenizer: Any = None) -> None:
        super().__init__(model, tokenizer)
        if model.config.block_size is not None:
            raise TrainingError(
                f"the model has block_size={model.config.block_size}: it doesn't see the masks of later blocks, so "
                "there is nothing to train; give a model that sees everything"
            )
        self.config, self.guard = config, CollapseGuard()

    def training_step(self, batch: dict[str, Any], step: int, generator: torch.Generator) -> StepOutput:
        tokens = batch["input_ids"]
        trainable, exists = self.trainable(batch)
        hidden, p = draw_masks(trainable, generator, self.config.p_min)
        extra = draw_extra_masks(len(tokens), self.config.max_extra_masks, generator)
        result = mask_agnostic_loss(self.model, tokens, hidden, p, extra, self.config, exists)
        labels = tokens[hidden]
        # Without its weights, which make single texts count a hundredfold, the cross-entropy shows a collapse early.
        nats = F.cross_entropy(result.logits[0].float(), labels, reduction="sum") / max(1, len(labels))
        self.guard.observe(step, float(nats), float(result.distance))
        right = (result.logits[0].argmax(-1) == labels).sum() / max(1, len(labels))
        metrics = {"ce": result.ce, "tv": result.tv, "nats": nats, "distance": result.distance, "accuracy": right}
        return StepOutput({"model": result.loss}, metrics)

    def extra_state(self) -> dict[str, Any]:
        return self.guard.state()

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.guard = CollapseGuard(**state)


@dataclass
class CollapseGuard:
    """Stops a run whose predictions agree because they no longer say anything: beta is too large.

    Attributes:
        start: mean cross-entropy of the first `FIRST` steps, in nats per hidden token.
        recent: moving average since.
        seen: steps.
        above: steps in a row at which `recent` was more than `RISE` times the start.
    """

    start: float = 0.0
    recent: float = 0.0
    seen: int = 0
    above: int = 0

    FIRST = 20
    PATIENCE = 100
    RISE = 1.2

    def observe(self, step: int, loss: float, distance: float) -> None:
        """Takes the loss of a micro-batch; all processes see its mean, so that they stop together.

        Raises:
            TrainingError: the loss has been high for too long.
        """
        if torch.distributed.is_initialized():
            gathered: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(gathered, loss)
            loss = sum(gathered) / len(gathered)
        self.seen += 1
        if self.seen <= self.FIRST:
            self.start += (loss - self.start) / self.seen
            self.recent = self.start
            return
        self.recent += 0.05 * (loss - self.recent)
        self.above = self.above + 1 if self.recent > self.RISE * self.start else 0
        if self.above >= self.PATIENCE:
            raise TrainingError(
                f"step {step}: the cross-entropy is {self.recent:.3g} nats per hidden token, at the start it was "
                f"{self.start:.3g}; it has been {self.RISE:g} times that for {self.PATIENCE} steps, while the total "
                f"variation is {distance:.2g}: predictions become constant. Use a smaller beta or learning rate."
            )

    def state(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _accuracy(logits: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    right = (logits.detach().argmax(-1) == tokens) & hidden
    return right.sum() / hidden.sum().clamp(min=1)
