"""Named batches that reference, kernel and tests share, and inputs made for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.attention.tiles import plan_tiles, tile_capacity
from jaxprefill.kernels.latent_attention.pallas_triton import LatentKeys
from jaxprefill.kernels.top_k import EntryPages

NOWHERE = 10**6  # what stale columns of page tables hold
_FIRST_PAGE = 2  # of the layer


@dataclass(frozen=True, kw_only=True)
class LatentCase:
    """A batch by its lengths: request i has `q_lens[i]` new tokens at the end of `kv_lens[i]`.

    Attributes:
        q_lens, kv_lens: zeros where there is no request.
        num_tokens: padding included.
        tile_q: tokens a tile; 1 is decode.
        reach, top_k: see `LatentKeys`; top_k None: tokens see all entries.
        rate: tokens that an entry stands for; None: no entries.
        splits: of each token's keys; None: as is chosen for the shape.
    """

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_tokens: int
    tile_q: int = 1
    page_size: int = 16
    num_heads: int = 16
    dim: int = 16
    reach: int = 21
    rate: int | None = None
    top_k: int | None = None
    splits: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def num_real_tokens(self) -> int:
        """Tokens of requests; the rest of `num_tokens` is padding."""
        return sum(self.q_lens)


class LatentInputs(NamedTuple):
    """Arguments of `attend_latent`; NaN in padding and in whatever no token may see."""

    q: Float[Array, "T H D"]
    keys: LatentKeys
    sinks: Float32[Array, " H"]
    batch: RaggedBatch


def make_latent_inputs(case: LatentCase, dtype: Any, *, seed: int = 0) -> LatentInputs:
    """Random inputs: few keys take the weight, and pages lie in no order."""
    rng, lengths = np.random.default_rng(seed), (case.q_lens, case.kv_lens)
    columns = (max(case.q_lens) + case.reach) // case.page_size + 2
    first = [
        max(0, kv_len - q_len - case.reach + 1) for q_len, kv_len in zip(*lengths, strict=True)
    ]
    own = [np.arange(*pair) for pair in zip(first, case.kv_lens, strict=True)]
    window, recent = _scatter(case, own, columns, 1, dtype, rng)
    columns = -(-max(case.kv_lens) // case.page_size)
    table, entries = np.full((len(case.q_lens), columns), NOWHERE, np.int32), None
    if case.rate is not None:
        own = [np.arange(kv_len // case.rate) for kv_len in case.kv_lens]
        entries, table = _scatter(case, own, columns, case.rate, dtype, rng)
    q = rng.normal(size=(case.num_tokens, case.num_heads, case.dim)) * (4 * case.dim**-0.5)
    q[case.num_real_tokens :] = np.nan
    return LatentInputs(
        q=jnp.asarray(q, dtype),
        keys=LatentKeys(window, jnp.asarray(recent), case.reach, entries, _choose(case, rng)),
        sinks=jnp.asarray(2 * rng.normal(size=case.num_heads), jnp.float32),
        batch=_make_batch(case, table, recent),
    )


def _scatter(
    case: LatentCase,
    numbers: Sequence[Int[np.ndarray, " _"]],  # of each request
    columns: int,
    rate: int,
    dtype: Any,
    rng: np.random.Generator,
) -> tuple[EntryPages, Int32[np.ndarray, "R columns"]]:
    """(pages with these entries of each request, the table of the pages that have any)."""
    size, table = case.page_size, np.full((len(numbers), columns), NOWHERE, np.int32)
    last = [(own + 1) * rate - 1 for own in numbers]  # tokens
    used = [(slot, page) for slot, own in enumerate(last) for page in np.unique(own // size)]
    for (slot, page), free in zip(used, rng.permutation(len(used)), strict=True):
        table[slot, page % columns] = free
    keys = np.full((_FIRST_PAGE + len(used) + 1, max(size // rate, 1), case.dim), np.nan)
    for slot, own in enumerate(last):
        page = _FIRST_PAGE + table[slot, own // size % columns]
        keys[page, own % size // min(rate, size)] = rng.normal(size=(len(own), case.dim))
    return EntryPages(jnp.asarray(keys, dtype), jnp.int32(_FIRST_PAGE), size, rate), table


def _choose(case: LatentCase, rng: np.random.Generator) -> Int32[Array, "T k"] | None:
    """Random entries for each token, of those that it may see."""
    if case.rate is None or case.top_k is None:
        return None
    chosen = np.full((case.num_tokens, case.top_k), max(case.kv_lens) // case.rate)
    row = 0
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        for position in range(kv_len - q_len, kv_len):
            best = rng.permutation((position + 1) // case.rate)[: case.top_k]
            chosen[row, : len(best)] = best
            row += 1
    chosen[row:] = -NOWHERE
    return jnp.asarray(chosen, jnp.int32)


def _make_batch(
    case: LatentCase, table: Int32[np.ndarray, "R W"], recent: Int32[np.ndarray, "R C"]
) -> RaggedBatch:
    slots, starts = plan_tiles(case.q_lens, case.tile_q)
    spare = tile_capacity(case.num_tokens, len(case.q_lens), case.tile_q) - len(slots)
    integers = (
        np.zeros(case.num_tokens), case.q_lens, case.kv_lens,
        np.cumsum((0, *case.q_lens[:-1])), table, slots + [0] * spare, starts + [0] * spare,
        len(slots), recent,
    )  # fmt: skip
    names = (
        "kv_rows", "q_lens", "kv_lens", "q_starts", "page_table", "tile_slot", "tile_start",
        "num_tiles", "recent_table",
    )  # fmt: skip
    arrays = {
        name: jnp.asarray(value, jnp.int32) for name, value in zip(names, integers, strict=True)
    }
    return RaggedBatch(**arrays)


def _decode(name: str, *kv_lens: int, num_slots: int, **sizes: Any) -> LatentCase:
    spare = (0,) * (num_slots - len(kv_lens))
    q_lens = (1,) * len(kv_lens) + spare
    return LatentCase(
        name=name, q_lens=q_lens, kv_lens=kv_lens + spare, num_tokens=num_slots, **sizes
    )


_PREFILL: dict[str, Any] = dict(
    q_lens=(9, 1, 0), kv_lens=(300, 7, 0), num_tokens=13, tile_q=4, num_heads=18
)
LATENT_CASES: tuple[LatentCase, ...] = (
    LatentCase(name="sliding", **_PREFILL),
    LatentCase(name="sparse", rate=4, top_k=20, **_PREFILL),
    LatentCase(name="heavy", rate=8, page_size=4, **_PREFILL),
    LatentCase(name="sparse_in_three_splits", rate=4, top_k=60, splits=3, **_PREFILL),
    _decode("decode_sliding", 300, 1, num_slots=4),
    _decode("decode_1", 8000, num_slots=1, rate=8),
    _decode("decode_1_chosen", 3000, num_slots=1, rate=4, top_k=512, num_heads=18),
    _decode(
        "decode_16", 3000, 1, 7, 2000, 64, 65, 300, 1, 2500, 128, 3, num_slots=16, rate=4,
        top_k=512, page_size=64, reach=128,
    ),
    _decode(
        "decode_64", *(1, 3, 900, 40, 2100, 8, 512, 7, 1300) * 6, num_slots=64, rate=8, page_size=4
    ),
)  # fmt: skip
