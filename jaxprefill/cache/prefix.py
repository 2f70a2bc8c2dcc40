r"""Pages of known prefixes, shared by whoever starts with the same tokens. Host only, no jax.

A tree of full pages: a node's page holds the KV of its tokens *given* the tokens of all nodes
above it, so equal prefixes meet in equal nodes and nothing is ever copied:

    root - [The quick brown fox] - [jumps over the lazy] - (a lease's own, unfinished page)
                                 \ [sat on a mat and so]

A node lives as long as a lease holds it, and after that until its page is needed.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from jaxprefill.cache.pages import PageAllocator
from jaxprefill.cache.recent import RecentPage, RecentPages

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
        recent: what it has of pools with recent tokens; its id is None when that is gone.
    """

    parent: "PrefixNode | None"
    tokens: PageKey
    page: int
    is_ready: bool = False
    num_holders: int = 0
    children: dict[PageKey, "PrefixNode"] = field(default_factory=dict["PageKey", "PrefixNode"])
    logprobs: list[float | None] = field(default_factory=list["float | None"])
    best: list[tuple[int, float] | None] = field(default_factory=list["tuple[int, float] | None"])
    recent: RecentPage = field(default_factory=lambda: RecentPage(None))


@dataclass(eq=False)
class Lease:
    """A request's pages in order; the first `len(nodes)` belong to the tree, the rest to it.

    Attributes:
        recent: pages of recent tokens, of the request's page number `recent_first` and onwards.
        twins: nodes that hold what its first own pages will, but without recent tokens.
    """

    pages: "array[int]" = field(default_factory=lambda: array("i"))
    nodes: list[PrefixNode] = field(default_factory=list[PrefixNode])
    recent: deque[RecentPage] = field(default_factory=deque[RecentPage])
    recent_first: int = 0
    twins: list[PrefixNode] = field(default_factory=list[PrefixNode])

    def recent_ids(self) -> tuple[int, ...]:
        """The ids of `recent`."""
        return tuple(page.id for page in self.recent if page.id is not None)


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

    def __init__(
        self, pages: PageAllocator, *, recent: RecentPages | None = None, is_enabled: bool = True
    ) -> None:
        """`pages` and `recent` are used through this cache alone; disabled, it only leases.

        Args:
            pages: of pools that keep all tokens.
            recent: of those that keep recent ones; None: there are none.
            is_enabled: whether prefixes are remembered.
        """
        self._pages = pages
        self._recent = recent
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

    def idle(self, nodes: Sequence[PrefixNode]) -> set[PrefixNode]:
        """Those of a prefix that no lease holds: its last ones."""
        return set(takewhile(self._idle.__contains__, reversed(nodes)))

    def counts(self) -> dict[str, dict[str, int] | None]:
        """Pages in all, free, and of those the ones that keep a prefix; null: there are no such."""
        own = {"total": self.num_pages, "free": self.num_available, "cached": self.num_cached}
        return {"kv_pages": own, "recent_pages": self._recent and self._recent.counts()}

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

    @property
    def has_recent(self) -> bool:
        """Whether a prefix is of use only from where recent tokens are kept."""
        return self._recent is not None

    def startable(self, nodes: Sequence[PrefixNode]) -> tuple[PrefixNode, ...]:
        """As much of a prefix as a request can go on from: what comes next reads recent tokens."""
        if self._recent is None:
            return tuple(nodes)
        count = run = 0
        for number, node in enumerate(nodes, 1):
            run = 0 if node.recent.id is None else run + 1
            if run >= number - self._recent.first_page(number * self.page_size):
                count = number
        return tuple(nodes[:count])

    def lease(self, match: Match, keys: Sequence[PageKey], num_pages: int) -> Lease | None:
        """`num_pages` pages that begin with the match; None, and nothing taken, if too few.

        None as well if a page of the match has since been given away.

        Full pages beyond the match become nodes that are not ready: see `mark_ready`. Where there
        are such nodes already, the request has pages of its own instead.
        """
        if any(node.parent is None for node in match.nodes):
            return None
        if len(self.startable(match.nodes)) < len(match.nodes):
            return None
        for node in match.nodes:
            self._hold(node)
        own = self._take(num_pages - len(match.nodes))
        if own is None:
            self._drop(match.nodes)
            return None
        pages = array("i", [*(node.page for node in match.nodes), *own])
        lease = Lease(pages, list(match.nodes))
        parent = lease.nodes[-1] if lease.nodes else self._root
        for key, page in zip(keys[len(match.nodes) :], own, strict=False):
            known = parent.children.get(key)
            if known is None and not lease.twins:
                parent = self._add(parent, key, page)
                parent.num_holders = 1
                lease.nodes.append(parent)
            elif known is not None:
                lease.twins.append(known)
                parent = known
            else:
                break
        if self._recent is not None:
            lease.recent_first = self._recent.first_page(len(match.nodes) * self.page_size)
            for node in match.nodes[lease.recent_first :]:
                self._recent.hold(node.recent)
                lease.recent.append(node.recent)
        return lease

    def grow(self, lease: Lease, num_pages: int) -> bool:
        """Lengthens a lease to `num_pages`; False, and nothing taken, if there are too few."""
        own = self._take(num_pages - len(lease.pages))
        lease.pages.extend(own or ())
        return own is not None

    def extend(self, lease: Lease, num_tokens: int) -> None:
        """Gives the lease recent pages up to so many tokens: its next step writes them."""
        if self._recent is None:
            return
        for number in range(lease.recent_first + len(lease.recent), self.pages_for(num_tokens)):
            page = self._recent.new()
            lease.recent.append(page)
            if number < len(lease.nodes):
                lease.nodes[number].recent = page
                page.is_kept = True

    def trim(self, lease: Lease, num_tokens: int) -> None:
        """Gives back recent pages that a lease of so many computed tokens reads no more."""
        if self._recent is None:
            return
        while lease.recent and lease.recent_first < self._recent.first_page(num_tokens):
            at = lease.recent_first - len(lease.nodes)
            if 0 <= at < len(lease.twins):
                _keep(lease.recent[0], lease.twins[at])
            self._recent.drop(lease.recent.popleft())
            lease.recent_first += 1

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
                if 0 <= index - lease.recent_first < len(lease.recent):
                    _keep(lease.recent[index - lease.recent_first], node)
                chain.append(node)
                parent = node
        self._pages.free(list(own.values()))
        for page in lease.recent:
            assert self._recent is not None, "it handed the page out"
            self._recent.drop(page)
        for node in chain:
            self._hold(node)
        self._drop((*ready, *chain))
        lease.pages, lease.nodes, lease.twins = array("i"), [], []
        lease.recent, lease.recent_first = deque(), 0

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
        if self._recent is not None:
            self._recent.forget(node.recent)


def _keep(page: RecentPage, node: PrefixNode) -> None:
    """A node that lacks recent tokens gets those that another request computed anew."""
    if node.parent is not None and node.is_ready and node.recent.id is None and not page.is_kept:
        node.recent = page
        page.is_kept = True
