"""One request's way through the engine."""

import time
from dataclasses import dataclass, field
from enum import Enum

from jaxprefill.batch import BatchRow, SampleSpec
from jaxprefill.cache.prefix import Lease, Match, PageKey
from jaxprefill.grammar import Matcher
from jaxprefill.request import Request


@dataclass(frozen=True)
class Hit:
    """What a request finds in the prefix cache.

    Attributes:
        num_shared: tokens whose KV is there.
        num_computed: of these, tokens whose rows need not be computed again either.
        logprobs: of the next prompt tokens to be scored.
        tops: the likeliest id in the place of each, where one is wanted, and the token itself.
    """

    match: Match
    num_shared: int
    num_computed: int
    logprobs: tuple[float, ...] = ()
    tops: tuple[dict[int, float], ...] = ()


class Status(Enum):
    """Where a request is. DRAINING: all is dispatched, pages are back, results are awaited."""

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"


@dataclass(eq=False)
class RequestState:
    """Mutable progress of a request.

    "Dispatched" runs ahead of "known": a step is sent before the last one's tokens are read.

    Attributes:
        output_ids: generated tokens the host knows.
        arrival: order among all requests, given by the scheduler.
        num_sampled: generated tokens dispatched, known or not.
        num_computed: tokens whose KV is dispatched, or was found in the prefix cache.
        num_settled: of these, tokens of steps whose dispatch did not fail.
        num_shared: tokens whose KV was there before; never written again.
        num_in_flight: steps dispatched and not yet read.
        target: tokens to prefill before sampling: the prompt, and after a preemption the output
            known then.
        num_scored: prompt positions whose logprob is dispatched or was found in the cache.
        num_pooled: prompt positions whose hidden row is dispatched to the embedding.
        num_cached: prompt tokens the first admission found computed.
        found_logprobs, found_tops: what the cache knew of the prompt, not yet handed out.
        matcher: follows the output through the request's grammar.
        added_at, started_at: when it came, and when its first step was dispatched (monotonic).
        is_timed: `take_times` has told.
    """

    request: Request
    max_tokens: int
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list[int])
    arrival: int = 0
    num_sampled: int = 0
    num_computed: int = 0
    num_settled: int = 0
    num_shared: int = 0
    num_in_flight: int = 0
    target: int = 0
    num_scored: int = 1
    num_pooled: int = 0
    num_cached: int | None = None
    found_logprobs: list[float] = field(default_factory=list[float])
    found_tops: list[dict[int, float]] = field(default_factory=list[dict[int, float]])
    slot: int | None = None
    is_slot_ready: bool = False
    lease: Lease = field(default_factory=Lease)
    keys: list[PageKey] = field(default_factory=list[PageKey])
    matcher: Matcher | None = None
    added_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    is_timed: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: higher priority first, then first come."""
        return -self.request.priority, self.arrival

    @property
    def is_prefilled(self) -> bool:
        """Whether only the last sampled token's KV is missing."""
        return 0 < self.target <= self.num_computed

    @property
    def is_complete(self) -> bool:
        """Whether everything asked for has been read."""
        if self.max_tokens > 0:
            return len(self.output_ids) >= self.max_tokens
        return self.is_prefilled and self.num_in_flight == 0

    @property
    def has_more_to_sample(self) -> bool:
        """Whether another token may be dispatched."""
        return self.num_sampled < self.max_tokens

    @property
    def can_sample(self) -> bool:
        """Whether it may be now: a grammar must see a token before it allows the next."""
        return self.has_more_to_sample and not (self.matcher and self.num_in_flight)

    @property
    def num_known(self) -> int:
        """Prompt and generated tokens the host knows."""
        return self.request.prompt_length + len(self.output_ids)

    def take_times(self) -> tuple[float, float] | None:
        """Seconds before its first step and from there to now; told once, to the first result."""
        if self.started_at is None or self.is_timed:
            return None
        self.is_timed = True
        return self.started_at - self.added_at, time.monotonic() - self.started_at

    def known_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Those from `start` to `end`, or as many as there are; copies no others."""
        prompt = self.request.prompt_length
        generated = self.output_ids[max(start - prompt, 0) : max(end - prompt, 0)]
        return (*self.request.prompt_ids[start:end], *generated)

    def hit(self, match: Match, page_size: int) -> "Hit":
        """How far a match spares computing.

        A hit ends before the row that the first wanted logprob needs, unless the pages hold the
        logprobs of their tokens. The last token is always computed: something reads its row.
        """
        scored, prompt = self.num_scored, self.request.prompt_length
        found, tops = list[float](), list[dict[int, float]]()
        for index, node in enumerate(match.nodes if self._can_recall(scored) else ()):
            start, end = index * page_size, min((index + 1) * page_size, prompt)
            known = node.logprobs[max(scored - start, 0) : end - start]
            new = [value for value in known if value is not None]
            if len(new) < end - scored:
                break
            if self.request.num_prompt_top:
                best = [one for one in node.best[scored - start : end - start] if one is not None]
                if len(best) < len(new):
                    break
                own = zip(self.request.prompt_ids[scored:end], new, strict=True)
                tops += [dict((first, each)) for first, each in zip(best, own, strict=True)]
            found += new
            scored = max(scored, end)
        most = scored - 1 if self._wants_logprob(scored) else self.target - 1
        shared = len(match.nodes) * page_size
        num_computed = min(shared, most, self.target - 1)
        return Hit(match, shared, num_computed, tuple(found), tuple(tops))

    def _wants_logprob(self, position: int) -> bool:
        return self.request.wants_prompt_logprobs and position < self.request.prompt_length

    def _can_recall(self, position: int) -> bool:
        """Whether pages may know the logprob: of other ids they keep the likeliest one's."""
        return self._wants_logprob(position) and self.request.num_prompt_top <= 1

    def start(self, lease: Lease, slot: int, hit: "Hit") -> None:
        """Admitted: continues behind what the cache spares."""
        self.status, self.lease, self.slot = Status.RUNNING, lease, slot
        self.num_computed = hit.num_computed
        self.num_settled = self.num_shared = hit.num_shared
        self.found_logprobs += hit.logprobs
        self.found_tops += hit.tops
        self.num_scored += len(hit.logprobs)
        self.num_cached = hit.num_computed if self.num_cached is None else self.num_cached

    def prefill_row(self, num_tokens: int) -> BatchRow:
        """The next `num_tokens` of the prompt, and of the output that a preemption threw away."""
        start, end = self.num_computed, self.num_computed + num_tokens
        is_last = end == self.target
        return BatchRow(
            request_id=self.request.id,
            slot=self._held_slot(),
            token_ids=self.known_ids(start, end),
            kv_len=end,
            pages=self.lease.pages,
            recent=self.lease.recent_ids(),
            recent_first=self.lease.recent_first,
            num_shared=self.num_shared,
            sample=self._sample_spec(end) if is_last and self.has_more_to_sample else None,
            score_ids=self._score_ids(start, end),
            label_ids=self.request.label_ids if end == self.request.prompt_length else (),
            pool_span=self._pool_span(start, end),
            is_classified=self.request.wants_class_logits and end == self.request.prompt_length,
        )

    def decode_row(self) -> BatchRow:
        """The last sampled token, which the device knows."""
        kv_len = self.num_computed + 1
        return BatchRow(
            request_id=self.request.id,
            slot=self._held_slot(),
            token_ids=None,
            kv_len=kv_len,
            pages=self.lease.pages,
            recent=self.lease.recent_ids(),
            recent_first=self.lease.recent_first,
            sample=self._sample_spec(kv_len),
        )

    def dispatched(self, row: BatchRow) -> None:
        """The row is part of a batch: progress runs ahead of what is known."""
        self.num_computed += row.q_len
        self.num_in_flight += 1
        self.num_sampled += row.sample is not None
        self.num_scored += len(row.score_ids[1])
        self.num_pooled += row.pool_span[1]

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
            allowed=self.matcher.mask() if self.matcher is not None else None,
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

    def _pool_span(self, start: int, end: int) -> tuple[int, int]:
        """The new tokens that the embedding reads: all of the prompt's, each once, or the last."""
        stop = min(end, self.request.prompt_length)
        if self.request.pooling == "mean":
            first = max(start, self.num_pooled)
            return first - start, max(stop - first, 0)
        is_last = self.request.pooling == "last" and end == self.request.prompt_length
        return (stop - 1 - start, 1) if is_last else (0, 0)
