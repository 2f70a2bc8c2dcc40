"""A GGUF file as a checkpoint: Hugging Face names and row order for its tensors.

Knows how GGUF names and sorts tensors; metadata is gguf_config's, the container gguf_file's.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from jaxprefill.config import ModelConfig
from jaxprefill.errors import CheckpointError, ConfigError
from jaxprefill.models.registry import read_config
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.weights.gguf_config import (
    ROPE_TENSORS,
    architecture_of,
    hf_config,
    read_pooling,
)
from jaxprefill.weights.gguf_file import GgufFile
from jaxprefill.weights.gguf_tokenizer import build_tokenizer

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
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)\.(weight|bias)")


class GgufCheckpoint:
    """A GGUF file; implements `Checkpoint`."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Opens the file and reads its metadata, no weights.

        Raises:
            CheckpointError: the file is not valid GGUF, or its model is not supported.
        """
        self.name = name or path.stem
        self._file = GgufFile(path)
        self._architecture = architecture_of(self._file)
        names = _LAYER_NAMES | dict(self._architecture.layer_names)
        stored = [name for name in self._file.tensors if name not in ROPE_TENSORS]
        self._gguf_names = {_canonical_name(name, names): name for name in stored}
        if len(self._gguf_names) != len(stored):
            raise CheckpointError(f"{path}: two tensors have the same canonical name")
        for name in self._file.tensors:
            self._file.require_readable(name)
        values = hf_config(self._file, _num_layers_present(self._file))
        pooling = read_pooling(self._file)
        try:
            self.config: ModelConfig = replace(read_config(values), pooling=pooling)
        except (CheckpointError, ConfigError) as error:
            raise CheckpointError(f"{path}: metadata, as {error}") from error

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
        if not self._architecture.is_interleaved:
            return values
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

    def _half_rotation_rows(
        self, name: str, values: Shaped[np.ndarray, "rows *in"], num_heads: int
    ) -> Shaped[np.ndarray, "rows *in"]:
        """Undoes the row order of llama files, where RoPE rotates neighbouring rows.

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


def _canonical_name(gguf_name: str, layer_names: Mapping[str, str]) -> str:
    """Hugging Face's name of a tensor, or the GGUF name when there is none."""
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    if match is None or match[2] not in layer_names:
        return gguf_name
    return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"


def _num_layers_present(file: GgufFile) -> int:
    matches = (_LAYER_TENSOR.fullmatch(name) for name in file.tensors)
    return len({int(match[1]) for match in matches if match is not None})
