"""The meaning of the op in NumPy and float64, one token at a time."""

from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int

from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.latent_attention.pallas_triton import LatentKeys
from jaxprefill.kernels.top_k import EntryPages


def reference_latent_attention(
    q: Float[Any, "T H D"], keys: LatentKeys, sinks: Float[Any, " H"], batch: RaggedBatch
) -> Float64[np.ndarray, "T H D"]:
    """What `attend_latent` computes, of its inputs as they are; zeros in padding's rows."""
    q, sinks = np.asarray(q, np.float64), np.asarray(sinks, np.float64)
    out = np.zeros_like(q)
    lengths = zip(*map(np.asarray, (batch.q_starts, batch.q_lens, batch.kv_lens)), strict=True)
    for slot, (start, q_len, kv_len) in enumerate(lengths):
        for row, position in zip(
            range(start, start + q_len), range(kv_len - q_len, kv_len), strict=True
        ):
            values = _values(keys, batch, slot, row, position)
            scores = np.concatenate([q[row] @ values.T, sinks[:, None]], axis=1)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[row] = (weights / weights.sum(1, keepdims=True))[:, :-1] @ values
    return out


def _values(
    keys: LatentKeys, batch: RaggedBatch, slot: int, row: int, position: int
) -> Float64[np.ndarray, "k D"]:
    """All that one token sees."""
    recent = np.arange(max(position - keys.reach + 1, 0), position + 1)
    values = [_read(keys.window, keys.recent_table, slot, recent)]
    if keys.entries is not None:
        seen = np.arange((position + 1) // keys.entries.rate)
        if keys.chosen is not None:
            seen = np.intersect1d(seen, np.asarray(keys.chosen)[row])
        values.append(_read(keys.entries, batch.page_table, slot, seen))
    return np.concatenate(values)


def _read(
    pages: EntryPages, table: Int[Any, "R C"], slot: int, numbers: Int[np.ndarray, " k"]
) -> Float64[np.ndarray, "k D"]:
    """Entries of a request; each is where the last of its tokens would be."""
    last = (numbers + 1) * pages.rate - 1
    page = np.asarray(table)[slot, last // pages.page_size % table.shape[1]]
    row = last % pages.page_size // min(pages.rate, pages.page_size)
    return np.asarray(pages.keys, np.float64)[int(pages.first_page) + page, row]
