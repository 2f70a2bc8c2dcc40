"""The four products of a Qwen3-8B layer over few rows; a case is matrix, weight's type and rows.

*xla* is what a layer does without the kernels: XLA's products, and rotation in a launch of its own.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_runs import (
    Family,
    Overrides,
    Work,
    check_all_used,
    compare,
    cut,
    draw,
    nothing,
    num_sets,
    tiles_text,
)
from benchmarks.rig import MODELS
from jaxprefill.kernels.attention.rotation import norm_and_rotate, plain_norm_and_rotate
from jaxprefill.kernels.decoder_layer import LayerSizes, LayerStream, LayerWeights, gemm, xla
from jaxprefill.kernels.decoder_layer.gemm import GemmTiles
from jaxprefill.kernels.decoder_layer.pallas_triton import layer_tiles, padded_rows
from jaxprefill.models.fused import layer_sizes

_MATRICES, _KINDS = ("gate_up", "down", "qkv", "output"), ("int8", "float8_e4m3fn", "bfloat16")
_EPS, _AS_BFLOAT16 = 1e-6, "as_bfloat16"
_TINY = LayerSizes(64, 128, 64, 64, 32)  # one KV head of four, two of queries


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """`x` is what the weight is multiplied with: `stream` is for what comes before and after."""

    matrix: str
    sizes: LayerSizes
    kv_heads: int
    num_rows: int
    stream: LayerStream
    x: jax.Array
    norms: jax.Array  # [2, E]
    qk_norms: jax.Array
    rotary: jax.Array
    own: list[tuple[jax.Array, jax.Array | None]]  # weights and scales
    expected: jax.Array

    @property
    def ends_at_norm(self) -> bool:
        return self.matrix in ("output", "down")

    @property
    def itemsize(self) -> int:
        return self.own[0][0].dtype.itemsize


def _prepare(text: str, is_tiny: bool) -> _Inputs:
    matrix, kind, rows = text.split("/")
    num_rows = int(rows)
    model = MODELS["qwen3-8b"]
    sizes = _TINY if is_tiny else layer_sizes(model)
    kv_heads = (sizes.qkv_size - sizes.attended_size) // (2 * sizes.head_dim)
    outputs, depth = _shape(matrix, sizes)
    itemsize = jnp.dtype(kind).itemsize
    padded = padded_rows(num_rows, layer_tiles(sizes, num_rows, itemsize=itemsize))
    count = 2 if is_tiny else min(num_sets(outputs * depth * itemsize), model.num_layers)
    own = [_weight(kind, outputs, depth, at) for at in range(count)]
    hidden = draw(1, padded, sizes.hidden_size, dtype=jnp.float32)
    squares = jnp.square(hidden).sum(1, keepdims=True)
    counters = jnp.zeros(_most_counters(sizes), jnp.int32)
    x = draw(3, padded, depth)
    angle = draw(2, padded, sizes.head_dim // 2, dtype=jnp.float32)
    inputs = _Inputs(
        matrix=matrix, sizes=sizes, kv_heads=kv_heads, num_rows=num_rows,
        stream=LayerStream(hidden, hidden.astype(jnp.bfloat16), squares, counters), x=x,
        norms=draw(4, 2, sizes.hidden_size), qk_norms=draw(5, 2, sizes.head_dim),
        rotary=jnp.stack([jnp.cos(angle), jnp.sin(angle)]), own=own, expected=x,
    )  # fmt: skip
    return replace(inputs, expected=jax.jit(lambda: _reference(inputs))())


def _shape(matrix: str, sizes: LayerSizes) -> tuple[int, int]:
    """(outputs, inputs)."""
    return {
        "qkv": (sizes.qkv_size, sizes.hidden_size),
        "output": (sizes.hidden_size, sizes.attended_size),
        "gate_up": (2 * sizes.mlp_size, sizes.hidden_size),
        "down": (sizes.hidden_size, sizes.mlp_size),
    }[matrix]


def _weight(kind: str, outputs: int, depth: int, seed: int) -> tuple[jax.Array, jax.Array | None]:
    if kind == "bfloat16":
        return draw(seed, outputs, depth, scale=depth**-0.5), None
    spread = 32.0  # of the numbers of either type
    scales = jnp.linspace(0.5, 2.0, outputs, dtype=jnp.float32) * depth**-0.5 / spread
    return draw(seed, outputs, depth, dtype=jnp.dtype(kind), scale=spread), scales


def _most_counters(sizes: LayerSizes) -> int:
    """Enough for any tiling of 64 rows."""
    return 4 * max(2 * sizes.mlp_size, sizes.qkv_size, sizes.hidden_size) // 16


def _reference(inputs: _Inputs) -> jax.Array:
    """Plain JAX in float32 with the first weight."""
    weight, scales = inputs.own[0]
    x, wide = inputs.x.astype(jnp.float32), weight.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        out = _in_plain_jax(inputs, x, (wide, scales), plain_norm_and_rotate)
    return out[: inputs.num_rows]


def _in_plain_jax(inputs: _Inputs, x: Any, own: Any, rotate: Any) -> jax.Array:
    stream, (weight, scales) = inputs.stream, own
    if inputs.ends_at_norm:
        return xla.project_residual(
            x, weight, stream, inputs.norms, jnp.int32(0), norm_row=1, scales=scales
        ).hidden
    stream = stream._replace(scaled=x)
    if inputs.matrix == "gate_up":
        return xla.project_gated(stream, weight, norm_eps=_EPS, scales=scales)
    out = xla.project(stream, weight, None, norm_eps=_EPS, scales=scales)
    heads = out.reshape(len(out), -1, inputs.sizes.head_dim)
    turned = rotate(heads, inputs.rotary, inputs.qk_norms, kv_heads=inputs.kv_heads, norm_eps=_EPS)
    return turned.reshape(out.shape)


def _in_kernel(
    inputs: _Inputs, stream: LayerStream, x: Any, layer: Any, own: Any, **how: Any
) -> tuple[jax.Array, jax.Array]:
    """(the result, arrivals)."""
    weight, scales = own
    if inputs.ends_at_norm:
        after = gemm.project_residual(
            x, weight, stream, inputs.norms, layer, norm_row=1, scales=scales, **how
        )
        return after.hidden, after.arrivals
    stream = stream._replace(scaled=x)
    if inputs.matrix == "gate_up":
        return gemm.project_gated(stream, weight, layer, norm_eps=_EPS, scales=scales, **how)
    weights = LayerWeights(
        weight, weight, weight, weight, qk_norms=inputs.qk_norms, qkv_scale=scales
    )
    return gemm.project_rotated(
        stream, weights, inputs.rotary, layer, kv_heads=inputs.kv_heads, norm_eps=_EPS, **how
    )


def _tiles(inputs: _Inputs, overrides: Overrides) -> GemmTiles:
    itemsize = 2 if overrides.get(_AS_BFLOAT16) else inputs.itemsize
    chosen = layer_tiles(inputs.sizes, inputs.num_rows, itemsize=itemsize)
    default = getattr(chosen, inputs.matrix)
    wanted = {name: value for name, value in overrides.items() if name != _AS_BFLOAT16}
    tiles, rest = cut(default, wanted)
    check_all_used(rest, default)
    outputs, depth = _shape(inputs.matrix, inputs.sizes)
    each = outputs // (1 if inputs.ends_at_norm else 2)
    split = tiles.block_k * tiles.num_splits
    if len(inputs.x) % tiles.tile_t or each % tiles.block_n or depth % split:
        raise ValueError(
            f"tiles must divide {len(inputs.x)} rows, {each} outputs and a depth of {depth}, "
            f"got {tiles_text(tiles)}"
        )
    return tiles


def _make(inputs: _Inputs, name: str, overrides: Overrides, interpret: bool) -> Work:
    is_plain = name == "xla"
    tiles = None if is_plain else _tiles(inputs, overrides)
    rotate = partial(norm_and_rotate, interpret=interpret)

    def in_plain_jax(carry: Any, _: Any, own: Any) -> Any:
        out = _in_plain_jax(inputs, carry[1], own, rotate)
        return out, carry[1].at[0, 0].add(nothing(out).astype(carry[1].dtype))

    def in_kernel(carry: Any, shared: Any, own: Any) -> Any:
        (before, arrivals), (stream, x) = carry, shared
        return _in_kernel(
            inputs, stream._replace(arrivals=arrivals), x, nothing(before), own, tiles=tiles,
            interpret=interpret,
        )  # fmt: skip

    rows, (outputs, depth) = len(inputs.x), _shape(inputs.matrix, inputs.sizes)
    dtype = jnp.float32 if inputs.ends_at_norm else jnp.bfloat16
    out = jnp.zeros((rows, outputs // (2 if inputs.matrix == "gate_up" else 1)), dtype)
    return Work(
        call=in_plain_jax if is_plain else in_kernel,
        carry=(out, inputs.x if is_plain else inputs.stream.arrivals),
        shared=(inputs.stream, inputs.x),
        own=inputs.own,
        sample=lambda carry: carry[0][: inputs.num_rows],
        errors=compare(inputs.expected),
        flops=2.0 * rows * outputs * depth,
        num_bytes=float(outputs * depth * inputs.itemsize + inputs.x.nbytes + out.nbytes),
        tiles="" if tiles is None else tiles_text(tiles),
    )


FAMILY = Family(
    cases=tuple(
        f"{matrix}/{kind}/{rows}"
        for rows in (32, 16, 64, 30, 1)
        for kind in _KINDS
        for matrix in _MATRICES
    ),
    tiny=("qkv/int8/16", "gate_up/bfloat16/16", "down/float8_e4m3fn/3"),
    backends=("pallas_triton", "xla"),
    tiles=(
        f"{_AS_BFLOAT16}=1", "pack=1", "pack=2", "pack=4", "num_splits=1", "num_splits=2",
        "num_splits=4", "block_k=64", "block_k=256", "num_stages=3", "num_stages=5",
        "num_stages=6", "num_warps=8", "is_swapped=0", "is_swapped=1", "is_interleaved=0",
        "is_interleaved=1", "tile_t=16", "block_n=32", "block_n=128",
    ),
    prepare=_prepare,
    make=_make,
)  # fmt: skip
