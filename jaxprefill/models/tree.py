"""A model as plain leaves: what executables take as operands, and how they rebuild the modules.

jit flattens custom pytrees in Python on every call; a tuple of arrays it flattens in C++.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from jaxprefill.config import ModelConfig
from jaxprefill.models.decoder import Decoder, DecoderLayer
from jaxprefill.models.registry import model_class
from jaxprefill.models.sharding import named_sharding

Leaves = tuple[Array, ...]
AnyLeaf = TypeVar("AnyLeaf", Array, jax.ShapeDtypeStruct)  # shapes are enough to lower with


@dataclass(frozen=True)
class ModelTree:
    """The structure of a model without its arrays.

    Attributes:
        paths: parameter path of each leaf, in the order of the leaves.
        shapes: shape, dtype and sharding of each leaf.
    """

    config: ModelConfig
    graph: Any
    structure: Any
    layer_graph: Any
    layer_structure: Any
    paths: tuple[str, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def bind(self, leaves: Leaves) -> Decoder:
        """The model over these arrays (or tracers)."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.structure, leaves))

    def layer_leaves(self, leaves: tuple[AnyLeaf, ...], layer: int) -> tuple[AnyLeaf, ...]:
        """The arrays of one layer, in the order `bind_layer` expects."""
        prefix = f"layers.{layer}."
        pairs = zip(self.paths, leaves, strict=True)
        return tuple(leaf for path, leaf in pairs if path.startswith(prefix))

    def bind_layer(self, leaves: Leaves) -> DecoderLayer:
        """A layer over the arrays of `layer_leaves`; all layers share one structure."""
        return nnx.merge(self.layer_graph, jax.tree.unflatten(self.layer_structure, leaves))

    def leaf(self, leaves: tuple[AnyLeaf, ...], path: str) -> AnyLeaf:
        """The array of one parameter."""
        return leaves[self.paths.index(path)]

    def head(self, leaves: tuple[AnyLeaf, ...]) -> AnyLeaf:
        """The LM head [V, E]: its own, or the embedding where they are tied."""
        return self.leaf(leaves, "embedding" if self.config.is_embedding_tied else "head")


def model_tree(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> ModelTree:
    """The structure of a model, no array made."""
    model = nnx.eval_shape(lambda: model_class(config)(config, dtype))
    graph, state = nnx.split(model)
    paths: list[str] = []
    shapes: list[jax.ShapeDtypeStruct] = []
    for path, variable in nnx.to_flat_state(state):
        paths.append(".".join(str(part) for part in path))
        value = variable.get_value() if hasattr(variable, "get_value") else variable.value
        sharding = named_sharding(mesh, variable.get_metadata()["axes"])
        shapes.append(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
    layer_graph, layer_state = nnx.split(model.layers[0])
    return ModelTree(
        config=config,
        graph=graph,
        structure=jax.tree.structure(state),
        layer_graph=layer_graph,
        layer_structure=jax.tree.structure(layer_state),
        paths=tuple(paths),
        shapes=tuple(shapes),
    )
