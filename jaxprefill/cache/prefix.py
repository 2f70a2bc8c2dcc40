r"""Pages of known prefixes, shared by whoever starts with the same tokens. Host only, no jax.

A tree of full pages: a node's page holds the KV of its tokens *given* the tokens of all nodes
above it, so equal prefixes meet in equal nodes and nothing is ever copied:

    root - [The quick brown fox] - [jumps over the lazy] - (a lease's own, unfinished page)
                                 \ [sat on a mat and so]

A node lives as long as a lease holds it, and after that until its page is needed.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxprefill.cache.pages import PageAllocator

PageKey = tuple[int, ...]  # the tokens of one full page


@dataclass(eq=False)
class PrefixNode:
    """One full page of a prefix.

    Attributes:
        parent: the page before it; None for the root, and for a node that is no more.
        is_ready: whether its KV was dispatched; until then only its maker may use it.
        logprobs: of the page's tokens given all before them, None where not known. They depend
            on the prefix alone, so that scoring may skip what was scored before.
        best: the likeliest id in the place of each of these tokens, and its logprob.
    """

    parent: "PrefixNode | None"
    tokens: PageKey
    page: int
    is_ready: bool = False
    num_holders: int = 0
    children: dict[PageKey, "PrefixNode"] = field(default_factory=dict["PageKey", "PrefixNode"])
    logprobs: list[float | None] = field(default_factory=list["float | None"])
    best: list[tuple[int, float] | None] = field(default_factory=list["tuple[int, float] | None"])


@dataclass(eq=False)
class Lease:
    """A request's pages in order; the first `len(nodes)` belong to the tree, the rest to it."""

    pages: "array[int]" = field(default_factory=lambda: array("i"))
    nodes: list[PrefixNode] = field(default_factory=list[PrefixNode])


@dataclass(frozen=True)
class Match:
    """The nodes of a prefix that can be used now.

    Attributes:
        is_pending: another request is computing the page that comes next.
    """

    nodes: tuple[PrefixNode, ...] = ()
    is_pending: bool = False


def store_logprobs(
    nodes: Sequence[PrefixNode],
    position: int,
    logprobs: Sequence[float],
    page_size: int,
    tops: Sequence[Mapping[int, float]] = (),
) -> None:
    """Keeps the logprobs of the tokens from `position` on, as far as they stand in full pages.

    Of `tops`, the likeliest ids in their places if any are known, the first is kept.
    """
    for at, value in enumerate(logprobs, position):
        if at // page_size >= len(nodes):
            return
        node, place = nodes[at // page_size], at % page_size
        node.logprobs = node.logprobs or [None for _ in range(page_size)]
        node.logprobs[place] = value
        if tops:
            node.best = node.best or [None for _ in range(page_size)]
            node.best[place] = max(tops[at - position].items(), key=lambda pair: pair[1])


class PrefixCache:
    """Leases pages to requests, and remembers full ones for whoever comes next.

    Pages that nobody holds are given up oldest first, and a prefix never before what follows it.
    """

    def __init__(self, pages: PageAllocator, *, is_enabled: bool = True) -> None:
        """`pages` is used through this cache alone; disabled, it only leases."""
        self._pages = pages
        self._is_enabled = is_enabled
        self._root = PrefixNode(None, (), -1, is_ready=True)
        # Nodes that no lease holds, oldest first. A lease that holds a node holds its parent, and
        # gives the deeper one back first: so the oldest has no children.
        self._idle: OrderedDict[PrefixNode, None] = OrderedDict()

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return self._pages.page_size

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._pages.num_pages

    @property
    def num_cached(self) -> int:
        """Pages kept for their prefix alone; they can be had when needed."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that can be leased now."""
        return self._pages.num_free + len(self._idle)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return self._pages.pages_for(num_tokens)

    def keys(self, tokens: Sequence[int]) -> list[PageKey]:
        """The tokens of every full page; none when nothing is to be remembered."""
        size = self.page_size
        ends = range(size, len(tokens) + 1, size) if self._is_enabled else ()
        return [tuple(tokens[end - size : end]) for end in ends]

    def match(self, keys: Sequence[PageKey]) -> Match:
        """The longest known prefix of these pages; changes nothing."""
        nodes: list[PrefixNode] = []
        node = self._root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            if not child.is_ready:
                return Match(tuple(nodes), is_pending=True)
            nodes.append(child)
            node = child
        return Match(tuple(nodes))

    def lease(self, match: Match, keys: Sequence[PageKey], num_pages: int) -> Lease | None:
        """`num_pages` pages that begin with the match; None, and nothing taken, if too few.

        None as well if a page of the match has since been given away.

        Full pages beyond the match become nodes that are not ready: see `mark_ready`.
        """
        if any(node.parent is None for node in match.nodes):
            return None
        for node in match.nodes:
            self._hold(node)
        own = self._take(num_pages - len(match.nodes))
        if own is None:
            self._drop(match.nodes)
            return None
        pages = array("i", [*(node.page for node in match.nodes), *own])
        lease = Lease(pages, list(match.nodes))
        for key, page in zip(keys[len(match.nodes) :], own, strict=False):
            node = self._add(lease.nodes[-1] if lease.nodes else self._root, key, page)
            node.num_holders = 1
            lease.nodes.append(node)
        return lease

    def grow(self, lease: Lease, num_pages: int) -> bool:
        """Lengthens a lease to `num_pages`; False, and nothing taken, if there are too few."""
        own = self._take(num_pages - len(lease.pages))
        lease.pages.extend(own or ())
        return own is not None

    def mark_ready(self, lease: Lease, num_tokens: int) -> None:
        """The KV of the lease's first tokens was dispatched: later steps may read it."""
        for node in reversed(lease.nodes[: num_tokens // self.page_size]):
            if node.is_ready:
                return
            node.is_ready = True

    def release(self, lease: Lease, keys: Sequence[PageKey] = ()) -> None:
        """Ends a lease; its ready pages stay known.

        Args:
            lease: left empty.
            keys: the tokens of the full pages behind the lease's nodes whose KV was dispatched:
                generated text, that a next turn of a conversation starts with.
        """
        own = dict(enumerate(lease.pages[len(lease.nodes) :], len(lease.nodes)))
        ready = [node for node in lease.nodes if node.is_ready]
        for node in reversed(lease.nodes[len(ready) :]):
            self._remove(node)
        chain = list[PrefixNode]()
        if len(ready) == len(lease.nodes):
            parent = ready[-1] if ready else self._root
            for index, key in enumerate(keys, len(ready)):
                node = parent.children.get(key)
                if node is None:
                    node = self._add(parent, key, own.pop(index))
                    node.is_ready = True
                elif not node.is_ready:  # another request is computing it
                    break
                chain.append(node)
                parent = node
        self._pages.free(list(own.values()))
        for node in chain:
            self._hold(node)
        self._drop((*ready, *chain))
        lease.pages, lease.nodes = array("i"), []

    def flush(self) -> None:
        """Forgets every page that no lease holds."""
        while self._idle:
            self._evict()

    def _add(self, parent: PrefixNode, key: PageKey, page: int) -> PrefixNode:
        node = PrefixNode(parent, key, page)
        parent.children[key] = node
        return node

    def _hold(self, node: PrefixNode) -> None:
        node.num_holders += 1
        self._idle.pop(node, None)

    def _drop(self, nodes: Sequence[PrefixNode]) -> None:
        for node in reversed(nodes):
            node.num_holders -= 1
            if node.num_holders == 0:
                self._idle[node] = None

    def _take(self, count: int) -> list[int] | None:
        if count > self.num_available:
            return None
        while self._pages.num_free < count:
            self._evict()
        return self._pages.allocate(max(count, 0))

    def _evict(self) -> None:
        self._remove(next(iter(self._idle)))

    def _remove(self, node: PrefixNode) -> None:
        assert node.parent is not None and not node.children, "only a leaf can go"
        self._idle.pop(node, None)
        del node.parent.children[node.tokens]
        node.parent = None
        self._pages.free([node.page])
