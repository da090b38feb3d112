"""The router of SGG-ICL, fitted on validation takes in one process.

Run it after the predictor, the index and the reranker:

    python training/sgg_router.py --config configs/sgg/tiny_router.yaml
"""

from scene_graph.recipes import train_router
from vidgen.recipes.command_line import main

if __name__ == "__main__":
    main(train_router, default_config="sgg/tiny_router")
