"""DeepSeek-V4 as prefill and decode see it: streams in, streams out, one layer after another."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxprefill.cache.spec import CacheSpec
from jaxprefill.config import ModelConfig
from jaxprefill.models.decoder import Fused, TensorIndex
from jaxprefill.models.deepseek_v4.hf import read_deepseek
from jaxprefill.models.deepseek_v4.layer import DeepseekV4Layer, cache_spec, compressed_table
from jaxprefill.models.deepseek_v4.modules import HyperHead, latent_of
from jaxprefill.models.deepseek_v4.names import parts_of, sources_of
from jaxprefill.models.layers import parameter, rms_norm, rotary_table
from jaxprefill.models.rope import rotary_frequencies
from jaxprefill.models.sharding import look_up


class DeepseekV4(nnx.Module):
    """Rows are all residual streams of a token, side by side."""

    model_type = "deepseek_v4"

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        """All weights zero; the loader replaces them."""
        table, count = (config.vocab_size, config.hidden_size), config.num_layers
        self.config = config
        self.embedding = parameter(table, dtype, ("vocab", None))
        if config.has_own_head:
            self.head = parameter(table, dtype, ("vocab", None))
        self.norms = parameter((2 * count + 1, config.hidden_size), dtype, (None, None))
        self.layers = nnx.List([DeepseekV4Layer(config, at, dtype) for at in range(count)])
        self.hyper_head = HyperHead(config)

    def embed(self, ids: Int32[Array, " T"]) -> Float[Array, "T nE"]:
        """See `decoder.Decoder`; every stream begins with the same row."""
        rows = look_up(self.embedding[...], ids, self.config)
        return jnp.tile(rows, (1, latent_of(self.config).num_streams))

    def rotary(self, positions: Int32[Array, " T"]) -> Float[Array, "4 T half"]:
        """Cosine and sine of layers without compressed entries, then of those with them."""
        plain = rotary_table(positions, rotary_frequencies(self.config))
        return jnp.concatenate([plain, compressed_table(self.config, positions)])

    def final_norm(self, hidden: Float[Array, "T nE"]) -> Float[Array, "T E"]:
        """See `decoder.Decoder`."""
        streams = hidden.reshape(len(hidden), latent_of(self.config).num_streams, -1)
        return rms_norm(self.hyper_head(streams), self.norms[...][-1], self.config.norm_eps)

    @staticmethod
    def cache_spec(config: ModelConfig) -> CacheSpec:
        """See `decoder.Decoder`."""
        return cache_spec(config)

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        """The config that a config.json of this architecture describes.

        Raises:
            CheckpointError: it asks for what is not supported, or a key is missing or wrong.
        """
        return read_deepseek(hf)

    @classmethod
    def sources(cls, config: ModelConfig) -> dict[str, Fused]:
        """See `decoder.Decoder`."""
        return sources_of(config)

    @classmethod
    def parts_of(cls, name: str, shape: tuple[int, ...]) -> dict[str, TensorIndex]:
        """See `decoder.Decoder`."""
        return parts_of(name, shape)
