"""The indexer's two kinds of top-k: one answer, and memory that does not grow with the context."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.context_memory import FLAGS, shapes_of, temp_bytes
from jaxprefill.errors import ConfigError
from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.attention.tiles import plan_tiles
from jaxprefill.models.deepseek_v4.attend import tile_of
from jaxprefill.models.deepseek_v4.choose import Choice, choose_materialised, choose_streaming
from jaxprefill.models.deepseek_v4.pages import PagedPool

PAGE, RATE, TOP_K, TILE = 16, 4, 6, 4
Q_LENS, KV_LENS, TOKENS = (9, 1, 0), (300, 7, 0), 13


def ragged_batch():
    slots, starts = plan_tiles(Q_LENS, TILE)
    spare = [0, 0]
    pages = np.zeros((3, 20), np.int32)
    pages[0, :19], pages[1, 0] = np.arange(19)[::-1], 19
    return RaggedBatch(
        kv_rows=jnp.zeros(TOKENS, jnp.int32),
        q_lens=jnp.array(Q_LENS, jnp.int32),
        kv_lens=jnp.array(KV_LENS, jnp.int32),
        q_starts=jnp.array([0, 9, 10], jnp.int32),
        page_table=jnp.array(pages),
        tile_slot=jnp.array(slots + spare, jnp.int32),
        tile_start=jnp.array(starts + spare, jnp.int32),
        num_tiles=jnp.int32(len(slots)),
        recent_table=jnp.zeros((3, 1), jnp.int32),
    )


def test_streaming_and_materialised_choose_the_same_entries_in_the_same_order_ties_included():
    rng, batch = np.random.default_rng(0), ragged_batch()
    keys = rng.integers(-1, 2, (1, 1, 20, PAGE // RATE, 3)).astype(np.float32)
    queries = rng.integers(-1, 2, (TOKENS, 2, 3)).astype(np.float32)
    weights = np.ones((TOKENS, 2), np.float32)
    queries[10:] = np.nan  # padding
    pool = PagedPool(jnp.array(keys), jnp.int32(0), PAGE)
    rows = jnp.array(queries)
    choice = Choice(
        pool, lambda tile: (tile.take(rows), tile.take(jnp.array(weights))), RATE, TOP_K, block=16
    )

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def choose(at):
        tile = tile_of(batch, at, TILE)
        return choose_streaming(choice, batch, tile), choose_materialised(choice, batch, TILE)

    for at in range(int(batch.num_tiles)):
        tile = tile_of(batch, jnp.int32(at), TILE)
        found, whole = map(np.array, choose(jnp.int32(at)))
        live = np.array(tile.is_live)
        np.testing.assert_array_equal(found[live], whole[np.array(tile.row)][live])
        for query, chosen in zip(np.array(tile.row)[live], found[live], strict=True):
            slot = 0 if query < 9 else 1
            seen = (KV_LENS[slot] - Q_LENS[slot] + query - (0, 9)[slot] + 1) // RATE
            entry = np.arange(seen)
            page = np.array(batch.page_table)[slot, entry * RATE // PAGE]
            own = keys[0, 0, page, entry % (PAGE // RATE)]
            scores = np.maximum(queries[query] @ own.T, 0).sum(0)
            best = np.argsort(-scores, kind="stable")[:TOP_K]
            assert chosen[: len(best)].tolist() == best.tolist()
            assert (chosen[len(best) :] >= seen).all()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (("8192", "1M", "256K"), ([8192], [1 << 20, 1 << 18])),
        ((None, "64K", "4.2k"), ([2048], [1 << 16, 4224])),
        (("8", "8K", "8K"), ([8], [8192])),
        (("8", "8K", None), ([8], [8192])),
        (("0", None, None), "--tokens must be at least 1, got 0"),
        (("1.5K", None, None), "--tokens: a fraction"),
        (("8", "8K", "16K"), "must be at most the model's context of 8192, got 16384"),
        (("9K", "16K", "8K"), "--tokens must be at most the max context of 8192, got 9216"),
    ],
)
def test_flags_are_counts_in_order_of_size(given, found):
    flags = dict(zip(FLAGS, given, strict=True))
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            shapes_of(flags)
    else:
        assert shapes_of(flags) == found


@pytest.mark.slow
def test_a_bounded_context_saves_58_percent_and_streaming_all_of_it():
    tokens, model, bound = 8192, 1 << 20, 1 << 18
    whole = temp_bytes("materialised", tokens, model, model)
    assert whole >= tokens * model
    assert temp_bytes("materialised", tokens, model, bound) <= 0.42 * whole
    assert temp_bytes("streaming", tokens, model, model) <= 1 << 30
