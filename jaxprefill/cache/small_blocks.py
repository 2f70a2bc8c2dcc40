"""Room in device memory for small arrays that come and go.

A CUDA graph holds the addresses of its temporaries, and is recorded again when they move. XLA's
allocator takes each request from the smallest free block that holds it: an upload or a result
that is still in flight, cut from the block where the temporaries were, would move them. Here each
size of small array gets free blocks of its own, kept apart by arrays that stay:

    | free 256 B | kept | free 256 B | kept | ... | free 512 B | kept | ...
"""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, UInt8

from jaxprefill.models.sharding import place

_SIZES = tuple(256 << power for power in range(13))  # the allocator's unit, to 1 MiB
_MOST = 96  # free blocks a size: arrays of two steps that score a long prompt
_FEW = 4  # from 32 KiB: rows of the vocabulary, which few requests send

SmallBlocks = tuple[UInt8[Array, " bytes"], ...]


def reserve_small_blocks(sharding: NamedSharding) -> SmallBlocks:
    """What keeps the free blocks apart, on every device of `sharding`: to be held for good.

    Must be called before temporaries find their places: before the first warm call.
    """
    free: list[Array] = []
    kept: list[Array] = []
    for size in _SIZES:
        for _ in range(_MOST if size < 32 << 10 else _FEW):
            free.append(place(np.zeros(size, np.uint8), sharding))
            kept.append(place(np.zeros(1, np.uint8), sharding))
    jax.block_until_ready((free, kept))
    return tuple(kept)
