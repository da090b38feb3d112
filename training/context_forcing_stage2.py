"""Stage 2 of Context Forcing: long rollouts scored by the context teacher.

    torchrun --nproc_per_node N training/context_forcing_stage2.py --config configs/context_forcing/tiny_stage2.yaml

Run it again to resume. `accelerate launch` works as well; on CPUs it starts a single process.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.context_forcing import distill

if __name__ == "__main__":
    main(distill, default_config="context_forcing/tiny_stage2")
