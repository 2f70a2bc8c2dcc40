"""Whether a layer can be fused, and how its products are cut: measured on an H200."""

from typing import NamedTuple

from jaxprefill.kernels.decoder_layer.gemm import GemmTiles

MAX_TILED_TOKENS = 64  # above, XLA's own products win by more than fewer launches save
_FEW_PROGRAMS = 90  # of an H200's 132 multiprocessors
_LEAST_DEPTH = 256  # of a split


class LayerSizes(NamedTuple):
    """Widths of a dense decoder layer."""

    hidden_size: int
    qkv_size: int
    attended_size: int
    mlp_size: int
    head_dim: int


def lacks_fused_layer(sizes: LayerSizes, *, platform: str, dtype: str) -> str | None:
    """The first need that is not met, in words, or None."""
    if platform != "gpu":
        return f"runs on gpu, not on {platform}"
    if dtype != "bfloat16":
        return f"takes bfloat16, not {dtype}"
    for name, size in zip(LayerSizes._fields, sizes, strict=True):
        if name != "head_dim" and size % 64:
            return f"takes sizes that are multiples of 64, and {name} is {size}"
    if sizes.head_dim < 32 or sizes.head_dim & (sizes.head_dim - 1):
        return f"takes head dims 32, 64, 128, ..., not {sizes.head_dim}"
    return None


def choose_tiles(num_tokens: int, depth: int, outputs: int, *, num_sums: int = 1) -> GemmTiles:
    """The tiling of one product; every size it takes divides what it cuts.

    Few programs leave multiprocessors idle, so narrow products share out their depth.
    """
    tile_t = min(max(num_tokens & -num_tokens, 16), 64)
    block_n = _divisor(outputs, 64)
    programs = outputs // block_n
    num_splits = 1
    while programs * num_splits < _FEW_PROGRAMS and depth % (2 * num_splits * _LEAST_DEPTH) == 0:
        num_splits *= 2
    block_k = _divisor(depth // num_splits, 64 if num_sums == 2 and tile_t > 32 else 128)
    is_gated = num_sums == 2
    return GemmTiles(
        tile_t,
        block_n,
        block_k,
        num_splits,
        num_warps=8 if is_gated and tile_t <= 32 else 4,
        num_stages=3 if is_gated and tile_t <= 32 else 5 if tile_t <= 32 else 4,
        is_swapped=not is_gated,
    )


def _divisor(size: int, most: int) -> int:
    """The largest power of two that divides `size`, up to `most`."""
    return min(size & -size, most)
