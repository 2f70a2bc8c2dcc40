"""Start-up and latency of the demo model on this machine, each path in the same run.

    python -m benchmarks.first_light [--json OUT.json]

Prints seconds to the first token for a cold and a warm start (fresh processes, the model already
fetched), then milliseconds of one prompt by path and length, and of a decode step by requests.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.meta import describe_run
from jaxprefill import Engine, SamplingParams
from jaxprefill.weights.demo import default_cache_dir, fetch_demo

LENGTHS = (5, 30, 60, 200, 1000)
ONE = SamplingParams(max_tokens=1, temperature=0)


def use_empty_cache(folder: str) -> None:
    """Makes it the user's cache, with nothing but the models that are there already."""
    models = default_cache_dir()
    own = Path(folder, "jaxprefill")
    own.mkdir()
    (own / models.name).symlink_to(models)
    os.environ["XDG_CACHE_HOME"] = folder


def start_up() -> float:
    """Seconds from command to first token in a new process."""
    command = [sys.executable, "-m", "jaxprefill", "generate", "--quiet"]
    command += ["--prompt", "The capital of France is"]
    began = time.perf_counter()
    subprocess.run([*command, "--max-tokens", "1"], check=True, capture_output=True)
    return time.perf_counter() - began


def timed(call, runs: int) -> float:
    """Median milliseconds of `call`, after one that is not counted."""
    call()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def generate_anew(engine: Engine, prompt: list[int]) -> None:
    """One token after a prompt that the engine has never seen."""
    engine.flush_cache()
    engine.generate([prompt], ONE)


def prefill_rows(engine: Engine, path: str, runs: int):
    """One prompt of each length, one token generated."""
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        prompt = rng.integers(5, 40000, length).tolist()
        ms = timed(partial(generate_anew, engine, prompt), runs)
        yield {"what": "prefill", "path": path, "tokens": length, "ms": round(ms, 1)}


def decode_rows(engine: Engine):
    """Milliseconds a step when this many requests generate at once."""
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 17)]
    for requests in (1, 16):
        prompts = [[504, 3575, 282, 4649, 314]] * requests
        calls = [partial(engine.generate, prompts, one) for one in params]
        short, long = (timed(call, 3) for call in calls)
        ms = (long - short) / 16
        yield {"what": "decode", "path": "decode", "requests": requests, "ms": round(ms, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--paths", default="full,layerwise,eager")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        fetch_demo()
        use_empty_cache(cache)
        for start in ("cold", "warm"):
            rows.append({"what": "start", "path": start, "s": round(start_up(), 1)})
            print(rows[-1], flush=True)
        for path in args.paths.split(","):
            with Engine(prefill_backend=path) as engine:
                found = list(prefill_rows(engine, path, args.runs))
                found += list(decode_rows(engine)) if path == "full" else []
                for row in found:
                    print(row, flush=True)
                rows += found
    meta = describe_run("benchmarks.first_light")
    if args.json:
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
