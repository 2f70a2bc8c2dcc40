"""Measures few shapes, proposes a ladder, measures what it proposes, and proposes again.

Host only: whatever measures stands behind a protocol.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Protocol

from jaxprefill.prefill.buckets import cut_ladder
from jaxprefill.tuning.costs import BucketCost, CostCurve
from jaxprefill.tuning.ladder import Goal, Lengths, Proposal, check_lengths, chunk_lengths, propose

SMALLEST = 8
_NUM_QUANTILES = 32


class Measurer(Protocol):
    """Whatever can tell the cost of buckets."""

    def measure(self, buckets: Sequence[int]) -> list[BucketCost]:
        """The cost of each bucket, in any order."""
        ...

    def pair_ns(self) -> Fraction:
        """See `CostCurve`; called once, after `measure`."""
        ...

    def seconds(self, cost: BucketCost) -> float:
        """What measuring a bucket of this cost takes."""
        ...


@dataclass(frozen=True)
class Found:
    """What a search ends with. Where time was short, some buckets' costs are interpolated."""

    curve: CostCurve
    proposal: Proposal

    @property
    def unmeasured(self) -> list[int]:
        """Buckets of the chosen ladder whose costs are interpolated."""
        chosen = self.proposal.chosen.buckets
        return [bucket for bucket in chosen if not self.curve.cost(bucket).is_measured]


def search(
    measurer: Measurer,
    lengths: Lengths,
    goal: Goal,
    *,
    top: int,
    default: Sequence[int],
    shapes: Sequence[int] | None = None,
    limit_s: float = math.inf,
) -> Found:
    """The smallest ladder within the goal's budget whose buckets were all measured.

    Where no such ladder was found when time is up, one with interpolated costs.

    Args:
        measurer: told to measure a coarse grid, then what is proposed and was not in it.
        lengths: what the ladder is for.
        goal: budget and limits.
        top: `chunked_prefill_size`, the last bucket of every ladder.
        default: the default ladder, which is measured too.
        shapes: measure and propose these (and `top`) alone.
        limit_s: seconds that measuring may take, as estimated from what was measured; the
            powers of two up to `top`, or the given shapes, are measured however long it takes.

    Raises:
        ConfigError: there are no lengths.
    """
    check_lengths(lengths)
    grid = cut_ladder(shapes, top) if shapes is not None else first_grid(top, default)
    candidates = grid if shapes is not None else fine_grid(grid, lengths)
    first = [size for size in grid if shapes is not None or size.bit_count() == 1 or size == top]
    costs, pair_ns = list(measurer.measure(first)), measurer.pair_ns()
    wanted = [size for size in grid if size not in first]
    while True:
        left_s = limit_s - sum(map(measurer.seconds, costs))
        costs += _measured_within(left_s, measurer, CostCurve(costs), wanted)
        found = _proposed(CostCurve(costs, pair_ns=pair_ns), lengths, goal, candidates)
        if not found.unmeasured:
            return found
        if found.unmeasured == wanted:
            break
        wanted = found.unmeasured
    known = _proposed(found.curve, lengths, goal, [cost.num_tokens for cost in costs])
    return known if known.proposal.is_within_budget else found


def _proposed(curve: CostCurve, lengths: Lengths, goal: Goal, candidates: Sequence[int]) -> Found:
    return Found(curve, propose(curve, lengths, goal, candidates=candidates))


def _measured_within(
    left_s: float, measurer: Measurer, curve: CostCurve, wanted: Sequence[int]
) -> list[BucketCost]:
    """Costs of as many of the buckets as can be measured in the time, those of least time first."""
    chosen: list[int] = []
    for seconds, size in sorted((measurer.seconds(curve.cost(size)), size) for size in wanted):
        left_s -= seconds
        if left_s >= 0:
            chosen.append(size)
    return measurer.measure(sorted(chosen)) if chosen else []


def first_grid(top: int, default: Sequence[int]) -> tuple[int, ...]:
    """The default ladder and two buckets an octave: 8 12 16 24 32 48 ..., up to `top`."""
    octaves = [SMALLEST << power for power in range(top.bit_length())]
    steps = {size for octave in octaves for size in (octave, octave + octave // 2)}
    return cut_ladder(steps | set(default), top)


def fine_grid(grid: Sequence[int], lengths: Lengths) -> tuple[int, ...]:
    """Buckets worth proposing: the grid's, sixteen an octave, and what the lengths ask for."""
    smallest, top = grid[0], grid[-1]
    wanted = {round_up(length) for length in quantiles(chunk_lengths(lengths, top))}
    bucket = smallest
    while bucket < top:
        wanted.add(bucket)
        bucket = round_up(bucket + 1)
    return cut_ladder({bucket for bucket in {*grid, *wanted} if bucket >= smallest}, top)


def quantiles(lengths: Lengths) -> tuple[int, ...]:
    """All lengths where there are few, else evenly spread ones, the longest among them."""
    if len(lengths) <= _NUM_QUANTILES:
        return tuple(lengths)
    ordered = sorted(lengths)
    reached = list(accumulate(lengths[length] for length in ordered))
    marks = [reached[-1] * (step + 1) for step in range(_NUM_QUANTILES)]
    at = [
        next(i for i, count in enumerate(reached) if count * _NUM_QUANTILES >= mark)
        for mark in marks
    ]
    return tuple(sorted({ordered[index] for index in at}))


def round_up(num_tokens: int) -> int:
    """To a multiple of a sixteenth of the power of two below, of 4 at least."""
    multiple = max(4, (1 << (num_tokens.bit_length() - 1)) // 16)
    return -(-num_tokens // multiple) * multiple
