"""Where the HTTP side tells what happens to requests; metrics listen here."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FinishedRequest:
    """One sequence that has ended.

    Attributes:
        reason: stop, length, abort (the client went away, or took too long) or error.
        queue_s: that it waited in the engine for its first step; None: it had none.
        prefill_s: from there to its first result; None: there was none.
        first_token_s: from its arrival to its first token; None: there was none.
        total_s: from its arrival to its end.
    """

    reason: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_s: float | None
    prefill_s: float | None
    first_token_s: float | None
    total_s: float


class Observer:
    """Hears of everything and does nothing; subclasses count."""

    def rejected(self, reason: str) -> None:
        """A call was refused: `queue_full`, `unavailable`, `invalid`, `unauthorized` and so on."""

    def tokens_apart(self, seconds: float) -> None:
        """So long after the token before it a sequence got its next one."""

    def finished(self, record: FinishedRequest) -> None:
        """A sequence has ended."""
