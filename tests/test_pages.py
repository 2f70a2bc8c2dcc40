"""The page allocator against a model of it: nothing lost, nothing doubled."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxprefill.cache.pages import PageAllocator
from jaxprefill.errors import CapacityError


def test_pages_for_counts_whole_pages():
    pages = PageAllocator(4, 16)
    assert [pages.pages_for(n) for n in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]


def test_too_many_pages_take_none():
    pages = PageAllocator(4, 16)
    assert pages.allocate(5) is None and pages.num_free == 4


@pytest.mark.parametrize("page", [0, -1, 4, 99])
def test_freeing_a_page_that_is_not_in_use_is_refused(page):
    with pytest.raises(CapacityError, match=str(page)):
        PageAllocator(4, 16).free([page])


def test_an_empty_pool_is_refused():
    with pytest.raises(CapacityError):
        PageAllocator(0, 16)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(st.integers(0, 6), st.none()), max_size=60), st.randoms())
def test_no_page_is_lost_or_handed_out_twice(steps, random):
    pages, held = PageAllocator(10, 16), []
    for count in steps:
        if count is None and held:
            pages.free(held.pop(random.randrange(len(held))))
        elif count is not None:
            got = pages.allocate(count)
            assert (got is None) == (count > 10 - sum(map(len, held)))
            held.append(got or [])
        used = [page for part in held for page in part]
        assert len(used) == len(set(used)) and pages.num_free == 10 - len(used)
        assert all(0 <= page < 10 for page in used)
