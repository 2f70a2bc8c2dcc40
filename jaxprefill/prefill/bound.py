"""An executable called with its first operands flattened once, past jit's handling of each call.

With some two hundred weights that handling takes longer than the launch. One device only: results
come as arrays of a single device.
"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Shaped

from jaxprefill.prefill.compiler import Compiled


class BoundExecutable:
    """`fixed` operands come first, in the order of the flattened arguments."""

    def __init__(self, compiled: Compiled, fixed: Sequence[Shaped[Array, "..."]]) -> None:
        """Those that the program does not read are left out; it must read all others."""
        self._launch = compiled.launch
        self._fixed = [fixed[index] for index in compiled.read if index < len(fixed)]

    def __call__(self, *operands: Any) -> list[Shaped[Array, "..."]]:
        """The flattened results; donated operands are gone. Shapes are the caller's care."""
        return [own for (own,) in self._launch([*self._fixed, *operands])]
