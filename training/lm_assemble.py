"""Put the trained language model into one folder with its tokenizer and model card.

python training/lm_assemble.py --config configs/lm/tiny_assemble.yaml [KEY=VALUE ...]
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.language_model import assemble_language_model

if __name__ == "__main__":
    main(assemble_language_model, default_config="lm/tiny_assemble")
