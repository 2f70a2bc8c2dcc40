"""Whether a layer can be fused, and how its products are cut: measured on an H200."""

from typing import NamedTuple

from jaxprefill.kernels.decoder_layer.gemm import GemmTiles

MAX_TILED_TOKENS = 64  # above, XLA's own products win by more than fewer launches save
# But for what is wide: H200, 36 layers, 128 tokens 5.50 -> 5.34 ms (96: 5.46 -> 6.15, 192: 5.83 ->
# 6.67). The products that end at a norm lose: 5.61 at best.
WIDE_TOKENS = 128
_FEW_PROGRAMS = 90  # of an H200's 132 multiprocessors
_MANY_PROGRAMS = 198  # three for two multiprocessors: what reads weights of eight bits
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


def is_wide(sizes: LayerSizes, num_tokens: int) -> bool:
    """Whether the products that end at no norm are worth a tiling of their own."""
    return num_tokens == WIDE_TOKENS and sizes.mlp_size // 64 >= _FEW_PROGRAMS


def choose_tiles(num_tokens: int, depth: int, outputs: int, *, itemsize: int) -> GemmTiles:
    """The tiling of a product that ends at a norm; every size it takes divides what it cuts.

    Few programs leave multiprocessors idle, so narrow products share out their depth. `itemsize`:
    bytes of one of the weight's numbers. One byte: H200, the four products of a Qwen3-8B layer,
    32 tokens, with these tiles 99 us in int8 and 100 in float8; with those of bfloat16 117 and 138.
    """
    is_narrow = itemsize == 1
    tile_t, block_n = _tile_t(num_tokens), _divisor(outputs, 64)
    least = _MANY_PROGRAMS if is_narrow else _FEW_PROGRAMS
    num_splits = _num_splits(outputs // block_n, depth, least)
    tiles = GemmTiles(
        tile_t,
        block_n,
        _divisor(depth // num_splits, 128),
        num_splits,
        num_stages=5 if tile_t <= 32 else 4,
        is_swapped=True,
    )
    return tiles._replace(num_stages=6, pack=2) if is_narrow else tiles


def choose_gated_tiles(num_tokens: int, depth: int, outputs: int, *, itemsize: int) -> GemmTiles:
    """The tiling of the gate and up product.

    One dot for both is wider: H200, 36 layers, 16 tokens 4.29 -> 4.23 ms, 32 tokens 4.50 -> 4.41.
    """
    tile_t, block_k = _tile_t(num_tokens), _divisor(depth, 64)
    if num_tokens > MAX_TILED_TOKENS:
        block_n = _divisor(outputs, 64)
        return GemmTiles(tile_t, block_n, block_k, num_stages=3, is_interleaved=True)
    if itemsize == 1:
        return _narrow_pair_tiles(tile_t, depth, outputs, _divisor(outputs, 64))
    if tile_t <= 32:
        return GemmTiles(tile_t, _divisor(outputs, 32), block_k, is_interleaved=True)
    num_splits = _num_splits(outputs // _divisor(outputs, 64), depth, _FEW_PROGRAMS)
    return GemmTiles(tile_t, _divisor(outputs, 64), _divisor(depth // num_splits, 64), num_splits)


def choose_head_tiles(num_tokens: int, sizes: LayerSizes, *, itemsize: int) -> GemmTiles:
    """The tiling of the qkv product, whose programs take one head each."""
    is_wide, block_n = num_tokens > MAX_TILED_TOKENS, sizes.head_dim // 2
    tile_t, depth = _tile_t(num_tokens), sizes.hidden_size
    if itemsize == 1 and not is_wide:
        return _narrow_pair_tiles(tile_t, depth, sizes.qkv_size // 2, block_n)
    num_splits = _num_splits(sizes.qkv_size // sizes.head_dim, depth, _FEW_PROGRAMS)
    block_k = _divisor(depth // num_splits, 64 if is_wide else 128)
    tiles = GemmTiles(tile_t, block_n, block_k, num_splits)
    return tiles._replace(is_swapped=not is_wide, is_interleaved=is_wide)


def _narrow_pair_tiles(tile_t: int, depth: int, outputs: int, block_n: int) -> GemmTiles:
    """Of two products whose weights are in eight bits, as one dot.

    With 64 rows or outputs first, only that side of a dot may be in registers, where it is widened.
    """
    num_splits, is_swapped = _num_splits(outputs // block_n, depth, _MANY_PROGRAMS), tile_t > 32
    return GemmTiles(
        tile_t,
        block_n,
        _divisor(depth // num_splits, 128),
        num_splits,
        is_swapped=is_swapped,
        is_interleaved=True,
        pack=2 if is_swapped else 4,
    )


def _tile_t(num_tokens: int) -> int:
    return min(max(num_tokens & -num_tokens, 16), 64)


def _num_splits(programs: int, depth: int, least: int) -> int:
    """Shares of the depth, so that programs are `least` or more where it is large enough."""
    num_splits = 1
    while programs * num_splits < least and depth % (2 * num_splits * _LEAST_DEPTH) == 0:
        num_splits *= 2
    return num_splits


def _divisor(size: int, most: int) -> int:
    """The largest power of two that divides `size`, up to `most`."""
    return min(size & -size, most)
