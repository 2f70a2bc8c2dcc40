"""Every attention backend against the dense reference, on every named case."""

import functools
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxprefill.errors import ConfigError, KernelUnsupported
from jaxprefill.kernels.attention import AttentionNeeds, plan_tiles, select_backend
from jaxprefill.kernels.attention.api import NO_ROW, as_numbers, as_stored, pool_dtype
from jaxprefill.kernels.attention.capabilities import (
    CAUSAL,
    AttentionSpec,
    Capabilities,
    combined,
)
from jaxprefill.kernels.attention.cases import CASES, AttentionCase, make_inputs
from jaxprefill.kernels.attention.hybrid import hybrid
from jaxprefill.kernels.attention.reference import read_pages, reference_attention
from jaxprefill.kernels.attention.select import BACKENDS
from jaxprefill.kernels.attention.tiles import tile_capacity
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.prefill.compiler import CPU_OPTIONS

PLATFORM = jax.default_backend()
OPTIONS = CPU_OPTIONS if PLATFORM == "cpu" else {}
# Results need no optimised code, and there are many to compile.
FAST_COMPILE = {"xla_backend_optimization_level": 0} if PLATFORM == "cpu" else {}
# Largest error over the largest output: (uniform, peaked).
TOLERANCE = {"float32": (2e-5, 2e-5), "bfloat16": (1e-2, 4e-2)}

# bfloat16 differs in dtypes alone, so a case of each kind is enough; a compilation costs most.
BFLOAT16 = (
    "plain",
    "tile_16_plus_one",
    "chunk_after_unaligned_prefix",
    "decode_rows_and_chunk",
    "context_straddles_key_block",
    "gqa_7_one_kv_head",
    "head_dim_80",
    "page_size_1",
    "decode_uneven",
    "decode_page_size_128",
    "window_uneven_rows_and_chunk",
    "decode_window_uneven",
)
on_every_case = pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES]
    + [(case, "bfloat16") for case in CASES if case.name in BFLOAT16],
    ids=str,
)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    if PLATFORM not in request.param.capabilities.platforms:
        pytest.skip(f"{request.param.name} does not run on {PLATFORM}")
    return request.param


@functools.cache
def compiled(backend, case, dtype):
    """The op at a case's shape; the pool is donated."""
    lack = backend.lacks(replace(FITS, platform=PLATFORM, specs=(case.spec,)))
    if lack is not None:
        pytest.skip(f"{backend.name} {lack}")
    inputs = make_inputs(case, backend)
    function = jax.jit(backend.make(inputs.tiles, case.spec), donate_argnums=3)
    return function.lower(*arguments(inputs, dtype)).compile(FAST_COMPILE)


def arguments(inputs, dtype):
    arrays = (jnp.asarray(getattr(inputs, name).astype(dtype)) for name in ("q", "k", "v"))
    sinks = () if inputs.sinks is None else (jnp.asarray(inputs.sinks),)
    first = jnp.int32(inputs.first_page)
    return (*arrays, stored(inputs.pool, dtype), inputs.batch, first, *sinks)


def stored(pool, dtype):
    """The pool as an engine holds it on this platform."""
    return jnp.asarray(pool.astype(dtype).view(pool_dtype(jnp.dtype(dtype), PLATFORM)))


def run(backend, case, dtype, inputs):
    out, pool = compiled(backend, case, dtype)(*arguments(inputs, dtype))
    assert out.dtype == dtype
    return np.asarray(out), np.asarray(pool)


def rounded(inputs, dtype):
    """The inputs as float32, after rounding to `dtype`."""
    names = ("q", "k", "v", "pool")
    cast = {name: getattr(inputs, name).astype(dtype).astype(np.float32) for name in names}
    return replace(inputs, **cast)


def pool_after(inputs):
    """The pool with every new token's K and V in its row, and nothing else changed."""
    pool = inputs.pool.copy()
    page_size = pool.shape[3]
    for token, row in enumerate(np.asarray(inputs.batch.kv_rows)):
        if row != NO_ROW:
            page, at = inputs.first_page + row // page_size, row % page_size
            pool[0, :, page, at], pool[1, :, page, at] = inputs.k[token], inputs.v[token]
    return pool


reference = jax.jit(reference_attention, static_argnums=3, compiler_options=FAST_COMPILE)


def expected(case, inputs, dtype):
    """The dense reference, [real tokens, H, D], in float32 on rounded inputs."""
    held, start = rounded(inputs, dtype), 0
    pool, parts = pool_after(held), [held.q[:0]]
    for q_len, kv_len, own in zip(case.q_lens, case.kv_lens, inputs.pages, strict=True):
        pages = [inputs.first_page + page for page in own]
        rows = pool[:, :, pages].reshape(2, case.kv_heads, -1, case.head_dim)[:, :, :kv_len]
        keys, values = rows.swapaxes(1, 2)
        q = held.q[start : start + q_len]
        parts.append(np.asarray(reference(q, keys, values, case.spec, inputs.sinks)))
        start += q_len
    return np.concatenate(parts)


def poisoned(case, inputs):
    """The same batch with NaN wherever no request may look."""
    held, page_size = pool_after(inputs), case.page_size
    pool = np.full_like(held, np.nan)
    q, k, v = inputs.q.copy(), inputs.k.copy(), inputs.v.copy()
    for array in (q, k, v):
        array[case.num_real_tokens :] = np.nan
    table = np.array(inputs.batch.page_table)
    table[:] = inputs.spare_pages[0]
    for slot, (kv_len, own) in enumerate(zip(case.kv_lens, inputs.pages, strict=True)):
        table[slot, : len(own)] = own
        for position in range(kv_len - case.q_lens[slot]):
            page, at = inputs.first_page + own[position // page_size], position % page_size
            pool[:, :, page, at] = held[:, :, page, at]
    batch = inputs.batch._replace(page_table=jnp.asarray(table))
    return replace(inputs, q=q, k=k, v=v, pool=pool, batch=batch)


@on_every_case
@pytest.mark.parametrize("peaked", [False, True], ids=["uniform", "peaked"])
def test_output_equals_the_reference(backend, case, dtype, peaked):
    inputs = make_inputs(case, backend, peaked=peaked)
    found, _ = run(backend, case, dtype, inputs)
    wanted = expected(case, inputs, dtype)
    error = np.abs(found[: len(wanted)].astype(np.float32) - wanted).max(initial=0)
    assert error <= TOLERANCE[dtype][peaked] * np.abs(wanted).max(initial=1e-9)
    assert np.isfinite(found).all()


@on_every_case
def test_new_rows_are_written_exactly_and_no_others(backend, case, dtype):
    inputs = make_inputs(case, backend, seed=1)
    _, pool = run(backend, case, dtype, inputs)
    wanted = pool_after(inputs).astype(dtype)
    np.testing.assert_array_equal(pool.view(np.uint8), wanted.view(np.uint8))


@on_every_case
def test_nan_outside_the_requests_changes_no_bit(backend, case, dtype):
    inputs = make_inputs(case, backend, seed=2, peaked=True)
    clean, _ = run(backend, case, dtype, inputs)
    found, _ = run(backend, case, dtype, poisoned(case, inputs))
    real = case.num_real_tokens
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[:real].view(np.uint8), clean[:real].view(np.uint8))


@functools.cache
def two_layers(backend, case, dtype, num_pages=2048):
    """Two chained layers at a case's shape over a large pool (abstract), the pool donated."""
    inputs = make_inputs(case, backend)
    attend = backend.make(inputs.tiles, CAUSAL)

    def run_both(q, k, v, pool, batch):
        for layer in range(2):
            q, pool = attend(q, k, v, pool, batch, jnp.int32(layer * num_pages))
            k = v = q[:, : case.kv_heads]  # what orders the layers: each writes what it read
        return q, pool

    shape = (2, case.kv_heads, 2 * num_pages, case.page_size, case.head_dim)
    q, k, v, _, batch, _ = arguments(inputs, dtype)
    pool = jax.ShapeDtypeStruct(shape, pool_dtype(jnp.dtype(dtype), PLATFORM))
    lowered = jax.jit(run_both, donate_argnums=3, keep_unused=True).lower(q, k, v, pool, batch)
    memory = lowered.compile(compiler_options=OPTIONS).memory_analysis()
    return memory, int(np.prod(shape)) * jnp.dtype(dtype).itemsize


def shape_only(max_context, is_decode):
    tokens = 4 if is_decode else 64
    return AttentionCase(
        name="shape",
        q_lens=(),
        kv_lens=(),
        num_tokens=tokens,
        max_context=max_context,
        is_decode=is_decode,
    )


in_both_phases = pytest.mark.parametrize("is_decode", [False, True], ids=["prefill", "decode"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@in_both_phases
def test_the_pool_is_updated_in_place(backend, dtype, is_decode):
    memory, pool_bytes = two_layers(backend, shape_only(4096, is_decode), dtype)
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 16


@in_both_phases
def test_memory_does_not_grow_with_max_context(backend, is_decode):
    short, _ = two_layers(backend, shape_only(256, is_decode), "float32")
    long, _ = two_layers(backend, shape_only(4096, is_decode), "float32")
    assert long.temp_size_in_bytes <= 1.1 * short.temp_size_in_bytes + 64 * 1024


def test_a_bfloat16_pool_gives_the_same_as_its_bits(backend):
    case = CASES[0]
    q, k, v, pool, batch, first_page = arguments(make_inputs(case, backend), "bfloat16")
    attend = backend.make(make_inputs(case, backend).tiles, CAUSAL)
    attend = jax.jit(attend, compiler_options=FAST_COMPILE)
    numbers = as_numbers(pool)
    outs = [
        attend(q, k, v, held, batch, first_page)
        for held in (numbers, as_stored(numbers, np.dtype("uint16")))
    ]
    (first, first_pool), (second, second_pool) = outs
    assert first_pool.dtype == jnp.bfloat16 and second_pool.dtype == jnp.uint16
    np.testing.assert_array_equal(np.asarray(first), np.asarray(second))
    np.testing.assert_array_equal(np.asarray(first_pool), np.asarray(as_numbers(second_pool)))


def test_read_pages_returns_a_request_in_order():
    pool = jnp.arange(2 * 3 * 5 * 4 * 2, dtype=jnp.float32).reshape(2, 3, 5, 4, 2)
    keys, values = read_pages(pool, [3, 1], 6)
    assert keys.shape == values.shape == (6, 3, 2)
    for position, (page, at) in enumerate([(3, 0), (3, 1), (3, 2), (3, 3), (1, 0), (1, 1)]):
        np.testing.assert_array_equal(keys[position], pool[0, :, page, at])
        np.testing.assert_array_equal(values[position], pool[1, :, page, at])


@given(
    q_lens=st.lists(st.integers(0, 70), min_size=1, max_size=12),
    tile_q=st.sampled_from([1, 2, 16, 32, 64]),
)
@settings(deadline=None)
def test_tiles_cover_each_token_once_within_capacity(q_lens, tile_q):
    slots, starts = plan_tiles(q_lens, tile_q)
    covered = [
        (slot, token)
        for slot, start in zip(slots, starts, strict=True)
        for token in range(start, min(start + tile_q, q_lens[slot]))
    ]
    assert covered == [(slot, token) for slot, n in enumerate(q_lens) for token in range(n)]
    assert len(slots) <= tile_capacity(sum(q_lens), len(q_lens), tile_q)


FITS = AttentionNeeds(platform="cpu", dtype="float32", page_size=16, head_dim=64)


def test_auto_and_the_name_select_a_backend_that_fits():
    assert select_backend("auto", FITS) is select_backend("xla", FITS) is XLA


@pytest.mark.parametrize("name", ["flash", "xla+flash", "xla+xla+xla", ""])
def test_an_unknown_backend_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError) as caught:
        select_backend(name, FITS)
    assert all(backend.name in str(caught.value) for backend in BACKENDS)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (dict(platform="tpu"), "not on tpu"),
        (dict(dtype="float16"), "not float16"),
        (dict(page_size=256), "not 256"),
    ],
)
def test_refusal_lists_every_candidate_and_its_reason(needs, reason):
    with pytest.raises(KernelUnsupported) as caught:
        select_backend("auto", replace(FITS, **needs))
    message = str(caught.value)
    assert reason in message
    for backend in BACKENDS:
        assert f"{backend.name} {backend.lacks(replace(FITS, **needs))}" in message


# Of each capability: what a backend that lacks it declares, and needs that then fail.
LACKING = {
    "platforms": (frozenset({"tpu"}), {}),
    "dtypes": (frozenset({"float16"}), {}),
    "compute_capabilities": (frozenset({"9.0"}), {}),
    "max_page_size": (8, {}),
    "page_sizes": (frozenset({8}), {}),
    "head_dims": (frozenset({32}), {}),
    "has_odd_groups": (False, dict(group=3)),
    "has_window": (False, dict(specs=(CAUSAL, AttentionSpec(window=5)))),
    "has_soft_cap": (False, dict(specs=(AttentionSpec(soft_cap=50.0),))),
    "has_sinks": (False, dict(specs=(AttentionSpec(has_sinks=True),))),
    "has_max_context": (False, dict(has_max_context=True)),
    "takes_any_tiles": (False, None),  # asked by `hybrid` alone
}


@pytest.mark.parametrize("name", [item.name for item in fields(Capabilities)])
def test_every_capability_is_checked_and_wrappers_forward_it(name):
    value, needs = LACKING[name]
    poor = replace(XLA, name="poor", capabilities=replace(XLA.capabilities, **{name: value}))
    assert getattr(combined(XLA.capabilities, poor.capabilities), name) == (
        value
        if not isinstance(value, frozenset)
        else value & (getattr(XLA.capabilities, name) or value)
    )
    if needs is None:
        with pytest.raises(ConfigError, match="any tiles"):
            hybrid(poor, replace(poor, name="other"))
        return
    asked = replace(FITS, **needs)
    reason = poor.lacks(asked)
    assert reason and XLA.lacks(asked) is None
    assert hybrid(poor, XLA).lacks(asked) is not None
    # The part that serves no window needs none.
    assert (hybrid(XLA, poor).lacks(asked) is None) == (name == "has_window")


def test_a_new_kind_of_capability_must_say_how_it_joins():
    with pytest.raises(TypeError, match="max_page_size"):
        combined(XLA.capabilities, replace(XLA.capabilities, max_page_size="many"))


def test_a_hybrid_routes_each_layer_and_is_as_good_as_its_parts():
    seen = []

    def part(name):
        def make(shape, spec):
            seen.append((name, spec.window))
            return XLA.make(shape, spec)

        return replace(XLA, name=name, make=make)

    both = hybrid(part("one"), part("two"))
    assert both.name == "one+two"
    for case in (each for each in CASES if each.name in ("plain", "window_of_one")):
        inputs = make_inputs(case, both)
        found, _ = run(both, case, "float32", inputs)
        wanted = expected(case, inputs, "float32")
        np.testing.assert_allclose(found[: len(wanted)], wanted, atol=2e-5)
    assert seen == [("two", None), ("one", 1)]
