"""What a run of speculative decoding cost and gained."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


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
        values = {name: value for name, value in vars(self).items() if name not in ("accept_lengths", "notes")}
        derived = ("tokens_per_round", "accept_length", "acceptance", "tokens_per_second", "other_seconds")
        return {
            **values,
            **{name: getattr(self, name) for name in derived},
            "accept_lengths": {str(length): times for length, times in sorted(self.accept_lengths.items())},
            "notes": self.notes,
        }
