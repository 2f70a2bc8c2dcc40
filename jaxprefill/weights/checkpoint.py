"""What every checkpoint format offers: a config, a tokenizer and named tensors."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Shaped

from jaxprefill.config import ModelConfig
from jaxprefill.tokenizer import Tokenizer


@runtime_checkable
class Checkpoint(Protocol):
    """A readable model, whatever its file format.

    Tensor names are the canonical ones of Hugging Face, such as
    `model.layers.0.self_attn.q_proj.weight`; matrices are [out, in].
    """

    @property
    def name(self) -> str:
        """What the model is called when nobody names it otherwise."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Sizes and constants of the model."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own tokenizer; built on first use.

        Raises:
            CheckpointError: the checkpoint describes a tokenizer that cannot be built.
        """
        ...

    def names(self) -> frozenset[str]:
        """All tensors. One that has no canonical name appears under the name in the file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape that `read(name)` will return.

        Raises:
            CheckpointError: there is no such tensor.
        """
        ...

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as float32, or in the half-precision type that it is stored in.

        Whoever needs another type casts: bfloat16 to bfloat16 is a copy of the bits, without
        twice its size in between. Rows of q and k are in half-rotation RoPE order.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be decoded.
        """
        ...


@runtime_checkable
class LeafCheckpoint(Checkpoint, Protocol):
    """One that holds the model's own arrays, fused as the model takes them."""

    def restore(
        self, shapes: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, Shaped[Array, "..."]]:
        """Whole arrays by parameter path, cast and placed as their shapes say.

        Raises:
            CheckpointError: a file is not what was written, or cannot be read.
        """
        ...
