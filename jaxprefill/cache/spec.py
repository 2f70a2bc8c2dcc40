"""What a model keeps per token between steps: a list of pools. Host data; imports no jax.

A dense decoder has one pool, of keys and values. Models with other kinds of memory list more: a
window's keys, compressed entries, an indexer's keys.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """One array of pages on the device.

    Attributes:
        name: what it holds.
        num_layers: layers that write to it; each owns as many pages of it as the engine has.
        num_parts: entries a token has side by side, such as K and V.
        num_heads: entries a part has, shared out over devices.
        width: numbers an entry has.
    """

    name: str
    num_layers: int
    num_parts: int
    num_heads: int
    width: int

    @property
    def token_numbers(self) -> int:
        """Numbers that one token takes in all layers."""
        return self.num_layers * self.num_parts * self.num_heads * self.width


@dataclass(frozen=True)
class CacheSpec:
    """All pools of a model, in the order in which its layers are handed them."""

    pools: tuple[PoolSpec, ...]

    @property
    def token_numbers(self) -> int:
        """Numbers that one token takes in all pools."""
        return sum(pool.token_numbers for pool in self.pools)
