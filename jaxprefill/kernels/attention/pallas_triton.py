"""Ragged paged attention in one Pallas/Triton kernel: NVIDIA GPUs from Ampere on.

A program takes one query tile and one KV head, with the query rows of the head's group stacked:

    rows     [ t0 h0, t0 h1, .. | t1 h0, t1 h1, .. | .. ]        t: new token, h: query head
    keys     [ cached, through the page table | new, from k and v ]

It also writes its tile's K and V to the pool. New keys come from `k` and `v`, never from the
pool, so programs need no barrier: pool rows that are read lie before every request's new tokens
and rows that are written lie among them. A page that one request writes and another reads must
therefore be written in an earlier call.

Where few programs face a long context, several share a tile's cached keys (split-KV): each
leaves a part and its weight, and a second kernel adds the parts in a fixed order. A tile whose
cached keys are few is done by one program, and the second kernel passes it by.

`make_attend` takes queries, keys and values apart; `make_attend_to_heads` takes the heads of each
row in one array, as a fused qkv projection leaves them once they are rotated.

Nothing is masked on load or store: an index past the end repeats the last live one, so a dead
query row computes and stores what its tile's last live row does, and a stale page is never read.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxprefill.kernels.attention.api import Attend, AttentionBackend, RaggedBatch
from jaxprefill.kernels.attention.capabilities import CAUSAL, AttentionSpec, Capabilities
from jaxprefill.kernels.attention.tiles import NO_ROW, TileShape, tile_capacity
from jaxprefill.kernels.splits import (
    LEAST_SUM,
    LOWEST,
    MASKED,
    MAX_SPLITS,
    MIN_SPLIT_BLOCKS,
    launch_merge,
    merge_splits,
    share_blocks,
)
from jaxprefill.kernels.triton import LOG2_E, MIN_DOT, Ref, dot, power_of_two

_MAX_BLOCK_BYTES = 32768  # of keys: three blocks of keys and values fit in shared memory
_WANTED_PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
# See `make_attend_to_heads`.
AttendToHeads = Callable[
    [
        Float[Array, "T heads D"],
        Shaped[Array, "2 K P S D"],
        RaggedBatch,
        Int32[Array, ""],
        Int32[Array, " counters"],
    ],
    tuple[Float[Array, "T H D"], Shaped[Array, "2 K P S D"], Int32[Array, " counters"]],
]
Carry = tuple[Float[Array, " rows"], Float[Array, " rows"], Float[Array, "rows D"]]


class _Sizes(NamedTuple):
    """What one kernel is specialised on. A group is the query heads of one KV head."""

    tile_q: int
    block_k: int
    num_tiles: int
    num_splits: int
    group: int
    kv_heads: int
    page_size: int
    dim: int
    spec: AttentionSpec
    interpret: bool

    @property
    def padded_group(self) -> int:
        return power_of_two(self.group)

    @property
    def num_rows(self) -> int:
        return max(self.tile_q * self.padded_group, MIN_DOT)

    @property
    def score_scale(self) -> float:
        return self.dim**-0.5

    @property
    def scale(self) -> float:
        """Of scores as `_online_softmax` holds them; exponents are base 2."""
        cap = self.spec.soft_cap
        return (self.score_scale if cap is None else cap) * LOG2_E


class _Separate(NamedTuple):
    """Queries, keys and values of the new tokens in arrays of their own."""

    q: Any  # [T, H, D]
    k: Any  # [T, K, D]
    v: Any  # [T, K, D]

    def queries(self, token: Any, head: Any, _: _Sizes) -> Shaped[Array, "n D"]:
        return self.q[token, head, :]

    def keys(self, token: Any, head: Any, _: _Sizes) -> Shaped[Array, "n D"]:
        return self.k[token, head, :]

    def values(self, token: Any, head: Any, _: _Sizes) -> Shaped[Array, "n D"]:
        return self.v[token, head, :]


class _Stacked(NamedTuple):
    """The same in one array: query heads, then key heads, then value heads."""

    qkv: Any  # [T, H + 2K, D]

    def queries(self, token: Any, head: Any, _: _Sizes) -> Shaped[Array, "n D"]:
        return self.qkv[token, head, :]

    def keys(self, token: Any, head: Any, sizes: _Sizes) -> Shaped[Array, "n D"]:
        return self.qkv[token, head + sizes.kv_heads * sizes.group, :]

    def values(self, token: Any, head: Any, sizes: _Sizes) -> Shaped[Array, "n D"]:
        return self.qkv[token, head + sizes.kv_heads * (sizes.group + 1), :]


class _Refs(NamedTuple):
    """The kernel's operands and results; `pool_in` and `pool` are one array."""

    new: _Separate | _Stacked
    pool_in: Ref  # [2, K, P * S, D]
    batch: Any  # RaggedBatch of refs, num_tiles [1]
    first_page: Ref  # [1]
    sinks: Ref  # None, or [H]
    arrivals_in: Ref  # None, or [N * K]: zeros between launches
    out: Ref  # [T, H, D]
    pool: Ref  # [2, K, P * S, D]
    parts: Ref = None  # [splits, T, H, D], float32
    weights: Ref = None  # [splits, T, H]: base-2 logarithms of softmax sums
    arrivals: Ref = None  # None: the parts are merged by a kernel of their own


class _Tile(NamedTuple):
    """One tile's integers: new tokens `start` to `end` of a request with `prefix` cached ones."""

    number: Int32[Array, ""]
    slot: Int32[Array, ""]
    first: Int32[Array, ""]  # token row of the request's first new token
    start: Int32[Array, ""]
    end: Int32[Array, ""]
    prefix: Int32[Array, ""]
    first_block: Int32[Array, ""]  # of cached keys that some query of the tile sees
    split_blocks: Int32[Array, ""]  # blocks of cached keys a split takes
    num_splits: Int32[Array, ""]  # splits that have any


def _tile_shape(
    num_tokens: int, num_slots: int, max_context: int, *, page_size: int, is_decode: bool
) -> TileShape:
    """Tile sizes measured on an H200 with 4 query heads a KV head."""
    tile_q = 1 if is_decode else 16 if num_tokens <= 1024 else 32
    block_k = 32 if is_decode and num_tokens >= 32 else 64
    return TileShape(
        tile_q=tile_q,
        block_k=block_k,
        num_tiles=tile_capacity(num_tokens, num_slots, tile_q),
        pages_per_slot=-(-max_context // page_size),
    )


def make_attend(
    shape: TileShape, spec: AttentionSpec = CAUSAL, *, interpret: bool = False
) -> Attend:
    """Attention of one compiled shape; `interpret` runs it on any device, slowly."""

    def write_and_attend(q, k, v, pool, batch, first_page, sinks=None):  # pyright: ignore
        sizes = _sizes(shape, spec, q.shape, pool, interpret=interpret)
        new = _Separate(q, k, v)
        out, pool, _ = _attend(sizes, _Operands(new, pool, batch, first_page, sinks, None))
        return out, pool

    return write_and_attend


def make_attend_to_heads(
    shape: TileShape, spec: AttentionSpec, *, interpret: bool = False
) -> AttendToHeads:
    """The same, of stacked heads; parts of a tile are merged on the way.

    (heads [T, H + 2K, D]: queries, keys, values; pool, batch, first_page, arrivals) ->
    (out [T, H, D], pool, arrivals); arrivals holds `num_arrivals` zeros or more. Rows past the
    batch's tokens are neither read nor written.
    """

    def write_and_attend(heads, pool, batch, first_page, arrivals):  # pyright: ignore
        kv_heads = pool.shape[1]
        q_shape = (len(batch.kv_rows), heads.shape[1] - 2 * kv_heads, heads.shape[2])
        sizes = _sizes(shape, spec, q_shape, pool, interpret=interpret)
        operands = _Operands(_Stacked(heads), pool, batch, first_page, None, arrivals)
        out, pool, left = _attend(sizes, operands)
        return out, pool, arrivals if left is None else left

    return write_and_attend


def num_arrivals(shape: TileShape, kv_heads: int) -> int:
    """Counters that `make_attend_to_heads` needs."""
    return shape.num_tiles * kv_heads


def _sizes(
    shape: TileShape,
    spec: AttentionSpec,
    q_shape: tuple[int, ...],
    pool: Shaped[Array, "2 K P S D"],
    *,
    interpret: bool,
) -> _Sizes:
    kv_heads, _, page_size, dim = pool.shape[1:]
    most = max(_MAX_BLOCK_BYTES // (dim * pool.dtype.itemsize), MIN_DOT)
    shape = shape._replace(block_k=min(shape.block_k, most))
    return _Sizes(
        tile_q=shape.tile_q,
        block_k=shape.block_k,
        num_tiles=shape.num_tiles,
        num_splits=_num_splits(shape, spec, q_shape[0], kv_heads, page_size),
        group=q_shape[1] // kv_heads,
        kv_heads=kv_heads,
        page_size=page_size,
        dim=dim,
        spec=spec,
        interpret=interpret,
    )


class _Operands(NamedTuple):
    """See `_Refs`."""

    new: Any
    pool: Any
    batch: Any
    first_page: Any
    sinks: Any
    arrivals: Any


def _attend(sizes: _Sizes, operands: _Operands) -> tuple[Array, Array, Array | None]:
    """(out, pool, arrivals if this launch has used them)."""
    pool, batch, arrivals = operands.pool, operands.batch, operands.arrivals
    batch = batch._replace(num_tiles=batch.num_tiles.reshape(1))
    results = _launch(
        sizes,
        operands._replace(
            pool=pool.reshape(2, sizes.kv_heads, -1, sizes.dim),
            batch=batch,
            first_page=operands.first_page.reshape(1),
            arrivals=arrivals if sizes.num_splits > 1 else None,
        ),
    )
    out, rows, *parts = results
    if parts and arrivals is None:
        merge = functools.partial(_merge_kernel, sizes=sizes)
        grid = (sizes.num_tiles, out.shape[1])
        out = launch_merge(merge, grid, batch, parts, out, interpret=sizes.interpret)
    return out, rows.reshape(pool.shape), parts[2] if len(parts) == 3 else None


def _num_splits(
    shape: TileShape, spec: AttentionSpec, num_tokens: int, kv_heads: int, page_size: int
) -> int:
    """Programs to share a tile's cached keys, from the tiles a full bucket has at least."""
    context = min(shape.pages_per_slot * page_size, spec.window or 2**31)
    if context <= MIN_SPLIT_BLOCKS * shape.block_k:
        return 1
    programs = max(num_tokens // shape.tile_q, 1) * kv_heads
    return min(power_of_two(max(_WANTED_PROGRAMS // programs, 1)), MAX_SPLITS)


def _launch(sizes: _Sizes, operands: _Operands) -> tuple[Array, ...]:
    """Out, pool in its place; where tiles are split parts, weights, and arrivals if given."""
    new, pool = operands.new, operands.pool
    out = (len(new[0]), sizes.kv_heads * sizes.group, sizes.dim)
    shapes = [jax.ShapeDtypeStruct(x, pool.dtype) for x in (out, pool.shape)]
    aliases = {len(new): 1}
    if isinstance(new, _Separate):
        aliases[0] = 0  # the result takes the place of q
    if sizes.num_splits > 1:
        part = (sizes.num_splits, *out)
        shapes += [jax.ShapeDtypeStruct(size, jnp.float32) for size in (part, part[:-1])]
    if operands.arrivals is not None:
        aliases[len(jax.tree.leaves(operands)) - 1] = len(shapes)
        shapes.append(jax.ShapeDtypeStruct(operands.arrivals.shape, jnp.int32))
    call = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),  # fresh: jax #40847
        grid=(sizes.num_tiles, sizes.kv_heads, sizes.num_splits),
        out_shape=shapes,
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(
            num_warps=4, num_stages=2 if sizes.num_rows >= 128 else 3
        ),
        interpret=sizes.interpret,
        name="ragged_paged_attention",
    )
    return tuple(call(*operands))


def _kernel(
    new: Any,
    pool_in: Ref,
    batch: Any,
    first_page: Ref,
    sinks: Any,
    arrivals: Any,
    *results: Ref,
    sizes: _Sizes,
) -> None:
    refs = _Refs(new, pool_in, batch, first_page, sinks, arrivals, *results)
    # Later tiles of a request see more keys: they start first.
    index, head = sizes.num_tiles - 1 - pl.program_id(0), pl.program_id(1)
    split = pl.program_id(2)

    @pl.when(index < batch.num_tiles[0])
    def _() -> None:
        tile = _read_tile(batch, index, sizes)

        @pl.when(split == 0)
        def _() -> None:
            _write_kv(refs, tile, head, sizes)

        @pl.when(split < tile.num_splits)
        def _() -> None:
            _attend_tile(refs, tile, head, split, sizes)


def _read_tile(batch: Any, index: Int32[Array, ""], sizes: _Sizes) -> _Tile:
    slot, start = batch.tile_slot[index], batch.tile_start[index]
    q_len = batch.q_lens[slot]
    prefix = batch.kv_lens[slot] - q_len
    first_block = jnp.int32(0)
    if sizes.spec.window is not None:
        oldest = jnp.maximum(prefix + start - (sizes.spec.window - 1), 0)
        first_block = jnp.minimum(oldest, prefix) // sizes.block_k
    blocks = pl.cdiv(prefix, sizes.block_k) - first_block
    split_blocks, num_splits = share_blocks(blocks, sizes.num_splits)
    return _Tile(
        number=index,
        slot=slot,
        first=batch.q_starts[slot],
        start=start,
        end=jnp.minimum(start + sizes.tile_q, q_len),
        prefix=prefix,
        first_block=first_block,
        split_blocks=split_blocks,
        num_splits=num_splits,
    )


def _write_kv(refs: _Refs, tile: _Tile, head: Int32[Array, ""], sizes: _Sizes) -> None:
    """The tile's new K and V into their pool rows, if its last token has one."""
    last = tile.first + tile.end - 1

    @pl.when(refs.batch.kv_rows[last] != NO_ROW)
    def _() -> None:
        token = written_tokens(refs.batch, tile.first, tile.start, last, sizes.tile_q)
        row = refs.batch.kv_rows[token] + refs.first_page[0] * sizes.page_size
        refs.pool[0, head, row, :] = refs.new.keys(token, head, sizes).astype(refs.pool.dtype)
        refs.pool[1, head, row, :] = refs.new.values(token, head, sizes).astype(refs.pool.dtype)


def written_tokens(
    batch: Any,
    first: Int32[Array, ""],
    start: Int32[Array, ""],
    last: Int32[Array, ""],
    tile_q: int,
) -> Int32[Array, " n"]:
    """Whose K and V each row of a tile writes: its token's, or the `last` one's.

    That is for rows past the end, and for leading tokens without a pool row, whose KV is shared.
    """
    token = jnp.minimum(first + start + _iota(tile_q), last)
    return jnp.where(batch.kv_rows[token] == NO_ROW, last, token)


def _last_live(tile: _Tile, offset: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Tokens of the request at `offset` from the tile's start, none past its last."""
    return jnp.minimum(tile.start + offset, tile.end - 1)


def _attend_tile(
    refs: _Refs, tile: _Tile, head: Int32[Array, ""], split: Int32[Array, ""], sizes: _Sizes
) -> None:
    # Queries, one row a (token, head of the group).
    row, block_k = _iota(sizes.num_rows), sizes.block_k
    token = _last_live(tile, row // sizes.padded_group)
    in_group = jnp.minimum(row % sizes.padded_group, sizes.group - 1)
    at, heads = tile.first + token, head * sizes.group + in_group
    queries = refs.new.queries(at, heads, sizes).astype(refs.pool.dtype)
    carry = _nothing_seen(refs, heads, split, sizes)

    def in_window(key, distance):  # pyright: ignore
        """Whether a query sees `key`; `distance` from the tile's keys to its queries."""
        if sizes.spec.window is None:
            return None
        return key[None] > (token + distance)[:, None] - sizes.spec.window

    # This split's cached keys: all visible but the last block's end; rows are read a block ahead.
    def cached(block, carry, *, is_whole):  # pyright: ignore
        known, rows = carry[:3], carry[3]
        keys, values = refs.pool_in[0, head, rows, :], refs.pool_in[1, head, rows, :]
        rows = _cached_rows(refs, tile, block + 1, sizes)
        key = block * block_k + _iota(block_k)
        end = jnp.broadcast_to((key < tile.prefix)[None], (sizes.num_rows, block_k))
        visible = _both(in_window(key, tile.prefix), None if is_whole else end)
        known = _online_softmax(queries, keys, values, known, sizes, visible=visible)
        return *known, rows

    # New keys, in the first split: causal on the diagonal, all visible in the blocks before it.
    def new(block, carry, *, is_causal):  # pyright: ignore
        key = block * block_k + _iota(block_k)
        source = tile.first + jnp.minimum(key, tile.end - 1)
        keys = refs.new.keys(source, head, sizes)
        values = refs.new.values(source, head, sizes)
        visible = key[None] <= token[:, None] if is_causal else None
        visible = _both(visible, in_window(key, 0))
        return _online_softmax(queries, keys, values, carry, sizes, visible=visible)

    first = tile.first_block + split * tile.split_blocks
    last = jnp.minimum(first + tile.split_blocks, pl.cdiv(tile.prefix, block_k))
    whole = jnp.maximum(first, jnp.minimum(last, tile.prefix // block_k))
    carry = (*carry, _cached_rows(refs, tile, first, sizes))
    carry = lax.fori_loop(first, whole, functools.partial(cached, is_whole=True), carry)
    carry = lax.fori_loop(whole, last, functools.partial(cached, is_whole=False), carry)[:-1]
    is_first = (split == 0).astype(jnp.int32)
    window = sizes.spec.window
    oldest = 0 if window is None else jnp.maximum(tile.start - (window - 1), 0) // block_k
    diagonal, last = is_first * (tile.start // block_k), is_first * pl.cdiv(tile.end, block_k)
    carry = lax.fori_loop(oldest, diagonal, functools.partial(new, is_causal=False), carry)
    carry = lax.fori_loop(diagonal, last, functools.partial(new, is_causal=True), carry)

    # The result, or this split's part of it.
    top, total, acc = carry
    total = jnp.maximum(total, LEAST_SUM)
    acc = acc / total[:, None]
    if sizes.num_splits == 1:
        refs.out[at, heads, :] = acc.astype(refs.out.dtype)
        return

    @pl.when(tile.num_splits == 1)
    def _() -> None:
        refs.out[at, heads, :] = acc.astype(refs.out.dtype)

    @pl.when(tile.num_splits > 1)
    def _() -> None:
        refs.parts[split, at, heads, :] = acc
        refs.weights[split, at, heads] = top * sizes.scale + jnp.log2(total)
        if refs.arrivals is not None:
            _merge_if_last(refs, tile, head, at, heads, sizes)


def _nothing_seen(
    refs: _Refs, heads: Int32[Array, " rows"], split: Int32[Array, ""], sizes: _Sizes
) -> Carry:
    """What the sums begin with; a sink is a key without a value, which the first split has seen."""
    zeros = jnp.zeros((sizes.num_rows,), jnp.float32)
    acc = jnp.zeros((sizes.num_rows, sizes.dim), jnp.float32)
    if refs.sinks is None:
        return zeros + LOWEST, zeros, acc
    sinks = refs.sinks[heads].astype(jnp.float32) * (LOG2_E / sizes.scale)
    total = zeros + (split == 0).astype(jnp.float32)
    return jnp.where(total > 0, jnp.maximum(sinks, LOWEST), LOWEST), total, acc


def _merge_if_last(
    refs: _Refs, tile: _Tile, head: Int32[Array, ""], at: Any, heads: Any, sizes: _Sizes
) -> None:
    """The last of a tile's splits to arrive merges all, and leaves the count at zero."""
    count = tile.number * sizes.kv_heads + head

    @pl.when(count_arrival(refs.arrivals, count, interpret=sizes.interpret) == tile.num_splits - 1)
    def _() -> None:
        refs.arrivals[count] = 0
        merged = merge_splits(refs.parts, refs.weights, tile.num_splits, at, heads)
        refs.out[at, heads, :] = merged.astype(refs.out.dtype)


def count_arrival(arrivals: Ref, index: Any, *, interpret: bool) -> Int32[Array, ""]:
    """How many programs had arrived before this one, all of whose stores are seen from now on."""
    if interpret:  # one program after the other, and no atomics
        before = arrivals[index]
        arrivals[index] = before + 1
        return before
    plt.debug_barrier()
    return plt.atomic_add(arrivals, (index,), 1)


def _merge_kernel(
    batch: Any, parts: Ref, weights: Ref, out_in: Ref, out: Ref, *, sizes: _Sizes
) -> None:
    """One tile and one query head: the parts' mean by their softmax sums."""
    index, head = pl.program_id(0), pl.program_id(1)

    @pl.when(index < batch.num_tiles[0])
    def _() -> None:
        tile = _read_tile(batch, index, sizes)

        @pl.when(tile.num_splits > 1)
        def _() -> None:
            at = tile.first + _last_live(tile, _iota(sizes.tile_q))
            merged = merge_splits(parts, weights, tile.num_splits, at, head)
            out[at, head, :] = merged.astype(out.dtype)


def _cached_rows(refs: _Refs, tile: _Tile, block: Any, sizes: _Sizes) -> Int32[Array, " k"]:
    """Pool rows of a block of cached keys; past the end that of the last one."""
    last = jnp.maximum(tile.prefix - 1, 0)  # read, not used, where no key is cached
    key = jnp.minimum(block * sizes.block_k + _iota(sizes.block_k), last)
    page = refs.batch.page_table[tile.slot, key // sizes.page_size] + refs.first_page[0]
    return page * sizes.page_size + key % sizes.page_size


def _both(
    one: Bool[Array, "rows k"] | None, other: Bool[Array, "rows k"] | None
) -> Bool[Array, "rows k"] | None:
    return other if one is None else one if other is None else one & other


def _online_softmax(
    queries: Shaped[Array, "rows D"],
    keys: Shaped[Array, "k D"],
    values: Shaped[Array, "k D"],
    carry: Carry,
    sizes: _Sizes,
    *,
    visible: Bool[Array, "rows k"] | None,
) -> Carry:
    """One block of keys folded into running (max before the scale, sum, weighted values)."""
    (top, total, acc), scale = carry, sizes.scale
    scores = dot(queries, keys, trans_b=True)
    if sizes.spec.soft_cap is not None:  # the cap itself is part of the scale
        scores = jnp.tanh(scores * (sizes.score_scale / sizes.spec.soft_cap))
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(1))
    weights = jnp.exp2(scores * scale - (new_top * scale)[:, None])
    rescale = jnp.exp2((top - new_top) * scale)
    acc = acc * rescale[:, None] + dot(weights.astype(values.dtype), values)
    return new_top, total * rescale + weights.sum(1), acc


def _iota(length: int) -> Int32[Array, " length"]:
    return lax.broadcasted_iota(jnp.int32, (length,), 0)


PALLAS_TRITON = AttentionBackend(
    name="pallas_triton",
    capabilities=Capabilities(
        platforms=frozenset({"gpu"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        max_page_size=128,
        head_dims=frozenset({16, 32, 64, 128, 256}),  # sides of a Triton dot: powers of two
        has_odd_groups=True,
        has_window=True,
        has_soft_cap=True,
        has_sinks=True,
        has_max_context=True,
    ),
    tile_shape=_tile_shape,
    make=make_attend,
    is_fusible=True,
)
