"""Tiny GGUF files written for tests from what a Hugging Face folder would hold.

Names come from the gguf library, rows of q and k are sorted as converters sort them.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from tokenizers import pre_tokenizers

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}


def write_gguf(
    path: Path, hf: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, kind: T = T.F32
) -> Path:
    """Writes a model; matrices whose rows allow it are quantised to `kind`."""
    architecture = ARCHITECTURES[hf["architectures"][0]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, hf)
    _add_rope(writer, hf)
    _add_byte_tokenizer(writer)
    names = gguf.get_tensor_name_map(architecture, hf["num_hidden_layers"])
    block = gguf.GGML_QUANT_SIZES[kind][0]
    for name, value in tensors.items():
        if architecture == gguf.MODEL_ARCH.LLAMA:
            value = _interleaved(name, value, hf)
        stored = kind if value.ndim == 2 and value.shape[1] % block == 0 else T.F32
        given = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(given, gguf.quants.quantize(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(name: str, value: np.ndarray, hf: Mapping[str, Any]) -> np.ndarray:
    """Rows of q and k for RoPE over neighbours: row i of the first half, then of the second."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, count in heads.items():
        if f".{part}." in name:
            halves = value.reshape(hf[count], 2, -1, *value.shape[1:])
            return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(value.shape)
    return value


def _add_sizes(writer: gguf.GGUFWriter, hf: Mapping[str, Any]) -> None:
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    if "head_dim" in hf:
        writer.add_key_length(hf["head_dim"])
        writer.add_value_length(hf["head_dim"])
    if hf.get("sliding_window"):
        writer.add_sliding_window(hf["sliding_window"])


def _add_rope(writer: gguf.GGUFWriter, hf: Mapping[str, Any]) -> None:
    head_dim = hf.get("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    rotary_dim = int(head_dim * hf.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotary_dim)
    writer.add_rope_freq_base(hf["rope_theta"])
    scaling = hf.get("rope_scaling") or {}
    kind = scaling.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor(
            "rope_freqs.weight", _llama3_factors(scaling, hf["rope_theta"], rotary_dim)
        )
    if kind == "longrope":
        original = hf["original_max_position_embeddings"]
        stretch = math.log(hf["max_position_embeddings"] / original) / math.log(original)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + stretch))
        for length in ("long", "short"):
            factors = np.array(scaling[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _llama3_factors(scaling: Mapping[str, Any], theta: float, dim: int) -> np.ndarray:
    """What each frequency of Llama 3.1 is divided by, in float64."""
    waves = 2 * math.pi * theta ** (np.arange(0, dim, 2) / dim)
    turns = scaling["original_max_position_embeddings"] / waves
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / scaling["factor"] + share)).astype(np.float32)


def _add_byte_tokenizer(writer: gguf.GGUFWriter) -> None:
    """That of `tiny.byte_tokenizer`, and one merge, as an empty list cannot be written."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, "<eos>", "<bos>", "~~"])
    writer.add_token_types([1] * 256 + [3, 3, 1])
    writer.add_token_merges(["~ ~"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(257)
