"""On a GPU: 36 layers against float32, launches of whole passes, and what tuning leaves behind."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import rig as rigs
from jaxprefill.kernels.attention.pallas_triton import PALLAS_TRITON
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.kernels.device import describe_device
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.prefill.buckets import ShapeKey
from jaxprefill.prefill.compiler import GPU_OPTIONS
from jaxprefill.prefill.forward import Body
from jaxprefill.prefill.fused import make_body
from jaxprefill.prefill.padding import BufferLayout, pad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
ROOT = Path(__file__).parent.parent
PAGES, PAGE_SIZE = 64, 16


@pytest.fixture(scope="module", autouse=True)
def on_a_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")


@pytest.fixture(scope="module")
def deep(on_a_gpu):
    """Qwen3-1.7B's widths in 36 layers of random bfloat16 weights: (tree, leaves)."""
    config = replace(rigs.MODELS["qwen3-1.7b"], num_layers=36)
    tree = model_tree(config, jnp.dtype("bfloat16"), make_mesh())
    return tree, rigs.random_leaves(tree)


def hidden_rows(tree, leaves, backend, num_tokens, make):
    """The hidden rows of one request whose bucket has two rows to spare."""
    key, config = ShapeKey(num_tokens, 4, PAGES * PAGE_SIZE), tree.config
    tiles = backend.tile_shape(*key, page_size=PAGE_SIZE, is_decode=False)
    layout, dtype = BufferLayout(key, tiles, PAGE_SIZE), tree.shapes[0].dtype
    pages = config.num_layers * PAGES
    pool = jnp.zeros((2, config.num_kv_heads, pages, PAGE_SIZE, config.head_dim), dtype)
    hidden = jnp.zeros((num_tokens, config.hidden_size), dtype)
    ids = np.random.default_rng(0).integers(config.vocab_size, size=num_tokens - 2).tolist()
    row = rigs.BatchRow(
        request_id="0", slot=0, kv_len=len(ids), pages=list(range(PAGES)), token_ids=ids
    )
    buffer = jnp.asarray(pad(rigs.Batch(rows=(row,), is_decode=False), layout))
    body = make(tree, backend, layout)
    operands = (leaves, (pool,), hidden, jnp.zeros(4, jnp.int32), buffer)
    lowered = jax.jit(lambda *args: body(*args)).lower(*operands)
    out = lowered.compile(compiler_options=GPU_OPTIONS)(*operands)[1]
    return np.asarray(out[: num_tokens - 2], np.float64)


@pytest.mark.parametrize("num_tokens", [32, 64, 128, 256, 512])
def test_a_pass_of_36_layers_is_close_to_float32(deep, num_tokens):
    tree, leaves = deep
    wide = model_tree(tree.config, jnp.dtype("float32"), make_mesh())
    with jax.default_matmul_precision("highest"):
        want = hidden_rows(
            wide,
            tuple(leaf.astype(jnp.float32) for leaf in leaves),
            XLA,
            num_tokens,
            lambda *args: Body(*args, is_looped=True),
        )
    found = hidden_rows(
        tree, leaves, PALLAS_TRITON, num_tokens, lambda *args: make_body(*args, platform="gpu")
    )
    assert np.linalg.norm(found - want) <= 2e-2 * np.linalg.norm(want)


def in_another_process(*command, cache=None):
    """Standard output of a Python command that must succeed."""
    own = {} if cache is None else {"XDG_CACHE_HOME": str(cache)}
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path} | own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_passes_are_one_graph_each_of_few_nodes_and_never_recorded_again(tmp_path):
    out, layers = tmp_path / "found.json", rigs.MODELS["qwen3-0.6b"].num_layers
    in_another_process(
        "-m", "benchmarks.prefill_latency", "--shape", "qwen3-0.6b", "--graphs", "--paths", "full",
        "--cases", "30x1,64x1,2048x1,4096x2,d16+512", "--repeats", "10", "--pool-tokens", "65536",
        "--max-context", "8192", "--out", str(out),
    )  # fmt: skip
    rows = json.loads(out.read_text())["rows"]
    assert [row["graphs"] for row in rows] == [1] * 5
    assert [row["graph_updates"] for row in rows] == [0] * 5
    small = [row["nodes"] / layers for row in rows if row["tokens"] <= 64]
    assert len(small) == 3 and max(small) <= 6


COMPILED = """
import hashlib, json, os, warnings
from pathlib import Path
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
import numpy as np
from tests.tiny import TinyCheckpoint, tiny_engine

prompts = [np.random.default_rng(n).integers(0, 250, n).tolist() for n in (20, 100)]
shapes = dict(prefill_buckets=(32, 128), page_size=16)
with tiny_engine(TinyCheckpoint(), dtype="bfloat16", **shapes) as made:
    scores = [score for found in made.logprobs(prompts) for score in found[1:]]
    names = [one["name"] for one in made.stats()["compiled"]]
    programs = {name: hashlib.sha256(made.program_text(name).encode()).hexdigest()
                for name in names}
    lowered = made.stats()["lowered_at_start"]
home = Path(os.environ["XDG_CACHE_HOME"], "jaxprefill", "store")
tuned = {str(path.relative_to(home)): path.stat().st_mtime_ns
         for path in home.rglob("*") if path.is_file() and path.suffix not in (".bin", ".json")}
print(json.dumps(dict(scores=scores, programs=programs, lowered=lowered, tuned=tuned)))
"""


def test_what_was_tuned_is_read_back_and_a_second_compilation_is_the_same(tmp_path):
    first = json.loads(in_another_process("-c", COMPILED, cache=tmp_path).splitlines()[-1])
    shutil.rmtree(tmp_path / "jaxprefill" / "store" / "executables")
    second = json.loads(in_another_process("-c", COMPILED, cache=tmp_path).splitlines()[-1])
    assert len(first["tuned"]) > 3, "something was tuned"
    assert second["lowered"] >= len(second["programs"]), "all was compiled anew"
    assert second["scores"] == first["scores"]
    names = first["programs"]
    assert [name for name in names if second["programs"][name] != names[name]] == []
    assert set(second["tuned"].items()) - set(first["tuned"].items()) == set()


STORED = """
import json, sys, warnings
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
import numpy as np
from tests.tiny import TinyCheckpoint, tiny_engine

prompts = [np.random.default_rng(n).integers(0, 250, n).tolist() for n in (200, 100)]
held = TinyCheckpoint(num_q_heads=8, head_dim=128, hidden_size=64, context_length=256)
shapes = dict(prefill_buckets=(32, 128), page_size=16, store=True, attention_backend=sys.argv[1])
with tiny_engine(held, dtype="bfloat16", **shapes) as made:
    scores = [score for found in made.logprobs(prompts) for score in found[1:]]
    stats = made.stats()
loaded = [one["name"] for one in stats["compiled"] if one["load_s"] is not None]
print(json.dumps(dict(scores=scores, loaded=len(loaded), all=len(stats["compiled"]),
                      passes=stats["passes"], late=stats["compilations_after_ready"])))
"""


@pytest.mark.parametrize("backend", ["pallas_triton", "pallas_mosaic_gpu"])
def test_stored_executables_give_another_process_the_same_scores(backend, tmp_path):
    if backend == "pallas_mosaic_gpu" and describe_device().compute_capability != "9.0":
        pytest.skip("no Hopper GPU")
    first, second = (
        json.loads(in_another_process("-c", STORED, backend, cache=tmp_path).splitlines()[-1])
        for _ in range(2)
    )
    assert first["loaded"] == 0 and second["loaded"] == second["all"]
    assert second["scores"] == first["scores"] and np.std(first["scores"]) > 0.1
    assert first["passes"]["full"] > 1 and second["late"] == 0
