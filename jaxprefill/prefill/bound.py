"""An executable called with its first operands flattened once, past jit's handling of each call.

With some two hundred weights that handling takes longer than the launch. One device only: results
come as arrays of a single device.
"""

from collections.abc import Iterable
from typing import Any

from jaxtyping import Array, Shaped


class BoundExecutable:
    """`fixed` operands come first, in the order of the flattened arguments."""

    def __init__(self, compiled: Any, fixed: Iterable[Shaped[Array, "..."]]) -> None:
        """`compiled` is a `jax.stages.Compiled` that keeps unused arguments."""
        self._execute = compiled.runtime_executable().execute_sharded
        self._fixed = list(fixed)

    def __call__(self, *operands: Any) -> list[Shaped[Array, "..."]]:
        """The flattened results; donated operands are gone. Shapes are the caller's care."""
        results = self._execute([*self._fixed, *operands])
        return [own for (own,) in results.disassemble_into_single_device_arrays()]
