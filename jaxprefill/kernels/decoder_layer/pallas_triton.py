"""A dense decoder layer as five launches, or seven to twelve where XLA's own products win.

    qkv product | attention | output product | gate and up product | down product

KV write, rotation, activation, residual adds and norms happen inside them; with XLA's products,
rotation is a launch of its own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jaxprefill.kernels.attention import AttentionSpec, RaggedBatch, TileShape
from jaxprefill.kernels.attention.pallas_triton import make_attend_to_heads, num_arrivals
from jaxprefill.kernels.attention.rotation import norm_and_rotate
from jaxprefill.kernels.decoder_layer import gemm, xla
from jaxprefill.kernels.decoder_layer.api import FusedLayer, LayerStream, LayerWeights
from jaxprefill.kernels.decoder_layer.gemm import GemmTiles
from jaxprefill.kernels.decoder_layer.select import (
    MAX_TILED_TOKENS,
    LayerSizes,
    choose_gated_tiles,
    choose_head_tiles,
    choose_tiles,
    is_wide,
)


class LayerTiles(NamedTuple):
    """The tiling of a layer's four products; None: XLA's own."""

    qkv: GemmTiles | None
    output: GemmTiles | None
    gate_up: GemmTiles | None
    down: GemmTiles | None

    @property
    def takes_stacks(self) -> bool:
        """Whether every product can pick its layer of stacked weights."""
        return None not in self


def layer_tiles(sizes: LayerSizes, num_tokens: int, *, itemsize: int) -> LayerTiles:
    """The measured choice for these sizes, and weights whose numbers have `itemsize` bytes."""
    if num_tokens > MAX_TILED_TOKENS and not is_wide(sizes, num_tokens):
        return LayerTiles(None, None, None, None)
    hidden, mlp = sizes.hidden_size, sizes.mlp_size
    chosen = LayerTiles(
        qkv=choose_head_tiles(num_tokens, sizes, itemsize=itemsize),
        output=choose_tiles(num_tokens, sizes.attended_size, hidden, itemsize=itemsize),
        gate_up=choose_gated_tiles(num_tokens, hidden, mlp, itemsize=itemsize),
        down=choose_tiles(num_tokens, mlp, hidden, itemsize=itemsize),
    )
    if num_tokens <= MAX_TILED_TOKENS:
        return chosen
    return chosen._replace(output=None, down=None)


def padded_rows(num_tokens: int, tiles: LayerTiles) -> int:
    """The least number of rows, `num_tokens` or more, that every product's tiles divide."""
    heights = [one.tile_t for one in tiles if one is not None]
    return -(-num_tokens // max(heights, default=1)) * max(heights, default=1)


def start_stream(
    hidden: Float32[Array, "T E"],
    norm: Float[Array, " E"],
    batch: RaggedBatch,
    *,
    shape: TileShape,
    tiles: LayerTiles,
    sizes: LayerSizes,
) -> LayerStream:
    """The stream before the first layer, whose norm is `norm`."""
    num_tokens = len(hidden)
    outputs = (sizes.qkv_size // 2, sizes.hidden_size, sizes.mlp_size, sizes.hidden_size)
    # As every later layer finds them.
    parts = gemm.num_parts(sizes.hidden_size, tiles.down) if tiles.down else 1
    counts = [
        gemm.num_arrivals(num_tokens, outputs_of, one)
        for outputs_of, one in zip(outputs, tiles, strict=True)
        if one is not None
    ]
    kv_heads = (sizes.qkv_size - sizes.attended_size) // (2 * sizes.head_dim)
    counts.append(num_arrivals(shape, kv_heads))
    return LayerStream(
        hidden=hidden,
        scaled=(hidden * norm.astype(jnp.float32)).astype(norm.dtype),
        squares=jnp.pad((hidden * hidden).sum(1, keepdims=True), ((0, 0), (0, parts - 1))),
        # Zeros that wait for the batch: what XLA can run before the batch's copy from the host
        # has arrived becomes a CUDA graph of its own.
        arrivals=jnp.broadcast_to(jnp.minimum(batch.num_tiles, 0), max(counts)),
    )


def make_fused_layer(
    shape: TileShape,
    spec: AttentionSpec,
    *,
    tiles: LayerTiles,
    norm_eps: float,
    interpret: bool = False,
) -> FusedLayer:
    """A layer of one compiled shape; `interpret` runs it on any device, slowly."""
    attend = make_attend_to_heads(shape, spec, interpret=interpret)
    products = _Products(tiles, norm_eps, interpret)

    def layer_pass(
        weights: LayerWeights,
        norms: Float[Array, "rows E"],
        layer: Int32[Array, ""],
        stream: LayerStream,
        pool: Shaped[Array, "2 K P S D"],
        rotary: Float[Array, "2 T half"],
        batch: RaggedBatch,
    ) -> tuple[LayerStream, Shaped[Array, "2 K P S D"]]:
        with jax.named_scope("attention.qkv"):
            qkv, stream, is_rotated = products.qkv(
                weights, stream, rotary, layer, kv_heads=pool.shape[1]
            )
        with jax.named_scope("attention.core"):
            first_page = layer * (pool.shape[2] // (len(norms) // 2))
            heads = qkv.reshape(len(qkv), -1, pool.shape[-1])
            if not is_rotated:
                heads = norm_and_rotate(
                    heads,
                    rotary,
                    weights.qk_norms,
                    kv_heads=pool.shape[1],
                    norm_eps=norm_eps,
                    interpret=interpret,
                )
            out, pool, arrivals = attend(heads, pool, batch, first_page, stream.arrivals)
            attended, stream = out.reshape(len(out), -1), stream._replace(arrivals=arrivals)
        with jax.named_scope("attention.output"):
            stream = products.output(
                weights.output_scale, attended, weights.output, stream, norms, layer
            )
        with jax.named_scope("mlp.gate_up"):
            gated, stream = products.gate_up(weights, stream, layer)
        with jax.named_scope("mlp.down"):
            stream = products.down(weights.down_scale, gated, weights.down, stream, norms, layer)
        return stream, pool

    return layer_pass


class _Products(NamedTuple):
    """A layer's four products, each by the kernel its tiling names."""

    tiles: LayerTiles
    norm_eps: float
    interpret: bool

    def qkv(
        self,
        weights: LayerWeights,
        stream: LayerStream,
        rotary: Float[Array, "2 T half"],
        layer: Int32[Array, ""],
        *,
        kv_heads: int,
    ) -> tuple[Float[Array, "T outputs"], LayerStream, bool]:
        """(the heads of each row, the stream, whether the heads are normed and rotated)."""
        if self.tiles.qkv is None:
            out = xla.project(
                stream,
                weights.qkv,
                weights.qkv_bias,
                norm_eps=self.norm_eps,
                scales=weights.qkv_scale,
            )
            return out, stream, False
        out, arrivals = gemm.project_rotated(
            stream,
            weights,
            rotary,
            layer,
            kv_heads=kv_heads,
            tiles=self.tiles.qkv,
            norm_eps=self.norm_eps,
            interpret=self.interpret,
        )
        return out, stream._replace(arrivals=arrivals), True

    def gate_up(
        self, weights: LayerWeights, stream: LayerStream, layer: Int32[Array, ""]
    ) -> tuple[Float[Array, "T half"], LayerStream]:
        if self.tiles.gate_up is None:
            out = xla.project_gated(
                stream, weights.gate_up, norm_eps=self.norm_eps, scales=weights.gate_up_scale
            )
            return out, stream
        out, arrivals = gemm.project_gated(
            stream,
            weights.gate_up,
            layer,
            tiles=self.tiles.gate_up,
            scales=weights.gate_up_scale,
            norm_eps=self.norm_eps,
            interpret=self.interpret,
        )
        return out, stream._replace(arrivals=arrivals)

    def output(self, scales: Float32[Array, "*layers E"] | None, *operands: Any) -> LayerStream:
        return self._residual(self.tiles.output, 1, scales, *operands)

    def down(self, scales: Float32[Array, "*layers E"] | None, *operands: Any) -> LayerStream:
        return self._residual(self.tiles.down, 2, scales, *operands)

    def _residual(
        self,
        tiles: GemmTiles | None,
        norm_row: int,
        scales: Float32[Array, "*layers E"] | None,
        *operands: Any,
    ) -> LayerStream:
        if tiles is None:
            return xla.project_residual(*operands, norm_row=norm_row, scales=scales)
        return gemm.project_residual(
            *operands, norm_row=norm_row, tiles=tiles, scales=scales, interpret=self.interpret
        )
