"""A world model by Teacher Forcing, Diffusion Forcing or LIVE.

    python training/world_model.py --config configs/live/vizdoom64_df.yaml
    python training/world_model.py --config configs/live/vizdoom64_live.yaml

`accelerate launch` and `torchrun --nproc_per_node N` work as well. Run it again to resume.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.world_model import train_world_model

if __name__ == "__main__":
    main(train_world_model, default_config="live/vizdoom64_df")
