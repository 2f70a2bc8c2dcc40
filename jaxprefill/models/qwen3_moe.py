"""Qwen3-MoE: a Qwen3 whose MLPs are mixtures of experts, in every layer."""

from collections.abc import Mapping
from typing import Any

from jaxprefill.config import ModelConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.models.dense import DenseDecoder
from jaxprefill.models.hf_config import read_dense
from jaxprefill.models.hf_values import HfValues, config_errors
from jaxprefill.models.qwen2 import QWEN_DEFAULTS
from jaxprefill.moe_config import MoeConfig

_DEFAULTS = QWEN_DEFAULTS | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}


class Qwen3Moe(DenseDecoder):
    """Attention as in Qwen3; the router's softmax runs over all experts."""

    model_type = "qwen3_moe"

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        """See `DenseDecoder.read_config`."""
        values = HfValues(hf, _DEFAULTS)
        if values.get("mlp_only_layers") or values.integer("decoder_sparse_step", 1) != 1:
            raise CheckpointError(
                "config.json: mlp_only_layers must be empty and decoder_sparse_step 1, got "
                f"{values.get('mlp_only_layers')!r} and {values.get('decoder_sparse_step')!r}: "
                "models with dense layers among those with experts are not supported"
            )
        size = values.integer("moe_intermediate_size")
        has_bias = values.flag("attention_bias", False)
        is_windowed = values.flag("use_sliding_window", False)
        with config_errors():
            moe = MoeConfig(
                num_experts=values.integer("num_experts", values.integer("num_local_experts", 128)),
                num_chosen=values.integer("num_experts_per_tok"),
                is_normalized=values.flag("norm_topk_prob", False),
            )
        return read_dense(
            HfValues({**hf, "intermediate_size": size}, _DEFAULTS),
            sliding_from=0 if is_windowed else None,
            has_qk_norm=True,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            moe=moe,
        )
