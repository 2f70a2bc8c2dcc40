"""Products of few rows with a large weight, each with what follows it, in one Pallas/Triton kernel.

A program takes `tile_t` rows and `block_n` outputs of one or two products, the whole depth or one
split of it:

    rotated     y = x W^T with the norm's scale [+ bias]; of its heads, queries and keys are
                RMS-normed, if there are norms, and rotated; a program takes one head
    gated       y = silu(x G^T) * (x U^T), both with the norm's scale; W stacks G and U
    residual    hidden + x W^T; the same times the next norm's weight; sums of its squares

Splits leave their sums in a workspace; the last to arrive adds them in order, whoever it is, and
sets the count back to zero: the result does not depend on the order of arrival.
Arrays hold whole tiles of rows. Weights are one layer's, or those of all layers, stacked: then the
kernel picks the layer.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jaxprefill.kernels.attention.pallas_triton import count_arrival
from jaxprefill.kernels.decoder_layer.api import LayerStream, LayerWeights
from jaxprefill.kernels.triton import Ref, dot, power_of_two, widen

Sums = tuple[Float32[Array, "a b"], ...]  # one, or gate and up


class GemmTiles(NamedTuple):
    """How a product is cut.

    Attributes:
        tile_t: rows a program; a power of two from 16.
        block_n, block_k: outputs a program takes of each product, and depth a step; powers of
            two from 16 that divide the sizes of the weight, `block_k` that of a split.
        is_swapped: whether outputs, rather than rows, are the first side of the dot.
        is_interleaved: whether two products are one dot, whose outputs alternate.
        pack: weights of eight bits that are widened at once: 1 leaves it to Triton; 2 suits a
            dot whose first side is 64 or more and 4 warps, 4 every other.
    """

    tile_t: int
    block_n: int
    block_k: int
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    is_swapped: bool = False
    is_interleaved: bool = False
    pack: int = 1


class _Gemm(NamedTuple):
    """What one kernel is specialised on."""

    kind: Literal["rotated", "gated", "residual"]
    tiles: GemmTiles
    num_rows: int
    depth: int
    outputs: int  # of each of the products
    norm_eps: float = 0.0
    norm_row: int = 0  # of the next norm, from the layer's first
    num_queries: int = 0  # heads
    num_rotated: int = 0  # heads: queries, then keys

    @property
    def grid(self) -> tuple[int, int, int]:
        """Neighbours share a block of the weight."""
        tiles = self.tiles
        return self.num_rows // tiles.tile_t, self.outputs // tiles.block_n, tiles.num_splits

    @property
    def num_sums(self) -> int:
        """Products a program keeps: gate and up, or a head's two halves."""
        return 1 if self.kind == "residual" or self.tiles.is_interleaved else 2

    @property
    def sum_shape(self) -> tuple[int, int]:
        """Of one product."""
        tile_t, block_n = self.tiles.tile_t, self.tiles.block_n * (1 + self.tiles.is_interleaved)
        return (block_n, tile_t) if self.tiles.is_swapped else (tile_t, block_n)


class _Operands(NamedTuple):
    """Arrays, and references to them in the kernel; None: not part of this product.

    Weights, scales, bias and qk_norms may have an axis of layers before those written here.
    """

    x: Any  # [T, depth]
    weight: Any  # [outputs or 2 * outputs, depth]
    scales: Any = None  # of the weight's rows, where it is in eight bits
    squares: Any = None  # [T, parts]
    bias: Any = None  # [2 * outputs]
    rotary: Any = None  # [2, T, D / 2]: cosine and sine
    qk_norms: Any = None  # [2, D]
    hidden: Any = None  # [T, outputs]
    norms: Any = None  # [rows, outputs]
    layer: Any = None  # [1]
    arrivals: Any = None  # [tiles]


def project_rotated(
    stream: LayerStream,
    weights: LayerWeights,
    rotary: Float[Array, "2 T half"],
    layer: Int32[Array, ""],
    *,
    kv_heads: int,
    tiles: GemmTiles,
    norm_eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "T qkv"], Int32[Array, " tiles"]]:
    """(queries, keys and values as attention takes them, arrivals); a block is half a head."""
    outputs = weights.qkv.shape[-2]
    num_heads = outputs // (2 * tiles.block_n)
    gemm = _Gemm(
        "rotated",
        tiles,
        *_sizes(stream.scaled),
        outputs // 2,
        norm_eps,
        num_queries=num_heads - 2 * kv_heads,
        num_rotated=num_heads - kv_heads,
    )
    operands = _Operands(
        stream.scaled,
        weights.qkv,
        weights.qkv_scale,
        squares=stream.squares,
        bias=weights.qkv_bias,
        rotary=rotary,
        qk_norms=weights.qk_norms,
        layer=layer.reshape(1),
    )
    (out,), arrivals = _launch(gemm, operands, stream.arrivals, interpret=interpret)
    return out, arrivals


def project_gated(
    stream: LayerStream,
    weight: Shaped[Array, "*layers twice E"],
    layer: Int32[Array, ""],
    *,
    tiles: GemmTiles,
    norm_eps: float,
    scales: Float32[Array, "*layers twice"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T half"], Int32[Array, " tiles"]]:
    """(silu(gate) * up of the normed rows, arrivals)."""
    gemm = _Gemm("gated", tiles, *_sizes(stream.scaled), weight.shape[-2] // 2, norm_eps)
    operands = _Operands(
        stream.scaled, weight, scales, squares=stream.squares, layer=layer.reshape(1)
    )
    (out,), arrivals = _launch(gemm, operands, stream.arrivals, interpret=interpret)
    return out, arrivals


def project_residual(
    x: Float[Array, "T depth"],
    weight: Shaped[Array, "*layers E depth"],
    stream: LayerStream,
    norms: Float[Array, "rows E"],
    layer: Int32[Array, ""],
    *,
    norm_row: int,
    tiles: GemmTiles,
    scales: Float32[Array, "*layers E"] | None = None,
    interpret: bool = False,
) -> LayerStream:
    """The stream with the product added; row 2 * layer + `norm_row` of `norms` comes next."""
    gemm = _Gemm("residual", tiles, *_sizes(x), weight.shape[-2], norm_row=norm_row)
    operands = _Operands(
        x, weight, scales, hidden=stream.hidden, norms=norms, layer=layer.reshape(1)
    )
    results, arrivals = _launch(gemm, operands, stream.arrivals, interpret=interpret)
    hidden, scaled, squares = results
    return LayerStream(hidden, scaled, squares, arrivals)


def _sizes(x: Float[Array, "T depth"]) -> tuple[int, int]:
    num_rows, depth = x.shape
    return num_rows, depth


def num_arrivals(num_rows: int, outputs: int, tiles: GemmTiles) -> int:
    """Counters that a split product needs."""
    return num_rows // tiles.tile_t * (outputs // tiles.block_n)


def num_parts(outputs: int, tiles: GemmTiles) -> int:
    """Columns of the sums of squares that a residual product leaves; spare ones are zero."""
    return power_of_two(outputs // tiles.block_n)


def _launch(
    gemm: _Gemm, operands: _Operands, arrivals: Array, *, interpret: bool
) -> tuple[tuple[Array, ...], Array]:
    """(results, arrivals)."""
    is_split = gemm.tiles.num_splits > 1
    shapes = _result_shapes(gemm, operands.x.dtype)
    num_results, aliases = len(shapes), {}
    if is_split:
        operands = operands._replace(arrivals=arrivals)
        aliases = {len(jax.tree.leaves(operands)) - 1: num_results}
        workspace = (gemm.tiles.num_splits, gemm.num_sums, *gemm.grid[:2], *gemm.sum_shape)
        shapes.append(jax.ShapeDtypeStruct(arrivals.shape, arrivals.dtype))
        shapes.append(jax.ShapeDtypeStruct(workspace, jnp.float32))
    call = pl.pallas_call(
        functools.partial(_kernel, gemm=gemm, interpret=interpret),  # fresh: jax #40847
        grid=gemm.grid,
        out_shape=shapes,
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(
            num_warps=gemm.tiles.num_warps, num_stages=gemm.tiles.num_stages
        ),
        interpret=interpret,
        name=f"{gemm.kind}_product",
    )
    results = call(operands)
    return tuple(results[:num_results]), results[num_results] if is_split else arrivals


def _result_shapes(gemm: _Gemm, dtype: Any) -> list[jax.ShapeDtypeStruct]:
    out = (gemm.num_rows, gemm.outputs)
    if gemm.kind == "rotated":
        return [jax.ShapeDtypeStruct((gemm.num_rows, 2 * gemm.outputs), dtype)]
    if gemm.kind == "gated":
        return [jax.ShapeDtypeStruct(out, dtype)]
    squares = (gemm.num_rows, num_parts(gemm.outputs, gemm.tiles))
    sizes = ((out, jnp.float32), (out, dtype), (squares, jnp.float32))
    return [jax.ShapeDtypeStruct(shape, kind) for shape, kind in sizes]


def _kernel(operands: Any, *results: Ref, gemm: _Gemm, interpret: bool) -> None:
    tile, block, split = (pl.program_id(axis) for axis in range(3))
    rows = pl.ds(tile * gemm.tiles.tile_t, gemm.tiles.tile_t)
    sums = _products(operands, rows, block, split, gemm, interpret=interpret)
    if gemm.tiles.num_splits == 1:
        _finish(operands, results, sums, rows, block, gemm)
        return
    *outputs, arrivals, parts = results
    for index, part in enumerate(sums):
        parts[split, index, tile, block, :, :] = part
    # The last of a tile's programs finds the others' parts written: its count came after them.
    count = tile * gemm.grid[1] + block
    arrived = count_arrival(arrivals, count, interpret=interpret)

    @pl.when(arrived == gemm.tiles.num_splits - 1)
    def _() -> None:
        arrivals[count] = 0
        whole = tuple(
            functools.reduce(
                jnp.add,
                [parts[other, index, tile, block, :, :] for other in range(gemm.tiles.num_splits)],
            )
            for index in range(gemm.num_sums)
        )
        _finish(operands, outputs, whole, rows, block, gemm)


def _products(
    operands: Any,
    rows: Any,
    block: Int32[Array, ""],
    split: Int32[Array, ""],
    gemm: _Gemm,
    *,
    interpret: bool,
) -> Sums:
    tiles = gemm.tiles
    depth = gemm.depth // tiles.num_splits
    columns = _columns(block, gemm)

    def step(index: Int32[Array, ""], sums: Sums) -> Sums:
        at = pl.ds(split * depth + index * tiles.block_k, tiles.block_k)
        x = operands.x[rows, at]
        weights = [_own(operands.weight, operands, column, at, rank=2) for column in columns]
        if weights[0].dtype != x.dtype:
            pack = 1 if interpret or x.dtype != jnp.bfloat16 else tiles.pack
            weights = [widen(one, pack) if pack > 1 else one.astype(x.dtype) for one in weights]
        pairs = [(weight, x) if tiles.is_swapped else (x, weight) for weight in weights]
        return tuple(
            total + dot(left, right, trans_b=True)
            for total, (left, right) in zip(sums, pairs, strict=True)
        )

    zeros = tuple(jnp.zeros(gemm.sum_shape, jnp.float32) for _ in columns)
    return lax.fori_loop(0, depth // tiles.block_k, step, zeros)


def _own(ref: Ref, operands: Any, *at: Any, rank: int) -> Array:
    """A part of this layer's array, where those of all layers may be stacked."""
    return ref[at] if len(ref.shape) == rank else ref[(operands.layer[0], *at)]


def _columns(block: Int32[Array, ""], gemm: _Gemm) -> list[Any]:
    """Rows of the weight that each dot of a program takes."""
    block_n = gemm.tiles.block_n
    first, apart = _first_and_apart(block, gemm)
    if gemm.tiles.is_interleaved:
        at = lax.iota(jnp.int32, 2 * block_n)
        return [first + at % 2 * apart + at // 2]
    return [pl.ds(first + index * apart, block_n) for index in range(gemm.num_sums)]


def _first_and_apart(block: Int32[Array, ""], gemm: _Gemm) -> tuple[Int32[Array, ""], int]:
    """The first row of a program's first product, and how far from it the second begins."""
    block_n = gemm.tiles.block_n
    if gemm.kind == "rotated":  # the halves of one head
        return 2 * block * block_n, block_n
    return block * block_n, gemm.outputs


def _finish(
    operands: Any, results: Any, sums: Sums, rows: Any, block: Int32[Array, ""], gemm: _Gemm
) -> None:
    """What follows the product, and the stores."""
    columns = pl.ds(block * gemm.tiles.block_n, gemm.tiles.block_n)
    if gemm.tiles.is_swapped:
        sums = tuple(total.T for total in sums)
    if operands.squares is not None:
        mean = operands.squares[rows, :].sum(1) / gemm.depth
        scale = lax.rsqrt(mean + gemm.norm_eps)[:, None]
        sums = tuple(total * scale for total in sums)
    if gemm.tiles.is_interleaved:
        sums = _apart(sums[0])
    if operands.scales is not None:
        first, apart = _first_and_apart(block, gemm)
        own = [pl.ds(first + at * apart, gemm.tiles.block_n) for at in range(len(sums))]
        scales = [_own(operands.scales, operands, at, rank=1)[None] for at in own]
        sums = tuple(total * scale for total, scale in zip(sums, scales, strict=True))
    match gemm.kind:
        case "rotated":
            halves = _halves(block, gemm)
            for half, total in zip(halves, _rotate(operands, sums, rows, block, gemm), strict=True):
                results[0][rows, half] = total.astype(results[0].dtype)
        case "gated":
            gate, up = sums
            gated = gate / (1 + jnp.exp(-gate)) * up
            results[0][rows, columns] = gated.astype(results[0].dtype)
        case "residual":
            _add_to_stream(operands, results, sums[0], rows, block, gemm)


def _apart(total: Float32[Array, "a both"]) -> Sums:
    """Even and odd columns."""
    pairs = total.reshape(total.shape[0], -1, 2)
    which = lax.broadcasted_iota(jnp.int32, pairs.shape, 2)
    return tuple(jnp.where(which == index, pairs, 0.0).sum(2) for index in range(2))


def _halves(head: Int32[Array, ""], gemm: _Gemm) -> list[Any]:
    """Columns of the result."""
    first, apart = _first_and_apart(head, gemm)
    return [pl.ds(first + index * apart, gemm.tiles.block_n) for index in range(2)]


def _rotate(operands: Any, sums: Sums, rows: Any, head: Int32[Array, ""], gemm: _Gemm) -> Sums:
    """A head's halves as attention takes them: dimension i turns with i + D / 2."""
    block_n, halves = gemm.tiles.block_n, _halves(head, gemm)
    if operands.bias is not None:
        bias = [_own(operands.bias, operands, half, rank=1) for half in halves]
        sums = tuple(
            total + one.astype(jnp.float32)[None] for total, one in zip(sums, bias, strict=True)
        )
    low, high = sums
    if operands.qk_norms is not None:
        mean = ((low * low).sum(1) + (high * high).sum(1)) / (2 * block_n)
        scale = lax.rsqrt(mean + gemm.norm_eps)[:, None]
        is_key = (head >= gemm.num_queries).astype(jnp.int32)
        own = [
            _own(operands.qk_norms, operands, is_key, pl.ds(at, block_n), rank=2)
            for at in (0, block_n)
        ]
        low, high = (
            x * scale * weight.astype(jnp.float32)[None]
            for x, weight in zip((low, high), own, strict=True)
        )
    cos, sin = operands.rotary[0, rows, :], operands.rotary[1, rows, :]
    turned = (low * cos - high * sin, high * cos + low * sin)
    is_value = jnp.broadcast_to(head >= gemm.num_rotated, low.shape)
    return tuple(jnp.where(is_value, *pair) for pair in zip(sums, turned, strict=True))


def _add_to_stream(
    operands: Any,
    results: Any,
    product: Float32[Array, "a b"],
    rows: Any,
    block: Int32[Array, ""],
    gemm: _Gemm,
) -> None:
    """The residual, the next norm's weight, and the sums of squares."""
    columns = pl.ds(block * gemm.tiles.block_n, gemm.tiles.block_n)
    hidden, scaled, squares = results
    total = operands.hidden[rows, columns] + product
    norm = operands.norms[2 * operands.layer[0] + gemm.norm_row, columns].astype(jnp.float32)
    hidden[rows, columns] = total
    scaled[rows, columns] = (total * norm[None]).astype(scaled.dtype)
    squares[rows, block] = (total * total).sum(1)
    num_blocks = gemm.grid[1]

    @pl.when(block + num_blocks < squares.shape[1])
    def _() -> None:
        squares[rows, block + num_blocks] = jnp.zeros_like(total[:, 0])
