"""gpt-oss: attention sinks, a window in every other layer, experts with biases in all."""

from collections.abc import Mapping
from typing import Any

from jaxprefill.config import ModelConfig
from jaxprefill.models.decoder import Fused, TensorIndex
from jaxprefill.models.dense import DenseDecoder
from jaxprefill.models.hf_config import read_dense
from jaxprefill.models.hf_values import HfValues, config_errors
from jaxprefill.moe_config import MoeConfig

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


class GptOss(DenseDecoder):
    """The router's softmax runs over the chosen experts."""

    model_type = "gpt_oss"

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        """See `DenseDecoder.read_config`."""
        given = HfValues(hf, _DEFAULTS)
        count = given.integer("num_hidden_layers", most=10_000)
        types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(count)]
        rope = hf.get("rope_scaling") or hf.get("rope_parameters") or _YARN
        values = {
            **hf,
            "layer_types": hf.get("layer_types") or types,
            "rope_parameters": rope,
            "rope_scaling": None,
        }
        has_bias = given.flag("attention_bias", True)
        with config_errors():
            moe = MoeConfig(
                num_experts=given.integer("num_local_experts"),
                num_chosen=given.integer("num_experts_per_tok"),
                has_bias=True,
                clamp=given.number("swiglu_limit"),
                gate_gain=given.number("swiglu_alpha"),
            )
        return read_dense(
            HfValues(values, _DEFAULTS),
            sliding_from=0,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_sinks=True,
            moe=moe,
        )

    @classmethod
    def parts_of(cls, name: str, shape: tuple[int, ...]) -> dict[str, TensorIndex]:
        """See `decoder.Decoder`: experts in MXFP4 are two tensors, blocks and their scales."""
        if ".experts." not in name:
            return {name: ()}
        return {name.removesuffix("_blocks").replace("_proj_scales", "_proj.scale"): ()}

    @classmethod
    def layer_sources(cls, config: ModelConfig, name: str) -> dict[str, Fused]:
        """See `DenseDecoder.layer_sources`."""
        found = super().layer_sources(config, name)
        names = {
            "router": "router.weight",
            "router_bias": "router.bias",
            "gate_up": "experts.gate_up_proj",
            "gate_up_bias": "experts.gate_up_proj_bias",
            "down": "experts.down_proj",
            "down_bias": "experts.down_proj_bias",
        }
        own = {f"moe.{path}": Fused((f"{name}.mlp.{part}",)) for path, part in names.items()}
        return found | own
