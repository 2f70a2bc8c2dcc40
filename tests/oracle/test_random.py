"""Random models against transformers itself, where the extra `oracle` is installed."""

import numpy as np
import pytest

from jaxprefill.models.hf_quantization import MXFP4_BLOCK
from jaxprefill.models.registry import read_config
from jaxprefill.weights.block_scales import dequantize
from jaxprefill.weights.huggingface import HuggingFaceCheckpoint
from tests.oracle.cases import SIZES, VOCAB
from tests.tiny import TensorsCheckpoint, tiny_engine

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.oracle import deepseek
from tests.oracle.transformers_model import hidden_rows, make_model, prompt_logprobs, weights

pytestmark = pytest.mark.slow
ROPES = (
    None,
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 5.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 24,
    },
)
FLAGS = {
    "LlamaForCausalLM": ("attention_bias", "mlp_bias"),
    "MistralForCausalLM": (),
    "Qwen2ForCausalLM": ("use_sliding_window",),
    "Qwen3ForCausalLM": ("attention_bias", "use_sliding_window"),
}


def random_config(architecture, rng):
    """Sizes, flags and RoPE of a model drawn at random."""
    kv_heads = int(rng.integers(1, 4))
    q_heads = kv_heads * int(rng.integers(1, 5))
    flags = {name: bool(rng.integers(2)) for name in FLAGS[architecture]}
    return (
        SIZES
        | flags
        | dict(
            architectures=[architecture],
            hidden_size=q_heads * int(rng.integers(4, 12)) * 2,
            num_attention_heads=q_heads,
            num_key_value_heads=kv_heads,
            head_dim=int(rng.integers(2, 16)) * 2,
            intermediate_size=int(rng.integers(16, 90)),
            num_hidden_layers=int(rng.integers(1, 4)),
            tie_word_embeddings=bool(rng.integers(2)),
            sliding_window=int(rng.integers(1, 60)),
            max_window_layers=int(rng.integers(0, 3)),
            rope_theta=float(rng.choice([1e4, 5e5])),
            rope_scaling=ROPES[int(rng.integers(len(ROPES)))],
        )
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("architecture", FLAGS)
def test_a_random_model_equals_transformers(architecture, seed):
    rng = np.random.default_rng(seed)
    hf = random_config(architecture, rng)
    model = make_model(hf, seed)
    checkpoint = TensorsCheckpoint(read_config(hf), weights(model))
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(2, 150, 6)]
    with tiny_engine(checkpoint, prefill_buckets=(16, 64)) as engine:
        for ids, found in zip(prompts, engine.logprobs(prompts), strict=True):
            wanted = prompt_logprobs(model, ids)
            np.testing.assert_allclose(np.array(found[1:], float), wanted, atol=1e-4)
        for ids, found in zip(prompts, engine.embed(prompts, normalize=False), strict=True):
            np.testing.assert_allclose(found, hidden_rows(model, ids)[-1], atol=2e-4)


def test_a_deepseek_v4_that_transformers_saved_is_read_back(tmp_path):
    model = deepseek.make_model()
    model.save_pretrained(tmp_path)
    found, wanted = HuggingFaceCheckpoint(tmp_path), deepseek.tensors(model)
    assert found.names() == wanted.keys()
    for name, value in wanted.items():
        assert found.shape(name) == value.shape
        np.testing.assert_array_equal(found.read(name), value, err_msg=name)


def test_mxfp4_is_decoded_as_transformers_does():
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8)
    scales = rng.integers(100, 150, (2, 6, 3)).astype(np.uint8)
    wanted = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    found = dequantize(blocks, scales, MXFP4_BLOCK)
    np.testing.assert_array_equal(found.astype(np.float32), wanted.float().numpy())
