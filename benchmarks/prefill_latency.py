"""Latency of prefill and decode steps: body + greedy head, host metadata included.

    python -m benchmarks.prefill_latency --shape qwen3-8b      on a GPU
    python -m benchmarks.prefill_latency --tiny                on a CPU, in seconds

A case is tokens x requests + cached prefix ("30x1+4096"), or d + slots + prefix for a decode step
("d16+512"). One JSON file under results/, one table on the terminal.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.graphs import GraphLog

if TYPE_CHECKING:
    from benchmarks.rig import Rig, RigSizes
    from jaxprefill.batch import Batch
    from jaxprefill.prefill.buckets import ShapeKey

SHAPES = ("qwen3-8b", "qwen3-4b", "qwen3-1.7b", "qwen3-0.6b", "tiny")
PATHS = ("full", "layerwise", "eager")
GPU_CASES = (
    "30x1,16x1,1x1,32x16,64x1,128x1,128x16,256x1,512x1,512x16,d1+1024,d16+1024,d64+1024,"
    "8x1+4096,30x1+4096,30x1+32768,32x16+4096,2048x1,2048x16,8192x1"
)
CONTEXTS = (4096, 8192)  # and --max-context: a case takes the least that holds it
TINY_CASES = "16x1,30x4+32,64x1,d4+32"
H200_FLOPS = 790e12  # bfloat16 products a second, measured on random numbers
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """`num_tokens` new tokens of `num_requests`, each behind `prefix` cached ones."""

    num_tokens: int
    num_requests: int
    prefix: int
    is_decode: bool

    @staticmethod
    def parse(text: str) -> "Case":
        """From "30x1+4096" or "d16+512"."""
        body, _, prefix = text.strip().partition("+")
        if body.startswith("d"):
            slots = int(body[1:])
            return Case(slots, slots, int(prefix or 0), True)
        tokens, _, requests = body.partition("x")
        return Case(int(tokens), int(requests or 1), int(prefix or 0), False)

    def lens(self) -> list[int]:
        """New tokens of each request, as even as can be."""
        share, extra = divmod(self.num_tokens, self.num_requests)
        return [share + (index < extra) for index in range(self.num_requests)]


def main() -> None:
    """See the module's docstring."""
    args = parse_args()
    log = GraphLog() if args.graphs else None
    rig = build(args)
    rows = measure_cases(rig, args, log)
    meta = describe(rig, args)
    if log is not None:
        meta["mix"] = mix_executables(rig, log)
    report = {"meta": meta, "rows": rows}
    out = Path(args.out or RESULTS / f"prefill_latency_{args.shape}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1))
    print_table(report)
    if args.peer:
        run_peer(args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--tiny", action="store_true", help="the tiny shape, few repeats")
    parser.add_argument("--cases", default="", help="e.g. 16x1,30x1+4096,d16+512")
    parser.add_argument("--paths", default=",".join(PATHS), help="of full, layerwise, eager")
    parser.add_argument("--slots", type=int, default=16, help="request slots of a prefill bucket")
    parser.add_argument("--max-context", type=int, default=40960)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--pool-tokens", type=int, default=131072)
    parser.add_argument("--attention", default="auto", help="attention backend")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--threads", type=int, default=8, help="compile threads")
    parser.add_argument("--graphs", action="store_true", help="read XLA's log and dump (GPU)")
    parser.add_argument("--budget", type=float, default=1e9, help="start no case after, seconds")
    parser.add_argument("--peer", action="store_true", help="also run peers/torch_prefill.py")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    args.started = time.perf_counter()
    if args.tiny or args.shape == "tiny":
        args.tiny, args.shape, args.pool_tokens, args.repeats = True, "tiny", 4096, 5
        args.slots, args.max_context = 4, 256
    args.cases = args.cases or (TINY_CASES if args.tiny else GPU_CASES)
    return args


def build(args: argparse.Namespace) -> "Rig":
    """The rig with every executable that the cases need, compiled and warm."""
    import jax
    import jax.numpy as jnp

    from benchmarks.rig import MODELS, RigSizes, compile_paths, make_rig
    from jaxprefill.kernels.attention import select_backend

    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    backend = select_backend(
        args.attention,
        platform=jax.default_backend(),
        dtype=dtype.name,
        page_size=args.page_size,
        head_dim=MODELS[args.shape].head_dim,
    )
    cases = [Case.parse(text) for text in args.cases.split(",")]
    sizes = RigSizes(
        model=args.shape, num_slots=args.slots, max_context=args.max_context,
        page_size=args.page_size, pool_tokens=args.pool_tokens, num_threads=args.threads,
        max_tokens=max(64, *(case.num_tokens for case in cases)),
    )  # fmt: skip
    rig = make_rig(sizes, backend, dtype)
    wanted = {(path, key_of(case, path, sizes)) for case in cases for path in paths(case, args)}
    compile_paths(rig, wanted)
    warm(rig)
    return rig


def paths(case: Case, args: argparse.Namespace) -> list[str]:
    """The paths a case is measured on."""
    return ["decode"] if case.is_decode else args.paths.split(",")


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
            if log is not None:
                row |= graph_facts(log, path, key)
            rows.append(row)
            print(json.dumps(rows[-1]), flush=True)
    return rows


def graph_facts(log: GraphLog, path: str, key: "ShapeKey") -> dict[str, Any]:
    """Graphs and launches of a one-executable path, and re-recordings while it was measured."""
    updates = {"graph_updates": log.read().updates}
    if path not in ("full", "decode"):
        return updates
    name = re.sub(r"\W+", "_", f"{path} {key}")
    return updates | log.of_module(name)._asdict()


def measure(
    rig: "Rig", path: str, key: "ShapeKey", batch: "Batch", most_repeats: int
) -> dict[str, float]:
    """Medians in milliseconds; long steps are repeated less, but ten times at least."""
    import jax
    import numpy as np

    from benchmarks.rig import step

    def whole() -> Any:
        return step(rig, path, key, batch)

    def body() -> Any:
        rig.executables[path, key].run(rig.state, batch)
        return rig.state.hidden

    warm_ms = in_a_row(whole, 5)
    repeats = max(min(most_repeats, int(800 / warm_ms)), min(most_repeats, 10))
    samples: dict[str, list[float]] = {"dispatch_ms": [], "wall_ms": [], "value_ms": []}
    for index in range(2 * repeats):
        begun = time.perf_counter()
        out = whole()
        dispatched = time.perf_counter()
        if index % 2:
            np.asarray(out)
        else:
            jax.block_until_ready((rig.state.hidden, rig.state.pools, out))
        done = time.perf_counter()
        samples["value_ms" if index % 2 else "wall_ms"].append(done - begun)
        samples["dispatch_ms"].append(dispatched - begun)
    result = {name: round(statistics.median(s) * 1e3, 3) for name, s in samples.items()}
    return result | {
        "wall_min_ms": round(min(samples["wall_ms"]) * 1e3, 3),
        "busy_ms": in_a_row(whole, repeats),
        "body_busy_ms": in_a_row(body, repeats),
        "repeats": repeats,
    }


def in_a_row(call: Any, repeats: int) -> float:
    """Milliseconds a call when none is awaited but the last."""
    import jax

    rounds: list[float] = []
    for _ in range(3):
        jax.block_until_ready(call())
        begun = time.perf_counter()
        for _ in range(repeats - 1):
            call()
        jax.block_until_ready(call())
        rounds.append((time.perf_counter() - begun) / repeats)
    return round(min(rounds) * 1e3, 3)


def weight_stream(rig: "Rig") -> dict[str, float]:
    """The floor: the rate of a read-only pass over the largest weights, and what it means."""
    import jax
    import jax.numpy as jnp

    named = dict(zip(rig.tree.paths, rig.state.leaves, strict=True))
    large = [leaf for path, leaf in named.items() if path.endswith("gate_up")]

    def largest(leaves: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.max(leaf.reshape(-1)) for leaf in leaves])

    read = jax.jit(largest).lower(large).compile(compiler_options=rig.options)
    rate = sum(leaf.nbytes for leaf in large) / in_a_row(lambda: read(large), 10)  # bytes a ms
    body = sum(leaf.nbytes for path, leaf in named.items() if path.startswith("layers."))
    head = rig.state.head.nbytes
    return {
        "body_bytes": body,
        "head_bytes": head,
        "read_tb_per_s": round(rate / 1e9, 3),
        "body_ms": round(body / rate, 3),
        "body_and_head_ms": round((body + head) / rate, 3),
    }


def floor_ms(rig: "Rig", case: Case, floor: dict[str, float]) -> float:
    """Weights and cached keys at the stream's rate, or the products at the card's: the longer."""
    import jax

    cached = case.prefix * case.num_requests * rig.state.pools[0].nbytes / rig.sizes.pool_tokens
    read = floor["body_and_head_ms"] + cached / (floor["read_tb_per_s"] * 1e9)
    named = zip(rig.tree.paths, rig.state.leaves, strict=True)
    weights = sum(leaf.size for path, leaf in named if path.startswith("layers."))
    is_h200 = "H200" in jax.devices()[0].device_kind
    multiply = 2 * weights * case.num_tokens / H200_FLOPS * 1e3 if is_h200 else 0.0
    return round(max(read, multiply), 3)


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
    import jaxlib

    stats = jax.devices()[0].memory_stats() or {}
    return {
        "command": " ".join(sys.orig_argv),
        "device": jax.devices()[0].device_kind,
        "platform_version": jax.devices()[0].client.platform_version,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": sys.version.split()[0],
        "model": asdict(rig.config),
        "note": "random weights",
        "dtype": rig.dtype.name,
        "attention": rig.backend.name,
        "sizes": asdict(rig.sizes),
        "repeats": args.repeats,
        "compile_s": {name: round(s, 2) for name, s in rig.compile_s.items()},
        "num_leaves": len(rig.state.leaves),
        "bytes_in_use": stats.get("bytes_in_use"),
        "floor": weight_stream(rig),
    }


def print_table(report: dict[str, Any]) -> None:
    meta = report["meta"]
    print(f"\n{meta['device']}, jax {meta['jax']}, {meta['attention']}, floor {meta['floor']}")
    names = ("wall_ms", "value_ms", "dispatch_ms", "busy_ms", "floor_ms")
    print(f"{'tokens':>7}{'reqs':>5}{'prefix':>7}  {'path':10}", *(f"{name:>12}" for name in names),
          " over floor  graphs  nodes  updates  temp_mb")  # fmt: skip
    for row in report["rows"]:
        head = f"{row['tokens']:7}{row['requests']:5}{row['prefix']:7}  {row['path']:10}"
        facts = (row.get(name, "") for name in ("graphs", "nodes", "graph_updates"))
        print(head, *(f"{row[name]:12.3f}" for name in names),
              f"{row['wall_ms'] / row['floor_ms']:11.2f}", *(f"{fact!s:>7}" for fact in facts),
              f"{row['temp_bytes'] / 1e6:9.1f}")  # fmt: skip


def run_peer(args: argparse.Namespace) -> None:
    """The torch peer, in a process of its own."""
    script = Path(__file__).parent / "peers" / "torch_prefill.py"
    if not script.exists():
        sys.exit(f"no peer at {script}")
    flags = ["--tiny", "--cpu"] if args.tiny else []
    subprocess.run([sys.executable, str(script), *flags], check=True, env=dict(os.environ))


if __name__ == "__main__":
    main()
