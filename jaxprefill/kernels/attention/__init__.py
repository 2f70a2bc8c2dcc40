"""Causal ragged paged attention: prefill, chunked prefill, mixed batches and decode in one op."""

from jaxprefill.kernels.attention.api import AttentionBackend, RaggedBatch, pool_dtype
from jaxprefill.kernels.attention.capabilities import (
    CAUSAL,
    AttentionNeeds,
    AttentionSpec,
    Capabilities,
)
from jaxprefill.kernels.attention.select import select_backend
from jaxprefill.kernels.attention.tiles import TileShape, plan_tiles

__all__ = [
    "CAUSAL",
    "AttentionBackend",
    "AttentionNeeds",
    "AttentionSpec",
    "Capabilities",
    "RaggedBatch",
    "TileShape",
    "plan_tiles",
    "pool_dtype",
    "select_backend",
]
