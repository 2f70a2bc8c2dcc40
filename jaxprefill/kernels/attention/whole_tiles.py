"""What a kernel that moves whole tiles needs before and after, in Pallas/Triton."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32, Shaped

from jaxprefill.kernels.attention.api import RaggedBatch
from jaxprefill.kernels.attention.pallas_triton import written_tokens
from jaxprefill.kernels.attention.tiles import NO_ROW
from jaxprefill.kernels.triton import Ref


def write_pool(
    pool: Shaped[Array, "2 K P S D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    batch: RaggedBatch,
    first_page: Int32[Array, ""],
    *,
    tile_q: int,
    interpret: bool = False,
) -> Shaped[Array, "2 K P S D"]:
    """The pool, in its place, with each new token's K and V in its row.

    Values of rows that follow a request's last token in its page become zero: no token is there
    yet, and a reader of whole pages finds numbers. Tokens whose KV is shared write nothing.

    Args:
        pool: donated or dead.
        k: keys of the new tokens, rotated.
        v: values of the new tokens.
        batch: with tiles of `tile_q` tokens, a power of two.
        first_page: where the layer's pages begin in the pool.
        tile_q: tokens a tile.
        interpret: runs it on any device, slowly.
    """
    _, kv_heads, _, page_size, dim = pool.shape
    rows = pool.reshape(2, kv_heads, -1, dim)
    batch = batch._replace(num_tiles=batch.num_tiles.reshape(1))
    call = pl.pallas_call(
        functools.partial(_write_kernel, tile_q=tile_q, page_size=page_size),
        grid=(len(batch.tile_slot), kv_heads),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        input_output_aliases={0: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="write_pool",
    )
    return call(rows, k, v, batch, first_page.reshape(1)).reshape(pool.shape)


def _write_kernel(
    _: Ref, k: Ref, v: Ref, batch: Any, first_page: Ref, pool: Ref, *, tile_q: int, page_size: int
) -> None:
    index, head = pl.program_id(0), pl.program_id(1)

    @pl.when(index < batch.num_tiles[0])
    def _() -> None:
        slot, start = batch.tile_slot[index], batch.tile_start[index]
        q_len, first = batch.q_lens[slot], batch.q_starts[slot]
        end = jnp.minimum(start + tile_q, q_len)
        last, first_row = first + end - 1, first_page[0] * page_size

        @pl.when(batch.kv_rows[last] != NO_ROW)
        def _() -> None:
            token = written_tokens(batch, first, start, last, tile_q)
            row = batch.kv_rows[token] + first_row
            for part, new in enumerate((k, v)):
                pool[part, head, row, :] = new[token, head, :].astype(pool.dtype)

            left = page_size - 1 - batch.kv_rows[last] % page_size

            @pl.when((end == q_len) & (left > 0))
            def _() -> None:
                row = batch.kv_rows[last] + first_row
                row += jnp.minimum(1 + lax.iota(jnp.int32, page_size), left)
                pool[1, head, row, :] = jnp.zeros((page_size, pool.shape[-1]), pool.dtype)


def merge_parts(
    out: Float[Array, "T H D"],
    parts: Float[Array, "rows H D"],
    batch: RaggedBatch,
    *,
    tile_q: int,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """`out`, in its place, with the rows of tiles that are not full; padding rows become zero.

    Args:
        out: donated or dead; rows of full tiles are there.
        parts: `tile_q` rows a request: of its last tile, if that is not full, moved back so far
            that none would lie past T.
        batch: with tiles of `tile_q` tokens, a power of two.
        tile_q: tokens a tile.
        interpret: runs it on any device, slowly.
    """
    batch = batch._replace(num_tiles=batch.num_tiles.reshape(1))
    # What the tile list has to spare covers the padding, with one more where T is not whole tiles.
    height = len(batch.tile_slot) + bool(len(out) % tile_q)
    call = pl.pallas_call(
        functools.partial(_merge_kernel, tile_q=tile_q),
        grid=(height, out.shape[1]),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={0: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="merge_parts",
    )
    return call(out, parts, batch)


def _merge_kernel(_: Ref, parts: Ref, batch: Any, out: Ref, *, tile_q: int) -> None:
    index, head = pl.program_id(0), pl.program_id(1)
    num_tokens, spare = out.shape[0], index - batch.num_tiles[0]

    @pl.when(spare < 0)
    def _() -> None:
        slot, start = batch.tile_slot[index], batch.tile_start[index]
        num_rows = batch.q_lens[slot] - start

        @pl.when(num_rows < tile_q)
        def _() -> None:
            row, first = (
                jnp.minimum(lax.iota(jnp.int32, tile_q), num_rows - 1),
                batch.q_starts[slot] + start,
            )
            moved = jnp.maximum(first + tile_q - num_tokens, 0)
            out[first + row, head, :] = parts[slot * tile_q + moved + row, head, :]

    last_slot = batch.q_lens.shape[0] - 1
    padding = batch.q_starts[last_slot] + batch.q_lens[last_slot] + spare * tile_q

    @pl.when((spare >= 0) & (padding < num_tokens))
    def _() -> None:
        row = jnp.minimum(padding + lax.iota(jnp.int32, tile_q), num_tokens - 1)
        out[row, head, :] = jnp.zeros((tile_q, out.shape[-1]), out.dtype)
