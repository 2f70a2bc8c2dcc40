"""Weights in eight bits, each row of outputs with a scale of its own; products stay as they are.

values[o, i] * scales[o]  ~  weight[o, i]        int8, or float8_e4m3fn
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Shaped

SCALE = "_scale"  # a parameter's path + this is its scales' path
_LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}


def quantize(
    weight: Shaped[np.ndarray, "outputs inputs"], dtype: Any
) -> tuple[Shaped[np.ndarray, "outputs inputs"], Float32[np.ndarray, " outputs"]]:
    """(values in `dtype`, scales): rounded to nearest; the largest of a row is the type's limit."""
    name, rows = jnp.dtype(dtype).name, weight.astype(np.float32)
    scales = np.abs(rows).max(axis=1) / np.float32(_LIMITS[name])
    scales = np.where(scales > 0, scales, 1).astype(np.float32)
    scaled = rows / scales[:, None]
    if name == "int8":
        scaled = np.clip(np.rint(scaled), -127, 127)
    return scaled.astype(dtype), scales


def dequantize(
    values: Shaped[np.ndarray, "outputs inputs"], scales: Float32[np.ndarray, " outputs"]
) -> Float32[np.ndarray, "outputs inputs"]:
    """The weight that products see."""
    return values.astype(np.float32) * scales[:, None]


def is_quantized(dtype: str) -> bool:
    """Whether a type's numbers mean something only with their scales."""
    return dtype in _LIMITS
