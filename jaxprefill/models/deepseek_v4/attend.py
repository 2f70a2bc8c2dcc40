"""The attention core over pages: in a kernel, for GPUs, or in plain JAX, tile by tile.

The plain one needs memory for a tile, not for the batch. A tile is up to `tile_q` new tokens of
one request. They share the window's keys and the blocks of heavily compressed entries; the entries
that an indexer chose are each query's own.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.device import product_precision
from jaxprefill.kernels.latent_attention import LatentKeys, attend_latent
from jaxprefill.models.deepseek_v4.pages import PagedPool, recent_table

_LOWEST = -1e30
ENTRY_BLOCK = 128  # heavily compressed entries that are read at once


class Tile(NamedTuple):
    """The tokens of one tile, live ones first.

    Attributes:
        row: their rows among the batch's tokens.
        position: in their request.
        pages: the request's row of the page table.
        recent: its row of the table of recent pages.
        kv_len: tokens of the request, this pass's included.
    """

    row: Int32[Array, " q"]
    position: Int32[Array, " q"]
    is_live: Bool[Array, " q"]
    pages: Int32[Array, " W"]
    recent: Int32[Array, " C"]
    kv_len: Int32[Array, ""]

    def take(self, rows: Float[Array, "T ..."]) -> Float[Array, "q ..."]:
        """The tile's rows; zeros where there is no token, whatever padding holds."""
        live = self.is_live.reshape(-1, *(1,) * (rows.ndim - 1))
        return jnp.where(live, rows[self.row], 0)


def tile_of(batch: RaggedBatch, at: Int32[Array, ""], tile_q: int) -> Tile:
    """Tile number `at`."""
    slot, offset = batch.tile_slot[at], batch.tile_start[at] + jnp.arange(tile_q)
    row = jnp.clip(batch.q_starts[slot] + offset, 0, len(batch.kv_rows) - 1)
    position = batch.kv_lens[slot] - batch.q_lens[slot] + offset
    is_live = (offset < batch.q_lens[slot]) & (at < batch.num_tiles)
    pages, recent = batch.page_table[slot], recent_table(batch)[slot]
    return Tile(row, position, is_live, pages, recent, batch.kv_lens[slot])


class Softmax(NamedTuple):
    """A softmax over keys in the making; it begins with the sink, which has no value."""

    top: Float[Array, "q H"]
    total: Float[Array, "q H"]
    value: Float[Array, "q H D"]

    @staticmethod
    def begin(q: Float[Array, "q H D"], sinks: Float[Array, " H"]) -> "Softmax":
        """The sink's share alone."""
        top = jnp.broadcast_to(sinks.astype(jnp.float32), q.shape[:2])
        return Softmax(top, jnp.ones_like(top), jnp.zeros(q.shape, jnp.float32))

    def fold(
        self,
        q: Float[Array, "q H D"],
        keys: Float[Array, "*q k D"],
        is_seen: Bool[Array, "q k"],
    ) -> "Softmax":
        """With more keys, which are values too: all queries' or, with three axes, each its own."""
        own = "q" if keys.ndim == 3 else ""
        precision = product_precision(keys.dtype)
        logits = jnp.einsum(
            f"qhd,{own}kd->qhk",
            q.astype(keys.dtype),
            keys,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        logits = jnp.where(is_seen[:, None], logits, _LOWEST)
        top = jnp.maximum(self.top, logits.max(-1))
        weights = jnp.where(is_seen[:, None], jnp.exp(logits - top[..., None]), 0)
        scale = jnp.exp(self.top - top)
        added = jnp.einsum(
            f"qhk,{own}kd->qhd",
            weights.astype(keys.dtype),
            keys,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        total = self.total * scale + weights.sum(-1)
        return Softmax(top, total, self.value * scale[..., None] + added)

    def finish(self) -> Float[Array, "q H D"]:
        """The weighted mean of the values."""
        return self.value / self.total[..., None]


class Seen(NamedTuple):
    """What a layer's queries see.

    Attributes:
        reach: tokens of the window, a query's own among them.
        entries: compressed ones, each of which stands for `rate` tokens; None: none.
    """

    window: PagedPool
    reach: int
    entries: PagedPool | None = None
    rate: int = 1


def attend_tile(
    q: Float[Array, "q H D"],
    seen: Seen,
    sinks: Float[Array, " H"],
    tile: Tile,
    *,
    chosen: Int32[Array, "q k"] | None = None,
) -> Float[Array, "q H D"]:
    """Attention of one tile in plain JAX; `chosen`: each query's own entries, None: all."""
    sums = fold_window(Softmax.begin(q, sinks), q, tile, seen.window, seen.reach)
    if seen.entries is not None and chosen is not None:
        sums = fold_chosen(sums, q, tile, seen.entries, chosen, seen.rate)
    elif seen.entries is not None:
        sums = fold_entries(sums, q, tile, seen.entries, seen.rate)
    return sums.finish()


def attend_in_kernel(
    q: Float[Array, "T H D"],
    seen: Seen,
    sinks: Float[Array, " H"],
    batch: RaggedBatch,
    tile_q: int,
    *,
    chosen: Int32[Array, "T k"] | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """The same of all tokens, where entries come before what stands for none in each row.

    Rows of padding hold anything; `interpret` runs it on any device.
    """
    keys = LatentKeys(
        window=seen.window.entries(),
        recent_table=recent_table(batch),
        reach=seen.reach,
        entries=None if seen.entries is None else seen.entries.entries(seen.rate),
        chosen=chosen,
    )
    return attend_latent(q, keys, sinks, batch, tile_q=tile_q, interpret=interpret)


def fold_window(
    sums: Softmax, q: Float[Array, "q H D"], tile: Tile, pool: PagedPool, window: int
) -> Softmax:
    """The keys of the sliding window: read once for the tile."""
    key = tile.position[0] - window + 1 + jnp.arange(len(tile.position) + window - 1)
    is_there = (key >= 0) & (key < tile.kv_len)
    keys = jnp.where(is_there[:, None], pool.read_position(tile.recent, jnp.maximum(key, 0)), 0)
    distance = tile.position[:, None] - key
    return sums.fold(q, keys, is_there & (distance >= 0) & (distance < window))


def fold_entries(
    sums: Softmax, q: Float[Array, "q H D"], tile: Tile, pool: PagedPool, rate: int
) -> Softmax:
    """All entries of full windows up to each query's token."""
    seen = (tile.position + 1) // rate

    def step(block: Int32[Array, ""], sums: Softmax) -> Softmax:
        entry = block * ENTRY_BLOCK + jnp.arange(ENTRY_BLOCK)
        is_seen = (entry < seen[:, None]) & tile.is_live[:, None]
        return sums.fold(q, read_entries(tile, pool, entry, rate, is_seen.any(0)), is_seen)

    most = jnp.where(tile.is_live, seen, 0).max()
    return lax.fori_loop(0, -(-most // ENTRY_BLOCK), step, sums)


def fold_chosen(
    sums: Softmax,
    q: Float[Array, "q H D"],
    tile: Tile,
    pool: PagedPool,
    chosen: Int32[Array, "q k"],
    rate: int,
) -> Softmax:
    """Each query's own entries; those past its token are none."""
    is_seen = (chosen < ((tile.position + 1) // rate)[:, None]) & tile.is_live[:, None]
    return sums.fold(q, read_entries(tile, pool, chosen, rate, is_seen), is_seen)


def read_entries(
    tile: Tile,
    pool: PagedPool,
    entry: Int32[Array, "*at"],
    rate: int,
    is_seen: Bool[Array, "*at"],
) -> Float[Array, "*at D"]:
    """Entries of the tile's request; zeros where not seen, as what is there may be stale."""
    last = jnp.where(is_seen, (entry + 1) * rate - 1, 0)
    return jnp.where(is_seen[..., None], pool.read_position(tile.pages, last, rate), 0)


def by_tile(
    batch: RaggedBatch,
    tile_q: int,
    width: int,
    attend: Callable[[Tile], Float[Array, "q width"]],
) -> Float[Array, "T width"]:
    """What `attend` makes of each tile, in token order; zeros for padding tokens."""
    num_tokens = len(batch.kv_rows)

    def step(at: Int32[Array, ""], out: Float[Array, "T width"]) -> Float[Array, "T width"]:
        tile = tile_of(batch, at, tile_q)
        home = jnp.where(tile.is_live, tile.row, num_tokens)
        return out.at[home].set(attend(tile).astype(out.dtype), mode="drop")

    out = jnp.zeros((num_tokens, width), jnp.float32)
    return lax.fori_loop(0, batch.num_tiles, step, out)
