"""Experts of one layer; a case is a model's sizes and tokens.

"model/tokens" is the two products over blocks that are planned already, "model/tokens/layer" what a
layer does with them: planning, products and the sum, in kernels or in plain JAX.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernel_runs import (
    CACHE_BYTES,
    Family,
    Overrides,
    Work,
    check_all_used,
    compare,
    cut,
    draw,
    nothing,
    spread,
    tiles_text,
)
from jaxprefill.errors import KernelUnsupported
from jaxprefill.kernels.experts import (
    ExpertTiles,
    ExpertWeights,
    GroupedExperts,
    choose_tiles,
    combine,
    plan_blocks,
)
from jaxprefill.models.layers import gated, linear
from jaxprefill.models.moe import Routing, expert_weight, run_experts

_SAMPLED, _ROWS = 4, "rows"


class _Sizes(NamedTuple):
    experts: int
    chosen: int
    width: int
    mlp: int


_MODELS = {
    "v4-flash": _Sizes(256, 6, 4096, 2048),
    "qwen3-30b-a3b": _Sizes(128, 8, 2048, 768),
    "tiny": _Sizes(5, 2, 32, 48),
}


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    sizes: _Sizes
    is_layer: bool
    x: jax.Array
    weights: ExpertWeights
    own: list[Routing]
    rows: np.ndarray
    expected: jax.Array


def _prepare(text: str, is_tiny: bool) -> _Inputs:
    model, tokens, *more = text.split("/")
    sizes, tokens = _MODELS[model], int(tokens)
    count, chosen, width, mlp = sizes
    # An expert's numbers times a factor of its own: all random, they take too long to draw.
    factors = draw(1, count, dtype=jnp.float32)[:, None, None]
    stack = jax.jit(lambda one: (one[None] * factors).astype(jnp.bfloat16))
    gate_up = stack(draw(2, 2 * mlp, width, scale=width**-0.5)).reshape(2 * count, mlp, width)
    weights = ExpertWeights(gate_up, stack(draw(3, width, mlp, scale=mlp**-0.5)))
    x = draw(4, tokens, width)
    each = 6.0 * min(count, tokens * chosen) * width * mlp
    sets = 2 if is_tiny else int(min(max(-(-CACHE_BYTES // each), 2), 8))
    own = [_route(sizes, tokens, at) for at in range(sets)]
    rows = spread(tokens, _SAMPLED)
    expected = jax.jit(_reference)(x, weights, own[0], rows)
    return _Inputs(
        sizes=sizes, is_layer=bool(more), x=x, weights=weights, own=own, rows=rows,
        expected=expected,
    )  # fmt: skip


def _route(sizes: _Sizes, tokens: int, seed: int) -> Routing:
    """Every token's experts differ, and none is preferred."""

    def choose(key: jax.Array) -> Routing:
        scores = jax.random.uniform(key, (tokens, sizes.experts))
        best, experts = lax.top_k(scores, sizes.chosen)
        return Routing(experts.astype(jnp.int32), best / best.sum(1, keepdims=True))

    return jax.jit(choose)(jax.random.key(seed))


def _reference(x: Any, weights: ExpertWeights, routing: Routing, rows: Any) -> jax.Array:
    """[rows, E] in float32, a choice at a time."""
    rows = jnp.asarray(rows)
    experts, shares = routing.experts[rows], routing.weights[rows]

    def add(choice: Any) -> jax.Array:
        row, expert, share = choice
        gate, up = (weights.gate_up[2 * expert + part].astype(jnp.float32) for part in (0, 1))
        own = x[row].astype(jnp.float32)[None]
        made = gated(own @ gate.T, own @ up.T) @ weights.down[expert].astype(jnp.float32).T
        return share * made[0]

    each = jnp.broadcast_to(rows[:, None], experts.shape)
    choices = (each.reshape(-1), experts.reshape(-1), shares.reshape(-1))
    with jax.default_matmul_precision("highest"):
        return lax.map(add, choices).reshape(*experts.shape, -1).sum(1)


def _make(inputs: _Inputs, name: str, overrides: Overrides, interpret: bool) -> Work:
    (tokens, width), (count, chosen, _, mlp) = inputs.x.shape, inputs.sizes
    is_plain = name == "xla"
    if is_plain and not inputs.is_layer:
        raise KernelUnsupported("plain JAX has no products of planned blocks; see the layer's case")
    grouped = _grouped(overrides, interpret=interpret)
    rows = overrides.get(_ROWS) or grouped(inputs.weights).block_rows(tokens * chosen, count)
    if inputs.is_layer and _ROWS in overrides:
        raise KernelUnsupported("the rows of a layer's blocks are its own choice")

    def products(carry: Any, shared: Any, own: Any) -> Any:
        x, weights = shared
        own = own._replace(num_blocks=own.num_blocks + nothing(carry))
        return grouped(weights)(x, own)

    def layer(carry: Any, shared: Any, own: Routing) -> Any:
        x, weights = shared
        made = partial(_expert, weights)
        kernel = None if is_plain else grouped(weights)
        return run_experts(x, own, tokens + nothing(carry), count, made, grouped=kernel)

    own: list[Any] = list(inputs.own)
    call = layer
    if not inputs.is_layer:
        call = products
        plan = jax.jit(partial(plan_blocks, num_experts=count, rows=rows))
        own = [plan(one.experts, jnp.int32(tokens)) for one in inputs.own]
    shape = jax.eval_shape(call, jnp.zeros(1), (inputs.x, inputs.weights), own[0])

    def sample(carry: jax.Array) -> jax.Array:
        if inputs.is_layer:
            return carry[inputs.rows]
        some = own[0]._replace(rows=own[0].rows[inputs.rows])
        return combine(carry, some, inputs.own[0].weights[inputs.rows])

    read = len(np.unique(np.asarray(inputs.own[0].experts)))
    return Work(
        call=call,
        carry=jnp.zeros(shape.shape, shape.dtype),
        shared=(inputs.x, inputs.weights),
        own=own,
        sample=sample,
        errors=compare(inputs.expected),
        flops=6.0 * tokens * chosen * width * mlp,
        num_bytes=6.0 * read * width * mlp + 4.0 * tokens * width,
        tiles="" if is_plain else _tiles_text(rows, inputs.sizes, overrides),
    )


def _expert(weights: ExpertWeights, rows: jax.Array, expert: jax.Array) -> jax.Array:
    both = linear(rows, expert_weight(weights.gate_up, expert, num_parts=2))
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=-1)
    return linear(gated(gate, up), expert_weight(weights.down, expert))


def _grouped(overrides: Overrides, *, interpret: bool) -> Callable[[ExpertWeights], GroupedExperts]:
    """Weights -> the experts in the kernel."""

    def tiles(rows: int, depth: int, outputs: int, **kind: Any) -> ExpertTiles:
        return _tiles(overrides, rows, depth, outputs, **kind)

    return lambda weights: GroupedExperts(weights, gated, interpret=interpret, tiles=tiles)


def _tiles(overrides: Overrides, *sizes: int, is_gated: bool, itemsize: int) -> ExpertTiles:
    """The kernel's own choice with the overrides: of both products, or as in down.block_n=64."""
    default = choose_tiles(*sizes, is_gated=is_gated, itemsize=itemsize)
    own, other = ("gated.", "down.") if is_gated else ("down.", "gated.")
    wanted = {
        name.removeprefix(own): value
        for name, value in overrides.items()
        if not name.startswith(other) and name != _ROWS
    }
    tiles, rest = cut(default, wanted)
    check_all_used(rest, default)
    return tiles


def _tiles_text(rows: int, sizes: _Sizes, overrides: Overrides) -> str:
    pairs = ((True, sizes.width, sizes.mlp), (False, sizes.mlp, sizes.width))
    both = [
        tiles_text(_tiles(overrides, rows, depth, outputs, is_gated=is_gated, itemsize=2))
        for is_gated, depth, outputs in pairs
    ]
    return f"{_ROWS}={rows}; " + "; ".join(both)


FAMILY = Family(
    cases=tuple(
        f"{model}/{tokens}{end}"
        for tokens in (8192, 32, 1, 16, 64, 512)
        for model in ("v4-flash", "qwen3-30b-a3b")
        for end in (("", "/layer") if tokens in (8192, 32) else ("",))
    ),
    tiny=("tiny/40", "tiny/40/layer"),
    backends=("pallas_triton", "xla"),
    tiles=(
        "num_warps=4", "num_warps=8", "num_stages=2", "num_stages=3", "num_stages=4",
        "gated.block_n=32", "gated.block_n=64", "gated.block_n=128", "down.block_n=64",
        "down.block_n=128", "down.block_n=256", "block_k=32", "block_k=64", "block_k=128",
        "rows=16", "rows=32", "rows=64", "rows=128",
    ),
    prepare=_prepare,
    make=_make,
)  # fmt: skip
