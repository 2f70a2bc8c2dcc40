"""A model written as GGUF and described by its config.json is one model, in every architecture."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from jaxprefill.config import RopeConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.models.registry import model_class, read_config
from jaxprefill.models.rope import rotary_frequencies
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.weights.gguf import GgufCheckpoint
from jaxprefill.weights.load import check_names, check_shapes
from tests.gguf_files import write_gguf
from tests.reference import prompt_logprobs
from tests.tiny import TinyCheckpoint

HF = dict(
    vocab_size=272,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    tie_word_embeddings=True,
)
FACTORS = [1.0 + i / 7 for i in range(6)]
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
MODELS = {
    "llama": dict(architectures=["LlamaForCausalLM"]),
    "llama untied, wide heads": dict(
        architectures=["LlamaForCausalLM"], tie_word_embeddings=False, head_dim=32
    ),
    "llama with biases": dict(
        architectures=["LlamaForCausalLM"], attention_bias=True, mlp_bias=True
    ),
    "linear": dict(
        architectures=["LlamaForCausalLM"], rope_scaling=dict(rope_type="linear", factor=4.0)
    ),
    "mistral": dict(architectures=["MistralForCausalLM"], sliding_window=32),
    "qwen2": dict(architectures=["Qwen2ForCausalLM"]),
    "qwen2 yarn": dict(
        architectures=["Qwen2ForCausalLM"],
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], head_dim=48),
    "phi3": dict(architectures=["Phi3ForCausalLM"], tie_word_embeddings=False),
    "phi3 longrope": dict(
        architectures=["Phi3ForCausalLM"],
        partial_rotary_factor=0.75,
        sliding_window=128,
        original_max_position_embeddings=64,
        rope_scaling=dict(
            rope_type="longrope", short_factor=FACTORS, long_factor=[2 * f for f in FACTORS]
        ),
    ),
}  # fmt: skip


def shape_of(name: str, hf: dict) -> tuple[int, ...]:
    width, mlp = hf["hidden_size"], hf["intermediate_size"]
    head_dim = hf.get("head_dim", width // hf["num_attention_heads"])
    q, kv = (head_dim * hf[f"num_{part}_heads"] for part in ("attention", "key_value"))
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return (hf["vocab_size"], width)
    part, kind = name.split(".")[-2:]
    if part.endswith("norm"):
        return (head_dim if part in ("q_norm", "k_norm") else width,)
    matrix = {
        "q_proj": (q, width),
        "k_proj": (kv, width),
        "v_proj": (kv, width),
        "qkv_proj": (q + 2 * kv, width),
        "o_proj": (width, q),
        "gate_proj": (mlp, width),
        "up_proj": (mlp, width),
        "gate_up_proj": (2 * mlp, width),
        "down_proj": (width, mlp),
    }[part]
    return matrix if kind == "weight" else matrix[:1]


def random_tensors(hf: dict) -> dict[str, np.ndarray]:
    config = read_config(hf)
    fused = model_class(config).sources(config).values()
    rng = np.random.default_rng(0)
    names = {name: None for one in fused for name in one.sources}
    return {name: rng.normal(size=shape_of(name, hf)).astype(np.float32) for name in names}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_a_gguf_is_the_model_of_its_config_json(tmp_path, changes):
    hf = HF | changes
    tensors = random_tensors(hf)
    found = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", hf, tensors))
    wanted = read_config(hf)
    assert rounded(found.config.rope) == rounded(wanted.rope)
    assert found.config == wanted.__class__(
        **(vars(wanted) | {"rope": found.config.rope, "norm_eps": found.config.norm_eps})
    )
    assert found.config.norm_eps == pytest.approx(wanted.norm_eps)
    check_names(found)
    check_shapes(found, model_tree(found.config, jnp.dtype("float32"), make_mesh()))
    for name, value in tensors.items():
        np.testing.assert_array_equal(found.read(name), value, err_msg=name)


def rounded(rope: RopeConfig) -> dict:
    """The fields, numbers as near as float32 metadata keeps them; unused ones left out."""
    used = {key: value for key, value in vars(rope).items() if key != "original_context"}
    return {
        key: np.float32(value).tolist() if isinstance(value, float | tuple) else value
        for key, value in used.items()
    }


def test_a_gguf_turns_as_many_dimensions_as_it_says(tmp_path):
    hf = HF | MODELS["qwen3"] | dict(partial_rotary_factor=0.5)
    found = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", hf, random_tensors(hf))).config
    assert (found.head_dim, found.rotary_dim) == (48, 24)
    powers = 1e4 ** (-np.arange(12) / 12)
    np.testing.assert_allclose(rotary_frequencies(found), powers, rtol=1e-6)


def test_tensors_of_frequency_factors_turn_as_llama_3_does(tmp_path):
    hf = HF | dict(architectures=["LlamaForCausalLM"], rope_scaling=LLAMA3)
    found = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", hf, random_tensors(hf)))
    wanted = rotary_frequencies(read_config(hf))
    assert np.ptp(wanted * 1e4 ** (np.arange(8) / 8)) > 0.5  # some are stretched, some are not
    np.testing.assert_allclose(rotary_frequencies(found.config), wanted, rtol=1e-6)
    assert found.config.rope.attention_factor == 1.0
    assert found.config.context_length == hf["max_position_embeddings"]
    check_names(found)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(T.Q8_0, 0.03), (T.Q5_1, 0.25), (T.Q4_0, 0.5), (T.BF16, 0.02)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_quantised_weights_give_logprobs_within_their_error(tmp_path, kind, tolerance):
    sizes = dict(hidden_size=64, mlp_size=96, num_q_heads=4)
    held = TinyCheckpoint(seed=5, scale=1.0, **sizes)
    hf = HF | dict(architectures=["LlamaForCausalLM"], head_dim=16, max_position_embeddings=160)
    found = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", hf, held.tensors, kind=kind))
    assert found.config.num_layers == held.config.num_layers
    read = TinyCheckpoint(**sizes)
    read.tensors = {name: found.read(name) for name in found.names()}
    ids = np.random.default_rng(1).integers(0, 250, 40).tolist()
    error = np.abs(prompt_logprobs(read, ids) - prompt_logprobs(held, ids)).mean()
    assert 0 < error < tolerance


def test_a_window_in_a_family_without_one_is_refused(tmp_path):
    hf = HF | dict(architectures=["Qwen2ForCausalLM"], sliding_window=32)
    path = write_gguf(tmp_path / "m.gguf", hf, random_tensors(hf))
    with pytest.raises(
        CheckpointError, match=r"sliding_window must be 0 .* in this family, got 32"
    ):
        GgufCheckpoint(path)


def test_types_that_are_not_read_are_refused_when_the_file_is_opened(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 18), np.uint8), raw_dtype=T.IQ4_NL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'token_embd\.weight' has type IQ4_NL"):
        GgufCheckpoint(tmp_path / "m.gguf")
