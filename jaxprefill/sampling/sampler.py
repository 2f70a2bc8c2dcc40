"""Choosing tokens on the device: a pure function of logits and per-row parameters.

Filters work by searching a threshold instead of sorting: 32 halvings over the order-preserving
integer form of float32 find it exactly, and 32 passes over [rows, V] cost less than one sort.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxprefill.sampling.pack import FLOAT_FIELDS, INT_FIELDS

PROMPT_FLAG = 1 << 30  # in the history: the id stands in the prompt
_OUT = -jnp.inf


class RowParams(NamedTuple):
    """One value per row; see `request.SamplingParams`."""

    row: Int32[Array, " r"]
    slot: Int32[Array, " r"]
    top_k: Int32[Array, " r"]
    seed_low: Int32[Array, " r"]
    seed_high: Int32[Array, " r"]
    position: Int32[Array, " r"]
    has_history: Int32[Array, " r"]
    has_bias: Int32[Array, " r"]
    temperature: Float32[Array, " r"]
    top_p: Float32[Array, " r"]
    min_p: Float32[Array, " r"]
    presence: Float32[Array, " r"]
    frequency: Float32[Array, " r"]
    repetition: Float32[Array, " r"]


def unpack_rows(buffer: Int32[Array, "r words"]) -> RowParams:
    """The columns of `pack.pack_rows`."""
    columns = {name: buffer[:, at] for at, name in enumerate(INT_FIELDS)}
    floats = lax.bitcast_convert_type(buffer[:, len(INT_FIELDS) :], jnp.float32)
    columns |= {name: floats[:, at] for at, name in enumerate(FLOAT_FIELDS)}
    return RowParams(**columns)


def expand_mask(words: Int32[Array, "r words"], vocab_size: int) -> Bool[Array, "r V"]:
    """One bool per id from packed bits."""
    bits = (words[:, :, None] >> jnp.arange(32)) & 1
    return bits.reshape(len(words), -1)[:, :vocab_size] == 1


def penalise(
    logits: Float32[Array, "r V"], history: Int32[Array, "r V"], params: RowParams
) -> Float32[Array, "r V"]:
    """Repetition (arXiv 1909.05858) over prompt and output, then frequency and presence."""
    count = history & (PROMPT_FLAG - 1)
    repetition = params.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(history > 0, repeated, logits)
    logits = logits - params.frequency[:, None] * count
    return logits - params.presence[:, None] * (count > 0)


def keep_top_k(logits: Float32[Array, "r V"], k: Int32[Array, " r"]) -> Float32[Array, "r V"]:
    """The k largest of each row (and ties of the last); k 0 keeps all."""
    wanted = jnp.where(k > 0, k, logits.shape[1])
    ordered = _ordered(logits)

    def holds(threshold: Int32[Array, " r"]) -> Bool[Array, " r"]:
        return (ordered >= threshold[:, None]).sum(-1) >= wanted

    return jnp.where(ordered >= _largest(holds, len(logits))[:, None], logits, _OUT)


def keep_top_p(logits: Float32[Array, "r V"], p: Float32[Array, " r"]) -> Float32[Array, "r V"]:
    """The smallest set of most likely tokens whose probability reaches p (arXiv 1904.09751)."""
    ordered = _ordered(logits)
    p = jnp.maximum(p, jnp.finfo(jnp.float32).tiny)  # 0 would keep nothing
    probability = jax.nn.softmax(logits, axis=-1)

    def holds(threshold: Int32[Array, " r"]) -> Bool[Array, " r"]:
        inside = jnp.where(ordered >= threshold[:, None], probability, 0).sum(-1)
        return inside >= p

    kept = jnp.where(ordered >= _largest(holds, len(logits))[:, None], logits, _OUT)
    return jnp.where((p < 1)[:, None], kept, logits)


def keep_min_p(logits: Float32[Array, "r V"], p: Float32[Array, " r"]) -> Float32[Array, "r V"]:
    """Tokens at least p times as likely as the most likely one."""
    floor = logits.max(-1) + jnp.log(p)  # log 0 is -inf: keeps all
    return jnp.where(logits >= floor[:, None], logits, _OUT)


def choose(logits: Float32[Array, "r V"], params: RowParams) -> Int32[Array, " r"]:
    """One id per row: argmax at temperature 0, else a draw from the filtered distribution.

    A row's noise depends on its seed and position alone, so a batch changes nothing.
    """
    greedy = jnp.argmax(logits, axis=-1)
    is_greedy = params.temperature == 0
    top = logits.max(-1, keepdims=True)
    logits = logits - jnp.where(jnp.isfinite(top), top, 0)  # dividing cannot overflow, nor round
    scaled = logits / jnp.where(is_greedy, 1, jnp.maximum(params.temperature, 1e-5))[:, None]
    kept = keep_top_k(scaled, params.top_k)
    kept = keep_min_p(keep_top_p(kept, params.top_p), params.min_p)
    drawn = jnp.argmax(kept + _noise(params, logits.shape[1]), axis=-1)
    return jnp.where(is_greedy, greedy, drawn).astype(jnp.int32)


def _noise(params: RowParams, vocab_size: int) -> Float32[Array, "r V"]:
    """Gumbel noise, one threefry stream per (seed, position)."""

    def row(low: Array, high: Array, position: Array) -> Float[Array, " V"]:
        words = lax.bitcast_convert_type(jnp.stack([high, low]), jnp.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    with jax.named_scope("sampling.noise"):
        return jax.vmap(row)(params.seed_low, params.seed_high, params.position)


def _ordered(x: Float32[Array, "r V"]) -> Int32[Array, "r V"]:
    """Integers in the same order as the floats; both zeros are 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, -(2**31) - bits, bits)


def _largest(
    holds: Callable[[Int32[Array, " r"]], Bool[Array, " r"]], num_rows: int
) -> Int32[Array, " r"]:
    """The largest int32 per row for which the decreasing predicate `holds` is true."""

    def halve(index: Array, found: Int32[Array, " r"]) -> Int32[Array, " r"]:
        candidate = found + lax.shift_left(jnp.int32(1), 31 - index)  # the first step wraps to 0
        return jnp.where(holds(candidate), candidate, found)

    with jax.named_scope("sampling.cut"):
        return lax.fori_loop(0, 32, halve, jnp.full((num_rows,), -(2**31), jnp.int32))
