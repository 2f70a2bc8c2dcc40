"""What Pallas/Triton kernels have in common."""

from typing import Any

from jax import lax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32, Shaped

Ref = Any  # a Pallas reference: [index] loads and stores; jax has no public type for it
MIN_DOT = 16  # smallest side of a Triton dot


def dot(
    a: Shaped[Array, "m n"], b: Shaped[Array, "..."], *, trans_b: bool = False
) -> Float32[Array, "m k"]:
    """A b, or a b^T: float32 sums; float32 operands are not rounded to TensorFloat-32."""
    return plt.dot(a, b, trans_b=trans_b, precision=lax.Precision.HIGHEST)


def power_of_two(least: int) -> int:
    """The smallest that is not below `least`."""
    return 1 << (least - 1).bit_length()
