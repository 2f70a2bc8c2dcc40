"""Rotary frequencies of every known kind, computed once on the host. Imports no jax.

All arithmetic is float32, rounded where transformers rounds: one unit in the last place of a
frequency turns position 100,000 by 0.006 radians, so a more exact value would be another model.
"""

import math

import numpy as np
from jaxtyping import Float32

from jaxprefill.config import ModelConfig, RopeConfig


def rotary_frequencies(config: ModelConfig) -> Float32[np.ndarray, " half"]:
    """Radians a position, one for each pair of rotated dimensions.

    Of longrope's two sets of divisors one serves all requests: the long one if
    `config.context_length`, the context that is served, exceeds the original one. A choice by
    request (transformers chooses by forward pass) would change keys that are cached already, and
    make a request's numbers depend on its neighbours; vLLM chooses as here.
    """
    rope, dim = config.rope, config.rotary_dim
    powers = np.float32(rope.theta) ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    if rope.kind == "linear":
        return 1 / powers / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(1 / powers, rope)
    if rope.kind == "yarn":
        return _yarn(powers, rope, dim)
    if rope.kind == "longrope":
        is_long = config.context_length > rope.original_context
        divisors = rope.long_factors if is_long else rope.short_factors
        return 1 / (np.array(divisors, np.float32) * powers)
    return 1 / powers  # dynamic is default up to the trained context, and we stop there


def _llama3(
    frequencies: Float32[np.ndarray, " half"], rope: RopeConfig
) -> Float32[np.ndarray, " half"]:
    """Long waves are stretched by `factor`, short ones not, those between in part (Llama 3.1)."""
    waves = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    share = (rope.original_context / waves - low) / (high - low)
    between = (1 - share) * frequencies / rope.factor + share * frequencies
    is_long = waves > rope.original_context / low
    is_short = waves < rope.original_context / high
    stretched = np.where(is_long, frequencies / rope.factor, frequencies)
    return np.where(is_long | is_short, stretched, between)


def _yarn(
    powers: Float32[np.ndarray, " half"], rope: RopeConfig, dim: int
) -> Float32[np.ndarray, " half"]:
    """A ramp over dimensions from unstretched to stretched frequencies (arXiv 2309.00071)."""

    def dimension(turns: float) -> float:
        wave = rope.original_context / (turns * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.is_band_rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / width, 0, 1)
    kept = 1 - ramp.astype(np.float32)
    return 1 / (np.float32(rope.factor) * powers) * (1 - kept) + 1 / powers * kept
