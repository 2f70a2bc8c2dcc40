"""What one device that saw every logit would find, where each sees a share of the vocabulary.

Shares are consecutive ids, in the order of the devices. A share sends a few numbers a row to the
others, never its logits, but for `VocabularySplit.join`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxprefill.models.sharding import AXIS


@dataclass(frozen=True)
class VocabularySplit:
    """`num_ids` ids over `num_shards` devices; by default one device has all there are."""

    num_ids: int = 0
    num_shards: int = 1

    def best(
        self, logits: Float32[Array, "r V"], num_valid: int
    ) -> tuple[Int32[Array, " r"], Float32[Array, " r"]]:
        """(id, logprob) of the largest logit among the first `num_valid` ids; ties: the lowest."""
        ids = self._ids(logits)
        valid = jnp.where(ids < num_valid, logits, -jnp.inf)
        best = jnp.argmax(valid, axis=-1).astype(jnp.int32)
        if self.num_shards == 1:
            return best, logprob_of(logits, best)
        chosen = jnp.take_along_axis(valid, best[:, None], axis=1)[:, 0]
        found = jnp.stack([_bits(chosen), best + ids[0], _bits(self._own_total(logits))])
        shares = lax.all_gather(found, AXIS)  # [shards, 3, r]
        owner = jnp.argmax(_floats(shares[:, 0]), axis=0)
        winner = jnp.take_along_axis(shares, owner[None, None], axis=0)[0]
        total = jax.nn.logsumexp(_floats(shares[:, 2]), axis=0)
        return winner[1], _floats(winner[0]) - total

    def logprob(
        self, logits: Float32[Array, "r V"], ids: Int32[Array, " r"]
    ) -> Float32[Array, " r"]:
        """The log-softmax of each row at its id."""
        if self.num_shards == 1:
            return logprob_of(logits, ids)
        width = logits.shape[1]
        own = jnp.take_along_axis(logits, ids[:, None] % width, axis=1)[:, 0]
        shares = lax.all_gather(jnp.stack([own, self._own_total(logits)]), AXIS)
        chosen = jnp.take_along_axis(shares[:, 0], (ids // width)[None], axis=0)[0]
        return chosen - jax.nn.logsumexp(shares[:, 1], axis=0)

    def of_owner(
        self, values: Float32[Array, " r"], ids: Int32[Array, " r"], width: int
    ) -> Float32[Array, " r"]:
        """Each row's value from the device whose share of `width` ids holds the row's id."""
        if self.num_shards == 1:
            return values
        return jnp.take_along_axis(lax.all_gather(values, AXIS), (ids // width)[None], axis=0)[0]

    def join(self, logits: Float32[Array, "r own"]) -> Float32[Array, "r V"]:
        """All logits on every device: for what needs to look at them again and again."""
        if self.num_shards == 1:
            return logits
        return lax.all_gather(logits, AXIS, axis=1, tiled=True)[:, : self.num_ids]

    def _ids(self, logits: Float32[Array, "r V"]) -> Int32[Array, " V"]:
        """The ids that this device's columns stand for; from `num_ids` on they are padding."""
        ids = jnp.arange(logits.shape[1])
        return ids if self.num_shards == 1 else ids + lax.axis_index(AXIS) * logits.shape[1]

    def _own_total(self, logits: Float32[Array, "r V"]) -> Float32[Array, " r"]:
        real = jnp.where(self._ids(logits) < self.num_ids, logits, -jnp.inf)
        return jax.nn.logsumexp(real, axis=-1)


def logprob_of(logits: Float32[Array, "r V"], ids: Int32[Array, " r"]) -> Float32[Array, " r"]:
    """The log-softmax of each row at its id, all logits being here."""
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _bits(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.int32)


def _floats(x: Int32[Array, "..."]) -> Float32[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.float32)
