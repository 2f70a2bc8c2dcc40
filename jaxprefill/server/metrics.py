"""Prometheus metrics: what the HTTP side saw of requests, and what the engine counted.

One collector and one registry per application; the process has no others. An engine that is not
ready has no numbers of its own: its families are there, without samples.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest

from jaxprefill.server.observer import FinishedRequest, Observer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "jaxprefill_"
_SHORT = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)
_LONG = (*_SHORT[1:], 30.0, 60.0, 120.0, 300.0)
Stats = Mapping[str, Any]


class Metrics(Observer):
    """Counts what it hears; used from one thread."""

    def __init__(self) -> None:
        """Every count is 0."""
        self._histograms = [
            first_token := _Histogram(
                "time_to_first_token_seconds", "From a request's arrival to its first token.", _LONG
            ),
            queue := _Histogram(
                "queue_time_seconds", "A request's wait in the engine for its first step.", _LONG
            ),
            prefill := _Histogram(
                "prefill_time_seconds", "From a request's first step to its first result.", _LONG
            ),
            total := _Histogram(
                "e2e_request_latency_seconds", "From a request's arrival to its end.", _LONG
            ),
            apart := _Histogram(
                "inter_token_latency_seconds", "From one token of a request to its next.", _SHORT
            ),
        ]
        self._first_token, self._queue, self._prefill = first_token, queue, prefill
        self._total, self._apart = total, apart
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._finished: Counter[str] = Counter({reason: 0 for reason in ("stop", "length")})
        self._rejected: Counter[str] = Counter({reason: 0 for reason in ("invalid", "queue_full")})

    def rejected(self, reason: str) -> None:
        """A call was refused."""
        self._rejected[reason] += 1

    def tokens_apart(self, seconds: float) -> None:
        """A sequence got a token, so long after the one before."""
        self._apart.add(seconds)

    def finished(self, record: FinishedRequest) -> None:
        """A sequence has ended."""
        self._finished[record.reason] += 1
        self._prompt_tokens += record.prompt_tokens
        self._cached_tokens += record.cached_tokens
        self._generated_tokens += record.generated_tokens
        self._total.add(record.total_s)
        for histogram, seconds in (
            (self._first_token, record.first_token_s),
            (self._queue, record.queue_s),
            (self._prefill, record.prefill_s),
        ):
            if seconds is not None:
                histogram.add(seconds)

    def exposition(
        self, stats: Stats, *, num_compiled: tuple[int, int], num_restarts: int
    ) -> bytes:
        """All families in Prometheus' text format.

        Args:
            stats: `Engine.stats()`, or nothing while there is no engine to ask.
            num_compiled: executables that are compiled, and all that will be.
            num_restarts: how often the engine was started again.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(
            _Snapshot(
                [
                    *self._own(),
                    _executables(num_compiled),
                    _counter("engine_restarts", "Engines lost and started again.", num_restarts),
                    *_of_engine(stats),
                ]
            )
        )
        return generate_latest(registry)

    def _own(self) -> Iterator[Metric]:
        yield from (histogram.family() for histogram in self._histograms)
        yield _counter("prompt_tokens", "Prompt tokens of ended requests.", self._prompt_tokens)
        yield _counter(
            "cached_tokens",
            "Of these, tokens that the prefix cache spared.",
            self._cached_tokens,
        )
        yield _counter("generation_tokens", "Generated tokens.", self._generated_tokens)
        yield _by_label(
            "requests_finished", "Ended requests by reason; abort: the client's.", self._finished
        )
        yield _by_label("rejected", "Calls that were refused, by reason.", self._rejected)


class _Snapshot:
    """A collector of what is known now."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


class _Histogram:
    """Durations by bucket: a count of each, and their sum."""

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...]) -> None:
        """`bounds` are the buckets' upper ends in seconds; one more takes the rest."""
        self._name, self._help = _PREFIX + name, help_text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def family(self) -> Metric:
        buckets: list[tuple[str, float]] = []
        so_far = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            so_far += count
            buckets.append((str(bound), so_far))
        return HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


def _of_engine(stats: Stats) -> Iterator[Metric]:
    """What only the engine knows."""
    yield _gauge("num_running_requests", "Requests in batches.", stats.get("num_running"))
    yield _gauge("num_waiting_requests", "Requests in the queue.", stats.get("num_waiting"))
    yield from _pages("kv", "the KV pool", stats.get("kv_pages"))
    yield from _pages("recent", "pools of recent tokens", stats.get("recent_pages"))
    yield _passes(stats.get("executables", {}))
    yield _by_label(
        "prefill_fallbacks",
        "Passes that no executable of the ladder took, by reason.",
        stats.get("fallbacks", {}),
    )
    yield _counter(
        "padding_tokens", "Tokens computed in vain to fill shapes.", stats.get("padding_tokens")
    )
    yield _counter(
        "compilations_after_ready",
        "Compilations after the engine was ready; must stay 0.",
        stats.get("compilations_after_ready"),
    )
    yield _gauge(
        "executable_temp_bytes",
        "Largest scratch memory of an executable.",
        stats.get("memory", {}).get("executable_temp_max"),
    )
    yield _counter(
        "corrupted_requests",
        "Requests ended because the model gave values that are not numbers.",
        stats.get("corrupted_requests"),
    )
    yield _counter("preemptions", "Requests that gave their pages back.", stats.get("preemptions"))
    startup = GaugeMetricFamily(f"{_PREFIX}startup_seconds", "Start-up by stage.", labels=["stage"])
    for stage, seconds in stats.get("startup_s", {}).items():
        startup.add_metric([stage], seconds)
    yield startup


def _pages(name: str, pool: str, pages: Mapping[str, int] | None) -> Iterator[Metric]:
    known = pages or {}
    used = known["total"] - known["free"] if known else None
    yield _gauge(f"{name}_pages_used", f"Pages of {pool} that running requests hold.", used)
    cached = known.get("cached")
    yield _gauge(f"{name}_pages_cached", f"Free pages of {pool} that keep a prefix.", cached)
    yield _gauge(f"{name}_pages_total", f"Pages of {pool}.", known.get("total"))


def _passes(executables: Mapping[str, int]) -> Metric:
    """Prefill passes; the names read "full 64x16x8192": path, tokens, slots, context."""
    family = CounterMetricFamily(
        f"{_PREFIX}prefill_passes",
        "Prefill passes by path and shape.",
        labels=["path", "num_tokens", "max_context"],
    )
    for name, count in executables.items():
        path, _, shape = name.partition(" ")
        if path != "decode":
            num_tokens, _, max_context = shape.split("x")
            family.add_metric([path, num_tokens, max_context], count)
    return family


def _executables(num_compiled: tuple[int, int]) -> Metric:
    done, planned = num_compiled
    family = GaugeMetricFamily(f"{_PREFIX}executables", "Executables by state.", labels=["state"])
    family.add_metric(["compiled"], done)
    family.add_metric(["pending"], planned - done)
    return family


def _gauge(name: str, help_text: str, value: float | None) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, help_text, value=value)


def _counter(name: str, help_text: str, value: float | None) -> Metric:
    return CounterMetricFamily(_PREFIX + name, help_text, value=value)


def _by_label(name: str, help_text: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, help_text, labels=["reason"])
    for reason, count in counts.items():
        family.add_metric([str(reason)], count)
    return family
