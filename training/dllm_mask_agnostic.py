"""A masked diffusion language model learns to predict the same whatever number of masks follows the text.

Run it after `training/dllm_base.py --config dllm/tiny_topics`:

    accelerate launch training/dllm_mask_agnostic.py --config configs/dllm/mask_agnostic_tiny.yaml

Then `vidgen lm probe-context --task topics --model runs/dllm/mask_agnostic/weights/model --out report.json`.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.dllm import train_mask_agnostic

if __name__ == "__main__":
    main(train_mask_agnostic, default_config="dllm/mask_agnostic_tiny")
