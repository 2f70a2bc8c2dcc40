"""Norms and rotary embedding of query and key heads, in place, in one Pallas/Triton kernel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

_MAX_BLOCK = 8  # heads a program


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
    num_rotated = qkv.shape[1] - kv_heads
    block = min(kv_heads & -kv_heads, _MAX_BLOCK)  # divides the query heads, too
    size = block * qkv.shape[2] // 2
    kernel = functools.partial(
        _kernel, block=block, first_key=num_rotated - kv_heads, norm_eps=norm_eps
    )
    call = pl.pallas_call(
        kernel,
        grid=(len(qkv), num_rotated // block),
        out_shape=jax.ShapeDtypeStruct(qkv.shape, qkv.dtype),
        input_output_aliases={0: 0},
        # A warp more than the numbers fill would read what another has already replaced.
        compiler_params=plt.CompilerParams(num_warps=2 if size >= 64 else 1, num_stages=1),
        interpret=interpret,
        name="norm_and_rotate",
    )
    return call(qkv, rotary, qk_norms)


def _kernel(
    qkv: Any,
    rotary: Any,
    qk_norms: Any,
    out: Any,
    *,
    block: int,
    first_key: int,
    norm_eps: float,
) -> None:
    """One token's block of heads."""
    token, index = pl.program_id(0), pl.program_id(1)
    dim = qkv.shape[-1]
    heads = pl.ds(index * block, block)
    halves = (pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2))
    low, high = (qkv[token, heads, at].astype(jnp.float32) for at in halves)
    if qk_norms is not None:
        squares = (low * low).sum(1) + (high * high).sum(1)
        scale = lax.rsqrt(squares / dim + norm_eps)[:, None]
        is_key = (index * block >= first_key).astype(jnp.int32)
        weights = (qk_norms[is_key, at].astype(jnp.float32)[None] for at in halves)
        low, high = (x * scale * w for x, w in zip((low, high), weights, strict=True))
    cos, sin = rotary[0, token, :][None], rotary[1, token, :][None]
    out[token, heads, halves[0]] = (low * cos - high * sin).astype(out.dtype)
    out[token, heads, halves[1]] = (high * cos + low * sin).astype(out.dtype)
