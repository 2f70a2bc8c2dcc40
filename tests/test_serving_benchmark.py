"""The load generator itself, against a fake engine behind a real socket."""

import asyncio
from itertools import pairwise

import pytest

from benchmarks.load import Sample, arrivals, percentiles, summary
from benchmarks.serving import KINDS, limit, overload, parse, rates
from jaxprefill.errors import EngineUnavailable
from tests.fake_engine import FakeEngine
from tests.live import live

SHORT = ["--prompt-tokens=5", "--max-tokens=2", "--vocab=200", "--items=3", "--query-tokens=2"]


def test_arrivals_are_poissons_and_the_same_every_time():
    found = list(arrivals(50, 100, seed=1))
    assert found == list(arrivals(50, 100, seed=1)) and 4700 < len(found) < 5300
    gaps = [b - a for a, b in pairwise(found)]
    mean = sum(gaps) / len(gaps)
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert 0.9 < spread / mean**2 < 1.1, "an exponential's variance is its mean squared"


def test_the_summary_counts_what_is_good_and_what_is_refused():
    samples = [Sample(200, 0.1, 0.2, 4), Sample(200, 0.1, 3.0, 4), Sample(429, retry_after="1")]
    samples += [Sample(503), Sample()]
    found = summary(samples, elapsed_s=2, max_first_s=1, max_total_s=1)
    assert found["statuses"] == {"0": 1, "200": 2, "429": 1, "503": 1}
    assert (found["throughput_per_s"], found["goodput_per_s"], found["items_per_s"]) == (1, 0.5, 4)
    assert (found["rejected"], found["rejected_without_retry_after"]) == (2, 1)
    assert found["e2e_ms"] == {"p50": 200, "p90": 3000, "p99": 3000}
    assert percentiles([0.001 * n for n in range(1, 101)]) == {"p50": 50, "p90": 90, "p99": 99}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_load_is_answered(kind):
    with live(FakeEngine(), api_key=("key",)) as url:
        given = ["rates", f"--url={url}", "--api-key=key", f"--kind={kind}", "--rate", "60"]
        found = asyncio.run(rates(parse([*given, "--duration=0.3", *SHORT])))
    (row,) = found["rows"]
    assert row["statuses"] == {"200": row["sent"]} and row["sent"] > 3
    assert row["items_per_s"] >= row["throughput_per_s"] > 0


def test_the_highest_rate_within_a_limit_is_found_and_no_request_is_sent_twice():
    class Tiring(FakeEngine):
        def submit(self, requests):
            if len(self.requests) > 60:
                raise EngineUnavailable("enough")
            return super().submit(requests)

    engine = Tiring()
    with live(engine) as url:
        given = ["limit", f"--url={url}", "--kind=score", "--rate", "80", "--duration=0.1", *SHORT]
        found = asyncio.run(limit(parse(given)))
    (best,) = found["best"]
    assert best["statuses"] == {"200": best["sent"]} and best["rate"] >= 80
    over = min(row["rate"] for row in found["rows"] if row["statuses"].keys() - {"200"})
    assert best["rate"] < over < 1.1 * best["rate"]
    prompts = [request.prompt_ids for request in engine.requests]
    assert len(set(prompts)) == len(prompts)


def test_no_rate_is_found_where_the_first_is_too_slow():
    with live(FakeEngine()) as url:
        given = ["limit", f"--url={url}", "--rate", "80", "--max-e2e-ms=0.001", "--duration=0.1"]
        found = asyncio.run(limit(parse([*given, *SHORT])))
    assert found["best"] == [] and len(found["rows"]) > 3


def test_too_much_load_is_refused_with_a_time_to_come_again():
    with live(FakeEngine(), max_queued_requests=0) as url:
        given = ["overload", f"--url={url}", "--duration=0.5", "--concurrency=4", *SHORT]
        found = asyncio.run(overload(parse([*given, "--max-tokens=100"])))
    assert set(found["statuses"]) <= {"200", "429"} and found["rejected_without_retry_after"] == 0
    assert found["rate"] == pytest.approx(2 * found["sustained_per_s"], rel=0.01)
    assert found["health_ms"]["max"] > 0 and found["after"]["kv_pages_used"] == 10
