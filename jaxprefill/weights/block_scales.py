"""Weights of eight or four bits with a scale for each block, as checkpoints are published.

    F8_E4M3   a block is `weight_block_size` of config.json; those at the ends are cut off
    I8, U8    two e2m1 numbers a byte, the low four bits first; a block is 32 of a row
    U8        the same of all experts, [experts, outputs, blocks, 16]: gpt-oss's MXFP4, which is
              read as [experts, inputs, outputs]

Scales are numbers, or powers of two: E8M0, whose bits may be called U8.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from jaxprefill.errors import CheckpointError
from jaxprefill.models.hf_quantization import MXFP4_BLOCK
from jaxprefill.weights.safetensors_files import StoredTensor

_E8M0 = jnp.dtype("float8_e8m0fnu")
_BYTES = ("I8", "U8")
_POWERS = ("F8_E8M0", "U8")
_SCALES = ("F32", "BF16", "F16", *_POWERS)
_SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_SIZES, -_SIZES])
_STACKED = 4  # dimensions of blocks that hold all experts
_ROWS = 64  # decoded and turned at a time, in a core's cache: four times faster than all


def scaled_shape(weight: StoredTensor) -> tuple[int, ...]:
    """The shape of the numbers that the tensor holds."""
    if len(weight.shape) == _STACKED:
        experts, outputs, blocks, half = weight.shape
        return experts, blocks * 2 * half, outputs
    *rows, columns = weight.shape
    return (*rows, columns * (2 if weight.dtype in _BYTES else 1))


def require_scaled(
    name: str, weight: StoredTensor, scales: StoredTensor, block: tuple[int, int] | None
) -> None:
    """Raises CheckpointError unless `dequantize` can take the two."""
    if weight.dtype not in ("F8_E4M3", *_BYTES) or scales.dtype not in _SCALES:
        raise CheckpointError(
            f"tensor {name!r} with scales must have type F8_E4M3, I8 or U8 and its scales one of "
            f"{', '.join(_SCALES)}, got {weight.dtype} and {scales.dtype}; use other weights"
        )
    if block is None:
        raise CheckpointError(
            f"tensor {name!r} has scales, so config.json must hold a quantization_config with "
            "their weight_block_size; fetch it again"
        )
    shape, sides = scaled_shape(weight), MXFP4_BLOCK if weight.dtype in _BYTES else block
    wanted = tuple(-(-size // side) for size, side in zip(shape, sides, strict=False))
    is_known = len(shape) == 2
    if len(weight.shape) == _STACKED:
        wanted, is_known = weight.shape[:3], weight.dtype == "U8" and weight.shape[3] == 16
    if not is_known or scales.shape != wanted:
        raise CheckpointError(
            f"tensor {name!r} of shape {list(shape)} must have scales of shape {list(wanted)}, one "
            f"a block of {sides[0]} x {sides[1]}, got {list(scales.shape)}; the files do not match "
            "their configuration"
        )


def dequantize(
    values: Shaped[np.ndarray, "rows _"] | Shaped[np.ndarray, "experts outputs blocks 16"],
    scales: Shaped[np.ndarray, "_ _"] | Shaped[np.ndarray, "experts outputs blocks"],
    block: tuple[int, int] = MXFP4_BLOCK,
) -> Float[np.ndarray, "rows columns"] | Float[np.ndarray, "experts inputs outputs"]:
    """The weight: bfloat16 where scales are powers of two, as all of its bits fit; else float32."""
    if values.ndim == _STACKED:
        experts, outputs, blocks, half = values.shape
        found = np.empty((experts, blocks * 2 * half, outputs), jnp.bfloat16)
        for expert, row in itertools.product(range(experts), range(0, outputs, _ROWS)):
            rows = slice(row, row + _ROWS)
            part = dequantize(values[expert, rows].reshape(-1, blocks * half), scales[expert, rows])
            # As bits: NumPy moves numbers of this type one by one.
            found.view(np.uint16)[expert, :, rows] = part.view(np.uint16).T
        return found
    is_exact = scales.dtype.name in ("uint8", _E8M0.name)
    is_packed = values.dtype.name in ("int8", "uint8")
    if is_exact and is_packed and values.shape[1] % 16 == 0:
        blocks = values.view(np.uint8).reshape(*scales.shape, 16)
        which = scales.view(np.uint8)[..., None].astype(np.uint16) << 8 | blocks
        return np.take(_pairs(), which).view(jnp.bfloat16).reshape(len(values), -1)
    if is_packed:
        values, block = _unpacked(values.view(np.uint8)), MXFP4_BLOCK
    if is_exact:
        scales = scales.view(_E8M0)
    weight = values.astype(np.float32)
    factors = scales.astype(np.float32).repeat(block[1], axis=1)[:, : weight.shape[1]]
    for at, row in enumerate(factors):
        weight[at * block[0] : (at + 1) * block[0]] *= row
    return weight.astype(jnp.bfloat16) if is_exact else weight


@functools.cache
def _pairs() -> Shaped[np.ndarray, " 65536"]:
    """The bits of the two bfloat16 numbers that each byte stands for, by scale * 256 + byte."""
    every = np.arange(256, dtype=np.uint8)
    powers = every.view(_E8M0).astype(np.float32)[:, None, None]
    with np.errstate(over="ignore"):  # 6 x 2 ** 127
        numbers = powers * _unpacked(every[:, None])
    return numbers.astype(jnp.bfloat16).view(np.uint32).reshape(-1)


def _unpacked(pairs: Shaped[np.ndarray, "rows half"]) -> Float[np.ndarray, "rows columns"]:
    """The numbers of bytes that hold two each."""
    both = np.stack([_E2M1[pairs & 15], _E2M1[pairs >> 4]], axis=-1)
    return both.reshape(len(pairs), -1)
