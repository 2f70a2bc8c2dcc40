"""Latent attention's kernel without a GPU: interpreted numbers, lowering of layers for CUDA."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh

from benchmarks.context_memory import PAGE, flash_config, input_shapes
from jaxprefill.cache.kv_cache import pool_shapes
from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.attention.tiles import plan_tiles
from jaxprefill.kernels.latent_attention import choose_latent_tiles, lacks_attend_latent
from jaxprefill.models.deepseek_v4.attend import Seen, attend_in_kernel, attend_tile, by_tile
from jaxprefill.models.deepseek_v4.layer import DeepseekV4Layer, cache_spec
from jaxprefill.models.deepseek_v4.pages import PagedPool
from jaxprefill.models.sharding import make_mesh
from jaxprefill.moe_config import MoeConfig

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
IS_CPU = jax.default_backend() == "cpu"  # on a GPU the kernel itself runs
QUICK = {"xla_backend_optimization_level": 0} if IS_CPU else {}
CUDA = AbstractMesh(
    (), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="cuda")
)
Q_LENS, KV_LENS, Q_STARTS, TOKENS, REAL = (9, 1, 0), (300, 7, 0), (0, 9, 10), 13, 10
HEADS, DIM, REACH, TILE_Q, TOP_K, FIRST_PAGE = 18, 16, 21, 4, 20, 2
NOWHERE = 10**6  # what stale columns of page tables hold


def batch_of(page_size):
    """Two requests and a sentinel; pages in no order."""
    rng, (slots, starts) = np.random.default_rng(0), plan_tiles(Q_LENS, TILE_Q)
    columns = (Q_LENS[0] + REACH) // page_size + 2
    pages = np.full((3, -(-KV_LENS[0] // page_size)), NOWHERE)
    recent = np.full((3, columns), NOWHERE)
    free = list(rng.permutation(pages.size + columns * 3))
    for slot, kv_len in enumerate(KV_LENS):
        used = -(-kv_len // page_size)
        pages[slot, :used] = [free.pop() for _ in range(used)]
        oldest = max(0, kv_len - Q_LENS[slot] - REACH + 1) // page_size
        for page in range(oldest, used):
            recent[slot, page % columns] = free.pop()
    return RaggedBatch(
        kv_rows=jnp.zeros(TOKENS, jnp.int32),
        q_lens=jnp.array(Q_LENS, jnp.int32),
        kv_lens=jnp.array(KV_LENS, jnp.int32),
        q_starts=jnp.array(Q_STARTS, jnp.int32),
        page_table=jnp.array(pages, jnp.int32),
        tile_slot=jnp.array([*slots, 0, 0], jnp.int32),
        tile_start=jnp.array([*starts, 0, 0], jnp.int32),
        num_tiles=jnp.int32(len(slots)),
        recent_table=jnp.array(recent, jnp.int32),
    )


def pool_of(table, page_size, rate, counts, rng):
    """NaN but for each request's rows from its count's first to its last."""
    rows = max(page_size // rate, 1)
    array = np.full((1, 1, FIRST_PAGE + 400, rows, DIM), np.nan, np.float32)
    for slot, numbers in enumerate(counts):
        last = (np.array(numbers, int) + 1) * rate - 1
        page = np.array(table)[slot, last // page_size % table.shape[1]]
        row = last % page_size // min(rate, page_size)
        array[0, 0, FIRST_PAGE + page, row] = rng.normal(size=(len(last), DIM))
    return PagedPool(jnp.array(array), jnp.int32(FIRST_PAGE), page_size)


def seen_of(kind, batch, page_size, rng):
    """(what queries see, the entries chosen for each)."""
    firsts = [max(0, kv - q - REACH + 1) for q, kv in zip(Q_LENS, KV_LENS, strict=True)]
    own = [range(*pair) for pair in zip(firsts, KV_LENS, strict=True)]
    window = pool_of(batch.recent_table, page_size, 1, own, rng)
    rate = 4 if kind == "sparse" else 8
    entries = pool_of(batch.page_table, page_size, rate, [range(kv // rate) for kv in KV_LENS], rng)
    seen = Seen(window, REACH, entries, rate)
    if kind == "heavy":
        return seen, None
    chosen = np.full((TOKENS, TOP_K), KV_LENS[0] // rate)
    for query in range(REAL):
        slot = 0 if query < Q_LENS[0] else 1
        count = (KV_LENS[slot] - Q_LENS[slot] + query - Q_STARTS[slot] + 1) // rate
        best = rng.permutation(count)[:TOP_K]
        chosen[query, : len(best)] = best
    chosen[REAL:] = -NOWHERE
    return seen, jnp.array(chosen, jnp.int32)


@pytest.mark.parametrize(
    ("kind", "page_size"), [("sparse", 16), pytest.param("heavy", 4, marks=pytest.mark.slow)]
)
def test_the_kernel_equals_plain_jax_and_nothing_stale_is_read(kind, page_size):
    rng, batch = np.random.default_rng(1), batch_of(page_size)
    seen, chosen = seen_of(kind, batch, page_size, rng)
    q = jnp.array(rng.normal(size=(TOKENS, HEADS, DIM)), jnp.float32).at[REAL:].set(jnp.nan)
    sinks = jnp.array(rng.normal(size=HEADS), jnp.float32)

    @partial(jax.jit, compiler_options=QUICK)
    def both(q, batch, chosen):
        def plain(tile):
            own = None if chosen is None else chosen[tile.row]
            return attend_tile(tile.take(q), seen, sinks, tile, chosen=own).reshape(TILE_Q, -1)

        ours = attend_in_kernel(q, seen, sinks, batch, TILE_Q, chosen=chosen, interpret=IS_CPU)
        return ours, by_tile(batch, TILE_Q, HEADS * DIM, plain).reshape(q.shape)

    found, wanted = both(q, batch, chosen)
    np.testing.assert_allclose(found[:REAL], wanted[:REAL], atol=1e-5)


def lowered_layer(kind, tokens):
    """The text for CUDA of one layer of DeepSeek-V4-Flash's sizes."""
    config = flash_config(1 << 20)
    latent = replace(config.latent, layer_kinds=(kind,), sinkhorn_steps=2)
    moe = MoeConfig(num_experts=256, num_chosen=6, scoring="sqrt_softplus")
    config = replace(config, latent=latent, moe=moe, mlp_size=2048, kernels="pallas_triton")
    dtype = jnp.dtype(jnp.bfloat16)
    graph, state = nnx.split(nnx.eval_shape(lambda: DeepseekV4Layer(config, 0, dtype)))

    def layer(state, hidden, pools, norms, inputs):
        own = nnx.merge(graph, state)
        return own(hidden, pools, norms, jnp.int32(0), inputs, print)  # attends by itself

    spec = cache_spec(config)
    pools = pool_shapes(spec, 64, PAGE, num_recent=64, dtype=dtype, mesh=make_mesh())
    hidden = jax.ShapeDtypeStruct((tokens, 4 * config.hidden_size), jnp.float32)
    norms = jax.ShapeDtypeStruct((2, config.hidden_size), dtype)
    with jax.sharding.use_abstract_mesh(CUDA):
        traced = jax.jit(layer).trace(state, hidden, pools, norms, input_shapes(tokens, 1 << 20))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("kind", "tokens", "kernels"), [("sliding", 1, 3), ("sparse", 8192, 4), ("heavy", 64, 3)]
)
def test_a_layer_is_kernels_and_no_loop_on_cuda(kind, tokens, kernels):
    """Attention, two of the experts, and where entries are chosen, one more."""
    text = lowered_layer(kind, tokens)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == kernels
    assert "stablehlo.while" not in text


def test_few_tokens_share_their_heads_out_among_programs():
    assert [choose_latent_tiles(count, 64, jnp.bfloat16).heads for count in (1, 64, 256)] == [
        16,
        16,
        64,
    ]
    assert choose_latent_tiles(8192, 4, jnp.bfloat16).heads == 16
    assert choose_latent_tiles(8192, 64, jnp.float32).heads == 16
    assert lacks_attend_latent(512) is None
    assert "dimensions, not 96" in lacks_attend_latent(96)
