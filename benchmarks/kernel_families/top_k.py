"""The choice of DeepSeek-V4-Flash's indexer among a long context's entries of four tokens."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.context_memory import PAGE
from benchmarks.kernel_families.latent import FLASH, TINY, Batch, Sizes, make_batch
from benchmarks.kernel_runs import (
    Family,
    Overrides,
    Work,
    check_all_used,
    cut,
    draw,
    nothing,
    num_sets,
    spread,
    tiles_text,
)
from jaxprefill.kernels.top_k import ChoiceTiles, choose_entries
from jaxprefill.models.deepseek_v4.attend import Tile, by_tile
from jaxprefill.models.deepseek_v4.choose import Choice, choose_streaming
from jaxprefill.models.deepseek_v4.pages import PagedPool

_SAMPLED = 16


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    sizes: Sizes
    batch: Batch
    q: jax.Array
    weights: jax.Array
    pool: jax.Array
    first_pages: list[jax.Array]
    rows: np.ndarray
    scores: np.ndarray  # of every entry, for those rows

    @property
    def rate(self) -> int:
        return self.sizes.rates["sparse"]


def _prepare(text: str, is_tiny: bool) -> _Inputs:
    sizes = TINY if is_tiny else FLASH
    batch, rate = make_batch(text, sizes.reach), sizes.rates["sparse"]
    tokens, heads, dim = batch.case.num_tokens, sizes.index_heads, sizes.index_dim
    layer_bytes = 2 * batch.case.num_requests * batch.length // rate * dim
    layers = 2 if is_tiny else num_sets(layer_bytes)
    pool = draw(1, 1, 1, layers * batch.num_pages, PAGE // rate, dim)
    q = draw(2, tokens, heads, dim)
    weights = draw(3, tokens, heads, dtype=jnp.float32)
    rows = spread(tokens, _SAMPLED)
    scores = jax.jit(partial(_reference, sizes, batch))(q, weights, pool, rows)
    firsts = [jnp.int32(layer * batch.num_pages) for layer in range(layers)]
    return _Inputs(
        sizes=sizes, batch=batch, q=q, weights=weights, pool=pool, first_pages=firsts, rows=rows,
        scores=np.asarray(scores),
    )  # fmt: skip


def _reference(sizes: Sizes, batch: Batch, q: Any, weights: Any, pool: Any, rows: Any) -> jax.Array:
    """[rows, entries] in float32; -inf for what a row does not see."""
    slots, positions = batch.slot_and_position()
    rate = sizes.rates["sparse"]
    entry = jnp.arange(batch.length // rate)
    keys = PagedPool(pool, jnp.int32(0), PAGE)

    def score(row: jax.Array) -> jax.Array:
        table = batch.batch.page_table[slots[row]]
        own = keys.read_position(table, entry * rate + rate - 1, rate).astype(jnp.float32)
        dots = jax.nn.relu(jnp.einsum("id,sd->is", q[row].astype(jnp.float32), own))
        is_seen = entry < (positions[row] + 1) // rate
        return jnp.where(is_seen, weights[row] @ dots, -jnp.inf)

    with jax.default_matmul_precision("highest"):
        return lax.map(score, jnp.asarray(rows))


def _errors(scores: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """How far the scores of what was chosen are from the best ones; infinite for no choice."""
    top_k = found.shape[1]
    best = -np.sort(-scores, axis=1)[:, :top_k]
    wanted = np.where(np.isneginf(best), 0, best)  # a row that sees fewer chooses those alone
    spare = np.isneginf(best).sum(1)
    own = np.zeros_like(wanted)
    for row, entries in enumerate(found):
        real = entries[: top_k - spare[row]]
        if len(set(real.tolist())) < len(real) or not (real >= 0).all():
            return np.inf, np.inf
        if (real >= scores.shape[1]).any() or np.isneginf(scores[row, real]).any():
            return np.inf, np.inf
        own[row, : len(real)] = -np.sort(-scores[row, real])
    apart = own - wanted
    return float(np.linalg.norm(apart) / np.linalg.norm(wanted)), float(np.abs(apart).max())


def _make(inputs: _Inputs, name: str, overrides: Overrides, interpret: bool) -> Work:
    sizes, batch, rate = inputs.sizes, inputs.batch, inputs.rate
    default = ChoiceTiles()
    tiles, rest = cut(default, overrides)
    check_all_used(rest, default)
    tokens, top_k = batch.case.num_tokens, sizes.top_k

    def in_kernel(carry: Any, shared: Any, first_page: Any) -> Any:
        q, weights, pool, ragged = shared
        pages = PagedPool(pool, first_page + nothing(carry), PAGE).entries(rate)
        return choose_entries(
            q, weights, pages, ragged, top_k=top_k, tile_q=batch.tile_q,
            tiles=tiles if overrides else None, interpret=interpret,
        )  # fmt: skip

    def plain(carry: Any, shared: Any, first_page: Any) -> Any:
        q, weights, pool, ragged = shared
        keys = PagedPool(pool, first_page + nothing(carry), PAGE)

        def query(tile: Tile) -> tuple[jax.Array, jax.Array]:
            return tile.take(q), tile.take(weights)

        choice = Choice(keys, query, rate, top_k)

        def choose(tile: Tile) -> jax.Array:  # whole numbers that float32 holds
            return choose_streaming(choice, ragged, tile)

        return by_tile(ragged, batch.tile_q, carry.shape[1], choose).astype(jnp.int32)

    seen = (np.asarray(batch.slot_and_position()[1], np.float64) + 1) // rate
    num_keys = batch.case.num_requests * batch.length // rate
    heads, dim = sizes.index_heads, sizes.index_dim
    capacity = batch.batch.page_table.shape[1] * PAGE // rate
    is_plain = name == "xla"
    return Work(
        call=plain if is_plain else in_kernel,
        carry=jnp.zeros((tokens, min(top_k, capacity)), jnp.int32),
        shared=(inputs.q, inputs.weights, inputs.pool, batch.batch),
        own=inputs.first_pages,
        sample=lambda carry: jnp.sort(carry[inputs.rows], axis=1),  # none sort behind all others
        errors=partial(_errors, inputs.scores),
        flops=2.0 * heads * dim * float(seen.sum()),
        num_bytes=2.0 * dim * (tokens * heads + num_keys) + 4.0 * tokens * top_k,
        tiles="" if is_plain else tiles_text(tiles),
    )


FAMILY = Family(
    cases=(
        "8192x1+1040384", "1024x1+1047552", "d1+1048575", "d16+262143", "d64+262143",
        "8192x1+253952", "8192x1+57344", "64x1+1048512", "d16+1048575",
    ),
    tiny=("6x1+250", "d2+200"),
    backends=("pallas_triton", "xla"),
    tiles=(
        "queries=1", "queries=4", "block=64", "block=256", "blocks=2", "blocks=8", "num_warps=8",
        "num_stages=2", "num_stages=4",
    ),
    prepare=_prepare,
    make=_make,
)  # fmt: skip
