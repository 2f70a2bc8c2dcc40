"""The host's half of attention: query tiles planned into the int buffer. Imports no jax.

A tile is up to `tile_q` consecutive new tokens of one request; tiles are listed request by
request, and the unused end of the list is never visited:

    q_lens      [ 5, 2, 0, 0 ]       tile_q 4        (two sentinel requests)
    tile_slot   [ 0, 0, 1, -, - ]    tile_start  [ 0, 4, 0, -, - ]    num_tiles 3
"""

from collections.abc import Iterable
from typing import NamedTuple

NO_ROW = 2**31 - 1  # the pool row of a padding token: it writes nowhere


class TileShape(NamedTuple):
    """Static sizes of the tile list: what a compiled attention is specialised on.

    Attributes:
        tile_q: query tokens a tile; 1 is decode, where row i is slot i.
        block_k: keys a step; a page-table row covers a whole number of blocks.
        num_tiles: capacity of the tile list.
        pages_per_slot: width W of a page-table row.
    """

    tile_q: int
    block_k: int
    num_tiles: int
    pages_per_slot: int


def tile_capacity(num_tokens: int, num_slots: int, tile_q: int) -> int:
    """Most tiles any batch of these sizes can need: each request may end in a partial tile."""
    return min(num_tokens, num_tokens // tile_q + num_slots)


def plan_tiles(q_lens: Iterable[int], tile_q: int) -> tuple[list[int], list[int]]:
    """(tile_slot, tile_start) of the live tiles; starts count from the request's first token."""
    slots: list[int] = []
    starts: list[int] = []
    for slot, q_len in enumerate(q_lens):
        starts.extend(range(0, q_len, tile_q))
        slots.extend([slot] * (len(starts) - len(slots)))
    return slots, starts
