"""Layers against NumPy, variants of the tiny Llama against the oracle, and the loader's checks."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxprefill.config import RopeConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.models.layers import (
    gated_mlp,
    linear,
    parameter,
    rms_norm,
    rotary_table,
    rotate,
)
from jaxprefill.models.rope import rotary_frequencies
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.weights.load import check_names, check_shapes, load_leaves
from tests.reference import prompt_logprobs
from tests.tiny import TinyCheckpoint, tiny_config, tiny_engine

RNG = np.random.default_rng(0)
FLOAT32 = jnp.dtype("float32")


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def frequencies(dim, theta):
    config = tiny_config(head_dim=dim, rope=RopeConfig(theta=theta))
    return rotary_frequencies(config)


def load(checkpoint, dtype=FLOAT32):
    tree = model_tree(checkpoint.config, dtype, make_mesh())
    check_names(checkpoint)
    check_shapes(checkpoint, tree)
    return tree, load_leaves(checkpoint, tree)


# Layers


def test_linear_is_x_times_the_transposed_weight():
    x, weight = normal(5, 7), normal(3, 7)
    np.testing.assert_allclose(linear(jnp.asarray(x), jnp.asarray(weight)), x @ weight.T, rtol=1e-5)


def test_linear_rounds_its_input_to_the_weight_but_sums_in_float32():
    x, weight = np.ones((1, 4096), np.float32), jnp.ones((1, 4096), jnp.bfloat16)
    x[0, 0] = 1 + 2**-10  # not a bfloat16: rounds to 1
    found = linear(jnp.asarray(x), weight * jnp.bfloat16(1.0078125))
    assert found.dtype == jnp.float32
    assert float(found[0, 0]) == pytest.approx(4096 * 1.0078125, rel=1e-6)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6)])
def test_rms_norm_equals_numpy_over_the_last_axis(shape):
    x, weight = normal(*shape), normal(6)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
    found = rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_rms_norm_of_zeros_is_zero_and_works_in_float32():
    assert not np.asarray(rms_norm(jnp.zeros((2, 4)), jnp.ones(4), 1e-5)).any()
    large = jnp.full((1, 4), 1e4, jnp.bfloat16)
    found = rms_norm(large, jnp.ones(4, jnp.bfloat16), 1e-5)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 1, rtol=1e-5)


def test_gated_mlp_gates_with_the_first_half():
    gate, up = normal(3, 5), normal(3, 5)
    found = gated_mlp(jnp.asarray(np.concatenate([gate, up], axis=1)))
    np.testing.assert_allclose(found, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)


def test_rotary_angles_are_position_over_powers_of_theta():
    positions = np.array([0, 1, 100, 8191], np.int32)
    cos, sin = np.asarray(rotary_table(jnp.asarray(positions), frequencies(8, 5e5)))
    angle = positions[:, None] * 5e5 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos, np.cos(angle), atol=2e-3)
    np.testing.assert_allclose(sin, np.sin(angle), atol=2e-3)
    np.testing.assert_allclose(cos[:3], np.cos(angle[:3]), atol=2e-5)


def test_rotation_pairs_a_dimension_with_the_one_half_a_head_away():
    x, positions = normal(4, 3, 8), np.array([0, 1, 2, 50], np.int32)
    found = np.asarray(
        rotate(jnp.asarray(x), rotary_table(jnp.asarray(positions), frequencies(8, 100.0)))
    )
    angle = positions[:, None, None] * 100.0 ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    wanted = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_array_equal(found[0], x[0])  # position 0 is not turned


def test_rotated_products_depend_on_distance_alone():
    q, k = normal(1, 1, 16), normal(1, 1, 16)

    def score(q_at, k_at):
        turns = frequencies(16, 1e4)
        table = [rotary_table(jnp.array([at], jnp.int32), turns) for at in (q_at, k_at)]
        return float((rotate(jnp.asarray(q), table[0]) * rotate(jnp.asarray(k), table[1])).sum())

    assert score(5, 3) == pytest.approx(score(105, 103), abs=1e-4)
    assert score(5, 3) != pytest.approx(score(5, 4), abs=1e-2)


def test_a_parameter_is_zero_and_names_its_axes():
    found = parameter((2, 3), jnp.dtype("bfloat16"), ("vocab", None))
    assert isinstance(found, nnx.Param)
    assert found[...].shape == (2, 3) and found[...].dtype == jnp.bfloat16
    assert not np.asarray(found[...]).any()
    assert found.get_metadata()["axes"] == ("vocab", None)


# The loader


class CountingCheckpoint(TinyCheckpoint):
    """Records which tensors are read."""

    def __init__(self, **changes):
        super().__init__(**changes)
        self.reads = Counter()

    def read(self, name):
        self.reads[name] += 1
        return super().read(name)


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_read_exactly_once(tied):
    held = CountingCheckpoint(is_embedding_tied=tied)
    load(held)
    assert held.reads == dict.fromkeys(held.names(), 1)


def test_tensors_are_fused_in_order_cast_and_bound_to_the_model():
    held = TinyCheckpoint(is_embedding_tied=False)
    tree, leaves = load(held, jnp.dtype("bfloat16"))
    assert [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in tree.shapes]
    name = "model.layers.1."
    parts = [held.tensors[f"{name}self_attn.{part}_proj.weight"] for part in "qkv"]
    wanted = np.concatenate(parts).astype(jnp.bfloat16)
    np.testing.assert_array_equal(tree.leaf(leaves, "layers.1.qkv"), wanted)
    own = tree.bind_layer(tree.layer_leaves(leaves, 1))
    np.testing.assert_array_equal(own.qkv[...], wanted)
    parts = [held.tensors[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    np.testing.assert_array_equal(own.gate_up[...], np.concatenate(parts).astype(jnp.bfloat16))
    norms = np.asarray(tree.leaf(leaves, "norms"), np.float32)
    for row, tensor in (
        (2, f"{name}input_layernorm.weight"),
        (3, f"{name}post_attention_layernorm.weight"),
        (4, "model.norm.weight"),
    ):
        np.testing.assert_allclose(norms[row], held.tensors[tensor], rtol=2**-8)
    assert tree.head(leaves) is tree.leaf(leaves, "head")


def test_a_tied_head_is_the_embedding():
    tree, leaves = load(TinyCheckpoint())
    assert "head" not in tree.paths
    assert tree.head(leaves) is tree.leaf(leaves, "embedding")


def test_missing_and_unexpected_tensors_are_named_together():
    held = TinyCheckpoint()
    del held.tensors["model.layers.0.mlp.up_proj.weight"]
    held.tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(4, np.float32)
    with pytest.raises(CheckpointError) as caught:
        load(held)
    missing, unexpected = str(caught.value).split("unexpected:")
    assert "missing: model.layers.0.mlp.up_proj.weight" in missing
    assert "model.layers.0.self_attn.q_proj.bias" in unexpected


def test_a_head_beside_a_tied_embedding_is_unexpected():
    held = TinyCheckpoint()
    held.tensors["lm_head.weight"] = held.tensors["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"missing: none; unexpected: lm_head\.weight"):
        load(held)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.self_attn.k_proj.weight", (31, 48)),
        ("model.layers.1.self_attn.o_proj.weight", (48, 95)),
        ("model.layers.0.mlp.down_proj.weight", (80, 48)),
        ("model.embed_tokens.weight", (271, 48)),
        ("model.layers.0.input_layernorm.weight", (47,)),
        ("model.norm.weight", (1, 48)),
        ("model.norm.weight", ()),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_named_with_its_shape(name, shape):
    held = TinyCheckpoint()
    held.tensors[name] = np.zeros(shape, np.float32)
    with pytest.raises(CheckpointError) as caught:
        load(held)
    assert f"{name} {list(shape)}" in str(caught.value)


def test_a_wrong_split_of_the_right_total_is_refused():
    held = TinyCheckpoint()
    held.tensors["model.layers.0.mlp.gate_proj.weight"] = np.zeros((81, 48), np.float32)
    held.tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((79, 48), np.float32)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight \[81, 48\] instead of \[80"):
        load(held)


# End to end


def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(0, 250, length).tolist() for length in (5, 40, 1, 100)]


def engine_logprobs(checkpoint, **options):
    with tiny_engine(checkpoint, **options) as made:
        return [np.array(found[1:], np.float64) for found in made.logprobs(prompts())]


VARIANTS = {
    "untied_head_and_one_kv_head": dict(is_embedding_tied=False, num_kv_heads=1),
    "wide_heads_without_groups": dict(
        head_dim=24, num_q_heads=3, num_kv_heads=3, rope=RopeConfig(theta=5e5)
    ),
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants_equal_the_oracle(changes):
    held = TinyCheckpoint(**changes)
    for ids, found in zip(prompts(), engine_logprobs(held), strict=True):
        np.testing.assert_allclose(found, prompt_logprobs(held, ids), atol=1e-4)


def test_bfloat16_stays_close_to_the_oracle():
    held = TinyCheckpoint(scale=1.0)  # twice as much, the default, magnifies every rounding
    found = np.concatenate(engine_logprobs(held, dtype="bfloat16"))
    wanted = np.concatenate([prompt_logprobs(held, ids) for ids in prompts()])
    assert np.abs(found - wanted).mean() <= 0.02
