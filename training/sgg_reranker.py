"""A small Siamese network that orders candidates for examples.

    python training/sgg_reranker.py --config configs/sgg/tiny_reranker.yaml

`accelerate launch` and `torchrun --nproc_per_node N` work as well. Run it again to resume.
"""

from scene_graph.recipes import train_reranker
from vidgen.recipes.command_line import main

if __name__ == "__main__":
    main(train_reranker, default_config="sgg/tiny_reranker")
