"""A multimodal language model fine-tuned as a reranker of candidates.

    python training/sgg_reranker_mllm.py --config configs/sgg/qwen3vl_2b_4dor_reranker.yaml

`accelerate launch` and `torchrun --nproc_per_node N` work as well. Run it again to resume.
"""

from scene_graph.recipes import train_mllm_reranker
from vidgen.recipes.command_line import main

if __name__ == "__main__":
    main(train_mllm_reranker, default_config="sgg/qwen3vl_2b_4dor_reranker")
