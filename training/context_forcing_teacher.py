"""Stage 0 of Context Forcing: a teacher that continues videos from what a slow-fast memory holds.

    torchrun --nproc_per_node N training/context_forcing_teacher.py --config configs/context_forcing/tiny_teacher.yaml

Run it again to resume. `accelerate launch` works as well; on CPUs it starts a single process.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.context_forcing import train_teacher

if __name__ == "__main__":
    main(train_teacher, default_config="context_forcing/tiny_teacher")
