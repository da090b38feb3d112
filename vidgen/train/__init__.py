"""Training: `fit` is the only loop, a `TrainingMethod` is one algorithm, the configs say how long and how fast."""

from .config import OptimizerConfig, TrainConfig
from .loop import TrainResult, fit, fit_recipe
from .method import StepOutput, TrainingMethod

__all__ = ["OptimizerConfig", "StepOutput", "TrainConfig", "TrainResult", "TrainingMethod", "fit", "fit_recipe"]
