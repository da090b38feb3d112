"""Residual context, stage 2: a model learns to read what a reference model predicts (35 seconds on one core).

Run it after `training/dllm_base.py`:

    accelerate launch training/dllm_rcd.py --config configs/dllm/tiny_rcd.yaml
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.dllm import train_residual_context

if __name__ == "__main__":
    main(train_residual_context, default_config="dllm/tiny_rcd")
