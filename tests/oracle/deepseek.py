"""DeepSeek-V4 as transformers computes it: one tiny model with every kind of layer.

python -m tests.oracle.deepseek        (extra `oracle`; from the repository's root)
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DeepseekV4Config

from tests.oracle.transformers_model import log_softmax, weights

PATH = Path(__file__).parents[1] / "data" / "oracle" / "deepseek_v4.npz"
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 257, 600)
CONFIG = dict(
    architectures=["DeepseekV4ForCausalLM"],
    vocab_size=258,
    hidden_size=24,
    moe_intermediate_size=8,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    q_lora_rank=12,
    num_experts_per_tok=2,
    n_routed_experts=6,
    max_position_embeddings=1024,
    partial_rotary_factor=0.5,
    layer_types=[
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"],
    hc_mult=3,
    hc_sinkhorn_iters=6,
    swiglu_limit=1.5,
    sliding_window=20,
    o_groups=2,
    o_lora_rank=6,
    index_n_heads=16,
    index_head_dim=10,
    index_topk=12,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    bos_token_id=257,
    eos_token_id=256,
    pad_token_id=0,
)


def make_model(seed=0, **changes):
    """Float32, random float16 weights; the hash table is random too."""
    config = DeepseekV4Config(**(CONFIG | changes))
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = _random(rng, name, tuple(parameter.shape)).astype(np.float16)
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                rows = [
                    rng.permutation(config.n_routed_experts)[: buffer.shape[1]]
                    for _ in range(len(buffer))
                ]
                buffer.copy_(torch.tensor(np.stack(rows)))
            elif name.endswith("e_score_correction_bias"):
                values = (rng.normal(size=buffer.shape) * 0.2).astype(np.float16)
                buffer.copy_(torch.from_numpy(values.astype(np.float32)))
    return model.eval()


def _random(rng, name, shape):
    if name.endswith("norm.weight") or name.endswith("scale"):
        return rng.uniform(0.5, 1.5, shape)
    if len(shape) == 1:
        return rng.normal(size=shape) * 0.5
    return rng.normal(size=shape) * 1.5 * shape[-1] ** -0.5


def tensors(model):
    """What a checkpoint would hold."""
    held = weights(model)
    for name, buffer in model.named_buffers():
        if name.endswith(("tid2eid", "e_score_correction_bias")):
            held[name] = buffer.numpy()
    return held


def choices(model, ids):
    """What each indexer returned, [layers, tokens, k]; -1 is none."""
    found, hooks = [], []
    for layer in model.model.layers:
        compressor = layer.self_attn.compressor
        if hasattr(compressor, "indexer"):
            hook = compressor.indexer.register_forward_hook(lambda *call: found.append(call[2][0]))
            hooks.append(hook)
    logprobs = log_softmax(model, ids)
    for hook in hooks:
        hook.remove()
    return logprobs, np.stack([one.numpy() for one in found])


def main() -> None:
    """Writes the fixture."""
    model, rng = make_model(), np.random.default_rng(1)
    found = {}
    for length in LENGTHS:
        ids = rng.integers(0, 256, length)
        logprobs, chosen = choices(model, ids.tolist())
        own = logprobs[np.arange(length - 1), ids[1:]]
        found |= {
            f"ids:{length}": ids.astype(np.int16),
            f"logprobs:{length}": np.append(own, logprobs[-1].max()),
            f"chosen:{length}": chosen.astype(np.int16),
        }
    held = {
        f"w:{name}": value.astype(np.int16 if name.endswith("tid2eid") else np.float16)
        for name, value in tensors(model).items()
    }
    config = json.dumps(model.config.to_diff_dict() | {"architectures": CONFIG["architectures"]})
    np.savez_compressed(PATH, config=np.frombuffer(config.encode(), np.uint8), **found, **held)


if __name__ == "__main__":
    main()
