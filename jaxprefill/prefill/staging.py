"""The device's copy of a shape's int buffer, at one address for life.

A CUDA graph holds addresses: a buffer that the allocator places anew each step makes XLA record
the graph again. So the host's words go through a launch of their own that overwrites this one
array in place. That launch may run while the step before is still computing: the device keeps
launches in order.
"""

import jax
import numpy as np
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array, Int32

from jaxprefill.models.sharding import place
from jaxprefill.prefill.compiler import Compiled, CompileJob
from jaxprefill.prefill.padding import Buffer, BufferLayout


class Staging:
    """Uploads one shape's buffers."""

    def __init__(
        self, layout: BufferLayout, compiled: dict[str, Compiled], sharding: Sharding
    ) -> None:
        """`compiled` holds the job of `Staging.job`."""
        self._replace = compiled[self.job_name(layout)].call
        self._words = place(np.zeros(layout.num_words, np.int32), sharding)

    def put(self, buffer: Buffer) -> Int32[Array, " words"]:
        """The words on the device; valid until the next `put`."""
        self._words = self._replace(self._words, buffer)
        return self._words

    @staticmethod
    def job_name(layout: BufferLayout) -> str:
        """Shapes of one length share an executable."""
        return f"upload {layout.num_words}"

    @staticmethod
    def job(layout: BufferLayout, sharding: Sharding) -> CompileJob:
        """What must be compiled."""
        words = jax.ShapeDtypeStruct((layout.num_words,), np.int32, sharding=sharding)
        new = jax.ShapeDtypeStruct(words.shape, words.dtype)
        return CompileJob(
            name=Staging.job_name(layout),
            function=_replace_words,
            arguments=(words, new),
            donated=(0,),
            is_graph=False,
        )


def _replace_words(
    old: Int32[Array, " words"], new: Int32[Array, " words"]
) -> Int32[Array, " words"]:
    """`new` in the place of `old`, which is donated."""
    return lax.dynamic_update_slice(old, new, (0,))
