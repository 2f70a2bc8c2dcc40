"""Dense layers as `kernels.decoder_layer` takes them, and which of them it can take."""

from jaxtyping import Array

from jaxprefill.config import ModelConfig
from jaxprefill.kernels.decoder_layer import LayerSizes, LayerWeights, lacks_fused_layer
from jaxprefill.models.decoder import DecoderLayer
from jaxprefill.models.dense import DenseLayer
from jaxprefill.models.quantized import SCALE


def lacks_fusion(config: ModelConfig, *, platform: str, dtype: str) -> str | None:
    """Why the layers of a pass cannot be fused, in words, or None."""
    if config.num_shards > 1:
        return "runs on one device"
    if config.has_output_bias or config.has_mlp_bias:
        return "takes no bias but that of qkv"
    if config.moe is not None:
        return "takes one MLP a layer, not experts"
    if config.has_post_norms or config.norm_offset:
        return "takes a norm before attention and one before the MLP, both without an offset"
    if config.attention_soft_cap is not None or config.has_sinks:
        return "caps no scores and has no attention sinks"
    if config.query_scale is not None or config.sliding_rope is not None:
        return "scales and rotates the queries of all layers alike, by head_dim ** -0.5"
    if config.activation != "silu":
        return f"takes silu, not {config.activation}"
    if config.rotary_dim != config.head_dim:
        return f"rotates whole heads of {config.head_dim}, not {config.rotary_dim} dimensions"
    return lacks_fused_layer(layer_sizes(config), platform=platform, dtype=dtype)


def layer_sizes(config: ModelConfig) -> LayerSizes:
    """The widths of a layer's products."""
    heads = config.num_q_heads + 2 * config.num_kv_heads
    return LayerSizes(
        hidden_size=config.hidden_size,
        qkv_size=heads * config.head_dim,
        attended_size=config.num_q_heads * config.head_dim,
        mlp_size=config.mlp_size,
        head_dim=config.head_dim,
    )


def layer_weights(layer: DecoderLayer) -> LayerWeights:
    """The layer's own arrays; its config must lack nothing."""
    assert isinstance(layer, DenseLayer), "every architecture is a dense decoder"
    has_bias, has_norms = layer.config.has_qkv_bias, layer.config.has_qk_norm
    scales: dict[str, Array] = {}
    if layer.config.quantization is not None:
        names = [name + SCALE for name in ("qkv", "output", "gate_up", "down")]
        scales = {name: getattr(layer, name)[...] for name in names}
    return LayerWeights(
        qkv=layer.qkv[...],
        output=layer.output[...],
        gate_up=layer.gate_up[...],
        down=layer.down[...],
        qkv_bias=layer.qkv_bias[...] if has_bias else None,
        qk_norms=layer.qk_norms[...] if has_norms else None,
        **scales,
    )
