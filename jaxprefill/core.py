"""The engine's loop: schedule, dispatch, and read the step before. Sees scheduler and runners."""

import math
from dataclasses import dataclass, field

from jaxprefill.batch import Batch
from jaxprefill.cache.pages import PageAllocator
from jaxprefill.counters import EngineCounters
from jaxprefill.decode.runner import DecodeRunner
from jaxprefill.device_state import DeviceState
from jaxprefill.errors import RequestError
from jaxprefill.plan import EnginePlan
from jaxprefill.prefill.compiler import CompilationCounter
from jaxprefill.prefill.runner import PrefillRunner
from jaxprefill.request import FinishReason, Request
from jaxprefill.sampling.pack import RowToSample
from jaxprefill.sampling.runner import (
    HeadRunner,
    PendingScores,
    PendingTokens,
    RowToScore,
    SampledToken,
)
from jaxprefill.scheduler import RequestState, Scheduler, Status


@dataclass(frozen=True, kw_only=True)
class RequestUpdate:
    """What one step found for one request."""

    request: Request
    tokens: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class _Step:
    """A dispatched step: which states it serves, and where their results will be."""

    states: list[RequestState]
    sampled: list[RequestState]
    tokens: PendingTokens | None
    scored: list[tuple[RequestState, int]]
    scores: PendingScores | None


@dataclass
class EngineCore:
    """Requests in, updates out. Not thread-safe: one thread adds, aborts and steps."""

    state: DeviceState
    plan: EnginePlan
    prefill: PrefillRunner
    decode: DecodeRunner
    heads: HeadRunner
    counters: EngineCounters
    scheduler: Scheduler = field(init=False)
    compilations: CompilationCounter = field(default_factory=CompilationCounter)

    def __post_init__(self) -> None:
        self.pages = PageAllocator(self.plan.num_pages, self.plan.config.page_size)
        self.scheduler = Scheduler(self.plan.limits, self.pages)
        self._states: dict[str, RequestState] = {}
        self._in_flight: _Step | None = None

    def add(self, request: Request) -> None:
        """Queues a validated request.

        Raises:
            RequestError: its id is in use, or it can never fit the KV pool.
        """
        if request.id in self._states:
            raise RequestError(f"request id {request.id!r} is already in flight", param="rid")
        room = self.plan.context_length - request.prompt_length
        state = RequestState(request, max_tokens=min(request.params.max_tokens, room))
        self.scheduler.add(state)
        self._states[request.id] = state

    def abort(self, request_id: str) -> None:
        """Forgets a request and frees its pages; an unknown id is nothing to do."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self.scheduler.finish(state)

    @property
    def has_work(self) -> bool:
        """Whether another step would do anything."""
        return bool(self._states) or self._in_flight is not None

    def step(self) -> list[RequestUpdate]:
        """Dispatches the next step, then reads the one before."""
        batch = self.scheduler.next_batch()
        dispatched = self._dispatch(batch) if batch is not None else None
        updates = self._read(self._in_flight) if self._in_flight is not None else []
        self._in_flight = dispatched
        self.counters.preemptions = self.scheduler.num_preemptions
        return updates

    def mark_ready(self) -> None:
        """From now on nothing may compile."""
        self.compilations = CompilationCounter()

    def _dispatch(self, batch: Batch) -> _Step:
        runner = self.decode if batch.is_decode else self.prefill
        states = [self._states[row.request_id] for row in batch.rows]
        try:
            runner.run(self.state, batch)
        except Exception:
            self._drop(states)
            raise
        to_sample: list[RowToSample] = []
        to_score: list[RowToScore] = []
        scored: list[tuple[RequestState, int]] = []
        sampled: list[RequestState] = []
        at = 0
        for state, row in zip(states, batch.rows, strict=True):
            offset, targets = row.score_ids
            if targets:
                to_score += [RowToScore(at + offset + i, t) for i, t in enumerate(targets)]
                scored.append((state, len(targets)))
            at += row.q_len
            if row.sample is not None:
                self._start_slot(state)
                to_sample.append(RowToSample(at - 1, row.slot, row.sample))
                sampled.append(state)
        tokens = self.heads.sample(self.state, to_sample) if to_sample else None
        scores = self.heads.score(self.state, to_score) if to_score else None
        return _Step(states, sampled, tokens, scored, scores)

    def _start_slot(self, state: RequestState) -> None:
        """Once per admission: the device learns the request's bias and history."""
        if not state.is_slot_ready and state.slot is not None:
            self.heads.start_slot(self.state, state.slot, state.request, state.output_ids)
            state.is_slot_ready = True

    def _drop(self, states: list[RequestState]) -> None:
        """A step that failed to dispatch takes its requests with it, not the engine."""
        for state in states:
            self.abort(state.request.id)

    def _read(self, step: _Step) -> list[RequestUpdate]:
        """Waits for a step's results and hands them out; what finished meanwhile is ignored."""
        tokens = step.tokens.read() if step.tokens is not None else []
        scores = step.scores.read().tolist() if step.scores is not None else []
        sampled = dict(zip([id(state) for state in step.sampled], tokens, strict=True))
        logprobs: dict[int, list[float]] = {}
        for state, count in step.scored:
            logprobs[id(state)], scores = scores[:count], scores[count:]
        updates: list[RequestUpdate] = []
        for state in step.states:
            state.num_in_flight -= 1
            if state.status is not Status.FINISHED:
                update = self._update(state, sampled.get(id(state)), logprobs.get(id(state), []))
                updates.append(update)
        return updates

    def _update(
        self, state: RequestState, token: SampledToken | None, logprobs: list[float]
    ) -> RequestUpdate:
        values = [*logprobs, *([token.logprob] if token else [])]
        if any(math.isnan(value) for value in values):
            self.counters.corrupted_requests += 1
            return self._finish(state, "error", (), ())
        if token is not None:
            state.output_ids.append(token.token)
        reason: FinishReason | None = None
        if token is not None and state.request.is_ended_by(token.token, len(state.output_ids)):
            reason = "stop"
        elif len(state.output_ids) >= state.max_tokens and self._is_computed(state):
            reason = "length"
        tokens = (token,) if token is not None else ()
        if reason is not None:
            return self._finish(state, reason, tokens, tuple(logprobs))
        return RequestUpdate(request=state.request, tokens=tokens, prompt_logprobs=tuple(logprobs))

    @staticmethod
    def _is_computed(state: RequestState) -> bool:
        """Whether all that was to be computed has been read: nothing is in flight or missing."""
        return state.max_tokens > 0 or (state.is_prefilled and state.num_in_flight == 0)

    def _finish(
        self,
        state: RequestState,
        reason: FinishReason,
        tokens: tuple[SampledToken, ...],
        logprobs: tuple[float, ...],
    ) -> RequestUpdate:
        self.abort(state.request.id)
        return RequestUpdate(
            request=state.request,
            tokens=tokens,
            prompt_logprobs=logprobs,
            finish_reason=reason,
        )
