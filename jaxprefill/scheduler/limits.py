"""The sizes that a batch must keep to."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What the executables hold; the scheduler forms no batch beyond it when splitting would do.

    Attributes:
        max_batch_tokens: tokens of a prefill or mixed step.
        max_batch_requests: request slots of a prefill executable.
        max_running: requests that hold a slot at once.
        prefill_context: longest context a prefill executable takes; longer rows go together.
        buckets: token counts of the prefill executables, ascending.
        split_above: where padding a step up would exceed this factor, the step is cut down to
            the bucket below and the rest follows. Pays where time grows with tokens (a CPU), not
            where a small step costs the same as a tiny one (a GPU); at most the factor above which
            such a step would fall back.
    """

    max_batch_tokens: int
    max_batch_requests: int
    max_running: int
    prefill_context: int
    buckets: tuple[int, ...] = ()
    split_above: float = math.inf

    def step_tokens(self, wanted: int) -> int:
        """Tokens to compute in a step when this many are there to be computed."""
        wanted = min(wanted, self.max_batch_tokens)
        above = [bucket for bucket in self.buckets if bucket >= wanted]
        below = [bucket for bucket in self.buckets if bucket <= wanted]
        if above and below and above[0] / wanted > self.split_above:
            return below[-1]
        return wanted
