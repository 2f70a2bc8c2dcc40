"""A model as plain leaves: what executables take as operands, and how they rebuild the modules.

jit flattens custom pytrees in Python on every call; a tuple of arrays it flattens in C++.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int32

from jaxprefill.config import KernelKind, ModelConfig
from jaxprefill.errors import ConfigError
from jaxprefill.models.decoder import Decoder, DecoderLayer
from jaxprefill.models.layers import WeightByLayer, weight_by_layer
from jaxprefill.models.quantized import SCALE
from jaxprefill.models.registry import model_class
from jaxprefill.models.sharding import LogicalAxes, named_sharding, share_of

Leaves = tuple[Array, ...]
LayerLeaves = tuple[Array | WeightByLayer, ...]
AnyLeaf = TypeVar("AnyLeaf", Array, jax.ShapeDtypeStruct)  # shapes are enough to lower with


@dataclass(frozen=True)
class ModelTree:
    """The structure of a model without its arrays.

    Attributes:
        config: the whole model.
        share: one device's part of it: the sizes that the modules know.
        paths: parameter path of each leaf, in the order of the leaves.
        shapes: shape, dtype and sharding of each leaf, over all devices.
        forms: which of the kinds of layers each layer is: those of one form share a structure.
        whole_shapes: the same without what sharing adds (repeated KV heads, vocabulary padding).
    """

    config: ModelConfig
    share: ModelConfig
    graph: Any
    structure: Any
    layer_graphs: tuple[Any, ...]
    forms: tuple[int, ...]
    paths: tuple[str, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    whole_shapes: tuple[tuple[int, ...], ...]

    def bind(self, leaves: Leaves) -> Decoder:
        """The model over these arrays (or tracers)."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.structure, leaves))

    def layer_leaves(self, leaves: tuple[AnyLeaf, ...], layer: int) -> tuple[AnyLeaf, ...]:
        """The arrays of one layer, in the order `bind_layer` expects."""
        prefix = f"layers.{layer}."
        pairs = zip(self.paths, leaves, strict=True)
        return tuple(leaf for path, leaf in pairs if path.startswith(prefix))

    def looped_leaves(
        self, leaves: Leaves, layers: tuple[int, ...], at: Int32[Array, ""]
    ) -> LayerLeaves:
        """The leaves of layer `layers[at]`, where `at` is known on the device only."""
        each = (self.layer_leaves(leaves, layer) for layer in layers)
        return tuple(weight_by_layer(arrays, at) for arrays in zip(*each, strict=True))

    def bind_layer(self, leaves: LayerLeaves, form: int = 0) -> DecoderLayer:
        """A layer of this form over its own leaves, however they are picked."""
        graph, structure = self.layer_graphs[form]
        return nnx.merge(graph, jax.tree.unflatten(structure, leaves))

    def leaf(self, leaves: tuple[AnyLeaf, ...], path: str) -> AnyLeaf:
        """The array of one parameter."""
        return leaves[self.paths.index(path)]

    def head(self, leaves: tuple[AnyLeaf, ...]) -> AnyLeaf:
        """The LM head [V, E]: its own, or the embedding where they are tied or none is used."""
        return self.leaf(leaves, "head" if self.config.has_own_head else "embedding")

    def classifier(self, leaves: tuple[AnyLeaf, ...]) -> AnyLeaf | None:
        """The head over labels, of models that have one."""
        return None if self.config.classifier is None else self.leaf(leaves, "classifier")


def model_tree(
    config: ModelConfig, dtype: jnp.dtype, mesh: Mesh, *, kernels: KernelKind = "xla"
) -> ModelTree:
    """The structure of a model whose layers are shared out over `mesh`, no array made.

    `kernels` is what its experts run in (see `ModelConfig`).

    Raises:
        ConfigError: the model cannot be shared out evenly, or not be quantised.
    """
    share = replace(share_of(config, mesh.size), kernels=kernels)
    model = nnx.eval_shape(lambda: model_class(config)(share, dtype))
    graph, state = nnx.split(model)
    flat = _flat_shapes(state)
    if config.quantization is not None and not any(path.endswith(SCALE) for path in flat):
        raise ConfigError(
            f"quantization must be none for {config.architecture}, got {config.quantization}: its "
            "layers take no weights in eight bits"
        )
    whole = flat
    if mesh.size > 1:
        whole_model = nnx.eval_shape(lambda: model_class(config)(config, dtype))
        whole = _flat_shapes(nnx.state(whole_model))
    shapes: list[jax.ShapeDtypeStruct] = []
    for shape, kind, axes in flat.values():
        sharding = named_sharding(mesh, axes)
        shapes.append(jax.ShapeDtypeStruct(_joined(shape, sharding), kind, sharding=sharding))
    graphs: dict[Any, int] = {}
    forms = tuple(graphs.setdefault(_structure(layer), len(graphs)) for layer in model.layers)
    return ModelTree(
        config=config,
        share=share,
        graph=graph,
        structure=jax.tree.structure(state),
        layer_graphs=tuple(graphs),
        forms=forms,
        paths=tuple(flat),
        shapes=tuple(shapes),
        whole_shapes=tuple(whole[path][0] for path in flat),
    )


def _structure(layer: nnx.Module) -> tuple[Any, Any]:
    """(graph, tree of the state): equal for layers that differ in nothing but their arrays."""
    graph, state = nnx.split(layer)
    return graph, jax.tree.structure(state)


def _flat_shapes(state: Any) -> dict[str, tuple[tuple[int, ...], jnp.dtype, LogicalAxes]]:
    """(shape, dtype, logical axes) by parameter path."""
    found: dict[str, tuple[tuple[int, ...], jnp.dtype, LogicalAxes]] = {}
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value() if hasattr(variable, "get_value") else variable.value
        name = ".".join(str(part) for part in path)
        found[name] = (value.shape, value.dtype, variable.get_metadata()["axes"])
    return found


def _joined(shape: tuple[int, ...], sharding: NamedSharding) -> tuple[int, ...]:
    """The shape of an array whose share on each device has `shape`."""
    spec, size = sharding.spec, sharding.mesh.size
    return tuple(n if part is None else n * size for n, part in zip(shape, spec, strict=True))
