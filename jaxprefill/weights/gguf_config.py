"""GGUF metadata translated to the keys of a Hugging Face config.json.

Knows the GGUF architectures that are read, and refuses what they would compute differently.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxprefill.config import PoolingConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.models.hf_rope import yarn_attention_factor
from jaxprefill.weights.gguf_file import GgufFile


@dataclass(frozen=True, kw_only=True)
class GgufArchitecture:
    """What one `general.architecture` means in Hugging Face's terms.

    Attributes:
        hf_class: the class that computes the same function.
        is_interleaved: whether rows of q and k are stored for RoPE over neighbouring rows.
        layer_names: tensors of a layer whose names differ from the common ones.
    """

    hf_class: str
    is_interleaved: bool = False
    layer_names: Mapping[str, str] = field(default_factory=dict[str, str])


ARCHITECTURES = {
    "llama": GgufArchitecture(hf_class="LlamaForCausalLM", is_interleaved=True),
    "phi3": GgufArchitecture(
        hf_class="Phi3ForCausalLM", layer_names={"ffn_up": "mlp.gate_up_proj"}
    ),
    "qwen2": GgufArchitecture(hf_class="Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture(hf_class="Qwen3ForCausalLM"),
}

EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({_FREQUENCIES, _LONG, _SHORT})
# Factors of other families, which change every number; those read here leave them out.
_SCALES = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")


class GgufFields:
    """Typed look-ups of `<architecture>.<key>` in the metadata."""

    def __init__(self, file: GgufFile) -> None:
        """Looks up nothing yet."""
        self.path = file.path
        self.architecture = str(file.metadata.get("general.architecture"))
        self._metadata = file.metadata

    def get(self, key: str) -> object:
        """Value of the key, or None. An array that repeats one value counts as that value."""
        value = self._metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, np.ndarray):
            return value
        items = value.tolist()
        return items[0] if len(set(items)) == 1 else items

    def integer(self, key: str, *, default: int | None = None) -> int:
        """A positive integer; without a default it is required."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "a positive integer", value)
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A positive number; without a default it is required."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, "a positive number", value)
        return value

    def expect(self, key: str, wanted: int) -> None:
        """Refuses a value that is present and differs from what is computed."""
        if self.integer(key, default=wanted) != wanted:
            raise self.error(key, f"{wanted} to be supported", self.get(key))

    def error(self, key: str, rule: str, value: object) -> CheckpointError:
        """An error about one key."""
        shown = "nothing" if value is None else f"{value!r:.80}"
        return CheckpointError(
            f"{self.path}: metadata {self.architecture}.{key} must be {rule}, got {shown}"
        )


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """What the file's architecture means.

    Raises:
        CheckpointError: it is not supported; lists those that are.
    """
    name = file.metadata.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(
            f"{file.path}: architecture {name!r} is not supported; supported GGUF "
            f"architectures: {', '.join(ARCHITECTURES)}"
        )
    return found


def hf_config(file: GgufFile, num_layers_present: int) -> dict[str, Any]:
    """The file's model as a config.json of transformers 4 would describe it.

    Raises:
        CheckpointError: metadata is missing, wrong, or asks for what is not computed.
    """
    fields, architecture = GgufFields(file), architecture_of(file)
    _refuse_unsupported(file, fields)
    if EMBEDDING not in file.tensors or len(file.tensors[EMBEDDING].shape) != 2:
        raise CheckpointError(f"{file.path}: {EMBEDDING} is missing or no matrix")
    vocab_size, hidden_size = file.tensors[EMBEDDING].shape
    fields.expect("embedding_length", hidden_size)
    num_layers = fields.integer("block_count")
    if num_layers != num_layers_present:
        raise CheckpointError(
            f"{file.path}: block_count is {num_layers} but tensors of {num_layers_present} layers "
            "are present; split files must be merged first (llama-gguf-split --merge)"
        )
    num_heads = fields.integer("attention.head_count")
    head_dim, rotary_dim = _head_dims(
        fields, architecture, default=max(hidden_size // num_heads, 1)
    )
    rope = _rope(file, fields)
    if rotary_dim != head_dim:  # a config.json's plain kind turns whole heads: name one that does
        rope = {"rope_scaling": {"rope_type": "linear", "factor": 1.0}} | rope
    return {
        "architectures": [architecture.hf_class],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "partial_rotary_factor": _share(rotary_dim, head_dim),
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": _HEAD not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        **_window(fields, architecture),
        **rope,
    }


def read_pooling(file: GgufFile) -> PoolingConfig:
    """How the file's model makes embeddings: of the last token unless the file says otherwise.

    Raises:
        CheckpointError: it names a pooling that is not computed.
    """
    fields = GgufFields(file)
    kind = fields.get("pooling_type")
    if kind not in (None, 0, 1, 3):
        raise fields.error("pooling_type", "0 (none), 1 (mean) or 3 (last)", kind)
    return PoolingConfig(kind="mean" if kind == 1 else "last")


def _head_dims(
    fields: GgufFields, architecture: GgufArchitecture, *, default: int
) -> tuple[int, int]:
    """Dimensions of a head, and how many of them turn."""
    rotary_dim = fields.get("rope.dimension_count")
    if architecture.is_interleaved and rotary_dim is not None:  # its rows are sorted head by head
        default = fields.integer("rope.dimension_count")
    head_dim = fields.integer("attention.key_length", default=default)
    fields.expect("attention.value_length", head_dim)
    if architecture.is_interleaved:
        fields.expect("rope.dimension_count", head_dim)
    return head_dim, fields.integer("rope.dimension_count", default=head_dim)


def _share(part: int, whole: int) -> float:
    """Part / whole, such that int(share * whole) is `part` again."""
    share = part / whole
    return share if int(share * whole) == part else math.nextafter(share, math.inf)


def _window(fields: GgufFields, architecture: GgufArchitecture) -> dict[str, Any]:
    """The sliding window; llama files that have one are Mistral's."""
    if fields.get("attention.sliding_window") in (None, 0):
        return {"sliding_window": None}
    window = fields.integer("attention.sliding_window")
    if architecture.hf_class == "LlamaForCausalLM":
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    if architecture.hf_class == "Phi3ForCausalLM":
        return {"sliding_window": window}
    raise fields.error("attention.sliding_window", "0 to be supported in this family", window)


def _rope(file: GgufFile, fields: GgufFields) -> dict[str, Any]:
    """Base and scaling of the rotary embedding, from metadata or from tensors of factors."""
    theta = {"rope_theta": fields.number("rope.freq_base", default=10000.0)}
    kind, factor = _scaling(fields)
    original = fields.integer(
        "rope.scaling.original_context_length", default=fields.integer("context_length")
    )
    # 1 unless the file says otherwise, while a config.json would leave it to be computed.
    attention = fields.number("rope.scaling.attn_factor", default=1.0)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if ROPE_TENSORS & file.tensors.keys():
        if kind not in ("none", "longrope"):
            raise fields.error("rope.scaling.type", "none beside tensors of RoPE factors", kind)
        short, long = (_factors(file, name) for name in (_SHORT, _LONG))
        scaling = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": attention,
        }
    elif kind == "none":
        return theta
    elif kind == "yarn":
        scaling |= _yarn(fields, factor, attention)
    elif kind == "longrope":
        raise CheckpointError(
            f"{file.path}: longrope needs {_LONG} and {_SHORT}, which are missing"
        )
    return theta | {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _scaling(fields: GgufFields) -> tuple[str, float]:
    """Kind and factor; a factor without a kind is linear."""
    legacy = fields.get("rope.scale_linear")
    factor = fields.get("rope.scaling.factor") or legacy or 1.0
    kind = fields.get("rope.scaling.type")
    if not isinstance(factor, float) or not math.isfinite(factor) or factor <= 0:
        raise fields.error("rope.scaling.factor", "a positive number", factor)
    if kind is None:
        return ("none" if factor == 1.0 else "linear"), factor
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise fields.error("rope.scaling.type", "none, linear, yarn or longrope", kind)
    return str(kind), factor


def _yarn(fields: GgufFields, factor: float, attention: float) -> dict[str, Any]:
    if fields.get("rope.scaling.yarn_log_multiplier") not in (None, 0.0, 0.1):
        value = fields.get("rope.scaling.yarn_log_multiplier")
        raise fields.error("rope.scaling.yarn_log_multiplier", "0.1 to be supported", value)
    return {
        "attention_factor": attention * yarn_attention_factor(factor),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", default=32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", default=1.0),
    }


def _factors(file: GgufFile, name: str) -> list[float]:
    """Divisors of the frequencies: one tensor for all contexts (Llama 3.1), or two (longrope)."""
    name = _FREQUENCIES if _FREQUENCIES in file.tensors else name
    return file.read(name).ravel().tolist()


def _refuse_unsupported(file: GgufFile, fields: GgufFields) -> None:
    """Stops at anything that would change the model's function and is not computed."""
    num_parts = file.metadata.get("split.count", 0)
    if isinstance(num_parts, int) and num_parts > 1:
        raise CheckpointError(
            f"{file.path}: one of {num_parts} parts of a split GGUF, which is not supported; merge "
            "them with llama-gguf-split --merge"
        )
    if fields.get("expert_count") not in (None, 0):
        raise CheckpointError(
            f"{file.path}: metadata {fields.architecture}.expert_count is "
            f"{fields.get('expert_count')}, which is not supported; use a dense model"
        )
    if fields.get("attention.causal") is False:
        raise fields.error("attention.causal", "true to be supported", False)
    for key in _SCALES:
        if fields.get(key) not in (None, 0.0, 1.0):
            raise fields.error(key, "1 to be supported", fields.get(key))
