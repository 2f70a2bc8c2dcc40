"""Latency of prefill and decode steps: body + greedy head, host metadata included.

    python -m benchmarks.prefill_latency --shape qwen3-8b      on a GPU, torch's peer beside it
    python -m benchmarks.prefill_latency --part 1/2            half of the cases; then
    python -m benchmarks.prefill_latency --part 2/2 --append   the others, into the same file
    python -m benchmarks.prefill_latency --tiny                on a CPU, in seconds

A case is tokens x requests + cached prefix ("30x1+4096"), or d + slots + prefix for a decode step
("d16+512"). Results go to one JSON file and, with the extra `bench`, a plot; a table to the
terminal. Milliseconds of a row, medians:

    wall      from the batch on the host to the device's last write
    value     to the tokens on the host
    busy      of steps in a row: what the device needs where that is more than the host
    dispatch  the host's time until the body is launched, after a wait; `hot` of steps in a row
    floor     weights and cached keys at the rate of a read-only stream, or the products of body
              and attention at the card's rate: the longer
"""

import argparse
import collections
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case
from benchmarks.graphs import GraphLog
from benchmarks.report import add_run, plot, print_table

if TYPE_CHECKING:
    from benchmarks.rig import Rig, RigSizes
    from jaxprefill.batch import Batch
    from jaxprefill.prefill.buckets import ShapeKey

SHAPES = ("qwen3-8b", "qwen3-4b", "qwen3-1.7b", "qwen3-0.6b", "tiny")
PATHS = ("full", "layerwise", "eager")
GPU_CASES = (
    "1x1,8x1,16x1,30x1,30x16,64x1,128x1,128x16,256x1,512x1,512x16,2048x1,2048x16,8192x1,8192x16,"
    "d1+1024,d16+1024,d64+1024,8x1+4096,30x1+4096,8x1+32768,30x1+32768,128x16+4096,480x16+4096,"
    "128x16+32768,480x16+32768"
)
ALL_PATHS_UP_TO = 2048  # tokens without a prefix; beyond, what matters is the same on every path
CONTEXTS = (4096, 8192)  # and --max-context: a case takes the least that holds it
TINY_CASES = "16x1,30x4+32,64x1,d4+32"
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """See the module's docstring."""
    args = parse_args()
    out = Path(args.out or RESULTS / f"prefill_latency_{args.shape}.json")
    log = GraphLog() if args.graphs else None
    rig = build(args)
    rows = measure_cases(rig, args, log)
    meta = describe(rig, args)
    if log is not None:
        meta["mix"] = mix_executables(rig, log)
    if args.ladder:
        meta["ladder"] = load_ladder(rig, log)
    if args.peer:
        meta["peer"], peer_rows = run_peer(rig, args)
        rows += peer_rows
    report = add_run(out if args.append else None, meta, rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)
    if args.plot:
        plot(report, out.with_suffix(".png"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--tiny", action="store_true", help="the tiny shape, few repeats")
    parser.add_argument("--cases", default="", help="e.g. 16x1,30x1+4096,d16+512")
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N equal parts of the cases")
    parser.add_argument("--append", action="store_true", help="keep the file's other rows")
    parser.add_argument("--paths", default=",".join(PATHS), help="of full, layerwise, eager")
    parser.add_argument("--slots", type=int, default=16, help="request slots of a prefill bucket")
    parser.add_argument("--max-context", type=int, default=40960)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--pool-tokens", type=int, default=540672)
    parser.add_argument("--attention", default="auto", help="attention backend")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="compile threads")
    parser.add_argument("--graphs", action="store_true", help="read XLA's log and dump (GPU)")
    parser.add_argument("--ladder", action="store_true", help="load the whole default ladder")
    parser.add_argument("--plot", action="store_true", help="draw it (extra bench)")
    parser.add_argument("--commit", default="", help="of the source, where git does not say")
    parser.add_argument("--budget", type=float, default=1e9, help="start no case after, seconds")
    parser.add_argument("--peer", action="store_true", help="also run torch's design")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    args.started = time.perf_counter()
    if args.tiny or args.shape == "tiny":
        args.tiny, args.shape, args.pool_tokens, args.repeats = True, "tiny", 4096, 5
        args.slots, args.max_context = 4, 256
    cases = (args.cases or (TINY_CASES if args.tiny else GPU_CASES)).split(",")
    part, parts = map(int, args.part.split("/"))
    args.cases = ",".join(cases[len(cases) * (part - 1) // parts : len(cases) * part // parts])
    return args


def build(args: argparse.Namespace) -> "Rig":
    """The rig with every executable that the cases need, compiled and warm."""
    import jax
    import jax.numpy as jnp

    from benchmarks.rig import MODELS, RigSizes, compile_paths, make_rig
    from jaxprefill.kernels.attention.select import choose_backends
    from jaxprefill.kernels.device import describe_device
    from jaxprefill.plan import attention_needs

    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model = MODELS[args.shape]
    needs = attention_needs(model, describe_device(), dtype, page_size=args.page_size)
    attention = choose_backends(args.attention, needs)
    cases = [Case.parse(text) for text in args.cases.split(",")]
    sizes = RigSizes(
        model=args.shape, num_slots=args.slots, max_context=args.max_context,
        page_size=args.page_size, pool_tokens=args.pool_tokens, num_threads=args.threads,
        max_tokens=max(64, *(case.num_tokens for case in cases)),
    )  # fmt: skip
    rig = make_rig(sizes, attention, dtype)
    wanted = {(path, key_of(case, path, sizes)) for case in cases for path in paths(case, args)}
    compile_paths(rig, wanted)
    warm(rig)
    return rig


def paths(case: Case, args: argparse.Namespace) -> list[str]:
    """The paths a case is measured on."""
    if case.is_decode:
        return ["decode"]
    has_all = case.prefix == 0 and case.num_requests == 1 and case.num_tokens <= ALL_PATHS_UP_TO
    return [path for path in args.paths.split(",") if path == "full" or has_all]


def key_of(case: Case, path: str, sizes: "RigSizes") -> "ShapeKey":
    """The executable the project would choose."""
    from jaxprefill.prefill.buckets import GPU_BUCKETS, ShapeKey, coarse_buckets

    needed = case.prefix + max(case.lens())
    context = min(size for size in (sizes.max_context, *CONTEXTS) if size >= needed)
    if case.is_decode:
        return ShapeKey(case.num_tokens, case.num_tokens, context)
    ladder = coarse_buckets(sizes.max_tokens) if path == "eager" else GPU_BUCKETS
    bucket = min(count for count in ladder if count >= case.num_tokens)
    return ShapeKey(bucket, sizes.num_slots, context)


def warm(rig: "Rig") -> None:
    """Three calls of everything on an empty batch: the graph is recorded on the second."""
    import jax

    from benchmarks.rig import run_head
    from jaxprefill.batch import Batch

    for path, key in (*rig.executables,) * 3:
        rig.executables[path, key].run(rig.state, Batch(rows=(), is_decode=path == "decode"))
    for rows in (*rig.heads,) * 3:
        run_head(rig, Batch(rows=(), is_decode=False), least_rows=rows)
    jax.block_until_ready(rig.state.hidden)


def measure_cases(
    rig: "Rig", args: argparse.Namespace, log: GraphLog | None
) -> list[dict[str, Any]]:
    """One row a (case, path); a line is printed as each is done."""
    from benchmarks.floors import floor_ms, flops, weight_stream
    from benchmarks.rig import make_batch

    rows: list[dict[str, Any]] = []
    floor = weight_stream(rig)
    for text in args.cases.split(","):
        case = Case.parse(text)
        batch = make_batch(rig, case.lens(), case.prefix, is_decode=case.is_decode)
        for path in paths(case, args):
            if time.perf_counter() - args.started > args.budget:
                print(f"out of time before {text} {path}", flush=True)
                continue
            key = key_of(case, path, rig.sizes)
            begun = time.perf_counter()
            row: dict[str, Any] = {
                "shape": args.shape,
                "tokens": case.num_tokens,
                "requests": case.num_requests,
                "prefix": case.prefix,
                "path": path,
                "key": str(key),
            }
            if log is not None:
                log.read()
            row |= measure(rig, path, key, batch, args.repeats)
            row |= {"temp_bytes": rig.temp_bytes[path, key], "floor_ms": floor_ms(rig, case, floor)}
            row["tflops_per_s"] = round(flops(rig, case) / row["wall_ms"] / 1e9, 1)
            if log is not None:
                row |= graph_facts(log, path, key)
            rows.append(row | {"took_s": round(time.perf_counter() - begun, 1)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def graph_facts(log: GraphLog, path: str, key: "ShapeKey") -> dict[str, Any]:
    """Graphs and launches of a one-executable path, and re-recordings while it was measured."""
    updates = {"graph_updates": log.read().updates}
    if path not in ("full", "decode"):
        return updates
    name = re.sub(r"\W+", "_", f"{path} {key}")
    return updates | log.of_module(name)


def measure(
    rig: "Rig", path: str, key: "ShapeKey", batch: "Batch", most_repeats: int
) -> dict[str, float]:
    """Medians in milliseconds; long steps are repeated less, but ten times at least."""
    import jax

    from benchmarks.floors import in_a_row
    from benchmarks.rig import run_head
    from jaxprefill.kernels.device import begin_reading, read_numbers, spin_until_ready

    def body() -> Any:
        rig.executables[path, key].run(rig.state, batch)
        return rig.state.hidden

    def whole() -> Any:
        body()
        return run_head(rig, batch)

    warm_ms = in_a_row(whole, 2, rounds=1)
    repeats = max(min(most_repeats, int(800 / warm_ms)), min(most_repeats, 10))
    samples = collections.defaultdict[str, list[float]](list)
    for index in range(2 * repeats):
        begun = time.perf_counter()
        body()
        dispatched = time.perf_counter()
        out = run_head(rig, batch)
        if index % 2:
            begin_reading(out)
        spin_until_ready(out)
        if index % 2:
            read_numbers(out)
        else:
            jax.block_until_ready((rig.state.hidden, rig.state.pools, out))
        done = time.perf_counter()
        samples["value" if index % 2 else "wall"].append(done - begun)
        samples["dispatch"].append(dispatched - begun)
    for _ in range(5):
        begun = time.perf_counter()
        body()
        samples["hot_dispatch"].append(time.perf_counter() - begun)
    result = {f"{name}_ms": _ms(statistics.median(found)) for name, found in samples.items()}
    return result | {
        "wall_min_ms": _ms(min(samples["wall"])),
        "busy_ms": in_a_row(whole, min(repeats, 12), rounds=2),
        "body_busy_ms": in_a_row(body, min(repeats, 12), rounds=2),
        "repeats": repeats,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def mix_executables(rig: "Rig", log: GraphLog) -> dict[str, Any]:
    """A server's mix: small bodies and heads in random order, random splits into requests."""
    import jax
    import numpy as np

    from benchmarks.rig import make_batch, step

    rng = np.random.default_rng(1)
    keys = [
        (path, key)
        for path, key in rig.executables
        if path in ("full", "decode") and key.num_tokens <= 512
    ]
    log.read()
    results: list[Any] = []
    for index in range(200):
        path, key = keys[rng.integers(len(keys))]
        count = int(rng.integers(1, min(key.num_slots, key.num_tokens, 16) + 1))
        lens = [1] * count if path == "decode" else [key.num_tokens // count] * count
        batch = make_batch(rig, lens, 16, is_decode=path == "decode", seed=index)
        results = [*results[-1:], step(rig, path, key, batch)]  # read one step late, as engines do
        jax.block_until_ready(results[0])
    return {"steps": 200, "executables": len(keys)} | log.read()._asdict()


def describe(rig: "Rig", args: argparse.Namespace) -> dict[str, Any]:
    """Machine, versions, options and floor."""
    import jax

    from benchmarks.floors import weight_stream
    from benchmarks.meta import commit, describe_card

    stats = jax.devices()[0].memory_stats() or {}
    return {
        **describe_card(),
        "commit": args.commit or commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.prefill_latency " + " ".join(sys.argv[1:]),
        "model": asdict(rig.config),
        "note": "random weights",
        "dtype": rig.dtype.name,
        "attention": str(rig.attention),
        "sizes": asdict(rig.sizes),
        "repeats": args.repeats,
        "compile_s": {name: round(s, 2) for name, s in rig.compile_s.items()},
        "num_leaves": len(rig.state.leaves),
        "bytes_in_use": stats.get("bytes_in_use"),
        "floor": weight_stream(rig),
    }


def run_peer(rig: "Rig", args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(versions, rows) of the torch peer, in a process of its own, on the cases it can take."""
    cases = [Case.parse(text) for text in args.cases.split(",")]
    config = rig.config
    sizes = {
        "hidden": config.hidden_size,
        "mlp": config.mlp_size,
        "layers": config.num_layers,
        "q_heads": config.num_q_heads,
        "kv_heads": config.num_kv_heads,
        "dim": config.head_dim,
        "vocab": config.vocab_size,
        "theta": config.rope.theta,
        "repeats": args.repeats,
        "cases": [
            (case.num_tokens, case.num_requests, key_of(case, "full", rig.sizes).num_tokens)
            for case in cases
            if not case.is_decode and case.prefix == 0 and case.num_requests <= 16
        ],
    }
    command = [sys.executable, "-m", "benchmarks.peers.torch_prefill", json.dumps(sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        print(f"the peer stopped: {done.stderr[-2000:]}", file=sys.stderr)
    versions = lines[0] if lines else {"error": done.stderr[-500:]}
    return versions, [{"shape": args.shape} | row for row in lines[1:]]


def load_ladder(rig: "Rig", log: GraphLog | None) -> dict[str, Any]:
    """Device memory that the default ladder takes once loaded and run, and its graphs."""
    from benchmarks.rig import compile_paths
    from jaxprefill.kernels.device import driver_free_bytes
    from jaxprefill.prefill.buckets import GPU_BUCKETS, ShapeKey

    keys = [ShapeKey(tokens, rig.sizes.num_slots, CONTEXTS[-1]) for tokens in GPU_BUCKETS]
    rig.executables.clear()
    gc.collect()
    before, begun = driver_free_bytes() or 0, time.perf_counter()
    compile_paths(rig, {("full", key) for key in keys})
    compiled = time.perf_counter()
    warm(rig)
    found: dict[str, Any] = {
        "executables": len(keys),
        "compile_s": round(compiled - begun, 1),
        "lost_bytes": before - (driver_free_bytes() or 0),
        "max_temp_bytes": max(rig.temp_bytes["full", key] for key in keys),
    }
    if log is not None:
        names = {str(key): re.sub(r"\W+", "_", f"full {key}") for key in keys}
        found["graphs"] = {key: log.of_module(name) for key, name in names.items()}
    return found


if __name__ == "__main__":
    main()
