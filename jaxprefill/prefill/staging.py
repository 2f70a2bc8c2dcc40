"""The host's side of a shape's int buffer: a ring of pinned memory that executables read.

A CUDA graph holds addresses, and jax's own transfer of a NumPy array makes a new one each step:
the graph would be recorded again, and the transfer costs 0.4 ms on an H200. A pinned slot is
copied by the executable, before its graph, to where its temporaries are.

    step n -> slot n % 8    | 0 1 2 3 | 4 5 6 7 |    a half is rewritten when its mark is done

A mark is a small launch after the half's last step, and done when all before it are.
"""

import ctypes
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int32, Shaped

from jaxprefill.kernels.device import PINNED
from jaxprefill.models.sharding import place
from jaxprefill.prefill.compiler import Compiled, CompileJob
from jaxprefill.prefill.padding import Buffer, BufferLayout

MARK = "mark"
_HALF = 4


@dataclass(frozen=True)
class _Slot:
    """An operand, and the memory of each device's copy as the host writes it."""

    pinned: Int32[Array, " words"]
    views: tuple[Buffer, ...]

    @staticmethod
    def make(num_words: int, sharding: NamedSharding) -> "_Slot":
        pinned = place(np.zeros(num_words, np.int32), sharding)
        copies = [shard.data.unsafe_buffer_pointer() for shard in pinned.addressable_shards]
        typed = [ctypes.cast(copy, ctypes.POINTER(ctypes.c_int32)) for copy in copies]
        return _Slot(pinned, tuple(np.ctypeslib.as_array(at, (num_words,)) for at in typed))


class Staging:
    """Hands one shape's buffers to its executable."""

    def __init__(self, layout: BufferLayout, mark: Compiled, sharding: NamedSharding) -> None:
        """`mark` is the job of `mark_job`; `sharding` is whole on every device."""
        pinned = pinned_sharding(sharding)
        self._mark = mark.call
        self._slots = [_Slot.make(layout.num_words, pinned) for _ in range(2 * _HALF)]
        self._marks: list[Array | None] = [None, None]
        self._next = 0

    def put(self, buffer: Buffer) -> Int32[Array, " words"]:
        """The buffer's copy in pinned memory: an operand of the next launch."""
        half, at = divmod(self._next, _HALF)
        mark = self._marks[half]
        if at == 0 and mark is not None:
            mark.block_until_ready()
        slot = self._slots[self._next]
        for view in slot.views:
            view[:] = buffer
        return slot.pinned

    def launched(self, hidden: Shaped[Array, "tokens E"]) -> None:
        """The launch that reads the last `put` is dispatched; `hidden` is its result."""
        half, at = divmod(self._next, _HALF)
        if at == _HALF - 1:
            self._marks[half] = self._mark(hidden)
        self._next = (self._next + 1) % (2 * _HALF)


def pinned_sharding(sharding: NamedSharding) -> NamedSharding:
    """Host memory that the devices of `sharding` can read."""
    return sharding.with_memory_kind(PINNED)


def mark_job(hidden: jax.ShapeDtypeStruct) -> CompileJob:
    """The launch whose result says that all launches before it are done."""
    return CompileJob(name=MARK, function=_first_number, arguments=(hidden,), is_graph=False)


def _first_number(hidden: Shaped[Array, "tokens E"]) -> Shaped[Array, ""]:
    return hidden[0, 0]
