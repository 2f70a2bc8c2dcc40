"""What Pallas kernels have in common."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32, Shaped

Ref = Any  # a Pallas reference: [index] loads and stores; jax has no public type for it
MIN_DOT = 16  # smallest side of a Triton dot
LOG2_E = math.log2(math.e)


def dot(
    a: Shaped[Array, "m n"], b: Shaped[Array, "..."], *, trans_b: bool = False
) -> Float32[Array, "m k"]:
    """A b, or a b^T: float32 sums; float32 operands are not rounded to TensorFloat-32."""
    return plt.dot(a, b, trans_b=trans_b, precision=lax.Precision.HIGHEST)


# A register of eight-bit numbers becomes registers of bfloat16 pairs, exactly. Triton's own way
# through float16 takes a slow instruction a number for float8, and for int8 parts and joins bytes.
# int8: 0x43 before a byte is 128 + its low bits; less 128 or, where its sign bit is set, 256.
# float8_e4m3fn: the fields at their places in a bfloat16; their exponents are 120 apart.
_WIDEN = {
    ("int8", 2): """{
    .reg .b32 pair, part, minus;
    mov.b32 minus, 0xbf80bf80;
    cvt.u32.u16 pair, $1;
    prmt.b32 pair, pair, 0x43434343, 0x4140;
    and.b32 part, pair, 0xff80ff80;
    and.b32 pair, pair, 0xff7fff7f;
    fma.rn.bf16x2 $0, part, minus, pair;
    }""",
    ("int8", 4): """{
    .reg .b32 low, high, part, minus;
    mov.b32 minus, 0xbf80bf80;
    prmt.b32 low, $2, 0x43434343, 0x4140;
    prmt.b32 high, $2, 0x43434343, 0x4342;
    and.b32 part, low, 0xff80ff80;
    and.b32 low, low, 0xff7fff7f;
    fma.rn.bf16x2 $0, part, minus, low;
    and.b32 part, high, 0xff80ff80;
    and.b32 high, high, 0xff7fff7f;
    fma.rn.bf16x2 $1, part, minus, high;
    }""",
    ("float8_e4m3fn", 2): """{
    .reg .b32 pair, part, bias, zero;
    mov.b32 bias, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    cvt.u32.u16 pair, $1;
    prmt.b32 pair, pair, 0, 0x1404;
    shr.b32 part, pair, 4;
    and.b32 part, part, 0x07f007f0;
    lop3.b32 pair, pair, 0x80008000, part, 0xea;
    fma.rn.bf16x2 $0, pair, bias, zero;
    }""",
    ("float8_e4m3fn", 4): """{
    .reg .b32 high, low, pair, bias, zero;
    mov.b32 bias, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    shr.b32 high, $2, 4;
    and.b32 high, high, 0x07070707;
    lop3.b32 high, $2, 0x80808080, high, 0xea;
    shl.b32 low, $2, 4;
    and.b32 low, low, 0xf0f0f0f0;
    prmt.b32 pair, low, high, 0x5140;
    fma.rn.bf16x2 $0, pair, bias, zero;
    prmt.b32 pair, low, high, 0x7362;
    fma.rn.bf16x2 $1, pair, bias, zero;
    }""",
}


def widen(values: Shaped[Array, "..."], pack: int) -> Array:
    """Numbers of eight bits in bfloat16, exactly, `pack` at a time: 2 or 4.

    A float8 NaN becomes 480 or -480. Not for interpretation.
    """
    [wide] = plt.elementwise_inline_asm(
        _WIDEN[values.dtype.name, pack],
        args=[values],
        constraints="=r,h" if pack == 2 else "=r,=r,r",
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape, jnp.bfloat16)],
    )
    return wide


def power_of_two(least: int) -> int:
    """The smallest that is not below `least`."""
    return 1 << (least - 1).bit_length()
