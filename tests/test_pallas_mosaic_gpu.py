"""The Mosaic attention kernel: lowering for Hopper, numbers there; what surrounds it, anywhere."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxprefill.errors import KernelUnsupported
from jaxprefill.kernels.attention import (
    CAUSAL,
    AttentionNeeds,
    AttentionSpec,
    mosaic_kernel,
    select_backend,
)
from jaxprefill.kernels.attention.api import NO_ROW
from jaxprefill.kernels.attention.cases import AttentionCase, make_inputs
from jaxprefill.kernels.attention.pallas_mosaic_gpu import PALLAS_MOSAIC_GPU
from jaxprefill.kernels.attention.pallas_triton import PALLAS_TRITON
from jaxprefill.kernels.attention.whole_tiles import merge_parts, write_pool
from tests.test_pallas_triton import arguments, expected, poisoned, pool_after, rounded

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
SIZES = {"q_heads": 8, "kv_heads": 2, "head_dim": 128, "num_tokens": 2048, "max_context": 2048}
CASES = (
    AttentionCase(name="one_request", q_lens=(2048,), kv_lens=(2048,), **SIZES),
    AttentionCase(name="one_token", q_lens=(1,), kv_lens=(1,), **SIZES),
    AttentionCase(name="empty", q_lens=(), kv_lens=(), **SIZES),
    AttentionCase(name="ragged", q_lens=(63, 64, 65, 200), kv_lens=(63, 64, 65, 200), **SIZES),
    AttentionCase(
        name="prefixes", q_lens=(1, 130, 7, 300), kv_lens=(900, 131, 1030, 1324), **SIZES
    ),
    AttentionCase(
        name="key_blocks", q_lens=(100, 3, 1), kv_lens=(128, 129, 256), **SIZES | {"num_slots": 8}
    ),
    AttentionCase(name="last_rows", q_lens=(1986, 62), kv_lens=(1986, 1500), **SIZES),
    AttentionCase(name="pages_of_8", q_lens=(77, 90), kv_lens=(377, 90), page_size=8, **SIZES),
    AttentionCase(name="pages_of_128", q_lens=(77, 90), kv_lens=(377, 90), page_size=128, **SIZES),
    AttentionCase(
        name="group_of_two", q_lens=(100, 300), kv_lens=(700, 300),
        **SIZES | {"q_heads": 4},
    ),
)  # fmt: skip
NEEDS = AttentionNeeds(
    platform="gpu", dtype="bfloat16", page_size=16, head_dim=128, group=4, compute_capability="9.0"
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"compute_capability": "10.0"}, "9.0, not on 10.0"),
        ({"compute_capability": None}, "another chip"),
        ({"dtype": "float32"}, "not float32"),
        ({"head_dim": 64}, "128, not 64"),
        ({"page_size": 4}, "128 tokens, not 4"),
        ({"group": 7}, "even number"),
        ({"specs": (CAUSAL, AttentionSpec(window=64))}, "no sliding window"),
        ({"platform": "cpu"}, "not on cpu"),
    ],
)
def test_its_name_takes_it_on_hopper_for_what_it_can_do(change, reason):
    assert select_backend("pallas_mosaic_gpu", NEEDS) is PALLAS_MOSAIC_GPU
    assert select_backend("auto", NEEDS) is PALLAS_TRITON
    with pytest.raises(KernelUnsupported, match=reason):
        select_backend("pallas_mosaic_gpu", replace(NEEDS, **change))


def test_decode_and_small_buckets_are_tiled_for_the_triton_kernel():
    for num_tokens, is_decode in ((64, True), (4096, True), (16, False), (1536, False)):
        shape = (num_tokens, 64, 4096)
        tiles = [
            backend.tile_shape(*shape, page_size=16, is_decode=is_decode)
            for backend in (PALLAS_MOSAIC_GPU, PALLAS_TRITON)
        ]
        assert tiles[0] == tiles[1]


def test_it_lowers_for_hopper_without_a_gpu():
    case = AttentionCase(
        name="shape", q_lens=(), kv_lens=(), q_heads=32, kv_heads=8, head_dim=128,
        num_tokens=2048, num_slots=16, max_context=4096,
    )  # fmt: skip
    inputs = make_inputs(case, PALLAS_MOSAIC_GPU)
    assert inputs.tiles[:2] == (mosaic_kernel.ROWS, mosaic_kernel.KEYS)
    attend = PALLAS_MOSAIC_GPU.make(inputs.tiles, CAUSAL)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments(inputs, jnp.bfloat16)
    )
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(attend).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    assert text.count("@__gpu$xla.gpu.triton") == 2
    assert "stablehlo.while" not in text and "stablehlo.scatter" not in text


RAGGED = AttentionCase(
    name="ragged", q_lens=(20, 1, 2, 16), kv_lens=(36, 16, 33, 16), head_dim=16, num_tokens=48
)


def test_write_pool_writes_the_new_rows_and_zeroes_what_follows_a_request_in_its_page():
    inputs = make_inputs(RAGGED, PALLAS_TRITON)  # tiles of 16
    rows = np.array(inputs.batch.kv_rows)
    rows[[0, 1, 20]] = NO_ROW  # shared: the second request's only one
    batch = inputs.batch._replace(kv_rows=jnp.asarray(rows))
    want = pool_after(RAGGED, replace(inputs, batch=batch))
    for number, kv_len in enumerate(RAGGED.kv_lens):
        if number != 1 and kv_len % 16:
            want[1][:, inputs.first_page + inputs.pages[number][-1], kv_len % 16 :] = 0
    operands = (*map(jnp.asarray, (inputs.pool, inputs.k, inputs.v)), batch)
    pool = write_pool(*operands, jnp.int32(inputs.first_page), tile_q=16, interpret=True)
    np.testing.assert_array_equal(pool, want)


def test_merge_parts_fills_in_the_rows_of_tiles_that_are_not_full_and_zeroes_padding():
    inputs = make_inputs(RAGGED, PALLAS_TRITON)
    out, parts = inputs.q.copy(), np.full((4 * 16, *inputs.q.shape[1:]), np.nan, np.float32)
    for number, (q_len, first) in enumerate(zip(RAGGED.q_lens, (0, 20, 21, 23), strict=True)):
        start = q_len - q_len % 16
        moved = max(first + start + 16 - RAGGED.num_tokens, 0)
        row = 16 * number + moved
        parts[row : row + q_len % 16] = out[first + start : first + q_len]
        out[first + start : first + q_len] = np.nan
    out[RAGGED.num_real_tokens :] = np.nan
    want = np.where(np.arange(RAGGED.num_tokens)[:, None, None] < 39, inputs.q, 0)
    arrays = (jnp.asarray(out), jnp.asarray(parts))
    merged = merge_parts(*arrays, inputs.batch, tile_q=16, interpret=True)
    np.testing.assert_array_equal(merged, want)


def test_padding_that_is_no_whole_number_of_tiles_becomes_zero():
    case = AttentionCase(name="odd", q_lens=(17, 3), kv_lens=(17, 3), num_tokens=47, num_slots=2)
    inputs = make_inputs(case, PALLAS_TRITON)
    out, parts = jnp.full(inputs.q.shape, jnp.nan), jnp.ones((2 * 16, *inputs.q.shape[1:]))
    merged = merge_parts(out, parts, inputs.batch, tile_q=16, interpret=True)
    np.testing.assert_array_equal(merged[16:20], 1)
    np.testing.assert_array_equal(merged[20:], 0)


@pytest.fixture
def on_hopper():
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        pytest.skip("no Hopper GPU")


def with_one_buffer(attend, batch):
    """`attend`, jitted as a body calls it, and the batch: its integers are slices of one array."""
    fields, structure = jax.tree.flatten(batch)
    buffer = jnp.concatenate([field.reshape(-1) for field in fields])

    def call(q, k, v, pool, buffer, first_page):
        ends = np.cumsum([field.size for field in fields])
        parts = [
            buffer[end - field.size : end].reshape(field.shape)
            for field, end in zip(fields, ends, strict=True)
        ]
        return attend(q, k, v, pool, jax.tree.unflatten(structure, parts), first_page)

    return jax.jit(call), buffer


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_equals_the_reference_whatever_lies_beside_it(on_hopper, case):
    """Peaked inputs; NaN in padding tokens and in pool rows that no request has cached."""
    inputs = rounded(make_inputs(case, PALLAS_MOSAIC_GPU, peaked=True), jnp.bfloat16)
    attend = PALLAS_MOSAIC_GPU.make(inputs.tiles, CAUSAL)
    (attend, buffer), outs = with_one_buffer(attend, inputs.batch), []
    for given in (inputs, poisoned(case, inputs)):
        *arrays, _, first_page = arguments(given, jnp.bfloat16)
        out, pool = attend(*arrays, buffer, first_page)
        outs.append(np.asarray(out, np.float32)[: case.num_real_tokens])
        assert not out[case.num_real_tokens :].any()
    np.testing.assert_array_equal(*outs)
    want = expected(case, inputs)
    assert np.linalg.norm(outs[0] - want) <= 5e-3 * np.linalg.norm(want)
    rows = np.asarray(inputs.batch.kv_rows)
    rows = rows[rows != NO_ROW] + inputs.first_page * case.page_size
    found, after = (
        np.asarray(x, np.float32).reshape(2, case.kv_heads, -1, case.head_dim)[:, :, rows]
        for x in (pool, pool_after(case, inputs))
    )
    np.testing.assert_array_equal(found, after)
