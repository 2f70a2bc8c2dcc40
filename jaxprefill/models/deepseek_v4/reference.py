"""One request from its first token, no cache, no padding: what the cached path must equal.

Written for reading: every score and every mask is there as a whole.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxprefill.models.decoder import layer_rotations
from jaxprefill.models.deepseek_v4.decoder import DeepseekV4, DeepseekV4Layer
from jaxprefill.models.deepseek_v4.modules import Compressor, index_scores, latent_of
from jaxprefill.models.layers import linear, rms_norm


def reference_pass(
    model: DeepseekV4, ids: Int32[Array, " T"]
) -> tuple[Float[Array, "T E"], list[Bool[Array, "T S"]]]:
    """(rows behind the final norm, which entries each query of each sparse layer attends to)."""
    positions = jnp.arange(len(ids), dtype=jnp.int32)
    tables, rotations = model.rotary(positions), layer_rotations(model.config)
    streams, chosen = model.embed(ids), list[Array]()
    for index, layer in enumerate(model.layers):
        norms = model.norms[...][2 * index : 2 * index + 2]
        table = tables[2 * rotations[index] :][:2]
        streams, seen = _layer(layer, streams, norms, table, ids)
        if layer.kind == "sparse":
            chosen.append(seen)
    return model.final_norm(streams), chosen


def _layer(
    layer: DeepseekV4Layer,
    rows: Float[Array, "T nE"],
    norms: Float[Array, "2 E"],
    table: Float[Array, "2 T half"],
    ids: Int32[Array, " T"],
) -> tuple[Float[Array, "T nE"], Bool[Array, "T S"]]:
    eps, count = layer.config.norm_eps, jnp.int32(len(ids))
    streams = rows.reshape(len(rows), latent_of(layer.config).num_streams, -1)
    mixing = layer.attention_mixing(streams)
    normed = rms_norm(mixing.block_input, norms[0], eps)
    attended, seen = _attention(layer, normed, table)
    streams = mixing.expand(streams, attended)
    mixing = layer.mlp_mixing(streams)
    normed = rms_norm(mixing.block_input, norms[1], eps)
    return mixing.expand(streams, layer.moe(normed, ids, count)).reshape(rows.shape), seen


def _attention(
    layer: DeepseekV4Layer, normed: Float[Array, "T E"], table: Float[Array, "2 T half"]
) -> tuple[Float[Array, "T E"], Bool[Array, "T S"]]:
    """(what attention adds, the entries that were seen)."""
    attention, position = layer.attention, jnp.arange(len(normed))
    latent, keys = attention.latents(normed, table)
    distance = position[:, None] - position
    is_seen = (distance >= 0) & (distance < (layer.config.sliding_window or len(normed)))
    chosen = jnp.zeros((len(normed), 0), bool)
    if layer.kind != "sliding":
        entries = entries_of(attention.compressor, normed, table)
        keys = jnp.concatenate([keys, entries])
        chosen = visible_entries(layer, normed, table)
        is_seen = jnp.concatenate([is_seen, chosen], axis=1)
    q = attention.queries(latent, table)
    exact = lax.Precision.HIGHEST
    logits = jnp.einsum("thd,sd->ths", q, keys, precision=exact)
    logits = jnp.where(is_seen[:, None], logits, -jnp.inf)
    sinks = jnp.broadcast_to(attention.sinks[...][:, None], (*logits.shape[:2], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1]
    attended = jnp.einsum("ths,sd->thd", weights, keys, precision=exact)
    return linear(attention.grouped(attended, table), attention.output[...]), chosen


def visible_entries(
    layer: DeepseekV4Layer, normed: Float[Array, "T E"], table: Float[Array, "2 T half"]
) -> Bool[Array, "T S"]:
    """Which compressed entries each query attends to."""
    attention = layer.attention
    rate = attention.compressor.rate
    num_entries = len(normed) // rate
    entry = jnp.arange(num_entries)
    is_past = entry < (jnp.arange(len(normed))[:, None] + 1) // rate
    if layer.kind == "heavy" or num_entries == 0:
        return is_past
    latent, _ = attention.latents(normed, table)
    q, weights = attention.indexer.project(latent, normed, table)
    keys = entries_of(attention.indexer.compressor, normed, table)
    scores = jnp.where(is_past, index_scores(q, weights, keys), -jnp.inf)
    count = min(latent_of(layer.config).index_top_k, num_entries)
    chosen = lax.top_k(scores, count)[1]
    is_chosen = jnp.zeros_like(is_past).at[jnp.arange(len(normed))[:, None], chosen].set(True)
    return is_chosen & is_past


def entries_of(
    compressor: Compressor, normed: Float[Array, "T E"], table: Float[Array, "2 T half"]
) -> Float[Array, "S D"]:
    """The entries of all full windows."""
    rate, count = compressor.rate, len(normed) // compressor.rate
    whole = count * rate
    if count == 0:
        return jnp.zeros((0, compressor.dim), jnp.float32)
    kv, gate = compressor.project(normed)
    gate = gate + compressor.place_bias(jnp.arange(len(normed)))
    shape = (count, rate, compressor.num_parts, compressor.dim)
    kv, gate = kv[:whole].reshape(shape), gate[:whole].reshape(shape)
    values, gates = kv[:, :, -1], gate[:, :, -1]
    if compressor.num_parts == 2:  # the window before, through the first part of its channels
        pad = ((1, 0), (0, 0), (0, 0))
        before = jnp.pad(kv[:-1, :, 0], pad)
        gates_before = jnp.pad(gate[:-1, :, 0], pad, constant_values=-jnp.inf)
        values = jnp.concatenate([before, values], axis=1)
        gates = jnp.concatenate([gates_before, gates], axis=1)
    pooled = (jax.nn.softmax(gates, axis=1) * values).sum(1)
    return compressor.finish(pooled, table[:, :whole:rate])
