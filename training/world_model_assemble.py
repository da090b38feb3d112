"""The trained parts of a world model as one folder to load or to play.

python training/world_model_assemble.py --config configs/live/vizdoom64_assemble.yaml
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.world_model import assemble_world_model

if __name__ == "__main__":
    main(assemble_world_model, default_config="live/vizdoom64_assemble")
