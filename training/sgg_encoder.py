"""An open_clip model of frames and the text of their graphs.

    python training/sgg_encoder.py --config configs/sgg/tiny_encoder.yaml

`accelerate launch` and `torchrun --nproc_per_node N` work as well. Run it again to resume.
"""

from scene_graph.recipes import train_encoder
from vidgen.recipes.command_line import main

if __name__ == "__main__":
    main(train_encoder, default_config="sgg/tiny_encoder")
