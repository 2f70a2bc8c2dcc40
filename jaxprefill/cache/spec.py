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
        rate: tokens that one entry stands for: a page has fewer rows, but at least one.
        kept_rows: rows a page has at most; None: one for each of its entries.
        is_exact: whether numbers are float32 whatever the model's dtype is.
    """

    name: str
    num_layers: int
    num_parts: int
    num_heads: int
    width: int
    rate: int = 1
    kept_rows: int | None = None
    is_exact: bool = False

    def rows(self, page_size: int) -> int:
        """Rows of a page of so many tokens."""
        rows = max(1, page_size // self.rate)
        return rows if self.kept_rows is None else min(rows, self.kept_rows)

    def page_bytes(self, page_size: int, item_bytes: int) -> int:
        """Bytes that one page takes in all layers, where a number takes `item_bytes`."""
        numbers = self.num_layers * self.num_parts * self.num_heads * self.width
        return numbers * self.rows(page_size) * (4 if self.is_exact else item_bytes)


@dataclass(frozen=True)
class CacheSpec:
    """All pools of a model, in the order in which its layers are handed them."""

    pools: tuple[PoolSpec, ...]

    def page_bytes(self, page_size: int, item_bytes: int) -> int:
        """Bytes that one page takes in all pools."""
        return sum(pool.page_bytes(page_size, item_bytes) for pool in self.pools)
