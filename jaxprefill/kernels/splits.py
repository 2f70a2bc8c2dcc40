"""Split-KV: programs that share the keys of one row, and the merge of what each leaves.

    key blocks   [ split 0 | split 1 | .. ]     as many splits as have work; the others exit

A split leaves its mean of the values and, as that one's weight, the base-2 logarithm of its
softmax sum. They are added in the order of the splits, whichever is done first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32

from jaxprefill.kernels.triton import Ref

MAX_SPLITS = 16
MIN_SPLIT_BLOCKS = 4  # a split of fewer key blocks costs more than it saves
# Running maxima start above what masks a key: where none is visible yet, weights are zero.
MASKED, LOWEST, LEAST_SUM = -1e30, -1e20, 1e-30


def share_blocks(blocks: Int32[Array, ""], most: int) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """(key blocks that each split takes, splits that have any: one to `most`)."""
    split_blocks = jnp.maximum(pl.cdiv(blocks, most), MIN_SPLIT_BLOCKS)
    return split_blocks, jnp.maximum(pl.cdiv(blocks, split_blocks), 1)


def merge_splits(
    parts: Ref, weights: Ref, num_splits: Int32[Array, ""], at: Int32[Array, " rows"], heads: Any
) -> Float[Array, "rows D"]:
    """The mean of some rows' parts [splits, T, H, D] by their weights [splits, T, H]."""

    def add(split, carry):  # pyright: ignore
        top, total, acc = carry
        weight = weights[split, at, heads]
        new_top = jnp.maximum(top, weight)
        rescale, share = jnp.exp2(top - new_top), jnp.exp2(weight - new_top)
        acc = acc * rescale[:, None] + parts[split, at, heads, :] * share[:, None]
        return new_top, total * rescale + share, acc

    zeros = jnp.zeros(at.shape, jnp.float32)
    empty = (zeros + MASKED, zeros, jnp.zeros((*at.shape, parts.shape[-1]), jnp.float32))
    _, total, acc = lax.fori_loop(0, num_splits, add, empty)
    return acc / total[:, None]


def launch_merge(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    plan: Any,
    parts: Sequence[Array],
    out: Float[Array, "T H D"],
    *,
    interpret: bool,
) -> Float[Array, "T H D"]:
    """`out`, in its place, with the rows that `kernel` merges.

    Args:
        kernel: fresh (jax #40847); of references to plan, parts, weights, out and the result.
        grid: its programs.
        plan: arrays that tell it which rows.
        parts: and their weights.
        out: donated or dead; rows that one split has done are there.
        interpret: runs it on any device, slowly.
    """
    call = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={len(jax.tree.leaves(plan)) + len(parts): 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="merge_attention_splits",
    )
    return call(plan, *parts, out)
