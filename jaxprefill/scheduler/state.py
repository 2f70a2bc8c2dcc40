"""One request's way through the engine."""

from dataclasses import dataclass, field
from enum import Enum

from jaxprefill.batch import BatchRow, SampleSpec
from jaxprefill.request import Request


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class RequestState:
    """Mutable progress of a request.

    "Dispatched" runs ahead of "known": a step is sent before the last one's tokens are read.

    Attributes:
        output_ids: generated tokens the host knows.
        num_sampled: generated tokens dispatched, known or not.
        num_computed: tokens whose KV is dispatched.
        num_in_flight: steps dispatched and not yet read.
        target: tokens to prefill before sampling: the prompt, and after a preemption the output
            known then.
        num_scored: prompt positions whose logprob is dispatched.
    """

    request: Request
    max_tokens: int
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list[int])
    num_sampled: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    target: int = 0
    num_scored: int = 1
    slot: int | None = None
    is_slot_ready: bool = False
    pages: list[int] = field(default_factory=list[int])

    @property
    def is_prefilled(self) -> bool:
        """Whether only the last sampled token's KV is missing."""
        return self.num_computed >= self.target

    @property
    def has_more_to_sample(self) -> bool:
        """Whether another token may be dispatched."""
        return self.num_sampled < self.max_tokens

    def prefill_row(self, num_tokens: int) -> BatchRow:
        """The next `num_tokens` of the prompt, and of the output that a preemption threw away."""
        start, end = self.num_computed, self.num_computed + num_tokens
        tokens = (*self.request.prompt_ids, *self.output_ids)[start:end]
        is_last = end == self.target
        return BatchRow(
            request_id=self.request.id,
            slot=self._held_slot(),
            token_ids=tokens,
            kv_len=end,
            pages=self.pages,
            sample=self._sample_spec(end) if is_last and self.has_more_to_sample else None,
            score_ids=self._score_ids(start, end),
        )

    def decode_row(self) -> BatchRow:
        """The last sampled token, which the device knows."""
        kv_len = self.num_computed + 1
        return BatchRow(
            request_id=self.request.id,
            slot=self._held_slot(),
            token_ids=None,
            kv_len=kv_len,
            pages=self.pages,
            sample=self._sample_spec(kv_len),
        )

    def _held_slot(self) -> int:
        assert self.slot is not None, "only a running request has rows"
        return self.slot

    def _sample_spec(self, position: int) -> SampleSpec:
        return SampleSpec(
            params=self.request.params,
            seed=self.request.seed,
            position=position,
            num_generated=self.num_sampled,
            stop_ids=self.request.stop_ids,
        )

    def _score_ids(self, start: int, end: int) -> tuple[int, tuple[int, ...]]:
        """What the new tokens score: the row at position p predicts token p + 1.

        A chunk's last row scores the next chunk's first token, which the prompt already names.
        """
        if not self.request.wants_prompt_logprobs:
            return 0, ()
        first = max(start, self.num_scored - 1)
        targets = self.request.prompt_ids[first + 1 : end + 1]
        return first - start, targets
