"""A tiny predictor of scene graphs, with examples in its prompts or without.

    python training/sgg_predictor.py --config configs/sgg/tiny_predictor.yaml

`accelerate launch` and `torchrun --nproc_per_node N` work as well. Run it again to resume.
"""

from scene_graph.recipes import train_predictor
from vidgen.recipes.command_line import main

if __name__ == "__main__":
    main(train_predictor, default_config="sgg/tiny_predictor")
