"""Which entries score best for each query, in one Pallas/Triton launch: Ampere and later.

    score(query, entry) = sum over heads of weight * relu(q . key)         float32

A program takes a few queries of one request and goes through the entries they see, a block at a
time; queries share what it reads. Of each query it keeps a list, in the order of entries:

    [ e0 e3 e4 e9 .. | room ]     scores above the bar, which is -inf at first

Entries are scored once. When a list gets full it is cut to the best k, and the bar rises to the
k-th best score. Of n entries so far in random order the next one gets onto the list with
probability k / n, so a list of 4 k is cut some log3(n / k) times; scores that rise all the way
cost a cut every few blocks, and the answer is the same. The alternative, a threshold found by
scoring everything once a few bits, would pay the products again in each pass.

A cut looks for the k-th best score bit by bit (floats order as integers do), keeps what is above
it and, of what equals it, the earliest entries: ties go as in `lax.top_k`. Lists lie in device
memory: 8 bytes x 4 k for each query, whatever the context.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.triton import MIN_DOT, Ref, dot, power_of_two

_SPARE = 32  # behind each list: where what is not kept is written
_LOWEST = -(2**31)  # below every score as an integer
_MAGNITUDE = 2**31 - 1  # all bits but the sign
# The bar and the length of each query's list.
Lists = tuple[tuple[Float32[Array, ""], ...], tuple[Int32[Array, ""], ...]]


class ChoiceTiles(NamedTuple):
    """How the work is cut; powers of two.

    H200, 1024 tokens of V4-Flash's indexer at a context of 1M: 33 ms; with four queries a program
    35 to 56.

    Attributes:
        queries: of a program; at most as many as a tile of the batch has.
        block: entries that are scored at once.
        blocks: between two looks at whether a list must be cut.
    """

    queries: int = 2
    block: int = 128
    blocks: int = 4
    num_warps: int = 4
    num_stages: int = 3


class EntryPages(NamedTuple):
    """Where entries lie; entry n of a request stands for its tokens from n * rate on.

    Attributes:
        keys: of all pages; each has `page_size` tokens' entries, one at least.
        first_page: where the layer's begin.
        rate: tokens that an entry stands for.
    """

    keys: Float[Array, "P rows D"]
    first_page: Int32[Array, ""]
    page_size: int
    rate: int


class _Sizes(NamedTuple):
    """What one kernel is specialised on."""

    tiles: ChoiceTiles
    tile_q: int
    top_k: int
    num_entries: int  # the most that a request can have
    page_size: int
    page_rows: int
    rate: int
    interpret: bool

    @property
    def room(self) -> int:
        """Length of a list."""
        return power_of_two(max(4 * self.top_k, self.top_k + 2 * self.growth))

    @property
    def growth(self) -> int:
        """The most that a list grows between two looks."""
        return self.tiles.block * self.tiles.blocks

    @property
    def stride(self) -> int:
        """From list to list."""
        return self.room + _SPARE


class _Operands(NamedTuple):
    """Arrays, and references to them in the kernel."""

    q: Any  # [T, I, D]
    weights: Any  # [T, I]
    keys: Any  # [P * rows, D]
    first_page: Any  # [1]
    batch: Any  # RaggedBatch, num_tiles [1]


class _Program(NamedTuple):
    """What a program works on: one item for each of its queries."""

    slot: Int32[Array, ""]
    q: tuple[Float[Array, "I D"], ...]
    weights: tuple[Float32[Array, " I"], ...]
    exists: tuple[Bool[Array, ""], ...]
    seen: tuple[Int32[Array, ""], ...]  # entries
    lists: tuple[Int32[Array, ""], ...]  # where they begin
    most: Int32[Array, ""]  # entries that any of them sees


class _Refs(NamedTuple):
    """Results and workspace."""

    chosen: Ref  # [T, padded k]
    scores: Ref  # [lists * stride]
    entries: Ref


def lacks_choose_entries(heads: int, dim: int) -> str | None:
    """The first need of the kernel that is not met, in words, or None."""
    for name, size in (("heads", heads), ("dimensions", dim)):
        if size < MIN_DOT or size & (size - 1):
            return f"takes 16, 32, 64, ... {name} of an index, not {size}"
    return None


def choose_entries(
    q: Float[Array, "T I D"],
    weights: Float[Array, "T I"],
    pages: EntryPages,
    batch: RaggedBatch,
    *,
    top_k: int,
    tile_q: int,
    tiles: ChoiceTiles | None = None,
    interpret: bool = False,
) -> Int32[Array, "T k"]:
    """The best entries of each query, in their own order.

    Where a query sees fewer, the number of entries that a request can have stands for none; rows
    of padding hold anything.

    Args:
        q: I heads a query; rounded to the keys' dtype.
        weights: of the heads.
        pages: the entries' keys.
        batch: whose tiles have `tile_q` queries.
        top_k: entries to choose; fewer where a request cannot have as many.
        tile_q: see `TileShape`.
        tiles: None: as measured.
        interpret: runs it on any device, slowly.
    """
    page_rows, dim = pages.keys.shape[1:]
    num_entries = batch.page_table.shape[1] * pages.page_size // pages.rate
    tiles = tiles or ChoiceTiles()
    tiles = tiles._replace(queries=min(tiles.queries, tile_q & -tile_q))
    sizes = _Sizes(
        tiles=tiles,
        tile_q=tile_q,
        top_k=min(top_k, num_entries),
        num_entries=num_entries,
        page_size=pages.page_size,
        page_rows=page_rows,
        rate=pages.rate,
        interpret=interpret,
    )
    num_tiles, groups = len(batch.tile_slot), tile_q // tiles.queries
    workspace = num_tiles * tile_q * sizes.stride
    call = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),  # fresh: jax #40847
        grid=(groups, num_tiles),
        out_shape=[
            jax.ShapeDtypeStruct((len(q), power_of_two(sizes.top_k)), jnp.int32),
            jax.ShapeDtypeStruct((workspace,), jnp.float32),
            jax.ShapeDtypeStruct((workspace,), jnp.int32),
        ],
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="choose_entries",
    )
    operands = _Operands(
        q=q.astype(pages.keys.dtype),
        weights=weights.astype(jnp.float32),
        keys=pages.keys.reshape(-1, dim),
        first_page=pages.first_page.reshape(1),
        batch=batch._replace(num_tiles=batch.num_tiles.reshape(1)),
    )
    return call(operands)[0][:, : sizes.top_k]


def _kernel(operands: Any, chosen: Ref, scores: Ref, entries: Ref, *, sizes: _Sizes) -> None:
    refs, batch = _Refs(chosen, scores, entries), operands.batch
    group, tile = pl.program_id(0), pl.program_id(1)
    slot, queries = batch.tile_slot[tile], sizes.tiles.queries
    start = batch.tile_start[tile] + group * queries

    @pl.when((tile < batch.num_tiles[0]) & (start < batch.q_lens[slot]))
    def _() -> None:
        program = _read_program(operands, slot, start, tile * sizes.tile_q + group * queries, sizes)
        _, lengths = _fill_lists(operands, refs, program, sizes)
        for index, length in enumerate(lengths):
            _finish(refs, program, index, length, batch.q_starts[slot] + start + index, sizes)


def _read_program(
    operands: Any,
    slot: Int32[Array, ""],
    start: Int32[Array, ""],
    first_list: Int32[Array, ""],
    sizes: _Sizes,
) -> _Program:
    batch, numbers = operands.batch, range(sizes.tiles.queries)
    q_len = batch.q_lens[slot]
    # A query that does not exist repeats the last one's reads, and sees no entry.
    tokens = [jnp.minimum(start + index, q_len - 1) for index in numbers]
    rows = [batch.q_starts[slot] + token for token in tokens]
    prefix = batch.kv_lens[slot] - q_len
    exists = tuple(start + index < q_len for index in numbers)
    seen = [(prefix + token + 1) // sizes.rate for token in tokens]
    return _Program(
        slot=slot,
        q=tuple(operands.q[row, :, :] for row in rows),
        weights=tuple(operands.weights[row, :] for row in rows),
        exists=exists,
        seen=tuple(jnp.where(*pair, 0) for pair in zip(exists, seen, strict=True)),
        lists=tuple((first_list + index) * sizes.stride for index in numbers),
        most=seen[-1],
    )


def _fill_lists(operands: Any, refs: _Refs, program: _Program, sizes: _Sizes) -> Lists:
    """Goes through all entries; lists may hold more than the best when it is done."""
    tiles, numbers = sizes.tiles, range(sizes.tiles.queries)
    num_blocks = pl.cdiv(program.most, tiles.block)

    def look(at: Int32[Array, ""], lists: Lists) -> Lists:
        first = at * tiles.blocks
        last = jnp.minimum(first + tiles.blocks, num_blocks)
        step = functools.partial(_score_block, operands, refs, program, sizes)
        bars, lengths = lax.fori_loop(first, last, step, lists)
        cut = [
            lax.cond(
                lengths[index] > sizes.room - sizes.growth,
                functools.partial(_cut, refs, program.lists[index], sizes),
                lambda bar, length: (bar, length),
                bars[index],
                lengths[index],
            )
            for index in numbers
        ]
        return tuple(bar for bar, _ in cut), tuple(length for _, length in cut)

    start = (
        tuple(jnp.float32(-jnp.inf) for _ in numbers),
        tuple(jnp.int32(0) for _ in numbers),
    )
    return lax.fori_loop(0, pl.cdiv(num_blocks, tiles.blocks), look, start)


def _score_block(
    operands: Any,
    refs: _Refs,
    program: _Program,
    sizes: _Sizes,
    at: Int32[Array, ""],
    lists: Lists,
) -> Lists:
    """Puts one block's entries above the bar onto the lists."""
    block = sizes.tiles.block
    entry = at * block + lax.iota(jnp.int32, block)
    # Entries that no query sees repeat the last one: stale pages are not read.
    token = jnp.minimum(entry, program.most - 1) * sizes.rate + sizes.rate - 1
    page = operands.batch.page_table[program.slot, token // sizes.page_size]
    row = token % sizes.page_size // min(sizes.rate, sizes.page_size)
    keys = operands.keys[(page + operands.first_page[0]) * sizes.page_rows + row, :]
    lengths: list[Int32[Array, ""]] = []
    for index, (bar, length) in enumerate(zip(*lists, strict=True)):
        dots = dot(program.q[index], keys, trans_b=True)
        score = (jnp.maximum(dots, 0.0) * program.weights[index][:, None]).sum(0)
        score = jnp.where(score == 0, 0.0, score)  # -0 is not less than 0
        is_new = (score > bar) & (entry < program.seen[index])
        count = is_new.astype(jnp.int32).sum()

        append = functools.partial(
            _append, refs, program.lists[index], is_new, length, score, entry, sizes
        )
        pl.when(count > 0)(append)
        lengths.append(length + count)
    return lists[0], tuple(lengths)


def _append(
    refs: _Refs,
    first: Int32[Array, ""],
    is_new: Bool[Array, " n"],
    length: Int32[Array, ""],
    score: Float32[Array, " n"],
    entry: Int32[Array, " n"],
    sizes: _Sizes,
) -> None:
    place = length + jnp.cumsum(is_new.astype(jnp.int32)) - 1
    place = first + jnp.where(is_new, place, sizes.room)
    refs.scores[place] = score
    refs.entries[place] = entry


def _cut(
    refs: _Refs,
    first: Int32[Array, ""],
    sizes: _Sizes,
    bar: Float32[Array, ""],
    length: Int32[Array, ""],
) -> tuple[Float32[Array, ""], Int32[Array, ""]]:
    """Leaves the best k of a list in their order: (the score of the last of them, how many)."""
    del bar
    _wait_for_stores(sizes)
    at, whole = lax.iota(jnp.int32, sizes.room), pl.ds(first, sizes.room)
    entry, is_there = refs.entries[whole], at < length
    score = refs.scores[whole]
    number = jnp.where(is_there, _as_ordered(score), _LOWEST)
    least = _kth_largest(number, sizes.top_k)
    is_above, is_tie = number > least, (number == least) & is_there
    spare = sizes.top_k - is_above.astype(jnp.int32).sum()
    is_kept = is_above | (is_tie & (jnp.cumsum(is_tie.astype(jnp.int32)) <= spare))
    kept = is_kept.astype(jnp.int32)
    place = jnp.where(is_kept, jnp.cumsum(kept) - 1, sizes.room)
    _wait_for_stores(sizes)  # all have read
    refs.scores[first + place] = score
    refs.entries[first + place] = entry
    return _as_score(least), kept.sum()


def _finish(
    refs: _Refs,
    program: _Program,
    index: int,
    length: Int32[Array, ""],
    row: Int32[Array, ""],
    sizes: _Sizes,
) -> None:
    """Writes a query's choice, if there is such a query."""

    @pl.when(program.exists[index])
    def _() -> None:
        _cut(refs, program.lists[index], sizes, jnp.float32(0), length)
        _wait_for_stores(sizes)
        padded = power_of_two(sizes.top_k)
        entry = refs.entries[pl.ds(program.lists[index], padded)]
        is_there = lax.iota(jnp.int32, padded) < jnp.minimum(length, sizes.top_k)
        refs.chosen[row, :] = jnp.where(is_there, entry, sizes.num_entries)


def _kth_largest(numbers: Int32[Array, " n"], k: int) -> Int32[Array, ""]:
    """The largest number that k of them reach; the lowest there is if fewer are above that."""

    def step(index: Int32[Array, ""], found: Int32[Array, ""]) -> Int32[Array, ""]:
        # Bits of the number above the lowest: an unsigned order.
        more = found | lax.shift_left(jnp.int32(1), 31 - index)
        count = (numbers >= (more ^ jnp.int32(_LOWEST))).astype(jnp.int32).sum()
        return jnp.where(count >= k, more, found)

    return lax.fori_loop(0, 32, step, jnp.int32(0)) ^ jnp.int32(_LOWEST)


def _as_ordered(score: Float32[Array, " n"]) -> Int32[Array, " n"]:
    """Integers in the order of the scores."""
    bits = lax.bitcast_convert_type(score, jnp.int32)
    return jnp.where(bits < 0, bits ^ _MAGNITUDE, bits)


def _as_score(number: Int32[Array, ""]) -> Float32[Array, ""]:
    """The score that `_as_ordered` made this of."""
    bits = jnp.where(number < 0, number ^ _MAGNITUDE, number)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _wait_for_stores(sizes: _Sizes) -> None:
    """All threads of the program see what any has stored so far."""
    if not sizes.interpret:  # one thread
        plt.debug_barrier()
