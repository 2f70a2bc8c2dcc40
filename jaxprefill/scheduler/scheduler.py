"""Continuous batching: packs short prompts, chunks long ones, and lets decode rows ride along.

A step is mixed (decode rows first, then prefill chunks up to the token budget) or pure decode.
Where the prefill executables cannot take the decode rows (slots, context), the two alternate.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from jaxprefill.batch import Batch, BatchRow
from jaxprefill.cache.pages import PageAllocator
from jaxprefill.errors import RequestError
from jaxprefill.scheduler.limits import SchedulerLimits
from jaxprefill.scheduler.state import RequestState, Status


class Scheduler:
    """Owns the queues, the request slots and the pages; admits in order of arrival."""

    def __init__(self, limits: SchedulerLimits, pages: PageAllocator) -> None:
        """`pages` is used by this scheduler alone."""
        self._limits = limits
        self._pages = pages
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []  # oldest first
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        self._was_prefill = False
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Requests without pages."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with pages and a slot."""
        return len(self._running)

    def add(self, state: RequestState) -> None:
        """Queues a request.

        Raises:
            RequestError: it could never fit the KV pool, however empty.
        """
        most = state.request.prompt_length + max(state.max_tokens - 1, 0)
        need, have = self._pages.pages_for(most), self._pages.num_pages
        if need > have:
            raise RequestError(
                f"prompt and output must fit the KV pool of {have * self._pages.page_size} tokens, "
                f"this request may need {most}; shorten it or raise kv_cache_tokens",
                param="prompt",
            )
        self._waiting.append(state)

    def finish(self, state: RequestState) -> None:
        """Takes a request out, wherever it is.

        Its pages may be given away at once: the device runs steps in order.
        """
        if state.status is Status.RUNNING:
            self._running.remove(state)
            self._release(state)
        elif state.status is Status.WAITING:
            self._waiting.remove(state)
        state.status = Status.FINISHED

    def next_batch(self) -> Batch | None:
        """The rows of the next step, or None when nothing can run now."""
        decoding = self._grow(self._decodable())
        if self._can_ride(decoding):
            rows = self._prefill_rows(decoding)
            if rows:
                riding = [self._step(state) for state in decoding]
                return Batch(rows=(*riding, *rows), is_decode=False)
        if not (decoding and self._was_prefill):  # take turns
            rows = self._prefill_rows([])
            if rows:
                self._was_prefill = True
                return Batch(rows=tuple(rows), is_decode=False)
        self._was_prefill = False
        if not decoding:
            return None
        return Batch(rows=tuple(self._step(state) for state in decoding), is_decode=True)

    def _decodable(self) -> list[RequestState]:
        return [state for state in self._running if state.is_prefilled and state.has_more_to_sample]

    def _can_ride(self, decoding: list[RequestState]) -> bool:
        limits = self._limits
        has_room = len(decoding) < min(limits.max_batch_requests, limits.max_batch_tokens)
        contexts = [state.num_computed + 1 for state in decoding]
        return has_room and max(contexts, default=0) <= limits.prefill_context

    def _grow(self, decoding: list[RequestState]) -> list[RequestState]:
        """Gives each the page its next token needs, preempting the youngest where none is left."""
        for state in decoding:
            while state.status is Status.RUNNING and not self._ensure_page(state):
                self._preempt(self._running[-1])
        return [state for state in decoding if state.status is Status.RUNNING]

    def _ensure_page(self, state: RequestState) -> bool:
        missing = self._pages.pages_for(state.num_computed + 1) - len(state.pages)
        new = self._pages.allocate(missing) if missing > 0 else []
        if new is None:
            return False
        state.pages.extend(new)
        return True

    def _prefill_rows(self, riding: list[RequestState]) -> list[BatchRow]:
        """Chunks of running and newly admitted prompts, in order, within tokens and slots."""
        room = self._limits.max_batch_requests - len(riding)
        budget = self._limits.step_tokens(len(riding) + self._num_wanted(room)) - len(riding)
        # Contexts beyond the executables' go together, so that they drag no others along.
        is_long: bool | None = None
        rows: list[BatchRow] = []
        for state in self._prefillable():
            if budget <= 0 or room == 0:
                break
            chunk = min(state.target - state.num_computed, budget)
            is_this_long = state.num_computed + chunk > self._limits.prefill_context
            if riding and is_long is None and is_this_long:
                break
            if is_long is not None and is_this_long != is_long:
                continue
            if state.status is Status.WAITING and not self._admit(state):
                break
            is_long = is_this_long
            rows.append(state.prefill_row(chunk))
            state.num_computed += chunk
            state.num_in_flight += 1
            self._mark_dispatched(state, rows[-1])
            budget, room = budget - chunk, room - 1
        return rows

    def _num_wanted(self, room: int) -> int:
        """Prompt tokens that the next requests, at most `room`, have yet to compute."""
        return sum(state.target - state.num_computed for state in islice(self._prefillable(), room))

    def _prefillable(self) -> Iterable[RequestState]:
        yield from [state for state in self._running if not state.is_prefilled]
        for state in list(self._waiting):
            if state.num_in_flight == 0:  # a preempted request waits for its last tokens
                state.target = state.request.prompt_length + len(state.output_ids)
                yield state

    def _admit(self, state: RequestState) -> bool:
        """A slot and all pages of its prefill, or nothing."""
        if not self._free_slots:
            return False
        pages = self._pages.allocate(self._pages.pages_for(state.target))
        if pages is None:
            return False
        self._waiting.remove(state)
        self._running.append(state)
        state.status, state.pages, state.slot = Status.RUNNING, pages, self._free_slots.pop()
        return True

    def _preempt(self, state: RequestState) -> None:
        """Takes pages and slot away; the request starts again from its tokens, first in line."""
        self.num_preemptions += 1
        self._running.remove(state)
        self._release(state)
        state.status = Status.WAITING
        state.num_computed = state.target = 0
        self._waiting.appendleft(state)

    def _release(self, state: RequestState) -> None:
        self._pages.free(state.pages)
        assert state.slot is not None, "a running request holds a slot"
        self._free_slots.append(state.slot)
        state.pages, state.slot, state.is_slot_ready = [], None, False

    def _step(self, state: RequestState) -> BatchRow:
        row = state.decode_row()
        state.num_computed += 1
        state.num_in_flight += 1
        self._mark_dispatched(state, row)
        return row

    @staticmethod
    def _mark_dispatched(state: RequestState, row: BatchRow) -> None:
        state.num_sampled += row.sample is not None
        state.num_scored += len(row.score_ids[1])
