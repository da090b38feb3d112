"""Stage 1 of Context Forcing: Self Forcing of a few-step student on short rollouts.

    torchrun --nproc_per_node N training/context_forcing_stage1.py --config configs/context_forcing/tiny_stage1.yaml

Run it again to resume. `accelerate launch` works as well; on CPUs it starts a single process.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.context_forcing import distill

if __name__ == "__main__":
    main(distill, default_config="context_forcing/tiny_stage1")
