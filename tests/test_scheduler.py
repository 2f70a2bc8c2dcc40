"""The scheduler alone: a device that always answers, integers only."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxprefill.errors import RequestError
from jaxprefill.scheduler import Status
from tests.simulation import Simulation


def shape(batch):
    return [(row.request_id, row.q_len) for row in batch.rows]


def test_short_prompts_are_packed_into_one_step():
    sim = Simulation()
    for name, length in (("a", 3), ("b", 5), ("c", 2)):
        sim.add(name, length, 1)
    assert shape(sim.step()) == [("a", 3), ("b", 5), ("c", 2)]


def test_a_seventeenth_short_request_waits_instead_of_falling_back():
    sim = Simulation(max_batch_requests=2)
    for name in "abc":
        sim.add(name, 2, 1)
    assert shape(sim.step()) == [("a", 2), ("b", 2)]
    assert shape(sim.step()) == [("c", 2)]


def test_where_padding_would_be_large_a_step_is_cut_to_the_bucket_below():
    sim = Simulation(buckets=(2, 4, 16), split_above=1.5)
    sim.add("a", 5, 1)
    assert [shape(sim.step()) for _ in range(2)] == [[("a", 4)], [("a", 1)]]
    sim.run()
    sim.add("b", 12, 1)
    assert shape(sim.step()) == [("b", 12)]


def test_without_a_split_factor_a_step_is_padded_up():
    sim = Simulation(buckets=(2, 4, 16))
    sim.add("a", 5, 1)
    assert shape(sim.step()) == [("a", 5)]


def test_a_long_prompt_is_chunked_and_samples_only_at_its_end():
    sim = Simulation()
    sim.add("a", 40, 1)
    chunks = [sim.step().rows[0] for _ in range(3)]
    assert [row.q_len for row in chunks] == [16, 16, 8]
    assert [row.kv_len for row in chunks] == [16, 32, 40]
    assert [row.sample is not None for row in chunks] == [False, False, True]


def test_decode_rows_ride_along_with_a_long_prompt():
    sim = Simulation()
    sim.add("a", 3, 20)
    sim.step()
    sim.add("b", 60, 1)
    for _ in range(4):
        assert shape(sim.step()) == [("a", 1), ("b", 15)]


def test_no_stream_waits_more_than_two_steps_for_a_long_prompt():
    sim = Simulation(max_batch_requests=1)  # no room to ride along: the two take turns
    sim.add("a", 3, 12)
    sim.add("b", 90, 1)
    sim.run()
    steps = [
        i
        for i, batch in enumerate(sim.batches)
        for row in batch.rows
        if row.request_id == "a" and row.sample is not None
    ]
    assert max(b - a for a, b in pairwise(steps)) <= 2


def first_step_of(sim, name):
    return next(
        index
        for index, batch in enumerate(sim.batches)
        if any(row.request_id == name and row.sample is not None for row in batch.rows)
    )


def test_streams_get_a_token_every_step_while_long_prompts_come_one_after_another():
    sim = Simulation(num_pages=200)
    for name in "ab":
        sim.add(name, 3, 40)
    sim.step()
    for index in range(5):
        sim.add(f"long {index}", 100, 1)
    for _ in range(38):
        assert {"a", "b"} <= {row.request_id for row in sim.step().rows}


def test_short_prompts_do_not_wait_for_the_long_ones_before_them():
    sim = Simulation(num_pages=200, max_batch_requests=8, max_running=8)
    for index in range(4):
        sim.add(f"long {index}", 100, 1)
    sim.add("short", 6, 1)
    sim.run()
    assert first_step_of(sim, "short") == 0
    assert first_step_of(sim, "long 0") <= 13, "and the first in line has half of every step"


def test_a_long_prompt_is_not_starved_by_short_ones():
    sim = Simulation(num_pages=200, max_batch_requests=8, max_running=8)
    sim.add("long", 64, 1)
    for step in range(40):
        sim.add(f"{step} a", 12, 1)
        sim.add(f"{step} b", 12, 1)
        sim.step()
    assert first_step_of(sim, "long") <= 64 // 8


def test_a_higher_priority_is_served_first_and_preempted_last():
    sim = Simulation(max_batch_requests=1)
    for name, priority in (("low", 0), ("high", 2), ("middle", 1)):
        sim.add(name, 4, 1, priority=priority)
    sim.run()
    assert [batch.rows[0].request_id for batch in sim.batches] == ["high", "middle", "low"]
    sim = Simulation(num_pages=6)
    sim.add("high", 8, 12, priority=1)
    sim.add("old", 8, 12)
    sim.run()
    assert sim.scheduler.num_preemptions > 0
    starts = [row.request_id for batch in sim.batches for row in batch.rows if row.q_len > 1]
    assert starts.count("high") == 1 and starts.count("old") > 1


def test_a_decode_row_names_its_slot_before_the_token_is_known():
    sim = Simulation()
    state = sim.add("a", 3, 4)
    sim.step()
    row = sim.step().rows[0]
    assert row.token_ids is None and row.kv_len == 4 and row.slot == state.slot


def test_generation_stops_at_its_limit_though_results_come_late():
    sim = Simulation()
    state = sim.add("a", 3, 5)
    sim.run()
    assert len(state.output_ids) == 5 and len(sim.batches) == 5


def test_contexts_beyond_the_executables_go_apart_and_none_starves():
    sim = Simulation(prefill_context=20)
    sim.add("long", 50, 2)
    for name in "abcd":
        sim.add(name, 4, 6)
    sim.run()
    for batch in sim.batches:
        if not batch.is_decode:
            beyond = [row.kv_len > 20 for row in batch.rows]
            assert all(beyond) or not any(beyond)


def test_a_request_that_can_never_fit_is_refused_at_once():
    sim = Simulation(num_pages=4)
    sim.add("fits", 10, 7)
    with pytest.raises(RequestError, match=r"KV pool of 16 tokens.*17"):
        sim.add("too long", 10, 8)


def test_pool_pressure_preempts_the_youngest_which_starts_again():
    sim = Simulation(num_pages=6)
    old, young = sim.add("old", 8, 12), sim.add("young", 8, 12)
    sim.run()
    assert sim.scheduler.num_preemptions > 0
    assert len(old.output_ids) == len(young.output_ids) == 12
    again = [
        row
        for batch in sim.batches
        for row in batch.rows
        if row.request_id == "young" and row.q_len > 8
    ]
    assert again and again[0].token_ids[8:] == tuple(young.output_ids[: again[0].q_len - 8])
    assert not [
        row
        for batch in sim.batches
        for row in batch.rows
        if row.request_id == "old" and row.q_len > 8
    ]


def test_a_prefix_that_nobody_holds_is_no_room_for_whoever_begins_with_it():
    """Else a running prompt would wait for ever for one before it that waits for pages."""
    sim = Simulation(
        num_pages=20, shares=True, max_batch_tokens=4, max_batch_requests=1, max_running=2
    )
    known = list(range(100, 120))  # five pages that only the cache keeps
    sim.add("known", known, 0)
    sim.run()
    sim.add("running", 53, 2)
    sim.step()
    sim.add("urgent", [*known, *range(200, 221)], 2, priority=1)
    sim.run()
    assert sim.scheduler.num_cached_tokens == len(known)


def test_prompt_scores_cover_every_chunk_border_once():
    sim = Simulation()
    sim.add("a", 40, 0, scores=True)
    sim.run()
    scored = []
    for batch in sim.batches:
        offset, targets = batch.rows[0].score_ids
        first = batch.rows[0].kv_len - batch.rows[0].q_len + offset + 1
        scored += [(first + i, target) for i, target in enumerate(targets)]
    assert scored == [(i, i) for i in range(1, 40)]


def test_aborting_anywhere_gives_everything_back():
    for steps in range(6):
        sim = Simulation()
        for name in "abcdef":
            sim.add(name, 20, 5)
        for _ in range(steps):
            sim.step()
        for state in sim.states.values():
            if state.status is not Status.FINISHED:
                sim.scheduler.finish(state)
        assert sim.pages.num_free == 64
        assert sim.scheduler.num_running == sim.scheduler.num_waiting == 0


jobs = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 12), st.booleans(), st.integers(0, 4)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=150)
@given(jobs, st.integers(14, 40), st.integers(1, 4), st.sampled_from([8, 30, 256]), st.randoms())
def test_any_mix_finishes_and_leaks_nothing(jobs, num_pages, slots, prefill_context, random):
    split = random.choice([1.0, 1.5, 100.0])
    sim = Simulation(
        num_pages=num_pages,
        max_batch_requests=slots,
        prefill_context=prefill_context,
        buckets=(2, 4, 16),
        split_above=split,
        reach=random.choice([0, 1, 6]),
    )
    waiting = list(enumerate(jobs))
    while waiting or any(s.status is not Status.FINISHED for s in sim.states.values()):
        while waiting and random.random() < 0.5:
            index, (prompt, output, scores, _) = waiting.pop(0)
            sim.add(str(index), prompt, output, scores=scores or not output)
        sim.step()
        for index, (*_, patience) in enumerate(jobs):
            state = sim.states.get(str(index))
            is_victim = patience == 0 and state and len(state.output_ids) > 2
            if is_victim and state.status is not Status.FINISHED:
                sim.scheduler.finish(state)
    sim.read()
    assert sim.pages.num_free == num_pages
    assert sim.scheduler.num_running == sim.scheduler.num_waiting == 0
    for index, (_, output, _, patience) in enumerate(jobs):
        if patience:
            assert len(sim.states[str(index)].output_ids) == output
