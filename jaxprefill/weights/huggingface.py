"""A Hugging Face folder as a checkpoint: config.json, safetensors, tokenizer.json.

Knows which files belong to a model and which tensors are no parameters; no architecture.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxprefill.config import ModelConfig
from jaxprefill.errors import CheckpointError, ConfigError
from jaxprefill.models.registry import read_config
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.weights.hf_tokenizer import read_tokenizer
from jaxprefill.weights.json_file import read_object
from jaxprefill.weights.safetensors_files import SafetensorsFiles
from jaxprefill.weights.sentence_transformers import read_pooling

_HEAD = "lm_head.weight"
_BARE_EMBEDDING = "embed_tokens.weight"
# Tables that old versions saved beside the parameters, computed from the config.
_BUFFERS = (".inv_freq", ".cos_cached", ".sin_cached")


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
        self.config: ModelConfig = replace(
            config,
            pooling=read_pooling(folder) or config.pooling,
            has_lm_head=config.has_lm_head and not self._is_headless(config),
        )
        self._stored = self._stored_names()
        for stored in self._stored.values():
            self._files.require_readable(stored)

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
        return self._files.tensors[self._stored_name(name)].shape

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in the type it is stored in."""
        return self._files.read(self._stored_name(name))

    def _stored_name(self, name: str) -> str:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"{self._folder}: no tensor named {name!r}")
        return stored

    def _is_headless(self, config: ModelConfig) -> bool:
        """Whether the body alone was saved, as for embedding models, whatever config.json says."""
        names = self._files.tensors
        return not config.is_embedding_tied and _BARE_EMBEDDING in names and _HEAD not in names

    def _stored_names(self) -> dict[str, str]:
        """Canonical name -> name in the file, which lacks `model.` in headless checkpoints."""
        names = [name for name in self._files.tensors if not name.endswith(_BUFFERS)]
        is_bare = _BARE_EMBEDDING in names
        bare = ("embed_tokens.", "layers.", "norm.")
        stored = {
            f"model.{name}" if is_bare and name.startswith(bare) else name: name for name in names
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
