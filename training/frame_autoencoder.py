"""The autoencoder of single frames that a world model works in.

    python training/frame_autoencoder.py --config configs/live/vizdoom64_autoencoder.yaml

Run it again to resume.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.world_model import train_frame_autoencoder

if __name__ == "__main__":
    main(train_frame_autoencoder, default_config="live/vizdoom64_autoencoder")
