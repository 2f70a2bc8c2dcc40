"""A batch as one int32 buffer of a compiled shape: real tokens, padding tokens, sentinel requests.

    tokens    | a a a a a | b b | . . . . . |     5 + 2 real, 5 padding tokens (of no request)
    requests  | a: 5 | b: 2 | sentinel: q_len 0, kv_len 0, start 7 | sentinel ... |

Every field is written to its full size on every call, into a fresh array that is then made
read-only: jax may alias host memory until the step has run, and nothing can overwrite it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int32

from jaxprefill.batch import Batch, BatchRow
from jaxprefill.errors import CapacityError
from jaxprefill.kernels.attention.tiles import NO_ROW, TileShape, plan_tiles
from jaxprefill.prefill.buckets import ShapeKey

Buffer = Int32[np.ndarray, " words"]
_LONG_ROW = 64  # tokens, on average: from there on NumPy's calls take less than lists


@dataclass(frozen=True)
class BufferLayout:
    """Where each field lies in the buffer of one shape. T, R, N, W as in `kernels`.

    Attributes:
        recent_pages: columns of `recent_table`: page number n of a request is in n modulo these.
    """

    key: ShapeKey
    tiles: TileShape
    page_size: int
    recent_pages: int = 0

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
            "recent_table": (*slots, self.recent_pages),
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
        return self.slices["recent_table"].stop

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
    words = buffer.data
    if batch.num_tokens >= _LONG_ROW * max(len(batch.rows), 1):
        _write_long(buffer, batch.rows, layout)
    else:
        numbers = array("i", _numbers(batch.rows, layout))
        words[: len(numbers)] = numbers
    line = layout.slices["page_table"].start
    for row in batch.rows:
        pages = row.pages[: -(-row.kv_len // layout.page_size)]
        words[line : line + len(pages)] = pages if isinstance(pages, array) else array("i", pages)
        line += layout.tiles.pages_per_slot
    line = layout.slices["recent_table"].start
    for row in batch.rows if layout.recent_pages else ():
        for number, page in enumerate(row.recent, row.recent_first):
            words[line + number % layout.recent_pages] = page
        line += layout.recent_pages
    buffer.flags.writeable = False
    return buffer


def _numbers(rows: tuple[BatchRow, ...], layout: BufferLayout) -> list[int]:
    """All fields before the page table: requests' tokens one behind another, and their lengths.

    Plain lists: a host that waited for the device finds its caches cold, and NumPy's many small
    calls then take longer than these.
    """
    ids: list[int] = []
    positions: list[int] = []
    kv_rows: list[int] = []
    q_lens: list[int] = []
    q_starts: list[int] = []
    for row in rows:
        q_starts.append(len(ids))
        # A negative id -(slot + 1) reads the last token sampled into that slot, on the device.
        ids += (-(row.slot + 1),) if row.token_ids is None else row.token_ids
        q_lens.append(len(ids) - q_starts[-1])
        positions += range(row.kv_len - q_lens[-1], row.kv_len)
        kv_rows += _kv_rows(row, row.kv_len - q_lens[-1], layout.page_size)
    tile_slot, tile_start = plan_tiles(q_lens, layout.tiles.tile_q)
    count, tokens, slots = len(ids), *layout.key[:2]
    padding, sentinels = [0] * (tokens - count), [0] * (slots - len(rows))
    spare = [0] * (layout.tiles.num_tiles - len(tile_slot))
    return [
        *(count, len(tile_slot)),
        *(*ids, *padding, *positions, *padding, *kv_rows, *[NO_ROW] * (tokens - count)),
        *(*q_lens, *sentinels, *(row.kv_len for row in rows), *sentinels),
        *(*q_starts, *[count] * (slots - len(rows))),
        *(*tile_slot, *spare, *tile_start, *spare),
    ]


def _write_long(buffer: Buffer, rows: tuple[BatchRow, ...], layout: BufferLayout) -> None:
    """What `_numbers` lists, into an empty buffer: a few calls a row, however long it is."""
    fields, starts, ends = layout.fields(buffer), list[int](), [0]
    for row in rows:
        starts.append(ends[-1])
        ends.append(starts[-1] + row.q_len)
        own, first = slice(starts[-1], ends[-1]), row.kv_len - row.q_len
        ids = row.token_ids
        fields["ids"][own] = -(row.slot + 1) if ids is None else array("i", ids)
        positions = np.arange(first, row.kv_len, dtype=np.int32)
        fields["positions"][own] = positions
        written = positions[max(0, min(row.num_shared, row.kv_len) - first) :]
        (pages, skipped), (numbers, offsets) = _kv_pages(row), np.divmod(written, layout.page_size)
        kv_rows = np.asarray(pages, np.int32)[numbers - skipped] * layout.page_size + offsets
        fields["kv_rows"][ends[-1] - len(written) : ends[-1]] = kv_rows
    q_lens = [row.q_len for row in rows]
    tile_slot, tile_start = plan_tiles(q_lens, layout.tiles.tile_q)
    fields["num_tokens"][...], fields["num_tiles"][...] = ends[-1], len(tile_slot)
    fields["q_starts"][len(rows) :] = ends[-1]
    for name, numbers in (
        *(("q_lens", q_lens), ("kv_lens", [row.kv_len for row in rows]), ("q_starts", starts)),
        *(("tile_slot", tile_slot), ("tile_start", tile_start)),
    ):
        fields[name][: len(numbers)] = numbers


def _kv_pages(row: BatchRow) -> tuple[Sequence[int], int]:
    """The pages that `kv_rows` are rows of, and the number of the first.

    Recent ones where there are any: their pools have a row for each token.
    """
    return (row.recent, row.recent_first) if row.recent else (row.pages, 0)


def _kv_rows(row: BatchRow, first: int, page_size: int) -> list[int]:
    """Pool rows of the request's tokens from `first` on; shared ones have theirs already."""
    pages, skipped = _kv_pages(row)
    written = max(first, min(row.num_shared, row.kv_len))
    found = [NO_ROW] * (written - first)
    for number in range(written // page_size, -(-row.kv_len // page_size)):
        start = number * page_size
        offset = pages[number - skipped] * page_size - start
        found += range(max(written, start) + offset, min(row.kv_len, start + page_size) + offset)
    return found


def check_fits(batch: Batch, key: ShapeKey) -> None:
    """Raises CapacityError when the batch exceeds the shape: the guard behind `policy.decide`."""
    needs = (batch.num_tokens, len(batch.rows), batch.max_context)
    for name, need, limit in zip(("tokens", "requests", "context"), needs, key, strict=True):
        if need > limit:
            raise CapacityError(
                f"executable {key} holds {limit} {name}, the batch has {need}; "
                "choose the shape with policy.decide"
            )
