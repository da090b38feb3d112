"""What a run of speculative decoding cost and gained."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class VocabularyStats:
    """What a narrow draft head cost and gained in one `generate` call; see `vidgen.language.decoding.nanospec`.

    On a GPU, seconds of gathering and of the head are those of queueing the work; those of waiting are the device's.

    Attributes:
        drafts: rounds with a draft.
        active_total: active tokens, over these rounds.
        active_max: most active tokens.
        emitted: tokens after the first one, over all rows.
        covered: those that were active when drafts for their place were made.
        gather_seconds: copying the head's rows of new tokens.
        wait_seconds: until rows that were still being copied were there.
        head_seconds: draft logits.
        update_seconds: finding the new tokens, and gathering.
    """

    drafts: int = 0
    active_total: int = 0
    active_max: int = 0
    emitted: int = 0
    covered: int = 0
    gather_seconds: float = 0.0
    wait_seconds: float = 0.0
    head_seconds: float = 0.0
    update_seconds: float = 0.0

    def count_draft(self, active: int) -> None:
        """Notes how many tokens a draft chose among."""
        self.drafts += 1
        self.active_total += active
        self.active_max = max(self.active_max, active)

    def add(self, other: VocabularyStats) -> None:
        """Adds another call's."""
        most = max(self.active_max, other.active_max)
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.active_max = most

    @property
    def active_mean(self) -> float:
        """Active tokens in a round."""
        return self.active_total / self.drafts if self.drafts else 0.0

    @property
    def coverage(self) -> float:
        """Share of the emitted tokens that a draft could have proposed."""
        return self.covered / self.emitted if self.emitted else 0.0

    def to_dict(self) -> dict[str, float]:
        """All of it as JSON can hold it."""
        return {**vars(self), "active_mean": self.active_mean, "coverage": self.coverage}


@dataclass
class SpecStats:
    """Counts and seconds of one `generate` call, over all rows of its batch.

    On a GPU a phase ends when its result is read, so kernels that are still queued count for the phase that waits.

    Attributes:
        method: name of the drafter.
        batch_size: rows.
        new_tokens: tokens that were emitted, without padding.
        rounds: forward passes of the target after the prefill.
        drafting_rounds: those that had at least one draft to verify.
        drafted: draft tokens that the target saw.
        accepted: draft tokens that it confirmed.
        accept_lengths: confirmed drafts of one row in one drafting round -> how often.
        prefill_seconds: the target's pass over the prompt, with whatever the drafter prepares.
        draft_seconds: making drafts.
        verify_seconds: forward passes of the target and the choice of tokens.
        plan_seconds: choosing what to draft with.
        total_seconds: all of the call.
        first_token_seconds: until the first token was known.
        notes: what a drafter wants to report about itself.
        vocabulary: of a narrow draft head.
    """

    method: str
    batch_size: int = 1
    new_tokens: int = 0
    rounds: int = 0
    drafting_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accept_lengths: Counter[int] = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    plan_seconds: float = 0.0
    total_seconds: float = 0.0
    first_token_seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    vocabulary: VocabularyStats | None = None

    @property
    def tokens_per_round(self) -> float:
        """Tokens emitted per forward pass of the target, over all rows; the prefill gives the first token."""
        return (self.new_tokens - self.batch_size) / self.rounds if self.rounds else 0.0

    @property
    def accept_length(self) -> float:
        """Mean confirmed drafts of one row in a drafting round."""
        counted = sum(self.accept_lengths.values())
        return sum(length * times for length, times in self.accept_lengths.items()) / counted if counted else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that the target confirmed."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def other_seconds(self) -> float:
        """Bookkeeping: caches, stopping criteria, streamers."""
        named = self.prefill_seconds + self.draft_seconds + self.verify_seconds + self.plan_seconds
        return max(0.0, self.total_seconds - named)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        nested = ("accept_lengths", "notes", "vocabulary")
        values = {name: value for name, value in vars(self).items() if name not in nested}
        derived = ("tokens_per_round", "accept_length", "acceptance", "tokens_per_second", "other_seconds")
        return {
            **values,
            **{name: getattr(self, name) for name in derived},
            "accept_lengths": {str(length): times for length, times in sorted(self.accept_lengths.items())},
            "notes": self.notes,
            "vocabulary": None if self.vocabulary is None else self.vocabulary.to_dict(),
        }
