"""A mixture of experts in the place of an MLP: routers, and what the chosen experts add up to.

Routing takes the number of real tokens: padding is sent to no expert. Work grows with the chosen
experts' rows, never with experts times tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from jaxprefill.config import KernelKind, ModelConfig
from jaxprefill.kernels.experts import (
    ExpertBlocks,
    ExpertWeights,
    Gate,
    GroupedExperts,
    block_rows,
    combine,
    lacks_grouped_experts,
    plan_blocks,
)
from jaxprefill.models.decoder import Fused
from jaxprefill.models.layers import WeightByLayer, gated, linear, parameter
from jaxprefill.models.sharding import all_reduce
from jaxprefill.moe_config import MoeConfig

# The rows of one block and their expert -> what the expert makes of them.
ExpertMlp = Callable[[Float[Array, "B E"], Int32[Array, ""]], Float[Array, "B E"]]


class Routing(NamedTuple):
    """The experts of every token and the weights of what they give."""

    experts: Int32[Array, "T C"]
    weights: Float[Array, "T C"]


def route(
    logits: Float[Array, "T X"],
    moe: MoeConfig,
    *,
    bias: Float[Array, " X"] | None = None,
    chosen: Int32[Array, "T C"] | None = None,
) -> Routing:
    """The best experts by score.

    Args:
        logits: the router's product.
        moe: how they are scored and weighted.
        bias: added to the scores for the choice, not for the weights (arXiv 2408.15664).
        chosen: the experts where they are not chosen by score: a hash router's.
    """
    logits = logits.astype(jnp.float32)
    if moe.scoring == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jnp.sqrt(jax.nn.softplus(logits))
    if chosen is None:
        ranked = scores if bias is None else scores + bias
        chosen = lax.top_k(ranked, moe.num_chosen)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if moe.is_normalized:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return Routing(chosen, weights * moe.scale)


def run_experts(
    rows: Float[Array, "T E"],
    routing: Routing,
    num_tokens: Int32[Array, ""],
    num_experts: int,
    mlp: ExpertMlp,
    *,
    grouped: GroupedExperts | None = None,
) -> Float[Array, "T E"]:
    """What the chosen experts give together; zeros for padding tokens.

    Args:
        rows: of the tokens.
        routing: of the same.
        num_tokens: the real ones, which come first.
        num_experts: of the layer.
        mlp: one block's, in plain JAX.
        grouped: the kernel that does all blocks' in its place.
    """
    choose_size = block_rows if grouped is None else grouped.block_rows
    size = choose_size(routing.experts.size, num_experts)
    with jax.named_scope("moe.plan"):
        blocks = plan_blocks(routing.experts, num_tokens, num_experts, size)
    with jax.named_scope("moe.experts"):
        outputs = _loop_over(blocks, rows, mlp) if grouped is None else grouped(rows, blocks)
    with jax.named_scope("moe.combine"):
        return combine(outputs, blocks, routing.weights)


def _loop_over(
    blocks: ExpertBlocks, rows: Float[Array, "T E"], mlp: ExpertMlp
) -> Float[Array, "N B E"]:
    """A step for each block that holds real tokens: it reads its expert's weights once."""

    def step(at: Int32[Array, ""], outputs: Float[Array, "N B E"]) -> Float[Array, "N B E"]:
        taken = jnp.take(rows, blocks.tokens[at], axis=0, mode="fill", fill_value=0)
        made = mlp(taken, blocks.experts[at]).astype(outputs.dtype)
        return lax.dynamic_update_index_in_dim(outputs, made, at, 0)

    outputs = jnp.zeros((*blocks.tokens.shape, rows.shape[1]), jnp.float32)
    return lax.fori_loop(0, blocks.num_blocks, step, outputs)


def choose_kernels(
    config: ModelConfig, *, attention_backend: str, platform: str, dtype: str
) -> KernelKind:
    """`ModelConfig.kernels` of one device's part: plain JAX where that is asked, or must be."""
    lack = lacks_grouped_experts(config.hidden_size, config.mlp_size, dtype, config.activation)
    is_plain = platform != "gpu" or attention_backend == "xla" or lack is not None
    return "xla" if config.moe is None or is_plain else "pallas_triton"


def expert_weight(
    weight: Shaped[Array, "stacked rows ..."] | WeightByLayer,
    expert: Int32[Array, ""],
    num_parts: int = 1,
) -> Shaped[Array, "outputs ..."]:
    """One expert's part of a stack that holds `num_parts` matrices, or vectors, for each expert."""

    def pick(stack: Shaped[Array, "stacked rows ..."]) -> Shaped[Array, "outputs ..."]:
        whole = stack.reshape(-1, num_parts * stack.shape[1], *stack.shape[2:])
        return lax.dynamic_index_in_dim(whole, expert, keepdims=False)

    return weight.apply(pick) if isinstance(weight, WeightByLayer) else pick(weight)


class RoutedExperts(nnx.Module):
    """A layer's experts, each a gated MLP with its outputs first, behind whatever router."""

    config: ModelConfig
    moe: MoeConfig
    gate_up: nnx.Param[Array]
    down: nnx.Param[Array]

    def _run(
        self, normed: Float[Array, "T E"], routing: Routing, num_tokens: Int32[Array, ""]
    ) -> Float[Array, "T E"]:
        """What this device's part of the chosen experts gives together."""
        return run_experts(
            normed,
            routing,
            num_tokens,
            self.moe.num_experts,
            self._expert,
            grouped=None if self.config.kernels == "xla" else self._grouped(),
        )

    def _gate(self) -> Gate:
        return partial(gated, activation=self.config.activation)

    def _weights(self) -> ExpertWeights:
        return ExpertWeights(self.gate_up[...], self.down[...])

    def _grouped(self) -> GroupedExperts:
        # Devices add up their parts: each adds its share of the biases, if there are any.
        share = 1 / self.config.num_shards
        return GroupedExperts(self._weights(), self._gate(), bias_share=share)

    def _expert(self, rows: Float[Array, "B E"], expert: Int32[Array, ""]) -> Float[Array, "B E"]:
        gate_up = linear(rows, expert_weight(self.gate_up[...], expert, num_parts=2))
        made = self._gate()(*jnp.split(gate_up.astype(jnp.float32), 2, axis=-1))
        return linear(made, expert_weight(self.down[...], expert))


class MoeMlp(RoutedExperts):
    """Router and experts of one layer."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, dtype: jnp.dtype) -> None:
        """`gate_up` stacks gate and up of expert 0, of expert 1, and so on."""
        width, size, count = config.hidden_size, config.mlp_size, moe.num_experts
        self.config = config
        self.moe = moe
        self.router = parameter((count, width), dtype, (None, None))
        self.gate_up = parameter((2 * count, size, width), dtype, (None, "mlp", None))
        self.down = parameter((count, width, size), dtype, (None, None, "mlp"))

    def __call__(
        self, normed: Float[Array, "T E"], num_tokens: Int32[Array, ""]
    ) -> Float[Array, "T E"]:
        """What the MLP adds to the residual stream; only the first `num_tokens` rows count."""
        with jax.named_scope("moe.router"):
            routing = route(linear(normed, self.router[...]), self.moe)
        return all_reduce(self._run(normed, routing, num_tokens), self.config)


def expert_sources(name: str, num_experts: int) -> dict[str, Fused]:
    """The sources of `MoeMlp`, with one tensor an expert and projection."""
    experts = [f"{name}.experts.{expert}" for expert in range(num_experts)]
    pairs = [f"{expert}.{part}_proj.weight" for expert in experts for part in ("gate", "up")]
    down = [f"{expert}.down_proj.weight" for expert in experts]
    return {
        "moe.router": Fused((f"{name}.gate.weight",)),
        "moe.gate_up": Fused(tuple(pairs), is_stacked=True),
        "moe.down": Fused(tuple(down), is_stacked=True),
    }
