"""A GGUF file as a checkpoint: config from its metadata, Hugging Face names for its tensors.

Knows the tensor layout of GGUF's `llama` architecture; the container itself is gguf_file's.
"""

import math
import re
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxprefill.config import ModelConfig, RopeConfig
from jaxprefill.errors import CheckpointError, ConfigError
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.weights.gguf_file import GgufFile
from jaxprefill.weights.gguf_tokenizer import build_tokenizer

# GGUF's general.architecture -> the Hugging Face class that computes the same function.
SUPPORTED_ARCHITECTURES = {"llama": "LlamaForCausalLM"}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)\.(weight|bias)")
_EMBEDDING = "model.embed_tokens.weight"
_ROPE_FREQUENCIES = "rope_freqs.weight"


class GgufCheckpoint:
    """A llama-architecture GGUF file; implements `Checkpoint`."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Opens the file and reads its metadata, no weights.

        Raises:
            CheckpointError: the file is not valid GGUF, or its model is not supported.
        """
        self.name = name or path.stem
        self._file = GgufFile(path)
        self._gguf_names = {_canonical_name(gguf): gguf for gguf in self._file.tensors}
        if len(self._gguf_names) != len(self._file.tensors):
            raise CheckpointError(f"{path}: two tensors have the same canonical name")
        _refuse_unsupported(self._file)
        self.config = self._read_config()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer described by the metadata."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = build_tokenizer(self._file.metadata, path=self._file.path)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise CheckpointError(
                f"{self._file.path}: the tokenizer knows {tokenizer.vocab_size} ids but the "
                f"embedding has {self.config.vocab_size} rows; file is corrupt"
            )
        return tokenizer

    def names(self) -> frozenset[str]:
        """All tensors, canonical where known, else under their GGUF name."""
        return frozenset(self._gguf_names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._file.tensors[self._gguf_name(name)].shape

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as float32, q and k rows in half-rotation order."""
        values = self._file.read(self._gguf_name(name))
        if ".q_proj." in name:
            return self._half_rotation_rows(name, values, self.config.num_q_heads)
        if ".k_proj." in name:
            return self._half_rotation_rows(name, values, self.config.num_kv_heads)
        return values

    def _gguf_name(self, name: str) -> str:
        gguf_name = self._gguf_names.get(name)
        if gguf_name is None:
            raise CheckpointError(f"{self._file.path}: no tensor named {name!r}")
        return gguf_name

    def _half_rotation_rows(self, name: str, values: np.ndarray, num_heads: int) -> np.ndarray:
        """Undoes the row order of llama GGUFs, where RoPE rotates neighbouring rows.

        One head of D rows:  GGUF  0 D/2 1 D/2+1 ...  ->  Hugging Face  0 1 ... D/2 D/2+1 ...
        """
        head_dim = self.config.head_dim
        if len(values) != num_heads * head_dim:
            raise CheckpointError(
                f"{self._file.path}: {name} must have {num_heads} heads x {head_dim} rows, "
                f"got {len(values)}; file is corrupt"
            )
        pairs = values.reshape(num_heads, head_dim // 2, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)

    def _read_config(self) -> ModelConfig:
        fields = _Fields(self._file)
        if _EMBEDDING not in self._gguf_names or len(self.shape(_EMBEDDING)) != 2:
            raise CheckpointError(f"{self._file.path}: token_embd.weight is missing or no matrix")
        vocab_size, hidden_size = self.shape(_EMBEDDING)
        fields.expect("embedding_length", hidden_size)
        num_layers = fields.integer("block_count")
        if num_layers != _num_layers_present(self._file):
            raise CheckpointError(
                f"{self._file.path}: block_count is {num_layers} but tensors of "
                f"{_num_layers_present(self._file)} layers are present; split files must be "
                "merged first (llama-gguf-split --merge)"
            )
        num_q_heads = fields.integer("attention.head_count")
        head_dim = _head_dim(fields, default=hidden_size // num_q_heads)
        try:
            return ModelConfig(
                architecture=SUPPORTED_ARCHITECTURES[fields.architecture],
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                mlp_size=fields.integer("feed_forward_length"),
                num_layers=num_layers,
                num_q_heads=num_q_heads,
                num_kv_heads=fields.integer("attention.head_count_kv", default=num_q_heads),
                head_dim=head_dim,
                context_length=fields.integer("context_length"),
                norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
                rope=RopeConfig(theta=fields.number("rope.freq_base", default=10000.0)),
                is_embedding_tied="lm_head.weight" not in self._gguf_names,
            )
        except ConfigError as error:
            raise CheckpointError(f"{self._file.path}: {error}") from error


class _Fields:
    """Typed look-ups of `<architecture>.<key>` in the metadata."""

    def __init__(self, file: GgufFile) -> None:
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
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(key, "a positive integer", value)
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise self._error(key, "a positive number", value)
        return value

    def expect(self, key: str, wanted: int) -> None:
        """Refuses a value that is present and differs from what is computed."""
        if self.integer(key, default=wanted) != wanted:
            raise self._error(key, f"{wanted} to be supported", self.get(key))

    def _error(self, key: str, rule: str, value: object) -> CheckpointError:
        shown = "nothing" if value is None else repr(value)
        return CheckpointError(
            f"{self.path}: metadata {self.architecture}.{key} must be {rule}, got {shown}"
        )


def _canonical_name(gguf_name: str) -> str:
    """Hugging Face's name of a tensor, or the GGUF name when there is none."""
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    if match is None or match[2] not in _LAYER_NAMES:
        return gguf_name
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _num_layers_present(file: GgufFile) -> int:
    matches = (_LAYER_TENSOR.fullmatch(name) for name in file.tensors)
    return len({int(match[1]) for match in matches if match is not None})


def _head_dim(fields: _Fields, *, default: int) -> int:
    head_dim = fields.integer(
        "attention.key_length", default=fields.integer("rope.dimension_count", default=default)
    )
    fields.expect("attention.value_length", head_dim)
    fields.expect("rope.dimension_count", head_dim)  # partial rotation
    return head_dim


def _refuse_unsupported(file: GgufFile) -> None:
    """Stops at anything that would change the model's function and is not computed."""
    fields = _Fields(file)
    path = file.path
    if fields.architecture not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {fields.architecture!r} is not supported; supported GGUF "
            f"architectures: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    num_parts = file.metadata.get("split.count", 0)
    if isinstance(num_parts, int) and num_parts > 1:
        raise CheckpointError(
            f"{path}: one of {num_parts} parts of a split GGUF, which is not supported; merge "
            "them with llama-gguf-split --merge"
        )
    scaling = fields.get("rope.scaling.type")
    if _ROPE_FREQUENCIES in file.tensors:
        scaling = f"per-frequency factors in {_ROPE_FREQUENCIES}"
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if scaling is None and fields.get(key) not in (None, 0, 1):
            scaling = f"{key} {fields.get(key)}"
    if scaling not in (None, "none"):
        raise CheckpointError(
            f"{path}: RoPE scaling ({scaling}) is not supported yet; use a model without it"
        )
    for key in ("expert_count", "attention.sliding_window"):
        if fields.get(key) not in (None, 0):
            raise CheckpointError(
                f"{path}: metadata {fields.architecture}.{key} is {fields.get(key)}, which is "
                "not supported yet; use a dense model with full attention"
            )
