"""One layer's part of a pool: rows of pages, read and written by page id."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.attention.api import as_numbers, as_stored
from jaxprefill.kernels.top_k import EntryPages


class PagedPool(NamedTuple):
    """A pool [parts, 1, layers * pages, rows, D] and where a layer's pages begin in it.

    Attributes:
        page_size: tokens a page stands for; a page may have fewer rows, or one only.
    """

    array: Shaped[Array, "parts one P rows D"]
    first_page: Int32[Array, ""]
    page_size: int

    def read(self, page: Int32[Array, "*at"], row: Int32[Array, "*at"]) -> Float[Array, "..."]:
        """[parts, *at, D]; whatever is there where nothing was written."""
        return as_numbers(self.array[:, 0, page + self.first_page, row])

    def write(
        self,
        page: Int32[Array, " C"],
        row: Int32[Array, " C"],
        values: Float[Array, "parts C D"],
        is_written: Bool[Array, " C"],
    ) -> "PagedPool":
        """The pool with these rows; at most one is written for each place."""
        at = jnp.where(is_written, page + self.first_page, self.array.shape[2])
        stored = as_stored(values, self.array.dtype)
        return self._replace(array=self.array.at[:, 0, at, row].set(stored, mode="drop"))

    def read_position(
        self, pages: Int32[Array, " W"], position: Int32[Array, "*at"], rate: int = 1
    ) -> Float[Array, "*at D"]:
        """The row of each position, or of the entry that stands for `rate` tokens up to it."""
        page = pages[position // self.page_size % len(pages)]
        return self.read(page, self.row_of(position, rate))[0]

    def row_of(self, position: Int32[Array, "*at"], rate: int = 1) -> Int32[Array, "*at"]:
        """The row in its page."""
        return position % self.page_size // min(rate, self.page_size)

    def entries(self, rate: int = 1) -> EntryPages:
        """The same for kernels; of a pool with one part."""
        return EntryPages(as_numbers(self.array[0, 0]), self.first_page, self.page_size, rate)


def recent_table(batch: RaggedBatch) -> Int32[Array, "R C"]:
    """The table of recent pages; a batch without one numbers them as all others."""
    return batch.page_table if batch.recent_table is None else batch.recent_table
