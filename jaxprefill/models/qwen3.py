"""Qwen3, dense: heads of q and k are normed; head_dim is its own number."""

from collections.abc import Mapping
from typing import Any

from jaxprefill.config import ModelConfig
from jaxprefill.models.dense import DenseDecoder
from jaxprefill.models.hf_config import read_dense
from jaxprefill.models.hf_values import HfValues
from jaxprefill.models.qwen2 import QWEN_DEFAULTS, first_sliding_layer


class Qwen3(DenseDecoder):
    """Biases on request, none in the MLP."""

    model_type = "qwen3"

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        """See `DenseDecoder.read_config`."""
        values = HfValues(hf, QWEN_DEFAULTS | {"head_dim": 128})
        has_bias = values.flag("attention_bias", False)
        return read_dense(
            values,
            sliding_from=first_sliding_layer(values),
            has_qk_norm=True,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        )
