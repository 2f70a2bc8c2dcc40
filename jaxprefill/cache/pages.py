"""Which KV page belongs to whom. Host integers; imports no jax."""

from jaxprefill.errors import CapacityError


class PageAllocator:
    """Hands out pages of a fixed pool; knows nothing of what they hold."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """A pool of `num_pages` pages of `page_size` tokens each."""
        if num_pages < 1 or page_size < 1:
            raise CapacityError(
                f"a page pool needs at least one page of one token, got {num_pages} pages of "
                f"{page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_used = [False] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be handed out."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_used[page] = True
        return pages

    def free(self, pages: list[int]) -> None:
        """Takes pages back.

        Raises:
            CapacityError: a page is not in use: freed twice, or never handed out.
        """
        for page in pages:
            if not 0 <= page < self.num_pages or not self._is_used[page]:
                raise CapacityError(f"page {page} is not in use; it was freed twice or never taken")
            self._is_used[page] = False
            self._free.append(page)
