"""CLaSp: a fixed number of whole layers is left out, chosen by the same hidden states.

"CLaSp: In-Context Layer Skip for Self-Speculative Decoding" (arXiv 2505.24196). Its dynamic programme is the one of
`vidgen.language.decoding.knapsack` over layers of equal weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vidgen.language.decoding.base import DecodingState, SpeculativeConfig, register_drafter
from vidgen.language.decoding.baselines import whole_argument
from vidgen.language.decoding.items import ItemRunner
from vidgen.language.decoding.knapsack import SkipPlan, solve_knapsack
from vidgen.language.decoding.planning import PlanningDrafter
from vidgen.language.decoding.skip import sublayers
from vidgen.runtime.checks import check_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layer_plans(states: torch.Tensor, runner: ItemRunner, budget: int) -> list[SkipPlan]:
    """Choices of whole layers, by their number.

    Args:
        states: `(2 * layers + 1, tokens, width)` of the target.
        runner: runs items on branches of these tokens.
        budget: most layers to leave out.
    """

    def run_layer(layer: int, branches: torch.Tensor) -> torch.Tensor:
        return runner(2 * layer + 1, runner(2 * layer, branches))

    layers = len(states) // 2
    # Exactly so many layers are wanted: none of the choices on the way is given up.
    plans = solve_knapsack(states[::2], run_layer, [1] * layers, budget, tau=-1.0, edge=1)
    return [
        replace(plan, skip=frozenset(item for layer in plan.skip for item in (2 * layer, 2 * layer + 1)))
        for plan in plans
    ]


@register_drafter("clasp")
class CLaSpDrafter(PlanningDrafter):
    """The target without the layers that matter least to the newest tokens, chosen anew at intervals.

    Args:
        model: the target.
        layers: how many are left out.
        config: length of drafts.
        calibration_tokens: positions that a choice looks at.
        replan_interval: rounds between choices.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: int,
        config: SpeculativeConfig | None = None,
        calibration_tokens: int = 16,
        replan_interval: int = 64,
    ) -> None:
        check_whole(1, len(sublayers(model)) - 2, layers=layers)
        check_whole(1, calibration_tokens=calibration_tokens, replan_interval=replan_interval)
        super().__init__(model, config or SpeculativeConfig(), calibration_tokens, replan_interval)
        self.layers = layers

    @classmethod
    def from_argument(cls, model: PreTrainedModel, argument: str | None) -> CLaSpDrafter:
        return cls(model, whole_argument(cls.name, argument, default=max(1, len(sublayers(model)) // 3)))

    def plan(self, state: DecodingState, states: torch.Tensor, runner: ItemRunner, limit: int) -> None:
        self.set_skip(layer_plans(states, runner, self.layers)[-1].skip)
