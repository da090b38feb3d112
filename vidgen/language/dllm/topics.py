"""Topics as a language: a text's words hint at its topic, and `? label` names it; a bag of weak evidence.

Every topic has a few keywords. A share of a text's words are keywords of its topic, the rest are words of any, so the
label is the more certain the more words are seen. A `.` says nothing: runs of it stand in the text, so that a model
learns to look past them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from vidgen.runtime.checks import check_whole
from vidgen.runtime.device import generator_for
from vidgen.runtime.errors import ConfigError

PAD, END, MASK, DOT, QUERY = "<pad>", "</s>", "<mask>", ".", "?"
SPECIAL = (PAD, END, MASK, DOT, QUERY)
LABELS = 4  # in a whole text


@dataclass(frozen=True)
class TopicData:
    """Random texts, as `fit` asks for them.

    Args:
        topics: labels.
        keywords: words of each topic.
        topic_share: share of a text's words that are keywords of its topic; the others are drawn from all words.
        length: tokens of a text.
        answer_words: 0 = whole texts with four `? label` in them, of which every token may be hidden; k = prompts of
            words and `?` with answers, the label and k more words, of which only the answers may be.
        seed: fixes the texts.
    """

    topics: int = 12
    keywords: int = 8
    topic_share: float = 0.25
    length: int = 64
    answer_words: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole(2, topics=self.topics)
        check_whole(1, keywords=self.keywords)
        check_whole(0, answer_words=self.answer_words)
        # All labels, or a prompt of at least one word with its answer.
        check_whole(max(2 * LABELS, self.answer_words + 3), length=self.length)
        if not 0 < self.topic_share <= 1:
            raise ConfigError(f"topic_share={self.topic_share}; allowed: above 0, up to 1")

    @property
    def words(self) -> int:
        return self.topics * self.keywords

    @property
    def vocab_size(self) -> int:
        return len(SPECIAL) + self.topics + self.words

    @property
    def mask_token_id(self) -> int:
        return SPECIAL.index(MASK)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Reads texts of words with spaces between them."""
        names = [*SPECIAL, *(f"topic{topic}" for topic in range(self.topics))]
        names += [f"word{word}" for word in range(self.words)]
        tokenizer = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token=PAD))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, mask_token=MASK)

    def label_ids(self, topics: torch.Tensor) -> torch.Tensor:
        """Tokens of the labels."""
        return topics + len(SPECIAL)

    def draw_words(self, topics: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
        """Words of texts about the given topics, tokens `(texts, count)`."""
        shape = (len(topics), count)
        keyword = topics[:, None] * self.keywords + torch.randint(self.keywords, shape, generator=generator)
        other = torch.randint(self.words, shape, generator=generator)
        about = torch.rand(shape, generator=generator) < self.topic_share
        return torch.where(about, keyword, other) + len(SPECIAL) + self.topics

    def batch(self, step: int, rank: int, world_size: int, batch_size: int) -> dict[str, torch.Tensor]:
        generator = generator_for(self.seed, 1, step, rank)
        topics = torch.randint(self.topics, (batch_size,), generator=generator)
        if self.answer_words:
            return self._pairs(topics, generator)
        return {"input_ids": self._texts(topics, generator)}

    def _texts(self, topics: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        tokens, place = self.draw_words(topics, self.length, generator), torch.arange(self.length)
        dots = torch.randint(self.length // 4 + 1, (len(topics), 1), generator=generator)
        start = (torch.rand(len(topics), 1, generator=generator) * (self.length - dots + 1)).long()
        tokens[(place >= start) & (place < start + dots)] = SPECIAL.index(DOT)
        # One label in every part, so that they never overlap.
        part = self.length // LABELS
        for first in range(0, LABELS * part, part):
            at = first + torch.randint(part - 1, (len(topics), 1), generator=generator)
            tokens.scatter_(1, at, SPECIAL.index(QUERY))
            tokens.scatter_(1, at + 1, self.label_ids(topics)[:, None])
        return tokens

    def _pairs(self, topics: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
        tokens, place = self.draw_words(topics, self.length, generator), torch.arange(self.length)
        words = 1 + torch.randint(self.length - self.answer_words - 2, (len(topics), 1), generator=generator)
        tokens.scatter_(1, words, SPECIAL.index(QUERY))
        tokens.scatter_(1, words + 1, self.label_ids(topics)[:, None])
        exists = place < words + 2 + self.answer_words
        return {
            "input_ids": tokens.masked_fill(~exists, SPECIAL.index(PAD)),
            "attention_mask": exists,
            "loss_mask": exists & (place > words),
        }
