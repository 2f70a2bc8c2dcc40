"""The Pallas/Triton attention kernel without a GPU: interpreted numerics, lowering for CUDA."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxprefill.batch import Batch, BatchRow
from jaxprefill.cache.kv_cache import pool_shapes
from jaxprefill.kernels.attention import pallas_triton
from jaxprefill.kernels.attention.api import NO_ROW
from jaxprefill.kernels.attention.cases import CASES, AttentionCase, make_inputs
from jaxprefill.kernels.attention.pallas_triton import (
    PALLAS_TRITON,
    make_attend,
    make_attend_to_heads,
    num_arrivals,
)
from jaxprefill.kernels.attention.reference import read_pages, reference_attention
from jaxprefill.kernels.attention.rotation import norm_and_rotate
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.models.layers import rms_norm, rotate
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.prefill.buckets import ShapeKey
from jaxprefill.prefill.forward import Body
from jaxprefill.prefill.padding import BufferLayout, pad
from jaxprefill.weights.load import load_leaves
from tests.test_oracle import open_fixture

# Results need no optimised code, and there are many to compile.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
SPLIT_CASES = (
    AttentionCase(
        name="split_prefill", q_lens=(30, 3), kv_lens=(1000, 3), q_heads=8, num_tokens=64,
        max_context=1024,
    ),
    AttentionCase(
        name="split_decode", q_lens=(1, 1, 1), kv_lens=(900, 256, 1), q_heads=8, num_tokens=4,
        max_context=1024, is_decode=True,
    ),
    AttentionCase(
        name="split_window", q_lens=(30,), kv_lens=(930,), q_heads=8, num_tokens=64,
        max_context=1024, window=600,
    ),
    AttentionCase(
        name="split_soft_cap_and_sinks", q_lens=(30, 3), kv_lens=(930, 3), q_heads=8,
        num_tokens=64, max_context=1024, window=600, soft_cap=2.0, has_sinks=True,
    ),
    AttentionCase(
        name="split_decode_sinks", q_lens=(1, 1, 1), kv_lens=(900, 256, 1), q_heads=8,
        num_tokens=4, max_context=1024, is_decode=True, has_sinks=True,
    ),
)  # fmt: skip
SUPPORTED = tuple(
    case for case in (*CASES, *SPLIT_CASES) if case.head_dim & (case.head_dim - 1) == 0
)
SHARED_CASE = AttentionCase(name="shared", q_lens=(20, 1, 2), kv_lens=(36, 16, 32))
# Interpretation takes seconds a case: these run always, the slow ones add a kind each, and the
# rest is marked long (on a GPU every case is quick, and run).
QUICK = {
    "plain", "chunk_after_unaligned_prefix", "gqa_7", "decode_one_slot", "decode_rows_and_chunk",
    "split_prefill", "split_decode_sinks", "split_soft_cap_and_sinks",
}  # fmt: skip
SLOW = {
    "tile_64_exact_and_plus_one", "many_short", "empty_batch", "context_straddles_key_block",
    "head_dim_128", "page_size_128", "decode_uneven", "split_window",
    "decode_page_size_1", "window_after_long_prefix", "window_uneven_rows_and_chunk",
}  # fmt: skip


def marked(case):
    """The case as a parameter, marked by how often it is worth its time."""
    rare = pytest.mark.slow if case.name in SLOW else pytest.mark.long
    return pytest.param(case, id=case.name, marks=() if case.name in QUICK else rare)


on_supported_cases = pytest.mark.parametrize("case", list(map(marked, SUPPORTED)))


@functools.cache
def compiled(case, dtype):
    """One compilation a case and dtype serves every test of it; interpreted on a CPU."""
    inputs = make_inputs(case, PALLAS_TRITON)
    is_cpu = jax.default_backend() == "cpu"
    attend = make_attend(inputs.tiles, case.spec, interpret=is_cpu)
    lowered = jax.jit(attend).lower(*arguments(inputs, dtype))
    return lowered.compile(compiler_options=FAST_COMPILE if is_cpu else {})


def arguments(inputs, dtype=jnp.float32):
    arrays = (jnp.asarray(getattr(inputs, name), dtype) for name in ("q", "k", "v", "pool"))
    sinks = () if inputs.sinks is None else (jnp.asarray(inputs.sinks, dtype),)
    return (*arrays, inputs.batch, jnp.int32(inputs.first_page), *sinks)


def run(case, inputs, dtype=jnp.float32):
    """(out, pool) of the kernel over `make_inputs`' arrays."""
    out, pool = compiled(case, dtype)(*arguments(inputs, dtype))
    return np.asarray(out, np.float32), np.asarray(pool, np.float32)


def rounded(inputs, dtype):
    """The inputs as float32, after rounding to `dtype`."""
    names = ("q", "k", "v", "pool")
    names += () if inputs.sinks is None else ("sinks",)
    cast = {name: np.asarray(getattr(inputs, name).astype(dtype), np.float32) for name in names}
    return replace(inputs, **cast)


def pool_after(case, inputs):
    """The pool with every new token's K and V in its row, and nothing else changed."""
    pool, rows = inputs.pool.copy(), np.asarray(inputs.batch.kv_rows)
    live = rows != NO_ROW
    pages, at = rows[live] // case.page_size + inputs.first_page, rows[live] % case.page_size
    pool[0][:, pages, at] = inputs.k[live].transpose(1, 0, 2)
    pool[1][:, pages, at] = inputs.v[live].transpose(1, 0, 2)
    return pool


@functools.cache
def reference(case, pages):
    """The dense reference of a whole case, compiled once."""

    def whole(q, pool, sinks):
        parts, start = [], 0
        for q_len, kv_len, own in zip(case.q_lens, case.kv_lens, pages, strict=True):
            keys, values = read_pages(pool, list(own), kv_len)
            queries = q[start : start + q_len]
            parts.append(reference_attention(queries, keys, values, case.spec, sinks))
            start += q_len
        return jnp.concatenate(parts)

    return jax.jit(whole, compiler_options=FAST_COMPILE if jax.default_backend() == "cpu" else {})


def expected(case, inputs):
    """Outputs of the real rows."""
    if not case.q_lens:
        return inputs.q[:0]
    pages = tuple(tuple(inputs.first_page + page for page in own) for own in inputs.pages)
    with jax.default_matmul_precision("highest"):
        return np.asarray(reference(case, pages)(inputs.q, pool_after(case, inputs), inputs.sinks))


def poisoned(case, inputs):
    """The inputs with NaN in padding tokens and in every pool row that no request has cached."""
    live = (np.asarray(inputs.batch.kv_rows) != NO_ROW)[:, None, None]
    pool, size = np.full_like(inputs.pool, np.nan), case.page_size
    for q_len, kv_len, own in zip(case.q_lens, case.kv_lens, inputs.pages, strict=True):
        cached = np.arange(kv_len - q_len)
        pages = np.asarray(own, np.int64)[cached // size] + inputs.first_page
        pool[:, :, pages, cached % size] = inputs.pool[:, :, pages, cached % size]
    q, k, v = (np.where(live, x, np.float32(np.nan)) for x in (inputs.q, inputs.k, inputs.v))
    return replace(inputs, q=q, k=k, v=v, pool=pool)


@on_supported_cases
@pytest.mark.parametrize("peaked", [False, True], ids=["uniform", "peaked"])
def test_output_and_pool_equal_the_reference(case, peaked):
    inputs = make_inputs(case, PALLAS_TRITON, peaked=peaked)
    out, pool = run(case, inputs)
    want = expected(case, inputs)
    np.testing.assert_allclose(out[: len(want)], want, rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(pool, pool_after(case, inputs))


@on_supported_cases
def test_nan_in_what_must_not_be_read_changes_no_bit(case):
    inputs = make_inputs(case, PALLAS_TRITON, seed=1)
    clean, _ = run(case, inputs)
    dirty, _ = run(case, poisoned(case, inputs))
    real = case.num_real_tokens
    np.testing.assert_array_equal(dirty[:real], clean[:real])


PROJECTION_CASES = tuple(
    case
    for case in SUPPORTED
    if case.name in ("chunk_after_long_prefix", "split_prefill", "split_window", "decode_uneven")
)


@functools.cache
def compiled_projection(case, has_norms, dtype):
    inputs, is_cpu = make_inputs(case, PALLAS_TRITON), jax.default_backend() == "cpu"
    attend = make_attend_to_heads(inputs.tiles, case.spec, interpret=is_cpu)

    def attend_to_projection(qkv, rotary, qk_norms, *rest):
        sizes = {"kv_heads": case.kv_heads, "norm_eps": 1e-6}
        return attend(norm_and_rotate(qkv, rotary, qk_norms, **sizes, interpret=is_cpu), *rest)

    operands = projection(case, inputs, has_norms=has_norms, dtype=dtype)
    pool = jnp.asarray(inputs.pool, dtype)
    counters = jnp.zeros(num_arrivals(inputs.tiles, case.kv_heads), jnp.int32)
    arguments = (*operands, pool, inputs.batch, jnp.int32(inputs.first_page), counters)
    lowered = jax.jit(attend_to_projection).lower(*arguments)
    return lowered.compile(compiler_options=FAST_COMPILE if is_cpu else {})


def projection(case, inputs, *, has_norms, dtype=jnp.float32):
    """(qkv, rotary, qk_norms) with the inputs' q, k and v as the projection's rows."""
    rng = np.random.default_rng(7)
    angle = rng.uniform(0, 6, (case.num_tokens, case.head_dim // 2)).astype(np.float32)
    norms = jnp.asarray(rng.uniform(0.5, 2, (2, case.head_dim)), dtype) if has_norms else None
    qkv = np.concatenate([inputs.q, inputs.k, inputs.v], axis=1)
    return jnp.asarray(qkv, dtype), jnp.stack([np.cos(angle), np.sin(angle)]), norms


def rotated(case, inputs, operands):
    """The inputs with q and k as a layer would hand them to attention."""
    qkv, rotary, norms = operands
    heads = case.q_heads + case.kv_heads
    rows = jnp.asarray(qkv, jnp.float32)[:, :heads]
    if norms is not None:
        by_head = np.repeat([0, 1], [case.q_heads, case.kv_heads])
        rows = rms_norm(rows, jnp.ones(case.head_dim), 1e-6) * norms[by_head].astype(jnp.float32)
    rows = np.asarray(rotate(rows, rotary).astype(qkv.dtype), np.float32)
    return replace(inputs, q=rows[:, : case.q_heads], k=rows[:, case.q_heads :])


def test_tokens_whose_kv_is_shared_write_no_row(monkeypatch):
    """Tiles of 16: the first and the last lack some rows, the second request's lacks its only one.

    What marks them is a row that exists, for a store beyond the pool is dropped when interpreted.
    """
    inputs = make_inputs(SHARED_CASE, PALLAS_TRITON)
    rows, lacking = np.array(inputs.batch.kv_rows), [0, 1, 2, 20, 21]
    rows[lacking] = NO_ROW
    want = pool_after(
        SHARED_CASE, replace(inputs, batch=inputs.batch._replace(kv_rows=jnp.asarray(rows)))
    )
    mark = inputs.spare_pages[0] * SHARED_CASE.page_size
    monkeypatch.setattr(pallas_triton, "NO_ROW", mark)
    rows[lacking] = mark
    inputs = replace(inputs, batch=inputs.batch._replace(kv_rows=jnp.asarray(rows)))
    np.testing.assert_array_equal(run(SHARED_CASE, inputs)[1], want)


@pytest.mark.parametrize("has_norms", [False, True], ids=["no_norms", "norms"])
@pytest.mark.parametrize("case", list(map(marked, PROJECTION_CASES)))
def test_attention_to_a_projection_norms_and_rotates_its_rows(case, has_norms):
    dtype, limit = (jnp.float32, 1e-5) if jax.default_backend() == "cpu" else (jnp.bfloat16, 1e-2)
    inputs = poisoned(case, rounded(make_inputs(case, PALLAS_TRITON, peaked=True), dtype))
    operands = projection(case, inputs, has_norms=has_norms, dtype=dtype)
    pool = jnp.asarray(inputs.pool, dtype)
    call = compiled_projection(case, has_norms, dtype)
    counters = jnp.zeros(num_arrivals(inputs.tiles, case.kv_heads), jnp.int32)
    out, found_pool, counters = call(
        *operands, pool, inputs.batch, jnp.int32(inputs.first_page), counters
    )
    assert not np.asarray(counters).any(), "ready for the next launch"
    out, found_pool = np.asarray(out, np.float32), np.asarray(found_pool, np.float32)
    clean = rotated(case, inputs, operands)
    want, want_pool = expected(case, clean), pool_after(case, clean)
    error = np.linalg.norm(out[: len(want)] - want)
    assert error <= limit * np.linalg.norm(want)
    written = ~np.isnan(found_pool)
    assert written.sum() == (~np.isnan(want_pool)).sum()
    np.testing.assert_allclose(found_pool[written], want_pool[written], rtol=limit, atol=limit)


@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
def test_split_cases_reach_the_merge(case):
    inputs = make_inputs(case, PALLAS_TRITON)
    text = str(jax.make_jaxpr(make_attend(inputs.tiles, case.spec))(*arguments(inputs)))
    assert "merge_attention_splits" in text


LAYERS = {
    "qwen3_8b": dict(q_heads=32, kv_heads=8, head_dim=128),
    "gemma2_9b": dict(q_heads=16, kv_heads=8, head_dim=256, window=4096, soft_cap=50.0),
    "gpt_oss": dict(q_heads=64, kv_heads=8, head_dim=64, window=128, has_sinks=True),
}


@pytest.mark.parametrize(
    ("layer", "num_tokens", "num_slots", "is_decode", "num_kernels", "dtype"),
    [
        *(("qwen3_8b", *shape, dtype) for dtype in (jnp.bfloat16, jnp.float32) for shape in (
            (16, 64, False, 2), (512, 16, False, 1), (8192, 64, False, 1), (1, 1, True, 2),
            (64, 64, True, 1),
        )),
        ("gemma2_9b", 16, 64, False, 2, jnp.bfloat16),
        ("gpt_oss", 512, 16, False, 1, jnp.float32),
        ("gpt_oss", 64, 64, True, 1, jnp.bfloat16),
    ],
)  # fmt: skip
def test_a_models_attention_lowers_for_cuda_without_a_gpu(
    layer, num_tokens, num_slots, is_decode, num_kernels, dtype
):
    case = AttentionCase(
        name="shape", q_lens=(), kv_lens=(), num_tokens=num_tokens, num_slots=num_slots,
        max_context=4096, is_decode=is_decode, **LAYERS[layer],
    )  # fmt: skip
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    inputs = make_inputs(case, PALLAS_TRITON)
    shapes = [
        jax.ShapeDtypeStruct(array.shape, dtype)
        for array in (inputs.q, inputs.k, inputs.v, inputs.pool)
    ]
    sinks = () if inputs.sinks is None else (jnp.asarray(inputs.sinks, dtype),)
    rest = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (inputs.batch, jnp.int32(0), *sinks)
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        attend = make_attend(inputs.tiles, case.spec)
        traced = jax.jit(attend, donate_argnums=3).trace(*shapes, *rest)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == num_kernels
    assert "stablehlo.scatter" not in text
    assert "stablehlo.while" not in text


INTERPRETED = replace(PALLAS_TRITON, make=functools.partial(make_attend, interpret=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2_soft_caps", "gpt_oss_sinks"])
def test_a_whole_pass_with_the_kernel_equals_plain_jax(name):
    """Windows, soft caps and sinks as the models ask for them, behind a cached prefix."""
    checkpoint = open_fixture(name)
    tree = model_tree(checkpoint.config, jnp.dtype("float32"), make_mesh())
    leaves, key, rng = load_leaves(checkpoint, tree), ShapeKey(32, 2, 64), np.random.default_rng(0)
    rows = tuple(
        BatchRow(
            request_id=str(slot), slot=slot, kv_len=kv_len, pages=pages,
            token_ids=rng.integers(0, 250, q_len).tolist(),
        )
        for slot, (q_len, kv_len, pages) in enumerate([(19, 41, (5, 2, 7)), (2, 2, (0,))])
    )  # fmt: skip
    spec = type(tree.bind(leaves)).cache_spec(tree.config)
    shape = pool_shapes(spec, 8, 16, dtype=jnp.dtype("float32"), mesh=make_mesh())[0].shape
    pool, found = jnp.asarray(rng.normal(size=shape), jnp.float32), []
    for backend in (INTERPRETED, XLA):
        layout = BufferLayout(key, backend.tile_shape(*key, page_size=16, is_decode=False), 16)
        call = jax.jit(Body(tree, backend, layout).__call__, compiler_options=FAST_COMPILE)
        hidden = jnp.zeros((32, tree.config.hidden_size))
        buffer = pad(Batch(rows=rows, is_decode=False), layout)
        (after,), hidden = call(leaves, (pool,), hidden, jnp.zeros(2, jnp.int32), buffer)
        found.append([np.asarray(after), np.asarray(hidden)[:21]])
    for kernel, plain in zip(*found, strict=True):
        np.testing.assert_allclose(kernel, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("peaked", [False, True], ids=["uniform", "peaked"])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_kernel_equals_the_reference_on_a_gpu(case, dtype, limit, peaked):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    inputs = rounded(make_inputs(case, PALLAS_TRITON, peaked=peaked), dtype)
    out, pool = run(case, poisoned(case, inputs), dtype)
    want, want_pool = expected(case, inputs), pool_after(case, inputs)
    written = ~np.isnan(pool)
    np.testing.assert_array_equal(pool[written], want_pool[written])
    error = np.linalg.norm(out[: len(want)] - want)
    assert error <= limit * max(np.linalg.norm(want), 1e-30)
