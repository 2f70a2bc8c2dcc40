"""Scoring many items after one query, with and without shared prefixes, in alternating rounds.

    python -m benchmarks.prefix_sharing [--json OUT.json]

The cache is flushed before every call: what is measured is sharing within the call alone.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.meta import describe_run
from jaxprefill import Engine

LABELS = [504, 314]


def call(engine: Engine, query: list[int], items: list[list[int]]) -> tuple[float, int]:
    """(seconds, tokens computed) of one scoring call with an empty cache."""
    engine.flush_cache()
    before, began = engine.stats()["real_tokens"], time.perf_counter()
    engine.score(query, items, LABELS)
    return time.perf_counter() - began, engine.stats()["real_tokens"] - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--query-tokens", type=int, default=500)
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--item-tokens", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    query = rng.integers(5, 40000, args.query_tokens).tolist()
    items = [rng.integers(5, 40000, args.item_tokens).tolist() for _ in range(args.items)]
    rows = []
    with Engine(args.model) as sharing, Engine(args.model, prefix_cache=False) as plain:
        engines = {"shared": sharing, "not shared": plain}
        found = {name: [] for name in engines}
        for _ in range(args.rounds):
            for name, engine in engines.items():
                found[name].append(call(engine, query, items))
    for name, calls in found.items():
        seconds = [one for one, _ in calls]
        rows.append(
            {
                "prefixes": name,
                "median_s": round(statistics.median(seconds), 3),
                "min_s": round(min(seconds), 3),
                "tokens_computed": calls[-1][1],
                "items_per_s": round(args.items / statistics.median(seconds), 1),
            }
        )
        print(rows[-1], flush=True)
    ratio = rows[1]["median_s"] / rows[0]["median_s"]
    print(f"sharing is {ratio:.1f} times faster")
    meta = describe_run("benchmarks.prefix_sharing") | {"ratio": round(ratio, 2)}
    if args.json:
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
