"""Ragged paged attention in one Pallas/Triton kernel: NVIDIA GPUs from Ampere on.

A program takes one query tile and one KV head, with the query rows of the head's group stacked:

    rows     [ t0 h0, t0 h1, .. | t1 h0, t1 h1, .. | .. ]        t: new token, h: query head
    keys     [ cached, through the page table | new, from k and v ]

It also writes its tile's K and V to the pool. New keys come from `k` and `v`, never from the
pool, so programs need no barrier: pool rows that are read lie before every request's new tokens
and rows that are written lie among them. A page that one request writes and another reads must
therefore be written in an earlier call.

Nothing is masked on load or store: an index past the end repeats the last live one, so a dead
query row computes and stores what its tile's last live row does, and a stale page is never read.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxprefill.kernels.attention.api import (
    Attend,
    AttentionBackend,
    Capabilities,
)
from jaxprefill.kernels.attention.tiles import TileShape, tile_capacity

_MASKED = -1e30
_LOG2_E = 1.4426950408889634
_MIN_DOT = 16  # smallest side of a Triton dot
_MAX_PAGE_SIZE = 128
Ref = Any  # a Pallas reference: [index] loads and stores; jax has no public type for it
Carry = tuple[Float[Array, " rows"], Float[Array, " rows"], Float[Array, "rows D"]]


class _Sizes(NamedTuple):
    """What one kernel is specialised on. A group is the query heads of one KV head."""

    tile_q: int
    block_k: int
    num_tiles: int
    group: int
    page_size: int
    scale: float

    @property
    def padded_group(self) -> int:
        return _power_of_two(self.group)

    @property
    def num_rows(self) -> int:
        return max(self.tile_q * self.padded_group, _MIN_DOT)


class _Refs(NamedTuple):
    """The kernel's operands, then its results. `pool_in` and `pool` are one array, q and out too."""

    q: Ref  # [T, H, D]
    k: Ref  # [T, K, D]
    v: Ref  # [T, K, D]
    pool_in: Ref  # [2, K, P * S, D]
    batch: Any  # RaggedBatch of refs, num_tiles [1]
    first_page: Ref  # [1]
    out: Ref  # [T, H, D]
    pool: Ref  # [2, K, P * S, D]


class _Tile(NamedTuple):
    """One tile's integers: new tokens `start` to `end` of a request with `prefix` cached ones."""

    slot: Int32[Array, ""]
    head: Int32[Array, ""]
    first: Int32[Array, ""]  # token row of the request's first new token
    start: Int32[Array, ""]
    end: Int32[Array, ""]
    prefix: Int32[Array, ""]


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _tile_shape(
    num_tokens: int, num_slots: int, max_context: int, *, page_size: int, is_decode: bool
) -> TileShape:
    """Tile sizes measured on an H200 with 4 query heads a KV head."""
    tile_q = 1 if is_decode else 16 if num_tokens <= 256 else 32
    block_k = 64
    return TileShape(
        tile_q=tile_q,
        block_k=block_k,
        num_tiles=tile_capacity(num_tokens, num_slots, tile_q),
        pages_per_slot=-(-max_context // page_size),
    )


def make_attend(shape: TileShape, *, interpret: bool = False) -> Attend:
    """Attention of one compiled shape; `interpret` runs it on any device, slowly."""

    def write_and_attend(q, k, v, pool, batch, first_page):  # pyright: ignore
        kv_heads, num_pages, page_size, dim = pool.shape[1:]
        sizes = _Sizes(
            tile_q=shape.tile_q,
            block_k=shape.block_k,
            num_tiles=len(batch.tile_slot),
            group=q.shape[1] // kv_heads,
            page_size=page_size,
            scale=dim**-0.5 * _LOG2_E,
        )
        rows = pool.reshape(2, kv_heads, num_pages * page_size, dim)
        call = pl.pallas_call(
            functools.partial(_kernel, sizes=sizes),  # fresh: jax #40847
            grid=(sizes.num_tiles, kv_heads),
            out_shape=(
                jax.ShapeDtypeStruct(q.shape, q.dtype),
                jax.ShapeDtypeStruct(rows.shape, pool.dtype),
            ),
            input_output_aliases={0: 0, 3: 1},
            compiler_params=_compiler_params(sizes),
            interpret=interpret,
            name="ragged_paged_attention",
        )
        batch = batch._replace(num_tiles=batch.num_tiles.reshape(1))
        out, rows = call(q, k, v, rows, batch, first_page.reshape(1))
        return out, rows.reshape(pool.shape)

    return write_and_attend


def _compiler_params(sizes: _Sizes) -> plt.CompilerParams:
    return plt.CompilerParams(num_warps=8 if sizes.num_rows >= 128 else 4, num_stages=3)


def _kernel(
    q: Ref,
    k: Ref,
    v: Ref,
    pool_in: Ref,
    batch: Any,
    first_page: Ref,
    out: Ref,
    pool: Ref,
    *,
    sizes: _Sizes,
) -> None:
    refs = _Refs(q, k, v, pool_in, batch, first_page, out, pool)
    # Later tiles of a request see more keys: they start first.
    index, head = sizes.num_tiles - 1 - pl.program_id(0), pl.program_id(1)

    @pl.when(index < batch.num_tiles[0])
    def _() -> None:
        tile = _read_tile(refs, index, head, sizes)
        _write_kv(refs, tile, sizes)
        _attend_tile(refs, tile, sizes)


def _read_tile(
    refs: _Refs, index: Int32[Array, ""], head: Int32[Array, ""], sizes: _Sizes
) -> _Tile:
    batch = refs.batch
    slot, start = batch.tile_slot[index], batch.tile_start[index]
    q_len = batch.q_lens[slot]
    return _Tile(
        slot=slot,
        head=head,
        first=batch.q_starts[slot],
        start=start,
        end=jnp.minimum(start + sizes.tile_q, q_len),
        prefix=batch.kv_lens[slot] - q_len,
    )


def _write_kv(refs: _Refs, tile: _Tile, sizes: _Sizes) -> None:
    """The tile's new K and V into their pool rows."""
    token = tile.first + jnp.minimum(tile.start + _iota(sizes.tile_q), tile.end - 1)
    row = refs.batch.kv_rows[token] + refs.first_page[0] * sizes.page_size
    refs.pool[0, tile.head, row, :] = refs.k[token, tile.head, :].astype(refs.pool.dtype)
    refs.pool[1, tile.head, row, :] = refs.v[token, tile.head, :].astype(refs.pool.dtype)


def _attend_tile(refs: _Refs, tile: _Tile, sizes: _Sizes) -> None:
    # Queries, one row a (token, head of the group).
    row = _iota(sizes.num_rows)
    token = jnp.minimum(tile.start + row // sizes.padded_group, tile.end - 1)
    in_group = jnp.minimum(row % sizes.padded_group, sizes.group - 1)
    at, heads = tile.first + token, tile.head * sizes.group + in_group
    queries = refs.q[at, heads, :].astype(refs.pool.dtype)
    zeros = jnp.zeros((sizes.num_rows,), jnp.float32)
    carry = (zeros + _MASKED, zeros, jnp.zeros(queries.shape, jnp.float32))

    # Cached keys: all visible, but for the end of the last block.
    def cached(block, carry):  # pyright: ignore
        key = block * sizes.block_k + _iota(sizes.block_k)
        keys, values = _load_cached(refs, tile, key, sizes)
        visible = jnp.broadcast_to((key < tile.prefix)[None], (sizes.num_rows, sizes.block_k))
        return _online_softmax(queries, keys, values, carry, scale=sizes.scale, visible=visible)

    # New keys: blocks before the tile are all visible, blocks on the diagonal are causal.
    def new(block, carry, *, is_causal):  # pyright: ignore
        key = block * sizes.block_k + _iota(sizes.block_k)
        source = tile.first + jnp.minimum(key, tile.end - 1)
        keys, values = refs.k[source, tile.head, :], refs.v[source, tile.head, :]
        visible = key[None] <= token[:, None] if is_causal else None
        return _online_softmax(queries, keys, values, carry, scale=sizes.scale, visible=visible)

    block_k = sizes.block_k
    full = tile.start // block_k
    carry = lax.fori_loop(0, pl.cdiv(tile.prefix, block_k), cached, carry)
    carry = lax.fori_loop(0, full, functools.partial(new, is_causal=False), carry)
    last = pl.cdiv(tile.end, block_k)
    _, total, acc = lax.fori_loop(full, last, functools.partial(new, is_causal=True), carry)
    refs.out[at, heads, :] = (acc / total[:, None]).astype(refs.out.dtype)


def _load_cached(
    refs: _Refs, tile: _Tile, key: Int32[Array, " k"], sizes: _Sizes
) -> tuple[Shaped[Array, "k D"], Shaped[Array, "k D"]]:
    key = jnp.minimum(key, tile.prefix - 1)
    page = refs.batch.page_table[tile.slot, key // sizes.page_size] + refs.first_page[0]
    row = page * sizes.page_size + key % sizes.page_size
    return refs.pool_in[0, tile.head, row, :], refs.pool_in[1, tile.head, row, :]


def _online_softmax(
    queries: Shaped[Array, "rows D"],
    keys: Shaped[Array, "k D"],
    values: Shaped[Array, "k D"],
    carry: Carry,
    *,
    scale: float,
    visible: Bool[Array, "rows k"] | None,
) -> Carry:
    """One block of keys folded into running (max, sum, weighted values); base-2 exponents."""
    top, total, acc = carry
    scores = _dot(queries, keys, trans_b=True) * scale
    if visible is not None:
        scores = jnp.where(visible, scores, _MASKED)
    new_top = jnp.maximum(top, scores.max(1))
    weights, rescale = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
    acc = acc * rescale[:, None] + _dot(weights.astype(values.dtype), values)
    return new_top, total * rescale + weights.sum(1), acc


def _dot(
    a: Shaped[Array, "m n"], b: Shaped[Array, "..."], *, trans_b: bool = False
) -> Float[Array, "..."]:
    """float32 sums; float32 operands are not rounded to TensorFloat-32."""
    return plt.dot(a, b, trans_b=trans_b, precision=lax.Precision.HIGHEST)


def _iota(length: int) -> Int32[Array, " length"]:
    return lax.broadcasted_iota(jnp.int32, (length,), 0)


PALLAS_TRITON = AttentionBackend(
    name="pallas_triton",
    capabilities=Capabilities(
        platforms=frozenset({"gpu"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        max_page_size=_MAX_PAGE_SIZE,
    ),
    tile_shape=_tile_shape,
    make=make_attend,
)
