"""The engine's loop: schedule, dispatch, and read the step before. Sees scheduler and runners."""

import time
from contextlib import suppress
from dataclasses import dataclass, field

from jaxprefill.batch import Batch
from jaxprefill.cache.pages import PageAllocator
from jaxprefill.cache.prefix import PrefixCache, store_logprobs
from jaxprefill.cache.recent import RecentPages
from jaxprefill.counters import EngineCounters
from jaxprefill.decode.runner import DecodeRunner
from jaxprefill.device_state import DeviceState
from jaxprefill.errors import EngineUnavailable, RequestError
from jaxprefill.grammar import Matcher
from jaxprefill.plan import EnginePlan
from jaxprefill.prefill.compiler import CompilationCounter
from jaxprefill.prefill.runner import PrefillRunner
from jaxprefill.prefill.vote import Ballot, GroupVote
from jaxprefill.request import FinishReason, Request
from jaxprefill.scheduler import RequestState, Scheduler, Status
from jaxprefill.step import Heads, PendingStep, RowResults, dispatch_heads
from jaxprefill.updates import RequestUpdate, SampledToken, cut_top


@dataclass
class EngineCore:
    """Requests in, updates out. Not thread-safe: one thread adds, aborts and steps.

    Attributes:
        graph_bytes: device memory that executables took when they first ran, beyond XLA's own.
        group: votes of ranks that have requests of their own and must run the same executable in
            every step (data-parallel attention): they step together, with work or without.
    """

    state: DeviceState
    plan: EnginePlan
    prefill: PrefillRunner
    decode: DecodeRunner
    heads: Heads
    counters: EngineCounters
    scheduler: Scheduler = field(init=False)
    compilations: CompilationCounter = field(default_factory=CompilationCounter)
    graph_bytes: dict[str, int] = field(default_factory=dict[str, int])
    group: GroupVote | None = None

    def __post_init__(self) -> None:
        plan, page_size = self.plan, self.plan.config.page_size
        recent = None
        if plan.num_recent:
            pages = PageAllocator(plan.num_recent, page_size)
            recent = RecentPages(pages, plan.cache_spec.reach)
        pages = PageAllocator(plan.num_pages, page_size)
        self.cache = PrefixCache(pages, recent=recent, is_enabled=plan.config.prefix_cache)
        self.scheduler = Scheduler(self.plan.limits, self.cache)
        self._states: dict[str, RequestState] = {}
        self._in_flight: PendingStep | None = None

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queues a validated request; one of a grammar brings its matcher.

        Raises:
            RequestError: its id is in use, its matcher is missing, or it can never fit the KV pool.
            EngineUnavailable: another rank of the group is gone.
        """
        if self.group is not None and self.group.is_over:
            raise EngineUnavailable("the engine's group is no more; start all its engines anew")
        if request.id in self._states:
            raise RequestError(f"request id {request.id!r} is already in flight", param="rid")
        if request.grammar is not None and matcher is None:
            raise RequestError(
                "a grammar must come with its matcher; leave it out, or use the server",
                param="response_format",
            )
        room = self.plan.context_length - request.prompt_length
        state = RequestState(request, max_tokens=min(request.params.max_tokens, room))
        state.matcher = matcher
        self.scheduler.add(state)
        self._states[request.id] = state

    def abort(self, request_id: str) -> None:
        """Forgets a request and frees its pages; an unknown id is nothing to do."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self.scheduler.finish(state)

    def is_known(self, request_id: str) -> bool:
        """Whether a request is waiting or running."""
        return request_id in self._states

    @property
    def has_work(self) -> bool:
        """Whether another step would do anything."""
        return bool(self._states) or self._in_flight is not None

    @property
    def is_in_group(self) -> bool:
        """Whether other ranks wait for this one's next step."""
        return self.group is not None and not self.group.is_over

    def leave_group(self) -> None:
        """Steps along with the other ranks until all leave, one is gone, or a step fails."""
        if self.group is None:
            return
        self.group.is_leaving = True
        try:
            with suppress(EngineUnavailable):
                while self.is_in_group:
                    self.step()
        finally:
            self.group.is_over = True

    def step(self) -> list[RequestUpdate]:
        """Dispatches the next step, then reads the one before."""
        batch = self.scheduler.next_batch()
        group = self.group.agree(batch) if self.group is not None and self.is_in_group else None
        if batch is None and group is not None:  # nothing but padding, beside other ranks' work
            batch = Batch(rows=(), is_decode=not group.has_prefill)
        dispatched = self._dispatch(batch, group) if batch is not None else None
        pending, self._in_flight = self._in_flight, dispatched
        updates = self._read(pending) if pending is not None else []
        self.counters.preemptions = self.scheduler.num_preemptions
        self.counters.cached_tokens = self.scheduler.num_cached_tokens
        return updates

    def close(self) -> None:
        """Frees the device's arrays and lets go of the executables; of the rest, counters stay."""
        self.state.delete()
        del self.prefill, self.decode, self.heads

    def mark_ready(self) -> None:
        """From now on nothing may compile."""
        self.compilations = CompilationCounter()

    def _dispatch(self, batch: Batch, group: Ballot | None) -> PendingStep:
        is_decode = batch.is_decode if group is None else not group.has_prefill
        runner = self.decode if is_decode else self.prefill
        states = [self._states[row.request_id] for row in batch.rows]
        now = time.monotonic()
        for state in states:
            state.started_at = state.started_at or now
        try:
            runner.run(self.state, batch, group)
            return dispatch_heads(self.heads, self.state, batch, states)
        except BaseException:  # raised again, once its requests have ended
            self._lose(states)
            raise

    def _read(self, step: PendingStep) -> list[RequestUpdate]:
        """Waits for a step's results and hands them out; what finished meanwhile is ignored."""
        updates: list[RequestUpdate] = []
        try:
            for row in step.read():
                row.state.num_in_flight -= 1
                if row.state.status is not Status.FINISHED:
                    updates.append(self._update(row))
        except BaseException:  # raised again, once its requests have ended
            self._lose([state for state, _, _ in step.rows])
            raise
        return updates

    def _lose(self, states: list[RequestState]) -> None:
        """A step that failed takes its requests with it, not the engine."""
        for state in states:
            self.abort(state.request.id)

    def _update(self, row: RowResults) -> RequestUpdate:
        state, token = row.state, row.token
        if row.has_nan:
            self.counters.corrupted_requests += 1
            self.abort(state.request.id)
            self.cache.flush()  # what it leaves there would spoil whoever begins alike
            return RequestUpdate(state.request.id, finish_reason="error")
        size = self.cache.page_size
        store_logprobs(row.nodes, row.first_position, row.logprobs, size, row.tops)
        is_open = True
        if token is not None:
            state.output_ids.append(token.token)
            is_open = state.matcher is None or state.matcher.accept(token.token)
        reason = self._finish_reason(state, token) if is_open else "stop"
        if reason is not None:
            self.abort(state.request.id)
        found, state.found_logprobs = state.found_logprobs, []
        tops, state.found_tops = state.found_tops, []
        return RequestUpdate(
            state.request.id,
            tokens=_cut(token, state.request.params.logprobs),
            prompt_logprobs=(*found, *row.logprobs),
            prompt_top=(*tops, *row.tops),
            label_scores=tuple(row.labels),
            hidden_sum=row.hidden_sum,
            class_logits=row.class_logits,
            cached_tokens=state.num_cached or 0,
            finish_reason=reason,
            times=state.take_times() if token is not None or reason is not None else None,
        )

    @staticmethod
    def _finish_reason(state: RequestState, token: SampledToken | None) -> FinishReason | None:
        if token is not None and state.request.is_ended_by(token.token, len(state.output_ids)):
            return "stop"
        return "length" if state.is_complete else None


def _cut(token: SampledToken | None, num_top: int | None) -> tuple[SampledToken, ...]:
    """The token, if there is one, with just the alternatives that are wanted."""
    if token is None:
        return ()
    return (token._replace(top=cut_top(token, num_top) if num_top else {}),)
