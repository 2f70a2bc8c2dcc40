"""The oracle: the tiny Llama in NumPy, float64, one request, no cache, no padding."""

import numpy as np


def _norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _rotate(x, positions, theta):
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _linear(x, w, name):
    return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)


def reference_hidden(checkpoint, ids) -> np.ndarray:
    """Hidden rows [tokens, E] behind the final norm of one sequence."""
    c = checkpoint.config
    w = {name: tensor.astype(np.float64) for name, tensor in checkpoint.tensors.items()}
    x, positions = w["model.embed_tokens.weight"][np.asarray(ids)], np.arange(len(ids))
    for layer in range(c.num_layers):
        name = f"model.layers.{layer}."
        h = _norm(x, w[name + "input_layernorm.weight"], c.norm_eps)
        q, k, v = (_linear(h, w, f"{name}self_attn.{part}_proj") for part in "qkv")
        q = _rotate(q.reshape(len(ids), c.num_q_heads, c.head_dim), positions, c.rope.theta)
        k = _rotate(k.reshape(len(ids), c.num_kv_heads, c.head_dim), positions, c.rope.theta)
        v = v.reshape(len(ids), c.num_kv_heads, c.head_dim)
        group = c.num_q_heads // c.num_kv_heads
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) * c.head_dim**-0.5
        seen = np.tri(len(ids), dtype=bool)
        if c.windows[layer] is not None:
            seen &= ~np.tri(len(ids), k=-c.windows[layer], dtype=bool)
        scores = np.where(seen, scores, -np.inf)
        out = np.einsum("hqk,khd->qhd", _softmax(scores), v).reshape(len(ids), -1)
        x = x + _linear(out, w, name + "self_attn.o_proj")
        h = _norm(x, w[name + "post_attention_layernorm.weight"], c.norm_eps)
        gate, up = (_linear(h, w, f"{name}mlp.{part}_proj") for part in ("gate", "up"))
        x = x + _linear(gate / (1 + np.exp(-gate)) * up, w, name + "mlp.down_proj")
    return _norm(x, w["model.norm.weight"], c.norm_eps)


def reference_logits(checkpoint, ids) -> np.ndarray:
    """Raw logits [tokens, V] of one sequence."""
    w = checkpoint.tensors
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return reference_hidden(checkpoint, ids) @ head.astype(np.float64).T


def reference_embedding(checkpoint, ids, *, dimensions: int | None = None) -> np.ndarray:
    """The pooled row [E], cut and then scaled to length 1."""
    hidden = reference_hidden(checkpoint, ids)
    is_mean = checkpoint.config.pooling.kind == "mean"
    pooled = (hidden.mean(0) if is_mean else hidden[-1])[:dimensions]
    return pooled / np.linalg.norm(pooled)


def reference_logprobs(checkpoint, ids) -> np.ndarray:
    """Log-softmax of the logits, [tokens, V]."""
    logits = reference_logits(checkpoint, ids)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def prompt_logprobs(checkpoint, ids) -> np.ndarray:
    """The logprob of every token but the first."""
    table = reference_logprobs(checkpoint, ids)
    return table[np.arange(len(ids) - 1), np.asarray(ids)[1:]]


def greedy(checkpoint, ids, count: int) -> list[int]:
    """Greedy continuation among the ids the tokenizer knows."""
    ids = list(ids)
    for _ in range(count):
        logits = reference_logits(checkpoint, ids)[-1]
        ids.append(int(np.argmax(logits[: checkpoint.tokenizer.vocab_size])))
    return ids[-count:]
