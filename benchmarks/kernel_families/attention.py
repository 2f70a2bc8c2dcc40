"""Ragged paged attention of Qwen3-8B's heads; cases as `benchmarks.cases` writes them."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cases import Case
from benchmarks.kernel_runs import (
    Family,
    Overrides,
    Work,
    check_all_used,
    compare,
    cut,
    draw,
    num_sets,
    spread,
    tiles_text,
)
from benchmarks.rig import MODELS
from jaxprefill.errors import KernelUnsupported
from jaxprefill.kernels.attention import CAUSAL, AttentionBackend, AttentionNeeds, TileShape
from jaxprefill.kernels.attention.cases import AttentionCase, make_inputs
from jaxprefill.kernels.attention.pallas_triton import PALLAS_TRITON, make_attend
from jaxprefill.kernels.attention.select import BACKENDS
from jaxprefill.kernels.attention.tiles import tile_capacity
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.kernels.device import describe_device
from jaxprefill.prefill.buckets import GPU_BUCKETS

_CASES = (
    "2048x1,8192x1,4096x1,2048x16,8192x16,4096x8,d16+1024,30x1+32768,480x16+4096,d64+1024,d1+1024"
)
_CONTEXTS, _PAGE, _SLOTS = (4096, 8192, 40960), 16, 16
_PEAKED = 2.5  # scale of queries and keys: few keys take the weight, as a mean hides errors
_SAMPLED = 128
_NAMED = {backend.name: backend for backend in BACKENDS}


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    sizes: AttentionCase
    prefix: int
    q: jax.Array
    k: jax.Array
    v: jax.Array
    pool: jax.Array  # of as many layers as make it larger than the cache
    first_pages: list[jax.Array]
    rows: np.ndarray  # tokens that are checked
    expected: jax.Array  # of those


def _sizes_of(text: str, *, is_tiny: bool) -> tuple[AttentionCase, int]:
    """(the batch in the shape that the project would choose, its prefix)."""
    case, model = Case.parse(text), MODELS["qwen3-8b"]
    needed = case.prefix + max(case.lens())
    buckets = GPU_BUCKETS if not case.is_decode else (case.num_requests,)
    sizes = AttentionCase(
        name=text,
        q_lens=tuple(case.lens()),
        kv_lens=tuple(case.prefix + length for length in case.lens()),
        q_heads=model.num_q_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=_PAGE,
        num_tokens=min(count for count in buckets if count >= case.num_tokens),
        num_slots=case.num_requests if case.is_decode else max(_SLOTS, case.num_requests),
        max_context=min(size for size in _CONTEXTS if size >= needed),
        is_decode=case.is_decode,
    )
    if is_tiny:
        slots = case.num_requests + (not case.is_decode)
        sizes = replace(sizes, q_heads=4, kv_heads=2, head_dim=16, max_context=128, num_slots=slots)
    return sizes, case.prefix


def _integers(sizes: AttentionCase, backend: AttentionBackend) -> Any:
    """Pages, tiles and integers of the batch: the same pages for every backend."""
    return make_inputs(replace(sizes, q_heads=1, kv_heads=1, head_dim=1), backend)


def _prepare(text: str, is_tiny: bool) -> _Inputs:
    sizes, prefix = _sizes_of(text, is_tiny=is_tiny)
    inputs = _integers(sizes, XLA)
    pages, heads, dim = inputs.first_page, sizes.kv_heads, sizes.head_dim
    layers = 2 if is_tiny else min(num_sets(4 * sum(sizes.kv_lens) * heads * dim), 36)
    shape = (heads, layers * pages, _PAGE, dim)
    pool = jnp.stack([draw(1, *shape, scale=_PEAKED), draw(2, *shape)])
    q = draw(3, sizes.num_tokens, sizes.q_heads, dim, scale=_PEAKED)
    k = draw(4, sizes.num_tokens, heads, dim, scale=_PEAKED)
    v = draw(5, sizes.num_tokens, heads, dim)
    rows = spread(sizes.num_real_tokens, _SAMPLED)
    expected = jax.jit(_reference, static_argnums=5)(q, k, v, pool, inputs.batch, sizes, rows)
    firsts = [jnp.int32(layer * pages) for layer in range(layers)]
    return _Inputs(
        sizes=sizes, prefix=prefix, q=q, k=k, v=v, pool=pool, first_pages=firsts, rows=rows,
        expected=expected,
    )  # fmt: skip


def _reference(
    q: jax.Array, k: jax.Array, v: jax.Array, pool: jax.Array, batch: Any,
    sizes: AttentionCase, rows: jax.Array,
) -> jax.Array:  # fmt: skip
    """[rows, H, D] in float32, a row at a time; cached keys from the pool's first layer."""
    key = jnp.arange(max(sizes.kv_lens))
    ends = batch.q_starts + batch.q_lens

    def attend(row: jax.Array) -> jax.Array:
        slot = jnp.argmax((row >= batch.q_starts) & (row < ends))
        prefix = batch.kv_lens[slot] - batch.q_lens[slot]
        new = jnp.clip(key - prefix + batch.q_starts[slot], 0, len(k) - 1)
        page = batch.page_table[slot, key // _PAGE]
        is_cached = (key < prefix)[:, None, None]

        def rows_of(part: int, fresh: jax.Array) -> jax.Array:
            cached = pool[part, :, page, key % _PAGE]  # [keys, K, D]
            return jnp.where(is_cached, cached, fresh[new]).astype(jnp.float32)

        own = q[row].astype(jnp.float32).reshape(sizes.kv_heads, -1, sizes.head_dim)
        scores = jnp.einsum("hgd,khd->hgk", own * sizes.head_dim**-0.5, rows_of(0, k))
        is_seen = key <= prefix + row - batch.q_starts[slot]
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hgk,khd->hgd", weights, rows_of(1, v)).reshape(q.shape[1:])

    with jax.default_matmul_precision("highest"):
        return lax.map(attend, jnp.asarray(rows))


def _make(inputs: _Inputs, name: str, overrides: Overrides, interpret: bool) -> Work:
    sizes, backend = inputs.sizes, _NAMED[name]
    _check(backend, sizes, interpret=interpret)
    if overrides:
        backend = replace(backend, tile_shape=_override(backend, overrides))
    given = _integers(sizes, backend)
    is_interpreted = interpret and backend is not XLA
    make = _interpreted if is_interpreted else backend.make
    attend = make(given.tiles, CAUSAL)

    def call(carry: Any, shared: Any, first_page: Any) -> Any:
        q, pool = carry
        k, v, batch = shared
        return attend(q, k, v, pool, batch, first_page)

    heads, dim = sizes.q_heads, sizes.head_dim
    lens = zip(sizes.q_lens, sizes.kv_lens, strict=True)
    pairs = sum(q_len * (kv_len - q_len) + q_len * (q_len + 1) / 2 for q_len, kv_len in lens)
    new, cached = sizes.num_real_tokens, inputs.prefix * len(sizes.q_lens)
    return Work(
        call=call,
        carry=(inputs.q, inputs.pool),
        shared=(inputs.k, inputs.v, given.batch),
        own=inputs.first_pages,
        sample=lambda carry: carry[0][inputs.rows],
        errors=compare(inputs.expected),
        flops=4.0 * pairs * heads * dim,
        # Queries and results; new keys and values read and written, cached ones read.
        num_bytes=4.0 * dim * (new * heads + (2 * new + cached) * sizes.kv_heads),
        tiles=tiles_text(given.tiles) if backend is not XLA else "",
    )


def _interpreted(tiles: TileShape, spec: Any) -> Any:
    return make_attend(tiles, spec, interpret=True)


def _check(backend: AttentionBackend, sizes: AttentionCase, *, interpret: bool) -> None:
    device = describe_device()
    needs = AttentionNeeds(
        platform=device.platform,
        dtype="bfloat16",
        page_size=_PAGE,
        head_dim=sizes.head_dim,
        group=sizes.q_heads // sizes.kv_heads,
        compute_capability=device.compute_capability,
    )
    lack = None if interpret and backend is PALLAS_TRITON else backend.lacks(needs)
    if lack is not None:
        raise KernelUnsupported(f"{backend.name} {lack}")


def _override(backend: AttentionBackend, overrides: Overrides) -> Any:
    def tile_shape(num_tokens: int, num_slots: int, max_context: int, **where: Any) -> TileShape:
        default = backend.tile_shape(num_tokens, num_slots, max_context, **where)
        tiles, rest = cut(default, overrides)
        check_all_used(rest, default)
        return tiles._replace(num_tiles=tile_capacity(num_tokens, num_slots, tiles.tile_q))

    return tile_shape


FAMILY = Family(
    cases=_CASES.split(","),
    tiny=("20x3+10", "d3+40"),
    backends=("pallas_triton", "pallas_mosaic_gpu", "xla"),
    tiles=("tile_q=16", "tile_q=32", "tile_q=64", "block_k=32", "block_k=64", "block_k=128"),
    prepare=_prepare,
    make=_make,
)
