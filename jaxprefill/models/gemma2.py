"""Gemma 2: windows in every other layer, soft caps, norms of 1 + w before and after each part."""

from collections.abc import Mapping
from typing import Any

from jaxprefill.config import ModelConfig
from jaxprefill.models.dense import DenseDecoder
from jaxprefill.models.hf_config import read_dense
from jaxprefill.models.hf_values import HfValues

GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_DEFAULTS = GEMMA_DEFAULTS | {
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


class Gemma2(DenseDecoder):
    """No biases; embeddings are scaled by the root of their width."""

    model_type = "gemma2"
    norm_names = GEMMA_NORMS

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        """See `DenseDecoder.read_config`."""
        return read_gemma({**_DEFAULTS, **hf}, every=2)


def read_gemma(hf: Mapping[str, Any], *, every: int, **own: Any) -> ModelConfig:
    """The config of a Gemma; each layer but every `every`-th one has the window.

    Raises:
        CheckpointError: see `read_dense`.
    """
    given = HfValues(hf)
    count = given.integer("num_hidden_layers", most=10_000)
    types = [
        "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(count)
    ]
    bias = given.flag("attention_bias", False)
    values = HfValues(
        {
            **hf,
            "hidden_act": hf.get("hidden_activation"),  # `hidden_act` is an older key of no effect
            "layer_types": hf.get("layer_types") or types,
        }
    )
    return read_dense(
        values,
        sliding_from=0,
        has_qkv_bias=bias,
        has_output_bias=bias,
        has_post_norms=True,
        norm_offset=1.0,
        query_scale=given.number("query_pre_attn_scalar") ** -0.5,
        attention_soft_cap=_cap(given, "attn_logit_softcapping"),
        logit_soft_cap=_cap(given, "final_logit_softcapping"),
        embedding_scale=given.integer("hidden_size") ** 0.5,
        **own,
    )


def _cap(hf: HfValues, name: str) -> float | None:
    return None if hf.get(name) is None else hf.number(name)
