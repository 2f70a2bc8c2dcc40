"""Prefill of many tokens on Hopper with a Mosaic kernel; the rest is left to the Triton one.

The Mosaic kernel reads pages and tiles whole, which wants a launch before it and one after:

    write_pool      new keys and values into the pool
    attention       all keys from the pool; tiles that are not full into an array of their own
    merge_parts     those tiles' rows to where they belong

Decode and small batches gain from smaller tiles and from sharing out long contexts. A page that one
request writes and another reads must be written in an earlier call.
"""

from importlib import import_module

from jaxprefill.kernels.attention import pallas_triton
from jaxprefill.kernels.attention.api import Attend, AttentionBackend
from jaxprefill.kernels.attention.capabilities import CAUSAL, AttentionSpec, Capabilities
from jaxprefill.kernels.attention.pallas_triton import PALLAS_TRITON
from jaxprefill.kernels.attention.tiles import TileShape, tile_capacity
from jaxprefill.kernels.attention.whole_tiles import merge_parts, write_pool

# H200, 32 query heads on 8, one request, all three launches against the Triton kernel's one: 8192
# tokens 1296 -> 1054 us, 2048 156 -> 119 us; 1024 87 -> 99 us. Below, the Triton kernel is taken;
# `select.FASTER` says from where this backend is taken without being named.
_LEAST_TOKENS = 2048
ROWS, KEYS, HEAD_DIM = 64, 128, 128  # query tokens a tile, keys a step


def _tile_shape(
    num_tokens: int, num_slots: int, max_context: int, *, page_size: int, is_decode: bool
) -> TileShape:
    shape = PALLAS_TRITON.tile_shape(
        num_tokens, num_slots, max_context, page_size=page_size, is_decode=is_decode
    )
    if is_decode or num_tokens < _LEAST_TOKENS:
        return shape
    num_tiles = tile_capacity(num_tokens, num_slots, ROWS)
    return shape._replace(tile_q=ROWS, block_k=KEYS, num_tiles=num_tiles)


def make_attend(shape: TileShape, spec: AttentionSpec = CAUSAL) -> Attend:
    """Attention of one compiled shape: the tiles tell which kernel."""
    if shape.block_k != KEYS:
        return pallas_triton.make_attend(shape, spec)

    # Half a second of imports that only Hopper needs.
    kernel = import_module("jaxprefill.kernels.attention.mosaic_kernel")

    def write_and_attend(q, k, v, pool, batch, first_page, sinks=None):  # pyright: ignore
        pool = write_pool(pool, k, v, batch, first_page, tile_q=ROWS)
        out, parts = kernel.attend_to_pool(q, pool, batch, first_page)
        return merge_parts(out, parts, batch, tile_q=ROWS), pool

    return write_and_attend


PALLAS_MOSAIC_GPU = AttentionBackend(
    name="pallas_mosaic_gpu",
    capabilities=Capabilities(
        platforms=frozenset({"gpu"}),
        compute_capabilities=frozenset({"9.0"}),
        dtypes=frozenset({"bfloat16"}),
        max_page_size=KEYS,
        page_sizes=frozenset({8, 16, 32, 64, 128}),
        head_dims=frozenset({HEAD_DIM}),
        has_max_context=True,
    ),
    tile_shape=_tile_shape,
    make=make_attend,
    is_fusible=True,  # fused layers are of fewer tokens than the Mosaic kernel's
)
