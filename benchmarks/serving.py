"""Load on any server that speaks OpenAI's API: Poisson arrivals at stated rates.

    python -m benchmarks.serving rates --url URL --rate 2 4 8 [--kind score --items 10]
    python -m benchmarks.serving limit --url URL --kind score --prompt-tokens 300 --max-e2e-ms 500
    python -m benchmarks.serving overload --url URL --duration 120 [--pid PID]
    python -m benchmarks.serving front [--model demo]

`rates`: time to the first token and to the end, throughput, goodput (answers within --max-ttft-ms
and --max-e2e-ms), rejections, items a second. `limit`: the highest rate at which the p99 of the end
keeps to --max-e2e-ms and nothing is refused, from the first --rate on. `overload`: first what the
server sustains, then twice as much, with /health asked every 100 ms (by a process of its own, which
`health` is); pages and memory before and after. `front`: 16-token scoring requests, 64 at a time
over HTTP, beside the same prompts in one call of the engine.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.load import (
    Connections,
    Query,
    Sample,
    arrivals,
    closed_loop,
    open_loop,
    percentiles,
    summary,
)

KINDS = ("completions", "chat", "scoring", "score")
FRONT_TOKENS, FRONT_CONCURRENCY = 16, 64
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def make_query(args: argparse.Namespace, index: int) -> Query:
    """The request of that number, the same every time; no two begin alike unless asked to."""
    source = random.Random(f"{args.seed}-{index}")
    known = range(5, args.vocab)
    ids = source.choices(known, k=args.prompt_tokens)
    common: dict[str, Any] = {"model": args.model} if args.model else {}
    asked = {"max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    if args.kind == "completions":
        return Query("/v1/completions", common | asked | {"prompt": ids})
    if args.kind == "chat":
        text = " ".join(source.choices(_WORDS, k=args.prompt_tokens))
        messages = [{"role": "user", "content": text}]
        return Query("/v1/chat/completions", common | asked | {"messages": messages})
    if args.kind == "scoring":
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        return Query("/v1/completions", common | body)
    items = [source.choices(known, k=args.prompt_tokens) for _ in range(args.items)]
    query = random.Random(args.seed).choices(known, k=args.query_tokens)
    body = {"query": query, "items": items, "label_token_ids": [5, 6], "apply_softmax": True}
    return Query("/v1/score", common | body, num_items=args.items)


async def rates(args: argparse.Namespace) -> dict[str, Any]:
    """One row for each rate."""
    rows: list[dict[str, Any]] = []
    with closing(Connections(args.url, key=args.api_key)) as connections:
        for rate in args.rate:
            rows.append(await _at_rate(connections, args, rate, _num_sent(rows)))
            print(json.dumps(rows[-1]), flush=True)
    return {"kind": args.kind, "rows": rows}


async def limit(args: argparse.Namespace) -> dict[str, Any]:
    """Half as much again until the limit breaks, then halves of the gap."""
    rows: list[dict[str, Any]] = []
    held, broken, rate = 0.0, 0.0, args.rate[0]
    with closing(Connections(args.url, key=args.api_key)) as connections:
        while not broken or (broken > 1.06 * held and broken > args.rate[0] / 8):
            rows.append(await _at_rate(connections, args, rate, _num_sent(rows)))
            print(json.dumps(rows[-1]), flush=True)
            if _holds(args, rows[-1]):
                held = rate
            else:
                broken = rate
            rate = (held + broken) / 2 if broken else 1.5 * rate
    best = [row for row in rows if row["rate"] == round(held, 2)]
    return {"kind": args.kind, "max_e2e_ms": args.max_e2e_ms, "best": best, "rows": rows}


def _holds(args: argparse.Namespace, row: dict[str, Any]) -> bool:
    is_whole = set(row["statuses"]) == {"200"}
    return is_whole and row["e2e_ms"]["p99"] <= args.max_e2e_ms


def _num_sent(rows: list[dict[str, Any]]) -> int:
    return sum(row["sent"] for row in rows)


async def _at_rate(
    connections: Connections, args: argparse.Namespace, rate: float, first: int = 0
) -> dict[str, Any]:
    """What comes of Poisson arrivals; requests are numbered from `first`, so none comes twice."""
    count = sum(1 for _ in arrivals(rate, args.duration, args.seed))
    queries = [make_query(args, first + index) for index in range(count)]
    began = time.perf_counter()

    async def send(index: int, due: float) -> Sample:
        return await connections.send(queries[index], due)

    samples = await open_loop(send, rate=rate, duration_s=args.duration, seed=args.seed)
    return {"rate": round(rate, 2)} | summary(
        samples,
        elapsed_s=time.perf_counter() - began,
        max_first_s=args.max_ttft_ms / 1000,
        max_total_s=args.max_e2e_ms / 1000,
    )


async def overload(args: argparse.Namespace) -> dict[str, Any]:
    """Twice what the server sustains, and whether it is as before afterwards."""
    connections, watch = (Connections(args.url, key=args.api_key) for _ in range(2))
    command = [sys.executable, "-m", "benchmarks.serving", "health", "--url", args.url]

    async def send(index: int, due: float) -> Sample:
        return await connections.send(make_query(args, 10**6 + index), due)

    warm_s = max(min(args.duration / 6, 15.0), 1.0)
    found = await closed_loop(send, concurrency=args.concurrency, duration_s=warm_s)
    sustained = sum(sample.status == 200 for sample in found) / warm_s
    before = await _state(watch, args.pid)
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert watching.stdout
    try:
        waits = [float(watching.stdout.readline())]
        row = await _at_rate(connections, args, 2 * sustained)
    finally:
        watching.terminate()
        printed, _ = watching.communicate()
    waits += map(float, printed.split())
    await asyncio.sleep(1.0)
    after = await _state(watch, args.pid)
    connections.close()
    watch.close()
    return {
        "sustained_per_s": round(sustained, 2),
        **row,
        "health_ms": percentiles(waits) | {"max": round(1000 * max(waits), 2)},
        "before": before,
        "after": after,
    }


async def health(args: argparse.Namespace) -> None:
    """Prints the seconds that /health took, ten times a second until ended; `inf`: a failure.

    In the process that makes the load, the wait for its own turn would count.
    """
    with closing(Connections(args.url)) as connections:
        while True:
            sample = await connections.send(Query("/health", {}))
            print(sample.total_s if sample.status == 200 else "inf", flush=True)
            await asyncio.sleep(0.1)


async def _state(watch: Connections, pid: int | None) -> dict[str, Any]:
    """Pages in use, running requests, compilations; resident memory of a local server."""
    text = (await watch.send(Query("/metrics", {}))).body.decode()
    names = ("kv_pages_used", "num_running_requests", "compilations_after_ready_total")
    found: dict[str, Any] = {}
    for name in names:
        value = re.search(rf"^jaxprefill_{name} (\S+)$", text, re.MULTILINE)
        found[name] = float(value[1]) if value else None
    if pid is not None:
        found["resident_mib"] = resident_mib(pid)
    return found


def resident_mib(pid: int) -> int:
    """Of a process and all below it."""
    status = Path(f"/proc/{pid}/status").read_text()
    size = re.search(r"VmRSS:\s+(\d+) kB", status)
    children = Path(f"/proc/{pid}/task").glob("*/children")
    below = [int(child) for path in children for child in path.read_text().split()]
    return (int(size[1]) // 1024 if size else 0) + sum(map(resident_mib, below))


async def front(args: argparse.Namespace) -> dict[str, Any]:
    """How much longer than the engine alone the server takes; rounds take turns."""
    command = [sys.executable, "-m", "jaxprefill", "serve", "--model", args.model or "demo"]
    server = subprocess.Popen([*command, "--port=0", "--quiet"], stderr=subprocess.PIPE, text=True)
    engine = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving", "engine", "--model", args.model or "demo"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stderr and engine.stdin and engine.stdout
    ready = re.search(r"http://\S+", server.stderr.readline())
    assert ready and engine.stdout.readline(), "both must start"
    over_http: list[float] = []
    alone: list[float] = []
    for index in range(args.rounds + 1):  # the first is a warm-up
        seconds = await _front_round(args, ready[0], index)
        engine.stdin.write(f"{args.requests} {index}\n")
        engine.stdin.flush()
        pair = (seconds, float(engine.stdout.readline()))
        if index:
            over_http.append(pair[0])
            alone.append(pair[1])
            print(f"round {index}: http {pair[0]:.2f} s, engine {pair[1]:.2f} s", flush=True)
    engine.stdin.close()
    server.terminate()
    engine.wait()
    server.wait()
    ratios = [http / engine for http, engine in zip(over_http, alone, strict=True)]
    return {
        "requests": args.requests,
        "concurrency": FRONT_CONCURRENCY,
        "prompt_tokens": FRONT_TOKENS,
        "http_s": [round(value, 3) for value in over_http],
        "engine_s": [round(value, 3) for value in alone],
        "added": round(statistics.median(ratios) - 1, 3),
        "load_average": os.getloadavg(),
    }


async def _front_round(args: argparse.Namespace, url: str, index: int) -> float:
    connections = Connections(url)
    prompts = iter(front_prompts(args.requests, index))
    body = {"max_tokens": 0, "temperature": 0, "logprobs": 0, "echo": True}
    began = time.perf_counter()

    async def worker() -> None:
        for prompt in prompts:
            sample = await connections.send(Query("/v1/completions", body | {"prompt": prompt}))
            assert sample.status == 200, sample.body

    await asyncio.gather(*(worker() for _ in range(FRONT_CONCURRENCY)))
    connections.close()
    return time.perf_counter() - began


def front_prompts(count: int, index: int) -> list[list[int]]:
    """Random ids: no prefix is shared, within a round or between rounds."""
    source = random.Random(index)
    return [[source.randrange(5, 40000) for _ in range(FRONT_TOKENS)] for _ in range(count)]


def engine(args: argparse.Namespace) -> None:
    """The engine of `front`: a line on stdin names a round, the answer is its seconds."""
    from jaxprefill import Engine

    with Engine(model=args.model) as made:
        print("ready", flush=True)
        for line in sys.stdin:
            count, index = map(int, line.split())
            prompts = front_prompts(count, index)
            began = time.perf_counter()
            made.logprobs(prompts)
            print(time.perf_counter() - began, flush=True)


MODES = {"rates": rates, "limit": limit, "overload": overload, "front": front, "health": health}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Modes and options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("mode", choices=(*MODES, "engine"))
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="its name; default: the server's only one")
    parser.add_argument("--api-key")
    parser.add_argument("--kind", choices=KINDS, default="completions")
    parser.add_argument("--rate", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--duration", type=float, default=20.0, help="seconds at each rate")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="or words, of a chat")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--items", type=int, default=10, help="of a /v1/score request")
    parser.add_argument("--query-tokens", type=int, default=32, help="that all items share")
    parser.add_argument("--vocab", type=int, default=1000, help="ids are drawn below it")
    parser.add_argument("--concurrency", type=int, default=32, help="to find what is sustained")
    parser.add_argument("--max-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--max-e2e-ms", type=float, default=10000.0)
    parser.add_argument("--pid", type=int, help="of a local server, whose memory is shown")
    parser.add_argument("--requests", type=int, default=512, help="of a round of `front`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the result there too, as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    if args.mode == "engine":
        engine(args)
        return
    found = asyncio.run(MODES[args.mode](args))
    print(json.dumps(found, indent=2))
    if args.output:
        args.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
