"""Ragged paged attention in plain JAX, blocked over context: memory grows with neither M nor N*M.

Written for the CPU, whose XLA may loop: one while loop a layer, as each costs compile time.
Prefill walks (tile, key block) pairs and visits only live, causal ones; decode steps all
slots through the key blocks at once. The reads sit in a loop that leaves the pool alone and the
writes before it, so that XLA updates a donated pool in place.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from jaxprefill.kernels.attention.api import (
    Attend,
    AttentionBackend,
    RaggedBatch,
    as_numbers,
    bend,
    write_kv,
)
from jaxprefill.kernels.attention.capabilities import CAUSAL, AttentionSpec, Capabilities
from jaxprefill.kernels.attention.tiles import TileShape, tile_capacity
from jaxprefill.kernels.device import product_precision

_MASKED = -1e30
_MAX_BLOCK_K = 128

# Running (max, sum, weighted values) of an online softmax, all float32.
_Sums = tuple[Float[Array, "*batch q"], Float[Array, "*batch q"], Float[Array, "*batch q D"]]


def _tile_shape(
    num_tokens: int, num_slots: int, max_context: int, *, page_size: int, is_decode: bool
) -> TileShape:
    """Tile sizes measured on two AVX2 cores; large tiles pay only where requests are long."""
    tile_q = 1 if is_decode else 16 if num_tokens <= 64 else 32 if num_tokens <= 256 else 64
    num_blocks = -(-max_context // _MAX_BLOCK_K)
    return TileShape(
        tile_q=tile_q,
        block_k=_MAX_BLOCK_K,
        num_tiles=tile_capacity(num_tokens, num_slots, tile_q),
        pages_per_slot=num_blocks * _MAX_BLOCK_K // page_size,
    )


def _make(shape: TileShape, spec: AttentionSpec = CAUSAL) -> Attend:
    attend = _decode if shape.tile_q == 1 else _prefill

    def write_and_attend(
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        pool: Shaped[Array, "2 K P S D"],
        batch: RaggedBatch,
        first_page: Int32[Array, ""],
        sinks: Float[Array, " H"] | None = None,
    ) -> tuple[Float[Array, "T H D"], Shaped[Array, "2 K P S D"]]:
        pool = write_kv(pool, k, v, batch.kv_rows, first_page)
        return attend(q, pool, batch, first_page, (shape, spec), sinks).astype(q.dtype), pool

    return write_and_attend


def _prefill(
    q: Float[Array, "T H D"],
    pool: Shaped[Array, "2 K P S D"],
    batch: RaggedBatch,
    first_page: Int32[Array, ""],
    static: tuple[TileShape, AttentionSpec],
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H D"]:
    shape, (window, soft_cap, _) = static
    tile_q, block_k = shape.tile_q, shape.block_k
    num_tokens, num_heads, dim = q.shape
    kv_heads = pool.shape[1]
    group, num_tiles = num_heads // kv_heads, len(batch.tile_slot)
    slot, start = batch.tile_slot, batch.tile_start
    prefix = batch.kv_lens[slot] - batch.q_lens[slot]
    limit = jnp.minimum(batch.kv_lens[slot], prefix + start + tile_q)  # keys the tile may see
    token = start[:, None] + jnp.arange(tile_q)  # [N, tile_q], from the request's first new one
    rows = batch.q_starts[slot][:, None] + token
    tiles = q[jnp.clip(rows, 0, num_tokens - 1)].astype(jnp.float32) * dim**-0.5
    tiles = tiles.astype(q.dtype).reshape(num_tiles, tile_q, kv_heads, group, dim)
    tiles = tiles.transpose(0, 2, 3, 1, 4).reshape(num_tiles, kv_heads, group * tile_q, dim)
    last_key = jnp.minimum(prefix[:, None] + token, limit[:, None] - 1)
    last_key = jnp.tile(last_key, (1, group))  # [N, G * tile_q]
    first_key = jnp.zeros_like(limit)  # of the tile's first row: no row looks further back
    if window is not None:
        first_key = jnp.maximum(prefix + start - window + 1, 0)
    first_block = first_key // block_k
    empty = _nothing_seen(sinks, (kv_heads, group, tile_q), dim)

    def step(
        carry: tuple[Array, Array, Array, Array, Array, Array],
    ) -> tuple[Array, Array, Array, Array, Array, Array]:
        tile, block, out, top, total, acc = carry
        key = block * block_k + jnp.arange(block_k)
        pages = _block_pages(batch.page_table, slot[tile], block, shape, pool) + first_page
        keys = as_numbers(pool[0][:, pages]).reshape(kv_heads, block_k, dim)
        values = as_numbers(pool[1][:, pages]).reshape(kv_heads, block_k, dim)
        is_seen = (key >= first_key[tile]) & (key < limit[tile])
        values = jnp.where(is_seen[:, None], values, 0)  # a stale NaN must not leak
        visible = key <= last_key[tile][:, None]
        if window is not None:
            visible &= key > last_key[tile][:, None] - window
        is_first = block == first_block[tile]
        sums = jax.tree.map(functools.partial(jnp.where, is_first), empty, (top, total, acc))
        top, total, acc = _online_softmax(
            tiles[tile], keys, values, visible, sums, soft_cap=soft_cap
        )
        out = lax.dynamic_update_index_in_dim(out, acc / total[..., None], tile, 0)
        is_last = (block + 1) * block_k >= limit[tile]
        following = first_block[jnp.minimum(tile + 1, num_tiles - 1)]
        return tile + is_last, jnp.where(is_last, following, block + 1), out, top, total, acc

    out = jnp.zeros(tiles.shape, jnp.float32)
    carry = (jnp.int32(0), first_block[0], out, *empty)
    out = lax.while_loop(lambda carry: carry[0] < batch.num_tiles, step, carry)[2]
    out = out.reshape(num_tiles, kv_heads, group, tile_q, dim).transpose(0, 3, 1, 2, 4)
    is_live = (token < batch.q_lens[slot][:, None]) & _is_planned(batch, num_tiles)[:, None]
    return _untile(out.reshape(-1, num_heads, dim), rows, is_live, num_tokens)


def _is_planned(batch: RaggedBatch, num_tiles: int) -> Shaped[Array, " N"]:
    return jnp.arange(num_tiles) < batch.num_tiles


def _untile(
    out: Float[Array, "rows H D"],
    rows: Int32[Array, "N q"],
    is_live: Shaped[Array, "N q"],
    num_tokens: int,
) -> Float[Array, "T H D"]:
    """Tile rows back in token order; padding tokens get zeros."""
    home = jnp.where(is_live, rows, num_tokens)
    source = jnp.full((num_tokens,), len(out), jnp.int32)
    source = source.at[home].set(
        jnp.arange(len(out), dtype=jnp.int32).reshape(rows.shape), mode="drop"
    )
    return jnp.take(out, source, axis=0, mode="fill", fill_value=0)


def _decode(
    q: Float[Array, "T H D"],
    pool: Shaped[Array, "2 K P S D"],
    batch: RaggedBatch,
    first_page: Int32[Array, ""],
    static: tuple[TileShape, AttentionSpec],
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H D"]:
    num_slots, num_heads, dim = q.shape
    block_k, (window, soft_cap, _) = static[0].block_k, static[1]
    kv_heads, pages_per_block = pool.shape[1], block_k // pool.shape[3]
    first_key = jnp.zeros_like(batch.kv_lens)
    if window is not None:
        first_key = jnp.maximum(batch.kv_lens - window, 0)
    first_block = first_key // block_k
    queries = (q.astype(jnp.float32) * dim**-0.5).astype(q.dtype)
    queries = queries.reshape(num_slots, kv_heads, -1, dim).transpose(1, 0, 2, 3)  # [K, R, G, D]

    def step(block: Int32[Array, ""], carry: _Sums) -> _Sums:
        # Every slot walks its own blocks, so that a window bounds the steps.
        at = (first_block + block)[:, None]
        pages = jnp.arange(pages_per_block) + at * pages_per_block
        pages = jnp.minimum(pages, batch.page_table.shape[1] - 1)
        pages = jnp.take_along_axis(batch.page_table, pages, axis=1) + first_page
        key = at * block_k + jnp.arange(block_k)  # [R, block_k]
        seen = (key >= first_key[:, None]) & (key < batch.kv_lens[:, None])
        keys, values = as_numbers(pool[0][:, pages]), as_numbers(pool[1][:, pages])
        keys = keys.reshape(kv_heads, num_slots, block_k, dim)
        values = values.reshape(kv_heads, num_slots, block_k, dim)
        values = jnp.where(seen[..., None], values, 0)
        return _online_softmax(queries, keys, values, seen[:, None], carry, soft_cap=soft_cap)

    carry = jax.tree.map(
        lambda part: jnp.broadcast_to(part[:, None], (kv_heads, num_slots, *part.shape[1:])),
        _nothing_seen(sinks, (kv_heads, num_heads // kv_heads, 1), dim),
    )
    num_blocks = (-(-batch.kv_lens // block_k) - first_block).max()
    _, total, acc = lax.fori_loop(0, num_blocks, step, carry)
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    return out.transpose(1, 0, 2, 3).reshape(num_slots, num_heads, dim)


def _block_pages(
    page_table: Int32[Array, "R W"],
    slot: Int32[Array, ""],
    block: Int32[Array, ""],
    shape: TileShape,
    pool: Shaped[Array, "2 K P S D"],
) -> Int32[Array, " pages"]:
    pages_per_block = shape.block_k // pool.shape[3]
    return lax.dynamic_slice(page_table, (slot, block * pages_per_block), (1, pages_per_block))[0]


def _nothing_seen(
    sinks: Float[Array, " H"] | None, rows: tuple[int, int, int], dim: int
) -> tuple[Float[Array, "K rows"], Float[Array, "K rows"], Float[Array, "K rows D"]]:
    """Sums before the first key, over (KV heads, heads of its group, tokens): sinks or nothing."""
    kv_heads, group, tokens = rows
    shape = (kv_heads, group * tokens)
    acc = jnp.zeros((*shape, dim), jnp.float32)
    if sinks is None:
        return jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), acc
    top = jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, group), tokens, axis=1)
    return top, jnp.ones(shape, jnp.float32), acc


def _online_softmax(
    queries: Shaped[Array, "*batch q D"],
    keys: Shaped[Array, "*batch k D"],
    values: Shaped[Array, "*batch k D"],
    visible: Shaped[Array, "..."],
    sums: _Sums,
    *,
    soft_cap: float | None,
) -> _Sums:
    """`sums` with one more block of keys folded in."""
    top, total, acc = sums
    batch = tuple(range(queries.ndim - 2))
    dot = functools.partial(
        lax.dot_general,
        precision=product_precision(queries.dtype),
        preferred_element_type=jnp.float32,
    )
    last = queries.ndim - 1
    scores = dot(queries, keys, (((last,), (last,)), (batch, batch)))
    scores = jnp.where(visible, bend(scores, soft_cap), _MASKED)
    new_top = jnp.maximum(top, scores.max(-1))
    weights, scale = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
    added = dot(weights.astype(values.dtype), values, (((last,), (last - 1,)), (batch, batch)))
    return new_top, total * scale + weights.sum(-1), acc * scale[..., None] + added


XLA = AttentionBackend(
    name="xla",
    capabilities=Capabilities(
        platforms=frozenset({"cpu", "gpu"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        max_page_size=_MAX_BLOCK_K,
        has_odd_groups=True,
        has_window=True,
        has_soft_cap=True,
        has_sinks=True,
        has_max_context=True,
        takes_any_tiles=True,
    ),
    tile_shape=_tile_shape,
    make=_make,
)
