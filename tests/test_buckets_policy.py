"""Ladders and the one decision, as integers: UPSTREAM section 4 where it applies."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxprefill.errors import ConfigError
from jaxprefill.prefill.buckets import (
    GPU_BUCKETS,
    BucketLadder,
    ShapeKey,
    coarse_buckets,
    cut_ladder,
    slot_buckets,
    upstream_buckets,
)
from jaxprefill.prefill.policy import Fallback, FallbackReason, PrefillPolicy, Use, decide

LADDER = BucketLadder((16, 4, 64), 4, (700,))


def choose(tokens, *, requests=1, context=10, **policy):
    made = PrefillPolicy(ladder=policy.pop("ladder", LADDER), **policy)
    return decide(made, num_tokens=tokens, num_requests=requests, max_context=context)


@pytest.mark.parametrize(("limit", "count"), [(2048, 42), (4096, 50), (8192, 58), (16384, 74)])
def test_the_upstream_ladder_has_upstreams_counts(limit, count):
    assert len(upstream_buckets(limit)) == count


def test_an_off_ladder_maximum_is_not_in_the_upstream_ladder():
    assert upstream_buckets(2000)[-1] == 1792


def test_the_default_gpu_ladder_keeps_steps_small():
    assert len(GPU_BUCKETS) == 21
    steps = {a: b / a for a, b in pairwise(GPU_BUCKETS)}
    assert max(step for a, step in steps.items() if a >= 128) <= 1.5
    assert max(step for a, step in steps.items() if a >= 192) <= 4 / 3 + 1e-9


def test_keys_are_listed_largest_first_and_once():
    ladder = BucketLadder((4, 16, 4), 2, (256, 1024))
    assert [str(key) for key in ladder.keys] == ["16x2x1024", "16x2x256", "4x2x1024", "4x2x256"]


def test_the_smallest_context_that_fits_is_part_of_the_key():
    ladder = BucketLadder((16,), 2, (256, 1024))
    assert ladder.pick(3, 256) == ShapeKey(16, 2, 256)
    assert ladder.pick(3, 257) == ShapeKey(16, 2, 1024)
    assert ladder.pick(3, 1025) is None


@pytest.mark.parametrize(
    "bad", [dict(buckets=()), dict(buckets=(0, 4)), dict(num_slots=0), dict(max_contexts=(-1,))]
)
def test_a_ladder_of_nothing_is_refused(bad):
    with pytest.raises(ConfigError):
        BucketLadder(**(dict(buckets=(4,), num_slots=1, max_contexts=(8,)) | bad))


def test_a_batch_that_exactly_fills_a_bucket_uses_it():
    assert choose(16) == Use(ShapeKey(16, 4, 700))
    assert choose(17) == Use(ShapeKey(64, 4, 700))


def test_more_tokens_than_the_largest_bucket_fall_back():
    assert choose(65) == Fallback(FallbackReason.TOO_MANY_TOKENS, 65, 64)


def test_more_requests_than_slots_fall_back():
    assert choose(8, requests=4) == Use(ShapeKey(16, 4, 700))
    assert choose(8, requests=5) == Fallback(FallbackReason.TOO_MANY_REQUESTS, 5, 4)


def test_context_at_the_maximum_runs_and_one_more_falls_back():
    assert isinstance(choose(4, context=700), Use)
    assert choose(4, context=701) == Fallback(FallbackReason.CONTEXT_ABOVE_MAX, 701, 700)


def test_an_unknown_context_falls_back():
    found = choose(4, context=None)
    assert isinstance(found, Fallback) and found.reason is FallbackReason.CONTEXT_UNKNOWN


def test_padding_is_no_reason_unless_a_limit_is_set():
    ladder = BucketLadder((4, 16), 4, (700,))
    assert choose(5, ladder=ladder) == Use(ShapeKey(16, 4, 700))
    found = choose(5, ladder=ladder, max_padding_factor=2.0)
    assert isinstance(found, Fallback) and found.reason is FallbackReason.PADDING_FACTOR
    assert choose(8, ladder=ladder, max_padding_factor=2.0) == Use(ShapeKey(16, 4, 700))


def test_the_eager_backend_disables_every_executable():
    found = choose(4, is_enabled=False)
    assert found == Fallback(FallbackReason.DISABLED)
    assert str(found) == "disabled (prefill_backend is eager)"


@given(st.sets(st.integers(1, 5000), min_size=1, max_size=8), st.integers(1, 5000))
def test_the_smallest_bucket_that_holds_the_tokens_is_picked(buckets, tokens):
    found = BucketLadder(tuple(buckets), 1, (10,)).pick(tokens, 1)
    fitting = [bucket for bucket in buckets if bucket >= tokens]
    assert (found.num_tokens if found else None) == min(fitting, default=None)


@given(st.integers(1, 9000))
def test_derived_ladders_end_at_what_they_must_hold(limit):
    assert cut_ladder(GPU_BUCKETS, limit)[-1] == limit
    assert coarse_buckets(limit)[-1] >= limit
    assert all(b & (b - 1) == 0 for b in coarse_buckets(limit))
    assert slot_buckets(limit)[-1] == limit and slot_buckets(limit)[0] >= 1
