"""Latent space of the embedded model, and the training scenes in it.

    python training/landscape_latents.py --config configs/landscape/tiny_latents.yaml [num_scenes=32 ...]

Run it again to resume: scenes that are already encoded are skipped.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.landscape import encode_latents

if __name__ == "__main__":
    main(encode_latents, default_config="landscape/tiny_latents")
