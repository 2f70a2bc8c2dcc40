"""What an attention backend is: a device function, its tiling, and what it can do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from jaxprefill.kernels.attention.capabilities import AttentionNeeds, AttentionSpec, Capabilities
from jaxprefill.kernels.attention.tiles import NO_ROW, TileShape


class RaggedBatch(NamedTuple):
    """Who owns which tokens and pages; device integers unpacked from the batch's buffer.

    A sentinel request has q_len 0 and kv_len 0. `kv_rows` is the pool row (page * S + offset)
    that each new token's K and V are written to; padding tokens hold NO_ROW and write nowhere.
    Models with pools of recent tokens find a request's page n of those in column n % C of
    `recent_table`, and `kv_rows` are rows of theirs.
    """

    kv_rows: Int32[Array, " T"]
    q_lens: Int32[Array, " R"]
    kv_lens: Int32[Array, " R"]
    q_starts: Int32[Array, " R"]
    page_table: Int32[Array, "R W"]
    tile_slot: Int32[Array, " N"]
    tile_start: Int32[Array, " N"]
    num_tiles: Int32[Array, ""]
    recent_table: Int32[Array, "R C"] | None = None


@runtime_checkable
class Attend(Protocol):
    """One layer's attention: writes the new K and V into the pool, then attends."""

    def __call__(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        pool: Shaped[Array, "2 K P S D"],
        batch: RaggedBatch,
        first_page: Int32[Array, ""],
        sinks: Float[Array, " H"] | None = None,
    ) -> tuple[Float[Array, "T H D"], Shaped[Array, "2 K P S D"]]:
        """(out, pool).

        Args:
            q: of the new tokens, rotated.
            k: likewise.
            v: of the new tokens.
            pool: donated or dead; numbers, or bfloat16 by its bits (see `pool_dtype`).
            batch: who owns which tokens and pages.
            first_page: where the layer's pages begin in the pool.
            sinks: of each query head, if the spec has them.
        """
        ...


@runtime_checkable
class ChooseTiles(Protocol):
    """The tiling of one compiled shape: a backend's choice."""

    def __call__(
        self, num_tokens: int, num_slots: int, max_context: int, *, page_size: int, is_decode: bool
    ) -> TileShape:
        """`is_decode`: every request has one new token, in the row of its slot."""
        ...


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """A named implementation. `make` closes over static sizes, a fresh function per shape.

    Attributes:
        is_fusible: the shapes of fused layers are tiled as their own attention takes them.
    """

    name: str
    capabilities: Capabilities
    tile_shape: ChooseTiles
    make: Callable[[TileShape, AttentionSpec], Attend]
    is_fusible: bool = False

    def lacks(self, needs: AttentionNeeds) -> str | None:
        """The first need that is not met, in words, or None."""
        return self.capabilities.lacks(needs)


def pool_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """What a KV pool of `dtype` numbers is stored as.

    XLA's CPU compiler moves bfloat16 rows by way of a float32 copy of the whole array, every
    layer; the bits in uint16 it moves in place.
    """
    is_moved_as_float32 = platform == "cpu" and dtype == jnp.bfloat16
    return jnp.dtype(jnp.uint16) if is_moved_as_float32 else dtype


def as_numbers(stored: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """A part of the pool as numbers."""
    is_bits = stored.dtype == jnp.uint16
    return lax.bitcast_convert_type(stored, jnp.bfloat16) if is_bits else stored


def as_stored(numbers: Float[Array, "*shape"], dtype: jnp.dtype) -> Shaped[Array, "*shape"]:
    """Numbers as a pool of `dtype` holds them."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(numbers.astype(jnp.bfloat16), jnp.uint16)
    return numbers.astype(dtype)


def write_kv(
    pool: Shaped[Array, "2 K P S D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    kv_rows: Int32[Array, " T"],
    first_page: Int32[Array, ""],
) -> Shaped[Array, "2 K P S D"]:
    """The pool with each token's K and V in its row; NO_ROW tokens are dropped."""
    num_pages, page_size = pool.shape[2:4]
    page = jnp.where(kv_rows == NO_ROW, num_pages, kv_rows // page_size + first_page)
    new = as_stored(jnp.stack([k, v]).transpose(0, 2, 1, 3), pool.dtype)  # [2, K, T, D]
    return pool.at[:, :, page, kv_rows % page_size].set(new, mode="drop")


def bend(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """Values bent into (-cap, cap) by tanh, a soft cap; None: as they are."""
    return x if cap is None else cap * jnp.tanh(x / cap)
