"""The loop over layers that a CPU compiles: what unrolled layers give, and no weight is copied."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxprefill.batch import Batch, BatchRow
from jaxprefill.cache.kv_cache import pool_shapes
from jaxprefill.device_state import StateShapes
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.models.llama import Llama
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.prefill.buckets import ShapeKey
from jaxprefill.prefill.compiler import CPU_OPTIONS, compile_job
from jaxprefill.prefill.executable import PrefillExecutable
from jaxprefill.prefill.forward import Body
from jaxprefill.prefill.padding import BufferLayout, pad
from tests.tiny import tiny_config

KEY = ShapeKey(16, 2, 32)
PAGE = 8
CONFIG = tiny_config(
    architecture="Qwen3ForCausalLM",
    hidden_size=128,
    mlp_size=512,
    num_layers=3,
    sliding_window=4,
    sliding_layers=(False, False, True),
    has_qkv_bias=True,
    has_output_bias=True,
    has_mlp_bias=True,
    has_qk_norm=True,
)


def compiled_body(*, is_looped):
    """(executable, its record, the arrays it takes)."""
    mesh, dtype = make_mesh(), jnp.dtype("float32")
    tree = model_tree(CONFIG, dtype, mesh)
    tiles = XLA.tile_shape(*KEY, page_size=PAGE, is_decode=False)
    layout = BufferLayout(KEY, tiles, PAGE)
    rng = np.random.default_rng(0)
    leaves = tuple(
        jnp.asarray(rng.normal(size=leaf.shape) * leaf.shape[-1] ** -0.5, leaf.dtype)
        for leaf in tree.shapes
    )
    shapes = pool_shapes(Llama.cache_spec(CONFIG), 8, PAGE, dtype=dtype, mesh=mesh)
    pools = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)
    hidden = jnp.zeros((KEY.num_tokens, CONFIG.hidden_size), jnp.float32)
    rows = (
        BatchRow(request_id="a", slot=0, token_ids=list(range(5)), kv_len=5, pages=[3]),
        BatchRow(request_id="b", slot=1, token_ids=list(range(9)), kv_len=9, pages=[1, 6]),
    )
    buffer = pad(Batch(rows=rows, is_decode=False), layout)
    arguments = (leaves, pools, hidden, jnp.zeros(2, jnp.int32), buffer)
    body = Body(tree, XLA, layout, is_looped=is_looped)
    whole = jax.eval_shape(lambda *args: args, *arguments)
    names = ("leaves", "pools", "hidden", "last_tokens")
    state = StateShapes(**dict(zip(names, whole, strict=False)), head=None, history=None, bias=None)
    compiled = compile_job(PrefillExecutable.job("body", body, state), CPU_OPTIONS)
    return compiled.call, compiled.record, arguments


def test_looped_layers_equal_unrolled_ones_and_copy_no_weight():
    call, _, arguments = compiled_body(is_looped=False)
    (wanted_pool,), wanted = call(*arguments)
    call, record, arguments = compiled_body(is_looped=True)
    largest = max(leaf.nbytes for leaf in arguments[0])
    (pool,), hidden = call(*arguments)
    np.testing.assert_allclose(hidden[:14], wanted[:14], atol=1e-5)
    np.testing.assert_allclose(pool, wanted_pool, atol=1e-5)
    assert record.temp_bytes < largest
