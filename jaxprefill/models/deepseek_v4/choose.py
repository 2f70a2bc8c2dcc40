"""Which compressed entries each query attends to: the indexer's best, in three ways, one answer.

*materialised*: all scores of the batch, [tokens, context / 4] float32, then one top-k.
*streaming*: a running top-k over blocks of entries; scores of one block and one tile at a time.
*pallas_triton*: the same in a kernel, for GPUs: no loop in the executable, and no sorting.
Equal scores go to the earlier entry in all.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.top_k import choose_entries
from jaxprefill.models.deepseek_v4.attend import Tile, read_entries, tile_of
from jaxprefill.models.deepseek_v4.modules import index_scores
from jaxprefill.models.deepseek_v4.pages import PagedPool

# How a layer chooses; the last also attends in a kernel.
CoreVariant = Literal["streaming", "materialised", "pallas_triton"]
SCORE_BLOCK = 1024  # entries that are scored at once

IndexQuery = tuple[Float[Array, "q I D"], Float[Array, "q I"]]  # queries, head weights


class Choice(NamedTuple):
    """What is chosen from, and how many.

    Attributes:
        keys: the indexer's.
        query: a tile's queries; made tile by tile, so that they are never there as a whole.
        block: entries that are scored at once.
    """

    keys: PagedPool
    query: Callable[[Tile], IndexQuery]
    rate: int
    top_k: int
    block: int = SCORE_BLOCK

    def num_entries(self, batch: RaggedBatch) -> int:
        """The most entries that a request of this shape can have."""
        return batch.page_table.shape[1] * self.keys.page_size // self.rate

    def block_scores(
        self, tile: Tile, query: IndexQuery, first: Int32[Array, ""], count: int
    ) -> Float[Array, "q count"]:
        """Scores of entries `first` to first + count - 1; -inf for those a query may not see."""
        entry = first + jnp.arange(count)
        is_seen = (entry < ((tile.position + 1) // self.rate)[:, None]) & tile.is_live[:, None]
        keys = read_entries(tile, self.keys, entry, self.rate, is_seen.any(0))
        return jnp.where(is_seen, index_scores(*query, keys), -jnp.inf)

    def num_seen(self, tile: Tile) -> Int32[Array, ""]:
        """Entries that any query of the tile sees."""
        return jnp.where(tile.is_live, (tile.position + 1) // self.rate, 0).max()


def choose_streaming(choice: Choice, batch: RaggedBatch, tile: Tile) -> Int32[Array, "q k"]:
    """The best entries of one tile's queries; numbers past what a query sees are none."""
    capacity = choice.num_entries(batch)
    top_k, block = min(choice.top_k, capacity), min(choice.block, capacity)
    query, num_queries = choice.query(tile), len(tile.position)

    def step(
        at: Int32[Array, ""], best: tuple[Float[Array, "q k"], Int32[Array, "q k"]]
    ) -> tuple[Float[Array, "q k"], Int32[Array, "q k"]]:
        scores = choice.block_scores(tile, query, at * block, block)
        entry = jnp.broadcast_to(at * block + jnp.arange(block, dtype=jnp.int32), scores.shape)
        scores = jnp.concatenate([best[0], scores], axis=1)
        entries = jnp.concatenate([best[1], entry], axis=1)
        scores, places = lax.top_k(scores, top_k)
        return scores, jnp.take_along_axis(entries, places, axis=1)

    none = jnp.full((num_queries, top_k), capacity, jnp.int32)
    start = (jnp.full(none.shape, -jnp.inf, jnp.float32), none)
    num_blocks = -(-choice.num_seen(tile) // block)
    return lax.fori_loop(0, num_blocks, step, start)[1]


def choose_materialised(choice: Choice, batch: RaggedBatch, tile_q: int) -> Int32[Array, "rows k"]:
    """The best entries of all tokens' queries, one row a token; the last `tile_q` are none's."""
    capacity, num_tokens = choice.num_entries(batch), len(batch.kv_rows)
    block = min(choice.block, capacity)
    padded = -(-capacity // block) * block

    def score(at: Int32[Array, ""], scores: Float[Array, "rows S"]) -> Float[Array, "rows S"]:
        tile = tile_of(batch, at, tile_q)
        step = partial(_score_block, choice, tile, choice.query(tile), block)
        return lax.fori_loop(0, -(-choice.num_seen(tile) // block), step, scores)

    scores = jnp.full((num_tokens + tile_q, padded), -jnp.inf, jnp.float32)
    scores = lax.fori_loop(0, batch.num_tiles, score, scores)
    best, entries = lax.top_k(scores, min(choice.top_k, capacity))
    return jnp.where(best == -jnp.inf, capacity, entries)


def choose_in_kernel(
    choice: Choice, batch: RaggedBatch, query: IndexQuery, tile_q: int, *, interpret: bool = False
) -> Int32[Array, "T k"]:
    """The best entries of all tokens' queries, in the entries' order; padding's rows are none's.

    `query` has every token's; `interpret` runs it on any device.
    """
    pages = choice.keys.entries(choice.rate)
    return choose_entries(
        *query, pages, batch, top_k=choice.top_k, tile_q=tile_q, interpret=interpret
    )


def _score_block(
    choice: Choice,
    tile: Tile,
    query: IndexQuery,
    block: int,
    at: Int32[Array, ""],
    scores: Float[Array, "rows S"],
) -> Float[Array, "rows S"]:
    """With the tile's rows of one block; those behind its end are the next tile's to write."""
    found = choice.block_scores(tile, query, at * block, block)
    return lax.dynamic_update_slice(scores, found, (tile.row[0], at * block))
