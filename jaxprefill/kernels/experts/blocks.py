"""Tokens sorted by expert, in blocks of rows that one expert multiplies. Static shapes only.

    choices   t0: e2 e0 | t1: e2 e1 | t2: padding        blocks of 2 rows
    rows      [t0 .] e0 | [t1 .] e1 | [t0 t1] e2 | [. .] not planned

Padding tokens are in no block, whatever their router says.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

_MAX_ROWS = 64
_GROUP = 128  # choices that are compared with each other


class ExpertBlocks(NamedTuple):
    """What each block holds.

    Attributes:
        tokens: the token in each row; T, which is none, where a block is not full.
        experts: the expert of each block.
        num_blocks: blocks that hold anything; the others come last.
        rows: the row of each token's choices; N * B, which is none, for padding tokens.
    """

    tokens: Int32[Array, "N B"]
    experts: Int32[Array, " N"]
    num_blocks: Int32[Array, ""]
    rows: Int32[Array, "T C"]


def block_rows(num_choices: int, num_experts: int) -> int:
    """Rows of a block: about what an expert gets where all get the same, a power of two."""
    mean = -(-num_choices // num_experts)
    return min(_MAX_ROWS, 1 << (mean - 1).bit_length())


def block_capacity(num_choices: int, num_experts: int, rows: int) -> int:
    """The most blocks that any routing needs."""
    return (num_choices + min(num_choices, num_experts) * (rows - 1)) // rows


def plan_blocks(
    experts: Int32[Array, "T C"], num_tokens: Int32[Array, ""], num_experts: int, rows: int
) -> ExpertBlocks:
    """The blocks of the first `num_tokens` tokens' choices, `rows` rows each."""
    tokens, chosen = experts.shape
    num_choices = tokens * chosen
    capacity = block_capacity(num_choices, num_experts, rows)
    token = jnp.arange(num_choices, dtype=jnp.int32) // chosen
    expert = jnp.where(token < num_tokens, experts.reshape(-1), num_experts)
    rank, counts = rank_by_expert(expert, num_experts)
    blocks = -(-counts // rows)
    ends = jnp.cumsum(blocks)
    row = ((ends - blocks) * rows)[jnp.minimum(expert, num_experts - 1)] + rank
    row = jnp.where(expert < num_experts, row, capacity * rows)
    held = jnp.full(capacity * rows, tokens, jnp.int32).at[row].set(token, mode="drop")
    own = (jnp.arange(capacity)[:, None] >= ends).sum(1, dtype=jnp.int32)
    return ExpertBlocks(
        tokens=held.reshape(capacity, rows),
        experts=jnp.minimum(own, num_experts - 1),
        num_blocks=ends[-1],
        rows=row.reshape(tokens, chosen),
    )


def rank_by_expert(
    expert: Int32[Array, " n"], num_experts: int
) -> tuple[Int32[Array, " n"], Int32[Array, " X"]]:
    """(how many choices before each are of its expert, how many each expert has in all).

    Counted, within groups of choices and over groups: fewer launches than a sort takes. Experts
    from `num_experts` on are none, and their ranks mean nothing.
    """
    padded = jnp.pad(expert, (0, -len(expert) % _GROUP), constant_values=num_experts)
    groups = padded.reshape(-1, _GROUP)
    place = jnp.arange(_GROUP)
    is_before = (groups[:, :, None] == groups[:, None]) & (place[:, None] > place)
    each = (groups[:, :, None] == jnp.arange(num_experts)).sum(1, dtype=jnp.int32)
    ends = jnp.cumsum(each, axis=0)
    before = jnp.take_along_axis(ends - each, jnp.minimum(groups, num_experts - 1), axis=1)
    rank = is_before.sum(2, dtype=jnp.int32) + before
    return rank.reshape(-1)[: len(expert)], ends[-1]


def combine(
    outputs: Float[Array, "N B E"], blocks: ExpertBlocks, weights: Float[Array, "T C"]
) -> Float[Array, "T E"]:
    """The weighted sum of each token's experts, added in the order of its choices."""
    flat = outputs.reshape(-1, outputs.shape[-1])
    total = jnp.zeros((len(weights), flat.shape[-1]), jnp.float32)
    for choice in range(weights.shape[1]):
        row = blocks.rows[:, choice]
        added = jnp.take(flat, row, axis=0, mode="fill", fill_value=0).astype(jnp.float32)
        total += jnp.where(row < len(flat), weights[:, choice], 0)[:, None] * added
    return total
