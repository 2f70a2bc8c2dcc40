"""What one step computes, as host integers.

The scheduler makes it, padding turns it into one buffer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxprefill.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """How the next token of a row is chosen.

    Attributes:
        position: index in the sequence of the token to be sampled; fixes its random stream.
        num_generated: tokens sampled before this one.
        stop_ids: ids banned while fewer than `params.min_tokens` were generated.
        allowed: one bit for each id that the output's grammar allows; None: it has none.
    """

    params: SamplingParams
    seed: int
    position: int
    num_generated: int
    stop_ids: frozenset[int] = frozenset()
    allowed: NDArray[np.int32] | None = None


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """One request's share of a step: `q_len` new tokens at the end of `kv_len` known ones.

    Attributes:
        slot: the request's place in the device's per-request arrays.
        token_ids: the new tokens; None means one token, the last one sampled into `slot`,
            which the device knows and the host may not yet.
        pages: KV pages of the request, in order, enough for `kv_len` tokens.
        sample: how to choose the next token, or None.
        recent: its pages of recent tokens, of page number `recent_first` and onwards; of models
            that have such.
        num_shared: leading tokens whose KV was there before; among the new ones, those are
            computed for their hidden rows alone and write no KV.
        label_ids: ids whose score is wanted after the last new token.
        score_ids: (offset, targets): the logprob of `targets[i]` is wanted after new token
            `offset + i`.
        pool_span: (offset, count): new tokens whose hidden rows are to be added up.
        is_classified: whether the classifier reads the last new token.
    """

    request_id: str
    slot: int
    token_ids: Sequence[int] | None
    kv_len: int
    pages: Sequence[int]
    recent: Sequence[int] = ()
    recent_first: int = 0
    num_shared: int = 0
    sample: SampleSpec | None = None
    label_ids: Sequence[int] = ()
    score_ids: tuple[int, Sequence[int]] = (0, ())
    pool_span: tuple[int, int] = (0, 0)
    is_classified: bool = False

    @property
    def q_len(self) -> int:
        """Number of new tokens."""
        return 1 if self.token_ids is None else len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one step; `is_decode` when every row is one sampled token."""

    rows: tuple[BatchRow, ...]
    is_decode: bool

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding not counted."""
        return sum(row.q_len for row in self.rows)

    @property
    def max_context(self) -> int:
        """Longest kv_len of the rows, in tokens."""
        return max((row.kv_len for row in self.rows), default=0)
