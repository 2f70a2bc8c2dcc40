"""The dense decoder that Llama, Mistral, Qwen and Phi-3 share; flags of ModelConfig set them apart.

Fused qkv and gate/up, packed norms, few leaves. An architecture's file names the class, reads its
config and, where they differ, names its checkpoint tensors.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxprefill.cache.spec import CacheSpec, PoolSpec
from jaxprefill.config import ModelConfig
from jaxprefill.kernels.attention.api import Attend
from jaxprefill.models.biased_moe import BiasedMoe
from jaxprefill.models.decoder import Fused, LayerInputs, Pools, TensorIndex
from jaxprefill.models.layers import (
    ScaledWeight,
    WeightByLayer,
    gated_mlp,
    linear,
    parameter,
    rms_norm,
    rotary_table,
    rotate,
)
from jaxprefill.models.moe import MoeMlp, expert_sources
from jaxprefill.models.quantized import SCALE, kind_of
from jaxprefill.models.rope import rotary_frequencies
from jaxprefill.models.sharding import LogicalAxes, all_reduce, look_up


class DenseLayer(nnx.Module):
    """Attention and gated MLP, each with a pre-norm and a residual."""

    qkv: nnx.Param[Array]
    output: nnx.Param[Array]
    gate_up: nnx.Param[Array]
    down: nnx.Param[Array]

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        """Weights are [outputs, inputs]; qkv stacks query, key and value rows, in that order."""
        heads = config.num_q_heads + 2 * config.num_kv_heads
        width, attended = config.hidden_size, config.num_q_heads * config.head_dim
        self.config = config
        self.dtype = dtype
        self._add("qkv", (heads * config.head_dim, width), ("heads", None))
        self._add("output", (width, attended), (None, "heads"))
        if config.moe is not None:
            experts = BiasedMoe if config.moe.has_bias else MoeMlp
            self.moe = experts(config, config.moe, dtype)
        else:
            self._add("gate_up", (2 * config.mlp_size, width), ("mlp", None))
            self._add("down", (width, config.mlp_size), (None, "mlp"))
        if config.has_qkv_bias:
            self.qkv_bias = parameter((heads * config.head_dim,), dtype, ("heads",))
        if config.has_output_bias:
            self.output_bias = parameter((width,), dtype, (None,))
        if config.has_mlp_bias:
            self.gate_up_bias = parameter((2 * config.mlp_size,), dtype, ("mlp",))
            self.down_bias = parameter((width,), dtype, (None,))
        if config.has_qk_norm:
            self.qk_norms = parameter((2, config.head_dim), dtype, (None, None))
        if config.has_sinks:
            self.sinks = parameter((config.num_q_heads,), dtype, ("heads",))

    def _add(self, name: str, shape: tuple[int, int], axes: LogicalAxes) -> None:
        """A matrix, and the scales of its outputs where it is quantised."""
        kind = self.config.quantization
        dtype = self.dtype if kind is None else jnp.dtype(kind_of(name, kind))
        setattr(self, name, parameter(shape, dtype, axes))
        if kind is not None:
            setattr(self, name + SCALE, parameter(shape[:1], jnp.dtype("float32"), axes[:1]))

    def weight(self, name: str) -> Float[Array, "outputs inputs"] | WeightByLayer | ScaledWeight:
        """A matrix as `linear` takes it."""
        values = getattr(self, name)[...]
        if self.config.quantization is None:
            return values
        return ScaledWeight(values, getattr(self, name + SCALE)[...], self.dtype)

    def __call__(
        self,
        hidden: Float[Array, "T E"],
        pools: Pools,
        norms: Float[Array, "own E"],
        layer: Int32[Array, ""],
        inputs: LayerInputs,
        attend: Attend,
    ) -> tuple[Float[Array, "T E"], Pools]:
        """See `decoder.DecoderLayer`."""
        config, (pool,) = self.config, pools
        with jax.named_scope("attention.norm"):
            normed = self._norm(hidden, norms[0])
        q, k, v = self.project(normed, inputs)
        with jax.named_scope("attention.core"):
            first_page = layer * (pool.shape[2] // config.num_layers)
            sinks = (self.sinks[...],) if config.has_sinks else ()
            attended, pool = attend(q, k, v, pool, inputs.batch, first_page, *sinks)
        with jax.named_scope("attention.output"):
            added = self.output_of(attended.reshape(len(hidden), -1))
            hidden = hidden + (self._norm(added, norms[1]) if config.has_post_norms else added)
        with jax.named_scope("mlp.norm"):
            normed = self._norm(hidden, norms[2 if config.has_post_norms else 1])
        added = self.mlp(normed, inputs)
        return hidden + (self._norm(added, norms[3]) if config.has_post_norms else added), (pool,)

    def _norm(
        self, rows: Float[Array, "*rows E"], weight: Float[Array, " E"]
    ) -> Float[Array, "*rows E"]:
        return rms_norm(rows, weight, self.config.norm_eps, self.config.norm_offset)

    def project(
        self, normed: Float[Array, "T E"], inputs: LayerInputs
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"]]:
        """Queries, keys and values of the new tokens; q and k are rotated."""
        config, dtype = self.config, self.dtype
        with jax.named_scope("attention.qkv"):
            qkv = linear(normed, self.weight("qkv"))
            if config.has_qkv_bias:
                qkv = qkv + self.qkv_bias[...]
        with jax.named_scope("attention.rotary"):
            qkv = qkv.reshape(len(normed), -1, config.head_dim)
            at = (config.num_q_heads, config.num_q_heads + config.num_kv_heads)
            q, k, v = jnp.split(qkv, at, axis=1)
            if config.has_qk_norm:
                q = self._norm(q, self.qk_norms[0])
                k = self._norm(k, self.qk_norms[1])
            q, k = rotate(q, inputs.rotary), rotate(k, inputs.rotary)
            if config.query_scale is not None:  # attention multiplies by head_dim ** -0.5
                q = q * (config.query_scale * config.head_dim**0.5)
            return q.astype(dtype), k.astype(dtype), v.astype(dtype)

    def output_of(self, attended: Float[Array, "T HD"]) -> Float[Array, "T E"]:
        """What attention adds to the residual stream."""
        out = all_reduce(linear(attended, self.weight("output")), self.config)
        return out + self.output_bias[...] if self.config.has_output_bias else out

    def mlp(self, normed: Float[Array, "T E"], inputs: LayerInputs) -> Float[Array, "T E"]:
        """What the MLP, or the experts, add to the residual stream."""
        config = self.config
        if config.moe is not None:
            return self.moe(normed, inputs.num_tokens)
        with jax.named_scope("mlp.gate_up"):
            gate_up = linear(normed, self.weight("gate_up"))
            if config.has_mlp_bias:
                gate_up = gate_up + self.gate_up_bias[...]
        with jax.named_scope("mlp.activation"):
            gated = gated_mlp(gate_up, config.activation)
        with jax.named_scope("mlp.down"):
            out = all_reduce(linear(gated, self.weight("down")), config)
            return out + self.down_bias[...] if config.has_mlp_bias else out


class DenseDecoder(nnx.Module):
    """Embedding, layers, packed norms, and an LM head, which may be the embedding, or a classifier.

    Attributes:
        model_type: what config.json calls the family.
        norm_names: a layer's norms over whole rows, in the order in which they are packed.
    """

    model_type: ClassVar[str]
    norm_names: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        """All weights zero; the loader replaces them."""
        table = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embedding = parameter(table, dtype, ("vocab", None))
        if config.has_own_head:
            self.head = parameter(table, dtype, ("vocab", None))
        if config.classifier is not None:
            labels = (len(config.classifier.labels), config.hidden_size)
            self.classifier = parameter(labels, dtype, (None, None))
        norms = (config.norms_per_layer * config.num_layers + 1, config.hidden_size)
        self.norms = parameter(norms, dtype, (None, None))
        self.layers = nnx.List([DenseLayer(config, dtype) for _ in range(config.num_layers)])

    def embed(self, ids: Int32[Array, " T"]) -> Float[Array, "T E"]:
        """See `decoder.Decoder`."""
        rows, scale = look_up(self.embedding[...], ids, self.config), self.config.embedding_scale
        if scale == 1:
            return rows
        return rows * jnp.asarray(scale, self.embedding[...].dtype).astype(jnp.float32)

    def rotary(self, positions: Int32[Array, " T"]) -> Float[Array, "tables T half"]:
        """See `decoder.Decoder`: of layers that see all keys, then of those with a window."""
        config = self.config
        ropes = [rope for rope in (config.rope, config.sliding_rope) if rope is not None]
        tables = [
            rotary_table(
                positions, rotary_frequencies(replace(config, rope=rope)), rope.attention_factor
            )
            for rope in ropes
        ]
        return tables[0] if len(tables) == 1 else jnp.concatenate(tables)

    def final_norm(self, hidden: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """See `decoder.Decoder`."""
        config = self.config
        return rms_norm(hidden, self.norms[...][-1], config.norm_eps, config.norm_offset)

    @staticmethod
    def cache_spec(config: ModelConfig) -> CacheSpec:
        """See `decoder.Decoder`."""
        kv = PoolSpec(
            name="kv",
            num_layers=config.num_layers,
            num_parts=2,
            num_heads=config.num_kv_heads,
            width=config.head_dim,
        )
        return CacheSpec((kv,))

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        """The config that a config.json of this architecture describes.

        Raises:
            CheckpointError: it asks for what is not supported, or a key is missing or wrong.
        """
        raise NotImplementedError

    @classmethod
    def sources(cls, config: ModelConfig) -> dict[str, Fused]:
        """See `decoder.Decoder`."""
        sources = {"embedding": Fused(("model.embed_tokens.weight",))}
        if config.has_own_head:
            sources["head"] = Fused(("lm_head.weight",))
        if config.classifier is not None:
            sources["classifier"] = Fused(("score.weight",))
        norms: list[str] = []
        for layer in range(config.num_layers):
            name = f"model.layers.{layer}"
            norms += [f"{name}.{norm}.weight" for norm in cls.norm_names]
            own = cls.layer_sources(config, name)
            sources |= {f"layers.{layer}.{path}": fused for path, fused in own.items()}
        sources["norms"] = Fused((*norms, "model.norm.weight"), is_stacked=True)
        return sources

    @classmethod
    def parts_of(cls, name: str, shape: tuple[int, ...]) -> dict[str, TensorIndex]:
        """See `decoder.Decoder`: names are those of Hugging Face."""
        return {name: ()}

    @classmethod
    def layer_sources(cls, config: ModelConfig, name: str) -> dict[str, Fused]:
        """The sources of one layer's own parameters, whose tensors begin with `name`."""
        keys = config.num_kv_heads * config.head_dim
        qkv_rows = (config.num_q_heads * config.head_dim, keys, keys)
        qkv = tuple(f"{name}.self_attn.{part}_proj" for part in "qkv")
        gate_up = (f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
        output, down = f"{name}.self_attn.o_proj", f"{name}.mlp.down_proj"

        def fused(modules: tuple[str, ...], kind: str, rows: tuple[int, ...] = ()) -> Fused:
            return Fused(tuple(f"{module}.{kind}" for module in modules), rows)

        found = {
            "qkv": fused(qkv, "weight", qkv_rows),
            "output": fused((output,), "weight"),
        }
        if config.moe is None:
            found["gate_up"] = fused(gate_up, "weight", (config.mlp_size,) * 2)
            found["down"] = fused((down,), "weight")
        else:
            found |= expert_sources(f"{name}.mlp", config.moe.num_experts)
        if config.has_qkv_bias:
            found["qkv_bias"] = fused(qkv, "bias", qkv_rows)
        if config.has_output_bias:
            found["output_bias"] = fused((output,), "bias")
        if config.has_mlp_bias:
            found["gate_up_bias"] = fused(gate_up, "bias", (config.mlp_size,) * 2)
            found["down_bias"] = fused((down,), "bias")
        if config.has_qk_norm:
            norms = tuple(f"{name}.self_attn.{part}_norm.weight" for part in "qk")
            found["qk_norms"] = Fused(norms, is_stacked=True)
        if config.has_sinks:
            found["sinks"] = Fused((f"{name}.self_attn.sinks",))
        return found
