"""A Hugging Face folder as a checkpoint: config.json, safetensors, tokenizer.json.

Knows which files belong to a model and which tensors are no parameters; no architecture.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxprefill.config import ModelConfig
from jaxprefill.errors import CheckpointError, ConfigError
from jaxprefill.models.decoder import TensorIndex
from jaxprefill.models.hf_quantization import read_block_size
from jaxprefill.models.registry import model_class, read_config
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.weights.block_scales import dequantize, require_scaled, scaled_shape
from jaxprefill.weights.hf_tokenizer import read_tokenizer
from jaxprefill.weights.json_file import read_object
from jaxprefill.weights.safetensors_files import SafetensorsFiles
from jaxprefill.weights.sentence_transformers import read_pooling

_HEAD = "lm_head.weight"
_BARE_EMBEDDING = "embed_tokens.weight"
# Tables that old versions saved beside the parameters, computed from the config.
_BUFFERS = (".inv_freq", ".cos_cached", ".sin_cached")
_SCALES = (".scale", ".weight_scale_inv")


class _Stored(NamedTuple):
    """Where a parameter's tensor lies, and the scales of its blocks if it has any."""

    name: str
    at: TensorIndex = ()
    scale: str | None = None


class HuggingFaceCheckpoint:
    """A model's folder; implements `Checkpoint`."""

    def __init__(self, folder: Path, *, name: str | None = None) -> None:
        """Reads the configuration and the headers of the weights, no weights.

        Raises:
            CheckpointError: a file is missing or malformed, or the model is not supported.
        """
        self.name = name or folder.resolve().name
        self._folder = folder
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder}: must hold config.json, which is missing; name the folder of a whole "
                "Hugging Face model"
            )
        self._hf_config = read_object(folder / "config.json")
        try:
            config = read_config(self._hf_config)
        except (CheckpointError, ConfigError) as error:
            raise CheckpointError(f"{folder}: {error}") from error
        self._files = SafetensorsFiles(folder)
        self._block = read_block_size(self._hf_config)
        stored = self._named(config)
        is_headless = (
            not config.is_embedding_tied and _BARE_EMBEDDING in stored and _HEAD not in stored
        )
        self.config: ModelConfig = replace(
            config,
            pooling=read_pooling(folder) or config.pooling,
            has_lm_head=config.has_lm_head and not is_headless,
        )
        self._stored = self._parameters(stored)
        for each in self._stored.values():
            self._require_readable(each)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the folder."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return read_tokenizer(self._folder, self._hf_config)

    def names(self) -> frozenset[str]:
        """All parameters; buffers, and a head that the embedding replaces, are left out."""
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        stored = self._found(name)
        tensor = self._files.tensors[stored.name]
        shape = tensor.shape if stored.scale is None else scaled_shape(tensor)
        parts = [range(size)[index] for size, index in zip(shape, stored.at, strict=False)]
        kept = [len(part) for part in parts if isinstance(part, range)]
        return (*kept, *shape[len(stored.at) :])

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in the type it is stored in; one with scales as `dequantize` does."""
        stored = self._found(name)
        values = self._files.read(stored.name, stored.at)
        if stored.scale is None or self._block is None:
            return values
        return dequantize(values, self._files.read(stored.scale), self._block)

    def _found(self, name: str) -> _Stored:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"{self._folder}: no tensor named {name!r}")
        return stored

    def _require_readable(self, stored: _Stored) -> None:
        tensors = self._files.tensors
        if stored.scale is None:
            self._files.require_readable(stored.name)
            return
        try:
            weight, scale = tensors[stored.name], tensors[stored.scale]
            require_scaled(stored.name, weight, scale, self._block)
        except CheckpointError as error:
            raise CheckpointError(f"{self._folder}: {error}") from error

    def _named(self, config: ModelConfig) -> dict[str, _Stored]:
        """Every tensor but buffers, by the name that its architecture gives it."""
        found: dict[str, _Stored] = {}
        for name, tensor in self._files.tensors.items():
            if name.endswith(_BUFFERS):
                continue
            for own, at in model_class(config).parts_of(name, tensor.shape).items():
                if own in found:
                    raise CheckpointError(
                        f"{self._folder}: {own} must be stored once, but is there as "
                        f"{found[own].name} and as {name}; fetch the model again"
                    )
                found[own] = _Stored(name, at)
        for suffix in _SCALES:
            for name in [each for each in found if each.endswith(suffix)]:
                stem = name.removesuffix(suffix)
                weight = stem if stem in found else f"{stem}.weight"
                if weight in found:
                    found[weight] = found[weight]._replace(scale=found.pop(name).name)
        return found

    def _parameters(self, named: dict[str, _Stored]) -> dict[str, _Stored]:
        """The same under canonical names: headless checkpoints lack `model.` before them."""
        is_bare = _BARE_EMBEDDING in named
        bare = ("embed_tokens.", "layers.", "norm.", "hc_head.")
        stored = {
            f"model.{name}" if is_bare and name.startswith(bare) else name: each
            for name, each in named.items()
        }
        if not self.config.has_own_head:  # saved all the same by some versions, and never used
            stored.pop(_HEAD, None)
        elif _HEAD not in stored:
            raise CheckpointError(
                f"{self._folder}: {_HEAD} must be there, as tie_word_embeddings is false, but is "
                "missing; fetch the whole model, or set tie_word_embeddings in config.json if the "
                "embedding is the head"
            )
        return stored
