"""Whether the kernels compute on this very device what plain JAX does: asked before they serve.

A driver, compiler or chip that nobody tried must not answer requests with wrong numbers.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from jaxprefill.errors import KernelError
from jaxprefill.kernels.attention import CAUSAL, AttentionBackend, AttentionSpec, RaggedBatch
from jaxprefill.kernels.attention.cases import AttentionCase, make_inputs
from jaxprefill.kernels.attention.rotation import plain_norm_and_rotate
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.kernels.decoder_layer import gemm, xla
from jaxprefill.kernels.decoder_layer.api import LayerStream, LayerWeights
from jaxprefill.kernels.decoder_layer.select import (
    LayerSizes,
    choose_gated_tiles,
    choose_head_tiles,
    choose_tiles,
)
from jaxprefill.kernels.experts import ExpertWeights, GroupedExperts, combine, plan_blocks
from jaxprefill.kernels.latent_attention import attend_latent, choose_latent_tiles
from jaxprefill.kernels.latent_attention.cases import LatentCase, make_latent_inputs
from jaxprefill.kernels.latent_attention.reference import reference_latent_attention
from jaxprefill.kernels.top_k import ChoiceTiles, EntryPages, choose_entries

_LIMITS = {"float32": 1e-4, "bfloat16": 1e-2}  # of the error's norm over the result's
_ROWS, _WIDTH, _DEPTH, _HEAD_DIM, _EPS = 16, 512, 1024, 64, 1e-6


def check_attention(
    backend: AttentionBackend,
    *,
    heads: tuple[int, int, int],
    page_size: int,
    dtype: jnp.dtype,
    spec: AttentionSpec = CAUSAL,
) -> None:
    """Prefill in a small and a large bucket, and decode, on peaked inputs.

    `heads` are (query, KV, dim).

    Raises:
        KernelError: names the kernel, its error and the limit.
    """
    sizes: dict[str, Any] = dict(zip(("q_heads", "kv_heads", "head_dim"), heads, strict=True))
    sizes |= {"page_size": page_size, "num_slots": 4, "max_context": 1024} | spec._asdict()
    for case in (
        AttentionCase(name="prefill", q_lens=(30, 3), kv_lens=(930, 3), num_tokens=64, **sizes),
        AttentionCase(
            name="long prefill", q_lens=(130, 64, 3), kv_lens=(930, 64, 403), num_tokens=2048,
            **sizes,
        ),
        AttentionCase(
            name="decode", q_lens=(1,) * 3, kv_lens=(900, 256, 1), num_tokens=4, is_decode=True,
            **sizes,
        ),
    ):  # fmt: skip
        found = _attend(backend, case, dtype, dtype)
        expected = _attend(XLA, case, dtype, jnp.dtype("float32"))
        _compare(f"{backend.name} attention ({case.name})", found, expected, dtype)


def check_products(
    dtype: jnp.dtype, *, quantization: str | None = None, interpret: bool = False
) -> None:
    """The fused layer's products, with weights of the type that is served.

    `interpret` runs them on any device.

    Raises:
        KernelError: names the kernel, its error and the limit.
    """
    for name, ours, plain in _products(dtype, quantization, interpret=interpret):
        found, expected = jax.jit(ours)(), jax.jit(plain)()
        _compare(f"pallas_triton {name} product", found, expected, dtype)


def check_experts(dtype: jnp.dtype, *, interpret: bool = False) -> None:
    """Two products of grouped rows; `interpret` runs them on any device.

    Raises:
        KernelError: names the kernel, its error and the limit.
    """
    rng = np.random.default_rng(1)
    num_experts, width, size = 3, 64, 96

    def draw(*shape: int) -> Float[Array, "..."]:
        return jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype)

    weights = ExpertWeights(draw(2 * num_experts, size, width), draw(num_experts, width, size))
    chosen = jnp.asarray(rng.permuted(np.tile([0, 0, 2], (_ROWS, 1)), axis=1)[:, :1], jnp.int32)
    x, scores = draw(_ROWS, width), jnp.ones((_ROWS, 1))

    def ours() -> Float[Array, "T E"]:
        grouped = GroupedExperts(weights, lambda gate, up: gate * up, interpret=interpret)
        rows = grouped.block_rows(_ROWS, num_experts)
        blocks = plan_blocks(chosen, jnp.int32(_ROWS), num_experts, rows)
        return combine(grouped(x, blocks), blocks, scores)

    def plain() -> Float[Array, "T E"]:
        exact = [weight.astype(jnp.float32) for weight in (weights.gate_up, weights.down)]
        with jax.default_matmul_precision("highest"):
            both = jnp.einsum("ti,moi->mto", x.astype(jnp.float32), exact[0])
            made = jnp.einsum("eti,eoi->teo", both[0::2] * both[1::2], exact[1])
        return jnp.take_along_axis(made, chosen[..., None], axis=1)[:, 0]

    found, expected = jax.jit(ours)(), jax.jit(plain)()
    _compare("pallas_triton experts", found, expected, dtype)


def check_choice(dtype: jnp.dtype, *, interpret: bool = False) -> None:
    """The best entries of some queries, of small whole numbers: exact, with ties.

    Raises:
        KernelError: names the kernel, and how far what it chose is from the best.
    """
    rng = np.random.default_rng(2)
    tokens, num_entries, page_size, top_k = 8, 512, 64, 16
    shapes = ((tokens, 16, 32), (tokens, 16), (num_entries // page_size, page_size, 32))
    q, weights, keys = (jnp.asarray(rng.integers(-2, 3, shape), dtype) for shape in shapes)
    count, none = jnp.array([tokens], jnp.int32), jnp.zeros(1, jnp.int32)
    table = jnp.asarray(rng.permutation(len(keys))[None], jnp.int32)
    batch = RaggedBatch(
        kv_rows=jnp.zeros(tokens, jnp.int32), q_lens=count, kv_lens=none + num_entries,
        q_starts=none, page_table=table, tile_slot=none, tile_start=none, num_tiles=jnp.int32(1),
    )  # fmt: skip
    row = jnp.arange(tokens)[:, None]

    def member(chosen: Int32[Array, "T k"]) -> Float[Array, "T entries"]:
        return jnp.zeros((tokens, num_entries)).at[row, chosen].set(1)

    def ours() -> Float[Array, "T entries"]:
        pages = EntryPages(keys, jnp.int32(0), page_size, 1)
        tiles = ChoiceTiles(blocks=1)  # short lists, so that they are cut on the way
        chosen = choose_entries(
            q, weights, pages, batch, top_k=top_k, tile_q=tokens, tiles=tiles, interpret=interpret
        )
        return member(chosen)

    def plain() -> Float[Array, "T entries"]:
        exact = [x.astype(jnp.float32) for x in (q, weights, keys[table[0]].reshape(-1, 32))]
        with jax.default_matmul_precision("highest"):
            dots = jax.nn.relu(jnp.einsum("tid,sd->tis", exact[0], exact[2]))
            scores = jnp.einsum("tis,ti->ts", dots, exact[1])
        is_seen = jnp.arange(num_entries) <= num_entries - tokens + row
        return member(jax.lax.top_k(jnp.where(is_seen, scores, -jnp.inf), top_k)[1])

    _compare("pallas_triton choice of entries", jax.jit(ours)(), jax.jit(plain)(), dtype)


def check_latent_attention(
    dtype: jnp.dtype, *, num_heads: int, dim: int, interpret: bool = False
) -> None:
    """A window and chosen entries, by programs with few heads and many, and by splits of keys.

    Raises:
        KernelError: names the kernel, its error and the limit.
    """
    case = LatentCase(
        name="chunk", q_lens=(8,), kv_lens=(256,), num_tokens=8, tile_q=8, page_size=32,
        num_heads=num_heads, dim=dim, reach=100, rate=4, top_k=40,
    )  # fmt: skip
    q, keys, sinks, batch = make_latent_inputs(case, dtype)
    expected = jnp.asarray(reference_latent_attention(q, keys, sinks, batch), jnp.float32)
    for tiles in {choose_latent_tiles(count, num_heads, 8192, dtype) for count in (1, 16, 8192)}:
        attend = partial(attend_latent, tile_q=case.tile_q, tiles=tiles, interpret=interpret)
        found = jax.jit(lambda q, *others, run=attend: run(q, keys, *others))(q, sinks, batch)
        _compare("pallas_triton latent attention", found, expected, dtype)


def _attend(
    backend: AttentionBackend, case: AttentionCase, dtype: jnp.dtype, computed: jnp.dtype
) -> Float[Array, "T H D"]:
    """Real rows of the case, its inputs rounded to `dtype`, in `computed` arithmetic."""
    inputs = make_inputs(case, backend, peaked=True)
    names = ("q", "k", "v", "pool")
    arrays = (jnp.asarray(getattr(inputs, name), dtype).astype(computed) for name in names)
    sinks = () if inputs.sinks is None else (jnp.asarray(inputs.sinks),)
    attend = jax.jit(backend.make(inputs.tiles, case.spec))
    with jax.default_matmul_precision("highest"):
        out, _ = attend(*arrays, inputs.batch, jnp.int32(inputs.first_page), *sinks)
    return out[: case.num_real_tokens]


class _Operands(NamedTuple):
    """Of the products: random rows and weights, weights in eight bits with their scales."""

    x: Float[Array, "T E"]
    hidden: Float[Array, "T F"]
    norms: Float[Array, "2 F"]
    weight: Shaped[Array, "F E"]
    scales: Float[Array, " F"] | None
    heads: LayerWeights  # its `gate_up` is [2 F, E]
    rotary: Float[Array, "2 T half"]


def _draw_operands(dtype: jnp.dtype, quantization: str | None) -> _Operands:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Float[Array, "..."]:
        return jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype)

    def draw_weight(outputs: int) -> tuple[Array, Array | None]:
        weight = draw(outputs, _DEPTH)
        if quantization is None:
            return weight, None
        return (weight * 1000).astype(quantization), jnp.linspace(5e-4, 2e-3, outputs)

    x, hidden, norms = draw(_ROWS, _DEPTH), draw(_ROWS, _WIDTH), draw(2, _WIDTH)
    (weight, scales), (gate_up, pair_scales) = draw_weight(_WIDTH), draw_weight(2 * _WIDTH)
    heads = LayerWeights(
        gate_up, weight, gate_up, weight, qk_norms=draw(2, _HEAD_DIM), qkv_scale=pair_scales
    )
    angle = draw(_ROWS, _HEAD_DIM // 2).astype(jnp.float32)
    rotary = jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    return _Operands(x, hidden, norms, weight, scales, heads, rotary)


def _products(
    dtype: jnp.dtype, quantization: str | None, *, interpret: bool
) -> Iterator[tuple[str, Callable[[], Array], Callable[[], Array]]]:
    """(name, ours, plain JAX's) of each kind, over the same random operands."""
    x, hidden, norms, weight, scales, heads, rotary = _draw_operands(dtype, quantization)
    gate_up, pair_scales = heads.gate_up, heads.qkv_scale
    sizes = LayerSizes(_DEPTH, 2 * _WIDTH, _WIDTH, _WIDTH, _HEAD_DIM)
    kv_heads = _WIDTH // _HEAD_DIM // 2
    itemsize = weight.dtype.itemsize
    tiles = choose_tiles(_ROWS, _DEPTH, _WIDTH, itemsize=itemsize)
    gated_tiles = choose_gated_tiles(_ROWS, _DEPTH, _WIDTH, itemsize=itemsize)
    head_tiles = choose_head_tiles(_ROWS, sizes, itemsize=itemsize)
    num_counters = max(
        gemm.num_arrivals(_ROWS, _WIDTH, one) for one in (tiles, gated_tiles, head_tiles)
    )
    counters: Int32[Array, " tiles"] = jnp.zeros(num_counters, jnp.int32)
    squares = jnp.square(x.astype(jnp.float32)).sum(1, keepdims=True)
    stream = LayerStream(x.astype(jnp.float32), x, squares, counters)
    own = LayerStream(hidden.astype(jnp.float32), hidden, squares, counters)
    layer = jnp.int32(0)

    def plain_heads() -> Float[Array, "T heads D"]:
        rows = xla.project(stream, heads.qkv, None, norm_eps=_EPS, scales=pair_scales)
        rows = rows.reshape(_ROWS, -1, _HEAD_DIM)
        return plain_norm_and_rotate(rows, rotary, heads.qk_norms, kv_heads=kv_heads, norm_eps=_EPS)

    yield (
        "rotated",
        lambda: (
            gemm.project_rotated(
                stream, heads, rotary, layer, kv_heads=kv_heads, tiles=head_tiles, norm_eps=_EPS,
                interpret=interpret,
            )[0].reshape(_ROWS, -1, _HEAD_DIM)
        ),
        plain_heads,
    )  # fmt: skip
    yield (
        "gated",
        lambda: gemm.project_gated(
            stream, gate_up, layer, tiles=gated_tiles, norm_eps=_EPS, scales=pair_scales,
            interpret=interpret,
        )[0],
        lambda: xla.project_gated(stream, gate_up, norm_eps=_EPS, scales=pair_scales),
    )  # fmt: skip
    yield (
        "residual",
        lambda: (
            gemm.project_residual(
                x, weight, own, norms, layer, norm_row=1, tiles=tiles, scales=scales,
                interpret=interpret,
            ).hidden
        ),
        lambda: xla.project_residual(
            x, weight, own, norms, layer, norm_row=1, scales=scales
        ).hidden,
    )  # fmt: skip


def _compare(
    name: str, found: Float[Array, "..."], expected: Float[Array, "..."], dtype: jnp.dtype
) -> None:
    want = np.asarray(expected, np.float32)
    error = np.linalg.norm(np.asarray(found, np.float32) - want) / np.linalg.norm(want)
    if not error <= _LIMITS[dtype.name]:
        raise KernelError(
            f"the kernel {name} must compute in {dtype.name} what plain JAX does on this device, "
            f"within {_LIMITS[dtype.name]:g} of the result's norm, got {error:.2g}; serve with "
            "attention_backend='xla', and report the chip, the driver and jax's version"
        )
