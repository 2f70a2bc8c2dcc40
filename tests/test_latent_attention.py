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
from jaxprefill.kernels.latent_attention import (
    attend_latent,
    choose_latent_tiles,
    lacks_attend_latent,
    most_keys,
)
from jaxprefill.kernels.latent_attention.cases import LATENT_CASES, make_latent_inputs
from jaxprefill.kernels.latent_attention.reference import reference_latent_attention
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
LIMITS = {"float32": 1e-6, "bfloat16": 5e-3}  # of the error's norm over the result's
QUICK_CASES = {"sparse_in_three_splits", "decode_1", "decode_16"}  # a layout, and split lists


def tiles_of(case, inputs, dtype):
    """What is chosen for the case's shape, with the case's own number of splits."""
    most = most_keys(inputs.keys, inputs.batch)
    tiles = choose_latent_tiles(case.num_tokens, case.num_heads, most, dtype)
    return tiles._replace(splits=case.splits or tiles.splits)


def attend(case, inputs, dtype):
    """The kernel's rows of real tokens."""
    tiles = tiles_of(case, inputs, dtype)
    own = partial(attend_latent, tile_q=case.tile_q, tiles=tiles, interpret=IS_CPU)
    call = jax.jit(lambda q, *others: own(q, inputs.keys, *others), compiler_options=QUICK)
    out = call(inputs.q, inputs.sinks, inputs.batch)
    return np.asarray(out, np.float64)[: case.num_real_tokens]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if str(case) in QUICK_CASES else pytest.mark.slow)
        for case in LATENT_CASES
    ],
)
def test_the_kernel_equals_the_reference_and_nothing_stale_is_read(case, dtype):
    inputs = make_latent_inputs(case, dtype)
    wanted = reference_latent_attention(*inputs)[: case.num_real_tokens]
    error = np.linalg.norm(attend(case, inputs, jnp.dtype(dtype)) - wanted)
    assert error <= LIMITS[dtype] * np.linalg.norm(wanted)


def test_decode_splits_long_lists_and_prefill_none():
    splits = {}
    for case in LATENT_CASES:
        inputs = make_latent_inputs(case, jnp.float32)
        splits[case.name] = tiles_of(case, inputs, jnp.float32).splits
    assert splits == {
        "sliding": 1, "sparse": 1, "heavy": 1, "sparse_in_three_splits": 3, "decode_sliding": 1,
        "decode_1": 15, "decode_1_chosen": 8, "decode_16": 8, "decode_64": 2,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["sparse", pytest.param("heavy", marks=pytest.mark.slow)])
def test_a_model_attends_as_the_reference_in_a_kernel_and_in_plain_jax(name):
    [case] = [case for case in LATENT_CASES if case.name == name]
    inputs = make_latent_inputs(case, jnp.float32)
    q, keys, sinks, batch = inputs
    pools = [
        PagedPool(pages.keys[None, None], pages.first_page, pages.page_size)
        for pages in (keys.window, keys.entries)
    ]
    seen = Seen(pools[0], keys.reach, pools[1], keys.entries.rate)

    @partial(jax.jit, compiler_options=QUICK)
    def both(q, batch):
        def of_tile(tile):
            chosen = None if keys.chosen is None else keys.chosen[tile.row]
            out = attend_tile(tile.take(q), seen, sinks, tile, chosen=chosen)
            return out.reshape(case.tile_q, -1)

        plain = by_tile(batch, case.tile_q, case.num_heads * case.dim, of_tile)
        options = {"chosen": keys.chosen, "interpret": IS_CPU}
        ours = attend_in_kernel(q, seen, sinks, batch, case.tile_q, **options)
        return ours, plain.reshape(q.shape)

    real = case.num_real_tokens
    wanted = reference_latent_attention(*inputs)
    for found in both(q, batch):
        np.testing.assert_allclose(found[:real], wanted[:real], atol=1e-5)


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
    ("kind", "tokens", "kernels"), [("sliding", 1, 3), ("sparse", 8192, 4), ("heavy", 64, 4)]
)
def test_a_layer_is_kernels_and_no_loop_on_cuda(kind, tokens, kernels):
    """Attention, two of the experts; one more where entries are chosen or keys are shared."""
    text = lowered_layer(kind, tokens)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == kernels
    assert "stablehlo.while" not in text


def test_few_tokens_share_out_their_keys_then_their_heads():
    def chosen(tokens, keys, heads=64):
        return choose_latent_tiles(tokens, heads, keys, jnp.bfloat16)[:3]

    window, sparse, heavy = 128, 128 + 512, 128 + 8192
    assert [chosen(count, heavy) for count in (1, 8, 16, 64)] == [
        (16, 32, 16), (64, 32, 16), (64, 32, 8), (64, 32, 2),
    ]  # fmt: skip
    assert [chosen(count, sparse) for count in (1, 16, 64)] == [
        (16, 32, 5), (32, 32, 5), (64, 32, 2),
    ]  # fmt: skip
    assert [chosen(count, window) for count in (1, 64, 256)] == [
        (16, 32, 1), (32, 32, 1), (64, 32, 1),
    ]  # fmt: skip
    assert chosen(128, heavy) == chosen(8192, heavy) == (64, 32, 1), "prefill"
    assert chosen(8192, heavy, heads=4) == (16, 32, 1)
    assert choose_latent_tiles(8192, 64, heavy, jnp.float32)[:3] == (16, 16, 1)


def test_latents_are_powers_of_two():
    assert lacks_attend_latent(512) is None
    assert "dimensions, not 96" in lacks_attend_latent(96)
