"""How long models take from their files to the devices, each load in a process of its own.

    python -m benchmarks.loading model.gguf checkpoints/model [--dtype bfloat16] [--warm]

Their files are dropped from the page cache before, unless --warm; sources take turns. Seconds are
from opening the model to its last array, imports left out; CPU seconds too. With --output, JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.meta import describe_run
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.weights.load import check_names, check_shapes, load_leaves
from jaxprefill.weights.locate import open_checkpoint


def files_of(source: str) -> list[Path]:
    path = Path(source)
    return [found for found in path.rglob("*") if found.is_file()] if path.is_dir() else [path]


def drop_from_page_cache(source: str) -> None:
    for path in files_of(source):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())  # only what is written can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_once(source: str, dtype: str) -> dict[str, float]:
    """Loads in this process."""
    jax.devices()
    began, used = time.perf_counter(), time.process_time()
    checkpoint = open_checkpoint(source)
    tree = model_tree(checkpoint.config, jnp.dtype(dtype), make_mesh())
    check_names(checkpoint)
    check_shapes(checkpoint, tree)
    jax.block_until_ready(load_leaves(checkpoint, tree))
    return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - used}


def load_apart(source: str, args: argparse.Namespace) -> dict[str, float]:
    """Loads in another process."""
    if not args.warm:
        drop_from_page_cache(source)
    command = [sys.executable, "-m", "benchmarks.loading", source, "--once", "--dtype", args.dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return json.loads(done.stdout.split("FOUND ")[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--dtype", default="float32", help="that the engine computes with")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--warm", action="store_true", help="files may be in the page cache")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.once:
        print("FOUND " + json.dumps(load_once(args.sources[0], args.dtype)))
        return
    runs = [[load_apart(source, args) for source in args.sources] for _ in range(args.repeat)]
    rows = []
    for source, found in zip(args.sources, zip(*runs, strict=True), strict=True):
        size = sum(path.stat().st_size for path in files_of(source)) / 1e6
        middle = {key: statistics.median(run[key] for run in found) for key in found[0]}
        rows.append({"source": Path(source).name, "megabytes": size, **middle, "runs": found})
        print(f"{source}: {size:.0f} MB, {middle['seconds']:.2f} s, CPU {middle['cpu_s']:.2f} s")
    if args.output:
        result = {"meta": describe_run("benchmarks.loading"), "is_warm": args.warm, "rows": rows}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
