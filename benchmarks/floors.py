"""What a card needs at least for a pass: bytes at a measured rate, products at a stated one."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Case
from benchmarks.rig import Rig

H200_FLOPS = 790e12  # bfloat16 products a second, measured on random numbers


def weight_stream(rig: Rig) -> dict[str, float]:
    """The floor: the rate of one read-only pass over the KV pool, and what it means for weights."""
    (pool,) = rig.state.pools
    part = pool[:1, :1] if jax.default_backend() == "cpu" else pool
    read = jax.jit(jnp.max).lower(part).compile(compiler_options=rig.options)
    rate = part.nbytes / in_a_row(lambda: read(part), 5)  # bytes a ms
    named = zip(rig.tree.paths, rig.state.leaves, strict=True)
    body = sum(leaf.nbytes for path, leaf in named if path.startswith("layers."))
    head = rig.state.head.nbytes
    return {
        "body_bytes": body,
        "head_bytes": head,
        "read_tb_per_s": round(rate / 1e9, 3),
        "body_ms": round(body / rate, 3),
        "body_and_head_ms": round((body + head) / rate, 3),
    }


def floor_ms(rig: Rig, case: Case, floor: dict[str, float]) -> float:
    """Weights and cached keys at the stream's rate, or the products at the card's: the longer."""
    cached = case.prefix * case.num_requests * rig.state.pools[0].nbytes / rig.sizes.pool_tokens
    read = floor["body_and_head_ms"] + cached / (floor["read_tb_per_s"] * 1e9)
    is_h200 = "H200" in jax.devices()[0].device_kind
    return round(max(read, flops(rig, case) / H200_FLOPS * 1e3 if is_h200 else 0.0), 3)


def flops(rig: Rig, case: Case) -> float:
    """Of the body's products and of causal attention."""
    named, config = zip(rig.tree.paths, rig.state.leaves, strict=True), rig.config
    weights = sum(leaf.size for path, leaf in named if path.startswith("layers."))
    pairs = sum(length * (case.prefix + length / 2) for length in case.lens())
    attended = 4 * pairs * config.num_q_heads * config.head_dim * config.num_layers
    return 2.0 * weights * case.num_tokens + attended


def in_a_row(call: Callable[[], Any], repeats: int, *, rounds: int = 3) -> float:
    """Milliseconds a call when none is awaited but the last; of the best of some rounds."""
    found: list[float] = []
    for _ in range(rounds):
        jax.block_until_ready(call())
        begun = time.perf_counter()
        for _ in range(repeats - 1):
            call()
        jax.block_until_ready(call())
        found.append((time.perf_counter() - begun) / repeats)
    return round(min(found) * 1e3, 3)
