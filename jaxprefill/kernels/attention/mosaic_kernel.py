"""The Pallas/Mosaic kernel for Hopper: wgmma, fed by TMA.

A program takes a tile of 64 query tokens and two query heads of one KV head; it has three
warpgroups, and what they share lies in shared memory:

    0   rows of the first head     scores, softmax, sums; while one of the two multiplies,
    1   rows of the second head    the other one does its exponentials
    2   copies blocks of 128 keys and values from the pool, page by page, a stage ahead

All keys come from the pool, the new ones too: `whole_tiles.write_pool` writes those before.
Queries are read and results written past shared memory, as TMA wants rows at multiples of 8 and
requests begin anywhere. The schedule is that of FlashAttention-3 (Shah et al., 2024).
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jaxprefill.compat import load_fragments, store_fragments
from jaxprefill.kernels.attention.api import RaggedBatch
from jaxprefill.kernels.attention.pallas_mosaic_gpu import HEAD_DIM, KEYS, ROWS
from jaxprefill.kernels.triton import LOG2_E, Ref

_STAGES = 2
# Registers of a thread: those that multiply hold the sums, and get what the copying ones spare.
_COMPUTE_REGISTERS, _COPY_REGISTERS = 232, 40
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_Sums: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


class _Sizes(NamedTuple):
    """What one kernel is specialised on."""

    num_tokens: int
    num_tiles: int
    num_slots: int
    q_heads: int
    kv_heads: int
    page_size: int
    pages_per_slot: int

    @property
    def firsts(self) -> "_Integers":
        """Where the integers begin."""
        tiles, slots = (self.num_tiles,) * 2, (self.num_slots,) * 3
        return _Integers(*itertools.accumulate((0, 1, *tiles, *slots)))

    @property
    def block_pages(self) -> int:
        return KEYS // self.page_size


class _Integers(NamedTuple):
    """The batch's integers, or where each of them begins in one array."""

    num_tiles: Any
    tile_slot: Any
    tile_start: Any
    q_lens: Any
    kv_lens: Any
    q_starts: Any
    pages: Any  # of the pool


class _Operands(NamedTuple):
    """Arrays, and references to them in the kernel.

    Mosaic's copies want arrays that begin at multiples of 256 bytes; a slice of the batch's
    buffer, which XLA hands on in place, does not: so all integers are one array, made anew.
    """

    q: Any  # [T, H, D]
    pool: Any  # [2, K, P, S, D]
    integers: Any  # [words]: `_Integers`


class _Shared(NamedTuple):
    """Shared memory and barriers; `*_full` wait for copies, `*_free` for the two that read."""

    q: Any  # [2, rows, D]
    keys: Any  # [stages, keys, D]
    values: Any
    keys_full: Any
    values_full: Any
    keys_free: Any
    values_free: Any
    turn: Any  # both warpgroups that multiply meet here


class _Tile(NamedTuple):
    """One tile's integers."""

    slot: Int32[Array, ""]
    token: Int32[Array, ""]  # row of its first query; moved back where rows would be past T
    position: Int32[Array, ""]  # of that row in the request
    is_full: Any  # whether all its rows are the request's
    num_keys: Int32[Array, ""]  # that its last query sees
    kv_len: Int32[Array, ""]


class _State(NamedTuple):
    """What a warpgroup knows of its rows after some blocks; maxima and sums are base 2."""

    out: Float32[Array, "rows D"]
    top: Float32[Array, " rows"]
    total: Float32[Array, " rows"]


def attend_to_pool(
    q: Float[Array, "T H D"],
    pool: Shaped[Array, "2 K P S D"],
    batch: RaggedBatch,
    first_page: Int32[Array, ""],
) -> tuple[Float[Array, "T H D"], Float[Array, "rows H D"]]:
    """Causal attention to keys that all lie in the pool.

    (out, parts): rows of full tiles; of every request ROWS rows of its other tile, as
    `whole_tiles.merge_parts` takes them. T is at least ROWS, and each KV head has an even number
    of query heads.
    """
    q_heads, (_, kv_heads, _, page_size, _) = q.shape[1], pool.shape
    num_slots, pages_per_slot = batch.page_table.shape
    sizes = _Sizes(
        len(q), len(batch.tile_slot), num_slots, q_heads, kv_heads, page_size, pages_per_slot
    )
    call = plgpu.kernel(
        functools.partial(_kernel, sizes=sizes),
        out_type=[
            jax.ShapeDtypeStruct((num_rows, q_heads, HEAD_DIM), q.dtype)
            for num_rows in (sizes.num_tokens, num_slots * ROWS)
        ],
        grid=(sizes.num_tiles, q_heads // 2),
        grid_names=("tile", "pair"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=list(_shared_types(sizes, q.dtype)),
    )
    pages = (batch.page_table + first_page).reshape(-1)
    integers = _Integers(
        batch.num_tiles.reshape(1), batch.tile_slot, batch.tile_start, batch.q_lens, batch.kv_lens,
        batch.q_starts, pages,
    )  # fmt: skip
    out, parts = call(*_Operands(q, pool, jnp.concatenate(integers)))
    return out, parts


def _shared_types(sizes: _Sizes, dtype: Any) -> _Shared:
    block = plgpu.SMEM((_STAGES, KEYS, HEAD_DIM), dtype, transforms=_SWIZZLED)
    full = plgpu.Barrier(num_arrivals=sizes.block_pages, num_barriers=_STAGES)
    free = plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES)
    return _Shared(
        q=plgpu.SMEM((2, ROWS, HEAD_DIM), dtype, transforms=_SWIZZLED),
        keys=block,
        values=block,
        keys_full=full,
        values_full=full,
        keys_free=free,
        values_free=free,
        turn=plgpu.Barrier(num_arrivals=2),
    )


def _kernel(*refs: Ref, sizes: _Sizes) -> None:
    operands = _Operands(*refs[: len(_Operands._fields)])
    out, parts, *scratch = refs[len(operands) :]
    shared = _Shared(*scratch)
    # Later tiles of a request see more keys: they start first.
    index, pair = sizes.num_tiles - 1 - lax.axis_index("tile"), lax.axis_index("pair")
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(index < operands.integers[sizes.firsts.num_tiles])
    def _() -> None:
        tile = _read_tile(operands, index, sizes)
        num_blocks = pl.cdiv(tile.num_keys, KEYS)

        @pl.when(warpgroup < 2)
        def _() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            head = 2 * pair + warpgroup
            state = _attend_rows(operands, shared, tile, head, warpgroup, num_blocks)
            _store((out, parts), tile, head, state)

        @pl.when(warpgroup == 2)
        def _() -> None:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            kv_head = lax.div(2 * pair, jnp.int32(sizes.q_heads // sizes.kv_heads))
            _copy_blocks(operands, shared, tile, kv_head, num_blocks, sizes)


def _read_tile(operands: _Operands, index: Int32[Array, ""], sizes: _Sizes) -> _Tile:
    integers, firsts = operands.integers, sizes.firsts
    slot, start = integers[firsts.tile_slot + index], integers[firsts.tile_start + index]
    q_len, kv_len = integers[firsts.q_lens + slot], integers[firsts.kv_lens + slot]
    token, position = integers[firsts.q_starts + slot] + start, kv_len - q_len + start
    moved = jnp.maximum(token + ROWS - sizes.num_tokens, 0)
    return _Tile(
        slot=slot,
        token=token - moved,
        position=position - moved,
        is_full=q_len - start >= ROWS,
        num_keys=jnp.minimum(position + ROWS, kv_len),
        kv_len=kv_len,
    )


def _copy_blocks(
    operands: _Operands,
    shared: _Shared,
    tile: _Tile,
    kv_head: Int32[Array, ""],
    num_blocks: Int32[Array, ""],
    sizes: _Sizes,
) -> None:
    """Keys and values of every block that the tile sees; past its end, the last page again."""
    row = sizes.firsts.pages + tile.slot * sizes.pages_per_slot
    last_page = lax.div(tile.kv_len - 1, jnp.int32(sizes.page_size))

    def copy(part: int, block: Int32[Array, ""], to: Ref, full: Ref, free: Ref) -> None:
        stage = lax.rem(block, jnp.int32(_STAGES))

        @pl.when(block >= _STAGES)
        def _() -> None:
            plgpu.barrier_wait(free.at[stage])

        for number in range(sizes.block_pages):
            column = jnp.minimum(block * sizes.block_pages + number, last_page)
            plgpu.copy_gmem_to_smem(
                operands.pool.at[part, kv_head, operands.integers[row + column]],
                to.at[stage, pl.ds(number * sizes.page_size, sizes.page_size)],
                full.at[stage],
            )

    def copy_both(block: Int32[Array, ""], _: None) -> None:
        copy(0, block, shared.keys, shared.keys_full, shared.keys_free)
        copy(1, block, shared.values, shared.values_full, shared.values_free)

    lax.fori_loop(0, num_blocks, copy_both, None)


def _attend_rows(
    operands: _Operands,
    shared: _Shared,
    tile: _Tile,
    head: Int32[Array, ""],
    warpgroup: Int32[Array, ""],
    num_blocks: Int32[Array, ""],
) -> _State:
    """The tile's rows of one head, over all blocks: only the last ones need a mask."""
    queries = shared.q.at[warpgroup]
    rows = pl.ds(tile.token, ROWS)
    queries[...] = load_fragments(operands.q.at[rows, head], plgpu.Layout.WGMMA)
    plgpu.commit_smem()

    # The second warpgroup goes half a step behind the first.
    @pl.when(warpgroup == 1)
    def _() -> None:
        _meet(shared)

    step = functools.partial(_attend_block, shared, queries, tile)
    whole = lax.div(tile.position + 1, jnp.int32(KEYS))
    state = lax.fori_loop(0, whole, functools.partial(step, is_masked=False), _nothing_seen())
    state = lax.fori_loop(whole, num_blocks, functools.partial(step, is_masked=True), state)

    @pl.when(warpgroup == 0)
    def _() -> None:
        _meet(shared)

    return state


def _nothing_seen() -> _State:
    def column(value: float) -> Float32[Array, " rows"]:
        full = jnp.full((ROWS,), value, jnp.float32)
        return plgpu.layout_cast(full, plgpu.Layout.WGMMA.reduce(1))

    zeros = jnp.zeros((ROWS, HEAD_DIM), jnp.float32)
    return _State(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), column(-jnp.inf), column(0.0))


def _meet(shared: _Shared) -> None:
    plgpu.barrier_arrive(shared.turn)
    plgpu.barrier_wait(shared.turn)


def _attend_block(
    shared: _Shared,
    queries: Ref,
    tile: _Tile,
    block: Int32[Array, ""],
    state: _State,
    *,
    is_masked: bool,
) -> _State:
    """One block of keys folded into what is known; the other warpgroup multiplies in between."""
    stage = lax.rem(block, jnp.int32(_STAGES))
    dtype = shared.keys.dtype

    def multiply(sums: Ref) -> Float32[Array, "rows keys"]:
        plgpu.wgmma(sums, queries, shared.keys.at[stage].transpose((1, 0)))
        _meet(shared)
        return sums[...]

    plgpu.barrier_wait(shared.keys_full.at[stage])
    scores = pl.run_scoped(multiply, _Sums((ROWS, KEYS), jnp.float32))
    plgpu.barrier_arrive(shared.keys_free.at[stage])
    scores *= jnp.float32(LOG2_E * HEAD_DIM**-0.5)
    if is_masked:
        scores = jnp.where(_is_seen(tile, block), scores, -jnp.inf)
    top = jnp.maximum(state.top, scores.max(axis=1))
    rescale = jnp.exp2(state.top - top)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
    out = state.out * lax.broadcast_in_dim(rescale, state.out.shape, [0])
    total = state.total * rescale + weights.sum(axis=1)
    # Nothing of this may be put off until the products below run.
    out, total, top, weights = lax.optimization_barrier((out, total, top, weights.astype(dtype)))
    plgpu.barrier_arrive(shared.turn)
    plgpu.barrier_wait(shared.values_full.at[stage])
    plgpu.barrier_wait(shared.turn)

    def add(sums: Ref) -> None:
        plgpu.wgmma(sums, weights, shared.values.at[stage])

    out = pl.run_state(add)(_Sums.init(out))
    plgpu.barrier_arrive(shared.values_free.at[stage])
    return _State(out, top, total)


def _is_seen(tile: _Tile, block: Int32[Array, ""]) -> Array:
    """[rows, keys]: whether a query sees a key of the block."""
    iota = functools.partial(
        plgpu.broadcasted_iota, jnp.int32, (ROWS, KEYS), layout=plgpu.Layout.WGMMA
    )
    return iota(1) + block * KEYS <= iota(0) + tile.position


def _store(
    results: tuple[Ref, Ref],
    tile: _Tile,
    head: Int32[Array, ""],
    state: _State,
) -> None:
    """The rows of a full tile into the result, those of another into its slot's part."""
    out, parts = results
    result = state.out / lax.broadcast_in_dim(state.total, state.out.shape, [0])
    result = result.astype(out.dtype)

    @pl.when(tile.is_full)
    def _() -> None:
        store_fragments(out.at[pl.ds(tile.token, ROWS), head], result)

    @pl.when(jnp.logical_not(tile.is_full))
    def _() -> None:
        store_fragments(parts.at[pl.ds(tile.slot * ROWS, ROWS), head], result)
