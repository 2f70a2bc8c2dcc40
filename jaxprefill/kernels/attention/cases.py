"""Named batches that reference, kernels, tests and benchmarks share, and inputs made for them."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

from jaxprefill.kernels.attention.api import AttentionBackend, RaggedBatch
from jaxprefill.kernels.attention.capabilities import AttentionSpec
from jaxprefill.kernels.attention.tiles import NO_ROW, TileShape, plan_tiles

NUM_LAYERS = 2  # layers whose pages the pool holds; the inputs address the second
_NUM_SPARE_PAGES = 3
_PEAKED_SCALE = 2.5


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """A batch by its lengths: request i has `q_lens[i]` new tokens at the end of `kv_lens[i]`.

    Attributes:
        num_tokens, num_slots, max_context: the compiled shape, padding included.
        is_decode: every request has one new token, in the row of its slot.
        window, soft_cap, has_sinks: see `AttentionSpec`.
    """

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    num_tokens: int = 64
    num_slots: int = 4
    max_context: int = 512
    is_decode: bool = False
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def num_real_tokens(self) -> int:
        """Tokens of requests; the rest of `num_tokens` is padding."""
        return sum(self.q_lens)

    @property
    def spec(self) -> AttentionSpec:
        """What the case asks beyond causality."""
        return AttentionSpec(self.window, self.soft_cap, self.has_sinks)


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Arguments of `api.Attend` for one case, and what a check needs to know of them.

    Attributes:
        pages: each request's pages in order, counted from `first_page`.
        spare_pages: pages of no request, counted likewise.
        sinks: if the case has them.
    """

    tiles: TileShape
    q: Float32[np.ndarray, "T H D"]
    k: Float32[np.ndarray, "T K D"]
    v: Float32[np.ndarray, "T K D"]
    pool: Float32[np.ndarray, "2 K P S D"]
    batch: RaggedBatch
    first_page: int
    pages: tuple[tuple[int, ...], ...]
    spare_pages: tuple[int, ...]
    sinks: Float32[np.ndarray, " H"] | None = None


def make_inputs(
    case: AttentionCase, backend: AttentionBackend, *, peaked: bool = False, seed: int = 0
) -> AttentionInputs:
    """Random inputs; the requests' pages lie scattered over the second layer of the pool.

    `peaked` scales q and k so that few keys take the weight: a near-uniform mean hides errors.
    """
    rng = np.random.default_rng(seed)
    counts = [-(-kv_len // case.page_size) for kv_len in case.kv_lens]
    num_pages = sum(counts) + _NUM_SPARE_PAGES
    order: list[int] = rng.permutation(num_pages).tolist()
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    pages = tuple(tuple(order[end - count : end]) for count, end in zip(counts, ends, strict=True))
    tiles = backend.tile_shape(
        case.num_tokens,
        case.num_slots,
        case.max_context,
        page_size=case.page_size,
        is_decode=case.is_decode,
    )

    def draw(*shape: int, scale: float = 1.0) -> Float32[np.ndarray, "..."]:
        return rng.standard_normal(shape, np.float32) * np.float32(scale)

    scale = _PEAKED_SCALE if peaked else 1.0
    pool_shape = (case.kv_heads, NUM_LAYERS * num_pages, case.page_size, case.head_dim)
    return AttentionInputs(
        tiles=tiles,
        q=draw(case.num_tokens, case.q_heads, case.head_dim, scale=scale),
        k=draw(case.num_tokens, case.kv_heads, case.head_dim, scale=scale),
        v=draw(case.num_tokens, case.kv_heads, case.head_dim),
        pool=np.stack([draw(*pool_shape, scale=scale), draw(*pool_shape)]),
        batch=_make_batch(case, tiles, pages),
        first_page=num_pages,
        pages=pages,
        spare_pages=tuple(order[-_NUM_SPARE_PAGES:]),
        sinks=draw(case.q_heads, scale=2.0) if case.has_sinks else None,
    )


def _make_batch(
    case: AttentionCase, tiles: TileShape, pages: tuple[tuple[int, ...], ...]
) -> RaggedBatch:
    kv_rows = np.full(case.num_tokens, NO_ROW, np.int32)
    q_lens, kv_lens = np.zeros((2, case.num_slots), np.int32)
    q_starts = np.full(case.num_slots, case.num_real_tokens, np.int32)
    page_table = np.zeros((case.num_slots, tiles.pages_per_slot), np.int32)
    start = 0
    for slot, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        positions = np.arange(kv_len - q_len, kv_len)
        own = np.asarray(pages[slot], np.int32)
        at = positions % case.page_size
        kv_rows[start : start + q_len] = own[positions // case.page_size] * case.page_size + at
        q_lens[slot], kv_lens[slot], q_starts[slot] = q_len, kv_len, start
        page_table[slot, : len(own)] = own
        start += q_len
    tile_slot, tile_start = plan_tiles(case.q_lens, tiles.tile_q)
    return RaggedBatch(
        kv_rows=jnp.asarray(kv_rows),
        q_lens=jnp.asarray(q_lens),
        kv_lens=jnp.asarray(kv_lens),
        q_starts=jnp.asarray(q_starts),
        page_table=jnp.asarray(page_table),
        tile_slot=jnp.asarray(_filled(tile_slot, tiles.num_tiles)),
        tile_start=jnp.asarray(_filled(tile_start, tiles.num_tiles)),
        num_tiles=jnp.int32(len(tile_slot)),
    )


def _filled(values: list[int], length: int) -> Int32[np.ndarray, " N"]:
    return np.array(values + [0] * (length - len(values)), np.int32)


def _prefill(name: str, *q_lens: int, prefix: int = 0, **sizes: Any) -> AttentionCase:
    """Every request has `prefix` cached tokens."""
    kv_lens = tuple(prefix + q_len for q_len in q_lens)
    return AttentionCase(name=name, q_lens=q_lens, kv_lens=kv_lens, **sizes)


def _decode(name: str, *kv_lens: int, num_slots: int, **sizes: Any) -> AttentionCase:
    sizes |= {"num_tokens": num_slots, "num_slots": num_slots, "is_decode": True}
    return AttentionCase(name=name, q_lens=(1,) * len(kv_lens), kv_lens=kv_lens, **sizes)


CASES: tuple[AttentionCase, ...] = (
    _prefill("plain", 37),
    _prefill("one_token", 1, num_tokens=8),
    _prefill("tile_16_exact", 16, num_tokens=32),
    _prefill("tile_16_plus_one", 17, num_tokens=32),
    _prefill("tile_32_exact_and_plus_one", 32, 33, num_tokens=128, max_context=128),
    _prefill("tile_64_exact_and_plus_one", 64, 65, 129, num_tokens=512),
    _prefill("many_short", *(1, 2, 3, 5, 7) * 3, num_slots=16, max_context=128),
    _prefill("full_bucket", 40, 24, num_slots=2, max_context=128),
    _prefill("empty_batch", num_tokens=16),
    _prefill("chunk_after_unaligned_prefix", 21, 5, prefix=45, num_tokens=32, max_context=128),
    _prefill("chunk_after_long_prefix", 100, prefix=301, num_tokens=128),
    AttentionCase(
        name="decode_rows_and_chunk",
        q_lens=(1, 30, 1, 1),
        kv_lens=(5, 63, 77, 200),
        num_slots=8,
        max_context=256,
    ),
    AttentionCase(
        name="context_straddles_key_block",
        q_lens=(9, 9, 9, 9),
        kv_lens=(127, 128, 129, 257),
        page_size=8,
    ),
    _prefill("prompt_straddles_key_block", 127, 129, 257, num_tokens=1024),
    _prefill("mha", 23, q_heads=3, kv_heads=3, num_tokens=32, max_context=128),
    _prefill("gqa_3", 23, q_heads=9, kv_heads=3, num_tokens=32, max_context=128),
    _prefill("gqa_7_one_kv_head", 23, q_heads=7, kv_heads=1, num_tokens=32, max_context=128),
    _prefill("gqa_7", 23, q_heads=14, num_tokens=32, max_context=128),
    _prefill("head_dim_80", 23, 8, prefix=140, head_dim=80, num_tokens=32),
    _prefill("head_dim_128", 23, 8, prefix=140, head_dim=128, num_tokens=32),
    _prefill("page_size_1", 23, 8, prefix=140, page_size=1, num_tokens=32),
    _prefill("page_size_8", 23, 8, prefix=140, page_size=8, num_tokens=32),
    _prefill("page_size_128", 23, 8, prefix=140, page_size=128, num_tokens=32),
    _decode("decode_uneven", 300, 1, 129, 17, 128, num_slots=8),
    _decode("decode_full", 2, 127, 257, 16, num_slots=4),
    _decode("decode_one_slot", 40, num_slots=1, max_context=128),
    _decode("decode_empty", num_slots=4, max_context=128),
    _decode("decode_mha_head_dim_80", 9, 150, num_slots=4, q_heads=3, kv_heads=3, head_dim=80),
    _decode("decode_gqa_7_one_kv_head", 9, 150, num_slots=4, q_heads=7, kv_heads=1),
    _decode("decode_page_size_1", 9, 150, num_slots=4, page_size=1),
    _decode("decode_page_size_128", 9, 150, num_slots=4, page_size=128, head_dim=128),
    _prefill("window_inside_tile", 37, 20, window=5),
    _prefill("window_of_one", 23, prefix=140, num_tokens=32, window=1),
    _prefill("window_above_context", 37, 9, window=512),
    _prefill("window_after_long_prefix", 100, prefix=301, num_tokens=128, window=130),
    _prefill("window_starts_at_key_block", 64, 65, prefix=192, num_tokens=256, window=65),
    AttentionCase(
        name="window_uneven_rows_and_chunk",
        q_lens=(1, 30, 1, 1, 20),
        kv_lens=(5, 463, 177, 300, 20),
        num_slots=8,
        window=40,
    ),
    _decode("decode_window_uneven", 300, 1, 129, 17, 128, 500, num_slots=8, window=100),
    _decode("decode_window_starts_at_key_block", 256, 257, 255, 64, num_slots=4, window=128),
    _decode("decode_window_of_one", 130, 1, num_slots=4, page_size=1, window=1),
    _prefill("soft_cap_and_sinks", 37, 5, prefix=140, window=100, soft_cap=1.5, has_sinks=True),
    _decode("decode_soft_cap_and_sinks", 300, 1, 129, num_slots=4, soft_cap=1.5, has_sinks=True),
    AttentionCase(
        name="soft_cap_rows_and_chunk_gqa_7",
        q_lens=(1, 30, 1, 1),
        kv_lens=(5, 63, 77, 200),
        q_heads=14,
        num_slots=8,
        max_context=256,
        soft_cap=3.0,
    ),
    _decode("decode_window_sinks_mha", 150, 1, num_slots=4, q_heads=2, window=9, has_sinks=True),
)
