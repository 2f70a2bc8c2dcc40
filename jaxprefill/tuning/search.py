"""Measures few shapes, proposes a ladder, measures what it proposes, and proposes again.

Host only: whatever measures stands behind a protocol.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from jaxprefill.prefill.buckets import cut_ladder
from jaxprefill.tuning.costs import BucketCost, CostCurve
from jaxprefill.tuning.ladder import Goal, Lengths, Proposal, check_lengths, chunk_lengths, propose

SMALLEST = 8
_NUM_QUANTILES = 32
_MAX_ROUNDS = 4


class Measurer(Protocol):
    """Whatever can tell the cost of buckets."""

    def measure(self, buckets: Sequence[int]) -> list[BucketCost]:
        """The cost of each bucket, in any order."""
        ...


@dataclass(frozen=True)
class Found:
    """What a search ends with; every bucket of the chosen ladder was measured."""

    curve: CostCurve
    proposal: Proposal


def search(
    measurer: Measurer,
    lengths: Lengths,
    goal: Goal,
    *,
    top: int,
    default: Sequence[int],
    shapes: Sequence[int] | None = None,
) -> Found:
    """The smallest ladder within the goal's budget whose buckets were all measured.

    Args:
        measurer: told to measure a coarse grid, then what is proposed and was not in it.
        lengths: what the ladder is for.
        goal: budget and limits.
        top: `chunked_prefill_size`, the last bucket of every ladder.
        default: the default ladder, which is measured too.
        shapes: measure and propose these (and `top`) alone.

    Raises:
        ConfigError: there are no lengths.
    """
    check_lengths(lengths)
    grid = cut_ladder(shapes, top) if shapes is not None else first_grid(top, default)
    candidates = grid if shapes is not None else fine_grid(grid, lengths)
    costs = list(measurer.measure(grid))
    for _ in range(_MAX_ROUNDS):
        curve = CostCurve(costs)
        proposal = propose(curve, lengths, goal, candidates=candidates)
        missing = [
            bucket for bucket in proposal.chosen.buckets if not curve.cost(bucket).is_measured
        ]
        if not missing:
            return Found(curve, proposal)
        costs += measurer.measure(missing)
    curve = CostCurve(costs)
    measured = [cost.num_tokens for cost in curve.costs]
    return Found(curve, propose(curve, lengths, goal, candidates=measured))


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
