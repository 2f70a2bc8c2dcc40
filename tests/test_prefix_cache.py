"""Shared prefixes: computed once, never mixed up, never lost, whatever happens to their makers."""

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxprefill.cache.pages import PageAllocator
from jaxprefill.cache.prefix import Match, PrefixCache
from jaxprefill.scheduler import Status
from tests.simulation import Simulation

QUERY = tuple(range(100, 121))  # five pages of four, and one token


def computed(sim, name):
    return sum(row.q_len for batch in sim.batches for row in batch.rows if row.request_id == name)


def sharing(**sizes):
    return Simulation(**(dict(shares=True, max_batch_tokens=64, num_pages=40) | sizes))


def test_a_second_request_computes_only_what_the_first_did_not():
    sim = sharing()
    sim.add("a", (*QUERY, 1, 2), 1)
    sim.run()
    state = sim.add("b", (*QUERY, 3, 4), 1)
    sim.run()
    assert computed(sim, "b") == 3 and state.num_cached == 20


@pytest.mark.parametrize("chunk", [64, 7])
def test_requests_that_begin_alike_wait_for_the_first_and_share(chunk):
    sim = sharing(max_batch_tokens=chunk, max_batch_requests=8, max_running=8)
    for index in range(8):
        sim.add(str(index), (*QUERY, index, 7, 7), 0)
    sim.add("other", (1, 2, 3), 1)
    first = sim.step()
    assert [row.request_id for row in first.rows] == ["0", "other"]
    sim.run()
    total = sum(batch.num_tokens for batch in sim.batches)
    assert total == 3 + len(QUERY) + 3 + 7 * (1 + 3)


def test_nobody_waits_for_a_request_that_was_aborted():
    sim = sharing(max_batch_tokens=8)
    sim.add("a", (*QUERY, 1), 1)
    sim.add("b", (*QUERY, 2), 1)
    sim.step()
    sim.step()
    sim.finish("a")
    sim.run()
    assert computed(sim, "b") == len(QUERY) + 1 - 8, "what was dispatched is kept"


def test_a_prompt_that_is_known_whole_computes_its_last_token_and_writes_nothing():
    sim = sharing()
    for name in "ab":
        sim.add(name, QUERY[:20], 1)
        sim.run()
    row = sim.batches[-1].rows[0]
    assert (row.q_len, row.kv_len, row.num_shared) == (1, 20, 20)


def test_scores_come_from_the_pages_when_they_hold_them():
    sim = sharing()
    sim.add("a", (*QUERY, 1), 0, scores=True)
    sim.run()
    sim.add("b", (*QUERY, 2, 3), 0, scores=True)
    sim.run()
    assert computed(sim, "b") == 2 + 1 + 1, "the row before the first unknown score too"


def test_pages_without_scores_spare_no_rows_to_who_wants_them():
    sim = sharing()
    sim.add("a", (*QUERY, 1), 2)
    sim.run()
    sim.add("b", (*QUERY, 1), 0, scores=True)
    sim.run()
    assert computed(sim, "b") == len(QUERY) + 1
    row = sim.batches[-1].rows[0]
    assert row.num_shared == 20, "but their KV is not written again"
    sim.add("c", (*QUERY, 1), 0, scores=True)
    sim.run()
    assert computed(sim, "c") == 3, "scored once, known from then on"


def test_generated_text_is_remembered_for_the_next_turn():
    sim = sharing()
    first = sim.add("a", (5, 6, 7), 10)
    sim.run()
    turn = (5, 6, 7, *first.output_ids, 8, 9)
    state = sim.add("b", turn, 1)
    sim.run()
    assert state.num_cached == 12, "all but the last token, which nothing read"


def test_pages_are_given_up_oldest_first_and_the_end_of_a_prefix_before_its_beginning():
    cache = PrefixCache(PageAllocator(4, 2))
    for tokens in ((1, 1, 2, 2), (3, 3, 4, 4)):
        keys = cache.keys(tokens)
        lease = cache.lease(Match(), keys, 2)
        cache.mark_ready(lease, 4)
        cache.release(lease)
    assert cache.num_cached == 4 and cache.num_available == 4
    lease = cache.lease(Match(), [], 1)
    assert [len(cache.match(cache.keys(t)).nodes) for t in ((1, 1, 2, 2), (3, 3, 4, 4))] == [1, 2]
    assert cache.lease(cache.match(cache.keys((3, 3))), [], 5) is None
    assert cache.num_available == 3, "a lease that fails takes nothing"
    cache.flush()
    assert cache.num_cached == 0 and cache.num_available == 3
    cache.release(lease)
    assert cache.num_available == 4


def test_a_match_that_was_given_away_is_no_lease():
    cache = PrefixCache(PageAllocator(2, 2))
    lease = cache.lease(Match(), cache.keys((1, 1)), 1)
    cache.mark_ready(lease, 2)
    cache.release(lease)
    match = cache.match(cache.keys((1, 1)))
    cache.release(cache.lease(Match(), [], 2))
    assert cache.lease(match, [], 2) is None and cache.num_available == 2


def drive(sim, ops, rng):
    """Admit, extend, share, score, abort and preempt as the bytes say; pages checked each step."""
    names = []
    for op in ops:
        if (
            op < 70
            and sum(state.status is not Status.FINISHED for state in sim.states.values()) < 12
        ):
            name = str(len(names))
            names.append(name)
            stem = (op % 3,) * rng.choice((0, 4, 5, 13))  # few beginnings, so that many meet
            tail = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 9)))
            output = rng.choice((0, 0, 1, 3, 9))
            sim.add(name, (*stem, *tail), output, scores=op % 2 == 0, priority=op % 5 // 4)
        elif op < 80 and names:
            sim.finish(rng.choice(names))
        elif op == 80:
            sim.cache.flush()
        else:
            sim.step()
            sim.check_pages()


@settings(deadline=None, max_examples=100, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.integers(9, 24), st.sampled_from((5, 16, 64)), st.integers(0, 2**32))
def test_no_sequence_of_events_leaks_doubles_or_mixes_pages(num_pages, tokens, seed):
    """100 examples of 1000 events each."""
    rng = random.Random(seed)
    sim = sharing(num_pages=num_pages, max_batch_tokens=tokens, reach=rng.choice((0, 3, 10)))
    drive(sim, rng.randbytes(1000), rng)
    sim.run()
    sim.check_pages()
    assert sim.cache.num_available == num_pages
    sim.cache.flush()
    assert sim.pages.num_free == num_pages
    assert sim.recent is None or sim.recent._pages.num_free == sim.recent.num_pages


def test_a_prefix_is_of_use_from_where_its_recent_tokens_are_kept():
    prompt = tuple(range(40))
    sim = sharing(num_pages=200, reach=8, max_running=2, max_batch_tokens=16)
    assert sim.recent.num_pages == 2 * (2 * 2 + 2) + 4  # however long prompts are
    sim.add("first", prompt, 2)
    sim.run()
    sim.add("whole", prompt, 2)  # its last page again, as its last token's row is needed
    sim.run()
    assert computed(sim, "whole") == 4 + 1
    sim.add("long", range(100, 200), 0)
    sim.run()  # passes more pages than there are: what was kept longest is gone
    sim.add("again", prompt, 2)
    sim.run()
    assert computed(sim, "again") == 40 + 1
    sim.add("kept", prompt, 2)  # what was computed anew is kept for the nodes that lacked it
    sim.run()
    assert computed(sim, "kept") == 4 + 1
    kept = {"total": 16, "free": 16, "cached": 14}
    assert sim.cache.counts()["recent_pages"] == kept
