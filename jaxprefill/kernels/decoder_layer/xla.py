"""The products of `gemm` in plain JAX: their reference, and the choice where XLA's kernels win."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jaxprefill.kernels.decoder_layer.api import LayerStream, norm_scale
from jaxprefill.kernels.device import prefers_narrow_results

# H200, whole passes in float32 and in bfloat16: 128 tokens 5.49 and 5.35 ms, 256 7.21 and 6.90.
_NARROW_ROWS = 128


def project(
    stream: LayerStream,
    weight: Shaped[Array, "outputs E"],
    bias: Float[Array, " outputs"] | None,
    *,
    norm_eps: float,
    scales: Float32[Array, " outputs"] | None = None,
) -> Float[Array, "T outputs"]:
    """Normed rows times the weight.

    What follows could multiply by the norm's scale on its way, and save a launch: rows that
    amplify rounding then came out worse (36 layers of random weights against float32).
    """
    out = _product(stream.scaled, weight, scales) * norm_scale(stream, norm_eps)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(stream.scaled.dtype)


def project_gated(
    stream: LayerStream,
    weight: Shaped[Array, "twice E"],
    *,
    norm_eps: float,
    scales: Float32[Array, " twice"] | None = None,
) -> Float[Array, "T half"]:
    """silu(gate) * up of the normed rows."""
    out = _product(stream.scaled, weight, scales) * norm_scale(stream, norm_eps)
    gate, up = jnp.split(out, 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(stream.scaled.dtype)


def project_residual(
    x: Float[Array, "T depth"],
    weight: Shaped[Array, "E depth"],
    stream: LayerStream,
    norms: Float[Array, "rows E"],
    layer: Int32[Array, ""],
    *,
    norm_row: int,
    scales: Float32[Array, " E"] | None = None,
) -> LayerStream:
    """The stream with the product added; row 2 * layer + `norm_row` of `norms` comes next."""
    hidden = stream.hidden + _product(x, weight, scales)
    norm = lax.dynamic_index_in_dim(norms, 2 * layer + norm_row, keepdims=False)
    return stream._replace(
        hidden=hidden,
        scaled=(hidden * norm.astype(jnp.float32)).astype(norm.dtype),
        squares=(hidden * hidden).sum(1, keepdims=True),
    )


def _product(
    x: Float[Array, "T depth"],
    weight: Shaped[Array, "outputs depth"],
    scales: Float32[Array, " outputs"] | None,
) -> Float[Array, "T outputs"]:
    """In float32, or in the rows' dtype where that is written faster."""
    is_narrow = len(x) >= _NARROW_ROWS and prefers_narrow_results()
    contract = (((1,), (1,)), ((), ()))
    product = lax.dot_general(
        x,
        weight.astype(x.dtype),
        contract,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=x.dtype if is_narrow else jnp.float32,
    )
    return product if scales is None else product * scales
