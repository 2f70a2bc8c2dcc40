"""Cold and warm starts of a model, each in a process of its own, and how many times faster.

    python -m benchmarks.start_up [--model qwen3-8b] [--json OUT.json] [OPTION=VALUE ...]

The first start compiles and keeps its executables in an empty store, the others load them.

A model that is named here by its shape has random weights, and seconds are those of the start
itself: the interpreter and the imports before it (`imports`) and waiting for the weights once all
executables are there (`weights`) stand beside them. Any other (by default `demo`) is served, and
seconds (`ready_s`) are those from the command `jaxprefill serve` to its line that it is ready;
`cpu_s` are those that its processes used until they had ended again.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()

import jax  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.first_light import use_empty_cache  # noqa: E402
from benchmarks.meta import describe_run  # noqa: E402
from benchmarks.rig import MODELS  # noqa: E402
from jaxprefill.config import ModelConfig, make_config  # noqa: E402
from jaxprefill.kernels.device import describe_device  # noqa: E402
from jaxprefill.models.registry import model_class  # noqa: E402
from jaxprefill.models.sharding import make_mesh  # noqa: E402
from jaxprefill.models.tree import model_tree  # noqa: E402
from jaxprefill.plan import make_plan  # noqa: E402
from jaxprefill.startup import start  # noqa: E402
from jaxprefill.weights.demo import fetch_demo  # noqa: E402


class RandomCheckpoint:
    """Tensors of one model's names and shapes, all cut from the same random numbers."""

    name = "random"

    def __init__(self, config: ModelConfig, dtype: np.dtype) -> None:
        self.config = config
        self.tokenizer = argparse.Namespace(vocab_size=config.vocab_size)
        self._numbers = (np.random.default_rng(0).normal(size=1 << 20) * 0.02).astype(dtype)
        self._shapes = {}
        tree, sources = model_tree(config, dtype, make_mesh()), model_class(config).sources(config)
        for path, shape in zip(tree.paths, tree.whole_shapes, strict=True):
            fused = sources[path]
            rows = fused.rows or (shape[0],)
            parts = (
                [shape[1:]] * len(fused.sources)
                if fused.is_stacked
                else [(count, *shape[1:]) for count in rows]
            )
            self._shapes |= dict(zip(fused.sources, parts, strict=True))

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> np.ndarray:
        return np.resize(self._numbers, self._shapes[name])


def start_once(model: str, options: list[str]) -> dict:
    """Starts in this process."""
    imported = time.perf_counter() - BEGAN
    config = make_config(**dict(option.split("=", 1) for option in options))
    plan = make_plan(config, MODELS[model], describe_device())
    checkpoint = RandomCheckpoint(plan.model, plan.dtype)
    started = start(checkpoint, plan, on_compiled=lambda record, total: None)
    seconds = started.seconds
    loads = [record.load_s for record in started.records if record.load_s is not None]
    return {
        "imports_s": imported,
        "executables_s": seconds["compile"],
        "weights_s": seconds["weights_after_compile"],
        "warm_up_s": seconds["warm_up"],
        "ready_without_weights_s": seconds["total"] - seconds["weights_after_compile"],
        "executables": len(started.records),
        "loaded": len(loads),
        "slowest_load_s": max(loads, default=0.0),
        "lowered": started.num_lowered,
        "compiled": started.num_compiled,
        "compile_cpu_s": sum(record.lower_s + record.compile_s for record in started.records),
        "faults": started.faults,
        "device": plan.device.kind,
        "jax": jax.__version__,
    }


def start_shape(model: str, options: list[str]) -> dict[str, Any]:
    """Starts a random model in another process."""
    command = [sys.executable, "-m", "benchmarks.start_up", "--once", "--model", model, *options]
    began, used = time.perf_counter(), cpu_of_children()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    found = json.loads(done.stdout.split("FOUND ")[1])
    taken = time.perf_counter() - began
    return {"process_s": taken, "cpu_s": cpu_of_children() - used} | found


def serve_once(model: str, options: list[str]) -> dict[str, Any]:
    """Serves a model until it is ready."""
    command = [sys.executable, "-m", "jaxprefill", "serve", "--model", model, "--port", "0"]
    flags = [f"--{name.replace('_', '-')}" for name, _, _ in map(_parted, options)]
    values = [value for _, _, value in map(_parted, options)]
    command += [part for pair in zip(flags, values, strict=True) for part in pair]
    began, used, lines = time.perf_counter(), cpu_of_children(), list[str]()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.strip())
            if line.startswith("jaxprefill ready"):
                break
        taken = time.perf_counter() - began
        process.send_signal(signal.SIGTERM)
    if not lines[-1].startswith("jaxprefill ready"):
        sys.exit("\n".join(lines))
    told = lines[-2].rpartition("executables: ")[2]
    return {"ready_s": taken, "cpu_s": cpu_of_children() - used, "executables": told}


def _parted(option: str) -> tuple[str, str, str]:
    return option.partition("=")


def cpu_of_children() -> float:
    """Seconds of all cores together that processes used which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def describe_ratio(rows: list[dict[str, Any]]) -> str:
    """How many times faster the median warm start was."""
    key = "ready_s" if "ready_s" in rows[0] else "ready_without_weights_s"
    cold = rows[0][key]
    if len(rows) == 1:
        return f"cold {cold:.1f} s"
    warm = statistics.median(row[key] for row in rows[1:])
    return f"cold {cold:.1f} s, warm {warm:.1f} s: {cold / warm:.1f} times faster"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help=f"{', '.join(MODELS)}, or one to serve")
    parser.add_argument("--warm-starts", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", action="store_true", help="one start in this process")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of the engine")
    args = parser.parse_args()
    if args.once:
        print("\nFOUND " + json.dumps(start_once(args.model, args.options)), flush=True)
        os._exit(0)
    rows = []
    start_in_process = start_shape if args.model in MODELS else serve_once
    with tempfile.TemporaryDirectory() as cache:
        if args.model == "demo":
            fetch_demo()
        use_empty_cache(cache)
        for kind in ("cold", *["warm"] * args.warm_starts):
            found = start_in_process(args.model, args.options)
            size = sum(path.stat().st_size for path in Path(cache).rglob("*.bin"))
            rows.append({"start": kind, **found, "store_bytes": size, "load": os.getloadavg()[0]})
            print({key: round(x, 2) if isinstance(x, float) else x for key, x in rows[-1].items()})
    print(describe_ratio(rows))
    if args.json:
        meta = describe_run("benchmarks.start_up")
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
