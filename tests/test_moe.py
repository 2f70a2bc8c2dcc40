"""Experts: routing against plain NumPy, and padding that is never routed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprefill.config import MoeConfig
from jaxprefill.errors import CheckpointError, ConfigError
from jaxprefill.kernels.experts.blocks import block_capacity, block_rows, plan_blocks
from jaxprefill.models.moe import Routing, route, run_experts
from jaxprefill.models.registry import read_config
from tests.oracle.cases import CASES

QWEN3_MOE = next(case for case in CASES if case.name == "qwen3_moe")


@pytest.mark.parametrize(
    "tokens, real, is_skewed", [(1, 1, False), (32, 20, True), (96, 90, False)]
)
def test_experts_equal_one_product_a_token_and_poisoned_padding_reaches_none(
    tokens, real, is_skewed
):
    rng, num_experts, chosen, width = np.random.default_rng(tokens), 6, 3, 8
    matrices = rng.normal(size=(num_experts, width, width)).astype(np.float32)
    rows = rng.normal(size=(tokens, width)).astype(np.float32)
    rows[real:] = np.nan
    experts = np.stack([rng.permutation(num_experts)[:chosen] for _ in range(tokens)])
    experts = np.tile([5, 0, 2], (tokens, 1)) if is_skewed else experts
    weights = rng.uniform(size=(tokens, chosen)).astype(np.float32)
    weights[real:] = np.nan
    routing = Routing(jnp.array(experts, jnp.int32), jnp.array(weights))

    def mlp(taken, expert):
        return taken @ jnp.array(matrices)[expert]

    run = jax.jit(lambda rows, count: run_experts(rows, routing, count, num_experts, mlp))
    found = np.array(run(rows, np.int32(real)))
    wanted = np.zeros_like(rows)
    for token in range(real):
        for expert, weight in zip(experts[token], weights[token], strict=True):
            wanted[token] += weight * (rows[token] @ matrices[expert])
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_no_routing_needs_more_blocks_than_there_are():
    tokens, chosen, num_experts = 12, 2, 5
    size = block_rows(tokens * chosen, num_experts)
    rng = np.random.default_rng(0)
    plan = jax.jit(lambda experts: plan_blocks(experts, jnp.int32(tokens), num_experts, size))
    for _ in range(40):
        share = rng.dirichlet(np.full(num_experts, 0.3))
        experts = rng.choice(num_experts, (tokens, chosen), p=share).astype(np.int32)
        blocks = plan(experts)
        assert int(blocks.num_blocks) <= block_capacity(tokens * chosen, num_experts, size)
        held = np.array(blocks.tokens).reshape(-1)[np.array(blocks.rows)]
        np.testing.assert_array_equal(held, np.tile(np.arange(tokens)[:, None], chosen))
        own = np.array(blocks.experts)[np.array(blocks.rows) // size]
        np.testing.assert_array_equal(own, experts)


def test_routers_weigh_the_chosen_by_scores_without_bias():
    logits = jnp.array([[0.0, 1.0, 2.0, 3.0]])
    scores = np.sqrt(np.log1p(np.exp(np.arange(4.0))))
    moe = MoeConfig(num_experts=4, num_chosen=2, scoring="sqrt_softplus", scale=1.5)
    found = route(logits, moe, bias=jnp.array([9.0, 0, 0, 0]))
    assert found.experts.tolist() == [[0, 3]]
    wanted = 1.5 * scores[[0, 3]] / scores[[0, 3]].sum()
    np.testing.assert_allclose(found.weights[0], wanted, rtol=1e-6)
    hashed = route(logits, moe, chosen=jnp.array([[1, 2]]))
    wanted = 1.5 * scores[[1, 2]] / scores[[1, 2]].sum()
    np.testing.assert_allclose(hashed.weights[0], wanted, rtol=1e-6)
    plain = route(logits, MoeConfig(num_experts=4, num_chosen=1, is_normalized=False))
    np.testing.assert_allclose(plain.weights[0], [1 / np.exp([-3.0, -2, -1, 0]).sum()], rtol=1e-6)


def test_sizes_of_experts_are_checked():
    with pytest.raises(ConfigError, match="num_chosen must be 1 to the 4 experts, got 5"):
        MoeConfig(num_experts=4, num_chosen=5)
    with pytest.raises(ConfigError, match="scoring must be one of softmax, sqrt_softplus"):
        MoeConfig(num_experts=4, num_chosen=1, scoring="sigmoid")
    with pytest.raises(CheckpointError, match="num_chosen must be 1 to the 10 experts"):
        read_config(QWEN3_MOE.hf | {"num_experts_per_tok": 11})
    with pytest.raises(CheckpointError, match="decoder_sparse_step 1, got None and 2"):
        read_config(QWEN3_MOE.hf | {"decoder_sparse_step": 2})
