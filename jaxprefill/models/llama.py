"""The Llama family: Llama 2 and 3, SmolLM2. Fused qkv and gate/up, packed norms, few leaves."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32, Shaped

from jaxprefill.config import ModelConfig
from jaxprefill.kernels.attention.api import Attend
from jaxprefill.models.decoder import Fused, LayerInputs
from jaxprefill.models.layers import (
    gated_mlp,
    linear,
    parameter,
    rms_norm,
    rotary_table,
    rotate,
)


class LlamaLayer(nnx.Module):
    """Attention and gated MLP, each with a pre-norm and a residual."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        """Weights are [outputs, inputs]; qkv stacks query, key and value rows, in that order."""
        heads = config.num_q_heads + 2 * config.num_kv_heads
        width, attended = config.hidden_size, config.num_q_heads * config.head_dim
        self.config = config
        self.qkv = parameter((heads * config.head_dim, width), dtype, ("heads", None))
        self.output = parameter((width, attended), dtype, (None, "heads"))
        self.gate_up = parameter((2 * config.mlp_size, width), dtype, ("mlp", None))
        self.down = parameter((width, config.mlp_size), dtype, (None, "mlp"))

    def __call__(
        self,
        hidden: Float[Array, "T E"],
        pool: Shaped[Array, "2 K P S D"],
        norms: Float[Array, "2 E"],
        layer: Int32[Array, ""],
        inputs: LayerInputs,
        attend: Attend,
    ) -> tuple[Float[Array, "T E"], Shaped[Array, "2 K P S D"]]:
        """See `decoder.DecoderLayer`."""
        config, dtype = self.config, self.qkv[...].dtype
        normed = rms_norm(hidden, norms[0], config.norm_eps)
        qkv = linear(normed, self.qkv[...])
        qkv = qkv.reshape(len(hidden), -1, config.head_dim)
        at = (config.num_q_heads, config.num_q_heads + config.num_kv_heads)
        q, k, v = jnp.split(qkv, at, axis=1)
        q, k = rotate(q, inputs.rotary).astype(dtype), rotate(k, inputs.rotary).astype(dtype)
        first_page = layer * (pool.shape[2] // config.num_layers)
        attended, pool = attend(q, k, v.astype(dtype), pool, inputs.batch, first_page)
        hidden = hidden + linear(attended.reshape(len(hidden), -1), self.output[...])
        normed = rms_norm(hidden, norms[1], config.norm_eps)
        gated = gated_mlp(linear(normed, self.gate_up[...]))
        return hidden + linear(gated, self.down[...]), pool


class Llama(nnx.Module):
    """Embedding, layers, packed norms and an LM head that may be the embedding."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        """All weights zero; the loader replaces them."""
        table = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embedding = parameter(table, dtype, ("vocab", None))
        if not config.is_embedding_tied:
            self.head = parameter(table, dtype, ("vocab", None))
        norms = (2 * config.num_layers + 1, config.hidden_size)
        self.norms = parameter(norms, dtype, (None, None))
        self.layers = nnx.List([LlamaLayer(config, dtype) for _ in range(config.num_layers)])

    def embed(self, ids: Int32[Array, " T"]) -> Float[Array, "T E"]:
        """See `decoder.Decoder`."""
        return self.embedding[...][ids].astype(jnp.float32)

    def rotary(self, positions: Int32[Array, " T"]) -> Float[Array, "2 T half"]:
        """See `decoder.Decoder`."""
        return rotary_table(positions, self.config.head_dim, self.config.rope_theta)

    def final_norm(self, hidden: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """See `decoder.Decoder`."""
        return rms_norm(hidden, self.norms[...][-1], self.config.norm_eps)

    @staticmethod
    def sources(config: ModelConfig) -> dict[str, Fused]:
        """See `decoder.Decoder`."""
        sources = {"embedding": Fused(("model.embed_tokens.weight",))}
        if not config.is_embedding_tied:
            sources["head"] = Fused(("lm_head.weight",))
        norms: list[str] = []
        keys = config.num_kv_heads * config.head_dim
        qkv_rows = (config.num_q_heads * config.head_dim, keys, keys)
        for layer in range(config.num_layers):
            name = f"model.layers.{layer}"
            norms += [f"{name}.input_layernorm.weight", f"{name}.post_attention_layernorm.weight"]
            projections = tuple(f"{name}.self_attn.{part}_proj.weight" for part in "qkv")
            sources[f"layers.{layer}.qkv"] = Fused(projections, qkv_rows)
            sources[f"layers.{layer}.output"] = Fused((f"{name}.self_attn.o_proj.weight",))
            gate_up = (f"{name}.mlp.gate_proj.weight", f"{name}.mlp.up_proj.weight")
            sources[f"layers.{layer}.gate_up"] = Fused(gate_up, (config.mlp_size,) * 2)
            sources[f"layers.{layer}.down"] = Fused((f"{name}.mlp.down_proj.weight",))
        sources["norms"] = Fused((*norms, "model.norm.weight"), is_stacked=True)
        return sources
