"""Pages of recent tokens alone: few, as a request gives back what it has gone past. Host only.

A request that goes on at position p reads the `reach` tokens up to it, its own among them:

    pages      0    1    2    3    4    5         p begins page 5; reach: two pages
    request                   |    held   |
    prefixes   gone      kept                     kept while nobody needs the room

A cached prefix is of use from where its last pages are kept.
"""

from collections import OrderedDict
from dataclasses import dataclass

from jaxprefill.cache.pages import PageAllocator


@dataclass(eq=False)
class RecentPage:
    """A page of recent tokens.

    Attributes:
        id: None when it was given away.
        is_kept: whether a cached prefix keeps it when no request holds it.
    """

    id: int | None
    num_holders: int = 0
    is_kept: bool = False


class RecentPages:
    """Hands them out; those that are only kept go when there is need, the longest idle first."""

    def __init__(self, pages: PageAllocator, reach: int) -> None:
        """`pages` are enough for what all requests hold in a step; `reach` in tokens."""
        self._pages = pages
        self._reach = reach
        self._idle: OrderedDict[RecentPage, None] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._pages.num_pages

    @property
    def num_available(self) -> int:
        """Pages that no request holds."""
        return self._pages.num_free + len(self._idle)

    def counts(self) -> dict[str, int]:
        """See `PrefixCache.counts`."""
        return {"total": self.num_pages, "free": self.num_available, "cached": len(self._idle)}

    def first_page(self, position: int) -> int:
        """The first of a request's pages that its token at `position` reads."""
        return max(0, position - self._reach + 1) // self._pages.page_size

    def new(self) -> RecentPage:
        """A page that one request holds."""
        if not self._pages.num_free:
            self.forget(next(iter(self._idle)))
        found = self._pages.allocate(1)
        assert found is not None, "the pool holds what all requests need in a step"
        return RecentPage(found[0], num_holders=1)

    def hold(self, page: RecentPage) -> None:
        """One more request reads it."""
        page.num_holders += 1
        self._idle.pop(page, None)

    def drop(self, page: RecentPage) -> None:
        """One request less does."""
        page.num_holders -= 1
        if page.num_holders == 0:
            self._idle[page] = None
            if not page.is_kept:
                self.forget(page)

    def forget(self, page: RecentPage) -> None:
        """No prefix keeps it any more; requests that hold it still do."""
        page.is_kept = False
        if page in self._idle:
            del self._idle[page]
            assert page.id is not None, "an idle page is one of the pool"
            self._pages.free([page.id])
            page.id = None
