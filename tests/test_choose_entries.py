"""The kernel of the indexer's choice without a GPU: interpreted answers, lowering for CUDA."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh

from benchmarks.context_memory import PAGE, TILE, flash_config, input_shapes
from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.attention.tiles import plan_tiles
from jaxprefill.kernels.top_k import (
    ChoiceTiles,
    EntryPages,
    choose_entries,
    lacks_choose_entries,
)
from jaxprefill.models.deepseek_v4.layer import DeepseekV4Layer

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
IS_CPU = jax.default_backend() == "cpu"  # on a GPU the kernel itself runs
QUICK = {"xla_backend_optimization_level": 0} if IS_CPU else {}
CUDA = AbstractMesh(
    (), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="cuda")
)
RATE, TOP_K, TILE_Q = 4, 6, 4
Q_LENS, KV_LENS, TOKENS, ENTRIES = (9, 1, 0), (300, 7, 0), 13, 75
TILES = ChoiceTiles(queries=2, block=16, blocks=1)  # lists of 64: cut when longer than 48


def ragged_batch(page_size):
    """Two requests and a sentinel; pages in reverse order, stale ones out of range."""
    slots, starts = plan_tiles(Q_LENS, TILE_Q)
    width = -(-KV_LENS[0] // page_size)
    pages = np.full((3, width), 10**6, np.int32)
    pages[0], pages[1, : -(-KV_LENS[1] // page_size)] = np.arange(width)[::-1], width
    pages[1, -(-KV_LENS[1] // page_size) - 1] = width
    return RaggedBatch(
        kv_rows=jnp.zeros(TOKENS, jnp.int32),
        q_lens=jnp.array(Q_LENS, jnp.int32),
        kv_lens=jnp.array(KV_LENS, jnp.int32),
        q_starts=jnp.array([0, 9, 10], jnp.int32),
        page_table=jnp.array(pages),
        tile_slot=jnp.array([*slots, 0, 0], jnp.int32),
        tile_start=jnp.array([*starts, 0, 0], jnp.int32),
        num_tiles=jnp.int32(len(slots)),
    )


def drawn(kind, rng):
    """(queries, weights, keys by entry) of small whole numbers, whose products are exact."""
    q = rng.integers(-2, 3, (TOKENS, 16, 16)).astype(np.float32)
    weights = rng.integers(-1, 3, (TOKENS, 16)).astype(np.float32)
    keys = rng.integers(-2, 3, (ENTRIES, 16)).astype(np.float32)
    if kind == "ties":
        keys[10:70] = keys[rng.integers(0, 3, 60)]
    if kind == "rising":
        q, weights, keys = abs(q) + 1, abs(weights) + 1, np.arange(ENTRIES)[:, None] + 0 * keys
    return q, weights, keys


@pytest.mark.parametrize("page_size", [16, 4])
def test_the_kernel_chooses_the_best_entries_and_of_ties_the_earliest(page_size):
    batch, rows = ragged_batch(page_size), page_size // RATE
    width, first_page = batch.page_table.shape[1], 3

    @partial(jax.jit, compiler_options=QUICK)
    def choose(q, weights, keys):
        pages = EntryPages(keys, jnp.int32(first_page), page_size, RATE)
        return choose_entries(
            q, weights, pages, batch, top_k=TOP_K, tile_q=TILE_Q, tiles=TILES, interpret=IS_CPU
        )

    rng = np.random.default_rng(page_size)
    for kind in ("random", "ties", "rising"):
        q, weights, by_entry = drawn(kind, rng)
        q[10:], weights[10:] = np.nan, np.nan  # padding
        keys = np.full((first_page + width + 1, rows, 16), np.nan, np.float32)
        entry = np.arange(ENTRIES)
        for slot, count in enumerate((ENTRIES, KV_LENS[1] // RATE)):
            page = np.array(batch.page_table)[slot, entry[:count] * RATE // page_size]
            keys[first_page + page, entry[:count] % rows] = by_entry[:count]
        found = np.array(choose(q, weights, keys))
        for query in range(10):
            slot = 0 if query < 9 else 1
            seen = (KV_LENS[slot] - Q_LENS[slot] + query - (0, 9)[slot] + 1) // RATE
            scores = weights[query] @ np.maximum(q[query] @ by_entry[:seen].T, 0)
            best = np.sort(np.argsort(-scores, kind="stable")[:TOP_K])
            assert found[query, : len(best)].tolist() == best.tolist(), (kind, query)
            assert (found[query, len(best) :] >= seen).all()


@pytest.mark.parametrize(
    ("tokens", "top_k", "dtype"), [(8192, 512, jnp.bfloat16), (64, 1024, jnp.float32)]
)
def test_flash_s_indexer_is_one_kernel_and_no_loop_on_cuda(tokens, top_k, dtype):
    """At a context of 2^20 tokens."""
    inputs = input_shapes(tokens, 1 << 20)

    def choose(q, weights, keys, batch):
        pages = EntryPages(keys, jnp.int32(0), PAGE, 4)
        return choose_entries(q, weights, pages, batch, top_k=top_k, tile_q=TILE)

    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape in ((tokens, 64, 128), (tokens, 64), ((1 << 20) // PAGE, PAGE // 4, 128))
    ]
    with jax.sharding.use_abstract_mesh(CUDA):
        traced = jax.jit(choose).trace(*shapes, inputs.batch)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1
    assert "stablehlo.while" not in text
    assert f"{tokens}x262144" not in text


def test_a_layer_runs_in_kernels_where_they_are_asked():
    config = flash_config(4096)
    for kernels, variant in (("xla", "streaming"), ("pallas_triton", "pallas_triton")):
        one = replace(config, kernels=kernels)
        layer = nnx.eval_shape(lambda one=one: DeepseekV4Layer(one, 0, jnp.dtype(jnp.bfloat16)))
        assert layer.core_variant == variant


def test_sizes_that_the_kernel_lacks_are_said():
    assert lacks_choose_entries(64, 128) is None
    assert "heads" in lacks_choose_entries(4, 128)
    assert "dimensions" in lacks_choose_entries(16, 96)
