"""A masked diffusion language model: the plain objective (45 seconds on one core for 4 x 4 sudoku).

    accelerate launch training/dllm_base.py --config configs/dllm/tiny_base.yaml

With `--config dllm/tiny_seqd` it goes on with the same objective. Run it again to resume.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.dllm import train_masked_diffusion

if __name__ == "__main__":
    main(train_masked_diffusion, default_config="dllm/tiny_base")
