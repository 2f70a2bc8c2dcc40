"""Rotary embedding as config.json states it. Imports no jax.

transformers 5 writes `rope_parameters`, flat or by layer type; transformers 4 `rope_scaling` beside
`rope_theta`.
"""

import math
from typing import Any, get_args

from jaxprefill.config import RopeConfig, RopeKind
from jaxprefill.errors import CheckpointError
from jaxprefill.models.hf_values import HfValues, config_errors

_ALIASES = {"su": "longrope"}  # its name when Phi-3 appeared
_WHERE = "config.json: RoPE parameters"


def read_rope(hf: HfValues, *, head_dim: int, is_partial: bool) -> RopeConfig:
    """The rotary embedding of all layers.

    Raises:
        CheckpointError: the kind is unknown, a parameter is missing or wrong, or layers differ.
    """
    given = _one_for_all_layers(hf.mapping("rope_scaling") or hf.mapping("rope_parameters"))
    kind = _read_kind(given)
    rope = HfValues(given, where=_WHERE)
    theta = rope.number("rope_theta", hf.number("rope_theta", 10000.0))
    share = rope.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * share) if is_partial or kind != "default" else head_dim
    own = _READERS[kind](hf, rope) if kind in _READERS else {}
    with config_errors():
        rotary_dim = None if dim == head_dim else dim
        return RopeConfig(kind=kind, theta=theta, rotary_dim=rotary_dim, **own)


def _read_kind(given: dict[str, Any]) -> RopeKind:
    name = given.get("rope_type") or given.get("type") or "default"
    for kind in get_args(RopeKind):
        if kind == _ALIASES.get(str(name), name):
            return kind
    raise CheckpointError(
        f"config.json: RoPE kind {name!r} is not supported; "
        f"supported: {', '.join((*get_args(RopeKind), *_ALIASES))}"
    )


def stretched_context(max_positions: int, rope: RopeConfig) -> int:
    """The longest context: `max_position_embeddings`, which some kinds stretch.

    Linear and yarn as in vLLM. Dynamic stops where its frequencies would begin to change with
    every token, under keys that are cached already.
    """
    if rope.kind == "linear":
        return int(max_positions * rope.factor)
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_context * rope.factor))
    return max_positions


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """What yarn multiplies rotated heads by where nothing else is said (arXiv 2309.00071)."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _one_for_all_layers(given: dict[str, Any]) -> dict[str, Any]:
    """Parameters by layer type are unpacked where all types share them."""
    by_type = {name: value for name, value in given.items() if name.endswith("_attention")}
    if not by_type:
        return given
    first, *others = by_type.values()
    if not isinstance(first, dict) or any(other != first for other in others):
        raise CheckpointError(
            "config.json: rope_parameters must be the same for every layer type, got different "
            f"ones for {', '.join(by_type)}; such models are not supported"
        )
    return first


def _read_linear(hf: HfValues, rope: HfValues) -> dict[str, Any]:
    return {"factor": rope.number("factor")}


def _read_llama3(hf: HfValues, rope: HfValues) -> dict[str, Any]:
    return {
        "factor": rope.number("factor"),
        "low_freq_factor": rope.number("low_freq_factor"),
        "high_freq_factor": rope.number("high_freq_factor"),
        "original_context": _original_context(hf, rope),
    }


def _read_yarn(hf: HfValues, rope: HfValues) -> dict[str, Any]:
    original = _original_context(hf, rope)
    factor = rope.number("factor", hf.integer("max_position_embeddings") / original)

    default = yarn_attention_factor(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scales = (rope.number(name) for name in ("mscale", "mscale_all_dim"))
        one, all_dim = (yarn_attention_factor(factor, scale) for scale in scales)
        default = one / all_dim
    return {
        "factor": factor,
        "original_context": original,
        "attention_factor": rope.number("attention_factor", default),
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "is_band_rounded": rope.flag("truncate", True),
    }


def _read_longrope(hf: HfValues, rope: HfValues) -> dict[str, Any]:
    original = _original_context(hf, rope)
    if original < 2:
        raise CheckpointError(
            f"config.json: original_max_position_embeddings must be at least 2, got {original}"
        )
    factor = rope.number("factor", hf.integer("max_position_embeddings") / original)
    stretch = math.log(factor) / math.log(original) if factor > 1 else 0.0
    return {
        "original_context": original,
        "attention_factor": rope.number("attention_factor", math.sqrt(1 + stretch)),
        "short_factors": rope.numbers("short_factor"),
        "long_factors": rope.numbers("long_factor"),
    }


def _original_context(hf: HfValues, rope: HfValues) -> int:
    """Beside the RoPE parameters (Phi-3) it wins over the one among them, as in transformers."""
    name = "original_max_position_embeddings"
    return hf.integer(name, rope.integer(name, hf.integer("max_position_embeddings")))


_READERS = {
    "linear": _read_linear,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
}
