"""The body with fused layers: a norm is part of the products before and after it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from jaxprefill.config import ModelConfig
from jaxprefill.kernels.attention import AttentionBackend
from jaxprefill.kernels.decoder_layer import (
    LayerStream,
    finish_stream,
    layer_tiles,
    make_fused_layer,
    padded_rows,
    start_stream,
)
from jaxprefill.models.decoder import Decoder, LayerInputs, Pools, attention_specs
from jaxprefill.models.fused import lacks_fusion, layer_sizes, layer_weights
from jaxprefill.models.stacks import spread
from jaxprefill.models.tree import Leaves, ModelTree
from jaxprefill.prefill.forward import Body
from jaxprefill.prefill.padding import BufferLayout

# Above, XLA (jax 0.11.2) runs a part of the fused pass while the batch is still being copied to the
# device, which makes two graphs of it; and plain layers are as fast (H200, 2048: 49.8 and 49.6 ms).
MAX_FUSED_TOKENS = 1536


def make_body(
    tree: ModelTree,
    backend: AttentionBackend,
    layout: BufferLayout,
    *,
    platform: str,
    has_stacks: bool = False,
) -> Body:
    """The pass of one shape: with fused layers where they can be had and are one CUDA graph.

    Where there are stacks of the layers' weights it takes them, if it can.
    """
    dtype = tree.shapes[0].dtype.name
    is_small = layout.key.num_tokens <= MAX_FUSED_TOKENS
    if is_small and uses_fused_layers(tree.config, backend, platform=platform, dtype=dtype):
        return FusedBody(tree, backend, layout, has_stacks=has_stacks)
    return Body(tree, backend, layout, is_looped=platform == "cpu")


def uses_fused_layers(
    config: ModelConfig, backend: AttentionBackend, *, platform: str, dtype: str
) -> bool:
    """Whether `make_body` fuses the layers of this model's smaller shapes."""
    return backend.is_fusible and lacks_fusion(config, platform=platform, dtype=dtype) is None


class FusedBody(Body):
    """`Body` with fewer launches, and fewer passes over the rows between its products."""

    def __init__(
        self,
        tree: ModelTree,
        backend: AttentionBackend,
        layout: BufferLayout,
        *,
        has_stacks: bool = False,
        interpret: bool = False,
    ) -> None:
        """`models.fused.lacks_fusion` must find nothing; `interpret` runs it on any device."""
        super().__init__(tree, backend, layout)
        self._sizes = layer_sizes(tree.config)
        kind = jnp.dtype(tree.config.quantization or tree.shapes[0].dtype)
        num_tokens = layout.key.num_tokens
        self._tiles = layer_tiles(self._sizes, num_tokens, itemsize=kind.itemsize)
        if self._tiles.takes_stacks:  # XLA has no product to tune
            self.products, self.is_stacked = None, has_stacks
        self._by_window = {
            spec.window: make_fused_layer(
                layout.tiles,
                spec,
                tiles=self._tiles,
                norm_eps=tree.config.norm_eps,
                interpret=interpret,
            )
            for spec in attention_specs(tree.config)
        }

    def __call__(self, leaves: Leaves, *operands: Any) -> tuple[Pools, Shaped[Array, "tokens E"]]:
        """See `Body.__call__`."""
        return super().__call__(spread(self.tree, leaves) if self.is_stacked else leaves, *operands)

    def _normed_layers(
        self,
        model: Decoder,
        leaves: Leaves,
        rows: Float[Array, "T E"],
        pools: Pools,
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "T E"], Pools]:
        """See `Body._normed_layers`; the last product carries the final norm."""
        (pool,) = pools
        norms, num_tokens = self.tree.leaf(leaves, "norms"), len(rows)
        spare = padded_rows(num_tokens, self._tiles) - num_tokens
        rotary = jnp.pad(inputs.rotary, ((0, 0), (0, spare), (0, 0)))
        inputs = inputs._replace(rotary=rotary)
        with jax.named_scope("embed"):
            rows = jnp.pad(rows, ((0, spare), (0, 0)))
            stream = start_stream(
                rows,
                norms[0],
                inputs.batch,
                shape=self.layout.tiles,
                tiles=self._tiles,
                sizes=self._sizes,
            )
        layer_fn = jax.jit(self._fused_layer, static_argnames="window")
        for index, window in enumerate(self.tree.config.windows):
            own = self.tree.layer_leaves(leaves, index)
            stream, pool = layer_fn(
                own, norms, stream, pool, jnp.int32(index), inputs, window=window
            )
        with jax.named_scope("final_norm"):
            return finish_stream(stream, self.tree.config.norm_eps)[:num_tokens], (pool,)

    def _fused_layer(
        self,
        leaves: Leaves,
        norms: Shaped[Array, "rows E"],
        stream: LayerStream,
        pool: Shaped[Array, "2 K P S D"],
        layer: Int32[Array, ""],
        inputs: LayerInputs,
        *,
        window: int | None,
    ) -> tuple[LayerStream, Shaped[Array, "2 K P S D"]]:
        weights = layer_weights(self.tree.bind_layer(leaves))
        fused = self._by_window[window]
        return fused(weights, norms, layer, stream, pool, inputs.rotary, inputs.batch)
