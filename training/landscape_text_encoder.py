"""Tokenizer and text encoder of the embedded model (2 minutes on 2 cores).

    accelerate launch training/landscape_text_encoder.py --config configs/landscape/tiny_text_encoder.yaml

Run it again to resume. Two CPU processes: torchrun --nproc_per_node 2 with the same arguments.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.landscape import train_text_encoder

if __name__ == "__main__":
    main(train_text_encoder, default_config="landscape/tiny_text_encoder")
