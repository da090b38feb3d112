"""Put the trained parts of the embedded model into one diffusers folder with its model card.

python training/landscape_assemble.py --config configs/landscape/tiny_assemble.yaml [output_dir=my-model ...]
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.landscape import assemble

if __name__ == "__main__":
    main(assemble, default_config="landscape/tiny_assemble")
