"""All experts' products in two Pallas/Triton launches: NVIDIA GPUs from Ampere on.

A program takes one block of rows, which share an expert, and some of its outputs:

    gated    y = gate(x G^T, x U^T)     x gathered by token: sorted rows are never written
    down     z = y D^T                  rows as `gated` left them

Neighbouring programs share a block of rows, and the blocks of one expert follow each other, so rows
and weights come from memory once. A block that holds nothing exits before its first load: routing
changes which blocks those are, never a shape. Rows of a block that no token has repeat a token that
exists; nobody reads what comes of them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int32

from jaxprefill.kernels.experts.blocks import ExpertBlocks
from jaxprefill.kernels.triton import MIN_DOT, Ref, dot, power_of_two

_MAX_ROWS = 128
_FEW_ROWS = 32  # up to so many rows a block the weights' bytes set the time
NARROW_TOKENS = 512  # from so many tokens results are written in the weights' dtype

# What comes of gate and up, element by element, in float32.
Gate = Callable[[Float32[Array, "a b"], Float32[Array, "a b"]], Float32[Array, "a b"]]


class ExpertWeights(NamedTuple):
    """One layer's experts, as one of two kinds of checkpoints stacks them; X experts, M mlp size.

    outputs first   gate_up [2X, M, E]: gate of expert 0, up of expert 0, ..; down [X, E, M]
    inputs first    gate_up [X, E, 2M]: columns gate 0, up 0, gate 1, ..; down [X, M, E]

    Only the second kind has biases, [X, 2M] and [X, E].
    """

    gate_up: Float[Array, "_ _ _"]
    down: Float[Array, "X _ _"]
    gate_up_bias: Float[Array, "X twice"] | None = None
    down_bias: Float[Array, "X E"] | None = None

    @property
    def is_inputs_first(self) -> bool:
        """Which of the two."""
        return len(self.gate_up) == len(self.down)


class ExpertTiles(NamedTuple):
    """How a product is cut; powers of two.

    Attributes:
        block_n: outputs a program takes, of gate and of up each.
        block_k: depth a step.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4


class _Product(NamedTuple):
    """What one kernel is specialised on."""

    tiles: ExpertTiles
    rows: int  # of a block
    depth: int
    outputs: int  # of gate and of up each
    is_inputs_first: bool
    gate: Gate | None  # None: one product, no gate
    bias_share: float = 1.0

    @property
    def width(self) -> int:
        """Columns of the product of one program: those of gate and up alternate."""
        return self.tiles.block_n * (1 if self.gate is None else 2)


class _Operands(NamedTuple):
    """Arrays, and references to them in the kernel; None: not part of this product."""

    x: Any  # [rows, depth]
    weight: Any  # [X * outputs, depth], gate and up of an expert on end; or [X * depth, outputs]
    experts: Any  # [N]
    num_blocks: Any  # [1]
    tokens: Any = None  # [N, B]: rows of x; None: block after block
    bias: Any = None  # [X, outputs]


@dataclass(frozen=True)
class GroupedExperts:
    """The experts of one layer in the kernel.

    Attributes:
        bias_share: multiplies the biases of `down`: where devices add up their parts, each adds
            its share.
        interpret: runs it on any device, slowly.
        tiles: in the place of `choose_tiles`, which is measured.
    """

    weights: ExpertWeights
    gate: Gate
    bias_share: float = 1.0
    interpret: bool = False
    tiles: Callable[..., ExpertTiles] | None = None

    def block_rows(self, num_choices: int, num_experts: int) -> int:
        """Rows of a block: about what an expert gets, but whole sides of a product."""
        mean = -(-num_choices // num_experts)
        most = _MAX_ROWS if mean > 2 * _MAX_ROWS else _MAX_ROWS // 2
        return min(max(power_of_two(mean), MIN_DOT), most)

    def __call__(self, x: Float[Array, "T E"], blocks: ExpertBlocks) -> Float[Array, "N B E"]:
        """What the experts make of their rows; blocks have `block_rows` rows."""
        weights, rows = self.weights, blocks.tokens.shape[1]
        inputs_first, dtype = weights.is_inputs_first, weights.gate_up.dtype
        mlp_size = weights.down.shape[1 if inputs_first else 2]
        shared = (blocks.experts, blocks.num_blocks.reshape(1))
        gated = _launch(
            self._product(rows, x.shape[1], mlp_size, self.gate),
            _Operands(
                x.astype(dtype), weights.gate_up, *shared, blocks.tokens, weights.gate_up_bias
            ),
            dtype,
            interpret=self.interpret,
        )
        made = _launch(
            self._product(rows, mlp_size, x.shape[1], None)._replace(bias_share=self.bias_share),
            _Operands(gated, weights.down, *shared, bias=weights.down_bias),
            jnp.dtype(jnp.float32) if len(x) < NARROW_TOKENS else dtype,
            interpret=self.interpret,
        )
        return made.reshape(-1, rows, x.shape[1])

    def _product(self, rows: int, depth: int, outputs: int, gate: Gate | None) -> _Product:
        choose, size = self.tiles or choose_tiles, self.weights.gate_up.dtype.itemsize
        tiles = choose(rows, depth, outputs, is_gated=gate is not None, itemsize=size)
        return _Product(tiles, rows, depth, outputs, self.weights.is_inputs_first, gate)


def lacks_grouped_experts(width: int, mlp_size: int, dtype: str, activation: str) -> str | None:
    """The first need of the kernel that is not met, in words, or None."""
    if dtype not in ("bfloat16", "float32"):
        return f"takes bfloat16 and float32, not {dtype}"
    if width % MIN_DOT or mlp_size % MIN_DOT:
        return f"takes sizes that are multiples of {MIN_DOT}, not {width} and {mlp_size}"
    if activation == "gelu":
        return "has no error function for gelu"
    return None


def choose_tiles(
    rows: int, depth: int, outputs: int, *, is_gated: bool, itemsize: int
) -> ExpertTiles:
    """The tiling of one product; every size it takes divides what it cuts.

    H200, 128 experts of 2048 x 768, 8 a token, bfloat16, both products: 32 tokens 0.30 -> 0.29 ms
    with the wide and deep blocks, 8192 tokens 1.66 -> 1.47 ms with the wide ones.
    """
    is_few, is_many = rows <= _FEW_ROWS, rows == _MAX_ROWS
    block_n = (128 if is_many else 64) * (1 if is_gated else 2)
    block_k = (128 if is_few else 64) * 2 // itemsize
    is_measured = is_few or is_many
    return ExpertTiles(
        _divisor(outputs, block_n),
        _divisor(depth, block_k),
        num_warps=8 if is_measured else 4,
        num_stages=3 if is_measured else 4,
    )


def _launch(
    product: _Product, operands: _Operands, dtype: Any, *, interpret: bool
) -> Float[Array, "rows outputs"]:
    num_blocks = len(operands.experts)
    weight = operands.weight.reshape(-1, operands.weight.shape[-1])
    call = pl.pallas_call(
        functools.partial(_kernel, product=product),  # fresh: jax #40847
        grid=(product.outputs // product.tiles.block_n, num_blocks),
        out_shape=jax.ShapeDtypeStruct((num_blocks * product.rows, product.outputs), dtype),
        compiler_params=plt.CompilerParams(
            num_warps=product.tiles.num_warps, num_stages=product.tiles.num_stages
        ),
        interpret=interpret,
        name="experts_down" if product.gate is None else "experts_gated",
    )
    return call(operands._replace(weight=weight))


def _kernel(operands: Any, out: Ref, *, product: _Product) -> None:
    column, block = pl.program_id(0), pl.program_id(1)

    @pl.when(block < operands.num_blocks[0])
    def _() -> None:
        expert = operands.experts[block]
        total = _multiply(operands, expert, block, column, product)
        if operands.bias is not None:
            at = pl.ds(column * product.width, product.width)
            total += operands.bias[expert, at].astype(jnp.float32)[None] * product.bias_share
        if product.gate is not None:
            total = product.gate(*_apart(total))
        rows = pl.ds(block * product.rows, product.rows)
        columns = pl.ds(column * product.tiles.block_n, product.tiles.block_n)
        out[rows, columns] = total.astype(out.dtype)


def _multiply(
    operands: Any,
    expert: Int32[Array, ""],
    block: Int32[Array, ""],
    column: Int32[Array, ""],
    product: _Product,
) -> Float32[Array, "rows width"]:
    """The block's rows times this program's columns of the expert."""
    rows: Any = pl.ds(block * product.rows, product.rows)
    if operands.tokens is not None:
        rows = jnp.minimum(operands.tokens[block, :], operands.x.shape[0] - 1)
    block_k, width = product.tiles.block_k, product.width
    outputs = _outputs(expert, column, product)

    def step(index: Int32[Array, ""], total: Float32[Array, "a b"]) -> Float32[Array, "a b"]:
        x = operands.x[rows, pl.ds(index * block_k, block_k)]
        if product.is_inputs_first:
            depth = pl.ds(expert * product.depth + index * block_k, block_k)
            weight = operands.weight[depth, outputs]
        else:
            weight = operands.weight[outputs, pl.ds(index * block_k, block_k)]
        return total + dot(x, weight, trans_b=not product.is_inputs_first)

    zeros = jnp.zeros((product.rows, width), jnp.float32)
    return lax.fori_loop(0, product.depth // block_k, step, zeros)


def _outputs(expert: Int32[Array, ""], column: Int32[Array, ""], product: _Product) -> Any:
    """Where a program's outputs lie along the weight's axis of outputs."""
    first, width = column * product.tiles.block_n, product.width
    if product.is_inputs_first:
        return pl.ds(column * width, width)
    if product.gate is None:
        return pl.ds(expert * product.outputs + first, width)
    at = lax.iota(jnp.int32, width)
    return 2 * expert * product.outputs + first + at % 2 * product.outputs + at // 2


def _apart(total: Float32[Array, "a both"]) -> tuple[Float32[Array, "a b"], Float32[Array, "a b"]]:
    """Even and odd columns."""
    pairs = total.reshape(total.shape[0], -1, 2)
    which = lax.broadcasted_iota(jnp.int32, pairs.shape, 2)
    even, odd = (jnp.where(which == index, pairs, 0.0).sum(2) for index in range(2))
    return even, odd


def _divisor(size: int, most: int) -> int:
    """The largest power of two that divides `size`, up to `most`."""
    return min(size & -size, most)
