"""Cold and warm starts of a model's shape with random weights, each in a process of its own.

    python -m benchmarks.start_up [--model qwen3-8b] [--json OUT.json] [OPTION=VALUE ...]

The first start compiles and keeps its executables in an empty store, the others load them. Seconds
are those of the start itself: the interpreter and the imports before it (`imports`) and waiting for
the weights once all executables are there (`weights`) stand beside them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BEGAN = time.perf_counter()

import jax  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.meta import describe_run  # noqa: E402
from benchmarks.rig import MODELS  # noqa: E402
from jaxprefill.config import ModelConfig, make_config  # noqa: E402
from jaxprefill.kernels.device import describe_device  # noqa: E402
from jaxprefill.models.registry import model_class  # noqa: E402
from jaxprefill.models.sharding import make_mesh  # noqa: E402
from jaxprefill.models.tree import model_tree  # noqa: E402
from jaxprefill.plan import make_plan  # noqa: E402
from jaxprefill.startup import start  # noqa: E402


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", choices=MODELS)
    parser.add_argument("--warm-starts", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", action="store_true", help="one start in this process")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of the engine")
    args = parser.parse_args()
    if args.once:
        print("\nFOUND " + json.dumps(start_once(args.model, args.options)), flush=True)
        os._exit(0)
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("cold", *["warm"] * args.warm_starts):
            command = [sys.executable, "-m", "benchmarks.start_up", "--once", "--model", args.model]
            began = time.perf_counter()
            done = subprocess.run(
                [*command, *args.options],
                env=os.environ | {"XDG_CACHE_HOME": cache},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                sys.exit(done.stderr)
            found = json.loads(done.stdout.split("FOUND ")[1])
            size = sum(path.stat().st_size for path in Path(cache).rglob("*.bin"))
            row = {"start": kind, "process_s": time.perf_counter() - began, "store_bytes": size}
            rows.append(row | found)
            print({key: round(x, 2) if isinstance(x, float) else x for key, x in rows[-1].items()})
    if args.json:
        meta = describe_run("benchmarks.start_up")
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
