"""Building blocks shared by the architectures. Matrix products accumulate in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

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


def gated_mlp(gate_up: Float[Array, "T twice"]) -> Float[Array, "T half"]:
    """silu(gate) * up, for a fused projection whose first half is the gate."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def rotary_table(
    positions: Int32[Array, " T"], head_dim: int, theta: float
) -> Float[Array, "2 T half"]:
    """Cosine and sine of each position's rotary angles (arXiv 2104.09864), float32."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions[:, None].astype(jnp.float32) * frequency
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)])


def rotate(
    x: Float[Array, "T heads D"], table: Float[Array, "2 T half"]
) -> Float[Array, "T heads D"]:
    """Rotary embedding in Hugging Face's layout: dimension i pairs with i + D / 2."""
    cos, sin = table[:, :, None]
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
