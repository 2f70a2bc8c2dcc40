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
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 8}


def read(name="LlamaForCausalLM", **changes):
    return read_config({"architectures": [name]} | SIZES | changes)


def test_a_llama_of_transformers_4():
    config = read(rope_theta=5e5, rms_norm_eps=1e-5, tie_word_embeddings=True)
    assert (config.architecture, config.num_layers, config.mlp_size) == ("LlamaForCausalLM", 3, 160)
    assert (config.head_dim, config.num_kv_heads, config.context_length) == (16, 2, 4096)
    assert config.rope == RopeConfig(theta=5e5)
    assert config.is_embedding_tied and config.norm_eps == 1e-5
    assert config.windows == (None, None, None)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


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


def test_architectures_must_be_a_list():
    with pytest.raises(CheckpointError, match="must be a list with one name, got 'LlamaFor"):
        read_config({"architectures": "LlamaForCausalLM"} | SIZES)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=None), "hidden_size must be a positive integer, got nothing"),
        (dict(num_hidden_layers=2.5), "num_hidden_layers must be a positive integer, got 2.5"),
        (dict(num_key_value_heads=4), r"num_q_heads \(6\) must be a multiple of num_kv_heads"),
        (dict(hidden_act="relu6"), "hidden_act 'relu6' is not supported; supported: silu"),
        (dict(tie_word_embeddings="yes"), "tie_word_embeddings must be true or false, got 'yes'"),
        (dict(rope_scaling={"type": "linear"}), "RoPE parameters: factor must be a positive"),
        (dict(rope_scaling={"type": "llama3", "factor": 8.0}), "low_freq_factor must be"),
        (dict(rope_scaling=[8.0]), "rope_scaling must be a mapping"),
        (dict(rope_scaling=LONGROPE), "short_factors of longrope must hold 8 numbers.*got 4"),
        (
            dict(rope_scaling={"type": "linear", "factor": 2.0}, partial_rotary_factor=0.2),
            "rotary_dim must be even, got 3",
        ),
        (dict(num_hidden_layers=2**40), "num_hidden_layers must be at most 10000"),
        (dict(hidden_act=["silu"]), r"hidden_act \['silu'\] is not supported"),
        (dict(rope_scaling={"rope_type": ["x"], "factor": 2}), r"RoPE kind \['x'\] is not"),
        (dict(rope_theta=1, rope_scaling={"type": "yarn", "factor": 2.0}), "theta of yarn must"),
        (
            dict(rope_scaling=LONGROPE, original_max_position_embeddings=1),
            "original_max_position_embeddings must be at least 2, got 1",
        ),
        (
            dict(quantization_config={"quant_method": "gptq"}),
            "or fp8 and a weight_block_size, got 'gptq' and None: other quant",
        ),
        (
            dict(quantization_config=FP8 | {"fmt": "e5m2"}),
            "quantization_config: fmt must be one of e4m3, got 'e5m2'; use other weights",
        ),
        (
            dict(quantization_config=FP8, expert_dtype="int3"),
            "expert_dtype must be one of fp8, fp4, got 'int3'",
        ),
        (
            dict(quantization_config=FP8 | {"weight_block_size": [128]}),
            r"weight_block_size must be two integers, got \[128\]",
        ),
        (
            dict(quantization_config=FP8 | {"weight_block_size": [128, 0]}),
            "weight_block_size: columns must be a positive integer, got 0",
        ),
    ],
)
def test_what_is_missing_wrong_or_unsupported_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(**changes)


def test_plain_rope_turns_whole_heads_but_for_phi3_as_in_transformers():
    share = dict(partial_rotary_factor=0.75, head_dim=16)
    stretched = share | dict(rope_scaling={"type": "linear", "factor": 2.0})
    for name in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        assert read(name, **share).rotary_dim == 16
        assert read(name, **stretched).rotary_dim == 12
    assert read("Phi3ForCausalLM", **share).rotary_dim == 12


def test_an_unknown_layer_type_is_named():
    types = ["sliding_attention", "linear_attention", "full_attention"]
    with pytest.raises(CheckpointError, match="'linear_attention'"):
        read("MistralForCausalLM", layer_types=types)


def test_the_layers_with_a_window():
    def windows(name, **changes):
        return read(name, **({"sliding_window": 64} | changes)).windows

    assert windows("LlamaForCausalLM") == (None,) * 3  # as in transformers
    assert windows("MistralForCausalLM") == (64,) * 3
    assert windows("MistralForCausalLM", sliding_window=None) == (None,) * 3
    assert windows("MistralForCausalLM", sliding_window=4096) == (None,) * 3  # never ends
    assert windows("Qwen2ForCausalLM", max_window_layers=1) == (None,) * 3
    used = dict(use_sliding_window=True)
    assert windows("Qwen2ForCausalLM", max_window_layers=1, **used) == (None, 64, 64)
    assert windows("Qwen3ForCausalLM", max_window_layers=0, **used) == (64,) * 3
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows("Qwen3ForCausalLM", layer_types=types, **used) == (64, None, 64)


def test_phi3_rotates_part_of_a_head_and_knows_old_names_of_longrope():
    rope = LONGROPE | {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    for kind in ("longrope", "su", "yarn"):
        changes = dict(rope_scaling=rope | {"type": kind}, partial_rotary_factor=0.75)
        config = read("Phi3ForCausalLM", **changes | dict(max_position_embeddings=131072))
        assert (config.rope.kind, config.rotary_dim) == ("longrope", 12)
        assert config.rope.original_context == 4096
        assert config.rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)


def test_yarn_stretches_the_context_and_dynamic_does_not():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read(rope_scaling=yarn).context_length == 16384
    assert read(rope_scaling={"type": "dynamic", "factor": 4.0}).context_length == 4096


def test_gemma3_has_two_rotations_and_needs_a_window():
    gemma = dict(name="Gemma3ForCausalLM", num_hidden_layers=7)
    found = read(**gemma, sliding_window=512, query_pre_attn_scalar=64)
    assert found.windows == (*[512] * 5, None, 512) and found.query_scale == 1 / 8
    assert found.sliding_rope is not None and found.sliding_rope.theta == 1e4
    with pytest.raises(CheckpointError, match="must have a sliding_window below"):
        read(**gemma, sliding_window=None)


def test_gemma2_takes_null_for_no_soft_cap():
    found = read("Gemma2ForCausalLM", attn_logit_softcapping=None)
    assert found.attention_soft_cap is None and found.logit_soft_cap == 30
    assert found.activation == "gelu_tanh" and found.norms_per_layer == 4
