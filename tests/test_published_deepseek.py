"""DeepSeek-V4's folders as they are published, in eight and four bits, and as modules have them."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxprefill.errors import CheckpointError
from jaxprefill.models.deepseek_v4.hf import read_deepseek
from jaxprefill.models.registry import read_config
from jaxprefill.weights.block_scales import dequantize
from jaxprefill.weights.huggingface import HuggingFaceCheckpoint
from tests.folders import assert_parameters_are, write_json, write_tokenizer
from tests.test_deepseek_v4 import checkpoint, fixture_config
from tests.tiny import TensorsCheckpoint

BLOCK = 16  # so that a tiny model has several, and cut ones; 128 in earnest
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
# transformers' modules -> published, in this order
NAMES = (
    ("model.embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("model.hc_head.hc_", "hc_head_"),
    ("model.", ""),
    (".self_attn.compressor.indexer.scorer.weights_proj.", ".attn.indexer.weights_proj."),
    (".self_attn.compressor.indexer.q_b_proj.", ".attn.indexer.wq_b."),
    (".self_attn.compressor.indexer.", ".attn.indexer.compressor."),
    (".self_attn.", ".attn."),
    (".mlp.", ".ffn."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    (".attn.sinks", ".attn.attn_sink"),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".compressor.kv_proj.", ".compressor.wkv."),
    (".compressor.gate_proj.", ".compressor.wgate."),
    (".position_bias", ".ape"),
    (".q_a_proj.", ".wq_a."),
    (".q_b_proj.", ".wq_b."),
    (".q_a_norm.", ".q_norm."),
    (".attn.kv_proj.", ".attn.wkv."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".e_score_correction_bias", ".bias"),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)


def published(name):
    for theirs, ours in NAMES:
        name = name.replace(theirs, ours)
    return name


def is_product(name):
    """Whether a tensor has scales in the published models."""
    words = (".wq_a.", ".wq_b.", ".attn.wkv.", ".wo_a.", ".wo_b.", ".w1.", ".w2.", ".w3.")
    return any(word in name for word in words)


def e2m1(bits):
    """Four bits as a number: sign, two of exponent, one of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


def grid(shape, block):
    return [-(-size // side) for size, side in zip(shape, block, strict=True)]


def quantised(rng, shape, *, is_fp4, has_powers):
    """(values, scales, the weight they stand for), one number after another."""
    rows, columns = shape
    block = (1, 32) if is_fp4 else (BLOCK, BLOCK)
    scales = rng.uniform(0.01, 0.1, grid(shape, block)).astype(np.float32)
    if has_powers:
        scales = (2.0 ** rng.integers(-6, -2, scales.shape)).astype(ml_dtypes.float8_e8m0fnu)
    if is_fp4:
        bits = rng.integers(0, 16, shape)
        values = (bits[:, ::2] | bits[:, 1::2] << 4).astype(np.uint8).view(np.int8)
        numbers = np.vectorize(e2m1)(bits)
    else:
        numbers = values = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    weight = np.empty(shape, np.float32)
    for row in range(rows):
        for column in range(columns):
            scale = scales[row // block[0], column // block[1]]
            weight[row, column] = np.float32(numbers[row, column]) * np.float32(scale)
    return values, scales, weight


def quantise(tensors, *, has_fp4, has_powers, suffix):
    """(stored, weights): a folder's tensors, and what they stand for by canonical name."""
    rng, stored, weights = np.random.default_rng(0), {}, dict(tensors)
    for name, tensor in tensors.items():
        own = published(name)
        if not is_product(own):
            stored[own] = tensor
            continue
        is_fp4 = has_fp4 and ".experts." in own
        values, scales, weight = quantised(rng, tensor.shape, is_fp4=is_fp4, has_powers=has_powers)
        scale = own.removesuffix(".weight") + suffix
        stored |= {own: values, scale: scales}
        weights[name] = weight
    return stored, weights


def write_model(folder, tensors, **config):
    write_json(folder / "config.json", fixture_config() | config)
    write_tokenizer(folder, checkpoint())
    save_file(tensors, folder / "model.safetensors")


def assert_leaves_are(folder, weights):
    """Whether the folder gives the same parameters as these tensors."""
    found, wanted = HuggingFaceCheckpoint(folder), TensorsCheckpoint(checkpoint().config, weights)
    assert found.config == wanted.config
    assert_parameters_are(found, wanted, "float32")


@pytest.mark.parametrize(
    "has_fp4, has_powers, suffix",
    [(True, True, ".scale"), (False, False, ".scale"), (False, True, ".weight_scale_inv")],
)
def test_published_weights_in_eight_and_four_bits_are_what_they_stand_for(
    tmp_path, has_fp4, has_powers, suffix
):
    tensors = checkpoint().tensors
    stored, weights = quantise(tensors, has_fp4=has_fp4, has_powers=has_powers, suffix=suffix)
    stored["mtp.0.attn.wq_a.weight"] = np.zeros((4, 4), ml_dtypes.float8_e4m3fn)
    experts = {"expert_dtype": "fp4"} if has_fp4 else {}
    write_model(tmp_path, stored, **experts, quantization_config=FP8)
    assert_leaves_are(tmp_path, weights)


def stacked(tensors):
    """Experts' matrices as transformers' modules hold them."""
    found = {name: value for name, value in tensors.items() if ".mlp.experts." not in name}
    count = checkpoint().config.moe.num_experts
    for layer in range(checkpoint().config.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: np.stack([tensors[f"{prefix}.{at}.{part}_proj.weight"] for at in range(count)])
            for part in ("gate", "up", "down")
        }
        found[f"{prefix}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        found[f"{prefix}.down_proj"] = parts["down"]
    return found


def test_modules_names_and_stacked_experts_are_the_same_model(tmp_path):
    tensors = checkpoint().tensors
    table = "model.layers.0.mlp.gate.tid2eid"
    write_model(tmp_path, stacked(tensors) | {table: tensors[table].astype(np.int64)})
    assert_leaves_are(tmp_path, tensors)


@pytest.mark.parametrize(
    "value, kind", [(-1, np.int64), (None, np.int32), (2**32, np.int64), (1, np.float32)]
)
def test_a_table_of_experts_that_are_not_there_is_refused(tmp_path, value, kind):
    num_experts = checkpoint().config.moe.num_experts
    value = num_experts if value is None else value
    found = f"{value} among" if kind != np.float32 else "float32"
    tensors, name = checkpoint().tensors, "model.layers.0.mlp.gate.tid2eid"
    table = tensors[name].astype(kind)
    table[3, 1] = value
    write_model(tmp_path, tensors | {name: table})
    message = f"{name}: must hold integers from 0 to {num_experts - 1}, got {found}"
    with pytest.raises(CheckpointError, match=message):
        assert_leaves_are(tmp_path, tensors)


def test_scales_that_do_not_fit_their_weights_are_named(tmp_path):
    tensors = checkpoint().tensors
    stored, _ = quantise(tensors, has_fp4=True, has_powers=True, suffix=".scale")
    name, scale = "layers.0.attn.wq_b.weight", "layers.0.attn.wq_b.scale"

    def refused(message, changes, quantization=FP8):
        write_model(tmp_path, stored | changes, quantization_config=quantization)
        with pytest.raises(CheckpointError, match=message):
            HuggingFaceCheckpoint(tmp_path)

    refused("has scales, so config.json must hold a quantization_config", {}, None)
    short = np.ones((3, 1), np.float32)
    refused(rf"'{name}' of shape \[64, 12\] must have scales of shape \[4, 1\]", {scale: short})
    refused("its scales one of F32.*got F8_E4M3 and I32", {scale: np.ones((4, 1), np.int32)})
    refused("type F8_E4M3, I8 or U8 .*got F32", {name: tensors["lm_head.weight"]})
    refused(
        r"q_a_proj\.weight must be stored once, but is there as .*wq_a\.weight",
        {"layers.0.self_attn.q_a_proj.weight": tensors["lm_head.weight"]},
    )


def test_a_published_config_of_v4_flash_is_read():
    published = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
        "expert_dtype": "fp4",
        "index_topk": 512,
        "num_hash_layers": 3,
        "num_nextn_predict_layers": 1,
        "qk_rope_head_dim": 64,
        "quantization_config": FP8 | {"weight_block_size": [128, 128]},
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "topk_method": "noaux_tc",
    }
    found = read_config(json.loads(json.dumps(published)))
    kinds = found.latent.layer_kinds
    assert kinds[:5] == ("sliding", "sliding", "sparse", "heavy", "sparse")
    assert (len(kinds), kinds.count("sparse"), kinds.count("heavy")) == (43, 21, 20)
    assert found.rope.rotary_dim == 64 and found.compress_rope.original_context == 65536
    assert found.compress_rope.attention_factor == 1 and found.context_length == 1 << 20
    assert found == read_deepseek(published)


def test_weights_with_powers_of_two_are_bfloat16_and_others_float32():
    values = np.full((2, 2), 1.75, ml_dtypes.float8_e4m3fn)
    bits = np.full((1, 1), 125, np.uint8)  # 2 ** -2
    found = dequantize(values, bits, (2, 2))
    assert found.dtype == ml_dtypes.bfloat16 and (found == 0.4375).all()
    assert dequantize(values, np.ones((1, 1), np.float32), (2, 2)).dtype == np.float32
