"""The meaning of the op in plain jnp: one request at a time, dense, float32, nothing paged away."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jaxprefill.kernels.attention.api import as_numbers
from jaxprefill.kernels.attention.capabilities import CAUSAL, AttentionSpec


def reference_attention(
    q: Float[Array, "q H D"],
    keys: Float[Array, "k K D"],
    values: Float[Array, "k K D"],
    spec: AttentionSpec = CAUSAL,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "q H D"]:
    """Causal attention of the last `q` of `k` positions; scores and sums in float32."""
    group = q.shape[1] // keys.shape[1]
    keys = jnp.repeat(keys.astype(jnp.float32), group, axis=1)  # [k, H, D]
    values = jnp.repeat(values.astype(jnp.float32), group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), keys) * q.shape[-1] ** -0.5
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    position = jnp.arange(len(keys))[None] - (len(keys) - len(q))
    distance = jnp.arange(len(q))[:, None] - position
    visible = distance >= 0 if spec.window is None else (distance >= 0) & (distance < spec.window)
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:  # a key more, whose value is zero
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(keys)]
    return jnp.einsum("hqk,khd->qhd", weights, values).astype(q.dtype)


def read_pages(
    pool: Shaped[Array, "2 K P S D"], pages: list[int], kv_len: int
) -> tuple[Float[Array, "k K D"], Float[Array, "k K D"]]:
    """The first `kv_len` keys and values that a request's pages hold."""
    rows = as_numbers(pool[:, :, np.asarray(pages, np.int32)])  # [2, K, W, S, D]
    flat = rows.reshape(2, pool.shape[1], -1, pool.shape[-1]).transpose(0, 2, 1, 3)
    return flat[0, :kv_len], flat[1, :kv_len]
