"""The arrays that live on the device between steps. Donated ones are replaced by every call."""

import math
from dataclasses import dataclass

import jax
from jaxtyping import Array, Float32, Int32, Shaped

from jaxprefill.cache.small_blocks import SmallBlocks
from jaxprefill.models.decoder import Pools
from jaxprefill.models.tree import Leaves


@dataclass(frozen=True, kw_only=True)
class StateShapes:
    """Shape, dtype and sharding of each array of a DeviceState: what lowering needs."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    head: jax.ShapeDtypeStruct
    pools: tuple[jax.ShapeDtypeStruct, ...]
    hidden: jax.ShapeDtypeStruct
    last_tokens: jax.ShapeDtypeStruct
    history: jax.ShapeDtypeStruct
    bias: jax.ShapeDtypeStruct
    classifier: jax.ShapeDtypeStruct | None = None
    stacked: tuple[jax.ShapeDtypeStruct, ...] = ()


@dataclass
class DeviceState:
    """Weights and per-engine arrays; C is max_running_requests.

    Attributes:
        head: the LM head; in a model without one the embedding, which nothing reads as a head. V is
            rounded up to a multiple of the devices that share it.
        pools: what the model keeps per token, in pages of all layers; donated to every body.
        hidden: rows the last body wrote, read by the heads; donated, shared by all buckets.
        last_tokens: the last token sampled into each request slot; donated to the heads.
        history: per slot and token id: how often it was generated, plus PROMPT_FLAG if it
            stands in the prompt; kept only for requests with penalties.
        bias: per slot and token id: what is added to its logit.
        stacked: the leaves as passes take them that pick their layer of stacked weights; those of
            layers are then views of these. Empty: there are no such passes.
        small_blocks: what keeps room for small arrays free, on a GPU.
    """

    leaves: Leaves
    head: Shaped[Array, "V E"]
    pools: Pools
    hidden: Shaped[Array, "tokens E"]
    last_tokens: Int32[Array, " C"]
    history: Int32[Array, "C V"]
    bias: Float32[Array, "C V"]
    classifier: Shaped[Array, "labels E"] | None = None
    stacked: Leaves = ()
    small_blocks: SmallBlocks = ()

    def delete(self, *, has_weights: bool = True) -> None:
        """Frees every array now, rather than when the last reference goes; weights if wanted."""
        weights = {id(leaf) for leaf in (*self.leaves, *self.stacked)}
        for array in jax.tree.leaves(self):
            if has_weights or id(array) not in weights:
                array.delete()

    def nbytes(self) -> dict[str, int]:
        """Bytes by purpose, on each device."""
        has_own = not any(leaf is self.head for leaf in self.leaves)
        parts = {
            "weights": (*self.leaves, *((self.head,) if has_own else ())),
            "kv_pool": self.pools,
            "sampling": (self.history, self.bias, self.last_tokens),
            "hidden": (self.hidden,),
        }
        return {name: sum(map(_device_bytes, arrays)) for name, arrays in parts.items()}


def _device_bytes(array: Shaped[Array, "..."]) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


jax.tree_util.register_dataclass(DeviceState)
