"""The Pallas/Triton attention kernel: numerics by interpretation, and lowering for CUDA, without a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxprefill.kernels.attention.api import NO_ROW
from jaxprefill.kernels.attention.cases import CASES, AttentionCase, make_inputs
from jaxprefill.kernels.attention.pallas_triton import PALLAS_TRITON, make_attend
from jaxprefill.kernels.attention.reference import read_pages, reference_attention

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
SUPPORTED = [case for case in CASES if case.head_dim & (case.head_dim - 1) == 0]
on_supported_cases = pytest.mark.parametrize("case", SUPPORTED, ids=str)


def run(case, inputs, dtype=jnp.float32, *, interpret=True):
    """(out, pool) of the kernel over `make_inputs`' arrays."""
    attend = jax.jit(make_attend(inputs.tiles, interpret=interpret))
    arrays = [jnp.asarray(array, dtype) for array in (inputs.q, inputs.k, inputs.v, inputs.pool)]
    out, pool = attend(*arrays, inputs.batch, jnp.int32(inputs.first_page))
    return np.asarray(out, np.float32), np.asarray(pool, np.float32)


def expected(case, inputs, dtype=jnp.float32):
    """Real rows by the reference, request by request, and the pool with the new rows written."""
    q, k, v, pool = (
        np.asarray(jnp.asarray(array, dtype), np.float32)
        for array in (inputs.q, inputs.k, inputs.v, inputs.pool)
    )
    pool, size = pool.copy(), case.page_size
    rows = np.asarray(inputs.batch.kv_rows)
    live = rows != NO_ROW
    pages, offsets = rows[live] // size + inputs.first_page, rows[live] % size
    pool[0][:, pages, offsets] = k[live].transpose(1, 0, 2)
    pool[1][:, pages, offsets] = v[live].transpose(1, 0, 2)
    parts, start = [], 0
    for q_len, kv_len, own in zip(case.q_lens, case.kv_lens, inputs.pages, strict=True):
        own = [page + inputs.first_page for page in own]
        keys, values = read_pages(jnp.asarray(pool), own, kv_len)
        parts.append(reference_attention(jnp.asarray(q[start : start + q_len]), keys, values))
        start += q_len
    return np.concatenate([np.zeros((0, *q.shape[1:]), np.float32), *parts]), pool


def relative_error(got, want):
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


@pytest.mark.parametrize("peaked", [False, True], ids=["uniform", "peaked"])
@on_supported_cases
def test_output_and_pool_equal_the_reference(case, peaked):
    inputs = make_inputs(case, PALLAS_TRITON, peaked=peaked)
    (out, pool), (want, want_pool) = run(case, inputs), expected(case, inputs)
    np.testing.assert_allclose(out[: len(want)], want, rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(pool, want_pool)


def poisoned(case, inputs):
    """The inputs with NaN wherever nothing may be read: padding tokens, unowned and unwritten rows."""
    live = np.asarray(inputs.batch.kv_rows) != NO_ROW
    pool, size = np.full_like(inputs.pool, np.nan), case.page_size
    for q_len, kv_len, own in zip(case.q_lens, case.kv_lens, inputs.pages, strict=True):
        at = np.arange(kv_len - q_len)
        pages = np.asarray(own, np.int64)[at // size] + inputs.first_page
        pool[:, :, pages, at % size] = inputs.pool[:, :, pages, at % size]
    mask = live[:, None, None]
    q, k, v = (np.where(mask, x, np.float32(np.nan)) for x in (inputs.q, inputs.k, inputs.v))
    return inputs.__class__(**(vars(inputs) | {"q": q, "k": k, "v": v, "pool": pool}))


@on_supported_cases
def test_nan_in_what_must_not_be_read_changes_no_bit(case):
    inputs = make_inputs(case, PALLAS_TRITON)
    clean, _ = run(case, inputs)
    dirty, _ = run(case, poisoned(case, inputs))
    real = case.num_real_tokens
    np.testing.assert_array_equal(dirty[:real], clean[:real])


def lowered(tiles, dtype, *, num_tokens, num_slots, num_pages=4096, layers=2):
    """StableHLO of layers of Qwen3-8B's attention for an H200 that is not there."""
    shape = jax.ShapeDtypeStruct
    q, kv = shape((num_tokens, 32, 128), dtype), shape((num_tokens, 8, 128), dtype)
    pool = shape((2, 8, num_pages, 16, 128), dtype)
    batch = jax.eval_shape(functools.partial(_zero_batch, tiles, num_tokens, num_slots))

    def body(q, k, v, pool, batch):
        for layer in range(layers):
            q, pool = make_attend(tiles)(q, k, v, pool, batch, jnp.int32(layer * 512))
        return q, pool

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(body, donate_argnums=3).trace(q, kv, kv, pool, batch)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def _zero_batch(tiles, num_tokens, num_slots):
    case = AttentionCase(
        name="empty", q_lens=(), kv_lens=(), num_tokens=num_tokens, num_slots=num_slots
    )
    batch = make_inputs(case, PALLAS_TRITON).batch
    zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
    return batch._replace(
        page_table=zeros((num_slots, tiles.pages_per_slot)),
        tile_slot=zeros(tiles.num_tiles),
        tile_start=zeros(tiles.num_tiles),
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("num_tokens", "num_slots", "is_decode"),
    [(16, 64, False), (512, 16, False), (8192, 64, False), (1, 1, True), (64, 64, True)],
)
def test_kernel_lowers_for_cuda_without_a_gpu(num_tokens, num_slots, is_decode, dtype):
    tiles = PALLAS_TRITON.tile_shape(num_tokens, num_slots, 4096, page_size=16, is_decode=is_decode)
    text = lowered(tiles, dtype, num_tokens=num_tokens, num_slots=num_slots)
    assert text.count("@__gpu$xla.gpu.triton") >= 2
    assert "scatter" not in text and "while" not in text.split("__gpu$xla")[0]


@pytest.mark.gpu
@pytest.mark.parametrize("peaked", [False, True], ids=["uniform", "peaked"])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)], ids=["float32", "bfloat16"]
)
@on_supported_cases
def test_kernel_equals_the_reference_on_a_gpu(case, dtype, limit, peaked):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    inputs = make_inputs(case, PALLAS_TRITON, peaked=peaked)
    out, pool = run(case, poisoned(case, inputs), dtype, interpret=False)
    with jax.default_matmul_precision("highest"):
        want, want_pool = expected(case, inputs, dtype)
    live = ~np.isnan(pool)
    np.testing.assert_array_equal(pool[live], want_pool[live])
    assert relative_error(out[: len(want)], want) < limit
