"""Building blocks shared by the architectures. Matrix products accumulate in float32."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxprefill.config import Activation
from jaxprefill.models.sharding import LogicalAxes


def parameter(shape: tuple[int, ...], dtype: jnp.dtype, axes: LogicalAxes) -> nnx.Param[Array]:
    """A weight that the loader fills; `axes` names each dimension for sharding."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def linear(
    x: Float[Array, "T inputs"], weight: Float[Array, "outputs inputs"]
) -> Float[Array, "T outputs"]:
    """X @ weight.T in the weight's dtype, accumulated and returned in float32."""
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(
        x.astype(weight.dtype), weight, contract, preferred_element_type=jnp.float32
    )


def rms_norm(
    x: Float[Array, "*rows E"], weight: Float[Array, " E"], eps: float
) -> Float[Array, "*rows E"]:
    """Root-mean-square norm over the last axis (arXiv 1910.07467), in float32."""
    x = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight.astype(jnp.float32)


def gated_mlp(
    gate_up: Float[Array, "T twice"], activation: Activation = "silu"
) -> Float[Array, "T half"]:
    """activation(gate) * up, for a fused projection whose first half is the gate."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
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
    low, high, rest = jnp.split(x, (half, 2 * half), axis=-1)
    parts = [low * cos - high * sin, high * cos + low * sin, rest]
    return jnp.concatenate(parts[: 2 if rest.shape[-1] == 0 else 3], axis=-1)
