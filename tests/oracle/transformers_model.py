"""transformers as the oracle: tiny random models, their logprobs, their rotary tables."""

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

_MODEL_TYPES = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def make_model(hf: dict[str, Any], seed: int) -> PreTrainedModel:
    """A float32 model whose random weights are float16 numbers, large enough to matter."""
    hf = deepcopy(hf)  # transformers writes into it
    family, has_lm_head, _ = hf["architectures"][0].partition("ForCausalLM")
    family = family.removesuffix("ForSequenceClassification")
    config = AutoConfig.for_model(_MODEL_TYPES[f"{family}ForCausalLM"], **hf)
    made = AutoModelForCausalLM if has_lm_head else AutoModelForSequenceClassification
    model = made.from_config(config, attn_implementation="eager", dtype=torch.float32)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_random(rng, name, tuple(parameter.shape))))
    return model.eval()


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("norm.weight"):
        values = rng.uniform(0.5, 1.5, shape)
    elif len(shape) == 1:
        values = rng.normal(size=shape) * 0.5
    else:
        values = rng.normal(size=shape) * 2 * shape[-1] ** -0.5
    return values.astype(np.float16).astype(np.float32)


def weights(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """What a checkpoint would hold: a tied head is stored once, each expert's matrices apart.

    gpt-oss's are published stacked.
    """
    if model.config.model_type == "gpt_oss":
        return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    held: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        held |= _by_expert(name, parameter.detach().numpy())
    return held


def _by_expert(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Published checkpoints name experts one by one; transformers 5 stacks them when it loads."""
    prefix, is_stack, part = name.partition(".experts.")
    if not is_stack:
        return {name: values}
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    return {
        f"{prefix}.experts.{expert}.{one}.weight": matrix
        for expert, stacked in enumerate(values)
        for one, matrix in zip(parts, np.split(stacked, len(parts)), strict=True)
    }


def log_softmax(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Logprobs of every next token, [tokens, V], from one pass without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), dim=-1).numpy()


def prompt_logprobs(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """The logprob of every token but the first."""
    return log_softmax(model, ids)[np.arange(len(ids) - 1), ids[1:]]


def greedy(
    model: PreTrainedModel, ids: list[int], count: int
) -> tuple[list[int], list[float], float]:
    """Greedy tokens, each from a pass over the whole sequence; their logprobs; least margin."""
    ids, logprobs, margin = list(ids), [], np.inf
    for _ in range(count):
        row = log_softmax(model, ids)[-1]
        second, first = np.sort(row)[-2:].tolist()
        ids.append(int(row.argmax()))
        logprobs.append(first)
        margin = min(margin, first - second)
    return ids[-count:], logprobs, margin


def rotary_table(hf: dict[str, Any], positions: tuple[int, ...]) -> np.ndarray:
    """Cosine and sine, [2, positions, half], of one sequence that ends at the last position."""
    rotary = make_model(hf, 0).model.rotary_emb
    with torch.no_grad():
        tables = rotary(torch.zeros(1), torch.tensor([positions]))
    return np.stack([table[0, :, : table.shape[-1] // 2].numpy() for table in tables])


def class_logits(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """What a classifier says of a prompt, [labels]."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def hidden_rows(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """What stands behind the final norm, [tokens, E]."""
    with torch.no_grad():
        found = model.model(torch.tensor([ids]), use_cache=False)
    return found.last_hidden_state[0].numpy()
