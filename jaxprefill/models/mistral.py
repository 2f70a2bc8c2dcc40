"""Mistral 7B and its kin: a Llama whose layers all have a sliding window."""

from collections.abc import Mapping
from typing import Any

from jaxprefill.config import ModelConfig
from jaxprefill.models.dense import DenseDecoder
from jaxprefill.models.hf_config import read_dense
from jaxprefill.models.hf_values import HfValues

_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


class Mistral(DenseDecoder):
    """No biases; the window is off where config.json says null (from v0.2 on)."""

    model_type = "mistral"

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        """See `DenseDecoder.read_config`."""
        return read_dense(HfValues(hf, _DEFAULTS), sliding_from=0)
