"""Which executable a batch runs in, or why none does. One pure function; imports no jax."""

from dataclasses import dataclass
from enum import StrEnum

from jaxprefill.prefill.buckets import BucketLadder, ShapeKey


class FallbackReason(StrEnum):
    """Why a batch takes the eager fallback."""

    TOO_MANY_REQUESTS = "too_many_requests"
    TOO_MANY_TOKENS = "too_many_tokens"
    CONTEXT_ABOVE_MAX = "context_above_max"
    CONTEXT_UNKNOWN = "context_unknown"
    PADDING_FACTOR = "padding_factor"
    GROUP_VOTE = "group_vote"
    DISABLED = "disabled"


@dataclass(frozen=True)
class Use:
    """Run in the executable of this shape."""

    key: ShapeKey


@dataclass(frozen=True)
class Fallback:
    """Run eagerly. `limit` is what the ladder allows, `value` what the batch needs, if it is these.

    Of a batch that another rank's keeps from its executable both are None.
    """

    reason: FallbackReason
    value: int | float | None = None
    limit: int | float | None = None

    def __str__(self) -> str:
        told = {
            FallbackReason.GROUP_VOTE: "another rank's batch fits no executable",
            FallbackReason.DISABLED: "prefill_backend is eager",
        }
        counts = f"batch {'?' if self.value is None else self.value}, limit {self.limit}"
        return f"{self.reason} ({told.get(self.reason, counts)})"


@dataclass(frozen=True, kw_only=True)
class PrefillPolicy:
    """What may run in an executable.

    Attributes:
        is_enabled: False with `prefill_backend="eager"`.
        max_padding_factor: padded over real tokens; None means no limit. SGLang falls back
            above 2 (PR 31487); here padding below ~200 tokens is free, so it is off by default.
    """

    ladder: BucketLadder
    is_enabled: bool = True
    max_padding_factor: float | None = None


def decide(
    policy: PrefillPolicy, *, num_tokens: int, num_requests: int, max_context: int | None
) -> Use | Fallback:
    """The executable for a batch of these counts, or the reason why there is none."""
    ladder = policy.ladder
    if not policy.is_enabled:
        return Fallback(FallbackReason.DISABLED)
    if num_requests > ladder.num_slots:
        return Fallback(FallbackReason.TOO_MANY_REQUESTS, num_requests, ladder.num_slots)
    if num_tokens > ladder.buckets[-1]:
        return Fallback(FallbackReason.TOO_MANY_TOKENS, num_tokens, ladder.buckets[-1])
    if max_context is None:
        return Fallback(FallbackReason.CONTEXT_UNKNOWN, None, ladder.max_contexts[-1])
    if max_context > ladder.max_contexts[-1]:
        return Fallback(FallbackReason.CONTEXT_ABOVE_MAX, max_context, ladder.max_contexts[-1])
    key = ladder.pick(num_tokens, max_context)
    assert key is not None  # both counts are within the ladder
    factor = key.num_tokens / max(num_tokens, 1)
    if policy.max_padding_factor is not None and factor > policy.max_padding_factor:
        return Fallback(FallbackReason.PADDING_FACTOR, factor, policy.max_padding_factor)
    return Use(key)
