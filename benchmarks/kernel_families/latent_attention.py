"""DeepSeek-V4-Flash's attention core; a case is the kind of layer and a batch, of `cases`.

*sparse* sees its window and 512 entries of four tokens, its own, *heavy* all entries of 128 tokens.
"""

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
    compare,
    cut,
    draw,
    num_sets,
    spread,
    tiles_text,
)
from jaxprefill.kernels.latent_attention import LatentKeys, attend_latent, choose_latent_tiles
from jaxprefill.models.deepseek_v4.attend import Seen, Tile, attend_tile, by_tile
from jaxprefill.models.deepseek_v4.pages import PagedPool, recent_table

_SAMPLED = 64


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    kind: str
    sizes: Sizes
    batch: Batch
    q: jax.Array
    sinks: jax.Array
    pools: tuple[jax.Array, jax.Array]  # window, entries
    own: list[Any]  # of each set: first pages of both pools, entries chosen
    rows: np.ndarray
    expected: jax.Array


def _prepare(text: str, is_tiny: bool) -> _Inputs:
    kind, _, shape = text.partition("/")
    sizes = TINY if is_tiny else FLASH
    batch, rate = make_batch(shape, sizes.reach), sizes.rates[kind]
    tokens, rows_a_page = batch.case.num_tokens, max(PAGE // rate, 1)
    # A layer's entries, or those that are chosen, do not stay in the cache until their next turn.
    count = 2 if is_tiny else num_sets(2 * _num_keys(kind, sizes, batch) * sizes.dim)
    layers = 1 if kind == "sparse" else count
    window = draw(1, 1, 1, count * batch.num_recent, PAGE, sizes.dim)
    entries = draw(2, 1, 1, layers * batch.num_pages, rows_a_page, sizes.dim)
    q = draw(3, tokens, sizes.heads, sizes.dim, scale=2 * sizes.dim**-0.5)
    sinks = draw(4, sizes.heads, dtype=jnp.float32)
    own = [
        (
            jnp.int32(at * batch.num_recent),
            jnp.int32(at % layers * batch.num_pages),
            _choose(kind, sizes, batch, at),
        )
        for at in range(count)
    ]
    rows = spread(tokens, _SAMPLED)
    reference = jax.jit(partial(_reference, kind, sizes, batch))
    expected = reference(q, sinks, (window, entries), own[0], rows)
    return _Inputs(
        kind=kind, sizes=sizes, batch=batch, q=q, sinks=sinks, pools=(window, entries), own=own,
        rows=rows, expected=expected,
    )  # fmt: skip


def _num_keys(kind: str, sizes: Sizes, batch: Batch) -> float:
    """Keys that the tokens of a call read at least: those of one request are shared, if they can.

    Entries that each token chooses are its own, unless a request has fewer.
    """
    requests, seen = batch.case.num_requests, batch.length // sizes.rates[kind]
    each = batch.case.num_tokens // requests
    entries = seen if kind == "heavy" else min(seen, each * sizes.top_k)
    return requests * (min(batch.length, sizes.reach + each) + entries)


def _choose(kind: str, sizes: Sizes, batch: Batch, seed: int) -> jax.Array | None:
    """Entries that each token sees, in their order."""
    if kind != "sparse":
        return None
    seen = (batch.slot_and_position()[1] + 1) // sizes.rates[kind]

    def choose(key: jax.Array) -> jax.Array:
        shares = jax.random.uniform(key, (len(seen), sizes.top_k))
        return jnp.sort((shares * seen[:, None]).astype(jnp.int32), axis=1)

    return jax.jit(choose)(jax.random.key(seed))


def _seen(kind: str, sizes: Sizes, pools: Any, own: Any) -> Seen:
    window, entries = (
        PagedPool(pool, first, PAGE) for pool, first in zip(pools, own[:2], strict=True)
    )
    return Seen(window, sizes.reach, entries, sizes.rates[kind])


def _reference(
    kind: str, sizes: Sizes, batch: Batch, q: Any, sinks: Any, pools: Any, own: Any, rows: Any
) -> jax.Array:
    """[rows, H, D] in float32, a row at a time."""
    seen, chosen = _seen(kind, sizes, pools, own), own[2]
    assert seen.entries is not None, "both kinds have entries"
    entries = seen.entries
    slots, positions = batch.slot_and_position()
    recent, rate = recent_table(batch.batch), sizes.rates[kind]

    def attend(row: jax.Array) -> jax.Array:
        slot, position = slots[row], positions[row]
        token = position - jnp.arange(sizes.reach)
        entry = jnp.arange(batch.length // rate) if chosen is None else chosen[row]
        is_there = entry < (position + 1) // rate
        last = jnp.where(is_there, entry * rate + rate - 1, 0)
        keys = [
            seen.window.read_position(recent[slot], jnp.maximum(token, 0)),
            entries.read_position(batch.batch.page_table[slot], last, rate),
        ]
        keys = jnp.concatenate(keys).astype(jnp.float32)
        scores = jnp.einsum("hd,kd->hk", q[row].astype(jnp.float32), keys)
        scores = jnp.where(jnp.concatenate([token >= 0, is_there]), scores, -jnp.inf)
        both = jnp.concatenate([scores, sinks[:, None]], axis=1)
        return jax.nn.softmax(both, axis=1)[:, :-1] @ keys

    with jax.default_matmul_precision("highest"):
        return lax.map(attend, jnp.asarray(rows))


def _make(inputs: _Inputs, name: str, overrides: Overrides, interpret: bool) -> Work:
    kind, sizes, batch = inputs.kind, inputs.sizes, inputs.batch
    tokens = batch.case.num_tokens
    most_keys = sizes.reach + (
        sizes.top_k if kind == "sparse" else batch.length // sizes.rates[kind]
    )
    default = choose_latent_tiles(tokens, sizes.heads, most_keys, jnp.bfloat16)
    tiles, rest = cut(default, overrides)
    # Without overrides the kernel chooses by itself; those of no tiling are arguments of its own.
    given: dict[str, Any] = {**rest, **({"tiles": tiles} if len(rest) < len(overrides) else {})}

    def in_kernel(carry: Any, shared: Any, own: Any) -> Any:
        pools, sinks, ragged = shared
        seen = _seen(kind, sizes, pools, own)
        assert seen.entries is not None, "both kinds have entries"
        keys = LatentKeys(
            window=seen.window.entries(),
            recent_table=ragged.recent_table,
            reach=sizes.reach,
            entries=seen.entries.entries(seen.rate),
            chosen=own[2],
        )
        return attend_latent(
            carry, keys, sinks, ragged, tile_q=batch.tile_q, interpret=interpret, **given
        )

    def plain(carry: Any, shared: Any, own: Any) -> Any:
        pools, sinks, ragged = shared
        seen = _seen(kind, sizes, pools, own)

        def attend(tile: Tile) -> jax.Array:
            chosen = None if own[2] is None else own[2][tile.row]
            out = attend_tile(tile.take(carry), seen, sinks, tile, chosen=chosen)
            return out.reshape(len(out), -1)

        out = by_tile(ragged, batch.tile_q, sizes.heads * sizes.dim, attend)
        return out.reshape(carry.shape).astype(carry.dtype)

    positions = np.asarray(batch.slot_and_position()[1], np.float64)
    entries = (positions + 1) // sizes.rates[kind]
    if kind == "sparse":
        entries = np.minimum(entries, sizes.top_k)
    pairs = float((np.minimum(positions + 1, sizes.reach) + entries).sum())
    is_plain = name == "xla"
    return Work(
        call=plain if is_plain else in_kernel,
        carry=inputs.q,
        shared=(inputs.pools, inputs.sinks, batch.batch),
        own=inputs.own,
        sample=lambda carry: carry[inputs.rows],
        errors=compare(inputs.expected),
        flops=4.0 * pairs * sizes.heads * sizes.dim,
        num_bytes=2.0 * sizes.dim * (2 * tokens * sizes.heads + _num_keys(kind, sizes, batch)),
        tiles="" if is_plain else tiles_text(tiles),
    )


FAMILY = Family(
    cases=(
        "sparse/8192x1+1040384", "heavy/8192x1+1040384", "sparse/d1+262143", "heavy/d1+262143",
        "sparse/d16+262143", "heavy/d16+262143", "sparse/d64+131071", "heavy/d64+131071",
        "sparse/8192x1+57344", "heavy/8192x1+57344", "sparse/d1+1048575", "heavy/d1+1048575",
    ),
    tiny=("sparse/d2+300", "heavy/6x2+200"),
    backends=("pallas_triton", "xla"),
    tiles=(
        "heads=16", "heads=32", "heads=64", "heads=64,num_warps=4", "heads=32,num_warps=8",
        "block=16", "block=64", "num_stages=1", "num_stages=3", "splits=1", "splits=4", "splits=32",
    ),
    prepare=_prepare,
    make=_make,
)  # fmt: skip
