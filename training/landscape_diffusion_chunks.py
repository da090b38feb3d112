"""Causal transformer of the embedded model, first stage: single chunks of many scenes of LandscapeWorld.

    accelerate launch training/landscape_diffusion_chunks.py --config configs/landscape/tiny_diffusion_chunks.yaml

Run it again to resume. Two CPU processes: torchrun --nproc_per_node 2 with the same arguments.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.landscape import train_diffusion

if __name__ == "__main__":
    main(train_diffusion, default_config="landscape/tiny_diffusion_chunks")
