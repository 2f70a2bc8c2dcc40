"""Building blocks shared by the architectures. Matrix products accumulate in float32."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jaxprefill.config import Activation
from jaxprefill.kernels.device import (
    NARROW_ROWS,
    prefers_narrow_results,
    prefers_weight_first,
    product_precision,
)
from jaxprefill.models.sharding import LogicalAxes


def parameter(shape: tuple[int, ...], dtype: jnp.dtype, axes: LogicalAxes) -> nnx.Param[Array]:
    """A weight that the loader fills; `axes` names each dimension for sharding."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


@dataclass(frozen=True)
class WeightByLayer:
    """A weight inside a loop over layers: all layers' arrays, and which layer it is.

    What reads it branches on the layer, and every branch holds one layer's array: XLA's `while`
    and `conditional` pass arrays on by address, whereas slices of stacked weights are copies.
    """

    arrays: tuple[Shaped[Array, "..."], ...]
    layer: Int32[Array, ""]

    @property
    def dtype(self) -> jnp.dtype:
        """All arrays have it."""
        return self.arrays[0].dtype

    def __getitem__(self, index: int | EllipsisType) -> "WeightByLayer | Array":
        """The weight itself for `...`, as nnx.Param asks; else a part of this layer's array."""
        return self if index is ... else self.apply(lambda array: array[index])

    def apply(self, function: Callable[[Array], Array]) -> Array:
        """The function of this layer's array; only this layer's is computed."""
        branches = [partial(function, array) for array in self.arrays]
        return lax.switch(self.layer, branches)


@dataclass(frozen=True)
class ScaledWeight:
    """A weight in eight bits: what is multiplied is `values` in `dtype`, then times `scales`."""

    values: Shaped[Array, "outputs inputs"] | WeightByLayer
    scales: Float32[Array, " outputs"]
    dtype: jnp.dtype


def weight_by_layer(arrays: Sequence[Array], layer: Int32[Array, ""]) -> WeightByLayer | Array:
    """One parameter of a loop's current layer; vectors are small and simply copied."""
    weight = WeightByLayer(tuple(arrays), layer)
    return weight if arrays[0].ndim > 1 else weight.apply(lambda array: array)


def linear(
    x: Float[Array, "T inputs"],
    weight: Float[Array, "outputs inputs"] | WeightByLayer | ScaledWeight,
) -> Float[Array, "T outputs"]:
    """X @ weight.T in the weight's dtype, accumulated in float32.

    Returned in float32, or in the weight's dtype where that is written faster (see `device`).
    float32 products are not rounded to TensorFloat-32.
    """
    if isinstance(weight, WeightByLayer):
        return weight.apply(partial(linear, x))
    if isinstance(weight, ScaledWeight):
        return _scaled_linear(x, weight)
    is_narrow = len(x) >= NARROW_ROWS and prefers_narrow_results()
    multiply = partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=product_precision(weight.dtype),
        preferred_element_type=weight.dtype if is_narrow else jnp.float32,
    )
    rows = x.astype(weight.dtype)
    if prefers_weight_first(len(x), weight.dtype):
        # Without the barrier XLA folds the transposition into the product: the other order again.
        return lax.optimization_barrier(multiply(weight, rows)).T
    return multiply(rows, weight)


def _scaled_linear(x: Float[Array, "T inputs"], weight: ScaledWeight) -> Float[Array, "T outputs"]:
    def multiply(values: Shaped[Array, "outputs inputs"]) -> Float[Array, "T outputs"]:
        return linear(x, values.astype(weight.dtype))

    values = weight.values
    out = values.apply(multiply) if isinstance(values, WeightByLayer) else multiply(values)
    return (out * weight.scales).astype(out.dtype)


def rms_norm(
    x: Float[Array, "*rows E"], weight: Float[Array, " E"], eps: float, offset: float = 0.0
) -> Float[Array, "*rows E"]:
    """Root-mean-square norm over the last axis (arXiv 1910.07467), in float32.

    `offset` is added to the weights.
    """
    factors = weight.astype(jnp.float32)
    return unit_rms(x, eps) * (factors + offset if offset else factors)


def unit_rms(x: Float[Array, "*rows E"], eps: float) -> Float[Array, "*rows E"]:
    """RMS norm without a weight, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def gated_mlp(
    gate_up: Float[Array, "T twice"], activation: Activation = "silu"
) -> Float[Array, "T half"]:
    """activation(gate) * up, for a fused projection whose first half is the gate."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return gated(gate, up, activation)


def gated(
    gate: Float[Array, "T half"], up: Float[Array, "T half"], activation: Activation = "silu"
) -> Float[Array, "T half"]:
    """activation(gate) * up."""
    if activation == "silu":
        return jax.nn.silu(gate) * up
    return jax.nn.gelu(gate, approximate=activation == "gelu_tanh") * up


def rotary_table(
    positions: Int32[Array, " T"],
    frequencies: Float32[np.ndarray, " half"],
    factor: float = 1.0,
) -> Float[Array, "2 T half"]:
    """Cosine and sine of each position's rotary angles (arXiv 2104.09864), times `factor`."""
    angle = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)]) * factor


def rotate(
    x: Float[Array, "T heads D"], table: Float[Array, "2 T half"]
) -> Float[Array, "T heads D"]:
    """Rotary embedding in Hugging Face's layout: dimension i pairs with i + half.

    Dimensions from 2 * half on stay as they are (partial rotation).
    """
    cos, sin = table[:, :, None]
    half = table.shape[-1]
    low, high, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    parts = [low * cos - high * sin, high * cos + low * sin, rest]
    return jnp.concatenate(parts[: 2 if rest.shape[-1] == 0 else 3], axis=-1)
