"""On a GPU: each body is one CUDA graph, recorded once, whatever mix of executables runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A process of its own: XLA reads its log and dump settings when jax is first imported.
MIX = """
from benchmarks.graphs import GraphLog
log = GraphLog()
import json, sys, warnings
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
import numpy as np
from jaxprefill import SamplingParams
from tests.tiny import TinyCheckpoint, tiny_engine

rng = np.random.default_rng(0)
kinds = [
    dict(temperature=0), dict(temperature=1.0, seed=3), dict(top_k=5, logprobs=4),
    dict(presence_penalty=1.0), dict(logit_bias={7: 2.0}), dict(max_tokens=1),
]

def prompts(count):
    return [rng.integers(0, 250, rng.integers(1, 100)).tolist() for _ in range(count)]

def mix(made):
    params = [SamplingParams(**{"max_tokens": int(rng.integers(1, 9))} | kinds[i % 6])
              for i in rng.integers(0, 6, 9)]
    made.generate(prompts(9), params)
    made.logprobs(prompts(3))

with tiny_engine(TinyCheckpoint(), prefill_buckets=(16, 32, 64), dtype=sys.argv[1]) as made:
    plan = made.plan
    names = [f"prefill {key}" for key in plan.ladder.keys]
    names += [f"decode {plan.decode_key(slots)}" for slots in plan.decode_slots]
    mix(made)
    log.read()
    for _ in range(12):
        mix(made)
    use = log.read()
    stats = made.stats()
    graphs = {name: log.of_module("_".join(name.split())) for name in names}
    print(json.dumps({"graphs": graphs, "executions": use.executions, "updates": use.updates,
                      "passes": stats["passes"], "late": stats["compilations_after_ready"]}))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_body_is_one_graph_and_no_mix_of_requests_records_it_again(dtype):
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    done = subprocess.run(
        [sys.executable, "-c", MIX, dtype],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(one["graphs"] == 1 for one in found["graphs"].values()), found
    assert found["passes"]["full"] > 50 and found["passes"]["decode"] > 50
    assert found["executions"] > 50  # not each is logged
    assert found["updates"] == 0, found
    assert found["late"] == 0
