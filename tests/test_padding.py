"""A batch as one buffer: packing, sentinels, read-only, nothing stale, nothing mutated."""

import copy
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxprefill.batch import Batch, BatchRow
from jaxprefill.errors import CapacityError
from jaxprefill.kernels.attention.tiles import TileShape, tile_capacity
from jaxprefill.prefill import padding
from jaxprefill.prefill.buckets import ShapeKey
from jaxprefill.prefill.forward import unpack
from jaxprefill.prefill.padding import NO_ROW, BufferLayout, pad

PAGE, KEY, TILE_Q = 4, ShapeKey(32, 5, 64), 4
LAYOUT = BufferLayout(KEY, TileShape(TILE_Q, 16, tile_capacity(32, 5, TILE_Q), 16), PAGE)


@pytest.fixture(scope="module", autouse=True, params=["lists", "arrays"])
def way(request):
    """Short rows are written as lists, long ones as arrays: every test here sees both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padding, "_LONG_ROW", 0 if request.param == "arrays" else 10**9)
        yield request.param


def make_row(index: int, q_len: int, prefix: int, *, is_sampled: bool = False) -> BatchRow:
    kv_len = q_len + prefix
    pages = [100 * index + page for page in range(-(-kv_len // PAGE) + 1)]
    tokens = None if is_sampled else tuple(range(1000 * index, 1000 * index + q_len))
    return BatchRow(request_id=str(index), slot=index, token_ids=tokens, kv_len=kv_len, pages=pages)


def make_batch(*shape: tuple[int, int]) -> Batch:
    rows = tuple(make_row(i + 1, q, prefix) for i, (q, prefix) in enumerate(shape))
    return Batch(rows=rows, is_decode=False)


def test_real_tokens_are_packed_and_padding_belongs_to_no_request():
    fields = LAYOUT.fields(pad(make_batch((5, 0), (2, 7)), LAYOUT))
    assert fields["num_tokens"] == 7
    assert fields["ids"].tolist() == [*range(1000, 1005), 2000, 2001, *[0] * 25]
    assert fields["positions"][:7].tolist() == [0, 1, 2, 3, 4, 7, 8]
    assert fields["q_lens"].tolist() == [5, 2, 0, 0, 0]
    assert fields["kv_lens"].tolist() == [5, 9, 0, 0, 0]
    # Sentinels start where the real tokens end, so that offsets stay monotone.
    assert fields["q_starts"].tolist() == [0, 5, 7, 7, 7]
    assert (fields["kv_rows"][7:] == NO_ROW).all()


def test_new_tokens_get_the_pool_rows_of_their_pages():
    fields = LAYOUT.fields(pad(make_batch((2, 7)), LAYOUT))
    # Positions 7 and 8 lie in the second and third page of four tokens.
    assert fields["kv_rows"][:2].tolist() == [101 * PAGE + 3, 102 * PAGE]
    assert fields["page_table"][0, :3].tolist() == [100, 101, 102]
    assert not fields["page_table"][0, 3:].any() and not fields["page_table"][1:].any()


def test_a_sampled_token_is_named_by_its_slot():
    batch = Batch(rows=(make_row(3, 1, 6, is_sampled=True),), is_decode=True)
    assert LAYOUT.fields(pad(batch, LAYOUT))["ids"][0] == -4


def test_the_buffer_cannot_be_written_after_dispatch():
    buffer = pad(make_batch((3, 0)), LAYOUT)
    with pytest.raises(ValueError, match="read-only"):
        buffer[0] = 1


def test_the_batch_is_left_as_it_was():
    batch = make_batch((3, 1), (4, 0))
    before = copy.deepcopy(batch)
    pad(batch, LAYOUT)
    assert batch == before


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (make_batch((33, 0)), "33"),
        (make_batch(*[(1, 0)] * 6), "requests"),
        (make_batch((2, 63)), "context"),
    ],
)
def test_a_batch_beyond_the_shape_is_refused(batch, what):
    with pytest.raises(CapacityError, match=what):
        pad(batch, LAYOUT)


rows = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 58)), min_size=0, max_size=5)


@settings(deadline=None)
@given(rows)
def test_padding_then_slicing_gives_the_batch_back(shape):
    batch = make_batch(*shape)
    fields = LAYOUT.fields(pad(batch, LAYOUT))
    for index, row in enumerate(batch.rows):
        start, q_len = fields["q_starts"][index], fields["q_lens"][index]
        assert fields["ids"][start : start + q_len].tolist() == list(row.token_ids)
        positions = fields["positions"][start : start + q_len]
        assert positions.tolist() == list(range(row.kv_len - row.q_len, row.kv_len))
        table = fields["page_table"][index]
        rows_of = table[positions // PAGE] * PAGE + positions % PAGE
        assert fields["kv_rows"][start : start + q_len].tolist() == rows_of.tolist()
    assert fields["num_tokens"] == fields["q_lens"].sum()


@settings(deadline=None)
@given(rows)
def test_every_word_is_written_on_every_call(shape):
    """np.empty hands out what was there before: two poisons must give one result."""
    batch, found = make_batch(*shape), []
    for poison in (-77, 2**30):
        real_empty = np.empty
        np.empty = lambda size, dtype, value=poison: np.full(size, value, dtype)
        try:
            found.append(pad(batch, LAYOUT))
        finally:
            np.empty = real_empty
    np.testing.assert_array_equal(*found)


def test_tokens_that_are_shared_write_no_row():
    row = replace(make_row(1, 6, 5), num_shared=8)
    fields = LAYOUT.fields(pad(Batch(rows=(row, make_row(2, 1, 3)), is_decode=False), LAYOUT))
    assert fields["positions"][:7].tolist() == [5, 6, 7, 8, 9, 10, 3]
    rows = [NO_ROW] * 3 + [102 * PAGE, 102 * PAGE + 1, 102 * PAGE + 2, 200 * PAGE + 3]
    assert fields["kv_rows"][:7].tolist() == rows


def test_tokens_of_a_request_with_recent_pages_get_the_rows_of_those():
    layout = replace(LAYOUT, recent_pages=3)
    row = replace(make_row(1, 6, 9), num_shared=8, recent=(7, 2, 5), recent_first=1)
    fields = layout.fields(pad(Batch(rows=(row,), is_decode=False), layout))
    rows = [2 * PAGE + 1, 2 * PAGE + 2, 2 * PAGE + 3, 5 * PAGE, 5 * PAGE + 1, 5 * PAGE + 2]
    assert fields["kv_rows"][:6].tolist() == rows
    assert fields["recent_table"][0].tolist() == [5, 7, 2]  # page number n in column n modulo 3
    assert fields["page_table"][0, :4].tolist() == [100, 101, 102, 103]


def test_kernels_of_models_without_recent_pages_are_handed_no_table_of_them():
    for layout, shape in ((LAYOUT, None), (replace(LAYOUT, recent_pages=3), (5, 3))):
        batch = jax.eval_shape(partial(unpack, layout=layout), pad(make_batch(), layout)).batch
        assert getattr(batch.recent_table, "shape", None) == shape
