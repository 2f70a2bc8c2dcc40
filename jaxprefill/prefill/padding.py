"""A batch as one int32 buffer of a compiled shape: real tokens, padding tokens, sentinel requests.

    tokens    | a a a a a | b b | . . . . . |     5 + 2 real, 5 padding tokens (of no request)
    requests  | a: 5 | b: 2 | sentinel: q_len 0, kv_len 0, start 7 | sentinel ... |

Every field is written to its full size on every call, into a fresh array that is then made
read-only: jax may alias host memory until the step has run, and nothing can overwrite it.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int32

from jaxprefill.batch import Batch, BatchRow
from jaxprefill.errors import CapacityError
from jaxprefill.kernels.attention.tiles import NO_ROW, TileShape, plan_tiles
from jaxprefill.prefill.buckets import ShapeKey

Buffer = Int32[np.ndarray, " words"]


@dataclass(frozen=True)
class BufferLayout:
    """Where each field lies in the buffer of one shape. T, R, N, W as in `kernels`."""

    key: ShapeKey
    tiles: TileShape
    page_size: int

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Fields in buffer order; a scalar has shape ()."""
        tokens, slots = (self.key.num_tokens,), (self.key.num_slots,)
        tiles = (self.tiles.num_tiles,)
        return {
            "num_tokens": (),
            "num_tiles": (),
            "ids": tokens,
            "positions": tokens,
            "kv_rows": tokens,
            "q_lens": slots,
            "kv_lens": slots,
            "q_starts": slots,
            "tile_slot": tiles,
            "tile_start": tiles,
            "page_table": (*slots, self.tiles.pages_per_slot),
        }

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Each field's words."""
        slices: dict[str, slice] = {}
        end = 0
        for name, shape in self.shapes.items():
            start, end = end, end + int(np.prod(shape))
            slices[name] = slice(start, end)
        return slices

    @property
    def num_words(self) -> int:
        """Length of the buffer in int32 words."""
        return self.slices["page_table"].stop

    @cached_property
    def empty(self) -> Buffer:
        """The buffer of no request, read-only."""
        buffer = np.zeros(self.num_words, np.int32)
        buffer[self.slices["kv_rows"]] = NO_ROW
        buffer.flags.writeable = False
        return buffer

    def block(self, buffer: Buffer, first: str, last: str) -> Int32[np.ndarray, "fields n"]:
        """A view of neighbouring fields of one length, a line each."""
        words = buffer[self.slices[first].start : self.slices[last].stop]
        return words.reshape(-1, math.prod(self.shapes[first]))

    def fields(self, buffer: Buffer) -> dict[str, Int32[np.ndarray, "..."]]:
        """Views of a buffer's fields."""
        return {name: buffer[at].reshape(self.shapes[name]) for name, at in self.slices.items()}


def pad(batch: Batch, layout: BufferLayout) -> Buffer:
    """The batch in `layout`'s shape, read-only; the batch is left as it was.

    Raises:
        CapacityError: more tokens, requests or context than the shape holds.
    """
    check_fits(batch, layout.key)
    rows = batch.rows
    buffer = layout.empty.copy()
    q_lens = [row.q_len for row in rows]
    starts = [0, *itertools.accumulate(q_lens)]
    buffer[layout.slices["num_tokens"]] = starts[-1]
    buffer[layout.slices["q_starts"]] = starts[-1]
    if rows:
        numbers = np.array([q_lens, [row.kv_len for row in rows], starts[:-1]], np.int32)
        layout.block(buffer, "q_lens", "q_starts")[:, : len(rows)] = numbers
        _write_pages(layout.block(buffer, "page_table", "page_table"), rows, layout)
        _write_tokens(buffer, rows, layout)
        tiles = plan_tiles(q_lens, layout.tiles.tile_q)
        buffer[layout.slices["num_tiles"]] = len(tiles[0])
        layout.block(buffer, "tile_slot", "tile_start")[:, : len(tiles[0])] = tiles
    buffer.flags.writeable = False
    return buffer


def _write_pages(
    table: Int32[np.ndarray, "R W"], rows: tuple[BatchRow, ...], layout: BufferLayout
) -> None:
    """Each request's pages, as many as its tokens fill."""
    for row, line in zip(rows, table.reshape(layout.shapes["page_table"]), strict=False):
        pages = row.pages[: -(-row.kv_len // layout.page_size)]
        line[: len(pages)] = pages


def _write_tokens(buffer: Buffer, rows: tuple[BatchRow, ...], layout: BufferLayout) -> None:
    """Ids, positions and pool rows of all new tokens, request behind request."""
    ids: list[int] = []
    positions: list[int] = []
    table_line: list[int] = []  # where the page table has the request's pages
    for index, row in enumerate(rows):
        # A negative id -(slot + 1) reads the last token sampled into that slot, on the device.
        ids.extend((-(row.slot + 1),) if row.token_ids is None else row.token_ids)
        positions.extend(range(row.kv_len - row.q_len, row.kv_len))
        table_line.extend([index * layout.tiles.pages_per_slot] * row.q_len)
    tokens = layout.block(buffer, "ids", "kv_rows")[:, : len(ids)]
    tokens[0], tokens[1] = ids, positions
    page, offset = np.divmod(tokens[1], layout.page_size)
    table = buffer[layout.slices["page_table"]]
    tokens[2] = table[page + table_line] * layout.page_size + offset
    if any(row.num_shared for row in rows):
        num_shared = np.repeat([row.num_shared for row in rows], [row.q_len for row in rows])
        tokens[2, tokens[1] < num_shared] = NO_ROW


def check_fits(batch: Batch, key: ShapeKey) -> None:
    """Raises CapacityError when the batch exceeds the shape: the guard behind `policy.decide`."""
    needs = (batch.num_tokens, len(batch.rows), batch.max_context)
    for name, need, limit in zip(("tokens", "requests", "context"), needs, key, strict=True):
        if need > limit:
            raise CapacityError(
                f"executable {key} holds {limit} {name}, the batch has {need}; "
                "choose the shape with policy.decide"
            )
