"""The products of `gemm` in plain JAX: their reference, and the choice where XLA's kernels win."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxprefill.kernels.decoder_layer.api import LayerStream, norm_scale


def project(
    stream: LayerStream,
    weight: Float[Array, "outputs E"],
    bias: Float[Array, " outputs"] | None,
    *,
    norm_eps: float,
) -> Float[Array, "T outputs"]:
    """Normed rows times the weight."""
    out = _normed_product(stream, weight, norm_eps)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(weight.dtype)


def project_gated(
    stream: LayerStream, weight: Float[Array, "twice E"], *, norm_eps: float
) -> Float[Array, "T half"]:
    """silu(gate) * up of the normed rows."""
    gate, up = jnp.split(_normed_product(stream, weight, norm_eps), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(weight.dtype)


def project_residual(
    x: Float[Array, "T depth"],
    weight: Float[Array, "E depth"],
    stream: LayerStream,
    norms: Float[Array, "rows E"],
    layer: Int32[Array, ""],
    *,
    norm_row: int,
) -> LayerStream:
    """The stream with the product added; row 2 * layer + `norm_row` of `norms` comes next."""
    hidden = stream.hidden + _product(x, weight)
    norm = lax.dynamic_index_in_dim(norms, 2 * layer + norm_row, keepdims=False)
    return stream._replace(
        hidden=hidden,
        scaled=(hidden * norm.astype(jnp.float32)).astype(norm.dtype),
        squares=(hidden * hidden).sum(1, keepdims=True),
    )


def _normed_product(
    stream: LayerStream, weight: Float[Array, "outputs E"], norm_eps: float
) -> Float32[Array, "T outputs"]:
    return _product(stream.scaled, weight) * norm_scale(stream, norm_eps)


def _product(
    x: Float[Array, "T depth"], weight: Float[Array, "outputs depth"]
) -> Float32[Array, "T outputs"]:
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(
        x, weight, contract, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
