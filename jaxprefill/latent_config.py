"""What DeepSeek-V4 adds to a decoder's sizes, as plain host data."""

from dataclasses import dataclass
from typing import Literal, get_args

from jaxprefill.errors import ConfigError

# Beside the sliding window, a layer's queries see: nothing; the best compressed entries, which
# an indexer picks (ratio 4); all of few, heavily compressed entries (ratio 128).
LayerKind = Literal["sliding", "sparse", "heavy"]


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Latent attention over a window and compressed entries, and hyper-connections.

    Attributes:
        layer_kinds: what each layer's queries see.
        hash_layers: whether each layer's experts are chosen by token id alone.
        query_rank: width of the latent that queries, and the indexer's, are made of.
        num_groups, group_rank: of the output projection: heads in a group share the first half.
        sparse_rate, heavy_rate: tokens that one compressed entry stands for; powers of two.
        index_heads, index_dim, index_top_k: the indexer's, and how many entries it picks.
        num_streams: residual streams that hyper-connections mix (arXiv 2512.24880).
        sinkhorn_steps: normalisations that make the mixing doubly stochastic.
        swiglu_limit: gate is cut above it, up beyond it on either side.
    """

    layer_kinds: tuple[LayerKind, ...]
    hash_layers: tuple[bool, ...]
    query_rank: int
    num_groups: int
    group_rank: int
    sparse_rate: int
    heavy_rate: int
    index_heads: int
    index_dim: int
    index_top_k: int
    num_streams: int
    sinkhorn_steps: int
    hyper_eps: float
    swiglu_limit: float

    def __post_init__(self) -> None:
        for kind in self.layer_kinds:
            if kind not in get_args(LayerKind):
                raise ConfigError(
                    f"model config: layer_kinds must be of {', '.join(get_args(LayerKind))}, "
                    f"got {kind!r}"
                )
        if len(self.hash_layers) != len(self.layer_kinds):
            raise ConfigError(
                f"model config: hash_layers must name all {len(self.layer_kinds)} layers, "
                f"got {len(self.hash_layers)}"
            )
        for name in ("sparse_rate", "heavy_rate"):
            rate = getattr(self, name)
            if rate < 1 or rate & (rate - 1):
                raise ConfigError(f"model config: {name} must be a power of two, got {rate}")
