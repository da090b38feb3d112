"""Tokenizer and token arrays of the tiny language model.

python training/lm_tokenizer.py --config configs/lm/tiny_tokenizer.yaml [KEY=VALUE ...]
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.language_model import prepare_corpus

if __name__ == "__main__":
    main(prepare_corpus, default_config="lm/tiny_tokenizer")
