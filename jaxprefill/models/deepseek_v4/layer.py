"""One layer over paged pools: writes its keys, entries and state, then attends tile by tile."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxprefill.cache.spec import CacheSpec, PoolSpec
from jaxprefill.config import ModelConfig
from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.attention.api import Attend
from jaxprefill.kernels.attention.tiles import NO_ROW
from jaxprefill.kernels.latent_attention import lacks_attend_latent
from jaxprefill.kernels.top_k import lacks_choose_entries
from jaxprefill.models.decoder import LayerInputs, Pools
from jaxprefill.models.deepseek_v4.attend import (
    Seen,
    Tile,
    attend_in_kernel,
    attend_tile,
    by_tile,
)
from jaxprefill.models.deepseek_v4.choose import (
    Choice,
    CoreVariant,
    choose_in_kernel,
    choose_materialised,
    choose_streaming,
)
from jaxprefill.models.deepseek_v4.compression import compress
from jaxprefill.models.deepseek_v4.modules import (
    Compressor,
    HashedMoe,
    HyperConnection,
    LatentAttention,
    latent_of,
)
from jaxprefill.models.deepseek_v4.pages import PagedPool
from jaxprefill.models.layers import linear, rms_norm, rotary_table
from jaxprefill.models.rope import rotary_frequencies
from jaxprefill.models.sharding import all_reduce

_SUMS = 3  # top, total, value of a softmax in the making


def choose_core(config: ModelConfig) -> CoreVariant:
    """How the attention core of one device's part runs: all layers alike."""
    latent = latent_of(config)
    lack = lacks_attend_latent(config.head_dim)
    lack = lack or lacks_choose_entries(latent.index_heads, latent.index_dim)
    return "streaming" if config.kernels == "xla" or lack else "pallas_triton"


def cache_spec(config: ModelConfig) -> CacheSpec:
    """Every token's key, the compressed entries, the indexer's keys, and compressors' state."""
    latent = latent_of(config)
    kinds, rates = latent.layer_kinds, (latent.sparse_rate, latent.heavy_rate)
    sparse, heavy = kinds.count("sparse"), kinds.count("heavy")

    def entries(name: str, layers: int, rate: int, width: int) -> tuple[PoolSpec, PoolSpec]:
        parts = _SUMS * (1 if name == "heavy" else 2)
        return (
            PoolSpec(
                name=name, num_layers=layers, num_parts=1, num_heads=1, width=width, rate=rate
            ),
            PoolSpec(
                name=f"{name}_state",
                num_layers=layers,
                num_parts=parts,
                num_heads=1,
                width=width,
                rate=rate,
                kept_rows=2,
                is_exact=True,
                is_recent=True,
            ),
        )

    window = PoolSpec(
        name="window",
        num_layers=len(kinds),
        num_parts=1,
        num_heads=1,
        width=config.head_dim,
        is_recent=True,
    )
    pools = [window]
    if sparse:
        pools += entries("sparse", sparse, rates[0], config.head_dim)
        pools += entries("index", sparse, rates[0], latent.index_dim)
    if heavy:
        pools += entries("heavy", heavy, rates[1], config.head_dim)
    reach = max(config.sliding_window or config.context_length, 2 * rates[0], rates[1])
    return CacheSpec(tuple(pools), reach)


class DeepseekV4Layer(nnx.Module):
    """Attention and experts, each between hyper-connections."""

    def __init__(self, config: ModelConfig, index: int, dtype: jnp.dtype) -> None:
        """The layer at `index`: its kind, and whether its experts are chosen by token id."""
        latent = latent_of(config)
        self.config, self.kind = config, latent.layer_kinds[index]
        self.attention_mixing = HyperConnection(config)
        self.attention = LatentAttention(config, self.kind, dtype)
        self.mlp_mixing = HyperConnection(config)
        self.moe = HashedMoe(config, is_hashed=latent.hash_layers[index], dtype=dtype)
        self.core_variant: CoreVariant = choose_core(config)

    def __call__(
        self,
        hidden: Float[Array, "T nE"],
        pools: Pools,
        norms: Float[Array, "2 E"],
        layer: Int32[Array, ""],
        inputs: LayerInputs,
        attend: Attend,
    ) -> tuple[Float[Array, "T nE"], Pools]:
        """See `decoder.DecoderLayer`; the attention core is the layer's own."""
        eps = self.config.norm_eps
        streams = hidden.reshape(len(hidden), latent_of(self.config).num_streams, -1)
        mixing = self.attention_mixing(streams)
        normed = rms_norm(mixing.block_input, norms[0], eps)
        attended, pools = self.attend(normed, pools, layer, inputs)
        streams = mixing.expand(streams, attended)
        mixing = self.mlp_mixing(streams)
        normed = rms_norm(mixing.block_input, norms[1], eps)
        made = self.moe(normed, inputs.ids, inputs.num_tokens)
        return mixing.expand(streams, made).reshape(hidden.shape), pools

    def attend(
        self,
        normed: Float[Array, "T E"],
        pools: Pools,
        layer: Int32[Array, ""],
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "T E"], Pools]:
        """What attention adds to the streams, and the pools with what it leaves."""
        attention, batch, table = self.attention, inputs.batch, inputs.rotary
        held = self._own_pools(pools, layer, batch)
        with jax.named_scope("attention.latents"):
            latent, keys = attention.latents(normed, table)
        with jax.named_scope("attention.write"):
            window = held["window"]
            row = jnp.where(batch.kv_rows == NO_ROW, 0, batch.kv_rows)
            page, row = row // window.page_size, row % window.page_size
            held["window"] = window.write(page, row, keys[None], batch.kv_rows != NO_ROW)
        if self.kind != "sliding":
            with jax.named_scope("attention.compress"):
                self._compress(attention.compressor, self.kind, normed, held, batch)
        if self.kind == "sparse":
            with jax.named_scope("attention.index"):
                self._compress(attention.indexer.compressor, "index", normed, held, batch)
        with jax.named_scope("attention.core"):
            grouped = self._core(latent, normed, table, held, inputs)
        with jax.named_scope("attention.output"):
            out = all_reduce(linear(grouped, attention.output[...]), self.config)
        names = [pool.name for pool in cache_spec(self.config).pools]
        pairs = zip(names, pools, strict=True)
        return out, tuple(held[name].array if name in held else pool for name, pool in pairs)

    def _own_pools(
        self, pools: Pools, layer: Int32[Array, ""], batch: RaggedBatch
    ) -> dict[str, PagedPool]:
        """This layer's part of the pools that its kind uses."""
        specs = cache_spec(self.config).pools
        page_size, own = pools[0].shape[3], {"sliding": (), "sparse": ("sparse", "index")}
        names = own.get(self.kind, (self.kind,))
        used = {"window", *names, *(f"{name}_state" for name in names)}
        kinds = latent_of(self.config).layer_kinds
        ordinals = jnp.array([kinds[:at].count(kinds[at]) for at in range(len(kinds))], jnp.int32)
        return {
            spec.name: PagedPool(
                pool,
                (layer if spec.name == "window" else ordinals[layer])
                * (pool.shape[2] // spec.num_layers),
                page_size,
            )
            for spec, pool in zip(specs, pools, strict=True)
            if spec.name in used
        }

    def _compress(
        self,
        compressor: Compressor,
        name: str,
        normed: Float[Array, "T E"],
        held: dict[str, PagedPool],
        batch: RaggedBatch,
    ) -> None:
        """Writes the entries that the new tokens complete, and the state they leave, to `held`."""
        entries, held[f"{name}_state"] = compress(compressor, normed, batch, held[f"{name}_state"])
        pool, rate = held[name], compressor.rate
        table = compressed_table(self.config, entries.number * rate)
        made = compressor.finish(entries.pooled, table)
        last = (entries.number + 1) * rate - 1
        column = jnp.clip(last // pool.page_size, 0, batch.page_table.shape[1] - 1)
        page = batch.page_table[entries.slot, column]
        held[name] = pool.write(page, pool.row_of(last, rate), made[None], entries.is_used)

    def _core(
        self,
        latent: Float[Array, "T rank"],
        normed: Float[Array, "T E"],
        table: Float[Array, "2 T half"],
        held: dict[str, PagedPool],
        inputs: LayerInputs,
    ) -> Float[Array, "T grouped"]:
        """Attention and the first half of the output projection."""
        attention, batch, table = self.attention, inputs.batch, inputs.rotary
        latent_config, tile_q = latent_of(self.config), len(inputs.tile_offsets)
        tables = jnp.moveaxis(table, 0, 1)  # [T, 2, half]: rows can be taken

        def table_of(tile: Tile) -> Float[Array, "2 q half"]:
            return jnp.moveaxis(tile.take(tables), 1, 0)

        seen = self._seen(held, batch)
        choice, chosen = None, None
        if self.kind == "sparse":
            choice = Choice(
                held["index"],
                lambda tile: attention.indexer.project(
                    tile.take(latent), tile.take(normed), table_of(tile)
                ),
                latent_config.sparse_rate,
                latent_config.index_top_k,
            )
            if self.core_variant == "pallas_triton":
                query = attention.indexer.project(latent, normed, table)
                chosen = choose_in_kernel(choice, batch, query, tile_q)
            elif self.core_variant == "materialised":
                chosen = choose_materialised(choice, batch, tile_q)
        sinks = attention.sinks[...]
        if self.core_variant == "pallas_triton":
            q = attention.queries(latent, table)
            return attention.grouped(
                attend_in_kernel(q, seen, sinks, batch, tile_q, chosen=chosen), table
            )

        def attend(tile: Tile) -> Float[Array, "q grouped"]:
            own = table_of(tile)
            best = None
            if choice is not None:
                best = choose_streaming(choice, batch, tile) if chosen is None else chosen[tile.row]
            q = attention.queries(tile.take(latent), own)
            return attention.grouped(attend_tile(q, seen, sinks, tile, chosen=best), own)

        width = latent_config.num_groups * latent_config.group_rank
        return by_tile(batch, tile_q, width, attend)

    def _seen(self, held: dict[str, PagedPool], batch: RaggedBatch) -> Seen:
        """The pools that queries see."""
        latent, window = latent_of(self.config), held["window"]
        reach = self.config.sliding_window or batch.page_table.shape[1] * window.page_size
        if self.kind == "sliding":
            return Seen(window, reach)
        rate = latent.sparse_rate if self.kind == "sparse" else latent.heavy_rate
        return Seen(window, reach, held[self.kind], rate)


def compressed_table(
    config: ModelConfig, positions: Int32[Array, " C"]
) -> Float[Array, "2 C half"]:
    """Cosine and sine for layers with compressed entries."""
    rope = config.compress_rope or config.rope
    frequencies = rotary_frequencies(replace(config, rope=rope))
    return rotary_table(positions, frequencies, rope.attention_factor)
