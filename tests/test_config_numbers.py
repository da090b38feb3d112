"""What would be wrong: a NaN in a configuration passes every check of what is forbidden and shows hours later, as a
loss that is not finite."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import pkgutil

import pytest

import vidgen.forcing
import vidgen.train
from vidgen.forcing.guidance_distillation import GuidanceDistillationMethod
from vidgen.forcing.live import CurriculumStage, ForcingSchedule
from vidgen.runtime.errors import ConfigError
from vidgen.schedulers import FlowConsistencyScheduler, flow_sampler
from vidgen.train import OptimizerConfig, TrainConfig

# Configurations that can't be made without arguments.
GIVEN = {
    CurriculumStage: lambda: CurriculumStage(p=4, until=0.5),
    ForcingSchedule: lambda: ForcingSchedule.live(8),
    TrainConfig: lambda: TrainConfig("run", max_steps=4, optimizers={"model": OptimizerConfig()}),
}
# Computed in training, never configured.
RESULTS = {"ForcingWindow", "Rollout", "StepOutput", "TrainResult"}


def configurations():
    """Every dataclass with numbers in vidgen.forcing and vidgen.train, and its numeric fields."""
    for package in (vidgen.forcing, vidgen.train):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if kind.__module__ != module.name or not dataclasses.is_dataclass(kind) or kind.__name__ in RESULTS:
                    continue
                for field in dataclasses.fields(kind):
                    if any(number in str(field.type) for number in ("float", "int", "Any")):
                        yield pytest.param(kind, field.name, id=f"{kind.__name__}.{field.name}")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "field"), list(configurations()))
def test_a_number_that_is_not_finite_is_refused_by_its_field(kind, field, number):
    config = GIVEN.get(kind, kind)()
    value = getattr(config, field)
    with pytest.raises(ConfigError, match=f"^{field}="):
        dataclasses.replace(config, **{field: (number, *value[1:]) if isinstance(value, tuple) else number})


@pytest.mark.parametrize("p", [{4: math.nan}, {4: 1.0, 2: math.inf}])
def test_weights_of_prompt_frames_are_finite(p):
    with pytest.raises(ConfigError, match="^p="):
        CurriculumStage(p)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_samplers_and_guidance_are_finite(number):
    with pytest.raises(ConfigError, match=f"shift={number}"):
        flow_sampler(shift=number)
    with pytest.raises(ValueError, match=f"shift={number}"):
        FlowConsistencyScheduler(shift=number)
    with pytest.raises(ConfigError, match=f"guidance_scale={number}"):
        GuidanceDistillationMethod(None, None, None, number, None, None)
