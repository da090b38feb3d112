"""The tiny language model: next-token training on a tokenized corpus.

    accelerate launch training/lm_causal.py --config configs/lm/tiny_causal.yaml [KEY=VALUE ...]

Run it again to resume. Two CPU processes: torchrun --nproc_per_node 2 with the same arguments.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.language_model import train_causal_lm

if __name__ == "__main__":
    main(train_causal_lm, default_config="lm/tiny_causal")
