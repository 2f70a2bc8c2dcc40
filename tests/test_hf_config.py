"""config.json of transformers 4 and 5, read into ModelConfig."""

import pytest

from jaxprefill.config import RopeConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.models.registry import read_config

SIZES = dict(
    vocab_size=300,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=4096,
)


def read(name="LlamaForCausalLM", **changes):
    return read_config({"architectures": [name]} | SIZES | changes)


def test_a_llama_of_transformers_4():
    config = read(rope_theta=5e5, rms_norm_eps=1e-5, tie_word_embeddings=True)
    assert (config.architecture, config.num_layers, config.mlp_size) == ("LlamaForCausalLM", 3, 160)
    assert (config.head_dim, config.num_kv_heads, config.context_length) == (16, 2, 4096)
    assert config.rope == RopeConfig(theta=5e5)
    assert config.is_embedding_tied and config.norm_eps == 1e-5
    assert config.windows == (None, None, None)


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}),
        dict(rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 2.0}),
        dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
        dict(
            rope_parameters={
                kind: {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
                for kind in ("full_attention", "sliding_attention")
            }
        ),
    ],
)
def test_every_layout_of_rope_parameters_means_the_same(rope):
    config = read(**rope)
    assert config.rope == RopeConfig(kind="linear", theta=5e5, factor=2.0)
    assert config.context_length == 8192


def test_an_unknown_architecture_is_named_and_the_known_ones_listed():
    with pytest.raises(CheckpointError, match=r"'OddForCausalLM'.*LlamaForCausalLM.*Qwen3"):
        read("OddForCausalLM")
    with pytest.raises(CheckpointError, match=r"model_type 'odd'.*LlamaForCausalLM"):
        read_config({"model_type": "odd"} | SIZES)


def test_model_type_stands_in_for_missing_architectures():
    assert read_config({"model_type": "qwen3"} | SIZES).architecture == "Qwen3ForCausalLM"


def test_an_unknown_rope_kind_is_named_and_the_known_ones_listed():
    with pytest.raises(CheckpointError, match=r"RoPE kind 'spiral'.*llama3.*longrope"):
        read(rope_scaling={"rope_type": "spiral", "factor": 2.0})


def test_rope_that_differs_by_layer_type_is_refused():
    both = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    with pytest.raises(CheckpointError, match="the same for every layer type"):
        read(rope_parameters=both)
