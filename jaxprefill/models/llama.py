"""Llama 2 and 3, SmolLM2, and whatever else is saved as a Llama."""

from collections.abc import Mapping
from typing import Any

from jaxprefill.config import ModelConfig
from jaxprefill.models.dense import DenseDecoder
from jaxprefill.models.hf_config import read_dense
from jaxprefill.models.hf_values import HfValues


class Llama(DenseDecoder):
    """Biases on request, full attention."""

    model_type = "llama"

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        """See `DenseDecoder.read_config`."""
        values = HfValues(hf, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6})
        has_bias = values.flag("attention_bias", False)
        return read_dense(
            values,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_mlp_bias=values.flag("mlp_bias", False),
        )
