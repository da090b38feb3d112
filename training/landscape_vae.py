"""Causal video autoencoder of the embedded model, on LandscapeWorld.

    accelerate launch training/landscape_vae.py --config configs/landscape/tiny_vae.yaml [KEY=VALUE ...]

Run it again to resume. Two CPU processes: torchrun --nproc_per_node 2 with the same arguments.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.landscape import train_vae

if __name__ == "__main__":
    main(train_vae, default_config="landscape/tiny_vae")
