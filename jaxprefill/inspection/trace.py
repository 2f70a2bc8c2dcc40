"""What a profile says of a device: busy, gaps, and the kernels that take longest."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Event(NamedTuple):
    """A kernel's run, in nanoseconds of the profiler's clock."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """All runs of the kernels of one name."""

    name: str
    count: int
    total_s: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Several calls in a row.

    Attributes:
        span_s: from the first kernel's begin to the last one's end.
        busy_s: of that, while some kernel ran; kernels may overlap.
        num_gaps, longest_gap_s: stretches in which none ran.
        kernels: the longest in sum first.
    """

    num_calls: int
    span_s: float
    busy_s: float
    num_gaps: int
    longest_gap_s: float
    kernels: tuple[KernelTime, ...]

    @property
    def gap_s(self) -> float:
        """All gaps together."""
        return self.span_s - self.busy_s

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"gap_s": self.gap_s}


def summarise_trace(events: Sequence[Event], num_calls: int) -> Trace:
    """Busy time, gaps and kernels of at least one event."""
    ordered = sorted(events, key=lambda event: event.begin)
    busy, gaps, until = 0.0, list[float](), ordered[0].begin
    for event in ordered:
        if event.begin > until:
            gaps.append(event.begin - until)
        busy += max(event.end - max(event.begin, until), 0.0)
        until = max(until, event.end)
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event.name, []).append(event.end - event.begin)
    kernels = [
        KernelTime(name=name, count=len(each), total_s=sum(each) / 1e9)
        for name, each in times.items()
    ]
    return Trace(
        num_calls=num_calls,
        span_s=(until - ordered[0].begin) / 1e9,
        busy_s=busy / 1e9,
        num_gaps=len(gaps),
        longest_gap_s=max(gaps, default=0.0) / 1e9,
        kernels=tuple(sorted(kernels, key=lambda each: -each.total_s)),
    )
