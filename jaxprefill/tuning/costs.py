"""What a prefill of each bucket costs, as measured, and what it would cost at any other length.

Plain numbers; imports no jax. Times are whole nanoseconds, so that sums are exact whatever their
order, and equal ladders compare equal.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from jaxprefill.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """One bucket: a full step in it, and what having it costs.

    Attributes:
        num_tokens: the bucket.
        time_ns: the least of a few steps, from a batch on the host to its hidden rows.
        compile_s: seconds of one thread to lower and compile it, at all its max contexts.
        code_bytes: what its executables hold for good.
        temp_bytes: its temporaries while it runs.
        is_measured: False where the numbers are interpolated between measured neighbours.
    """

    num_tokens: int
    time_ns: int
    compile_s: float
    code_bytes: int
    temp_bytes: int
    is_measured: bool = True

    def __post_init__(self) -> None:
        least = min(self.compile_s, self.code_bytes, self.temp_bytes)
        if self.num_tokens < 1 or self.time_ns < 1 or not least >= 0:
            raise ConfigError(
                f"the cost of a bucket needs tokens and time of at least 1, and nothing negative, "
                f"got {self}"
            )


class CostCurve:
    """Measured buckets in order, and a straight line between neighbours.

    Measured times need not rise with the tokens: 96 may take longer than 128. A bucket keeps its
    own time, while the ideal time of a length is read from the least time of all buckets that
    hold it, which never falls:

        tokens        64   96  128
        bucket's     600  900  700
        ideal        600  700  700    who has 128 needs no 96
    """

    def __init__(self, costs: Iterable[BucketCost], *, pair_ns: Fraction = Fraction(0)) -> None:
        """Sorts them.

        Args:
            costs: in any order, each of a step that begins its prompt.
            pair_ns: what a later step pays for each pair of its tokens and those before it.

        Raises:
            ConfigError: there is none, or one bucket twice.
        """
        self.costs = tuple(sorted(costs, key=lambda cost: cost.num_tokens))
        self.pair_ns = pair_ns
        self._tokens = tuple(cost.num_tokens for cost in self.costs)
        if not self._tokens or len(set(self._tokens)) < len(self._tokens):
            raise ConfigError(f"each bucket must be measured once, got {self._tokens}")
        least = accumulate((cost.time_ns for cost in reversed(self.costs)), min)
        self._least_ns = tuple(least)[::-1]

    @property
    def largest(self) -> int:
        """The largest bucket, in tokens."""
        return self._tokens[-1]

    def cost(self, num_tokens: int) -> BucketCost:
        """What a bucket costs; one below all measured ones costs what the smallest does.

        Raises:
            ConfigError: it is above all measured ones.
        """
        at = self._find(num_tokens)
        if self._tokens[at] == num_tokens:
            return self.costs[at]

        above = self.costs[at]
        below = self.costs[max(at - 1, 0)]

        def value(of: Callable[[BucketCost], float]) -> Fraction:
            return self._between(at, num_tokens, Fraction(of(below)), Fraction(of(above)))

        return BucketCost(
            num_tokens=num_tokens,
            time_ns=math.ceil(value(lambda cost: cost.time_ns)),
            compile_s=float(value(lambda cost: cost.compile_s)),
            code_bytes=int(value(lambda cost: cost.code_bytes)),
            temp_bytes=int(value(lambda cost: cost.temp_bytes)),
            is_measured=False,
        )

    def ideal_ns(self, num_tokens: int) -> Fraction:
        """The time of a step of exactly so many tokens, were there a bucket for them.

        Raises:
            ConfigError: more tokens than the largest bucket holds.
        """
        at = self._find(num_tokens)
        below, above = self._least_ns[max(at - 1, 0)], self._least_ns[at]
        return self._between(at, num_tokens, Fraction(below), Fraction(above))

    def _find(self, num_tokens: int) -> int:
        at = bisect_left(self._tokens, num_tokens)
        if num_tokens < 1 or at == len(self._tokens):
            raise ConfigError(
                f"costs are known for 1 to {self.largest} tokens, not for {num_tokens}; "
                "measure a larger bucket"
            )
        return at

    def _between(self, at: int, num_tokens: int, below: Fraction, above: Fraction) -> Fraction:
        """The line through the values of the neighbours `at - 1` and `at`."""
        if at == 0:
            return above
        low, high = self._tokens[at - 1], self._tokens[at]
        return above - Fraction(high - num_tokens, high - low) * (above - below)
