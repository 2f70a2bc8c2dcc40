"""A batch as one int32 buffer of a compiled shape: real tokens, padding tokens, sentinel requests.

    tokens    | a a a a a | b b | . . . . . |     5 + 2 real, 5 padding tokens (of no request)
    requests  | a: 5 | b: 2 | sentinel: q_len 0, kv_len 0, start 7 | sentinel ... |

Every field is written to its full size on every call, into a fresh array that is then made
read-only: jax may alias host memory until the step has run, and nothing can overwrite it.
"""

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

    def fields(self, buffer: Buffer) -> dict[str, Int32[np.ndarray, "..."]]:
        """Views of a buffer's fields."""
        return {name: buffer[at].reshape(self.shapes[name]) for name, at in self.slices.items()}


def pad(batch: Batch, layout: BufferLayout) -> Buffer:
    """The batch in `layout`'s shape, read-only; the batch is left as it was.

    Raises:
        CapacityError: more tokens, requests or context than the shape holds.
    """
    check_fits(batch, layout.key)
    buffer = layout.empty.copy()
    fields = layout.fields(buffer)
    fields["num_tokens"][...] = batch.num_tokens
    fields["q_starts"].fill(batch.num_tokens)
    at = 0
    for index, row in enumerate(batch.rows):
        _write_row(fields, row, index=index, at=at, page_size=layout.page_size)
        at += row.q_len
    slots, starts = plan_tiles(fields["q_lens"], layout.tiles.tile_q)
    fields["num_tiles"][...] = len(slots)
    fields["tile_slot"][: len(slots)] = slots
    fields["tile_start"][: len(slots)] = starts
    buffer.flags.writeable = False
    return buffer


def _write_row(
    fields: dict[str, Int32[np.ndarray, "..."]],
    row: BatchRow,
    *,
    index: int,
    at: int,
    page_size: int,
) -> None:
    """One request's tokens from `at`, its lengths and its page-table row."""
    q_len = row.q_len
    positions = np.arange(row.kv_len - q_len, row.kv_len, dtype=np.int32)
    pages = np.asarray(row.pages[: -(-row.kv_len // page_size)], np.int32)
    new = slice(at, at + q_len)
    # A negative id -(slot + 1) reads the last token sampled into that slot, on the device.
    fields["ids"][new] = -(row.slot + 1) if row.token_ids is None else row.token_ids
    fields["positions"][new] = positions
    rows = pages[positions // page_size] * page_size + positions % page_size
    fields["kv_rows"][new] = np.where(positions < row.num_shared, NO_ROW, rows)
    fields["q_lens"][index] = q_len
    fields["kv_lens"][index] = row.kv_len
    fields["q_starts"][index] = at
    fields["page_table"][index, : len(pages)] = pages


def check_fits(batch: Batch, key: ShapeKey) -> None:
    """Raises CapacityError when the batch exceeds the shape: the guard behind `policy.decide`."""
    needs = (batch.num_tokens, len(batch.rows), batch.max_context)
    for name, need, limit in zip(("tokens", "requests", "context"), needs, key, strict=True):
        if need > limit:
            raise CapacityError(
                f"executable {key} holds {limit} {name}, the batch has {need}; "
                "choose the shape with policy.decide"
            )
