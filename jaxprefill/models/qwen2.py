"""Qwen2 and Qwen2.5: biased q, k and v; a sliding window in the upper layers on request."""

from collections.abc import Mapping
from typing import Any

from jaxprefill.config import ModelConfig
from jaxprefill.models.dense import DenseDecoder
from jaxprefill.models.hf_config import read_dense
from jaxprefill.models.hf_values import HfValues

QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


class Qwen2(DenseDecoder):
    """The only bias is that of q, k and v."""

    model_type = "qwen2"

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        """See `DenseDecoder.read_config`."""
        values = HfValues(hf, QWEN_DEFAULTS)
        return read_dense(values, sliding_from=first_sliding_layer(values), has_qkv_bias=True)


def first_sliding_layer(values: HfValues) -> int | None:
    """Layers below `max_window_layers` see all, whether the window is used or not."""
    if not values.flag("use_sliding_window", False):
        return None
    layers = values.get("max_window_layers")
    return 0 if layers == 0 else values.integer("max_window_layers")
