"""Compressed entries of a ragged batch of chunks: what a chunk completes, and what it leaves.

A softmax over a window's tokens, channel by channel, is kept as three sums (top, total, value)
that can be merged: those of a *unit*, a window's tokens or, where pages are shorter, a page's. A
page keeps the sums of its last units, so that a chunk, a decode step or a hit on a cached prefix
goes on from any token:

    page     | u0 u1 u2 u3 | u4 u5 ...      units of 4 tokens, pages of 16
    kept     |       u2 u3 |    u5          sums of the last two units written in each page
    entries  | e0 e1 e2 e3 | e4             e4 is made of u3 (first part) and u4 (second part)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.models.deepseek_v4.modules import Compressor
from jaxprefill.models.deepseek_v4.pages import PagedPool, recent_table

_LOWEST = -1e30


class Sums(NamedTuple):
    """A softmax over tokens in the making: the largest gate, weights, weighted values."""

    top: Float[Array, "*batch D"]
    total: Float[Array, "*batch D"]
    value: Float[Array, "*batch D"]

    def at(self, index: Int32[Array, "..."], part: int) -> "Sums":
        """Rows of [rows, parts, D]."""
        return Sums(*(each[index, part] for each in self))

    def where(self, is_kept: Bool[Array, "*batch"]) -> "Sums":
        """Those of no token where not kept, whatever is there."""
        kept = is_kept.reshape(is_kept.shape + (1,) * (self.top.ndim - is_kept.ndim))
        top = jnp.where(kept, self.top, _LOWEST)
        return Sums(top, jnp.where(kept, self.total, 0), jnp.where(kept, self.value, 0))

    def merged(self, axis: int) -> "Sums":
        """Those of all along an axis."""
        top = self.top.max(axis, keepdims=True)
        scale = jnp.exp(self.top - top)
        total, value = (self.total * scale).sum(axis), (self.value * scale).sum(axis)
        return Sums(top.squeeze(axis), total, value)


class Chunks(NamedTuple):
    """The new tokens of each request that are written: positions `first` to `end` - 1."""

    first: Int32[Array, " R"]
    end: Int32[Array, " R"]
    row: Int32[Array, " R"]  # of position 0, were it among the new tokens

    @property
    def is_empty(self) -> Bool[Array, " R"]:
        """Requests that write nothing, sentinels among them."""
        return self.first >= self.end


def chunks_of(batch: RaggedBatch) -> Chunks:
    """What each request writes: its new tokens."""
    first = batch.kv_lens - batch.q_lens
    return Chunks(first, batch.kv_lens, batch.q_starts - first)


class Listed(NamedTuple):
    """Things that requests have in different numbers, one behind another."""

    slot: Int32[Array, " C"]
    number: Int32[Array, " C"]
    is_used: Bool[Array, " C"]
    starts: Int32[Array, " R"]


def list_by_request(first: Int32[Array, " R"], counts: Int32[Array, " R"], capacity: int) -> Listed:
    """Request r's are numbered from `first[r]`; at most `capacity` in all."""
    ends = jnp.cumsum(counts)
    at = jnp.arange(capacity, dtype=jnp.int32)
    slot = jnp.minimum((at[:, None] >= ends).sum(1, dtype=jnp.int32), len(counts) - 1)
    starts = ends - counts
    return Listed(slot, at - starts[slot] + first[slot], at < ends[-1], starts)


class Entries(NamedTuple):
    """The entries that a pass completes."""

    slot: Int32[Array, " C"]
    number: Int32[Array, " C"]
    is_used: Bool[Array, " C"]
    pooled: Float[Array, "C D"]


def unit_tokens(rate: int, page_size: int) -> int:
    """Tokens whose sums are kept together."""
    return min(rate, page_size)


def kept_units(rate: int, page_size: int) -> int:
    """Units whose sums a page keeps: the one that grows, and the one before it."""
    return min(2, page_size // unit_tokens(rate, page_size))


def compress(
    compressor: Compressor, normed: Float[Array, "T E"], batch: RaggedBatch, state: PagedPool
) -> tuple[Entries, PagedPool]:
    """The entries that the new tokens complete, and the state that they leave."""
    unit = unit_tokens(compressor.rate, state.page_size)
    num_tokens, num_slots = len(normed), len(batch.q_lens)
    chunks = chunks_of(batch)
    first, last = chunks.first // unit, (chunks.end - 1) // unit
    counts = jnp.where(chunks.is_empty, 0, last - first + 1)
    units = list_by_request(first, counts, min(num_tokens, num_tokens // unit + 2 * num_slots))
    past = _past_sums(compressor, chunks, batch, state)
    new = _new_sums(compressor, normed, chunks, units, unit)
    grown = Sums(*(each[units.slot, -1] for each in past))
    is_grown = units.is_used & (units.number == first[units.slot])
    pairs = zip(new, grown.where(is_grown), strict=True)
    new = Sums(*(jnp.stack(pair) for pair in pairs)).merged(0)
    entries = _closed(compressor, chunks, units, (past, new), unit=unit, num_tokens=num_tokens)
    return entries, _keep(units, last, new, batch, state, unit)


def _past_sums(
    compressor: Compressor, chunks: Chunks, batch: RaggedBatch, state: PagedPool
) -> Sums:
    """[R, units, parts, D]: each request's units up to the one its first new token is in."""
    unit = unit_tokens(compressor.rate, state.page_size)
    count = max(2, compressor.rate // unit)
    number = chunks.first[:, None] // unit + jnp.arange(1 - count, 1)
    is_known = (number >= 0) & (number * unit < chunks.first[:, None]) & ~chunks.is_empty[:, None]
    pages = _page(batch, jnp.arange(len(number))[:, None], number * unit, state)
    held = state.read(pages, number % kept_units(compressor.rate, state.page_size))
    held = held.reshape(3, compressor.num_parts, *held.shape[1:])
    top, total, value = jnp.moveaxis(held, 1, -2)
    return Sums(top, total, value).where(is_known)


def _page(
    batch: RaggedBatch,
    slot: Int32[Array, "..."],
    position: Int32[Array, "..."],
    state: PagedPool,
) -> Int32[Array, "..."]:
    """The page of recent tokens that a request's position is in; any where it is negative."""
    table = recent_table(batch)
    return table[slot, jnp.maximum(position, 0) // state.page_size % table.shape[1]]


def _new_sums(
    compressor: Compressor,
    normed: Float[Array, "T E"],
    chunks: Chunks,
    units: Listed,
    unit: int,
) -> Sums:
    """[C, parts, D]: each unit's new tokens alone."""
    kv, gate = compressor.project(normed)
    position = units.number[:, None] * unit + jnp.arange(unit)
    is_new = (position >= chunks.first[units.slot][:, None]) & units.is_used[:, None]
    is_new &= position < chunks.end[units.slot][:, None]
    row = jnp.where(is_new, chunks.row[units.slot][:, None] + position, 0)
    is_new = is_new[..., None, None]
    gates = jnp.where(is_new, gate[row] + compressor.place_bias(position), _LOWEST)
    top = gates.max(1)
    weights = jnp.where(is_new, jnp.exp(gates - top[:, None]), 0)
    return Sums(top, weights.sum(1), (weights * jnp.where(is_new, kv[row], 0)).sum(1))


def _closed(
    compressor: Compressor,
    chunks: Chunks,
    units: Listed,
    sums: tuple[Sums, Sums],
    *,
    unit: int,
    num_tokens: int,
) -> Entries:
    """The windows whose last token is new."""
    rate, num_slots = compressor.rate, len(chunks.first)
    first, end = chunks.first // rate, chunks.end // rate
    counts = jnp.where(chunks.is_empty, 0, end - first)
    found = list_by_request(first, counts, min(num_tokens, num_tokens // rate + num_slots))
    past, new = sums
    kept = past.top.shape[1]
    flat = Sums(
        *(
            jnp.concatenate([one.reshape(-1, *two.shape[1:]), two])
            for one, two in zip(past, new, strict=True)
        )
    )

    def rows_of(number: Int32[Array, "C n"]) -> Int32[Array, "C n"]:
        slot = found.slot[:, None]
        first_unit = (chunks.first // unit)[slot]
        old = slot * kept + kept - 1 + number - first_unit
        fresh = num_slots * kept + units.starts[slot] + number - first_unit
        return jnp.where(number < first_unit, old, fresh)

    if compressor.num_parts == 2:
        number = found.number[:, None]
        before = flat.at(rows_of(number - 1), 0).where(number > 0)
        own = flat.at(rows_of(number), 1)
        pair = Sums(*(jnp.concatenate(two, 1) for two in zip(before, own, strict=True)))
    else:
        each = rate // unit
        pair = flat.at(rows_of(found.number[:, None] * each + jnp.arange(each)), 0)
    whole = pair.merged(1)
    pooled = whole.value / jnp.maximum(whole.total, 1e-30)
    return Entries(found.slot, found.number, found.is_used, pooled)


def _keep(
    units: Listed,
    last: Int32[Array, " R"],
    new: Sums,
    batch: RaggedBatch,
    state: PagedPool,
    unit: int,
) -> PagedPool:
    """The state with the sums of the last units of each page."""
    in_page, kept = state.page_size // unit, kept_units(unit, state.page_size)
    is_followed = (units.number % in_page + kept < in_page) & (
        units.number + kept <= last[units.slot]
    )
    page = _page(batch, units.slot, units.number * unit, state)
    values = jnp.stack(list(new))  # [3, C, parts, D]
    values = jnp.moveaxis(values, 2, 1).reshape(-1, *new.top.shape[::2])
    return state.write(page, units.number % kept, values, units.is_used & ~is_followed)
