"""What a fused decoder layer takes and gives, and what lies between two of them.

A layer's last product leaves the residual stream, the same times the next norm's weight, and sums
of its squares. The next product multiplies its result's rows by the norm's scale: the norm needs
no launch of its own, and no row is read twice.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jaxprefill.kernels.attention import RaggedBatch


class LayerWeights(NamedTuple):
    """One layer's own weights, [outputs, inputs]; X = H * D. Or those of all layers, stacked.

    Those in eight bits have scales, which a product's outputs are multiplied by.
    """

    qkv: Shaped[Array, "*layers qkv E"]
    output: Shaped[Array, "*layers E X"]
    gate_up: Shaped[Array, "*layers twice E"]  # gate rows, then up rows
    down: Shaped[Array, "*layers E mlp"]
    qkv_bias: Float[Array, "*layers qkv"] | None = None
    qk_norms: Float[Array, "*layers 2 D"] | None = None
    qkv_scale: Float32[Array, "*layers qkv"] | None = None
    output_scale: Float32[Array, "*layers E"] | None = None
    gate_up_scale: Float32[Array, "*layers twice"] | None = None
    down_scale: Float32[Array, "*layers E"] | None = None


class LayerStream(NamedTuple):
    """What a product that ends at a norm leaves for the next one.

    Attributes:
        hidden: the residual stream.
        scaled: `hidden` times the weight of the norm that comes next, in the weights' dtype.
        squares: sums of hidden's squares; a row's parts add up to its sum.
        arrivals: zeros between launches: how many programs of a split product are done.
    """

    hidden: Float32[Array, "T E"]
    scaled: Float[Array, "T E"]
    squares: Float32[Array, "T parts"]
    arrivals: Int32[Array, " tiles"]


# (weights, norms [rows, E], layer, stream, pool, rotary [2, T, D / 2], batch) -> (stream, pool).
# `norms` is packed as `models.decoder.Decoder` says; pool as for `attention.api.Attend`.
FusedLayer = Callable[
    [
        LayerWeights,
        Float[Array, "rows E"],
        Int32[Array, ""],
        LayerStream,
        Shaped[Array, "2 K P S D"],
        Float[Array, "2 T half"],
        RaggedBatch,
    ],
    tuple[LayerStream, Shaped[Array, "2 K P S D"]],
]


def norm_scale(stream: LayerStream, norm_eps: float) -> Float32[Array, "T 1"]:
    """What the norm multiplies each row by, its weight left aside."""
    mean = stream.squares.sum(1, keepdims=True) / stream.hidden.shape[1]
    return lax.rsqrt(mean + norm_eps)


def finish_stream(stream: LayerStream, norm_eps: float) -> Float32[Array, "T E"]:
    """The normed rows: what the product after the norm would multiply."""
    return stream.scaled.astype(jnp.float32) * norm_scale(stream, norm_eps)
