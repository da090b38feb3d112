"""What would be wrong: held-out files that are trained on, text that isn't read back as it was, bytes counted wrongly,
windows that depend on more than seed and step."""

from __future__ import annotations

import json

import pytest
import torch

from vidgen.language.corpus import (
    CorpusError,
    TextSource,
    TokenWindows,
    read_index,
    token_bytes,
    train_tokenizer,
    write_corpus,
)
from vidgen.runtime.errors import ConfigError


@pytest.fixture(scope="module")
def source(text_folder):
    return TextSource(str(text_folder), suffix=".txt", heldout_percent=20)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, source, byte_tokenizer):
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    write_corpus(source, byte_tokenizer, folder)
    return folder


def test_each_file_is_on_one_side_and_stays_there_when_files_are_added(tmp_path, source, text_folder):
    train, heldout = source.files("train"), source.files("heldout")
    assert not set(train) & set(heldout)
    assert len(train) + len(heldout) == 40
    for name in train + heldout:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((text_folder / name).read_text())
    (tmp_path / "another.txt").write_text("x")
    grown = TextSource(str(tmp_path), suffix=".txt", heldout_percent=20)
    assert set(train) <= set(grown.files("train"))
    assert set(heldout) <= set(grown.files("heldout"))


def test_the_standard_library_has_no_tests_tables_or_files_of_the_build():
    names = TextSource().files("train") + TextSource().files("heldout")
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    unwanted = ("test", "site-packages", "encodings", "_sysconfigdata")
    assert not [name for name in names if any(part.startswith(unwanted) for part in name.split("/"))]


TEXTS = ["def f(x):\n\treturn  x\n", "naïve “quotes” 漢字 🎬", " leading, trailing \n\n", "\x00\x7f"]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_is_read_back_and_its_bytes_are_counted(byte_tokenizer, text):
    ids = byte_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert byte_tokenizer.decode(ids) == text
    assert int(token_bytes(byte_tokenizer)[ids].sum()) == len(text.encode())


def test_special_tokens_stand_for_no_bytes(byte_tokenizer):
    lengths = token_bytes(byte_tokenizer)
    assert lengths[byte_tokenizer.all_special_ids].sum() == 0
    assert (lengths == 0).sum() == len(set(byte_tokenizer.all_special_ids))


def test_a_corpus_holds_all_texts_of_its_split(corpus, source, byte_tokenizer):
    index = read_index(corpus)
    for split in ("train", "heldout"):
        texts = list(source.texts(split))
        windows = TokenWindows(corpus, split, 8)
        decoded = byte_tokenizer.decode(windows.tokens).split(byte_tokenizer.eos_token)
        assert decoded == [*texts, ""]
        counts = {"files": len(texts), "bytes": sum(map(len, texts)), "tokens": len(windows.tokens)}
        assert index["splits"][split] == counts


def test_windows_follow_from_seed_step_and_rank_alone(corpus):
    windows = TokenWindows(corpus, "train", 16, seed=1)
    first = windows.batch(3, 0, 2, 4)["tokens"]
    windows.batch(7, 1, 2, 4)
    again = TokenWindows(corpus, "train", 16, seed=1)
    assert torch.equal(again.batch(3, 0, 2, 4)["tokens"], first)
    assert first.shape == (4, 17)
    reseeded = TokenWindows(corpus, "train", 16, seed=2)
    for other in (again.batch(4, 0, 2, 4), again.batch(3, 1, 2, 4), reseeded.batch(3, 0, 2, 4)):
        assert not torch.equal(other["tokens"], first)


def test_windows_are_stretches_of_the_text_up_to_its_last_token(corpus):
    windows = TokenWindows(corpus, "heldout", 5)
    stretches = {tuple(row) for row in windows.tokens.unfold(0, 6, 1).tolist()}
    drawn = {tuple(row) for step in range(60) for row in windows.batch(step, 0, 1, 8)["tokens"].tolist()}
    assert drawn <= stretches
    windows.tokens = torch.arange(7)
    drawn = {tuple(row) for row in windows.batch(0, 0, 1, 64)["tokens"].tolist()}
    assert drawn == {(0, 1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6)}


def test_windows_in_order_predict_each_token_once(corpus):
    windows = TokenWindows(corpus, "heldout", 7)
    everything = windows.in_order()
    predicted = everything[:, 1:].flatten()
    assert torch.equal(predicted, windows.tokens[1 : 1 + len(predicted)].long())
    assert len(windows.tokens) - 1 - len(predicted) < 7
    few = windows.in_order(3)
    assert torch.equal(few[[0, -1]], everything[[0, -1]])
    assert len(few) == 3


def test_what_can_not_be_read_is_named(tmp_path, corpus, byte_tokenizer):
    with pytest.raises(CorpusError, match="does not exist; it is made by the recipe lm_tokenizer"):
        TokenWindows(tmp_path, "train", 8)
    with pytest.raises(CorpusError, match=r"has \d+ tokens; a window takes 1000001"):
        TokenWindows(corpus, "train", 1_000_000)
    with pytest.raises(CorpusError, match="no file \\*.rst in the split"):
        TextSource(str(tmp_path), suffix=".rst").files("train")
    with pytest.raises(CorpusError, match="folder=/nope of the corpus does not exist"):
        TextSource("/nope").files("train")
    with pytest.raises(ConfigError, match="heldout_percent=0"):
        TextSource(heldout_percent=0)
    with pytest.raises(ConfigError, match="vocab_size=100; bytes and special tokens alone take 258"):
        train_tokenizer(["text"], 100, 8)
    (tmp_path / "corpus.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(CorpusError, match="is damaged .*; run the recipe lm_tokenizer again"):
        read_index(tmp_path)
