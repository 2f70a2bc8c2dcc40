"""What a fused qkv projection needs before attention, in place, in one Pallas/Triton kernel."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

_MAX_BLOCK = 8  # heads a program


class _Rotation(NamedTuple):
    """What the kernel is specialised on; heads are counted."""

    block: int
    first_key: int
    norm_eps: float


def norm_and_rotate(
    qkv: Float[Array, "T heads D"],
    rotary: Float[Array, "2 T half"],
    qk_norms: Float[Array, "2 D"] | None,
    *,
    kv_heads: int,
    norm_eps: float,
    interpret: bool = False,
) -> Float[Array, "T heads D"]:
    """`qkv` with its query and key heads RMS-normed, if there are norms, and rotated.

    Heads are stacked: queries, keys, values; `rotary` holds cosine and sine, and dimension i turns
    with i + D / 2.
    """
    num_rotated, dim = qkv.shape[1] - kv_heads, qkv.shape[2]
    block = min(kv_heads & -kv_heads, _MAX_BLOCK)  # divides the query heads, too
    sizes = _Rotation(block, num_rotated - kv_heads, norm_eps)
    call = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid=(len(qkv), num_rotated // block),
        out_shape=jax.ShapeDtypeStruct(qkv.shape, qkv.dtype),
        input_output_aliases={0: 0},
        # A warp more than the numbers fill would read what another has already replaced.
        compiler_params=plt.CompilerParams(num_warps=2 if block * dim >= 128 else 1, num_stages=1),
        interpret=interpret,
        name="norm_and_rotate",
    )
    return call(qkv, rotary, qk_norms)


def plain_norm_and_rotate(
    qkv: Float[Array, "T heads D"],
    rotary: Float[Array, "2 T half"],
    qk_norms: Float[Array, "2 D"] | None,
    *,
    kv_heads: int,
    norm_eps: float,
) -> Float[Array, "T heads D"]:
    """The same in plain JAX: what kernels are checked against."""
    rows, num_queries = qkv.astype(jnp.float32), qkv.shape[1] - 2 * kv_heads
    turned = rows[:, : num_queries + kv_heads]
    if qk_norms is not None:
        scale = lax.rsqrt(jnp.square(turned).mean(-1, keepdims=True) + norm_eps)
        is_key = (jnp.arange(turned.shape[1]) >= num_queries).astype(jnp.int32)
        turned = turned * scale * qk_norms.astype(jnp.float32)[is_key]
    low, high = jnp.split(turned, 2, axis=-1)
    cos, sin = rotary[0][:, None], rotary[1][:, None]
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return jnp.concatenate([turned, rows[:, turned.shape[1] :]], axis=1).astype(qkv.dtype)


def _kernel(qkv: Any, rotary: Any, qk_norms: Any, out: Any, *, sizes: _Rotation) -> None:
    """One token's block of query or key heads."""
    token, first, dim = pl.program_id(0), pl.program_id(1) * sizes.block, qkv.shape[-1]
    heads = pl.ds(first, sizes.block)
    halves = (pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2))
    low, high = (qkv[token, heads, at].astype(jnp.float32) for at in halves)
    cos, sin = rotary[0, token, :][None], rotary[1, token, :][None]
    if qk_norms is not None:
        scale = lax.rsqrt(((low * low).sum(1) + (high * high).sum(1)) / dim + sizes.norm_eps)
        is_key = (first >= sizes.first_key).astype(jnp.int32)
        weights = (qk_norms[is_key, at].astype(jnp.float32)[None] for at in halves)
        low, high = (
            x * scale[:, None] * weight for x, weight in zip((low, high), weights, strict=True)
        )
    out[token, heads, halves[0]] = (low * cos - high * sin).astype(out.dtype)
    out[token, heads, halves[1]] = (high * cos + low * sin).astype(out.dtype)
