"""A whole dense decoder layer in few launches, for few tokens."""

from jaxprefill.kernels.decoder_layer.api import (
    FusedLayer,
    LayerStream,
    LayerWeights,
    finish_stream,
)
from jaxprefill.kernels.decoder_layer.pallas_triton import (
    layer_tiles,
    make_fused_layer,
    padded_rows,
    start_stream,
)
from jaxprefill.kernels.decoder_layer.select import LayerSizes, lacks_fused_layer

__all__ = [
    "FusedLayer",
    "LayerSizes",
    "LayerStream",
    "LayerWeights",
    "finish_stream",
    "lacks_fused_layer",
    "layer_tiles",
    "make_fused_layer",
    "padded_rows",
    "start_stream",
]
