"""Weights in eight bits, each row of outputs with a scale of its own; products stay as they are.

values[o, i] * scales[o]  ~  weight[o, i]        int8, or float8_e4m3fn
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Shaped

SCALE = "_scale"  # a parameter's path + this is its scales' path
# What the largest number of a row may become, always a number of the type. Of float8 those of one
# octave: numbers are rounded alike an octave away.
_TOPS = {
    "int8": (127.0,),
    "float8_e4m3fn": (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0),
}
_COLUMNS = 1024  # are enough to choose a row's scale by
_LEAST = np.finfo(np.float32).tiny
_SENSITIVE = ("qkv", "down")


def kind_of(matrix: str, quantization: str) -> str:
    """The type of one of a dense layer's matrices in a model of this quantization.

    Numbers of float8 are rounded by 2.5 % (mean square), of int8 by 0.9 %, as their rows hold no
    outliers. What queries, keys and the MLP's last product lose by that is most of what a model
    in float8 alone loses, so these are int8: a byte as well, read at the same speed.
    """
    return "int8" if matrix in _SENSITIVE else quantization


def quantize(
    weight: Shaped[np.ndarray, "outputs inputs"], dtype: Any
) -> tuple[Shaped[np.ndarray, "outputs inputs"], Float32[np.ndarray, " outputs"]]:
    """(values in `dtype`, scales): of some scales a row gets that with the least squared error."""
    name, rows = jnp.dtype(dtype).name, weight.astype(np.float32, copy=False)
    largest = np.abs(rows).max(axis=1)
    # Rows of smaller numbers, whose scales might be zero, become zeros.
    largest = np.where(largest >= _LEAST, largest, 1).astype(np.float32)
    tries = [largest / np.float32(top) for top in _TOPS[name]]
    some = rows[:, :: -(-rows.shape[1] // _COLUMNS)]

    def error(scales: Float32[np.ndarray, " outputs"]) -> Float32[np.ndarray, " outputs"]:
        return np.square(dequantize(_rounded(some, scales, name), scales) - some).sum(axis=1)

    scales = tries[0]
    if len(tries) > 1:
        scales = np.choose(np.argmin([error(one) for one in tries], axis=0), tries)
    return _rounded(rows, scales, name), scales


def _rounded(
    rows: Float32[np.ndarray, "outputs inputs"], scales: Float32[np.ndarray, " outputs"], name: str
) -> Shaped[np.ndarray, "outputs inputs"]:
    scaled = rows / scales[:, None]
    if name == "int8":
        scaled = np.clip(np.rint(scaled), -127, 127)
    return scaled.astype(jnp.dtype(name))


def dequantize(
    values: Shaped[np.ndarray, "outputs inputs"], scales: Float32[np.ndarray, " outputs"]
) -> Float32[np.ndarray, "outputs inputs"]:
    """The weight that products see."""
    return values.astype(np.float32) * scales[:, None]


def is_quantized(dtype: str) -> bool:
    """Whether a type's numbers mean something only with their scales."""
    return dtype in _TOPS
