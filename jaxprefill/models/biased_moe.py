"""gpt-oss's experts: biases everywhere, and a SwiGLU whose halves are clamped and interleaved.

Weights stay as checkpoints have them, [experts, inputs, outputs].
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxprefill.config import ModelConfig
from jaxprefill.kernels.device import product_precision
from jaxprefill.kernels.experts import ExpertWeights, Gate
from jaxprefill.models.layers import linear, parameter
from jaxprefill.models.moe import RoutedExperts, expert_weight, route
from jaxprefill.models.sharding import all_reduce
from jaxprefill.moe_config import MoeConfig


class BiasedMoe(RoutedExperts):
    """Router and experts of one layer, in the place of `MoeMlp`."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, dtype: jnp.dtype) -> None:
        """Columns of `gate_up` are gate 0, up 0, gate 1, up 1, and so on."""
        width, size, count = config.hidden_size, config.mlp_size, moe.num_experts
        self.config = config
        self.moe = moe
        self.router = parameter((count, width), dtype, (None, None))
        self.router_bias = parameter((count,), dtype, (None,))
        self.gate_up = parameter((count, width, 2 * size), dtype, (None, None, "mlp"))
        self.gate_up_bias = parameter((count, 2 * size), dtype, (None, "mlp"))
        self.down = parameter((count, size, width), dtype, (None, "mlp", None))
        self.down_bias = parameter((count, width), dtype, (None, None))

    def __call__(
        self, normed: Float[Array, "T E"], num_tokens: Int32[Array, ""]
    ) -> Float[Array, "T E"]:
        """See `MoeMlp`."""
        with jax.named_scope("moe.router"):
            logits = linear(normed, self.router[...]) + self.router_bias[...]
            routing = route(logits, self.moe)
        return all_reduce(self._run(normed, routing, num_tokens), self.config)

    def _gate(self) -> Gate:
        return partial(clamped_glu, moe=self.moe)

    def _weights(self) -> ExpertWeights:
        return ExpertWeights(
            self.gate_up[...], self.down[...], self.gate_up_bias[...], self.down_bias[...]
        )

    def _expert(self, rows: Float[Array, "B E"], expert: Int32[Array, ""]) -> Float[Array, "B E"]:
        pairs = _product(rows, expert_weight(self.gate_up[...], expert))
        pairs = (pairs + expert_weight(self.gate_up_bias[...], expert)).reshape(len(rows), -1, 2)
        gated = self._gate()(pairs[..., 0], pairs[..., 1])
        # Devices add up their parts: each adds its share of the bias.
        bias = (
            expert_weight(self.down_bias[...], expert).astype(jnp.float32) / self.config.num_shards
        )
        return _product(gated, expert_weight(self.down[...], expert)) + bias


def clamped_glu(
    gate: Float[Array, "B n"], up: Float[Array, "B n"], moe: MoeConfig
) -> Float[Array, "B n"]:
    """(up + 1) * gate * sigmoid(gain * gate); the gate clamped from above, `up` on both sides."""
    if moe.clamp is not None:
        gate, up = jnp.minimum(gate, moe.clamp), jnp.clip(up, -moe.clamp, moe.clamp)
    return (up + 1) * gate * jax.nn.sigmoid(moe.gate_gain * gate)


def _product(
    rows: Float[Array, "B inputs"], weight: Float[Array, "inputs outputs"]
) -> Float[Array, "B outputs"]:
    """Rows @ weight in the weight's dtype, accumulated and returned in float32."""
    return lax.dot_general(
        rows.astype(weight.dtype),
        weight,
        (((1,), (0,)), ((), ())),
        precision=product_precision(weight.dtype),
        preferred_element_type=jnp.float32,
    )
