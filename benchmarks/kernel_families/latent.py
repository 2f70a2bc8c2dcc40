"""DeepSeek-V4-Flash's sizes, and the integers of a batch of requests that are long already."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from benchmarks.cases import Case
from benchmarks.context_memory import PAGE, flash_config
from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.attention.cases import AttentionCase, make_inputs
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.models.deepseek_v4.modules import latent_of

_FLASH = flash_config(1 << 20)
_LATENT = latent_of(_FLASH)


class Sizes(NamedTuple):
    """Of one layer."""

    heads: int
    dim: int
    reach: int
    rates: dict[str, int]  # kind of layer -> tokens of an entry
    top_k: int
    index_heads: int
    index_dim: int


FLASH = Sizes(
    heads=_FLASH.num_q_heads,
    dim=_FLASH.head_dim,
    reach=_FLASH.sliding_window or 0,
    rates={"sparse": _LATENT.sparse_rate, "heavy": _LATENT.heavy_rate},
    top_k=_LATENT.index_top_k,
    index_heads=_LATENT.index_heads,
    index_dim=_LATENT.index_dim,
)
TINY = Sizes(16, 16, 20, {"sparse": 4, "heavy": 32}, 8, 16, 16)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Requests of one length, as `benchmarks.cases` writes them; tokens are all real.

    Attributes:
        batch: with a table of recent pages, which are numbered apart.
        num_pages, num_recent: of a layer, in all requests.
    """

    case: Case
    batch: RaggedBatch
    tile_q: int
    num_pages: int
    num_recent: int

    @property
    def length(self) -> int:
        """Tokens of a request."""
        return self.case.prefix + self.case.num_tokens // self.case.num_requests

    def slot_and_position(self) -> tuple[Any, Any]:
        """Of each token."""
        each = self.case.num_tokens // self.case.num_requests
        token = jnp.arange(self.case.num_tokens)
        return token // each, self.case.prefix + token % each


def make_batch(text: str, reach: int) -> Batch:
    """Pages lie scattered; tiles are those of the backend that serves such models."""
    case = Case.parse(text)
    length = case.prefix + max(case.lens())
    sizes = AttentionCase(
        name=text,
        q_lens=tuple(case.lens()),
        kv_lens=tuple(case.prefix + own for own in case.lens()),
        q_heads=1, kv_heads=1, head_dim=1, page_size=PAGE, num_tokens=case.num_tokens,
        num_slots=case.num_requests, max_context=-(-length // PAGE) * PAGE,
        is_decode=case.is_decode,
    )  # fmt: skip
    inputs = make_inputs(sizes, XLA)
    columns = (max(case.lens()) + reach) // PAGE + 2
    recent = jnp.arange(case.num_requests * columns, dtype=jnp.int32)
    batch = inputs.batch._replace(recent_table=recent.reshape(case.num_requests, columns))
    return Batch(
        case=case, batch=batch, tile_q=inputs.tiles.tile_q, num_pages=inputs.first_page,
        num_recent=len(recent),
    )  # fmt: skip
