"""Latent attention in Pallas/Triton: NVIDIA GPUs from Ampere on.

A program takes one token and a block of heads, whose rows share every key it reads:

    keys     [ window: the last tokens | entries: all up to the token, or those chosen for it ]

A key is the value too, so that it is read once for both products. Sums begin with the sink, a key
without a value. Keys lie in pages and are read by row, a block ahead of their use. Nothing is
masked on load: an index past the end repeats the last live one, so that stale pages are not read.

Where few tokens face many keys, several programs share a token's blocks of them, the window's and
then the entries' (see `splits`): the first has the sink, and a second launch adds the parts.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from jaxprefill.kernels.attention import RaggedBatch
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
from jaxprefill.kernels.top_k import EntryPages
from jaxprefill.kernels.triton import LOG2_E, MIN_DOT, Ref, dot, power_of_two

_WANTED_PROGRAMS = 128  # about one for each of an H200's 132 multiprocessors
# Largest score so far, sum of weights, weighted sum of values.
Carry = tuple[Float32[Array, " h"], Float32[Array, " h"], Float32[Array, "h D"]]
# Block number -> rows of its keys, and whether the token sees them.
Locate = Callable[[Int32[Array, ""]], tuple[Int32[Array, " k"], Bool[Array, " k"]]]


class LatentTiles(NamedTuple):
    """How the work is cut; powers of two.

    Attributes:
        heads: of a program.
        block: keys that are read at once.
        splits: of a token's keys, at most; any number.
    """

    heads: int
    block: int
    splits: int
    num_warps: int
    num_stages: int = 2


class LatentKeys(NamedTuple):
    """What tokens see.

    Attributes:
        window: every token's own latent; its page n is in column n % C of `recent_table`.
        reach: tokens that one sees of the window, itself among them.
        entries: compressed ones, beside the window; None: none.
        chosen: of those each token's own, such as it may see before others; None: all it may see.
    """

    window: EntryPages
    recent_table: Int32[Array, "R C"]
    reach: int
    entries: EntryPages | None = None
    chosen: Int32[Array, "T k"] | None = None


class _Layout(NamedTuple):
    """Where the keys of one kind lie in their pages."""

    page_size: int
    page_rows: int
    rate: int


class _Sizes(NamedTuple):
    """What one kernel is specialised on."""

    tiles: LatentTiles
    tile_q: int
    num_heads: int
    dim: int
    reach: int
    window: _Layout
    entries: _Layout | None
    top_k: int | None

    @property
    def head_blocks(self) -> int:
        return pl.cdiv(self.num_heads, self.tiles.heads)


class _Operands(NamedTuple):
    """Arrays, and references to them in the kernel; None: not part of it."""

    q: Any  # [T, H, D]
    sinks: Any  # [H]
    batch: Any  # RaggedBatch, num_tiles [1]
    recent_table: Any  # [R, C]
    window: Any  # [P * rows, D]
    window_page: Any  # [1]: the layer's first
    entries: Any = None  # [P * rows, D]
    entries_page: Any = None
    chosen: Any = None  # [T, k]


class _Results(NamedTuple):
    """References."""

    out: Ref  # [T, H, D], in the place of q
    parts: Ref = None  # [splits, T, H, D], float32
    weights: Ref = None  # [splits, T, H]


class _Token(NamedTuple):
    """Whom a program works for, and how its keys are shared."""

    slot: Int32[Array, ""]
    row: Int32[Array, ""]
    position: Int32[Array, ""]
    seen: Int32[Array, ""]  # entries of the request that it may see
    window_blocks: Int32[Array, ""]  # of keys
    blocks: Int32[Array, ""]  # those, and the entries' behind them
    split_blocks: Int32[Array, ""]
    num_splits: Int32[Array, ""]  # splits that have any


def lacks_attend_latent(dim: int) -> str | None:
    """The first need of the kernel that is not met, in words, or None."""
    if dim < MIN_DOT or dim & (dim - 1):
        return f"takes latents of 16, 32, 64, ... dimensions, not {dim}"
    return None


def choose_latent_tiles(num_tokens: int, num_heads: int, num_keys: int, dtype: Any) -> LatentTiles:
    """Many heads share what they read; few tokens share out their keys first, then their heads.

    `num_keys` are the most that a token sees.
    """
    if jnp.dtype(dtype).itemsize > 2:  # no tensor cores, and twice the bytes
        heads, block = MIN_DOT, 16
    else:
        heads, block = min(max(power_of_two(num_heads), MIN_DOT), 64), 32
    programs = num_tokens * pl.cdiv(num_heads, heads)
    most = min(num_keys // (block * MIN_SPLIT_BLOCKS), MAX_SPLITS)
    splits = max(min(_WANTED_PROGRAMS // programs, most), 1)
    while heads > MIN_DOT and splits * num_tokens * pl.cdiv(num_heads, heads) < _WANTED_PROGRAMS:
        heads //= 2
    return LatentTiles(heads, block, splits, num_warps=8 if heads > 32 else 4)


def attend_latent(
    q: Float[Array, "T H D"],
    keys: LatentKeys,
    sinks: Float[Array, " H"],
    batch: RaggedBatch,
    *,
    tile_q: int,
    tiles: LatentTiles | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """Softmax over the keys and a sink, in the keys' dtype; padding's rows hold anything.

    Args:
        q: scaled for the product; rounded to the keys' dtype.
        keys: of all requests.
        sinks: one score a head.
        batch: whose tiles have `tile_q` tokens.
        tile_q: see `TileShape`.
        tiles: None: as `choose_latent_tiles` says of this shape.
        interpret: runs it on any device, slowly.
    """
    num_heads, dim = q.shape[1:]
    dtype, entries = keys.window.keys.dtype, keys.entries
    tiles = tiles or choose_latent_tiles(len(q), num_heads, most_keys(keys, batch), dtype)
    sizes = _Sizes(
        tiles=tiles,
        tile_q=tile_q,
        num_heads=num_heads,
        dim=dim,
        reach=keys.reach,
        window=_layout(keys.window),
        entries=None if entries is None else _layout(entries),
        top_k=None if keys.chosen is None else keys.chosen.shape[1],
    )
    operands = _Operands(
        q=q.astype(dtype),
        sinks=sinks.astype(jnp.float32),
        batch=batch._replace(num_tiles=batch.num_tiles.reshape(1)),
        recent_table=keys.recent_table,
        window=keys.window.keys.reshape(-1, dim),
        window_page=keys.window.first_page.reshape(1),
        entries=None if entries is None else entries.keys.reshape(-1, dim),
        entries_page=None if entries is None else entries.first_page.reshape(1),
        chosen=keys.chosen,
    )
    return _launch(sizes, operands, interpret=interpret)


def _launch(sizes: _Sizes, operands: _Operands, *, interpret: bool) -> Float[Array, "T H D"]:
    q, tiles, tile_list = operands.q, sizes.tiles, operands.batch.tile_slot
    shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if tiles.splits > 1:
        part = (tiles.splits, *q.shape)
        shapes += [jax.ShapeDtypeStruct(size, jnp.float32) for size in (part, part[:-1])]
    tokens = (sizes.tile_q, len(tile_list))  # see `_for_token`
    call = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),  # fresh: jax #40847
        grid=(sizes.head_blocks * tiles.splits, *tokens),
        out_shape=shapes,
        input_output_aliases={0: 0},  # the result takes the place of q
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="latent_attention",
    )
    out, *parts = call(operands)
    if not parts:
        return out
    merge, grid = functools.partial(_merge_kernel, sizes=sizes), (sizes.num_heads, *tokens)
    return launch_merge(merge, grid, operands.batch, parts, out, interpret=interpret)


def most_keys(keys: LatentKeys, batch: RaggedBatch) -> int:
    """The most that a token of this shape can see."""
    if keys.entries is None:
        return keys.reach
    if keys.chosen is not None:
        return keys.reach + keys.chosen.shape[1]
    return keys.reach + batch.page_table.shape[1] * keys.entries.page_size // keys.entries.rate


def _layout(pages: EntryPages) -> _Layout:
    return _Layout(pages.page_size, pages.keys.shape[1], pages.rate)


def _kernel(operands: Any, *results: Ref, sizes: _Sizes) -> None:
    block = pl.program_id(0) % sizes.head_blocks
    split = pl.program_id(0) // sizes.head_blocks

    def attend(token: _Token) -> None:
        @pl.when(split < token.num_splits)
        def _() -> None:
            first = block * sizes.tiles.heads
            _attend(operands, _Results(*results), token, first, split, sizes)

    _for_token(operands.batch, attend, sizes)


def _merge_kernel(
    batch: Any, parts: Ref, weights: Ref, out_in: Ref, out: Ref, *, sizes: _Sizes
) -> None:
    """One token and one head."""
    head = pl.program_id(0)

    def merge(token: _Token) -> None:
        @pl.when(token.num_splits > 1)
        def _() -> None:
            at = token.row[None]
            merged = merge_splits(parts, weights, token.num_splits, at, head)
            out[at, head, :] = merged.astype(out.dtype)

    _for_token(batch, merge, sizes)


def _for_token(batch: Any, work: Callable[[_Token], None], sizes: _Sizes) -> None:
    """`work` on the token that the last two axes of the grid number, if there is one."""
    offset, tile = pl.program_id(1), pl.program_id(2)

    @pl.when(tile < batch.num_tiles[0])
    def _() -> None:
        slot, at = batch.tile_slot[tile], batch.tile_start[tile] + offset

        @pl.when(at < batch.q_lens[slot])
        def _() -> None:
            position = batch.kv_lens[slot] - batch.q_lens[slot] + at
            block = sizes.tiles.block
            window_blocks = pl.cdiv(jnp.minimum(position + 1, sizes.reach), block)
            seen = jnp.int32(0)
            if sizes.entries is not None:
                seen = (position + 1) // sizes.entries.rate
            count = seen if sizes.top_k is None else jnp.minimum(seen, sizes.top_k)
            blocks = window_blocks + pl.cdiv(count, block)
            shares = share_blocks(blocks, sizes.tiles.splits)
            row = batch.q_starts[slot] + at
            work(_Token(slot, row, position, seen, window_blocks, blocks, *shares))


def _attend(
    operands: Any,
    results: _Results,
    token: _Token,
    first: Int32[Array, ""],
    split: Int32[Array, ""],
    sizes: _Sizes,
) -> None:
    """The heads from `first` on of one token, and one split of its keys."""
    heads = jnp.minimum(first + lax.iota(jnp.int32, sizes.tiles.heads), sizes.num_heads - 1)
    q = operands.q[token.row, heads, :]
    sinks = jnp.maximum(operands.sinks[heads] * LOG2_E, LOWEST)
    total = jnp.zeros_like(sinks) + (split == 0).astype(jnp.float32)  # the sink's
    top = jnp.where(total > 0, sinks, LOWEST)
    carry = (top, total, jnp.zeros((sizes.tiles.heads, sizes.dim), jnp.float32))

    def in_window(block: Int32[Array, ""]) -> tuple[Int32[Array, " k"], Bool[Array, " k"]]:
        oldest = jnp.maximum(token.position - sizes.reach + 1, 0)
        key = oldest + block * sizes.tiles.block + lax.iota(jnp.int32, sizes.tiles.block)
        known = jnp.minimum(key, token.position)
        pages = operands.recent_table, operands.window_page
        return _rows(pages, token.slot, known, sizes.window), key <= token.position

    begin = split * token.split_blocks
    end = jnp.minimum(begin + token.split_blocks, token.blocks)
    own = begin, jnp.minimum(end, token.window_blocks)
    carry = _fold(q, operands.window, carry, own, in_window)
    if sizes.entries is not None:
        own = jnp.maximum(begin - token.window_blocks, 0), end - token.window_blocks
        locate = functools.partial(_locate_entries, operands, token, sizes)
        carry = _fold(q, operands.entries, carry, own, locate)

    # The result, or this split's part of it.
    top, total, value = carry
    total = jnp.maximum(total, LEAST_SUM)
    value = value / total[:, None]
    if sizes.tiles.splits == 1:
        results.out[token.row, heads, :] = value.astype(results.out.dtype)
        return

    @pl.when(token.num_splits == 1)
    def _() -> None:
        results.out[token.row, heads, :] = value.astype(results.out.dtype)

    @pl.when(token.num_splits > 1)
    def _() -> None:
        results.parts[split, token.row, heads, :] = value
        results.weights[split, token.row, heads] = top + jnp.log2(total)


def _locate_entries(
    operands: Any,
    token: _Token,
    sizes: _Sizes,
    block: Int32[Array, ""],
) -> tuple[Int32[Array, " k"], Bool[Array, " k"]]:
    """A block of the token's own entries, or of all; it sees the first ones of a request."""
    assert sizes.entries is not None, "there are entries"
    rate, seen = sizes.entries.rate, token.seen
    entry = block * sizes.tiles.block + lax.iota(jnp.int32, sizes.tiles.block)
    is_there = entry < seen
    if sizes.top_k is not None:
        is_there = entry < sizes.top_k
        entry = operands.chosen[token.row, jnp.minimum(entry, sizes.top_k - 1)]
        is_there &= entry < seen
    known = jnp.maximum(jnp.minimum(entry, seen - 1), 0)
    pages = operands.batch.page_table, operands.entries_page
    return _rows(pages, token.slot, known * rate + rate - 1, sizes.entries), is_there


def _rows(
    pages: tuple[Ref, Ref], slot: Int32[Array, ""], position: Int32[Array, " k"], layout: _Layout
) -> Int32[Array, " k"]:
    """Rows of what stands for tokens up to each position."""
    table, first_page = pages
    column = position // layout.page_size % table.shape[1]
    row = position % layout.page_size // min(layout.rate, layout.page_size)
    return (table[slot, column] + first_page[0]) * layout.page_rows + row


def _fold(
    q: Shaped[Array, "h D"],
    keys: Ref,
    carry: Carry,
    blocks: tuple[Int32[Array, ""], Int32[Array, ""]],
    locate: Locate,
) -> Carry:
    """The sums with the keys of these blocks more: from the first to before the second."""

    def step(block: Int32[Array, ""], carry: Any) -> Any:
        (top, total, value), (rows, is_seen) = carry
        latents = keys[rows, :]
        ahead = locate(block + 1)
        scores = dot(q, latents, trans_b=True) * LOG2_E
        scores = jnp.where(jnp.broadcast_to(is_seen[None], scores.shape), scores, MASKED)
        new_top = jnp.maximum(top, scores.max(1))
        weights, rescale = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
        value = value * rescale[:, None] + dot(weights.astype(latents.dtype), latents)
        return (new_top, total * rescale + weights.sum(1), value), ahead

    return lax.fori_loop(*blocks, step, (carry, locate(blocks[0])))[0]
