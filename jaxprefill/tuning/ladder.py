"""The smallest ladder within a budget of waste: dynamic programming over measured costs.

Knows buckets, costs and a histogram of prompt lengths; imports no jax and measures nothing.

**Waste** of a ladder on a distribution is the time that its steps take over the time that the
same prompts would take at their exact lengths, minus one. A prompt runs alone: as many full
chunks of the largest bucket (`chunked_prefill_size`) as it fills, then the rest in the smallest
bucket that holds it. A step takes its bucket's measured time; at its exact length it would take
what `CostCurve.ideal_ns` interpolates, chunked by the largest bucket measured. A later chunk pays
for its attention to earlier ones too (`CostCurve.pair_ns`). Both are summed over all prompts before
they are divided, so that waste is the share of device time that padding adds. It may be below zero:
cut steps are quicker than whole ones where a large bucket takes more time a token than small ones.
What every ladder pays alike (the head) is left out, and so are batches of several requests, which
share their padding.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, repeat
from typing import Any, NamedTuple

from jaxprefill.errors import ConfigError
from jaxprefill.prefill.buckets import at_least
from jaxprefill.scheduler.limits import SchedulerLimits
from jaxprefill.tuning.costs import BucketCost, CostCurve

NUM_BEYOND = 2  # sizes that are looked at beyond the first within the budget
Lengths = Mapping[int, int]  # prompt length in tokens -> number of prompts


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is asked of a ladder.

    Attributes:
        budget: most waste, as a fraction; 0 asks for the least that can be had.
        max_buckets: most buckets; None: any number.
        split_above: the scheduler's (`SchedulerLimits`); finite on a CPU.
    """

    budget: float = 0.05
    max_buckets: int | None = None
    split_above: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.budget < math.inf:
            raise ConfigError(
                f"budget must be a share of at least 0, such as 0.05 or 5%, got {self.budget}"
            )
        if self.max_buckets is not None and self.max_buckets < 1:
            raise ConfigError(f"max_buckets must be at least 1, got {self.max_buckets}")


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a ladder does on a distribution.

    Attributes:
        waste: see the module.
        padding: padding tokens over real ones.
        ms_per_request: the body's time of a prompt, milliseconds.
        compile_s: seconds of one thread, all buckets together.
        num_bytes: code of all buckets, and the largest temporaries.
        is_measured: whether every bucket's cost was measured, none interpolated.
    """

    buckets: tuple[int, ...]
    waste: float
    padding: float
    ms_per_request: float
    compile_s: float
    num_bytes: int
    is_measured: bool


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The ladder chosen, and the best one of each size up to a little larger.

    Attributes:
        by_size: ascending; a size that saves no time over a smaller one is left out.
        is_within_budget: whether the choice keeps to it; else it is the least wasteful.
    """

    chosen: Expectation
    by_size: tuple[Expectation, ...]
    is_within_budget: bool


def check_lengths(lengths: Lengths) -> None:
    """Raises ConfigError unless there is a prompt, and all have tokens."""
    if not sum(lengths.values()):
        raise ConfigError("a distribution must hold at least one prompt length, got none")
    if min(lengths) < 1 or min(lengths.values()) < 0:
        raise ConfigError(
            f"prompt lengths must be at least 1, and counts at least 0, got {dict(lengths)}"
        )


def propose(
    curve: CostCurve, lengths: Lengths, goal: Goal, *, candidates: Collection[int]
) -> Proposal:
    """The smallest ladder over `candidates` within the budget.

    Fewest buckets first, as each costs start-up time and memory; among ladders of one size the
    least expected time, then the fewest compile seconds, the fewest bytes, the smaller buckets.
    The largest candidate, which chunks long prompts, is always in.

    This is exact where a chunk is one step, as on a GPU. Where the scheduler cuts steps
    (`split_above`), ladders are judged as the scheduler would run them: the one that would be best
    without cuts, and each that has one bucket more than the best one of the size before.

    Raises:
        ConfigError: no lengths, or a candidate outside the measured range.
    """
    check_lengths(lengths)
    judge = _Judge(curve, lengths, goal.split_above)
    found: list[Expectation] = []
    fitting: int | None = None
    for waste, one in _ever_less_wasteful(judge, goal, candidates):
        found.append(one)
        if fitting is None and waste <= Fraction(goal.budget):
            fitting = len(found) - 1
        if fitting is not None and len(found) > fitting + NUM_BEYOND:
            break
    chosen = found[-1 if fitting is None else fitting]
    return Proposal(chosen=chosen, by_size=tuple(found), is_within_budget=fitting is not None)


def expect(
    curve: CostCurve, lengths: Lengths, buckets: Sequence[int], *, split_above: float = math.inf
) -> Expectation:
    """What any ladder does on a distribution.

    Raises:
        ConfigError: no lengths, or a bucket outside the measured range.
    """
    check_lengths(lengths)
    return _Judge(curve, lengths, split_above).weigh(tuple(sorted(buckets)))[1]


def chunk_lengths(lengths: Lengths, top: int) -> dict[int, int]:
    """Steps by exact length when prompts are chunked by `top` tokens."""
    chunks: Counter[int] = Counter()
    for length, count in lengths.items():
        full, rest = divmod(length, top)
        chunks[top] += full * count
        chunks[rest] += count
    del chunks[0]
    return {length: count for length, count in sorted(chunks.items()) if count}


def _ever_less_wasteful(
    judge: "_Judge", goal: Goal, candidates: Collection[int]
) -> Iterator[tuple[Fraction, Expectation]]:
    """By size the best ladder, as `propose` says; a size that saves nothing is left out."""
    most = goal.max_buckets or len(candidates)
    costs = [judge.curve.cost(one) for one in candidates]
    uncut = best_by_size(costs, chunk_lengths(judge.lengths, max(candidates)), most)
    best: tuple[Fraction, Expectation] | None = None
    for buckets in chain(uncut, repeat(None)):
        options = [] if buckets is None else [buckets]
        if best is not None and judge.is_cut and len(best[1].buckets) < most:
            options += _with_one_more(best[1].buckets, candidates)
        one = min(map(judge.weigh, options), key=_rank, default=None)
        if one is not None and (best is None or one[0] < best[0]):
            best = one
            yield best
        elif buckets is None:
            return


def _with_one_more(buckets: tuple[int, ...], candidates: Collection[int]) -> list[tuple[int, ...]]:
    return [tuple(sorted((*buckets, one))) for one in candidates if one not in buckets]


def _rank(weighed: "tuple[Fraction, Expectation]") -> tuple[Any, ...]:
    """Least time first, then as `propose` says."""
    waste, one = weighed
    return waste, one.compile_s, one.num_bytes, one.buckets


class _Sum(NamedTuple):
    """What a ladder so far costs, compared from the left."""

    time_ns: int
    compile_ns: int
    num_bytes: int
    buckets: tuple[int, ...]

    def plus(self, count: int, cost: BucketCost) -> "_Sum":
        return _Sum(
            self.time_ns + count * cost.time_ns,
            self.compile_ns + round(cost.compile_s * 1e9),
            self.num_bytes + cost.code_bytes,
            (*self.buckets, cost.num_tokens),
        )


def best_by_size(
    candidates: Sequence[BucketCost], chunks: Lengths, max_buckets: int
) -> Iterator[tuple[int, ...]]:
    """The ladder of least time of each size up to `max_buckets`, ending in the largest candidate.

    `best[j]` of a size is the cheapest ladder whose last bucket is candidate j, for the chunks
    that it holds; it extends some `best[i]` of the size below by one bucket, which takes the chunks
    longer than candidate i:

        chunks   | . . . i | . . . . j |
        cost     | best[i] | count * time of j |

    A size that saves nothing over a smaller one is left out.
    """
    ordered = sorted(candidates, key=lambda cost: cost.num_tokens)
    last = len(ordered) - 1
    held = [
        sum(count for length, count in chunks.items() if length <= cost.num_tokens)
        for cost in ordered
    ]
    start = _Sum(0, 0, 0, ())
    best = {j: start.plus(held[j], cost) for j, cost in enumerate(ordered)}
    least = best[last].time_ns
    yield best[last].buckets
    for size in range(2, min(max_buckets, len(ordered)) + 1):
        longer: dict[int, _Sum] = {}
        for j in range(size - 1, len(ordered)):
            time_ns = ordered[j].time_ns
            # What j itself adds is the same for every i, so that the order without it will do.
            ranked = (
                (one.time_ns + (held[j] - held[i]) * time_ns, one.compile_ns, one.num_bytes,
                 one.buckets, i)
                for i, one in best.items() if i < j
            )  # fmt: skip
            i = min(ranked)[-1]
            longer[j] = best[i].plus(held[j] - held[i], ordered[j])
        best = longer
        if best[last].time_ns < least:
            least = best[last].time_ns
            yield best[last].buckets


class _Judge:
    """What ladders do on one distribution."""

    def __init__(self, curve: CostCurve, lengths: Lengths, split_above: float) -> None:
        self.curve = curve
        self.lengths = lengths
        self.is_cut = math.isfinite(split_above)
        self._split_above = split_above
        self._num_requests = sum(lengths.values())
        self._num_tokens = sum(length * count for length, count in lengths.items())
        self._num_pairs = sum(length**2 * count for length, count in lengths.items())
        chunks = chunk_lengths(lengths, curve.largest)
        self._ideal_ns = self._attention_ns(chunks) + sum(
            count * curve.ideal_ns(length) for length, count in chunks.items()
        )

    def weigh(self, buckets: tuple[int, ...]) -> tuple[Fraction, Expectation]:
        """The exact waste, and all numbers."""
        costs = {bucket: self.curve.cost(bucket) for bucket in buckets}
        steps = self._steps(buckets)
        time_ns, padded = self._attention_ns(steps), 0
        for length, count in steps.items():
            bucket = at_least(buckets, length)
            assert bucket is not None  # a step is cut at the largest
            time_ns += count * costs[bucket].time_ns
            padded += count * bucket
        waste = time_ns / self._ideal_ns - 1
        return waste, Expectation(
            buckets=buckets,
            waste=float(waste),
            padding=padded / self._num_tokens - 1,
            ms_per_request=float(time_ns / self._num_requests / 10**6),
            compile_s=sum(cost.compile_s for cost in costs.values()),
            num_bytes=sum(cost.code_bytes for cost in costs.values())
            + max(cost.temp_bytes for cost in costs.values()),
            is_measured=all(cost.is_measured for cost in costs.values()),
        )

    def _attention_ns(self, steps: Lengths) -> Fraction:
        """Of tokens to those of earlier steps: all pairs of a prompt but those within a step."""
        within = sum(length**2 * count for length, count in steps.items())
        return self.curve.pair_ns * (self._num_pairs - within) / 2

    def _steps(self, buckets: tuple[int, ...]) -> Lengths:
        """Steps by exact length when the scheduler has one prompt at a time."""
        limits = SchedulerLimits(
            max_batch_tokens=buckets[-1],
            max_batch_requests=1,
            max_running=1,
            prefill_context=max(self.lengths),
            buckets=buckets,
            split_above=self._split_above,
        )
        steps: Counter[int] = Counter()
        left = Counter(chunk_lengths(self.lengths, buckets[-1]))
        while left:  # tokens that are there to be computed, and how many prompts have so many
            length, count = left.popitem()
            num_tokens = limits.step_tokens(length) if self.is_cut else length
            steps[num_tokens] += count
            if length > num_tokens:
                left[length - num_tokens] += count
        return steps
