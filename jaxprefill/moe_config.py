"""Sizes of a mixture of experts, as plain host data."""

from dataclasses import dataclass
from typing import Literal, get_args

from jaxprefill.errors import ConfigError

RouterScoring = Literal["softmax", "sqrt_softplus"]


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Experts in the place of a layer's MLP; `ModelConfig.mlp_size` is the size of each.

    Attributes:
        num_chosen: experts that every token is sent to.
        scoring: what makes scores of the router's logits.
        is_normalized: whether the chosen experts' scores are divided by their sum.
        scale: multiplies the weights that result.
        has_bias: whether router and experts have biases; such experts are gpt-oss's.
        clamp: bounds what enters the experts' gated product; None: nothing does.
        gate_gain: multiplies the gate inside its sigmoid.
    """

    num_experts: int
    num_chosen: int
    scoring: RouterScoring = "softmax"
    is_normalized: bool = True
    scale: float = 1.0
    has_bias: bool = False
    clamp: float | None = None
    gate_gain: float = 1.0

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ConfigError(
                f"model config: num_experts must be at least 1, got {self.num_experts}"
            )
        if not 1 <= self.num_chosen <= self.num_experts:
            raise ConfigError(
                f"model config: num_chosen must be 1 to the {self.num_experts} experts, "
                f"got {self.num_chosen}"
            )
        if self.scoring not in get_args(RouterScoring):
            raise ConfigError(
                f"model config: scoring must be one of {', '.join(get_args(RouterScoring))}, "
                f"got {self.scoring!r}"
            )
        if not self.scale > 0:
            raise ConfigError(f"model config: scale of MoE must be positive, got {self.scale}")
