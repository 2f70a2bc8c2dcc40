"""Replays a file of request lengths through the scheduler, with a cost model for a device.

Pure Python, no jax: policies can be compared in seconds, before any accelerator is at hand.

    python -m benchmarks.scheduler_sim lengths.csv
    python -m benchmarks.scheduler_sim --synthetic 2000 --rate 40 --buckets default upstream 64,1024
    jaxprefill tune --lengths lengths.csv --json > tuned.json
    python -m benchmarks.scheduler_sim lengths.csv --buckets default tuned.json --costs tuned.json

A length file has the columns arrival_s, prompt_tokens, output_tokens and, if wanted, shared_tokens
(how many of the prompt's first tokens all requests have in common). A step costs
`max(floor, tokens * per-token)`: reading the weights, or arithmetic, whichever takes longer; or
what `jaxprefill tune` measured, for decode steps too.
"""

import argparse
import csv
import json
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from jaxprefill.batch import Batch
from jaxprefill.cache.pages import PageAllocator
from jaxprefill.cache.prefix import PrefixCache
from jaxprefill.integers import parse_count, parse_counts
from jaxprefill.prefill.buckets import (
    GPU_BUCKETS,
    BucketLadder,
    cut_ladder,
    slot_buckets,
    upstream_buckets,
)
from jaxprefill.prefill.policy import PrefillPolicy, Use, decide
from jaxprefill.request import Request, SamplingParams
from jaxprefill.scheduler import RequestState, Scheduler, SchedulerLimits, Status
from jaxprefill.tuning.costs import BucketCost, CostCurve

PAGE_SIZE = 16


@dataclass(frozen=True)
class Job:
    """One line of a length file; times in seconds, lengths in tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0

    def prompt(self, index: int) -> tuple[int, ...]:
        """Token ids: the common beginning, then ids of this request alone."""
        shared = min(self.shared_tokens, self.prompt_tokens)
        own = (index % 50000 + 1,) * (self.prompt_tokens - shared)
        return (0,) * shared + own


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a step costs."""

    floor_s: float
    token_s: float
    curve: CostCurve | None = None

    def step_s(self, num_tokens: int) -> float:
        if self.curve is not None and num_tokens <= self.curve.largest:
            return self.curve.cost(num_tokens).time_ns / 1e9
        return max(self.floor_s, num_tokens * self.token_s)


@dataclass
class Result:
    """What a replay found. Tokens, and seconds of simulated time."""

    real_tokens: int = 0
    padded_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    duration_s: float = 0.0
    passes: Counter[str] = field(default_factory=Counter)
    queue_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


def replay(
    jobs: list[Job],
    ladder: BucketLadder,
    device: Device,
    *,
    max_running: int,
    num_pages: int,
    shares: bool,
) -> Result:
    """Runs all jobs; results of a step are known when the next one has been dispatched."""
    cache = PrefixCache(PageAllocator(num_pages, PAGE_SIZE), is_enabled=shares)
    limits = SchedulerLimits(
        max_batch_tokens=ladder.buckets[-1],
        max_batch_requests=ladder.num_slots,
        max_running=max_running,
        prefill_context=ladder.max_contexts[-1],
        buckets=ladder.buckets,
    )
    scheduler, policy, result = Scheduler(limits, cache), PrefillPolicy(ladder=ladder), Result()
    waiting = sorted(enumerate(jobs), key=lambda pair: pair[1].arrival_s)
    open_states: dict[str, RequestState] = {}
    first_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    unread: list[tuple[RequestState, bool]] = []
    now = 0.0
    while waiting or open_states:
        while waiting and waiting[0][1].arrival_s <= now:
            index, job = waiting.pop(0)
            request = Request(
                id=str(index),
                prompt_ids=job.prompt(index),
                params=SamplingParams(max_tokens=job.output_tokens),
                seed=0,
            )
            open_states[request.id] = RequestState(request, max_tokens=job.output_tokens)
            scheduler.add(open_states[request.id])
        batch = scheduler.next_batch()
        if batch is None and not unread:
            now = max(now, waiting[0][1].arrival_s)
            continue
        dispatched = []
        if batch is not None:
            for row in batch.rows:
                if row.request_id not in first_s:
                    first_s[row.request_id] = now
                    result.queue_s.append(now - jobs[int(row.request_id)].arrival_s)
                dispatched.append((open_states[row.request_id], row.sample is not None))
            now += device.step_s(count_pass(result, batch, policy, max_running))
        read(unread, scheduler, open_states)
        for state, is_sampled in dispatched:
            if is_sampled:
                name = state.request.id
                known = result.gaps_s if name in last_s else result.ttft_s
                known.append(now - last_s.get(name, jobs[int(name)].arrival_s))
                last_s[name] = now
        unread = dispatched
    result.duration_s, result.preemptions = now, scheduler.num_preemptions
    result.cached_tokens = scheduler.num_cached_tokens
    return result


def count_pass(result: Result, batch: Batch, policy: PrefillPolicy, max_running: int) -> int:
    """Counts one step; returns its padded tokens."""
    padded, path = 0, "decode"
    if batch.is_decode:
        slots = slot_buckets(max_running, smallest=1, factor=4)
        padded = next(size for size in slots if size >= len(batch.rows))
    if not batch.is_decode:
        decision = decide(
            policy,
            num_tokens=batch.num_tokens,
            num_requests=len(batch.rows),
            max_context=batch.max_context,
        )
        is_used = isinstance(decision, Use)
        padded = decision.key.num_tokens if is_used else policy.ladder.buckets[-1]
        path = f"full {padded}" if is_used else f"eager ({decision.reason})"
    result.passes[path] += 1
    result.real_tokens += batch.num_tokens
    result.padded_tokens += padded
    return padded


def read(
    unread: list[tuple[RequestState, bool]],
    scheduler: Scheduler,
    open_states: dict[str, RequestState],
) -> None:
    """The last step's results reach the host."""
    for state, is_sampled in unread:
        state.num_in_flight -= 1
        if is_sampled:
            state.output_ids.append(1)
        if state.is_complete and state.status is not Status.FINISHED:
            scheduler.finish(state)
            del open_states[state.request.id]


def read_jobs(path: Path) -> list[Job]:
    """The lines of a length file."""
    with path.open(newline="") as file:
        return [
            Job(
                float(line["arrival_s"]),
                int(line["prompt_tokens"]),
                int(line["output_tokens"]),
                int(line.get("shared_tokens") or 0),
            )
            for line in csv.DictReader(file)
        ]


def read_costs(path: Path) -> CostCurve:
    """The costs that `jaxprefill tune --json` measured."""
    return CostCurve(BucketCost(**cost) for cost in json.loads(path.read_text())["measured"])


def synthetic_jobs(count: int, rate: float, seed: int) -> list[Job]:
    """Poisson arrivals; mostly short prompts, some long ones, as scoring and chat traffic has."""
    rng, now, jobs = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt = min(int(rng.lognormvariate(5, 1.2)) + 1, 6000)
        jobs.append(Job(now, prompt, rng.choice((0, 1, 1, 16, 64)), rng.choice((0, 0, 128))))
    return jobs


def ladder_of(name: str, *, slots: int, context: int) -> BucketLadder:
    """A named ladder, a list of token counts, or what `jaxprefill tune --json` wrote."""
    if name.endswith(".json"):
        buckets = tuple(json.loads(Path(name).read_text())["buckets"])
    elif name == "default":
        buckets = GPU_BUCKETS
    elif name == "upstream":
        buckets = upstream_buckets(8192)
    else:
        buckets = parse_counts("buckets", name)
    return BucketLadder(cut_ladder(buckets, max(buckets)), slots, (context,))


def table(name: str, result: Result) -> list[str]:
    """One configuration's lines."""

    def spread(values: list[float]) -> str:
        if not values:
            return "none"
        cuts = statistics.quantiles(values, n=100) if len(values) > 1 else values * 99
        return f"p50 {cuts[49] * 1e3:.1f}  p90 {cuts[89] * 1e3:.1f}  p99 {cuts[98] * 1e3:.1f} ms"

    share = 1 - result.real_tokens / max(result.padded_tokens, 1)
    passes = ", ".join(f"{path}: {count}" for path, count in sorted(result.passes.items()))
    return [
        f"== {name}",
        f"tokens {result.real_tokens}, padding share {share:.1%}, cached {result.cached_tokens}, "
        f"preemptions {result.preemptions}, simulated {result.duration_s:.1f} s",
        f"queue time   {spread(result.queue_s)}",
        f"first token  {spread(result.ttft_s)}",
        f"between      {spread(result.gaps_s)}",
        f"passes       {passes}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lengths", nargs="?", type=Path, help="CSV of request lengths")
    parser.add_argument("--synthetic", type=int, default=1000, metavar="N", help="without a file")
    parser.add_argument("--rate", type=float, default=50.0, help="synthetic requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--buckets", nargs="+", default=["default"], metavar="LADDER")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--context", default="32K")
    parser.add_argument("--kv-cache-tokens", default="512K")
    parser.add_argument("--floor-ms", type=float, default=5.0)
    parser.add_argument("--token-us", type=float, default=25.0)
    parser.add_argument("--costs", type=Path, help="measured by `jaxprefill tune --json`")
    parser.add_argument("--no-prefix-cache", action="store_true")
    args = parser.parse_args()
    jobs = (
        read_jobs(args.lengths)
        if args.lengths
        else synthetic_jobs(args.synthetic, args.rate, args.seed)
    )
    curve = read_costs(args.costs) if args.costs else None
    for name in args.buckets:
        result = replay(
            jobs,
            ladder_of(name, slots=args.slots, context=parse_count("context", args.context)),
            Device(floor_s=args.floor_ms / 1e3, token_s=args.token_us / 1e6, curve=curve),
            max_running=args.max_running,
            num_pages=parse_count("kv_cache_tokens", args.kv_cache_tokens) // PAGE_SIZE,
            shares=not args.no_prefix_cache,
        )
        print("\n".join(table(name, result)))


if __name__ == "__main__":
    main()
