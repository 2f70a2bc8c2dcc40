"""Milliseconds of a forward pass on this CPU, beside transformers' in the same run.

    python -m benchmarks.cpu [--peer-python PATH]     (the peer needs the extra `oracle`)

A case is `p` + tokens of one prompt, or `d` + requests that decode one token behind 16 cached.
A pass is body and head for the last row of each request, host work included; peer and engine take
turns, case by case and round by round. Beside wall time stands process CPU time, which other
processes disturb less; ratios are transformers' better dtype over ours, so above 1 we are faster.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.meta import describe_run
from jaxprefill import SamplingParams
from jaxprefill.batch import Batch, BatchRow, SampleSpec
from jaxprefill.config import make_config
from jaxprefill.core import EngineCore
from jaxprefill.kernels.device import describe_device
from jaxprefill.plan import make_plan
from jaxprefill.sampling.pack import RowToSample
from jaxprefill.startup import start
from jaxprefill.weights.locate import open_checkpoint

CASES = "d1,d2,d4,d8,d16,p30,p32,p128,p512,p1024"
PREFIX = 16
PAGE = 16
DTYPES = ("float32", "bfloat16")
HOPELESS = 3.0  # a dtype this many times slower than the other is not measured at longer shapes
GREEDY = SampleSpec(params=SamplingParams(temperature=0.0), seed=0, position=0, num_generated=0)
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """Token ids of one pass, [requests][tokens], behind `prefix`, the same or empty."""

    name: str
    prefix: list[list[int]]
    ids: list[list[int]]

    @staticmethod
    def parse(name: str, vocab: int) -> "Case":
        """Random ids, the same every time."""
        rng, count = np.random.default_rng(0), int(name[1:])
        if name[0] == "d":
            prefix = rng.integers(5, vocab, (count, PREFIX)).tolist()
            return Case(name, prefix, rng.integers(5, vocab, (count, 1)).tolist())
        return Case(name, [], rng.integers(5, vocab, (1, count)).tolist())


class Ours:
    """The engine's own executables, called as its loop calls them."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def measure(self, case: Case) -> dict[str, Any]:
        """As the peer's: one pass is timed, the prefix is not."""
        if case.prefix:
            self._run(case.prefix, behind=0)
        wall, cpu = time.perf_counter(), time.process_time()
        token = self._run(case.ids, behind=PREFIX if case.prefix else 0)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"wall_ms": 1e3 * wall, "cpu_ms": 1e3 * cpu, "token": token}

    def _run(self, ids: list[list[int]], *, behind: int) -> int:
        core, pages = self._core, -(-(behind + len(ids[0])) // PAGE)
        rows = tuple(
            BatchRow(
                request_id=str(slot),
                slot=slot,
                token_ids=own,
                kv_len=behind + len(own),
                pages=list(range(slot, pages * len(ids), len(ids))),
            )
            for slot, own in enumerate(ids)
        )
        batch = Batch(rows=rows, is_decode=behind > 0)
        (core.decode if behind else core.prefill).run(core.state, batch)
        size = len(ids[0])
        wanted = [RowToSample((slot + 1) * size - 1, slot, GREEDY) for slot in range(len(ids))]
        return core.heads.lm.sample(core.state, wanted).read()[0].token


class Peer:
    """`peers/transformers_cpu.py` behind a pipe."""

    def __init__(self, python: str, model: str) -> None:
        script = ["-m", "benchmarks.peers.transformers_cpu", model]
        self._process = subprocess.Popen(
            [python, *script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.versions = self._read()

    def measure(self, case: Case, dtype: str) -> dict[str, Any]:
        """One pass in the peer's process."""
        request = {"dtype": dtype, "prefix": case.prefix, "ids": case.ids}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the peer stopped; it needs torch and transformers (extra oracle)")
        return json.loads(line)


def measure_case(
    case: Case, ours: Ours, peer: Peer | None, dtypes: list[str], rounds: int
) -> dict[str, Any]:
    """One row; `dtypes` loses those that are hopeless."""
    samples: dict[str, list[dict[str, Any]]] = {"ours": []}
    ours.measure(case)
    for _ in range(rounds):
        for dtype in dtypes if peer else ():
            samples.setdefault(dtype, []).append(peer.measure(case, dtype))
        samples["ours"].append(ours.measure(case))
        best = {name: min(s["wall_ms"] for s in samples[name]) for name in dtypes if peer}
        for name, ms in best.items():
            if ms > HOPELESS * min(best.values()):
                dtypes.remove(name)
    row: dict[str, Any] = {"case": case.name}
    for name, found in samples.items():
        for kind in ("wall_ms", "cpu_ms"):
            values = [sample[kind] for sample in found]
            row[f"{name}_{kind}"] = round(statistics.median(values), 1)
            row[f"{name}_{kind}_min"] = round(min(values), 1)
    peers = [name for name in samples if name != "ours"]
    if peers:
        for kind in ("wall_ms", "wall_ms_min", "cpu_ms_min"):
            theirs = min(row[f"{name}_{kind}"] for name in peers)
            row[f"ratio_{kind}"] = round(theirs / row[f"ours_{kind}"], 2)
        row["same_token"] = samples["float32"][0]["token"] == samples["ours"][0]["token"]
    return row


def describe(core_dtype: str, peer: Peer | None, rounds: int) -> dict[str, Any]:
    """Machine and versions, the peer's too."""
    return describe_run("benchmarks.cpu") | {
        "dtype": core_dtype,
        "peer": peer.versions if peer else None,
        "rounds": rounds,
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer-python", default=sys.executable, help="has the extra oracle")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / f"cpu_jax_{jax.__version__}.json")
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    plan = make_plan(make_config(model=args.model), checkpoint.config, describe_device())
    core = start(checkpoint, plan, on_compiled=lambda record, total: None).core
    peer = None if args.no_peer else Peer(args.peer_python, args.model)
    meta, rows, dtypes = describe(plan.dtype.name, peer, args.rounds), [], list(DTYPES)
    for name in args.cases.split(","):
        case = Case.parse(name, checkpoint.config.vocab_size)
        rows.append(measure_case(case, Ours(core), peer, dtypes, args.rounds))
        print(json.dumps(rows[-1]), flush=True)
    if peer:
        peer.close()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
