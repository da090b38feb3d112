"""A multimodal language model fine-tuned as a predictor of scene graphs.

    python training/sgg_predictor_mllm.py --config configs/sgg/qwen3vl_2b_4dor_predictor.yaml

`accelerate launch` and `torchrun --nproc_per_node N` work as well. Run it again to resume.
"""

from scene_graph.recipes import train_mllm_predictor
from vidgen.recipes.command_line import main

if __name__ == "__main__":
    main(train_mllm_predictor, default_config="sgg/qwen3vl_2b_4dor_predictor")
