"""The grouped kernel of experts without a GPU: interpreted numbers, lowering for CUDA."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh

from benchmarks.context_memory import flash_config
from jaxprefill.config import MoeConfig
from jaxprefill.models.biased_moe import BiasedMoe
from jaxprefill.models.deepseek_v4.modules import HashedMoe
from jaxprefill.models.moe import MoeMlp, Routing, choose_kernels, run_experts
from tests.tiny import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
IS_CPU = jax.default_backend() == "cpu"  # on a GPU the kernel itself runs
QUICK = {"xla_backend_optimization_level": 0} if IS_CPU else {}
EXPERTS, CHOSEN, TOKENS, REAL = 5, 2, 40, 37


def experts_of(kind, dtype, *, experts=EXPERTS, chosen=CHOSEN, width=32, size=48):
    """A module of the kind; its clamp cuts what the tiny ones compute."""
    moe = MoeConfig(num_experts=experts, num_chosen=chosen, clamp=0.5, gate_gain=1.7)
    sizes = {"hidden_size": width, "mlp_size": size, "moe": moe, "kernels": "pallas_triton"}
    if kind == "deepseek_v4":
        latent = replace(flash_config(1024).latent, swiglu_limit=0.5)
        config = replace(flash_config(1024), latent=latent, **sizes)
        return HashedMoe(config, is_hashed=False, dtype=dtype)
    module = BiasedMoe if kind == "gpt_oss" else MoeMlp
    return module(tiny_config(**sizes), moe, dtype)


def drawn(kind, dtype):
    """The module with random weights."""
    graph, state = nnx.split(nnx.eval_shape(lambda: experts_of(kind, dtype)))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, x.dtype), state)
    return nnx.merge(graph, state)


@pytest.mark.parametrize(
    ("kind", "dtype", "limit"),
    [
        ("qwen3_moe", jnp.float32, 1e-5),
        ("gpt_oss", jnp.bfloat16, 1e-2),
        pytest.param("gpt_oss", jnp.float32, 1e-5, marks=pytest.mark.slow),
        pytest.param("deepseek_v4", jnp.float32, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_grouped_experts_equal_the_loop_and_poisoned_padding_reaches_none(kind, dtype, limit):
    """Uneven, one expert without a token; all to one expert; no token at all."""
    module, rng = drawn(kind, jnp.dtype(dtype)), np.random.default_rng(1)
    grouped = replace(module._grouped(), interpret=IS_CPU)
    rows = jnp.asarray(rng.normal(size=(TOKENS, 32)), jnp.float32).at[REAL:].set(jnp.nan)
    weights = jnp.asarray(rng.uniform(size=(TOKENS, CHOSEN)), jnp.float32).at[REAL:].set(jnp.nan)

    @partial(jax.jit, compiler_options=QUICK)
    def run(experts, count):
        routing = Routing(experts, weights)
        each = (None, grouped)
        return [
            run_experts(rows, routing, count, EXPERTS, module._expert, grouped=one) for one in each
        ]

    share = np.array([0.1, 0.6, 0, 0.25, 0.05])
    uneven = np.stack([rng.choice(EXPERTS, CHOSEN, replace=False, p=share) for _ in range(TOKENS)])
    for experts, count in ((uneven, REAL), (np.full_like(uneven, 4), REAL), (uneven, 0)):
        wanted, found = map(np.asarray, run(jnp.asarray(experts, jnp.int32), np.int32(count)))
        assert not found[count:].any()
        assert np.linalg.norm(found - wanted) <= limit * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("kind", "num_tokens", "dtype", "sizes"),
    [
        ("qwen3_moe", 32, jnp.bfloat16, (128, 8, 2048, 768)),
        ("qwen3_moe", 8192, jnp.bfloat16, (128, 8, 2048, 768)),
        ("qwen3_moe", 1, jnp.float32, (128, 8, 2048, 768)),
        ("gpt_oss", 256, jnp.bfloat16, (128, 4, 2880, 2880)),
    ],
)
def test_a_layer_of_experts_is_two_kernels_and_no_loop_on_cuda(kind, num_tokens, dtype, sizes):
    sizes = dict(zip(("experts", "chosen", "width", "size"), sizes, strict=True))
    module = nnx.eval_shape(lambda: experts_of(kind, jnp.dtype(dtype), **sizes))
    graph, state = nnx.split(module)

    def layer(state, rows, count):
        module = nnx.merge(graph, state)
        return module(rows, count)

    rows = jax.ShapeDtypeStruct((num_tokens, sizes["width"]), jnp.float32)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(layer).trace(state, rows, jax.ShapeDtypeStruct((), jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2
    assert "stablehlo.while" not in text


@pytest.mark.parametrize(
    ("changes", "where", "kernels"),
    [
        ({}, {}, "pallas_triton"),
        ({"moe": None}, {}, "xla"),
        ({"activation": "gelu"}, {}, "xla"),
        ({"activation": "gelu_tanh"}, {}, "pallas_triton"),
        ({"mlp_size": 40}, {}, "xla"),
        ({}, {"platform": "cpu"}, "xla"),
        ({}, {"attention_backend": "xla"}, "xla"),
    ],
)
def test_experts_run_in_plain_jax_where_that_is_asked_or_must_be(changes, where, kernels):
    config = replace(tiny_config(moe=MoeConfig(num_experts=4, num_chosen=2)), **changes)
    asked = {"attention_backend": "auto", "platform": "gpu", "dtype": "bfloat16"} | where
    assert choose_kernels(config, **asked) == kernels
