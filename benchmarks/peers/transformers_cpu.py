"""The peer of `benchmarks.cpu`: transformers on torch's CPU, dense weights, in its own process.

Reads one JSON request a line, {"dtype", "prefix", "ids"}, both [requests][tokens], and answers
with one line {"wall_ms", "cpu_ms", "token"} of the forward pass over `ids` behind `prefix`; its
first pass over a shape is not counted. Needs the extra `oracle`.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jaxprefill.weights.locate import open_checkpoint


def build(model: str) -> LlamaForCausalLM:
    """The checkpoint's dequantised weights in transformers' own class, float32."""
    held = open_checkpoint(model)
    config = held.config
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.mlp_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_q_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context_length,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope.theta,
            tie_word_embeddings=config.is_embedding_tied,
        )
    ).eval()
    weights = {name: torch.from_numpy(np.array(held.read(name))) for name in held.names()}
    missing, unexpected = made.load_state_dict(weights, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        sys.exit(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    made.tie_weights()
    return made


class Peer:
    """One model a dtype, and the shapes already warm."""

    def __init__(self, model: str) -> None:
        self._float32 = build(model)
        self._models = {"float32": self._float32}
        self._warm: set[tuple[Any, ...]] = set()

    def measure(self, dtype: str, prefix: list[list[int]], ids: list[list[int]]) -> dict[str, Any]:
        """Milliseconds of one forward pass, and the first request's most likely next token."""
        if dtype not in self._models:
            self._models[dtype] = build(sys.argv[1]).to(getattr(torch, dtype))
        model, tokens = self._models[dtype], torch.tensor(ids)
        shape = (dtype, len(ids), len(ids[0]), bool(prefix))
        for is_counted in (False, True):
            if not is_counted and shape in self._warm:
                continue
            cache = model(torch.tensor(prefix), use_cache=True).past_key_values if prefix else None
            wall, cpu = time.perf_counter(), time.process_time()
            out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self._warm.add(shape)
        token = int(out.logits[0, -1].argmax())
        return {"wall_ms": 1e3 * wall, "cpu_ms": 1e3 * cpu, "token": token}


def main() -> None:
    """See the module's docstring."""
    torch.set_num_threads(os.cpu_count() or 1)
    peer = Peer(sys.argv[1])
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            print(json.dumps(peer.measure(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
