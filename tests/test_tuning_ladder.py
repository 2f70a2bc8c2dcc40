"""The choice of a ladder against brute force, and known answers, on made-up costs."""

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxprefill.errors import ConfigError
from jaxprefill.scheduler.limits import SchedulerLimits
from jaxprefill.tuning.costs import BucketCost, CostCurve
from jaxprefill.tuning.ladder import Goal, best_by_size, chunk_lengths, expect, propose


def cost(num_tokens, time_ns, compile_s=1.0, **more):
    sizes = {"code_bytes": 100, "temp_bytes": num_tokens} | more
    return BucketCost(num_tokens=num_tokens, time_ns=time_ns, compile_s=compile_s, **sizes)


def curve_of(times, compile_s=None):
    given_s = compile_s or {}
    return CostCurve(cost(n, ns, given_s.get(n, 1.0)) for n, ns in times.items())


LINEAR = curve_of({n: 1000 * n for n in (4, 8, 16, 32, 64)})
FLAT = curve_of({4: 500, 8: 500, 16: 500, 32: 500, 64: 1000})


@st.composite
def problems(draw):
    tokens = draw(st.lists(st.integers(1, 24), min_size=1, max_size=6, unique=True))
    times = {n: draw(st.integers(1, 60)) for n in tokens}
    seconds = {n: draw(st.sampled_from([0.5, 1.0, 2.0])) for n in tokens}
    lengths = draw(st.dictionaries(st.integers(1, 80), st.integers(1, 9), min_size=1, max_size=6))
    return curve_of(times, seconds), lengths


def waste_by_definition(curve, lengths, buckets):
    """One prompt at a time, each chunk in the smallest bucket that holds it."""
    time = ideal = Fraction(0)
    for length, count in lengths.items():
        for chunk in [buckets[-1]] * (length // buckets[-1]) + [length % buckets[-1]]:
            if chunk:
                held = min(bucket for bucket in buckets if bucket >= chunk)
                time += count * curve.cost(held).time_ns
                ideal += count * curve.ideal_ns(chunk)
    return time / ideal - 1


def brute_force(curve, lengths, budget, most):
    """The best of all ladders that end in the largest bucket, by the documented order."""
    tokens = [one.num_tokens for one in curve.costs]
    ranked = []
    for size in range(min(most, len(tokens))):
        for chosen in combinations(tokens[:-1], size):
            buckets = (*chosen, tokens[-1])
            waste = waste_by_definition(curve, lengths, buckets)
            seconds = sum(curve.cost(bucket).compile_s for bucket in buckets)
            ranked.append((waste > Fraction(budget), len(buckets), waste, seconds, buckets))
    best = min(ranked)
    if best[0]:  # none is within the budget: the least waste, then the smallest
        best = min(ranked, key=lambda one: (one[2], one[1], one[3], one[4]))
    return not best[0], best[4], best[2]


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from([0, 0.05, 0.5, 100]), st.integers(1, 6))
def test_the_proposal_is_the_best_of_all_ladders(problem, budget, most):
    curve, lengths = problem
    tokens = [one.num_tokens for one in curve.costs]
    goal = Goal(budget=budget, max_buckets=most)
    found = propose(curve, lengths, goal, candidates=tokens)
    is_within, buckets, waste = brute_force(curve, lengths, budget, most)
    assert (found.is_within_budget, found.chosen.buckets) == (is_within, buckets)
    assert found.chosen.waste == pytest.approx(float(waste), abs=1e-12) and waste >= 0
    again = propose(curve, dict(reversed(lengths.items())), goal, candidates=tokens[::-1])
    assert again == found
    sizes = [len(one.buckets) for one in found.by_size]
    assert sizes == sorted(set(sizes)) and sizes[-1] <= most
    assert all(a.waste > b.waste for a, b in zip(found.by_size, found.by_size[1:], strict=False))


def test_known_answers_where_time_grows_with_tokens():
    lengths = {4: 10, 16: 10, 64: 10}
    choose = lambda **goal: propose(LINEAR, lengths, Goal(**goal), candidates=(4, 8, 16, 32, 64))  # noqa: E731
    assert choose(budget=0).chosen.buckets == (4, 16, 64)
    assert choose(budget=0).chosen.waste == 0
    assert choose(budget=1e9).chosen.buckets == (64,)
    assert choose(budget=0.15).chosen.buckets == (16, 64)  # 4 in 16: 120 us of 840 too many
    assert choose(budget=0.14).chosen.buckets == (4, 16, 64)
    tight = choose(budget=0, max_buckets=2)
    assert tight.chosen.buckets == (16, 64) and not tight.is_within_budget


def test_buckets_are_spared_where_time_is_flat():
    found = propose(FLAT, {3: 5, 9: 5, 30: 5, 64: 1}, Goal(budget=0), candidates=(4, 8, 16, 32, 64))
    assert found.chosen.buckets == (32, 64) and found.chosen.waste == 0
    assert found.chosen.padding == pytest.approx((15 * 32 + 64) / (15 + 45 + 150 + 64) - 1)


def test_a_bucket_that_is_slower_than_a_larger_one_is_left_out():
    curve = curve_of({64: 600, 96: 900, 128: 700})
    assert [curve.ideal_ns(n) for n in (64, 80, 96, 128)] == [600, 650, 700, 700]
    assert propose(curve, {90: 1, 50: 1}, Goal(), candidates=(64, 96, 128)).chosen == (
        expect(curve, {90: 1, 50: 1}, (64, 128))
    )


def test_equal_times_are_decided_by_compile_seconds_then_bytes_then_the_smaller_bucket():
    times = {8: 10, 12: 10, 64: 90}
    candidates = (8, 12, 64)
    choose = lambda curve: propose(curve, {5: 1}, Goal(), candidates=candidates).chosen.buckets  # noqa: E731
    assert choose(curve_of(times)) == (8, 64)
    assert choose(curve_of(times, {8: 2.0})) == (12, 64)
    lean = CostCurve([cost(8, 10), cost(12, 10, code_bytes=1), cost(64, 90)])
    assert choose(lean) == (12, 64)


def test_long_prompts_are_chunked_by_the_largest_bucket():
    assert chunk_lengths({64: 1, 130: 2, 5: 3}, 64) == {2: 2, 5: 3, 64: 5}
    found = expect(LINEAR, {133: 2}, (4, 64))
    assert found.ms_per_request == pytest.approx(0.192) and found.waste == pytest.approx(59 / 133)


def test_one_length_needs_one_bucket_beside_the_largest():
    found = propose(LINEAR, {16: 7}, Goal(budget=0), candidates=(4, 8, 16, 32, 64))
    assert found.chosen.buckets == (16, 64) and found.is_within_budget
    assert propose(LINEAR, {64: 7}, Goal(budget=0), candidates=(4, 64)).chosen.buckets == (64,)


def test_memory_is_all_code_and_the_largest_temporaries():
    found = expect(LINEAR, {3: 1}, (4, 32, 64))
    assert (found.num_bytes, found.compile_s, found.is_measured) == (3 * 100 + 64, 3.0, True)


def test_costs_between_measured_buckets_are_read_from_the_line():
    found = LINEAR.cost(48)
    assert (found.time_ns, found.is_measured, LINEAR.ideal_ns(48)) == (48000, False, 48000)
    assert LINEAR.cost(2).time_ns == 4000  # nothing smaller was measured
    assert not expect(LINEAR, {3: 1}, (48, 64)).is_measured
    for length in (0, 65):
        with pytest.raises(ConfigError, match="costs are known for 1 to 64"):
            LINEAR.ideal_ns(length)


def test_steps_that_the_scheduler_cuts_are_counted_as_it_cuts_them():
    """On a CPU 20 tokens in (16, 64) run as 16 and 4, not as 64."""
    limits = SchedulerLimits(
        max_batch_tokens=64, max_batch_requests=1, max_running=1, prefill_context=64,
        buckets=(4, 16, 64), split_above=1.5,
    )  # fmt: skip
    assert limits.step_tokens(20) == 16
    whole = expect(LINEAR, {20: 1}, (4, 16, 64))
    cut = expect(LINEAR, {20: 1}, (4, 16, 64), split_above=1.5)
    assert (whole.ms_per_request, cut.ms_per_request) == (0.064, 0.020)
    cheap = propose(LINEAR, {20: 1}, Goal(budget=0, split_above=1.5), candidates=(4, 16, 64))
    assert cheap.chosen.buckets == (4, 64)  # though a whole step gains nothing from 4


def test_later_steps_pay_for_their_attention_to_earlier_ones():
    """20 tokens as 16 and 4: 64 pairs; as 8, 8 and 4: 8 x 8 + 4 x 16."""
    curve = CostCurve(LINEAR.costs, pair_ns=Fraction(1000))
    taken = lambda *buckets: expect(curve, {20: 3}, buckets, split_above=1.5)  # noqa: E731
    assert taken(4, 16, 64).ms_per_request == 0.020 + 0.064
    assert taken(4, 8, 64).ms_per_request == 0.020 + 0.128
    assert taken(4, 16, 64).waste == pytest.approx(84 / 20 - 1)
    long = expect(curve, {84: 1}, (32, 64))  # 64 and 20, as the ideal too
    assert long.ms_per_request == pytest.approx(0.096 + 64 * 20 / 1000)
    assert long.waste == pytest.approx((96 + 1280) / (84 + 1280) - 1)


def test_where_steps_are_cut_no_size_is_worse_than_the_doubling_ladder():
    """Without cuts buckets close to each other are best; cut prompts fill those far apart."""
    buckets = (16, 32, 64, 96, 128, 192, 256)
    curve = curve_of({bucket: 1000 * bucket + 9000 for bucket in buckets})
    lengths = {length: 1 + length % 7 for length in range(3, 1000)}
    goal = Goal(budget=0, split_above=1.5)
    found = propose(curve, lengths, goal, candidates=buckets)
    doubling = expect(curve, lengths, (16, 32, 64, 128, 256), split_above=1.5)
    best = min(one.waste for one in found.by_size if len(one.buckets) <= 5)
    assert best <= doubling.waste
    wastes = [one.waste for one in found.by_size]
    assert wastes == sorted(wastes, reverse=True)


@pytest.mark.parametrize("lengths", [{}, {5: 0}, {0: 1}, {-3: 2}, {5: -1, 6: 2}])
def test_a_distribution_of_nothing_is_refused(lengths):
    with pytest.raises(ConfigError, match="prompt length"):
        propose(LINEAR, lengths, Goal(), candidates=(4, 64))


@pytest.mark.parametrize("bad", [dict(budget=-0.1), dict(budget=float("nan")), dict(max_buckets=0)])
def test_a_goal_that_cannot_be_is_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Goal(**bad)


def test_a_bucket_measured_twice_or_for_nothing_is_refused():
    with pytest.raises(ConfigError, match="measured once"):
        CostCurve([cost(4, 5), cost(4, 6)])
    with pytest.raises(ConfigError, match="at least 1"):
        cost(4, 0)


def test_the_order_of_sizes_ends_where_time_cannot_fall():
    costs = list(LINEAR.costs)
    assert list(best_by_size(costs, {4: 1, 64: 1}, 9)) == [(64,), (4, 64)]
