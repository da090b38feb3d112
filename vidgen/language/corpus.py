"""Text for language models: files of a folder, a byte-level tokenizer of our own, and token arrays that are made once.

A file is held out by the hash of its path, so adding files moves no other file to the other side. By default the text
is the source of Python's standard library, which is on every machine this package runs on.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vidgen.runtime.checkpoint import atomic_directory, load_safetensors, save_safetensors
from vidgen.runtime.device import derive_seed
from vidgen.runtime.errors import ConfigError, VidgenError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

INDEX_NAME = "corpus.json"
SPLITS = ("train", "heldout")
END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"
# Bytes and special tokens: without them not every text could be written.
MIN_VOCAB_SIZE = 256 + 2

# Not prose of programmers: tests (which many distributions leave out), generated tables, and what a build wrote.
STANDARD_LIBRARY_EXCLUDES = (
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "_sysconfigdata",
    "config-",
)  # fmt: skip


class CorpusError(VidgenError):
    """A corpus is missing, damaged, or too small."""


@dataclass(frozen=True)
class TextSource:
    """Which files are read.

    Attributes:
        folder: read with all its sub-folders; `None` is Python's standard library, without tests and tables.
        suffix: of the files.
        heldout_percent: about so many of a hundred files are held out.
        max_bytes: a longer file is cut there, so that none dominates.
    """

    folder: str | None = None
    suffix: str = ".py"
    heldout_percent: int = 5
    max_bytes: int = 200_000

    def __post_init__(self) -> None:
        if not 1 <= self.heldout_percent <= 50:
            raise ConfigError(f"heldout_percent={self.heldout_percent}; allowed: 1 to 50.")
        if self.max_bytes < 1:
            raise ConfigError(f"max_bytes={self.max_bytes}; it must be 1 or more.")

    def files(self, split: str) -> list[str]:
        """Paths of a split below the folder, with `/`, in order.

        Raises:
            CorpusError: the folder does not exist, or a split has no file.
        """
        root, excludes = self._root()
        if not root.is_dir():
            raise CorpusError(f"folder={root} of the corpus does not exist.")
        names = []
        for place, folders, files in os.walk(root):
            # Not even entered: packages installed there may have a hundred thousand files.
            folders[:] = [name for name in folders if not (excludes and name.startswith(excludes))]
            for file in files:
                name = (Path(place) / file).relative_to(root).as_posix()
                excluded = excludes and file.startswith(excludes)
                if file.endswith(self.suffix) and not excluded and self.is_heldout(name) == (split == "heldout"):
                    names.append(name)
        names.sort()
        if not names:
            raise CorpusError(
                f"{root} has no file *{self.suffix} in the split {split!r}; "
                "give another folder or suffix, or more files."
            )
        return names

    def is_heldout(self, name: str) -> bool:
        """Whether a path below the folder is held out."""
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < self.heldout_percent

    def texts(self, split: str) -> Iterator[str]:
        """The text of each file of a split; bytes that aren't UTF-8 become replacement characters."""
        root, _ = self._root()
        for name in self.files(split):
            text = (root / name).read_bytes()[: self.max_bytes].decode("utf-8", errors="replace")
            if text.strip():
                yield text

    def _root(self) -> tuple[Path, tuple[str, ...]]:
        if self.folder is not None:
            return Path(self.folder), ()
        return Path(sysconfig.get_paths()["stdlib"]), STANDARD_LIBRARY_EXCLUDES


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be read and written back unchanged.

    Args:
        texts: what it is fitted to.
        vocab_size: entries, bytes and special tokens among them.
        max_length: context of the model it belongs to, in tokens.

    Raises:
        ConfigError: the vocabulary has no room for all bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"vocab_size={vocab_size}; bytes and special tokens alone take {MIN_VOCAB_SIZE}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def write_corpus(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike,
    progress: Callable[[list[str]], Iterable[str]] = iter,
) -> None:
    """Tokenize a source once.

    The folder gets the tokenizer, per split `SPLIT.safetensors` with `tokens` int32 `(length,)`, all texts one after
    another with an end-of-text token behind each, and `corpus.json` with the source and its counts.

    Args:
        source: the files.
        tokenizer: with an end-of-text token.
        folder: appears once it is whole; an existing one is replaced.
        progress: wraps the list of texts of a split.
    """
    counts = {}
    with atomic_directory(folder) as unfinished:
        tokenizer.save_pretrained(unfinished)
        for split in SPLITS:
            texts = list(source.texts(split))
            if not texts:
                raise CorpusError(f"the split {split!r} holds nothing but empty files.")
            pieces = []
            for text in progress(texts):
                ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                pieces.append(np.array([*ids, tokenizer.eos_token_id], dtype=np.int32))
            tokens = torch.from_numpy(np.concatenate(pieces))
            save_safetensors({"tokens": tokens}, unfinished / f"{split}.safetensors")
            size = sum(len(text.encode("utf-8")) for text in texts)
            counts[split] = {"files": len(texts), "bytes": size, "tokens": len(tokens)}
        description = {"version": 1, "python": platform.python_version(), "source": vars(source), "splits": counts}
        (unfinished / INDEX_NAME).write_text(json.dumps(description, indent=1), encoding="utf-8")


def read_index(folder: str | os.PathLike) -> dict:
    """What `write_corpus` says about a folder: `python`, `source`, in `splits` the files, bytes and tokens of each.

    Raises:
        CorpusError: there is no corpus, or its index is damaged.
    """
    path = Path(folder) / INDEX_NAME
    if not path.is_file():
        raise CorpusError(f"{path} does not exist; it is made by the recipe lm_tokenizer.")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if index["version"] != 1:
            raise CorpusError(f"{path} has version {index['version']}; this one reads 1.")
        splits = {split: index["splits"][split] for split in SPLITS}
        return {"python": index["python"], "source": index["source"], "splits": splits}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CorpusError(f"{path} is damaged ({error!r}); run the recipe lm_tokenizer again.") from error


class TokenWindows:
    """Windows of a split's tokens, as `fit` asks for them: packed, so that no position of a batch is padding.

    A window begins anywhere and may hold the end of one text and the beginning of the next. What micro-batch `step`
    holds follows from (seed, step, rank) alone.

    Args:
        folder: a corpus.
        split: `"train"` or `"heldout"`.
        length: positions of a window that predict; it has one token more.
        seed: fixes where windows begin.

    Raises:
        CorpusError: there is no corpus, or the split is shorter than a window.
    """

    def __init__(self, folder: str | os.PathLike, split: str, length: int, seed: int = 0) -> None:
        read_index(folder)
        tensors, _ = load_safetensors(Path(folder) / f"{split}.safetensors")
        self.tokens, self.length, self.seed = tensors["tokens"], length, seed
        if len(self.tokens) <= length:
            raise CorpusError(
                f"the split {split!r} of {folder} has {len(self.tokens)} tokens; a window takes {length + 1}."
            )

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        """`tokens` int64 `(batch_size, length + 1)`."""
        random = np.random.default_rng(derive_seed(self.seed, step, rank))
        starts = torch.from_numpy(random.integers(len(self.tokens) - self.length, size=batch_size))
        return {"tokens": self.tokens[starts[:, None] + torch.arange(self.length + 1)].long()}

    def in_order(self, count: int | None = None) -> torch.Tensor:
        """`count` windows spread evenly over the split, or all that fit, `(windows, length + 1)`.

        Each predicts other tokens than the one before it.
        """
        windows = self.tokens[: (len(self.tokens) - 1) // self.length * self.length + 1]
        windows = windows.unfold(0, self.length + 1, self.length)
        if count is not None and count < len(windows):
            windows = windows[torch.linspace(0, len(windows) - 1, count).round().long()]
        return windows.long()


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Bytes of text that each token of a byte-level tokenizer stands for, int64 `(tokens,)`; special tokens have 0.

    Raises:
        CorpusError: the tokenizer isn't byte-level, so a token may not be a fixed number of bytes.
    """
    from tokenizers import pre_tokenizers

    alphabet, special = set(pre_tokenizers.ByteLevel.alphabet()), set(tokenizer.all_special_ids)
    lengths = []
    for index, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
        if index not in special and not set(token) <= alphabet:
            raise CorpusError(
                f"token {token!r} isn't written in the byte-level alphabet; bits per byte need a byte-level tokenizer."
            )
        lengths.append(0 if index in special else len(token))  # a character of the alphabet is a byte
    return torch.tensor(lengths)
