"""Reads config.json as transformers 4 and 5 write it. Knows keys and defaults; imports no jax.

What an architecture's file adds are its own defaults and flags.
"""

from typing import Any

from jaxprefill.config import Activation, ModelConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.models.hf_rope import read_rope, stretched_context
from jaxprefill.models.hf_values import HfValues, config_errors

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_MOST_LAYERS = 10_000  # far more than any model has; a wrong number must not fill memory
_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


def read_dense(
    hf: HfValues,
    *,
    sliding_from: int | None = None,
    is_partly_rotated: bool = False,
    **own: Any,
) -> ModelConfig:
    """The config of a dense decoder.

    Args:
        hf: the mapping read from config.json, with the architecture's defaults.
        sliding_from: first layer that has the sliding window, unless `layer_types` says which;
            None: none has.
        is_partly_rotated: `partial_rotary_factor` holds for plain RoPE too; in transformers' other
            architectures it holds for stretched kinds alone.
        own: fields of ModelConfig that the architecture's file decides.

    Raises:
        CheckpointError: a key is missing, wrong, or asks for what is not supported.
    """
    num_q_heads, hidden_size = hf.integer("num_attention_heads"), hf.integer("hidden_size")
    head_dim = hf.integer("head_dim", hidden_size // num_q_heads)
    num_layers = hf.integer("num_hidden_layers", most=_MOST_LAYERS)
    rope = read_rope(hf, head_dim=head_dim, is_partial=is_partly_rotated)
    context = stretched_context(hf.integer("max_position_embeddings"), rope)
    window, layers = None, ()
    if sliding_from is not None:
        window, layers = _read_window(hf, num_layers, sliding_from, context)
    with config_errors():
        return ModelConfig(
            architecture=hf.text_list("architectures")[0],
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden_size,
            mlp_size=hf.integer("intermediate_size"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=hf.integer("num_key_value_heads", num_q_heads),
            head_dim=head_dim,
            context_length=context,
            norm_eps=hf.number("rms_norm_eps"),
            rope=rope,
            is_embedding_tied=hf.flag("tie_word_embeddings", False),
            sliding_window=window,
            sliding_layers=layers,
            activation=_read_activation(hf),
            **own,
        )


def _read_window(
    hf: HfValues, num_layers: int, sliding_from: int, context: int
) -> tuple[int | None, tuple[bool, ...]]:
    """(sliding_window, sliding_layers) of ModelConfig; a window that never ends is none."""
    if hf.get("sliding_window") is None:
        return None, ()
    layers = tuple(index >= sliding_from for index in range(num_layers))
    if hf.get("layer_types") is not None:
        types = hf.text_list("layer_types")
        for unknown in set(types) - set(_LAYER_TYPES):
            raise CheckpointError(
                f"config.json: layer_types names {unknown!r}, which is not supported; "
                f"supported: {', '.join(_LAYER_TYPES)}"
            )
        layers = tuple(_LAYER_TYPES[name] for name in types)
    window = hf.integer("sliding_window")
    if window >= context or not any(layers):
        return None, ()
    return window, () if all(layers) else layers


def _read_activation(hf: HfValues) -> Activation:
    name = hf.get("hidden_act") or "silu"
    if str(name) not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: hidden_act {name!r} is not supported; "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]
