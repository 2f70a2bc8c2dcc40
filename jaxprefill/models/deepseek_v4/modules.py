"""The weights of a layer and the products that need no other token. Knows no cache."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxprefill.config import ModelConfig
from jaxprefill.kernels.device import product_precision
from jaxprefill.kernels.experts import Gate
from jaxprefill.latent_config import LatentConfig, LayerKind
from jaxprefill.models.layers import linear, parameter, rms_norm, unit_rms
from jaxprefill.models.moe import RoutedExperts, route
from jaxprefill.models.sharding import all_reduce, look_up

_EXACT = jnp.dtype(jnp.float32)  # small weights that stay exact whatever the model's dtype


def latent_of(config: ModelConfig) -> LatentConfig:
    """What such a model's config must have."""
    assert config.latent is not None, "a DeepSeek-V4 config says so"
    return config.latent


def rotate_tail(
    x: Float[Array, "T heads D"], table: Float[Array, "2 T half"], *, is_back: bool = False
) -> Float[Array, "T heads D"]:
    """Rotary embedding of the last 2 * half dimensions, of which neighbours are a pair.

    `is_back` turns the other way.
    """
    cos, sin = table[0][:, None], table[1][:, None] * (-1 if is_back else 1)
    at = x.shape[-1] - 2 * table.shape[-1]
    rest, tail = x[..., :at], x[..., at:].astype(jnp.float32)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return jnp.concatenate([rest, turned.reshape(tail.shape).astype(x.dtype)], axis=-1)


def clamped_mlp(gate_up: Float[Array, "T twice"], limit: float) -> Float[Array, "T half"]:
    """silu(gate) * up, each cut at the limit first."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return clamped(gate, up, limit)


def clamped(
    gate: Float[Array, "T half"], up: Float[Array, "T half"], limit: float
) -> Float[Array, "T half"]:
    """The same of halves that are apart."""
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


class Mixing(NamedTuple):
    """How a block's input is drawn from the streams, and its output goes back."""

    block_input: Float[Array, "T E"]
    post: Float[Array, "T n"]
    comb: Float[Array, "T n n"]

    def expand(
        self, streams: Float[Array, "T n E"], output: Float[Array, "T E"]
    ) -> Float[Array, "T n E"]:
        """The streams after the block."""
        mixed = jnp.einsum("tjk,tje->tke", self.comb, streams, precision=lax.Precision.HIGHEST)
        return self.post[..., None] * output[:, None] + mixed


class HyperConnection(nnx.Module):
    """Manifold-constrained hyper-connection around one block (arXiv 2512.24880)."""

    def __init__(self, config: ModelConfig) -> None:
        """Weights of what is read from the streams, what is written, and how they mix."""
        self.latent, self.norm_eps = latent_of(config), config.norm_eps
        count = self.latent.num_streams
        size = (2 + count) * count
        self.function = parameter((size, count * config.hidden_size), _EXACT, (None, None))
        self.base = parameter((size,), _EXACT, (None,))
        self.scale = parameter((3,), _EXACT, (None,))

    def __call__(self, streams: Float[Array, "T n E"]) -> Mixing:
        """The mixing of these rows; `comb` is doubly stochastic up to the steps taken."""
        count, eps = self.latent.num_streams, self.latent.hyper_eps
        normed = unit_rms(streams.reshape(len(streams), -1), self.norm_eps)
        mixes = linear(normed, self.function[...])
        at = (count, 2 * count)
        pre, post, comb = (
            mix * scale + base
            for mix, scale, base in zip(
                jnp.split(mixes, at, axis=1),
                self.scale[...],
                jnp.split(self.base[...], at),
                strict=True,
            )
        )
        comb = jax.nn.softmax(comb.reshape(-1, count, count), axis=-1) + eps
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
        for _ in range(self.latent.sinkhorn_steps - 1):
            comb = comb / (comb.sum(-1, keepdims=True) + eps)
            comb = comb / (comb.sum(-2, keepdims=True) + eps)
        drawn = ((jax.nn.sigmoid(pre) + eps)[..., None] * streams).sum(1)
        return Mixing(drawn, 2 * jax.nn.sigmoid(post), comb)


class HyperHead(nnx.Module):
    """What the final norm reads from the streams."""

    def __init__(self, config: ModelConfig) -> None:
        """One weight a stream, from all of them."""
        self.latent, self.norm_eps = latent_of(config), config.norm_eps
        count = self.latent.num_streams
        self.function = parameter((count, count * config.hidden_size), _EXACT, (None, None))
        self.base = parameter((count,), _EXACT, (None,))
        self.scale = parameter((1,), _EXACT, (None,))

    def __call__(self, streams: Float[Array, "T n E"]) -> Float[Array, "T E"]:
        """The weighted sum of the streams."""
        normed = unit_rms(streams.reshape(len(streams), -1), self.norm_eps)
        mixes = linear(normed, self.function[...]) * self.scale[...] + self.base[...]
        return ((jax.nn.sigmoid(mixes) + self.latent.hyper_eps)[..., None] * streams).sum(1)


class Compressor(nnx.Module):
    """Makes one entry of `rate` tokens: a softmax over them, channel by channel.

    Attributes:
        num_parts: 2 where an entry overlaps the window before: that one's tokens count with the
            first part of their channels, its own with the second; else 1.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, is_sparse: bool, dim: int) -> None:
        """`dim` channels an entry."""
        latent = latent_of(config)
        self.rate = latent.sparse_rate if is_sparse else latent.heavy_rate
        self.num_parts, self.dim, self.norm_eps = 1 + is_sparse, dim, config.norm_eps
        size = self.num_parts * dim
        self.kv_gate = parameter((2 * size, config.hidden_size), dtype, (None, None))
        self.bias = parameter((self.rate, size), _EXACT, (None, None))
        self.norm = parameter((dim,), _EXACT, (None,))

    def project(
        self, normed: Float[Array, "T E"]
    ) -> tuple[Float[Array, "T parts D"], Float[Array, "T parts D"]]:
        """(values, gates without the bias of their place) of each token."""
        made = linear(normed, self.kv_gate[...]).astype(jnp.float32)
        kv, gate = made.reshape(len(normed), 2, self.num_parts, self.dim).transpose(1, 0, 2, 3)
        return kv, gate

    def place_bias(self, positions: Int32[Array, "..."]) -> Float[Array, "... parts D"]:
        """What a position adds to the gates."""
        bias = self.bias[...].reshape(self.rate, self.num_parts, self.dim)
        return bias[positions % self.rate]

    def finish(
        self, pooled: Float[Array, "C D"], table: Float[Array, "2 C half"]
    ) -> Float[Array, "C D"]:
        """Entries of their windows' sums; `table` is of each window's first position."""
        normed = rms_norm(pooled, self.norm[...], self.norm_eps)
        return rotate_tail(normed[:, None], table)[:, 0]


class Indexer(nnx.Module):
    """Scores compressed entries for every query."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        """Queries are made of the same latent as attention's; keys by a compressor of its own."""
        latent = latent_of(config)
        self.heads, self.dim = latent.index_heads, latent.index_dim
        self.compressor = Compressor(config, dtype, is_sparse=True, dim=self.dim)
        self.query = parameter((self.heads * self.dim, latent.query_rank), dtype, (None, None))
        self.weight = parameter((self.heads, config.hidden_size), dtype, (None, None))

    def project(
        self,
        query_latent: Float[Array, "T rank"],
        normed: Float[Array, "T E"],
        table: Float[Array, "2 T half"],
    ) -> tuple[Float[Array, "T I D"], Float[Array, "T I"]]:
        """(queries, head weights with both scales folded in)."""
        q = linear(query_latent, self.query[...]).reshape(-1, self.heads, self.dim)
        weights = linear(normed, self.weight[...]).astype(jnp.float32)
        return rotate_tail(q, table), weights * (self.heads * self.dim) ** -0.5


def index_scores(
    q: Float[Array, "T I D"], weights: Float[Array, "T I"], keys: Float[Array, "S D"]
) -> Float[Array, "T S"]:
    """Sum over heads of weight * relu(q . k), float32."""
    dots = jnp.einsum(
        "tid,sd->tis",
        q,
        keys,
        precision=product_precision(keys.dtype),
        preferred_element_type=jnp.float32,
    )
    return jnp.einsum("tis,ti->ts", jax.nn.relu(dots), weights, precision=lax.Precision.HIGHEST)


class LatentAttention(nnx.Module):
    """Projections around the attention core: one latent that is key and value of all heads."""

    def __init__(self, config: ModelConfig, kind: LayerKind, dtype: jnp.dtype) -> None:
        """`down` stacks the rows of the query's latent and of the key's."""
        latent, heads, dim = latent_of(config), config.num_q_heads, config.head_dim
        grouped = latent.num_groups * latent.group_rank
        self.config, self.latent = config, latent
        self.down = parameter((latent.query_rank + dim, config.hidden_size), dtype, (None, None))
        self.query = parameter((heads * dim, latent.query_rank), dtype, ("heads", None))
        self.group = parameter((grouped, heads * dim // latent.num_groups), dtype, ("heads", None))
        self.output = parameter((config.hidden_size, grouped), dtype, (None, "heads"))
        self.query_norm = parameter((latent.query_rank,), _EXACT, (None,))
        self.key_norm = parameter((dim,), _EXACT, (None,))
        self.sinks = parameter((heads,), _EXACT, ("heads",))
        if kind != "sliding":
            self.compressor = Compressor(config, dtype, is_sparse=kind == "sparse", dim=dim)
        if kind == "sparse":
            self.indexer = Indexer(config, dtype)

    def latents(
        self, normed: Float[Array, "T E"], table: Float[Array, "2 T half"]
    ) -> tuple[Float[Array, "T rank"], Float[Array, "T D"]]:
        """(latents that queries are made of, keys): both normed, keys rotated."""
        eps = self.config.norm_eps
        query, key = jnp.split(linear(normed, self.down[...]), (self.latent.query_rank,), axis=1)
        query = rms_norm(query, self.query_norm[...], eps)
        key = rms_norm(key, self.key_norm[...], eps)
        return query, rotate_tail(key[:, None], table)[:, 0]

    def queries(
        self, latent: Float[Array, "T rank"], table: Float[Array, "2 T half"]
    ) -> Float[Array, "T H D"]:
        """Normed, rotated heads, scaled for the dot product."""
        q = linear(latent, self.query[...]).reshape(len(latent), -1, self.config.head_dim)
        q = rotate_tail(unit_rms(q, self.config.norm_eps), table)
        return q * self.config.head_dim**-0.5

    def grouped(
        self, attended: Float[Array, "T H D"], table: Float[Array, "2 T half"]
    ) -> Float[Array, "T grouped"]:
        """Values turned back by the query's angle; each group of heads through its own rows."""
        groups, rank = self.latent.num_groups, self.latent.group_rank
        rows = rotate_tail(attended, table, is_back=True).reshape(len(attended), groups, -1)
        weight = self.group[...]
        made = jnp.einsum(
            "tgi,goi->tgo",
            rows.astype(weight.dtype),
            weight.reshape(groups, rank, -1),
            precision=product_precision(weight.dtype),
            preferred_element_type=jnp.float32,
        )
        return made.reshape(len(attended), -1)


class HashedMoe(RoutedExperts):
    """Experts chosen by score, or in the first layers by token id, and one that sees all tokens."""

    def __init__(self, config: ModelConfig, *, is_hashed: bool, dtype: jnp.dtype) -> None:
        """`table` lists each token id's experts; the bias counts for the choice alone."""
        assert config.moe is not None, "every layer has experts"
        moe, width, size = config.moe, config.hidden_size, config.mlp_size
        self.config, self.moe, self.is_hashed = config, moe, is_hashed
        self.router = parameter((moe.num_experts, width), dtype, (None, None))
        if is_hashed:
            ids = (config.vocab_size, moe.num_chosen)
            self.table = parameter(ids, jnp.dtype(jnp.int32), ("vocab", None))
        else:
            self.bias = parameter((moe.num_experts,), _EXACT, (None,))
        self.gate_up = parameter((2 * moe.num_experts, size, width), dtype, (None, "mlp", None))
        self.down = parameter((moe.num_experts, width, size), dtype, (None, None, "mlp"))
        self.shared_gate_up = parameter((2 * size, width), dtype, ("mlp", None))
        self.shared_down = parameter((width, size), dtype, (None, "mlp"))

    def __call__(
        self, normed: Float[Array, "T E"], ids: Int32[Array, " T"], num_tokens: Int32[Array, ""]
    ) -> Float[Array, "T E"]:
        """What the experts give together; padding tokens reach the shared one alone."""
        limit = latent_of(self.config).swiglu_limit
        logits = linear(normed, self.router[...])
        if self.is_hashed:
            chosen = look_up(self.table[...], ids, self.config).astype(jnp.int32)
            routing = route(logits, self.moe, chosen=chosen)
        else:
            routing = route(logits, self.moe, bias=self.bias[...])
        shared = clamped_mlp(linear(normed, self.shared_gate_up[...]), limit)
        routed = self._run(normed, routing, num_tokens)
        return all_reduce(routed + linear(shared, self.shared_down[...]), self.config)

    def _gate(self) -> Gate:
        return partial(clamped, limit=latent_of(self.config).swiglu_limit)
