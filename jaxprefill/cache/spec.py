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
        is_recent: whether only a request's last `CacheSpec.reach` tokens are read: the pool's pages
            are other ones then, few, and given back when a request has gone past them.
    """

    name: str
    num_layers: int
    num_parts: int
    num_heads: int
    width: int
    rate: int = 1
    kept_rows: int | None = None
    is_exact: bool = False
    is_recent: bool = False

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
    """All pools of a model, in the order in which its layers are handed them.

    Attributes:
        reach: tokens, its own among them, that a new token reads of pools with recent ones; 0:
            there are none.
    """

    pools: tuple[PoolSpec, ...]
    reach: int = 0

    def page_bytes(self, page_size: int, item_bytes: int, *, is_recent: bool = False) -> int:
        """Bytes that one page takes in all pools of the one kind or of the other."""
        pools = (pool for pool in self.pools if pool.is_recent == is_recent)
        return sum(pool.page_bytes(page_size, item_bytes) for pool in pools)

    def recent_pages(self, page_size: int, num_tokens: int) -> int:
        """Recent pages that a request has at most, in a step with so many new tokens of it."""
        return -(-(self.reach + num_tokens) // page_size) + 1 if self.reach else 0

    def all_recent_pages(self, page_size: int, num_tokens: int, num_requests: int) -> int:
        """Recent pages for requests with so many new tokens together, and for as many prefixes."""
        if not self.reach:
            return 0
        window = -(-self.reach // page_size)
        return num_requests * (2 * window + 2) + -(-num_tokens // page_size)
