"""Continuous batching: packs short prompts, chunks long ones, and lets decode rows ride along.

A step is mixed (decode rows first, then prefill chunks up to the token budget) or pure decode.
Where the prefill executables cannot take the decode rows (slots, context), the two alternate.
"""

from bisect import insort
from dataclasses import dataclass, replace

from jaxprefill.batch import Batch, BatchRow
from jaxprefill.cache.prefix import Match, PageKey, PrefixCache, PrefixNode
from jaxprefill.errors import RequestError
from jaxprefill.scheduler.limits import SchedulerLimits
from jaxprefill.scheduler.state import Hit, RequestState, Status

_LOOK_AHEAD = 256  # waiting requests looked at in one step


@dataclass(frozen=True)
class _Candidate:
    """A request with tokens to prefill; `hit` is what it finds if it has yet to be admitted."""

    state: RequestState
    hit: Hit | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        done = self.state.num_computed if self.hit is None else self.hit.num_computed
        return self.state.target - done

    @property
    def length_order(self) -> tuple[int, int, int]:
        """Higher priority first, then the shortest, then first come."""
        return -self.state.request.priority, self.num_tokens, self.state.arrival


class Scheduler:
    """Owns the queues, the request slots and the pages.

    Service goes by priority and arrival, with one exception for the sake of short requests: where
    a step cannot take all, the first in line leaves up to half of it to the shortest others.
    """

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache) -> None:
        """`cache` is used by this scheduler alone."""
        self._limits = limits
        self._cache = cache
        self._waiting: list[RequestState] = []  # both lists by rank
        self._running: list[RequestState] = []
        self._last: list[RequestState] = []  # whose rows are in the last batch
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        self._was_prefill = False
        self._num_arrived = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0

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
        need, have = self._cache.pages_for(most), self._cache.num_pages
        if need > have:
            raise RequestError(
                f"prompt and output must fit the KV pool of {have * self._cache.page_size} tokens, "
                f"this request may need {most}; shorten it or raise kv_cache_tokens",
                param="prompt",
            )
        state.arrival = self._num_arrived
        self._num_arrived += 1
        insort(self._waiting, state, key=_rank)

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
        """The rows of the next step, or None when nothing can run now.

        To be called when the batch before was dispatched, or its requests were finished.
        """
        self._settle()
        decoding = self._grow(self._decodable())
        if self._can_ride(decoding):
            rows = self._prefill_rows(decoding)
            if rows:
                riding = [self._decode_row(state) for state in decoding]
                return Batch(rows=(*riding, *rows), is_decode=False)
        if not (decoding and self._was_prefill):  # take turns
            rows = self._prefill_rows([])
            if rows:
                self._was_prefill = True
                return Batch(rows=tuple(rows), is_decode=False)
        self._was_prefill = False
        if not decoding:
            return None
        rows = [self._decode_row(state) for state in decoding]
        return Batch(rows=tuple(rows), is_decode=True)

    def _settle(self) -> None:
        """The last batch was dispatched: its pages can be shared, and what needs no more goes."""
        for state in self._last:
            if state.status is not Status.RUNNING:
                continue
            state.num_settled = max(state.num_settled, state.num_computed)
            self._cache.mark_ready(state.lease, state.num_settled)
            self._cache.trim(state.lease, state.num_computed)
            if state.is_prefilled and not state.has_more_to_sample:
                self._running.remove(state)
                self._release(state)
                state.status = Status.DRAINING
        self._last = []

    def _decodable(self) -> list[RequestState]:
        return [state for state in self._running if state.is_prefilled and state.can_sample]

    def _can_ride(self, decoding: list[RequestState]) -> bool:
        limits = self._limits
        has_room = len(decoding) < min(limits.max_batch_requests, limits.max_batch_tokens)
        contexts = [state.num_computed + 1 for state in decoding]
        return has_room and max(contexts, default=0) <= limits.prefill_context

    def _grow(self, decoding: list[RequestState]) -> list[RequestState]:
        """Gives each the page its next token needs, preempting the last in rank for want of any."""
        for state in decoding:
            while state.status is Status.RUNNING and not self._cache.grow(
                state.lease, self._cache.pages_for(state.num_computed + 1)
            ):
                self._preempt(self._running[-1])
        return [state for state in decoding if state.status is Status.RUNNING]

    def _prefill_rows(self, riding: list[RequestState]) -> list[BatchRow]:
        """Chunks of running and newly admitted prompts, within tokens and slots."""
        room = self._limits.max_batch_requests - len(riding)
        order = self._candidates(room)
        wanted = sum(candidate.num_tokens for candidate in order)
        budget = most = self._limits.step_tokens(len(riding) + wanted) - len(riding)
        if wanted > budget and order:
            order = [*order[:1], *sorted(order[1:], key=lambda each: each.length_order)]
            most = max(budget - (wanted - order[0].num_tokens), -(-budget // 2))
        # Contexts beyond the executables' go together, so that they drag no others along.
        is_long, is_full = None, False
        rows: list[BatchRow] = []
        for candidate in order:
            state = candidate.state
            chunk, most = min(candidate.num_tokens, budget, most), budget
            if budget <= 0:
                break
            end = state.target - candidate.num_tokens + chunk
            is_this_long = end > self._limits.prefill_context
            if riding and is_long is None and is_this_long:
                break
            if is_long is not None and is_this_long != is_long:
                continue
            if candidate.hit is not None:
                is_full = is_full or not self._admit(state, candidate.hit)
                if is_full:  # nobody overtakes whom there is no room for
                    continue
            is_long = is_this_long
            self._cache.extend(state.lease, end)
            rows.append(self._dispatched(state, state.prefill_row(chunk)))
            budget -= chunk
        return rows

    def _candidates(self, room: int) -> list[_Candidate]:
        """Up to `room` requests with tokens to prefill, in order of rank.

        A request whose next page is being computed for another one waits for it, and of several
        that begin alike one goes ahead: a shared prefix is computed once.
        """
        found = [_Candidate(state) for state in self._running if not state.is_prefilled]
        slots, pages = len(self._free_slots), self._cache.num_available
        claimed: set[tuple[PrefixNode | None, PageKey]] = set()
        shared: set[PrefixNode] = set()  # available now, but not once a candidate holds them
        for state in self._waiting[:_LOOK_AHEAD]:
            if state.num_in_flight:  # a preempted request waits for its last tokens
                continue
            self._aim(state)
            match = self._cache.match(state.keys)
            if len(match.nodes) < len(state.keys):
                claim = (match.nodes[-1] if match.nodes else None, state.keys[len(match.nodes)])
                if match.is_pending or claim in claimed:
                    continue
                claimed.add(claim)
            hit = self._hit(state, match)
            slots -= 1
            idle = self._cache.idle(hit.match.nodes) - shared
            pages -= self._cache.pages_for(state.target) - len(hit.match.nodes) + len(idle)
            if slots < 0 or (pages < 0 and found):
                break
            shared |= idle
            found.append(_Candidate(state, hit))
        found.sort(key=lambda candidate: candidate.state.rank)
        return found[:room]

    def _hit(self, state: RequestState, match: Match) -> Hit:
        """What the match spares; where recent tokens count, whole pages that they are there for."""
        hit = state.hit(match, self._cache.page_size)
        if not self._cache.has_recent:
            return hit
        whole = match.nodes[: hit.num_computed // self._cache.page_size]
        match = replace(match, nodes=self._cache.startable(whole))
        count = len(match.nodes) * self._cache.page_size
        return replace(hit, match=match, num_shared=count, num_computed=count)

    def _aim(self, state: RequestState) -> None:
        """Sets what is to be prefilled: all tokens known now."""
        if state.target != state.num_known:
            state.target, state.keys = state.num_known, []
            if state.request.is_spared_by_prefix:
                state.keys = self._cache.keys(state.known_ids(0, state.target))

    def _admit(self, state: RequestState, hit: Hit) -> bool:
        """A slot and all pages of its prefill, or nothing."""
        if not self._free_slots:
            return False
        num_pages = self._cache.pages_for(state.target)
        lease = self._cache.lease(hit.match, state.keys, num_pages)
        if lease is None:
            return False
        self._waiting.remove(state)
        insort(self._running, state, key=_rank)
        state.start(lease, self._free_slots.pop(), hit)
        self.num_cached_tokens += hit.num_computed
        return True

    def _preempt(self, state: RequestState) -> None:
        """Takes pages and slot away; the request starts again from its tokens, in its old rank."""
        self.num_preemptions += 1
        self._running.remove(state)
        self._release(state)
        state.status = Status.WAITING
        state.num_computed = state.num_settled = state.num_shared = state.target = 0
        insort(self._waiting, state, key=_rank)

    def _release(self, state: RequestState) -> None:
        """Gives pages and slot back; pages of settled tokens stay known."""
        held = len(state.lease.nodes) * self._cache.page_size
        beyond = state.known_ids(held, state.num_settled)
        self._cache.release(state.lease, self._cache.keys(beyond))
        assert state.slot is not None, "a running request holds a slot"
        self._free_slots.append(state.slot)
        state.slot, state.is_slot_ready = None, False

    def _decode_row(self, state: RequestState) -> BatchRow:
        self._cache.extend(state.lease, state.num_computed + 1)
        return self._dispatched(state, state.decode_row())

    def _dispatched(self, state: RequestState, row: BatchRow) -> BatchRow:
        state.dispatched(row)
        self._last.append(state)
        return row


def _rank(state: RequestState) -> tuple[int, int]:
    return state.rank
