"""A scheduler with a device of integers: pages remember which prefix their KV was made from."""

from jaxprefill.cache.pages import PageAllocator
from jaxprefill.cache.prefix import PrefixCache, store_logprobs
from jaxprefill.cache.recent import RecentPages
from jaxprefill.cache.spec import CacheSpec
from jaxprefill.request import Request, SamplingParams
from jaxprefill.scheduler import RequestState, Scheduler, SchedulerLimits, Status


class Sequence:
    """Tokens, and for each the digest of the prefix that it ends."""

    def __init__(self, tokens=()):
        self.tokens, self.digests = [], []
        for token in tokens:
            self.append(token)

    def append(self, token: int):
        self.tokens.append(token)
        self.digests.append(hash((self.digests[-1] if self.digests else None, token)))

    def next_token(self, length: int) -> int:
        """What the device samples after so many tokens; few values, so that answers repeat."""
        return self.digests[length - 1] % 3

    def logprob(self, position: int) -> float:
        """What the device scores the token at this position with."""
        return -float(self.digests[position] % 1009)


class Simulation:
    """Runs a scheduler as the core does: a step is dispatched before the last one is read."""

    def __init__(self, *, num_pages=64, page_size=4, shares=False, reach=0, **limits):
        sizes = dict(
            max_batch_tokens=16,
            max_batch_requests=4,
            max_running=4,
            prefill_context=256,
        )
        self.pages = PageAllocator(num_pages, page_size)
        self.limits = SchedulerLimits(**(sizes | limits))
        count = CacheSpec((), reach).all_recent_pages(
            page_size, self.limits.max_batch_tokens, self.limits.max_running
        )
        self.reach, self.recent_kv = reach, {}  # as `kv`
        recent = RecentPages(PageAllocator(count, page_size), reach) if reach else None
        self.recent = recent
        self.cache = PrefixCache(self.pages, recent=recent, is_enabled=shares)
        self.scheduler = Scheduler(self.limits, self.cache)
        self.states: dict[str, RequestState] = {}
        self.scores: dict[str, list[float]] = {}
        self.open: dict[str, RequestState] = {}  # those that are not finished
        self.device: dict[str, Sequence] = {}  # sampled tokens included
        self.kv: dict[tuple[int, int], int] = {}  # (page, offset) -> digest of the prefix
        self.batches, self.unread = [], []

    def add(self, name, prompt, output, *, scores=False, priority=0):
        """`prompt`: token ids, or how many."""
        ids = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
        request = Request(
            id=name,
            prompt_ids=ids,
            seed=0,
            wants_prompt_logprobs=scores,
            priority=priority,
            params=SamplingParams(max_tokens=output),
        )
        state = RequestState(request, max_tokens=output)
        self.scheduler.add(state)
        self.states[name] = self.open[name] = state
        self.device[name], self.scores[name] = Sequence(ids), []
        return state

    def step(self):
        batch = self.scheduler.next_batch()
        found = [] if batch is None else self.dispatch(batch)
        self.read()
        self.unread = found
        return batch

    def dispatch(self, batch):
        """Checks what every batch must keep to, then runs it on the device."""
        self.check_limits(batch)
        self.batches.append(batch)
        found, size = [], self.pages.page_size
        for row in batch.rows:
            known = self.device[row.request_id]
            start = row.kv_len - row.q_len
            new = known.tokens[start : row.kv_len]
            assert list(row.token_ids if row.token_ids is not None else new) == new
            for at in range(max(start, min(row.num_shared, row.kv_len))):
                held = self.kv.get((row.pages[at // size], at % size))
                assert held == known.digests[at], "a page holds another prefix's KV"
            self.check_recent(row, known)
        written = set()
        for row in batch.rows:
            state, known = self.states[row.request_id], self.device[row.request_id]
            for at in range(max(row.kv_len - row.q_len, row.num_shared), row.kv_len):
                place = (row.pages[at // size], at % size)
                assert place not in written, "two requests write one place"
                written.add(place)
                self.kv[place] = known.digests[at]
            token = None
            if row.sample is not None:
                token = known.next_token(row.kv_len)
                if len(known.tokens) == row.kv_len:  # else sampled before a preemption
                    known.append(token)
            offset, targets = row.score_ids
            first = row.kv_len - row.q_len + offset + 1
            assert list(targets) == known.tokens[first : first + len(targets)]
            scores = [known.logprob(first + i) for i in range(len(targets))]
            found.append((state, token, first, scores, state.lease.nodes))
        return found

    def check_recent(self, row, known):
        """Recent pages hold what the row's first new token reads, and have room for all of them."""
        if not self.reach:
            return
        size, start = self.pages.page_size, row.kv_len - row.q_len
        assert row.num_shared <= start, "rows whose KV is there are not computed"
        most = CacheSpec((), self.reach).recent_pages(size, row.q_len)
        assert len(row.recent) <= most and len(set(row.recent)) == len(row.recent)
        for at in range(max(0, start - self.reach + 1), start):
            held = self.recent_kv.get((row.recent[at // size - row.recent_first], at % size))
            assert held == known.digests[at], "a recent page holds another prefix's"
        for at in range(start, row.kv_len):
            place = (row.recent[at // size - row.recent_first], at % size)
            self.recent_kv[place] = known.digests[at]

    def read(self):
        for state, token, first, scores, nodes in self.unread:
            state.num_in_flight -= 1
            if state.status is Status.FINISHED:
                continue
            self.scores[state.request.id] += [*state.found_logprobs, *scores]
            state.found_logprobs = []
            store_logprobs(nodes, first, scores, self.pages.page_size)
            if token is not None:
                state.output_ids.append(token)
            if state.is_complete:
                self.scheduler.finish(state)
                self.check_answer(state)

    def check_answer(self, state):
        """The whole answer, as if the request had been alone."""
        prompt = state.request.prompt_length
        alone = Sequence(state.request.prompt_ids)
        for _ in range(state.max_tokens):
            alone.append(alone.next_token(len(alone.tokens)))
        assert state.output_ids == alone.tokens[prompt:]
        if state.request.wants_prompt_logprobs:
            assert self.scores[state.request.id] == [alone.logprob(i) for i in range(1, prompt)]

    def check_limits(self, batch):
        limits, rows = self.limits, batch.rows
        assert rows and len({row.slot for row in rows}) == len(rows)
        assert len({row.request_id for row in rows}) == len(rows)
        for row in rows:
            assert row.q_len > 0 and len(row.pages) * self.pages.page_size >= row.kv_len
            assert len(set(row.pages)) == len(row.pages), "a request has a page twice"
        if batch.is_decode:
            assert len(rows) <= limits.max_running and batch.num_tokens == len(rows)
        else:
            assert batch.num_tokens <= limits.max_batch_tokens
            assert len(rows) <= limits.max_batch_requests

    def check_pages(self):
        """Every page is free, leased or remembered, and none is two of these."""
        own, nodes = [], {}
        self._prune()
        for state in self.open.values():
            lease = state.lease
            own += lease.pages[len(lease.nodes) :]
            for node in lease.nodes:
                nodes[id(node)] = node.page
        held = [*own, *nodes.values()]
        assert len(set(held)) == len(held), "a page is doubled"
        assert self.cache.num_available + len(held) == self.pages.num_pages, "a page is lost"
        if self.recent is not None:
            held = {id(page) for state in self.open.values() for page in state.lease.recent}
            assert self.recent.num_available + len(held) == self.recent.num_pages, "one is lost"

    def finish(self, name):
        """Aborts a request."""
        if self.states[name].status is not Status.FINISHED:
            self.scheduler.finish(self.states[name])

    @property
    def num_unfinished(self):
        self._prune()
        return len(self.open)

    def _prune(self):
        for name in [n for n, state in self.open.items() if state.status is Status.FINISHED]:
            assert not self.open.pop(name).lease.pages

    def run(self, most=1000):
        for _ in range(most):
            self.step()
            if not self.num_unfinished:
                self.read()
                self.unread = []
                return
        raise AssertionError("the scheduler does not come to an end")
